#!/usr/bin/env python3
"""Profile a version with PyTorch's profiler, and leave files that people and tools can read.

Trains a few steps with the version's own script and writes into --profile-dir

    trace_*.json            timeline for https://ui.perfetto.dev
    profile_*.json          kernels and groups of the profiled steps, with the results of the measured ones
    memory_timeline.html    memory in use over time, for any browser
    profiling_report.md     with --generate-report: all of it in tables

--analyze-existing reads traces that are there already, and leaves the last three beside them as far as they can tell.
Options that are not listed here go to the training script: its sizes and switches work here as well.
"""

import argparse
import datetime
import json
import pathlib
import shlex
import subprocess
import sys

from common import report as pages
from common.command_line import (
    Failure,
    Parser,
    add_version_option,
    progress,
    result_folder,
    run_tool,
    version_meant,
    with_sizes,
)
from common.profiles import (
    HOST,
    INTERPRETED,
    PHASES,
    Profile,
    files_of,
    group_table,
    kernel_table,
    kernel_text,
    read_file,
    read_profile,
    short,
)
from common.tables import markdown_table, rounded
from common.versions import SCRIPTS

# ---------------------------------------------------------------- profiling


def training_command(version: int, folder: pathlib.Path, options: argparse.Namespace, rest: list[str]) -> list[str]:
    """Return the command that trains and profiles; version 3 is small where its kernels are interpreted."""
    sized = with_sizes(rest) if version == 3 else rest
    if sized != rest:
        progress("no GPU here: Triton's interpreter is slow, and a very small model is profiled instead")
    for name in ("batch_size", "seq_len", "num_steps"):
        if getattr(options, name) is not None:
            sized = [*sized, f"--{name.replace('_', '-')}", getattr(options, name)]
    return [
        *(sys.executable, str(SCRIPTS[version]), *sized),
        *("--enable-pytorch-profiler", "--profile-memory", "--profile-dir", str(folder)),
        *("--metrics-file", str(folder / f"metrics_v{version}.json")),
    ]


def profile(version: int, options: argparse.Namespace, rest: list[str]) -> tuple[dict, Profile]:
    """Run the training script under PyTorch's profiler; return what profile_*.json holds, and the trace."""
    folder = result_folder(options.profile_dir)
    command = training_command(version, folder, options, rest)
    before = set(folder.glob(f"trace_v{version}_*.json"))
    status = subprocess.run(command).returncode
    if status:
        raise Failure(status)  # the script has said why
    traces = set(folder.glob(f"trace_v{version}_*.json")) - before
    if not traces:
        raise Failure(1, f"the training script left no trace in {folder}")
    trace = read_profile(traces.pop())
    metrics = json.loads((folder / f"metrics_v{version}.json").read_text())
    content = {"command": [SCRIPTS[version].name, *command[2:]]}
    content |= {key: metrics[key] for key in ("environment", "config", "options", "summary")}
    return content_of(trace) | content, trace


def content_of(trace: Profile) -> dict:
    """Return the part of profile_*.json that a trace alone can tell."""
    content = {"version": trace.metadata.get("version"), "trace": trace.path.name, "steps_profiled": trace.steps}
    content |= {"device": trace.device, "metadata": trace.metadata}
    return content | {"kernels": kernel_table(trace.calls), "groups": group_table(trace.calls)}


# ---------------------------------------------------------------- memory over time


def memory_page(trace: Profile) -> str | None:
    """Return a page with the memory in use over time, or None if the trace has no memory events."""
    if not trace.memory:
        return None
    start, on_gpu = trace.memory[0]["ts"], trace.memory[0]["args"]["Device Type"] != 0
    points = [((e["ts"] - start) / 1e3, e["args"]["Total Allocated"] / 2**20) for e in trace.memory]
    peak_time, peak = max(points, key=lambda point: point[1])
    phases = [(name, (begin - start) / 1e3, (end - start) / 1e3) for name, begin, end in trace.phases]
    chart = pages.memory_over_time(points, phases, f"Memory over time. Shaded: {', '.join(PHASES)} of each step.")
    facts = [("device", trace.device or "CPU"), ("profile", trace.title)]
    counted = "all tensors" if on_gpu else "tensors made since the profile began"
    notice = [
        f"Peak {peak:,.1f} MiB after {rounded(peak_time)} ms, {len(points):,} allocations and releases: {counted}."
    ]
    return pages.page("Memory over time", facts, notice, [("Memory", [chart])])


# ---------------------------------------------------------------- reports


def measured(content: dict) -> list[str]:
    """Return the part of a report that says what ran where, and how fast without the profiler."""
    summary, environment = content["summary"], content["environment"]
    step, where = summary["step_ms"], [environment["device"], f"PyTorch {environment['torch']}"]
    where += [f"Triton {environment['triton']}"] * bool(environment["triton"]) + [environment["date"]]
    quartiles = f"{rounded(step['p25'])} to {rounded(step['p75'])}"
    rows = [["step, median (quartiles)", f"{rounded(step['median'])} ms ({quartiles})"]]
    for name in PHASES:
        time = summary[f"{name}_ms"]
        rows.append([name, "not measured" if time is None else f"{rounded(time)} ms"])
    rows.append(["tokens per second", f"{summary['tokens_per_second']:,.0f}"])
    rows.append(["peak memory", f"{summary['peak_memory_mb']:,.0f} MB"])
    rows.append(["compute", f"{rounded(summary['tflops'])} TFLOP/s"])
    lines = ["", ", ".join(where), "", f"    python {shlex.join(content['command'])}", ""]
    return [*lines, "## The steps without the profiler", "", markdown_table(["", "measured"], rows)]


def report(content: dict) -> str:
    """Return what was profiled and measured, as Markdown."""
    steps, kind = content["steps_profiled"] or 1, content["kernels"][0]["kind"]
    what = "operators" if kind in HOST else "kernels"

    def cells(row: dict) -> list[str]:
        return [f"{row['calls'] / steps:,.0f}", rounded(row["total_us"] / 1e3 / steps)]

    kernels = [
        [f"`{short(row['kernel'], 70)}`", row["group"], *cells(row), rounded(row["mean_us"])]
        for row in content["kernels"][:20]
    ]
    groups = [[row["group"], *cells(row), f"{row['share_percent']:.1f}"] for row in content["groups"]]
    lines = [
        f"# Profile of version {content['version']}",
        *(measured(content) if "summary" in content else []),
        *("", f"## Groups of {what} in {steps} profiled steps", "", *[INTERPRETED, ""] * (kind == "interpreted")),
        markdown_table(["group", "calls per step", "ms per step", "%"], groups),
        *("", f"## The longest {what}", ""),
        markdown_table(["name", "group", "calls per step", "ms per step", "mean us"], kernels, left=2),
        *("", f"Timeline: open `{content['trace']}` in https://ui.perfetto.dev."),
    ]
    return "\n".join(lines) + "\n"


def write_results(content: dict, trace: Profile, folder: pathlib.Path, with_report: bool) -> None:
    """Write profile_*.json, memory_timeline.html and, if wanted, the report; say what was written."""
    moment = datetime.datetime.now().strftime("%Y%m%d_%H%M%S")
    files = {folder / f"profile_v{content['version']}_{moment}.json": json.dumps(content, indent=1) + "\n"}
    page = memory_page(trace)
    if page:
        files[folder / "memory_timeline.html"] = page
    if with_report:
        files[folder / "profiling_report.md"] = report(content)
    for path, text in files.items():
        path.write_text(text, encoding="utf-8")
    print(f"\n{trace.title}\n{kernel_text(trace.calls, 15)}\n\nwrote {', '.join(map(str, files))}")
    if not page:
        print("no memory_timeline.html: the trace has no memory events, record them with --profile-memory")
    print(f"open {trace.path} in https://ui.perfetto.dev")


# ---------------------------------------------------------------- earlier results


def analyze(names: list[str], options: argparse.Namespace) -> None:
    """Print the table of each earlier profile, and leave what is missing beside a trace."""
    for name in dict.fromkeys(names):
        path = pathlib.Path(name)
        if not path.exists() and "*" in path.name and path.parent.is_dir():  # the shell found nothing for the pattern
            print(f"there is no {path}: reading the newest trace in {path.parent}")
            path = path.parent
        found = read_file(path) if path.is_file() else read_profile(path)
        if found.metadata:
            write_results(content_of(found), found, found.path.parent, options.generate_report)
            continue
        print(f"{', '.join(map(str, files_of(path, traces_first=True)))}:\n{kernel_text(found.calls, 15)}\n")
        if options.generate_report:
            content = json.loads(path.read_text()) if path.suffix == ".json" else {}
            if "steps_profiled" not in content:
                raise Failure(2, f"{path} is neither a profile_*.json of this tool nor a trace of a training script")
            target = path.with_name("profiling_report.md")
            target.write_text(report(content))
            print(f"wrote {target}")


# ---------------------------------------------------------------- main


def parse_options(argv: list[str] | None) -> tuple[argparse.Namespace, list[str]]:
    parser = Parser(
        "run_pytorch_profiler.py",
        "Profile a version with PyTorch's profiler, or read earlier profiles.",
        "--batch-size 8 --profile-dir ./fusion_analysis --generate-report; options that are not listed go to the "
        "training script",
        with_json=False,  # its profile_*.json is always written
    )
    add = parser.add_argument
    add("--batch-size", metavar="B", help="sequences per step (8)")
    add("--seq-len", metavar="T", help="tokens per sequence (256)")
    add("--num-steps", default="5", metavar="N", help="measured steps before the profile (%(default)s)")
    add("--profile-dir", default="pytorch_profiles", metavar="DIR", help="results (%(default)s)")
    add("--generate-report", action="store_true", help="write profiling_report.md as well")
    add("--analyze-existing", nargs="+", metavar="FILE", help="read profiles instead of making one")
    add_version_option(parser)
    return parser.parse_known_args(argv)


def main(argv: list[str] | None = None) -> int:
    options, rest = parse_options(argv)

    def work() -> None:
        if options.analyze_existing and rest:
            raise Failure(2, f"{' '.join(rest)} means nothing with --analyze-existing")
        if options.analyze_existing:
            analyze(options.analyze_existing, options)
        else:
            results = profile(version_meant(options.version), options, rest)
            write_results(*results, pathlib.Path(options.profile_dir), options.generate_report)

    return run_tool("run_pytorch_profiler.py", work)


if __name__ == "__main__":
    sys.exit(main())
