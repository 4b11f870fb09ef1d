"""Exercise 27: a test that finds a rank which does not take part."""

import torch
import torch.distributed as dist


def of_all_ranks(x):
    """Return x of every rank, [ranks, *x.shape]. Every rank must call it."""
    size = dist.get_world_size()
    found = x.new_empty(size * len(x), *x.shape[1:])
    dist.all_gather_into_tensor(found, x)
    return found.view(size, *x.shape)


def is_sound(weights, batch, own, averaged):
    """Return, the same on every rank, True if these ranks train as one.

    weights [n]; batch [B] of tokens; own [n], the gradient of that batch; averaged [n], what the optimizer gets.
    """
    # TODO: return True or False
    # end of TODO


def run(weights, batch, own, averaged):
    """Return is_sound of each run of the inputs, [runs, ...] each."""
    found = [is_sound(*one) for one in zip(weights, batch, own, averaged, strict=True)]
    return {"found": torch.tensor(found, dtype=weights.dtype)}
