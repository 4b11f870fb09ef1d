#!/usr/bin/env python3
"""How much of a step's communication between GPUs is hidden behind its computation, from one trace a process.

A kernel of NCCL or RCCL communicates, and so do a copy to or from another GPU and the barrier that waits for its owner.
It is hidden while any other kernel or copy runs on the same GPU, and exposed while none does. With --peer-adamw only
barriers count: what AdamW's kernel reads from and writes to other GPUs is not told apart from its own work.
Record the traces with --enable-pytorch-profiler under torchrun, which leaves one for each process.

Exit status: 0 analysed, 2 for bad input.
"""

import argparse
import pathlib
import re
import sys

from analyze_kernel_launches import busy_intervals, launches_on_gpu
from common.analysis import Parser, emit, text_table
from common.command_line import Failure, run_tool
from common.traces import steps_needed

BARRIER = "c10d::symmetric_memory::barrier_kernel"
COMMUNICATES = re.compile(rf"(nccl|rccl|msccl|Memcpy PtoP|(void )?{BARRIER})", re.IGNORECASE)  # ncclDevKernel_...


def length_ns(intervals: list[tuple[float, float]]) -> float:
    return sum(end - start for start, end in intervals)


def overlap_ns(ones: list[tuple[float, float]], others: list[tuple[float, float]]) -> float:
    """How long both run; each list is sorted, and its intervals do not overlap."""
    total, i, j = 0.0, 0, 0
    while i < len(ones) and j < len(others):
        total += max(0.0, min(ones[i][1], others[j][1]) - max(ones[i][0], others[j][0]))
        if ones[i][1] < others[j][1]:
            i += 1
        else:
            j += 1
    return total


def communication(launches: list[dict], steps: int) -> dict:
    """Times in ms a step: communicating, of that exposed, and busy with anything; exposed_share is of busy time."""
    talking = [row for row in launches if COMMUNICATES.match(row["kernel"])]
    computing = busy_intervals([row for row in launches if not COMMUNICATES.match(row["kernel"])])
    busy, talk = length_ns(busy_intervals(launches)), busy_intervals(talking)
    exposed = length_ns(talk) - overlap_ns(talk, computing)
    return {
        "transfers_a_step": sum(BARRIER not in row["kernel"] for row in talking) / steps,
        "communication_ms": length_ns(talk) / steps / 1e6,
        "exposed_ms": exposed / steps / 1e6,
        "busy_ms": busy / steps / 1e6,
        "exposed_share": exposed / busy,
    }


def trace_files(names: list[str]) -> list[pathlib.Path]:
    """The files that are named, and those that lie in the folders that are."""
    files = []
    for path in map(pathlib.Path, names):
        files += sorted(path.glob("trace_*.pt.trace.json*")) if path.is_dir() else [path]
    if not files:
        raise Failure(2, f"{' '.join(names)} holds no trace_*.pt.trace.json: record one with --enable-pytorch-profiler")
    return files


def read_communication(path: pathlib.Path, steps: int | None) -> dict:
    profile, launches = launches_on_gpu(path, steps)
    return {"trace": str(path), "steps": steps_needed(profile), **communication(launches, steps_needed(profile))}


def as_text(rows: list[dict]) -> str:
    cells = [
        [
            pathlib.Path(row["trace"]).name,
            row["steps"],
            f"{row['transfers_a_step']:.1f}",
            f"{row['communication_ms']:.3f}",
            f"{row['exposed_ms']:.3f}",
            f"{row['busy_ms']:.3f}",
            f"{100 * row['exposed_share']:.1f} %",
        ]
        for row in rows
    ]
    header = ["a step of", "steps", "transfers", "communication ms", "of it exposed", "GPU busy ms", "exposed"]
    return text_table(header, cells)


def analyze(options: argparse.Namespace) -> None:
    rows = [read_communication(path, options.steps) for path in trace_files(options.traces)]
    emit({"processes": rows}, as_text(rows), options.json)


def main(argv: list[str] | None = None) -> int:
    parser = Parser(
        "analyze_communication.py",
        "How much of the communication between GPUs is hidden behind computation, for each process's trace.",
        "pytorch_profiles/",
    )
    parser.add_argument("traces", nargs="+", metavar="TRACE", help="traces of one run's processes, or their folder")
    parser.add_argument("--steps", type=int, metavar="N", help="steps in each, where they do not say so themselves")
    options = parser.parse_args(argv)
    if options.steps is not None and options.steps < 1:
        parser.error("--steps must be positive")
    return run_tool("analyze_communication.py", lambda: analyze(options))


if __name__ == "__main__":
    sys.exit(main())
