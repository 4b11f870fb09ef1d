"""Run programs: under torchrun on this machine, or a file in this process."""

import contextlib
import os
import pathlib
import runpy
import subprocess
import sys
import time
from unittest import mock

from in_process import run_captured

# Odd sizes: FSDP2 gives the two processes unequal parts of some weights.
SIZES = "--hidden-dim 32 --num-layers 2 --num-heads 2 --intermediate-dim 44 --vocab-size 51 --seq-len 11 --seed 3"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]


def launch(processes, *command, timeout=300, variables=(), **options):
    """Run a command under torchrun; return the completed process."""
    command = [*TORCHRUN, str(processes), *map(str, command)]
    variables = environment() | dict(variables)
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=variables, **options)


def environment():
    """Return the environment without the ranks of a launch around this one, and with one thread per process."""
    outside = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return {name: value for name, value in os.environ.items() if name not in outside} | {"OMP_NUM_THREADS": "1"}


def running(pid):
    """Return whether a process is there and is no zombie."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_for(condition):
    """Wait until the condition is true: a process that was killed is gone a moment later."""
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def executable(path, text):
    """Write a program; return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def run_file(program, *arguments, cwd=None, **variables):
    """Run a Python file as a process would, in this one, which has imported PyTorch; return the completed process."""

    def start():
        sys.argv += map(str, arguments)
        runpy.run_path(str(program), run_name="__main__")

    folder = program.resolve().parent
    search = mock.patch.object(sys, "path", [str(folder), *sys.path])
    with search, mock.patch.dict(os.environ, variables), fresh_neighbours(folder):
        return run_captured([program, *arguments], program, cwd, start)


@contextlib.contextmanager
def fresh_neighbours(folder):
    """Have the modules beside a program imported anew: those of its copy have the same names."""
    names = {path.stem for path in folder.glob("*.py")}
    before = {name: sys.modules.pop(name) for name in names & sys.modules.keys()}
    try:
        yield
    finally:
        for name in names & sys.modules.keys():
            del sys.modules[name]
        sys.modules.update(before)
