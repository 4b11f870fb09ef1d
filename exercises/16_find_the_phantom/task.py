"""Exercise 16: what run() must compute, and typical mistakes."""

import math

import torch

from common.versions import load_version
from grading import Mistake, Task, random, stored


def inputs(rows, C, F, N):
    grads = torch.zeros(8, 4)
    grads[1, 2] = 1e-7
    grads[2] = 0.5
    grads[3] = torch.tensor([-0.5, 0.25, 0.25, 0.0])
    grads[4, 0] = math.nan
    grads[5, 1] = math.inf
    grads[6, 2] = -math.inf
    grads[7] = -0.5
    return {
        "x": random(rows, C, seed=1, scale=1.2, offset=0.3),
        "gate_up": random(2 * F, C, seed=2, scale=0.6, offset=0.1),
        "down": random(N, F, seed=3, scale=0.7),
        "dy": random(rows, N, seed=4, scale=0.8, offset=0.2),
        "grads": grads,
    }


def define(x, gate_up, down, dy, grads):
    leaves = [tensor.detach().requires_grad_() for tensor in (x, gate_up, down)]
    gate, up = stored(leaves[0] @ leaves[1].T, gradient=True).chunk(2, dim=1)
    y = stored(load_version(1).swiglu(gate, up), gradient=True) @ leaves[2].T
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
    launches=("swiglu_forward_kernel", "swiglu_backward_kernel"),
    define=define,
    names={
        "found": "gradient",
        "y": "row column",
        "ddown": "row column",
        "dgate_up": "row column",
        "dx": "row column",
    },
    labels={
        "found": (
            "None",
            "all zeros",
            "zeros but a tiny one",
            "all nonzero",
            "a sum of zero",
            "one NaN",
            "one infinity",
            "one negative infinity",
            "all negative",
        )
    },
    unwritten={"dgate_up": "no gradient reached it. Does swiglu call the Function, and through apply?"},
    crashes={
        "SwiGLUFunction": "call it through .apply",
        "save_for_backward": "forward needs a context: call it through .apply",
        "'NoneType'": "the gradient of a tensor can be None: ask for None first",
        "ambiguous": "all() makes one bool of a tensor",
    },
    mistakes={
        "the phantom": Mistake(
            "    apply = SwiGLUFunction.apply\n", "", "dgate_up", "unwritten", says="no gradient reached it"
        ),
        "the Function made, not applied": Mistake(
            "apply = SwiGLUFunction.apply", "apply = SwiGLUFunction", None, "crash", says="call it through .apply"
        ),
        "forward called": Mistake(
            "apply = SwiGLUFunction.apply",
            "apply = lambda x: SwiGLUFunction.forward(None, x)",
            None,
            "crash",
            says="call it through .apply",
        ),
        "PyTorch's layer": Mistake(
            "    apply = SwiGLUFunction.apply\n",
            "    gate, up = swiglu_forward(x) * 0 + x[:, : x.shape[1] // 2], x[:, x.shape[1] // 2 :]\n"
            "    return torch.nn.functional.silu(gate) * up\n",
            None,
            "no kernel",
            says="swiglu_backward_kernel was not launched",
        ),
        "only positive gradients count": Mistake(
            "bool(grad.count_nonzero())", "bool(grad.max() > 0)", "found", says="all negative gives False"
        ),
        "negative infinity is trained": Mistake(
            "grad.isfinite()", "(grad < float('inf'))", "found", says="one negative infinity gives True"
        ),
        "tiny gradients count as zero": Mistake(
            "bool(grad.count_nonzero())", "bool(grad.abs().max() > 1e-5)", "found", says="a tiny one gives False"
        ),
        "None forgotten": Mistake("grad is not None and ", "", None, "crash", says="ask for None first"),
        "a tensor returned": Mistake("bool(grad.isfinite().all())", "grad.isfinite()", None, "crash", says="one bool"),
        "zeros count as trained": Mistake(" and bool(grad.count_nonzero())", "", "found", says="all zeros gives True"),
        "the sum must differ from zero": Mistake(
            "bool(grad.count_nonzero())", "bool(grad.sum())", "found", says="a sum of zero gives False"
        ),
        "NaN counts as trained": Mistake(" and bool(grad.isfinite().all())", "", "found", says="one NaN gives True"),
        "every element must differ from zero": Mistake(
            "bool(grad.count_nonzero())", "bool(grad.all())", "found", says="zeros but a tiny one gives False"
        ),
    },
)
