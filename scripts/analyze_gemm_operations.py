#!/usr/bin/env python3
"""Measure every GEMM of version 1's training step, forward and backward, over batch sizes and sequence lengths.

example: python analyze_gemm_operations.py --model-config tiny_llama_v1_config.yaml --batch-sizes 4,8

For each GEMM it prints the shape, the FLOPs, the bytes if every operand moves once, FLOP per byte, the rate on this
device, and the fraction of the fastest rate seen. The last column says what limits it: "compute", or "memory" (too few
FLOP per byte). A GEMM that reaches less than half of what these two allow is "too small" if it has fewer 128 x 128
tiles than the GPU has processors (multiprocessors or compute units), otherwise it's "slow".

With --trace-file it reads the matmuls of any PyTorch trace instead. For each shape it prints their number, time, rate
with quartiles, and the fraction of the peak in their precision. The shapes that lose the most time come first.
"""

import contextlib
import itertools
import pathlib
import platform
import re
import sys

from common.command_line import Failure, Parser, add_gpu, numbers, progress
from common.files import errors_of
from common.formulas import counts
from common.measuring.ceilings import bound, ceilings_line, measure_ceilings, peak, precision_here, shortest_s
from common.profiles import check_one_gpu, read_profile
from common.profiles.gemms import gemm_results, gemm_table, no_gemms
from common.tables import columns, emit, text_table
from common.versions import load_version

SLOW = 0.5  # fraction of the attainable rate below which neither compute nor memory limits a GEMM
TILE = 128  # rows and columns of the output that one processor of a GPU computes at a time, at the usual size
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
    """Return the model's sizes in a file with lines `name: value`; version 1's options say what is wrong with them."""
    with errors_of(path):
        found = dict(re.findall(r"^(\w+): *(\S+)", path.read_text(encoding="utf-8"), re.MULTILINE))
    if not set(NAMES) <= found.keys():
        raise Failure(2, f"--model-config {path} must name {', '.join(NAMES)}")
    return {name: found[name] for name in NAMES}


def sizes_of(config, batch_size, seq_len):
    config = config | {"batch_size": batch_size, "seq_len": seq_len}
    options = [word for name, value in config.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    return counts.sizes_of(load_version(1).parse_options([*options, "--device", "cpu"]))


def gemms(sizes, element_bytes):
    """Return the matmuls of version 1's step with their FLOPs and bytes: `batch` times [m, k] x [k, n] per call."""
    found = []
    for names, part, batch, m, k, n, calls in counts.gemms(sizes):
        flops = 2 * batch * m * k * n
        moved = batch * counts.matmul(m, k, n, element_bytes)
        gemm = {"names": names, "part": part, "batch": batch, "m": m, "k": k, "n": n, "calls": calls}
        found.append(gemm | {"flops": flops, "bytes": moved, "flop_per_byte": flops / moved})
    return found


def seconds(gemm, device, dtype):
    """Return the time of one call, with operands laid out as in training; on a GPU in a graph, without launches."""
    import torch

    def operand(rows, columns, transposed):
        shape = (gemm["batch"], columns, rows) if transposed else (gemm["batch"], rows, columns)
        tensor = torch.randn(shape, device=device, dtype=dtype)
        return (tensor.mT if transposed else tensor).squeeze(0)

    left = operand(gemm["m"], gemm["k"], transposed=gemm["part"] == "weight gradient")
    right = operand(gemm["k"], gemm["n"], transposed=gemm["part"] == "forward")
    if device == "cpu":
        return shortest_s(lambda: left @ right, 3)
    from triton.testing import do_bench_cudagraph  # it comes with PyTorch where a GPU is

    with torch.cuda.device(device):
        return do_bench_cudagraph(lambda: left @ right, rep=5, return_mode="min") / 1e3


def processors(device):
    """Return the processors of a GPU that compute tiles; 0 of a CPU."""
    import torch

    return 0 if device == "cpu" else torch.cuda.get_device_properties(device).multi_processor_count


def rated(gemm, roofs, processors):
    """Return a timed GEMM with its rate and what limits it."""
    rate = gemm["flops"] / gemm["us"] / 1e6
    intensity = gemm["flop_per_byte"]
    limit = bound(intensity, roofs)
    if rate < SLOW * min(roofs["matmul_tflops"], roofs["copy_tb_s"] * intensity):
        tiles = gemm["batch"] * -(-gemm["m"] // TILE) * -(-gemm["n"] // TILE)
        limit = "too small" if tiles < processors else "slow"
    return gemm | {"tflops": rate, "share_of_peak": rate / roofs["matmul_tflops"], "bound": limit}


def step_row(sizes, rows, roofs):
    """Return the sums over the rated GEMMs of a step."""
    flops, us = (sum(row["calls"] * row[key] for row in rows) for key in ("flops", "us"))
    step = {"batch_size": sizes.B, "seq_len": sizes.T, "flops": flops, "ms": us / 1e3, "tflops": flops / us / 1e6}
    step |= {"share_of_peak": flops / us / 1e6 / roofs["matmul_tflops"], "calls": sum(row["calls"] for row in rows)}
    return step | {"too_small": sum(row["calls"] for row in rows if row["bound"] == "too small"), "gemms": rows}


def as_text(content):
    """Return the GEMMs of the largest step, and a line for every step."""
    last = content["steps"][-1]
    return (
        f"{content['device']}, {content['precision']}, fastest: {ceilings_line(content['ceilings'])}\n\n"
        f"batch {last['batch_size']}, {last['seq_len']} tokens\n"
        f"{text_table(*columns(GEMM_COLUMNS, last['gemms']))}\n\n"
        f"{text_table(*columns(STEP_COLUMNS, content['steps']), left=0)}"
    )


@contextlib.contextmanager
def enough_memory(sizes):
    """Turn PyTorch's error for a lack of memory into a Failure."""
    try:
        yield
    except RuntimeError as error:
        if "out of memory" in str(error) or "can't allocate memory" in str(error):
            raise Failure(1, f"batch {sizes.B}, {sizes.T} tokens don't fit into memory: choose fewer") from None
        raise


def analyze_trace(options):
    """Print the matmuls of a trace by shape; only their number and time where no peak is known."""
    profile = read_profile(options.trace_file, gpu=options.gpu)
    check_one_gpu(profile)
    found = gemm_results(profile, options.peak)
    if not found["gemms"]:
        why = no_gemms(profile)
        raise Failure(2, f"{profile.path}: {why[0].lower()}{why[1:]}")
    device = profile.device or "device not named"
    text = [f"{found['trace']}: {device}", *found["remarks"], "", text_table(*gemm_table(found), left=3)]
    emit(found, "\n".join(text), options.json)


def analyze(options):
    if options.trace_file:
        analyze_trace(options)
        return
    if not options.model_config:
        raise Failure(2, "give --model-config YAML to measure version 1's matmuls, or --trace-file FILE")
    import torch

    config = read_config(pathlib.Path(options.model_config))
    steps = {sizes_of(config, *size): [] for size in itertools.product(options.batch_sizes, options.sequence_lengths)}
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    load_version(1).parse_options(["--device", device])  # it says what is wrong with it
    precision = precision_here(options.precision, device)
    if precision != options.precision:
        progress(f"TF32 has no effect here: the matmuls are measured in {precision}")
    roofs = measure_ceilings(device, precision)  # allows TF32 where it is asked for
    for sizes, timed in steps.items():
        progress(f"batch {sizes.B}, {sizes.T} tokens ...")
        for gemm in gemms(sizes, counts.ELEMENT_BYTES[precision]):
            with enough_memory(sizes):
                timed.append(gemm | {"us": 1e6 * seconds(gemm, device, getattr(torch, precision, torch.float32))})
            roofs["matmul_tflops"] = max(roofs["matmul_tflops"], gemm["flops"] / timed[-1]["us"] / 1e6)
    units = processors(device)
    rows = [step_row(sizes, [rated(gemm, roofs, units) for gemm in timed], roofs) for sizes, timed in steps.items()]
    name = torch.cuda.get_device_name(device) if device != "cpu" else platform.machine()
    content = {"device": name, "precision": precision, "config": config, "ceilings": roofs, "steps": rows}
    emit(content, as_text(content), options.json)


def main(argv=None):
    parser = Parser("analyze_gemm_operations.py", __doc__)
    add = parser.add_argument
    add("--trace-file", metavar="FILE", help="read the matmuls of this PyTorch trace, or of the one in this folder")
    add("--peak", type=peak, metavar="TFLOPS,TB/S", help="peaks of the trace's GPU (default: its data sheet's)")
    add("--model-config", metavar="YAML", help="sizes, as in tiny_llama_v1_config.yaml")
    add("--batch-sizes", type=numbers, default=[8], metavar="B,..", help="(8)")
    add("--sequence-lengths", type=numbers, default=[128], metavar="T,..", help="(128)")
    add("--precision", choices=counts.ELEMENT_BYTES, default="float32", help="(%(default)s)")
    add("--device", help="cpu, cuda or cuda:N (a GPU if there is one)")
    add_gpu(parser)
    return parser.run(analyze, argv)


if __name__ == "__main__":
    sys.exit(main())
