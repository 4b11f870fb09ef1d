"""Exercise 28: what run() must compute, and typical mistakes."""

import torch

import ranks
from grading import Mistake, Task, Wrong, random


def inputs(size, steps, n):
    return {
        "grads": random(size, steps, n, seed=1, scale=0.8, offset=0.3),
        "start": random(n, seed=2, scale=0.5).expand(size, n).clone(),
    }


def adamw(start, grads, forgets=False, first=0.0, one_tensor=False, count=lambda step: step):
    """Return weights and moments after AdamW has seen these gradients, with an error.

    forgets: the moments begin anew in each step. first: what they begin with. one_tensor: m and v are one tensor.
    count: what AdamW gets for the number of a step.
    """
    weights = start.clone()
    m = torch.full_like(start, first)
    v = torch.full_like(start, first)
    for step, grad in enumerate(grads, 1):
        if forgets:
            m = torch.zeros_like(start)
            v = torch.zeros_like(start)
        m = 0.9 * m + 0.1 * grad
        v = 0.999 * (m if one_tensor else v) + 0.001 * grad**2
        if one_tensor:
            m = v
        counted = count(step)
        weights = weights * 0.99 - 0.1 * (m / (1 - 0.9**counted)) / ((v / (1 - 0.999**counted)).sqrt() + 1e-8)
    return weights, m, v


def train(grads, start, seen=lambda grads: [grads.mean(0)] * len(grads), **error):
    """Return each rank's (weights, m, v), of all elements. seen(grads): the gradients on which each rank trains."""
    return [adamw(*given, **error) for given in zip(start, seen(grads), strict=True)]


def parts_of(size, n):
    return [slice(rank * n // size, (rank + 1) * n // size) for rank in range(size)]


def define(grads, start, **error):
    """Compute it, or what an error of train() gives. Rank r owns part r."""
    each = train(grads, start, **error)
    parts = parts_of(*start.shape)
    gathered = torch.cat([weights[part] for (weights, _, _), part in zip(each, parts, strict=True)])
    return {
        "part": torch.stack([first[part] for first, part in zip(start, parts, strict=True)]),
        "m": torch.stack([m[part] for (_, m, _), part in zip(each, parts, strict=True)]),
        "v": torch.stack([v[part] for (_, _, v), part in zip(each, parts, strict=True)]),
        "final": gathered.expand_as(start).clone(),
    }


def suspect(*names, **error):
    """Return a suspect that computes these results, or all but the part, which no step changes."""

    def compute(**given):
        results = define(**given, **error)
        return {name: results[name] for name in names or ("m", "v", "final")}

    return compute


def only_moments(change):
    """Return a suspect whose moments are change(m, v), and whose weights may be anything."""

    def compute(**given):
        results = define(**given)
        m, v = change(results["m"], results["v"])
        return {"m": m, "v": v, "final": torch.full_like(results["final"], torch.nan)}

    return compute


def not_gathered(grads, start):
    """Return the weights if every rank has new ones in its own part only."""
    finals = start.clone()
    for final, (weights, _, _), part in zip(finals, train(grads, start), parts_of(*start.shape), strict=True):
        final[part] = weights[part]
    return {"final": finals}


def written_over(summed, gathered):
    """Return a suspect whose weights are gradients, their sums or means over the ranks, after a step or gathered."""

    def compute(grads, start):
        mean = grads.mean(0)
        final = mean[-1] * (len(grads) if summed else 1)
        if not gathered:
            final = adamw(final, mean)[0]
        return {"final": final.expand_as(start)}

    return compute


def describe_part(part, start):
    """Return which weights are in a rank's part, if they are others than those of its gradients, or None."""
    size, length = part.shape
    for rank, mine in enumerate(part):
        places = [(start == number).nonzero().flatten().tolist() for number in mine]
        if not all(places):
            return f"self.part of rank {rank} does not begin as a part of the weights: make it a view of them"
        held = [place[0] for place in places]
        given = list(range(rank * length, (rank + 1) * length))
        if held != given:
            said = f"self.part of rank {rank} has the weights number {', '.join(map(str, held))}"
            return f"{said}, but reduce_scatter_tensor gives it the sum of number {', '.join(map(str, given))}"
    return None


def explain(name, result, inputs):
    if name == "part":
        return describe_part(result, inputs["start"][0])
    return ranks.describe_calls()


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
    names={"part": "rank number", "m": "rank number", "v": "rank number", "final": "rank number"},
    owner=lambda module, name, index, inputs: (
        f"part {index[1] * len(inputs['grads']) // inputs['start'].shape[1]}" if name == "final" else ()
    ),
    dtypes=(torch.float32,),
    kernel=False,
    tolerance=1e-5,
    launch=ranks.on_each_rank(
        "grads",
        "start",
        meanings={
            "needs a contiguous tensor": "a rank's part is one piece of the weights, as reduce_scatter_tensor's is of "
            "the gradients",
            "must match the size of tensor": "adamw's weights, grad, m and v are as long as a rank's part",
            "m: it has the shape": "a rank needs the moments of its own part only",
            "part: it has the shape": "a rank trains its own part only",
        },
    ),
    then=check_share,
    explain=explain,
    suspects={
        "the moments are those of the sum: divide by the number of ranks. The weights don't show it, because Adam "
        "divides by the gradient's size": suspect("m", "v", seen=lambda grads: [grads.sum(0)] * len(grads)),
        "every rank trains on its own gradient: sum over the ranks first": suspect(seen=lambda grads: grads),
        "every rank trains on its own gradient, divided by the number of ranks: sum over the ranks first": suspect(
            seen=lambda grads: grads / len(grads)
        ),
        "a step's gradient has those of the steps before in it: begin anew in each step": suspect(
            seen=lambda grads: [grads.mean(0).cumsum(0)] * len(grads)
        ),
        "every rank trains on the gradients of part 0: take those of its own part": only_moments(
            lambda m, v: (m[:1].expand_as(m), v[:1].expand_as(v))
        ),
        "the moments begin anew in every step: make them once, in __init__": suspect(forgets=True),
        "the moments begin with 1: begin with 0": suspect(first=1.0),
        "self.m and self.v are still 0: adamw changes what it gets in place, so give it these": only_moments(
            lambda m, v: (torch.zeros_like(m), torch.zeros_like(v))
        ),
        "m and v are exchanged: adamw takes m first": only_moments(lambda m, v: (v, m)),
        "self.m and self.v are one tensor: make two": suspect(one_tensor=True),
        "adamw gets 0 for the first step, and counts from 1": suspect("final", count=lambda step: step - 1),
        "adamw gets step + 1 in each step: step() has counted self.steps already": suspect(
            "final", count=lambda step: step + 1
        ),
        "adamw gets 1 for every step: give it self.steps": suspect("final", count=lambda step: 1),
        "every rank has new weights in its own part only: gather the others', after AdamW, into self.weights itself": (
            not_gathered
        ),
        "the weights are what they were: adamw changes what it gets in place, so self.part must be a view of "
        "self.weights": lambda grads, start: {"final": start},
        "the sums of the gradients lie in the weights: reduce_scatter_tensor needs memory of its own for them": (
            written_over(summed=True, gathered=False)
        ),
        "the means of the gradients lie in the weights: reduce_scatter_tensor needs memory of its own for them": (
            written_over(summed=False, gathered=False)
        ),
        "the weights are the sums of the gradients: gather self.part": written_over(summed=True, gathered=True),
        "the weights are the means of the gradients: gather self.part": written_over(summed=False, gathered=True),
        "the weights are the means over the ranks, and each rank's are new in its own part only: gather the parts": (
            lambda grads, start: {"final": not_gathered(grads, start)["final"].mean(0).expand_as(start)}
        ),
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
            "        dist.all_gather_into_tensor(self.weights, self.part)\n",
            "",
            "final",
            says="gather the others', after AdamW",
        ),
        "own gradient": Mistake(
            "        dist.reduce_scatter_tensor(mine, grad)\n        adamw(self.part, mine / dist.get_world_size(),",
            "        mine = grad.chunk(dist.get_world_size())[dist.get_rank()]\n        adamw(self.part, mine,",
            "m",
            says="sum over the ranks first",
        ),
        "own gradient, divided": Mistake(
            "        dist.reduce_scatter_tensor(mine, grad)\n",
            "        mine = grad.chunk(dist.get_world_size())[dist.get_rank()]\n",
            "m",
            says="every rank trains on its own gradient, divided by the number of ranks",
        ),
        "the gradients of part 0": Mistake(
            "        dist.reduce_scatter_tensor(mine, grad)\n",
            "        dist.all_reduce(grad)\n        mine = grad.chunk(dist.get_world_size())[0]\n",
            "m",
            says="every rank trains on the gradients of part 0",
        ),
        "gradients that add up": Mistake(
            "        self.steps += 1\n",
            "        self.steps += 1\n        self.seen = grad = grad + getattr(self, 'seen', 0)\n",
            "m",
            says="a step's gradient has those of the steps before in it",
        ),
        "the largest gradient": Mistake(
            "(mine, grad)",
            "(mine, grad, op=dist.ReduceOp.MAX)",
            "m",
            says="reduce_scatter_tensor takes the MAX over the ranks",
        ),
        "gradients in 16 bits": Mistake(
            "        dist.reduce_scatter_tensor(mine, grad)\n",
            "        half = mine.bfloat16()\n        dist.reduce_scatter_tensor(half, grad.bfloat16())\n"
            "        mine = half.float()\n",
            "m",
            says="reduce_scatter_tensor gets bfloat16, which has about 3 digits: send float32",
        ),
        "divided by two": Mistake(
            "mine / dist.get_world_size()", "mine / 2", "m", says="and there are 3 ranks: is it divided by 2?"
        ),
        "divided by the part's length": Mistake(
            "mine / dist.get_world_size()", "mine / len(mine)", "m", says="and there are 2 ranks: is it divided by 3?"
        ),
        "the neighbour's part": Mistake(
            "chunk(size)[rank]",
            "chunk(size)[rank - 1]",
            "part",
            says="self.part of rank 0 has the weights number 3, 4, 5, but reduce_scatter_tensor gives it the sum of "
            "number 0, 1, 2",
        ),
        "part 0 on every rank": Mistake(
            "chunk(size)[rank]", "chunk(size)[0]", "part", says="self.part of rank 1 has the weights number 0, 1, 2"
        ),
        "every other weight": Mistake(
            "weights.chunk(size)[rank]",
            "weights[rank::size]",
            None,
            "tensor",
            says="a rank's part is one piece of the weights",
        ),
        "memory without weights": Mistake(
            "weights.chunk(size)[rank]",
            "torch.zeros_like(weights).chunk(size)[rank]",
            "part",
            says="self.part of rank 0 does not begin as a part of the weights",
        ),
        "a copy is updated": Mistake(
            "adamw(self.part,", "adamw(self.part.clone(),", "final", says="the weights are what they were"
        ),
        "all weights for adamw": Mistake(
            "adamw(self.part,",
            "adamw(self.weights,",
            None,
            "crash",
            says="adamw's weights, grad, m and v are as long as a rank's part",
        ),
        "the part is all weights": Mistake(
            '{"part": part,', '{"part": weights,', "part", "shape", says="a rank trains its own part only"
        ),
        "moments as long as the weights": Mistake(
            "optimizer.m,",
            "optimizer.m.repeat(dist.get_world_size()),",
            "m",
            "shape",
            says="m: it has the shape [6] on rank 0, and must have [3]: a rank needs the moments of its own part only",
        ),
        "moments in 16 bits": Mistake(
            "torch.zeros_like(self.part)",
            "torch.zeros_like(self.part, dtype=torch.bfloat16)",
            "m",
            "dtype",
            count=2,
            says="m: it has the dtype bfloat16 on rank 0, and must have float32",
        ),
        "copies of the moments": Mistake(
            "self.m, self.v, self.steps",
            "self.m.clone(), self.v.clone(), self.steps",
            "m",
            says="self.m and self.v are still 0",
        ),
        "moments exchanged": Mistake(
            "self.m, self.v, self.steps", "self.v, self.m, self.steps", "m", says="m and v are exchanged"
        ),
        "one tensor for both moments": Mistake(
            "self.v = torch.zeros_like(self.part)", "self.v = self.m", "final", says="one tensor: make two"
        ),
        "moments of ones": Mistake(
            "torch.zeros_like(self.part)",
            "torch.ones_like(self.part)",
            "m",
            count=2,
            says="the moments begin with 1",
        ),
        "steps counted from 0": Mistake(
            "self.steps)", "self.steps - 1)", "final", says="adamw gets 0 for the first step, and counts from 1"
        ),
        "steps counted twice": Mistake(
            "self.steps += 1", "self.steps += 2", "final", says="adamw gets step + 1 in each step"
        ),
        "always the first step": Mistake("self.steps)", "1)", "final", says="adamw gets 1 for every step"),
        "summed into the weights": Mistake(
            "mine = torch.empty_like(self.part)",
            "mine = self.part",
            "final",
            says="the sums of the gradients lie in the weights",
        ),
        "averaged in the weights": Mistake(
            "        mine = torch.empty_like(self.part)\n        dist.reduce_scatter_tensor(mine, grad)\n"
            "        adamw(self.part, mine / dist.get_world_size(),",
            "        mine = self.part\n        dist.reduce_scatter_tensor(mine, grad)\n"
            "        mine /= dist.get_world_size()\n        adamw(self.part, mine,",
            "final",
            says="the means of the gradients lie in the weights",
        ),
        "gradients gathered": Mistake(
            "(self.weights, self.part)",
            "(self.weights, mine)",
            "final",
            says="the weights are the sums of the gradients",
        ),
        "means of gradients gathered": Mistake(
            "(self.weights, self.part)",
            "(self.weights, mine / dist.get_world_size())",
            "final",
            says="the weights are the means of the gradients: gather self.part",
        ),
        "gathered into new memory": Mistake(
            "        dist.all_gather_into_tensor(self.weights, self.part)\n",
            "        self.weights = torch.empty_like(self.weights)\n"
            "        dist.all_gather_into_tensor(self.weights, self.part)\n",
            "final",
            says="after AdamW, into self.weights itself",
        ),
        "rank 0's weights for all": Mistake(
            "dist.all_gather_into_tensor(self.weights, self.part)",
            "dist.broadcast(self.weights, 0)",
            "final",
            says="broadcast gives every rank what rank 0 has",
        ),
        "mean of the weights": Mistake(
            "        dist.all_gather_into_tensor(self.weights, self.part)\n",
            "        dist.all_reduce(self.weights)\n        self.weights /= dist.get_world_size()\n",
            "final",
            says="the weights are the means over the ranks",
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
            says="broadcast gives every rank what rank 0 has",
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
