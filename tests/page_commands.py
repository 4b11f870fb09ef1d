"""What a page tells its reader to run: its commands, what is wrong with them, and with its links.

from page_commands import commands, faults_of_command, faults_of_links
"""

import functools
import os
import pathlib
import re
import shlex
import subprocess
import sys
from typing import NamedTuple

INDENTED = re.compile(r"^    (?:python |\./)", re.MULTILINE)
FENCE = re.compile(r"^ *```bash\n(.*?)^ *```", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s]+)\)")
PASSES_ON = re.compile(
    r"options? (that are not listed )?(of the training script |of tiny_llama_v3.py )?go|go(es)? through"
)


class Command(NamedTuple):
    line: int  # of the page, from 1
    text: str

    def words(self):
        return shlex.split(self.text, comments=True)


def blocks(text: str):
    """(number of the first line, text) of every bash block, and of every indented line that starts a program."""
    for block in FENCE.finditer(text):
        yield text.count("\n", 0, block.start(1)) + 1, block[1]
    for number, line in enumerate(FENCE.sub(lambda block: "\n" * block[0].count("\n"), text).splitlines(), 1):
        if INDENTED.match(line):
            yield number, line


def commands(page: pathlib.Path) -> list[Command]:
    """The commands of a page, one for each line; lines that end with a backslash are joined."""
    found = []
    for number, block in blocks(page.read_text(encoding="utf-8")):
        pending = ""
        for offset, line in enumerate(block.splitlines()):
            pending += line.strip()
            if pending.endswith("\\"):
                pending = pending[:-1]
                continue
            if shlex.split(pending, comments=True):
                found.append(Command(number + offset, pending))
            pending = ""
    return found


def program_of(words: list[str]) -> tuple[str, list[str]]:
    """The path of the program that a command runs, and its arguments; behind a launcher's own options."""
    place = 1 if words[0] in ("python", "bash") else 0
    if words[0] in ("torchrun", "sbatch"):
        place = next(place for place, word in enumerate(words) if word.endswith((".py", ".sbatch")))
    return words[place], words[place + 1 :]


@functools.cache
def help_of(program: pathlib.Path) -> str:
    """What the program prints for --help; empty where it fails."""
    interpreter = [] if program.suffix == ".sh" else [sys.executable]
    environment = os.environ | {"COLUMNS": "200"}
    done = subprocess.run([*interpreter, str(program), "--help"], capture_output=True, text=True, env=environment)
    return done.stdout if done.returncode == 0 else ""


def training_script(folder: pathlib.Path) -> pathlib.Path | None:
    """The training script of a version's folder."""
    return next(iter(sorted(folder.glob("tiny_llama_v*.py"))), None)


def knows(text: str, option: str) -> bool:
    """Whether a help text names the option; --disable-X goes with every --enable-X."""
    names = {option, re.sub("^--disable-", "--enable-", option)}
    return any(re.search(rf"{re.escape(name)}(?![\w-])", text) for name in names)


def faults_of_command(command: Command, folder: pathlib.Path, versions: list[pathlib.Path]) -> list[str]:
    """Sentences on what keeps a command from running in a folder.

    versions: the folders whose training scripts get the options that a tool passes on, beside that of `folder`.
    """
    words = command.words()
    program, arguments = program_of(words)
    where = f"line {command.line}: {command.text}"
    path = folder / program
    if not path.is_file():
        return [f"{where}: {program} does not exist"]
    if words[0] == program and not os.access(path, os.X_OK):
        return [f"{where}: {program} cannot be executed"]
    if path.suffix == ".sbatch":  # its first argument is a version, whose options follow
        path = next(folder.glob(f"version{arguments[0]}_*/tiny_llama_v*.py"))
    text = help_of(path)
    if not text:
        return [f"{where}: {program} --help fails"]
    texts = [text]
    if PASSES_ON.search(" ".join(text.split())) or path.stem.startswith("v3_stage"):
        scripts = filter(None, map(training_script, [folder, path.parent, *versions]))
        texts += map(help_of, dict.fromkeys(script.resolve() for script in scripts))
    options = [word.split("=")[0] for word in arguments if word.startswith("--")]
    return [f"{where}: {program} knows no {option}" for option in options if not any(knows(t, option) for t in texts)]


def faults_of_links(page: pathlib.Path) -> list[str]:
    """Sentences on the page's relative links that lead nowhere."""
    targets = [target.split("#")[0] for target in LINK.findall(page.read_text(encoding="utf-8"))]
    relative = [target for target in targets if target and "://" not in target]
    return [f"{target} does not exist" for target in relative if not (page.parent / target).exists()]
