"""Lead every reader: each page of the timetable says its session and minutes, and its last link is the next page.

    python scripts/maintain/road.py                # does every page lead on?
    python scripts/maintain/road.py --write        # write the headers and the ends of sessions

The timetable is exercises/sessions.py. From it come the table on version 3's page, the slides' lists of steps, the
header below each page's title and below the title of the stages' guide, and the line before the last Next with which
a session ends. That Next stays in the page's own words, but the last link of the page must lead to the next page. A
page that two sessions use names both.
"""

import os
import pathlib
import re
import sys

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPOSITORY / "scripts"), str(REPOSITORY / "exercises")]

import sessions
from common.command_line import Parser
from maintain.pages import STAGES, write_or_check

HEADER = re.compile(r"\n\*Session \d.*\*\n")
NEXT = re.compile(r"^[^\n]*?(\*+Next\*+:|\*+Next:\*+)", re.MULTILINE)
END = re.compile(r"^\*\*Session \d ends here\.\*\*.*\n\n", re.MULTILINE)
QUESTIONS = "exercises/QUESTIONS.md"
AFTER_THE_LAST = [".github/CONTRIBUTING.md"]


def after_next(text):
    """Return what follows the last Next of a page."""
    found = [match.end() for match in NEXT.finditer(text)]
    return text[found[-1] :] if found else ""


def targets(page, text):
    """Return the targets of the links in a page's text, those in the repository as paths from its top."""
    links = re.findall(r"\]\(([^)#]+)", text)
    return [link if "://" in link else os.path.normpath(os.path.join(os.path.dirname(page), link)) for link in links]


def fault_of_next(page, text):
    """Say in which way the last link of a page doesn't lead to the next page; return None if it does."""
    wanted = sessions.after(page) or AFTER_THE_LAST
    found = targets(page, after_next(text))[-len(wanted) :]
    if found == wanted:
        return None
    return f"its last link is {' and '.join(found) or 'missing'}, the next page is {' and '.join(wanted)}"


def with_header(header, text):
    """Return a page's text with this header below its title."""
    title, _, rest = text.partition("\n")
    header = f"\n*{header}*\n"
    if HEADER.match(rest):
        return title + "\n" + HEADER.sub(lambda _: header, rest, count=1)
    return f"{title}\n{header}{rest}"


def with_end(page, text):
    """Return a page's text with the line that ends its session before its last Next, or without that line."""
    text = END.sub("", text)
    number = sessions.ends(page)
    if number is None or number not in with_questions():
        return text
    anchor = f"session-{number}-{sessions.SESSIONS[number][0].replace(' ', '-').lower()}"
    link = os.path.relpath(QUESTIONS, os.path.dirname(page))
    at = [match.start() for match in NEXT.finditer(text)][-1]
    line = f"**Session {number} ends here.** Answer its [ten questions]({link}#{anchor}).\n\n"
    return text[:at] + line + text[at:]


def with_questions():
    """Return the numbers of the sessions that have questions: all but the optional one."""
    headings = re.findall(r"^## Session (\d): ", (REPOSITORY / QUESTIONS).read_text(), re.MULTILINE)
    return [int(number) for number in headings]


def with_rows(text, rows):
    """Return a text with these rows instead of the lines of a table that begin as the first ones do."""
    lines = text.splitlines(keepends=True)
    start = rows[0][: rows[0].index(" ", 2)]  # "| 1", or "| [version"
    first = next(at for at, line in enumerate(lines) if line.startswith(start))
    end = first
    while lines[end].startswith("|"):
        end += 1
    return "".join([*lines[:first], *(f"{row}\n" for row in rows), *lines[end:]])


def pages():
    """Return {path: text} of the timetable, of the slides and of the timetable's pages as they should be."""
    found = {}
    for page in dict.fromkeys(sessions.steps()):
        text = (REPOSITORY / page).read_text()
        found[REPOSITORY / page] = with_end(page, with_header(sessions.header(page), text))
    guide = STAGES / "WORKSHOP_GUIDE.md"
    stages = (STAGES / "README.md").relative_to(REPOSITORY).as_posix()
    found[guide] = with_header(sessions.guide_header(stages), guide.read_text())
    timetable = REPOSITORY / "version3_triton" / "README_WORKSHOP.md"
    found[timetable] = with_rows(timetable.read_text(), [sessions.table_row(number) for number in sessions.SESSIONS])
    for number in sessions.SESSIONS:
        deck = REPOSITORY / "exercises" / "slides" / f"session{number}.md"
        if deck.exists():
            before, turn, after = deck.read_text().partition("# Your turn\n")
            found[deck] = before + turn + with_rows(after, sessions.work_rows(number))
    return found


def main(argv=None):
    parser = Parser("road.py", __doc__, with_json=False)
    parser.add_argument("--write", action="store_true", help="write the pages instead of comparing them")
    options = parser.parse_args(argv)
    status = write_or_check(pages(), not options.write, "python scripts/maintain/road.py --write")
    for page in dict.fromkeys(sessions.steps()):
        if fault := fault_of_next(page, (REPOSITORY / page).read_text()):
            print(f"{page}: {fault}", file=sys.stderr)
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
