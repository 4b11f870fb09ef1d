"""The pages: the commands that they tell their readers to run, and their generated parts.

<!-- NAME:begin -->                        a table, from the line after this marker
<!-- NAME:end -->                          to the line before this one
32.30 ms<!-- v1 small float32 eager -->    the step time of that row of the recorded run; "eager" may be left out
13.2 / 17.3 ms<!-- v1 small float32 forward_ms backward_ms -->      these columns of it
"""

import difflib
import re
import shlex
import sys
from typing import NamedTuple

from common.versions import REPOSITORY, SCRIPTS

FOLDERS = [script.parent for script in SCRIPTS.values()]
# Pages whose commands start at the top of the repository; those of the others start in the page's own folder.
AT_THE_TOP = "exercises/README.md scripts/SCALING.md scripts/YOUR_OWN_SCRIPT.md .github/CONTRIBUTING.md"
FROM_THE_TOP = [REPOSITORY / name for name in AT_THE_TOP.split()]
STAGES = REPOSITORY / "version3_triton" / "exercises" / "performance_debugging"
OTHERS = "version3_triton/README_WORKSHOP.md version3_triton/NOTEBOOK.md scripts/README.md TINY_LLAMA_ARCHITECTURE.md"
PAGES = [folder / "README.md" for folder in (REPOSITORY, *FOLDERS)]
PAGES += [*(REPOSITORY / name for name in OTHERS.split()), *FROM_THE_TOP]
EXERCISES = [page for folder in FOLDERS for page in sorted((folder / "exercises").glob("*.md"))]
HANDS_ON = sorted({*REPOSITORY.glob("exercises/**/*.md")} - {*PAGES})
INDENTED = re.compile(r"^    (?:python |\./)", re.MULTILINE)
FENCE = re.compile(r"^ *```bash\n(.*?)^ *```", re.DOTALL | re.MULTILINE)
TABLE = re.compile(r"(<!-- (?P<name>[^<>]+):begin -->\n).*?(<!-- (?P=name):end -->)", re.DOTALL)
TIMES = r"(?P<times>(?:\d+\.\d+ / )*\d+\.\d+)\s+ms\b"
QUOTE = re.compile(rf"{TIMES}<!-- (?P<row>\S+ \S+ \S+)(?: (?P<way>eager|graph))?(?P<columns>(?: \w+_ms)*) -->")

# ---------------------------------------------------------------- commands


class Command(NamedTuple):
    line: int  # of the page, from 1
    text: str
    gpus: int = 0  # that it needs, as its comment or the first one of its block says: "with a GPU", "with GPUs"

    def words(self):
        """Return the words of the command, without the variables that are set before it."""
        return shlex.split(re.sub(r"^(?:[A-Z_]+=\S+ )+", "", self.text), comments=True)


def start_of(page):
    """Return the folder in which a page's commands run."""
    if page in FROM_THE_TOP or page in HANDS_ON:
        return REPOSITORY
    if STAGES in page.parents:
        return STAGES
    if page in EXERCISES:
        return page.parent.parent
    return page.parent


def gpus_named(line):
    """Return how many GPUs a command's comment asks for, at least."""
    if "# with a GPU" in line:
        return 1
    return 2 if "# with GPUs" in line else 0


def blocks(text):
    """Yield (number of the first line, text) of every bash block and of every indented line that starts a program."""
    for block in FENCE.finditer(text):
        yield text.count("\n", 0, block.start(1)) + 1, block[1]
    for number, line in enumerate(FENCE.sub(lambda block: "\n" * block[0].count("\n"), text).splitlines(), 1):
        if INDENTED.match(line):
            yield number, line


def commands(page):
    """Return the commands of a page."""
    return commands_in(page.read_text(encoding="utf-8"))


def commands_in(text):
    """Return the commands of a text, one per line; lines that end with a backslash are joined."""
    found = []
    for number, block in blocks(text):
        of_block = gpus_named(block.splitlines()[0])
        for match in re.finditer(r"(?:.*\\\n)*.+", block):
            command = re.sub(r"\\\n\s*", "", match[0]).strip()
            if not command.endswith("\\") and shlex.split(command, comments=True):
                line = number + block.count("\n", 0, match.end())
                found.append(Command(line, command, max(of_block, gpus_named(command))))
    return found


# ---------------------------------------------------------------- generated parts


def all_pages():
    """Return the pages that may have generated parts."""
    return [*PAGES, *sorted(REPOSITORY.glob("version*/exercises/**/*.md"))]


def with_commands():
    """Return the pages whose commands are checked and can be tried."""
    return [*all_pages(), *HANDS_ON]


def fill(text, tables):
    """Return a page's text with each of these tables between its markers; other markers keep theirs."""
    return TABLE.sub(lambda m: f"{m[1]}{tables[m['name']].strip()}\n{m[3]}" if m["name"] in tables else m[0], text)


def quoted_rows(text):
    """Return (model, preset, precision, way) of each time that a page quotes."""
    return [(*match["row"].split(), match["way"]) for match in QUOTE.finditer(text)]


def fill_quotes(text, row_of):
    """Return a page's text with the quoted times of rows that were recorded, in as many decimals as the page has.

    row_of(model, preset, precision, way) returns a row or None; way is "eager", "graph" or None.
    """

    def quoted(match):
        row = row_of(*match["row"].split(), match["way"])
        columns = match["columns"].split() or ["step_ms"]
        old = match["times"].split(" / ")
        if row is None or len(columns) != len(old) or None in (row.get(column) for column in columns):
            return match[0]
        new = [f"{row[column]:.{len(time.split('.')[1])}f}" for column, time in zip(columns, old, strict=True)]
        return match[0].replace(match["times"], " / ".join(new), 1)

    return QUOTE.sub(quoted, text)


def write_or_check(pages, check, remedy):
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
