#!/usr/bin/env python3
"""Stage 4: version 3 with the feed-forward kernel below. Find the fault and repair it.

python v3_stage4_slow_kernels.py               # train; options of tiny_llama_v3.py are passed on
python v3_stage4_slow_kernels.py --check       # is it repaired?
python v3_stage4_slow_kernels.py --reveal      # explain it
"""

import sys

from stage_tools import load_v3, main

v3 = load_v3()
torch, triton, tl = v3.torch, v3.triton, v3.tl


@triton.jit
def gate_up_swiglu_kernel(x_ptr, weight_ptr, y_ptr, C, F, BLOCK: tl.constexpr):
    """Compute y [rows, F] = silu(x gateᵀ) · (x upᵀ) from x [rows, C] and the packed weight [2F, C]; BLOCK >= C."""
    row, column = (tl.program_id(0) // F).to(tl.int64), (tl.program_id(0) % F).to(tl.int64)
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * C + i, mask=i < C, other=0.0).to(tl.float32)
    gate = tl.load(weight_ptr + column * C + i, mask=i < C, other=0.0).to(tl.float32)
    up = tl.load(weight_ptr + (F + column) * C + i, mask=i < C, other=0.0).to(tl.float32)
    a, b = tl.sum(x * gate, 0), tl.sum(x * up, 0)
    tl.store(y_ptr + row * F + column, (a * tl.sigmoid(a) * b).to(y_ptr.dtype.element_ty))


class GateUpSwiGLUFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        (rows, C), F = x.shape, weight.shape[0] // 2
        y = torch.empty(rows, F, dtype=x.dtype, device=x.device)
        gate_up_swiglu_kernel[(rows * F,)](x, weight, y, C, F, triton.next_power_of_2(C))
        return y

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        gate_up = x @ weight.t()
        d_gate_up = torch.empty_like(gate_up)
        v3.launch_tiles(v3.swiglu_backward_kernel, *dy.shape, dy.contiguous(), gate_up, d_gate_up, elements=2048)
        return d_gate_up @ weight, d_gate_up.t() @ x


def feed_forward(self, x):
    """Compute down(silu(gate(x)) · up(x)) of x [B, T, C]."""
    with v3.annotate("feed-forward"):
        y = GateUpSwiGLUFunction.apply(x.flatten(0, -2).contiguous(), self.gate_up_proj.weight)
        return self.down_proj(y).unflatten(0, x.shape[:-1])


v3.FeedForward.forward = feed_forward

if __name__ == "__main__":
    sys.exit(main(v3, 4))
