"""GPU only: equal bits, long training, more than 2^31 elements; of these the addresses without one, too."""

import math
import re
from unittest import mock

import numpy as np
import pytest
import torch
import triton.language as tl
from test_mutants import Mutant, load_source, mutate, tree
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from common.versions import SCRIPTS, load_version
from kernel_cases import Wrong
from marks import slow
from training import tensors, train

V3 = load_version(3)
GB = 2**30
LIMIT = 2**31  # elements that a 32-bit index can tell apart
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
in_interpreter = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs one program alone")
PRECISIONS = ("", "--tf32", "--use-amp", "--use-amp --amp-dtype float16")


# ---------------------------------------------------------------- two runs, the same bits


def short_run(version, argv):
    """Return the losses of five steps, and the tensors that training ends with."""
    losses, trainer = train(version, argv, steps=5)
    assert DEVICE == "cpu" or trainer.config.graph == (trainer.graph is not None), trainer.graph_reason
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


# ---------------------------------------------------------------- addresses beyond that limit, which need no memory

ROWS, COLUMNS, TOKENS, HEADS, PART = 8, 3000, 64, 2**14, 1024
HALF, WIDE, LABELS = torch.zeros(1, dtype=torch.float16), torch.zeros(1), torch.zeros(1, dtype=torch.int64)
ROW_KERNELS = {  # and their arguments before the number of rows
    "rmsnorm_forward_kernel": (HALF, HALF, WIDE, HALF, HALF, WIDE, 1e-6),
    "rmsnorm_backward_kernel": (HALF, HALF, HALF, WIDE, WIDE, HALF, WIDE),
    "rope_kernel": (HALF, HALF, WIDE, WIDE, 1.0, 1, 4, 3),
    "swiglu_forward_kernel": (HALF, HALF),
    "swiglu_backward_kernel": (HALF, HALF, HALF),
    "cross_entropy_forward_kernel": (HALF, LABELS, WIDE, WIDE, WIDE),
    "cross_entropy_backward_kernel": (HALF, LABELS, WIDE, WIDE, WIDE, HALF),
    "quantize_rows_kernel": (HALF, WIDE, HALF, WIDE, 448.0),
    "swiglu_quantize_kernel": (HALF, HALF, WIDE, 448.0),
    "swiglu_backward_quantize_kernel": (HALF, HALF, WIDE, HALF, WIDE, 448.0),
    "transpose_kernel": (HALF, HALF, WIDE, WIDE, WIDE),
}
ATTENTION_KERNELS = {  # and their arguments before the number of tokens
    "attention_forward_kernel": (HALF, HALF, WIDE),
    "attention_backward_dq_kernel": (HALF, HALF, HALF, WIDE, WIDE, HALF, None, None),
    "attention_backward_dkdv_kernel": (HALF, HALF, WIDE, WIDE, HALF, None, None),
}


def addresses(kernel, program, programs, arguments, constants):
    """Run one program of a kernel; return the addresses of each load and store, 0 where its mask is false.

    Nothing is stored, and a load with a mask gives zeros: no memory has to be there.
    """
    seen = []
    load = InterpreterBuilder.create_masked_load

    def note(pointers, mask):
        seen.append(np.where(mask.data, pointers.data, 0).astype(np.int64))

    def load_zeros(builder, pointers, mask, other, *rest):
        note(pointers, mask)
        return load(builder, pointers, TensorHandle(np.zeros_like(mask.data), tl.int1), None, *rest)

    def load_all(builder, pointers, *rest):
        return load(builder, pointers, TensorHandle(np.ones_like(pointers.data, bool), tl.int1), None, *rest)

    stubs = {
        "create_load": load_all,
        "create_masked_load": load_zeros,
        "create_masked_store": lambda builder, pointers, value, mask, *rest: note(pointers, mask),
        "set_grid_dim": lambda builder, *sizes: setattr(builder, "grid_dim", programs),
        "set_grid_idx": lambda builder, *place: setattr(builder, "grid_idx", program),
    }
    with mock.patch.multiple(InterpreterBuilder, **stubs):
        kernel[(1,)](*arguments, **constants)
    return seen


def of_rows(kernel, i, count):
    """Return the addresses of program i, which takes ROWS of count · ROWS rows."""
    arguments = (*ROW_KERNELS[kernel.__name__], count * ROWS, COLUMNS)
    return addresses(kernel, (i, 0, 0), (count, 1, 1), arguments, {"ROWS": ROWS, "BLOCK": 4096})


def of_attention(kernel, program, programs, tokens, heads):
    constants = {"H": heads, "K": heads, "D": 16, "PRECISION": "ieee", "BLOCK_Q": TOKENS, "BLOCK_K": TOKENS}
    return addresses(kernel, program, programs, (*ATTENTION_KERNELS[kernel.__name__], tokens, 0.1), constants)


def of_sequences(kernel, i, count):
    """Return the addresses of sequence i."""
    return of_attention(kernel, (i, 0, 0), (count, 1, 1), TOKENS, 1)


def of_tokens(kernel, i, count):
    """Return the first and the last two addresses of block i: between them is a loop over the others."""
    block = i if "dkdv" in kernel.__name__ else count - 1 - i  # the others begin with the last tokens
    found = of_attention(kernel, (0, block, 0), (1, count, 1), count * TOKENS, HEADS)
    return [found[0], *found[-2:]]


def of_elements(kernel, i, count):
    """Return the addresses of part i of a parameter."""
    table = torch.tensor([[2**44, 2**45, 2**46, 2**47, 2**43, count * PART]])  # each tensor has an address of its own
    pointers = (table, torch.tensor([0, i], dtype=torch.int32), torch.tensor([0.9, 0.999], dtype=torch.float64))
    numbers = (1e-3, 1.0, 0.9, 0.1, 0.999, 0.001, 1e-8)
    return addresses(kernel, (0, 0, 0), (1, 1, 1), (*pointers, None, None, *numbers, tl.float16, True, PART), {})


# Way through a tensor -> the elements of a step, of the smallest large tensor.
STEPS = {of_rows: ROWS * COLUMNS, of_sequences: TOKENS, of_tokens: TOKENS * HEADS * 16, of_elements: PART}
WALKS = [(name, of_rows) for name in ROW_KERNELS]
WALKS += [(name, of_sequences) for name in ATTENTION_KERNELS] + [("adamw_kernel", of_elements)]
WALKS += [slow(name, of_tokens) for name in ATTENTION_KERNELS]  # seconds each


def test_every_kernel_has_its_walk():
    kernels = set(re.findall(r"^def (\w+_kernel)\(", SCRIPTS[3].read_text(), re.MULTILINE))
    # The sums of columns are of few rows, and the sizes of a quantized weight are int64 in its table.
    others = {"column_sum_kernel", "quantize_weights_kernel"}
    assert kernels - others == {*ROW_KERNELS, *ATTENTION_KERNELS, "adamw_kernel"}


def check_addresses(script, name, walk):
    """Raise Wrong unless a program's addresses are as many steps from those of the first as its number says."""
    kernel = getattr(script, name)
    far = (LIMIT + LIMIT // 2) // STEPS[walk]
    last = 0
    for first, second, wanted in zip(*(walk(kernel, i, far + 1) for i in (0, 1, far)), strict=True):
        if not np.array_equal(wanted - first, far * (second - first)):
            raise Wrong(f"{name}: addresses overflow")
        last = max(last, int((wanted - first).max()))
    assert last > 2 * LIMIT  # bytes


@in_interpreter
@pytest.mark.parametrize(("name", "walk"), WALKS)
def test_addresses_beyond_the_limit(name, walk):
    check_addresses(V3, name, walk)


TILE_ROWS = "(tl.program_id(0) * ROWS + tl.arange(0, ROWS))"
SEQUENCE = {"attention_forward_kernel": "H", "attention_backward_dq_kernel": "H", "attention_backward_dkdv_kernel": "K"}
INT64 = {  # kernel -> what is converted to int64 in it
    "rmsnorm_forward_kernel": "row[:, None]",
    "rmsnorm_backward_kernel": "row[:, None]",
    "rope_kernel": "row",
    "swiglu_forward_kernel": TILE_ROWS,
    "swiglu_backward_kernel": TILE_ROWS,
    "cross_entropy_forward_kernel": "row",
    "cross_entropy_backward_kernel": "row",
    "quantize_rows_kernel": "row",
    "swiglu_quantize_kernel": TILE_ROWS,
    "swiglu_backward_quantize_kernel": TILE_ROWS,
    "transpose_kernel": "tl.arange(0, ROWS)",
    "adamw_kernel": "tl.load(chunk_ptr + 1)",
}
MUTANTS = {(name, of_rows): Mutant(name, f"{code}.to(tl.int64)", code) for name, code in INT64.items()}
MUTANTS["adamw_kernel", of_elements] = MUTANTS.pop(("adamw_kernel", of_rows))
for name, heads in SEQUENCE.items():
    first = f"(tl.program_id(0) // {heads})"
    MUTANTS[name, of_sequences] = Mutant(name, f"{first}.to(tl.int64)", first)
    tile = "store_tile" if heads == "K" else "load_tile"
    MUTANTS[name, of_tokens] = Mutant(tile, "tl.cast(STRIDE, tl.int64)", "STRIDE")


@in_interpreter
@pytest.mark.parametrize(("name", "walk"), MUTANTS)
@pytest.mark.quick(2)
def test_32_bit_addresses_are_caught(name, walk, tmp_path):
    mutant = load_source(mutate(tree(), MUTANTS[name, walk]), tmp_path)
    with pytest.raises(Wrong):
        check_addresses(mutant, name, walk)
