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
from common.profiles import gpu_launches, short
from common.tables import emit, known, text_table

IDLE_BOUND = 0.25  # fraction of idle time, without pauses, above which a step is launch-bound
PAUSE_US = 1000
SHOWN = 5  # of the longest gaps


def launch_results(launches, steps):
    """Return counts, busy and idle time in microseconds, the longest gaps, and the verdict."""
    waits, pauses, busy, last = [], [], launches[0].total_ns / 1e3, launches[0]
    for kernel in launches[1:]:
        gap = (kernel.start_ns - last.end_ns) / 1e3
        if gap > 0:
            found = {"gap_us": gap, "after": last.name, "before": kernel.name}
            (waits if gap <= PAUSE_US else pauses).append(found)
        busy += max(0.0, kernel.end_ns - max(kernel.start_ns, last.end_ns)) / 1e3
        last = max(last, kernel, key=lambda one: one.end_ns)
    waits.sort(key=lambda found: -found["gap_us"])
    idle, paused = (sum(found["gap_us"] for found in some) for some in (waits, pauses))
    share = idle / (busy + idle) if busy else 0.0
    return {
        "launches": len(launches),
        "steps": steps,
        "launches_per_step": len(launches) / steps if steps else None,
        "busy_us": busy,
        "idle_us": idle,
        "idle_share": share,
        "pauses": len(pauses),
        "paused_us": paused,
        "gaps": len(waits),
        "gap_median_us": statistics.median(found["gap_us"] for found in waits) if waits else None,
        "launch_bound": share > IDLE_BOUND,
        "largest_gaps": waits[:SHOWN],
    }


def as_text(title, found):
    steps = "steps not known (--steps N)" if found["steps"] is None else f"{found['steps']} steps"
    idle, verdict = 100 * found["idle_share"], "launch-bound" if found["launch_bound"] else "not launch-bound"
    lines = [
        f"{title}: {found['launches']:,} launches, {steps}",
        f"  launches per step  {known(found['launches_per_step'], ',.1f')}",
        f"  busy               {found['busy_us'] / 1e3:,.3f} ms",
        f"  idle in gaps       {found['idle_us'] / 1e3:,.3f} ms, {idle:.1f} % of busy and idle",
        f"  gaps               {found['gaps']:,}, median {known(found['gap_median_us'], '.1f')} us",
        f"  pauses             {found['pauses']:,} longer than {PAUSE_US} us, {found['paused_us'] / 1e3:,.3f} ms, "
        "not counted as idle",
        f"  verdict            {verdict}: the GPU waits {idle:.1f} % of the time (bound: {100 * IDLE_BOUND:.0f} %)",
    ]
    gaps = [
        [short(gap["after"], 50), short(gap["before"], 50), f"{gap['gap_us']:.1f}"] for gap in found["largest_gaps"]
    ]
    return "\n".join([*lines, "", text_table(["longest gaps after", "before", "us"], gaps, left=2)])


def analyze(options):
    profile, launches = gpu_launches(options.trace_file, options.steps)
    found = launch_results(launches, profile.steps)
    emit({"trace": profile.title, "results": found}, as_text(profile.title, found), options.json)


def main(argv=None):
    parser = Parser("analyze_kernel_launches.py", __doc__)
    parser.add_argument("--trace-file", required=True, metavar="FILE", help="trace with single launches, or its folder")
    add_steps(parser)
    return parser.run(analyze, argv)


if __name__ == "__main__":
    sys.exit(main())
