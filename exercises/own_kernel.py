"""Check a kernel of your own against PyTorch's function. check.py calls this in a process of its own.

    python own_kernel.py FOLDER  # as grading.py; a job is [folder, "check" or "time"]

The folder has a task.py like the one in own_kernel_template, which check.py new copies. What the function and its
backward allocate lies between guard bands, copies of the inputs included.
"""

import ast
import contextlib
import dataclasses
import importlib
import os
import pathlib
import re
import statistics
import sys
from collections.abc import Callable
from unittest import mock

import torch

import grading  # before Triton: it chooses the interpreter where there is no GPU

# isort: split
from triton.compiler.errors import CompileTimeAssertionFailure
from triton.runtime.autotuner import Autotuner
from triton.runtime.errors import OutOfResources, PTXASError
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import KernelInterface

from common.measuring.guarded_memory import GuardedMemory, address, between_bands, bits, launches
from judge import ALIKE, Judge, Wrong, check_bands
from speed import DeviceTimer, copy_rate
from strict_interpreter import Unsupported, Watch, describe_shape, supply_libdevice, supply_wrap_triton

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
OF_INPUTS = ("padded", "reversed", "every second")  # layouts that a caller's tensors may have
OF_GRADIENTS = ("expanded", "reversed", "every second")  # layouts in which autograd hands on a gradient
CASES_WITH_LAYOUTS = 2  # the first ones, which are small
DROPPED = (CompileTimeAssertionFailure, OutOfResources, PTXASError)  # an autotuner takes another configuration


@dataclasses.dataclass(frozen=True)
class OwnTask:
    """Hold what a task.py says: its names in small letters.

    function: takes the inputs in their order, as reference does, and launches kernels. path: of its file.
    cases: sizes, arguments of inputs. gradients: the inputs that are differentiated; None: all of floating point.
    tolerance: relative error that is allowed in addition to twice that of the reference, which is computed in float32
    and rounded once where the dtype has 16 bits.
    contiguous: every caller's inputs are; gradients may lie in memory as they like all the same.
    timed: sizes for --time.
    """

    function: Callable
    path: pathlib.Path
    cases: list[dict]
    inputs: Callable
    reference: Callable
    gradients: tuple[str, ...] | None = None
    dtypes: tuple[torch.dtype, ...] = DTYPES
    tolerance: float = 1e-6
    contiguous: bool = False
    timed: dict | None = None


@dataclasses.dataclass(frozen=True)
class Way:
    """Hold one way to call the function.

    layout: of the tensor `of`, an input or "gradients". leaf: the only input that needs a gradient; None: all.
    again: another call runs before the backward. tenths: each number is a tenth of what inputs() gives.
    tuned: each launch of an autotuned kernel runs it twice, as the first one does, which times its configurations.
    configuration: the number of the one that they take.
    """

    of: str | None = None
    layout: str = "contiguous"
    leaf: str | None = None
    again: bool = False
    tenths: bool = False
    tuned: bool = False
    configuration: int = 0

    def words(self):
        if self.of:
            return f", {self.of} {self.layout}"
        if self.leaf:
            return f", {self.leaf} alone"
        if self.again:
            return ", two calls"
        if self.tenths:
            return ", a tenth of each number"
        return ", while it is tuned" if self.tuned else ""


# ---------------------------------------------------------------- task.py


def load_function(folder, text):
    """Return the function that "file.py:function" names, and its file; a file of a package is imported as its part."""
    file, _, name = text.rpartition(":")
    path = (folder / file).resolve()
    if not file or not path.is_file():
        raise Wrong("task", None, f"FUNCTION is {text!r}, which names no file: write 'file.py:function'")
    top = path.parent
    while (top / "__init__.py").is_file():
        top = top.parent
    sys.path.insert(0, str(top))
    if top == path.parent:
        module = grading.load_module(path, f"{folder.name}_{path.stem}")
    else:
        module = importlib.import_module(".".join(path.relative_to(top).with_suffix("").parts))
    function = module
    for part in name.split("."):
        function = getattr(function, part, None)
    if isinstance(function, KernelInterface | InterpretedFunction):
        kind = f"{name} is a @triton.jit function, which gets pointers and a grid"
        raise Wrong("task", None, f"{kind}: name the Python function that allocates its results and launches it")
    if isinstance(function, type) and issubclass(function, torch.autograd.Function):
        function = function.apply
    if not callable(function):
        raise Wrong("task", None, f"{path.name} has no function {name!r}: correct FUNCTION in task.py")
    return function, path


def load_own_task(folder):
    sys.path.insert(0, str(folder))
    module = grading.load_module(folder / "task.py", f"task_{folder.name}")
    given = {name.lower(): value for name, value in vars(module).items()}
    missing = [name for name in ("FUNCTION", "CASES", "inputs", "reference") if name.lower() not in given]
    if missing:
        raise Wrong("task", None, f"task.py does not define {', '.join(missing)}: compare it with a new one")
    function, path = load_function(folder, given["function"])
    names = {field.name for field in dataclasses.fields(OwnTask)} & set(given)
    return OwnTask(**{name: given[name] for name in names} | {"function": function, "path": path})


def draw(task, sizes):
    """Return the same inputs in every call."""
    torch.manual_seed(0)
    return task.inputs(**sizes)


# ---------------------------------------------------------------- one call


def tensors_of(values):
    return {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}


def gradients_of(task, inputs):
    """Return the names of the inputs that are differentiated."""
    if task.gradients is None:
        return [name for name, value in tensors_of(inputs).items() if value.is_floating_point()]
    unknown = [name for name in task.gradients if name not in inputs]
    if unknown:
        raise Wrong("task", None, f"GRADIENTS names {', '.join(unknown)}, which inputs() does not return")
    return list(task.gradients)


def named(results):
    """Return {"y": the only result}, or {"y0": the first of several, ...}."""
    if isinstance(results, torch.Tensor):
        return {"y": results}
    return {f"y{i}": result for i, result in enumerate(results)}


def differentiate(results, inputs, leaves, cotangents):
    """Return {"dx": gradient or None} for the leaves."""
    if not leaves or not cotangents:
        return {}
    used = [results[name] for name in cotangents]
    wanted = [inputs[name] for name in leaves]
    gradients = torch.autograd.grad(used, wanted, list(cotangents.values()), allow_unused=True)
    return {f"d{name}": gradient for name, gradient in zip(leaves, gradients, strict=True)}


def with_leaves(inputs, leaves):
    """Return the inputs, detached, of which the leaves need a gradient."""
    fresh = {name: value.detach() if isinstance(value, torch.Tensor) else value for name, value in inputs.items()}
    for name in leaves:
        fresh[name].requires_grad_()
    return fresh


def defined(task, inputs, leaves, cotangents):
    """Return {name: tensor} of the reference's results and gradients."""
    inputs = with_leaves(inputs, leaves)
    results = named(task.reference(*inputs.values()))
    gradients = differentiate(results, inputs, leaves, cotangents)
    if missing := [name for name, gradient in gradients.items() if gradient is None]:
        raise Wrong("task", None, f"the reference has no gradient {', '.join(missing)}: correct GRADIENTS in task.py")
    return {name: value.detach() for name, value in (results | gradients).items()}


def draw_cotangents(task, inputs, leaves, layout):
    """Return a random gradient between guard bands for each result that has one: {"y": tensor}."""
    inputs = with_leaves(inputs, leaves)
    results = named(task.reference(*inputs.values()))
    found = {}
    for seed, (name, result) in enumerate(results.items(), 100):
        if result.requires_grad:
            drawn = grading.random(*result.shape, seed=seed, scale=0.8, offset=0.2)
            found[name] = between_bands(drawn.to(result), layout)
    return found


def numbers_of(inputs):
    """Return {name: number} of the inputs that are numbers and not whole."""
    return {name: value for name, value in inputs.items() if isinstance(value, float) and value}


def in_dtype(inputs, dtype):
    return {name: grading.in_dtype(value, dtype) for name, value in inputs.items()}


def plain_results(task, inputs, leaves, cotangents, dtype):
    """Return what PyTorch computes in this dtype; where it has 16 bits, in float32, rounded once.

    Some of its functions round what they add up to 16 bits. A kernel that does so, too, is no better for that.
    """
    if dtype.itemsize != 2:
        return defined(task, inputs, leaves, cotangents)
    wide = defined(task, in_dtype(inputs, torch.float32), leaves, in_dtype(cotangents, torch.float32))
    rounded = {name: value.to(dtype) if value.is_floating_point() else value for name, value in wide.items()}
    try:
        own = defined(task, inputs, leaves, cotangents)  # some results may be float32 all the same
    except RuntimeError as error:
        if "not implemented for" not in str(error):
            raise
        return rounded
    return {name: wide[name].to(value.dtype) for name, value in own.items()}


def check_results(results, wanted, leaves, cotangents):
    """Raise Wrong unless the results have the reference's number, shapes, dtypes and, for a backward, a grad_fn."""
    expected = [name for name in wanted if name in named_like(wanted, leaves)]
    if list(results) != expected:
        raise Wrong("results", None, f"it returns {len(results)} results, the reference {len(expected)}")
    for name, result in results.items():
        right = wanted[name]
        if not isinstance(result, torch.Tensor):
            raise Wrong("results", name, f"{name} is {type(result).__name__}, not a tensor")
        if result.shape != right.shape or result.dtype != right.dtype:
            mine, its = (f"{str(t.dtype).removeprefix('torch.')} {list(t.shape)}" for t in (result, right))
            raise Wrong("results", name, f"{name} is {mine}, but should be {its}, like the reference's")
        if name in cotangents and not result.requires_grad:
            said = f"{name} has no grad_fn, because autograd cannot see into a kernel: call a torch.autograd.Function"
            raise Wrong("no gradient", name, f"{said} through .apply, or write GRADIENTS = () for a forward alone")


def named_like(wanted, leaves):
    """Return the names of the results among those of results and gradients."""
    return [name for name in wanted if name not in {f"d{leaf}" for leaf in leaves}]


def check_unchanged(tensors, copies, sentence):
    for name, tensor in tensors.items():
        if not torch.equal(bits(tensor), bits(copies[name])):
            raise Wrong("changed", name, f"{name}: {sentence}")


def contiguous(tensors):
    return {name: tensor.detach().clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()}


def configurations_of(tuner, arguments, options, tiles_alone):
    """Return the configurations that an autotuned kernel would time for a launch.

    tiles_alone: those that differ in warps or stages alone are one.
    """
    tuner.nargs = dict(zip(tuner.arg_names, arguments, strict=False))
    left = tuner.prune_configs(options)
    return tiles_of(left) if tiles_alone else left


def tiles_of(configurations):
    """Return the first of those configurations that differ in warps or stages alone."""
    found = {}
    for config in configurations:
        found.setdefault((str(config.kwargs), config.pre_hook), config)
    return list(found.values())


def describe_configuration(config, others):
    """Return "BLOCK 4, num_warps 8": what differs between the configurations of a kernel."""
    values = config.all_kwargs()
    differ = [name for name in values if any(other.all_kwargs().get(name) != values[name] for other in others)]
    return ", ".join(f"{name} {values[name]}" for name in differ)


class Configurations(contextlib.ExitStack):
    """Choose the configurations of autotuned kernels inside a `with`, untimed.

    number: of the configuration that every launch takes, counted again from 0 where a kernel has fewer.
    tuned: run each kernel twice, as the autotuner does. between(name): called between the two.
    taken: {name of a kernel: words on its configuration}, where it has several. most: the most that a kernel has.
    times: the autotuner would run a kernel more than once.
    """

    def __init__(self, number=0, tuned=False):
        super().__init__()
        self.number, self.tuned = number, tuned
        self.between = lambda name: None
        self.taken, self.most, self.times = {}, 1, False

    def run(self, tuner, *arguments, **options):
        """Stand for Autotuner.run."""
        name = tuner.base_fn.__name__
        if unknown := [key for key in tuner.keys if key not in tuner.arg_names]:
            said = f"key of its triton.autotune names {', '.join(unknown)}, and it has no such argument"
            raise Wrong("autotune", None, f"{name}: {said}: one configuration would be taken for all sizes")
        found = configurations_of(tuner, arguments, options, tiles_alone=grading.INTERPRETED)
        self.most = max(self.most, len(found))
        self.times |= len(tuner.configs) > 1
        first = self.number % len(found)
        *others, last = found[first:] + found[:first]
        for config in others:
            with contextlib.suppress(*DROPPED):
                return self.run_with(tuner, config, found, arguments, options)
        return self.run_with(tuner, last, found, arguments, options)

    def run_with(self, tuner, config, found, arguments, options):
        """Run an autotuned kernel with one of its configurations."""
        if len(found) > 1:
            self.taken[tuner.base_fn.__name__] = describe_configuration(config, found)
        values = {**tuner.nargs, **options, **config.all_kwargs()}

        def launch():
            if config.pre_hook:
                config.pre_hook(values)
            return tuner.fn.run(*arguments, **options, **config.all_kwargs())

        if self.tuned and len(tuner.configs) > 1:
            tuner.pre_hook(values)
            launch()
            tuner.post_hook(values, exception=None)
            tuner.pre_hook(values, reset_only=True)
            self.between(tuner.base_fn.__name__)
        return launch()

    def words(self):
        """Return "BLOCK 4", or "BLOCK 4 of forward_kernel, BLOCK 8 of backward_kernel"."""
        if len(self.taken) == 1:
            return next(iter(self.taken.values()))
        return ", ".join(f"{words} of {name}" for name, words in self.taken.items())

    def __enter__(self):
        self.enter_context(mock.patch.object(Autotuner, "run", lambda tuner, *args, **kw: self.run(tuner, *args, **kw)))
        return self


def axis_names(shape, sizes):
    """Return a name for each axis: that of the size it has, if only one has it; else row and column, or its number."""
    if len(shape) < 3:
        return ("", "element", "row column")[len(shape)]
    names = []
    for axis, length in enumerate(shape):
        fitting = [name for name, size in sizes.items() if size == length]
        names.append(fitting[0] if len(fitting) == 1 and list(shape).count(length) == 1 else f"axis{axis}")
    return " ".join(names)


@dataclasses.dataclass
class Seen:
    """Collect what no single call can tell.

    notes: words for a kernel that passes; a dict keeps their order. lines, repeated: as in Watch. watch: of the last
    call, which the others do not hold yet.
    """

    notes: dict = dataclasses.field(default_factory=dict)
    lines: set = dataclasses.field(default_factory=set)
    repeated: set = dataclasses.field(default_factory=set)
    watch: Watch | None = None


def run_way(task, sizes, dtype, way, seen, configurations):
    """Raise Wrong unless a call and its backward do what the reference does."""
    values = in_dtype(draw(task, sizes), dtype)
    if way.tenths:
        values |= {name: value / 10 for name, value in numbers_of(values).items()}
    layouts = {name: way.layout if name == way.of else "contiguous" for name in values}
    given = {name: between_bands(value, layouts[name]) for name, value in tensors_of(values).items()}
    inputs = values | given
    leaves = gradients_of(task, inputs)
    with grading.on_target():  # a reference may launch kernels, too: to draw the random numbers of a dropout
        cotangents = draw_cotangents(task, inputs, leaves, way.layout if way.of == "gradients" else "contiguous")
        leaves = [way.leaf] if way.leaf else leaves
        dense = values | contiguous(given), contiguous(cotangents)
        plain = plain_results(task, dense[0], leaves, dense[1], dtype)
        exact = defined(task, in_dtype(dense[0], torch.float64), leaves, in_dtype(dense[1], torch.float64))
    exact = {name: value.double() for name, value in exact.items()}  # of integers, too
    copies = contiguous(given), contiguous(cotangents)

    with GuardedMemory() as memory:
        watched = given | {f"d{name}": cotangent for name, cotangent in cotangents.items()}
        seen.watch = watch = Watch(watched, {}, memory.tensors) if grading.INTERPRETED else None
        if watch:
            configurations.between = watch.start_launch
        with (
            grading.on_target(),
            configurations,
            launches() as launched,
            watch or contextlib.nullcontext(),
        ):
            called = with_leaves(inputs, leaves)
            results = named(task.function(*called.values()))
            check_results(results, plain, leaves, cotangents)
            if way.again:
                task.function(*with_leaves(another(values), leaves).values())
            gradients = differentiate(results, called, leaves, cotangents)

    for name, gradient in gradients.items():
        if gradient is None:
            raise Wrong("no gradient", name, f"{name} is None: return a gradient for {name[1:]} from backward")
    got = {name: tensor.detach() for name, tensor in (results | gradients).items()}
    if watch and way != Way():
        watch.undefined = None  # in the plain way, which was right, the same load left as much undefined
    judge_way(task, sizes, dtype, got, plain, exact, memory, watch, (given, cotangents), copies)
    if not launched:
        raise Wrong("no kernel", None, "the results are right, but no kernel was launched")
    if memory.summed:
        seen.notes["a kernel stores what PyTorch adds up in 16 bits: allocate partial sums in float32"] = None
    for name in sorted(memory.opaque):
        seen.notes[f"what {name} allocates is not watched: check the function that it wraps"] = None
    if watch:
        seen.lines |= watch.lines
        seen.repeated |= watch.repeated


def judge_way(task, sizes, dtype, got, plain, exact, memory, watch, tensors, copies):
    """Raise Wrong for what the call did to memory, then for what it computed."""
    given, cotangents = tensors
    gradients = {f"d{name}": cotangent for name, cotangent in cotangents.items()}
    names = {address(tensor): name for name, tensor in got.items()}
    allocated = [(names.get(address(tensor), describe_shape(tensor)), tensor) for tensor in memory.tensors]
    if watch:
        starts = {tensor.data_ptr(): name for name, tensor in got.items()}
        for tensor in watch.tensors:
            tensor.name = starts.get(tensor.start, tensor.name)
    check_unchanged(given, copies[0], "the kernel changed its input: store to a new tensor")
    said = "the backward changed the gradient that it was given, which others may read: store to a new tensor"
    check_unchanged(gradients, {f"d{name}": copy for name, copy in copies[1].items()}, said)
    check_bands([*given.items(), *gradients.items(), *allocated], watch.stores if watch else {})
    if watch and watch.fault and watch.fault[0] == "stray load":
        kind, tensor, _, sentence = watch.fault
        raise Wrong(kind, tensor.name, f"{tensor.name}: {sentence}")
    axes = {name: axis_names(tensor.shape, sizes) for name, tensor in got.items()}
    judge = Judge(
        grading.Task({}, None, None, axes, {}, tolerance=task.tolerance, explain=exchanged_with(exact, watch)),
        None,
        {},
        None,
        seen=watch.describe_load() if watch else None,
        undefined=watch.undefined if watch else None,
        unset=watch.unset if watch else None,
        rounds=dtype != torch.float32 and torch.float32 in task.dtypes,
    )
    for name, tensor in got.items():
        if tensor.is_floating_point():
            judge.check_written(name, tensor)
    for name in exact:
        judge.check_finite(name, got, exact)
    judge.check_values(got, plain, exact)
    if watch and watch.fault:
        kind, tensor, _, sentence = watch.fault
        raise Wrong(kind, tensor.name, f"{tensor.name}: the values are right here, but {sentence}")


def exchanged_with(exact, watch):
    """Return a Task's explain: words on a result that is right for another name, or on rows that programs repeat."""

    def explain(name, got, inputs):
        alike = [other for other in exact if other != name and exact[other].shape == got.shape]
        found = next((other for other in alike if grading.relative_error(got, exact[other]) < ALIKE), None)
        if found:
            return f"this is {found}: return results and gradients in the order that they must have"
        return watch.shared if watch else None

    return explain


def another(values):
    """Return inputs of the same shapes with other values, for a call that must not disturb the first."""
    floats = {name: value for name, value in tensors_of(values).items() if value.is_floating_point()}
    return values | {name: 1 - 2 * value for name, value in floats.items()}


# ---------------------------------------------------------------- all calls


def ways_of(task, inputs, number):
    """Return the ways in which the case of this number is called in the first dtype."""
    leaves = gradients_of(task, inputs)
    if number >= (1 if grading.TARGET else CASES_WITH_LAYOUTS):  # on a target, a call can take a minute
        return [Way()]
    ways = [Way()]
    if numbers_of(inputs) and not number:
        ways.append(Way(tenths=True))
    if leaves:
        ways.append(Way(again=True))
        ways += [Way("gradients", layout) for layout in OF_GRADIENTS]
    if len(leaves) > 1:
        ways += [Way(leaf=name) for name in leaves]
    if not task.contiguous:
        shaped = [name for name, value in tensors_of(inputs).items() if value.ndim]
        ways += [Way(name, layout) for name in shaped for layout in OF_INPUTS]
    return ways


def describe_way(way):
    """Return why a call can be wrong that is right in the plain way."""
    if way.of == "gradients":
        return (
            f"wrong only where the gradient of a result is not contiguous ({way.layout}): autograd may give such a "
            "one, so call .contiguous() on it in backward"
        )
    if way.of:
        return (
            f"wrong only where {way.of} is not contiguous ({way.layout}): call {way.of}.contiguous() before the "
            "launch, or pass its strides; if every caller's inputs are contiguous, write CONTIGUOUS = True in task.py"
        )
    if way.leaf:
        return f"wrong only where no input but {way.leaf} needs a gradient"
    if way.tenths:
        said = "wrong only where each number is a tenth of what inputs() gives"
        return f"{said}: is it written into the kernel or the backward?"
    if way.tuned:
        return (
            "wrong only in the first call, in which triton.autotune runs the kernel many times: name in reset_to_zero "
            "what it adds to, and in restore_value what it changes"
        )
    return "wrong only if another call runs before the backward: keep what the backward needs in ctx, not in the class"


def cause_of(error, kind):
    """Return the error of this kind among an error and its causes, or None."""
    return next((cause for cause in grading.causes(error) if isinstance(cause, kind)), None)


def check_way(task, sizes, dtype, way, seen):
    """Run one call and return its Configurations; raise Wrong with what is special about the call.

    A loud refusal of an input's layout is right.
    """
    configurations = Configurations(way.configuration, way.tuned)
    plain = dataclasses.replace(way, configuration=0) == Way()
    try:
        run_way(task, sizes, dtype, way, seen, configurations)
    except Wrong as wrong:
        if plain or wrong.kind not in ("value", "unwritten", "stray load", "no gradient"):
            raise with_configuration(task, sizes, dtype, way, configurations, wrong) from wrong
        said = re.sub(": (mask|the mask of) the .* in line .*", "", str(wrong)) if way.of else str(wrong)
        raise Wrong(wrong.kind, wrong.tensor, f"{describe_way(way)}; {said}") from wrong
    except Exception as error:
        if cause_of(error, Unsupported) or (plain and configurations.most == 1):
            raise
        if plain:
            crash = Wrong("crash", None, grading.describe_crash(error, task.path))
            raise with_configuration(task, sizes, dtype, way, configurations, crash) from error
        if way.of is None or way.of == "gradients":
            raise Wrong("crash", None, f"{describe_way(way)}; {grading.describe_crash(error, task.path)}") from error
        seen.notes[f"it refuses {way.of} where that is not contiguous"] = None
    return configurations


def with_configuration(task, sizes, dtype, way, configurations, wrong):
    """Return the error, with the names of this configuration of autotuned kernels and of one that is right."""
    for number in range(configurations.most):
        other = Configurations(number)
        if number == way.configuration:
            continue
        try:
            run_way(task, sizes, dtype, dataclasses.replace(way, configuration=number), Seen(), other)
        except Exception:  # wrong, too
            continue
        right = f"with {configurations.words()}, not with {other.words()}"
        return Wrong(wrong.kind, wrong.tensor, f"{right}: {wrong}")
    return wrong


def is_power_of_two(size):
    return isinstance(size, int) and size > 0 and size & (size - 1) == 0


def add_neutral_element(wrong, sizes, passed):
    """Return the error, with a likely cause where only sizes below a power of two are wrong."""
    whole = all(all(map(is_power_of_two, case.values())) for case in passed)
    if wrong.kind != "value" or not passed or not whole or all(map(is_power_of_two, sizes.values())):
        return wrong
    said = (
        "right where the sizes are powers of two: do masked elements enter a sum or a maximum? After arithmetic such "
        "as x - mean they are no longer neutral: tl.where(mask, ..., 0.0). Or do you divide by BLOCK instead of a size?"
    )
    return Wrong(wrong.kind, wrong.tensor, f"{wrong}; {said}")


def describe_sizes(sizes):
    return ", ".join(f"{name} {size}" for name, size in sizes.items())


def tuned_ways(configurations, number):
    """Return the ways in which the case of this number is called because kernels are autotuned."""
    if number and grading.TARGET:
        return []
    ways = [Way(configuration=i) for i in range(1, configurations.most)]
    return [Way(tuned=True), *ways] if configurations.times and not number else ways


def check_task(task, verdict):
    """Run all calls and return words on them; raise Wrong for the first that is wrong, which is verdict["case"]."""
    seen, passed, left_out = Seen(), [], set()
    for number, sizes in enumerate(task.cases):
        for dtype in task.dtypes:
            name = str(dtype).removeprefix("torch.")
            ways = ways_of(task, draw(task, sizes), number) if dtype == task.dtypes[0] else [Way()]
            for way in ways:
                verdict["case"] = f"{describe_sizes(sizes)}, {name}{way.words()}"
                if grading.TARGET:
                    grading.tell(f"   {verdict['case']}")  # it takes a while
                if dtype in left_out:
                    continue
                try:
                    configurations = check_way(task, sizes, dtype, way, seen)
                except Wrong as wrong:
                    if dtype != task.dtypes[0]:  # the mask is right in the first one
                        raise
                    found = add_loop(wrong, task.path, seen) if passed else wrong
                    raise (add_neutral_element(wrong, sizes, passed) if found is wrong else found) from wrong
                except Exception as error:
                    unsupported = cause_of(error, Unsupported)
                    if unsupported is None or dtype != torch.bfloat16:
                        raise
                    left_out.add(dtype)
                    seen.notes[f"bfloat16 on a GPU only, because Triton's interpreter {unsupported}"] = None
                    continue
                if way == Way():
                    ways += tuned_ways(configurations, number)  # the loop comes to them, too
        passed.append(sizes)
    verdict["case"] = None
    checked = [str(dtype).removeprefix("torch.") for dtype in task.dtypes if dtype not in left_out]
    gradients = gradients_of(task, draw(task, task.cases[0]))
    counted = f"{len(task.cases)} case{'s' * (len(task.cases) > 1)} in {', '.join(checked)}"
    counted += f"; gradients of {', '.join(gradients)}" if gradients else "; no gradients"
    return "; ".join([counted, *seen.notes, *short_loops(task.path, seen)])


def loops_of(path, lines):
    """Yield the place of each loop around the lines, and the lines of its body: (file, line)."""
    for file in sorted({file for file, _ in lines}):
        place = "" if file == str(path) else f" of {pathlib.Path(file).name}"
        for node in ast.walk(ast.parse(pathlib.Path(file).read_text(encoding="utf-8"))):
            if isinstance(node, ast.For | ast.While):
                body = {(file, line) for line in range(node.body[0].lineno, node.body[-1].end_lineno + 1)}
                if body & lines:
                    yield f"line {node.lineno}{place}", body


def add_loop(wrong, path, seen):
    """Return the error, with a likely cause where a program runs a loop twice for the first time."""
    if wrong.kind != "value" or seen.watch is None:
        return wrong
    new = [place for place, body in loops_of(path, seen.watch.repeated) if not body & seen.repeated]
    if not new:
        return wrong
    said = f"right where no program runs the loop in {' and '.join(new)} twice: does it replace what it should add up"
    return Wrong(wrong.kind, wrong.tensor, f"{wrong}; {said}, such as with = in place of +=?")


def short_loops(path, seen):
    """Return words on loops of kernels that no program ran twice: what they add up can be wrong all the same."""
    short = [place for place, body in loops_of(path, seen.lines) if not body & seen.repeated]
    if not short:
        return []
    return [f"no program runs the loop in {' and '.join(short)} twice: add a larger case, such as one with more rows"]


def grade(folder, action):
    """Return the verdict on a folder's kernel, as grading.grade does, with the lines of --time."""
    folder = pathlib.Path(folder)
    verdict = {"passed": False, "kind": None, "tensor": None, "case": None, "lines": []}
    path = folder / "task.py"
    try:
        if action == "time" and grading.DEVICE.type == "cpu":
            raise Wrong("no GPU", None, "--time needs a GPU, and PyTorch sees none here: leave it out")
        task = load_own_task(folder)
        path = task.path
        if path.parent == folder:
            grading.check_precedence(path.read_text(encoding="utf-8"))
        sentence = check_task(task, verdict)
        if action == "time":
            verdict["lines"] = [*check_timed(task, verdict), *time_task(task, folder.name)]
        verdict |= {"passed": True, "sentence": sentence, "interpreted": grading.INTERPRETED}
        verdict["for_models"] = grading.DEVICE.type == "cuda"
    except Wrong as wrong:
        verdict |= {"kind": wrong.kind, "tensor": wrong.tensor, "sentence": str(wrong)}
    except BaseException as error:  # whatever a user's code raises is a verdict on it
        verdict |= describe_error(error, path)
    return verdict


def describe_error(error, path):
    """Return the verdict on what a user's code raised."""
    sentence = grading.describe_crash(error, path)
    unsupported = cause_of(error, Unsupported)
    if grading.INTERPRETED and (unsupported or "not supported in interpreter mode" in sentence):
        line = sentence.partition(":")[0]
        what = unsupported or sentence.rpartition(": ")[2]
        where = "check it on a GPU, or with --target gfx942"
        return {"kind": "unsupported", "sentence": f"{line}: Triton's interpreter {what}; {where}"}
    return {"kind": "crash", "sentence": sentence}


# ---------------------------------------------------------------- speed


def bytes_of(tensors):
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def timed_dtype(task):
    """Return the dtype of --time; raise Wrong for a task that has no sizes for it."""
    if task.timed is None:
        raise Wrong("task", None, "task.py has no TIMED: give the sizes for --time, too large for a cache")
    return torch.bfloat16 if torch.bfloat16 in task.dtypes else task.dtypes[0]


def check_timed(task, verdict):
    """Raise Wrong for a kernel that is wrong at the sizes of TIMED, with any configuration: its time means nothing.

    Return lines to print: the reference in float64 may need more memory than the GPU has.
    """
    dtype = timed_dtype(task)
    verdict["case"] = f"{describe_sizes(task.timed)}, {str(dtype).removeprefix('torch.')}"
    ways = [Way()]
    for way in ways:
        try:
            configurations = check_way(task, task.timed, dtype, way, Seen())
        except Exception as error:
            if cause_of(error, torch.OutOfMemoryError):
                verdict["case"] = None
                return ["not compared at the sizes of TIMED: in float64, they need more memory than this GPU has"]
            if isinstance(error, Wrong):
                raise Wrong(error.kind, error.tensor, f"wrong at the sizes of TIMED: {error}") from error
            raise
        if way == Way():
            ways += [Way(configuration=i) for i in range(1, configurations.most)]
    verdict["case"] = None
    return []


def time_function(timer, function, inputs, leaves, cotangents):
    """Return the median ms of a call, and of one with its backward; of the first alone where nothing has a gradient.

    Return also whether the GPU waited for the host in one of them.
    """

    def call():
        return function(*inputs.values())

    def call_and_backward():
        called = with_leaves(inputs, leaves)
        return differentiate(named(function(*called.values())), called, leaves, cotangents)

    with torch.no_grad():
        times = [statistics.median(timer.milliseconds(call))]
    host_bound = timer.host_bound
    if leaves:
        times.append(statistics.median(timer.milliseconds(call_and_backward)))
        host_bound |= timer.host_bound
    return times, host_bound


def time_task(task, name):
    """Return the lines of a table: this function, PyTorch's, eager and compiled, and a copy of as many bytes."""
    dtype = timed_dtype(task)
    inputs = in_dtype(draw(task, task.timed), dtype)
    leaves = gradients_of(task, inputs)
    cotangents = {n: t.clone() for n, t in draw_cotangents(task, inputs, leaves, "contiguous").items()}
    with torch.no_grad():
        results = named(task.reference(*inputs.values()))
    given = list(tensors_of(inputs).values())
    moved = bytes_of([*given, *results.values()])
    back = bytes_of([*given, *cotangents.values(), *(inputs[name] for name in leaves)])
    timer = DeviceTimer(grading.DEVICE)
    copy = copy_rate(moved, grading.DEVICE, timer)

    def cell(milliseconds, moved):
        rate = moved / milliseconds / 1e6
        return f"{milliseconds:10.4f} ms {rate:8,.0f} GB/s {100 * rate / copy:4.0f} %"

    case = f"{describe_sizes(task.timed)}, {str(dtype).removeprefix('torch.')}, {torch.cuda.get_device_name()}"
    columns = {"forward": moved} | ({"with backward": moved + back} if leaves else {})
    lines = [
        f"{case}: medians of the GPU's time with empty caches; GB/s if each tensor moved once, and % of a copy's",
        (f"{'':18s}" + "".join(f"{column:>13s}{'':21s}" for column in columns)).rstrip(),
    ]
    functions = {
        name: task.function,
        "PyTorch, eager": task.reference,
        "PyTorch, compiled": torch.compile(task.reference),
    }
    for label, function in functions.items():
        try:
            times, host_bound = time_function(timer, function, inputs, leaves, cotangents)
        except RuntimeError as error:
            if label == name:
                raise
            lines.append(f"{label:18s} failed: {type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}")
            continue
        line = f"{label:18s}" + " ".join(map(cell, times, columns.values()))
        lines.append(line + "  with the host's time, for which the GPU waits" * host_bound)
    lines.append(f"{'copy':18s}{'':13s} {copy:8,.0f} GB/s, a kernel that reads and writes as many bytes as the forward")
    return lines


if __name__ == "__main__":
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # the compiler's other processes would still run at the end
    if grading.INTERPRETED:
        supply_libdevice()
        supply_wrap_triton()
    grading.answer_jobs(grade, *sys.argv[1:])
