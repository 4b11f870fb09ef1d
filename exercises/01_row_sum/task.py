"""Exercise 01: what run() must compute, and typical mistakes."""

from grading import Mistake, Speed, Task, random

TASK = Task(
    cases={
        "one tile": {"rows": 4, "C": 8},
        "ragged columns": {"rows": 4, "C": 5},
        "ragged rows": {"rows": 7, "C": 8},
        "many programs": {"rows": 37, "C": 100},
    },
    inputs=lambda rows, C: {"x": random(rows, C, seed=1, scale=2.3, offset=0.7)},
    define=lambda x: {"sum": x.sum(1)},
    names={"sum": "row"},
    owner=lambda module, name, index, inputs: (index[0] // module.ROWS,),
    speed=Speed({"rows": 131072, "C": 1024}, {}),
    mistakes={
        "columns not masked": Mistake("(row[:, None] < rows) & (column[None, :] < C)", "row[:, None] < rows", "sum"),
        "rows not masked in the store": Mistake(", mask=row < rows)", ")", "sum", "stray"),
        "outside reads as one": Mistake("other=0.0", "other=1.0", "sum"),
        "every program does the first rows": Mistake("program_id(0) * ROWS + tl.arange", "arange", "sum", "unwritten"),
        "stride of the tile": Mistake("row[:, None] * C", "row[:, None] * BLOCK", "sum"),
        "first column forgotten": Mistake("tl.sum(x, 1)", "tl.sum(tl.where(column == 0, 0.0, x), 1)", "sum"),
    },
)
