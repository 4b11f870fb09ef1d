#!/usr/bin/env python3
"""How many kernels a training step launches before and after fusion, counted from two profiles.

Reads PyTorch traces (their steps are counted too) and the files of rocprofv3 and Nsight Systems (give the steps). On a
CPU, which launches no kernels, the operators that compute are counted.

Exit status: 0 counted, 2 for bad input.
"""

import argparse
import sys
from collections import Counter

from common.analysis import Parser, add_steps, emit, positive, text_table
from common.command_line import Failure, run_tool
from common.traces import Profile, read_profile, steps_needed
from kernel_times import GROUPS, short


def counts(profile: Profile, steps: int) -> dict:
    """Calls and milliseconds a step, whole, by group and by name."""
    calls, times, names = Counter(), Counter(), Counter()
    for kernel in profile.calls:
        calls[kernel.group] += kernel.calls
        times[kernel.group] += kernel.total_ns
        names[kernel.name] += kernel.calls
    return {
        "path": str(profile.path),
        "steps": steps,
        "calls_a_step": sum(calls.values()) / steps,
        "ms_a_step": sum(times.values()) / 1e6 / steps,
        "groups": {g: {"calls": calls[g] / steps, "ms": times[g] / 1e6 / steps} for g in GROUPS if g in calls},
        "names": {name: number / steps for name, number in names.items()},
    }


def reduction(before: float, after: float) -> float | None:
    """Percent fewer; None where there was nothing before."""
    return 100 * (before - after) / before if before else None


def compared(baseline: dict, fused: dict) -> dict:
    rows = []
    for group in (*GROUPS, "all"):
        pair = [
            {"calls": part["calls_a_step"], "ms": part["ms_a_step"]} if group == "all" else part["groups"].get(group)
            for part in (baseline, fused)
        ]
        if any(pair):
            before, after = (part or {"calls": 0.0, "ms": 0.0} for part in pair)
            rows.append(
                {
                    "group": group,
                    "baseline_calls": before["calls"],
                    "fused_calls": after["calls"],
                    "fewer_percent": reduction(before["calls"], after["calls"]),
                    "baseline_ms": before["ms"],
                    "fused_ms": after["ms"],
                }
            )
    names = set(baseline["names"]) | set(fused["names"])
    change = {name: fused["names"].get(name, 0) - baseline["names"].get(name, 0) for name in names}
    return {"baseline": baseline, "fused": fused, "rows": rows, "change": change}


def as_text(content: dict, what: str, top: int) -> str:
    rows = [
        [
            row["group"],
            f"{row['baseline_calls']:,.1f}",
            f"{row['fused_calls']:,.1f}",
            "-" if row["fewer_percent"] is None else f"{row['fewer_percent']:.1f} %",
            f"{row['baseline_ms']:,.3f}",
            f"{row['fused_ms']:,.3f}",
        ]
        for row in content["rows"]
    ]
    changes = sorted((item for item in content["change"].items() if item[1]), key=lambda item: -abs(item[1]))
    lines = [
        f"baseline  {content['baseline']['path']}, {content['baseline']['steps']} steps",
        f"fused     {content['fused']['path']}, {content['fused']['steps']} steps",
        "",
        text_table([f"{what} a step", "baseline", "fused", "fewer", "baseline ms", "fused ms"], rows),
        "",
        f"{what} whose number changed most, a step",
        *(f"{change:+10,.1f}  {short(name, 90)}" for name, change in changes[:top]),
    ]
    whole = content["rows"][-1]
    lines += ["", f"{whole['baseline_calls']:,.0f} {what} a step became {whole['fused_calls']:,.0f}"]
    return "\n".join(lines)


def analyze(options: argparse.Namespace) -> None:
    baseline = read_profile(options.baseline, options.baseline_steps)
    fused = read_profile(options.fused, options.fused_steps)
    if baseline.on_cpu != fused.on_cpu:
        raise Failure(2, "one profile is of a CPU and the other of a GPU: profile both on the same device")
    pair = (baseline, steps_needed(baseline, "--baseline-steps")), (fused, steps_needed(fused, "--fused-steps"))
    content = compared(*(counts(*part) for part in pair))
    emit(content, as_text(content, baseline.what, options.top), options.json)


def main(argv: list[str] | None = None) -> int:
    parser = Parser(
        "analyze_kernel_reduction.py",
        "Count the kernels of a training step in two profiles.",
        "--baseline ../version1_pytorch_baseline/pytorch_profiles --fused ./fusion_analysis",
    )
    parser.add_argument("--baseline", required=True, metavar="DIR", help="file or folder with the unfused profile")
    parser.add_argument("--fused", required=True, metavar="DIR", help="file or folder with the fused profile")
    add_steps(parser, "--baseline-steps")
    add_steps(parser, "--fused-steps")
    parser.add_argument("--top", type=positive, default=10, metavar="N", help="changes by name to print (%(default)s)")
    options = parser.parse_args(argv)
    return run_tool("analyze_kernel_reduction.py", lambda: analyze(options))


if __name__ == "__main__":
    sys.exit(main())
