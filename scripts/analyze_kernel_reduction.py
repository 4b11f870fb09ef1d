#!/usr/bin/env python3
"""Count how many kernels a training step launches before and after fusion, from two profiles.

Reads PyTorch traces (their steps are counted too) and the files of rocprofv3 and Nsight Systems (give the steps). Of
the traces in two folders it takes the newest pair of like runs. On a CPU, which launches no kernels, the operators that
compute are counted.

Exit status: 0 counted, 2 for bad input.
"""

import argparse
import sys

from common.command_line import Parser, add_steps, positive, run_tool
from common.profiles import (
    INTERPRETED,
    compare_counts,
    count_cells,
    counts_per_step,
    read_pair,
    short,
    steps_needed,
    unlike,
)
from common.tables import emit, text_table


def as_text(content: dict, top: int) -> str:
    what = content["what"]
    changes = sorted((item for item in content["change"].items() if item[1]), key=lambda item: -abs(item[1]))
    lines = [
        f"baseline  {content['baseline']['title']}, {content['baseline']['steps']} steps",
        f"fused     {content['fused']['title']}, {content['fused']['steps']} steps",
        *(f"unlike    {difference}" for difference in content["differences"]),
        "",
        text_table(
            [f"{what} per step", "baseline", "fused", "fewer", "baseline ms", "fused ms"], count_cells(content["rows"])
        ),
        *[INTERPRETED] * content["interpreted"],
        "",
        f"{what} whose number changed most, per step",
        *(f"{change:+10,.1f}  {short(name, 90)}" for name, change in changes[:top]),
    ]
    whole = content["rows"][-1]
    lines += ["", f"{whole['baseline_calls']:,.0f} {what} per step became {whole['fused_calls']:,.0f}"]
    return "\n".join(lines)


def analyze(options: argparse.Namespace) -> None:
    steps = (options.baseline_steps, options.fused_steps)
    pair = read_pair(options.baseline, options.fused, steps, options.allow_different)
    names = ("--baseline-steps", "--fused-steps")
    parts = [counts_per_step(one, steps_needed(one, name)) for one, name in zip(pair, names, strict=True)]
    content = compare_counts(*parts) | {"what": pair[0].what, "interpreted": any(one.interpreted for one in pair)}
    content["differences"] = unlike(*(one.metadata for one in pair))
    emit(content, as_text(content, options.top), options.json)


def main(argv: list[str] | None = None) -> int:
    parser = Parser(
        "analyze_kernel_reduction.py",
        "Count the kernels of a training step in two profiles.",
        "--baseline ../version1_pytorch_baseline/pytorch_profiles --fused ./fusion_analysis",
    )
    add = parser.add_argument
    add("--baseline", required=True, metavar="DIR", help="file or folder with the unfused profile")
    add("--fused", required=True, metavar="DIR", help="file or folder with the fused profile")
    add_steps(parser, "--baseline-steps")
    add_steps(parser, "--fused-steps")
    add("--allow-different", action="store_true", help="compare profiles of other sizes or precision")
    add("--top", type=positive, default=10, metavar="N", help="changes by name to print (%(default)s)")
    options = parser.parse_args(argv)
    return run_tool("analyze_kernel_reduction.py", lambda: analyze(options))


if __name__ == "__main__":
    sys.exit(main())
