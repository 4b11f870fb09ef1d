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


def read_at(place):
    """Return a suspect: sums of the elements at place(row, column, rows, C); past the end of x is NaN."""

    def suspect(x):
        rows, C = x.shape
        row, column = torch.arange(rows)[:, None], torch.arange(C)[None, :]
        places = place(row, column, rows, C)
        memory = torch.cat([x.flatten(), x.new_full((int(places.max()) + 1,), torch.nan)])
        return {"sum": memory[places.to(x.device)].sum(1)}

    return suspect


TASK = Task(
    cases={
        "one tile": {"rows": 4, "C": 8},
        "ragged columns": {"rows": 4, "C": 5},
        "ragged rows": {"rows": 7, "C": 8},
        "many programs": {"rows": 37, "C": 150},
    },
    inputs=lambda rows, C: {"x": random(rows, C, seed=1, scale=2.3, offset=0.7)},
    define=lambda x: {"sum": x.sum(1)},
    suspects={
        "rows are read BLOCK apart; in memory they are C apart": stride_of_the_tile,
        "row and column are exchanged in the offsets: element (r, c) is at r · C + c": read_at(
            lambda row, column, rows, C: row + column * rows
        ),
        "the column is multiplied by C, but the row must be: element (r, c) is at r · C + c": read_at(
            lambda row, column, rows, C: row + column * C
        ),
        "these are means, divided by C": lambda x: {"sum": x.mean(1)},
        "these are maxima: use tl.sum": lambda x: {"sum": x.amax(1)},
        "the first column is missing": lambda x: {"sum": x[:, 1:].sum(1)},
    },
    names={"sum": "row"},
    owner=lambda module, name, index, inputs: (index[0] // module.ROWS,),
    speed=Speed({"rows": 131072, "C": 1024}, {}),
    mistakes={
        "columns not masked": Mistake("(row[:, None] < rows) & (column[None, :] < C)", "row[:, None] < rows", "sum"),
        "rows not masked in the store": Mistake(", mask=row < rows)", ")", "sum", "stray"),
        "and instead of &": Mistake(
            "(row[:, None] < rows) & (column", "(row[:, None] < rows) and (column", None, "precedence", says="use &"
        ),
        "strides exchanged": Mistake(
            "row[:, None] * C + column[None, :]", "row[:, None] + column[None, :] * rows", "sum", says="are exchanged"
        ),
        "column times C": Mistake(
            "row[:, None] * C + column[None, :]", "row[:, None] + column[None, :] * C", "sum", says="the row must be"
        ),
        "mean": Mistake("tl.sum(x, 1)", "(tl.sum(x, 1) / C)", "sum", says="means"),
        "maximum": Mistake("tl.sum(x, 1)", "tl.max(x, 1)", "sum", says="maxima"),
        "no other": Mistake(", other=0.0)", ")", "sum", says="line 15 loads without other", gpu_kind="value"),
        "rows masked one too far": Mistake(
            "row < rows)\n", "row <= rows)\n", "sum", "stray", says="line 16 is too wide"
        ),
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
            says="program 1 loads elements outside the tensor, the nearest 1 past the end: the mask of the load",
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
        "first column forgotten": Mistake(
            "tl.sum(x, 1)", "tl.sum(tl.where(column == 0, 0.0, x), 1)", "sum", says="first column"
        ),
    },
)
