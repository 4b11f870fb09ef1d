"""maintain/expected.py: ratios of other GPUs, predicted from data sheets."""

from types import SimpleNamespace

import pytest

from common import counts
from maintain import expected


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
