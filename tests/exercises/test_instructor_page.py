"""The instructor's page answers every deliverable of the timetable."""

import re
import sys

import pytest

from common.versions import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "exercises"))
from sessions import SESSIONS

TEXT = (REPOSITORY / "exercises" / "INSTRUCTOR.md").read_text(encoding="utf-8")
ASKS = re.compile(r"\*\*Deliverable|[Hh]and in")


def asking():
    """Return the pages of the timetable that ask for a deliverable, as the instructor's page links them."""
    pages = [page for _, _, work in SESSIONS.values() for _, page, _ in work]
    pages = [page for page in pages if ASKS.search((REPOSITORY / page).read_text(encoding="utf-8"))]
    return [page.removeprefix("exercises/") if page.startswith("exercises/") else f"../{page}" for page in pages]


@pytest.mark.parametrize("link", [link for link in asking() if not link.endswith("exercise_3_rocm_tools.md")])
def test_every_deliverable_is_answered(link):
    """But the hottest kernel of an AMD GPU, where nothing has been measured."""
    (answer,) = re.findall(rf"^\| \[[^|]*\]\({re.escape(link)}\) \|(.*)\|$", TEXT, re.MULTILINE)
    assert answer.strip()
