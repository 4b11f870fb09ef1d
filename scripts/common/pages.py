"""Generated parts of the pages: tables between markers, and times that a sentence quotes.

<!-- NAME:begin -->                        a table, from the line after this marker
<!-- NAME:end -->                          to the line before this one
32.30 ms<!-- v1 small float32 eager -->    the step time of that row of the recorded run; "eager" may be left out
13.2 / 17.3 ms<!-- v1 small float32 forward_ms backward_ms -->      these columns of it
"""

import difflib
import pathlib
import re
import sys
from collections.abc import Callable

TABLE = re.compile(r"(<!-- (?P<name>[^<>]+):begin -->\n).*?(<!-- (?P=name):end -->)", re.DOTALL)
TIMES = r"(?P<times>(?:\d+\.\d+ / )*\d+\.\d+)\s+ms\b"
QUOTE = re.compile(rf"{TIMES}<!-- (?P<row>\S+ \S+ \S+)(?: (?P<way>eager|graph))?(?P<columns>(?: \w+_ms)*) -->")


def fill(text: str, tables: dict[str, str]) -> str:
    """Return a page's text with each of these tables between its markers; other markers keep theirs."""
    return TABLE.sub(lambda m: f"{m[1]}{tables[m['name']].strip()}\n{m[3]}" if m["name"] in tables else m[0], text)


def quoted_rows(text: str) -> list[tuple]:
    """Return (model, preset, precision, way) of each time that a page quotes."""
    return [(*match["row"].split(), match["way"]) for match in QUOTE.finditer(text)]


def fill_quotes(text: str, row_of: Callable) -> str:
    """Return a page's text with the quoted times of rows that were recorded, in as many decimals as the page has.

    row_of(model, preset, precision, way) returns a row or None; way is "eager", "graph" or None.
    """

    def quoted(match):
        row = row_of(*match["row"].split(), match["way"])
        columns, old = match["columns"].split() or ["step_ms"], match["times"].split(" / ")
        if row is None or len(columns) != len(old) or None in (row.get(column) for column in columns):
            return match[0]
        new = [f"{row[column]:.{len(time.split('.')[1])}f}" for column, time in zip(columns, old, strict=True)]
        return match[0].replace(match["times"], " / ".join(new), 1)

    return QUOTE.sub(quoted, text)


def write_or_check(pages: dict[pathlib.Path, str], check: bool, remedy: str) -> int:
    """Write these texts, or print how the pages differ from them; return 1 if --check finds a difference."""
    status = 0
    for path, wanted in pages.items():
        found = path.read_text(encoding="utf-8")
        if found == wanted:
            continue
        if not check:
            path.write_text(wanted, encoding="utf-8")
            print(f"{path} written")
            continue
        status = 1
        lines = difflib.unified_diff(found.splitlines(), wanted.splitlines(), str(path), "recorded", n=0, lineterm="")
        print("\n".join(lines))
        print(f"{path} disagrees with what was recorded: {remedy}", file=sys.stderr)
    return status
