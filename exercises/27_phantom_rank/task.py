"""Exercise 27: what run() must compute, and typical mistakes."""

import torch

import ranks
from grading import Mistake, Task, random

RUNS = (
    "sound training",
    "a weight that differs on rank 1 in its last bit",
    "the sum in place of the mean",
    "a mean without rank 1's gradient",
    "a gradient of its own on every rank",
    "one batch on the last two ranks",
    "averaging skipped on rank 0 alone",
    "sound training, rounded otherwise",
    "a gradient that is NaN",
    "a weight that is NaN on every rank",
)
RANKS = 3  # of the largest case


def inputs(size, n=12, B=5):
    runs = len(RUNS)
    weights = random(runs, n, seed=1, scale=0.5).expand(size, runs, n).clone()
    batch = torch.randint(50, (size, runs, B), generator=torch.Generator().manual_seed(2))
    own = random(size, runs, n, seed=3, scale=0.8, offset=0.1)
    batch[-1, 5] = batch[-2, 5]
    own[-1, 5] = own[-2, 5]
    own[1, 8, 2] = torch.nan
    averaged = own.mean(0).expand(size, runs, n).clone()
    weights[1, 1, 4] = torch.nextafter(weights[1, 1, 4], torch.tensor(9.0))
    averaged[:, 2] *= size
    averaged[:, 3] = (own[:, 3].sum(0) - own[1, 3]) / (size - 1)
    averaged[:, 4] = own[:, 4]
    averaged[0, 6] = own[0, 6]
    averaged[:, 7] *= 1 + 1e-6
    weights[:, 9, 3] = torch.nan
    return {"weights": weights, "batch": batch, "own": own, "averaged": averaged}


def result(rank):
    return f"found on rank {rank}"


def define(weights, batch, own, averaged):
    sound = torch.tensor([label.startswith("sound") for label in RUNS], dtype=weights.dtype)
    return {result(rank): sound.clone() for rank in range(len(weights))}


def describe_calls(module, source):
    records = ranks.recorded[-1]
    calls = len(records[0].calls) // len(RUNS)
    sent = records[0].sent_bytes(len(records)) / len(RUNS)
    return f"{len(RUNS)} runs, each with {calls} calls and {sent:.0f} bytes that a rank sends"


TASK = Task(
    cases={"two ranks": {"size": 2}, "three ranks": {"size": RANKS}},
    inputs=inputs,
    define=define,
    names={result(rank): "run" for rank in range(RANKS)},
    labels={result(rank): RUNS for rank in range(RANKS)},
    storage=lambda results, inputs: {"found": torch.stack(list(results.values()))},
    views=lambda outputs, inputs: {result(rank): row for rank, row in enumerate(outputs["found"])},
    dtypes=(torch.float32,),
    kernel=False,
    launch=ranks.on_each_rank("weights", "batch", "own", "averaged"),
    then=describe_calls,
    mistakes={
        "own averages only": Mistake(
            "    averaged = of_all_ranks(averaged)\n",
            "",
            "found on rank 1",
            says="averaging skipped on rank 0 alone gives True, but should give False",
        ),
        "weights not compared": Mistake(
            "same_weights and ", "", "found on rank 0", says="in its last bit gives True, but should give False"
        ),
        "weights nearly the same": Mistake(
            "(weights == weights[0]).all()",
            "torch.allclose(weights, weights[0].expand_as(weights))",
            "found on rank 0",
            says="in its last bit gives True",
        ),
        "weights whose bits are alike": Mistake(
            "(weights == weights[0]).all()",
            "(weights.view(torch.int32) == weights[0].view(torch.int32)).all()",
            "found on rank 0",
            says="a weight that is NaN on every rank gives True",
        ),
        "batches not compared": Mistake(
            " and other_batches)", ")", "found on rank 0", says="one batch on the last two ranks gives True"
        ),
        "batches compared with rank 0's": Mistake(
            "for i, a in enumerate(batch) for b in batch[:i])",
            "for a in batch[1:] for b in batch[:1])",
            "found on rank 0",
            says="one batch on the last two ranks gives True",
        ),
        "sum": Mistake(
            "mean = own.double().mean(0)",
            "mean = own.double().sum(0)",
            "found on rank 0",
            says="sound training gives False, but should give True; the sum in place of the mean gives True",
        ),
        "mean in every bit": Mistake(
            "((averaged - mean).abs() <= 1e-5 * mean.abs().max()).all()",
            "(averaged == own.mean(0)).all()",
            "found on rank 0",
            says="sound training, rounded otherwise gives False",
        ),
        "NaN slips through": Mistake(
            "((averaged - mean).abs() <= 1e-5 * mean.abs().max()).all()",
            "not ((averaged - mean).abs() > 1e-5 * mean.abs().max()).any()",
            "found on rank 0",
            says="a gradient that is NaN gives True",
        ),
        "averages that are alike": Mistake(
            "((averaged - mean).abs() <= 1e-5 * mean.abs().max()).all()",
            "(averaged == averaged[0]).all()",
            "found on rank 0",
            says="the sum in place of the mean gives True, but should give False; a mean without rank 1's",
        ),
        "mean of the averages": Mistake(
            "mean = own.double().mean(0)",
            "mean = averaged.double().mean(0)",
            "found on rank 0",
            says="the sum in place of the mean gives True",
        ),
        "rank 0 alone asks": Mistake(
            "    weights = of_all_ranks(weights)\n",
            "    if dist.get_rank() > 0:\n        return True\n    weights = of_all_ranks(weights)\n",
            None,
            "deadlock",
            says="rank 1 has ended after 0 calls",
        ),
        "a rank that knows stops asking": Mistake(
            "    batch = of_all_ranks(batch)\n",
            "    if not torch.equal(weights[dist.get_rank()], weights[0]):\n        return False\n"
            "    batch = of_all_ranks(batch)\n",
            None,
            "mismatch",
            says="all ranks must make the same calls in the same order",
        ),
    },
)
