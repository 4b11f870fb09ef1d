"""Exercise 07: softmax of rows longer than a tile."""

import triton
import triton.language as tl

BLOCK = 16


@triton.jit
def online_softmax_kernel(x_ptr, y_ptr, C, BLOCK: tl.constexpr):
    """Compute the softmax of one row of x [rows, C] per program, in two passes over tiles of BLOCK."""
    x_ptr += tl.program_id(0).to(tl.int64) * C
    y_ptr += tl.program_id(0).to(tl.int64) * C
    m = tl.full([1], -float("inf"), tl.float32)
    l = tl.zeros([1], tl.float32)
    for start in range(0, C, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + column, mask=column < C, other=-float("inf")).to(tl.float32)
        m_new = tl.maximum(m, tl.max(x, 0))
        l = l * tl.exp(m - m_new) + tl.sum(tl.exp(x - m_new), 0)
        m = m_new
    for start in range(0, C, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + column, mask=column < C, other=-float("inf")).to(tl.float32)
        y = tl.exp(x - m) / l
        tl.store(y_ptr + column, y.to(y_ptr.dtype.element_ty), mask=column < C)


def run(x, y):
    """Write the softmax of each row of x [rows, C] into y [rows, C]."""
    rows, C = x.shape
    online_softmax_kernel[(rows,)](x, y, C, BLOCK)
