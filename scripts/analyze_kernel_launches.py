#!/usr/bin/env python3
"""Launches, gaps and idle time of a GPU from a trace: is the step bound by launching kernels or by running them?

Reads kernel traces of rocprofv3 and rocprof (CSV or database), Nsight Systems and PyTorch. Between the first and the
last launch the GPU is busy while any kernel or copy runs on any queue; the rest is idle. A gap longer than
--pause-us is the host doing something else, such as the pause between steps that profilers and scripts make.

Exit status: 0 analysed, 2 for bad input.
"""

import argparse
import pathlib
import sys

from common.analysis import Parser, add_steps, emit, known, positive, text_table
from common.command_line import Failure, run_tool
from common.traces import Profile, read_profile
from kernel_times import KernelFileError, launches_of, short

IDLE_BOUND = 0.25  # share of idle time, pauses left out, above which a step waits for launches
SHORT_US = 10.0  # a kernel shorter than what a launch costs on most hosts


def busy_intervals(launches: list[dict]) -> list[tuple[float, float]]:
    """Start and end in ns of the stretches in which something ran, whatever the queue."""
    merged: list[list[float]] = []
    for row in launches:
        start, end = row["start_ns"], row["start_ns"] + row["duration_ns"]
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([start, end])
    return [(start, end) for start, end in merged]


def percentile(values: list[float], share: float) -> float | None:
    """The value below which this share of them lies, from the next one up; None without values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None


def launch_figures(launches: list[dict], steps: int | None, pause_us: float) -> dict:
    """Counts, busy and idle time in microseconds, gaps, and the verdict."""
    stretches = busy_intervals(launches)
    gaps = [(after[0] - before[1]) / 1e3 for before, after in zip(stretches, stretches[1:], strict=False)]
    waits, pauses = [gap for gap in gaps if gap <= pause_us], [gap for gap in gaps if gap > pause_us]
    busy = sum(end - start for start, end in stretches) / 1e3
    durations = [row["duration_ns"] / 1e3 for row in launches]
    idle = sum(waits) / (busy + sum(waits)) if busy else None
    return {
        "launches": len(launches),
        "steps": steps,
        "launches_a_step": len(launches) / steps if steps else None,
        "span_us": (stretches[-1][1] - stretches[0][0]) / 1e3,
        "busy_us": busy,
        "idle_us": sum(waits),
        "pauses": len(pauses),
        "paused_us": sum(pauses),
        "idle_share": idle,
        "gaps": len(waits),
        "gap_median_us": percentile(waits, 0.5),
        "gap_p90_us": percentile(waits, 0.9),
        "kernel_median_us": percentile(durations, 0.5),
        "short_kernels": sum(duration < SHORT_US for duration in durations),
        "launch_bound": idle is not None and idle > IDLE_BOUND,
    }


def largest_gaps(launches: list[dict], pause_us: float, top: int) -> list[dict]:
    """The longest gaps that are no pauses: how long, after which kernel, before which."""
    found, end, last = [], None, None
    for row in launches:
        if end is not None and 0 < (gap := (row["start_ns"] - end) / 1e3) <= pause_us:
            found.append({"gap_us": gap, "after": last, "before": row["kernel"]})
        if end is None or row["start_ns"] + row["duration_ns"] >= end:
            end, last = row["start_ns"] + row["duration_ns"], row["kernel"]
    return sorted(found, key=lambda gap: -gap["gap_us"])[:top]


def as_text(content: dict) -> str:
    figures = content["figures"]
    steps = "steps not known (--steps N)" if figures["steps"] is None else f"{figures['steps']} steps"
    idle, verdict = figures["idle_share"] or 0.0, "launch-bound" if figures["launch_bound"] else "not launch-bound"
    lines = [
        f"{content['trace']}: {figures['launches']:,} launches, {steps}",
        f"  launches a step  {known(figures['launches_a_step'], ',.1f')}",
        f"  busy             {figures['busy_us'] / 1e3:,.3f} ms",
        f"  idle in gaps     {figures['idle_us'] / 1e3:,.3f} ms, {100 * idle:.1f} % of busy and idle",
        f"  gaps             {figures['gaps']:,}, median {known(figures['gap_median_us'], '.2f')} us, "
        f"9 of 10 below {known(figures['gap_p90_us'], '.2f')} us",
        f"  pauses           {figures['pauses']:,} longer than {content['pause_us']:g} us, "
        f"{figures['paused_us'] / 1e3:,.3f} ms, not counted as idle",
        f"  kernels          median {figures['kernel_median_us']:.2f} us, {figures['short_kernels']:,} shorter than "
        f"{SHORT_US:g} us",
        f"  verdict          {verdict}: the GPU waits {100 * idle:.1f} % of the time (bound: {100 * IDLE_BOUND:.0f} %)",
    ]
    if content["largest_gaps"]:
        rows = [[short(g["after"], 50), short(g["before"], 50), f"{g['gap_us']:.1f}"] for g in content["largest_gaps"]]
        lines += ["", text_table(["longest gaps after", "before", "us"], rows, left=2)]
    return "\n".join(lines)


def launches_on_gpu(path: str | pathlib.Path, steps: int | None) -> tuple[Profile, list[dict]]:
    """A profile and its launches in order of time; Failure where it holds none of a GPU."""
    profile = read_profile(path, steps)
    if profile.on_cpu:
        raise Failure(2, f"{profile.path} holds no launches on a GPU: record it on a machine with one")
    try:
        return profile, launches_of(profile.calls)
    except KernelFileError as error:
        raise Failure(2, f"{profile.path}: {error}") from None


def analyze(options: argparse.Namespace) -> None:
    profile, launches = launches_on_gpu(options.trace_file, options.steps)
    content = {
        "trace": str(profile.path),
        "pause_us": options.pause_us,
        "figures": launch_figures(launches, profile.steps, options.pause_us),
        "largest_gaps": largest_gaps(launches, options.pause_us, options.top),
    }
    emit(content, as_text(content), options.json)


def main(argv: list[str] | None = None) -> int:
    parser = Parser(
        "analyze_kernel_launches.py",
        "Launches a step, gaps between them, and whether the step is bound by launches.",
        "--trace-file results.csv --steps 30",
    )
    parser.add_argument("--trace-file", required=True, metavar="FILE", help="trace with single launches, or its folder")
    add_steps(parser)
    parser.add_argument("--pause-us", type=float, default=1000.0, help="longer gaps are no idle time (%(default)s)")
    parser.add_argument("--top", type=positive, default=5, metavar="N", help="longest gaps to print (%(default)s)")
    options = parser.parse_args(argv)
    if options.pause_us <= 0:
        parser.error(f"--pause-us must be positive, not {options.pause_us}")
    return run_tool("analyze_kernel_launches.py", lambda: analyze(options))


if __name__ == "__main__":
    sys.exit(main())
