#!/usr/bin/env python3
"""Measure how much of the device's memory bandwidth the operators of a step reach, and draw them on a roofline.

example: python memory_bandwidth_analyzer.py --profile-data ./complete_rocm_analysis --generate-roofline-plot

The bytes follow from the shapes in a PyTorch trace: every input is read once, and the output is written. For version
3's kernels and flex attention they follow from the formulas in common/formulas/counts.py. If an operator is faster
than a copy, its data were in a cache, or the ceilings are another device's.
"""

import sys
import textwrap

from common.command_line import Failure, Parser, progress
from common.measuring.ceilings import bound, ceilings_line
from common.measuring.roofline_picture import LEAST_SHOWN, draw_roofline
from common.profiles import INTERPRETED, short
from common.profiles.gemms import WITH_SHAPES
from common.profiles.roofline import add_trace_options, analyzed_trace
from common.tables import columns, emit, text_table

TOP = 20  # operators to print
COLUMNS = (
    "operator: {operator} | group: {group} | ms per step: {ms:,.3f} | MB per step: {bytes:M,.2f} | GB/s: {gb_s:,.1f} | "
    "of copy: {share_of_copy:.0%} | FLOP/B: {flop_per_byte:.1f} | bound: {bound}"
)


def bandwidth_rows(rows, ceilings):
    """Return the operators whose bytes are known, with FLOP per byte, fraction of the copy bandwidth, and bound."""
    found = [row | {"flop_per_byte": row["flops"] / row["bytes"]} for row in rows if row["bytes"] and row["gb_s"]]
    for row in found:
        row["share_of_copy"] = row["gb_s"] / (1e3 * ceilings["copy_tb_s"])
        row["bound"] = bound(row["flop_per_byte"], ceilings)
    return found


def summary(rows, all_rows, ceilings):
    """Return bytes and rate of the whole step, and the time of memory-bound operators and of unknown ones."""
    moved, ms = (sum(row[key] for row in rows) for key in ("bytes", "ms"))
    total = sum(row["ms"] for row in all_rows)
    rate = moved / ms / 1e6
    bound_ms = sum(row["ms"] for row in rows if row["bound"] == "memory")
    whole = {"bytes": moved, "gb_s": rate, "share_of_copy": rate / (1e3 * ceilings["copy_tb_s"])}
    return whole | {"ms": total, "memory_bound_ms": bound_ms, "unknown_ms": total - ms}


def as_text(content):
    whole = content["summary"]
    share = 100 * whole["memory_bound_ms"] / whole["ms"]
    return (
        f"{content['trace']}\nceilings {content['ceilings_from']}: {ceilings_line(content['ceilings'])}\n\n"
        f"{text_table(*columns(COLUMNS, content['operators'][:TOP]), left=2)}\n\n"
        f"a step moves at least {whole['bytes'] / 1e6:,.1f} MB; its operators reach {whole['gb_s']:,.1f} GB/s "
        f"while they run, {100 * whole['share_of_copy']:.0f} % of the copy bandwidth\n"
        f"{whole['memory_bound_ms']:,.3f} of {whole['ms']:,.3f} ms ({share:.0f} %) are in memory-bound operators; "
        f"bytes aren't known for {whole['unknown_ms']:,.3f} ms" + "".join(f"\n{one}" for one in content["remarks"])
    )


def draw(target, name, content):
    """Draw the operators whose bytes are known; at the left edge those that compute little or nothing.

    As far below the copy ceiling as a point lies, so far is its bandwidth below that of a copy, there too.
    """
    points = []
    for row in content["operators"]:
        x = max(row["flop_per_byte"], LEAST_SHOWN)
        points.append((short(row["operator"].removeprefix("aten::"), 26), x, x * row["gb_s"] / 1e3, row["ms"]))
    title = f"Operators of a step, {name}; those that only move data are at the left edge"
    draw_roofline(target, textwrap.fill(title, 50), content["ceilings"], points)
    progress(f"drew {target}; not in it: {content['summary']['unknown_ms']:,.3f} ms per step whose bytes are not known")


def analyze(options):
    profile, content = analyzed_trace(options)
    if profile.interpreted:
        progress(INTERPRETED)
    if content["ceilings"] is None:
        raise Failure(2, content["ceilings_from"])
    rows = bandwidth_rows(content["operators"], content["ceilings"])
    if not rows:
        raise Failure(2, f"{profile.path} has no shapes that tell its bytes: {WITH_SHAPES}")
    content |= {"summary": summary(rows, content["operators"], content["ceilings"]), "operators": rows}
    if options.generate_roofline_plot:
        draw(profile.path.parent / "roofline.png", profile.path.name[:8], content)
    emit(content, as_text(content), options.json)


def main(argv=None):
    parser = Parser("memory_bandwidth_analyzer.py", __doc__)
    parser.add_argument("--generate-roofline-plot", action="store_true", help="draw roofline.png next to the trace")
    add_trace_options(parser)
    return parser.run(analyze, argv)


if __name__ == "__main__":
    sys.exit(main())
