"""Exercise 13: what run() must compute, and typical mistakes."""

import ast
import math

import torch

from grading import Mistake, Speed, Task, Wrong, random


def define(x, dp, D):
    x.requires_grad_()
    scores = x / math.sqrt(D)
    p = scores.softmax(1)
    lse = scores.detach().to(torch.promote_types(x.dtype, torch.float32)).logsumexp(1) * math.log2(math.e)
    return {"lse": lse, "p": p.detach(), "dx": torch.autograd.grad(p, x, dp)[0]}


INSTEAD = {"exp": "tl.exp2", "log": "tl.log2", "softmax": "tl.exp2 and a sum"}


def check_base(module, source):
    for call in (node.func for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)):
        of_host = isinstance(call, ast.Attribute) and isinstance(call.value, ast.Name) and call.value.id == "math"
        name = call.attr if isinstance(call, ast.Attribute) else getattr(call, "id", None)
        if name in INSTEAD and not of_host:
            raise Wrong("base", None, f"the results are right, but {name} is used: use {INSTEAD[name]}")


TASK = Task(
    cases={
        "one tile": {"rows": 2, "C": 16, "D": 16},
        "ragged": {"rows": 3, "C": 21, "D": 64},
        "high scores": {"rows": 3, "C": 40, "D": 64, "offset": 900.0},
        "low scores": {"rows": 3, "C": 40, "D": 64, "offset": -900.0},
        "many rows": {"rows": 37, "C": 150, "D": 32},
    },
    inputs=lambda rows, C, D, offset=0.5: {
        "x": random(rows, C, seed=1, scale=4.0, offset=offset),
        "dp": random(rows, C, seed=2, scale=0.9, offset=0.3),
        "D": D,
    },
    define=define,
    names={"p": "row column", "lse": "row", "dx": "row column"},
    owner=lambda module, name, index, inputs: (index[0],),
    then=check_base,
    tolerance=2e-5,  # float32 has these digits left where lse is near 160
    speed=Speed({"rows": 65536, "C": 1024, "D": 64}, {}, floor=0.4),  # x is read twice
    mistakes={
        "natural base": Mistake("math.log2(math.e) / math.sqrt(D)", "1 / math.sqrt(D)", "lse"),
        "not scaled": Mistake("math.log2(math.e) / math.sqrt(D)", "math.log2(math.e)", "lse"),
        "logarithm of the other base": Mistake("math.log2(math.e) /", "math.log(2) /", "lse"),
        "maximum not scaled": Mistake("tl.max(x, 0) * scale", "tl.max(x, 0)", "lse"),
        "nothing subtracted": Mistake("m = tl.max(x, 0) * scale", "m = 0.0", "lse"),
        "maximum of at least zero": Mistake("tl.max(x, 0) * scale", "tl.maximum(tl.max(x, 0), 0.0) * scale", "lse"),
        "Triton's softmax": Mistake(
            "p = tl.exp2(x * scale - lse)\n    tl.store(lse",
            "p = tl.softmax(x * scale * 0.6931471805599453)\n    tl.store(lse",
            None,
            "base",
            says="softmax is used: use tl.exp2",
        ),
        "maximum not added back": Mistake("lse = m + ", "lse = ", "lse"),
        "gradient to the wrong base": Mistake("(scale * 0.6931471805599453)", "scale", "dx", says="log2(e) times"),
        "gradient not scaled": Mistake(" * (scale * 0.6931471805599453)", "", "dx"),
        "gradient without its row sum": Mistake("(dp - tl.sum(p * dp, 0))", "dp", "dx"),
        "e instead of two": Mistake("exp2(x * scale - m),", "exp((x * scale - m) * 0.6931471805599453),", None, "base"),
    },
)
