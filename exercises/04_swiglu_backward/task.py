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


def sigmoid_slope(dy, x):
    gate, up = x.chunk(2, dim=1)
    return {"dgate": dy * up * gate.sigmoid() * (1 - gate.sigmoid())}


def wrong_sign(dy, x):
    gate, up = x.chunk(2, dim=1)
    return {"dgate": dy * up * gate.sigmoid() * (1 - gate * (1 - gate.sigmoid()))}


def with_sigmoid_of_up(dy, x):
    gate, up = x.chunk(2, dim=1)
    sigmoid = up.sigmoid()
    return {"dgate": dy * up * sigmoid * (1 + gate * (1 - sigmoid)), "dup": dy * gate * sigmoid}


def rows_of_dy_far_apart(dy, x):
    """Read rows of dy as if they lay 2F apart; past its end is NaN."""
    rows, F = dy.shape
    memory = torch.cat([dy.flatten(), dy.new_full((rows * F + F,), torch.nan)])
    return define(torch.stack([memory[row * 2 * F :][:F] for row in range(rows)]), x)


def with_slope(slope):
    """Return a suspect: dgate = dy · up · slope(gate, σ(gate))."""

    def suspect(dy, x):
        gate, up = x.chunk(2, dim=1)
        return {"dgate": dy * up * slope(gate, gate.sigmoid())}

    return suspect


def with_up(x, value):
    """Return x with `value` in place of up."""
    gate, up = x.chunk(2, dim=1)
    return torch.cat([gate, torch.full_like(up, value)], 1)


def views(outputs, inputs):
    dgate, dup = outputs["dx"].chunk(2, dim=1)
    return {"dgate": dgate, "dup": dup}


TASK = Task(
    cases={
        "one tile": {"rows": 4, "F": 32},
        "ragged": {"rows": 5, "F": 20},
        "several tiles a row": {"rows": 3, "F": 70},
        "large values": {"rows": 2, "F": 20, "scale": 60.0},
    },
    inputs=lambda rows, F, scale=1.5: {
        "dy": random(rows, F, seed=1, scale=0.8, offset=0.2),
        "x": random(rows, 2 * F, seed=2, scale=scale, offset=0.4),
    },
    define=define,
    suspects={
        "dgate and dup are exchanged": exchanged,
        "dgate has σ(1 - σ), the slope of the sigmoid, where silu' is needed": sigmoid_slope,
        "the slope has the wrong sign: silu' is σ · (1 + gate · (1 - σ))": wrong_sign,
        "σ(up) is taken in place of σ(gate)": with_sigmoid_of_up,
        "rows of dy are read 2F apart; in memory they are F apart": rows_of_dy_far_apart,
        "dup has silu'(gate): the derivative for up is silu(gate)": lambda dy, x: {
            "dup": define(dy, with_up(x, 1))["dgate"]
        },
        "dgate has the factor gate where up belongs": lambda dy, x: {
            "dgate": define(dy, with_up(x, 1))["dgate"] * x.chunk(2, 1)[0]
        },
        "the slope lacks its 1: silu' is σ · (1 + gate · (1 - σ))": with_slope(
            lambda gate, sigmoid: sigmoid * gate * (1 - sigmoid)
        ),
        "dgate: the factor up is missing": lambda dy, x: {"dgate": define(dy, with_up(x, 1))["dgate"]},
        "dgate: the factor dy is missing": lambda dy, x: {"dgate": define(torch.ones_like(dy), x)["dgate"]},
        "dup: the factor dy is missing": lambda dy, x: {"dup": define(torch.ones_like(dy), x)["dup"]},
        "dup: the factor σ(gate) is missing": lambda dy, x: {"dup": dy * x.chunk(2, 1)[0]},
        "dup: the factor gate is missing": lambda dy, x: {"dup": dy * x.chunk(2, 1)[0].sigmoid()},
        "dgate is dy · up · σ(gate): the term gate · (1 - σ(gate)) of silu'(gate) is missing": without_slope,
    },
    names={"dgate": "row column", "dup": "row column"},
    owner=lambda module, name, index, inputs: (index[0] // module.ROWS, index[1] // module.BLOCK),
    storage=lambda results, inputs: {"dx": torch.cat([results["dgate"], results["dup"]], 1)},
    views=views,
    speed=Speed({"rows": 16384, "F": 4096}, {"ROWS": 1, "BLOCK": 2048}, "SwiGLU backward"),
    mistakes={
        "dgate without the sigmoid's slope": Mistake(" * (1 + gate * (1 - sigmoid))", "", "dgate", says="is missing"),
        "slope of the sigmoid": Mistake(
            "* sigmoid * (1 + gate * (1 - sigmoid))", "* sigmoid * (1 - sigmoid)", "dgate", says="silu'"
        ),
        "wrong sign in the slope": Mistake(
            "(1 + gate * (1 - sigmoid))", "(1 - gate * (1 - sigmoid))", "dgate", says="sign"
        ),
        "sigmoid of up": Mistake("tl.sigmoid(gate)", "tl.sigmoid(up)", "dgate", says="σ(up)"),
        "dup with the slope": Mistake(
            "(dy * gate * sigmoid).to(", "(dy * sigmoid * (1 + gate * (1 - sigmoid))).to(", "dup", says="dup has silu'"
        ),
        "dy read like x": Mistake("dy_ptr + row * F", "dy_ptr + row * 2 * F", "dgate", says="dy are read 2F apart"),
        "gate in place of up": Mistake("dy * up * sigmoid", "dy * gate * sigmoid", "dgate", says="where up belongs"),
        "slope without its 1": Mistake("(1 + gate *", "(gate *", "dgate", says="lacks its 1"),
        "dgate without up": Mistake("dy * up * sigmoid", "dy * sigmoid", "dgate", says="factor up"),
        "dgate without dy": Mistake("dy * up * sigmoid", "up * sigmoid", "dgate", says="factor dy"),
        "dup with the sigmoid alone": Mistake(
            "(dy * gate * sigmoid).to(", "(dy * sigmoid).to(", "dup", says="factor gate"
        ),
        "dup with the gate alone": Mistake(
            "(dy * gate * sigmoid).to(", "(dy * gate).to(", "dup", says="factor σ(gate)"
        ),
        "dup without dy": Mistake("(dy * gate * sigmoid).to(", "(gate * sigmoid).to(", "dup", says="factor dy"),
        "halves exchanged": Mistake(
            "tl.store(dx_ptr + row * 2 * F + column, dgate.to(dx_ptr.dtype.element_ty), mask=mask)\n"
            "    tl.store(dx_ptr + row * 2 * F + F + column, (dy * gate * sigmoid)",
            "tl.store(dx_ptr + row * 2 * F + F + column, dgate.to(dx_ptr.dtype.element_ty), mask=mask)\n"
            "    tl.store(dx_ptr + row * 2 * F + column, (dy * gate * sigmoid)",
            "dgate",
            says="exchanged",
        ),
        "slope that overflows": Mistake(
            "up * sigmoid * (1 + gate * (1 - sigmoid))",
            "up * (sigmoid + gate * tl.exp(-gate) * sigmoid * sigmoid)",
            "dgate",
        ),
        "dy not masked": Mistake(
            "dy_ptr + row * F + column, mask=mask, other=0.0", "dy_ptr + row * F + column", "dy", "stray load"
        ),
        "second half forgotten": Mistake("dx_ptr + row * 2 * F + F + ", "dx_ptr + row * 2 * F + ", "dup", "unwritten"),
        "silu in the inputs' dtype": Mistake(
            "(dy * gate * sigmoid)",
            "(dy * (gate * sigmoid).to(dx_ptr.dtype.element_ty))",
            "dup",
            says="right in float32",
        ),
    },
)
