"""Exercise 14: what run() must compute, and typical mistakes."""

import torch

from grading import Mistake, Task, random


def rounded(x, drop):
    """Return x without the last `drop` bits of a float32's fraction, rounded to nearest, ties to even."""
    fraction, exponent = torch.frexp(x)
    places = 2.0 ** (24 - drop)
    return torch.ldexp(torch.round(fraction * places) / places, exponent)


def define(a, b, drop):
    a_high, b_high = rounded(a, drop), rounded(b, drop)
    a_low, b_low = rounded(a - a_high, drop), rounded(b - b_high, drop)
    one = a_high @ b_high
    return {"high": a_high, "one": one, "three": a_low @ b_high + a_high @ b_low + one}


def inputs(M, N, K, drop, ties=False):
    a = random(M, K, seed=1, scale=1.3, offset=0.4)
    if ties:  # halfway between two neighbours, on both sides of a power of two
        a = torch.tensor([1.0, 2.0, -1.0])[:, None] * (1 + (torch.arange(K) + 0.5) * 2.0 ** (drop - 23))
    return {"a": a, "b": random(K, N, seed=2, scale=0.8, offset=-0.3), "drop": drop}


TASK = Task(
    cases={
        "ties, TF32": {"M": 3, "N": 16, "K": 16, "drop": 13, "ties": True},
        "one tile, TF32": {"M": 16, "N": 16, "K": 16, "drop": 13},
        "one tile, bfloat16": {"M": 16, "N": 16, "K": 16, "drop": 16},
        "ragged, TF32": {"M": 19, "N": 21, "K": 37, "drop": 13},
        "ragged, bfloat16": {"M": 33, "N": 5, "K": 40, "drop": 16},
    },
    inputs=inputs,
    define=define,
    names={"high": "row column", "one": "row column", "three": "row column"},
    owner=lambda module, name, index, inputs: (
        index[0] // module.BLOCK,
        0 if name == "high" else index[1] // module.BLOCK,
    ),
    wide=("a", "b"),
    dtypes=(torch.float32,),
    mistakes={
        "cut off instead of rounded": Mistake("    bits += (1 << (DROP - 1)) - 1 + ((bits >> DROP) & 1)\n", "", "high"),
        "ties away from zero": Mistake("(1 << (DROP - 1)) - 1 + ((bits >> DROP) & 1)", "1 << (DROP - 1)", "high"),
        "always thirteen bits": Mistake("((bits >> DROP) << DROP)", "((bits >> 13) << 13)", "high"),
        "one without rounding": Mistake("one = tl.dot(a_high, b_high, one", "one = tl.dot(a, b, one", "one"),
        "two matmuls": Mistake('        three = tl.dot(a_low, b_high, three, input_precision="ieee")\n', "", "three"),
        "low times low instead of high times high": Mistake("(a_high, b_high, three", "(a_low, b_low, three", "three"),
        "last tile only": Mistake(" = tl.dot(a_low, b_high, three", " = tl.dot(a_low, b_high, three * 0", "three"),
        "low part not what was dropped": Mistake("rounded(a - a_high, DROP)", "rounded(a_high - a, DROP)", "three"),
    },
)
