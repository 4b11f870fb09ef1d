"""Exercise 10: the gradient of the queries."""

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
def visible(first_query, first_key, QUERIES: tl.constexpr, KEYS: tl.constexpr):
    """Which keys of a tile [QUERIES, KEYS] of scores a query may see: itself and those before it."""
    return first_query + tl.arange(0, QUERIES)[:, None] >= first_key + tl.arange(0, KEYS)[None, :]


@triton.jit
def dq_step(
    dq, q, do, lse, delta, k_ptr, v_ptr, first, start, T, stride, scale,
    DIAGONAL: tl.constexpr, D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add one tile of keys to dq [BLOCK_Q, D]."""
    k = load_tile(k_ptr, start, T, stride, BLOCK_K, D)
    v = load_tile(v_ptr, start, T, stride, BLOCK_K, D)
    S = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    P = tl.exp2(S * scale - lse[:, None])
    if DIAGONAL:
        P = tl.where(visible(first, start, BLOCK_Q, BLOCK_K), P, 0.0)
    dS = P * (tl.dot(do, tl.trans(v), input_precision=PRECISION) - delta[:, None])
    return tl.dot(dS.to(k.dtype), k, dq, input_precision=PRECISION)


@triton.jit
def dq_kernel(
    qkv_ptr, o_ptr, do_ptr, lse_ptr, delta_ptr, dqkv_ptr, T, stride_b, stride_t, stride_o, stride_db, stride_dt, scale,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One program computes BLOCK_Q rows of dq for one query head, and leaves their Δ for the other backward kernel."""
    first = (tl.num_programs(1) - 1 - tl.program_id(1)) * BLOCK_Q
    b, h = (tl.program_id(0) // H).to(tl.int64), tl.program_id(0) % H
    k_ptr = qkv_ptr + b * stride_b + (H + h // (H // K)) * D
    v_ptr = k_ptr + K * D
    q = load_tile(qkv_ptr + b * stride_b + h * D, first, T, stride_t, BLOCK_Q, D)
    do = load_tile(do_ptr + b * T * stride_o + h * D, first, T, stride_o, BLOCK_Q, D)
    o = load_tile(o_ptr + b * T * stride_o + h * D, first, T, stride_o, BLOCK_Q, D)
    row = first + tl.arange(0, BLOCK_Q)
    statistics = tl.program_id(0).to(tl.int64) * T + row
    delta = tl.sum(do.to(tl.float32) * o.to(tl.float32), 1)
    tl.store(delta_ptr + statistics, delta, mask=row < T)
    lse = tl.load(lse_ptr + statistics, mask=row < T, other=0.0)
    dq = tl.zeros([BLOCK_Q, D], tl.float32)
    for start in range(0, first, BLOCK_K):
        dq = dq_step(
            dq, q, do, lse, delta, k_ptr, v_ptr, first, start, T, stride_t, scale, False, D, BLOCK_Q, BLOCK_K, PRECISION
        )
    for start in range(first, min(first + BLOCK_Q, T), BLOCK_K):
        dq = dq_step(
            dq, q, do, lse, delta, k_ptr, v_ptr, first, start, T, stride_t, scale, True, D, BLOCK_Q, BLOCK_K, PRECISION
        )
    # scale is log2(e) / sqrt(D), and the derivative wants 1 / sqrt(D)
    store_tile(dqkv_ptr + b * stride_db + h * D, dq * (scale * 0.6931471805599453), first, T, stride_dt, BLOCK_Q, D)


def run(qkv, o, do, lse, H, K, delta, dqkv):
    """The dq part of dqkv (like qkv [B, T, H + 2K, D]) and delta [B, H, T] from do, o [B, T, H, D], lse [B, H, T]."""
    B, T, _, D = qkv.shape
    strides = (qkv.stride(0), qkv.stride(1), H * D, dqkv.stride(0), dqkv.stride(1))
    scale = math.log2(math.e) / math.sqrt(D)
    dq_kernel[(B * H, triton.cdiv(T, BLOCK_Q))](
        qkv, o, do, lse, delta, dqkv, T, *strides, scale, H, K, D, BLOCK_Q, BLOCK_K, "ieee"
    )
