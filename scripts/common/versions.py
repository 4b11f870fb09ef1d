"""The four training scripts as modules, and the comparison that no speed figure may do without: their gradients.

from common.versions import load_version, loss_and_gradients, relative_error
loss, gradients = loss_and_gradients(3, ["--preset", "tiny"])
"""

import importlib.util
import pathlib
import sys

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
SCRIPTS = {
    1: REPOSITORY / "version1_pytorch_baseline" / "tiny_llama_v1.py",
    2: REPOSITORY / "version2_pytorch_fused" / "tiny_llama_v2.py",
    3: REPOSITORY / "version3_triton" / "tiny_llama_v3.py",
    4: REPOSITORY / "version4_pytorch_sdpa" / "tiny_llama_v4.py",
}


def load_version(version):
    """The module of tiny_llama_v<version>.py, loaded once by its path; importing it does no work."""
    name = SCRIPTS[version].stem
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, SCRIPTS[version])
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


def loss_and_gradients(version, argv, step=0, full_precision=False):
    """Loss of one batch with the initial weights, and its gradient with respect to every weight.

    argv: command-line options of the script; step: which batch of the data; full_precision: in float32 whatever argv
    says. The step is run operation by operation, never replayed from a graph. Returns (float in nats, {canonical name:
    float32 CPU tensor}); a weight without a gradient is missing from it. Bad options end the program with status 2, as
    the script itself does.
    """
    import torch  # here, because the tools that only read the scripts do without it

    script = load_version(version)
    options = script.parse_options([*argv, "--no-graph"])
    if full_precision:
        options.use_amp = options.tf32 = False
    torch.use_deterministic_algorithms(False)  # set_up_backend switches it on where the version asks for it
    script.set_up_backend(options)
    trainer = script.Trainer(options)
    tokens, labels = (tensor.to(trainer.device) for tensor in script.load_data(options).batch(step))
    scale = trainer.scaler.get_scale() if trainer.scaler.is_enabled() else 1.0
    loss, gradients = scaled_gradients(script, trainer, tokens, labels, scale)
    while scale > 1 and not all(bool(tensor.isfinite().all()) for tensor in gradients.values()):
        scale /= 2  # as the gradient scaler does, step by step, until nothing overflows
        loss, gradients = scaled_gradients(script, trainer, tokens, labels, scale)
    canonical = script.canonical_views(gradients, trainer.config)
    return loss, {name: tensor.cpu() for name, tensor in canonical.items()}


def scaled_gradients(script, trainer, tokens, labels, scale):
    """The loss, and the gradients that went backwards multiplied by scale, divided by it again."""
    trainer.optimizer.zero_grad(set_to_none=True)
    loss = script.compute_loss(trainer.model, tokens, labels, trainer.options)
    (loss.float() * scale).backward()
    parameters = trainer.model.named_parameters()
    return loss.item(), {name: p.grad.float() / scale for name, p in parameters if p.grad is not None}


def relative_error(a, b):
    """rms(a - b) / rms(b) of two tensors of one shape, in float64; infinite where only b is zero or a is not finite."""
    a, b = a.double(), b.double()
    difference, size = (a - b).square().mean().sqrt().item(), b.square().mean().sqrt().item()
    if difference == 0:
        return 0.0
    return difference / size if size > 0 and difference == difference else float("inf")
