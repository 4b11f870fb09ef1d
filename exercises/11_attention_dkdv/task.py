"""Exercise 11: what run() must compute, and typical mistakes."""

from attention_definition import QUERY_NAMES, gradients, parts, projections, saved
from grading import Mistake, Task


def inputs(**sizes):
    given = projections(**sizes)
    return given | forward(**given)


def forward(qkv, do, H, K, **rest):
    kept = saved(qkv, do, H, K)
    return {"lse": kept["lse"], "delta": kept["delta"]}


def define(qkv, do, lse, delta, H, K):
    results = gradients(qkv, do, H, K)
    return {"dv": results["dv"], "dk": results["dk"]}


def views(outputs, inputs):
    found = parts(outputs["dqkv"], inputs["H"], inputs["K"])
    return {"dv": found["dv"], "dk": found["dk"]}


TASK = Task(
    cases={
        "one tile of keys": {"B": 1, "T": 32, "H": 1, "K": 1},
        "two tiles of keys": {"B": 1, "T": 64, "H": 1, "K": 1},
        "ragged": {"B": 1, "T": 43, "H": 1, "K": 1},
        "grouped heads of two sequences": {"B": 2, "T": 37, "H": 6, "K": 2, "D": 32},
        "two queries a key": {"B": 1, "T": 32, "H": 2, "K": 1},
    },
    inputs=inputs,
    define=define,
    names={"dk": QUERY_NAMES, "dv": QUERY_NAMES},
    owner=lambda module, name, index, inputs: (index[0] * inputs["K"] + index[2], index[1] // module.BLOCK_K),
    wide=("lse", "delta"),
    forward=forward,
    storage=lambda results, inputs: {"dqkv": inputs["qkv"]},
    views=views,
    mistakes={
        "first query head only": Mistake("(kv + 1) * (H // K))", "kv * (H // K) + 1)", "dv"),
        "query heads interleaved": Mistake("range(kv * (H // K), (kv + 1) * (H // K))", "range(kv, H, K)", "dv"),
        "dk as wide as a tile of queries": Mistake(
            "dk, dv = tl.zeros([BLOCK_K, D]", "dk, dv = tl.zeros([BLOCK_K, BLOCK_Q]", None, "crash"
        ),
        "scale of 16 elements": Mistake("(scale * 0.6931471805599453)", "0.25", "dk"),
        "no mask on the diagonal": Mistake("if not BELOW:", "if False:", "dv"),
        "mask the wrong way": Mistake("[:, None] <= query[None, :]", "[:, None] >= query[None, :]", "dv"),
        "later queries forgotten": Mistake("T if BELOW else", "0 if BELOW else", "dv"),
        "delta left out": Mistake("input_precision=PRECISION) - delta[None, :])", "input_precision=PRECISION))", "dk"),
        "dv from dS": Mistake("dv = tl.dot(P.to(do.dtype)", "dv = tl.dot((P * P).to(do.dtype)", "dv"),
        "dk to the wrong base": Mistake("dk * (scale * 0.6931471805599453)", "dk * scale", "dk", says="log2(e) times"),
        "dv scaled too": Mistake("K * D, dv, first", "K * D, dv * scale, first", "dv"),
        "dk and dv exchanged": Mistake("k_offset + K * D, dv", "k_offset, dv", "dv", "unwritten"),
        "scores in the inputs' dtype": Mistake(
            "tl.dot(k, tl.trans(q), input_precision=PRECISION) *",
            "tl.dot(k, tl.trans(q), input_precision=PRECISION).to(q.dtype).to(tl.float32) *",
            "dv",
            says="right in float32",
        ),
        "dv in the inputs' dtype": Mistake(
            "do, dv, input_precision=PRECISION)",
            "do, dv, input_precision=PRECISION).to(q.dtype).to(tl.float32)",
            "dv",
            says="right in float32",
        ),
        "dk in the inputs' dtype": Mistake(
            "q, dk, input_precision=PRECISION)",
            "q, dk, input_precision=PRECISION).to(q.dtype).to(tl.float32)",
            "dk",
            says="right in float32",
        ),
    },
)
