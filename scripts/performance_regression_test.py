#!/usr/bin/env python3
"""Fail unless the current version is at least so many times as fast as the baseline, beyond the spread of the steps.

example: python performance_regression_test.py --baseline-results ../version1_baseline_metrics.json
             --current-results ./version2_metrics.json --min-speedup 1.3

Reads a metrics file of each (--metrics-file of the training scripts). The speed-up is the ratio of the median step
times, and its range that of their quartiles. Runs of different devices, libraries, sizes or precisions are refused, and
so is a run that does not train every parameter: its speed means nothing.

Exit status: 0 fast enough, or too close to tell; 1 slower; 2 for bad input.
"""

import sys

from common.command_line import Failure, Parser
from common.runs import differences, read_metrics
from common.tables import emit, rounded

LOSS_BOUND = 0.02  # relative difference of the first losses: a lower precision may make so much, a wrong model more
VERDICTS = {
    "faster": "PASSED: at least",
    "slower": "FAILED: slower than",
    "too close to tell": "too close to tell, measure more steps on a quiet machine:",
}


def check(baseline, current):
    """Raise Failure if the runs are not comparable, or if a run's speed means nothing."""
    for content in (baseline, current):
        trained, parameters = (content["summary"][key] for key in ("parameters_trained", "parameters"))
        if trained != parameters:
            meaning = "parameters: its speed means nothing until every gradient is there"
            raise Failure(1, f"version {content['version']} trained {trained:,} of {parameters:,} {meaning}")
    if found := differences(baseline, current):
        raise Failure(2, f"the runs are not comparable ({'; '.join(found)}): measure alike")
    first, other = (content["summary"]["first_loss"] for content in (baseline, current))
    if not abs(first - other) <= LOSS_BOUND * abs(first):
        raise Failure(1, f"the first loss is {other:.4f}, not {first:.4f}: the current version computes something else")


def compare(options):
    runs = {"baseline": read_metrics(options.baseline_results), "current": read_metrics(options.current_results)}
    check(*runs.values())
    before, after = (run["summary"]["step_ms"] for run in runs.values())
    ratio, wanted = before["median"] / after["median"], options.min_speedup
    low, high = before["p25"] / after["p75"], before["p75"] / after["p25"]
    verdict = "faster" if low >= wanted else "slower" if high < wanted else "too close to tell"
    lines = [
        f"{name:<9} {rounded(run['summary']['step_ms']['median'], 4):>9} ms per step, {len(run['steps'])} steps"
        for name, run in runs.items()
    ]
    lines.append(f"speed-up  {ratio:9.2f}x, by the quartiles {low:.2f}x to {high:.2f}x")
    lines.append(f"{VERDICTS[verdict]} the {wanted}x asked for")
    content = {"speedup": ratio, "low": low, "high": high, "min_speedup": wanted, "verdict": verdict}
    emit(content, "\n".join(lines), options.json)
    return int(verdict == "slower")


def main(argv=None):
    parser = Parser("performance_regression_test.py", __doc__)
    add = parser.add_argument
    add("--baseline-results", required=True, metavar="JSON", help="metrics file of the baseline")
    add("--current-results", required=True, metavar="JSON", help="metrics file of the current version")
    add("--min-speedup", type=float, default=1.0, metavar="X", help="that is wanted (%(default)s)")
    return parser.run(compare, argv)


if __name__ == "__main__":
    sys.exit(main())
