#!/usr/bin/env python3
"""Count how many kernels a training step launches before and after fusion, from two profiles.

Reads PyTorch traces (their steps are counted too) and the files of rocprofv3 and Nsight Systems (give the steps). Of
the traces in two folders it takes the newest pair of like runs. On a CPU, which launches no kernels, the operators that
compute are counted.

Exit status: 0 counted, 2 for bad input.
"""

import sys

from common.command_line import Parser, add_steps, positive, run_tool
from common.profiles import (
    INTERPRETED,
    compare_groups,
    differences,
    group_cells,
    groups_per_step,
    per_step,
    read_pair,
    short,
)
from common.tables import emit, text_table


def changes(pair):
    """Return by how many calls per step each kernel's number changed, the largest change first."""
    before, after = (per_step(one, one.steps, lambda call: call.name) for one in pair)
    calls = {
        name: [names.get(name, {"calls": 0.0})["calls"] for names in (before, after)] for name in {**before, **after}
    }
    found = {name: fused - baseline for name, (baseline, fused) in calls.items() if name != "all"}
    return dict(sorted(found.items(), key=lambda change: -abs(change[1])))


def as_text(content, top):
    what, whole = content["what"], content["rows"][-1]
    header = [f"{what} per step", "baseline", "fused", "fewer", "baseline ms", "fused ms"]
    changed = [(name, number) for name, number in content["change"].items() if number][:top]
    lines = [f"{name:<9} {content[name]['title']}, {content[name]['steps']} steps" for name in ("baseline", "fused")]
    lines += [f"unlike    {difference}" for difference in content["differences"]]
    lines += ["", text_table(header, group_cells(content["rows"])), *[INTERPRETED] * content["interpreted"], ""]
    lines.append(f"{what} whose number changed most, per step")
    lines += [f"{number:+10,.1f}  {short(name, 90)}" for name, number in changed]
    return "\n".join([*lines, "", f"{whole['baseline_calls']:,.0f} {what} per step became {whole['fused_calls']:,.0f}"])


def analyze(options):
    steps = (options.baseline_steps, options.fused_steps)
    pair = read_pair(options.baseline, options.fused, steps, options.allow_different)
    names = ("baseline", "fused")
    groups = [groups_per_step(one, f"--{name}-steps") for one, name in zip(pair, names, strict=True)]
    content = {name: {"title": one.title, "steps": one.steps} for one, name in zip(pair, names, strict=True)}
    content |= {"what": pair[0].what, "interpreted": any(one.interpreted for one in pair)}
    content |= {"differences": differences(*pair)}
    content |= {"rows": compare_groups(*groups), "change": changes(pair)}
    emit(content, as_text(content, options.top), options.json)


def main(argv=None):
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
