"""Exercise 06: what run() must compute, and typical mistakes."""

import torch

from common.versions import load_version
from grading import Mistake, Task, random

EPS = 1e-6


def inputs(rows, C):
    x = random(rows, C, seed=3, scale=1.4, offset=0.6)
    return {
        "dy": random(rows, C, seed=1, scale=0.8, offset=0.2),
        "dx": random(rows, C, seed=2),
        "x": x,
        "w": random(C, seed=4, offset=1.5),
        "rstd": (x.square().mean(1) + EPS).rsqrt(),
    }


def define(dy, dx, x, w, rstd):
    x.requires_grad_()
    w.requires_grad_()
    dresidual, dw = torch.autograd.grad(load_version(1).rms_norm(x, w, EPS), (x, w), dy)
    return {"dresidual": dresidual + dx, "dw": dw.to(torch.promote_types(dw.dtype, torch.float32))}


def storage(results, inputs):
    return {"dresidual": results["dresidual"], "dw": results["dw"], "partial_sums": results["dw"].expand(3, -1)}


TASK = Task(
    cases={
        "a tile for each program": {"rows": 6, "C": 8},
        "ragged": {"rows": 5, "C": 12},
        "more tiles than programs": {"rows": 37, "C": 20},
    },
    inputs=inputs,
    define=define,
    names={"dresidual": "row column", "dw": "column"},
    owner=lambda module, name, index, inputs: (
        (index[0] // 16,) if name == "dw" else (index[0] // module.ROWS % module.PROGRAMS,)
    ),
    wide=("rstd",),
    storage=storage,
    views=lambda outputs, inputs: {"dresidual": outputs["dresidual"], "dw": outputs["dw"]},
    mistakes={
        "dresidual without the part along x": Mistake(
            "rstd * (g - x * (rstd * rstd * tl.sum(g * x, 1)[:, None] / C))", "rstd * g", "dresidual"
        ),
        "mean over the tile": Mistake(".sum(g * x, 1)[:, None] / C", ".sum(g * x, 1)[:, None] / BLOCK", "dresidual"),
        "weight forgotten": Mistake("g = dy * w[None, :]", "g = dy", "dresidual"),
        "rstd once": Mistake("rstd * rstd * tl.sum", "rstd * tl.sum", "dresidual"),
        "last rows only": Mistake("dw += dy * x * rstd", "dw = dy * x * rstd", "dw"),
        "dw with the weight": Mistake("dw += dy * x * rstd", "dw += g * x * rstd", "dw"),
        "dw without rstd": Mistake("dw += dy * x * rstd", "dw += dy * x", "dw"),
        "all programs in one row": Mistake(
            "dw_ptr + tl.program_id(0).to(tl.int64) * C", "dw_ptr", "dw", "unwritten", gpu_kind="value"
        ),
        "last partial sums only": Mistake("partial_sums += tl.load(", "partial_sums = tl.load(", "dw"),
    },
)
