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
    # TODO: load x1 and x2 [ROWS, BLOCK], the two elements of each pair; rotate them; store both in y
    # end of TODO


def run(x, cos, sin, y):
    """Write y [rows, 2 · HALF]: x with the pairs (x[i], x[i + HALF]) of each row rotated by cos, sin [rows, HALF]."""
    rows, HALF = cos.shape
    grid = (triton.cdiv(rows, ROWS),)
    rotate_kernel[grid](x, cos, sin, y, rows, HALF, ROWS, triton.next_power_of_2(HALF))
