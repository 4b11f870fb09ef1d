"""Exercise 20: what run() must compute, and typical mistakes."""

import torch

from common.versions import load_version
from grading import Mistake, Task, random, stored


def define(gate, up, dy, scale):
    leaves = [gate.detach().requires_grad_(), up.detach().requires_grad_()]
    y = stored(load_version(1).swiglu(*leaves))  # the kernels know no scale
    dgate, dup = torch.autograd.grad(y, leaves, stored(scale * dy).expand(gate.shape))
    dgate, dup = (scale * stored(gradient / scale) for gradient in (dgate, dup))  # dy is scaled, or the gradients
    caught = torch.tensor([0, 1, 1, 1, 1], dtype=gate.dtype, device=gate.device)
    return {"y": scale * y.detach(), "dgate": dgate, "dup": dup, "caught": caught}


def flat_dy(gate, up, dy, scale):
    """Read dy [F], which stands in every row of a view, as if the rows lay in memory; past its end is NaN."""
    right = define(gate, up, dy, scale)
    past = torch.full_like(gate, torch.nan)
    past[0] = 0
    return {"dgate": right["dgate"] + past, "dup": right["dup"] + past}


ANY_TEST = {"caught": torch.full((5,), torch.nan)}  # a wrong layer is caught by a right test, or not by a wrong one


def times(factor):
    """Return a suspect: the gradients times factor(scale)."""

    def suspect(gate, up, dy, scale):
        right = define(gate, up, dy, scale)
        return {"dgate": factor(scale) * right["dgate"], "dup": factor(scale) * right["dup"]} | ANY_TEST

    return suspect


def of_the_other_call(gate, up, dy, scale):
    """Return the gradients at the inputs of the layer that runs in between."""
    other = define(up, gate, dy, scale)
    return {"dgate": other["dgate"], "dup": other["dup"]} | ANY_TEST


def exchanged(gate, up, dy, scale):
    other = define(up, gate, dy, scale)
    return {"y": other["y"], "dgate": other["dup"], "dup": other["dgate"]} | ANY_TEST


def without_dy(gate, up, dy, scale):
    right = define(gate, up, torch.ones_like(dy), scale)
    return {"dgate": right["dgate"], "dup": right["dup"]} | ANY_TEST


TASK = Task(
    cases={
        "one tile": {"rows": 4, "F": 32},
        "ragged, another scale": {"rows": 5, "F": 20, "scale": -0.5},
        "several tiles a row": {"rows": 3, "F": 70},
    },
    inputs=lambda rows, F, scale=1.75: {
        "gate": random(rows, F, seed=1, scale=1.5, offset=0.4),
        "up": random(rows, F, seed=2, scale=1.5, offset=0.4),
        "dy": random(F, seed=3, scale=0.8, offset=0.2),
        "scale": scale,
    },
    direct=False,  # autograd makes the tensors that the kernels write
    launches=("swiglu_forward_kernel", "swiglu_backward_kernel"),
    define=define,
    suspects={
        "dy is not contiguous, and the kernel read it as if it were: dy.contiguous()": flat_dy,
        "the scale is that of the call in between: keep it in ctx, not in the class": times(lambda scale: -1),
        "x is that of the call in between: keep it in ctx, not in the class": of_the_other_call,
        "the backward lacks the factor scale": times(lambda scale: 1 / scale),
        "the backward multiplies by scale twice": times(lambda scale: scale),
        "the backward divides by scale: multiply": times(lambda scale: scale**-2),
        "the forward lacks the factor scale": lambda gate, up, dy, scale: {
            "y": define(gate, up, dy, scale)["y"] / scale
        },
        "gate and up are exchanged: x is [gate, up]": exchanged,
        "dy is not used: the gradients are those of the sum of y": without_dy,
    },
    crashes={
        "'NoneType'": "a gradient is None where nothing reached the tensor: ask for that first",
        "cannot be converted to Scalar": "the relative error is one number, norm(difference) / norm(right)",
    },
    names={"y": "row column", "dgate": "row column", "dup": "row column", "caught": "layer"},
    labels={
        "caught": (
            "the right layer",
            "a layer with twice the gradient of gate",
            "a layer without a gradient of up",
            "a layer with the gradient of up in reverse",
            "a layer with NaN gradients",
        )
    },
    mistakes={
        "no apply": Mistake(
            "return SwiGLUFunction.apply(x, scale)",
            "return swiglu_forward(x) * scale",
            None,
            "crash",
            says="through .apply",
        ),
        "Function made, not applied": Mistake(
            "SwiGLUFunction.apply(x, scale)", "SwiGLUFunction(x, scale)", None, "crash", says="through .apply"
        ),
        "one gradient for two inputs": Mistake("return dx, None", "return dx", None, "crash", says="expected 2, got 1"),
        "dy as it comes": Mistake("dy.contiguous()", "dy", "dgate", says="dy is not contiguous"),
        "scale forgotten in the backward": Mistake("x) * ctx.scale", "x)", "dgate", says="lacks the factor scale"),
        "a scale of its own": Mistake("* ctx.scale", "* 1.75", "dgate"),
        "scale kept by the class": Mistake(
            "ctx.scale", "SwiGLUFunction.scale", "dgate", count=2, says="the scale is that of the call in between"
        ),
        "x kept by the class": Mistake(
            "ctx.save_for_backward(x)\n        ctx.scale = scale\n        return swiglu_forward(x) * scale\n\n"
            "    @staticmethod\n    def backward(ctx, dy):\n        (x,) = ctx.saved_tensors\n",
            "SwiGLUFunction.x = x\n        ctx.scale = scale\n        return swiglu_forward(x) * scale\n\n"
            "    @staticmethod\n    def backward(ctx, dy):\n        x = SwiGLUFunction.x\n",
            "dgate",
            says="x is that of the call in between",
        ),
        "None not expected": Mistake(
            "        if grad is None or not grad.isfinite().all():\n            return math.inf\n",
            "",
            None,
            "crash",
            says="a gradient is None",
        ),
        "norm of the quotients": Mistake("/ right.norm()", "/ right", None, "crash", says="one number"),
        "no scale in the forward": Mistake("(x) * scale", "(x)", "y", says="the forward lacks"),
        "scale twice": Mistake("x) * ctx.scale", "x) * ctx.scale * ctx.scale", "dgate", says="by scale twice"),
        "divided by the scale": Mistake("x) * ctx.scale", "x) / ctx.scale", "dgate", says="divides by scale"),
        "up before gate": Mistake("torch.cat([gate, up], 1)", "torch.cat([up, gate], 1)", "y", says="are exchanged"),
        "dy not used": Mistake("dy.contiguous(), x)", "torch.ones(dy.shape).to(x), x)", "dgate", says="dy is not used"),
        "values of PyTorch": Mistake(
            "return swiglu_forward(x) * scale",
            "return torch.nn.functional.silu(x[:, : x.shape[1] // 2]) * x[:, x.shape[1] // 2 :] * scale",
            None,
            "no kernel",
            says="swiglu_forward_kernel was not launched",
        ),
        "lengths compared, not gradients": Mistake(
            "(grad.double() - right).norm() / right.norm()",
            "(grad.double().norm() - right.norm()).abs() / right.norm()",
            "caught",
            says="the gradient of up in reverse gives False",
        ),
        "sums compared, not gradients": Mistake(
            "(grad.double() - right).norm() / right.norm()",
            "(grad.double().sum() - right.sum()).abs() / right.sum().abs()",
            "caught",
            says="the gradient of up in reverse gives False",
        ),
        "no gradient is skipped": Mistake(
            "        if grad is None or not grad.isfinite().all():\n            return math.inf\n",
            "        if grad is None:\n            continue\n",
            "caught",
            says="a layer without a gradient of up gives False",
        ),
        "NaN counts as right": Mistake(
            "grad is None or not grad.isfinite().all()", "grad is None", "caught", says="NaN gradients gives False"
        ),
        "first gradient only": Mistake(
            "        worst = max(worst, error.item())\n    return worst\n",
            "        return error.item()\n",
            "caught",
            says="the gradient of up in reverse gives False",
        ),
        "last gradient only": Mistake(
            "worst = max(worst, error.item())",
            "worst = error.item()",
            "caught",
            says="twice the gradient of gate gives False",
        ),
        "difference instead of the relative error": Mistake(
            "(grad.double() - right).norm() / right.norm()", "(grad - right).mean()", "caught", says="gives"
        ),
    },
)
