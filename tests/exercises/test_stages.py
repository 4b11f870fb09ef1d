"""The debugging stages: each has its fault, the check finds it and accepts the repair, and nothing tells it early."""

import json
import math
import os
import pathlib
import re
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from common.versions import REPOSITORY
from marks import slow
from processes import executable, run_file

FOLDER = REPOSITORY / "version3_triton" / "exercises" / "performance_debugging"
sys.path.insert(0, str(FOLDER))
import stage_checks
import stage_tools

STAGES = {int(path.name[8]): path.name for path in sorted(FOLDER.glob("v3_stage*.py"))}
TINY = "--batch-size 1 --seq-len 8 --num-layers 1 --num-steps 2 --warmup-steps 0 --device cpu --no-graph".split()
FAULTS = {
    1: r"at width 512 the first loss is 471\.\d\d; a uniform guess over 1000 tokens has 6\.91",
    2: r"its kernels touch \d\.\d+ MB of cache lines in a small step, version 3's \d\.\d+ MB",
    3: r"a step of 51 ms, begun with 30 ms of earlier work, is reported as 1 ms",
    4: r"its kernels touch \d\.\d+ MB of cache lines in a small step, version 3's \d\.\d+ MB",
    6: r"13 of 14 tensors get no gradient, among them layers\.0\.",
}

# A copy of a stage finds what the original finds beside it.
PATH = os.pathsep.join(filter(None, [str(FOLDER), os.environ.get("PYTHONPATH")]))
CHECKED = stage_tools.CHECK_ENVIRONMENT | {"PYTHONPATH": PATH}

COPIES = "    trainer.tokens.copy_(tokens)\n    trainer.labels.copy_(labels)\n"
START = "    trainer.synchronize()\n    start = time.perf_counter()\n"


def process(script, *options, **environment):
    """Run a program of the exercise from another folder and return the finished process."""
    command = [*([sys.executable] if script.suffix == ".py" else []), str(script), *options]
    return subprocess.run(command, capture_output=True, text=True, cwd="/", env=os.environ | environment)


def call(script, *options):
    """Run a stage without a GPU as process() does: in this process, unless Triton was imported for a GPU."""
    if torch.cuda.is_available():
        return process(script, *options, **CHECKED)
    return run_file(script, *options, cwd="/", **stage_tools.CHECK_ENVIRONMENT)


@pytest.fixture
def copied(tmp_path):
    """Return a function that copies a stage, and returns the file: version 3's step is measured once for all copies."""
    return lambda stage: pathlib.Path(shutil.copy(FOLDER / STAGES[stage], tmp_path))


@pytest.fixture
def repaired(copied):
    """Return a function that repairs a stage in a copy by its solution, and returns the file."""

    def repair(stage):
        path = copied(stage)
        if stage in FAULTS:
            diff = FOLDER / "solutions" / f"stage{stage}.diff"
            subprocess.run(["git", "apply", str(diff)], cwd=path.parent, check=True)
        return path

    return repair


@pytest.mark.parametrize("stage", [stage if stage == 3 else slow(stage) for stage in STAGES])
def test_the_fault_is_found_and_the_repair_accepted(stage, copied, repaired):
    """Stage 5 is the reference and has no fault."""
    if stage in FAULTS:
        broken = call(copied(stage), "--check")
        assert broken.returncode == 1 and re.search(FAULTS[stage], broken.stdout), broken.stdout + broken.stderr
    done = call(repaired(stage), "--check")
    assert done.returncode == 0 and f"stage {stage} has no fault" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("stage", "old", "new", "said"),
    [
        slow(1, "normal_(0, 0.02", "normal_(0, options.hidden_dim**-0.5", "the first loss is 7.4"),
        slow(1, "normal_(0, 0.02", "normal_(0, 0.001", "standard deviation of 0.02: tokens hardly change"),
        slow(1, "normal_(0, 0.02", "normal_(0, 0.03", None),
        slow(1, "normal_(0, 0.02", "normal_(0, 0.01", None),
        slow(2, "x * rstd * w", "x * rstd", "the first loss is"),
        slow(2, "(x.numel() // C", "(C", "the first loss is|the gradient of"),
        slow(2, "return x, y", "return x, y.flatten(0, 1).t().contiguous().t().view(x.shape)", "a copy is left"),
        slow(2, "residual.contiguous()\n", "residual.contiguous()\n        x = x.clone()\n", "a copy is left"),
        slow(
            2,
            "add_rms_norm_kernel[(len(rstd),)](x, w, y, rstd, len(rstd), C, eps, triton.next_power_of_2(C))",
            "y, rstd = v3.rms_norm(x, w, eps), (x.square().mean(-1).flatten() + eps).rsqrt()",
            "start 24 kernels, version 3 29",
        ),
        slow(3, "    trainer.synchronize()\n    start", "    v3.torch.cuda.synchronize()\n    start", None),
        slow(3, "    trainer.synchronize()\n    start", "    start", "80 ms: the earlier work is counted"),
        slow(3, COPIES + START, START + COPIES, "60 ms: the earlier work is counted"),
        (3, "    trainer.synchronize()\n    step_ms", "    step_ms", "is reported as 1 ms"),
        slow(4, "v3.packed_swiglu(", "v3.packed_swiglu(2 * ", "the first loss is"),
        slow(4, "v3.packed_swiglu(self.gate_up_proj(x))", "v3.swiglu(*self.gate_up_proj(x).chunk(2, -1))", "start 25"),
        slow(6, "y = SwiGLUFunction.apply(", "y = SwiGLUFunction.apply(1 * ", None),
        slow(6, "return y.view(*x.shape[:-1], -1)", "return v3.swiglu(*x.chunk(2, -1))", "start 27 kernels"),
        slow(
            6,
            "return v3.AddRMSNormFunction.apply(residual, branch, w, eps)",
            "x = residual if branch is None else residual + branch\n    return x, v3.rms_norm(x, w, eps)",
            "start 14 kernels",
        ),
        slow(6, "y = SwiGLUFunction.apply(", "y = v3.SwiGLUFunction.apply(", "write the stage's own"),
        slow(6, "v3.AttentionFunction.apply(", "v3.AttentionFunction.apply(2 * ", "the first loss is"),
    ],
)
def test_half_a_repair_is_found(stage, old, new, said, repaired):
    """Another right repair (said None) is accepted."""
    path = repaired(stage)
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))
    done = call(path, "--check")
    assert done.returncode == bool(said) and re.search(said or "has no fault", done.stdout), done.stdout + done.stderr


@pytest.mark.slow
def test_the_guide_finds_the_cause_of_stage_1(tmp_path):
    """Its lines print what the reveal says, and the numbers of the reveal follow from each other."""
    guide = (FOLDER / "WORKSHOP_GUIDE.md").read_text()
    program = tmp_path / "look.py"
    program.write_text(re.search(r"```python\n(.*?)```", guide, re.DOTALL)[1])
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, env=os.environ | CHECKED)
    assert done.stdout == re.search(r"```python.*?```text\n(.*?)```", guide, re.DOTALL)[1], done.stdout + done.stderr


DELETED = {
    1: ["v3.initialize = initialize\n"],
    2: ["v3.AddRMSNormFunction = AddRMSNormFunction\n"],
    3: ["v3.Trainer.run = run\n"],
    4: ["v3.FeedForward.forward = feed_forward\n"],
    6: [
        "v3.add_rms_norm, v3.rotary_attention, v3.packed_swiglu = add_rms_norm, rotary_attention, packed_swiglu\n",
        "v3.add_rms_norm, ",
    ],
}


@pytest.mark.parametrize(("stage", "text"), [(stage, text) for stage, texts in DELETED.items() for text in texts])
def test_deleting_the_stages_part_is_no_repair(stage, text, repaired):
    """The last case deletes one of the three parts of stage 6."""
    path = repaired(stage)
    source = path.read_text()
    assert source.count(text) == 1
    shortened = source.replace(text, "v3.unused, " if text.endswith(", ") else "")
    path.write_text(shortened)
    done = call(path, "--check")
    assert done.returncode == 1 and "is gone, so version 3's runs" in done.stdout, done.stdout + done.stderr


def check_symptoms(stage, metrics):
    """Check what a run tells that no clock decides; the others' causes are found by --check, in bytes and launches."""
    options, summary = metrics["options"], metrics["summary"]
    uniform = math.log(options["vocab_size"])
    if stage == 1:
        assert summary["first_loss"] > 5 * uniform
    else:
        assert summary["first_loss"] == pytest.approx(uniform, abs=0.3)
    embedding = options["vocab_size"] * options["hidden_dim"]
    assert summary["parameters_trained"] == (embedding if stage == 6 else summary["parameters"])


@pytest.mark.parametrize("stage", [stage if stage in (1, 6) else slow(stage) for stage in STAGES])
def test_a_run_tells_numbers_and_no_diagnosis(stage, tmp_path):
    """The symptoms of stages 1 and 6 are in the numbers."""
    metrics = tmp_path / "metrics.json"
    done = call(FOLDER / STAGES[stage], *TINY, "--metrics-file", str(metrics))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"stage {stage} of 6\n") and "trained    " in done.stdout
    assert not re.search(r"synchron|stride|copies|initiali[sz]|autograd|None|phantom|fault:", done.stdout)
    assert ("--reveal explains" in done.stdout) == (stage != 5)
    content = json.loads(metrics.read_text())
    assert len(content["steps"]) == 2
    check_symptoms(stage, content)


@pytest.mark.parametrize("stage", STAGES)
def test_reveal_and_solution_are_options_of_a_stage(stage):
    text = call(FOLDER / STAGES[stage], "--reveal").stdout
    assert all(f"*{word}.*" in text for word in ("Observed", "Cause", "Repair", "Lesson")) or stage == 5
    assert ("published" in text or "2065" in text) == (stage in (1, 2, 6))  # where a reader meets what is published
    assert "<!--" not in text  # the page's markers, which a browser hides
    diff = (FOLDER / "solutions" / f"stage{stage}.diff").read_text() if stage in FAULTS else "stage 5 has no fault\n"
    assert call(FOLDER / STAGES[stage], "--solution").stdout == diff


def test_a_check_chooses_the_interpreter_itself(monkeypatch):
    started = []
    monkeypatch.setattr(os, "execve", lambda *call: started.append(call) or sys.exit(0))
    run_file(FOLDER / STAGES[3], "--check", TRITON_INTERPRET="0")
    ((program, argv, environment),) = started
    assert (program, argv) == (sys.executable, [sys.executable, str(FOLDER / STAGES[3]), "--check"])
    assert stage_tools.CHECK_ENVIRONMENT.items() <= environment.items()


def test_bad_options_are_those_of_the_script():
    done = call(FOLDER / STAGES[5], "--num-heads", "0")
    assert done.returncode == 2 and len(done.stderr.strip().splitlines()) == 1


# ---------------------------------------------------------------- the numbers of the checks


@pytest.mark.parametrize(
    ("more", "deviation", "said"),
    [
        (0.299, 0.101, None),
        (-0.299, 0.101, None),
        (0.301, 0.101, "the check allows 0.3 more"),
        (-0.301, 0.101, "the check allows 0.3 more"),
        (math.nan, 0.101, "the check allows 0.3 more"),
        (0.0, 0.099, "tokens hardly change the prediction"),
        (0.0, math.nan, "tokens hardly change the prediction"),
    ],
)
def test_the_first_loss_is_a_uniform_guesss_and_the_logits_differ(more, deviation, said, monkeypatch):
    logits = torch.linspace(-1, 1, 80).view(1, 8, 10)
    logits *= deviation / logits.std()
    monkeypatch.setattr(stage_checks, "first_logits", lambda v3: (logits, None, torch.zeros(1, 8)))
    functional = SimpleNamespace(cross_entropy=lambda *_: torch.tensor(math.log(10) + more))
    v3 = SimpleNamespace(torch=SimpleNamespace(nn=SimpleNamespace(functional=functional)))
    found = stage_checks.check_loss(v3)
    assert said in found if said else found is None


def measured(monkeypatch, mine, right):
    """Let measured_step return one of these for the stage, and the other for version 3."""
    monkeypatch.setattr(stage_checks, "load_version", lambda number: "version 3")
    monkeypatch.setattr(stage_checks, "measured_step", lambda v3: right if v3 == "version 3" else mine)


@pytest.mark.parametrize(
    ("loss", "gradient", "said"),
    [
        (1 + 0.99e-4, 1 + 0.99e-4, None),
        (1 + 1.01e-4, 1.0, "the first loss is 1.0001, version 3's is 1.0000"),
        (1.0, 1 + 1.01e-4, "the gradient of b is not version 3's"),
        (1.0, math.nan, "the gradient of b is not version 3's"),
        (1.0, None, "1 of 2 tensors get no gradient, among them b"),
    ],
)
def test_a_repair_has_version_3s_loss_and_gradients(loss, gradient, said, monkeypatch):
    """The last of two; other random weights, as of stage 1, are as good, but each gets a gradient."""
    ones = torch.ones(3, dtype=torch.float64)
    gradients = {"a": ones, "b": None if gradient is None else ones * gradient}
    measured(monkeypatch, (loss, gradients, 0, 0), (1.0, {"a": ones, "b": ones}, 0, 0))
    assert stage_checks.check_model(None, 2) == said
    assert stage_checks.check_model(None, 1) == (said if gradient is None else None)


@pytest.mark.parametrize(
    ("size", "launches", "said"),
    [
        (1100, 29, None),
        (1101, 29, "its kernels touch 0.00 MB of cache lines"),
        (1000, 28, "start 28 kernels, version 3 29: PyTorch operations replace a kernel"),
        (1000, 30, None),
    ],
)
def test_a_repair_moves_a_tenth_more_at_most_and_starts_each_kernel(size, launches, said, monkeypatch):
    measured(monkeypatch, (0.0, {}, size, launches), (0.0, {}, 1000, 29))
    found = stage_checks.check_traffic(None)
    assert said in found if said else found is None


@pytest.mark.parametrize("copied", [0, 1])
def test_one_byte_that_is_copied_around_the_norm_is_a_copy(copied, monkeypatch):
    monkeypatch.setattr(stage_checks, "check_traffic", lambda v3: None)
    monkeypatch.setattr(stage_checks, "copied", lambda v3: copied)
    found = stage_checks.check_copies(None)
    assert (found is not None) == bool(copied) and (not copied or "PyTorch copies 1 bytes" in found)


@pytest.mark.parametrize(
    ("claimed", "said"),
    [(51.49, None), (50.51, None), (51.51, ": the earlier work is counted too"), (50.49, "is reported as 50 ms")],
)
def test_a_step_of_51_ms_is_reported_as_such(claimed, said, monkeypatch):
    """All that the simulated GPU does takes whole milliseconds."""
    trainer = SimpleNamespace(run=lambda *_: {"step_ms": claimed})
    v3 = SimpleNamespace(Trainer=trainer, parse_options=lambda words: None, torch=torch)
    found = stage_checks.check_clock(v3)
    assert found.endswith(said) if said else found is None


# ---------------------------------------------------------------- symptoms that need a GPU


@pytest.mark.gpu
def test_symptoms_on_a_gpu(tmp_path):
    """At the sizes of a GPU, with its kernels and a graph; stage 6 keeps no activations."""
    peaks = {}
    for stage in STAGES:
        path = tmp_path / "metrics.json"
        done = process(FOLDER / STAGES[stage], "--metrics-file", str(path))
        assert done.returncode == 0, done.stderr
        metrics = json.loads(path.read_text())
        check_symptoms(stage, metrics)
        peaks[stage] = metrics["summary"]["peak_memory_mb"]
    assert peaks[6] < 0.8 * peaks[5]


# ---------------------------------------------------------------- all of them


def run_all(*options, python=sys.executable):
    return process(FOLDER / "run_all_stages.sh", *options, TINY_LLAMA_PYTHON=str(python), TINY_LLAMA_CPU="1")


def test_dry_run_shows_every_command(tmp_path):
    results = tmp_path / "results"
    done = run_all("--dry-run", "--num-steps", "3", "--output-dir", str(results))
    assert done.returncode == 0, done.stderr
    for name in STAGES.values():
        assert len(re.findall(rf"{name}'? --num-steps 3 ", done.stdout)) == 2  # trained, and profiled
    assert "=== comparison" not in done.stdout and not results.exists()


@pytest.mark.skipif(not (REPOSITORY / ".git").exists(), reason="a copy without history")
def test_what_the_run_leaves_does_not_count_as_a_change():
    """A record's commands need a clean checkout."""
    left = FOLDER / "results" / "stage1_metrics.json"
    assert subprocess.run(["git", "check-ignore", "--quiet", left], cwd=FOLDER).returncode == 0


def test_failing_stages_fail_the_run(tmp_path):
    """With a Python that fails at stages 2 and 4, and writes nothing."""
    python = executable(tmp_path / "python", '#!/bin/sh\ncase "$*" in *v3_stage[24]*) exit 1;; esac\n')
    old = ["stage1_profile/old_kernel_trace.csv", "stage1_metrics.json", "stage2_metrics.json"]
    for name in old:  # of an earlier run: they would be taken for this one's
        (tmp_path / "the results" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "the results" / name).touch()
    done = run_all("--output-dir", str(tmp_path / "the results"), python=python)
    assert done.returncode == 1 and "=== comparison" not in done.stdout
    assert "failed: stage 2 4" in done.stderr
    assert not any((tmp_path / "the results" / name).exists() for name in old)


@pytest.mark.parametrize("status", [2, 130])
def test_a_bad_option_and_ctrl_c_end_the_run_at_once(status, tmp_path):
    python = executable(tmp_path / "python", f'#!/bin/sh\ncase "$*" in *v3_stage*) exit {status};; esac\n')
    done = run_all("--output-dir", str(tmp_path), python=python)
    assert done.returncode == status and done.stdout.count("=== ") == 1


SUMMARY = {
    "step_ms": {"median": 2.0}, "samples_per_second": 4000.0, "forward_ms": None, "backward_ms": 1.25,
    "optimizer_ms": 0.5, "peak_memory_mb": 100.0, "first_loss": 7.0, "final_loss": 6.5, "parameters_trained": 5,
    "parameters": 10,
}  # fmt: skip


def write_metrics(path, device="a GPU", device_type="cuda", **summary):
    environment = {"device": device, "device_type": device_type, "torch": "2", "triton": "3"}
    options = {"batch_size": 8, "seq_len": 128, "num_layers": 8, "hidden_dim": 512}
    path.write_text(json.dumps({"environment": environment, "options": options, "summary": SUMMARY | summary}))


def test_comparison_comes_from_recorded_runs(tmp_path):
    def compare(*folders):
        return process(FOLDER / "compare_stages.py", *map(str, folders or [tmp_path]))

    assert "holds no stage" in compare().stderr
    write_metrics(tmp_path / "stage2_metrics.json")
    assert compare().stdout.splitlines()[2].split()[3] == "-"
    write_metrics(tmp_path / "stage5_metrics.json", samples_per_second=5000.0)
    lines = compare().stdout.splitlines()
    assert lines[0] == "a GPU, torch 2, triton 3; B 8, T 128, 8 layers of 512" and len(lines) == 4
    assert lines[2].split() == "2 2.000 4000.0 80.0 % - 1.250 0.500 100.0 7.0000 -> 6.5000 50.0 %".split()
    repaired = tmp_path / "repaired"
    repaired.mkdir()
    write_metrics(repaired / "stage2_metrics.json", samples_per_second=2500.0, device_type="cpu")
    lines = compare(tmp_path, repaired).stdout.splitlines()
    assert lines[5] == "repaired" and lines[7].split()[3] == "50.0" and "times mean nothing" in lines[8]
    write_metrics(repaired / "stage2_metrics.json", device="another GPU")
    assert "setups differ" in compare(tmp_path, repaired).stderr
    (repaired / "stage2_metrics.json").write_text("{")
    assert "incomplete" in compare(repaired).stderr
