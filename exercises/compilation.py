"""Compile what an answer launches, for a GPU that need not be here. check.py calls this in a process of its own.

    python compilation.py FOLDER  # as grading.py and own_kernel.py, for answers that passed

Triton's interpreter runs Python, and accepts some kernels that the compiler refuses. The answer runs the first case
here; each kernel that it launches is compiled for the TARGET, and none is executed.
"""

import contextlib
import copy
import inspect
import pathlib
import re
import sys
import time
from unittest import mock

import torch

import grading  # before Triton: it chooses between interpreter and compiler

# isort: split
import triton
from triton import CompilationError
from triton.compiler import ASTSource
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import JITFunction

import own_kernel
from amd.launch import MOST_LANES, launched_with
from common.formulas.occupancy import TARGETS
from tile_compiler import obstacle

SECONDS = 3  # of compiling before it is mentioned
LONG = 200  # letters of a reason, of which the first sentence is enough
REMEDIES = {
    "Loop-carried variable": "start with a tile of that type, such as tl.zeros([BLOCK], tl.float32)",
    "Cannot access global variable": "pass it as an argument, or make it a tl.constexpr",
    "has no attribute 'to'": "an argument that is 1 is a constant, so write tl.cast(STRIDE, tl.int64) with its name",
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
    for name in ("AssertionError", "AttributeError", "NameError", "TypeError", "ValueError"):
        if last.startswith((f"{name}('", f'{name}("')):
            last = last[len(name) + 2 : -2]
    return last.rstrip(".")


def describe_refusal(function, error):
    """Return words on what the compiler refuses, and what to do about it where that is known."""
    place, reason = refused_line(function, error)
    reason += "".join(f": {remedy}" for part, remedy in REMEDIES.items() if part in reason)
    return f"{place}: Triton's interpreter runs it, but the compiler refuses it: {reason}"


def refused_line(function, error):
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
    return f"line {line}" if line else function.__name__, reason


def refuse_warps(warps):
    """Return why a program cannot have so many warps, or None."""
    if warps < 1 or warps & (warps - 1):
        return f"num_warps {warps} is not a power of 2"
    threads = warps * TARGETS[grading.TARGET].warp_size
    if threads > MOST_LANES:
        given = f"num_warps {warps} gives a program {threads:,} threads on {grading.TARGET}"
        return f"{given}, and {MOST_LANES:,} are the most"
    return None


class Compilation(contextlib.ExitStack):
    """Compile what is launched for the TARGET inside a `with`, and execute none of it.

    in_models: compile kernels a second time as torch.compile does, which passes a Python number as float64.
    kernels: names of those that were compiled. refused: None, or why the first other one was not. notes: words on what
    is right, but not everywhere; a dict keeps their order. in_float64: None, or such words on numbers.
    """

    def __init__(self, in_models=False):
        super().__init__()
        self.kernels, self.refused, self.notes = set(), None, {}
        self.in_models, self.wide, self.in_float64 = in_models, set(), None
        self.configuration = ""  # words on the one that an autotuned kernel is compiled with
        self.start = time.monotonic()

    def refuse(self, said):
        self.refused = self.refused or f"{self.configuration}{said}"

    def compiling(self, run):
        """Return JITFunction.run that notes what the compiler refuses: an answer may catch the error."""

        def compile_kernel(kernel, *arguments, **options):
            name = kernel.__name__
            late = time.monotonic() - self.start > SECONDS
            if name not in self.kernels and late and not torch.cuda.is_available():
                print(f"   compiling {name} for {grading.TARGET}", flush=True)
            if why := refuse_warps(options.get("num_warps", 4)):
                self.refuse(f"{name}: {why}")
                raise ValueError(why)
            try:
                result = run(kernel, *arguments, **options)
            except own_kernel.DROPPED:
                raise
            except Exception as error:
                self.refuse(describe_refusal(kernel.fn, error))
                raise
            self.kernels.add(name)
            if self.in_models and name not in self.wide:
                self.wide.add(name)
                self.compile_wide(kernel, result)
            return result

        return compile_kernel

    def compile_wide(self, kernel, compiled):
        """Note whether the compiler refuses a kernel that gets its numbers as float64, or computes all in float64."""
        source = compiled.src
        numbers = [name for name, kind in source.signature.items() if kind == "fp32"]
        if not numbers:
            return
        signature = source.signature | dict.fromkeys(numbers, "fp64")
        wide = ASTSource(source.fn, signature, source.constants, source.attrs)
        options = {name: getattr(compiled.metadata, name) for name in ("num_warps", "num_stages")}
        passes = f"torch.compile passes {' and '.join(numbers)} as float64"
        remedy = "write " + " and ".join(f"tl.cast({name}, tl.float32)" for name in numbers)
        try:
            text = triton.compile(wide, target=compiled.metadata.target, options=options).asm["ttir"]
        except own_kernel.DROPPED:
            return
        except Exception as error:
            place, reason = refused_line(kernel.fn, error)
            reason = re.split("[.!:] | in loop", reason)[0]
            self.in_float64 = f"but {passes}, and then the compiler refuses {place}: {reason}: {remedy}"
            return
        if in_float64(text) > in_float64(compiled.asm["ttir"]):
            said = f"but {passes}, and then {kernel.__name__} computes tiles in float64: {remedy}"
            self.in_float64 = self.in_float64 or said

    def every_configuration(self, tuner, *arguments, **options):
        """Compile each tile of an autotuned kernel, and drop what an autotuner drops, unless nothing is left."""
        name = tuner.base_fn.__name__
        every = own_kernel.configurations_of(tuner, arguments, options, tiles_alone=False)
        possible = [config for config in every if not refuse_warps(config.num_warps)]
        for config in every:
            why = refuse_warps(config.num_warps)
            if why and (not possible or config.num_warps & (config.num_warps - 1)):
                self.refuse(f"{name}: {why}")
                raise ValueError(why)
            if why:
                self.notes[f"{name}: {why}, so Triton's autotuner drops it"] = None
        dropped = []
        tiles = own_kernel.tiles_of(possible)
        for config in tiles:
            self.configuration = f"with {own_kernel.describe_configuration(config, every)}: " if len(every) > 1 else ""
            try:
                tuner.fn.run(*arguments, **options, **config.all_kwargs())
            except own_kernel.DROPPED as error:
                dropped.append(error)
        self.configuration = ""
        if len(dropped) == len(tiles):
            self.refuse(describe_refusal(tuner.base_fn, dropped[0]))
            raise dropped[0]

    def __enter__(self):
        def run_tuner(tuner, *arguments, **options):
            return self.every_configuration(tuner, *arguments, **options)

        self.enter_context(launched_with(grading.TARGET, lambda *launch: None))
        self.enter_context(mock.patch.object(JITFunction, "run", self.compiling(JITFunction.run)))
        self.enter_context(mock.patch.object(Autotuner, "run", run_tuner))
        return self


def in_float64(text):
    """Return how many tiles of float64 there are in Triton's intermediate representation of a kernel."""
    return len(re.findall("xf64>", text))


def run_exercise(folder, path):
    """Call run() of an answer for the first case."""
    task = grading.load_task(folder)
    module = grading.load_module(path, f"answer_{pathlib.Path(path).stem}")
    inputs = grading.cast(task, task.inputs(**next(iter(task.cases.values()))), task.dtypes[0])
    results = task.storage(task.define(**copy.deepcopy(inputs)), inputs)
    outputs = {name: torch.zeros(like.shape, dtype=like.dtype) for name, like in results.items()}
    return lambda: task.launch(module, inputs, outputs)


@contextlib.contextmanager
def without_launches():
    """Launch nothing inside a `with`: of a reference that launches kernels, only its results' shapes are needed."""
    with (
        mock.patch.object(JITFunction, "run", lambda kernel, *arguments, **options: None),
        mock.patch.object(Autotuner, "run", lambda tuner, *arguments, **options: None),
    ):
        yield


def run_own(folder):
    """Call the user's function and its backward for the first case, and where a size of 1 is compiled as a constant."""
    task = own_kernel.load_own_task(pathlib.Path(folder))
    first, *others = task.cases
    prepared = []
    for sizes in [first, *(sizes for sizes in others if 1 in sizes.values())]:
        with without_launches():
            inputs = own_kernel.in_dtype(own_kernel.draw(task, sizes), task.dtypes[0])
            leaves = own_kernel.gradients_of(task, inputs)
            cotangents = own_kernel.draw_cotangents(task, inputs, leaves, "contiguous")
        prepared.append((inputs, leaves, cotangents))

    def call():
        for inputs, leaves, cotangents in prepared:
            called = own_kernel.with_leaves(inputs, leaves)
            results = own_kernel.named(task.function(*called.values()))
            own_kernel.differentiate(results, called, leaves, cotangents)

    return call


def judge_compilation(folder, path):
    """Return the verdict on an answer that passed; path: "check" or "time" for a user's own folder."""
    target = grading.TARGET
    own = path in ("check", "time")
    if why := obstacle():
        return {"passed": True, "sentence": f"not compiled: {why}"}
    call = run_own(folder) if own else run_exercise(folder, path)
    compilation = Compilation(in_models=own)
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
        said = f"{done}, and no more because of {stopped}"
    else:
        said = f"compiles for {target}"
    notes = [*compilation.notes, *([compilation.in_float64] if compilation.in_float64 else [])]
    return {"passed": True, "sentence": "; ".join([said, *notes]), "in_models": compilation.in_float64}


if __name__ == "__main__":
    grading.answer_jobs(judge_compilation, *sys.argv[1:])
