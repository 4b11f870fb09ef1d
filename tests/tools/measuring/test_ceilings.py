"""The ceilings of every roofline by known answers: what the tools make of a known time of a copy and of a matmul."""

from types import SimpleNamespace

import pytest
import torch
from torch.utils import benchmark

import benchmark_kernels
from common.formulas import tf32
from common.measuring import ceilings
from common.profiles import operators, roofline


def test_ceilings_of_a_known_device(monkeypatch):
    """The copy of 128 MiB takes 2 ms, the matmul of 1024 x 1024 matrices 1 ms."""
    done = []

    def time(task):
        found = task()
        done.append((tuple(found.shape), found.dtype))
        return 2e-3 if found.ndim == 1 else 1e-3

    monkeypatch.setattr(ceilings, "shortest_s", time)
    found = ceilings.measure_ceilings("cpu", "bfloat16")
    assert found["matmul_tflops"] == pytest.approx(2 * 1024**3 / 1e-3 / 1e12)  # a multiply-add is two FLOPs
    assert found["copy_tb_s"] == pytest.approx(2 * 128 * 2**20 / 2e-3 / 1e12)  # every byte is read and written
    assert done == [((1024, 1024), torch.bfloat16), ((128 * 2**18,), torch.float32)]


@pytest.mark.parametrize(("kept", "named"), [(~0, "float32"), (~0x1FFF, "tf32")])
def test_ceilings_are_named_by_the_bits_that_matmuls_keep(kept, named, monkeypatch, tmp_path):
    """TF32 was asked for; a GPU or a PyTorch without it multiplies in float32 all the same."""

    def multiply(a, b):
        return (a.view(torch.int32) & kept).view(torch.float32) @ b

    monkeypatch.setattr(tf32, "multiply", multiply)
    monkeypatch.setattr(roofline, "measure_ceilings", lambda *_: {"matmul_tflops": 1.0, "copy_tb_s": 1.0})
    before = torch.get_float32_matmul_precision()
    try:
        profile = SimpleNamespace(metadata={"precision": "tf32"}, device=None, on_cpu=True, path=tmp_path)
        assert f"matmuls in {named}" in roofline.ceilings_for(profile)[1]
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize(("device", "named"), [("AMD Instinct MI355X", "tf32"), ("AMD Instinct MI210", "float32")])
def test_emulated_tf32_keeps_more_bits_and_has_an_effect(device, named, monkeypatch, backend_settings):
    monkeypatch.setattr(ceilings, "rounds_to_tf32", lambda device: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: device)
    assert ceilings.precision_here("tf32", "cuda") == named


@pytest.mark.parametrize(
    ("device", "rounds_to_tf32", "tflops", "words"),
    [
        ("AMD Instinct MI300X", None, 653.7, "the data sheet's of MI300X in tf32"),
        ("AMD Instinct MI300X", True, 653.7, "the data sheet's of MI300X in tf32"),
        ("AMD Instinct MI300X", False, 163.4, "the data sheet's of MI300X in float32"),  # PyTorch before 2.10
        ("AMD Instinct MI210", None, 45.3, "the data sheet's of MI210 in float32"),  # has no units for it
        ("AMD Instinct MI355X", False, None, "the peak of MI355X in tf32 is not in our table"),  # emulated
    ],
)
def test_ceilings_of_a_gpu_that_is_elsewhere(device, rounds_to_tf32, tflops, words):
    metadata = {"precision": "tf32", "rounds_to_tf32": rounds_to_tf32}
    profile = SimpleNamespace(metadata=metadata, device=device, on_cpu=False)
    found, said, _ = roofline.ceilings_for(profile)
    assert words in said and (found and found["matmul_tflops"]) == tflops


def test_the_shortest_time_counts(monkeypatch):
    times = iter([0.5, 0.2, 0.9, 0.3, 0.4])
    timer = SimpleNamespace(timeit=lambda number: SimpleNamespace(mean=next(times) if number == 1 else None))
    monkeypatch.setattr(benchmark, "Timer", lambda *args, **options: timer)
    assert ceilings.shortest_s(lambda: None) == 0.2


def test_operators_under_known_ceilings():
    """2 GFLOP and 3 GB under 10 TFLOP/s and 1 TB/s: bytes take 3 ms, FLOPs 0.2 ms; it took 6 ms in 2 steps."""
    calls = [
        SimpleNamespace(name="aten::mm", group="matmul", us=us, dims=[], types=[], strides=[], launches=["known"])
        for us in (1000, 5000)
    ]
    known = {"known": (1e9, 1.5e9)}
    row = operators.operator_row(calls, 2, {"matmul_tflops": 10.0, "copy_tb_s": 1.0}, known)
    assert (row["calls"], row["ms"], row["flops"], row["bytes"]) == (1, 3, 1e9, 1.5e9)
    assert row["tflops"] == pytest.approx(2e9 / 6e-3 / 1e12)
    assert row["gb_s"] == pytest.approx(3e9 / 6e-3 / 1e9)
    assert (row["roofline_ms"], row["of_roofline"]) == pytest.approx((1.5, 0.5))
    assert ceilings.balance({"matmul_tflops": 10.0, "copy_tb_s": 2.5}) == 4


def test_each_call_of_an_operator_has_its_own_limit():
    """One computes for 1 ms, the other copies for 1 ms: together they need 2 ms, not the longer of both sums."""
    call = {"name": "aten::mm", "group": "GEMM", "us": 2000, "dims": [], "types": [], "strides": []}
    calls = [SimpleNamespace(**call, launches=[kernel]) for kernel in ("computes", "copies")]
    known = {"computes": (1e10, 1e3), "copies": (1e3, 1e9)}
    row = operators.operator_row(calls, 1, {"matmul_tflops": 10.0, "copy_tb_s": 1.0}, known)
    assert (row["roofline_ms"], row["of_roofline"]) == pytest.approx((2.0, 0.5))


def test_ceilings_of_the_kernels(monkeypatch):
    """Calls of 1, 2 and 9 us: rates follow from the median, 2 us."""

    class Timed:
        reason = None

        def __init__(self, function, operation, bench):
            function(operation.sets[0])
            self.times_us = []

        def measure(self):
            self.times_us += [1.0, 9.0, 2.0]

    monkeypatch.setattr(benchmark_kernels, "Timed", Timed)
    bench = benchmark_kernels.Bench(torch.device("cpu"), torch.float32)
    found = benchmark_kernels.ceilings(bench)
    assert found["copy"] == pytest.approx(2 * 4 * 2**14 / 2e-6 / 1e9)
    assert found["product"] == pytest.approx(dict.fromkeys(("float32", "tf32"), 2 * 64**3 / 2e-6 / 1e12))


def test_the_first_replay_of_a_turn_does_not_count(monkeypatch):
    """The device was idle before it. A CPU makes one replay, which counts."""
    timed = object.__new__(benchmark_kernels.Timed)
    timed.calls = 2
    for milliseconds, wanted in (([9.0] + [1.0] * benchmark_kernels.REPLAYS, [500.0] * 7), ([3.0], [1500.0])):
        timed.times_us = []
        monkeypatch.setattr(timed, "replay_times", lambda count, found=milliseconds: found[:count])
        timed.measure()
        assert timed.times_us == wanted


def test_calls_of_a_kernel_are_timed_in_microseconds(monkeypatch):
    """Two sets of inputs: a replay makes two calls, which take 3 ms."""
    now = iter([1.0, 1.003])
    monkeypatch.setattr("time.perf_counter", lambda: next(now))
    operation = benchmark_kernels.Operation("", "", "GB/s", 1, [1, 2], {})
    timed = benchmark_kernels.Timed(
        lambda s: None, operation, SimpleNamespace(device=torch.device("cpu"), v3=benchmark_kernels.load_version(3))
    )
    timed.measure()
    assert timed.times_us == pytest.approx([1500])
