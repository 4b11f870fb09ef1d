#!/usr/bin/env python3
"""Hardware counters of every kernel as one table, from rocprofv3 (CSV or rocpd database) or Nsight Compute (CSV).

A folder is searched for them. The values are means over a kernel's launches. Standard library only.

As a module: `read_counters(path)` gives (kernel, counter, unit, value) for each launch, `table(values)` the rows.
"""

import argparse
import contextlib
import csv
import json
import pathlib
import sqlite3
import sys
from collections.abc import Iterator

from common.command_line import run_tool
from kernel_times import KernelFileError, clean, column, group_of, short, write_csv

# Of the many metrics in a report of Nsight Compute, the ones to print first: time, compute, memory, occupancy.
SHOWN_FIRST = (
    "gpu__time_duration.sum",
    "sm__throughput.avg.pct_of_peak_sustained_elapsed",
    "gpu__compute_memory_throughput.avg.pct_of_peak_sustained_elapsed",
    "sm__warps_active.avg.pct_of_peak_sustained_active",
)
PATTERNS = ("*counter_collection.csv", "*.db", "ncu*.csv")
Value = tuple[str, str, str, float]  # kernel, counter, unit, value


def rows_of_csv(path: pathlib.Path) -> list[list[str]]:
    """The rows of a CSV file from its header on; Nsight Compute may print lines that begin with == before it."""
    try:
        lines = [line for line in path.read_text(errors="replace").splitlines() if line and not line.startswith("==")]
    except OSError as error:
        raise KernelFileError(f"cannot be read: {error.strerror}") from None
    if not lines:
        raise KernelFileError("is empty: the profiler was stopped, or wrote nothing")
    rows = list(csv.reader(lines))
    for number, row in enumerate(rows, 1):
        if len(row) != len(rows[0]):
            raise KernelFileError(f"is cut off or damaged: row {number} has {len(row)} cells of {len(rows[0])}")
    return rows


def number(text: str, row: int) -> float:
    try:
        return float(text.replace(",", ""))  # Nsight Compute writes 1,024
    except ValueError:
        raise KernelFileError(f"is damaged: row {row} has text where a number belongs") from None


def read_csv(path: pathlib.Path) -> Iterator[Value]:
    header, *rows = rows_of_csv(path)
    kernel = column(header, "kernel_name", "kernel name")
    counter = column(header, "counter_name", "metric name")
    value = column(header, "counter_value", "metric value")
    if kernel is None:
        raise KernelFileError(
            "has no column of kernel names: give a counter_collection file of rocprofv3 or CSV of ncu"
        )
    if counter is None:
        yield from read_wide(header, rows, kernel)
        return
    unit = column(header, "metric unit")
    for index, row in enumerate(rows, 2):
        if row[counter]:
            yield clean(row[kernel]), row[counter], row[unit] if unit is not None else "", number(row[value], index)


def read_wide(header: list[str], rows: list[list[str]], kernel: int) -> Iterator[Value]:
    """The raw page of Nsight Compute: a column for each metric, whose units stand in the first row."""
    metrics = [i for i, name in enumerate(header) if "__" in name]
    if not metrics or not rows:
        raise KernelFileError(
            "has neither counters nor metrics: give a counter_collection file of rocprofv3 or CSV of ncu"
        )
    for index, row in enumerate(rows[1:], 3):
        for i in metrics:
            if row[i] and row[i][0] in "-.0123456789":  # some metrics are words
                yield clean(row[kernel]), header[i], rows[0][i], number(row[i], index)


def read_database(path: pathlib.Path) -> Iterator[Value]:
    try:
        with contextlib.closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as connection:
            for kernel, counter, value in connection.execute(
                "SELECT kernel_name, counter_name, value FROM counters_collection"
            ):
                yield clean(kernel), counter, "", float(value)
    except sqlite3.Error as error:
        raise KernelFileError(f"holds no counters, or is damaged ({error})") from None


def read_counters(*paths: str | pathlib.Path) -> list[Value]:
    """(kernel, counter, unit, value) of every launch in these files and folders.

    Raises KernelFileError, a sentence for the user, for what is missing, empty, cut off, damaged or of another kind.
    """
    values = []
    for path in map(pathlib.Path, paths):
        at = path
        try:
            if not path.exists():
                raise KernelFileError("does not exist")
            found = [sorted(path.rglob(pattern)) for pattern in PATTERNS] if path.is_dir() else [[path]]
            files = next((files for files in found if files), [])
            if not files:
                raise KernelFileError("is a folder without counters: no counter_collection or ncu file lies in it")
            for at in files:
                with open(at, "rb") as file:
                    database = file.read(16) == b"SQLite format 3\0"
                values += read_database(at) if database else read_csv(at)
        except KernelFileError as error:
            raise KernelFileError(f"{at} {error}") from None
    if not values:
        raise KernelFileError(f"{', '.join(map(str, paths))} holds no counter of any kernel")
    return values


def table(values: list[Value]) -> list[dict]:
    """A row for each kernel and counter: kernel group counter unit launches mean min max."""
    parts: dict[tuple[str, str, str], list[float]] = {}
    for kernel, counter, unit, value in values:
        parts.setdefault((kernel, counter, unit), []).append(value)
    return [
        {
            "kernel": kernel,
            "group": group_of(kernel),
            "counter": counter,
            "unit": unit,
            "launches": len(part),
            "mean": sum(part) / len(part),
            "min": min(part),
            "max": max(part),
        }
        for (kernel, counter, unit), part in parts.items()
    ]


def as_text(rows: list[dict], top: int, width: int = 44) -> str:
    """Kernels down, counters across, those with the largest sum of the first counter first."""
    names = list(dict.fromkeys(row["counter"] for row in rows))
    shown = [name for name in SHOWN_FIRST if name in names] or names[:4]
    units = {row["counter"]: row["unit"] for row in rows}
    cells = {(row["kernel"], row["counter"]): row for row in rows}
    sums = {row["kernel"]: row["mean"] * row["launches"] for row in rows if row["counter"] == shown[0]}
    kernels = sorted(sums, key=sums.get, reverse=True)
    lines = [f"{len(kernels)} kernels; means of a launch:"]
    lines += [f"  [{i}] {name} {units[name]}".rstrip() for i, name in enumerate(shown, 1)]
    lines.append(f"{'kernel':<{width}}  launches" + "".join(f"{f'[{i}]':>16}" for i in range(1, len(shown) + 1)))
    for kernel in kernels[:top]:
        means = [f"{cells[kernel, name]['mean']:,.1f}" if (kernel, name) in cells else "-" for name in shown]
        launches = cells[kernel, shown[0]]["launches"]
        lines.append(f"{short(kernel, width):<{width}}  {launches:>8,}" + "".join(f"{mean:>16}" for mean in means))
    for name in shown:
        if all(row["max"] == 0 for row in rows if row["counter"] == name):
            lines.append(f"{name} is 0 in every launch: this GPU may not count it, or only at a stable power level")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="kernel_counters.py",
        description="The hardware counters of every kernel as one table.",
        epilog="example: python kernel_counters.py counters/counter_20260101_120000 --csv counters.csv",
    )
    parser.add_argument("paths", nargs="+", metavar="PATH", help="files or folders that a profiler left")
    parser.add_argument("--top", type=int, default=20, metavar="N", help="kernels to print (%(default)s)")
    parser.add_argument("--csv", metavar="FILE", help="write every counter of every kernel as CSV")
    parser.add_argument("--json", metavar="FILE", help="write them as JSON (- prints it instead of the text)")
    options = parser.parse_args(argv)

    def work() -> None:
        rows = table(read_counters(*options.paths))
        if options.csv:
            with open(options.csv, "w", encoding="utf-8", newline="") as file:
                write_csv(rows, file)
        text = json.dumps({"counters": rows}, indent=1)
        if options.json not in (None, "-"):
            pathlib.Path(options.json).write_text(text + "\n", encoding="utf-8")
        print(text if options.json == "-" else as_text(rows, options.top))

    return run_tool("kernel_counters.py", work)


if __name__ == "__main__":
    sys.exit(main())
