"""The slides: one deck per session, short enough for a screen, with notes, and with the minutes of the timetable."""

import re
import sys

import pytest
import yaml

from common.versions import REPOSITORY
from maintain.pages import MARKER, TABLE

sys.path.insert(0, str(REPOSITORY / "exercises"))
import sessions

DECKS = {int(path.stem[-1]): path for path in sorted((REPOSITORY / "exercises" / "slides").glob("session*.md"))}
NOTE = re.compile(r"<!--\n(.+?)\n-->", re.DOTALL)
MOST_LINES, MOST_COLUMNS = 17, 84  # what a slide of 1280 x 720 has room for


def deck(number):
    """Return the front matter of a deck and the text of each slide."""
    _, front, text = DECKS[number].read_text(encoding="utf-8").split("---\n", 2)
    return yaml.safe_load(front), text.split("\n---\n")


def visible(slide):
    """Return a slide's lines that take room on the screen, those beside a picture included."""
    return [line for line in MARKER.sub("", TABLE.sub("", NOTE.sub("", slide))).splitlines() if line.strip()]


def test_every_session_has_a_deck_and_the_readme_links_it():
    assert list(DECKS) == [number for number in sessions.SESSIONS if number != 7]
    readme = (REPOSITORY / "exercises" / "slides" / "README.md").read_text(encoding="utf-8")
    assert re.findall(r"\((session\d\.md)\)", readme) == [path.name for path in DECKS.values()]


@pytest.mark.parametrize("number", DECKS)
def test_a_deck_has_its_session_s_idea_and_minutes(number):
    name, idea, _ = sessions.SESSIONS[number]
    front, slides = deck(number)
    assert front == {"marp": True, "theme": "workshop", "paginate": True, "title": f"Session {number}: {name}"}
    assert 8 <= len(slides) <= 12
    assert f"# {front['title']}" in slides[0] and f"**{idea}**" in slides[0]
    (turn,) = (slide for slide in slides if "# Your turn\n" in slide)
    assert [line for line in turn.splitlines() if line.startswith("| [")] == sessions.work_rows(number)
    for kernel in re.findall(r"check\.py (\d\d)", turn)[:1]:
        assert re.search(rf"exercises/{kernel}_\w+/exercise\.py", turn), "in which file do they write?"


@pytest.mark.parametrize("number", DECKS)
def test_a_slide_fits_the_screen_and_has_notes(number):
    """Marp takes a comment such as "class: lead" for a setting, and would show no note."""
    for slide in deck(number)[1]:
        assert len(re.findall("^# ", re.sub("```.*?```", "", slide, flags=re.DOTALL), re.MULTILINE)) == 1
        (note,) = NOTE.findall(slide)
        assert not re.match(r"\w+: ", note), note
        lines = visible(slide)
        assert len(lines) <= MOST_LINES, slide
        code = "\n".join(re.findall("```.*?```", slide, re.DOTALL)).splitlines()
        assert max(map(len, code), default=0) <= MOST_COLUMNS, slide
