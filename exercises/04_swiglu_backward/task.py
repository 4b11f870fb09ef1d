"""Exercise 04: what run() must compute, and typical mistakes."""

import torch

from common.versions import load_version
from grading import Mistake, Speed, Task, random


def define(dy, x):
    a, b = (half.detach().requires_grad_() for half in x.chunk(2, dim=1))
    y = load_version(1).swiglu(a, b)
    da, db = torch.autograd.grad(y, (a, b), dy)
    return {"da": da, "db": db}


def exchanged(dy, x):
    right = define(dy, x)
    return {"da": right["db"], "db": right["da"]}


def without_slope(dy, x):
    a, b = x.chunk(2, dim=1)
    return {"da": dy * b * a.sigmoid()}


def views(outputs, inputs):
    da, db = outputs["dx"].chunk(2, dim=1)
    return {"da": da, "db": db}


TASK = Task(
    cases={
        "one tile": {"rows": 4, "F": 32},
        "ragged": {"rows": 5, "F": 20},
        "several tiles a row": {"rows": 3, "F": 70},
        "large values": {"rows": 2, "F": 8, "scale": 8.0},
    },
    inputs=lambda rows, F, scale=1.5: {
        "dy": random(rows, F, seed=1, scale=0.8, offset=0.2),
        "x": random(rows, 2 * F, seed=2, scale=scale, offset=0.4),
    },
    define=define,
    suspects={
        "da and db are exchanged": exchanged,
        "da is dy · b · σ(a): the term a · (1 - σ(a)) of silu'(a) is missing": without_slope,
    },
    names={"da": "row column", "db": "row column"},
    owner=lambda module, name, index, inputs: (index[0] // module.ROWS, index[1] // module.BLOCK),
    storage=lambda results, inputs: {"dx": torch.cat([results["da"], results["db"]], 1)},
    views=views,
    speed=Speed({"rows": 16384, "F": 4096}, {"ROWS": 1, "BLOCK": 2048}, "SwiGLU backward"),
    mistakes={
        "da without the sigmoid's slope": Mistake(
            "dy * b * sigmoid * (1 + a * (1 - sigmoid))", "dy * b * sigmoid", "da", says="is missing"
        ),
        "wrong sign in the slope": Mistake("(1 + a * (1 - sigmoid))", "(1 - a * (1 - sigmoid))", "da"),
        "da without b": Mistake("dy * b * sigmoid", "dy * sigmoid", "da"),
        "db with the sigmoid alone": Mistake("(dy * a * sigmoid).to(", "(dy * sigmoid).to(", "db"),
        "db without dy": Mistake("(dy * a * sigmoid).to(", "(a * sigmoid).to(", "db"),
        "halves exchanged": Mistake(
            "tl.store(dx_ptr + row * 2 * F + column, da.to(dx_ptr.dtype.element_ty), mask=mask)\n"
            "    tl.store(dx_ptr + row * 2 * F + F + column, (dy * a * sigmoid)",
            "tl.store(dx_ptr + row * 2 * F + F + column, da.to(dx_ptr.dtype.element_ty), mask=mask)\n"
            "    tl.store(dx_ptr + row * 2 * F + column, (dy * a * sigmoid)",
            "da",
            says="exchanged",
        ),
        "second half forgotten": Mistake(
            "dx_ptr + row * 2 * F + F + column", "dx_ptr + row * 2 * F + column", "db", "unwritten"
        ),
    },
)
