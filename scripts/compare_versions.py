#!/usr/bin/env python3
"""Train versions alike, in turns, and compare step, throughput, memory, losses and gradients.

Without folders all four are compared. Each round trains every version once in a process of its own, so that what drifts
hits all of them alike. A version whose gradients are not the first one's gets no speed-up. Options that are not listed
here go to all training scripts.

Exit status: 0 compared; 1 where a version fails or computes something else; 2 for bad input.
"""

import argparse
import statistics
import sys

from analysis import Parser, emit, known, load_script, on_cpu, progress, script_path, text_table, train, with_sizes
from command_line import Failure, run_tool
from validate_numerical_accuracy import compare, outcome, verdict
from versions import SCRIPTS

TOLERANCE = {"float32": 1e-4, "lower": 3e-2}  # of losses and gradients, relative


def quartiles(values: list[float]) -> dict:
    """Median and quartiles; of a single value, itself."""
    if len(values) == 1:
        return dict.fromkeys(("p25", "median", "p75"), values[0])
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return {"p25": low, "median": middle, "p75": high}


def figures(name: str, runs: list[dict], accuracy: dict | None) -> dict:
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
    }


def add_speedups(rows: list[dict]) -> None:
    """Into each row the first one's step over its own; None where it does not compute the same."""
    for row in rows:
        right = row["trained"] == 1 and (row["accuracy"] is None or row["accuracy"]["passed"])
        row["speedup"] = rows[0]["step_ms"]["median"] / row["step_ms"]["median"] if right else None


def accuracies(paths: dict, argv: list[str], tolerance: float) -> dict:
    """name -> how far loss, logits and gradients of a version are from those of the first; None for the first."""
    reference, found = None, {}
    for name, path in paths.items():
        progress(f"{name}: gradients ...")
        result = outcome(load_script(path, f"--{name}"), argv, steps=2)
        found[name] = verdict(compare(reference, result), tolerance) if reference else None
        reference = reference or result
    return found


def as_text(content: dict) -> str:
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
    header += ["trained", "error", f"over {first}"]
    environment = rows[0]["environment"]
    text = [
        f"{environment['device']}, PyTorch {environment['torch']}, options {' '.join(content['options']) or 'none'}"
    ]
    text.append(text_table(header, lines, left=2))
    text += content["problems"]
    if content["interpreted"]:
        text.append("without a GPU version 3's kernels run in Triton's interpreter: its times mean nothing")
    return "\n".join(text)


def measure(paths: dict, argv: list[str], rounds: int) -> tuple[dict, list[str]]:
    """name -> metrics of its runs, and a sentence for each version that failed."""
    runs, problems = {name: [] for name in paths}, []
    for i in range(rounds):
        for name, path in paths.items():
            if name not in runs:
                continue
            progress(f"round {i + 1} of {rounds}, {name}: training ...")
            try:
                runs[name].append(train(path, argv))
            except Failure as error:
                if error.status == 2:
                    raise
                problems.append(f"{name}: {error}")
                del runs[name]
    return runs, problems


def study(paths: dict, argv: list[str], rounds: int) -> dict:
    """What --json writes: a row for each version that ran, and a sentence for each that failed or differs."""
    argv = with_sizes(argv)
    for name, path in paths.items():
        load_script(path, f"--{name}").parse_options(argv)  # a wrong option ends it here, before any training
    runs, problems = measure(paths, argv, rounds)
    if not runs:
        raise Failure(1, "; ".join(problems))
    lower = "--use-amp" in argv or "--tf32" in argv
    found = accuracies({name: paths[name] for name in runs}, argv, TOLERANCE["lower" if lower else "float32"])
    rows = [figures(name, runs[name], found[name]) for name in runs]
    add_speedups(rows)
    for row in rows:
        if row["speedup"] is None:
            worst = row["accuracy"] and row["accuracy"]["worst"]
            where = f", {worst['kind']} {worst['name']} is off by {worst['error']:.1e}" if worst else ""
            problems.append(
                f"{row['name']}: no speed-up is shown, for it does not compute what {rows[0]['name']} does{where}"
            )
    return {"options": argv, "rows": rows, "problems": problems, "interpreted": on_cpu(argv) and "v3" in runs}


def run(options: argparse.Namespace, rest: list[str]) -> int:
    named = {f"v{n}": getattr(options, f"v{n}") for n in SCRIPTS if getattr(options, f"v{n}") is not None}
    chosen = named or {f"v{n}": script for n, script in SCRIPTS.items()}
    paths = {name: script_path(path, f"--{name}") for name, path in chosen.items()}
    if len(paths) < 2:
        raise Failure(2, "give two folders or more, as --v1 DIR --v2 DIR, or none to compare all four")
    content = study(paths, ["--num-steps", str(options.num_steps), *rest], options.rounds)
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
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="runs of each version (%(default)s)")
    parser.add_argument("--num-steps", type=int, default=20, metavar="N", help="steps of a run (%(default)s)")
    options, rest = parser.parse_known_args(argv)
    if options.rounds < 1:
        parser.error(f"--rounds must be at least 1, not {options.rounds}")
    return run_tool("compare_versions.py", lambda: run(options, rest))


if __name__ == "__main__":
    sys.exit(main())
