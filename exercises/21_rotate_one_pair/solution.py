"""Exercise 21: rotate pairs whose elements lie HALF apart."""

import triton
import triton.language as tl

ROWS = 4


@triton.jit
def rotate_kernel(x_ptr, cos_ptr, sin_ptr, y_ptr, rows, HALF, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Rotate the pairs of ROWS rows of x [rows, 2 · HALF] per program, by the angles of cos and sin [rows, HALF]."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    pair = tl.arange(0, BLOCK)[None, :]
    mask = (row < rows) & (pair < HALF)
    cos = tl.load(cos_ptr + row * HALF + pair, mask=mask, other=0.0)
    sin = tl.load(sin_ptr + row * HALF + pair, mask=mask, other=0.0)
    offsets = row * (2 * HALF) + pair
    x1 = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    x2 = tl.load(x_ptr + offsets + HALF, mask=mask, other=0.0).to(tl.float32)
    y1 = x1 * cos - x2 * sin
    y2 = x2 * cos + x1 * sin
    tl.store(y_ptr + offsets, y1.to(y_ptr.dtype.element_ty), mask=mask)
    tl.store(y_ptr + offsets + HALF, y2.to(y_ptr.dtype.element_ty), mask=mask)


def run(x, cos, sin, y):
    """Write y [rows, 2 · HALF]: x with the pairs (x[i], x[i + HALF]) of each row rotated by cos, sin [rows, HALF]."""
    rows, HALF = cos.shape
    grid = (triton.cdiv(rows, ROWS),)
    rotate_kernel[grid](x, cos, sin, y, rows, HALF, ROWS, triton.next_power_of_2(HALF))
