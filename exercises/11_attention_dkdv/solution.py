"""Exercise 11: the gradients of keys and values that several query heads share."""

import math

import triton
import triton.language as tl

BLOCK_Q, BLOCK_K = 16, 32


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
def dkdv_kernel(
    qkv_ptr, do_ptr, lse_ptr, delta_ptr, dqkv_ptr, T, scale,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_K rows of dk and dv of one key/value head per program: no atomics. Scores are transposed."""
    tl.static_assert(BLOCK_K % BLOCK_Q == 0)
    STRIDE: tl.constexpr = (H + 2 * K) * D
    first = tl.program_id(1) * BLOCK_K
    b, kv = (tl.program_id(0) // K).to(tl.int64), tl.program_id(0) % K
    k_offset = b * T * STRIDE + (H + kv) * D
    k = load_tile(qkv_ptr + k_offset, first, T, STRIDE, BLOCK_K, D)
    v = load_tile(qkv_ptr + k_offset + K * D, first, T, STRIDE, BLOCK_K, D)
    dk, dv = tl.zeros([BLOCK_K, D], tl.float32), tl.zeros([BLOCK_K, D], tl.float32)
    key = first + tl.arange(0, BLOCK_K)
    for h in range(kv * (H // K), (kv + 1) * (H // K)):  # every query head that reads this key/value head
        q_ptr = qkv_ptr + b * T * STRIDE + h * D
        o_offset, lse_offset = (b * T * H + h) * D, (b * H + h) * T
        for BELOW in tl.static_range(2):  # tiles below the diagonal need no mask
            for start in range(first + BELOW * BLOCK_K, T if BELOW else min(first + BLOCK_K, T), BLOCK_Q):
                q = load_tile(q_ptr, start, T, STRIDE, BLOCK_Q, D)
                query = start + tl.arange(0, BLOCK_Q)
                lse = tl.load(lse_ptr + lse_offset + query, mask=query < T, other=0.0)
                delta = tl.load(delta_ptr + lse_offset + query, mask=query < T, other=0.0)
                P = tl.exp2(tl.dot(k, tl.trans(q), input_precision=PRECISION) * scale - lse[None, :])
                if not BELOW:
                    P = tl.where(key[:, None] <= query[None, :], P, 0.0)
                do = load_tile(do_ptr + o_offset, start, T, H * D, BLOCK_Q, D)
                dv = tl.dot(P.to(do.dtype), do, dv, input_precision=PRECISION)
                dS = P * (tl.dot(v, tl.trans(do), input_precision=PRECISION) - delta[None, :])
                dk = tl.dot(dS.to(q.dtype), q, dk, input_precision=PRECISION)
    store_tile(dqkv_ptr + k_offset, dk * (scale * 0.6931471805599453), first, T, STRIDE, BLOCK_K, D)
    store_tile(dqkv_ptr + k_offset + K * D, dv, first, T, STRIDE, BLOCK_K, D)


def run(qkv, do, lse, delta, H, K, dqkv):
    """Write dk and dv into dqkv (like qkv [B, T, H + 2K, D]) for do [B, T, H, D] and lse, delta [B, H, T]."""
    B, T, _, D = qkv.shape
    scale = math.log2(math.e) / math.sqrt(D)
    dkdv_kernel[(B * K, triton.cdiv(T, BLOCK_K))](
        qkv, do, lse, delta, dqkv, T, scale, H, K, D, "ieee", BLOCK_Q, BLOCK_K, num_stages=1
    )
