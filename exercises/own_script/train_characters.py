"""Train a small GPT on the characters of this file: python train_characters.py --steps 301"""

import argparse
import pathlib

import torch
import torch.nn.functional as F
from torch import nn

B, T, C, H = 16, 64, 64, 4  # batch, tokens, channels, heads


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1 = nn.RMSNorm(C)
        self.qkv = nn.Linear(C, 3 * C)
        self.out = nn.Linear(C, C)
        self.norm2 = nn.RMSNorm(C)
        self.mlp = nn.Sequential(nn.Linear(C, 4 * C), nn.GELU(), nn.Linear(4 * C, C))

    def forward(self, x):  # [B, T, C]
        q, k, v = self.qkv(self.norm1(x)).view(B, T, 3, H, C // H).permute(2, 0, 3, 1, 4)  # [B, H, T, C / H]
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(B, T, C))
        return x + self.mlp(self.norm2(x))


class Recompute(torch.autograd.Function):
    """Save memory: keep only a layer's input, and compute the layer again in backward."""

    @staticmethod
    def forward(ctx, x, layer):
        ctx.layer = layer
        ctx.save_for_backward(x)
        return layer(x)

    @staticmethod
    def backward(ctx, grad_y):
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.layer(x)
        (grad_x,) = torch.autograd.grad(y, x, grad_y)
        return grad_x, None


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(128, C)
        self.positions = nn.Embedding(T, C)
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.norm = nn.RMSNorm(C)
        self.head = nn.Linear(C, 128)

    def forward(self, tokens):  # [B, T]
        x = self.tokens(tokens) + self.positions.weight
        for layer in self.layers:
            x = Recompute.apply(x, layer)
        return self.head(self.norm(x))


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=301)
options = parser.parse_args()
torch.manual_seed(0)
text = torch.tensor(list(pathlib.Path(__file__).read_bytes()))
model = GPT()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for step in range(options.steps):
    starts = torch.randint(len(text) - T, (B, 1))
    batch = text[starts + torch.arange(T)]  # [B, T]
    logits = model(batch)
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 20 == 0:
        print(f"step {step:3}  loss {loss.item():.4f}", flush=True)
