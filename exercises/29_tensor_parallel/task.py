"""Exercise 29: what run() must compute, and typical mistakes."""

import torch

import ranks
from common.versions import load_version
from grading import Mistake, Task, Wrong, random
from timeline import simulate


def inputs(size, rows, C, F):
    def everywhere(tensor):
        return tensor.expand(size, *tensor.shape).clone()

    return {
        "x": everywhere(random(rows, C, seed=1, scale=1.2, offset=0.3)),
        "gate_up": everywhere(random(2 * F, C, seed=2, scale=0.6, offset=0.1)),
        "down": everywhere(random(C, F, seed=3, scale=0.7)),
        "dy": everywhere(random(rows, C, seed=4, scale=0.8, offset=0.2)),
    }


def rows_of(gate_up, size, packed, exchanged):
    """Return each rank's rows; packed: cut as if gate_up were one matrix; exchanged: up stands before the gate."""
    if packed:
        return list(gate_up.chunk(size))
    gate, up = gate_up.chunk(2)
    first, second = (up, gate) if exchanged else (gate, up)
    return [torch.cat(pair) for pair in zip(first.chunk(size), second.chunk(size), strict=True)]


def define(x, gate_up, down, dy, packed=False, exchanged=False, own_y=False, own_dx=False, dy_times=1, x_times=1):
    """Compute it part by part, or what an error gives. dy_times, x_times: how often the ranks have summed each."""
    size = len(x)
    swiglu = load_version(1).swiglu
    parts = []  # rank -> its part of y, and the gradients that it computes
    for rows, columns in zip(rows_of(gate_up[0], size, packed, exchanged), down[0].chunk(size, dim=1), strict=True):
        leaves = [tensor.detach().clone().requires_grad_() for tensor in (x_times * x[0], rows, columns)]
        gate, up = (leaves[0] @ leaves[1].T).chunk(2, dim=1)
        y = swiglu(gate, up) @ leaves[2].T
        parts.append((y.detach(), *torch.autograd.grad(y, leaves, dy_times * dy[0])))
    ys, dxs, dgate_ups, ddowns = zip(*parts, strict=True)
    if not own_y:
        ys = [sum(ys)] * size
    if not own_dx:
        dxs = [sum(dxs)] * size
    stacked = map(torch.stack, (ys, ddowns, dgate_ups, dxs))
    return dict(zip(("y", "ddown", "dgate_up", "dx"), stacked, strict=True))


def suspect(times=(), **error):
    """Return a suspect; times: names of factors that are the number of ranks."""
    return lambda x, **rest: define(x, **rest, **error, **dict.fromkeys(times, len(x)))


def check_calls(module, source):
    """Raise Wrong unless there is one all-reduce each way; return words on what is sent."""
    records = ranks.recorded[-1]
    sizes = TASK.cases["four ranks, many rows"]
    size = len(records)
    whole = 4 * sizes["rows"] * sizes["C"]
    for rank, record in enumerate(records):
        bytes_of_calls = sum(call.whole for call in record.calls)
        if len(record.calls) > 2 or bytes_of_calls > 2 * whole:
            names = ", ".join(call.name for call in record.calls)
            said = f"right, but rank {rank} makes {len(record.calls)} calls on {bytes_of_calls:,} bytes ({names})"
            raise Wrong("count", None, f"{said}: two all-reduces of {whole:,} bytes are enough, one each way")
    weights = 4 * 3 * sizes["C"] * sizes["F"]
    sent = records[0].sent_bytes(size)
    return (
        f"each of {size} ranks holds {weights // size:,} of {weights:,} bytes of weights and sends {sent:,.0f}, none "
        f"of it hidden\n{simulate(records).picture()}"
    )


TASK = Task(
    cases={
        "two ranks": {"size": 2, "rows": 3, "C": 4, "F": 6},
        "three ranks": {"size": 3, "rows": 5, "C": 8, "F": 9},
        "four ranks, many rows": {"size": 4, "rows": 64, "C": 64, "F": 128},
    },
    inputs=inputs,
    define=define,
    names=dict.fromkeys(("y", "ddown", "dgate_up", "dx"), "rank row column"),
    dtypes=(torch.float32,),
    kernel=False,
    launch=ranks.on_each_rank("x", "gate_up", "down", "dy"),
    then=check_calls,
    suspects={
        "gate_up is cut as one matrix, so rank 0 has only gates: take a part of the gate and the same part of up": (
            suspect(packed=True)
        ),
        "gate and up are exchanged: gate_up begins with the gate's rows": suspect(exchanged=True),
        "every rank has only its own part of the sum: Leave must sum over the ranks": suspect(own_y=True),
        "every rank has only its own part of dx: Enter's backward must sum over the ranks": suspect(own_dx=True),
        "dy is summed, which every rank has whole: Leave's backward passes it on": suspect(times=("dy_times",)),
        "x is summed, which every rank has whole: Enter's forward passes it on": suspect(times=("x_times",)),
    },
    mistakes={
        "gate_up cut as one matrix": Mistake(
            "    gate, up = gate_up.chunk(2)\n    return torch.cat([gate.chunk(size)[rank], up.chunk(size)[rank]])\n",
            "    return gate_up.chunk(size)[rank]\n",
            "y",
            says="rank 0 has only gates",
        ),
        "up before the gate": Mistake(
            "torch.cat([gate.chunk(size)[rank], up.chunk(size)[rank]])",
            "torch.cat([up.chunk(size)[rank], gate.chunk(size)[rank]])",
            "y",
            says="gate_up begins with the gate's rows",
        ),
        "columns of gate_up": Mistake(
            "torch.cat([gate.chunk(size)[rank], up.chunk(size)[rank]])",
            "gate_up.chunk(size, dim=1)[rank]",
            None,
            "crash",
            says="part_of_gate_up must return a part of the shape [6, 4], not [12, 2]",
        ),
        "rows of down": Mistake(
            "down.chunk(size, dim=1)[rank]",
            "down.chunk(size)[rank]",
            None,
            "crash",
            says="part_of_down must return a part of the shape [4, 3], not [2, 6]",
        ),
        "y not summed": Mistake("        dist.all_reduce(y)\n", "", "y", says="Leave must sum"),
        "dx not summed": Mistake("        dist.all_reduce(dx)\n", "", "dx", says="Enter's backward must sum"),
        "dy summed": Mistake(
            "        return dy\n",
            "        dy = dy.contiguous().clone()\n        dist.all_reduce(dy)\n        return dy\n",
            "ddown",
            says="Leave's backward passes it on",
        ),
        "x summed": Mistake(
            "        return x.view_as(x)\n",
            "        x = x.clone()\n        dist.all_reduce(x)\n        return x\n",
            "y",
            says="Enter's forward passes it on",
        ),
        "dy in place": Mistake(
            "        return dy\n",
            "        dist.all_reduce(dy)\n        return dy\n",
            "dy",
            "changed",
            says="lets all_reduce write its result there on rank 0, but it's an input: work on a clone",
        ),
        "dx in place": Mistake(
            "        dx = dx.clone(memory_format=torch.contiguous_format)\n",
            "",
            None,
            "changed",
            says="Enter.backward changes its argument on rank 0, which other operations may need as it is",
        ),
        "the partial sum in place": Mistake(
            "        y = part.clone()\n        dist.all_reduce(y)\n        return y\n",
            "        dist.all_reduce(part)\n        return part\n",
            None,
            "changed",
            says="Leave.forward changes its argument on rank 0",
        ),
        "a transposed gradient": Mistake(
            "dx.clone(memory_format=torch.contiguous_format)",
            "dx.T.contiguous().T",
            None,
            "tensor",
            says="all_reduce needs a contiguous tensor, not one of [3, 4] with strides [1, 3]",
        ),
        "mean": Mistake(
            "        return y\n",
            "        return y / dist.get_world_size()\n",
            "y",
            says="is it divided once too often?",
        ),
        "dx summed twice": Mistake(
            "        dist.all_reduce(dx)\n",
            "        dist.all_reduce(dx)\n        dist.all_reduce(dx)\n",
            "dx",
            says="2 times its correct value, and there are 2 ranks: is it summed once too often?",
        ),
        "not waited for": Mistake(
            "        dist.all_reduce(y)\n",
            "        dist.all_reduce(y, async_op=True)\n",
            None,
            "unfinished",
            says="never waits for its",
        ),
        "gathered weights": Mistake(
            "    gate, up = (Enter",
            "    parts = gate_up.new_empty(dist.get_world_size() * len(gate_up), gate_up.shape[1])\n"
            "    dist.all_gather_into_tensor(parts, gate_up.detach())\n    gate, up = (Enter",
            None,
            "count",
            says="two all-reduces of 16,384 bytes are enough",
        ),
        "gate and up enter apart": Mistake(
            "    gate, up = (Enter.apply(x) @ gate_up.T).chunk(2, dim=1)\n",
            "    gate, up = (Enter.apply(x) @ rows.T for rows in gate_up.chunk(2))\n",
            None,
            "count",
            says="makes 3 calls on 49,152 bytes",
        ),
        "one rank forgets": Mistake(
            "        dist.all_reduce(dx)\n",
            "        if dist.get_rank() == 0:\n            dist.all_reduce(dx)\n",
            None,
            "deadlock",
            says="rank 1 has ended after 1 call",
        ),
    },
)
