"""compare_training.py: what is the same gets a speed, what is not is named, and the scripts compute their own numbers."""

import json
import os
import pathlib
import re
import subprocess
import sys
from multiprocessing.connection import Connection

import pytest
import torch

import compare_training
from common.before_after import runs, speed
from common.before_after.names import Pair, Unpaired, in_parts, pair_names, to_new
from common.before_after.session import CONTROL, NEW, OLD
from common.versions import REPOSITORY
from in_process import refused
from marks import slow
from processes import FORKS, run_fork

GPT = pathlib.Path(__file__).with_name("training_scripts") / "char_gpt.py"
LOOPS = GPT.with_name("other_loops.py")


def run_child(request, log, inbox, outbox):
    """Be a child of compare_training.py, in a fork."""
    from common.before_after import child

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


# ---------------------------------------------------------------- the verdict on the computation
SAME = "the same computation, speed not measured"
VERDICTS = {  # ways of old, ways of new: verdict, and words of its reason
    ("", "kernel checkpoint"): (SAME, ""),
    ("", "fused outside"): (SAME, ""),
    ("outside", "compile_in_place"): (SAME, ""),
    ("dropout", "dropout"): (SAME, ""),
    ("autocast scaler", "autocast kernel"): (SAME, ""),
    ("sparse", "sparse"): (SAME, ""),
    ("", "detach"): ("not the same computation", r"new lacks \d+ of 31 gradients: .*tokens.weight"),
    ("", "data"): ("not the same computation", r"new lacks 15 of 31 gradients: .*attention.q.weight"),
    ("", "one_zeroed"): ("not the same computation", "new lacks 1 of 31 gradients: blocks.1.mlp.up.weight"),
    ("", "forgotten"): ("not the same computation", "new updates|new lacks"),
    ("", "lr_zero"): ("not the same computation", "the optimizer's lr 0.0 in new and 0.001 in old"),
    ("", "sgd"): ("not the same computation", "the optimizer is SGD in new and AdamW in old"),
    ("", "accumulation"): (
        "same model, data or loss not compared",
        "new calls its model 4 times where old calls it 1 ",
    ),
    ("dropout", ""): ("not the same computation", "old draws random numbers in its model and new does not"),
    ("", "autocast"): ("not the same computation", "new computes in bfloat16 on cpu, old in float32 on cpu"),
    ("", "never_cleared"): ("not the same computation", "step 2: 31 of 31 gradients differ"),
    ("", "same_batch"): ("same model, data or loss not compared", "step 1: tensor 1 of its input is another one"),
    ("", "tied"): ("not the same computation", "new ties head.weight to tokens.weight"),
    ("", "unused_head"): ("not comparable", "new's value.weight, value.bias have no counterpart"),
    ("", "by_hand"): ("not comparable", "no torch.optim optimizer stepped in 10 backward passes"),
}


@pytest.mark.parametrize("ways", VERDICTS, ids=lambda ways: " - ".join(ways))
@pytest.mark.quick(4)
def test_verdicts_on_a_gpt(compare, ways):
    old, new = ([GPT, *side.split()] for side in ways)
    verdict, words = VERDICTS[ways]
    status, report, printed = compare(old, new, "--no-speed")
    assert report["verdict"] == verdict and re.search(words, report["reason"] or ""), printed
    assert status == {SAME: 0, "not comparable": 2}.get(verdict, 1)
