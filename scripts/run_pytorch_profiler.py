#!/usr/bin/env python3
"""Profile a version with PyTorch's profiler, and leave files that people and tools can read.

Trains a few steps with the version's own script and writes into --profile-dir

    trace_*.json            timeline for https://ui.perfetto.dev
    profile_*.json          kernels and groups of the profiled steps, with the figures of the measured ones
    memory_timeline.html    memory in use over time, for any browser
    profiling_report.md     with --generate-report: all of it in tables

Options that are not listed here go to the training script, so its sizes and switches work here as well.
"""

import argparse
import datetime
import json
import math
import pathlib
import shlex
import subprocess
import sys

import kernel_times
from common import report_page
from common.analysis import Parser, markdown_table
from common.command_line import Failure, add_version_option, result_folder, run_tool, version_meant
from common.versions import SCRIPTS

PHASES = {"forward": "#dbe9f6", "backward": "#f6e3d3", "optimizer": "#dff0dc"}


# ---------------------------------------------------------------- profiling


def interpreted_sizes(version: int, options: argparse.Namespace, rest: list[str]) -> list[str]:
    """Sizes that version 3 can be profiled with where its kernels run in Triton's interpreter, if none are given."""
    import torch

    chosen = any(word.startswith(("--preset", "--hidden-dim", "--num-layers")) for word in rest)
    if version != 3 or chosen or torch.cuda.is_available():
        return []
    options.batch_size, options.seq_len = options.batch_size or "2", options.seq_len or "32"
    print("no GPU here: Triton's interpreter is slow, so a very small model is profiled; its times mean nothing")
    return ["--hidden-dim", "64", "--num-layers", "2", "--num-heads", "4"]


def training_command(version: int, folder: pathlib.Path, options: argparse.Namespace, rest: list[str]) -> list[str]:
    sizes = [f"--{name.replace('_', '-')}" for name in ("batch_size", "seq_len", "num_steps")]
    given = [getattr(options, name) for name in ("batch_size", "seq_len", "num_steps")]
    chosen = [
        word for name, value in zip(sizes, given, strict=True) if value is not None for word in (name, str(value))
    ]
    return [
        *(sys.executable, str(SCRIPTS[version]), *chosen, *rest),
        *("--enable-pytorch-profiler", "--profile-memory", "--profile-dir", str(folder)),
        *("--metrics-file", str(folder / f"metrics_v{version}.json")),
    ]


def profile(version: int, options: argparse.Namespace, rest: list[str]) -> dict:
    """Run the training script under PyTorch's profiler; returns what profile_*.json holds."""
    folder = result_folder(options.profile_dir)
    command = training_command(version, folder, options, interpreted_sizes(version, options, rest) + rest)
    before = set(folder.glob(f"trace_v{version}_*.json"))
    status = subprocess.run(command).returncode
    if status:
        raise Failure(status)  # the script has said why
    traces = set(folder.glob(f"trace_v{version}_*.json")) - before
    if not traces:
        raise Failure(1, f"the training script left no trace in {folder}")
    trace = traces.pop()
    kernels = kernel_times.read_kernels(trace)
    metrics = json.loads((folder / f"metrics_v{version}.json").read_text())
    return {
        "version": version,
        "command": [SCRIPTS[version].name, *command[2:]],
        "trace": trace.name,
        "steps_profiled": metrics["options"]["profile_steps"],
        "environment": metrics["environment"],
        "config": metrics["config"],
        "summary": metrics["summary"],
        "kernels": kernel_times.table(kernels),
        "groups": kernel_times.groups(kernels),
    }


# ---------------------------------------------------------------- memory over time


def memory_events(trace: pathlib.Path) -> tuple[str, list[tuple[float, float]], list[tuple[str, float, float]]]:
    """Device, (time in ms, MiB in use) after each allocation and release there, and (phase, start, end) in ms."""
    events = json.loads(trace.read_text(errors="replace"))["traceEvents"]
    memory = [e for e in events if e.get("name") == "[memory]"]
    on_gpu = [e for e in memory if e["args"]["Device Type"] != 0]
    memory = sorted(on_gpu or memory, key=lambda e: e["ts"])
    if not memory:
        raise Failure(1, f"{trace} has no memory events: profile with --profile-memory")
    start = memory[0]["ts"]
    points = [((e["ts"] - start) / 1e3, e["args"]["Total Allocated"] / 2**20) for e in memory]
    phases = [
        (e["name"], (e["ts"] - start) / 1e3, (e["ts"] + e["dur"] - start) / 1e3)
        for e in events
        if e.get("cat") == "user_annotation" and e.get("name") in PHASES
    ]
    return "GPU" if on_gpu else "CPU", points, phases


def thinned(points: list[tuple[float, float]], most: int = 2000) -> list[tuple[float, float]]:
    """At most so many of the points: of each stretch of time the highest, so that no peak is lost."""
    stretch = max(1, -(-len(points) // most))
    return [max(points[i : i + stretch], key=lambda point: point[1]) for i in range(0, len(points), stretch)]


def memory_page(version: int, device: str, points: list[tuple[float, float]], phases: list) -> str:
    """A page with the memory in use over time as one picture; it needs nothing from the network."""
    peak_time, peak = max(points, key=lambda point: point[1])
    counted = "all tensors" if device == "GPU" else "tensors made since the profile began"
    key = " ".join(f'<span style="background:{colour}">&nbsp;{name}&nbsp;</span>' for name, colour in PHASES.items())
    words = (
        f"<p>{device} memory, {counted}: {len(points):,} allocations and releases, peak <b>{peak:,.1f} MiB</b> after "
        f"{peak_time:,.1f} ms.</p><p>{key}</p>"
    )
    return report_page.page(
        f"Memory of version {version}", [("Memory over time", [words, memory_drawing(points, phases)])]
    )


def round_step(span: float) -> float:
    """The smallest of 1, 2, 2.5, 5 times a power of ten of which four reach over the span."""
    power = 10.0 ** math.floor(math.log10(max(span, 1e-9) / 4))
    return next(power * factor for factor in (1, 2, 2.5, 5, 10) if 4 * power * factor >= span * (1 - 1e-9))


def memory_drawing(points: list[tuple[float, float]], phases: list) -> str:
    """The memory in MiB over time in ms as an SVG, its type large enough for a phone."""
    width, height, left, top, bottom = 520, 340, 62, 28, 44
    end, floor = max(t for t, _ in points) or 1.0, min(0.0, min(m for _, m in points))
    rungs = round_step(max(m for _, m in points) - floor)
    most = floor + 4 * rungs

    def x(t: float) -> float:
        return left + (width - left - 8) * min(max(t / end, 0), 1)

    def y(m: float) -> float:
        return top + (height - bottom - top) * (1 - (m - floor) / (most - floor))

    drawing = [
        f'<rect x="{x(a):.1f}" y="{top}" width="{max(0.5, x(b) - x(a)):.1f}" height="{height - bottom - top}" '
        f'fill="{PHASES[name]}"><title>{name}, {b - a:.2f} ms</title></rect>'
        for name, a, b in phases
    ]
    for i in range(5):
        m, t = floor + rungs * i, i * round_step(end)
        drawing.append(f'<text x="{left - 6}" y="{y(m) + 5:.1f}" text-anchor="end">{m:,.4g}</text>')
        drawing.append(f'<path d="M{left} {y(m):.1f}H{width - 8}" stroke="#ccc"/>')
        if t <= 0.97 * end:
            drawing.append(f'<text x="{x(t):.1f}" y="{height - bottom + 18}" text-anchor="middle">{t:,.4g}</text>')
    line = "".join(f"H{x(t):.1f}V{y(m):.1f}" for t, m in thinned(points))
    at, peak = max(points, key=lambda point: point[1])
    drawing += [
        f'<path d="M{x(0):.1f} {y(points[0][1]):.1f}{line}" fill="none" stroke="#1f4e9c" stroke-width="1.5"/>',
        f'<circle cx="{x(at):.1f}" cy="{y(peak):.1f}" r="4" fill="#c0392b"/>',
        f'<text x="{left - 6}" y="14" text-anchor="end">MiB</text>',
        f'<text x="{width - 8}" y="{height - 6}" text-anchor="end">ms since the profile began</text>',
    ]
    frame = f'viewBox="0 0 {width} {height}" role="img" aria-label="memory in MiB over time in ms"'
    return f'<svg {frame} style="width:100%;font-size:14px">\n' + "\n".join(drawing) + "\n</svg>"


# ---------------------------------------------------------------- reports


def figures(content: dict) -> list[str]:
    """The part of a report that says what ran where, and how fast without the profiler."""
    summary, environment = content["summary"], content["environment"]
    step, where = summary["step_ms"], [environment["device"], f"PyTorch {environment['torch']}"]
    where += [f"Triton {environment['triton']}"] * bool(environment["triton"]) + [environment["date"]]
    rows = [["step, median (quartiles)", f"{step['median']:.3f} ms ({step['p25']:.3f} to {step['p75']:.3f})"]]
    for name in ("forward", "backward", "optimizer"):
        time = summary[f"{name}_ms"]
        rows.append([name, "not measured" if time is None else f"{time:.3f} ms"])
    rows.append(["tokens a second", f"{summary['tokens_per_second']:,.0f}"])
    rows.append(["peak memory", f"{summary['peak_memory_mb']:,.1f} MB"])
    rows.append(["compute", f"{summary['tflops']:.3f} TFLOP/s"])
    return [
        *(f"# Profile of version {content['version']}", "", ", ".join(where), ""),
        *(f"    python {shlex.join(content['command'])}", "", "## The steps without the profiler", ""),
        markdown_table(["figure", "measured"], rows),
    ]


def report(content: dict) -> str:
    """What was profiled and measured, as Markdown."""
    steps = content["steps_profiled"]
    on_cpu = content["kernels"][0]["kind"] == "operator"
    what = "operators (time in themselves)" if on_cpu else "kernels"

    def cells(row: dict) -> list[str]:
        return [f"{row['calls'] / steps:,.0f}", f"{row['total_us'] / 1e3 / steps:,.3f}"]

    kernels = [
        [f"`{kernel_times.short(row['kernel'], 70)}`", row["group"], *cells(row), f"{row['mean_us']:,.1f}"]
        for row in content["kernels"][:20]
    ]
    groups = [[row["group"], *cells(row), f"{row['share_percent']:.1f}"] for row in content["groups"]]
    lines = [
        *(*figures(content), "", f"## Groups of {what} in {steps} profiled steps", ""),
        markdown_table(["group", "calls a step", "ms a step", "%"], groups),
        *("", f"## The longest {what}", ""),
        markdown_table(["name", "group", "calls a step", "ms a step", "mean us"], kernels, left=2),
        *("", f"Timeline: open `{content['trace']}` in https://ui.perfetto.dev."),
        "Memory over time: open `memory_timeline.html` in a browser.",
    ]
    return "\n".join(lines) + "\n"


def write_results(content: dict, folder: pathlib.Path, with_report: bool) -> None:
    version = content["version"]
    moment = datetime.datetime.now().strftime("%Y%m%d_%H%M%S")
    table = folder / f"profile_v{version}_{moment}.json"
    files = {table: json.dumps(content, indent=1) + "\n"}
    files[folder / "memory_timeline.html"] = memory_page(version, *memory_events(folder / content["trace"]))
    if with_report:
        files[folder / "profiling_report.md"] = report(content)
    for path, text in files.items():
        path.write_text(text, encoding="utf-8")
    print("\n" + kernel_times.as_text(kernel_times.read_kernels(table), 15))
    print(f"\nwrote {', '.join(str(path) for path in files)}")
    print(f"open {folder / content['trace']} in https://ui.perfetto.dev")


# ---------------------------------------------------------------- earlier results


def existing(path: pathlib.Path) -> pathlib.Path:
    """The path itself; for a pattern that the shell found nothing for, the folder, whose newest trace is then read."""
    if not path.exists() and "*" in path.name and path.parent.is_dir():
        print(f"there is no {path}: reading {path.parent}")
        return path.parent
    return path


def analyze(paths: list[str], options: argparse.Namespace) -> None:
    """Print the table of each file or folder of an earlier profile, and write the reports that were asked for."""
    for path in dict.fromkeys(existing(pathlib.Path(path)) for path in paths):
        kernels = kernel_times.read_kernels(path)
        print(f"{', '.join(map(str, kernel_times.files_of(path)))}:")
        print(kernel_times.as_text(kernels, 15) + "\n")
        if options.generate_report:
            target = path / "profiling_report.md" if path.is_dir() else path.with_name("profiling_report.md")
            target.write_text(report(profile_of(path)))
            print(f"wrote {target}")


def profile_of(path: pathlib.Path) -> dict:
    """The content of a profile_*.json, which alone has what a report needs."""
    files = [path] if path.is_file() else sorted(path.glob("profile_*.json"))
    if files:
        content = json.loads(files[-1].read_text())
        if isinstance(content, dict) and "summary" in content:
            return content
    raise Failure(2, f"{path} is not a profile_*.json of this tool, which alone has what a report needs")


# ---------------------------------------------------------------- main


def parse_options(argv: list[str] | None) -> tuple[argparse.Namespace, list[str]]:
    parser = Parser(
        "run_pytorch_profiler.py",
        "Profile a version with PyTorch's profiler, or read earlier profiles.",
        "--batch-size 8 --profile-dir ./fusion_analysis --generate-report; options that are not listed go to the "
        "training script",
        with_json=False,  # its profile_*.json is always written
    )
    parser.add_argument("--batch-size", metavar="B", help="sequences in a step (8)")
    parser.add_argument("--seq-len", metavar="T", help="tokens in a sequence (256)")
    parser.add_argument("--num-steps", default="5", metavar="N", help="measured steps before the profile (%(default)s)")
    parser.add_argument("--profile-dir", default="pytorch_profiles", metavar="DIR", help="results (%(default)s)")
    parser.add_argument("--generate-report", action="store_true", help="write profiling_report.md as well")
    parser.add_argument("--analyze-existing", nargs="+", metavar="FILE", help="read profiles instead of making one")
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
            content = profile(version_meant(options.version), options, rest)
            write_results(content, pathlib.Path(options.profile_dir), options.generate_report)

    return run_tool("run_pytorch_profiler.py", work)


if __name__ == "__main__":
    sys.exit(main())
