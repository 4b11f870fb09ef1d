"""Exercise 21: what run() must compute, and typical mistakes."""

import torch

from grading import Mistake, Task, random


def inputs(rows, HALF):
    angle = random(rows, HALF, seed=2, scale=1.5, offset=0.7)
    x = random(rows, 2 * HALF, seed=1, scale=1.6, offset=0.5)
    return {"x": x, "cos": angle.cos(), "sin": angle.sin()}


def rotate(x1, x2, cos, sin):
    return {"y": torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], dim=1)}


def define(x, cos, sin):
    return rotate(*x.chunk(2, dim=1), cos, sin)


def neighbours(x, cos, sin):
    """Rotate (x[2i], x[2i + 1]) in place."""
    x1, x2 = x[:, ::2], x[:, 1::2]
    return {"y": torch.stack([x1 * cos - x2 * sin, x2 * cos + x1 * sin], dim=2).flatten(1)}


def shifted(x, cos, sin):
    """Take x[i + 1] for x[i + HALF]."""
    HALF = cos.shape[1]
    return rotate(x[:, :HALF], x[:, 1 : HALF + 1], cos, sin)


def first_half_twice(x, cos, sin):
    x1, _ = x.chunk(2, dim=1)
    return rotate(x1, x1, cos, sin)


def offsets_of_cos(x, cos, sin):
    """Read x as if a row had HALF elements."""
    rows, HALF = cos.shape
    halves = x.reshape(2 * rows, HALF)
    return rotate(halves[:rows], halves[1 : rows + 1], cos, sin)


def one_by_one(x, cos, sin):
    """Compute y2 from y1."""
    x1, x2 = x.chunk(2, dim=1)
    y1 = x1 * cos - x2 * sin
    return {"y": torch.cat([y1, x2 * cos + y1 * sin], dim=1)}


def second_sign(x, cos, sin):
    x1, x2 = x.chunk(2, dim=1)
    return {"y": torch.cat([x1 * cos - x2 * sin, x2 * cos - x1 * sin], dim=1)}


TASK = Task(
    cases={
        "one tile": {"rows": 4, "HALF": 8},
        "ragged rows": {"rows": 11, "HALF": 4},
        "three pairs": {"rows": 9, "HALF": 3},
    },
    inputs=inputs,
    define=define,
    suspects={
        "pairs are (2i, 2i + 1); this model pairs i with i + HALF": neighbours,
        "pairs are (i, i + 1); this model pairs i with i + HALF": shifted,
        "x is read at the offsets of cos: a row of x has 2 · HALF elements": offsets_of_cos,
        "x2 is loaded from where x1 is, but it lies HALF further": first_half_twice,
        "y2 is computed from y1: it needs the x1 that was loaded": one_by_one,
        "y is rotated by the opposite angle": lambda x, cos, sin: define(x, cos, -sin),
        "the second half is x2 · cos + x1 · sin: its sign is wrong": second_sign,
        "cos and sin are exchanged": lambda x, cos, sin: define(x, sin, cos),
    },
    names={"y": "row column"},
    owner=lambda module, name, index, inputs: (index[0] // module.ROWS,),
    wide=("cos", "sin"),
    mistakes={
        "pairs of neighbours": Mistake(
            "(2 * HALF) + pair\n    x1 = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)\n"
            "    x2 = tl.load(x_ptr + offsets + HALF, mask=mask, other=0.0).to(tl.float32)\n"
            "    y1 = x1 * cos - x2 * sin\n    y2 = x2 * cos + x1 * sin\n"
            "    tl.store(y_ptr + offsets, y1.to(y_ptr.dtype.element_ty), mask=mask)\n"
            "    tl.store(y_ptr + offsets + HALF,",
            "(2 * HALF) + 2 * pair\n    x1 = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)\n"
            "    x2 = tl.load(x_ptr + offsets + 1, mask=mask, other=0.0).to(tl.float32)\n"
            "    y1 = x1 * cos - x2 * sin\n    y2 = x2 * cos + x1 * sin\n"
            "    tl.store(y_ptr + offsets, y1.to(y_ptr.dtype.element_ty), mask=mask)\n"
            "    tl.store(y_ptr + offsets + 1,",
            "y",
            says="pairs are (2i, 2i + 1)",
        ),
        "the next element as partner": Mistake("x_ptr + offsets + HALF", "x_ptr + offsets + 1", "y", says="(i, i + 1)"),
        "no distance between the loads": Mistake("x_ptr + offsets + HALF", "x_ptr + offsets", "y", says="HALF further"),
        "no distance between the stores": Mistake("y_ptr + offsets + HALF", "y_ptr + offsets", "y", "unwritten"),
        "rows of x as long as those of cos": Mistake("row * (2 * HALF)", "row * HALF", "y", "unwritten"),
        "loads at the offsets of cos": Mistake(
            "x_ptr + offsets", "x_ptr + row * HALF + pair", "y", count=2, says="offsets of cos"
        ),
        "the other way": Mistake(
            "y1 = x1 * cos - x2 * sin\n    y2 = x2 * cos + x1 * sin",
            "y1 = x1 * cos + x2 * sin\n    y2 = x2 * cos - x1 * sin",
            "y",
            says="opposite angle",
        ),
        "wrong sign in the second half": Mistake("x2 * cos + x1 * sin", "x2 * cos - x1 * sin", "y", says="its sign"),
        "from the rotated element": Mistake("x2 * cos + x1 * sin", "x2 * cos + y1 * sin", "y", says="computed from y1"),
        "cosine and sine exchanged": Mistake(
            "y1 = x1 * cos - x2 * sin\n    y2 = x2 * cos + x1 * sin",
            "y1 = x1 * sin - x2 * cos\n    y2 = x2 * sin + x1 * cos",
            "y",
            says="cos and sin",
        ),
        "cosines not masked": Mistake(
            "cos_ptr + row * HALF + pair, mask=mask",
            "cos_ptr + row * HALF + pair, mask=row < rows + pair",
            "cos",
            "stray load",
        ),
        "first half stored into the second": Mistake(
            "tl.store(y_ptr + offsets, y1.to(y_ptr.dtype.element_ty), mask=mask)",
            "tl.store(y_ptr + offsets, y1.to(y_ptr.dtype.element_ty), mask=row < rows)",
            "y",
            "race",
            gpu_kind="value",
            says="program 0 stored it twice",
        ),
        "second store not masked": Mistake(
            "tl.store(y_ptr + offsets + HALF, y2.to(y_ptr.dtype.element_ty), mask=mask)",
            "tl.store(y_ptr + offsets + HALF, y2.to(y_ptr.dtype.element_ty))",
            "y",
            "stray",
        ),
        "stored over the input": Mistake("y_ptr + offsets,", "x_ptr + offsets,", "x", "changed"),
    },
)
