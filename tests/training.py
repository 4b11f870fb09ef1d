"""Train a version in this process, from a command line's options to losses and tensors."""

import pytest
import torch

from common.versions import load_version


def need_fused_attention_in_16_bits():
    """Skip a test on a CPU where PyTorch's attention in 16 bits is made of matmuls and a softmax in float32."""
    if not torch.cuda.is_available() and torch.__version__ < (2, 9):
        pytest.skip("PyTorch before 2.9 has no fused attention in 16 bits with grouped queries on a CPU")


def train(version, argv, steps=10):
    """Return the losses of some steps after the warm-up, and the trainer."""
    script = load_version(version)
    config = script.parse_options(list(map(str, argv)))
    torch.use_deterministic_algorithms(False)  # set_up_backend only ever turns it on
    script.set_up_backend(config)
    data = script.load_data(config)
    with config.one_stream():
        trainer = script.Trainer(config)
        trainer.warm_up(*script.batch(data, 0, config), trainer.initial)
        losses = [trainer.run(*script.batch(data, step, config))["loss"] for step in range(steps)]
        trainer.synchronize()
    return losses, trainer


def tensors(script, trainer):
    """Return {"gradients", "weights", "exp_avg", "exp_avg_sq": {canonical name: CPU tensor}}. Collective under FSDP."""
    found = {"gradients": {}, "weights": {}, "exp_avg": {}, "exp_avg_sq": {}}
    for name, p in trainer.model.named_parameters():
        state = trainer.optimizer.state[p]
        of_p = {"gradients": p.grad, "weights": script.get_weight(p, state)} | state
        for kind, named in found.items():
            named[name] = script.full_tensor(of_p[kind]).detach().to("cpu", copy=True)
    return {kind: script.canonical_views(named, trainer.options.model) for kind, named in found.items()}
