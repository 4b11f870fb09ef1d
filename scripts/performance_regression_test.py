#!/usr/bin/env python3
"""Fail unless the current version is at least so many times as fast as the baseline, beyond the spread of the steps.

Reads metrics files (--metrics-file of the training scripts), several of each side if runs were repeated. The
speed-up is the ratio of the median step times; its 95 % interval comes from a bootstrap over runs and steps. Runs of
different devices, libraries, sizes or precisions are refused, and so is a run that does not train every parameter: its
speed means nothing.

Exit status: 0 fast enough, or too close to tell; 1 slower; 2 for bad input.
"""

import sys

import numpy as np

from common.command_line import Failure, Parser, run_tool
from common.runs import differences, read_metrics
from common.tables import emit, rounded

DRAWS = 2000
LOSS_BOUND = 0.02  # relative difference of the first losses: a lower precision may make so much, a wrong model more
VERDICTS = {
    "faster": "PASSED: at least",
    "slower": "FAILED: slower than",
    "too close to tell": "too close to tell, measure more steps or more runs of each:",
}


def draw_median(runs, rng):
    """Return the median step of resampled runs with resampled steps."""
    chosen = [runs[i] for i in rng.integers(len(runs), size=len(runs))]
    return np.median([np.median(rng.choice(run, size=len(run))) for run in chosen])


def speedup(baseline, current, wanted):
    """Return the median step of both in ms, their ratio, its 95 % interval by a bootstrap, and the verdict."""
    rng = np.random.default_rng(0)
    before, after = (float(np.median([np.median(run) for run in runs])) for runs in (baseline, current))
    ratios = [draw_median(baseline, rng) / draw_median(current, rng) for _ in range(DRAWS)]
    low, high = map(float, np.percentile(ratios, [2.5, 97.5]))
    verdict = "faster" if low >= wanted else "slower" if high < wanted else "too close to tell"
    times = {"baseline_ms": before, "current_ms": after, "speedup": before / after}
    return times | {"low": low, "high": high, "min_speedup": wanted, "verdict": verdict}


def check(baseline, current):
    """Raise Failure if runs are not comparable, or if a run's speed means nothing."""
    for content in [*baseline, *current]:
        trained, parameters = (content["summary"][key] for key in ("parameters_trained", "parameters"))
        if trained != parameters:
            meaning = "parameters: its speed means nothing until every gradient is there"
            raise Failure(1, f"version {content['version']} trained {trained:,} of {parameters:,} {meaning}")
        if found := differences(baseline[0], content):
            raise Failure(2, f"the runs are not comparable ({'; '.join(found)}): measure alike")
    first, other = baseline[0]["summary"]["first_loss"], current[0]["summary"]["first_loss"]
    if not abs(first - other) <= LOSS_BOUND * abs(first):
        raise Failure(1, f"the first loss is {other:.4f}, not {first:.4f}: the current version computes something else")


def compare(options):
    files = (options.baseline_results, options.current_results)
    baseline, current = ([read_metrics(path) for path in paths] for paths in files)
    check(baseline, current)
    times = [[[step["step_ms"] for step in run["steps"]] for run in runs] for runs in (baseline, current)]
    result = speedup(*times, options.min_speedup)
    lines = [
        f"baseline  {rounded(result['baseline_ms'], 4):>9} ms per step, {sum(map(len, times[0]))} steps",
        f"current   {rounded(result['current_ms'], 4):>9} ms per step, {sum(map(len, times[1]))} steps",
        f"speed-up  {result['speedup']:9.2f}x, 95 % interval {result['low']:.2f}x to {result['high']:.2f}x",
        f"{VERDICTS[result['verdict']]} the {options.min_speedup}x asked for",
    ]
    emit(result | {"environment": current[0]["environment"]}, "\n".join(lines), options.json)
    return int(result["verdict"] == "slower")


def main(argv=None):
    parser = Parser(
        "performance_regression_test.py",
        "Fail if the current version is not at least so many times as fast as the baseline.",
        "--baseline-results ../version1_baseline_metrics.json --current-results ./version2_metrics.json "
        "--min-speedup 1.3; write the files with tiny_llama_v*.py --metrics-file",
    )
    files = {"nargs": "+", "required": True, "metavar": "JSON"}
    parser.add_argument("--baseline-results", **files, help="metrics files of the baseline, one a run")
    parser.add_argument("--current-results", **files, help="metrics files of the current version, one a run")
    parser.add_argument("--min-speedup", type=float, default=1.0, metavar="X", help="that is wanted (%(default)s)")
    options = parser.parse_args(argv)
    return run_tool("performance_regression_test.py", lambda: compare(options))


if __name__ == "__main__":
    sys.exit(main())
