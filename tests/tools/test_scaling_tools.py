"""The tools around several processes: communication in a trace, and the Slurm script."""

import json
import os
import subprocess
import sys

import pytest

import analyze_communication
from common.versions import REPOSITORY
from processes import SIZES, environment

# ---- communication in a trace

# Two steps of 100 us: a GEMM from 0 to 60, a collective from 40 to 90, a copy from 70 to 75. Exposed: 60 to 70 and
# 75 to 90, 25 us; communication 50 us, busy 90 us. A copy to the other GPU communicates likewise.
COLLECTIVES = ["ncclDevKernel_AllReduce_Sum_bf16_RING_LL", "Memcpy PtoP (Device -> Device)"]


def trace(path, launches, steps=2, graph=False):
    """Write a trace of that many steps, 100 us apart, as PyTorch does."""
    events = []
    for step in range(steps):
        mark = ("cuda_runtime", "cudaGraphLaunch") if graph else ("user_annotation", "optimizer")
        events.append({"ph": "X", "cat": mark[0], "name": mark[1], "ts": 100 * step, "dur": 1, "pid": 1, "tid": 1})
        for name, start, duration in launches:
            kind = "gpu_memcpy" if name.startswith("Memcpy") else "kernel"
            place = {"pid": 0, "tid": start, "args": {"stream": start}}
            events.append({"ph": "X", "cat": kind, "name": name, "ts": 100 * step + start, "dur": duration, **place})
    path.write_text(json.dumps({"traceEvents": events, "deviceProperties": [{"name": "Toy GPU"}]}))
    return path


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("graph", [False, True])
def test_communication_is_exposed_where_nothing_else_runs(tmp_path, capsys, graph, collective):
    for rank in range(2):
        launches = [("gemm", 0, 60), (collective, 40, 50), ("Memcpy DtoD", 70, 5)]
        trace(tmp_path / f"trace_v3_rank{rank}_1.pt.trace.json", launches, graph=graph)
    assert analyze_communication.main([str(tmp_path), "--json", str(tmp_path / "found.json")]) == 0
    rows = json.loads((tmp_path / "found.json").read_text())["processes"]
    assert len(rows) == 2
    for row in rows:
        assert (row["steps"], row["transfers_per_step"]) == (2, 1)
        assert row["communication_ms"] == pytest.approx(0.050)
        assert row["exposed_ms"] == pytest.approx(0.025)
        assert row["busy_ms"] == pytest.approx(0.090)
    assert "27.8 %" in capsys.readouterr().out


@pytest.mark.parametrize("content, said", [(None, "does not exist"), ("{", "trace.json"), ("", "trace.json")])
def test_a_trace_that_is_none_is_one_sentence(tmp_path, capsys, content, said):
    assert analyze_communication.main([str(tmp_path)]) == 2
    assert "--enable-pytorch-profiler" in capsys.readouterr().err
    path = tmp_path / "trace.json"
    if content is not None:
        path.write_text(content)
    assert analyze_communication.main([str(path)]) == 2
    errors = capsys.readouterr().err
    assert said in errors and errors.count("\n") == 1


# ---- Slurm

SLURM = "JOB_ID=123 JOB_NODELIST=this[1] JOB_NUM_NODES=1 GPUS_ON_NODE=2 CPUS_PER_TASK=2".split()


@pytest.fixture
def slurm(tmp_path):
    """A folder with stand-ins of srun and scontrol for one host, this one."""
    folder = tmp_path / "slurm bin"
    folder.mkdir()
    stubs = {
        "srun": '#!/bin/bash\necho "srun $*" >>"$SRUN_LOG"\nwhile [[ $1 == --* ]]; do\n'
        '    [[ $1 == *=* ]] || shift\n    shift\ndone\nexec "$@"\n',
        "scontrol": "#!/bin/bash\necho localhost\n",
    }
    for name, text in stubs.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return folder


def submit(slurm, *arguments, **variables):
    given = {"PATH": os.pathsep.join([str(slurm), os.environ["PATH"]]), "SRUN_LOG": str(slurm / "log")}
    given |= {"TINY_LLAMA_PYTHON": sys.executable, "TINY_LLAMA_HOME": str(REPOSITORY)}
    given |= dict(f"SLURM_{pair}".split("=") for pair in SLURM) | variables
    command = ["bash", REPOSITORY / "scripts" / "train.sbatch", *arguments]
    options = {"capture_output": True, "text": True, "timeout": 300, "cwd": slurm.parent}
    return subprocess.run(command, env=environment() | given, **options)


def test_the_slurm_script_starts_a_process_a_gpu(slurm):
    options = [*SIZES.split(), "--device", "cpu", "--num-steps", "2", "--metrics-file", "of two.json"]
    done = submit(slurm, "1", *options)
    assert done.returncode == 0, done.stderr
    metrics = json.loads((slurm.parent / "of two.json").read_text())
    assert metrics["summary"]["world_size"] == 2
    called = (slurm / "log").read_text()
    assert "--rdzv-endpoint localhost:20123" in called and "--cpus-per-task 2" in called


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
