#!/usr/bin/env python3
"""Show how time, throughput and memory of a step grow with the batch, from one profile folder per batch size.

example: python analyze_batch_scaling.py --profile-dirs scaling_bs*

Reads the traces that the training scripts write with --enable-pytorch-profiler: in each folder, the newest one with
whole steps. Step times are a little long because the profiler slows the step down. Fits a line through the step times:
a fixed part, and a part per sequence.
"""

import statistics
import sys

from common.command_line import Failure, Parser
from common.profiles import INTERPRETED, read_profile, unlike
from common.tables import columns, emit, rounded, text_table

COLUMNS = (
    "batch: {batch_size} | steps: {steps} | step ms: {step_ms:r} | samples/s: {samples_per_second:r} | "
    "of ideal: {efficiency:.0%} | peak MiB: {peak_mib:,.0f} | trace: {trace}"
)


def row_of(profile):
    """Return batch size, median step time (ms), throughput and peak memory (MiB) of a profile."""
    batch_size = profile.metadata["batch_size"]
    step_ms = statistics.median(profile.step_ms)
    row = {"trace": str(profile.path), "batch_size": batch_size, "steps": len(profile.step_ms), "step_ms": step_ms}
    return row | {"samples_per_second": 1e3 * batch_size / step_ms, "peak_mib": profile.metadata["peak_memory_mb"]}


def scaling(rows):
    """Return the rows by batch size with their efficiency, and the lines through time and memory.

    efficiency: throughput over that of the smallest batch, divided by how many times as large the batch is.
    """
    rows = sorted(rows, key=lambda row: row["batch_size"])
    for row in rows:
        row["efficiency"] = rows[0]["step_ms"] / row["step_ms"]
    content = {"rows": rows, "best_batch_size": max(rows, key=lambda row: row["samples_per_second"])["batch_size"]}
    for key, fixed, each in (("step_ms", "fixed_ms", "ms_per_sequence"), ("peak_mib", "fixed_mib", "mib_per_sequence")):
        fit = statistics.linear_regression([row["batch_size"] for row in rows], [row[key] for row in rows])
        content[fixed], content[each] = fit.intercept, fit.slope
    return content


def fit_line(name, unit, fixed, each):
    line = f"{name:<9}  {rounded(fixed)} {unit} + {rounded(each)} {unit} per sequence"
    part = "fixed part" if fixed < 0 else "part per sequence"
    nonsense = f": a cost can't be negative ({part}), so these batches don't lie on a line"
    return line + nonsense * (min(fixed, each) < 0)


def as_text(content):
    lines = [text_table(*columns(COLUMNS, content["rows"]), left=0), ""]
    lines.append(fit_line("step time", "ms", content["fixed_ms"], content["ms_per_sequence"]))
    lines.append(fit_line("memory", "MiB", content["fixed_mib"], content["mib_per_sequence"]))
    lines.append(f"most samples per second at batch {content['best_batch_size']}")
    if content["on_cpu"]:
        lines.append("no GPU here: this is the memory of the whole process, libraries included")
    if content["interpreted"]:
        lines.append(INTERPRETED)
    return "\n".join(lines)


def check_alike(profiles):
    """Raise Failure unless the profiles differ in the batch alone."""
    first, *others = ({**p.metadata, "batch_size": None, "device": p.device} for p in profiles)
    for profile, other in zip(profiles[1:], others, strict=True):
        found = unlike(first, other)
        if first["version"] != other["version"]:
            found.append(f"version: {first['version']}, {other['version']}")
        if found:
            names = f"{profiles[0].path} and {profile.path}"
            way_out = "give folders that differ in nothing else"
            raise Failure(2, f"{names} differ in more than the batch ({'; '.join(found)}): {way_out}")
    sizes = [profile.metadata["batch_size"] for profile in profiles]
    if len(set(sizes)) < max(2, len(sizes)):
        raise Failure(2, f"the batch sizes are {', '.join(map(str, sizes))}: give two or more that differ")


def analyze(options):
    profiles = [read_profile(folder) for folder in options.profile_dirs]
    for profile in profiles:
        if not profile.step_ms or not profile.metadata:
            how = "write it with tiny_llama_v*.py --enable-pytorch-profiler"
            raise Failure(2, f"{profile.path} marks no training steps: {how}")
    check_alike(profiles)
    content = scaling(map(row_of, profiles)) | {"on_cpu": profiles[0].on_cpu, "interpreted": profiles[0].interpreted}
    emit(content, as_text(content), options.json)


def main(argv=None):
    parser = Parser("analyze_batch_scaling.py", __doc__)
    add = parser.add_argument
    add("--profile-dirs", nargs="+", action="extend", required=True, metavar="DIR", help="one folder per batch size")
    return parser.run(analyze, argv)


if __name__ == "__main__":
    sys.exit(main())
