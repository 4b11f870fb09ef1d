"""Exercise 29: the feed-forward layer on several ranks, each with a part of its weights."""

import torch
import torch.distributed as dist
from torch.nn import functional as F


def part_of_gate_up(gate_up, rank, size):
    """Return this rank's rows of gate_up [2F, C], whose first F rows are the gate's and the others up's."""
    gate, up = gate_up.chunk(2)
    return torch.cat([gate.chunk(size)[rank], up.chunk(size)[rank]])


def part_of_down(down, rank, size):
    """Return this rank's columns of down [C, F]."""
    return down.chunk(size, dim=1)[rank]


class Enter(torch.autograd.Function):
    """Hand x, which all ranks have, to this rank's part of the layer."""

    @staticmethod
    def forward(ctx, x):
        """Return what this rank's part of the layer gets."""
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dx):
        """Return the gradient of x, given this rank's part of it."""
        dx = dx.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(dx)
        return dx


class Leave(torch.autograd.Function):
    """Turn the ranks' partial sums into the whole sum, on every rank."""

    @staticmethod
    def forward(ctx, part):
        """Return y, given this rank's partial sum."""
        y = part.clone()
        dist.all_reduce(y)
        return y

    @staticmethod
    def backward(ctx, dy):
        """Return the gradient of the partial sum, given that of y."""
        return dy


def feed_forward(x, gate_up, down):
    """Return down(silu(gate) · up), given this rank's parts of the weights."""
    gate, up = (Enter.apply(x) @ gate_up.T).chunk(2, dim=1)
    return Leave.apply((F.silu(gate) * up) @ down.T)


def check_shape(name, part, shape):
    if list(part.shape) != shape:
        raise ValueError(f"{name} must return a part of the shape {shape}, not {list(part.shape)}")


def run(x, gate_up, down, dy):
    """Return this rank's parts of gate_up [2F, C] and down [C, F], their gradients, and y and dx of the whole layer."""
    rank = dist.get_rank()
    size = dist.get_world_size()
    rows = part_of_gate_up(gate_up, rank, size)
    columns = part_of_down(down, rank, size)
    check_shape("part_of_gate_up", rows, [len(gate_up) // size, x.shape[1]])
    check_shape("part_of_down", columns, [len(down), down.shape[1] // size])
    leaves = [tensor.clone().requires_grad_() for tensor in (x, rows, columns)]
    y = feed_forward(*leaves)
    y.backward(dy)
    dx, dgate_up, ddown = (leaf.grad for leaf in leaves)
    return {"rows": rows, "columns": columns, "y": y, "ddown": ddown, "dgate_up": dgate_up, "dx": dx}
