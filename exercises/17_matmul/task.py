"""Exercise 17: what run() must compute, and typical mistakes."""

import torch

from grading import Mistake, Task, random

STEP = 16  # BLOCK_K of the exercise


def first_tile_again(x, w):
    K = x.shape[1]
    return {"y": sum(x[:, : min(STEP, K - k)] @ w[:, : min(STEP, K - k)].T for k in range(0, K, STEP))}


def sums_doubled(x, w):
    """Double the sums in every step, as sums += tl.dot(a, b, sums) does."""
    y = 0
    for k in range(0, x.shape[1], STEP):
        y = 2 * y + x[:, k : k + STEP] @ w[:, k : k + STEP].T
    return {"y": y}


def x_transposed(x, w):
    """Read x as [K, M]: element (m, k) at m + k · M."""
    return {"y": x.reshape(x.shape[1], x.shape[0]).T @ w.T}


def rounded(x, w, every_sum):
    """Round the sum to float16 in every step, or else what each step adds."""
    y = 0
    for k in range(0, x.shape[1], STEP):
        product = x[:, k : k + STEP] @ w[:, k : k + STEP].T
        y = (y + product).half().double() if every_sum else y + product.half().double()
    return {"y": y}


def inputs(M, N, K, cancel=False):
    """Return x and w; cancel: the second half of K takes away nearly all that the first half adds."""
    x = random(M, K, seed=1, scale=1.3, offset=0.4)
    w = random(N, K, seed=2, scale=0.7, offset=0.2)
    if cancel:
        x[:, K // 2 :] = -x[:, : K // 2]
        w[:, K // 2 :] = w[:, : K // 2]
        x[:, -STEP:] += random(M, STEP, seed=3, scale=0.02)
    return {"x": x, "w": w}


def steps_of_one(x, w):
    """Take a tile at every k: column k is in up to STEP of them."""
    times = (torch.arange(x.shape[1], device=x.device) + 1).clamp(max=STEP)
    return {"y": (x * times) @ w.T}


def rounding_of_sums(x, w):
    """Return the relative error of y if each of its float32 sums is rounded after every one of its K products.

    Such a sum is right. Where halves cancel, PyTorch's error is no bound for it: a library may add in another order,
    whose partial sums are smaller. A rounding changes a partial sum by at most 2⁻²⁴ of it, and the roundings of
    different steps are independent.
    """
    partial_sums = (x.double()[:, None] * w.double()).cumsum(-1)  # [M, N, K]
    error = 2**-24 * partial_sums.square().sum(-1).mean().sqrt()
    return max(1e-6, (error / partial_sums[..., -1].square().mean().sqrt()).item())


TASK = Task(
    cases={
        "one tile": {"M": 16, "N": 32, "K": 16},
        "two steps along K": {"M": 16, "N": 32, "K": 32},
        "ragged K": {"M": 16, "N": 32, "K": 37},
        "ragged rows and columns": {"M": 19, "N": 41, "K": 16},
        "halves of K that nearly cancel": {"M": 16, "N": 32, "K": 128, "cancel": True},
        "many programs": {"M": 50, "N": 70, "K": 118},
    },
    inputs=inputs,
    define=lambda x, w: {"y": x @ w.T},
    suspects={
        "y is zero: tl.dot returns the new sums, assign them": lambda x, w: {"y": x @ w.T * 0},
        "only the last tile of K is in y: sums starts again in every step": lambda x, w: {
            "y": x[:, (x.shape[1] - 1) // STEP * STEP :] @ w[:, (x.shape[1] - 1) // STEP * STEP :].T
        },
        "only the first tile of K is in y: the loop ends too early": lambda x, w: {"y": x[:, :STEP] @ w[:, :STEP].T},
        "every step reads the first tile of K: the offsets do not contain start": first_tile_again,
        "sums is counted twice: tl.dot adds to its third argument, so use = and not +=": sums_doubled,
        "x is read as [K, M]: element (m, k) is at m · K + k": x_transposed,
        "the last columns of K, which fill no whole tile, are missing": lambda x, w: {
            "y": x[:, : x.shape[1] // STEP * STEP] @ w[:, : x.shape[1] // STEP * STEP].T
        },
        "sums has 16 bits: make it float32, and leave it so": lambda x, w: rounded(x, w, True),
        "the product of two tiles is rounded to 16 bits before it is added: keep it in float32": lambda x, w: rounded(
            x, w, False
        ),
        "tiles overlap: the loop steps by 1, not by BLOCK_K": steps_of_one,
        "w is read as [K, N]: y = x w instead of x wᵀ": lambda x, w: {"y": x @ w.reshape(w.shape[1], w.shape[0])},
    },
    names={"y": "row column"},
    tolerance=rounding_of_sums,
    unwritten={"y": "element (r, c) is at r · N + c, the mask compares with M and N, and the grid has two axes"},
    owner=lambda module, name, index, inputs: (index[0] // module.BLOCK_M, index[1] // module.BLOCK_N),
    mistakes={
        "sums starts again": Mistake("tl.trans(w), sums,", "tl.trans(w),", "y", says="starts again"),
        "result of tl.dot dropped": Mistake("sums = tl.dot(x,", "tl.dot(x,", "y", says="assign them"),
        "first step only": Mistake("range(0, K, BLOCK_K)", "range(0, BLOCK_K, BLOCK_K)", "y", says="ends too early"),
        "added to sums twice": Mistake("sums = tl.dot(x,", "sums += tl.dot(x,", "y", says="not +="),
        "steps of one": Mistake("range(0, K, BLOCK_K)", "range(0, K)", "y", says="not by BLOCK_K"),
        "no start in the offsets": Mistake("k = start + tl", "k = tl", "y", says="do not contain start"),
        "w as [K, N]": Mistake(
            "w_ptr + column[:, None] * K + k[None, :], mask=(column[:, None] < N) & (k[None, :] < K)",
            "w_ptr + k[None, :] * N + column[:, None], mask=(column[:, None] < N) & (k[None, :] < K)",
            "y",
            says="x w instead",
        ),
        "K not masked": Mistake("(row[:, None] < M) & (k[None, :] < K)", "(row[:, None] < M)", "y", says="too wide"),
        "rows of x not masked": Mistake("(row[:, None] < M) & (k[", "(row[:, None] >= 0) & (k[", "x", "stray load"),
        "rows of w not masked": Mistake("(column[:, None] < N) & (k", "(column[:, None] >= 0) & (k", "w", "stray load"),
        "stride of the tile": Mistake("x_ptr + row[:, None] * K", "x_ptr + row[:, None] * BLOCK_K", "y"),
        "strides of x exchanged": Mistake(
            "x_ptr + row[:, None] * K + k[None, :]", "x_ptr + row[:, None] + k[None, :] * M", "y", says="as [K, M]"
        ),
        "whole tiles of K only": Mistake(
            "(0, K, BLOCK_K)", "(0, K // BLOCK_K * BLOCK_K, BLOCK_K)", "y", says="no whole tile"
        ),
        "rows of y K apart": Mistake(
            "y_ptr + row[:, None] * N", "y_ptr + row[:, None] * K", "y", "unwritten", says="r · N + c"
        ),
        "columns of y masked with K": Mistake(
            "M) & (column[None, :] < N)\n", "M) & (column[None, :] < K)\n", "y", "unwritten", says="with M and N"
        ),
        "and instead of &": Mistake("M) & (column", "M) and (column", None, "precedence", says="use &"),
        "a sum in the inputs' dtype": Mistake(
            "sums = tl.dot(x, tl.trans(w), sums, input_precision=PRECISION)",
            "sums = (sums + tl.dot(x, tl.trans(w), input_precision=PRECISION)).to(x.dtype).to(tl.float32)",
            "y",
            says="rounded to 16 bits",
        ),
        "products rounded": Mistake(
            "sums = tl.dot(x, tl.trans(w), sums, input_precision=PRECISION)",
            "sums += tl.dot(x, tl.trans(w), input_precision=PRECISION).to(x.dtype)",
            "y",
            says="16 bits",
        ),
        "products in float16": Mistake(
            "sums = tl.dot(x, tl.trans(w), sums, input_precision=PRECISION)",
            "sums += tl.dot(x, tl.trans(w), input_precision=PRECISION, out_dtype=x.dtype)",
            "y",
            says="16 bits",
        ),
        "sums in 16 bits": Mistake(
            "sums = tl.dot(x, tl.trans(w), sums, input_precision=PRECISION)",
            "sums = (tl.dot(x, tl.trans(w), input_precision=PRECISION) + sums).to(tl.float16).to(tl.float32)",
            "y",
            says="16 bits",
        ),
        "axes of the grid": Mistake("column = tl.program_id(1)", "column = tl.program_id(0)", "y", "unwritten"),
        "columns not masked in the store": Mistake(
            "mask = (row[:, None] < M) & (column[None, :] < N)", "mask = row[:, None] < M", "y", "stray"
        ),
        "stored transposed": Mistake(
            "y_ptr + row[:, None] * N + column[None, :]", "y_ptr + row[:, None] + column[None, :] * M", "y"
        ),
    },
)
