#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Tiny LLaMA, version 3: Triton kernels, forward and backward, for everything between the matmuls.

    python tiny_llama_v3.py                                     # synthetic data, on the GPU if there is one
    python tiny_llama_v3.py --preset medium --use-amp
    python tiny_llama_v3.py --disable-attention-kernel          # each kernel has its own switch
    torchrun --nproc-per-node 2 tiny_llama_v3.py --use-amp      # DDP on two GPUs

The lesson is bytes: read and write a tensor once instead of several times. The matmuls stay with the BLAS. RMSNorm with
the residual add, RoPE, SwiGLU, attention, the loss and AdamW have one kernel per direction. With --use-amp the model
computes with 16-bit weights, and the optimizer keeps the bits that they lack of float32. Without a GPU the kernels run
in Triton's interpreter: the results are right, the times mean nothing.

Shapes: B batch, T tokens, C hidden_dim, H query heads, K key/value heads, D = C / H, F intermediate_dim, V vocab_size.
"""

import argparse
import functools
import itertools
import math
import os

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton reads it on import
os.environ.setdefault("TRITON_CACHE_AUTOTUNING", "1")  # cache the results of triton.autotune on disk
import triton
import triton.language as tl

VERSION = 3
GRAPH_BY_DEFAULT = True
DETERMINISTIC_BY_DEFAULT = False
FSDP_GATHERS_AMP_DTYPE = True  # the kernels compute in the dtype of the weights; autocast is not used

HEAD_DIMS = (16, 32, 64, 128)  # of the attention kernels
MAX_ROW = 32768  # columns of the RMSNorm kernels, which hold whole rows in registers
MAX_ONE_HOT = 4096  # vocabulary up to which the embedding's gradient is a matmul
TRITON_DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def at_least_float32(x):
    return x.to(torch.promote_types(x.dtype, torch.float32))


def rms_norm(x, weight, eps):
    """Return x / sqrt(mean(x²) + eps) · weight, computed in float32."""
    wide = at_least_float32(x)
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * weight).to(x.dtype)


def rope_tables(seq_len, head_dim, theta, device):
    """Return cos and sin of t · theta^(-2i / D) for position t and pair i: two float32 tensors [T, D/2]."""
    frequencies = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angles = torch.outer(torch.arange(seq_len, dtype=torch.float64), frequencies)
    return angles.cos().float().to(device), angles.sin().float().to(device)


def apply_rope(x, cos, sin):
    """Rotate the pairs (x[i], x[i + D/2]) of every head of x [B, T, heads, D]."""
    x1, x2 = at_least_float32(x).chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], dim=-1).to(x.dtype)


def causal_attention(q, k, v):
    """Return softmax(q kᵀ / sqrt(D)) v under a causal mask: q [B, T, H, D], k and v [B, T, K, D] -> [B, T, H, D].

    One kernel computes it tile by tile and never writes the T x T scores (FlashAttention, arXiv:2205.14135).
    """
    grouped = q.dtype in (torch.float16, torch.bfloat16)
    if not grouped:  # in float32 only the slow kernel that writes the scores lets heads share keys
        k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], dim=2) for x in (k, v))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped).transpose(1, 2)


def swiglu(gate, up):
    """Return silu(gate) · up, where silu(x) = x · sigmoid(x)."""
    return F.silu(gate) * up


# ---------------------------------------------------------------- kernels: launch parameters and input checks


def gpu_architecture(device):
    """Return the GPU's architecture, such as "gfx942" or "sm_90"; "cpu" in Triton's interpreter."""
    if device.type == "cpu":
        return "cpu"
    gpu = torch.cuda.get_device_properties(device)
    return gpu.gcnArchName.split(":")[0] if torch.version.hip else f"sm_{gpu.major}{gpu.minor}"


def program_count(device):
    """Return how many programs keep the GPU busy, for kernels that loop over their work."""
    return 4 * torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def tile_shape(columns, device, elements=4096, whole_row=False):
    """Return ROWS and BLOCK (powers of two) of a tile of about so many elements, BLOCK covering a row or part of it."""
    if gpu_architecture(device) == "cpu":
        elements = 65536  # the interpreter's time grows with the programs, not with the elements
    block = triton.next_power_of_2(columns)
    block = block if whole_row else min(block, elements)
    return {"ROWS": max(1, elements // block), "BLOCK": block}


def check_input(name, x):
    """Refuse a tensor that the kernels would read wrongly, before any launch."""
    if x.dtype not in TRITON_DTYPES or x.ndim < 2 or not x.numel():
        wanted = "float32, float16 or bfloat16 in at least 2 dimensions, none of them empty"
        raise ValueError(f"{name} must be {wanted}, got {x.dtype} {list(x.shape)}")


def check_tensor(name, x, shape, dtype, device):
    """Refuse a tensor of another shape, dtype or device."""
    if x.shape != shape or x.dtype != dtype or x.device != device:
        got = f"{x.dtype} {list(x.shape)} on {x.device}"
        raise ValueError(f"{name} must be {dtype} {list(shape)} on {device}, got {got}")


# ---------------------------------------------------------------- RMSNorm (arXiv:1910.07467) with the residual add
# forward    x = residual + branch,  rstd = 1 / sqrt(mean(x²) + eps),  y = x · rstd · w
# backward   g = dy · w,  dx = dresidual + rstd · (g - x · rstd² · mean(g · x)),  dw = Σ_rows dy · x · rstd
#            x is a sum: dx is the gradient of both of its terms


@triton.jit
def rmsnorm_forward_kernel(
    residual_ptr, branch_ptr, w_ptr, x_ptr, y_ptr, rstd_ptr, rows, C, eps,
    ADD: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Normalize ROWS rows of [rows, C] per program; BLOCK >= C."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    mask = (row[:, None] < rows) & (column[None, :] < C)
    offsets = row[:, None].to(tl.int64) * C + column[None, :]
    x = tl.load(residual_ptr + offsets, mask=mask, other=0.0)
    if ADD:
        branch = tl.load(branch_ptr + offsets, mask=mask, other=0.0)
        x = (x.to(tl.float32) + branch.to(tl.float32)).to(x_ptr.dtype.element_ty)
        tl.store(x_ptr + offsets, x, mask=mask)
    x = x.to(tl.float32)
    rstd = tl.rsqrt(tl.sum(x * x, 1) / C + eps)
    tl.store(rstd_ptr + row, rstd, mask=row < rows)
    w = tl.load(w_ptr + column, mask=column < C, other=0.0).to(tl.float32)
    tl.store(y_ptr + offsets, (x * rstd[:, None] * w[None, :]).to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def rmsnorm_backward_kernel(
    dy_ptr, dresidual_ptr, x_ptr, w_ptr, rstd_ptr, dx_ptr, dw_ptr, rows, C,
    ADD: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Loop over tiles p, p + P, ... of ROWS rows in program p of P, and store its partial sum of dw in dw[p]."""
    column = tl.arange(0, BLOCK)
    w = tl.load(w_ptr + column, mask=column < C, other=0.0).to(tl.float32)
    dw = tl.zeros([ROWS, BLOCK], tl.float32)
    for first in range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        row = first + tl.arange(0, ROWS)
        mask = (row[:, None] < rows) & (column[None, :] < C)
        offsets = row[:, None].to(tl.int64) * C + column[None, :]
        dy = tl.load(dy_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + row, mask=row < rows, other=0.0)[:, None]
        g = dy * w[None, :]
        dx = rstd * (g - x * (rstd * rstd * tl.sum(g * x, 1)[:, None] / C))
        if ADD:
            dx += tl.load(dresidual_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        dw += dy * x * rstd
        tl.store(dx_ptr + offsets, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    tl.store(dw_ptr + tl.program_id(0).to(tl.int64) * C + column, tl.sum(dw, 0), mask=column < C)


@triton.jit
def column_sum_kernel(x_ptr, sum_ptr, rows, C, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Sum BLOCK columns of x [rows, C] per program, always in the same order: no atomics."""
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    partial_sums = tl.zeros([ROWS, BLOCK], tl.float32)
    for first in range(0, rows, ROWS):
        row = first + tl.arange(0, ROWS)[:, None]
        mask = (row < rows) & (column[None, :] < C)
        partial_sums += tl.load(x_ptr + row.to(tl.int64) * C + column[None, :], mask=mask, other=0.0)
    tl.store(sum_ptr + column, tl.sum(partial_sums, 0), mask=column < C)


def column_sums(x):
    """Return the float32 sums of the columns of x [rows, C]."""
    (rows, C), on_cpu = x.shape, gpu_architecture(x.device) == "cpu"
    sums = torch.empty(C, dtype=torch.float32, device=x.device)
    ROWS, BLOCK = (4, triton.next_power_of_2(C)) if on_cpu else (128, 8)
    column_sum_kernel[(triton.cdiv(C, BLOCK),)](x, sums, rows, C, ROWS, BLOCK, num_warps=8)
    return sums


class AddRMSNormFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, residual, branch, w, eps):
        ctx.set_materialize_grads(False)
        ctx.add = branch is not None
        residual = residual.contiguous()
        branch, x = (branch.contiguous(), torch.empty_like(residual)) if ctx.add else (residual, residual)
        y, C = torch.empty_like(x), x.shape[-1]
        rstd = torch.empty(x.numel() // C, dtype=torch.float32, device=x.device)
        tile = tile_shape(C, x.device, whole_row=True)
        rmsnorm_forward_kernel[(triton.cdiv(len(rstd), tile["ROWS"]),)](
            residual, branch, w, x, y, rstd, len(rstd), C, eps, ctx.add, **tile
        )
        ctx.save_for_backward(x, w, rstd)
        return x, y

    @staticmethod
    @once_differentiable
    def backward(ctx, dresidual, dy):
        x, w, rstd = ctx.saved_tensors
        C, rows, add = x.shape[-1], len(rstd), dresidual is not None
        dy = torch.zeros_like(x) if dy is None else dy.contiguous()
        dresidual = dresidual.contiguous() if add else dy
        # Each iteration loads, reduces and stores one tile: many small programs keep the memory busy.
        wide = x.dtype == torch.float32
        tile = tile_shape(C, x.device, elements=2048 if wide else 1024, whole_row=True)
        programs = min(triton.cdiv(rows, tile["ROWS"]), program_count(x.device) * (1 if wide else 2))
        dx, partial_sums = torch.empty_like(x), torch.empty(programs, C, dtype=torch.float32, device=x.device)
        rmsnorm_backward_kernel[(programs,)](
            dy, dresidual, x, w, rstd, dx, partial_sums, rows, C, add, **tile,
            num_warps=8 if wide else 4 if C > 512 else 2,
        )  # fmt: skip
        return dx, dx if ctx.add else None, column_sums(partial_sums).to(w.dtype), None


def add_rms_norm(residual, branch, w, eps):
    """Return x = residual + branch [..., C] (branch None: nothing is added) and x / sqrt(mean(x²) + eps) · w."""
    check_input("add_rms_norm: residual", residual)
    C, device = residual.shape[-1], residual.device
    if C > MAX_ROW:
        raise ValueError(f"add_rms_norm: rows must have at most {MAX_ROW} columns, got {C}")
    check_tensor("add_rms_norm: w", w, (C,), w.dtype if w.dtype in TRITON_DTYPES else torch.float32, device)
    if branch is not None:
        check_tensor("add_rms_norm: branch", branch, residual.shape, residual.dtype, device)
    return AddRMSNormFunction.apply(residual, branch, w.contiguous(), eps)


# ---------------------------------------------------------------- RoPE (arXiv:2104.09864) on the packed projections
# forward    (x₁, x₂) -> (x₁ · cos - x₂ · sin, x₂ · cos + x₁ · sin)
# backward   the transpose of a rotation is the rotation by the opposite angle: the same kernel with sin negated
# Value heads are copied: query, key and value stay in one tensor from their projection to their gradient.


@triton.jit
def rope_kernel(
    x_ptr, y_ptr, cos_ptr, sin_ptr, tokens, T, heads, rotated_heads, HALF,
    INVERSE: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Rotate TOKENS x HEADS heads of x [tokens, heads, 2 · HALF] per program; copy heads from `rotated_heads` on."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)[:, None, None]
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[None, :, None]
    pair = tl.arange(0, PAIRS)[None, None, :]
    angle = (token % T) * HALF + pair
    angle_mask = (token < tokens) & (pair < HALF)
    cos = tl.load(cos_ptr + angle, mask=angle_mask, other=0.0)
    sin = tl.load(sin_ptr + angle, mask=angle_mask, other=0.0)
    if INVERSE:
        sin = -sin
    cos = tl.where(head < rotated_heads, cos, 1.0)
    sin = tl.where(head < rotated_heads, sin, 0.0)
    mask = angle_mask & (head < heads)
    offsets = (token.to(tl.int64) * heads + head) * (2 * HALF) + pair
    x1 = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    x2 = tl.load(x_ptr + offsets + HALF, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + offsets, (x1 * cos - x2 * sin).to(y_ptr.dtype.element_ty), mask=mask)
    tl.store(y_ptr + offsets + HALF, (x2 * cos + x1 * sin).to(y_ptr.dtype.element_ty), mask=mask)


def rotate(x, cos, sin, rotated_heads, inverse):
    """Launch rope_kernel on x [B, T, heads, D] and return the result."""
    B, T, heads, D = x.shape
    x = x.contiguous()
    y = torch.empty_like(x)
    pairs = triton.next_power_of_2(D // 2)
    tile = tile_shape(pairs * triton.next_power_of_2(heads), x.device, elements=2048)
    grid = (triton.cdiv(B * T, tile["ROWS"]), triton.cdiv(heads * pairs, tile["BLOCK"]))
    rope_kernel[grid](
        x, y, cos, sin, B * T, T, heads, rotated_heads, D // 2, inverse, tile["ROWS"], tile["BLOCK"] // pairs, pairs
    )
    return y


class RoPEFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, cos, sin, rotated_heads):
        ctx.save_for_backward(cos, sin)
        ctx.rotated_heads = rotated_heads
        return rotate(x, cos, sin, rotated_heads, inverse=False)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        return rotate(dy, *ctx.saved_tensors, ctx.rotated_heads, inverse=True), None, None, None


def check_rope(name, x, cos, sin):
    check_input(f"{name}: x", x)
    if x.ndim != 4 or x.shape[3] % 2:
        raise ValueError(f"{name}: x must be [B, T, heads, D] with an even D, got {list(x.shape)}")
    check_tensor(f"{name}: cos", cos, (x.shape[1], x.shape[3] // 2), torch.float32, x.device)
    check_tensor(f"{name}: sin", sin, cos.shape, torch.float32, x.device)


def rope(x, cos, sin, rotated_heads):
    """Rotate the first heads of x [B, T, heads, D] by the angles of cos and sin [T, D/2], and copy the others."""
    check_rope("rope", x, cos, sin)
    if not 0 <= rotated_heads <= x.shape[2]:
        raise ValueError(f"rope: rotated_heads must be from 0 to {x.shape[2]}, got {rotated_heads}")
    return RoPEFunction.apply(x, cos.contiguous(), sin.contiguous(), rotated_heads)


# ---------------------------------------------------------------- SwiGLU (arXiv:2002.05202) on the packed projections
# forward    y = silu(a) · b,  silu(a) = a · σ(a)
# backward   da = dy · b · σ(a) · (1 + a · (1 - σ(a))),  db = dy · silu(a);  σ(a) is recomputed, not saved


@triton.jit
def swiglu_forward_kernel(x_ptr, y_ptr, rows, F, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Compute a tile [ROWS, BLOCK] of y [rows, F] per program from x [rows, 2F], whose rows hold a and then b."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    column = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    mask = (row < rows) & (column < F)
    a = tl.load(x_ptr + row * 2 * F + column, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(x_ptr + row * 2 * F + F + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * F + column, (a * tl.sigmoid(a) * b).to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def swiglu_backward_kernel(dy_ptr, x_ptr, dx_ptr, rows, F, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Compute a tile [ROWS, BLOCK] of both halves of dx [rows, 2F] per program."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    column = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    mask = (row < rows) & (column < F)
    dy = tl.load(dy_ptr + row * F + column, mask=mask, other=0.0).to(tl.float32)
    a = tl.load(x_ptr + row * 2 * F + column, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(x_ptr + row * 2 * F + F + column, mask=mask, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(a)
    da = dy * b * sigmoid * (1 + a * (1 - sigmoid))
    tl.store(dx_ptr + row * 2 * F + column, da.to(dx_ptr.dtype.element_ty), mask=mask)
    tl.store(dx_ptr + row * 2 * F + F + column, (dy * a * sigmoid).to(dx_ptr.dtype.element_ty), mask=mask)


def launch_swiglu(kernel, rows, F, *tensors):
    tile = tile_shape(F, tensors[0].device, elements=2048)
    kernel[(triton.cdiv(rows, tile["ROWS"]), triton.cdiv(F, tile["BLOCK"]))](*tensors, rows, F, **tile)


class SwiGLUFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        y = torch.empty(x.shape[0], x.shape[1] // 2, dtype=x.dtype, device=x.device)
        launch_swiglu(swiglu_forward_kernel, *y.shape, x, y)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        dx = torch.empty_like(x)
        launch_swiglu(swiglu_backward_kernel, *dy.shape, dy.contiguous(), x, dx)
        return dx


def packed_swiglu(x):
    """Return silu(a) · b [..., F] for x [..., 2F], whose last dimension holds a and then b."""
    check_input("packed_swiglu: x", x)
    if x.shape[-1] % 2:
        raise ValueError(f"packed_swiglu: x must have an even number of columns, got {x.shape[-1]}")
    return SwiGLUFunction.apply(x.flatten(0, -2).contiguous()).view(*x.shape[:-1], x.shape[-1] // 2)


# ---------------------------------------------------------------- causal flash attention with grouped queries
# qkv [B, T, H + 2K, D] holds H query, K key and K value heads; query head h reads key/value head h // (H/K).
# forward    S = q kᵀ / sqrt(D) where key <= query,  lse = logsumexp(S),  P = exp(S - lse),  o = P v
# backward   Δ = Σ_D do · o,  dS = P · (do vᵀ - Δ),  dq = dS k / sqrt(D),  dk = dSᵀ q / sqrt(D),  dv = Pᵀ do
# Exponentials are base 2, the hardware's own: `scale` is log2(e) / sqrt(D), and lse is in units of log 2.
# With RoPE tables the backward kernels unrotate dq and dk in registers, before they store them.
# Memory grows linearly with T: the scores exist one tile at a time (Dao et al., FlashAttention, arXiv:2205.14135).


@triton.jit
def load_tile(ptr, first, T, STRIDE: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr):
    """Load rows first to first + ROWS of a matrix [T, D]; rows from T on read as zero."""
    row = tl.arange(0, ROWS)[:, None]
    pointers = ptr + first * tl.cast(STRIDE, tl.int64) + row * STRIDE + tl.arange(0, D)[None, :]
    return tl.load(pointers, mask=first + row < T, other=0.0)


@triton.jit
def store_tile(ptr, tile, first, T, STRIDE: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr):
    row = tl.arange(0, ROWS)[:, None]
    pointers = ptr + first * tl.cast(STRIDE, tl.int64) + row * STRIDE + tl.arange(0, D)[None, :]
    tl.store(pointers, tile.to(ptr.dtype.element_ty), mask=first + row < T)


@triton.jit
def unrotate(tile, cos_ptr, sin_ptr, first, T, ROWS: tl.constexpr, D: tl.constexpr):
    """Rotate every row by the opposite of its position's angle; return the tile as it is without RoPE tables."""
    if cos_ptr is None:
        return tile
    else:
        HALF: tl.constexpr = D // 2
        x1, x2 = tl.split(tl.permute(tl.reshape(tile, [ROWS, 2, HALF]), (0, 2, 1)))
        cos, sin = load_tile(cos_ptr, first, T, HALF, ROWS, HALF), load_tile(sin_ptr, first, T, HALF, ROWS, HALF)
        pairs = tl.join(x1 * cos + x2 * sin, x2 * cos - x1 * sin)
        return tl.reshape(tl.permute(pairs, (0, 2, 1)), [ROWS, D])


@triton.jit
def attention_forward_kernel(
    qkv_ptr, o_ptr, lse_ptr, T, scale,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_Q rows of o for one head per program: online softmax over the keys up to the diagonal."""
    tl.static_assert(BLOCK_Q % BLOCK_K == 0)
    STRIDE: tl.constexpr = (H + 2 * K) * D
    first = (tl.num_programs(1) - 1 - tl.program_id(1)) * BLOCK_Q  # the longest rows start first
    b, h = (tl.program_id(0) // H).to(tl.int64), tl.program_id(0) % H
    k_ptr = qkv_ptr + b * T * STRIDE + (H + h // (H // K)) * D
    v_ptr = k_ptr + K * D
    q = load_tile(qkv_ptr + b * T * STRIDE + h * D, first, T, STRIDE, BLOCK_Q, D)
    query, key = first + tl.arange(0, BLOCK_Q), tl.arange(0, BLOCK_K)
    o = tl.zeros([BLOCK_Q, D], tl.float32)
    m, l = tl.full([BLOCK_Q], -float("inf"), tl.float32), tl.zeros([BLOCK_Q], tl.float32)
    for DIAGONAL in tl.static_range(2):  # tiles left of the diagonal need no mask
        for start in range(DIAGONAL * first, min(first + DIAGONAL * BLOCK_Q, T), BLOCK_K):
            k = load_tile(k_ptr, start, T, STRIDE, BLOCK_K, D)
            S = tl.dot(q, tl.trans(k), input_precision=PRECISION)
            if DIAGONAL:
                S = tl.where(query[:, None] >= start + key[None, :], S, -float("inf"))
            m_new = tl.maximum(m, tl.max(S, 1))
            P = tl.exp2(S * scale - (m_new * scale)[:, None])
            alpha = tl.exp2((m - m_new) * scale)
            v = load_tile(v_ptr, start, T, STRIDE, BLOCK_K, D)
            o = tl.dot(P.to(v.dtype), v, o * alpha[:, None], input_precision=PRECISION)
            m, l = m_new, l * alpha + tl.sum(P, 1)
    store_tile(o_ptr + (b * T * H + h) * D, o / l[:, None], first, T, H * D, BLOCK_Q, D)
    tl.store(lse_ptr + tl.program_id(0).to(tl.int64) * T + query, m * scale + tl.log2(l), mask=query < T)


@triton.jit
def attention_backward_dq_kernel(
    qkv_ptr, o_ptr, do_ptr, lse_ptr, delta_ptr, dqkv_ptr, cos_ptr, sin_ptr, T, scale,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_Q rows of dq for one head per program, and their Δ for the dk/dv kernel."""
    tl.static_assert(BLOCK_Q % BLOCK_K == 0)
    STRIDE: tl.constexpr = (H + 2 * K) * D
    first = (tl.num_programs(1) - 1 - tl.program_id(1)) * BLOCK_Q
    b, h = (tl.program_id(0) // H).to(tl.int64), tl.program_id(0) % H
    q_offset, o_offset = b * T * STRIDE + h * D, (b * T * H + h) * D
    k_ptr = qkv_ptr + b * T * STRIDE + (H + h // (H // K)) * D
    v_ptr = k_ptr + K * D
    q = load_tile(qkv_ptr + q_offset, first, T, STRIDE, BLOCK_Q, D)
    o = load_tile(o_ptr + o_offset, first, T, H * D, BLOCK_Q, D)
    do = load_tile(do_ptr + o_offset, first, T, H * D, BLOCK_Q, D)
    query, key = first + tl.arange(0, BLOCK_Q), tl.arange(0, BLOCK_K)
    row = tl.program_id(0).to(tl.int64) * T + query
    lse = tl.load(lse_ptr + row, mask=query < T, other=0.0)
    delta = tl.sum(do.to(tl.float32) * o.to(tl.float32), 1)
    tl.store(delta_ptr + row, delta, mask=query < T)
    dq = tl.zeros([BLOCK_Q, D], tl.float32)
    for DIAGONAL in tl.static_range(2):
        for start in range(DIAGONAL * first, min(first + DIAGONAL * BLOCK_Q, T), BLOCK_K):
            k = load_tile(k_ptr, start, T, STRIDE, BLOCK_K, D)
            v = load_tile(v_ptr, start, T, STRIDE, BLOCK_K, D)
            P = tl.exp2(tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale - lse[:, None])
            if DIAGONAL:
                P = tl.where(query[:, None] >= start + key[None, :], P, 0.0)
            dS = P * (tl.dot(do, tl.trans(v), input_precision=PRECISION) - delta[:, None])
            dq = tl.dot(dS.to(k.dtype), k, dq, input_precision=PRECISION)
    dq = unrotate(dq * (scale * 0.6931471805599453), cos_ptr, sin_ptr, first, T, BLOCK_Q, D)  # · ln 2 = 1 / sqrt(D)
    store_tile(dqkv_ptr + q_offset, dq, first, T, STRIDE, BLOCK_Q, D)


@triton.jit
def attention_backward_dkdv_kernel(
    qkv_ptr, do_ptr, lse_ptr, delta_ptr, dqkv_ptr, cos_ptr, sin_ptr, T, scale,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_K rows of dk and dv of one key/value head per program: no atomics. Scores are transposed."""
    tl.static_assert(BLOCK_K % BLOCK_Q == 0)
    STRIDE: tl.constexpr = (H + 2 * K) * D
    first = tl.program_id(1) * BLOCK_K
    b, kv = (tl.program_id(0) // K).to(tl.int64), tl.program_id(0) % K
    k_offset = b * T * STRIDE + (H + kv) * D
    k = load_tile(qkv_ptr + k_offset, first, T, STRIDE, BLOCK_K, D)
    v = load_tile(qkv_ptr + k_offset + K * D, first, T, STRIDE, BLOCK_K, D)
    dk, dv = tl.zeros([BLOCK_K, D], tl.float32), tl.zeros([BLOCK_K, D], tl.float32)
    key = first + tl.arange(0, BLOCK_K)
    for h in range(kv * (H // K), (kv + 1) * (H // K)):  # every query head that reads this key/value head
        q_ptr = qkv_ptr + b * T * STRIDE + h * D
        o_offset, lse_offset = (b * T * H + h) * D, (b * H + h) * T
        for BELOW in tl.static_range(2):  # tiles below the diagonal need no mask
            for start in range(first + BELOW * BLOCK_K, T if BELOW else min(first + BLOCK_K, T), BLOCK_Q):
                q = load_tile(q_ptr, start, T, STRIDE, BLOCK_Q, D)
                do = load_tile(do_ptr + o_offset, start, T, H * D, BLOCK_Q, D)
                query = start + tl.arange(0, BLOCK_Q)
                lse = tl.load(lse_ptr + lse_offset + query, mask=query < T, other=0.0)
                delta = tl.load(delta_ptr + lse_offset + query, mask=query < T, other=0.0)
                P = tl.exp2(tl.dot(k, tl.trans(q), input_precision=PRECISION) * scale - lse[None, :])
                if not BELOW:
                    P = tl.where(key[:, None] <= query[None, :], P, 0.0)
                dv = tl.dot(P.to(do.dtype), do, dv, input_precision=PRECISION)
                dS = P * (tl.dot(v, tl.trans(do), input_precision=PRECISION) - delta[None, :])
                dk = tl.dot(dS.to(q.dtype), q, dk, input_precision=PRECISION)
    dk = unrotate(dk * (scale * 0.6931471805599453), cos_ptr, sin_ptr, first, T, BLOCK_K, D)
    store_tile(dqkv_ptr + k_offset, dk, first, T, STRIDE, BLOCK_K, D)
    store_tile(dqkv_ptr + k_offset + K * D, dv, first, T, STRIDE, BLOCK_K, D)


def launch_attention(kernel, name, qkv, H, K, *tensors):
    """Launch one of the three kernels: one program per head of the batch and BLOCK_Q or BLOCK_K tokens."""
    B, T, _, D = qkv.shape
    architecture = gpu_architecture(qkv.device)
    constants = {"H": H, "K": K, "D": D, "PRECISION": dot_precision(architecture, qkv.dtype)}
    tiles = attention_tiles(name, architecture, D, qkv.dtype, T, constants["PRECISION"])
    fixed = len(tiles) == 1 or torch.are_deterministic_algorithms_enabled()
    if fixed:
        constants |= zip(("BLOCK_Q", "BLOCK_K", "num_warps", "num_stages"), tiles[0], strict=True)
    heads, block = (K, "BLOCK_K") if name == "dkdv" else (H, "BLOCK_Q")
    launcher = kernel if fixed else autotuned(kernel, tiles)
    launcher[lambda meta: (B * heads, triton.cdiv(T, meta[block]))](
        qkv, *tensors, T, math.log2(math.e) / math.sqrt(D), **constants
    )


class AttentionFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, qkv, cos, sin, H, K):
        if cos is not None:
            with annotate("rope"):
                qkv = rotate(qkv, cos, sin, H + K, inverse=False)
        B, T, _, D = qkv.shape
        o = torch.empty(B, T, H, D, dtype=qkv.dtype, device=qkv.device)
        lse = torch.empty(B, H, T, dtype=torch.float32, device=qkv.device)
        launch_attention(attention_forward_kernel, "forward", qkv, H, K, o, lse)
        ctx.save_for_backward(qkv, cos, sin, o, lse)
        ctx.heads = H, K
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx, do):
        qkv, cos, sin, o, lse = ctx.saved_tensors
        do, dqkv, delta = do.contiguous(), torch.empty_like(qkv), torch.empty_like(lse)
        launch_attention(attention_backward_dq_kernel, "dq", qkv, *ctx.heads, o, do, lse, delta, dqkv, cos, sin)
        launch_attention(attention_backward_dkdv_kernel, "dkdv", qkv, *ctx.heads, do, lse, delta, dqkv, cos, sin)
        return dqkv, None, None, None, None


def check_attention(name, qkv, H, K):
    check_input(f"{name}: qkv", qkv)
    if qkv.ndim != 4 or qkv.shape[3] not in HEAD_DIMS or min(H, K) < 1 or H % K or qkv.shape[2] != H + 2 * K:
        wanted = f"[B, T, H + 2K, D] with H a multiple of K and D in {HEAD_DIMS}"
        raise ValueError(f"{name}: qkv must be {wanted}, got {list(qkv.shape)}, H = {H} and K = {K}")


def flash_attention(qkv, H, K):
    """Return causal attention [B, T, H, D] of H query heads over K key/value heads, packed as qkv [B, T, H + 2K, D]."""
    check_attention("flash_attention", qkv, H, K)
    return AttentionFunction.apply(qkv.contiguous(), None, None, H, K)


def rotary_attention(qkv, cos, sin, H, K):
    """Return flash_attention(rope(qkv, cos, sin, H + K), H, K), with one pass over memory less in the backward."""
    check_attention("rotary_attention", qkv, H, K)
    check_rope("rotary_attention", qkv, cos, sin)
    return AttentionFunction.apply(qkv.contiguous(), cos.contiguous(), sin.contiguous(), H, K)


# ---------------------------------------------------------------- tiles of the attention kernels
# A tile is (BLOCK_Q, BLOCK_K, num_warps, num_stages); rows are for forward, dq, dk/dv. MEASURED_TILES, of D = 64, are
# used as they are. For other GPUs, dtypes and head sizes triton.autotune times the candidates in the first eager step
# with this T, D and dtype, and caches the fastest on disk; --deterministic takes the first one. Except for D = 128 on
# gfx11, each kernel has candidates that compile without spilled registers.
KERNEL_ROWS = ("forward", "dq", "dkdv")
MEASURED_TILES = {
    ("sm_90", "16-bit"): ((64, 64, 4, 2), (64, 64, 4, 3), (32, 64, 4, 3)),
    ("sm_90", "tf32"): ((64, 64, 4, 1), (64, 64, 4, 2), (32, 32, 4, 2)),
    ("sm_90", "tf32x3"): ((64, 64, 4, 1), (64, 64, 4, 1), (32, 32, 4, 1)),
}
LONG_FORWARD_TILE = (128, 64, 8, 3)  # sm_90, 16-bit, T > 1024: long rows pay for more queries per tile
CANDIDATE_TILES = {
    "16-bit": (
        ((64, 32, 4, 2), (64, 64, 4, 2), (128, 64, 8, 3), (128, 64, 4, 2), (128, 32, 4, 2), (64, 32, 8, 1)),
        ((32, 16, 4, 1), (64, 64, 4, 3), (128, 64, 8, 3), (128, 64, 4, 1), (128, 32, 8, 1), (64, 32, 8, 1)),
        ((16, 32, 4, 1), (32, 64, 4, 3), (32, 128, 8, 3), (32, 128, 4, 1), (32, 64, 8, 2), (16, 64, 16, 1)),
    ),
    "32-bit": (
        ((32, 16, 4, 1), (64, 64, 4, 1), (64, 64, 8, 1), (32, 32, 4, 2), (64, 16, 4, 2), (16, 16, 8, 1)),
        ((16, 16, 8, 1), (64, 64, 4, 1), (64, 64, 4, 2), (64, 32, 4, 1), (32, 32, 4, 2), (32, 16, 4, 2)),
        ((16, 16, 8, 1), (32, 32, 4, 1), (32, 32, 4, 2), (32, 64, 4, 1), (16, 32, 4, 1), (16, 32, 16, 1)),
    ),
}


def attention_tiles(kernel, architecture, D, dtype, T, precision):
    """Return the tiles to choose from for the "forward", "dq" or "dkdv" kernel."""
    if architecture == "cpu":
        return ((64, 64, 4, 1),)
    wide, row = dtype == torch.float32, KERNEL_ROWS.index(kernel)
    measured = MEASURED_TILES.get((architecture, precision if wide else "16-bit"))
    if D != 64 or not measured:
        return CANDIDATE_TILES["32-bit" if wide else "16-bit"][row]
    return (LONG_FORWARD_TILE if kernel == "forward" and T > 1024 and not wide else measured[row],)


def dot_precision(architecture, dtype):
    """Return how the kernels multiply float32: in TF32 where PyTorch's matmuls may use it, else exactly."""
    if dtype != torch.float32 or architecture == "cpu":
        return "ieee"
    allowed = torch.get_float32_matmul_precision() != "highest"
    if architecture.startswith("sm_") and int(architecture[3:]) >= 80:
        return "tf32" if allowed else "tf32x3"  # three TF32 dots are as exact as float32, and faster than FMA units
    return "tf32" if allowed and architecture == "gfx942" else "ieee"


@functools.cache
def autotuned(kernel, tiles):
    configs = [triton.Config({"BLOCK_Q": q, "BLOCK_K": k}, num_warps=w, num_stages=s) for q, k, w, s in tiles]
    return triton.autotune(configs, key=["T", "D", "PRECISION"])(kernel)


# ---------------------------------------------------------------- cross-entropy
# forward    loss = mean over rows of logsumexp(x) - x[label];  logsumexp is saved as the row maximum m and log(l),
#            because their sum would round log(l) away where logits are large
# backward   dx = (softmax(x) - onehot(label)) · dloss / rows


@triton.jit
def cross_entropy_forward_kernel(
    x_ptr, label_ptr, loss_ptr, m_ptr, log_l_ptr, rows, V, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Compute ROWS losses from x [rows, V] per program, looping over the vocabulary in tiles of BLOCK."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    x_ptr += row.to(tl.int64)[:, None] * V
    m = tl.full([ROWS], -float("inf"), tl.float32)
    l = tl.zeros([ROWS], tl.float32)
    for start in range(0, V, BLOCK):
        column = start + tl.arange(0, BLOCK)[None, :]
        # Rows past the end read as zero: their sums stay finite, and nothing of them is stored.
        x = tl.load(x_ptr + column, mask=(row[:, None] < rows) & (column < V), other=0.0).to(tl.float32)
        x = tl.where(column < V, x, -float("inf"))
        m_new = tl.maximum(m, tl.max(x, 1))
        l = l * tl.exp(m - m_new) + tl.sum(tl.exp(x - m_new[:, None]), 1)
        m = m_new
    label = tl.load(label_ptr + row, mask=row < rows, other=-1)
    valid = (label >= 0) & (label < V)
    x_label = tl.load(x_ptr + label[:, None], mask=valid[:, None], other=float("nan")).to(tl.float32)
    tl.store(m_ptr + row, m, mask=row < rows)
    tl.store(log_l_ptr + row, tl.log(l), mask=row < rows)
    tl.store(loss_ptr + row, tl.log(l) - (tl.sum(x_label, 1) - m), mask=row < rows)


@triton.jit
def cross_entropy_backward_kernel(
    x_ptr, label_ptr, m_ptr, log_l_ptr, dloss_ptr, dx_ptr, rows, V, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Compute a tile [ROWS, BLOCK] of dx [rows, V] per program."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    mask = (row[:, None] < rows) & (column < V)
    offsets = row.to(tl.int64)[:, None] * V + column
    x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    m = tl.load(m_ptr + row, mask=row < rows, other=0.0)
    log_l = tl.load(log_l_ptr + row, mask=row < rows, other=0.0)
    label = tl.load(label_ptr + row, mask=row < rows, other=0)
    onehot = tl.where(column == label[:, None], 1.0, 0.0)
    dx = (tl.exp((x - m[:, None]) - log_l[:, None]) - onehot) * (tl.load(dloss_ptr) / rows)
    tl.store(dx_ptr + offsets, dx.to(dx_ptr.dtype.element_ty), mask=mask)


class CrossEntropyFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, labels):
        rows, V = logits.shape
        loss, m, log_l = (torch.empty(rows, dtype=torch.float32, device=logits.device) for _ in range(3))
        tile = tile_shape(V, logits.device)
        grid = (triton.cdiv(rows, tile["ROWS"]),)
        cross_entropy_forward_kernel[grid](logits, labels, loss, m, log_l, rows, V, **tile)
        ctx.save_for_backward(logits, labels, m, log_l)
        return loss.mean()

    @staticmethod
    @once_differentiable
    def backward(ctx, dloss):
        logits, labels, m, log_l = ctx.saved_tensors
        rows, V = logits.shape
        dx = torch.empty_like(logits)
        tile = tile_shape(V, logits.device)
        grid = (triton.cdiv(rows, tile["ROWS"]), triton.cdiv(V, tile["BLOCK"]))
        cross_entropy_backward_kernel[grid](logits, labels, m, log_l, dloss, dx, rows, V, **tile)
        return dx, None


def cross_entropy(logits, labels):
    """Return the mean of logsumexp(logits) - logits[label] over all rows: logits [..., V], labels int64 [...].

    A label outside 0 to V - 1 makes the loss NaN: checking it here would wait for the GPU.
    """
    check_input("cross_entropy: logits", logits)
    check_tensor("cross_entropy: labels", labels, logits.shape[:-1], torch.int64, logits.device)
    return CrossEntropyFunction.apply(logits.flatten(0, -2).contiguous(), labels.flatten().contiguous())


# ---------------------------------------------------------------- AdamW for all parameters in one launch
# m = β₁ m + (1 - β₁) g,  v = β₂ v + (1 - β₂) g²,  w = (1 - lr · λ) w - lr · m̂ / (sqrt(v̂) + eps)
# The optimizer updates float32 weights; a 16-bit model computes with a rounded copy. bfloat16 is float32 without its
# lower 16 bits: beside such a copy only the low bits are stored, as an integer. bits of w = 2¹⁶ · copy + low bits
# Loshchilov and Hutter, Decoupled Weight Decay Regularization, arXiv:1711.05101


def split_bits(w):
    """Split float32 w without loss into a bfloat16 copy, halves rounded away from zero, and int16 low bits."""
    bits = w.contiguous().view(torch.int32)
    upper = torch.where(w.isnan(), 0x7FC0, (bits + 2**15) >> 16)  # 0x7FC0: NaN in bfloat16
    return upper.to(torch.int16).view(torch.bfloat16), (bits - (upper << 16)).to(torch.int16)


def join_bits(copy, low_bits):
    """Return the float32 weight that split_bits split."""
    return ((copy.detach().view(torch.int16).to(torch.int32) << 16) + low_bits).view(torch.float32)


def get_weight(parameter, state):
    """Return the float32 weight of a parameter: joined from its low bits, its master, or the parameter itself."""
    return join_bits(parameter, state["low_bits"]) if "low_bits" in state else state.get("master", parameter)


@torch.no_grad()
def set_weight(parameter, state, weight):
    """Overwrite a parameter, and its low bits or master, in place with a float32 weight."""
    if "low_bits" in state:
        copy, low_bits = split_bits(weight)
        parameter.copy_(copy)
        state["low_bits"].copy_(low_bits)
    else:
        parameter.copy_(weight)
        state.get("master", parameter).copy_(weight)


@triton.jit
def pointers(row, column: tl.constexpr, offsets, DTYPE: tl.constexpr):
    """Return pointers into the tensor whose address (a multiple of 16) that column of the table's row holds."""
    return tl.multiple_of(tl.load(row + column).to(tl.pointer_type(DTYPE)), 16) + offsets


# table [parameters, 6]: addresses of the parameter, of its low bits (bfloat16), master (float16) or itself (float32),
# of m, v and the gradient, and the element count. chunk [programs, 2]: the parameter and the part of it that a program
# updates. power [2]: β₁ᵗ and β₂ᵗ in float64. decay = 1 - lr · λ. The gradient scaler's pointers may be None.
@triton.jit
def adamw_kernel(
    table_ptr, chunk_ptr, power_ptr, grad_scale_ptr, found_inf_ptr,
    lr, decay, beta1, one_minus_beta1, beta2, one_minus_beta2, eps,
    DTYPE: tl.constexpr, SPLIT: tl.constexpr, COPY: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Update BLOCK elements of one parameter of that DTYPE per program; SPLIT: low bits, COPY: master."""
    row = table_ptr + tl.load(chunk_ptr + 2 * tl.program_id(0)) * 6
    offsets = tl.load(chunk_ptr + 2 * tl.program_id(0) + 1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    count = tl.load(row + 5)
    if found_inf_ptr is not None:  # a step whose scaled gradients overflowed changes nothing
        count = tl.where(tl.load(found_inf_ptr) == 0.0, count, 0)
    if ALIGNED:  # every count is a multiple of 16: masked loads may be wide
        count = tl.multiple_of(count, 16)
    mask = offsets < count
    m_ptr, v_ptr = pointers(row, 2, offsets, tl.float32), pointers(row, 3, offsets, tl.float32)
    g = tl.load(pointers(row, 4, offsets, DTYPE), mask=mask, other=0.0).to(tl.float32)
    if grad_scale_ptr is not None:
        g = g / tl.load(grad_scale_ptr)
    m = beta1 * tl.load(m_ptr, mask=mask, other=0.0) + one_minus_beta1 * g
    v = beta2 * tl.load(v_ptr, mask=mask, other=0.0) + one_minus_beta2 * g * g
    m_hat, v_hat = m / (1 - tl.load(power_ptr)).to(tl.float32), v / (1 - tl.load(power_ptr + 1)).to(tl.float32)
    if SPLIT:
        copy = tl.load(pointers(row, 0, offsets, tl.int16), mask=mask, other=0).to(tl.int32)
        low_bits = tl.load(pointers(row, 1, offsets, tl.int16), mask=mask, other=0).to(tl.int32)
        w = ((copy << 16) + low_bits).to(tl.float32, bitcast=True)
    else:
        w = tl.load(pointers(row, 1, offsets, tl.float32), mask=mask, other=0.0)
    w = decay * w - lr * m_hat / (tl.sqrt(v_hat) + eps)
    if SPLIT:
        bits = w.to(tl.int32, bitcast=True)
        upper = tl.where(w == w, (bits + 0x8000) >> 16, 0x7FC0)
        tl.store(pointers(row, 0, offsets, tl.int16), upper.to(tl.int16), mask=mask)
        tl.store(pointers(row, 1, offsets, tl.int16), (bits - (upper << 16)).to(tl.int16), mask=mask)
    else:
        tl.store(pointers(row, 0, offsets, DTYPE), w.to(DTYPE), mask=mask)
        if COPY:
            tl.store(pointers(row, 1, offsets, tl.float32), w, mask=mask)
    tl.store(m_ptr, m, mask=mask)
    tl.store(v_ptr, v, mask=mask)


class FusedAdamW(torch.optim.Optimizer):
    """Update all parameters of a dtype in one launch that reads and writes every tensor once.

    Matrices are converted to matrix_dtype; their float32 weights live on in state["low_bits"] (bfloat16) or
    state["master"] (float16). Works inside a captured graph, and with torch.amp.GradScaler without waiting for the GPU.
    """

    BLOCK = 1024
    _step_supports_amp_scaling = True  # GradScaler then sets found_inf and grad_scale instead of reading them

    def __init__(self, params, lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01, matrix_dtype=torch.float32):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        parameters = [p for group in self.param_groups for p in group["params"]]
        device = parameters[0].device
        self.steps = torch.zeros((), dtype=torch.float64, device=device)  # shared by all parameters
        for p in parameters:
            if p.dtype != torch.float32 or not p.is_contiguous() or p.data_ptr() % 16:
                raise ValueError(f"FusedAdamW: parameters must be contiguous, aligned float32, got {p.dtype}")
            self.state[p] = {"step": self.steps, "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
            if p.ndim == 2 and matrix_dtype == torch.bfloat16:
                p.data, self.state[p]["low_bits"] = split_bits(p.data)
            elif p.ndim == 2 and matrix_dtype == torch.float16:
                p.data, self.state[p]["master"] = p.data.half(), p.data
        self.betas = [torch.tensor(group["betas"], dtype=torch.float64, device=device) for group in self.param_groups]
        self.chunks = {}
        # A capture cannot allocate pinned memory, and a captured copy reads it at every replay.
        self.pinned = torch.empty(len(self.state), 6, dtype=torch.int64, pin_memory=device.type == "cuda")

    @torch.no_grad()
    def step(self, closure=None):
        found_inf = getattr(self, "found_inf", None)
        self.steps += 1 if found_inf is None else 1 - found_inf.reshape(())
        launches = []  # group, β₁ᵗ and β₂ᵗ, and its parameters of one dtype
        for group, betas in zip(self.param_groups, self.betas, strict=True):
            trained = sorted((p for p in group["params"] if p.grad is not None), key=lambda p: str(p.dtype))
            powers = betas**self.steps
            launches += [(group, powers, list(same)) for _, same in itertools.groupby(trained, lambda p: p.dtype)]
        trained = [p for _, _, parameters in launches for p in parameters]
        grads = [p.grad.contiguous() for p in trained]
        grads = [g if g.data_ptr() % 16 == 0 else g.clone() for g in grads]  # views of DDP's buckets start anywhere
        table = self.address_table(trained, grads)
        for group, powers, parameters in launches:
            lr, (beta1, beta2), chunks = group["lr"], group["betas"], self.chunk_table(parameters)
            dtype, aligned = parameters[0].dtype, all(p.numel() % 16 == 0 for p in parameters)
            adamw_kernel[(len(chunks),)](
                table, chunks, powers, getattr(self, "grad_scale", None), found_inf,
                lr, 1 - lr * group["weight_decay"], beta1, 1 - beta1, beta2, 1 - beta2, group["eps"],
                TRITON_DTYPES[dtype], dtype == torch.bfloat16, dtype == torch.float16, aligned, self.BLOCK,
            )  # fmt: skip
            table = table[len(parameters) :]

    def chunk_table(self, parameters):
        """Return int32 [programs, 2]: the parameter that a program updates, and which BLOCK of it."""
        key = tuple(map(id, parameters))
        if key not in self.chunks:
            chunks = [(i, c) for i, p in enumerate(parameters) for c in range(triton.cdiv(p.numel(), self.BLOCK))]
            self.chunks[key] = torch.tensor(chunks, dtype=torch.int32).to(self.steps.device)
        return self.chunks[key]

    def address_table(self, parameters, grads):
        """Return int64 [parameters, 6]: the table of adamw_kernel."""
        rows = []
        for p, grad in zip(parameters, grads, strict=True):
            state = self.state[p]
            weight = state.get("low_bits", state.get("master", p))
            tensors = (p, weight, state["exp_avg"], state["exp_avg_sq"], grad)
            rows.append([*(tensor.data_ptr() for tensor in tensors), p.numel()])
        rows, device = torch.tensor(rows, dtype=torch.int64).view(-1, 6), self.steps.device
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return self.pinned[: len(rows)].copy_(rows).to(device, non_blocking=True)
        return rows.to(device)


# ---------------------------------------------------------------- token embedding
# forward    x = w[token]
# backward   dw = onehot(token)ᵀ dx: for a small vocabulary a matmul is faster than adding rows one by one, and it adds
#            them in the same order every time


class EmbeddingFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tokens, w):
        ctx.save_for_backward(tokens)
        ctx.vocab_size = w.shape[0]
        return F.embedding(tokens, w)

    @staticmethod
    @once_differentiable
    def backward(ctx, dx):
        tokens = ctx.saved_tensors[0].flatten()
        onehot = dx.new_zeros(tokens.numel(), ctx.vocab_size).scatter_(1, tokens[:, None], 1)
        return None, onehot.t() @ dx.flatten(0, -2)


def embed(tokens, w):
    """Return w[tokens] [..., C] for int64 tokens [...] and w [V, C]."""
    return EmbeddingFunction.apply(tokens, w) if w.shape[0] <= MAX_ONE_HOT else F.embedding(tokens, w)


# ---------------------------------------------------------------- model


class Attention(nn.Module):
    """Causal self-attention with grouped queries: H query heads share K key/value heads."""

    def __init__(self, config):
        super().__init__()
        C, self.head_dim = config.hidden_dim, config.head_dim
        self.heads = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
        self.qkv_proj = nn.Linear(C, sum(self.heads) * self.head_dim, bias=False)
        self.o_proj = nn.Linear(C, C, bias=False)
        self.rope_kernel, self.attention_kernel = config.enable_rope_kernel, config.enable_attention_kernel

    def attend(self, qkv, cos, sin):
        H, K, _ = self.heads
        if self.rope_kernel and self.attention_kernel:
            return rotary_attention(qkv, cos, sin, H, K)
        with annotate("rope"):
            if self.rope_kernel:
                qkv = rope(qkv, cos, sin, H + K)
            else:
                q, k, v = qkv.split(self.heads, dim=2)
                qkv = torch.cat([apply_rope(q, cos, sin), apply_rope(k, cos, sin), v], dim=2)
        return flash_attention(qkv, H, K) if self.attention_kernel else causal_attention(*qkv.split(self.heads, dim=2))

    def forward(self, x, cos, sin):
        with annotate("qkv projection"):
            qkv = self.qkv_proj(x).unflatten(-1, (-1, self.head_dim))
        with annotate("attention"):
            mixed = self.attend(qkv, cos, sin)
        with annotate("output projection"):
            return self.o_proj(mixed.flatten(-2))


class FeedForward(nn.Module):
    """Compute down(silu(gate(x)) · up(x)) of x [B, T, C]."""

    def __init__(self, config):
        super().__init__()
        self.gate_up_proj = nn.Linear(config.hidden_dim, 2 * config.intermediate_dim, bias=False)
        self.down_proj = nn.Linear(config.intermediate_dim, config.hidden_dim, bias=False)
        self.swiglu_kernel = config.enable_swiglu_kernel

    def forward(self, x):
        with annotate("feed-forward"):
            gate_up = self.gate_up_proj(x)
            y = packed_swiglu(gate_up) if self.swiglu_kernel else swiglu(*gate_up.chunk(2, dim=-1))
            return self.down_proj(y)


class AddRMSNorm(nn.Module):
    """Return x = residual + branch and norm(x)."""

    def __init__(self, config):
        super().__init__()
        self.eps = config.norm_eps
        self.weight = nn.Parameter(torch.ones(config.hidden_dim))
        self.kernel = config.enable_rmsnorm_kernel

    def forward(self, residual, branch):
        with annotate("rms norm"):
            if self.kernel:
                return add_rms_norm(residual, branch, self.weight, self.eps)
            x = residual if branch is None else residual + branch
            return x, rms_norm(x, self.weight, self.eps)


class Block(nn.Module):
    """Defer the residual add: the next RMSNorm kernel performs it while it reads both inputs."""

    def __init__(self, config):
        super().__init__()
        self.attention_norm = AddRMSNorm(config)
        self.attention = Attention(config)
        self.feed_forward_norm = AddRMSNorm(config)
        self.feed_forward = FeedForward(config)

    def forward(self, residual, branch, cos, sin):
        residual, x = self.attention_norm(residual, branch)
        residual, x = self.feed_forward_norm(residual, self.attention(x, cos, sin))
        return residual, self.feed_forward(x)


class TinyLlama(nn.Module):
    """Map tokens [B, T] to logits [B, T, V]; the output head shares the token embedding."""

    def __init__(self, config):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_dim)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = AddRMSNorm(config)
        self.cos, self.sin = rope_tables(config.seq_len, config.head_dim, config.rope_theta, config.device)

    def forward(self, tokens):
        T = tokens.shape[1]
        with annotate("embedding"):
            residual, branch = embed(tokens, self.embed_tokens.weight), None
        for layer in self.layers:
            residual, branch = layer(residual, branch, self.cos[:T], self.sin[:T])
        with annotate("output head"):
            return F.linear(self.norm(residual, branch)[1], self.embed_tokens.weight)


# ---------------------------------------------------------------- loss, optimizer, options


def compute_loss(model, tokens, labels, config):
    """Return the mean cross-entropy, in float32, of predicting labels [B, T] from tokens [B, T]."""
    logits = model(tokens)
    with annotate("loss"):
        if config.enable_loss_kernel:
            return cross_entropy(logits, labels)
        return F.cross_entropy(at_least_float32(logits).flatten(0, 1), labels.flatten())


def make_optimizer(model, config):
    if config.enable_optimizer_kernel:
        matrix_dtype = config.dtype if config.use_amp else torch.float32
        return FusedAdamW(model.parameters(), config.learning_rate, matrix_dtype=matrix_dtype)
    return torch.optim.AdamW(model.parameters(), lr=config.learning_rate, capturable=config.graph and config.on_gpu)


KERNELS = ("rmsnorm", "rope", "swiglu", "attention", "loss", "optimizer")


def add_switch(add, name, default, meaning):
    """Add --enable-NAME and --disable-NAME."""
    target = f"enable_{name.replace('-', '_')}"
    add(f"--enable-{name}", dest=target, action="store_true", default=default, help=meaning)
    add(f"--disable-{name}", dest=target, action="store_false", default=default, help=argparse.SUPPRESS)


def add_version_options(add):
    for kernel in KERNELS:
        add_switch(add, f"{kernel}-kernel", True, f"Triton for {kernel} (on)")


def complete_version_options(config):
    """Check and complete the options of this version; return a description of its parts."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if config.enable_attention_kernel and config.head_dim not in HEAD_DIMS:
        wanted = f"{', '.join(map(str, HEAD_DIMS))} for the attention kernel (--disable-attention-kernel)"
        raise UserError(f"--hidden-dim / --num-heads must be one of {wanted}, got {config.head_dim}")
    if config.enable_rmsnorm_kernel and config.hidden_dim > MAX_ROW:
        raise UserError(f"--hidden-dim must be at most {MAX_ROW} for the RMSNorm kernel, got {config.hidden_dim}")
    if config.use_amp and not config.enable_optimizer_kernel:
        raise UserError("--use-amp must have the optimizer kernel, which keeps the float32 weights, got it disabled")
    if not config.on_gpu and not interpreted:
        raise UserError("--device must be cuda unless TRITON_INTERPRET=1 runs the kernels on the CPU, got cpu")
    if interpreted and config.use_amp and config.amp_dtype == "bfloat16":
        raise UserError("--amp-dtype must be float16 in Triton's interpreter, which has no bfloat16 dot, got bfloat16")
    triton_release, numpy_release = (tuple(map(int, x.__version__.split(".")[:2])) for x in (triton, np))
    if interpreted and triton_release < (3, 7) and numpy_release >= (2, 4):
        raise UserError(f"numpy must be < 2.4 for the interpreter of Triton {triton.__version__}, got {np.__version__}")
    if config.parallel == "fsdp":
        config.enable_optimizer_kernel = False  # FSDP2 shards the float32 weights; PyTorch's AdamW updates the shards
    parts = [kernel for kernel in KERNELS if getattr(config, f"enable_{kernel}_kernel")]
    note = ", in Triton's interpreter: results are right, times mean nothing" if interpreted else ""
    return f"Triton kernels for {', '.join(parts) or 'nothing'}{note}"
