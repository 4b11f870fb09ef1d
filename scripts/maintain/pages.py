"""The pages: the commands that they tell their readers to run, and their generated parts.

<!-- NAME:begin -->                       a table, from the line after this marker
<!-- NAME:end -->                         to the line before this one
32.30 ms<!-- step v1 small float32 -->    a number, of the function in maintain/facts.py that the first word names
1.24x (1.22 to 1.24)<!-- gain_with_range medium graph h peer -->    several, of a function that has as many values
| 1.40<!-- busy v1 copies in ms -->       a number whose unit stands elsewhere, in a table's header for example

A number keeps its decimals; "..." stands for one that is not measured. Browsers hide markers. In code, in the
alternative text of a picture and in headings they would be shown, or change links: generate those, or do without.
"""

import difflib
import re
import shlex
import sys
from typing import NamedTuple

from common.tables import rounded
from common.versions import REPOSITORY, SCRIPTS

FOLDERS = [script.parent for script in SCRIPTS.values()]
# Pages whose commands start at the top of the repository; those of the others start in the page's own folder.
AT_THE_TOP = "exercises/README.md .github/CONTRIBUTING.md scripts/SCALING.md scripts/AMD.md scripts/amd/README.md "
AT_THE_TOP += "scripts/YOUR_OWN_SCRIPT.md scripts/BEFORE_AND_AFTER.md scripts/ANY_PROFILE.md"
FROM_THE_TOP = [REPOSITORY / name for name in AT_THE_TOP.split()]
STAGES = REPOSITORY / "version3_triton" / "exercises" / "performance_debugging"
OTHERS = "scripts/README.md TINY_LLAMA_ARCHITECTURE.md scripts/TESTED_ON.md .github/CHANGELOG.md .github/SECURITY.md"
PAGES = [folder / "README.md" for folder in (REPOSITORY, *FOLDERS)]
PAGES += [*(REPOSITORY / name for name in OTHERS.split()), *FROM_THE_TOP]
PAGES += sorted({*(REPOSITORY / "version3_triton").glob("*.md")} - {*PAGES})
PAGES += sorted((REPOSITORY / "scripts" / "recorded").glob("*.md"))
EXERCISES = [page for folder in FOLDERS for page in sorted((folder / "exercises").glob("*.md"))]
HANDS_ON = sorted({*REPOSITORY.glob("exercises/**/*.md")} - {*PAGES})
INDENTED = re.compile(r"^    (?:python |\./)", re.MULTILINE)
FENCE = re.compile(r"^ *```bash\n(.*?)^ *```", re.DOTALL | re.MULTILINE)
COMMAND = re.compile(r"for .*; do\n(?:.*\n)*?done|(?:.*\\\n)*.+")
TABLE = re.compile(r"(<!-- (?P<name>[^<>]+):begin -->\n).*?(<!-- (?P=name):end -->)", re.DOTALL)
MARKER = re.compile(r"<!-- (?!\S+:(?:begin|end) -->)([^>]+) -->")
NUMBER = re.compile(r"(?<![\w.,])(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|\.\.\.")

# ---------------------------------------------------------------- commands


class Command(NamedTuple):
    line: int  # of the page, from 1
    text: str
    gpus: int = 0  # that it needs, as its comment or the first one of its block says: "with a GPU", "with GPUs"

    def words(self):
        """Return the words of the command or of the loop's body, without the variables that are set before it."""
        command = re.sub(r"^for .*?; do |; done$", "", self.text)
        return shlex.split(re.sub(r"^(?:[A-Z][A-Z0-9_]*=\S+ )+", "", command), comments=True)


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
    """Return the commands of a text, one per line or loop; lines that end with a backslash are joined."""
    found = []
    for number, block in blocks(text):
        of_block = gpus_named(block.splitlines()[0])
        for match in COMMAND.finditer(block):
            command = re.sub(r"\\\n\s*", "", match[0]).strip()
            command = re.sub(r"\n\s*", "; ", re.sub(r"; do\n\s*", "; do ", command))
            if not command.endswith("\\") and shlex.split(command, comments=True):
                line = number + block.count("\n", 0, match.end())
                found.append(Command(line, command, max(of_block, gpus_named(command))))
    return found


# ---------------------------------------------------------------- generated parts


def all_pages():
    """Return the pages that may have generated parts."""
    return [*PAGES, *sorted(REPOSITORY.glob("version*/exercises/**/*.md")), *HANDS_ON]


def fill(text, tables):
    """Return a page's text with each of these tables between its markers; other markers keep theirs."""
    return TABLE.sub(lambda m: f"{m[1]}{tables[m['name']].strip()}\n{m[3]}" if m["name"] in tables else m[0], text)


def numbers_before(text, values, units, unit):
    """Return a text that ends before a marker with these values as its last numbers; ValueError where it cannot be.

    units: {unit: its size}. unit: the one that the marker names, else the page has it behind the last number.
    """
    found = list(NUMBER.finditer(text))[-len(values) :]
    if len(found) < len(values):
        raise ValueError(f"there must be {len(values)} numbers before it")
    after = text[found[-1].end() :].strip(" \n()*")
    if unit and after:
        raise ValueError(f"its number must stand before it, not {after!r}")
    if (unit or after) not in units:
        raise ValueError(f"{unit or after!r} is none of its units: {', '.join(units)}")
    for number, value in reversed(list(zip(found, values, strict=True))):
        new = "..." if value is None else written(value / units[unit or after], number[0])
        text = text[: number.start()] + new + text[number.end() :]
    return text


def written(value, old):
    """Return a number with the decimals and the separators of an old one, or with three digits for "..."."""
    if old == "...":
        return rounded(value)
    new = f"{value:,.{len(old.partition('.')[2])}f}"
    return new if "," in old or float(old) < 1000 else new.replace(",", "")


def fill_facts(text, values_of):
    """Return a page's text with the numbers before its markers as they should be, and a list of faulty markers.

    values_of(words) returns the values that a marker's words name, and {unit: its size}; see maintain/facts.py.
    """
    parts = []
    faults = []
    end = 0
    for marker in MARKER.finditer(text):
        before = text[end : marker.start()]
        words, _, unit = marker[1].partition(" in ")
        try:
            before = numbers_before(before, *values_of(shlex.split(words)), unit)
        except ValueError as error:
            faults.append(f"{marker[0]}: {error}")
        parts += [before, marker[0]]
        end = marker.end()
    return "".join([*parts, text[end:]]), faults


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
