"""Exercise 02: what run() must compute, and typical mistakes."""

import torch
import triton

from common.versions import load_version
from grading import Mistake, Speed, Task, random, rounded

V1 = load_version(1)


def inputs(rows, C, eps=1e-7, scale=1.7):
    return {
        "residual": random(rows, C, seed=1, scale=scale, offset=0.3 * scale),
        "branch": random(rows, C, seed=2, scale=scale),
        "w": random(C, seed=3, offset=1.5),
        "eps": eps,
    }


def define(residual, branch, w, eps):
    x = residual + branch
    loaded = rounded(x)
    wide = V1.at_least_float32(loaded)
    return {"x": x, "rstd": (wide.square().mean(1) + eps).rsqrt(), "y": V1.rms_norm(loaded, w, eps)}


def with_rstd(compute):
    """Return a suspect: rstd = compute(x, eps), and y from it."""

    def suspect(residual, branch, w, eps):
        x = residual + branch
        rstd = compute(x, eps)
        return {"rstd": rstd, "y": x * rstd[:, None] * w}

    return suspect


def mean_over_the_tile(x, eps):
    return (x.square().sum(1) / triton.next_power_of_2(x.shape[1]) + eps).rsqrt()


def with_y(change):
    """Return a suspect: y = change(y, rstd, w)."""

    def suspect(residual, branch, w, eps):
        right = define(residual, branch, w, eps)
        return {"y": change(right["y"], right["rstd"][:, None], w)}

    return suspect


def mean_subtracted(residual, branch, w, eps):
    x = residual + branch
    rstd = (x.var(1, correction=0) + eps).rsqrt()
    return {"rstd": rstd, "y": (x - x.mean(1, keepdim=True)) * rstd[:, None] * w}


TASK = Task(
    cases={
        "one tile": {"rows": 4, "C": 8},
        "ragged columns": {"rows": 4, "C": 12},
        "ragged rows": {"rows": 7, "C": 8},
        "small values, where epsilon counts": {"rows": 4, "C": 8, "eps": 0.01, "scale": 0.05},
        "many programs": {"rows": 37, "C": 150},
    },
    inputs=inputs,
    define=define,
    suspects={
        "the mean divides by BLOCK, the width of the tile, not by C": with_rstd(mean_over_the_tile),
        "eps is outside the root": with_rstd(lambda x, eps: 1 / (x.square().mean(1).sqrt() + eps)),
        "rstd is the root; it is 1 divided by it": with_rstd(lambda x, eps: (x.square().mean(1) + eps).sqrt()),
        "eps is missing": with_rstd(lambda x, eps: x.square().mean(1).rsqrt()),
        "the variance is taken, not the mean square": with_rstd(lambda x, eps: (x.var(1, correction=0) + eps).rsqrt()),
        "eps is added to rstd; it belongs under the root": with_rstd(lambda x, eps: x.square().mean(1).rsqrt() + eps),
        "the mean is subtracted: LayerNorm does that, RMSNorm does not": mean_subtracted,
        "the sum of the squares is not divided by C": with_rstd(lambda x, eps: (x.square().sum(1) + eps).rsqrt()),
        "rstd comes from the square of the sum: sum the squares": with_rstd(
            lambda x, eps: (x.sum(1).square() / x.shape[1] + eps).rsqrt()
        ),
        "rstd comes from the mean of x, which can be negative: square x first": with_rstd(
            lambda x, eps: (x.mean(1) + eps).rsqrt()
        ),
        "y is divided by rstd: multiply, since rstd is 1 divided by the root": with_y(lambda y, rstd, w: y / rstd**2),
        "y is divided by w: multiply": with_y(lambda y, rstd, w: y / w**2),
        "y is multiplied by 1 + w, as in Gemma's norm: this one multiplies by w": with_y(lambda y, rstd, w: y + y / w),
        "y is multiplied by rstd twice": with_y(lambda y, rstd, w: y * rstd),
        "y is not multiplied by w": lambda residual, branch, w, eps: {
            "y": V1.rms_norm(residual + branch, torch.ones_like(w), eps)
        },
    },
    names={"x": "row column", "rstd": "row", "y": "row column"},
    owner=lambda module, name, index, inputs: (index[0] // module.ROWS,),
    speed=Speed({"rows": 65536, "C": 1024}, {}, "RMSNorm + residual forward"),
    mistakes={
        "mean over the tile": Mistake("tl.sum(x * x, 1) / C", "tl.sum(x * x, 1) / BLOCK", "rstd", says="not by C"),
        "epsilon outside the root": Mistake(
            "tl.rsqrt(tl.sum(x * x, 1) / C + eps)", "1 / (tl.sqrt(tl.sum(x * x, 1) / C) + eps)", "rstd", says="outside"
        ),
        "epsilon added to rstd": Mistake("/ C + eps)", "/ C) + eps", "rstd", says="under the root"),
        "mean subtracted": Mistake(
            "x = x.to(tl.float32)\n",
            "x = x.to(tl.float32)\n    x = tl.where(mask, x - (tl.sum(x, 1) / C)[:, None], 0.0)\n",
            "rstd",
            says="LayerNorm",
        ),
        "root without the division": Mistake("tl.rsqrt(", "tl.sqrt(", "rstd", says="1 divided by it"),
        "sum without the division": Mistake(
            "tl.sum(x * x, 1) / C", "tl.sum(x * x, 1)", "rstd", says="not divided by C"
        ),
        "square of the sum": Mistake(
            "tl.sum(x * x, 1) / C", "tl.sum(x, 1) * tl.sum(x, 1) / C", "rstd", says="sum the squares"
        ),
        "mean of x": Mistake("tl.sum(x * x, 1) / C", "tl.sum(x, 1) / C", "rstd", says="square x first"),
        "divided by rstd": Mistake("x * rstd[:, None] * w", "x / rstd[:, None] * w", "y", says="divided by rstd"),
        "divided by w": Mistake("rstd[:, None] * w[None, :]", "rstd[:, None] / w[None, :]", "y", says="divided by w"),
        "one more than w": Mistake("* w[None, :]).to", "* (1 + w[None, :])).to", "y", says="1 + w"),
        "rstd twice": Mistake("x * rstd[:, None] * w", "x * rstd[:, None] * rstd[:, None] * w", "y", says="rstd twice"),
        "epsilon forgotten": Mistake("/ C + eps", "/ C", "rstd", says="eps is missing"),
        "weight forgotten": Mistake(" * w[None, :]).to", ").to", "y", says="by w"),
        "variance instead of the mean square": Mistake(
            ") / C", ") / C - tl.sum(x, 1) * tl.sum(x, 1) / C / C", "rstd", says="variance"
        ),
        "rstd not stored": Mistake("tl.store(rstd_ptr + row, rstd, mask=row < rows)", "pass", "rstd", "unwritten"),
        "y over x": Mistake("tl.store(y_ptr + offsets", "tl.store(x_ptr + offsets", "y", "unwritten"),
        "y over the residual": Mistake("store(x_ptr + offsets", "store(residual_ptr + offsets", "residual", "changed"),
        "weight not masked": Mistake("mask=column < C, other=0.0", "mask=column >= 0, other=0.0", "w", "stray load"),
        "rows of y run into the next": Mistake(
            "w[None, :]).to(y_ptr.dtype.element_ty), mask=mask)",
            "w[None, :]).to(y_ptr.dtype.element_ty), mask=offsets < rows * C)",
            "y",
            "race",
            gpu_kind="value",
            says="twice, with different values",
        ),
        "normalized in 16 bits": Mistake("x = x.to(tl.float32)\n", "x = x.to(tl.float16).to(tl.float32)\n", "rstd"),
        "product rounded to 16 bits": Mistake(" w[None, :]).to", " w[None, :]).to(tl.float16).to", "y", says="16 bits"),
        "squares in the inputs' dtype": Mistake(
            "tl.sum(x * x, 1)",
            "tl.sum((x * x).to(x_ptr.dtype.element_ty).to(tl.float32), 1)",
            "rstd",
            says="right in float32",
        ),
        "normalized x in the inputs' dtype": Mistake(
            "x * rstd[:, None] * w", "(x * rstd[:, None]).to(x_ptr.dtype.element_ty) * w", "y", says="right in float32"
        ),
    },
)
