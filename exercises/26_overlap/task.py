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


def summed(twice):
    """Return a suspect that sums and doesn't divide. twice: if more was sent than each gradient once, else if not."""

    def compute(**given):
        sent = sum(call.whole for call in ranks.recorded[-1][0].calls)
        once = 4 * given["w"].numel() * given["x"].shape[1]
        results = train(**given, received=lambda each, skip: [sum(each)] * len(each))
        if (sent > once) != twice:
            results["grads"].fill_(torch.inf)  # fits nothing
        return results

    return compute


def sent_too_early(each, skip):
    """Return the means if each bucket is sent after its first gradient, with zeros for the second."""
    mean = sum(each) / len(each)
    mean[list(range(len(mean) - 2, -1, -2))] = 0
    return [mean] * len(each)


def divided_by_those_who_have_it(each, skip):
    """Return the means if each layer's sum is divided by the number of ranks that use the layer."""
    users = (len(each) - skip.sum(0)).clamp(min=1)
    return [sum(each) / users[:, None, None]] * len(each)


def explain(name, result, inputs):
    steps = inputs["x"].shape[1]
    buckets = (len(inputs["w"]) + 1) // 2
    made = len(ranks.recorded[-1][0].calls)
    if made != buckets * steps:
        return f"rank 0 makes {made} calls in {steps} step(s) of {buckets} bucket(s): send each bucket once"
    return ranks.describe_calls()


def check_overlap(module, source):
    """Raise Wrong unless all but the last bucket travel during the backward; return words on what that hides."""
    records = ranks.recorded[-1]
    sizes = TASK.cases["many buckets"]
    buckets = (sizes["L"] + 1) // 2
    timeline = simulate(records)
    for rank, record in enumerate(records):
        if len(record.calls) != buckets * sizes["steps"]:
            said = f"right, but rank {rank} makes {len(record.calls)} calls in {sizes['steps']} steps"
            said += f", and there are {buckets} buckets in each: send each once"
            raise Wrong("count", None, f"{said}\n{timeline.picture()}")
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
    """Return why: each call is waited for at once, or nothing is sent before the backward has ended, or not enough."""
    kinds = [what for what, _ in records[0].events]
    first = kinds.index("call")
    if kinds[first + 1] == "wait":
        return "you wait for each call at once. Pass async_op=True, and wait in finish() only"
    if kinds[:first].count("compute") * TASK.cases["many buckets"]["steps"] == kinds.count("compute"):
        return (
            "nothing is sent before the backward has ended. note() counts down missing of its bucket, and looks at "
            "buckets[self.sent]: if its missing is 0, send it"
        )
    return "some buckets are full and wait all the same. In note(), send every bucket whose turn it is"


TASK = Task(
    cases={
        "one bucket": {"size": 2, "steps": 1, "L": 2},
        "two steps of three ranks": {"size": 3, "steps": 2, "L": 5},
        "a bucket that a rank skips": {"size": 2, "steps": 2, "L": 6, "skipped": ((1, 0, 3), (1, 0, 2))},
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
    launch=ranks.on_each_rank(
        "x",
        "target",
        "skip",
        meanings={
            "no rank can go on": "every rank sends every bucket in every step, with zeros for gradients that it "
            "doesn't have",
            "got None": "a rank that skips a layer has no gradient of it, and sends zeros",
            "calls, the last in line": "does send_next() count, self.sent += 1?",
            "list index out of range": "send_next() sends buckets[self.sent], so call it only while there is one, and "
            "for a full bucket, not for each gradient",
        },
    ),
    then=check_overlap,
    explain=explain,
    suspects={
        "gradients of different weights are added: a rank that skips a layer fills its buckets in another order, and a "
        "collective has no name. Send the buckets in one order": suspect(
            lambda each, skip: sum_mixed(each, skip) / len(each)
        ),
        "the gradients are summed over the ranks: divide by the number of ranks": summed(twice=False),
        "the gradients are twice as large, and more is sent than each of them once: sum each bucket once, and divide "
        "by the number of ranks": summed(twice=True),
        "the sums are divided by 2, however many ranks there are": suspect(
            lambda each, skip: [sum(each) / 2] * len(each)
        ),
        "a bucket is sent before its second gradient is there: wait until its missing is 0": suspect(sent_too_early),
        "the sums are divided by the number of ranks that have a gradient: divide by that of all ranks": suspect(
            divided_by_those_who_have_it
        ),
        "every rank trains alone, with the gradients of its own batch: unpack() the sums": suspect(
            lambda each, skip: each
        ),
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
            says="nothing is sent before the backward has ended",
        ),
        "not counted": Mistake(
            "        bucket.missing -= 1\n", "", None, "exposed", says="note() counts down missing of its bucket"
        ),
        "the last bucket first": Mistake(
            "self.buckets[self.sent].missing == 0",
            "self.buckets[-1 - self.sent].missing == 0",
            None,
            "exposed",
            says="and looks at buckets[self.sent]",
        ),
        "five buckets at once": Mistake(
            "        bucket.missing -= 1\n        while self.sent < len(self.buckets)",
            "        bucket.missing -= 1\n        if sum(one.missing == 0 for one in self.buckets) < 5:\n"
            "            return\n        while self.sent < len(self.buckets)",
            None,
            "exposed",
            says="some buckets are full and wait all the same",
        ),
        "sent at each gradient": Mistake(
            "        while self.sent < len(self.buckets) and self.buckets[self.sent].missing == 0:\n",
            "        if self.sent < len(self.buckets):\n",
            "grads",
            says="a bucket is sent before its second gradient is there",
        ),
        "sent not counted": Mistake(
            "        self.sent += 1\n",
            "",
            None,
            "hang",
            says="and an answer needs less than 100: does send_next() count",
        ),
        "no bucket without gradients": Mistake(
            "            self.send_next()\n        for bucket in self.buckets:\n            bucket.wait()\n",
            "            if all(w.grad is None for w in self.buckets[self.sent].weights):\n"
            "                self.sent += 1\n            else:\n                self.send_next()\n"
            "        for bucket in self.buckets:\n            if bucket.work is None:\n                bucket.reset()\n"
            "                continue\n            bucket.wait()\n",
            None,
            "deadlock",
            says="every rank sends every bucket in every step, with zeros for gradients that it doesn't have",
        ),
        "summed twice": Mistake(
            "            bucket.wait()\n",
            "            bucket.wait()\n            dist.all_reduce(bucket.flat)\n",
            "grads",
            says="the gradients are twice as large, and more is sent than each of them once",
        ),
        "divided by those who have a gradient": Mistake(
            "            bucket.flat /= dist.get_world_size()\n",
            "            have = torch.tensor([float(any(w.grad is not None for w in bucket.weights))])\n"
            "            dist.all_reduce(have)\n            bucket.flat /= have\n",
            "grads",
            says="divide by that of all ranks",
        ),
        "one weight after another": Mistake(
            "    averager = Averager(weights)\n",
            "    averager = Averager([])\n\n    def finish():\n        for w in weights:\n"
            "            w.grad = torch.zeros_like(w) if w.grad is None else w.grad\n"
            "            dist.all_reduce(w.grad)\n            w.grad /= dist.get_world_size()\n\n"
            "    averager.finish = finish\n",
            None,
            "count",
            says="24 calls in 2 steps, and there are 6 buckets in each",
        ),
        "no gradient": Mistake(
            "            bucket.wait()\n",
            "            bucket.wait()\n            for w in bucket.weights:\n"
            "                dist.all_reduce(w.grad)\n",
            None,
            "tensor",
            says="all_reduce got None on rank 1, and needs a tensor: a rank that skips a layer has no gradient",
        ),
        "reset before unpack": Mistake(
            "            bucket.unpack()\n            bucket.reset()\n",
            "            bucket.reset()\n            bucket.unpack()\n",
            None,
            "crash",
            says="this bucket holds no sums: send it and wait, then unpack() it, then reset() it",
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
        "divided by two": Mistake(
            "bucket.flat /= dist.get_world_size()",
            "bucket.flat /= 2",
            "grads",
            says="the sums are divided by 2, however many ranks there are",
        ),
        "the largest gradient": Mistake(
            "bucket.flat, async_op=True",
            "bucket.flat, op=dist.ReduceOp.MAX, async_op=True",
            "grads",
            says="all_reduce takes the MAX over the ranks: leave op= out, and it's the sum",
        ),
        "every gradient of a bucket at each": Mistake(
            "        bucket.missing -= 1\n        while",
            "        bucket.missing -= 1\n        for w in bucket.weights:\n            if w.grad is not None:\n"
            "                dist.all_reduce(w.grad)\n        while",
            "grads",
            says="rank 0 makes 4 calls in 1 step(s) of 1 bucket(s): send each bucket once",
        ),
        "the next bucket for each gradient": Mistake(
            "        while self.sent < len(self.buckets) and self.buckets[self.sent].missing == 0:\n"
            "            self.send_next()\n",
            "        self.send_next()\n",
            None,
            "crash",
            says="call it only while there is one, and for a full bucket",
        ),
        "no end of the buckets": Mistake(
            "self.sent < len(self.buckets) and self.buckets[self.sent].missing",
            "self.buckets[self.sent].missing",
            None,
            "crash",
            says="call it only while there is one",
        ),
        "work not kept": Mistake(
            "bucket.work = dist.all_reduce", "dist.all_reduce", None, "crash", says="and keep what it returns in work"
        ),
        "flat not kept": Mistake(
            "        bucket.flat = bucket.pack()\n        bucket.work = dist.all_reduce(bucket.flat, async_op=True)\n",
            "        flat = bucket.pack()\n        bucket.work = dist.all_reduce(flat, async_op=True)\n",
            None,
            "crash",
            says="this bucket has no flat: send_next() keeps the packed gradients there",
        ),
        "sent by one rank": Mistake(
            "        bucket.work = dist",
            "        if dist.get_rank() == 0:\n            bucket.work = dist",
            None,
            "crash",
            says="pass async_op=True to all_reduce, on every rank",
        ),
        "reset before wait": Mistake(
            "            bucket.wait()\n",
            "            bucket.reset()\n            bucket.wait()\n",
            None,
            "crash",
            says="or was reset before wait()",
        ),
        "an empty bucket is counted, not sent": Mistake(
            "        bucket.flat = bucket.pack()\n",
            "        if all(w.grad is None for w in bucket.weights):\n            self.sent += 1\n            return\n"
            "        bucket.flat = bucket.pack()\n",
            None,
            "crash",
            says="finish() sends the rest, with gradients or without",
        ),
        "divided twice": Mistake(
            "bucket.flat = bucket.pack()\n",
            "bucket.flat = bucket.pack() / dist.get_world_size()\n",
            "grads",
            says="1/2 times its correct value, and there are 2 ranks: is it divided once too often?",
        ),
        "not unpacked": Mistake(
            "            bucket.unpack()\n",
            "",
            "grads",
            says="every rank trains alone, with the gradients of its own batch: unpack()",
        ),
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
            says="every rank sends every bucket in every step",
        ),
        "sent not reset": Mistake(
            "        self.sent = 0\n\n\ndef", "\n\ndef", None, "crash", says="then sets self.sent to 0"
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
