"""compare_training.py: what is the same gets a speed, what differs is named, and scripts compute their own numbers."""

import importlib.util
import io
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
from collections import Counter
from multiprocessing.connection import Connection
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import check_training
import compare_training
from common.command_line import Failure
from common.measuring.runs import OutOfMemory
from common.own_script import child, judge, report, runs, speed
from common.own_script.names import Pair, Unpaired, in_parts, orders, pair_names, to_new
from common.own_script.session import CONTROL, NEW, OLD
from common.versions import REPOSITORY
from in_process import refused
from processes import FORKS, run_fork

GPT = pathlib.Path(__file__).parents[1] / "training_scripts" / "char_gpt.py"
LOOPS = GPT.with_name("other_loops.py")


def run_child(request, log, inbox, outbox):
    """Be a child of compare_training.py, in a fork."""
    os.setsid()
    for number in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_APPEND), number)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    torch.set_num_threads(1)
    child.main(json.dumps(json.loads(request) | {"inbox": inbox.fileno(), "outbox": outbox.fileno()}))


class Forked:
    """A child that starts seconds sooner than a process: PyTorch is imported already."""

    def __init__(self, request, log, pipes):
        ends = [Connection(os.dup(pipe), writable=bool(place), readable=not place) for place, pipe in enumerate(pipes)]
        self.process = FORKS.Process(target=run_child, args=(request, log.name, *ends))
        self.process.start()
        self.pid = self.process.pid

    def wait(self, timeout=5):
        self.process.join(timeout)
        if self.process.exitcode is None:
            self.process.kill()
            self.process.join()
        return self.process.exitcode


@pytest.fixture
def compare(monkeypatch, tmp_path, capfd):
    """compare(OLD words, NEW words, option...): return the exit status, the JSON report and what was printed."""
    monkeypatch.setattr(runs, "start_child", Forked)

    def run(old, new, *options):
        file = tmp_path / "report.json"
        file.unlink(missing_ok=True)
        words = [*options, "--json", str(file), "--", *map(str, old), "--versus", *map(str, new)]
        status = compare_training.main(words)
        report = json.loads(file.read_text()) if file.exists() else None
        return status, report, "".join(capfd.readouterr())

    return run


@pytest.fixture
def write(tmp_path):
    """write(NAME, TEXT): return the path of a script."""

    def make(name, text):
        path = tmp_path / f"{name}.py"
        path.write_text(text)
        return path

    return make


# ---------------------------------------------------------------- one watcher, in a project with any names
PROJECT = {
    "common/__init__.py": "",
    "common/data.py": "import torch\n\ndef batch():\n    return torch.randn(3, 2)\n",
    "check_training.py": "RATE = 0.1\n",
    "train.py": """
import torch
import check_training
from common.data import batch
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=check_training.RATE)
for _ in range(12):
    optimizer.zero_grad()
    model(batch()).square().mean().backward()
    optimizer.step()
""",
}


@pytest.fixture
def project(tmp_path):
    for name, text in PROJECT.items():
        path = tmp_path / "project" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return path


@pytest.mark.slow
def test_a_project_may_have_modules_called_common_and_check_training(project):
    """Both tools in processes of their own: a fork of the tests has imported ours."""
    run = runs.Run("old", [str(project)], 1)
    try:
        assert run.answer(100)["at"] == "model"
        run.ask(do="record")
        assert [run.answer(100)["at"] for _ in range(2)] == ["step", "recorded"]
    finally:
        run.end()
    command = [sys.executable, check_training.__file__, "--no-slopes", "--", str(project)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and "2 of 2 tensors" in done.stdout, done.stdout + done.stderr


TWO_IN_ONE = """
import torch

class Outer(torch.optim.SGD):
    def step(self, closure=None):
        torch.optim.SGD(self.param_groups, lr=0.1).step()

model = torch.nn.Linear(2, 2)
optimizer = Outer(model.parameters(), lr=0.1)
for number in range(60):
    print("step", number, flush=True)
    optimizer.zero_grad()
    model(torch.randn(3, 2)).square().mean().backward()
    optimizer.step()
"""


def test_an_optimizer_that_calls_another_one_makes_one_step(write, monkeypatch):
    """In the recorded steps and in the timed ones: the inner optimizer holds the same parameters."""
    monkeypatch.setattr(runs, "start_child", Forked)
    run = runs.Run("old", [str(write("outer", TWO_IN_ONE))], 3)
    numbers = []
    try:
        while (message := run.answer(100))["at"] != "recorded":
            if message["at"] == "step":
                numbers.append(message["number"])
            else:
                run.ask(do="record")
        run.ask(steps=5, reset=False)
        assert run.answer(100)["at"] == "steps"
        assert numbers == [1, 2, 3] and pathlib.Path(run.log.name).read_text().split()[-1] == "7"
    finally:
        run.end()


# ---------------------------------------------------------------- the verdict on the computation
SAME = "the same computation, speed not measured"
VERDICTS = {  # ways of old, ways of new: verdict, and words of its reason
    ("", "kernel checkpoint"): (SAME, ""),
    ("", "fused outside"): (SAME, ""),
    ("dropout", "dropout"): (SAME, ""),
    ("autocast scaler", "autocast kernel"): (SAME, ""),
    ("sparse", "sparse"): (SAME, ""),
    ("", "detach"): ("not the same computation", r"new lacks \d+ of 31 gradients: .*tokens.weight"),
    ("", "data"): ("not the same computation", r"new lacks 15 of 31 gradients: .*attention.q.weight"),
    ("", "one_zeroed"): (
        "not the same computation",
        "new's optimizer lacks blocks.1.mlp.up.weight",
    ),
    ("", "forgotten"): ("not the same computation", "new's optimizer lacks blocks.*.mlp.gate.weight"),
    ("", "lr_zero"): ("not the same computation", "the optimizer's lr 0 in new and 0.001 in old for all parameters"),
    ("", "sgd"): ("not the same computation", "the optimizer is SGD in new and AdamW in old"),
    ("", "accumulation"): (
        "same model, data or loss not compared",
        "new calls its model 4 times, old calls it 1 time$",
    ),
    ("dropout", "dropout detach"): ("not the same computation", r"^step 1: new lacks \d+ of 31 gradients: [^;]*$"),
    ("dropout", "dropout never_cleared"): ("not the same computation", "^step 2: 31 of 31 gradients differ"),
    ("dropout", ""): ("not the same computation", "old draws random numbers in its model and new does not"),
    ("", "autocast"): ("not the same computation", "new computes in bfloat16 on cpu, old in float32 on cpu"),
    ("", "never_cleared"): ("not the same computation", "step 2: 31 of 31 gradients differ"),
    ("", "same_batch"): ("same model, data or loss not compared", "step 1: tensor 1 of its input is a different one"),
    ("", "tied"): ("not the same computation", "new ties head.weight to tokens.weight"),
    ("", "unused_head"): ("not comparable", "new's value.weight, value.bias have no counterpart"),
    ("", "by_hand"): ("not comparable", "no torch.optim optimizer stepped in 10 backward passes"),
}


@pytest.mark.parametrize("ways", [*VERDICTS], ids=lambda ways: " - ".join(ways))
@pytest.mark.quick(1)
def test_verdicts_on_a_gpt(compare, ways):
    old, new = ([GPT, *side.split()] for side in ways)
    verdict, words = VERDICTS[ways]
    status, report, printed = compare(old, new, "--no-speed")
    assert report["verdict"] == verdict and re.search(words, report["reason"] or ""), printed
    assert status == {SAME: 0, "not comparable": 2}.get(verdict, 1)


def test_the_page_s_script_is_found_again_after_its_repair(tmp_path):
    """The page has its reader repair the script before it compares the ways."""
    folder = REPOSITORY / "exercises" / "own_script"
    found = (folder / "train_characters.py").read_text()
    spec = importlib.util.spec_from_file_location("ways", folder / "ways.py")
    ways = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(ways)
    mended = ways.changed(found, "mended")
    assert mended != found and ways.changed(mended, "mended") == mended
    assert ways.changed(found, "found") == ways.changed(mended, "found") == found
    assert ways.changed(mended, "kept") == ways.changed(ways.changed(found, "kept"), "mended")
    with pytest.raises(SystemExit, match="git restore"):
        ways.changed(mended.replace("backward(y, grad_y)", "backward([y], [grad_y])"), "found")


# ---------------------------------------------------------------- other scripts
STEPS = """
import sys
import torch
from torch import nn

WAYS = sys.argv[1:]

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 16)
        momentum = 0.01 if "momentum" in WAYS else 0.0 if "frozen" in WAYS else 0.1
        self.norm = nn.BatchNorm1d(16, momentum=momentum, affine="plain" not in WAYS)
        self.last = nn.Linear(16, 3)
        self.spare = nn.Parameter(torch.ones(4))
        self.register_buffer("mask", torch.tensor(-torch.inf) if "mask" in WAYS else None)

    def forward(self, x):
        if "lazy" in WAYS:
            self.mask = torch.tensor(-torch.inf)
        x = self.first(x) + 0 * self.spare.sum()
        if "used" in WAYS:
            x = x + (self.spare - self.spare.detach()).sum()
        if "rounded" in WAYS:
            x = (x + 16) - 16
        if "steep" in WAYS:
            x = x + 0.01 * (x - x.detach())
        x = x.relu() if "kinks" in WAYS else x.tanh()
        return self.last(self.norm(x) if "norm" in WAYS else x)

torch.manual_seed(0)
model = Model()
def make_optimizer():
    if "lbfgs" in WAYS:
        return torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1 * ("decay" in WAYS))
optimizer = make_optimizer()
averages = [param.detach().clone() for param in model.parameters()]
x = torch.randn(96, 6)
if "kinks" in WAYS:  # rows that give the first unit 4e-7: rounded away, and more than one nudge of the weights
    weight, bias = model.first.weight.detach()[0], model.first.bias.detach()[0]
    for _ in range(2):
        x[:6] -= torch.outer(x[:6] @ weight + bias - 4e-7, weight) / weight.square().sum()
def closure():
    loss = (model(x) - x[:, :3]).square().mean()
    optimizer.zero_grad()
    loss.backward()
    return loss
for step in range(1 if "short" in WAYS else 5):
    if "closure" in WAYS:
        optimizer.step(closure)
    else:
        closure()
        optimizer.step()
    if "rebuilt" in WAYS:
        optimizer = make_optimizer()
    with torch.no_grad():
        for param, average in zip(model.parameters(), averages):
            average.lerp_(param, 0.5)
            if "clip" in WAYS and step == 2:
                param.clamp_(-0.3, 0.3)
            if "spare" in WAYS:
                model.spare.mul_(0.9)
            if "average" in WAYS and step == 2:
                param.copy_(average)
"""
OUTSIDE = "5 of 7 updates differ.*; new changes weights outside of optimizer.step.. too, and old does not"
IN_A_STEP = {  # ways of old, of new: verdict, words of the reason
    ("kinks", "kinks rounded"): (SAME, ""),  # another side of ReLU's kink is a large error of the gradient
    ("kinks", "kinks steep"): ("not the same computation", "step 2: 2 of 5 gradients differ: first.weight"),
    ("", "steep"): ("not the same computation", "step 1: 2 of 5 gradients differ: first.weight"),
    ("", "clip"): ("not the same computation", f"step 3: the gradients agree, but {OUTSIDE}"),
    ("average", "average"): (SAME, ""),
    ("", "spare"): ("not the same computation", "step 1: old never updates 1 of 7 parameters that new updates: spare"),
    ("", "used"): ("not the same computation", "step 1: old lacks 1 of 5 gradients that new has: spare"),
    ("", "average"): ("not the same computation", "step 3: the gradients agree, but 4 of 7 updates differ"),
    ("closure", "closure decay"): (
        "not the same computation",
        "^step 1: the optimizer's weight_decay 0.1 in new and 0 in old",
    ),
    ("lbfgs closure", "lbfgs closure clip"): (  # what it tries inside its step is not outside of it
        "not the same computation",
        f"step 3: the gradients agree, but {OUTSIDE}",
    ),
    ("", "rebuilt"): ("not the same computation", "step 2: the gradients agree, but 4 of 7 updates differ"),
    ("", "short"): ("not comparable", "new ended after 1 step, old did not: let it train for 3"),
    ("norm", "norm momentum"): ("not the same computation", "buffers differ: norm.running_mean, norm.running_var"),
    ("lazy", "mask"): (SAME, ""),  # a buffer that old makes in its first call, with an infinity in it
    ("norm plain frozen", "norm plain"): (
        "not the same computation",
        "buffers differ: norm.running_mean, norm.running_var",
    ),
}


@pytest.mark.parametrize("ways", [*IN_A_STEP], ids=lambda ways: " - ".join(ways))
@pytest.mark.slow
def test_all_that_a_step_does_is_compared_and_one_rounding_is_no_difference(compare, write, ways):
    script = write("steps", STEPS)
    old, new = ([script, *side.split()] for side in ways)
    verdict, words = IN_A_STEP[ways]
    _, report, printed = compare(old, new, "--no-speed")
    assert report["verdict"] == verdict and re.search(words, report["reason"] or ""), printed
    assert ("kinks" in report["rows"]) == ("kinks" in ways[0])


MICRO = """
import sys
import torch
from torch import nn

parts, divisor, eps, p = int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4])
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16, eps=eps), nn.Dropout(p), nn.Linear(16, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(5):
    x = 100 * torch.randn(8, 6)
    optimizer.zero_grad()
    for part in x.chunk(parts):
        (model(part).square().mean() / divisor).backward()
    optimizer.step()
"""
MICRO_BATCHES = {  # parts, divisor, eps and dropout of new; of old: 1 1 1e-5 0.0. Verdict, words of the reason
    "4 4 1e-5 0.0": (SAME, ""),
    "4 1 1e-5 0.0": ("not the same computation", "the loss is .* 4 times"),
    "3 3 1e-5 0.0": ("not the same computation", "the loss is .* times"),
    "1 1 1e-6 0.0": ("not the same computation", "the modules' eps 1e-06 in new and 1e-05 in old for 1$"),
}


@pytest.mark.parametrize("new", MICRO_BATCHES)
def test_micro_batches_are_joined_and_settings_of_modules_compared(compare, write, new):
    """A missing divisor is found, and so are parts of 3, 3 and 2 rows whose means count alike."""
    script = write("micro", MICRO)
    verdict, words = MICRO_BATCHES[new]
    _, report, printed = compare([script, *"1 1 1e-5 0.0".split()], [script, *new.split()], "--no-speed")
    assert report["verdict"] == verdict and re.search(words, report["reason"] or ""), printed


PACKED = """
import sys
import torch
from torch import nn

WAYS = sys.argv[1:]

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.LazyLinear(8)
        if "packed" in WAYS:
            self.up_gate = nn.Linear(8, 24, bias=False)
        else:
            self.gate = nn.Linear(8, 12, bias=False)
            self.up = nn.Linear(8, 12, bias=False)
        self.last = nn.Linear(12, 3)

    def forward(self, x):
        x = torch.tanh(self.first(x))
        if "packed" in WAYS:
            up, gate = self.up_gate(x).chunk(2, -1)
        else:
            up, gate = self.up(x), self.gate(x)
        if "relu" in WAYS:
            gate = gate.relu()
        x = gate.sigmoid() * up
        if "rows" in WAYS:
            x = nn.functional.dropout(x, 0.5, self.training)
        if "columns" in WAYS:
            x = nn.functional.dropout(x.t().contiguous(), 0.5, self.training).t()
        return self.last(x)

torch.manual_seed(0)
model = Model()
model(torch.randn(2, 6))  # makes the first weight
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
torch.manual_seed(1)
if "unseeded" in WAYS:
    torch.seed()
if "inside" in WAYS:
    model.first.weight.register_post_accumulate_grad_hook(lambda param: optimizer.step())
for step in range(400):
    x = torch.randn(5, 6)
    if "half" in WAYS:
        x = x[:2]
    if "later" in WAYS and step == 1:
        x = x.flip(0)
    if "fails" in WAYS and step == 1:
        raise KeyError("no such file")
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    with open(f"losses_{WAYS[-1]}_{__import__('os').getpid()}.txt", "a") as file:
        print(f"{loss.item():.9g}", file=file)
"""


@pytest.fixture
def packed(write, monkeypatch, tmp_path):
    """Return the path of PACKED in a folder of its own, which is the current one."""
    monkeypatch.chdir(tmp_path)
    return write("packed", PACKED)


FUSE = "(.*)up_gate(.*)=\\1up\\2,\\1gate\\2"
PAIRS = {  # ways of old, of new, options: verdict, words of the reason
    ("x", "packed relu", FUSE): ("not the same computation", "before last"),
    ("x", "packed", ""): (SAME, ""),  # the order of the parts is found by trying
    ("packed", "x", ""): (SAME, ""),
    ("x", "packed relu", ""): (
        "not comparable",
        "no order of these parts gives old's outputs: pair the",
    ),
    ("x", "half", ""): ("same model, data or loss not compared", "its input is the first 2 rows, and old has 5"),
    ("x", "half relu", ""): ("not the same computation", "before last .* and step 1: its input is the first 2 rows"),
    ("x", "later", ""): (
        "same model, data or loss not compared",
        "step 2: its input is the same rows in another",
    ),
    ("rows", "columns", ""): ("not comparable", "in evaluation mode they agree: compare with dropout set to 0"),
    ("rows", "columns relu", ""): ("not the same computation", "before last"),
    ("unseeded", "x", ""): ("not comparable", "old doesn't repeat itself; set all its seeds"),
    ("inside", "x", ""): ("not comparable", "old steps its optimizer inside backward: step after it"),
    ("x", "fails", ""): ("not comparable", "new: KeyError: 'no such file' .packed.py, line"),
}


@pytest.mark.parametrize("case", PAIRS, ids=lambda case: " - ".join(case[:2]) + " fuse" * bool(case[2]))
@pytest.mark.slow
def test_verdicts_on_packed_weights_other_data_and_chance(compare, packed, case):
    old, new = ([packed, *side.split()] for side in case[:2])
    options = ["--fuse", case[2]] if case[2] else []
    status, report, printed = compare(old, new, "--no-speed", *options)
    verdict, words = PAIRS[case]
    assert report["verdict"] == verdict and re.search(words, report["reason"] or ""), printed
    assert "Traceback" not in printed


@pytest.mark.slow
def test_a_script_computes_its_own_numbers_and_two_speeds_are_measured(compare, packed, tmp_path):
    """Both while it is recorded and while its loop is timed."""
    assert run_fork(packed, "alone", cwd=tmp_path).returncode == 0
    (alone,) = tmp_path.glob("losses_alone_*")
    status, report, printed = compare([packed, "old"], [packed, "packed", "new"], "--rounds", "5", "--fuse", FUSE)
    assert status == 0 and report["speed"]["starts"] == 3, printed
    assert [len(times) for times in report["speed"]["seconds"].values()] == [5, 5, 5]
    assert report["verdict"].startswith(("faster by", "slower by", "no difference shown"))
    assert {"step", "old / new", "noise", "samples/s"} <= report["rows"].keys()
    found = [path.read_text() for path in tmp_path.glob("losses_old_*")]
    assert sum(alone.read_text().startswith(text) for text in found) == 6  # old and control, three times
    assert len(found) == 7 and min(text.count("\n") for text in found) == 3  # and nudged


@pytest.mark.slow
def test_the_speed_of_another_computation_says_so_in_every_line(compare, packed, tmp_path):
    page = tmp_path / "report.md"
    options = ["--allow-different", "--rounds", "1", "--markdown", page]
    status, report, printed = compare([packed, "x"], [packed, "relu"], *map(str, options))
    assert status == 1 and report["verdict"] == "not the same computation", printed
    rows = [report["rows"][name] for name in ("step", "old / new", "samples/s")]
    assert all(row.endswith("but not the same computation") for row in rows)
    assert page.read_text().startswith("**not the same computation**: the outputs are off by")


ALONE = """
import fcntl
lock = open(__file__ + ".lock", "w")
try:
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    raise RuntimeError("CUDA out of memory") from None
"""


@pytest.mark.parametrize(
    ("status", "printed", "reason", "kind", "said"),
    [
        (-signal.SIGKILL, "loss 3", None, OutOfMemory, "old: out of memory"),  # of the kernel, which says nothing
        (-signal.SIGTERM, "loss 3", None, Failure, "old: it was ended, and its last line is: loss 3"),
        (-signal.SIGTERM, "CUDA out of memory", None, OutOfMemory, "old: out of memory"),
        (0, "loss 3", "CUDA out of memory. Tried", OutOfMemory, "old: out of memory"),
        (-signal.SIGKILL, "loss 3", "short", runs.Short, "old ended after 2 steps"),  # killed after its last word
        (1, "loss 3", "ValueError: no", Failure, "old: ValueError: no"),
    ],
)
def test_how_a_script_ended_is_said(status, printed, reason, kind, said):
    run = object.__new__(runs.Run)
    run.name = "old"
    run.process = SimpleNamespace(wait=lambda: status)
    run.log = io.BytesIO(printed.encode())
    error = run.failure(reason, 2)
    assert (type(error), error.status, str(error)) == (kind, 2, said)


@pytest.mark.slow
def test_processes_that_do_not_fit_beside_each_other_take_turns(compare, packed):
    packed.write_text(ALONE + PACKED)
    status, report, printed = compare([packed, "x"], [packed, "half", "x"], "--no-speed")
    assert (status, report["verdict"]) == (1, "same model, data or loss not compared"), printed
    status, report, printed = compare([packed, "x"], [packed, "x"], "--rounds", "1")
    assert status == 0 and "each process alone" in report["rows"]["step"], printed
    assert "they take turns" in printed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "options", "words"),
    [
        ("check", ["--no-speed"], "the computation was not compared to the end"),
        ("measure", [], "the same computation, and the speed was not measured to the end"),
    ],
)
def test_ctrl_c_reports_what_was_compared_until_then(compare, packed, monkeypatch, method, options, words):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(compare_training.Comparison, "check", interrupt if method == "check" else lambda self: None)
    monkeypatch.setattr(compare_training, "measured", interrupt)
    status, report, printed = compare([packed, "x"], [packed, "x"], *options)
    assert (status, report["status"], report["verdict"], report["reason"]) == (130, 130, "interrupted", words), printed
    assert "Traceback" not in printed


def test_several_models_are_not_comparable(compare):
    status, report, printed = compare([LOOPS, "gan"], [LOOPS, "gan"], "--no-speed")
    assert status == 2 and "old trains several models: also Sequential" in report["reason"], printed


def test_a_model_that_only_torch_func_calls_is_not_comparable(compare, write):
    text = "import torch\nmodel = torch.nn.Linear(2, 2)\n"
    text += "loss = lambda p, x: torch.func.functional_call(model, p, x).sum()\n"
    text += "torch.func.grad(loss)(dict(model.named_parameters()), torch.ones(3, 2))"
    status, report, printed = compare([write("old", text)], [write("new", text)], "--no-speed")
    assert status == 2 and "old: no module with parameters was called" in report["reason"], printed


DRY = """
import copy
import sys
import torch
from torch import nn
from torch.nn.utils import parametrizations

WAYS = sys.argv[1:]

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = parametrizations.weight_norm(nn.Linear(6, 8))  # it runs to see if it can
        self.first(torch.randn(2, 6))
        self.norm = nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 3)
        if "target" in WAYS:
            self(torch.randn(2, 6))
            self.target = copy.deepcopy(self.last).requires_grad_(False)

    def forward(self, x):
        x = self.norm(torch.tanh(self.first(x)))
        if "noise" in WAYS:
            x = x + 0.1 * torch.randn_like(x)
        if "cut" in WAYS:
            x = x.detach()
        if "anew" in WAYS:
            self.last = nn.Linear(8, 3)
        return self.last(x)

torch.manual_seed(0)
teacher = nn.Linear(6, 3)
if "teacher" in WAYS:
    teacher(torch.randn(2, 6))
model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
if "adafactor" in WAYS:
    optimizer = torch.optim.Adafactor(model.parameters())
if "other" in WAYS:
    optimizer = torch.optim.AdamW(nn.Linear(6, 3).parameters())
if "evaluation" in WAYS:
    model.eval()
torch.manual_seed(1)
for step in range(9):
    x = torch.randn(5, 6)
    wanted = teacher(x).detach()
    optimizer.zero_grad()
    (model(x) - wanted).square().mean().backward()
    optimizer.step()
"""
DRY_RUNS = {  # ways of old, of new: verdict, words of the reason
    ("x", "x"): (SAME, ""),
    ("target", "target"): (SAME, ""),
    ("teacher", "teacher"): (SAME, ""),
    ("adafactor", "adafactor"): (SAME, ""),
    ("target", "target cut"): ("not the same computation", "new lacks 5 of 7 gradients: first.bias"),
    ("noise", "noise evaluation"): ("not the same computation", "norm.* in evaluation mode in new, and not in old"),
    ("x", "other"): (
        "not comparable",
        "new: its AdamW holds no parameter of the model that ran first, a Model",
    ),
    ("x", "anew"): ("not comparable", "its model gets last.weight, last.bias after its first call: make all param"),
}


@pytest.mark.parametrize("ways", [*DRY_RUNS], ids=lambda ways: " - ".join(ways))
@pytest.mark.slow
def test_a_model_that_runs_before_it_is_whole_is_compared_as_a_whole(compare, write, ways):
    script = write("dry", DRY)
    verdict, words = DRY_RUNS[ways]
    _, report, printed = compare(*([script, *side.split()] for side in ways), "--no-speed")
    assert report["verdict"] == verdict and re.search(words, report["reason"] or ""), printed
    assert verdict != SAME or report["rows"]["gradients"].startswith("7 gradients")


MASTERS = """
import sys
import torch
from torch import nn

torch.manual_seed(5 if "masters" in sys.argv else 0)
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
masters = list(model.parameters())
if "masters" in sys.argv:
    masters = [param.detach().clone().requires_grad_() for param in model.parameters()]
    model.bfloat16()
optimizer = torch.optim.AdamW(masters, lr=1e-3)
torch.manual_seed(1)
for step in range(9):
    x = torch.randn(64, 6)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(x).float().square().mean()
    model.zero_grad()
    loss.backward()
    for master, param in zip(masters, model.parameters()):
        master.grad = param.grad.float()
    optimizer.step()
    with torch.no_grad():
        for master, param in zip(masters, model.parameters()):
            param.copy_(master)
"""


@pytest.mark.slow
def test_float32_masters_that_were_copied_before_the_first_call_get_old_s_weights(compare, write):
    script = write("masters", MASTERS)
    status, report, printed = compare([script], [script, "masters"], "--no-speed")
    assert (status, report["verdict"]) == (0, SAME), printed
    assert "4 updates" in report["rows"]["updates"]


@pytest.mark.slow
def test_the_honest_and_the_false_optimization_of_the_page(compare):
    page = (REPOSITORY / "scripts" / "BEFORE_AND_AFTER.md").read_text()
    ways = REPOSITORY / "exercises" / "own_script" / "ways.py"
    for way in re.findall(r"ways.py mended --versus exercises/own_script/ways.py (\w+)", page):
        status, report, printed = compare([ways, "mended"], [ways, way], "--no-speed")
        if way == "kept":
            assert (status, report["verdict"]) == (0, SAME), printed
        else:
            assert status == 1, printed
            told = [line for line in printed.splitlines() if line.startswith(("verdict", " " * 12))]
            assert len(told) == 3 and "\n".join(told) in page


def test_copies_of_parameters_are_found_among_all_tensors():
    """Masters in float32 and averages; not tensors without values, which a compiler leaves, nor constants."""
    param = torch.nn.Parameter(torch.randn(3, 5, dtype=torch.bfloat16))
    ones = torch.nn.Parameter(torch.ones(5))
    master = param.detach().float()
    average = {"w": param.detach().clone()}
    with FakeTensorMode():
        empty = torch.empty(3, 5)
    others = [torch.ones(5), torch.randn(3, 5), torch.zeros(3, 5).to_sparse(), empty]
    found = child.copies_of([param, ones])
    assert {id(tensor) for tensor in found[id(param)]} == {id(master), id(average["w"])}
    assert id(ones) not in found and len(others) == 4


@pytest.mark.parametrize(
    ("values", "constant"), [([3.0], True), ([3.0, 3.0], True), ([3.0, 4.0], False), ([3.0] * 9 + [4.0], False)]
)
def test_a_constant_has_one_value(values, constant):
    """The last element decides."""
    assert child.is_constant(torch.tensor(values)) == constant


# ---------------------------------------------------------------- names


def test_names_are_paired_by_name_by_prefix_by_option_and_by_shape():
    old = {"h.q.w": (4, 4), "h.k.w": (2, 4), "h.v.w": (2, 4), "h.o.w": (4, 4), "n.b": (4,)}
    packed = {"h.qkv.w": (8, 4), "h.o.w": (4, 4), "m.b": (4,)}
    parts = ("h.q.w", "h.k.w", "h.v.w")
    assert pair_names(old, {f"module.{name}": shape for name, shape in old.items()})[0].new == ("module.h.q.w",)
    found = pair_names(old, packed)
    assert set(found) == {
        Pair(("h.o.w",), ("h.o.w",)),
        Pair(parts, ("h.qkv.w",), 0, guess=True),
        Pair(("n.b",), ("m.b",), guess=True),
    }
    assert len(list(orders(found))) == 6
    fuses = [(r"(.*)qkv\.w", [r"\1q.w", r"\1k.w", r"\1v.w"])]
    named = pair_names(old, packed, [("^n", "m")], fuses)
    assert not any(pair.guess for pair in named)
    back = pair_names(packed, old, [("^m", "n")], fuses)
    assert Pair(("h.qkv.w",), parts) in back
    values = {name: torch.randn(shape) for name, shape in old.items()}
    shapes = {"old": old, "new": packed}
    again = in_parts(named, to_new(named, values, packed), shapes, "new")
    assert all(torch.equal(again[name], values[name]) for name in old)


@pytest.mark.parametrize(
    ("new", "options", "words"),
    [
        ({"a.w": (3, 4)}, {}, "a.w is .4, 4. in old and .3, 4. in new"),
        ({"a.w": (4, 4), "c.b": (5,)}, {}, "old's b.b and new's c.b have no counterpart: pair the names"),
        ({"a.w": (4, 4)}, {"maps": [(".*", "a.w")]}, "--map gives b.b and a.w the same name a.w"),
        ({"a.w": (4, 4)}, {"fuses": [("z", ["a", "b"])]}, "--fuse z=a,b fits no parameters"),
    ],
)
def test_names_without_a_counterpart_are_told(new, options, words):
    with pytest.raises(Unpaired, match=words):
        pair_names({"a.w": (4, 4), "b.b": (2,)}, new, **options)


# ---------------------------------------------------------------- data, speed, input


def test_other_data_are_described():
    x = torch.arange(12.0).view(4, 3)
    labels = torch.arange(4)
    assert judge.describe_data([x, labels], [x.double(), labels.int()]) is None
    assert judge.describe_data([x, labels], [x]) is None  # labels outside of the call
    assert judge.describe_data([x], [labels, x + 1]) == "new hands its model 2 tensors, old hands it 1"
    assert judge.describe_data([x], [x.flip(0)]) == "its input is the same rows in another order"
    assert judge.describe_data([x], [x[:2]]) == "its input is the first 2 rows, and old has 4"
    assert judge.describe_data([x[:3]], [x]) == "its input is old's 3 rows and 1 more"
    assert judge.describe_data([x[1:]], [x]) == "its input is a different batch of 4 rows, and old has 3"
    missing = x.where(x > 0, torch.nan)
    assert judge.describe_data([missing], [missing[:2]]) == "its input is the first 2 rows, and old has 4"
    assert judge.describe_data([x, labels], [x, labels + 1]) == (
        "tensor 2 of its input is a different one: 4 of its 4 values differ"
    )
    assert judge.describe_data([x], [x.t()]) == "its input is [3, 4], and old's is [4, 3]"


@pytest.mark.parametrize(
    ("new", "same"), [("1 -inf 2", True), ("1 0 2", False), ("1 inf 2", False), ("-inf -inf 2", False)]
)
def test_an_infinity_such_as_a_mask_s_is_the_same_only_where_both_have_it(new, same):
    old = torch.tensor([1, -torch.inf, 2])
    new = torch.tensor([float(word) for word in new.split()])
    found = judge.Judge([], {}, {"use_amp": False, "tf32": False, "device": "cpu"}, {})
    assert found.compare("output 1", [old, new, old, old], 1e-6).passed == same


def test_what_one_rounding_changes_as_much_as_it_is_counts_as_not_compared():
    """Say so of a tensor whose update is a sign, as in Lion's step: it was "allowed 75"."""
    found = judge.Judge([], {}, {"use_amp": False, "tf32": False, "device": "cpu"}, {})
    found.note("updates", [judge.Compared("a", 0.5, 75.0, 1.0), judge.Compared("b", 1e-6, 1e-5, 1.0)])
    row = report.row_of("updates", *found.worst["updates"])
    assert row.startswith("2 updates, off by at most 1e-06 (b), allowed 1e-05; not compared, as one rounding")
    assert row.endswith(": a")


@pytest.mark.parametrize(
    ("factor", "verdict"),
    [
        (0.5, "faster by 2.00x (2.00 to 2.02)"),
        (2.0, "slower by 2.00x (1.98 to 2.00)"),
        (1.02, "no difference shown"),
    ],
)
def test_a_speed_is_shown_if_it_exceeds_the_noise_of_old_under_two_names(monkeypatch, factor, verdict):
    """By common/ratios.py: six rounds over three starts."""
    starts = []
    asked = []
    steps = {OLD: [1.0, 1.01], NEW: [factor * 1.0, factor * 1.0], CONTROL: [1.01, 0.98]}

    def record(names, number):
        starts.append(names)

    def ask(name, number, reset=False):
        if number == 1:  # a warm-up's passes have two
            asked.append(name)
        return steps[name][len(starts) % 2], 100.0 - len(starts) if name == OLD else None

    monkeypatch.setattr(speed, "ask_steps", ask)
    alive = {name: name for name in steps}
    session = SimpleNamespace(together=True, start_s=1.0, children=SimpleNamespace(alive=alive), record=record)
    found = speed.Rounds(session, 6).measure()
    assert found.verdict() == verdict
    assert len(starts) == 2 and found.starts == 3 and found.memory == {OLD: 100.0, NEW: None, CONTROL: None}
    in_turns = [asked[-15 + place : len(asked) - 12 + place] for place in range(0, 15, 3)]  # of the last round
    assert in_turns[0] != in_turns[1] and all(set(turn) == set(steps) for turn in in_turns)
    assert Counter(asked[::3]) == dict.fromkeys(steps, 10)  # begins as many of the 6 x 5 passes as the others


def test_scripts_that_fit_one_at_a_time_begin_a_round_in_turns():
    visited = []

    def visit(names, *_):
        visited.append(names)
        return {name: ({name: 1.0 + names.index(name)}, {name: None}) for name in names}

    found = speed.Rounds(SimpleNamespace(together=False, start_s=1.0, visit=visit), 6).measure()
    assert Counter(names[0] for names in visited) == {OLD: 2, NEW: 2, CONTROL: 2}
    assert found.starts == 6 and all(sorted(times) == [1, 1, 2, 2, 3, 3] for times in found.seconds.values())


def test_work_per_second_is_that_of_each_scripts_own_batch():
    """Old takes 100 ms for 32 tokens, new 50 ms for half of them."""
    found = speed.Speed({OLD: [0.1] * 5, NEW: [0.05] * 5, CONTROL: [0.1] * 5}, dict.fromkeys((OLD, NEW)), 3, 10)
    steps = {name: {"calls": [{"data": [torch.zeros(rows, 8).long()]}]} for name, rows in ((OLD, 4), (NEW, 2))}
    recorded = {name: SimpleNamespace(steps=[step]) for name, step in steps.items()}
    rows = report.speed_rows(found, SimpleNamespace(together=True), recorded, "")
    assert rows["step"].startswith("old 100 ms, new 50.0 ms") and rows["tokens/s"] == "old 320, new 320"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--", "a.py"], "name two scripts: compare_training.py -- old.py --versus new.py"),
        (["--", "a.py", "--versus", "b.py"], "old: a.py does not exist"),
        (["--", GPT, "--versus"], "new: name a script"),
        (["--", GPT, "--versus", "torchrun", "x.py"], "new: torchrun is a program: name the Python script itself"),
        (["--fuse", "qkv", "--", GPT, "--versus", GPT], "'qkv' isn't of the form REGEX=REPLACEMENT"),
        (["--map", "(=x", "--", GPT, "--versus", GPT], "'(' isn't a regular expression: missing )"),
        (["--markdown", "no/such.md", "--", GPT, "--versus", GPT], "--markdown no/such.md: its folder does not exist"),
        (["--json", GPT, "--", GPT, "--versus", GPT], "char_gpt.py is a file that the command uses"),
        (["--round", "3", "--", GPT, "--versus", GPT], "did you mean --rounds?"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(capsys, arguments, words):
    refused(compare_training.main, arguments, capsys, words)
