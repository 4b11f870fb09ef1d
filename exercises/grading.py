"""Runs answers to the exercises and judges them; check.py calls it in a process of its own.

    python grading.py JOBS VERDICTS     # both JSON: a list of [folder of the exercise, file with the answer], and
                                        # for each a verdict {passed, kind, tensor, case, sentence, seconds}

What a task asks for stands in the task.py of its folder. An answer has a function run() that launches kernels on given
outputs. Inputs lie between bands of NaN, so that a load past their end shows; outputs hold a NaN of their own, so that
an element that is never written shows, and lie between bands of a number, so that a store past their end shows.
"""

import contextlib
import copy
import dataclasses
import importlib.util
import json
import math
import os
import pathlib
import sys
import time
from collections.abc import Callable
from unittest import mock

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY / "scripts"))
sys.modules.setdefault("grading", sys.modules[__name__])  # the tasks import it by this name

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is imported
from triton.runtime.jit import KernelInterface

from common.versions import relative_error
from speed import DeviceTimer, Speed, measure

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * (not INTERPRETED)
BAND = 1 << 14
SENTINEL = 77
# Quiet NaNs with a payload that no arithmetic makes from ordinary numbers.
UNWRITTEN = {
    torch.float32: (torch.int32, 0x7FC0BEEF),
    torch.float16: (torch.int16, 0x7E5A),
    torch.bfloat16: (torch.int16, 0x7FDA),
}
FACTORS = {2: "2", 0.5: "1/2", -1: "-1", math.log2(math.e): "log2(e)", math.log(2): "log(2)"}


class Wrong(Exception):
    """What is wrong with an answer: its kind, the tensor that shows it, and one sentence."""

    def __init__(self, kind, tensor, sentence):
        super().__init__(sentence)
        self.kind, self.tensor = kind, tensor


@dataclasses.dataclass(frozen=True)
class Mistake:
    """A typical wrong answer: the solution with `text` replaced, and the tensor that the checker must blame for it.

    A GPU may show it as another kind: the sum of NaN that marks unwritten elements is a NaN of its own there.
    """

    text: str
    replacement: str
    blames: str
    kind: str = "value"
    count: int = 1
    gpu_kind: str | None = None


@dataclasses.dataclass(frozen=True)
class Task:
    """What run() of an exercise must compute.

    cases: name -> sizes, the smallest first. inputs(**sizes): name -> float32 tensor or number, what run() is given.
    define(**inputs): name -> tensor that run() must leave, computed in the dtype of the inputs (float64 for the truth).
    names: result -> what its dimensions are called. owner(module, result, index, inputs): the program that writes it,
    () where none does. wide: inputs that are float32 beside 16-bit ones. storage(results, inputs): output -> tensor
    of its shape and dtype, where outputs are packed; views(outputs, inputs): result -> its part of the outputs.
    mistakes: name -> Mistake. dtypes: those that the answer is run in. kernel: whether it must launch one.
    tolerance: relative error that is allowed beside twice that of PyTorch.
    then(module, source): raises Wrong for what the results cannot show. speed: how fast it must be on a GPU.
    """

    cases: dict[str, dict]
    inputs: Callable
    define: Callable
    names: dict[str, str]
    owner: Callable
    mistakes: dict[str, Mistake]
    wide: tuple[str, ...] = ()
    storage: Callable = lambda results, inputs: results
    views: Callable = lambda outputs, inputs: outputs
    dtypes: tuple[torch.dtype, ...] = tuple(DTYPES)
    kernel: bool = True
    tolerance: float = 1e-6
    then: Callable = lambda module, source: None
    speed: Speed | None = None


def load_module(path, name):
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def load_task(folder):
    return load_module(pathlib.Path(folder) / "task.py", f"task_{pathlib.Path(folder).name}").TASK


def random(*shape, seed, scale=1.0, offset=0.0):
    """Normal numbers; a scale and an offset keep constants and forgotten factors from being right by chance."""
    return offset + scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# ---------------------------------------------------------------- memory


def placed_input(tensor):
    """A copy between bands of NaN."""
    memory = torch.full((tensor.numel() + 2 * BAND,), math.nan, dtype=tensor.dtype, device=DEVICE)
    view = memory[BAND : BAND + tensor.numel()].view(tensor.shape)
    return view.copy_(tensor)


def placed_output(like):
    """A tensor of that shape and dtype that holds the NaN of unwritten elements, and the memory around it."""
    memory = torch.full((like.numel() + 2 * BAND,), SENTINEL, dtype=like.dtype, device=DEVICE)
    view = memory[BAND : BAND + like.numel()]
    integer, bits = UNWRITTEN[like.dtype]
    view.view(integer).fill_(bits)
    return view.view(like.shape), memory


def check_bands(name, memory):
    for side, band in (("before the start", memory[:BAND].flip(0)), ("past the end", memory[-BAND:])):
        touched = (band != SENTINEL).nonzero()
        if len(touched):
            raise Wrong(
                "stray",
                name,
                f"{name}: {len(touched)} elements outside the tensor are written, "
                f"the nearest {int(touched[0]) + 1} {side}: mask the store",
            )


# ---------------------------------------------------------------- judgement


class Judge:
    """Judges the results of one case: what the sentences need to name a place."""

    def __init__(self, task, module, inputs):
        self.task, self.module, self.inputs = task, module, inputs

    def place(self, name, index):
        """'row 7, column 96 (program 1)'."""
        names = self.task.names[name].split()
        where = ", ".join(f"{dimension} {i}" for dimension, i in zip(names, index, strict=True))
        program = self.task.owner(self.module, name, index, self.inputs)
        return f"{where} (program {', '.join(map(str, program))})" if program else where

    def check_written(self, name, got):
        integer, bits = UNWRITTEN[got.dtype]
        unwritten = (got.contiguous().view(integer) == bits).nonzero().tolist()
        if unwritten:
            raise Wrong(
                "unwritten",
                name,
                f"{name}: {len(unwritten)} of {got.numel()} elements are never written, "
                f"the first at {self.place(name, unwritten[0])}",
            )

    def check_finite(self, name, got, exact):
        bad = (~got.isfinite() & exact.isfinite()).nonzero().tolist()
        if bad:
            raise Wrong(
                "value",
                name,
                f"{name}: {len(bad)} of {got.numel()} elements are NaN or infinite, the first at "
                f"{self.place(name, bad[0])}: a load past the end of an input, or an overflow",
            )

    def check_values(self, got, plain, exact):
        """Blame the first result that is wrong: the others follow from it, or are computed after it."""
        errors = {name: relative_error(got[name], exact[name]) for name in exact}
        bounds = {name: 2 * relative_error(plain[name], exact[name]) + self.task.tolerance for name in exact}
        wrong = [name for name in exact if not errors[name] <= bounds[name]]
        if not wrong:
            return
        name, *others = wrong
        distance = (got[name].double() - exact[name]).abs()
        worst = tuple(int(i) for i in torch.unravel_index(distance.argmax(), distance.shape))
        raise Wrong(
            "value",
            name,
            f"{name}: relative error {errors[name]:.1e}, allowed {bounds[name]:.1e}; worst at "
            f"{self.place(name, worst)}: {got[name][worst]:.6g} instead of {exact[name][worst]:.6g}"
            + self.pattern(name, got[name].double(), exact[name], bounds[name])
            + (f"; also wrong: {', '.join(others)}" if others else ""),
        )

    def pattern(self, name, got, exact, bound):
        """What the error looks like, where it looks like something."""
        factor = ((got * exact).sum() / (exact * exact).sum()).item()
        if factor and relative_error(got / factor, exact) < 10 * bound:
            known = next((text for value, text in FACTORS.items() if math.isclose(factor, value, rel_tol=1e-3)), None)
            return f"; every element is {known or f'{factor:.4g}'} times what it should be"
        wrong = ((got - exact).abs() > 10 * bound * exact.square().mean().sqrt()).nonzero()
        parts = []
        for dimension, size, indices in zip(self.task.names[name].split(), got.shape, wrong.T, strict=True):
            low, high = int(indices.min()), int(indices.max())
            if high - low + 1 < size:
                parts.append(f"{dimension} {low}" + (f" to {high}" if high > low else ""))
        return f"; only {', '.join(parts)} of {tuple(got.shape)} is wrong" if parts else ""


def same(a, b):
    """Whether two tensors are equal, NaN in the same places included."""
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


def check_inputs(inputs, originals):
    for name, original in originals.items():
        if isinstance(original, torch.Tensor) and not same(inputs[name], original):
            raise Wrong("changed", name, f"{name}: the kernel changed its input; write to the outputs alone")


def counted_launches():
    """A patch of Triton that counts launches, and the list that grows with them."""
    names, launch = [], KernelInterface.__getitem__

    def record(kernel, grid):
        names.append(kernel.__name__)
        return launch(kernel, grid)

    return mock.patch.object(KernelInterface, "__getitem__", record), names


def cast(task, values, dtype):
    """Inputs on the device in the dtype of a run; numbers, and what is wide beside 16-bit tensors, stay as they are."""

    def convert(name, value):
        if not isinstance(value, torch.Tensor):
            return value
        wide = name in task.wide and dtype != torch.float64
        return value.to(DEVICE, torch.float32 if wide else dtype)

    return {name: convert(name, value) for name, value in values.items()}


def doubled(values):
    return {name: v.double() if isinstance(v, torch.Tensor) else v for name, v in values.items()}


def run_case(task, module, sizes, dtype):
    """Raise Wrong unless run() leaves what the task defines for these sizes in this dtype."""
    originals = cast(task, task.inputs(**sizes), dtype)
    plain, exact = task.define(**copy.deepcopy(originals)), task.define(**doubled(originals))
    inputs = {name: placed_input(v) if isinstance(v, torch.Tensor) else v for name, v in originals.items()}
    storage = {name: placed_output(like) for name, like in task.storage(plain, originals).items()}
    patch, launched = counted_launches()
    with patch:
        module.run(**inputs, **{name: view for name, (view, _) in storage.items()})
    check_inputs(inputs, originals)
    judge = Judge(task, module, originals)
    got = task.views({name: view for name, (view, _) in storage.items()}, originals)
    for name in exact:
        judge.check_written(name, got[name])
    for name, (_, memory) in storage.items():
        check_bands(name, memory)
    for name in exact:
        judge.check_finite(name, got[name], exact[name])
    judge.check_values(got, plain, exact)
    if task.kernel and not launched:
        raise Wrong("no kernel", None, "the results are right, but no kernel was launched: compute them in the kernel")


def check_speed(task, module, timer):
    """A sentence on the answer's speed; raises Wrong where it is below the task's floor."""
    speed = task.speed
    inputs = cast(task, task.inputs(**speed.sizes), torch.float32)
    results = task.storage(task.define(**copy.deepcopy(inputs)), inputs)
    outputs = {name: torch.empty(like.shape, dtype=like.dtype, device=DEVICE) for name, like in results.items()}
    del results
    with contextlib.ExitStack() as larger:
        for name, size in speed.tiles.items():
            larger.enter_context(mock.patch.object(module, name, size))
        rate, copy_rate = measure(module.run, inputs, outputs, DEVICE, timer)
    sentence = f"{rate:,.0f} GB/s, {rate / copy_rate:.0%} of a copy's {copy_rate:,.0f}"
    if rate < speed.floor * copy_rate:
        raise Wrong("slow", None, f"right but slow: {sentence}; at least {speed.floor:.0%} are asked")
    return sentence


def describe_speed(task, module):
    """What to add to a verdict."""
    if task.speed is None:
        return ""
    return "; its speed needs a GPU" if INTERPRETED else f"; {check_speed(task, module, DeviceTimer(DEVICE))}"


def describe_crash(error, path):
    """The line of the answer that failed, and why."""
    line = None
    while True:
        trace = error.__traceback__
        while trace:
            if trace.tb_frame.f_code.co_filename == str(path):
                line = trace.tb_lineno
            trace = trace.tb_next
        if error.__cause__ is None:
            break
        error = error.__cause__
    reason = (str(error).strip().splitlines() or [""])[-1]
    where = f"line {line}: " if line else ""
    return f"{where}{type(error).__name__}: {reason}"


def grade(folder, path):
    """The verdict on the answer in a file: the first case and dtype in which it is wrong."""
    start, case = time.perf_counter(), None
    verdict = {"passed": False, "kind": None, "tensor": None}
    try:
        task = load_task(folder)
        module = load_module(path, f"answer_{pathlib.Path(path).stem}")
        for case, sizes in task.cases.items():
            for dtype in task.dtypes:
                case_name = f"{case}, {str(dtype).removeprefix('torch.')}"
                run_case(task, module, sizes, dtype)
        case = None
        task.then(module, pathlib.Path(path).read_text(encoding="utf-8"))
        dtypes = f"{len(task.dtypes)} dtypes" if len(task.dtypes) > 1 else str(task.dtypes[0]).removeprefix("torch.")
        verdict |= {"passed": True, "sentence": f"{len(task.cases)} cases in {dtypes}{describe_speed(task, module)}"}
    except Wrong as wrong:
        verdict |= {"kind": wrong.kind, "tensor": wrong.tensor, "sentence": str(wrong)}
    except Exception as error:  # whatever a participant's code raises is a verdict on it
        verdict |= {"kind": "crash", "sentence": describe_crash(error, path)}
    return verdict | {"case": case and case_name, "seconds": time.perf_counter() - start}


def main(jobs, verdicts):
    torch.set_num_threads(1)
    graded = []
    for folder, path in json.loads(pathlib.Path(jobs).read_text()):
        graded.append(grade(folder, path))
        pathlib.Path(verdicts).write_text(json.dumps(graded))


if __name__ == "__main__":
    main(*sys.argv[1:])
