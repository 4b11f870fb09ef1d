"""Run the repository's Python programs in this process: PyTorch is imported once for all tests.

run_here() replaces subprocess.run. Some tests start real processes all the same.
"""

import contextlib
import importlib
import io
import os
import pathlib
import shlex
import signal
import subprocess
import sys
from unittest import mock

import numpy as np
import torch

from common.versions import REPOSITORY, SCRIPTS, load_version

real_run = subprocess.run


def module_of(program):
    """Return the module of a program of this repository, or None if it needs a process of its own."""
    path = pathlib.Path(program).resolve()
    for version, script in SCRIPTS.items():
        if path == script:
            # With a GPU, Triton was imported for it, and its interpreter needs a process of its own.
            return None if version == 3 and torch.cuda.is_available() else load_version(version)
    if REPOSITORY / "scripts" not in path.parents:
        return None
    return importlib.import_module(".".join(path.relative_to(REPOSITORY / "scripts").with_suffix("").parts))


def process_settings():
    """Return the settings of this process that a test may change and the next one would notice."""
    ignored = ("PYTEST_", "TORCHINDUCTOR_")  # pytest's own, and the cache's folder, which PyTorch sets on import
    settings = {f"${name}": value for name, value in os.environ.items() if not name.startswith(ignored)}
    return settings | {
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "fill_uninitialized_memory": torch.utils.deterministic.fill_uninitialized_memory,
        "float32 matmul precision": torch.get_float32_matmul_precision(),
        "default dtype": torch.get_default_dtype(),
        "gradients": torch.is_grad_enabled(),
        "threads": torch.get_num_threads(),
        "working directory": os.getcwd(),
        "arguments": tuple(sys.argv),
        "floating-point errors": tuple(np.geterr().items()),
        "SIGTERM": signal.getsignal(signal.SIGTERM),
        "SIGHUP": signal.getsignal(signal.SIGHUP),
        "SIGINT": signal.getsignal(signal.SIGINT),
    }


@contextlib.contextmanager
def restored_settings():
    """Restore what programs set for their process: determinism, precision, NumPy's errors, signals, environment."""
    deterministic, precision = torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision()
    filled, errors = torch.utils.deterministic.fill_uninitialized_memory, np.geterr()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)}
    try:
        with mock.patch.dict(os.environ):
            yield
    finally:
        torch.use_deterministic_algorithms(deterministic)
        torch.set_float32_matmul_precision(precision)
        torch.utils.deterministic.fill_uninitialized_memory = filled
        np.seterr(**errors)
        for number, handler in handlers.items():
            signal.signal(number, handler)


def run_captured(command, program, folder, start):
    """Call start() with the state of a fresh process of the program in a folder; return the completed process."""
    out, err, place = io.StringIO(), io.StringIO(), os.getcwd()
    argv = mock.patch.object(sys, "argv", [str(program)])
    with restored_settings(), argv, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        torch.use_deterministic_algorithms(False)
        os.chdir(folder or place)
        try:
            status = start()
        except SystemExit as end:
            status = end.code
        finally:
            os.chdir(place)
    return subprocess.CompletedProcess(command, status or 0, out.getvalue(), err.getvalue())


def run_here(command, *arguments, cwd=None, **options):
    """Run a command as subprocess.run does, its output captured as text; other programs get a real process."""
    python, program, *words = map(str, command) if len(command) > 1 else (None, None)
    module = module_of(program) if python == sys.executable and program.endswith(".py") else None
    if module is None:
        return real_run(command, *arguments, cwd=cwd, **options)
    return run_captured(command, program, cwd, lambda: module.main(words))


def call(version, command, cwd=None, status=0):
    """Run a documented command in a version's folder; return its result, whose status must be as expected."""
    program, *arguments = shlex.split(command)
    folder = SCRIPTS[version].parent
    result = run_here([sys.executable, folder / program, *arguments], cwd=cwd or folder)
    assert result.returncode == status, result.stdout + result.stderr
    return result


def refused(main, arguments, capsys, words, status=2):
    """Check that a tool answers bad input with one sentence and this status."""
    try:
        found = main([str(word) for word in arguments])
    except SystemExit as error:
        found = error.code
    errors = capsys.readouterr().err.strip().splitlines()
    assert found == status and words in errors[-1], errors


def process_here(command, timeout=None, *, env=None, tell=None):
    """Stand in for common.measuring.runs.run_process; env is the one of this process."""
    assert env is None
    command = [word for word in command if word != "-u"]
    done = run_here(command, capture_output=True, text=True, timeout=timeout)
    for line in done.stdout.splitlines(keepends=True):
        if tell:
            tell(line)
    return done
