"""Exercise 27: what run() must compute, and typical mistakes."""

import torch

import ranks
from grading import Mistake, Task, Wrong, random

# With two ranks the rank before the last is the first one.
RUNS = (
    "sound training",
    "sound training, rounded otherwise",
    "sound training, an average that is nearly 0",
    "sound training, a token that all batches share",
    "sound training, two batches of the same tokens in another order",
    "a weight that differs on the first rank in its last bit",
    "a weight that differs on the rank before the last in its last bit",
    "a weight that differs on the last rank in its last bit",
    "averaging skipped on the first rank alone",
    "averaging skipped on the rank before the last alone",
    "averaging skipped on the last rank alone",
    "one batch on the first two ranks",
    "one batch on the last two ranks",
    "one batch on the first and the last rank",
    "the sum in place of the mean",
    "the sum of gradients of 1e-9",
    "an average that is wrong by 1e-4 of the mean's largest element",
    "a mean without rank 1's gradient",
    "a gradient of its own on every rank",
    "a gradient that is NaN",
    "a weight that is NaN on every rank",
    "a weight that is NaN on the first rank alone",
    "an average that is NaN on the last rank alone",
    "an average that is too small by 1e-4 of the mean's largest element",
)
RANKS = 3  # of the largest case


def inputs(size, n=12, B=5):
    runs = len(RUNS)
    at = {label: i for i, label in enumerate(RUNS)}
    weights = random(runs, n, seed=1, scale=0.5).expand(size, runs, n).clone()
    batch = torch.randint(50, (size, runs, B), generator=torch.Generator().manual_seed(2))
    own = random(size, runs, n, seed=3, scale=0.8, offset=0.1)
    places = {"the first rank": 0, "the rank before the last": -2, "the last rank": -1}

    # batches, and the gradients of equal ones
    batch[:, at["sound training, a token that all batches share"], 1] = 7
    permuted = at["sound training, two batches of the same tokens in another order"]
    batch[-1, permuted] = batch[0, permuted].roll(1)
    for pair, first, second in (
        ("first two ranks", 0, 1),
        ("last two ranks", -2, -1),
        ("first and the last rank", 0, -1),
    ):
        one = at[f"one batch on the {pair}"]
        batch[second, one] = batch[first, one]
        own[second, one] = own[first, one]

    # gradients, and their averages
    own[1, at["a gradient that is NaN"], 2] = torch.nan
    own[:, at["the sum of gradients of 1e-9"]] *= 1e-9
    small = at["sound training, an average that is nearly 0"]
    own[0, small, 2] = -own[1:, small, 2].sum()
    averaged = own.mean(0).expand(size, runs, n).clone()
    largest = averaged.abs().amax(2)
    averaged[:, small, 2] += 1e-6 * largest[:, small]
    averaged[:, at["sound training, rounded otherwise"]] *= 1 + 1e-6
    averaged[:, at["the sum in place of the mean"]] *= size
    averaged[:, at["the sum of gradients of 1e-9"]] *= size
    wrong = at["an average that is wrong by 1e-4 of the mean's largest element"]
    averaged[:, wrong, 5] += 1e-4 * largest[:, wrong]
    small = at["an average that is too small by 1e-4 of the mean's largest element"]
    averaged[:, small, 5] -= 1e-4 * largest[:, small]
    averaged[-1, at["an average that is NaN on the last rank alone"], 1] = torch.nan
    without = at["a mean without rank 1's gradient"]
    averaged[:, without] = (own[:, without].sum(0) - own[1, without]) / (size - 1)
    averaged[:, at["a gradient of its own on every rank"]] = own[:, at["a gradient of its own on every rank"]]
    for name, rank in places.items():
        skipped = at[f"averaging skipped on {name} alone"]
        averaged[rank, skipped] = own[rank, skipped]

    # weights
    for name, rank in places.items():
        weight = weights[rank, at[f"a weight that differs on {name} in its last bit"]]
        weight[4] = torch.nextafter(weight[4], torch.tensor(9.0))
    weights[:, at["a weight that is NaN on every rank"], 3] = torch.nan
    weights[0, at["a weight that is NaN on the first rank alone"], 3] = torch.nan
    return {"weights": weights, "batch": batch, "own": own, "averaged": averaged}


def result(rank):
    return f"found on rank {rank}"


def define(weights, batch, own, averaged):
    sound = torch.tensor([label.startswith("sound") for label in RUNS], dtype=weights.dtype)
    return {result(rank): sound.clone() for rank in range(len(weights))}


def explain(name, result, inputs):
    if any(found for found, label in zip(result.tolist(), RUNS, strict=True) if label.startswith("sound")):
        return None
    return "no run is sound to you, so one of your three conditions never holds: print them in the first run"


def describe_calls(module, source):
    records = ranks.recorded[-1]
    calls = len(records[0].calls) // len(RUNS)
    sent = records[0].sent_bytes(len(records)) / len(RUNS)
    return f"{len(RUNS)} runs, each with {calls} calls and {sent:.0f} bytes that a rank sends"


on_ranks = ranks.on_each_rank(
    "weights",
    "batch",
    "own",
    "averaged",
    meanings={
        "all ranks must make the same calls": "gather everything before a rank returns",
        "no rank can go on": "gather everything on every rank before one of them returns",
        "not NoneType": "is_sound must return True or False in every case",
        "AssertionError": "return False where something is wrong",
    },
)


def launch(module, inputs, outputs):
    """Run it on the ranks; raise Wrong if they judge a run differently."""
    on_ranks(module, inputs, outputs)
    found = outputs["found"]
    for run, label in enumerate(RUNS):
        answers = found[:, run].tolist()
        if len(set(answers)) > 1:
            said = " and ".join(f"rank {rank} {bool(answer)}" for rank, answer in enumerate(answers))
            first = f"{label}: the ranks give different answers, {said}"
            raise Wrong("value", "found", f"{first}: each must judge what all have gathered")


launch.split = on_ranks.split
TASK = Task(
    cases={"three ranks": {"size": RANKS}, "two ranks": {"size": 2}},  # with two, some faults are the same
    inputs=inputs,
    define=define,
    names={result(rank): "run" for rank in range(RANKS)},
    labels={result(rank): RUNS for rank in range(RANKS)},
    storage=lambda results, inputs: {"found": torch.stack(list(results.values()))},
    views=lambda outputs, inputs: {result(rank): row for rank, row in enumerate(outputs["found"])},
    dtypes=(torch.float32,),
    kernel=False,
    launch=launch,
    then=describe_calls,
    explain=explain,
    mistakes={
        "own averages only": Mistake(
            "    averaged = of_all_ranks(averaged)\n",
            "",
            "found",
            says="averaging skipped on the first rank alone: the ranks give different answers, rank 0 False and rank 1 "
            "True and rank 2 True: each must judge what all have gathered",
        ),
        "averages of the first rank only": Mistake(
            "(averaged - mean)",
            "(averaged[0] - mean)",
            "found on rank 0",
            says="averaging skipped on the rank before the last alone gives True",
        ),
        "averages of the last rank only": Mistake(
            "(averaged - mean)",
            "(averaged[-1] - mean)",
            "found on rank 0",
            says="averaging skipped on the first rank alone gives True",
        ),
        "weights of two ranks only": Mistake(
            "(weights == weights[0])",
            "(weights[:2] == weights[0])",
            "found on rank 0",
            says="a weight that differs on the last rank in its last bit gives True",
        ),
        "neighbouring batches only": Mistake(
            "for b in batch[:i])",
            "for b in batch[max(i - 1, 0) : i])",
            "found on rank 0",
            says="one batch on the first and the last rank gives True",
        ),
        "batches compared with the last one's": Mistake(
            "for i, a in enumerate(batch) for b in batch[:i])",
            "for a in batch[:-1] for b in batch[-1:])",
            "found on rank 0",
            says="one batch on the first two ranks gives True",
        ),
        "sums of batches": Mistake(
            "not torch.equal(a, b)",
            "a.sum() != b.sum()",
            "found on rank 0",
            says="two batches of the same tokens in another order gives False",
        ),
        "any equal token": Mistake(
            "not torch.equal(a, b)",
            "not (a == b).any()",
            "found on rank 0",
            says="a token that all batches share gives False",
        ),
        "a tolerance of a hundredth": Mistake(
            "1e-5 * mean",
            "1e-2 * mean",
            "found on rank 0",
            says="an average that is wrong by 1e-4 of the mean's largest element gives True",
        ),
        "an absolute tolerance": Mistake(
            "1e-5 * mean.abs().max()",
            "1e-5",
            "found on rank 0",
            says="the sum of gradients of 1e-9 gives True",
        ),
        "allclose": Mistake(
            "((averaged - mean).abs() <= 1e-5 * mean.abs().max()).all()",
            "torch.allclose(averaged.double(), mean.expand_as(averaged))",
            "found on rank 0",
            says="an average that is nearly 0 gives False",
        ),
        "a tolerance per element": Mistake(
            "1e-5 * mean.abs().max()",
            "1e-5 * mean.abs()",
            "found on rank 0",
            says="an average that is nearly 0 gives False",
        ),
        "the first rank judges": Mistake(
            "    return bool(same",
            "    if dist.get_rank() > 0:\n        return True\n    return bool(same",
            "found",
            says="rank 0 False and rank 1 True and rank 2 True: each must judge what all have gathered",
        ),
        "no answer": Mistake(
            "    return bool(same_weights and right_mean and other_batches)\n",
            "",
            None,
            "crash",
            says="is_sound must return True or False in every case",
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
            says="sound training gives False, but should give True; sound training, rounded otherwise gives False",
        ),
        "a mean without the last rank": Mistake(
            "own.double().mean(0)",
            "own[:-1].double().mean(0)",
            "found on rank 0",
            says="no run is sound to you, so one of your three conditions never holds: print them in the first run",
        ),
        "a batch compared with itself": Mistake(
            "for i, a in enumerate(batch) for b in batch[:i])",
            "for a in batch for b in batch)",
            "found on rank 0",
            says="no run is sound to you, so one of your three conditions never holds",
        ),
        "averages that are too large": Mistake(
            "(averaged - mean).abs() <= 1e-5",
            "(averaged - mean) <= 1e-5",
            "found on rank 0",
            says="an average that is too small by 1e-4 of the mean's largest element gives True",
        ),
        "averages that are too small": Mistake(
            "(averaged - mean).abs() <= 1e-5",
            "(mean - averaged) <= 1e-5",
            "found on rank 0",
            says="an average that is wrong by 1e-4 of the mean's largest element gives True",
        ),
        "NaN ends a rank's questions": Mistake(
            "    weights = of_all_ranks(weights)\n",
            "    if averaged.isnan().any():\n        return False\n    weights = of_all_ranks(weights)\n",
            None,
            "deadlock",
            says="gather everything on every rank before one of them returns",
        ),
        "a weight of NaN ends a rank's questions": Mistake(
            "    weights = of_all_ranks(weights)\n",
            "    if weights.isnan().any():\n        return False\n    weights = of_all_ranks(weights)\n",
            None,
            "deadlock",
            says="gather everything on every rank before one of them returns",
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
            says="the sum in place of the mean gives True, but should give False",
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
            says="missing on rank 2: gather everything on every rank before one of them",
        ),
        "a rank that knows stops asking": Mistake(
            "    batch = of_all_ranks(batch)\n",
            "    if not torch.equal(weights[dist.get_rank()], weights[0]):\n        return False\n"
            "    batch = of_all_ranks(batch)\n",
            None,
            "mismatch",
            says="all ranks must make the same calls in the same order: gather everything before a rank returns",
        ),
    },
)
