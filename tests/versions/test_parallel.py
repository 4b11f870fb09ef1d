"""Several processes: losses, gradients and weights of one, checkpoints between engines, and a common end."""

import contextlib
import datetime
import functools
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile

import pytest
import torch

from common.versions import SCRIPTS, load_version, relative_error
from processes import SIZES, TORCHRUN, end_as_torchrun, environment, forked_ranks, launch
from training import tensors, train

ON_TWO = [*SIZES.split(), "--batch-size", "2", "--device", "cpu"]
ENGINES = ("ddp", "fsdp") if torch.__version__ >= (2, 9) else ("ddp",)  # older ones refuse FSDP2 on a CPU
# Relative differences in float32: of losses, and rms over rms of tensors after two steps. The mean over the batch is
# taken in another order, and AdamW's division amplifies the rounding.
SAME = {"losses": 1e-6, "gradients": 2e-5, "weights": 2e-5, "exp_avg": 2e-5, "exp_avg_sq": 2e-5}


@functools.cache
def trained(version, *argv):
    """Return losses and tensors of two steps."""
    losses, trainer = train(version, argv, 2)
    return {"losses": losses, "graph": trainer.graph is not None, **tensors(load_version(version), trainer)}


def save_results(file, cases):
    """Train every case on all ranks that torchrun started; rank 0 saves the results."""
    script = load_version(1)
    config = script.parse_options([])
    with script.process_group(config):
        found = [trained(version, *argv) for version, argv in json.loads(cases)]
        if config.rank == 0:
            torch.save(found, file)


def compare(folder, processes, cases, **variables):
    """Train all cases, (version, options, scale of the errors), in one launch, and each in this process alone."""
    sizes, results = [*SIZES.split(), "--warmup-steps", "1", "--batch-size"], folder / "results.pt"
    launched = [[version, [*sizes, "2", *options.split()]] for version, options, _ in cases]
    worked = launch(processes, __file__, results, json.dumps(launched), timeout=1200, variables=variables)
    assert worked.returncode == 0, worked.stderr[-3000:]
    for (version, options, scale), got in zip(cases, torch.load(results), strict=True):
        wanted = trained(version, *sizes, str(2 * processes), *re.sub("--parallel [a-z]+", "", options).split())
        assert got["losses"] == pytest.approx(wanted["losses"], rel=scale * SAME["losses"]), (version, options)
        for kind in ("gradients", "weights", "exp_avg", "exp_avg_sq"):
            assert got[kind].keys() == wanted[kind].keys()
            errors = {name: relative_error(got[kind][name], wanted[kind][name]) for name in wanted[kind]}
            worst = max(errors, key=errors.get)
            assert errors[worst] <= scale * SAME[kind], f"V{version} {options}: {worst} is {errors[worst]:.1e} off"
        assert got["graph"] == ("--graph" in options) or torch.version.hip


@pytest.mark.slow
def test_two_processes_train_as_one(tmp_path):
    cases = [(v, f"--device cpu --no-graph --parallel {engine}", 1) for v in (1, 2, 4) for engine in ENGINES]
    if not torch.cuda.is_available():  # version 3 was not loaded for the GPU; its interpreter is slow
        cases += [(3, f"--device cpu --no-graph --num-layers 1 --parallel {engine}", 1) for engine in ENGINES]
    bfloat16 = f"--device cpu --no-graph --use-amp --parallel {ENGINES[-1]}"
    compare(tmp_path, 2, [*cases, (1, bfloat16, 2000), (4, bfloat16, 2000)], CUDA_VISIBLE_DEVICES="")


@pytest.mark.gpu
def test_gpus_train_as_one(tmp_path):
    """Tiles add gradients up in another order, or in 16 bits; FSDP2 rounds the norms' weights too."""
    cases = [
        (version, f"--device cuda --vocab-size 64 {precision} {graph} {way}", scale)
        for version in SCRIPTS
        for precision, scale in {"": 10, "--use-amp": 2000}.items()
        for graph in ("--graph", "--no-graph")
        for way in ("--parallel ddp", "--parallel fsdp")
    ]
    compare(tmp_path, min(2, torch.cuda.device_count()), cases)


# ---------------------------------------------------------------- from the command line


def run(folder, engine, *argv):
    """Train version 1 with batches of four: on two hosts with ddp, two ranks of one with fsdp, or here with None."""
    metrics = folder / "metrics.json"
    argv = [*SIZES.split(), "--warmup-steps", "1", "--device", "cpu", "--metrics-file", metrics, *argv]
    if engine:
        hosts = 2 if engine == "ddp" else 1
        ended = launch(2, SCRIPTS[1], *argv, "--batch-size", 2, "--parallel", engine, cwd=folder, hosts=hosts)
        assert ended.returncode == 0 and "Warning" not in ended.stderr, ended.stderr
        assert len(re.findall("^summary of", ended.stdout, re.MULTILINE)) == 1
        assert f"ranks      2, {engine} over gloo" in ended.stdout
    else:
        assert load_version(1).main([*map(str, argv), "--batch-size", "4"]) == 0
    return json.loads(metrics.read_text())


@pytest.mark.parametrize("precision", [[], ["--use-amp"]], ids=str)
@pytest.mark.slow
def test_a_run_changes_its_engine_at_each_checkpoint(tmp_path, precision):
    """One process, then DDP, then FSDP2 (if it runs), then one process: the losses of one that was never stopped."""
    unbroken = [step["loss"] for step in run(tmp_path, None, *precision, "--num-steps", 7)["steps"]]
    losses, saving = [], ["--checkpoint-dir", tmp_path / "check points", "--save-every", 2, *precision]
    for last, engine in ((2, None), (4, "ddp"), (6, ENGINES[-1]), (7, None)):
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
@pytest.mark.slow
def test_a_killed_rank_ends_the_job(tmp_path, engine, killed):
    argv = [*ON_TWO, "--num-steps", "1000000", "--parallel", engine, "--metrics-file", tmp_path / "metrics.json"]
    with forked_ranks(2, SCRIPTS[1], *argv, cwd=tmp_path) as ranks:
        ranks[0].wait_for_line("step     1/")
        ranks[killed].send_signal(signal.SIGKILL)
        end_as_torchrun(ranks)
        assert ranks[killed].returncode == -signal.SIGKILL and ranks[1 - killed].returncode > 0
        assert "summary of" not in ranks[0].stdout
        said = ranks[1 - killed].stderr
    words = f"^tiny_llama_v1.py, rank {1 - killed} of 2: (communication failed|interrupted)"
    assert re.search(words, said, re.MULTILINE), said
    if killed:  # rank 0 has measured
        assert json.loads((tmp_path / "metrics.json").read_text())["steps"]


@contextlib.contextmanager
def stopped_torchrun(*command, cwd):
    """Run under torchrun itself and send it SIGTERM after the first step; yield what is printed as an error."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([*TORCHRUN, "2", *map(str, command)], env=environment(), cwd=cwd, **pipes) as job:
        try:
            while "step     1/" not in job.stdout.readline():
                assert job.poll() is None, job.stderr.read()
            job.terminate()
            errors = job.communicate(timeout=100)[1]
        finally:
            job.kill()
    assert job.returncode
    yield errors


@contextlib.contextmanager
def stopped_ranks(*command, cwd, only):
    """Send SIGTERM to these ranks after the first step; yield what is printed as an error."""
    with forked_ranks(2, *command, cwd=cwd) as ranks:
        ranks[0].wait_for_line("step     1/")
        for rank in only:
            ranks[rank].send_signal(signal.SIGTERM)
        for rank in ranks:
            rank.wait()
            assert rank.returncode == 143, rank.stderr
        yield ranks[0].stderr


@pytest.mark.parametrize(("engine", "only"), [("ddp", None), ("ddp", [1]), (ENGINES[-1], [0, 1])])
@pytest.mark.slow
def test_sigterm_ends_all_ranks_at_the_same_step_with_a_checkpoint(tmp_path, engine, only):
    saving = [
        "--save-every",
        10**8,
        "--checkpoint-dir",
        tmp_path / "saved",
        "--metrics-file",
        tmp_path / "metrics.json",
    ]
    command = [SCRIPTS[1], *ON_TWO, "--warmup-steps", 1, "--parallel", engine, "--num-steps", 10**9 - 1, *saving]
    stopped = stopped_ranks(*command, cwd=tmp_path, only=only) if only else stopped_torchrun(*command, cwd=tmp_path)
    with stopped as errors:
        assert "tiny_llama_v1.py, rank 0 of 2: interrupted" in errors
    content = json.loads((tmp_path / "metrics.json").read_text())
    (checkpoint,) = (tmp_path / "saved").iterdir()
    steps = int(checkpoint.stem.removeprefix("step_"))
    assert len(content["steps"]) == steps and content["summary"]["world_size"] == 2
    resumed = run(tmp_path, engine, *saving, "--resume", "--num-steps", steps + 2)["steps"]
    unbroken = run(tmp_path, engine, "--num-steps", steps + 2)["steps"][steps:]
    assert [step["loss"] for step in resumed] == [step["loss"] for step in unbroken]


# The first fsync is rank 0's of an ordinary checkpoint, and asks the run to end; the second is that of the last
# checkpoint, half of which is written when a rank is killed.
KILLED_IN_THE_LAST_WRITE = """
import os, pathlib, runpy, signal, sys
folder, killed, fsync, calls = pathlib.Path(sys.argv[1]), sys.argv[2], os.fsync, []
(folder / ("pid " + os.environ["RANK"])).write_text(str(os.getpid()))

def counted(file):
    calls.append(file)
    if len(calls) == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    if len(calls) == 2:
        if killed == "0":
            os.ftruncate(file, 5000)
        os.kill(int((folder / ("pid " + killed)).read_text()), signal.SIGKILL)
    fsync(file)

os.fsync = counted
sys.argv = sys.argv[3:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@functools.cache
def unbroken_losses(engine):
    """Return the losses of six steps that nothing disturbs."""
    with tempfile.TemporaryDirectory() as folder:
        return [step["loss"] for step in run(pathlib.Path(folder), engine, "--num-steps", 6)["steps"]]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("killed", "saved"), [(0, 2), (1, 3)])
@pytest.mark.slow
def test_a_kill_in_the_middle_of_the_last_checkpoint(tmp_path, engine, killed, saved):
    """Rank 0 leaves the checkpoint before it, or finishes its own if rank 1 is killed: both are continued exactly."""
    (tmp_path / "killed.py").write_text(KILLED_IN_THE_LAST_WRITE)
    saving = ["--save-every", 2, "--checkpoint-dir", tmp_path / "saved"]
    argv = [*ON_TWO, "--warmup-steps", 1, "--parallel", engine, *saving, "--num-steps", 6]
    with forked_ranks(2, tmp_path / "killed.py", tmp_path, killed, SCRIPTS[1], *argv) as ranks:
        end_as_torchrun(ranks)
        assert ranks[killed].returncode == -signal.SIGKILL, ranks[killed].stderr
    whole = [path.name for path in sorted((tmp_path / "saved").glob("*.pt"))]
    assert whole == [f"step_{step:09d}.pt" for step in range(2, saved + 1)]
    resumed = run(tmp_path, engine, *saving, "--resume", "--num-steps", 6)["steps"]
    assert [step["loss"] for step in resumed] == unbroken_losses(engine)[saved:]


def test_ranks_wait_for_a_slow_checkpoint(monkeypatch):
    """The others wait in a collective meanwhile; they once gave up after 50 seconds."""
    given = {}
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda backend, **options: given.update(options))
    monkeypatch.setattr(torch.distributed, "destroy_process_group", lambda: None)
    script = load_version(1)
    with script.process_group(script.parse_options(["--device", "cpu"])):
        assert given["timeout"] >= datetime.timedelta(minutes=10)


def test_a_rank_ends_with_the_status_of_its_run(tmp_path):
    """It ends without Python's clean-up, and torchrun reads nothing but the status."""
    done = launch(1, SCRIPTS[1], *ON_TWO, "--data", tmp_path / "none")
    assert done.returncode == 2 and "none cannot be read" in done.stderr


# ---------------------------------------------------------------- torchrun's variables

RANKS = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
RANKS |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
ODD = ("RANK", None), ("WORLD_SIZE", None), ("MASTER_PORT", None), ("MASTER_ADDR", ""), ("RANK", "two")
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
        (dict.fromkeys(RANKS) | {"LOCAL_RANK": "1"}, "--nope", "unrecognized arguments: --nope"),
        (dict.fromkeys(RANKS) | {"LOCAL_RANK": "1"}, "", "in the environment is missing"),
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


if __name__ == "__main__":
    save_results(*sys.argv[1:])
    os._exit(0)  # as the scripts end: threads of the communication libraries can abort the interpreter's clean-up
