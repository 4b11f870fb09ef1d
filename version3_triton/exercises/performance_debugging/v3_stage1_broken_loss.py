#!/usr/bin/env python3
"""Stage 1: a loss that starts far too high. Version 3 with PyTorch's default initialisation.

python v3_stage1_broken_loss.py                     # options of tiny_llama_v3.py go through
python v3_stage1_broken_loss.py --num-steps 50
"""

import math
import sys

from stage_tools import load_v3, run_stage

TITLE = "stage 1: what is wrong with the loss?"


def default_weights(v3):
    """As initial_weights, with what nn.Embedding and nn.Linear draw when nobody tells them otherwise."""

    def initial_weights(config, seed):
        generator = v3.torch.Generator().manual_seed(seed)
        weights = {}
        for name, shape in v3.weight_shapes(config).items():
            bound = 1 / math.sqrt(shape[-1])
            weights[name] = v3.torch.ones(shape)
            if name.startswith("embed"):
                weights[name].normal_(0, 1, generator=generator)
            elif len(shape) == 2:
                weights[name].uniform_(-bound, bound, generator=generator)
        return weights

    return initial_weights


def first_logits(v3, options):
    """A sentence on the logits and the loss of the first batch, before any training."""
    trainer = v3.Trainer(options)
    tokens, labels = (t.to(trainer.device) for t in v3.load_data(options).batch(0))
    with v3.torch.no_grad():
        logits = trainer.model(tokens).float()
    loss = v3.mean_loss(logits, labels).item()
    return f"logits: standard deviation {logits.std():.3g}, highest {logits.max():.3g}; loss {loss:.4f}"


def load():
    v3 = load_v3()
    v3.correct_weights = v3.initial_weights
    v3.initial_weights = default_weights(v3)
    return v3


def report(v3, trainer, steps, summary):
    options = trainer.options
    yield f"a guess that knows nothing loses ln({options.vocab_size}) = {math.log(options.vocab_size):.4f}"
    yield f"default initialisation  {first_logits(v3, options)}"
    v3.initial_weights, faulty = v3.correct_weights, v3.initial_weights
    yield f"N(0, 0.02)              {first_logits(v3, options)}"
    v3.initial_weights = faulty
    yield "the embedding is the output projection too: of N(0, 1), it makes logits of the order sqrt(hidden dimension)"


if __name__ == "__main__":
    sys.exit(run_stage(load(), TITLE, report))
