"""Exercise 22: causal attention of one head, for any number of tokens."""

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
def causal_attention_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, T, scale,
    D: tl.constexpr, PRECISION: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_Q rows of o [T, D] per program in a loop over the keys up to the diagonal."""
    first = tl.program_id(0) * BLOCK_Q
    q = load_tile(q_ptr, first, T, D, BLOCK_Q, D)
    o = tl.zeros([BLOCK_Q, D], tl.float32)
    m, l = tl.full([BLOCK_Q], -float("inf"), tl.float32), tl.zeros([BLOCK_Q], tl.float32)
    query, key = first + tl.arange(0, BLOCK_Q), tl.arange(0, BLOCK_K)
    # TODO: set end, the position of the first key that no query of this tile sees
    # end of TODO
    for start in range(0, end, BLOCK_K):
        k = load_tile(k_ptr, start, T, D, BLOCK_K, D)
        v = load_tile(v_ptr, start, T, D, BLOCK_K, D)
        S = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        # TODO: mask S [BLOCK_Q, BLOCK_K]: a query sees its own key and those before it
        # end of TODO
        m_new = tl.maximum(m, tl.max(S, 1))
        P = tl.exp2(S * scale - (m_new * scale)[:, None])
        alpha = tl.exp2((m - m_new) * scale)
        o = tl.dot(P.to(v.dtype), v, o * alpha[:, None], input_precision=PRECISION)
        m, l = m_new, l * alpha + tl.sum(P, 1)
    store_tile(o_ptr, o / l[:, None], first, T, D, BLOCK_Q, D)


def run(q, k, v, o):
    """Write o [T, D] = softmax(q kᵀ / sqrt(D) under a causal mask) v for q, k, v [T, D]."""
    T, D = q.shape
    scale = math.log2(math.e) / math.sqrt(D)
    causal_attention_kernel[(triton.cdiv(T, BLOCK_Q),)](q, k, v, o, T, scale, D, "ieee", BLOCK_Q, BLOCK_K)
