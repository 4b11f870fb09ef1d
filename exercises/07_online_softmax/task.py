"""What exercise 07 must compute, and typical mistakes."""

from grading import Mistake, Task, random


def inputs(rows, C, scale=2.0, offset=0.5, first=0.0, second=0.0):
    x = random(rows, C, seed=1, scale=scale, offset=offset)
    x[:, :16] += first
    x[:, 16:] += second
    return {"x": x}


TASK = Task(
    cases={
        "one tile": {"rows": 2, "C": 16},
        "two tiles, the second higher": {"rows": 2, "C": 32, "second": 3.0},
        "ragged": {"rows": 3, "C": 41},
        "large and far from zero": {"rows": 3, "C": 50, "scale": 30.0, "offset": 200.0},
        "far below zero": {"rows": 3, "C": 50, "offset": -300.0},
        "highest in the first tile": {"rows": 2, "C": 40, "first": 200.0},
    },
    inputs=inputs,
    define=lambda x: {"y": x.softmax(1)},
    names={"y": "row column"},
    owner=lambda module, name, index, inputs: (index[0],),
    mistakes={
        "sum not rescaled": Mistake("total * tl.exp(highest - raised) + ", "total + ", "y"),
        "highest of the last tile": Mistake(
            "raised = tl.maximum(highest, tl.max(x, 0))", "raised = tl.max(x, 0, keep_dims=True)", "y"
        ),
        "nothing subtracted": Mistake("raised = tl.maximum(highest, tl.max(x, 0))", "raised = highest * 0.0", "y"),
        "last tile alone": Mistake("total * tl.exp(highest - raised) + ", "total * 0.0 + ", "y"),
        "highest not kept": Mistake("        highest = raised\n", "", "y"),
        "outside reads as zero": Mistake(
            'mask=column < C, other=-float("inf")).to(tl.float32)\n        raised',
            "mask=column < C, other=0.0).to(tl.float32)\n        raised",
            "y",
        ),
        "not divided": Mistake("tl.exp(x - highest) / total", "tl.exp(x - highest)", "y"),
        "store not masked": Mistake("element_ty), mask=column < C", "element_ty)", "y", "stray"),
    },
)
