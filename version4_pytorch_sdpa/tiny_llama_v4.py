#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Tiny LLaMA, version 4: PyTorch's own fused parts, compiled, and the whole step in one graph launch.

    python tiny_llama_v4.py --preset medium --use-amp
    python tiny_llama_v4.py --preset small --no-graph           # the same step, launched kernel by kernel

This version teaches what libraries give: scaled_dot_product_attention or flex attention with a backend that is chosen
and printed, fused RMSNorm and AdamW, torch.compile for what lies between them, and a CUDA/HIP graph that replays
forward, backward and optimizer with a single launch.

Shapes: B batch, T tokens, C hidden_dim, H query heads, K key/value heads, D = C / H, V vocab_size; width is
intermediate_dim in the feed-forward part.
"""

import argparse
import dataclasses
import functools
import warnings

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim.adamw import adamw
from torch.utils.checkpoint import checkpoint

# In the order in which they are tried: the first that can run the model's attention, forward and backward, is used.
SDPA_BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


def at_least_float32(x):
    """Convert 16-bit x to float32; leave float32 and float64 as they are."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


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


# ---------------------------------------------------------------- attention backends


def can_run(backend, options):
    """Return True if a backend runs this model's attention, forward and backward: try it on one short sequence."""
    T = min(options.seq_len, 256 + options.seq_len % 256)  # backends ask for multiples of powers of two
    dtype = options.dtype if options.use_amp else torch.float32
    tensor = {"dtype": dtype, "device": options.device, "requires_grad": True}
    head_dim = options.model.head_dim
    with options.one_stream():
        q = torch.zeros(1, T, options.num_heads, head_dim, **tensor)
        k = torch.zeros(1, T, options.num_kv_heads, head_dim, **tensor)
        v = torch.zeros(1, T, options.num_kv_heads, head_dim, **tensor)
        try:
            with warnings.catch_warnings(), sdpa_kernel(SDPA_BACKENDS[backend]):
                warnings.simplefilter("ignore")  # PyTorch warns about each reason why a backend cannot run
                causal_attention(q, k, v).sum().backward()
        except RuntimeError:
            return False
    return True


def choose_backend(options, compiled):
    """Return flex where it is fastest, else the first SDPA backend that can run this model's attention."""
    flex_is_fastest = options.precision == "tf32" or (options.use_amp and options.seq_len < 4096)  # on an H200
    if options.on_gpu and compiled and flex_is_fastest:
        return "flex"  # Inductor fuses the layout changes around it, and it can use TF32
    for backend in SDPA_BACKENDS:
        if can_run(backend, options):
            return backend
    return "math"


def use_flex_attention(model, T, device):
    """Have the model compute sequences of T tokens with flex attention: give it the score tiles up to the diagonal."""
    from torch.nn.attention.flex_attention import create_block_mask  # takes a second to import

    blocks = create_block_mask(lambda b, h, query, key: query >= key, None, None, T, T, device=device)
    for layer in model.layers:
        layer.attention.flex_len = T
        layer.attention.blocks = blocks


def flex_tiles(dtype):
    """Return kernel options with tiles of 64 x 64, which fit every GPU if head_dim <= 64."""
    # PyTorch's defaults for float32 are 16 x 16 in the backward and take twice the time; those for 16 bits, 128 x 128,
    # take 10 % longer at 512 tokens, where much of a tile on the diagonal is masked.
    if dtype == torch.float32:
        return {
            "bwd_BLOCK_M1": 64,
            "bwd_BLOCK_N1": 64,
            "bwd_BLOCK_M2": 64,
            "bwd_BLOCK_N2": 64,
            "bwd_num_warps": 4,
            "bwd_num_stages": 1,
        }
    return {
        "fwd_BLOCK_M": 64,
        "fwd_BLOCK_N": 64,
        "fwd_num_warps": 4,
        "fwd_num_stages": 3,
        "bwd_BLOCK_M1": 64,
        "bwd_BLOCK_N1": 64,
        "bwd_BLOCK_M2": 64,
        "bwd_BLOCK_N2": 64,
        "bwd_num_warps": 4,
        "bwd_num_stages": 2,
    }


def compiled_flex_attention(q, k, v, blocks):
    """Return the same as causal_attention, from a kernel that torch.compile generates."""
    from torch.nn.attention.flex_attention import flex_attention

    q = q.transpose(1, 2)  # [B, H, T, D]
    k = k.transpose(1, 2)  # [B, K, T, D]
    v = v.transpose(1, 2)  # [B, K, T, D]
    tiles = flex_tiles(q.dtype) if q.shape[-1] <= 64 else None  # None: PyTorch's own
    context = flex_attention(q, k, v, block_mask=blocks, enable_gqa=True, kernel_options=tiles)  # [B, H, T, D]
    return context.transpose(1, 2)  # [B, T, H, D]


# ---------------------------------------------------------------- model


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

    @property
    def head_dim(self):
        return self.hidden_dim // self.num_heads


class Attention(nn.Module):
    """Compute causal self-attention of x [B, T, C] with RoPE tables [T, D/2]; H query heads share K key/value heads."""

    def __init__(self, config):
        super().__init__()
        C = config.hidden_dim
        kv_dim = config.num_kv_heads * config.head_dim
        self.head_dim = config.head_dim
        self.sizes = [C, kv_dim, kv_dim]  # widths of q, k and v
        self.qkv_proj = nn.Linear(C, C + 2 * kv_dim, bias=False)
        self.o_proj = nn.Linear(C, C, bias=False)
        self.flex_len = None  # use_flex_attention sets it

    def forward(self, x, cos, sin):
        with annotate("qkv projection"):
            q, k, v = self.qkv_proj(x).split(self.sizes, dim=-1)
            q = q.unflatten(-1, (-1, self.head_dim))  # [B, T, H, D]
            k = k.unflatten(-1, (-1, self.head_dim))  # [B, T, K, D]
            v = v.unflatten(-1, (-1, self.head_dim))  # [B, T, K, D]
        with annotate("rope"):
            q = apply_rope(q, cos, sin)
            k = apply_rope(k, cos, sin)
        with annotate("attention"):
            if q.shape[1] == self.flex_len:  # the mask is for sequences of this length
                context = compiled_flex_attention(q, k, v, self.blocks)  # [B, T, H, D]
            else:
                context = causal_attention(q, k, v)  # [B, T, H, D]
        with annotate("output projection"):
            return self.o_proj(context.flatten(-2))  # [B, T, C]


class FeedForward(nn.Module):
    """Compute down(silu(gate(x)) · up(x)) of x [B, T, C]."""

    def __init__(self, config):
        super().__init__()
        self.gate_up_proj = nn.Linear(config.hidden_dim, 2 * config.intermediate_dim, bias=False)
        self.down_proj = nn.Linear(config.intermediate_dim, config.hidden_dim, bias=False)

    def forward(self, x):
        with annotate("feed-forward"):
            # Two GEMMs on halves of one weight: a single GEMM would make the backward concatenate the two gradients.
            # Recomputing silu(gate) · up in the backward, not saving it, saves a third of this layer's activations.
            gate_weight, up_weight = self.gate_up_proj.weight.chunk(2)  # [width, C] each
            gate = F.linear(x, gate_weight)  # [B, T, width]
            up = F.linear(x, up_weight)  # [B, T, width]
            return checkpoint(self.activate_and_project, gate, up, use_reentrant=False, preserve_rng_state=False)

    def activate_and_project(self, gate, up):
        return self.down_proj(swiglu(gate, up))


class RMSNorm(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.eps = config.norm_eps
        self.weight = nn.Parameter(torch.ones(config.hidden_dim))

    def forward(self, x):
        with annotate("rms norm"):
            # The weight stays float32: 16 bits would round it by up to 0.4 %.
            return F.rms_norm(at_least_float32(x), self.weight.shape, self.weight, self.eps).to(x.dtype)


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.attention_norm = RMSNorm(config)
        self.attention = Attention(config)
        self.feed_forward_norm = RMSNorm(config)
        self.feed_forward = FeedForward(config)

    def forward(self, x, cos, sin):
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.feed_forward(self.feed_forward_norm(x))


class TinyLlama(nn.Module):
    """Map tokens [B, T] to logits [B, T, V]; the output head shares the token embedding."""

    def __init__(self, config):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_dim)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config)
        cos, sin = rope_tables(config.seq_len, config.head_dim, config.rope_theta)  # [T, D/2] each
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, tokens):
        T = tokens.shape[1]  # at most seq_len
        x = self.embed_tokens(tokens)  # [B, T, C]
        for layer in self.layers:
            x = layer(x, self.cos[:T], self.sin[:T])
        with annotate("output head"):
            return F.linear(self.norm(x), self.embed_tokens.weight)  # [B, T, V]


# ---------------------------------------------------------------- loss, optimizer


@functools.cache
def compiled(function):
    """Return the function compiled by torch.compile, the same in every step."""
    return torch.compile(function)


def mean_loss(logits, labels):
    """Return the mean cross-entropy of logits [B, T, V] against labels [B, T], computed in float32."""
    rows = at_least_float32(logits).flatten(0, 1)  # [B·T, V]
    return F.cross_entropy(rows, labels.flatten())


def compute_loss(model, tokens, labels, options):
    """Return the mean cross-entropy of predicting labels [B, T] from tokens [B, T]."""
    with sdpa_kernel(SDPA_BACKENDS.get(options.attention_backend, SDPBackend.MATH)):
        logits = model(tokens)  # [B, T, V]
    loss_function = compiled(mean_loss) if options.enable_torch_compile else mean_loss
    with annotate("loss"):
        return loss_function(logits, labels)


def adamw_update(parameters, grads, masters, exp_avgs, exp_avg_sqs, step, **settings):
    """Update float32 masters with PyTorch's AdamW and copy them to the parameters, in one kernel if compiled."""
    grads = [grad.float() for grad in grads]
    steps = [step.clone() for _ in masters]  # AdamW adds 1 to each
    constants = {"beta1": 0.9, "beta2": 0.999, "weight_decay": 0.01, "eps": 1e-8, "amsgrad": False, "maximize": False}
    adamw(masters, grads, exp_avgs, exp_avg_sqs, [], steps, **constants, **settings)
    torch._foreach_copy_(parameters, masters)
    step.copy_(steps[0])


class MasterAdamW(torch.optim.Optimizer):
    """Update float32 master weights of every parameter; the matrices themselves become 16-bit."""

    _step_supports_amp_scaling = True  # GradScaler passes grad_scale and found_inf instead of synchronising

    def __init__(self, params, lr, matrix_dtype, compile):
        super().__init__(params, {})
        self.parameters = self.param_groups[0]["params"]
        self.lr = lr
        self.compile = compile
        self.step_count = torch.zeros((), device=self.parameters[0].device)
        for p in self.parameters:
            if not p.is_contiguous():
                raise ValueError(f"MasterAdamW: parameters must be contiguous, got {list(p.shape)} with {p.stride()}")
            state = self.state[p]
            state["step"] = self.step_count
            state["master"] = p.detach().clone()
            state["exp_avg"] = torch.zeros_like(p)
            state["exp_avg_sq"] = torch.zeros_like(p)
            if p.ndim == 2:
                p.data = p.data.to(matrix_dtype)

    def load_state_dict(self, state_dict):
        raise NotImplementedError("MasterAdamW: load_state_dict would round the float32 state to the parameters' dtype")

    @torch.no_grad()
    def step(self, closure=None):
        if closure is not None:
            raise NotImplementedError("MasterAdamW.step: closure is not supported, compute the gradients before")
        grads = [p.grad for p in self.parameters]
        masters = [self.state[p]["master"] for p in self.parameters]
        exp_avgs = [self.state[p]["exp_avg"] for p in self.parameters]
        exp_avg_sqs = [self.state[p]["exp_avg_sq"] for p in self.parameters]
        grad_scale = getattr(self, "grad_scale", None)
        found_inf = getattr(self, "found_inf", None)
        if self.compile and found_inf is None:
            update = compiled(adamw_update)
            settings = {"foreach": True, "capturable": True}
        else:  # only the fused kernel unscales gradients, and skips a step that overflowed
            update = adamw_update
            settings = {"fused": True, "grad_scale": grad_scale, "found_inf": found_inf}
        update(self.parameters, grads, masters, exp_avgs, exp_avg_sqs, self.step_count, lr=self.lr, **settings)


# ---------------------------------------------------------------- what the harness asks for

VERSION = 4
GRAPH_BY_DEFAULT = True
DETERMINISTIC_BY_DEFAULT = False
FSDP_GATHERS_AMP_DTYPE = True  # the model computes with 16-bit weights


def make_model(options):
    """Return the model, compiled if asked to; under torchrun block by block, so DDP sends gradients during backward."""
    model = TinyLlama(options.model)
    if options.attention_backend == "flex":
        use_flex_attention(model, options.seq_len, options.device)
    if options.enable_torch_compile:
        torch._dynamo.config.optimize_ddp = not options.parallel  # False: do not split a block's graph at DDP's buckets
        for module in model.layers if options.parallel else [model]:
            module.compile(mode=options.compile_mode)
    return model


def make_optimizer(model, options):
    """Return PyTorch's AdamW, on float32 master weights if the model computes with 16-bit ones."""
    if options.use_amp and options.parallel != "fsdp":
        return MasterAdamW(model.parameters(), options.learning_rate, options.dtype, options.enable_torch_compile)
    return torch.optim.AdamW(model.parameters(), lr=options.learning_rate, capturable=options.on_gpu, fused=True)


def get_weight(parameter, state):
    """Return the float32 weight of a parameter, its master if it has one; state is optimizer.state[parameter]."""
    return state.get("master", parameter)


def set_weight(parameter, state, weight):
    """Overwrite a parameter and its master weight in place with a float32 weight."""
    if "master" in state:
        state["master"].copy_(weight)
    parameter.copy_(weight)


def add_version_options(add):
    switch = {"dest": "enable_torch_compile", "default": None}
    add("--enable-torch-compile", action="store_true", help="fuse the other operations (on for GPUs)", **switch)
    add("--disable-torch-compile", action="store_false", help=argparse.SUPPRESS, **switch)
    modes = ["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]
    add("--compile-mode", choices=modes, default="default", help="of torch.compile (%(default)s)")
    add("--attention-backend", choices=["auto", *SDPA_BACKENDS, "flex"], default="auto", help="(first that can run)")


def complete_version_options(options):
    """Check this version's options, raise UserError; return those to complete, and parts: what it uses, in words."""
    compiled = options.enable_torch_compile
    if compiled is None:
        compiled = options.on_gpu
    if options.graph and compiled and options.compile_mode in ("reduce-overhead", "max-autotune"):
        raise UserError(f"--compile-mode {options.compile_mode} captures its own graphs: add --no-graph")
    if options.compile_mode != "default" and not compiled:
        raise UserError(f"--compile-mode {options.compile_mode} needs --enable-torch-compile")
    backend = options.attention_backend
    if backend == "flex" and not (options.on_gpu and compiled):
        raise UserError("--attention-backend flex needs a GPU and torch.compile: use another backend")
    if backend in SDPA_BACKENDS and not can_run(backend, options):
        raise UserError(f"--attention-backend {backend} cannot run this model in {options.precision}: use auto")
    if backend == "auto":
        backend = choose_backend(options, compiled)
    parts = f"{backend} attention, fused RMSNorm and AdamW"
    if compiled:
        parts += f", torch.compile ({options.compile_mode})"
    return {"enable_torch_compile": compiled, "attention_backend": backend, "parts": parts}


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
