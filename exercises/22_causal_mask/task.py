"""Exercise 22: what run() must compute, and typical mistakes."""

import math

import torch

from attention_definition import ROUNDED_MISTAKES, attended
from grading import DEVICE, Mistake, Task, Wrong, random

BLOCK_Q, BLOCK_K = 32, 16  # of the exercise


def inputs(T, D=16, scale=1.3, offset=0.4, sign=1):
    q, k = (random(T, D, seed=seed, scale=scale, offset=offset) for seed in (1, 2))
    k *= sign
    return {"q": q, "k": k, "v": random(T, D, seed=3, offset=0.8)}


def attend(sees, masked=-math.inf):
    """Return a function like define: keys for which sees(query, key) is False get the score `masked`.

    It computes whole tiles of keys, so a wrong mask reaches those from T on, which are zero.
    """

    def define(q, k, v):
        T, D = q.shape
        width = math.ceil(T / BLOCK_K) * BLOCK_K
        k, v = (torch.cat([tensor, tensor.new_zeros(width - T, D)]) for tensor in (k, v))
        query = torch.arange(T, device=q.device)[:, None]
        key = torch.arange(width, device=q.device)[None, :]
        computed = key < (query // BLOCK_Q + 1) * BLOCK_Q  # by the program that owns the query
        scores = (q @ k.T / math.sqrt(D)).masked_fill(~sees(query, key), masked).masked_fill(~computed, -math.inf)
        return {"o": attended(scores, v)}

    return define


def causal(query, key):
    return query >= key


def wrong_way_round(q, k, v):
    """Let a query see its own key and those after it; one that sees no key of the first tile computes inf - inf."""
    o = attend(lambda query, key: query <= key)(q, k, v)["o"]
    o[BLOCK_K:] = math.nan
    return {"o": o}


def from_zero(q, k, v):
    """Start m at zero: where all scores are far below, every exponential is 0 in float32."""
    o = attend(causal)(q, k, v)["o"]
    scores = (q @ k.T / math.sqrt(q.shape[1])).tril()
    o[scores.masked_fill(scores == 0, -math.inf).amax(1) < -104] = math.nan
    return {"o": o}


def check_end(module, source):
    """Raise Wrong if a program reads a key after its own queries: those keys and values are NaN here."""
    for program in range(2):
        end = (program + 1) * module.BLOCK_Q
        q, k, v = (tensor.to(DEVICE) for tensor in inputs(end + module.BLOCK_Q).values())
        k[end:] = math.nan
        v[end:] = math.nan
        o = torch.zeros_like(q)
        module.run(q, k, v, o)
        if not o[:end].isfinite().all():
            found = f"the values are right, but program {program} reads keys that none of its queries sees"
            raise Wrong("end", "o", f"{found}: the loop must end at first + BLOCK_Q")


TASK = Task(
    cases={
        "one tile of queries": {"T": 32},
        "two tiles of queries": {"T": 64},
        "ragged": {"T": 43},
        "one token": {"T": 1},
        "several programs": {"T": 100, "D": 32},
        "far below zero": {"T": 32, "scale": 0.5, "offset": 6.0, "sign": -1},
    },
    inputs=inputs,
    define=attend(causal),
    suspects={
        "m does not begin at -inf: all scores are far below it, and l is 0": from_zero,
        "a token does not see itself: row 0 has no key, 0 / 0": attend(lambda query, key: query > key),
        "output t depends on token t + 1: it sees the future": attend(lambda query, key: query + 1 >= key),
        "nothing is masked: a token sees all keys of its tile": attend(lambda query, key: key >= 0),
        "the position of a query is first + row, not its row in the tile": attend(
            lambda query, key: query % BLOCK_Q >= key
        ),
        "the comparison is the wrong way round: a token sees the future, not the past": wrong_way_round,
        "the mask compares with the place in the tile: the position of a key is start + key": attend(
            lambda query, key: query >= key % BLOCK_K
        ),
        "masked scores are not -inf, so they count: a score of 0 as exp(0)": attend(causal, masked=0.0),
        "the loop of every program ends at BLOCK_Q: first is missing": attend(
            lambda query, key: (query >= key) & (key < BLOCK_Q)
        ),
        "the loop ends at first: the keys of the tile's own tokens are missing": attend(
            lambda query, key: (query >= key) & (key < query // BLOCK_Q * BLOCK_Q)
        ),
        "the loop ends one tile of keys after first: the last queries need keys up to first + BLOCK_Q": attend(
            lambda query, key: (query >= key) & (key < query // BLOCK_Q * BLOCK_Q + BLOCK_K)
        ),
    },
    names={"o": "query element"},
    owner=lambda module, name, index, inputs: (index[0] // module.BLOCK_Q,),
    then=check_end,
    mistakes={
        "token does not see itself": Mistake("None] >= start", "None] > start", "o", says="see itself"),
        "sees the next token": Mistake("None] >= start", "None] + 1 >= start", "o", says="t + 1"),
        "no mask": Mistake(
            'tl.where(query[:, None] >= start + key[None, :], S, -float("inf"))', "S", "o", says="nothing is masked"
        ),
        "reversed": Mistake("None] >= start", "None] <= start", "o", says="wrong way round"),
        "and between tiles": Mistake(
            "query[:, None] >= start + key[None, :], S",
            "(query[:, None] >= start + key[None, :]) and (start + key[None, :] < T), S",
            None,
            "precedence",
            says="use &",
        ),
        "row of the query in its tile": Mistake("(query[:", "((query - first)[:", "o", says="first + row"),
        "place in the tile": Mistake(">= start + key", ">= key", "o", says="start + key"),
        "masked scores are zero": Mistake('S, -float("inf"))', "S, 0.0)", "o", says="not -inf"),
        "masked scores by a product": Mistake(
            'tl.where(query[:, None] >= start + key[None, :], S, -float("inf"))',
            "S * (query[:, None] >= start + key[None, :])",
            "o",
            says="not -inf",
        ),
        "tile's own keys forgotten": Mistake("min(first + BLOCK_Q, T)", "first", "o", says="ends at first"),
        "half of the diagonal forgotten": Mistake(
            "first + BLOCK_Q, T", "first + BLOCK_K, T", "o", says="one tile of keys"
        ),
        "end without first": Mistake("min(first + BLOCK_Q, T)", "min(BLOCK_Q, T)", "o", says="first is missing"),
        "m begins at zero": Mistake(
            'tl.full([BLOCK_Q], -float("inf")', "tl.full([BLOCK_Q], 0.0", "o", says="begin at -inf"
        ),
        "masked scores are -100": Mistake('S, -float("inf"))', "S, -100.0)", "o"),
        "o as wide as a tile of keys": Mistake("tl.zeros([BLOCK_Q, D]", "tl.zeros([BLOCK_Q, BLOCK_K]", None, "crash"),
        "scale of 16 elements": Mistake("math.sqrt(D)", "4", "o"),
        "second program reads too far": Mistake(
            "min(first + BLOCK_Q, T)", "min(2 * first + BLOCK_Q, T)", "o", "end", says="program 1 reads keys"
        ),
        "loop over all keys": Mistake("min(first + BLOCK_Q, T)", "T", "o", "end", says="none of its queries sees"),
        **ROUNDED_MISTAKES,
    },
)
