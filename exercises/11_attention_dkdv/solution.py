"""Exercise 11: the gradients of keys and values that several query heads share."""

import math

import triton
import triton.language as tl

BLOCK_Q, BLOCK_K = 16, 32


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
def dkdv_step(
    dk, dv, k, v, q_ptr, do_ptr, lse_ptr, delta_ptr, first, start, T, stride, stride_o, scale,
    DIAGONAL: tl.constexpr, D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add one tile of queries to dk and dv [BLOCK_K, D]; scores are kept transposed, [BLOCK_K, BLOCK_Q]."""
    q = load_tile(q_ptr, start, T, stride, BLOCK_Q, D)
    do = load_tile(do_ptr, start, T, stride_o, BLOCK_Q, D)
    row = start + tl.arange(0, BLOCK_Q)
    lse = tl.load(lse_ptr + row, mask=row < T, other=0.0)
    delta = tl.load(delta_ptr + row, mask=row < T, other=0.0)
    P = tl.exp2(tl.dot(k, tl.trans(q), input_precision=PRECISION) * scale - lse[None, :])
    if DIAGONAL:
        P = tl.where(first + tl.arange(0, BLOCK_K)[:, None] <= row[None, :], P, 0.0)
    dv = tl.dot(P.to(do.dtype), do, dv, input_precision=PRECISION)
    dS = P * (tl.dot(v, tl.trans(do), input_precision=PRECISION) - delta[None, :])
    return tl.dot(dS.to(q.dtype), q, dk, input_precision=PRECISION), dv


@triton.jit
def dkdv_kernel(
    qkv_ptr, do_ptr, lse_ptr, delta_ptr, dqkv_ptr, T, stride_b, stride_t, stride_o, stride_db, stride_dt, scale,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One program owns BLOCK_K rows of dk and dv of one key/value head, so that nothing is added with atomics."""
    first = tl.program_id(1) * BLOCK_K
    b, kv = (tl.program_id(0) // K).to(tl.int64), tl.program_id(0) % K
    k_ptr = qkv_ptr + b * stride_b + (H + kv) * D
    k = load_tile(k_ptr, first, T, stride_t, BLOCK_K, D)
    v = load_tile(k_ptr + K * D, first, T, stride_t, BLOCK_K, D)
    dk = tl.zeros([BLOCK_K, D], tl.float32)
    dv = tl.zeros([BLOCK_K, D], tl.float32)
    for h in range(kv * (H // K), (kv + 1) * (H // K)):  # every query head that reads this key/value head
        q_ptr = qkv_ptr + b * stride_b + h * D
        o_offset = b * T * stride_o + h * D
        statistics = (b * H + h) * T
        for start in range(first, min(first + BLOCK_K, T), BLOCK_Q):
            dk, dv = dkdv_step(
                dk, dv, k, v, q_ptr, do_ptr + o_offset, lse_ptr + statistics, delta_ptr + statistics,
                first, start, T, stride_t, stride_o, scale, True, D, BLOCK_Q, BLOCK_K, PRECISION,
            )  # fmt: skip
        for start in range(first + BLOCK_K, T, BLOCK_Q):
            dk, dv = dkdv_step(
                dk, dv, k, v, q_ptr, do_ptr + o_offset, lse_ptr + statistics, delta_ptr + statistics,
                first, start, T, stride_t, stride_o, scale, False, D, BLOCK_Q, BLOCK_K, PRECISION,
            )  # fmt: skip
    dk_ptr = dqkv_ptr + b * stride_db + (H + kv) * D
    store_tile(dk_ptr, dk * (scale * 0.6931471805599453), first, T, stride_dt, BLOCK_K, D)
    store_tile(dk_ptr + K * D, dv, first, T, stride_dt, BLOCK_K, D)


def run(qkv, do, lse, delta, H, K, dqkv):
    """The dk and dv parts of dqkv (like qkv [B, T, H + 2K, D]) from do [B, T, H, D] and lse, delta [B, H, T]."""
    B, T, _, D = qkv.shape
    strides = (qkv.stride(0), qkv.stride(1), H * D, dqkv.stride(0), dqkv.stride(1))
    scale = math.log2(math.e) / math.sqrt(D)
    dkdv_kernel[(B * K, triton.cdiv(T, BLOCK_K))](
        qkv, do, lse, delta, dqkv, T, *strides, scale, H, K, D, BLOCK_Q, BLOCK_K, "ieee", num_stages=2
    )
