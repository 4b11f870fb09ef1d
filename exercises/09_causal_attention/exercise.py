"""Exercise 09: causal attention of grouped heads, for any number of tokens."""

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
    # TODO: a tile [QUERIES, KEYS] of booleans: query first_query + i sees keys up to its own position
    # end of TODO


@triton.jit
def attend(
    o, highest, total, q, k_ptr, v_ptr, first, start, T, stride, scale,
    DIAGONAL: tl.constexpr, D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Take one tile of keys into the running sums of a tile of queries (online softmax)."""
    k = load_tile(k_ptr, start, T, stride, BLOCK_K, D)
    S = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    # TODO: on the diagonal, let what a query may not see count for nothing
    # end of TODO
    raised = tl.maximum(highest, tl.max(S, 1))
    P = tl.exp2(S * scale - (raised * scale)[:, None])
    shrink = tl.exp2((highest - raised) * scale)
    v = load_tile(v_ptr, start, T, stride, BLOCK_K, D)
    o = tl.dot(P.to(v.dtype), v, o * shrink[:, None], input_precision=PRECISION)
    return o, raised, total * shrink + tl.sum(P, 1)


@triton.jit
def attention_forward_kernel(
    qkv_ptr, o_ptr, lse_ptr, T, stride_b, stride_t, stride_o, scale,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One program computes BLOCK_Q rows of o for one head, walking the keys up to the diagonal."""
    first = (tl.num_programs(1) - 1 - tl.program_id(1)) * BLOCK_Q  # the longest walks start first
    b, h = (tl.program_id(0) // H).to(tl.int64), tl.program_id(0) % H
    q_ptr = qkv_ptr + b * stride_b + h * D
    k_ptr = qkv_ptr + b * stride_b + (H + h // (H // K)) * D
    v_ptr = k_ptr + K * D
    q = load_tile(q_ptr, first, T, stride_t, BLOCK_Q, D)
    o = tl.zeros([BLOCK_Q, D], tl.float32)
    highest = tl.full([BLOCK_Q], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_Q], tl.float32)
    # TODO: walk the keys in front of the diagonal with DIAGONAL False, then those on it with True; store o
    # end of TODO
    row = first + tl.arange(0, BLOCK_Q)
    lse_ptr += tl.program_id(0).to(tl.int64) * T
    tl.store(lse_ptr + row, highest * scale + tl.log2(total), mask=row < T)


def run(qkv, H, K, o, lse):
    """qkv [B, T, H + 2K, D] -> o [B, T, H, D] and lse [B, H, T], the log2 of each query's sum of exponentials."""
    B, T, _, D = qkv.shape
    scale = math.log2(math.e) / math.sqrt(D)
    attention_forward_kernel[(B * H, triton.cdiv(T, BLOCK_Q))](
        qkv, o, lse, T, qkv.stride(0), qkv.stride(1), H * D, scale, H, K, D, BLOCK_Q, BLOCK_K, "ieee"
    )
