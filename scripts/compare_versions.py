#!/usr/bin/env python3
"""Train versions alike, in turns, and compare step, throughput, memory, losses and gradients.

example: python compare_versions.py --v1 ../version1_pytorch_baseline --v2 . --preset small

Without folders all four are compared. Each round trains every version once in a process of its own: what drifts hits
all of them alike. A speed-up is the median of the ratios within rounds, with the smallest and the largest. The first
version trains twice a round, under two names: what these two differ by is no difference. A version gets no speed-up if
its loss, logits or gradients are further from float64 than twice version 1's own error in the same precision.

With --report FOLDER every version is profiled as well, and report.html holds tables and charts: steps, and kernels by
group. Options that are not listed go to all training scripts.

Exit status: 0 compared; 1 where a version fails or computes something else; 2 for bad input.
"""

import sys

import numpy as np

from common import report as pages
from common.accuracy import Reference, outcome, verdict
from common.command_line import Failure, Parser, load_script, positive, progress, result_folder, script_path, with_sizes
from common.profiles import GROUPS, INTERPRETED, PHASES, groups_per_step, read_profile
from common.ratios import ROUNDS_NEEDED, counted, furthest, gain, median, noise_line, ratios
from common.runs import TimeLimit, run_in_rounds, train
from common.tables import emit, rounded, text_table
from common.versions import SCRIPTS

# ---------------------------------------------------------------- measure


def median_ms(run):
    return float(np.median([step["step_ms"] for step in run["steps"]]))


def results(name, runs, accuracy):
    """Return the row of a version from its runs; steps of all runs count alike."""
    row = pages.row_of(name, runs[0])
    summaries = [run["summary"] for run in runs]
    steps = [step["step_ms"] for run in runs for step in run["steps"]]
    low, middle, high = np.quantile(steps, (0.25, 0.5, 0.75)).tolist()
    row |= {f"{phase}_ms": median([summary[f"{phase}_ms"] for summary in summaries]) for phase in PHASES}
    return row | {
        "rounds_ms": [median_ms(run) for run in runs],
        "step_ms": {"p25": low, "median": middle, "p75": high},
        "tokens_per_second": 1e3 * row["options"]["batch_size"] * row["options"]["seq_len"] / middle,
        "tflops": row["flops_per_step"] / middle / 1e9,
        "peak_memory_mb": max(summary["peak_memory_mb"] for summary in summaries),
        "parameters_trained": min(summary["parameters_trained"] for summary in summaries),
        "captured": all(summary["graph"]["captured"] for summary in summaries),
        "accuracy": accuracy,
        "interpreted": name == "v3" and row["environment"].get("device_type") == "cpu",
    }


def add_speedups(rows, again=()):
    """Put the speed-up over the first one into each row, None where that means nothing; return what is wrong.

    again: the steps of the first one's second run of every round.
    """
    first = rows[0]
    pair = (first["rounds_ms"], again) if len(again) == len(first["rounds_ms"]) else None
    problems = []
    for row in rows:
        right = row["parameters_trained"] == row["parameters"] and row["accuracy"]["passed"]
        timed = right and not (row["interpreted"] or first["interpreted"])
        found = gain(first["rounds_ms"], row["rounds_ms"], pair) if timed else None
        row["speedup"] = found and found.ratio
        row["faster"] = bool(found and found.shown and found.ratio > 1)
        row["gain"], row["range"] = told(found) if found and row is not first else ("-", "-")
        if not right:
            worst = "{kind} {name} is off by {error:.1e}, allowed {bound:.1e}".format(**row["accuracy"]["worst"])
            problems.append(f"{row['name']}: no speed-up, it does not compute what version 1 does, {worst}")
    return problems


def told(found):
    """Return a gain and its range as two cells, narrow enough for a phone."""
    reach = f"{found.low:.2f} to {found.high:.2f}"
    if found.missing:
        return "not judged", reach
    return f"{found.ratio:.2f}x" if found.shown else "none shown", reach


def accuracies(paths, argv):
    """Return how far loss, logits and gradients of each version are from those that they must have."""
    reference = Reference(argv, steps=2)
    found = {}
    for i, (name, path) in enumerate(paths.items(), 1):
        progress(f"gradients, {i} of {len(paths)}: {name} ...")
        computed = outcome(load_script(path, f"--{name}"), argv, steps=2)
        found[name] = verdict(reference.compare(computed))
    return found


def study(paths, argv, rounds):
    """Return what --json writes: a row per version that ran, and a sentence for each that failed or differs."""
    argv = with_sizes(argv)
    for name, path in paths.items():
        load_script(path, f"--{name}").parse_options(argv)  # a wrong option ends it here, before any training
    first = next(iter(paths))
    again = f"{first} again"
    programs = {**paths, again: paths[first]}
    runs, reasons = run_in_rounds(lambda name: train(programs[name], argv), programs, rounds, TimeLimit(None))
    problems = [f"{name}: {reason}" for name, reason in reasons.items()]
    paths = {name: path for name, path in paths.items() if name not in reasons}
    if not paths:
        raise Failure(1, "; ".join(problems))
    rows = [results(name, runs[name], accuracy) for name, accuracy in accuracies(paths, argv).items()]
    pair = [median_ms(run) for run in runs[again]] if first in paths and again not in reasons else []
    problems += add_speedups(rows, pair)
    noise = [noise_line(first, furthest(ratios(rows[0]["rounds_ms"], pair)))] if pair else []
    if rounds < ROUNDS_NEEDED:
        noise.append(f"speed-ups are not judged: {counted(rounds, 'round')} of the {ROUNDS_NEEDED} needed")
    return {"options": argv, "rows": rows, "problems": problems, "noise": noise}


# ---------------------------------------------------------------- show


def result_lines(rows):
    """Return the lines of the table of results, a column per version."""
    return [
        ["how it ran", *("graph" if row["captured"] else "eager" for row in rows)],
        *pages.result_lines(rows),
        ["last loss", *(f"{row['final_loss']:.4f}" for row in rows)],
        ["largest relative error", *(f"{row['accuracy']['largest_error']:.1e}" for row in rows)],
        [f"speed-up over {rows[0]['name']}", *(row["gain"] for row in rows)],
        ["smallest to largest", *(row["range"] for row in rows)],
    ]


def shown(content):
    """Return what the text and the page show: facts, header and lines of the table, and what a reader must know."""
    rows = content["rows"]
    facts = [*pages.facts_of(rows[0]), ("options", " ".join(content["options"]))]
    notes = [*content["noise"], *content["problems"]]
    if any(row["interpreted"] for row in rows):
        notes.append(INTERPRETED)
    return facts, (["", *(row["name"] for row in rows)], result_lines(rows)), notes


def as_text(content):
    facts, table, notes = shown(content)
    return "\n".join([*(f"{name}: {value}" for name, value in facts), "", text_table(*table), *notes])


def finding(rows):
    """Return what to notice: the shortest step of the versions that are shown to be faster, and its memory."""
    first = rows[0]
    faster = [row for row in rows if row["faster"]]
    if not faster:
        step = f"{rounded(first['step_ms']['median'])} ms per step"
        return f"No version is shown to be faster than {first['name']}, which takes {step}."
    best = min(faster, key=lambda row: row["step_ms"]["median"])
    share = 100 * best["peak_memory_mb"] / first["peak_memory_mb"]
    step = f"{rounded(best['step_ms']['median'])} ms"
    memory = f"with {share:.0f} % of its peak memory"
    fast = f"{best['gain']} over {first['name']} ({best['range']})"
    return f"{best['name']} has the shortest step: {step}, {fast}, {memory}."


# ---------------------------------------------------------------- report


def kernel_section(what, columns):
    """Return the stacked bars and the table of kernels, or operators, by group."""
    used = [group for group in (*GROUPS, "all") if any(group in groups for groups in columns.values())]
    lines = [[f"{g} ms", *(rounded(c[g]["ms"] if g in c else None) for c in columns.values())] for g in used]
    lines.append([f"{what} per step", *(f"{groups['all']['calls']:,.0f}" for groups in columns.values())])
    bars = pages.group_bars(columns, f"Time of each group of {what} per step, profiled without a graph.")
    return [bars, pages.table(["", *columns], lines)]


def write_report(content, paths, folder):
    """Profile some more steps of each version; write report.html beside the traces; add the kernels to the content."""
    facts, table, notes = shown(content)
    timed = [row for row in content["rows"] if row["speedup"] is not None]
    if not timed:
        raise Failure(1, f"no report: {'; '.join(notes)}")
    content["kernels"] = {}
    names = [row["name"] for row in content["rows"] if not row["interpreted"]]
    for i, name in enumerate(names, 1):
        progress(f"profiles, {i} of {len(names)}: {name} ...")
        place = ["--profile-dir", str(folder / f"profile_{name}")]
        train(paths[name], [*content["options"], "--enable-pytorch-profiler", *place])
        profile = read_profile(place[1])
        content["kernels"][name] = groups_per_step(profile)
    bars = pages.step_bars(timed, f"Time per step with its quartiles, and the speed-up over {timed[0]['name']}.")
    sections = [
        ("The steps", [bars, pages.table(*table)]),
        ("Where the time goes", kernel_section(profile.what, content["kernels"])),
    ]
    html = pages.page("Comparison of the versions", facts, [finding(timed), *notes], sections)
    (folder / "report.html").write_text(html, encoding="utf-8")
    progress(f"wrote {folder / 'report.html'}")


# ---------------------------------------------------------------- main


def run(options, rest):
    named = {f"v{n}": path for n in SCRIPTS if (path := getattr(options, f"v{n}"))}
    named = named or {f"v{n}": script for n, script in SCRIPTS.items()}
    paths = {name: script_path(path, f"--{name}") for name, path in named.items()}
    if len(paths) < 2:
        raise Failure(2, "give two folders or more, as --v1 DIR --v2 DIR, or none to compare all four")
    content = study(paths, ["--num-steps", str(options.num_steps), *rest], options.rounds)
    if options.report:
        write_report(content, paths, result_folder(options.report, "--report"))
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
