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
    # TODO: loop over the query heads h that read this key/value head, and over the tiles of queries that see
    # these keys; add to dk and dv [BLOCK_K, D]; then scale and store dk at k_offset, and dv K heads further
    # end of TODO


def run(qkv, do, lse, delta, H, K, dqkv):
    """Write dk and dv into dqkv (like qkv [B, T, H + 2K, D]) for do [B, T, H, D] and lse, delta [B, H, T]."""
    B, T, _, D = qkv.shape
    scale = math.log2(math.e) / math.sqrt(D)
    dkdv_kernel[(B * K, triton.cdiv(T, BLOCK_K))](
        qkv, do, lse, delta, dqkv, T, scale, H, K, D, "ieee", BLOCK_Q, BLOCK_K, num_stages=1
    )
