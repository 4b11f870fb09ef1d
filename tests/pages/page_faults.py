"""Find faults in the commands of a page, and in its links.

from page_faults import faults_of_command, faults_of_links
"""

import functools
import os
import pathlib
import re
import subprocess
import sys

from common.pages import Command

LINK = re.compile(r"\]\(([^)\s]+)\)")
PASSES_ON = re.compile(
    r"options? (that are not listed )?(of the training script |of tiny_llama_v3.py )?go|go(es)? through"
)


@functools.cache
def help_of(program: pathlib.Path) -> str:
    """Return what the program prints for --help; empty where it fails."""
    interpreter = [] if program.suffix == ".sh" else [sys.executable]
    environment = os.environ | {"COLUMNS": "200"}
    done = subprocess.run([*interpreter, str(program), "--help"], capture_output=True, text=True, env=environment)
    return done.stdout if done.returncode == 0 else ""


def program_of(words):
    """Return the path of the program that a command runs, after a launcher's own options, and its arguments."""
    place = 1 if words[0] in ("python", "bash") else 0
    if words[0] in ("torchrun", "sbatch"):
        place = next(place for place, word in enumerate(words) if word.endswith((".py", ".sbatch")))
    return words[place], words[place + 1 :]


def training_script(folder: pathlib.Path) -> pathlib.Path | None:
    """Return the training script of a version's folder."""
    return next(iter(sorted(folder.glob("tiny_llama_v*.py"))), None)


def knows(text: str, option: str) -> bool:
    """Return whether a help text names the option; --disable-X goes with every --enable-X."""
    names = {option, re.sub("^--disable-", "--enable-", option)}
    return any(re.search(rf"{re.escape(name)}(?![\w-])", text) for name in names)


def faults_of_command(command: Command, folder: pathlib.Path, versions: list[pathlib.Path]) -> list[str]:
    """Return sentences on what keeps a command from running in a folder.

    versions: the folders whose training scripts get the options that a tool passes on, in addition to that of `folder`.
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
    """Return sentences on the page's relative links that lead nowhere."""
    targets = [target.split("#")[0] for target in LINK.findall(page.read_text(encoding="utf-8"))]
    relative = [target for target in targets if target and "://" not in target]
    return [f"{target} does not exist" for target in relative if not (page.parent / target).exists()]
