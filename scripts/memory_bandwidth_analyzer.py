#!/usr/bin/env python3
"""How much of the device's memory bandwidth the operators of a step reach, and a roofline picture with them on it.

Bytes follow from the shapes that a PyTorch trace recorded: every input read once, the output written. So a rate is what
an operator needs at least over the time that it took; one above the copy's rate found its data in a cache.

Exit status: 0 analysed, 1 where the picture needs matplotlib, 2 for bad input.
"""

import argparse
import pathlib
import sys

from common.analysis import (
    Parser,
    add_steps,
    emit,
    known,
    legend_below,
    matplotlib_figure,
    positive,
    progress,
    text_table,
)
from common.command_line import Failure, run_tool
from common.report_page import GROUP_COLOURS
from common.traces import ceilings_for, operator_table, read_profile, steps_needed
from kernel_times import short


def bound(row: dict, ceilings: dict) -> str | None:
    """memory or compute: which ceiling an operator meets first; None where its bytes are not known."""
    if not row["bytes"]:
        return None
    return "compute" if (row["flops"] or 0) / row["bytes"] > balance(ceilings) else "memory"


def balance(ceilings: dict) -> float:
    """FLOP a byte from which on the device is bound by computing."""
    return ceilings["matmul_tflops"] / ceilings["copy_tb_s"]


def bandwidth_rows(rows: list[dict], ceilings: dict) -> list[dict]:
    """The operators whose bytes are known, with FLOP a byte, share of the copy's rate, and what bounds them."""
    return [
        row
        | {
            "flop_per_byte": row["flops"] / row["bytes"],
            "share_of_copy": row["gb_s"] / (1e3 * ceilings["copy_tb_s"]),
            "bound": bound(row, ceilings),
        }
        for row in rows
        if row["bytes"] and row["gb_s"] is not None
    ]


def summary(rows: list[dict], all_rows: list[dict], ceilings: dict) -> dict:
    """The whole step: bytes, rate, time of the memory-bound operators, and of those whose bytes are not known."""
    moved, ms = (sum(row[key] for row in rows) for key in ("bytes", "ms"))
    total = sum(row["ms"] for row in all_rows)
    return {
        "bytes": moved,
        "gb_s": moved / ms / 1e6 if ms else 0.0,
        "share_of_copy": moved / ms / 1e9 / ceilings["copy_tb_s"] if ms else 0.0,
        "ms": total,
        "memory_bound_ms": sum(row["ms"] for row in rows if row["bound"] == "memory"),
        "unknown_ms": total - ms,
        "balance_flop_per_byte": balance(ceilings),
    }


def roofline(path: pathlib.Path, rows: list[dict], ceilings: dict, title: str) -> None:
    """Measured TFLOP/s over FLOP a byte, each operator a disc whose area is its time; those without FLOPs as bytes.

    An operator without FLOPs of products counts one operation a number moved, so that it has a place in the picture.
    """
    placed = []
    for row in sorted(rows, key=lambda row: -row["ms"]):
        flops = row["flops"] or row["bytes"] / 4
        placed.append((flops / row["bytes"], flops / row["ms"] / 1e9, row))
    with matplotlib_figure(path, height=4) as (figure, axes):
        xs = [x for x, _, _ in placed] + [balance(ceilings)]
        span = [min(xs) / 4, max(xs) * 8]
        corner = [span[0], balance(ceilings), span[1]]
        roof = [min(ceilings["matmul_tflops"], ceilings["copy_tb_s"] * x) for x in corner]
        axes.plot(corner, roof, color="black", linewidth=2)
        handles = []
        for group, colour in GROUP_COLOURS.items():
            part = [(x, y, 15 + 500 * row["ms"] / placed[0][2]["ms"]) for x, y, row in placed if row["group"] == group]
            if part:
                axes.scatter(*zip(*part, strict=True), colour, alpha=0.65, edgecolors="white")
                handles.append((axes.scatter([], [], 50, colour), group))
        axes.set(xscale="log", yscale="log", xlim=span, ylabel="TFLOP/s", title=title)
        axes.set_xlabel("FLOP a byte (without products: one for every four bytes)")
        axes.grid(True, alpha=0.3)
        name_discs(axes, placed)
        legend_below(figure, *map(list, zip(*handles, strict=True)), columns=4, title="area: time of a step")


def name_discs(axes, placed: list, most: int = 6) -> None:
    """Names at the discs of the longest operators, as far as no name stands on another."""
    names: list[tuple[float, float]] = []
    for x, y, row in placed[:most]:
        at = axes.transAxes.inverted().transform(axes.transData.transform((x, y)))
        if all(abs(at[0] - x0) > 0.3 or abs(at[1] - y0) > 0.05 for x0, y0 in names):
            names.append((at[0], at[1]))
            axes.annotate(short(row["operator"], 28), (x, y), fontsize=8, xytext=(9, 3), textcoords="offset points")


def as_text(content: dict, top: int) -> str:
    whole, ceilings = content["summary"], content["ceilings"]
    rows = [
        [
            row["operator"],
            row["group"],
            f"{row['ms']:,.3f}",
            f"{row['bytes'] / 1e6:,.2f}",
            f"{row['gb_s']:,.1f}",
            f"{100 * row['share_of_copy']:.0f} %",
            f"{row['flop_per_byte']:.1f}",
            row["bound"],
        ]
        for row in content["operators"][:top]
    ]
    header = ["operator", "group", "ms a step", "MB a step", "GB/s", "of copy", "FLOP/B", "bound"]
    share = 100 * whole["memory_bound_ms"] / whole["ms"] if whole["ms"] else 0.0
    return "\n".join(
        [
            content["trace"],
            f"ceilings {content['ceilings_from']}: copy {1e3 * ceilings['copy_tb_s']:,.1f} GB/s, "
            f"product {ceilings['matmul_tflops']:.3f} TFLOP/s, balance {whole['balance_flop_per_byte']:.1f} FLOP/byte",
            "",
            text_table(header, rows, left=2),
            "",
            f"a step moves at least {whole['bytes'] / 1e6:,.1f} MB at {whole['gb_s']:,.1f} GB/s, "
            f"{100 * whole['share_of_copy']:.0f} % of a copy's rate",
            f"{whole['memory_bound_ms']:,.3f} of {whole['ms']:,.3f} ms ({share:.0f} %) are in memory-bound operators; "
            f"bytes are not known for {known(whole['unknown_ms'], ',.3f')} ms",
        ]
    )


def analyze(options: argparse.Namespace) -> None:
    profile = read_profile(options.profile_data, options.steps)
    if not profile.operations:
        raise Failure(2, f"{profile.path} holds no shapes: give a trace of --enable-pytorch-profiler")
    steps = steps_needed(profile)
    if not options.ceilings:
        progress("measuring this device's ceilings ...")
    ceilings, origin = ceilings_for(profile, options.ceilings)
    if ceilings is None:
        raise Failure(2, origin)
    table = operator_table(profile, steps, ceilings)
    rows = bandwidth_rows(table, ceilings)
    if not rows:
        raise Failure(2, f"{profile.path} recorded no shapes: profile without --graph")
    content = {
        "trace": str(profile.path),
        "steps": steps,
        "ceilings": ceilings,
        "ceilings_from": origin,
        "summary": summary(rows, table, ceilings),
        "operators": rows,
    }
    if options.generate_roofline_plot:
        target = pathlib.Path(options.plot_file or profile.path.parent / "roofline.png")
        roofline(target, rows, ceilings, f"Operators of a step: {profile.path.name}")
        progress(f"drew {target}")
    emit(content, as_text(content, options.top), options.json)


def main(argv: list[str] | None = None) -> int:
    parser = Parser(
        "memory_bandwidth_analyzer.py",
        "Bandwidth that the operators of a step reach, and a roofline picture.",
        "--profile-data ./complete_rocm_analysis --generate-roofline-plot",
    )
    parser.add_argument("--profile-data", required=True, metavar="DIR", help="PyTorch trace, or a folder with one")
    parser.add_argument("--generate-roofline-plot", action="store_true", help="draw roofline.png beside the trace")
    parser.add_argument("--plot-file", metavar="PNG", help="another place for the picture")
    parser.add_argument("--ceilings", metavar="FILE", help="flops_profile.json with the device's ceilings (measured)")
    add_steps(parser)
    parser.add_argument("--top", type=positive, default=20, metavar="N", help="operators to print (%(default)s)")
    options = parser.parse_args(argv)
    return run_tool("memory_bandwidth_analyzer.py", lambda: analyze(options))


if __name__ == "__main__":
    sys.exit(main())
