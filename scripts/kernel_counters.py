#!/usr/bin/env python3
"""Print the hardware counters of every kernel as one table, from rocprofv3, rocprof-compute or Nsight Compute.

A folder is searched for their files. The values are means over a kernel's launches.
"""

import sys

from common.command_line import Parser, positive, run_tool
from common.profiles import counter_table, read_counters, short
from common.tables import emit, text_table, write_csv

# Of the many metrics in a report of Nsight Compute, the ones to print first: time, compute, memory, occupancy.
SHOWN_FIRST = (
    "gpu__time_duration.sum",
    "sm__throughput.avg.pct_of_peak_sustained_elapsed",
    "gpu__compute_memory_throughput.avg.pct_of_peak_sustained_elapsed",
    "sm__warps_active.avg.pct_of_peak_sustained_active",
)


def as_text(rows, top):
    """Return kernels down, counters across, those with the largest sum of the first counter first."""
    cells = {(row["kernel"], row["counter"]): row for row in rows}
    names = {row["counter"]: row["unit"] for row in rows}
    shown = [name for name in SHOWN_FIRST if name in names] or list(names)[:4]
    sums = {row["kernel"]: row["mean"] * row["launches"] for row in rows if row["counter"] == shown[0]}
    lines = [f"{len(sums)} kernels; means of a launch:"]
    lines += [f"  [{i}] {name} {names[name]}".rstrip() for i, name in enumerate(shown, 1)]
    table = [
        [short(kernel, 44), f"{cells[kernel, shown[0]]['launches']:,}"]
        + [f"{cells[kernel, name]['mean']:,.1f}" if (kernel, name) in cells else "-" for name in shown]
        for kernel in sorted(sums, key=lambda kernel: -sums[kernel])[:top]
    ]
    lines.append(text_table(["kernel", "launches", *(f"[{i}]" for i in range(1, len(shown) + 1))], table))
    for name in shown:
        if all(row["max"] == 0 for row in rows if row["counter"] == name):
            lines.append(f"{name} is 0 in every launch: this GPU may not count it, or only at a stable power level")
    return "\n".join(lines)


def analyze(options):
    rows = counter_table(read_counters(*options.paths))
    if options.csv:
        with open(options.csv, "w", encoding="utf-8", newline="") as file:
            write_csv(rows, file)
    emit({"counters": rows}, as_text(rows, options.top), options.json)


def main(argv=None):
    parser = Parser(
        "kernel_counters.py",
        "Print the hardware counters of every kernel as one table.",
        "counters/counter_20260101_120000 --csv counters.csv",
    )
    parser.add_argument("paths", nargs="+", metavar="PATH", help="files or folders that a profiler left")
    parser.add_argument("--top", type=positive, default=20, metavar="N", help="kernels to print (%(default)s)")
    parser.add_argument("--csv", metavar="FILE", help="write every counter of every kernel as CSV")
    options = parser.parse_args(argv)
    return run_tool("kernel_counters.py", lambda: analyze(options))


if __name__ == "__main__":
    sys.exit(main())
