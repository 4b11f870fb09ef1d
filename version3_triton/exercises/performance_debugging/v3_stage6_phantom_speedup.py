#!/usr/bin/env python3
"""Stage 6: the fastest of all. Version 3 with forward kernels that nobody gave a backward.

    python v3_stage6_phantom_speedup.py                 # options of tiny_llama_v3.py go through

A kernel writes into a tensor that autograd knows nothing of. No error tells: the gradient ends there.
"""

import sys

from stage_tools import load_v3, run_stage

TITLE = "stage 6: faster than version 3, in less memory; what is the price?"
KERNELS = ("add_rms_norm", "rope", "packed_swiglu", "flash_attention", "rotary_attention")


def load():
    v3 = load_v3()
    for name in KERNELS:
        setattr(v3, name, v3.torch.no_grad()(getattr(v3, name)))
    return v3


def report(v3, trainer, steps, summary):
    missing = [name for name, p in trainer.model.named_parameters() if p.grad is None]
    total = len(list(trainer.model.parameters()))
    forward, backward = (summary[f"{phase}_ms"] for phase in ("forward", "backward"))
    if forward is not None:
        yield f"forward {forward:.3f} ms, backward {backward:.3f} ms: a backward has twice the matrix products"
    yield (
        f"the gradient of {len(missing)} of {total} tensors is None, {missing[0]} for one"
        if missing
        else "no gradient is None"
    )
    share = 100 * summary["parameters_trained"] / summary["parameters"]
    yield f"{share:.2f} % of the parameters are trained"
    if trainer.device.type == "cuda":
        # Weight, gradient and two moments; 16 bits less of a gradient in bfloat16.
        needed = (14 if v3.matrix_dtype(trainer.options) == v3.torch.bfloat16 else 16) * summary["parameters"] / 2**20
        yield f"peak {summary['peak_memory_mb']:.1f} MB; to train all takes {needed:.1f} MB without any activation"
    yield f"loss {summary['first_loss']:.4f} -> {summary['final_loss']:.4f}: compare stage 5 over 200 steps"


if __name__ == "__main__":
    sys.exit(run_stage(load(), TITLE, report))
