#!/usr/bin/env python3
"""Stage 4: a kernel that should not be one. Version 3 with a SwiGLU that computes its own matrix products.

    python v3_stage4_slow_kernels.py                    # options of tiny_llama_v3.py go through

One program computes one element: it reads a whole row of the input and two rows of the weight for it, and shares
nothing with its neighbours, which read the same rows.
"""

import sys

from stage_tools import load_v3, run_stage

TITLE = "stage 4: the times are true; why is the forward slow?"

v3 = load_v3()
torch, triton, tl = v3.torch, v3.triton, v3.tl


@triton.jit
def swiglu_element_kernel(x_ptr, weight_ptr, y_ptr, C, F, BLOCK: tl.constexpr):
    """One program computes one element of y [rows, F] from x [rows, C] and the weight [2F, C]; BLOCK >= C."""
    row, column = tl.program_id(0) // F, tl.program_id(0) % F
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row.to(tl.int64) * C + i, mask=i < C, other=0.0).to(tl.float32)
    gate = tl.load(weight_ptr + column.to(tl.int64) * C + i, mask=i < C, other=0.0).to(tl.float32)
    up = tl.load(weight_ptr + (F + column).to(tl.int64) * C + i, mask=i < C, other=0.0).to(tl.float32)
    a, b = tl.sum(x * gate, 0), tl.sum(x * up, 0)
    tl.store(y_ptr + tl.program_id(0).to(tl.int64), (a * tl.sigmoid(a) * b).to(y_ptr.dtype.element_ty))


class ElementSwiGLUFunction(torch.autograd.Function):
    """silu(x gateᵀ) · (x upᵀ) of x [rows, C] and the packed weight [2F, C]; the backward is that of version 3."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        (rows, C), F = x.shape, weight.shape[0] // 2
        y = torch.empty(rows, F, dtype=x.dtype, device=x.device)
        swiglu_element_kernel[(rows * F,)](x, weight, y, C, F, triton.next_power_of_2(C))
        return y

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        d_gate_up = v3.swiglu_backward(dy.contiguous(), x @ weight.t())
        return d_gate_up @ weight, d_gate_up.t() @ x


def feed_forward(self, x):
    with v3.annotate("feed-forward"):
        y = ElementSwiGLUFunction.apply(x.flatten(0, -2).contiguous(), self.gate_up_proj.weight)
        return self.down_proj(y).unflatten(0, x.shape[:-1])


def load():
    v3.FeedForward.forward = feed_forward
    return v3


def report(v3, trainer, steps, summary):
    options = trainer.options
    programs = options.batch_size * options.seq_len * options.intermediate_dim
    forward, backward = (summary[f"{phase}_ms"] for phase in ("forward", "backward"))
    yield f"a launch of swiglu_element_kernel starts {programs:,} programs; each reads 3 x {options.hidden_dim} numbers"
    if forward is not None:
        yield f"forward {forward:.3f} ms, backward {backward:.3f} ms, though a backward has twice the matrix products"
    if trainer.device.type == "cpu":
        yield "the interpreter pays for every program too, but a GPU's times are another matter: measure there"


if __name__ == "__main__":
    sys.exit(run_stage(load(), TITLE, report))
