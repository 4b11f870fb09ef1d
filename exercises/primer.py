#!/usr/bin/env python3
"""The kernel of PRIMER.md: run it, change it, print what a program sees.

python exercises/primer.py
"""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it on import
import triton
import triton.language as tl


@triton.jit
def scale_kernel(x_ptr, w_ptr, y_ptr, rows, C, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Compute ROWS rows of y = x · w per program, for x [rows, C] and w [C]; BLOCK >= C."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    mask = (row[:, None] < rows) & (column[None, :] < C)
    offsets = row[:, None] * C + column[None, :]
    x = tl.load(x_ptr + offsets, mask=mask, other=0.0)
    w = tl.load(w_ptr + column, mask=column < C, other=0.0)
    y = x.to(tl.float32) * w[None, :].to(tl.float32)
    tl.store(y_ptr + offsets, y.to(y_ptr.dtype.element_ty), mask=mask)


def scale(x, w):
    """Return x · w for x [rows, C] and w [C]."""
    (rows, C), y = x.shape, torch.empty_like(x)
    ROWS, BLOCK = 4, triton.next_power_of_2(C)
    scale_kernel[(triton.cdiv(rows, ROWS),)](x, w, y, rows, C, ROWS, BLOCK, num_warps=4)
    return y


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return scale(x, w)

    @staticmethod
    def backward(ctx, dy):
        x, w = ctx.saved_tensors
        dx = scale(dy.contiguous(), w)
        dw = (dy * x).sum(0)
        return dx, dw


def rms_norm(x, w, eps):
    """Return x / sqrt(mean(x²) + eps) · w for x [rows, C] and w [C]."""
    rstd = (x.square().mean(1, keepdim=True) + eps).rsqrt()  # [rows, 1]
    return x * rstd * w


class RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, eps):
        rstd = (x.square().mean(1, keepdim=True) + eps).rsqrt()
        ctx.save_for_backward(x, w, rstd)
        return x * rstd * w

    @staticmethod
    def backward(ctx, dy):
        x, w, rstd = ctx.saved_tensors
        dx = dw = None
        if ctx.needs_input_grad[0]:
            g = dy * w
            dx = rstd * (g - x * rstd**2 * (g * x).mean(1, keepdim=True))
        if ctx.needs_input_grad[1]:
            dw = (dy * x * rstd).sum(0)
        return dx, dw, None


def gradient_errors(f, formula, x, w):
    """Return the relative errors of f's gradients for x and w, compared with the formula's in float64.

    Their dy is not contiguous, as autograd's may be: a backward that reads it as if it were is wrong.
    """
    leaves = [x.clone().requires_grad_(), w.clone().requires_grad_()]
    wide = [x.double().requires_grad_(), w.double().requires_grad_()]
    dy = torch.randn(x.shape[::-1], device=x.device).T
    grads = torch.autograd.grad(f(*leaves), leaves, dy)
    exact = torch.autograd.grad(formula(*wide), wide, dy.double())
    return [((a.double() - b).norm() / b.norm()).item() for a, b in zip(grads, exact, strict=True)]


def numbers_saved(f, *inputs):
    """Return how many numbers f saves for backward; a tensor that is saved twice counts once."""
    saved = {}

    def pack(tensor):
        saved[tensor.data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        f(*inputs)
    return sum(tensor.numel() for tensor in saved.values())


if __name__ == "__main__":
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x, w = torch.randn(10, 6, device=device), torch.randn(6, device=device)
    print("largest difference from PyTorch:", (scale(x, w) - x * w).abs().max().item())
    print(f"{triton.cdiv(10, 4)} programs of 4 rows for 10 rows; tiles of 8 columns for 6 columns")
    x.requires_grad_()
    print("grad_fn without a Function:", scale(x, w).grad_fn)
    print("grad_fn with one:", type(Scale.apply(x, w).grad_fn).__name__)
    x = x.detach()
    errors = gradient_errors(Scale.apply, torch.mul, x, w)
    print("gradients right:", all(error < 1e-6 for error in errors))

    def norm(x, w):
        return RMSNorm.apply(x, w, 1e-6)

    def formula(x, w):
        return rms_norm(x, w, 1e-6)

    errors = gradient_errors(norm, formula, x, w)
    print("norm: gradients right:", all(error < 1e-6 for error in errors))
    leaves = [x.double().requires_grad_(), w.double().requires_grad_()]
    print("norm: gradcheck in float64:", torch.autograd.gradcheck(norm, leaves))
    stored = numbers_saved(norm, *leaves)
    without = numbers_saved(formula, *leaves)
    print(f"norm: stores {stored} numbers, without the Function {without}")
