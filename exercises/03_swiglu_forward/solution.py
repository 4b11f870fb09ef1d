"""Exercise 03: SwiGLU of the packed projection, forward."""

import triton
import triton.language as tl

ROWS, BLOCK = 4, 32


@triton.jit
def swiglu_forward_kernel(x_ptr, y_ptr, rows, F, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Compute a tile of y [rows, F] per program from x [rows, 2F], whose rows hold gate and then up."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    column = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    mask = (row < rows) & (column < F)
    gate = tl.load(x_ptr + row * 2 * F + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * 2 * F + F + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * F + column, (gate * tl.sigmoid(gate) * up).to(y_ptr.dtype.element_ty), mask=mask)


def run(x, y):
    """Write y [rows, F] = silu(gate) · up for x [rows, 2F], whose rows hold gate and then up."""
    rows, F = y.shape
    swiglu_forward_kernel[(triton.cdiv(rows, ROWS), triton.cdiv(F, BLOCK))](x, y, rows, F, ROWS, BLOCK)
