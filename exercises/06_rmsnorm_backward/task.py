"""Exercise 06: what run() must compute, and typical mistakes."""

import torch
import triton

from common.versions import load_version
from grading import Mistake, Task, random

EPS = 1e-6
ROWS, PROGRAMS = 2, 3  # of the exercise


def inputs(rows, C, past=True):
    given = {
        "dy": random(rows, C, seed=1, scale=0.8, offset=0.2),
        "dx": random(rows, C, seed=2) if past else None,
        "x": random(rows, C, seed=3, scale=1.4, offset=0.6),
        "w": random(C, seed=4, offset=1.5),
    }
    return given | forward(**given)


def forward(x, **rest):
    return {"rstd": (x.double().square().mean(1) + EPS).rsqrt().float()}


def define(dy, dx, x, w, rstd):
    x.requires_grad_()
    w.requires_grad_()
    dresidual, dw = torch.autograd.grad(load_version(1).rms_norm(x, w, EPS), (x, w), dy)
    dresidual = dresidual if dx is None else dresidual + dx
    return {"dresidual": dresidual, "dw": dw.to(torch.promote_types(dw.dtype, torch.float32))}


def storage(results, inputs):
    return {"dresidual": results["dresidual"], "dw": results["dw"], "partial_sums": results["dw"].expand(3, -1)}


def with_dresidual(
    weighted=True, along=1.0, power=2, over_tile=False, past=1.0, mean_of_g=True, divided=True, outer=True, times_x=True
):
    """Return a suspect: dresidual with one part changed."""

    def suspect(dy, dx, x, w, rstd):
        g = dy * w if weighted else dy
        dx = 0 if dx is None else dx
        rstd = rstd[:, None]
        size = triton.next_power_of_2(x.shape[1]) if over_tile else x.shape[1]
        mean = ((g if mean_of_g else dy) * x).sum(1, keepdim=True) / (size if divided else 1)
        part = along * (x if times_x else 1) * rstd**power * mean
        return {"dresidual": past * dx + (rstd if outer else 1) * (g - part)}

    return suspect


def with_dw(terms):
    """Return a suspect: dw as the sum over rows of terms(dy, x, w, rstd)."""
    return lambda dy, dx, x, w, rstd: {"dw": terms(dy, x, w, rstd[:, None]).sum(0)}


def sum_over_rows(dy, dx, x, w, rstd):
    """Take the mean over the rows of a tile, in place of the columns."""
    g, rstd = dy * w, rstd[:, None]
    means = [(g * x)[first : first + ROWS].sum(0, keepdim=True).expand(ROWS, -1) for first in range(0, len(x), ROWS)]
    mean = torch.cat(means)[: len(x)] / x.shape[1]
    return {"dresidual": (0 if dx is None else dx) + rstd * (g - x * rstd**2 * mean)}


def steps_of_programs(dy, x, w, rstd):
    """Repeat the rows that a loop with steps of PROGRAMS rows visits more than once."""
    terms = dy * x * rstd
    firsts = [first for p in range(PROGRAMS) for first in range(p * ROWS, len(x), PROGRAMS)]
    return torch.cat([terms[first : first + ROWS] for first in firsts])


def last_tiles(dy, x, w, rstd):
    """Keep the rows of each program's last tile."""
    tiles = triton.cdiv(len(x), ROWS)
    return (dy * x * rstd)[max(0, tiles - PROGRAMS) * ROWS :]


def last_program(dy, x, w, rstd):
    """Keep the rows of the last program."""
    tile = torch.arange(len(x)) // ROWS
    return (dy * x * rstd)[tile % PROGRAMS == PROGRAMS - 1]


def no_row(dy, x, w, rstd):
    """Return what a sum over memory that no program wrote is on a GPU: NaN without the bits of that memory."""
    return torch.full_like(x, float("nan"))


TASK = Task(
    cases={
        "a tile for each program": {"rows": 6, "C": 8},
        "ragged": {"rows": 5, "C": 12},
        "more tiles than programs": {"rows": 37, "C": 20},
        "fewer tiles than programs": {"rows": 3, "C": 8},
        "no gradient past the norm": {"rows": 6, "C": 8, "past": False},
    },
    inputs=inputs,
    define=define,
    suspects={
        "dresidual: the part along x is missing": with_dresidual(along=0),
        "dresidual: dx, the gradient past the norm, is not added": with_dresidual(past=0),
        "dresidual: w is missing in g": with_dresidual(weighted=False),
        "dresidual: rstd enters the part along x once; it is rstd²": with_dresidual(power=1),
        "dresidual: the mean divides by BLOCK, the width of the tile, not by C": with_dresidual(over_tile=True),
        "dresidual: the sum over the row is not divided by C": with_dresidual(divided=False),
        "dresidual: the part along x is added; subtract it": with_dresidual(along=-1),
        "dresidual: the mean is that of dy · x; it is that of g · x": with_dresidual(mean_of_g=False),
        "dresidual: the mean is over the rows of a tile; sum along axis 1": sum_over_rows,
        "dresidual: the factor rstd before the brackets is missing": with_dresidual(outer=False),
        "dresidual: the part along x lacks its factor x": with_dresidual(times_x=False),
        "dw: rows count more than once: the loop steps by P · ROWS, not by P": with_dw(steps_of_programs),
        "dw: dresidual takes the place of dy · rstd": lambda dy, dx, x, w, rstd: {
            "dw": (with_dresidual()(dy, dx, x, w, rstd)["dresidual"] * x).sum(0)
        },
        "dw: only each program's last tile counts; use +=": with_dw(last_tiles),
        "dw: the factor w does not belong there": with_dw(lambda dy, x, w, rstd: dy * x * rstd * w),
        "dw: the factor rstd is missing": with_dw(lambda dy, x, w, rstd: dy * x),
        "dw: only the last rows of the partial sums count; use +=": with_dw(last_program),
        "a row of partial_sums is missing (program p stores row p), or rows past the end are read": with_dw(no_row),
    },
    names={"dresidual": "row column", "dw": "column"},
    owner=lambda module, name, index, inputs: (
        (index[0] // 16,) if name == "dw" else (index[0] // module.ROWS % module.PROGRAMS,)
    ),
    wide=("rstd",),
    forward=forward,
    storage=storage,
    views=lambda outputs, inputs: {"dresidual": outputs["dresidual"], "dw": outputs["dw"]},
    unwritten={
        "dw": "a row of partial_sums is missing. Program p stores row p, which begins p · C after dw_ptr",
        "dresidual": "program p starts at row p · ROWS and steps by P · ROWS",
    },
    mistakes={
        "sum in place of the mean": Mistake("[:, None] / C", "[:, None]", "dresidual", says="divided by C"),
        "plus the part along x": Mistake("(g - x", "(g + x", "dresidual", says="subtract it"),
        "mean of dy": Mistake("tl.sum(g * x", "tl.sum(dy * x", "dresidual", says="that of g · x"),
        "dresidual without the part along x": Mistake(
            "rstd * (g - x * (rstd * rstd * tl.sum(g * x, 1)[:, None] / C))", "rstd * g", "dresidual", says="along x is"
        ),
        "gradient past the norm forgotten": Mistake(
            "dresidual += tl.load(dx_ptr + offsets, mask=mask, other=0.0).to(tl.float32)",
            "pass",
            "dresidual",
            says="dx, the gradient past the norm",
        ),
        "mean over the tile": Mistake(
            ".sum(g * x, 1)[:, None] / C", ".sum(g * x, 1)[:, None] / BLOCK", "dresidual", says="BLOCK"
        ),
        "weight forgotten": Mistake("g = dy * w[None, :]", "g = dy", "dresidual", says="w is missing"),
        "rstd once": Mistake("rstd * rstd * tl.sum", "rstd * tl.sum", "dresidual", says="rstd²"),
        "mean over the rows": Mistake(
            "tl.sum(g * x, 1)[:, None]", "tl.sum(g * x, 0)[None, :]", "dresidual", says="sum along axis 1"
        ),
        "no rstd before the brackets": Mistake("rstd * (g - x", "(g - x", "dresidual", says="before the brackets"),
        "no x in the part along x": Mistake("(g - x * (rstd", "(g - (rstd", "dresidual", says="lacks its factor x"),
        "dresidual in dw": Mistake("dw += dy * x * rstd", "dw += dresidual * x", "dw", says="takes the place of"),
        "step of P": Mistake(" tl.num_programs(0) * ROWS)", " tl.num_programs(0))", "dw", says="steps by P · ROWS"),
        "start at p": Mistake(
            "range(tl.program_id(0) * ROWS,", "range(tl.program_id(0),", "dresidual", "unwritten", says="row p · ROWS"
        ),
        "partial sums a tile apart": Mistake(
            "dw_ptr + tl.program_id(0).to(tl.int64) * C",
            "dw_ptr + tl.program_id(0).to(tl.int64) * BLOCK",
            "dw",
            "unwritten",
            gpu_kind="value",
            says="begins p · C",
        ),  # fmt: skip
        "dw in 16 bits": Mistake(
            "dw += dy * x * rstd", "dw = (dw + dy * x * rstd).to(tl.float16).to(tl.float32)", "dw", says="16 bits"
        ),
        "last rows only": Mistake("dw += dy * x * rstd", "dw = dy * x * rstd", "dw", says="last tile"),
        "dw with the weight": Mistake("dw += dy * x * rstd", "dw += g * x * rstd", "dw", says="factor w"),
        "dw without rstd": Mistake("dw += dy * x * rstd", "dw += dy * x", "dw", says="factor rstd"),
        "all programs in one row": Mistake(
            "dw_ptr + tl.program_id(0).to(tl.int64) * C",
            "dw_ptr",
            "dw",
            "unwritten",
            gpu_kind="value",
            says="stores row p",
        ),
        "partial sum stored in the loop": Mistake(
            "    tl.store(dw_ptr + tl.program_id(0)",
            "        tl.store(dw_ptr + tl.program_id(0)",
            "dw",
            "unwritten",
            gpu_kind="value",
        ),
        "dx without asking for None": Mistake("if dx_ptr is not None", "if True", None, "crash"),
        "dx not masked": Mistake("dx_ptr + offsets, mask=mask, other=0.0", "dx_ptr + offsets", "dx", "stray load"),
        "last partial sums only": Mistake(
            "partial_sums += tl.load(", "partial_sums = tl.load(", "dw", says="partial sums count"
        ),
        "dw in the inputs' dtype": Mistake(
            "dw += dy * x * rstd",
            "dw = (dw + dy * x * rstd).to(x_ptr.dtype.element_ty).to(tl.float32)",
            "dw",
            says="right in float32",
        ),
        "g in the inputs' dtype": Mistake(
            "g = dy * w[None, :]",
            "g = (dy * w[None, :]).to(x_ptr.dtype.element_ty).to(tl.float32)",
            "dresidual",
            says="right in float32",
        ),
    },
)
