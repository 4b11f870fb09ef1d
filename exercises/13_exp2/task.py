"""Exercise 13: what run() must compute, and typical mistakes."""

import math
import re

import torch

from grading import Mistake, Speed, Task, Wrong, random


def define(x, dp, D):
    x.requires_grad_()
    scores = x / math.sqrt(D)
    p = scores.softmax(1)
    lse = scores.detach().to(torch.promote_types(x.dtype, torch.float32)).logsumexp(1) * math.log2(math.e)
    return {"lse": lse, "p": p.detach(), "dx": torch.autograd.grad(p, x, dp)[0]}


def check_base(module, source):
    found = re.search(r"\btl\.(?:math\.)?(exp|log)\(", source)
    if found:
        raise Wrong("base", None, f"the results are right, but tl.{found[1]} is used: use tl.{found[1]}2")


TASK = Task(
    cases={
        "one tile": {"rows": 2, "C": 16, "D": 16},
        "ragged": {"rows": 3, "C": 21, "D": 64},
        "high scores": {"rows": 3, "C": 40, "D": 64, "offset": 900.0},
        "many rows": {"rows": 37, "C": 100, "D": 32},
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
        "maximum not added back": Mistake("lse = m + ", "lse = ", "lse"),
        "gradient to the wrong base": Mistake("(scale * 0.6931471805599453)", "scale", "dx", says="log2(e) times"),
        "gradient not scaled": Mistake(" * (scale * 0.6931471805599453)", "", "dx"),
        "gradient without its row sum": Mistake("(dp - tl.sum(p * dp, 0))", "dp", "dx"),
        "e instead of two": Mistake("exp2(x * scale - m),", "exp((x * scale - m) * 0.6931471805599453),", None, "base"),
    },
)
