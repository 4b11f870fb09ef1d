"""Exercise 08: what run() must compute, and typical mistakes."""

import math

import torch

from attention_definition import ROUNDED_MISTAKES, attended
from grading import Mistake, Task, random

BLOCK_K = 16  # of the exercise


def inputs(T, D=16, scale=1.3, offset=0.4, first=0.0, sign=1):
    q, k = (random(T, D, seed=seed, scale=scale, offset=offset) for seed in (1, 2))
    k *= sign
    k[:16] += first
    return {"q": q, "k": k, "v": random(T, D, seed=3, offset=0.8)}


def define(q, k, v, factor=1.0):
    return {"o": attended(q @ k.T * factor / math.sqrt(q.shape[1]), v)}


def not_divided(q, k, v):
    scores = q @ k.T / math.sqrt(q.shape[1])
    return {"o": (scores - scores.amax(1, keepdim=True)).exp() @ v}


def divided_twice(q, k, v):
    scores = q @ k.T / math.sqrt(q.shape[1])
    l = (scores - scores.amax(1, keepdim=True)).exp().sum(1, keepdim=True)
    return {"o": define(q, k, v)["o"] / l}


def not_transposed(q, k, v):
    """Take each tile of keys for its transpose, which is possible because D is BLOCK_K."""
    if q.shape[1] != BLOCK_K:
        return define(q, k, v)
    tiles = k.unflatten(0, (-1, BLOCK_K))
    return define(q, tiles.transpose(1, 2).flatten(0, 1), v)


def tilewise(
    q, k, v, rescale_o=1, rescale_l=1, keep_o=1, unscaled=False, divide=False, twice=False, keep_m=True, reverse=False
):
    """Compute o in a loop over tiles of keys, with one step changed."""
    m = torch.full_like(q[:, :1], -math.inf)
    l = torch.zeros_like(m)
    o = torch.zeros_like(q)
    for start in range(0, len(k), BLOCK_K):
        scores = q @ k[start : start + BLOCK_K].T / math.sqrt(q.shape[1])
        m_new = torch.maximum(m, scores.amax(1, keepdim=True))
        P = (scores - m_new).exp()
        scale = math.sqrt(q.shape[1]) * math.log(2) if unscaled else 1.0  # exp2 of unscaled maxima
        alpha = (scale * (m_new - m if reverse else m - m_new)).exp()
        o = keep_o * o * (alpha if rescale_o else 1) + P @ v[start : start + BLOCK_K] + (o if twice else 0)
        l = l * (alpha if rescale_l else 1) + P.sum(1, keepdim=True)
        if keep_m:
            m = m_new
        if divide:
            o = o / l
    return {"o": o if divide else o / l}


def from_zero(q, k, v):
    """Start m at zero: where all scores are far below, every exponential is 0 in float32."""
    o = define(q, k, v)["o"]
    o[(q @ k.T / math.sqrt(q.shape[1])).amax(1) < -104] = math.nan
    return {"o": o}


TASK = Task(
    cases={
        "one tile of keys": {"T": 16},
        "two tiles of keys": {"T": 32},
        "several programs": {"T": 80},
        "sharp, and far from zero": {"T": 32, "scale": 4.0, "offset": 3.0},
        "maximum in the first tile": {"T": 48, "offset": 4.0, "first": 12.0},
        "far below zero": {"T": 32, "scale": 0.5, "offset": 6.0, "sign": -1},
        "32 elements a head": {"T": 112, "D": 32},
    },
    inputs=inputs,
    define=define,
    suspects={
        "m does not begin at -inf: all scores are far below it, and l is 0": from_zero,
        "o is not rescaled when m rises: multiply it by alpha": lambda **i: tilewise(**i, rescale_o=0),
        "l is not rescaled when m rises: multiply it by alpha": lambda **i: tilewise(**i, rescale_l=0),
        "alpha lacks scale: it is exp2((m - m_new) · scale)": lambda **i: tilewise(**i, unscaled=True),
        "o holds the last tile of keys only": lambda **i: tilewise(**i, keep_o=0),
        "o is divided by l in every step; divide once, after the loop": lambda **i: tilewise(**i, divide=True),
        "o is counted twice: tl.dot adds to its third argument, so use = and not +=": lambda **i: tilewise(
            **i, twice=True
        ),
        "k is not transposed: tl.dot needs the tile of kᵀ": not_transposed,
        "scale is applied twice: S and m stay unscaled": lambda q, k, v: define(
            q, k, v, math.log2(math.e) / math.sqrt(q.shape[1])
        ),
        "k is loaded from q": lambda q, k, v: define(q, q, v),
        "v is loaded from k": lambda q, k, v: define(q, k, k),
        "m stays -inf, so alpha is 0 and only the last tile of keys counts: keep m_new": lambda **i: tilewise(
            **i, keep_m=False
        ),
        "alpha is infinite at first: it is exp2((m - m_new) · scale), not the other way round": lambda **i: tilewise(
            **i, reverse=True
        ),
        "o is divided by l twice": divided_twice,
        "scale is missing: P is exp2(S · scale - m_new · scale)": lambda q, k, v: define(
            q, k, v, math.log(2) * math.sqrt(q.shape[1])
        ),
        "o is not divided by the row sum l": not_divided,
        "the exponentials have base e, and scale is for base 2": lambda q, k, v: define(q, k, v, math.log2(math.e)),
        "the exponentials have base 2, and log2(e) is missing from scale": lambda q, k, v: define(q, k, v, math.log(2)),
        "1 / sqrt(D) is missing": lambda q, k, v: define(q, k, v, math.sqrt(q.shape[1])),
    },
    names={"o": "query element"},
    owner=lambda module, name, index, inputs: (index[0] // module.BLOCK_Q,),
    mistakes={
        "output not rescaled": Mistake("v, o * alpha[:, None],", "v, o,", "o", says="o is not rescaled"),
        "sum not rescaled": Mistake("l * alpha + ", "l + ", "o", says="l is not rescaled"),
        "scale to the wrong base": Mistake("math.log2(math.e) / math.", "1 / math.", "o", says="log2(e) is missing"),
        "scores not scaled": Mistake("log2(math.e) / math.sqrt(D)", "log2(math.e)", "o", says="1 / sqrt(D) is missing"),
        "no scale": Mistake(
            "tl.exp2(S * scale - (m_new * scale)[:, None])\n        alpha = tl.exp2((m - m_new) * scale)",
            "tl.exp2(S - m_new[:, None])\n        alpha = tl.exp2(m - m_new)",
            "o",
            says="scale is missing",
        ),
        "no scale in P": Mistake(
            "tl.exp2(S * scale - (m_new * scale)[:, None])", "tl.exp2(S - m_new[:, None])", "o", says="scale is missing"
        ),
        "alpha the wrong way round": Mistake("((m - m_new) *", "((m_new - m) *", "o", says="the other way round"),
        "keys instead of values": Mistake("load_tile(v_ptr", "load_tile(k_ptr", "o", says="v is loaded from k"),
        "divided twice": Mistake("o / l[:, None]", "o / l[:, None] / l[:, None]", "o", says="by l twice"),
        "m not kept": Mistake("m, l = m_new, l * alpha", "l = l * alpha", "o", says="m stays -inf"),
        "alpha without scale": Mistake("tl.exp2((m - m_new) * scale)", "tl.exp2(m - m_new)", "o", says="alpha lacks"),
        "exp for exp2": Mistake("tl.exp2(", "tl.exp(", "o", count=2, says="base e"),
        "not divided by the sum": Mistake("o / l[:, None]", "o", "o", says="not divided"),
        "divided in every step": Mistake(
            "tl.sum(P, 1)\n    store_tile(o_ptr, o / l[:, None],",
            "tl.sum(P, 1)\n        o = o / l[:, None]\n    store_tile(o_ptr, o,",
            "o",
            says="after the loop",
        ),
        "added to the output twice": Mistake("o = tl.dot(P", "o += tl.dot(P", "o", says="not +="),
        "keys not transposed": Mistake("tl.trans(k)", "k", "o", says="not transposed"),
        "maximum of the last tile": Mistake("tl.maximum(m, tl.max(S, 1))", "tl.max(S, 1)", "o"),
        "last tile of keys only": Mistake("v, o * alpha[:, None],", "v, o * 0.0,", "o", says="last tile of keys"),
        "queries instead of keys": Mistake("load_tile(k_ptr", "load_tile(q_ptr", "o", says="from q"),
        "m begins at zero": Mistake(
            'tl.full([BLOCK_Q], -float("inf")', "tl.full([BLOCK_Q], 0.0", "o", says="begin at -inf"
        ),
        "maximum of the sizes": Mistake("tl.max(S, 1)", "tl.max(tl.abs(S), 1)", "o"),
        "o as wide as a tile of keys": Mistake("tl.zeros([BLOCK_Q, D]", "tl.zeros([BLOCK_Q, BLOCK_K]", None, "crash"),
        "scale of 16 elements": Mistake("math.sqrt(D)", "4", "o"),
        "first rows stored by all": Mistake("[:, None], first, T", "[:, None], 0, T", "o", "unwritten"),
        **ROUNDED_MISTAKES,
        "sum in the inputs' dtype": Mistake(
            "l * alpha + tl.sum(P, 1)",
            "(l * alpha + tl.sum(P, 1)).to(q.dtype).to(tl.float32)",
            "o",
            says="right in float32",
        ),
    },
)
