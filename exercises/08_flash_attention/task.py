"""Exercise 08: what run() must compute, and typical mistakes."""

import math

from grading import Mistake, Task, random


def inputs(T, D=16, scale=1.3, offset=0.4, first=0.0):
    q, k = (random(T, D, seed=seed, scale=scale, offset=offset) for seed in (1, 2))
    k[:16] += first
    return {"q": q, "k": k, "v": random(T, D, seed=3, offset=0.8)}


def define(q, k, v, factor=1.0):
    return {"o": (q @ k.T * factor / math.sqrt(q.shape[1])).softmax(1) @ v}


def not_divided(q, k, v):
    scores = q @ k.T / math.sqrt(q.shape[1])
    return {"o": (scores - scores.amax(1, keepdim=True)).exp() @ v}


TASK = Task(
    cases={
        "one tile of keys": {"T": 16},
        "two tiles of keys": {"T": 32},
        "several programs": {"T": 80},
        "sharp, and far from zero": {"T": 32, "scale": 4.0, "offset": 3.0},
        "maximum in the first tile": {"T": 48, "offset": 4.0, "first": 12.0},
    },
    inputs=inputs,
    define=define,
    suspects={
        "o is not divided by the row sum l": not_divided,
        "the exponentials have base e, and scale is for base 2": lambda q, k, v: define(q, k, v, math.log2(math.e)),
        "the exponentials have base 2, and log2(e) is missing from scale": lambda q, k, v: define(q, k, v, math.log(2)),
        "1 / sqrt(D) is missing": lambda q, k, v: define(q, k, v, math.sqrt(q.shape[1])),
    },
    names={"o": "query element"},
    owner=lambda module, name, index, inputs: (index[0] // module.BLOCK_Q,),
    mistakes={
        "output not rescaled": Mistake("v, o * alpha[:, None],", "v, o,", "o"),
        "sum not rescaled": Mistake("l * alpha + ", "l + ", "o"),
        "scale to the wrong base": Mistake("math.log2(math.e) / math.", "1 / math.", "o", says="log2(e) is missing"),
        "scores not scaled": Mistake("log2(math.e) / math.sqrt(D)", "log2(math.e)", "o", says="1 / sqrt(D) is missing"),
        "exp for exp2": Mistake("tl.exp2(", "tl.exp(", "o", count=2, says="base e"),
        "not divided by the sum": Mistake("o / l[:, None]", "o", "o", says="not divided"),
        "maximum of the last tile": Mistake("tl.maximum(m, tl.max(S, 1))", "tl.max(S, 1)", "o"),
        "last tile of keys only": Mistake("v, o * alpha[:, None],", "v, o * 0.0,", "o"),
        "queries instead of keys": Mistake("load_tile(k_ptr", "load_tile(q_ptr", "o"),
        "first rows stored by all": Mistake("[:, None], first, T", "[:, None], 0, T", "o", "unwritten"),
    },
)
