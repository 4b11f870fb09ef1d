"""The tools around several processes: communication in a trace, and the Slurm script."""

import json
import os
import shlex
import signal
import subprocess
import sys

import pytest

import analyze_communication
from common.profiles import Kernel
from common.versions import REPOSITORY, SCRIPTS
from conftest import METADATA, event
from in_process import refused
from processes import SIZES, environment, executable

# ---- communication in a trace


@pytest.mark.parametrize(
    ("collective", "mark"),
    [
        (("kernel", "ncclDevKernel_AllReduce_Sum_bf16_RING_LL"), ("user_annotation", "optimizer")),
        (("gpu_memcpy", "Memcpy PtoP (Device -> Device)"), ("cuda_runtime", "cudaGraphLaunch")),
    ],
)
def test_communication_is_exposed_where_nothing_else_runs(collective, mark, tmp_path, capsys):
    """Two steps of 100 us: a GEMM from 0 to 60, a collective from 40 to 90, a copy on this GPU from 70 to 75.

    Exposed: 60 to 70 and 75 to 90, 25 us; communication 50 us, busy 90 us.
    """
    launches = [(*mark, 0, 1), ("kernel", "gemm", 0, 60), (*collective, 40, 50), ("gpu_memcpy", "Memcpy DtoD", 70, 5)]
    events = [event(kind, name, at + step, us, stream=at) for step in (0, 100) for kind, name, at, us in launches]
    for rank in range(2):
        trace = {"traceEvents": events, "deviceProperties": [{"name": "Toy GPU"}], "tiny_llama": METADATA}
        (tmp_path / f"trace_v3_rank{rank}_1.pt.trace.json").write_text(json.dumps(trace))
    assert analyze_communication.main([str(tmp_path), "--json", str(tmp_path / "found.json")]) == 0
    rows = json.loads((tmp_path / "found.json").read_text())["processes"]
    assert [(row["steps"], row["transfers_per_step"]) for row in rows] == [(2, 1)] * 2
    for row in rows:
        found = [row[f"{name}_ms"] for name in ("communication", "exposed", "busy")]
        assert found == pytest.approx([0.05, 0.025, 0.09])
    assert "27.8 %" in capsys.readouterr().out


def test_time_in_which_several_launches_run_counts_once():
    """A long launch, two that begin and end within it, one that outlasts it, and one after a gap, in ms."""
    times = [(0, 10), (1, 2), (4, 1), (8, 5), (20, 3)]
    assert analyze_communication.busy_ms([Kernel("k", 1e6 * at, 1e6 * ms) for at, ms in times]) == 13 + 3


def test_bad_input_of_the_communication_tool(tmp_path, capsys):
    refused(analyze_communication.main, [tmp_path], capsys, "--enable-pytorch-profiler")
    refused(analyze_communication.main, [tmp_path / "trace.json"], capsys, "does not exist")


# ---- Slurm

JOB = str(os.getpid())  # the script takes its port from the job: two processes of tests must not share one
SLURM = f"JOB_ID={JOB} JOB_NODELIST=this[1] JOB_NUM_NODES=1 GPUS_ON_NODE=2 CPUS_PER_TASK=2".split()
SRUN = """#!/bin/bash
echo "srun $*" >>"$SRUN_LOG"
echo $$ >"$SRUN_LOG.pid"
while [[ $1 == --* ]]; do
    [[ $1 == *=* ]] || shift
    shift
done
exec "$@"
"""
SCONTROL = """#!/bin/bash
echo "scontrol $*" >>"$SRUN_LOG"
[[ $1 == requeue ]] || echo localhost
"""
SCANCEL = """#!/bin/bash
echo "scancel $*" >>"$SRUN_LOG"
kill -TERM "$(<"$SRUN_LOG.pid")"
"""


@pytest.fixture
def slurm(tmp_path):
    """A folder with stubs of srun and scontrol for one host, this one."""
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("scancel", SCANCEL)):
        executable(tmp_path / "slurm bin" / name, text)
    return tmp_path / "slurm bin"


def job(slurm, arguments, variables):
    """Return the command of a job, and how to start it."""
    given = {"PATH": os.pathsep.join([str(slurm), os.environ["PATH"]]), "SRUN_LOG": str(slurm / "log")}
    given |= {"TINY_LLAMA_PYTHON": sys.executable, "TINY_LLAMA_HOME": str(REPOSITORY)}
    given |= dict(f"SLURM_{pair}".split("=") for pair in SLURM) | variables
    command = ["bash", REPOSITORY / "scripts" / "train.sbatch", *map(str, arguments)]
    return command, {"text": True, "cwd": slurm.parent, "env": environment() | given}


def submit(slurm, *arguments, **variables):
    command, options = job(slurm, arguments, variables)
    return subprocess.run(command, capture_output=True, timeout=300, **options)


def stopped_at_its_time_limit(slurm, *arguments):
    """Send USR1 to a job's shell, as Slurm does, after the first step; return its status and output."""
    command, options = job(slurm, ["1", *LONG, *arguments], {})
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **options) as shell:
        output = ""
        while "\nstep " not in output:
            line = shell.stdout.readline()
            assert line, output
            output += line
        shell.send_signal(signal.SIGUSR1)
        output += shell.communicate(timeout=200)[0]
    return shell.returncode, output


LONG = [*SIZES.split(), "--device", "cpu", "--batch-size", "2", "--num-steps", "900000000", "--warmup-steps", "1"]


@pytest.mark.slow
def test_a_job_that_reaches_its_time_limit_is_queued_again_and_resumes(slurm):
    """Only the last checkpoint is there: --save-every would write none for days. The second job ends by itself."""
    saving = ["--save-every", "800000000", "--checkpoint-dir", "of the job", "--metrics-file", "metrics.json"]
    status, output = stopped_at_its_time_limit(slurm, *saving)
    (checkpoint,) = (slurm.parent / "of the job").iterdir()
    called = (slurm / "log").read_text()
    assert status == 0 and f"scancel --signal=TERM {JOB}\n" in called and f"scontrol requeue {JOB}\n" in called, output
    assert "--resume" not in called and f"{checkpoint.name} is written, and the job is queued again" in output
    assert f"--rdzv-endpoint localhost:{20000 + int(JOB) % 20000} " in called and "--cpus-per-task 2" in called
    metrics = json.loads((slurm.parent / "metrics.json").read_text())
    done = int(checkpoint.stem[5:])
    assert len(metrics["steps"]) == done and metrics["summary"]["world_size"] == 2
    ended = submit(slurm, "1", *LONG, *saving, "--num-steps", done + 2)
    assert ended.returncode == 0 and f"resuming from of the job/{checkpoint.name}" in ended.stdout, ended.stderr
    assert (slurm / "log").read_text().count(f"scontrol requeue {JOB}\n") == 1
    steps = json.loads((slurm.parent / "metrics.json").read_text())["steps"]
    assert [step["step"] for step in steps] == [done, done + 1]


@pytest.mark.slow
def test_a_job_without_checkpoints_is_not_queued_again(slurm):
    status, output = stopped_at_its_time_limit(slurm, "--metrics-file", "metrics.json")
    assert status != 0 and "requeue" not in (slurm / "log").read_text(), output
    assert json.loads((slurm.parent / "metrics.json").read_text())["summary"]


def test_slurm_and_torchrun_receive_their_options(slurm):
    """Two hosts of four GPUs each: srun starts one torchrun per host, which all meet at the first."""
    logs = 'printf \' %q\' threads=$OMP_NUM_THREADS srun "$@" >>"$SRUN_LOG"'
    executable(slurm / "srun", f"#!/bin/bash\n{logs}\n")
    hosts = {"SLURM_JOB_NUM_NODES": "2", "SLURM_GPUS_ON_NODE": "4", "SLURM_CPUS_PER_TASK": "12", "OMP_NUM_THREADS": ""}
    ended = submit(slurm, "3", "--metrics-file", "two hosts.json", **hosts)
    assert ended.returncode == 0, ended.stderr
    command = shlex.split((slurm / "log").read_text().splitlines()[-1])
    expected = (
        "threads=3 srun --cpus-per-task 12 --kill-on-bad-exit=1 PYTHON -m torch.distributed.run "
        f"--nnodes 2 --nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint localhost:{20000 + int(JOB) % 20000} "
        f"--rdzv-id {JOB} SCRIPT --metrics-file"
    )
    names = {sys.executable: "PYTHON", str(SCRIPTS[3]): "SCRIPT"}
    assert [names.get(word, word) for word in command] == [*expected.split(), "two hosts.json"]


@pytest.mark.parametrize(
    "arguments, variables, said",
    [
        ([], {}, "1 to 4, not ''"),
        (["1"], {"TINY_LLAMA_HOME": "/nowhere"}, "/nowhere holds no version 1"),
        (["1"], {"SLURM_GPUS_ON_NODE": ""}, "ask for --gpus-per-node"),
        (["1"], {"SLURM_JOB_ID": ""}, "start it with sbatch"),
    ],
)
def test_the_slurm_script_says_what_is_wrong(slurm, arguments, variables, said):
    done = submit(slurm, *arguments, **variables)
    assert done.returncode == 2
    assert said in done.stderr and done.stderr.count("\n") == 1


def test_slurm_reads_its_options_before_any_command():
    """sbatch stops looking at the first line that is no comment."""
    lines = (REPOSITORY / "scripts" / "train.sbatch").read_text().splitlines()
    first_command = next(place for place, line in enumerate(lines) if line and not line.startswith("#"))
    options = [place for place, line in enumerate(lines) if line.startswith("#SBATCH")]
    assert options and max(options) < first_command
