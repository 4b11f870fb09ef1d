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


def rotate(
    x, dy, cos, sin, rotated_heads, entry=None, is_rotated=None, copied_cos=1.0, backward_cos=1, same_sign=False
):
    """Return y and dx of the kernel with one thing changed; past the end of cos and sin is NaN.

    entry(row, T, heads, HALF): the place in the tables of a row's first pair.
    is_rotated(row, heads): True for a rotated row.
    """
    B, T, heads, D = x.shape
    HALF = D // 2
    row = torch.arange(B * T * heads, device=x.device).view(B, T, heads, 1)
    first = row // heads % T * HALF if entry is None else entry(row, T, heads, HALF)
    places = first + torch.arange(HALF, device=x.device)  # [B, T, heads, HALF]
    past = cos.new_full((int(places.max()) + 1,), torch.nan)
    if is_rotated is None:
        rotated = row % heads < rotated_heads
    else:
        rotated = is_rotated(row, heads)
    c = torch.where(rotated, torch.cat([cos.flatten(), past])[places], copied_cos)
    s = torch.where(rotated, torch.cat([sin.flatten(), past])[places], 0.0)

    def turn(x, c, s):
        x1, x2 = x.chunk(2, dim=3)
        return torch.cat([x1 * c - x2 * s, x2 * c + (-x1 if same_sign else x1) * s], dim=3)

    return {"y": turn(x, c, s), "dx": turn(dy, backward_cos * c, -s)}


def cosine_for_sine(cos, sin, **rest):
    """Exchange cos and sin after the loads, so sign reaches what multiplies the own element."""
    found = rotate(cos=sin, sin=cos, copied_cos=0.0, **rest)
    return {"y": found["y"], "dx": -found["dx"]}


def exchanged(rotated_heads, **rest):
    """Take row % heads for the token and row // heads for the head."""
    return rotate(
        rotated_heads=rotated_heads,
        entry=lambda row, T, heads, HALF: row % heads % T * HALF,
        is_rotated=lambda row, heads: row // heads < rotated_heads,
        **rest,
    )


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
        "the position is the row, not the token": lambda **i: rotate(
            **i, entry=lambda row, T, heads, HALF: row % T * HALF
        ),
        "positions run on into the second sequence: % T is missing": lambda **i: rotate(
            **i, entry=lambda row, T, heads, HALF: row // heads * HALF
        ),
        "a row of the tables has HALF elements: position · HALF + pair": lambda **i: rotate(
            **i, entry=lambda row, T, heads, HALF: row // heads % T
        ),
        "token and head are exchanged: token is row // heads, head is row % heads": exchanged,
        "heads from rotated_heads on are rotated too": lambda **i: rotate(**i, is_rotated=lambda row, heads: row >= 0),
        "heads from rotated_heads on are zero: the cosine of the angle zero is 1": lambda **i: rotate(
            **i, copied_cos=0.0
        ),
        "the second half is x2 · cos + x1 · sin: its sign is wrong": lambda **i: rotate(**i, same_sign=True),
        "sin is loaded from the table of cos": lambda sin, **i: rotate(**i, sin=i["cos"]),
        "cos and sin are exchanged": cosine_for_sine,
        "y is rotated by the opposite angle": lambda sin, **rest: define(sin=-sin, **rest),
        "dx is rotated by the angle of the forward: sign has no effect": not_inverted,
        "sign belongs to sin only: the cosine of the opposite angle is the same": lambda **i: {
            "dx": rotate(**i, backward_cos=-1)["dx"]
        },
    },
    names={"y": "sequence token head element", "dx": "sequence token head element"},
    owner=owner,
    wide=("cos", "sin"),
    speed=Speed({"B": 64, "T": 512, "heads": 32, "rotated_heads": 24, "D": 64}, {"ROWS": 64}, "RoPE forward"),
    mistakes={
        "backward rotates forwards": Mistake("other=0.0) * sign", "other=0.0)", "dx", says="sign has no effect"),
        "rotated the other way": Mistake("other=0.0) * sign", "other=0.0) * -sign", "y", says="opposite angle"),
        "wrong sign in the second half": Mistake("x2 * cos + x1 * sin", "x2 * cos - x1 * sin", "y", says="its sign"),
        "sines from the table of cosines": Mistake("sin_ptr + entry", "cos_ptr + entry", "y", says="table of cos"),
        "cosine and sine exchanged": Mistake(
            "y1 = x1 * cos - x2 * sin\n    y2 = x2 * cos + x1 * sin",
            "y1 = x1 * sin - x2 * cos\n    y2 = x2 * sin + x1 * cos",
            "y",
            says="cos and sin are exchanged",
        ),
        "rows masked one too far": Mistake("(row < rows)", "(row <= rows)", "y", "stray", says="line 28 is too wide"),
        "sign on the cosine too": Mistake("other=1.0)", "other=1.0) * sign", "dx", says="sign belongs to sin only"),
        "all heads rotated": Mistake("mask & (head < rotated_heads)", "mask", "y", says="are rotated too"),
        "other heads zero": Mistake("mask=rotated, other=1.0", "mask=rotated, other=0.0", "y", says="are zero"),
        "token and head exchanged": Mistake(
            "token = row // heads\n    head = row % heads",
            "token = row % heads\n    head = row // heads",
            "y",
            says="are exchanged",
        ),
        "position of the row": Mistake("token % T", "row % T", "y", says="position is the row"),
        "position runs through the sequences": Mistake("token % T", "token", "y", says="% T is missing"),
        "tables without their row length": Mistake("token % T * HALF", "token % T", "y", says="has HALF elements"),
        "other heads not copied": Mistake("_ty), mask=mask", "_ty), mask=rotated", "y", "unwritten", count=2),
        "tables not masked": Mistake(
            "mask=rotated, other=1.0", "mask=head < rotated_heads, other=1.0", "cos", "stray load"
        ),
        "stored over the input": Mistake("(y_ptr + offsets + HALF", "(x_ptr + offsets + HALF", "x", "changed"),
        "cosines in the inputs' dtype": Mistake(
            "mask=rotated, other=1.0)",
            "mask=rotated, other=1.0).to(x_ptr.dtype.element_ty)",
            "y",
            says="right in float32",
        ),
    },
)
