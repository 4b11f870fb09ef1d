"""Fixtures of the tools' tests: traces that the scripts wrote, and traces whose numbers are known by hand."""

import json
import os
import subprocess

import pytest

from common.measuring import runs
from common.versions import load_version
from in_process import process_here, restored_settings, run_here

SIZES = "--hidden-dim 32 --num-layers 1 --num-heads 2 --batch-size 2 --seq-len 16 --vocab-size 64 --device cpu".split()
METADATA = {"version": 1, "part": "whole", "hidden_dim": 32, "num_layers": 1, "batch_size": 2, "seq_len": 16}
METADATA |= {"num_heads": 2, "num_kv_heads": 1, "intermediate_dim": 128, "vocab_size": 64}
METADATA |= {"precision": "float32", "peak_memory_mb": 100.0}


@pytest.fixture
def one_process(monkeypatch):
    """Run the programs that a tool starts in this process; what they print is kept from the screen."""
    monkeypatch.setattr(subprocess, "run", run_here)
    monkeypatch.setattr(runs, "run_process", process_here)


@pytest.fixture(scope="session")
def profiled(tmp_path_factory):
    """Folders with a trace of two steps of versions 1 and 2, as the documented commands leave them."""
    workshop = tmp_path_factory.mktemp("workshop")
    folders = {1: workshop / "version1_pytorch_baseline" / "pytorch_profiles", 2: workshop / "v2" / "fusion_analysis"}
    for version, folder in folders.items():
        arguments = [*SIZES, "--num-steps", "2", "--profile-steps", "2", "--enable-pytorch-profiler"]
        file = folder.parent / f"metrics_v{version}.json"
        folder.mkdir(parents=True)
        with restored_settings():
            load_version(version).main([*arguments, "--profile-dir", str(folder), "--metrics-file", str(file)])
    return folders


def event(category, name, ts, dur, number=0, **arguments):
    """Return an event of a trace; number joins kernels with the operator that launched them."""
    arguments["External id"] = number
    return {"ph": "X", "cat": category, "name": name, "ts": ts, "dur": dur, "args": arguments}


@pytest.fixture
def make_trace(tmp_path):
    """make_trace("folder/trace_1.json", kernels, steps, **metadata) writes a trace of a GPU, each newer than the last.

    Every step takes 50 us on the host; its kernels, {name: us}, run one after the other from 30 us on.
    """
    made = []

    def make(name, kernels, steps=2, **metadata):
        events = []
        for begin in range(0, 10_000 * steps, 10_000):
            marks = [("forward", 0, 20), ("attention", 5, 5), ("attention", 15, 5)]
            for mark, at, duration in (*marks, ("backward", 20, 20), ("optimizer", 40, 10)):
                events.append(event("user_annotation", mark, begin + at, duration))
            at = begin + 30
            for kernel, us in kernels.items():
                events.append(event("kernel", kernel, at, us))
                at += us
        content = {"deviceProperties": [{"name": "MI300X"}], "tiny_llama": METADATA | metadata, "traceEvents": events}
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(content))
        made.append(path)
        os.utime(path, (1e9 + len(made), 1e9 + len(made)))
        return path

    return make


@pytest.fixture
def known_trace(tmp_path):
    """Two steps of a matmul (1 GFLOP, 8 MB, 20 us), an addition (12 MB, 10 us), a kernel without shapes (10 us)."""
    shapes = {"aten::mm": [[1000, 500], [500, 1000]], "aten::add": [[1000, 1000], [1000, 1000]]}
    events = []
    for step in (0, 10):
        events.append(event("user_annotation", "optimizer", step, 1))
        for i, (name, dims) in enumerate(shapes.items(), step + 1):
            tensors = {"Input Dims": dims, "Input type": ["float"] * 2, "Input Strides": [[], []]}
            events.append(event("cpu_op", name, i, 1, i, **tensors))
        events.append(event("kernel", "gemm", 100 * step + 100, 20.0, step + 1))
        events.append(event("kernel", "vectorized_elementwise_kernel", 100 * step + 200, 10.0, step + 2))
        events.append(event("kernel", "lonely", 100 * step + 300, 10.0))
    (tmp_path / "pytorch_profiles").mkdir()
    trace = {"deviceProperties": [{"name": "MI300X"}], "traceEvents": events}
    (tmp_path / "pytorch_profiles" / "trace_v1.json").write_text(json.dumps(trace))
    return tmp_path
