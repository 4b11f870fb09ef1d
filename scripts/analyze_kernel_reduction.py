#!/usr/bin/env python3
"""Count how many kernels a training step launches before and after fusion, from two profiles.

example: python analyze_kernel_reduction.py --baseline ../version1_pytorch_baseline/pytorch_profiles
             --fused ./fusion_analysis

Reads PyTorch traces (their steps are counted too) and the files of rocprofv3 and Nsight Systems (give the steps). Of
the traces in two folders it takes the newest pair of like runs. On a CPU, which launches no kernels, the operators that
compute are counted.
"""

import sys

from common.command_line import Parser, add_steps
from common.profiles import INTERPRETED, group_cells, groups_per_step, read_pair, short, sums
from common.tables import emit, text_table

NAMES = ("baseline", "fused")
SHOWN = 10  # kernels whose number changed


def changes(before, after):
    """Return by how many calls per step each kernel's number changed, the largest change first."""
    before, after = (
        {name: row["calls"] / one.steps for name, row in sums(one.calls, "name").items()} for one in (before, after)
    )
    found = {name: after.get(name, 0) - before.get(name, 0) for name in before | after}
    return dict(sorted(found.items(), key=lambda change: -abs(change[1])))


def as_text(content):
    what, groups = content["what"], [content[name]["groups"] for name in NAMES]
    header = [f"{what} per step", "baseline", "fused", "fewer", "baseline ms", "fused ms"]
    changed = [(name, number) for name, number in content["change"].items() if number][:SHOWN]
    lines = [f"{name:<9} {content[name]['title']}, {content[name]['steps']} steps" for name in NAMES]
    lines += ["", text_table(header, group_cells(*groups)), *[INTERPRETED] * content["interpreted"], ""]
    lines.append(f"{what} whose number changed most, per step")
    lines += [f"{number:+10,.1f}  {short(name, 90)}" for name, number in changed]
    before, after = (found["all"]["calls"] for found in groups)
    return "\n".join([*lines, "", f"{before:,.0f} {what} per step became {after:,.0f}"])


def analyze(options):
    pair = read_pair(options.baseline, options.fused, (options.baseline_steps, options.fused_steps))
    content = {"what": pair[0].what, "interpreted": any(one.interpreted for one in pair)}
    for one, name in zip(pair, NAMES, strict=True):
        content[name] = {"title": one.title, "groups": groups_per_step(one, f"--{name}-steps"), "steps": one.steps}
    content["change"] = changes(*pair)
    emit(content, as_text(content), options.json)


def main(argv=None):
    parser = Parser("analyze_kernel_reduction.py", __doc__)
    parser.add_argument("--baseline", required=True, metavar="DIR", help="file or folder with the unfused profile")
    parser.add_argument("--fused", required=True, metavar="DIR", help="file or folder with the fused profile")
    add_steps(parser, "--baseline-steps")
    add_steps(parser, "--fused-steps")
    return parser.run(analyze, argv)


if __name__ == "__main__":
    sys.exit(main())
