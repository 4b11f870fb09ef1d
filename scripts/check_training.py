"""Check any PyTorch training script: does every parameter train, and can the step be that fast?

    python check_training.py -- train.py --its --options
    torchrun --nproc-per-node 2 check_training.py -- train.py --its --options

The script runs unchanged and computes the same numbers. Hooks of PyTorch watch its modules, gradients and optimizers.
After eight optimizer steps the script is ended, its last batch is run again to see which parameters the output depends
on, and a report is printed.

Exit status: 0 sound, 1 findings, 2 bad input or not observable. This file needs PyTorch alone: copy it anywhere.
"""

# SPDX-License-Identifier: MIT

import argparse
import collections
import contextlib
import copy
import dataclasses
import functools
import gc
import json
import os
import re
import runpy
import statistics
import sys
import threading
import time
import traceback
import warnings

import torch
from torch import nn
from torch.nn.modules import module as module_hooks
from torch.optim import optimizer as optimizer_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

LOOK = 4  # steps in which every gradient is looked at as it arrives; later steps are timed
RERUN_SECONDS = 60  # for running the last batch again
MARGIN = 1.1  # a clock above the data sheet's is not a fault of the step

SMALL = 2**16  # elements
INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


# ------------------------------------------------------------ what GPUs can do at most
@dataclasses.dataclass
class Peak:
    """Hold a GPU's dense peak in TFLOP/s by the bits of the operands, its bandwidth, last-level cache and source."""

    tflops: dict
    terabytes_per_second: float
    cache_megabytes: float
    source: str


NVIDIA = "https://www.nvidia.com/en-us/data-center/"
AMD = "https://www.amd.com/en/products/accelerators/instinct/"
# From the vendors' product pages, without sparsity. 32 bits: TF32 where there is any, else float32 matrix cores; a
# width without a number of its own takes the next narrower one. Of several models under one name the fastest counts,
# and of two dies in a package one, as PyTorch sees them.
PEAKS = {
    "H200": Peak({32: 494.7, 16: 989.4, 8: 1978.9}, 4.8, 50, NVIDIA + "h200/"),
    "H100": Peak({32: 494.7, 16: 989.4, 8: 1978.9}, 3.9, 50, NVIDIA + "h100/"),
    "A100": Peak({32: 156, 16: 312, 8: 624}, 2.039, 40, NVIDIA + "a100/"),
    "MI355X": Peak({16: 2516.6, 8: 5033.2}, 8.0, 256, AMD + "mi350/mi355x.html"),
    "MI325X": Peak({32: 653.7, 16: 1307.4, 8: 2614.9}, 6.0, 256, AMD + "mi300/mi325x.html"),
    "MI300X": Peak({32: 653.7, 16: 1307.4, 8: 2614.9}, 5.3, 256, AMD + "mi300/mi300x.html"),
    "MI250X": Peak({32: 47.9, 16: 191.5, 8: 191.5}, 1.64, 8, AMD + "mi200/mi250x.html"),
    "MI210": Peak({32: 45.3, 16: 181, 8: 181}, 1.6, 8, AMD + "mi200/mi210.html"),
}


def peak_of(device):
    """Return the peak of a known GPU, else None."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for known, peak in PEAKS.items() if known in name), None)


# ------------------------------------------------------------ tensors and names
def tensors(tree):
    """Yield the tensors of nested lists, dictionaries and data classes."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, (list, tuple)):
        for item in tree:
            yield from tensors(item)
    elif hasattr(tree, "items"):
        for _, value in tree.items():
            yield from tensors(value)
    elif dataclasses.is_dataclass(tree):
        yield from tensors(list(vars(tree).values()))


def plain(tensor):
    """Return a dense, contiguous tensor of this process's own values."""
    tensor = tensor.detach()
    if hasattr(tensor, "to_local"):
        tensor = tensor.to_local()
    if tensor.is_sparse:
        tensor = tensor.coalesce().values()
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
    bits = plain(value).flatten().view(INTEGER[value.element_size()])
    if bits.numel() < SMALL:  # there +lr and -lr may cancel, so the place counts
        bits = bits * torch.arange(1, bits.numel() + 1, device=bits.device)
    return bits.sum(dtype=torch.int64)


def bit_sums(values):
    """Return the bit sum of each tensor."""
    return to_list([bit_sum(value) for value in values])


def largest(values):
    """Return each tensor's largest absolute value; NaN stays NaN."""
    return to_list([torch.linalg.vector_norm(plain(value).float(), float("inf")) for value in values])


def clean(name):
    """Strip what wrappers add to a name."""
    return re.sub(r"\b(_orig_mod|_forward_module)\.|^module\.", "", name)


def folded(names, most=5):
    """Shorten a list of names: layers.0.w and layers.1.w become layers.*.w (x2)."""
    groups = collections.Counter(re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name) for name in names)
    single = {re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name): name for name in names}
    shown = [f"{key} (x{count})" if count > 1 else single[key] for key, count in groups.items()]
    more = f" and {len(shown) - most} more" if len(shown) > most else ""
    return ", ".join(shown[:most]) + more


def on_gpu():
    """Say whether this process uses a GPU; asking must not start one."""
    return torch.cuda.is_initialized()


# ------------------------------------------------------------ what is remembered
@dataclasses.dataclass(eq=False)
class Record:
    """Hold what was seen of one parameter over all steps."""

    param: nn.Parameter
    name: str
    places: dict = dataclasses.field(default_factory=dict)  # module -> its name; a tied parameter has several
    trainable: bool = False
    judged: int = 0  # optimizer steps at which its gradient was looked at; of these:
    missing: int = 0  # without a gradient
    zero: int = 0  # with zeros only
    not_finite: int = 0
    repeated: int = 0  # with the last step's gradient, bit for bit
    changed: int = 0  # in which the parameter changed
    changed_alone: int = 0  # in which it changed without a gradient
    arrived: int = 0  # gradients that backward computed for it
    arrived_nonzero: list = dataclasses.field(default_factory=list)
    found_old: list = dataclasses.field(default_factory=list)  # per arrival in this step: was there one already?
    never_cleared: int = 0  # steps in which each arrival found one
    gradient: int | None = None  # bit sum of the last gradient
    start: int | None = None  # bit sum of the first value
    master: str | None = None  # the optimizer's key of its float32 copy

    @property
    def trained(self):
        """Say whether a gradient other than zero reached an optimizer step."""
        return self.judged > self.missing + self.zero

    @property
    def owner(self):
        """Return the first module that holds it."""
        return next(iter(self.places), None)


@dataclasses.dataclass(eq=False)
class Call:
    """Hold an outermost module's last call with gradients, to repeat it."""

    model: nn.Module  # the whole model around it
    args: tuple = ()
    kwargs: dict = dataclasses.field(default_factory=dict)
    autocast: tuple = ()
    count: int = 0
    shapes: set = dataclasses.field(default_factory=set)
    reached: set = dataclasses.field(default_factory=set)  # numbers of the outputs that a gradient reached


@dataclasses.dataclass
class Step:
    """Hold one step of the leading optimizer."""

    seconds: dict = dataclasses.field(default_factory=dict)  # by phase
    inputs: list = dataclasses.field(default_factory=list)  # bit sums
    loss: torch.Tensor | None = None
    backwards: int = 0


class Clock:
    """Book time to phases: forward, backward, optimizer, no_grad, other. The check's own time is left out."""

    def __init__(self):
        self.phase = "other"
        self.since = None
        self.own = 0.0
        self.seconds = collections.Counter()

    def now(self):
        """Return the script's time, with the GPU's work done."""
        if on_gpu():
            torch.cuda.synchronize()
        return time.perf_counter() - self.own

    def switch(self, phase):
        """Begin another phase; return the one that ends."""
        now = self.now()
        if self.since is not None:
            self.seconds[self.phase] += now - self.since
        last = self.phase
        self.since = now
        self.phase = phase
        return last

    @contextlib.contextmanager
    def paused(self):
        """Leave this block out. The script's own GPU work is finished first, or it would be left out as well."""
        begin = self.now() + self.own
        try:
            with torch.no_grad():
                yield
        finally:
            self.own = self.own + self.now() + self.own - begin


# ------------------------------------------------------------ watching
class Enough(SystemExit):
    """End the script after the last step."""


class Watch:
    """Follow a training script by hooks that change nothing."""

    def __init__(self, steps, go_on=False):
        self.limit = steps
        self.go_on = go_on
        self.done = False
        self.captured = False  # was a GPU graph seen?
        self.clock = Clock()
        self.step = Step()
        self.steps = []
        self.records = {}  # id of a parameter -> Record
        self.calls = {}  # outermost module -> Call
        self.inner = set()  # modules inside those
        self.inside = None  # the outermost module that is running
        self.depth = 0  # how often it is entered
        self.before = "other"  # the phase around it
        self.scalar = None  # a model's own loss, before a scaler or an average
        self.optimizers = {}  # id -> optimizer
        self.members = {}  # id of an optimizer -> ids of its parameters
        self.lead = None  # the optimizer whose steps count
        self.stepping = 0
        self.pending = {}  # record -> (bit sum, largest) of its gradient at this step, or None
        self.weights = {}  # record -> bit sum before this step
        self.skipped = 0
        self.first_not_finite = None

    def blind(self):
        """Say whether to keep still: at the end, in another thread, or while a GPU graph is captured."""
        if on_gpu() and torch.cuda.is_current_stream_capturing():
            self.captured = True
            return True
        return self.done or threading.current_thread() is not threading.main_thread()

    # -------------------------------------------------- modules
    def enter(self, module):
        """Begin the forward phase where an outermost module with parameters is called."""
        if self.inside is not None:
            self.depth += module is self.inside
            return
        if self.blind() or self.clock.phase == "backward":  # where activation checkpointing repeats modules
            return
        if module in self.inner or next(module.parameters(), None) is None:
            return
        if module not in self.calls:
            with self.clock.paused():
                self.discover(module)
        phase = "forward" if torch.is_grad_enabled() else "no_grad"
        self.before = self.clock.switch(phase)
        self.inside = module
        self.depth = 1

    def leave(self, module, args, kwargs, output):
        """Remember an outermost module's call. The forward phase lasts until backward begins."""
        if module is not self.inside:
            return
        self.depth -= 1
        if self.depth:
            return
        self.inside = None
        if self.blind():
            return
        if not torch.is_grad_enabled():
            self.clock.switch(self.before)
            return
        with self.clock.paused():
            self.remember(self.calls[module], args, kwargs, output)

    def remember(self, call, args, kwargs, output):
        """Keep what is needed to repeat the call, and ask which outputs the loss uses."""
        inputs = list(tensors((args, kwargs)))
        kind = next((item.device.type for item in inputs if item.device.type != "cpu"), "cpu")
        call.args = args
        call.kwargs = kwargs
        call.autocast = (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
        call.count += 1
        call.shapes.add(tuple(item.shape for item in inputs))
        self.step.inputs += bit_sums(inputs)
        self.scalar = None
        for number, item in enumerate(tensors(output)):
            if item.requires_grad:
                item.register_hook(
                    functools.partial(lambda reached, number, _: reached.add(number), call.reached, number)
                )
                if item.numel() == 1 and self.scalar is None:
                    self.scalar = item.detach().clone()

    def discover(self, module):
        """Take in a new outermost module, in place of those inside it."""
        inside = set(module.modules()) - {module}
        self.calls = {known: call for known, call in self.calls.items() if known not in inside}
        self.calls[module] = Call(top_of(module))
        self.inner |= inside
        self.adopt(module)

    def adopt(self, root):
        """Record the parameters of the model around an outermost module."""
        for prefix, owner in self.calls[root].model.named_modules():
            for name, param in owner.named_parameters(recurse=False):
                record = self.record_of(param, "")
                if not record.places:
                    record.name = clean(f"{prefix}.{name}" if prefix else name)
                record.places[owner] = clean(prefix) or name

    def record_of(self, param, name):
        """Return a parameter's record. A trainable parameter gets a hook, once."""
        record = self.records.setdefault(id(param), Record(param, name))
        if param.requires_grad and param.is_leaf and not record.trainable:
            record.trainable = True
            param.register_hook(functools.partial(self.arrive, record))
        return record

    def see_compiled_modules(self):
        """Watch the calls of module.compile(), whose hooks are compiled away."""
        for module in all_modules():
            call = module._compiled_call_impl
            if call is not None and not hasattr(call, "watched"):
                module._compiled_call_impl = functools.partial(self.compiled_call, module, call)
                module._compiled_call_impl.watched = True

    def compiled_call(self, module, call, *args, **kwargs):
        """Call a module that was compiled in place."""
        if torch.compiler.is_compiling():
            return call(*args, **kwargs)
        output = None
        self.enter(module)
        try:
            output = call(*args, **kwargs)
            return output
        finally:
            self.leave(module, args, kwargs, output)

    # -------------------------------------------------- gradients
    def arrive(self, record, gradient):
        """Note that backward computed a gradient, before it is added to the parameter's."""
        if self.done or gradient is None:  # compiled code hands out None where eager code hands out nothing
            return
        record.arrived += 1
        if len(self.steps) >= LOOK or (on_gpu() and torch.cuda.is_current_stream_capturing()):
            return
        with torch.no_grad():
            record.arrived_nonzero.append(plain(gradient).any())
            old = record.param.grad
            record.found_old.append(old is not None and plain(old).any())

    def backward(self, run, roots, *args, **kwargs):
        """Time torch.autograd.backward and keep the loss that it begins from."""
        if self.blind() or self.clock.phase == "backward":
            return run(roots, *args, **kwargs)
        self.step.backwards += 1
        self.step.loss = self.scalar
        if self.step.loss is None:
            self.step.loss = next((root.detach().clone() for root in tensors([roots]) if root.numel() == 1), None)
        before = self.clock.switch("backward")
        try:
            return run(roots, *args, **kwargs)
        finally:
            if self.clock.phase == "backward":
                self.clock.switch("optimizer" if before == "optimizer" else "other")

    # -------------------------------------------------- optimizers
    def step_begins(self, optimizer, args, kwargs):
        """Look at the gradients before the step, or after its closure, which computes them."""
        if self.blind():
            return None
        self.stepping += 1
        if self.stepping > 1:  # an optimizer inside an optimizer
            return None
        self.clock.switch("optimizer")
        if self.lead is None:
            self.lead = optimizer
        with self.clock.paused():
            self.weigh(optimizer)
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if not callable(closure):
            with self.clock.paused():
                self.look(optimizer)
            return None

        @functools.wraps(closure)
        def watched():
            result = closure()
            self.clock.switch("optimizer")
            with self.clock.paused():
                self.look(optimizer)
            return result

        if "closure" in kwargs:
            return args, {**kwargs, "closure": watched}
        return (args[0], watched, *args[2:]), kwargs

    def weigh(self, optimizer):
        """Take the bit sums of the parameters before a step: the optimizer's own and those of no optimizer."""
        if not self.steps:
            self.see_compiled_modules()
        for root in self.calls:
            self.adopt(root)
        params = [param for group in optimizer.param_groups for param in group["params"]]
        for number, param in enumerate(params):
            self.record_of(param, f"parameter {number} of {type(optimizer).__name__}")
        self.optimizers[id(optimizer)] = optimizer
        self.members[id(optimizer)] = {id(param) for param in params}
        others = set().union(*self.members.values()) - self.members[id(optimizer)]
        watched = [record for key, record in self.records.items() if record.trainable and key not in others]
        watched = [record for record in watched if record.param.numel()]
        sums = bit_sums([weight_of(record, optimizer) for record in watched])
        self.weights = dict(zip(watched, sums, strict=True))
        self.pending = {}
        for record, value in self.weights.items():
            if record.start is None:
                record.start = value

    def look(self, optimizer):
        """Keep the facts about the gradients that this step uses."""
        present = [record for record in self.weights if record.param.grad is not None]
        gradients = [record.param.grad for record in present]
        facts = dict(zip(present, zip(bit_sums(gradients), largest(gradients), strict=True), strict=True))
        self.pending = {record: facts.get(record) for record in self.weights}

    def step_ended(self, optimizer):
        """Judge the step. A step of the leading optimizer ends an iteration, and the last one ends the script."""
        if self.blind() or not self.stepping:
            return
        self.stepping -= 1
        if self.stepping:
            return
        with self.clock.paused():
            overflow = getattr(optimizer, "found_inf", None)
            if overflow is not None and float(overflow) > 0:
                self.skipped += 1  # a gradient scaler left this step out
            else:
                self.judge(optimizer)
        self.clock.switch("other")
        if optimizer is self.lead:
            self.next_step()

    def judge(self, optimizer):
        """Add one step to the records."""
        after = bit_sums([weight_of(record, optimizer) for record in self.pending])
        not_finite = []
        for (record, facts), value in zip(self.pending.items(), after, strict=True):
            changed = value != self.weights[record]
            record.judged += 1
            record.changed += changed
            if facts is None:
                record.missing += 1
                record.changed_alone += changed
                continue
            gradient, top = facts
            record.zero += top == 0
            record.repeated += top != 0 and gradient == record.gradient
            record.gradient = gradient
            if not top < float("inf"):
                record.not_finite += 1
                not_finite.append(record)
        if not_finite and self.first_not_finite is None:
            self.first_not_finite = (len(self.steps) + 1, not_finite)

    def next_step(self):
        """Close an iteration."""
        self.step.seconds = self.clock.seconds
        self.steps.append(self.step)
        self.step = Step()
        self.clock.seconds = collections.Counter()
        for record in self.records.values():
            if record.found_old and len(self.steps) > 1:
                record.never_cleared += all(bool(old) for old in record.found_old)
            record.found_old = []
        if len(self.steps) >= self.limit and not self.go_on:
            self.done = True
            raise Enough(0)

    @property
    def roots(self):
        """Return the outermost modules that ran with gradients."""
        return {module: call for module, call in self.calls.items() if call.count}


def weight_of(record, optimizer):
    """Return what the optimizer updates: the parameter, or the float32 copy that it keeps of a 16-bit one."""
    state = optimizer.state.get(record.param, {})
    if record.param.element_size() == 2 and record.master is None and state:
        record.master = ""
        for key, value in state.items():
            same_shape = isinstance(value, torch.Tensor) and value.shape == record.param.shape
            if same_shape and value.dtype == torch.float32 and torch.equal(value.to(record.param.dtype), record.param):
                record.master = key
    return state[record.master] if record.master else record.param


def all_modules():
    """Return all modules that exist."""
    return [thing for thing in gc.get_objects() if issubclass(type(thing), nn.Module)]


def top_of(module):
    """Climb to the outermost module that holds this one."""
    holders = {}
    for holder in all_modules():
        for child in holder._modules.values():
            holders.setdefault(child, holder)
    while module in holders:
        module = holders.pop(module)
    return module


@contextlib.contextmanager
def hooked(watch):
    """Install the hooks. They return at once while torch.compile traces them, so compiled code stays as it was."""

    def enter(module, args):
        if not torch.compiler.is_compiling():
            watch.enter(module)

    def leave(module, args, *rest):  # after an exception PyTorch gives no keywords
        if not torch.compiler.is_compiling():
            watch.leave(module, args, rest[0] if len(rest) > 1 else {}, rest[-1])

    def step_begins(optimizer, args, kwargs):
        return None if torch.compiler.is_compiling() else watch.step_begins(optimizer, args, kwargs)

    def step_ended(optimizer, args, kwargs):
        if not torch.compiler.is_compiling():
            watch.step_ended(optimizer)

    backward = torch.autograd.backward
    handles = [
        module_hooks.register_module_forward_pre_hook(enter),
        module_hooks.register_module_forward_hook(leave, with_kwargs=True, always_call=True),
        optimizer_hooks.register_optimizer_step_pre_hook(step_begins),
        optimizer_hooks.register_optimizer_step_post_hook(step_ended),
    ]
    torch.autograd.backward = functools.wraps(backward)(functools.partial(watch.backward, backward))
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Using `torch.compile.* global hooks")  # they are ours
            yield
    finally:
        watch.done = True
        torch.autograd.backward = backward
        for handle in handles:
            handle.remove()


# ------------------------------------------------------------ running the last batch again
class Unrepeatable(Exception):
    """Say why the last batch cannot be run again."""


class Rerun:
    """Repeat an outermost module's last call, eagerly. Parameters, buffers and random state are put back."""

    def __init__(self, module, call):
        self.call = call
        while isinstance(module, nn.parallel.DistributedDataParallel) or hasattr(module, "_orig_mod"):
            module = module._orig_mod if hasattr(module, "_orig_mod") else module.module  # no talk between processes
        self.module = module
        self.usual = None  # outputs of two runs
        parts = list(module.modules())
        if any(isinstance(part, nn.SyncBatchNorm) for part in parts):
            raise Unrepeatable("SyncBatchNorm needs all processes")
        if any(hasattr(param, "to_local") for param in module.parameters()):
            raise Unrepeatable("its parameters are spread over processes")

    def run(self, grad=False):
        """Return the output of the last call."""
        args, kwargs = copy.copy((self.call.args, self.call.kwargs))
        kind, dtype, enabled = self.call.autocast
        devices = [torch.cuda.current_device()] if on_gpu() else []
        buffers = [(buffer, buffer.clone()) for buffer in self.module.buffers()]
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(devices))  # so every run draws the same dropout
            stack.enter_context(torch.set_grad_enabled(grad))
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
            stack.enter_context(contextlib.redirect_stdout(None))
            try:
                return self.module(*args, **kwargs)
            except Exception as error:
                raise Unrepeatable(f"{type(error).__name__}: {error}") from error
            finally:
                with torch.no_grad():
                    for buffer, value in buffers:
                        buffer.copy_(value)

    def outputs(self):
        """Return the floating outputs that the loss used, or all if none is known."""
        found = dict(enumerate(tensors(self.run())))
        used = {number: item for number, item in found.items() if number in self.call.reached} or found
        return [item.double().clone() for item in used.values() if item.is_floating_point()]

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


@torch.no_grad()
def perturb(param):
    """Change a parameter at random: a constant would cancel in a norm or a softmax."""
    noise = torch.randn(param.shape, generator=torch.Generator().manual_seed(1)).to(param)
    spread = param.float().std(correction=0).nan_to_num() / 4 + 0.01
    param.mul_(1 + noise / 4).add_(noise * spread)


def split_by_use(watch, suspects):
    """Return the suspects on which an output depends, found by halving, those not tested, and sentences on why not."""
    used = set()
    unknown = set()
    reasons = []
    left = list(suspects)
    end = time.monotonic() + RERUN_SECONDS
    for root, call in watch.roots.items():
        inside = {id(param) for param in root.parameters()}
        mine = [record for record in suspects if id(record.param) in inside]
        left = [record for record in left if record not in mine]
        groups = [mine] if mine else []
        try:
            rerun = Rerun(root, call) if mine else None
            while groups:
                group = groups.pop()
                if time.monotonic() > end:
                    raise Unrepeatable(f"it takes more than {RERUN_SECONDS} s")
                if not rerun.depends_on([record.param for record in group]):
                    continue
                if len(group) == 1:
                    used.update(group)
                    continue
                middle = len(group) // 2
                groups += [group[:middle], group[middle:]]
        except Unrepeatable as reason:
            unknown.update(record for record in mine if record not in used)
            names = folded([record.name for record in mine if record not in used])
            reasons.append(f"no gradient in {names}, and the last batch cannot be run again ({reason})")
    if left:
        unknown.update(left)
        reasons.append(f"no gradient in {folded([r.name for r in left])}, and no call of a module with them was seen")
    return used, unknown - used, reasons


# ------------------------------------------------------------ where the gradient ends
@dataclasses.dataclass
class Place:
    """Hold what a module did in the repeated forward."""

    order: int
    grad_mode: bool  # was autograd on?
    lost: bool = False  # does it have trainable weights, and no output that needs a gradient?


def trace(watch):
    """Repeat the forward with gradients; return a Place for every module that runs, in the order of the first call."""
    places = {}

    def enter(module, args):
        places.setdefault(module, Place(len(places), torch.is_grad_enabled()))

    def leave(module, args, output):
        floating = [item for item in tensors(output) if item.is_floating_point()]
        trainable = any(param.requires_grad for param in module.parameters())
        places[module].lost = trainable and bool(floating) and not any(item.requires_grad for item in floating)

    handles = [
        module_hooks.register_module_forward_pre_hook(enter),
        module_hooks.register_module_forward_hook(leave),
    ]
    try:
        for root, call in watch.roots.items():
            with contextlib.suppress(Unrepeatable):  # split_by_use() has told
                Rerun(root, call).run(grad=True)
    finally:
        for handle in handles:
            handle.remove()
    return places


def last_use(record, places, holders):
    """Return when in the forward a parameter is used last, and the name of the module there."""
    uses = []
    for module, name in record.places.items():
        while module is not None and module not in places:  # some modules only hold weights for the one around them
            module = holders.get(module)
        uses.append((places[module].order if module else -1, name))
    return max(uses)


def where_it_ends(watch, lost):
    """Return sentences on where the gradient ends."""
    places = trace(watch)
    holders = {child: module for module in list(places) for child in module._modules.values()}
    names = {module: clean(name) for call in watch.roots.values() for name, module in call.model.named_modules()}
    return [*boundaries(watch, lost, places, holders), *cuts(lost, places, holders, names)]


def boundaries(watch, lost, places, holders):
    """Describe each pair of neighbours in the forward of which the first has no gradient and the second has one."""
    has_gradient = {}
    seen = [record for record in watch.records.values() if record.places and (record.trained or record in lost)]
    for (_, name), record in sorted(
        ((last_use(record, places, holders), record) for record in seen), key=lambda x: x[0]
    ):
        has_gradient[name] = has_gradient.get(name, False) or record.trained
    pairs = collections.Counter()
    example = {}
    names = list(has_gradient)
    for first, second in zip(names, [*names[1:], None], strict=True):
        if has_gradient[first] or (second and not has_gradient[second]):
            continue
        key = re.sub(r"\d+", "*", f"{first} {second}")
        pairs[key] += 1
        example.setdefault(key, f"between {second or 'the loss'} (has one) and {first} (has none)")
    lines = []
    for key, count in pairs.items():
        more = f", and in {count - 1} more places like it" if count > 1 else ""
        lines.append(f"the gradient ends {example[key]}{more}")
    return lines


def cuts(lost, places, holders, names):
    """Name the modules of lost parameters that ran without autograd or whose output needs no gradient."""
    owners = {module for record in lost for module in record.places}
    mine = [module for module in places if owners & set(module.modules())]
    lines = []
    off = [module for module in mine if not places[module].grad_mode]
    outermost = [module for module in off if holders.get(module) not in off]
    if outermost:
        lines.append(f"autograd is off in {titles(outermost, names)}: in a no_grad block or an autograd.Function")
    cut = [module for module in mine if places[module].lost and places[module].grad_mode]
    innermost = [module for module in cut if not any(child in cut for child in module.children())]
    if innermost:
        lines.append(f"it is cut inside {titles(innermost, names)}: its weights need a gradient, its output has none")
    return lines


def titles(modules, names):
    """Return the modules' names and classes."""
    classes = ", ".join(sorted({type(module).__name__ for module in modules}))
    return f"{folded([names.get(module) or 'the model' for module in modules])} ({classes})"


# ------------------------------------------------------------ findings about gradients and parameters
@dataclasses.dataclass
class Finding:
    """Hold one line of the verdict. A warning does not change the exit status."""

    kind: str
    text: str
    tensors: list = dataclasses.field(default_factory=list)
    details: list = dataclasses.field(default_factory=list)
    warning: bool = False


class Facts:
    """Sort the parameters by what was seen of them."""

    def __init__(self, watch):
        self.watch = watch
        held = {id(param) for call in watch.calls.values() for param in call.model.parameters()}
        stepped = set().union(*watch.members.values())
        waiting = waiting_parameters(watch)
        known = [record for key, record in watch.records.items() if key in held | stepped and record.param.numel()]
        self.frozen = [record for record in known if not record.trainable]
        judged = [record for record in known if record.trainable and record.judged]
        self.idle = [r for r in judged if not r.trained and not r.arrived and id(r.param) not in stepped | waiting]
        self.live = [record for record in judged if record not in self.idle]
        self.stepped = [record for record in self.live if id(record.param) in stepped]
        self.waiting = [r for r in self.live if id(r.param) in waiting - stepped]
        self.homeless = [r for r in self.live if id(r.param) not in stepped | waiting]
        self.trained = [record for record in self.live if record.trained]
        empty = [record for record in self.stepped if not record.trained]
        self.stray = [record for record in empty if id(record.param) not in held]
        self.cleared = [r for r in empty if r not in self.stray and any(bool(x) for x in r.arrived_nonzero)]
        silent = [r for r in empty if r not in self.stray + self.cleared]
        used, unknown, self.untested = split_by_use(watch, silent)
        self.lost = [record for record in silent if record in used and not record.arrived]
        self.zero = [record for record in silent if record in used and record.arrived]
        self.unused = [record for record in silent if record not in used | unknown]
        self.unknown = [record for record in silent if record in unknown]

    def on(self, kind, text, group, warning=False, details=()):
        """Return the finding on a group of parameters, in a list that is empty if the group is."""
        if not group:
            return []
        names = [record.name for record in group]
        count = f"{len(group)} of {len(self.live)}" if set(group) <= set(self.live) else f"{len(group)}"
        return [Finding(kind, f"{text}: {count} tensors", names, [folded(names), *details], warning)]


def waiting_parameters(watch):
    """Return the ids of parameters whose optimizer exists and did not step."""
    optimizers = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.optim.Optimizer)]
    quiet = [optimizer for optimizer in optimizers if id(optimizer) not in watch.optimizers]
    return {id(param) for optimizer in quiet for group in optimizer.param_groups for param in group["params"]}


def gradient_findings(facts):
    """Return findings on gradients that do not arrive, vanish or repeat."""
    found = []
    ends = where_it_ends(facts.watch, facts.lost) if facts.lost else []
    found += facts.on("no_gradient", "NO GRADIENT although the output depends on them", facts.lost, details=ends)
    biases = [record for record in facts.zero if record.name.endswith("bias")]  # may cancel in a softmax or a norm
    others = [record for record in facts.zero if record not in biases]
    found += facts.on("zero_gradient", "a gradient of zeros although the output depends on them", others)
    found += facts.on("zero_bias", "a gradient of zeros, which may be right for a bias", biases, warning=True)
    found += facts.on("cleared", "a gradient in backward, and none at the optimizer's step", facts.cleared)
    found += facts.on("stray", "in an optimizer, and in no module that ran", facts.stray)
    found += not_finite(facts)
    moving = [record for record in facts.stepped if record.trained and record.judged > 2]
    repeated = [r for r in moving if r.changed and r.repeated >= r.judged - r.missing - r.zero - 1 > 0]
    if len(repeated) > 0.9 * len(moving):
        found += facts.on("repeated", "the same gradient in every step, bit for bit", repeated)
    kept = [record for record in moving if record.never_cleared >= 2]
    if len(kept) > 0.9 * len(moving):
        found += facts.on("never_cleared", "gradients add up over the steps, zero_grad() is missing", kept)
    return found


def not_finite(facts):
    """Return the finding on gradients with NaN or infinity."""
    if facts.watch.first_not_finite is None:
        return []
    step, records = facts.watch.first_not_finite
    places = trace(facts.watch)
    holders = {child: module for module in places for child in module._modules.values()}
    order = sorted((record for record in records if record.places), key=lambda r: last_use(r, places, holders))
    details = [f"in backward it begins at {order[-1].name}"] if order else []
    return facts.on("not_finite", f"NaN or infinity in the gradient, first in step {step}", records, details=details)


def parameter_findings(facts):
    """Return findings on what the optimizer does to the parameters."""
    found = facts.on("no_optimizer", "a gradient, and no optimizer", facts.homeless)
    unmoved = [r for r in facts.stepped if r.trained and not r.changed and not r.not_finite]
    still = [record for record in unmoved if not record.name.endswith("bias")]
    biases = [record for record in unmoved if record.name.endswith("bias")]  # a norm after it cancels its gradient
    if still:
        still = unmoved
        biases = []
    rates = sorted(
        {float(group["lr"]) for o in facts.watch.optimizers.values() for group in o.param_groups if "lr" in group}
    )
    details = [f"learning rates: {', '.join(f'{rate:g}' for rate in rates)}"]
    if any(record.param.element_size() == 2 for record in still):
        details.append("16 bits round a small update away: keep float32 weights for the optimizer")
    found += facts.on("unchanged", "a gradient, and no step changes them", still, details=details)
    found += facts.on("unchanged_bias", "a gradient too small to change them", biases, warning=True)
    alone = [record for record in facts.live if record.changed_alone]
    found += facts.on("changed_alone", "changed by a step without a gradient", alone)
    found += facts.on(
        "unused", "unused: no gradient, and the output does not depend on them", facts.unused, warning=True
    )
    found += facts.on("idle", "no gradient and no optimizer", facts.idle, warning=True)
    found += facts.on("waiting", "in an optimizer that has not stepped yet", facts.waiting, warning=True)
    found += facts.on(
        "frozen_between",
        "frozen, while the same tensor of an earlier layer trains",
        frozen_between(facts),
        warning=True,
    )
    for pair in copied_ties(facts):
        found += facts.on(
            "copied_tie", "began equal and train apart, perhaps a copy in place of a tie", pair, warning=True
        )
    return found


def frozen_between(facts):
    """Return frozen parameters of a layer whose twins in an earlier layer train."""
    layers = collections.defaultdict(dict)
    for record in facts.live + facts.frozen:
        for number in re.finditer(r"(?<=\.)\d+(?=\.)|^\d+(?=\.)", record.name):
            family = (record.name[: number.start()], record.name[number.end() :])
            layers[family][int(number[0])] = record
    odd = []
    for family in layers.values():
        first = min((index for index, record in family.items() if record.trainable), default=len(family))
        odd += [record for index, record in family.items() if index > first and not record.trainable]
    return odd


def copied_ties(facts):
    """Return pairs of matrices in modules of two kinds that held the same values at the start."""
    twins = collections.defaultdict(list)
    for record in facts.live:
        if record.owner and record.param.dim() > 1 and record.param.unique().numel() > 2:
            twins[record.param.shape, record.start].append(record)
    pairs = [group for group in twins.values() if len(group) == 2]
    return [group for group in pairs if type(group[0].owner) is not type(group[1].owner)]


def run_findings(watch):
    """Return findings on inputs and losses."""
    found = []
    inputs = [tuple(step.inputs) for step in watch.steps]
    if len(inputs) > 2 and inputs[0] and len(set(inputs)) == 1:
        found.append(Finding("same_input", "every step has the same input: a benchmark, or a fault", warning=True))
    losses = losses_of(watch)
    if any(not abs(loss) < float("inf") for loss in losses):
        found.append(Finding("loss_not_finite", "the loss is NaN or infinite"))
    elif len(losses) > 2 and len(set(losses)) == 1:
        found.append(Finding("loss_constant", f"the loss is {losses[0]:.6g} in every step"))
    if watch.captured:
        found.append(Finding("graph", "a GPU graph was captured, and what it replays was not seen", warning=True))
    return found


def losses_of(watch):
    """Return the losses that were seen."""
    return [float(step.loss) for step in watch.steps if step.loss is not None]


# ------------------------------------------------------------ can the step be that fast?
@dataclasses.dataclass
class Work:
    """Hold what a sound step must do at least."""

    flops: float
    bits: int  # of the narrowest floating dtype seen
    bytes: float  # of weights, gradients and optimizer state


class Widths(TorchDispatchMode):
    """Collect the element sizes of all floating tensors, and int8, that operators read or write."""

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
    flops = 0.0
    widths = Widths()
    for root, call in facts.watch.roots.items():
        with FlopCounterMode(display=False) as counter, widths:
            Rerun(root, call).run()
        forward = matmul_flops(counter.get_flop_counts().get("Global", {}))
        calls = call.count / len(facts.watch.steps) if len(call.shapes) == 1 else 1
        flops += forward * passes(facts, call) * calls
    states = [
        tensor for o in facts.watch.optimizers.values() for state in o.state.values() for tensor in tensors(state)
    ]
    weights = [record.param for record in facts.stepped]
    # A gradient is as large as its parameter; a parameter that lost its gradient should have one.
    size = sum(plain(tensor).numel() * tensor.element_size() for tensor in [*states, *weights, *weights])
    widths.sizes.update(weight.element_size() for weight in weights)
    return Work(flops, 8 * min(widths.sizes, default=4), size)


def matmul_flops(counts):
    """Add up the FLOPs by operator. A causal kernel does half of what PyTorch counts for attention."""
    return sum(flops / 2 if "attention" in str(operator) else flops for operator, flops in counts.items())


def passes(facts, call):
    """Return how many times the forward's FLOPs a step needs at least.

    Two gradients follow each matmul. The first layer needs no gradient of a floating input, and a frozen or unused
    weight may need none at all.
    """
    if facts.frozen or facts.unused or facts.unknown or facts.idle:
        return 1
    if any(item.is_floating_point() for item in tensors((call.args, call.kwargs))):
        return 2
    return 3


def floor(work, peak):
    """Return the seconds below which no GPU with this peak does the work, and the arithmetic."""
    width = max((bits for bits in peak.tflops if bits <= work.bits), default=None)
    width = work.bits if work.bits in peak.tflops else width
    if width is None:
        return 0.0, f"no peak is known for {work.bits} bits"
    compute = work.flops / (peak.tflops[width] * 1e12)
    moved = 2 * max(0.0, work.bytes - peak.cache_megabytes * 1e6)  # read and written once; a cache may hold its size
    memory = moved / (peak.terabytes_per_second * 1e12)
    text = f"{work.flops / 1e12:.4g} TFLOP / {peak.tflops[width]:g} TFLOP/s ({width} bits) = {1e3 * compute:.4g} ms; "
    text += f"{moved / 1e9:.4g} GB / {peak.terabytes_per_second:g} TB/s = {1e3 * memory:.4g} ms"
    return max(compute, memory), text


def times_of(watch):
    """Return the median seconds of a step and of its phases, from the steps after the first ones."""
    timed = watch.steps[LOOK:]
    if not timed:
        return None, {}
    phases = {name for step in timed for name in step.seconds}
    shares = {name: statistics.median(step.seconds.get(name, 0.0) for step in timed) for name in phases}
    return statistics.median(sum(step.seconds.values()) for step in timed), shares


def least_time(watch, phase):
    """Return a phase's shortest time."""
    return min(step.seconds.get(phase, 0.0) for step in watch.steps[LOOK:])


def speed_findings(facts, peak, rows):
    """Hold the time of a step against the work that it must do; add rows to the report."""
    seconds, shares = times_of(facts.watch)
    if seconds is None:
        rows["step"] = f"not timed: needs more than {LOOK} steps"
        return []
    order = [name for name in ("forward", "no_grad", "backward", "optimizer", "other") if name in shares]
    rows["step"] = f"{1e3 * seconds:.4g} ms: " + ", ".join(f"{name} {1e3 * shares[name]:.3g}" for name in order)
    micro = statistics.median(step.backwards for step in facts.watch.steps)
    if micro > 1:
        rows["step"] += f"; {micro:g} backward passes"
    found = []
    forward = least_time(facts.watch, "forward")
    backward = least_time(facts.watch, "backward")
    if len(facts.watch.roots) == 1 and 0 < backward < forward / 4:
        text = f"backward takes {backward / forward:.2g} of forward's time; about twice is usual"
        found.append(Finding("fast_backward", text, warning=True))
    try:
        work = work_of(facts)
    except Unrepeatable as reason:
        rows["work"] = f"not counted: the last batch cannot be run again ({reason})"
        return found
    rows["work"] = f"at least {work.flops / 1e9:.4g} GFLOP, so {work.flops / seconds / 1e9:.4g} GFLOP/s"
    if peak is None:
        rows["floor"] = "not checked: this device's peak is not known (--peak gives one)"
        return found
    least, arithmetic = floor(work, peak)
    rows["floor"] = f"{1e3 * least:.4g} ms: {arithmetic}"
    if seconds < least / MARGIN:
        text = f"IMPOSSIBLE: a step takes {1e3 * seconds:.4g} ms, and its work needs {1e3 * least:.4g} ms or more"
        found.append(Finding("impossible", text, details=[arithmetic, f"peak: {peak.source}"]))
    return found


# ------------------------------------------------------------ report
def describe(facts, rows):
    """Add the rows on parameters, gradients, optimizers and loss."""
    watch = facts.watch
    size = sum(record.param.numel() for record in facts.live)
    rows["parameters"] = f"{len(facts.live)} tensors to train, {size:,} elements"
    if facts.frozen:
        rows["frozen"] = f"{len(facts.frozen)} tensors: {folded([record.name for record in facts.frozen])}"
    tied = [" = ".join(dict.fromkeys(record.places.values())) for record in facts.live if len(record.places) > 1]
    if tied:
        rows["tied"] = folded(tied)
    percent = 100 * sum(record.param.numel() for record in facts.trained) / max(1, size)
    rows["gradient"] = f"{len(facts.trained)} of {len(facts.live)} tensors, {percent:.4g} % of the elements"
    kinds = ", ".join(sorted({type(optimizer).__name__ for optimizer in watch.optimizers.values()}))
    changed = sum(record.changed > 0 for record in facts.stepped)
    rows["optimizer"] = f"{kinds}: {len(facts.stepped)} tensors, {changed} changed"
    if watch.skipped:
        rows["optimizer"] += f"; the gradient scaler skipped {watch.skipped} steps"
    losses = losses_of(watch)
    rows["loss"] = f"{losses[0]:.4f} -> {losses[-1]:.4f}" if losses else "not seen"
    if uses_scaler():
        rows["loss"] += " (may be scaled)"
    if compiled():
        rows["compiled"] = "yes: hooks may change what the compiler fuses, and with it the last digits"


def uses_scaler():
    """Say whether a gradient scaler exists."""
    return any(issubclass(type(thing), torch.amp.GradScaler) and thing.is_enabled() for thing in gc.get_objects())


def compiled():
    """Say whether torch.compile made a graph."""
    counters = getattr(getattr(torch, "_dynamo", None), "utils", None)
    return bool(counters and counters.counters["stats"]["unique_graphs"])


def assess(watch, peak=None):
    """Return the report's rows, the findings and what could not be observed."""
    rows = {}
    facts = Facts(watch)
    describe(facts, rows)
    device = facts.live[0].param.device if facts.live else torch.device("cpu")
    found = gradient_findings(facts) + parameter_findings(facts) + run_findings(watch)
    found += speed_findings(facts, peak or peak_of(device), rows)
    return rows, found, facts.untested


def everywhere(findings):
    """Add the findings of the other processes of a launch that lack in this one's. Collective."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return findings
    gathered = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(gathered, findings)
    known = {(finding.kind, tuple(finding.tensors)) for finding in findings}
    for rank, others in enumerate(gathered):
        for finding in others:
            key = (finding.kind, tuple(finding.tensors))
            if key not in known:
                known.add(key)
                finding.text = f"rank {rank}: {finding.text}"
                findings.append(finding)
    return findings


def print_report(title, rows, findings, verdict):
    """Print the report."""
    print(f"\ncheck_training: {title}\n")
    for name, text in rows.items():
        print(f"{name:<12}{text}")
    print()
    for finding in sorted(findings, key=lambda finding: finding.warning):
        print(f"{'warning' if finding.warning else 'FINDING':<12}{finding.text}")
        for line in finding.details:
            print(f"{'':<12}{line}")
    print(f"{'verdict':<12}{verdict}", flush=True)


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
            f"{name} is a program: name the Python script itself, and put a launcher before check_training.py"
        )
    if not os.path.isfile(name):
        raise BadInput(f"{name} does not exist")
    if not name.endswith(".py"):
        raise BadInput(f"{name} is no Python script: its name must end with .py")
    return command, runpy.run_path


def place_of(error):
    """Return the innermost line of the user's code that an error went through."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
    mine = [
        frame for frame in frames if not re.search(r"site-packages|dist-packages|<frozen|/lib/python", frame.filename)
    ]
    return f" ({os.path.basename(mine[-1].filename)}, line {mine[-1].lineno})" if mine else ""


def run_script(watch, command):
    """Run the script under the hooks; return a sentence on how it failed, or None."""
    arguments, run = script_of(command)
    sys.argv = arguments
    sys.path[0] = os.getcwd() if command[0] == "-m" else os.path.dirname(os.path.abspath(arguments[0]))
    with hooked(watch):
        try:
            run(arguments[0], run_name="__main__")
        except Enough:
            return None
        except SystemExit as end:
            return None if end.code in (None, 0) else f"the script ended with status {end.code}"
        except Exception as error:
            return f"the script raised {type(error).__name__}: {str(error).partition(chr(10))[0]}{place_of(error)}"
    return None


def parse(argv):
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8, help="optimizer steps to watch (default: 8)")
    parser.add_argument("--go-on", action="store_true", help="let the script run to its end, and watch all steps")
    parser.add_argument("--json", metavar="FILE", help="write the report to this file, too")
    parser.add_argument(
        "--peak", metavar="TFLOPS,TB/S", help="this device's peak at the narrowest dtype, and bandwidth"
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- SCRIPT [ARGUMENTS]", help="or: -- -m MODULE")
    options = parser.parse_args(argv)
    if options.steps < 1:
        parser.error(f"--steps must be at least 1, got {options.steps}")
    if options.json and not os.path.isdir(os.path.dirname(os.path.abspath(options.json))):
        parser.error(f"--json {options.json}: its folder does not exist")
    if options.peak:
        try:
            tflops, bandwidth = map(float, options.peak.split(","))
        except ValueError:
            parser.error(f"--peak must be two numbers such as 989,4.8, got {options.peak}")
        options.peak = Peak(dict.fromkeys((8, 16, 32, 64), tflops), bandwidth, 0, "--peak")
    if options.command[:1] == ["--"]:
        options.command = options.command[1:]
    return options


def main(argv=None):
    """Run the script, print the report, and return the exit status."""
    options = parse(argv)
    watch = Watch(options.steps, options.go_on)
    try:
        failure = run_script(watch, options.command)
    except BadInput as error:
        failure = str(error)
    if not watch.steps and failure is None:
        failure = "no torch.optim optimizer stepped in this process"
        if watch.captured:
            failure += ": the step is in a GPU graph, so switch graphs off"
    rank = os.environ.get("RANK", "0")
    if not watch.steps or (failure and rank != "0"):
        print(f"check_training: {failure}", file=sys.stderr)
        return 2
    rows, findings, untested = assess(watch, options.peak)
    if failure is None:
        findings = everywhere(findings)
    if rank != "0":  # one report: process 0 prints it and has the status
        return 0
    return report(options, watch, rows, findings, failure, untested)


def report(options, watch, rows, findings, failure, untested):
    """Print and write the report; return the exit status."""
    faults = [finding for finding in findings if not finding.warning]
    findings += [Finding("untested", reason, warning=True) for reason in untested]
    if len(watch.steps) < options.steps:
        text = f"the script ended after {len(watch.steps)} of {options.steps} steps"
        findings.append(Finding("ended_early", text, warning=True))
    if failure:
        status = 2
        verdict = f"NOT OBSERVED: {failure}"
    elif faults:
        status = 1
        verdict = f"{len(faults)} FINDING{'S' if len(faults) > 1 else ''}"
    elif untested:
        status = 2
        verdict = "NOT OBSERVED: see the warnings"
    else:
        status = 0
        verdict = "sound"
    title = f"{os.path.basename(options.command[0])}, {len(watch.steps)} steps"
    print_report(title, rows, findings, verdict)
    if options.json:
        content = {"command": options.command, "steps": len(watch.steps), "status": status, "verdict": verdict}
        content |= {"rows": rows, "findings": [dataclasses.asdict(finding) for finding in findings]}
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(content, file, indent=1)
    return status


if __name__ == "__main__":
    sys.exit(main())
