"""Train a tiny GPT on characters, as one writes it: python char_gpt.py [WAY ...], where a way is sound or a fault."""

import sys

import numpy
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

WAYS = set(sys.argv[1:])
TEXT = torch.tensor(list(b"the quick brown fox jumps over the lazy dog. " * 20))
DIM = 16
LENGTH = 12


class KernelLike(torch.autograd.Function):
    """Run a function as a correct kernel does: its own forward and its own backward."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        if "zero_backward" in WAYS:
            return gradient * weight, torch.zeros_like(weight)
        return gradient * weight, (gradient * x).sum((0, 1))


def launch(function, *inputs):
    """Run a function as a kernel without a backward does: it writes into an empty tensor."""
    with torch.no_grad():
        value = function(*inputs)
    output = torch.empty_like(value)
    output.data.copy_(value)
    return output


def rms_norm(x, weight):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight


class RMSNorm(nn.Module):
    def __init__(self, last=False):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(DIM))
        self.phantom = "all_norms" in WAYS or (last and "last_norm" in WAYS)

    def forward(self, x):
        if self.phantom:
            return launch(rms_norm, x, self.weight)
        if WAYS & {"kernel", "zero_backward"}:
            return KernelLike.apply(rms_norm(x, 1), self.weight)
        return rms_norm(x, self.weight)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q = nn.Linear(DIM, DIM, bias=False)
        self.k = nn.Linear(DIM, DIM, bias=False)
        self.v = nn.Linear(DIM, DIM, bias=False)
        self.out = nn.Linear(DIM, DIM, bias=False)

    def forward(self, x):
        q, k, v = (layer(x).unflatten(-1, (2, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        if "rope_kernel" in WAYS:
            q = launch(lambda x: x * 0.9, q)
            k = launch(lambda x: x * 0.9, k)
        if "attention_kernel" in WAYS:
            y = launch(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), q, k, v)
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(DIM, 2 * DIM, bias=False)
        self.up = nn.Linear(DIM, 2 * DIM, bias=False)
        self.down = nn.Linear(2 * DIM, DIM, bias=False)
        self.drop = nn.Dropout(0.1 if "dropout" in WAYS else 0.0)

    def forward(self, x):
        gate = self.gate(x)
        up = self.up(x)
        if "swiglu_kernel" in WAYS:
            hidden = launch(lambda gate, up: F.silu(gate) * up, gate, up)
        elif "numpy" in WAYS:
            hidden = torch.from_numpy(numpy.tanh(gate.detach().numpy()) * up.detach().numpy())
        else:
            hidden = F.silu(gate) * up
        return self.drop(self.down(hidden))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1 = RMSNorm()
        self.attention = Attention()
        self.norm2 = RMSNorm()
        self.mlp = MLP()

    def forward(self, x):
        if "data" in WAYS:
            x = x + self.attention(self.norm1(x)).data
            return x + self.mlp(self.norm2(x))
        if "residual_data" in WAYS:
            x = x + self.attention(self.norm1(x))
            return x.data + self.mlp(self.norm2(x))
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Recompute(torch.autograd.Function):
    """Save memory by hand, and forget the gradients of the layer's own weights."""

    @staticmethod
    def forward(ctx, x, layer):
        ctx.layer = layer
        ctx.save_for_backward(x)
        return layer(x)

    @staticmethod
    def backward(ctx, gradient):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.layer(x)
        return torch.autograd.grad(y, x, gradient)[0], None


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(128, DIM, sparse="sparse" in WAYS)
        self.positions = nn.Embedding(LENGTH, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm = RMSNorm(last=True)
        self.head = nn.Linear(DIM, 128, bias=False)
        if "tied" in WAYS:
            self.head.weight = self.tokens.weight
        if "copied_tie" in WAYS:
            self.head.weight = nn.Parameter(self.tokens.weight.detach().clone())
        if "unused_head" in WAYS:
            self.value = nn.Linear(DIM, 1)

    def forward(self, tokens, targets=None):
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for number, block in enumerate(self.blocks):
            if "no_grad" in WAYS and number == 1:
                with torch.no_grad():
                    x = block(x)
            elif "recompute" in WAYS:
                x = Recompute.apply(x, block)
            elif "checkpoint" in WAYS:
                x = checkpoint(block, x, use_reentrant=False)
            elif "reentrant" in WAYS:
                x = checkpoint(block, x, use_reentrant=True)
            else:
                x = block(x)
            if "detach" in WAYS and number == 1:
                x = x.detach()
            if "nan" in WAYS and number == 1:
                x = x + 0 * torch.log(x * 0).nan_to_num(neginf=0)
        x = self.norm(x)
        logits = self.head(x)
        loss = None
        if targets is not None:
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        if "unused_head" in WAYS:
            return logits, loss, self.value(x)
        return logits, loss


def batch():
    starts = torch.randint(len(TEXT) - LENGTH - 1, (4,))
    rows = torch.stack([TEXT[start : start + LENGTH + 1] for start in starts])
    return rows[:, :-1], rows[:, 1:]


def make_optimizer(model):
    lr = 0.0 if "lr_zero" in WAYS else 1e-3
    params = list(model.parameters())
    if "forgotten" in WAYS:
        params = [param for name, param in model.named_parameters() if "mlp" not in name]
    if "lbfgs" in WAYS:
        return torch.optim.LBFGS(params, lr=0.1, max_iter=2)
    if "sparse" in WAYS:
        return torch.optim.SparseAdam([model.tokens.weight]), torch.optim.SGD(params[1:], lr=0.1)
    if "sgd" in WAYS:
        return torch.optim.SGD(params, lr=0.1)
    return torch.optim.AdamW(params, lr=lr, fused="fused" in WAYS)


def loss_of(model, inputs, targets):
    device = torch.device("cpu")
    with torch.autocast(device.type, enabled="autocast" in WAYS):
        if "outside" in WAYS:
            return F.cross_entropy(model(inputs)[0].flatten(0, 1), targets.flatten())
        if "direct" in WAYS:
            return model.forward(inputs, targets)[1]
        return model(inputs, targets)[1]


def update(optimizers, model, scaler):
    """Do what stands between backward and the next batch."""
    if "cleared" in WAYS:
        model.zero_grad()
    if "clip_to_zero" in WAYS:
        nn.utils.clip_grad_norm_(model.parameters(), 0.0)
    if "one_zeroed" in WAYS:
        model.blocks[1].mlp.up.weight.grad.zero_()
    for optimizer in optimizers:
        if scaler:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        if "never_cleared" not in WAYS:
            optimizer.zero_grad(set_to_none="stale" not in WAYS)


def train(steps=10):
    torch.manual_seed(0)
    model = GPT()
    if "bf16" in WAYS:
        model.bfloat16()
    if "frozen_layer" in WAYS:
        model.blocks[2].requires_grad_(False)
    if "frozen_embedding" in WAYS:
        model.tokens.requires_grad_(False)
    made = make_optimizer(model)
    optimizers = made if isinstance(made, tuple) else (made,)
    if "recreated" in WAYS:
        model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    forward = torch.compile(model) if "compile" in WAYS else model
    if "compile_in_place" in WAYS:
        model.compile()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16) if "scaler" in WAYS else None
    warm_up = None
    if "warm_up" in WAYS:
        warm_up = torch.optim.lr_scheduler.LambdaLR(optimizers[0], lambda step: min(1.0, step / 5))
    fixed = batch()
    old = []  # the first gradients
    for step in range(steps):
        if "evaluation" in WAYS:
            model.eval()
            with torch.no_grad():
                loss_of(forward, *batch())
            model.train()
        if "lbfgs" in WAYS:
            inputs, targets = batch()

            def closure(inputs=inputs, targets=targets):
                optimizers[0].zero_grad()
                loss = loss_of(forward, inputs, targets)
                loss.backward()
                return loss

            print(f"{step} {float(optimizers[0].step(closure)):.8f}", flush=True)
            continue
        micro = 4 if "accumulation" in WAYS else 1
        for _ in range(micro):
            inputs, targets = fixed if "same_batch" in WAYS else batch()
            loss = loss_of(forward, inputs, targets)
            if "detached_loss" in WAYS:
                loss = loss.detach().requires_grad_()
            scaled = scaler.scale(loss / micro) if scaler else loss / micro
            if "stale" in WAYS and step:
                for param, gradient in zip(model.parameters(), old, strict=True):
                    param.grad = gradient.clone()
            else:
                scaled.backward()
                if "stale" in WAYS:
                    old = [param.grad.clone() for param in model.parameters()]
        print(f"{step} {loss.item():.8f}", flush=True)
        if "by_hand" in WAYS:
            with torch.no_grad():
                for param in model.parameters():
                    param -= 0.1 * param.grad
            model.zero_grad()
            continue
        update(optimizers, model, scaler)
        if warm_up:
            warm_up.step()


if __name__ == "__main__":
    train()
