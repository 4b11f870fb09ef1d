"""The instructor's page answers every deliverable of the timetable, and its clocks are those of sessions.py."""

import re
import sys

import pytest

from common.versions import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "exercises"))
from sessions import SESSIONS, SHORT_WORKSHOPS, clock_rows

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


@pytest.mark.parametrize("name", SHORT_WORKSHOPS)
def test_the_clock_of_a_short_workshop(name):
    assert "\n".join(clock_rows(name)) in TEXT


def test_a_short_workshop_is_as_long_as_its_name_says():
    hours = {name: sum(minutes for _, _, minutes in work) / 60 for name, work in SHORT_WORKSHOPS.items()}
    assert hours["one hour"] == 1 and hours["half a day"] < 4 and hours["one day"] <= 8
