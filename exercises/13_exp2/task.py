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


def changed(base=math.e, factor=lambda D: 1 / math.sqrt(D), lse=lambda lse, scores: lse):
    """Return a suspect: all results to a base, of scores times factor(D), with lse changed."""

    def suspect(x, dp, D):
        scores = x * factor(D) * math.log(base)
        right = scores.logsumexp(1) * math.log2(math.e)
        found = lse(right, scores * math.log2(math.e))
        p = (scores * math.log2(math.e) - found[:, None]).exp2()
        dx = p * (dp - (p * dp).sum(1, keepdim=True)) * factor(D) * math.log(base)
        return {"lse": found, "p": p, "dx": dx}

    return suspect


def gradient(change):
    """Return a suspect: dx = change(p, dp, sum of p · dp, D)."""

    def suspect(x, dp, D):
        p = (x / math.sqrt(D)).softmax(1)
        return {"dx": change(p, dp, (p * dp).sum(1, keepdim=True), D)}

    return suspect


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
    suspects={
        "log2(e) is missing from scale": changed(base=2),
        "1 / sqrt(D) is missing from scale": changed(factor=lambda D: 1.0),
        "scale has log(2) where log2(e) belongs": changed(factor=lambda D: math.log(2) ** 2 / math.sqrt(D)),
        "the logarithm has base e: use tl.log2": changed(
            lse=lambda lse, scores: scores.amax(1) + (lse - scores.amax(1)) * math.log(2)
        ),
        "lse lacks the maximum that was subtracted": changed(lse=lambda lse, scores: lse - scores.amax(1)),
        "dx lacks its factor 1 / sqrt(D)": gradient(lambda p, dp, sum, D: p * (dp - sum)),
        "dx has log2(e), the factor of base 2: scale it by log(2)": gradient(
            lambda p, dp, sum, D: p * (dp - sum) / math.sqrt(D) * math.log2(math.e)
        ),
        "dx has scale without its 1 / sqrt(D)": gradient(lambda p, dp, sum, D: p * (dp - sum) * math.log(2)),
        "dx: the row sum of p · dp is not subtracted": gradient(lambda p, dp, sum, D: p * dp / math.sqrt(D)),
        "dx: the row sum is that of dp: sum p · dp": gradient(
            lambda p, dp, sum, D: p * (dp - dp.sum(1, keepdim=True)) / math.sqrt(D)
        ),
        "dx: the factor p is missing": gradient(lambda p, dp, sum, D: (dp - sum) / math.sqrt(D)),
    },
    names={"p": "row column", "lse": "row", "dx": "row column"},
    owner=lambda module, name, index, inputs: (index[0],),
    then=check_base,
    tolerance=2e-5,  # float32 has these digits left where lse is near 160
    speed=Speed({"rows": 65536, "C": 1024, "D": 64}, {}, floor=0.4),  # x is read twice
    mistakes={
        "natural base": Mistake(
            "math.log2(math.e) / math.sqrt(D)", "1 / math.sqrt(D)", "lse", says="log2(e) is missing"
        ),
        "not scaled": Mistake(
            "math.log2(math.e) / math.sqrt(D)", "math.log2(math.e)", "lse", says="1 / sqrt(D) is missing"
        ),
        "logarithm of the other base": Mistake("math.log2(math.e) /", "math.log(2) /", "lse", says="where log2(e)"),
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
        "maximum not added back": Mistake("lse = m + ", "lse = ", "lse", says="lacks the maximum"),
        "logarithm to base e": Mistake("tl.log2(tl.sum(", "tl.log(tl.sum(", "lse", says="use tl.log2"),
        "gradient without D": Mistake("(scale * 0.69", "(0.69", "dx", says="without its 1 / sqrt(D)"),
        "sum of dp": Mistake("tl.sum(p * dp, 0)", "tl.sum(dp, 0)", "dx", says="sum p · dp"),
        "gradient without p": Mistake("dx = p * (dp", "dx = (dp", "dx", says="factor p"),
        "gradient to the wrong base": Mistake("(scale * 0.6931471805599453)", "scale", "dx", says="has log2(e)"),
        "gradient not scaled": Mistake(" * (scale * 0.6931471805599453)", "", "dx", says="lacks its factor"),
        "gradient without its row sum": Mistake("(dp - tl.sum(p * dp, 0))", "dp", "dx", says="is not subtracted"),
        "e instead of two": Mistake("exp2(x * scale - m),", "exp((x * scale - m) * 0.6931471805599453),", None, "base"),
        "p in the inputs' dtype": Mistake(
            "    p = tl.exp2(x * scale - lse)\n    dx",
            "    p = tl.exp2(x * scale - lse).to(dx_ptr.dtype.element_ty).to(tl.float32)\n    dx",
            "dx",
            says="right in float32",
        ),
    },
)
