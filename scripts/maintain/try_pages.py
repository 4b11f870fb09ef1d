"""Run the commands of the pages on this machine in order; print how each ended, its seconds and its last line.

    python try_pages.py                                          # all pages
    python try_pages.py ../../version3_triton/README.md --each 60   # one page, and at most a minute for a command

They run in a temporary copy of the repository, with this Python as `python`; --output-dir keeps what each one prints.
It skips, and says why, commands that need more GPUs or hosts than there are, have a placeholder (DEVICE_DATE), or try
everything themselves.

Exit status: 0 if all commands that ran succeeded; 1 if one failed; 2 for bad input.
"""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time

import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from common.command_line import Failure, Parser, positive, result_folder
from common.measuring.runs import end, started
from common.versions import REPOSITORY
from maintain.pages import all_pages, commands, start_of

RUN_ALONE = ("test.sh", "record.sh", "try_pages.py")
# Of an exercise or a stage that nobody has solved, of training that isn't what it should be, of tiles that do not fit.
SAID_WITH_STATUS_1 = re.compile(
    r"check\.py (solution )?\d+|conflicts\.py|check\.py \.\./my_\w+$|v3_stage\w+\.py --check"
    r"|compare_training\.py .*\b(found|v3_stage6)|check_training\.py .*\b(train_characters|v3_stage6)"
    r"|inspect_kernels\.py .*(--tiles \S+ 128x128|--stages 2 6)"
)
SAVED = re.compile(r"Save this as `([\w.]+)` in this folder:\n+```python\n(.*?)```", re.DOTALL)
PLACEHOLDER = re.compile(r"\b[A-Z]+_[A-Z]+\b(?!=)")
LEFT_OUT = (".git", ".venv*", "__pycache__", ".pytest_cache", ".ruff_cache", "tried_pages")
GRACE_S = 10  # for a command to end itself and what it started, before it is killed


def passed_over(command, gpus):
    """Return why a machine with so many GPUs cannot run a command; None if it can."""
    words, needed = command.words(), command.gpus
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
        return f"{found[0]} is a placeholder"
    if gpus >= needed:
        return None
    return "needs a GPU" if needed == 1 else f"needs {needed} GPUs"


def copied_repository(folder):
    """Copy the repository; return the copy, and an environment whose python and torchrun are those of this tool."""
    copy = shutil.copytree(REPOSITORY, folder / "copy", symlinks=True, ignore=shutil.ignore_patterns(*LEFT_OUT))
    path = f"{pathlib.Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    return copy, os.environ | {"PATH": path, "TINY_LLAMA_PYTHON": sys.executable, "PYTHONUNBUFFERED": "1"}


def run(command, place, log, environment, seconds):
    """Run a command in a folder; return how it ended, and its exit status with its last line."""
    with open(log, "w", encoding="utf-8") as output:
        options = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": subprocess.STDOUT, "env": environment}
        try:
            with started(["bash", "-c", command.text], GRACE_S, cwd=place, **options) as process:
                status = process.wait(seconds)
                end(process, GRACE_S)  # what it left running
        except subprocess.TimeoutExpired:
            status = None
    last = log.read_text(encoding="utf-8", errors="replace").strip().rpartition("\n")[2].strip()
    if status is None:
        return "cut off", last
    ended_well = status == 0 or (status == 1 and SAID_WITH_STATUS_1.search(command.text))
    return ("ok", last) if ended_well else ("failed", f"status {status}: {last}")


def pages_of(names):
    """Return the pages of these names, or all; Failure for a name that is none."""
    known = all_pages()
    pages = [pathlib.Path(name).resolve() for name in names]
    for page in pages:
        if page not in known:
            sentence = "isn't a page whose commands we know; leave out the name to try all of them"
            raise Failure(2, f"{page} {sentence}")
    return pages or known


def try_command(page, command, copy, environment, logs, seconds):
    """Run a command of a page unless this machine cannot; return how it ended, and its line."""
    name = page.relative_to(REPOSITORY)
    start = time.monotonic()
    ended = "passed over"
    words = passed_over(command, torch.cuda.device_count())
    if not words:
        log = logs / f"{'.'.join(name.parts)}.{command.line}.log"
        place = copy / start_of(page).relative_to(REPOSITORY)
        ended, words = run(command, place, log, environment, seconds)
    took = time.monotonic() - start
    text = command.text.split(" #")[0].strip()
    return ended, f"{ended:12}{took:5.0f} s  {name}: {text}  | {words:.100}"


def work(options):
    pages = pages_of(options.pages)
    logs = result_folder(options.output_dir, "--output-dir")
    ends = []
    bad = []
    with tempfile.TemporaryDirectory() as temporary:
        copy, environment = copied_repository(pathlib.Path(temporary))
        for page in pages:
            for name, text in SAVED.findall(page.read_text(encoding="utf-8")):
                (copy / page.relative_to(REPOSITORY)).with_name(name).write_text(text, encoding="utf-8")
            for command in commands(page):
                ended, line = try_command(page, command, copy, environment, logs, options.each)
                print(line, flush=True)
                ends.append(ended)
                if ended in ("failed", "cut off"):
                    bad.append(line)
    counts = ", ".join(f"{ends.count(kind)} {kind}" for kind in ("ok", "failed", "cut off", "passed over"))
    print(*bad, f"{counts}; outputs in {logs}", sep="\n")
    return int(bool(bad))


def main(argv=None):
    parser = Parser("try_pages.py", __doc__, with_json=False)
    parser.add_argument("pages", nargs="*", metavar="PAGE", help="pages to try (all)")
    parser.add_argument("--each", type=positive, default=600, metavar="S", help="seconds for a command (%(default)s)")
    parser.add_argument("--output-dir", default="tried_pages", metavar="DIR", help="(%(default)s)")
    return parser.run(work, argv)


if __name__ == "__main__":
    sys.exit(main())
