#!/usr/bin/env python3
"""One table of the stages from what their runs recorded.

python compare_stages.py                            # of results/
python compare_stages.py FOLDER                     # of another folder with stage1_metrics.json, ...
"""

import argparse
import json
import pathlib
import re
import sys

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[2] / "scripts"))

from common.command_line import Failure, run_tool  # noqa: E402

HEADINGS = (
    "stage", "step ms", "samples/s", "of stage 5", "forward", "backward", "optimizer", "peak MB", "loss", "trained",
    "published", "of stage 5", "MB",
)  # fmt: skip
# What the scripts that this workshop starts from report: samples/s, and peak memory in MB.
PUBLISHED = {2: (15.2, 282), 3: (310.8, 282), 4: (306.0, 282), 5: (2065.0, 281.8)}
NOTE = """published: samples/s and peak MB of another machine, one MI325X with ROCm 6.4.4 (8 sequences of 128 tokens,
width 512, 8 layers). Weights and two moments of all parameters alone take 366 MB: what these runs left out, stage 6
shows."""


def recorded(folder):
    """Stage number -> metrics that tiny_llama_v3.py wrote."""
    found = {}
    for path in sorted(folder.glob("stage*_metrics.json")):
        try:
            metrics = json.loads(path.read_text())
        except json.JSONDecodeError:
            raise Failure(1, f"{path} is incomplete: run run_all_stages.sh again") from None
        if metrics["summary"]:
            found[int(re.search(r"stage(\d+)", path.name)[1])] = metrics
    if not found:
        raise Failure(1, f"{folder} holds no stage*_metrics.json: run run_all_stages.sh first")
    return found


def share(rate, rates):
    return f"{100 * rate / rates[5]:.1f} %" if 5 in rates else "-"


def published(stage):
    """The last three cells of a row."""
    if stage not in PUBLISHED:
        return "-", "-", "-"
    rate, memory = PUBLISHED[stage]
    return f"{rate:.1f}", share(rate, {number: figures[0] for number, figures in PUBLISHED.items()}), f"{memory:g}"


def row(stage, summary, rates):
    """Cells; rates: samples/s by stage."""

    def phase(name):
        value = summary[f"{name}_ms"]
        return "-" if value is None else f"{value:.3f}"

    return (
        str(stage),
        f"{summary['step_ms']['median']:.3f}",
        f"{summary['samples_per_second']:.1f}",
        share(rates[stage], rates),
        *map(phase, ("forward", "backward", "optimizer")),
        f"{summary['peak_memory_mb']:.1f}",
        f"{summary['first_loss']:.4f} -> {summary['final_loss']:.4f}",
        f"{100 * summary['parameters_trained'] / summary['parameters']:.1f} %",
        *published(stage),
    )


def origin(metrics):
    """Where and of what a table's figures come; raises Failure where the runs differ in it."""
    kinds = set()
    for run in metrics.values():
        environment, config, options = run["environment"], run["config"], run["options"]
        batch = f"B {options['batch_size']}, T {options['seq_len']}"
        size = f"{batch}, {config['num_layers']} layers of {config['hidden_dim']}"
        kinds.add(f"{environment['device']}, torch {environment['torch']}, triton {environment['triton']}; {size}")
    if len(kinds) > 1:
        raise Failure(
            1, f"the stages were run differently, so that they cannot be compared: {' | '.join(sorted(kinds))}"
        )
    return kinds.pop()


def main():
    parser = argparse.ArgumentParser(prog="compare_stages.py", description="One table of the stages' recorded runs.")
    parser.add_argument("folder", nargs="?", default=HERE / "results", type=pathlib.Path, help="(results)")
    metrics = recorded(parser.parse_args().folder)
    print(origin(metrics))
    rates = {stage: run["summary"]["samples_per_second"] for stage, run in metrics.items()}
    rows = [HEADINGS, *(row(stage, run["summary"], rates) for stage, run in sorted(metrics.items()))]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for cells in rows:
        print("  ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True)))
    print(NOTE)
    if any(run["environment"]["device_type"] == "cpu" for run in metrics.values()):
        print("measured: in Triton's interpreter, so that times and speeds mean nothing; losses and shares trained do.")


if __name__ == "__main__":
    sys.exit(run_tool("compare_stages.py", main))
