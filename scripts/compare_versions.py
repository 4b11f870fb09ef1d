#!/usr/bin/env python3
"""Train versions with the same settings, and compare step time, throughput, memory, losses and gradients.

example: python compare_versions.py --v1 ../version1_pytorch_baseline --v2 . --preset small

Without folders it compares all four. Each round trains every version once, in a process of its own, so if the machine
slows down, all versions slow down. A speed-up is the median of the ratios within rounds, shown with the smallest and
the largest. The first version trains twice per round: the difference between its two runs is the noise, and a speed-up
counts only if it's larger. A version whose loss, logits or gradients are more than twice as far from float64 as version
1's in the same precision gets no speed-up.

--report FOLDER also profiles every version, and writes report.html with tables and charts of the steps and of the
kernels by group. Options that aren't listed here go to all training scripts.

Exit status: 0 compared; 1 if a version fails or computes something else; 2 for bad input.
"""

import sys

import numpy as np

from common import report
from common.command_line import (
    Failure,
    Parser,
    load_script,
    positive,
    progress,
    refuse_protected,
    script_path,
    trace_folder,
    with_sizes,
)
from common.machine.description import without_folders
from common.measuring.accuracy import Reference, outcome, verdict
from common.measuring.rounds import run_in_rounds
from common.measuring.runs import TimeLimit, train
from common.profiles import INTERPRETED, read_profile
from common.profiles.comparison import compared
from common.ratios import ROUNDS_NEEDED, counted, furthest, gain, median, noise_line, ratios
from common.step_parts import GROUPS, PHASES
from common.tables import emit, rounded, text_table, write_whole
from common.versions import SCRIPTS

# ---------------------------------------------------------------- measure


def median_ms(run):
    return float(np.median([step["step_ms"] for step in run["steps"]]))


def measured_row(name, runs, accuracy):
    """Return the numbers of a version from all steps of its runs, one run per round."""
    row = report.row_of(name, runs[0])
    summaries = [run["summary"] for run in runs]
    for phase in PHASES:
        row[f"{phase}_ms"] = median(summary[f"{phase}_ms"] for summary in summaries)
    steps = [step["step_ms"] for run in runs for step in run["steps"]]
    low, middle, high = np.quantile(steps, (0.25, 0.5, 0.75)).tolist()
    tokens = row["options"]["batch_size"] * row["options"]["seq_len"]
    return row | {
        "rounds_ms": [median_ms(run) for run in runs],
        "step_ms": {"p25": low, "median": middle, "p75": high},
        "tokens_per_second": 1e3 * tokens / middle,
        "tflops": row["flops_per_step"] / middle / 1e9,
        "peak_memory_mb": max(summary["peak_memory_mb"] for summary in summaries),
        "parameters_trained": min(summary["parameters_trained"] for summary in summaries),
        "captured": all(summary["graph"]["captured"] for summary in summaries),
        "accuracy": accuracy,
        "interpreted": name == "v3" and row["environment"].get("device_type") == "cpu",
    }


def add_speedups(rows, again_ms=()):
    """Add each row's speed-up over the first row, None if one of the two times means nothing; return the problems.

    again_ms: the first version's second run of every round, the other half of the A/A pair.
    """
    first = rows[0]
    pair = None
    if len(again_ms) == len(first["rounds_ms"]):
        pair = (first["rounds_ms"], again_ms)
    problems = []
    for row in rows:
        row |= {"speedup": None, "faster": False, "gain": "-", "range": "-"}
        if row["parameters_trained"] != row["parameters"] or not row["accuracy"]["passed"]:
            worst = "{kind} {name} is off by {error:.1e}, allowed {bound:.1e}".format(**row["accuracy"]["worst"])
            problems.append(f"{row['name']}: no speed-up, because it doesn't compute what version 1 does: {worst}")
            continue
        if row["interpreted"] or first["interpreted"]:
            continue
        found = gain(first["rounds_ms"], row["rounds_ms"], pair)
        row["speedup"] = found.ratio
        row["faster"] = found.shown and found.ratio > 1
        if row is not first:
            row["gain"] = gain_cell(found)
            row["range"] = f"{found.low:.2f} to {found.high:.2f}"
    return problems


def gain_cell(found):
    """Return a Gain without its range, narrow enough for a phone."""
    if found.missing:
        return "not judged"
    return f"{found.ratio:.2f}x" if found.shown else "none shown"


def accuracies(paths, argv):
    """Compute loss, logits and gradients of each version; return {name: verdict} against version 1 in float64."""
    reference = Reference(argv, steps=2)
    found = {}
    for i, (name, path) in enumerate(paths.items(), 1):
        progress(f"gradients, {i} of {len(paths)}: {name} ...")
        computed = outcome(load_script(path, f"--{name}"), argv, steps=2)
        found[name] = verdict(reference.compare(computed))
    return found


def study(paths, argv, rounds):
    """Train and compare the versions; return what --json writes.

    rows: one per version that ran. problems: a sentence for each version that failed or computes something else.
    noise: sentences about the A/A pair and the number of rounds.
    """
    argv = with_sizes(argv)
    for name, path in paths.items():
        load_script(path, f"--{name}").parse_options(argv)  # a wrong option ends it here, before any training
    first = next(iter(paths))
    again = f"{first} again"
    programs = {**paths, again: paths[first]}
    runs, reasons = run_in_rounds(lambda name: train(programs[name], argv), programs, rounds, TimeLimit(None))
    problems = [f"{name}: {reason}" for name, reason in reasons.items()]
    ran = {name: path for name, path in paths.items() if name not in reasons}
    if not ran:
        raise Failure(1, "; ".join(problems))
    rows = [measured_row(name, runs[name], accuracy) for name, accuracy in accuracies(ran, argv).items()]
    again_ms = []
    noise = []
    if first in ran and again not in reasons:
        again_ms = [median_ms(run) for run in runs[again]]
        noise.append(noise_line(first, furthest(ratios(rows[0]["rounds_ms"], again_ms))))
    problems += add_speedups(rows, again_ms)
    if rounds < ROUNDS_NEEDED:
        noise.append(f"speed-ups are not judged: {counted(rounds, 'round')} of the {ROUNDS_NEEDED} needed")
    return {"options": argv, "rows": rows, "problems": problems, "noise": noise}


# ---------------------------------------------------------------- show


def result_lines(rows):
    """Return the lines of the table of results, a column per version."""
    return [
        ["how it ran", *("graph" if row["captured"] else "eager" for row in rows)],
        *report.result_lines(rows),
        ["last loss", *(f"{row['final_loss']:.4f}" for row in rows)],
        ["largest relative error", *(f"{row['accuracy']['largest_error']:.1e}" for row in rows)],
        [f"speed-up over {rows[0]['name']}", *(row["gain"] for row in rows)],
        ["smallest to largest", *(row["range"] for row in rows)],
    ]


def facts_of(content):
    """Return (name, value) of what the versions have in common."""
    return [*report.facts_of(content["rows"][0]), ("options", " ".join(without_folders(content["options"])))]


def table_of(content):
    """Return header and lines of the table of results."""
    rows = content["rows"]
    return ["", *(row["name"] for row in rows)], result_lines(rows)


def notes_of(content):
    """Return the sentences that a reader must know besides the table."""
    notes = [*content["noise"], *content["problems"]]
    if any(row["interpreted"] for row in content["rows"]):
        notes.append(INTERPRETED)
    return notes


def as_text(content):
    facts = [f"{name}: {value}" for name, value in facts_of(content)]
    return "\n".join([*facts, "", text_table(*table_of(content)), *notes_of(content)])


def finding(rows):
    """Return a sentence about the shortest step of the versions that are shown to be faster, and its memory."""
    first = rows[0]
    faster = [row for row in rows if row["faster"]]
    if not faster:
        step = f"{rounded(first['step_ms']['median'])} ms per step"
        return f"No version is shown to be faster than {first['name']}, which takes {step}."
    best = min(faster, key=lambda row: row["step_ms"]["median"])
    step = f"{rounded(best['step_ms']['median'])} ms"
    speedup = f"{best['gain']} over {first['name']} ({best['range']})"
    memory = f"with {100 * best['peak_memory_mb'] / first['peak_memory_mb']:.0f} % of its peak memory"
    return f"{best['name']} has the shortest step: {step}, {speedup}, {memory}."


# ---------------------------------------------------------------- report


def kernel_section(comparison):
    """Return the stacked bars and the table of kernels, or operators, by group, and the remarks on them."""
    lines = []
    groups_of = comparison.groups
    for group in (*GROUPS, "all"):
        cells = [groups[group]["ms"] if group in groups else None for groups in groups_of.values()]
        if any(cell is not None for cell in cells):
            lines.append([f"{group} ms", *map(rounded, cells)])
    unit = comparison.unit
    lines.append([f"{unit} per step", *(f"{groups['all']['calls']:,.0f}" for groups in groups_of.values())])
    bars = report.group_bars(groups_of, f"Time of each group of {unit} per step, profiled without a graph.")
    return [bars, report.table(["", *groups_of], lines), *map(report.text, comparison.remarks)]


def profiled(paths, argv, folder):
    """Train each version under PyTorch's profiler; return {name: Profile}."""
    found = {}
    for i, (name, path) in enumerate(paths.items(), 1):
        progress(f"profiles, {i} of {len(paths)}: {name} ...")
        profile_dir = folder / f"profile_{name}"
        train(path, [*argv, "--enable-pytorch-profiler", "--profile-dir", str(profile_dir)])
        found[name] = read_profile(profile_dir)
    return found


def write_report(content, paths, folder):
    """Profile some more steps of each version, write report.html next to the traces, add the kernels to the content."""
    notes = notes_of(content)
    timed = [row for row in content["rows"] if row["speedup"] is not None]
    if not timed:
        raise Failure(1, f"no report: {'; '.join(notes)}")
    names = [row["name"] for row in content["rows"] if not row["interpreted"]]
    comparison = compared(profiled({name: paths[name] for name in names}, content["options"], folder))
    content["kernels"] = comparison.groups
    bars = report.step_bars(timed, f"Time per step with its quartiles, and the speed-up over {timed[0]['name']}.")
    sections = [
        ("The steps", [bars, report.table(*table_of(content))]),
        ("Where the time goes", kernel_section(comparison)),
    ]
    html = report.page("Comparison of the versions", facts_of(content), [finding(timed), *notes], sections)
    write_whole(folder / "report.html", html)
    progress(f"wrote {folder / 'report.html'}")


# ---------------------------------------------------------------- main


def run(options, rest):
    given = {f"v{n}": getattr(options, f"v{n}") for n in SCRIPTS}
    paths = {name: script_path(path, f"--{name}") for name, path in given.items() if path}
    if not paths:
        paths = {f"v{n}": script for n, script in SCRIPTS.items()}
    if len(paths) < 2:
        raise Failure(2, "give two folders or more, as --v1 DIR --v2 DIR, or none to compare all four")
    folder = None
    if options.report:
        folder = trace_folder(options.report, "--report")
        refuse_protected(folder / "report.html")
    content = study(paths, ["--num-steps", str(options.num_steps), *rest], options.rounds)
    try:
        if folder:
            write_report(content, paths, folder)
    finally:
        emit(content, as_text(content), options.json)
    return 1 if content["problems"] else 0


def main(argv=None):
    parser = Parser("compare_versions.py", __doc__)
    add = parser.add_argument
    for n in SCRIPTS:
        add(f"--v{n}", metavar="DIR", help=f"folder, or script, of version {n}")
    add("--rounds", type=positive, default=5, metavar="N", help="runs of each version (%(default)s)")
    add("--num-steps", type=positive, default=20, metavar="N", help="steps of a run (%(default)s)")
    add("--report", metavar="FOLDER", help="profile as well, and write report.html there")
    return parser.run(run, argv, passes_on=True)


if __name__ == "__main__":
    sys.exit(main())
