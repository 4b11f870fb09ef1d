"""The tools around several processes: communication in a trace, all-reduce, the estimate on paper, the Slurm script."""

import json
import math
import os
import shutil
import statistics
import subprocess
import sys

import pytest
from common.benchmark_results import Case, read_results, write_results
from test_benchmark import results_of, run_of

import analyze_communication
import estimate_scaling
from common.versions import REPOSITORY, load_version
from estimate_scaling import MIB, Links, Work
from processes import SIZES, environment, launch

# ---- communication in a trace

# Two steps of 100 us: a product from 0 to 60, a collective from 40 to 90, a copy from 70 to 75. Exposed: 60 to 70 and
# 75 to 90, 25 us; communication 50 us, busy 90 us.
LAUNCHES = [("gemm", 0, 60), ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", 40, 50), ("Memcpy DtoD", 70, 5)]


def trace(path, launches, steps=2, graph=False):
    """A trace of that many steps, 100 us apart, as PyTorch writes it."""
    events = []
    for step in range(steps):
        mark = ("cuda_runtime", "cudaGraphLaunch") if graph else ("user_annotation", "optimizer")
        events.append({"ph": "X", "cat": mark[0], "name": mark[1], "ts": 100 * step, "dur": 1, "pid": 1, "tid": 1})
        for name, start, duration in launches:
            kind = "gpu_memcpy" if name.startswith("Memcpy") else "kernel"
            place = {"pid": 0, "tid": 20 if "nccl" in name else 7, "args": {"stream": 20 if "nccl" in name else 7}}
            events.append({"ph": "X", "cat": kind, "name": name, "ts": 100 * step + start, "dur": duration, **place})
    path.write_text(json.dumps({"traceEvents": events, "deviceProperties": [{"name": "Toy GPU"}]}))
    return path


@pytest.mark.parametrize("graph", [False, True])
def test_communication_is_exposed_where_nothing_else_runs(tmp_path, capsys, graph):
    for rank in range(2):
        trace(tmp_path / f"trace_v3_rank{rank}_1.pt.trace.json", LAUNCHES, graph=graph)
    assert analyze_communication.main([str(tmp_path), "--json", str(tmp_path / "found.json")]) == 0
    rows = json.loads((tmp_path / "found.json").read_text())["processes"]
    assert len(rows) == 2
    for row in rows:
        assert (row["steps"], row["transfers_a_step"]) == (2, 1)
        assert row["communication_ms"] == pytest.approx(0.050)
        assert row["exposed_ms"] == pytest.approx(0.025)
        assert row["busy_ms"] == pytest.approx(0.090)
    assert "27.8 %" in capsys.readouterr().out


def test_copies_between_gpus_and_their_barriers_communicate(tmp_path):
    """Instead of the collective a copy to the other GPU, and behind it a barrier from 85 to 95: 55 us, 30 exposed."""
    barrier = "c10d::symmetric_memory::barrier_kernel(unsigned int**, int)"
    copied = [LAUNCHES[0], ("Memcpy PtoP (Device -> Device)", 40, 45), (barrier, 85, 10), LAUNCHES[2]]
    path = trace(tmp_path / "trace_v3_rank0_1.pt.trace.json", copied)
    row = analyze_communication.read_communication(path, None)
    assert (row["transfers_a_step"], row["communication_ms"], row["exposed_ms"]) == pytest.approx((1, 0.055, 0.030))


@pytest.mark.parametrize("content, said", [(None, "does not exist"), ("{", "trace.json"), ("", "trace.json")])
def test_a_trace_that_is_none_is_one_sentence(tmp_path, capsys, content, said):
    path = tmp_path / "trace.json"
    if content is not None:
        path.write_text(content)
    assert analyze_communication.main([str(path)]) == 2
    errors = capsys.readouterr().err
    assert said in errors and errors.count("\n") == 1


def test_a_folder_without_traces_says_how_to_record_one(tmp_path, capsys):
    assert analyze_communication.main([str(tmp_path)]) == 2
    assert "--enable-pytorch-profiler" in capsys.readouterr().err


# ---- all-reduce


def test_allreduce_is_measured_and_read_by_the_estimate(tmp_path):
    tool = REPOSITORY / "scripts" / "measure_allreduce.py"
    done = launch(2, tool, "--device", "cpu", "--largest-mib", "1", "--repeats", "2", "--json", tmp_path / "links.json")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("all-reduce of 2 processes, gloo") == 1
    rows = json.loads((tmp_path / "links.json").read_text())["allreduce"]
    assert [row["bytes"] for row in rows] == [2**16, 2**18, 2**20]
    for row in rows:
        assert row["gb_s"] == pytest.approx(row["bytes"] / row["us"] / 1e3)
        assert row["bus_gb_s"] == pytest.approx(row["gb_s"])  # 2 (n - 1) / n is 1 for two
    links = estimate_scaling.read_links(str(tmp_path / "links.json"), 50e9, 5e-6)
    assert (links.gpus_per_host, links.start_s) == (2, rows[0]["us"] / 1e6)


def test_allreduce_needs_a_launcher(tmp_path):
    tool = REPOSITORY / "scripts" / "measure_allreduce.py"
    done = subprocess.run([sys.executable, tool], capture_output=True, text=True, timeout=120, env=environment())
    assert done.returncode == 2
    assert "torchrun" in done.stderr and done.stderr.count("\n") == 1


# ---- the estimate

LINKS = Links(gpus_per_host=8, start_s=1e-5, bus=[(1e6, 100e9), (3e6, 300e9)], network=25e9, network_hop_s=1e-6)


def test_rates_lie_between_the_measured_ones():
    assert [estimate_scaling.bus_rate(LINKS, size) for size in (1, 1e6, 2e6, 3e6, 1e9)] == [
        100e9, 100e9, 200e9, 300e9, 300e9,
    ]  # fmt: skip


def test_allreduce_by_hand():
    """3 MB over 8 GPUs cross 1.75 times at 300 GB/s; over 32, 1.9375 times through 8 ports of 25 GB/s together."""
    assert estimate_scaling.allreduce_s(3e6, 1, LINKS, tree=True) == 0
    assert estimate_scaling.allreduce_s(3e6, 8, LINKS, tree=False) == pytest.approx(1e-5 + 1.75 * 3e6 / 300e9)
    carried = 1.9375 * 3e6 / (8 * 25e9)
    assert estimate_scaling.allreduce_s(3e6, 32, LINKS, tree=False) == pytest.approx(1e-5 + 6e-6 + carried)
    assert estimate_scaling.allreduce_s(3e6, 32, LINKS, tree=True) == pytest.approx(1e-5 + 4e-6 + carried)
    assert estimate_scaling.fastest_s(3e6, 32, LINKS) == estimate_scaling.allreduce_s(3e6, 32, LINKS, tree=True)


def test_only_what_outlasts_the_backward_is_exposed():
    """Two buckets of 1 MiB in a backward of 10 ms: the second starts at its end, unless the first still runs."""
    slow = LINKS._replace(start_s=0.006)
    work = Work(step_s=0.03, spread_s=0.0, backward_s=0.010, gradient_bytes=2 * MIB)
    one = estimate_scaling.allreduce_s(MIB, 2, LINKS, tree=True)
    assert estimate_scaling.exposed_s(work, 2, LINKS, MIB) == pytest.approx(one)
    one = estimate_scaling.allreduce_s(MIB, 2, slow, tree=True)
    assert estimate_scaling.exposed_s(work, 2, slow, MIB) == pytest.approx(0.005 + 2 * one - 0.010)
    assert estimate_scaling.exposed_s(work, 1, slow, MIB) == 0
    assert estimate_scaling.buckets(28 * MIB, 25 * MIB) == [25 * MIB, 3 * MIB]


def test_the_slowest_of_many_is_waited_for():
    work = Work(step_s=0.02, spread_s=0.001, backward_s=0.01, gradient_bytes=MIB)
    free = LINKS._replace(start_s=0, network_hop_s=0, bus=[(1, 1e18)], network=1e18)
    row = estimate_scaling.estimate(work, 1024, free, MIB, contention=0.5)
    assert row["waiting_ms"] == pytest.approx(math.sqrt(2 * math.log(1024)))
    assert row["efficiency"] == pytest.approx(20 / (20 + row["waiting_ms"]))


def test_what_is_hidden_slows_the_backward():
    """Of two all-reduces one is hidden, and costs half of its time there."""
    work = Work(step_s=0.03, spread_s=0.0, backward_s=0.010, gradient_bytes=2 * MIB)
    one = 1e3 * estimate_scaling.allreduce_s(MIB, 2, LINKS, tree=True)
    row = estimate_scaling.estimate(work, 2, LINKS, MIB, contention=0.5)
    assert (row["exposed_ms"], row["slower_ms"]) == pytest.approx((one, one / 2))
    assert row["step_ms"] == pytest.approx(30 + 1.5 * one)
    assert estimate_scaling.estimate(work, 1, LINKS, MIB, contention=0.5)["step_ms"] == pytest.approx(30)


def test_the_estimate_stands_beside_what_was_measured(tmp_path, capsys):
    """Gradients of version 3 in bfloat16 are 2 bytes wide, of version 2 4; efficiencies are those of the same case."""
    links = {"processes": 8, "allreduce": [{"bytes": 65536, "us": 20.0, "bus_gb_s": 300.0}]}
    (tmp_path / "links.json").write_text(json.dumps(links))
    script = load_version(1)
    metrics = tmp_path / "v.json"
    assert script.main([*SIZES.split(), "--num-steps", "2", "--device", "cpu", "--metrics-file", str(metrics)]) == 0
    content = json.loads(metrics.read_text())
    content["summary"] |= {"precision": "bfloat16", "parameters": 1_000_000}
    case = Case("v3", "small", content["options"]["batch_size"], content["options"]["seq_len"], "bfloat16", False)
    runs = [run_of(case, 0, 10.0), run_of(case._replace(processes=2), 0, 12.5)]
    write_results(results_of(runs), tmp_path / "suite.json")
    files = ["--links", str(tmp_path / "links.json"), "--measured", str(tmp_path / "suite.json")]
    capsys.readouterr()
    for version, megabytes, measured in ((2, "4.0", ""), (3, "2.0", "80.0%")):
        metrics.write_text(json.dumps(content | {"version": version}))
        assert estimate_scaling.main(["--metrics", str(metrics), *files, "--gpus", "4"]) == 0
        shown = capsys.readouterr().out
        assert f"{megabytes} MB of gradients" in shown and (measured or "-") in shown.splitlines()[5]
        assert [line.split()[0] for line in shown.splitlines()[4:7]] == ["1", "2", "4"]


def test_the_page_tells_what_the_estimate_makes_of_the_recorded_run():
    """One GPU's step by the medians of its runs, and the links of the one host where they were measured alone."""
    recorded = REPOSITORY / "scripts" / "recorded"
    runs = read_results(recorded / "nvidia-h200-c_2026-11-22" / "suite.json")["runs"]
    wanted = Case("v3", "medium", 16, 512, "bfloat16", True)
    alone = [run["summary"] for run in runs if run["case"] == wanted]
    assert len(alone) == 4
    step = statistics.median(summary["step_ms"]["median"] for summary in alone) / 1e3
    apart = statistics.median(summary["step_ms"]["p75"] - summary["step_ms"]["p25"] for summary in alone) / 1e3
    backward = statistics.median(summary["backward_ms"] for summary in alone) / 1e3
    work = Work(step, apart / estimate_scaling.QUARTILES_APART, backward, 2 * alone[0]["parameters"])
    links = estimate_scaling.read_links(str(recorded / "nvidia-h200_2026-11-20" / "links.json"), 50e9, 5e-6)
    page = " ".join((REPOSITORY / "scripts" / "SCALING.md").read_text().split())
    for contention, sentence in (
        (0.2, "The estimate for DDP has {}, {}, and {} for eight and {} for 1024 GPUs"),
        (0.0, "if hiding were free, {}, {}, {} and {}."),
    ):
        found = [estimate_scaling.estimate(work, n, links, 25 * MIB, contention)["efficiency"] for n in (2, 4, 8, 1024)]
        assert sentence.format(*(f"{value:.3f}" for value in found)) in page


@pytest.mark.parametrize(
    "change, said",
    [({"world_size": 2}, "is of 2 processes"), ({"backward_ms": None}, "--no-graph")],
)
def test_metrics_that_do_not_serve_are_refused(tmp_path, capsys, change, said):
    metrics = tmp_path / "v.json"
    assert (
        load_version(1).main([*SIZES.split(), "--num-steps", "2", "--device", "cpu", "--metrics-file", str(metrics)])
        == 0
    )
    content = json.loads(metrics.read_text())
    content["summary"] |= change
    metrics.write_text(json.dumps(content))
    capsys.readouterr()
    assert estimate_scaling.main(["--metrics", str(metrics), "--links", str(tmp_path / "none.json")]) == 2
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


@pytest.mark.skipif(not shutil.which("bash"), reason="needs bash")
def test_slurm_reads_its_options_before_any_command():
    """sbatch stops looking at the first line that is no comment."""
    lines = (REPOSITORY / "scripts" / "train.sbatch").read_text().splitlines()
    first_command = next(place for place, line in enumerate(lines) if line and not line.startswith("#"))
    options = [place for place, line in enumerate(lines) if line.startswith("#SBATCH")]
    assert options and max(options) < first_command
