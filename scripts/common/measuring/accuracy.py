"""Decide whether training scripts compute the same numbers: logits, loss, every gradient and some steps of training.

    reference = Reference(argv)                                   # version 1 in float64, and in the precision of argv
    found = outcome(load_version(2), argv, steps=0)
    verdict(reference.compare(found))["passed"]

A tensor may be twice as far from float64 as version 1's is, and one rounding more. So each parameter has its own bound,
which follows from the sizes and the precision.
"""

from common.versions import batch_gradients, load_version, prepare, relative_error

ROUNDING = {"cpu": 1e-6, "cuda": 1e-5}  # relative, of float32 sums; on a GPU libraries add in another order
LAST_PLACE = {"bfloat16": 2**-7, "float16": 2**-10}  # relative; TF32 keeps as many bits as float16
LOSS_BOUND = 1e-4  # relative, in float32: later losses carry every rounding before them


def allowed(error, rounding):
    """Return the relative error that a result may have where plain PyTorch's, in the same precision, has this one."""
    return 2 * error + rounding


def loss_bound(options):
    """Return the relative error that a loss may have; options: a training script's, by name.

    A loss is a mean, and its distance from the exact one may vanish by chance. So the bound does not follow from that
    distance: it is one unit in the last place of a lower precision, or LOSS_BOUND.
    """
    if options["use_amp"]:
        return LAST_PLACE[options["amp_dtype"]]
    if options["tf32"]:
        return LAST_PLACE["float16"]
    return LOSS_BOUND


def same_loss(loss, wanted, bound):
    """Return whether a loss lies within its relative bound; NaN does not."""
    return abs(loss - wanted) <= bound * abs(wanted)


def rounding(options):
    """Return the relative error of one rounding; in mixed precision a gradient may be kept in 16 bits."""
    one = ROUNDING["cuda" if str(options["device"]).startswith("cuda") else "cpu"]
    if options["use_amp"]:
        one += LAST_PLACE[options["amp_dtype"]] / 2
    return one


# ---------------------------------------------------------------- what a script computes


def outcome(script, argv, steps):
    """Return logits, loss and gradients of the first batch with the initial weights, and the losses of some steps.

    "logits": [B, T, V]; "loss": float in nats; "gradients": {canonical name: tensor}; "losses": of each step.
    Tensors are float32 on the CPU.
    """
    import torch  # here: tools that need the bounds alone start faster without it

    trainer, data = prepare(script, argv)
    tokens, labels = script.batch(data, 0, trainer.options)
    device = trainer.options.device
    logits = []

    def model(tokens, *labels):
        logits.append(trainer.model(tokens))
        return trainer.model(tokens, *labels) if labels else logits[0]  # of labels, a loss that keeps no logits

    with torch.no_grad():
        script.compute_loss(model, tokens.to(device), labels.to(device), trainer.options)
    loss, gradients = batch_gradients(script, trainer, tokens, labels)
    losses = [trainer.run(*script.batch(data, step, trainer.options))["loss"] for step in range(steps)]
    return {"logits": logits[0].float().cpu(), "loss": loss, "gradients": gradients, "losses": losses}


def exact_outcome(argv):
    """Return version 1's logits, loss and gradients in float64, from one sequence at a time.

    float64 takes twice the memory of a run in float32, which may be all there is.
    """
    import torch

    script = load_version(1)
    trainer, data = prepare(script, argv, full_precision=True)
    model = trainer.model.double()
    device = trainer.options.device
    tokens, labels = script.batch(data, 0, trainer.options)
    logits = []

    def keep_logits(tokens):
        found = model(tokens)
        logits.append(found.detach().cpu())
        return found

    total = 0.0
    for row, row_labels in zip(tokens.to(device).split(1), labels.to(device).split(1), strict=True):
        loss = script.compute_loss(keep_logits, row, row_labels, trainer.options) / len(tokens)
        loss.backward()
        total += loss.item()
    gradients = {name: p.grad.cpu() for name, p in model.named_parameters()}
    return {"logits": torch.cat(logits), "loss": total, "gradients": gradients}


# ---------------------------------------------------------------- comparison


def errors_of(found, wanted):
    """Return {name: relative error} of tensors; one that is missing, or of another shape, is infinitely wrong."""
    errors = {}
    for name, tensor in wanted.items():
        fits = name in found and found[name].shape == tensor.shape
        errors[name] = relative_error(found[name], tensor) if fits else float("inf")
    return errors


def tensors_of(found):
    """Return {(kind, name): tensor} of an outcome."""
    import torch

    tensors = {
        ("logits", "logits"): found["logits"],
        ("loss", "loss"): torch.tensor(found["loss"], dtype=torch.float64),
    }
    tensors |= {("gradient", name): gradient for name, gradient in found["gradients"].items()}
    losses = torch.tensor(found.get("losses", ()), dtype=torch.float64)
    return tensors | {("loss of a step", f"step {i}"): loss for i, loss in enumerate(losses, 1)}


def compare(wanted, found, bound_of):
    """Return kind, name, relative error and bound of each tensor and number; bound_of(kind, name) returns the bound."""
    errors = errors_of(tensors_of(found), tensors_of(wanted))
    return [
        {"kind": kind, "name": name, "error": error, "bound": bound_of(kind, name)}
        for (kind, name), error in errors.items()
    ]


def excess(entry):
    """Return how many times the bound an error is."""
    if entry["bound"]:
        return entry["error"] / entry["bound"]
    return float("inf") if entry["error"] else 0.0


def verdict(entries):
    """Return whether all errors are within their bounds, the worst entry of all and of each kind."""
    worst = {}
    for entry in entries:
        if entry["kind"] not in worst or excess(entry) > excess(worst[entry["kind"]]):
            worst[entry["kind"]] = entry
    beyond = sum(not entry["error"] <= entry["bound"] for entry in entries)
    result = {"passed": not beyond, "beyond": beyond, "largest_error": max(entry["error"] for entry in entries)}
    return result | {"worst": max(worst.values(), key=excess), "worst_of_each_kind": worst}


def known_options(script, argv):
    """Return the options that a training script knows: those of other versions change none of its numbers."""
    known = list(argv)
    for word in script.build_parser().parse_known_args(argv)[1]:
        known.remove(word)
    return known


class Reference:
    """Hold what every version must compute with these options, and by how much it may be off.

    exact: version 1 in float64. own: version 1 in the precision of the options, with the losses of some steps.
    """

    def __init__(self, argv, steps=0):
        script = load_version(1)
        argv = known_options(script, argv)
        options = vars(script.parse_options(argv))
        self.exact = exact_outcome(argv)
        self.own = outcome(script, argv, steps)
        self.wanted = {**self.exact, "losses": self.own["losses"]}
        self.loss_bound = loss_bound(options)
        one = rounding(options)
        errors = errors_of(tensors_of(self.own), tensors_of(self.exact))
        self.bounds = {key: allowed(error, one) for key, error in errors.items() if key[0] in ("logits", "gradient")}

    def bound_of(self, kind, name):
        return self.bounds.get((kind, name), self.loss_bound)

    def compare(self, found):
        """Return the entries of an outcome, for verdict."""
        return compare(self.wanted, found, self.bound_of)
