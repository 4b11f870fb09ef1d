"""Exercise 13: softmax of scaled scores and its gradient, in powers of two."""

import math

import triton
import triton.language as tl


@triton.jit
def softmax_forward_kernel(x_ptr, p_ptr, lse_ptr, C, scale, BLOCK: tl.constexpr):
    """Compute p, the softmax of a row of x [rows, C] times scale to base 2, and its lse, per program; BLOCK >= C."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * C + column, mask=column < C, other=-float("inf")).to(tl.float32)
    # TODO: compute lse, the log2 of the row's sum of powers, and p [BLOCK]
    # end of TODO
    tl.store(lse_ptr + row, lse)
    tl.store(p_ptr + row * C + column, p.to(p_ptr.dtype.element_ty), mask=column < C)


@triton.jit
def softmax_backward_kernel(dp_ptr, x_ptr, lse_ptr, dx_ptr, C, scale, BLOCK: tl.constexpr):
    """Compute a row of dx per program from dp, x and the forward's lse; p is recomputed."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * C + column, mask=column < C, other=-float("inf")).to(tl.float32)
    dp = tl.load(dp_ptr + row * C + column, mask=column < C, other=0.0).to(tl.float32)
    lse = tl.load(lse_ptr + row)
    # TODO: compute dx [BLOCK], the gradient with respect to x
    # end of TODO
    tl.store(dx_ptr + row * C + column, dx.to(dx_ptr.dtype.element_ty), mask=column < C)


def run(x, dp, D, p, lse, dx):
    """Write p = softmax(x / sqrt(D)) and dx for x, dp [rows, C], and lse [rows] to base 2 in float32."""
    rows, C = x.shape
    # TODO: compute scale, so that powers of two give the softmax
    # end of TODO
    block = triton.next_power_of_2(C)
    softmax_forward_kernel[(rows,)](x, p, lse, C, scale, block)
    softmax_backward_kernel[(rows,)](dp, x, lse, dx, C, scale, block)
