#!/usr/bin/env python3
"""Train versions alike, in turns, and compare step, throughput, memory, losses and gradients.

Without folders all four are compared. Each round trains every version once in a process of its own: what drifts hits
all of them alike. A version whose gradients are not the first one's gets no speed-up. With --report FOLDER every
version is profiled as well, and report.html holds tables and charts: steps, kernels by group, rooflines and, with
--seq-lengths, memory over the sequence length. Options that are not listed here go to all training scripts.

Exit status: 0 compared; 1 where a version fails or computes something else; 2 for bad input.
"""

import argparse
import functools
import json
import pathlib
import statistics
import sys

from common import memory
from common import report as pages
from common.accuracy import compare, outcome, verdict
from common.command_line import (
    Failure,
    Parser,
    add_time_limit,
    load_script,
    numbers,
    on_cpu,
    positive,
    progress,
    result_folder,
    run_tool,
    script_path,
    with_sizes,
)
from common.profiles import GROUPS, INTERPRETED, PHASES, Profile, counts_per_step, read_profile, steps_needed
from common.roofline import ceilings_for, operator_table
from common.runs import TimeLimit, train
from common.tables import emit, known, rounded, text_table
from common.versions import SCRIPTS

TOLERANCE = {"float32": 1e-4, "lower": 3e-2}  # of losses and gradients, relative

# ---------------------------------------------------------------- measure


def quartiles(values: list[float]) -> dict:
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
    return {"p25": low, "median": middle, "p75": high}


def results(name: str, runs: list[dict], accuracy: dict | None, interpreted: bool = False) -> dict:
    """Return the row of a version from its runs; steps of all runs count alike."""
    summaries, first = [run["summary"] for run in runs], runs[0]
    step, options = quartiles([step["step_ms"] for run in runs for step in run["steps"]]), first["options"]
    phases = {phase: [summary[f"{phase}_ms"] for summary in summaries] for phase in PHASES}
    return {
        "name": name,
        "runs": len(runs),
        "step_ms": step,
        **{f"{phase}_ms": None if None in times else statistics.median(times) for phase, times in phases.items()},
        "samples_per_second": 1e3 * options["batch_size"] / step["median"],
        "tokens_per_second": 1e3 * options["batch_size"] * options["seq_len"] / step["median"],
        "tflops": summaries[0]["flops_per_step"] / step["median"] / 1e9,
        "peak_memory_mb": max(summary["peak_memory_mb"] for summary in summaries),
        "first_loss": summaries[0]["first_loss"],
        "final_loss": summaries[0]["final_loss"],
        "trained": min(summary["parameters_trained"] / summary["parameters"] for summary in summaries),
        "captured": all(summary["graph"]["captured"] for summary in summaries),
        "environment": first["environment"],
        "config": first["config"],
        "batch": [options["batch_size"], options["seq_len"]],
        "precision": summaries[0]["precision"],
        "accuracy": accuracy,
        "interpreted": interpreted,
    }


def right(row: dict) -> bool:
    """Return whether a version trains every parameter and computes what the first one does."""
    return row["trained"] == 1 and (row["accuracy"] is None or row["accuracy"]["passed"])


def add_speedups(rows: list[dict]) -> None:
    """Put the first one's step over its own into each row; None where that means nothing."""
    for row in rows:
        timed = right(row) and not (row["interpreted"] or rows[0]["interpreted"])
        row["speedup"] = rows[0]["step_ms"]["median"] / row["step_ms"]["median"] if timed else None


def accuracies(paths: dict, argv: list[str], tolerance: float) -> dict:
    """Return how far loss, logits and gradients of each version are from the first one's; None for the first."""
    reference, found = None, {}
    for i, (name, path) in enumerate(paths.items(), 1):
        progress(f"gradients, {i} of {len(paths)}: {name} ...")
        result = outcome(load_script(path, f"--{name}"), argv, steps=2)
        found[name] = verdict(compare(reference, result), tolerance) if reference else None
        reference = reference or result
    return found


def measure(paths: dict, argv: list[str], rounds: int, limit: TimeLimit, after: int) -> tuple[dict, list[str]]:
    """Return the metrics of each version's runs, and a sentence for each version that failed.

    A round after the first is left out where the limit has no room for it and for the runs that come after.
    """
    runs, problems = {name: [] for name in paths}, []
    for i in range(rounds):
        if not limit.room(len(runs) + after):
            progress(f"no time is left for round {i + 1} of {rounds}")
            break
        for place, name in enumerate(list(runs)):
            left = limit.left((rounds - i) * len(runs) - place + after)
            progress(f"round {i + 1} of {rounds}, {name}: training, {left} ...")
            try:
                runs[name].append(limit.timed(functools.partial(train, paths[name], argv)))
            except Failure as error:
                if error.status == 2:
                    raise
                problems.append(f"{name}: {error}")
                del runs[name]
    return runs, problems


def study(paths: dict, argv: list[str], rounds: int, limit: TimeLimit, after: int) -> dict:
    """Return what --json writes: a row per version that ran, and a sentence for each that failed or differs."""
    argv = with_sizes(argv)
    for name, path in paths.items():
        load_script(path, f"--{name}").parse_options(argv)  # a wrong option ends it here, before any training
    runs, problems = measure(paths, argv, rounds, limit, after)
    if not runs:
        raise Failure(1, "; ".join(problems))
    lower = "--use-amp" in argv or "--tf32" in argv
    found = accuracies({name: paths[name] for name in runs}, argv, TOLERANCE["lower" if lower else "float32"])
    interpreted = "v3" if on_cpu(argv) else None
    rows = [results(name, runs[name], found[name], name == interpreted) for name in runs]
    add_speedups(rows)
    for row in rows:
        if not right(row):
            worst = row["accuracy"] and row["accuracy"]["worst"]
            where = f", {worst['kind']} {worst['name']} is off by {worst['error']:.1e}" if worst else ""
            problems.append(f"{row['name']}: no speed-up, it does not compute what {rows[0]['name']} does{where}")
    return {"options": argv, "rows": rows, "problems": problems}


# ---------------------------------------------------------------- show


def as_text(content: dict) -> str:
    rows, cells = content["rows"], []
    for row in rows:
        step, worst = row["step_ms"], row["accuracy"] and f"{row['accuracy']['worst']['error']:.1e}"
        cells.append(
            [row["name"], "graph" if row["captured"] else "eager", rounded(step["median"])]
            + [f"{rounded(step['p25'])} - {rounded(step['p75'])}"]
            + [rounded(row[f"{phase}_ms"]) for phase in PHASES]
            + [f"{row['tokens_per_second']:,.0f}", f"{row['peak_memory_mb']:,.0f}", f"{row['final_loss']:.4f}"]
            + [f"{row['trained']:.0%}", worst or "-", known(row["speedup"], ".2f") + "x" * (row["speedup"] is not None)]
        )
    header = ["", "runs", "step ms", "quartiles", *PHASES, "tokens/s", "peak MB", "loss", "trained", "error"]
    lines = [f"{name}: {value}" for name, value in facts(content)]
    return "\n".join([*lines, text_table([*header, f"over {rows[0]['name']}"], cells, left=2), *notes(content)])


def facts(content: dict) -> list[tuple[str, str]]:
    first = content["rows"][0]
    batch = f"{first['batch'][0]} sequences of {first['batch'][1]} tokens"
    return [
        ("device", first["environment"]["device"]),
        ("sizes", f"{pages.model_sizes(first['config'])}, {batch}"),
        ("precision", first["precision"]),
        ("software", f"PyTorch {first['environment']['torch']}"),
        ("options", " ".join(content["options"])),
    ]


def notes(content: dict) -> list[str]:
    """Return what a reader of the results must know."""
    return [*content["problems"], *[INTERPRETED] * any(row["interpreted"] for row in content["rows"])]


def finding(content: dict) -> str:
    """Return what to notice: the fastest of the versions that compute the same, and what it needs of memory."""
    first = content["rows"][0]
    best = min((row for row in content["rows"] if row["speedup"]), key=lambda row: row["step_ms"]["median"])
    step = f"{rounded(best['step_ms']['median'])} ms per step"
    if best is first:
        return f"No version is faster than {first['name'].upper()}, which takes {step}."
    sure = "" if best["step_ms"]["p75"] < first["step_ms"]["p25"] else ", but the quartiles overlap"
    share = 100 * best["peak_memory_mb"] / first["peak_memory_mb"]
    return (
        f"{best['name'].upper()} is the fastest: {step}, {best['speedup']:.2f} times as fast as "
        f"{first['name'].upper()}{sure}, with {share:.0f} % of its peak memory."
    )


def results_table(content: dict) -> dict:
    """Return the table of versions for a page: a column per version, which fits a phone."""
    rows = content["rows"]
    errors = [row["accuracy"] and row["accuracy"]["worst"]["error"] for row in rows]
    lines = [
        ["how it ran", *("graph" if row["captured"] else "eager" for row in rows)],
        ["step, median ms", *(rounded(row["step_ms"]["median"]) for row in rows)],
        ["lower quartile ms", *(rounded(row["step_ms"]["p25"]) for row in rows)],
        ["upper quartile ms", *(rounded(row["step_ms"]["p75"]) for row in rows)],
        *([f"{phase} ms", *(rounded(row[f"{phase}_ms"]) for row in rows)] for phase in PHASES),
        ["tokens/s", *(f"{row['tokens_per_second']:,.0f}" for row in rows)],
        ["TFLOP/s", *(rounded(row["tflops"]) for row in rows)],
        ["peak memory MB", *(f"{row['peak_memory_mb']:,.0f}" for row in rows)],
        ["last loss", *(f"{row['final_loss']:.4f}" for row in rows)],
        ["trained", *(f"{row['trained']:.0%}" for row in rows)],
        ["largest relative error", *(known(error, ".1e") for error in errors)],
        [f"times {rows[0]['name']}'s speed", *(known(row["speedup"], ".2f") for row in rows)],
    ]
    return pages.table(["", *(row["name"] for row in rows)], lines)


# ---------------------------------------------------------------- report


def profiles_of(content: dict, paths: dict, folder: pathlib.Path) -> dict[str, Profile]:
    """Profile some more steps of each version whose times mean something; keep its trace in the folder."""
    found, names = {}, [row["name"] for row in content["rows"] if not row["interpreted"]]
    for i, name in enumerate(names, 1):
        progress(f"profiles, {i} of {len(names)}: {name} ...")
        place = result_folder(folder / f"profile_{name}", "--report")
        train(paths[name], [*content["options"], "--enable-pytorch-profiler", "--profile-dir", str(place)])
        found[name] = read_profile(place)
    return found


def kernel_section(profiles: dict[str, Profile], content: dict) -> list[dict]:
    """Return the stacked bars and the table of kernels by group; put the numbers into the content too."""
    counted = {name: counts_per_step(profile, steps_needed(profile)) for name, profile in profiles.items()}
    content["kernels"] = {name: {key: c[key] for key in ("calls", "groups")} for name, c in counted.items()}
    what = next(iter(profiles.values())).what
    columns = {name: {group: part["ms"] for group, part in c["groups"].items()} for name, c in counted.items()}
    rows = [
        [f"{group} ms", *(rounded(column.get(group)) for column in columns.values())]
        for group in GROUPS
        if any(group in column for column in columns.values())
    ]
    rows.append(["all ms", *(rounded(c["ms"]) for c in counted.values())])
    rows.append([f"{what} per step", *(f"{c['calls']:,.0f}" for c in counted.values())])
    bars = pages.group_bars(columns, f"Time of each group of {what} per step, profiled without a graph.")
    return [bars, pages.table(["", *columns], rows)]


def roofline_section(profiles: dict[str, Profile], content: dict) -> list[dict]:
    """Return a roofline chart per version, all on one scale."""
    progress("measuring this device's ceilings ...")
    ceilings, origin = ceilings_for(next(iter(profiles.values())), None)
    content["ceilings"] = ceilings
    if ceilings is None:
        return [pages.text(f"No roofline: {origin}.")]
    tables = {name: operator_table(profile, steps_needed(profile), ceilings) for name, profile in profiles.items()}
    limits = pages.roofline_limits([row for rows in tables.values() for row in rows], ceilings)
    roofs = f"{rounded(ceilings['matmul_tflops'])} TFLOP/s of a large matmul, {rounded(ceilings['copy_tb_s'])} TB/s of"
    meaning = "A disc above them found its data in a cache. Operators without matmuls have no place here."
    parts = [pages.text(f"The lines are this device's ceilings, {origin}: {roofs} a copy. {meaning}")]
    for name, rows in tables.items():
        if any(row["flops"] for row in rows):
            parts.append(pages.roofline(rows, ceilings, limits, f"Roofline of {name}: the larger a disc, the longer."))
        else:
            parts.append(pages.text(f"No roofline of {name}: its profile recorded no shapes.", small=True))
    return parts


def memory_section(paths: dict, content: dict, lengths: list[int], limit: TimeLimit) -> list[dict]:
    """Return memory over the sequence length: the lines, and their numbers."""
    scripts = {int(row["name"][1:]): paths[row["name"]] for row in content["rows"]}
    measured = memory.measure(scripts, lengths, [*content["options"], "--num-steps", "2"], limit)
    if not measured["lengths"]:
        return [pages.text("No time was left to measure it.")]
    content["memory"] = measured
    lengths, rows = measured["lengths"], measured["rows"]
    peaks = zip(*(row["peaks_mb"] for row in rows), strict=True)
    cells = [
        [f"{length} tokens, MB", *(known(p, ",.0f") for p in of)] for length, of in zip(lengths, peaks, strict=True)
    ]
    cells.append(["growth", *(row["growth"] or "-" for row in rows)])
    names = [f"v{row['version']}" for row in rows]
    series = dict(zip(names, (row["peaks_mb"] for row in rows), strict=True))
    chart = pages.memory_lines(lengths, series, "Peak memory over the length of the sequences.")
    return [chart, pages.table(["", *names], cells)]


def write_report(content: dict, paths: dict, folder: pathlib.Path, lengths: list[int] | None, limit: TimeLimit) -> None:
    """Write report.html, the traces and comparison.json into the folder; again after the memory, which takes long."""
    timed = [row for row in content["rows"] if row["speedup"] is not None]
    if not timed:
        raise Failure(1, f"no report: {'; '.join(notes(content))}")
    profiles = profiles_of(content, paths, folder)
    bars = pages.step_bars(timed, f"Time per step with its quartiles, and {timed[0]['name']}'s over it.")
    sections = [
        ("The steps", [bars, results_table(content)]),
        ("Where the time goes", kernel_section(profiles, content)),
        ("Roofline", roofline_section(profiles, content)),
    ]
    for measure_memory in [False, True][: 1 + bool(lengths)]:
        if measure_memory:
            sections.append(("Memory over sequence length", memory_section(paths, content, lengths, limit)))
        html = pages.page("Comparison of the versions", facts(content), [finding(content), *notes(content)], sections)
        (folder / "comparison.json").write_text(json.dumps(content, indent=1) + "\n")
        (folder / "report.html").write_text(html, encoding="utf-8")
    progress(f"wrote {folder / 'report.html'}")


# ---------------------------------------------------------------- main


def run(options: argparse.Namespace, rest: list[str]) -> int:
    named = {f"v{n}": getattr(options, f"v{n}") for n in SCRIPTS if getattr(options, f"v{n}") is not None}
    chosen = named or {f"v{n}": script for n, script in SCRIPTS.items()}
    paths = {name: script_path(path, f"--{name}") for name, path in chosen.items()}
    if len(paths) < 2:
        raise Failure(2, "give two folders or more, as --v1 DIR --v2 DIR, or none to compare all four")
    limit = TimeLimit(options.time_limit)
    # gradients and a profile of each version, and their memory for each length
    after = len(paths) * (2 + len(options.seq_lengths or [])) if options.report else len(paths)
    content = study(paths, ["--num-steps", str(options.num_steps), *rest], options.rounds, limit, after)
    if options.report:
        write_report(content, paths, result_folder(options.report, "--report"), options.seq_lengths, limit)
    emit(content, as_text(content), options.json)
    return 1 if content["problems"] else 0


def main(argv: list[str] | None = None) -> int:
    parser = Parser(
        "compare_versions.py",
        "Train versions alike and compare step, throughput, memory, losses and gradients; without folders all four.",
        "--v1 ../version1_pytorch_baseline --v2 . --preset small; options that are not listed go to all scripts",
    )
    add = parser.add_argument
    for n in SCRIPTS:
        add(f"--v{n}", metavar="DIR", help=f"folder, or script, of version {n}")
    add("--rounds", type=positive, default=3, metavar="N", help="runs of each version (%(default)s)")
    add("--num-steps", type=positive, default=20, metavar="N", help="steps of a run (%(default)s)")
    add_time_limit(parser)
    add("--report", metavar="FOLDER", help="profile as well, and write report.html there")
    add("--seq-lengths", type=numbers, metavar="T,..", help="memory over these lengths, for the report")
    options, rest = parser.parse_known_args(argv)
    return run_tool("compare_versions.py", lambda: run(options, rest))


if __name__ == "__main__":
    sys.exit(main())
