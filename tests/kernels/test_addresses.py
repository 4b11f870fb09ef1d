"""Addresses of kernels where tensors have more than 2^31 elements, in the interpreter and without their memory.

One far program of a kernel runs alone; of its loads and stores only the addresses are kept.
"""

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

V3 = load_version(3)
LIMIT = 2**31  # elements that a 32-bit index can tell apart
in_interpreter = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs one program alone")

ROWS, COLUMNS, TOKENS, HEADS, PART = 8, 3000, 64, 2**14, 1024
HALF, WIDE, LABELS = torch.zeros(1, dtype=torch.float16), torch.zeros(1), torch.zeros(1, dtype=torch.int64)
ROW_KERNELS = {  # and their arguments before the number of rows
    "rmsnorm_forward_kernel": (HALF, HALF, WIDE, HALF, HALF, WIDE, 1e-6),
    "rmsnorm_backward_kernel": (HALF, HALF, HALF, WIDE, WIDE, HALF, WIDE),
    "rope_kernel": (HALF, HALF, WIDE, WIDE, 1.0, 1, 4, 3),
    "swiglu_forward_kernel": (HALF, HALF),
    "swiglu_backward_kernel": (HALF, HALF, HALF),
    "cross_entropy_forward_kernel": (HALF, LABELS, WIDE, WIDE, WIDE, WIDE),
    "cross_entropy_backward_kernel": (HALF, LABELS, WIDE, WIDE, WIDE, WIDE, HALF),
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
STEP_SIZES = {of_rows: ROWS * COLUMNS, of_sequences: TOKENS, of_tokens: TOKENS * HEADS * 16, of_elements: PART}
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
    far = (LIMIT + LIMIT // 2) // STEP_SIZES[walk]
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
