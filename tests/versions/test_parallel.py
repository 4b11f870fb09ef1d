"""Several processes: losses, gradients and weights of one, checkpoints between engines, and a common end."""

import functools
import json
import os
import pathlib
import re
import signal
import subprocess

import pytest
import torch
from parallel_worker import WORKER, trained

from common.versions import SCRIPTS, load_version, relative_error
from processes import SIZES, TORCHRUN, environment, launch

COMMON = [*SIZES.split(), "--warmup-steps", "1", "--batch-size", "2"]
ENGINES = ("ddp", "fsdp") if torch.__version__ >= (2, 9) else ("ddp",)  # older ones refuse FSDP2 on a CPU
CASES = [(version, [*COMMON, "--parallel", engine]) for version in SCRIPTS for engine in ENGINES]
CASES += [(version, [*COMMON, "--use-amp", "--parallel", ENGINES[-1]]) for version in (1, 4)]  # bfloat16
# Relative differences in float32: of losses, and rms over rms of tensors after three steps. The mean over the batch is
# taken in another order, and AdamW's division amplifies the rounding.
SAME = {"losses": 1e-6, "gradients": 2e-5, "weights": 2e-5, "exp_avg": 2e-5, "exp_avg_sq": 2e-5}


def several_processes(folder, processes, cases, **variables):
    results = folder / "results.pt"
    worked = launch(processes, WORKER, results, json.dumps(cases), timeout=1200, variables=variables)
    assert worked.returncode == 0, worked.stderr[-3000:]
    return torch.load(results)


@functools.cache
def alone(version, *argv):
    """Return the results of a case in this one process, with the batch of both."""
    argv = [*argv, "--batch-size", str(2 * max(1, min(2, torch.cuda.device_count())) if "cuda" in argv else 4)]
    del argv[argv.index("--parallel") : argv.index("--parallel") + 2]
    return trained(version, argv)


def assert_same(got, wanted, scale=1):
    assert got["losses"] == pytest.approx(wanted["losses"], rel=scale * SAME["losses"])
    for kind in ("gradients", "weights", "exp_avg", "exp_avg_sq"):
        assert got[kind].keys() == wanted[kind].keys()
        errors = {name: relative_error(got[kind][name], wanted[kind][name]) for name in wanted[kind]}
        worst = max(errors, key=errors.get)
        assert errors[worst] <= scale * SAME[kind], f"{kind}: {worst} is {errors[worst]:.1e} off"


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Results of all cases on the CPU, from one launch: a launch takes longer than the cases."""
    cases = [(version, [*argv, "--device", "cpu"]) for version, argv in CASES]
    found = several_processes(tmp_path_factory.mktemp("ranks"), 2, cases, CUDA_VISIBLE_DEVICES="")
    return {(version, *argv): result for (version, argv), result in zip(CASES, found, strict=True)}


@pytest.mark.parametrize(("version", "argv"), CASES, ids=[f"v{v}-{' '.join(argv[len(COMMON) :])}" for v, argv in CASES])
def test_two_processes_train_as_one(results, version, argv):
    if version == 3 and torch.cuda.is_available():
        pytest.skip("version 3 was loaded for the GPU, not for the interpreter")
    wanted = alone(version, *argv, "--device", "cpu")
    assert_same(results[(version, *argv)], wanted, scale=2000 if "--use-amp" in argv else 1)


# ---------------------------------------------------------------- from the command line


def run(folder, engine, *argv):
    """Train version 1 with batches of four: on two ranks with ddp or fsdp, or in this process with None."""
    metrics = folder / "metrics.json"
    argv = [*SIZES.split(), "--warmup-steps", "1", "--device", "cpu", "--metrics-file", metrics, *argv]
    if engine:
        ended = launch(2, SCRIPTS[1], *argv, "--batch-size", 2, "--parallel", engine, cwd=folder)
        assert ended.returncode == 0, ended.stderr
        assert len(re.findall("^summary of", ended.stdout, re.MULTILINE)) == 1
        assert f"ranks      2, {engine} over gloo" in ended.stdout
    else:
        assert load_version(1).main([*map(str, argv), "--batch-size", "4"]) == 0
    return json.loads(metrics.read_text())


@pytest.mark.parametrize("precision", [[], pytest.param(["--use-amp"], marks=pytest.mark.slow)], ids=str)
def test_a_run_changes_its_engine_at_each_checkpoint(tmp_path, precision):
    """DDP, then FSDP2 (if it runs), then DDP again, then one process: the losses of one that was never stopped."""
    unbroken = [step["loss"] for step in run(tmp_path, None, *precision, "--num-steps", 7)["steps"]]
    losses, saving = [], ["--checkpoint-dir", tmp_path / "check points", "--save-every", 2, *precision]
    for last, engine in ((2, "ddp"), (4, ENGINES[-1]), (6, "ddp"), (7, None)):
        content = run(tmp_path, engine, *saving, *["--resume"] * bool(losses), "--num-steps", last)
        losses += [step["loss"] for step in content["steps"]]
        summary, options = content["summary"], content["options"]
        assert (summary["world_size"], summary["parallel"]) == (2 if engine else 1, engine)
        assert summary["parameters_trained"] == summary["parameters"]
        rate = 4 * 1000 / summary["step_ms"]["median"]
        assert summary["samples_per_second"] == pytest.approx(rate) and options["batch_size"] == (2 if engine else 4)
        for step in content["steps"] if engine else []:
            assert len(step["rank_step_ms"]) == 2 and step["step_ms"] == max(step["rank_step_ms"])
    assert losses == pytest.approx(unbroken, rel=2e-3 if precision else 1e-5) and len(losses) == 7


@pytest.mark.parametrize(("engine", "killed"), [("ddp", 1), (ENGINES[-1], 0)])
@pytest.mark.skipif(not pathlib.Path("/proc/thread-self/children").exists(), reason="finds the processes in /proc")
def test_a_killed_rank_ends_the_job(tmp_path, engine, killed):
    argv = [*SIZES.split(), "--batch-size", "2", "--num-steps", "1000000", "--device", "cpu", "--parallel", engine]
    command = [*TORCHRUN, "2", SCRIPTS[1], *argv, "--metrics-file", tmp_path / "metrics.json"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment(), cwd=tmp_path, **pipes) as job:
        try:
            while "step     1/" not in job.stdout.readline():
                assert job.poll() is None, job.stderr.read()
            ranks = pathlib.Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
            os.kill(int(ranks[killed]), signal.SIGKILL)
            out, errors = job.communicate(timeout=100)
        finally:
            job.terminate()  # the launcher ends its processes
    assert job.returncode != 0 and "summary of" not in out
    assert f"rank      : {killed}" in errors and "SIGKILL" in errors
    if killed:  # rank 0 has measured, and says why it ends
        assert re.search(r"^tiny_llama_v1.py, rank 0 of 2: (communication failed|interrupted)", errors, re.MULTILINE)
        assert json.loads((tmp_path / "metrics.json").read_text())["steps"]


# ---------------------------------------------------------------- torchrun's variables

RANKS = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
RANKS |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
ODD = ("RANK", None), ("WORLD_SIZE", None), ("MASTER_PORT", None), ("MASTER_ADDR", ""), ("RANK", "two"), ("RANK", "2")
RANK_1 = {"LOCAL_RANK": "1", "RANK": "1"}


@pytest.mark.parametrize(
    ("changed", "argv", "words"),
    [
        *(({name: value}, "", f"{name}.* torchrun") for name, value in (*ODD, ("WORLD_SIZE", "-2"))),
        ({}, "--seq-len 0", "--seq-len"),
        (RANK_1, "--seq-len 0", ""),  # local rank 0 says it for all
        (RANK_1, "--device cuda", ""),
        ({}, "--device cuda:1", "PyTorch sees 1"),
        (RANK_1, "--device cuda:0", ""),
        (dict.fromkeys(RANKS), "--parallel ddp", "start with torchrun"),
        ({}, "--device cpu --parallel fsdp --use-amp --amp-dtype float16", "use --parallel ddp"),
        ({}, "--device cpu --parallel fsdp --profile-attention-only", "use --parallel ddp"),
    ],
)
def test_refused_on_local_rank_0_only(monkeypatch, capsys, changed, argv, words):
    """Read the options in a rank's environment."""
    for name, value in (RANKS | changed).items():
        monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(SystemExit, match="2"):
        load_version(1).parse_options(argv.split())
    errors = capsys.readouterr().err
    assert re.search(words, errors) and errors.count("\n") == bool(words)


# ---------------------------------------------------------------- on GPUs

GPU_SIZES = [*SIZES.replace("51", "64").split(), "--warmup-steps", "1", "--batch-size", "2", "--device", "cuda"]
WAYS = {
    "graph": ["--graph", "--parallel", "ddp"],
    "ddp": ["--no-graph", "--parallel", "ddp"],
    "fsdp": ["--no-graph", "--parallel", "fsdp"],
}
GPU_CASES = {
    (version, precision, way): [*GPU_SIZES, *argv, *options]
    for version in SCRIPTS
    for precision, argv in {"float32": [], "bfloat16": ["--use-amp"]}.items()
    for way, options in WAYS.items()
}


@pytest.fixture(scope="module")
def gpu_results(tmp_path_factory):
    """Results of all cases from one launch, with one process on each of up to two GPUs."""
    cases = [(version, argv) for (version, _, _), argv in GPU_CASES.items()]
    found = several_processes(tmp_path_factory.mktemp("ranks"), min(2, torch.cuda.device_count()), cases)
    return dict(zip(GPU_CASES, found, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize(("version", "precision", "way"), GPU_CASES)
def test_gpus_train_as_one(gpu_results, version, precision, way):
    """Tiles add gradients up in another order, or in 16 bits; FSDP2 rounds the norms' weights too."""
    result = gpu_results[version, precision, way]
    assert_same(result, alone(version, *GPU_CASES[version, precision, way]), 10 if precision == "float32" else 2000)
    assert result["graph"] == (way == "graph") or torch.version.hip
