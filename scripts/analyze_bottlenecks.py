#!/usr/bin/env python3
"""Rank the operators of a step by time, with their distance from the device's limits and the version that tackles them.

example: python analyze_bottlenecks.py --profile-data pytorch_profiles/ --output-report bottlenecks_v1.md

Reads a PyTorch trace. From the recorded shapes follow the bytes and FLOPs that each operator needs at least, and from
the device's ceilings (a large matmul, a large copy) the shortest time for them. Writes the report, and beside it

    bottleneck_analysis/operator_timing.csv         a row per operator
    bottleneck_analysis/optimization_targets.json   the groups, by the time that could be saved
"""

import json
import pathlib
import sys

from common.command_line import Parser
from common.profiles import INTERPRETED
from common.roofline import add_trace_options, analyzed_trace, ceilings_line
from common.tables import columns, emit, markdown, markdown_table, rounded, write_csv

TOP = 25  # operators in the report
GROUP_COLUMNS = (
    "rank: {rank} | group: {group} | ms per step: {ms:r} | %: {share_percent:.1f} | could save ms: {could_save_ms:r} | "
    "step faster by at most: {step_could_be:.2f} | addressed by: {addressed_by}"
)
OPERATOR_COLUMNS = (
    "rank: {rank} | operator: `{operator}` | group: {group} | calls per step: {calls:,.0f} | ms per step: {ms:r} | "
    "%: {share_percent:.1f} | TFLOP/s: {tflops:r} | GB/s: {gb_s:r} | of the roofline: {of_roofline:.0%}"
)
ADDRESSED_BY = {
    "GEMM": "version 2 (one matmul for q, k, v and one for gate, up); a lower precision with --tf32 or --use-amp",
    "attention": "version 2 (one kernel, no T x T scores in memory), version 3 (its own kernel, no copies)",
    "normalisation": "version 3 (RMSNorm with the residual add in one kernel), version 4 (PyTorch's fused norm)",
    "element-wise": "version 3 (RoPE and SwiGLU in one kernel each), version 2 with --enable-torch-compile",
    "optimizer": "version 3 (AdamW in one launch), version 4 (fused and compiled AdamW)",
    "copies": "version 2 (fewer pieces to join), version 3 (kernels that read the packed tensors in place)",
    "communication": "a larger batch per GPU; analyze_communication.py tells how much of it computation hides",
    "other": "version 3 (cross-entropy in one kernel), version 4 (torch.compile)",
}


def ranked(rows):
    return [{"rank": i} | row for i, row in enumerate(rows, 1)]


def targets(rows):
    """Return a row per group, by the time that could be saved; where that is not known, by its whole time."""
    whole = sum(row["ms"] for row in rows)
    found = []
    for group in dict.fromkeys(row["group"] for row in rows):
        part = [row for row in rows if row["group"] == group]
        ms = sum(row["ms"] for row in part)
        gains = [max(0.0, row["ms"] - row["roofline_ms"]) for row in part if row["roofline_ms"] is not None]
        saved = sum(gains) if gains else None
        unknown = sum(row["ms"] for row in part if row["roofline_ms"] is None)  # nobody knows how short these can be
        faster = whole / (whole - saved - unknown) if gains and saved + unknown < whole else None
        row = {"group": group, "ms": ms, "share_percent": 100 * ms / (whole or 1), "could_save_ms": saved}
        found.append(row | {"step_could_be": faster, "addressed_by": ADDRESSED_BY[group]})
    return ranked(sorted(found, key=lambda row: -(row["ms"] if row["could_save_ms"] is None else row["could_save_ms"])))


def report(content):
    """Return the Markdown page: groups by the time that could be saved, operators by their time."""
    rows = content["operators"]
    what = "operators" if content["on_cpu"] else "kernels"
    roofs = f"No roofline: {content['ceilings_from']}."
    if content["ceilings"]:
        roofs = (
            f"Ceilings, {content['ceilings_from']}: {ceilings_line(content['ceilings'])}. The roofline is the\n"
            "shortest time that they allow, every input read once."
        )
    roofs = "\n".join([roofs, *content["remarks"]])
    return (
        f"# Bottlenecks of {markdown(content['trace'])}\n\n"
        f"{markdown(content['device'])}, {content['steps']} steps, {rounded(sum(row['ms'] for row in rows))} ms in "
        f"{what} per step.{(' ' + INTERPRETED) * content['interpreted']}\n{roofs}\n\n"
        f"## What to change, by the time that could be saved\n\n"
        f"{markdown_table(*columns(GROUP_COLUMNS, content['targets']), left=2)}\n\n"
        f"## Operators by measured time\n\n{markdown_table(*columns(OPERATOR_COLUMNS, ranked(rows[:TOP])), left=3)}\n"
    )


def as_text(content, files):
    lines = [content["trace"]]
    for row in content["targets"][:3]:
        saved = "" if row["could_save_ms"] is None else f", of which {rounded(row['could_save_ms'])} ms could be saved"
        time = f"{rounded(row['ms'])} ms per step ({row['share_percent']:.1f} %)"
        lines += [f"{row['rank']}. {row['group']}: {time}{saved}", f"   {row['addressed_by']}"]
    if content["ceilings"] is None:
        lines.append(f"no roofline: {content['ceilings_from']}")
    lines += content["remarks"]
    if content["interpreted"]:
        lines.append(INTERPRETED)
    return "\n".join([*lines, f"wrote {', '.join(map(str, files))}"])


def analyze(options):
    """Write the report and its two companions."""
    content = analyzed_trace(options)[1]
    path = pathlib.Path(options.output_report)
    content["targets"] = targets(content["operators"])
    folder = path.parent / "bottleneck_analysis"
    folder.mkdir(parents=True, exist_ok=True)
    files = path, folder / "operator_timing.csv", folder / "optimization_targets.json"
    path.write_text(report(content), encoding="utf-8")
    write_csv(content["operators"], files[1])
    files[2].write_text(json.dumps({"trace": content["trace"], "targets": content["targets"]}, indent=1) + "\n")
    emit(content, as_text(content, files), options.json)


def main(argv=None):
    parser = Parser("analyze_bottlenecks.py", __doc__)
    parser.add_argument("--output-report", default="bottlenecks.md", metavar="FILE", help="Markdown (%(default)s)")
    add_trace_options(parser)
    return parser.run(analyze, argv)


if __name__ == "__main__":
    sys.exit(main())
