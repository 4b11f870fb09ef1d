"""What exercise 08 must compute, and typical mistakes."""

import math

from grading import Mistake, Task, random


def inputs(T, D=16, scale=1.3, offset=0.4, first=0.0):
    q, k = (random(T, D, seed=seed, scale=scale, offset=offset) for seed in (1, 2))
    k[:16] += first
    return {"q": q, "k": k, "v": random(T, D, seed=3, offset=0.8)}


def define(q, k, v):
    return {"o": (q @ k.T / math.sqrt(q.shape[1])).softmax(1) @ v}


TASK = Task(
    cases={
        "one tile of keys": {"T": 16},
        "two tiles of keys": {"T": 32},
        "several programs": {"T": 80},
        "sharp, and far from zero": {"T": 32, "scale": 4.0, "offset": 3.0},
        "highest in the first tile": {"T": 48, "offset": 4.0, "first": 12.0},
    },
    inputs=inputs,
    define=define,
    names={"o": "query element"},
    owner=lambda module, name, index, inputs: (index[0] // module.BLOCK_Q,),
    mistakes={
        "output not rescaled": Mistake("v, o * shrink[:, None],", "v, o,", "o"),
        "sum not rescaled": Mistake("total * shrink + ", "total + ", "o"),
        "scale to the wrong base": Mistake("math.log2(math.e) / math.sqrt(D)", "1 / math.sqrt(D)", "o"),
        "scores not scaled": Mistake("math.log2(math.e) / math.sqrt(D)", "math.log2(math.e)", "o"),
        "not divided by the sum": Mistake("o / total[:, None]", "o", "o"),
        "highest of the last tile": Mistake("tl.maximum(highest, tl.max(S, 1))", "tl.max(S, 1)", "o"),
        "last tile of keys alone": Mistake("v, o * shrink[:, None],", "v, o * 0.0,", "o"),
        "queries instead of keys": Mistake("load_tile(k_ptr", "load_tile(q_ptr", "o"),
        "first rows stored by all": Mistake("[:, None], first, T", "[:, None], 0, T", "o", "unwritten"),
    },
)
