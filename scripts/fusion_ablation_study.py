#!/usr/bin/env python3
"""Measure what each fusion of version 2, or kernel of version 3, is worth: alone, last, and on average.

example: python fusion_ablation_study.py --all-combinations --preset small

Every combination of switches trains in a process of its own, in rounds, so if the machine slows down, all combinations
slow down. A switch's worth is the step time without it divided by the time with it, within a round, for two
combinations that differ in nothing else. "Alone": all other switches are off. "Last": all others are on. The average is
over all such pairs. The combination with all switches on trains twice per round, and the difference between these two
runs is the noise. Version 2's fused AdamW is on in all runs. Options that aren't listed here go to the training script.

Exit status: 0; 1 if none ran or --time-limit left some out; 2 for bad input.
"""

import itertools
import statistics
import sys
import tempfile

from common.command_line import Failure, Parser, add_time_limit, listed, positive, with_sizes
from common.machine.description import without_folders
from common.measuring.rounds import run_in_rounds
from common.measuring.runs import TimeLimit, train
from common.profiles import read_profile, steps_needed
from common.ratios import furthest, gain, noise_line, noisiest, noisiest_line, ratios
from common.tables import columns, emit, rounded, text_table
from common.versions import SCRIPTS, load_version

SWITCHES = {
    2: ("qkv-fusion", "flash-attention", "swiglu-fusion", "torch-compile"),
    3: ("rmsnorm-kernel", "rope-kernel", "swiglu-kernel", "attention-kernel", "loss-kernel", "optimizer-kernel"),
}
AGAIN = "all, again"  # the second name of the A/A pair
COMBINATION_COLUMNS = (
    "on: {name} | step ms: {step} | rounds: {rounds} | over none: {gain} | peak MiB: {peak_memory_mb:,.0f} | "
    "kernels: {kernels:,.0f}"
)
SWITCH_COLUMNS = (
    "switch: {switch} | alone: {alone} | last: {last} | mean of all pairs: {speedup} | "
    "pairs: {pairs} | mean MiB: {memory_mb:+,.1f} | mean kernels: {kernels:+,.1f}"
)

# ---------------------------------------------------------------- measure


def combinations(switches, every):
    """Return sets of switches that are on: none, all, then the rest of the 2^n, or each alone and all but each."""
    full = frozenset(switches)
    sizes = range(1, len(switches)) if every else (1, len(switches) - 1)
    others = [frozenset(chosen) for size in sizes for chosen in itertools.combinations(switches, size)]
    return list(dict.fromkeys([frozenset(), full, *others]))


def name_of(on, switches):
    off = [switch for switch in switches if switch not in on]
    if len(switches) > 2 and len(off) < 2:
        return f"all but {off[0]}" if off else "all"
    return " + ".join(switch for switch in switches if switch in on) or "none"


def measure(script, switches, wanted, argv, rounds, limit):
    """Return a row per combination, and the runs of the A/A pair's second name: a list of times for every round.

    A row says what is on, why it failed or the times of its rounds, memory and kernels: "steps_ms" has the median of
    each round, "every_step_ms" all its steps. Kernels (operators on a CPU) are those of a step that is profiled after
    the first run.
    """
    named = {name_of(on, switches): on for on in wanted}
    kernels = {}

    def run(name):
        on = named.get(name, switches)
        chosen = [f"--{'enable' if switch in on else 'disable'}-{switch}" for switch in switches]
        if name in kernels or name == AGAIN:
            return train(script, [*argv, *chosen])
        with tempfile.TemporaryDirectory() as folder:
            metrics = train(script, [*argv, *chosen, "--enable-pytorch-profiler", "--profile-dir", folder])
            profile = read_profile(folder)
        kernels[name] = len(profile.calls) / steps_needed(profile)
        return metrics

    runs, reasons = run_in_rounds(run, [*named, AGAIN], rounds, limit)
    rows = []
    for name, on in named.items():
        kept = [] if name in reasons else runs[name]
        every = every_step_ms(kept)
        steps = medians(every)
        row = {"on": sorted(on), "name": name, "reason": reasons.get(name), "steps_ms": steps, "every_step_ms": every}
        row |= {"step_ms": statistics.median(steps) if steps else None, "kernels": kernels.get(name)}
        peaks = [metrics["summary"]["peak_memory_mb"] for metrics in kept]
        rows.append(row | {"peak_memory_mb": max(peaks, default=None)})
    return rows, [] if AGAIN in reasons else every_step_ms(runs[AGAIN])


def every_step_ms(metrics):
    """Return the times of all steps of each of these runs."""
    return [[round(step["step_ms"], 4) for step in run["steps"]] for run in metrics]


def medians(runs):
    """Return the median of each run's times."""
    return [statistics.median(steps) for steps in runs]


# ---------------------------------------------------------------- compare


def pair_of(rows, switches, again):
    """Return the two lists of the A/A pair: all switches on, twice in a round; None where one is missing."""
    first = next((row["steps_ms"] for row in rows if set(row["on"]) == set(switches)), [])
    return [first, again] if first and len(first) == len(again) else None


def mean_steps(rows):
    """Return the geometric mean of the rows' steps for each round."""
    return [statistics.geometric_mean(steps) for steps in zip(*(row["steps_ms"] for row in rows), strict=True)]


def worth(rows, switches, again=()):
    """Return a row per switch: the Gain of adding it, within rounds.

    alone: all others are off; last: all others are on; speedup: the geometric mean over all pairs of combinations that
    differ in it alone.
    """
    by_set = {frozenset(row["on"]): row for row in rows if row["steps_ms"]}
    noise = pair_of(rows, switches, again)
    found = []
    for switch in switches:
        pairs = {on: (by_set.get(on - {switch}), row) for on, row in by_set.items() if switch in on}
        pairs = {on: pair for on, pair in pairs.items() if pair[0]}
        gains = {on: gain(before["steps_ms"], after["steps_ms"], noise) for on, (before, after) in pairs.items()}
        mean = None
        if pairs:
            before, after = zip(*pairs.values(), strict=True)
            mean = gain(mean_steps(before), mean_steps(after), noise)
        row = {"switch": switch, "pairs": len(pairs), "speedup": mean}
        row |= {"alone": gains.get(frozenset([switch])), "last": gains.get(frozenset(switches))}
        for key, name in (("peak_memory_mb", "memory_mb"), ("kernels", "kernels")):
            row[name] = statistics.mean(b[key] - a[key] for a, b in pairs.values()) if pairs else None
        found.append(row)
    return sorted(found, key=lambda row: -row["speedup"].ratio if row["speedup"] else 0)


def as_text(rows, found, again=()):
    """Return the two tables, the line about noise, what failed, and what is worth most."""
    measured = sorted((row for row in rows if row["steps_ms"]), key=lambda row: row["step_ms"])
    base = next((row["steps_ms"] for row in measured if not row["on"]), None)
    noise = pair_of(rows, [row["switch"] for row in found], again)
    lines = []
    for row in measured:
        step, low, high = (rounded(ms, 4) for ms in (row["step_ms"], min(row["steps_ms"]), max(row["steps_ms"])))
        over = gain(base, row["steps_ms"], noise) if base and row["on"] else None
        lines.append(row | {"step": step, "rounds": f"{low} to {high}", "gain": over})
    text = [text_table(*columns(COMBINATION_COLUMNS, lines)), "", text_table(*columns(SWITCH_COLUMNS, found))]
    if noise:
        text.append(noise_line("the step with all on", furthest(ratios(*noise))))
        if len(again) > 1:
            name, percent = noisiest({row["name"]: row["steps_ms"] for row in measured})
            text.append(noisiest_line(repr(name), percent))
    text += [f"{row['name']}: {row['reason']}" for row in rows if row["reason"]]
    gains = {row["switch"]: row["speedup"] for row in found if row["speedup"]}
    faster = [switch for switch, gained in gains.items() if gained.shown and gained.ratio > 1]
    if faster:
        text.append(f"worth most: {faster[0]}, {gains[faster[0]]}")
    elif missing := next((gained for gained in gains.values() if gained.missing), None):
        text.append(f"which is worth most is {missing}")
    elif gains:
        text.append("no switch is shown to make the step faster")
    return "\n".join(text)


def plain(row):
    """Return a switch's row as JSON holds it: the ratio of each gain, with its range and its verdict beside it."""
    gains = {key: row[key] for key in ("alone", "last", "speedup")}
    ratios_only = {key: found and found.ratio for key, found in gains.items()}
    return row | ratios_only | {"gains": {key: found and found._asdict() for key, found in gains.items()}}


def study(options, rest):
    argv = with_sizes(["--num-steps", str(options.num_steps), *rest])
    # said aloud, for profiling alone would switch the graph off
    argv.append("--graph" if load_version(options.version).parse_options(argv).graph else "--no-graph")
    switches = options.switches or SWITCHES[options.version]
    wanted = combinations(switches, options.all_combinations)
    limit = TimeLimit(options.time_limit)
    rows, again_runs = measure(SCRIPTS[options.version], switches, wanted, argv, options.rounds, limit)
    again = medians(again_runs)
    if not any(row["step_ms"] for row in rows):
        raise Failure(1, f"no combination ran: {rows[0]['reason']}")
    found = worth(rows, switches, again)
    content = {"version": options.version, "options": without_folders(argv), "combinations": rows, "again_ms": again}
    content["again_every_step_ms"] = again_runs
    content["switches"] = [plain(row) for row in found]
    text = as_text(rows, found, again)
    ran = max(len(row["steps_ms"]) for row in rows)
    if limit.reached:
        text += f"\n{ran} of {options.rounds} rounds: no time was left for the rest"
    emit(content, text, options.json)
    return int(limit.reached)


def main(argv=None):
    parser = Parser("fusion_ablation_study.py", __doc__)
    add = parser.add_argument
    add("--version", type=int, choices=SWITCHES, default=2, help="2 or 3 (%(default)s)")
    add(
        "--all-combinations",
        action="store_true",
        help="all on/off combinations, not only alone and last",
    )
    add("--switches", type=listed(sum(SWITCHES.values(), ())), metavar="X,..", help="only these switches (all)")
    add("--rounds", type=positive, default=5, metavar="N", help="runs of each combination (%(default)s)")
    add("--num-steps", type=int, default=20, metavar="N", help="steps of a run (%(default)s)")
    add_time_limit(parser)
    return parser.run(study, argv, passes_on=True)


if __name__ == "__main__":
    sys.exit(main())
