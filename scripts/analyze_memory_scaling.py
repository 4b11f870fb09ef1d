#!/usr/bin/env python3
"""Measure each version's peak memory over the sequence length: does it grow linearly or quadratically?

example: python analyze_memory_scaling.py --versions 1,2 --seq-lengths 128,256,512,1024 --batch-size 4

Every point is a training run of its own. With three lengths or more, the tool fits a + b T + c T² to the peaks. The
part with T² is attention's T x T scores, if a version saves them. Options that aren't listed here go to all training
scripts.
"""

import contextlib
import functools
import os
import sys

from common.command_line import Failure, Parser, add_time_limit, listed, numbers, on_cpu, progress, with_sizes
from common.machine.description import without_folders
from common.measuring.runs import OutOfMemory, TimeLimit, followed, train
from common.tables import emit, known, text_table
from common.versions import SCRIPTS, load_version

QUADRATIC = 0.25  # fraction of the growth from which on it counts as quadratic
GREW = 1.05  # memory that grew less is called neither: a process's memory varies
# Freed blocks of this many bytes leave the process: glibc would keep some in its heap, and how many is chance.
RETURN_FREED = {"MALLOC_MMAP_THRESHOLD_": str(2**16)}


def growth(lengths, peaks):
    """Fit a + b T + c T² and return how much of the growth from shortest to longest is quadratic.

    growth is None where it cannot be told: from fewer than three lengths, or where memory hardly grew.
    """
    import numpy as np

    if len(lengths) < 3 or peaks[-1] < GREW * peaks[0]:
        return {"square_share": None, "growth": None}
    square = float(np.polyfit(lengths, peaks, 2)[0]) * (lengths[-1] ** 2 - lengths[0] ** 2)
    share = min(1.0, max(0.0, square / (peaks[-1] - peaks[0])))
    return {"square_share": share, "growth": "quadratic" if share > QUADRATIC else "linear"}


def measure(versions, lengths, argv, limit):
    """Return {"lengths", "rows"}: the peaks of each version in MiB, None where it ran out of memory, and their growth.

    Go up the lengths, and end before one that the time limit leaves no room for.
    """
    peaks = {}
    environment = RETURN_FREED | os.environ
    for place, length in enumerate(lengths):
        if not limit.room(len(versions)):
            progress(f"no time is left for {', '.join(map(str, lengths[place:]))} tokens")
            break
        for done, version in enumerate(versions, place * len(versions)):
            left = limit.left(len(versions) * len(lengths) - done)
            progress(f"{place + 1} of {len(lengths)}: {length} tokens, version {version}, {left} ...")
            options = [*argv, "--seq-len", str(length)]
            run = functools.partial(train, SCRIPTS[version], options, environment=environment, tell=followed())
            found = None
            with contextlib.suppress(OutOfMemory):
                found = limit.timed(run)["summary"]["peak_memory_mb"]
            peaks.setdefault(length, []).append(found)
    rows = []
    for version, found in zip(versions, zip(*peaks.values(), strict=True), strict=True):
        fitting = {length: peak for length, peak in zip(peaks, found, strict=True) if peak is not None}
        rows.append({"version": version, "peaks_mb": found, **growth(list(fitting), list(fitting.values()))})
    return {"lengths": list(peaks), "rows": rows}


def as_text(content):
    rows = []
    for row in content["rows"]:
        peaks = ["out of memory" if peak is None else f"{peak:,.0f}" for peak in row["peaks_mb"]]
        share = row["square_share"]
        rows.append([f"version {row['version']}", *peaks, known(share and 100 * share, ".0f"), row["growth"] or "-"])
    header = ["peak MiB at", *(f"{length} tokens" for length in content["lengths"]), "% of growth with T²", "growth"]
    lines = [f"{content['device']}; {' '.join(content['options'])}", text_table(header, rows)]
    if content["on_cpu"]:
        lines.append("no GPU here: this is the memory of the whole process, libraries included")
    return "\n".join(lines)


def study(options, rest):
    argv = with_sizes(["--num-steps", "2", "--warmup-steps", "1", *rest])
    lengths = sorted(set(options.seq_lengths))
    for version in options.versions:  # wrong options end it here, before any training
        config = load_version(version).parse_options([*argv, "--seq-len", str(lengths[0])])
    measured = measure(options.versions, lengths, argv, TimeLimit(options.time_limit))
    if all(peak is None for row in measured["rows"] for peak in row["peaks_mb"]):
        raise Failure(1, f"not even {lengths[0]} tokens fit into memory: lower --batch-size")
    content = {"device": config.device_name, "on_cpu": on_cpu(argv), "options": without_folders(argv), **measured}
    emit(content, as_text(content), options.json)
    return int(len(content["lengths"]) < len(lengths))


def main(argv=None):
    parser = Parser("analyze_memory_scaling.py", __doc__)
    add = parser.add_argument
    versions = listed(SCRIPTS, lambda text: int(text.removeprefix("v")))
    add("--versions", type=versions, default=list(SCRIPTS), metavar="N,..", help="(1,2,3,4)")
    add("--seq-lengths", type=numbers, default=[128, 256, 512, 1024], metavar="T,..", help="(128,256,512,1024)")
    add_time_limit(parser)
    return parser.run(study, argv, passes_on=True)


if __name__ == "__main__":
    sys.exit(main())
