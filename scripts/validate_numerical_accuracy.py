#!/usr/bin/env python3
"""Compare one training script with another: logits, loss, every gradient, and ten steps of training.

example: python validate_numerical_accuracy.py --baseline ../version1_pytorch_baseline --optimized tiny_llama_v2.py

Both get the same seeded weights and batches. Errors are relative root-mean-square, rms(a - b) / rms(b): the tolerance
means the same for every tensor; options that are not listed go to both scripts.

Exit status: 0 within the tolerance, 1 beyond it, 2 for bad input.
"""

import sys
from collections import Counter

from common.accuracy import compare, outcome, verdict
from common.command_line import Parser, load_script, on_cpu, positive, progress, run_tool, script_path, with_sizes
from common.tables import emit, text_table


def as_text(content, low_precision):
    result, worst = content["verdict"], content["verdict"]["worst"]
    kinds = Counter(entry["kind"] for entry in content["entries"])
    rows = [
        [kind, kinds[kind], f"{entry['error']:.1e}", entry["name"]]
        for kind, entry in result["worst_of_each_kind"].items()
    ]
    lines = [f"{content['optimized']} compared with {content['baseline']}"]
    lines.append(text_table(["what", "compared", "largest error", "where"], rows))
    found = "passed:" if result["passed"] else f"FAILED: {result['beyond']} beyond"
    named = f"worst is {worst['kind']} {worst['name']} with {worst['error']:.1e}"
    lines.append(f"{found} --tolerance {result['tolerance']}, {named}")
    if low_precision and not result["passed"]:
        lines.append("the precision is below float32, whose rounding alone is larger: try --tolerance 3e-2")
    return "\n".join(lines)


def parse_options(argv):
    parser = Parser("validate_numerical_accuracy.py", __doc__)
    add = parser.add_argument
    add("--baseline", required=True, metavar="A", help="script, or a version's folder, that is right")
    add("--optimized", required=True, metavar="B", help="script, or folder, to be checked")
    add("--tolerance", type=float, default=1e-4, help="largest relative error (%(default)s)")
    add("--steps", type=positive, default=10, metavar="N", help="training steps to compare (%(default)s)")
    options, rest = parser.parse_known_args(argv)
    if not options.tolerance >= 0:
        parser.error(f"--tolerance must not be negative, got {options.tolerance}")
    return options, rest


def validate(options, rest):
    argv = with_sizes(rest)
    paths = [script_path(options.baseline, "--baseline"), script_path(options.optimized, "--optimized")]
    outcomes = []
    for path, option in zip(paths, ("--baseline", "--optimized"), strict=True):
        progress(f"{len(outcomes) + 1} of 2: {path}, a batch and {options.steps} steps ...")
        outcomes.append(outcome(load_script(path, option), argv, options.steps))
    entries = compare(*outcomes)
    content = {"baseline": str(paths[0]), "optimized": str(paths[1]), "options": argv, "on_cpu": on_cpu(argv)}
    content |= {"verdict": verdict(entries, options.tolerance), "entries": entries}
    emit(content, as_text(content, "--use-amp" in argv or "--tf32" in argv), options.json)
    return 0 if content["verdict"]["passed"] else 1


def main(argv=None):
    options, rest = parse_options(argv)
    return run_tool("validate_numerical_accuracy.py", lambda: validate(options, rest))


if __name__ == "__main__":
    sys.exit(main())
