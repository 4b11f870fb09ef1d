#!/usr/bin/env python3
"""Find launches, gaps and idle time of a GPU in a trace: is the step bound by launching kernels or by running them?

example: python analyze_kernel_launches.py --trace-file results.csv --steps 30

Reads kernel traces of rocprofv3 and rocprof (CSV or database), Nsight Systems and PyTorch. Between the first and the
last launch the GPU is busy while any kernel or copy runs on any queue; the rest is idle. A gap longer than a
millisecond is the host doing something else, such as the pause between steps that profilers and scripts make.
"""

import statistics
import sys

from common.command_line import Parser, add_steps
from common.profiles import busy_intervals, gpu_launches, short
from common.tables import emit, known, text_table

IDLE_BOUND = 0.25  # fraction of idle time, without pauses, above which a step is launch-bound
PAUSE_US = 1000
SHOWN = 5  # of the longest gaps


def launch_results(launches, steps):
    """Return counts, busy and idle time in microseconds, gaps, and the verdict."""
    stretches = busy_intervals(launches)
    gaps = [(after[0] - before[1]) / 1e3 for before, after in zip(stretches, stretches[1:], strict=False)]
    waits, pauses = sorted(gap for gap in gaps if gap <= PAUSE_US), [gap for gap in gaps if gap > PAUSE_US]
    busy = sum(end - start for start, end in stretches) / 1e3
    idle = sum(waits) / (busy + sum(waits)) if busy else 0.0
    return {
        "launches": len(launches),
        "steps": steps,
        "launches_per_step": len(launches) / steps if steps else None,
        "busy_us": busy,
        "idle_us": sum(waits),
        "idle_share": idle,
        "pauses": len(pauses),
        "paused_us": sum(pauses),
        "gaps": len(waits),
        "gap_median_us": statistics.median(waits) if waits else None,
        "kernel_median_us": statistics.median(kernel.total_ns for kernel in launches) / 1e3,
        "launch_bound": idle > IDLE_BOUND,
    }


def largest_gaps(launches):
    """Return the gaps that are no pauses, the longest first: how long, after which kernel, before which."""
    found, last = [], launches[0]
    for kernel in launches[1:]:
        if 0 < (gap := (kernel.start_ns - last.end_ns) / 1e3) <= PAUSE_US:
            found.append({"gap_us": gap, "after": last.name, "before": kernel.name})
        last = max(last, kernel, key=lambda one: one.end_ns)
    return sorted(found, key=lambda gap: -gap["gap_us"])[:SHOWN]


def as_text(content):
    found = content["results"]
    steps = "steps not known (--steps N)" if found["steps"] is None else f"{found['steps']} steps"
    idle, verdict = 100 * found["idle_share"], "launch-bound" if found["launch_bound"] else "not launch-bound"
    lines = [
        f"{content['trace']}: {found['launches']:,} launches, {steps}",
        f"  launches per step  {known(found['launches_per_step'], ',.1f')}",
        f"  busy               {found['busy_us'] / 1e3:,.3f} ms",
        f"  idle in gaps       {found['idle_us'] / 1e3:,.3f} ms, {idle:.1f} % of busy and idle",
        f"  gaps               {found['gaps']:,}, median {known(found['gap_median_us'], '.1f')} us",
        f"  pauses             {found['pauses']:,} longer than {PAUSE_US} us, {found['paused_us'] / 1e3:,.3f} ms, "
        "not counted as idle",
        f"  kernels            median {found['kernel_median_us']:.1f} us",
        f"  verdict            {verdict}: the GPU waits {idle:.1f} % of the time (bound: {100 * IDLE_BOUND:.0f} %)",
    ]
    rows = [[short(g["after"], 50), short(g["before"], 50), f"{g['gap_us']:.1f}"] for g in content["largest_gaps"]]
    return "\n".join([*lines, "", text_table(["longest gaps after", "before", "us"], rows, left=2)])


def analyze(options):
    profile, launches = gpu_launches(options.trace_file, options.steps)
    content = {"trace": profile.title, "results": launch_results(launches, profile.steps)}
    content["largest_gaps"] = largest_gaps(launches)
    emit(content, as_text(content), options.json)


def main(argv=None):
    parser = Parser("analyze_kernel_launches.py", __doc__)
    parser.add_argument("--trace-file", required=True, metavar="FILE", help="trace with single launches, or its folder")
    add_steps(parser)
    return parser.run(analyze, argv)


if __name__ == "__main__":
    sys.exit(main())
