"""Exercise 05: rotary position embedding (RoPE) and its inverse."""

import triton
import triton.language as tl

TOKENS, HEADS = 4, 2


@triton.jit
def rope_kernel(
    x_ptr, y_ptr, cos_ptr, sin_ptr, tokens, T, heads, rotated_heads, HALF,
    INVERSE: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Rotate TOKENS x HEADS heads of x [tokens, heads, 2 · HALF] per program; copy heads from `rotated_heads` on."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)[:, None, None]
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[None, :, None]
    pair = tl.arange(0, PAIRS)[None, None, :]
    angle = (token % T) * HALF + pair
    angle_mask = (token < tokens) & (pair < HALF)
    cos = tl.load(cos_ptr + angle, mask=angle_mask, other=0.0)
    sin = tl.load(sin_ptr + angle, mask=angle_mask, other=0.0)
    if INVERSE:
        sin = -sin
    cos = tl.where(head < rotated_heads, cos, 1.0)
    sin = tl.where(head < rotated_heads, sin, 0.0)
    mask = angle_mask & (head < heads)
    offsets = (token.to(tl.int64) * heads + head) * (2 * HALF) + pair
    x1 = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    x2 = tl.load(x_ptr + offsets + HALF, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + offsets, (x1 * cos - x2 * sin).to(y_ptr.dtype.element_ty), mask=mask)
    tl.store(y_ptr + offsets + HALF, (x2 * cos + x1 * sin).to(y_ptr.dtype.element_ty), mask=mask)


def run(x, dy, cos, sin, rotated_heads, y, dx):
    """Write y, the first heads of x [B, T, heads, D] rotated by cos, sin [T, D/2], and dx, the gradient for dy."""
    B, T, heads, D = x.shape
    grid = (triton.cdiv(B * T, TOKENS), triton.cdiv(heads, HEADS))
    sizes = (B * T, T, heads, rotated_heads, D // 2)
    pairs = triton.next_power_of_2(D // 2)
    rope_kernel[grid](x, y, cos, sin, *sizes, False, TOKENS, HEADS, pairs)
    rope_kernel[grid](dy, dx, cos, sin, *sizes, True, TOKENS, HEADS, pairs)
