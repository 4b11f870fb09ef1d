"""Compare what two training scripts compute: logits, loss, every gradient and some steps of training."""

import torch

from common.versions import batch_gradients, prepare, relative_error


def outcome(script, argv, steps):
    """Return logits, loss and gradients of the first batch with the initial weights, and what training makes of them.

    "logits": [B, T, V]; "loss": float in nats; "gradients": {canonical name: tensor}; "losses": of each step;
    "weights": {canonical name: tensor} after the last. Tensors are float32 on the CPU.
    """
    trainer, data = prepare(script, argv)
    config = trainer.config
    tokens, labels = script.batch(data, 0, config)
    with torch.no_grad():
        logits = script_logits(script, trainer, tokens.to(config.device), labels.to(config.device))
    loss, gradients = batch_gradients(script, trainer, tokens, labels)
    losses = [trainer.run(*script.batch(data, step, config))["loss"] for step in range(steps)]
    state = trainer.optimizer.state
    weights = {name: script.get_weight(p, state[p]).detach() for name, p in trainer.model.named_parameters()}
    weights = {name: t.float().cpu() for name, t in script.canonical_views(weights, config).items()}
    found = {"logits": logits.float().cpu(), "loss": loss, "gradients": gradients}
    return found | {"losses": losses, "weights": weights}


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
    for kind, key in (("gradient", "gradients"), ("weight after training", "weights")):
        found += [(kind, name, error(optimized[key].get(name), tensor)) for name, tensor in baseline[key].items()]
    steps = zip(optimized["losses"], baseline["losses"], strict=True)
    found += [("loss of a step", f"step {i + 1}", scalar_error(*pair)) for i, pair in enumerate(steps)]
    return [{"kind": kind, "name": name, "error": error} for kind, name, error in found]


def verdict(entries, tolerance):
    """Return the worst entry of each kind, and whether all that is judged is within the tolerance.

    Weights after training are shown but not judged: where a gradient is all rounding, AdamW makes a full step of it.
    """
    kinds = dict.fromkeys(entry["kind"] for entry in entries)
    worst = {kind: max((e for e in entries if e["kind"] == kind), key=lambda e: e["error"]) for kind in kinds}
    judged = [entry for entry in entries if entry["kind"] != "weight after training"]
    beyond = [entry for entry in judged if not entry["error"] <= tolerance]
    found = {"tolerance": tolerance, "passed": not beyond, "beyond": len(beyond)}
    return found | {"worst": max(judged, key=lambda entry: entry["error"]), "worst_of_each_kind": worst}
