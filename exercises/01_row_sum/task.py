"""Exercise 01: what run() must compute, and typical mistakes."""

import torch
import triton

from grading import Mistake, Speed, Task, random


def stride_of_the_tile(x):
    """Sum rows that are read as if they lay BLOCK apart; past the end of x is NaN."""
    rows, C = x.shape
    block = triton.next_power_of_2(C)
    memory = torch.cat([x.flatten(), x.new_full((rows * block,), torch.nan)])
    return {"sum": torch.stack([memory[row * block : row * block + C].sum() for row in range(rows)])}


TASK = Task(
    cases={
        "one tile": {"rows": 4, "C": 8},
        "ragged columns": {"rows": 4, "C": 5},
        "ragged rows": {"rows": 7, "C": 8},
        "many programs": {"rows": 37, "C": 100},
    },
    inputs=lambda rows, C: {"x": random(rows, C, seed=1, scale=2.3, offset=0.7)},
    define=lambda x: {"sum": x.sum(1)},
    suspects={"rows are read BLOCK apart; in memory they are C apart": stride_of_the_tile},
    names={"sum": "row"},
    owner=lambda module, name, index, inputs: (index[0] // module.ROWS,),
    speed=Speed({"rows": 131072, "C": 1024}, {}),
    mistakes={
        "columns not masked": Mistake("(row[:, None] < rows) & (column[None, :] < C)", "row[:, None] < rows", "sum"),
        "rows not masked in the store": Mistake(", mask=row < rows)", ")", "sum", "stray"),
        "outside reads as one": Mistake("other=0.0", "other=1.0", "sum"),
        "every program does the first rows": Mistake("program_id(0) * ROWS + tl.arange", "arange", "sum", "unwritten"),
        "stride of the tile": Mistake("row[:, None] * C", "row[:, None] * BLOCK", "sum", says="C apart"),
        "conditions without parentheses": Mistake(
            "(row[:, None] < rows) & (column[None, :] < C)",
            "row[:, None] < rows & column[None, :] < C",
            None,
            "precedence",
            says="parentheses",
        ),
        "first column forgotten": Mistake("tl.sum(x, 1)", "tl.sum(tl.where(column == 0, 0.0, x), 1)", "sum"),
    },
)
