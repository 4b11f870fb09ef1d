"""Exercise 08: attention of one head without its scores in memory."""

import math

import triton
import triton.language as tl

BLOCK_Q, BLOCK_K = 32, 16


@triton.jit
def load_tile(ptr, first, T, STRIDE: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr):
    """Load rows first to first + ROWS of a matrix [T, D]; rows from T on read as zero."""
    row = tl.arange(0, ROWS)[:, None]
    pointers = ptr + first * tl.cast(STRIDE, tl.int64) + row * STRIDE + tl.arange(0, D)[None, :]
    return tl.load(pointers, mask=first + row < T, other=0.0)


@triton.jit
def store_tile(ptr, tile, first, T, STRIDE: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr):
    row = tl.arange(0, ROWS)[:, None]
    pointers = ptr + first * tl.cast(STRIDE, tl.int64) + row * STRIDE + tl.arange(0, D)[None, :]
    tl.store(pointers, tile.to(ptr.dtype.element_ty), mask=first + row < T)


@triton.jit
def full_attention_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, T, scale,
    D: tl.constexpr, PRECISION: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_Q rows of o [T, D] per program in a loop over all T keys; T is a multiple of BLOCK_K."""
    first = tl.program_id(0) * BLOCK_Q
    q = load_tile(q_ptr, first, T, D, BLOCK_Q, D)
    o = tl.zeros([BLOCK_Q, D], tl.float32)
    m, l = tl.full([BLOCK_Q], -float("inf"), tl.float32), tl.zeros([BLOCK_Q], tl.float32)
    for start in range(0, T, BLOCK_K):
        k = load_tile(k_ptr, start, T, D, BLOCK_K, D)
        v = load_tile(v_ptr, start, T, D, BLOCK_K, D)
        # TODO: update m [BLOCK_Q], l [BLOCK_Q] and o [BLOCK_Q, D] with this tile of keys and values
        # end of TODO
    # TODO: finish o and store it as rows first to first + BLOCK_Q
    # end of TODO


def run(q, k, v, o):
    """Write o [T, D] = softmax(q kᵀ / sqrt(D)) v for q, k, v [T, D]."""
    T, D = q.shape
    scale = math.log2(math.e) / math.sqrt(D)
    full_attention_kernel[(triton.cdiv(T, BLOCK_Q),)](q, k, v, o, T, scale, D, "ieee", BLOCK_Q, BLOCK_K)
