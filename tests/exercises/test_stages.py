"""The debugging journey: every stage shows its symptom, and has no fault besides."""

import gc
import inspect
import json
import math
import os
import re
import subprocess
import sys
import weakref

import pytest
import torch

from common.versions import REPOSITORY, load_version, relative_error
from kernel_cases import launches

FOLDER = REPOSITORY / "version3_triton" / "exercises" / "performance_debugging"
sys.path.insert(0, str(FOLDER))
import compare_stages
import stage_tools
import v3_stage1_broken_loss as stage1
import v3_stage2_slow_performance as stage2
import v3_stage3_fake_timing as stage3
import v3_stage4_slow_kernels as stage4
import v3_stage5_optimized as stage5
import v3_stage6_phantom_speedup as stage6

from common.command_line import Failure

STAGES = {1: stage1, 2: stage2, 3: stage3, 4: stage4, 5: stage5, 6: stage6}
SMALL = [*stage_tools.CPU_SIZES, "--batch-size", "2", "--seq-len", "9", "--num-layers", "1"]
TINY = "--batch-size 1 --seq-len 8 --num-layers 1 --num-steps 2 --warmup-steps 0 --device cpu --no-graph".split()


def first_step(v3):
    """Loss of the first batch and name -> gradient (None where there is none) of the initial weights."""
    trainer = v3.Trainer(v3.parse_options([*SMALL, "--no-graph"]))
    tokens, labels = (tensor.to(trainer.device) for tensor in v3.load_data(trainer.options).batch(0))
    loss = v3.compute_loss(trainer.model, tokens, labels, trainer.options)
    loss.backward()
    return loss.item(), {name: parameter.grad for name, parameter in trainer.model.named_parameters()}


@pytest.fixture(scope="module")
def right():
    return first_step(load_version(3))


@pytest.mark.parametrize("stage", [2, 3, 4, 5])
def test_loss_and_gradients_are_those_of_version_3(stage, right):
    """These stages are slow or measure wrongly; what they compute is right."""
    loss, gradients = first_step(STAGES[stage].load())
    assert loss == pytest.approx(right[0], rel=1e-6)
    for name, gradient in right[1].items():
        assert relative_error(gradients[name], gradient) < 1e-5, name


def test_stage_1_starts_too_high(right):
    loss, gradients = first_step(stage1.load())
    assert loss > 3 * math.log(100) > 2.9 * right[0]
    assert all(gradient is not None for gradient in gradients.values())


def test_stage_2_reads_elements_of_a_head_from_far_apart(device):
    v3 = stage2.load()
    assert "* (stride // D)" in inspect.getsource(v3.load_tile.fn)
    seen = []
    apply = v3.FlashAttentionFunction.forward
    v3.FlashAttentionFunction.forward = staticmethod(lambda ctx, qkv, H, K: seen.append(qkv) or apply(ctx, qkv, H, K))
    qkv = torch.arange(2 * 3 * 4 * 16.0, device=device).view(2, 3, 4, 16)
    v3.flash_attention(qkv, 2, 1)
    assert torch.equal(seen[0].reshape(2, 3, 16, 4).transpose(2, 3), qkv)


def test_stage_4_launches_a_program_for_each_element():
    v3 = stage4.load()
    with launches() as names:
        first_step(v3)
    assert "swiglu_element_kernel" in names and "swiglu_forward_kernel" not in names


def test_stage_6_has_the_right_loss_and_no_gradients(right):
    loss, gradients = first_step(stage6.load())
    assert loss == pytest.approx(right[0], rel=1e-6)
    assert [name for name, gradient in gradients.items() if gradient is not None] == ["embed_tokens.weight"]


# ---------------------------------------------------------------- as programs

SYMPTOMS = {
    1: r"default initialisation +logits: standard deviation [\d.]+, highest [\d.]+; loss [23]\d\.\d+\n",
    2: r"lie 16 bytes apart instead of 4\n.*needs a GPU",
    3: r"2 steps: the clock says [\d.]+ ms, and [\d.]+ ms have passed\n.*needs a GPU",
    4: r"starts 256 programs; each reads 3 x 32 numbers",
    5: r"none: ([\d,]+) of \1 parameters are trained",
    6: r"the gradient of 7 of 8 tensors is None.*\n  33\.\d+ % of the parameters are trained",
}


def run_stage(stage, *options):
    script = FOLDER / f"{STAGES[stage].__name__}.py"
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    return subprocess.run(
        [sys.executable, str(script), *options], capture_output=True, text=True, cwd="/", env=environment
    )


@pytest.mark.parametrize("stage", STAGES)
def test_symptom_is_shown(stage, tmp_path):
    """From any folder, with options that go through to the script."""
    metrics = tmp_path / "metrics.json"
    done = run_stage(stage, *TINY, "--metrics-file", str(metrics))
    assert done.returncode == 0, done.stderr
    assert re.search(SYMPTOMS[stage], done.stdout.split("the symptom")[1], re.DOTALL), done.stdout
    assert len(json.loads(metrics.read_text())["steps"]) == 2


def test_bad_options_are_those_of_the_script():
    done = run_stage(5, "--num-heads", "0")
    assert done.returncode == 2 and len(done.stderr.strip().splitlines()) == 1


def test_a_run_leaves_no_model_in_memory():
    v3, trainers = stage5.load(), []
    stage_tools.run_stage(v3, "", lambda v3, trainer, *rest: trainers.append(weakref.ref(trainer)) or [], TINY)
    gc.collect()
    assert [trainer() for trainer in trainers] == [None]


# ---------------------------------------------------------------- symptoms that need a GPU


def gpu_run(stage, *options):
    """(module, trainer, steps, summary, what the stage says) of a stage in this process, with its default sizes."""
    v3, runs = stage.load(), []
    gc.collect()  # other tests of this process ran larger models
    v3.torch.cuda.reset_peak_memory_stats()
    status = stage_tools.run_stage(v3, "", lambda *run: runs.append(run) or [], options)
    assert status == 0
    said = list(stage.report(*runs[0]))
    print("\n".join(said))
    return *runs[0], said


def phases(summary):
    return [summary[f"{name}_ms"] for name in ("forward", "backward", "optimizer")]


@pytest.mark.gpu
def test_stage_1_starts_far_too_high_on_a_gpu():
    *_, summary, said = gpu_run(stage1)
    assert summary["first_loss"] > 100 and len(said) == 4


@pytest.mark.gpu
@pytest.mark.parametrize("options", [[], ["--preset", "medium"], ["--use-amp"]], ids=" ".join)
def test_stage_2_pays_for_its_layout_on_a_gpu(options):
    v3, trainer, _, slow, _ = gpu_run(stage2, *options)
    strided, right = stage2.attention_ms(v3, trainer)
    assert strided > 1.2 * right
    *_, summary, _ = gpu_run(stage5, *options)
    assert slow["step_ms"]["median"] > 1.02 * summary["step_ms"]["median"]
    assert slow["final_loss"] == pytest.approx(summary["final_loss"], rel=2e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("options", [[], ["--preset", "medium"]], ids=" ".join)
def test_stage_3_claims_less_time_than_has_passed(options):
    """In a graph: launched one by one, kernels soon fill the queue, and asking for one waits for the GPU after all."""
    v3, _, steps, summary, _ = gpu_run(stage3, *options)
    assert sum(v3.really_ms[: len(steps)]) > 1.5 * sum(step["step_ms"] for step in steps)
    if None not in phases(summary):  # a HIP graph has no phases
        assert sum(phases(summary)) > 1.5 * summary["step_ms"]["median"]


@pytest.mark.gpu
def test_stage_4_is_slower_than_stage_5():
    """In a graph, where the GPU's time counts: 16.8 against 5.9 ms on an H200."""
    slow, right = (gpu_run(stage)[3] for stage in (stage4, stage5))
    assert slow["step_ms"]["median"] > 1.5 * right["step_ms"]["median"]
    assert None in phases(slow) or slow["forward_ms"] > slow["backward_ms"]


@pytest.mark.gpu
def test_stage_6_is_fast_and_small_and_does_not_train_on_a_gpu():
    phantom, right = (gpu_run(stage, "--num-steps", "200")[3] for stage in (stage6, stage5))
    assert phantom["step_ms"]["median"] < 0.8 * right["step_ms"]["median"]
    assert phantom["peak_memory_mb"] < 0.8 * right["peak_memory_mb"]
    assert phantom["parameters_trained"] == 512_000 and right["parameters_trained"] == right["parameters"]
    assert phantom["first_loss"] == pytest.approx(right["first_loss"], abs=0.02)
    assert phantom["final_loss"] > right["final_loss"] + 0.5
    forward, backward, _ = phases(phantom)
    assert forward is None or backward < forward  # None in a HIP graph


@pytest.mark.gpu
def test_run_all_stages_on_a_gpu(tmp_path):
    done = subprocess.run(
        [str(FOLDER / "run_all_stages.sh"), "--profiler", "pytorch", "--output-dir", str(tmp_path), "--num-steps", "5"],
        capture_output=True,
        text=True,
        env=os.environ | {"TINY_LLAMA_PYTHON": sys.executable},
    )
    assert done.returncode == 0, done.stderr
    for stage in STAGES:
        for name in ("output.log", "metrics.json", "profile.csv"):
            assert (tmp_path / f"stage{stage}_{name}").stat().st_size > 100
    assert "published" in (tmp_path / "comparison.txt").read_text()


def test_changed_script_ends_a_stage_with_a_sentence():
    with pytest.raises(SystemExit, match="bring the stage up to date"):
        stage_tools.load_v3(stage2.SECTION, {"no such text": ""})


def test_preset_replaces_the_stages_sizes():
    v3 = stage5.load()
    assert "--seq-len" not in stage_tools.with_defaults(v3, ["--preset", "small"])
    assert "--seq-len" in stage_tools.with_defaults(v3, [])


# ---------------------------------------------------------------- all of them


def run_all(*options, python=sys.executable):
    return subprocess.run(
        [str(FOLDER / "run_all_stages.sh"), *options],
        capture_output=True,
        text=True,
        cwd="/",
        env=os.environ | {"TINY_LLAMA_PYTHON": str(python), "TINY_LLAMA_CPU": "1"},
    )


def test_dry_run_shows_every_command(tmp_path):
    results = tmp_path / "results"
    done = run_all("--dry-run", "--num-steps", "3", "--output-dir", str(results))
    assert done.returncode == 0, done.stderr
    for stage in STAGES.values():
        assert len(re.findall(rf"{stage.__name__}\.py --num-steps 3 ", done.stdout)) == 2  # trained, and profiled
    assert "=== comparison" not in done.stdout and not results.exists()


def test_failing_stages_fail_the_run(tmp_path):
    """With a Python that fails at stages 2 and 4, and writes nothing anywhere."""
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\ncase "$*" in *v3_stage[24]*) exit 1;; esac\n')
    python.chmod(0o755)
    done = run_all("--output-dir", str(tmp_path / "the results"), python=python)
    assert done.returncode == 1 and "=== comparison" not in done.stdout
    assert "failed: stage 2 4" in done.stderr


def metrics(**changes):
    v3_like = {
        "config": {"num_layers": 8, "hidden_dim": 512},
        "options": {"batch_size": 8, "seq_len": 128},
        "environment": {"device": "a GPU", "device_type": "cuda", "torch": "2", "triton": "3"} | changes,
        "summary": {
            "step_ms": {"median": 2.0},
            "samples_per_second": 4000.0,
            "forward_ms": None,
            "backward_ms": 1.25,
            "optimizer_ms": 0.5,
            "peak_memory_mb": 100.0,
            "first_loss": 7.0,
            "final_loss": 6.5,
            "parameters_trained": 5,
            "parameters": 10,
        },
    }
    return json.dumps(v3_like)


def test_comparison_comes_from_recorded_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["compare_stages.py", str(tmp_path)])
    with pytest.raises(Failure, match="holds no"):
        compare_stages.main()
    (tmp_path / "stage1_metrics.json").write_text(metrics())
    (tmp_path / "stage6_metrics.json").write_text(metrics())
    compare_stages.main()
    lines = capsys.readouterr().out.splitlines()
    assert "mean nothing" not in lines[-1]
    assert lines[0] == "a GPU, torch 2, triton 3; B 8, T 128, 8 layers of 512"
    assert lines[3].split() == "6 2.000 4000.0 - - 1.250 0.500 100.0 7.0000 -> 6.5000 50.0 % - - -".split()
    (tmp_path / "stage5_metrics.json").write_text(metrics().replace("4000.0", "5000.0"))
    (tmp_path / "stage2_metrics.json").write_text(metrics())
    compare_stages.main()
    lines = capsys.readouterr().out.splitlines()
    stage_2, stage_5 = (next(line.split() for line in lines if line.split()[0] == stage) for stage in "25")
    assert stage_2[3:5] == ["80.0", "%"] and stage_5[3:5] == ["100.0", "%"]
    assert stage_2[-4:] == ["15.2", "0.7", "%", "282"] and stage_5[-4:] == ["2065.0", "100.0", "%", "281.8"]
    (tmp_path / "stage6_metrics.json").write_text(metrics(device="another GPU"))
    with pytest.raises(Failure, match="run differently"):
        compare_stages.main()
    for stage in "1256":
        (tmp_path / f"stage{stage}_metrics.json").write_text(metrics(device_type="cpu"))
    compare_stages.main()
    assert "mean nothing" in capsys.readouterr().out.splitlines()[-1]
    (tmp_path / "stage6_metrics.json").write_text("{")
    with pytest.raises(Failure, match="incomplete"):
        compare_stages.main()
