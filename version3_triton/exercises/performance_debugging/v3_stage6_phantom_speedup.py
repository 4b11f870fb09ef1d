#!/usr/bin/env python3
"""Stage 6: version 3 with the launches below. Find the fault and repair it.

python v3_stage6_phantom_speedup.py            # train; options of tiny_llama_v3.py are passed on
python v3_stage6_phantom_speedup.py --check    # is it repaired?
python v3_stage6_phantom_speedup.py --reveal   # explain it
"""

import sys

from stage_tools import load_v3, main

v3 = load_v3()
torch = v3.torch


def add_rms_norm(residual, branch, w, eps):
    """Return x = residual + branch [B, T, C] (branch None: nothing is added) and its RMSNorm."""
    x, C = residual if branch is None else torch.empty_like(residual), residual.shape[-1]
    y, rstd = torch.empty_like(x), torch.empty(x.numel() // C, dtype=torch.float32, device=x.device)
    tensors = residual, branch, w, x, y, rstd
    v3.launch_tiles(v3.rmsnorm_forward_kernel, len(rstd), C, *tensors, eps, whole_row=True)
    return x, y


def rotary_attention(qkv, cos, sin, H, K):
    """Return causal attention [B, T, H, D] of the packed projections [B, T, H + 2K, D], with RoPE."""
    B, T, heads, D = qkv.shape
    rotated, sizes = torch.empty_like(qkv), (T, heads, H + K)
    tensors = qkv, rotated, cos, sin
    v3.launch_tiles(v3.rope_kernel, B * T * heads, D // 2, *tensors, 1.0, *sizes, elements=2048, whole_row=True)
    o = torch.empty(B, T, H, D, dtype=qkv.dtype, device=qkv.device)
    lse = torch.empty(B, H, T, dtype=torch.float32, device=qkv.device)
    v3.launch_attention(v3.ATTENTION_FORWARD, rotated, H, K, o, lse)
    return o


def packed_swiglu(x):
    """Return silu(gate) · up [B, T, F] for x [B, T, 2F], whose last dimension holds gate and then up."""
    y = torch.empty(*x.shape[:-1], x.shape[-1] // 2, dtype=x.dtype, device=x.device)
    F = y.shape[-1]
    v3.launch_tiles(v3.swiglu_forward_kernel, y.numel() // F, F, x, y, elements=2048)
    return y


v3.add_rms_norm, v3.rotary_attention, v3.packed_swiglu = add_rms_norm, rotary_attention, packed_swiglu

if __name__ == "__main__":
    sys.exit(main(v3, 6))
