#!/usr/bin/env python3
"""Print the kernel times of a profile as one table, whichever profiler wrote it.

Reads what common/profiles.py reads: files of rocprofv3, Nsight Systems and PyTorch. In a folder with one run in several
forms it takes the most detailed. The CSV's fourth column is the total time, its last the kernel's name:
sort -t, -k4 -nr kernels.csv
"""

import argparse
import json
import sys

from common.command_line import Parser, positive, run_tool
from common.profiles import Kernel, group_table, kernel_table, kernel_text, launches_of, read_kernels
from common.tables import write_csv


def launch_rows(kernels: list[Kernel]) -> list[dict]:
    """Return a row per launch in order of time."""
    return [
        {"group": one.group, "kind": one.kind, "track": one.track, "start_ns": one.start_ns}
        | {"duration_ns": one.total_ns, "kernel": one.name}
        for one in launches_of(kernels)
    ]


def write_json(kernels: list[Kernel], file) -> None:
    json.dump({"kernels": kernel_table(kernels), "groups": group_table(kernels)}, file, indent=1)
    file.write("\n")


def write_trace(kernels: list[Kernel], file) -> None:
    """Write the launches as a Chrome trace, which ui.perfetto.dev opens."""
    launches = launches_of(kernels)
    # One process per kind and one line per track; Perfetto wants whole numbers for both.
    kinds, tracks = (sorted({getattr(one, key) for one in launches}) for key in ("kind", "track"))
    events = [{"ph": "M", "name": "process_name", "pid": i, "args": {"name": kind}} for i, kind in enumerate(kinds)]
    for one in launches:
        place = {"pid": kinds.index(one.kind), "tid": tracks.index(one.track)}
        times = {"ts": one.start_ns / 1e3, "dur": one.total_ns / 1e3}
        cat = {"copy": "gpu_memcpy", "kernel": "kernel"}.get(one.kind, "cpu_op")
        events.append({"ph": "X", "cat": cat, "name": one.name, **place, **times, "args": {"group": one.group}})
    json.dump({"displayTimeUnit": "ms", "traceEvents": events}, file)


WRITERS = {
    "csv": lambda kernels, file: write_csv(kernel_table(kernels), file),
    "json": write_json,
    "launches": lambda kernels, file: write_csv(launch_rows(kernels), file),
    "trace": write_trace,
}


def write_results(kernels: list[Kernel], options: argparse.Namespace) -> None:
    """Write the files that were asked for, and the table to standard output unless one of them goes there."""
    chosen = {name: getattr(options, name) for name in WRITERS if getattr(options, name)}
    for name, target in chosen.items():
        if target == "-":
            WRITERS[name](kernels, sys.stdout)
        else:
            with open(target, "w", encoding="utf-8", newline="") as file:
                WRITERS[name](kernels, file)
    if "-" not in chosen.values():
        print(kernel_text(kernels, options.top))


def main(argv: list[str] | None = None) -> int:
    parser = Parser(
        "kernel_times.py",
        "Print the kernel times of a profile as one table, whichever profiler wrote it.",
        "hotspots/hotspot_20260101_120000 --top 10 --csv kernels.csv",
        with_json=False,
    )
    add = parser.add_argument
    add("paths", nargs="+", metavar="PATH", help="files or folders of one run (several: one per process)")
    add("--top", type=positive, default=20, metavar="N", help="kernels to print (%(default)s)")
    add("--csv", metavar="FILE", help="write the whole table as CSV (- prints it instead of the text)")
    add("--json", metavar="FILE", help="write kernels and groups as JSON (- prints it)")
    add("--launches", metavar="FILE", help="write every launch with start and duration as CSV (- prints it)")
    add("--trace", metavar="FILE", help="write the launches as a trace for ui.perfetto.dev (- prints it)")
    options = parser.parse_args(argv)
    return run_tool("kernel_times.py", lambda: write_results(read_kernels(*options.paths), options))


if __name__ == "__main__":
    sys.exit(main())
