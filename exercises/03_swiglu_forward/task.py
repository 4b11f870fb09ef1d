"""Exercise 03: what run() must compute, and typical mistakes."""

import torch

from common.versions import load_version
from grading import Mistake, Speed, Task, random

swiglu = load_version(1).swiglu
BLOCK = 32  # of the exercise


def stride_of_y(x):
    """Read rows of x as if they lay F apart."""
    rows, F = x.shape[0], x.shape[1] // 2
    memory = x.flatten()
    gate = torch.stack([memory[row * F : row * F + F] for row in range(rows)])
    up = torch.stack([memory[row * F + F : row * F + 2 * F] for row in range(rows)])
    return {"y": swiglu(gate, up)}


def up_one_tile_further(x):
    """Read up BLOCK elements after gate; past the end of x is NaN."""
    rows, F = x.shape[0], x.shape[1] // 2
    memory = torch.cat([x.flatten(), x.new_full((BLOCK + F,), torch.nan)])
    up = torch.stack([memory[row * 2 * F + BLOCK :][:F] for row in range(rows)])
    return {"y": swiglu(x[:, :F], up)}


TASK = Task(
    cases={
        "one tile": {"rows": 4, "F": 32},
        "ragged": {"rows": 5, "F": 20},
        "several tiles a row": {"rows": 3, "F": 70},
        "large values": {"rows": 2, "F": 20, "scale": 60.0},
    },
    inputs=lambda rows, F, scale=1.5: {"x": random(rows, 2 * F, seed=1, scale=scale, offset=0.4)},
    define=lambda x: {"y": swiglu(*x.chunk(2, dim=1))},
    suspects={
        "rows of x are read F apart; in memory they are 2F apart": stride_of_y,
        "it is silu(up) · gate: the two halves are exchanged": lambda x: {"y": swiglu(*reversed(x.chunk(2, 1)))},
        "up is read where gate is: it lies F elements further": lambda x: {"y": swiglu(*[x.chunk(2, 1)[0]] * 2)},
        "up is read BLOCK elements after gate: it lies F elements further": up_one_tile_further,
        "it is gate · σ(-gate) · up: the sign in the sigmoid is wrong": lambda x: {
            "y": -swiglu(-x.chunk(2, 1)[0], x.chunk(2, 1)[1])
        },
        "silu(gate) and up are added: multiply them": lambda x: {
            "y": torch.nn.functional.silu(x.chunk(2, 1)[0]) + x.chunk(2, 1)[1]
        },
        "it is σ(gate) · up: a factor gate is missing": lambda x: {"y": x.chunk(2, 1)[0].sigmoid() * x.chunk(2, 1)[1]},
    },
    names={"y": "row column"},
    unwritten={"y": "a row of y has F elements, and program (i, j) owns ROWS of its rows and BLOCK of its columns"},
    owner=lambda module, name, index, inputs: (index[0] // module.ROWS, index[1] // module.BLOCK),
    speed=Speed({"rows": 16384, "F": 4096}, {"ROWS": 1, "BLOCK": 2048}, "SwiGLU forward"),
    mistakes={
        "gate and up exchanged": Mistake(
            "gate * tl.sigmoid(gate) * up", "up * tl.sigmoid(up) * gate", "y", says="exchanged"
        ),
        "and instead of &": Mistake("(row < rows) & (", "(row < rows) and (", None, "precedence", says="use &"),
        "up where gate is": Mistake("row * 2 * F + F + column", "row * 2 * F + column", "y", says="F elements further"),
        "up one tile further": Mistake("row * 2 * F + F +", "row * 2 * F + BLOCK +", "y", says="BLOCK elements after"),
        "sign in the sigmoid": Mistake("tl.sigmoid(gate)", "tl.sigmoid(-gate)", "y", says="sign in the sigmoid"),
        "sum instead of product": Mistake("tl.sigmoid(gate) * up", "tl.sigmoid(gate) + up", "y", says="multiply them"),
        "rows of y as long as those of x": Mistake(
            "y_ptr + row * F", "y_ptr + row * 2 * F", "y", "unwritten", says="a row of y has F elements"
        ),
        "sigmoid instead of silu": Mistake("gate * tl.sigmoid(", "tl.sigmoid(", "y", says="factor gate is missing"),
        "gate and up interleaved": Mistake(" + row * 2 * F + F + column", " + row * 2 * F + 2 * column + 1", "y"),
        "rows of one width": Mistake("row * 2 * F", "row * F", "y", count=2, says="2F apart"),
        "row runs into the next": Mistake(
            "row < rows) & (column < F)", "row < rows) & (column < 2 * F)", "y", "stray", says="too wide"
        ),
        "sigmoid that overflows": Mistake("tl.sigmoid(gate)", "tl.exp(gate) / (1 + tl.exp(gate))", "y"),
        "up not masked": Mistake("F + F + column, mask=mask, other=0.0", "F + F + column", "x", "stray load"),
        "columns not masked": Mistake("(row < rows) & (column < F)", "row < rows", "y", "stray"),
        "first columns alone": Mistake("tl.program_id(1) * BLOCK + ", "", "y", "unwritten"),
        "silu in the inputs' dtype": Mistake(
            "gate * tl.sigmoid(gate) * up",
            "(gate * tl.sigmoid(gate)).to(y_ptr.dtype.element_ty) * up",
            "y",
            says="right in float32",
        ),
    },
)
