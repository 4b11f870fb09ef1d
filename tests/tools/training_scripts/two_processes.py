"""Train with DDP and gloo: torchrun --nproc-per-node 2 two_processes.py [kernel|raise|abort|module|sharded]."""

import atexit
import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

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
if "sharded" in WAYS:  # the last weight has one row, which the first process has
    model[3] = nn.Linear(16, 1)
    parallel = fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
else:
    parallel = nn.parallel.DistributedDataParallel(model, find_unused_parameters="kernel" in WAYS)
forward = model if "module" in WAYS else parallel
optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-2)
torch.manual_seed(dist.get_rank())
for step in range(10):
    if "raise" in WAYS and step == 3 and dist.get_rank() == 1:
        raise ValueError("rank 1 has no data")
    output = forward(torch.randn(8, 8))
    loss = F.cross_entropy(output, torch.randint(output.shape[1], (8,)))
    if "sharded" in WAYS:
        loss = output.square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
