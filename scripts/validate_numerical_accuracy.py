#!/usr/bin/env python3
"""Compare one training script with another: logits, loss, every gradient, and ten steps of training.

example: python validate_numerical_accuracy.py --baseline ../version1_pytorch_baseline --optimized tiny_llama_v2.py

Both get the same seeded weights and batches. An error is the relative root mean square rms(a - b) / rms(b), so one
tolerance suits tensors of any size. Options that aren't listed here go to both scripts.

Exit status: 0 within the tolerance, 1 beyond it, 2 for bad input.
"""

import sys
from collections import Counter

from common.command_line import Parser, finite, load_script, on_cpu, positive, progress, script_path, with_sizes
from common.measuring.accuracy import compare, outcome, verdict
from common.tables import columns, emit, text_table

COLUMNS = "what: {kind} | compared: {compared} | largest error: {error:.1e} | where: {name}"


def as_text(content):
    result = content["verdict"]
    compared = Counter(entry["kind"] for entry in content["entries"])
    rows = [entry | {"compared": compared[kind]} for kind, entry in result["worst_of_each_kind"].items()]
    lines = [
        f"{content['optimized']} compared with {content['baseline']}",
        text_table(*columns(COLUMNS, rows)),
    ]
    passed = "passed:" if result["passed"] else f"FAILED: {result['beyond']} beyond"
    worst = "worst is {kind} {name} with {error:.1e}".format(**result["worst"])
    lines.append(f"{passed} --tolerance {result['tolerance']}, {worst}")
    low_precision = not {"--use-amp", "--tf32"}.isdisjoint(content["options"])
    if low_precision and not result["passed"]:
        lines.append("below float32 rounding alone exceeds this tolerance: try --tolerance 3e-2")
    return "\n".join(lines)


def validate(options, rest):
    argv = with_sizes(rest)
    baseline = script_path(options.baseline, "--baseline")
    optimized = script_path(options.optimized, "--optimized")
    scripts = [load_script(baseline, "--baseline"), load_script(optimized, "--optimized")]
    for script in scripts:  # a wrong option ends it here, before any training
        script.parse_options(argv)
    progress(f"1 of 2: {baseline}, a batch and {options.steps} steps ...")
    wanted = outcome(scripts[0], argv, options.steps)
    progress(f"2 of 2: {optimized}, a batch and {options.steps} steps ...")
    found = outcome(scripts[1], argv, options.steps)
    entries = compare(wanted, found, lambda kind, name: options.tolerance)
    result = {"tolerance": options.tolerance} | verdict(entries)
    content = {
        "baseline": str(baseline),
        "optimized": str(optimized),
        "options": argv,
        "on_cpu": on_cpu(argv),
        "verdict": result,
        "entries": entries,
    }
    emit(content, as_text(content), options.json)
    return 0 if result["passed"] else 1


def main(argv=None):
    parser = Parser("validate_numerical_accuracy.py", __doc__)
    add = parser.add_argument
    add("--baseline", required=True, metavar="A", help="script to compare with, or a version's folder")
    add("--optimized", required=True, metavar="B", help="script to check, or a version's folder")
    add("--tolerance", type=finite, default=1e-4, help="largest relative error (%(default)s)")
    add("--steps", type=positive, default=10, metavar="N", help="training steps to compare (%(default)s)")
    return parser.run(validate, argv, passes_on=True)


if __name__ == "__main__":
    sys.exit(main())
