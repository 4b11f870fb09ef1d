"""Exercise 23: what run() must compute, and typical mistakes."""

import gc
from unittest import mock

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from common.versions import load_version
from grading import DEVICE, Mistake, Task, Wrong, random, stored
from graphs import DispatchMode

CHUNK, IGNORED = 4, -100  # of the exercise


def halves(*shape, seed, limit):
    """Draw multiples of 1/2 up to a limit: every logit is exact in 16 bits, so the loss is too."""
    return (2 * random(*shape, seed=seed)).round().clamp(-2 * limit, 2 * limit) / 2


def inputs(rows, V, C=8, ignored=(), scale=0.125, large=False):
    """Return inputs in which a power of two of rows count, so dx · scale / rows is exact.

    large: the first chunk gives dw large numbers, which the last one takes away; what the others add between is rounded
    to the large numbers' last place. No logit knows of it, because the column has no weights.
    """
    x = halves(rows, C, seed=1, limit=2)
    w = halves(V, C, seed=3, limit=1)
    labels = torch.randint(V, (rows,), generator=torch.Generator().manual_seed(2))
    if large:
        labels[:] = 3
        w[:, 0] = 0
        x[:, 0] = 1
        x[:CHUNK, 0] = 512
        x[-CHUNK:] = x[:CHUNK]
        x[-CHUNK:, 0] = -512
    labels[list(ignored)] = IGNORED
    return {"x": x, "w": w, "labels": labels, "scale": scale}


def define(x, w, labels, scale):
    leaves = [x.detach().requires_grad_(), w.detach().requires_grad_()]
    logits = [
        stored(part @ stored(leaves[1], value=False, gradient=True).T, gradient=True) for part in leaves[0].split(CHUNK)
    ]
    logits = load_version(1).at_least_float32(torch.cat(logits))
    loss = F.cross_entropy(logits, labels)
    dx, dw = torch.autograd.grad(scale * loss, leaves)
    return {"loss": loss.detach().view(1), "dx": dx, "dw": dw}


def chunkwise(
    x, w, labels, scale, *, onehot=1.0, overwritten=False, own_count=False, all_count=False, ignored_too=False,
    ignored_loss=False, last_dw=False, first_labels=False, rounded=False, whole_only=False,
):  # fmt: skip
    """Compute it in chunks, as the exercise does, with one part of it changed; rounded: dw is summed in float16."""
    losses = x.new_zeros(len(x))
    dx = torch.zeros_like(x)
    dw = torch.zeros_like(w)
    count = len(labels) if all_count else (labels != IGNORED).sum()
    rows = len(x) // CHUNK * CHUNK if whole_only else len(x)
    for first in range(0, rows, CHUNK):
        part = slice(first, first + CHUNK)
        logits = x[part] @ w.T
        chosen = labels[: len(logits)] if first_labels else labels[part]
        valid = (chosen != IGNORED)[:, None]
        is_label = torch.arange(len(w), device=x.device) == chosen[:, None]
        dlogits = logits.softmax(1) - onehot * is_label
        if not ignored_too:
            dlogits = dlogits * valid
        read = dlogits if overwritten else logits
        losses[part] = logits.logsumexp(1) - (read * is_label).sum(1)
        if not ignored_loss:
            losses[part] *= valid[:, 0]
        if own_count:
            dlogits = dlogits * count / valid.sum()
        dx[part] = dlogits @ w
        one = dlogits.T @ x[part]
        if last_dw:
            dw = one
        elif rounded:
            dw = (dw + one.half()).half().to(x.dtype)
        else:
            dw = dw + one
    return {"loss": (losses.sum() / count).view(1), "dx": scale / count * dx, "dw": scale / count * dw}


def suspect(*results, **changes):
    """Return a function like define that returns these results of a changed computation."""

    def compute(**inputs):
        found = chunkwise(**inputs, **changes)
        return {name: found[name] for name in results}

    return compute


def of_the_sum(x, w, labels, scale):
    """Return the gradients of the sum over rows."""
    return suspect("dx", "dw")(x=x, w=w, labels=labels, scale=scale * (labels != IGNORED).sum())


class MemoryMeter(DispatchMode):
    """Follow the memory that PyTorch's operations allocate, which is freed with its last tensor; on a CPU too.

    known: tensors that exist before. peak, largest: bytes of all live memory, and of one tensor.
    """

    def __init__(self, *known):
        super().__init__()
        self.known = {StorageWeakRef(tensor.untyped_storage()) for tensor in known}
        self.live = {}
        self.peak = self.largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self.live[StorageWeakRef(storage)] = storage.nbytes()
        self.forget_freed()
        if sum(self.live.values()) > self.peak:
            gc.collect()  # Triton's interpreter leaves tensors in reference cycles
            self.forget_freed()
        self.peak = max(self.peak, sum(self.live.values()))
        self.largest = max(self.largest, *self.live.values(), 0)
        return result

    def forget_freed(self):
        self.live = {ref: size for ref, size in self.live.items() if not ref.expired() and ref not in self.known}


def check_memory(module, source):
    """Raise Wrong if the whole logits exist; return words on the memory that the answer allocates."""
    rows, V, C = 8 * module.CHUNK + 3, 256, 2
    x, w, labels, scale = inputs(rows, V, C).values()
    leaves = [tensor.to(DEVICE).requires_grad_() for tensor in (x, w)]
    labels = labels.to(DEVICE)
    gc.freeze()  # collecting garbage is then a matter of milliseconds: it passes over all of PyTorch
    try:
        with mock.patch.object(module, "BLOCK", V), MemoryMeter(*leaves, labels) as meter:  # one tile is quicker
            (scale * module.LinearCrossEntropy.apply(*leaves, labels)).backward()
    finally:
        gc.unfreeze()
    whole = 4 * rows * V
    chunk = 4 * module.CHUNK * V
    size = f"[{rows}, {V}] in chunks of {module.CHUNK} rows"
    if meter.largest >= whole:
        raise Wrong("memory", None, f"right, but the whole logits exist, {size}: multiply one chunk of x at a time")
    if meter.peak > 4 * chunk + 4 * 4 * V * C:  # a chunk, its copies, and as many of dw
        found = f"{meter.peak:,} bytes at once for logits {size}; a chunk has {chunk:,}"
        raise Wrong("memory", None, f"right, but the logits of earlier chunks are kept: {found}")
    return f"for logits {size}, {whole:,} bytes, it allocates at most {meter.peak:,}"


TASK = Task(
    cases={
        "one chunk, one tile": {"rows": 4, "V": 16},
        "ragged, a label ignored": {"rows": 9, "V": 40, "ignored": (2,)},
        "a chunk without labels": {"rows": 12, "V": 7, "ignored": (4, 5, 6, 7), "scale": -0.5},
        "many chunks, large numbers": {"rows": 32, "V": 20, "C": 4, "large": True},
    },
    inputs=inputs,
    direct=False,  # autograd and BLAS make the tensors that run() copies
    launches=("loss_and_gradient_kernel",),
    define=define,
    tolerance=1e-5,  # the large numbers of the last case take digits from float32 too
    suspects={
        "the label's logit is read after its gradient has overwritten it": suspect("loss", overwritten=True),
        "the sum is divided by all rows: those with an ignored label do not count": suspect(
            "loss", "dx", "dw", all_count=True
        ),
        "every chunk reads the labels of the first: take labels[part]": suspect("loss", "dx", "dw", first_labels=True),
        "the rows after the last whole chunk are missing": suspect("loss", "dx", "dw", whole_only=True),
        "a chunk's gradients are divided by its own rows: the mean is over those of all chunks": suspect(
            "dx", "dw", own_count=True
        ),
        "the gradient of the loss is ignored: the backward multiplies dx and dw by dloss": lambda x, w, labels, scale: (
            suspect("dx", "dw")(x=x, w=w, labels=labels, scale=1.0)
        ),
        "these are gradients of the sum: divide by the number of rows that count": of_the_sum,
        "the gradient of a logit is softmax - 1 at the label: the 1 is missing": suspect("dx", "dw", onehot=0.0),
        "a row with an ignored label has a gradient": suspect("dx", "dw", ignored_too=True),
        "a row with an ignored label has a loss": suspect("loss", ignored_loss=True),
        "dw holds the last chunk only: add every chunk's": suspect("dw", last_dw=True),
        "dw is summed in 16 bits, where small numbers next to large ones are lost: make it float32": suspect(
            "dw", rounded=True
        ),
    },
    names={"loss": "number", "dx": "row column", "dw": "token column"},
    owner=lambda module, name, index, inputs: f"chunk {index[0] // module.CHUNK}" if name == "dx" else "",
    then=check_memory,
    mistakes={
        "loss read after the write": Mistake(
            "    x_label = tl.load(x_ptr + label, mask=label != IGNORED, other=0.0).to(tl.float32)\n"
            "    tl.store(loss_ptr + row, tl.where(label == IGNORED, 0.0, m + tl.log(l) - x_label))\n"
            "    for start in range(0, V, BLOCK):\n"
            "        column = start + tl.arange(0, BLOCK)\n"
            '        x = tl.load(x_ptr + column, mask=column < V, other=-float("inf")).to(tl.float32)\n'
            "        dx = tl.exp(x - m) / l - tl.where(column == label, 1.0, 0.0)\n"
            "        dx = tl.where(label == IGNORED, 0.0, dx)\n"
            "        tl.store(x_ptr + column, dx.to(x_ptr.dtype.element_ty), mask=column < V)\n",
            "    for start in range(0, V, BLOCK):\n"
            "        column = start + tl.arange(0, BLOCK)\n"
            '        x = tl.load(x_ptr + column, mask=column < V, other=-float("inf")).to(tl.float32)\n'
            "        dx = tl.exp(x - m) / l - tl.where(column == label, 1.0, 0.0)\n"
            "        dx = tl.where(label == IGNORED, 0.0, dx)\n"
            "        tl.store(x_ptr + column, dx.to(x_ptr.dtype.element_ty), mask=column < V)\n"
            "    x_label = tl.load(x_ptr + label, mask=label != IGNORED, other=0.0).to(tl.float32)\n"
            "    tl.store(loss_ptr + row, tl.where(label == IGNORED, 0.0, m + tl.log(l) - x_label))\n",
            "loss",
            says="after its gradient has overwritten it",
        ),
        "dw of the last chunk": Mistake("dw += logits", "dw = logits", "dw", says="the last chunk only"),
        "mean of a chunk": Mistake(
            "            dx[part] =",
            "            logits *= count / (labels[part] != IGNORED).sum()\n            dx[part] =",
            "dx",
            says="divided by its own rows",
        ),
        "gradient of the loss ignored": Mistake(
            "dloss / count", "1 / count", "dx", count=2, says="of the loss is ignored"
        ),
        "ignored for dw alone": Mistake("dw * (dloss / count)", "dw / count", "dw", says="8 times its correct value"),
        "gradient of the sum": Mistake("dloss / count", "dloss", "dx", count=2, says="gradients of the sum"),
        "all rows count": Mistake(
            "count = (labels != IGNORED).sum()",
            "count = torch.tensor(rows, device=x.device)",
            "loss",
            says="those with an ignored label do not count",
        ),
        "dw in 16 bits": Mistake(
            "torch.zeros(w.shape, dtype=torch.float32, device=w.device)",
            "torch.zeros_like(w)",
            "dw",
            says="summed in 16 bits",
        ),
        "whole logits": Mistake("x[part] @ w.T", "(x @ w.T)[part]", None, "memory", says="the whole logits exist"),
        "logits kept": Mistake(
            "            loss_and_gradient(",
            "            ctx.kept = [*getattr(ctx, 'kept', []), logits]\n            loss_and_gradient(",
            None,
            "memory",
            says="earlier chunks are kept",
        ),
        "labels of the first chunk": Mistake(
            "labels[part], loss", "labels, loss", "loss", says="the labels of the first"
        ),
        "last rows forgotten": Mistake(
            "range(0, rows, CHUNK)", "range(0, rows - CHUNK + 1, CHUNK)", "loss", says="after the last whole chunk"
        ),
        "no label in the gradient": Mistake(
            " - tl.where(column == label, 1.0, 0.0)", "", "dx", says="softmax - 1 at the label"
        ),
        "gradient of an ignored row": Mistake(
            "        dx = tl.where(label == IGNORED, 0.0, dx)\n", "", "dx", says="an ignored label has a gradient"
        ),
        "loss of an ignored row": Mistake(
            "tl.where(label == IGNORED, 0.0, m + tl.log(l) - x_label)",
            "m + tl.log(l) - x_label",
            "loss",
            says="an ignored label has a loss",
        ),
        "maximum forgotten": Mistake("tl.exp(x - m) / l", "tl.exp(x) / l", "dx"),
        "gradient to a tensor of its own": Mistake("x_ptr + column, dx.to", "x_ptr + column, x.to", "dx"),
        "PyTorch's loss": Mistake(
            "            loss_and_gradient(logits, labels[part], loss[part])\n",
            "            wide = logits.float()\n"
            "            loss[part] = torch.nn.functional.cross_entropy(wide, labels[part], reduction='none')\n"
            "            onehot = torch.arange(len(w), device=w.device) == labels[part][:, None]\n"
            "            logits = (wide.softmax(1) - onehot.float()) * (labels[part] != IGNORED)[:, None]\n"
            "            logits = logits.to(x.dtype)\n",
            None,
            "no kernel",
            says="no kernel was launched",
        ),
    },
)
