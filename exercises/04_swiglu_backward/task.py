"""Exercise 04: what run() must compute, and typical mistakes."""

import torch

from common.versions import load_version
from grading import Mistake, Speed, Task, random


def define(dy, x):
    gate, up = (half.detach().requires_grad_() for half in x.chunk(2, dim=1))
    y = load_version(1).swiglu(gate, up)
    dgate, dup = torch.autograd.grad(y, (gate, up), dy)
    return {"dgate": dgate, "dup": dup}


def exchanged(dy, x):
    right = define(dy, x)
    return {"dgate": right["dup"], "dup": right["dgate"]}


def without_slope(dy, x):
    gate, up = x.chunk(2, dim=1)
    return {"dgate": dy * up * gate.sigmoid()}


def views(outputs, inputs):
    dgate, dup = outputs["dx"].chunk(2, dim=1)
    return {"dgate": dgate, "dup": dup}


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
        "dgate and dup are exchanged": exchanged,
        "dgate is dy · up · σ(gate): the term gate · (1 - σ(gate)) of silu'(gate) is missing": without_slope,
    },
    names={"dgate": "row column", "dup": "row column"},
    owner=lambda module, name, index, inputs: (index[0] // module.ROWS, index[1] // module.BLOCK),
    storage=lambda results, inputs: {"dx": torch.cat([results["dgate"], results["dup"]], 1)},
    views=views,
    speed=Speed({"rows": 16384, "F": 4096}, {"ROWS": 1, "BLOCK": 2048}, "SwiGLU backward"),
    mistakes={
        "dgate without the sigmoid's slope": Mistake(" * (1 + gate * (1 - sigmoid))", "", "dgate", says="is missing"),
        "wrong sign in the slope": Mistake("(1 + gate * (1 - sigmoid))", "(1 - gate * (1 - sigmoid))", "dgate"),
        "dgate without up": Mistake("dy * up * sigmoid", "dy * sigmoid", "dgate"),
        "dup with the sigmoid alone": Mistake("(dy * gate * sigmoid).to(", "(dy * sigmoid).to(", "dup"),
        "dup without dy": Mistake("(dy * gate * sigmoid).to(", "(gate * sigmoid).to(", "dup"),
        "halves exchanged": Mistake(
            "tl.store(dx_ptr + row * 2 * F + column, dgate.to(dx_ptr.dtype.element_ty), mask=mask)\n"
            "    tl.store(dx_ptr + row * 2 * F + F + column, (dy * gate * sigmoid)",
            "tl.store(dx_ptr + row * 2 * F + F + column, dgate.to(dx_ptr.dtype.element_ty), mask=mask)\n"
            "    tl.store(dx_ptr + row * 2 * F + column, (dy * gate * sigmoid)",
            "dgate",
            says="exchanged",
        ),
        "second half forgotten": Mistake("dx_ptr + row * 2 * F + F + ", "dx_ptr + row * 2 * F + ", "dup", "unwritten"),
    },
)
