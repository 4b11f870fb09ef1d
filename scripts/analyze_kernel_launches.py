#!/usr/bin/env python3
"""Find launches, gaps and idle time of a GPU in a trace: is the step bound by launching kernels or by running them?

example: python analyze_kernel_launches.py --trace-file results.csv --steps 30

Reads kernel traces of rocprofv3 and rocprof (CSV or database), Nsight Systems and PyTorch. Between the first and the
last launch the GPU is busy while any kernel or copy runs on any queue; the rest is idle. The pause that profilers and
scripts make between two steps is not counted if it is longer than a millisecond. Where the profile does not mark its
steps, every gap longer than that is taken for such a pause.
"""

import sys

from common.command_line import Parser, add_steps
from common.profiles import gpu_profile, short
from common.tables import emit, text_table

IDLE_BOUND = 0.25  # fraction of idle time, without pauses, above which a step is launch-bound
PAUSE_US = 1000
SHOWN = 5  # of the longest gaps


def paused_us(start, end, begins):
    """Return how much of the gap from start to end, in ns, is a pause between two steps, in us.

    begins: when the host begins each step; None where the profile does not mark them.
    """
    border = end if begins is None else max((begin for begin in begins if start < begin < end), default=start)
    pause = (border - start) / 1e3
    return pause if pause > PAUSE_US else 0.0


def launch_results(launches, steps, begins=None):
    """Return counts, busy, idle and paused time in microseconds, the longest gaps, and the verdict."""
    last = launches[0]
    gaps = []
    paused = 0.0
    for kernel in launches[1:]:
        if kernel.start_ns > last.end_ns:
            pause = paused_us(last.end_ns, kernel.start_ns, begins)
            paused += pause
            gap_us = (kernel.start_ns - last.end_ns) / 1e3 - pause
            if gap_us:
                gaps.append({"gap_us": gap_us, "after": last.name, "before": kernel.name})
        last = max(last, kernel, key=lambda one: one.end_ns)
    waits = sorted(gaps, key=lambda gap: -gap["gap_us"])
    idle = sum(gap["gap_us"] for gap in waits)
    busy = (last.end_ns - launches[0].start_ns) / 1e3 - idle - paused
    share = idle / (busy + idle) if busy else 0.0
    return {
        "launches": len(launches),
        "steps": steps,
        "launches_per_step": len(launches) / steps if steps else None,
        "busy_us": busy,
        "idle_us": idle,
        "idle_share": share,
        "paused_us": paused,
        "steps_marked": begins is not None,
        "gaps": len(waits),
        "launch_bound": share > IDLE_BOUND,
        "largest_gaps": waits[:SHOWN],
    }


def as_text(title, found):
    each = (
        f"{found['launches_per_step']:,.1f} in each of {found['steps']} steps"
        if found["steps"]
        else "steps not known (--steps N)"
    )
    busy, idle, paused = (f"{found[f'{name}_us'] / 1e3:,.3f} ms" for name in ("busy", "idle", "paused"))
    between = f"pauses over {PAUSE_US} us"
    if found["steps_marked"]:
        between += " between steps"
    else:
        between += ", some of them maybe inside a step, which this profile does not mark"
    verdict = "launch-bound" if found["launch_bound"] else "not launch-bound"
    share = f"{100 * found['idle_share']:.1f} % of the time (bound: {100 * IDLE_BOUND:.0f} %)"
    gaps = [
        [short(gap["after"], 50), short(gap["before"], 50), f"{gap['gap_us']:.1f}"] for gap in found["largest_gaps"]
    ]
    return (
        f"{title}: {found['launches']:,} launches, {each}\n"
        f"busy {busy}, idle {idle} in {found['gaps']:,} gaps; not counted: {paused} in {between}\n"
        f"{verdict}: the GPU waits {share}\n\n{text_table(['longest gaps after', 'before', 'us'], gaps, left=2)}"
    )


def analyze(options):
    profile = gpu_profile(options.trace_file, options.steps)
    begins = [1e3 * start for name, start, _ in profile.phases if name == "forward"] or None
    found = launch_results(profile.calls, profile.steps, begins)
    emit({"trace": profile.title, "results": found}, as_text(profile.title, found), options.json)


def main(argv=None):
    parser = Parser("analyze_kernel_launches.py", __doc__)
    parser.add_argument("--trace-file", required=True, metavar="FILE", help="trace with single launches, or its folder")
    add_steps(parser)
    return parser.run(analyze, argv)


if __name__ == "__main__":
    sys.exit(main())
