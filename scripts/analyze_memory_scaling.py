#!/usr/bin/env python3
"""Peak memory over the sequence length for each version, side by side: where it grows linearly, where with the square.

Every point is a training run of its own; on a GPU those of one length run side by side. From three lengths on, a
parabola a + b T + c T² through the peaks tells the part that grows with the square, which is the T x T scores of
attention where they are kept in memory. Options that are not listed here go to all training scripts.

Exit status: 0 measured; 1 where nothing ran, or the picture needs matplotlib; 2 for bad input.
"""

import argparse
import concurrent.futures
import functools
import pathlib
import sys

from common.analysis import (
    OutOfMemory,
    Parser,
    TimeLimit,
    add_time_limit,
    emit,
    known,
    legend_below,
    load_script,
    matplotlib_figure,
    numbers,
    on_cpu,
    progress,
    text_table,
    train,
    with_sizes,
)
from common.command_line import Failure, run_tool
from common.versions import SCRIPTS

QUADRATIC = 0.25  # share of the growth from which on it counts as quadratic
COLOURS = {1: "#777777", 2: "#4477aa", 3: "#ee6677", 4: "#228833"}


def parabola(lengths: list[int], peaks: list[float]) -> tuple[float, float, float] | None:
    """a, b, c of the least-squares a + b T + c T², or None with fewer than three lengths."""
    import numpy as np

    if len(lengths) < 3:
        return None
    c, b, a = np.polyfit(lengths, peaks, 2)
    return float(a), float(b), float(c)


def growth(lengths: list[int], peaks: list[float]) -> dict:
    """How much of the growth from the shortest to the longest sequence is the square's, and what that makes it.

    growth is None where it cannot be told: from fewer than three lengths, or where memory did not grow.
    """
    fit = parabola(lengths, peaks)
    if fit is None or peaks[-1] <= peaks[0]:
        return {"fit": fit, "square_mb": None, "square_share": None, "growth": None}
    square = fit[2] * (lengths[-1] ** 2 - lengths[0] ** 2)
    share = min(1.0, max(0.0, square / (peaks[-1] - peaks[0])))
    return {
        "fit": fit,
        "square_mb": fit[2] * lengths[-1] ** 2,
        "square_share": share,
        "growth": "quadratic" if share > QUADRATIC else "linear",
    }


def peak_of(script: pathlib.Path, argv: list[str]) -> float | None:
    try:
        return train(script, argv)["summary"]["peak_memory_mb"]
    except OutOfMemory:
        return None


def peaks_side_by_side(scripts: dict[int, pathlib.Path], argv: list[str]) -> dict[int, float | None]:
    """Each version's peak in MB, all run at once; who runs out of memory among the others runs once more alone."""
    with concurrent.futures.ThreadPoolExecutor(len(scripts)) as pool:
        found = dict(zip(scripts, pool.map(lambda script: peak_of(script, argv), scripts.values()), strict=True))
    if len(scripts) > 1:
        found |= {version: peak_of(scripts[version], argv) for version, peak in found.items() if peak is None}
    return found


def measure(scripts: dict[int, pathlib.Path], lengths: list[int], argv: list[str], limit: TimeLimit) -> dict:
    """{"lengths", "rows"}: for each version its peaks in MB, None where it ran out of memory, and how they grow.

    Goes up the lengths, and ends before one that the time limit leaves no room for.
    """
    peaks: dict[int, list[float | None]] = {version: [] for version in scripts}
    one_by_one = on_cpu(argv)  # whose memory and cores all processes share
    for place, length in enumerate(lengths):
        if not limit.room(len(scripts) if one_by_one else 1):
            progress(f"no time is left for {', '.join(map(str, lengths[place:]))} tokens")
            lengths = lengths[:place]
            break
        sized, found = [*argv, "--seq-len", str(length)], {}
        if one_by_one:
            for version, script in scripts.items():
                progress(f"{length} tokens, version {version} ...")
                found[version] = limit.timed(functools.partial(peak_of, script, sized))
        else:
            progress(f"{length} tokens, all versions ...")
            found = limit.timed(functools.partial(peaks_side_by_side, scripts, sized))
        for version, peak in found.items():
            peaks[version].append(peak)
    rows = []
    for version, found in peaks.items():
        pairs = [(length, peak) for length, peak in zip(lengths, found, strict=True) if peak is not None]
        rows.append(
            {
                "version": version,
                "peaks_mb": found,
                **(growth(*zip(*pairs, strict=True)) if pairs else {"growth": None}),
            }
        )
    return {"lengths": lengths, "rows": rows}


def draw(path: pathlib.Path, content: dict) -> None:
    """Peak memory over length, a line for each version; a cross at the top where it ran out of memory."""
    lengths = content["lengths"]
    with matplotlib_figure(path, height=3.4) as (figure, axes):
        top = max((peak for row in content["rows"] for peak in row["peaks_mb"] if peak is not None), default=1.0)
        for row in content["rows"]:
            colour, label = COLOURS[row["version"]], f"version {row['version']}"
            pairs = [(t, p) for t, p in zip(lengths, row["peaks_mb"], strict=True) if p is not None]
            label += f": {row['growth']}" if row["growth"] else ""
            axes.plot([t for t, _ in pairs], [p for _, p in pairs], "o-", color=colour, label=label, linewidth=2)
            lost = [t for t, p in zip(lengths, row["peaks_mb"], strict=True) if p is None]
            axes.plot(lost, [1.05 * top] * len(lost), "x", color=colour, markersize=10)
            for length in lost:
                axes.annotate(
                    "out of memory", (length, 1.05 * top), xytext=(-8, -3), textcoords="offset points", ha="right"
                )
        axes.set(xlabel="tokens in a sequence", ylabel="peak memory, MB", title=f"Training memory, {content['device']}")
        axes.set_xticks(lengths)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        legend_below(figure, *axes.get_legend_handles_labels(), columns=2)


def as_text(content: dict) -> str:
    rows = []
    for row in content["rows"]:
        peaks = ["out of memory" if peak is None else f"{peak:,.1f}" for peak in row["peaks_mb"]]
        share = row.get("square_share")
        rows.append([f"version {row['version']}", *peaks, known(share and 100 * share, ".0f"), row["growth"] or "-"])
    header = ["peak MB at", *(f"{length} tokens" for length in content["lengths"]), "% of growth with T²", "growth"]
    lines = [f"{content['device']}; {' '.join(content['options'])}", text_table(header, rows)]
    if content["on_cpu"]:
        lines.append("without a GPU this is the memory of the whole process, its libraries included")
    return "\n".join(lines)


def study(options: argparse.Namespace, rest: list[str]) -> None:
    argv = with_sizes(["--num-steps", "2", "--warmup-steps", "1", *rest])
    if options.batch_size:
        argv += ["--batch-size", str(options.batch_size)]
    lengths = sorted(set(options.seq_lengths))
    for version in options.versions:
        script = load_script(SCRIPTS[version], "--versions")
        chosen = script.parse_options([*argv, "--seq-len", str(lengths[0])])
    measured = measure(
        {version: SCRIPTS[version] for version in options.versions}, lengths, argv, TimeLimit(options.time_limit)
    )
    if all(peak is None for row in measured["rows"] for peak in row["peaks_mb"]):
        raise Failure(1, f"not even {lengths[0]} tokens fit into memory: lower --batch-size")
    import torch

    device = script.device_name(torch.device(chosen.device))
    content = {"device": device, "on_cpu": on_cpu(argv), "options": argv, **measured}
    if options.picture:
        draw(pathlib.Path(options.picture), content)
        progress(f"drew {options.picture}")
    emit(content, as_text(content), options.json)


def versions_of(text: str) -> list[int]:
    chosen = numbers(text.replace("v", ""))
    if not set(chosen) <= set(SCRIPTS):
        raise argparse.ArgumentTypeError(f"{text!r}: choose from {', '.join(map(str, SCRIPTS))}")
    return list(dict.fromkeys(chosen))


def main(argv: list[str] | None = None) -> int:
    parser = Parser(
        "analyze_memory_scaling.py",
        "Peak memory over the sequence length, for each version side by side.",
        "--versions 1,2 --seq-lengths 128,256,512,1024 --batch-size 4 --picture memory.png; other options "
        "go to all training scripts",
    )
    parser.add_argument("--versions", type=versions_of, default=list(SCRIPTS), metavar="N,..", help="(1,2,3,4)")
    parser.add_argument(
        "--seq-lengths", type=numbers, default=[128, 256, 512, 1024], metavar="T,..", help="(128,256,512,1024)"
    )
    parser.add_argument("--batch-size", type=int, metavar="B", help="sequences in a step (the scripts' own)")
    parser.add_argument("--picture", metavar="PNG", help="draw the lines (needs matplotlib)")
    add_time_limit(parser)
    options, rest = parser.parse_known_args(argv)
    return run_tool("analyze_memory_scaling.py", lambda: study(options, rest))


if __name__ == "__main__":
    sys.exit(main())
