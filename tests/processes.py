"""Run programs: under torchrun on this machine, forked from a process that has imported PyTorch, or in this one."""

import contextlib
import multiprocessing
import os
import pathlib
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
from unittest import mock

from in_process import run_captured

# Odd sizes: FSDP2 gives the two processes unequal parts of some weights.
SIZES = "--hidden-dim 32 --num-layers 2 --num-heads 2 --intermediate-dim 44 --vocab-size 51 --seq-len 11 --seed 3"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["torch._dynamo"])  # the first optimizer imports it: with PyTorch, seconds per process


def run_forked(argv, cwd, env, stdout, stderr):
    """Run a program in a fresh fork as a process of its own."""
    for number, (file, mode) in enumerate(((os.devnull, os.O_RDONLY), (stdout, os.O_WRONLY), (stderr, os.O_WRONLY))):
        os.dup2(os.open(file, mode), number)
    sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)  # strict, as outside of C locales
    sys.stderr = os.fdopen(2, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)
    for number in (signal.SIGHUP, signal.SIGTERM):  # nohup, around the tests, has SIGHUP ignored
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job's shell has it ignored
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    sys.argv = argv
    sys.path[:0] = [os.path.dirname(os.path.realpath(argv[0])), *env.get("PYTHONPATH", "").split(os.pathsep)]
    runpy.run_path(argv[0], run_name="__main__")


class Fork:
    """A process of a Python program that starts seconds sooner than subprocess.Popen's: PyTorch is imported already.

    For a test of the interpreter's own start or end, or of what a program imports, it is not the real thing.
    """

    def __init__(self, *command, cwd=None, env=None, stdout=None):
        self.folder = tempfile.TemporaryDirectory()
        self.files = [os.path.join(self.folder.name, name) for name in ("out", "err")]
        for file in self.files:
            open(file, "w").close()
        argv = [str(word) for word in command]
        arguments = argv, str(cwd or os.getcwd()), env or dict(os.environ), str(stdout or self.files[0]), self.files[1]
        self.process = FORKS.Process(target=run_forked, args=arguments)
        self.process.start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.join()
        self.folder.cleanup()

    stdout = property(lambda self: pathlib.Path(self.files[0]).read_text())
    stderr = property(lambda self: pathlib.Path(self.files[1]).read_text())
    returncode = property(lambda self: self.process.exitcode)

    def send_signal(self, number):
        os.kill(self.process.pid, number)

    def wait_for_line(self, start):
        """Wait until the program has printed a line that starts so."""

        def printed():
            assert self.returncode is None, self.stderr
            return f"\n{start}" in f"\n{self.stdout}"

        wait_for(printed)

    def wait(self, timeout=100):
        self.process.join(timeout)
        assert self.returncode is not None, "it still runs"


def run_fork(*command, **options):
    """Run a program in a fork; return the completed process."""
    with Fork(*command, **options) as fork:
        fork.wait()
        return subprocess.CompletedProcess(command, fork.returncode, fork.stdout, fork.stderr)


@contextlib.contextmanager
def forked_ranks(number, *command, hosts=1, variables=(), **options):
    """Fork a program once per rank, in the environment that torchrun gives it on so many hosts."""
    with socket.create_server(("localhost", 0)) as free:
        address = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free.getsockname()[1])}
    local = number // hosts
    env = environment() | dict(variables) | address | {"WORLD_SIZE": str(number), "LOCAL_WORLD_SIZE": str(local)}
    with contextlib.ExitStack() as stack:
        of_rank = [env | {"RANK": str(rank), "LOCAL_RANK": str(rank % local)} for rank in range(number)]
        yield [stack.enter_context(Fork(*command, env=one, **options)) for one in of_rank]


def end_as_torchrun(forks, timeout=300):
    """Wait for all ranks; when one fails, send SIGTERM to the others."""
    wait_for(lambda: any(one.returncode for one in forks) or all(one.returncode == 0 for one in forks), timeout)
    for fork in forks:
        if fork.returncode is None:
            fork.send_signal(signal.SIGTERM)
        fork.wait()


def launch(number, *command, timeout=300, **options):
    """Run a program on forked ranks; return the completed process of all, its status that of the first that failed."""
    with forked_ranks(number, *command, **options) as forks:
        end_as_torchrun(forks, timeout)
        status = next((one.returncode for one in forks if one.returncode), 0)
        out, err = ("".join(texts) for texts in zip(*((one.stdout, one.stderr) for one in forks), strict=True))
    return subprocess.CompletedProcess(command, status, out, err)


def run_process_forked(command, timeout=300, *, tell=None, env=None):
    """Stand in for common.measuring.runs.run_process: fork what it would start, alone or under torchrun."""
    command = [str(word) for word in command]
    if command[: len(TORCHRUN)] == TORCHRUN:
        number, *words = command[len(TORCHRUN) :]
        done = launch(int(number), *words, timeout=timeout, variables=env or ())
    else:
        assert command[0] == sys.executable
        done = run_fork(*command[1:], env=env)
    for line in done.stdout.splitlines(keepends=True) if tell else []:
        tell(line)
    return done


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


def wait_for(condition, timeout=60):
    """Wait until the condition is true: a process that was killed is gone a moment later."""
    end = time.monotonic() + timeout
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
