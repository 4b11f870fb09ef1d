"""Exercise 07: what run() must compute, and typical mistakes."""

import math

import torch

from grading import Mistake, Task, random

BLOCK = 16  # of the exercise


def inputs(rows, C, scale=2.0, offset=0.5, first=0.0, second=0.0):
    x = random(rows, C, seed=1, scale=scale, offset=offset)
    x[:, :16] += first
    x[:, 16:] += second
    return {"x": x}


def tilewise(x, rescale=True, add=True, maximum=torch.maximum, keep=True, old_m=False, of_tile=False):
    """Compute the softmax tile by tile in float32, as the kernel does, with one part of it changed."""
    x = x.float()
    m = torch.full_like(x[:, :1], -math.inf)
    l = torch.zeros_like(m)
    subtracted = torch.empty_like(x)
    for start in range(0, x.shape[1], BLOCK):
        tile = x[:, start : start + BLOCK]
        m_new = maximum(m, tile.amax(1, keepdim=True))
        old = l * (m - m_new).exp() if rescale else l
        l = (old if add else 0) + (tile - (m if old_m else m_new)).exp().sum(1, keepdim=True)
        subtracted[:, start : start + BLOCK] = tile.amax(1, keepdim=True)
        if keep:
            m = m_new
    return {"y": ((x - (subtracted if of_tile else m)).exp() / l).double()}


def from_zero(x):
    """Start m at zero: where a row is far below, every exponential is 0 in float32."""
    return {"y": x.softmax(1).where(x.amax(1, keepdim=True) > -104, math.nan)}


TASK = Task(
    cases={
        "one tile": {"rows": 2, "C": 16},
        "two tiles, the second higher": {"rows": 2, "C": 32, "second": 3.0},
        "ragged": {"rows": 3, "C": 41},
        "large and far from zero": {"rows": 3, "C": 50, "scale": 30.0, "offset": 200.0},
        "far below zero": {"rows": 3, "C": 50, "offset": -2000.0},
        "maximum in the first tile": {"rows": 2, "C": 40, "first": 200.0},
    },
    inputs=inputs,
    define=lambda x: {"y": x.softmax(1)},
    suspects={
        "m does not begin at -inf: all elements are far below it, and l is 0": from_zero,
        "y subtracts the maximum of its own tile: l is relative to m, so subtract m": lambda x: tilewise(
            x, of_tile=True
        ),
        "y is the logarithm of the softmax: take exp, and divide by l": lambda x: {"y": x.log_softmax(1)},
        "l is not rescaled when m rises: multiply it by exp(m - m_new)": lambda x: tilewise(x, rescale=False),
        "l holds the last tile only": lambda x: tilewise(x, add=False),
        "m is the maximum of the last tile, not of all: exp overflows": lambda x: tilewise(
            x, maximum=lambda _, new: new
        ),
        "nothing is subtracted before exp: it overflows": lambda x: tilewise(
            x, maximum=lambda m, _: m.new_zeros(m.shape)
        ),
        "m isn't carried over to the next tile and the second pass, or l is multiplied by exp(m_new - m), "
        "which is infinite at first, instead of exp(m - m_new)": lambda x: tilewise(x, keep=False),
        "l sums exp(x - m) with the m before this tile, infinite at first; take m_new": lambda x: tilewise(
            x, old_m=True
        ),
        "y is exp(x) / l: l is relative to m, so subtract m here too": lambda x: {
            "y": x.softmax(1) * x.amax(1, keepdim=True).exp()
        },
        "y is not divided by l": lambda x: {"y": (x - x.amax(1, keepdim=True)).exp()},
        "y is a softmax to base 2: is it exp2 instead of exp?": lambda x: {"y": (x * math.log(2)).softmax(1)},
    },
    names={"y": "row column"},
    owner=lambda module, name, index, inputs: (index[0],),
    mistakes={
        "sum not rescaled": Mistake("l * tl.exp(m - m_new) + ", "l + ", "y", says="l is not rescaled"),
        "maximum of the last tile": Mistake(
            " = tl.maximum(m, tl.max(x, 0))", " = tl.max(x, 0, keep_dims=True)", "y", says="of the last tile"
        ),
        "nothing subtracted": Mistake(
            "m_new = tl.maximum(m, tl.max(x, 0))",
            "m_new = tl.zeros([1], tl.float32)",
            "y",
            says="nothing is subtracted",
        ),
        "last tile only": Mistake("l * tl.exp(m - m_new) + ", "l * 0.0 + ", "y", says="l holds"),
        "maximum not kept": Mistake("        m = m_new\n", "", "y", says="m isn't carried over"),
        "rescaled the wrong way": Mistake(
            "tl.exp(m - m_new)", "tl.exp(m_new - m)", "y", says="instead of exp(m - m_new)"
        ),
        "outside reads as zero": Mistake(
            'mask=column < C, other=-float("inf")).to(tl.float32)\n        m_new',
            "mask=column < C, other=0.0).to(tl.float32)\n        m_new",
            "y",
        ),
        "sum relative to the old maximum": Mistake("tl.exp(x - m_new)", "tl.exp(x - m)", "y", says="take m_new"),
        "maximum forgotten in y": Mistake("tl.exp(x - m) / l", "tl.exp(x) / l", "y", says="subtract m here"),
        "not divided": Mistake("tl.exp(x - m) / l", "tl.exp(x - m)", "y", says="not divided by l"),
        "powers of two": Mistake("tl.exp(", "tl.exp2(", "y", count=3, says="exp2"),
        "m begins at -1000": Mistake(
            'tl.full([1], -float("inf")', "tl.full([1], -1000.0", "y", says="does not begin at -inf"
        ),
        "m begins at zero": Mistake(
            'tl.full([1], -float("inf")', "tl.full([1], 0.0", "y", says="does not begin at -inf"
        ),
        "new sum rescaled too": Mistake(
            "l * tl.exp(m - m_new) + tl.sum(tl.exp(x - m_new), 0)",
            "(l + tl.sum(tl.exp(x - m_new), 0)) * tl.exp(m - m_new)",
            "y",
        ),
        "maximum of the tile in y": Mistake(
            "tl.exp(x - m) / l", "tl.exp(x - tl.max(x, 0)) / l", "y", says="its own tile"
        ),
        "logarithm": Mistake("tl.exp(x - m) / l", "x - m - tl.log(l)", "y", says="is the logarithm"),
        "second load not masked": Mistake(
            'mask=column < C, other=-float("inf")).to(tl.float32)\n        y',
            "mask=column >= 0).to(tl.float32)\n        y",
            "x",
            "stray load",
        ),
        "store not masked": Mistake("element_ty), mask=column < C", "element_ty)", "y", "stray"),
        "sum in the inputs' dtype": Mistake(
            "        m = m_new\n",
            "        m = m_new\n        l = l.to(x_ptr.dtype.element_ty).to(tl.float32)\n",
            "y",
            says="right in float32",
        ),
        "exponentials in the inputs' dtype": Mistake(
            "tl.exp(x - m) / l", "tl.exp(x - m).to(y_ptr.dtype.element_ty) / l", "y", says="right in float32"
        ),
    },
)
