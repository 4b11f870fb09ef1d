"""Say what my_kernel must compute: change the shapes and the formula to yours."""

import torch

FUNCTION = "kernel.py:my_kernel"  # another file's: its path from this folder, a colon, its function
GRADIENTS = ("x", "w")  # the inputs that have a gradient; () for a forward alone
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MANY = 5000 if torch.cuda.is_available() else 130  # more rows than programs: a loop over rows runs several times
CASES = [{"rows": 4, "C": 8}, {"rows": 5, "C": 6}, {"rows": 9, "C": 150}, {"rows": MANY, "C": 6}]
TIMED = {"rows": 16384, "C": 4096}  # for --time: too large for a cache


def inputs(rows, C):
    """Return the arguments, in their order."""
    return {"x": torch.randn(rows, C) + 0.5, "w": torch.randn(C) + 1.5}


def reference(x, w):
    """Return what PyTorch computes, in the dtype of x."""
    return torch.sigmoid(x) * w
