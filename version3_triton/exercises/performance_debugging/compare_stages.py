#!/usr/bin/env python3
"""Print one table of the stages from the metrics that their runs recorded.

python compare_stages.py                            # the runs in results/
python compare_stages.py results repaired           # and those in another folder, below them
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
    "stage",
    "step ms",
    "samples/s",
    "of stage 5",
    "forward",
    "backward",
    "optimizer",
    "peak MiB",
    "loss",
    "trained",
)


def read_metrics(folder):
    """Return {stage: metrics that tiny_llama_v3.py wrote} of a folder."""
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


def describe_row(stage, summary, reference):
    """Return the cells of a stage; reference: samples/s of stage 5, or None."""

    def phase(name):
        value = summary[f"{name}_ms"]
        return "-" if value is None else f"{value:.3f}"

    return (
        str(stage),
        f"{summary['step_ms']['median']:.3f}",
        f"{summary['samples_per_second']:.1f}",
        f"{100 * summary['samples_per_second'] / reference:.1f} %" if reference else "-",
        *map(phase, ("forward", "backward", "optimizer")),
        f"{summary['peak_memory_mb']:.1f}",
        f"{summary['first_loss']:.4f} -> {summary['final_loss']:.4f}",
        f"{100 * summary['parameters_trained'] / summary['parameters']:.1f} %",
    )


def describe_setup(runs):
    """Return device, versions and sizes of the runs; raise Failure if the runs differ in them."""
    setups = set()
    for run in runs:
        environment, options = run["environment"], run["options"]
        sizes = f"B {options['batch_size']}, T {options['seq_len']}, {options['num_layers']} layers of "
        versions = f"torch {environment['torch']}, triton {environment['triton']}"
        setups.add(f"{environment['device']}, {versions}; {sizes}{options['hidden_dim']}")
    if len(setups) > 1:
        raise Failure(1, f"the stages cannot be compared, their setups differ: {' | '.join(sorted(setups))}")
    return setups.pop()


def main():
    parser = argparse.ArgumentParser(
        prog="compare_stages.py", description="Print one table of the stages' recorded runs."
    )
    parser.add_argument("folders", nargs="*", default=[HERE / "results"], type=pathlib.Path, help="(results)")
    folders = {folder: read_metrics(folder) for folder in parser.parse_args().folders}
    runs = [run for metrics in folders.values() for run in metrics.values()]
    print(describe_setup(runs))
    rates = [metrics[5]["summary"]["samples_per_second"] for metrics in folders.values() if 5 in metrics]
    for folder, metrics in folders.items():
        rows = [HEADINGS, *(describe_row(stage, run["summary"], rates and rates[0]) for stage, run in metrics.items())]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        if len(folders) > 1:
            print(folder.name)
        for cells in rows:
            print("  ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True)))
    if any(run["environment"]["device_type"] == "cpu" for run in runs):
        print("measured in Triton's interpreter: times mean nothing, losses and trained parameters do")


if __name__ == "__main__":
    sys.exit(run_tool("compare_stages.py", main))
