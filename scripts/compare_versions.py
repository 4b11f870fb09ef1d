#!/usr/bin/env python3
"""Train versions alike, in turns, and compare step, throughput, memory, losses and gradients.

Without folders all four are compared. Each round trains every version once in a process of its own, so that what drifts
hits all of them alike. A version whose gradients are not the first one's gets no speed-up. With --report FOLDER every
version is profiled as well, and report.html holds tables and pictures: steps, kernels by group, a roofline of each, and
with --seq-lengths memory over the sequence length. Options that are not listed here go to all training scripts.

Exit status: 0 compared; 1 where a version fails or computes something else; 2 for bad input.
"""

import argparse
import functools
import json
import pathlib
import statistics
import sys

import analyze_memory_scaling as memory
from analyze_kernel_reduction import counts
from common import report_page
from common.analysis import (
    Parser,
    TimeLimit,
    add_time_limit,
    emit,
    known,
    load_script,
    numbers,
    on_cpu,
    positive,
    progress,
    script_path,
    text_table,
    train,
    with_sizes,
)
from common.command_line import Failure, result_folder, run_tool
from common.traces import Profile, ceilings_for, operator_table, read_profile, steps_needed
from common.versions import SCRIPTS
from kernel_times import GROUPS
from memory_bandwidth_analyzer import bandwidth_rows, roofline
from validate_numerical_accuracy import compare, outcome, verdict

TOLERANCE = {"float32": 1e-4, "lower": 3e-2}  # of losses and gradients, relative


def quartiles(values: list[float]) -> dict:
    """Median and quartiles; of a single value, itself."""
    if len(values) == 1:
        return dict.fromkeys(("p25", "median", "p75"), values[0])
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return {"p25": low, "median": middle, "p75": high}


def figures(name: str, runs: list[dict], accuracy: dict | None, interpreted: bool = False) -> dict:
    """The row of a version from its runs; steps of all runs count alike."""
    summaries = [run["summary"] for run in runs]
    step = quartiles([step["step_ms"] for run in runs for step in run["steps"]])
    options = runs[0]["options"]
    phases = {}
    for phase in ("forward_ms", "backward_ms", "optimizer_ms"):
        values = [summary[phase] for summary in summaries]
        phases[phase] = None if None in values else statistics.median(values)
    return {
        "name": name,
        "runs": len(runs),
        "step_ms": step,
        **phases,
        "samples_per_second": 1e3 * options["batch_size"] / step["median"],
        "tokens_per_second": 1e3 * options["batch_size"] * options["seq_len"] / step["median"],
        "tflops": summaries[0]["flops_per_step"] / step["median"] / 1e9,
        "mfu": summaries[0]["mfu"] and summaries[0]["mfu"] * summaries[0]["step_ms"]["median"] / step["median"],
        "peak_memory_mb": max(summary["peak_memory_mb"] for summary in summaries),
        "first_loss": summaries[0]["first_loss"],
        "final_loss": summaries[0]["final_loss"],
        "trained": min(summary["parameters_trained"] / summary["parameters"] for summary in summaries),
        "captured": all(summary["graph"]["captured"] for summary in summaries),
        "environment": runs[0]["environment"],
        "accuracy": accuracy,
        "interpreted": interpreted,
    }


def right(row: dict) -> bool:
    """Whether a version trains every parameter and computes what the first one does."""
    return row["trained"] == 1 and (row["accuracy"] is None or row["accuracy"]["passed"])


def add_speedups(rows: list[dict]) -> None:
    """Into each row the first one's step over its own; None where that means nothing."""
    for row in rows:
        timed = right(row) and not (row["interpreted"] or rows[0]["interpreted"])
        row["speedup"] = rows[0]["step_ms"]["median"] / row["step_ms"]["median"] if timed else None


def accuracies(paths: dict, argv: list[str], tolerance: float) -> dict:
    """name -> how far loss, logits and gradients of a version are from those of the first; None for the first."""
    reference, found = None, {}
    for name, path in paths.items():
        progress(f"{name}: gradients ...")
        result = outcome(load_script(path, f"--{name}"), argv, steps=2)
        found[name] = verdict(compare(reference, result), tolerance) if reference else None
        reference = reference or result
    return found


def table_of(content: dict) -> tuple[list[str], list[list[str]]]:
    """Heading and cells of the table of versions."""
    rows, first = content["rows"], content["rows"][0]["name"]
    lines = []
    for row in rows:
        step = row["step_ms"]
        worst = row["accuracy"] and f"{row['accuracy']['worst']['error']:.1e}"
        lines.append(
            [row["name"], "graph" if row["captured"] else "eager", f"{step['median']:.3f}"]
            + [f"{step['p25']:.3f} - {step['p75']:.3f}"]
            + [known(row[f"{phase}_ms"], ".3f") for phase in ("forward", "backward", "optimizer")]
            + [f"{row['tokens_per_second']:,.0f}", f"{row['peak_memory_mb']:,.0f}", f"{row['final_loss']:.4f}"]
            + [f"{row['trained']:.0%}", worst or "-", known(row["speedup"], ".2f") + "x" * (row["speedup"] is not None)]
        )
    header = ["", "runs", "step ms", "quartiles", "forward", "backward", "optimizer", "tokens/s", "peak MB", "loss"]
    return [*header, "trained", "error", f"over {first}"], lines


def machine(content: dict) -> str:
    environment = content["rows"][0]["environment"]
    return f"{environment['device']}, PyTorch {environment['torch']}; {' '.join(content['options'])}"


def notes(content: dict) -> list[str]:
    """What a reader of the figures must know."""
    interpreted = "without a GPU version 3's kernels run in Triton's interpreter: its times mean nothing"
    return [*content["problems"], *[interpreted] * any(row["interpreted"] for row in content["rows"])]


def finding(content: dict) -> str:
    """What the report says first: the fastest of the versions that compute the same."""
    first = content["rows"][0]
    best = min((row for row in content["rows"] if row["speedup"]), key=lambda row: row["step_ms"]["median"])
    step = f"{best['step_ms']['median']:,.3f} ms a step"
    if best is first:
        return f"No version is faster than {first['name']}, which takes {step}."
    sure = best["step_ms"]["p75"] < first["step_ms"]["p25"]
    return (
        f"{best['name'].capitalize()} is the fastest: {step}, {best['speedup']:.2f} times as fast as {first['name']}"
        f"{'.' if sure else ', which the spread leaves open.'}"
    )


def figures_table(content: dict) -> str:
    """The table of versions for a page: a column for each, a row for each figure, so that it fits a phone."""
    rows = content["rows"]

    def cells(pattern, values):
        return [known(value, pattern) for value in values]

    lines = [
        ["how it ran", *("graph" if row["captured"] else "eager" for row in rows)],
        ["step, median ms", *cells(",.3f", (row["step_ms"]["median"] for row in rows))],
        ["lower quartile ms", *cells(",.3f", (row["step_ms"]["p25"] for row in rows))],
        ["upper quartile ms", *cells(",.3f", (row["step_ms"]["p75"] for row in rows))],
    ]
    for key in ("forward", "backward", "optimizer"):
        lines.append([f"{key} ms", *cells(",.3f", (row[f"{key}_ms"] for row in rows))])
    for name, key, pattern in (
        ("tokens/s", "tokens_per_second", ",.0f"), ("TFLOP/s", "tflops", ",.3f"), ("MFU", "mfu", ".1%"),
        ("peak memory MB", "peak_memory_mb", ",.0f"), ("last loss", "final_loss", ".4f"), ("trained", "trained", ".0%"),
    ):  # fmt: skip
        lines.append([name, *cells(pattern, (row[key] for row in rows))])
    errors = [row["accuracy"] and row["accuracy"]["worst"]["error"] for row in rows]
    lines.append(["largest relative error", *cells(".1e", errors)])
    lines.append([f"times {rows[0]['name']}'s speed", *cells(".2f", (row["speedup"] for row in rows))])
    return report_page.table(["", *(row["name"] for row in rows)], lines)


def as_text(content: dict) -> str:
    return "\n".join([machine(content), text_table(*table_of(content), left=2), *notes(content)])


def profiles_of(content: dict, paths: dict, folder: pathlib.Path) -> dict[str, Profile]:
    """name -> profile of some more steps of each version whose times mean something, its trace kept in the folder."""
    found = {}
    for row in content["rows"]:
        name = row["name"]
        if row["interpreted"]:
            continue
        progress(f"{name}: profiling ...")
        place = result_folder(str(folder / f"profile_{name}"))
        train(paths[name], [*content["options"], "--enable-pytorch-profiler", "--profile-dir", str(place)])
        found[name] = read_profile(place)
    return found


def kernel_section(profiles: dict[str, Profile], content: dict, folder: pathlib.Path) -> list[str]:
    """The stacked bars and the table of kernels by group; the figures go into the content too."""
    counted = {name: counts(profile, steps_needed(profile)) for name, profile in profiles.items()}
    content["kernels"] = {name: {key: c[key] for key in ("calls_a_step", "groups")} for name, c in counted.items()}
    what = next(iter(profiles.values())).what
    columns = {name: {group: part["ms"] for group, part in c["groups"].items()} for name, c in counted.items()}
    report_page.group_bars(folder / "kernel_groups.png", columns, what)
    rows = [
        [f"{group} ms", *(f"{column.get(group, 0.0):,.3f}" for column in columns.values())]
        for group in GROUPS
        if any(group in column for column in columns.values())
    ]
    rows.append(["all ms", *(f"{c['ms_a_step']:,.3f}" for c in counted.values())])
    rows.append([f"{what} a step", *(f"{c['calls_a_step']:,.0f}" for c in counted.values())])
    return [
        report_page.picture(
            folder / "kernel_groups.png", f"Time of each group of {what} in a step, profiled without a graph."
        ),
        report_page.table(["", *columns], rows),
    ]


def roofline_section(profiles: dict[str, Profile], content: dict, folder: pathlib.Path) -> list[str]:
    """A roofline picture for each version with the operators of its step."""
    progress("measuring this device's ceilings ...")
    ceilings, origin = ceilings_for(next(iter(profiles.values())), None)
    content["ceilings"] = ceilings
    if ceilings is None:
        return [report_page.paragraph(f"No roofline: {origin}.")]
    roofs = f"{ceilings['matmul_tflops']:,.3f} TFLOP/s of a large product, {ceilings['copy_tb_s']:,.3f} TB/s of a copy"
    meaning = "A disc above the line found its data in a cache."
    parts = [report_page.paragraph(f"The lines are this device's ceilings, {origin}: {roofs}. {meaning}")]
    for name, profile in profiles.items():
        rows = bandwidth_rows(operator_table(profile, steps_needed(profile), ceilings), ceilings)
        if rows:
            path = folder / f"roofline_{name}.png"
            roofline(path, rows, ceilings, f"Operators of a step of {name}")
            parts.append(report_page.picture(path, f"Roofline of {name}: what each operator reaches."))
        else:
            parts.append(report_page.paragraph(f"No roofline of {name}: its profile recorded no shapes.", small=True))
    return parts


def memory_section(paths: dict, content: dict, lengths: list[int], folder: pathlib.Path, limit: TimeLimit) -> list[str]:
    """Memory over the sequence length: the lines, and their figures."""
    scripts = {int(row["name"][1:]): paths[row["name"]] for row in content["rows"]}
    device = content["rows"][0]["environment"]["device"]
    measured = memory.measure(scripts, lengths, [*content["options"], "--num-steps", "2"], limit)
    if not measured["lengths"]:
        return [report_page.paragraph("No time was left to measure it.")]
    content["memory"] = {"device": device, **measured}
    memory.draw(folder / "memory.png", content["memory"])
    lengths, rows = measured["lengths"], measured["rows"]
    peaks = zip(*(row["peaks_mb"] for row in rows), strict=True)
    cells = [
        [f"{length} tokens, MB", *(known(p, ",.1f") for p in of)] for length, of in zip(lengths, peaks, strict=True)
    ]
    cells.append(["growth", *(row["growth"] or "-" for row in rows)])
    return [
        report_page.picture(folder / "memory.png", "Peak memory over the length of the sequences."),
        report_page.table(["", *(f"v{row['version']}" for row in rows)], cells),
    ]


def write_report(content: dict, paths: dict, folder: pathlib.Path, lengths: list[int] | None, limit: TimeLimit) -> None:
    """report.html, its pictures, the traces and comparison.json in the folder."""
    timed = [row for row in content["rows"] if row["speedup"] is not None]
    if not timed:
        raise Failure(1, f"no report: {'; '.join(notes(content))}")
    profiles = profiles_of(content, paths, folder)
    report_page.step_bars(folder / "steps.png", timed)
    words = [report_page.paragraph(finding(content)), *map(report_page.paragraph, notes(content))]
    steps = report_page.picture(folder / "steps.png", f"Time of a step, and times {timed[0]['name']}'s speed.")
    sections = [
        ("The steps", [*words, steps, figures_table(content), report_page.paragraph(machine(content), small=True)]),
        ("Where the time goes", kernel_section(profiles, content, folder)),
        ("Roofline", roofline_section(profiles, content, folder)),
    ]
    keep_report(content, sections, folder)
    if lengths:
        sections.append(("Memory over sequence length", memory_section(paths, content, lengths, folder, limit)))
        keep_report(content, sections, folder)
    progress(f"wrote {folder / 'report.html'}")


def keep_report(content: dict, sections: list, folder: pathlib.Path) -> None:
    (folder / "comparison.json").write_text(json.dumps(content, indent=1) + "\n")
    (folder / "report.html").write_text(report_page.page("Comparison of the versions", sections), encoding="utf-8")


def measure(paths: dict, argv: list[str], rounds: int, limit: TimeLimit, after: int) -> tuple[dict, list[str]]:
    """name -> metrics of its runs, and a sentence for each version that failed.

    A round after the first is left out where the limit has no room for it and for what comes after: so many runs.
    """
    runs, problems = {name: [] for name in paths}, []
    for i in range(rounds):
        if not limit.room(len(runs) + after):
            progress(f"no time is left for round {i + 1} of {rounds}")
            break
        for name, path in paths.items():
            if name not in runs:
                continue
            progress(f"round {i + 1} of {rounds}, {name}: training ...")
            try:
                runs[name].append(limit.timed(functools.partial(train, path, argv)))
            except Failure as error:
                if error.status == 2:
                    raise
                problems.append(f"{name}: {error}")
                del runs[name]
    return runs, problems


def study(paths: dict, argv: list[str], rounds: int, limit: TimeLimit, after: int) -> dict:
    """What --json writes: a row for each version that ran, and a sentence for each that failed or differs."""
    argv = with_sizes(argv)
    for name, path in paths.items():
        load_script(path, f"--{name}").parse_options(argv)  # a wrong option ends it here, before any training
    runs, problems = measure(paths, argv, rounds, limit, after)
    if not runs:
        raise Failure(1, "; ".join(problems))
    lower = "--use-amp" in argv or "--tf32" in argv
    found = accuracies({name: paths[name] for name in runs}, argv, TOLERANCE["lower" if lower else "float32"])
    interpreted = "v3" if on_cpu(argv) else None
    rows = [figures(name, runs[name], found[name], name == interpreted) for name in runs]
    add_speedups(rows)
    for row in rows:
        if not right(row):
            worst = row["accuracy"] and row["accuracy"]["worst"]
            where = f", {worst['kind']} {worst['name']} is off by {worst['error']:.1e}" if worst else ""
            problems.append(
                f"{row['name']}: no speed-up is shown, for it does not compute what {rows[0]['name']} does{where}"
            )
    return {"options": argv, "rows": rows, "problems": problems}


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
        write_report(content, paths, result_folder(options.report), options.seq_lengths, limit)
    emit(content, as_text(content), options.json)
    return 1 if content["problems"] else 0


def main(argv: list[str] | None = None) -> int:
    parser = Parser(
        "compare_versions.py",
        "Train versions alike and compare step, throughput, memory, losses and gradients; without folders all four.",
        "--v1 ../version1_pytorch_baseline --v2 . --preset small; options that are not listed go to all scripts",
    )
    for n in SCRIPTS:
        parser.add_argument(f"--v{n}", metavar="DIR", help=f"folder, or script, of version {n}")
    parser.add_argument("--rounds", type=positive, default=3, metavar="N", help="runs of each version (%(default)s)")
    parser.add_argument("--num-steps", type=int, default=20, metavar="N", help="steps of a run (%(default)s)")
    add_time_limit(parser)
    parser.add_argument("--report", metavar="FOLDER", help="profile as well, and write report.html there")
    parser.add_argument("--seq-lengths", type=numbers, metavar="T,..", help="memory over these lengths, for the report")
    options, rest = parser.parse_known_args(argv)
    return run_tool("compare_versions.py", lambda: run(options, rest))


if __name__ == "__main__":
    sys.exit(main())
