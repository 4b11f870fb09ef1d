"""Time each of version 3's kernels alone, beside PyTorch's own operators and beside what the device can do at most.

    python scripts/maintain/benchmark_kernels.py                          # all, on the GPU, in bfloat16
    python scripts/maintain/benchmark_kernels.py --only attention --json kernels.json
    python scripts/maintain/benchmark_kernels.py --device cpu             # toy sizes: shows that it runs, nothing else

Element-wise kernels are held against the bandwidth of a large copy (bytes read and written), attention against the
rate of an 8192 x 8192 x 8192 matrix product of the same type. Tensors of 64 MB and more take turns so that together
they exceed twice the last cache. Calls are captured into a graph where the device has graphs, and device events time
its replays; the candidates of an operation take turns. Bytes are those that the operation cannot do without, FLOPs
those of the causal half.

Exit status: 0; 1 where one of version 3's kernels failed; 2 for a bad option.
"""

import argparse
import collections
import functools
import json
import math
import os
import pathlib
import sys
import time
import warnings
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention import sdpa_kernel

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from common.versions import load_version

EPS = 1e-6
PASSES, REPLAYS = 3, 7  # of each candidate, turn by turn
LEAST_MS = 2.0  # of one timed replay, so that the gap between two of them does not count
SIZES = {
    "cuda": {
        "rows": 65536, "width": 1024, "tokens": 32768, "heads": (16, 8, 64), "swiglu_rows": 16384, "feed_forward": 4096,
        "vocabulary": 1000, "parameters": [(8192, 1024)] * 16, "attention": [(16, 512), (4, 2048), (1, 8192)],
        "copy": 2**28, "product": 8192,
    },
    "cpu": {
        "rows": 32, "width": 32, "tokens": 16, "heads": (2, 1, 16), "swiglu_rows": 16, "feed_forward": 32,
        "vocabulary": 40, "parameters": [(16, 32)] * 2, "attention": [(1, 32)],
        "copy": 2**14, "product": 64,
    },
}  # fmt: skip


class Operation(NamedTuple):
    """What the candidates compute, and what it takes: work is bytes (unit GB/s) or FLOPs (unit TFLOP/s)."""

    name: str
    size: str
    unit: str
    work: dict[str, float]  # of each candidate
    sets: list  # inputs that take turns
    candidates: dict[str, Any]  # name -> function of a set
    once: bool = False  # a graph can hold one call, no more


def operation(name, size, unit, work, sets, candidates, **more):
    """An operation whose candidates all do the same work."""
    return Operation(name, size, unit, dict.fromkeys(candidates, work), sets, candidates, **more)


class Bench:
    """Device, type, sizes and random tensors."""

    def __init__(self, device, dtype):
        self.device, self.dtype = device, dtype
        self.v3, self.v4 = load_version(3), load_version(4)
        self.sizes = SIZES[device.type]

    def tensor(self, *shape, grad=False, dtype=None):
        return torch.randn(shape, device=self.device, dtype=dtype or self.dtype).requires_grad_(grad)

    def sets(self, make, used=1.0):
        """At least two sets of inputs, of which the used share exceeds twice the last cache."""
        sets = [make()]
        size = used * sum(t.numel() * t.element_size() for t in sets[0].values())
        count = 2 if self.device.type == "cpu" else max(2, math.ceil(2 * self.cache_bytes() / size))
        return sets + [make() for _ in range(count - 1)]

    def cache_bytes(self):
        cache = torch.cuda.get_device_properties(self.device).L2_cache_size
        return max(cache, 2**28) if torch.version.hip else cache  # AMD's last cache lies behind its L2


def backward_of(forward, leaves, gradients):
    """A function of a set: the backward of forward(set), whose result is kept from its first call on."""
    outputs = {}

    def backward(s):
        if id(s) not in outputs:
            outputs[id(s)] = forward(s)
        return torch.autograd.grad(outputs[id(s)], leaves(s), gradients(s), retain_graph=True)

    return backward


# ---- the operations


def norm_operations(bench, residual):
    """RMSNorm forward and backward, with or without the residual addition."""
    rows, C = bench.sizes["rows"], bench.sizes["width"]
    names = ["x", "branch"] if residual else ["x"]

    def make():
        s = {name: bench.tensor(rows, C, grad=True) for name in names}
        s["w"] = bench.tensor(C, grad=True, dtype=torch.float32)
        s["w16"] = s["w"].detach().to(bench.dtype).requires_grad_()
        return s | {name: bench.tensor(rows, C) for name in ("dx", "dy")[not residual :]}

    def ours(s):
        x, y = bench.v3.add_rms_norm(s["x"], s.get("branch"), s["w"], EPS)
        return (x, y) if residual else (y,)

    def pytorch(s):
        x = s["x"] + s["branch"] if residual else s["x"]
        y = F.rms_norm(x, (C,), s["w16"], EPS)
        return (x, y) if residual else (y,)

    def leaves(s, weight):
        return [*(s[name] for name in names), s[weight]]

    def gradients(s):
        return [s["dx"], s["dy"]] if residual else [s["dy"]]

    name, size = "RMSNorm + residual" if residual else "RMSNorm", f"{rows} x {C}"
    tensor = rows * C * bench.dtype.itemsize
    sets = bench.sets(make)
    forward = {"V3": ours, "PyTorch": pytorch}
    backward = {
        "V3": backward_of(ours, functools.partial(leaves, weight="w"), gradients),
        "PyTorch": backward_of(pytorch, functools.partial(leaves, weight="w16"), gradients),
    }
    yield operation(f"{name} forward", size, "GB/s", (4 if residual else 2) * tensor, sets, forward)
    yield operation(f"{name} backward", size, "GB/s", (4 if residual else 3) * tensor, sets, backward)


def rope_operations(bench):
    """Rotary embedding of packed queries, keys and values [B, T, H + 2K, D]."""
    v3, (H, K, D), T = bench.v3, bench.sizes["heads"], min(512, bench.sizes["tokens"])
    shape = (bench.sizes["tokens"] // T, T, H + 2 * K, D)
    cos, sin = v3.rope_tables(T, D, 10000.0, bench.device)

    def ours(s):
        return v3.rope(s["x"], cos, sin, H + K)

    def pytorch(s):
        turned, value = s["x"].split([H + K, K], dim=2)
        return torch.cat([v3.apply_rope(turned, cos, sin), value], dim=2)

    sets = bench.sets(lambda: {"x": bench.tensor(*shape, grad=True), "dy": bench.tensor(*shape)})
    size, work = " x ".join(map(str, shape)), 2 * math.prod(shape) * bench.dtype.itemsize
    forward = {"V3": ours, "PyTorch": pytorch}
    backward = {name: backward_of(way, lambda s: [s["x"]], lambda s: [s["dy"]]) for name, way in forward.items()}
    yield operation("RoPE forward", size, "GB/s", work, sets, forward)
    yield operation("RoPE backward", size, "GB/s", work, sets, backward)


def swiglu_operations(bench):
    v3, rows, width = bench.v3, bench.sizes["swiglu_rows"], bench.sizes["feed_forward"]

    def pytorch(s):
        gate, up = s["x"].chunk(2, dim=-1)
        return F.silu(gate) * up

    sets = bench.sets(lambda: {"x": bench.tensor(rows, 2 * width, grad=True), "dy": bench.tensor(rows, width)})
    size, tensor = f"{rows} x {width}", rows * width * bench.dtype.itemsize
    forward = {"V3": lambda s: v3.packed_swiglu(s["x"]), "PyTorch": pytorch}
    backward = {name: backward_of(way, lambda s: [s["x"]], lambda s: [s["dy"]]) for name, way in forward.items()}
    yield operation("SwiGLU forward", size, "GB/s", 3 * tensor, sets, forward)
    yield operation("SwiGLU backward", size, "GB/s", 5 * tensor, sets, backward)


def loss_operations(bench):
    rows, V = bench.sizes["rows"], bench.sizes["vocabulary"]

    def make():
        labels = torch.randint(0, V, (rows,), device=bench.device)
        return {"x": bench.tensor(rows, V, grad=True), "labels": labels}

    forward = {
        "V3": lambda s: bench.v3.cross_entropy(s["x"], s["labels"]),
        "PyTorch": lambda s: F.cross_entropy(s["x"], s["labels"]),
    }
    backward = {name: backward_of(way, lambda s: [s["x"]], lambda s: None) for name, way in forward.items()}
    size, tensor, sets = f"{rows} x {V}", rows * V * bench.dtype.itemsize, bench.sets(make)
    yield operation("cross-entropy forward", size, "GB/s", tensor, sets, forward)
    yield operation("cross-entropy backward", size, "GB/s", 2 * tensor, sets, backward)


def optimizer_operations(bench):
    """A step of AdamW: weight, two moments and gradient in float32; the parameters exceed any cache."""
    shapes = bench.sizes["parameters"]

    def parameters():
        made = [torch.nn.Parameter(bench.tensor(*shape, dtype=torch.float32)) for shape in shapes]
        for p in made:
            p.grad = torch.randn_like(p)
        return made

    ours = bench.v3.FusedAdamW(parameters(), lr=1e-3)
    pytorch = torch.optim.AdamW(parameters(), lr=1e-3, fused=True, capturable=bench.device.type == "cuda")
    count = sum(math.prod(shape) for shape in shapes)
    candidates = {"V3": lambda s: ours.step(), "PyTorch": lambda s: pytorch.step()}
    yield operation("AdamW, float32", f"{count:,} parameters", "GB/s", 28 * count, [{}], candidates, once=True)


def attention_operations(bench, batch_size, seq_len):
    """Causal attention of grouped queries: packed for version 3, and each SDPA backend on tensors of their own."""
    H, K, D = bench.sizes["heads"]

    def make():
        shapes = {"qkv": H + 2 * K, "q": H, "k": K, "v": K}
        s = {name: bench.tensor(batch_size, seq_len, heads, D, grad=True) for name, heads in shapes.items()}
        return s | {"do": bench.tensor(batch_size, seq_len, H, D)}

    def ours(s):
        return bench.v3.flash_attention(s["qkv"], H, K)

    def sdpa(s, backend):
        q, k, v = (s[name].transpose(1, 2) for name in "qkv")
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)

    def with_backward(function, leaves):
        return lambda s: torch.autograd.grad(function(s), [s[name] for name in leaves], s["do"])

    forward, both = {"V3": ours}, {"V3": with_backward(ours, ["qkv"])}
    for name, backend in bench.v4.SDPA_BACKENDS.items():
        forward[f"SDPA {name}"] = functools.partial(sdpa, backend=backend)
        both[f"SDPA {name}"] = with_backward(forward[f"SDPA {name}"], ["q", "k", "v"])
    size = f"batch {batch_size}, {seq_len} tokens, {H} / {K} heads of {D}"
    product = batch_size * H * seq_len**2 * D  # a multiply-add counted as two, half of the square needed
    sets = bench.sets(make, used=0.5)
    yield operation("attention forward", size, "TFLOP/s", 2 * product, sets, forward)
    yield operation("attention forward + backward", size, "TFLOP/s", 7 * product, sets, both)


def all_operations(bench):
    """Name -> generator function of its operations, so that one's tensors are gone before the next one's are made."""
    return {
        "rmsnorm": [functools.partial(norm_operations, bench, residual) for residual in (False, True)],
        "rope": [functools.partial(rope_operations, bench)],
        "swiglu": [functools.partial(swiglu_operations, bench)],
        "loss": [functools.partial(loss_operations, bench)],
        "optimizer": [functools.partial(optimizer_operations, bench)],
        "attention": [functools.partial(attention_operations, bench, *shape) for shape in bench.sizes["attention"]],
    }


# ---- timing


class Timed:
    """A candidate made ready: calls in a graph, or launched one by one, timed in microseconds a call."""

    def __init__(self, function, sets, device, once):
        self.device, self.graph, self.reason = device, None, None
        self.function, self.sets, self.calls = function, sets, len(sets)
        for s in sets:  # compiles, allocates, and leaves the forward that a backward needs
            function(s)
        self.peak_mb, self.times_us = self.peak_of_a_call(), []
        if device.type == "cuda":
            self.capture()
            turns = math.ceil(LEAST_MS / self.replay_times(2)[-1])
            if turns > 1 and not once:
                self.calls *= turns
                self.capture()

    def peak_of_a_call(self):
        """MiB that a call holds at most beyond what there was before it; None on a CPU."""
        if self.device.type == "cpu":
            return None
        torch.cuda.synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        self.function(self.sets[0])
        return (torch.cuda.max_memory_allocated(self.device) - before) / 2**20

    def run_all(self):
        """All calls; the results of the last turn are kept, so that results take turns like inputs do."""
        kept = collections.deque(maxlen=len(self.sets))
        for call in range(self.calls):
            kept.append(self.function(self.sets[call % len(self.sets)]))

    def capture(self):
        if self.reason:
            return
        self.graph, graph = None, torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
                self.run_all()
            self.graph = graph
        except RuntimeError as error:
            self.reason = f"not captured: {str(error).splitlines()[0]}"

    def replay_times(self, count):
        """Milliseconds of each of so many replays, queued so that the device never waits for the host."""
        if self.device.type == "cpu":
            start = time.perf_counter()
            self.run_all()
            return [1000 * (time.perf_counter() - start)]
        events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        events[0].record()
        for event in events[1:]:
            self.graph.replay() if self.graph else self.run_all()
            event.record()
        torch.cuda.synchronize(self.device)
        return [start.elapsed_time(end) for start, end in zip(events, events[1:], strict=False)]

    def measure(self):
        """One turn; its first replay, before which the device was idle, does not count."""
        times = self.replay_times(REPLAYS + 1)
        self.times_us += [1000 * t / self.calls for t in (times[1:] or times)]


def prepare(bench, operation):
    """Name -> Timed or the reason why the candidate cannot run."""
    ready = {}
    for name, function in operation.candidates.items():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # PyTorch warns of each reason why an SDPA backend refuses
                ready[name] = Timed(function, operation.sets, bench.device, operation.once)
        except (RuntimeError, bench.v3.triton.TritonError) as error:  # refused, short of memory, not compiled
            ready[name] = str(error).strip().splitlines()[0]
    return ready


def measure(bench, operation):
    """The record of an operation: for each candidate its time and rate, or the reason why there is none."""
    ready = prepare(bench, operation)
    for _ in range(PASSES if bench.device.type == "cuda" else 1):
        for timed in ready.values():
            if isinstance(timed, Timed):
                timed.measure()
    candidates = []
    for name, timed in ready.items():
        if not isinstance(timed, Timed):
            candidates.append({"name": name, "reason": timed})
            continue
        low, middle, high = (float(value) for value in np.percentile(timed.times_us, [25, 50, 75]))
        work = operation.work[name]
        rate = work / middle / (1e3 if operation.unit == "GB/s" else 1e6)
        found = {"us": {"median": middle, "p25": low, "p75": high}, "work": work, "rate": rate}
        candidates.append({"name": name, **found, "peak_mb": timed.peak_mb, "reason": timed.reason})
    return {"operation": operation.name, "size": operation.size, "unit": operation.unit, "candidates": candidates}


def ceilings(bench):
    """Rates of the device itself: a kernel that copies (and negates) in GB/s, and matrix products in TFLOP/s."""

    def rate(name, unit, work, inputs, function):
        return measure(bench, operation(name, "", unit, work, [inputs], {name: function}))["candidates"][0]["rate"]

    size, n, product = bench.sizes["copy"], bench.sizes["product"], {}
    tensors = {name: bench.tensor(size, dtype=torch.float32) for name in "xy"}
    # As a kernel: a plain copy inside a graph may be left to the copy engines, which are slower.
    copy = rate("copy", "GB/s", 8 * size, tensors, lambda s: torch.neg(s["x"], out=s["y"]))
    for name, dtype, precision in (
        ("float32", torch.float32, "highest"),
        ("tf32", torch.float32, "high"),
        (str(bench.dtype).split(".")[1], bench.dtype, "highest"),
    ):
        torch.set_float32_matmul_precision(precision)
        factors = {name: bench.tensor(n, n, dtype=dtype) for name in "ab"}
        product[name] = rate("product", "TFLOP/s", 2 * n**3, factors, lambda s: s["a"] @ s["b"])
    torch.set_float32_matmul_precision("highest")
    return {"copy": copy, "product": product}


# ---- report


def ceiling_of(record, found, dtype):
    return found["copy"] if record["unit"] == "GB/s" else found["product"][dtype]


def add_ratios(record, ceiling):
    """Into each candidate: its share of the ceiling, and the fastest of PyTorch's times over its own."""
    timed = [c for c in record["candidates"] if "us" in c]
    others = [c["us"]["median"] for c in timed if c["name"] != "V3"]
    for c in timed:
        c["share"] = c["rate"] / ceiling
        c["against_pytorch"] = min(others) / c["us"]["median"] if others else None


def print_record(record):
    print(f"{record['operation']}, {record['size']}")
    for c in record["candidates"]:
        if "us" not in c:
            print(f"  {c['name']:16} not available: {c['reason']}")
            continue
        us = c["us"]
        times = f"{c['against_pytorch']:7.2f}x as fast as PyTorch" if c["name"] == "V3" and c["against_pytorch"] else ""
        print(
            f"  {c['name']:16} {us['median']:10.1f} us ({us['p25']:.1f} - {us['p75']:.1f}) {c['rate']:10.1f} "
            f"{record['unit']} {c['share']:7.1%} of the ceiling {times} {c['reason'] or ''}".rstrip(),
            flush=True,
        )


def parse_arguments(argv):
    class Parser(argparse.ArgumentParser):
        def error(self, message):
            self.exit(2, f"{self.prog}: error: {message}\n")

    names = ["rmsnorm", "rope", "swiglu", "loss", "optimizer", "attention"]
    parser = Parser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, prog="benchmark_kernels.py"
    )
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], help="(bfloat16; on a CPU float32)")
    parser.add_argument("--device", help="cpu, cuda or cuda:N (a GPU if there is one)")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write ceilings and all figures there")
    arguments = parser.parse_args(argv)
    arguments.device = torch.device(arguments.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if arguments.device.type == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # before version 3 imports Triton
    elif not torch.cuda.is_available():
        parser.error(f"--device {arguments.device} is not there: PyTorch sees no GPU")
    if arguments.json and not os.access(arguments.json if arguments.json.exists() else arguments.json.parent, os.W_OK):
        parser.error(f"--json {arguments.json} cannot be written: choose a file in a folder that can")
    arguments.dtype = arguments.dtype or ("float32" if arguments.device.type == "cpu" else "bfloat16")
    return arguments


def benchmark(arguments):
    """Measure, print, write; the exit status."""
    bench = Bench(arguments.device, getattr(torch, arguments.dtype))
    if arguments.device.type == "cpu":
        print("On a CPU the kernels run in Triton's interpreter at toy sizes: these times mean nothing.")
    found = ceilings(bench)
    products = ", ".join(f"{name} {rate:.1f}" for name, rate in found["product"].items())
    print(f"ceilings: copy {found['copy']:,.0f} GB/s; products {products} TFLOP/s")
    records = []
    for name, families in all_operations(bench).items():
        for family in families if name in arguments.only else []:
            for kind in family():
                record = measure(bench, kind)
                add_ratios(record, ceiling_of(record, found, arguments.dtype))
                print_record(record)
                records.append(record)
    content = {
        "environment": bench.v3.environment(bench.v3.Config(device=str(bench.device))),
        "dtype": arguments.dtype,
        "ceilings": found,
    }
    if arguments.json:
        lines = ",\n".join(json.dumps(record) for record in records)
        head = json.dumps(content)[:-1]
        arguments.json.write_text(f'{head}, "operations": [\n{lines}\n]}}\n')
    failed = [r["operation"] for r in records for c in r["candidates"] if c["name"] == "V3" and "us" not in c]
    for name in failed:
        print(f"benchmark_kernels.py: {name} of version 3 failed", file=sys.stderr)
    return 1 if failed else 0


def main(argv=None):
    arguments = parse_arguments(argv)
    try:
        if arguments.device.type == "cpu":
            return benchmark(arguments)
        with torch.cuda.device(arguments.device), torch.cuda.stream(torch.cuda.Stream(arguments.device)):
            return benchmark(arguments)
    except torch.OutOfMemoryError:
        print("benchmark_kernels.py: out of memory: it needs about 12 GiB; take a part with --only", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"benchmark_kernels.py: error: {error.filename} cannot be written: {error.strerror}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
