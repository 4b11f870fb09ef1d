#!/usr/bin/env python3
"""Report what fusion changed, in Markdown: step, memory and kernels of two profiles side by side.

example: python generate_fusion_report.py --baseline ../version1_pytorch_baseline/complete_analysis
             --fused ./complete_rocm_analysis --output ./fusion_comparison_report.md

Reads two folders that run_pytorch_profiler.py or run_all_profilers.sh wrote, and takes the newest profiles that agree
in sizes and precision. Without folders it profiles versions 1 and 2 first; options that aren't listed here go to them.
"""

import pathlib
import subprocess
import sys

from common import report
from common.command_line import Failure, Parser, progress, refuse_protected, result_folder, with_sizes
from common.files import errors_of, read_object
from common.profiles import newest_alike, read_pair
from common.profiles.comparison import compared
from common.tables import emit, rounded, write_whole
from common.versions import REPOSITORY

NO_STEPS = "made from a trace alone (--analyze-existing), so without measured steps"


def profiles_in(folder):
    """Return the content of each profile_*.json with measured steps below a folder, the newest first, and the others.

    The others are the names of those that run_pytorch_profiler.py --analyze-existing made from a trace alone.
    """
    found = []
    others = []
    for file in sorted(folder.rglob("profile_v*.json"), key=lambda one: -one.stat().st_mtime):
        with errors_of(file):
            content = read_object(file, "profile_v*.json")
            if "summary" not in content:
                others.append(str(file))
                continue
            try_to_show(content)
            found.append(content | {"trace": str(file.with_name(content["trace"]))})
    if others and not found:
        way_out = (
            "make one with run_pytorch_profiler.py --profile-dir, or compare traces with analyze_kernel_reduction.py"
        )
        raise Failure(2, f"{', '.join(others)}: {NO_STEPS}: {way_out}")
    if not found:
        raise Failure(2, f"{folder} holds no profile_v*.json: make one with run_pytorch_profiler.py --profile-dir")
    return found, others


def try_to_show(content):
    """Raise an error of any kind where something that the report shows is missing or of another kind."""
    row = report.row_of(f"version {content['version']}", content)
    report.facts_of(row)
    report.result_lines([row])
    report.times_as_fast(row, row)
    newest_alike([("", content["metadata"])], [("", content["metadata"])])


def profile_version(version, folder, rest):
    """Leave a profile of that version in the folder."""
    progress(f"{version} of 2: profiling version {version} ...")
    tool = REPOSITORY / "scripts" / "run_pytorch_profiler.py"
    command = [sys.executable, str(tool), "--version", str(version), "--profile-dir", str(folder), *with_sizes(rest)]
    if status := subprocess.run(command, stdout=subprocess.DEVNULL).returncode:
        raise Failure(status)  # the tool said why


def newest_pair(folders):
    """Return results and traces of the newest two profiles of like runs, and names of left out files.

    Raise Failure if no runs are alike.
    """
    found, others = zip(*map(profiles_in, folders), strict=True)
    chosen = newest_alike(*([(content, content["metadata"]) for content in contents] for contents in found))
    roles = zip(("baseline", "fused"), chosen, strict=True)
    results = [report.row_of(f"{role} (version {content['version']})", content) for role, content in roles]
    return results, read_pair(*(content["trace"] for content in chosen)), [name for names in others for name in names]


def findings(results, comparison):
    """Return the sentences of the report: step time, speed-up, number of kernels, and warnings."""
    step = f"{results[1]['name'].capitalize()} takes {rounded(results[1]['step_ms']['median'])} ms per step"
    lines = [f"{step}, {report.times_as_fast(*results)}. {comparison.sentence}."]
    for result in results:
        if result["parameters_trained"] != result["parameters"]:
            lines.append(f"{result['name'].capitalize()} does not train every parameter: its speed means nothing.")
    return [*lines, *comparison.remarks]


def report_text(results, traces, comparison, notice):
    """Return the report as Markdown."""
    names = [result["name"] for result in results]
    header = [f"{comparison.unit} per step", *names, "fewer", *(f"ms, {name}" for name in names)]
    sections = [
        ("The steps", [report.table(["", *names], report.result_lines(results))]),
        (f"{comparison.unit.capitalize()} by group", [report.table(header, comparison.rows())]),
    ]
    facts = [*report.facts_of(results[1]), *zip(names, [trace.title for trace in traces], strict=True)]
    return report.markdown(f"Fusion report: {' and '.join(names)}", facts, notice, sections)


def generate(options, rest):
    folder = pathlib.Path(options.output_dir) if options.output_dir else pathlib.Path(options.output).parent
    target = folder / pathlib.Path(options.output).name
    refuse_protected(target)
    given = (options.baseline, options.fused)
    folders = []
    if rest and all(given):
        raise Failure(2, f"{' '.join(rest)} has no effect if you give profiles: leave it out")
    for version, name in enumerate(given, 1):
        folders.append(pathlib.Path(name or folder / f"profile_v{version}"))
        if not name:
            profile_version(version, folders[-1], rest)
    results, traces, left_out = newest_pair(folders)
    comparison = compared({result["name"]: trace for result, trace in zip(results, traces, strict=True)})
    notice = findings(results, comparison)
    if left_out:
        notice.append(f"Left out, {NO_STEPS}: {', '.join(left_out)}.")
    result_folder(folder, "--output-dir")
    write_whole(target, report_text(results, traces, comparison, notice))
    content = {"versions": results, "traces": [trace.title for trace in traces]}
    content["groups"] = list(comparison.groups.values())
    emit(content, "\n".join([*notice, f"wrote {target}"]), options.json)


def main(argv=None):
    parser = Parser("generate_fusion_report.py", __doc__)
    add = parser.add_argument
    add("--baseline", metavar="DIR", help="profile of version 1 (made if not given)")
    add("--fused", metavar="DIR", help="profile of version 2 (made if not given)")
    add("--output", default="fusion_report.md", metavar="FILE", help="the report (%(default)s)")
    add("--output-dir", metavar="DIR", help="folder for the report and the profiles that it needs")
    return parser.run(generate, argv, passes_on=True)


if __name__ == "__main__":
    sys.exit(main())
