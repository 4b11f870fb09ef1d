"""Exercise 16: what run() must compute, and typical mistakes."""

import math

import torch

from common.versions import load_version
from grading import Mistake, Task, random


def inputs(rows, C, F, N):
    grads = torch.zeros(6, 4)
    grads[1, 2] = 1e-4
    grads[2] = 0.5
    grads[3] = torch.tensor([-0.5, 0.25, 0.25, 0.0])
    grads[4, 0] = math.nan
    grads[5, 1] = math.inf
    return {
        "x": random(rows, C, seed=1, scale=1.2, offset=0.3),
        "gate_up": random(2 * F, C, seed=2, scale=0.6, offset=0.1),
        "down": random(N, F, seed=3, scale=0.7),
        "dy": random(rows, N, seed=4, scale=0.8, offset=0.2),
        "grads": grads,
    }


def define(x, gate_up, down, dy, grads):
    leaves = [tensor.detach().requires_grad_() for tensor in (x, gate_up, down)]
    gate, up = (leaves[0] @ leaves[1].T).chunk(2, dim=1)
    y = load_version(1).swiglu(gate, up) @ leaves[2].T
    dx, dgate_up, ddown = torch.autograd.grad(y, leaves, dy)
    found = grads.isfinite().all(1) & grads.count_nonzero(1).bool()
    found = torch.cat([found.new_zeros(1), found]).to(x.dtype)
    return {"found": found, "y": y.detach(), "ddown": ddown, "dgate_up": dgate_up, "dx": dx}


TASK = Task(
    cases={
        "one tile": {"rows": 4, "C": 8, "F": 32, "N": 8},
        "ragged": {"rows": 5, "C": 6, "F": 20, "N": 7},
        "several tiles": {"rows": 9, "C": 12, "F": 70, "N": 10},
    },
    inputs=inputs,
    direct=False,  # autograd makes the tensors that the kernels write
    define=define,
    names={
        "found": "gradient",
        "y": "row column",
        "ddown": "row column",
        "dgate_up": "row column",
        "dx": "row column",
    },
    labels={"found": ("None", "all zeros", "zeros but one", "all nonzero", "a sum of zero", "one NaN", "one infinity")},
    unwritten={"dgate_up": "no gradient reached it. Does swiglu call the Function, and does backward return one?"},
    mistakes={
        "the phantom": Mistake(
            "    apply = SwiGLUFunction.apply\n", "", "dgate_up", "unwritten", says="no gradient reached it"
        ),
        "a detour around the gradient": Mistake("swiglu_backward(dy.contiguous(), x)", "None", "dgate_up", "unwritten"),
        "gradient of the forward": Mistake(
            "return swiglu_backward(dy.contiguous(), x)", "return torch.cat([swiglu_forward(x)] * 2, 1)", "dgate_up"
        ),
        "dy ignored": Mistake(
            "return swiglu_backward(dy.contiguous(), x)",
            "return swiglu_backward(torch.ones_like(dy, memory_format=torch.contiguous_format), x)",
            "dgate_up",
        ),
        "None forgotten": Mistake("grad is not None and ", "", None, "crash"),
        "zeros count as trained": Mistake(" and bool(grad.count_nonzero())", "", "found", says="all zeros gives True"),
        "the sum must differ from zero": Mistake(
            "bool(grad.count_nonzero())", "bool(grad.sum())", "found", says="a sum of zero gives False"
        ),
        "NaN counts as trained": Mistake(" and bool(grad.isfinite().all())", "", "found", says="one NaN gives True"),
        "every element must differ from zero": Mistake(
            "bool(grad.count_nonzero())", "bool(grad.all())", "found", says="zeros but one gives False"
        ),
    },
)
