"""Exercise 01: sums of the rows of a matrix."""

import triton
import triton.language as tl

ROWS = 4


@triton.jit
def row_sum_kernel(x_ptr, sum_ptr, rows, C, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Sum ROWS rows of x [rows, C] per program; BLOCK >= C."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    mask = (row[:, None] < rows) & (column[None, :] < C)
    x = tl.load(x_ptr + row[:, None] * C + column[None, :], mask=mask, other=0.0).to(tl.float32)
    tl.store(sum_ptr + row, tl.sum(x, 1).to(sum_ptr.dtype.element_ty), mask=row < rows)


def run(x, sum):
    """Write the row sums of x [rows, C] into sum [rows], which has the dtype of x."""
    rows, C = x.shape
    row_sum_kernel[(triton.cdiv(rows, ROWS),)](x, sum, rows, C, ROWS, triton.next_power_of_2(C))
