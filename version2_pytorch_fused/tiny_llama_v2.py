#!/usr/bin/env python3
"""Tiny LLaMA, version 2: the same model in fewer and larger operations, all of them PyTorch's own.

    python tiny_llama_v2.py                                     # trains on a synthetic stream, GPU if there is one
    python tiny_llama_v2.py --preset small --enable-all-fusion --use-amp
    python tiny_llama_v2.py --disable-flash-attention           # each fusion has its own switch

The lesson of this version is fusion: one product for q, k and v instead of three, one for gate and up instead of two,
attention in one kernel that never writes the T x T scores, and torch.compile for what is left between the products.

Letters in shapes and comments: B batch, T tokens of a sequence, C hidden_dim, H query heads, K key/value heads,
D head_dim = C / H, F intermediate_dim, V vocab_size.

A name that also stands in another version is the same code there, character for character, unless it is listed as a
fork: `diff` of two versions shows what the next one changes and nothing else.
"""

import argparse
import contextlib
import dataclasses
import datetime
import hashlib
import inspect
import json
import math
import os
import pathlib
import pickle
import platform
import resource
import signal
import subprocess
import sys
import threading
import time
import warnings
import zipfile

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

VERSION = 2
GRAPH_BY_DEFAULT = False
DETERMINISTIC_BY_DEFAULT = False

# ---------------------------------------------------------------- configuration


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes of the model."""

    vocab_size: int
    hidden_dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    intermediate_dim: int
    norm_eps: float = 1e-6
    rope_theta: float = 10000.0

    @property
    def head_dim(self):
        return self.hidden_dim // self.num_heads


SIZES = ("hidden_dim", "num_layers", "num_heads", "intermediate_dim", "seq_len", "batch_size")
PRESETS = {
    "tiny": dict(zip(SIZES, (256, 4, 8, 512, 128, 8), strict=True)),
    "small": dict(zip(SIZES, (512, 8, 8, 2048, 128, 8), strict=True)),
    "medium": dict(zip(SIZES, (1024, 12, 16, 4096, 512, 16), strict=True)),
}
DEFAULTS = {"hidden_dim": 512, "num_layers": 8, "num_heads": 8, "seq_len": 256, "batch_size": 8}
SETUP_CHECK = {"hidden_dim": 64, "num_layers": 2, "num_heads": 4, "seq_len": 32, "batch_size": 2}
SORT_KEYS = [
    f"{prefix}{key}"
    for key in ("cpu_time_total", "cuda_time_total", "device_time_total", "cpu_memory_usage", "device_memory_usage")
    for prefix in ("", "self_")
] + ["count"]


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one sentence, said by one process of a machine, with exit status 2."""

    speaks = True

    def error(self, message):
        self.exit(2, f"{self.prog}: error: {message}\n" if self.speaks else None)


def add_model_options(parser):
    group = parser.add_argument_group("model and batch")
    group.add_argument("--preset", choices=PRESETS, help="sizes to start from; single options override it")
    group.add_argument("--batch-size", type=int, metavar="B", help="sequences in a step (8)")
    group.add_argument("--seq-len", type=int, metavar="T", help="tokens in a sequence (256)")
    group.add_argument("--hidden-dim", type=int, metavar="C", help="width of the model (512)")
    group.add_argument("--num-layers", type=int, metavar="L", help="transformer blocks (8)")
    group.add_argument("--num-heads", type=int, metavar="H", help="query heads (8)")
    group.add_argument("--num-kv-heads", type=int, metavar="K", help="key and value heads (half the query heads)")
    group.add_argument("--intermediate-dim", type=int, metavar="F", help="width of the feed-forward part (4 x hidden)")
    group.add_argument("--vocab-size", type=int, default=1000, metavar="V", help="distinct tokens (%(default)s)")


def add_training_options(parser):
    group = parser.add_argument_group("training")
    flag = argparse.BooleanOptionalAction
    group.add_argument("--num-steps", type=int, default=50, help="measured training steps (%(default)s)")
    group.add_argument("--warmup-steps", type=int, default=3, help="steps before the clock starts (%(default)s)")
    group.add_argument("--learning-rate", type=float, default=3e-4, help="of AdamW (%(default)s)")
    group.add_argument("--seed", type=int, default=0, help="of weights and batches (%(default)s)")
    group.add_argument("--data", metavar="PATH", help="text file, or folder of them, read as bytes (synthetic stream)")
    group.add_argument("--use-amp", action="store_true", help="automatic mixed precision")
    group.add_argument("--amp-dtype", choices=["bfloat16", "float16"], default="bfloat16", help="(%(default)s)")
    group.add_argument("--tf32", action="store_true", help="let float32 matrix products use TF32 matrix units")
    group.add_argument("--graph", action=flag, help=f"replay the step from a CUDA/HIP graph ({GRAPH_BY_DEFAULT})")
    group.add_argument(
        "--deterministic",
        action=flag,
        default=DETERMINISTIC_BY_DEFAULT,
        help="same bits in every run (%(default)s)",
    )
    group.add_argument("--device", help="cpu, cuda or cuda:N; PyTorch calls AMD GPUs cuda too (a GPU if there is one)")
    group.add_argument("--metrics-file", metavar="JSON", help="write configuration, environment, steps and summary")
    group.add_argument("--validate-setup", action="store_true", help="three small steps that check this machine")
    group.add_argument("--checkpoint-dir", metavar="DIR", default="checkpoints", help="for --save-every (%(default)s)")
    group.add_argument("--save-every", type=int, default=0, metavar="N", help="write a checkpoint every N steps")
    group.add_argument("--resume", action="store_true", help="continue from the newest sound checkpoint")


def add_parallel_options(parser):
    group = parser.add_argument_group("several processes, one a GPU, started by torchrun; --batch-size is each one's")
    group.add_argument(
        "--parallel", choices=["ddp", "fsdp"], help="copy the model into every process, or shard it over them (ddp)"
    )
    group.add_argument(
        "--compress-gradients", action="store_true", help="send float32 gradients in 16 bits, those of --amp-dtype"
    )


def add_profiling_options(parser):
    group = parser.add_argument_group("profiling with PyTorch's profiler (on steps after the measured ones)")
    group.add_argument("--enable-pytorch-profiler", action="store_true", help="write a trace for ui.perfetto.dev")
    group.add_argument("--profile-dir", metavar="DIR", default="pytorch_profiles", help="(%(default)s)")
    group.add_argument("--profile-steps", type=int, default=3, metavar="N", help="steps to profile (%(default)s)")
    group.add_argument(
        "--profile-memory", "--enable-memory-profiling", action="store_true", help="memory of every operator"
    )
    group.add_argument("--profile-operators", action="store_true", help="print a table of the operators")
    group.add_argument(
        "--sort-by", choices=SORT_KEYS, metavar="KEY", default="cuda_time_total", help="of that table (%(default)s)"
    )
    group.add_argument("--profile-attention-only", action="store_true", help="profile one attention layer alone")


def add_switch(group, name, default, meaning):
    """--enable-NAME and --disable-NAME."""
    target = f"enable_{name.replace('-', '_')}"
    group.add_argument(f"--enable-{name}", dest=target, action="store_true", help=meaning)
    group.add_argument(f"--disable-{name}", dest=target, action="store_false", help=argparse.SUPPRESS)
    group.set_defaults(**{target: default})


def add_version_options(parser):
    group = parser.add_argument_group("fusions; each --enable-X has its --disable-X")
    add_switch(group, "qkv-fusion", True, "one product for q, k and v (on)")
    add_switch(group, "flash-attention", True, "attention in one kernel (on)")
    add_switch(group, "swiglu-fusion", True, "one product for gate and up (on)")
    add_switch(group, "torch-compile", False, "let torch.compile fuse the rest (off)")
    group.add_argument("--enable-all-fusion", action="store_true", help="all four")
    modes = ["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]
    group.add_argument("--compile-mode", choices=modes, default="default", help="of torch.compile (%(default)s)")


def check_version_options(options):
    if options.enable_all_fusion:
        options.enable_qkv_fusion = options.enable_flash_attention = True
        options.enable_swiglu_fusion = options.enable_torch_compile = True
    if options.graph and options.enable_torch_compile and "reduce" in options.compile_mode:
        raise ValueError("--compile-mode reduce-overhead makes graphs of its own: use it with --no-graph")


def describe_parts(options):
    """What this version computes with, for the printed configuration."""
    names = ("qkv-fusion", "flash-attention", "swiglu-fusion", "torch-compile")
    return ", ".join(name for name in names if getattr(options, f"enable_{name.replace('-', '_')}")) or "none fused"


def launch_ranks(variables):
    """What torchrun says of this process in environment variables; one process alone where it says nothing.

    Raises ValueError where they do not fit together.
    """
    ranks = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1}
    if not {"RANK", "LOCAL_RANK", "WORLD_SIZE"} & set(variables):
        return {name.lower(): value for name, value in ranks.items()} | {"launched": False}
    way_out = "start the script with torchrun, or unset RANK, LOCAL_RANK and WORLD_SIZE to run it alone"
    for name in (*ranks, "MASTER_ADDR", "MASTER_PORT"):
        if not variables.get(name):
            raise ValueError(f"{name} is not set, but other variables of a distributed launch are: {way_out}")
        if name != "MASTER_ADDR" and not variables[name].isdecimal():
            raise ValueError(f"{name} is {variables[name]!r} and no number: {way_out}")
    ranks = {name: int(variables[name]) for name in ranks}
    for rank, size in (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE")):
        if ranks[rank] >= ranks[size]:
            raise ValueError(f"{rank} is {ranks[rank]}, but must be below {size}, which is {ranks[size]}: {way_out}")
    return {name.lower(): value for name, value in ranks.items()} | {"launched": True}


def resolve_parallel(options, ranks):
    """Where this process stands among the others, which part of the GPUs is its own, and how they share the work."""
    options.rank, options.world_size = ranks["rank"], ranks["world_size"]
    if not ranks["launched"]:
        if options.parallel or options.compress_gradients:
            raise ValueError("--parallel and --compress-gradients need several processes: start with torchrun")
        return
    options.parallel = options.parallel or "ddp"
    options.one_host = ranks["local_world_size"] == ranks["world_size"]
    if options.device == "cuda":
        there = torch.cuda.device_count()
        if ranks["local_world_size"] > there:
            raise ValueError(
                f"{ranks['local_world_size']} processes were started on a machine where PyTorch sees {there} GPUs: "
                f"use torchrun --nproc-per-node {max(1, there)}, or --device cpu"
            )
        options.device = f"cuda:{ranks['local_rank']}"
    elif options.device.startswith("cuda") and ranks["local_world_size"] > 1:
        raise ValueError(f"--device {options.device} would give all processes one GPU: leave out its number")


def check_parallel(options):
    """Refuse what several processes cannot do together."""
    if options.parallel == "fsdp":
        if options.use_amp and options.amp_dtype == "float16":
            raise ValueError("--parallel fsdp does not scale the gradients of float16: use --amp-dtype bfloat16")
        if options.profile_attention_only:
            raise ValueError("--profile-attention-only needs whole layers: leave out --parallel fsdp")
    if options.compress_gradients and options.amp_dtype == "bfloat16" and torch.device(options.device).type == "cpu":
        raise ValueError("--compress-gradients in bfloat16 needs a GPU: use --amp-dtype float16")


def resolve_options(options, ranks):
    """Fill what was not given: preset first, then defaults, then what follows from other options."""
    chosen = {**(SETUP_CHECK if options.validate_setup else DEFAULTS), **PRESETS.get(options.preset, {})}
    if options.hidden_dim not in (None, chosen["hidden_dim"]):
        chosen.pop("intermediate_dim", None)
    for name, value in chosen.items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    if options.validate_setup:
        options.num_steps, options.warmup_steps = 3, 1
    if options.num_kv_heads is None:
        options.num_kv_heads = max(1, options.num_heads // 2)
    if options.intermediate_dim is None:
        options.intermediate_dim = 4 * options.hidden_dim
    if options.device is None:
        options.device = "cuda" if torch.cuda.is_available() else "cpu"
    resolve_parallel(options, ranks)
    if options.graph is None:
        options.graph = GRAPH_BY_DEFAULT and not options.enable_pytorch_profiler
    options.profile = (
        options.enable_pytorch_profiler
        or options.profile_memory
        or options.profile_operators
        or options.profile_attention_only
    )


def check_sizes(options):
    positive = "batch_size seq_len hidden_dim num_layers num_heads num_kv_heads intermediate_dim vocab_size num_steps"
    for name in (positive + " profile_steps").split():
        if getattr(options, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, not {getattr(options, name)}")
    for name in ("warmup_steps", "save_every", "seed"):
        if not 0 <= getattr(options, name) < 2**63:
            raise ValueError(f"--{name.replace('_', '-')} must be from 0 to 2^63 - 1, not {getattr(options, name)}")
    if not (math.isfinite(options.learning_rate) and options.learning_rate > 0):
        raise ValueError(f"--learning-rate must be a positive number, not {options.learning_rate}")
    if options.hidden_dim % (2 * options.num_heads):
        raise ValueError(
            f"--hidden-dim must be a multiple of 2 x --num-heads = {2 * options.num_heads} "
            f"(rotary embeddings turn pairs), not {options.hidden_dim}"
        )
    if options.num_heads % options.num_kv_heads:
        raise ValueError(f"--num-kv-heads must divide --num-heads {options.num_heads}, not {options.num_kv_heads}")


def check_places(options):
    """Refuse a device that is not there and a file that cannot be written, before any work is done."""
    try:
        device = torch.device(options.device)
    except RuntimeError:
        raise ValueError(f"--device must be cpu, cuda or cuda:N, not {options.device}") from None
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"--device must be cpu, cuda or cuda:N, not {options.device}")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"--device {options.device} is not there: PyTorch sees {torch.cuda.device_count()} GPUs here")
    if options.metrics_file and options.rank == 0:
        path = pathlib.Path(options.metrics_file)
        target = path if path.exists() else path.parent
        if path.is_dir() or not os.access(target, os.W_OK):
            raise ValueError(f"--metrics-file {path} cannot be written: choose a file in a folder that can")
    if options.resume and not pathlib.Path(options.checkpoint_dir).is_dir():
        raise ValueError(f"--resume needs an existing --checkpoint-dir, and {options.checkpoint_dir} is not there")


def parse_options(argv=None):
    """Options from the command line, complete and checked; a wrong one ends the program with status 2."""
    parser = Parser(
        prog=f"tiny_llama_v{VERSION}.py",
        description=f"Train a tiny LLaMA, version {VERSION}.",
        epilog=f"example: python tiny_llama_v{VERSION}.py --preset small --num-steps 20 --metrics-file v{VERSION}.json",
    )
    groups = (add_model_options, add_training_options, add_parallel_options, add_profiling_options)
    for add in (*groups, add_version_options):
        add(parser)
    try:
        ranks = launch_ranks(os.environ)
        parser.speaks = ranks["local_rank"] == 0
        options = parser.parse_args(argv)
        resolve_options(options, ranks)
        check_sizes(options)
        check_places(options)
        check_parallel(options)
        check_version_options(options)
    except ValueError as error:
        parser.error(str(error))
    return options


def model_config(options):
    return Config(**{f.name: getattr(options, f.name) for f in dataclasses.fields(Config) if hasattr(options, f.name)})


# ---------------------------------------------------------------- data


def own_rows(batch, options):
    """The rows of this process, B of the B x world_size that all processes draw alike."""
    return batch[options.rank * options.batch_size :][: options.batch_size]


class SyntheticStream:
    """A stream of tokens that can be learned, and whose best reachable loss is known.

    After token t comes one of up to four fixed successors of t, with probabilities 1/2, 1/4, 1/8, 1/8; the successors
    are drawn once from the seed. No model can do better than the entropy of that choice.
    """

    def __init__(self, options):
        self.options = options
        branches = min(4, options.vocab_size)
        self.probabilities = np.array([0.5 ** min(i + 1, branches - 1) for i in range(branches)])
        self.best_loss = float(-(self.probabilities * np.log(self.probabilities)).sum())
        self.order = np.random.default_rng(options.seed).permutation(options.vocab_size)
        self.description = f"synthetic stream, best reachable loss {self.best_loss:.4f}"

    def batch(self, step):
        """Tokens and next tokens of one step, two int64 tensors [B, T]; a function of seed, step and rank alone."""
        B, T, V = self.options.batch_size * self.options.world_size, self.options.seq_len, self.options.vocab_size
        rng = np.random.default_rng((self.options.seed, step))
        choices = rng.choice(len(self.probabilities), size=(B, T), p=self.probabilities)
        stream = np.empty((B, T + 1), dtype=np.int64)
        stream[:, 0] = rng.integers(0, V, size=B)
        for t in range(T):
            stream[:, t + 1] = self.order[(stream[:, t] + choices[:, t]) % V]
        stream = own_rows(torch.from_numpy(stream), self.options)
        return stream[:, :-1], stream[:, 1:]


class TextStream:
    """Random windows of real text, one token a byte."""

    best_loss = None

    def __init__(self, options):
        self.options = options
        self.bytes = np.frombuffer(read_text(pathlib.Path(options.data)), dtype=np.uint8)
        if len(self.bytes) <= options.seq_len:
            raise ValueError(
                f"--data {options.data} holds {len(self.bytes)} bytes of text, "
                f"but --seq-len {options.seq_len} needs at least {options.seq_len + 1}"
            )
        if self.bytes.max() >= options.vocab_size:
            raise ValueError(
                f"--vocab-size {options.vocab_size} is too small for --data {options.data}: "
                f"it must be at least {self.bytes.max() + 1}"
            )
        self.description = f"{len(self.bytes):,} bytes of text from {options.data}"

    def batch(self, step):
        """Tokens and next tokens of one step, two int64 tensors [B, T]; a function of seed, step and rank alone."""
        B, T = self.options.batch_size * self.options.world_size, self.options.seq_len
        starts = np.random.default_rng((self.options.seed, step)).integers(0, len(self.bytes) - T, size=(B, 1))
        starts = own_rows(starts, self.options)
        windows = torch.from_numpy(self.bytes[starts + np.arange(T + 1)].astype(np.int64))
        return windows[:, :-1], windows[:, 1:]


def read_text(path):
    """The bytes of a text file, or of all text files directly in a folder, in the order of their names."""
    try:
        files = [path] if not path.is_dir() else sorted(p for p in path.iterdir() if p.is_file())
        contents = [file.read_bytes() for file in files]
    except OSError as error:
        raise ValueError(f"--data {path} cannot be read: {error.strerror}") from None
    # A NUL byte marks a binary file; those that happen to lie in a folder of text are passed over.
    return b"\n".join(content for content in contents if b"\0" not in content)


def load_data(options):
    return TextStream(options) if options.data else SyntheticStream(options)


# ---------------------------------------------------------------- operations: the lesson of this version


def annotate(name):
    """A named range for the PyTorch profiler and, on a GPU, for NVTX/ROCTX timelines."""
    if torch.compiler.is_compiling():
        return contextlib.nullcontext()
    ranges = contextlib.ExitStack()
    ranges.enter_context(torch.profiler.record_function(name))
    if torch.cuda.is_available():
        ranges.enter_context(torch.cuda.nvtx.range(name))
    return ranges


def at_least_float32(x):
    return x.to(torch.promote_types(x.dtype, torch.float32))


def rms_norm(x, weight, eps):
    """x / sqrt(mean(x²) + eps) · weight over the last dimension, computed in float32."""
    wide = at_least_float32(x)
    normalized = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (normalized * weight).to(x.dtype)


def rope_tables(seq_len, head_dim, theta, device):
    """Cosine and sine of t · theta^(-2i / D) for position t and pair i: two float32 tensors [T, D/2]."""
    frequencies = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angles = torch.outer(torch.arange(seq_len, dtype=torch.float64), frequencies)
    return angles.cos().float().to(device), angles.sin().float().to(device)


def apply_rope(x, cos, sin):
    """Turn the pairs (x[i], x[i + D/2]) of every head of x [B, T, heads, D] by their position's angles."""
    first, second = at_least_float32(x).chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


def causal_attention(query, key, value):
    """softmax(query keyᵀ / sqrt(D)) value in one kernel, each token seeing itself and those before it.

    query [B, T, H, D], key and value [B, T, K, D] with H a multiple of K; returns [B, T, H, D].
    """
    grouped = query.dtype in (torch.float16, torch.bfloat16)
    if not grouped:
        # In float32 only the slow kernel that writes the scores shares keys between heads; the fused one wants copies.
        key, value = (x.repeat_interleave(query.shape[2] // x.shape[2], dim=2) for x in (key, value))
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)
    return mixed.transpose(1, 2)


def scored_attention(query, key, value):
    """Version 1's attention, for --disable-flash-attention: the same result through the T x T scores."""
    B, T, H, D = query.shape
    key, value = (x.repeat_interleave(H // x.shape[2], dim=2) for x in (key, value))
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    scores = query @ key.transpose(-1, -2) / math.sqrt(D)
    future = torch.ones(T, T, dtype=torch.bool, device=query.device).triu(1)
    weights = torch.softmax(at_least_float32(scores).masked_fill(future, -math.inf), dim=-1)
    return (weights.to(value.dtype) @ value).transpose(1, 2)


def swiglu(gate, up):
    """silu(gate) · up, with silu(x) = x · sigmoid(x)."""
    return F.silu(gate) * up


# ---------------------------------------------------------------- model


class Attention(nn.Module):
    """Causal self-attention with grouped queries: H query heads read K key/value heads."""

    def __init__(self, config, options):
        super().__init__()
        C, D = config.hidden_dim, config.head_dim
        self.head_dim = D
        self.sizes = [C, config.num_kv_heads * D, config.num_kv_heads * D]
        if options.enable_qkv_fusion:
            self.qkv_proj = nn.Linear(C, sum(self.sizes), bias=False)
        else:
            self.q_proj, self.k_proj, self.v_proj = (nn.Linear(C, size, bias=False) for size in self.sizes)
        self.o_proj = nn.Linear(config.num_heads * D, C, bias=False)
        self.attend = causal_attention if options.enable_flash_attention else scored_attention

    def project(self, x):
        if hasattr(self, "qkv_proj"):
            return self.qkv_proj(x).split(self.sizes, dim=-1)
        return self.q_proj(x), self.k_proj(x), self.v_proj(x)

    def forward(self, x, cos, sin):
        heads = (*x.shape[:-1], -1, self.head_dim)
        with annotate("qkv projection"):
            query, key, value = (part.view(heads) for part in self.project(x))
        with annotate("rope"):
            query, key = apply_rope(query, cos, sin), apply_rope(key, cos, sin)
        with annotate("attention"):
            mixed = self.attend(query, key, value)
        with annotate("output projection"):
            return self.o_proj(mixed.flatten(-2))


class FeedForward(nn.Module):
    """down(silu(gate(x)) · up(x))."""

    def __init__(self, config, options):
        super().__init__()
        if options.enable_swiglu_fusion:
            self.gate_up_proj = nn.Linear(config.hidden_dim, 2 * config.intermediate_dim, bias=False)
        else:
            self.gate_proj = nn.Linear(config.hidden_dim, config.intermediate_dim, bias=False)
            self.up_proj = nn.Linear(config.hidden_dim, config.intermediate_dim, bias=False)
        self.down_proj = nn.Linear(config.intermediate_dim, config.hidden_dim, bias=False)

    def project(self, x):
        if hasattr(self, "gate_up_proj"):
            return self.gate_up_proj(x).chunk(2, dim=-1)
        return self.gate_proj(x), self.up_proj(x)

    def forward(self, x):
        with annotate("feed-forward"):
            return self.down_proj(swiglu(*self.project(x)))


class RMSNorm(nn.Module):
    def __init__(self, config, options):
        super().__init__()
        self.eps = config.norm_eps
        self.weight = nn.Parameter(torch.ones(config.hidden_dim))

    def forward(self, x):
        with annotate("rms norm"):
            return rms_norm(x, self.weight, self.eps)


class Block(nn.Module):
    def __init__(self, config, options):
        super().__init__()
        self.attention_norm = RMSNorm(config, options)
        self.attention = Attention(config, options)
        self.feed_forward_norm = RMSNorm(config, options)
        self.feed_forward = FeedForward(config, options)

    def forward(self, x, cos, sin):
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.feed_forward(self.feed_forward_norm(x))


class TinyLlama(nn.Module):
    """Tokens [B, T] to logits [B, T, V]; the output projection is the token embedding."""

    def __init__(self, config, options):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_dim)
        self.layers = nn.ModuleList(Block(config, options) for _ in range(config.num_layers))
        self.norm = RMSNorm(config, options)
        cos, sin = rope_tables(options.seq_len, config.head_dim, config.rope_theta, options.device)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        if options.enable_torch_compile:
            if options.parallel:
                # Compiled one by one, blocks give their gradients one by one, to be sent meanwhile. PyTorch would cut a
                # model in DDP into such parts itself, but before 2.13 not one with flex attention.
                torch._dynamo.config.optimize_ddp = False
            for module in self.layers if options.parallel else [self]:
                module.compile(mode=options.compile_mode)

    def forward(self, tokens):
        T = tokens.shape[1]
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x, self.cos[:T], self.sin[:T])
        with annotate("output head"):
            return F.linear(self.norm(x), self.embed_tokens.weight)


# ---------------------------------------------------------------- weights: one canonical form for all versions

# A fused weight is the concatenation of these canonical ones, in this order; version 1 has none.
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def weight_shapes(config):
    """Canonical name -> shape of every weight, in the order in which the seed draws them."""
    C, kv = config.hidden_dim, config.num_kv_heads * config.head_dim
    shapes = {"embed_tokens.weight": (config.vocab_size, C)}
    for i in range(config.num_layers):
        layer = {
            "attention_norm": (C,),
            "attention.q_proj": (C, C),
            "attention.k_proj": (kv, C),
            "attention.v_proj": (kv, C),
            "attention.o_proj": (C, C),
            "feed_forward_norm": (C,),
            "feed_forward.gate_proj": (config.intermediate_dim, C),
            "feed_forward.up_proj": (config.intermediate_dim, C),
            "feed_forward.down_proj": (C, config.intermediate_dim),
        }
        shapes.update({f"layers.{i}.{name}.weight": shape for name, shape in layer.items()})
    return {**shapes, "norm.weight": (C,)}


def initial_weights(config, seed):
    """Canonical name -> float32 CPU tensor: ones for the norms, N(0, 0.02) for the rest."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.ones(shape) if len(shape) == 1 else torch.empty(shape).normal_(0, 0.02, generator=generator)
        for name, shape in weight_shapes(config).items()
    }


def canonical_views(tensors, config):
    """Canonical name -> tensor for {parameter name: tensor}; parts of fused tensors are views of them."""
    shapes, views = weight_shapes(config), {}
    for name, tensor in tensors.items():
        prefix, module, _ = ("." + name).rsplit(".", 2)
        parts = [f"{prefix}.{part}.weight"[1:] for part in FUSED.get(module, (module,))]
        views.update(zip(parts, tensor.split([shapes[part][0] for part in parts]), strict=True))
    return views


def build_model(options, device):
    """The model with its initial weights on the device."""
    config = model_config(options)
    with torch.device(device):
        model = TinyLlama(config, options)
    with torch.no_grad():
        weights = initial_weights(config, options.seed)
        for name, view in canonical_views(dict(model.named_parameters()), config).items():
            view.copy_(weights[name])
    return model


def matrix_dtype(options):
    """Dtype of the weight matrices: autocast converts them in every step."""
    return torch.float32


# ---------------------------------------------------------------- several processes, one a GPU

# Who waits longer than this for another process ends. Compiling takes longer, but all processes compile at once.
PATIENCE = datetime.timedelta(seconds=50)
# Gradients that DDP sends together; by default it begins with a bucket of 1 MiB, and steps took longer.
BUCKET_MB = 25


@contextlib.contextmanager
def process_group(options):
    """Join the processes that torchrun started, if it did, and leave them when all went well."""
    if not options.parallel:
        yield
        return
    device = torch.device(options.device)
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo", timeout=PATIENCE, device_id=device if on_gpu else None)
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere if options.rank else sys.stdout):
        yield
    dist.destroy_process_group()


def announce_end(prog):
    """Say so when the launcher ends this process, even while it waits inside a library for one that is gone.

    Python runs a signal's handler only between two of its own instructions; the byte that it writes to the wake-up
    pipe reaches a waiting thread at once.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.signal(signal.SIGTERM, lambda *_: None)
    signal.set_wakeup_fd(writer)

    def wait():
        while os.read(reader, 1)[0] != signal.SIGTERM:
            pass
        print(f"{prog}: ended by the launcher: another process of the job failed, or its time is over", file=sys.stderr)
        os._exit(128 + signal.SIGTERM)

    threading.Thread(target=wait, daemon=True).start()


def mean_by_all_reduce(_, bucket):
    """DDP's own exchange, but NCCL or RCCL divide: gradients that lie in the bucket already are not read for it."""
    future = dist.all_reduce(bucket.buffer(), op=dist.ReduceOp.AVG, async_op=True).get_future()
    return future.then(lambda done: done.value()[0])


def exchange_hook(options):
    """What DDP calls to average a bucket; None for its own way."""
    device, sent = torch.device(options.device), getattr(torch, options.amp_dtype)
    if options.compress_gradients:
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        return {torch.bfloat16: default_hooks.bf16_compress_hook, torch.float16: default_hooks.fp16_compress_hook}[sent]
    return mean_by_all_reduce if device.type == "cuda" else None  # gloo knows no mean


def parallel_model(model, options):
    """What the training step calls: the model alone, one of DDP's replicas of it, or itself sharded by FSDP2.

    Both average the gradients over all processes while the backward still runs. DDP sends them in buckets; FSDP2
    gathers the weights of a block before its forward and its backward, and keeps 1 / world_size of weights, gradients
    and moments in each process.
    """
    device = torch.device(options.device)
    if options.parallel == "ddp":
        known = inspect.signature(DistributedDataParallel).parameters
        still = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"  # PyTorch < 2.13
        ids = [device] if device.type == "cuda" else None
        buckets = {"gradient_as_bucket_view": True, "bucket_cap_mb": BUCKET_MB}
        replica = DistributedDataParallel(model, device_ids=ids, **buckets, **{still: False})
        hook = exchange_hook(options)
        if hook:
            replica.register_comm_hook(None, hook)
        return replica
    if options.parallel == "fsdp":
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        reduced = getattr(torch, options.amp_dtype) if options.compress_gradients else None
        policy = MixedPrecisionPolicy(matrix_dtype(options), reduced, cast_forward_inputs=False)
        mesh = dist.init_device_mesh(device.type, (options.world_size,))
        for module in (*model.layers, model):
            fully_shard(module, mesh=mesh, mp_policy=policy)
    return model


def whole(tensor):
    """The tensor itself, or a copy on the CPU of what FSDP2 keeps in parts; all processes must ask together."""
    return tensor.full_tensor().cpu() if hasattr(tensor, "full_tensor") else tensor


def put(tensor, value):
    """Write a whole value into a tensor of which this process may keep a part."""
    if hasattr(tensor, "full_tensor"):
        from torch.distributed.tensor import distribute_tensor

        value = distribute_tensor(value, tensor.device_mesh, tensor.placements, src_data_rank=None)
    tensor.copy_(value)


def gather(numbers, device):
    """The numbers of every process: float64 [world_size, len(numbers)]; all processes must ask together."""
    mine = torch.tensor(numbers, dtype=torch.float64, device=device)
    if not dist.is_initialized():
        return mine[None]
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    return torch.stack(everyone)


# ---------------------------------------------------------------- one training step


def make_optimizer(model, options):
    capturable = options.graph and torch.device(options.device).type == "cuda"
    return torch.optim.AdamW(model.parameters(), lr=options.learning_rate, capturable=capturable)


def mean_loss(logits, labels):
    """Mean cross-entropy of logits [B, T, V] against labels [B, T], computed in float32."""
    return F.cross_entropy(at_least_float32(logits).flatten(0, 1), labels.flatten())


def compute_loss(model, tokens, labels, options):
    """Mean cross-entropy of predicting labels [B, T] from tokens [B, T]."""
    dtype = getattr(torch, options.amp_dtype)
    with torch.autocast(tokens.device.type, dtype, enabled=options.use_amp):
        logits = model(tokens)
    with annotate("loss"):
        return mean_loss(logits, labels)


class PhaseClock:
    """Times of forward, backward and optimizer: events on a GPU, so that nothing waits; the host's clock on a CPU."""

    def __init__(self, device, in_graph=False):
        self.device = device
        self.available = not (in_graph and torch.version.hip)  # a HIP graph cannot hold timing events
        if device.type == "cuda" and self.available:
            outside = {"external": True} if in_graph else {}
            self.marks = [torch.cuda.Event(enable_timing=True, **outside) for _ in range(4)]
        else:
            self.marks = [0.0] * 4

    def mark(self, border):
        if self.device.type == "cpu":
            self.marks[border] = time.perf_counter()
        elif self.available:
            self.marks[border].record()

    def milliseconds(self):
        """Forward, backward, optimizer of the last step; call after synchronising. None where not measured."""
        if not self.available:
            return [None] * 3
        pairs = list(zip(self.marks, self.marks[1:], strict=False))
        if self.device.type == "cpu":
            return [1000 * (end - start) for start, end in pairs]
        return [start.elapsed_time(end) for start, end in pairs]


class Trainer:
    """Model, optimizer and the step that trains them: run operation by operation, or replayed from a graph."""

    def __init__(self, options):
        self.options = options
        self.config = model_config(options)
        self.device = torch.device(options.device)
        # FSDP2 moves one block after the other to the GPU and keeps a part of it there.
        self.model = build_model(options, torch.device("cpu") if options.parallel == "fsdp" else self.device)
        self.replica = parallel_model(self.model, options)
        self.optimizer = make_optimizer(self.model, options)
        scaled = options.use_amp and options.amp_dtype == "float16"
        # PyTorch's first scale, 65536, overflows gradients that are kept in 16 bits: the first steps would be skipped.
        self.scaler = torch.amp.GradScaler(self.device.type, init_scale=2.0**10, enabled=scaled)
        self.fresh_scaler = self.scaler.state_dict()
        shape = (options.batch_size, options.seq_len)
        self.tokens, self.labels = (torch.zeros(shape, dtype=torch.int64, device=self.device) for _ in range(2))
        self.clock = PhaseClock(self.device)
        self.graph, self.graph_reason = None, None if options.graph else "not asked for"
        self.loss = None

    def step(self):
        """Forward, backward and optimizer, once, on the batch in self.tokens and self.labels."""
        self.clock.mark(0)
        self.optimizer.zero_grad(set_to_none=True)
        with annotate("forward"):
            self.loss = compute_loss(self.replica, self.tokens, self.labels, self.options)
        self.clock.mark(1)
        with annotate("backward"):
            self.scaler.scale(self.loss).backward()
        self.clock.mark(2)
        with annotate("optimizer"):
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.clock.mark(3)
        self.loss = self.loss.detach()

    def run(self, tokens, labels):
        """One training step on a batch [B, T]; returns its record: the loss, and times in ms.

        Of several processes: the mean loss, the time of the slowest, and this one's phases.
        """
        self.tokens.copy_(tokens)
        self.labels.copy_(labels)
        self.synchronize()
        if self.options.parallel:
            dist.barrier()  # who came early would count its waiting for the others as part of the step
        start = time.perf_counter()
        self.graph.replay() if self.graph else self.step()
        self.synchronize()
        step_ms = 1000 * (time.perf_counter() - start)
        phases = dict(zip(("forward_ms", "backward_ms", "optimizer_ms"), self.clock.milliseconds(), strict=True))
        losses, times = gather([self.loss.item(), step_ms], self.device).T.tolist()
        record = {"loss": sum(losses) / len(losses), **phases, "step_ms": max(times)}
        return record | ({"rank_step_ms": times} if self.options.parallel else {})

    def synchronize(self):
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def warm_up(self, tokens, labels, saved):
        """Compile, allocate and capture on a throw-away batch, then return to the saved state; seconds it took."""
        start = time.perf_counter()
        self.tokens.copy_(tokens)
        self.labels.copy_(labels)
        # A graph must find the optimizer's state in place, and a resumed run must have it to fill it. DDP arranges its
        # buckets anew after the first step and measures itself for ten, which waits for the GPU.
        least = int(saved["step"] > 0)
        if self.options.graph and self.device.type == "cuda":
            least = 11 if self.options.parallel else 2
        for _ in range(max(least, self.options.warmup_steps)):
            self.step()
        if self.options.graph:
            self.capture()
        restore(self, saved)
        self.synchronize()
        return time.perf_counter() - start

    def capture(self):
        """Record one step into a graph; keep running operation by operation, with the reason, where that fails."""
        if self.device.type == "cpu":
            self.graph_reason = "a CPU has no graphs"
            return
        if self.options.parallel == "fsdp":
            self.graph_reason = "FSDP allocates and frees the gathered weights in every step"
            return
        if self.scaler.is_enabled() and not getattr(self.optimizer, "_step_supports_amp_scaling", False):
            self.graph_reason = "with this optimizer the gradient scaler waits for the GPU in every step"
            return
        eager_clock, self.clock = self.clock, PhaseClock(self.device, in_graph=True)
        graph = torch.cuda.CUDAGraph()
        # The thread that watches over NCCL or RCCL asks for its events meanwhile, which must not spoil the capture.
        mode = "thread_local" if self.options.parallel else "global"
        try:
            # The warm-up ran on this very stream, so that every library handle that the step needs exists already.
            with torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode=mode):
                self.step()
            self.graph = graph
        except RuntimeError as error:
            self.clock, self.graph_reason = eager_clock, str(error).splitlines()[0]
            self.replica = None  # DDP is left in the middle of a step, and must let go of the model before the next one
            self.replica = parallel_model(self.model, self.options)


def parameters_trained(model):
    """Number of parameters whose tensor got a finite gradient that is not all zero in the last step."""
    gradients = (whole(p.grad) for p in model.parameters() if p.grad is not None)
    return sum(g.numel() for g in gradients if bool(g.isfinite().all()) and bool(g.count_nonzero()))


def flops_per_step(config, batch_size, seq_len):
    """Floating-point operations of one training step, a multiply-add counted as two.

    6 for each weight of a matrix product and token (2 forward, 4 backward), and the two products of causal attention,
    of which half the T x T square is needed. Norms, activations and the optimizer are left out, as is usual.
    """
    matrices = sum(math.prod(shape) for shape in weight_shapes(config).values() if len(shape) == 2)
    attention = config.num_layers * batch_size * seq_len**2 * config.hidden_dim
    return 6 * matrices * batch_size * seq_len + 6 * attention


# ---------------------------------------------------------------- checkpoints


def state_tensors(trainer):
    """weights, exp_avg, exp_avg_sq -> {parameter name: float32 tensor}; the moments once the optimizer has them."""
    optimizer, parameters = trainer.optimizer, dict(trainer.model.named_parameters())
    getattr(optimizer, "gather_state", lambda: None)()  # of which each process may have a share alone
    exact = getattr(optimizer, "exact_weight", lambda p: p)  # of which the model computes with a rounded copy
    tensors = {"weights": {name: exact(p).detach() for name, p in parameters.items()}}
    if optimizer.state:
        for moment in ("exp_avg", "exp_avg_sq"):
            tensors[moment] = {name: optimizer.state[p][moment] for name, p in parameters.items()}
    return tensors


def training_state(trainer):
    """weights, exp_avg, exp_avg_sq -> {canonical name: whole float32 tensor}: views where the tensor is here whole."""
    return {
        kind: canonical_views({name: whole(tensor) for name, tensor in tensors.items()}, trainer.config)
        for kind, tensors in state_tensors(trainer).items()
    }


@torch.no_grad()
def restore(trainer, saved):
    """Bring weights, moments and step count back in place (a captured graph keeps using the same memory)."""
    parameters = dict(trainer.model.named_parameters())
    set_weight = getattr(trainer.optimizer, "set_weight", put)
    for kind, tensors in state_tensors(trainer).items():
        for name, tensor in tensors.items():
            value = whole(tensor)
            for canonical, view in canonical_views({name: value}, trainer.config).items():
                view.copy_(saved[kind][canonical]) if kind in saved else view.zero_()
            if kind == "weights":
                set_weight(parameters[name], value)
            elif value is not tensor:
                put(tensor, value)
    for state in trainer.optimizer.state.values():
        state["step"].fill_(saved["step"])
    trainer.scaler.load_state_dict(saved.get("scaler") or trainer.fresh_scaler)


def save_checkpoint(trainer, folder, step):
    """Write step_N.pt whole or not at all, and keep the two newest; of several processes, the first one writes."""
    content = {kind: {n: t.cpu() for n, t in tensors.items()} for kind, tensors in training_state(trainer).items()}
    if trainer.options.rank:
        return
    content |= {"step": step, "scaler": trainer.scaler.state_dict(), "config": dataclasses.asdict(trainer.config)}
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f"step_{step:09d}.pt.partial"
    with open(partial, "wb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, partial.with_suffix(""))
    for old in sorted(folder.glob("step_*.pt"))[:-2]:
        old.unlink()


def read_checkpoint(path):
    """What save_checkpoint wrote, or a ValueError that says what is wrong with the file."""
    try:
        with zipfile.ZipFile(path) as archive:
            if archive.testzip():  # torch.load does not compare the checksums that torch.save writes
                raise ValueError("a checksum does not match")
        saved = torch.load(path, map_location="cpu", weights_only=True)
    except (zipfile.BadZipFile, RuntimeError, OSError, EOFError, pickle.UnpicklingError) as error:
        raise ValueError(f"it cannot be read ({type(error).__name__})") from None
    if not isinstance(saved, dict) or not {"step", "config", "weights", "scaler"} <= set(saved):
        raise ValueError("it is not a checkpoint of this workshop")
    return saved


def newest_checkpoint(folder, config):
    """The newest checkpoint of the folder that is sound; another one is named and passed over."""
    for path in sorted(pathlib.Path(folder).glob("step_*.pt"), reverse=True):
        try:
            saved = read_checkpoint(path)
        except ValueError as error:
            print(f"{path} is damaged and passed over: {error}", file=sys.stderr)
            continue
        if saved["config"] != dataclasses.asdict(config):
            raise ValueError(f"--resume: {path} belongs to a model of other sizes, {saved['config']}")
        return saved
    raise ValueError(f"--resume: {folder} holds no sound checkpoint (step_*.pt)")


# ---------------------------------------------------------------- measurement

# Dense matrix peaks of the vendors' data sheets in TFLOP/s: bfloat16 and float16, TF32, float32. None: no such units.
# MI250X is one of its two dies, which is what PyTorch sees as a GPU.
PEAK_TFLOPS = {
    "MI250X": (191.5, None, 47.9),
    "MI300A": (980.6, 490.3, 122.6),
    "MI300X": (1307.4, 653.7, 163.4),
    "MI325X": (1307.4, 653.7, 163.4),
    "MI355X": (2516.6, None, 157.3),
    "A100": (311.9, 156.0, 19.5),
    "H100": (989.4, 494.7, 66.9),
    "H200": (989.4, 494.7, 66.9),
    "B200": (2250.0, 1125.0, 75.0),
}


def precision_name(options):
    return options.amp_dtype if options.use_amp else "tf32" if options.tf32 else "float32"


def peak_tflops(device_name, precision):
    """The GPU's peak at that precision in TFLOP/s, or None where it is not known."""
    column = {"tf32": 1, "float32": 2}.get(precision, 0)
    return next((peaks[column] for name, peaks in PEAK_TFLOPS.items() if name in device_name), None)


def peak_memory_mb(trainer):
    """Most memory in use at once, in MiB: the GPU's tensors, or the whole process on a CPU."""
    if trainer.device.type == "cuda":
        peers = getattr(trainer.optimizer, "peers", None)  # PyTorch does not count what GPUs share
        return (torch.cuda.max_memory_allocated(trainer.device) + (peers.memory.nbytes if peers else 0)) / 2**20
    status = pathlib.Path("/proc/self/status")
    text = status.read_text() if status.exists() else ""
    if "VmHWM:" in text:  # on Linux getrusage begins with the peak of the process that started this one
        return int(text.split("VmHWM:")[1].split()[0]) / 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)


def device_name(device):
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return platform.processor() or platform.machine()


def environment(device):
    """What a figure needs beside it: device, versions, date, commit and the script itself."""
    script = pathlib.Path(__file__).resolve()
    try:
        command = ["git", "-C", str(script.parent), "rev-parse", "HEAD"]
        commit = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        commit = None
    return {
        "device": device_name(device),
        "device_type": device.type,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": getattr(sys.modules.get("triton"), "__version__", None),
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": commit,
        "script_sha256": hashlib.sha256(script.read_bytes()).hexdigest(),
    }


def spread(values):
    low, middle, high = np.percentile(values, [25, 50, 75])
    return {"median": float(middle), "p25": float(low), "p75": float(high)}


def summarize(trainer, steps, warmup_s, best_loss):
    """The figures of a run from its steps' records; of several processes, of all together."""
    options, config = trainer.options, trainer.config
    step_ms = spread([step["step_ms"] for step in steps])
    phases = {
        name: spread([step[name] for step in steps])["median"] if steps[0][name] is not None else None
        for name in ("forward_ms", "backward_ms", "optimizer_ms")
    }
    steps_per_second, batch_size = 1000 / step_ms["median"], options.batch_size * options.world_size
    flops, precision = flops_per_step(config, batch_size, options.seq_len), precision_name(options)
    tflops = flops * steps_per_second / 1e12
    peak = peak_tflops(device_name(trainer.device), precision)
    by_rank = zip(*(step["rank_step_ms"] for step in steps), strict=True) if options.parallel else []
    return {
        "parameters": sum(p.numel() for p in trainer.model.parameters()),
        "parameters_trained": parameters_trained(trainer.model),
        "step_ms": step_ms,
        **phases,
        "samples_per_second": batch_size * steps_per_second,
        "tokens_per_second": batch_size * options.seq_len * steps_per_second,
        "peak_memory_mb": gather([peak_memory_mb(trainer)], trainer.device).max().item(),
        "first_loss": steps[0]["loss"],
        "final_loss": steps[-1]["loss"],
        "best_loss_known": best_loss,
        "flops_per_step": flops,
        "tflops": tflops,
        "mfu": tflops / (peak * options.world_size) if peak else None,
        "precision": precision,
        "graph": {"captured": trainer.graph is not None, "reason": trainer.graph_reason},
        "warmup_s": warmup_s,
        "parallel": options.parallel,
        "world_size": options.world_size,
        "rank_step_ms": [spread(times)["median"] for times in by_rank],
    }


def finite(value):
    """The value with None for every number in it that JSON does not know."""
    if isinstance(value, dict):
        return {key: finite(part) for key, part in value.items()}
    if isinstance(value, list):
        return [finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_metrics(trainer, steps, summary):
    content = {
        "version": VERSION,
        "config": dataclasses.asdict(trainer.config),
        "options": vars(trainer.options),
        "environment": environment(trainer.device),
        "steps": steps,
        "summary": summary,
    }
    pathlib.Path(trainer.options.metrics_file).write_text(json.dumps(finite(content), indent=1) + "\n")


def print_configuration(trainer, data):
    options, config = trainer.options, trainer.config
    parameters = sum(p.numel() for p in trainer.model.parameters())
    print(f"Tiny LLaMA version {VERSION} on {device_name(trainer.device)} ({trainer.device})")
    print(
        f"  model      {parameters:,} parameters: width {config.hidden_dim}, {config.num_layers} layers, "
        f"{config.num_heads} query heads, {config.num_kv_heads} key/value heads, feed-forward {config.intermediate_dim}"
    )
    print(f"  batch      {options.batch_size} sequences of {options.seq_len} tokens, vocabulary {config.vocab_size}")
    if options.parallel:
        engine = {"ddp": "DDP", "fsdp": "FSDP2"}.get(options.parallel, options.parallel)
        print(
            f"  processes  {options.world_size}, {engine} over {dist.get_backend()}, "
            f"{options.world_size * options.batch_size} sequences a step in all"
        )
    print(f"  data       {data.description}")
    print(f"  precision  {precision_name(options)}{', deterministic' if options.deterministic else ''}")
    print(f"  parts      {describe_parts(options)}", flush=True)


def print_step(trainer, step, record):
    options = trainer.options
    rate = 1000 * options.batch_size * options.world_size / record["step_ms"]
    print(
        f"step {step + 1:5d}/{options.num_steps}  loss {record['loss']:8.4f}  {rate:9.1f} samples/s  "
        f"{record['step_ms']:9.3f} ms  peak {peak_memory_mb(trainer):8.1f} MB",
        flush=True,
    )


def print_summary(summary, steps):
    step = summary["step_ms"]
    phases = [summary[f"{name}_ms"] for name in ("forward", "backward", "optimizer")]
    phases = "not measured:" if None in phases else " / ".join(f"{phase:.3f}" for phase in phases) + " ms"
    peak = "" if summary["mfu"] is None else f", {100 * summary['mfu']:.1f} % of the peak"
    best = "" if summary["best_loss_known"] is None else f" (best reachable {summary['best_loss_known']:.4f})"
    share = 100 * summary["parameters_trained"] / summary["parameters"]
    graph = "replayed from a graph" if summary["graph"]["captured"] else f"eager: {summary['graph']['reason']}"
    print(f"summary of {len(steps)} steps, after {summary['warmup_s']:.1f} s of warm-up; {graph}")
    print(f"  loss       {summary['first_loss']:.4f} -> {summary['final_loss']:.4f}{best}")
    print(f"  step       {step['median']:.3f} ms median, quartiles {step['p25']:.3f} to {step['p75']:.3f}")
    if summary["parallel"]:
        slow, fast = (pick(summary["rank_step_ms"]) for pick in (max, min))
        print(f"  processes  {summary['world_size']}, medians from {fast:.3f} ms to {slow:.3f} ms")
    print(f"  phases     {phases} forward / backward / optimizer")
    print(f"  speed      {summary['samples_per_second']:,.1f} samples/s, {summary['tokens_per_second']:,.0f} tokens/s")
    print(f"  compute    {summary['tflops']:,.3f} TFLOP/s{peak}")
    print(f"  memory     {summary['peak_memory_mb']:,.1f} MB peak")
    print(f"  trained    {summary['parameters_trained']:,} of {summary['parameters']:,} parameters ({share:.1f} %)")


# ---------------------------------------------------------------- profiling


def attention_step(trainer):
    """Forward and backward of the first attention layer alone, on random input [B, T, C]."""
    options, model = trainer.options, trainer.model
    dtype = next(model.layers.parameters()).dtype
    shape = (options.batch_size, options.seq_len, options.hidden_dim)
    x = torch.randn(shape, device=trainer.device, dtype=dtype, requires_grad=True)
    with torch.autocast(trainer.device.type, getattr(torch, options.amp_dtype), enabled=options.use_amp):
        y = model.layers[0].attention(x, model.cos, model.sin)
    y.backward(torch.ones_like(y))


def profile(trainer, data):
    """Run some more steps under PyTorch's profiler and leave what was asked for: trace, operator table, memory."""
    options = trainer.options
    on_gpu = trainer.device.type == "cuda"
    folder = pathlib.Path(options.profile_dir)
    folder.mkdir(parents=True, exist_ok=True)
    activities = [torch.profiler.ProfilerActivity.CPU] + [torch.profiler.ProfilerActivity.CUDA] * on_gpu
    with torch.profiler.profile(
        activities=activities,
        record_shapes=True,
        profile_memory=options.profile_memory,
        acc_events=True,  # there is one cycle; without it PyTorch 2.11 warns of events of others
    ) as profiler:
        for step in range(options.num_steps, options.num_steps + options.profile_steps):
            attention_step(trainer) if options.profile_attention_only else trainer.run(*data.batch(step))
        trainer.synchronize()
    part = "_attention" if options.profile_attention_only else ""
    moment = datetime.datetime.now().strftime("%Y%m%d_%H%M%S")
    part += f"_rank{options.rank}" if options.parallel else ""
    trace = folder / f"trace_v{VERSION}{part}_{moment}_{os.getpid()}.pt.trace.json"
    profiler.export_chrome_trace(str(trace))
    if not trace.is_file():
        raise OSError(None, "the profiler left no file", str(trace))
    print(f"profiled {options.profile_steps} more steps: open {trace} in https://ui.perfetto.dev")
    if options.profile_operators or options.profile_memory:
        print_operators(profiler, options, on_gpu)


def print_operators(profiler, options, on_gpu):
    """The operators of a profile, sorted by time and, if asked for, by memory."""
    keys = [options.sort_by] if options.profile_operators else []
    keys += ["self_device_memory_usage"] if options.profile_memory else []
    for key in keys:
        key = key.replace("cuda_", "device_") if on_gpu else key.replace("cuda_", "cpu_").replace("device_", "cpu_")
        print(f"operators by {key}")
        print(profiler.key_averages().table(sort_by=key, row_limit=20, max_name_column_width=50))


# ---------------------------------------------------------------- main


def set_up_backend(options):
    """Precision and determinism of the libraries, before their first use."""
    torch.manual_seed(options.seed)
    torch.set_float32_matmul_precision("high" if options.tf32 else "highest")
    # What torch.compile says to the user of TF32 left off and of sums over few classes; the first is --tf32's choice.
    for message in ("TensorFloat32 tensor cores", r"\s*Online softmax is disabled"):
        warnings.filterwarnings("ignore", message)
    if options.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        # Filling every fresh tensor costs a pass over memory and would hide what it is meant to show: unwritten ones.
        torch.utils.deterministic.fill_uninitialized_memory = False


def train(trainer, data, first_step):
    """Yield the record of each measured step, from first_step to --num-steps."""
    options = trainer.options
    interval = max(1, options.num_steps // 10)
    for step in range(first_step, options.num_steps):
        record = {"step": step, **trainer.run(*data.batch(step))}
        yield record
        if not math.isfinite(record["loss"]):
            raise FloatingPointError(f"the loss of step {step + 1} is {record['loss']}: lower --learning-rate")
        if step == first_step or (step + 1) % interval == 0 or step + 1 == options.num_steps:
            print_step(trainer, step, record)
        if options.save_every and (step + 1) % options.save_every == 0:
            save_checkpoint(trainer, options.checkpoint_dir, step + 1)


def run(options, data, saved):
    """Warm up, train, report, profile; returns the exit status. What was measured is written however it ends."""
    trainer = Trainer(options)
    print_configuration(trainer, data)
    warmup_s = trainer.warm_up(*data.batch(0), saved)
    if options.graph and trainer.graph is None:
        print(f"  graph      not captured, running operation by operation: {trainer.graph_reason}")
    steps, status = [], 0
    try:
        for record in train(trainer, data, saved["step"]):
            steps.append(record)
    except FloatingPointError as error:
        print(f"tiny_llama_v{VERSION}.py: stopped: {error}", file=sys.stderr)
        status = 1
    except KeyboardInterrupt:
        print(f"interrupted after {len(steps)} steps", file=sys.stderr)
        if options.parallel:  # the processes stop in different steps, and can sum up nothing together
            return 130
        status = 130
    summary = summarize(trainer, steps, warmup_s, data.best_loss) if steps else None
    if options.metrics_file and options.rank == 0:
        write_metrics(trainer, steps, summary)
    if status == 0:
        print_summary(summary, steps)
        if options.profile:
            profile(trainer, data)
        if options.validate_setup:
            status = int(summary["parameters_trained"] != summary["parameters"])
            print("set-up check " + ("failed: not every parameter is trained" if status else "passed"))
    return status


def prepare(options):
    """The data, and the state to start from: the initial weights, or those of a checkpoint."""
    data, config = load_data(options), model_config(options)
    if not options.resume:
        return data, {"weights": initial_weights(config, options.seed), "step": 0}
    saved = newest_checkpoint(options.checkpoint_dir, config)
    if len(set(gather([saved["step"]], options.device).flatten().tolist())) > 1:
        raise ValueError(f"--resume: the processes find different checkpoints in {options.checkpoint_dir}: share it")
    if saved["step"] >= options.num_steps:
        raise ValueError(f"--resume: step {saved['step']} is reached already; raise --num-steps")
    return data, saved


class Refusal(RuntimeError):
    """What this machine cannot do, with the way out, in one sentence."""


def explain(error):
    """One sentence for what the user can do something about; None for what is a mistake of this program."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in str(error):
        return "out of memory: lower --batch-size, --seq-len or the model's sizes"
    if isinstance(error, OSError):
        return f"{error.filename or 'output'} cannot be written: {error.strerror}"
    if isinstance(error, Refusal):
        return str(error)
    if isinstance(error, dist.DistError) or "gloo" in str(error):
        return "another process of this job ended, or did not answer: look for what it said"
    if type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
        return f"torch.compile failed, run with --disable-torch-compile: {str(error).strip().splitlines()[0]}"
    return None


def main(argv=None):
    options = parse_options(argv)
    prog = f"tiny_llama_v{VERSION}.py"
    if options.parallel:
        prog += f", process {options.rank} of {options.world_size}"
        announce_end(prog)
    # One stream for all that runs, so that what a graph captures has been warmed up where it is captured.
    on_gpu = torch.device(options.device).type == "cuda"
    try:
        set_up_backend(options)
        with process_group(options):
            try:
                data, saved = prepare(options)
            except ValueError as error:
                print(f"{prog}: error: {error}", file=sys.stderr)
                return 2
            with torch.cuda.stream(torch.cuda.Stream(options.device)) if on_gpu else contextlib.nullcontext():
                return run(options, data, saved)
    except KeyboardInterrupt:
        print("interrupted outside of the measured steps", file=sys.stderr)
        return 130
    except (RuntimeError, MemoryError, OSError) as error:
        sentence = explain(error)
        if sentence is None:
            raise
        print(f"{prog}: {sentence}", file=sys.stderr)
        return 1


def leave(status):
    """End the program, all of whose work is done.

    One that torchrun started ends without the interpreter's clean-up: threads of the communication libraries that come
    back to the interpreter meanwhile would make it abort, now and then, and torchrun report a failure.
    """
    if "RANK" in os.environ:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


if __name__ == "__main__":
    leave(main())
