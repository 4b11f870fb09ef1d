"""Compare what two training scripts compute: logits, loss, every gradient and some steps of training."""

import torch

from common.versions import batch_gradients, prepare, relative_error


def outcome(script, argv, steps):
    """Return logits, loss and gradients of the first batch with the initial weights, and the losses of some steps.

    "logits": [B, T, V]; "loss": float in nats; "gradients": {canonical name: tensor}; "losses": of each step.
    Tensors are float32 on the CPU.
    """
    trainer, data = prepare(script, argv)
    tokens, labels = script.batch(data, 0, trainer.config)
    logits = []

    def model(tokens):
        logits.append(trainer.model(tokens))
        return logits[0]

    with torch.no_grad():
        script.compute_loss(model, *(tensor.to(trainer.config.device) for tensor in (tokens, labels)), trainer.config)
    loss, gradients = batch_gradients(script, trainer, tokens, labels)
    losses = [trainer.run(*script.batch(data, step, trainer.config))["loss"] for step in range(steps)]
    return {"logits": logits[0].float().cpu(), "loss": loss, "gradients": gradients, "losses": losses}


def tensors_of(found):
    """Return {(kind, name): tensor} of an outcome."""
    tensors = {
        ("logits", "logits"): found["logits"],
        ("loss", "loss"): torch.tensor(found["loss"], dtype=torch.float64),
    }
    tensors |= {("gradient", name): gradient for name, gradient in found["gradients"].items()}
    losses = torch.tensor(found["losses"], dtype=torch.float64)
    return tensors | {("loss of a step", f"step {i}"): loss for i, loss in enumerate(losses, 1)}


def compare(baseline, optimized):
    """Return kind, name and relative error of each tensor and number; a missing gradient is infinitely wrong."""
    found, entries = tensors_of(optimized), []
    for (kind, name), wanted in tensors_of(baseline).items():
        tensor = found.get((kind, name))
        fits = tensor is not None and tensor.shape == wanted.shape
        error = relative_error(tensor, wanted) if fits else float("inf")
        entries.append({"kind": kind, "name": name, "error": error})
    return entries


def verdict(entries, tolerance):
    """Return the worst entry of each kind, and whether all are within the tolerance."""
    worst = {}
    for entry in entries:
        if entry["error"] > worst.get(entry["kind"], {"error": -1})["error"]:
            worst[entry["kind"]] = entry
    beyond = sum(not entry["error"] <= tolerance for entry in entries)
    result = {"tolerance": tolerance, "passed": not beyond, "beyond": beyond}
    return result | {"worst": max(worst.values(), key=lambda entry: entry["error"]), "worst_of_each_kind": worst}
