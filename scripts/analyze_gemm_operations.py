#!/usr/bin/env python3
"""Measure every GEMM of version 1's training step, forward and backward, over batch sizes and sequence lengths.

example: python analyze_gemm_operations.py --model-config tiny_llama_v1_config.yaml --batch-sizes 4,8

Print for each its shape, FLOPs, bytes if every operand moves once, FLOP per byte, the rate on this device, its fraction
of the fastest rate seen (of a large square GEMM, or of one of these), and what limits it: "compute", "memory" (too few
FLOP per byte) or "too small" (slower than half of what either allows: too few tiles to fill the device).
"""

import itertools
import pathlib
import platform
import sys

from common import counts
from common.command_line import Failure, Parser, numbers, progress
from common.counts import ELEMENT_BYTES, gemms
from common.roofline import bound, ceilings_line, measure_ceilings, shortest_s
from common.tables import columns, emit, text_table
from common.versions import load_version

SMALL = 0.5  # fraction of the attainable rate below which a GEMM is too small for the device
CALLS = 20  # of a GEMM in one measurement on a GPU
GEMM_COLUMNS = (
    "GEMM: {names}, {part} | batch x m x k x n: {batch}x{m}x{k}x{n} | calls: {calls} | GFLOP: {flops:G.3f} | "
    "MB: {bytes:M.2f} | FLOP/B: {flop_per_byte:.1f} | us: {us:.1f} | TFLOP/s: {tflops:.3f} | "
    "of peak: {share_of_peak:.1%} | bound: {bound}"
)
STEP_COLUMNS = (
    "batch: {batch_size} | tokens: {seq_len} | GFLOP: {flops:G,.2f} | ms: {ms:,.3f} | TFLOP/s: {tflops:.3f} | "
    "of peak: {share_of_peak:.1%} | too small: {too_small} of {calls}"
)
NAMES = ("vocab_size", "hidden_dim", "num_layers", "num_heads", "num_kv_heads", "intermediate_dim")


def read_config(path):
    """Return the model's sizes in a YAML file; version 1's own options say what is wrong with them."""
    try:
        import yaml

        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except ImportError:
        raise Failure(1, "--model-config needs PyYAML: pip install pyyaml") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise Failure(2, f"--model-config {path} cannot be read as YAML: {str(error).splitlines()[0]}") from None
    if not isinstance(content, dict) or not set(NAMES) <= content.keys():
        raise Failure(2, f"--model-config {path} must name {', '.join(NAMES)}")
    return {name: content[name] for name in NAMES}


def sizes_of(config, batch_size, seq_len):
    config = config | {"batch_size": batch_size, "seq_len": seq_len}
    options = [word for name, value in config.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    return counts.sizes_of(load_version(1).parse_options([*options, "--device", "cpu"]))


def seconds(gemm, device, dtype):
    """Return the time of one call, with operands laid out as in training; on a GPU in a graph, without launches."""
    import torch

    def operand(rows, columns, transposed):
        shape = (gemm.batch, columns, rows) if transposed else (gemm.batch, rows, columns)
        tensor = torch.randn(shape, device=device).to(dtype)
        tensor = tensor.transpose(1, 2) if transposed else tensor
        return tensor[0] if gemm.batch == 1 else tensor

    left = operand(gemm.m, gemm.k, transposed=gemm.part == "weight gradient")
    right = operand(gemm.k, gemm.n, transposed=gemm.part == "forward")
    if device.type == "cpu":
        return shortest_s(lambda: left @ right, 3)
    stream = torch.cuda.Stream(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        left @ right  # the library makes its handles and picks its kernel outside the graph
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(CALLS):
                left @ right
    graph.replay()
    return shortest_s(graph.replay) / CALLS


def measured(gemm, duration, size, roofs):
    """Return the results of a GEMM that took so many seconds per call."""
    moved, rate = gemm.bytes(size), gemm.flops / duration / 1e12
    intensity = gemm.flops / moved
    row = gemm._asdict() | {"flops": gemm.flops, "bytes": moved, "flop_per_byte": intensity, "us": 1e6 * duration}
    row |= {"tflops": rate, "share_of_peak": rate / roofs["matmul_tflops"]}
    small = rate < SMALL * min(roofs["matmul_tflops"], roofs["copy_tb_s"] * intensity)
    return row | {"bound": "too small" if small else bound(intensity, roofs)}


def analyzed(durations, size, roofs):
    """Return a step for each Sizes from the seconds of its GEMMs; the fastest of them raises the roof."""
    rates = [gemm.flops / duration / 1e12 for pairs in durations.values() for gemm, duration in pairs]
    roofs["matmul_tflops"] = max(roofs["matmul_tflops"], *rates)
    steps = []
    for sizes, pairs in durations.items():
        rows = [measured(gemm, duration, size, roofs) for gemm, duration in pairs]
        flops, us = (sum(row["calls"] * row[key] for row in rows) for key in ("flops", "us"))
        step = {"batch_size": sizes.B, "seq_len": sizes.T, "flops": flops, "ms": us / 1e3, "tflops": flops / us / 1e6}
        step |= {"share_of_peak": flops / us / 1e6 / roofs["matmul_tflops"], "calls": sum(row["calls"] for row in rows)}
        step["too_small"] = sum(row["calls"] for row in rows if row["bound"] == "too small")
        steps.append(step | {"gemms": rows})
    return steps


def as_text(content):
    """Return the GEMMs of the largest step, and a line for every step."""
    last = content["steps"][-1]
    return (
        f"{content['device']}, {content['precision']}, fastest: {ceilings_line(content['ceilings'])}\n\n"
        f"batch {last['batch_size']}, {last['seq_len']} tokens\n"
        f"{text_table(*columns(GEMM_COLUMNS, last['gemms']))}\n\n"
        f"{text_table(*columns(STEP_COLUMNS, content['steps']), left=0)}"
    )


def analyze(options):
    import torch

    config = read_config(pathlib.Path(options.model_config))
    steps = [sizes_of(config, *size) for size in itertools.product(options.batch_sizes, options.sequence_lengths)]
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    roofs = measure_ceilings(str(device), options.precision)  # allows TF32 where it is asked for
    dtype = getattr(torch, options.precision, torch.float32)
    durations = {}
    for sizes in steps:
        progress(f"batch {sizes.B}, {sizes.T} tokens ...")
        durations[sizes] = [(gemm, seconds(gemm, device, dtype)) for gemm in gemms(sizes)]
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    content = {"device": name, "torch": torch.__version__, "precision": options.precision, "config": config}
    content |= {"ceilings": roofs, "steps": analyzed(durations, ELEMENT_BYTES[options.precision], roofs)}
    emit(content, as_text(content), options.json)


def main(argv=None):
    parser = Parser("analyze_gemm_operations.py", __doc__)
    add = parser.add_argument
    add("--model-config", required=True, metavar="YAML", help="sizes, as tiny_llama_v1_config.yaml")
    add("--batch-sizes", type=numbers, default=[8], metavar="B,..", help="(8)")
    add("--sequence-lengths", type=numbers, default=[128], metavar="T,..", help="(128)")
    add("--precision", choices=ELEMENT_BYTES, default="float32", help="(%(default)s)")
    add("--device", help="cpu, cuda or cuda:N (a GPU if there is one)")
    return parser.run(analyze, argv)


if __name__ == "__main__":
    sys.exit(main())
