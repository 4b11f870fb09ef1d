"""check_training.py: sound scripts are sound, seeded faults are found, and the script computes the same numbers."""

import json
import os
import pathlib
import re
import runpy
import signal
import subprocess
import sys
import threading
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules import module as module_hooks
from torch.utils.flop_counter import FlopCounterMode

import check_training
from check_training import Facts, Peak, Watch, Work, floor
from common.versions import REPOSITORY, SCRIPTS
from in_process import refused
from marks import slow
from processes import TORCHRUN, environment, launch, run_fork

SAMPLES = pathlib.Path(__file__).parents[1] / "training_scripts"
OWN = REPOSITORY / "exercises" / "own_script" / "train_characters.py"
TINY = "--hidden-dim 32 --num-layers 2 --num-heads 2 --batch-size 2 --seq-len 16 --vocab-size 64 --device cpu"
MLP = "blocks.0.mlp.down (has one) and blocks.0.mlp.up (has none), and in 2 more places"


@pytest.fixture
def check(monkeypatch, tmp_path, capsys):
    """check(SCRIPT, ARGUMENT..., options=()): return the exit status, the JSON report and what was printed."""

    def run(*command, options=()):
        monkeypatch.setattr(sys, "argv", sys.argv[:])
        monkeypatch.setattr(sys, "path", sys.path[:])
        file = tmp_path / "report.json"
        file.unlink(missing_ok=True)
        status = check_training.main([*options, "--json", str(file), "--", *map(str, command)])
        report = json.loads(file.read_text()) if file.exists() else None
        printed = capsys.readouterr()
        return status, report, printed.out + printed.err

    return run


@pytest.fixture
def write(tmp_path):
    """write(TEXT): return the path of a script."""

    def make(text):
        path = tmp_path / "script.py"
        path.write_text(text)
        return path

    return make


def kinds(report, warning=False):
    return [finding["kind"] for finding in report["findings"] if finding["warning"] == warning]


SOUND_VERDICT = "every parameter trains"

# ---------------------------------------------------------------- sound scripts
SOUND = "base kernel dropout checkpoint reentrant tied lbfgs sparse sgd fused autocast outside direct warm_up".split()
SOUND += ["scaler,autocast", "accumulation", "evaluation", "accumulation,outside,scaler"]
WARNED = {"unused_head": "not_reached", "same_batch": "same_input", "frozen_layer": "frozen_between"}
WARNED |= {"copied_tie": "copied_tie", "frozen_embedding": "frozen_held"}
OTHER = {"gan": [], "wgan": [], "dqn": ["idle"], "lora": [], "convolution": ["too_small"]}
OTHER |= {"experts": ["unused"], "dense_experts": ["unused"]}


def without_times(found):
    """Leave out the warning that depends on times."""
    return [kind for kind in found if kind != "fast_backward"]


@pytest.mark.parametrize("ways", SOUND)
@pytest.mark.quick(2)
def test_a_sound_gpt_is_sound(check, ways):
    status, report, printed = check(SAMPLES / "char_gpt.py", *ways.split(","))
    assert (status, kinds(report), without_times(kinds(report, True))) == (0, [], []), printed
    assert report["steps"] == 8 and "100 % of the elements" in report["rows"]["gradient"]


@pytest.mark.parametrize("way", WARNED)
@pytest.mark.quick(2)
def test_what_may_be_meant_is_a_warning(check, way):
    status, report, printed = check(SAMPLES / "char_gpt.py", way)
    assert (status, without_times(kinds(report, True))) == (0, [WARNED[way]]), printed


@pytest.mark.slow
def test_an_unused_head_of_a_model_called_by_its_forward_is_a_warning(check):
    """PyTorch gives model.forward() no hook: head and blocks look like modules that run on their own."""
    status, report, printed = check(SAMPLES / "char_gpt.py", "direct", "unused_head")
    assert (status, without_times(kinds(report, True))) == (0, ["not_reached"]), printed
    assert "value.weight, value.bias" in printed


PAIR = """
import sys, types
import torch
from torch import nn

class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 8)
        self.even = nn.Linear(8, 2)
        self.odd = nn.Linear(8, 2)

    def forward(self, x, task):
        h = torch.tanh(self.body(x))
        if task == "odd" and FAULT:
            with torch.no_grad():
                return types.SimpleNamespace(y=self.odd(h), task=task)
        return types.SimpleNamespace(y=getattr(self, task)(h), task=task)

torch.manual_seed(0)
model = Pair()
other = nn.Linear(2, 2)  # to be used later
optimizer = torch.optim.AdamW([*model.parameters(), *other.parameters()], lr=1e-2)
for step in range(9):
    optimizer.zero_grad()
    total = 0
    for task in ("even", "odd") if step % 2 else ("odd", "even"):
        total = total + model(torch.randn(5, 4), task).y.square().mean()
    total.backward()
    optimizer.step()
model.eval()
"""


def test_what_was_compiled_before_the_script_is_not_its_own(check, write):
    before = check_training.compiled_graphs()
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
    assert check_training.compiled_graphs() == before + 1
    status, report, printed = check(write(PAIR.replace("FAULT", "False")))
    assert without_times(kinds(report, True)) == ["not_run"] and not status and "compiled" not in printed, printed


@pytest.mark.parametrize("fault", [False, True])
def test_each_way_to_call_a_model_is_run_again(check, write, fault):
    """Outputs in an object of any class, heads chosen by an argument, a module that is used later."""
    status, report, printed = check(write(PAIR.replace("FAULT", str(fault))))
    warnings = ["wrong_slope"] * fault + ["not_run"]  # no_grad cuts the body's gradient through odd, too
    assert status == fault and sorted(without_times(kinds(report, True))) == sorted(warnings), printed
    if fault:
        (finding,) = [finding for finding in report["findings"] if finding["kind"] == "no_gradient"]
        assert finding["tensors"] == ["odd.weight", "odd.bias"]


HIDDEN_USE = """
import torch
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Linear(4, 3)
        self.shift = torch.nn.Parameter(torch.full((3,), START))
    def forward(self, x):
        shift = self.shift.detach()
        return (self.body(x) + USE).softmax(-1)
torch.manual_seed(0)
model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(9):
    optimizer.zero_grad()
    model(torch.randn(5, 4))[:, 0].log().mean().backward()
    optimizer.step()
"""


@pytest.mark.parametrize(("start", "use"), [(0.0, "shift"), (0.005, "(1 - 100 * shift).log()")])
def test_the_use_of_equal_weights_before_a_softmax_is_seen(check, write, start, use):
    """A factor leaves zeros as they are, as LoRA's second matrix begins; a constant cancels in the softmax.

    Outputs that become NaN have changed.
    """
    status, report, printed = check(write(HIDDEN_USE.replace("START", str(start)).replace("USE", use)))
    assert status == 1 and kinds(report) == ["no_gradient"], printed
    assert report["findings"][0]["tensors"] == ["shift"]


FIRST_LAYERS_FROZEN = """
import torch
torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Linear(4, 4, bias=False) for _ in range(4)))
for number in range(4):
    model[number].requires_grad_(number in TRAINED)
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
for step in range(9):
    optimizer.zero_grad()
    model(torch.randn(5, 4)).square().mean().backward()
    optimizer.step()
"""


@pytest.mark.parametrize(("trained", "between"), [([2, 3], []), ([0, 1], ["2", "3"]), ([1, 3], ["2"])])
def test_layers_that_are_frozen_before_the_first_that_trains_are_meant(check, write, trained, between):
    """As in fine-tuning; one behind it is a warning."""
    status, report, printed = check(write(FIRST_LAYERS_FROZEN.replace("TRAINED", str(trained))))
    found = [finding["tensors"] for finding in report["findings"] if finding["kind"] == "frozen_between"]
    assert status == 0 and found == ([[f"{number}.weight" for number in between]] if between else []), printed


FROZEN_NORMS = """
import torch
from torch import nn
torch.manual_seed(0)
block = [nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2), nn.ReLU()]
model = nn.Sequential(*block, nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2), nn.Flatten())
for number in FROZEN:
    model[number].eval().requires_grad_(False)
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
for step in range(9):
    optimizer.zero_grad()
    model(torch.randn(5, 2, 3, 3)).square().mean().backward()
    optimizer.step()
"""


@pytest.mark.parametrize(("frozen", "between"), [([1, 4], []), ([4], ["4.weight", "4.bias"])])
def test_batch_norms_frozen_between_convolutions_of_a_sequential_are_meant(check, write, frozen, between):
    """As in a detector's backbone; one of two norms is a warning."""
    status, report, printed = check(write(FROZEN_NORMS.replace("FROZEN", str(frozen))))
    found = [finding["tensors"] for finding in report["findings"] if finding["kind"] == "frozen_between"]
    assert status == 0 and found == ([between] if between else []), printed


OVERFLOW = """
import torch
torch.manual_seed(0)
model = torch.nn.Linear(4, 3)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, backoff_factor=2.0**-117)
for step in range(9):
    optimizer.zero_grad()
    scaler.scale(model(100 * torch.randn(5, 4)).sin().mean()).backward()  # at most 1, its gradients are not
    scaler.step(optimizer)
    scaler.update()
"""


def test_a_step_that_the_gradient_scaler_skips_is_no_fault(check, write):
    """The scaler tells a fused optimizer, whose step runs and changes nothing."""
    status, report, printed = check(write(OVERFLOW))
    assert (status, kinds(report)) == (0, []), printed
    assert report["rows"]["optimizer"].endswith("; the gradient scaler skipped 1 step")


@pytest.mark.parametrize(
    ("fused", "expected", "words"),
    [
        (
            "True",
            1,
            "the gradient scaler skipped every step of AdamW, because of NaN or infinity in gradients: 1 tensor",
        ),
        ("False", 2, "NaN or infinity in all gradients of weight, and a gradient scaler skips such steps"),
    ],
)
def test_a_gradient_scaler_that_skips_every_step_is_told(check, write, fused, expected, words):
    script = OVERFLOW.replace("fused=True", f"fused={fused}").replace("backoff_factor=2.0**-117", "backoff_factor=0.9")
    status, _, printed = check(write(script))
    assert status == expected and words in printed, printed


@pytest.mark.parametrize(
    ("sizes", "overflows"), [("inf nan", True), ("inf 1", False), ("1 nan inf", False), ("0", False), ("", False)]
)
def test_a_parameter_overflows_if_all_its_gradients_do(sizes, overflows):
    record = check_training.Record(nn.Parameter(torch.ones(1)), "w")
    record.arrivals = [check_training.Arrival(0, torch.tensor(float(size)), False) for size in sizes.split()]
    assert record.overflows is overflows


# ---------------------------------------------------------------- what scripts elsewhere do
HEAD = """
import os, sys, threading
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, vmap

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

def train(steps=9, forward=lambda x: model(x)):
    for step in range(steps):
        x = torch.randn(6, 4)
        loss = F.cross_entropy(forward(x), torch.randint(2, (6,)))
        optimizer.zero_grad()
        loss.backward()
        print("loss", loss.item(), flush=True)
        optimizer.step()
"""
OWN_MODEL = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.randn(4, 2, dtype=DTYPE))
        self.b = nn.Parameter(torch.tensor(2, dtype=DTYPE))
    def forward(self, x):
        return (VALUE @ self.a).abs(), self.b.abs()
model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
train(forward=lambda x: torch.mul(*model(x)))
"""


def own(dtype, value):
    return HEAD + OWN_MODEL.replace("DTYPE", f"torch.{dtype}").replace("VALUE", value)


BY_FUNC = """
for step in range(9):
    def loss(params, x, y):
        return F.cross_entropy(functional_call(model, params, (x[None],)), y[None])
    params = {name: param.detach() for name, param in model.named_parameters()}
    found = FORM
    for name, param in model.named_parameters():
        param.grad = found[name]
    optimizer.step()
"""
EACH = "vmap(grad(loss), (None, 0, 0))(params, torch.randn(5, 4), torch.randint(2, (5,)))"
ADJOINT = """
class Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx, model, x, *params):
        ctx.model = model
        ctx.save_for_backward(x)
        return nn.Linear.forward(model, x)
    @staticmethod
    def backward(ctx, gradient):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = nn.Linear.forward(ctx.model, x)
        for part in (gradient / 2, gradient / 2):
            found = torch.autograd.grad(y, [x, *ctx.model.parameters()], part, retain_graph=True)
        return None, *(GIVEN for value in found)
class Adjoint(nn.Linear):
    def forward(self, x):
        return Function.apply(self, x, *self.parameters())
"""
ELSEWHERE = {  # a sound script, and a row of its report
    "batch_norm": (
        HEAD + "norm = nn.BatchNorm1d(4)\noptimizer.add_param_group({'params': norm.parameters()})\n"
        "model = nn.Sequential(norm, *model)\ntrain()",
        ("slopes", "6 of 6 tensors as the output's"),
    ),
    "func_grad": (
        HEAD + BY_FUNC.replace("FORM", "grad(loss)(params, torch.randn(4), torch.tensor(1))"),
        ("gradient", "4 of 4 tensors"),
    ),
    "func_vmap": (
        HEAD + BY_FUNC.replace("FORM", f"{{name: value.mean(0) for name, value in {EACH}.items()}}"),
        ("work", "not counted: the last batch cannot be run again (no module was seen to run)"),
    ),
    "autograd_grad": (
        HEAD + "for step in range(9):\n    loss = model(torch.randn(5, 4)).square().mean()\n"
        "    found = torch.autograd.grad(loss, list(model.parameters()))\n"
        "    for param, gradient in zip(model.parameters(), found):\n        param.grad = gradient\n"
        "    optimizer.step()",
        ("gradient", "4 of 4 tensors"),
    ),
    "meta": (
        HEAD + "with torch.device('meta'):\n    nn.Linear(4, 4)(torch.randn(2, 4))\ntrain()",
        ("parameters", "4 tensors"),
    ),
    "fake": (
        HEAD + "with torch._subclasses.FakeTensorMode():\n    nn.Linear(4, 4)(torch.randn(2, 4))\ntrain()",
        ("parameters", "4 tensors"),
    ),
    "traced": (HEAD + "train(forward=torch.jit.trace(model, torch.randn(6, 4)))", ("parameters", "4 tensors")),
    "sparse_rows": (
        HEAD + "class Sparse(nn.Linear):\n    def forward(self, x):\n        return x @ self.weight.T\n"
        "model = Sparse(4, 2, bias=False)\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "train(forward=lambda x: model(x.to_sparse_csr()))",
        ("gradient", "1 of 1 tensors"),
    ),
    "complex": (own("complex64", "x.to(torch.complex64)"), ("slopes", "a complex weight has more than one slope")),
    "wide_complex": (own("complex128", "x.to(torch.complex128)"), ("gradient", "2 of 2 tensors")),
    "strange_argument": (
        HEAD + "class Batch:\n    def __init__(self, x):\n        self.x, self.items, self.shape = x, 6, [6, 4]\n"
        "class Model(nn.Linear):\n    def forward(self, batch):\n        return super().forward(batch.x)\n"
        "model = Model(4, 2)\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "train(forward=lambda x: model(Batch(x)))",
        ("gradient", "2 of 2 tensors"),
    ),
    "another_folder": (HEAD + "os.chdir('/')\nassert os.path.isfile(__file__)\ntrain()", ("parameters", "4 tensors")),
    "scaler": (
        HEAD + "def main():\n    scaler = torch.amp.GradScaler('cpu', init_scale=1024.0)\n"
        "    for step in range(9):\n        optimizer.zero_grad()\n"
        "        scaler.scale(model(torch.randn(5, 4)).square().mean()).backward()\n"
        "        scaler.step(optimizer)\n        scaler.update()\nmain()",
        ("loss", "(may be scaled)"),
    ),
    "nested_grad": (
        HEAD
        + ADJOINT.replace("GIVEN", "2 * value")
        + "model = Adjoint(4, 4)\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)\ntrain()",
        ("gradient", "2 of 2 tensors"),
    ),
    "no_module": (
        HEAD + "weight = torch.randn(4, 2, requires_grad=True)\noptimizer = torch.optim.SGD([weight], lr=0.1)\n"
        "train(forward=lambda x: x @ weight)",
        ("slopes", "what computes with them is in no module, or was not seen"),
    ),
}


@pytest.mark.parametrize("name", ELSEWHERE)
@pytest.mark.quick(5)
def test_what_scripts_elsewhere_do_is_sound(check, write, name, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    text, (row, words) = ELSEWHERE[name]
    write(text)
    status, report, printed = check("script.py")
    assert (status, kinds(report), without_times(kinds(report, True))) == (0, [], []), printed
    assert words in report["rows"][row], printed


def test_a_scalar_that_is_not_the_loss_is_not_taken_for_it(check, write):
    """Such as the temperature that CLIP returns."""
    status, report, printed = check(write(own("float32", "x")))
    losses = re.findall(r"^loss (\S+)", printed, re.MULTILINE)
    assert report["rows"]["loss"] == f"{float(losses[0]):.4f} -> {float(losses[7]):.4f}", printed


def test_what_torch_func_hides_is_not_called_unused(check, write):
    """It gives zeros to what the loss does not reach."""
    found = "grad(loss)(params, torch.randn(4), torch.tensor(1)).items()"
    lost = f"{{name: value * name.startswith('2') for name, value in {found}}}"
    status, report, printed = check(write(HEAD + BY_FUNC.replace("FORM", lost)))
    assert status == 2 and "torch.func hides what uses them" in printed


def test_steps_without_any_gradient(check, write):
    """Only the first loss is the model's."""
    script = (
        HEAD + "last = []\ndef stale(x):\n    last.append(model(x))\n    if len(last) == 1:\n        return last[0]\n"
    )
    script += "    return last[0].detach().requires_grad_()\ntrain(forward=stale)"
    status, report, printed = check(write(script))
    assert status == 1 and kinds(report) == ["empty_steps"], printed
    assert "7 of 8 steps have no gradient at all" in printed


def test_an_output_that_is_cut_outside_is_not_called_unused(check, write):
    """An agent whose value is detached before its loss: the model's forward does not run, but two of its parts do."""
    script = HEAD + "class Agent(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
    script += "        self.actor = nn.Linear(4, 2)\n        self.critic = nn.Linear(4, 2)\n"
    script += "    def act(self, x):\n        return self.actor(x) + self.critic(x).detach()\n"
    script += "agent = Agent()\noptimizer = torch.optim.AdamW(agent.parameters())\ntrain(forward=agent.act)"
    status, report, printed = check(write(script))
    assert (status, without_times(kinds(report, True))) == (0, ["not_reached"]), printed
    assert "critic.weight, critic.bias" in printed


TWO_HEADS = """
class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 2)
        self.second = nn.Linear(4, 2)
        self.third = nn.Linear(4, 2)
    def forward(self, x):
        self.third(x)
        return {"first": self.first(x), "second": self.second(x)}
model = Heads()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
def outputs(x):
    found = model(x)
    return LOSS
train(forward=outputs)
"""


@pytest.mark.parametrize(
    "loss",
    [
        'found["first"]',
        'found["first"] + found["second"].mean().item()',
        'torch.stack([found["first"], found["second"].detach()]).sum(0)',
    ],
)
def test_an_output_that_the_loss_does_not_reach_is_not_called_independent(check, write, loss):
    """The model's output depends on the second head, and not on the third."""
    status, report, printed = check(write(HEAD + TWO_HEADS.replace("LOSS", loss)))
    found = {finding["kind"]: finding["tensors"] for finding in report["findings"]}
    assert status == 0 and found["not_reached"] == ["second.weight", "second.bias"], printed
    assert found["unused"] == ["third.weight", "third.bias"], printed


CRITIC_AND_GENERATOR = """
critic = nn.Sequential(nn.Flatten(), nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
second = torch.optim.Adam(critic.parameters(), lr=1e-3)
for step in range(9):
    real = torch.randn(8, 2)
    fake = model(torch.randn(8, 4))
    mean = (real + fake).detach().requires_grad_()
    (slope,) = torch.autograd.grad(critic(mean).sum(), mean, create_graph=True)
    loss = critic(fake.detach()).mean() - critic(real).mean() + (slope.norm(dim=1) - 1).square().mean()
    second.zero_grad()
    loss.backward()
    second.step()
    loss = -critic(fake).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_a_gradient_of_another_backward_is_not_a_cleared_one(check, write):
    """The last bias of a critic cancels in its own loss, and has a gradient in the generator's."""
    status, report, printed = check(write(HEAD + CRITIC_AND_GENERATOR))
    assert status == 0 and "FINDING" not in printed, printed
    assert report["rows"]["work"].startswith("at least"), printed  # one of its inputs needs a gradient


def test_two_models_with_the_same_names_are_told_apart(check, write):
    script = HEAD + "first, second = nn.Sequential(nn.Linear(4, 4)), nn.Sequential(nn.Linear(4, 2))\n"
    script += "optimizer = torch.optim.AdamW([*first.parameters(), *second.parameters()])\n"
    script += "train(forward=lambda x: second(first(x).detach()))"
    status, report, printed = check(write(script))
    assert status == 1 and "first.0.weight, first.0.bias" in printed  # the script's own names
    assert "the gradient ends between second.0 (has one) and first.0 (has none)" in printed


SCALED = (
    HEAD
    + """
class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.scale = nn.Linear(4, 4), nn.Linear(4, 4), nn.Parameter(torch.ones(4))

    def forward(self, x):
        return self.second(self.first(x) * self.scale.{use})


model = nn.Sequential(nn.Linear(4, 4), Scaled(), nn.Linear(4, 2))
optimizer = torch.optim.AdamW(model.parameters())
train()
"""
)


def test_a_parameter_of_a_module_that_runs_others_has_no_neighbours(check, write):
    """Its place between them isn't known, so the report names the forward that uses it."""
    status, _, printed = check(write(SCALED.replace("{use}", "data")))
    assert status == 1 and "the gradient ends between" not in printed, printed
    assert "look in the forward of 1 (Scaled), which uses it beside the modules that it runs" in printed
    status, _, printed = check(write(SCALED.replace("{use}", "clone()")))
    assert status == 0, printed


def test_a_cut_behind_such_a_parameter_is_between_its_neighbours(check, write):
    script = SCALED.replace("self.second(", "self.second(self.cut(").replace("{use})", "clone()))")
    script = script.replace("    def forward", "    def cut(self, x):\n        return x.detach()\n\n    def forward")
    status, _, printed = check(write(script))
    assert status == 1 and "the gradient ends between 1.second (has one) and 1.first (has none)" in printed, printed
    assert "which uses it" not in printed


def test_autograd_is_off_in_the_outermost_module_only(check, write):
    """Even if the module between the two only holds others and never runs."""
    script = HEAD + "class Block(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
    script += "        self.parts = nn.ModuleDict({'up': nn.Linear(4, 4)})\n"
    script += "    def forward(self, x):\n        return self.parts['up'](x)\n"
    script += "class Model(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
    script += "        self.block, self.head = Block(), nn.Linear(4, 2)\n    def forward(self, x):\n"
    script += "        with torch.no_grad():\n            x = self.block(x)\n        return self.head(x)\n"
    script += "model = Model()\noptimizer = torch.optim.AdamW(model.parameters())\ntrain()"
    _, _, printed = check(write(script))
    assert "autograd is off in block (Block):" in printed


@pytest.mark.parametrize(("frozen", "expected"), [(False, ["fast_backward"]), (True, [])])
def test_a_fast_backward_is_odd_where_all_weights_train(frozen, expected):
    steps = [check_training.Step({"forward": 9.0, "backward": 1.0}, backwards=1)]
    facts = SimpleNamespace(
        watch=SimpleNamespace(steps=steps, models=SimpleNamespace(roots={})), of=lambda fate: [fate] * frozen
    )
    assert [finding.kind for finding in check_training.fast_backward(facts, steps)] == expected


@pytest.mark.parametrize("proven", [False, True])
def test_a_fast_backward_is_no_warning_where_every_gradient_is_the_slope(check, write, monkeypatch, proven):
    """As in a small model whose forward waits for Python."""
    warning = check_training.Finding("fast_backward", "fast", warning=True)
    monkeypatch.setattr(check_training, "fast_backward", lambda *_: [warning])
    _, report, _ = check(write(HEAD + "train()"), options=["--no-slopes"] * (not proven))
    assert kinds(report, True) == ["fast_backward"] * (not proven)


def test_a_forward_without_a_backward_counts_once(check, write):
    """Three more calls per step under autograd need no backward. The input needs no gradient: 2 forwards and 1."""
    script = (
        HEAD + "def forward(x):\n    for _ in range(3):\n        model(x)\n    return model(x)\ntrain(forward=forward)"
    )
    _, report, printed = check(write(script))
    one = 2 * 6 * (4 * 8 + 8 * 2)
    assert report["rows"]["work"].startswith(f"at least {(3 + 2) * one / 1e9:.4g} GFLOP"), printed
    assert "fast_backward" not in kinds(report, True)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("thread = threading.Thread(target=train)\nthread.start()\nthread.join()", "what other threads do"),
        (
            "class Loop:\n    pass",
            "stepped in this process: give the command that trains, and start several processes with torchrun\n",
        ),
    ],
)
def test_steps_that_cannot_be_seen(check, write, text, words):
    status, _, printed = check(write(HEAD + text))
    assert status == 2 and words in printed


@pytest.fixture
def exits(monkeypatch):
    """Record os._exit(), and raise in its place: it would end the tests."""
    exits = []

    def leave(status):
        exits.append(status)
        raise RuntimeError("os._exit() ends the process")

    monkeypatch.setattr(os, "_exit", leave)
    return exits


def in_a_process(*script):
    return run_fork(check_training.__file__, "--", *script)


@pytest.mark.parametrize(("steps", "status", "words"), [(3, 0, "ended after 3 of 8 steps"), (0, 2, "no torch.optim")])
def test_a_script_that_ends_its_process_has_a_report(check, write, exits, steps, status, words):
    found, _, printed = check(write(HEAD + f"train({steps})\nos._exit(0)"))
    assert found == status and words in printed and not exits, printed


def test_a_script_that_catches_its_end_is_ended(write):
    """A bare except around the step catches SystemExit too."""
    loop = "for _ in range(30):\n    try:\n        train(1 + 8 * (_ == 0))\n    except:\n        print('caught')\n"
    done = in_a_process(write(HEAD + loop + "print('to its end')"))
    assert done.returncode == 0 and done.stdout.count("verdict     every parameter trains") == 1, (
        done.stdout + done.stderr
    )
    assert "caught" in done.stdout and "to its end" not in done.stdout


def test_a_thread_that_waits_for_the_script_does_not_keep_the_process(exits):
    with pytest.raises(SystemExit):
        check_training.end(0)
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    try:
        with pytest.raises(RuntimeError):
            check_training.end(1)
    finally:
        done.set()
        thread.join()
    assert exits == [1]


# ---------------------------------------------------------------- terms of the loss
TERMS = """
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
aux = nn.Linear(4, 3)
optimizer = torch.optim.Adam([*model.parameters(), *aux.parameters()], lr=1e-2)
mean = torch.zeros(())
for step in range(9):
    x, y = torch.randn(6, 4), torch.randint(3, (6,))
    a, b = model(x), aux(x)
    ce = F.cross_entropy(a, y)
    loss = ce + b.square().mean()
    TERM
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
HONEST_TERMS = {
    "loss minus its average": "mean = 0.9 * mean + 0.1 * ce.detach(); loss = loss - mean",
    "another value for a term": "loss = loss + b.mean().detach() - ce.detach()",
    "the same in brackets": "loss = loss + (b.mean().detach() - ce.detach())",
    "KL to its own target": "p = a.detach().softmax(-1); loss += (p * p.log()).sum() - (p * a.log_softmax(-1)).sum()",
    "straight through": "z = a.sigmoid(); loss = loss + F.mse_loss(z + ((z > 0.5).float() - z).detach(), b)",
    "a target": "loss = loss + F.mse_loss(b, a.detach())",
    "a weight": "loss = loss + ce.detach() * b.abs().mean()",
    "a weight of 0": "loss = loss + 0.0 * a.detach().square().mean()",
    "a baseline": "loss = loss - ((y - b[:, 0].detach()) * a.log_softmax(-1)[:, 0]).mean()",
    "a schedule": "loss = loss + 0.1 * (a if step > 2 else a.detach()).square().mean()",
    "a constant": "loss = loss + torch.ones_like(a).mean() + x.mean()",
}
DEAD_TERMS = {  # term of the loss: the operation that cuts it
    "loss = loss - 0.1 * torch.distributions.Categorical(logits=a.detach()).entropy().mean()": "detach",
    "loss = loss - (a.log_softmax(-1)[:, 0].detach() * y).mean()": "detach",
    "loss = (loss + 1e-6 * a.data.square().mean()) / 2": "data",
    "loss += (a.argmax(-1) != y).float().mean()": "argmax",
    "with torch.no_grad(): size = sum(p.square().sum() for p in model.parameters())\n    loss = size + loss": "no_grad",
    "loss = loss + torch.autograd.grad(b.square().sum(), aux.weight, retain_graph=True)[0].square().sum()": "grad",
    "loss = (x - a.detach()[:, :1] + b[:, :1]).mean() + loss": "detach",
}


@pytest.mark.parametrize("form", HONEST_TERMS)
@pytest.mark.quick(4)
def test_a_term_without_a_gradient_that_only_replaces_a_value_is_honest(check, write, form):
    script = write(HEAD + TERMS.replace("TERM", HONEST_TERMS[form]))
    status, report, printed = check(script, options=["--no-slopes"])
    assert (status, kinds(report)) == (0, []), printed
    assert ("cuts" in report["rows"]) == (form != "a constant")


@pytest.mark.parametrize("term", DEAD_TERMS)
@pytest.mark.quick(4)
def test_a_term_of_the_loss_that_trains_nothing_is_found(check, write, term):
    """Its neighbours keep every gradient alive."""
    script = write(HEAD + TERMS.replace("TERM", term))
    status, report, printed = check(script, options=["--no-slopes"])
    assert (status, kinds(report)) == (1, ["dead_term"]), printed
    lines = [number for number, line in enumerate(script.read_text().splitlines(), 1) if line.strip() in term]
    (detail,) = report["findings"][0]["details"]
    place = re.fullmatch(rf"script.py, line (\d+): cut by {DEAD_TERMS[term]} at script.py, line (\d+)", detail)
    assert place and {int(number) for number in place.groups()} <= set(lines), printed


@pytest.mark.slow
@pytest.mark.parametrize(("step", "found"), [(0, False), (1, True), (3, True), (4, False)])
def test_a_term_is_followed_in_the_second_to_the_fourth_step(check, write, step, found):
    """In the others its value is 0, which trains nothing by right."""
    term = f"loss = loss + (step == {step}) * a.detach().square().mean()"
    _, report, printed = check(write(HEAD + TERMS.replace("TERM", term)), options=["--no-slopes"])
    assert kinds(report) == ["dead_term"] * found, printed


@pytest.mark.parametrize(
    ("lines", "text"),
    [
        ((7,), "a term of the loss trains nothing, although it depends on parameters that train"),
        ((7, 8), "2 terms of the loss train nothing, although they depend on parameters that train"),
    ],
)
def test_terms_of_the_loss_are_counted(lines, text):
    dead = {((number,), f"train.py, line {number}"): ["detach at train.py, line 3"] for number in lines}
    traced = SimpleNamespace(cuts=[], live=set(), dead=dead)
    watch = SimpleNamespace(follow=SimpleNamespace(passes=[traced, traced], exits={}))
    (finding,) = check_training.loss_findings(watch, {})
    assert finding.text == text and len(finding.details) == len(lines)


@pytest.mark.parametrize(("number", "words"), [(0, "0 steps"), (1, "1 step"), (2, "2 steps"), (1000, "1,000 steps")])
def test_one_is_singular(number, words):
    assert check_training.counted(number, "step") == words


TWO_LOSSES = """
model, peer = nn.Linear(4, 3), nn.Linear(4, 3)
optimizers = [torch.optim.Adam(part.parameters(), lr=1e-2) for part in PARTS]
for step in range(9):
    x, y = torch.randn(6, 4), torch.randint(3, (6,))
    a, b = model(x), peer(x)
    first = F.cross_entropy(a, y)
    second = b.square().mean() + F.cross_entropy(b, y)
    for loss in (first, second):
        loss.backward()
        if len(optimizers) > 1:
            optimizers[loss is second].step()
    if len(optimizers) == 1:
        optimizers[0].step()
    for optimizer in optimizers:
        optimizer.zero_grad()
"""


@pytest.mark.parametrize("parts", ["(model, peer)", "(nn.ModuleList([model, peer]),)"])
@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.quick(2)
def test_a_second_loss_of_the_same_forward_is_followed_too(check, write, parts, cut):
    """The first backward and the first step come between its forward and its backward."""
    text = TWO_LOSSES.replace("PARTS", parts)
    if cut:
        text = text.replace("F.cross_entropy(b, y)", "F.cross_entropy(b.detach(), y)")
    status, report, printed = check(write(HEAD + text), options=["--no-slopes"])
    assert (status, kinds(report)) == (int(cut), ["dead_term"] * cut), printed


@pytest.mark.parametrize("cut", [False, True])
def test_a_term_of_a_part_that_is_called_before_the_model_is_followed_too(check, write, cut):
    """Such as the embeddings of a matrix factorization, whose norms are a term of the loss."""
    text = "for step in range(9):\n    x = torch.randn(6, 4)\n"
    text += f"    norm = model[0](x){'.detach()' * cut}.square().mean()\n    loss = model(x).square().mean() + norm\n"
    text += "    optimizer.zero_grad()\n    loss.backward()\n    optimizer.step()\n"
    status, report, printed = check(write(HEAD + text), options=["--no-slopes"])
    assert (status, kinds(report)) == (int(cut), ["dead_term"] * cut), printed


@pytest.mark.parametrize(
    ("term", "told"),
    [
        ("loss = loss + 0.1 * a.square().mean().item()", "item"),
        ("loss = loss + 0.1 * float(a.detach().square().mean())", "float"),
        ("loss = loss + torch.from_numpy(a.detach().numpy()).square().mean()", "numpy"),
        ("loss = loss + torch.tensor(a.square().tolist()).mean()", "tolist"),
        ("loss = loss + a.float().mean() * float(x.mean())", None),  # x depends on no parameter
        ("shown = loss.item()", "item"),  # a log's, which the check can't tell from the others
    ],
)
@pytest.mark.quick(3)
def test_values_that_leave_pytorch_on_the_way_to_the_loss_are_told(check, write, term, told):
    script = write(HEAD + TERMS.replace("TERM", term))
    status, report, printed = check(script, options=["--no-slopes"])
    line = next(number for number, text in enumerate(script.read_text().splitlines(), 1) if term in text)
    expected = f"no gradient passes through what left PyTorch before backward: {told} at script.py, line {line}"
    assert status == 0 and report["rows"].get("values") == (expected if told else None), printed


def test_what_a_term_was_computed_from_is_not_kept(check, write):
    """A mark holds no tensor: what the script lets go of is freed in the same line."""
    term = "keep = weakref.ref(a * 2); assert keep() is None; loss = loss + ce.detach() * b.mean()"
    status, report, printed = check(
        write("import weakref\n" + HEAD + TERMS.replace("TERM", term)), options=["--no-slopes"]
    )
    assert status == 0 and "cuts" in report["rows"], printed


FOLLOWED = """
before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
teacher = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True).eval().requires_grad_(False)
model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
half = torch.compile(lambda x: torch.tanh(x) * 0.5 + x.exp() * 1e-3, backend="aot_eager", fullgraph=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(12):
    x = torch.randn(2, 5, 8)
    y = checkpoint(model, half(x), use_reentrant=False)
    with torch.device("cpu"):
        y = y + torch.zeros(8)
    loss = F.mse_loss(half(y), teacher(x)) + (y - y.detach()).square().mean() + 0.1 * half(y.detach()).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"] - before
    print(step, graphs, loss.item().hex(), [p.double().sum().item().hex() for p in model.parameters()])
"""


def test_the_step_that_is_followed_computes_the_same_bits(check, write, capsys, monkeypatch):
    """With a teacher that PyTorch's kernels for inference run, compiled functions, a checkpoint and another mode.

    No function is compiled again for it. What a compiled function returns depends on what it is given.
    """
    script = write(HEAD + "from torch.utils.checkpoint import checkpoint\n" + FOLLOWED)
    torch._dynamo.reset()
    runpy.run_path(str(script), run_name="__main__")
    alone = re.findall(r"^\d+ .*0x.*$", capsys.readouterr().out, re.MULTILINE)
    torch._dynamo.reset()
    status, report, printed = check(script, options=["--go-on", "--no-slopes"])
    assert re.findall(r"^\d+ .*0x.*$", printed, re.MULTILINE) == alone and len(alone) == 12
    assert (status, kinds(report)) == (1, ["dead_term"]), printed
    assert torch.overrides._len_torch_function_stack() == 0


# ---------------------------------------------------------------- what was silent
PACKED = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(4, 24)
        self.head = nn.Linear(8, 2)
    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.head(F.scaled_dot_product_attention(q, KEYS, v))
model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
train()
"""
MICRO = """
for step in range(9):
    for part in range(2):
        BETWEEN
        F.cross_entropy(model(torch.randn(6, 4)), torch.randint(2, (6,))).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()
"""
BY_HAND = "grads.append([p.grad for p in model.parameters()]) if part else grads.clear(); optimizer.zero_grad()"
SURGERY = "\ngrads = []\n" + MICRO.replace("BETWEEN", BY_HAND).replace(
    "    nn.utils", "    for p, old in zip(model.parameters(), grads[0]):\n        p.grad += old\n    nn.utils"
)
DROPOUT = "model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.BatchNorm1d(8), nn.Linear(8, 2))\n"
DROPOUT += "optimizer = torch.optim.AdamW(model.parameters())\n"
PUT_BACK = "start = {k: v.clone() for k, v in model.state_dict().items()}\n"
PUT_BACK += "train(forward=lambda x: model.load_state_dict(start) and model(x))"
CLAMPED = "train(forward=lambda x: (model[0].bias.data.fill_(0.01), model(x))[1])"
ZERO = "model[0].weight.data.zero_()\nmodel[0].weight.requires_grad = False\n"
HELD = "model[0].requires_grad_(False)\n"
ROUTED = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = LIST
        self.head = nn.Linear(4, 2)
        self.calls = 0
    def forward(self, x):
        self.calls += 1
        return self.head(x + sum(USE for i in ((0,) if self.calls <= 8 else (0, 1))))
model = Model()
optimizer = torch.optim.AdamW(model.parameters())
train()
"""
PADDED = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(3, 4, padding_idx=0)
        self.head = nn.Linear(4, 2)
    def forward(self, x):
        return self.head(self.tokens((x[:, :3] > 0.7).long()).mean(1))
model = Model()
optimizer = torch.optim.AdamW(model.parameters())
train()
"""
ADAPTER = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.base = nn.Linear(4, 2)
        self.a, self.b = nn.Linear(4, 3, bias=False), nn.Linear(3, 2, bias=False)
    def forward(self, x):
        return self.base(x) + self.b(self.a(x))
model = Model()
nn.init.zeros_(model.b.weight)
optimizer = torch.optim.AdamW(model.parameters())
"""
REBUILT = """
for step in range(9):
    optimizer = torch.optim.AdamW(model.parameters())
    F.cross_entropy(model(torch.randn(6, 4)), torch.randint(2, (6,))).backward()
    optimizer.step()
    optimizer.zero_grad()
"""
BYOL = """
online, target = (nn.Sequential(*(nn.Linear(4, 4) if i % 2 == 0 else nn.Tanh() for i in range(5))) for _ in range(2))
target.requires_grad_(False)
model = nn.ModuleDict({"online": online, "target": target})
optimizer = torch.optim.AdamW(online.parameters())
train(forward=lambda x: online(x) + target(x))
"""
META = "optimizer = torch.optim.AdamW([*nn.Linear(4, 2, device='meta').parameters(), *model.parameters()])\ntrain()"
TOGGLED = "optimizer.register_step_pre_hook(lambda *_: [model[0].requires_grad_(False)] and None)\n"
TOGGLED += "train(forward=lambda x: model.requires_grad_(True)(x))"
COPIED = "import copy\nmodel = copy.deepcopy(model)\ntrain()"
ALL_FROZEN = "model.requires_grad_(False)\ntrain(forward=lambda x: model(x).requires_grad_())"
TEACHER_FORCING = """
import random
class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.Linear(4, 4)
        self.head = nn.Linear(4, 2)
    def forward(self, x):
        return self.head(x * random.random() * 100 + self.cell(x).detach())
model = Decoder()
optimizer = torch.optim.AdamW(model.parameters())
train()
"""
SMALL_UPDATES = """
model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2))
nn.init.zeros_(model[2].weight)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
train()
"""
THAWED = """
model.requires_grad_(False)
for step in range(9):
    critic = model(torch.randn(6, 4))
    model.requires_grad_(True)
    F.cross_entropy(model(torch.randn(6, 4)), torch.randint(2, (6,))).backward()
    model.requires_grad_(False)
    optimizer.step()
    optimizer.zero_grad()
"""
ATTACK = """
for step in range(9):
    x = torch.randn(6, 4).requires_grad_()
    y = torch.randint(2, (6,))
    F.cross_entropy(model(x), y).backward()
    optimizer.zero_grad()
    F.cross_entropy(model((x + 0.1 * x.grad.sign()).detach()), y).backward()
    optimizer.step()
    optimizer.zero_grad()
"""
PERTURBED = """
for step in range(9):
    x = torch.randn(6, 4)
    y = torch.randint(2, (6,))
    F.cross_entropy(model(x), y).backward()
    start = [p.detach().clone() for p in model.parameters()]
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.05 * p.grad)
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    ORDER
    optimizer.zero_grad()
"""
PUT_BACK_PARAMETERS = "[p.data.copy_(value) for p, value in zip(model.parameters(), start)]"
STEPPED_AGAIN = """
for step in range(9):
    optimizer.zero_grad()
    F.cross_entropy(model(torch.randn(6, 4)), torch.randint(2, (6,))).backward()
    optimizer.step()
    AGAIN
"""
ALPHA = "alpha = torch.ones(1, requires_grad=True)\nlater = torch.optim.SGD([alpha], lr=0.1)\ntrain()"
CRITIC = "critic = nn.Sequential(nn.Linear(2, 1))\nlater = torch.optim.SGD(critic.parameters(), lr=0.1)\ntrain()"
SPEAKS = {  # script: its finding or warning, and words of the report; of a sound brother: None
    "packed": (PACKED.replace("KEYS", "k.detach()"), "lost_rows", "qkv.weight: 8 to 15"),
    "packed_sound": (PACKED.replace("KEYS", "k"), None, SOUND_VERDICT),
    "slice_of_the_head": (
        "train(forward=lambda x: nn.functional.pad(model(x)[:, :1], (0, 1)))",
        None,
        "verdict     every parameter trains",
    ),
    "evaluation": (DROPOUT + "model.eval()\ntrain()", "eval_mode", "2 modules"),
    "frozen_batch_norm": (DROPOUT + "model[2].eval()\ntrain()", None, SOUND_VERDICT),
    "put_back": (PUT_BACK, "put_back", "the same values again: 4 of 4 tensors"),
    "perturbed": (PERTURBED.replace("ORDER", PUT_BACK_PARAMETERS + "; optimizer.step()"), None, SOUND_VERDICT),
    "perturbed_and_put_back": (
        PERTURBED.replace("ORDER", "optimizer.step(); " + PUT_BACK_PARAMETERS),
        *("put_back", "the same values again: 4 of 4 tensors"),
    ),
    "stepped_again": (
        STEPPED_AGAIN.replace("AGAIN", "optimizer.step()"),
        *("stepped_again", "no backward between the two: 4 of 4 tensors"),
    ),
    "stepped_again_after_a_backward": (
        STEPPED_AGAIN.replace(
            "AGAIN", "optimizer.zero_grad(); model(torch.randn(6, 4)).mean().backward(); optimizer.step()"
        ),
        *(None, SOUND_VERDICT),
    ),
    "one_put_back": (
        "start = {k: v.clone() for k, v in model[0].state_dict().items()}\n"
        "train(forward=lambda x: model[0].load_state_dict(start) and model(x))",
        *("put_back", "the same values again: 2 of 4 tensors"),
    ),
    "discarded": (
        MICRO.replace("range(2)", "range(4)").replace("BETWEEN", "optimizer.zero_grad() if part == 2 else None"),
        *("overwritten", "4 of 4 tensors"),
    ),
    "cleared_before_the_first": (
        MICRO.replace("range(2)", "range(4)").replace("BETWEEN", "optimizer.zero_grad() if part == 0 else None"),
        *(None, SOUND_VERDICT),
    ),
    "held_bias": (CLAMPED, None, SOUND_VERDICT),
    "micro_batches": (MICRO.replace("BETWEEN", "optimizer.zero_grad()"), "overwritten", "4 of 4 tensors"),
    "accumulation": (MICRO.replace("BETWEEN", "pass"), None, SOUND_VERDICT),
    "surgery": (SURGERY, None, SOUND_VERDICT),
    "all_frozen": (ALL_FROZEN, "nothing_to_train", "AdamW has nothing to train"),
    "some_frozen": (HELD + "train()", "frozen_held", "2 tensors"),
    "frozen_after_a_dry_run": ("model(torch.zeros(1, 4))\n" + HELD + "train()", "frozen_held", "2 tensors"),
    "part_before_the_whole": (
        "model[0](torch.zeros(1, 4))\nmodel = nn.ModuleDict({'body': model})\nmodel.body[0].requires_grad_(False)\n"
        "train(forward=model.body)",
        *("frozen_held", "body.0.weight, body.0.bias"),
    ),
    "zero_adapter": (
        ZERO + "optimizer = torch.optim.SGD([*model.parameters()][1:], 0.1)\ntrain()",
        "zero_frozen",
        "0.w",
    ),
    "optimizer_made_anew": (REBUILT, None, "script.py, 8 steps"),
    "adapter": (ADAPTER + "train()", None, SOUND_VERDICT),
    "both_ends_zero": (ADAPTER + "nn.init.zeros_(model.a.weight)\ntrain()", "both_zero", "2 of 4 tensors"),
    "late_expert": (
        ROUTED.replace("LIST", "nn.ModuleList(nn.Linear(4, 4) for _ in range(2))").replace("USE", "self.experts[i](x)"),
        *("unused", "experts.1.weight, experts.1.bias"),
    ),
    "late_tensor": (
        ROUTED.replace("LIST", "nn.ParameterList(torch.eye(4) for _ in range(2))").replace(
            "USE", "x @ self.experts[i]"
        ),
        *("unused", "experts.1"),
    ),
    "meta_tensors": (META, None, SOUND_VERDICT),
    "padding": (PADDED, None, "3 of 3 tensors as the output's"),
    "frozen_whole": (BYOL, None, SOUND_VERDICT),
    "thawed": (THAWED, None, "4 tensors to train"),
    "attack": (ATTACK, None, "script.py, 8 steps"),
    "waiting": (ALPHA, "waiting", "parameter 0 of SGD"),
    "waiting_module": (CRITIC, "waiting", "critic.0.weight, critic.0.bias"),
    "waiting_in_a_function": (
        "def main():\n    critic = nn.Linear(2, 2)\n    later = torch.optim.SGD(critic.parameters(), lr=0.1)\n"
        "    train(forward=lambda x: critic(model(x)))\nmain()",
        *("waiting", "2 of 6 tensors"),
    ),
    "toggled": (TOGGLED, None, "not compared: 2 (frozen at the end)"),
    "copied": (COPIED, "replaced", "next: the optimizer was built before the model was copied, replaced or tied"),
    "teacher_forcing": (TEACHER_FORCING, "no_gradient", "cell.weight, cell.bias"),
    "small_updates": (SMALL_UPDATES, "too_small", "3 of 6 tensors"),
    "nested_grad": (
        ADJOINT.replace("GIVEN", "None") + "model = nn.Sequential(Adjoint(4, 4), nn.Linear(4, 2))\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\ntrain()",
        *("no_gradient", "the gradient ends between 1 (has one) and 0 (has none)"),
    ),
    "nothing_trains": (
        "model = nn.Sequential(nn.Linear(4, 2), nn.ReLU())\nnn.init.constant_(model[0].bias, -100.0)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\ntrain(forward=lambda x: model(x) + x[:, :2])",
        *("unused", "FINDING     unused"),
    ),
    "head_replaced": ("model[2] = nn.Linear(8, 2)\ntrain()", "replaced", "it holds parameter * of AdamW (x2)"),
}


@pytest.mark.parametrize("name", SPEAKS)
@pytest.mark.quick(14)
def test_it_speaks_up_where_work_is_lost(check, write, name):
    text, kind, words = SPEAKS[name]
    status, report, printed = check(write(HEAD + text))
    assert kinds(report) + without_times(kinds(report, True)) == [kind] * bool(kind), printed
    assert words in printed and (kind is None or "next: " in printed)


@pytest.mark.parametrize("name", ["evaluation", "put_back", "one_put_back", "micro_batches", "discarded"])
def test_lost_work_is_a_finding(check, write, name):
    """Gradients that are discarded, evaluation mode, tensors that go back to their old values: with status 1."""
    text, kind, _ = SPEAKS[name]
    status, report, printed = check(write(HEAD + text), options=["--no-slopes"])
    assert (status, kinds(report)) == (1, [kind]), printed
    assert "between its steps" not in report["rows"]["optimizer"]  # a row that would say it in other words


SURGERY_OF_SOME = SURGERY.replace("p.grad += old", "p.grad.mul_(FACTOR if p.dim() > 1 else 1.0)")


@pytest.mark.parametrize(("factor", "found"), [(1.0009, ["overwritten"]), (1.0012, [])])
def test_who_changes_gradients_by_different_factors_combines_them_by_hand(check, write, factor, found):
    """A clip or a scaler changes all by one factor, up to a rounding."""
    status, report, printed = check(
        write(HEAD + SURGERY_OF_SOME.replace("FACTOR", str(factor))), options=["--no-slopes"]
    )
    assert kinds(report) == found, printed


RATES = """
groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 3e-4}]
optimizer = torch.optim.AdamW(groups, lr=0.1)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda step: RATE, lambda step: 1.0])
for step in range(9):
    F.cross_entropy(model(torch.randn(6, 4)), torch.randint(2, (6,))).backward()
    optimizer.step()
    optimizer.zero_grad()
    schedule.step()
"""


@pytest.mark.parametrize(
    ("rate", "row", "found"),
    [
        ("1.0", "AdamW 0.1, AdamW 0.0003", []),
        ("0.1 ** step", "AdamW 0.1 -> 1e-08, AdamW 0.0003", ["learning_rate"]),
        ("1 / 1001 if step == 7 else 1.0", "AdamW 0.1 -> 9.99e-05, AdamW 0.0003", ["learning_rate"]),
        ("1 / 999 if step == 7 else 1.0", "AdamW 0.1 -> 0.0001, AdamW 0.0003", []),
        ("1.0 - step / 7", "AdamW 0.1 -> 0, AdamW 0.0003", ["learning_rate"]),
        ("step / 7", "AdamW 0 -> 0.1, AdamW 0.0003", []),
    ],
)
@pytest.mark.quick(3)
def test_learning_rates_are_told_and_one_that_vanishes_is_a_warning(check, write, rate, row, found):
    """Such as a schedule by epochs that is called in each step; a warm-up may begin at 0."""
    _, report, printed = check(write(HEAD + RATES.replace("RATE", rate)), options=["--no-slopes"])
    assert report["rows"]["rates"] == row, printed
    assert [kind for kind in kinds(report, True) if kind == "learning_rate"] == found, printed


# ---------------------------------------------------------------- what changes without an optimizer
TARGETS = """
import copy
target = copy.deepcopy(model).requires_grad_(False)
never = copy.deepcopy(model)
class Queue(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("keys", torch.zeros(2, 4))
        self.register_buffer("fixed", torch.zeros(4))
    def forward(self, x):
        self.keys = torch.cat([self.keys[1:], x[:1]])
        return x + self.fixed
queue = Queue()
def forward(x):
    with torch.no_grad():
        for old, new in zip(target.parameters(), model.parameters()):
            UPDATE
        never(x)
    return model(queue(x))
"""


@pytest.mark.parametrize(
    ("update", "words"),
    [
        ("old.lerp_(new, 0.01)", "target: 4 moved"),
        ("old.copy_(new)", "target: 4 moved"),  # the last step changed the model once more
        ("pass", "target: 4 unchanged"),
    ],
)
@pytest.mark.quick(1)
def test_targets_averages_and_buffers_are_told_apart(check, write, update, words):
    """A target that follows the model, and one that is never updated."""
    status, report, printed = check(write(HEAD + TARGETS.replace("UPDATE", update) + "train(forward=forward)"))
    assert (status, kinds(report)) == (0, []), printed
    assert set(report["rows"]["others"].partition("steps: ")[2].split(", ")) == {words, "never: 4 unchanged"}, printed
    assert set(report["rows"]["buffers"].partition("steps: ")[2].split(", ")) == {
        "queue: 1 moved",
        "queue: 1 unchanged",
    }


def test_an_average_that_equals_the_model_is_told(check, write):
    text = "import copy\ntarget = copy.deepcopy(model)\n"
    text += "class Optimizer(torch.optim.SGD):\n    def step(self):\n        super().step()\n"
    text += "        target.load_state_dict(model.state_dict())\n"
    _, report, printed = check(write(HEAD + text + "optimizer = Optimizer(model.parameters(), lr=0.1)\ntrain()"))
    assert report["rows"]["others"].endswith("target: 4 equal to what trains"), printed


@pytest.mark.parametrize(
    ("factor", "words"), [("0.999999", "; 4 change between its steps too: *.weight (x2), *.bias (x2)"), ("1.0", "")]
)
def test_changes_outside_of_the_optimizers_steps_are_told(check, write, factor, words):
    text = f"train(forward=lambda x: [p.data.mul_({factor}) for p in model.parameters()] and model(x))"
    _, report, printed = check(write(HEAD + text), options=["--no-slopes"])
    assert report["rows"]["optimizer"] == f"AdamW: 4 tensors, 4 changed{words}", printed


# ---------------------------------------------------------------- what is accepted
@pytest.mark.parametrize(
    ("options", "status", "row"),
    [
        (["--accept", "put_back"], 0, "put_back"),
        (["--accept", "put_back=?.*"], 0, "put_back=?.*"),
        (["--accept", "put_back=0.*", "--accept", "put_back=[02].*"], 0, "put_back=[02].*; not seen: put_back=0.*"),
        (["--accept", "put_back=0.*"], 1, "not seen: put_back=0.*"),
        (["--accept", "no_gradient"], 1, "not seen: no_gradient"),
    ],
)
@pytest.mark.quick(3)
def test_an_accepted_finding_keeps_the_status_green_and_another_one_does_not(check, write, options, status, row):
    """A pattern accepts a finding only if it fits all tensors of it."""
    found, report, printed = check(write(HEAD + PUT_BACK), options=[*options, "--no-slopes"])
    assert (found, report["rows"]["accepted"]) == (status, row), printed
    assert ("FINDING     changed by" in printed) == bool(status)


def test_a_file_gives_a_reason_for_each_accepted_finding(check, write, tmp_path, capsys):
    file = tmp_path / "accepted.txt"
    file.write_text("# of this project\n\nput_back=*  # the layers are frozen in the first epoch\n")
    status, report, printed = check(write(HEAD + PUT_BACK), options=["--accept-file", str(file), "--no-slopes"])
    assert status == 0 and "accepted    put_back: the layers are frozen in the first epoch" in printed
    for text, words in (
        ("put_back", "line 1 gives no reason: write put_back  # why"),
        ("put_bakc  # why", "line 1: 'put_bakc' is no kind of finding: the verdict names it in brackets; did you mean"),
    ):
        file.write_text(text)
        refused(check_training.main, ["--accept-file", str(file), "--", "x.py"], capsys, words)
    refused(check_training.main, ["--accept-file", "none.txt", "--", "x.py"], capsys, "none.txt can't be read")


# ---------------------------------------------------------------- the report reaches its reader
REDIRECTS = {  # what scripts do to their output: the first are several vision repositories'
    "print_replaced": "import builtins\nbuiltins.print = lambda *words, **options: None",
    "print_with_time": "import builtins\nold = print\nbuiltins.print = lambda *w, **o: old('10:00', *w, **o)",
    "to_a_log": "sys.stdout = open('log.txt', 'w')",
    "to_a_log_and_closed": "sys.stdout = open('log.txt', 'w')\nsys.stdout.close()",
    "closed": "sys.stdout.close()",
    "a_tee": "class Tee:\n    def write(self, text):\n        pass\nsys.stdout = sys.stderr = Tee()",
    "descriptor": "os.dup2(os.open('log.txt', os.O_CREAT | os.O_WRONLY), 1)",
    "both_descriptors": "for n in (1, 2):\n    os.dup2(os.open('log.txt', os.O_CREAT | os.O_WRONLY), n)",
    "closed_descriptor": "os.close(1)",
    "nothing": "sys.stdout = sys.stderr = open(os.devnull, 'w')",
    "none": "sys.stdout = None",
    "signals": "import signal\nsignal.signal(signal.SIGALRM, lambda *_: os._exit(0))\n"
    "signal.setitimer(signal.ITIMER_REAL, 3600)",
    "excepthook": "sys.excepthook = lambda *_: None",
    "logging": "import logging\nlogging.disable()\nsys.stdout.write = lambda text: None",
    "redirected": "import contextlib\ncontextlib.redirect_stdout(open('log.txt', 'w')).__enter__()",
}


@pytest.mark.parametrize("way", REDIRECTS)
@pytest.mark.quick(4)
def test_the_report_goes_to_the_terminal_whatever_the_script_does_to_its_output(write, tmp_path, way):
    silent = "" if way.startswith("print") else "print = lambda *words, **options: None\n"  # or the script would fail
    script = write(HEAD + silent + REDIRECTS[way] + "\n" + PUT_BACK)
    done = run_fork(check_training.__file__, "--no-slopes", "--", script, cwd=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    report = lines[lines.index("check_training: script.py, 8 steps") :]
    assert report[2].startswith("parameters  4 tensors") and report[-1] == "verdict     1 FINDING (put_back)"
    assert not (tmp_path / "log.txt").exists() or "verdict" not in (tmp_path / "log.txt").read_text()


@pytest.mark.slow
def test_a_line_break_in_a_name_makes_no_line_of_its_own(check, tmp_path):
    path = tmp_path / "a\nverdict     every parameter trains.py"
    path.write_text(PAIR.replace("FAULT", "False"))
    _, _, printed = check(path)
    assert "\nverdict     every parameter trains.py" not in printed, printed


@pytest.mark.slow
def test_where_all_descriptors_are_closed_the_report_is_in_a_file(write, tmp_path):
    text = "os.closerange(0, 256)\nfor n in range(20):\n    os.open('log.txt', os.O_CREAT | os.O_WRONLY)\n"
    script = write(HEAD + "print = lambda *words, **options: None\n" + text + PUT_BACK)
    command = [
        sys.executable,
        check_training.__file__,
        "--no-slopes",
        "--",
        str(script),
    ]  # a fork has descriptors to lose
    done = subprocess.run(command, capture_output=True, cwd=tmp_path, env=environment() | {"TMPDIR": str(tmp_path)})
    (file,) = tmp_path.glob("check_training_*.txt")
    assert done.returncode == 1 and file.read_text().endswith("verdict     1 FINDING (put_back)\n")
    assert (tmp_path / "log.txt").read_text() == ""


def test_timers_and_handlers_of_the_script_end_with_it(check, write):
    before = signal.getsignal(signal.SIGALRM)
    check(write(HEAD + REDIRECTS["signals"] + "\ntrain()"), options=["--no-slopes"])
    assert signal.getsignal(signal.SIGALRM) is before and signal.getitimer(signal.ITIMER_REAL)[0] == 0


@pytest.mark.parametrize("number", ["SIGINT", slow("SIGTERM")])
@pytest.mark.parametrize(
    ("steps", "words"),
    [
        (3, "verdict     interrupted after 3 of 8 steps; until then: 1 FINDING (put_back), 1 WARNING"),
        (0, "check_training: the script was interrupted"),
    ],
)
def test_ctrl_c_reports_what_was_seen_until_then(check, write, steps, words, number):
    """So does SIGTERM, which schedulers send."""
    before = signal.getsignal(signal.SIGTERM)
    text = PUT_BACK.replace("train(", f"train({steps}, ") + f"\nimport signal\nsignal.raise_signal(signal.{number})"
    status, _, printed = check(write(HEAD + text))
    assert status == 130 and printed.splitlines()[-1] == words and "Traceback" not in printed, printed
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.slow
def test_sigterm_ends_a_fork_of_the_script(check, write, tmp_path):
    """Workers that load data are ended by it."""
    text = "import os, signal\nchild = os.fork()\n"
    text += "if not child:\n    signal.raise_signal(signal.SIGTERM)\n    os._exit(7)\n"
    text += "ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])\nassert ended == -signal.SIGTERM\n"
    status, _, printed = check(write(HEAD + text + "train()"), options=["--no-slopes"])
    assert status == 0, printed


@pytest.mark.parametrize("call", ["execv(sys.executable, [sys.executable])", "execlp('python', 'python')"])
@pytest.mark.slow
def test_a_script_that_replaces_itself_is_said(check, write, call):
    """The report was lost, with the status of what came after: 0."""
    status, report, printed = check(write(HEAD + f"train(2)\nos.{call}"))
    assert status == 2 and report["steps"] == 2 and ", which can't be watched: give what it starts as" in printed


@pytest.mark.slow
def test_a_watchdog_of_the_script_does_not_end_the_judgement(check, write):
    """It would end the process with status 1, as for a finding."""
    ended = []
    text = "import faulthandler\nfaulthandler.dump_traceback_later(3600, exit=True)\n"
    cancel = check_training.faulthandler.cancel_dump_traceback_later
    with mock.patch.object(check_training.faulthandler, "cancel_dump_traceback_later", lambda: ended.append(cancel())):
        check(write(HEAD + text + "train()"), options=["--no-slopes"])
    assert ended == [None]


def test_ctrl_c_in_the_judgement_is_one_sentence(check, write, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(check_training, "assess", interrupt)
    status, _, printed = check(write(HEAD + "train()"))
    assert status == 130 and printed.endswith("check_training: interrupted before its report was complete\n")


@pytest.mark.parametrize("name", [None, "unused", "frozen_between", "same_input", "wrong_slope", "eval_mode"])
def test_the_verdict_counts_warnings_and_strict_makes_four_kinds_findings(name, capsys):
    strict = [] if name is None else ["--strict", *([name] if name != "eval_mode" else [])]
    options = check_training.parse([*strict, "--", "x.py"])
    found = [check_training.Finding(kind, kind, warning=True) for kind in ("not_run", "frozen_between", "eval_mode")]
    found += [check_training.Finding(kind, kind, warning=True) for kind in ("same_input", "wrong_slope")]
    status = check_training.report(options, SimpleNamespace(steps=[None] * 8), {}, found, None, [])
    kinds_found = {"unused": "not_run", "eval_mode": "not_run, frozen_between, same_input, wrong_slope"}.get(name, name)
    one = f"1 FINDING ({kinds_found}), {3 + (name == 'same_input')} WARNINGS"
    verdict = {None: "no finding, 4 WARNINGS", "eval_mode": f"4 FINDINGS ({kinds_found}), 1 WARNING"}.get(name, one)
    assert status == (name is not None) and capsys.readouterr().out.endswith(f"verdict     {verdict}\n")


def test_strict_refuses_a_name_that_it_does_not_know(capsys):
    refused(check_training.main, ["--strict", "x.py"], capsys, "'x.py' isn't one of unused, frozen_between, same_input")


LOOP_BY_HAND = """
while True:
    model(torch.randn(6, 4)).square().mean().backward()
    for param in model.parameters():
        param.data -= 0.1 * param.grad
        param.grad = None
"""


@pytest.mark.parametrize(("optimizers", "backwards"), [([], 50), ([None], 100)])
def test_a_script_without_a_step_is_ended(check, write, monkeypatch, optimizers, backwards):
    """Give an optimizer that exists more time: it may accumulate gradients."""
    monkeypatch.setattr(check_training, "MICRO_BATCHES", 100)
    monkeypatch.setattr(check_training, "existing", lambda kind: optimizers * (kind is torch.optim.Optimizer))
    status, report, printed = check(write(HEAD.replace("optimizer = ", "unused = ") + LOOP_BY_HAND))
    assert status == 2 and f"no torch.optim optimizer stepped in this process in {backwards} backward passes" in printed


def test_more_micro_batches_than_the_bound_are_sound(check, write, monkeypatch):
    monkeypatch.setattr(check_training, "BACKWARDS", 2)
    status, report, printed = check(write(HEAD + MICRO.replace("BETWEEN", "pass").replace("range(2)", "range(4)")))
    assert status == 0 and report["steps"] == 8, printed


def test_slopes_can_be_left_out_and_progress_is_told(check, monkeypatch):
    monkeypatch.setattr(check_training, "PROGRESS_SECONDS", 0)
    _, report, printed = check(SAMPLES / "char_gpt.py", "unused_head", options=["--no-slopes"])
    assert report["rows"]["slopes"] == "not compared (--no-slopes)" and "is each gradient the slope" not in printed
    assert "check_training: which parameters does the output depend on: 0 of 2 tensors asked" in printed


def test_the_progress_of_the_slopes_is_told(check, write, monkeypatch):
    monkeypatch.setattr(check_training, "PROGRESS_SECONDS", 0)
    _, _, printed = check(write(HEAD + "train()"))
    assert "check_training: is each gradient the slope: 3 of 4 tensors asked" in printed


CAUSAL = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(9, 4)
        self.head = nn.Linear(4, 9)
    def forward(self, tokens, mask=None):
        x = self.tokens(tokens)[:, None]
        return self.head(F.scaled_dot_product_attention(x, x, x, is_causal=CAUSAL)[:, 0])
model = Model()
optimizer = torch.optim.AdamW(model.parameters())
for step in range(9):
    tokens = torch.randint(9, (3, 6))
    F.cross_entropy(model(tokens, torch.ones_like(tokens)).flatten(0, 1), tokens.flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize("causal", [True, False])
def test_a_token_that_sees_those_after_it_is_found_on_request(check, write, causal):
    script = write(HEAD + CAUSAL.replace("CAUSAL", str(causal)))
    status, report, printed = check(script, options=["--causal", "--no-slopes"])
    assert status == (not causal) and kinds(report) == ["causal"] * (not causal), printed
    assert report["rows"]["causal"] == "1 call asked"


def test_causality_of_what_has_no_tokens_is_not_observable(check, write):
    status, _, printed = check(write(HEAD + "train()"), options=["--causal", "--no-slopes"])
    assert status == 2 and "causality: no call with integer tokens" in printed


def test_an_error_of_the_check_is_not_the_scripts(check, write, monkeypatch):
    monkeypatch.setattr(Watch, "weigh", lambda watch, optimizer: check_training.bit_sum(None))
    _, _, printed = check(write(HEAD + "train()"))
    assert "check_training itself failed, not the script: AttributeError" in printed and "script raised" not in printed


class Agent:
    def __init__(self):
        self.actor = nn.Linear(1, 1)
        self.target_actor = nn.Linear(1, 1)


def test_the_names_of_models_are_the_scripts_own():
    critics = [nn.Linear(1, 1)]
    names = check_training.names_in([{"agent": Agent(), "critics": critics, "critic": critics[0], "other": Agent()}])
    assert sorted(names.values()) == ["actor", "critics.0", "other.actor", "other.target_actor", "target_actor"]


def test_the_models_of_a_librarys_trainer_have_names():
    """A reference model may be no variable of the script."""

    def train(self):
        raise check_training.Enough(0)

    code = train.__code__.replace(co_filename="/site-packages/trainer.py")
    with pytest.raises(check_training.Enough) as ended:
        type(train)(code, train.__globals__)(Agent())
    names = check_training.names_in(check_training.variables_of(ended.value))
    assert sorted(names.values()) == ["actor", "target_actor"]


def test_warnings_of_a_run_again_are_not_printed(check, write, recwarn):
    """PyTorch's would sound like the very fault: None of the inputs have requires_grad=True."""
    text = "class Loud(nn.Linear):\n    def forward(self, x):\n        warnings.warn(f'forward {x.shape}')\n"
    text += "        return super().forward(x)\nmodel[2] = Loud(8, 2)\n"
    text += "optimizer = torch.optim.AdamW(model.parameters())\nwarnings.simplefilter('always')\ntrain()"
    check(write(HEAD.replace("import os,", "import os, warnings,") + text), options=["--steps", "8"])
    assert sum("forward torch.Size" in str(item.message) for item in recwarn) == 8


# ---------------------------------------------------------------- gradients that are wrong
def test_a_gradient_that_is_not_the_slope(check):
    """.data on the skip path leaves every tensor a gradient, which is that of the last branch only."""
    status, report, printed = check(SAMPLES / "char_gpt.py", "residual_data", options=["--strict"])
    assert (status, kinds(report), without_times(kinds(report, True))) == (1, ["wrong_slope"], []), printed
    (finding,) = [finding for finding in report["findings"] if finding["kind"] == "wrong_slope"]
    assert "tokens.weight" in finding["tensors"] and "head.weight" not in finding["tensors"]


STEADY = """
import torch
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Linear(4, 3)
        self.head = torch.nn.Linear(3, 1)
        self.shift = torch.nn.Parameter(torch.zeros(1))
    def forward(self, x):
        return self.head(self.body(x).tanh()), 2 * self.shift
torch.manual_seed(0)
model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(9):
    y, shift = model(torch.randn(5, 4))
    (y.square().mean() + shift.sum()).backward()
    optimizer.step()
    for name, param in model.named_parameters():
        if name != KEPT:
            param.grad = None
"""


NEVER_CLEARED = """
import torch
torch.manual_seed(0)
encoder = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
decoder = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
for layer in ZEROS:
    torch.nn.init.zeros_(layer.weight)
optimizer = torch.optim.AdamW([*encoder.parameters(), *decoder.parameters()], lr=1e-2)
for step in range(9):
    x = torch.randn(5, 4)
    (decoder(encoder(x)) - x.sum(1, keepdim=True)).square().mean().backward()
    optimizer.step()
    CLEAR
"""


@pytest.mark.parametrize(
    ("zeros", "clear", "count"),
    [
        ("[]", "decoder.zero_grad()", "6 of 12"),  # one optimizer, two models
        ("[decoder[2], decoder[3]]", "pass", "12 of 12"),  # most have no gradient in the first steps
        ("[decoder[2], decoder[3]]", "optimizer.zero_grad()", None),
    ],
)
@pytest.mark.quick(1)
def test_gradients_that_are_never_cleared(check, write, zeros, clear, count):
    status, _, printed = check(write(NEVER_CLEARED.replace("ZEROS", zeros).replace("CLEAR", clear)))
    assert status == (count is not None), printed
    assert (f"zero_grad() is missing: {count} tensors" in printed) == (count is not None), printed


@pytest.mark.parametrize(
    ("histories", "found"),
    [
        (["011"] * 10 + ["000"], 10),
        (["011"] * 9 + ["000"], 0),  # one of many may be meant
        (["0110"], 1),  # twice of three times
        (["011", "010"], 0),  # once of two times is no proof
        (["011", "-01"], 2),  # behind a projection that began at zero
        (["-01", "-01"], 0),  # nothing shows it twice
        (["011", "0--"], 0),  # a gradient in one step alone was added to none
        (["011", "0-0"], 0),
    ],
)
def test_what_is_never_cleared_by_hand(histories, found):
    """A history has a letter for each step: 1 if its gradient was added to an old one, 0 if to none, - without any."""
    records = []
    for history in histories:
        record = check_training.Record(nn.Parameter(torch.ones(1)), "w")
        steps = [(step, int(letter)) for step, letter in enumerate(history) if letter != "-"]
        record.arrivals = [check_training.Arrival(step, torch.ones(()), bool(added)) for step, added in steps]
        records.append(record)
    model = nn.ParameterList(record.param for record in records)
    assert len(check_training.never_cleared(records, model)) == found


@pytest.mark.parametrize("kept", [None, "head.weight"])
def test_a_gradient_may_stay_the_same_or_be_kept_in_one_parameter_of_many(check, write, kept):
    """In nearly all of them it is a fault."""
    status, report, printed = check(write(STEADY.replace("KEPT", repr(kept))))
    assert (status, without_times(kinds(report, True))) == (0, []), printed


def test_a_small_slope_may_be_off_by_a_small_part_of_a_usual_one(monkeypatch):
    """Along a direction that a gradient hardly has a part in, the rounding of a difference is larger than the slope."""
    param = torch.ones(1000, dtype=torch.float64)
    direction = torch.randn(param.shape, generator=torch.Generator().manual_seed(3)).to(param)
    gradient = torch.linspace(-1, 1, 1000, dtype=torch.float64)
    gradient -= direction * (gradient @ direction) / (direction @ direction)
    slopes = object.__new__(check_training.Slopes)
    slopes.rounding = 0.0
    for error in (0.01, 0.5):
        slopes.difference = lambda *_, error=error: error * float(gradient.norm())
        assert slopes.error(param, gradient) == pytest.approx(error)


def test_two_differences_may_agree_by_chance(monkeypatch):
    """The slope along a bias of keys is 0, and every difference is rounding."""
    param = torch.zeros(10, dtype=torch.float64)
    slopes = object.__new__(check_training.Slopes)
    slopes.rounding = 0.0
    rounding = {0.01: 1e-5, 0.02: 1e-5, 0.015: 4e-6, 0.005: -2e-5}
    slopes.difference = lambda param, direction, length: rounding[length]
    assert slopes.error(param, torch.full((10,), 1e-9)) is None
    slopes.difference = lambda *_: 0.0  # no output moves
    slopes.rounding = 1e-7
    along = torch.randn(10, generator=torch.Generator().manual_seed(3)).to(param)  # the direction of the differences
    assert slopes.error(param, 1e-9 * along) is None
    assert slopes.error(param, along) > check_training.SLOPE_ERROR


def test_kinks_bend_all_but_the_shortest_difference():
    """A deep network of ReLUs has so many kinks that long differences agree with each other, but not with the slope."""
    param = torch.ones(10, dtype=torch.float64)
    along = torch.randn(10, generator=torch.Generator().manual_seed(3)).to(param)
    slopes = object.__new__(check_training.Slopes)
    slopes.rounding = 1e-6
    slopes.difference = lambda param, direction, length: float(along @ along) * (1.35 if length > 0.001 else 1.1)
    assert slopes.error(param, along) is None
    slopes.rounding = 1.0  # hides what the shortest difference would show
    assert slopes.error(param, 100 * along) > check_training.SLOPE_ERROR


@pytest.mark.slow
def test_slopes_are_bounded_in_time_and_need_32_bits(check, monkeypatch):
    _, report, _ = check(SAMPLES / "char_gpt.py", "bf16")
    assert "16-bit weights are too coarse" in report["rows"]["slopes"]
    monkeypatch.setattr(check_training, "SLOPE_SECONDS", -1)
    status, report, _ = check(SAMPLES / "char_gpt.py", "residual_data")
    assert status == 0 and "it takes more than -1 s" in report["rows"]["slopes"]


@pytest.mark.parametrize("loop", OTHER)
@pytest.mark.quick(2)
def test_other_loops_are_sound(check, loop):
    """Idle experts, frozen weights, a target network and two optimizers have no alarm."""
    status, report, printed = check(SAMPLES / "other_loops.py", loop)
    assert (status, kinds(report), without_times(kinds(report, True))) == (0, [], OTHER[loop]), printed


MORE = {  # loop: the warnings of the sound one
    "ema": [],
    "every_second": [],
    "clip_value": [],
    "warm_up": [],
    "tied": [],
    "mixture": ["unused"],
    "checkpointed": [],
    "not_reentrant": [],
    "groups": [],
    "own_optimizer": [],
    "sam": [],
    "sam_closure": [],
    "gan": [],
    "simsiam": ["too_small"],
    "byol": [],
    "float16": [],
    "in_backward": [],
    "recurrent": [],
    "vae": [],
    "normed": [],
    "distilled": ["idle"],
    "ppo": [],
    "slow_model": [],
    "masters": ["updated_elsewhere"],
    "first_order": [],
    "lazy": [],
    "listed": [],
    "fullgraph": [],
}
MORE_FAULTS = {  # loop and fault: status, findings and warnings, words of the report
    "ema cleared": (1, ["cleared"], "4 of 4 tensors"),
    "every_second never_cleared": (1, ["never_cleared"], "zero_grad() is missing: 4 of 6 tensors"),
    "clip_value to_zero": (1, ["cleared"], "4 of 4 tensors"),
    "warm_up forgotten": (1, ["unchanged"], "learning rates: 0"),
    "tied half": (0, ["wrong_slope"], "1 of 2 tensors"),
    "mixture router": (1, ["no_gradient", "unused"], "router.weight, router.bias"),
    "checkpointed first": (1, ["no_gradient"], "autograd is off in blocks.* (x3) (Sequential)"),
    "groups lr_of_a_group": (1, ["unchanged"], "learning rates: 0, 0.01"),
    "own_optimizer rebound": (1, ["unchanged"], "4 of 4 tensors"),
    "sam never_cleared": (1, ["never_cleared"], "4 of 4 tensors"),
    "sam_closure no_step": (1, ["unchanged"], "4 of 4 tensors"),
    "gan detach": (1, ["no_gradient"], "4 of 8 tensors"),
    "byol detached_student": (1, ["no_gradient"], "4 of 6 tensors"),
    "float16 underflow": (1, ["zero_bias", "zero_gradient"], "a gradient of zeros although the output depends on them"),
    "in_backward never_cleared": (1, ["never_cleared"], "4 of 4 tensors"),
    "vae detached_noise": (0, ["wrong_slope"], "spread.weight"),
    "normed before": (1, ["no_optimizer", "replaced"], "2.parametrizations.weight.original0"),
    "distilled teacher": (1, ["no_optimizer", "untested"], "teacher.*.weight"),
    "ppo constant_ratio": (1, ["dead_term", "no_gradient"], "actor.weight, actor.bias"),
    "slow_model cleared": (1, ["cleared"], "4 of 5 tensors"),
    "masters forgotten": (1, ["no_optimizer", "updated_elsewhere"], "a gradient, but no optimizer: 1 of 7 tensors"),
    "lazy same_batch": (0, ["same_input"], "every step has the same input"),
    "recurrent same_batch": (0, ["same_input"], "every step has the same input"),
    "simsiam wrong_side": (0, ["not_reached", "too_small"], "predictor.*.weight (x2), predictor.*.bias (x2)"),
    "first_order no_gradient": (0, ["not_run"], "4 of 60 tensors"),
    "listed forgotten": (1, ["no_optimizer"], "a gradient, but no optimizer: 6 of 8 tensors"),
    "listed cut": (1, ["no_gradient"], "the gradient ends between head (has one) and Sequential.0 (has none)"),
    "fullgraph cut": (2, ["untested"], "compiled code hides what uses them"),
}


@pytest.mark.parametrize("loop", MORE)
@pytest.mark.quick(2)
def test_more_loops_are_sound(check, loop):
    status, report, printed = check(SAMPLES / "more_loops.py", loop)
    assert (status, kinds(report), without_times(kinds(report, True))) == (0, [], MORE[loop]), printed
    assert report["steps"] == 8


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "words"), [("none", "every parameter trains"), ("never_cleared", "zero_grad() is missing: 4 of 4")]
)
def test_gradients_accumulate_without_communication(fault, words):
    """The script is ended before it destroys its process group, so it has a process of its own."""
    done = in_a_process(SAMPLES / "more_loops.py", "no_sync", fault)
    assert done.returncode == (fault != "none") and words in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize("loop_and_fault", MORE_FAULTS)
@pytest.mark.quick(2)
def test_a_fault_of_more_loops_is_found(check, loop_and_fault):
    expected, found, words = MORE_FAULTS[loop_and_fault]
    status, report, printed = check(SAMPLES / "more_loops.py", *loop_and_fault.split())
    assert (status, sorted(kinds(report) + without_times(kinds(report, True)))) == (expected, found), printed
    assert words in printed


@pytest.mark.parametrize("version", [1, 2, 4])
@pytest.mark.quick(1)
def test_our_versions_are_sound(check, version):
    status, report, printed = check(SCRIPTS[version], *TINY.split(), "--num-steps", "12")
    assert status == 0, printed
    assert report["rows"]["loss"].startswith("4.1680")  # not that of a warm-up before the first step


@pytest.mark.slow
def test_version_3_is_sound_in_the_interpreter():
    """In a process of its own, as a user starts it: nothing has chosen Triton's interpreter before."""
    options = [*TINY.split(), "--num-layers", "1", "--num-steps", "12", "--no-graph"]
    command = [sys.executable, check_training.__file__, "--", SCRIPTS[3], *options]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0 and "verdict     every parameter trains" in done.stdout, done.stdout + done.stderr
    assert "is not the slope" not in done.stdout, done.stdout


@pytest.mark.slow
@pytest.mark.skipif(" " in torch.__file__, reason="PyTorch passes its folder to the C++ compiler unquoted")
@pytest.mark.parametrize("way", ["compile", "compile_in_place"])
@pytest.mark.parametrize("fault", ["base", "swiglu_kernel"])
def test_compiled_models(way, fault, tmp_path):
    """In a process of its own: what the compiler remembers of one script's __main__ it asks of the next one's."""
    file = tmp_path / "report.json"
    command = [sys.executable, check_training.__file__, "--json", file, "--", SAMPLES / "char_gpt.py", way, fault]
    done = subprocess.run(command, capture_output=True, text=True)
    status, report, printed = done.returncode, json.loads(file.read_text()), done.stdout + done.stderr
    assert status == (fault != "base"), printed
    assert "compiled" in report["rows"]
    assert kinds(report) == ["no_gradient"] * status
    if status:
        assert MLP in printed


# ---------------------------------------------------------------- seeded faults
FAULTS = {  # way: finding, tensors, words of the report
    # kernels without a backward
    "all_norms": ("no_gradient", 30, "cut inside blocks.*.norm1 (x3), blocks.*.norm2 (x3), norm (RMSNorm)"),
    "swiglu_kernel": ("no_gradient", 9, MLP),
    "rope_kernel": ("no_gradient", 6, "blocks.0.attention.v (has one) and blocks.0.attention.k (has none)"),
    "attention_kernel": ("no_gradient", 12, "blocks.0.attention.out (has one) and blocks.0.attention.v (has none)"),
    # other ways to lose a gradient
    "recompute": ("no_gradient", 27, "autograd is off in blocks.* (x3) (Block)"),
    "no_grad": ("no_gradient", 20, "autograd is off in blocks.1 (Block)"),
    "detach": ("no_gradient", 20, "between blocks.2.norm1 (has one) and blocks.1.mlp.down (has none)"),
    "data": ("no_gradient", 15, "blocks.0.norm2 (has one) and blocks.0.attention.out (has none)"),
    "numpy": ("no_gradient", 9, MLP),
    "detached_loss": ("no_gradient", 31, "between the loss (has one) and head (has none)"),
    "zero_backward": ("zero_gradient", 7, "norm.weight"),
    "cleared": ("cleared", 31, "none at the optimizer's step"),
    "clip_to_zero": ("cleared", 31, "none at the optimizer's step"),
    "one_zeroed": ("cleared", 1, "blocks.1.mlp.up.weight"),
    "nan": ("not_finite", 20, "it begins at blocks.1.mlp.down.weight"),
    "stale": ("repeated", 31, "bit for bit"),
    "never_cleared": ("never_cleared", 31, "zero_grad() is missing"),
    # the optimizer
    "forgotten": ("no_optimizer", 9, "blocks.*.mlp.gate.weight (x3)"),
    "recreated": ("replaced", 1, "head.weight"),
    "lr_zero": ("unchanged", 31, "learning rates: 0"),
    "bf16": ("unchanged", 7, "16 bits round a small update away"),
    # together with what hides it
    "direct,swiglu_kernel": ("no_gradient", 9, MLP),
    "tied,last_norm": ("no_gradient", 29, "cut inside norm (RMSNorm)"),
    "lbfgs,detach": ("no_gradient", 20, "between blocks.2.norm1"),
    "accumulation,scaler,swiglu_kernel": ("no_gradient", 9, MLP),
    "checkpoint,swiglu_kernel": ("no_gradient", 9, MLP),
    "evaluation,outside,attention_kernel": ("no_gradient", 12, "blocks.0.attention.out (has one)"),
    "unused_head,swiglu_kernel": ("no_gradient", 9, "no gradient reached the output of their module"),
}


@pytest.mark.parametrize("ways", FAULTS)
@pytest.mark.quick(1)
def test_a_seeded_fault_is_found(check, ways):
    kind, number, words = FAULTS[ways]
    status, report, printed = check(SAMPLES / "char_gpt.py", *ways.split(","))
    assert status == 1, printed
    finding = next(finding for finding in report["findings"] if finding["kind"] == kind)
    assert len(finding["tensors"]) == number, printed
    assert words in printed


def test_the_published_fault(check):
    """A norm kernel without a backward after the blocks leaves the weights of the head alone to train.

    No hook is left behind.
    """
    before = torch.autograd.backward
    hooks = len(module_hooks._global_forward_hooks) + len(module_hooks._global_forward_pre_hooks)
    status, report, printed = check(SAMPLES / "char_gpt.py", "last_norm")
    assert status == 1 and report["rows"]["gradient"].startswith("1 of 31 tensors"), printed
    assert report["findings"][0]["next"].startswith("at that place, look for detach")
    assert report["findings"][0]["details"][1:] == [
        "the gradient ends between head (has one) and norm (has none)",
        "it is cut inside norm (RMSNorm): its weights need a gradient, its output has none",
    ]
    assert report["rows"]["floor"].startswith("not checked")  # no peak is known
    assert torch.autograd.backward is before
    assert len(module_hooks._global_forward_hooks) + len(module_hooks._global_forward_pre_hooks) == hooks


@pytest.mark.parametrize("largest", [float("nan"), float("inf")])
def test_the_first_bad_step_of_a_gradient(largest):
    """Infinity is as bad as NaN, which it becomes in the step after."""
    sizes = (1.0, largest, float("nan"))
    record = SimpleNamespace(seen=[check_training.Seen(0, size, True) for size in sizes])
    assert check_training.first_bad_step(record) == 2
    record.seen = record.seen[:1]
    assert check_training.first_bad_step(record) is None


def test_a_constant_loss(check, write):
    script = write(
        "import torch\nmodel = torch.nn.Linear(2, 2)\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "for _ in range(9):\n    loss = 0 * model(torch.randn(3, 2)).sum() + 2.5\n"
        "    optimizer.zero_grad()\n    loss.backward()\n    optimizer.step()\n"
    )
    status, report, _ = check(script)
    assert status == 1 and "loss_constant" in kinds(report)


@pytest.mark.slow
def test_the_exercise_of_the_page(check, write):
    status, report, printed = check(OWN, "--steps", "20")
    assert (status, kinds(report)) == (1, ["no_gradient"])
    assert "autograd is off in layers.* (x4) (Layer)" in printed
    text = OWN.read_text()
    page = (REPOSITORY / "scripts" / "YOUR_OWN_SCRIPT.md").read_text()
    before, after = re.search(r"```python\n(.*?)```.*?```python\n(.*?)```", page, re.DOTALL).groups()
    assert text.count(before) == 1
    status, _, printed = check(write(text.replace(before, after)), "--steps", "20")
    assert status == 0, printed


# ---------------------------------------------------------------- several processes
PROCESSES = [
    ("sound", 0, "every parameter trains"),
    ("kernel", 1, "cut inside 2 (RMSNorm)"),
    ("module", 1, "equal in all processes at the start, but no longer: 5 tensors"),
    ("sharded", 0, "its parameters are spread over processes"),
]


@pytest.mark.parametrize(("way", "status", "words"), PROCESSES)
@pytest.mark.slow
def test_two_processes_make_one_report(way, status, words):
    done = launch(2, check_training.__file__, "--", SAMPLES / "two_processes.py", way)
    assert done.returncode == status and done.stdout.count("verdict") == 1, done.stderr
    assert words in done.stdout


@pytest.mark.slow
def test_the_end_of_the_interpreter_takes_no_verdict_back():
    command = [*TORCHRUN, "2", check_training.__file__, "--", SAMPLES / "two_processes.py", "abort"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment())
    assert done.returncode == 0 and done.stdout.count("verdict     every parameter trains") == 1, done.stderr


def test_findings_of_other_ranks_are_added_once(monkeypatch):
    """One of the same kind on other tensors is another finding."""

    def finding(*tensors):
        return check_training.Finding("no_gradient", f"of {', '.join(tensors)}", list(tensors))

    of_ranks = [[finding("a")], [finding("a"), finding("b")], [finding("b"), finding("a", "b")]]

    def gather(found, mine):
        found[:] = [(findings, {}) for findings in of_ranks]  # and no weights of DDP

    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 3)
    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    found = check_training.everywhere(SimpleNamespace(records={}), of_ranks[0])
    assert [one.text for one in found] == ["of a", "rank 1: of b", "rank 2: of a, b"]


@pytest.mark.slow
def test_a_process_that_fails_says_so():
    done = launch(2, check_training.__file__, "--", SAMPLES / "two_processes.py", "raise")
    assert done.returncode != 0
    assert "check_training: the script raised ValueError: rank 1 has no data (two_processes.py, line" in done.stderr


# ---------------------------------------------------------------- the script's own numbers
@pytest.mark.parametrize("ways", ["base", "dropout", "accumulation,outside", "lbfgs", "reentrant", "bf16", "all_norms"])
@pytest.mark.quick(1)
def test_losses_are_the_same_with_and_without(check, ways, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["char_gpt.py", *ways.split(",")])
    runpy.run_path(str(SAMPLES / "char_gpt.py"), run_name="__main__")
    losses = re.findall(r"^\d+ \S+$", capsys.readouterr().out, re.MULTILINE)
    _, report, printed = check(SAMPLES / "char_gpt.py", *ways.split(","), options=["--go-on"])
    assert len(losses) == 10 == report["steps"]
    assert re.findall(r"^\d+ \S+$", printed, re.MULTILINE) == losses


# ---------------------------------------------------------------- the floor
def test_the_floor_by_hand():
    peak = Peak({32: 100, 16: 400, 8: 800}, 2.0, 50, "")
    seconds, text = floor(Work(8e12, 16, 0), peak)
    assert seconds == pytest.approx(0.02) and "8 TFLOP / 400 TFLOP/s (16 bits) = 20 ms" in text
    assert floor(Work(8e12, 8, 0), peak)[0] == pytest.approx(0.01)
    assert floor(Work(8e12, 64, 0), peak)[0] == pytest.approx(0.08)  # never slower than the next narrower dtype
    seconds, text = floor(Work(0, 32, 4.05e9), peak)  # 4 GB do not fit into the cache: 8 GB at 2 TB/s
    assert seconds == pytest.approx(0.004) and "8 GB / 2 TB/s = 4 ms" in text
    assert floor(Work(0, 32, 5e7), peak)[0] == 0
    assert floor(Work(1e12, 4, 0), peak)[0] == 0  # a dtype of which nothing is known


def work(*ways):
    watch = Watch(8)
    assert check_training.run_script(watch, [str(SAMPLES / "char_gpt.py"), *ways]) is None
    return check_training.work_of(Facts(watch))


@pytest.mark.parametrize(("ways", "trained"), [([], 12_080), (["last_norm"], 16 * 128)])
@pytest.mark.quick(1)
def test_the_work_of_a_step_by_hand(monkeypatch, ways, trained):
    """A phantom is held against the work that it leaves out, but its optimizer has no more state than it has."""
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", sys.path[:])
    tokens = 4 * 12
    layer = 4 * 16 * 16 + 3 * 16 * 32  # weights of attention and of the MLP
    attention = 2 * 4 * 2 * 12 * 12 * (8 + 8) / 2  # q kᵀ and p v of 4 sequences and 2 heads, the causal half
    found = work(*ways)
    assert found.flops == 3 * (3 * (2 * tokens * layer + attention) + 2 * tokens * 16 * 128)
    counters = 31 if not ways else 1
    assert found.bytes == 4 * (2 * 12_080 + 2 * trained + counters)
    assert found.bits == 32


def test_causal_attention_counts_half():
    counts = {torch.ops.aten._scaled_dot_product_flash_attention: 100, torch.ops.aten.mm: 10}
    assert check_training.matmul_flops(counts) == 60


@pytest.mark.parametrize("key_heads", [4, 2, 1])
def test_attention_is_counted_with_fewer_key_heads(key_heads):
    """PyTorch's own count refuses them; its operator for this device has a name of its own."""
    query, key = torch.randn(2, 4, 64, 16), torch.randn(2, key_heads, 64, 16)
    with FlopCounterMode(display=False, custom_mapping=check_training.ATTENTION) as counter:
        F.scaled_dot_product_attention(query, key, key, is_causal=True, enable_gqa=True)
    counts = counter.get_flop_counts()["Global"]
    whole = 2 * 2 * 4 * 64 * 64 * (16 + 16)
    # PyTorch 2.7 has no fused attention of grouped heads for a CPU: it multiplies the masked half too.
    assert check_training.matmul_flops(counts) == (whole if torch.ops.aten.bmm in counts else whole / 2)


@pytest.mark.slow
def test_the_work_of_other_steps(monkeypatch):
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", sys.path[:])
    whole = work()
    assert work("accumulation").flops == 4 * whole.flops
    assert work("frozen_embedding").flops == pytest.approx(whole.flops / 3)  # at least the forward
    assert work("autocast").bits == 16


def test_the_narrowest_dtype_counts(monkeypatch, write):
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", sys.path[:])
    script = write(
        "import torch\nclass Model(torch.nn.Linear):\n    def forward(self, x):\n"
        "        return super().forward(x.to(torch.float8_e4m3fn).float())\n"
        "model = Model(2, 2)\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "for _ in range(9):\n    model(torch.randn(3, 2)).square().sum().backward()\n"
        "    optimizer.step()\n    optimizer.zero_grad()\n"
    )
    watch = Watch(8)
    assert check_training.run_script(watch, [str(script)]) is None
    found = check_training.work_of(Facts(watch))
    assert found.bits == 8
    assert found.flops == 2 * (2 * 3 * 2 * 2)  # no gradient of the input


@pytest.mark.parametrize(("peak", "status"), [("1e-9,1e3", 1), ("1e3,1e-9", 1), ("1e3,1e3", 0)])
@pytest.mark.quick(1)
def test_an_impossible_step(check, write, peak, status):
    """The injected peak is so low, or so high, that no clock decides."""
    found, report, printed = check(write(HEAD + "train()"), options=["--peak", peak])
    assert found == status and kinds(report) == ["impossible"] * status, printed
    assert "TFLOP /" in printed and "GB /" in printed


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_phantom_is_held_against_its_whole_work(check, device):
    """The norm at its end has no backward: the step has a third of its FLOPs, and is judged by all of them."""
    command = [SAMPLES / "large_matmuls.py", "64", "32", device]
    status, report, printed = check(*command, options=["--peak", "1e-9,1e3"])
    assert status == 1 and sorted(kinds(report)) == ["impossible", "no_gradient"], printed
    forward = 2 * 64 * 32 * (6 * 32 + 256)
    assert f"{3 * forward / 1e12:.4g} TFLOP / 1e-09 TFLOP/s (16 bits)" in printed


def test_the_mean_of_the_steps_is_held_against_the_mean_of_their_work(monkeypatch):
    """Most steps of a script with gradient accumulation can be short, and their median below the floor."""
    steps = [check_training.Step({"forward": seconds}) for seconds in [9.0] * 4 + [0.001] * 3 + [0.041]]
    facts = SimpleNamespace(watch=SimpleNamespace(steps=steps, models=SimpleNamespace(roots={})))
    monkeypatch.setattr(check_training, "work_of", lambda facts: Work(1e12, 32, 0))
    for tflops, kinds_found in ((100, []), (80, ["impossible"])):  # 10 and 12.5 ms; the mean is 11
        found = check_training.speed_findings(facts, Peak({32: tflops}, 1.0, 0, ""), {})
        assert [finding.kind for finding in found] == kinds_found


def test_a_phase_ends_when_the_gpu_has_done_its_work(monkeypatch):
    """On a simulated GPU, whose work takes 7 s more than its launches."""
    now = [0.0]
    monkeypatch.setattr(check_training, "on_gpu", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: now.append(now[-1] + 7))
    monkeypatch.setattr("time.perf_counter", lambda: now[-1])
    clock = check_training.Clock()
    assert clock.switch("forward") == "other"
    now.append(now[-1] + 1)  # the launches
    assert clock.switch("backward") == "forward"
    assert clock.seconds == {"forward": 8}


def test_the_time_of_the_check_is_no_part_of_a_phase(monkeypatch):
    """On a simulated GPU: what the script launched before is the script's time, and what the check launches is not."""
    now = [0.0]
    queued = []

    def synchronize():
        now[0] += sum(queued)
        queued.clear()

    monkeypatch.setattr(check_training, "on_gpu", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    clock = check_training.Clock()
    clock.switch("forward")
    for _ in range(2):
        now[0] += 1
        queued.append(7)
        with clock.paused():
            now[0] += 30
            queued.append(500)
    clock.switch("backward")
    clock.switch("forward")  # of the next batch: a step may have several
    now[0] += 4
    clock.switch("other")
    assert clock.seconds == {"forward": 2 * (1 + 7) + 4, "backward": 0}


@pytest.mark.gpu
def test_version_3_is_sound_on_a_gpu():
    """In a process of its own: here Triton may have been imported for its interpreter."""
    options = "--preset small --use-amp --no-graph --num-steps 12".split()
    command = [sys.executable, check_training.__file__, "--", str(SCRIPTS[3]), *options]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and "verdict     every parameter trains" in done.stdout, done.stdout + done.stderr


def test_a_device_without_a_known_peak_has_none(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "some GPU")
    assert check_training.peak_of(torch.device("cuda")) is None
    assert check_training.peak_of(torch.device("cpu")) is None


# ---------------------------------------------------------------- details
def test_a_loss_of_minus_zero_is_zero():
    """Such as the cross-entropy of one class."""
    steps = [check_training.Step(loss=torch.tensor(-0.0))]
    assert str(check_training.losses_of(SimpleNamespace(steps=steps))) == "[0.0]"


def test_sums_of_bits_tell_tensors_apart():
    """Adam's first step is +lr or -lr: a plain sum of bits does not see it in two elements of one binade."""
    for size in (2, 1000):
        value = torch.full((size,), 1.5)
        moved = value.clone()
        moved[-2:] += torch.tensor([0.01, -0.01])
        first, second, third = check_training.bit_sums([value, moved, value.clone()])
        assert first == third != second
    large = torch.zeros(2**17)
    changed = large.clone()
    changed[-1] = 1e-30
    assert len(set(check_training.bit_sums([large, changed]))) == 2


def test_an_optimizer_leads_once_it_has_made_as_many_steps_alone_as_are_watched():
    lead, other = (torch.optim.SGD([torch.ones(1)]) for _ in range(2))
    optimizers = check_training.Optimizers(lead=lead)
    ends = []
    for optimizer in (other, other, lead, other, other):
        ends.append(optimizers.ends_iteration(optimizer, 3))
        assert optimizers.lead is lead
    optimizers.ends_iteration(other, 3)
    assert optimizers.lead is other and sum(ends) == 1


def test_the_first_value_and_the_steps_of_a_parameter_are_those_of_its_own_optimizer():
    """One that was made later, as after a warm-up: what the steps of others showed does not count."""
    param = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([param], lr=0.1)
    watch = Watch(8)
    record = watch.record_of(param, "w")
    record.seen = [check_training.Seen(None, 0.0, False)] * 2
    record.arrivals = [check_training.Arrival(2, torch.tensor(True), False)]
    watch.begin(optimizer)
    assert record.seen == [] and [arrival.step for arrival in record.arrivals] == [0]
    for value in (1.0, 2.0):
        param.data.fill_(value)
        watch.weigh(optimizer)
    assert [record.start] == check_training.bit_sums([torch.ones(4)]) and record.moved


def test_a_given_peak_holds_for_every_width_and_without_a_cache():
    peak = check_training.parse(["--peak", "100,2", "--", "x.py"]).peak
    assert (peak.tflops, peak.terabytes_per_second) == (dict.fromkeys((8, 16, 32, 64), 100), 2)
    assert floor(Work(0, 32, 1e9), peak)[0] == pytest.approx(1e-3)  # 1 GB, read and written


def test_float32_copies_of_16_bit_weights_are_followed():
    param = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([param], lr=0.1)
    record = check_training.Record(param, "w")
    assert check_training.copy_key(param, optimizer) is None
    assert check_training.weight_of(record, None, optimizer) is param
    master = torch.full((4,), 1.0001)
    optimizer.state[param] = {"step": torch.tensor(1.0), "momentum": torch.zeros(4), "copy": master}
    assert check_training.copy_key(param, optimizer) == "copy"
    assert check_training.weight_of(record, "copy", optimizer) is master


def test_a_run_again_repeats_dropout(monkeypatch):
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", sys.path[:])
    watch = Watch(8)
    assert check_training.run_script(watch, [str(SAMPLES / "char_gpt.py"), "dropout"]) is None
    ((root, call),) = watch.models.roots.items()
    before = torch.get_rng_state()
    rerun = check_training.Rerun(root, call)
    first = rerun.outputs()
    assert len(first) == 2  # logits and loss
    assert all(torch.equal(one, other) for one, other in zip(first, rerun.outputs(), strict=True))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_forward_that_cannot_run_again_is_not_observable(check, write):
    script = write(
        "import torch\n\nclass Model(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.a = torch.nn.Linear(2, 2)\n        self.b = torch.nn.Linear(2, 2)\n        self.calls = 0\n\n"
        "    def forward(self, x):\n        self.calls += 1\n        if self.calls > 8:\n"
        "            raise RuntimeError('the stream is empty')\n        return self.b(self.a(x).detach())\n\n"
        "model = Model()\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "for _ in range(8):\n    model(torch.randn(3, 2)).square().sum().backward()\n"
        "    optimizer.step()\n    optimizer.zero_grad()\n"
    )
    status, report, printed = check(script)
    assert status == 2 and kinds(report) == []
    assert "no gradient in a.weight, a.bias, and the last batch cannot be run again" in printed
    assert "the stream is empty" in printed


def test_the_runs_again_are_bounded_in_time(check, monkeypatch):
    monkeypatch.setattr(check_training, "RERUN_SECONDS", -1)
    status, report, printed = check(SAMPLES / "char_gpt.py", "last_norm")
    assert status == 2 and kinds(report) == []
    assert "NOT OBSERVED" in printed and "the last batch cannot be run again (it takes more than -1 s)" in printed


# ---------------------------------------------------------------- bad input
BAD = {
    "raise ValueError('no data\\nmore')": "the script raised ValueError: no data (script.py, line 1)",
    "def load():\n    raise OSError('no disk')\nload()": "the script raised OSError: no disk (script.py, line 2)",
    "import sys\nsys.exit(3)": "the script ended with status 3\n",
    "import sys\nsys.exit('no data\\nmore')": "the script ended with status 1: no data\n",
    "print('nothing to train')": "no torch.optim optimizer stepped",
    "def f(:": "the script raised SyntaxError: invalid syntax (script.py, line 1)",
}


@pytest.mark.parametrize("text", BAD)
def test_a_script_that_cannot_be_observed(check, write, text):
    status, report, printed = check(write(text))
    assert status == 2 and report is None
    assert f"check_training: {BAD[text]}" in printed and "Traceback" not in printed


def test_an_update_by_hand_is_not_observable(check):
    status, _, printed = check(SAMPLES / "char_gpt.py", "by_hand")
    assert status == 2 and "stepped in this process: updates by hand can't be watched\n" in printed


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["missing.py"], "missing.py does not exist"),
        (["python", "train.py"], "python is a program: name the Python script itself"),
        (["torchrun", "train.py"], "torchrun is a program"),
        (["bash", "train.sh"], "bash is a program"),
        ([__file__.replace(".py", ""), "x"], "does not exist"),
        ([REPOSITORY / "README.md"], "isn't a Python script"),
        ([], "name a script"),
        (["-m"], "name a module"),
        (["-m", "no_such_module"], "no_such_module"),
    ],
)
def test_bad_commands_get_one_sentence(check, command, words):
    status, report, printed = check(*command)
    assert status == 2 and report is None
    assert words in printed and printed.count("\n") == 1


def test_a_mistyped_option_is_answered_with_the_nearest_one(capsys):
    refused(check_training.main, ["--stepps", "3", "--", "x.py"], capsys, "--stepps; did you mean --steps?")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--steps", "0"], "--steps must be at least 1, got 0"),
        (["--steps", "1"], "x.py does not exist"),
        (["--peak", "989"], "--peak must be two numbers such as 989,4.8, got 989"),
        (["--peak", "1,2,3"], "--peak must be two numbers such as 989,4.8, got 1,2,3"),
        (["--peak", "989,4.8"], "x.py does not exist"),
    ],
)
def test_numbers_of_options_are_taken_or_refused(options, words, capsys):
    refused(check_training.main, [*options, "--", "x.py"], capsys, words)


CLOSURE = """
def closure():
    optimizer.zero_grad()
    model(inputs).square().mean().backward()
"""
STEPS_THAT_RAISE = {
    "closure": """
class Optimizer(torch.optim.SGD):
    pass

def closure():
    optimizer.zero_grad()
    loss = model(inputs).square().mean()
    loss.backward()
    if i % 5 == 2:
        raise RuntimeError("a bad batch")
    return loss
""",
    "step": """
class Optimizer(torch.optim.SGD):
    def step(self, closure):
        closure()
        if i % 5 == 2:
            raise RuntimeError("a bad batch")
        return super().step()
""",
    "inner step": """
class Refusing(torch.optim.SGD):
    def step(self, closure=None):
        raise RuntimeError("a bad batch")

class Optimizer(torch.optim.SGD):
    def step(self, closure):
        closure()
        with contextlib.suppress(RuntimeError):
            if i % 5 == 2:
                Refusing(model.parameters()).step()
        return super().step()
""",
}


@pytest.mark.parametrize("where", STEPS_THAT_RAISE)
@pytest.mark.quick(1)
def test_a_step_that_raises_is_none_and_the_next_one_is_watched(check, write, where):
    begin = "import contextlib\nimport torch\nmodel = torch.nn.Linear(2, 2)\n"
    loop = """
optimizer = Optimizer(model.parameters(), lr=0.1)
for i in range(30):
    inputs = torch.randn(3, 2)
    with contextlib.suppress(RuntimeError):
        optimizer.step(closure)
print("the end")
"""
    status, report, printed = check(write(begin + CLOSURE + STEPS_THAT_RAISE[where] + loop))
    assert (status, report["steps"]) == (0, 8) and "the end" not in printed
    assert "verdict     every parameter trains" in printed


def test_a_forward_that_raises_is_not_run_again(check, write):
    """A loop that leaves out what does not fit into memory: the check runs the last batch again that did."""
    text = """
import torch

class Model(torch.nn.Linear):
    def forward(self, inputs):
        outputs = super().forward(inputs)
        if len(inputs) > 3:
            raise RuntimeError("out of memory")
        return outputs

model = Model(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for i in range(30):
    optimizer.zero_grad()
    try:
        outputs = model(torch.randn(4 if i % 5 == 2 else 3, 2))
    except RuntimeError:
        continue
    outputs.square().mean().backward()
    optimizer.step()
"""
    status, report, printed = check(write(text))
    assert (status, report["steps"]) == (0, 8)
    assert "slopes      2 of 2 tensors as the output's" in printed and "cannot be run again" not in printed


def test_the_report_is_not_written_over_the_script(tmp_path, capsys):
    script = tmp_path / "train.py"
    script.write_text("print('ran')\n")
    with pytest.raises(SystemExit) as ended:
        check_training.main(["--json", str(script), "--", str(script)])
    printed = capsys.readouterr()
    assert ended.value.code == 2 and "is a file that the command uses: choose another name" in printed.err
    assert script.read_text() == "print('ran')\n" and not printed.out


def test_a_script_that_ends_early_or_raises_late(check, write):
    text = (
        "import torch\nmodel = torch.nn.Linear(2, 2)\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "for _ in range(3):\n    model(torch.randn(3, 2)).square().sum().backward()\n"
        "    optimizer.step()\n    optimizer.zero_grad()\n"
    )
    status, report, printed = check(write(text))
    assert (status, report["steps"]) == (0, 3) and "the script ended after 3 of 8 steps" in printed
    status, report, printed = check(write(text + "raise OSError('disk full')\n"))
    assert (status, report["steps"]) == (2, 3)
    assert "NOT OBSERVED: the script raised OSError: disk full (script.py, line 8)" in printed
