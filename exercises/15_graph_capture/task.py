"""Exercise 15: what run() must compute, and typical mistakes."""

import torch

import graphs
from grading import Mistake, Task, Wrong, random


def inputs(steps, B, C, N):
    return {
        "x": random(steps, B, C, seed=1, scale=1.1, offset=0.3),
        "target": random(steps, B, N, seed=2),
        "weight": random(C, N, seed=3, scale=0.4),
        "lrs": 0.2 * 0.7 ** torch.arange(steps),
    }


def define(x, target, weight, lrs):
    """Run the same steps eagerly."""
    w, momentum, losses = weight.clone(), torch.zeros_like(weight), []
    for batch, batch_target, lr in zip(x, target, lrs, strict=True):
        error = batch @ w - batch_target
        losses.append(error.square().mean())
        momentum = 0.9 * momentum + 2 / error.numel() * batch.T @ error
        w = w - lr * momentum
    return {"losses": torch.stack(losses), "final": w}


def check_replayed(module, source):
    """Raise Wrong unless every step of the last case was a replay."""
    steps, replays = list(TASK.cases.values())[-1]["steps"], graphs.made[-1].replays
    if replays != steps:
        raise Wrong(
            "no graph", None, f"the results are right, but in {steps} steps the graph was replayed {replays} times"
        )


TASK = Task(
    cases={
        "one step": {"steps": 1, "B": 4, "C": 3, "N": 2},
        "two batches": {"steps": 2, "B": 4, "C": 3, "N": 2},
        "many batches": {"steps": 7, "B": 8, "C": 5, "N": 3},
    },
    inputs=inputs,
    define=define,
    names={"losses": "step", "final": "row column"},
    wide=("x", "target", "weight", "lrs"),
    dtypes=(torch.float32,),
    kernel=False,
    then=check_replayed,
    mistakes={
        "no warm-up": Mistake(
            "    with graph.warm_up():\n        training_step(w, momentum, batch, batch_target, lr)\n",
            "",
            None,
            "crash",
        ),
        "loss read inside the capture": Mistake(
            "        loss = training_step(w, momentum, batch, batch_target, lr)\n",
            "        loss = torch.tensor(training_step(w, momentum, batch, batch_target, lr).item())\n",
            None,
            "crash",
        ),
        "weight left as the warm-up changed it": Mistake("        w.copy_(weight)\n", "", "losses"),
        "momentum left as the warm-up changed it": Mistake("        momentum.zero_()\n", "", "final"),
        "another tensor instead of its contents": Mistake("batch.copy_(x[i])", "batch = x[i]", "losses"),
        "target of the first batch": Mistake("        batch_target.copy_(target[i])\n", "", "losses"),
        "learning rate as a number": Mistake(
            "loss = training_step(w, momentum, batch, batch_target, lr)",
            "loss = training_step(w, momentum, batch, batch_target, 0.2)",
            "final",
        ),
        "trained on the given weight": Mistake(".clone().requires_grad_()", ".requires_grad_()", "weight", "changed"),
        "loss read before the replay": Mistake(
            "        graph.replay()\n        losses[i] = loss\n",
            "        losses[i] = loss\n        graph.replay()\n",
            "losses",
        ),
        "eager": Mistake(
            "        graph.replay()\n        losses[i] = loss\n",
            "        losses[i] = training_step(w, momentum, batch, batch_target, lr)\n",
            None,
            "no graph",
        ),
    },
)
