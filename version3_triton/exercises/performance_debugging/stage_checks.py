"""Decide in Triton's interpreter whether a stage still has a fault; sentences give what was measured."""

import contextlib
import functools
import inspect
import math
import pathlib
from unittest import mock

import numpy as np
import torch
from stage_setup import CPU_SIZES, SCRIPT
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder

from common.versions import load_version, relative_error

SMALL = "--preset small --batch-size 2 --seq-len 64 --device cpu --no-graph".split()
# The parts of tiny_llama_v3.py that each stage replaces. A repair mends the stage's part and does not delete it.
REPLACED = {
    1: ["initialize"],
    2: ["AddRMSNormFunction.forward"],
    3: ["Trainer.run"],
    4: ["FeedForward.forward"],
    6: ["add_rms_norm", "rotary_attention", "packed_swiglu"],
}
aten = torch.ops.aten
LINE = 64  # bytes of a cache line; tensors begin at multiples of it, so every run counts the same lines


def first_loss(v3):
    """Return a trainer with the initial weights, and its loss of the first batch."""
    sizes = ["--batch-size", "3", "--intermediate-dim", "40"]  # rows, C and F differ: none can pass for another
    config = v3.parse_options([*CPU_SIZES, *sizes, "--no-graph"])
    trainer = v3.Trainer(config)
    for parameter in trainer.model.parameters():
        if parameter.ndim == 1:  # norms start at one, which would hide a forgotten weight
            parameter.data.copy_(v3.torch.linspace(0.5, 1.5, len(parameter)))
    tokens, labels = v3.batch(v3.load_data(config), 0, config)
    return trainer, v3.compute_loss(trainer.model, tokens, labels, config)


def first_step(v3):
    """Return the loss of the first batch and {name: gradient, or None} of the initial weights."""
    trainer, loss = first_loss(v3)
    loss.backward()
    return loss.item(), {name: parameter.grad for name, parameter in trainer.model.named_parameters()}


def check_model(v3, stage):
    """Return what is wrong with the first loss and the gradients, compared with version 3, or None."""
    loss, grads, _, _ = measured_step(v3)
    right_loss, right_grads, _, _ = measured_step(load_version(3))
    missing = [name for name, grad in grads.items() if grad is None]
    if missing:
        return f"{len(missing)} of {len(grads)} tensors get no gradient, among them {missing[0]}"
    if stage == 1:  # other random weights are as good
        return None
    # another order of float32 sums makes errors of 1e-6, a forgotten weight or row of 1e-2
    if not math.isclose(loss, right_loss, rel_tol=1e-4):
        return f"the first loss is {loss:.4f}, version 3's is {right_loss:.4f}"
    wrong = [name for name, grad in grads.items() if not relative_error(grad, right_grads[name]) < 1e-4]
    return f"the gradient of {wrong[0]} is not version 3's" if wrong else None


def check_parts(v3, stage):
    """Return which part of the stage was deleted, or replaced by version 3's, or None."""
    for name in REPLACED.get(stage, []):
        part = inspect.unwrap(functools.reduce(getattr, name.split("."), v3))
        if pathlib.Path(part.__code__.co_filename).resolve() == SCRIPT.resolve():
            return f"the stage's own {name} is gone, so version 3's runs: git restore the file and repair the part"
    return None


# ---------------------------------------------------------------- stage 1


def first_logits(v3):
    """Return logits [B, T, V], tokens [B, T] and labels of version 1 with the stage's initial weights, at width 512.

    Version 1 is plain PyTorch, so this takes seconds; version 3's kernels would take minutes in the interpreter.
    """
    v1 = load_version(1)
    options = v3.parse_options(SMALL)
    drawn = v3.make_model(options)
    v3.initialize(drawn, options)
    model = v1.TinyLlama(options.model)
    model.load_state_dict(v3.canonical_views(drawn.state_dict(), options.model))
    tokens, labels = v1.batch(v1.load_data(options), 0, options)
    with v3.torch.no_grad():
        return model(tokens), tokens, labels


def check_loss(v3):
    """Check the first loss at width 512 and the standard deviation of the logits.

    At the width of CPU_SIZES, 32, a start from N(0, 0.1) would pass. All-zero logits have the right loss too.
    """
    logits, _, labels = first_logits(v3)
    V = logits.shape[-1]
    uniform = math.log(V)
    loss = v3.torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()).item()
    deviation = logits.std().item()
    spread = f"the logits have a standard deviation of {deviation:.2g}"
    if not abs(loss - uniform) <= 0.3:  # N(0, 0.03) adds 0.25, N(0, 1 / sqrt(512)) 0.51
        told = f"at width 512 the first loss is {loss:.2f}; a uniform guess over {V} tokens has {uniform:.2f}"
        return f"{told}, and the check allows 0.3 more; {spread}"
    if not deviation > 0.1:  # N(0, 0.02) makes 0.45, N(0, 0.001) 0.02
        return f"at width 512 the first loss is right, {loss:.2f}, but {spread}: tokens hardly change the prediction"
    return None


# ---------------------------------------------------------------- stages 2 and 4


@contextlib.contextmanager
def noted_accesses(note):
    """Call note(addresses), a NumPy array in bytes, for each load and store of kernels in Triton's interpreter."""
    load = InterpreterBuilder.create_masked_load
    store = InterpreterBuilder.create_masked_store

    def noted_load(self, pointers, mask, *rest):
        note(pointers.data[mask.data.astype(bool)])
        return load(self, pointers, mask, *rest)

    def noted_store(self, pointers, value, mask, *rest):
        note(pointers.data[mask.data.astype(bool)])
        return store(self, pointers, value, mask, *rest)

    replaced = {"create_masked_load": noted_load, "create_masked_store": noted_store}
    with mock.patch.multiple(InterpreterBuilder, **replaced):
        yield


@contextlib.contextmanager
def counted_lines():
    """Collect in a list how many cache lines each load and store of the kernels touches."""
    counts = []
    with noted_accesses(lambda addresses: counts.append(len(np.unique(addresses // LINE)))):
        yield counts


@functools.cache
def measured_step(v3):
    """Return what first_step() does, the bytes of all cache lines that its kernels touch, and their launches."""
    start, launches = GridExecutor.__call__, []

    def counted_start(self, *args, **kwargs):
        launches.append(1)
        return start(self, *args, **kwargs)

    with counted_lines() as counts, mock.patch.object(GridExecutor, "__call__", counted_start):
        loss, grads = first_step(v3)
    return loss, grads, LINE * sum(counts), len(launches)


def check_traffic(v3):
    """Compare the kernels' memory traffic and launches with version 3's."""
    *_, mine, launches = measured_step(v3)
    *_, right, expected = measured_step(load_version(3))
    if mine > 1.1 * right:  # the faults touch more than twice as many; a repair may load a few values again
        return f"its kernels touch {mine / 1e6:.2f} MB of cache lines in a small step, version 3's {right / 1e6:.2f} MB"
    if launches < expected:  # PyTorch's operations move more bytes, which the kernels' cache lines do not show
        counted = f"a forward and backward start {launches} kernels, version 3 {expected}"
        return f"{counted}: PyTorch operations replace a kernel, where the repair keeps it"
    return None


class Copies(TorchDispatchMode):
    """Count the bytes of the copies that PyTorch makes."""

    size = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function.overloadpacket in (aten.clone, aten.copy_, aten._to_copy):
            self.size += result.nbytes
        return result


def copied(v3):
    """Return the bytes that PyTorch copies in a norm of contiguous tensors, without and with a branch.

    No kernel runs, because the interpreter copies all tensors of a launch.
    """
    x = torch.ones(2, 3, 32)
    with mock.patch.object(GridExecutor, "__call__", lambda *args, **kwargs: None), Copies() as copies:
        v3.add_rms_norm(x, None, x[0, 0], 1e-6)
        v3.add_rms_norm(x, x, x[0, 0], 1e-6)
    return copies.size


def check_copies(v3):
    """Compare the kernels' memory traffic with version 3's; then nothing may be copied around the norm's kernel."""
    fault = check_traffic(v3)
    size = 0 if fault else copied(v3)
    return f"PyTorch copies {size:,} bytes in two norms of contiguous tensors: a copy is left" if size else fault


# ---------------------------------------------------------------- stage 3


class VirtualGPU:
    """Simulate a GPU for Trainer.run: launches return after 1 ms, the work takes longer, synchronize() waits for it.

    A copy of tokens or labels takes 5 ms.
    """

    def __init__(self, options, work_ms, backlog_ms):
        self.options, self.work_ms, self.graph, self.marks = options, work_ms, None, []
        self.now, self.done = 0.0, backlog_ms
        self.tokens = self.labels = self.loss = self

    def step(self):
        self.now += 1
        self.done = max(self.done, self.now) + self.work_ms

    launch = step  # there is no graph

    def synchronize(self):
        self.now = max(self.now, self.done)

    def item(self):
        self.synchronize()
        return 0.0

    def copy_(self, _):
        self.done = max(self.done, self.now) + 5

    def perf_counter(self):
        return self.now / 1000


def check_clock(v3):
    """Time a step of known duration on a simulated GPU that still has earlier work to do."""
    gpu = VirtualGPU(v3.parse_options(CPU_SIZES), work_ms=50.0, backlog_ms=20.0)  # and two copies: 30 ms
    own = mock.patch.object(v3.torch.cuda, "synchronize", lambda *device: gpu.synchronize())
    with mock.patch("time.perf_counter", gpu.perf_counter), own:
        claimed = v3.Trainer.run(gpu, None, None)["step_ms"]
    if abs(claimed - 51) > 0.5:  # all that the simulated GPU does takes whole milliseconds
        said = f"on a simulated GPU a step of 51 ms, begun with 30 ms of earlier work, is reported as {claimed:.0f} ms"
        return f"{said}: the earlier work is counted too" if claimed > 51 else said
    return None


# ---------------------------------------------------------------- stage 6


def check_own_function(v3):
    """Return what is wrong unless the SwiGLU of the stage has a Function of its own; version 3's raises."""

    def refuse(ctx, x):
        raise NotOwn

    with mock.patch.object(v3.SwiGLUFunction, "forward", staticmethod(refuse)):
        try:
            first_loss(v3)
        except NotOwn:
            return "packed_swiglu calls version 3's SwiGLUFunction: write the stage's own, with the same two kernels"
    return check_traffic(v3)


class NotOwn(Exception):
    """Version 3's SwiGLUFunction was called."""


CHECKS = {1: check_loss, 2: check_copies, 3: check_clock, 4: check_traffic, 5: check_traffic, 6: check_own_function}
