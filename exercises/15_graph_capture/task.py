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


def warmed(x, target, weight, lrs, keep):
    """Run the steps after one warm-up step of which the weight, the momentum or both were kept."""
    w, momentum, losses = weight.clone(), torch.zeros_like(weight), []
    for i in (0, *range(len(x))):
        error = x[i] @ w - target[i]
        losses.append(error.square().mean())
        momentum = 0.9 * momentum + 2 / error.numel() * x[i].T @ error
        w = w - lrs[i] * momentum
        if len(losses) == 1:
            w = w if "w" in keep else weight.clone()
            momentum = momentum if "m" in keep else torch.zeros_like(weight)
    return {"losses": torch.stack(losses[1:]), "final": w}


def early(x, target, weight, lrs):
    """Return losses that are read before their replay: nothing has computed the first, which may have any value."""
    losses = define(x, target, weight, lrs)["losses"].roll(1)
    losses[0] = torch.nan
    return {"losses": losses}


def last_loss(x, target, weight, lrs):
    losses = define(x, target, weight, lrs)["losses"]
    return {"losses": losses[-1:].expand_as(losses)}


def nothing_new(x, target, weight, lrs, frozen_lr=False):
    lrs = lrs[:1].expand_as(lrs) if frozen_lr else lrs
    return define(x[:1].expand_as(x), target[:1].expand_as(target), weight, lrs)


def left_behind(keep):
    """Return a suspect: the graph trains the w that it captured, and another one becomes final."""
    return lambda weight, **rest: warmed(**rest, weight=weight, keep=keep) | {"final": weight}


def same_batch(x, target, weight, lrs):
    return define(x[:1].expand_as(x), target, weight, lrs)


def same_target(x, target, weight, lrs):
    return define(x, target[:1].expand_as(target), weight, lrs)


def frozen(x, target, weight, lrs):
    return define(x, target, weight, lrs[:1].expand_as(lrs))


TASK = Task(
    suspects={
        "the loss is read before the replay, so it is the last step's": early,
        "every loss is the last step's: replays overwrite the loss tensor, so read it after each": last_loss,
        "every step reads the first batch and the first target: copy each one into the graph's tensor": nothing_new,
        "every step reads the first batch, target and rate: copy each one into the graph's tensor": lambda **i: (
            nothing_new(**i, frozen_lr=True)
        ),
        "the graph trains the w that it captured, but w is a new tensor now: undo the warm-up in place, "
        "w.copy_(weight)": left_behind("w"),
        "the graph trains the w and momentum that it captured, and both are new tensors now: undo the warm-up "
        "in place, w.copy_(weight) and momentum.zero_()": left_behind("wm"),
        "every step reads the first batch: copy into the graph's tensor; a new one has another address": same_batch,
        "every step reads the first target: copy each one into the graph's tensor": same_target,
        "the warm-up is not undone: the weight starts one step too far": lambda **i: warmed(**i, keep="w"),
        "the warm-up is not undone: the momentum does not start at zero": lambda **i: warmed(**i, keep="m"),
        "the warm-up is not undone: weight and momentum start one step too far": lambda **i: warmed(**i, keep="wm"),
        "the learning rate is frozen at lrs[0]: copy each rate into the graph's tensor": frozen,
    },
    cases={
        "two batches": {"steps": 2, "B": 4, "C": 3, "N": 2},
        "one step": {"steps": 1, "B": 4, "C": 3, "N": 2},
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
        "weight left as the warm-up changed it": Mistake(
            "        w.copy_(weight)\n", "", "losses", says="weight starts"
        ),
        "momentum left as the warm-up changed it": Mistake(
            "        momentum.zero_()\n", "", "losses", says="momentum does not"
        ),
        "nothing undone": Mistake(
            "        w.copy_(weight)\n        momentum.zero_()\n",
            "        pass\n",
            "losses",
            says="weight and momentum",
        ),
        "another tensor instead of its contents": Mistake(
            "batch.copy_(x[i])", "batch = x[i]", "losses", says="first batch"
        ),
        "batch and target by name": Mistake(
            "batch.copy_(x[i])\n        batch_target.copy_(target[i])",
            "batch, batch_target = x[i], target[i]",
            "losses",
            says="the first batch and the first target",
        ),
        "batch, target and rate by name": Mistake(
            "batch.copy_(x[i])\n        batch_target.copy_(target[i])\n        lr.copy_(lrs[i])",
            "batch, batch_target, lr = x[i], target[i], lrs[i]",
            "losses",
            says="the first batch, target and rate",
        ),
        "batch.data": Mistake(
            "batch.copy_(x[i])", "batch.data = x[i]", None, "crash", says="a tensor of the graph has moved"
        ),
        "batch.set_": Mistake(
            "batch.copy_(x[i])", "batch.set_(x[i])", None, "crash", says="a tensor of the graph has moved"
        ),
        "w.data": Mistake(
            "w.copy_(weight)", "w.data = weight.clone()", None, "crash", says="a tensor of the graph has moved"
        ),
        "momentum.data": Mistake(
            "momentum.zero_()",
            "momentum.data = torch.zeros_like(weight)",
            None,
            "crash",
            says="a tensor of the graph has moved",
        ),
        "a new w": Mistake(
            "w.copy_(weight)", "w = weight.clone().requires_grad_()", "losses", says="w is a new tensor now"
        ),
        "a new w and momentum": Mistake(
            "w.copy_(weight)\n        momentum.zero_()",
            "w, momentum = weight.clone().requires_grad_(), torch.zeros_like(weight)",
            "losses",
            says="both are new tensors now",
        ),
        "losses read after the loop": Mistake(
            "        losses[i] = loss\n",
            "        kept = [loss] if i == 0 else [*kept, loss]\n    losses.copy_(torch.stack(kept))\n",
            "losses",
            says="every loss is the last step's",
        ),
        "target of the first batch": Mistake(
            "        batch_target.copy_(target[i])\n", "", "losses", says="first target"
        ),
        "learning rate as a number": Mistake(
            "loss = training_step(w, momentum, batch, batch_target, lr)",
            "loss = training_step(w, momentum, batch, batch_target, 0.2)",
            "final",
            says="frozen",
        ),
        "weight without a gradient": Mistake(
            "    batch, batch_target, lr =",
            "    w = weight.clone()\n    batch, batch_target, lr =",
            None,
            "crash",
            says="w needs requires_grad_(): train a clone",
        ),
        "trained on the given weight": Mistake(".clone().requires_grad_()", ".requires_grad_()", "weight", "changed"),
        "loss read before the replay": Mistake(
            "        graph.replay()\n        losses[i] = loss\n",
            "        losses[i] = loss\n        graph.replay()\n",
            "losses",
            says="before the replay",
        ),
        "eager": Mistake(
            "        graph.replay()\n        losses[i] = loss\n",
            "        losses[i] = training_step(w, momentum, batch, batch_target, lr)\n",
            None,
            "no graph",
        ),
    },
)
