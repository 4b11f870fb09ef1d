"""Exercise 24: what run() must compute, and typical mistakes."""

import torch
import triton

from grading import Mistake, Task, random


def inputs(rows, C, eps=1e-7, scale=1.6, offset=0.7):
    return {
        "x": random(rows, C, seed=1, scale=scale, offset=offset),
        "w": random(C, seed=2, offset=1.5),
        "b": random(C, seed=3, scale=0.8, offset=0.3),
        "eps": eps,
        "dy": random(C, rows, seed=4, scale=0.9, offset=0.2),
    }


def define(x, w, b, eps, dy):
    leaves = [tensor.detach().requires_grad_() for tensor in (x, w, b)]
    y = torch.nn.functional.layer_norm(leaves[0], x.shape[1:], *leaves[1:], eps)
    dx, dw, db = torch.autograd.grad(y, leaves, dy.T)
    return {"y": y.detach(), "dx": dx, "dw": dw, "db": db}


def statistics(x, eps):
    """Return the normalized x and rstd [rows, 1]."""
    centered = x - x.mean(1, keepdim=True)
    rstd = (centered.square().mean(1, keepdim=True) + eps).rsqrt()
    return centered * rstd, rstd


def with_y(compute):
    """Return a suspect: y = compute(x, w, b, eps), and any gradients."""

    def suspect(x, w, b, eps, dy):
        any_value = {"dx": torch.full_like(x, torch.nan), "dw": torch.full_like(w, torch.nan)}
        return {"y": compute(x, w, b, eps)} | any_value

    return suspect


def with_rstd(compute):
    """Return a suspect: y with rstd = compute(x - mean, mean, eps), and any gradients."""

    def normalize(x, w, b, eps):
        mean = x.mean(1, keepdim=True)
        return (x - mean) * compute(x - mean, mean, eps) * w + b

    return with_y(normalize)


def unmasked(centered, mean, eps):
    """Count the masked elements of the tile, which are -mean after the subtraction."""
    C = centered.shape[1]
    squares = centered.square().sum(1, keepdim=True) + (triton.next_power_of_2(C) - C) * mean.square()
    return (squares / C + eps).rsqrt()


def mean_of_the_tile(x, w, b, eps):
    mean = x.sum(1, keepdim=True) / triton.next_power_of_2(x.shape[1])
    return (x - mean) * ((x - mean).square().mean(1, keepdim=True) + eps).rsqrt() * w + b


def with_dx(compute):
    """Return a suspect: dx = compute(dy, w, normalized x, rstd)."""
    return lambda x, w, b, eps, dy: {"dx": compute(dy.T, w, *statistics(x, eps))}


def with_dw(terms):
    """Return a suspect: dw = the sum over rows of terms(dy, x, w, normalized x, rstd)."""
    return lambda x, w, b, eps, dy: {"dw": terms(dy.T, x, w, *statistics(x, eps)).sum(0)}


def flat_dy(x, w, b, eps, dy):
    """Read dy, which is transposed, as if its rows lay in memory."""
    found = define(x, w, b, eps, dy.reshape(x.shape).T)
    return {name: found[name] for name in ("dx", "dw", "db")}


def of_the_other_call(x, w, b, eps, dy):
    """Return the gradients at the x of the layer that runs in between."""
    other = define(x.flip(1), w, b, eps, dy)
    return {"dx": other["dx"], "dw": other["dw"]}


def unmasked_backward(x, w, b, eps, dy):
    """Count masked elements in the backward alone."""
    centered = x - mean(x)
    rstd = unmasked(centered, mean(x), eps)
    g = dy.T * w
    normed = centered * rstd
    return {"dx": rstd * (g - mean(g) - normed * mean(g * normed)), "dw": (dy.T * normed).sum(0)}


def explain(name, got, inputs):
    """Return which rows a gradient lacks or has twice, or why a variance can be wrong far from zero."""
    x, dy = inputs["x"].double(), inputs["dy"].double().T
    if name == "y" and (mean(x).abs() > 10 * x.std(1, keepdim=True)).all():
        return "is the variance mean(x²) - mean²? Far from zero that loses all digits: take the mean of (x - mean)²"
    if name not in ("dw", "db") or len(x) > x.shape[1]:
        return None
    terms = dy * statistics(x, inputs["eps"])[0] if name == "dw" else dy
    times = torch.linalg.lstsq(terms.T, got[:, None]).solution.flatten()
    whole = times.round()
    if whole.eq(1).all() or (terms.T @ whole - got).norm() > 1e-3 * got.norm():
        return None
    rows = ", ".join(f"{row} ({count:.0f} times)" for row, count in enumerate(whole.tolist()) if count != 1)
    return f"not every row counts once: row {rows}; add all rows of a program, and all partial sums"


def mean(x):
    return x.mean(1, keepdim=True)


TASK = Task(
    cases={
        "one tile": {"rows": 4, "C": 8},
        "ragged columns": {"rows": 4, "C": 6},
        "several rows": {"rows": 7, "C": 8},
        "more rows": {"rows": 37, "C": 20},
        "small values, where epsilon counts": {"rows": 4, "C": 8, "eps": 0.01, "scale": 0.05, "offset": 0.1},
        "far from zero": {"rows": 5, "C": 12, "offset": 30.0},
    },
    inputs=inputs,
    direct=False,  # autograd makes the tensors that the kernels write
    define=define,
    suspects={
        "the variance counts masked elements: after x - mean they are -mean, so tl.where makes them 0": with_rstd(
            unmasked
        ),
        "eps is outside the root": with_rstd(lambda c, m, eps: 1 / (mean(c.square()).sqrt() + eps)),
        "eps is added to rstd; it belongs under the root": with_rstd(lambda c, m, eps: mean(c.square()).rsqrt() + eps),
        "eps is missing": with_rstd(lambda c, m, eps: mean(c.square()).rsqrt()),
        "rstd is the root; it is 1 divided by it": with_rstd(lambda c, m, eps: (mean(c.square()) + eps).sqrt()),
        "the variance is divided by C - 1, as torch.var does; LayerNorm divides by C": with_rstd(
            lambda c, m, eps: (c.square().sum(1, keepdim=True) / (c.shape[1] - 1) + eps).rsqrt()
        ),
        "the variance is not divided by C": with_rstd(
            lambda c, m, eps: (c.square().sum(1, keepdim=True) + eps).rsqrt()
        ),
        "rstd comes from the mean of x², not from that of (x - mean)²": with_rstd(
            lambda c, m, eps: (mean((c + m).square()) + eps).rsqrt()
        ),
        "the mean is not subtracted: that is RMSNorm": with_y(
            lambda x, w, b, eps: x * (mean(x.square()) + eps).rsqrt() * w + b
        ),
        "the mean divides by BLOCK, the width of the tile, not by C": with_y(mean_of_the_tile),
        "b is missing": with_y(lambda x, w, b, eps: statistics(x, eps)[0] * w),
        "w is missing": with_y(lambda x, w, b, eps: statistics(x, eps)[0] + b),
        "b is multiplied by w: y is normalized x · w + b": with_y(lambda x, w, b, eps: (statistics(x, eps)[0] + b) * w),
        "dy is not contiguous, and the kernel read it as if it were: dy.contiguous()": flat_dy,
        "the variance of the backward counts masked elements: put tl.where there, too": unmasked_backward,
        "x is that of the call in between: keep it in ctx, not in the class": of_the_other_call,
        "dx: the mean of g is not subtracted": with_dx(
            lambda dy, w, normed, rstd: rstd * (dy * w - normed * mean(dy * w * normed))
        ),
        "dx: the part along the normalized x is missing": with_dx(
            lambda dy, w, normed, rstd: rstd * (dy * w - mean(dy * w))
        ),
        "dx: w is missing in g": with_dx(
            lambda dy, w, normed, rstd: rstd * (dy - mean(dy) - normed * mean(dy * normed))
        ),
        "dx: the factor rstd is missing": with_dx(
            lambda dy, w, normed, rstd: dy * w - mean(dy * w) - normed * mean(dy * w * normed)
        ),
        "dx: the sums over a row are not divided by C": with_dx(
            lambda dy, w, normed, rstd: rstd * (dy * w - dy.shape[1] * (mean(dy * w) + normed * mean(dy * w * normed)))
        ),
        "dw: x is not normalized: multiply dy by (x - mean) · rstd": with_dw(lambda dy, x, w, normed, rstd: dy * x),
        "dw: the factor rstd is missing": with_dw(lambda dy, x, w, normed, rstd: dy * normed / rstd),
        "dw: the factor w does not belong there": with_dw(lambda dy, x, w, normed, rstd: dy * w * normed),
        "dw and db are exchanged: backward returns them in the order of forward's inputs": lambda **given: {
            "dw": define(**given)["db"],
            "db": define(**given)["dw"],
        },
    },
    explain=explain,
    names={"y": "row column", "dx": "row column", "dw": "column", "db": "column"},
    unwritten=dict.fromkeys(("dw", "db"), "a row of the partial sums is missing: program p stores row p"),
    kernels=2,
    mistakes={
        "unmasked variance": Mistake(
            "centered = tl.where(mask, x - tl.sum(x, 0) / C, 0.0)",
            "centered = x - tl.sum(x, 0) / C",
            "y",
            count=2,
            says="tl.where",
        ),
        "unmasked variance in the backward": Mistake(
            "        centered = tl.where(mask, x - tl.sum(x, 0) / C, 0.0)",
            "        centered = x - tl.sum(x, 0) / C",
            "dx",
            says="of the backward counts",
        ),
        "eps outside the root": Mistake(
            "tl.rsqrt(tl.sum(centered * centered, 0) / C + tl.cast(eps, tl.float32))",
            "1 / (tl.sqrt(tl.sum(centered * centered, 0) / C) + eps)",
            "y",
            count=2,
            says="outside the root",
        ),
        "eps added to rstd": Mistake(
            "/ C + tl.cast(eps, tl.float32))", "/ C) + eps", "y", count=2, says="under the root"
        ),
        "eps forgotten": Mistake("/ C + tl.cast(eps, tl.float32))", "/ C)", "y", count=2, says="eps is missing"),
        "variance over C - 1": Mistake(
            "/ C + tl.cast(eps, tl.float32))", "/ (C - 1) + eps)", "y", count=2, says="C - 1"
        ),
        "variance not divided": Mistake(
            "/ C + tl.cast(eps, tl.float32))", "+ eps)", "y", count=2, says="not divided by C"
        ),
        "mean over the tile": Mistake("x - tl.sum(x, 0) / C", "x - tl.sum(x, 0) / BLOCK", "y", count=2, says="BLOCK"),
        "mean of the squares minus the square of the mean": Mistake(
            "rstd = tl.rsqrt(tl.sum(centered * centered, 0) / C + tl.cast(eps, tl.float32))",
            "rstd = tl.rsqrt(tl.sum(x * x, 0) / C - tl.sum(x, 0) / C * (tl.sum(x, 0) / C) + eps)",
            "y",
            count=2,
            says="loses all digits",
        ),
        "RMSNorm": Mistake("x - tl.sum(x, 0) / C, 0.0)", "x, 0.0)", "y", count=2, says="RMSNorm"),
        "b forgotten": Mistake("* rstd * w + b)", "* rstd * w)", "y", says="b is missing"),
        "w forgotten": Mistake("* rstd * w + b)", "* rstd + b)", "y", says="w is missing"),
        "b times w": Mistake(
            "(centered * rstd * w + b)", "((centered * rstd + b) * w)", "y", says="b is multiplied by w"
        ),
        "dy as it comes": Mistake("dy.contiguous()", "dy", "dx", says="dy.contiguous()"),
        "mean of g forgotten": Mistake("g - tl.sum(g, 0) / C - ", "g - ", "dx", says="mean of g"),
        "part along x forgotten": Mistake(
            " - normed * (tl.sum(g * normed, 0) / C))", ")", "dx", says="along the normalized x"
        ),
        "w forgotten in g": Mistake("g = dy * w", "g = dy", "dx", says="w is missing in g"),
        "rstd forgotten in dx": Mistake("dx = rstd * (g", "dx = (g", "dx", says="the factor rstd is missing"),
        "partial sums of one program": Mistake("dw.sum(0)", "dw[0]", "dw", says="all partial sums"),
        "last row of each program": Mistake("dw += dy * normed", "dw = dy * normed", "dw", says="row 0 (0 times)"),
        "sums that begin as numbers, which the interpreter accepts": Mistake(
            "dw = tl.zeros([BLOCK], tl.float32)",
            "dw = 0.0",
            None,
            "compile",
            gpu_kind="crash",
            says="Loop-carried variable dw",
        ),
        "dw of x": Mistake("dw += dy * normed", "dw += dy * x", "dw", says="not normalized"),
        "dw without rstd": Mistake("dw += dy * normed", "dw += dy * centered", "dw", says="factor rstd"),
        "dw with w": Mistake("dw += dy * normed", "dw += g * normed", "dw", says="factor w does not"),
        "dw and db exchanged": Mistake(
            "dw.sum(0).to(w.dtype), db.sum(0).to(w.dtype)",
            "db.sum(0).to(w.dtype), dw.sum(0).to(w.dtype)",
            "dw",
            says="dw and db are exchanged",
        ),
        "partial sums in one row": Mistake(
            "dw_ptr + tl.program_id(0) * C", "dw_ptr", "dw", "unwritten", gpu_kind="value", says="stores row p"
        ),
        "x not masked": Mistake(
            "x = tl.load(x_ptr + offsets, mask=mask, other=0.0)",
            "x = tl.load(x_ptr + offsets)",
            "y",
            count=2,
            says="mask the load in line",
        ),
        "w not masked, which no result shows": Mistake(
            "w = tl.load(w_ptr + column, mask=mask, other=0.0).to(tl.float32)\n    dw = ",
            "w = tl.load(w_ptr + column).to(tl.float32)\n    w = tl.where(mask, w, 0.0)\n    dw = ",
            "a tensor [6] that is allocated",
            "stray load",
            says="nearest 1 past the end: mask the load",
        ),
        "store not masked": Mistake(
            "(dx_ptr.dtype.element_ty), mask=mask)",
            "(dx_ptr.dtype.element_ty))",
            "a tensor [4, 6] that is allocated",
            "stray",
            says="mask the store in line",
        ),
        "no apply": Mistake(
            "return LayerNorm.apply(x.contiguous(), w.contiguous(), b.contiguous(), eps)",
            "return LayerNorm.forward(type('Context', (), {'save_for_backward': print}), x.detach(), w, b, eps)",
            None,
            "crash",
            says="through .apply",
        ),
        "x kept by the class": Mistake(
            "        ctx.eps = eps\n        return y\n\n    @staticmethod\n    def backward(ctx, dy):\n"
            "        x, w = ctx.saved_tensors\n",
            "        ctx.eps = eps\n        LayerNorm.x = x\n        return y\n\n    @staticmethod\n"
            "    def backward(ctx, dy):\n        x, w = LayerNorm.x, ctx.saved_tensors[1]\n",
            "dx",
            says="x is that of the call in between",
        ),
        "one gradient too few": Mistake(".to(w.dtype), None", ".to(w.dtype)", None, "crash", says="expected 4, got 3"),
        "backward in PyTorch": Mistake(
            "return LayerNorm.apply(x.contiguous(), w.contiguous(), b.contiguous(), eps)",
            "y = torch.nn.functional.layer_norm(x, x.shape[1:], w, b, eps)\n"
            "    return y + (LayerNorm.apply(x, w, b, eps) - y).detach()",
            None,
            "no kernel",
            says="only forward_kernel was launched",
        ),
        "partial sums in the inputs' dtype": Mistake(
            "torch.empty(2, programs, C, dtype=torch.float32, device=x.device)",
            "torch.empty(2, programs, C, dtype=x.dtype, device=x.device)",
            "dw",
            says="right in float32",
        ),
        "normalized x in the inputs' dtype": Mistake(
            "normed = centered * rstd",
            "normed = (centered * rstd).to(x_ptr.dtype.element_ty).to(tl.float32)",
            "dx",
            says="right in float32",
        ),
    },
)
