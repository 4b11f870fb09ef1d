"""Lead every reader: each page of the timetable says its session and minutes, and its last links have the next page.

    python scripts/maintain/road.py                # does every page lead on?
    python scripts/maintain/road.py --write        # write the headers, and the links of pages that have none yet

The timetable is exercises/sessions.py. From it come the table on version 3's page, the slides' lists of steps, and the
header below each page's title. The last paragraph, which begins with Next, may link to other pages behind the next
one. A page that two sessions use names both.
"""

import os
import pathlib
import re
import sys

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPOSITORY / "scripts"), str(REPOSITORY / "exercises")]

import sessions
from common.command_line import Parser
from maintain.pages import write_or_check

HEADER = re.compile(r"\n\*Session \d.*\*\n")
NEXT = re.compile(r"^[^\n]*?(\*+Next\*+:|\*+Next:\*+)", re.MULTILINE)


def last_links(page, text):
    """Return the targets of the links after the last Next of a page, as paths from the repository's top."""
    found = [match.end() for match in NEXT.finditer(text)]
    if not found:
        return []
    paragraph = text[found[-1] :].split("\n\n")[0]
    targets = re.findall(r"\]\(([^)#]+)", paragraph)
    return [os.path.normpath(os.path.join(os.path.dirname(page), target)) for target in targets]


def with_header(page, text):
    """Return a page's text with the header below its title."""
    title, _, rest = text.partition("\n")
    header = f"\n*{sessions.header(page)}*\n"
    if HEADER.match(rest):
        return title + "\n" + HEADER.sub(lambda _: header, rest, count=1)
    return f"{title}\n{header}{rest}"


def with_next(page, text):
    """Return a page's text with a link to the page that follows, at its end, if none of its last links is that one."""
    links = last_links(page, text)
    missing = [after for after in sessions.after(page) if after not in links]
    for after in missing:
        title = (REPOSITORY / after).read_text().split("\n")[0].removeprefix("# ")
        text = f"{text.rstrip()}\n\n**Next:** [{title}]({os.path.relpath(after, os.path.dirname(page))})\n"
    return text


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
        found[REPOSITORY / page] = with_next(page, with_header(page, text))
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
    return write_or_check(pages(), not options.write, "python scripts/maintain/road.py --write")


if __name__ == "__main__":
    sys.exit(main())
