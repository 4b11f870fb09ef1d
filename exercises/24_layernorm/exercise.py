"""Exercise 24: LayerNorm, its kernels and their Function, from an empty file."""

import torch
import triton
import triton.language as tl

# TODO: the kernels, a torch.autograd.Function that launches them, and layer_norm(x, w, b, eps), which applies it
# end of TODO


def run(x, w, b, eps, dy, y, dx, dw, db):
    """Write y of layer_norm for x [rows, C] and w, b [C]; and its gradients for dy [C, rows], which is transposed."""
    leaves = [tensor.clone().requires_grad_() for tensor in (x, w, b)]
    result = layer_norm(*leaves, eps)
    layer_norm(x.flip(1), w, b, eps)  # another layer runs before the backward of the first
    if getattr(result, "grad_fn", None) is None:
        raise ValueError("the layer's result has no grad_fn: call the Function through .apply")
    gradients = torch.autograd.grad(result, leaves, dy.T)
    y.copy_(result.detach())
    for out, gradient in zip((dx, dw, db), gradients, strict=True):
        out.copy_(gradient)
