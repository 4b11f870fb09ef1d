#!/usr/bin/env python3
"""Profile a version with PyTorch's profiler, and leave files that people and tools can read.

example: python run_pytorch_profiler.py --batch-size 8 --profile-dir ./fusion_analysis --generate-report

Trains a few steps with the version's own script (options that are not listed go to it) and writes into --profile-dir

    trace_*.json            timeline for https://ui.perfetto.dev
    profile_*.json          kernels and groups of the profiled steps, with the results of the measured ones
    memory_timeline.html    memory in use over time, for any browser
    profiling_report.md     with --generate-report: all of it in tables

--analyze-existing writes the last three beside traces that are there already, as far as they can tell.
"""

import json
import pathlib
import shlex
import subprocess
import sys

from common import report as pages
from common.command_line import Failure, Parser, add_version_option, progress, result_folder, version_meant, with_sizes
from common.profiles import (
    INTERPRETED,
    PHASES,
    errors_of,
    group_table,
    kernel_table,
    kernel_text,
    read_object,
    read_profile,
    short,
)
from common.tables import columns, rounded
from common.versions import SCRIPTS

PER_STEP = "group: {group} | calls per step: {calls:,.0f} | ms per step: {ms:r}"


def profile(version, folder, rest):
    """Run the training script under PyTorch's profiler; return the trace, and the metrics with the command."""
    folder = result_folder(folder)
    sized = with_sizes(rest) if version == 3 else rest
    if sized != rest:
        progress("no GPU here: Triton's interpreter is slow, and a very small model is profiled instead")
    command = [str(SCRIPTS[version]), "--num-steps", "5", *sized, "--enable-pytorch-profiler", "--profile-memory"]
    metrics_file = folder / f"metrics_v{version}.json"
    before = set(folder.glob(f"trace_v{version}_*.json"))
    command += ["--profile-dir", str(folder), "--metrics-file", str(metrics_file)]
    if status := subprocess.run([sys.executable, *command]).returncode:
        raise Failure(status)  # the script has said why
    (trace,) = set(folder.glob(f"trace_v{version}_*.json")) - before
    metrics = json.loads(metrics_file.read_text()) | {"command": [SCRIPTS[version].name, *command[1:]]}
    return read_profile(trace), metrics


# ---------------------------------------------------------------- pages


def memory_page(trace):
    """Return a page with the memory in use over time."""
    start, on_gpu = trace.memory[0]["ts"], trace.memory[0]["args"]["Device Type"] != 0
    points = [((e["ts"] - start) / 1e3, e["args"]["Total Allocated"] / 2**20) for e in trace.memory]
    peak_time, peak = max(points, key=lambda point: point[1])
    phases = [(name, (begin - start) / 1e3, (end - start) / 1e3) for name, begin, end in trace.phases]
    chart = pages.memory_over_time(points, phases, f"Memory over time. Shaded: {', '.join(PHASES)} of each step.")
    facts = [("device", trace.device or "CPU"), ("profile", trace.title)]
    counted = "all tensors" if on_gpu else "tensors made since the profile began"
    found = f"Peak {peak:,.1f} MiB after {rounded(peak_time)} ms, {len(points):,} allocations and releases: {counted}."
    return pages.page("Memory over time", facts, [found], [("Memory", [chart])])


def report(content, trace):
    """Return what was profiled and measured, as Markdown."""
    facts = [("profile", trace.title)]
    sections = []
    steps = trace.steps or 1
    if "summary" in content:
        row = pages.row_of("measured", content)
        facts += [*pages.facts_of(row), ("command", f"python {shlex.join(content['command'])}")]
        results = pages.table(["", "measured"], pages.result_lines([row]))
        sections.append(("The steps without the profiler", [results]))

    def table(template, rows):
        rows = [row | {"calls": row["calls"] / steps, "ms": row["total_us"] / 1e3 / steps} for row in rows]
        found = pages.table(*columns(template, rows))
        return [pages.text(INTERPRETED), found] if trace.interpreted else [found]

    kernels = [row | {"name": short(row["kernel"], 70)} for row in content["kernels"][:20]]
    per_group = table(f"{PER_STEP} | %: {{share_percent:.1f}}", content["groups"])
    per_kernel = table(f"name: `{{name}}` | {PER_STEP} | mean us: {{mean_us:r}}", kernels)
    timeline = pages.text(f"Timeline: open `{content['trace']}` in https://ui.perfetto.dev.")
    sections.append((f"Groups of {trace.what} in {steps} profiled steps", per_group))
    sections.append((f"The longest {trace.what}", [*per_kernel, timeline]))
    return pages.markdown(f"Profile of version {content['version']}", facts, [], sections)


def write_results(trace, with_report, metrics=None):
    """Write profile_*.json (without metrics, with those of an earlier one) and the pages beside a trace; print them."""
    if not trace.metadata:
        raise Failure(2, f"{trace.path} is no trace of versions 1 to 4: read it with kernel_times.py")
    target = trace.path.with_name(f"profile_{trace.path.name.split('.')[0].removeprefix('trace_')}.json")
    with errors_of(target):
        content = metrics or (read_object(target, "profile_v*.json") if target.exists() else {})
        content |= {"version": trace.metadata["version"], "trace": trace.path.name, "steps_profiled": trace.steps}
    content |= {"device": trace.device, "metadata": trace.metadata}
    content |= {"kernels": kernel_table(trace.calls), "groups": group_table(trace.calls)}
    files = {target: json.dumps(content, indent=1) + "\n"}
    if trace.memory:
        files[target.with_name("memory_timeline.html")] = memory_page(trace)
    if with_report:
        with errors_of(target):
            files[target.with_name("profiling_report.md")] = report(content, trace)
    for file, text in files.items():
        file.write_text(text, encoding="utf-8")
    print(f"\n{trace.title}\n{kernel_text(trace, 15)}\n\nwrote {', '.join(map(str, files))}")
    if not trace.memory:
        print("no memory_timeline.html: the trace has no memory events, record them with --profile-memory")
    print(f"open {trace.path} in https://ui.perfetto.dev")


def run(options, rest):
    if options.analyze_existing and rest:
        raise Failure(2, f"{' '.join(rest)} means nothing with --analyze-existing")
    for path in map(pathlib.Path, options.analyze_existing):
        if not path.exists() and "*" in path.name:  # the shell found nothing for the pattern
            print(f"there is no {path}: reading the newest trace in {path.parent}")
            path = path.parent
        write_results(read_profile(path), options.generate_report)
    if not options.analyze_existing:
        trace, metrics = profile(version_meant(options.version), options.profile_dir, rest)
        write_results(trace, options.generate_report, metrics)


def main(argv=None):
    parser = Parser("run_pytorch_profiler.py", __doc__, with_json=False)  # its profile_*.json is always written
    add = parser.add_argument
    add("--profile-dir", default="pytorch_profiles", metavar="DIR", help="results (%(default)s)")
    add("--generate-report", action="store_true", help="write profiling_report.md as well")
    add("--analyze-existing", nargs="+", default=[], metavar="FILE", help="read profiles instead of making one")
    add_version_option(parser)
    return parser.run(run, argv, passes_on=True)


if __name__ == "__main__":
    sys.exit(main())
