"""benchmark_kernels.py: its work by hand, both candidates given the same task, what cannot run is named."""

import json

import pytest
import torch

import benchmark_kernels
from benchmark_kernels import FAMILIES, REPLAYS, Bench, Operation, Timed, measure, operations
from common.versions import load_version, relative_error


@pytest.fixture
def toy_kernels(monkeypatch):
    """Toy sizes on a GPU too, where so small tensors need not exceed the cache."""
    monkeypatch.setitem(benchmark_kernels.SIZES, "cuda", benchmark_kernels.SIZES["cpu"])
    monkeypatch.setattr(Bench, "cache_bytes", lambda self: 0)


def test_kernels_are_timed_with_pytorch(tmp_path, toy_kernels, capsys):
    path = tmp_path / "kernels.json"
    assert benchmark_kernels.main(["--json", str(path)]) == 0
    found = json.loads(path.read_text())
    assert len(found["operations"]) == 15
    for record in found["operations"]:
        ours, *others = record["candidates"]
        assert ours["name"] == "V3" and ours["us"]["p25"] <= ours["us"]["median"] <= ours["us"]["p75"]
        scale, ceiling = (1e3, "copy") if record["unit"] == "GB/s" else (1e6, "product")
        assert ours["rate"] == pytest.approx(ours["work"] / ours["us"]["median"] / scale)
        limit = found["ceilings"][ceiling]
        limit = limit if ceiling == "copy" else limit[found["dtype"]]
        assert ours["share"] == pytest.approx(ours["rate"] / limit)
        assert ours["against_v3"] == 1.0
        for other in (one for one in others if "us" in one):
            assert other["against_v3"] == pytest.approx(other["us"]["median"] / ours["us"]["median"])
    if not torch.cuda.is_available():
        assert "these times mean nothing" in capsys.readouterr().err


@pytest.mark.parametrize(("dtype", "e"), [(torch.float32, 4), (torch.float16, 2)])
def test_work_of_the_kernels(dtype, e):
    """Bytes and FLOPs by hand, for the toy sizes; AdamW's are float32 in any case."""
    bench = Bench(torch.device("cpu"), dtype)
    work = {kind.name: kind.work for family in FAMILIES for kind in operations(bench, family)}
    norm, heads, logits = 32 * 32 * e, 1 * 16 * 4 * 16 * e, 32 * 40 * e
    assert work == {
        "RMSNorm forward": 2 * norm,
        "RMSNorm backward": 3 * norm,
        "RMSNorm + residual forward": 4 * norm,
        "RMSNorm + residual backward": 4 * norm,
        "RoPE forward": 2 * heads,
        "RoPE backward": 2 * heads,
        "SwiGLU forward": 3 * 16 * 32 * e,
        "SwiGLU backward": 5 * 16 * 32 * e,
        "cross-entropy forward": logits,
        "cross-entropy backward": 2 * logits,
        "cross-entropy forward + backward": 2 * logits,
        "linear cross-entropy forward + backward": 6 * 32 * 32 * 40,
        "AdamW, float32": 28 * 2 * 16 * 32,
        "attention forward": 2 * 2 * 32 * 32 * 16,
        "attention forward + backward": 7 * 2 * 32 * 32 * 16,
    }


def test_kernels_compute_what_pytorch_does(device, toy_kernels):
    """Both candidates of an operation are given the same task: their results agree."""
    bench = Bench(device, torch.float32)
    for kind in (kind for family in ("rmsnorm", "rope", "swiglu", "loss") for kind in operations(bench, family)):
        for s in kind.sets:
            if "w" in s:
                s["w16"].data.copy_(s["w"])  # in bfloat16 the candidates have a weight each
        ours, theirs = (kind.candidates[c](kind.sets[0]) for c in ("V3", "PyTorch"))
        ours, theirs = ([t] if isinstance(t, torch.Tensor) else list(t) for t in (ours, theirs))
        pairs = list(zip(*([t for t in found if t is not None] for found in (ours, theirs)), strict=True))
        assert pairs and all(relative_error(a.detach().reshape(b.shape), b.detach()) < 1e-5 for a, b in pairs), kind


def laid_apart(s, heads):
    """Give Liger's tensors the values of version 3's packed ones."""
    H, K = heads
    if "q" in s:
        for names, packed in (("qk", s["x"]), (("dq", "dk"), s["dy"])):
            for name, part in zip(names, packed.split([H, K, K], dim=2), strict=False):
                s[name].data.copy_(part)
    if "gate" in s:
        for name, part in zip(("gate", "up"), s["x"].chunk(2, dim=-1), strict=True):
            s[name].data.copy_(part)


def joined(name, way, found):
    """Return what version 3's operation returns from Liger's results."""
    if name == "RoPE":
        given = found[-2:] if way == "backward" else found  # the gradients of q and k, the last leaves
        dim = 2 if way == "backward" else 1
        return [torch.cat([*given], dim=dim).transpose(1, 2) if way == "forward" else torch.cat([*given], dim=dim)]
    if name == "SwiGLU" and way == "backward":
        return [torch.cat(list(found[-2:]), dim=-1)]
    return found


@pytest.mark.parametrize(
    "family",
    ["rope", "loss", *(pytest.param(family, marks=pytest.mark.gpu) for family in ("rmsnorm", "swiglu"))],
)
def test_liger_s_kernels_compute_what_pytorch_does(family, device, toy_kernels):
    """Triton's interpreter cannot run its norms and its SwiGLU."""
    pytest.importorskip("liger_kernel")
    bench = Bench(device, torch.float32)
    H, K, _ = bench.sizes["heads"]
    seen = 0
    for kind in operations(bench, family):
        if "Liger" not in kind.candidates:
            continue
        s = kind.sets[0]
        if "w" in s:
            s["w16"].data.copy_(s["w"])
        laid_apart(s, (H, K))
        name, way = kind.name.split()[0], kind.name.split()[-1]
        theirs = kind.candidates["PyTorch"](s)
        theirs = [
            t.detach().clone() for t in ([theirs] if isinstance(theirs, torch.Tensor) else theirs) if t is not None
        ]
        found = kind.candidates["Liger"](s)  # last: its RoPE and its loss overwrite their inputs
        found = [t.detach() for t in ([found] if isinstance(found, torch.Tensor) else found) if t is not None]
        found = joined(name, way, found)
        for ours, expected in zip(found, theirs, strict=True):
            if name == "RoPE":  # it leaves the values alone
                expected = expected[:, :, : H + K]
            assert relative_error(ours.reshape(expected.shape), expected) < 1e-5, kind
        seen += 1
    assert seen == {"rope": 2, "loss": 2, "rmsnorm": 4, "swiglu": 2}[family]


def test_inputs_exceed_twice_the_cache(monkeypatch):
    bench = Bench(torch.device("cpu"), torch.float32)
    monkeypatch.setattr(bench, "inputs", lambda shapes: {"x": torch.zeros(shapes["x"])})
    monkeypatch.setattr(bench, "cache_bytes", lambda: 1000)
    bench.device = torch.device("cuda")
    assert len(bench.sets({"x": (100,)})) == 5 and len(bench.sets({"x": (100,)}, used=0.5)) == 10
    assert len(bench.sets({"x": (10000,)})) == 2


def test_a_candidate_that_cannot_run_is_named(toy_kernels, monkeypatch, capsys):
    def refuse(*arguments):
        raise RuntimeError("no room\nfor it")

    monkeypatch.setattr(load_version(3), "rope", refuse)
    assert benchmark_kernels.main(["--only", "rope"]) == 1
    shown = capsys.readouterr()
    assert "V3  not available: no room\n" in shown.out and "\nPyTorch " in shown.out
    assert "version 3 failed at RoPE forward, RoPE backward\n" in shown.err


def test_inputs_and_candidates_take_turns(monkeypatch):
    calls = []
    candidates = {name: lambda s, name=name: calls.append((name, s)) for name in ("V3", "PyTorch")}
    measure(Bench(torch.device("cpu"), torch.float32), Operation("", "", "GB/s", 1, [1, 2], candidates))
    assert calls[-4:] == [("V3", 1), ("V3", 2), ("PyTorch", 1), ("PyTorch", 2)]


def test_the_replay_before_which_the_device_was_idle_does_not_count():
    """On a CPU there is only one."""
    timed = object.__new__(Timed)
    timed.calls = 4
    for replays, wanted in (([9.0] + REPLAYS * [2.0], REPLAYS * [500.0]), ([9.0], [2250.0])):
        timed.times_us = []
        timed.replay_times = {REPLAYS + 1: replays}.__getitem__
        timed.measure()
        assert timed.times_us == wanted
