"""Load the four training scripts as modules, and compute the loss and gradients of one batch with each."""

import importlib.machinery
import importlib.util
import pathlib
import re
import sys

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
SCRIPTS = {
    1: REPOSITORY / "version1_pytorch_baseline" / "tiny_llama_v1.py",
    2: REPOSITORY / "version2_pytorch_fused" / "tiny_llama_v2.py",
    3: REPOSITORY / "version3_triton" / "tiny_llama_v3.py",
    4: REPOSITORY / "version4_pytorch_sdpa" / "tiny_llama_v4.py",
}
HEADING = b"# ============ The training harness below"


def workshop():
    """Return the workshop's version, which pyproject.toml gives."""
    return re.search(r'^version = "(.+)"$', (REPOSITORY / "pyproject.toml").read_text(), re.MULTILINE)[1]


def halves(script):
    """Return the lesson and the harness of a script, as bytes; the harness starts with its heading."""
    lesson, heading, harness = script.read_bytes().partition(HEADING)
    if not heading or HEADING in harness:
        raise SystemExit(f"{script} must have one line that starts with {HEADING.decode()!r}")
    return lesson, heading + harness


def load_version(version):
    """Return the module of tiny_llama_v<version>.py, loaded once."""
    return load_file(SCRIPTS[version], SCRIPTS[version].stem)


def load_file(path, name):
    """Return the module of this name, loaded from a file once."""
    if name not in sys.modules:
        loader = importlib.machinery.SourceFileLoader(name, str(path))
        sys.modules[name] = module = importlib.util.module_from_spec(importlib.util.spec_from_loader(name, loader))
        try:
            loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


def loss_and_gradients(version, argv, step=0, full_precision=False):
    """Return the loss of one batch with the initial weights, and its gradients {canonical name: float32 CPU tensor}.

    argv holds options of the script. The step runs eagerly; full_precision overrides the precision in argv. A weight
    without a gradient is left out. Wrong options end the program with status 2, as in the script.
    """
    script = load_version(version)
    trainer, data = prepare(script, argv, full_precision)
    return batch_gradients(script, trainer, *script.batch(data, step, trainer.options))


def prepare(script, argv, full_precision=False):
    """Return a script's trainer with the initial weights, which steps eagerly, and its data."""
    import torch  # here: tools that only need the paths start faster without it

    config = script.parse_options([*argv, "--no-graph"])
    if full_precision:
        config.use_amp = config.tf32 = False
    torch.use_deterministic_algorithms(False)  # set_up_backend only ever turns it on
    script.set_up_backend(config)
    return script.Trainer(config), script.load_data(config)


def batch_gradients(script, trainer, tokens, labels):
    """Return loss and canonical gradients; halve the loss scale, as GradScaler does, until none overflows."""
    tokens, labels = (tensor.to(trainer.options.device) for tensor in (tokens, labels))
    scale = trainer.scaler.get_scale()  # 1 without a scaler
    while True:
        trainer.optimizer.zero_grad(set_to_none=True)
        loss = script.compute_loss(trainer.model, tokens, labels, trainer.options)
        (loss * scale).backward()
        found = {name: p.grad.float() / scale for name, p in trainer.model.named_parameters() if p.grad is not None}
        if scale <= 1 or all(gradient.isfinite().all() for gradient in found.values()):
            return loss.item(), {n: g.cpu() for n, g in script.canonical_views(found, trainer.options.model).items()}
        scale /= 2


def relative_error(a, b):
    """Return rms(a - b) / rms(b) in float64; infinity if only b is zero or if one is not finite."""
    a = a.double()
    b = b.double()
    difference = (a - b).square().mean().sqrt().item()
    size = b.square().mean().sqrt().item()
    if difference == 0:
        return 0.0
    return difference / size if size > 0 and difference < float("inf") else float("inf")
