"""Exercise 10: what run() must compute, and typical mistakes."""

from triton import cdiv

from attention_definition import QUERY_NAMES, gradients, parts, projections, saved
from grading import Mistake, Task


def inputs(**sizes):
    given = projections(**sizes)
    return given | forward(**given)


def forward(qkv, do, H, K, **rest):
    kept = saved(qkv, do, H, K)
    return {"o": kept["o"], "lse": kept["lse"]}


def define(qkv, o, do, lse, H, K):
    delta = (do.to(lse.dtype) * o.to(lse.dtype)).sum(3).transpose(1, 2)
    return {"delta": delta.contiguous(), "dq": gradients(qkv, do, H, K, delta)["dq"]}


def owner(module, name, index, inputs):
    H, T = inputs["H"], inputs["qkv"].shape[1]
    b, h, t = (index[0], index[2], index[1]) if name == "dq" else index
    return b * H + h, cdiv(T, module.BLOCK_Q) - 1 - t // module.BLOCK_Q


TASK = Task(
    cases={
        "one tile of queries": {"B": 1, "T": 32, "H": 1, "K": 1},
        "two tiles of queries": {"B": 1, "T": 64, "H": 1, "K": 1},
        "ragged": {"B": 1, "T": 43, "H": 1, "K": 1},
        "grouped heads of two sequences": {"B": 2, "T": 37, "H": 6, "K": 2, "D": 32},
    },
    inputs=inputs,
    define=define,
    names={"delta": "sequence head token", "dq": QUERY_NAMES},
    owner=owner,
    wide=("lse",),
    forward=forward,
    storage=lambda results, inputs: {"delta": results["delta"], "dqkv": inputs["qkv"]},
    views=lambda outputs, inputs: {
        "delta": outputs["delta"],
        "dq": parts(outputs["dqkv"], inputs["H"], inputs["K"])["dq"],
    },
    mistakes={
        "delta left out": Mistake("input_precision=PRECISION) - delta[:, None])", "input_precision=PRECISION))", "dq"),
        "delta from do alone": Mistake("do.to(tl.float32) * o.to(tl.float32)", "do.to(tl.float32)", "delta"),
        "delta not stored": Mistake("delta, mask=query < T", "delta, mask=query < 0", "delta", "unwritten"),
        "scale to the wrong base": Mistake(" * (scale * 0.6931471805599453)", " * scale", "dq", says="log2(e) times"),
        "scale forgotten": Mistake("dq * (scale * 0.6931471805599453)", "dq", "dq"),
        "no mask on the diagonal": Mistake("if DIAGONAL:", "if False:", "dq"),
        "h // K for the key head": Mistake("h // (H // K)", "h // K", "dq"),
        "dq as wide as a tile of keys": Mistake(
            "dq = tl.zeros([BLOCK_Q, D]", "dq = tl.zeros([BLOCK_Q, BLOCK_K]", None, "crash"
        ),
        "scale of 16 elements": Mistake("(scale * 0.6931471805599453)", "0.25", "dq"),
        "lse not masked": Mistake("lse_ptr + row, mask=query < T, other=0.0", "lse_ptr + row", "lse", "stray load"),
        "dq stored K heads further too": Mistake(
            "    store_tile(dqkv_ptr + q_offset, dq",
            "    store_tile(dqkv_ptr + q_offset + K * D, dq, first, T, STRIDE, BLOCK_Q, D)\n"
            "    store_tile(dqkv_ptr + q_offset, dq",
            "dqkv",
            "race",
            gpu_kind="value",
        ),
        "not multiplied by P": Mistake("dS = P * (", "dS = (", "dq"),
        "values instead of keys": Mistake("tl.dot(dS.to(k.dtype), k, dq", "tl.dot(dS.to(k.dtype), v, dq", "dq"),
        "last tile of keys only": Mistake("k, dq, input_precision", "k, dq * 0.0, input_precision", "dq"),
        "scores in the inputs' dtype": Mistake(
            "tl.dot(q, tl.trans(k), input_precision=PRECISION) *",
            "tl.dot(q, tl.trans(k), input_precision=PRECISION).to(q.dtype).to(tl.float32) *",
            "dq",
            says="right in float32",
        ),
        "gradient of P in the inputs' dtype": Mistake(
            "tl.dot(do, tl.trans(v), input_precision=PRECISION) -",
            "tl.dot(do, tl.trans(v), input_precision=PRECISION).to(q.dtype) -",
            "dq",
            says="right in float32",
        ),
    },
)
