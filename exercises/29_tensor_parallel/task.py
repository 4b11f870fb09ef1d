"""Exercise 29: what run() must compute, and typical mistakes."""

import itertools

import torch

import ranks
from common.versions import load_version
from grading import Mistake, Task, Wrong, random, relative_error
from timeline import simulate

RESULTS = ("rows", "columns", "y", "ddown", "dgate_up", "dx")
FAULTS = {  # one of each of the four functions
    "own_y": "every rank has only its own part of y: Leave's forward must sum over the ranks",
    "own_dx": "every rank has only its own part of dx: Enter's backward must sum over the ranks",
    "dy_times": "dy is summed, which every rank has whole: Leave's backward passes it on",
    "x_times": "x is summed, which every rank has whole: Enter's forward passes it on",
}


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
    """Compute it part by part, or what an error gives. dy_times, x_times: factors of what every rank has whole."""
    size = len(x)
    swiglu = load_version(1).swiglu
    all_rows = rows_of(gate_up[0], size, packed, exchanged)
    all_columns = down[0].chunk(size, dim=1)
    parts = []  # rank -> its part of y, and the gradients that it computes
    for rows, columns in zip(all_rows, all_columns, strict=True):
        leaves = [tensor.detach().clone().requires_grad_() for tensor in (x_times * x[0], rows, columns)]
        gate, up = (leaves[0] @ leaves[1].T).chunk(2, dim=1)
        y = swiglu(gate, up) @ leaves[2].T
        parts.append((y.detach(), *torch.autograd.grad(y, leaves, dy_times * dy[0])))
    ys, dxs, dgate_ups, ddowns = zip(*parts, strict=True)
    if not own_y:
        ys = [sum(ys)] * size
    if not own_dx:
        dxs = [sum(dxs)] * size
    stacked = map(torch.stack, (all_rows, all_columns, ys, ddowns, dgate_ups, dxs))
    return dict(zip(RESULTS, stacked, strict=True))


def without_parts(results):
    """Return the results that depend on what Enter and Leave do."""
    return {name: value for name, value in results.items() if name not in ("rows", "columns")}


def suspect_functions(faults):
    """Return a suspect in which these of the four functions do the other of the two things."""

    def compute(x, **rest):
        summed = dict.fromkeys({"x_times", "dy_times"} & {*faults}, len(x))
        kept = dict.fromkeys({"own_y", "own_dx"} & {*faults}, True)
        return without_parts(define(x, **rest, **summed, **kept))

    return compute


def spans(numbers):
    """Return "0 to 2 and 6" for [0, 1, 2, 6]."""
    words = []
    for _, group in itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        first, *others = [number for _, number in group]
        words.append(f"{first} to {others[-1]}" if others else str(first))
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def numbers_of(rows, whole):
    """Return the number that each row has in the whole, or None for a row that is not there."""
    places = [(whole == row).all(1).nonzero().flatten().tolist() for row in rows]
    return [place[0] if place else None for place in places]


def describe_cut(part, whole, right, what):
    """Return which rows the first wrong rank keeps, and which ones it needs. part, right: [rank, row, column]."""
    for rank, (mine, wanted) in enumerate(zip(part, right, strict=True)):
        held = numbers_of(mine, whole)
        needed = numbers_of(wanted, whole)
        if held == needed:
            continue
        kept = f"{what} that the whole doesn't have"
        if None not in held:
            kept = f"the {what} {spans(held)}"
        return f"rank {rank} keeps {kept}, and needs {spans(needed)}"
    return None


def explain(name, result, inputs):
    size = len(result)
    if name == "rows":
        whole = inputs["gate_up"][0]
        said = describe_cut(result, whole, torch.stack(rows_of(whole, size, False, False)), "rows")
        return f"{said}: a part of the gate, and the same part of up"
    if name == "columns":
        whole = inputs["down"][0]
        right = torch.stack(whole.chunk(size, dim=1))
        said = describe_cut(result.mT, whole.T, right.mT, "columns")
        return f"{said}: those by which it multiplies what its rows of gate_up give"
    cause = ranks.describe_calls()
    exact = define(**inputs)[name].double()
    factor = (result * exact).sum() / exact.square().sum()
    if cause or relative_error(result, factor * exact) < 1e-4:
        return cause  # None: the judge has words for a factor
    if name == "y":
        return "the parts are right: look at Enter's and Leave's forward"
    if name == "dx":
        return "y and the gradients of the parts are right: look at Enter's backward"
    return "the parts and y are right: look at Leave's backward"


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
    names=dict.fromkeys(RESULTS, "rank row column"),
    dtypes=(torch.float32,),
    kernel=False,
    launch=ranks.on_each_rank(
        "x",
        "gate_up",
        "down",
        "dy",
        meanings={
            "object has no attribute 'shape'": "part_of_gate_up and part_of_down return one tensor each",
            "unsupported operand type(s) for @": "Enter's forward must return x",
            "cannot be multiplied": "Enter's forward passes x on whole",
            "object has no attribute 'backward'": "Leave's forward must return y, and all_reduce returns None",
            "ddown is None": "Leave's backward must return dy",
            "dx is None": "Enter's backward must return dx, and all_reduce returns None",
            "Mismatch in shape: grad_output": "y has the shape of a rank's part of the sum, because parts are added",
            "returned an invalid gradient": "a gradient has the shape of what forward got",
            "reduce_scatter_tensor got": "every rank needs the whole sum, which all_reduce gives",
            "all ranks must make the same calls": "every rank has x, y, dx and dy whole",
        },
    ),
    then=check_calls,
    explain=explain,
    suspects={
        "gate_up is cut as one matrix, so rank 0 has only gates: take a part of the gate and the same part of up": (
            lambda **given: define(**given, packed=True)
        ),
        "gate and up are exchanged: gate_up begins with the gate's rows": lambda **given: define(
            **given, exchanged=True
        ),
        **{
            "; ".join(FAULTS[name] for name in names): suspect_functions(names)
            for count in range(1, 1 + len(FAULTS))
            for names in itertools.combinations(FAULTS, count)
        },
        "x is divided by the number of ranks: Enter's forward passes it on": lambda x, **rest: without_parts(
            define(x, **rest, x_times=1 / len(x))
        ),
    },
    mistakes={
        "gate_up cut as one matrix": Mistake(
            "    gate, up = gate_up.chunk(2)\n    return torch.cat([gate.chunk(size)[rank], up.chunk(size)[rank]])\n",
            "    return gate_up.chunk(size)[rank]\n",
            "rows",
            says="rank 0 has only gates",
        ),
        "up before the gate": Mistake(
            "torch.cat([gate.chunk(size)[rank], up.chunk(size)[rank]])",
            "torch.cat([up.chunk(size)[rank], gate.chunk(size)[rank]])",
            "rows",
            says="gate_up begins with the gate's rows",
        ),
        "part 0 of gate_up on every rank": Mistake(
            "gate.chunk(size)[rank], up.chunk(size)[rank]",
            "gate.chunk(size)[0], up.chunk(size)[0]",
            "rows",
            says="rank 1 keeps the rows 0 to 2 and 6 to 8, and needs 3 to 5 and 9 to 11: a part of the gate, and the",
        ),
        "every other row": Mistake(
            "gate.chunk(size)[rank], up.chunk(size)[rank]",
            "gate[rank::size], up[rank::size]",
            "rows",
            says="rank 0 keeps the rows 0, 2, 4, 6, 8 and 10, and needs 0 to 2 and 6 to 8",
        ),
        "up of another rank": Mistake(
            "up.chunk(size)[rank]", "up.chunk(size)[rank - 1]", "rows", says="rank 0 keeps the rows 0 to 2 and 9 to 11"
        ),
        "part 0 of down on every rank": Mistake(
            "down.chunk(size, dim=1)[rank]",
            "down.chunk(size, dim=1)[0]",
            "columns",
            says="rank 1 keeps the columns 0 to 2, and needs 3 to 5: those by which it multiplies what its rows",
        ),
        "rows of down in the columns' shape": Mistake(
            "down.chunk(size, dim=1)[rank]",
            "down.reshape(size, len(down), -1)[rank]",
            "columns",
            says="rank 0 keeps columns that the whole doesn't have, and needs 0 to 2",
        ),
        "all parts in place of one": Mistake(
            "down.chunk(size, dim=1)[rank]",
            "down.chunk(size, dim=1)",
            None,
            "crash",
            says="part_of_gate_up and part_of_down return one tensor each",
        ),
        "parts for two ranks": Mistake(
            "down.chunk(size, dim=1)[rank]",
            "down.chunk(2, dim=1)[rank]",
            None,
            "crash",
            says="part_of_down must return a part of the shape [8, 3], not [8, 5]",
        ),
        "Enter and Leave exchanged": Mistake(
            "Enter.apply(x) @ gate_up.T).chunk(2, dim=1)\n    return Leave.apply(",
            "Leave.apply(x) @ gate_up.T).chunk(2, dim=1)\n    return Enter.apply(",
            "y",
            says="Leave's forward must sum over the ranks; every rank has only its own part of dx: Enter's backward "
            "must sum over the ranks; dy is summed, which every rank has whole: Leave's backward passes it on; x is "
            "summed, which every rank has whole: Enter's forward passes it on",
        ),
        "all four sum": Mistake(
            "    gate, up = (Enter.apply(x) @ gate_up.T).chunk(2, dim=1)\n"
            "    return Leave.apply((F.silu(gate) * up) @ down.T)\n",
            "    gate, up = (Enter.apply(Leave.apply(x)) @ gate_up.T).chunk(2, dim=1)\n"
            "    return Enter.apply(Leave.apply((F.silu(gate) * up) @ down.T))\n",
            "y",
            says="dy is summed, which every rank has whole: Leave's backward passes it on; x is summed",
        ),
        "nothing is summed": Mistake(
            "    gate, up = (Enter.apply(x) @ gate_up.T).chunk(2, dim=1)\n"
            "    return Leave.apply((F.silu(gate) * up) @ down.T)\n",
            "    gate, up = (x @ gate_up.T).chunk(2, dim=1)\n    return (F.silu(gate) * up) @ down.T\n",
            "y",
            says="Leave's forward must sum over the ranks; every rank has only its own part of dx: Enter's backward",
        ),
        "x divided": Mistake(
            "return x.view_as(x)",
            "return x / dist.get_world_size()",
            "y",
            says="x is divided by the number of ranks: Enter's forward passes it on",
        ),
        "a part of x": Mistake(
            "return x.view_as(x)",
            "return x.chunk(dist.get_world_size(), dim=1)[dist.get_rank()]",
            None,
            "crash",
            says="Enter's forward passes x on whole",
        ),
        "some rows of x": Mistake(
            "return x.view_as(x)",
            "return x.chunk(dist.get_world_size())[dist.get_rank()]",
            None,
            "mismatch",
            says="all ranks must make the same calls in the same order: every rank has x, y, dx and dy whole",
        ),
        "x twice": Mistake(
            "return x.view_as(x)", "return x + x.square()", "y", says="the parts are right: look at Enter's and Leave's"
        ),
        "Enter without x": Mistake(
            "        return x.view_as(x)\n", "        pass\n", None, "crash", says="Enter's forward must return x"
        ),
        "the largest part of y": Mistake(
            "dist.all_reduce(y)",
            "dist.all_reduce(y, op=dist.ReduceOp.MAX)",
            "y",
            says="all_reduce takes the MAX over the ranks: leave op= out, and it's the sum",
        ),
        "y in 16 bits": Mistake(
            "        dist.all_reduce(y)\n        return y\n",
            "        y = y.bfloat16()\n        dist.all_reduce(y)\n        return y.float()\n",
            "y",
            says="all_reduce gets bfloat16, which has about 3 digits: send float32",
        ),
        "rank 0's part of y": Mistake(
            "dist.all_reduce(y)",
            "dist.broadcast(y, 0)",
            "y",
            says="broadcast gives every rank what rank 0 has, and nothing of the others",
        ),
        "all_reduce's result": Mistake(
            "        dist.all_reduce(y)\n        return y\n",
            "        return dist.all_reduce(y)\n",
            None,
            "crash",
            says="Leave's forward must return y, and all_reduce returns None",
        ),
        "the parts of y one after another": Mistake(
            "        dist.all_reduce(y)\n        return y\n",
            "        ys = y.new_empty(dist.get_world_size() * len(y), y.shape[1])\n"
            "        dist.all_gather_into_tensor(ys, y)\n        return ys\n",
            None,
            "crash",
            says="y has the shape of a rank's part of the sum, because parts are added",
        ),
        "rows of y": Mistake(
            "        dist.all_reduce(y)\n        return y\n",
            "        mine = y.new_empty(1, y.shape[1])\n        dist.reduce_scatter_tensor(mine, y)\n"
            "        return mine\n",
            None,
            "tensor",
            says="every rank needs the whole sum, which all_reduce gives",
        ),
        "dy squared": Mistake(
            "        return dy\n", "        return dy.square()\n", "ddown", says="look at Leave's backward"
        ),
        "a part of dy": Mistake(
            "        return dy\n",
            "        return dy.chunk(2, dim=1)[0]\n",
            None,
            "crash",
            says="a gradient has the shape of what forward got",
        ),
        "Leave without dy": Mistake(
            "        return dy\n", "        pass\n", "ddown", "crash", says="Leave's backward must return dy"
        ),
        "Enter without dx": Mistake(
            "        dist.all_reduce(dx)\n        return dx\n",
            "        return dist.all_reduce(dx)\n",
            "dx",
            "crash",
            says="Enter's backward must return dx, and all_reduce returns None",
        ),
        "dx squared": Mistake(
            "        dist.all_reduce(dx)\n        return dx\n",
            "        dist.all_reduce(dx)\n        return dx.square()\n",
            "dx",
            says="y and the gradients of the parts are right: look at Enter's backward",
        ),
        "different calls meet": Mistake(
            "        dist.all_reduce(dx)\n        return dx\n\n\nclass Leave",
            "        if dist.get_rank() == 0:\n            dist.all_reduce(dx)\n        else:\n"
            "            dist.all_reduce(dx.square())\n        return dx\n\n\nclass Leave",
            "dx",
            says="call 2 is in line 32 on rank 0, in line 34 on rank 1: different calls of the ranks met",
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
        "y not summed": Mistake("        dist.all_reduce(y)\n", "", "y", says="Leave's forward must sum"),
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
