#!/usr/bin/env python3
"""Tiny LLaMA, version 3: kernels of our own in Triton, forward and backward, for what lies between the products.

    python tiny_llama_v3.py                                     # trains on a synthetic stream, GPU if there is one
    python tiny_llama_v3.py --preset medium --use-amp
    python tiny_llama_v3.py --disable-attention-kernel          # each kernel has its own switch

The lesson of this version is bytes: a tensor that is read and written once instead of several times. Matrix products
stay with the BLAS; normalization with its residual addition, rotary embedding, SwiGLU, attention, the loss and the
optimizer are one kernel each way. With --use-amp the model itself is 16-bit, and the optimizer keeps what its weights
lack of float32. Without a GPU the kernels run in Triton's interpreter: right, but slow.

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
import itertools
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
from torch.autograd.function import once_differentiable
from torch.nn.parallel import DistributedDataParallel

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is imported
import triton
import triton.language as tl

VERSION = 3
GRAPH_BY_DEFAULT = True
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
    group = parser.add_argument_group("Triton kernels, all on; each --enable-X has its --disable-X")
    add_switch(group, "rmsnorm-kernel", True, "RMSNorm with the residual addition")
    add_switch(group, "rope-kernel", True, "rotary embedding")
    add_switch(group, "swiglu-kernel", True, "SwiGLU of gate and up in one tensor")
    add_switch(group, "attention-kernel", True, "flash attention")
    add_switch(group, "loss-kernel", True, "cross-entropy")
    add_switch(group, "optimizer-kernel", True, "AdamW in one launch")
    group.add_argument(
        "--peer-adamw", action="store_true",
        help="on several GPUs of one host, in the place of DDP: AdamW reads all GPUs' gradients and writes all weights",
    )  # fmt: skip


def release(version):
    """(major, minor) of a library's version."""
    return tuple(map(int, version.split(".")[:2]))


def check_version_options(options):
    head_dim = options.hidden_dim // options.num_heads
    if options.enable_attention_kernel and head_dim not in HEAD_DIMS:
        raise ValueError(
            f"--hidden-dim / --num-heads must be one of {', '.join(map(str, HEAD_DIMS))} for the attention kernel, "
            f"not {head_dim}: choose other sizes or --disable-attention-kernel"
        )
    if options.enable_rmsnorm_kernel and options.hidden_dim > MAX_ROW:
        raise ValueError(f"--hidden-dim must be at most {MAX_ROW} for the RMSNorm kernel, not {options.hidden_dim}")
    if options.use_amp and not options.enable_optimizer_kernel:
        raise ValueError("--use-amp needs the optimizer kernel, which keeps the float32 weights: leave it enabled")
    if options.peer_adamw:
        check_peers(options)
        options.parallel = "peer AdamW"
    if options.parallel == "fsdp":
        options.enable_optimizer_kernel = False  # FSDP2 gives parts of tensors, which PyTorch's AdamW knows
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if torch.device(options.device).type == "cpu" and not interpreted:
        raise ValueError("--device cpu runs the kernels in Triton's interpreter: set TRITON_INTERPRET=1 and try again")
    if options.use_amp and options.amp_dtype == "bfloat16" and interpreted:
        raise ValueError("--amp-dtype bfloat16 needs a GPU, Triton's interpreter cannot multiply it: use float16")
    if interpreted and release(triton.__version__) < (3, 7) and release(np.__version__) >= (2, 4):
        raise ValueError(
            f"the interpreter of Triton {triton.__version__} needs NumPy before 2.4, not {np.__version__}: "
            "pip install 'numpy<2.4'"
        )


def check_peers(options):
    """Refuse --peer-adamw where GPUs cannot reach each other's memory, and beside what it cannot do."""
    if not options.parallel:
        raise ValueError("--peer-adamw needs several processes: start with torchrun")
    if not options.one_host:
        raise ValueError("--peer-adamw needs all GPUs in one host: leave it out on several")
    if torch.device(options.device).type == "cpu":
        raise ValueError("--peer-adamw needs GPUs, which reach each other's memory: leave it out")
    if options.parallel == "fsdp" or options.compress_gradients or not options.enable_optimizer_kernel:
        raise ValueError("--peer-adamw takes the place of DDP, and AdamW's kernel does it: leave out the other option")
    if options.use_amp and options.amp_dtype == "float16":
        raise ValueError("--peer-adamw does not scale the gradients of float16: use --amp-dtype bfloat16")


def describe_parts(options):
    """What this version computes with, for the printed configuration."""
    kernels = ("rmsnorm", "rope", "swiglu", "attention", "loss", "optimizer")
    parts = [kernel for kernel in kernels if getattr(options, f"enable_{kernel}_kernel")]
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    note = ", in Triton's interpreter: results are right, times mean nothing" if interpreted else ""
    return f"Triton kernels for {', '.join(parts) or 'nothing'}{note}"


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


# ---------------------------------------------------------------- operations: what the kernels compute


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


def swiglu(gate, up):
    """silu(gate) · up, with silu(x) = x · sigmoid(x)."""
    return F.silu(gate) * up


# ---------------------------------------------------------------- kernels: the lesson of this version

HEAD_DIMS = (16, 32, 64, 128)
MAX_ROW = 32768
PRODUCT_WORDS = 4096  # a larger vocabulary than this wants its embedding's gradient added up row by row
TRITON_DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
BFLOAT16_NAN = 0x7FC0  # its bits


def gpu_architecture(device):
    """'gfx942', 'sm_90', ... of the GPU, or 'cpu' where Triton's interpreter runs the kernels."""
    if device.type == "cpu":
        return "cpu"
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return properties.gcnArchName.split(":")[0]
    return f"sm_{properties.major}{properties.minor}"


def program_count(device):
    """Programs that keep the GPU busy, for kernels that walk over their work."""
    return 4 * torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def tile_of(columns, architecture, elements=4096):
    """ROWS and BLOCK (powers of two) of a tile that covers a row of so many columns, or a part of a long row.

    The interpreter pays for each program and not for each element, so that its tiles are large.
    """
    if architecture == "cpu":
        elements = 65536
    block = min(triton.next_power_of_2(columns), elements)
    return {"ROWS": elements // block, "BLOCK": block}


def row_tile(columns, architecture, elements=4096):
    """As tile_of, for kernels that need a whole row at once."""
    return tile_of(columns, architecture, max(elements, triton.next_power_of_2(columns)))


def check_kernel_input(name, *tensors):
    """Refuse, before any launch, what the kernels would read wrongly."""
    first = tensors[0]
    for tensor in tensors:
        if tensor.device != first.device or tensor.dtype != first.dtype:
            raise ValueError(f"{name}: all tensors must share device and dtype, not {tensor.dtype} and {first.dtype}")
    if first.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ValueError(f"{name}: the kernels take float32, float16 and bfloat16, not {first.dtype}")


# ---- RMSNorm, with the residual add in front of it
# forward    x = residual + branch,  rstd = 1 / sqrt(mean(x²) + eps),  y = x · rstd · w
# backward   g = dy · w,  dx = dresidual + rstd · (g - x · rstd² · mean(g · x)),  dw = Σ_rows dy · x · rstd
#            and since x is a sum, dx is the gradient of both its terms


@triton.jit
def rmsnorm_forward_kernel(
    residual_ptr, branch_ptr, w_ptr, x_ptr, y_ptr, rstd_ptr, rows, C, eps,
    ADD: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program normalizes ROWS rows of [rows, C]; BLOCK >= C."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row[:, None] < rows) & (column[None, :] < C)
    offsets = row[:, None].to(tl.int64) * C + column[None, :]
    x = tl.load(residual_ptr + offsets, mask=inside, other=0.0)
    if ADD:
        branch = tl.load(branch_ptr + offsets, mask=inside, other=0.0)
        x = (x.to(tl.float32) + branch.to(tl.float32)).to(x_ptr.dtype.element_ty)
        tl.store(x_ptr + offsets, x, mask=inside)
    x = x.to(tl.float32)
    rstd = tl.rsqrt(tl.sum(x * x, 1) / C + eps)
    tl.store(rstd_ptr + row, rstd, mask=row < rows)
    w = tl.load(w_ptr + column, mask=column < C, other=0.0).to(tl.float32)
    tl.store(y_ptr + offsets, (x * rstd[:, None] * w[None, :]).to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def rmsnorm_backward_kernel(
    dy_ptr, dresidual_ptr, x_ptr, w_ptr, rstd_ptr, dx_ptr, dw_ptr, rows, C,
    ADD: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program p of P walks tiles p, p + P, ... of ROWS rows and leaves its share of dw in dw[p]: no atomics."""
    column = tl.arange(0, BLOCK)
    w = tl.load(w_ptr + column, mask=column < C, other=0.0).to(tl.float32)
    dw = tl.zeros([ROWS, BLOCK], tl.float32)
    for first in range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        row = first + tl.arange(0, ROWS)
        inside = (row[:, None] < rows) & (column[None, :] < C)
        offsets = row[:, None].to(tl.int64) * C + column[None, :]
        dy = tl.load(dy_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + row, mask=row < rows, other=0.0)[:, None]
        g = dy * w[None, :]
        dx = rstd * (g - x * (rstd * rstd * tl.sum(g * x, 1)[:, None] / C))
        if ADD:
            dx += tl.load(dresidual_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
        dw += dy * x * rstd
        tl.store(dx_ptr + offsets, dx.to(dx_ptr.dtype.element_ty), mask=inside)
    tl.store(dw_ptr + tl.program_id(0).to(tl.int64) * C + column, tl.sum(dw, 0), mask=column < C)


@triton.jit
def column_sum_kernel(x_ptr, sum_ptr, rows, C, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """One program adds up BLOCK columns of x [rows, C], always in the same order."""
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for first in range(0, rows, ROWS):
        row = first + tl.arange(0, ROWS)[:, None]
        inside = (row < rows) & (column[None, :] < C)
        total += tl.load(x_ptr + row.to(tl.int64) * C + column[None, :], mask=inside, other=0.0)
    tl.store(sum_ptr + column, tl.sum(total, 0), mask=column < C)


def column_sums(x):
    """The sums of the columns of x [rows, C], float32, over many small programs."""
    rows, C = x.shape
    sums = torch.empty(C, dtype=torch.float32, device=x.device)
    tile = {"ROWS": 128, "BLOCK": 8}
    if gpu_architecture(x.device) == "cpu":
        tile = {"ROWS": 4, "BLOCK": triton.next_power_of_2(C)}
    column_sum_kernel[(triton.cdiv(C, tile["BLOCK"]),)](x, sums, rows, C, **tile, num_warps=8)
    return sums


class AddRMSNormFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, residual, branch, w, eps):
        ctx.set_materialize_grads(False)
        C = residual.shape[-1]
        residual = residual.contiguous()
        branch = branch.contiguous() if branch is not None else None
        x = residual if branch is None else torch.empty_like(residual)
        y = torch.empty_like(residual)
        rows = y.numel() // C
        rstd = torch.empty(rows, dtype=torch.float32, device=y.device)
        tile = row_tile(C, gpu_architecture(y.device))
        rmsnorm_forward_kernel[(triton.cdiv(rows, tile["ROWS"]),)](
            residual, residual if branch is None else branch, w, x, y, rstd, rows, C, eps, branch is not None, **tile
        )
        ctx.save_for_backward(x, w, rstd)
        ctx.added = branch is not None
        return x, y

    @staticmethod
    @once_differentiable
    def backward(ctx, dx_later, dy):
        x, w, rstd = ctx.saved_tensors
        C, rows = x.shape[-1], rstd.numel()
        dy = torch.zeros_like(x) if dy is None else dy.contiguous()
        dx_later = None if dx_later is None else dx_later.contiguous()
        # A tile is loaded, added up and stored before the next one is: many small programs keep the memory busy.
        wide = x.dtype == torch.float32
        tile = row_tile(C, gpu_architecture(x.device), elements=2048 if wide else 1024)
        programs = min(triton.cdiv(rows, tile["ROWS"]), program_count(x.device) * (1 if wide else 2))
        dx = torch.empty_like(x)
        shares = torch.empty(programs, C, dtype=torch.float32, device=x.device)
        rmsnorm_backward_kernel[(programs,)](
            dy, dy if dx_later is None else dx_later, x, w, rstd, dx, shares, rows, C, dx_later is not None, **tile,
            num_warps=8 if wide else 4 if C > 512 else 2,
        )  # fmt: skip
        return dx, dx if ctx.added else None, column_sums(shares).to(w.dtype), None


def add_rms_norm(residual, branch, w, eps):
    """x = residual + branch and its RMSNorm, in one pass over memory.

    residual, branch [..., C] of one dtype (branch None: nothing is added); w [C]; eps is added to the mean square.
    Returns (x, norm(x) · w), both like residual. Sums are taken in float32.
    """
    check_kernel_input("add_rms_norm", *(t for t in (residual, branch) if t is not None))
    if w.shape != residual.shape[-1:] or w.device != residual.device or not w.is_floating_point():
        raise ValueError(f"add_rms_norm: w must hold {residual.shape[-1]} numbers on {residual.device}, not {w.shape}")
    if residual.shape[-1] > MAX_ROW:
        raise ValueError(f"add_rms_norm: a row must fit one tile of {MAX_ROW} columns, not {residual.shape[-1]}")
    if branch is not None and branch.shape != residual.shape:
        raise ValueError(f"add_rms_norm: residual {tuple(residual.shape)} and branch {tuple(branch.shape)} must agree")
    return AddRMSNormFunction.apply(residual, branch, w.contiguous(), eps)


# ---- rotary embedding of the packed projections
# forward    (x₁, x₂) -> (x₁ · cos - x₂ · sin, x₂ · cos + x₁ · sin)
# backward   the transpose of a rotation is the rotation by the opposite angle: the same kernel with sin negated


@triton.jit
def rope_kernel(
    x_ptr, y_ptr, cos_ptr, sin_ptr, tokens, T, heads, turned, HALF,
    INVERSE: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """One program turns TOKENS x HEADS heads of x [tokens, heads, 2 · HALF]; heads from `turned` on are copied."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)[:, None, None]
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[None, :, None]
    pair = tl.arange(0, PAIRS)[None, None, :]
    angle = (token % T) * HALF + pair
    known = (token < tokens) & (pair < HALF)
    cos = tl.load(cos_ptr + angle, mask=known, other=0.0)
    sin = tl.load(sin_ptr + angle, mask=known, other=0.0)
    if INVERSE:
        sin = -sin
    cos = tl.where(head < turned, cos, 1.0)
    sin = tl.where(head < turned, sin, 0.0)
    inside = known & (head < heads)
    offsets = (token.to(tl.int64) * heads + head) * (2 * HALF) + pair
    x1 = tl.load(x_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    x2 = tl.load(x_ptr + offsets + HALF, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + offsets, (x1 * cos - x2 * sin).to(y_ptr.dtype.element_ty), mask=inside)
    tl.store(y_ptr + offsets + HALF, (x2 * cos + x1 * sin).to(y_ptr.dtype.element_ty), mask=inside)


def turn(x, cos, sin, turned, inverse):
    B, T, heads, D = x.shape
    x = x.contiguous()
    y = torch.empty_like(x)
    pairs = triton.next_power_of_2(D // 2)
    tile = tile_of(pairs * triton.next_power_of_2(heads), gpu_architecture(x.device), elements=2048)
    grid = (triton.cdiv(B * T, tile["ROWS"]), triton.cdiv(heads * pairs, tile["BLOCK"]))
    rope_kernel[grid](
        x, y, cos, sin, B * T, T, heads, turned, D // 2, inverse, tile["ROWS"], tile["BLOCK"] // pairs, pairs
    )
    return y


class RoPEFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, cos, sin, turned):
        ctx.save_for_backward(cos, sin)
        ctx.turned = turned
        return turn(x, cos, sin, turned, inverse=False)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        return turn(dy, *ctx.saved_tensors, ctx.turned, inverse=True), None, None, None


def check_rope(name, x, cos, sin):
    if x.ndim != 4 or x.shape[3] % 2:
        raise ValueError(f"{name}: x must be [B, T, heads, D] with an even D, not {tuple(x.shape)}")
    wanted = (x.shape[1], x.shape[3] // 2)
    for table in (cos, sin):
        if table.shape != wanted or table.dtype != torch.float32 or table.device != x.device:
            raise ValueError(f"{name}: cos and sin must be float32 {wanted} on {x.device}, not {tuple(table.shape)}")


def rope(x, cos, sin, turned):
    """Turn the first `turned` heads of x [B, T, heads, D] by the angles of cos and sin [T, D/2]; copy the others.

    The copy lets query, key and value stay in one tensor from their projection to their gradient.
    """
    check_kernel_input("rope", x)
    check_rope("rope", x, cos, sin)
    return RoPEFunction.apply(x, cos.contiguous(), sin.contiguous(), turned)


# ---- SwiGLU, packed
# forward    y = silu(a) · b,  silu(a) = a · σ(a)
# backward   da = dy · b · σ(a) · (1 + a · (1 - σ(a))),  db = dy · silu(a)


@triton.jit
def swiglu_forward_kernel(x_ptr, y_ptr, rows, F, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """One program computes a tile [ROWS, BLOCK] of y [rows, F] from x [rows, 2F], whose rows hold a and then b."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    column = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    inside = (row < rows) & (column < F)
    a = tl.load(x_ptr + row * 2 * F + column, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(x_ptr + row * 2 * F + F + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * F + column, (a * tl.sigmoid(a) * b).to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def swiglu_backward_kernel(dy_ptr, x_ptr, dx_ptr, rows, F, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """One program computes a tile [ROWS, BLOCK] of both halves of dx [rows, 2F]."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    column = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    inside = (row < rows) & (column < F)
    dy = tl.load(dy_ptr + row * F + column, mask=inside, other=0.0).to(tl.float32)
    a = tl.load(x_ptr + row * 2 * F + column, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(x_ptr + row * 2 * F + F + column, mask=inside, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(a)
    da = dy * b * sigmoid * (1 + a * (1 - sigmoid))
    tl.store(dx_ptr + row * 2 * F + column, da.to(dx_ptr.dtype.element_ty), mask=inside)
    tl.store(dx_ptr + row * 2 * F + F + column, (dy * a * sigmoid).to(dx_ptr.dtype.element_ty), mask=inside)


def swiglu_grid(rows, width, device):
    tile = tile_of(width, gpu_architecture(device), elements=2048)
    return (triton.cdiv(rows, tile["ROWS"]), triton.cdiv(width, tile["BLOCK"])), tile


def swiglu_forward(x):
    """y [rows, F] of x [rows, 2F]."""
    rows, width = x.shape[0], x.shape[1] // 2
    y = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    grid, tile = swiglu_grid(rows, width, x.device)
    swiglu_forward_kernel[grid](x, y, rows, width, **tile)
    return y


def swiglu_backward(dy, x):
    """dx [rows, 2F] of dy [rows, F] and x [rows, 2F]."""
    dx = torch.empty_like(x)
    grid, tile = swiglu_grid(*dy.shape, x.device)
    swiglu_backward_kernel[grid](dy, x, dx, *dy.shape, **tile)
    return dx


class SwiGLUFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return swiglu_forward(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        return swiglu_backward(dy.contiguous(), *ctx.saved_tensors)


def packed_swiglu(x):
    """silu(a) · b for x [..., 2F] whose last dimension holds a and then b; returns [..., F]."""
    check_kernel_input("packed_swiglu", x)
    if x.shape[-1] % 2:
        raise ValueError(f"packed_swiglu: x must have an even number of columns, not {x.shape[-1]}")
    return SwiGLUFunction.apply(x.flatten(0, -2).contiguous()).view(*x.shape[:-1], x.shape[-1] // 2)


# ---- causal flash attention with grouped queries, on the packed projections
# The rows of qkv [B, T, H + 2K, D] hold H query heads, K key heads and K value heads; query head h reads
# key/value head h // (H/K).
# forward    S = q kᵀ / sqrt(D) where key <= query,  lse = logsumexp(S),  P = exp(S - lse),  o = P v
# backward   Δ = Σ_D do · o,  dS = P · (do vᵀ - Δ),  dq = dS k / sqrt(D),  dk = dSᵀ q / sqrt(D),  dv = Pᵀ do
# Exponentials are taken to base 2, the hardware's own: `scale` is log2(e) / sqrt(D), and lse is in units of log 2.
# Where q and k are turned heads, the backward kernels turn dq and dk back on their way out, in registers.


@triton.jit
def load_tile(ptr, first, T, stride, ROWS: tl.constexpr, D: tl.constexpr):
    """Rows first to first + ROWS of a matrix [T, D] with that row stride; rows from T on read as zero."""
    row = tl.arange(0, ROWS)[:, None]
    tile = ptr + first * tl.cast(stride, tl.int64) + row * stride + tl.arange(0, D)[None, :]
    return tl.load(tile, mask=first + row < T, other=0.0)


@triton.jit
def store_tile(ptr, tile, first, T, stride, ROWS: tl.constexpr, D: tl.constexpr):
    row = tl.arange(0, ROWS)[:, None]
    pointers = ptr + first * tl.cast(stride, tl.int64) + row * stride + tl.arange(0, D)[None, :]
    tl.store(pointers, tile.to(ptr.dtype.element_ty), mask=first + row < T)


@triton.jit
def store_turned_back(ptr, tile, cos_ptr, sin_ptr, first, T, stride, ROWS: tl.constexpr, D: tl.constexpr):
    """store_tile, with every row turned by the opposite of its position's angle; cos and sin are [T, D/2]."""
    HALF: tl.constexpr = D // 2
    x1, x2 = tl.split(tl.permute(tl.reshape(tile, [ROWS, 2, HALF]), (0, 2, 1)))
    row, pair = first + tl.arange(0, ROWS)[:, None], tl.arange(0, HALF)[None, :]
    cos = tl.load(cos_ptr + row * HALF + pair, mask=row < T, other=0.0)
    sin = tl.load(sin_ptr + row * HALF + pair, mask=row < T, other=0.0)
    pointers = ptr + row * tl.cast(stride, tl.int64) + pair
    tl.store(pointers, (x1 * cos + x2 * sin).to(ptr.dtype.element_ty), mask=row < T)
    tl.store(pointers + HALF, (x2 * cos - x1 * sin).to(ptr.dtype.element_ty), mask=row < T)


@triton.jit
def visible(first_query, first_key, QUERIES: tl.constexpr, KEYS: tl.constexpr):
    """Which keys of a tile [QUERIES, KEYS] of scores a query may see: itself and those before it."""
    return first_query + tl.arange(0, QUERIES)[:, None] >= first_key + tl.arange(0, KEYS)[None, :]


@triton.jit
def attend(
    o, highest, total, q, k_ptr, v_ptr, first, start, T, stride, scale,
    DIAGONAL: tl.constexpr, D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Take one tile of keys into the running sums of a tile of queries (online softmax)."""
    k = load_tile(k_ptr, start, T, stride, BLOCK_K, D)
    S = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if DIAGONAL:
        S = tl.where(visible(first, start, BLOCK_Q, BLOCK_K), S, -float("inf"))
    raised = tl.maximum(highest, tl.max(S, 1))
    P = tl.exp2(S * scale - (raised * scale)[:, None])
    shrink = tl.exp2((highest - raised) * scale)
    v = load_tile(v_ptr, start, T, stride, BLOCK_K, D)
    o = tl.dot(P.to(v.dtype), v, o * shrink[:, None], input_precision=PRECISION)
    return o, raised, total * shrink + tl.sum(P, 1)


@triton.jit
def attention_forward_kernel(
    qkv_ptr, o_ptr, lse_ptr, T, stride_b, stride_t, stride_o, scale,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One program computes BLOCK_Q rows of o for one head, walking the keys up to the diagonal."""
    first = (tl.num_programs(1) - 1 - tl.program_id(1)) * BLOCK_Q  # the longest walks start first
    b, h = (tl.program_id(0) // H).to(tl.int64), tl.program_id(0) % H
    q_ptr = qkv_ptr + b * stride_b + h * D
    k_ptr = qkv_ptr + b * stride_b + (H + h // (H // K)) * D
    v_ptr = k_ptr + K * D
    q = load_tile(q_ptr, first, T, stride_t, BLOCK_Q, D)
    o = tl.zeros([BLOCK_Q, D], tl.float32)
    highest = tl.full([BLOCK_Q], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_Q], tl.float32)
    for start in range(0, first, BLOCK_K):
        o, highest, total = attend(
            o, highest, total, q, k_ptr, v_ptr, first, start, T, stride_t, scale, False, D, BLOCK_Q, BLOCK_K, PRECISION
        )
    for start in range(first, min(first + BLOCK_Q, T), BLOCK_K):
        o, highest, total = attend(
            o, highest, total, q, k_ptr, v_ptr, first, start, T, stride_t, scale, True, D, BLOCK_Q, BLOCK_K, PRECISION
        )
    store_tile(o_ptr + b * T * stride_o + h * D, o / total[:, None], first, T, stride_o, BLOCK_Q, D)
    row = first + tl.arange(0, BLOCK_Q)
    lse_ptr += tl.program_id(0).to(tl.int64) * T
    tl.store(lse_ptr + row, highest * scale + tl.log2(total), mask=row < T)


@triton.jit
def dq_step(
    dq, q, do, lse, delta, k_ptr, v_ptr, first, start, T, stride, scale,
    DIAGONAL: tl.constexpr, D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add one tile of keys to dq [BLOCK_Q, D]."""
    k = load_tile(k_ptr, start, T, stride, BLOCK_K, D)
    v = load_tile(v_ptr, start, T, stride, BLOCK_K, D)
    S = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    P = tl.exp2(S * scale - lse[:, None])
    if DIAGONAL:
        P = tl.where(visible(first, start, BLOCK_Q, BLOCK_K), P, 0.0)
    dS = P * (tl.dot(do, tl.trans(v), input_precision=PRECISION) - delta[:, None])
    return tl.dot(dS.to(k.dtype), k, dq, input_precision=PRECISION)


@triton.jit
def attention_backward_dq_kernel(
    qkv_ptr, o_ptr, do_ptr, lse_ptr, delta_ptr, dqkv_ptr, cos_ptr, sin_ptr,
    T, stride_b, stride_t, stride_o, stride_db, stride_dt, scale,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One program computes BLOCK_Q rows of dq for one query head, and leaves their Δ for the other backward kernel.

    cos and sin may be None, in both backward kernels: then nothing is turned back.
    """
    first = (tl.num_programs(1) - 1 - tl.program_id(1)) * BLOCK_Q
    b, h = (tl.program_id(0) // H).to(tl.int64), tl.program_id(0) % H
    k_ptr = qkv_ptr + b * stride_b + (H + h // (H // K)) * D
    v_ptr = k_ptr + K * D
    q = load_tile(qkv_ptr + b * stride_b + h * D, first, T, stride_t, BLOCK_Q, D)
    do = load_tile(do_ptr + b * T * stride_o + h * D, first, T, stride_o, BLOCK_Q, D)
    o = load_tile(o_ptr + b * T * stride_o + h * D, first, T, stride_o, BLOCK_Q, D)
    row = first + tl.arange(0, BLOCK_Q)
    statistics = tl.program_id(0).to(tl.int64) * T + row
    delta = tl.sum(do.to(tl.float32) * o.to(tl.float32), 1)
    tl.store(delta_ptr + statistics, delta, mask=row < T)
    lse = tl.load(lse_ptr + statistics, mask=row < T, other=0.0)
    dq = tl.zeros([BLOCK_Q, D], tl.float32)
    for start in range(0, first, BLOCK_K):
        dq = dq_step(
            dq, q, do, lse, delta, k_ptr, v_ptr, first, start, T, stride_t, scale, False, D, BLOCK_Q, BLOCK_K, PRECISION
        )
    for start in range(first, min(first + BLOCK_Q, T), BLOCK_K):
        dq = dq_step(
            dq, q, do, lse, delta, k_ptr, v_ptr, first, start, T, stride_t, scale, True, D, BLOCK_Q, BLOCK_K, PRECISION
        )
    dq *= scale * 0.6931471805599453  # scale is log2(e) / sqrt(D), and the derivative wants 1 / sqrt(D)
    dq_ptr = dqkv_ptr + b * stride_db + h * D
    if cos_ptr is not None:
        store_turned_back(dq_ptr, dq, cos_ptr, sin_ptr, first, T, stride_dt, BLOCK_Q, D)
    else:
        store_tile(dq_ptr, dq, first, T, stride_dt, BLOCK_Q, D)


@triton.jit
def dkdv_step(
    dk, dv, k, v, q_ptr, do_ptr, lse_ptr, delta_ptr, first, start, T, stride, stride_o, scale,
    DIAGONAL: tl.constexpr, D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add one tile of queries to dk and dv [BLOCK_K, D]; scores are kept transposed, [BLOCK_K, BLOCK_Q]."""
    q = load_tile(q_ptr, start, T, stride, BLOCK_Q, D)
    do = load_tile(do_ptr, start, T, stride_o, BLOCK_Q, D)
    row = start + tl.arange(0, BLOCK_Q)
    lse = tl.load(lse_ptr + row, mask=row < T, other=0.0)
    delta = tl.load(delta_ptr + row, mask=row < T, other=0.0)
    P = tl.exp2(tl.dot(k, tl.trans(q), input_precision=PRECISION) * scale - lse[None, :])
    if DIAGONAL:
        P = tl.where(first + tl.arange(0, BLOCK_K)[:, None] <= row[None, :], P, 0.0)
    dv = tl.dot(P.to(do.dtype), do, dv, input_precision=PRECISION)
    dS = P * (tl.dot(v, tl.trans(do), input_precision=PRECISION) - delta[None, :])
    return tl.dot(dS.to(q.dtype), q, dk, input_precision=PRECISION), dv


@triton.jit
def attention_backward_dkdv_kernel(
    qkv_ptr, do_ptr, lse_ptr, delta_ptr, dqkv_ptr, cos_ptr, sin_ptr,
    T, stride_b, stride_t, stride_o, stride_db, stride_dt, scale,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One program owns BLOCK_K rows of dk and dv of one key/value head, so that nothing is added with atomics."""
    first = tl.program_id(1) * BLOCK_K
    b, kv = (tl.program_id(0) // K).to(tl.int64), tl.program_id(0) % K
    k_ptr = qkv_ptr + b * stride_b + (H + kv) * D
    k = load_tile(k_ptr, first, T, stride_t, BLOCK_K, D)
    v = load_tile(k_ptr + K * D, first, T, stride_t, BLOCK_K, D)
    dk = tl.zeros([BLOCK_K, D], tl.float32)
    dv = tl.zeros([BLOCK_K, D], tl.float32)
    for h in range(kv * (H // K), (kv + 1) * (H // K)):  # every query head that reads this key/value head
        q_ptr = qkv_ptr + b * stride_b + h * D
        o_offset = b * T * stride_o + h * D
        statistics = (b * H + h) * T
        for start in range(first, min(first + BLOCK_K, T), BLOCK_Q):
            dk, dv = dkdv_step(
                dk, dv, k, v, q_ptr, do_ptr + o_offset, lse_ptr + statistics, delta_ptr + statistics,
                first, start, T, stride_t, stride_o, scale, True, D, BLOCK_Q, BLOCK_K, PRECISION,
            )  # fmt: skip
        for start in range(first + BLOCK_K, T, BLOCK_Q):
            dk, dv = dkdv_step(
                dk, dv, k, v, q_ptr, do_ptr + o_offset, lse_ptr + statistics, delta_ptr + statistics,
                first, start, T, stride_t, stride_o, scale, False, D, BLOCK_Q, BLOCK_K, PRECISION,
            )  # fmt: skip
    dk_ptr = dqkv_ptr + b * stride_db + (H + kv) * D
    dk *= scale * 0.6931471805599453
    if cos_ptr is not None:
        store_turned_back(dk_ptr, dk, cos_ptr, sin_ptr, first, T, stride_dt, BLOCK_K, D)
    else:
        store_tile(dk_ptr, dk, first, T, stride_dt, BLOCK_K, D)
    store_tile(dk_ptr + K * D, dv, first, T, stride_dt, BLOCK_K, D)


# Queries, keys, warps and pipeline depth of the tiles of the forward, dq and dk/dv kernels: by family of GPUs, by the
# kind of product (16-bit, or the precision of float32 ones) and by head size up to 64 or up to 128. Those of sm_90 and
# D = 64 are measured; the others are large ones that compile without spilled registers, as far as there are any, and
# fit the shared memory (scripts/inspect_kernels.py shows both).
ATTENTION_TILES = {
    ("sm_90", "16-bit", 64): ((64, 64, 4, 2), (64, 64, 4, 3), (32, 64, 4, 3)),
    ("sm_90", "16-bit", 128): ((128, 64, 8, 3), (64, 64, 8, 2), (32, 64, 8, 2)),
    ("sm_90", "tf32", 64): ((64, 64, 4, 1), (64, 64, 4, 2), (32, 32, 4, 2)),
    ("sm_90", "tf32x3", 64): ((64, 64, 4, 1), (64, 64, 4, 1), (32, 32, 4, 1)),
    ("sm_100", "16-bit", 64): ((128, 64, 8, 2), (128, 64, 8, 3), (32, 128, 8, 3)),
    ("sm_100", "16-bit", 128): ((128, 64, 8, 3), (64, 64, 8, 2), (32, 64, 8, 2)),
    ("sm_100", "tf32", 64): ((64, 64, 4, 1), (64, 64, 4, 2), (32, 32, 4, 2)),
    ("sm_100", "tf32x3", 64): ((64, 64, 8, 1), (64, 64, 8, 1), (32, 32, 4, 1)),
    ("sm_80", "16-bit", 64): ((128, 64, 8, 3), (128, 64, 8, 3), (32, 64, 4, 2)),
    ("sm_80", "16-bit", 128): ((64, 32, 4, 2), (64, 32, 8, 1), (32, 64, 8, 1)),
    ("sm_80", "tf32", 64): ((64, 64, 4, 1), (128, 32, 8, 3), (32, 32, 4, 2)),
    ("sm_80", "tf32x3", 64): ((64, 16, 4, 2), (32, 32, 4, 2), (32, 32, 4, 2)),
    ("gfx9", "16-bit", 64): ((128, 64, 4, 2), (128, 64, 4, 1), (32, 128, 4, 1)),
    ("gfx9", "16-bit", 128): ((128, 32, 4, 2), (128, 32, 8, 1), (32, 128, 4, 1)),
    ("gfx9", "tf32", 64): ((64, 64, 4, 1), (64, 32, 4, 1), (32, 64, 4, 1)),
    ("gfx9", "ieee", 64): ((64, 64, 4, 1), (64, 32, 4, 1), (32, 64, 4, 1)),
    ("gfx9", "ieee", 128): ((32, 32, 4, 2), (32, 16, 4, 2), (16, 32, 4, 1)),
    ("gfx11", "16-bit", 64): ((64, 32, 4, 2), (64, 32, 8, 1), (16, 64, 16, 1)),
    ("gfx11", "16-bit", 128): ((64, 32, 8, 1), (32, 16, 4, 1), (16, 64, 16, 1)),
    ("gfx11", "ieee", 64): ((32, 16, 4, 1), (16, 16, 8, 1), (16, 16, 8, 1)),
}
SMALL_TILES = ((16, 16, 8, 1), (16, 16, 16, 1), (16, 32, 16, 1))  # for what the table does not name
LONG_FORWARD_TILE = (128, 64, 8, 3)  # sm_90, T > 1024: long walks pay for more queries a tile


def attention_tiles(architecture, head_dim, dtype, T, precision):
    """Tile sizes, warps and pipeline depth of the three attention kernels, by name of the kernel."""
    if architecture == "cpu":
        return dict.fromkeys(("forward", "dq", "dkdv"), {"BLOCK_Q": 64, "BLOCK_K": 64})
    if architecture.startswith("sm_"):
        family = architecture if architecture in ("sm_90", "sm_100") else "sm_80"
    else:
        family = "gfx9" if architecture.startswith("gfx9") else "gfx11"
    product = precision if dtype == torch.float32 else "16-bit"
    wide = 64 if head_dim <= 64 else 128
    forward, dq, dkdv = ATTENTION_TILES.get((family, product, wide), SMALL_TILES)
    if (family, product, wide) == ("sm_90", "16-bit", 64) and T > 1024:
        forward = LONG_FORWARD_TILE
    names = ("BLOCK_Q", "BLOCK_K", "num_warps", "num_stages")
    tiles = {"forward": forward, "dq": dq, "dkdv": dkdv}
    return {kernel: dict(zip(names, tile, strict=True)) for kernel, tile in tiles.items()}


def dot_precision(architecture, dtype):
    """How the kernels multiply float32: in TF32 where PyTorch's own products may, else exactly.

    NVIDIA's matrix units know no float32, but three TF32 products of the high and low parts are as exact as one in
    float32, and faster than the ordinary units are.
    """
    if dtype != torch.float32 or architecture == "cpu":
        return "ieee"
    allowed = torch.get_float32_matmul_precision() != "highest"
    if architecture.startswith("sm_") and int(architecture[3:]) >= 80:
        return "tf32" if allowed else "tf32x3"
    return "tf32" if allowed and architecture == "gfx942" else "ieee"


def attention_setting(qkv, H, K):
    """(tiles of the three kernels, the constants they share, scale)."""
    T, D = qkv.shape[1], qkv.shape[3]
    architecture = gpu_architecture(qkv.device)
    precision = dot_precision(architecture, qkv.dtype)
    shape = {"H": H, "K": K, "D": D, "PRECISION": precision}
    return attention_tiles(architecture, D, qkv.dtype, T, precision), shape, math.log2(math.e) / math.sqrt(D)


def attention_forward(qkv, H, K):
    """(o [B, T, H, D], lse [B, H, T] in units of log 2)."""
    B, T, _, D = qkv.shape
    tiles, shape, scale = attention_setting(qkv, H, K)
    o = torch.empty(B, T, H, D, dtype=qkv.dtype, device=qkv.device)
    lse = torch.empty(B, H, T, dtype=torch.float32, device=qkv.device)
    tile = tiles["forward"]
    attention_forward_kernel[(B * H, triton.cdiv(T, tile["BLOCK_Q"]))](
        qkv, o, lse, T, qkv.stride(0), qkv.stride(1), H * D, scale, **shape, **tile
    )
    return o, lse


def attention_backward(do, qkv, o, lse, K, cos=None, sin=None):
    """The gradient of qkv; with cos and sin of what the first heads were before they were turned."""
    B, T, H, D = o.shape
    tiles, shape, scale = attention_setting(qkv, H, K)
    do = do.contiguous()
    dqkv = torch.empty(qkv.shape, dtype=qkv.dtype, device=qkv.device)
    delta = torch.empty_like(lse)
    strides = (qkv.stride(0), qkv.stride(1), H * D, dqkv.stride(0), dqkv.stride(1))
    tile = tiles["dq"]
    attention_backward_dq_kernel[(B * H, triton.cdiv(T, tile["BLOCK_Q"]))](
        qkv, o, do, lse, delta, dqkv, cos, sin, T, *strides, scale, **shape, **tile
    )
    tile = tiles["dkdv"]
    attention_backward_dkdv_kernel[(B * K, triton.cdiv(T, tile["BLOCK_K"]))](
        qkv, do, lse, delta, dqkv, cos, sin, T, *strides, scale, **shape, **tile
    )
    return dqkv


class FlashAttentionFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, qkv, H, K):
        o, lse = attention_forward(qkv, H, K)
        ctx.save_for_backward(qkv, o, lse)
        ctx.K = K
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx, do):
        return attention_backward(do, *ctx.saved_tensors, ctx.K), None, None


def check_attention(name, qkv, H, K):
    check_kernel_input(name, qkv)
    if qkv.ndim != 4 or qkv.shape[3] not in HEAD_DIMS or K < 1 or H % K or qkv.shape[2] != H + 2 * K:
        raise ValueError(
            f"{name}: head_dim must be one of {HEAD_DIMS} and H = {H} a multiple of K = {K} "
            f"with H + 2K heads packed, not {tuple(qkv.shape)}"
        )


def flash_attention(qkv, H, K):
    """Causal attention of H query heads over K key/value heads, packed as qkv [B, T, H + 2K, D]; returns [B, T, H, D].

    D must be 16, 32, 64 or 128 and H a multiple of K. Batch and token strides are free, heads are contiguous.
    Memory grows linearly with T: the scores exist one tile at a time (Dao et al., FlashAttention, arXiv:2205.14135).
    """
    check_attention("flash_attention", qkv, H, K)
    # Inside a tile of up to 128 rows the kernels count in 32 bits.
    far_apart = 128 * qkv.stride(1) >= 2**31
    if qkv.stride(3) != 1 or qkv.stride(2) != qkv.shape[3] or 0 in qkv.stride() or far_apart:
        qkv = qkv.contiguous()
    return FlashAttentionFunction.apply(qkv, H, K)


class RotaryAttentionFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, qkv, cos, sin, H, K):
        with annotate("rope"):
            turned = turn(qkv, cos, sin, H + K, inverse=False)
        o, lse = attention_forward(turned, H, K)
        ctx.save_for_backward(turned, o, lse, cos, sin)
        ctx.K = K
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx, do):
        turned, o, lse, cos, sin = ctx.saved_tensors
        return attention_backward(do, turned, o, lse, ctx.K, cos, sin), None, None, None, None


def rotary_attention(qkv, cos, sin, H, K):
    """flash_attention(rope(qkv, cos, sin, H + K), H, K), with a pass over memory less in the backward.

    qkv [B, T, H + 2K, D] as flash_attention takes it, cos and sin float32 [T, D/2]; returns [B, T, H, D].
    """
    check_attention("rotary_attention", qkv, H, K)
    check_rope("rotary_attention", qkv, cos, sin)
    return RotaryAttentionFunction.apply(qkv.contiguous(), cos.contiguous(), sin.contiguous(), H, K)


# ---- cross-entropy, on the logits as they are
# forward    loss = mean over rows of logsumexp(x) - x[label];  logsumexp is kept as the row's maximum and the rest,
#            because their sum would round the rest away where logits are large
# backward   dx = (softmax(x) - onehot(label)) · dloss / rows


@triton.jit
def cross_entropy_forward_kernel(
    x_ptr, label_ptr, loss_ptr, highest_ptr, log_total_ptr, rows, V, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """One program computes ROWS losses from x [rows, V], walking the vocabulary in tiles of BLOCK."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    x_ptr += row.to(tl.int64)[:, None] * V
    highest = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    for start in range(0, V, BLOCK):
        column = start + tl.arange(0, BLOCK)[None, :]
        inside = (row[:, None] < rows) & (column < V)
        # Rows past the end read as zero: their sums stay finite, and nothing of them is stored.
        x = tl.load(x_ptr + column, mask=inside, other=0.0).to(tl.float32)
        x = tl.where(column < V, x, -float("inf"))
        raised = tl.maximum(highest, tl.max(x, 1))
        total = total * tl.exp(highest - raised) + tl.sum(tl.exp(x - raised[:, None]), 1)
        highest = raised
    log_total = tl.log(total)
    label = tl.load(label_ptr + row, mask=row < rows, other=0)
    picked = tl.load(x_ptr + label[:, None], mask=row[:, None] < rows, other=0.0).to(tl.float32)
    tl.store(highest_ptr + row, highest, mask=row < rows)
    tl.store(log_total_ptr + row, log_total, mask=row < rows)
    tl.store(loss_ptr + row, log_total - (tl.sum(picked, 1) - highest), mask=row < rows)


@triton.jit
def cross_entropy_backward_kernel(
    x_ptr, label_ptr, highest_ptr, log_total_ptr, dloss_ptr, dx_ptr, rows, V,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program computes a tile [ROWS, BLOCK] of dx [rows, V]."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = (row[:, None] < rows) & (column < V)
    offsets = row.to(tl.int64)[:, None] * V + column
    x = tl.load(x_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    highest = tl.load(highest_ptr + row, mask=row < rows, other=0.0)
    log_total = tl.load(log_total_ptr + row, mask=row < rows, other=0.0)
    label = tl.load(label_ptr + row, mask=row < rows, other=0)
    onehot = tl.where(column == label[:, None], 1.0, 0.0)
    dx = (tl.exp((x - highest[:, None]) - log_total[:, None]) - onehot) * (tl.load(dloss_ptr) / rows)
    tl.store(dx_ptr + offsets, dx.to(dx_ptr.dtype.element_ty), mask=inside)


class CrossEntropyFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, labels):
        rows, V = logits.shape
        loss = torch.empty(rows, dtype=torch.float32, device=logits.device)
        highest, log_total = torch.empty_like(loss), torch.empty_like(loss)
        tile = tile_of(V, gpu_architecture(logits.device))
        grid = (triton.cdiv(rows, tile["ROWS"]),)
        cross_entropy_forward_kernel[grid](logits, labels, loss, highest, log_total, rows, V, **tile)
        ctx.save_for_backward(logits, labels, highest, log_total)
        return loss.mean()

    @staticmethod
    @once_differentiable
    def backward(ctx, dloss):
        logits, labels, highest, log_total = ctx.saved_tensors
        rows, V = logits.shape
        dx = torch.empty_like(logits)
        tile = tile_of(V, gpu_architecture(logits.device))
        grid = (triton.cdiv(rows, tile["ROWS"]), triton.cdiv(V, tile["BLOCK"]))
        cross_entropy_backward_kernel[grid](logits, labels, highest, log_total, dloss, dx, rows, V, **tile)
        return dx, None


def cross_entropy(logits, labels):
    """Mean of logsumexp(logits) - logits[label] over all rows: logits [..., V], labels int64 [...] in 0 to V - 1."""
    check_kernel_input("cross_entropy", logits)
    if labels.shape != logits.shape[:-1] or labels.dtype != torch.int64 or labels.device != logits.device:
        raise ValueError(
            f"cross_entropy: labels must be int64 {tuple(logits.shape[:-1])} on {logits.device}, "
            f"not {labels.dtype} {tuple(labels.shape)} on {labels.device}"
        )
    return CrossEntropyFunction.apply(logits.flatten(0, -2).contiguous(), labels.flatten().contiguous())


# ---- AdamW for all parameters in one launch
# m = β₁ m + (1 - β₁) g,  v = β₂ v + (1 - β₂) g²,  w = (1 - lr · λ) w - lr · m̂ / (sqrt(v̂) + eps)
# What is trained is a float32 w, of which a 16-bit model computes with a rounded copy. bfloat16 is float32 without its
# lower 16 bits, so that beside such a copy only those are kept, as an integer to be added: bits of w = 2¹⁶ copy + rest.


def split_bits(w):
    """(w in bfloat16, rounded to the nearest and halves away from 0; int16 rest) of a float32 w: no bit is lost."""
    bits = w.contiguous().view(torch.int32)
    upper = torch.where(w.isnan(), BFLOAT16_NAN, (bits + 2**15) >> 16)
    return upper.to(torch.int16).view(torch.bfloat16), (bits - (upper << 16)).to(torch.int16)


def join_bits(copy, rest):
    """The float32 of which split_bits gave these two."""
    return ((copy.detach().view(torch.int16).to(torch.int32) << 16) + rest).view(torch.float32)


@triton.jit
def elements(row, column: tl.constexpr, offsets, DTYPE: tl.constexpr, shift=0):
    """Pointers into the tensor whose address that column of the table's row holds, on the GPU where the shift leads.

    16 divides all addresses and shifts.
    """
    return tl.multiple_of((tl.load(row + column) + shift).to(tl.pointer_type(DTYPE)), 16) + offsets


@triton.jit
def load_weight(row, offsets, inside, SPLIT: tl.constexpr):
    if SPLIT:
        copy = tl.load(elements(row, 0, offsets, tl.int16), mask=inside, other=0).to(tl.int32)
        rest = tl.load(elements(row, 1, offsets, tl.int16), mask=inside, other=0).to(tl.int32)
        return ((copy << 16) + rest).to(tl.float32, bitcast=True)
    else:
        return tl.load(elements(row, 1, offsets, tl.float32), mask=inside, other=0.0)


@triton.jit
def store_everywhere(row, offsets, inside, values, shift_ptr, DTYPE: tl.constexpr, PEERS: tl.constexpr):
    """Store values into the parameter, here and on every other GPU."""
    tl.store(elements(row, 0, offsets, DTYPE), values, mask=inside)
    for peer in tl.static_range(PEERS):
        tl.store(elements(row, 0, offsets, DTYPE, tl.load(shift_ptr + peer)), values, mask=inside)


@triton.jit
def store_weight(
    row, offsets, inside, w, shift_ptr,
    SPLIT: tl.constexpr, COPY: tl.constexpr, NAN: tl.constexpr, PEERS: tl.constexpr,
):  # fmt: skip
    if SPLIT:
        bits = w.to(tl.int32, bitcast=True)
        upper = tl.where(w == w, (bits + 0x8000) >> 16, NAN)
        store_everywhere(row, offsets, inside, upper.to(tl.int16), shift_ptr, tl.int16, PEERS)
        tl.store(elements(row, 1, offsets, tl.int16), (bits - (upper << 16)).to(tl.int16), mask=inside)
    elif COPY:
        store_everywhere(row, offsets, inside, w.to(tl.float16), shift_ptr, tl.float16, PEERS)
        tl.store(elements(row, 1, offsets, tl.float32), w, mask=inside)
    else:
        store_everywhere(row, offsets, inside, w, shift_ptr, tl.float32, PEERS)


@triton.jit
def adamw_kernel(
    table_ptr, chunk_ptr, power_ptr, grad_scale_ptr, found_inf_ptr, shift_ptr,
    lr, keep, beta1, fresh1, beta2, fresh2, eps,
    DTYPE: tl.constexpr, SPLIT: tl.constexpr, COPY: tl.constexpr, NAN: tl.constexpr, WIDE: tl.constexpr,
    PEERS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program updates BLOCK elements of one parameter of that DTYPE, on as many PEERS, other GPUs, as well.

    table [parameters, 6] holds the addresses of parameter, rest, m, v and gradient, and the element count; chunk
    [programs, 2] says which parameter and which part of it; power [2] is β₁ᵗ and β₂ᵗ in float64. keep = 1 - lr · λ and
    fresh = 1 - β come rounded once, from the host. A gradient scaler's pointers may be None.
    The rest is int16 where weights are SPLIT, else the float32 weight, of which COPY writes one in float16. NAN is the
    upper half of a float32 that is none. shift [PEERS] leads from an address here to the same tensor of each other GPU:
    the gradient is the mean over all.
    """
    row = table_ptr + tl.load(chunk_ptr + 2 * tl.program_id(0)) * 6
    offsets = tl.load(chunk_ptr + 2 * tl.program_id(0) + 1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    count = tl.load(row + 5)
    if found_inf_ptr is not None:  # a step whose scaled gradients overflowed changes nothing
        count = tl.where(tl.load(found_inf_ptr) == 0.0, count, 0)
    if WIDE:  # every count is a multiple of 16, which lets the masked loads be wide
        count = tl.multiple_of(count, 16)
    inside = offsets < count
    m_ptr, v_ptr = elements(row, 2, offsets, tl.float32), elements(row, 3, offsets, tl.float32)
    g = tl.load(elements(row, 4, offsets, DTYPE), mask=inside, other=0.0).to(tl.float32)
    for peer in tl.static_range(PEERS):
        theirs = elements(row, 4, offsets, DTYPE, tl.load(shift_ptr + peer))
        g += tl.load(theirs, mask=inside, other=0.0).to(tl.float32)
    if PEERS:
        g = g / (PEERS + 1)
    if grad_scale_ptr is not None:
        g = g / tl.load(grad_scale_ptr)
    m = beta1 * tl.load(m_ptr, mask=inside, other=0.0) + fresh1 * g
    v = beta2 * tl.load(v_ptr, mask=inside, other=0.0) + fresh2 * g * g
    m_hat = m / (1 - tl.load(power_ptr)).to(tl.float32)
    v_hat = v / (1 - tl.load(power_ptr + 1)).to(tl.float32)
    w = keep * load_weight(row, offsets, inside, SPLIT) - lr * m_hat / (tl.sqrt(v_hat) + eps)
    store_weight(row, offsets, inside, w, shift_ptr, SPLIT, COPY, NAN, PEERS)
    tl.store(m_ptr, m, mask=inside)
    tl.store(v_ptr, v, mask=inside)


class FusedAdamW(torch.optim.Optimizer):
    """AdamW (Loshchilov and Hutter, arXiv:1711.05101) that reads and writes every tensor once.

    A 16-bit parameter comes with its float32 weight as `master`, which is what is trained; the parameter is its rounded
    copy. Works with torch.amp.GradScaler without waiting for the GPU, and inside a captured graph. Where gradients lie
    in DDP's buckets, which stay, zero_grad leaves each parameter its `gradient_place` there.

    With peers, a PeerMemory, all processes must take each step together. Each updates its share of all parameters by
    the mean of all gradients, and writes the new weights to all (ZeRO-1: Rajbhandari et al., arXiv:1910.02054).
    """

    BLOCK = 1024
    _step_supports_amp_scaling = True

    def __init__(self, params, lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01, in_buckets=False, peers=None):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        parameters = [p for group in self.param_groups for p in group["params"]]
        self.rests = {}  # of 16-bit parameters: what each lacks of its weight, or the weight itself beside float16
        for p in parameters:
            if p.dtype != torch.float32:
                weight = p.master
                self.rests[p] = torch.empty_like(weight, dtype=torch.int16) if p.dtype == torch.bfloat16 else weight
                self.set_weight(p, weight)
                del p.master
        device = parameters[0].device
        self.count = torch.zeros((), dtype=torch.float64, device=device)
        for p in parameters:
            moments = (torch.zeros(p.shape, dtype=torch.float32, device=device) for _ in range(2))
            self.state[p] = dict(zip(("step", "exp_avg", "exp_avg_sq"), (self.count, *moments), strict=True))
        self.betas = [torch.tensor(group["betas"], dtype=torch.float64, device=device) for group in self.param_groups]
        self.chunks, self.spare_tables, self.captured_tables = {}, [], []
        self.in_buckets, self.peers = in_buckets, peers

    def exact_weight(self, parameter):
        if parameter.dtype == torch.bfloat16:
            return join_bits(parameter, self.rests[parameter])
        return self.rests.get(parameter, parameter)

    @torch.no_grad()
    def set_weight(self, parameter, weight):
        copy, rest = split_bits(weight) if parameter.dtype == torch.bfloat16 else (weight, weight)
        parameter.copy_(copy)
        if parameter in self.rests:
            self.rests[parameter].copy_(rest)

    def zero_grad(self, set_to_none=True):
        if self.in_buckets:
            for p in self.state:
                p.gradient_place = p.grad
        super().zero_grad(set_to_none)

    @torch.no_grad()
    def step(self, closure=None):
        found_inf, grad_scale = getattr(self, "found_inf", None), getattr(self, "grad_scale", None)
        if self.peers:
            self.peers.put_gradients(self.state)
            self.peers.barrier()  # all gradients are there
        self.count += 1 if found_inf is None else 1 - found_inf.reshape(())
        for group, betas in zip(self.param_groups, self.betas, strict=True):
            of_dtypes = self.by_dtype(group)
            trained = [p for parameters in of_dtypes for p in parameters]
            gradients = [p.grad.contiguous() for p in trained]
            gradients = [g if g.data_ptr() % 16 == 0 else g.clone() for g in gradients]  # views may start anywhere
            powers, rows = betas**self.count, self.address_table(trained, gradients)  # in one copy to the GPU
            first = 0
            for parameters in of_dtypes:
                self.update(group, parameters, rows[first:], powers, grad_scale, found_inf)
                first += len(parameters)
        if self.peers:
            self.peers.barrier()  # all gradients are read, and all weights written

    def by_dtype(self, group):
        """Lists of the group's parameters that have a gradient, those of one dtype together."""
        trained = sorted((p for p in group["params"] if p.grad is not None), key=lambda p: str(p.dtype))
        return [list(alike) for _, alike in itertools.groupby(trained, lambda p: p.dtype)]

    def update(self, group, parameters, table, powers, grad_scale, found_inf):
        """One launch for parameters of one dtype, whose addresses are the first rows of the table."""
        device, dtype = parameters[0].device, parameters[0].dtype
        lr, (beta1, beta2) = group["lr"], group["betas"]
        chunks = self.chunk_table(parameters, device)
        if not len(chunks):  # of small parameters there is no share for each of many processes
            return
        adamw_kernel[(len(chunks),)](
            table, chunks, powers, grad_scale, found_inf, self.peers and self.peers.shifts,
            lr, 1 - lr * group["weight_decay"], beta1, 1 - beta1, beta2, 1 - beta2, group["eps"],
            TRITON_DTYPES[dtype], dtype == torch.bfloat16, dtype == torch.float16, BFLOAT16_NAN,
            all(p.numel() % 16 == 0 for p in parameters), len(self.peers.shifts) if self.peers else 0, self.BLOCK,
        )  # fmt: skip

    def chunk_table(self, parameters, device):
        """int32 [programs, 2]: which parameter, and which BLOCK of it, a program updates."""
        key = tuple(map(id, parameters))
        if key not in self.chunks:
            self.chunks[key] = torch.tensor(self.share(parameters), dtype=torch.int32).view(-1, 2).to(device)
        return self.chunks[key]

    def share(self, parameters):
        """[(parameter, which BLOCK of it), ...] that this process updates: all of them, or with peers an equal part."""
        chunks = [(i, c) for i, p in enumerate(parameters) for c in range(triton.cdiv(p.numel(), self.BLOCK))]
        if not self.peers:
            return chunks
        rank, processes, count = self.peers.rank, self.peers.processes, len(chunks)
        return chunks[rank * count // processes : (rank + 1) * count // processes]

    @torch.no_grad()
    def gather_state(self):
        """Make weights and moments whole in every process where each has updated its share; all must ask together."""
        if not self.peers:
            return
        for parameters in [alike for group in self.param_groups for alike in self.by_dtype(group)]:
            blocks = {i: [c for _, c in mine] for i, mine in itertools.groupby(self.share(parameters), lambda x: x[0])}
            for i, p in enumerate(parameters):
                own = slice(blocks[i][0] * self.BLOCK, (blocks[i][-1] + 1) * self.BLOCK) if i in blocks else slice(0)
                for tensor in (self.rests.get(p), self.state[p]["exp_avg"], self.state[p]["exp_avg_sq"]):
                    if tensor is not None:
                        self.peers.join(tensor.view(-1), own)

    def address_table(self, parameters, gradients):
        """int64 [parameters, 6]: addresses of parameter, rest, m, v and gradient, and the number of elements."""
        rows = []
        for p, gradient in zip(parameters, gradients, strict=True):
            state = self.state[p]
            tensors = (p, self.rests.get(p, p), state["exp_avg"], state["exp_avg_sq"], gradient)
            rows.append([*(t.data_ptr() for t in tensors), p.numel()])
        rows, device = torch.tensor(rows, dtype=torch.int64).view(-1, 6), self.count.device
        if device.type == "cpu":
            return rows
        if not torch.cuda.is_current_stream_capturing():
            # A capture cannot allocate the pinned memory that its copy reads at every replay: keep some at hand.
            while len(self.spare_tables) < len(self.param_groups):
                self.spare_tables.append(torch.empty(len(self.state), 6, dtype=torch.int64, pin_memory=True))
            return rows.to(device)
        pinned = self.spare_tables.pop()[: len(rows)].copy_(rows)
        self.captured_tables.append(pinned)
        return pinned.to(device, non_blocking=True)


# ---- memory of all GPUs of a host, which AdamW reads gradients from and writes weights to


class PeerMemory:
    """Weights and gradients of a model in memory that all GPUs of a host reach, laid out alike in each process.

    A parameter moves there, and gets a `gradient_place` there. shifts, int64 [processes - 1], lead from an address here
    to the same place in each other process. It is PyTorch's symmetric memory; who waits too long for another one ends.
    """

    def __init__(self, model, device):
        from torch.distributed import _symmetric_memory as symmetric_memory

        self.processes, self.rank = dist.get_world_size(), dist.get_rank()
        parameters = list(model.parameters())
        sizes = [-(-p.nbytes // 256) * 256 for p in parameters for _ in ("weight", "gradient")]
        try:
            self.memory = symmetric_memory.empty(sum(sizes), dtype=torch.uint8, device=device)
            self.shared = symmetric_memory.rendezvous(self.memory, dist.group.WORLD)
        except RuntimeError as error:
            said = str(error).splitlines()[0]
            raise Refusal(f"these GPUs do not share their memory: leave out --peer-adamw ({said})") from error
        places = iter(self.memory.split(sizes))
        for p in parameters:
            weight, p.gradient_place = (next(places)[: p.nbytes].view(p.dtype).view(p.shape) for _ in range(2))
            p.data = weight.copy_(p.data)
        starts = [self.shared.get_buffer(r, (1,), torch.uint8).data_ptr() for r in range(self.processes)]
        others = [(self.rank + i) % self.processes for i in range(1, self.processes)]  # not all begin with the same one
        self.shifts = torch.tensor([starts[r] - starts[self.rank] for r in others], dtype=torch.int64, device=device)

    def put_gradients(self, parameters):
        """Bring the gradients into this memory that autograd has put elsewhere."""
        away = [p for p in parameters if p.grad is not None and p.grad.data_ptr() != p.gradient_place.data_ptr()]
        if away:
            torch._foreach_copy_([p.gradient_place for p in away], [p.grad for p in away])
        for p in away:
            p.grad = p.gradient_place

    def barrier(self):
        self.shared.barrier(0, int(1000 * PATIENCE.total_seconds()))

    def join(self, flat, own):
        """Fill flat [n], of which a slice is this process's own, with what is the other processes'."""
        kept = flat[own].clone()
        flat.zero_()
        flat[own] = kept
        dist.all_reduce(flat.view(torch.uint8))  # as bytes, which are 0 in all processes but one


# ---- token embedding
# forward    x = w[token]
# backward   dw = onehot(token)ᵀ dx: for a small vocabulary a product is faster than adding up rows one by one, and it
#            adds them in the same order every time


class EmbeddingFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tokens, w):
        ctx.save_for_backward(tokens)
        ctx.words = w.shape[0]
        return F.embedding(tokens, w)

    @staticmethod
    @once_differentiable
    def backward(ctx, dx):
        tokens = ctx.saved_tensors[0].flatten()
        onehot = dx.new_zeros(tokens.numel(), ctx.words).scatter_(1, tokens[:, None], 1)
        return None, onehot.t() @ dx.flatten(0, -2)


def embed(tokens, w):
    """w[tokens] for int64 tokens [...] and w [V, C]; returns [..., C]."""
    return EmbeddingFunction.apply(tokens, w) if w.shape[0] <= PRODUCT_WORDS else F.embedding(tokens, w)


# ---- linear layer
# forward    y = x wᵀ
# backward   dx = dy w,  dw = dyᵀ x, which is written right into the bucket that DDP sends: it need not be copied there


class LinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        ctx.w = w  # as the parameter that it is, with its place
        return F.linear(x, w)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, w = ctx.saved_tensors
        # A new view each time: autograd keeps a gradient as it is only where nobody else holds it.
        place = ctx.w.gradient_place.detach() if ctx.w.grad is None else None
        return dy @ w, torch.mm(dy.flatten(0, -2).t(), x.flatten(0, -2), out=place)


class Linear(nn.Linear):
    """nn.Linear without a bias, used once in a forward; its weight's gradient goes where the optimizer says."""

    def __init__(self, in_features, out_features):
        super().__init__(in_features, out_features, bias=False)

    def forward(self, x):
        if getattr(self.weight, "gradient_place", None) is None:
            return super().forward(x)
        return LinearFunction.apply(x, self.weight)


# ---------------------------------------------------------------- model


class Attention(nn.Module):
    """Causal self-attention with grouped queries: H query heads read K key/value heads."""

    def __init__(self, config, options):
        super().__init__()
        C, D = config.hidden_dim, config.head_dim
        self.heads = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
        self.head_dim = D
        self.qkv_proj = Linear(C, sum(self.heads) * D)
        self.o_proj = Linear(config.num_heads * D, C)
        self.rope_kernel, self.attention_kernel = options.enable_rope_kernel, options.enable_attention_kernel

    def turn(self, qkv, cos, sin):
        H, K, _ = self.heads
        if self.rope_kernel:
            return rope(qkv, cos, sin, H + K)
        query, key, value = qkv.split(self.heads, dim=2)
        return torch.cat([apply_rope(query, cos, sin), apply_rope(key, cos, sin), value], dim=2)

    def attend(self, qkv, cos, sin):
        H, K, _ = self.heads
        if self.rope_kernel and self.attention_kernel:
            with annotate("attention"):
                return rotary_attention(qkv, cos, sin, H, K)
        with annotate("rope"):
            qkv = self.turn(qkv, cos, sin)
        with annotate("attention"):
            split = self.heads
            return flash_attention(qkv, H, K) if self.attention_kernel else causal_attention(*qkv.split(split, dim=2))

    def forward(self, x, cos, sin):
        with annotate("qkv projection"):
            qkv = self.qkv_proj(x).unflatten(-1, (-1, self.head_dim))
        mixed = self.attend(qkv, cos, sin)
        with annotate("output projection"):
            return self.o_proj(mixed.flatten(-2))


class FeedForward(nn.Module):
    """down(silu(gate(x)) · up(x))."""

    def __init__(self, config, options):
        super().__init__()
        self.gate_up_proj = Linear(config.hidden_dim, 2 * config.intermediate_dim)
        self.down_proj = Linear(config.intermediate_dim, config.hidden_dim)
        self.swiglu_kernel = options.enable_swiglu_kernel

    def forward(self, x):
        with annotate("feed-forward"):
            gate_up = self.gate_up_proj(x)
            y = packed_swiglu(gate_up) if self.swiglu_kernel else swiglu(*gate_up.chunk(2, dim=-1))
            return self.down_proj(y)


class AddRMSNorm(nn.Module):
    """The residual addition and the norm behind it: returns x = residual + branch, and norm(x)."""

    def __init__(self, config, options):
        super().__init__()
        self.eps = config.norm_eps
        self.weight = nn.Parameter(torch.ones(config.hidden_dim))
        self.kernel = options.enable_rmsnorm_kernel

    def forward(self, residual, branch):
        with annotate("rms norm"):
            if self.kernel:
                return add_rms_norm(residual, branch, self.weight, self.eps)
            x = residual if branch is None else residual + branch
            return x, rms_norm(x, self.weight, self.eps)


class Block(nn.Module):
    """Takes and returns the residual stream as a sum still to be taken: the next norm adds it on its way."""

    def __init__(self, config, options):
        super().__init__()
        self.attention_norm = AddRMSNorm(config, options)
        self.attention = Attention(config, options)
        self.feed_forward_norm = AddRMSNorm(config, options)
        self.feed_forward = FeedForward(config, options)

    def forward(self, residual, branch, cos, sin):
        residual, x = self.attention_norm(residual, branch)
        residual, x = self.feed_forward_norm(residual, self.attention(x, cos, sin))
        return residual, self.feed_forward(x)


class TinyLlama(nn.Module):
    """Tokens [B, T] to logits [B, T, V]; the output projection is the token embedding."""

    def __init__(self, config, options):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_dim)
        self.layers = nn.ModuleList(Block(config, options) for _ in range(config.num_layers))
        self.norm = AddRMSNorm(config, options)
        cos, sin = rope_tables(options.seq_len, config.head_dim, config.rope_theta, options.device)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, tokens):
        T = tokens.shape[1]
        with annotate("embedding"):
            residual, branch = embed(tokens, self.embed_tokens.weight), None
        for layer in self.layers:
            residual, branch = layer(residual, branch, self.cos[:T], self.sin[:T])
        with annotate("output head"):
            return F.linear(self.norm(residual, branch)[1], self.embed_tokens.weight)


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
    """The model with its initial weights on the device; with --use-amp its matrices are 16-bit.

    FSDP2 keeps the float32 weights itself, and gathers them as 16-bit ones.
    """
    config = model_config(options)
    with torch.device(device):
        model = TinyLlama(config, options)
    with torch.no_grad():
        weights = initial_weights(config, options.seed)
        for name, view in canonical_views(dict(model.named_parameters()), config).items():
            view.copy_(weights[name])
    if options.use_amp and options.parallel != "fsdp":
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.master = parameter.detach().clone()
                parameter.data = parameter.data.to(matrix_dtype(options))
    return model


def matrix_dtype(options):
    """Dtype of the weight matrices; the float32 weights beside 16-bit ones are what is trained."""
    return getattr(torch, options.amp_dtype) if options.use_amp else torch.float32


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
    if options.enable_optimizer_kernel:
        peers = PeerMemory(model, torch.device(options.device)) if options.peer_adamw else None
        in_buckets = options.parallel == "ddp"
        return FusedAdamW(model.parameters(), options.learning_rate, in_buckets=in_buckets, peers=peers)
    capturable = options.graph and torch.device(options.device).type == "cuda"
    return torch.optim.AdamW(model.parameters(), lr=options.learning_rate, capturable=capturable)


def mean_loss(logits, labels):
    """Mean cross-entropy of logits [B, T, V] against labels [B, T], computed in float32."""
    return F.cross_entropy(at_least_float32(logits).flatten(0, 1), labels.flatten())


def compute_loss(model, tokens, labels, options):
    """Mean cross-entropy of predicting labels [B, T] from tokens [B, T]."""
    logits = model(tokens)
    with annotate("loss"):
        if options.enable_loss_kernel:
            return cross_entropy(logits, labels)
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
