#!/usr/bin/env python3
"""Find the best batch size of a version on this device by training with each: the largest that fits, or the fastest.

example: python optimize_batch_size.py --target-memory-usage 0.8 --seq-len 128 --optimization-target throughput

The batch doubles until two doublings in a row bring no more throughput, the peak passes the share of memory that you
allow, or the device runs out of memory. Every try is a process of its own, so running out of memory does no harm.
Options that aren't listed here go to the training script, after --num-steps 10.
"""

import contextlib
import os
import sys

from common.command_line import Failure, Parser, add_version_option, positive, progress, version_meant, with_sizes
from common.measuring.runs import OutOfMemory, followed, train
from common.tables import columns, emit, text_table
from common.versions import SCRIPTS, load_version

COLUMNS = (
    "batch: {batch_size} | step ms: {step_ms:r} | samples/s: {samples_per_second:,.1f} | "
    "peak MiB: {peak_memory_mb:,.0f} | : {outcome}"
)
ENOUGH = 1.02  # a larger batch must give so many times the samples a second to be worth its memory


def device_memory_mb(config):
    """Return the memory of the device in MiB: the GPU's, or the machine's."""
    import torch

    if config.on_gpu:
        return torch.cuda.get_device_properties(config.device).total_memory / 2**20
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**20


def search(probe, budget_mb, largest, to_the_limit):
    """Return a row per batch size, a power of two, up to the first that does not fit.

    probe(batch size) returns a summary or raises OutOfMemory. Without to_the_limit, stop when a larger batch gives no
    more throughput.
    """
    rows, batch_size = [], 1
    while batch_size <= largest:
        row = {"batch_size": batch_size, "samples_per_second": None, "step_ms": None, "peak_memory_mb": None}
        rows.append(row | {"outcome": "out of memory"})
        with contextlib.suppress(OutOfMemory):
            summary = probe(batch_size)
            row = {key: summary[key] for key in ("samples_per_second", "peak_memory_mb")}
            outcome = "fits" if row["peak_memory_mb"] <= budget_mb else "above the limit"
            rows[-1] |= row | {"step_ms": summary["step_ms"]["median"], "outcome": outcome}
        rates = [row["samples_per_second"] for row in rows]
        if rows[-1]["outcome"] != "fits":
            break
        if not to_the_limit and len(rates) > 2 and max(rates[-2:]) < ENOUGH * max(rates[:-2]):
            break
        batch_size *= 2
    return rows


def best(rows, target):
    """Return the largest batch that fits, or for throughput the fastest; None if none fits."""
    fitting = [row for row in rows if row["outcome"] == "fits"]
    if target == "throughput":
        return max(fitting, key=lambda row: row["samples_per_second"], default=None)
    return fitting[-1] if fitting else None


def nearly_as_fast(rows, found):
    """Return the smallest batch whose samples per second are within 2 % of the best one's."""
    least = found["samples_per_second"] / ENOUGH
    return next(row for row in rows if row["outcome"] == "fits" and row["samples_per_second"] > least)


def as_text(content):
    found = content["best"]
    share = 100 * found["peak_memory_mb"] / content["device_memory_mb"]
    lines = [
        f"version {content['version']}, up to {content['budget_mb']:,.0f} of {content['device_memory_mb']:,.0f} MiB",
        text_table(*columns(COLUMNS, content["probes"]), left=0),
        f"best for {content['target']}: --batch-size {found['batch_size']}, {found['samples_per_second']:,.1f} "
        f"samples/s, {found['peak_memory_mb']:,.0f} MiB ({share:.1f} % of the device)",
    ]
    largest = content["probes"][-1]
    if content["target"] == "memory" and largest["outcome"] == "fits":
        lines.append(f"a larger one may fit: --max-batch-size ended the search after {largest['batch_size']}")
    smaller = nearly_as_fast(content["probes"], found)
    if content["target"] == "throughput" and smaller is not found:
        rate = smaller["samples_per_second"]
        peak = smaller["peak_memory_mb"]
        lines.append(f"within 2 % of it: --batch-size {smaller['batch_size']}, {rate:,.1f} samples/s, {peak:,.0f} MiB")
    return "\n".join(lines)


def optimize(options, rest):
    if not 0 < options.target_memory_usage <= 1:
        raise Failure(2, f"--target-memory-usage must be above 0 and at most 1, got {options.target_memory_usage}")
    version = version_meant(options.version)
    argv = with_sizes(["--num-steps", "10", *rest])
    config = load_version(version).parse_options(argv)

    def probe(batch_size):
        progress(f"batch size {batch_size} ...")
        return train(SCRIPTS[version], [*argv, "--batch-size", str(batch_size)], tell=followed())["summary"]

    memory, target = device_memory_mb(config), options.optimization_target
    budget = options.target_memory_usage * memory
    probes = search(probe, budget, options.max_batch_size, to_the_limit=target == "memory")
    found = best(probes, target)
    if found is None:
        raise Failure(1, f"not even one sequence of {config.seq_len} tokens stays within {budget:,.0f} MiB")
    content = {"version": version, "options": argv, "target": target, "device_memory_mb": memory}
    content |= {"budget_mb": budget, "probes": probes, "best": found}
    emit(content, as_text(content), options.json)


def main(argv=None):
    parser = Parser("optimize_batch_size.py", __doc__)
    add = parser.add_argument
    add("--target-memory-usage", type=float, default=0.8, metavar="X", help="share of memory (%(default)s)")
    add("--optimization-target", choices=["throughput", "memory"], default="throughput", help="(%(default)s)")
    add("--max-batch-size", type=positive, default=4096, metavar="B", help="largest to try (%(default)s)")
    add_version_option(parser)
    return parser.run(optimize, argv, passes_on=True)


if __name__ == "__main__":
    sys.exit(main())
