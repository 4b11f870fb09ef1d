"""Compile what an answer launches, for a GPU that need not be here. check.py calls this in a process of its own.

    python compilation.py FOLDER  # as grading.py and own_kernel.py, for answers that passed

Triton's interpreter runs Python, and accepts some kernels that the compiler refuses. The answer runs the first case
here; each kernel that it launches is compiled for the TARGET, and none is executed.
"""

import contextlib
import copy
import inspect
import pathlib
import sys
import time
from unittest import mock

import torch

import grading  # before Triton: it chooses between interpreter and compiler

# isort: split
from triton import CompilationError
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import JITFunction

import own_kernel
from amd.launch import launched_with
from tile_compiler import obstacle

SECONDS = 3  # of compiling before it is mentioned
LONG = 200  # letters of a reason, of which the first sentence is enough
REMEDIES = {
    "Loop-carried variable": "start with a tile of that type, such as tl.zeros([BLOCK], tl.float32)",
    "Cannot access global variable": "pass it as an argument, or make it a tl.constexpr",
}


def line_in(path, error):
    """Return the line of the file that a CompilationError is about, or None; it knows its function's text alone."""
    if not isinstance(error, CompilationError) or error.src is None or not hasattr(error.node, "lineno"):
        return None
    before, found, _ = path.read_text(encoding="utf-8").partition(error.src)
    return before.count("\n") + error.node.lineno if found else None


def reason_of(error):
    """Return the last line of an error, without the name of a Python error that the compiler quotes, or None."""
    text = (error.error_message if isinstance(error, CompilationError) else str(error)) or ""
    if not text.strip():
        return None
    last = text.strip().splitlines()[-1]
    for name in ("AssertionError", "NameError", "TypeError", "ValueError"):
        if last.startswith((f"{name}('", f'{name}("')):
            last = last[len(name) + 2 : -2]
    return last.rstrip(".")


def describe_refusal(function, error):
    """Return the line that the compiler refuses, the innermost in the kernel's file, and why, in its first words.

    Of a function that the kernel calls, each caller's error has the function's as its cause.
    """
    path = pathlib.Path(inspect.getsourcefile(function))
    line, reason = None, None
    while error is not None:
        line = line_in(path, error) or line
        if isinstance(error, CompilationError) or reason is None:
            reason = reason_of(error) or reason
        error = error.__cause__
    reason = reason or "it does not say why"
    if len(reason) > LONG:
        reason = reason.partition(". ")[0]
    reason += "".join(f": {remedy}" for part, remedy in REMEDIES.items() if part in reason)
    place = f"line {line}" if line else function.__name__
    return f"{place}: Triton's interpreter runs it, but the compiler refuses it: {reason}"


class Compilation(contextlib.ExitStack):
    """Compile what is launched for the TARGET inside a `with`, and execute none of it.

    kernels: names of those that were compiled. refused: None, or why the first other one was not.
    """

    def __init__(self):
        super().__init__()
        self.kernels, self.refused = set(), None
        self.start = time.monotonic()

    def compiling(self, run):
        """Return JITFunction.run that notes what the compiler refuses: an answer may catch the error."""

        def compile_kernel(kernel, *arguments, **options):
            name = kernel.__name__
            if name not in self.kernels and time.monotonic() - self.start > SECONDS:
                print(f"   compiling {name} for {grading.TARGET}", flush=True)
            try:
                result = run(kernel, *arguments, **options)
            except own_kernel.DROPPED:
                raise
            except Exception as error:
                self.refused = self.refused or describe_refusal(kernel.fn, error)
                raise
            self.kernels.add(name)
            return result

        return compile_kernel

    def every_configuration(self, tuner, *arguments, **options):
        """Compile each tile of an autotuned kernel, and drop what an autotuner drops, unless nothing is left."""
        configurations = own_kernel.configurations_of(tuner, arguments, options, tiles_alone=True)
        dropped = []
        for configuration in configurations:
            try:
                tuner.fn.run(*arguments, **options, **configuration.all_kwargs())
            except own_kernel.DROPPED as error:
                dropped.append(error)
        if len(dropped) == len(configurations):
            self.refused = self.refused or describe_refusal(tuner.base_fn, dropped[0])
            raise dropped[0]

    def __enter__(self):
        def run_tuner(tuner, *arguments, **options):
            return self.every_configuration(tuner, *arguments, **options)

        self.enter_context(launched_with(grading.TARGET, lambda *launch: None))
        self.enter_context(mock.patch.object(JITFunction, "run", self.compiling(JITFunction.run)))
        self.enter_context(mock.patch.object(Autotuner, "run", run_tuner))
        return self


def run_exercise(folder, path):
    """Call run() of an answer for the first case."""
    task = grading.load_task(folder)
    module = grading.load_module(path, f"answer_{pathlib.Path(path).stem}")
    inputs = grading.cast(task, task.inputs(**next(iter(task.cases.values()))), task.dtypes[0])
    results = task.storage(task.define(**copy.deepcopy(inputs)), inputs)
    outputs = {name: torch.zeros(like.shape, dtype=like.dtype) for name, like in results.items()}
    return lambda: task.launch(module, inputs, outputs)


def run_own(folder):
    """Call the user's function for the first case, and its backward."""
    task = own_kernel.load_own_task(pathlib.Path(folder))
    inputs = own_kernel.in_dtype(own_kernel.draw(task, task.cases[0]), task.dtypes[0])
    leaves = own_kernel.gradients_of(task, inputs)
    cotangents = own_kernel.draw_cotangents(task, inputs, leaves, "contiguous")

    def call():
        called = own_kernel.with_leaves(inputs, leaves)
        results = own_kernel.named(task.function(*called.values()))
        own_kernel.differentiate(results, called, leaves, cotangents)

    return call


def judge_compilation(folder, path):
    """Return the verdict on an answer that passed in the interpreter; path: "check" for a user's own folder."""
    target = grading.TARGET
    if why := obstacle():
        return {"passed": True, "sentence": f"not compiled: {why}"}
    call = run_own(folder) if path == "check" else run_exercise(folder, path)
    compilation = Compilation()
    stopped = None
    try:
        with compilation:
            call()
    except BaseException as error:  # nothing is computed here, so an answer may raise what it otherwise does not
        stopped = f"{type(error).__name__} in a run that computes nothing"
    if compilation.refused:
        return {"passed": False, "kind": "compile", "sentence": compilation.refused}
    if stopped:
        done = f"compiled for {target}: {', '.join(sorted(compilation.kernels)) or 'no kernel'}"
        return {"passed": True, "sentence": f"{done}, and no more because of {stopped}"}
    return {"passed": True, "sentence": f"compiles for {target}"}


if __name__ == "__main__":
    grading.answer_jobs(judge_compilation, *sys.argv[1:])
