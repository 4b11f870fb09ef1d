#!/usr/bin/env python3
"""Measure peak memory over the sequence length for each version: where it grows linearly, where quadratically.

Every point is a training run of its own; on a GPU those of one length run side by side. From three lengths on, a
parabola a + b T + c T² through the peaks tells the part that grows with the square, which is the T x T scores of
attention where they are saved. Options that are not listed here go to all training scripts.

Exit status: 0 measured; 1 where nothing ran; 2 for bad input.
"""

import sys

from common.command_line import (
    Failure,
    Parser,
    add_time_limit,
    listed,
    load_script,
    numbers,
    on_cpu,
    run_tool,
    with_sizes,
)
from common.memory import measure
from common.runs import TimeLimit
from common.tables import emit, known, text_table
from common.versions import SCRIPTS


def as_text(content):
    rows = []
    for row in content["rows"]:
        peaks = ["out of memory" if peak is None else f"{peak:,.0f}" for peak in row["peaks_mb"]]
        share = row["square_share"]
        rows.append([f"version {row['version']}", *peaks, known(share and 100 * share, ".0f"), row["growth"] or "-"])
    header = ["peak MiB at", *(f"{length} tokens" for length in content["lengths"]), "% of growth with T²", "growth"]
    lines = [f"{content['device']}; {' '.join(content['options'])}", text_table(header, rows)]
    if content["on_cpu"]:
        lines.append("without a GPU this is the memory of the whole process, its libraries included")
    return "\n".join(lines)


def study(options, rest):
    argv = with_sizes(["--num-steps", "2", "--warmup-steps", "1", *rest])
    if options.batch_size:
        argv += ["--batch-size", str(options.batch_size)]
    lengths, scripts = sorted(set(options.seq_lengths)), {version: SCRIPTS[version] for version in options.versions}
    for script in scripts.values():  # wrong options end it here, before any training
        config = load_script(script, "--versions").parse_options([*argv, "--seq-len", str(lengths[0])])
    measured = measure(scripts, lengths, argv, TimeLimit(options.time_limit))
    if all(peak is None for row in measured["rows"] for peak in row["peaks_mb"]):
        raise Failure(1, f"not even {lengths[0]} tokens fit into memory: lower --batch-size")
    content = {"device": config.device_name, "on_cpu": on_cpu(argv), "options": argv, **measured}
    emit(content, as_text(content), options.json)


def main(argv=None):
    parser = Parser(
        "analyze_memory_scaling.py",
        "Measure peak memory over the sequence length for each version.",
        "--versions 1,2 --seq-lengths 128,256,512,1024 --batch-size 4; other options go to all training scripts",
    )
    add = parser.add_argument
    versions = listed(SCRIPTS, lambda text: int(text.removeprefix("v")))
    add("--versions", type=versions, default=list(SCRIPTS), metavar="N,..", help="(1,2,3,4)")
    add("--seq-lengths", type=numbers, default=[128, 256, 512, 1024], metavar="T,..", help="(128,256,512,1024)")
    add("--batch-size", type=int, metavar="B", help="sequences per step (the scripts' own)")
    add_time_limit(parser)
    options, rest = parser.parse_known_args(argv)
    return run_tool("analyze_memory_scaling.py", lambda: study(options, rest))


if __name__ == "__main__":
    sys.exit(main())
