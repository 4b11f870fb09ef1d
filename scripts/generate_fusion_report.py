#!/usr/bin/env python3
"""Report what fusion changed: step, memory and kernels of two profiles side by side.

Reads two folders of run_pytorch_profiler.py or run_all_profilers.sh (results and a trace each); without them versions 1
and 2 are profiled first, with options that are not listed here. Writes Markdown, and beside it report.html with the
same tables and charts of the steps and of their kernels.

Exit status: 0 written; 1 where profiling fails; 2 for bad input.
"""

import argparse
import json
import pathlib
import subprocess
import sys

from common import report as pages
from common.command_line import Failure, Parser, progress, result_folder, run_tool, with_sizes
from common.profiles import (
    INTERPRETED,
    PHASES,
    compare_counts,
    count_cells,
    counts_per_step,
    read_pair,
    steps_needed,
    unlike,
)
from common.tables import emit, known, markdown_table, rounded
from common.versions import REPOSITORY


def newest_profile(folder: pathlib.Path) -> dict:
    """Return the newest profile_*.json of run_pytorch_profiler.py below a folder."""
    if not folder.is_dir():
        raise Failure(2, f"{folder} is no folder: give what run_pytorch_profiler.py left with --profile-dir")
    files = sorted(folder.rglob("profile_v*.json"), key=lambda file: file.stat().st_mtime)
    if not files:
        raise Failure(
            2, f"{folder} holds no profile_v*.json: profile with run_pytorch_profiler.py --profile-dir {folder}"
        )
    try:
        content = json.loads(files[-1].read_text(encoding="utf-8"))
        content["trace_file"] = str(files[-1].parent / content["trace"])
        content["summary"]["step_ms"]["median"]
    except (ValueError, KeyError, TypeError):
        raise Failure(2, f"{files[-1]} is no profile of run_pytorch_profiler.py, or it is damaged") from None
    return content


def profile_version(version: int, folder: pathlib.Path, rest: list[str]) -> None:
    """Leave a profile of that version in the folder."""
    progress(f"{version} of 2: profiling version {version} ...")
    tool = REPOSITORY / "scripts" / "run_pytorch_profiler.py"
    command = [sys.executable, str(tool), "--version", str(version), "--profile-dir", str(folder), *with_sizes(rest)]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        words = (result.stderr or result.stdout).strip().splitlines()[-1:]
        raise Failure(result.returncode, f"version {version} was not profiled: {' '.join(words)}")


def comparison(baseline: dict, fused: dict, allow_different: bool) -> dict:
    """Return results and kernels of both; Failure where device, sizes or precision differ."""
    both = (baseline, fused)
    heads = [{**one["config"], "device": one["environment"]["device"]} for one in both]
    heads = [
        head | {"precision": one["summary"]["precision"], "FLOPs per step": one["summary"]["flops_per_step"]}
        for head, one in zip(heads, both, strict=True)
    ]
    found = unlike(*heads)
    if found and not allow_different:
        raise Failure(2, f"the profiles are unlike ({'; '.join(found)}): profile alike, or add --allow-different")
    steps = tuple(one["steps_profiled"] for one in both)
    profiles = read_pair(*(one["trace_file"] for one in both), steps, allow_different)
    kernels = compare_counts(*(counts_per_step(profile, steps_needed(profile)) for profile in profiles))
    keys = ("step_ms", *(f"{name}_ms" for name in PHASES), "tokens_per_second", "peak_memory_mb", "tflops")
    versions = [
        {"name": f"version {one['version']}", "environment": one["environment"], "config": one["config"]}
        | {key: one["summary"][key] for key in (*keys, "parameters", "parameters_trained", "precision")}
        | {"trace": one["trace_file"], "batch": [one["metadata"][key] for key in ("batch_size", "seq_len")]}
        for one in both
    ]
    interpreted = any(profile.interpreted for profile in profiles)
    content = {"versions": versions, "kernels": kernels, "what": profiles[0].what, "differences": found}
    return content | {"interpreted": interpreted}


def result_rows(content: dict) -> list[list[str]]:
    versions = content["versions"]

    def row(name: str, values: list) -> list[str]:
        ratio = values[0] / values[1] if None not in values and values[1] else None
        return [name, *map(rounded, values), known(ratio, ".2f")]

    rows = [row("step, median ms", [v["step_ms"]["median"] for v in versions])]
    quartiles = [f"{rounded(v['step_ms']['p25'])} - {rounded(v['step_ms']['p75'])}" for v in versions]
    rows.append(["step, quartiles ms", *quartiles, ""])
    rows += [row(f"{name} ms", [v[f"{name}_ms"] for v in versions]) for name in PHASES]
    rows.append(row("peak memory MB", [v["peak_memory_mb"] for v in versions]))
    rows.append(row("TFLOP/s", [v["tflops"] for v in versions]))
    trained = [f"{v['parameters_trained'] / v['parameters']:.0%}" for v in versions]
    return [*rows, ["parameters trained", *trained, ""]]


def findings(content: dict) -> list[str]:
    """Return what to notice, in sentences made of the results."""
    first, second = content["versions"]
    whole, a, b = content["kernels"]["rows"][-1], first["step_ms"], second["step_ms"]
    apart = b["p75"] < a["p25"] or a["p75"] < b["p25"]
    ratio, sure = a["median"] / b["median"], "" if apart else ", but the quartiles overlap"
    lines = [
        f"{second['name'].capitalize()} takes {rounded(b['median'])} ms per step, {first['name']} "
        f"{rounded(a['median'])} ms: {ratio:.2f}x{sure}. "
        f"{whole['baseline_calls']:,.0f} {content['what']} per step became {whole['fused_calls']:,.0f}."
    ]
    for version in content["versions"]:
        if version["parameters_trained"] != version["parameters"]:
            lines.append(f"{version['name'].capitalize()} does not train every parameter: its speed means nothing.")
    lines += [INTERPRETED] * content["interpreted"]
    return lines + [f"The profiles differ in {difference}." for difference in content["differences"]]


def facts(content: dict) -> list[tuple[str, str]]:
    """Return device, sizes, precision and traces."""
    last = content["versions"][1]
    batch = f"{last['batch'][0]} sequences of {last['batch'][1]} tokens"
    return [
        ("device", last["environment"]["device"]),
        ("sizes", f"{pages.model_sizes(last['config'])}, {batch}"),
        ("precision", last["precision"]),
        ("software", f"PyTorch {last['environment']['torch']}, {last['environment']['date']}"),
        *((f"{version['name']}", version["trace"]) for version in content["versions"]),
    ]


def write_report(content: dict, target: pathlib.Path) -> list[pathlib.Path]:
    """Write Markdown at target, and report.html beside it."""
    result_folder(target.parent, "--output-dir")
    names, what = [version["name"] for version in content["versions"]], content["what"]
    title = f"Fusion report: {' and '.join(names)}"
    steps = (["", *names, "first / second"], result_rows(content))
    header = [f"{what} per step", *names, "fewer", *(f"ms, {name}" for name in names)]
    groups = (header, count_cells(content["kernels"]["rows"]))
    lines = [f"# {title}", "", *(f"- {name}: {value}" for name, value in facts(content)), "", *findings(content), ""]
    lines += ["## The steps", "", markdown_table(*steps), "", f"## {what.capitalize()} by group", ""]
    target.write_text("\n".join([*lines, markdown_table(*groups), ""]), encoding="utf-8")
    columns = {
        name: {group: part["ms"] for group, part in content["kernels"][key]["groups"].items()}
        for name, key in zip(names, ("baseline", "fused"), strict=True)
    }
    bars = pages.step_bars(content["versions"], "Time per step with its quartiles, and the first one's over it.")
    stacks = pages.group_bars(columns, f"Time of each group of {what} per step.")
    sections = [("The steps", [bars, pages.table(*steps)])]
    sections.append((f"{what.capitalize()} by group", [stacks, pages.table(*groups)]))
    place = target.parent / "report.html"
    place.write_text(pages.page(title, facts(content), findings(content), sections), encoding="utf-8")
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
    emit(content, "\n".join([*findings(content), f"wrote {', '.join(map(str, files))}"]), options.json)


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
