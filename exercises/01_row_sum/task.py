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
        "many programs": {"rows": 37, "C": 150},
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
        "rows not masked in the load": Mistake(
            "(row[:, None] < rows) & (column[None, :] < C)",
            "(row[:, None] >= 0) & (column[None, :] < C)",
            "x",
            "stray load",
            says="program 1 loads elements outside the tensor, the nearest 1 past the end: mask the load",
        ),
        "sum in 16 bits": Mistake("other=0.0).to(tl.float32)", "other=0.0)", "sum"),
        "the next program's rows stored too": Mistake(
            "mask=row < rows)",
            "mask=row < rows)\n    tl.store(sum_ptr + row + ROWS, tl.sum(x, 1).to(sum_ptr.dtype.element_ty), "
            "mask=row + ROWS < rows)",
            "sum",
            "race",
            gpu_kind="value",
            says="program 0 and program 1 stored it twice",
        ),
        "needs the program before": Mistake(
            "tl.sum(x, 1).to(sum_ptr.dtype.element_ty), mask",
            "(tl.sum(x, 1) + 0 * tl.load(sum_ptr + row - ROWS, mask=(row >= ROWS) & (row < rows), other=0.0))"
            ".to(sum_ptr.dtype.element_ty), mask",
            "sum",
            "race",
            gpu_kind="value",
            says="program 1 loads what program 0 stored in the same launch",
        ),
        "sums that PyTorch computed": Mistake(
            "    rows, C = x.shape\n", "    x = x.sum(1, keepdim=True)\n    rows, C = x.shape\n", "x", "no kernel"
        ),
        "first column forgotten": Mistake("tl.sum(x, 1)", "tl.sum(tl.where(column == 0, 0.0, x), 1)", "sum"),
    },
)
