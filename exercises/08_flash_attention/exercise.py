"""Exercise 08: attention of one head without its scores in memory."""

import math

import triton
import triton.language as tl

BLOCK_Q, BLOCK_K = 32, 16


@triton.jit
def load_tile(ptr, first, T, stride, ROWS: tl.constexpr, D: tl.constexpr):
    """Rows first to first + ROWS of a matrix [T, D] with that row stride; rows from T on read as zero."""
    row = tl.arange(0, ROWS)[:, None]
    tile = ptr + first * tl.cast(stride, tl.int64) + row * stride + tl.arange(0, D)[None, :]
    return tl.load(tile, mask=first + row < T, other=0.0)


@triton.jit
def store_tile(ptr, tile, first, T, stride, ROWS: tl.constexpr, D: tl.constexpr):
    row = tl.arange(0, ROWS)[:, None]
    pointers = ptr + first * tl.cast(stride, tl.int64) + row * stride + tl.arange(0, D)[None, :]
    tl.store(pointers, tile.to(ptr.dtype.element_ty), mask=first + row < T)


@triton.jit
def full_attention_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, T, stride, scale,
    D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program computes BLOCK_Q rows of o [T, D], walking all T keys; T is a multiple of BLOCK_K."""
    first = tl.program_id(0) * BLOCK_Q
    q = load_tile(q_ptr, first, T, stride, BLOCK_Q, D)
    o = tl.zeros([BLOCK_Q, D], tl.float32)
    highest = tl.full([BLOCK_Q], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_Q], tl.float32)
    for start in range(0, T, BLOCK_K):
        k = load_tile(k_ptr, start, T, stride, BLOCK_K, D)
        v = load_tile(v_ptr, start, T, stride, BLOCK_K, D)
        # TODO: take this tile of keys and values into highest [BLOCK_Q], total [BLOCK_Q] and o [BLOCK_Q, D]
        # end of TODO
    # TODO: divide by what is missing and store rows first to first + BLOCK_Q of o
    # end of TODO


def run(q, k, v, o):
    """q, k, v [T, D] -> o [T, D] = softmax(q kᵀ / sqrt(D)) v."""
    T, D = q.shape
    scale = math.log2(math.e) / math.sqrt(D)
    full_attention_kernel[(triton.cdiv(T, BLOCK_Q),)](q, k, v, o, T, q.stride(0), scale, D, BLOCK_Q, BLOCK_K, "ieee")
