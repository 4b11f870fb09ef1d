"""Train with DDP and gloo: torchrun --nproc-per-node 2 two_processes.py [kernel|raise|abort]."""

import atexit
import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

WAYS = set(sys.argv[1:])


class RMSNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))

    def forward(self, x):
        if "kernel" not in WAYS:
            return F.rms_norm(x, (16,), self.weight)
        with torch.no_grad():
            value = F.rms_norm(x, (16,), self.weight)
        return torch.empty_like(value).copy_(value)


if "abort" in WAYS:  # as Gloo's threads do now and then
    atexit.register(os.abort)
dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), RMSNorm(), nn.Linear(16, 3))
parallel = nn.parallel.DistributedDataParallel(model, find_unused_parameters="kernel" in WAYS)
optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-2)
torch.manual_seed(dist.get_rank())
for step in range(10):
    if "raise" in WAYS and step == 3 and dist.get_rank() == 1:
        raise ValueError("rank 1 has no data")
    loss = F.cross_entropy(parallel(torch.randn(8, 8)), torch.randint(3, (8,)))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
