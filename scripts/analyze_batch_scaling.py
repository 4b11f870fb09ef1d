#!/usr/bin/env python3
"""Show how time, throughput and memory of a step grow with the batch, from one profile folder per batch size.

example: python analyze_batch_scaling.py --profile-dirs scaling_bs*

Reads the traces that the training scripts write with --enable-pytorch-profiler, of each folder the newest one of whole
steps. Times come from the marks of the steps (under the profiler, so somewhat long); batch size, tokens and peak memory
from what the script wrote into the trace. A line through the times splits them into a fixed part and one per sequence.

Exit status: 0 analysed, 2 for bad input.
"""

import statistics
import sys

from common.command_line import Failure, Parser, run_tool
from common.profiles import INTERPRETED, read_profile, unlike
from common.tables import emit, rounded, text_table


def read_folder(folder):
    """Return batch size, tokens, median step time (ms) and peak memory (MiB) of one profile folder, and the profile."""
    profile = read_profile(folder)
    found, times = profile.metadata, profile.step_ms
    if not times or not found:
        raise Failure(
            2, f"{profile.path} marks no training steps: write it with tiny_llama_v*.py --enable-pytorch-profiler"
        )
    row = {"trace": str(profile.path), "batch_size": found["batch_size"], "seq_len": found["seq_len"]}
    row |= {"steps": len(times), "step_ms": statistics.median(times), "peak_mib": found["peak_memory_mb"]}
    return row, profile


def scaling(rows):
    """Return the rows by batch size with throughput and efficiency, and the lines through time and memory.

    efficiency: throughput over that of the smallest batch, divided by how many times as large the batch is.
    """
    rows = sorted(rows, key=lambda row: row["batch_size"])
    for row in rows:
        row["samples_per_second"] = 1e3 * row["batch_size"] / row["step_ms"]
        growth = row["batch_size"] / rows[0]["batch_size"]
        row["efficiency"] = row["samples_per_second"] / rows[0]["samples_per_second"] / growth
    content = {"rows": rows, "best_batch_size": max(rows, key=lambda row: row["samples_per_second"])["batch_size"]}
    for key, fixed, each in (("step_ms", "fixed_ms", "ms_per_sequence"), ("peak_mib", "fixed_mib", "mib_per_sequence")):
        fit = statistics.linear_regression([row["batch_size"] for row in rows], [row[key] for row in rows])
        content[fixed], content[each] = fit.intercept, fit.slope
    return content


def fit_line(name, unit, fixed, each):
    """Return the fitted cost in words; a negative part makes no sense as a cost, and the line says so."""
    line = f"{name:<9}  {rounded(fixed)} {unit} + {rounded(each)} {unit} per sequence"
    part = "fixed part" if fixed < 0 else "part per sequence" if each < 0 else None
    return f"{line}: a negative {part} makes no sense as a cost, these batches do not lie on a line" if part else line


def as_text(content):
    rows = [
        [
            *(row["batch_size"], row["seq_len"], row["steps"], rounded(row["step_ms"])),
            *(rounded(row["samples_per_second"]), rounded(row["step_ms"] / row["batch_size"])),
            *(f"{100 * row['efficiency']:.0f} %", f"{row['peak_mib']:,.0f}", row["trace"]),
        ]
        for row in content["rows"]
    ]
    header = ["batch", "tokens", "steps", "step ms", "samples/s", "ms per sequence", "of ideal", "peak MiB", "  trace"]
    fixed, each = content["fixed_ms"], content["ms_per_sequence"]
    lines = [text_table(header, rows, left=0), "", fit_line("step time", "ms", fixed, each)]
    if fixed > 0 < each:
        at = rounded(fixed / each, 2)
        lines.append(f"           the fixed part (launches, optimizer) is half of the step at batch {at}")
    lines.append(fit_line("memory", "MiB", content["fixed_mib"], content["mib_per_sequence"]))
    lines.append(f"most samples per second at batch {content['best_batch_size']}")
    lines += ["without a GPU this is the memory of the whole process, its libraries included"] * content["on_cpu"]
    return "\n".join([*lines, *[INTERPRETED] * content["interpreted"]])


def check_alike(profiles):
    """Raise Failure unless the profiles differ in the batch alone."""
    first, *others = ({**p.metadata, "batch_size": None, "device": p.device} for p in profiles)
    for profile, other in zip(profiles[1:], others, strict=True):
        found = unlike(first, other)
        if first["version"] != other["version"]:
            found = [*found, f"version: {first['version']}, {other['version']}"]
        if found:
            names = f"{profiles[0].path} and {profile.path}"
            raise Failure(2, f"{names} are unlike ({'; '.join(found)}): give folders that differ in the batch alone")
    sizes = [profile.metadata["batch_size"] for profile in profiles]
    if len(set(sizes)) < max(2, len(sizes)):
        raise Failure(2, f"the batch sizes are {', '.join(map(str, sizes))}: give two or more that differ")


def analyze(options):
    rows, profiles = zip(*map(read_folder, options.profile_dirs), strict=True)
    check_alike(profiles)
    content = scaling(rows) | {"on_cpu": profiles[0].on_cpu, "interpreted": profiles[0].interpreted}
    emit(content, as_text(content), options.json)


def main(argv=None):
    parser = Parser("analyze_batch_scaling.py", __doc__)
    parser.add_argument("--profile-dirs", nargs="+", required=True, metavar="DIR", help="one folder per batch size")
    options = parser.parse_args(argv)
    return run_tool("analyze_batch_scaling.py", lambda: analyze(options))


if __name__ == "__main__":
    sys.exit(main())
