"""Train as other fields do: python other_loops.py gan|wgan|dqn|experts|dense_experts|lora|ema|convolution."""

import copy
import sys

import torch
import torch.nn.functional as F
from torch import nn

STEPS = 10


def mlp(*sizes):
    layers = []
    for before, after in zip(sizes, sizes[1:], strict=False):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def gan(critic_steps=1):
    generator = mlp(4, 16, 2)
    critic = mlp(2, 16, 1)
    for_generator = torch.optim.Adam(generator.parameters(), lr=1e-3)
    for_critic = torch.optim.Adam(critic.parameters(), lr=1e-3)
    for _ in range(2 * STEPS):
        for _ in range(critic_steps):
            real = torch.randn(8, 2)
            fake = generator(torch.randn(8, 4)).detach()
            loss = F.softplus(-critic(real)).mean() + F.softplus(critic(fake)).mean()
            for_critic.zero_grad()
            loss.backward()
            for_critic.step()
        loss = F.softplus(-critic(generator(torch.randn(8, 4)))).mean()
        for_generator.zero_grad()
        loss.backward()
        for_generator.step()


def wgan():
    gan(critic_steps=5)


def dqn():
    online = mlp(4, 16, 2)
    target = copy.deepcopy(online)
    optimizer = torch.optim.Adam(online.parameters(), lr=1e-3)
    for step in range(STEPS):
        state = torch.randn(8, 4)
        action = torch.randint(2, (8, 1))
        with torch.no_grad():
            goal = torch.randn(8) + 0.9 * target(torch.randn(8, 4)).max(1).values
        loss = F.smooth_l1_loss(online(state).gather(1, action).squeeze(1), goal)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 4 == 3:
            target.load_state_dict(online.state_dict())


class Experts(nn.Module):
    """Send each token to one of eight experts; with so few tokens some stay idle."""

    def __init__(self, dense=False):
        super().__init__()
        self.dense = dense
        self.router = nn.Linear(8, 8)
        self.experts = nn.ModuleList(mlp(8, 16, 8) for _ in range(8))
        self.head = nn.Linear(8, 4)
        with torch.no_grad():
            self.router.bias[:4] -= 100.0

    def forward(self, x):
        weight, chosen = self.router(x).softmax(-1).max(-1)
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            if self.dense:
                y = y + expert(x) * (weight * (chosen == number))[:, None]
            elif (chosen == number).any():
                y = y.index_put((chosen == number,), expert(x[chosen == number]) * weight[chosen == number, None])
        return self.head(x + y)


def experts(dense=False):
    model = Experts(dense)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(STEPS):
        x = torch.randn(6, 8)
        loss = F.cross_entropy(model(x), torch.randint(4, (6,)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def dense_experts():
    experts(dense=True)


class LoRA(nn.Module):
    def __init__(self, linear):
        super().__init__()
        self.linear = linear.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(2, linear.in_features))
        self.b = nn.Parameter(torch.zeros(linear.out_features, 2))

    def forward(self, x):
        return self.linear(x) + x @ self.a.T @ self.b.T


def lora():
    model = nn.Sequential(LoRA(nn.Linear(8, 16)), nn.ReLU(), LoRA(nn.Linear(16, 4)))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(STEPS):
        loss = F.cross_entropy(model(torch.randn(6, 8)), torch.randint(4, (6,)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def convolution():
    """Two optimizers, BatchNorm, a moving average of the weights, a DataLoader."""
    body = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten())
    model = nn.Sequential(body, nn.Linear(4 * 36, 3))
    average = torch.optim.swa_utils.AveragedModel(model)
    optimizers = [torch.optim.SGD(body.parameters(), lr=0.01), torch.optim.Adam(model[1].parameters(), lr=1e-3)]
    data = torch.utils.data.TensorDataset(torch.randn(80, 1, 8, 8), torch.randint(3, (80,)))
    for images, labels in torch.utils.data.DataLoader(data, batch_size=8, shuffle=True):
        loss = nn.CrossEntropyLoss()(model(images), labels)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        average.update_parameters(model)


if __name__ == "__main__":
    torch.manual_seed(0)
    globals()[sys.argv[1]]()
