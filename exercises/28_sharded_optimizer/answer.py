"""Exercise 28: AdamW whose state is spread over the ranks."""

import torch
import torch.distributed as dist


def adamw(weights, grad, m, v, step, lr=0.1, decay=0.1):
    """Run step number `step`, counted from 1, in place, as torch.optim.AdamW does with betas 0.9 and 0.999."""
    m.mul_(0.9).add_(0.1 * grad)
    v.mul_(0.999).add_(0.001 * grad * grad)
    weights.mul_(1 - lr * decay)
    weights.sub_(lr * (m / (1 - 0.9**step)) / ((v / (1 - 0.999**step)).sqrt() + 1e-8))


class ShardedAdamW:
    """Train weights [n], which every rank has; n is a multiple of the number of ranks."""

    def __init__(self, weights):
        self.weights = weights
        self.steps = 0
        rank = dist.get_rank()
        size = dist.get_world_size()
        self.part = weights.chunk(size)[rank]
        self.m = torch.zeros_like(self.part)
        self.v = torch.zeros_like(self.part)

    def step(self, grad):
        """Train on the mean over the ranks of grad [n]: each rank has the gradient of its own batch."""
        self.steps += 1
        mine = torch.empty_like(self.part)
        dist.reduce_scatter_tensor(mine, grad)
        adamw(self.part, mine / dist.get_world_size(), self.m, self.v, self.steps)
        dist.all_gather_into_tensor(self.weights, self.part)


def run(grads, start):
    """Train start [n] on grads [steps, n]; return the weights, this rank's part and moments, and its state's bytes.

    The part is returned as it is before the first step, when all numbers are those of start.
    """
    weights = start.clone()
    optimizer = ShardedAdamW(weights)
    part = optimizer.part.clone()
    for grad in grads:
        optimizer.step(grad.clone())
    memory = [tensor.untyped_storage() for tensor in vars(optimizer).values() if isinstance(tensor, torch.Tensor)]
    sizes = {storage.data_ptr(): storage.nbytes() for storage in memory}
    state_bytes = sum(sizes.values()) - weights.nbytes
    return {"part": part, "m": optimizer.m, "v": optimizer.v, "final": weights, "state_bytes": state_bytes}
