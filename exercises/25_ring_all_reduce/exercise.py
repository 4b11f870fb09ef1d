"""Exercise 25: an all-reduce made of messages between neighbours."""

import torch
import torch.distributed as dist


def exchange(sent, right, received, left):
    """Send one tensor to the right while another arrives from the left; return when both have arrived."""
    # TODO: start both messages in one batch, and wait for both
    # end of TODO


def ring_all_reduce(x):
    """Replace x [n] on every rank by its sum over all ranks. n is a multiple of their number."""
    rank = dist.get_rank()
    size = dist.get_world_size()
    left = (rank - 1) % size
    right = (rank + 1) % size
    parts = list(x.chunk(size))  # views: what you write to a part is in x
    received = torch.empty_like(parts[0])
    # TODO: size - 1 exchanges in which every rank passes a part on and adds what arrives to another one, then
    # size - 1 exchanges in which the finished parts go round
    # end of TODO


def run(x):
    """Return the sum over all ranks of x [n]."""
    total = x.clone()
    ring_all_reduce(total)
    return {"sum": total}
