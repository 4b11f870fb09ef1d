"""my_kernel: the kernel, its launch, and its gradient."""

import torch
import triton
import triton.language as tl


@triton.jit
def my_kernel_forward(x_ptr, w_ptr, y_ptr, rows, C, BLOCK: tl.constexpr):
    """Compute row tl.program_id(0) of y; BLOCK >= C."""
    pass


def my_kernel(x, w):
    """Return y, in the shape and dtype that the reference in task.py has."""
    raise NotImplementedError("allocate y, launch the kernel, return y")
