"""Exercise 04: SwiGLU, backward."""

import triton
import triton.language as tl

ROWS, BLOCK = 4, 32


@triton.jit
def swiglu_backward_kernel(dy_ptr, x_ptr, dx_ptr, rows, F, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Compute a tile of dgate and the same tile of dup per program; rows of dx [rows, 2F] hold dgate and then dup."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    column = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    mask = (row < rows) & (column < F)
    dy = tl.load(dy_ptr + row * F + column, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(x_ptr + row * 2 * F + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * 2 * F + F + column, mask=mask, other=0.0).to(tl.float32)
    # TODO: store dgate in the first half of dx, and dup in the second
    # end of TODO


def run(dy, x, dx):
    """Write dx [rows, 2F] = [dgate, dup] for dy [rows, F] and x [rows, 2F] = [gate, up]."""
    rows, F = dy.shape
    swiglu_backward_kernel[(triton.cdiv(rows, ROWS), triton.cdiv(F, BLOCK))](dy, x, dx, rows, F, ROWS, BLOCK)
