"""Exercise 20: what run() must compute, and typical mistakes."""

import torch

from common.versions import load_version
from grading import Mistake, Task, random


def define(gate, up, dy, scale):
    leaves = [gate.detach().requires_grad_(), up.detach().requires_grad_()]
    y = scale * load_version(1).swiglu(*leaves)
    dgate, dup = torch.autograd.grad(y, leaves, dy.expand(gate.shape))
    caught = torch.tensor([0, 1, 1, 1, 1], dtype=gate.dtype, device=gate.device)
    return {"y": y.detach(), "dgate": dgate, "dup": dup, "caught": caught}


def flat_dy(gate, up, dy, scale):
    """Read dy [F], which stands in every row of a view, as if the rows lay in memory; past its end is NaN."""
    right = define(gate, up, dy, scale)
    past = torch.full_like(gate, torch.nan)
    past[0] = 0
    return {"dgate": right["dgate"] + past, "dup": right["dup"] + past}


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
    suspects={"dy is not contiguous, and the kernel read it as if it were: dy.contiguous()": flat_dy},
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
        "scale forgotten in the backward": Mistake(
            "x) * ctx.scale", "x)", "dgate", says="0.5714 times its correct value"
        ),
        "a scale of its own": Mistake("* ctx.scale", "* 1.75", "dgate"),
        "scale kept by the class": Mistake("ctx.scale", "SwiGLUFunction.scale", "dgate", count=2),
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
