"""Exercise 06: RMSNorm backward, with partial sums for the weight's gradient."""

import triton
import triton.language as tl

ROWS, PROGRAMS = 2, 3


@triton.jit
def rmsnorm_backward_kernel(
    dy_ptr, dx_ptr, x_ptr, w_ptr, rstd_ptr, dresidual_ptr, dw_ptr, rows, C, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """Compute every P-th tile of ROWS rows in each of P programs; store the partial sum of program p in dw[p]."""
    column = tl.arange(0, BLOCK)
    w = tl.load(w_ptr + column, mask=column < C, other=0.0).to(tl.float32)
    dw = tl.zeros([ROWS, BLOCK], tl.float32)
    for first in range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        row = first + tl.arange(0, ROWS)
        mask = (row[:, None] < rows) & (column[None, :] < C)
        offsets = row[:, None].to(tl.int64) * C + column[None, :]
        dy = tl.load(dy_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + row, mask=row < rows, other=0.0)[:, None]
        # TODO: compute dresidual [ROWS, BLOCK] in float32; unless dx_ptr is None, add the gradient dx;
        # accumulate this tile's contribution to dw in the program's own tile
        # end of TODO
        tl.store(dresidual_ptr + offsets, dresidual.to(dresidual_ptr.dtype.element_ty), mask=mask)
    # TODO: store this program's partial sum in row tl.program_id(0) of the matrix [programs, C] at dw_ptr
    # end of TODO


@triton.jit
def column_sum_kernel(x_ptr, sum_ptr, rows, C, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Sum BLOCK columns of x [rows, C] per program, always in the same order: no atomics."""
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    partial_sums = tl.zeros([ROWS, BLOCK], tl.float32)
    for first in range(0, rows, ROWS):
        row = first + tl.arange(0, ROWS)[:, None]
        mask = (row < rows) & (column[None, :] < C)
        # TODO: add these rows of x to partial_sums
        # end of TODO
    tl.store(sum_ptr + column, tl.sum(partial_sums, 0), mask=column < C)


def run(dy, dx, x, w, rstd, dresidual, dw, partial_sums):
    """Write dresidual [rows, C] and dw [C] for dy, dx, x [rows, C], w [C], rstd [rows]; partial_sums [PROGRAMS, C]."""
    rows, C = x.shape
    block = triton.next_power_of_2(C)
    rmsnorm_backward_kernel[(PROGRAMS,)](dy, dx, x, w, rstd, dresidual, partial_sums, rows, C, ROWS, block)
    column_sum_kernel[(triton.cdiv(C, 16),)](partial_sums, dw, PROGRAMS, C, ROWS, 16)
