#!/usr/bin/env python3
"""Measure how much of a step's communication between GPUs is hidden behind computation, from one trace per rank.

A kernel of NCCL or RCCL communicates, and so does a copy to or from another GPU. It is hidden while any other kernel or
copy runs on the same GPU, and exposed while none does. Record the traces with --enable-pytorch-profiler under torchrun;
of a folder the newest trace of each rank is read.

Exit status: 0 analysed, 2 for bad input.
"""

import argparse
import pathlib
import re
import sys

from common.command_line import Failure, Parser, add_steps, run_tool
from common.profiles import Kernel, Profile, busy_intervals, gpu_launches, steps_needed, unlike, whole_traces
from common.tables import emit, text_table

COMMUNICATES = re.compile(r"(nccl|rccl|msccl|Memcpy PtoP)", re.IGNORECASE)  # ncclDevKernel_...


def length_ns(intervals: list[tuple[float, float]]) -> float:
    return sum(end - start for start, end in intervals)


def overlap_ns(ones: list[tuple[float, float]], others: list[tuple[float, float]]) -> float:
    """Return how long both run; each list is sorted, and its intervals do not overlap."""
    total, i, j = 0.0, 0, 0
    while i < len(ones) and j < len(others):
        total += max(0.0, min(ones[i][1], others[j][1]) - max(ones[i][0], others[j][0]))
        if ones[i][1] < others[j][1]:
            i += 1
        else:
            j += 1
    return total


def communication(launches: list[Kernel], steps: int) -> dict:
    """Return times in ms per step: communicating, of that exposed, and busy with anything."""
    talking = [kernel for kernel in launches if COMMUNICATES.match(kernel.name)]
    computing = busy_intervals(kernel for kernel in launches if not COMMUNICATES.match(kernel.name))
    busy, talk = length_ns(busy_intervals(launches)), busy_intervals(talking)
    exposed = length_ns(talk) - overlap_ns(talk, computing)
    return {
        "transfers_per_step": len(talking) / steps,
        "communication_ms": length_ns(talk) / steps / 1e6,
        "exposed_ms": exposed / steps / 1e6,
        "busy_ms": busy / steps / 1e6,
        "exposed_share": exposed / busy,
    }


def trace_files(names: list[str]) -> list[pathlib.Path]:
    """Return the files that are named and, of each folder, the newest trace of each rank."""
    files = []
    for path in map(pathlib.Path, names):
        newest: dict[str, pathlib.Path] = {}
        for file in whole_traces(path) if path.is_dir() else []:
            rank = re.search(r"_rank(\d+)_", file.name)
            newest.setdefault(rank[1] if rank else "", file)
        ranks = sorted((rank for rank in newest if rank), key=int) or list(newest)
        files += [newest[rank] for rank in ranks] if path.is_dir() else [path]
    if not files:
        raise Failure(2, f"{' '.join(names)} holds no trace_*.pt.trace.json: record one with --enable-pytorch-profiler")
    return files


def as_text(rows: list[dict]) -> str:
    cells = [
        [
            *(row["trace"], row["steps"], f"{row['transfers_per_step']:.1f}", f"{row['communication_ms']:.3f}"),
            *(f"{row['exposed_ms']:.3f}", f"{row['busy_ms']:.3f}", f"{100 * row['exposed_share']:.1f} %"),
        ]
        for row in rows
    ]
    header = ["per step of", "steps", "transfers", "communication ms", "exposed ms", "GPU busy ms", "exposed"]
    return text_table(header, cells)


def analyze(options: argparse.Namespace) -> None:
    rows, first = [], None
    for file in trace_files(options.traces):
        profile, launches = gpu_launches(file, options.steps)
        found = unlike((first or profile).metadata, profile.metadata)
        if found:
            raise Failure(2, f"{first.path} and {file} are unlike ({'; '.join(found)}): give the ranks of one run")
        first = first or profile
        rows.append(rank_row(profile, launches))
    emit({"processes": rows}, as_text(rows), options.json)


def rank_row(profile: Profile, launches: list[Kernel]) -> dict:
    steps = steps_needed(profile)
    return {"trace": str(profile.path), "steps": steps, **communication(launches, steps)}


def main(argv: list[str] | None = None) -> int:
    parser = Parser(
        "analyze_communication.py",
        "Measure how much of the communication between GPUs is hidden behind computation, per rank.",
        "pytorch_profiles/",
    )
    parser.add_argument("traces", nargs="+", metavar="TRACE", help="traces of one run's ranks, or their folder")
    add_steps(parser)
    options = parser.parse_args(argv)
    return run_tool("analyze_communication.py", lambda: analyze(options))


if __name__ == "__main__":
    sys.exit(main())
