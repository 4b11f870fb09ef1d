"""Exercise 25: an all-reduce made of messages between neighbours."""

import torch
import torch.distributed as dist


def exchange(sent, right, received, left):
    """Send one tensor to the right while another arrives from the left; return when both have arrived."""
    messages = [dist.P2POp(dist.isend, sent, right), dist.P2POp(dist.irecv, received, left)]
    for work in dist.batch_isend_irecv(messages):
        work.wait()


def ring_all_reduce(x):
    """Replace x [n] on every rank by its sum over all ranks. n is a multiple of their number."""
    rank = dist.get_rank()
    size = dist.get_world_size()
    left = (rank - 1) % size
    right = (rank + 1) % size
    parts = list(x.chunk(size))  # views: what you write to a part is in x
    received = torch.empty_like(parts[0])
    for step in range(size - 1):
        exchange(parts[(rank - step) % size], right, received, left)
        parts[(rank - step - 1) % size].add_(received)
    for step in range(size - 1):
        exchange(parts[(rank + 1 - step) % size], right, parts[(rank - step) % size], left)


def run(x):
    """Return the sum over all ranks of x [n]."""
    total = x.clone()
    ring_all_reduce(total)
    return {"sum": total}
