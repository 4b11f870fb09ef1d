"""What exercise 09 must compute, and typical mistakes."""

from triton import cdiv

from attention_definition import QUERY_NAMES, causal, packed
from grading import Mistake, Task


def owner(module, name, index, inputs):
    H, T = inputs["H"], inputs["qkv"].shape[1]
    b, h, t = (index[0], index[2], index[1]) if name == "o" else index
    return b * H + h, cdiv(T, module.BLOCK_Q) - 1 - t // module.BLOCK_Q


TASK = Task(
    cases={
        "one tile of queries": {"B": 1, "T": 32, "H": 1, "K": 1},
        "two tiles of queries": {"B": 1, "T": 64, "H": 1, "K": 1},
        "ragged": {"B": 1, "T": 43, "H": 1, "K": 1},
        "one token": {"B": 2, "T": 1, "H": 2, "K": 1},
        "grouped heads of two sequences": {"B": 2, "T": 37, "H": 4, "K": 2},
    },
    inputs=lambda B, T, H, K: {"qkv": packed(B, T, H, K), "H": H, "K": K},
    define=lambda qkv, H, K: dict(zip(("o", "lse"), causal(qkv, H, K), strict=True)),
    names={"o": QUERY_NAMES, "lse": "sequence head token"},
    owner=owner,
    mistakes={
        "token does not see itself": Mistake(
            "tl.arange(0, QUERIES)[:, None] >= first_key", "tl.arange(0, QUERIES)[:, None] > first_key", "o"
        ),
        "sees the next token": Mistake("first_query + tl.arange", "first_query + 1 + tl.arange", "o"),
        "no mask on the diagonal": Mistake("if DIAGONAL:", "if False:", "o"),
        "masked scores are zero": Mistake('BLOCK_K), S, -float("inf"))', "BLOCK_K), S, 0.0)", "o"),
        "keys in front forgotten": Mistake("range(0, first, BLOCK_K)", "range(first, first, BLOCK_K)", "o"),
        "diagonal forgotten": Mistake(
            "range(first, min(first + BLOCK_Q, T), BLOCK_K)", "range(first, min(first + BLOCK_K, T), BLOCK_K)", "o"
        ),
        "keys of another head": Mistake("(H + h // (H // K)) * D", "(H + h % K) * D", "o"),
        "not divided by the sum": Mistake("o / total[:, None]", "o", "o"),
        "lse without its maximum": Mistake("highest * scale + tl.log2(total)", "tl.log2(total)", "lse"),
        "lse without its sum": Mistake("highest * scale + tl.log2(total)", "highest * scale", "lse"),
    },
)
