"""Train in one more way, sound or with the fault that is named: python more_loops.py LOOP [FAULT]."""

import copy
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

STEPS = 10
LOOP = sys.argv[1] if len(sys.argv) > 1 else ""
FAULT = sys.argv[2] if len(sys.argv) > 2 else "none"


def mlp(*sizes):
    layers = []
    for before, after in zip(sizes, sizes[1:], strict=False):
        layers += [nn.Linear(before, after), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def batch(size=8, features=4, classes=3):
    return torch.randn(size, features), torch.randint(classes, (size,))


def plain_steps(model, optimizer):
    for _ in range(STEPS):
        x, y = batch()
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def no_sync():
    """Accumulate gradients under no_sync of DDP, in a launch of one process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = nn.parallel.DistributedDataParallel(mlp(4, 8, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(STEPS):
        with model.no_sync():
            for _ in range(3):
                x, y = batch()
                (F.cross_entropy(model(x), y) / 4).backward()
        x, y = batch()
        (F.cross_entropy(model(x), y) / 4).backward()
        optimizer.step()
        if FAULT != "never_cleared":
            optimizer.zero_grad()
    dist.destroy_process_group()


def ema():
    """Evaluate with a moving average of the weights, in the model itself."""
    model = mlp(4, 8, 3)
    average = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(STEPS):
        x, y = batch()
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        if FAULT == "cleared":
            model.zero_grad()
        optimizer.step()
        with torch.no_grad():
            for old, new in zip(average.parameters(), model.parameters(), strict=True):
                old.lerp_(new, 0.1)
        trained = copy.deepcopy(model.state_dict())
        model.load_state_dict(average.state_dict())
        with torch.no_grad():
            model(x)
        model.load_state_dict(trained)


def every_second():
    """Step a second optimizer every second step, with what two steps accumulate."""
    body, head = mlp(4, 8, 8), nn.Linear(8, 3)
    fast = torch.optim.SGD(head.parameters(), lr=0.1)
    slow = torch.optim.Adam(body.parameters(), lr=1e-2)
    for step in range(2 * STEPS):
        x, y = batch()
        F.cross_entropy(head(body(x)), y).backward()
        fast.step()
        fast.zero_grad()
        if step % 2:
            slow.step()
            if FAULT != "never_cleared":
                slow.zero_grad()


def clip_value():
    model = mlp(4, 8, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        x, y = batch()
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.0 if FAULT == "to_zero" else 0.01)
        optimizer.step()


def warm_up():
    """Begin with a step at learning rate 0."""
    model = mlp(4, 8, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    warming = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, step / 4))
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    schedule = torch.optim.lr_scheduler.ChainedScheduler([warming, cosine])
    for _ in range(STEPS):
        x, y = batch()
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if FAULT != "forgotten":
            schedule.step()


class TiedAutoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 8) / 3)
        self.bias = nn.Parameter(torch.zeros(8))

    def forward(self, x):
        hidden = (x @ self.weight + self.bias).tanh()
        decoder = self.weight.detach() if FAULT == "half" else self.weight
        return hidden @ decoder.T


def tied():
    """Use one weight to encode and, transposed, to decode."""
    model = TiedAutoencoder()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(STEPS):
        x, _ = batch()
        loss = F.mse_loss(model(x), x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


class Mixture(nn.Module):
    """Send each token to its two best experts; the last one gets none."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(4, 4)
        self.up = nn.Parameter(torch.randn(4, 4, 8) / 2)
        self.down = nn.ModuleList(nn.Linear(8, 4) for _ in range(4))
        self.head = nn.Linear(4, 3)
        with torch.no_grad():
            self.router.bias[3] = -100.0

    def forward(self, x):
        probs = self.router(x).softmax(-1)
        if FAULT == "router":
            probs = probs.detach()
        weights, chosen = probs.topk(2)
        y = torch.zeros_like(x)
        for number, down in enumerate(self.down):
            rows, slot = (chosen == number).nonzero(as_tuple=True)
            part = down((x[rows] @ self.up[number]).relu())
            y = y.index_add(0, rows, part * weights[rows, slot, None])
        return self.head(x + y), probs


def mixture():
    model = Mixture()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(STEPS):
        x, y = batch()
        logits, probs = model(x)
        balance = 4 * probs.mean(0).square().sum()
        loss = F.cross_entropy(logits, y) + 0.01 * balance
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


class Cut(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.second = nn.Linear(8, 3)

    def forward(self, x):
        hidden = self.first(x).tanh()
        return self.second(hidden.detach() if FAULT == "cut" else hidden)


def fullgraph():
    """Compile model and loss together: no hook of the model runs."""
    model = Cut()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def loss_of(x, y):
        return F.cross_entropy(model(x), y)

    for _ in range(STEPS):
        loss = loss_of(*batch())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


class Checkpointed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.reentrant = reentrant
        self.blocks = nn.ModuleList(mlp(4, 8, 4) for _ in range(3))
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        for number, block in enumerate(self.blocks):
            if number or FAULT == "first":
                x = checkpoint(block, x, use_reentrant=self.reentrant)
            else:
                x = block(x)
        return self.head(x)


def checkpointed(reentrant=True):
    """Reentrant checkpointing needs an input with a gradient, which a first block does not have."""
    model = Checkpointed(reentrant)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    plain_steps(model, optimizer)


def not_reentrant():
    checkpointed(False)


def groups():
    """Update by a fused AdamW with groups, and by one that takes one tensor at a time."""
    model = mlp(4, 8, 8, 3)
    decayed = [param for param in model.parameters() if param.dim() > 1]
    others = [param for param in model.parameters() if param.dim() == 1]
    made = [{"params": decayed[1:], "weight_decay": 0.1, "lr": 0.0 if FAULT == "lr_of_a_group" else 1e-2}]
    made.append({"params": others, "weight_decay": 0.0})
    fused = torch.optim.AdamW(made, lr=1e-2, fused=True)
    single = torch.optim.AdamW(decayed[:1], lr=1e-2, foreach=False, amsgrad=True)
    for _ in range(STEPS):
        x, y = batch()
        loss = F.cross_entropy(model(x), y)
        for optimizer in (fused, single):
            optimizer.zero_grad()
        loss.backward()
        for optimizer in (fused, single):
            optimizer.step()


class Lion(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["average"] = torch.zeros_like(param)
                update = state["average"].lerp(param.grad, 0.1).sign()
                state["average"].lerp_(param.grad, 0.01)
                if FAULT == "rebound":
                    param = param - group["lr"] * update
                else:
                    param.add_(update, alpha=-group["lr"])


def own_optimizer():
    model = mlp(4, 8, 3)
    optimizer = Lion(model.parameters(), lr=1e-2)
    plain_steps(model, optimizer)


class SAM(torch.optim.Optimizer):
    """Take the gradient at the worst place nearby, with another optimizer inside."""

    def __init__(self, params, **options):
        super().__init__(params, {"rho": 0.05})
        self.inside = torch.optim.SGD(self.param_groups, **options)

    @torch.no_grad()
    def climb(self):
        params = [param for group in self.param_groups for param in group["params"]]
        norm = torch.stack([param.grad.norm() for param in params]).norm()
        for param in params:
            self.state[param]["old"] = param.clone()
            param.add_(param.grad * (0.05 / norm))
        if FAULT != "never_cleared":
            self.zero_grad()

    @torch.no_grad()
    def descend(self):
        for group in self.param_groups:
            for param in group["params"]:
                param.copy_(self.state[param]["old"])
        if FAULT == "no_step":
            return
        self.inside.step()

    @torch.no_grad()
    def step(self, closure):
        closure = torch.enable_grad()(closure)
        loss = closure()
        self.climb()
        closure()
        self.descend()
        return loss


def sam():
    model = mlp(4, 8, 3)
    optimizer = SAM(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(STEPS):
        x, y = batch()
        F.cross_entropy(model(x), y).backward()
        optimizer.climb()
        F.cross_entropy(model(x), y).backward()
        optimizer.descend()
        if FAULT != "never_cleared":
            optimizer.zero_grad()


def sam_closure():
    model = mlp(4, 8, 3)
    optimizer = SAM(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(STEPS):
        x, y = batch()

        def closure(x=x, y=y):
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        optimizer.step(closure)
        optimizer.zero_grad()


def gan():
    """Compute the fakes once; the critic's loss takes them detached."""
    generator, critic = mlp(4, 16, 2), mlp(2, 16, 1)
    for_generator = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.9))
    for_critic = torch.optim.Adam(critic.parameters(), lr=1e-3)
    for _ in range(STEPS):
        real, fake = torch.randn(8, 2), generator(torch.randn(8, 4))
        for_critic.zero_grad()
        F.softplus(-critic(real)).mean().backward()
        F.softplus(critic(fake.detach())).mean().backward()
        for_critic.step()
        for_generator.zero_grad()
        F.softplus(-critic(fake.detach() if FAULT == "detach" else fake)).mean().backward()
        for_generator.step()


class SimSiam(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8))
        self.predictor = mlp(8, 4, 8)

    def forward(self, first, second):
        z1, z2 = self.encoder(first), self.encoder(second)
        p1, p2 = self.predictor(z1), self.predictor(z2)
        if FAULT == "wrong_side":
            return p1.detach(), p2.detach(), z1, z2
        return p1, p2, z1.detach(), z2.detach()


def simsiam():
    """Contrast two views; the target has a stop-gradient."""
    model = SimSiam()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _ in range(STEPS):
        x, _ = batch(16)
        p1, p2, z1, z2 = model(x + 0.1 * torch.randn_like(x), x + 0.1 * torch.randn_like(x))
        loss = -(F.cosine_similarity(p1, z2).mean() + F.cosine_similarity(p2, z1).mean()) / 2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def byol():
    """Follow a teacher that is a moving average of the student."""
    student, predictor = mlp(4, 8, 8), mlp(8, 8)
    teacher = copy.deepcopy(student).requires_grad_(False)
    optimizer = torch.optim.AdamW([*student.parameters(), *predictor.parameters()], lr=1e-2)
    for _ in range(STEPS):
        x, _ = batch(16)
        seen = student(x + 0.1 * torch.randn_like(x))
        goal = teacher(x + 0.1 * torch.randn_like(x))
        if FAULT == "detached_student":
            seen = seen.detach()
        loss = 2 - 2 * F.cosine_similarity(predictor(seen), goal).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for old, new in zip(teacher.parameters(), student.parameters(), strict=True):
                old.lerp_(new, 0.01)


def float16():
    """Scale the loss for 16-bit activations, on a CPU."""
    model = mlp(4, 8, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", enabled=FAULT != "underflow")
    for _ in range(STEPS):
        x, y = batch()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.cross_entropy(model(x), y) * 1e-7
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()


def in_backward():
    """Step an optimizer per parameter as soon as its gradient is there."""
    model = mlp(4, 8, 3)
    optimizers = {param: torch.optim.AdamW([param], lr=1e-2) for param in model.parameters()}

    def update(param):
        optimizers[param].step()
        if FAULT != "never_cleared":
            optimizers[param].zero_grad()

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(update)
    for _ in range(STEPS):
        x, y = batch()
        F.cross_entropy(model(x), y).backward()


def recurrent():
    """Carry an LSTM's state from batch to batch."""
    cell = nn.LSTM(4, 8, num_layers=2, batch_first=True)
    head = nn.Linear(8, 3)
    optimizer = torch.optim.RMSprop([*cell.parameters(), *head.parameters()], lr=1e-2)
    state = None
    for step in range(STEPS):
        if FAULT == "same_batch":
            state = None
        if step == 0 or FAULT != "same_batch":
            x = torch.randn(8, 5, 4)
            y = torch.randint(3, (8,))
        output, state = cell(x, state)
        state = tuple(part.detach() for part in state)
        loss = F.cross_entropy(head(output[:, -1]), y)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(cell.parameters(), 0.5)
        optimizer.step()


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(4, 8)
        self.mean = nn.Linear(8, 2)
        self.spread = nn.Linear(8, 2)
        self.decoder = mlp(2, 8, 4)

    def forward(self, x):
        hidden = self.encoder(x).tanh()
        mean, spread = self.mean(hidden), self.spread(hidden)
        noise = torch.randn_like(mean)
        z = mean + noise * (spread.detach() if FAULT == "detached_noise" else spread).exp()
        return self.decoder(z), mean, spread


def vae():
    model = VAE()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(STEPS):
        x, _ = batch()
        y, mean, spread = model(x)
        loss = F.mse_loss(y, x) + 0.1 * (mean.square() + (2 * spread).exp() - 2 * spread).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def normed():
    """Train what weight norm and spectral norm make of weights."""
    first = nn.utils.parametrizations.weight_norm(nn.Linear(4, 8))
    second = nn.Linear(8, 3)
    params = [*first.parameters(), *second.parameters()]  # of the second before it has a norm
    if FAULT == "before":  # weight norm makes two parameters of one, spectral norm keeps it
        second = nn.utils.parametrizations.weight_norm(second)
    else:
        second = nn.utils.parametrizations.spectral_norm(second)
    model = nn.Sequential(first, nn.Tanh(), second)
    optimizer = torch.optim.AdamW(params, lr=1e-2)
    plain_steps(model, optimizer)


def distilled():
    """Learn from a teacher that nobody froze; its forward has no gradient."""
    teacher, student = mlp(4, 16, 3), mlp(4, 8, 3)
    teacher.eval()
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-2)
    if FAULT == "teacher":
        optimizer = torch.optim.AdamW(teacher.parameters(), lr=1e-2)
    for _ in range(STEPS):
        x, y = batch()
        with torch.no_grad():
            goal = teacher(x)
        logits = student(x)
        loss = F.kl_div(logits.log_softmax(-1), goal.softmax(-1), reduction="batchmean") + F.cross_entropy(logits, y)
        student.zero_grad()
        loss.backward()
        optimizer.step()


def ppo():
    """Take several epochs over what one policy collected."""
    model = mlp(4, 16, 3)
    actor, critic = nn.Linear(3, 2), nn.Linear(3, 1)
    params = [*model.parameters(), *actor.parameters(), *critic.parameters()]
    optimizer = torch.optim.Adam(params, lr=1e-3, eps=1e-5)
    for _ in range(STEPS):
        states = torch.randn(32, 4)
        with torch.no_grad():
            policy = torch.distributions.Categorical(logits=actor(model(states)))
            actions = policy.sample()
            old = policy.log_prob(actions)
            gain = torch.randn(32)
        for _ in range(2):
            for rows in torch.randperm(32).split(8):
                hidden = model(states[rows])
                policy = torch.distributions.Categorical(logits=actor(hidden))
                ratio = (policy.log_prob(actions[rows]) - old[rows]).exp()
                if FAULT == "constant_ratio":
                    ratio = ratio.detach()
                loss = -torch.min(ratio * gain[rows], ratio.clamp(0.8, 1.2) * gain[rows]).mean()
                loss = loss + 0.5 * (critic(hidden).squeeze(-1) - gain[rows]).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()


def slow_model():
    """Step a temperature with every micro-batch, and the model with every fourth."""
    model = mlp(4, 8, 3)
    temperature = nn.Parameter(torch.ones(()))
    fast = torch.optim.SGD([temperature], lr=1e-2)
    slow = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(4 * STEPS):
        x, y = batch()
        F.cross_entropy(model(x) * temperature, y).backward()
        fast.step()
        fast.zero_grad()
        if step % 4 == 3:
            if FAULT == "cleared":
                slow.zero_grad()
            slow.step()
            slow.zero_grad()


def masters():
    """Update float32 copies of 16-bit weights by hand."""
    model = mlp(4, 8, 3).bfloat16()
    params = list(model.parameters())
    if FAULT == "forgotten":
        params = params[1:]
    copies = [param.detach().float().requires_grad_() for param in params]
    optimizer = torch.optim.AdamW(copies, lr=1e-2)
    for _ in range(STEPS):
        x, y = batch()
        F.cross_entropy(model(x.bfloat16()).float(), y).backward()
        for master, param in zip(copies, params, strict=True):
            master.grad = param.grad.float()
        model.zero_grad()
        optimizer.step()
        with torch.no_grad():
            for master, param in zip(copies, params, strict=True):
                param.copy_(master)


def first_order():
    """Learn to learn: an inner optimizer makes two steps and is gone."""
    model = mlp(4, 8, 3)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(2 * STEPS):
        inner = copy.deepcopy(model)
        inside = torch.optim.SGD(inner.parameters(), lr=0.1)
        for number in range(3):
            x, y = batch()
            inside.zero_grad()
            F.cross_entropy(inner(x), y).backward()
            if number < 2:
                inside.step()
        for param, learned in zip(model.parameters(), inner.parameters(), strict=True):
            param.grad = None if FAULT == "no_gradient" else learned.grad
        optimizer.step()


def lazy():
    """Let the first batch tell the sizes of the layers."""
    model = nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.LazyLinear(3))
    x, y = batch()
    model(x)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(STEPS):
        if FAULT != "same_batch":
            x, y = batch()
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


class Listed(nn.Module):
    """Keep layers in a Python list, in which PyTorch does not find them."""

    def __init__(self):
        super().__init__()
        self.layers = [mlp(4, 4) for _ in range(3)]
        self.head = nn.Linear(4, 3)
        self.unused = nn.LazyLinear(3)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh()
        return self.head(x.detach() if FAULT == "cut" else x)


def listed():
    model = Listed()
    params = list(model.head.parameters())
    if FAULT != "forgotten":
        params += [param for layer in model.layers for param in layer.parameters()]
    optimizer = torch.optim.AdamW(params, lr=1e-2)
    plain_steps(model, optimizer)


if __name__ == "__main__":
    torch.manual_seed(0)
    globals()[LOOP]()
