"""Exercise 07: softmax of rows longer than a tile."""

import triton
import triton.language as tl

BLOCK = 16


@triton.jit
def online_softmax_kernel(x_ptr, y_ptr, C, BLOCK: tl.constexpr):
    """One program computes the softmax of one row of x [rows, C], walking it twice in tiles of BLOCK."""
    x_ptr += tl.program_id(0).to(tl.int64) * C
    y_ptr += tl.program_id(0).to(tl.int64) * C
    highest = tl.full([1], -float("inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    for start in range(0, C, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + column, mask=column < C, other=-float("inf")).to(tl.float32)
        raised = tl.maximum(highest, tl.max(x, 0))
        total = total * tl.exp(highest - raised) + tl.sum(tl.exp(x - raised), 0)
        highest = raised
    for start in range(0, C, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + column, mask=column < C, other=-float("inf")).to(tl.float32)
        y = tl.exp(x - highest) / total
        tl.store(y_ptr + column, y.to(y_ptr.dtype.element_ty), mask=column < C)


def run(x, y):
    """x [rows, C] -> y [rows, C], the softmax of each row."""
    rows, C = x.shape
    online_softmax_kernel[(rows,)](x, y, C, BLOCK)
