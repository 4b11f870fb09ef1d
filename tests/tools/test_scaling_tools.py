"""The tools around several processes: communication in a trace, all-reduce, the estimate on paper, the Slurm script."""

import json
import math
import os
import subprocess
import sys

import pytest

import analyze_communication
import estimate_scaling
from common.versions import REPOSITORY, load_version
from estimate_scaling import BUCKET_BYTES, Links, Work
from processes import SIZES, environment, launch

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


# ---- all-reduce

ALLREDUCE = REPOSITORY / "scripts" / "measure_allreduce.py"


def test_allreduce_is_measured_and_read_by_the_estimate(tmp_path):
    options = ["--device", "cpu", "--largest-mib", "1", "--repeats", "2", "--json", tmp_path / "links.json"]
    done = launch(2, ALLREDUCE, *options)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("all-reduce of 2 processes, gloo") == 1
    content = json.loads((tmp_path / "links.json").read_text())
    rows = content["allreduce"]
    assert [row["bytes"] for row in rows] == [2**16, 2**18, 2**20] and content["environment"]["commit"]
    for row in rows:
        assert row["gb_s"] == pytest.approx(row["bytes"] / row["us"] / 1e3)
        assert row["bus_gb_s"] == pytest.approx(row["gb_s"])  # 2 (n - 1) / n is 1 for two
    links = estimate_scaling.read_links(str(tmp_path / "links.json"), 50e9, 5e-6)
    assert (links.gpus_per_host, links.start_s) == (2, rows[0]["us"] / 1e6)


def test_allreduce_needs_a_launcher():
    done = subprocess.run([sys.executable, ALLREDUCE], capture_output=True, text=True, timeout=120, env=environment())
    assert done.returncode == 2
    assert "torchrun" in done.stderr and done.stderr.count("\n") == 1


# ---- the estimate

MIB = 2**20
LINKS = Links(gpus_per_host=8, start_s=1e-5, bus=[(1e6, 100e9), (3e6, 300e9)], network=25e9, network_hop_s=1e-6)


def test_allreduce_by_hand():
    """3 MB over 8 GPUs cross 1.75 times at 300 GB/s; over 32, 1.9375 times through 8 ports of 25 GB/s together."""
    assert estimate_scaling.allreduce_s(3e6, 1, LINKS) == 0
    assert estimate_scaling.allreduce_s(3e6, 8, LINKS) == pytest.approx(1e-5 + 1.75 * 3e6 / 300e9)
    assert estimate_scaling.allreduce_s(2e6, 8, LINKS) == pytest.approx(1e-5 + 1.75 * 2e6 / 200e9)  # between two sizes
    assert estimate_scaling.allreduce_s(9e6, 8, LINKS) == pytest.approx(1e-5 + 1.75 * 9e6 / 300e9)  # beyond the last
    carried = 1.9375 * 3e6 / (8 * 25e9)
    assert estimate_scaling.allreduce_s(3e6, 32, LINKS) == pytest.approx(1e-5 + 4e-6 + carried)  # a tree over 4 hosts
    assert estimate_scaling.allreduce_s(3e6, 16, LINKS) == pytest.approx(1e-5 + 2e-6 + 1.875 * 3e6 / (8 * 25e9))


def test_only_what_outlasts_the_backward_is_exposed():
    """Two buckets in a backward of 10 ms: the second starts at its end, unless the first still runs."""
    assert estimate_scaling.buckets(28 * MIB) == [25 * MIB, 3 * MIB]
    slow = LINKS._replace(start_s=0.006)
    work = Work(step_s=0.03, spread_s=0.0, backward_s=0.010, gradient_bytes=2 * BUCKET_BYTES)
    one = estimate_scaling.allreduce_s(BUCKET_BYTES, 2, LINKS)
    assert estimate_scaling.communication_s(work, 2, LINKS) == pytest.approx((one, one))
    one = estimate_scaling.allreduce_s(BUCKET_BYTES, 2, slow)
    assert estimate_scaling.communication_s(work, 2, slow)[0] == pytest.approx(0.005 + 2 * one - 0.010)
    assert estimate_scaling.communication_s(work, 1, slow) == (0, 0)


def test_the_parts_of_an_estimated_step():
    """The slowest of 1024 is waited for; of two all-reduces one is hidden, and costs half of its time there."""
    work = Work(step_s=0.02, spread_s=0.001, backward_s=0.01, gradient_bytes=MIB)
    free = LINKS._replace(start_s=0, network_hop_s=0, bus=[(1, 1e18)], network=1e18)
    row = estimate_scaling.estimate(work, 1024, free, contention=0.5)
    assert row["waiting_ms"] == pytest.approx(math.sqrt(2 * math.log(1024)))
    assert row["efficiency"] == pytest.approx(20 / (20 + row["waiting_ms"]))
    work = work._replace(spread_s=0.0, gradient_bytes=2 * BUCKET_BYTES)
    one = 1e3 * estimate_scaling.allreduce_s(BUCKET_BYTES, 2, LINKS)
    row = estimate_scaling.estimate(work, 2, LINKS, contention=0.5)
    assert (row["exposed_ms"], row["slower_ms"]) == pytest.approx((one, one / 2))
    assert row["step_ms"] == pytest.approx(20 + 1.5 * one)


@pytest.fixture
def metrics(tmp_path):
    """Return the metrics file of a small run in one process, and its content."""
    path = tmp_path / "v.json"
    assert (
        load_version(1).main([*SIZES.split(), "--num-steps", "2", "--device", "cpu", "--metrics-file", str(path)]) == 0
    )
    return path, json.loads(path.read_text())


def test_the_estimate_from_files(metrics, tmp_path, capsys):
    """Gradients of version 3 in bfloat16 are 2 bytes wide, of version 2 4."""
    links, (path, content) = tmp_path / "links.json", metrics
    links.write_text(json.dumps({"processes": 8, "allreduce": [{"bytes": 65536, "us": 20.0, "bus_gb_s": 300.0}]}))
    content["summary"] |= {"precision": "bfloat16", "parameters": 1_000_000}
    for version, megabytes in ((2, "4.0"), (3, "2.0")):
        path.write_text(json.dumps(content | {"version": version}))
        capsys.readouterr()
        assert estimate_scaling.main(["--metrics", str(path), "--links", str(links), "--gpus", "5"]) == 0
        shown = capsys.readouterr().out
        assert f"{megabytes} MB of gradients" in shown
        assert [line.split()[0] for line in shown.splitlines()[4:]] == ["1", "2", "4"]


@pytest.mark.parametrize(
    ("change", "said"),
    [({"world_size": 2}, "is of 2 processes"), ({"backward_ms": None}, "--no-graph"), ({}, "none.json cannot be read")],
)
def test_files_that_do_not_serve_are_refused(change, said, metrics, tmp_path, capsys):
    path, content = metrics
    content["summary"] |= change
    path.write_text(json.dumps(content))
    capsys.readouterr()
    assert estimate_scaling.main(["--metrics", str(path), "--links", str(tmp_path / "none.json")]) == 2
    errors = capsys.readouterr().err
    assert said in errors and errors.count("\n") == 1


# ---- Slurm

SLURM = {
    "SLURM_JOB_ID": "123",
    "SLURM_JOB_NODELIST": "this[1]",
    "SLURM_JOB_NUM_NODES": "1",
    "SLURM_GPUS_ON_NODE": "2",
    "SLURM_CPUS_PER_TASK": "2",
}


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
    path = os.pathsep.join([str(slurm), os.environ["PATH"]])
    given = {"PATH": path, "SRUN_LOG": str(slurm / "log"), "TINY_LLAMA_PYTHON": sys.executable, **SLURM, **variables}
    script = REPOSITORY / "scripts" / "train.sbatch"
    return subprocess.run(
        ["bash", script, *arguments], capture_output=True, text=True, timeout=300, env=environment() | given,
        cwd=slurm.parent,
    )  # fmt: skip


def test_the_slurm_script_starts_a_process_a_gpu(slurm):
    options = [*SIZES.split(), "--device", "cpu", "--num-steps", "2", "--metrics-file", "of two.json"]
    done = submit(slurm, "1", *options, TINY_LLAMA_HOME=str(REPOSITORY))
    assert done.returncode == 0, done.stderr
    metrics = json.loads((slurm.parent / "of two.json").read_text())
    assert metrics["summary"]["world_size"] == 2
    called = (slurm / "log").read_text()
    assert "--rdzv-endpoint localhost:20123" in called and "--cpus-per-task 2" in called


@pytest.mark.parametrize(
    "arguments, variables, said",
    [
        (["5"], {}, "1 to 4, not '5'"),
        ([], {}, "1 to 4, not ''"),
        (["1"], {"TINY_LLAMA_HOME": "/nowhere"}, "/nowhere holds no version 1"),
        (["1"], {"SLURM_GPUS_ON_NODE": ""}, "ask for --gpus-per-node"),
        (["1"], {"SLURM_JOB_ID": ""}, "start it with sbatch"),
    ],
)
def test_the_slurm_script_says_what_is_wrong(slurm, arguments, variables, said):
    done = submit(slurm, *arguments, **({"TINY_LLAMA_HOME": str(REPOSITORY)} | variables))
    assert done.returncode == 2
    assert said in done.stderr and done.stderr.count("\n") == 1


def test_slurm_reads_its_options_before_any_command():
    """sbatch stops looking at the first line that is no comment."""
    lines = (REPOSITORY / "scripts" / "train.sbatch").read_text().splitlines()
    first_command = next(place for place, line in enumerate(lines) if line and not line.startswith("#"))
    options = [place for place, line in enumerate(lines) if line.startswith("#SBATCH")]
    assert options and max(options) < first_command
