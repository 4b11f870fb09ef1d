"""Check any PyTorch training script: does every parameter train, and can the step be that fast?

    python check_training.py -- train.py --its --options
    torchrun --nproc-per-node 2 check_training.py -- train.py --its --options

The script runs unchanged and computes the same numbers. PyTorch's hooks watch its modules, gradients and optimizers.
After eight optimizer steps the check stops the script, reruns its last batch to see which parameters the output depends
on, and prints a report. Exit status: 0 no finding, 1 findings, 2 bad input or not observable, 130 interrupted.

This file needs only PyTorch, so you can copy it anywhere. Part 1 watches, part 2 judges, part 3 prints. This is a
report, with the code that decides each line:

    check_training: train.py, 8 steps                           Watch.next_step: of one optimizer

    parameters  31 tensors to train, 12,080 elements            Facts.fate
    gradient    1 of 31 tensors, 16.95 % of the elements        Record.trained, from Watch.look
    optimizer   AdamW: 31 tensors, 1 changed                    Record.changed, from Watch.compare
    loss        4.8871 -> 4.8546                                Watch.around_backward
    others      ... target: 6 unchanged                         rows_on_kept, which compares Kept with now
    rates       AdamW 0.001 -> 0.0009                           rate_findings
    cuts        the loss depends on what has no gradient: ...   Follow, which marks tensors, and Traced
    values      no gradient passes through what left ...        Follow.exit
    step        3.5 ms: forward 2.0, backward 0.7, ...          Clock
    work        at least 0.0024 GFLOP, so 0.69 GFLOP/s          work_of
    floor       0.002 ms: ... TFLOP / ... = ... ms              floor
    slopes      1 of 1 tensors as the output's, within 0.001    compare_slopes
    accepted    cleared: the layer is frozen at first           accept

    FINDING     NO GRADIENT although the output depends on      Facts.fate, fates_by_use: asks
                them: 30 of 31 tensors                              Rerun.depends_on
                the gradient ends between head (has one)        boundaries
                and norm (has none)
                it is cut inside norm (RMSNorm): ...            cuts
                next: at that place, look for ...               NEXT
    FINDING     a term of the loss trains nothing ...           loss_findings
    warning     unused: no gradient, and the output does        the same
                not depend on them: 2 of 31 tensors
    verdict     2 FINDINGS (no_gradient, dead_term), 1 WARNING  report
"""

# SPDX-License-Identifier: MIT

import argparse
import collections
import collections.abc
import contextlib
import dataclasses
import difflib
import faulthandler
import fnmatch
import functools
import gc
import itertools
import json
import os
import random
import re
import runpy
import signal
import statistics
import sys
import tempfile
import threading
import time
import traceback
import warnings
import weakref

import torch

if not torch.cuda.is_available():
    # PyTorch's counter of FLOPs imports Triton, which reads this then: a CPU runs a script's kernels in no other way.
    os.environ.setdefault("TRITON_INTERPRET", "1")

from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules import module as module_hooks
from torch.optim import optimizer as optimizer_hooks
from torch.overrides import TorchFunctionMode, _len_torch_function_stack, _pop_mode, _push_mode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

WORKSHOP = "1.1"  # the version in pyproject.toml, for whoever reads a report later
LOOK = 4  # steps of its optimizer in which a gradient is looked at as it arrives; later steps are timed
BACKWARDS = 50  # backward passes to wait for the first step where no optimizer exists
MICRO_BATCHES = 1000  # and where one does: it may accumulate gradients
WAYS = 4  # ways to call a model, such as with other flags or shapes, that are run again
PROGRESS_SECONDS = 5  # between two lines on how far the judgement is
RERUN_SECONDS = 60  # for asking which parameters the output depends on
SLOPE_SECONDS = 20  # for comparing gradients with differences
SLOPE_ERROR = 0.2  # of a slope: more is wrong
SLOPE_NOISE = 0.05  # between two differences: more gives no verdict
RATE_FALL = 1000  # of a learning rate within the steps: more is a warning
MARGIN = 1.1  # a clock above the data sheet's is not a fault of the step

SMALL = 2**16  # elements
INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


# ====================================================================================================================
# Part 1: watch
# ====================================================================================================================


# ------------------------------------------------------------ tensors and their bits
def tensors(tree):
    """Yield the tensors of nested lists, dictionaries and data classes, and those that any other object holds."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, (list, tuple)):
        for item in tree:
            yield from tensors(item)
    elif isinstance(tree, collections.abc.Mapping):
        for _, value in tree.items():
            yield from tensors(value)
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        for field in dataclasses.fields(tree):
            yield from tensors(getattr(tree, field.name))
    elif hasattr(tree, "__dict__") and not isinstance(tree, (nn.Module, type)):
        yield from (value for value in vars(tree).values() if isinstance(value, torch.Tensor))


def detached(tree):
    """Return arguments without the graph that computed them; what needs a gradient still does."""
    return pytree.tree_map_only(torch.Tensor, lambda item: item.detach().requires_grad_(item.requires_grad), tree)


def plain(tensor):
    """Return a dense, contiguous tensor of this process's own values."""
    tensor = tensor.detach()
    if hasattr(tensor, "to_local"):
        tensor = tensor.to_local()
    if tensor.is_sparse:
        tensor = tensor.coalesce()
    if tensor.is_nested or tensor.layout is not torch.strided:
        tensor = tensor.values()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.contiguous()


def to_list(scalars):
    """Copy scalars to the host at once."""
    if not scalars:
        return []
    return torch.stack([scalar.to(scalars[0].device) for scalar in scalars]).tolist()


def bit_sum(value):
    """Sum a tensor's bits as integers, exactly: equal tensors have equal sums."""
    bits = plain(value).flatten()
    bits = bits.view(INTEGER[bits.element_size()])
    if bits.numel() < SMALL:  # there +lr and -lr may cancel, so the place counts
        bits = bits * torch.arange(1, bits.numel() + 1, device=bits.device)
    return bits.sum(dtype=torch.int64)


def bit_sums(values):
    """Return the bit sum of each tensor."""
    return to_list([bit_sum(value) for value in values])


def largest(value):
    """Return a tensor's largest absolute value; NaN stays NaN."""
    value = plain(value).float()
    if not value.numel():  # this process may have no part of a tensor that is spread over several
        return value.sum()
    return torch.linalg.vector_norm(value, float("inf"))


def has_values(tensor):
    """Say whether a tensor's values can be read: not those of the meta device, and not FakeTensor's."""
    return tensor.device.type != "meta" and not isinstance(tensor, FakeTensor)


def is_transformed():
    """Say whether this is inside torch.func.grad, vmap and the like, or inside torch.jit.trace."""
    return torch.jit.is_tracing() or torch._C._functorch.peek_interpreter_stack() is not None


def on_gpu():
    """Say whether this process uses a GPU; asking must not start one."""
    return torch.cuda.is_initialized()


# ------------------------------------------------------------ what is remembered
@dataclasses.dataclass
class Arrival:
    """Hold a gradient that backward computed, before it is added to the parameter's."""

    step: int  # of the parameter's optimizer, counted from 0
    largest: torch.Tensor  # absolute value
    added: torch.Tensor | bool  # is there a gradient other than zero already?
    weights: torch.Tensor | int = 0  # bit sum of the parameter at this time
    steps: int = 0  # of all optimizers until now
    input_grad: bool = False  # did the last model call need a gradient of its input too?
    total: torch.Tensor | None = None  # absolute value once it is added


@dataclasses.dataclass
class Seen:
    """Hold one parameter at one step of its optimizer."""

    gradient: int | None  # bit sum; None: there was no gradient
    largest: float  # absolute value in the gradient; 0 without one
    changed: bool  # did the step change the parameter?
    before: int = 0  # bit sum of the parameter before the step
    after: int = 0  # and after it


@dataclasses.dataclass(eq=False)
class Record:
    """Hold what was seen of one parameter over all steps."""

    param: nn.Parameter
    name: str
    owners: dict = dataclasses.field(default_factory=dict)  # module -> its name; a tied parameter has several
    trainable: bool = False
    hooked: bool = False
    start: int | None = None  # bit sum of the first value
    seen: list = dataclasses.field(default_factory=list)  # one Seen per step of its optimizer
    arrivals: list = dataclasses.field(default_factory=list)  # one Arrival per gradient of the first steps
    arrived: bool = False  # did backward compute any gradient for it, in any step?
    rows: torch.Tensor | None = None  # of a projection: did this output feature ever have a gradient?

    @property
    def trained(self):
        """Say whether a gradient other than zero reached an optimizer step; NaN is one."""
        return any(step.largest != 0 for step in self.seen)

    @property
    def changed(self):
        """Say whether any step changed it."""
        return any(step.changed for step in self.seen)

    @property
    def moved(self):
        """Say whether its value is another one than before the first step."""
        return bit_sums([self.param]) != [self.start]

    @property
    def repeats(self):
        """Say whether all its gradients are equal, bit for bit."""
        gradients = [step.gradient for step in self.seen if step.largest != 0]
        return len(gradients) > 1 and len(set(gradients)) == 1

    @property
    def cleared(self):
        """Say whether the last gradient before a step was other than zero, although none reached a step."""
        last = {arrival.step: arrival.largest for arrival in self.arrivals if arrival.step < len(self.seen)}
        return not self.trained and any(bool(largest != 0) for largest in last.values())

    @property
    def overflows(self):
        """Say whether all gradients that backward computed for it had NaN or infinity."""
        return bool(self.arrivals) and not any(bool(arrival.largest < float("inf")) for arrival in self.arrivals)

    @property
    def kept(self):
        """Return in how many steps every new gradient was added to an old one, and in how many it could have been."""
        first = min((arrival.step for arrival in self.arrivals if bool(arrival.largest != 0)), default=LOOK)
        added = collections.defaultdict(list)
        for arrival in self.arrivals:
            if arrival.step > first:
                added[arrival.step].append(bool(arrival.added))
        return sum(map(all, added.values())), len(added)

    @property
    def put_back(self):
        """Say whether every step changed it and the next one began from the same values again.

        SAM adds another perturbation before each step: what its first backward finds counts too.
        """
        begins = [step.before for step in self.seen]
        first = {}
        for arrival in self.arrivals:
            first.setdefault(arrival.step, int(arrival.weights))
        again = any(len(values) > 2 and len(set(values)) == 1 for values in (begins, list(first.values())))
        return again and all(step.changed for step in self.seen)

    @property
    def stepped_again(self):
        """Return in how many of the first steps its gradient was that of the step before, without a new backward."""
        new = {arrival.step for arrival in self.arrivals}
        count = 0
        for number, (last, step) in enumerate(itertools.pairwise(self.seen[:LOOK]), 1):
            same = step.largest != 0 and step.gradient == last.gradient
            if same and number not in new and min(new, default=LOOK) < number:
                count += 1
        return count

    @property
    def changed_between(self):
        """Say whether something changed it between two steps of its optimizer."""
        return any(step.after != later.before for step, later in itertools.pairwise(self.seen))

    @property
    def overwritten(self):
        """Return by what factors the steps' gradients are what was left where earlier micro-batches were cleared.

        Backwards with other weights (SAM), for another optimizer's step (a GAN) or for an input (an adversarial attack)
        are no micro-batches. A script that steps after batches 0, 4, 8 has a single one in its first step.
        """
        steps = collections.defaultdict(list)
        for arrival in self.arrivals:
            if arrival.step < len(self.seen):
                steps[arrival.step].append(arrival)
        if len(steps[0]) < 2:
            del steps[0]
        factors = []
        for step, arrivals in steps.items():
            together = len({(int(arrival.weights), arrival.steps, arrival.input_grad) for arrival in arrivals}) == 1
            lost = not all(bool(arrival.added) for arrival in arrivals[1:])
            if together and lost and all(bool(arrival.largest > 0) for arrival in arrivals):
                left = float(arrivals[-1].total)
                factors.append(self.seen[step].largest / left if left else 0.0)
        return factors if len(factors) == len(steps) > 1 else []


@dataclasses.dataclass(eq=False)
class Call:
    """Hold the last call of an outermost module in one way, to repeat it."""

    args: tuple = ()
    kwargs: dict = dataclasses.field(default_factory=dict)
    autocast: tuple = ()
    modes: dict = dataclasses.field(default_factory=dict)  # module -> is it in training mode?
    count: int = 0
    attached: set = dataclasses.field(default_factory=set)  # outputs that need a gradient
    reached: collections.Counter = dataclasses.field(default_factory=collections.Counter)  # output -> its gradients


@dataclasses.dataclass(eq=False)
class Root:
    """Hold the calls of an outermost module with gradients."""

    model: nn.Module  # the whole model around it
    guests: dict = dataclasses.field(default_factory=dict)  # modules that run inside and are not in it, as in a list
    calls: dict = dataclasses.field(default_factory=dict)  # way -> Call
    last: int = 0  # number of its last call, among those of all modules

    @property
    def reached(self):
        """Say whether a gradient reached any of its outputs."""
        return any(call.reached for call in self.calls.values())


@dataclasses.dataclass
class Step:
    """Hold one step of the leading optimizer."""

    seconds: dict = dataclasses.field(default_factory=dict)  # by phase
    inputs: set = dataclasses.field(default_factory=set)  # bit sums
    gradients: int = 0  # parameters with a gradient at the steps of the optimizers
    loss: torch.Tensor | None = None
    backwards: int = 0


class Clock:
    """Book time to phases: forward, backward, optimizer, no_grad, other. The check's own time is left out."""

    def __init__(self):
        self.phase = "other"
        self.since = None
        self.is_paused = False
        self.own = 0.0
        self.seconds = collections.Counter()

    @staticmethod
    def read():
        """Return the time, with the GPU's work done."""
        if on_gpu():
            torch.cuda.synchronize()
        return time.perf_counter()

    def switch(self, phase):
        """Begin another phase; return the one that ends."""
        now = self.read() - self.own
        if self.since is not None:
            self.seconds[self.phase] += now - self.since
        last = self.phase
        self.since = now
        self.phase = phase
        return last

    @contextlib.contextmanager
    def paused(self):
        """Leave this block out. The script's own GPU work is finished first, or it would be left out as well."""
        begin = self.read()
        before = self.is_paused
        self.is_paused = True
        try:
            with torch.no_grad():
                yield
        finally:
            self.is_paused = before
            self.own += self.read() - begin


# ------------------------------------------------------------ what the loss is computed from
FACTORIES = "zeros ones empty rand randn randint full".split()
SHAPE_ONLY = {f"{name}_like" for name in FACTORIES} | {f"new_{name}" for name in FACTORIES}  # use no values
SUMS = set("add add_ radd sub sub_ rsub subtract subtract_ iadd isub neg neg_ negative".split())
SCALES = set("mul mul_ rmul imul multiply div div_ truediv itruediv true_divide mean sum".split())
SCALES |= set("view reshape squeeze flatten clone contiguous to float double half bfloat16 type".split())
EXITS = set("item tolist numpy __float__ __array__".split())  # return values that PyTorch can't follow


@dataclasses.dataclass(eq=False)
class Made:
    """Hold how a tensor was computed from trained parameters, with a gradient or without."""

    tensor: weakref.ref
    name: str = ""  # of the operation; empty for what was not seen to be computed, such as a parameter
    place: str = ""  # in the user's code
    parents: list = dataclasses.field(default_factory=list)  # (Made, did it need a gradient there?)
    began: bool = True  # did it need a gradient when it was made?
    grad: bool = True  # and when it was used?
    size: torch.Tensor | None = None  # largest absolute value, of an addend without a gradient

    @property
    def is_cut(self):
        """Say whether the gradient ends here."""
        return not self.grad and any(had for _, had in self.parents)

    @property
    def is_wrapped(self):
        """Say whether it was made in the forward of an autograd.Function, which has a backward of its own."""
        return self.grad and not self.began

    @property
    def addends(self):
        """Return those of which it is the sum, as far as it is one."""
        if self.is_wrapped or not self.grad:
            return []
        if self.name in SUMS:
            return [parent for parent, _ in self.parents]
        if self.name in SCALES and len(self.parents) == 1:
            return [parent for parent, had in self.parents if had]
        return []


class Follow(TorchFunctionMode):
    """Mark what depends on trained parameters, detached or not, from a model's call to its backward.

    A mode changes what torch.compile makes of a function, so it is left where a compiled one runs. PyTorch has other
    kernels for inference, which it doesn't take under a mode, so it is left there too.
    """

    def __init__(self, clock):
        super().__init__()
        self.clock = clock
        self.active = False
        self.trained = set()  # ids of the parameters of the optimizers
        self.made = {}  # id of a tensor -> Made
        self.passes = []  # Traced, one per backward pass
        self.stale = False  # does what is marked belong to an iteration that has gone backward?
        self.exits = {}  # where marked values left PyTorch, as texts

    def begin(self):
        """Mark what is computed from now on. A forward after a backward begins another iteration."""
        if self.stale:
            self.forget()
        if not self.active:
            self.active = True
            _push_mode(self)

    def end(self):
        """Mark no longer. A mode that the script entered later stays."""
        if threading.current_thread() is not threading.main_thread():  # each thread has its own modes
            return
        above = []
        while self.active and _len_torch_function_stack():
            mode = _pop_mode()
            self.active = mode is not self
            if self.active:
                above.append(mode)
        self.active = False
        for mode in reversed(above):
            _push_mode(mode)

    def forget(self):
        """Forget what was computed."""
        self.end()
        self.made.clear()
        self.stale = False

    def __torch_function__(self, function, types, args=(), kwargs=None):
        """Run an operation, and mark what it returns or overwrites."""
        kwargs = kwargs or {}
        output = function(*args, **kwargs)
        if self.clock.is_paused or is_transformed() or (on_gpu() and torch.cuda.is_current_stream_capturing()):
            return output
        name = name_of_operation(function)
        if getattr(function, "__name__", "") in EXITS:
            self.exit(name, args)
        elif name == "setitem":
            self.mark(name, (args, kwargs), args[0])
        elif name not in SHAPE_ONLY and name != ".grad":
            self.mark(name.removeprefix("."), (args, kwargs), output)
        return output

    def mark(self, name, inputs, output):
        """Mark an operation's outputs if one of its inputs depends on trained parameters."""
        parents = []
        for item in pytree.tree_leaves(inputs):
            made = self.known(item) if isinstance(item, torch.Tensor) else None
            if made is None:
                continue
            if name in SUMS and not item.requires_grad and has_values(item):
                with torch.no_grad():
                    made.size = largest(item)
            parents.append((made, item.requires_grad))
        if not parents:
            return
        if not torch.is_grad_enabled() and name not in ("detach", "data"):
            name = "no_grad"
        place = place_of_caller()
        for item in pytree.tree_leaves(output):
            if isinstance(item, torch.Tensor) and not self.is_trained(item):
                grad = item.requires_grad
                self.made[id(item)] = Made(weakref.ref(item), name, place, parents, grad, grad)

    def exit(self, name, inputs):
        """Note where the value of a tensor that depends on trained parameters leaves PyTorch."""
        if any(isinstance(item, torch.Tensor) and self.known(item) for item in inputs):
            self.exits[f"{name} at {place_of_caller()}"] = None

    def is_trained(self, item):
        """Say whether a tensor is a parameter that trains."""
        return item.requires_grad and item.is_leaf and (isinstance(item, nn.Parameter) or id(item) in self.trained)

    def known(self, item):
        """Return how a tensor was made, or None. What has a gradient and was not seen depends on some parameter."""
        made = self.made.get(id(item))
        if made is not None and made.tensor() is item:
            made.grad |= item.requires_grad
            return made
        if self.is_trained(item) or (item.requires_grad and not item.is_leaf):
            made = Made(weakref.ref(item))
            self.made[id(item)] = made
            return made
        return None

    def is_opaque(self, module):
        """Say whether to look only at what a module takes and returns."""
        if not self.active:
            return False
        if hasattr(module, "_orig_mod"):
            return True
        needs_gradient = torch.is_grad_enabled() and any(param.requires_grad for param in module.parameters())
        return not module.training and not needs_gradient

    def around(self, run, args, kwargs, params=()):
        """Run something that may be compiled; what it returns depends on what it is given."""
        self.end()
        try:
            output = run(*args, **kwargs)
        finally:
            self.begin()
        with self.clock.paused():
            grad_mode = "call" if torch.is_grad_enabled() else "no_grad"
            self.mark(grad_mode, (args, kwargs, list(params)), list(tensors(output)))
        return output

    def trace(self, loss):
        """Keep what is known about the tensor from which backward begins. The next loss may share its forward."""
        self.stale = True
        made = None if loss is None else self.known(loss)
        if made is not None and made.name:
            self.passes.append(Traced(made))


def name_of_operation(function):
    """Return an operation's name without what only tells how it was called; ".data" for a property."""
    name = getattr(function, "__name__", "")
    if name == "__get__":
        return f".{function.__self__.__name__}"
    if name.startswith("__"):  # __radd__
        return name.strip("_")
    return name


class Traced:
    """Hold the terms of a loss, and the cuts on the way to it, as text."""

    def __init__(self, loss):
        live, dead = terms_of(loss)
        self.cuts = [cut_text(cut) for cut in cuts_above(loss)]
        self.live = set(live.values())
        self.dead = {}  # (path, place) of a term without a gradient -> its cuts
        used = {cut for made in live if not made.addends for cut in cuts_above(made)}
        cuts = {made: cuts_above(made) for made in dead}
        replaces = any(replaces_a_term(cut, live) for made in dead for cut in cuts[made])
        for made, key in dead.items():
            is_zero = made.size is None or float(made.size) == 0
            if not is_zero and not replaces and not used.issuperset(cuts[made]):
                self.dead[key] = [cut_text(cut) for cut in cuts[made]]


def terms_of(loss):
    """Return the addends of a sum, and those sums that are addends themselves: with a gradient, and without.

    Each has a key: its path in the sum and its line in the user's code.
    """
    keys = {}
    todo = [(loss, ())]
    while todo:
        made, path = todo.pop()
        if made not in keys:
            keys[made] = (path, made.place)
            todo += [(addend, (*path, number)) for number, addend in enumerate(made.addends)]
    live = {made: key for made, key in keys.items() if made.grad}
    return live, {made: key for made, key in keys.items() if not made.grad}


def cuts_above(made):
    """Return the cuts on the way to a tensor. What happens inside an autograd.Function is none."""
    cuts = {}
    seen = set()
    todo = [(made, False)]
    while todo:
        node, inside = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        inside = inside and not node.grad
        if node.is_cut and not inside:
            cuts[node] = None
        todo += [(parent, inside or node.is_wrapped) for parent, _ in node.parents]
    return list(cuts)


def replaces_a_term(cut, live):
    """Say whether a term of the loss that has a gradient is what was cut: then only a value is replaced."""
    return any(had and not live.keys().isdisjoint(terms_of(parent)[0]) for parent, had in cut.parents)


def cut_text(cut):
    """Name a cut: the operation and the line."""
    return f"{cut.name} at {cut.place}"


@functools.cache
def is_users(file):
    """Say whether a file is the user's: no library's, and not this one."""
    return file != __file__ and not LIBRARIES.search(file)


def place_of_caller():
    """Return the last line of the user's code on the stack."""
    frame = sys._getframe(1)
    while frame and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return f"{os.path.basename(frame.f_code.co_filename)}, line {frame.f_lineno}" if frame else "a library"


# ------------------------------------------------------------ watching
LIBRARIES = re.compile(r"site-packages|dist-packages|<frozen|/lib/python")


@dataclasses.dataclass
class Hidden:
    """Hold what may hide a part of the training from the check."""

    graphs: int  # compiled before the script
    captured: bool = False  # was a GPU graph seen?
    transformed: bool = False  # was torch.func or torch.jit.trace seen?
    elsewhere: bool = False  # did an optimizer step in another thread?
    scaled: bool = False  # was there a gradient scaler?

    def has_compiled(self):
        """Say whether the script compiled anything."""
        return compiled_graphs() > self.graphs

    def blind(self):
        """Say whether tensors cannot be looked at: while a GPU graph is captured, or inside torch.func."""
        capturing = on_gpu() and torch.cuda.is_current_stream_capturing()
        transformed = is_transformed()
        self.captured |= capturing
        self.transformed |= transformed
        return capturing or transformed


@dataclasses.dataclass
class Models:
    """Hold the modules that ran, and their names."""

    outermost: dict = dataclasses.field(default_factory=dict)  # outermost module -> Root
    inner: set = dataclasses.field(default_factory=set)  # modules inside those
    ran: set = dataclasses.field(default_factory=set)  # modules that ran in a forward with gradients
    training: set = dataclasses.field(default_factory=set)  # modules that did so in training mode
    alive: list = dataclasses.field(default_factory=list)  # what a script would let go of when it is ended
    kept: list = dataclasses.field(default_factory=list)  # Kept, of all modules that exist at the first step
    before: list = dataclasses.field(default_factory=lambda: existing(nn.Module))  # the script began
    own_names: dict = dataclasses.field(default_factory=dict)  # module -> the script's name of it
    prefixes: dict = dataclasses.field(default_factory=dict)  # module -> its model's title, where names are not clear
    calls: collections.abc.Iterator = dataclasses.field(default_factory=lambda: itertools.count(1))

    @property
    def roots(self):
        """Return the outermost modules that ran with gradients."""
        return {module: root for module, root in self.outermost.items() if root.calls}

    def discover(self, module):
        """Take in a new outermost module, in place of those inside it; return its whole model."""
        inside = set(module.modules()) - {module}
        self.outermost = {known: root for known, root in self.outermost.items() if known not in inside}
        self.outermost[module] = Root(top_of(module))
        self.inner |= inside
        return self.outermost[module].model


@dataclasses.dataclass(frozen=True)
class Kept:
    """Hold a parameter without a gradient, or a buffer, before the first step."""

    module: nn.Module
    name: str
    total: int  # bit sum

    @property
    def tensor(self):
        """Return it as it is now: a script may assign another one; None if it is gone."""
        return self.module._parameters.get(self.name, self.module._buffers.get(self.name))


def kept_in(modules):
    """Return the parameters without a gradient and the buffers of modules."""
    found = {}
    for module in modules:
        for name, item in [*module._parameters.items(), *module._buffers.items()]:
            if item is None or nn.parameter.is_lazy(item) or item.grad is not None:
                continue
            if has_values(item) and item.numel() and not item.is_quantized:
                found[id(item)] = (module, name, item)
    totals = bit_sums([item for _, _, item in found.values()])
    return [Kept(module, name, total) for (module, name, _), total in zip(found.values(), totals, strict=True)]


@dataclasses.dataclass
class Running:
    """Hold the call of an outermost module that is going on, and the loss that it returned."""

    module: nn.Module | None = None
    depth: int = 0  # how often it is entered
    before: str = "other"  # the phase around it
    scalar: tuple | None = None  # (value, node of the graph) of a model's own loss, before a scaler or an average
    input_grad: bool = False  # did the last call need a gradient of its input?


@dataclasses.dataclass
class Optimizers:
    """Hold the optimizers that stepped, and count the steps of the leading one."""

    known: list = dataclasses.field(default_factory=list)
    lead: torch.optim.Optimizer | None = None  # the one whose steps are counted
    others: collections.Counter = dataclasses.field(default_factory=collections.Counter)  # steps since the lead's last
    steps: int = 0  # of all optimizers
    skipped: int = 0  # steps that a gradient scaler left out
    before: list = dataclasses.field(default_factory=lambda: existing(torch.optim.Optimizer))  # the script began
    alive: list = dataclasses.field(default_factory=list)  # what the script would let go of when it is ended

    def keep(self):
        """Keep all optimizers that the script holds by now: some may not have stepped yet."""
        gc.collect()
        before = {id(optimizer) for optimizer in self.before}
        self.alive = [thing for thing in existing(torch.optim.Optimizer) if id(thing) not in before]

    def is_lead(self, optimizer):
        """Say whether this is the leading one, which a script may make anew in its loop."""
        if optimizer is self.lead or (self.lead and ids_of(optimizer) == ids_of(self.lead)):
            self.lead = optimizer
            return True
        return False

    def ends_iteration(self, optimizer, limit):
        """Count a step; say whether it is the lead's. Another optimizer that makes limit steps without it leads."""
        self.steps += 1
        if self.is_lead(optimizer):
            self.others.clear()
            return True
        self.others[optimizer] += 1
        if self.others[optimizer] >= limit:
            self.others.clear()
            self.lead = optimizer
        return False


@dataclasses.dataclass
class Stepping:
    """Hold the optimizer step that is going on."""

    in_backward: bool = False  # does backward itself call the optimizer?
    weights: dict = dataclasses.field(default_factory=dict)  # record -> (key of its float32 copy, bit sum) before it
    gradients: dict = dataclasses.field(default_factory=dict)  # record -> (bit sum, largest) at it


class Enough(SystemExit):
    """End the script after the last step."""


# functions here that run the script's code
CALLERS = {"run_script", "called", "backward", "watched", "forward"}
CALLERS |= {"around", "compiled", "__torch_function__", "tensor_backward"}


class Watcher:
    """Follow a running script: the calls of its modules, its backward passes and the steps of its optimizers.

    A subclass looks at what happens there: Watch below, and Child, by which compare_training.py records a script.
    """

    tool = "check_training"
    files = frozenset([__file__])
    callers = CALLERS
    subject = "the script "  # begins a sentence on its exit status
    raised = "the script raised "  # begins a sentence on its error

    def __init__(self):
        self.done = False
        self.late = 0  # steps that the script makes then
        self.interrupted = False  # by Ctrl-C
        self.backwards = 0  # backward passes until now
        self.in_backward = False
        self.frames = []  # of the optimizer steps that run: one may call another
        self.optimizers = Optimizers()
        self.undo = []  # what puts things back at the end

    # -------------------------------------------------- for a subclass
    def blind(self):
        """Say whether to look away: at the end, and in another thread."""
        return self.done or threading.current_thread() is not threading.main_thread()

    def called(self, run, module, args, kwargs):
        """Run a module's call."""
        raise NotImplementedError

    def around_backward(self, loss):
        """Return the context of a backward pass. loss: the scalar from which it begins, or None."""
        raise NotImplementedError

    def before_step(self, optimizer):
        """Look at an optimizer before its step."""

    def look(self, optimizer):
        """Look at the gradients that a step uses: before the step, or each time its closure has computed them."""
        raise NotImplementedError

    def after_step(self, optimizer):
        """Look at an optimizer after its step."""
        raise NotImplementedError

    def end_unseen(self):
        """End a script whose updates cannot be seen, or it would run to its own end."""
        raise NotImplementedError

    def end_process(self):
        """End the process of a script that caught Enough."""
        raise NotImplementedError

    def keep_names(self, spaces):
        """Take in the script's variables at its end, given as dictionaries."""

    def install(self):
        """Replace what a subclass follows beside modules, backward and optimizers."""

    # -------------------------------------------------- backward and steps
    def backward(self, run, roots, *args, **kwargs):
        """Follow torch.autograd.backward, and give up after many of them without a step of an optimizer."""
        if self.in_backward or self.blind():
            return run(roots, *args, **kwargs)
        self.backwards += 1
        loss = next((root for root in tensors([roots]) if root.numel() == 1), None)
        self.in_backward = True
        try:
            with self.around_backward(loss):
                result = run(roots, *args, **kwargs)
        finally:
            self.in_backward = False
        if self.waits_in_vain():
            self.end_unseen()
        return result

    def waits_in_vain(self):
        """Say whether many backward passes had no step of an optimizer. An optimizer may accumulate gradients."""
        if self.optimizers.lead or self.backwards % BACKWARDS:
            return False
        return self.backwards >= MICRO_BATCHES or not existing(torch.optim.Optimizer)

    def step_begins(self, optimizer, args, kwargs, frame):
        """Look before an outermost step, or after its closure, which computes the gradients. frame: the step's."""
        if self.blind():
            self.end_late()
            return None
        self.frames = still_running(self.frames)  # without steps that raised an error
        self.frames.append(frame)
        if len(self.frames) > 1:
            return None
        self.before_step(optimizer)
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if not callable(closure):
            self.look(optimizer)
            return None

        @functools.wraps(closure)
        def watched():
            result = closure()
            self.look(optimizer)
            return result

        if "closure" in kwargs:
            return args, {**kwargs, "closure": watched}
        return (args[0], watched, *args[2:]), kwargs

    def step_ended(self, optimizer, frame):
        """Look after an outermost step."""
        if self.blind() or frame not in self.frames:
            return
        del self.frames[self.frames.index(frame) :]  # and those inside it that raised an error
        if not self.frames:
            self.after_step(optimizer)

    # -------------------------------------------------- the end
    def end(self):
        """End the script."""
        self.done = True
        raise Enough(0)

    def end_late(self):
        """End a script that goes on although it was ended, as with a bare except around its step."""
        if self.done and threading.current_thread() is threading.main_thread():
            self.late += 1
            if self.late > 2:  # fewer may belong to a finally
                self.end_process()

    def unhook(self):
        """Put back what the watcher replaced, but for the hooks of the optimizers."""
        for undo in self.undo:
            undo()
        self.undo.clear()

    def failed(self, error):
        """Say which error ended the script, and on which line of the user's code or of ours."""
        frames = traceback.extract_tb(error.__traceback__)
        known = [frame for frame in frames if frame.filename in self.files or not LIBRARIES.search(frame.filename)]
        what = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        last = known[-1] if known else None
        if last and last.filename in self.files and last.name not in self.callers:
            where = f"{os.path.basename(last.filename)}, line {last.lineno}"
            return f"{self.tool} itself failed, not the script: {what} ({where})"
        mine = [frame for frame in known if frame.filename not in self.files]
        place = f" ({os.path.basename(mine[-1].filename)}, line {mine[-1].lineno})" if mine else ""
        return f"{self.raised}{what}{place}"


class Watch(Watcher):
    """Look at a training script by hooks that change nothing."""

    def __init__(self, steps, go_on=False):
        super().__init__()
        self.limit = steps
        self.go_on = go_on
        self.finish = None  # ends the process where the script catches Enough
        self.handing_out = 0  # calls of torch.autograd.grad that run
        self.clock = Clock()
        self.step = Step()  # the one that is going on
        self.steps = []
        self.records = {}  # id of a parameter -> Record
        self.hidden = Hidden(compiled_graphs())
        self.models = Models()
        self.running = Running()
        self.stepping = Stepping()
        self.follow = Follow(self.clock)
        self.rates = {}  # (class of an optimizer, its first parameter) -> the rates of its groups at each step
        self.compiles = False  # does torch.compile make functions that are known here?

    def blind(self):
        """Say whether to look away: at the end, in another thread, or where tensors have no values."""
        return self.hidden.blind() or super().blind()

    # -------------------------------------------------- modules
    def called(self, run, module, args, kwargs):
        """Run a module's call, and look at it if it is an outermost one."""
        output = inputs = None
        self.enter(module)
        try:
            if self.follow.is_opaque(module):
                output = self.follow.around(functools.partial(run, module), args, kwargs, module.parameters())
            else:
                output = run(module, *args, **kwargs)
            inputs = (args, kwargs)
            return output
        finally:
            self.leave(module, inputs, output)

    def enter(self, module):
        """Begin the forward phase where an outermost module with parameters is called."""
        if self.running.module is not None:
            self.running.depth += module is self.running.module
            self.notice(module)
            return
        if self.blind() or self.clock.phase == "backward":  # where activation checkpointing repeats modules
            return
        first = next(module.parameters(), None)
        if first is None or not has_values(first):
            return
        if module in self.models.inner:  # called by itself: a part of a model may be used before the model is
            self.follow_from_here()
            return
        if module not in self.models.outermost:
            with self.clock.paused():
                parts = [root.model for known, root in self.models.outermost.items() if known in module.modules()]
                self.rename(parts, self.models.discover(module))
        if not self.steps and not self.step.backwards:
            self.forget_trainable(module)
        phase = "forward" if torch.is_grad_enabled() else "no_grad"
        self.running.before = self.clock.switch(phase)
        self.running.module = module
        self.running.depth = 1
        self.notice(module)
        self.follow_from_here()

    def follow_from_here(self):
        """Mark what is computed from trained parameters, in the steps in which that is looked at."""
        known = self.compiles or not self.hidden.has_compiled()  # where does compiled code run?
        if torch.is_grad_enabled() and 1 <= len(self.steps) < LOOK and known:
            self.follow.begin()

    def forget_trainable(self, module):
        """Forget, until the first backward, that parameters needed a gradient: a script may freeze them later."""
        for param in module.parameters():
            record = self.records.get(id(param))
            if record and not param.requires_grad:
                record.trainable = False

    def notice(self, module):
        """Note that a module runs. One that the outermost does not hold is a guest: PyTorch sees no lists."""
        if self.clock.phase == "forward" and not self.done:
            self.models.ran.add(module)
        known = module in self.models.inner or module in self.models.outermost
        if known or len(self.steps) >= LOOK or self.blind():
            return
        if next(module.parameters(), None) is not None:
            self.models.outermost[self.running.module].guests[module] = type(module).__name__

    def leave(self, module, inputs, output):
        """Remember an outermost module's call. The forward phase lasts until backward begins.

        inputs: args and kwargs; None if the call raised an error. Such a batch cannot be run again.
        """
        if module is not self.running.module:
            return
        self.running.depth -= 1
        if self.running.depth:
            return
        self.running.module = None
        if self.blind():
            return
        if inputs is None or not torch.is_grad_enabled():
            self.clock.switch(self.running.before)
            return
        with self.clock.paused():
            self.remember(module, *inputs, output)

    def remember(self, module, args, kwargs, output):
        """Keep what is needed to repeat the call, and ask which outputs the loss uses."""
        inputs = list(tensors((args, kwargs)))
        data = [item for item in inputs if not item.requires_grad]  # and not what another module computed
        self.running.input_grad = len(data) < len(inputs)
        self.step.inputs.update(bit_sums(data))
        kind = next((item.device.type for item in inputs if item.device.type != "cpu"), "cpu")
        root = self.models.outermost[module]
        root.last = next(self.models.calls)
        way = way_of(args, kwargs)
        call = root.calls.pop(way, None) or Call()
        root.calls[way] = call  # the newest comes last
        if len(root.calls) > WAYS:
            del root.calls[next(iter(root.calls))]
        call.args, call.kwargs = detached((args, kwargs))
        call.autocast = (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
        call.modes = {part: part.training for part in module.modules()}
        self.models.training.update(part for part, training in call.modes.items() if training)
        call.count += 1
        self.running.scalar = None
        call.attached = set()
        for number, item in enumerate(tensors(output)):
            if item.requires_grad:
                call.attached.add(number)
                item.register_hook(functools.partial(note, call.reached, number))
                if item.numel() == 1 and item.grad_fn is not None and self.running.scalar is None:
                    self.running.scalar = (item.detach().clone(), item.grad_fn)

    def adopt(self, model, title=""):
        """Record the parameters of a model."""
        for prefix, owner in model.named_modules(prefix=title):
            for name, param in owner.named_parameters(recurse=False):
                if nn.parameter.is_lazy(param):  # its first forward makes it
                    continue
                record = self.record_of(param, "")
                if not record.owners:
                    record.name = clean(f"{prefix}.{name}" if prefix else name)
                record.owners.setdefault(owner, clean(prefix) or name)

    def rename(self, parts, model):
        """Record a model's parameters; rename those that were named after a part of it that ran before it did."""
        inside = set(model.modules())
        for part in parts:
            for owner in set(part.modules()) & inside if part is not model else ():
                for param in owner.parameters(recurse=False):
                    if id(param) in self.records:
                        self.records[id(param)].owners.pop(owner, None)
        self.adopt(model)

    def record_of(self, param, name):
        """Return a parameter's record. A trainable parameter gets a hook, once."""
        record = self.records.setdefault(id(param), Record(param, name))
        if not param.requires_grad or not param.is_leaf:
            return record
        record.trainable = True
        if not record.hooked:
            record.hooked = True
            param.register_hook(functools.partial(self.arrive, record))
        return record

    # -------------------------------------------------- model.forward(), called by itself
    def watch_forwards(self):
        """Watch the forward of whole models of which only a part was called: PyTorch gives it no hook."""
        for kind in {type(root.model) for module, root in self.models.outermost.items() if root.model is not module}:
            if not hasattr(kind.forward, "watched"):
                self.watch_forward(kind)

    def install(self):
        """Watch what torch.compile makes of functions: no hook tells that one runs."""
        run = torch.compile

        @functools.wraps(run)
        def compile_watched(model=None, **options):
            if model is None:
                return functools.partial(compile_watched, **options)
            self.compiles = True
            function = run(model, **options)
            if isinstance(function, nn.Module):
                return function

            @functools.wraps(function)
            def compiled(*args, **kwargs):
                if torch.compiler.is_compiling() or not self.follow.active:
                    return function(*args, **kwargs)
                return self.follow.around(function, args, kwargs)

            return compiled

        backward = torch.Tensor.backward

        @functools.wraps(backward)
        def tensor_backward(tensor, *args, **kwargs):
            if not torch.compiler.is_compiling():
                self.follow.end()  # not inside backward: PyTorch would enter the mode again after it
            return backward(tensor, *args, **kwargs)

        torch.compile = compile_watched
        torch.Tensor.backward = tensor_backward
        self.undo += [
            functools.partial(setattr, torch, "compile", run),
            functools.partial(setattr, torch.Tensor, "backward", backward),
            self.follow.forget,
        ]

    def watch_forward(self, kind):
        """Replace the forward of a class until the script ends. The instances stay as they are, and can be copied."""
        own = vars(kind).get("forward")
        original = kind.forward

        @functools.wraps(original)
        def forward(module, /, *args, **kwargs):
            if torch.compiler.is_compiling():
                return original(module, *args, **kwargs)
            return self.called(original, module, args, kwargs)

        forward.watched = True
        kind.forward = forward
        if own:
            self.undo.append(functools.partial(setattr, kind, "forward", own))
        else:
            self.undo.append(functools.partial(delattr, kind, "forward"))

    # -------------------------------------------------- gradients
    def arrive(self, record, gradient):
        """Note that backward computed a gradient, before it is added to the parameter's."""
        if self.clock.phase != "backward" or self.handing_out:
            return
        if self.done or gradient is None:  # compiled code hands out None where eager code hands out nothing
            return
        record.arrived = True
        step = len(record.seen)
        if step >= LOOK or (on_gpu() and torch.cuda.is_current_stream_capturing()):
            return
        with torch.no_grad():
            old = record.param.grad
            added = old is not None and plain(old).any()
            weights = bit_sum(record.param)
            now = (weights, self.optimizers.steps, self.running.input_grad)
            size = total = largest(gradient)
            if old is not None and old.layout == gradient.layout:
                total = largest(old + gradient)
            record.arrivals.append(Arrival(step, size, added, *now, total))

    @contextlib.contextmanager
    def around_backward(self, loss):
        """Time a backward pass and keep the loss that it begins from."""
        self.step.backwards += 1
        self.follow.end()
        with self.clock.paused():
            self.follow.trace(loss)
        self.find_thawed()
        scalar = self.running.scalar
        if loss is not None and scalar and is_multiple(loss.grad_fn, scalar[1]):
            loss = scalar[0]
        self.step.loss = None if loss is None else loss.detach().clone()
        self.running.scalar = None
        before = self.clock.switch("backward")
        grad = torch.autograd.grad
        torch.autograd.grad = functools.partial(self.hand_out, grad)  # only now: torch.compile knows the original
        try:
            yield
        finally:
            torch.autograd.grad = grad
            if self.clock.phase == "backward":
                self.clock.switch("optimizer" if before == "optimizer" else "other")

    def find_thawed(self):
        """Take in parameters that need a gradient by now: a script may unfreeze them for its backward passes only."""
        for record in self.records.values():
            if not record.trainable:
                self.record_of(record.param, record.name)

    def hand_out(self, run, *args, **kwargs):
        """Run torch.autograd.grad, which leaves param.grad as it is: a backward of the script's own may call it."""
        self.handing_out += 1
        try:
            return run(*args, **kwargs)
        finally:
            self.handing_out -= 1

    def end_unseen(self):
        """End the script, unless it shall run to its own end."""
        if not self.go_on:
            self.end()

    # -------------------------------------------------- optimizers
    def step_begins(self, optimizer, args, kwargs, frame):
        """Note a step in another thread, which is not watched."""
        self.hidden.elsewhere |= threading.current_thread() is not threading.main_thread()
        return super().step_begins(optimizer, args, kwargs, frame)

    def before_step(self, optimizer):
        """Begin the optimizer's phase, and take the weights before it."""
        self.follow.end()
        self.stepping.in_backward = self.clock.switch("optimizer") == "backward"
        with self.clock.paused():
            self.prepare(optimizer)
            self.weigh(optimizer)

    def end_process(self):
        """Report from inside a script that caught Enough."""
        if self.steps and self.finish:
            self.finish()

    def keep_names(self, spaces):
        """Keep the script's own names of its modules."""
        self.models.own_names = names_in(spaces)

    def prepare(self, optimizer):
        """Record the parameters that modules and optimizers have by now."""
        if not self.steps:  # the first step, since these searches are slow
            self.optimizers.keep()
            found = existing(nn.Module, torch.amp.GradScaler)
            self.models.alive = [thing for thing in found if issubclass(type(thing), nn.Module)]
            scalers = [thing for thing in found if issubclass(type(thing), torch.amp.GradScaler)]
            self.hidden.scaled = any(scaler.is_enabled() for scaler in scalers)
            for root in self.models.outermost.values():
                part, root.model = root.model, top_of(root.model, self.models.alive)
                self.rename([part], root.model)
            self.watch_forwards()
            new = set(self.models.alive).difference(self.models.before)
            self.models.kept = self.models.kept or kept_in(module for module in self.models.alive if module in new)
        for root in self.models.outermost.values():
            self.adopt(root.model)
            for guest, name in root.guests.items():
                self.adopt(guest, name)
        for number, param in enumerate(params_of(optimizer)):
            self.record_of(param, f"parameter {number} of {type(optimizer).__name__}")
        if optimizer not in self.optimizers.known:
            self.begin(optimizer)

    def begin(self, optimizer):
        """Take in an optimizer. What the steps of others showed of its parameters until now does not count."""
        new = ids_of(optimizer) - ids_of(*self.optimizers.known)
        for record in [self.records[key] for key in new]:
            record.seen.clear()
            for arrival in record.arrivals:
                arrival.step = 0
        self.follow.trained |= new
        self.optimizers.known.append(optimizer)
        self.optimizers.lead = self.optimizers.lead or optimizer

    def weigh(self, optimizer):
        """Take the bit sums of the parameters before a step: the optimizer's own and those of no optimizer."""
        others = ids_of(*self.optimizers.known) - ids_of(optimizer)
        mine = [record for key, record in self.records.items() if key not in others]
        watched = [record for record in mine if record.trainable and record.param.numel() and has_values(record.param)]
        copies = [copy_key(record.param, optimizer) for record in watched]
        sums = bit_sums([weight_of(record, key, optimizer) for record, key in zip(watched, copies, strict=True)])
        self.stepping.weights = {}
        for record, key, value in zip(watched, copies, sums, strict=True):
            self.stepping.weights[record] = (key, value)
            if record.start is None:
                record.start = value

    def look(self, optimizer):
        """Keep the facts about the gradients that this step uses."""
        self.clock.switch("optimizer")
        with self.clock.paused():
            present = [record for record in self.stepping.weights if record.param.grad is not None]
            gradients = [record.param.grad for record in present]
            sums = bit_sums(gradients)
            sizes = to_list([largest(gradient) for gradient in gradients])
            self.stepping.gradients = {}
            for record, value, size in zip(present, sums, sizes, strict=True):
                self.stepping.gradients[record] = (value, size)
                if len(record.seen) < LOOK:
                    look_at_rows(record)
            self.step.gradients += len(present)

    def after_step(self, optimizer):
        """Judge the step. A step of the leading optimizer ends an iteration."""
        with self.clock.paused():
            overflow = getattr(optimizer, "found_inf", None)
            if overflow is not None and float(overflow) > 0:
                self.optimizers.skipped += 1
            else:
                self.compare(optimizer)
                first = next(iter(params_of(optimizer)), None)
                rates = [float(group["lr"]) for group in optimizer.param_groups if "lr" in group]
                self.rates.setdefault((type(optimizer).__name__, id(first)), []).append(rates)
        self.clock.switch("backward" if self.stepping.in_backward else "other")
        if self.optimizers.ends_iteration(optimizer, self.limit):
            self.next_step()

    def compare(self, optimizer):
        """Add one step to the records: which parameters did it change?"""
        weights = self.stepping.weights
        after = bit_sums([weight_of(record, key, optimizer) for record, (key, _) in weights.items()])
        for (record, (_, before)), value in zip(weights.items(), after, strict=True):
            gradient, size = self.stepping.gradients.get(record, (None, 0.0))
            record.seen.append(Seen(gradient, size, value != before, before, value))

    def next_step(self):
        """Close an iteration, which may be the last."""
        self.step.seconds = self.clock.seconds
        self.steps.append(self.step)
        self.step = Step()
        self.clock.seconds = collections.Counter()
        if len(self.steps) >= self.limit and not self.go_on:
            self.optimizers.keep()
            self.end()


# ------------------------------------------------------------ calls, losses and weights
def note(reached, number, gradient):
    """Note that a gradient reached an output."""
    reached[number] += 1


def is_multiple(node, other):
    """Say whether one node of the graph only scales or averages the output of another."""
    while node is not None and node is not other:
        parents = [parent for parent, _ in node.next_functions if parent is not None]
        scales = node.name() in ("MulBackward0", "DivBackward0", "MeanBackward0", "ToCopyBackward0")
        node = parents[0] if scales and len(parents) == 1 else None
    return node is not None


def way_of(args, kwargs):
    """Return what tells one way of calling a model from another: shapes, flags, names and which arguments are there."""
    leaves, form = pytree.tree_flatten((args, kwargs))
    simple = [item if isinstance(item, (str, bool, int)) else None for item in leaves]
    shapes = [item.shape for item in leaves if isinstance(item, torch.Tensor)]
    return str(form), tuple(simple), tuple(shapes)


def look_at_rows(record):
    """Note the output features of a projection that have a gradient: q, k and v may be one weight."""
    axis = feature_axis(record)
    gradient = record.param.grad
    if axis is None or gradient.layout is not torch.strided or hasattr(gradient, "to_local"):
        return
    rows = (gradient != 0).any(1 - axis)
    record.rows = rows if record.rows is None else record.rows | rows


def feature_axis(record):
    """Return the dimension of the output features if it is known and the parameter is a matrix, else None."""
    owner = next(iter(record.owners), None)
    if record.param.dim() != 2:
        return None
    if isinstance(owner, (nn.Linear, nn.MultiheadAttention)):
        return 0
    return 1 if type(owner).__name__ == "Conv1D" else None  # of Hugging Face's GPT-2


def still_running(frames):
    """Return those of the frames that are still on the stack."""
    stack = set()
    frame = sys._getframe(1)
    while frame:
        stack.add(frame)
        frame = frame.f_back
    return [frame for frame in frames if frame in stack]


def copy_key(param, optimizer):
    """Return the key under which an optimizer keeps a float32 copy of a 16-bit parameter, or None."""
    if param.element_size() != 2:
        return None
    for key, value in optimizer.state.get(param, {}).items():
        same_shape = isinstance(value, torch.Tensor) and value.shape == param.shape
        if same_shape and value.dtype == torch.float32 and torch.equal(value.to(param.dtype), param):
            return key
    return None


def weight_of(record, key, optimizer):
    """Return what the optimizer updates: the parameter, or the float32 copy that it keeps of it."""
    return record.param if key is None else optimizer.state[record.param][key]


# ------------------------------------------------------------ what exists
def existing(*wanted):
    """Return all objects of some classes that exist. No object's own __class__ is asked: a lazy one may load itself."""
    kinds = set(wanted)
    found = list(wanted)
    while found:
        below = set(found.pop().__subclasses__()) - kinds
        kinds |= below
        found += below
    return [thing for thing in gc.get_objects() if type(thing) in kinds]  # faster than issubclass for each object


def params_of(owner):
    """Return the parameters of a module or an optimizer. A lazy one has no values before its first forward."""
    if isinstance(owner, nn.Module):
        return [param for param in owner.parameters() if not nn.parameter.is_lazy(param)]
    return [param for group in owner.param_groups for param in group["params"]]


def ids_of(*owners):
    """Return the ids of the parameters of modules or optimizers."""
    return {id(param) for owner in owners for param in params_of(owner)}


def ids(records):
    """Return the ids of the parameters of records."""
    return {id(record.param) for record in records}


def records_in(records, *owners):
    """Return those records whose parameters belong to modules or optimizers."""
    inside = ids_of(*owners)
    return [record for record in records if id(record.param) in inside]


def with_guests(roots):
    """Return outermost modules and those that run inside them without being in them."""
    return [*roots, *(guest for root in roots.values() for guest in root.guests)]


def holders_of(modules):
    """Return {child: the first of these modules that holds it}."""
    holders = {}
    for holder in modules:
        for child in holder._modules.values():
            holders.setdefault(child, holder)
    return holders


def top_of(module, modules=None):
    """Climb to the outermost of these, or of all modules, that holds this one."""
    holders = holders_of(existing(nn.Module) if modules is None else modules)
    while module in holders:
        module = holders.pop(module)  # a module that holds itself, however deep, ends the climb
    return module


def compiled_graphs():
    """Return the number of graphs that torch.compile has made in this process."""
    utils = getattr(getattr(torch, "_dynamo", None), "utils", None)
    return utils.counters["stats"]["unique_graphs"] if utils else 0


# ------------------------------------------------------------ hooks
@contextlib.contextmanager
def ended_by_exception():
    """Let os._exit() and the functions of os.exec* in this thread raise SystemExit: they'd end this program too."""
    before = {name: getattr(os, name) for name in ("_exit", "execv", "execve")}  # the others of exec* call these
    process = os.getpid()

    def is_script():
        return os.getpid() == process and threading.current_thread() is threading.main_thread()

    def leave(status):
        if not is_script():
            before["_exit"](status)
        raise SystemExit(status)

    def execute(name, file, *arguments):
        if not is_script():
            before[name](file, *arguments)
        words = f"it replaces itself by {os.fsdecode(file)} (os.{name}), which can't be watched"
        raise SystemExit(f"{words}: give what it starts as the command")

    os._exit = leave
    os.execv = functools.partial(execute, "execv")
    os.execve = functools.partial(execute, "execve")
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(os, name, function)


@contextlib.contextmanager
def hooked(watcher):
    """Install the hooks. They return at once while torch.compile traces them, so compiled code stays as it was."""
    call = nn.Module.__call__
    backward = torch.autograd.backward

    @functools.wraps(call)
    def watched(module, /, *args, **kwargs):
        if torch.compiler.is_compiling():
            return call(module, *args, **kwargs)
        return watcher.called(call, module, args, kwargs)

    def step_begins(optimizer, args, kwargs):
        if torch.compiler.is_compiling():
            return None
        return watcher.step_begins(optimizer, args, kwargs, sys._getframe(1))

    def step_ended(optimizer, args, kwargs):
        if not torch.compiler.is_compiling():
            watcher.step_ended(optimizer, sys._getframe(1))

    nn.Module.__call__ = watched
    torch.autograd.backward = functools.wraps(backward)(functools.partial(watcher.backward, backward))
    watcher.undo += [
        functools.partial(setattr, nn.Module, "__call__", call),
        functools.partial(setattr, torch.autograd, "backward", backward),
    ]
    watcher.install()
    handles = [
        optimizer_hooks.register_optimizer_step_pre_hook(step_begins),
        optimizer_hooks.register_optimizer_step_post_hook(step_ended),
    ]
    try:
        yield
    finally:
        watcher.done = True
        watcher.unhook()
        for handle in handles:
            handle.remove()


# ====================================================================================================================
# Part 2: judge
# ====================================================================================================================


# ------------------------------------------------------------ what became of each parameter
FATES = {  # fate: its line in the report; a fate without a line is sound
    "no_gradient": "NO GRADIENT although the output depends on them",
    "zero_gradient": "a gradient of zeros although the output depends on them",
    "both_zero": "a gradient of zeros in every step, because what they are multiplied with is zero too",
    "cleared": "a gradient in backward, and none at the optimizer's step",
    "replaced": "a gradient, but the optimizer holds other tensors with their shapes",
    "no_optimizer": "a gradient, but no optimizer",
    "stray": "no gradient, and in an optimizer but in no module",
    "zero_bias": "a gradient of zeros, which may be right for a bias",
    "unused": "unused: no gradient, and the output does not depend on them",
    "not_reached": "no gradient reached the output of their module, which is unused or detached",
    "not_run": "unused: no gradient, and no module with them runs",
    "idle": "no gradient and no optimizer",
    "waiting": "in an optimizer that has not stepped yet",
    "updated_elsewhere": "a gradient, but no optimizer: something else changes them",
}
HARMLESS = {"zero_bias", "unused", "not_reached", "not_run", "idle", "waiting", "updated_elsewhere"}  # warnings


def tell_models_apart(watch):
    """Put the class of a model before its names if several models share some; number the models of one class."""
    models = list(dict.fromkeys(root.model for root in watch.models.outermost.values()))
    names = collections.Counter(name for model in models for name, _ in model.named_parameters())
    if max(names.values(), default=0) < 2:
        return
    titles = collections.defaultdict(list)
    for model in models:
        titles[type(model).__name__].append(model)
    for kind, alike in titles.items():
        for number, model in enumerate(alike, 1):
            title = f"{kind}{number}" if len(alike) > 1 else kind
            title = watch.models.own_names.get(model, title)
            watch.models.prefixes |= dict.fromkeys(model.modules(), f"{title}.")
    for record in watch.records.values():
        first = next(iter(record.owners), None)
        record.name = watch.models.prefixes.get(first, "") + record.name
        record.owners = {module: watch.models.prefixes.get(module, "") + name for module, name in record.owners.items()}


def take_in_waiting(watch, optimizers, modules):
    """Record what optimizers hold that have not stepped, where no module with it has run either."""
    new = {}
    for optimizer in optimizers:
        for number, param in enumerate(params_of(optimizer)):
            if id(param) not in watch.records:
                new[id(param)] = watch.record_of(param, f"parameter {number} of {type(optimizer).__name__}")
    for module in modules if new else ():
        for name, param in module.named_parameters(recurse=False):
            if id(param) in new:
                top = top_of(module, modules)
                title = watch.models.own_names.get(top, type(top).__name__)
                prefix = next(prefix for prefix, part in top.named_modules() if part is module)
                new[id(param)].name = ".".join(filter(None, (title, clean(prefix), name)))


class Facts:
    """Give every parameter a fate, by what was seen of it."""

    def __init__(self, watch):
        self.watch = watch
        tell_models_apart(watch)
        self.stepped = ids_of(*watch.optimizers.known)
        modules = existing(nn.Module)
        self.waiting = ids_of(*watch.optimizers.alive) - self.stepped
        take_in_waiting(watch, watch.optimizers.alive, modules)
        self.held = ids_of(*modules)
        self.ran = ids_of(*with_guests(watch.models.outermost))
        self.fates = {record: self.fate(record) for record in self.judged()}
        self.old = self.find_replaced()
        self.proven = False  # is every gradient the slope?
        asked, self.untested = fates_by_use(watch, self.of("silent"))
        self.fates |= asked
        if self.of("not_seen"):
            hides = "torch.func hides" if self.watch.hidden.transformed else "compiled code hides"
            self.untested.append(f"no gradient in {short(self.of('not_seen'))}, and {hides} what uses them")
        self.live = self.of(*{*self.fates.values()} - {"frozen", "idle"})

    def judged(self):
        """Return the records of the models that ran, of the guests that learn, and of the optimizers that stepped."""
        records = self.watch.records
        # A guest without any gradient may be a teacher, or a template whose weights are given to it.
        learning = {key for key in self.ran & records.keys() if records[key].arrived}
        models = ids_of(*(root.model for root in self.watch.models.outermost.values()))
        known = [record for key, record in records.items() if key in models | learning | self.stepped]
        found = [record for record in known if record.seen or (not record.trainable and record.param.numel())]
        waiting = [record for key, record in records.items() if key in self.waiting and record.trainable]
        return list(dict.fromkeys(found + waiting))

    def fate(self, record):
        """Say what became of a parameter: the first answer that holds counts."""
        key = id(record.param)
        if not record.trainable:
            return "frozen"
        if key in self.waiting:
            return "waiting"
        if key not in self.stepped:
            if not record.trained and not record.arrived:
                return "idle"
            return "updated_elsewhere" if record.moved else "no_optimizer"
        if record.trained:
            return "trained"
        if key not in self.held:
            return "stray"  # perhaps its module has another parameter by now
        if record.cleared:
            return "cleared"
        if key not in self.ran:
            return "not_seen" if self.watch.hidden.has_compiled() or self.watch.hidden.transformed else "not_run"
        return "silent"  # to be asked: does the output depend on it?

    def find_replaced(self):
        """Match tensors without an optimizer with those that optimizers hold in their place; return the latter."""
        old = []
        for record in self.of("no_optimizer"):
            fits = [other for other in self.of("stray", "not_run") if other.param.shape == record.param.shape]
            if fits:
                self.fates[record] = "replaced"
                old.append(fits[0])
                del self.fates[fits[0]]
        return old

    def of(self, *fates):
        """Return the parameters with these fates."""
        return [record for record, fate in self.fates.items() if fate in fates]


class Progress:
    """Say how far a long judgement is, on standard error and in one process of a launch."""

    def __init__(self, question, number):
        self.question = question
        self.number = number
        self.next = time.monotonic() + PROGRESS_SECONDS

    def tell(self, done):
        """Print a line if the last one is long ago."""
        if time.monotonic() >= self.next and os.environ.get("RANK", "0") == "0":
            say(f"check_training: {self.question}: {done} of {self.number} tensors asked", error=True)
            self.next = time.monotonic() + PROGRESS_SECONDS


# ------------------------------------------------------------ running the last batch again
class Unrepeatable(Exception):
    """Say why the last batch cannot be run again."""


class Rerun:
    """Repeat an outermost module's last calls, eagerly. Parameters, buffers and random state are put back."""

    def __init__(self, module, root, others=False):
        self.calls = list(root.calls.values())
        self.others = others  # use the outputs that no gradient reached, in place of those that one did
        self.reached = root.reached
        while isinstance(module, nn.parallel.DistributedDataParallel) or hasattr(module, "_orig_mod"):
            module = module._orig_mod if hasattr(module, "_orig_mod") else module.module  # no talk between processes
        self.module = module
        self.usual = None  # outputs of two runs
        if any(isinstance(part, nn.SyncBatchNorm) for part in module.modules()):
            raise Unrepeatable("SyncBatchNorm needs all processes")
        if any(hasattr(param, "to_local") for param in params_of(module)):
            raise Unrepeatable("its parameters are spread over processes")

    def run(self, call, grad=False, autocast=True):
        """Return the output of one call."""
        kind, dtype, enabled = call.autocast
        devices = [torch.cuda.current_device()] if on_gpu() else []
        modes = {part: part.training for part in call.modes}
        buffers = [(part, dict(part.named_buffers(recurse=False))) for part in self.module.modules()]
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(devices))  # so every run draws the same dropout
            stack.enter_context(same_choices())
            stack.enter_context(torch.set_grad_enabled(grad))
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled and autocast))
            stack.enter_context(contextlib.redirect_stdout(None))
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            try:
                set_modes(call.modes)
                for part, values in buffers:  # backward may still need what the forward writes into them
                    set_buffers(part, {name: value.clone() for name, value in values.items()})
                args, kwargs = call.args, call.kwargs
                if not grad:
                    args, kwargs = pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, (args, kwargs))
                return self.module(*args, **kwargs)
            except Exception as error:
                raise Unrepeatable(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}") from error
            finally:
                set_modes(modes)
                for part, values in buffers:
                    set_buffers(part, values)

    def outputs(self, grad=False, autocast=True):
        """Return the floating outputs that the loss used, as far as gradients tell."""
        found = []
        for call in self.calls:
            for number, item in enumerate(tensors(self.run(call, grad, autocast))):
                if item.is_floating_point() and self.is_used(call, number):
                    found.append(item.double() if grad else item.double().clone())
        if not found:
            raise Unrepeatable("it returns no floating tensors")
        return found

    def is_used(self, call, number):
        """Say whether a gradient reached an output. All count if none can have one, or if none was reached."""
        if call.attached and self.reached:
            return (number in call.reached) != self.others
        return not self.others

    def depends_on(self, params):
        """Say whether the outputs change with these parameters by more than from run to run."""
        if self.usual is None:
            self.usual = (self.outputs(), self.outputs())
        saved = [param.detach().clone() for param in params]
        try:
            for param in params:
                perturb(param)
            moved = self.outputs()
        finally:
            with torch.no_grad():
                for param, value in zip(params, saved, strict=True):
                    param.copy_(value)
        pairs = zip(*self.usual, moved, strict=True)
        return any(not bool((new - old).abs().max() <= 2 * (again - old).abs().max()) for old, again, new in pairs)


@contextlib.contextmanager
def same_choices():
    """Put back the random state of Python and NumPy, by which a model may drop layers or force its decoder."""
    numpy = sys.modules.get("numpy")
    states = random.getstate(), numpy and numpy.random.get_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        if numpy:
            numpy.random.set_state(states[1])


def set_modes(modes):
    """Put modules into training or evaluation mode, each by itself."""
    for module, training in modes.items():
        module.training = training


def set_buffers(module, values):
    """Replace buffers of a module, not of those inside it."""
    for name, value in values.items():
        setattr(module, name, value)


@torch.no_grad()
def perturb(param):
    """Change a parameter at random: a constant would cancel in a norm or a softmax."""
    noise = torch.randn(param.shape, generator=torch.Generator().manual_seed(1)).to(param)
    spread = plain(param).float().std(correction=0).nan_to_num() / 4 + 0.01
    param.mul_(1 + noise / 4).add_(noise * spread)


# ------------------------------------------------------------ do the outputs depend on it?
def fates_by_use(watch, suspects):
    """Return {suspect: fate} by whether the outputs depend on it, and sentences on what could not be asked."""
    used = set()
    dead = set()
    aside = set()
    unknown = set()
    reasons = []
    end = time.monotonic() + RERUN_SECONDS
    for module, root in watch.models.roots.items():
        mine = records_in(suspects, module, *root.guests)
        if not mine:
            continue
        if is_leftover(watch, root):
            aside.update(mine)
            continue
        try:
            rerun = Rerun(module, root)
            for record in dependent(rerun, mine, end):
                used.add(record)
            used -= new_paths(watch, rerun, [record for record in mine if record in used and not record.arrived])
            rest = [record for record in mine if record not in used]
            dead.update(zero_factors(rerun, rest, end))
            with contextlib.suppress(Unrepeatable):  # there may be no such output
                aside.update(dependent(Rerun(module, root, others=True), rest, end))
        except Unrepeatable as reason:
            untested = [record for record in mine if record not in used]
            unknown.update(untested)
            reasons.append(f"no gradient in {short(untested)}, and the last batch cannot be run again ({reason})")
    inside = set(records_in(suspects, *with_guests(watch.models.roots)))
    outside = [record for record in suspects if record not in inside]
    if outside:
        unknown.update(outside)
        reasons.append(f"no gradient in {short(outside)}, which ran under no_grad only")
    fates = {}
    for record in suspects:
        if record in used:
            fates[record] = fate_of_used(record)
        elif record in dead:
            fates[record] = "both_zero"
        elif record in aside:
            fates[record] = "not_reached"
        elif record in unknown:
            fates[record] = "unknown"
        else:
            fates[record] = "unused"
    return fates, reasons


def new_paths(watch, rerun, used):
    """Return those records which the repeated forward uses and no watched one did: it may choose other experts.

    It has the weights after the last step, and other random numbers. An expert in a list of tensors, which no module
    runs, has a gradient in the repeated forward.
    """
    if not used or watch.hidden.has_compiled():  # no hook tells which modules run in compiled code
        return set()
    places = Forward(watch).places
    late = set()
    listed = []
    for record in used:
        ran = [owner for owner in record.owners if owner in places]
        if ran and not watch.models.ran & set(record.owners):
            late.add(record)
        if any(isinstance(owner, (nn.ParameterList, nn.ParameterDict)) for owner in record.owners):
            listed.append(record)
    if listed and rerun.reached:
        total = sum(item.square().sum() for item in rerun.outputs(grad=True) if item.requires_grad)
        gradients = torch.autograd.grad(total, [record.param for record in listed], allow_unused=True)
        late |= {record for record, gradient in zip(listed, gradients, strict=True) if gradient is not None}
    return late


def fate_of_used(record):
    """Say what became of a parameter without a gradient on which an output depends."""
    if not record.arrived:
        return "no_gradient"
    return "zero_bias" if record.name.endswith("bias") else "zero_gradient"  # it may cancel in a softmax or a norm


def is_leftover(watch, root):
    """Say whether nothing can have used a module's outputs: no gradient reached them, nor those of a later module."""
    others = [other for other in watch.models.roots.values() if other.model is root.model and other.reached]
    return not root.reached and bool(others) and all(other.last < root.last for other in others)


def dependent(rerun, records, end):
    """Yield the records on which the outputs depend, found by halving."""
    groups = [records] if records else []
    progress = Progress("which parameters does the output depend on", len(records))
    while groups:
        group = groups.pop()
        progress.tell(len(records) - len(group) - sum(map(len, groups)))
        if time.monotonic() > end:
            raise Unrepeatable(f"it takes more than {RERUN_SECONDS} s")
        if not rerun.depends_on([record.param for record in group]):
            continue
        if len(group) == 1:
            yield group[0]
            continue
        middle = len(group) // 2
        groups += [group[:middle], group[middle:]]


def zero_factors(rerun, records, end):
    """Return those records with a gradient of zeros that are zero, and that matter once the others are not."""
    zero = [record for record in records if record.arrived and float(largest(record.param)) == 0]
    if len(zero) < 2:
        return []
    rerun.usual = None
    try:
        for record in zero:
            perturb(record.param)
        return list(dependent(rerun, zero, end))
    finally:
        rerun.usual = None
        for record in zero:
            record.param.detach().zero_()


# ------------------------------------------------------------ where the gradient ends
@dataclasses.dataclass
class Place:
    """Hold what a module did in the repeated forward."""

    order: int
    grad_mode: bool  # was autograd on?
    cut: bool = False  # does it have trainable weights, and no output that needs a gradient?


class Forward:
    """Hold a repeated forward: a Place for every module that ran, in the order of the first call."""

    def __init__(self, watch):
        self.places = {}
        modules = [pair for root in watch.models.roots.values() for pair in root.model.named_modules()]
        self.names = {module: watch.models.prefixes.get(module, "") + clean(name) for name, module in modules}
        self.holders = holders_of(self.names)
        handles = [
            module_hooks.register_module_forward_pre_hook(self.enter),
            module_hooks.register_module_forward_hook(self.leave),
        ]
        try:
            for module, root in watch.models.roots.items():
                with contextlib.suppress(Unrepeatable):  # fates_by_use() has told
                    Rerun(module, root).outputs(grad=True)
        finally:
            for handle in handles:
                handle.remove()

    def enter(self, module, args):
        """Note when a module runs first."""
        self.places.setdefault(module, Place(len(self.places), torch.is_grad_enabled()))

    def leave(self, module, args, output):
        """Note whether the gradient is cut in this module, at the latest."""
        floating = [item for item in tensors(output) if item.is_floating_point()]
        trainable = any(param.requires_grad for param in params_of(module))
        needs_gradient = any(item.requires_grad for item in floating)
        self.places[module].cut = trainable and bool(floating) and not needs_gradient

    def around(self, module):
        """Yield the modules around a module, from the innermost. Some only hold others and never run."""
        while module in self.holders:
            module = self.holders[module]
            yield module

    def users(self, record):
        """Return [(module that ran, or None, name of the owner)] of a parameter."""
        uses = []
        for module, name in record.owners.items():
            while module is not None and module not in self.places:  # it only holds weights for the one around it
                module = self.holders.get(module)
            uses.append((module, name))
        return uses

    def last_use(self, record):
        """Return when a parameter is used last, and the name of the module there."""
        return max((self.places[module].order if module else -1, name) for module, name in self.users(record))

    def used_around_others(self, record):
        """Return the modules that use a parameter and run other modules, before or after that use."""
        outer = {holder for module in self.places for holder in self.around(module)}
        return [module for module, _ in self.users(record) if module in outer]


def where_it_ends(watch, lost):
    """Return sentences on where the gradient ends."""
    forward = Forward(watch)
    return [*boundaries(forward, watch.records.values(), lost), *cuts(forward, lost)]


def boundaries(forward, records, lost):
    """Describe each pair of neighbours in the forward of which the first has no gradient and the second has one."""
    seen = [record for record in records if record.owners and (record.trained or record in lost)]
    around = {record: forward.used_around_others(record) for record in seen}
    placed = [record for record in seen if not around[record]]
    has_gradient = {}
    for (_, name), trained in sorted((forward.last_use(record), record.trained) for record in placed):
        has_gradient[name] = has_gradient.get(name, False) or trained
    names = list(has_gradient)
    alike = collections.defaultdict(list)  # layers.0 and layers.1 are one sentence
    for first, second in itertools.zip_longest(names, names[1:]):
        if not has_gradient[first] and (second is None or has_gradient[second]):
            alike[re.sub(r"\d+", "*", f"{first} {second}")].append((first, second))
    lines = []
    for pairs in alike.values():
        first, second = pairs[0]
        more = f", and in {len(pairs) - 1} more places like it" if len(pairs) > 1 else ""
        lines.append(f"the gradient ends between {second or 'the loss'} (has one) and {first} (has none){more}")
    modules = dict.fromkeys(module for record in seen if record in lost for module in around[record])
    if modules and not lines:
        where = with_classes(modules, forward.names)
        lines.append(f"look in the forward of {where}, which uses it beside the modules that it runs")
    return lines


def cuts(forward, lost):
    """Name the modules of lost parameters that ran without autograd or whose output needs no gradient."""
    owners = {module for record in lost for module in record.owners}
    mine = {module: place for module, place in forward.places.items() if owners & set(module.modules())}
    off = [module for module, place in mine.items() if not place.grad_mode]
    outermost = [module for module in off if not any(holder in off for holder in forward.around(module))]
    cut = [module for module, place in mine.items() if place.cut and place.grad_mode]
    outer = {holder for module in cut for holder in forward.around(module)}
    innermost = [module for module in cut if module not in outer]
    lines = []
    if outermost:
        where = with_classes(outermost, forward.names)
        lines.append(f"autograd is off in {where}: in a no_grad block or an autograd.Function")
    if innermost:
        where = with_classes(innermost, forward.names)
        lines.append(f"it is cut inside {where}: its weights need a gradient, its output has none")
    return lines


# ------------------------------------------------------------ findings
@dataclasses.dataclass
class Finding:
    """Hold one line of the verdict. A warning does not change the exit status; a note is one that may well be meant."""

    kind: str
    text: str
    tensors: list = dataclasses.field(default_factory=list)
    details: list = dataclasses.field(default_factory=list)
    warning: bool = False
    note: bool = False

    @property
    def next(self):
        """Return the next step, or an empty text."""
        return NEXT.get(self.kind, "")


NOTES = {"same_input", "frozen_held", "zero_bias", "idle"}  # warnings that honest scripts get too
BUILD_AFTER = "the optimizer was built before the model was copied, replaced or tied: build it afterwards"
NEXT = {  # kind of a finding: what to do
    "no_gradient": "at that place, look for detach, .data, .item(), numpy, no_grad, or a kernel without a backward",
    "both_zero": "begin one of the two at random, as LoRA's A",
    "zero_gradient": "look for a mask, a backward that returns zeros, or float16 without a gradient scaler",
    "cleared": "between backward and step(), look for zero_grad, a clip to 0, a new .grad, or a phase that ends",
    "replaced": BUILD_AFTER,
    "stray": BUILD_AFTER,
    "no_optimizer": "give them to an optimizer, or freeze them with requires_grad_(False)",
    "zero_bias": "nothing, if a norm or a softmax cancels this bias",
    "unused": "use their module's output, or remove it; experts without a token need no change",
    "not_reached": "use this output in the loss, or remove its module",
    "not_run": "call their module, or leave it out of the optimizer",
    "idle": "nothing, if this is a target or a reference; requires_grad_(False) says so",
    "waiting": "call its step(), or watch more steps (--steps) if it steps later",
    "updated_elsewhere": "nothing, if you update them by hand",
    "nothing_to_train": "look for requires_grad_(False) or requires_grad = False after the optimizer was built",
    "frozen_held": "nothing, if they should stay frozen; otherwise call requires_grad_(True)",
    "zero_frozen": "requires_grad_(True), if they are adapters such as lora_B",
    "frozen_between": "train them with requires_grad_(True), unless this layer should stay frozen",
    "copied_tie": "assign the Parameter itself, head.weight = embedding.weight, and build the optimizer afterwards",
    "empty_steps": "call backward on the loss of each new batch",
    "repeated": "look for a stored gradient, or for a loss of the same batch and the same weights",
    "stepped_again": "call optimizer.step() once per gradient; a gradient scaler's step() calls it too",
    "never_cleared": "call optimizer.zero_grad() once per step",
    "overwritten": "call zero_grad() once per step, not once per backward",
    "not_finite": "torch.autograd.set_detect_anomaly(True) names the operation",
    "skipped": "set_detect_anomaly(True) names the operation; if only the scale is too large, watch more (--steps)",
    "changed_alone": "look for weight decay or momentum on parameters that the loss does not use",
    "unchanged": "look at the learning rate, its schedule, and the scale of the loss",
    "too_small": "nothing, if a norm cancels a bias or a later weight began at zero; else look at the learning rate",
    "put_back": "after the optimizer's step, look for load_state_dict, copy_ or an assignment to .data",
    "eval_mode": "call model.train() before the training loop and after each evaluation",
    "same_input": "draw a new batch inside the loop, if this is meant to train",
    "loss_not_finite": "lower the learning rate, and look for a logarithm or a division by 0",
    "dead_term": "at that place, look for detach, .data, argmin, no_grad or a missing create_graph; "
    "if it is meant, leave the term out of the loss",
    "learning_rate": "call the scheduler once per epoch if it counts epochs, and look at its arguments",
    "loss_constant": "look for a loss that does not use the model's output",
    "wrong_slope": "look for detach, .data or a wrong backward in what uses them, and compare with plain PyTorch",
    "lost_rows": "look for detach or .data on this part of the output, such as k of a packed q, k, v",
    "causal": "look at the attention mask, at shifts and at norms over positions",
    "impossible": "look for work that the step leaves out",
    "fast_backward": "count the parameters with a gradient, and measure forward and backward separately",
    "apart": "call the DistributedDataParallel module itself",
    "graph": "switch graphs off for the check",
}


def findings_on(facts, kind, text, group, *details, warning=False):
    """Return the finding on a group of parameters, in a list that is empty if the group is."""
    if not group:
        return []
    names = [record.name for record in group]
    count = counted(len(group), "tensor")
    if set(group) <= set(facts.live):
        count = f"{len(group)} of {len(facts.live)} tensors"
    return [Finding(kind, f"{text}: {count}", names, [folded(names), *details], warning)]


def fate_findings(facts):
    """Return the findings that follow from a parameter's fate alone."""
    found = []
    later = any(record.seen for record in facts.of("waiting"))
    nothing_trains = not later and not facts.of("trained", "updated_elsewhere")
    for fate, text in FATES.items():
        group = facts.of(fate)
        details = []
        if group and fate == "no_gradient":
            details = where_it_ends(facts.watch, group)
        if group and fate == "replaced":
            details = [f"it holds {short(facts.old)}"]
        found += findings_on(facts, fate, text, group, *details, warning=fate in HARMLESS and not nothing_trains)
    return found + frozen_findings(facts)


def frozen_findings(facts):
    """Return findings on what is frozen: all of an optimizer, some of it, or an adapter that is still zero."""
    frozen = facts.of("frozen")
    held = [record for record in frozen if id(record.param) in facts.stepped]
    empty = [optimizer for optimizer in facts.watch.optimizers.known if not ids_of(optimizer) - ids(held)]
    found = []
    for optimizer in empty:
        text = f"{type(optimizer).__name__} has nothing to train, all its parameters are frozen"
        found += findings_on(facts, "nothing_to_train", text, records_in(held, optimizer))
    told = ids_of(*empty) | ids(frozen_between(facts))
    some = [record for record in held if id(record.param) not in told]
    found += findings_on(facts, "frozen_held", "frozen, and in an optimizer", some, warning=True)
    ran = [record for record in frozen if record.param.dim() > 1 and facts.watch.models.ran & set(record.owners)]
    zero = [record for record in ran if has_values(record.param) and float(largest(record.param)) == 0]
    return found + findings_on(facts, "zero_frozen", "frozen, and all zero", zero, warning=True)


def gradient_findings(facts):
    """Return findings on gradients that are not finite, stay the same or add up."""
    moving = [record for record in facts.of("trained") if len(record.seen) > 2]
    repeated = [record for record in moving if record.changed and record.repeats]
    models = {root.model: None for root in facts.watch.models.roots.values()}  # one optimizer may hold several
    owners = [*facts.watch.optimizers.known, *models]
    kept = list(dict.fromkeys(record for owner in owners for record in never_cleared(moving, owner)))
    found = not_finite(facts) + skipped_steps(facts)
    empty = sum(not step.gradients for step in facts.watch.steps)
    if moving and empty > 1:
        text = f"{empty} of {len(facts.watch.steps)} steps have no gradient at all"
        found.append(Finding("empty_steps", text))
    if len(repeated) > 0.9 * len(moving):
        found += findings_on(facts, "repeated", "the same gradient in every step, bit for bit", repeated)
    again = [record for record in moving if record.stepped_again > 1 and not record.repeats]
    if len(again) > 0.9 * len(moving):
        text = "stepped again with the gradient of the step before, and no backward between the two"
        found += findings_on(facts, "stepped_again", text, again)
    found += findings_on(facts, "never_cleared", "gradients add up over the steps, zero_grad() is missing", kept)
    text = "gradients of earlier backward passes are cleared before the step that they are for"
    return found + findings_on(facts, "overwritten", text, overwritten(facts))


def overwritten(facts):
    """Return the trained records if nearly all lose the gradients of their micro-batches.

    Who combines the gradients of several backwards by hand changes them by other factors than a clip or a scaler does.
    """
    trained = [record for record in facts.of("trained") if record.arrivals]
    lost = [record for record in trained if record.overwritten]
    by_step = list(zip(*(record.overwritten for record in lost), strict=False))
    scaled_alike = all(max(factors) <= 1.001 * min(factors) for factors in by_step)
    return lost if len(lost) > 0.9 * len(trained) and by_step and scaled_alike else []


def never_cleared(records, owner):
    """Return those records of an optimizer or a model that are never cleared if these are nearly all.

    One of many may be meant. Behind a projection that begins at zero, gradients come too late to show it twice.
    """
    mine = records_in(records, owner)
    steps = {record: record.kept for record in mine}
    kept = [record for record, (added, all_steps) in steps.items() if added >= 2 or added == all_steps > 0]
    shown = any(added >= 2 for added, _ in steps.values())
    return kept if shown and len(kept) > 0.9 * len(mine) else []


def not_finite(facts):
    """Return the finding on gradients with NaN or infinity, in the first step that has any."""
    first = {record: first_bad_step(record) for record in facts.live}
    step = min((number for number in first.values() if number), default=None)
    bad = [record for record in facts.live if step and first[record] == step]
    forward = Forward(facts.watch) if bad else None
    order = sorted((record for record in bad if record.owners), key=lambda record: forward.last_use(record))
    details = [f"in backward it begins at {order[-1].name}"] if order else []
    return findings_on(facts, "not_finite", f"NaN or infinity in the gradient, first in step {step}", bad, *details)


def skipped_steps(facts):
    """Return the findings on optimizers of which a gradient scaler skipped every step."""
    found = []
    for optimizer in facts.watch.optimizers.known if facts.watch.optimizers.skipped else ():
        held = records_in(facts.watch.records.values(), optimizer)
        mine = [record for record in held if record.trainable]
        if mine and not any(record.seen for record in mine):
            text = f"the gradient scaler skipped every step of {type(optimizer).__name__}"
            text += ", because of NaN or infinity in gradients"
            found += findings_on(facts, "skipped", text, [record for record in mine if record.overflows] or mine)
    return found


def first_bad_step(record):
    """Return the number of the first step whose gradient has NaN or infinity, or None."""
    return next((number for number, step in enumerate(record.seen, 1) if not step.largest < float("inf")), None)


def change_findings(facts):
    """Return findings on what the optimizer does to the parameters."""
    unmoved = [record for record in facts.of("trained") if not record.changed and first_bad_step(record) is None]
    alone = [record for record in facts.live if any(step.changed and step.gradient is None for step in record.seen)]
    found = findings_on(facts, "changed_alone", "changed by a step without a gradient", alone)
    trained = facts.of("trained")
    back = [record for record in trained if record.put_back]
    if back:
        text = "changed by every step, and the next one begins from the same values again"
        everything = len(back) > 0.9 * len(trained)
        if everything or any(record.param.dim() > 1 for record in back):  # a clip may hold a bias at its bound
            found += findings_on(facts, "put_back", text, back)
    groups = [group for optimizer in facts.watch.optimizers.known for group in optimizer.param_groups]
    small = too_small(unmoved, groups)
    unmoved = [record for record in unmoved if record not in small]
    if all(record.name.endswith("bias") for record in unmoved):  # in a norm after it a bias may cancel
        small += unmoved
        unmoved = []
    found += findings_on(facts, "too_small", "a gradient too small to change them", small, warning=True)
    rates = sorted({float(group["lr"]) for group in groups if "lr" in group})
    details = [f"learning rates: {', '.join(f'{rate:g}' for rate in rates)}"]
    if any(record.param.element_size() == 2 for record in unmoved):
        details.append("16 bits round a small update away: keep float32 weights for the optimizer")
    return found + findings_on(facts, "unchanged", "a gradient, but no step changes them", unmoved, *details)


def too_small(unmoved, groups):
    """Return those of the unchanged 32-bit records whose update is rounded away, while others of their group change.

    An example is a layer in front of a weight that began at zero, while the learning rate warms up.
    """
    small = []
    for group in groups:
        held = {id(param) for param in group["params"]}
        mine = [record for record in unmoved if id(record.param) in held and record.param.element_size() > 2]
        if not float(group.get("lr", 0)) or len(mine) == len(held):
            continue
        for record in mine:
            update = float(group["lr"]) * max(step.largest for step in record.seen)
            if update < torch.finfo(record.param.dtype).eps * float(largest(record.param)):
                small.append(record)
    return small


def mistakes_in_the_model(facts):
    """Return warnings on what is seldom meant: a frozen layer between others, a copy for a tie, evaluation mode."""
    text = "frozen, while the same tensor of an earlier layer trains"
    found = findings_on(facts, "frozen_between", text, frozen_between(facts), warning=True)
    for pair in copied_ties(facts):
        text = "equal at first, then trained apart: perhaps a copy instead of a tie"
        found += findings_on(facts, "copied_tie", text, pair, warning=True)
    asleep = in_evaluation_mode(facts.watch)
    if asleep:
        names = {module: name for record in facts.live for module, name in record.owners.items()}
        for root in facts.watch.models.roots.values():
            names |= {module: clean(name) for name, module in root.model.named_modules()}
        text = f"in evaluation mode in every training forward: {counted(len(asleep), 'module')}"
        found.append(Finding("eval_mode", text, details=[with_classes(asleep, names)]))
    return found


def in_evaluation_mode(watch):
    """Return dropouts and batch norms that never ran in training mode, although something trains around them.

    Frozen layers may be kept in evaluation mode, and so may batch norms alone.
    """
    asleep = []
    for module, root in watch.models.roots.items():
        holders = holders_of(module.modules())
        for part in module.modules():
            dropout = isinstance(part, nn.modules.dropout._DropoutNd) and part.p > 0
            norm = isinstance(part, nn.modules.batchnorm._BatchNorm) and part.track_running_stats
            if not (dropout or norm) or part not in watch.models.ran - watch.models.training or not root.reached:
                continue
            holder = holders.get(part, part)
            while holder in holders and not params_of(holder):
                holder = holders[holder]
            trains = any(param.requires_grad for param in params_of(part if norm and params_of(part) else holder))
            if trains and (dropout or holder not in watch.models.training):
                asleep.append(part)
    return asleep


def frozen_between(facts):
    """Return frozen parameters of a layer whose twins in an earlier layer train.

    In a Sequential, a convolution's weight is no twin of a batch norm's.
    """
    layers = collections.defaultdict(dict)
    for record in facts.live + facts.of("frozen"):
        kind = owner_type(record) if record.owners else None
        for number in re.finditer(r"(?<=\.)\d+(?=\.)|^\d+(?=\.)", record.name):
            family = (record.name[: number.start()], record.name[number.end() :], kind)
            layers[family][int(number[0])] = record
    odd = []
    for family in layers.values():
        first = min((index for index, record in family.items() if record.trainable), default=float("inf"))
        odd += [record for index, record in family.items() if index > first and not record.trainable]
    return odd


def copied_ties(facts):
    """Return pairs of matrices in modules of two kinds that held the same values at the start."""
    twins = collections.defaultdict(list)
    for record in facts.live:
        if record.owners and record.param.dim() > 1 and plain(record.param).unique().numel() > 2:
            twins[record.param.shape, record.start].append(record)
    pairs = [group for group in twins.values() if len(group) == 2]
    return [(first, second) for first, second in pairs if owner_type(first) is not owner_type(second)]


def owner_type(record):
    """Return the class of the first module that holds a parameter."""
    return type(next(iter(record.owners)))


def run_findings(watch):
    """Return findings on inputs and losses."""
    found = []
    inputs = [step.inputs for step in watch.steps]
    if len(inputs) > 2 and inputs[0] and all(later == inputs[0] for later in inputs):
        text = "every step has the same input: all data in one batch, a benchmark, or a fault"
        found.append(Finding("same_input", text, warning=True))
    losses = losses_of(watch)
    if any(not abs(loss) < float("inf") for loss in losses):
        found.append(Finding("loss_not_finite", "the loss is NaN or infinite"))
    elif len(losses) > 2 and len(set(losses)) == 1:
        found.append(Finding("loss_constant", f"the loss is {losses[0]:.6g} in every step"))
    if watch.hidden.captured:
        found.append(Finding("graph", "a GPU graph was captured, and its replays can't be watched", warning=True))
    return found


def rate_findings(watch, rows):
    """Return the warning on learning rates that vanish; add a row on the rates of each group, first -> last."""
    texts = {}
    vanish = []
    for (name, _), steps in watch.rates.items():
        for group in zip(*steps, strict=False):
            ends = dict.fromkeys(f"{rate:.3g}" for rate in (group[0], group[-1]))
            text = f"{name} {' -> '.join(ends)}"
            texts[text] = None
            if group[-1] == 0 or max(group) > RATE_FALL * group[-1]:
                vanish.append(text)
    if texts:
        rows["rates"] = listed(texts)
    if not vanish:
        return []
    text = f"a learning rate is 0, or falls by more than {RATE_FALL:,} within {len(watch.steps)} steps"
    return [Finding("learning_rate", text, details=[listed(dict.fromkeys(vanish))], warning=True)]


def loss_findings(watch, rows):
    """Return the finding on terms of the loss that train nothing; add a row on the cuts on the way to it."""
    passes = watch.follow.passes
    cuts = dict.fromkeys(text for traced in passes for text in traced.cuts)
    if not passes:
        rows["cuts"] = "not followed: in steps 2 to 4 no loss was seen to be computed outside of compiled code"
    if cuts:
        rows["cuts"] = "the loss depends on what has no gradient: " + listed(cuts)
    if watch.follow.exits:
        rows["values"] = "no gradient passes through what left PyTorch before backward: " + listed(watch.follow.exits)
    live = set().union(*(traced.live for traced in passes))
    dead = {}
    for traced in passes:
        dead |= {key: texts for key, texts in traced.dead.items() if key not in live}
    if not dead:
        return []
    lines = dict.fromkeys(f"{place}: cut by {listed(dict.fromkeys(texts))}" for (_, place), texts in dead.items())
    text = "a term of the loss trains nothing, although it depends on parameters that train"
    if len(dead) > 1:
        text = f"{len(dead)} terms of the loss train nothing, although they depend on parameters that train"
    places = list(dict.fromkeys(place for _, place in dead))
    return [Finding("dead_term", text, places, list(lines))]


def counted(number, noun):
    """Return a number and its noun, in the plural unless it is 1."""
    return f"{number:,} {noun}" + "s" * (number != 1)


def listed(texts, most=5):
    """Return the first of some texts, and how many more there are."""
    texts = list(texts)
    return ", ".join(texts[:most]) + (f" and {len(texts) - most} more" if len(texts) > most else "")


def losses_of(watch):
    """Return the losses that were seen."""
    return [float(step.loss) + 0.0 for step in watch.steps if step.loss is not None]  # not -0


# ------------------------------------------------------------ is the gradient the slope?
class Slopes(Rerun):
    """Compare gradients with central differences of one number: the outputs, weighted at random."""

    def __init__(self, module, root):
        super().__init__(module, root)
        params = params_of(module)
        if any(param.is_floating_point() and param.element_size() < 4 for param in params):
            raise Unrepeatable("16-bit weights are too coarse for a difference")
        if any(param.is_complex() for param in params):
            raise Unrepeatable("a complex weight has more than one slope")
        self.weights = None
        self.rounding = 0.0  # of the number

    def number(self, grad=False):
        """Return the weighted sum of the outputs, without autocast's rounding."""
        outputs = self.outputs(grad, autocast=False)
        if self.weights is None:
            draw = torch.Generator().manual_seed(2)
            self.weights = [torch.randn(item.shape, generator=draw).to(item.device) for item in outputs]
        terms = [item * weight for item, weight in zip(outputs, self.weights, strict=True)]
        self.rounding = torch.finfo(torch.float32).eps * sum(float(term.detach().norm()) for term in terms)
        return sum(term.sum() for term in terms)

    def difference(self, param, direction, length):
        """Return the slope along a direction from two runs, one on each side of the parameter."""
        saved = param.detach().clone()
        values = []
        try:
            for sign in (1, -1):
                with torch.no_grad():
                    param.copy_(saved + sign * length * direction)
                values.append(float(self.number()))
        finally:
            with torch.no_grad():
                param.copy_(saved)
        return (values[0] - values[1]) / (2 * length)

    def error(self, param, gradient, where=1, stretch=1):
        """Return the error of a gradient along a random direction; None if the differences do not agree either.

        where: 0 for the elements that the direction leaves out. stretch: of the differences' lengths.
        """
        draw = torch.Generator().manual_seed(3)
        size = param.detach().float().square().mean().sqrt().clamp_min(1e-3)
        direction = torch.randn(param.shape, generator=draw).to(param) * size * where
        slope = float((gradient * direction).sum())
        near = self.difference(param, direction, 0.01 * stretch)
        usual = float((gradient * where).norm() * size)  # of a slope in a random direction
        scale = max(abs(slope), abs(near), usual)
        error = abs(slope - near) / scale if scale else 0.0
        lengths = [0.02]
        if error > SLOPE_ERROR:
            lengths += [0.015, 0.005]  # two may agree by chance
            if SLOPE_NOISE * 0.001 * stretch * scale > 5 * self.rounding:
                lengths.append(0.001)  # the kinks of many ReLUs may bend all longer ones alike
        for length in lengths:
            if not abs(near - self.difference(param, direction, length * stretch)) <= SLOPE_NOISE * scale:
                return None
        if error > SLOPE_ERROR and 0.02 * stretch * scale < self.rounding:  # both slopes are too small to be seen
            return None
        return error


@dataclasses.dataclass
class Compared:
    """Hold the comparison of gradients with differences."""

    errors: dict = dataclasses.field(default_factory=dict)  # record -> error, or None where differences do not agree
    rows: dict = dataclasses.field(default_factory=dict)  # record -> (first, last) output feature without a gradient
    reasons: collections.Counter = dataclasses.field(default_factory=collections.Counter)  # -> tensors not compared


def compare_slopes(facts):
    """Compare the gradients of the trained parameters that need one now."""
    found = Compared()
    end = time.monotonic() + SLOPE_SECONDS
    trained = facts.of("trained")
    progress = Progress("is each gradient the slope", len(trained))
    inside = records_in(trained, *with_guests(facts.watch.models.roots))
    found.reasons["what computes with them is in no module, or was not seen"] = len(trained) - len(inside)
    for module, root in facts.watch.models.roots.items():
        held = records_in(trained, module, *root.guests)
        mine = [record for record in held if record.param.requires_grad]
        found.reasons["frozen at the end"] += len(held) - len(mine)
        if not mine:
            continue
        compared = 0
        try:
            slopes = Slopes(module, root)
            params = [record.param for record in mine]
            gradients = torch.autograd.grad(slopes.number(grad=True), params, allow_unused=True)
            for record, gradient in zip(mine, gradients, strict=True):
                progress.tell(len(found.errors))
                if time.monotonic() > end:
                    raise Unrepeatable(f"it takes more than {SLOPE_SECONDS} s")
                compared += 1
                if gradient is None:
                    found.reasons["the last batch, run again, gives them no gradient"] += 1
                    continue
                compare_one(slopes, record, gradient.to_dense(), found)
        except (Unrepeatable, RuntimeError) as reason:
            found.reasons[str(reason).partition("\n")[0]] += len(mine) - compared
    return found


def compare_one(slopes, record, gradient, found):
    """Compare one gradient, and that of a block of its output features by itself if it has none."""
    where = torch.ones_like(record.param)
    for owner in record.owners:
        if getattr(owner, "padding_idx", None) is not None:  # its row has no gradient by design
            where[owner.padding_idx] = 0
    found.errors[record] = slopes.error(record.param, gradient, where)
    first, last = silent_block(record, gradient)
    if last == first:
        return
    where = torch.zeros_like(record.param)
    where.narrow(feature_axis(record), first, last - first).fill_(1)
    for stretch in (1, 10, 100):  # the keys of new weights hardly move the output
        error = slopes.error(record.param, gradient, where, stretch)
        if error is not None and error > SLOPE_ERROR:
            found.rows[record] = (first, last - 1)
            return


def silent_block(record, gradient):
    """Return (first, last + 1) of the longest block of output features without a gradient, now and in the steps.

    A short one may be dead units side by side.
    """
    if record.rows is None or gradient.dim() != 2:
        return 0, 0
    silent = ~record.rows & (gradient == 0).all(1 - feature_axis(record))
    blocks = [(0, 0)]
    for index, is_silent in enumerate(silent.tolist()):
        if is_silent:
            first = blocks[-1][0] if blocks[-1][1] == index else index
            blocks.append((first, index + 1))
    first, last = max(blocks, key=lambda block: block[1] - block[0])
    return (first, last) if last - first >= max(4, len(silent) // 8) else (0, 0)


def slope_findings(facts, rows):
    """Compare the gradients with differences; add a row to the report."""
    compared = compare_slopes(facts)
    known = {record: error for record, error in compared.errors.items() if error is not None}
    wrong = [record for record, error in known.items() if error > SLOPE_ERROR and record not in compared.rows]
    agree = [error for error in known.values() if error <= SLOPE_ERROR]
    facts.proven = len(agree) == len(facts.live)
    rows["slopes"] = f"{len(agree)} of {len(facts.of('trained'))} tensors as the output's"
    if agree:
        rows["slopes"] += f", within {max(agree):.2g}"
    if len(known) < len(compared.errors):
        number = len(compared.errors) - len(known)
        rows["slopes"] += f"; {number} without a verdict, because their differences don't agree"
    reasons = [f"{number} ({reason})" for reason, number in compared.reasons.items() if number]
    if reasons:
        rows["slopes"] += f"; not compared: {', '.join(reasons)}"
    worst = max((known[record] for record in wrong), default=0)
    text = f"the gradient is not the slope of the output (error up to {worst:.2g}), unless you meant to detach it"
    found = findings_on(facts, "wrong_slope", text, wrong, warning=True)
    blocks = [f"{record.name}: {first} to {last}" for record, (first, last) in compared.rows.items()]
    text = "rows of a packed weight have no gradient, although the output depends on them"
    return found + findings_on(facts, "lost_rows", text, list(compared.rows), *blocks)


# ------------------------------------------------------------ does a token see those after it?
def causal_findings(facts, rows):
    """Change the last token of each call and look at the outputs of earlier positions; add a row to the report."""
    asked = 0
    found = []
    for module, root in facts.watch.models.roots.items():
        for call in root.calls.values():
            try:
                moved = earlier_outputs_moved(Rerun(module, root), call)
            except Unrepeatable:
                continue
            asked += moved is not None
            if moved:
                text = f"not causal: the last token changes {moved} outputs of earlier positions"
                found.append(Finding("causal", text))
    rows["causal"] = f"{counted(asked, 'call')} asked"
    if not asked:
        facts.untested.append("causality: no call with integer tokens [B, T] and an output [B, T, ...] can be repeated")
    return found


def earlier_outputs_moved(rerun, call):
    """Return how many outputs before the last position change with the last token; None if this cannot be asked."""
    leaves, form = pytree.tree_flatten((call.args, call.kwargs))
    tokens = [item for item in leaves if is_tokens(item)]
    if not tokens:
        return None
    shape = tokens[0].shape
    changed = [with_last_token(item) if is_tokens(item) else item for item in leaves]
    args, kwargs = pytree.tree_unflatten(changed, form)
    runs = [rerun.run(each) for each in (call, call, dataclasses.replace(call, args=args, kwargs=kwargs))]
    of_positions = [[item.float() for item in tensors(output) if item.shape[:2] == shape] for output in runs]
    if not of_positions[0]:
        return None
    moved = 0
    for usual, again, new in zip(*of_positions, strict=True):
        noise = (again - usual).abs().max()
        moved += int(((new - usual)[:, :-1].abs() > 2 * noise + 1e-5 * usual.abs().max()).sum())
    return moved


def is_tokens(item):
    """Say whether an argument looks like tokens [B, T], not like a mask."""
    if not isinstance(item, torch.Tensor) or item.dim() != 2 or item.dtype not in (torch.int32, torch.int64):
        return False
    return item.shape[1] > 1 and item.unique().numel() > 2


def with_last_token(tokens):
    """Return tokens with another last one, which occurs elsewhere in the batch."""
    changed = tokens.clone()
    known = tokens.unique()
    places = torch.searchsorted(known, tokens[:, -1].contiguous())
    changed[:, -1] = known[(places + 1) % len(known)]
    return changed


# ------------------------------------------------------------ can the step be that fast?
@dataclasses.dataclass
class Peak:
    """Hold a GPU's dense peak in TFLOP/s by the bits of the operands, its bandwidth, last-level cache and source."""

    tflops: dict
    terabytes_per_second: float
    cache_megabytes: float
    source: str


# ---- GPUs: the same lines in common/formulas/gpus.py and check_training.py, which is one file by itself
@dataclasses.dataclass(frozen=True)
class Gpu:
    """Hold a board's dense peaks in TFLOP/s by precision, its bandwidth in TB/s, last-level cache in MB, and source.

    names: those that drivers give it besides its key. faster: TFLOP/s by the bits of an operand where emulation, or
    sums in 16 bits, exceed the peak of the precision.
    """

    tflops: dict
    tb_s: float
    cache_mb: float
    source: str
    names: tuple = ()
    faster: dict = dataclasses.field(default_factory=dict)


HOPPER = {"float8": 1978.9, "bfloat16": 989.4, "tf32": 494.7, "float32": 66.9}
HOPPER_NVL = {"float8": 1670.5, "bfloat16": 835.5, "tf32": 417.5, "float32": 60.0}
AMPERE = {"int8": 624.0, "bfloat16": 312.0, "tf32": 156.0, "float32": 19.5}
MI300X = {"float8": 2614.9, "bfloat16": 1307.4, "tf32": 653.7, "float32": 163.4}
MI250 = {"int8": 181.0, "bfloat16": 181.0, "float32": 45.3}

# Without sparsity: NVIDIA's documents print twice the dense rate for tensor cores. PyTorch sees each of the two dies of
# MI250 and MI250X as a GPU; the driver gives both boards one name, which here is the faster one. A precision for which
# a GPU has no units has no entry. MI350X and MI355X emulate TF32 with bfloat16.
GPUS = {
    "MI210": Gpu(MI250, 1.638, 8, "AMD Instinct MI210 accelerator data sheet"),
    "MI250": Gpu(MI250, 1.638, 8, "AMD Instinct MI250 accelerator data sheet"),
    "MI250X": Gpu(
        {"int8": 191.5, "bfloat16": 191.5, "float32": 47.9},
        *(1.638, 8, "AMD Instinct MI250X accelerator data sheet"),
        names=("MI250X / MI250",),
    ),
    "MI300A": Gpu(
        {"float8": 1961.2, "bfloat16": 980.6, "tf32": 490.3, "float32": 122.6},
        *(5.3, 256, "AMD Instinct MI300A APU data sheet"),
    ),
    "MI300X": Gpu(MI300X, 5.3, 256, "AMD Instinct MI300X accelerator data sheet"),
    "MI325X": Gpu(MI300X, 6.0, 256, "AMD Instinct MI325X accelerator data sheet"),
    "MI350X": Gpu(
        {"float8": 4613.7, "bfloat16": 2306.9, "float32": 144.2},
        *(8.0, 256, "AMD CDNA 4 architecture white paper, at the 2.2 GHz of MI350X"),
        faster={32: 2306.9},
    ),
    "MI355X": Gpu(
        {"float8": 5033.2, "bfloat16": 2516.6, "float32": 157.3},
        *(8.0, 256, "AMD Instinct MI355X GPU data sheet"),
        faster={32: 2516.6},
    ),
    "A100": Gpu(AMPERE, 2.039, 40, "NVIDIA A100 Tensor Core GPU data sheet", names=("A100-SXM4-80GB",)),
    "A100 80GB PCIe": Gpu(AMPERE, 1.935, 40, "NVIDIA A100 Tensor Core GPU data sheet"),
    "A100 40GB": Gpu(
        AMPERE, 1.555, 40, "NVIDIA A100 Tensor Core GPU data sheet", names=("A100-SXM4-40GB", "A100-PCIE-40GB")
    ),
    "H100": Gpu(HOPPER, 3.35, 50, "NVIDIA H100 Tensor Core GPU data sheet", names=("H100 80GB HBM3",)),
    "H100 NVL": Gpu(HOPPER_NVL, 3.9, 50, "NVIDIA H100 Tensor Core GPU data sheet"),
    "H200": Gpu(HOPPER, 4.8, 50, "NVIDIA H200 Tensor Core GPU data sheet"),
    "H200 NVL": Gpu(HOPPER_NVL, 4.8, 50, "NVIDIA H200 Tensor Core GPU data sheet"),
    "GH200": Gpu(HOPPER, 4.0, 50, "NVIDIA GH200 Grace Hopper Superchip data sheet", names=("GH200 480GB",)),
    "GH200 144GB": Gpu(HOPPER, 4.9, 50, "NVIDIA GH200 Grace Hopper Superchip data sheet", names=("GH200 144G HBM3e",)),
    "B200": Gpu(
        {"float8": 4500.0, "bfloat16": 2250.0, "tf32": 1125.0, "float32": 75.0},
        *(8.0, 126, "NVIDIA HGX B200 data sheet"),
    ),
    "L40S": Gpu(
        {"float8": 733.0, "bfloat16": 362.05, "tf32": 183.0, "float32": 91.6},
        *(0.864, 96, "NVIDIA L40S GPU data sheet"),
        faster={16: 366.5},
    ),
    "RTX 4090": Gpu(
        {"float8": 330.3, "int8": 660.6, "bfloat16": 165.2, "tf32": 82.6, "float32": 82.6},
        *(1.008, 72, "NVIDIA Ada GPU architecture white paper"),
        faster={16: 330.3},
    ),
    "RTX 5090": Gpu(
        {"float8": 419.0, "int8": 838.0, "bfloat16": 209.5, "tf32": 104.8, "float32": 104.8},
        *(1.792, 96, "NVIDIA RTX Blackwell GPU architecture white paper"),
        faster={16: 419.0},
    ),
    "RX 7900 XT": Gpu(
        {"int8": 103.0, "bfloat16": 103.0, "float32": 51.6}, 0.8, 80, "AMD Radeon RX 7900 XT specifications"
    ),
    "RX 7900 XTX": Gpu(
        {"int8": 122.8, "bfloat16": 122.8, "float32": 61.4}, 0.96, 96, "AMD Radeon RX 7900 XTX specifications"
    ),
    "PRO W7900": Gpu(
        {"int8": 122.6, "bfloat16": 122.6, "float32": 61.3}, 0.864, 96, "AMD Radeon PRO W7900 specifications"
    ),
    "RX 9070 XT": Gpu(
        {"float8": 389.0, "bfloat16": 195.0, "float32": 48.7}, 0.64, 64, "AMD Radeon RX 9070 XT specifications"
    ),
}


def letters_of(name):
    """Return a board's name without its vendor, family and spelling: "AMD Instinct MI300X VF" is "mi300x"."""
    name = re.sub(r"\((TM|R)\)|\b(NVIDIA|AMD|Instinct|GeForce|Radeon)\b| VF$", "", name, flags=re.IGNORECASE)
    return re.sub("[^a-z0-9]", "", name.lower())


def gpu_named(device_name):
    """Return the key in GPUS of the board with this whole name, or None: "GH200 480GB" is no "H200"."""
    wanted = letters_of(device_name)
    return next((key for key, gpu in GPUS.items() if wanted in map(letters_of, (key, *gpu.names))), None)


# ---- end of the lines about GPUs


def peak_of(device):
    """Return the peak of a known GPU, else None.

    32 bits: TF32 where there is any; 8 bits: the faster one of FP8 and INT8.
    """
    name = gpu_named(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    if name is None:
        return None
    gpu = GPUS[name]
    rates = gpu.tflops
    eight = max(rates.get(precision, 0) for precision in ("float8", "int8"))
    tflops = {32: rates.get("tf32", rates["float32"]), 16: rates["bfloat16"], 8: eight} | gpu.faster
    return Peak(tflops, gpu.tb_s, gpu.cache_mb, gpu.source)


@dataclasses.dataclass
class Work:
    """Hold what a sound step must do at least."""

    flops: float
    bits: int  # of the narrowest floating dtype seen
    bytes: float  # of weights, gradients and optimizer state


class Widths(TorchDispatchMode):
    """Collect the element sizes of all floating tensors, and int8, that operators read or write."""

    supports_higher_order_operators = True  # wrap_triton launches a kernel as one

    def __init__(self):
        super().__init__()
        self.sizes = set()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        output = operator(*args, **(kwargs or {}))
        for item in tensors((args, kwargs or {}, output)):
            if item.is_floating_point() or item.dtype == torch.int8:
                self.sizes.add(item.element_size())
        return output


def work_of(facts):
    """Count the work of a step: the matmuls of forward and backward, and the bytes of weights, gradients and state."""
    if not facts.watch.models.roots:
        raise Unrepeatable("no module was seen to run")
    flops = 0.0
    widths = Widths()
    for module, root in facts.watch.models.roots.items():
        for call in root.calls.values():
            with FlopCounterMode(display=False, custom_mapping=ATTENTION) as counter, widths:
                Rerun(module, root).run(call)
            forward = matmul_flops(counter.get_flop_counts().get("Global", {}))
            backwards = min(call.count, max(call.reached.values(), default=0)) if call.attached else call.count
            flops += forward * (call.count + (passes(facts, call) - 1) * backwards) / len(facts.watch.steps)
    states = [list(optimizer.state.values()) for optimizer in facts.watch.optimizers.known]
    weights = [record.param for record in facts.live if id(record.param) in facts.stepped]
    # A gradient is as large as its parameter; a parameter that lost its gradient should have one.
    size = sum(plain(tensor).numel() * tensor.element_size() for tensor in [*tensors(states), *weights, *weights])
    widths.sizes.update(weight.element_size() for weight in weights)
    return Work(flops, 8 * min(widths.sizes, default=4), size)


def attention_flops(query, key, value, *_, **__):
    """Count q kᵀ and p v for shapes [B, H, T, D]; PyTorch's count refuses fewer key heads than query heads."""
    B, H, T, D = query
    S = key[-2]
    return 2 * B * H * T * S * (D + value[-1])


KERNELS_OF_ATTENTION = ("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention")
ATTENTION = {getattr(torch.ops.aten, f"_scaled_dot_product_{name}"): attention_flops for name in KERNELS_OF_ATTENTION}


def matmul_flops(counts):
    """Add up the FLOPs by operator. A causal kernel does half of what PyTorch counts for attention."""
    return sum(flops / 2 if "attention" in str(operator) else flops for operator, flops in counts.items())


def passes(facts, call):
    """Return how many times the forward's FLOPs a step needs at least.

    Two gradients follow each matmul. The first layer needs no gradient of a floating input, and a frozen or unused
    weight may need none at all.
    """
    if facts.of("frozen", "unused", "unknown", "not_seen", "not_reached", "not_run", "idle"):
        return 1
    if any(item.is_floating_point() for item in tensors((call.args, call.kwargs))):
        return 2
    return 3


def floor(work, peak):
    """Return the seconds below which no GPU with this peak does the work, and the arithmetic."""
    width = max((bits for bits in peak.tflops if bits <= work.bits), default=None)
    if width is None:
        return 0.0, f"no peak is known for {work.bits} bits"
    compute = work.flops / (peak.tflops[width] * 1e12)
    moved = 2 * max(0.0, work.bytes - peak.cache_megabytes * 1e6)  # read and written once; a cache may hold its size
    memory = moved / (peak.terabytes_per_second * 1e12)
    text = f"{work.flops / 1e12:.4g} TFLOP / {peak.tflops[width]:g} TFLOP/s ({width} bits) = {1e3 * compute:.4g} ms; "
    text += f"{moved / 1e9:.4g} GB / {peak.terabytes_per_second:g} TB/s = {1e3 * memory:.4g} ms"
    return max(compute, memory), text


def time_row(timed):
    """Describe the median times of a step and of its phases."""
    medians = {}
    for phase in ("forward", "no_grad", "backward", "optimizer", "other"):
        if any(phase in step.seconds for step in timed):
            medians[phase] = statistics.median(step.seconds.get(phase, 0.0) for step in timed)
    whole = statistics.median(sum(step.seconds.values()) for step in timed)
    text = f"{1e3 * whole:.4g} ms: " + ", ".join(f"{phase} {1e3 * s:.3g}" for phase, s in medians.items())
    micro = statistics.median(step.backwards for step in timed)
    return text + (f"; {micro:g} backward passes" if micro > 1 else "")


def speed_findings(facts, peak, rows):
    """Hold the time of a step against the work that it must do; add rows to the report."""
    timed = facts.watch.steps[LOOK:]
    if not timed:
        rows["step"] = f"not timed: needs more than {LOOK} steps"
        return []
    rows["step"] = time_row(timed)
    found = fast_backward(facts, timed)
    try:
        work = work_of(facts)
    except Unrepeatable as reason:
        rows["work"] = f"not counted: the last batch cannot be run again ({reason})"
        return found
    seconds = statistics.mean(sum(step.seconds.values()) for step in timed)  # as the work is a mean over the steps
    rows["work"] = f"at least {work.flops / 1e9:.4g} GFLOP, so {work.flops / seconds / 1e9:.4g} GFLOP/s"
    if peak is None:
        rows["floor"] = "not checked: this device's peak is not known (give one with --peak)"
        return found
    least, arithmetic = floor(work, peak)
    rows["floor"] = f"{1e3 * least:.4g} ms: {arithmetic}"
    if seconds < least / MARGIN:
        text = f"IMPOSSIBLE: a step takes {1e3 * seconds:.4g} ms, and its work needs {1e3 * least:.4g} ms or more"
        found.append(Finding("impossible", text, details=[arithmetic, f"peak: {peak.source}"]))
    return found


def fast_backward(facts, timed):
    """Return the warning on a backward that is much faster than its forward."""
    forward = min(step.seconds.get("forward", 0.0) for step in timed)
    backward = min(step.seconds.get("backward", 0.0) for step in timed)
    calls = sum(call.count for root in facts.watch.models.roots.values() for call in root.calls.values())
    backwards = sum(step.backwards for step in facts.watch.steps)
    if len(facts.watch.models.roots) > 1 or calls > backwards or not 0 < backward < forward / 4:
        return []
    if facts.of("frozen"):  # no gradient of such weights is computed
        return []
    text = f"backward takes {backward / forward:.2g} of forward's time, with all that the script does between them; "
    text += "about twice is usual"
    return [Finding("fast_backward", text, warning=True)]


# ------------------------------------------------------------ the whole judgement
def assess(watch, peak=None, slopes=True, causal=False):
    """Return the report's rows, the findings and what could not be observed."""
    facts = Facts(watch)
    rows = describe(facts)
    device = facts.live[0].param.device if facts.live else torch.device("cpu")
    found = [
        *fate_findings(facts),
        *gradient_findings(facts),
        *change_findings(facts),
        *mistakes_in_the_model(facts),
        *run_findings(watch),
        *rate_findings(watch, rows),
        *loss_findings(watch, rows),
        *speed_findings(facts, peak or peak_of(device), rows),
    ]
    if any(finding.kind == "unchanged" for finding in found):  # which gives the learning rates
        found = [finding for finding in found if finding.kind != "learning_rate"]
    if slopes:
        found += slope_findings(facts, rows)
        if facts.proven:  # then no work is missing from a fast backward
            found = [finding for finding in found if finding.kind != "fast_backward"]
    else:
        rows["slopes"] = "not compared (--no-slopes)"
    if causal:
        found += causal_findings(facts, rows)
    return rows, found, facts.untested


# ------------------------------------------------------------ several processes
def weights_of_ddp(watch):
    """Return {name: (bit sum at the start, bit sum now)} of the parameters that DDP keeps equal in all processes."""
    world = torch.distributed.get_world_size()
    models = existing(nn.parallel.DistributedDataParallel)
    kept = ids_of(*(model for model in models if model.process_group.size() == world))
    records = [record for key, record in watch.records.items() if key in kept and record.start is not None]
    now = bit_sums([record.param for record in records])
    return {record.name: (record.start, value) for record, value in zip(records, now, strict=True)}


def apart_findings(weights):
    """Return the finding on parameters that were equal in all processes, given weights_of_ddp() of each."""
    apart = []
    for name in weights[0]:
        values = [others.get(name) for others in weights]
        if None not in values and len({start for start, _ in values}) == 1 and len(set(values)) > 1:
            apart.append(name)
    text = f"equal in all processes at the start, but no longer: {counted(len(apart), 'tensor')}"
    details = [folded(apart), "their gradients are not averaged, as if DDP's .module were called"]
    return [Finding("apart", text, apart, details)] if apart else []


def everywhere(watch, findings):
    """Add the findings of the other processes of a launch, and those on all together. Collective."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return findings
    gathered = [None for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather_object(gathered, (findings, weights_of_ddp(watch)))
    findings += apart_findings([weights for _, weights in gathered])
    known = {(finding.kind, tuple(finding.tensors)) for finding in findings}
    for rank, (others, _) in enumerate(gathered):
        for finding in others:
            key = (finding.kind, tuple(finding.tensors))
            if key not in known:
                known.add(key)
                finding.text = f"rank {rank}: {finding.text}"
                findings.append(finding)
    return findings


# ====================================================================================================================
# Part 3: print
# ====================================================================================================================


# ------------------------------------------------------------ names
def clean(name):
    """Strip what wrappers add to a name."""
    return re.sub(r"\b(_orig_mod|_forward_module)\.|^module\.", "", name)


def folded(names, most=5):
    """Shorten a list of names: layers.0.w and layers.1.w become layers.*.w (x2)."""
    groups = collections.defaultdict(list)
    for name in names:
        groups[re.sub(r"(^|\.| )\d+(?=\.| |$)", r"\1*", name)].append(name)
    shown = [f"{key} (x{len(group)})" if len(group) > 1 else group[0] for key, group in groups.items()]
    more = f" and {len(shown) - most} more" if len(shown) > most else ""
    return ", ".join(shown[:most]) + more


def short(records):
    """Return the names of parameters, in short."""
    return folded([record.name for record in records])


def with_classes(modules, names):
    """Return the modules' names and classes."""
    classes = ", ".join(sorted({type(module).__name__ for module in modules}))
    return f"{folded([names.get(module) or 'the model' for module in modules])} ({classes})"


# ------------------------------------------------------------ report
def describe(facts):
    """Return the report's rows on parameters, gradients, optimizers and loss."""
    watch = facts.watch
    size = sum(record.param.numel() for record in facts.live)
    rows = {"parameters": f"{counted(len(facts.live), 'tensor')} to train, {counted(size, 'element')}"}
    frozen = facts.of("frozen")
    if frozen:
        rows["frozen"] = f"{counted(len(frozen), 'tensor')}: {short(frozen)}"
    places = [list(dict.fromkeys(record.owners.values())) for record in facts.live]
    tied = [" = ".join(names) for names in places if len(names) > 1]
    if tied:
        rows["tied"] = folded(tied)
    trained = [record for record in facts.live if record.trained]
    percent = 100 * sum(record.param.numel() for record in trained) / max(1, size)
    rows["gradient"] = f"{len(trained)} of {len(facts.live)} tensors, {percent:.4g} % of the elements"
    kinds = ", ".join(sorted({type(optimizer).__name__ for optimizer in watch.optimizers.known}))
    stepped = [record for record in facts.live if id(record.param) in facts.stepped]
    rows["optimizer"] = (
        f"{kinds}: {counted(len(stepped), 'tensor')}, {sum(record.changed for record in stepped)} changed"
    )
    between = [record for record in stepped if record.changed_between and not record.put_back]
    if between:
        rows["optimizer"] += f"; {len(between)} change between its steps too: {short(between)}"
    if facts.old:
        rows["optimizer"] += f"; {len(facts.old)} more that the loss does not use"
    if watch.optimizers.skipped:
        rows["optimizer"] += f"; the gradient scaler skipped {counted(watch.optimizers.skipped, 'step')}"
    losses = losses_of(watch)
    rows["loss"] = f"{losses[0]:.4f} -> {losses[-1]:.4f}" if losses else "not seen"
    if watch.hidden.scaled:
        rows["loss"] += " (may be scaled)"
    rows |= rows_on_kept(facts)
    if watch.hidden.has_compiled():
        rows["compiled"] = "yes: hooks may change what the compiler fuses, and with it the last digits"
    return rows


class Stream:
    """Write to where a standard stream led before the script began, whatever the script does to it."""

    def __init__(self, stream):
        self.stream = stream
        self.file = None
        with contextlib.suppress(OSError, ValueError):  # a test's stream is no file
            copy = os.dup(stream.fileno())
            self.stream = os.fdopen(copy, "w", encoding=stream.encoding, errors="backslashreplace")
            self.file = os.fstat(copy)

    def write(self, text):
        """Write a text whole; say whether that was possible."""
        try:
            if self.file and not os.path.samestat(os.fstat(self.stream.fileno()), self.file):
                return False  # the script closed all descriptors, and opened others
            self.stream.write(text)
            self.stream.flush()
        except (OSError, ValueError):
            return False
        return True

    def close(self):
        """Close our own copy."""
        if self.file:
            with contextlib.suppress(OSError):
                self.stream.close()


class Terminal:
    """Hold the standard streams; where both are gone, write to a file in the temporary folder."""

    def __init__(self):
        self.out = Stream(sys.stdout)
        self.err = Stream(sys.stderr)
        self.path = None

    def write(self, text, error=False):
        """Write a text to standard output, or to standard error."""
        flushed(sys.stdout)  # what the script printed comes first
        streams = (self.err, self.out) if error else (self.out, self.err)
        if self.path is None and any(stream.write(text) for stream in streams):
            return
        if self.path is None:
            handle, self.path = tempfile.mkstemp(prefix="check_training_", suffix=".txt")
            os.close(handle)
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(text)

    def close(self):
        """Close our copies of the streams."""
        self.out.close()
        self.err.close()


def flushed(stream):
    """Flush a stream; say whether that was possible. A script may have closed it, or put another object there."""
    try:
        stream.flush()
    except (OSError, ValueError, AttributeError):
        return False
    return True


terminal = None  # main() takes hold of the streams


def counted_words(counts):
    """Return texts on {(title, word): number}."""
    return [f"{title}: {number} {word}" for (title, word), number in counts.items()]


def rows_on_kept(facts):
    """Return rows on what has no gradient: did it stay, did it move, or does it equal a tensor that trains?"""
    holders = holders_of(facts.watch.models.alive)
    trained = [record.param for record in facts.live]
    learned = set(zip([param.shape for param in trained], bit_sums(trained), strict=True))
    counts = {"buffers": collections.Counter(), "others": collections.Counter()}
    kept = [(item, item.tensor) for item in facts.watch.models.kept]
    kept = [(item, tensor) for item, tensor in kept if tensor is not None and id(tensor) not in ids(facts.live)]
    for (item, tensor), total in zip(kept, bit_sums([tensor for _, tensor in kept]), strict=True):
        top = item.module
        seen = set()
        while top in holders and top not in seen:
            seen.add(top)
            top = holders[top]
        title = facts.watch.models.own_names.get(top, type(top).__name__)
        word = "moved"
        if item.name in item.module._buffers:
            word = "unchanged" if total == item.total else word
            counts["buffers"][title, word] += 1
            continue
        if (tensor.shape, total) in learned:
            word = "equal to what trains"
        elif total == item.total:
            word = "unchanged"
        counts["others"][title, word] += 1
    texts = {name: counted_words(found) for name, found in counts.items()}
    steps = len(facts.watch.steps)
    rows = {}
    if texts["others"]:
        rows["others"] = f"parameters without a gradient, after {steps} steps: {listed(texts['others'])}"
    if texts["buffers"]:
        rows["buffers"] = f"after {steps} steps: {listed(texts['buffers'])}"
    return rows


def say(text="", error=False):
    """Print the text with an escape for each control character: names come from files, and a terminal obeys them."""
    letters = (c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)
    (terminal or Terminal()).write("".join(letters) + "\n", error)


def print_report(title, rows, findings, verdict):
    """Print the report."""
    say(f"\ncheck_training: {title}\n")
    for name, text in rows.items():
        say(f"{name:<12}{text}")
    say()
    for finding in sorted(findings, key=lambda finding: (finding.warning, finding.note)):
        label = "FINDING"
        if finding.warning:
            label = "warning"
        if finding.note:
            label = "note"
        say(f"{label:<12}{finding.text}")
        for line in finding.details:
            say(f"{'':<12}{line}")
        if finding.next:
            say(f"{'':<12}next: {finding.next}")
    say(f"{'verdict':<12}{verdict}")


STRICT = {  # name: kinds of warnings that mean lost work
    "unused": ("unused", "not_run", "not_reached"),
    "frozen_between": ("frozen_between",),
    "same_input": ("same_input",),
    "wrong_slope": ("wrong_slope",),
    "frozen": ("frozen_held", "zero_frozen"),
    "copied_tie": ("copied_tie",),
    "learning_rate": ("learning_rate", "too_small"),
    "waiting": ("waiting",),
}
CAN_BE_ACCEPTED = sorted(NEXT)


def number_of(things, name):
    """Return a number and a name, in the plural if there are several."""
    return f"{len(things)} {name}{'S' if len(things) > 1 else ''}"


def accept(options, findings, rows):
    """Return the findings that are not accepted; add a row on those that are."""
    left = []
    texts = {}
    for finding in findings:
        fits = [one for one in options.accept if not finding.warning and one.fits(finding)]
        if not fits:
            left.append(finding)
        for one in fits[:1]:
            texts[f"{one.name}{': ' * bool(one.reason)}{one.reason}"] = None
            one.seen = True
    absent = [one.name for one in options.accept if not one.seen]
    if absent:
        texts[f"not seen: {', '.join(absent)}"] = None
    if texts:
        rows["accepted"] = "; ".join(texts)
    return left


def is_note(finding):
    """Say whether honest scripts get a warning too; a norm after it cancels a bias, which is left with a rounding."""
    biases = finding.kind == "too_small" and all(name.endswith("bias") for name in finding.tensors)
    return finding.kind in NOTES or biases


def report(options, watch, rows, findings, failure, untested, interrupted=False):
    """Print and write the report; return the exit status."""
    strict = {kind for name in options.strict for kind in STRICT[name]}
    for finding in findings:
        if finding.kind in strict:
            finding.warning = False
        finding.note = finding.warning and is_note(finding)
    findings = accept(options, findings, rows)
    faults = [finding for finding in findings if not finding.warning]
    findings += [Finding("untested", reason, warning=True) for reason in untested]
    if len(watch.steps) < options.steps:
        text = f"the script ended after {len(watch.steps)} of {options.steps} steps"
        findings.append(Finding("ended_early", text, warning=True))
    warned = [finding for finding in findings if finding.warning and not finding.note]
    if failure:
        status = 2
        verdict = f"NOT OBSERVED: {failure}"
    elif faults:
        status = 1
        verdict = number_of(faults, "FINDING") + f" ({', '.join(dict.fromkeys(fault.kind for fault in faults))})"
    elif untested:
        status = 2
        verdict = "NOT OBSERVED: see the warnings"
    else:
        status = 0
        verdict = "no finding" if HARMLESS & {finding.kind for finding in findings} else "every parameter trains"
    if warned and status < 2:
        verdict += f", {number_of(warned, 'WARNING')}"
    if interrupted:
        status = 130
        verdict = f"interrupted after {len(watch.steps)} of {options.steps} steps; until then: {verdict}"
    name = os.path.basename(options.command[0]).replace("\n", "\\n")
    title = f"{name}, {counted(len(watch.steps), 'step')}"
    print_report(title, rows, findings, verdict)
    if options.json:
        content = {"workshop": WORKSHOP, "command": options.command, "steps": len(watch.steps)}
        content |= {"status": status, "verdict": verdict}
        content |= {"rows": rows}
        content["findings"] = [dataclasses.asdict(finding) | {"next": finding.next} for finding in findings]
        text = json.dumps(content, indent=1)
        try:
            with open(options.json, "w", encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            say(f"check_training: --json {options.json} cannot be written: {error.strerror}", error=True)
            return max(status, 2)
    return status


# ------------------------------------------------------------ main
class BadInput(Exception):
    """Say what is wrong with the command."""


def script_of(command):
    """Return the script's arguments and the function that runs it."""
    if not command:
        raise BadInput("name a script: check_training.py -- train.py --its --options")
    name = command[0]
    if name == "-m":
        if len(command) < 2:
            raise BadInput("name a module after -m")
        return command[1:], functools.partial(runpy.run_module, alter_sys=True)
    if re.fullmatch(r"python[\d.]*|torchrun|accelerate|bash|sh|srun|mpirun", os.path.basename(name)):
        raise BadInput(
            f"{name} is a program: name the Python script itself, and put launchers before check_training.py"
        )
    if not os.path.isfile(name):
        raise BadInput(f"{name} does not exist")
    if not name.endswith(".py"):
        raise BadInput(f"{name} isn't a Python script: its name must end with .py")
    return command, runpy.run_path


def words_on_exit(code):
    """Say with which status sys.exit(code) ended the script; None if with 0."""
    if code in (None, 0):
        return None
    if isinstance(code, int):
        return f"ended with status {code}"
    return f"ended with status 1: {str(code).partition(chr(10))[0]}"


def is_own(kind):
    """Say whether the user wrote a class."""
    file = getattr(sys.modules.get(kind.__module__), "__file__", None) or ""
    return kind.__module__ == "__main__" or bool(file and file != __file__ and not LIBRARIES.search(file))


def names_in(spaces):
    """Return {module: the script's own name of it}, given dictionaries of its variables; the first name counts."""
    names = {}
    for space in spaces:
        for name, value in list(space.items()):
            inside = {}
            if issubclass(type(value), (list, tuple)):
                inside = {f"{name}.{number}": item for number, item in enumerate(value)}
            elif issubclass(type(value), dict):
                inside = {f"{name}.{key}": item for key, item in value.items()}
            elif is_own(type(value)):  # such as an agent
                inside = getattr(value, "__dict__", {})
            for title, item in ((name, value), *inside.items()):
                if issubclass(type(item), nn.Module) and item not in names:
                    names[item] = f"{name}.{title}" if title in names.values() else title
    return names


def variables_of(error):
    """Return the variables of the functions that an error went through: of the user's, then of a library's trainer."""
    users, libraries = [], []
    for frame, _ in traceback.walk_tb(error.__traceback__):
        file = frame.f_code.co_filename
        if LIBRARIES.search(file):
            libraries.append(getattr(frame.f_locals.get("self"), "__dict__", {}))
        elif file != __file__:
            users += [frame.f_locals, frame.f_globals]
    return users + libraries


def run_script(watcher, command):
    """Run the script under the hooks; return a sentence on how it failed, or None."""
    arguments, run = script_of(command)
    sys.argv = arguments
    sys.path[0] = os.getcwd() if command[0] == "-m" else os.path.dirname(os.path.realpath(arguments[0]))
    script = arguments[0] if command[0] == "-m" else os.path.abspath(arguments[0])  # as Python sets __file__
    with signals_put_back(), hooked(watcher), ended_by_exception():
        try:
            watcher.keep_names([run(script, run_name="__main__")])
        except SystemExit as end:
            watcher.keep_names(variables_of(end))
            words = words_on_exit(end.code)
            return f"{watcher.subject}{words}" if words else None
        except KeyboardInterrupt as error:
            watcher.interrupted = True
            watcher.keep_names(variables_of(error))
            return f"{watcher.subject}was interrupted"
        except Exception as error:
            return watcher.failed(error)
    return None


@contextlib.contextmanager
def signals_put_back():
    """Put back the handlers of signals at the end, and stop timers that would send one or end the process."""
    before = {number: signal.getsignal(number) for number in signal.valid_signals()}
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        if hasattr(signal, "setitimer"):
            for timer in (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF):
                signal.setitimer(timer, 0)
        for number, handler in before.items():
            if handler is not None and signal.getsignal(number) != handler:
                signal.signal(number, handler)


@contextlib.contextmanager
def interrupted_by_sigterm():
    """Let SIGTERM in this process do what Ctrl-C does, unless somebody handles it: schedulers send it at the end."""
    process = os.getpid()

    def interrupt(number, _):
        if os.getpid() != process:  # a fork, such as a worker that is no longer needed
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@dataclasses.dataclass
class Accepted:
    """Hold a kind of finding that is meant, for all tensors or lines that match, and the reason."""

    kind: str
    pattern: str = "*"
    reason: str = ""
    seen: bool = False

    @property
    def name(self):
        """Return it as it is written after --accept."""
        return self.kind if self.pattern == "*" else f"{self.kind}={self.pattern}"

    def fits(self, finding):
        """Say whether it accepts a finding, with all that the finding names."""
        names = finding.tensors or [""]
        return finding.kind == self.kind and all(fnmatch.fnmatchcase(name, self.pattern) for name in names)


def accepted(text):
    """Convert NAME or NAME=PATTERN."""
    kind, _, pattern = text.partition("=")
    if kind not in CAN_BE_ACCEPTED:
        nearest = difflib.get_close_matches(kind, CAN_BE_ACCEPTED, 1)
        hint = "".join(f"; did you mean {name}?" for name in nearest)
        raise argparse.ArgumentTypeError(f"{kind!r} is no kind of finding: the verdict names it in brackets{hint}")
    return Accepted(kind, pattern or "*")


def accepted_in(path):
    """Return what a file accepts: a line NAME or NAME=PATTERN each, then # and the reason."""
    found = []
    try:
        with open(path, encoding="utf-8") as file:
            lines = file.read().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise argparse.ArgumentTypeError(f"{path} can't be read: {error}") from None
    for number, line in enumerate(lines, 1):
        text, _, reason = (part.strip() for part in line.partition("#"))
        if not text:
            continue
        if not reason:
            raise argparse.ArgumentTypeError(f"{path}, line {number} gives no reason: write {text}  # why")
        try:
            found.append(dataclasses.replace(accepted(text), reason=reason))
        except argparse.ArgumentTypeError as error:
            raise argparse.ArgumentTypeError(f"{path}, line {number}: {error}") from None
    return found


def strict_names(text):
    """Return the names after --strict."""
    names = text.split(",")
    unknown = [name for name in names if name not in STRICT]
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} isn't one of {', '.join(STRICT)}; write -- before the script")
    return names


def parse(argv):
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8, help="optimizer steps to watch (default: 8)")
    parser.add_argument("--go-on", action="store_true", help="let the script run to its end, and watch all steps")
    parser.add_argument("--json", metavar="FILE", help="write the report to this file too")
    parser.add_argument(
        "--peak", metavar="TFLOPS,TB/S", help="this device's peak at the narrowest dtype, and bandwidth"
    )
    parser.add_argument(
        "--strict",
        metavar="NAME,...",
        nargs="?",
        type=strict_names,
        const=list(STRICT),
        default=[],
        help=f"count these warnings as findings; without a name, all of {', '.join(STRICT)}",
    )
    words = "don't count this kind of finding if all its tensors or lines match the pattern; may be given several times"
    parser.add_argument("--accept", metavar="NAME[=PATTERN]", action="append", type=accepted, default=[], help=words)
    words = "accept what each line of this file names: NAME=PATTERN  # reason"
    parser.add_argument("--accept-file", metavar="FILE", type=accepted_in, default=[], help=words)
    parser.add_argument(
        "--no-slopes",
        action="store_true",
        help=f"don't compare gradients with finite differences; saves up to {SLOPE_SECONDS} s",
    )
    parser.add_argument("--causal", action="store_true", help="check that the last token changes no earlier output")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- SCRIPT [ARGUMENTS]", help="or: -- -m MODULE")
    options, unknown = parser.parse_known_args(argv)
    if unknown:
        nearest = difflib.get_close_matches(unknown[0], parser._option_string_actions, 1)
        hint = "".join(f"; did you mean {name}?" for name in nearest)
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    options.accept = [*options.accept, *options.accept_file]
    if options.steps < 1:
        parser.error(f"--steps must be at least 1, got {options.steps}")
    if options.peak:
        try:
            tflops, bandwidth = map(float, options.peak.split(","))
        except ValueError:
            parser.error(f"--peak must be two numbers such as 989,4.8, got {options.peak}")
        options.peak = Peak(dict.fromkeys((8, 16, 32, 64), tflops), bandwidth, 0, "--peak")
    if options.command[:1] == ["--"]:
        options.command = options.command[1:]
    if options.json:
        check_file(parser, options)
        options.json = os.path.abspath(options.json)  # the script may change its folder
    return options


def check_file(parser, options):
    """End with one line where the report's file cannot be written, or is one of the command's."""
    name = options.json
    if not os.path.isdir(os.path.dirname(os.path.abspath(name))):
        parser.error(f"--json {name}: its folder does not exist")
    if not os.path.isfile(name):
        return
    if any(os.path.isfile(word) and os.path.samefile(word, name) for word in options.command):
        parser.error(f"--json {name} is a file that the command uses: choose another name")
    if not (os.stat(name).st_mode & 0o222 and os.access(name, os.W_OK)):  # root could write it all the same
        parser.error(f"--json {name} is write-protected: name another file")


def main(argv=None):
    """Check the script that the command line names, and return the exit status."""
    global terminal
    options = parse(argv)
    terminal = Terminal()
    try:
        return run_and_judge(options)
    finally:
        terminal.close()
        terminal = None


def run_and_judge(options):
    """Run the script, print the report, and return the exit status."""
    watch = Watch(options.steps, options.go_on)
    watch.finish = functools.partial(finish, options, watch, os._exit)
    try:
        with interrupted_by_sigterm():
            failure = run_script(watch, options.command)
    except BadInput as error:
        failure = str(error)
    if not watch.steps and failure is None:
        failure = "no torch.optim optimizer stepped in this process"
        if watch.backwards >= BACKWARDS:
            failure += f" in {watch.backwards} backward passes"
        if watch.hidden.captured:
            failure += ": the step is in a GPU graph, so switch graphs off"
        elif watch.hidden.elsewhere:
            failure += "'s main thread, and what other threads do is not watched"
        elif watch.hidden.has_compiled():
            failure += " outside compiled code"
        elif bad := [record for record in watch.records.values() if record.overflows]:
            failure += f": NaN or infinity in all gradients of {short(bad)}, and a gradient scaler skips such steps"
            failure += f"; {NEXT['not_finite']}"
        elif watch.backwards:
            failure += ": updates by hand can't be watched"
        else:
            failure += ": give the command that trains, and start several processes with torchrun"
    rank = os.environ.get("RANK", "0")
    if not watch.steps or (failure and rank != "0"):
        say(f"check_training: {failure}", error=True)
        return 130 if watch.interrupted else 2
    try:
        return conclude(options, watch, failure)
    except KeyboardInterrupt:
        say("check_training: interrupted before its report was complete", error=True)
        return 130


def conclude(options, watch, failure=None):
    """Judge and report; return the exit status."""
    rank = os.environ.get("RANK", "0")
    slopes = not options.no_slopes and not watch.interrupted  # who interrupts does not want to wait
    rows, findings, untested = assess(watch, options.peak, slopes, options.causal)
    if failure is None:
        findings = everywhere(watch, findings)
    if rank != "0":  # one report: process 0 prints it and has the status
        return 0
    if watch.interrupted:
        failure = None
    return report(options, watch, rows, findings, failure, untested, watch.interrupted)


def finish(options, watch, leave):
    """Report from inside the script, and end the process."""
    with torch.enable_grad():
        status = conclude(options, watch)
    for stream in (sys.stdout, sys.stderr):
        flushed(stream)
    leave(status)


def end(status):
    """End this process. Where a script was stopped among several processes or threads, leave out the interpreter's end.

    Gloo's threads, which DDP keeps after the process group is destroyed, may still hold a tensor of the last
    collective. They abort the process if they let go of it while the interpreter ends. And the interpreter would wait
    for a script's threads, which may wait for the script.
    """
    others = [thread for thread in threading.enumerate() if thread is not threading.main_thread()]
    waits = any(not thread.daemon for thread in others)
    out, err = flushed(sys.stdout), flushed(sys.stderr)
    closed = not (out and err)  # then Python would end with status 120
    if waits or closed or (torch.distributed.is_available() and torch.distributed.is_initialized()):
        os._exit(status)
    sys.exit(status)


if __name__ == "__main__":
    end(main())
