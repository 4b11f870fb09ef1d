#!/usr/bin/env python3
"""Measure what each fusion of version 2, or kernel of version 3, is worth: alone, taken away, and in combination.

example: python fusion_ablation_study.py --all-combinations --preset small

Every combination trains in a process of its own, in rounds, so that drift hits all alike. A switch's worth is the step
without it over the step with it, in pairs of combinations that differ in nothing else; options that are not listed go
to the training script. Exit status: 0; 1 if none ran or --time-limit left some out; 2 for bad input.
"""

import itertools
import statistics
import sys
import tempfile

from common.command_line import Failure, Parser, add_time_limit, listed, positive, with_sizes
from common.profiles import read_profile, steps_needed
from common.runs import TimeLimit, run_in_rounds, train
from common.tables import columns, emit, rounded, text_table
from common.versions import SCRIPTS, load_version

SWITCHES = {
    2: ("qkv-fusion", "flash-attention", "swiglu-fusion", "torch-compile"),
    3: ("rmsnorm-kernel", "rope-kernel", "swiglu-kernel", "attention-kernel", "loss-kernel", "optimizer-kernel"),
}
COMBINATION_COLUMNS = (
    "on: {name} | step ms: {step} | rounds: {rounds} | over none: {gain:.2f} | peak MiB: {peak_memory_mb:,.0f} | "
    "kernels: {kernels:,.0f}"
)
SWITCH_COLUMNS = (
    "adding: {switch} | pairs: {pairs} | speed-up: {speedup:.2f} | lowest: {low:.2f} | highest: {high:.2f} | "
    "alone: {alone:.2f} | last: {last:.2f} | MB: {memory_mb:+,.1f} | kernels: {kernels:+,.1f}"
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
    """Return a row per combination: what is on, why it failed or the step times of its rounds, memory and kernels.

    Kernels (operators on a CPU) are those of a step that is profiled after the first run.
    """
    named, kernels = {name_of(on, switches): on for on in wanted}, {}

    def run(name):
        chosen = [f"--{'enable' if switch in named[name] else 'disable'}-{switch}" for switch in switches]
        if name in kernels:
            return train(script, [*argv, *chosen])["summary"]
        with tempfile.TemporaryDirectory() as folder:
            summary = train(script, [*argv, *chosen, "--enable-pytorch-profiler", "--profile-dir", folder])["summary"]
            profile = read_profile(folder)
        kernels[name] = len(profile.calls) / steps_needed(profile)
        return summary

    runs, reasons = run_in_rounds(run, named, rounds, limit)
    rows = []
    for name, on in named.items():
        kept = [] if name in reasons else runs[name]
        steps = [summary["step_ms"]["median"] for summary in kept]
        row = {"on": sorted(on), "name": name, "reason": reasons.get(name), "steps_ms": steps}
        row |= {"step_ms": statistics.median(steps) if steps else None, "kernels": kernels.get(name)}
        rows.append(row | {"peak_memory_mb": max((summary["peak_memory_mb"] for summary in kept), default=None)})
    return rows


# ---------------------------------------------------------------- compare


def worth(rows, switches):
    """Return a row per switch: the speed-up of adding it, over all pairs of combinations that differ in it alone.

    alone: added to nothing; last: added to all the others; low and high: of the single rounds.
    """
    by_set, found = {frozenset(row["on"]): row for row in rows if row["step_ms"] is not None}, []
    for switch in switches:
        pairs = {on: (by_set.get(on - {switch}), row) for on, row in by_set.items() if switch in on}
        pairs = {on: pair for on, pair in pairs.items() if pair[0]}
        ratios = {on: without["step_ms"] / row["step_ms"] for on, (without, row) in pairs.items()}
        rounds = [x / y for a, b in pairs.values() for x, y in zip(a["steps_ms"], b["steps_ms"], strict=True)]
        row = {"switch": switch, "pairs": len(pairs)}
        row |= {"speedup": statistics.geometric_mean(ratios.values()) if ratios else None}
        row |= {"low": min(rounds, default=None), "high": max(rounds, default=None)}
        row |= {"alone": ratios.get(frozenset([switch])), "last": ratios.get(frozenset(switches))}
        for key, name in (("peak_memory_mb", "memory_mb"), ("kernels", "kernels")):
            row[name] = statistics.mean(b[key] - a[key] for a, b in pairs.values()) if pairs else None
        found.append(row)
    return sorted(found, key=lambda row: -(row["speedup"] or 0))


def as_text(content):
    measured = sorted((row for row in content["combinations"] if row["steps_ms"]), key=lambda row: row["step_ms"])
    base, rows = next((row["step_ms"] for row in measured if not row["on"]), None), []
    for row in measured:
        step, low, high = (rounded(ms, 4) for ms in (row["step_ms"], min(row["steps_ms"]), max(row["steps_ms"])))
        rows.append(row | {"step": step, "rounds": f"{low} to {high}", "gain": base and base / row["step_ms"]})
    lines = [text_table(*columns(COMBINATION_COLUMNS, rows)), ""]
    lines += [text_table(*columns(SWITCH_COLUMNS, content["switches"]))]
    lines += [f"{row['name']}: {row['reason']}" for row in content["combinations"] if row["reason"]]
    best = content["switches"][0]
    if best["speedup"] is not None:
        sure = "" if best["low"] > 1 else ", within the spread of the rounds"
        lines.append(f"worth most: {best['switch']}, {best['speedup']:.2f}x{sure}")
    return "\n".join(lines)


def study(options, rest):
    argv = with_sizes(["--num-steps", str(options.num_steps), *rest])
    # said aloud, for profiling alone would switch the graph off
    argv.append("--graph" if load_version(options.version).parse_options(argv).graph else "--no-graph")
    switches = options.switches or SWITCHES[options.version]
    wanted, limit = combinations(switches, options.all_combinations), TimeLimit(options.time_limit)
    rows = measure(SCRIPTS[options.version], switches, wanted, argv, options.rounds, limit)
    if not any(row["step_ms"] for row in rows):
        raise Failure(1, f"no combination ran: {rows[0]['reason']}")
    content = {"version": options.version, "options": argv, "combinations": rows, "switches": worth(rows, switches)}
    text, ran = as_text(content), max(len(row["steps_ms"]) for row in rows)
    if limit.reached:
        text += f"\n{ran} of {options.rounds} rounds: no time was left for the rest"
    emit(content, text, options.json)
    return int(limit.reached)


def main(argv=None):
    parser = Parser("fusion_ablation_study.py", __doc__)
    add = parser.add_argument
    add("--version", type=int, choices=SWITCHES, default=2, help="2 or 3 (%(default)s)")
    add("--all-combinations", action="store_true", help="all on/off combinations, not single ones only")
    add("--switches", type=listed(sum(SWITCHES.values(), ())), metavar="X,..", help="these alone (all)")
    add("--rounds", type=positive, default=3, metavar="N", help="runs of each combination (%(default)s)")
    add("--num-steps", type=int, default=20, metavar="N", help="steps of a run (%(default)s)")
    add_time_limit(parser)
    return parser.run(study, argv, passes_on=True)


if __name__ == "__main__":
    sys.exit(main())
