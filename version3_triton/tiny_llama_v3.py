#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Tiny LLaMA, version 3: Triton kernels, forward and backward, for everything between the matmuls.

    python tiny_llama_v3.py --preset medium --use-amp
    python tiny_llama_v3.py --disable-attention-kernel          # each kernel has its own switch

This version teaches memory traffic: a fused kernel reads and writes a tensor once instead of several times. The matmuls
stay with the BLAS library. With --use-amp the optimizer converts the matrices to 16 bits and keeps what they lose: for
bfloat16 the low bits, for float16 a float32 copy. Without a GPU, Triton's interpreter runs the kernels: results are
right, times mean nothing.

Every part has a name in profilers: annotate(name), defined in the harness, sets it.

Shapes: B batch, T tokens, C hidden_dim, H query heads, K key/value heads, D = C / H, V vocab_size; width is
intermediate_dim in the feed-forward part.
"""

import argparse
import dataclasses
import functools
import math
import os
import sys
import warnings
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton reads it on import
os.environ.setdefault("TRITON_CACHE_AUTOTUNING", "1")  # cache the results of triton.autotune on disk
try:
    import triton
    import triton.language as tl
except ModuleNotFoundError as error:
    sys.exit(f"tiny_llama_v3.py needs Triton ({error}): pip install triton on Linux, or run another version")

HEAD_DIMS = (16, 32, 64, 128)  # that the attention kernels support
MAX_ONE_HOT = 4096  # vocabulary size up to which the embedding's gradient is a matmul
TRITON_DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


# ---------------------------------------------------------------- plain PyTorch, used where a kernel is switched off


def at_least_float32(x):
    """Convert 16-bit x to float32; leave float32 and float64 as they are."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def rms_norm(x, weight, eps):
    """Return x / sqrt(mean(x²) + eps) · weight, computed in float32."""
    wide = at_least_float32(x)
    rstd = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)  # [B, T, 1]
    return (wide * rstd * weight).to(x.dtype)


def rope_tables(seq_len, head_dim, theta, device=None):
    """Return cos and sin of t · theta^(-2i / D) for position t and pair i: two float32 tensors [T, D/2]."""
    float64 = {"dtype": torch.float64, "device": device}
    frequencies = theta ** (-torch.arange(0, head_dim, 2, **float64) / head_dim)  # [D/2]
    angles = torch.outer(torch.arange(seq_len, **float64), frequencies)  # [T, D/2]
    return angles.cos().float(), angles.sin().float()


def apply_rope(x, cos, sin):
    """Rotate the pairs (x[i], x[i + D/2]) of every head of x [B, T, heads, D]."""
    x1, x2 = at_least_float32(x).chunk(2, dim=-1)  # [B, T, heads, D/2] each
    cos = cos[:, None]  # [T, 1, D/2]: the same for all heads
    sin = sin[:, None]
    return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], dim=-1).to(x.dtype)


def causal_attention(q, k, v):
    """Return softmax(q kᵀ / sqrt(D)) v under a causal mask: q [B, T, H, D], k and v [B, T, K, D] -> [B, T, H, D].

    PyTorch's fused kernel goes tile by tile and never writes the T x T scores (FlashAttention, arXiv:2205.14135).
    """
    grouped = q.dtype in (torch.float16, torch.bfloat16)
    if not grouped:  # in float32 only the slow math backend supports enable_gqa
        repeats = q.shape[2] // k.shape[2]  # query heads that share a key/value head
        k = k.repeat_interleave(repeats, dim=2)  # [B, T, H, D]
        v = v.repeat_interleave(repeats, dim=2)  # [B, T, H, D]
    q = q.transpose(1, 2)  # [B, H, T, D]
    k = k.transpose(1, 2)  # [B, K or H, T, D]
    v = v.transpose(1, 2)  # [B, K or H, T, D]
    context = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)  # [B, H, T, D]
    return context.transpose(1, 2)  # [B, T, H, D]


def swiglu(gate, up):
    """Return silu(gate) · up, where silu(x) = x · sigmoid(x)."""
    return F.silu(gate) * up


# ---------------------------------------------------------------- tiles, launches, input checks, and the guard


def cdiv(n, size):
    """Return how many blocks of this size cover n. triton.cdiv, which kernels can call too, takes the host 2 us."""
    return (n + size - 1) // size


@functools.cache  # here and below: an eager step would ask the driver 150 times
def gpu_architecture(device):
    """Return the GPU's architecture, such as "gfx942" or "sm_90"; "cpu" in Triton's interpreter."""
    if device.type == "cpu":
        return "cpu"
    gpu = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return gpu.gcnArchName.split(":")[0]
    return f"sm_{gpu.major}{gpu.minor}"


@functools.cache
def program_count(device):
    """Return how many programs keep the GPU busy, for kernels that loop over their work."""
    if device.type == "cpu":
        return 4
    return 4 * torch.cuda.get_device_properties(device).multi_processor_count


def tile_shape(columns, device, elements=4096, whole_row=False):
    """Return ROWS and BLOCK, powers of two, of a tile of about `elements` elements; BLOCK spans a row or part of it."""
    if gpu_architecture(device) == "cpu":
        elements = 65536  # the interpreter's time grows with the number of programs, not of elements
    return tile_of(columns, elements, whole_row)


@functools.cache
def tile_of(columns, elements, whole_row):
    block = triton.next_power_of_2(columns)
    if not whole_row:
        block = min(block, elements)
    return {"ROWS": max(1, elements // block), "BLOCK": block}


def launch_tiles(kernel, rows, columns, *arguments, elements=4096, whole_row=False, num_warps=4):
    """Launch kernel(*arguments, rows, columns, ROWS, BLOCK) with one program per tile of [rows, columns]."""
    tile = tile_shape(columns, arguments[0].device, elements, whole_row)
    grid = (cdiv(rows, tile["ROWS"]), cdiv(columns, tile["BLOCK"]))
    kernel[grid](*arguments, rows, columns, **tile, num_warps=num_warps)


def check_tensor(name, x, shape=None, dtypes=tuple(TRITON_DTYPES), device=None):
    """Raise ValueError unless x has this shape (None: any [..., columns]), one of dtypes and device (None: any).

    Every operation that the model calls checks its tensors so.
    """
    if shape is None:
        right_shape = x.ndim >= 2 and x.numel() > 0
    else:
        right_shape = x.shape == shape
    if not right_shape or x.dtype not in dtypes or device not in (None, x.device):
        wanted = "non-empty [..., columns]" if shape is None else f"{list(shape)} on {device}"
        raise ValueError(f"{name} must be {wanted} of {dtypes}, got {list(x.shape)} of {x.dtype} on {x.device}")


def guarded(twice_differentiable):
    """Return a decorator for the autograd Functions below. PyTorch may hand them any tensor; kernels need three things.

    Contiguous tensors: a kernel computes addresses from shapes alone, but an activation may be a slice, and a gradient
    transposed or expanded. Those are copied; a tensor that is contiguous is taken as it is.
    The current device: Triton launches there, so the device of the tensors becomes the current one.
    No second derivative: autograd sees a constant in what a kernel returns. Differentiated again, a backward would
    silently miss terms, so one that is recorded for that (create_graph=True) raises an error. once_differentiable does
    not suffice: it lets a backward pass whose incoming gradient requires none, such as that of a loss.

    twice_differentiable is for a backward whose own operations autograd can differentiate.
    """

    def call(function, ctx, arguments):
        arguments = [x.contiguous() if isinstance(x, torch.Tensor) else x for x in arguments]
        first_tensor = next(x for x in arguments if isinstance(x, torch.Tensor))
        if torch.compiler.is_compiling():  # the compiler launches on the device of the tensors
            return function(ctx, *arguments)
        with torch.cuda.device_of(first_tensor):
            return function(ctx, *arguments)

    def decorate(function):
        forward = function.forward
        backward = function.backward

        def guarded_forward(ctx, *inputs):
            return call(forward, ctx, inputs)

        def guarded_backward(ctx, *grads):
            if torch.is_grad_enabled() and not twice_differentiable:
                raise RuntimeError(f"{function.__name__} has no second derivative: call it without create_graph=True")
            return call(backward, ctx, grads)

        function.forward = staticmethod(guarded_forward)
        function.backward = staticmethod(guarded_backward)
        return function

    return decorate


# Kernels compute in float32 and store in the dtype of the tensor. torch.compile passes a Python float as float64: each
# is cast where it is used. Offsets are int64: a tensor may have more than 2³¹
# elements.


@triton.jit
def load(pointers, mask):
    """Load as float32; read zero where the mask is false."""
    return tl.load(pointers, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def store(pointers, x, mask):
    """Store x, rounded to the dtype of the tensor, where the mask is true."""
    tl.store(pointers, x.to(pointers.dtype.element_ty), mask=mask)


# ---------------------------------------------------------------- RMSNorm (arXiv:1910.07467) with the residual add
# forward    x = residual + branch,  rstd = 1 / sqrt(mean(x²) + eps),  y = x · rstd · w
# backward   g = dy · w,  dresidual = dbranch = dx + rstd · (g - x · rstd² · mean(g · x)),  dw = Σ_rows dy · x · rstd


@triton.jit
def rmsnorm_forward_kernel(
    residual_ptr, branch_ptr, w_ptr, x_ptr, y_ptr, rstd_ptr, eps, rows, C, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """Add (unless branch is None) and normalize ROWS rows of [rows, C] per program; BLOCK >= C."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    mask = (row[:, None] < rows) & (column[None, :] < C)
    offsets = row[:, None].to(tl.int64) * C + column[None, :]
    x = load(residual_ptr + offsets, mask)
    if branch_ptr is not None:
        x += load(branch_ptr + offsets, mask)
        store(x_ptr + offsets, x, mask)
        x = x.to(x_ptr.dtype.element_ty).to(tl.float32)  # normalize the sum as it was stored: the backward reads that
    rstd = tl.rsqrt(tl.sum(x * x, 1) / C + tl.cast(eps, tl.float32))
    store(rstd_ptr + row, rstd, row < rows)
    w = load(w_ptr + column, column < C)
    store(y_ptr + offsets, x * rstd[:, None] * w[None, :], mask)


@triton.jit
def rmsnorm_backward_kernel(
    dy_ptr, dx_ptr, x_ptr, w_ptr, rstd_ptr, dresidual_ptr, partial_dw_ptr, rows, C,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute every P-th tile of ROWS rows in each of P programs; store program p's sum in partial_dw[p]."""
    column = tl.arange(0, BLOCK)
    w = load(w_ptr + column, column < C)
    dw = tl.zeros([ROWS, BLOCK], tl.float32)
    for first in range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        row = first + tl.arange(0, ROWS)
        mask = (row[:, None] < rows) & (column[None, :] < C)
        offsets = row[:, None].to(tl.int64) * C + column[None, :]
        dy = load(dy_ptr + offsets, mask)
        x = load(x_ptr + offsets, mask)
        rstd = load(rstd_ptr + row, row < rows)[:, None]
        g = dy * w[None, :]
        dresidual = rstd * (g - x * (rstd * rstd * tl.sum(g * x, 1)[:, None] / C))
        if dx_ptr is not None:
            dresidual += load(dx_ptr + offsets, mask)
        dw += dy * x * rstd
        store(dresidual_ptr + offsets, dresidual, mask)
    store(partial_dw_ptr + tl.program_id(0).to(tl.int64) * C + column, tl.sum(dw, 0), column < C)


@triton.jit
def column_sum_kernel(x_ptr, sum_ptr, rows, C, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Sum BLOCK columns of x [rows, C] per program, always in the same order: no atomics."""
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    partial_sums = tl.zeros([ROWS, BLOCK], tl.float32)
    for first in range(0, rows, ROWS):
        row = first + tl.arange(0, ROWS)[:, None]
        mask = (row < rows) & (column[None, :] < C)
        partial_sums += load(x_ptr + row.to(tl.int64) * C + column[None, :], mask)
    store(sum_ptr + column, tl.sum(partial_sums, 0), column < C)


@guarded(twice_differentiable=False)
class AddRMSNormFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, residual, branch, w, eps):
        ctx.set_materialize_grads(False)
        ctx.add = branch is not None
        C = residual.shape[-1]
        x = torch.empty_like(residual) if ctx.add else residual
        y = torch.empty_like(x)
        rstd = torch.empty(x.numel() // C, dtype=torch.float32, device=x.device)  # [rows]
        launch_tiles(rmsnorm_forward_kernel, len(rstd), C, residual, branch, w, x, y, rstd, eps, whole_row=True)
        ctx.save_for_backward(x, w, rstd)
        return x, y

    @staticmethod
    def backward(ctx, dx, dy):
        """Compute the gradients; dx or dy is None if x or y was not used."""
        x, w, rstd = ctx.saved_tensors
        rows = len(rstd)
        C = x.shape[-1]
        if dy is None:
            dy = torch.zeros_like(x)
        # Each iteration loads, reduces and stores one tile: many small programs keep the memory busy.
        programs = program_count(x.device)
        if x.dtype == torch.float32:
            elements = 2048
            num_warps = 8
        else:  # half the bytes per element: measured fastest with half the tile, fewer warps and twice the programs
            elements = 1024
            num_warps = 4 if C > 512 else 2
            programs *= 2
        tile = tile_shape(C, x.device, elements, whole_row=True)
        programs = min(programs, cdiv(rows, tile["ROWS"]))
        dresidual = torch.empty_like(x)
        partial_dw = torch.empty(programs, C, dtype=torch.float32, device=x.device)
        rmsnorm_backward_kernel[(programs,)](
            dy, dx, x, w, rstd, dresidual, partial_dw, rows, C, **tile, num_warps=num_warps
        )
        dw = torch.empty(C, dtype=torch.float32, device=x.device)
        if gpu_architecture(x.device) == "cpu":  # few programs, for the interpreter
            sum_tile = {"ROWS": 4, "BLOCK": tile["BLOCK"]}
        else:  # narrow tiles: more programs share this small sum
            sum_tile = {"ROWS": 128, "BLOCK": 8}
        sum_grid = (cdiv(C, sum_tile["BLOCK"]),)
        column_sum_kernel[sum_grid](partial_dw, dw, programs, C, **sum_tile, num_warps=8)
        dbranch = dresidual if ctx.add else None
        return dresidual, dbranch, dw.to(w.dtype), None


def add_rms_norm(residual, branch, w, eps):
    """Return x = residual + branch [..., C] (branch None: x = residual) and x / sqrt(mean(x²) + eps) · w."""
    check_tensor("add_rms_norm: residual", residual)
    check_tensor("add_rms_norm: w", w, residual.shape[-1:], device=residual.device)
    if branch is not None:
        check_tensor("add_rms_norm: branch", branch, residual.shape, (residual.dtype,), residual.device)
    return AddRMSNormFunction.apply(residual, branch, w, eps)


# ---------------------------------------------------------------- RoPE (arXiv:2104.09864) on the packed projections
# forward    (x₁, x₂) -> (x₁ · cos - x₂ · sin, x₂ · cos + x₁ · sin)
# backward   the transpose of a rotation is the rotation by the opposite angle: the same kernel with sin negated
# Value heads are copied: query, key and value stay in one tensor from their projection to their gradient.


@triton.jit
def rope_kernel(
    x_ptr, y_ptr, cos_ptr, sin_ptr, sign, T, heads, rotated_heads, rows, HALF, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """Rotate ROWS heads of x [rows = tokens · heads, 2 · HALF] per program; copy heads from `rotated_heads` on.

    sign 1 rotates forward, -1 back.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    pair = tl.arange(0, BLOCK)[None, :]
    mask = (row < rows) & (pair < HALF)
    rotated = mask & (row % heads < rotated_heads)
    position = row // heads % T
    entry = position * HALF + pair  # of the tables
    cos = tl.load(cos_ptr + entry, mask=rotated, other=1.0)
    sin = tl.load(sin_ptr + entry, mask=rotated, other=0.0) * tl.cast(sign, tl.float32)
    offsets = row.to(tl.int64) * (2 * HALF) + pair
    x1 = load(x_ptr + offsets, mask)
    x2 = load(x_ptr + offsets + HALF, mask)
    store(y_ptr + offsets, x1 * cos - x2 * sin, mask)
    store(y_ptr + offsets + HALF, x2 * cos + x1 * sin, mask)


@guarded(twice_differentiable=True)
class RoPEFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, cos, sin, rotated_heads, sign):
        ctx.save_for_backward(cos, sin)
        ctx.rotated_heads = rotated_heads
        ctx.sign = sign
        B, T, heads, D = x.shape
        y = torch.empty_like(x)
        arguments = (x, y, cos, sin, sign, T, heads, rotated_heads)
        launch_tiles(rope_kernel, B * T * heads, D // 2, *arguments, elements=2048, whole_row=True)
        return y

    @staticmethod
    def backward(ctx, dy):
        cos, sin = ctx.saved_tensors
        dx = RoPEFunction.apply(dy, cos, sin, ctx.rotated_heads, -ctx.sign)
        return dx, None, None, None, None


def rope(x, cos, sin, rotated_heads):
    """Rotate the first `rotated_heads` heads of x [B, T, heads, D] by cos and sin [T, D/2], and copy the others."""
    check_tensor("rope: x", x)
    if x.ndim != 4 or x.shape[3] % 2 or not 0 <= rotated_heads <= x.shape[2]:
        raise ValueError(f"rope: x must be [B, T, {rotated_heads} or more heads, even D], got {list(x.shape)}")
    for name, table in (("cos", cos), ("sin", sin)):
        check_tensor(f"rope: {name}", table, (x.shape[1], x.shape[3] // 2), (torch.float32,), x.device)
    return RoPEFunction.apply(x, cos, sin, rotated_heads, 1.0)


# ---------------------------------------------------------------- SwiGLU (arXiv:2002.05202) on the packed projections
# forward    y = silu(gate) · up,  silu(gate) = gate · σ(gate)
# backward   dgate = dy · up · σ · (1 + gate · (1 - σ)),  dup = dy · gate · σ;  σ(gate) is recomputed, not saved


@triton.jit
def swiglu_forward_kernel(x_ptr, y_ptr, rows, width, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Compute a tile of y [rows, width] per program from x [rows, 2 · width], whose rows hold gate and then up."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    column = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    mask = (row < rows) & (column < width)
    gate = load(x_ptr + row * 2 * width + column, mask)
    up = load(x_ptr + row * 2 * width + width + column, mask)
    store(y_ptr + row * width + column, gate * tl.sigmoid(gate) * up, mask)


@triton.jit
def swiglu_backward_kernel(dy_ptr, x_ptr, dx_ptr, rows, width, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Compute a tile of dgate and the same tile of dup per program; rows of dx [rows, 2 · width] hold both."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    column = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    mask = (row < rows) & (column < width)
    dy = load(dy_ptr + row * width + column, mask)
    gate = load(x_ptr + row * 2 * width + column, mask)
    up = load(x_ptr + row * 2 * width + width + column, mask)
    sigmoid = tl.sigmoid(gate)
    dgate = dy * up * sigmoid * (1 + gate * (1 - sigmoid))
    dup = dy * gate * sigmoid
    store(dx_ptr + row * 2 * width + column, dgate, mask)
    store(dx_ptr + row * 2 * width + width + column, dup, mask)


@guarded(twice_differentiable=False)
class SwiGLUFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        rows = x.shape[0]
        width = x.shape[1] // 2
        y = torch.empty(rows, width, dtype=x.dtype, device=x.device)
        launch_tiles(swiglu_forward_kernel, rows, width, x, y, elements=2048)
        return y

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        rows, width = dy.shape
        dx = torch.empty_like(x)
        launch_tiles(swiglu_backward_kernel, rows, width, dy, x, dx, elements=2048)
        return dx


def packed_swiglu(x):
    """Return silu(gate) · up [..., width] for x [..., 2 · width], whose last dimension holds gate and then up."""
    check_tensor("packed_swiglu: x", x)
    if x.shape[-1] % 2:
        raise ValueError(f"packed_swiglu: x must have an even number of columns, got {x.shape[-1]}")
    y = SwiGLUFunction.apply(x.flatten(0, -2))  # [rows, 2 · width] -> [rows, width]
    return y.view(*x.shape[:-1], -1)  # [..., width]


# ---------------------------------------------------------------- causal flash attention with grouped queries
# qkv [B, T, H + 2K, D] holds H query, K key and K value heads; query head h reads key/value head h // (H/K).
# forward    S = q kᵀ where key <= query,  lse = logsumexp(S / sqrt(D)),  P = exp(S / sqrt(D) - lse),  o = P v
# backward   Δ = Σ_D do · o,  dS = P · (do vᵀ - Δ), the gradient of S / sqrt(D)
#            dq = dS k / sqrt(D),  dk = dSᵀ q / sqrt(D),  dv = Pᵀ do
# Exponentials are base 2, the hardware's own: `scale` is log2(e) / sqrt(D), and lse is a base-2 logarithm.
# With RoPE tables the backward kernels unrotate dq and dk in registers, before they store them.

LN2 = tl.constexpr(math.log(2))  # scale · LN2 = 1 / sqrt(D)


@triton.jit
def load_tile(ptr, first, T, STRIDE: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr):
    """Load rows first to first + ROWS of a matrix [T, D] whose rows are STRIDE apart; rows from T on read as zero."""
    row = tl.arange(0, ROWS)[:, None]
    pointers = ptr + first * tl.cast(STRIDE, tl.int64) + row * STRIDE + tl.arange(0, D)[None, :]
    return tl.load(pointers, mask=first + row < T, other=0.0)


@triton.jit
def store_tile(ptr, tile, first, T, STRIDE: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr):
    """Store tile as rows first to first + ROWS of a matrix [T, D], STRIDE apart; rows from T on are not stored."""
    row = tl.arange(0, ROWS)[:, None]
    pointers = ptr + first * tl.cast(STRIDE, tl.int64) + row * STRIDE + tl.arange(0, D)[None, :]
    store(pointers, tile, first + row < T)


@triton.jit
def unrotate(tile, cos_ptr, sin_ptr, first, T, ROWS: tl.constexpr, D: tl.constexpr):
    """Rotate every row by the opposite of its position's angle; return the tile as it is without RoPE tables."""
    if cos_ptr is None:
        return tile
    else:
        HALF: tl.constexpr = D // 2
        halves = tl.reshape(tile, [ROWS, 2, HALF])
        x1, x2 = tl.split(tl.permute(halves, (0, 2, 1)))  # [ROWS, HALF, 2] -> [ROWS, HALF] each
        cos = load_tile(cos_ptr, first, T, HALF, ROWS, HALF)
        sin = load_tile(sin_ptr, first, T, HALF, ROWS, HALF)
        pairs = tl.join(x1 * cos + x2 * sin, x2 * cos - x1 * sin)  # [ROWS, HALF, 2]
        return tl.reshape(tl.permute(pairs, (0, 2, 1)), [ROWS, D])  # [ROWS, 2, HALF] -> [ROWS, D]


@triton.jit
def attention_forward_kernel(
    qkv_ptr, o_ptr, lse_ptr, T, scale, H: tl.constexpr, K: tl.constexpr, D: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_Q rows of o for one head per program: online softmax over the keys up to the diagonal."""
    scale = tl.cast(scale, tl.float32)
    tl.static_assert(BLOCK_Q % BLOCK_K == 0)
    STRIDE: tl.constexpr = (H + 2 * K) * D
    first = (tl.num_programs(1) - 1 - tl.program_id(1)) * BLOCK_Q  # the longest rows start first
    b = (tl.program_id(0) // H).to(tl.int64)  # program_id(0) = b · H + h
    h = tl.program_id(0) % H
    k_ptr = qkv_ptr + b * T * STRIDE + (H + h // (H // K)) * D
    v_ptr = k_ptr + K * D
    q = load_tile(qkv_ptr + b * T * STRIDE + h * D, first, T, STRIDE, BLOCK_Q, D)
    query = first + tl.arange(0, BLOCK_Q)
    key = tl.arange(0, BLOCK_K)
    # For each query, over the keys so far: o is the unnormalized output, m the largest S, and l the sum of
    # exp2((S - m) · scale). alpha rescales o and l to a new m.
    o = tl.zeros([BLOCK_Q, D], tl.float32)
    m = tl.full([BLOCK_Q], -float("inf"), tl.float32)
    l = tl.zeros([BLOCK_Q], tl.float32)
    for DIAGONAL in tl.static_range(2):
        # 0: keys [0, first), no mask
        # 1: keys [first, first + BLOCK_Q), masked
        begin = first if DIAGONAL else 0
        end = min(first + BLOCK_Q if DIAGONAL else first, T)
        for start in range(begin, end, BLOCK_K):
            k = load_tile(k_ptr, start, T, STRIDE, BLOCK_K, D)
            S = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # [BLOCK_Q, BLOCK_K]
            if DIAGONAL:
                S = tl.where(query[:, None] >= start + key[None, :], S, -float("inf"))
            m_new = tl.maximum(m, tl.max(S, 1))
            P = tl.exp2(S * scale - (m_new * scale)[:, None])
            alpha = tl.exp2((m - m_new) * scale)
            v = load_tile(v_ptr, start, T, STRIDE, BLOCK_K, D)
            o = tl.dot(P.to(v.dtype), v, o * alpha[:, None], input_precision=PRECISION)
            l = l * alpha + tl.sum(P, 1)
            m = m_new
    store_tile(o_ptr + (b * T * H + h) * D, o / l[:, None], first, T, H * D, BLOCK_Q, D)
    store(lse_ptr + tl.program_id(0).to(tl.int64) * T + query, m * scale + tl.log2(l), query < T)


@triton.jit
def attention_backward_dq_kernel(
    qkv_ptr, o_ptr, do_ptr, lse_ptr, delta_ptr, dqkv_ptr, cos_ptr, sin_ptr, T, scale, H: tl.constexpr,
    K: tl.constexpr, D: tl.constexpr, PRECISION: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_Q rows of dq for one head per program, and their Δ for the dk/dv kernel."""
    scale = tl.cast(scale, tl.float32)
    tl.static_assert(BLOCK_Q % BLOCK_K == 0)
    STRIDE: tl.constexpr = (H + 2 * K) * D
    first = (tl.num_programs(1) - 1 - tl.program_id(1)) * BLOCK_Q
    b = (tl.program_id(0) // H).to(tl.int64)  # program_id(0) = b · H + h
    h = tl.program_id(0) % H
    q_offset = b * T * STRIDE + h * D
    o_offset = (b * T * H + h) * D
    k_ptr = qkv_ptr + b * T * STRIDE + (H + h // (H // K)) * D
    v_ptr = k_ptr + K * D
    q = load_tile(qkv_ptr + q_offset, first, T, STRIDE, BLOCK_Q, D)
    o = load_tile(o_ptr + o_offset, first, T, H * D, BLOCK_Q, D)
    do = load_tile(do_ptr + o_offset, first, T, H * D, BLOCK_Q, D)
    query = first + tl.arange(0, BLOCK_Q)
    key = tl.arange(0, BLOCK_K)
    row = tl.program_id(0).to(tl.int64) * T + query
    lse = load(lse_ptr + row, query < T)
    delta = tl.sum(do.to(tl.float32) * o.to(tl.float32), 1)
    store(delta_ptr + row, delta, query < T)
    dq = tl.zeros([BLOCK_Q, D], tl.float32)
    for DIAGONAL in tl.static_range(2):
        # 0: keys [0, first), no mask
        # 1: keys [first, first + BLOCK_Q), masked
        begin = first if DIAGONAL else 0
        end = min(first + BLOCK_Q if DIAGONAL else first, T)
        for start in range(begin, end, BLOCK_K):
            k = load_tile(k_ptr, start, T, STRIDE, BLOCK_K, D)
            v = load_tile(v_ptr, start, T, STRIDE, BLOCK_K, D)
            P = tl.exp2(tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale - lse[:, None])
            if DIAGONAL:
                P = tl.where(query[:, None] >= start + key[None, :], P, 0.0)
            dS = P * (tl.dot(do, tl.trans(v), input_precision=PRECISION) - delta[:, None])  # [BLOCK_Q, BLOCK_K]
            dq = tl.dot(dS.to(k.dtype), k, dq, input_precision=PRECISION)
    dq = unrotate(dq * (scale * LN2), cos_ptr, sin_ptr, first, T, BLOCK_Q, D)
    store_tile(dqkv_ptr + q_offset, dq, first, T, STRIDE, BLOCK_Q, D)


@triton.jit
def attention_backward_dkdv_kernel(
    qkv_ptr, do_ptr, lse_ptr, delta_ptr, dqkv_ptr, cos_ptr, sin_ptr, T, scale, H: tl.constexpr, K: tl.constexpr,
    D: tl.constexpr, PRECISION: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_K rows of dk and dv of one key/value head per program: no atomics. Scores are transposed."""
    scale = tl.cast(scale, tl.float32)
    SPAN: tl.constexpr = max(BLOCK_K, BLOCK_Q)  # queries of the tiles that the diagonal crosses
    STRIDE: tl.constexpr = (H + 2 * K) * D
    first = tl.program_id(1) * BLOCK_K
    b = (tl.program_id(0) // K).to(tl.int64)  # program_id(0) = b · K + kv
    kv = tl.program_id(0) % K
    k_offset = b * T * STRIDE + (H + kv) * D
    v_offset = k_offset + K * D
    k = load_tile(qkv_ptr + k_offset, first, T, STRIDE, BLOCK_K, D)
    v = load_tile(qkv_ptr + v_offset, first, T, STRIDE, BLOCK_K, D)
    dk = tl.zeros([BLOCK_K, D], tl.float32)
    dv = tl.zeros([BLOCK_K, D], tl.float32)
    key = first + tl.arange(0, BLOCK_K)
    for h in range(kv * (H // K), (kv + 1) * (H // K)):  # every query head that reads this key/value head
        q_ptr = qkv_ptr + b * T * STRIDE + h * D
        o_offset = (b * T * H + h) * D
        lse_offset = (b * H + h) * T
        for BELOW in tl.static_range(2):
            # 0: queries [first, first + SPAN), masked
            # 1: queries [first + SPAN, T), no mask
            begin = first + SPAN if BELOW else first
            end = T if BELOW else min(first + SPAN, T)
            for start in range(begin, end, BLOCK_Q):
                q = load_tile(q_ptr, start, T, STRIDE, BLOCK_Q, D)
                do = load_tile(do_ptr + o_offset, start, T, H * D, BLOCK_Q, D)
                query = start + tl.arange(0, BLOCK_Q)
                lse = load(lse_ptr + lse_offset + query, query < T)
                delta = load(delta_ptr + lse_offset + query, query < T)
                P = tl.exp2(tl.dot(k, tl.trans(q), input_precision=PRECISION) * scale - lse[None, :])
                if not BELOW:
                    P = tl.where(key[:, None] <= query[None, :], P, 0.0)
                dv = tl.dot(P.to(do.dtype), do, dv, input_precision=PRECISION)
                dS = P * (tl.dot(v, tl.trans(do), input_precision=PRECISION) - delta[None, :])  # [BLOCK_K, BLOCK_Q]
                dk = tl.dot(dS.to(q.dtype), q, dk, input_precision=PRECISION)
    dk = unrotate(dk * (scale * LN2), cos_ptr, sin_ptr, first, T, BLOCK_K, D)
    store_tile(dqkv_ptr + k_offset, dk, first, T, STRIDE, BLOCK_K, D)
    store_tile(dqkv_ptr + v_offset, dv, first, T, STRIDE, BLOCK_K, D)


class AttentionKernel(NamedTuple):
    """Name a kernel and how it is launched: one program per sequence, head of that kind, and block of tokens."""

    kernel: triton.JITFunction
    computes: str  # the key of its tiles below
    heads: str  # "H": query heads, "K": key/value heads
    block: str  # the constant that says how many tokens: "BLOCK_Q" or "BLOCK_K"


ATTENTION_FORWARD = AttentionKernel(attention_forward_kernel, "o", heads="H", block="BLOCK_Q")
ATTENTION_DQ = AttentionKernel(attention_backward_dq_kernel, "dq", heads="H", block="BLOCK_Q")
ATTENTION_DKDV = AttentionKernel(attention_backward_dkdv_kernel, "dkdv", heads="K", block="BLOCK_K")


def launch_attention(attention, qkv, H, K, *tensors):
    """Launch an AttentionKernel with its measured tile, or let triton.autotune choose one of its candidates.

    Compiled, the first candidate is taken.
    """
    B, T, _, D = qkv.shape
    architecture = gpu_architecture(qkv.device)
    precision = dot_precision(architecture, qkv.dtype)
    tiles = attention_tiles(attention.computes, architecture, D, qkv.dtype, T, precision)
    constants = {"H": H, "K": K, "D": D, "PRECISION": precision}
    programs = B * constants[attention.heads]

    def grid(meta):
        return programs, cdiv(T, meta[attention.block])

    kernel = attention.kernel
    if len(tiles) == 1 or torch.compiler.is_compiling():  # the compiler's tracer cannot time candidates
        constants |= tiles[0]._asdict()
    else:
        kernel = autotuned(kernel, tiles)
    scale = math.log2(math.e) / math.sqrt(D)
    kernel[grid](qkv, *tensors, T, scale, **constants)


@guarded(twice_differentiable=False)
class AttentionFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, qkv, cos, sin, H, K):
        if cos is not None:
            with annotate("rope"):
                qkv = rope(qkv, cos, sin, H + K)
        B, T, _, D = qkv.shape
        o = torch.empty(B, T, H, D, dtype=qkv.dtype, device=qkv.device)
        lse = torch.empty(B, H, T, dtype=torch.float32, device=qkv.device)
        launch_attention(ATTENTION_FORWARD, qkv, H, K, o, lse)
        ctx.save_for_backward(qkv, cos, sin, o, lse)
        ctx.heads = (H, K)
        return o

    @staticmethod
    def backward(ctx, do):
        qkv, cos, sin, o, lse = ctx.saved_tensors
        H, K = ctx.heads
        dqkv = torch.empty_like(qkv)
        delta = torch.empty_like(lse)
        launch_attention(ATTENTION_DQ, qkv, H, K, o, do, lse, delta, dqkv, cos, sin)  # stores Δ for the next kernel
        launch_attention(ATTENTION_DKDV, qkv, H, K, do, lse, delta, dqkv, cos, sin)
        return dqkv, None, None, None, None


def flash_attention(qkv, H, K):
    """Return causal attention [B, T, H, D] of H query heads over K key/value heads, packed as qkv [B, T, H + 2K, D]."""
    return rotary_attention(qkv, None, None, H, K)


def rotary_attention(qkv, cos, sin, H, K):
    """Return flash_attention(rope(qkv, cos, sin, H + K), H, K), with one pass over memory less in the backward."""
    check_tensor("attention: qkv", qkv)
    if qkv.ndim != 4 or qkv.shape[3] not in HEAD_DIMS or min(H, K) < 1 or H % K or qkv.shape[2] != H + 2 * K:
        wanted = f"[B, T, {H} + 2 x {K}, D] with K dividing H and D in {HEAD_DIMS}"
        raise ValueError(f"attention: qkv must be {wanted}, got {list(qkv.shape)}")
    return AttentionFunction.apply(qkv, cos, sin, H, K)


# ---------------------------------------------------------------- tiles of the attention kernels
# Measured tiles are for D = 64 on an sm_90. For another D or GPU, triton.autotune times the candidates in the first
# eager step with a new T, D or precision, and caches the fastest on disk; --deterministic takes the first. At least one
# candidate spills no registers, but for D = 128 on gfx11 and gfx12.


class Tile(NamedTuple):
    """Hold the block sizes of one attention program and its compile options; names as in a launch."""

    BLOCK_Q: int
    BLOCK_K: int
    num_warps: int
    num_stages: int


# (GPU, precision) -> what the kernel computes -> its tile
MEASURED_TILES = {
    ("sm_90", "16-bit"): {"o": Tile(64, 64, 4, 2), "dq": Tile(64, 64, 4, 3), "dkdv": Tile(32, 64, 4, 3)},
    ("sm_90", "tf32"): {"o": Tile(64, 64, 4, 1), "dq": Tile(64, 64, 4, 2), "dkdv": Tile(32, 32, 4, 2)},
    ("sm_90", "tf32x3"): {"o": Tile(64, 64, 4, 1), "dq": Tile(64, 64, 4, 1), "dkdv": Tile(32, 32, 4, 1)},
}
LONG_FORWARD_TILE = Tile(128, 64, 8, 3)  # sm_90, 16-bit, T > 1024: long rows pay for more queries per tile
# (what the kernel computes, bits of the dtype) -> its candidates
CANDIDATE_TILES = {
    ("o", 16): (
        Tile(64, 32, 4, 2), Tile(64, 64, 4, 2), Tile(128, 64, 8, 3),
        Tile(128, 64, 4, 2), Tile(128, 32, 4, 2), Tile(64, 32, 8, 1),
    ),
    ("dq", 16): (
        Tile(32, 16, 4, 1), Tile(64, 64, 4, 3), Tile(128, 64, 8, 3),
        Tile(128, 64, 4, 1), Tile(128, 32, 8, 1), Tile(64, 32, 8, 1),
    ),
    ("dkdv", 16): (
        Tile(16, 32, 4, 1), Tile(32, 64, 4, 3), Tile(32, 128, 8, 3),
        Tile(32, 128, 4, 1), Tile(32, 64, 8, 2), Tile(16, 64, 16, 1),
    ),
    ("o", 32): (
        Tile(32, 16, 4, 1), Tile(64, 64, 4, 1), Tile(64, 64, 8, 1),
        Tile(32, 32, 4, 2), Tile(64, 16, 4, 2), Tile(16, 16, 8, 1),
    ),
    ("dq", 32): (
        Tile(16, 16, 8, 1), Tile(64, 64, 4, 1), Tile(64, 64, 4, 2),
        Tile(64, 32, 4, 1), Tile(32, 32, 4, 2), Tile(32, 16, 4, 2),
    ),
    ("dkdv", 32): (
        Tile(16, 16, 8, 1), Tile(32, 32, 4, 1), Tile(32, 32, 4, 2),
        Tile(32, 64, 4, 1), Tile(16, 32, 4, 1), Tile(16, 32, 16, 1),
    ),
}  # fmt: skip
# AMD's GPUs: Instinct (gfx9) and Radeon (gfx11, gfx12). These are the tiles that AMD measured for attention kernels of
# its own (AOTriton's tuning databases, D = 64, causal), the one for T of about 512 first. Where that one spills in our
# kernel, a tile that does not comes first.
AMD_TILES = {
    ("gfx9", "o", 16): (Tile(64, 64, 4, 1), Tile(128, 128, 4, 1), Tile(64, 64, 2, 1)),
    ("gfx9", "dq", 16): (Tile(64, 64, 2, 1), Tile(32, 32, 2, 1), Tile(32, 32, 4, 1)),
    ("gfx9", "dkdv", 16): (Tile(64, 16, 4, 1), Tile(64, 16, 2, 1), Tile(64, 32, 2, 1)),
    ("gfx9", "o", 32): (Tile(16, 16, 4, 1), Tile(32, 32, 2, 1), Tile(64, 64, 4, 1)),
    ("gfx9", "dq", 32): (Tile(16, 16, 4, 1), Tile(16, 16, 2, 1), Tile(32, 16, 2, 1)),
    ("gfx9", "dkdv", 32): (Tile(32, 16, 4, 1), Tile(32, 16, 2, 1)),
    ("gfx1", "o", 16): (Tile(32, 32, 4, 1), Tile(64, 32, 4, 1), Tile(16, 16, 4, 1)),
    ("gfx1", "dq", 16): (Tile(32, 32, 4, 1), Tile(64, 32, 4, 1), Tile(64, 64, 4, 1)),
    ("gfx1", "dkdv", 16): (Tile(16, 32, 4, 1), Tile(64, 16, 4, 1), Tile(64, 32, 4, 1)),
    ("gfx1", "o", 32): (Tile(16, 16, 4, 1), Tile(32, 32, 4, 1)),
    ("gfx1", "dq", 32): (Tile(16, 16, 8, 1), Tile(16, 16, 4, 1), Tile(32, 32, 4, 1)),
    ("gfx1", "dkdv", 32): (Tile(16, 16, 8, 1), Tile(16, 16, 4, 1), Tile(32, 32, 8, 1)),
}


def attention_tiles(computes, architecture, D, dtype, T, precision):
    """Return the tiles to choose from for the kernel that computes "o", "dq" or "dkdv"."""
    if architecture == "cpu":
        return (Tile(64, 64, 4, 1),)
    bits = 32 if dtype == torch.float32 else 16
    measured = MEASURED_TILES.get((architecture, precision if bits == 32 else "16-bit"))
    if measured and D == 64:
        if computes == "o" and bits == 16 and T > 1024:
            return (LONG_FORWARD_TILE,)
        return (measured[computes],)
    candidates = AMD_TILES.get((architecture[:4], computes, bits), CANDIDATE_TILES[computes, bits])
    if torch.are_deterministic_algorithms_enabled():
        return candidates[:1]
    return candidates


def dot_precision(architecture, dtype):
    """Return how tl.dot multiplies float32: in TF32 where PyTorch's matmuls may use it, else exactly."""
    if dtype != torch.float32:
        return "ieee"
    tf32 = torch.get_float32_matmul_precision() != "highest"
    if architecture.startswith("sm_") and int(architecture[3:]) >= 80:
        return "tf32" if tf32 else "tf32x3"  # three TF32 dots are as exact as float32, and faster than FMA units
    return "tf32" if tf32 and architecture == "gfx942" else "ieee"


@functools.cache
def autotuned(kernel, tiles):
    """Return the kernel with triton.autotune, which times the tiles once per T, D and precision."""
    configs = []
    for tile in tiles:
        options = tile._asdict()
        warps = options.pop("num_warps")
        stages = options.pop("num_stages")
        configs.append(triton.Config(options, num_warps=warps, num_stages=stages))
    return triton.autotune(configs, key=["T", "D", "PRECISION"])(kernel)


# ---------------------------------------------------------------- cross-entropy
# forward    loss = mean over rows of logsumexp(x) - x[label];  logsumexp is saved as the row maximum m and log(l),
#            because their sum would round log(l) away where logits are large
# backward   dx = (softmax(x) - onehot(label)) · dloss / rows
# Rows that are ignored have loss 0, and are not counted in rows. Their log(l) is saved as infinity, so softmax and dx
# are 0 without a test in the backward's tile. With a test, NVIDIA's compiler loads one element after the other.


LOWEST = tl.constexpr(torch.finfo(torch.float32).min)
IGNORED = tl.constexpr(-100)  # label of rows that are ignored; PyTorch's default


@triton.jit
def cross_entropy_forward_kernel(
    x_ptr, label_ptr, loss_ptr, counted_ptr, m_ptr, log_l_ptr, rows, V, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """Compute ROWS losses from x [rows, V] per program, looping over the vocabulary in tiles of BLOCK.

    counted is 1, and 0 in a row that is ignored.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    x_ptr += row.to(tl.int64)[:, None] * V
    m = tl.full([ROWS], LOWEST, tl.float32)  # not -inf: in a tile of -inf alone exp(m - m_new) must not be NaN
    l = tl.zeros([ROWS], tl.float32)
    for start in range(0, V, BLOCK):
        column = start + tl.arange(0, BLOCK)[None, :]
        # Rows past the end read as zero: their sums stay finite, and nothing of them is stored.
        x = load(x_ptr + column, (row[:, None] < rows) & (column < V))
        x = tl.where(column < V, x, -float("inf"))
        m_new = tl.maximum(m, tl.max(x, 1))
        l = l * tl.exp(m - m_new) + tl.sum(tl.exp(x - m_new[:, None]), 1)
        m = m_new
    label = tl.load(label_ptr + row, mask=row < rows, other=-1)
    valid = (label >= 0) & (label < V)
    # A wrong label makes the loss NaN.
    x_label = tl.load(x_ptr + label[:, None], mask=valid[:, None], other=float("nan")).to(tl.float32)  # [ROWS, 1]
    x_label = tl.sum(x_label, 1)  # [ROWS]: drops the dimension of one
    log_l = tl.log(l)
    store(m_ptr + row, m, row < rows)
    store(log_l_ptr + row, tl.where(label == IGNORED, float("inf"), log_l), row < rows)
    store(loss_ptr + row, tl.where(label == IGNORED, 0.0, log_l - (x_label - m)), row < rows)
    store(counted_ptr + row, tl.where(label == IGNORED, 0.0, 1.0), row < rows)


@triton.jit
def cross_entropy_backward_kernel(
    x_ptr, label_ptr, m_ptr, log_l_ptr, dloss_ptr, count_ptr, dx_ptr, rows, V, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """Compute a tile [ROWS, BLOCK] of dx [rows, V] per program; count rows are not ignored. dx may be x."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    mask = (row[:, None] < rows) & (column < V)
    offsets = row.to(tl.int64)[:, None] * V + column
    x = load(x_ptr + offsets, mask)
    m = load(m_ptr + row, row < rows)
    log_l = load(log_l_ptr + row, row < rows)
    label = tl.load(label_ptr + row, mask=row < rows, other=0)
    onehot = tl.where(column == label[:, None], 1.0, 0.0)  # a wrong label has none, but its loss is NaN
    softmax = tl.exp((x - m[:, None]) - log_l[:, None])
    scale = tl.load(dloss_ptr) / tl.maximum(tl.load(count_ptr), 1.0)  # if no row counts, dx is 0, not 0 · inf
    store(dx_ptr + offsets, (softmax - onehot) * scale, mask)


def empty_per_row(count, rows, device):
    """Allocate [count, rows] in float32; each row begins at 16 bytes, or Triton would compile for other addresses."""
    return torch.empty(count, 4 * cdiv(rows, 4), dtype=torch.float32, device=device)[:, :rows]


def launch_cross_entropy_forward(logits, labels, loss, counted, m, log_l):
    """Compute loss, counted, m and log_l, [rows] each, of logits [rows, V]: one program per ROWS rows."""
    rows, V = logits.shape
    tile = tile_shape(V, logits.device)
    grid = (cdiv(rows, tile["ROWS"]),)
    cross_entropy_forward_kernel[grid](logits, labels, loss, counted, m, log_l, rows, V, **tile)


@guarded(twice_differentiable=False)
class CrossEntropyFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, labels):
        loss_and_counted = empty_per_row(2, logits.shape[0], logits.device)
        m, log_l = empty_per_row(2, logits.shape[0], logits.device)
        launch_cross_entropy_forward(logits, labels, *loss_and_counted, m, log_l)
        loss, count = loss_and_counted.sum(1)
        ctx.save_for_backward(logits, labels, m, log_l, count)
        return loss / count

    @staticmethod
    def backward(ctx, dloss):
        logits, labels, m, log_l, count = ctx.saved_tensors
        dx = torch.empty_like(logits)
        launch_tiles(cross_entropy_backward_kernel, *logits.shape, logits, labels, m, log_l, dloss, count, dx)
        return dx, None


def cross_entropy(logits, labels):
    """Return the mean cross-entropy of logits [..., V] and int64 labels [...].

    Rows with the label -100 are ignored, as PyTorch does. Another label that is not in 0 to V - 1 makes the loss NaN.
    """
    check_tensor("cross_entropy: logits", logits)
    check_tensor("cross_entropy: labels", labels, logits.shape[:-1], (torch.int64,), logits.device)
    return CrossEntropyFunction.apply(logits.flatten(0, -2), labels.flatten())  # [rows, V] and [rows]


# ---------------------------------------------------------------- output head and loss in chunks of rows
# With a large vocabulary the logits [rows, V] are the largest tensor of a step, and their gradient is as large. A loss
# needs neither of them whole: each row is on its own. So the output head multiplies LOSS_CHUNK rows at a time, and the
# forward computes their gradient at once, in the place of their logits:
# for each chunk of rows: logits = x wᵀ,  dlogits = softmax(logits) - onehot(label),  dx = dlogits w,  dw += dlogitsᵀ x
# The loss is a mean, and what is behind it may scale it: the backward multiplies dx and dw by dloss / number of rows.

LOSS_CHUNK = 2048  # rows of a chunk: with fewer, dw in float32 is read and written more often than it pays
FUSED_LOSS_FROM = 16384  # vocabulary from which on the fused loss is the default


def add_matmul(total, a, b, first):
    """Add a @ b to total (float32), or with first=True overwrite it."""
    beta = 0 if first else 1
    if a.dtype == torch.float32:
        torch.addmm(total, a, b, beta=beta, out=total)
    elif sums_in_float32(a.device, a.dtype):
        torch.addmm(total, a, b, out_dtype=torch.float32, beta=beta, out=total)
    elif first:
        total.copy_(a @ b)
    else:
        total += a @ b


@functools.cache
def sums_in_float32(device, dtype):
    """Tell whether this PyTorch and device add a matmul of 16-bit numbers to float32 without rounding it to 16 bits."""
    ones = torch.ones(16, 16, dtype=dtype, device=device)
    total = torch.full((16, 16), 2**-12, device=device)
    try:
        torch.addmm(total, ones, ones, out_dtype=torch.float32, out=total)
    except (TypeError, RuntimeError):  # PyTorch before 2.8, or a library without it
        return False
    return bool((total == 16 + 2**-12).all())  # needs 16 bits behind the first


@guarded(twice_differentiable=False)
class LinearCrossEntropyFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, labels, chunk):
        rows = x.shape[0]
        V = w.shape[0]
        per_row = empty_per_row(4, rows, x.device)
        one = torch.ones((), device=x.device)
        dx = torch.empty_like(x)
        dw = torch.empty(w.shape, dtype=torch.float32, device=x.device)
        buffer = torch.empty(min(chunk, rows), V, dtype=x.dtype, device=x.device)
        for first in range(0, rows, chunk):
            part = slice(first, first + chunk)
            loss, counted, m, log_l = per_row[:, part]
            logits = buffer[: len(x[part])]  # [chunk, V], the last one shorter
            torch.mm(x[part], w.t(), out=logits)
            launch_cross_entropy_forward(logits, labels[part], loss, counted, m, log_l)
            dlogits = logits
            launch_tiles(
                cross_entropy_backward_kernel, *logits.shape, logits, labels[part], m, log_l, one, one, dlogits
            )
            torch.mm(dlogits, w, out=dx[part])
            add_matmul(dw, dlogits.t(), x[part], first=first == 0)
        loss, count = per_row[:2].sum(1)
        ctx.dtype = w.dtype
        ctx.save_for_backward(dx, dw, count)
        return loss / count

    @staticmethod
    def backward(ctx, dloss):
        dx, dw, count = ctx.saved_tensors
        # One element in one dimension: PyTorch rounds a scalar tensor to the other's 16 bits before it multiplies.
        scale = (dloss / count.clamp(min=1)).view(1)
        dx = torch.mul(dx, scale, out=torch.empty_like(dx))
        dw = torch.mul(dw, scale, out=torch.empty_like(dw, dtype=ctx.dtype))
        return dx, dw, None, None


def linear_cross_entropy(x, w, labels, chunk=LOSS_CHUNK):
    """Return cross_entropy(x wᵀ, labels) without the logits [..., V]; x [..., C], w [V, C], int64 labels [...]."""
    check_tensor("linear_cross_entropy: x", x)
    check_tensor("linear_cross_entropy: w", w, (w.shape[0], x.shape[-1]), (x.dtype,), x.device)
    check_tensor("linear_cross_entropy: labels", labels, x.shape[:-1], (torch.int64,), x.device)
    return LinearCrossEntropyFunction.apply(x.flatten(0, -2), w, labels.flatten(), chunk)


# ---------------------------------------------------------------- AdamW (arXiv:1711.05101), one launch for all
# m = β₁ m + (1 - β₁) g,  v = β₂ v + (1 - β₂) g²,  w = (1 - lr · λ) w - lr · m̂ / (sqrt(v̂) + eps)
# The optimizer updates float32 weights; a 16-bit model computes with a rounded copy. bfloat16 is the upper half of
# float32, so only the low bits are stored beside it, as a signed integer: bits of w = 2¹⁶ · bits of copy + low bits.
# A table tells the kernel where the tensors of each parameter are. These are its columns:
COPY = tl.constexpr(0)  # address of the parameter, which the model computes with
WEIGHT = tl.constexpr(1)  # address of what the float32 weight is in: low bits, a float32 master, or the parameter
EXP_AVG = tl.constexpr(2)  # address of m
EXP_AVG_SQ = tl.constexpr(3)  # address of v
GRAD = tl.constexpr(4)  # address of the gradient
COUNT = tl.constexpr(5)  # number of elements
ADAMW_COLUMNS = tl.constexpr(6)


def split_bits(w):
    """Split float32 w without loss into a bfloat16 copy, halves rounded away from zero, and int16 low bits."""
    bits = w.contiguous().view(torch.int32)
    upper = torch.where(w.isnan(), 0x7FC0, (bits + 2**15) >> 16)  # 0x7FC0: NaN in bfloat16
    copy = upper.to(torch.int16).view(torch.bfloat16)
    low_bits = (bits - (upper << 16)).to(torch.int16)
    return copy, low_bits


@triton.jit
def pointers_from(row_ptr, column: tl.constexpr, offsets, dtype: tl.constexpr):
    """Return pointers into the tensor whose address, a multiple of 16, is in that column of a row of the table."""
    return tl.multiple_of(tl.load(row_ptr + column).to(tl.pointer_type(dtype)), 16) + offsets


# table [parameters, ADAMW_COLUMNS]; chunk [programs, 2]: row of the table, and which BLOCK of that parameter;
# power [2]: β₁ᵗ and β₂ᵗ in float64; decay: 1 - lr · λ; one_minus_beta: computed in float64, since 1 - β in float32 is
# less exact
@triton.jit
def adamw_kernel(
    table_ptr, chunk_ptr, power_ptr, grad_scale_ptr, found_inf_ptr,
    lr, decay, beta1, one_minus_beta1, beta2, one_minus_beta2, eps,
    dtype: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Update BLOCK elements of one parameter of that dtype per program."""
    chunk_ptr += 2 * tl.program_id(0)
    row_ptr = table_ptr + tl.load(chunk_ptr) * ADAMW_COLUMNS
    offsets = tl.load(chunk_ptr + 1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    count = tl.load(row_ptr + COUNT)
    if found_inf_ptr is not None:  # a step whose scaled gradients overflowed changes nothing
        count = tl.where(tl.load(found_inf_ptr) == 0.0, count, 0)
    if ALIGNED:  # every count is a multiple of 16: masked loads may be wide
        count = tl.multiple_of(count, 16)
    mask = offsets < count
    m_ptr = pointers_from(row_ptr, EXP_AVG, offsets, tl.float32)
    v_ptr = pointers_from(row_ptr, EXP_AVG_SQ, offsets, tl.float32)
    g = load(pointers_from(row_ptr, GRAD, offsets, dtype), mask)
    if grad_scale_ptr is not None:
        g = g / tl.load(grad_scale_ptr)
    m = beta1 * load(m_ptr, mask) + one_minus_beta1 * g
    v = beta2 * load(v_ptr, mask) + one_minus_beta2 * g * g
    m_hat = m / (1 - tl.load(power_ptr)).to(tl.float32)
    v_hat = v / (1 - tl.load(power_ptr + 1)).to(tl.float32)
    if dtype == tl.bfloat16:
        copy = tl.load(pointers_from(row_ptr, COPY, offsets, tl.int16), mask=mask, other=0).to(tl.int32)
        low_bits = tl.load(pointers_from(row_ptr, WEIGHT, offsets, tl.int16), mask=mask, other=0).to(tl.int32)
        w = ((copy << 16) + low_bits).to(tl.float32, bitcast=True)
    else:
        w = load(pointers_from(row_ptr, WEIGHT, offsets, tl.float32), mask)
    w = decay * w - lr * m_hat / (tl.sqrt(v_hat) + eps)
    if dtype == tl.bfloat16:
        bits = w.to(tl.int32, bitcast=True)
        upper = tl.where(w == w, (bits + 0x8000) >> 16, 0x7FC0)
        store(pointers_from(row_ptr, COPY, offsets, tl.int16), upper, mask)
        store(pointers_from(row_ptr, WEIGHT, offsets, tl.int16), bits - (upper << 16), mask)
    else:
        store(pointers_from(row_ptr, WEIGHT, offsets, tl.float32), w, mask)
        if dtype == tl.float16:
            store(pointers_from(row_ptr, COPY, offsets, dtype), w, mask)
    store(m_ptr, m, mask)
    store(v_ptr, v, mask)


class FusedAdamW(torch.optim.Optimizer):
    """Convert matrices to matrix_dtype, keep float32 weights, and update all parameters of a dtype in one launch.

    The betas must stay those given here: the powers in step come from a copy. A captured graph keeps its lr.
    """

    BLOCK = 1024
    _step_supports_amp_scaling = True  # GradScaler then sets found_inf and grad_scale instead of reading them

    def __init__(self, params, lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01, matrix_dtype=torch.float32):
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__([{"params": list(params)}], defaults)
        parameters = self.param_groups[0]["params"]
        device = parameters[0].device
        self.steps = torch.zeros((), dtype=torch.float64, device=device)  # shared by all parameters
        self.betas = torch.tensor(betas, dtype=torch.float64, device=device)
        # Every replay of a graph copies the table from this pinned memory again, and a capture cannot allocate any.
        table_shape = (len(parameters), ADAMW_COLUMNS.value)
        self.pinned = torch.empty(table_shape, dtype=torch.int64, pin_memory=device.type == "cuda")
        chunks = {}  # dtype -> the (parameter, part) of each program
        for i, p in enumerate(parameters):
            if not p.is_contiguous():
                raise ValueError(f"FusedAdamW: parameters must be contiguous, got {list(p.shape)} with {p.stride()}")
            state = {"step": self.steps, "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
            if p.ndim == 2 and matrix_dtype == torch.bfloat16:
                copy, state["low_bits"] = split_bits(p.data)
                p.data = copy
            elif p.ndim == 2 and matrix_dtype == torch.float16:
                state["master"] = p.data
                p.data = p.data.half()
            self.state[p] = state
            parts = range(cdiv(p.numel(), self.BLOCK))
            chunks.setdefault(p.dtype, []).extend((i, part) for part in parts)
        self.chunks = {dtype: torch.tensor(pairs, dtype=torch.int32).to(device) for dtype, pairs in chunks.items()}
        self.aligned = all(p.numel() % 16 == 0 for p in parameters)

    def readable_grads(self):
        """Return the gradients as the kernel can read them, None for a parameter without one."""
        grads = []
        for p in self.param_groups[0]["params"]:
            grad = p.grad
            if grad is not None:
                grad = grad.contiguous()
                # DDP's gradients are views of its buckets and start anywhere; the kernel reads 16 bytes at a time.
                if grad.data_ptr() % 16 != 0:
                    grad = grad.clone()
            grads.append(grad)
        return grads

    def address_table(self, grads):
        """Return the kernel's table, on the host."""
        rows = []
        for p, grad in zip(self.param_groups[0]["params"], grads, strict=True):
            state = self.state[p]
            weight = state.get("low_bits", state.get("master", p))
            row = [tensor.data_ptr() for tensor in (p, weight, state["exp_avg"], state["exp_avg_sq"])]
            if grad is None:
                row += [0, 0]  # 0 elements: nothing is updated
            else:
                row += [grad.data_ptr(), p.numel()]
            rows.append(row)
        return torch.tensor(rows, dtype=torch.int64)

    def load_state_dict(self, state_dict):
        raise NotImplementedError("FusedAdamW: load_state_dict would round the float32 state to the parameters' dtype")

    @torch.no_grad()
    def step(self, closure=None):
        if closure is not None:
            raise NotImplementedError("FusedAdamW.step: closure is not supported, compute the gradients before")
        grad_scale = getattr(self, "grad_scale", None)
        found_inf = getattr(self, "found_inf", None)
        if found_inf is None:
            self.steps += 1
        else:  # 1 if a gradient overflowed, and then this step does not count
            self.steps += 1 - found_inf.reshape(())
        powers = self.betas**self.steps
        grads = self.readable_grads()  # alive until the launch: copies are freed after it
        table = self.address_table(grads)
        device = self.steps.device
        if device.type == "cuda":
            # The host does not wait for a copy from pinned memory. PyTorch uses that memory again once it is copied.
            capturing = torch.cuda.is_current_stream_capturing()
            table = self.pinned.copy_(table) if capturing else table.pin_memory()
        table = table.to(device, non_blocking=True)
        group = self.param_groups[0]
        lr = group["lr"]
        decay = 1 - lr * group["weight_decay"]
        beta1, beta2 = group["betas"]
        with torch.cuda.device_of(table):
            for dtype, chunks in self.chunks.items():
                adamw_kernel[(len(chunks),)](
                    table, chunks, powers, grad_scale, found_inf,
                    lr, decay, beta1, 1 - beta1, beta2, 1 - beta2, group["eps"],
                    TRITON_DTYPES[dtype], self.aligned, self.BLOCK,
                )  # fmt: skip


# ---------------------------------------------------------------- model


@guarded(twice_differentiable=True)
class EmbeddingFunction(torch.autograd.Function):
    """Return w[token]; compute dw as the matmul onehot(token)ᵀ dx, faster than adding row by row where V is small."""

    @staticmethod
    def forward(ctx, tokens, w):
        ctx.save_for_backward(tokens)
        ctx.V = w.shape[0]
        return F.embedding(tokens, w)  # [B, T] -> [B, T, C]

    @staticmethod
    def backward(ctx, dx):
        (tokens,) = ctx.saved_tensors
        onehot = dx.new_zeros(tokens.numel(), ctx.V).scatter_(1, tokens.view(-1, 1), 1)  # [rows, V]
        dw = onehot.t() @ dx.flatten(0, -2)  # [V, rows] [rows, C] -> [V, C]
        return None, dw


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Hold what the model needs to know of a run's options."""

    vocab_size: int
    hidden_dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    intermediate_dim: int
    seq_len: int
    norm_eps: float
    rope_theta: float
    enable_rmsnorm_kernel: bool
    enable_rope_kernel: bool
    enable_swiglu_kernel: bool
    enable_attention_kernel: bool
    fp8: bool

    @property
    def head_dim(self):
        return self.hidden_dim // self.num_heads


def projection(config, in_features, *parts):
    """Return a linear layer without bias, whose outputs are packed in parts of these sizes; with --fp8 one in fp8."""
    if config.fp8:
        return FP8Linear(in_features, *parts, bias=False)
    return nn.Linear(in_features, sum(parts), bias=False)


class Attention(nn.Module):
    """Compute causal self-attention of x [B, T, C] with RoPE tables [T, D/2]; H query heads share K key/value heads."""

    def __init__(self, config):
        super().__init__()
        self.head_dim = config.head_dim
        self.heads = [config.num_heads, config.num_kv_heads, config.num_kv_heads]  # of q, k and v
        self.qkv_proj = projection(config, config.hidden_dim, *(heads * config.head_dim for heads in self.heads))
        self.o_proj = projection(config, config.hidden_dim, config.hidden_dim)
        self.rope_kernel = config.enable_rope_kernel
        self.attention_kernel = config.enable_attention_kernel

    def attend(self, qkv, cos, sin):
        """Return attention, with RoPE, of the packed qkv [B, T, H + 2K, D]."""
        H, K, _ = self.heads
        if self.rope_kernel and self.attention_kernel:
            return rotary_attention(qkv, cos, sin, H, K)
        with annotate("rope"):
            if self.rope_kernel:
                qkv = rope(qkv, cos, sin, H + K)
            else:
                q, k, v = qkv.split(self.heads, dim=2)  # [B, T, H, D], and K heads each
                qkv = torch.cat([apply_rope(q, cos, sin), apply_rope(k, cos, sin), v], dim=2)
        if self.attention_kernel:
            return flash_attention(qkv, H, K)
        q, k, v = qkv.split(self.heads, dim=2)
        return causal_attention(q, k, v)

    def forward(self, x, cos, sin):
        with annotate("qkv projection"):
            qkv = self.qkv_proj(x).unflatten(-1, (-1, self.head_dim))  # [B, T, H + 2K, D]
        with annotate("attention"):
            context = self.attend(qkv, cos, sin)  # [B, T, H, D]
        with annotate("output projection"):
            return self.o_proj(context.flatten(-2))  # [B, T, C]


class FeedForward(nn.Module):
    """Compute down(silu(gate(x)) · up(x)) of x [B, T, C]."""

    def __init__(self, config):
        super().__init__()
        self.gate_up_proj = projection(config, config.hidden_dim, config.intermediate_dim, config.intermediate_dim)
        self.down_proj = projection(config, config.intermediate_dim, config.hidden_dim)
        self.swiglu_kernel = config.enable_swiglu_kernel
        self.fp8 = config.fp8

    def forward(self, x):
        with annotate("feed-forward"):
            if self.fp8:
                weights = self.gate_up_proj.weight, self.down_proj.weight
                return FP8FeedForwardFunction.apply(x, *weights, self.gate_up_proj, self.down_proj)
            gate_up = self.gate_up_proj(x)  # [B, T, 2 · width]
            if self.swiglu_kernel:
                y = packed_swiglu(gate_up)  # [B, T, width]
            else:
                gate, up = gate_up.chunk(2, dim=-1)
                y = swiglu(gate, up)
            return self.down_proj(y)


class AddRMSNorm(nn.Module):
    """Return x = residual + branch (branch None: residual) and norm(x)."""

    def __init__(self, config):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(config.hidden_dim))
        self.eps = config.norm_eps
        self.kernel = config.enable_rmsnorm_kernel

    def forward(self, residual, branch):
        with annotate("rms norm"):
            if self.kernel:
                return add_rms_norm(residual, branch, self.weight, self.eps)
            x = residual if branch is None else residual + branch
            return x, rms_norm(x, self.weight, self.eps)


class Block(nn.Module):
    """Map (residual, branch), [B, T, C] each, to the next such pair, whose sum is the hidden state.

    The next RMSNorm kernel adds the two while it reads them. branch is None before the first block.
    """

    def __init__(self, config):
        super().__init__()
        self.attention_norm = AddRMSNorm(config)
        self.attention = Attention(config)
        self.feed_forward_norm = AddRMSNorm(config)
        self.feed_forward = FeedForward(config)

    def forward(self, residual, branch, cos, sin):
        residual, x = self.attention_norm(residual, branch)
        branch = self.attention(x, cos, sin)
        residual, x = self.feed_forward_norm(residual, branch)
        branch = self.feed_forward(x)
        return residual, branch


class TinyLlama(nn.Module):
    """Map tokens [B, T] to logits [B, T, V], or with labels [B, T] to their loss; the head shares the embedding."""

    def __init__(self, config):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_dim)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = AddRMSNorm(config)
        cos, sin = rope_tables(config.seq_len, config.head_dim, config.rope_theta)  # [T, D/2] each
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self.fp8_weights = None

    def allocate_fp8(self):
        """Allocate the weights in fp8; call it when the optimizer has decided where the weights lie in memory."""
        self.fp8_weights = FP8Weights(self)

    def embed(self, tokens):
        w = self.embed_tokens.weight
        if w.shape[0] <= MAX_ONE_HOT:
            return EmbeddingFunction.apply(tokens, w)
        return F.embedding(tokens, w)

    def forward(self, tokens, labels=None):
        T = tokens.shape[1]
        if self.fp8_weights:
            self.fp8_weights.update()
        with annotate("embedding"):
            residual = self.embed(tokens)  # [B, T, C]
        branch = None
        for layer in self.layers:
            residual, branch = layer(residual, branch, self.cos[:T], self.sin[:T])
        w = self.embed_tokens.weight
        with annotate("output head"):
            _, x = self.norm(residual, branch)
            if labels is None:
                return F.linear(x, w)  # [B, T, V]
            with annotate("loss"):
                return linear_cross_entropy(x, w, labels)


# ---------------------------------------------------------------- loss


def compute_loss(model, tokens, labels, options):
    """Return the mean cross-entropy, in float32, of predicting labels [B, T] from tokens [B, T]."""
    if options.enable_fused_loss:
        return model(tokens, labels)
    logits = model(tokens)  # [B, T, V]; no autocast: the optimizer has converted the matrices
    with annotate("loss"):
        if options.enable_loss_kernel:
            return cross_entropy(logits, labels)
        return F.cross_entropy(at_least_float32(logits).flatten(0, 1), labels.flatten())


# ---------------------------------------------------------------- fp8: fewer bits (--fp8). Stop here unless you want it
# The four projections of a block multiply in fp8 (e4m3, 3 bits of mantissa), about twice as fast as in bfloat16. Each
# row of a matrix is divided by its scale, its largest magnitude / the largest fp8 number. A name with _q is quantized
# (attention's q does not occur here), and its scales, one float32 per row, have the same name with _scale. t counts
# tokens, i inputs and o outputs of a layer:
# forward    x[t, i] = x_scale[t] x_q[t, i],  w[o, i] = w_scale[o] w_q[o, i]
#            y[t, o] = x_scale[t] w_scale[o] Σ_i x_q[t, i] w_q[o, i]
# backward   w_scale[o] stands in the sum over o, so dy takes it before it is quantized: g = dy · w_scale
#            g[t, o] = g_scale[t] g_q[t, o]
#            dx[t, i] = g_scale[t] Σ_o g_q[t, o] w_q[o, i]
#            dw[o, i] = (c / w_scale[o]) Σ_t g_q[t, o] x̃[t, i]
#            x̃[t, i] = x_q[t, i] x_scale[t] g_scale[t] / c  in fp8,  c = max over t of x_scale[t] g_scale[t]
# GPUs multiply fp8 only if both operands are contiguous along the sum: w_q exists in both layouts; g_q and x̃ are
# transposed for dw. This pays in the feed-forward part; in the attention part dw stays a bfloat16 matmul.
# g has one scale per token, and w_scale[o] decides what part of its range column o gets. A row of w with a scale far
# below the others, such as a row of zeros, would leave g_q[:, o] = 0 and never get a gradient; one far above them would
# leave nothing to the others. So no scale of w is below WEIGHT_FLOOR of the largest in its matrix; zeros alone have 1.

WEIGHT_FLOOR = tl.constexpr(0.01)  # measured: 0.001 to 0.1 give the same errors
SMALLEST = tl.constexpr(1e-30)  # a row without a larger magnitude counts as zeros


def fp8_dtype(architecture):
    """Return the GPU's e4m3 dtype (on gfx942 one of its own, whose largest number is 240, not 448), or None."""
    if architecture == "gfx942":
        return torch.float8_e4m3fnuz
    nvidia = architecture.startswith("sm_") and int(architecture[3:]) >= 89
    if nvidia or architecture.startswith(("cpu", "gfx95", "gfx12")):
        return torch.float8_e4m3fn
    return None


def fp8_matmul(x_q, x_scale, w_q, w_scale):
    """Return (x_scale · x_q) (w_scale · w_q)ᵀ in bfloat16: x_q [t, i] and w_q [o, i], scales [t, 1] and [1, o]."""
    if not hasattr(F, "scaled_mm"):  # public from PyTorch 2.10 on
        return torch._scaled_mm(x_q, w_q.t(), x_scale, w_scale, out_dtype=torch.bfloat16, use_fast_accum=True)
    row_wise = F.ScalingType.RowWise
    return F.scaled_mm(x_q, w_q.t(), x_scale, row_wise, w_scale, row_wise, use_fast_accum=True)


def empty_fp8(rows, columns, device):
    """Allocate an fp8 matrix [rows, columns] and its scales [rows, 1]."""
    q = torch.empty(rows, columns, dtype=fp8_dtype(gpu_architecture(device)), device=device)
    scale = torch.empty(rows, 1, dtype=torch.float32, device=device)
    return q, scale


@triton.jit
def row_scale(x, LIMIT: tl.constexpr):
    """Return what each row of x [ROWS, BLOCK] is divided by; a row of zeros gets a scale that is not zero."""
    return tl.maximum(tl.max(tl.abs(x), 1), SMALLEST)[:, None] / LIMIT


@triton.jit
def quantize_rows_kernel(
    x_ptr, factor_ptr, q_ptr, scale_ptr, LIMIT: tl.constexpr, rows, C, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """Quantize ROWS rows of x [rows, C] · factor [C] per program; BLOCK >= C."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    mask = (row < rows) & (column < C)
    offsets = row.to(tl.int64) * C + column
    x = load(x_ptr + offsets, mask)
    if factor_ptr is not None:
        x *= load(factor_ptr + column, column < C)
    scale = row_scale(x, LIMIT)
    store(scale_ptr + row, scale, row < rows)
    store(q_ptr + offsets, x / scale, mask)


def quantize_rows(x, factor=None):
    """Return x [rows, C] (times factor [1, C]) in fp8 and its scales [rows, 1]."""
    rows, C = x.shape
    q, scale = empty_fp8(rows, C, x.device)
    launch_tiles(quantize_rows_kernel, rows, C, x, factor, q, scale, torch.finfo(q.dtype).max, whole_row=True)
    return q, scale


@triton.jit
def swiglu_quantize_kernel(
    x_ptr, y_q_ptr, y_scale_ptr, LIMIT: tl.constexpr, rows, width, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """Compute and quantize ROWS rows of y = silu(gate) · up [rows, width] per program; BLOCK >= width."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    mask = (row < rows) & (column < width)
    gate = load(x_ptr + row * 2 * width + column, mask)
    up = load(x_ptr + row * 2 * width + width + column, mask)
    y = gate * tl.sigmoid(gate) * up
    scale = row_scale(y, LIMIT)
    store(y_scale_ptr + row, scale, row < rows)
    store(y_q_ptr + row * width + column, y / scale, mask)


@triton.jit
def swiglu_backward_quantize_kernel(
    dy_ptr, x_ptr, w_scale_ptr, g_q_ptr, g_scale_ptr, LIMIT: tl.constexpr, rows, width,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute and quantize ROWS rows of g = (dgate, dup) · w_scale [rows, 2 · width] per program; BLOCK >= width."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    mask = (row < rows) & (column < width)
    offsets = row * 2 * width + column
    dy = load(dy_ptr + row * width + column, mask)
    gate = load(x_ptr + offsets, mask)
    up = load(x_ptr + offsets + width, mask)
    sigmoid = tl.sigmoid(gate)
    dgate = dy * up * sigmoid * (1 + gate * (1 - sigmoid))
    dgate *= load(w_scale_ptr + column, column < width)
    dup = dy * gate * sigmoid * load(w_scale_ptr + width + column, column < width)
    scale = tl.maximum(row_scale(dgate, LIMIT), row_scale(dup, LIMIT))
    store(g_scale_ptr + row, scale, row < rows)
    store(g_q_ptr + offsets, dgate / scale, mask)
    store(g_q_ptr + offsets + width, dup / scale, mask)


@triton.jit
def transpose_kernel(
    q_ptr, out_ptr, x_scale_ptr, g_scale_ptr, c_ptr, rows, columns, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """Transpose a tile of q [rows, columns] per program; unless the scales are None, compute x̃ of its rows."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS).to(tl.int64)[:, None]
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK).to(tl.int64)[None, :]
    mask = (row < rows) & (column < columns)
    q = tl.load(q_ptr + row * columns + column, mask=mask, other=0.0)
    if x_scale_ptr is not None:
        x_scale = load(x_scale_ptr + row, row < rows)
        g_scale = load(g_scale_ptr + row, row < rows)
        c = tl.maximum(tl.load(c_ptr), 1e-37)  # 0 where all of x or all of g is zero
        q = (q.to(tl.float32) * (x_scale * g_scale / c)).to(q_ptr.dtype.element_ty)
    store(out_ptr + column * rows + row, q, mask)


def transpose_fp8(q, x_scale=None, g_scale=None, c=None):
    """Return qᵀ, contiguous, for q [rows, columns] in fp8; with scales, x̃ᵀ for x_q = q."""
    ROWS = 32
    BLOCK = 128
    rows, columns = q.shape
    out = torch.empty(columns, rows, dtype=q.dtype, device=q.device)
    grid = (cdiv(rows, ROWS), cdiv(columns, BLOCK))
    transpose_kernel[grid](q, out, x_scale, g_scale, c, rows, columns, ROWS, BLOCK)
    return out


# The columns of the table that describes the matrices to quantize.
MATRIX = tl.constexpr(0)  # address of w [rows, columns]
MATRIX_Q = tl.constexpr(1)  # address of w_q
MATRIX_SCALE = tl.constexpr(2)  # address of w_scale
MATRIX_ROWS = tl.constexpr(3)
MATRIX_COLUMNS = tl.constexpr(4)
MATRIX_PROGRAM = tl.constexpr(5)  # the first program of the matrix
QUANTIZE_COLUMNS = tl.constexpr(6)


@triton.jit
def store_quantized_weights(
    matrix_ptr, row, rows, columns, scale, dtype: tl.constexpr, fp8: tl.constexpr, BLOCK: tl.constexpr
):
    """Store w_scale and w_q = w / w_scale of these rows of a matrix."""
    store(pointers_from(matrix_ptr, MATRIX_SCALE, row, tl.float32), scale, row < rows)
    for first in range(0, columns, BLOCK):
        column = first + tl.arange(0, BLOCK)[None, :]
        mask = (row < rows) & (column < columns)
        w = load(pointers_from(matrix_ptr, MATRIX, row * columns + column, dtype), mask)
        store(pointers_from(matrix_ptr, MATRIX_Q, row * columns + column, fp8), w / scale, mask)


# table [matrices, QUANTIZE_COLUMNS]; chunk [programs, 2]: a matrix, and which ROWS of it; largest and smallest
# [programs]: the largest magnitude in those rows, and their smallest scale. The programs of a matrix are neighbors, at
# most PROGRAMS of them.
@triton.jit
def quantize_weights_kernel(
    table_ptr, chunk_ptr, largest_ptr, smallest_ptr, FLOORED: tl.constexpr, PROGRAMS: tl.constexpr,
    dtype: tl.constexpr, fp8: tl.constexpr, LIMIT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Quantize ROWS rows of one matrix per program.

    The first launch scales each row by its own maximum. The second, FLOORED, knows the maximum of the matrix and
    quantizes those rows again whose scale is too small for it, if there are any.
    """
    program = tl.program_id(0)
    matrix_ptr = table_ptr + tl.load(chunk_ptr + 2 * program) * QUANTIZE_COLUMNS
    rows = tl.multiple_of(tl.load(matrix_ptr + MATRIX_ROWS), 16)
    columns = tl.multiple_of(tl.load(matrix_ptr + MATRIX_COLUMNS), 16)
    row = tl.load(chunk_ptr + 2 * program + 1) * ROWS + tl.arange(0, ROWS).to(tl.int64)[:, None]
    if FLOORED:
        other = tl.arange(0, PROGRAMS)
        of_matrix = other < tl.cdiv(rows, ROWS)
        largest = tl.max(load(largest_ptr + tl.load(matrix_ptr + MATRIX_PROGRAM) + other, of_matrix), 0)
        floor = tl.where(largest > SMALLEST, WEIGHT_FLOOR * largest, LIMIT) / LIMIT
        # A warp may read scales that another warp has raised already. So they must not decide, but smallest does.
        if tl.load(smallest_ptr + program) < floor:
            scale = load(pointers_from(matrix_ptr, MATRIX_SCALE, row, tl.float32), row < rows)
            store_quantized_weights(matrix_ptr, row, rows, columns, tl.maximum(scale, floor), dtype, fp8, BLOCK)
    else:
        largest = tl.zeros([ROWS, BLOCK], tl.float32)
        for first in range(0, columns, BLOCK):
            column = first + tl.arange(0, BLOCK)[None, :]
            mask = (row < rows) & (column < columns)
            w = load(pointers_from(matrix_ptr, MATRIX, row * columns + column, dtype), mask)
            largest = tl.maximum(largest, tl.abs(w))
        tl.store(largest_ptr + program, tl.max(tl.max(largest, 1), 0))
        scale = row_scale(largest, LIMIT)
        tl.store(smallest_ptr + program, tl.min(tl.min(tl.where(row < rows, scale, float("inf")), 1), 0))
        store_quantized_weights(matrix_ptr, row, rows, columns, scale, dtype, fp8, BLOCK)


class FP8Linear(nn.Linear):
    """Multiply in fp8; FP8Weights allocates and quantizes the layers of a model together.

    parts: the numbers of outputs of the matrices that lie in this one, such as those of q, k and v.
    """

    def __init__(self, in_features, *parts, **options):
        super().__init__(in_features, sum(parts), **options)
        self.parts = parts

    def allocate(self):
        """Allocate w_q [o, i] and w_scale [1, o], and ones [1, i] for matmuls whose second operand has no scales."""
        out_features, in_features = self.weight.shape
        self.w_q, scale = empty_fp8(out_features, in_features, self.weight.device)
        self.w_scale = scale.view(1, out_features)  # [o, 1] -> [1, o]
        self.ones = torch.ones(1, in_features, device=self.weight.device)

    def table_rows(self):
        """Yield a row for each part, all but MATRIX_PROGRAM, by which the kernel fills w_q and w_scale."""
        tensors = (self.weight.detach(), self.w_q, self.w_scale.view(-1, 1))  # [o, ...] each
        for matrix in zip(*(tensor.split(self.parts) for tensor in tensors), strict=True):
            yield [*(part.data_ptr() for part in matrix), *matrix[0].shape]

    def transpose(self):
        """Make the other layout of w_q, which dgrad multiplies by."""
        self.w_q_t = transpose_fp8(self.w_q)  # [i, o]

    def forward(self, x):
        return FP8LinearFunction.apply(x, self.weight, self)

    def matmul(self, x_q, x_scale):
        """Return y [t, o] for x [t, i]."""
        return fp8_matmul(x_q, x_scale, self.w_q, self.w_scale)

    def dgrad(self, g_q, g_scale):
        """Return dx [t, i] for g [t, o]."""
        return fp8_matmul(g_q, g_scale, self.w_q_t, self.ones)

    def wgrad(self, g_q, g_scale, x_q, x_scale):
        """Return dw [o, i] for g [t, o] and x [t, i]."""
        c = (x_scale * g_scale).max()
        row_factors = c / self.w_scale.view(-1, 1)  # [o, 1]
        g_q_t = transpose_fp8(g_q)  # [o, t]
        x_q_t = transpose_fp8(x_q, x_scale, g_scale, c)  # [i, t], x̃
        return fp8_matmul(g_q_t, row_factors, x_q_t, self.ones)


@guarded(twice_differentiable=False)
class FP8LinearFunction(torch.autograd.Function):
    """Multiply in fp8, forward and for dx; dw is a bfloat16 matmul."""

    @staticmethod
    def forward(ctx, x, weight, linear):
        ctx.save_for_backward(x)
        ctx.linear = linear
        x_q, x_scale = quantize_rows(x.flatten(0, -2))  # [B, T, i] -> [t, i]
        return linear.matmul(x_q, x_scale).view(*x.shape[:-1], -1)  # [t, o] -> [B, T, o]

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        dy = dy.flatten(0, -2)  # [t, o]
        g_q, g_scale = quantize_rows(dy, ctx.linear.w_scale)
        dx = ctx.linear.dgrad(g_q, g_scale)
        dw = dy.t() @ x.flatten(0, -2)
        return dx.view(x.shape), dw, None


@guarded(twice_differentiable=False)
class FP8FeedForwardFunction(torch.autograd.Function):
    """Compute down(silu(gate(x)) · up(x)) and its gradients with fp8 matmuls alone."""

    @staticmethod
    def forward(ctx, x, gate_up_weight, down_weight, gate_up, down):
        x_q, x_scale = quantize_rows(x.flatten(0, -2))  # [B, T, C] -> [t, C]
        h = gate_up.matmul(x_q, x_scale)  # [t, 2 · width]
        rows = h.shape[0]
        width = h.shape[1] // 2
        y_q, y_scale = empty_fp8(rows, width, h.device)
        limit = torch.finfo(y_q.dtype).max
        arguments = (h, y_q, y_scale, limit)
        launch_tiles(swiglu_quantize_kernel, rows, width, *arguments, whole_row=True, num_warps=8)
        ctx.gate_up = gate_up
        ctx.down = down
        ctx.shape = x.shape
        ctx.save_for_backward(x_q, x_scale, h, y_q, y_scale)
        return down.matmul(y_q, y_scale).view(x.shape)

    @staticmethod
    def backward(ctx, dout):
        x_q, x_scale, h, y_q, y_scale = ctx.saved_tensors
        gate_up = ctx.gate_up
        down = ctx.down
        g_down_q, g_down_scale = quantize_rows(dout.flatten(0, -2), down.w_scale)  # [B, T, C] -> [t, C]
        dy = down.dgrad(g_down_q, g_down_scale)  # [t, width]
        dw_down = down.wgrad(g_down_q, g_down_scale, y_q, y_scale)
        del g_down_q  # its memory serves the larger gradient of h
        rows, width = y_q.shape
        g_q, g_scale = empty_fp8(rows, 2 * width, h.device)
        limit = torch.finfo(g_q.dtype).max
        arguments = (dy, h, gate_up.w_scale, g_q, g_scale, limit)
        launch_tiles(swiglu_backward_quantize_kernel, rows, width, *arguments, whole_row=True, num_warps=8)
        dx = gate_up.dgrad(g_q, g_scale)
        dw_gate_up = gate_up.wgrad(g_q, g_scale, x_q, x_scale)
        return dx.view(ctx.shape), dw_gate_up, dw_down, None, None


class FP8Weights:
    """Quantize the weights of all FP8Linear layers of a model at the start of every forward pass, in two launches."""

    ROWS = 32
    BLOCK = 256

    def __init__(self, model):
        self.layers = [module for module in model.modules() if isinstance(module, FP8Linear)]
        table = []
        chunks = []  # the (matrix, part) of each program
        most = 1  # programs of a matrix
        for layer in self.layers:
            layer.allocate()
            for row in layer.table_rows():
                programs = cdiv(row[MATRIX_ROWS.value], self.ROWS)
                most = max(most, programs)
                chunks_before = len(chunks)
                chunks += [(len(table), part) for part in range(programs)]
                table.append([*row, chunks_before])
        weight = self.layers[0].weight
        fp8 = self.layers[0].w_q.dtype
        self.table = torch.tensor(table, dtype=torch.int64).to(weight.device)
        self.chunks = torch.tensor(chunks, dtype=torch.int32).to(weight.device)
        self.largest = torch.empty(len(chunks), dtype=torch.float32, device=weight.device)
        self.smallest = torch.empty_like(self.largest)
        self.programs = triton.next_power_of_2(most)
        triton_fp8 = tl.float8e4b8 if fp8 == torch.float8_e4m3fnuz else tl.float8e4nv
        self.constants = (TRITON_DTYPES[weight.dtype], triton_fp8, torch.finfo(fp8).max)  # dtype, fp8 and LIMIT

    def update(self):
        """Quantize all weights, and transpose them."""
        tensors = (self.table, self.chunks, self.largest, self.smallest)
        tile = (self.ROWS, self.BLOCK)
        with torch.cuda.device_of(self.table):
            for floored in (False, True):
                quantize_weights_kernel[(len(self.chunks),)](
                    *tensors, floored, self.programs, *self.constants, *tile, num_warps=8
                )
            for layer in self.layers:
                layer.transpose()


def try_fp8_matmul(device):
    """Raise UserError unless one small fp8 matmul works: products of 1 · 1, sums of 16, times the scales 6 and 0.5."""
    architecture = gpu_architecture(device)
    needed = "leave out --fp8: it needs fp8 matmuls with a scale per row"
    if fp8_dtype(architecture) is None:
        raise UserError(f"{needed}, which {architecture} does not have")
    try:
        ones = torch.ones(16, 16, device=device).to(fp8_dtype(architecture))
        scale = torch.ones(16, 1, device=device)
        result = fp8_matmul(ones, 6 * scale, ones, 0.5 * scale.view(1, 16))
        right = bool((result == 48).all())
    except Exception as error:  # what a library does not have, it refuses with an error of any type
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        where = f"{architecture} with PyTorch {torch.__version__}"
        raise UserError(f"{needed}, which {where} does not have: {reason}") from None
    if not right:
        raise UserError(f"{needed}, which {architecture} with PyTorch {torch.__version__} computes wrong")


def check_fp8(options):
    """Raise UserError unless these options, this device and this PyTorch can compute in fp8."""
    if not options.use_amp or options.amp_dtype != "bfloat16" or options.parallel == "fsdp":
        raise UserError("--fp8 must have --use-amp in bfloat16, and no --parallel fsdp")
    if not options.enable_swiglu_kernel:
        raise UserError("--fp8 must have the swiglu kernel, which quantizes what it computes, got it disabled")
    sizes = {
        "hidden_dim": options.hidden_dim,
        "intermediate_dim": options.intermediate_dim,
        "key width": options.num_kv_heads * options.model.head_dim,
        "batch_size x seq_len": options.batch_size * options.seq_len,
    }
    for name, size in sizes.items():
        if size % 16:
            raise UserError(f"--fp8 needs sizes that are multiples of 16: {name} is {size}")
    with options.one_stream():
        try_fp8_matmul(torch.device(options.device))


# ---------------------------------------------------------------- what the harness asks for

VERSION = 3
GRAPH_BY_DEFAULT = True
DETERMINISTIC_BY_DEFAULT = False
FSDP_GATHERS_AMP_DTYPE = True  # the kernels compute in the dtype of the weights; autocast is not used

KERNELS = ("rmsnorm", "rope", "swiglu", "attention", "loss", "optimizer")  # each has a switch of its own


def make_model(options):
    """Return the model, compiled if asked to; under torchrun block by block, so DDP sends gradients during backward."""
    model = TinyLlama(options.model)
    if options.enable_torch_compile:
        for look_up in (gpu_architecture.__wrapped__, program_count.__wrapped__, dot_precision):
            torch.compiler.assume_constant_result(look_up)  # the tracer cannot look into them
        warnings.filterwarnings("ignore", "Dynamo detected a call to a `functools.lru_cache`")  # these are constants
        torch._dynamo.config.optimize_ddp = not options.parallel  # False: do not split a block's graph at DDP's buckets
        # PyTorch 2.11 would write the embedding's one-hot matrix as integers (its replacement of zeros and scatter).
        torch._inductor.config.optimize_scatter_upon_const_tensor = False
        for module in model.layers if options.parallel else [model]:
            module.compile()
    return model


def make_optimizer(model, options):
    """Return AdamW, the kernel's or PyTorch's.

    The kernel's replaces the model's matrices by copies in the dtype of --use-amp, so the fp8 weights come after it.
    """
    if not options.enable_optimizer_kernel:
        capturable = options.graph and options.on_gpu  # a graph needs the step count on the GPU
        fused = options.parallel == "fsdp" or None  # None lets PyTorch choose
        return torch.optim.AdamW(model.parameters(), lr=options.learning_rate, capturable=capturable, fused=fused)
    matrix_dtype = options.dtype if options.use_amp else torch.float32
    optimizer = FusedAdamW(model.parameters(), options.learning_rate, matrix_dtype=matrix_dtype)
    if options.fp8:
        model.allocate_fp8()
    return optimizer


def get_weight(parameter, state):
    """Return the float32 weight of a parameter: joined from its low bits, its master, or the parameter itself.

    state is optimizer.state[parameter].
    """
    if "low_bits" in state:
        return ((parameter.detach().view(torch.int16).to(torch.int32) << 16) + state["low_bits"]).view(torch.float32)
    return state.get("master", parameter)


def set_weight(parameter, state, weight):
    """Overwrite a parameter, and its low bits or master, in place with a float32 weight."""
    if "master" in state:
        state["master"].copy_(weight)
    if "low_bits" in state:
        weight, low_bits = split_bits(weight.to(parameter.device))  # the host would take seconds
        state["low_bits"].copy_(low_bits)
    parameter.copy_(weight)


def add_version_options(add):
    for kernel in KERNELS:
        switch = {"dest": f"enable_{kernel}_kernel", "default": True}
        meaning = f"Triton for {kernel} (on; --disable-{kernel}-kernel)"
        add(f"--enable-{kernel}-kernel", action="store_true", help=meaning, **switch)
        add(f"--disable-{kernel}-kernel", action="store_false", help=argparse.SUPPRESS, **switch)
    switch = {"dest": "enable_fused_loss", "default": None}
    meaning = f"output head and loss in chunks (on for vocabularies from {FUSED_LOSS_FROM}; --disable-fused-loss)"
    add("--enable-fused-loss", action="store_true", help=meaning, **switch)
    add("--disable-fused-loss", action="store_false", help=argparse.SUPPRESS, **switch)
    meaning = "trace the kernels into one graph, and let torch.compile fuse the operations between them (off)"
    switch = {"dest": "enable_torch_compile", "default": False}
    add("--enable-torch-compile", action="store_true", help=meaning, **switch)
    add("--disable-torch-compile", action="store_false", help=argparse.SUPPRESS, **switch)
    add("--fp8", action="store_true", help="with --use-amp: multiply in fp8 in the transformer blocks")


def choose_fused_loss(options):
    """Return if output head and loss are computed in chunks; raise UserError where that is asked for and cannot be."""
    if options.enable_fused_loss and not options.enable_loss_kernel:
        raise UserError("--enable-fused-loss must have the loss kernel, which computes each chunk, got it disabled")
    if options.enable_fused_loss and options.enable_torch_compile:
        raise UserError("--enable-fused-loss must have no --enable-torch-compile, which cannot trace its matmuls")
    if options.enable_fused_loss is not None:
        return options.enable_fused_loss
    possible = options.enable_loss_kernel and not options.enable_torch_compile
    return possible and options.vocab_size >= FUSED_LOSS_FROM


def complete_version_options(options):
    """Check this version's options, raise UserError; return those to complete, and parts: what it uses, in words."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if options.enable_attention_kernel and options.model.head_dim not in HEAD_DIMS:
        way_out = "or --disable-attention-kernel must be given"
        raise UserError(f"--hidden-dim / --num-heads must be in {HEAD_DIMS}, {way_out}, got {options.model.head_dim}")
    if options.enable_rmsnorm_kernel and options.hidden_dim > 32768:
        raise UserError(f"--hidden-dim must be at most 32768 for the RMSNorm kernel, got {options.hidden_dim}")
    if interpreted:
        np.seterr(over="ignore", invalid="ignore")  # the loss says it in one line when numbers overflow
        triton_release = tuple(map(int, triton.__version__.split(".")[:2]))
        numpy_release = tuple(map(int, np.__version__.split(".")[:2]))
        if triton_release < (3, 7) and numpy_release >= (2, 4):
            needed = f"numpy must be < 2.4 for the interpreter of Triton {triton.__version__}"
            raise UserError(f"{needed}, got {np.__version__}")
    if options.use_amp and not options.enable_optimizer_kernel:
        raise UserError("--use-amp must have the optimizer kernel, which keeps the float32 weights, got it disabled")
    if not options.on_gpu and not interpreted:
        raise UserError("--device must be cuda unless TRITON_INTERPRET=1 runs the kernels on the CPU, got cpu")
    if options.enable_torch_compile and not options.on_gpu:
        raise UserError("--enable-torch-compile needs a GPU: the compiler cannot trace Triton's interpreter")
    if options.fp8:
        check_fp8(options)
    if interpreted and options.enable_attention_kernel and options.use_amp and options.amp_dtype == "bfloat16":
        way_out = "--disable-attention-kernel"
        if not options.fp8:
            way_out = f"--amp-dtype float16 or {way_out}"
        raise UserError(f"--use-amp is bfloat16, in which Triton's interpreter has no dot: add {way_out}")
    kernels = [kernel for kernel in KERNELS if getattr(options, f"enable_{kernel}_kernel")]
    completed = {"enable_fused_loss": choose_fused_loss(options)}
    if options.parallel == "fsdp" and options.enable_optimizer_kernel:
        # After the check of --use-amp: FSDP2 keeps the float32 weights itself, and PyTorch's AdamW updates them.
        completed["enable_optimizer_kernel"] = False
        kernels.remove("optimizer")
    if options.fp8:
        kernels.append("fp8")
    parts = f"Triton kernels for {', '.join(kernels) or 'nothing'}"
    if options.enable_torch_compile:
        parts += ", torch.compile"
    if interpreted:
        results = "its fp8 rounding is not a GPU's" if options.fp8 else "results are right"
        parts += f", in Triton's interpreter: {results}, times mean nothing"
    return {**completed, "parts": parts}


# ============ The training harness below is the same in all four versions. You can stop reading here. ============
# It brings its own imports. From above it uses ModelConfig, compute_loss and the block "what the harness asks for";
# make_optimizer must return an AdamW that stores its state as tensors in optimizer.state[p]. The code above uses two
# names from here: annotate(name) marks a region for profilers, UserError is printed as one line.

import argparse
import contextlib
import ctypes
import dataclasses
import datetime
import difflib
import functools
import hashlib
import io
import json
import math
import os
import pathlib
import pickle
import platform
import re
import resource
import signal
import stat
import subprocess
import sys
import tempfile
import time
import warnings

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

# Options that define the model: a checkpoint's must be equal.
WORKSHOP = "1.1"  # the version in pyproject.toml, for whoever reads a metrics file later
MODEL = ("vocab_size", "hidden_dim", "num_layers", "num_heads", "num_kv_heads", "intermediate_dim")
MODEL += ("norm_eps", "rope_theta")
SIZES = ("hidden_dim", "num_layers", "num_heads", "intermediate_dim", "seq_len", "batch_size")
PRESETS = {  # in the order of SIZES
    # hidden, layers, heads, feed-forward, sequence, batch
    "default": (512, 8, 8, 2048, 256, 8),
    "check": (64, 2, 4, 256, 32, 2),  # --validate-setup
    "tiny": (256, 4, 8, 512, 128, 8),
    "small": (512, 8, 8, 2048, 128, 8),
    "medium": (1024, 12, 16, 4096, 512, 16),
}
RANK_VARIABLES = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}  # torchrun's
# Columns of the PyTorch profiler's table; cuda_* is the old name of device_*.
COLUMNS = ("cpu_time_total", "cuda_time_total", "device_time_total", "cpu_memory_usage", "device_memory_usage")
SORT_KEYS = [*COLUMNS, *(f"self_{key}" for key in COLUMNS), "count"]
# What profilers set in the process that they start: a variable, or the beginning of its name. rocprof-sys sets
# rocprofv3's library too; rocprof-compute sets it or, from ROCm 7.12 on, only its options. nsys sets its session's id
# when it begins to record, which can be later than our start.
PROFILERS = {
    "rocprof-sys": ("ROCPROFSYS_", "OMNITRACE_"),
    "rocprofv3": ("ROCP_TOOL_LIBRARIES", "HSA_TOOLS_LIB", "ROCPROF_KERNEL_TRACE", "ROCPROF_COUNTER_COLLECTION"),
    "nsys": ("NSYS_",),
    "ncu": ("NV_NSIGHT_INJECTION_", "NV_COMPUTE_PROFILER_"),
    "an NVTX tool": ("NVTX_INJECTION64_PATH", "CUDA_INJECTION64_PATH"),
}
NO_REGION = contextlib.nullcontext()
PROFILER_DEFAULTS = {"profile_dir": "pytorch_profiles", "profile_steps": 3, "sort_by": "cuda_time_total"}
# Options that other scripts of these names have, and the tools beside this script that do their work.
TOOLS = {
    "enable-deepspeed-flops": "run_deepspeed_flops.py",
    "enable-rocm-profiling": "get_hotspots.sh, get_trace.sh or another wrapper",
    "enable-all-profiling": "run_all_profilers.sh",
    "compare-with-v1": "compare_versions.py",
}


class UserError(Exception):
    """Stop because of what the user can change: main prints one line and returns exit status 2."""


def printable(text):
    """Return a text, or a file's name, with its control characters escaped: a terminal would obey them."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(text))


@functools.cache
def stream_of(device):
    """Return a stream of a GPU, for each device always the same one."""
    return torch.cuda.Stream(device)


class Options(argparse.Namespace):
    """Hold the options of a run: those that build_parser lists, completed and checked, and what parse_options adds.

    launched: started by torchrun, which gives rank, world_size, local_rank and local_world_size
    profile: an option of the profiler is given
    eager_reason: why no graph is captured, or None
    parts: what the version uses, in words
    """

    @property
    def model(self):
        """Return what the model is told of the options."""
        return ModelConfig(**{field.name: getattr(self, field.name) for field in dataclasses.fields(ModelConfig)})

    @property
    def dtype(self):
        return getattr(torch, self.amp_dtype)

    @property
    def precision(self):
        if self.use_amp:
            return self.amp_dtype
        return "tf32" if self.tf32 else "float32"

    @property
    def on_gpu(self):
        return self.device.startswith("cuda")

    @property
    def device_name(self):
        return torch.cuda.get_device_name(self.device) if self.on_gpu else platform.machine()

    def one_stream(self):
        """Return a context whose work on a GPU goes to the one stream that this process uses."""
        # Not to the default stream: a graph can't be captured there. And from the first kernel on: once a process has
        # used two streams, a graph's kernels mostly start later (PyTorch's issue 161104), 5 % of a small step.
        return torch.cuda.stream(stream_of(self.device)) if self.on_gpu else contextlib.nullcontext()


def between(kind, low, high):
    """Return a converter for argparse that accepts numbers from low to high."""

    def number(text):
        with contextlib.suppress(ValueError):
            if text.isascii() and "_" not in text and low <= kind(text) <= high:  # no Python's 1_0, no other digits
                return kind(text)
        name = "whole number" if kind is int else "number"
        raise argparse.ArgumentTypeError(f"must be a {name} from {low} to {high}, got {text}")

    return number


def hint(word, options):
    """Return what an unknown option --word may mean, in brackets."""
    if word in TOOLS:
        return f" (run {TOOLS[word]} instead)"
    ending = [option for option in options if option.endswith(f"-{word}")]
    for option in ending or difflib.get_close_matches(f"--{word}", options, n=1):
        return f" (did you mean {option}?)"
    return f" (--help lists what version {VERSION} has)"


def build_parser():
    example = f"example: python tiny_llama_v{VERSION}.py --preset small --metrics-file v{VERSION}.json"
    parser = argparse.ArgumentParser(description="Train a tiny LLaMA.", epilog=example, allow_abbrev=False)

    def error(message):
        """Exit with status 2; print the message on local rank 0 only."""
        another_rank_prints = os.environ.keys() >= RANK_VARIABLES and os.environ["LOCAL_RANK"] != "0"
        if unknown := re.match("unrecognized arguments:.*? [-\u2013\u2014]+([^ =]+)", message):
            message += hint(unknown[1], parser._option_string_actions)
        parser.exit(2, None if another_rank_prints else f"{parser.prog}: error: {printable(message)}\n")

    parser.error = error
    parser.set_defaults(version=VERSION, norm_eps=1e-6, rope_theta=10000.0)  # not options, but recorded with them
    add_model_options(parser.add_argument_group("model and batch").add_argument)
    add_training_options(parser.add_argument_group("training").add_argument)
    add_profiling_options(parser.add_argument_group("PyTorch profiler (extra steps after the measured)").add_argument)
    add_version_options(parser.add_argument_group(f"version {VERSION}").add_argument)
    return parser


def add_model_options(add):
    positive = between(int, 1, 2**24)
    add("--preset", choices=["tiny", "small", "medium"], help="sizes of model and batch; other options override them")
    add("--batch-size", type=positive, metavar="B", help="sequences per step and rank (8)")
    add("--seq-len", type=positive, metavar="T", help="tokens per sequence (256)")
    add("--hidden-dim", type=positive, metavar="C", help="width of the model (512)")
    add("--num-layers", type=between(int, 1, 10_000), metavar="L", help="transformer blocks (8)")
    add("--num-heads", type=positive, metavar="H", help="query heads (8)")
    add("--num-kv-heads", type=positive, metavar="K", help="key and value heads (half the query heads)")
    ffn = "feed-forward width (the preset's; 4 x --hidden-dim if that is given and another)"
    add("--intermediate-dim", type=positive, metavar="F", help=ffn)
    add("--vocab-size", type=positive, default=1000, metavar="V", help="distinct tokens (%(default)s)")


def add_training_options(add):
    flag = argparse.BooleanOptionalAction
    count = between(int, 0, 2**63 - 1)
    add("--num-steps", type=between(int, 1, 10**9 - 1), default=50, metavar="N", help="measured steps (%(default)s)")
    before = "steps before the measured ones (%(default)s; a graph or --resume may need more)"
    add("--warmup-steps", type=count, default=3, metavar="N", help=before)
    rate = between(float, 1e-30, 1e30)
    add("--learning-rate", "--lr", type=rate, default=3e-4, metavar="R", help="for AdamW (%(default)s)")
    add("--seed", type=count, default=0, metavar="N", help="for weights and batches (%(default)s)")
    add("--data", metavar="PATH", help="text file, or folder of text files, read as bytes (synthetic data)")
    add("--use-amp", action="store_true", help="automatic mixed precision")
    add("--amp-dtype", choices=["bfloat16", "float16"], help="used by --use-amp (bfloat16)")
    add("--tf32", action="store_true", help="allow TF32 in float32 matmuls")
    graph = f"replay the step from a CUDA/HIP graph ({GRAPH_BY_DEFAULT}; not in PyTorch's and ROCm's profilers)"
    add("--graph", action=flag, help=graph)
    add("--deterministic", action=flag, default=DETERMINISTIC_BY_DEFAULT, help="bitwise reproducible (%(default)s)")
    add("--device", help="cpu, cuda or cuda:N; AMD GPUs are cuda too (a GPU if there is one)")
    add("--metrics-file", metavar="FILE", help="write configuration, environment, steps and summary as JSON")
    add("--validate-setup", action="store_true", help="run three small steps; every parameter must get a gradient")
    add("--checkpoint-dir", metavar="DIR", default="checkpoints", help="of --save-every and --resume (%(default)s)")
    add("--save-every", type=count, default=0, metavar="N", help="write a checkpoint every N steps (0: never)")
    add("--resume", action="store_true", help="continue from the newest checkpoint")
    add("--parallel", choices=["ddp", "fsdp"], help="under torchrun: replicate the model, or shard it (ddp)")


def add_profiling_options(add):
    add("--enable-pytorch-profiler", action="store_true", help="write a trace for ui.perfetto.dev")
    defaults = PROFILER_DEFAULTS
    add("--profile-dir", metavar="DIR", help=f"folder of the traces ({defaults['profile_dir']})")
    steps = f"steps to profile ({defaults['profile_steps']})"
    add("--profile-steps", type=between(int, 1, 10_000), metavar="N", help=steps)
    add("--profile-memory", "--enable-memory-profiling", action="store_true", help="also print memory by operator")
    add("--profile-operators", action="store_true", help="print a table of the operators")
    add("--sort-by", choices=SORT_KEYS, metavar="KEY", help=f"order of that table ({defaults['sort_by']})")
    add("--profile-attention-only", action="store_true", help="profile one attention layer alone")


def parse_options(argv=None):
    """Return the options from the command line, completed and checked; a wrong one exits with status 2.

    Nothing is added to them elsewhere.
    """
    parser = build_parser()
    options = parser.parse_args(argv, Options())
    fields = vars(options)  # not a copy: updating it sets the options
    try:
        for name, value in fields.items():
            if value == "":
                raise UserError(f"--{name.replace('_', '-')} must not be empty")
        fields.update(read_ranks())
        fields.update(complete_options(options))
        check_options(options)
        fields.update(complete_version_options(options))
        if options.rank == 0:
            check_paths(options)
    except UserError as error:
        parser.error(str(error))
    return options


def read_ranks():
    """Return this process's rank and the number of ranks, from torchrun's environment if that started it."""
    ranks = {"rank": 0, "world_size": 1, "local_rank": 0, "local_world_size": 1}
    if not RANK_VARIABLES & os.environ.keys():
        return {"launched": False, **ranks}
    for name in sorted(RANK_VARIABLES):
        text = os.environ.get(name)
        if not text or (name != "MASTER_ADDR" and not re.fullmatch("[0-9]{1,9}", text)):
            raise UserError(f"{name} in the environment is {text or 'missing'}: use torchrun, or unset the others")
        if name.lower() in ranks:
            ranks[name.lower()] = int(text)
    return {"launched": True, **ranks}


def complete_options(options):
    """Return values for what was not given, from the preset and from other options."""
    preset = options.preset or ("check" if options.validate_setup else "default")
    sizes = dict(zip(SIZES, PRESETS[preset], strict=True))
    if options.hidden_dim not in (None, sizes["hidden_dim"]):
        sizes["intermediate_dim"] = 4 * options.hidden_dim  # the preset's width fits only its own --hidden-dim
    completed = {name: getattr(options, name) or size for name, size in sizes.items()}
    completed["num_kv_heads"] = options.num_kv_heads or max(1, completed["num_heads"] // 2)
    completed["amp_dtype"] = options.amp_dtype or "bfloat16"
    if options.amp_dtype and not options.use_amp:
        raise UserError(f"--amp-dtype needs --use-amp: add it, or leave out --amp-dtype {options.amp_dtype}")
    if options.validate_setup:
        completed["num_steps"] = 3
        completed["warmup_steps"] = 1
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    completed["device"] = f"cuda:{options.local_rank}" if device == "cuda" else device
    completed["parallel"] = options.parallel or ("ddp" if options.launched else None)
    profiling = ("enable_pytorch_profiler", "profile_memory", "profile_operators", "profile_attention_only")
    completed["profile"] = any(getattr(options, name) for name in profiling)
    if options.sort_by and not options.profile_operators:
        raise UserError("--sort-by has no effect without --profile-operators: add it")
    for name, default in PROFILER_DEFAULTS.items():
        if getattr(options, name) and not completed["profile"]:
            raise UserError(f"--{name.replace('_', '-')} has no effect without --enable-pytorch-profiler: add it")
        completed[name] = getattr(options, name) or default
    completed["eager_reason"] = None if options.graph else "no --graph"
    if options.graph is None:
        completed["eager_reason"] = default_eager_reason(completed["profile"], completed["device"])
        completed["graph"] = completed["eager_reason"] is None
    return completed


def default_eager_reason(profile, device):
    """Return why a step is not captured unless --graph is given; None to try a capture, which says no on a CPU."""
    if not GRAPH_BY_DEFAULT:
        return "no --graph"
    if profile and device != "cpu":
        return "PyTorch's profiler sees a graph as one launch: pass --graph to capture one anyway"
    if outside_profiler() in ("rocprof-sys", "rocprofv3") and device != "cpu":
        return "ROCm's profilers may miss the kernels of a replayed graph: pass --graph to capture one anyway"
    return None


def check_options(options):
    """Raise UserError for options that do not fit together or not this machine."""
    multiple = 2 * options.num_heads  # RoPE rotates pairs, so a head has an even size
    gpus = torch.cuda.device_count()
    fsdp = options.parallel == "fsdp"
    if options.hidden_dim % multiple:
        raise UserError(f"--hidden-dim must be a multiple of 2 x --num-heads ({multiple}), got {options.hidden_dim}")
    if options.num_heads % options.num_kv_heads:
        raise UserError(f"--num-kv-heads must divide --num-heads ({options.num_heads}), got {options.num_kv_heads}")
    if not re.fullmatch("cpu|cuda(:[0-9]{1,9})?", options.device):
        raise UserError(f"--device must be cpu, cuda or cuda:N, got {options.device}")
    if options.on_gpu and int(options.device.removeprefix("cuda:")) >= gpus:
        way_out = "fewer processes" if options.launched and gpus else "--device cpu"
        raise UserError(f"--device {options.device} does not exist (PyTorch sees {gpus} GPUs): use {way_out}")
    if options.on_gpu and options.local_world_size > 1 and options.device != f"cuda:{options.local_rank}":
        raise UserError(f"--device {options.device} would give all processes one GPU: leave out its number")
    if options.parallel and not options.launched:
        raise UserError("--parallel needs torchrun: start with torchrun --nproc-per-node N")
    if fsdp and not options.on_gpu and torch.__version__ < (2, 9):  # a TorchVersion compares to tuples
        raise UserError(f"--parallel fsdp on a CPU needs PyTorch 2.9, got {torch.__version__}: use --parallel ddp")
    if fsdp and (options.profile_attention_only or (options.use_amp and options.amp_dtype == "float16")):
        raise UserError("--parallel fsdp supports neither --profile-attention-only nor float16: use --parallel ddp")


def check_paths(options):
    """Raise UserError unless the run can write its files; create the folders of checkpoints and traces."""
    folders = {}
    if options.metrics_file:
        path = pathlib.Path(os.path.realpath(options.metrics_file))  # the file is written through a symbolic link
        if os.path.exists(options.metrics_file) and not os.path.isfile(options.metrics_file):
            message = f"--metrics-file must be a regular file, got {options.metrics_file}"
            raise UserError(f"{message}: name a new file and print it after the run")
        if path.exists() and not (path.stat().st_mode & 0o222 and os.access(path, os.W_OK)):
            raise UserError(f"--metrics-file {options.metrics_file} is write-protected: name another file")
        if options.data and pathlib.Path(os.path.realpath(options.data)) in (path, path.parent):
            raise UserError(f"--metrics-file {options.metrics_file} would become text of --data: name another folder")
        folders["--metrics-file"] = path.parent
    if options.save_every:
        folders["--checkpoint-dir"] = pathlib.Path(options.checkpoint_dir)
    if options.profile:
        if re.search(r'[\x00-\x1f"\\\ud800-\udfff]', options.profile_dir):
            wanted = (
                "must be UTF-8 without control characters, quotes and backslashes: PyTorch's traces do not escape them"
            )
            raise UserError(f"--profile-dir {wanted}, got {options.profile_dir}")
        folders["--profile-dir"] = pathlib.Path(options.profile_dir)
    for option, folder in folders.items():
        try:
            if option != "--metrics-file":
                folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()
            existing = []
            if option == "--checkpoint-dir" and not options.resume:
                existing = list_checkpoints(options)
        except OSError as error:
            raise UserError(f"{option}: cannot write to {folder}: {error.strerror}") from None
        if existing:
            raise UserError(f"--checkpoint-dir {folder} holds checkpoints: add --resume or name another one")


# ---------------------------------------------------------------- data and initial weights


class SyntheticStream:
    """Generate a Markov chain of known entropy, best_loss: four successors per token, odds 1/2, 1/4, 1/8 and 1/8."""

    def __init__(self, options):
        self.T = options.seq_len
        self.V = options.vocab_size
        branches = min(4, self.V)
        # 1/2, 1/4, ..., and the last twice, so that they add up to 1
        self.probabilities = np.array([0.5 ** min(i + 1, branches - 1) for i in range(branches)])
        self.best_loss = float(-(self.probabilities * np.log(self.probabilities)).sum())
        self.order = np.random.default_rng(options.seed).permutation(self.V)  # token i is followed by order[i + choice]
        self.description = f"synthetic, entropy {self.best_loss:.4f} nats per token"

    def draw(self, rng, rows):
        """Return windows of tokens, int64 [rows, T + 1]."""
        choices = rng.choice(len(self.probabilities), size=(rows, self.T), p=self.probabilities)
        windows = np.empty((rows, self.T + 1), dtype=np.int64)
        windows[:, 0] = rng.integers(0, self.V, size=rows)
        for t in range(self.T):
            windows[:, t + 1] = self.order[(windows[:, t] + choices[:, t]) % self.V]
        return windows


class TextStream:
    """Draw random windows of text, one token per byte."""

    best_loss = None

    def __init__(self, options):
        self.T = options.seq_len
        path = pathlib.Path(options.data)
        try:
            files = [path]
            if path.is_dir():
                files = sorted(p for p in path.iterdir() if p.is_file())
            elif not stat.S_ISREG(path.stat().st_mode):
                raise UserError(f"--data {path} is no regular file: a device or pipe may never end")
            texts = [np.fromfile(file, dtype=np.uint8) for file in files]
        except OSError as error:
            raise UserError(f"--data {path} cannot be read: {error.strerror}") from None
        except (MemoryError, OverflowError):
            raise UserError(f"--data {path} does not fit into memory") from None
        texts = [text for text in texts if text[:8000].all()]  # git, too, looks for a NUL byte there
        if not texts:
            raise UserError(f"--data {path} holds no text: a file with a NUL byte counts as binary")
        self.bytes = texts[0]
        if len(texts) > 1:
            newline = np.frombuffer(b"\n", dtype=np.uint8)
            self.bytes = np.concatenate([part for text in texts for part in (text, newline)][:-1])
        size = len(self.bytes)
        if size <= self.T:
            raise UserError(f"--seq-len must be less than the {size} bytes of text in --data {path}, got {self.T}")
        needed = int(self.bytes.max()) + 1  # Python's max takes 20 s per GiB
        if needed > options.vocab_size:
            raise UserError(f"--vocab-size must be at least {needed} for --data {path}, got {options.vocab_size}")
        self.description = f"{size:,} bytes of text from {printable(path)}"

    def draw(self, rng, rows):
        """Return windows of tokens, int64 [rows, T + 1]."""
        starts = rng.integers(0, len(self.bytes) - self.T, size=(rows, 1))
        return self.bytes[starts + np.arange(self.T + 1)].astype(np.int64)


def load_data(options):
    return TextStream(options) if options.data else SyntheticStream(options)


def batch(data, step, options):
    """Draw the batch of all ranks from (seed, step); return this rank's slice of it, tokens and labels [B, T]."""
    rng = np.random.default_rng((options.seed, step))
    windows = torch.from_numpy(data.draw(rng, options.world_size * options.batch_size))  # [world_size · B, T + 1]
    first = options.rank * options.batch_size
    windows = windows[first : first + options.batch_size]  # [B, T + 1]
    return windows[:, :-1], windows[:, 1:]


FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def canonical_views(tensors, config):
    """Return views of the tensors under version 1's parameter names; split each fused weight into its parts."""
    kv_dim = config.num_kv_heads * config.head_dim
    rows = {
        "qkv_proj": [config.hidden_dim, kv_dim, kv_dim],
        "gate_up_proj": [config.intermediate_dim, config.intermediate_dim],
    }
    views = {}
    for name, tensor in tensors.items():
        module = name.split(".")[-2]
        if module not in FUSED:
            views[name] = tensor
            continue
        for part, view in zip(FUSED[module], tensor.split(rows[module]), strict=True):
            views[name.replace(module, part)] = view
    return views


@torch.no_grad()
def initialize(model, options):
    """Draw matrices from N(0, 0.02) on the CPU in canonical order, and set norms to one."""
    generator = torch.Generator().manual_seed(options.seed)
    for view in canonical_views(dict(model.named_parameters()), options.model).values():
        if view.ndim == 1:
            view.fill_(1)
        else:
            view.copy_(torch.empty(view.shape).normal_(0, 0.02, generator=generator))


# ---------------------------------------------------------------- several processes, training step


@contextlib.contextmanager
def process_group(options):
    """Join torchrun's process group and silence the standard output of all ranks but the first."""
    device = torch.device(options.device) if options.on_gpu else None
    # The others wait while rank 0 writes a checkpoint or one rank compiles. torchrun sees at once that a rank died; a
    # host that vanishes is noticed after this time.
    timeout = datetime.timedelta(minutes=10)
    dist.init_process_group("nccl" if device else "gloo", timeout=timeout, device_id=device)
    with open(os.devnull, "w") as devnull, contextlib.redirect_stdout(devnull if options.rank else sys.stdout):
        yield
    dist.destroy_process_group()


def replicate(model, options):
    """Return the model wrapped in DDP, or the model itself without --parallel ddp."""
    if options.parallel != "ddp":
        return model
    # 25 MiB is the default, but unless it is passed explicitly DDP makes the first bucket 1 MiB, which is slower.
    replica = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True, bucket_cap_mb=25)
    replica.broadcast_buffers = False  # the RoPE tables never change; PyTorch 2.13 warns of the argument

    def average(_, bucket):
        future = dist.all_reduce(bucket.buffer(), op=dist.ReduceOp.AVG, async_op=True).get_future()
        return future.then(lambda done: done.value()[0])

    if options.on_gpu:  # average inside the all-reduce instead of dividing first; gloo has no ReduceOp.AVG
        replica.register_comm_hook(None, average)
    return replica


def shard(model, options):
    """Shard weights, gradients and optimizer state over all ranks with FSDP2, one block at a time."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    gathered = options.dtype if options.use_amp and FSDP_GATHERS_AMP_DTYPE else None
    policy = MixedPrecisionPolicy(param_dtype=gathered, cast_forward_inputs=False)
    mesh = dist.init_device_mesh("cuda" if options.on_gpu else "cpu", (options.world_size,))
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)


def full_tensor(tensor):
    """Gather a tensor that FSDP2 may have sharded. Collective."""
    return tensor.full_tensor() if hasattr(tensor, "device_mesh") else tensor


def shard_like(tensor, whole):
    """Shard a full CPU tensor like the given one; without FSDP2 return it unchanged."""
    if not hasattr(tensor, "device_mesh"):
        return whole
    from torch.distributed.tensor import distribute_tensor

    # src_data_rank=None: every rank has the whole
    return distribute_tensor(whole.to(tensor.device), tensor.device_mesh, tensor.placements, src_data_rank=None)


def gather(values, options):
    """Return the values of every rank, float64 [world_size, len(values)]. Collective: every rank must call it."""
    mine = torch.tensor(values, dtype=torch.float64, device=options.device)
    ranks = [mine.clone() for _ in range(options.world_size)]
    if options.parallel:
        dist.all_gather(ranks, mine)
    return torch.stack(ranks)


PHASES = ("forward_ms", "backward_ms", "optimizer_ms")
DDP_WARM_UP = 11  # eager steps before a capture, as PyTorch's notes on CUDA graphs ask: DDP times the first ten
EAGER_STEPS_OF_PROOF = 4  # Trainer.capture runs two steps twice before it captures


def rounds_to_tf32(device):
    """Return True if PyTorch's matmuls keep 10 fraction bits of float32 inputs, as TF32 does: 1 + 2**-12 needs 12."""
    x = torch.full((256, 256), 1 + 2**-12, device=device)
    return bool((x @ torch.eye(256, device=device) == 1).all())


class Trainer:
    """Hold model and optimizer, and run the training step eagerly or from a captured graph."""

    def __init__(self, options):
        self.options = options
        # FSDP2 moves only the shards to the GPU.
        with torch.device("cpu" if options.parallel == "fsdp" else options.device):
            self.model = make_model(options)
        initialize(self.model, options)
        initial = {name: p.detach().to("cpu", copy=True) for name, p in self.model.named_parameters()}
        if options.parallel == "fsdp":
            shard(self.model, options)
        self.optimizer = make_optimizer(self.model, options)
        self.replica = replicate(self.model, options)
        # A graph reads the addresses of tokens and labels, so they are allocated once.
        self.tokens = torch.zeros(options.batch_size, options.seq_len, dtype=torch.int64, device=options.device)
        self.labels = torch.zeros_like(self.tokens)
        # PyTorch's initial scale, 65536, overflows 16-bit gradients: the first steps would be skipped.
        self.scaler = torch.amp.GradScaler(self.tokens.device.type, 2.0**10, enabled=options.precision == "float16")
        self.initial = {"step": 0, "tensors": initial, "scaler": self.scaler.state_dict()}  # like a checkpoint's
        self.synchronize = torch.cuda.synchronize if options.on_gpu else lambda: None
        self.rounds_to_tf32 = rounds_to_tf32(options.device) if options.precision == "tf32" else None
        self.graph = None
        self.graph_reason = options.eager_reason  # why the step runs eagerly
        self.saved = []  # checkpoints that this run wrote, or continued from
        self.signal = 0  # SIGTERM or SIGHUP, once it has asked this rank to stop
        self.stopped = 0  # the same once it has reached all ranks

    def step(self):
        """Run forward, backward and optimizer on the batch in self.tokens and self.labels."""
        self.marks = []
        self.mark()
        self.optimizer.zero_grad(set_to_none=True)
        with annotate("forward"):
            loss = compute_loss(self.replica, self.tokens, self.labels, self.options)
        self.mark()
        with annotate("backward"):
            self.scaler.scale(loss).backward()
        self.mark()
        with annotate("optimizer"):
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.mark()
        self.loss = loss.detach()

    def launch(self):
        """Replay the graph if there is one; else run the step eagerly."""
        if self.graph:
            self.graph.replay()
        else:
            self.step()

    def mark(self):
        """Record a timestamp between two phases: an event on a GPU, the host's clock on a CPU."""
        if not self.options.on_gpu:
            self.marks.append(time.perf_counter())
            return
        capturing = torch.cuda.is_current_stream_capturing()
        in_graph = {"external": True} if capturing else {}
        try:
            event = torch.cuda.Event(enable_timing=True, **in_graph)
            event.record()
        except (TypeError, RuntimeError):
            if not capturing:
                raise
            return  # this PyTorch or ROCm cannot time inside a graph; it says so before it touches the stream
        self.marks.append(event)

    def run(self, tokens, labels):
        """Train on a batch and return its record: mean loss, step time of the slowest rank, phases of this rank."""
        self.tokens.copy_(tokens)
        self.labels.copy_(labels)
        self.synchronize()
        if self.options.parallel:
            dist.barrier()  # waiting for a late rank is not part of the step
        start = time.perf_counter()
        self.launch()
        self.synchronize()
        step_ms = 1000 * (time.perf_counter() - start)
        phases = dict.fromkeys(PHASES)  # None: not measured
        if self.marks:
            for name, first, last in zip(PHASES, self.marks[:-1], self.marks[1:], strict=True):
                phases[name] = first.elapsed_time(last) if self.options.on_gpu else 1000 * (last - first)
        ranks = gather([self.loss.item(), step_ms, self.signal], self.options)  # [world_size, 3]
        losses, times, signals = ranks.T.tolist()
        self.stopped = int(max(signals))
        record = {"loss": sum(losses) / len(losses), **phases, "step_ms": max(times)}
        if self.options.parallel:
            record["rank_step_ms"] = times
        return record

    def warm_up(self, tokens, labels, saved):
        """Compile, allocate and capture, then restore the saved state; return the seconds it took."""
        began = time.perf_counter()
        self.tokens.copy_(tokens)
        self.labels.copy_(labels)
        steps = self.options.warmup_steps
        if self.options.resume:
            steps = max(steps, 1)  # a checkpoint is copied into existing optimizer state
        if self.options.graph and self.options.on_gpu and self.options.parallel:
            steps = max(steps, DDP_WARM_UP - EAGER_STEPS_OF_PROOF)  # capture runs the others
        for i in range(steps):
            if i == 0:
                print_phase(f"step 1 of {steps}: compiles and tunes kernels, if any, which can take minutes")
            elif i == 1:
                print_phase(f"steps 2 to {steps}: little or nothing is left to compile")
            self.step()
            if i == 0 and self.options.on_gpu:  # the first step allocates what compiling and tuning need
                torch.cuda.reset_peak_memory_stats(self.options.device)
        while self.options.resume and not self.optimizer.state:  # float16's scaler skipped the steps so far
            self.step()
        if self.options.graph:
            self.capture(saved)
        self.restore(saved)
        self.synchronize()
        return time.perf_counter() - began

    @torch.no_grad()
    def restore(self, saved):
        """Overwrite weights and optimizer state in place: a graph holds their addresses. Zero state not in saved."""
        for name, p in self.model.named_parameters():
            state = self.optimizer.state[p]
            set_weight(p, state, shard_like(p, saved["tensors"][name]))
            for key in state.keys() & set(ADAMW):  # PyTorch's AdamW has none before its first step
                whole = saved["tensors"].get(f"{name}.{key}")
                if whole is None:
                    state[key].zero_()
                else:
                    state[key].copy_(shard_like(state[key], whole))
        self.scaler.load_state_dict(saved["scaler"] or self.initial["scaler"])  # empty: the saved run had no scaler

    def capture(self, saved):
        """Capture a step into a graph and prove the graph; if either fails, stay eager and set graph_reason.

        Proof: two replays from the saved state give what two eager steps from it give, up to allowed_error. The eager
        steps run twice, because they differ from each other, too, where sums depend on the order of threads.
        """
        if not self.options.on_gpu:
            self.graph_reason = "a CPU has no graphs"
        elif self.scaler.is_enabled() and not hasattr(self.optimizer, "_step_supports_amp_scaling"):
            self.graph_reason = "with this optimizer the gradient scaler synchronises in every step"
        if self.graph_reason:
            return
        print_phase("eager steps that the graph must repeat")
        expected = {name: tensor.to("cpu", copy=True) for name, tensor in self.results_of_two_steps(saved)}
        eager_error, _ = largest_error(self.results_of_two_steps(saved), expected)
        print_phase("capture a step in a graph")
        self.capture_step()
        if self.graph:  # the next two steps replay it
            print_phase("prove the graph: replay it and compare")
            error, name = largest_error(self.results_of_two_steps(saved), expected)
            allowed = allowed_error(eager_error, self.options.precision)
            if gather([error > allowed], self.options).any():  # on any rank
                self.graph = None
                told = f"{name} differs by {error:.2g}, allowed {allowed:.2g}"
                self.graph_reason = f"a replay is not an eager step: {told}"
        if not self.graph:
            # The capture may have ended in the middle of a step: remove DDP's wrapper with its hooks, then wrap again.
            self.replica = None
            self.replica = replicate(self.model, self.options)

    def capture_step(self):
        """Set self.graph to one captured step, or graph_reason to why there is none."""
        graph = torch.cuda.CUDAGraph()
        mode = "thread_local" if self.options.parallel else "global"  # NCCL's watchdog thread queries events meanwhile
        try:
            with torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode=mode):
                self.step()
            self.graph = graph
        except RuntimeError as error:
            self.graph_reason = str(error).splitlines()[0]
            if self.options.parallel == "fsdp":  # it stopped in the middle of a step
                raise UserError(f"--parallel fsdp needs --no-graph here: {self.graph_reason}") from None

    def results_of_two_steps(self, saved):
        """Run two steps from the saved state; yield names and tensors of losses, weight changes and moments.

        Each is valid until the next is asked for: the device may have no room for a second copy of all.
        One step would not do: AdamW's first update is the learning rate times the gradient's sign, whatever its size.
        """
        for number, loss in enumerate(self.run_two_steps(saved), start=1):
            yield f"the loss of step {number}", loss
        for name, p in self.model.named_parameters():
            state = self.optimizer.state[p]
            weight = full_tensor(get_weight(p, state).detach())
            yield name, weight - saved["tensors"][name].to(weight.device)
            for key in ("exp_avg", "exp_avg_sq"):
                yield f"{name}.{key}", full_tensor(state[key])

    def run_two_steps(self, saved):
        """Run two steps from the saved state, on other batches than the captured one; return their losses."""
        tokens = self.tokens.clone()
        labels = self.labels.clone()
        while True:
            self.restore(saved)
            scale = self.scaler.get_scale()
            losses = []
            for shift in (1, 2):
                self.tokens.copy_((tokens + shift) % self.options.vocab_size)
                self.labels.copy_((labels + shift) % self.options.vocab_size)
                self.launch()
                losses.append(self.loss.to(torch.float32, copy=True))  # a replay overwrites self.loss
            new_scale = self.scaler.get_scale()
            if new_scale >= scale or new_scale <= 1:
                break
            # float16 overflowed and a step was skipped, which proves nothing: start again with the lower scale.
            saved = {**saved, "scaler": self.scaler.state_dict()}
        self.tokens.copy_(tokens)
        self.labels.copy_(labels)
        return losses


def print_phase(text):
    """Say which part of the warm-up begins: a run that hangs shows where."""
    print(f"  warm-up    {text}", flush=True)


def allowed_error(eager_error, precision):
    """Return the largest relative error that a replay may have; eager_error is that of repeated eager steps."""
    floor = 0.02 if precision == "float32" else 0.3  # a library may choose another algorithm for the capture
    cap = 0.5  # a kernel that is missing gives an error near 1
    return min(max(4 * eager_error, floor), cap)


def largest_error(found, expected):
    """Return the largest relative error of the found tensors, and the name of that tensor.

    found: pairs of name and tensor; expected: {name: tensor on the host}. Compared on the device of what was found.
    """
    errors = {}
    for name, tensor in found:
        wanted = expected[name].to(tensor.device)
        difference = (tensor - wanted).norm()
        if difference == 0:
            errors[name] = 0.0  # 0 / 0 where a tensor is zero
        else:
            errors[name] = (difference / wanted.norm()).nan_to_num(math.inf).item()  # NaN is the largest error
        if tensor.ndim == 0:
            errors[name] *= 100  # a loss is a mean over all tokens, and as much more exact than a gradient
    name = max(errors, key=errors.get)
    return errors[name], name


# ---------------------------------------------------------------- checkpoints

# A checkpoint is one file of whole float32 tensors: any number of processes, DDP or FSDP2, can continue from it.
ADAMW = ("step", "exp_avg", "exp_avg_sq")
# Options that may differ from those of the checkpoint's run, but are then printed.
COMPARED = ("seed", "learning_rate", "data", "batch_size", "world_size", "seq_len", "use_amp", "amp_dtype", "tf32")


def save_checkpoint(trainer, step):
    """Write step_N.pt and its SHA-256 as its last 32 bytes; keep the two newest of this run. Collective."""
    options = trainer.options
    tensors = {}
    for name, p in trainer.model.named_parameters():
        state = trainer.optimizer.state[p]
        named = {name: get_weight(p, state).detach()}
        for key in ADAMW:
            named[f"{name}.{key}"] = state[key]
        for key, tensor in named.items():
            whole = full_tensor(tensor)
            if not bool(whole.isfinite().all()):
                raise FloatingPointError(f"{key} is not finite after step {step}: lower --learning-rate")
            if options.rank == 0:
                tensors[key] = whole.cpu()
    if options.rank:
        return
    path = pathlib.Path(options.checkpoint_dir) / f"step_{step:09d}.pt"
    buffer = io.BytesIO()
    scaler = trainer.scaler.state_dict()
    torch.save({"step": step, "options": vars(options), "tensors": tensors, "scaler": scaler}, buffer)
    write_file(path, buffer.getbuffer(), hashlib.sha256(buffer.getbuffer()).digest(), replace=False)
    newest = max(list_checkpoints(options), default=path)
    if newest != path:  # of another run, which may have removed the one of this step
        path.unlink()
        raise already_there(newest)
    trainer.saved.append(path)
    for old in trainer.saved[:-2]:
        old.unlink(missing_ok=True)


def already_there(path):
    return OSError(None, "it exists already: does another run use this folder?", str(path))


def write_file(path, *parts, replace=True):
    """Write a file under a name of its own and move it into place: whole or not at all.

    replace=False: raise OSError where the file exists, so that of two runs in one folder only one writes it.
    """
    partial = path.with_name(f"{path.name}.{os.urandom(8).hex()}.partial")  # in containers host and pid can be equal
    try:
        with open(partial, "xb") as file:
            file.writelines(parts)
            file.flush()
            os.fsync(file.fileno())
        if replace:
            os.replace(partial, path)
        else:
            os.link(partial, path)
    except FileExistsError:
        raise already_there(path) from None
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        with contextlib.suppress(OSError):  # os.replace has moved it, or the folder is gone, which is said already
            partial.unlink()


def list_checkpoints(options):
    """Return the files step_N.pt of --checkpoint-dir, the newest first."""
    folder = pathlib.Path(options.checkpoint_dir)
    names = [name for name in os.listdir(folder) if re.fullmatch(r"step_[0-9]{9}\.pt", name)]
    return [folder / name for name in sorted(names, reverse=True)]


def without_newest(options):
    """Say how to continue without the newest checkpoint."""
    newest, *older = list_checkpoints(options)
    if older:
        return f"move {newest} away to continue from {older[0].name}"
    return f"move {newest} away and leave out --resume to start again"


def find_checkpoint(options):
    """Return the contents of the newest checkpoint; raise UserError if this run cannot continue from it. Collective."""
    path = pathlib.Path(options.checkpoint_dir)
    try:
        paths = list_checkpoints(options)
        if not paths:
            raise UserError(f"--resume: {options.checkpoint_dir} holds no checkpoint (step_N.pt)")
        path = paths[0]
        data = path.read_bytes()
    except OSError as error:
        raise UserError(f"--resume: {path} cannot be read: {error.strerror}") from None
    try:
        if hashlib.sha256(data[:-32]).digest() != data[-32:]:
            raise pickle.UnpicklingError
        # weights_only: somebody else's file must not run code here.
        saved = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        message = f"{path} is damaged, or is not a checkpoint of this workshop: {without_newest(options)}"
        raise UserError(f"--resume: {message}") from None
    changes = {}
    for name in ("version", *MODEL, *COMPARED):
        old = saved["options"][name]
        new = getattr(options, name)
        if old != new:
            changes[name] = f"{name} {old} -> {new}"
    told = printable(", ".join(changes.values()))
    if changes.keys() - set(COMPARED):  # the version, or an option of MODEL
        raise UserError(f"--resume: {path} belongs to another model: {told}")
    if len(gather([saved["step"]], options).unique()) > 1:
        raise UserError(f"--resume: the ranks find different checkpoints in {options.checkpoint_dir}: share the folder")
    if saved["step"] >= options.num_steps:
        raise UserError(f"--resume: step {saved['step']} is reached already: raise --num-steps")
    note = f", with other options: {told}" if changes else ""
    print(f"resuming from {printable(path)}{note}")
    return saved


def check_contents(saved, trainer):
    """Raise UserError unless a checkpoint holds finite float32 tensors of this model's names and shapes."""
    shapes = {}
    for name, p in trainer.initial["tensors"].items():
        shapes[name] = p.shape
        shapes[f"{name}.step"] = torch.Size([])
        shapes[f"{name}.exp_avg"] = p.shape
        shapes[f"{name}.exp_avg_sq"] = p.shape
    tensors = saved["tensors"]
    differing = sorted(shapes.keys() ^ tensors.keys())
    if differing:
        has = "lacks" if differing[0] in shapes else "has another tensor,"
        raise UserError(f"--resume: the checkpoint {has} {differing[0]}: use the --enable-* options of its run")
    for name, tensor in tensors.items():
        right = tensor.dtype == torch.float32 or name.endswith(".step")  # version 3 counts steps in float64
        if not right or tensor.shape != shapes[name] or not bool(tensor.isfinite().all()):
            message = f"{name} in the checkpoint is no finite float32 tensor {list(shapes[name])}"
            raise UserError(f"--resume: {message}: {without_newest(trainer.options)}")


# ---------------------------------------------------------------- measurement and profiling


def peak_memory_mb(options):
    """Return the peak memory in MiB: PyTorch's allocations on a GPU, the whole process on a CPU."""
    if options.on_gpu:
        return torch.cuda.max_memory_allocated(options.device) / 2**20
    status = pathlib.Path("/proc/self/status")
    if status.exists():  # on Linux getrusage starts from the peak of the parent process
        return int(re.search(r"VmHWM:\s*(\d+)", status.read_text())[1]) / 2**10
    units_per_mb = 2**20 if sys.platform == "darwin" else 2**10  # macOS counts bytes, others KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / units_per_mb


def flops_per_step(model, options):
    """Return the FLOPs of a step: 6 per matmul weight and token, and the needed half of the T x T attention matmuls."""
    matrices = sum(p.numel() for p in model.parameters() if p.ndim == 2)  # the embedding once: as the output head
    per_token = 6 * (matrices + options.num_layers * options.seq_len * options.hidden_dim)
    return options.world_size * options.batch_size * options.seq_len * per_token


def parameters_trained(trainer):
    """Count the parameters whose tensor got a finite gradient that is not all zero. Collective under FSDP."""
    trained = 0
    for p in trainer.model.parameters():
        if p.grad is not None:
            grad = full_tensor(p.grad)
            if trainer.scaler.is_enabled() and not bool(grad.isfinite().all()):
                grad = trainer.optimizer.state[p].get("exp_avg", grad)  # that step was skipped: look at those before
            if bool(grad.isfinite().all()) and bool(grad.count_nonzero()):
                trained += grad.numel()
    return trained


def environment(options):
    """Return device, software versions, date, commit and hash of the script."""
    script = pathlib.Path(__file__).resolve()
    commit = None
    with contextlib.suppress(OSError):  # there may be no git
        command = ["git", "-C", str(script.parent), "rev-parse", "HEAD"]
        commit = subprocess.run(command, capture_output=True, text=True).stdout.strip() or None
    return {
        "workshop": WORKSHOP,
        "device": options.device_name,
        "device_type": options.device.split(":")[0],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "triton": getattr(sys.modules.get("triton"), "__version__", None),
        "commit": commit,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "script_sha256": hashlib.sha256(script.read_bytes()).hexdigest(),
    }


def quartiles(values):
    p25, median, p75 = np.percentile(values, [25, 50, 75]).tolist()
    return {"p25": p25, "median": median, "p75": p75}


def summarize(trainer, records, warmup_s, data):
    """Return the results of a run from the records of its steps, over all ranks. Collective."""
    options = trainer.options
    step_ms = quartiles([record["step_ms"] for record in records])
    phases = {}
    for name in PHASES:
        times = [record[name] for record in records]
        phases[name] = None if None in times else quartiles(times)["median"]
    samples_per_second = 1000 * options.batch_size * options.world_size / step_ms["median"]
    flops = flops_per_step(trainer.model, options)
    peak_memory = gather([peak_memory_mb(options)], options).max().item()
    # transposed: per rank, its times; empty in one process
    times_by_rank = zip(*(record.get("rank_step_ms", []) for record in records), strict=True)
    return {
        "parameters": sum(p.numel() for p in trainer.model.parameters()),
        "parameters_trained": parameters_trained(trainer),
        "step_ms": step_ms,
        **phases,
        "samples_per_second": samples_per_second,
        "tokens_per_second": samples_per_second * options.seq_len,
        "peak_memory_mb": peak_memory,  # in MiB
        "first_loss": records[0]["loss"],
        "final_loss": records[-1]["loss"],
        "best_loss_known": data.best_loss,
        "flops_per_step": flops,
        "tflops": flops / step_ms["median"] / 1e9,  # FLOP/ms -> TFLOP/s
        "precision": options.precision,
        "rounds_to_tf32": trainer.rounds_to_tf32,
        "graph": {"captured": trainer.graph is not None, "reason": trainer.graph_reason},
        "warmup_s": warmup_s,
        "parallel": options.parallel,
        "world_size": options.world_size,
        "rank_step_ms": [quartiles(times)["median"] for times in times_by_rank],
    }


def write_metrics(options, records, summary):
    """Write configuration, environment, step records and summary as JSON. Steps count from 0 there, from 1 in print."""
    content = {
        "version": VERSION,
        "config": {name: getattr(options, name) for name in MODEL},
        "options": vars(options),
        "environment": environment(options),
        "steps": records,
        "summary": summary,
    }
    content = json.loads(json.dumps(content), parse_constant=lambda name: None)  # NaN, which is not JSON, to null
    # realpath: write through a symbolic link
    write_file(pathlib.Path(os.path.realpath(options.metrics_file)), json.dumps(content, indent=1).encode() + b"\n")


def print_configuration(trainer, data):
    options = trainer.options
    parameters = sum(p.numel() for p in trainer.model.parameters())
    print(f"Tiny LLaMA version {VERSION} on {options.device_name} ({options.device})")
    sizes = f"width {options.hidden_dim}, {options.num_layers} layers, {options.num_heads} query heads"
    sizes += f", {options.num_kv_heads} key/value heads, feed-forward {options.intermediate_dim}"
    print(f"  model      {parameters:,} parameters: {sizes}")
    print(f"  batch      {options.batch_size} sequences of {options.seq_len} tokens, vocabulary {options.vocab_size}")
    if options.parallel:
        print(f"  ranks      {options.world_size}, {options.parallel} over {dist.get_backend()}")
    print(f"  data       {data.description}")
    precision = options.precision
    if trainer.rounds_to_tf32 is False:
        precision += ", but PyTorch's matmuls keep float32's bits here"
        if torch.version.hip:
            precision += ": on an MI300, PyTorch before 2.10 needs HIPBLASLT_ALLOW_TF32=1"
    print(f"  precision  {precision}{', deterministic' if options.deterministic else ''}")
    print(f"  uses       {options.parts}", flush=True)


def print_summary(summary, records):
    step_ms = summary["step_ms"]
    ranks = summary["rank_step_ms"]
    phases = [f"{name[:-3]} {summary[name]:.3f} ms" for name in PHASES if summary[name] is not None]
    phases = ", ".join(phases) or "not measured inside a graph"
    best = f" (entropy of the data {summary['best_loss_known']:.4f})" if summary["best_loss_known"] else ""
    graph = "replayed from a graph" if summary["graph"]["captured"] else f"eager ({summary['graph']['reason']})"
    trained = summary["parameters_trained"]
    parameters = summary["parameters"]
    print(f"summary of {len(records)} steps, after {summary['warmup_s']:.1f} s of warm-up, {graph}")
    print(f"  loss       {summary['first_loss']:.4f} -> {summary['final_loss']:.4f}{best}")
    print(f"  step       {step_ms['median']:.3f} ms median, quartiles {step_ms['p25']:.3f} to {step_ms['p75']:.3f}")
    if ranks:
        print(f"  ranks      {len(ranks)}, medians from {min(ranks):.3f} ms to {max(ranks):.3f} ms")
    print(f"  phases     {phases}")
    print(f"  speed      {summary['samples_per_second']:,.1f} samples/s, {summary['tokens_per_second']:,.0f} tokens/s")
    print(f"  compute    {summary['tflops']:,.3f} TFLOP/s")
    print(f"  memory     {summary['peak_memory_mb']:,.1f} MiB peak")
    print(f"  trained    {trained:,} of {parameters:,} parameters ({100 * trained / parameters:.1f} %)", flush=True)


@functools.cache
def outside_profiler():
    """Return the name of the profiler that started this process, or None. One that attaches later is not seen."""
    for name, variables in PROFILERS.items():
        if any(variable.startswith(variables) for variable in os.environ):
            return name
    return None


def annotate(name):
    """Name a region in PyTorch's profiler, and in NVTX/ROCTX timelines where a profiler started this process."""
    if torch.compiler.is_compiling():  # a compiled model has no regions: they would break its graphs
        return NO_REGION
    by_pytorch = torch.autograd.profiler._is_profiler_enabled  # set by profile, emit_nvtx and emit_itt
    by_another = outside_profiler()
    if not (by_pytorch or by_another):
        return NO_REGION  # a region costs 12 us
    regions = contextlib.ExitStack()
    if by_pytorch:
        regions.enter_context(torch.profiler.record_function(name))
    if by_another and torch.cuda.is_available():
        regions.enter_context(torch.cuda.nvtx.range(name))
    return regions


@contextlib.contextmanager
def measured_steps():
    """Name the measured steps, a range that profilers can select; rocprofv3 --selected-regions records them alone."""
    selected = os.environ.get("ROCPROF_SELECTED_REGIONS", "0") != "0"
    if selected:
        preloaded = re.search(r"[^:]*librocprofiler-sdk-roctx\.so[^:]*", os.environ.get("LD_PRELOAD", ""))
        try:
            roctx = ctypes.CDLL(preloaded[0] if preloaded else "librocprofiler-sdk-roctx.so")
        except OSError as error:
            raise UserError(f"--selected-regions cannot begin to record: {error}") from None
        roctx.roctxProfilerResume(ctypes.c_uint64(0))  # 0: all threads
    try:
        with annotate("measured steps"):
            yield
    finally:
        if selected:
            roctx.roctxProfilerPause(ctypes.c_uint64(0))


def attention_step(trainer):
    """Run forward and backward of the first attention layer alone, on random input [B, T, C]."""
    options = trainer.options
    model = trainer.model
    attention = model.layers[0].attention
    shape = (options.batch_size, options.seq_len, options.hidden_dim)
    x = torch.randn(shape, device=options.device, dtype=attention.o_proj.weight.dtype, requires_grad=True)
    with torch.autocast(x.device.type, options.dtype, enabled=options.use_amp):
        y = attention(x, model.cos, model.sin)
    y.backward(torch.ones_like(y))


def export_trace(profiler, path):
    """Write the profiler's trace. If it is cut, which PyTorch does not report, remove it and raise OSError."""
    profiler.export_chrome_trace(str(path))
    unfinished = pathlib.Path(f"{path}.tmp")  # PyTorch's name for it until the end
    try:
        with open(path if path.exists() else unfinished, "ab+") as file:
            file.seek(max(0, file.tell() - 2**15))
            ending = file.read()
            if b'"traceName"' in ending and ending.endswith(b"}"):  # the last that PyTorch writes
                return
            file.write(bytes(2**16))  # this fails, too, and its error names the cause: a full disk, a quota
            file.flush()
            os.fsync(file.fileno())
        raise OSError(None, "the profiler wrote a part of it only")
    except OSError as error:
        for cut in (path, unfinished):
            cut.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from None


def profile(trainer, data):
    """Profile some more steps: write a trace, and print tables of the operators."""
    options = trainer.options
    part = "attention" if options.profile_attention_only else "whole"
    activities = [torch.profiler.ProfilerActivity.CPU]
    if options.on_gpu:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    settings = {"record_shapes": True, "profile_memory": True}
    settings["acc_events"] = True  # without it PyTorch 2.11 warns about events of other cycles
    with torch.profiler.profile(activities=activities, **settings) as profiler:
        for step in range(options.num_steps, options.num_steps + options.profile_steps):
            if part == "attention":
                attention_step(trainer)
            else:
                trainer.run(*batch(data, step, options))
        trainer.synchronize()
        metadata = {name: getattr(options, name) for name in (*MODEL, "seq_len", "batch_size", "precision")}
        metadata |= {"version": VERSION, "part": part, "peak_memory_mb": peak_memory_mb(options)}
        metadata["rounds_to_tf32"] = trainer.rounds_to_tf32
        profiler.add_metadata_json("tiny_llama", json.dumps(metadata))
    name = f"trace_v{VERSION}"
    if part == "attention":
        name += "_attention"
    if options.parallel:
        name += f"_rank{options.rank}"
    trace = pathlib.Path(options.profile_dir, f"{name}_{time.strftime('%Y%m%d_%H%M%S')}_{os.getpid()}.pt.trace.json")
    export_trace(profiler, trace)
    print(f"profiled {options.profile_steps} more steps: open {printable(trace)} in https://ui.perfetto.dev")
    sort_keys = []
    if options.profile_operators:
        sort_keys.append(options.sort_by)
    if options.profile_memory:
        sort_keys.append("self_device_memory_usage")
    # the columns of this device, under PyTorch's present name
    sort_keys = [re.sub("cuda_|device_", "device_" if options.on_gpu else "cpu_", key) for key in sort_keys]
    for key in dict.fromkeys(sort_keys):  # each once
        print(f"operators by {key}")
        print(profiler.key_averages().table(sort_by=key, row_limit=20, max_name_column_width=50))


def set_up_backend(options):
    """Set precision and determinism of the libraries before their first use."""
    torch.manual_seed(options.seed)
    if options.on_gpu:
        torch.cuda.set_device(options.device)
    torch.set_float32_matmul_precision("high" if options.tf32 else "highest")
    warnings.filterwarnings("ignore", r"TensorFloat32 tensor cores|\s*Online softmax is disabled")  # hints of compile
    if options.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # costs a pass over memory per tensor


def train(trainer, data, first_step, records):
    """Train to --num-steps; append each step's record. Raise FloatingPointError if loss or weights are not finite."""
    options = trainer.options
    print_every = max(1, options.num_steps // 10)
    for step in range(first_step, options.num_steps):
        record = {"step": step, **trainer.run(*batch(data, step, options))}
        records.append(record)
        if not math.isfinite(record["loss"]):
            raise FloatingPointError(f"the loss of step {step + 1} is {record['loss']}: lower --learning-rate")
        if step in (first_step, options.num_steps - 1) or (step + 1) % print_every == 0:
            rate = 1000 * options.batch_size * options.world_size / record["step_ms"]
            speed = f"{rate:9.1f} samples/s  {record['step_ms']:9.3f} ms  peak {peak_memory_mb(options):8.1f} MiB"
            print(f"step {step + 1:5d}/{options.num_steps}  loss {record['loss']:8.4f}  {speed}", flush=True)
        if options.save_every and (trainer.stopped or (step + 1) % options.save_every == 0):
            save_checkpoint(trainer, step + 1)
        if trainer.stopped:
            raise SystemExit(128 + trainer.stopped)
    if not all(bool(full_tensor(p).isfinite().all()) for p in trainer.model.parameters()):
        raise FloatingPointError(f"the weights are not finite after step {options.num_steps}: lower --learning-rate")


def stop_handlers():
    """Return {signal: its handler} for SIGTERM and SIGHUP; leave out what is ignored, as SIGHUP is under nohup."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    return {number: handler for number, handler in handlers.items() if handler != signal.SIG_IGN}


def run(options):
    """Warm up, train, report and profile; return the exit status. Write the metrics of a failed run, too."""
    data = load_data(options)
    saved = find_checkpoint(options) if options.resume else None
    trainer = Trainer(options)
    steps = []
    summary = None
    warmup_s = None
    handlers = stop_handlers()
    try:
        print_configuration(trainer, data)
        if saved:
            check_contents(saved, trainer)
            trainer.saved = list_checkpoints(options)[:1]  # removed like this run's own
        start = saved or trainer.initial
        warmup_s = trainer.warm_up(*batch(data, 0, options), start)
        for number in handlers:  # from here on a signal is noted, and train stops at the end of a step
            signal.signal(number, lambda number, _: setattr(trainer, "signal", number))
        if trainer.graph_reason not in (None, "no --graph"):
            print(f"  graph      not captured, running eagerly: {trainer.graph_reason}")
        with measured_steps():
            train(trainer, data, start["step"], steps)
        summary = summarize(trainer, steps, warmup_s, data)
    except FloatingPointError as error:
        if saved:
            raise FloatingPointError(f"{error}, or {without_newest(options)}") from None
        raise
    finally:
        for number in handlers:  # let nothing interrupt the writing: torchrun sends SIGTERM, and SIGKILL 30 s later
            signal.signal(number, signal.SIG_IGN)
        # A run that failed or was stopped. summarize is collective: of several ranks, only if all have stopped.
        if steps and not summary and (trainer.stopped or not options.parallel):
            with contextlib.suppress(RuntimeError):  # the GPU may have failed
                summary = summarize(trainer, steps, warmup_s, data)
        if steps and options.metrics_file and options.rank == 0:
            write_metrics(options, steps, summary)
        if trainer.stopped and options.parallel:
            dist.barrier()  # torchrun ends all ranks when one ends: rank 0 has written
        for number, handler in handlers.items():
            signal.signal(number, handler)
    print_summary(summary, steps)
    if options.profile:
        profile(trainer, data)
    if options.validate_setup and summary["parameters_trained"] != summary["parameters"]:
        print("set-up check failed: not every parameter is trained")
        return 1
    if options.validate_setup:
        print("set-up check passed")
    sys.stdout.flush()  # a full disk is an error
    return 0


def user_message(error):
    """Return exit status and one line for an error; no line (None) for a bug of this program."""
    first_line = str(error).strip().partition("\n")[0]
    interrupt = error
    while interrupt and not isinstance(interrupt, (KeyboardInterrupt, SystemExit)):
        interrupt = interrupt.__cause__  # up to Python 3.11 Ctrl-C in an import can become the cause of a RuntimeError
    if interrupt:
        return getattr(interrupt, "code", 130), "interrupted"
    if isinstance(error, UserError):
        return 2, f"error: {error}"
    if isinstance(error, FloatingPointError):
        return 1, f"stopped: {error}"
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in str(error):
        return 1, "out of memory: lower --batch-size, --seq-len or the model's sizes"
    if isinstance(error, OSError):
        return 1, f"cannot access {error.filename or 'standard output'}: {error.strerror}"
    if isinstance(error, dist.DistError) or "gloo" in str(error):
        return 1, f"communication failed, another rank may have ended: {first_line}"
    if re.search("invalid device function|no kernel image", first_line):
        return 1, f"{first_line}: this PyTorch was not built for this GPU: install one that is"
    if type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
        return 1, f"torch.compile failed, run with --disable-torch-compile: {first_line}"
    return 1, None


def main(argv=None):
    """Run the script and return its exit status."""
    options = parse_options(argv)
    try:
        set_up_backend(options)
        group = process_group(options) if options.parallel else contextlib.nullcontext()
        with group, options.one_stream():
            return run(options)
    except BaseException as error:
        status, message = user_message(error)
        if message is None:
            raise
        rank = f", rank {options.rank} of {options.world_size}" if options.parallel else ""
        with contextlib.suppress(OSError):  # on a full disk the status still tells
            print(f"tiny_llama_v{VERSION}.py{rank}: {printable(message)}", file=sys.stderr)
        return status


if __name__ == "__main__":
    for number in stop_handlers():
        signal.signal(number, lambda number, _: sys.exit(128 + number))  # it raises SystemExit: run writes the metrics
    if isinstance(sys.stdout, io.TextIOWrapper):  # a caller may have redirected it
        sys.stdout.reconfigure(errors="backslashreplace")  # names of files need not be UTF-8
    status = main()
    try:
        sys.stdout.flush()
    except OSError:  # a closed pipe or a full disk, reported already; Python must not try again
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    if "RANK" in os.environ:
        os._exit(status)  # threads of the communication libraries can abort the interpreter's clean-up
    sys.exit(status)
