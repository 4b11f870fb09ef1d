#!/usr/bin/env python3
"""Measure what each fusion of version 2, or kernel of version 3, is worth: alone, taken away, and in combination.

Every combination trains in a process of its own, in rounds, so that drift hits all alike. A switch's worth is the step
without it over the step with it, in pairs of combinations that differ in nothing else. Options that are not listed here
go to the training script.

Exit status: 0 measured; 1 where nothing ran; 2 for bad input.
"""

import argparse
import functools
import itertools
import pathlib
import statistics
import sys
import tempfile

from common.command_line import Failure, Parser, add_time_limit, load_script, positive, progress, run_tool, with_sizes
from common.profiles import read_profile
from common.records import significant
from common.runs import TimeLimit, train
from common.tables import emit, known, text_table
from common.versions import SCRIPTS

SWITCHES = {
    2: ("qkv-fusion", "flash-attention", "swiglu-fusion", "torch-compile"),
    3: ("rmsnorm-kernel", "rope-kernel", "swiglu-kernel", "attention-kernel", "loss-kernel", "optimizer-kernel"),
}


def combinations(switches: tuple[str, ...], every: bool) -> list[frozenset[str]]:
    """Return sets of switches that are on: none, all, then the rest of the 2^n, or each alone and all but each."""
    full = frozenset(switches)
    if every:
        sizes = range(1, len(switches))
        others = [frozenset(chosen) for size in sizes for chosen in itertools.combinations(switches, size)]
    else:
        others = [*(frozenset([s]) for s in switches), *(full - {s} for s in switches)]
    return list(dict.fromkeys([frozenset(), full, *others]))


def switch_options(switches: tuple[str, ...], on: frozenset[str]) -> list[str]:
    return [f"--{'enable' if switch in on else 'disable'}-{switch}" for switch in switches]


def name_of(on: frozenset[str], switches: tuple[str, ...]) -> str:
    off = [switch for switch in switches if switch not in on]
    if len(switches) > 2 and len(off) < 2:
        return f"all but {off[0]}" if off else "all"
    return " + ".join(switch for switch in switches if switch in on) or "none"


def profiled_run(script: pathlib.Path, argv: list[str]) -> tuple[dict, float | None]:
    """Return the metrics of a run, and how many kernels (operators on a CPU) a step that was profiled after it has."""
    with tempfile.TemporaryDirectory() as folder:
        metrics = train(script, [*argv, "--enable-pytorch-profiler", "--profile-dir", folder])
        profile = read_profile(folder)
    calls = sum(call.calls for call in profile.calls)
    return metrics, calls / profile.steps if profile.steps else None


def measure(script, switches: tuple, wanted: list[frozenset[str]], argv: list[str], rounds: int, limit) -> list[dict]:
    """Return a row per combination: on, status, and if it ran the medians of its rounds, memory and kernels.

    limit: a TimeLimit; it leaves out combinations of the first round, or whole further rounds.
    """
    rows = [{"on": sorted(on), "name": name_of(on, switches), "runs": [], "reason": None} for on in wanted]
    for i in range(rounds):
        if i and not limit.room(len(rows)):
            progress(f"no time is left for round {i + 1} of {rounds}")
            break
        for done, (on, row) in enumerate(zip(wanted, rows, strict=True), i * len(rows)):
            if not i and not limit.room():
                row["reason"] = "not run: no time was left"
            if not row["reason"]:
                count = f"[{done + 1}/{rounds * len(rows)}]"
                progress(f"{count} {row['name']} ... ({limit.left(rounds * len(rows) - done)})")
                measure_once(script, [*argv, *switch_options(switches, on)], row, limit)
    return [finished(row) for row in rows]


def measure_once(script, argv: list[str], row: dict, limit) -> None:
    """Run a combination once more and keep its summary, or the reason why it failed; the first time profile it too."""
    try:
        if row["runs"]:
            metrics = limit.timed(functools.partial(train, script, argv))
        else:
            metrics, row["kernels"] = limit.timed(functools.partial(profiled_run, script, argv))
        row["runs"].append(metrics["summary"])
    except Failure as error:
        row["reason"] = str(error)


def finished(row: dict) -> dict:
    """Return the row with the medians of its runs in their place."""
    runs = row.pop("runs")
    if row["reason"] or not runs:
        return row | {"steps_ms": [], "step_ms": None, "peak_memory_mb": None, "kernels": None}
    steps = [run["step_ms"]["median"] for run in runs]
    memory = max(run["peak_memory_mb"] for run in runs)
    return row | {"steps_ms": steps, "step_ms": statistics.median(steps), "peak_memory_mb": memory}


def worth(rows: list[dict], switches: tuple[str, ...]) -> list[dict]:
    """Return for each switch the speed-up of adding it, over all pairs that differ in it alone, round by round.

    alone: added to nothing; last: added to all the others; low and high: the smallest and largest pair.
    """
    by_set = {frozenset(row["on"]): row for row in rows if row["step_ms"] is not None}
    found = []
    for switch in switches:
        added = {on: on | {switch} for on in by_set if switch not in on and on | {switch} in by_set}
        pairs = [(on, by_set[on], by_set[with_it]) for on, with_it in added.items()]
        ratios = {on: ratio_of(without, with_it) for on, without, with_it in pairs}
        rounds = [x / y for _, a, b in pairs for x, y in zip(a["steps_ms"], b["steps_ms"], strict=True)]
        others = frozenset(switches) - {switch}
        found.append(
            {
                "switch": switch,
                "pairs": len(pairs),
                "speedup": statistics.geometric_mean(ratios.values()) if ratios else None,
                "low": min(rounds, default=None),
                "high": max(rounds, default=None),
                "alone": ratios.get(frozenset()),
                "last": ratios.get(others),
                "memory_mb": change(pairs, "peak_memory_mb"),
                "kernels": change(pairs, "kernels"),
            }
        )
    return sorted(found, key=lambda row: -(row["speedup"] or 0))


def ratio_of(without: dict, with_it: dict) -> float:
    return without["step_ms"] / with_it["step_ms"]


def change(pairs: list, key: str) -> float | None:
    """Return the mean of what adding the switch changes; None if some pair does not know it."""
    values = [None if None in (a[key], b[key]) else b[key] - a[key] for _, a, b in pairs]
    return statistics.mean(values) if values and None not in values else None


def as_text(content: dict) -> str:
    base = next((row["step_ms"] for row in content["combinations"] if not row["on"]), None)
    rows = []
    for row in sorted(content["combinations"], key=lambda row: row["step_ms"] or float("inf")):
        if row["step_ms"] is not None:
            spread = f"{significant(min(row['steps_ms']))} to {significant(max(row['steps_ms']))}"
            speed = known(base and base / row["step_ms"], ".2f")
            memory, kernels = f"{row['peak_memory_mb']:,.0f}", known(row["kernels"], ",.0f")
            rows.append([row["name"], significant(row["step_ms"]), spread, speed, memory, kernels])
    lines = [text_table(["on", "step ms", "rounds", "over none", "peak MB", "kernels"], rows), ""]
    cells = [
        [row["switch"], row["pairs"], *(known(row[key], ".2f") for key in ("speedup", "low", "high", "alone", "last"))]
        + [known(row["memory_mb"], "+,.1f"), known(row["kernels"], "+,.1f")]
        for row in content["switches"]
    ]
    header = ["adding", "pairs", "speed-up", "lowest", "highest", "alone", "last", "MB", "kernels"]
    lines.append(text_table(header, cells))
    lines += [f"{row['name']}: {row['reason']}" for row in content["combinations"] if row["reason"]]
    best = content["switches"][0]
    if best["speedup"] is not None:
        sure = "" if best["low"] > 1 else ", within the spread of the rounds"
        lines.append(f"worth most: {best['switch']}, {best['speedup']:.2f}x{sure}")
    return "\n".join(lines)


def study(options: argparse.Namespace, rest: list[str]) -> None:
    version = options.version
    argv = with_sizes(["--num-steps", str(options.num_steps), *rest])
    script = load_script(SCRIPTS[version], "--version")
    # said aloud, for profiling alone would switch the graph off
    argv.append("--graph" if script.parse_options(argv).graph else "--no-graph")
    switches = tuple(options.switches or SWITCHES[version])
    unknown = [switch for switch in switches if switch not in SWITCHES[version]]
    if unknown:
        raise Failure(2, f"--switches: {unknown[0]} is none of {', '.join(SWITCHES[version])}")
    wanted = combinations(switches, options.all_combinations)
    rows = measure(SCRIPTS[version], switches, wanted, argv, options.rounds, TimeLimit(options.time_limit))
    if not any(row["step_ms"] for row in rows):
        raise Failure(1, f"no combination ran: {rows[0]['reason']}")
    content = {"version": version, "options": argv, "combinations": rows, "switches": worth(rows, switches)}
    emit(content, as_text(content), options.json)


def main(argv: list[str] | None = None) -> int:
    parser = Parser(
        "fusion_ablation_study.py",
        "What each fusion of version 2, or each kernel of version 3, is worth alone and in combination.",
        "--all-combinations --preset small; options that are not listed go to the training script",
    )
    parser.add_argument("--version", type=int, choices=SWITCHES, default=2, help="2 or 3 (%(default)s)")
    parser.add_argument("--all-combinations", action="store_true", help="all on/off combinations, not single ones only")
    parser.add_argument("--switches", type=lambda text: text.split(","), metavar="X,..", help="these alone (all)")
    parser.add_argument(
        "--rounds", type=positive, default=3, metavar="N", help="runs of each combination (%(default)s)"
    )
    parser.add_argument("--num-steps", type=int, default=20, metavar="N", help="steps of a run (%(default)s)")
    add_time_limit(parser)
    options, rest = parser.parse_known_args(argv)
    return run_tool("fusion_ablation_study.py", lambda: study(options, rest))


if __name__ == "__main__":
    sys.exit(main())
