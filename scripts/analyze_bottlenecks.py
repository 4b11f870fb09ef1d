#!/usr/bin/env python3
"""Rank the operators of a step by time. Shows how far each is from the device's limits, and what may shorten it.

example: python analyze_bottlenecks.py --profile-data pytorch_profiles/ --output-report bottlenecks_v1.md

Reads a PyTorch trace. The recorded shapes tell how many bytes and FLOPs each operator needs. The device's ceilings (the
rates of a large matmul and a large copy) tell how fast it could be. The report also shows how the GPU spent each step,
why it idled, and how fast the matmuls of each shape were. It's Markdown, or HTML if its name ends in .html. Next to it
the tool writes

    bottleneck_analysis/operator_timing.csv         a row per operator
    bottleneck_analysis/optimization_targets.json   the groups, by the time that you could save
"""

import json
import pathlib
import re
import sys

from common import report as pages
from common.command_line import Parser
from common.measuring.ceilings import ceilings_line
from common.profiles import INTERPRETED
from common.profiles.gemms import gemm_results, gemm_table, no_gemms
from common.profiles.idle import EXPOSED, IDLE_BOUND, exposed, hardly_waits, idle_results, idle_tables
from common.profiles.operators import OVER_A_LINK
from common.profiles.roofline import add_trace_options, analyzed_trace
from common.tables import columns, emit, rounded, text_table, write_csv, write_whole

TOP = 25  # operators in the report
MATMULS_SHOWN = 5  # on the screen
GROUP_COLUMNS = (
    "rank: {rank} | group: {group} | ms per step: {ms:r} | %: {share_percent:.1f} | could save ms: {could_save_ms:r} | "
    "step faster by at most: {step_could_be:.2f} | what may help: {addressed_by}"
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
    "communication": "a larger batch per GPU; analyze_communication.py shows how much of it hides behind computation",
    "other": "version 3 (cross-entropy in one kernel), version 4 (torch.compile)",
}
IN_GENERAL = ADDRESSED_BY | {  # of another program, which has no versions
    "GEMM": "one matmul for q, k, v and one for gate, up; a lower precision; analyze_gemm_operations.py rates shapes",
    "attention": "another backend of scaled_dot_product_attention; it's one kernel already",
    "normalisation": "torch.compile, which fuses a norm with its neighbours; version 3's RMSNorm is such a kernel",
    "element-wise": "torch.compile, which fuses them; version 3's RoPE and SwiGLU are such kernels",
    "optimizer": "the optimizer's fused=True, if it isn't fused yet",
    "copies": "fewer casts, transposes and .contiguous(); torch.compile fuses some",
    "other": "no advice for all of them: see the operators",
}
IN_PARTICULAR = [  # group, pattern of its longest operator
    ("GEMM", "conv", "a lower precision, or channels_last tensors, which need no transposes"),
    ("GEMM", "bmm$", "if these are attention's scores: scaled_dot_product_attention, which keeps none in memory"),
    ("attention", "softmax", "scaled_dot_product_attention: one kernel, no T x T scores in memory"),
]
LOADING = "enumerate(DataLoader)#"  # begins PyTorch's mark around the wait for a batch
FOR_HOST_COPIES = "pinned memory and non_blocking=True, to overlap with kernels, or data that stays on the GPU"


def advice_for(profile, rows):
    """Return {group: what may shorten it}: the version that does, or for another program's trace what may help there.

    rows: of its operators, the longest first.
    """
    if profile.metadata:
        return ADDRESSED_BY
    found = dict(IN_GENERAL)
    longest = {}
    for row in rows:
        longest.setdefault(row["group"], row["operator"])
    for group, pattern, words in IN_PARTICULAR:
        if re.search(pattern, longest.get(group, "")):
            found[group] = words
    copies = [call for call in profile.step_calls if call.group == "copies"]
    with_host = sum(call.total_ns for call in copies if OVER_A_LINK.search(call.name))
    if with_host > sum(call.total_ns for call in copies) / 2:
        found["copies"] = FOR_HOST_COPIES
    return found


def ranked(rows):
    return [{"rank": i} | row for i, row in enumerate(rows, 1)]


def targets(rows, advice=ADDRESSED_BY, step_ms=0.0):
    """Return a row per group, by the time that could be saved; where that is not known, by its whole time.

    A group of which most time has no floor has no bound: it may have everything to win. step_ms: with idle time, or on
    a CPU with Python and loading data, which shorter kernels leave.
    """
    busy = sum(row["ms"] for row in rows)
    whole = max(step_ms, busy)
    found = []
    for group in dict.fromkeys(row["group"] for row in rows):
        part = [row for row in rows if row["group"] == group]
        ms = sum(row["ms"] for row in part)
        gains = [max(0.0, row["ms"] - row["roofline_ms"]) for row in part if row["roofline_ms"] is not None]
        unknown = sum(row["ms"] for row in part if row["roofline_ms"] is None)  # nobody knows how short these can be
        saved = sum(gains) if gains and unknown <= ms / 2 else None
        faster = whole / (whole - saved - unknown) if saved is not None and saved + unknown < whole else None
        row = {"group": group, "ms": ms, "share_percent": 100 * ms / (busy or 1), "could_save_ms": saved}
        found.append(row | {"step_could_be": faster, "addressed_by": advice[group]})
    return ranked(sorted(found, key=lambda row: -(row["ms"] if row["could_save_ms"] is None else row["could_save_ms"])))


def evidence(rows):
    """Return the sentence about operators without a floor, if most of the time is theirs."""
    whole = sum(row["ms"] for row in rows)
    known = sum(row["ms"] for row in rows if row["roofline_ms"] is not None)
    if known >= whole / 2:
        return []
    floor = f"a shortest time is known for {rounded(known)} of {rounded(whole)} ms alone"
    return [f"No verdict about what to change first: {floor}. The groups are in the order of their time."]


def waiting(idle):
    """Return the sentence about idle time, which no shorter kernel saves, if it's a large part of the steps."""
    if not idle or idle["launch_bound"] is None or hardly_waits(idle):
        return []
    row = idle["per_step"][-1]
    waits = f"GPU waits {row['idle_percent']:.0f} %"
    found = f"The {waits} of the time"
    if larger := exposed(row, row["idle_ms"]):
        found = f"{larger.capitalize()} of the time, and the {waits}"
    return [f"{found}. Shorter kernels don't change that, so begin there."]


def step_on_cpu(profile, steps):
    """Return the milliseconds of a step on a CPU, and those that it waits for its data, both under the profiler."""
    first = profile.calls[0].start_ns
    last = max(call.end_ns for call in profile.calls)
    spans = [(max(start, first), end) for start, end in profile.spans] or [(first, last)]
    loading = 0.0
    for event in profile.host:
        if event["name"].startswith(LOADING):
            start = 1e3 * event["ts"]
            end = start + 1e3 * event["dur"]
            loading += sum(max(0.0, min(end, stop) - max(start, begin)) for begin, stop in spans)
    whole = sum(end - start for start, end in spans)
    return {"whole_ms": whole / steps / 1e6, "loading_ms": loading / steps / 1e6}


def between_operators(step, rows):
    """Return the sentence about a CPU's time outside operators, if it's a large part of the steps."""
    busy = sum(row["ms"] for row in rows)
    if busy >= (1 - IDLE_BOUND) * step["whole_ms"]:
        return []
    share = f"{100 * busy / step['whole_ms']:.0f} %"
    found = f"A step takes {rounded(step['whole_ms'])} ms under the profiler, and its operators {share} of it."
    rest = "Python and the profiler take the rest"
    if step["loading_ms"]:
        rest = f"It waits {rounded(step['loading_ms'])} ms for the DataLoader, and {rest}"
    return [f"{found} {rest}, which shorter operators don't change."]


def write_report(content, path):
    """Write the page: groups by the time that could be saved, operators by their time, idle time, matmuls."""
    rows = content["operators"]
    what = "operators" if content["on_cpu"] else "kernels"
    roofs = f"No roofline: {content['ceilings_from']}."
    if content["ceilings"]:
        roofs = f"Ceilings, {content['ceilings_from']}: {ceilings_line(content['ceilings'])}. The roofline is the"
        roofs += " shortest time that they allow, every input read once."
    facts = [("device", content["device"]), ("steps", content["steps"])]
    facts.append(("time", f"{rounded(sum(row['ms'] for row in rows))} ms in {what} per step"))
    if content["on_cpu"]:
        facts.append(("whole step", f"{rounded(content['step']['whole_ms'])} ms under the profiler"))
    notice = [*content["waiting"], roofs, *content["remarks"]]
    if content["interpreted"]:
        notice.append(INTERPRETED)
    groups = pages.table(*columns(GROUP_COLUMNS, content["targets"]))
    operators = pages.table(*columns(OPERATOR_COLUMNS, ranked(rows[:TOP])))
    sections = [
        ("What to change, by the time that could be saved", [groups]),
        ("Operators by measured time", [operators]),
    ]
    if content["idle"]:
        told = [pages.text(f"{content['idle']['verdict']}. {EXPOSED}"), *map(pages.text, remarks_of("idle", content))]
        sections.append(("Busy and idle time", told))
        for heading, header, cells, _ in idle_tables(content["idle"]):
            sections.append((heading, [pages.table(header, cells)]))
    matmuls = content["matmuls"]
    told = [pages.text(remark) for remark in remarks_of("matmuls", content)]
    table = [pages.table(*gemm_table(matmuls))] if matmuls["gemms"] else [pages.text(content["no_matmuls"])]
    sections.append(("Matmuls by shape, the most time lost first", [*told, *table]))
    write = pages.page if path.suffix == ".html" else pages.markdown
    write_whole(path, write(f"Bottlenecks of {content['trace']}", facts, notice, sections))


def remarks_of(part, content):
    """Return the remarks about a part of the page, "idle" or "matmuls", that the whole page does not make."""
    return [remark for remark in content[part]["remarks"] if remark not in content["remarks"]]


def as_text(content, files):
    lines = [content["trace"], *content["waiting"]]
    for row in content["targets"][:3]:
        saved = "" if row["could_save_ms"] is None else f", of which {rounded(row['could_save_ms'])} ms could be saved"
        time = f"{rounded(row['ms'])} ms per step ({row['share_percent']:.1f} %)"
        lines += [f"{row['rank']}. {row['group']}: {time}{saved}", f"   {row['addressed_by']}"]
    if content["ceilings"] is None:
        lines.append(f"no roofline: {content['ceilings_from']}")
    lines += content["remarks"]
    if content["interpreted"]:
        lines.append(INTERPRETED)
    if content["idle"]:
        lines += ["", content["idle"]["verdict"], *remarks_of("idle", content)]
        for _, header, rows, left in idle_tables(content["idle"]):
            lines += [text_table(header, rows, left=left), ""]
    matmuls = content["matmuls"]
    header, rows = gemm_table(matmuls)
    lines += [text_table(header, rows[:MATMULS_SHOWN], left=3) if rows else content["no_matmuls"], ""]
    return "\n".join([*lines, f"wrote {', '.join(map(str, files))}"])


def analyze(options):
    """Write the report and its two companions."""
    profile, content = analyzed_trace(options)
    path = pathlib.Path(options.output_report)
    content |= {"idle": None, "step": None}
    if content["on_cpu"]:
        content["step"] = step_on_cpu(profile, content["steps"])
        content["waiting"] = between_operators(content["step"], content["operators"])
        step_ms = content["step"]["whole_ms"]
    else:
        content["idle"] = idle_results(profile)
        content["waiting"] = waiting(content["idle"])
        step_ms = content["idle"]["per_step"][-1]["whole_ms"] / content["steps"]
    content["targets"] = targets(content["operators"], advice_for(profile, content["operators"]), step_ms)
    content["remarks"] += evidence(content["operators"]) if content["ceilings"] else []
    content["matmuls"] = gemm_results(profile, options.peak)
    content["no_matmuls"] = no_gemms(profile)
    folder = path.parent / "bottleneck_analysis"
    folder.mkdir(parents=True, exist_ok=True)
    files = path, folder / "operator_timing.csv", folder / "optimization_targets.json"
    write_report(content, path)
    write_csv(content["operators"], files[1])
    found = {"trace": content["trace"], "targets": content["targets"]}
    write_whole(files[2], json.dumps(found, indent=1) + "\n")
    emit(content, as_text(content, files), options.json)


def main(argv=None):
    parser = Parser("analyze_bottlenecks.py", __doc__)
    parser.add_argument("--output-report", default="bottlenecks.md", metavar="FILE", help=".md or .html (%(default)s)")
    add_trace_options(parser)
    return parser.run(analyze, argv)


if __name__ == "__main__":
    sys.exit(main())
