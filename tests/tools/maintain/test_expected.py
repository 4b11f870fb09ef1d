"""maintain/expected.py: ratios of other GPUs, predicted from data sheets."""

import dataclasses
from types import SimpleNamespace

import pytest

from common.formulas import counts
from common.formulas.gpus import GPUS
from maintain import expected, rungs
from maintain.rungs import AMP, Rung

LADDER = [
    Rung("first", "", 1, []),
    Rung("half", "", 1, AMP, predicted=("V1 fp32 / bf16", "first")),
    Rung("two", "", 2, AMP, predicted=("bf16 V1 / V2", "half")),
    Rung("not predicted", "", 3, [*AMP, "--fp8"]),
    Rung("three", "", 3, AMP, predicted=("bf16 V1 / V3", "half")),
]


@pytest.fixture(autouse=True)
def ladder(monkeypatch):
    monkeypatch.setattr(rungs, "LADDER", LADDER)


def column_of(device, times, apart=frozenset()):
    """Return a ladder's column with step times by rung; those apart share no round with another."""

    def gain(name, base):
        return times[base] / times[name] if {name, base} <= times.keys() - apart else None

    return SimpleNamespace(content={"record": {"device": device}}, gain=gain, step_ms=times.get)


def test_a_prediction_divides_roofline_times(monkeypatch):
    fast = {"bfloat16": 1e9, "float32": 1e9}  # nothing but bytes counts
    monkeypatch.setitem(GPUS, "H200", dataclasses.replace(GPUS["H200"], tflops=fast, tb_s=1.0))
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
    monkeypatch.setitem(GPUS, "A100", dataclasses.replace(GPUS["A100"], tflops=peaks, tb_s=1e9))
    found = expected.predicted_ratios("A100")["V1 fp32 / bf16"]
    assert 7.5 < found < 8  # the element-wise work stays in float32


def test_measured_and_predicted_ratios_are_marked():
    columns = [
        column_of("NVIDIA H200", {"first": 300, "half": 100, "three": 25}),
        column_of("NVIDIA H100 80GB HBM3", {"half": 90, "two": 45, "three": 30}, apart={"two"}),
    ]
    lines = expected.expected_table(columns).splitlines()[2:]
    assert lines[0] == "| H200 | measured | 3.0 | ... | 4.0 |"
    assert lines[2] == "| H100 | measured | ... | 2.00x, apart | 3.0 |"
    assert [line.split(" | ")[0] for line in lines[1:4:2]] == ["| H200", "| H100"]
    assert sorted(line.split()[1] for line in lines if "| predicted |" in line) == sorted(expected.PREDICTED)
    assert len(lines) == 2 + len(expected.PREDICTED)


def test_without_a_known_gpu_there_is_no_table():
    assert expected.expected_table([]) is None
    assert expected.expected_table([column_of("x86_64", {})]) is None
