"""Exercise 09: what run() must compute, and typical mistakes."""

import math

import torch
from triton import cdiv

from attention_definition import QUERY_NAMES, causal, packed
from grading import Mistake, Task

BLOCK_Q, BLOCK_K = 32, 16  # of the exercise


def owner(module, name, index, inputs):
    H, T = inputs["H"], inputs["qkv"].shape[1]
    b, h, t = (index[0], index[2], index[1]) if name == "o" else index
    return b * H + h, cdiv(T, module.BLOCK_Q) - 1 - t // module.BLOCK_Q


def attend(**changes):
    """Return a suspect: causal attention with these changes."""
    return lambda qkv, H, K: dict(zip(("o", "lse"), causal(qkv, H, K, **changes), strict=True))


def missing(keys):
    """Return a suspect: the keys for which keys(query, key, first) is True are not visited."""

    def bias(query, key):
        skipped = keys(query, key, query // BLOCK_Q * BLOCK_Q)
        return torch.where(skipped, -math.inf, 0.0)

    return attend(bias=bias)


def twice(query, key):
    """Count the keys left of the diagonal twice."""
    return torch.where(key < query // BLOCK_Q * BLOCK_Q, math.log(2), 0.0)


def from_zero(qkv, H, K):
    """Start m at zero: where all scores are far below, every exponential is 0 in float32."""
    o, lse = causal(qkv, H, K)
    below = lse < -104 * math.log2(math.e)
    o = o.masked_fill(below.transpose(1, 2)[..., None], math.nan)
    return {"o": o, "lse": lse.masked_fill(below, -math.inf)}


TASK = Task(
    cases={
        "one tile of queries": {"B": 1, "T": 32, "H": 1, "K": 1},
        "two tiles of queries": {"B": 1, "T": 64, "H": 1, "K": 1},
        "far below zero": {"B": 1, "T": 32, "H": 1, "K": 1, "scale": 0.5, "apart": 6.0},
        "ragged": {"B": 1, "T": 43, "H": 1, "K": 1},
        "one token": {"B": 2, "T": 1, "H": 2, "K": 1},
        "grouped heads of two sequences": {"B": 2, "T": 37, "H": 6, "K": 2, "D": 32},
    },
    inputs=lambda B, T, H, K, **sizes: {"qkv": packed(B, T, H, K, **sizes), "H": H, "K": K},
    define=lambda qkv, H, K: dict(zip(("o", "lse"), causal(qkv, H, K), strict=True)),
    suspects={
        "m does not begin at -inf: all scores are far below it, and l is 0": from_zero,
        "a token does not see itself: row 0 has no key, 0 / 0": attend(first_masked=0),
        "output t depends on token t + 1: it sees the future": attend(first_masked=2),
        "nothing is masked: every token sees the future": attend(first_masked=1 << 20),
        "masked scores are not -inf, so they count: a score of 0 as exp(0)": attend(masked=0.0),
        "keys left of the diagonal count twice: the second loop starts at first": attend(bias=twice),
        "keys left of the diagonal are missing: the first loop goes from 0 to first": missing(
            lambda query, key, first: key < first
        ),
        "the second loop ends after one tile of keys: the diagonal reaches to first + BLOCK_Q": missing(
            lambda query, key, first: key >= first + BLOCK_K
        ),
        "query head h reads key head h % K; it is h // (H / K)": attend(grouped=False),
    },
    names={"o": QUERY_NAMES, "lse": "sequence head token"},
    owner=owner,
    mistakes={
        "token does not see itself": Mistake(
            "query[:, None] >= start", "query[:, None] > start", "o", says="see itself"
        ),
        "sees the next token": Mistake("query[:, None] >= start", "query[:, None] + 1 >= start", "o", says="t + 1"),
        "no mask on the diagonal": Mistake("if DIAGONAL:", "if False:", "o", says="nothing is masked"),
        "masked scores are zero": Mistake('S, -float("inf"))', "S, 0.0)", "o", says="not -inf"),
        "keys left of the diagonal forgotten": Mistake(
            "range(DIAGONAL * first,", "range(first,", "o", says="are missing"
        ),
        "both loops from the first key": Mistake("range(DIAGONAL * first,", "range(0,", "o", says="count twice"),
        "diagonal forgotten": Mistake(
            "DIAGONAL * BLOCK_Q, T)", "DIAGONAL * BLOCK_K, T)", "o", says="after one tile of keys"
        ),
        "keys of another head": Mistake("(H + h // (H // K)) * D", "(H + h % K) * D", "o", says="h % K"),
        "two query heads for each key head": Mistake("h // (H // K)", "h // 2", "o"),
        "m begins at zero": Mistake(
            'tl.full([BLOCK_Q], -float("inf")', "tl.full([BLOCK_Q], 0.0", "o", says="begin at -inf"
        ),
        "masked scores are -100": Mistake('S, -float("inf"))', "S, -100.0)", "o"),
        "o as wide as a tile of keys": Mistake("tl.zeros([BLOCK_Q, D]", "tl.zeros([BLOCK_Q, BLOCK_K]", None, "crash"),
        "scale of 16 elements": Mistake("math.sqrt(D)", "4", "o"),
        "not divided by the sum": Mistake("o / l[:, None]", "o", "o"),
        "another query head's place": Mistake("o_ptr + (b * T * H + h) * D", "o_ptr + b * T * H * D", "o", "unwritten"),
        "lse without its maximum": Mistake("m * scale + tl.log2(l)", "tl.log2(l)", "lse"),
        "lse without its sum": Mistake("m * scale + tl.log2(l)", "m * scale", "lse"),
        "scores in the inputs' dtype": Mistake(
            "            m_new =",
            "            S = S.to(q.dtype).to(tl.float32)\n            m_new =",
            "lse",
            says="right in float32",
        ),
        "sum of the rounded P": Mistake(
            "tl.sum(P, 1)", "tl.sum(P.to(q.dtype).to(tl.float32), 1)", "lse", says="right in float32"
        ),
    },
)
