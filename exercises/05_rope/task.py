"""What exercise 05 must compute, and typical mistakes."""

import torch

from common.versions import load_version
from grading import Mistake, Speed, Task, random

V1 = load_version(1)


def inputs(B, T, heads, turned, D):
    cos, sin = V1.rope_tables(T, D, 10000.0, "cpu")
    return {
        "x": random(B, T, heads, D, seed=1, scale=1.6, offset=0.5),
        "dy": random(B, T, heads, D, seed=2, scale=0.7),
        "cos": cos,
        "sin": sin,
        "turned": turned,
    }


def define(x, dy, cos, sin, turned):
    x.requires_grad_()
    y = torch.cat([V1.apply_rope(x[:, :, :turned], cos, sin), x[:, :, turned:]], dim=2)
    return {"y": y.detach(), "dx": torch.autograd.grad(y, x, dy)[0]}


def owner(module, name, index, inputs):
    b, t, head, _ = index
    return (b * inputs["x"].shape[1] + t) // module.TOKENS, head // module.HEADS


TASK = Task(
    cases={
        "one tile": {"B": 1, "T": 4, "heads": 2, "turned": 2, "D": 8},
        "ragged tokens and heads": {"B": 1, "T": 5, "heads": 3, "turned": 3, "D": 8},
        "some heads copied": {"B": 1, "T": 6, "heads": 5, "turned": 3, "D": 8},
        "two sequences, three pairs": {"B": 2, "T": 5, "heads": 4, "turned": 3, "D": 6},
    },
    inputs=inputs,
    define=define,
    names={"y": "sequence token head element", "dx": "sequence token head element"},
    owner=owner,
    wide=("cos", "sin"),
    speed=Speed({"B": 64, "T": 512, "heads": 32, "turned": 24, "D": 64}, {"TOKENS": 2, "HEADS": 32}),
    mistakes={
        "backward turns forwards": Mistake("sin = -sin", "sin = sin", "dx"),
        "other direction": Mistake("(x1 * cos - x2 * sin)", "(x1 * cos + x2 * sin)", "y"),
        "second half of the pair": Mistake("(x2 * cos + x1 * sin)", "(x2 * cos - x1 * sin)", "y"),
        "neighbours as pairs": Mistake("tl.load(x_ptr + offsets + HALF", "tl.load(x_ptr + offsets + 1", "y"),
        "all heads turned": Mistake("tl.where(head < turned, sin, 0.0)", "sin", "y"),
        "other heads not copied": Mistake(
            "inside = known & (head < heads)", "inside = known & (head < turned)", "y", "unwritten"
        ),
        "heads not masked": Mistake("inside = known & (head < heads)", "inside = known", "y", "stray"),
        "stored over the input": Mistake(
            "tl.store(y_ptr + offsets + HALF", "tl.store(x_ptr + offsets + HALF", "x", "changed"
        ),
    },
)
