"""Exercise 05: rotary embedding and its inverse."""

import triton
import triton.language as tl

TOKENS, HEADS = 4, 2


@triton.jit
def rope_kernel(
    x_ptr, y_ptr, cos_ptr, sin_ptr, tokens, T, heads, turned, HALF,
    INVERSE: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """One program turns TOKENS x HEADS heads of x [tokens, heads, 2 · HALF]; heads from `turned` on are copied."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)[:, None, None]
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[None, :, None]
    pair = tl.arange(0, PAIRS)[None, None, :]
    angle = (token % T) * HALF + pair
    known = (token < tokens) & (pair < HALF)
    cos = tl.load(cos_ptr + angle, mask=known, other=0.0)
    sin = tl.load(sin_ptr + angle, mask=known, other=0.0)
    if INVERSE:
        sin = -sin
    cos = tl.where(head < turned, cos, 1.0)
    sin = tl.where(head < turned, sin, 0.0)
    inside = known & (head < heads)
    offsets = (token.to(tl.int64) * heads + head) * (2 * HALF) + pair
    x1 = tl.load(x_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    x2 = tl.load(x_ptr + offsets + HALF, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + offsets, (x1 * cos - x2 * sin).to(y_ptr.dtype.element_ty), mask=inside)
    tl.store(y_ptr + offsets + HALF, (x2 * cos + x1 * sin).to(y_ptr.dtype.element_ty), mask=inside)


def run(x, dy, cos, sin, turned, y, dx):
    """y: the first `turned` heads of x [B, T, heads, D] turned by cos, sin [T, D/2]; dx: its gradient for dy."""
    B, T, heads, D = x.shape
    grid = (triton.cdiv(B * T, TOKENS), triton.cdiv(heads, HEADS))
    sizes = (B * T, T, heads, turned, D // 2)
    pairs = triton.next_power_of_2(D // 2)
    rope_kernel[grid](x, y, cos, sin, *sizes, False, TOKENS, HEADS, pairs)
    rope_kernel[grid](dy, dx, cos, sin, *sizes, True, TOKENS, HEADS, pairs)
