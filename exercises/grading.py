"""Run answers to the exercises and judge them. check.py calls this in a process of its own.

    python grading.py FOLDER

FOLDER/jobs.json is a list of [folder of the exercise, file with the answer]. FOLDER/verdicts.json gets for each a
verdict {passed, kind, tensor, case, sentence, speed, seconds}, and FOLDER/done, at the end, the names of threads that
an answer left. keeper.py ends this process and all that it started.

The task.py of an exercise says what is required. An answer has a function run() that launches kernels on given outputs.
Inputs and outputs lie between guard bands, see common/measuring/guarded_memory.py.
"""

import ast
import contextlib
import copy
import dataclasses
import functools
import importlib.util
import json
import os
import pathlib
import sys
import threading
import time
import traceback
from collections.abc import Callable
from unittest import mock

HERE = pathlib.Path(__file__).resolve().parent
REPOSITORY = HERE.parent
sys.path.insert(0, str(REPOSITORY / "scripts"))
sys.modules.setdefault("grading", sys.modules[__name__])  # the tasks import it by this name

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton reads it on import
from answers import TARGET_VARIABLE
from common.measuring.guarded_memory import GuardedMemory, between_bands, bits, launches
from common.versions import relative_error
from judge import Judge, Wrong, check_bands, check_inputs
from rounding import bounds_in_16_bits, reference_in, rounded, stored
from speed import DeviceTimer, Speed, measure, recorded_speed
from strict_interpreter import Watch, describe_shape

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
TARGET = os.environ.get(TARGET_VARIABLE)  # an AMD GPU whose instructions are executed on the CPU
DEVICE = torch.device("cpu" if INTERPRETED or TARGET else "cuda")
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * (not INTERPRETED)
if TARGET:
    from amd.launch import executed

__all__ = ["Mistake", "Speed", "Task", "Wrong", "random", "relative_error", "rounded", "stored"]  # used by the tasks


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
    inputs(**sizes): name -> float32 or integer tensor, or number: the arguments of run().
    define(**inputs): name -> tensor that run() must produce, in the dtype of the inputs (float64 for the reference).
        rounded() and stored() mark what it rounds on the way in 16 bits, see rounding.py.
    names: result -> names of its dimensions.
    owner(module, result, index, inputs): the program that writes an element; () if no kernel does. Or words that say
        what an element stands for.
    wide: inputs that stay float32 in a 16-bit run.
    forward(**inputs): the inputs that a forward computed from the others. In a 16-bit run it computed them from rounded
        ones.
    storage(results, inputs): output -> tensor of its shape and dtype, where outputs are packed.
    views(outputs, inputs): result -> its part of the outputs.
    mistakes: name -> Mistake.
    explain(name, result, inputs): words on what is wrong with a result, where no suspect fits, or None.
    suspects: sentence -> function like define that returns what a typical error computes: every result that it makes
        wrong, or it is not recognised.
    labels: result of zeros and ones -> what each of its elements stands for.
    unwritten: result that the answer's own kernel does not write -> why its elements can be missing all the same.
    dtypes: those that the answer is run in.
    kernel: True if it must launch one. launches: the names of kernels that it must launch. kernels: how many different
        ones it must launch, whatever their names.
    direct: True if its kernels write the outputs themselves, not tensors that run() copies from.
    tolerance: relative error that is allowed in addition to twice PyTorch's in float32, or tolerance(**inputs), which
        returns it; for results of 16-bit inputs see rounding.py.
    launch(module, inputs, outputs): call run() and fill the outputs; on several ranks, see ranks.py.
    then(module, source): raise Wrong for what the results cannot show, or return words for the passed answer or None.
    speed: how fast the answer must be on a GPU.
    crashes: part of an error's message -> what it means here.
    """

    cases: dict[str, dict]
    inputs: Callable
    define: Callable
    names: dict[str, str]
    mistakes: dict[str, Mistake]
    owner: Callable = lambda module, name, index, inputs: ()
    wide: tuple[str, ...] = ()
    forward: Callable = lambda **inputs: {}
    storage: Callable = lambda results, inputs: results
    views: Callable = lambda outputs, inputs: outputs
    suspects: dict[str, Callable] = dataclasses.field(default_factory=dict)
    labels: dict[str, tuple] = dataclasses.field(default_factory=dict)
    unwritten: dict[str, str] = dataclasses.field(default_factory=dict)
    dtypes: tuple[torch.dtype, ...] = tuple(DTYPES)
    kernel: bool = True
    launches: tuple[str, ...] = ()
    kernels: int = 1
    explain: Callable = lambda name, result, inputs: None
    direct: bool = True
    tolerance: float | Callable = 1e-6
    launch: Callable = lambda module, inputs, outputs: module.run(**inputs, **outputs)
    then: Callable = lambda module, source: None
    speed: Speed | None = None
    crashes: dict[str, str] = dataclasses.field(default_factory=dict)


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


class Written:
    """Watch which outputs, {name: tensor}, the launches of kernels write."""

    def __init__(self, outputs):
        self.outputs, self.written = outputs, set()
        self.note()

    def note(self, *launched):
        self.noted = {name: bits(tensor).clone() for name, tensor in self.outputs.items()}

    def changed(self):
        return {name for name, tensor in self.outputs.items() if not torch.equal(self.noted[name], bits(tensor))}

    def after_launch(self):
        self.written |= self.changed()
        self.note()

    def not_by_kernels(self):
        """Return the outputs that no kernel wrote, or that something else wrote after the last one."""
        right = self.written - self.changed()
        return [name for name in self.outputs if name not in right]


def in_dtype(value, dtype):
    """Move a tensor to the device in a dtype; integers keep theirs, and a number stays what it is."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.to(DEVICE, dtype if value.is_floating_point() else value.dtype)


def cast(task, values, dtype):
    """Move inputs to the device in the dtype of a run; wide inputs stay float32."""
    moved = {name: in_dtype(value, torch.float32 if name in task.wide else dtype) for name, value in values.items()}
    return moved | task.forward(**moved)


def doubled(values):
    return {name: in_dtype(value, torch.float64) for name, value in values.items()}


def on_target():
    """Return a context in which kernels run as the instructions of the TARGET, if there is one."""
    return executed(TARGET) if TARGET else contextlib.nullcontext()


def check_kernels(task, launched, written):
    """Raise Wrong if right results are not those of the kernels that the task asks for."""
    if task.kernel and not launched:
        raise Wrong("no kernel", None, "the results are right, but no kernel was launched: compute them in the kernel")
    if missing := [name for name in task.launches if name not in launched]:
        raise Wrong("no kernel", None, f"the results are right, but {', '.join(missing)} was not launched: use it")
    if task.kernel and len(launched) < task.kernels:
        said = (
            f"the results are right, but only {', '.join(launched)} was launched: write a kernel for the backward, too"
        )
        raise Wrong("no kernel", None, said)
    if task.kernel and task.direct and (names := written.not_by_kernels()):
        raise Wrong("no kernel", names[0], f"{', '.join(names)}: right, but not written by a kernel: compute it there")


def check_loads(task, judge, watch, outputs):
    """Raise Wrong for what Triton's interpreter saw although the values are right, and if no kernel loads an input."""
    if watch.fault:
        kind, tensor, element, sentence = watch.fault
        name = tensor.name
        place = ""
        if element is not None and name in outputs:
            place = f", {judge.place_in_memory(name, element, outputs[name].shape)}"
        raise Wrong(kind, name, f"{name}{place}: the values are right here, but {sentence}")
    if task.kernel and task.direct and (names := watch.not_loaded()):
        raise Wrong("no kernel", names[0], f"{', '.join(names)}: no kernel loads it: compute in the kernel")


def run_case(task, module, sizes, dtype):
    """Raise Wrong unless run() produces what the task defines for these sizes in this dtype."""
    originals = cast(task, task.inputs(**sizes), dtype)
    plain = task.define(**copy.deepcopy(originals))
    with reference_in(dtype):
        exact = task.define(**doubled(originals))
    given = {name: between_bands(value) for name, value in originals.items() if isinstance(value, torch.Tensor)}
    storage = task.storage(plain, originals)
    with GuardedMemory():
        outputs = {name: torch.empty(like.shape, dtype=like.dtype, device=DEVICE) for name, like in storage.items()}
    written = Written(outputs)
    memory = GuardedMemory()
    watch = Watch(given, outputs, memory.tensors) if INTERPRETED else None
    with (
        on_target(),
        launches(written.note, written.after_launch) as launched,
        watch or contextlib.nullcontext(),
        memory if task.kernel else contextlib.nullcontext(),  # a captured graph allocates where it must
    ):
        task.launch(module, originals | given, outputs)
    check_inputs(given, originals)
    judge = Judge(
        task,
        module,
        originals,
        lambda suspect: suspect(**doubled(originals)),
        seen=watch.describe_load() if watch else None,
        undefined=watch.undefined if watch else None,
        unset=watch.unset if watch else None,
        rounds=dtype != torch.float32 and torch.float32 in task.dtypes,  # the dtype before, and right
    )
    got = task.views(outputs, originals)
    for name in exact:
        judge.check_written(name, got[name])
    allocated = [(describe_shape(tensor), tensor) for tensor in memory.tensors]
    check_bands([*(outputs | given).items(), *allocated], watch.stores if watch else {})
    for name in exact:
        judge.check_finite(name, got, exact)
    bounds = None
    if dtype.itemsize == 2:
        bounds = bounds_in_16_bits(task.define, originals, dtype, plain, exact, judge.tolerance())
    judge.check_values(got, plain, exact, bounds)
    check_kernels(task, launched, written)
    if watch:
        check_loads(task, judge, watch, outputs)


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
        raise Wrong("slow", None, f"right but slow: {sentence}; you need at least {100 * speed.floor:.0f} %")
    return rate, copy_rate


def describe_speed(speed):
    rate, copy_rate = speed
    return f"{rate:,.0f} GB/s, {100 * rate / copy_rate:.0f} % of the copy bandwidth ({copy_rate:,.0f} GB/s)"


def describe_pass(task, speed, note=None):
    dtypes = f"{len(task.dtypes)} dtypes" if len(task.dtypes) > 1 else str(task.dtypes[0]).removeprefix("torch.")
    sentence = f"{len(task.cases)} cases in {dtypes}"
    if note:
        return f"{sentence}; {note}"
    if task.speed and not speed:
        return f"{sentence}; run it on a GPU to see its speed"
    if not speed:
        return sentence
    recorded = recorded_speed(task.speed.operation)
    compared = f"; version 3 on one {recorded['device']}: {describe_speed(recorded['V3'])}" if recorded else ""
    return f"{sentence}; {describe_speed(speed)}{compared}"


# ---------------------------------------------------------------- verdicts

SOLUTIONS = ("solution", "answer")
LONGEST_REASON = 400  # letters of an error's message
graded = None  # the file of the answer that is being graded


@functools.cache
def guard_solutions():
    """Raise Wrong wherever an answer opens a solution from now on, by importing it for one."""

    def check_open(event, arguments):
        if event != "open" or graded is None or graded.stem in SOLUTIONS or not isinstance(arguments[0], str | bytes):
            return
        path = pathlib.Path(os.path.realpath(os.fsdecode(arguments[0])))  # or the compiled module of it
        if path.name.split(".")[0] in SOLUTIONS and HERE in path.parents:
            raise Wrong("copied", None, f"the answer reads {path.name}: write the kernel yourself")

    sys.addaudithook(check_open)


def check_precedence(source):
    """Raise Wrong for a < b & c < d, which Python reads as a < (b & c) < d, and for `and` between vectors."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return  # loading the answer says where
    lines = source.encode().splitlines()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.decorator_list:
            check_truth_values(node)
            check_calls(node)
        if not isinstance(node, ast.Compare):
            continue
        for operand in (node.left, *node.comparators):
            if not isinstance(operand, ast.BinOp) or not isinstance(operand.op, ast.BitAnd | ast.BitOr):
                continue
            before = lines[operand.lineno - 1][: operand.col_offset].rstrip()
            if not before.endswith(b"("):
                sign = "&" if isinstance(operand.op, ast.BitAnd) else "|"
                said = f"{sign} binds tighter than a comparison: put each comparison into parentheses"
                raise Wrong("precedence", None, f"line {node.lineno}: {said}")


def assigned(node):
    """Yield each name that an assignment binds, with its value; one of a tuple has its own."""
    for target in node.targets:
        pairs = [(target, node.value)]
        if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
            pairs = zip(target.elts, node.value.elts, strict=False)
        yield from ((name, value) for name, value in pairs if isinstance(name, ast.Name))


def check_truth_values(kernel):
    """Raise Wrong where a kernel asks for the one truth value of a vector that it makes of tl.arange."""
    vectors = set()

    def is_vector(node):
        """Return True for tl.arange, for a name that holds such a vector, and for arithmetic with one."""
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            return called.endswith("arange") or (called.endswith(".to") and is_vector(node.func.value))
        if isinstance(node, ast.Name):
            return node.id in vectors
        if isinstance(node, ast.Subscript):
            return is_vector(node.value)
        if isinstance(node, ast.BinOp | ast.Compare):
            return any(is_vector(part) for part in ast.iter_child_nodes(node))
        return False

    for node in sorted(ast.walk(kernel), key=lambda node: getattr(node, "lineno", 0)):
        if isinstance(node, ast.Assign):
            vectors.update(target.id for target, value in assigned(node) if is_vector(value))
        if isinstance(node, ast.BoolOp) and any(map(is_vector, node.values)):
            word, sign = ("and", "&") if isinstance(node.op, ast.And) else ("or", "|")
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not) and is_vector(node.operand):
            word, sign = "not", "~"
        elif isinstance(node, ast.If | ast.IfExp) and is_vector(node.test):
            word, sign = "if", "a mask or tl.where"
        else:
            continue
        said = f"{word} asks for one truth value, and a vector has many: use {sign}"
        said += ", and put each comparison into parentheses" * (word in ("and", "or"))
        raise Wrong("precedence", None, f"line {node.lineno}: {said}")


PYTHON = ("math", "np", "numpy", "torch")  # modules whose functions take no tile
TILES = ("load", "arange", "zeros", "full", "where", "sum", "max", "min", "exp", "exp2", "log", "sqrt", "rsqrt", "dot")


def is_number(node):
    return isinstance(node, ast.Constant) and isinstance(node.value, int)


def check_calls(kernel):
    """Raise Wrong where a kernel gives a tile to a function of Python, or asks for one of its elements."""
    tiles = set()

    def is_tile(node):
        """Return True for what tl.load and its like return, for a name that holds it, and for arithmetic with it."""
        if isinstance(node, ast.Call):
            module, _, function = ast.unparse(node.func).rpartition(".")
            return (module == "tl" and function in TILES) or (function == "to" and is_tile(node.func.value))
        if isinstance(node, ast.Name):
            return node.id in tiles
        return isinstance(node, ast.BinOp | ast.UnaryOp) and any(map(is_tile, ast.iter_child_nodes(node)))

    for node in sorted(ast.walk(kernel), key=lambda node: getattr(node, "lineno", 0)):
        if isinstance(node, ast.Assign):
            tiles.update(target.id for target, value in assigned(node) if is_tile(value))
        if isinstance(node, ast.Call):
            module, _, function = ast.unparse(node.func).rpartition(".")
            if module in PYTHON and any(map(is_tile, node.args)):
                said = f"{module}.{function} takes no tile: use tl.{function}, or compose it of functions of tl"
                raise Wrong("crash", None, f"line {node.lineno}: {said}")
        if isinstance(node, ast.Subscript) and is_tile(node.value) and is_number(node.slice):
            said = "a tile has no elements to ask for: load that one, or sum the tile after tl.where makes the rest 0"
            raise Wrong("crash", None, f"line {node.lineno}: {ast.unparse(node)}: {said}")


def causes(error):
    """Yield an error, its cause, the cause of that, and so on; an answer can make a circle of them."""
    seen = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__


def reason_of(error):
    """Return an error's class and the last line of its message, which a class of the answer may be unable to give."""
    try:
        words = str(error).strip().splitlines()[-1:]
    except BaseException as second:
        words = [f"its __str__ raises {type(second).__name__}"]
    reason = ": ".join([type(error).__name__, *words])
    return reason if len(reason) <= LONGEST_REASON else f"{reason[:LONGEST_REASON]} ..."


def describe_crash(error, path, known=None):
    """Return the line of the answer that failed, and why; known: part of a message -> what it means."""
    line = None
    for cause in causes(error):
        for frame, number in traceback.walk_tb(cause.__traceback__):
            if frame.f_code.co_filename == str(path):
                line = number
    reason = reason_of(cause)
    reason += next((f": {meaning}" for part, meaning in (known or {}).items() if part in reason), "")
    return f"line {line}: {reason}" if line else reason


def grade(folder, path):
    """Return the verdict on the answer in a file: the first case and dtype in which it is wrong."""
    global graded
    start, case, task = time.perf_counter(), None, None
    guard_solutions()
    verdict = {"passed": False, "kind": None, "tensor": None, "speed": None}
    try:
        task, graded = load_task(folder), pathlib.Path(path)
        source = graded.read_text(encoding="utf-8")
        check_precedence(source)
        module = load_module(path, f"answer_{pathlib.Path(path).stem}")
        for name, sizes in task.cases.items():
            for dtype in task.dtypes:
                case = f"{name}, {str(dtype).removeprefix('torch.')}"
                if TARGET:
                    tell(f"   {case}")  # it takes a while
                run_case(task, module, sizes, dtype)
        case = None
        with on_target():
            note = task.then(module, source)
        speed = check_speed(task, module, DeviceTimer(DEVICE)) if task.speed and DEVICE.type == "cuda" else None
        verdict |= {"passed": True, "speed": speed, "sentence": describe_pass(task, speed, note)}
        verdict["interpreted"] = INTERPRETED and task.kernel
    except Wrong as wrong:
        verdict |= {"kind": wrong.kind, "tensor": wrong.tensor, "sentence": str(wrong)}
    except BaseException as error:  # whatever a participant's code raises is a verdict on it
        verdict |= {"kind": "crash", "sentence": describe_crash(error, path, task and task.crashes)}
    finally:
        graded = None
    return verdict | {"case": case, "seconds": time.perf_counter() - start}


def tell(line):
    """Print a line to standard output, whatever an answer did to print and sys.stdout."""
    with contextlib.suppress(Exception):  # none of it may fail the answer
        sys.stdout.flush()
    with contextlib.suppress(OSError):
        os.write(1, f"{line}\n".encode())


def write_json(content, path):
    """Write a file whole or not at all."""
    partial = pathlib.Path(f"{path}.partial")
    partial.write_text(json.dumps(content))
    os.replace(partial, path)


def answer_jobs(judge_one, scratch):
    """Write the verdicts, judge_one(folder, path), on all jobs."""
    torch.set_num_threads(1)
    own = os.getpid()
    found = []
    for folder, path in json.loads(pathlib.Path(scratch, "jobs.json").read_text()):
        found.append(judge_one(folder, path))
        if os.getpid() != own:  # a fork that the answer let run on
            os._exit(0)
        write_json(found, pathlib.Path(scratch, "verdicts.json"))
    threads = [thread for thread in threading.enumerate() if thread is not threading.main_thread()]
    write_json([thread.name for thread in threads if not thread.daemon], pathlib.Path(scratch, "done"))


if __name__ == "__main__":
    answer_jobs(grade, *sys.argv[1:])
