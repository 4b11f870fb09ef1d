"""Exercise 16: a layer that does not train, the test that shows it, and its backward."""

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
    """Compute silu(gate) · up [rows, F] from x [rows, 2F]; nobody calls it yet."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return swiglu_forward(x)

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        return swiglu_backward(dy.contiguous(), x)


def swiglu(x):
    """Return silu(gate) · up [rows, F] for x [rows, 2F]."""
    apply = swiglu_forward
    # TODO: call SwiGLUFunction instead
    # end of TODO
    return apply(x)


def is_trained(grad):
    """Return True if a tensor with this gradient, which may be None, is trained."""
    # TODO: return True or False
    # end of TODO


def run(x, gate_up, down, dy, grads, found, y, ddown, dgate_up, dx):
    """Write is_trained of None and of the rows of grads [n, m] into found [1 + n]; y of the layer; every gradient."""
    for i, grad in enumerate([None, *grads]):
        found[i] = is_trained(grad)
    leaves = [tensor.clone().requires_grad_() for tensor in (x, gate_up, down)]
    h = leaves[0] @ leaves[1].T
    result = (leaves[2] @ swiglu(h).T.contiguous()).T
    swiglu(torch.ones_like(h))  # another layer runs before the backward of the first
    result.backward(dy)
    y.copy_(result.detach())
    for leaf, out in zip(leaves, (dx, dgate_up, ddown), strict=True):
        if leaf.grad is not None:
            out.copy_(leaf.grad)
