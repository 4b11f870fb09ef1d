"""Exercise 05: rotary position embedding (RoPE) and its inverse."""

import triton
import triton.language as tl

ROWS = 8


@triton.jit
def rope_kernel(
    x_ptr, y_ptr, cos_ptr, sin_ptr, sign, T, heads, rotated_heads, rows, HALF, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """Rotate ROWS heads of x [rows = tokens · heads, 2 · HALF] per program; copy heads from `rotated_heads` on."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    pair = tl.arange(0, BLOCK)[None, :]
    mask = (row < rows) & (pair < HALF)
    # TODO: find the token, its position and the head of each row; load cos and sin [ROWS, BLOCK] of that position from
    # the tables [T, HALF], and multiply sin by sign. Heads from `rotated_heads` on: rotate them by the angle zero.
    # end of TODO
    offsets = row.to(tl.int64) * (2 * HALF) + pair
    x1 = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    x2 = tl.load(x_ptr + offsets + HALF, mask=mask, other=0.0).to(tl.float32)
    y1 = x1 * cos - x2 * sin
    y2 = x2 * cos + x1 * sin
    tl.store(y_ptr + offsets, y1.to(y_ptr.dtype.element_ty), mask=mask)
    tl.store(y_ptr + offsets + HALF, y2.to(y_ptr.dtype.element_ty), mask=mask)


def run(x, dy, cos, sin, rotated_heads, y, dx):
    """Write y, the first heads of x [B, T, heads, D] rotated by cos, sin [T, D/2], and dx, the gradient for dy."""
    B, T, heads, D = x.shape
    rows = B * T * heads
    grid = (triton.cdiv(rows, ROWS),)
    sizes = (T, heads, rotated_heads, rows, D // 2)
    block = triton.next_power_of_2(D // 2)
    rope_kernel[grid](x, y, cos, sin, 1.0, *sizes, ROWS, block)
    rope_kernel[grid](dy, dx, cos, sin, -1.0, *sizes, ROWS, block)
