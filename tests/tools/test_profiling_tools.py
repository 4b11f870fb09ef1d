"""run_pytorch_profiler.py, run_deepspeed_flops.py and run_all_profilers.sh, from the folders that offer them."""

import argparse
import csv
import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys

import pytest
import torch

import kernel_times
import run_deepspeed_flops as flops
import run_pytorch_profiler as profiler
from common import runs
from common.command_line import Failure, version_meant
from common.versions import SCRIPTS, load_version
from in_process import process_here, run_here

STUBS = pathlib.Path(__file__).parent / "stubs"
SMALL = "--batch-size 2 --seq-len 32 --hidden-dim 64 --num-layers 2 --num-heads 4 --device cpu".split()
# hidden 32, 1 layer, 2 query heads and 1 key head of 16, feed-forward 16, vocabulary 10; 1 sequence of 4 tokens
BY_HAND = (
    "--batch-size 1 --seq-len 4 --hidden-dim 32 --num-layers 1 --num-heads 2 --intermediate-dim 16 --vocab-size 10 "
    "--device cpu"
).split()


def call(version, tool, *arguments, cwd=None, **environment):
    """Run a tool as its version's folder offers it."""
    folder = SCRIPTS[version].parent
    program = [sys.executable] if tool.endswith(".py") else ["bash"]
    return subprocess.run(
        [*program, tool if cwd is None else folder / tool, *map(str, arguments)],
        cwd=cwd or folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("version", SCRIPTS)
@pytest.mark.parametrize("tool", ["run_pytorch_profiler.py", "run_deepspeed_flops.py", "run_all_profilers.sh"])
def test_every_folder_offers_the_tool_by_a_relative_link(version, tool):
    link = SCRIPTS[version].parent / tool
    assert os.readlink(link) == f"../scripts/{tool}" and link.is_file()


def test_the_folder_tells_the_version(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for version, script in SCRIPTS.items():
        monkeypatch.setattr(sys, "argv", [str(script.parent / "run_pytorch_profiler.py")])
        assert version_meant() == version
        assert version_meant(2) == 2
    monkeypatch.setattr(sys, "argv", [str(flops.__file__)])
    with pytest.raises(Failure, match="--version"):
        version_meant()
    monkeypatch.chdir(SCRIPTS[4].parent)
    assert version_meant() == 4


# ---------------------------------------------------------------- run_pytorch_profiler.py


@pytest.fixture
def one_process(monkeypatch):
    """The training script that a tool starts runs in this process."""
    monkeypatch.setattr(runs, "run_process", process_here)
    monkeypatch.setattr(subprocess, "run", run_here)


@pytest.fixture(scope="module")
def profile_folder(tmp_path_factory):
    """What one run of run_pytorch_profiler.py left."""
    folder = tmp_path_factory.mktemp("profile") / "fusion analysis"
    arguments = (*SMALL, "--num-steps", "2", "--profile-steps", "2", "--profile-dir", folder, "--generate-report")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "run", run_here)
        result = run_here([sys.executable, SCRIPTS[2].parent / "run_pytorch_profiler.py", *arguments])
    assert result.returncode == 0, result.stdout + result.stderr
    assert "trace_v2_" in result.stdout and "aten::mm" in result.stdout
    return folder


def test_a_profile_holds_kernels_figures_and_a_trace(profile_folder):
    content = json.loads(next(profile_folder.glob("profile_v2_*.json")).read_text())
    assert (content["version"], content["steps_profiled"], content["config"]["hidden_dim"]) == (2, 2, 64)
    assert content["summary"]["step_ms"]["median"] > 0
    assert sum(row["share_percent"] for row in content["groups"]) == pytest.approx(100)
    trace = json.loads((profile_folder / content["trace"]).read_text())
    calls = sum(event.get("name") == "aten::mm" and event["ph"] == "X" for event in trace["traceEvents"])
    assert calls == next(row["calls"] for row in content["kernels"] if row["kernel"] == "aten::mm") > 0


def test_the_report_gives_figures_a_step(profile_folder):
    content = json.loads(next(profile_folder.glob("profile_v2_*.json")).read_text())
    text = (profile_folder / "profiling_report.md").read_text()
    products = next(row for row in content["groups"] if row["group"] == "GEMM")
    assert f"| GEMM | {products['calls'] / 2:,.0f} | {products['total_us'] / 2e3:,.3f} |" in text
    assert f"{content['summary']['step_ms']['median']:.3f} ms (" in text


def test_the_page_of_memory_shows_the_peak_of_the_trace(profile_folder):
    trace = json.loads(next(profile_folder.glob("trace_*.json")).read_text())
    peak = max(e["args"]["Total Allocated"] for e in trace["traceEvents"] if e["name"] == "[memory]") / 2**20
    page = (profile_folder / "memory_timeline.html").read_text()
    assert f"<b>{peak:,.1f} MiB</b>" in page
    assert page.count("<title>forward,") == 2 and "http" not in page.replace("http-equiv", "")


def test_on_a_gpu_the_memory_of_the_gpu_is_shown(tmp_path):
    def event(ts, device, total):
        return {"name": "[memory]", "ph": "i", "ts": ts, "args": {"Device Type": device, "Total Allocated": total}}

    trace = tmp_path / "trace.json"
    events = [event(1000.0, 0, 2**30), event(2000.0, 1, 3 * 2**20), event(3500.0, 1, 2**20)]
    trace.write_text(json.dumps({"traceEvents": events}))
    assert profiler.memory_events(trace) == ("GPU", [(0.0, 3.0), (1.5, 1.0)], [])


def test_the_line_of_memory_keeps_its_peak_when_it_is_thinned():
    points = [(float(i), 1.0) for i in range(5000)]
    points[3334] = (3334.0, 9.0)
    thin = profiler.thinned(points)
    assert len(thin) <= 2000 and (3334.0, 9.0) in thin


def test_earlier_profiles_are_read_again(profile_folder):
    made = next(profile_folder.glob("profile_*.json"))
    result = call(
        2, "run_pytorch_profiler.py", "--analyze-existing", made
    )  # a process of its own, started from its link
    total = sum(row["total_us"] for row in json.loads(made.read_text())["kernels"]) / 1e3
    assert result.returncode == 0 and f"{total:,.3f} ms in all" in result.stdout


def test_a_pattern_without_files_reads_the_traces_beside_it(profile_folder):
    result = call(2, "run_pytorch_profiler.py", "--analyze-existing", profile_folder / "nothing_*.json")
    assert result.returncode == 0 and "aten::mm" in result.stdout and f"reading {profile_folder}" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["--analyze-existing", "nowhere.json"], 2, "does not exist"),
        (["--version", "9"], 2, "invalid choice"),
        (["--analyze-existing", __file__], 2, "no columns of kernel times"),
        (["--analyze-existing", "x.json", "--use-amp"], 2, "means nothing"),
        (["--num-heads", "5"], 2, "tiny_llama_v1.py: error: --hidden-dim"),
        (["--profile-dir", __file__], 1, "cannot be made"),
    ],
)
def test_bad_input_of_the_profiler_is_one_sentence(arguments, status, words):
    result = call(1, "run_pytorch_profiler.py", *arguments)
    assert result.returncode == status
    assert words in result.stderr and len(result.stderr.splitlines()) == 1


# ---------------------------------------------------------------- run_deepspeed_flops.py


def without_training(monkeypatch):
    monkeypatch.setattr(flops, "measure", lambda *arguments: None)


@pytest.mark.parametrize("version", SCRIPTS)
def test_counts_agree_with_a_step_counted_by_hand(version, tmp_path, monkeypatch):
    if version == 3 and torch.cuda.is_available():
        pytest.skip("version 3 was loaded for the GPU, not for the interpreter")
    without_training(monkeypatch)
    status = flops.main(["--version", str(version), *BY_HAND, "--profile-dir", str(tmp_path)])
    content = json.loads((tmp_path / "flops_profile.json").read_text())
    # q and o 1024, k, v, gate, up and down 512, head 320: 4928 weights, 4 tokens, 6 operations each;
    # attention: 3 x 2 products x 2 operations x 4 x 4 pairs, halved, of 32 numbers
    assert content["analytic"] == {"total": 121344, "matrix_products": 118272, "attention": 3072}
    # version 3 takes the embedding's gradient as a product too: 2 x 4 tokens x 320
    assert content["flop_counter_mode"]["matrix_products"] == 118272 + 2560 * (version == 3)
    assert content["flop_counter_mode"]["attention"] == (6144 if version == 1 else 7168)
    assert content["flop_counter_mode"]["backward"] > content["flop_counter_mode"]["forward"]
    assert status == 0 and all(row["agrees"] for row in content["checks"])


def test_a_wrong_formula_is_found(tmp_path, monkeypatch, capsys):
    without_training(monkeypatch)
    script = load_version(1)
    right = script.flops_per_step
    monkeypatch.setattr(script, "flops_per_step", lambda config, batch, seq_len: 2 * right(config, batch, seq_len))
    assert flops.main(["--version", "1", *BY_HAND, "--profile-dir", str(tmp_path)]) == 1
    assert "NOT the expected" in capsys.readouterr().out


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
@pytest.mark.parametrize("version", SCRIPTS)
def test_deepspeed_counts_the_same(version):
    options = load_version(version).parse_options([*BY_HAND, "--no-graph"])
    rows = flops.count_all(version, options)[0]["checks"]
    assert [row["agrees"] for row in rows if row["counter"] == "DeepSpeed"] == [True]


def test_shared_key_heads_are_counted_for_the_query_heads():
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    B, T, H, K, D = 2, 16, 4, 2, 8
    query, key, value = (torch.randn(B, heads, T, D, requires_grad=True) for heads in (H, K, K))
    with FlopCounterMode(display=False, custom_mapping=flops.attention_formulas()) as counter:
        attend = torch.nn.functional.scaled_dot_product_attention
        attend(query, key, value, is_causal=True, enable_gqa=True).sum().backward()
    forward = 4 * B * H * T * T * D
    # seven products where a fused kernel runs, six where plain ones do
    assert counter.get_total_flops() in (forward * 7 // 2, forward * 3)


def test_intensity_of_a_product_by_hand():
    found = flops.intensity([(1, 2, 3, 4, 4)] * 2, parameters=10, flops=96)
    assert found["products"] == [
        {"batch": 1, "m": 2, "k": 3, "n": 4, "calls": 2, "flops": 96, "bytes": 208, "flop_per_byte": 48 / 104}
    ]
    assert found["step_bytes_at_least"] == 208 + 280
    assert found["step_flop_per_byte_at_most"] == 96 / 488


def test_shortest_steps_at_the_peaks_and_the_mfu_of_this_run():
    peaks = load_version(1).PEAK_TFLOPS
    assert set(peaks) == set("MI250X MI300A MI300X MI325X MI355X A100 H100 H200 B200".split())
    metrics = {
        "summary": {"step_ms": {"median": 2.0}, "tflops": 100.0, "mfu": 100 / 494.7, "precision": "tf32"},
        "environment": {"device": "NVIDIA H200"},
    }
    rows = flops.mfu_rows(200_000_000_000, flops.measured_figures(metrics, peaks), peaks)
    assert rows[0] == {
        "device": "NVIDIA H200",
        "precision": "tf32",
        "peak_tflops": 494.7,
        "step_ms": 2.0,
        "tflops": 100.0,
        "mfu": 100 / 494.7,
    }
    best = next(row for row in rows if row["device"].startswith("MI300X") and row["precision"] == "float32")
    assert best["step_ms"] == pytest.approx(200 / 163.4)


def test_the_documented_command_writes_all_its_files(one_process, tmp_path):
    pytest.importorskip("matplotlib")
    folder = tmp_path / "flops_analysis"
    tool = [sys.executable, SCRIPTS[2].parent / "run_deepspeed_flops.py"]
    options = ("--num-steps", "2", "--computational-intensity", "--generate-roofline")
    result = run_here([*tool, *SMALL, *options], cwd=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    content = json.loads((folder / "flops_profile.json").read_text())
    assert content["measured"]["tflops"] == pytest.approx(
        content["analytic"]["total"] / content["measured"]["step_ms"] / 1e9, rel=1e-6
    )
    assert sum(row["flops"] for row in content["intensity"]["products"]) == content["analytic"]["matrix_products"]
    assert content["ceilings"]["matmul_tflops"] > 0 and content["ceilings"]["copy_tb_s"] > 0
    assert (folder / "roofline.png").read_bytes()[:4] == b"\x89PNG"
    assert re.search(r"TinyLlama\.layers\.1\.attention +0\.\d+", (folder / "model_profile.txt").read_text())
    with open(folder / "mfu_analysis.csv", newline="") as file:
        assert float(next(csv.DictReader(file))["step_ms"]) == content["measured"]["step_ms"]
    again = run_here([*tool, "--analyze-results", "flops_profile.json"], cwd=tmp_path)
    assert again.returncode == 0 and "as expected" in again.stdout and "FLOP/byte" in again.stdout


@pytest.mark.parametrize(
    ("content", "words"),
    [(None, "cannot be read"), ("{", "no valid JSON"), ("[1]", "is not a flops_profile.json")],
)
def test_earlier_results_that_are_none_are_refused(content, words, tmp_path, capsys):
    path = tmp_path / "flops_profile.json"
    if content is not None:
        path.write_text(content)
    assert flops.main(["--analyze-results", str(path)]) == 2
    assert words in capsys.readouterr().err


def test_a_preset_is_not_overruled_by_sizes_of_the_tool():
    options, rest = flops.parse_options(["--preset", "medium", "--num-steps", "2"])
    assert flops.training_arguments(options, rest) == ["--num-steps", "2", "--preset", "medium"]
    options, rest = flops.parse_options(["--seq-len", "64", "--use-amp"])
    assert flops.training_arguments(options, rest) == ("--batch-size 8 --seq-len 64 --num-steps 10 --use-amp".split())


def test_without_matplotlib_everything_but_the_picture_is_there(tmp_path, monkeypatch, capsys):
    without_training(monkeypatch)
    monkeypatch.setattr(flops, "ceilings", lambda *arguments: {"matmul_tflops": 1.0, "copy_tb_s": 1.0})
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert flops.main(["--version", "1", *BY_HAND, "--generate-roofline", "--profile-dir", str(tmp_path)]) == 1
    assert "needs matplotlib" in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"flops_profile.json", "model_profile.txt", "mfu_analysis.csv"}


def test_kernels_of_version_3_are_not_timed_in_the_interpreter(capsys):
    options = argparse.Namespace(device="cpu", enable_rope_kernel=True)
    assert flops.measure(3, options, [], pathlib.Path()) is None
    assert "mean nothing" in capsys.readouterr().out


# ---------------------------------------------------------------- run_all_profilers.sh


def test_all_profilers_run_and_missing_ones_are_named(tmp_path):
    result = call(
        2,
        "run_all_profilers.sh",
        *("--batch-size", "8", "--seq-len", "128", "--enable-rocm-tools", "--profile-dir", "./complete_rocm_analysis"),
        *(*SMALL, "--num-steps", "1", "--profile-steps", "1"),
        cwd=tmp_path,
        TINY_LLAMA_CPU="1",
        TINY_LLAMA_PYTHON=sys.executable,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    outcome = result.stdout.split("=== all profilers")[1]
    assert "done     run_pytorch_profiler.py" in outcome and "done     run_deepspeed_flops.py" in outcome
    assert len(re.findall(r"^missing  get_\w+\.sh: \S+ is (not )?installed", outcome, re.MULTILINE)) == 5
    folder = tmp_path / "complete_rocm_analysis"
    assert kernel_times.read_kernels(folder / "pytorch_profiles")
    assert json.loads((folder / "flops_analysis" / "flops_profile.json").read_text())["version"] == 2


def test_all_profilers_go_on_after_a_failure_and_end_with_1(tmp_path):
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\ncase $1 in *run_*.py) exit 2 ;; esac\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    result = call(
        2,
        "run_all_profilers.sh",
        "--enable-rocm-tools",
        cwd=tmp_path,
        PATH=f"{STUBS / 'nvidia'}{os.pathsep}{os.environ['PATH']}",
        TINY_LLAMA_PYTHON=str(STUBS / "training_python"),
        STAND_IN_PYTHON=str(python),
        TINY_LLAMA_CPU="",
    )
    outcome = result.stdout.split("=== all profilers")[1].splitlines()[1:]
    assert result.returncode == 1
    assert outcome[:2] == [
        "FAILED   run_pytorch_profiler.py (exit status 2)",
        "FAILED   run_deepspeed_flops.py (exit status 2)",
    ]
    assert [line.split()[0] for line in outcome[2:]] == ["done"] * 5
    (table,) = tmp_path.glob("all_profiles/hotspots/hotspot_*/hotspots.csv")
    assert "\nattention_forward_kernel,attention," in table.read_text()


def test_a_version_that_is_not_there_is_refused(tmp_path):
    result = call(1, "run_all_profilers.sh", "--version", "7", cwd=tmp_path)
    assert result.returncode == 2 and "--version 1, 2, 3 or 4" in result.stderr
