"""Time each of version 3's kernels on its own, beside PyTorch's operators, torch.compile's and Liger's kernels.

    python scripts/benchmark_kernels.py                          # all, in bfloat16; takes about 12 GiB
    python scripts/benchmark_kernels.py --only attention --json kernels.json

Element-wise kernels are compared with the bandwidth of a large copy (bytes read plus bytes written), attention with the
rate of an 8192 x 8192 x 8192 matmul of the same type. The inputs change from call to call, and together they exceed
twice the last cache. Calls are captured into a graph whose replays are timed with device events; the candidates of an
operation take turns. Bytes are those that the operation can't do without, FLOPs those of the causal half.

"torch.compile" is what the compiler makes of PyTorch's function. Liger's kernels are those that its users get, with
their tensors where its users have them: gate and up apart, queries and keys apart. Both losses of Liger's, and version
3's chunked one, compute the gradient in the forward already: compare the rows "forward + backward".

Without a GPU the kernels run in Triton's interpreter at toy sizes, only to show that the tool works, and nothing is
compiled.

Exit status: 0; 1 if one of version 3's kernels failed; 2 for a bad option.
"""

import collections
import functools
import importlib.util
import itertools
import math
import os
import sys
import time
import warnings
from typing import NamedTuple

import numpy as np
import torch
import torch._functorch.config as functorch_config
import torch.nn.functional as F
from torch.nn.attention import sdpa_kernel

from common.command_line import Failure, Parser, progress
from common.tables import columns, emit, text_table
from common.versions import load_version

PASSES, REPLAYS = 3, 7  # of each candidate, turn by turn
LEAST_MS = 2.0  # of one timed replay, so that the gap between two of them does not count
SIZES = {
    "cuda": {
        "rows": 65536, "width": 1024, "tokens": 512, "heads": (16, 8, 64), "swiglu": (16384, 4096),
        "vocabulary": 1000, "parameters": [(8192, 1024)] * 16, "attention": [(16, 512), (4, 2048), (1, 8192)],
        "heads_of_loss": [(8192, 1024, 1000), (8192, 1024, 32000), (8192, 2048, 128256)],
        "copy": 2**28, "matmul": 8192,
    },
    "cpu": {
        "rows": 32, "width": 32, "tokens": 16, "heads": (2, 1, 16), "swiglu": (16, 32),
        "vocabulary": 40, "parameters": [(16, 32)] * 2, "attention": [(1, 32)],
        "heads_of_loss": [(32, 32, 40)],
        "copy": 2**14, "matmul": 64,
    },
}  # fmt: skip


class Operation(NamedTuple):
    """Name what the candidates compute, and its work: bytes (unit GB/s) or FLOPs (unit TFLOP/s)."""

    name: str
    size: str
    unit: str
    work: float
    sets: list  # inputs that take turns
    candidates: dict  # name -> function of a set
    once: bool = False  # a graph can hold one call, no more


class Bench:
    """Hold device, type and sizes, and make random inputs."""

    def __init__(self, device, dtype):
        self.device, self.dtype, self.sizes = device, dtype, SIZES[device.type]
        self.precision = str(dtype).removeprefix("torch.")
        self.v3, self.v4 = load_version(3), load_version(4)
        # Of its own: a capture that fails leaves the default one unusable.
        self.generator = torch.Generator(device)

    def inputs(self, shapes):
        """Return a tensor per name: d* are gradients given, w has float32, labels are tokens, all others need one."""
        s = {
            name: torch.randn(
                shape,
                device=self.device,
                dtype=torch.float32 if name == "w" else self.dtype,
                generator=self.generator,
            )
            for name, shape in shapes.items()
        }
        if "labels" in s:
            entries = shapes["head"][0] if "head" in shapes else self.sizes["vocabulary"]
            s["labels"] = torch.randint(entries, shapes["labels"], device=self.device, generator=self.generator)
        return {name: t.requires_grad_(name[0] != "d" and t.is_floating_point()) for name, t in s.items()}

    def sets(self, shapes, used=1.0):
        """Return at least two sets of inputs, of which the used share exceeds twice the last cache."""
        sets = [self.inputs(shapes)]
        size = used * sum(t.numel() * t.element_size() for t in sets[0].values())
        count = 2 if self.device.type == "cpu" else max(2, math.ceil(2 * self.cache_bytes() / size))
        return sets + [self.inputs(shapes) for _ in range(count - 1)]

    def rivals(self, plain, liger):
        """Return the candidates beside version 3's: PyTorch's function, on a GPU also compiled, and Liger's.

        liger is a function of Liger's operations and a set of inputs, or None where it has no such kernel. It is left
        out where Liger is not installed.
        """
        found = {"PyTorch": plain}
        if self.device.type == "cuda":
            found["torch.compile"] = torch.compile(plain, dynamic=False)
        if liger and self.liger:
            found["Liger"] = functools.partial(liger, self.liger)
        return found

    @functools.cached_property
    def liger(self):
        """Return the module of Liger's operations, or None where it is not installed."""
        if importlib.util.find_spec("liger_kernel") is None:
            progress("Liger's kernels are left out: pip install liger-kernel")
            return None
        import liger_kernel.ops

        return liger_kernel.ops

    def cache_bytes(self):
        cache = torch.cuda.get_device_properties(self.device).L2_cache_size
        return max(cache, 2**28) if torch.version.hip else cache  # AMD's last cache lies behind its L2


# ---------------------------------------------------------------- the operations


def row_kernels(bench):
    """Return {family: [name, size, shapes of inputs, (tensors that forward, backward move), V3, PyTorch, Liger]}."""
    v3, (rows, C) = bench.v3, (bench.sizes[name] for name in ("rows", "width"))
    (H, K, D), T, ff = bench.sizes["heads"], bench.sizes["tokens"], bench.sizes["swiglu"]
    batch = rows // 2 // T or 1
    heads = (batch, T, H + 2 * K, D)
    x = (rows, C)
    cos, sin = v3.rope_tables(T, D, 10000.0, bench.device)
    norm = {"x": x, "w": (C,), "w16": (C,), "dy": x}
    packed = (ff[0], 2 * ff[1])
    queries = (batch, T, H, D)
    keys = (batch, T, K, D)
    apart = {"q": queries, "k": keys, "dq": queries, "dk": keys}

    def residual(s):
        total = s["x"] + s["branch"]
        return total, F.rms_norm(total, (C,), s["w16"], 1e-6)

    def rope(s):
        rotated, value = s["x"].split([H + K, K], dim=2)
        return torch.cat([v3.apply_rope(rotated, cos, sin), value], dim=2)

    def liger_rope(liger, s):
        # Liger's users have [B, H, T, D] as a transposed view. It rotates in place, and leaves the values alone.
        return liger.LigerRopeFunction.apply(s["q"].transpose(1, 2), s["k"].transpose(1, 2), *liger_tables)

    liger_tables = [torch.cat([table, table], dim=-1).to(bench.dtype) for table in (cos, sin)]

    def swiglu(s):
        gate, up = s["x"].chunk(2, dim=-1)
        return F.silu(gate) * up

    def liger_norm(liger, s):
        return liger.LigerRMSNormFunction.apply(s["x"], s["w16"], 1e-6, 0.0, "llama", False)

    def liger_residual(liger, s):
        normed, total = liger.LigerFusedAddRMSNormFunction.apply(s["x"], s["branch"], s["w16"], 1e-6)
        return total, normed

    return {
        "rmsnorm": [
            ("RMSNorm", x, norm, (2, 3), lambda s: v3.add_rms_norm(s["x"], None, s["w"], 1e-6)[1],
             lambda s: F.rms_norm(s["x"], (C,), s["w16"], 1e-6), liger_norm),
            ("RMSNorm + residual", x, {"branch": x, "dx": x, **norm}, (4, 4),
             lambda s: v3.add_rms_norm(s["x"], s["branch"], s["w"], 1e-6), residual, liger_residual),
        ],
        "rope": [("RoPE", heads, {"x": heads, "dy": heads, **apart}, (2, 2),
                  lambda s: v3.rope(s["x"], cos, sin, H + K), rope, liger_rope)],
        "swiglu": [("SwiGLU", ff, {"x": packed, "gate": ff, "up": ff, "dy": ff}, (3, 5),
                    lambda s: v3.packed_swiglu(s["x"]), swiglu,
                    lambda liger, s: liger.LigerSiLUMulFunction.apply(s["gate"], s["up"]))],
    }  # fmt: skip


def both_ways(bench, name, size, shapes, moved, ours, plain, liger):
    """Yield an operation's forward and backward."""
    forward = {"V3": ours, **bench.rivals(plain, liger)}
    outputs = {}
    sets = bench.sets(shapes)

    def backward(s, candidate):
        key = candidate, id(s)
        if key not in outputs:
            outputs[key] = forward[candidate](s)
        given = [s[name] for name in ("dx", "dy") if name in s]
        if candidate == "Liger" and "dq" in s:  # which has the heads of queries and keys apart
            given = [s[name].transpose(1, 2) for name in ("dq", "dk")]
        leaves = [t for t in s.values() if t.requires_grad]  # of the two weights a candidate uses one
        return torch.autograd.grad(outputs[key], leaves, given or None, retain_graph=True, allow_unused=True)

    backwards = {candidate: functools.partial(backward, candidate=candidate) for candidate in forward}
    for way, tensors, candidates in zip(("forward", "backward"), moved, (forward, backwards), strict=True):
        work = tensors * math.prod(size) * bench.dtype.itemsize
        yield Operation(f"{name} {way}", " x ".join(map(str, size)), "GB/s", work, sets, candidates)


def at_once(functions):
    """Turn functions of a set of inputs that return a loss into ones that return its gradients too."""

    def with_gradients(s, loss):
        return torch.autograd.grad(loss(s), [t for t in s.values() if t.requires_grad])

    return {name: functools.partial(with_gradients, loss=loss) for name, loss in functions.items()}


def losses(bench):
    """Yield the cross-entropy of logits, and that of an output head's input, for which a chunk of logits is enough."""
    v3, (rows, V) = bench.v3, (bench.sizes[name] for name in ("rows", "vocabulary"))

    def liger(liger, s):
        return liger.LigerCrossEntropyFunction.apply(s["x"], s["labels"], None)[0]

    def ours(s):
        return v3.cross_entropy(s["x"], s["labels"])

    def plain(s):
        return F.cross_entropy(s["x"], s["labels"])

    logits = {"x": (rows, V), "labels": (rows,)}
    yield from both_ways(bench, "cross-entropy", (rows, V), logits, (1, 2), ours, plain, None)
    candidates = at_once({"V3": ours, **bench.rivals(plain, liger)})
    work = 2 * rows * V * bench.dtype.itemsize
    yield Operation("cross-entropy forward + backward", f"{rows} x {V}", "GB/s", work, bench.sets(logits), candidates)
    for shape in bench.sizes["heads_of_loss"]:
        yield linear_loss(bench, *shape)


def linear_loss(bench, tokens, width, vocabulary):
    """Return the cross-entropy of x wᵀ with the gradients of x and w: three matmuls."""

    def plain(s):
        return F.cross_entropy(s["x"] @ s["head"].t(), s["labels"])

    def ours(s):
        return bench.v3.linear_cross_entropy(s["x"], s["head"], s["labels"])

    def liger(liger, s):
        return liger.LigerFusedLinearCrossEntropyFunction.apply(s["x"], s["head"], s["labels"])[0]

    sets = bench.sets({"x": (tokens, width), "head": (vocabulary, width), "labels": (tokens,)})
    candidates = at_once({"V3": ours, **bench.rivals(plain, liger)})
    size = f"{tokens} tokens, width {width}, vocabulary {vocabulary}"
    flops = 3 * 2 * tokens * width * vocabulary
    return Operation("linear cross-entropy forward + backward", size, "TFLOP/s", flops, sets, candidates)


def optimizer(bench):
    """Return a step of AdamW: weight, two moments and gradient in float32; the parameters exceed any cache."""
    shapes = bench.sizes["parameters"]

    def parameters():
        made = [torch.nn.Parameter(torch.randn(shape, device=bench.device)) for shape in shapes]
        for p in made:
            p.grad = torch.randn_like(p)
        return made

    ours = bench.v3.FusedAdamW(parameters(), lr=1e-3)
    pytorch = torch.optim.AdamW(parameters(), lr=1e-3, fused=True, capturable=bench.device.type == "cuda")
    count = sum(math.prod(shape) for shape in shapes)
    candidates = {"V3": lambda s: ours.step(), "PyTorch": lambda s: pytorch.step()}
    return Operation("AdamW, float32", f"{count:,} parameters", "GB/s", 28 * count, [{}], candidates, once=True)


def attention(bench, batch_size, seq_len):
    """Yield causal attention of grouped queries: packed for version 3, each SDPA backend on tensors of their own."""
    H, K, D = bench.sizes["heads"]

    def sdpa(s, backend):
        q, k, v = (s[name].transpose(1, 2) for name in "qkv")
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)

    def with_backward(s, name):
        leaves = ["qkv"] if name == "V3" else ["q", "k", "v"]
        return torch.autograd.grad(forward[name](s), [s[leaf] for leaf in leaves], s["do"])

    forward = {"V3": lambda s: bench.v3.flash_attention(s["qkv"], H, K)}
    for name, backend in bench.v4.SDPA_BACKENDS.items():
        forward[f"SDPA {name}"] = functools.partial(sdpa, backend=backend)
    both = {name: functools.partial(with_backward, name=name) for name in forward}
    size = f"batch {batch_size}, {seq_len} tokens, {H} / {K} heads of {D}"
    flops = batch_size * H * seq_len**2 * D  # of a matmul; a multiply-add counts as two, half of the square is needed
    heads = {"qkv": H + 2 * K, "q": H, "k": K, "v": K, "do": H}
    sets = bench.sets({name: (batch_size, seq_len, count, D) for name, count in heads.items()}, used=0.5)
    yield Operation("attention forward", size, "TFLOP/s", 2 * flops, sets, forward)
    yield Operation("attention forward + backward", size, "TFLOP/s", 7 * flops, sets, both)


def operations(bench, family):
    """Yield the operations of a family; the inputs of one are gone before those of the next are made."""
    if family == "optimizer":
        yield optimizer(bench)
    elif family == "loss":
        yield from losses(bench)
    elif family == "attention":
        for shape in bench.sizes["attention"]:
            yield from attention(bench, *shape)
    else:
        for kernel in row_kernels(bench)[family]:
            yield from both_ways(bench, *kernel)


FAMILIES = ("rmsnorm", "rope", "swiglu", "loss", "optimizer", "attention")

# ---------------------------------------------------------------- timing


class Timed:
    """Hold the calls of a candidate, on a GPU in a graph, and its times in microseconds per call."""

    def __init__(self, function, operation, bench):
        self.function, self.sets, self.device = function, operation.sets, bench.device
        self.calls = len(self.sets)
        self.replay = self.run_all
        self.times_us = []
        self.reason = None
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # PyTorch warns of each reason why an SDPA backend refuses
                self.run_all()  # compiles, allocates, and leaves the forward that a backward needs
                if self.device.type == "cuda" and not self.waits():
                    self.capture()
                    turns = math.ceil(LEAST_MS / self.replay_times(2)[-1])
                    if turns > 1 and not operation.once:
                        self.calls *= turns
                        self.capture()
        except (RuntimeError, bench.v3.triton.TritonError) as error:  # refused, short of memory, not compiled
            self.reason = str(error).strip().splitlines()[0]

    def waits(self):
        """Tell whether a call waits for the GPU, as Liger's losses do: no graph holds it, and it is timed as it is."""
        torch.cuda.set_sync_debug_mode("error")
        try:
            self.function(self.sets[0])
        except RuntimeError as error:
            if "synchroniz" not in str(error):
                raise
            return True
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return False

    def run_all(self):
        """Make all calls; the results of the last turn are kept, so that results take turns like inputs do."""
        kept = collections.deque(maxlen=len(self.sets))
        for call in range(self.calls):
            kept.append(self.function(self.sets[call % len(self.sets)]))

    def capture(self):
        self.replay, graph = None, torch.cuda.CUDAGraph()  # frees the memory of an earlier graph
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            self.run_all()
        self.replay = graph.replay

    def replay_times(self, count):
        """Return the milliseconds of each of so many replays, queued so that the device never waits for the host."""
        if self.device.type == "cpu":
            start = time.perf_counter()
            self.replay()
            return [1000 * (time.perf_counter() - start)]
        events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        events[0].record()
        for event in events[1:]:
            self.replay()
            event.record()
        torch.cuda.synchronize(self.device)
        return [start.elapsed_time(end) for start, end in itertools.pairwise(events)]

    def measure(self):
        """Take one turn; its first replay, before which the device was idle, does not count."""
        times = self.replay_times(REPLAYS + 1)
        self.times_us += [1000 * t / self.calls for t in (times[1:] or times)]


def measure(bench, operation, ceiling=math.nan):
    """Return the record of an operation: for each candidate its time, rate and share of the ceiling, or the reason."""
    candidates = {name: Timed(function, operation, bench) for name, function in operation.candidates.items()}
    timed = {name: candidate for name, candidate in candidates.items() if not candidate.reason}
    passes = PASSES if bench.device.type == "cuda" else 1
    for _ in range(passes):
        for candidate in timed.values():
            candidate.measure()
    ours = [float(np.median(c.times_us)) for name, c in timed.items() if name == "V3"]
    records = []
    for name, candidate in candidates.items():
        records.append({"name": name, "reason": candidate.reason})
        if name in timed:
            low, middle, high = map(float, np.percentile(candidate.times_us, [25, 50, 75]))
            rate = operation.work / middle / (1e3 if operation.unit == "GB/s" else 1e6)
            records[-1] |= {"us": {"median": middle, "p25": low, "p75": high}, "work": operation.work, "rate": rate}
            records[-1] |= {"share": rate / ceiling, "against_v3": middle / ours[0] if ours else None}
    return {"operation": operation.name, "size": operation.size, "unit": operation.unit, "candidates": records}


def ceilings(bench):
    """Return the rates of the device itself: a copying (and negating) kernel in GB/s, and matmuls in TFLOP/s."""

    def rate(unit, work, inputs, function):
        return measure(bench, Operation("", "", unit, work, [inputs], {"": function}))["candidates"][0]["rate"]

    size = bench.sizes["copy"]
    n = bench.sizes["matmul"]
    product = {}
    tensors = {name: torch.randn(size, device=bench.device) for name in "xy"}
    # As a kernel: a plain copy inside a graph may be left to the copy engines, which are slower.
    copy = rate("GB/s", 8 * size, tensors, lambda s: torch.neg(s["x"], out=s["y"]))
    for name, dtype in {"float32": torch.float32, "tf32": torch.float32, bench.precision: bench.dtype}.items():
        torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
        factors = {factor: torch.randn(n, n, device=bench.device, dtype=dtype) for factor in "ab"}
        product[name] = rate("TFLOP/s", 2 * n**3, factors, lambda s: s["a"] @ s["b"])
    torch.set_float32_matmul_precision("highest")
    return {"copy": copy, "product": product}


# ---------------------------------------------------------------- report


COLUMNS = (
    ": {name} | us: {us[median]:.1f} | p25: {us[p25]:.1f} | p75: {us[p75]:.1f} | UNIT: {rate:,.1f} | "
    "of the ceiling: {share:.1%} | its time / V3's: {against_v3:.2f}"
)


def text_of(record):
    """Return the record of an operation as text."""
    refused = [f"{c['name']}  not available: {c['reason']}" for c in record["candidates"] if c["reason"]]
    rows = [candidate for candidate in record["candidates"] if not candidate["reason"]]
    table = text_table(*columns(COLUMNS.replace("UNIT", record["unit"]), rows))
    return "\n".join([f"\n{record['operation']}, {record['size']}", *refused, table])


def work(options):
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        functorch_config.donated_buffer = False  # a compiled backward runs many times on what one forward saved
    else:
        os.environ["TRITON_INTERPRET"] = "1"  # before version 3 imports Triton
        progress("Without a GPU the kernels run in Triton's interpreter at toy sizes: these times mean nothing.")
    bench = Bench(torch.device("cuda", 0), torch.bfloat16) if on_gpu else Bench(torch.device("cpu"), torch.float32)
    with torch.cuda.stream(torch.cuda.Stream() if on_gpu else None):  # a graph is captured on a stream of its own
        found = ceilings(bench)
        records = []
        for operation in itertools.chain.from_iterable(operations(bench, family) for family in options.only):
            progress(f"timing {operation.name}, {operation.size}")
            ceiling = found["copy"] if operation.unit == "GB/s" else found["product"][bench.precision]
            records.append(measure(bench, operation, ceiling))
    environment = bench.v3.environment(bench.v3.Options(device=str(bench.device)))
    content = {"environment": environment, "dtype": bench.precision, "ceilings": found, "operations": records}
    products = ", ".join(f"{name} {rate:.1f}" for name, rate in found["product"].items())
    lines = [f"ceilings: copy {found['copy']:,.0f} GB/s; matmuls {products} TFLOP/s", *map(text_of, records)]
    emit(content, "\n".join(lines), options.json)
    failed = [r["operation"] for r in records for c in r["candidates"] if c["name"] == "V3" and c["reason"]]
    if failed:
        raise Failure(1, f"version 3 failed at {', '.join(failed)}")


def main(argv=None):
    parser = Parser("benchmark_kernels.py", __doc__)
    parser.add_argument("--only", nargs="+", choices=FAMILIES, default=FAMILIES, help="(all)", metavar="NAME")
    return parser.run(work, argv)


if __name__ == "__main__":
    sys.exit(main())
