"""Compare what two training scripts compute: logits, loss, every gradient and some steps of training."""

import torch

from common.versions import batch_gradients, prepare, relative_error


def outcome(script, argv, steps):
    """Return logits, loss and gradients of the first batch with the initial weights, and the losses of some steps.

    "logits": [B, T, V]; "loss": float in nats; "gradients": {canonical name: tensor}; "losses": of each step.
    Tensors are float32 on the CPU.
    """
    trainer, data = prepare(script, argv)
    config = trainer.config
    tokens, labels = script.batch(data, 0, config)
    with torch.no_grad():
        logits = script_logits(script, trainer, tokens.to(config.device), labels.to(config.device))
    loss, gradients = batch_gradients(script, trainer, tokens, labels)
    losses = [trainer.run(*script.batch(data, step, config))["loss"] for step in range(steps)]
    return {"logits": logits.float().cpu(), "loss": loss, "gradients": gradients, "losses": losses}


def script_logits(script, trainer, tokens, labels):
    """Return the logits that the script's loss is computed from."""
    seen = []

    def model(tokens):
        seen.append(trainer.model(tokens))
        return seen[-1]

    script.compute_loss(model, tokens, labels, trainer.config)
    return seen[0]


def scalar_error(found, wanted):
    """Return the relative difference of two numbers; infinity where one is not finite."""
    error = abs(found - wanted) / max(abs(wanted), 1e-30)
    return error if error == error else float("inf")


def compare(baseline, optimized):
    """Return kind, name and relative error of each tensor and number; a missing gradient is infinitely wrong."""

    def error(found, wanted):
        fits = found is not None and found.shape == wanted.shape
        return relative_error(found, wanted) if fits else float("inf")

    found = [("logits", "logits", error(optimized["logits"], baseline["logits"]))]
    found.append(("loss", "loss", scalar_error(optimized["loss"], baseline["loss"])))
    gradients = baseline["gradients"].items()
    found += [("gradient", name, error(optimized["gradients"].get(name), tensor)) for name, tensor in gradients]
    steps = zip(optimized["losses"], baseline["losses"], strict=True)
    found += [("loss of a step", f"step {i + 1}", scalar_error(*pair)) for i, pair in enumerate(steps)]
    return [{"kind": kind, "name": name, "error": error} for kind, name, error in found]


def verdict(entries, tolerance):
    """Return the worst entry of each kind, and whether all are within the tolerance."""
    kinds = dict.fromkeys(entry["kind"] for entry in entries)
    worst = {kind: max((e for e in entries if e["kind"] == kind), key=lambda e: e["error"]) for kind in kinds}
    beyond = [entry for entry in entries if not entry["error"] <= tolerance]
    found = {"tolerance": tolerance, "passed": not beyond, "beyond": len(beyond)}
    return found | {"worst": max(entries, key=lambda entry: entry["error"]), "worst_of_each_kind": worst}
