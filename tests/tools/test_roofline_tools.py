"""FLOPs, GEMMs and bandwidth: run_deepspeed_flops.py, analyze_gemm_operations.py and memory_bandwidth_analyzer.py."""

import argparse
import csv
import importlib.util
import json
import pathlib
import re
import subprocess
import sys

import pytest
import torch

import analyze_bottlenecks as bottlenecks
import analyze_gemm_operations as gemm_tool
import memory_bandwidth_analyzer as bandwidth
import run_deepspeed_flops as flops
from common.versions import SCRIPTS, load_version
from in_process import call, refused, run_here

FOLDERS = {version: script.parent for version, script in SCRIPTS.items()}
SAMPLES = pathlib.Path(__file__).parent / "samples"
SMALL = "--batch-size 2 --seq-len 32 --hidden-dim 64 --num-layers 2 --num-heads 4 --device cpu".split()
# hidden 32, 1 layer, 2 query heads and 1 key head of 16, feed-forward 16, vocabulary 10; 1 sequence of 4 tokens
BY_HAND = (
    "--batch-size 1 --seq-len 4 --hidden-dim 32 --num-layers 1 --num-heads 2 --intermediate-dim 16 --vocab-size 10 "
    "--device cpu"
).split()


# ---------------------------------------------------------------- analyze_gemm_operations.py


CONFIG = """
hidden_dim: 32
num_layers: 2
num_heads: 4
num_kv_heads: 2
intermediate_dim: 48
vocab_size: 64
"""


@pytest.fixture
def toy_config(tmp_path):
    file = tmp_path / "tiny_llama_v1_config.yaml"
    file.write_text(CONFIG)
    return file


def test_the_products_are_those_of_the_step(toy_config):
    script = load_version(1)
    config = gemm_tool.read_config(toy_config, script.Config)
    products = gemm_tool.gemms(config, 3, 8)
    # version 1 computes the whole square of scores, of which the formula counts half
    other_half = 6 * 2 * 3 * 8**2 * 32
    assert sum(g.calls * g.flops for g in products) == script.flops_per_step(config, 3, 8) + other_half
    keys = next(g for g in products if g.names == "k, v" and g.part == "weight gradient")
    assert (keys.m, keys.k, keys.n, keys.calls) == (16, 24, 32, 4)
    assert (keys.flops, keys.bytes(4)) == (24576, 4 * (16 * 24 + 24 * 32 + 16 * 32))


def test_what_holds_a_product_back_by_hand():
    square = gemm_tool.Gemm("x", "forward", 1, 1000, 1000, 1000, 2)  # 2 GFLOP, 12 MB, 500/3 FLOP a byte
    roofs = {"matmul_tflops": 10.0, "copy_tb_s": 1.0}
    assert gemm_tool.measured(square, 250e-6, 4, roofs)["bound"] == "compute"
    assert gemm_tool.measured(square, 500e-6, 4, roofs)["bound"] == "too small"
    row = gemm_tool.measured(square, 500e-6, 4, {"matmul_tflops": 10.0, "copy_tb_s": 0.03})
    assert (row["bound"], row["tflops"], row["share_of_peak"]) == ("memory", 4.0, 0.4)
    assert row["share_of_attainable"] == pytest.approx(0.8)
    (step,) = gemm_tool.analyzed({(1, 2): [(square, 250e-6)]}, 4, {"matmul_tflops": 1.0, "copy_tb_s": 1.0})
    assert (step["share_of_peak"], step["ms"], step["calls"]) == (1.0, 0.5, 2)


def test_the_documented_gemm_command(toy_config):
    command = 'analyze_gemm_operations.py --model-config tiny_llama_v1_config.yaml --batch-sizes "4,8" '
    result = call(1, command + '--sequence-lengths "8,16" --json gemms.json --device cpu', cwd=toy_config.parent)
    steps = json.loads((toy_config.parent / "gemms.json").read_text())["steps"]
    assert [(step["batch_size"], step["seq_len"]) for step in steps] == [(4, 8), (4, 16), (8, 8), (8, 16)]
    assert all(g["us"] > 0 and 0 < g["share_of_peak"] <= 1 for step in steps for g in step["gemms"])
    assert "gate, up, weight gradient" in result.stdout and "batch 8, 16 tokens" in result.stderr


def test_the_configuration_of_version_1_is_its_default():
    script = load_version(1)
    config = gemm_tool.read_config(FOLDERS[1] / "tiny_llama_v1_config.yaml", script.Config)
    assert config == script.model_config(script.parse_options([]))


def test_bad_input_of_the_gemm_tool(toy_config, capsys, monkeypatch):
    def config(text):
        toy_config.write_text(text)
        return ["--model-config", toy_config]

    refused(gemm_tool.main, ["--model-config", "nowhere.yaml"], capsys, "cannot be read")
    refused(gemm_tool.main, config("hidden_dim: [1"), capsys, "no valid YAML")
    refused(gemm_tool.main, config("just text"), capsys, "must name vocab_size")
    refused(gemm_tool.main, config(CONFIG.replace("32", "wide")), capsys, "hidden_dim must be a positive")
    refused(gemm_tool.main, config(CONFIG.replace("num_kv_heads: 2", "num_kv_heads: 3")), capsys, "must divide")
    refused(gemm_tool.main, [*config(CONFIG), "--batch-sizes", "0"], capsys, "--batch-sizes")
    refused(gemm_tool.main, [*config(CONFIG), "--batch-sizes", "a"], capsys, "--batch-sizes")
    monkeypatch.setitem(sys.modules, "yaml", None)
    refused(gemm_tool.main, config(CONFIG), capsys, "pip install pyyaml", status=1)


# ---------------------------------------------------------------- memory_bandwidth_analyzer.py


def test_the_documented_bandwidth_command_by_hand(known_trace):
    pytest.importorskip("matplotlib")
    (known_trace / "complete_rocm_analysis").mkdir()
    (known_trace / "pytorch_profiles").rename(known_trace / "complete_rocm_analysis" / "pytorch_profiles")
    command = "memory_bandwidth_analyzer.py --profile-data ./complete_rocm_analysis --generate-roofline-plot "
    result = call(2, command + "--ceilings flops_profile.json --json -", cwd=known_trace)
    content = json.loads(result.stdout)
    rows = {row["operator"]: row for row in content["operators"]}
    assert rows["aten::mm"]["flop_per_byte"] == 125 and rows["aten::mm"]["bound"] == "compute"
    assert rows["aten::add"]["share_of_copy"] == pytest.approx(0.6) and rows["aten::add"]["bound"] == "memory"
    assert content["summary"]["bytes"] == 20e6 and content["summary"]["unknown_ms"] == pytest.approx(0.01)
    assert content["summary"]["memory_bound_ms"] == pytest.approx(0.01)
    assert content["summary"]["gb_s"] == pytest.approx(20e6 / 30e-6 / 1e9)
    picture = known_trace / "complete_rocm_analysis" / "pytorch_profiles" / "roofline.png"
    assert picture.read_bytes()[:4] == b"\x89PNG"


def test_ceilings_are_measured_for_a_profile_of_this_cpu(profiled, capsys):
    assert bandwidth.main(["--profile-data", str(profiled[2]), "--json", "-"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["ceilings"]["copy_tb_s"] > 0 and "measured here" in content["ceilings_from"]
    assert content["summary"]["unknown_ms"] == pytest.approx(0, abs=0.05 * content["summary"]["ms"])


def test_bad_input_of_the_roofline_tools(known_trace, capsys, monkeypatch):
    monkeypatch.chdir(known_trace)
    for main in (bottlenecks.main, bandwidth.main):
        rocm, trace = SAMPLES / "rocm-6.2" / "kernel_trace.csv", SAMPLES / "pytorch" / "trace_gpu.json"
        refused(main, ["--profile-data", rocm], capsys, "--enable-pytorch-profiler")
        refused(main, ["--profile-data", trace], capsys, "--steps N")
        refused(main, ["--profile-data", "nowhere"], capsys, "does not exist")
        for text, words in (("{", "holds no ceilings"), (None, "cannot be read")):
            pathlib.Path("c.json").unlink(missing_ok=True)
            if text:
                pathlib.Path("c.json").write_text(text)
            refused(main, ["--profile-data", "pytorch_profiles", "--ceilings", "c.json"], capsys, words)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    arguments = ["--profile-data", "pytorch_profiles", "--ceilings", "flops_profile.json", "--generate-roofline-plot"]
    refused(bandwidth.main, arguments, capsys, "needs matplotlib", status=1)


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
