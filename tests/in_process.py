"""Run the repository's Python programs in this process: PyTorch is imported once for all tests.

run_here() replaces subprocess.run. Some tests start real processes all the same.
"""

import contextlib
import importlib
import io
import os
import pathlib
import shlex
import subprocess
import sys

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


@contextlib.contextmanager
def called_as(program, folder):
    """Set the state of a fresh process in a folder, as far as the programs read it; restore it afterwards."""
    arguments, place, interpret = sys.argv, os.getcwd(), os.environ.get("TRITON_INTERPRET")
    deterministic, precision = torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision()
    sys.argv = [str(program)]
    torch.use_deterministic_algorithms(False)
    os.chdir(folder or place)
    try:
        yield
    finally:
        sys.argv = arguments
        os.chdir(place)
        torch.use_deterministic_algorithms(deterministic)
        torch.set_float32_matmul_precision(precision)
        if interpret is None:
            os.environ.pop("TRITON_INTERPRET", None)


def run_here(command, *arguments, cwd=None, **options):
    """Run a command as subprocess.run does, its output captured as text; other programs get a real process."""
    python, program, *words = map(str, command) if len(command) > 1 else (None, None)
    module = module_of(program) if python == sys.executable and program.endswith(".py") else None
    if module is None:
        return real_run(command, *arguments, cwd=cwd, **options)
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), called_as(program, cwd):
        try:
            status = module.main(words)
        except SystemExit as end:
            status = end.code
    return subprocess.CompletedProcess(command, status or 0, out.getvalue(), err.getvalue())


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


def process_here(command, timeout=None, env=None):
    """Stand in for common.runs.run_process; env is the one of this process."""
    assert env is None
    return run_here(command, capture_output=True, text=True, timeout=timeout)
