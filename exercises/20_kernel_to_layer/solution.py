"""Exercise 20: a kernel becomes a layer, and a test of its gradients."""

import math

import torch
import triton
import triton.language as tl

ROWS, BLOCK = 4, 32


@triton.jit
def swiglu_forward_kernel(x_ptr, y_ptr, rows, F, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Compute a tile of y [rows, F] per program from x [rows, 2F], whose rows hold gate and then up."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    column = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    mask = (row < rows) & (column < F)
    gate = tl.load(x_ptr + row * 2 * F + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * 2 * F + F + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * F + column, (gate * tl.sigmoid(gate) * up).to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def swiglu_backward_kernel(dy_ptr, x_ptr, dx_ptr, rows, F, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Compute a tile of dgate and the same tile of dup per program; rows of dx [rows, 2F] hold dgate and then dup."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    column = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    mask = (row < rows) & (column < F)
    dy = tl.load(dy_ptr + row * F + column, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(x_ptr + row * 2 * F + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * 2 * F + F + column, mask=mask, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    dgate = dy * up * sigmoid * (1 + gate * (1 - sigmoid))
    tl.store(dx_ptr + row * 2 * F + column, dgate.to(dx_ptr.dtype.element_ty), mask=mask)
    tl.store(dx_ptr + row * 2 * F + F + column, (dy * gate * sigmoid).to(dx_ptr.dtype.element_ty), mask=mask)


def grid(rows, F):
    return triton.cdiv(rows, ROWS), triton.cdiv(F, BLOCK)


def swiglu_forward(x):
    """Return y [rows, F] for x [rows, 2F]."""
    rows, F = x.shape[0], x.shape[1] // 2
    y = torch.empty(rows, F, dtype=x.dtype, device=x.device)
    swiglu_forward_kernel[grid(rows, F)](x, y, rows, F, ROWS, BLOCK)
    return y


def swiglu_backward(dy, x):
    """Return dx [rows, 2F] for x and a contiguous dy [rows, F]."""
    dx = torch.empty_like(x)
    swiglu_backward_kernel[grid(*dy.shape)](dy, x, dx, *dy.shape, ROWS, BLOCK)
    return dx


class SwiGLUFunction(torch.autograd.Function):
    """Compute scale · silu(gate) · up [rows, F] from x [rows, 2F] and a number."""

    @staticmethod
    def forward(ctx, x, scale):
        ctx.save_for_backward(x)
        ctx.scale = scale
        return swiglu_forward(x) * scale

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        dx = swiglu_backward(dy.contiguous(), x) * ctx.scale
        return dx, None


def layer(gate, up, scale):
    """Return scale · silu(gate) · up [rows, F]."""
    x = torch.cat([gate, up], 1)  # [rows, 2F]
    return SwiGLUFunction.apply(x, scale)


def worst_gradient_error(f, reference, *inputs):
    """Return the largest relative error of f's gradients, compared with reference's in float64; inf for None or NaN."""
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    wide = [tensor.detach().double().requires_grad_() for tensor in inputs]
    y = f(*leaves)
    dy = torch.randn(y.shape[::-1], device=y.device).T  # not contiguous, as autograd's may be
    grads = torch.autograd.grad(y, leaves, dy, allow_unused=True)
    exact = torch.autograd.grad(reference(*wide), wide, dy.double())
    worst = 0.0
    for grad, right in zip(grads, exact, strict=True):
        if grad is None or not grad.isfinite().all():
            return math.inf
        error = (grad.double() - right).norm() / right.norm()
        worst = max(worst, error.item())
    return worst


def wrong_layers(scale):
    """Return functions of gate and up whose values are right; all but the first have a fault in their gradients."""

    def right(gate, up):
        return scale * torch.nn.functional.silu(gate) * up

    def reverse_gradient(x):
        x = x.view_as(x)
        x.register_hook(lambda grad: grad.flip(0))
        return x

    return [
        lambda gate, up: layer(gate, up, scale),
        lambda gate, up: right(2 * gate - gate.detach(), up),
        lambda gate, up: right(gate, up.detach()),
        lambda gate, up: right(gate, reverse_gradient(up)),
        lambda gate, up: right(gate, up) + (up - up).sqrt(),
    ]


def run(gate, up, dy, scale, y, dgate, dup, caught):
    """Write y of the layer and its gradients for dy [F] in every row; into caught what the test says of each layer."""
    leaves = [gate.clone().requires_grad_(), up.clone().requires_grad_()]
    result = layer(*leaves, scale)
    layer(up, gate, -scale)  # another layer runs before the backward of the first
    if getattr(result, "grad_fn", None) is None:
        raise ValueError("the layer's result has no grad_fn: call the Function through .apply")
    result.backward(dy.expand(gate.shape))
    y.copy_(result.detach())
    dgate.copy_(leaves[0].grad)
    dup.copy_(leaves[1].grad)

    def reference(gate, up):
        return scale * torch.nn.functional.silu(gate) * up

    for i, f in enumerate(wrong_layers(scale)):
        caught[i] = worst_gradient_error(f, reference, gate, up) > 0.01
