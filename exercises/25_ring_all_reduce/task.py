"""Exercise 25: what run() must compute, and typical mistakes."""

import torch

import ranks
from grading import Mistake, Task, Wrong, random, relative_error
from timeline import BYTES_PER_US, LATENCY_US, simulate


def define(x):
    return {"sum": x.sum(0, keepdim=True).expand_as(x).clone()}


def ring(x, steps, start=1, second_adds=False, left=False, own=1, stays=False, rebinds=False):
    """Return what a wrong ring gives.

    steps: of both halves; start: the second half begins with part r + start; left: it goes to the left; own: 0 if the
    first half's indices don't depend on the rank; stays: it sends part r in all steps; rebinds: a sum of the first half
    is in the list of parts, but not in x.
    """
    size = len(x)
    rows = [row.clone() for row in x]
    parts = [list(row.chunk(size)) for row in rows]
    sender = [(rank + 1) % size if left else rank - 1 for rank in range(size)]
    for step in range(steps[0]):
        now = 0 if stays else step if own else -step
        sent = [parts[rank][(own * rank - now) % size].clone() for rank in range(size)]
        for rank in range(size):
            i = (own * rank - step - 1 if own else step + 1) % size
            if rebinds:
                parts[rank][i] = parts[rank][i] + sent[sender[rank]]
            else:
                parts[rank][i] += sent[sender[rank]]
    for step in range(steps[1]):
        sent = [parts[rank][(rank + start - step) % size].clone() for rank in range(size)]
        for rank in range(size):
            part = parts[rank][(rank + start - 1 - step) % size]
            part.copy_(sent[sender[rank]] + (part if second_adds else 0))
    return {"sum": torch.stack(rows)}


def second_half_lost(x, arrived):
    """Return what a ring gives without its second half; arrived: if messages were sent for it, else if none were."""
    size = len(x)
    messages = sum(call.sends for call in ranks.recorded[-1][0].calls)
    if (messages > size - 1) != arrived:
        return {"sum": torch.full_like(x, torch.inf)}  # fits nothing
    return ring(x, (size - 1, 0))


def suspect(second=0, **error):
    """Return a suspect; second: how many steps the second half has more than it needs."""
    return lambda x: ring(x, (len(x) - 1, len(x) - 1 + second), **error)


def describe_part(result, x):
    """Return which parts of x the first wrong part of a result is the sum of, or None if it's no such sum."""
    size = len(x)
    pieces = x.double().reshape(size * size, -1)  # number q * size + i is part i of rank q
    if pieces.shape[0] > pieces.shape[1]:
        return None  # more unknown numbers than equations
    for rank, row in enumerate(result):
        for i, part in enumerate(row.chunk(size)):
            counts = torch.linalg.lstsq(pieces.T, part[:, None]).solution.flatten().round()
            if relative_error(counts @ pieces, part) > 1e-4:
                return None
            words = []
            for number, count in enumerate(counts.int().tolist()):
                if count:
                    times = "" if count == 1 else f"{count} times "
                    words.append(f"{times}part {number % size} of rank {number // size}")
            if counts.tolist() != [float(number % size == i) for number in range(size * size)]:
                return f"part {i} of rank {rank} is {' + '.join(words) or 'empty'}, and not part {i} of each rank, once"
    return None


def check_bytes(module, source):
    """Raise Wrong if a rank sent more than a ring's share; return words on what it sent."""
    records = ranks.recorded[-1]
    size = len(records)
    whole = 4 * TASK.cases["four ranks"]["n"]
    if any(call.collective for record in records for call in record.calls):
        raise Wrong("bypass", None, "the sums are right, but a collective made them: use isend and irecv only")
    sent = [record.sent_bytes(size) for record in records]
    most = max(sent)
    worst = sent.index(most)
    share = 2 * (size - 1) / size
    if most > share * whole:
        said = f"right, but rank {worst} sends {most / whole:.3g} times the tensor; in a ring of {size} ranks it's"
        messages = sum(call.sends for call in records[worst].calls)
        if messages > 2 * (size - 1):
            raise Wrong("bytes", None, f"{said} {share:.3g} times: each half takes one step fewer than there are ranks")
        raise Wrong("bytes", None, f"{said} {share:.3g} times: send parts, not the whole")
    took = simulate(records).total
    words = f"on {size} ranks each sends {most:,.0f} bytes, {most / whole:.3g} times the tensor, in {took:.0f} us"
    least = 2 * (size - 1) * (LATENCY_US + whole / size / BYTES_PER_US)
    if took > 1.01 * least:
        words += f"; a ring whose batches send and receive at once takes {least:.0f}"
    return words


TASK = Task(
    cases={
        "three ranks": {"size": 3, "n": 36},  # first: with two, several mistakes give the same sums
        "two ranks": {"size": 2, "n": 8},
        "four ranks": {"size": 4, "n": 1200},
    },
    inputs=lambda size, n: {"x": random(size, n, seed=1, scale=1.3, offset=0.4)},
    define=define,
    names={"sum": "rank number"},
    owner=lambda module, name, index, inputs: f"part {index[1] * len(inputs['x']) // inputs['x'].shape[1]}",
    dtypes=(torch.float32,),
    kernel=False,
    launch=ranks.on_each_rank(
        "x",
        meanings={
            "is in the same batch": "a step sends one part and fills another. After `parts[i] = received` the list "
            "holds `received` itself, so the next step would send and fill it; parts[i].copy_(received) writes into x",
            "IndexError": "parts has one part per rank, so its indices need % size",
        },
    ),
    then=check_bytes,
    explain=lambda name, result, inputs: describe_part(result, inputs["x"]),
    suspects={
        "the parts that go round in the second half are finished: replace, don't add": suspect(second_adds=True),
        "the second half is missing: rank r has only part r + 1 finished": lambda x: second_half_lost(x, False),
        "the second half's parts never reach x: write into it, with parts[i].copy_(received). `parts[i] = ...` only "
        "gives the list another tensor": lambda x: second_half_lost(x, True),
        "the first half's sums never reach x: write into it, with parts[i] += received. `parts[i] = ...` gives the "
        "list another tensor": suspect(rebinds=True),
        "x is what it was: write into its parts, with parts[i] += received or parts[i].copy_(received). `parts[i] = "
        "...` gives the list another tensor, and `x = ...` another x": lambda x: {"sum": x},
        "everything goes to the left: send to right, and receive from left": suspect(left=True),
        "all ranks send the same part in a step of the first half: its index must depend on the rank": suspect(own=0),
        "every step of the first half sends part r: pass on the part to which the last step added": suspect(stays=True),
        "the second half ends one step early: it takes one step fewer than there are ranks": suspect(second=-1),
        "part r + 1 of rank r goes round unsummed: the first half is missing, ends early, or adds to another part": (
            lambda x: ring(x, (0, len(x) - 1))
        ),
        "part r of rank r goes round unsummed: the first half must add what arrives, and the second half starts with "
        "part r + 1, which rank r has finished": suspect(start=0),
        "this is the mean over the ranks, not the sum": lambda x: {"sum": define(x)["sum"] / len(x)},
    },
    mistakes={
        "send before recv": Mistake(
            "    messages = [dist.P2POp(dist.isend, sent, right), dist.P2POp(dist.irecv, received, left)]\n"
            "    for work in dist.batch_isend_irecv(messages):\n        work.wait()\n",
            "    dist.send(sent, right)\n    dist.recv(received, left)\n",
            None,
            "deadlock",
            says="every rank first sends, and none receives",
        ),
        "recv before send": Mistake(
            "    messages = [dist.P2POp(dist.isend, sent, right), dist.P2POp(dist.irecv, received, left)]\n"
            "    for work in dist.batch_isend_irecv(messages):\n        work.wait()\n",
            "    dist.recv(received, left)\n    dist.send(sent, right)\n",
            None,
            "deadlock",
            says="every rank first receives, and none sends",
        ),
        "isend, then recv": Mistake(
            "    messages = [dist.P2POp(dist.isend, sent, right), dist.P2POp(dist.irecv, received, left)]\n"
            "    for work in dist.batch_isend_irecv(messages):\n        work.wait()\n",
            "    work = dist.isend(sent, right)\n    dist.recv(received, left)\n    work.wait()\n",
            None,
            "deadlock",
            says="start isend and irecv together, in one batch_isend_irecv",
        ),
        "never waited": Mistake(
            "    for work in dist.batch_isend_irecv(messages):\n        work.wait()\n",
            "    dist.batch_isend_irecv(messages)\n",
            None,
            "race",
            says="that has not arrived yet: first wait() for the irecv from rank 2",
        ),
        "waited for what is sent only": Mistake(
            "    for work in dist.batch_isend_irecv(messages):\n        work.wait()\n",
            "    dist.batch_isend_irecv(messages)[0].wait()\n",
            None,
            "race",
            says="that has not arrived yet: first wait() for the irecv from rank 2",
        ),
        "waited for what arrives only": Mistake(
            "    for work in dist.batch_isend_irecv(messages):\n        work.wait()\n",
            "    dist.batch_isend_irecv(messages)[1].wait()\n",
            None,
            "race",
            says="that is being sent",
        ),
        "added to the part that is sent": Mistake(
            "        parts[(rank - step - 1) % size].add_(received)",
            "        parts[(rank - step) % size].add_(received)",
            "sum",
            says="or adds to another part",
        ),
        "received into the part that is sent": Mistake(
            "        exchange(parts[(rank - step) % size], right, received, left)\n",
            "        exchange(parts[(rank - step) % size], right, parts[(rank - step) % size], left)\n",
            None,
            "race",
            says="is in the same batch, so give them different memory",
        ),
        "replaced in the first half": Mistake(
            ".add_(received)", ".copy_(received)", "sum", says="the first half must add what arrives"
        ),
        "added in the second half": Mistake(
            "        exchange(parts[(rank + 1 - step) % size], right, parts[(rank - step) % size], left)\n",
            "        exchange(parts[(rank + 1 - step) % size], right, received, left)\n"
            "        parts[(rank - step) % size].add_(received)\n",
            "sum",
            says="replace, don't add",
        ),
        "second half forgotten": Mistake(
            "    for step in range(size - 1):\n        exchange(parts[(rank + 1",
            "    for step in range(0):\n        exchange(parts[(rank + 1",
            "sum",
            says="the second half is missing",
        ),
        "second half one step early": Mistake(
            "    for step in range(size - 1):\n        exchange(parts[(rank + 1",
            "    for step in range(max(1, size - 2)):\n        exchange(parts[(rank + 1",
            "sum",
            says="the second half ends one step early",
        ),
        "a step for each rank": Mistake(
            "    for step in range(size - 1):\n        exchange(parts[(rank - step) % size], right, received",
            "    for step in range(size):\n        exchange(parts[(rank - step) % size], right, received",
            None,
            "bytes",
            says="each half takes one step fewer than there are ranks",
        ),
        "second half from part r": Mistake(
            "exchange(parts[(rank + 1 - step) % size], right, parts[(rank - step) % size], left)",
            "exchange(parts[(rank - step) % size], right, parts[(rank - step - 1) % size], left)",
            "sum",
            says="the second half starts with part r + 1",
        ),
        "always the same part": Mistake(
            "parts[(rank - step) % size], right, received",
            "parts[rank], right, received",
            "sum",
            says="every step of the first half sends part r",
        ),
        "one part for all ranks": Mistake(
            "        exchange(parts[(rank - step) % size], right, received, left)\n"
            "        parts[(rank - step - 1) % size].add_(received)\n",
            "        exchange(parts[step], right, received, left)\n        parts[step + 1].add_(received)\n",
            "sum",
            says="its index must depend on the rank",
        ),
        "plus in place of minus": Mistake(
            "rank - step",
            "rank + step",
            "sum",
            count=3,
            says="part 0 of rank 0 is part 0 of rank 2, and not part 0 of each rank, once",
        ),
        "the first half to the left": Mistake(
            "exchange(parts[(rank - step) % size], right, received, left)",
            "exchange(parts[(rank - step) % size], left, received, right)",
            "sum",
            says="part 0 of rank 0 is ",
        ),
        "a part of each rank for two ranks": Mistake(
            "(rank - step - 1) % size",
            "1 - rank",
            "sum",
            says="part 0 of rank 0 is ",
        ),
        "isend twice": Mistake(
            "dist.P2POp(dist.irecv,", "dist.P2POp(dist.isend,", None, "deadlock", says="every rank first sends"
        ),
        "a function for the tensor": Mistake(
            "dist.P2POp(dist.isend, sent, right)",
            "dist.P2POp(sent, dist.isend, right)",
            None,
            "tensor",
            says="a tensor and a rank, in this order, and got isend for the tensor",
        ),
        "to the left": Mistake(
            "    right = (rank + 1) % size\n",
            "    left, right = (rank + 1) % size, left\n",
            "sum",
            says="everything goes to the left: send to right",
        ),
        "sums bound to the list": Mistake(
            "        parts[(rank - step - 1) % size].add_(received)\n",
            "        parts[(rank - step - 1) % size] = parts[(rank - step - 1) % size] + received\n",
            "sum",
            says="the first half's sums never reach x",
        ),
        "finished parts bound to the list": Mistake(
            "        exchange(parts[(rank + 1 - step) % size], right, parts[(rank - step) % size], left)\n",
            "        exchange(parts[(rank + 1 - step) % size], right, received, left)\n"
            "        parts[(rank - step) % size] = received.clone()\n",
            "sum",
            says="the second half's parts never reach x: write into it, with parts[i].copy_(received)",
        ),
        "received itself bound to the list": Mistake(
            "        exchange(parts[(rank + 1 - step) % size], right, parts[(rank - step) % size], left)\n",
            "        exchange(parts[(rank + 1 - step) % size], right, received, left)\n"
            "        parts[(rank - step) % size] = received\n",
            None,
            "race",
            says="give them different memory: a step sends one part and fills another. After `parts[i] = received`",
        ),
        "x bound to the sums": Mistake(
            "        parts[(rank - step - 1) % size].add_(received)\n"
            "    for step in range(size - 1):\n"
            "        exchange(parts[(rank + 1 - step) % size], right, parts[(rank - step) % size], left)\n",
            "        parts[(rank - step - 1) % size] = parts[(rank - step - 1) % size] + received\n"
            "    for step in range(size - 1):\n"
            "        exchange(parts[(rank + 1 - step) % size], right, received, left)\n"
            "        parts[(rank - step) % size] = received.clone()\n"
            "    x = torch.cat(parts)\n",
            "sum",
            says="x is what it was: write into its parts",
        ),
        "added before it has arrived": Mistake(
            "    for work in dist.batch_isend_irecv(messages):\n        work.wait()\n",
            "    works = dist.batch_isend_irecv(messages)\n    early = received.clone()\n"
            "    for work in works:\n        work.wait()\n    received.copy_(early)\n",
            "sum",
            "race",
            says="line 11 reads a tensor before its wait(), and until then the checker fills it with NaN: wait first",
        ),
        "a rank for the tensor": Mistake(
            "dist.P2POp(dist.isend, sent, right)",
            "dist.P2POp(dist.isend, right, sent)",
            None,
            "tensor",
            says="line 9: P2POp takes dist.isend or dist.irecv, a tensor and a rank, in this order, and got 1",
        ),
        "without the modulo": Mistake(
            "exchange(parts[(rank + 1 - step) % size], right,",
            "exchange(parts[rank + 1 - step], right,",
            None,
            "crash",
            says="IndexError: list index out of range: parts has one part per rank, so its indices need % size",
        ),
        "both to the right": Mistake(
            "dist.P2POp(dist.irecv, received, left)",
            "dist.P2POp(dist.irecv, received, right)",
            None,
            "deadlock",
            says="no rank can go on: rank 0 waits in isend to rank 1 of [12] float32, line 10 and irecv from rank 1",
        ),
        "a whole tensor for a part": Mistake(
            "    received = torch.empty_like(parts[0])\n",
            "    received = torch.empty_like(x)\n",
            None,
            "mismatch",
            says="both ends must name the same size",
        ),
        "the whole tensor round the ring": Mistake(
            "    for step in range(size - 1):\n"
            "        exchange(parts[(rank - step) % size], right, received, left)\n"
            "        parts[(rank - step - 1) % size].add_(received)\n"
            "    for step in range(size - 1):\n"
            "        exchange(parts[(rank + 1 - step) % size], right, parts[(rank - step) % size], left)\n",
            "    passed = x.clone()\n"
            "    received = torch.empty_like(x)\n"
            "    for step in range(size - 1):\n"
            "        exchange(passed, right, received, left)\n"
            "        x.add_(received)\n"
            "        passed.copy_(received)\n",
            None,
            "bytes",
            says="sends 3 times the tensor; in a ring of 4 ranks it's 1.5 times: send parts, not the whole",
        ),
        "PyTorch's all-reduce": Mistake(
            "    ring_all_reduce(total)\n",
            "    dist.all_reduce(total)\n",
            None,
            "bypass",
            says="a collective made them",
        ),
        "mean": Mistake(
            '{"sum": total}', '{"sum": total / dist.get_world_size()}', "sum", says="this is the mean over the ranks"
        ),
    },
)
