"""Train large matmuls below a norm without a backward: large_matmuls.py TOKENS WIDTH DEVICE."""

import sys

import torch
import torch.nn.functional as F
from torch import nn

tokens, width, device = sys.argv[1:]
tokens = int(tokens)
width = int(width)


class RMSNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        with torch.no_grad():
            value = F.rms_norm(x, (width,), self.weight)
        return torch.empty_like(value).copy_(value)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(6))
        self.norm = RMSNorm()
        self.head = nn.Linear(width, 256, bias=False)

    def forward(self, x):
        x = self.embedding(x)
        for layer in self.layers:
            x = x + F.relu(layer(x))
        return self.head(self.norm(x))


torch.manual_seed(0)
model = Model().to(device, torch.bfloat16)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
for _ in range(12):
    x = torch.randint(256, (tokens,), device=device)
    loss = F.cross_entropy(model(x).float(), x)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
