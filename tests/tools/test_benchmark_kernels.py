"""maintain/benchmark_kernels.py: its work by hand, both candidates given the same task, what cannot run is named."""

import json

import pytest
import torch

from common.versions import load_version, relative_error
from maintain import benchmark_kernels


@pytest.fixture
def toy_kernels(monkeypatch):
    """Toy sizes on a GPU too, where so small tensors need not exceed the cache."""
    monkeypatch.setitem(benchmark_kernels.SIZES, "cuda", benchmark_kernels.SIZES["cpu"])
    monkeypatch.setattr(benchmark_kernels.Bench, "cache_bytes", lambda self: 0)


def test_kernels_are_timed_beside_pytorch(tmp_path, toy_kernels, capsys):
    path = tmp_path / "kernels.json"
    assert benchmark_kernels.main(["--json", str(path)]) == 0
    found = json.loads(path.read_text())
    names = [record["operation"] for record in found["operations"]]
    assert names == [
        *("RMSNorm forward", "RMSNorm backward", "RMSNorm + residual forward", "RMSNorm + residual backward"),
        *("RoPE forward", "RoPE backward", "SwiGLU forward", "SwiGLU backward"),
        *("cross-entropy forward", "cross-entropy backward", "AdamW, float32"),
        *("attention forward", "attention forward + backward"),
    ]
    for record in found["operations"]:
        ours, *others = record["candidates"]
        assert ours["name"] == "V3" and ours["us"]["p25"] <= ours["us"]["median"] <= ours["us"]["p75"]
        scale = 1e3 if record["unit"] == "GB/s" else 1e6
        assert ours["rate"] == pytest.approx(ours["work"] / ours["us"]["median"] / scale)
        assert any("us" in c for c in others)
    if not torch.cuda.is_available():
        assert "these times mean nothing" in capsys.readouterr().out


def test_work_of_the_kernels():
    """Bytes and FLOPs by hand, for the toy sizes."""
    bench = benchmark_kernels.Bench(torch.device("cpu"), torch.float32)
    families = benchmark_kernels.all_operations(bench)
    work = {kind.name: kind.work for family in families.values() for part in family for kind in part()}
    assert work["RMSNorm forward"]["V3"] == 2 * 32 * 32 * 4
    assert work["RMSNorm + residual backward"]["V3"] == 4 * 32 * 32 * 4
    assert work["SwiGLU backward"] == {"V3": 5 * 16 * 32 * 4, "PyTorch": 5 * 16 * 32 * 4}
    assert work["AdamW, float32"]["V3"] == 28 * 2 * 16 * 32
    assert work["attention forward"]["V3"] == 2 * 2 * 32 * 32 * 16
    assert work["attention forward + backward"]["V3"] == 7 * 2 * 32 * 32 * 16


def test_kernels_compute_what_pytorch_does(device, toy_kernels):
    """Both candidates of an operation are given the same task: their results agree."""
    bench = benchmark_kernels.Bench(device, torch.float32)
    for name, families in benchmark_kernels.all_operations(bench).items():
        for family in families if name not in ("optimizer", "attention") else []:
            for kind in family():
                ours, theirs = (kind.candidates[c](kind.sets[0]) for c in ("V3", "PyTorch"))
                ours, theirs = ([t] if isinstance(t, torch.Tensor) else list(t) for t in (ours, theirs))
                for a, b in zip(ours, theirs, strict=False):
                    assert relative_error(a.detach().reshape(b.shape), b.detach()) < 1e-5, kind.name


def test_inputs_exceed_twice_the_cache(monkeypatch):
    bench = benchmark_kernels.Bench(torch.device("cpu"), torch.float32)
    bench.device = torch.device("cuda")
    monkeypatch.setattr(benchmark_kernels.Bench, "cache_bytes", lambda self: 1000)
    assert len(bench.sets(lambda: {"x": torch.zeros(100)})) == 5
    assert len(bench.sets(lambda: {"x": torch.zeros(100)}, used=0.5)) == 10
    assert len(bench.sets(lambda: {"x": torch.zeros(10000)})) == 2


def test_a_candidate_that_cannot_run_is_named(toy_kernels, monkeypatch, capsys):
    script = load_version(3)

    def refuse(*arguments):
        raise RuntimeError("no room\nfor it")

    monkeypatch.setattr(script, "rope", refuse)
    assert benchmark_kernels.main(["--only", "rope"]) == 1
    shown = capsys.readouterr()
    assert "V3               not available: no room" in shown.out and "PyTorch" in shown.out
    assert "RoPE forward of version 3 failed" in shown.err


def test_shares_and_ratios_of_a_hand_made_record():
    times = {"V3": 50.0, "PyTorch": 100.0, "other": 75.0}
    record = {"candidates": [{"name": n, "us": {"median": us}, "rate": 1e4 / us} for n, us in times.items()]}
    record["candidates"].append({"name": "refused", "reason": "no"})
    benchmark_kernels.add_ratios(record, 400.0)
    assert [c.get("share") for c in record["candidates"]] == pytest.approx([0.5, 0.25, 1 / 3, None])
    assert record["candidates"][0]["against_pytorch"] == 1.5
