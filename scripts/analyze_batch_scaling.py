#!/usr/bin/env python3
"""How time, throughput and memory of a step grow with the batch, from one profile folder for each batch size.

Reads the traces that the training scripts write with --enable-pytorch-profiler: batch size and tokens are told from the
recorded shapes, times from the marks of the steps (under the profiler, so somewhat long), memory where --profile-memory
was given. A line through the times tells the fixed part of a step from that of each sequence.

Exit status: 0 analysed, 2 for bad input.
"""

import argparse
import pathlib
import statistics
import sys

from common.analysis import Parser, emit, known, text_table
from common.command_line import Failure, run_tool
from common.traces import content_of, newest_trace


def step_times(events: list[dict]) -> list[float]:
    """Milliseconds of each marked step: from its forward to the end of its optimizer or of its last kernel."""
    marks = {
        name: sorted((e for e in events if e.get("cat") == "user_annotation" and e["name"] == name), key=start)
        for name in ("forward", "optimizer")
    }
    kernels = [e for e in events if e.get("cat") == "kernel"]
    times = []
    borders = [start(e) for e in marks["forward"][1:]] + [float("inf")]
    for forward, optimizer, border in zip(marks["forward"], marks["optimizer"], borders, strict=False):
        ends = [end(optimizer)] + [end(e) for e in kernels if start(forward) <= start(e) < border]
        times.append((max(ends) - start(forward)) / 1e3)
    return times


def start(event: dict) -> float:
    return event["ts"]


def end(event: dict) -> float:
    return event["ts"] + event["dur"]


def batch_shape(events: list[dict]) -> tuple[int, int] | None:
    """Sequences and tokens of the batch, from the shape that the embedding looked up."""
    for event in events:
        if event.get("name") == "aten::embedding" and event.get("args", {}).get("Input Dims"):
            tokens = event["args"]["Input Dims"][1]
            return tokens[0], tokens[1]
    return None


def peak_mib(events: list[dict]) -> float | None:
    """Most memory in use on the GPU (on the CPU without one), where the profile recorded it."""
    memory = [e["args"] for e in events if e.get("name") == "[memory]"]
    on_gpu = [m for m in memory if m["Device Type"] != 0]
    return max((m["Total Allocated"] for m in on_gpu or memory), default=None)


def read_folder(folder: pathlib.Path) -> dict:
    """Batch size, tokens, step times (ms) and peak memory (MiB or None) of one profile folder."""
    file = newest_trace(folder)
    if file is None:
        raise Failure(2, f"{folder} holds no PyTorch trace: profile with tiny_llama_v1.py --enable-pytorch-profiler")
    content = content_of(file)
    events = [e for e in content["traceEvents"] if isinstance(e, dict) and "ts" in e]
    complete = [e for e in events if e.get("ph") == "X" and "dur" in e]
    shape, times = batch_shape(complete), step_times(complete)
    if shape is None or not times:
        raise Failure(2, f"{file} marks no training steps with shapes: write it with tiny_llama_v*.py, without --graph")
    peak = peak_mib(events)
    return {
        "folder": str(folder),
        "batch_size": shape[0],
        "seq_len": shape[1],
        "steps": len(times),
        "step_ms": statistics.median(times),
        "peak_mib": None if peak is None else peak / 2**20,
    }


def line_through(xs: list[float], ys: list[float]) -> tuple[float, float] | None:
    """Intercept and slope of the least-squares line; None where all x are the same."""
    if len(set(xs)) < 2:
        return None
    slope, intercept = statistics.linear_regression(xs, ys)
    return intercept, slope


def scaling(rows: list[dict]) -> dict:
    """The rows by batch size with throughput and efficiency, and the lines through time and memory.

    efficiency: throughput over that of the smallest batch, divided by how many times as large the batch is.
    """
    rows = sorted(rows, key=lambda row: row["batch_size"])
    for row in rows:
        row["samples_per_second"] = 1e3 * row["batch_size"] / row["step_ms"]
        growth = row["batch_size"] / rows[0]["batch_size"]
        row["efficiency"] = row["samples_per_second"] / rows[0]["samples_per_second"] / growth
    sizes = [row["batch_size"] for row in rows]
    time = line_through(sizes, [row["step_ms"] for row in rows])
    with_memory = [row for row in rows if row["peak_mib"] is not None]
    memory = line_through([row["batch_size"] for row in with_memory], [row["peak_mib"] for row in with_memory])
    return {
        "rows": rows,
        "fixed_ms": time and time[0],
        "ms_a_sequence": time and time[1],
        "fixed_mib": memory and memory[0],
        "mib_a_sequence": memory and memory[1],
        "best_batch_size": max(rows, key=lambda row: row["samples_per_second"])["batch_size"],
    }


def as_text(content: dict) -> str:
    rows = [
        [
            *(row["batch_size"], row["seq_len"], row["steps"]),
            f"{row['step_ms']:,.3f}",
            f"{row['samples_per_second']:,.1f}",
            f"{row['step_ms'] / row['batch_size']:,.3f}",
            f"{100 * row['efficiency']:.0f} %",
            known(row["peak_mib"], ",.1f"),
        ]
        for row in content["rows"]
    ]
    header = ["batch", "tokens", "steps", "step ms", "samples/s", "ms a sequence", "of ideal", "peak MiB"]
    lines = [text_table(header, rows, left=0), ""]
    if content["fixed_ms"] is not None:
        fixed, each = content["fixed_ms"], content["ms_a_sequence"]
        lines.append(f"step time  {fixed:,.3f} ms + {each:,.3f} ms for each sequence")
        if fixed > 0 < each:
            lines.append(
                f"           half of a step is the fixed part (launches, optimizer) at batch {fixed / each:,.1f}"
            )
    if content["fixed_mib"] is not None:
        lines.append(f"memory     {content['fixed_mib']:,.1f} MiB + {content['mib_a_sequence']:,.1f} MiB a sequence")
    elif any(row["peak_mib"] is None for row in content["rows"]):
        lines.append("memory     not recorded: profile with --profile-memory as well")
    lines.append(f"most samples a second at batch {content['best_batch_size']}")
    return "\n".join(lines)


def analyze(options: argparse.Namespace) -> None:
    rows = [read_folder(pathlib.Path(folder)) for folder in options.profile_dirs]
    if len({row["seq_len"] for row in rows}) > 1:
        raise Failure(2, "the profiles have different numbers of tokens: give folders that differ in the batch alone")
    sizes = [row["batch_size"] for row in rows]
    if len(set(sizes)) < len(sizes):
        raise Failure(2, f"two profiles have the same batch size ({', '.join(map(str, sizes))}): give one for each")
    content = scaling(rows)
    emit(content, as_text(content), options.json)


def main(argv: list[str] | None = None) -> int:
    parser = Parser(
        "analyze_batch_scaling.py",
        "How time, throughput and memory of a step grow with the batch.",
        "--profile-dirs scaling_bs*",
    )
    parser.add_argument("--profile-dirs", nargs="+", required=True, metavar="DIR", help="one folder a batch size")
    options = parser.parse_args(argv)
    return run_tool("analyze_batch_scaling.py", lambda: analyze(options))


if __name__ == "__main__":
    sys.exit(main())
