"""Measure peak memory over sequence length for several training scripts, and tell linear from quadratic growth."""

import concurrent.futures
import functools

from common.command_line import on_cpu, progress
from common.runs import OutOfMemory, train

QUADRATIC = 0.25  # fraction of the growth from which on it counts as quadratic
GREW = 1.05  # memory that grew less is called neither: a process's memory varies


def growth(lengths, peaks):
    """Fit a + b T + c T² and return how much of the growth from shortest to longest is quadratic.

    growth is None where it cannot be told: from fewer than three lengths, or where memory hardly grew.
    """
    import numpy as np

    if len(lengths) < 3 or peaks[-1] < GREW * peaks[0]:
        return {"fit": None, "square_share": None, "growth": None}
    c, b, a = map(float, np.polyfit(lengths, peaks, 2))
    square = c * (lengths[-1] ** 2 - lengths[0] ** 2)
    share = min(1.0, max(0.0, square / (peaks[-1] - peaks[0])))
    return {"fit": (a, b, c), "square_share": share, "growth": "quadratic" if share > QUADRATIC else "linear"}


def peak_of(script, argv):
    """Return the peak memory of a run in MB, None if it ran out of memory."""
    try:
        return train(script, argv)["summary"]["peak_memory_mb"]
    except OutOfMemory:
        return None


def peaks_side_by_side(scripts, argv):
    """Return each version's peak in MB, all run at once; one that runs out of memory then runs again alone."""
    with concurrent.futures.ThreadPoolExecutor(len(scripts)) as pool:
        found = dict(zip(scripts, pool.map(lambda script: peak_of(script, argv), scripts.values()), strict=True))
    if len(scripts) > 1:
        found |= {version: peak_of(scripts[version], argv) for version, peak in found.items() if peak is None}
    return found


def measure(scripts, lengths, argv, limit):
    """Return {"lengths", "rows"}: for each version its peaks in MB, None where it ran out of memory, and their growth.

    Go up the lengths, and end before one that the time limit leaves no room for.
    """
    peaks: dict[int, list[float | None]] = {version: [] for version in scripts}
    one_by_one = on_cpu(argv)  # whose memory and cores all processes share
    runs = len(scripts) if one_by_one else 1
    for place, length in enumerate(lengths):
        if not limit.room(runs):
            progress(f"no time is left for {', '.join(map(str, lengths[place:]))} tokens")
            lengths = lengths[:place]
            break
        left = limit.left(runs * (len(lengths) - place))
        sized = [*argv, "--seq-len", str(length)]
        progress(f"{place + 1} of {len(lengths)}: {length} tokens, {left} ...")
        if one_by_one:
            timed = {v: limit.timed(functools.partial(peak_of, script, sized)) for v, script in scripts.items()}
        else:
            timed = limit.timed(functools.partial(peaks_side_by_side, scripts, sized))
        for version, peak in timed.items():
            peaks[version].append(peak)
    rows = []
    for version, found in peaks.items():
        pairs = [(length, peak) for length, peak in zip(lengths, found, strict=True) if peak is not None]
        rows.append({"version": version, "peaks_mb": found, **growth([t for t, _ in pairs], [p for _, p in pairs])})
    return {"lengths": lengths, "rows": rows}
