#!/usr/bin/env python3
"""What a training step spends its time on, how far each part is from the device's limits, and which version tackles it.

Ranks the operators of a PyTorch trace by measured time. From the recorded shapes follow the bytes and operations that
each needs at least, and from the device's ceilings (a large product, a large copy) the shortest time for them. Writes
the report, and beside it

    bottleneck_analysis/operator_timing.csv         a row for each operator
    bottleneck_analysis/optimization_targets.json   the groups, by the time that could be saved

Exit status: 0 written, 2 for bad input.
"""

import argparse
import json
import pathlib
import sys

from common.analysis import Parser, add_steps, emit, known, markdown_table, positive, progress
from common.command_line import Failure, run_tool
from common.traces import ceilings_for, operator_table, read_profile, steps_needed
from kernel_times import write_csv

ADDRESSED_BY = {
    "GEMM": "version 2 (one product for q, k, v and one for gate, up); a lower precision with --tf32 or --use-amp",
    "attention": "version 2 (one kernel, no T x T scores in memory), version 3 (its own kernel, no copies)",
    "normalisation": "version 3 (RMSNorm with the residual addition in one kernel), version 4 (PyTorch's fused norm)",
    "element-wise": "version 3 (RoPE and SwiGLU in one kernel each), version 2 with --enable-torch-compile",
    "optimizer": "version 3 (AdamW in one launch), version 4 (fused and compiled AdamW)",
    "copies": "version 2 (fewer pieces to join), version 3 (kernels that read the packed tensors in place)",
    "other": "version 3 (cross-entropy in one kernel), version 4 (torch.compile)",
}


def targets(rows: list[dict]) -> list[dict]:
    """A row for each group, by the time that could be saved; where that is not known, by its whole time."""
    groups: dict[str, list[dict]] = {}
    for row in rows:
        groups.setdefault(row["group"], []).append(row)
    whole = sum(row["ms"] for row in rows)
    found = []
    for group, part in groups.items():
        ms = sum(row["ms"] for row in part)
        judged = [row for row in part if row["roofline_ms"] is not None]
        saved = sum(max(0.0, row["ms"] - row["roofline_ms"]) for row in judged) if judged else None
        found.append(
            {
                "group": group,
                "ms": ms,
                "share_percent": 100 * ms / whole if whole else 0.0,
                "calls": sum(row["calls"] for row in part),
                "could_save_ms": saved,
                "step_could_be": whole / (whole - saved) if saved is not None and saved < whole else None,
                "addressed_by": ADDRESSED_BY[group],
                "operators": [row["operator"] for row in part[:3]],
            }
        )
    saved_or_all = [(row["could_save_ms"] if row["could_save_ms"] is not None else row["ms"], row) for row in found]
    return [row | {"rank": i} for i, (_, row) in enumerate(sorted(saved_or_all, key=lambda pair: -pair[0]), 1)]


def percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.0f} %"


def ceiling_lines(content: dict) -> list[str]:
    roofs = content["ceilings"]
    if roofs is None:
        return [f"No roofline: {content['ceilings_from']}."]
    return [
        f"Ceilings, {content['ceilings_from']}: {roofs['matmul_tflops']:.3f} TFLOP/s, {roofs['copy_tb_s']:.3f} TB/s.",
        "The roofline is the shortest time that they allow, every input read once; a share of it above 100 % means",
        "that the data was still in a cache.",
    ]


def operator_cells(rows: list[dict]) -> list[list]:
    return [
        [
            i,
            f"`{row['operator']}`",
            row["group"],
            f"{row['calls']:,.0f}",
            f"{row['ms']:,.3f}",
            f"{row['share_percent']:.1f}",
            known(row["tflops"], ".3f"),
            known(row["gb_s"], ",.1f"),
            percent(row["of_roofline"]),
        ]
        for i, row in enumerate(rows, 1)
    ]


def report(content: dict, top: int) -> str:
    rows, whole = content["operators"], sum(row["ms"] for row in content["operators"])
    what = "operators" if content["on_cpu"] else "kernels"
    lines = [
        f"# Bottlenecks of {content['trace']}",
        "",
        f"{content['device']}, {content['steps']} steps, {whole:,.3f} ms in {what} a step.",
        *ceiling_lines(content),
        "",
        "## What to change, by the time that could be saved",
        "",
    ]
    cells = [
        [
            row["rank"],
            row["group"],
            f"{row['ms']:,.3f}",
            f"{row['share_percent']:.1f}",
            known(row["could_save_ms"], ",.3f"),
            known(row["step_could_be"], ".2f"),
            row["addressed_by"],
        ]
        for row in content["targets"]
    ]
    header = ["rank", "group", "ms a step", "%", "could save ms", "step faster by x at most", "addressed by"]
    lines += [markdown_table(header, cells, left=2), "", "## Operators by measured time", ""]
    header = ["rank", "operator", "group", "calls a step", "ms a step", "%", "TFLOP/s", "GB/s", "of the roofline"]
    return "\n".join([*lines, markdown_table(header, operator_cells(rows[:top]), left=3), ""])


def as_text(content: dict, files: list[pathlib.Path]) -> str:
    lines = []
    for row in content["targets"][:3]:
        saved = "" if row["could_save_ms"] is None else f", of which {row['could_save_ms']:,.3f} ms could be saved"
        lines.append(f"{row['rank']}. {row['group']}: {row['ms']:,.3f} ms a step ({row['share_percent']:.1f} %){saved}")
        lines.append(f"   {row['addressed_by']}")
    if content["ceilings"] is None:
        lines.append(f"no roofline: {content['ceilings_from']}")
    return "\n".join([*lines, f"wrote {', '.join(map(str, files))}"])


def write_files(content: dict, path: pathlib.Path, top: int) -> list[pathlib.Path]:
    """The report and its two companions; returns their paths."""
    folder = path.parent / "bottleneck_analysis"
    folder.mkdir(parents=True, exist_ok=True)
    timing, ranked = folder / "operator_timing.csv", folder / "optimization_targets.json"
    path.write_text(report(content, top), encoding="utf-8")
    with open(timing, "w", encoding="utf-8", newline="") as file:
        write_csv(content["operators"], file)
    ranked.write_text(json.dumps({"trace": content["trace"], "targets": content["targets"]}, indent=1) + "\n")
    return [path, timing, ranked]


def analyze(options: argparse.Namespace) -> None:
    profile = read_profile(options.profile_data, options.steps)
    if not profile.operations:
        raise Failure(2, f"{profile.path} holds no operators: give a trace of --enable-pytorch-profiler")
    steps = steps_needed(profile)
    if not options.ceilings:
        progress("measuring this device's ceilings ...")
    ceilings, origin = ceilings_for(profile, options.ceilings)
    rows = operator_table(profile, steps, ceilings)
    content = {
        "trace": profile.path.name,
        "device": profile.device or ("CPU" if profile.on_cpu else "GPU"),
        "on_cpu": profile.on_cpu,
        "steps": steps,
        "ceilings": ceilings,
        "ceilings_from": origin,
        "targets": targets(rows),
        "operators": rows,
    }
    files = write_files(content, pathlib.Path(options.output_report), options.top)
    emit(content, as_text(content, files), options.json)


def main(argv: list[str] | None = None) -> int:
    parser = Parser(
        "analyze_bottlenecks.py",
        "Rank the operators of a step by time, with their distance from the roofline and what tackles them.",
        "--profile-data pytorch_profiles/ --output-report bottlenecks_v1.md",
    )
    parser.add_argument("--profile-data", required=True, metavar="DIR", help="PyTorch trace, or its folder")
    parser.add_argument("--output-report", default="bottlenecks.md", metavar="FILE", help="Markdown (%(default)s)")
    parser.add_argument("--ceilings", metavar="FILE", help="flops_profile.json with the device's ceilings (measured)")
    add_steps(parser)
    parser.add_argument("--top", type=positive, default=25, metavar="N", help="operators in the report (%(default)s)")
    options = parser.parse_args(argv)
    return run_tool("analyze_bottlenecks.py", lambda: analyze(options))


if __name__ == "__main__":
    sys.exit(main())
