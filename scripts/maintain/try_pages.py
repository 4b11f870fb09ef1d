"""Run the commands of the pages on this machine in order; print how each ended, its seconds and its last line.

    python try_pages.py                                          # all pages
    python try_pages.py ../../version3_triton/README.md --each 60   # one page, and at most a minute for a command
    python try_pages.py --time-limit 560                         # what still runs after 560 s is ended

They run in a copy of the repository in --output-dir, so that nothing here changes, with this Python as `python`; each
one's output is kept beside it. Passed over, with the reason: what needs more GPUs or hosts than there are, what stands
for something else (DEVICE_DATE), and what tries everything itself.

Exit status: 0 all that was run ended well; 1 one did not, or was not run for lack of time; 2 bad input.
"""

import math
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import threading
import time
from typing import NamedTuple

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from common.command_line import Failure, Parser, progress, run_tool
from common.runs import end
from common.tables import emit
from common.versions import REPOSITORY
from maintain.page_commands import PAGES, Command, commands, start_of

RUN_ALONE = ("test.sh", "record.sh", "try_pages.py", "try_wrappers.sh")  # these try everything themselves
SAID_WITH_STATUS_1 = re.compile(r"check\.py (solution )?\d+")  # of an exercise that nobody has started
PLACEHOLDER = re.compile(r"\b[A-Z]+_[A-Z]+\b(?!=)")
LEFT_OUT = (".git", ".venv", "__pycache__", ".pytest_cache", ".ruff_cache", ".hypothesis")
MARK = "made-by-try-pages"  # a copy without it is never removed
GRACE_S = 10  # for a command to end itself and what it started, before it is killed


class Tried(NamedTuple):
    page: str
    command: str
    ended: str  # "ok", "failed", "cut off", "passed over" or "not run"
    seconds: float
    words: str  # the last line that it printed, or the reason why it was not run


def passed_over(command: Command, gpus: int) -> str | None:
    """Return why a machine with so many GPUs cannot run a command; None if it can."""
    words = command.words()
    needed = command.gpus
    if words[0] == "torchrun" and "cpu" not in words:
        processes = words[words.index("--nproc-per-node") + 1]
        needed = int(processes) if processes.isdigit() else 2  # "gpu" is all there are; one has nobody to talk to
    if any(pathlib.Path(word).name in RUN_ALONE for word in words[:2]):
        return "run it by itself"
    if "--watch" in words:
        return "waits for its user"
    if "--nnodes" in words or words[0] == "sbatch":
        return "needs several hosts"
    if found := PLACEHOLDER.search(" ".join(words)):
        return f"{found[0]} stands for something else"
    return None if gpus >= needed else "needs a GPU" if needed == 1 else f"needs {needed} GPUs"


def copy_repository(folder: pathlib.Path) -> pathlib.Path:
    """Copy the repository to DIR/copy, without caches, Git's history and that folder itself; return the copy.

    Raise Failure if another program made a folder of that name.
    """
    copy, by_name = folder / "copy", shutil.ignore_patterns(*LEFT_OUT)
    if copy.exists() and not (copy / MARK).exists():
        raise Failure(2, f"{copy} was not made by this program: choose another --output-dir")
    shutil.rmtree(copy, ignore_errors=True)

    def left_out(place, names):
        return by_name(place, names) | {name for name in names if pathlib.Path(place, name) == folder}

    copy.mkdir()
    (copy / MARK).touch()
    shutil.copytree(REPOSITORY, copy, symlinks=True, ignore=left_out, dirs_exist_ok=True)
    return copy


def environment_with_python(folder: pathlib.Path) -> dict[str, str]:
    """Return this environment with a `python` and a `torchrun` that are this very interpreter."""
    programs = folder / "bin"
    programs.mkdir(exist_ok=True)
    for name, arguments in (("python", ""), ("torchrun", "-m torch.distributed.run ")):
        program = programs / name
        program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {arguments}"$@"\n')
        program.chmod(0o755)
    path = f"{programs}{os.pathsep}{os.environ.get('PATH', '')}"
    return os.environ | {"PATH": path, "TINY_LLAMA_PYTHON": sys.executable, "PYTHONUNBUFFERED": "1"}


class Trial:
    """Run the pages' commands in the copy until the time is over."""

    def __init__(self, options, gpus):
        self.deadline = time.monotonic() + options.time_limit
        self.folder = pathlib.Path(options.output_dir).resolve()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.copy = copy_repository(self.folder)
        self.environment = environment_with_python(self.folder)
        self.each, self.gpus = options.each, gpus

    def run(self, command: Command, place: pathlib.Path, log: pathlib.Path) -> tuple[str, int | None]:
        """Run a command in a folder; return how it ended and its exit status."""
        seconds = min(self.each, max(0, self.deadline - time.monotonic()), threading.TIMEOUT_MAX)
        with open(log, "w", encoding="utf-8") as output:
            process = subprocess.Popen(
                ["bash", "-c", command.text], cwd=place, env=self.environment, start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            )  # fmt: skip
            try:
                status = process.wait(seconds)
            except subprocess.TimeoutExpired:
                return "cut off", None
            finally:
                end(process, GRACE_S)  # and what it left running
        ended_well = status == 0 or (status == 1 and SAID_WITH_STATUS_1.search(command.text))
        return ("ok", status) if ended_well else ("failed", status)

    def attempt(self, page: pathlib.Path, command: Command) -> Tried:
        """Run a command of a page, unless it is to be passed over or there is no time left."""
        name, shown = str(page.relative_to(REPOSITORY)), command.text.split(" #")[0].strip()
        if reason := passed_over(command, self.gpus):
            return Tried(name, shown, "passed over", 0.0, reason)
        if self.deadline - time.monotonic() < 5:
            return Tried(name, shown, "not run", 0.0, "no time left")
        log = self.folder / "logs" / f"{name.replace(os.sep, '.')}.{command.line}.log"
        log.parent.mkdir(exist_ok=True)
        start = time.monotonic()
        ended, status = self.run(command, self.copy / start_of(page).relative_to(REPOSITORY), log)
        words = f"status {status}: " * (ended == "failed") + last_line(log)
        return Tried(name, shown, ended, round(time.monotonic() - start, 1), words)

    def try_pages(self, pages: list[pathlib.Path]) -> list[Tried]:
        """Try all commands of the pages in order, and print a line for each."""
        found = []
        for page in pages:
            for command in commands(page):
                found.append(self.attempt(page, command))
                progress(line_of(found[-1]))
        return found


def last_line(log: pathlib.Path) -> str:
    said = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return said[-1] if said else ""


def line_of(tried: Tried) -> str:
    return f"{tried.ended:12}{tried.seconds:5.0f} s  {tried.page}: {tried.command}  | {tried.words[:100]}"


def summary(tried: list[Tried], folder: pathlib.Path) -> str:
    """Return how many ended how, and once more those that did not end well."""
    kinds = ("ok", "failed", "cut off", "not run", "passed over")
    counts = ", ".join(f"{sum(t.ended == kind for t in tried)} {kind}" for kind in kinds)
    bad = [line_of(t) for t in tried if t.ended in ("failed", "cut off")]
    return "\n".join([*bad, f"{counts}; outputs in {folder / 'logs'}"])


def pages_meant(names: list[str]) -> list[pathlib.Path]:
    """Return the pages of those paths, or all; raise Failure for one that is no page of the workshop."""
    known = {page.resolve(): page for page in PAGES}
    for name in names:
        if pathlib.Path(name).resolve() not in known:
            raise Failure(2, f"{name} is no page whose commands are known; without a name all of them are tried")
    return [known[pathlib.Path(name).resolve()] for name in names] or PAGES


def parse_arguments(argv):
    parser = Parser("try_pages.py", __doc__.split("\n\n")[0], "../../version3_triton/README.md --each 60")
    parser.add_argument("pages", nargs="*", metavar="PAGE", help="pages to try (all)")
    parser.add_argument("--each", type=float, default=600, metavar="S", help="seconds for a command (%(default)s)")
    parser.add_argument("--time-limit", type=float, default=math.inf, metavar="S", help="end all after that (never)")
    parser.add_argument("--output-dir", default="tried_pages", metavar="DIR", help="(%(default)s)")
    options = parser.parse_args(argv)
    if options.each <= 0 or options.time_limit <= 0:
        parser.error("--each and --time-limit must be positive")
    return options


def work(argv):
    import torch

    options = parse_arguments(argv)
    pages = pages_meant(options.pages)
    trial = Trial(options, torch.cuda.device_count())
    tried = trial.try_pages(pages)
    emit({"gpus": trial.gpus, "commands": [t._asdict() for t in tried]}, summary(tried, trial.folder), options.json)
    return int(any(t.ended not in ("ok", "passed over") for t in tried))


def main(argv=None):
    return run_tool("try_pages.py", lambda: work(argv))


if __name__ == "__main__":
    sys.exit(main())
