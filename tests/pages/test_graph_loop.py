"""The graph loop of version 4's page trains as an eager loop does, with a GPU and on the tape."""

import re
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from common.versions import REPOSITORY, SCRIPTS

sys.path.insert(0, str(REPOSITORY / "exercises"))
from graphs import Tape

PAGE = SCRIPTS[4].parent / "README.md"
SECTION = PAGE.read_text().partition("### In your own script")[2]
LOOP, ON_TAPE, START, *_ = re.findall(r"^```python\n(.*?)^```", SECTION, re.DOTALL | re.MULTILINE)
CAPTURE = re.compile(r"graph = torch.cuda.CUDAGraph.*?    loss = step\(\)\n", re.DOTALL)
TAPE = CAPTURE.sub(ON_TAPE, LOOP).replace('"cuda"', '"cpu"')


def rate(i):
    return 0.01 * 0.5**i


def start(device):
    """Return a model with buffers, and batches of one shape."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8), nn.GELU(), nn.Linear(8, 3)).to(device)
    return model, [(torch.randn(5, 4, device=device), torch.randint(3, (5,), device=device)) for _ in range(4)]


def eager(device):
    """Train as the loop does, with learning rates that are numbers; return losses, weights and buffers."""
    model, batches = start(device)
    optimizer = torch.optim.AdamW(model.parameters())
    losses = []
    for i, (x, labels) in enumerate(batches):
        optimizer.param_groups[0]["lr"] = rate(i)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return {"losses": torch.stack(losses), **model.state_dict()}


def looped(loop, device):
    """Run a loop that a page prints; return losses, weights and buffers."""
    model, batches = start(device)
    losses = []
    exec(loop, {"torch": torch, "F": F, "model": model, "batches": batches, "rate": rate, "losses": losses})
    return {"losses": torch.stack(losses), **model.state_dict()}


@pytest.mark.parametrize(
    ("loop", "device"), [(TAPE, "cpu"), pytest.param(LOOP, "cuda", marks=pytest.mark.gpu)], ids=["tape", "graph"]
)
def test_the_loop_of_the_page_trains_as_an_eager_one_does(loop, device):
    torch.testing.assert_close(looped(loop, device), eager(device))


@pytest.mark.parametrize(
    "line",
    [
        "model.load_state_dict(weights)\n",
        "        tensor.zero_()\n",
        "    x.copy_(new_x)\n",
        "    labels.copy_(new_labels)\n",
        "    lr.fill_(rate(i))\n",
        "    graph.replay()\n",
    ],
)
def test_the_loop_needs_each_of_its_lines(line):
    assert TAPE.count(line) == 1
    without = TAPE.replace(line, line[: -len(line.lstrip())] + "pass\n")
    with pytest.raises(AssertionError):
        torch.testing.assert_close(looped(without, "cpu"), eager("cpu"))


COPY_X, COPY_LABELS = "    x.copy_(new_x)\n", "    labels.copy_(new_labels)\n"


@pytest.mark.parametrize(
    ("faults", "lowest", "highest"),
    [({}, 0.05, 0.5), ({COPY_X: "    x = new_x\n"}, 1.0, 2.0)]
    + [({COPY_X: "    x = new_x\n", COPY_LABELS: "    labels = new_labels\n"}, 0.0, 0.05)],
    ids=["as printed", "x by name", "x and labels by name"],
)
def test_the_loop_on_a_laptop_shows_what_a_name_instead_of_a_copy_trains(faults, lowest, highest):
    loop = TAPE
    for line, instead in faults.items():
        loop = loop.replace(line, instead)
    names = {}
    exec(START + loop, names)
    assert names["losses"][0] > 1.0
    assert lowest <= torch.stack(names["losses"][-10:]).mean() < highest


def test_the_loop_warms_up_and_captures_on_one_side_stream(monkeypatch):
    """A stub of torch.cuda notes what the loop asks for, in order, and records on the tape."""
    asked = []
    tape = Tape()

    class Stream:
        def wait_stream(self, other):
            asked.append((self, "waits for", other))

    default, side = Stream(), Stream()

    def stream(chosen):
        asked.append((chosen, "warms up"))
        return tape.warm_up()

    def graph(graph, stream):
        asked.append((stream, "captures", graph))
        return tape.capture()

    stub = {"CUDAGraph": lambda: tape, "Stream": lambda: side, "current_stream": lambda: default}
    for name, value in {**stub, "stream": stream, "graph": graph}.items():
        monkeypatch.setattr(torch.cuda, name, value)
    torch.testing.assert_close(looped(LOOP.replace('"cuda"', '"cpu"'), "cpu"), eager("cpu"))
    waits = [(side, "waits for", default), (side, "warms up"), (default, "waits for", side)]
    assert asked == [*waits, (side, "captures", tape)]
