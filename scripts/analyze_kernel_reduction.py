#!/usr/bin/env python3
"""Count how many kernels a training step launches before and after fusion, from two profiles.

example: python analyze_kernel_reduction.py --baseline ../version1_pytorch_baseline/pytorch_profiles
             --fused ./fusion_analysis

Reads the formats that ANY_PROFILE.md lists. Where a file doesn't mark its steps, give their number. Of two folders
it takes the newest two traces with the same settings. A CPU launches no kernels, so there it counts the operators that
compute.
"""

import sys

from common.command_line import Parser, add_gpu, add_steps
from common.profiles import read_pair, short, sums
from common.profiles.comparison import compared
from common.tables import emit, text_table

NAMES = ("baseline", "fused")
SHOWN = 10  # kernels whose number changed


def changes(before, after):
    """Return by how many calls per step each kernel's number changed, the largest change first."""
    before, after = (
        {name: row["calls"] / one.steps for name, row in sums(one.step_calls, "name").items()}
        for one in (before, after)
    )
    found = {name: after.get(name, 0) - before.get(name, 0) for name in before | after}
    return dict(sorted(found.items(), key=lambda change: -abs(change[1])))


def analyze(options):
    pair = read_pair(options.baseline, options.fused, (options.baseline_steps, options.fused_steps), options.gpu)
    profiles = dict(zip(NAMES, pair, strict=True))
    found = compared(profiles, "--{name}-steps")
    changed = changes(*pair)
    header = [f"{found.unit} per step", "baseline", "fused", "fewer", "baseline ms", "fused ms"]
    lines = [f"{name:<9} {one.title}, {one.steps} steps" for name, one in profiles.items()]
    lines += ["", text_table(header, found.rows()), *found.remarks]
    lines += ["", f"{found.unit} whose number changed most, per step"]
    lines += [f"{number:+10,.1f}  {short(name, 90)}" for name, number in list(changed.items())[:SHOWN] if number]
    lines += ["", found.sentence]
    emit(found.groups | {"change": changed}, "\n".join(lines), options.json)


def main(argv=None):
    parser = Parser("analyze_kernel_reduction.py", __doc__)
    parser.add_argument("--baseline", required=True, metavar="DIR", help="file or folder with the unfused profile")
    parser.add_argument("--fused", required=True, metavar="DIR", help="file or folder with the fused profile")
    add_steps(parser, "--baseline-steps")
    add_steps(parser, "--fused-steps")
    add_gpu(parser)
    return parser.run(analyze, argv)


if __name__ == "__main__":
    sys.exit(main())
