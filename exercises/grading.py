"""Run answers to the exercises and judge them. check.py calls this in a process of its own.

    python grading.py JOBS VERDICTS     # both JSON: a list of [folder of the exercise, file with the answer], and
                                        # for each a verdict {passed, kind, tensor, case, sentence, speed, seconds}

The task.py of an exercise says what is required. An answer has a function run() that launches kernels on given outputs.
Inputs lie between guard bands of NaN, which reveal a load past their end. Outputs are filled with a special NaN, which
reveals elements that are never written, and lie between bands of a constant, which reveal a store past their end.
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
    os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton reads it on import
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import KernelInterface

from common.versions import relative_error
from judge import SENTINEL, UNWRITTEN, Judge, Wrong, check_bands, check_inputs
from speed import DeviceTimer, Speed, measure, recorded_speed

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * (not INTERPRETED)
BAND = 1 << 14

__all__ = ["Mistake", "Speed", "Task", "Wrong", "random", "relative_error"]  # used by the tasks


@dataclasses.dataclass(frozen=True)
class Mistake:
    """A typical wrong answer: the solution with `text` replaced, and the tensor that the checker must blame for it.

    says: words that the checker's sentence must contain. gpu_kind: a GPU may show the mistake as another kind.
    """

    text: str
    replacement: str
    blames: str
    kind: str = "value"
    count: int = 1
    gpu_kind: str | None = None
    says: str = ""


@dataclasses.dataclass(frozen=True)
class Task:
    """Hold what run() of an exercise must compute.

    cases: name -> sizes, the smallest first.
    inputs(**sizes): name -> float32 tensor or number, the arguments of run().
    define(**inputs): name -> tensor that run() must produce, in the dtype of the inputs (float64 for the reference).
    names: result -> names of its dimensions.
    owner(module, result, index, inputs): the program that writes an element; () if no kernel does.
    wide: inputs that stay float32 in a 16-bit run.
    storage(results, inputs): output -> tensor of its shape and dtype, where outputs are packed.
    views(outputs, inputs): result -> its part of the outputs.
    mistakes: name -> Mistake.
    suspects: sentence -> function like define that returns what a typical error computes.
    labels: result of zeros and ones -> what each of its elements stands for.
    dtypes: those that the answer is run in. kernel: True if it must launch one.
    tolerance: relative error that is allowed in addition to twice PyTorch's.
    then(module, source): raise Wrong for what the results cannot show.
    speed: how fast the answer must be on a GPU.
    """

    cases: dict[str, dict]
    inputs: Callable
    define: Callable
    names: dict[str, str]
    mistakes: dict[str, Mistake]
    owner: Callable = lambda module, name, index, inputs: ()
    wide: tuple[str, ...] = ()
    storage: Callable = lambda results, inputs: results
    views: Callable = lambda outputs, inputs: outputs
    suspects: dict[str, Callable] = dataclasses.field(default_factory=dict)
    labels: dict[str, tuple] = dataclasses.field(default_factory=dict)
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
    """Draw normal numbers. A scale and an offset keep constants and forgotten factors from being right by chance."""
    return offset + scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# ---------------------------------------------------------------- running one case


def placed_input(tensor):
    """Return a copy between guard bands of NaN."""
    memory = torch.full((tensor.numel() + 2 * BAND,), math.nan, dtype=tensor.dtype, device=DEVICE)
    view = memory[BAND : BAND + tensor.numel()].view(tensor.shape)
    return view.copy_(tensor)


def placed_output(like):
    """Return a tensor of that shape and dtype filled with the NaN of unwritten elements, and the memory around it."""
    memory = torch.full((like.numel() + 2 * BAND,), SENTINEL, dtype=like.dtype, device=DEVICE)
    view = memory[BAND : BAND + like.numel()]
    integer, bits = UNWRITTEN[like.dtype]
    view.view(integer).fill_(bits)
    return view.view(like.shape), memory


@contextlib.contextmanager
def counted_launches():
    """Record the names of the kernels that are launched in the list that this returns."""
    names = []

    def recording(launch):
        def record(kernel, grid):
            names.append(kernel.__name__)
            return launch(kernel, grid)

        return record

    with contextlib.ExitStack() as patches:
        for owner in (
            KernelInterface,
            InterpretedFunction,
        ):  # before Triton 3.6 the latter has its own
            if "__getitem__" in vars(owner):
                patches.enter_context(mock.patch.object(owner, "__getitem__", recording(owner.__getitem__)))
        yield names


def cast(task, values, dtype):
    """Move inputs to the device in the dtype of a run; numbers and wide inputs keep theirs."""

    def convert(name, value):
        if not isinstance(value, torch.Tensor):
            return value
        wide = name in task.wide and dtype != torch.float64
        return value.to(DEVICE, torch.float32 if wide else dtype)

    return {name: convert(name, value) for name, value in values.items()}


def doubled(values):
    return {name: v.double() if isinstance(v, torch.Tensor) else v for name, v in values.items()}


def run_case(task, module, sizes, dtype):
    """Raise Wrong unless run() produces what the task defines for these sizes in this dtype."""
    originals = cast(task, task.inputs(**sizes), dtype)
    plain, exact = task.define(**copy.deepcopy(originals)), task.define(**doubled(originals))
    inputs = {name: placed_input(v) if isinstance(v, torch.Tensor) else v for name, v in originals.items()}
    storage = {name: placed_output(like) for name, like in task.storage(plain, originals).items()}
    with counted_launches() as launched:
        module.run(**inputs, **{name: view for name, (view, _) in storage.items()})
    check_inputs(inputs, originals)
    judge = Judge(task, module, originals, lambda suspect: suspect(**doubled(originals)))
    got = task.views({name: view for name, (view, _) in storage.items()}, originals)
    for name in exact:
        judge.check_written(name, got[name])
    for name, (_, memory) in storage.items():
        check_bands(name, memory, BAND)
    for name in exact:
        judge.check_finite(name, got[name], exact[name])
    judge.check_values(got, plain, exact)
    if task.kernel and not launched:
        raise Wrong("no kernel", None, "the results are right, but no kernel was launched: compute them in the kernel")


# ---------------------------------------------------------------- speed


def check_speed(task, module, timer):
    """Return the answer's GB/s and those of a copy; raise Wrong if it is below the task's floor."""
    speed = task.speed
    inputs = cast(task, task.inputs(**speed.sizes), torch.float32)
    results = task.storage(task.define(**copy.deepcopy(inputs)), inputs)
    outputs = {name: torch.empty(like.shape, dtype=like.dtype, device=DEVICE) for name, like in results.items()}
    del results
    with contextlib.ExitStack() as larger:
        for name, size in speed.tiles.items():
            larger.enter_context(mock.patch.object(module, name, size))
        rate, copy_rate = measure(module.run, inputs, outputs, DEVICE, timer)
    if rate < speed.floor * copy_rate:
        sentence = describe_speed([rate, copy_rate])
        raise Wrong("slow", None, f"right but slow: {sentence}; at least {100 * speed.floor:.0f} % are required")
    return rate, copy_rate


def describe_speed(speed):
    rate, copy_rate = speed
    return f"{rate:,.0f} GB/s, {100 * rate / copy_rate:.0f} % of the copy bandwidth ({copy_rate:,.0f} GB/s)"


def describe_pass(task, speed):
    dtypes = f"{len(task.dtypes)} dtypes" if len(task.dtypes) > 1 else str(task.dtypes[0]).removeprefix("torch.")
    sentence = f"{len(task.cases)} cases in {dtypes}"
    if task.speed and not speed:
        return f"{sentence}; its speed needs a GPU"
    if not speed:
        return sentence
    recorded = recorded_speed(task.speed.operation)
    compared = f"; version 3 on one {recorded['device']}: {describe_speed(recorded['V3'])}" if recorded else ""
    return f"{sentence}; {describe_speed(speed)}{compared}"


# ---------------------------------------------------------------- verdicts


def describe_crash(error, path):
    """Return the line of the answer that failed, and why."""
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
    """Return the verdict on the answer in a file: the first case and dtype in which it is wrong."""
    start, case = time.perf_counter(), None
    verdict = {"passed": False, "kind": None, "tensor": None, "speed": None}
    try:
        task = load_task(folder)
        module = load_module(path, f"answer_{pathlib.Path(path).stem}")
        for name, sizes in task.cases.items():
            for dtype in task.dtypes:
                case = f"{name}, {str(dtype).removeprefix('torch.')}"
                run_case(task, module, sizes, dtype)
        case = None
        task.then(module, pathlib.Path(path).read_text(encoding="utf-8"))
        speed = check_speed(task, module, DeviceTimer(DEVICE)) if task.speed and not INTERPRETED else None
        verdict |= {"passed": True, "speed": speed, "sentence": describe_pass(task, speed)}
    except Wrong as wrong:
        verdict |= {"kind": wrong.kind, "tensor": wrong.tensor, "sentence": str(wrong)}
    except Exception as error:  # whatever a participant's code raises is a verdict on it
        verdict |= {"kind": "crash", "sentence": describe_crash(error, path)}
    return verdict | {"case": case, "seconds": time.perf_counter() - start}


def main(jobs, verdicts):
    torch.set_num_threads(1)
    graded = []
    for folder, path in json.loads(pathlib.Path(jobs).read_text()):
        graded.append(grade(folder, path))
        pathlib.Path(verdicts).write_text(json.dumps(graded))


if __name__ == "__main__":
    main(*sys.argv[1:])
