#!/usr/bin/env python3
"""Hold one training script against another: logits, loss, every gradient, and ten steps of training.

Both get the same seeded weights and batches. Errors are relative root-mean-square, rms(a - b) / rms(b), so the
tolerance means the same for every tensor. Options that are not listed here go to both scripts.

Exit status: 0 within the tolerance, 1 beyond it, 2 for bad input.
"""

import argparse
import sys

from common.analysis import Parser, emit, load_script, on_cpu, positive, progress, script_path, text_table, with_sizes
from common.command_line import run_tool
from common.versions import relative_error, scaled_gradients


def outcome(script, argv: list[str], steps: int) -> dict:
    """Logits and gradients (float32, on the CPU) of the first batch with the initial weights, and losses of training.

    "logits": [B, T, V]; "loss": float in nats; "gradients": {canonical name: tensor}; "losses": of each step;
    "weights": {canonical name: tensor} after the last.
    """
    import torch

    options = script.parse_options([*argv, "--no-graph"])
    torch.use_deterministic_algorithms(False)  # set_up_backend switches it on where the script asks for it
    script.set_up_backend(options)
    trainer, data = script.Trainer(options), script.load_data(options)
    tokens, labels = (tensor.to(trainer.device) for tensor in data.batch(0))
    seen = []

    def model(tokens):
        seen.append(trainer.model(tokens))
        return seen[-1]

    with torch.no_grad():
        script.compute_loss(model, tokens, labels, options)
    scale = trainer.scaler.get_scale() if trainer.scaler.is_enabled() else 1.0
    loss, gradients = scaled_gradients(script, trainer, tokens, labels, scale)
    while scale > 1 and not all(bool(tensor.isfinite().all()) for tensor in gradients.values()):
        scale /= 2
        loss, gradients = scaled_gradients(script, trainer, tokens, labels, scale)
    losses = [trainer.run(*data.batch(step))["loss"] for step in range(steps)]
    masters = getattr(trainer.optimizer, "masters", {})  # float32 weights, where the model computes with 16-bit ones
    weights = {name: masters.get(p, p).detach() for name, p in trainer.model.named_parameters()}
    return {
        "logits": seen[0].float().cpu(),
        "loss": loss,
        "gradients": {n: t.cpu() for n, t in script.canonical_views(gradients, trainer.config).items()},
        "losses": losses,
        "weights": {n: t.float().cpu() for n, t in script.canonical_views(weights, trainer.config).items()},
    }


def scalar_error(found: float, wanted: float) -> float:
    """Relative difference of two numbers; infinite where one is not finite."""
    error = abs(found - wanted) / max(abs(wanted), 1e-30)
    return error if error == error else float("inf")


def compare(baseline: dict, optimized: dict) -> list[dict]:
    """One entry for each tensor and number compared: kind, name, relative error. A missing gradient is infinite."""
    logits, wanted = optimized["logits"], baseline["logits"]
    same_shape = logits.shape == wanted.shape
    found = [("logits", "logits", relative_error(logits, wanted) if same_shape else float("inf"))]
    found.append(("loss", "loss", scalar_error(optimized["loss"], baseline["loss"])))
    for kind, key in (("gradient", "gradients"), ("weight after training", "weights")):
        for name, tensor in baseline[key].items():
            other = optimized[key].get(name)
            fits = other is not None and other.shape == tensor.shape
            found.append((kind, name, relative_error(other, tensor) if fits else float("inf")))
    steps = zip(optimized["losses"], baseline["losses"], strict=True)
    found += [("loss of a step", f"step {i + 1}", scalar_error(*pair)) for i, pair in enumerate(steps)]
    return [{"kind": kind, "name": name, "error": error} for kind, name, error in found]


def verdict(entries: list[dict], tolerance: float) -> dict:
    """The worst of each kind, and whether all that the tolerance is for is within it.

    Weights after training are shown but not judged: where a gradient is all rounding, AdamW makes a full step of it.
    """
    kinds = dict.fromkeys(entry["kind"] for entry in entries)
    worst = {kind: max((e for e in entries if e["kind"] == kind), key=lambda e: e["error"]) for kind in kinds}
    judged = [entry for entry in entries if entry["kind"] != "weight after training"]
    beyond = [entry for entry in judged if not entry["error"] <= tolerance]
    return {
        "tolerance": tolerance,
        "passed": not beyond,
        "beyond": len(beyond),
        "worst": max(judged, key=lambda entry: entry["error"]),
        "worst_of_each_kind": worst,
    }


def as_text(content: dict, rounded: bool) -> str:
    result = content["verdict"]
    counts = {kind: sum(e["kind"] == kind for e in content["entries"]) for kind in result["worst_of_each_kind"]}
    rows = [
        [kind, counts[kind], f"{entry['error']:.1e}", entry["name"]]
        for kind, entry in result["worst_of_each_kind"].items()
    ]
    lines = [
        f"{content['optimized']} against {content['baseline']}",
        text_table(["what", "compared", "largest error", "where"], rows),
    ]
    worst = result["worst"]
    if result["passed"]:
        lines.append(f"passed: worst is {worst['kind']} {worst['name']}, {worst['error']:.1e} of {result['tolerance']}")
    else:
        lines.append(
            f"FAILED: {result['beyond']} beyond --tolerance {result['tolerance']}, "
            f"worst is {worst['kind']} {worst['name']} with {worst['error']:.1e}"
        )
        if rounded:
            lines.append("the precision is below float32, whose rounding alone is larger: try --tolerance 3e-2")
    return "\n".join(lines)


def parse_options(argv: list[str] | None) -> tuple[argparse.Namespace, list[str]]:
    parser = Parser(
        "validate_numerical_accuracy.py",
        "Compare logits, loss, every gradient and ten steps of two training scripts.",
        "--baseline ../version1_pytorch_baseline/tiny_llama_v1.py --optimized ./tiny_llama_v2.py --tolerance 1e-4; "
        "options that are not listed go to both scripts",
    )
    parser.add_argument("--baseline", required=True, metavar="A", help="script, or a version's folder, that is right")
    parser.add_argument("--optimized", required=True, metavar="B", help="script, or folder, to be checked")
    parser.add_argument("--tolerance", type=float, default=1e-4, help="largest relative error (%(default)s)")
    parser.add_argument(
        "--steps", type=positive, default=10, metavar="N", help="training steps to compare (%(default)s)"
    )
    parser.add_argument("--optimized-options", default="", metavar="TEXT", help="options for B alone, as one text")
    options, rest = parser.parse_known_args(argv)
    if not options.tolerance >= 0:
        parser.error(f"--tolerance must not be negative, but is {options.tolerance}")
    return options, rest


def validate(options: argparse.Namespace, rest: list[str]) -> int:
    argv = with_sizes(rest)
    paths = [script_path(options.baseline, "--baseline"), script_path(options.optimized, "--optimized")]
    extra = [[], options.optimized_options.split()]
    outcomes = []
    for path, option, more in zip(paths, ("--baseline", "--optimized"), extra, strict=True):
        progress(f"{path}: a batch, and {options.steps} steps ...")
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


def main(argv: list[str] | None = None) -> int:
    options, rest = parse_options(argv)
    return run_tool("validate_numerical_accuracy.py", lambda: validate(options, rest))


if __name__ == "__main__":
    sys.exit(main())
