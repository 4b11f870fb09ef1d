"""The instructor's page answers every deliverable of the timetable, and its clocks add up."""

import itertools
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


@pytest.mark.parametrize(
    ("name", "shortest", "longest"),
    [("One day", 6, 8), ("Half a day", 3, 4), ("90 minutes", 1.5, 1.5), ("One hour", 1, 1)],
)
def test_the_clock_of_a_short_workshop(name, shortest, longest):
    section = TEXT.split(f"**{name}**")[1].split("\n**")[0]
    rows = re.findall(r"^\| (\d\d):(\d\d) \| .+ \| (\d*) \|$", section, re.MULTILINE)
    clock = [60 * int(hour) + int(minute) for hour, minute, _ in rows]
    minutes = [int(minutes) for *_, minutes in rows[:-1]]
    assert [end - start for start, end in itertools.pairwise(clock)] == minutes
    assert shortest <= sum(minutes) / 60 <= longest
