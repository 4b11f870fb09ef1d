"""Derive how far a right answer may be from the exact result where its inputs have 16 bits.

An answer computes in float32 and rounds its result once. Its error has three parts:

    once    that of the exact result, rounded to the nearest number of the dtype.
    way     that of the roundings which an exercise asks for on the way, see stored(). All roundings are independent, so
            their squares add up. A number just above a power of two loses twice as much, relative to its size, as one
            just below. So another answer's may be up to twice as large as the reference's.
    e       that of float32: twice PyTorch's and the task's tolerance, as for an answer in float32, except that PyTorch
            adds products as the least accurate matrix unit does, see MatrixUnit. It counts twice, since it moves the
            result, and it moves what the result is rounded to.

The bound is sqrt(once² + (2 way)²) + 2 e. It is computed on the CPU, so it is the same for every GPU.
"""

import contextlib
import copy
import math

import torch

from common.measuring.accuracy import allowed
from common.versions import relative_error
from graphs import DispatchMode

STEP = 4  # products that a matrix unit adds to a sum at once; newer ones add 8 or 16

rounds = {"given": None, "asked for": None}  # dtype of each kind of rounding in a reference; None: it is left out


@contextlib.contextmanager
def reference_in(dtype, stores=False):
    """Make rounded(), and stored() if asked for, round to a dtype of 16 bits in the functions that tasks define."""
    if dtype.itemsize == 2:
        rounds.update({"given": dtype, "asked for": dtype if stores else None})
    try:
        yield
    finally:
        rounds.update(dict.fromkeys(rounds))


class Rounded(torch.autograd.Function):
    """Round a tensor, its gradient, or both."""

    @staticmethod
    def forward(ctx, x, dtype, value, gradient):
        ctx.dtype = dtype if gradient else None
        return x.to(dtype).to(x.dtype) if value else x.view_as(x)

    @staticmethod
    def backward(ctx, dx):
        return dx.to(ctx.dtype).to(dx.dtype) if ctx.dtype else dx, None, None, None


def rounded(x):
    """Return x, which a line that the exercise gives rounds: every answer goes on with these very numbers."""
    return Rounded.apply(x, rounds["given"], True, False) if rounds["given"] else x


def stored(x, value=True, gradient=False):
    """Return x, which the exercise asks to round, because it is stored or goes into tl.dot.

    value, gradient: which of the two is rounded. An answer may round other numbers than the reference does, such as
    twice as large ones, so this rounding belongs to the bound, and not to the exact result.
    """
    return Rounded.apply(x, rounds["asked for"], value, gradient) if rounds["asked for"] else x


def cut_off(x):
    """Return a float64 tensor in float32, rounded toward zero."""
    nearest = x.float()
    return torch.where(nearest.abs() > x.abs(), torch.nextafter(nearest, torch.zeros_like(nearest)), nearest)


class MatrixUnit(DispatchMode):
    """Multiply float32 matrices as a matrix unit multiplies 16-bit ones.

    It adds STEP exact products to a float32 sum at once, and cuts off what the new sum has no digits for. A unit that
    adds more products at once, or rounds to nearest, is more accurate.
    """

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function not in (torch.ops.aten.mm.default, torch.ops.aten.bmm.default) or args[0].dtype != torch.float32:
            return function(*args, **(kwargs or {}))
        a, b = (matrix.double() for matrix in args)
        sums = 0.0
        for k in range(0, a.shape[-1], STEP):
            sums = cut_off(sums + a[..., k : k + STEP] @ b[..., k : k + STEP, :]).double()
        return sums.float()


def on_cpu(inputs, dtype):
    """Return copies of the inputs on the CPU; integers keep their dtype, and a number stays what it is."""
    found = copy.deepcopy(inputs)
    for name, value in found.items():
        if isinstance(value, torch.Tensor):
            found[name] = value.to("cpu", dtype if value.is_floating_point() else value.dtype)
    return found


def bounds_in_16_bits(define, inputs, dtype, plain, exact, tolerance):
    """Return {name: relative error that a right answer may have}.

    define: as in a Task. plain: PyTorch's results in the dtype, for theirs. exact: the results in float64.
    """
    with reference_in(dtype, stores=True):
        on_the_way = define(**on_cpu(inputs, torch.float64))
    with reference_in(dtype), MatrixUnit():
        wide = define(**on_cpu(inputs, torch.float32))
    bounds = {}
    for name, result in exact.items():
        right = result.cpu()
        once = relative_error(right.to(plain[name].dtype), right)
        way = relative_error(on_the_way[name], right)
        e = allowed(relative_error(wide[name], right), tolerance)
        bounds[name] = math.hypot(once, 2 * way) + 2 * e
    return bounds
