"""Exercise 28: what run() must compute, and typical mistakes."""

import torch

import ranks
from grading import Mistake, Task, Wrong, random


def inputs(size, steps, n):
    return {
        "grads": random(size, steps, n, seed=1, scale=0.8, offset=0.3),
        "start": random(n, seed=2, scale=0.5).expand(size, n).clone(),
    }


def adamw(start, grads, forgets=False):
    """Return weights and moments after AdamW has seen these gradients; forgets: its moments begin anew in each step."""
    weights = start.clone()
    m = torch.zeros_like(start)
    v = torch.zeros_like(start)
    for step, grad in enumerate(grads, 1):
        if forgets:
            m = torch.zeros_like(start)
            v = torch.zeros_like(start)
        m = 0.9 * m + 0.1 * grad
        v = 0.999 * v + 0.001 * grad**2
        weights = weights * 0.99 - 0.1 * (m / (1 - 0.9**step)) / ((v / (1 - 0.999**step)).sqrt() + 1e-8)
    return weights, m, v


def define(grads, start, summed=False, alone=False, not_gathered=False, forgets=False):
    """Compute it, or what an error gives. Rank r owns part r."""
    size, steps, n = grads.shape
    parts = [slice(rank * n // size, (rank + 1) * n // size) for rank in range(size)]
    each = []  # rank -> weights and moments that it would have of all elements
    for rank in range(size):
        seen = grads[rank] if alone else grads.sum(0) / (1 if summed else size)
        each.append(adamw(start[rank], seen, forgets))
    gathered = torch.cat([weights[part] for (weights, _, _), part in zip(each, parts, strict=True)])
    finals = [gathered.clone() for _ in each]
    if not_gathered:
        finals = [first.clone() for first in start]
        for final, (weights, _, _), part in zip(finals, each, parts, strict=True):
            final[part] = weights[part]
    ms = [m[part] for (_, m, _), part in zip(each, parts, strict=True)]
    vs = [v[part] for (_, _, v), part in zip(each, parts, strict=True)]
    return {"m": torch.stack(ms), "v": torch.stack(vs), "final": torch.stack(finals)}


def train_the_neighbours(grads, start):
    """Return the weights if rank r trains part r - 1 on the gradient of part r, in the first step."""
    size = len(grads)
    means = grads[:, 0].mean(0).chunk(size)
    parts = start[0].chunk(size)
    final = torch.cat([adamw(parts[rank - 1], means[rank : rank + 1])[0] for rank in range(size)])
    return {"final": final.expand_as(start)}


def suspect(*names, **error):
    """Return a suspect that computes these results, or all."""

    def compute(**given):
        results = define(**given, **error)
        return {name: results[name] for name in names or results}

    return compute


def check_share(module, source):
    """Raise Wrong if a rank keeps or sends more than its share; return words on both."""
    records = ranks.recorded[-1]
    sizes = TASK.cases["four ranks"]
    size = len(records)
    whole = 4 * sizes["n"]
    share = 2 * whole // size
    least = 2 * (size - 1) / size
    for rank, record in enumerate(records):
        kept = record.results["state_bytes"]
        if kept > share:
            said = f"right, but rank {rank} keeps {kept:,} bytes beside the weights, and the moments of its part take"
            raise Wrong("state", None, f"{said} {share:,}: keep no more than those, and let self.part be a view")
        times = record.sent_bytes(size) / whole / sizes["steps"]
        if times > least + 1e-9:
            kinds = ", ".join(call.name for call in record.calls[: len(record.calls) // sizes["steps"]])
            said = f"right, but each step sends {times:.3g} times the weights ({kinds}), and an all-reduce of them"
            raise Wrong("bytes", None, f"{said} {least:.3g} times: a rank needs the sum of its own part only")
    return (
        f"each of {size} ranks keeps {share:,} bytes of moments instead of {2 * whole:,}, and sends {times:.3g} times "
        "the weights, as an all-reduce would"
    )


TASK = Task(
    cases={
        "two ranks": {"size": 2, "steps": 1, "n": 6},
        "three steps": {"size": 2, "steps": 3, "n": 8},
        "three ranks": {"size": 3, "steps": 2, "n": 12},
        "four ranks": {"size": 4, "steps": 3, "n": 4000},
    },
    inputs=inputs,
    define=define,
    names={"m": "rank number", "v": "rank number", "final": "rank number"},
    owner=lambda module, name, index, inputs: (
        f"part {index[1] * len(inputs['grads']) // inputs['start'].shape[1]}" if name == "final" else ()
    ),
    dtypes=(torch.float32,),
    kernel=False,
    tolerance=1e-5,
    launch=ranks.on_each_rank("grads", "start"),
    then=check_share,
    suspects={
        "the moments are those of the sum: divide by the number of ranks. The weights don't show it, because Adam "
        "divides by the gradient's size": suspect("m", "v", summed=True),
        "every rank has new weights in its own part only: gather the others'": suspect(not_gathered=True),
        "every rank trains on its own gradient: sum over the ranks first": suspect(alone=True),
        "the moments begin anew in every step: make them once, in __init__": suspect(forgets=True),
        "rank r trains part r - 1, but reduce_scatter_tensor gives it the sum of part r": train_the_neighbours,
    },
    mistakes={
        "moments of all weights": Mistake(
            "        self.m = torch.zeros_like(self.part)\n        self.v = torch.zeros_like(self.part)\n",
            "        self.m = torch.zeros_like(weights).view(size, -1)\n"
            "        self.v = torch.zeros_like(weights).view(size, -1)\n"
            "        self.m, self.v = self.m[0], self.v[0]\n",
            None,
            "state",
            says="keeps 32,000 bytes beside the weights, and the moments of its part take 8,000",
        ),
        "a copy of the part": Mistake(
            "weights.chunk(size)[rank]",
            "weights.chunk(size)[rank].clone()",
            None,
            "state",
            says="let self.part be a view",
        ),
        "all-reduce": Mistake(
            "        mine = torch.empty_like(self.part)\n        dist.reduce_scatter_tensor(mine, grad)\n",
            "        dist.all_reduce(grad)\n        mine = grad.chunk(dist.get_world_size())[dist.get_rank()]\n",
            None,
            "bytes",
            says="each step sends 2.25 times the weights (all_reduce, all_gather_into_tensor)",
        ),
        "every rank trains all weights": Mistake(
            "        mine = torch.empty_like(self.part)\n"
            "        dist.reduce_scatter_tensor(mine, grad)\n"
            "        adamw(self.part, mine / dist.get_world_size(), self.m, self.v, self.steps)\n"
            "        dist.all_gather_into_tensor(self.weights, self.part)\n",
            "        dist.all_reduce(grad)\n"
            "        if self.steps == 1:\n"
            "            self.all_m, self.all_v = torch.zeros_like(grad), torch.zeros_like(grad)\n"
            "        grad /= dist.get_world_size()\n"
            "        adamw(self.weights, grad, self.all_m, self.all_v, self.steps)\n"
            "        self.m.copy_(self.all_m.chunk(dist.get_world_size())[dist.get_rank()])\n"
            "        self.v.copy_(self.all_v.chunk(dist.get_world_size())[dist.get_rank()])\n",
            None,
            "state",
            says="keeps 40,000 bytes beside the weights",
        ),
        "sum": Mistake("mine / dist.get_world_size()", "mine", "m", says="Adam divides by the gradient's size"),
        "divided twice": Mistake(
            "mine / dist.get_world_size()",
            "mine / dist.get_world_size() ** 2",
            "m",
            says="1/2 times its correct value, and there are 2 ranks: is it divided once too often?",
        ),
        "not gathered": Mistake(
            "        dist.all_gather_into_tensor(self.weights, self.part)\n", "", "final", says="gather the others'"
        ),
        "own gradient": Mistake(
            "        dist.reduce_scatter_tensor(mine, grad)\n        adamw(self.part, mine / dist.get_world_size(),",
            "        mine = grad.chunk(dist.get_world_size())[dist.get_rank()]\n        adamw(self.part, mine,",
            "m",
            says="sum over the ranks first",
        ),
        "the neighbour's part": Mistake(
            "chunk(size)[rank]", "chunk(size)[rank - 1]", "final", says="rank r trains part r - 1"
        ),
        "moments made in each step": Mistake(
            "        self.steps += 1\n",
            "        self.steps += 1\n        self.m = torch.zeros_like(self.part)\n"
            "        self.v = torch.zeros_like(self.part)\n",
            "m",
            says="make them once, in __init__",
        ),
        "the first rank's moments": Mistake(
            "        adamw(self.part,",
            "        dist.broadcast(self.m, 0)\n        adamw(self.part,",
            "m",
        ),
        "not waited for": Mistake(
            "mine, grad)",
            "mine, grad, async_op=True)",
            None,
            "unfinished",
            says="never waits for its reduce_scatter_tensor",
        ),
        "gathered too early": Mistake(
            "        adamw(self.part, mine / dist.get_world_size(), self.m, self.v, self.steps)\n"
            "        dist.all_gather_into_tensor(self.weights, self.part)\n",
            "        dist.all_gather_into_tensor(self.weights, self.part)\n"
            "        adamw(self.part, mine / dist.get_world_size(), self.m, self.v, self.steps)\n",
            "final",
            says="gather the others'",
        ),
        "gradient of a part": Mistake(
            "(mine, grad)",
            "(mine, grad[: len(mine)])",
            None,
            "tensor",
            says="2 parts one after another must make the whole",
        ),
    },
)
