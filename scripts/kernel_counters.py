#!/usr/bin/env python3
"""Print the hardware counters of every kernel as one table, from rocprofv3 (CSV or rocpd) or Nsight Compute (CSV).

example: python kernel_counters.py counters/counter_20260101_120000 --csv counters.csv

In a folder it looks for these profilers' files. Each value is the mean over a kernel's launches.
"""

import functools
import pathlib
import re
import sys

from common.command_line import Failure, Parser, add_gpu, positive
from common.files import errors_of, number
from common.profiles import (
    DATABASE,
    GPU_COLUMNS,
    MAY_BE_CUT,
    NO_END,
    PROCESS_COLUMNS,
    TABLE,
    check_one_result,
    clean,
    columns_of,
    count_of,
    group_of,
    labels_of,
    matching,
    old_counters,
    opened,
    short,
    shown_names,
)
from common.tables import emit, known, text_table, write_csv

FILES = ("*counter_collection.csv", "*.db", "ncu*.csv")
PASS = re.compile(r"(?:pass|pmc)_\d+")  # folders of get_counters.sh and rocprofv3
TIME = "gpu__time_duration.sum"  # comes first
NOT_ASKED_FOR = ("launch__", "device__")  # Nsight Compute adds such metrics to its reports
SHOWN = 6  # counters; the CSV holds all of them


def read_file(path):
    """Return [((process, GPU), kernel, counter, unit, value)] of every launch in a file."""
    with opened(path) as (container, content):
        if container == DATABASE:
            return counters_in_database(content)
        if container == TABLE:
            return counters_in_table(content)
        raise Failure(2, f"is {container}, not a table of counters: read traces with kernel_times.py")


def counters_in_database(found):
    if "counters_collection" not in found.names:
        return []
    place = ", ".join(columns_of(found.connection, "counters_collection", PROCESS_COLUMNS, GPU_COLUMNS))
    query = f"SELECT {place}, kernel_name, counter_name, value FROM counters_collection"
    return [
        ((process, gpu), clean(kernel), clean(counter), "", number(value))
        for process, gpu, kernel, counter, value in found.connection.execute(query)
    ]


def counters_in_table(table):
    if NO_END in table.notes:
        raise ValueError(MAY_BE_CUT)
    header = table.header
    rows = table.rows
    metrics = [column for column in header if "__" in column]
    if {"name", "counter", "value"} <= set(header):
        found = []
        for row in rows:
            if row["counter"] and ("unit" not in row or is_number(row["value"])):  # ncu's details hold words too
                what = (clean(row["name"]), clean(row["counter"]), row.get("unit", ""))
                found.append((place_of(row), *what, value_of(row["value"])))
        return found
    if {"counter", "Average"} <= set(header):
        raise Failure(2, "is a summary over launches: write it without --print-summary")
    old = old_counters(header)
    if "name" not in header or not (metrics or old):
        what = "give a counter_collection file of rocprofv3 or CSV of ncu"
        raise Failure(2, f"has no counters that this tool can read: {what}, or use rocprof-compute analyze -p FOLDER")
    units = {} if old else next(rows, {})  # ncu's first row; it writes 1,024, and some metrics are words
    return [
        (place_of(row), clean(row["name"]), metric, units.get(metric, ""), value_of(row[metric]))
        for row in rows
        for metric in old or metrics
        if is_number(row[metric])
    ]


def place_of(row):
    return row.get("process"), row.get("gpu")


NO_VALUE = re.compile(r"[+-]?nan|n/a", re.IGNORECASE)  # of a launch whose counter was not read


def is_number(text):
    return text[:1] in tuple("-.0123456789") or bool(NO_VALUE.fullmatch(text))


THOUSANDS = re.compile(r"-?\d{1,3}(,\d{3})+(\.\d+)?")


def value_of(text):
    """Return the number in a cell, in which ncu parts thousands; None where the profiler has none."""
    if NO_VALUE.fullmatch(text):
        return None
    if ("," in text and not THOUSANDS.fullmatch(text)) or text.count(".") > 1:
        raise Failure(2, f"has numbers like {clean(text)}: write it where decimals have a point (LC_ALL=C)")
    return number(text.replace(",", ""))


PREFIXES = {"n": 1e-9, "u": 1e-6, "m": 1e-3, "": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}


@functools.cache
def scale_of(unit):
    """Return how much one of a unit is without the prefixes, and the unit without them: ncu chooses one per value."""
    scale = 1.0
    bases = []
    for i, part in enumerate(unit.split("/")):
        found = re.fullmatch(r"([numKMGT]?)(byte|hz|cycle|s)(?:econd)?", part)
        if found:
            scale *= PREFIXES[found[1]] ** (-1 if i else 1)
        bases.append(found[2] if found else part)
    return scale, "/".join(bases)


def converted(value, unit, shown):
    """Return a value, None included, in the unit that is shown."""
    return value if value is None or unit == shown else value * scale_of(unit)[0] / scale_of(shown)[0]


def read_counters(path, gpu=None):
    """Return a row per kernel and counter in a file or a folder, and remarks about what the means hold.

    gpu: the one to read, of several. Each pass over a script is a process of its own.
    """
    choices = [[path]]
    if path.is_dir():
        check_one_result(path)
        choices = [matching(path, pattern) for pattern in FILES]
    launches = {}  # pass: those of all its files
    for file in next(filter(None, choices), []):
        with errors_of(file):
            launches.setdefault(tuple(PASS.findall(str(file.relative_to(path)))), []).extend(read_file(file))
    parts = {}
    pass_of = {}  # a counter that several passes over the script read is taken from the first
    units = {}  # counter and unit without prefix: the unit that is shown, which came first
    sources = []
    for this, found in launches.items():
        labels = labels_of(place for place, *_ in found)
        sources = max(sources, list(labels.values()), key=len)
        for place, kernel, counter, unit, value in found:
            if gpu in (None, labels[place]) and pass_of.setdefault(counter, this) == this:
                shown = units.setdefault((counter, scale_of(unit)[1]), unit)
                parts.setdefault((kernel, counter, shown), []).append(converted(value, unit, shown))
    if sources and gpu not in (None, *sources):
        raise Failure(2, f"{path} has no GPU or process {gpu}: it has {', '.join(sources)}")
    if not parts:
        raise Failure(2, f"{path}: no counter of any kernel is there")
    rows = []
    remarks = []
    if gpu is None and len(sources) > 1:
        one = f"--gpu reads one of {', '.join(sources)}"
        remarks.append(f"These are the counters of {count_of(sources)}, taken together: {one}.")
    for (kernel, counter, unit), part in parts.items():
        values = [value for value in part if value is not None]
        if len(values) < len(part):
            launches = f"{len(part) - len(values)} of {len(part)} launches of {short(kernel, 44)} have no value"
            remarks.append(f"{counter}: {launches} (NaN): its mean is over the others.")
        if values:
            row = {"kernel": kernel, "group": group_of(kernel), "counter": counter, "unit": unit}
            row |= {"launches": len(values), "mean": sum(values) / len(values), "min": min(values)}
            rows.append(row | {"max": max(values)})
    if not rows:
        raise Failure(2, f"{path}: no counter of any kernel has a value")
    return rows, remarks


def as_text(rows, top, named):
    """Return kernels down, counters across, the named ones if any; the largest sum of the first counter comes first."""
    means = {(row["kernel"], row["counter"], row["unit"]): row["mean"] for row in rows}
    every = list(dict.fromkeys((row["counter"], row["unit"]) for row in rows))
    wanted = (TIME, *named) if named else ()
    asked_for = [one for name in wanted for one in every if one[0] == name]
    asked_for = asked_for or [one for one in every if not one[0].startswith(NOT_ASKED_FOR)] or every
    shown = sorted(dict.fromkeys(asked_for), key=lambda one: one[0] != TIME)[:SHOWN]
    first = [row for row in rows if (row["counter"], row["unit"]) == shown[0]]
    first.sort(key=lambda row: -row["mean"] * row["launches"])
    lines = [f"{len(first)} kernels; means of a launch:"]
    table = []
    names = shown_names([row["kernel"] for row in first[:top]], 44)
    for row in first[:top]:
        values = [known(means.get((row["kernel"], *one)), ",.1f") for one in shown]
        table.append([names[row["kernel"]], f"{row['launches']:,}", *values])
    lines += [f"  [{i}] {name} {unit}".rstrip() for i, (name, unit) in enumerate(shown, 1)]
    lines.append(text_table(["kernel", "launches", *(f"[{i}]" for i, _ in enumerate(shown, 1))], table))
    of_amd = [name for name, _ in shown if "__" not in name]
    zero = [name for name in of_amd if all(row["max"] == 0 for row in rows if row["counter"] == name)]
    if zero:
        way_out = "a Radeon counts only at a stable power level: scripts/AMD.md, Profilers"
        lines.append(f"0 in every launch: {', '.join(zero)} ({way_out})")
    return "\n".join(lines)


def analyze(options):
    rows, remarks = read_counters(options.path, options.gpu)
    if options.csv:
        write_csv(rows, options.csv)
    text = "\n".join([as_text(rows, options.top, options.counters.split()), *remarks])
    emit({"counters": rows, "remarks": remarks}, text, options.json)


def main(argv=None):
    parser = Parser("kernel_counters.py", __doc__)
    add = parser.add_argument
    add("path", type=pathlib.Path, metavar="PATH", help="file or folder that a profiler wrote")
    add("--top", type=positive, default=20, metavar="N", help="kernels to print (%(default)s)")
    add("--counters", default="", metavar="'A B'", help="print these counters (the first six)")
    add("--csv", metavar="FILE", help="write every counter of every kernel as CSV")
    add_gpu(parser)
    return parser.run(analyze, argv)


if __name__ == "__main__":
    sys.exit(main())
