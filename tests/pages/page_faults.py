"""Find faults in the commands of a page, and in its links."""

import functools
import os
import re
import subprocess

from processes import run_file

LINK = re.compile(r"\]\(([^)\s]+)\)")
PASSES_ON = re.compile(
    r"[Oo]ptions? (that aren't listed here )?(of the training script |of tiny_llama_v3.py )?go|go(es)? through"
)


@functools.cache
def help_of(program):
    """Return what the program prints for --help, run as a process would; empty where it fails."""
    if program.suffix == ".sh":
        done = subprocess.run([program, "--help"], capture_output=True, text=True)
    else:
        done = run_file(program, "--help", COLUMNS="200")
    return "" if done.returncode else done.stdout


def program_of(words):
    """Return the path of the program that a command runs, after a launcher's own options, and its arguments."""
    place = 1 if words[0] in ("python", "bash") else 0
    if words[0] in ("torchrun", "sbatch"):
        place = next(place for place, word in enumerate(words) if word.endswith((".py", ".sbatch")))
    return words[place], words[place + 1 :]


def knows(text, option):
    """Return whether a help text names the option; --disable-X goes with every --enable-X."""
    names = {option, re.sub("^--disable-", "--enable-", option)}
    return any(re.search(rf"{re.escape(name)}(?![\w-])", text) for name in names)


def faults_of_command(command, folder, versions):
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
    texts = [help_of(path)]
    if not texts[0]:
        return [f"{where}: {program} --help fails"]
    if PASSES_ON.search(" ".join(texts[0].split())) or path.stem.startswith("v3_stage"):
        scripts = [script for place in (folder, path.parent, *versions) for script in place.glob("tiny_llama_v*.py")]
        texts += map(help_of, dict.fromkeys(script.resolve() for script in scripts))
    options = [word.split("=")[0] for word in arguments if word.startswith("--")]
    return [f"{where}: {program} knows no {option}" for option in options if not any(knows(t, option) for t in texts)]


def faults_of_links(page):
    """Return sentences on the page's relative links that lead nowhere."""
    targets = [target.split("#")[0] for target in LINK.findall(page.read_text(encoding="utf-8"))]
    relative = [target for target in targets if target and "://" not in target]
    return [f"{target} does not exist" for target in relative if not (page.parent / target).exists()]
