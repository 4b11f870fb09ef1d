"""Exercise 10: the gradient of the queries."""

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
def dq_kernel(
    qkv_ptr, o_ptr, do_ptr, lse_ptr, delta_ptr, dqkv_ptr, T, scale,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_Q rows of dq for one head per program, and their Δ for the dk/dv kernel."""
    tl.static_assert(BLOCK_Q % BLOCK_K == 0)
    STRIDE: tl.constexpr = (H + 2 * K) * D
    first = (tl.num_programs(1) - 1 - tl.program_id(1)) * BLOCK_Q
    b, h = (tl.program_id(0) // H).to(tl.int64), tl.program_id(0) % H
    q_offset, o_offset = b * T * STRIDE + h * D, (b * T * H + h) * D
    k_ptr = qkv_ptr + b * T * STRIDE + (H + h // (H // K)) * D
    v_ptr = k_ptr + K * D
    q = load_tile(qkv_ptr + q_offset, first, T, STRIDE, BLOCK_Q, D)
    o = load_tile(o_ptr + o_offset, first, T, H * D, BLOCK_Q, D)
    do = load_tile(do_ptr + o_offset, first, T, H * D, BLOCK_Q, D)
    query, key = first + tl.arange(0, BLOCK_Q), tl.arange(0, BLOCK_K)
    row = tl.program_id(0).to(tl.int64) * T + query
    lse = tl.load(lse_ptr + row, mask=query < T, other=0.0)
    # TODO: compute delta [BLOCK_Q] of these rows in float32, and store it at delta_ptr + row
    # end of TODO
    dq = tl.zeros([BLOCK_Q, D], tl.float32)
    for DIAGONAL in tl.static_range(2):
        for start in range(DIAGONAL * first, min(first + DIAGONAL * BLOCK_Q, T), BLOCK_K):
            k = load_tile(k_ptr, start, T, STRIDE, BLOCK_K, D)
            v = load_tile(v_ptr, start, T, STRIDE, BLOCK_K, D)
            # TODO: recompute P from the saved lse, 0 where a query must not see the key; add dS k to dq
            # end of TODO
    # TODO: scale dq, and store it at head h of dqkv
    # end of TODO


def run(qkv, o, do, lse, H, K, delta, dqkv):
    """Write dq into dqkv (like qkv [B, T, H + 2K, D]) and delta [B, H, T] for o, do [B, T, H, D], lse [B, H, T]."""
    B, T, _, D = qkv.shape
    scale = math.log2(math.e) / math.sqrt(D)
    dq_kernel[(B * H, triton.cdiv(T, BLOCK_Q))](
        qkv, o, do, lse, delta, dqkv, T, scale, H, K, D, "ieee", BLOCK_Q, BLOCK_K
    )
