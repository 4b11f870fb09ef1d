"""Numbers that decide what is said of a profile: just below each of them, and just above."""

import os
from types import SimpleNamespace

import pytest

from common.profiles import csv_files, gemms, idle, launches, limits, roofline
from common.profiles.model import Kernel, Launch, Operation, Profile, overruns


@pytest.mark.parametrize(("missing", "told"), [(5, False), (6, True)])
def test_a_twentieth_of_the_dispatches_may_be_missing(missing, told):
    """They were written at the profile's edges; the first and the last number are there."""
    numbers = [1, *range(2 + missing, 101)]
    found = list(csv_files.missing_dispatches([{"dispatch": str(number), "process": "7"} for number in numbers]))
    assert [f"{missing} of 100 dispatches" in words for words in found] == [True] * told


def test_dispatches_are_counted_for_each_process():
    rows = [
        {"dispatch": str(number), "process": process} for process, number in (("7", 1), ("7", 2), ("9", 50), ("9", 52))
    ]
    (found,) = csv_files.missing_dispatches(rows)
    assert found.startswith("1 of 5 dispatches aren't in this file")


@pytest.mark.parametrize(("lost", "told"), [(5, False), (6, True)])
def test_a_twentieth_of_the_launches_may_lack_a_kernel(lost, told):
    runtime = [{"name": "cudaLaunchKernel", "ts": i, "dur": 1, "args": {"correlation": i}} for i in range(100)]
    found = list(launches.lost_kernels(runtime, set(range(100 - lost))))
    assert [f"{lost} of 100 launches have no kernel" in words for words in found] == [True] * told


@pytest.mark.parametrize(("lacking", "told"), [(1, False), (2, True)])
def test_a_twentieth_of_the_replays_may_lack_a_kernel(lacking, told):
    """Of twenty, whose kernels are two; what is lost is the last one."""
    runtime = [{"name": "cudaGraphLaunch", "ts": i, "args": {"correlation": i}} for i in range(20)]
    kernels = []
    for i in range(20):
        for name in ("a", "b")[: 1 if i < lacking else 2]:
            kernels.append({"name": name, "args": {"correlation": i, "graph id": 3}})
    warnings, _ = launches.lost_in_replays(runtime, kernels)
    assert [f"{lacking} of 20 replays lack kernels" in words for words in warnings] == [True] * told


@pytest.mark.parametrize(("later", "graph", "found"), [(10, False, 1), (9, False, 0), (10, True, 0)])
def test_a_kernel_that_ends_after_ten_later_ones_has_a_wrong_time(later, graph, found):
    launch = Launch(0.0, 1.0, 9, is_graph=graph)
    calls = [Kernel("long", 0.0, 1e6, stream=1, launch=launch)]
    calls += [Kernel("short", 1e3 * i, 900.0, stream=1, launch=launch) for i in range(1, later + 1)]
    assert len(overruns(calls)) == found
    calls[-1] = calls[-1]._replace(start_ns=1e6 - 900.0)  # the last one ends as the long one does
    assert overruns(calls) == ()


@pytest.mark.parametrize(("seconds", "told"), [(3590, False), (3610, True)])
def test_ceilings_of_now_are_doubted_for_a_trace_that_is_an_hour_old(seconds, told, tmp_path, monkeypatch):
    path = tmp_path / "trace.json"
    path.touch()
    os.utime(path, (1e9, 1e9))
    monkeypatch.setattr(roofline.time, "time", lambda: 1e9 + seconds)
    found = roofline.doubts(SimpleNamespace(path=path, on_cpu=False))
    assert ["hours old" in words for words in found] == [True] * told


@pytest.mark.parametrize(("us", "told"), [(1.001, False), (0.999, True)])
def test_a_rate_above_the_peak_is_said(us, told):
    """2 GFLOP within 1 us are 2,000 TFLOP/s."""
    flops = 2 * 1000 * 1000 * 1000
    one = Operation(
        "aten::mm", "GEMM", us * 1000, [[1000, 1000], [1000, 1000]], ["c10::BFloat16"] * 2, [[], []], ("gemm",)
    )
    profile = Profile("a trace", [Kernel("gemm", 0.0, 1e6)], [one], steps=1)
    found = gemms.gemm_results(profile, {"matmul_tflops": flops / 1e9})
    assert any(words.startswith("A rate is above the peak") for words in found["remarks"]) is told


@pytest.mark.parametrize(
    ("values", "limit"),
    [
        ({"memory": 60.0}, "memory bandwidth"),
        ({"memory": 59.9, "compute": 0.0}, "latency"),
        ({"memory": 70.0, "matrix": 70.0}, "memory bandwidth"),
        ({"memory": 70.0, "matrix": 70.1}, "matrix units"),
        ({"memory": 0.0, "compute": 60.0}, "compute units"),
        ({"memory": 0.0, "compute": 59.9, "occupancy": 29.9}, "latency, few waves"),
        ({"memory": 0.0, "compute": 59.9, "occupancy": 30.0}, "latency"),
    ],
)
def test_a_unit_limits_a_kernel_from_60_percent_of_its_peak_on(values, limit):
    assert limits.limit_of(dict.fromkeys(limits.COLUMNS) | values) == limit


@pytest.mark.parametrize(("early", "of", "differ"), [(2, 100, False), (3, 100, True), (1, 50, False), (1, 49, True)])
def test_clocks_differ_if_more_than_two_percent_of_the_kernels_start_before_their_launch(early, of, differ):
    calls = [Kernel("a", 1e3 * i, 1.0, launch=Launch(1e3 * i + (1 if i < early else 0), 0, 9)) for i in range(of)]
    assert idle.clocks_differ(SimpleNamespace(calls=calls)) is differ
