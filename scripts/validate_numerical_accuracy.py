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
from common.command_line import Parser, finite, load_script, on_cpu, positive, progress, script_path, with_sizes
from common.tables import columns, emit, text_table


def as_text(content, low_precision):
    result, worst = content["verdict"], content["verdict"]["worst"]
    kinds = Counter(entry["kind"] for entry in content["entries"])
    rows = [entry | {"compared": kinds[kind]} for kind, entry in result["worst_of_each_kind"].items()]
    table = columns("what: {kind} | compared: {compared} | largest error: {error:.1e} | where: {name}", rows)
    lines = [f"{content['optimized']} compared with {content['baseline']}", text_table(*table)]
    found = "passed:" if result["passed"] else f"FAILED: {result['beyond']} beyond"
    named = f"worst is {worst['kind']} {worst['name']} with {worst['error']:.1e}"
    lines.append(f"{found} --tolerance {result['tolerance']}, {named}")
    if low_precision and not result["passed"]:
        lines.append("the precision is below float32, whose rounding alone is larger: try --tolerance 3e-2")
    return "\n".join(lines)


def validate(options, rest):
    argv = with_sizes(rest)
    outcomes = []
    paths = {name: script_path(getattr(options, name), f"--{name}") for name in ("baseline", "optimized")}
    for i, (name, path) in enumerate(paths.items(), 1):
        progress(f"{i} of 2: {path}, a batch and {options.steps} steps ...")
        outcomes.append(outcome(load_script(path, f"--{name}"), argv, options.steps))
    entries = compare(*outcomes, lambda kind, name: options.tolerance)
    content = {name: str(path) for name, path in paths.items()} | {"options": argv, "on_cpu": on_cpu(argv)}
    result = {"tolerance": options.tolerance} | verdict(entries)
    content |= {"verdict": result, "entries": entries}
    emit(content, as_text(content, "--use-amp" in argv or "--tf32" in argv), options.json)
    return 0 if content["verdict"]["passed"] else 1


def main(argv=None):
    parser = Parser("validate_numerical_accuracy.py", __doc__)
    add = parser.add_argument
    add("--baseline", required=True, metavar="A", help="script, or a version's folder, that is right")
    add("--optimized", required=True, metavar="B", help="script, or folder, to be checked")
    add("--tolerance", type=finite, default=1e-4, help="largest relative error (%(default)s)")
    add("--steps", type=positive, default=10, metavar="N", help="training steps to compare (%(default)s)")
    return parser.run(validate, argv, passes_on=True)


if __name__ == "__main__":
    sys.exit(main())
