#!/usr/bin/env python3
"""What fusion changed, as a report: step, memory and kernels of two profiles side by side.

Reads two folders of run_pytorch_profiler.py or run_all_profilers.sh (figures and a trace each); without them versions 1
and 2 are profiled first, with options that are not listed here. Writes Markdown, and with matplotlib report.html beside
it, which holds the same tables and pictures of the steps and of their kernels.

Exit status: 0 written; 1 where profiling fails; 2 for bad input.
"""

import argparse
import json
import pathlib
import subprocess
import sys

from analyze_kernel_reduction import compared, counts
from common import report_page
from common.analysis import Parser, emit, known, markdown_table, progress, with_sizes
from common.command_line import Failure, result_folder, run_tool
from common.traces import read_profile, steps_needed
from common.versions import REPOSITORY


def newest_profile(folder: pathlib.Path) -> dict:
    """The newest profile_*.json of run_pytorch_profiler.py below a folder; Failure where there is none."""
    if not folder.is_dir():
        raise Failure(2, f"{folder} is no folder: give what run_pytorch_profiler.py left with --profile-dir")
    files = sorted(folder.rglob("profile_v*.json"), key=lambda file: file.stat().st_mtime)
    if not files:
        raise Failure(
            2, f"{folder} holds no profile_v*.json: profile with run_pytorch_profiler.py --profile-dir {folder}"
        )
    try:
        content = json.loads(files[-1].read_text(encoding="utf-8"))
        trace = files[-1].parent / content["trace"]
        content["summary"]["step_ms"]["median"]
    except (ValueError, KeyError, TypeError):
        raise Failure(2, f"{files[-1]} is no profile of run_pytorch_profiler.py, or it is damaged") from None
    return content | {"trace_file": trace}


def profile_version(version: int, folder: pathlib.Path, rest: list[str]) -> None:
    """Leave a profile of that version in the folder."""
    progress(f"version {version}: profiling ...")
    tool = REPOSITORY / "scripts" / "run_pytorch_profiler.py"
    command = [sys.executable, str(tool), "--version", str(version), "--profile-dir", str(folder), *with_sizes(rest)]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        words = (result.stderr or result.stdout).strip().splitlines()[-1:]
        raise Failure(result.returncode, f"version {version} was not profiled: {' '.join(words)}")


def comparison(baseline: dict, fused: dict, allow_different: bool) -> dict:
    """Figures and kernels of both; Failure where device or sizes differ."""
    pairs = [("device", baseline["environment"]["device"], fused["environment"]["device"])]
    pairs += [(key, value, fused["config"].get(key)) for key, value in baseline["config"].items()]
    pairs.append(("FLOPs a step", baseline["summary"]["flops_per_step"], fused["summary"]["flops_per_step"]))
    pairs.append(("precision", baseline["summary"]["precision"], fused["summary"]["precision"]))
    found = [f"{name}: {one}, {other}" for name, one, other in pairs if one != other]
    if found and not allow_different:
        raise Failure(
            2, f"the profiles are not comparable ({'; '.join(found)}): profile alike, or add --allow-different"
        )
    profiles = [read_profile(content["trace_file"], content["steps_profiled"]) for content in (baseline, fused)]
    if profiles[0].on_cpu != profiles[1].on_cpu:
        raise Failure(2, "one profile is of a CPU and the other of a GPU: profile both on the same device")
    kernels = compared(*(counts(profile, steps_needed(profile)) for profile in profiles))
    versions = []
    for content in (baseline, fused):
        summary = content["summary"]
        kept = {
            key: summary[key] for key in ("step_ms", "forward_ms", "backward_ms", "optimizer_ms", "tokens_per_second")
        }
        kept |= {key: summary[key] for key in ("peak_memory_mb", "tflops", "parameters", "parameters_trained")}
        versions.append({"name": f"version {content['version']}", "environment": content["environment"], **kept})
    return {"versions": versions, "kernels": kernels, "what": profiles[0].what, "differences": found}


def figure_rows(content: dict) -> list[list[str]]:
    first, second = content["versions"]

    def row(name, values, pattern):
        ratio = values[0] / values[1] if None not in values and values[1] else None
        return [name, *(known(value, pattern) for value in values), known(ratio, ".2f")]

    rows = [row("step, median ms", [v["step_ms"]["median"] for v in (first, second)], ",.3f")]
    spread = [f"{v['step_ms']['p25']:,.3f} - {v['step_ms']['p75']:,.3f}" for v in (first, second)]
    rows.append(["step, quartiles ms", *spread, ""])
    for key in ("forward", "backward", "optimizer"):
        rows.append(row(f"{key} ms", [v[f"{key}_ms"] for v in (first, second)], ",.3f"))
    rows.append(row("peak memory MB", [v["peak_memory_mb"] for v in (first, second)], ",.1f"))
    rows.append(row("TFLOP/s", [v["tflops"] for v in (first, second)], ",.3f"))
    trained = [f"{v['parameters_trained'] / v['parameters']:.0%}" for v in (first, second)]
    return [*rows, ["parameters trained", *trained, ""]]


def kernel_rows(content: dict) -> list[list[str]]:
    return [
        [
            row["group"],
            f"{row['baseline_calls']:,.1f}",
            f"{row['fused_calls']:,.1f}",
            known(row["fewer_percent"], ".1f"),
        ]
        + [f"{row['baseline_ms']:,.3f}", f"{row['fused_ms']:,.3f}"]
        for row in content["kernels"]["rows"]
    ]


def headers(content: dict) -> tuple[list[str], list[str]]:
    names = [version["name"] for version in content["versions"]]
    kernels = [f"{content['what']} a step", *names, "% fewer", *(f"ms, {name}" for name in names)]
    return ["figure", *names, "first / second"], kernels


def findings(content: dict) -> list[str]:
    """What the report says in words, all of it from its figures."""
    first, second = content["versions"]
    whole, a, b = content["kernels"]["rows"][-1], first["step_ms"], second["step_ms"]
    apart = b["p75"] < a["p25"] or a["p75"] < b["p25"]
    ratio = a["median"] / b["median"]
    lines = [
        f"{second['name'].capitalize()} takes {b['median']:,.3f} ms a step, {first['name']} {a['median']:,.3f} ms: "
        f"{ratio:.2f}x{'' if apart else ', which the spread leaves open'}.",
        f"{whole['baseline_calls']:,.0f} {content['what']} a step became {whole['fused_calls']:,.0f}.",
    ]
    for version in content["versions"]:
        if version["parameters_trained"] != version["parameters"]:
            lines.append(f"{version['name'].capitalize()} does not train every parameter: its speed means nothing.")
    return lines + [f"The profiles differ in {difference}." for difference in content["differences"]]


def machine(content: dict) -> str:
    environment = content["versions"][1]["environment"]
    return f"{environment['device']}, PyTorch {environment['torch']}, {environment['date']}"


def markdown(content: dict) -> str:
    figures, kernels = headers(content)
    names = " and ".join(version["name"] for version in content["versions"])
    lines = [f"# Fusion report: {names}", "", machine(content), "", *findings(content), "", "## The steps", ""]
    lines += [markdown_table(figures, figure_rows(content)), "", f"## {content['what'].capitalize()} by group", ""]
    return "\n".join([*lines, markdown_table(kernels, kernel_rows(content)), ""])


def html_page(content: dict, folder: pathlib.Path) -> str:
    """The page; its pictures are kept beside it as well."""
    figures, kernels = headers(content)
    steps, groups = folder / "steps.png", folder / "kernel_groups.png"
    report_page.step_bars(steps, content["versions"])
    columns = {
        version["name"]: {group: part["ms"] for group, part in content["kernels"][key]["groups"].items()}
        for version, key in zip(content["versions"], ("baseline", "fused"), strict=True)
    }
    report_page.group_bars(groups, columns, content["what"])
    names = " and ".join(version["name"] for version in content["versions"])
    words = [*map(report_page.paragraph, findings(content)), report_page.paragraph(machine(content), small=True)]
    step_parts = [
        report_page.picture(steps, "Time of a step, and times the first one's speed."),
        report_page.table(figures, figure_rows(content)),
    ]
    group_parts = [
        report_page.picture(groups, f"Time that each group of {content['what']} takes in a step."),
        report_page.table(kernels, kernel_rows(content)),
    ]
    sections = [
        ("What changed", words),
        ("The steps", step_parts),
        (f"{content['what'].capitalize()} by group", group_parts),
    ]
    return report_page.page(f"Fusion report: {names}", sections)


def write_report(content: dict, target: pathlib.Path) -> list[pathlib.Path]:
    """Markdown at target, and report.html with its pictures beside it where matplotlib is installed."""
    result_folder(str(target.parent))
    target.write_text(markdown(content), encoding="utf-8")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        progress("no report.html: matplotlib is not installed (pip install '.[plots]')")
        return [target]
    place = target.parent / "report.html"
    place.write_text(html_page(content, target.parent), encoding="utf-8")
    return [target, place]


def generate(options: argparse.Namespace, rest: list[str]) -> None:
    folder = pathlib.Path(options.output_dir) if options.output_dir else pathlib.Path(options.output).parent
    folders = [options.baseline and pathlib.Path(options.baseline), options.fused and pathlib.Path(options.fused)]
    for i, version in enumerate((1, 2)):
        if folders[i] is None:
            folders[i] = folder / f"profile_v{version}"
            profile_version(version, folders[i], rest)
        elif rest:
            raise Failure(2, f"{' '.join(rest)} means nothing where profiles are given")
    content = comparison(*(newest_profile(folder) for folder in folders), options.allow_different)
    target = folder / (pathlib.Path(options.output).name if options.output else "fusion_report.md")
    files = write_report(content, target)
    text = "\n".join([*findings(content), f"wrote {', '.join(map(str, files))}"])
    emit(content, text, options.json)


def main(argv: list[str] | None = None) -> int:
    parser = Parser(
        "generate_fusion_report.py",
        "Report what fusion changed: step, memory and kernels of two profiles.",
        "--baseline ../version1_pytorch_baseline/complete_analysis --fused ./complete_rocm_analysis "
        "--output ./fusion_comparison_report.md",
    )
    parser.add_argument("--baseline", metavar="DIR", help="profile of version 1 (made if not given)")
    parser.add_argument("--fused", metavar="DIR", help="profile of version 2 (made if not given)")
    place = parser.add_mutually_exclusive_group()
    place.add_argument("--output", metavar="FILE", help="the report, Markdown (fusion_report.md)")
    place.add_argument("--output-dir", metavar="DIR", help="folder for the report and all that belongs to it")
    parser.add_argument("--allow-different", action="store_true", help="compare different devices or sizes")
    options, rest = parser.parse_known_args(argv)
    if not options.output and not options.output_dir:
        options.output = "fusion_report.md"
    return run_tool("generate_fusion_report.py", lambda: generate(options, rest))


if __name__ == "__main__":
    sys.exit(main())
