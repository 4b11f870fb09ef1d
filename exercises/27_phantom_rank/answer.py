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
    weights = of_all_ranks(weights)
    batch = of_all_ranks(batch)
    own = of_all_ranks(own)
    averaged = of_all_ranks(averaged)
    same_weights = (weights == weights[0]).all()
    mean = own.double().mean(0)
    right_mean = ((averaged - mean).abs() <= 1e-5 * mean.abs().max()).all()
    other_batches = all(not torch.equal(a, b) for i, a in enumerate(batch) for b in batch[:i])
    return bool(same_weights and right_mean and other_batches)


def run(weights, batch, own, averaged):
    """Return is_sound of each run of the inputs, [runs, ...] each."""
    found = [is_sound(*one) for one in zip(weights, batch, own, averaged, strict=True)]
    return {"found": torch.tensor(found, dtype=weights.dtype)}
