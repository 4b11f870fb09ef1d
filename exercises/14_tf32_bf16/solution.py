"""Exercise 14: matmuls of rounded numbers, and float32 accuracy from three of them."""

import triton
import triton.language as tl

BLOCK = 16


@triton.jit
def rounded(x, DROP: tl.constexpr):
    """Return float32 x without the last DROP bits of its fraction, rounded to nearest, ties to even."""
    bits = x.to(tl.int32, bitcast=True)
    bits += (1 << (DROP - 1)) - 1 + ((bits >> DROP) & 1)
    return ((bits >> DROP) << DROP).to(tl.float32, bitcast=True)


@triton.jit
def split_matmul_kernel(
    a_ptr, b_ptr, high_ptr, one_ptr, three_ptr, M, N, K, DROP: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Compute a tile [BLOCK, BLOCK] of a [M, K] b [K, N] per program; column 0 also stores the high part of a."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[:, None]
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    one = tl.zeros([BLOCK, BLOCK], tl.float32)
    three = tl.zeros([BLOCK, BLOCK], tl.float32)
    for start in range(0, K, BLOCK):
        k = start + tl.arange(0, BLOCK)
        a_mask = (row < M) & (k[None, :] < K)
        a = tl.load(a_ptr + row * K + k[None, :], mask=a_mask, other=0.0)
        b = tl.load(b_ptr + k[:, None] * N + column, mask=(k[:, None] < K) & (column < N), other=0.0)
        a_high, b_high = rounded(a, DROP), rounded(b, DROP)
        tl.store(high_ptr + row * K + k[None, :], a_high, mask=a_mask & (tl.program_id(1) == 0))
        one = tl.dot(a_high, b_high, one, input_precision="ieee")
        a_low, b_low = rounded(a - a_high, DROP), rounded(b - b_high, DROP)
        three = tl.dot(a_low, b_high, three, input_precision="ieee")
        three = tl.dot(a_high, b_low, three, input_precision="ieee")
        three = tl.dot(a_high, b_high, three, input_precision="ieee")
    tl.store(one_ptr + row * N + column, one, mask=(row < M) & (column < N))
    tl.store(three_ptr + row * N + column, three, mask=(row < M) & (column < N))


def run(a, b, drop, high, one, three):
    """Write a rounded (high), and a [M, K] b [K, N] from the high parts (one) and from high and low parts (three)."""
    (M, K), N = a.shape, b.shape[1]
    grid = (triton.cdiv(M, BLOCK), triton.cdiv(N, BLOCK))
    split_matmul_kernel[grid](a, b, high, one, three, M, N, K, drop, BLOCK)
