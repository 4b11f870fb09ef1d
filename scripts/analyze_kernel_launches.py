#!/usr/bin/env python3
"""Find launches, gaps and idle time of a GPU in a trace: is the step bound by launching kernels or by running them?

example: python analyze_kernel_launches.py --trace-file results.csv --steps 30

Reads kernel traces of rocprofv3 and rocprof (CSV or database), Nsight Systems and PyTorch. Between the first and the
last launch the GPU is busy while any kernel or copy runs on any queue, and idle otherwise. Profilers and scripts pause
between two steps; a pause longer than a millisecond is not counted. If the profile does not mark its steps, every gap
longer than a millisecond counts as such a pause.
"""

import sys

from common.command_line import Parser, add_steps
from common.profiles import gpu_profile, short
from common.tables import emit, text_table

IDLE_BOUND = 0.25  # a step with a larger fraction of idle time, without pauses, is launch-bound
PAUSE_US = 1000
GAPS_SHOWN = 5


def pause_in_gap_us(start_ns, end_ns, step_starts_ns):
    """Return how many microseconds of a gap between kernels are a pause between two steps.

    step_starts_ns: when the host begins each step; None if the profile does not mark them.
    """
    if step_starts_ns is None:
        pause_end_ns = end_ns  # take the whole gap for a pause
    else:
        inside = [start for start in step_starts_ns if start_ns < start < end_ns]
        pause_end_ns = max(inside, default=start_ns)  # after it the GPU waits for the new step's first launch
    pause_us = (pause_end_ns - start_ns) / 1e3
    return pause_us if pause_us > PAUSE_US else 0.0


def gaps_between(launches, step_starts_ns=None):
    """Return the gaps in which nothing runs, the microseconds of pauses between steps, and the launch that ends last.

    launches are in order of their start.
    """
    last = launches[0]  # to end, of the launches so far: queues overlap
    gaps = []
    paused = 0.0
    for kernel in launches[1:]:
        if kernel.start_ns > last.end_ns:
            pause = pause_in_gap_us(last.end_ns, kernel.start_ns, step_starts_ns)
            paused += pause
            gap_us = (kernel.start_ns - last.end_ns) / 1e3 - pause
            if gap_us:
                gaps.append({"gap_us": gap_us, "after": last.name, "before": kernel.name})
        if kernel.end_ns > last.end_ns:
            last = kernel
    return gaps, paused, last


def launch_results(launches, steps, step_starts_ns=None):
    """Return counts, busy, idle and paused time in microseconds, the longest gaps, and the verdict.

    launches are in order of their start.
    """
    gaps, paused, last = gaps_between(launches, step_starts_ns)
    gaps.sort(key=lambda gap: gap["gap_us"], reverse=True)
    idle = sum(gap["gap_us"] for gap in gaps)
    whole = (last.end_ns - launches[0].start_ns) / 1e3
    busy = whole - idle - paused
    idle_share = idle / (busy + idle) if busy else 0.0
    return {
        "launches": len(launches),
        "steps": steps,
        "launches_per_step": len(launches) / steps if steps else None,
        "busy_us": busy,
        "idle_us": idle,
        "idle_share": idle_share,
        "paused_us": paused,
        "steps_marked": step_starts_ns is not None,
        "gaps": len(gaps),
        "launch_bound": idle_share > IDLE_BOUND,
        "largest_gaps": gaps[:GAPS_SHOWN],
    }


def as_text(title, found):
    """Return the results of launch_results as sentences and a table of the longest gaps."""
    if found["steps"] == 1:
        per_step = " in one step"
    elif found["steps"]:
        per_step = f", {found['launches_per_step']:,.1f} in each of {found['steps']} steps"
    else:
        per_step = ", steps not known (--steps N)"
    busy = f"busy {found['busy_us'] / 1e3:,.3f} ms, idle {found['idle_us'] / 1e3:,.3f} ms in {found['gaps']:,} gaps"
    if found["paused_us"]:
        if found["steps_marked"]:
            where = " between steps"
        else:
            where = ", some of them maybe inside a step, which this profile does not mark"
        busy += f"; not counted: {found['paused_us'] / 1e3:,.3f} ms in pauses over {PAUSE_US} us{where}"
    verdict = "launch-bound" if found["launch_bound"] else "not launch-bound"
    share = f"{100 * found['idle_share']:.1f} % of the time (bound: {100 * IDLE_BOUND:.0f} %)"
    rows = []
    for gap in found["largest_gaps"]:
        rows.append([short(gap["after"], 50), short(gap["before"], 50), f"{gap['gap_us']:.1f}"])
    lines = [
        f"{title}: {found['launches']:,} kernels and copies{per_step}",
        busy,
        f"{verdict}: the GPU waits {share}",
        "",
        text_table(["longest gaps after", "before", "us"], rows, left=2),
    ]
    return "\n".join(lines)


def analyze(options):
    profile = gpu_profile(options.trace_file, options.steps)
    step_starts_ns = [1e3 * start for name, start, _ in profile.phases if name == "forward"]
    found = launch_results(profile.calls, profile.steps, step_starts_ns or None)
    emit({"trace": profile.title, "results": found}, as_text(profile.title, found), options.json)


def main(argv=None):
    parser = Parser("analyze_kernel_launches.py", __doc__)
    parser.add_argument("--trace-file", required=True, metavar="FILE", help="trace with single launches, or its folder")
    add_steps(parser)
    return parser.run(analyze, argv)


if __name__ == "__main__":
    sys.exit(main())
