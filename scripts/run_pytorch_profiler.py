#!/usr/bin/env python3
"""Profile a version with PyTorch's profiler, and write the timeline, tables and the memory in use over time.

example: python run_pytorch_profiler.py --batch-size 8 --profile-dir ./fusion_analysis --generate-report

Trains a few steps with the version's own script and writes into --profile-dir

    trace_*.json            timeline for https://ui.perfetto.dev
    profile_*.json          kernels and groups of the profiled steps, and the measured steps' results
    memory_timeline.html    memory in use over time, for any browser
    profiling_report.md     with --generate-report: all of it in tables

--analyze-existing reads traces instead, and writes the last three files next to each of them. Its report has the step
times without the profiler only if the run's profile_*.json is there too. Options that aren't listed here go to the
training script, after --num-steps 5 and, without a --preset, --batch-size 8 --seq-len 128.
"""

import json
import os
import pathlib
import shlex
import subprocess
import sys

from common import report
from common.command_line import (
    Failure,
    Parser,
    add_version_option,
    progress,
    trace_folder,
    version_meant,
    with_first_batch,
    with_sizes,
)
from common.files import errors_of, read_object
from common.machine.description import without_folders
from common.profiles import INTERPRETED, group_table, kernel_table, kernel_text, read_profile, short
from common.step_parts import PHASES
from common.tables import columns, rounded, write_whole
from common.versions import SCRIPTS

GROUP_COLUMNS = "group: {group} | calls per step: {calls:,.0f} | ms per step: {ms:r} | %: {share_percent:.1f}"
KERNEL_COLUMNS = (
    "name: `{name}` | group: {group} | calls per step: {calls:,.0f} | ms per step: {ms:r} | mean us: {mean_us:r}"
)


def profile(version, folder, rest):
    """Run the training script under PyTorch's profiler; return the trace, and the metrics with the command."""
    folder = trace_folder(folder)
    options = with_sizes(rest) if version == 3 else rest
    if options != rest:
        progress("no GPU here: Triton's interpreter is slow, so a very small model is profiled instead")
    options = with_first_batch(options)
    metrics_file = folder / f"metrics_v{version}.json"
    arguments = ["--num-steps", "5", *options, "--enable-pytorch-profiler", "--profile-memory"]
    arguments += ["--profile-dir", str(folder), "--metrics-file", str(metrics_file)]
    before = set(folder.glob(f"trace_v{version}_*.json"))
    quiet = {"KINETO_LOG_LEVEL": "6", "TORCH_CPP_LOG_LEVEL": "ERROR"}  # else PyTorch prints what looks like errors
    status = subprocess.run([sys.executable, str(SCRIPTS[version]), *arguments], env=quiet | os.environ).returncode
    if status != 0:
        raise Failure(status)  # the script has said why
    (trace,) = set(folder.glob(f"trace_v{version}_*.json")) - before
    metrics = json.loads(metrics_file.read_text())
    metrics["command"] = [SCRIPTS[version].name, *without_folders(arguments)]
    return read_profile(trace), metrics


# ---------------------------------------------------------------- files


def memory_timeline(trace):
    """Return an HTML page with the memory in use over time."""
    start_us = trace.memory[0]["ts"]
    points = []  # (ms, MiB)
    for event in trace.memory:
        points.append(((event["ts"] - start_us) / 1e3, event["args"]["Total Allocated"] / 2**20))
    phases = [(name, (begin - start_us) / 1e3, (end - start_us) / 1e3) for name, begin, end in trace.phases]
    chart = report.memory_over_time(points, phases, f"Memory over time. Shaded: {', '.join(PHASES)} of each step.")
    facts = [("device", trace.device or "CPU"), ("profile", trace.title)]
    on_gpu = trace.memory[0]["args"]["Device Type"] != 0
    counted = "all tensors" if on_gpu else "tensors made since the profile began"
    peak_ms, peak = max(points, key=lambda point: point[1])
    notice = f"Peak {peak:,.1f} MiB after {rounded(peak_ms)} ms, {len(points):,} allocations and releases: {counted}."
    return report.page("Memory over time", facts, [notice], [("Memory", [chart])])


def per_step(rows, steps):
    """Return rows of kernels or groups with their calls and milliseconds per step."""
    return [row | {"calls": row["calls"] / steps, "ms": row["total_us"] / 1e3 / steps} for row in rows]


def profiling_report(content, trace):
    """Return the results of the measured steps and the profiled kernels as Markdown."""
    facts = [("profile", trace.title)]
    sections = []
    if "summary" in content:
        row = report.row_of("measured", content)
        facts += [*report.facts_of(row), ("command", f"python {shlex.join(content['command'])}")]
        table = report.table(["", "measured"], report.result_lines([row]))
        sections.append(("The steps without the profiler", [table]))
    steps = trace.steps or 1
    warning = [report.text(INTERPRETED)] if trace.interpreted else []
    groups = report.table(*columns(GROUP_COLUMNS, per_step(content["groups"], steps)))
    sections.append((f"Groups of {trace.unit} in {steps} profiled steps", [*warning, groups]))
    longest = [row | {"name": short(row["kernel"], 70)} for row in content["kernels"][:20]]
    kernels = report.table(*columns(KERNEL_COLUMNS, per_step(longest, steps)))
    timeline = report.text(f"Timeline: open `{content['trace']}` in Perfetto, ui.perfetto.dev.")
    sections.append((f"The longest {trace.unit}", [*warning, kernels, timeline]))
    return report.markdown(f"Profile of version {content['version']}", facts, [], sections)


def write_results(trace, with_report, metrics=None):
    """Write profile_*.json and the other results next to a trace, and print the longest kernels.

    metrics: the results of the measured steps; None keeps those in the profile_*.json of an earlier call.
    """
    if not trace.metadata:
        raise Failure(2, f"{trace.path} isn't a trace of versions 1 to 4: read it with kernel_times.py")
    target = trace.path.with_name(f"profile_{trace.path.name.split('.')[0].removeprefix('trace_')}.json")
    content = {}
    if metrics:
        content = metrics
    elif target.exists():
        with errors_of(target):
            content = read_object(target, "profile_v*.json")
    content |= {
        "version": trace.metadata["version"],
        "trace": trace.path.name,
        "steps_profiled": trace.steps,
        "device": trace.device,
        "metadata": trace.metadata,
        "kernels": kernel_table(trace.calls),
        "groups": group_table(trace.calls),
    }
    files = {target: json.dumps(content, indent=1) + "\n"}
    if trace.memory:
        files[target.with_name("memory_timeline.html")] = memory_timeline(trace)
    if with_report:
        with errors_of(target):  # an earlier profile_*.json may lack what the report shows
            files[target.with_name("profiling_report.md")] = profiling_report(content, trace)
    for file, text in files.items():
        write_whole(file, text)
    print(f"\n{trace.title}\n{kernel_text(trace, 15)}\n\nwrote {', '.join(map(str, files))}")
    if not trace.memory:
        print("no memory_timeline.html: the trace has no memory events, which --profile-memory records")
    print(f"open {trace.path} in https://ui.perfetto.dev")


def run(options, rest):
    if not options.analyze_existing:
        trace, metrics = profile(version_meant(options.version), options.profile_dir, rest)
        write_results(trace, options.generate_report, metrics)
        return
    if rest:
        raise Failure(2, f"{' '.join(rest)} has no effect with --analyze-existing: leave it out")
    for name in options.analyze_existing:
        path = pathlib.Path(name)
        if not path.exists() and "*" in path.name:  # the shell found nothing for the pattern
            print(f"there is no {path}: reading the newest trace in {path.parent}")
            path = path.parent
        write_results(read_profile(path), options.generate_report)


def main(argv=None):
    parser = Parser("run_pytorch_profiler.py", __doc__, with_json=False)  # its profile_*.json is always written
    add = parser.add_argument
    add("--profile-dir", default="pytorch_profiles", metavar="DIR", help="results (%(default)s)")
    add("--generate-report", action="store_true", help="write profiling_report.md as well")
    words = "read profiles instead of making one"
    add("--analyze-existing", nargs="+", action="extend", default=[], metavar="FILE", help=words)
    add_version_option(parser)
    return parser.run(run, argv, passes_on=True)


if __name__ == "__main__":
    sys.exit(main())
