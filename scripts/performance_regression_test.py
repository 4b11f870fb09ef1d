#!/usr/bin/env python3
"""Fail unless the current version is at least --min-speedup times as fast as the baseline.

example: python performance_regression_test.py --baseline-results ../version1_baseline_metrics.json
             --current-results ./version2_metrics.json --min-speedup 1.3

Reads metrics files, which the training scripts write with --metrics-file. Give each option one file per round, in the
same order: the step times are compared within a round. The test passes if all rounds reach the speed-up, fails if none
does, and otherwise says that it's too close to tell. With one file each there's a result, but you don't know the noise.

It refuses to compare runs on different devices, or with different libraries, sizes, precisions or numbers of processes.
It also refuses a run that doesn't train every parameter, because its speed means nothing.

Exit status: 0 fast enough; 1 slower; 3 too close to tell; 2 for bad input.
"""

import argparse
import math
import os
import sys

from common.command_line import Failure, Parser
from common.files import errors_of, number
from common.measuring.accuracy import loss_bound, same_loss
from common.measuring.runs import SAME_MACHINE, differences, read_metrics
from common.ratios import ROUNDS_NEEDED, counted, gain
from common.tables import emit, rounded

STATUS = {"faster": 0, "slower": 1, "too close to tell": 3}
VERDICTS = {
    "faster": "PASSED: at least",
    "slower": "FAILED: slower than",
    "too close to tell": "too close to tell, measure more rounds on a quiet machine:",
}


def speedup(text):
    """Convert an option's text to a positive number."""
    value = number(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"must be finite and positive, got {text}")
    return value


def read_run(path):
    """Return a metrics file whose numbers can be compared; Failure names what is not a finite, positive number."""
    content = read_metrics(path)
    summary = content["summary"]
    step = summary.get("step_ms")
    found = {name: summary.get(name) for name in ("parameters", "parameters_trained", "first_loss")}
    found["step_ms median"] = step.get("median") if isinstance(step, dict) else None
    found["final_loss"] = summary.get("final_loss", found["first_loss"])  # None: the loss ended the run, NaN for one
    with errors_of(path):
        if missing := set(SAME_MACHINE) - content["environment"].keys():
            raise ValueError(f"its environment does not name {', '.join(sorted(missing))}")
    for name, value in found.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
            raise Failure(2, f"{path}: {name} must be a finite, positive number, got {value}")
    return content


def check(baseline, current):
    """Raise Failure if the runs are not comparable, or if a run's speed means nothing."""
    for content in (baseline, current):
        trained, parameters = (content["summary"][key] for key in ("parameters_trained", "parameters"))
        if trained != parameters:
            meaning = "parameters: its speed means nothing until every gradient is there"
            raise Failure(1, f"version {content['version']} trained {trained:,} of {parameters:,} {meaning}")
    found = differences(baseline, current)
    counts = [content["summary"]["parameters"] for content in (baseline, current)]
    if counts[0] != counts[1]:
        found.append(f"parameters: {counts[0]:,}, {counts[1]:,}")
    if found:
        raise Failure(2, f"the runs are not comparable ({'; '.join(found)}): measure alike")
    first, other = (content["summary"]["first_loss"] for content in (baseline, current))
    with errors_of("the baseline"):
        bound = loss_bound(baseline["options"])
    if not same_loss(other, first, bound):
        raise Failure(1, f"the first loss is {other:.4f}, not {first:.4f}: the current version computes something else")


def read_rounds(options):
    """Return the step times of the baseline and of the current version, in ms, one of each round, and if on a CPU."""
    files = options.baseline_results, options.current_results
    if len(files[0]) != len(files[1]):
        count = f"got {len(files[0])} and {len(files[1])}"
        raise Failure(2, f"--baseline-results and --current-results need a file of every round each, {count}")
    named = [os.path.realpath(path) for path in [*files[0], *files[1]]]
    twice = [path for path in named if named.count(path) > 1]
    if twice:
        raise Failure(2, f"{twice[0]} is named twice: give a file of its own for each run")
    before, after = ([read_run(path) for path in paths] for paths in files)
    for run in [*before, *after]:
        check(before[0], run)
    on_cpu = before[0]["environment"]["device_type"] == "cpu"
    return *([run["summary"]["step_ms"]["median"] for run in runs] for runs in (before, after)), on_cpu


def judge(found, wanted):
    """Return the verdict about the range of the ratios."""
    if found.low >= wanted:
        return "faster"
    if found.high < wanted:
        return "slower"
    return "too close to tell"


def compare(options):
    before, after, on_cpu = read_rounds(options)
    found = gain(before, after)
    wanted = options.min_speedup
    verdict = judge(found, wanted)
    lines = []
    for name, times in (("baseline", before), ("current", after)):
        lines.append(f"{name:<9} {', '.join(rounded(ms, 4) for ms in times)} ms per step")
    lines.append(f"speed-up  {found.ratio:.2f}x, in the rounds {found.low:.2f}x to {found.high:.2f}x")
    if found.rounds == 1:
        lines.append(f"judged by one pair of runs, so the noise isn't known: give {ROUNDS_NEEDED} files each, or more")
    elif found.rounds < ROUNDS_NEEDED:
        lines.append(f"judged by {counted(found.rounds, 'round')}: {ROUNDS_NEEDED} are better")
    if on_cpu:
        lines.append("a CPU's metrics name neither machine nor threads: the ratio holds only if both were the same")
    lines.append(f"{VERDICTS[verdict]} the {wanted}x asked for")
    content = {"speedup": found.ratio, "low": found.low, "high": found.high, "rounds": found.rounds}
    emit(content | {"min_speedup": wanted, "verdict": verdict}, "\n".join(lines), options.json)
    return STATUS[verdict]


def main(argv=None):
    parser = Parser("performance_regression_test.py", __doc__)
    add = parser.add_argument
    files = {"required": True, "metavar": "JSON", "nargs": "+", "action": "extend"}
    add("--baseline-results", help="metrics files of the baseline, one per round", **files)
    add("--current-results", help="metrics files of the current version", **files)
    add("--min-speedup", type=speedup, default=1.0, metavar="X", help="speed-up that the test requires (%(default)s)")
    return parser.run(compare, argv)


if __name__ == "__main__":
    sys.exit(main())
