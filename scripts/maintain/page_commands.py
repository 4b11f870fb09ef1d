"""Find the commands that the pages tell their readers to run, and the folder to run them in.

from maintain.page_commands import PAGES, commands, program_of, start_of
"""

import pathlib
import re
import shlex
from typing import NamedTuple

from common.versions import REPOSITORY, SCRIPTS

FOLDERS = [script.parent for script in SCRIPTS.values()]
PAGES = [
    REPOSITORY / "README.md",
    *(folder / "README.md" for folder in FOLDERS),
    REPOSITORY / "version3_triton" / "README_WORKSHOP.md",
    REPOSITORY / "version3_triton" / "NOTEBOOK.md",
    REPOSITORY / "exercises" / "README.md",
    REPOSITORY / "scripts" / "README.md",
    REPOSITORY / "scripts" / "SCALING.md",
    REPOSITORY / "TINY_LLAMA_ARCHITECTURE.md",
    REPOSITORY / ".github" / "CONTRIBUTING.md",
]
INDENTED = re.compile(r"^    (?:python |\./)", re.MULTILINE)
FENCE = re.compile(r"^ *```bash\n(.*?)^ *```", re.DOTALL | re.MULTILINE)


class Command(NamedTuple):
    line: int  # of the page, from 1
    text: str
    gpus: int = 0  # that it needs, as its comment or the first one of its block says: "with a GPU", "with GPUs"

    def words(self):
        """Return the words of the command, without the variables that are set before it."""
        return shlex.split(re.sub(r"^(?:[A-Z_]+=\S+ )+", "", self.text), comments=True)


def start_of(page: pathlib.Path) -> pathlib.Path:
    """Return the folder in which a page's commands run: its own, except for pages that start at the top."""
    from_the_top = {
        REPOSITORY / name for name in ("scripts/SCALING.md", "exercises/README.md", ".github/CONTRIBUTING.md")
    }
    return REPOSITORY if page in from_the_top else page.parent


def gpus_named(line: str) -> int:
    """Return how many GPUs its comment asks for, at least."""
    return 1 if "# with a GPU" in line else 2 if "# with GPUs" in line else 0


def blocks(text: str):
    """Yield (number of the first line, text) of every bash block and of every indented line that starts a program."""
    for block in FENCE.finditer(text):
        yield text.count("\n", 0, block.start(1)) + 1, block[1]
    for number, line in enumerate(FENCE.sub(lambda block: "\n" * block[0].count("\n"), text).splitlines(), 1):
        if INDENTED.match(line):
            yield number, line


def commands(page: pathlib.Path) -> list[Command]:
    """Return the commands of a page, one per line; lines that end with a backslash are joined."""
    found = []
    for number, block in blocks(page.read_text(encoding="utf-8")):
        pending, of_block = "", gpus_named(block.splitlines()[0])
        for offset, line in enumerate(block.splitlines()):
            pending += line.strip()
            if pending.endswith("\\"):
                pending = pending[:-1]
                continue
            if shlex.split(pending, comments=True):
                found.append(Command(number + offset, pending, max(of_block, gpus_named(pending))))
            pending = ""
    return found


def program_of(words: list[str]) -> tuple[str, list[str]]:
    """Return the path of the program that a command runs, after a launcher's own options, and its arguments."""
    place = 1 if words[0] in ("python", "bash") else 0
    if words[0] in ("torchrun", "sbatch"):
        place = next(place for place, word in enumerate(words) if word.endswith((".py", ".sbatch")))
    return words[place], words[place + 1 :]
