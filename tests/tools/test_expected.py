"""maintain/expected.py: ratios of other GPUs, predicted from data sheets; maintain/traces.py: what is in two traces."""

import gzip
import json
from types import SimpleNamespace

import pytest

from common import counts
from conftest import event
from maintain import expected, traces


def record_of(device, times):
    """Return a recorded run with step times by (model, precision)."""

    def row(model, preset, precision):
        assert preset == "medium"
        step = times.get((model, precision))
        return step and {"step_ms": step}

    return SimpleNamespace(suite=lambda: {"record": {"device": device}}, row=row)


def test_a_prediction_divides_roofline_times(monkeypatch):
    monkeypatch.setitem(counts.PEAK_TFLOPS, "H200", {"bfloat16": 1e9, "float32": 1e9})
    monkeypatch.setitem(counts.BANDWIDTH_TB_S, "H200", 1.0)  # nothing but bytes counts
    sizes = counts.Sizes(B=16, T=512, C=1024, H=16, K=8, D=64, F=4096, V=1000, L=12)

    def moved(version, precision):
        return counts.total(counts.step_counts(version, precision, sizes), "bytes")

    found = expected.predicted_ratios("H200")
    assert list(found.values()) == pytest.approx(
        [
            moved(1, "float32") / moved(1, "bfloat16"),
            moved(1, "bfloat16") / moved(2, "bfloat16"),
            moved(1, "bfloat16") / moved(3, "bfloat16"),
        ]
    )


def test_compute_alone_is_the_ratio_of_the_peaks(monkeypatch):
    peaks = {"bfloat16": 8e-3, "float32": 1e-3}
    monkeypatch.setitem(counts.PEAK_TFLOPS, "A100", peaks)
    monkeypatch.setitem(counts.BANDWIDTH_TB_S, "A100", 1e9)
    found = expected.predicted_ratios("A100")["V1 fp32 / bf16"]
    assert 7.5 < found < 8  # the element-wise work stays in float32


def test_measured_and_predicted_ratios_are_marked():
    recorded = record_of("NVIDIA H200", {("v1", "float32"): 300, ("v1", "bfloat16"): 100, ("v3", "bfloat16"): 25})
    lines = expected.expected_table(recorded).splitlines()[2:]
    assert lines[0] == "| H200 | measured | 3.00 | ... | 4.00 |"
    assert lines[1].startswith("| H200 | predicted |") and len(lines) == 1 + len(counts.PEAK_TFLOPS)
    assert sum("| predicted |" in line for line in lines) == len(counts.PEAK_TFLOPS)


def test_without_a_known_gpu_or_a_measurement_there_is_no_table():
    assert expected.expected_table(record_of("x86_64", {("v1", "float32"): 1, ("v1", "bfloat16"): 1})) is None
    assert expected.expected_table(record_of("NVIDIA H200", {})) is None


# ---------------------------------------------------------------- traces


def write_trace(path, kernels, graph=False):
    """Write a trace of kernels (name, start, us), each launched 4 us before it or all by one call at 1 us."""
    events = []
    for number, (name, start, us) in enumerate(kernels):
        which = 0 if graph else number
        launch = "cudaGraphLaunch" if graph else "cudaLaunchKernel"
        if not graph or number == 0:
            events.append(event("cuda_runtime", launch, 1 if graph else start - 4, 1, correlation=which))
        events.append(event("kernel", name, start, us, correlation=which, stream=7))
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))


KERNELS = [("sgemm", 10, 6), ("vectorized_add", 20, 2), ("sgemm", 26, 6), ("adam", 34, 1), ("flash_attention", 38, 4)]


def test_the_answers_about_a_step(tmp_path):
    path = tmp_path / "trace_v1.json.gz"
    write_trace(path, KERNELS)
    step = traces.step_of(path)
    assert (step.kernels, step.launches, step.busy_us) == (5, 5, pytest.approx(19))
    assert step.idle_share == pytest.approx(13 / 32)
    assert (step.median_kernel_us, step.median_gap_us, step.median_wait_us) == pytest.approx((4, 3.5, 4))
    assert step.groups == [("GEMM", pytest.approx(1200 / 19)), ("attention", pytest.approx(400 / 19)), *step.groups[2:]]
    assert step.groups[2][0] == "element-wise" and (step.longest, step.longest_us) == ("sgemm", pytest.approx(6))


def test_a_long_gap_inside_the_step_is_idle_time(tmp_path):
    path = tmp_path / "trace_v1.json.gz"
    write_trace(path, [("sgemm", 10, 500), ("adam", 2010, 500)])
    assert traces.step_of(path).idle_share == pytest.approx(1500 / 2500)


def test_one_launch_of_a_graph_starts_all_kernels(tmp_path):
    path = tmp_path / "trace_v4.json.gz"
    write_trace(path, KERNELS, graph=True)
    step = traces.step_of(path)
    assert (step.kernels, step.launches, step.median_wait_us) == (5, 1, pytest.approx(25))


def test_the_table_needs_both_traces(tmp_path):
    recorded = SimpleNamespace(folder=tmp_path)
    write_trace(traces.path_of(recorded, 1), KERNELS)
    assert traces.traces_table(recorded) is None
    write_trace(traces.path_of(recorded, 4), KERNELS, graph=True)
    table = traces.traces_table(recorded)
    assert "| 1 | launches by the host | 5 | 1 |" in table and "| 3 | median gap, us | 3.5 | 3.5 |" in table
    assert "Task 5, version 1: GEMM 63 %, attention 21 %, element-wise 11 %. Longest kernel: `sgemm`, 6 us." in table
    assert "| 2 | of the time from the first kernel to the last | 59.4 % | 59.4 % |" in table
