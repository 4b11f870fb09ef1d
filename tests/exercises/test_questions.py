"""Each session has ten questions with folded answers, and the pages of the frame lead to them."""

import re
import sys

import pytest

from common.versions import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "exercises"))
from sessions import SESSIONS

TEXT = (REPOSITORY / "exercises" / "QUESTIONS.md").read_text(encoding="utf-8")
SECTIONS = [section for section in re.split("^## ", TEXT, flags=re.MULTILINE) if "<details>" in section]


def test_every_session_but_the_optional_one_has_questions():
    assert len(SECTIONS) == len(SESSIONS) - 1


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.splitlines()[0])
def test_a_session_has_ten_questions_and_ten_folded_answers(section):
    for part in section.split("<details>"):
        assert re.findall(r"^(\d+)\. ", part, re.MULTILINE) == [str(number) for number in range(1, 11)]


@pytest.mark.parametrize(
    "page", ["version3_triton/README_WORKSHOP.md", "exercises/README.md", "exercises/INSTRUCTOR.md"]
)
def test_every_page_of_the_frame_links_the_questions(page):
    assert "QUESTIONS.md)" in (REPOSITORY / page).read_text(encoding="utf-8")
