"""Exercise 24: LayerNorm, its kernels and their Function, from an empty file."""

import torch
import triton
import triton.language as tl

# TODO: the kernels, a torch.autograd.Function that launches them, and layer_norm(x, w, b, eps), which applies it


@triton.jit
def forward_kernel(x_ptr, w_ptr, b_ptr, y_ptr, C, eps, BLOCK: tl.constexpr):
    column = tl.arange(0, BLOCK)
    mask = column < C
    offsets = tl.program_id(0).to(tl.int64) * C + column
    x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    centered = tl.where(mask, x - tl.sum(x, 0) / C, 0.0)
    rstd = tl.rsqrt(tl.sum(centered * centered, 0) / C + tl.cast(eps, tl.float32))
    w = tl.load(w_ptr + column, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(b_ptr + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + offsets, (centered * rstd * w + b).to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def backward_kernel(dy_ptr, x_ptr, w_ptr, dx_ptr, dw_ptr, db_ptr, rows, C, eps, BLOCK: tl.constexpr):
    column = tl.arange(0, BLOCK)
    mask = column < C
    w = tl.load(w_ptr + column, mask=mask, other=0.0).to(tl.float32)
    dw = tl.zeros([BLOCK], tl.float32)
    db = tl.zeros([BLOCK], tl.float32)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        offsets = tl.cast(row, tl.int64) * C + column
        dy = tl.load(dy_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        centered = tl.where(mask, x - tl.sum(x, 0) / C, 0.0)
        rstd = tl.rsqrt(tl.sum(centered * centered, 0) / C + tl.cast(eps, tl.float32))
        normed = centered * rstd
        g = dy * w
        dx = rstd * (g - tl.sum(g, 0) / C - normed * (tl.sum(g * normed, 0) / C))
        tl.store(dx_ptr + offsets, dx.to(dx_ptr.dtype.element_ty), mask=mask)
        dw += dy * normed
        db += dy
    tl.store(dw_ptr + tl.program_id(0) * C + column, dw, mask=mask)
    tl.store(db_ptr + tl.program_id(0) * C + column, db, mask=mask)


class LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, b, eps):
        rows, C = x.shape
        y = torch.empty_like(x)
        forward_kernel[(rows,)](x, w, b, y, C, eps, triton.next_power_of_2(C))
        ctx.save_for_backward(x, w)
        ctx.eps = eps
        return y

    @staticmethod
    def backward(ctx, dy):
        x, w = ctx.saved_tensors
        rows, C = x.shape
        dx = torch.empty_like(x)
        units = 1 if x.device.type == "cpu" else torch.cuda.get_device_properties(x.device).multi_processor_count
        programs = min(4 * units, triton.cdiv(rows, 2))  # each sums its rows of dw and db
        dw, db = torch.empty(2, programs, C, dtype=torch.float32, device=x.device)
        block = triton.next_power_of_2(C)
        backward_kernel[(programs,)](dy.contiguous(), x, w, dx, dw, db, rows, C, ctx.eps, block)
        return dx, dw.sum(0).to(w.dtype), db.sum(0).to(w.dtype), None


def layer_norm(x, w, b, eps):
    return LayerNorm.apply(x.contiguous(), w.contiguous(), b.contiguous(), eps)


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
