"""Profiles that others made: what no tool of ours may conclude from them, each kind on a small file made by hand.

All times of the events are in us, of the databases and CSV files in ns.
"""

import contextlib
import gzip
import json
import os
import re
import sqlite3

import pytest

import analyze_bottlenecks as bottlenecks
import analyze_communication as communication
import analyze_gemm_operations as gemm_operations
import analyze_kernel_launches as launches
import analyze_kernel_reduction as reduction
import kernel_counters
import kernel_times
import memory_bandwidth_analyzer as bandwidth
from common.profiles import (
    Operation,
    collectives,
    containers,
    gemms,
    idle,
    precision_of_kernel,
    read_profile,
    roofline,
    shown_names,
)
from in_process import refused

GEMM = "Cijk_Alik_Bljk_BBS_BH"


def kernel(name, ts, dur, stream=1, gpu=0, **more):
    return {"ph": "X", "cat": "kernel", "name": name, "pid": gpu, "tid": stream, "ts": ts, "dur": dur} | {
        "args": {"device": gpu, "stream": stream} | more
    }


def host(category, name, ts, dur, pid=9, tid=9, **arguments):
    return {"ph": "X", "cat": category, "name": name, "pid": pid, "tid": tid, "ts": ts, "dur": dur, "args": arguments}


def mark(name, ts, dur):
    return host("user_annotation", name, ts, dur)


def matmul(number, sizes, kind="c10::BFloat16", pid=9):
    shapes = {"Input Dims": sizes, "Input type": [kind] * 2, "Input Strides": [[], []]}
    return host("cpu_op", "aten::mm", 0, 50, pid, **{"External id": number}, **shapes)


@pytest.fixture
def write(tmp_path):
    """write(events, name, **content) makes a trace of an MI300X and returns its path."""

    def written(events, name="foreign.json", **content):
        content = {"deviceProperties": [{"id": 0, "name": "AMD Instinct MI300X"}], "traceEvents": events} | content
        text = json.dumps(content).encode()
        (tmp_path / name).write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
        return tmp_path / name

    return written


def result_of(main, arguments, capsys):
    assert main([*map(str, arguments), "--json", "-"]) == 0
    return json.loads(capsys.readouterr().out)


def idle_of(path, capsys, *options):
    return result_of(launches.main, ["--trace-file", path, *options], capsys)["results"]


# ---------------------------------------------------------------- 1: steps and pauses

MARKS = {  # as PyTorch's scheduler, an optimizer's hook, and our profile_script.py leave them, of steps of 100 ms
    "scheduler": [mark(f"ProfilerStep#{i}", 1e5 * i, 1e5) for i in range(3)],
    "hook": [mark("Optimizer.step#AdamW.step", 1e5 * i + 9e4, 5e3) for i in range(3)],
    "profile_script": [mark("optimizer", 1e5 * i + 9e4, 5e3) for i in range(3)],
    "both": [mark(f"ProfilerStep#{i}", 1e5 * i, 1e5) for i in range(3)]
    + [mark("Optimizer.step#SGD.step", 5e4 * i, 1e3) for i in range(6)],
}


@pytest.mark.parametrize("name", MARKS)
def test_every_gap_inside_a_marked_step_is_idle(name, write, capsys):
    """Loading its data belongs to a step: 0.9 ms of work in 290 ms was called not launch-bound."""
    work = [kernel(GEMM, 1e5 * i + 1e4 * j, 100) for i in range(3) for j in range(9)]
    found = idle_of(write([*MARKS[name], *work]), capsys)
    assert (found["steps"], found["launches_per_step"], found["paused_us"], found["unsure_us"]) == (3, 9, 0, 0)
    assert found["busy_us"] == pytest.approx(2700) and found["idle_share"] == pytest.approx(1 - 2700 / 280100)
    assert [row["step"] for row in found["per_step"]] == ["1", "2", "3", "all"]
    assert sum(row["idle_ms"] for row in found["per_step"][:3]) == pytest.approx(found["idle_us"] / 1e3)
    assert found["launch_bound"] is not False


@pytest.mark.parametrize(("us", "paused"), [(600, 0), (1000, 0), (1001, 1001)])
def test_a_pause_between_two_steps_is_longer_than_a_millisecond(us, paused, write, capsys):
    """A host that needs less for the next step is late: 36.6 % of such a profile was said to be pauses."""
    events = []
    for start in (0, 1000 + us):
        events += [mark(f"ProfilerStep#{start}", start, 1000), kernel(GEMM, start, 1000)]
    found = idle_of(write(events), capsys)
    assert (found["idle_us"], found["paused_us"]) == (us - paused, paused)
    assert found["launch_bound"] is (None if paused else us > 2000 / 3)


def test_a_call_belongs_to_the_step_that_launched_it(write, capsys):
    """The GPU lags behind the host: the last kernel of step 1 runs while the host is in step 2."""
    events = [mark("ProfilerStep#1", 0, 100), mark("ProfilerStep#2", 100, 100)]
    for number, (launched, start, us) in enumerate([(10, 20, 130), (20, 150, 30), (110, 190, 20)], 1):
        events.append(host("cuda_runtime", "hipLaunchKernel", launched, 5, correlation=number))
        events.append(kernel(GEMM, start, us, correlation=number))
    rows = idle_of(write(events), capsys)["per_step"]
    assert [(row["whole_ms"], round(row["idle_ms"], 6)) for row in rows] == [(0.16, 0), (0.03, 0.01), (0.19, 0.01)]


@pytest.mark.parametrize(("later", "early"), [(2, 2), (None, 0)])
def test_kernels_of_the_step_before_the_profile_are_of_no_step(later, early, write, capsys, tmp_path, monkeypatch):
    """They wait in the queue while the profile begins; without the launch of a later one nobody knows which these are.

    TraceLens counts them neither: 29.744 instead of 43.063 ms busy in its trace of Qwen on MI300.
    """
    monkeypatch.chdir(tmp_path)
    events = [mark("ProfilerStep#1", 0, 500), *(kernel(f"old{i}", 10 + 40 * i, 40) for i in range(2))]
    events += [launched(1, 20), launched(2, 30), matmul(1, [[8, 8], [8, 8]])]
    for i, number in ((0, 1), (1, later)):
        events.append(kernel(GEMM, 100 + 60 * i, 50, correlation=number, **{"External id": 1}))
    path = write(events)
    found = idle_of(path, capsys)
    assert (found["launches"], found["busy_us"]) == ((2, 100) if early else (4, 180))
    assert bool(found["remarks"]) == bool(early)
    assert launches.main(["--trace-file", str(path)]) == 0
    said = "2 of 4 kernels and copies (0.080 ms) were launched before the profile began"
    assert (said in capsys.readouterr().out) == bool(early)
    content = result_of(bottlenecks.main, ["--profile-data", path], capsys)
    assert sum(row["ms"] for row in content["operators"]) == pytest.approx(0.1 if early else 0.18)
    pair = ["--baseline", path, "--fused", path]
    assert result_of(reduction.main, pair, capsys)["baseline"]["all"]["calls"] == (2 if early else 4)
    assert result_of(communication.main, [path], capsys)["processes"][0]["busy_ms"] == (0.1 if early else 0.18)
    assert sum(row["calls"] for row in result_of(kernel_times.main, [path], capsys)["kernels"]) == 4


def test_tools_take_the_steps_that_a_trace_names(write, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = write([*MARKS["scheduler"], *(kernel(GEMM, 1e5 * i, 100) for i in range(3))])
    assert result_of(bottlenecks.main, ["--profile-data", path], capsys)["steps"] == 3
    assert result_of(communication.main, [path], capsys)["processes"][0]["steps"] == 3


def test_the_mark_that_begins_after_the_last_step_is_none(write, capsys):
    """A script's last prof.step() begins one more, which ends with the profile."""
    marks = [mark("ProfilerStep#1", 0, 100), mark("ProfilerStep#2", 100, 100), mark("ProfilerStep#3", 200, 5)]
    calls = [launched(1, 10), launched(2, 110), host("cuda_runtime", "cudaDeviceSynchronize", 201, 1)]
    found = idle_of(write([*marks, *calls, *(kernel("k", 100 * i, 9, correlation=i) for i in (1, 2))]), capsys)
    assert (found["steps"], found["launches_per_step"]) == (2, 1)
    cpu = [*marks, *(host("cpu_op", "aten::mm", 100 * i, 9) for i in (0, 1))]
    assert read_profile(write(cpu)).steps == 2


@pytest.mark.parametrize("marked", ["scheduler", "hook", ""])
@pytest.mark.parametrize(("us", "said"), [(149, True), (151, False)])
def test_what_a_cpu_does_between_its_operators_is_part_of_the_step(
    write, capsys, tmp_path, monkeypatch, marked, us, said
):
    """Two steps of 200 us, in each of which the DataLoader takes 40: operators leave more or less than a quarter."""
    monkeypatch.chdir(tmp_path)
    shapes = {"Input Dims": [[1, 1], [1, 1]], "Input type": ["float"] * 2, "Input Strides": [[], []]}
    marks = {  # a hook marks the end of a step, so the first one begins with the first operator
        "scheduler": [mark(f"ProfilerStep#{i}", 200 * i, 200) for i in (0, 1)],
        "hook": [mark("Optimizer.step#AdamW.step", 200 * i + 195, 5) for i in (0, 1)],
    }
    events = marks.get(marked, [])
    events += [mark("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 200 * i + 155, 40) for i in (0, 1)]
    events.append(mark("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 500, 40))  # after the last step
    events += [host("cpu_op", "aten::mm", 200 * i, us, **shapes) for i in (0, 1)]
    if not marked:  # from the first operator to the end of the last
        events.append(host("cpu_op", "aten::mm", 400, 0, **shapes))
    data = ["--profile-data", write(events, deviceProperties=[]), "--peak", "1,1"]
    found = result_of(bottlenecks.main, data if marked else [*data, "--steps", 2], capsys)
    assert found["step"] == pytest.approx({"whole_ms": 0.2, "loading_ms": 0.04})
    assert found["targets"][0]["step_could_be"] == pytest.approx(200 / (200 - us), rel=1e-3)
    assert bool(found["waiting"]) == said
    if said:
        assert "and its operators 74 % of it. It waits 0.0400 ms for the DataLoader" in found["waiting"][0]
    assert bottlenecks.main(list(map(str, data if marked else [*data, "--steps", 2]))) == 0
    assert ("under the profiler" in capsys.readouterr().out) == said
    assert "- whole step: 0.200 ms under the profiler" in (tmp_path / "bottlenecks.md").read_text()


# ---------------------------------------------------------------- 2: several GPUs and processes


def two_ranks(with_device):
    """Return two ranks that were fused into one file: every number is there twice. The first one multiplies half."""
    events = []
    for gpu, pid in ((0, 100), (1, 101)):
        events.append(matmul(1, [[2048 * (gpu + 1), 4096], [4096, 4096]], pid=pid))
        events.append(kernel(GEMM, 1000, 200, gpu=gpu, **{"External id": 1}))
        if not with_device:
            del events[-1]["args"]["device"]
    return events


@pytest.mark.parametrize("with_device", [True, False])
def test_ranks_of_a_fused_trace_are_not_added_up(with_device, write, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = write(two_ranks(with_device))
    pair = ["--baseline", path, "--fused", path, "--baseline-steps", 1, "--fused-steps", 1]
    for main, arguments in (
        (launches.main, ["--trace-file", path]),
        (bottlenecks.main, ["--profile-data", path, "--steps", 1]),
        (bandwidth.main, ["--profile-data", path, "--steps", 1]),
        (gemm_operations.main, ["--trace-file", path]),
        (reduction.main, pair),
    ):
        refused(main, arguments, capsys, "holds the kernels of 2 GPUs: choose one with --gpu, of 0, 1")
    for gpu, tflops in ((0, 344), (1, 687)):
        found = result_of(bottlenecks.main, ["--profile-data", path, "--steps", 1, "--gpu", gpu], capsys)
        (row,) = found["operators"]
        assert (row["calls"], row["ms"], round(row["tflops"])) == (1, 0.2, tflops)
    assert kernel_times.main([str(path)]) == 0
    assert "holds the kernels of 2 GPUs, and they are added up here: --gpu reads one of 0, 1" in capsys.readouterr().out
    refused(launches.main, ["--trace-file", path, "--gpu", 7], capsys, "has no GPU 7: it has 0, 1")
    monkeypatch.setattr(containers, "LARGE", 0)
    assert communication.main([str(path), "--steps", "1", "--json", "-"]) == 0
    told = capsys.readouterr()
    assert len(json.loads(told.out)["processes"]) == 2 and told.err.count("reading ") == 1


CSV_HEADER = '"Guid","Kind","Agent_Id","Dispatch_Id","Kernel_Name","Start_Timestamp","End_Timestamp"\n'


def csv_row(process, number, start):
    return f'"{process}","KERNEL_DISPATCH","Agent 4",{number},"k",{start},{start + 50_000}\n'


def test_two_processes_in_one_csv_are_two(tmp_path, capsys):
    """Their kernels fill each other's gaps: each waits 47 % of its time, both together never."""
    rows = [csv_row(name, i, first + 100_000 * i) for name, first in (("a", 0), ("b", 50_000)) for i in range(10)]
    path = tmp_path / "x_kernel_trace.csv"
    path.write_text(CSV_HEADER + "".join(rows))
    refused(
        launches.main, ["--trace-file", path], capsys, "2 processes: choose one with --gpu, of process-a, process-b"
    )
    assert idle_of(path, capsys, "--gpu", "process-b")["idle_share"] == pytest.approx(450 / 950)


COUNTERS = {  # of two GPUs or processes; ncu's second row holds units
    "processes.csv": (
        'Process_Id,Agent_Id,Kernel_Name,Counter_Name,Counter_Value\n11,4,"k","W",8\n12,4,"k","W",2\n',
        "2 processes, taken together: --gpu reads one of process-11, process-12",
    ),
    "ncu.csv": (
        '"Process ID","Device","Kernel Name","m__w.sum"\n"","","",""\n"7","0","k","8"\n"7","1","k","2"\n',
        "2 GPUs, taken together: --gpu reads one of 0, 1",
    ),
    "rocpd.db": (
        "CREATE TABLE counters_collection AS SELECT 'k' kernel_name, 'W' counter_name, 8 value, 1 pid, "
        "4 agent_abs_index UNION ALL SELECT 'k', 'W', 2, 1, 5",
        "2 GPUs, taken together: --gpu reads one of 4, 5",
    ),
}


@pytest.mark.parametrize("name", COUNTERS)
def test_counters_of_two_gpus_are_not_taken_together_in_silence(name, tmp_path, capsys):
    path = tmp_path / name
    content, words = COUNTERS[name]
    if name.endswith(".db"):
        with contextlib.closing(sqlite3.connect(path)) as connection:
            connection.execute(content)
            connection.commit()
    else:
        path.write_text(content)
    found = result_of(kernel_counters.main, [path], capsys)
    assert found["remarks"] == [f"These are the counters of {words}."] and found["counters"][0]["mean"] == 5
    found = result_of(kernel_counters.main, [path, "--gpu", words.split()[-1]], capsys)
    assert not found["remarks"] and found["counters"][0]["mean"] == 2
    refused(kernel_counters.main, [path, "--gpu", "9"], capsys, f"has no GPU or process 9: it has {words.split()[-2]}")


def test_passes_over_a_script_are_no_two_processes_of_a_run(tmp_path, capsys):
    """Each pass runs it again: the first reads W, the second W and X."""
    for i, counters in ((1, "W"), (2, "WX")):
        (tmp_path / f"pmc_{i}").mkdir()
        rows = [f'{10 + i},4,"k","{counter}",{8 * i}\n' for counter in counters]
        header = "Process_Id,Agent_Id,Kernel_Name,Counter_Name,Counter_Value\n"
        (tmp_path / f"pmc_{i}" / "x_counter_collection.csv").write_text(header + "".join(rows))
    found = result_of(kernel_counters.main, [tmp_path], capsys)
    assert not found["remarks"] and [(row["counter"], row["mean"]) for row in found["counters"]] == [
        ("W", 8),
        ("X", 16),
    ]


# ---------------------------------------------------------------- 3: compiled regions


def test_a_compiled_region_is_split_by_the_groups_of_its_kernels(write, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    parts = {GEMM: 40, "attn_fwd": 35, "triton_red_fused_add_rsqrt_0": 30, "triton_poi_fused_mul_silu_1": 30}
    events = [host("cpu_op", "Torch-Compiled Region: 0/0", 0, 100, **{"External id": 7})]
    events += [kernel(name, 1000 + 50 * i, us, **{"External id": 7}) for i, (name, us) in enumerate(parts.items())]
    found = result_of(bottlenecks.main, ["--profile-data", write(events), "--steps", 1], capsys)
    groups = {row["group"]: row["ms"] for row in found["targets"]}
    assert groups == pytest.approx({"GEMM": 0.04, "attention": 0.035, "normalisation": 0.03, "element-wise": 0.03})
    assert {row["step_could_be"] for row in found["targets"]} == {None}  # nobody knows what a region could take
    assert any(remark.startswith("No verdict about what to change first") for remark in found["remarks"])


# ---------------------------------------------------------------- 4: lost kernels


def graph_launches(count):
    return [host("cuda_runtime", "hipGraphLaunch", 1e3 * i, 20, correlation=i + 1) for i in range(count)]


def test_lost_kernels_are_no_run_on_a_cpu(write, capsys):
    events = [matmul(1, [[8, 8], [8, 8]]), *(host("cuda_runtime", "hipLaunchKernel", i, 1) for i in range(10))]
    for main, arguments in ((kernel_times.main, []), (launches.main, ["--trace-file"])):
        words = "holds 10 launches on AMD Instinct MI300X and none of their kernels: the profiler lost them"
        refused(main, [*arguments, write(events)], capsys, words)


def test_a_gpu_that_the_profiler_never_saw_is_no_cpu(write, capsys):
    """As in some WSL: operators, memory of the GPU, and no launch."""
    memory = {"ph": "i", "name": "[memory]", "ts": 5, "args": {"Device Type": 1, "Total Allocated": 64}}
    refused(kernel_times.main, [write([matmul(1, [[8, 8], [8, 8]]), memory])], capsys, "and no launch: record it with")


def test_the_work_of_a_cpu_is_not_rated_by_the_gpu_beside_it(write, capsys):
    path = write([matmul(1, [[64, 64], [64, 64]])])
    found = result_of(gemm_operations.main, ["--trace-file", path], capsys)
    assert (found["device"], found["gemms"][0]["of_peak"]) == (None, None)


def test_the_work_of_another_accelerator_is_no_work_of_a_cpu(write, capsys):
    path = write([matmul(1, [[8, 8], [8, 8]]), host("mtia_ccp_events", "gemm", 60, 9)])
    refused(kernel_times.main, [path], capsys, "an accelerator that this tool can't read (mtia_ccp_events)")


LOST = {
    "replays": (
        [*graph_launches(10), *(kernel(GEMM, 100 + 12 * i, 10, correlation=1) for i in range(5))],
        "10 graph launches, but kernels of only 1 of them",
    ),
    "launches": (
        [
            *(host("cuda_runtime", "hipLaunchKernel", i, 1, correlation=i) for i in range(10)),
            *(kernel(GEMM, 9 + 10 * i, 5, correlation=i) for i in range(9)),
        ],
        "1 of 10 launches have no kernel",
    ),
    "graphs": ([*graph_launches(10), kernel(GEMM, 100, 10, correlation=99)], "10 graph launches, but kernels of none"),
    "overrun": (
        [kernel(GEMM, 1000, 2e6), *(kernel(GEMM, 1020 + 20 * i, 10) for i in range(98))],
        "1 kernels have impossible times (one of 2,000.000 ms ends after 98 later ones",
    ),
    "twins": ([kernel(GEMM, 100 * (i // 2), 50) for i in range(20)], "10 of 20 rows repeat a dispatch"),
}


@pytest.mark.parametrize("name", LOST)
def test_what_is_not_complete_is_said_by_every_tool(name, write, capsys, tmp_path, monkeypatch):
    """And there is no verdict, and no mean number of kernels per step."""
    monkeypatch.chdir(tmp_path)
    events, words = LOST[name]
    path = write(events)
    for main, arguments in (
        (kernel_times.main, [path]),
        (launches.main, ["--trace-file", path, "--steps", 10]),
        (bottlenecks.main, ["--profile-data", path, "--steps", 10]),
        (communication.main, [path, "--steps", 10]),
        (reduction.main, ["--baseline", path, "--fused", path, "--baseline-steps", 1, "--fused-steps", 1]),
    ):
        assert main([str(word) for word in arguments]) == 0
        assert words in capsys.readouterr().out, main.__module__
    assert (tmp_path / "bottlenecks.md").read_text().count(words) == 1
    found = idle_of(path, capsys, "--steps", "10")
    assert found["launch_bound"] is None and found["launches_per_step"] is None


WHOLE = {  # one launch of 40 at the edge; a long kernel beside short ones; all replays; two GPUs in step
    "edge": [
        *(host("cuda_runtime", "hipLaunchKernel", i, 1, correlation=i) for i in range(40)),
        *(kernel(GEMM, 50 + 10 * i, 5, correlation=i) for i in range(39)),
    ],
    "streams": [kernel(GEMM, 0, 5000), *(kernel("k", 100 * i, 50, 2) for i in range(1, 20))],
    "replays": [*graph_launches(3), *(kernel(GEMM, 1000 * i, 10, correlation=i + 1) for i in range(3))],
    "gpus": [kernel(GEMM, 100 * i, 50, gpu=gpu) for i in range(3) for gpu in (0, 1)],
}


@pytest.mark.parametrize("name", WHOLE)
def test_a_complete_profile_has_no_warnings(name, write):
    profile = read_profile(write(WHOLE[name]))
    assert not profile.warnings
    assert len(profile.calls) == sum(event["cat"] == "kernel" for event in WHOLE[name])


def test_the_same_dispatch_counts_once(tmp_path):
    path = tmp_path / "x_kernel_trace.csv"
    path.write_text(CSV_HEADER + "".join(csv_row("a", i // 2, 100_000 * (i // 2)) for i in range(20)))
    assert sum(call.total_ns for call in read_profile(path).calls) == 10 * 50_000


def test_dispatches_that_rocpds_view_leaves_out_are_counted(tmp_path, capsys):
    path = tmp_path / "results.db"
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE rocpd_kernel_dispatch (id INT, start INT, end INT)")
        connection.executemany(
            "INSERT INTO rocpd_kernel_dispatch VALUES (?, ?, ?)", [(i, 9 * i, 9 * i + 5) for i in range(9)]
        )
        connection.execute("CREATE VIEW kernels AS SELECT 'k' name, start, end FROM rocpd_kernel_dispatch WHERE id > 2")
        connection.commit()
    assert kernel_times.main([str(path)]) == 0
    assert "leaves out 3 of 9 dispatches" in capsys.readouterr().out


def test_a_query_that_does_not_end_is_ended(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(containers, "LONGEST_S", -1)
    path = tmp_path / "endless.db"
    endless = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n)"
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute(f"CREATE VIEW kernels AS {endless} SELECT 'k' name, i start, i end FROM n WHERE i < 300000")
        connection.commit()
    refused(kernel_times.main, [path], capsys, "takes more than -1 s to read: export fewer steps")


# ---------------------------------------------------------------- 6, 7: precision and names

PRECISIONS = {
    "Cijk_Alik_Bljk_BBS_BH_Bias_HA_S_SAV_UserArgs_MT128x256x32": "bfloat16",
    "Cijk_Ailk_Bljk_B_BS_BH_Bias": "bfloat16",
    "Cijk_Alik_Bljk_HHS_BH_MT64x64x32": "float16",
    "Cijk_Alik_Bljk_SB_MT64x64x16_SE_K1": "float32",
    "Cijk_Alik_Bljk_F8BS_BH": "float8",
    "Cijk_Ailk_Bljk_S_MX_B_Bias_HA_S_SAV_UserArgs_MT256x256x32": "tf32",  # X: by XF32, or its emulation
    "Custom_Cijk_Ailk_Bljk_S_MX_B_BIAS_HA_S_SAV_NTD_SK3_UserArgs_MT256x256x32_MI16x16x1_shortname0_gfx950": "tf32",
    "Custom_Cijk_Alik_Bljk_S_B_UserArgs_MT64x16x32_MI16x16x1_gfx942": "float32",
    "Custom_Cijk_Alik_Bljk_BBS_BH_MT256x256x64_MI16x16x1_UserArgs_shortname1_gfx950": "bfloat16",
    "Custom_Cijk_Alik_Bljk_HHS_BH_UserArgs_MT64x16x32_MI16x16x1_SN_K1_MIWT1_1_STA_gfx942": "float16",
    "Custom_Cijk_Alik_Bljk_F8B8BS_BH_UserArgs_MT256x256x128": "float8",
    "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NNT": "bfloat16",
    "nvjet_hsh_128x256": "float16",
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64": "bfloat16",
    "sm90_xmma_gemm_f32f32_tf32f32_f32_nt_n_tilesize64x64x32_cublas": "tf32",
    "void cutlass::Kernel2<cutlass_75_tensorop_bf16_s1688gemm_bf16_128x128_nn_align1>": "bfloat16",
    "cutlass_80_tensorop_s1688gemm_256x64_16x4_tn_align1": "tf32",
    "volta_sgemm_128x32_nt": "float32",
    "ampere_fp16_s16816gemm_fp16_128x64_ldg8_f2f_stages_32x6_nn": "float16",
    "_matmul_ogs_NNT_bf16xbf16xmxfp4_128x128x128x1": "bfloat16",
    "Cijk_Alik_Bljk_B8BS_BH": "float8",
    "gemm_e4m3": "float8",
    "gemm_e5m2": "float8",
    "gemm_float8_x": "float8",
    "fp8_gemm": "float8",
    "gemm_f8f8bf16": "float8",
    "gemm_f8_x": "float8",
    "nvjet_qqtst_128": "float8",
    "s1688gemm_f16_x": "float16",
    "s1688gemm_fp16_x": "float16",
    "gemm_xf32_x": "tf32",
    "nvjet_sss_128": "tf32",
    "Cijk_Alik_Bljk_BBS": "bfloat16",
    "gemm_bfloat16": "bfloat16",
    "Cijk_Alik_Bljk_HHS": "float16",
    "gemm_f16_x": "float16",
    "hgemm_128": "float16",
    "h16816_kernel": "float16",
    "h1688_kernel": "float16",
    "gemm<half>": "float16",
    "gemm_half2": "float16",
    "Cijk_Alik_Bljk_SB": "float32",
    "volta_scudnn_128x64": "float32",
    "xmma_f32f32_f32f32_f32": "float32",
    "gemm_kernel": None,
}


@pytest.mark.parametrize("name", PRECISIONS)
def test_the_precision_that_a_kernels_name_tells(name):
    assert precision_of_kernel(name) == PRECISIONS[name]


OF_MATMULS = [  # type of the operands, kernels
    ("c10::BFloat16", ["sgemm"], "bfloat16"),
    ("c10::Float8_e4m3fn", ["gemm"], "float8"),
    ("float", ["sm90_xmma_gemm_f32f32_tf32f32"], "tf32"),
    ("float", ["gemm"], "float32"),
    ("float", [GEMM], "float32"),  # the kernel is another one's
    (None, [GEMM], "bfloat16"),
    (None, [GEMM, "volta_sgemm"], None),
    (None, ["gemm"], None),
]


@pytest.mark.parametrize(("kind", "names", "precision"), OF_MATMULS)
def test_the_precision_of_a_matmul(kind, names, precision):
    dims = [[8, 8], [8, 8]] if kind else []
    types = [kind, kind] if kind else []
    assert gemms.precision_of(Operation("aten::mm", "GEMM", 1.0, dims, types, dims, tuple(names))) == precision


@pytest.mark.parametrize(
    ("name", "words"),
    [(GEMM, "the data sheet's of MI300X in bfloat16"), ("some_gemm", "doesn't tell the precision of its matmuls")],
)
def test_matmuls_of_a_graph_have_the_precision_of_their_names(name, words, write):
    """A decode in bfloat16 was judged against the peak of float32, which is an eighth."""
    assert words in roofline.ceilings_for(read_profile(write([kernel(name, 0, 50)])))[1]


def test_no_two_kernels_share_a_printed_name(write, capsys):
    """Half of the rows read "vectorized_elementwise_kernel<"."""
    head = "void at::native::vectorized_elementwise_kernel<4, at::native::"
    names = [f"{head}{what}, std::array<char*, 3ul> >(int, at::native::(x), char)" for what in ("Add(int)", "Mul(int)")]
    names += [f"{names[0]} [{i}]" for i in range(3)]
    names += [f"{head}PowPowPow{end}>" for end in ("y", "x" * 40 + "1", "x" * 40 + "2")]  # alike in any part that fits
    shown = shown_names(names, 44)
    assert len(set(shown.values())) == len(names) and max(map(len, shown.values())) <= 44
    assert "Add" in shown[names[0]] and "Mul" in shown[names[1]]
    assert shown_names(["void k<at::native::f(int), a>(int, char*)"], 20).popitem()[1] == "k<f(int), a>"
    attention = "aten::_scaled_dot_product_flash_attention_for_cpu"
    first, second = shown_names([attention, f"{attention}_backward"], 44).values()  # versions 2 and 4 on a CPU
    assert first == "aten::_scaled_dot_product_flash_attent...cpu" and second.endswith("_fla...cpu_backward")
    assert kernel_times.main([str(write([kernel(name, 10 * i, 5) for i, name in enumerate(names)]))]) == 0
    rows = re.findall(r"^(vector.{38,40}) ", capsys.readouterr().out, re.MULTILINE)
    assert len(set(rows)) == len(names)


MANGLED = "_ZN2at6native29vectorized_elementwise_kernelILi128EZZZNS0_%sERNS_18TensorIteratorBaseEEUlfE_DF16_EEviT0_T1_"
SHOWN = {  # what PyTorch writes on Windows: what to print of it
    MANGLED % "12_GLOBAL__N_119launch_clamp_scalar": "vectorized_elementwise_kernel launch_clam...",
    MANGLED % "15CUDAFunctor_add": "vectorized_elementwise_kernel CUDAFunctor...",
    "_ZN5cudnn17bn_fw_tr_1C11_kerIffiLi1ELb1EEEv": "cudnn bn_fw_tr_1C11_ker",
    "_Z": "_Z",
    "_Z99cut": "_Z99cut",
}


def test_a_mangled_name_shows_its_identifiers():
    assert shown_names(SHOWN, 44) == SHOWN


# ---------------------------------------------------------------- 8: forms of files


def test_other_forms_of_traces_are_read(write, tmp_path):
    events = [kernel(GEMM, 20 * i, 10) for i in range(5)]
    (tmp_path / "list.json").write_text(json.dumps(events))
    old = write([one | {"cat": "Kernel"} for one in events], "old.json")
    symbols = [{"kernel_id": 1, "kernel_name": "k.kd", "formatted_kernel_name": "k"}]
    dispatches = [
        {"start_timestamp": 20 * i, "end_timestamp": 20 * i + 10, "dispatch_info": {"kernel_id": 1}} for i in range(5)
    ]
    part = {"kernel_symbols": symbols, "buffer_records": {"kernel_dispatch": dispatches}}
    (tmp_path / "x_results.json").write_text(json.dumps({"rocprofiler-sdk-tool": [part]}))
    (tmp_path / "two.json").write_text(json.dumps({"rocprofiler-sdk-tool": [part, part | {"metadata": {"pid": 7}}]}))
    assert read_profile(tmp_path / "two.json").sources == ("process-0", "process-7")
    found = {name: read_profile(tmp_path / name).calls for name in ("list.json", old.name, "x_results.json")}
    assert {name: len(calls) for name, calls in found.items()} == dict.fromkeys(found, 5)
    assert sum(call.total_ns for call in found["x_results.json"]) == 50


SUMS = {  # header and row: of rocprofv3 --stats, of the old rocprof --stats, of rocpd summary --format csv
    "rocprofv3": (
        '"Name","Calls","TotalDurationNs","AverageNs","Percentage","MinNs","MaxNs"',
        '"k",10,1000,100.0,9,90,110',
    ),
    "rocprof": ('"Name","Calls","TotalDurationNs","AverageNs","Percentage"', "k<1, 2>(int, int),10,1000,100,100.0"),
    "rocpd": ("Name,Calls,DURATION (nsec),AVERAGE (nsec),MIN (nsec),MAX (nsec)", "k,10,1000,100.0,90,110"),
}


@pytest.mark.parametrize("name", SUMS)
def test_sums_of_rocms_profilers_are_a_table_and_no_timeline(name, tmp_path, capsys):
    header, line = SUMS[name]
    path = tmp_path / "x_kernel_stats.csv"
    path.write_text(f"{header}\n{line}\n")
    (row,) = result_of(kernel_times.main, [path], capsys)["kernels"]
    known = [None, None] if name == "rocprof" else [0.09, 0.11]
    assert row["kernel"] == ("k<1, 2>(int, int)" if name == "rocprof" else "k")  # it doesn't quote names
    assert [row[key] for key in ("calls", "total_us", "mean_us", "min_us", "max_us")] == [10, 1, 0.1, *known]
    assert kernel_times.main([str(path)]) == 0
    for main, arguments in ((launches.main, ["--trace-file", path]), (communication.main, [path, "--steps", 1])):
        refused(main, arguments, capsys, "only sums over the kernels' times")
    for other in ("hipMemcpyAsync", "hsa_queue_create", "HIP_API", "KERNEL_DISPATCH", "ncclAllReduce"):
        path.write_text(f"{header}\n{other}{line[line.index(',10,') :]}\n")
        refused(kernel_times.main, [path], capsys, "sums over calls of the CPU, not over kernels")


def test_a_barrier_is_no_kernel(tmp_path, capsys):
    """The old rocprof lists them, with the time that a queue waits at them."""
    path = tmp_path / "results.csv"
    path.write_text("KernelName,gpu-id,BeginNs,EndNs\nk,1,1000,2000\n<barrier packet>,1,2000,8000\nk,1,8000,9000\n")
    assert idle_of(path, capsys)["busy_us"] == 2
    path.write_text("Name,Calls,TotalDurationNs\n<barrier packet>,9,99999\nk,10,1000\n")
    (row,) = result_of(kernel_times.main, [path], capsys)["kernels"]
    assert (row["kernel"], row["share_percent"]) == ("k", 100)


def test_between_dispatches_that_a_file_lacks_the_gpu_did_not_idle(tmp_path, capsys):
    """A filter, or an editor, took 18 of 20 dispatches out; those before the first and after the last may lack."""
    path = tmp_path / "x_kernel_trace.csv"
    header = "Agent_Id,Dispatch_Id,Kernel_Name,Start_Timestamp,End_Timestamp\n"
    path.write_text(header + "1,5,k,1000,2000\n1,24,k,9000,9999\n")
    found = idle_of(path, capsys)
    assert found["launch_bound"] is None and "18 of 20 dispatches aren't in this file" in found["warnings"][0]
    path.write_text(header + "1,6,k,9000,9999\n1,5,k,1000,2000\n")
    assert idle_of(path, capsys)["warnings"] == []


def test_ranks_under_any_name_are_known_by_what_is_in_them(write, tmp_path, capsys):
    os.utime(write([kernel("older", 0, 1)], "a.json.gz", distributedInfo={"rank": 0}), (1, 1))
    for rank, us in ((0, 90), (1, 40)):
        said = {"Collective name": "allreduce", "In msg nelems": 10**6, "Out msg nelems": 10**6, "dtype": "Float"}
        events = [mark("ProfilerStep#1", 0, 200), kernel(GEMM, 0, 50)]
        events.append(kernel("ncclDevKernel_Generic", 150 - us, us, 2, **said, **{"Group size": 2}))
        write(events, f"host{rank}_abc.json.gz", distributedInfo={"backend": "nccl", "rank": rank})
    found = result_of(communication.main, [tmp_path], capsys)
    assert [row["communication_ms"] for row in found["processes"]] == [0.09, 0.04]
    (row,) = found["collectives"]
    assert (row["ranks"], row["bytes"], row["us"], row["last"]) == (2, 4e6, 40, "rank 1 (1 of 1)")
    assert row["gb_s"] == pytest.approx(100) and row["bus_gb_s"] == pytest.approx(100)
    assert row["waited_ms"] == pytest.approx(0.05)
    refused(
        kernel_times.main, [tmp_path], capsys, "holds the traces of 2 ranks: name the trace of one, such as host0_abc"
    )


def collective(name, number, us, rank, group="0", size=2, sizes=(10**6, 10**6)):
    said = {"Collective name": name, "In msg nelems": sizes[0], "Out msg nelems": sizes[1], "dtype": "Float"}
    said |= {"Group size": size, "Process Group Name": group}
    return kernel("ncclDevKernel", 1000 * number + 10 * rank, us, **said)


def test_collectives_by_hand(write):
    """Groups, two with a rank that is not here; rank 1 came last to the second all-gather, rank 0 to all others."""
    profiles = []
    for rank in (0, 1):
        events = [
            collective("allgather", 1, 100 + 50 * rank, rank, sizes=(10**6, 4 * 10**6), size=2),
            collective("allgather", 2, 150 - 50 * rank, rank, sizes=(10**6, 4 * 10**6), size=2),
            collective("allgather", 3, 100 + 50 * rank, rank, sizes=(10**6, 4 * 10**6), size=2),
        ]
        if rank:
            events.append(collective("allreduce", 4, 80, rank, group="1", size=4))
            events.append(collective("broadcast", 7, 30, rank))  # lost by rank 0
        events.append(collective("broadcast", 6, 30, rank))
        events.append(collective("reduce", 8, 10, rank, group="2", size=3))  # the third rank's trace is not here
        events.append(collective("allreduce", 5, 20 + rank, rank))
        profiles.append(read_profile(write(events)))
    rows, remarks = collectives.collective_rows(profiles, ["rank 0", "rank 1"])
    gather, alone, lost, reduce, _ = rows
    assert (lost["calls"], lost["waited_ms"], lost["last"]) == (2, None, "-")  # nobody knows who came last to one
    assert (gather["bytes"], gather["calls"], gather["us"], gather["last"]) == (16e6, 3, 100, "rank 0 (2 of 3)")
    assert (gather["gb_s"], gather["bus_gb_s"], gather["waited_ms"]) == pytest.approx((160, 80, 0.15))
    assert (alone["ranks"], alone["us"], alone["waited_ms"], alone["last"]) == (4, 80, None, "-")
    assert (reduce["ranks"], reduce["us"], reduce["bus_gb_s"]) == (2, 20, pytest.approx(200))
    (row,) = collectives.collective_rows([read_profile(write([kernel("ncclKernel_AllReduce", 1, 9)]))], ["rank 0"])[0]
    assert row["ranks"] is None  # of its group one trace tells nothing
    assert remarks == ["3 collectives are missing from the trace of a rank, which may have come last."]
    uneven = [read_profile(write([collective("alltoallv", 1, 9, 0, sizes=(n, n))])) for n in (10, 20)]
    assert collectives.collective_rows(uneven, ["a", "b"])[0][0]["bytes"] is None  # no rate: ranks send other amounts
    (remark,) = collectives.collective_rows(profiles[:1], ["rank 0"])[1]
    assert remark.startswith("One rank's trace also contains its waiting")


def test_bytes_over_a_link_are_those_of_nccls_tests():
    for name in ("reduce_scatter", "_allgather_base", "all_to_all", "alltoallv"):
        assert collectives.bus_factor(name, 4) == 3 / 4
    assert collectives.bus_factor("allreduce", 4) == 2 * 3 / 4
    assert collectives.bus_factor("reduce", 4) == collectives.bus_factor("broadcast", 4) == 1


def test_counters_without_a_value_are_said_and_details_are_read(tmp_path, capsys):
    path = tmp_path / "ncu.csv"
    path.write_text('"Kernel Name","gpu__time_duration.sum","m__x.pct"\n"","us","%"\n"k","10","nan"\n"k","20","50"\n')
    found = result_of(kernel_counters.main, [path], capsys)
    assert [(row["counter"], row["launches"], row["mean"]) for row in found["counters"]][1] == ("m__x.pct", 1, 50)
    assert found["remarks"] == ["m__x.pct: 1 of 2 launches of k have no value (NaN): its mean is over the others."]
    header = '"ID","Kernel Name","Section Name","Metric Name","Metric Unit","Metric Value"\n'
    path.write_text(
        header + '"0","k","Launch","Duration","us","1,010.5"\n"0","k","Launch","Cache Config","","Prefer"\n'
    )
    (row,) = result_of(kernel_counters.main, [path], capsys)["counters"]
    assert (row["counter"], row["unit"], row["mean"]) == ("Duration", "us", 1010.5)
    for value in ("9,00", "1.234.567", "1.234,5"):  # ncu where decimals have a comma: 9,00 was 900
        path.write_text(f'{header}"0","k","Launch","Throughput","%","{value}"\n')
        refused(kernel_counters.main, [path], capsys, f"has numbers like {value}: write it where decimals have a point")


# ---------------------------------------------------------------- 9: times since 1970


def test_a_trace_of_pytorch_1_8_has_steps_shapes_and_memory(write, capsys):
    """Its profiler called steps operators, wrote "Input dims", and left the allocator's total out."""
    shapes = {"Input dims": [[64, 64], [64, 64]], "Input type": ["float", "float"]}
    events = [host("Operator", f"ProfilerStep#{i}", 1e3 * i, 1e3) for i in range(2)]
    events.append(host("Operator", "aten::mm", 100, 50, **{"External id": "7"}, **shapes))
    events.append(host("Operator", "aten::add", 1100, 50))
    events.append(kernel("sgemm", 300, 20, **{"External id": "7"}) | {"cat": "Kernel"})
    events.append({"ph": "i", "name": "[memory]", "ts": 5, "args": {"Device Type": 0, "Bytes": 64}})
    path = write(events)
    assert idle_of(path, capsys)["steps"] == 2
    (row,) = result_of(gemm_operations.main, ["--trace-file", path], capsys)["gemms"]
    assert (row["m"], row["k"], row["n"]) == (64, 64, 64)


def test_a_number_of_another_operator_links_nothing(write, capsys):
    """PyTorch 1.13 could give a kernel its launch's number, which an operator elsewhere has too."""
    events = [matmul(7, [[64, 64], [64, 64]]), launched(7, 200), kernel(GEMM, 300, 20, correlation=7)]
    events[-1]["args"]["External id"] = 7
    (operation,) = read_profile(write(events)).operations
    assert operation.name == GEMM
    events[0]["dur"] = 250
    (operation,) = read_profile(write(events)).operations
    assert operation.name == "aten::mm"


def test_kernels_that_name_their_launch_belong_to_the_operator_around_it(write, capsys):
    """So old PyTorch could write them. Both kernels of a matmul are one call of it; a graph's belong to nobody."""
    shapes = {"Input Dims": [[64, 64], [64, 64]], "Input type": ["float", "float"]}
    events = [host("cpu_op", "aten::linear", 0, 90, **{"External id": 4})]
    events.append(host("cpu_op", "aten::mm", 10, 60, **{"External id": 7}, **shapes))
    events.append(host("cpu_op", "aten::mm", 20, 60, tid=8, **{"External id": 5}, **shapes))
    events += [launched(5, 30), launched(6, 40), launched(7, 95), launched(8, 50, name="cudaGraphLaunch")]
    for number in (5, 6, 7, 8):
        events.append(kernel(GEMM, 100 + 10 * number, 10, correlation=number, **{"External id": number}))
    found = read_profile(write(events)).operations
    assert [(one.name, one.us) for one in found] == [("aten::mm", 20), (GEMM, 10), (GEMM, 10)]
    (row,) = result_of(gemm_operations.main, ["--trace-file", write(events)], capsys)["gemms"]
    assert (row["m"], row["k"], row["n"], row["calls"]) == (64, 64, 64, 1)


NSYS = {  # what nsys stats --format csv writes, after lines about its progress
    "cuda_gpu_kern_sum": (
        "\nNOTICE: Existing SQLite export found: x.sqlite\n        It is assumed file was previously exported from: x\n"
        "        Consider using --force-export=true if needed.\n\nProcessing [x.sqlite] with [x.py]...\n\n"
        '"Time (%)","Total Time (ns)","Instances","Avg (ns)","Med (ns)",'
        '"Min (ns)","Max (ns)","StdDev (ns)","Name"\n99.0,600,3,200.0,200.0,100,300,1.0,"k"\n',
        None,
    ),
    "cuda_gpu_trace": (
        "Start (ns),Duration (ns),CorrId,GrdX,Device,Ctx,Strm,Name\n1000,100,1,1,H100 (0),1,7,k\n"
        "1100,200,2,1,H100 (0),1,7,k\n1400,300,3,1,H100 (0),1,7,k\n4000,9,4,,H100 (0),1,7,[CUDA memcpy HtoD]\n",
        100,
    ),
}


def test_several_reports_of_nsys_stats_in_one_file_are_said(tmp_path, capsys):
    path = tmp_path / "all.csv"
    path.write_text(
        "".join(content for content, _ in NSYS.values()).replace("Start (ns)", "Processing [x]\nStart (ns)")
    )
    refused(kernel_times.main, [path], capsys, "holds several reports of nsys stats: write one, with --report")
    path.write_text("\nProcessing [x.sqlite] with [x.py]...\nSKIPPED: x.sqlite does not contain CUDA kernel data.\n\n")
    refused(kernel_times.main, [path], capsys, "has no kernel times")


OLD_ROCPROF = (  # version 1, with counters alone and with times, and version 2
    "Index,KernelName,gpu-id,queue-id,pid,obj,FETCH_SIZE\n0,fill.kd,{0},0,7,0x0,{1}\n",
    "Index,KernelName,gpu-id,queue-id,pid,obj,FETCH_SIZE,DispatchNs,BeginNs,EndNs,CompleteNs\n"
    "0,fill.kd,{0},0,7,0x0,{1},1,2,3,4\n",
    "Dispatch_ID,GPU_ID,Queue_ID,PID,Kernel_Name,Start_Timestamp,End_Timestamp,Correlation_ID,FETCH_SIZE\n"
    "0,{0},0,7,fill.kd,2,3,1,{1}\n",
)


@pytest.mark.parametrize("row", OLD_ROCPROF)
def test_the_old_rocprof_names_gpus_and_counters(row, tmp_path, capsys):
    """Kernels of two GPUs filled each other's gaps, and counters in columns were called none."""
    path = tmp_path / "results.csv"
    path.write_text(row.format(1, 8) + row.format(2, 4).partition("\n")[2])
    found = result_of(kernel_counters.main, [path], capsys)
    assert [(one["counter"], one["mean"]) for one in found["counters"]] == [("FETCH_SIZE", 6)]
    assert "These are the counters of 2 GPUs" in found["remarks"][0]
    if "Ns" in row or "_Timestamp" in row:
        refused(launches.main, ["--trace-file", path], capsys, "2 GPUs: choose one with --gpu, of 1, 2")


@pytest.mark.parametrize("name", NSYS)
def test_tables_of_nsys_stats_are_read(name, tmp_path, capsys):
    content, idle_ns = NSYS[name]
    path = tmp_path / f"{name}.csv"
    path.write_text(content)
    row = result_of(kernel_times.main, [path], capsys)["kernels"][0]
    assert [row[key] for key in ("kernel", "calls", "total_us", "min_us", "max_us")] == ["k", 3, 0.6, 0.1, 0.3]
    if idle_ns is None:
        refused(launches.main, ["--trace-file", path], capsys, "only sums over the kernels' times")
    else:
        assert idle_of(path, capsys)["per_step"][0]["exposed_copies_ms"] == pytest.approx(9e-6)


def test_a_run_that_read_counters_has_no_verdict(tmp_path, capsys):
    """Its kernels run one by one; rocprof-compute's times are means over passes, which have decimals."""
    path = tmp_path / "pmc_perf.csv"
    path.write_text("Kernel_Name,SQ_WAVES,Start_Timestamp,End_Timestamp\nk,8.0,1000.54,2000.5\nk,8.0,9000,9999.5\n")
    found = idle_of(path, capsys)
    assert found["launch_bound"] is None and found["busy_us"] == pytest.approx(1.999)
    refused(kernel_counters.main, [path], capsys, "rocprof-compute analyze")


def test_microseconds_since_1970_lose_nothing(write):
    """Times are multiples of a quarter of a microsecond there; scaled first they would be multiples of 256 ns."""
    first = 1_690_000_000_000_000.25
    profile = read_profile(write([kernel(GEMM, first + 0.25 * i, 0.25) for i in range(8)]))
    assert [call.start_ns for call in profile.calls] == [250 * i for i in range(8)]
    assert profile.origin_ns // 1000 == 1_690_000_000_000_000


# ---------------------------------------------------------------- advice

ADVICE = {  # operator, kernel, category: words
    "matmul": ("aten::mm", GEMM, "kernel", "one matmul for q, k, v"),
    "convolution": ("aten::convolution_backward", "igemm_wrw_gtcx3_nhwc_bf16", "kernel", "channels_last"),
    "scores": ("aten::bmm", GEMM, "kernel", "if these are attention's scores: scaled_dot_product_attention"),
    "softmax": ("aten::_softmax", "softmax_warp_forward<float>", "kernel", "scaled_dot_product_attention: one kernel"),
    "attention": ("aiter::fmha", "aiter::fmha_fwd_hd128_bf16_rtz", "kernel", "it's one kernel already"),
    "loader": ("aten::copy_", "Memcpy HtoD (Pageable -> Device)", "gpu_memcpy", "pinned memory"),
    "cast": ("aten::copy_", "bfloat16_copy_kernel_cuda", "kernel", "fewer casts"),
}


@pytest.mark.parametrize("name", ADVICE)
def test_a_trace_of_another_program_gets_no_version_of_the_workshop_as_advice(name, write, capsys, tmp_path):
    operator, what, category, words = ADVICE[name]
    events = [mark("ProfilerStep#1", 0, 100), host("cpu_op", operator, 1, 9, **{"External id": 7})]
    events.append(kernel(what, 20, 9, **{"External id": 7}) | {"cat": category})
    arguments = ["--profile-data", write(events), "--output-report", tmp_path / "b.md", "--peak", "1,1"]
    (target,) = result_of(bottlenecks.main, arguments, capsys)["targets"]
    assert words in target["addressed_by"] and "version 2" not in target["addressed_by"]


@pytest.mark.parametrize(("us", "words"), [(10, "pinned memory"), (9, "fewer casts")])
def test_advice_on_copies_is_for_what_takes_more_of_their_time(us, words, write, capsys, tmp_path):
    events = [mark("ProfilerStep#1", 0, 100)]
    for number, (name, dur) in enumerate([("Memcpy HtoD (Pageable -> Device)", us), ("Memcpy DtoD", 9)], 1):
        events.append(host("cpu_op", "aten::copy_", 20 * number, 1, **{"External id": number}))
        events.append(kernel(name, 20 * number + 2, dur, **{"External id": number}) | {"cat": "gpu_memcpy"})
    arguments = ["--profile-data", write(events), "--output-report", tmp_path / "b.md", "--peak", "1,1"]
    (target,) = result_of(bottlenecks.main, arguments, capsys)["targets"]
    assert words in target["addressed_by"]


OVER_A_LINK = {  # name of a copy: the places in its row
    "Memcpy HtoD (Pinned -> Device)": "CPU and GPU",
    "Memcpy DtoH (Device -> Pageable)": "CPU and GPU",
    "Memcpy PtoP (Device -> Device)": "two GPUs",
    "MEMORY_COPY_HOST_TO_DEVICE": "CPU and GPU",
    "MEMORY_COPY_DEVICE_TO_HOST": "CPU and GPU",
}


@pytest.mark.parametrize(("copy", "places"), OVER_A_LINK.items())
def test_copies_over_a_link_are_not_rated_by_the_gpus_memory(copy, places, write, capsys, tmp_path):
    shapes = {"Input Dims": [[1000], [1000]], "Input type": ["float", "float"]}
    events = [mark("ProfilerStep#1", 0, 100)]
    for number, name in ((7, copy), (8, "Memcpy DtoD (Device -> Device)")):
        events.append(host("cpu_op", "aten::copy_", number, 1, **{"External id": number}, **shapes))
        events.append(kernel(name, 3 * number, 2, **{"External id": number}) | {"cat": "gpu_memcpy"})
    arguments = ["--profile-data", write(events), "--output-report", tmp_path / "b.md", "--peak", "1,1"]
    found = result_of(bottlenecks.main, arguments, capsys)["operators"]
    assert {row["operator"]: row["bytes"] for row in found} == {f"aten::copy_ ({places})": None, "aten::copy_": 8000}


def test_where_the_gpu_waits_shorter_kernels_are_no_first_advice(write, capsys, tmp_path):
    events = [mark("ProfilerStep#1", 0, 1000), host("cpu_op", "aten::mm", 1, 9, **{"External id": 7})]
    for number, start in ((1, 100), (2, 600)):
        events += [launched(number, start - 5), kernel(GEMM, start, 100, correlation=number)]
    arguments = ["--profile-data", write(events), "--output-report", tmp_path / "b.md", "--peak", "1,1"]
    assert bottlenecks.main([*map(str, arguments)]) == 0
    told = "The GPU waits 67 % of the time. Shorter kernels don't change that, so begin there."
    assert capsys.readouterr().out.splitlines()[1] == told and told in (tmp_path / "b.md").read_text()


# ---------------------------------------------------------------- why the GPU idled


def launched(number, ts, **more):
    return host("cuda_runtime", more.pop("name", "cudaLaunchKernel"), ts, 2, correlation=number, **more)


def pair(second_launch, first=("gemm", 1), second=("gemm", 1), between=()):
    """Return two calls on (kernel, stream), which leave the GPU idle from 100 to 400 us, and what the host did."""
    one = kernel(first[0], 10, 90, first[1], correlation=1)
    if first[0].startswith("Memcpy"):
        one["cat"] = "gpu_memcpy"
    return [
        launched(1, 0),
        launched(2, second_launch),
        one,
        kernel(second[0], 400, 50, second[1], correlation=2, **{"External id": 5}),
        *between,
    ]


GRAPH = ((1, 10), (2, 400))  # stream and start of its kernels
WHY = {
    "host": (  # the innermost operator of the thread that launches
        pair(
            390,
            between=[
                host("cpu_op", "outer", 80, 315),
                host("cpu_op", "aten::topk", 90, 300),
                host("cpu_op", "another thread's", 95, 295, tid=7),
            ],
        ),
        idle.LATE,
        "aten::topk (100 %)",
    ),
    "operator": (  # its launch was not recorded
        [*pair(390)[2:], launched(1, 0), host("cpu_op", "aten::mm", 380, 9, **{"External id": 5})],
        idle.LATE,
        "nothing that was recorded",
    ),
    "number": (  # nothing joins them
        [host("cpu_op", "aten::mm", 380, 9), launched(1, 0), pair(390)[2], kernel("gemm", 400, 50)],
        idle.UNKNOWN,
        "not recorded",
    ),
    "loader": (pair(390), idle.LATE, "nothing that was recorded"),
    "step": (pair(390, between=[mark("ProfilerStep#1", 0, 500)]), idle.LATE, "nothing that was recorded"),
    "begun": (pair(150), idle.LATE, "nothing that was recorded"),
    "module": (  # its first launch loads the kernel
        [event | {"dur": 385} if event["ts"] == 5 else event for event in pair(5)],
        idle.LATE,
        "the call that launches (97 %)",
    ),
    "call": (  # it ends in the first half of the gap: something else held the kernel back
        [event | {"dur": 240} if event["ts"] == 5 else event for event in pair(5)],
        idle.UNKNOWN,
        "it had launched already",
    ),
    "stream": (pair(5, second=("gemm", 2)), idle.STREAM, "it had launched already"),
    "event": (
        pair(5, between=[host("cuda_runtime", "cudaStreamWaitEvent", 3, 1)]),
        idle.STREAM,
        "it had launched already",
    ),
    "peer": (pair(5, first=("ncclDevKernel_AllReduce", 2)), idle.PEER, "it had launched already"),
    "gloo": (pair(390, between=[host("cpu_op", "gloo:all_reduce", 90, 290)]), idle.PEER, "gloo:all_reduce (97 %)"),
    "copy": (
        pair(390, first=("Memcpy DtoH", 1), between=[host("cuda_runtime", "cudaStreamSynchronize", 4, 300)]),
        idle.COPY,
        "cudaStreamSynchronize (70 %)",
    ),
    "waited": (  # then the host did something else
        pair(390, first=("Memcpy DtoH", 1), between=[host("cuda_runtime", "cudaStreamSynchronize", 4, 100)]),
        idle.LATE,
        "many short calls, and unrecorded code",
    ),
    "item": (  # short calls begin inside the one that waits
        pair(
            390,
            first=("Memcpy DtoH", 1),
            between=[host("cpu_op", "aten::item", 3, 300), launched(3, 4, name="cudaMemcpyAsync")],
        ),
        idle.COPY,
        "aten::item (70 %)",
    ),
    "often": (  # no call fills half of the gap, but all of one name do
        pair(390, between=[host("cuda_runtime", "hipFree", 110 + 70 * i, 60, tid=9) for i in range(4)]),
        idle.LATE,
        "hipFree (83 % in 4 calls)",
    ),
    "short": (
        pair(390, between=[host("cpu_op", f"aten::op{i}", 110 + 70 * i, 60) for i in range(4)]),
        idle.LATE,
        "many short operators, and Python between them",
    ),
    "graph": (  # its own launch started both
        [launched(1, 0, name="cudaGraphLaunch"), *(kernel("gemm", start, 90, i, correlation=1) for i, start in GRAPH)],
        idle.QUEUE,
        "it had launched already",
    ),
    "queue": (pair(5), idle.UNKNOWN, "it had launched already"),
}


@pytest.mark.parametrize("name", WHY)
def test_why_the_gpu_idled(name, write, capsys):
    events, reason, meanwhile = WHY[name]
    path = write(events)
    found = idle_of(path, capsys)
    (gap,) = found["largest_gaps"]
    assert (gap["gap_us"], gap["reason"], gap["host"]) == (300, reason, meanwhile)
    assert found["reasons"] == [{"reason": reason, "gaps": 1, "ms": 0.3, "percent": 100}]
    assert found["launch_bound"] is {idle.LATE: True, idle.UNKNOWN: None}.get(reason, False)
    assert launches.main(["--trace-file", str(path)]) == 0 and reason in capsys.readouterr().out


ON_GPU = "start, end, globalPid, deviceId, streamId, correlationId"
DATABASES = {  # tables of GPU and host: as Nsight Systems exports them, and as rocpd's views look
    "nsys": (
        "CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT)",
        f"CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL ({ON_GPU}, demangledName)",
        f"CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY ({ON_GPU}, copyKind)",
        "CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start, end, globalTid, correlationId, nameId)",
    ),
    "rocpd": (
        "CREATE TABLE kernels (start, end, pid, agent_absolute_index, stream_id, stack_id, name)",
        "CREATE TABLE memory_copies (start, end, pid, dst_agent_absolute_index, stream_id, stack_id, name)",
        "CREATE TABLE regions (start, end, pid, tid, stack_id, name)",
    ),
}


def database_of(events, kind, path):
    """Write kernels, copies and the host's launches of a trace, which begins 10 ms after the clock, into a database.

    Another process called the same numbers at other times.
    """
    names = {}
    with contextlib.closing(sqlite3.connect(path)) as connection:
        for statement in DATABASES[kind]:
            connection.execute(statement)
        *_, kernels, copies, calls = [statement.split()[2] for statement in DATABASES[kind]]
        runtime = [event for event in events if event["cat"] == "cuda_runtime"]
        runtime += [event | {"pid": 8, "ts": event["ts"] - 5e3} for event in runtime]
        for event in [event for event in events if event["cat"] in ("kernel", "gpu_memcpy")] + runtime:
            times = (int(1e3 * (1e4 + event["ts"])), int(1e3 * (1e4 + event["ts"] + event["dur"])))
            number = event["args"].get("correlation")
            name = event["name"] + "_v7000" * (kind == "nsys" and event in runtime)
            if kind == "nsys":
                name = names.setdefault(name, len(names))
            if event in runtime:
                thread = (event["pid"] * 2**24 + 5, number) if kind == "nsys" else (event["pid"], 5, number)
                row = (*times, *thread, name)
            else:
                process = 9 * 2**24 if kind == "nsys" else 9
                row = (*times, process, 0, event["args"]["stream"], number, name)
            table = calls if event in runtime else copies if event["cat"] == "gpu_memcpy" else kernels
            connection.execute(f"INSERT INTO {table} VALUES ({', '.join('?' * len(row))})", row)
        if kind == "nsys":
            connection.executemany("INSERT INTO StringIds VALUES (?, ?)", [(i, name) for name, i in names.items()])
        connection.commit()
    return path


def rpd_of(events, path):
    """Write kernels, copies, the host's launches and operators of a trace into a database of rocmProfileData."""
    strings = {"": 1}
    with contextlib.closing(sqlite3.connect(path)) as connection:
        for table, columns in (
            ("rocpd_op", "id, gpuId, queueId, start, end, description_id, opType_id"),
            ("rocpd_api", "id, pid, tid, start, end, apiName_id, args_id"),
            ("rocpd_api_ops", "api_id, op_id"),
            ("rocpd_string", "id INTEGER PRIMARY KEY, string"),
        ):
            connection.execute(f"CREATE TABLE {table} ({columns})")
        for i, event in enumerate(events, 100):
            times = (int(1e3 * event["ts"]), int(1e3 * (event["ts"] + event["dur"])))
            number = event["args"].get("correlation", i)
            name = strings.setdefault(event["name"], len(strings) + 1)
            if event["cat"] in ("kernel", "gpu_memcpy"):
                kind = "KernelExecution" if event["cat"] == "kernel" else "CopyDeviceToHost"
                names = (name if event["cat"] == "kernel" else 1, strings.setdefault(kind, len(strings) + 1))
                row = (i, 0, event["args"]["stream"], *times, *names)
                connection.execute("INSERT INTO rocpd_op VALUES (?, ?, ?, ?, ?, ?, ?)", row)
                connection.execute("INSERT INTO rocpd_api_ops VALUES (?, ?)", (number, i))
            else:
                marker = strings.setdefault("UserMarker", len(strings) + 1)
                names = (marker, name) if event["cat"] == "cpu_op" else (name, 1)
                row = (number, event["pid"], event["tid"], *times, *names)
                connection.execute("INSERT INTO rocpd_api VALUES (?, ?, ?, ?, ?, ?, ?)", row)
        connection.executemany("INSERT INTO rocpd_string VALUES (?, ?)", [(i, word) for word, i in strings.items()])
        connection.commit()
    return path


def test_an_rpd_holds_kernels_copies_and_the_hosts_calls(tmp_path, capsys):
    """vLLM and SGLang are profiled with it on AMD's GPUs: it was "a database without kernel times"."""
    path = rpd_of(WHY["host"][0], tmp_path / "trace.rpd")
    found = idle_of(tmp_path, capsys)
    (gap,) = found["largest_gaps"]
    assert (found["busy_us"], gap["reason"], gap["host"]) == (140, idle.LATE, "aten::topk (100 %)")
    path.unlink()
    copy = rpd_of(WHY["item"][0], tmp_path / "copy.rpd")
    assert [(call.name, call.kind, call.gpu) for call in read_profile(copy).calls] == [
        ("CopyDeviceToHost", "copy", "0"),
        ("gemm", "kernel", "0"),
    ]
    assert idle_of(copy, capsys)["largest_gaps"][0]["reason"] == idle.COPY
    packed = tmp_path / "copy.rpd.gz"
    packed.write_bytes(gzip.compress(copy.read_bytes()))
    for main in (kernel_times.main, kernel_counters.main):
        refused(main, [packed], capsys, "is a packed database: unpack it with gunzip")


@pytest.mark.parametrize("name", ["loader", "stream", "event", "peer", "copy", "queue"])
@pytest.mark.parametrize("kind", DATABASES)
def test_why_the_gpu_idled_from_the_launches_in_a_database(kind, name, tmp_path, capsys):
    events, reason, meanwhile = WHY[name]
    found = idle_of(database_of(events, kind, tmp_path / "report.db"), capsys)
    (gap,) = found["largest_gaps"]
    assert (gap["gap_us"], gap["reason"], gap["host"]) == (300, reason, meanwhile)
    assert found["host_known"] and not found["warnings"] and not found["remarks"]


def test_between_the_calls_of_a_database_lies_not_only_python(tmp_path, capsys):
    calls = [host("cuda_runtime", f"cuCall{i}", 110 + 70 * i, 60) for i in range(4)]
    path = database_of(pair(390, between=calls), "nsys", tmp_path / "x.sqlite")
    (gap,) = idle_of(path, capsys)["largest_gaps"]
    assert gap["host"] == "many short calls, and unrecorded code"


def test_copies_of_an_export_tell_their_direction(tmp_path):
    path = database_of(pair(390), "nsys", tmp_path / "x.sqlite")
    with contextlib.closing(sqlite3.connect(path)) as connection:
        for kind in (1, 10, 12, 99):
            row = (10**8 + kind, 10**8 + kind, 9 * 2**24, 0, 7, None, kind)
            connection.execute("INSERT INTO CUPTI_ACTIVITY_KIND_MEMCPY VALUES (?, ?, ?, ?, ?, ?, ?)", row)
        connection.commit()
    found = [(call.name, call.group) for call in read_profile(path).calls if call.kind == "copy"]
    names = ("memcpy HtoD", "memcpy PtoP", "Unified Memory memcpy DtoH", "memcpy")
    groups = ("copies", "communication", "copies", "copies")
    assert found == [(f"[CUDA {name}]", group) for name, group in zip(names, groups, strict=True)]


@pytest.mark.parametrize("dropped", [("KERNEL", "MEMCPY"), ("KERNEL",)])
def test_an_export_with_launches_and_no_kernels_was_traced(dropped, tmp_path, capsys):
    """Copies alone may be left: they were called a step that is not launch-bound."""
    path = database_of(pair(390, first=("Memcpy DtoH", 1)), "nsys", tmp_path / "x.sqlite")
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE TARGET_INFO_GPU (id)")
        for table in dropped:
            connection.execute(f"DROP TABLE CUPTI_ACTIVITY_KIND_{table}")
        connection.commit()
    refused(kernel_times.main, [path], capsys, "holds 4 launches and none of their kernels: the profiler lost them")


@pytest.mark.parametrize("kind", DATABASES)
def test_without_the_hosts_calls_nobody_knows_why_the_gpu_idled(kind, tmp_path, capsys):
    path = database_of([event for event in pair(5) if event["cat"] == "kernel"], kind, tmp_path / "report.db")
    assert launches.main(["--trace-file", str(path)]) == 0
    told = capsys.readouterr().out
    assert "We can't tell why the GPU idled: the profile lacks the host's calls" in told
    assert "the GPU waited for" not in told


def test_a_verdict_says_what_fills_the_time_instead(write, capsys):
    path = write([kernel("gemm", 0, 30), kernel("ncclDevKernel_Generic", 30, 60), kernel("gemm", 95, 5)])
    assert idle_of(path, capsys)["verdict"].endswith("(bound: 25 %), but exposed communication takes 60 %")
    events = [kernel("Memcpy HtoD (Pageable -> Device)", 0, 60) | {"cat": "gpu_memcpy"}, kernel("gemm", 60, 40)]
    assert idle_of(write(events), capsys)["verdict"].endswith("(bound: 25 %), but exposed copies take 60 %")


def test_copies_alone_decide_nothing(write, capsys):
    path = write([kernel("Memset (Device)", 20 * i, 9) | {"cat": "gpu_memset"} for i in range(3)])
    found = idle_of(path, capsys, "--steps", "1")
    assert (found["launch_bound"], found["verdict"]) == (None, "no verdict: the profile holds copies and no kernel")


@pytest.mark.parametrize(("us", "bound"), [(900, True), (1100, None)])
def test_without_the_host_long_gaps_are_no_launches(us, bound, write, capsys):
    found = idle_of(write([kernel(GEMM, (100 + us) * i, 100) for i in range(3)]), capsys, "--steps", "1")
    assert found["launch_bound"] is bound and ("over 1000 us" in found["verdict"]) == (bound is None)


@pytest.mark.parametrize(("us", "late"), [(2000, True), (200_000, False)])
def test_a_host_that_loads_data_is_not_bound_by_launches(us, late, write, capsys):
    """Twenty gaps of 100 us are the launches' time, or of 10 ms: then the host does something else after its copy."""
    events = []
    for i in range(21):
        events += [launched(2 * i, us / 20 * i), launched(2 * i + 1, us / 20 * i + 4.5, name="hipMemcpyWithStream")]
        events.append(kernel(GEMM, us / 20 * i + 3, 2, correlation=2 * i))
        events.append(kernel("Memcpy DtoH", us / 20 * i + 5, 1, correlation=2 * i + 1) | {"cat": "gpu_memcpy"})
    events += [host("cpu_op", "enumerate(DataLoader)#x.__next__", us / 20 * i + 7, us / 20 - 9) for i in range(20)]
    found = idle_of(write(events), capsys, "--steps", "1")
    assert found["launch_bound"] is False and ("late by more than" in found["verdict"]) != late
    assert found["largest_gaps"][0]["reason"] == (idle.COPY if late else idle.LATE)


VERDICTS = {  # what is more or less than half: the verdict at the bound, and beyond it
    "paused": ({"paused_us": 1000}, True, {"paused_us": 1001}, None),
    "share": ({"idle_share": 0.25}, False, {"idle_share": 0.251}, True),
    "unsure": ({"unsure_us": 500}, True, {"unsure_us": 501}, None),
    "unsure share": ({"idle_share": 0.25, "unsure_us": 501}, False, {"idle_share": 0.251, "unsure_us": 501}, None),
    "long": ({"host_known": False, "long_us": 500}, True, {"host_known": False, "long_us": 501}, None),
    "late": ({"late_us": 500}, True, {"late_us": 501}, False),
    "late in half": (
        {"late_us": 501, idle.LATE: 50, idle.UNKNOWN: 50},
        False,
        {"late_us": 501, idle.LATE: 49, idle.UNKNOWN: 51},
        None,
    ),
    "launched late": ({idle.LATE: 50}, True, {idle.LATE: 49, idle.UNKNOWN: 30, idle.QUEUE: 21}, False),
    "unknown": ({idle.LATE: 0, idle.UNKNOWN: 50}, None, {idle.LATE: 0, idle.UNKNOWN: 49}, False),
}


@pytest.mark.parametrize("name", VERDICTS)
def test_bounds_of_the_verdict_on_idle_time(name):
    at_bound, wanted, beyond, other = VERDICTS[name]
    busy = {"whole_ms": 1, "exposed_copies_ms": 0, "exposed_communication_ms": 0}
    for given, bound in ((at_bound, wanted), (beyond, other)):
        found = {"idle_us": 1000, "idle_share": 0.5, "host_known": True, "warnings": [], "per_step": [busy]}
        found["warm_up"] = None
        found |= dict.fromkeys(("paused_us", "unsure_us", "long_us", "late_us"), 0) | given
        reasons = {idle.LATE: 100} | {reason: given[reason] for reason in idle.REASONS if reason in given}
        found["reasons"] = [{"reason": reason, "percent": percent} for reason, percent in reasons.items()]
        assert idle.verdict(found)[0] is bound


@pytest.mark.parametrize(("early", "differ"), [(2, False), (3, True)])
def test_clocks_that_differ_tell_nothing(early, differ, write, capsys):
    """Of 100 kernels some start before the host launches them: 2 % may be rounded times."""
    events = []
    for i in range(100):
        events += [launched(i, 100 * i + (20 if i < early else 0)), kernel("a", 100 * i + 10, 40, correlation=i)]
    found = idle_of(write(events), capsys)
    assert (found["reasons"][0]["reason"] == idle.UNKNOWN) is differ
    assert ["clocks" in warning for warning in found["warnings"]] == [True] * differ


def test_the_time_of_a_step_adds_up(write, capsys):
    """Computing from 0 to 100, a copy from 50 to 150, a collective from 120 to 250, nothing until 300."""
    copy = kernel("Memcpy HtoD", 50, 100, 2) | {"cat": "gpu_memcpy"}
    events = [kernel("gemm", 0, 100), copy, kernel("ncclDevKernel_AllReduce", 120, 130, 3), kernel("gemm", 300, 100)]
    path = write(events)
    (row,) = idle_of(path, capsys, "--steps", "1")["per_step"]
    keys = ("whole", "busy", "computing", "exposed_copies", "exposed_communication", "idle")
    assert [round(row[f"{key}_ms"], 6) for key in keys] == [0.4, 0.35, 0.2, 0.05, 0.1, 0.05]


# ---------------------------------------------------------------- matmuls by shape


def test_matmuls_by_shape_by_hand(write, capsys, tmp_path, monkeypatch):
    """Two shapes of 137 GFLOP and 2 GFLOP: the first at 687 and 344 TFLOP/s of 1,307, the second at 21."""
    monkeypatch.chdir(tmp_path)
    events = [mark("ProfilerStep#1", 0, 5000)]
    for number, (size, us) in enumerate([(4096, 200), (4096, 400), (1024, 100)], 1):
        events.append(matmul(number, [[size, size], [size, size]]))
        events.append(kernel(GEMM, 1000 * number, us, **{"External id": number}))
    path = write(events)
    found = result_of(gemm_operations.main, ["--trace-file", path], capsys)["gemms"]
    rows = [(row["m"], row["calls"], row["precision"], round(row["tflops"])) for row in found]
    assert rows == [(4096, 2, "bfloat16", 458), (1024, 1, "bfloat16", 21)]
    assert [round(found[0][key]) for key in ("low", "high")] == [429, 601]
    assert found[0]["of_peak"] == pytest.approx(2 * 2 * 4096**3 / 600e-6 / 1307.4e12)
    content = result_of(bottlenecks.main, ["--profile-data", path, "--output-report", "page.html"], capsys)
    assert content["matmuls"]["gemms"] == found and content["idle"]["steps"] == 1
    page = (tmp_path / "page.html").read_text()
    assert "<html" in page and "1x4096x4096x4096" in page and "the GPU waited for" not in page
    (row, _) = result_of(gemm_operations.main, ["--trace-file", path, "--peak", "1000,5"], capsys)["gemms"]
    assert row["of_peak"] == pytest.approx(row["tflops"] / 1000)


SIZES = [  # of operators: batch, m, k, n
    ("aten::bmm", [[6, 2, 3], [6, 3, 4]], (6, 2, 3, 4)),
    ("aten::addmm", [[4], [2, 3], [3, 4]], (1, 2, 3, 4)),
    ("aten::linear", [[5, 2, 3], [4, 3], [4]], (1, 10, 3, 4)),
    ("aten::mm", [[2, 3], [5, 4]], None),
    ("aten::mm", [[0, 3], [3, 4]], None),
    ("aten::mm", [], None),
    ("aten::add", [[2, 3], [3, 4]], None),
]


@pytest.mark.parametrize(("name", "dims", "sizes"), SIZES)
def test_the_sizes_of_a_matmul(name, dims, sizes):
    assert gemms.sizes_of(Operation(name, "GEMM", 1.0, dims, ["float"] * 3, dims, ("gemm",))) == sizes


def test_what_a_table_of_matmuls_cannot_tell_is_said(write):
    """The small one loses most: 89 us of 90, the large one 60 of 165. One is too fast for its device."""
    events = []
    for number, (kind, size, us) in enumerate([("c10::BFloat16", 4096, 165), ("c10::Half", 1024, 90)], 1):
        events += [matmul(number, [[size, size]] * 2, kind), kernel("g", 500 * number, us, **{"External id": number})]
    events.append(kernel("gemm", 5000, 40))
    found = gemms.gemm_results(read_profile(write(events)))
    assert [row["m"] for row in found["gemms"]] == [1024, 4096]
    assert found["remarks"] == ["0.040 ms of matmuls have no recorded shapes, so they aren't in this table."]
    conv = matmul(7, [[1, 3, 8, 8], [4, 3, 3, 3]]) | {"name": "aten::cudnn_convolution"}
    conv = [conv, kernel("implicit_convolve_sgemm", 6000, 30, **{"External id": 7})]
    found = gemms.gemm_results(read_profile(write([*events[:2], *conv])))
    assert found["remarks"][0] == "0.030 ms of convolutions aren't in this table: it rates matmuls alone."
    assert gemms.no_gemms(read_profile(write(conv))) == "There is no matmul in it, only convolutions."
    found = gemms.gemm_results(read_profile(write(events)), {"matmul_tflops": 100})
    assert [row["peak_tflops"] for row in found["gemms"]] == [None, 100]  # --peak is that of the main precision
    assert [row["lost_ms"] for row in found["gemms"]] == [None, 0]
    assert any(remark.startswith("A rate is above the peak") for remark in found["remarks"])
    assert not any(remark.startswith("We don't know the peak") for remark in found["remarks"])  # of one we do
    whole, part = [{"name": "AMD Instinct MI300X", "numSms": units} for units in (304, 38)]  # part: in CPX mode
    assert (
        gemms.gemm_results(read_profile(write(events, deviceProperties=[whole])))["gemms"][0]["peak_tflops"] == 1307.4
    )
    profile = read_profile(write(events, deviceProperties=[part]))
    assert gemms.gemm_results(profile)["gemms"][0]["peak_tflops"] is None
    assert "of AMD Instinct MI300X (38 of 304 compute units) are not known" in roofline.ceilings_for(profile)[1]
    found = gemms.gemm_results(read_profile(write(events, deviceProperties=[])))
    assert any(
        remark.startswith("We don't know the peak of this device in these precisions") for remark in found["remarks"]
    )


@pytest.mark.parametrize("name", ["page.html", "page.md"])
def test_page_and_screen_show_time_reasons_gaps_and_matmuls(name, write, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    launch = matmul(5, [[64, 32], [32, 16]]) | {"ts": 389, "dur": 9}
    path = write([*pair(390, between=[host("cpu_op", "aten::topk", 90, 300)]), launch])
    assert bottlenecks.main(["--profile-data", str(path), "--steps", "1", "--output-report", name]) == 0
    for told in (capsys.readouterr().out, (tmp_path / name).read_text()):
        words = ["exposed copies", "the GPU waited for", "longest gaps after", "aten::topk (100 %)", "1x64x32x16"]
        assert [word for word in words if word not in told] == []
    path = write([kernel(GEMM, 0, 9), kernel(GEMM, 20, 9)])
    assert bottlenecks.main(["--profile-data", str(path), "--steps", "1", "--output-report", name]) == 0
    for told in (capsys.readouterr().out, (tmp_path / name).read_text()):
        assert "tell why the GPU idled" in told and "No matmul has recorded shapes" in told


def test_without_shapes_there_is_no_table(write, capsys):
    slow = [matmul(1, [[8, 8], [8, 8]]), kernel(GEMM, 99, 50, **{"External id": 1})]  # 20 MFLOP/s are no 0.0
    assert gemm_operations.main(["--trace-file", str(write(slow))]) == 0
    assert "0.0000205 to 0.0000205" in capsys.readouterr().out
    path = write([kernel(GEMM, 0, 9)])
    refused(gemm_operations.main, ["--trace-file", path], capsys, "no matmul has recorded shapes")
    refused(bandwidth.main, ["--profile-data", path, "--steps", 1, "--peak", "1,1"], capsys, "record_shapes=True")
    path = write([kernel("vectorized_elementwise_kernel", 0, 9)])
    refused(gemm_operations.main, ["--trace-file", path], capsys, "there is no matmul in it")
    refused(gemm_operations.main, [], capsys, "give --model-config YAML")


# ---------------------------------------------------------------- seen in other people's files


def kernel_csv(path, *names):
    rows = [f'"{name}",{1000 * i},{1000 * i + 900}' for i, name in enumerate(names)]
    path.write_text("\n".join(["Kernel_Name,Start_Timestamp,End_Timestamp", *rows, ""]))
    return path


def test_a_file_without_operators_may_hold_matmuls(tmp_path, capsys):
    """A CSV with 78 % of its time in matmuls was said to have none."""
    path = kernel_csv(tmp_path / "x_kernel_trace.csv", "mul_mat_q<(ggml_type)12, 128, false>", "rms_norm_f32<1024>")
    refused(gemm_operations.main, ["--trace-file", path], capsys, "without operators, so its matmuls have no shapes")
    path = kernel_csv(tmp_path / "y_kernel_trace.csv", "rms_norm_f32<1024>")
    refused(gemm_operations.main, ["--trace-file", path], capsys, "there is no matmul in it")


def test_where_kernels_were_lost_nobody_knows_whether_one_was_a_matmul(write, capsys):
    events = [launched(i, 10 * i) for i in range(9)] + [kernel("FillFunctor", 5, 3, correlation=0)]
    words = "there is no matmul in it. 8 of 9 launches have no kernel"
    refused(gemm_operations.main, ["--trace-file", write(events)], capsys, words)


def test_a_launch_bound_step_may_wait_longer_for_other_ranks(write, capsys, tmp_path, monkeypatch):
    """Idle for 30 of 100 us, and 60 in a collective that nothing hides."""
    monkeypatch.chdir(tmp_path)
    events = [launched(1, 0), launched(2, 40), launched(3, 99 - 1)]
    events += [kernel("gemm", 1, 5, correlation=1), kernel("ncclDevKernel_Generic", 36, 60, correlation=2)]
    events[1]["ts"] = 35  # 30 us late
    events.append(kernel("gemm", 99, 2, correlation=3))
    path = write(events)
    verdict = idle_of(path, capsys, "--steps", "1")["verdict"]
    assert verdict.startswith("launch-bound") and verdict.endswith("but exposed communication takes 60 %")
    found = result_of(bottlenecks.main, ["--profile-data", path, "--steps", 1], capsys)
    assert found["waiting"][0].startswith("Exposed communication takes 60 % of the time, and the GPU waits 33 %.")


@pytest.mark.parametrize(
    ("first", "us", "later", "verdict"),
    [
        (1000, 40, "86 % of the idle time. Without it the GPU waits 50.0 %", "launch-bound: the GPU waits 84.6 %"),
        (1000, 80, "97 % of the idle time. Without it the GPU waits 10.0 %", "not launch-bound: the GPU waits 10.0 %"),
        (100, 40, None, "launch-bound: the GPU waits 49.7 %"),
    ],
)
def test_a_first_step_that_warms_up_decides_nothing(first, us, later, verdict, write, capsys, tmp_path, monkeypatch):
    """Three steps of 100 us wait for 50 or 10, and the first one for almost all of 1000."""
    monkeypatch.chdir(tmp_path)
    busy = us
    events = []
    for i, (start, us) in enumerate([(0, first), *((first + 100 * i, 100) for i in range(3))]):
        events += [
            mark(f"ProfilerStep#{i}", start, us),
            launched(2 * i, start),
            launched(2 * i + 1, start + us - busy - 5),
        ]
        events.append(kernel("gemm", start + 2, 10, correlation=2 * i))
        events.append(kernel("gemm", start + us - busy, busy, correlation=2 * i + 1))
    path = write(events)
    found = idle_of(path, capsys)
    told = [remark for remark in found["remarks"] if "warm-up" in remark]
    assert told == ([f"Step 1 looks like a warm-up: it holds {later} of the time."] if later else [])
    assert found["verdict"].startswith(verdict)
    page = result_of(bottlenecks.main, ["--profile-data", path], capsys)
    assert bool(page["waiting"]) == found["launch_bound"]


def test_the_launches_of_an_intel_gpu_are_known(write, capsys):
    """They have a category of their own, and so do its waits."""
    events = [host("xpu_runtime", "urEnqueueKernelLaunch", 0, 3, correlation=1), kernel("gemm", 5, 95, correlation=1)]
    events += [host("xpu_runtime", "urEventWait", 4, 99), host("cpu_op", "aten::topk", 105, 280)]
    events += [host("xpu_runtime", "urEnqueueKernelLaunch", 390, 3, correlation=2)]
    events.append(kernel("gemm", 400, 100, correlation=2))
    found = idle_of(write(events, deviceProperties=[]), capsys)
    (gap,) = found["largest_gaps"]
    assert found["host_known"] and (gap["reason"], gap["host"]) == (idle.LATE, "aten::topk (97 %)")


def test_a_trace_of_proton_has_a_line_per_stream(tmp_path):
    """Triton's profiler writes an object per stream."""
    lines = []
    for stream in (7, 9):
        event = {"name": "matmul", "cat": "kernel", "ph": "X", "ts": 20.0 * stream, "dur": 5.0, "tid": stream}
        lines.append(json.dumps({"displayTimeUnit": "us", "traceEvents": [event | {"args": {"call_stack": ["ROOT"]}}]}))
    path = tmp_path / "proton.chrome_trace"
    path.write_text("\n".join(lines) + "\n")
    calls = read_profile(path).calls
    assert [(call.stream, call.total_ns, call.group) for call in calls] == [(7, 5000, "GEMM"), (9, 5000, "GEMM")]


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.json", '{"metrics": 1}', "it has no traceEvents): give what torch.profiler's export_chrome_trace writes"),
        ("a.json", '{"a": 1}\n{"a": 2}\n', "is cut off or damaged: Extra data"),
        ("a.xplane.pb", "\n\x05\0abc", "is a profile of JAX or TensorFlow: record the program with nsys or rocprofv3"),
        (  # PyTorch 1.7, among others, wrote events without categories
            "a.json",
            '{"traceEvents": [{"ph": "X", "ts": 1}]}',
            "1 events, none of a kind that PyTorch's profiler writes: record a PyTorch program with torch.profiler, "
            "and another one with nsys or",
        ),
        ("a.json", '{"schemaVersion": 1, "traceEvents": []}', "saw no work on a GPU, so record steps that use one"),
    ],
)
def test_what_is_not_read_tells_the_way_out(name, text, words, tmp_path, capsys):
    (tmp_path / name).write_text(text)
    refused(kernel_times.main, [tmp_path / name], capsys, words)


def test_the_number_of_a_kernel_is_no_counter(tmp_path):
    """rocprof-compute joins its passes, and repeats a column of each."""
    path = tmp_path / "pmc_perf.csv"
    header = "Dispatch_ID,GPU_ID,Kernel_Name,Correlation_ID,Kernel_ID,SQ_WAVES,Kernel_ID_1,SQ_WAIT_ANY"
    path.write_text(f"{header}\n0,0,gemm,1,11,64,11,7\n")
    rows, _ = kernel_counters.read_counters(path)
    assert [(row["counter"], row["mean"]) for row in rows] == [("SQ_WAVES", 64), ("SQ_WAIT_ANY", 7)]


def ncu_details(path, *rows):
    """Write ncu --csv: a row per launch and metric, each with a unit that suits its value."""
    header = '"ID","Kernel Name","Section Name","Metric Name","Metric Unit","Metric Value"'
    lines = [",".join(f'"{cell}"' for cell in row) for row in rows]
    path.write_text("\n".join([header, *lines, ""]))
    return path


def test_units_that_differ_from_kernel_to_kernel_are_made_one(tmp_path, capsys):
    """Ten microseconds were 10 ms, the longest kernel, and 900 GB/s were 900 TB/s."""
    rows = [(0, "small", "Speed", "Duration", "us", "10.00"), (0, "small", "Memory", "Rate", "Gbyte/second", "900")]
    rows += [(1, "big", "Speed", "Duration", "ms", "1.20"), (1, "big", "Memory", "Rate", "Tbyte/s", "1.5")]
    rows += [(2, "small", "Speed", "Duration", "nsecond", "30,000"), (2, "small", "Speed", "Rate", "%", "42")]
    path = ncu_details(tmp_path / "ncu.csv", *rows)
    found = {(row["kernel"], row["counter"], row["unit"]): row for row in kernel_counters.read_counters(path)[0]}
    rates = {("small", "Rate", "Gbyte/second"): 900, ("big", "Rate", "Gbyte/second"): 1500}
    times = {("small", "Duration", "us"): 20, ("big", "Duration", "us"): 1200}
    means = times | rates | {("small", "Rate", "%"): 42}
    assert {key: row["mean"] for key, row in found.items()} == pytest.approx(means)
    assert found["small", "Duration", "us"]["launches"] == 2
    assert kernel_counters.main([str(path)]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "[1] Duration us [2] Rate Gbyte/second [3] Rate %" in told
    assert "big 1 1,200.0 1,500.0 - small 2 20.0 900.0 42.0" in told


def test_a_summary_of_ncu_is_refused_with_the_way_out(tmp_path, capsys):
    path = tmp_path / "ncu.csv"
    header = '"Kernel Name","Invocations","Metric Name","Metric Unit","Minimum","Maximum","Average"'
    path.write_text(f'{header}\n"k","14","Duration","us","1","3","2"\n')
    refused(kernel_counters.main, [path], capsys, "is a summary over launches: write it without --print-summary")


TABLES_TO_READ = {
    "nsys": "\n ** CUDA GPU Kernel Summary:\n\n Time (%)  Total Time (ns)  Name\n --------  ---------------  ----\n"
    "    95.0        3,481,709  k\n",
    "ncu": "==PROF== Connected\nrow sums correct!\n  k(int), Context 1, Stream 7\n    Section: Speed\n"
    "    ------------ ----------- ------------\n    Duration         msecond         3.10\n",
    "rocprof-sys": "|-----------------------|\n| REAL-CLOCK TIMER      |\n|-----------------------|\n| LABEL |\n",
    "rocprof-compute": "0. Top Stats\n╒════╤═══════════╕\n│    │ Kernel    │\n╘════╧═══════════╛\n",
}


@pytest.mark.parametrize("name", TABLES_TO_READ)
def test_a_table_to_read_is_not_called_damaged(name, tmp_path, capsys):
    """Unless they are asked for CSV, nsys stats, ncu and rocprof-compute print such tables."""
    (tmp_path / "table.txt").write_text(TABLES_TO_READ[name])
    for main in (kernel_times.main, kernel_counters.main):
        words = "is a table to read, not CSV: write it with nsys stats --format csv or ncu --csv"
        refused(main, [tmp_path / "table.txt"], capsys, words)


def test_what_a_program_printed_before_ncus_table_is_no_header(tmp_path):
    path = ncu_details(tmp_path / "ncu.csv", (0, "k", "Speed", "Duration", "us", "10.00"))
    path.write_text("==PROF== Connected\nstep 1, loss 3.21, 8 GPUs\nstep    loss\n------ -----\n" + path.read_text())
    assert [row["mean"] for row in kernel_counters.read_counters(path)[0]] == [10]


@pytest.mark.parametrize("ts", [0, "1699529623106750.221"])
def test_a_trace_of_an_npu_is_neither_a_cpus_nor_damaged(ts, tmp_path, capsys):
    """torch_npu writes operators as PyTorch does, kernels without a category, and some times as text."""
    events = [
        matmul(1, [[8, 8], [8, 8]]) | {"ts": ts},
        {"ph": "s", "cat": "async_npu", "name": "torch_to_npu", "ts": 5},
    ]
    events.append({"ph": "X", "name": "MatMul", "pid": 4, "tid": 3, "ts": ts, "dur": 9})
    path = tmp_path / "trace_view.json"
    path.write_text(json.dumps(events))
    refused(kernel_times.main, [path], capsys, "an accelerator that this tool can't read (async_npu)")


@pytest.mark.parametrize(("column", "told"), [("VALUBusy", True), ("DurationNs", False)])
def test_counters_of_the_old_rocprof_have_any_name(column, told, tmp_path, capsys):
    """The derived ones don't begin with a block of the GPU; what stands beside the times is none."""
    path = tmp_path / "results.csv"
    header = f"Index,KernelName,gpu-id,queue-id,pid,sig,obj,{column},DispatchNs,BeginNs,EndNs,CompleteNs"
    rows = [f"{i},gemm,0,0,7,0x0,0x7f,81.2,{1000 * i},{1000 * i},{1000 * i + 500},{1000 * i + 600}" for i in range(3)]
    path.write_text("\n".join([header, *rows, ""]))
    assert any("its kernels ran one by one" in words for words in idle_of(path, capsys)["warnings"]) == told
    if not told:
        refused(kernel_counters.main, [path], capsys, "has no counters that this tool can read")


def test_a_kernels_only_number_may_be_its_launchs(write, capsys):
    """Some builds for ROCm write no correlation: the number of a launch was taken for that of another operator."""
    small, large = matmul(1, [[64, 64]] * 2), matmul(2, [[128, 128]] * 2)
    events = [small, large | {"ts": 60}]
    for number, ts in ((2, 10), (4, 70)):
        events.append(host("cuda_runtime", "hipExtModuleLaunchKernel", ts, 5, **{"External id": number}))
        events.append({"ph": "X", "cat": "kernel", "name": GEMM, "pid": 2, "tid": 0, "ts": ts + 10, "dur": number})
        events[-1]["args"] = {"External id": number}
    path = write(events)
    rows = result_of(gemm_operations.main, ["--trace-file", path], capsys)["gemms"]
    assert {row["m"]: row["ms"] for row in rows} == pytest.approx({64: 0.002, 128: 0.004})
    found = idle_of(path, capsys)
    assert found["host_known"] and found["largest_gaps"][0]["reason"] == idle.LATE


def test_what_ran_before_the_first_step_is_no_warm_up():
    rows = [{"step": name, "whole_ms": ms, "idle_ms": ms / 2} for name, ms in (("before", 90), ("1", 9), ("2", 9))]
    rows.append({"step": "all", "whole_ms": 108, "idle_ms": 54})
    assert idle.warm_up(rows) is None
    assert idle.warm_up([rows[0] | {"step": "1"}, *rows[1:]])["held_percent"] == pytest.approx(100 * 45 / 54)


WARM_UPS = {  # ms of the first step, its idle time, the whole time of later ones: is it a warm-up?
    "twice as long": (16, 9, (8, 8, 8), False),
    "longer": (16.1, 9, (8, 8, 8), True),
    "half of the idle time": (16.1, 6, (8, 8, 8), False),
    "more than half": (16.1, 6.1, (8, 8, 8), True),
    "two steps": (16.1, 9, (8,), False),
    "three steps": (16.1, 9, (8, 8), True),
    "of most steps": (16.1, 9, (1, 8, 90), True),
}


@pytest.mark.parametrize("name", WARM_UPS)
def test_a_warm_up_holds_most_idle_time_and_takes_twice_as_long_as_most_steps(name):
    whole_ms, idle_ms, others, is_one = WARM_UPS[name]
    rows = [{"step": "1", "whole_ms": whole_ms, "idle_ms": idle_ms}]
    rows += [{"step": str(i), "whole_ms": ms, "idle_ms": 6 / len(others)} for i, ms in enumerate(others, 2)]
    rows.append({"step": "all", "whole_ms": whole_ms + sum(others), "idle_ms": idle_ms + 6})
    found = idle.warm_up(rows)
    assert (found is not None) is is_one
    if is_one:
        assert found["idle_share_later"] == pytest.approx(6 / sum(others))


@pytest.mark.parametrize(
    ("later", "stream", "impossible"), [(10, 1, True), (9, 1, False), (10, 2, False), (99, 2, False)]
)
def test_kernels_of_two_streams_in_one_queue_may_overlap(later, stream, impossible, tmp_path, capsys):
    """rocprofv3's Stream_Id: a long kernel of stream 1 is no wrong time where ten of another end before it."""
    rows = ["Kernel_Name,Queue_Id,Stream_Id,Start_Timestamp,End_Timestamp", "long,1,1,0,1000000"]
    rows += [f"short,1,{stream},{1000 * i},{1000 * i + 900}" for i in range(1, later + 1)]
    path = tmp_path / "x_kernel_trace.csv"
    path.write_text("\n".join([*rows, ""]))
    warnings = idle_of(path, capsys)["warnings"]
    assert ["impossible times" in warning for warning in warnings] == [True] * impossible


@pytest.mark.parametrize(
    ("main", "text"),
    [
        (
            kernel_times,
            '"Type","Time(%)","Time","Calls","Avg","Min","Max","Name"\n"GPU activities",50,10,1,10,10,10,"k"\n',
        ),
        (launches, "Total Time (ns),Instances,Min (ns),Max (ns),Name\n500,1,500,500,k\n"),
    ],
)
def test_tables_of_nvidias_profilers_name_their_own_way_out(main, text, tmp_path, capsys):
    (tmp_path / "x.csv").write_text(text)
    option = ["--trace-file"] if main is launches else []
    words = "give a kernel_trace file, or nsys stats --report cuda_gpu_trace --format csv"
    refused(main.main, [*option, tmp_path / "x.csv"], capsys, words)
