#!/usr/bin/env python3
"""Compare one training script with another: logits, loss, every gradient, and ten steps of training.

Both get the same seeded weights and batches. Errors are relative root-mean-square, rms(a - b) / rms(b): the tolerance
means the same for every tensor. Options that are not listed here go to both scripts.

Exit status: 0 within the tolerance, 1 beyond it, 2 for bad input.
"""

import sys

from common.accuracy import compare, outcome, verdict
from common.command_line import Parser, load_script, on_cpu, positive, progress, run_tool, script_path, with_sizes
from common.tables import emit, text_table


def as_text(content, low_precision):
    result = content["verdict"]
    counts = {kind: sum(e["kind"] == kind for e in content["entries"]) for kind in result["worst_of_each_kind"]}
    rows = [
        [kind, counts[kind], f"{entry['error']:.1e}", entry["name"]]
        for kind, entry in result["worst_of_each_kind"].items()
    ]
    lines = [f"{content['optimized']} compared with {content['baseline']}"]
    lines.append(text_table(["what", "compared", "largest error", "where"], rows))
    worst = f"worst is {result['worst']['kind']} {result['worst']['name']} with {result['worst']['error']:.1e}"
    if result["passed"]:
        return "\n".join([*lines, f"passed: {worst}, --tolerance {result['tolerance']}"])
    lines.append(f"FAILED: {result['beyond']} beyond --tolerance {result['tolerance']}, {worst}")
    if low_precision:
        lines.append("the precision is below float32, whose rounding alone is larger: try --tolerance 3e-2")
    return "\n".join(lines)


def parse_options(argv):
    parser = Parser(
        "validate_numerical_accuracy.py",
        "Compare logits, loss, every gradient and ten steps of two training scripts.",
        "--baseline ../version1_pytorch_baseline/tiny_llama_v1.py --optimized ./tiny_llama_v2.py --tolerance 1e-4; "
        "options that are not listed go to both scripts",
    )
    add = parser.add_argument
    add("--baseline", required=True, metavar="A", help="script, or a version's folder, that is right")
    add("--optimized", required=True, metavar="B", help="script, or folder, to be checked")
    add("--tolerance", type=float, default=1e-4, help="largest relative error (%(default)s)")
    add("--steps", type=positive, default=10, metavar="N", help="training steps to compare (%(default)s)")
    add("--optimized-options", default="", metavar="TEXT", help="options for B alone, as one text")
    options, rest = parser.parse_known_args(argv)
    if not options.tolerance >= 0:
        parser.error(f"--tolerance must not be negative, got {options.tolerance}")
    return options, rest


def validate(options, rest):
    argv = with_sizes(rest)
    paths = [script_path(options.baseline, "--baseline"), script_path(options.optimized, "--optimized")]
    extra = [[], options.optimized_options.split()]
    outcomes = []
    for path, option, more in zip(paths, ("--baseline", "--optimized"), extra, strict=True):
        progress(f"{len(outcomes) + 1} of 2: {path}, a batch and {options.steps} steps ...")
        outcomes.append(outcome(load_script(path, option), [*argv, *more], options.steps))
    entries = compare(*outcomes)
    content = {
        "baseline": str(paths[0]),
        "optimized": str(paths[1]),
        "options": argv,
        "optimized_options": options.optimized_options,
        "on_cpu": on_cpu(argv),
        "verdict": verdict(entries, options.tolerance),
        "entries": entries,
    }
    emit(content, as_text(content, "--use-amp" in argv or "--tf32" in argv), options.json)
    return 0 if content["verdict"]["passed"] else 1


def main(argv=None):
    options, rest = parse_options(argv)
    return run_tool("validate_numerical_accuracy.py", lambda: validate(options, rest))


if __name__ == "__main__":
    sys.exit(main())
