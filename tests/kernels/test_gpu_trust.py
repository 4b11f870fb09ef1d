"""GPU only: equal bits, long training, more than 2^31 elements."""

import math

import numpy as np
import pytest
import torch

from common.versions import load_version
from training import tensors, train

V3 = load_version(3)
GB = 2**30
LIMIT = 2**31  # elements that a 32-bit index can tell apart
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PRECISIONS = ("", "--tf32", "--use-amp", "--use-amp --amp-dtype float16")


# ---------------------------------------------------------------- two runs, the same bits


def short_run(version, argv):
    """Return the losses of five steps, and the tensors that training ends with."""
    losses, trainer = train(version, argv, steps=5)
    assert DEVICE == "cpu" or trainer.options.graph == (trainer.graph is not None), trainer.graph_reason
    found = tensors(load_version(version), trainer)
    return losses, {f"{kind} {name}": tensor for kind, named in found.items() for name, tensor in named.items()}


GRAPH_OR_NOT = [f"{graph} {precision}" for graph in ("--graph", "--no-graph") for precision in PRECISIONS]


@pytest.mark.parametrize(
    ("version", "options"),
    [
        (1, "--validate-setup"),
        *(pytest.param(version, "--preset small --use-amp --no-graph", marks=pytest.mark.gpu) for version in (1, 2, 4)),
        *(pytest.param(3, f"--preset small {options}", marks=pytest.mark.gpu) for options in GRAPH_OR_NOT),
    ],
)
def test_two_runs_give_the_same_bits(version, options):
    losses, first = short_run(version, [*options.split(), "--deterministic"])
    filler = torch.empty(123457, device=DEVICE)  # moves the tensors of the second run
    losses_again, second = short_run(version, [*options.split(), "--deterministic"])
    del filler
    assert losses == losses_again and len(set(losses)) == 5
    assert not [name for name in first if not torch.equal(first[name], second[name])]


# ---------------------------------------------------------------- a thousand steps

STEPS, WINDOW = 1000, 50


def smoothed_losses(version, *argv):
    """Return the means of the losses of WINDOW steps each."""
    losses, _ = train(version, ["--preset", "tiny", "--graph", *argv], STEPS)
    return np.reshape(losses, (-1, WINDOW)).mean(1)


def strays(losses, reference, spread):
    """Return the windows in which a run strays from the reference.

    Both runs see the same batches and start from the same weights: only rounding differs. It may move a loss by half
    of what another seed does, or by 0.5 % where all seeds agree. A lost gradient or update costs many times that.
    """
    allowed = np.maximum(spread / 2, 0.005 * reference)
    return np.flatnonzero(np.abs(losses - reference) > allowed).tolist()


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_thousand_bfloat16_steps_stay_with_float32():
    runs = np.stack([smoothed_losses(1, "--no-deterministic", "--seed", seed) for seed in "012"])
    reference, spread = runs[0], np.ptp(runs, axis=0)
    assert reference[-1] < 0.5 * reference[0] and len(reference) == STEPS // WINDOW
    for version in (3, 4):
        losses = smoothed_losses(version, "--use-amp")
        assert not strays(losses, reference, spread), f"version {version}: {losses}, {reference}, {spread}"


def test_straying_losses_are_seen():
    reference, spread = np.linspace(6, 1.3, 20), np.full(20, 0.1)
    assert not strays(reference + 0.04, reference, spread) and not strays(reference * 1.004, reference, 0 * spread)
    assert strays(reference + 0.07, reference, spread) == list(range(20))
    assert strays(np.where(np.arange(20) == 7, reference - 0.1, reference), reference, spread) == [7]


# ---------------------------------------------------------------- more than 2^31 elements


def leaf(*shape, copies):
    """Return a bfloat16 leaf on the GPU; skip the test where this many of its size have no room."""
    torch.cuda.empty_cache()
    needed, free = 2 * copies * math.prod(shape), torch.cuda.mem_get_info()[0]
    if free < needed:
        pytest.skip(f"needs {needed / GB:.0f} GB of free GPU memory, there are {free / GB:.0f}")
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)


def probes(rows, width):
    """Return slices of three rows: the first, those around each 2^31st element, the last."""
    borders = [LIMIT * i // width for i in range(1, rows * width // LIMIT + 1)]
    starts = [max(0, min(row, rows - 3)) for row in (0, *(border - 1 for border in borders), rows)]
    return [slice(start, start + 3) for start in starts]


def test_probes_lie_around_the_limit():
    assert probes(10, LIMIT // 4) == [slice(0, 3), slice(3, 6), slice(7, 10), slice(7, 10)]


C, T, D = 4096, 128, 128
INDEPENDENT_ROWS = {  # operation -> its call, and the shape of a row
    "add_rms_norm": (lambda x: V3.add_rms_norm(x, x, torch.ones(C, device="cuda"), 1e-6)[1], (C,)),
    "packed_swiglu": (lambda x: V3.packed_swiglu(x), (C,)),
    "rope": (lambda x: V3.rope(x, *V3.rope_tables(T, D, 10000.0, "cuda"), 12), (T, 16, D)),
    "flash_attention": (lambda x: V3.flash_attention(x, 4, 2), (T, 8, D)),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", INDEPENDENT_ROWS)
def test_rows_beyond_the_limit(name):
    """Every row and its gradient are what they are alone, bit by bit."""
    operation, shape = INDEPENDENT_ROWS[name]
    count = LIMIT // math.prod(shape) + 5
    x = leaf(count, *shape, copies=14)
    y = operation(x)
    dy = torch.randn_like(y)
    y.backward(dy)
    for part in probes(count, math.prod(shape)) + probes(count, y[0].numel()):
        alone = x.detach()[part].clone().requires_grad_()
        y_alone = operation(alone)
        y_alone.backward(dy[part])
        assert y_alone.count_nonzero() > 0.9 * y_alone.numel()
        assert torch.equal(y[part], y_alone) and torch.equal(x.grad[part], alone.grad), part


@pytest.mark.gpu
def test_cross_entropy_beyond_the_limit():
    V = 128256
    rows = LIMIT // V + 7
    logits, labels = leaf(rows, V, copies=5), torch.randint(V, (rows,), device="cuda")
    labels[-3:] = V - 1
    V3.cross_entropy(logits, labels).backward()
    for part in probes(rows, V):
        alone = logits.detach()[part].clone().requires_grad_()
        V3.cross_entropy(alone, labels[part]).backward()
        # The mean over all rows instead of three: a factor that bfloat16 rounds elsewhere, by one part in 2^8 at most.
        assert torch.allclose(logits.grad[part].float() * (rows / 3), alone.grad.float(), rtol=2**-7, atol=1e-12)


@pytest.mark.gpu
def test_adamw_beyond_the_limit():
    count = LIMIT + 4100
    big = torch.nn.Parameter(leaf(count, copies=13).detach().float())
    parts = (slice(0, 4096), slice(LIMIT - 2048, LIMIT + 2048), slice(count - 4096, count))
    small = [torch.nn.Parameter(big.detach()[part].clone()) for part in parts]
    big.grad = torch.randn_like(big)
    V3.FusedAdamW([big], lr=1e-2).step()
    for parameter, part in zip(small, parts, strict=True):
        parameter.grad = big.grad[part].clone()
        before = parameter.detach().clone()
        V3.FusedAdamW([parameter], lr=1e-2).step()
        assert torch.equal(big.detach()[part], parameter) and not torch.equal(before, parameter)
