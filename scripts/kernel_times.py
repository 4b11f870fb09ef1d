#!/usr/bin/env python3
"""Print the kernel times of a profile as one table, whichever profiler wrote it.

example: python kernel_times.py hotspots/hotspot_20260101_120000 --top 10 --csv kernels.csv

In a folder with one run in several forms it reads the most detailed. The CSV's fourth column is the total time, its
last the kernel's name: sort -t, -k4 -nr kernels.csv
"""

import json
import pathlib
import sys

from common.command_line import Parser, positive
from common.profiles import KINDS, files_of, group_table, kernel_table, kernel_text, read_kernels
from common.tables import emit, write_csv


def write_launches(calls, file):
    """Write a row per launch, those of a path in order of time."""
    rows = [
        {"group": one.group, "kind": one.kind, "track": one.track, "start_ns": one.start_ns}
        | {"duration_ns": one.total_ns, "kernel": one.name}
        for one in calls
    ]
    write_csv(rows, file)


def write_trace(calls, file):
    """Write the launches as a Chrome trace, which ui.perfetto.dev opens."""
    # One process per kind and one line per track; Perfetto wants whole numbers for both.
    kinds, tracks = (sorted({getattr(one, key) for one in calls}) for key in ("kind", "track"))
    categories = {kind: category for category, kind in reversed(KINDS.items())}
    events = [{"ph": "M", "name": "process_name", "pid": i, "args": {"name": kind}} for i, kind in enumerate(kinds)]
    for one in calls:
        place = {"pid": kinds.index(one.kind), "tid": tracks.index(one.track)}
        times = {"ts": one.start_ns / 1e3, "dur": one.total_ns / 1e3, "args": {"group": one.group}}
        events.append({"ph": "X", "cat": categories.get(one.kind, "cpu_op"), "name": one.name, **place, **times})
    json.dump({"displayTimeUnit": "ms", "traceEvents": events}, file)


WRITERS = {
    "csv": lambda calls, file: write_csv(kernel_table(calls), file),
    "launches": write_launches,
    "trace": write_trace,
}


def read_and_write(options):
    calls = read_kernels(*options.paths)
    for name, write in WRITERS.items():
        if target := getattr(options, name):
            with open(target, "w", encoding="utf-8", newline="") as file:
                write(calls, file)
    files = [file for path in options.paths for file in files_of(pathlib.Path(path))]
    text = f"{kernel_text(calls, options.top)}\n\nread from {', '.join(map(str, files))}"
    emit({"kernels": kernel_table(calls), "groups": group_table(calls)}, text, options.json)


def main(argv=None):
    parser = Parser("kernel_times.py", __doc__)
    add = parser.add_argument
    add("paths", nargs="+", metavar="PATH", help="files or folders of one run (several: one per process)")
    add("--top", type=positive, default=20, metavar="N", help="kernels to print (%(default)s)")
    add("--csv", metavar="FILE", help="write the whole table as CSV")
    add("--launches", metavar="FILE", help="write every launch with start and duration as CSV")
    add("--trace", metavar="FILE", help="write the launches as a trace for ui.perfetto.dev")
    return parser.run(read_and_write, argv)


if __name__ == "__main__":
    sys.exit(main())
