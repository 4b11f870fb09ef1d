"""Exercise 02: what run() must compute, and typical mistakes."""

from common.versions import load_version
from grading import Mistake, Speed, Task, random

V1 = load_version(1)


def inputs(rows, C, eps=1e-6, scale=1.7):
    return {
        "residual": random(rows, C, seed=1, scale=scale, offset=0.3 * scale),
        "branch": random(rows, C, seed=2, scale=scale),
        "w": random(C, seed=3, offset=1.5),
        "eps": eps,
    }


def define(residual, branch, w, eps):
    x = residual + branch
    wide = V1.at_least_float32(x)
    return {"x": x, "rstd": (wide.square().mean(1) + eps).rsqrt(), "y": V1.rms_norm(x, w, eps)}


TASK = Task(
    cases={
        "one tile": {"rows": 4, "C": 8},
        "ragged columns": {"rows": 4, "C": 12},
        "ragged rows": {"rows": 7, "C": 8},
        "small values, where epsilon counts": {"rows": 4, "C": 8, "eps": 0.01, "scale": 0.05},
        "many programs": {"rows": 37, "C": 100},
    },
    inputs=inputs,
    define=define,
    names={"x": "row column", "rstd": "row", "y": "row column"},
    owner=lambda module, name, index, inputs: (index[0] // module.ROWS,),
    speed=Speed({"rows": 65536, "C": 1024}, {}, "RMSNorm + residual forward"),
    mistakes={
        "mean over the tile": Mistake("tl.sum(x * x, 1) / C", "tl.sum(x * x, 1) / BLOCK", "rstd"),
        "epsilon forgotten": Mistake("/ C + eps", "/ C", "rstd"),
        "weight forgotten": Mistake(" * w[None, :]).to", ").to", "y"),
        "variance instead of the mean square": Mistake(") / C", ") / C - tl.sum(x, 1) * tl.sum(x, 1) / C / C", "rstd"),
        "rstd not stored": Mistake("tl.store(rstd_ptr + row, rstd, mask=row < rows)", "pass", "rstd", "unwritten"),
        "y over x": Mistake("tl.store(y_ptr + offsets", "tl.store(x_ptr + offsets", "y", "unwritten"),
        "y over the residual": Mistake("store(x_ptr + offsets", "store(residual_ptr + offsets", "residual", "changed"),
        "normalized in 16 bits": Mistake("x = x.to(tl.float32)\n", "x = x.to(tl.float16).to(tl.float32)\n", "rstd"),
        "product rounded to 16 bits": Mistake(" w[None, :]).to", " w[None, :]).to(tl.float16).to", "y", says="16 bits"),
    },
)
