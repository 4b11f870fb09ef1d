#!/usr/bin/env python3
"""Every matrix product of a training step, forward and backward, over batch sizes and sequence lengths.

For each: shape, FLOPs, bytes if every operand moves once, FLOP a byte, the rate measured on this device, its share of
the fastest rate seen (of a large square product, or of one of these), and what holds it back: "compute", "memory" (too
few FLOP a byte to feed the units) or "too small" (slower than half of what either allows: too few tiles to fill it).

Exit status: 0 measured, 2 for bad input.
"""

import argparse
import dataclasses
import pathlib
import sys

from common.analysis import Parser, emit, numbers, progress, text_table
from common.command_line import Failure, run_tool
from common.versions import load_version
from run_deepspeed_flops import ceilings, timed

SMALL = 0.5  # share of the attainable rate below which a product is too small for the device
PRECISIONS = ("float32", "tf32", "bfloat16", "float16")
CALLS = 20  # of a product in one measurement on a GPU


@dataclasses.dataclass(frozen=True)
class Gemm:
    """batch products of [m, k] and [k, n], so many calls in a step. part: forward, input gradient, weight gradient."""

    names: str
    part: str
    batch: int
    m: int
    k: int
    n: int
    calls: int

    @property
    def flops(self) -> int:
        return 2 * self.batch * self.m * self.k * self.n

    def bytes(self, size: int) -> int:
        return size * self.batch * (self.m * self.k + self.k * self.n + self.m * self.n)


def read_config(path: pathlib.Path, config_class):
    """The sizes in a YAML file as a Config; Failure names what is missing or wrong."""
    try:
        import yaml
    except ImportError:
        raise Failure(1, "--model-config needs PyYAML: pip install pyyaml") from None
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise Failure(2, f"--model-config {path} cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError):
        raise Failure(2, f"--model-config {path} is no valid YAML") from None
    required = [f.name for f in dataclasses.fields(config_class) if f.default is dataclasses.MISSING]
    if not isinstance(content, dict):
        raise Failure(2, f"--model-config {path} must name {', '.join(required)}")
    for name in required:
        if not isinstance(content.get(name), int) or content[name] < 1:
            raise Failure(2, f"--model-config {path}: {name} must be a positive whole number, not {content.get(name)}")
    if content["hidden_dim"] % content["num_heads"] or content["num_heads"] % content["num_kv_heads"]:
        raise Failure(2, f"--model-config {path}: num_heads must divide hidden_dim, and num_kv_heads num_heads")
    return config_class(**{name: content[name] for name in required})


def gemms(config, batch_size: int, seq_len: int) -> list[Gemm]:
    """The products of version 1's training step; equal shapes stand together."""
    M, T, C, L = batch_size * seq_len, seq_len, config.hidden_dim, config.num_layers
    kv, F, D, heads = config.num_kv_heads * config.head_dim, config.intermediate_dim, config.head_dim, config.num_heads
    weights = [("q, o", C, C, 2 * L), ("k, v", C, kv, 2 * L), ("gate, up", C, F, 2 * L), ("down", F, C, L)]
    weights.append(("output head", C, config.vocab_size, 1))
    found = []
    for name, k, n, calls in weights:
        found.append(Gemm(name, "forward", 1, M, k, n, calls))
        found.append(Gemm(name, "input gradient", 1, M, n, k, calls))
        found.append(Gemm(name, "weight gradient", 1, n, M, k, calls))
    B = batch_size * heads
    found.append(Gemm("scores", "forward", B, T, D, T, L))
    found.append(Gemm("weights x value", "forward", B, T, T, D, L))
    found.append(Gemm("gradient of weights", "input gradient", B, T, D, T, L))
    found.append(Gemm("gradients of q, k, v", "input gradient", B, T, T, D, 3 * L))
    return found


def seconds(gemm: Gemm, device, dtype) -> float:
    """Time of one call, operands laid out as training has them; a graph on a GPU, so that launches do not count."""
    import torch

    def operand(rows, columns, transposed):
        shape = (gemm.batch, columns, rows) if transposed else (gemm.batch, rows, columns)
        tensor = torch.randn(shape, device=device).to(dtype)
        tensor = tensor.transpose(1, 2) if transposed else tensor
        return tensor[0] if gemm.batch == 1 else tensor

    left = operand(gemm.m, gemm.k, transposed=gemm.part == "weight gradient")
    right = operand(gemm.k, gemm.n, transposed=gemm.part == "forward")
    if device.type == "cpu":
        return timed(lambda: left @ right, device, 3)
    stream = torch.cuda.Stream(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        left @ right  # the library makes its handles and picks its kernel outside the graph
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(CALLS):
                left @ right
    graph.replay()
    return timed(graph.replay, device, 5) / CALLS


def measured(gemm: Gemm, duration: float, size: int, roofs: dict) -> dict:
    """The figures of a product that took so many seconds a call."""
    moved, rate = gemm.bytes(size), gemm.flops / duration / 1e12
    intensity = gemm.flops / moved
    attainable = min(roofs["matmul_tflops"], roofs["copy_tb_s"] * intensity)
    bound = "compute" if attainable == roofs["matmul_tflops"] else "memory"
    return dataclasses.asdict(gemm) | {
        "flops": gemm.flops,
        "bytes": moved,
        "flop_per_byte": intensity,
        "us": 1e6 * duration,
        "tflops": rate,
        "share_of_peak": rate / roofs["matmul_tflops"],
        "share_of_attainable": rate / attainable,
        "bound": "too small" if rate < SMALL * attainable else bound,
    }


def whole(rows: list[dict], batch_size: int, seq_len: int, peak: float) -> dict:
    """All products of one step together."""
    flops, us = (sum(row["calls"] * row[key] for row in rows) for key in ("flops", "us"))
    return {
        "batch_size": batch_size,
        "seq_len": seq_len,
        "flops": flops,
        "ms": us / 1e3,
        "tflops": flops / us / 1e6,
        "share_of_peak": flops / us / 1e6 / peak,
        "too_small": sum(row["calls"] for row in rows if row["bound"] == "too small"),
        "calls": sum(row["calls"] for row in rows),
        "gemms": rows,
    }


def analyzed(durations: dict, size: int, roofs: dict) -> list[dict]:
    """A step for each (batch size, sequence length) from the products' times; the fastest of them raises the roof."""
    rates = [gemm.flops / duration / 1e12 for pairs in durations.values() for gemm, duration in pairs]
    roofs["matmul_tflops"] = max(roofs["matmul_tflops"], *rates)
    return [
        whole([measured(gemm, duration, size, roofs) for gemm, duration in pairs], *sizes, roofs["matmul_tflops"])
        for sizes, pairs in durations.items()
    ]


def gemm_lines(step: dict) -> str:
    rows = [
        [
            f"{g['names']}, {g['part']}",
            "x".join(str(g[key]) for key in ("batch", "m", "k", "n")),
            g["calls"],
            f"{g['flops'] / 1e9:.3f}",
            f"{g['bytes'] / 1e6:.2f}",
            f"{g['flop_per_byte']:.1f}",
            f"{g['us']:.1f}",
            f"{g['tflops']:.3f}",
            f"{100 * g['share_of_peak']:.1f} %",
            g["bound"],
        ]
        for g in step["gemms"]
    ]
    header = ["product", "batch x m x k x n", "calls", "GFLOP", "MB", "FLOP/B", "us", "TFLOP/s", "of peak", "bound"]
    return text_table(header, rows)


def as_text(content: dict, details: bool) -> str:
    roofs = content["ceilings"]
    lines = [
        f"{content['device']}, {content['precision']}: fastest product {roofs['matmul_tflops']:.3f} TFLOP/s, "
        f"copy {roofs['copy_tb_s']:.3f} TB/s",
        "",
    ]
    steps = content["steps"]
    for step in steps if details else steps[-1:]:
        lines += [f"batch {step['batch_size']}, {step['seq_len']} tokens", gemm_lines(step), ""]
    rows = [
        [step["batch_size"], step["seq_len"], f"{step['flops'] / 1e9:,.2f}", f"{step['ms']:,.3f}"]
        + [f"{step['tflops']:.3f}", f"{100 * step['share_of_peak']:.1f} %", f"{step['too_small']} of {step['calls']}"]
        for step in steps
    ]
    lines.append(text_table(["batch", "tokens", "GFLOP", "ms", "TFLOP/s", "of peak", "too small"], rows, left=0))
    return "\n".join(lines)


def analyze(options: argparse.Namespace) -> None:
    import torch

    script = load_version(1)
    config = read_config(pathlib.Path(options.model_config), script.Config)
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    options.device = str(device)
    roofs = ceilings(options, options.precision)
    torch.set_float32_matmul_precision("high" if options.precision == "tf32" else "highest")
    dtype = getattr(torch, options.precision, torch.float32)
    durations = {}
    for batch_size in options.batch_sizes:
        for seq_len in options.sequence_lengths:
            progress(f"batch {batch_size}, {seq_len} tokens ...")
            products = gemms(config, batch_size, seq_len)
            durations[batch_size, seq_len] = [(gemm, seconds(gemm, device, dtype)) for gemm in products]
    steps = analyzed(durations, dtype.itemsize, roofs)
    content = {
        "device": script.device_name(device),
        "environment": script.environment(device),
        "precision": options.precision,
        "config": dataclasses.asdict(config),
        "ceilings": roofs,
        "steps": steps,
    }
    emit(content, as_text(content, options.details), options.json)


def main(argv: list[str] | None = None) -> int:
    parser = Parser(
        "analyze_gemm_operations.py",
        "Measure every matrix product of a training step.",
        '--model-config tiny_llama_v1_config.yaml --batch-sizes "4,8,16,32" --sequence-lengths "64,128,256"',
    )
    parser.add_argument("--model-config", required=True, metavar="YAML", help="sizes, as tiny_llama_v1_config.yaml")
    parser.add_argument("--batch-sizes", type=numbers, default=[8], metavar="B,..", help="(8)")
    parser.add_argument("--sequence-lengths", type=numbers, default=[128], metavar="T,..", help="(128)")
    parser.add_argument("--precision", choices=PRECISIONS, default="float32", help="(%(default)s)")
    parser.add_argument("--device", help="cpu, cuda or cuda:N (a GPU if there is one)")
    parser.add_argument("--details", action="store_true", help="print the products of every configuration")
    options = parser.parse_args(argv)
    return run_tool("analyze_gemm_operations.py", lambda: analyze(options))


if __name__ == "__main__":
    sys.exit(main())
