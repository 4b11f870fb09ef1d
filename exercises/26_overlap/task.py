"""Exercise 26: what run() must compute, and typical mistakes."""

import torch

import ranks
from grading import Mistake, Task, Wrong, random
from timeline import simulate


def inputs(size, steps, L, B=4, C=8, skipped=()):
    """skipped: (rank, step, layer) of each layer that a rank's batch does not use."""
    skip = torch.zeros(size, steps, L)
    for place in skipped:
        skip[place] = 1
    return {
        "x": random(size, steps, B, C, seed=1, scale=0.9, offset=0.2),
        "target": random(size, steps, B, C, seed=2),
        "w": random(L, C, C, seed=3, scale=0.3),
        "skip": skip,
    }


def gradients(x, target, w, skip):
    """Return the gradients of a rank's own batch."""
    leaf = w.detach().requires_grad_()
    y = x
    for layer, skipped in zip(leaf, skip, strict=True):
        y = y if skipped else y + torch.tanh(y @ layer.T)
    return torch.autograd.grad((y - target).square().mean(), leaf)[0]


def sum_mixed(each, skip):
    """Return each rank's sums if a rank sends its full buckets first, and the others last."""
    L = len(each[0])
    buckets = [list(range(L))[::-1][i : i + 2] for i in range(0, L, 2)]
    orders = [sorted(buckets, key=lambda bucket: any(skipped[i] for i in bucket)) for skipped in skip.tolist()]
    if any(len(theirs) != len(ours) for order in orders for theirs, ours in zip(order, buckets, strict=True)):
        return torch.full_like(torch.stack(each), torch.inf)  # the checker refuses to add buckets of two lengths
    total = torch.zeros_like(torch.stack(each))
    for meeting in zip(*orders, strict=True):
        for mine, sums in zip(meeting, total, strict=True):
            sums[mine] = sum(other[theirs] for other, theirs in zip(each, meeting, strict=True))
    return total


def train(x, target, w, skip, received=lambda each, skip: [sum(each) / len(each)] * len(each)):
    """Train each rank with the gradients that it has received in the end, given those of each rank's own batch."""
    size, steps = skip.shape[:2]
    weights = [w.clone() for _ in range(size)]
    grads = x.new_zeros(size, steps, *w.shape)
    for step in range(steps):
        each = [gradients(x[rank, step], target[rank, step], weights[rank], skip[rank, step]) for rank in range(size)]
        for rank, mean in enumerate(received(each, skip[:, step])):
            grads[rank, step] = mean
            weights[rank] = weights[rank] - 0.1 * mean
    return {"grads": grads, "final": torch.stack(weights)}


def suspect(received):
    return lambda **given: train(**given, received=received)


def check_overlap(module, source):
    """Raise Wrong unless all but the last bucket travel during the backward; return words on what that hides."""
    records = ranks.recorded[-1]
    sizes = TASK.cases["many buckets"]
    buckets = sizes["steps"] * ((sizes["L"] + 1) // 2)
    for rank, record in enumerate(records):
        if len(record.calls) != buckets:
            said = f"right, but rank {rank} makes {len(record.calls)} calls in {sizes['steps']} steps"
            raise Wrong("count", None, f"{said}, and there are {buckets} buckets: send each once")
    timeline = simulate(records)
    last = max(end - begin for begin, end in timeline.network)
    if timeline.exposed > 1.5 * sizes["steps"] * last:
        said = f"right, but {timeline.exposed:.0f} of {timeline.communication:.0f} us of communication are exposed"
        raise Wrong(
            "exposed",
            None,
            f"{said}; only a step's last bucket has nothing to hide behind, {last:.0f} us: "
            f"{describe_exposed(records)}\n{timeline.picture()}",
        )
    hidden = timeline.communication - timeline.exposed
    return (
        f"{hidden / timeline.communication:.0%} of the communication is hidden: {sizes['steps']} steps take "
        f"{timeline.total:.0f} us, {hidden:.0f} us less than one thing after another\n{timeline.picture()}"
    )


def describe_exposed(records):
    """Return why: each call is waited for at once, or nothing is sent before the backward has ended."""
    kinds = [what for what, _ in records[0].events]
    first = kinds.index("call")
    if kinds[first + 1] == "wait":
        return "you wait for each call at once. Pass async_op=True, and wait in finish() only"
    return "you send the first bucket when the backward has ended. Send it from note()"


TASK = Task(
    cases={
        "one bucket": {"size": 2, "steps": 1, "L": 2},
        "two steps": {"size": 2, "steps": 2, "L": 5},
        "a layer that a rank skips": {"size": 2, "steps": 2, "L": 6, "skipped": ((1, 0, 4), (0, 1, 0))},
        "many buckets": {"size": 2, "steps": 2, "L": 12, "B": 256, "C": 32},
    },
    inputs=inputs,
    define=train,
    names={"grads": "rank step layer row column", "final": "rank layer row column"},
    owner=lambda module, name, index, inputs: f"bucket {(len(inputs['w']) - 1 - index[-3]) // 2}",
    dtypes=(torch.float32,),
    kernel=False,
    tolerance=1e-5,
    launch=ranks.on_each_rank("x", "target", "skip"),
    then=check_overlap,
    suspects={
        "gradients of different weights are added: a rank that skips a layer fills its buckets in another order, and a "
        "collective has no name. Send the buckets in one order": suspect(
            lambda each, skip: sum_mixed(each, skip) / len(each)
        ),
        "the gradients are summed over the ranks: divide by the number of ranks": suspect(
            lambda each, skip: [sum(each)] * len(each)
        ),
        "every rank trains alone: its gradients are those of its own batch": suspect(lambda each, skip: each),
        "the sums are lost: all_reduce must get bucket.flat itself, and unpack() comes after wait()": suspect(
            lambda each, skip: [own / len(each) for own in each]
        ),
    },
    mistakes={
        "one bucket after another": Mistake(
            "        bucket.work = dist.all_reduce(bucket.flat, async_op=True)\n",
            "        bucket.work = dist.all_reduce(bucket.flat, async_op=True)\n        bucket.work.wait()\n",
            None,
            "exposed",
            says="you wait for each call at once",
        ),
        "everything at the end": Mistake(
            "            self.send_next()\n\n    def send_next",
            "            break\n\n    def send_next",
            None,
            "exposed",
            says="Send it from note()",
        ),
        "not async": Mistake(
            "dist.all_reduce(bucket.flat, async_op=True)",
            "dist.all_reduce(bucket.flat)",
            None,
            "crash",
            says="pass async_op=True",
        ),
        "not waited for": Mistake(
            "            bucket.wait()\n",
            "",
            None,
            "race",
            says="that has not arrived yet: first wait() for the all_reduce",
        ),
        "neither waited for nor divided": Mistake(
            "            bucket.wait()\n            bucket.flat /= dist.get_world_size()\n",
            "",
            None,
            "unfinished",
            says="rank 0 never waits for its all_reduce",
        ),
        "divided while it is sent": Mistake(
            "            bucket.wait()\n            bucket.flat /= dist.get_world_size()\n",
            "            bucket.flat /= dist.get_world_size()\n            bucket.wait()\n",
            None,
            "race",
            says="writes to a tensor on rank 0 that has not arrived yet: first wait()",
        ),
        "sum": Mistake(
            "            bucket.flat /= dist.get_world_size()\n", "", "grads", says="divide by the number of ranks"
        ),
        "divided twice": Mistake(
            "bucket.flat = bucket.pack()\n",
            "bucket.flat = bucket.pack() / dist.get_world_size()\n",
            "grads",
            says="1/2 times its correct value",
        ),
        "not unpacked": Mistake("            bucket.unpack()\n", "", "grads", says="every rank trains alone"),
        "a copy is summed": Mistake(
            "dist.all_reduce(bucket.flat, ", "dist.all_reduce(bucket.flat.clone(), ", "grads", says="the sums are lost"
        ),
        "sent when full, whatever the order": Mistake(
            "        while self.sent < len(self.buckets) and self.buckets[self.sent].missing == 0:\n"
            "            self.send_next()\n",
            "        if bucket.missing == 0:\n"
            "            self.buckets.remove(bucket)\n"
            "            self.buckets.insert(self.sent, bucket)\n"
            "            self.send_next()\n",
            "grads",
            says="gradients of different weights are added",
        ),
        "incomplete buckets stay": Mistake(
            "        while self.sent < len(self.buckets):\n            self.send_next()\n"
            "        for bucket in self.buckets:\n",
            "        for bucket in self.buckets[: self.sent]:\n",
            None,
            "deadlock",
            says="rank 1 has ended after",
        ),
        "sent not reset": Mistake(
            "        self.sent = 0\n\n\ndef", "\n\ndef", None, "crash", says="is self.sent 0 when a backward begins?"
        ),
        "buckets not reset": Mistake(
            "            bucket.reset()\n", "", None, "crash", says="reset() it after each step"
        ),
        "a call for each weight": Mistake(
            "        bucket.missing -= 1\n        while",
            "        bucket.missing -= 1\n        for w in bucket.weights:\n            if w.grad is not None:\n"
            "                dist.all_reduce(w.grad.clone())\n        while",
            None,
            "mismatch",
            says="all ranks must make the same calls in the same order",
        ),
        "DistributedDataParallel": Mistake(
            "    averager = Averager(weights)\n",
            "    averager = Averager(weights)\n    torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))\n",
            None,
            "bypass",
            says="here torch.distributed has these functions only",
        ),
    },
)
