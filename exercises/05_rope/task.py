"""Exercise 05: what run() must compute, and typical mistakes."""

import torch

from common.versions import load_version
from grading import Mistake, Speed, Task, random

V1 = load_version(1)


def inputs(B, T, heads, rotated_heads, D):
    cos, sin = V1.rope_tables(T, D, 10000.0, "cpu")
    return {
        "x": random(B, T, heads, D, seed=1, scale=1.6, offset=0.5),
        "dy": random(B, T, heads, D, seed=2, scale=0.7),
        "cos": cos,
        "sin": sin,
        "rotated_heads": rotated_heads,
    }


def define(x, dy, cos, sin, rotated_heads):
    x.requires_grad_()
    y = torch.cat([V1.apply_rope(x[:, :, :rotated_heads], cos, sin), x[:, :, rotated_heads:]], dim=2)
    return {"y": y.detach(), "dx": torch.autograd.grad(y, x, dy)[0]}


def not_inverted(dy, **rest):
    return {"dx": define(dy=dy, **rest | {"x": dy})["y"]}


def rotate(x, dy, cos, sin, rotated_heads, position=None, all_heads=False, neighbours=False):
    """Return y and dx of the kernel with one index changed; past the end of cos and sin is NaN."""
    B, T, heads, D = x.shape
    rows = torch.arange(B * T * heads).view(B, T, heads)
    place = rows // heads % T if position is None else position(rows, T, heads)
    outside = cos.new_full((int(place.max()) + 1, D // 2), torch.nan)
    turned = torch.arange(heads) < (heads if all_heads else rotated_heads)
    c = torch.where(turned[:, None], torch.cat([cos, outside])[place], 1.0)  # [B, T, heads, D / 2]
    s = torch.where(turned[:, None], torch.cat([sin, outside])[place], 0.0)

    def turn(x, s):
        x1 = x[..., : D // 2]
        x2 = x[..., 1 : D // 2 + 1] if neighbours else x[..., D // 2 :]
        return torch.cat([x1 * c - x2 * s, x2 * c + x1 * s], dim=3)

    return {"y": turn(x, s), "dx": turn(dy, -s)}


def owner(module, name, index, inputs):
    b, t, head, _ = index
    _, T, heads, _ = inputs["x"].shape
    return (((b * T + t) * heads + head) // module.ROWS,)


TASK = Task(
    cases={
        "one tile": {"B": 1, "T": 4, "heads": 2, "rotated_heads": 2, "D": 8},
        "ragged rows": {"B": 1, "T": 5, "heads": 3, "rotated_heads": 3, "D": 8},
        "some heads copied": {"B": 1, "T": 6, "heads": 5, "rotated_heads": 3, "D": 8},
        "two sequences, three pairs": {"B": 2, "T": 5, "heads": 4, "rotated_heads": 3, "D": 6},
    },
    inputs=inputs,
    define=define,
    suspects={
        "element i is paired with i + 1; this model pairs i with i + D/2": lambda **i: rotate(**i, neighbours=True),
        "the position is the row, not the token": lambda **i: rotate(**i, position=lambda row, T, heads: row % T),
        "the second sequence counts on: % T is missing": lambda **i: rotate(
            **i, position=lambda row, T, heads: row // heads
        ),
        "heads from rotated_heads on are rotated too": lambda **i: rotate(**i, all_heads=True),
        "y is rotated by the opposite angle": lambda sin, **rest: define(sin=-sin, **rest),
        "dx is rotated by the angle of the forward: sign has no effect": not_inverted,
    },
    names={"y": "sequence token head element", "dx": "sequence token head element"},
    owner=owner,
    wide=("cos", "sin"),
    speed=Speed({"B": 64, "T": 512, "heads": 32, "rotated_heads": 24, "D": 64}, {"ROWS": 64}, "RoPE forward"),
    mistakes={
        "backward rotates forwards": Mistake("other=0.0) * sign", "other=0.0)", "dx", says="sign has no effect"),
        "rotated the other way": Mistake("(x1 * cos - x2 * sin)", "(x1 * cos + x2 * sin)", "y"),
        "wrong sign in the second half": Mistake("(x2 * cos + x1 * sin)", "(x2 * cos - x1 * sin)", "y"),
        "adjacent elements as pairs": Mistake(
            "tl.load(x_ptr + offsets + HALF", "tl.load(x_ptr + offsets + 1", "y", says="pairs i with i + D/2"
        ),
        "all heads rotated": Mistake("mask & (row % heads < rotated_heads)", "mask", "y", says="are rotated too"),
        "other heads zero": Mistake("mask=rotated, other=1.0", "mask=rotated, other=0.0", "y"),
        "other heads not copied": Mistake("_ty), mask=mask", "_ty), mask=rotated", "y", "unwritten", count=2),
        "position of the row": Mistake("row // heads % T", "row % T", "y", says="position is the row"),
        "position runs through the sequences": Mistake("row // heads % T", "row // heads", "y", says="counts on"),
        "rows not masked": Mistake("(row < rows) & (pair < HALF)", "pair < HALF", "y", "stray"),
        "pairs not masked": Mistake("(row < rows) & (pair < HALF)", "row < rows", "y", "stray"),
        "stored over the input": Mistake("(y_ptr + offsets + HALF", "(x_ptr + offsets + HALF", "x", "changed"),
    },
)
