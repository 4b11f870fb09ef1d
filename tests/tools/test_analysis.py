"""The analysis tools: their numbers against cases known by hand, and the documented commands from their folders."""

import csv
import html
import json
import os
import pathlib
import shlex
import shutil
import subprocess
import sys
import threading

import pytest
import torch

import analyze_batch_scaling as batches
import analyze_bottlenecks as bottlenecks
import analyze_gemm_operations as gemm_tool
import analyze_kernel_launches as launches
import analyze_kernel_reduction as reduction
import analyze_memory_scaling as memory_tool
import compare_versions as versions_tool
import fusion_ablation_study as ablation
import generate_fusion_report as fusion_report
import memory_bandwidth_analyzer as bandwidth
import optimize_batch_size as batch_tool
import performance_regression_test as regression
import validate_numerical_accuracy as accuracy
from common import analysis, report_page, runs, traces
from common.command_line import Failure
from common.versions import REPOSITORY, SCRIPTS, load_version
from in_process import process_here, run_here

SIZES = "--hidden-dim 32 --num-layers 1 --num-heads 2 --batch-size 2 --seq-len 16 --vocab-size 64 --device cpu".split()
# Version 3 computes on this machine's GPU, or else in the interpreter that Triton was imported with.
HERE = [*SIZES[:-1], "cuda" if torch.cuda.is_available() else "cpu"]
FOLDERS = {version: script.parent for version, script in SCRIPTS.items()}


def call(version, command, cwd=None, status=0):
    """Run a documented command in a version's folder; its result, whose status must be as expected."""
    program, *arguments = shlex.split(command)
    result = run_here([sys.executable, FOLDERS[version] / program, *arguments], cwd=cwd or FOLDERS[version])
    assert result.returncode == status, result.stdout + result.stderr
    return result


@pytest.fixture(autouse=True)
def interpreter_setting():
    """Tools that train on a CPU switch Triton's interpreter on for what they start: not for the tests to come."""
    before = os.environ.get("TRITON_INTERPRET")
    yield
    os.environ.pop("TRITON_INTERPRET", None)
    if before is not None:
        os.environ["TRITON_INTERPRET"] = before


@pytest.fixture
def one_process(monkeypatch):
    """The programs that a tool starts run in this process; what they print is kept from the screen."""
    monkeypatch.setattr(runs, "run_process", process_here)
    monkeypatch.setattr(subprocess, "run", run_here)


def refused(main, arguments, capsys, words, status=2):
    """The tool answers bad input with one sentence and this status."""
    try:
        found = main([str(word) for word in arguments])
    except SystemExit as error:
        found = error.code
    errors = capsys.readouterr().err.strip().splitlines()
    assert found == status and words in errors[-1], errors


TOOLS = {
    "validate_numerical_accuracy.py": [2],
    "performance_regression_test.py": [2],
    "analyze_kernel_reduction.py": [2],
    "analyze_kernel_launches.py": [2],
    "compare_versions.py": [2],
    "analyze_gemm_operations.py": [1],
    "analyze_bottlenecks.py": [1],
    "memory_bandwidth_analyzer.py": [2],
    "fusion_ablation_study.py": [2],
    "optimize_batch_size.py": [2],
    "analyze_memory_scaling.py": [2],
    "generate_fusion_report.py": [2],
    "analyze_batch_scaling.py": [1],
}


@pytest.mark.parametrize("tool", TOOLS)
def test_every_tool_is_offered_by_relative_links_and_explains_itself(tool):
    for version in TOOLS[tool]:
        assert os.readlink(FOLDERS[version] / tool) == f"../scripts/{tool}"
    text = subprocess.run(
        [sys.executable, REPOSITORY / "scripts" / tool, "--help"], capture_output=True, text=True, check=True
    ).stdout
    assert f"example: python {tool}" in " ".join(text.split()) and "--json" in text


# ---------------------------------------------------------------- validate_numerical_accuracy.py


def test_errors_of_two_outcomes_by_hand():
    def outcome(loss, gradient, losses):
        weights = {"w": torch.tensor([3.0, 4.0])}
        return {"logits": torch.ones(2), "loss": loss, "gradients": gradient, "losses": losses, "weights": weights}

    one = {"w": torch.tensor([3.0, 4.0]), "v": torch.tensor([1.0])}
    entries = accuracy.compare(
        outcome(2.0, one, [4.0, 5.0]), outcome(2.02, {"w": torch.tensor([3.0, 4.5])}, [4.0, 5.5])
    )
    errors = {
        entry["name"] if entry["kind"] != "weight after training" else "after": entry["error"] for entry in entries
    }
    expected = {"logits": 0, "loss": 0.01, "w": 0.1, "v": float("inf"), "after": 0, "step 1": 0, "step 2": 0.1}
    assert errors == pytest.approx(expected)
    result = accuracy.verdict(entries, 0.05)
    assert (result["passed"], result["beyond"], result["worst"]["name"]) == (False, 3, "v")
    assert accuracy.verdict([e for e in entries if e["error"] <= 0.05], 0.05)["passed"]


def test_not_a_number_is_beyond_every_tolerance():
    entries = [{"kind": "loss", "name": "loss", "error": accuracy.scalar_error(float("nan"), 1.0)}]
    assert not accuracy.verdict(entries, 1e9)["passed"]


def test_the_documented_accuracy_command_passes():
    command = "validate_numerical_accuracy.py --baseline ../version1_pytorch_baseline/tiny_llama_v1.py "
    result = call(2, command + f"--optimized ./tiny_llama_v2.py --tolerance 1e-4 --json - {shlex.join(SIZES)}")
    content = json.loads(result.stdout)
    kinds = [entry["kind"] for entry in content["entries"]]
    # embedding, last norm, and 9 weights in the only layer
    assert (kinds.count("gradient"), kinds.count("loss of a step"), kinds.count("logits")) == (11, 10, 1)
    assert content["verdict"]["passed"] and 0 < content["verdict"]["worst"]["error"] < 1e-5


def test_versions_3_and_4_agree_with_version_1(capsys):
    for version in (3, 4):
        arguments = ["--baseline", FOLDERS[1], "--optimized", FOLDERS[version], "--steps", "2", *HERE]
        assert accuracy.main([str(word) for word in arguments]) == 0
        assert "passed" in capsys.readouterr().out


def test_a_copy_without_a_gradient_is_found(tmp_path, capsys):
    text = SCRIPTS[2].read_text()
    copy = tmp_path / "my copy.py"
    copy.write_text(
        text.replace("return self.o_proj(mixed.flatten(-2))", "return self.o_proj(mixed.flatten(-2)).detach()")
    )
    assert copy.read_text() != text
    arguments = ["--baseline", str(SCRIPTS[1]), "--optimized", str(copy), "--steps", "1", *SIZES]
    assert accuracy.main(arguments) == 1
    captured = capsys.readouterr().out
    assert "FAILED" in captured and "attention" in captured.splitlines()[-1] and "inf" in captured


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--baseline", "nowhere.py", "--optimized", SCRIPTS[2]], "does not exist"),
        (["--baseline", FOLDERS[1].parent, "--optimized", SCRIPTS[2]], "holds 0 files"),
        (
            ["--baseline", SCRIPTS[1], "--optimized", REPOSITORY / "scripts/common/versions.py", *SIZES],
            "has no Trainer",
        ),
        (["--baseline", SCRIPTS[1], "--optimized", SCRIPTS[2], "--steps", "0"], "--steps: must be"),
        (["--baseline", SCRIPTS[1]], "--optimized"),
        (["--baseline", SCRIPTS[1], "--optimized", SCRIPTS[2], "--num-heads", "5"], "--hidden-dim"),
    ],
)
def test_bad_input_of_the_accuracy_check(arguments, words, capsys):
    refused(accuracy.main, arguments, capsys, words)


# ---------------------------------------------------------------- performance_regression_test.py


def metrics(folder, name, times, **changes):
    """A metrics file with these step times in ms; changes replace entries of its parts."""
    content = {
        "version": 1,
        "config": {"hidden_dim": 32, "num_layers": 1},
        "options": {"batch_size": 2, "seq_len": 16, "data": None, "use_amp": False, "tf32": False},
        "environment": {"device": "MI300X", "device_type": "cuda", "torch": "2.13", "cuda": None, "hip": "7.0"},
        "steps": [{"step_ms": time} for time in times],
        "summary": {"parameters": 10, "parameters_trained": 10, "first_loss": 6.9},
    }
    for part, values in changes.items():
        content[part] = content[part] | values
    path = folder / f"{name}.json"
    path.write_text(json.dumps(content))
    return path


def regression_status(baseline, current, *options):
    return regression.main(["--baseline-results", str(baseline), "--current-results", str(current), *options])


def test_the_speed_up_and_its_interval_by_hand():
    # every draw of equal steps is the same: 20 / 8
    assert regression.speedup([[20.0] * 9], [[8.0] * 9])["low"] == 2.5
    result = regression.speedup([[20.0] * 9], [[10.0] * 5 + [16.0] * 4])
    assert (result["speedup"], result["low"], result["high"]) == (2.0, 1.25, 2.0)
    assert [regression.judge(result, x) for x in (1.2, 1.3, 2.1)] == ["faster", "too close to tell", "slower"]


def test_slower_fails_faster_passes_and_the_open_case_is_said(tmp_path, capsys):
    base, fast = metrics(tmp_path, "base", [20.0] * 9), metrics(tmp_path, "fast", [10.0] * 9)
    assert regression_status(base, fast, "--min-speedup", "1.3") == 0
    assert "speed-up       2.00x" in capsys.readouterr().out
    assert regression_status(fast, base, "--min-speedup", "1.0") == 1
    assert "FAILED" in capsys.readouterr().out
    spread = metrics(tmp_path, "spread", [10.0] * 5 + [16.0] * 4)
    assert regression_status(base, spread, "--min-speedup", "1.3") == 0
    assert "too close to tell" in capsys.readouterr().out
    assert regression_status(base, spread, "--min-speedup", "1.3", "--strict", "--json", "-") == 1
    assert json.loads(capsys.readouterr().out)["result"]["low"] == 1.25


def test_runs_that_cannot_be_compared_are_refused(tmp_path, capsys):
    base = metrics(tmp_path, "base", [20.0] * 9)
    for part, key in (("environment", "device"), ("config", "num_layers"), ("options", "seq_len"), ("options", "tf32")):
        other = metrics(tmp_path, "other", [10.0] * 9, **{part: {key: 99}})
        arguments = ["--baseline-results", base, "--current-results", other]
        refused(regression.main, arguments, capsys, f"{key}: ")
        assert regression_status(base, other, "--allow-different") == 0
        assert f"different: {key}: " in capsys.readouterr().out
    for summary, words in (({"parameters_trained": 9}, "trained 9 of 10"), ({"first_loss": 7.2}, "first loss is 7.2")):
        other = metrics(tmp_path, "other", [10.0] * 9, summary=summary)
        refused(regression.main, ["--baseline-results", base, "--current-results", other], capsys, words, status=1)


@pytest.mark.parametrize(
    ("content", "words"),
    [(None, "cannot be read"), ("{", "no valid JSON"), ("[]", "no metrics file"), ('{"a": 1}', "no metrics file")],
)
def test_files_that_are_no_metrics_are_refused(content, words, tmp_path, capsys):
    path = tmp_path / "other.json"
    if content is not None:
        path.write_text(content)
    base = metrics(tmp_path, "base", [20.0])
    refused(regression.main, ["--baseline-results", base, "--current-results", path], capsys, words)


def test_the_documented_regression_command_reads_what_the_scripts_write(tmp_path):
    (tmp_path / "v2").mkdir()
    for version, name in ((1, "version1_baseline_metrics"), (2, "v2/version2_metrics")):
        file = tmp_path / f"{name}.json"
        assert load_version(version).main([*SIZES, "--num-steps", "6", "--metrics-file", str(file)]) == 0
    command = "performance_regression_test.py --baseline-results ../version1_baseline_metrics.json "
    result = call(2, command + "--current-results ./version2_metrics.json --min-speedup 0.01", cwd=tmp_path / "v2")
    assert "PASSED" in result.stdout and "6 steps" in result.stdout


# ---------------------------------------------------------------- traces and the launches in them


SAMPLES = pathlib.Path(__file__).parent / "samples"


@pytest.fixture(scope="module")
def profiled(tmp_path_factory):
    """Folders with a trace of two steps of versions 1 and 2, as the documented commands leave them."""
    workshop = tmp_path_factory.mktemp("workshop")
    folders = {1: workshop / "version1_pytorch_baseline" / "pytorch_profiles", 2: workshop / "v2" / "fusion_analysis"}
    for version, folder in folders.items():
        arguments = [*SIZES, "--num-steps", "2", "--profile-steps", "2", "--enable-pytorch-profiler"]
        file = folder.parent / f"metrics_v{version}.json"
        folder.mkdir(parents=True)
        load_version(version).main([*arguments, "--profile-dir", str(folder), "--metrics-file", str(file)])
    return folders


def test_flops_and_bytes_of_operators_by_hand():
    def found(name, *tensors):
        dims, types, strides = zip(*((t[0], t[1], t[2] if len(t) > 2 else []) for t in tensors), strict=True)
        return traces.work(name, list(dims), list(types), list(strides))

    # 2 x 3 times 3 x 4: 24 multiply-adds; 6 + 12 + 8 numbers
    assert found("aten::mm", ([2, 3], "float"), ([3, 4], "float")) == (48, 104)
    assert found("aten::bmm", ([5, 2, 3], "c10::Half"), ([5, 3, 4], "c10::Half")) == (240, 260)
    assert found("aten::addmm", ([4], "float"), ([2, 3], "float"), ([3, 4], "float")) == (48, 120)
    assert found("aten::mul", ([2, 8], "float"), ([2, 1], "float")) == (0, 64 + 8 + 64)
    assert found("aten::add_", ([2, 8], "float"), ([2, 8], "float")) == (0, 192)
    assert found("aten::copy_", ([8], "float"), ([8], "c10::Half")) == (0, 48)
    # a dimension that was expanded is one row in memory
    assert found("aten::copy_", ([4, 8], "float", [8, 1]), ([4, 8], "float", [0, 1])) == (0, 128 + 32)
    assert found("aten::cat", ([[2, 8], [2, 8]], "TensorList", [[8, 1], [8, 1]]))[1] == 256
    assert found("aten::embedding", ([100, 8], "float"), ([2, 3], "long int")) == (0, 48 + 2 * 4 * 6 * 8)
    # batch 1, 2 heads, 4 tokens, width 8: two products of 4 x 4 x 8 a head, halved, a multiply-add being two
    heads = [([1, 2, 4, 8], "float")] * 3
    assert found("aten::_scaled_dot_product_flash_attention_for_cpu", *heads)[0] == 2 * 2 * 2 * 4 * 4 * 8 / 2
    assert found("aten::_flash_attention_forward", *[([1, 4, 2, 8], "float")] * 3)[0] == 2 * 2 * 2 * 4 * 4 * 8 / 2
    assert traces.work("aten::zeros", [], [], []) == (None, None)


def test_the_roofline_is_the_slower_of_the_two():
    ceilings = {"matmul_tflops": 100.0, "copy_tb_s": 2.0}
    assert traces.roofline_us(1e9, 1e6, ceilings) == pytest.approx(10.0)
    assert traces.roofline_us(0.0, 1e8, ceilings) == pytest.approx(50.0)
    assert traces.roofline_us(1e9, None, ceilings) is None


def test_operators_that_only_call_others_do_not_count():
    profile = traces.read_profile(SAMPLES / "pytorch" / "trace_cpu.json")
    times = {kernel.name: kernel.total_ns for kernel in profile.calls}
    # linear and t do nothing themselves; addmm took 40 us, of which its copy took 4
    assert times == {"aten::addmm": 36e3, "aten::copy_": 4e3, "aten::silu": 9e3, "aten::mm": 30e3}


def test_kernels_belong_to_the_operator_that_launched_them(tmp_path):
    dims = {
        "External id": 7,
        "Input Dims": [[2, 3], [3, 4]],
        "Input type": ["float", "float"],
        "Input Strides": [[], []],
    }
    events = [
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 5, "pid": 1, "tid": 1, "args": dims},
        {"ph": "X", "cat": "kernel", "name": "splitK gemm", "ts": 10, "dur": 3, "args": {"External id": 7}},
        {"ph": "X", "cat": "kernel", "name": "reduce", "ts": 14, "dur": 1, "args": {"External id": 7}},
        {"ph": "X", "cat": "kernel", "name": "lonely", "ts": 16, "dur": 2, "args": {}},
    ]
    file = tmp_path / "trace_x.json"
    file.write_text(json.dumps({"deviceProperties": [{"name": "MI300X"}], "traceEvents": events}))
    profile = traces.read_profile(file)
    product, lonely = profile.operations
    assert (product.us, product.flops, product.bytes, product.group) == (4, 48, 104, "GEMM")
    assert (lonely.name, lonely.flops, profile.device, profile.steps) == ("lonely", None, "MI300X", None)


@pytest.mark.parametrize("version", [1, 2])
def test_products_of_a_trace_are_those_of_the_model(profiled, version):
    profile = traces.read_profile(profiled[version])
    script = load_version(version)
    config = script.model_config(script.parse_options(SIZES))
    attention = 6 * 2 * 16**2 * 32  # 6 L B T T C
    matrices = script.flops_per_step(config, 2, 16) - attention
    products = sum(o.flops for o in profile.operations if o.name == "aten::mm")
    assert profile.steps == 2 and products == 2 * matrices


# ---------------------------------------------------------------- analyze_kernel_reduction.py


def test_kernels_a_step_are_counted_from_the_traces(tmp_path, capsys):
    def trace(name, kernels, steps):
        events = [{"ph": "X", "cat": "user_annotation", "name": "optimizer", "ts": i, "dur": 1} for i in range(steps)]
        events += [
            {"ph": "X", "cat": "kernel", "name": k, "ts": 9 + i, "dur": 2.0} for i, k in enumerate(kernels * steps)
        ]
        (tmp_path / name).mkdir()
        (tmp_path / name / "trace_1.json").write_text(json.dumps({"traceEvents": events}))
        return str(tmp_path / name)

    baseline = trace("v1", ["gemm_q", "gemm_k", "gemm_v", "softmax_kernel"], 3)
    fused = trace("v2", ["gemm_qkv", "flash_fwd"], 2)
    assert reduction.main(["--baseline", baseline, "--fused", fused, "--json", "-"]) == 0
    content = json.loads(capsys.readouterr().out)
    rows = {row["group"]: (row["baseline_calls"], row["fused_calls"], row["fewer_percent"]) for row in content["rows"]}
    assert rows == {"GEMM": (3, 1, pytest.approx(200 / 3)), "attention": (1, 1, 0), "all": (4, 2, 50)}
    assert content["rows"][-1]["baseline_ms"] == pytest.approx(0.008)
    assert content["change"]["gemm_qkv"] == 1 and content["change"]["gemm_q"] == -1


def test_the_documented_reduction_command(profiled):
    folder = profiled[2].parent
    command = (
        "analyze_kernel_reduction.py --baseline ../version1_pytorch_baseline/pytorch_profiles --fused ./fusion_analysis"
    )
    result = call(2, command, cwd=folder)
    # q, k, v become one product and gate, up one, in each of forward, gradient of input and gradient of weight
    products = {v: sum(o.name == "aten::mm" for o in traces.read_profile(profiled[v]).operations) / 2 for v in (1, 2)}
    assert products == {1: 24, 2: 15}
    assert "-9.0  aten::mm" in result.stdout and "operators a step became" in result.stdout


def test_bad_input_of_the_reduction(profiled, tmp_path, capsys):
    gpu = SAMPLES / "pytorch" / "trace_gpu.json"
    refused(reduction.main, ["--baseline", profiled[1], "--fused", gpu], capsys, "one profile is of a CPU")
    refused(reduction.main, ["--baseline", gpu, "--fused", gpu], capsys, "--baseline-steps")
    refused(reduction.main, ["--baseline", tmp_path, "--fused", gpu], capsys, "without kernel times")
    refused(reduction.main, ["--baseline", tmp_path / "no", "--fused", gpu], capsys, "does not exist")
    refused(reduction.main, ["--baseline", gpu, "--fused", gpu, "--top", "0"], capsys, "--top: must be")


# ---------------------------------------------------------------- analyze_kernel_launches.py


@pytest.mark.parametrize(
    "sample", ["pytorch/trace_gpu.json", "nsys/report_cuda_gpu_trace.csv", "rocm-6.2/kernel_trace.csv"]
)
def test_gaps_of_the_samples_by_hand(sample, capsys):
    assert launches.main(["--trace-file", str(SAMPLES / sample), "--steps", "2", "--json", "-"]) == 0
    figures = json.loads(capsys.readouterr().out)["figures"]
    copy = "rocm" not in sample  # that sample has its one copy, 997 to 999, in a file of its own
    # kernels 1000-1001 1002-1007 1009-1013 1014-1021 1022-1024.5 1026-1032 1034-1035.5 1040-1043
    assert figures["busy_us"] == pytest.approx(30 + 2 * copy) and figures["idle_us"] == pytest.approx(13 + copy)
    assert (figures["launches"], figures["launches_a_step"]) == (8 + copy, (8 + copy) / 2)
    assert figures["gap_median_us"] == pytest.approx(1.5) and figures["launch_bound"]


def test_overlapping_queues_are_busy_once_and_pauses_are_no_gaps():
    rows = [(0, 10), (4, 4), (9, 6), (17, 3), (5020, 10)]
    rows = [{"start_ns": 1e3 * s, "duration_ns": 1e3 * d, "kernel": f"k{i}"} for i, (s, d) in enumerate(rows)]
    figures = launches.launch_figures(rows, None, pause_us=1000)
    assert (figures["busy_us"], figures["idle_us"], figures["paused_us"], figures["gaps"]) == (28, 2, 5000, 1)
    assert not figures["launch_bound"]
    assert launches.largest_gaps(rows, 1000, 5) == [{"gap_us": 2, "after": "k2", "before": "k3"}]


def test_the_documented_launch_command_reads_results_csv(tmp_path):
    (tmp_path / "results.csv").write_bytes((SAMPLES / "rocm-6.4" / "kernel_trace.csv").read_bytes())
    result = call(2, "analyze_kernel_launches.py --trace-file results.csv", cwd=tmp_path)
    assert "8 launches" in result.stdout and "launch-bound: the GPU waits 30.2 %" in result.stdout


def test_bad_input_of_the_launch_analysis(capsys):
    for sample, words in (("rocm-6.2/kernel_stats.csv", "keep sums"), ("pytorch/trace_cpu.json", "on a GPU")):
        refused(launches.main, ["--trace-file", SAMPLES / sample], capsys, words)
    refused(launches.main, ["--trace-file", "nowhere.csv"], capsys, "does not exist")
    refused(launches.main, ["--trace-file", "nowhere.csv", "--steps", "0"], capsys, "--steps: must be")


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


# ---------------------------------------------------------------- analyze_batch_scaling.py


def scaling_trace(folder, batch, step_us, steps=3, memory=None):
    """A trace of steps of that length: 50 us on the host, the rest a kernel that ends later."""
    dims = {"Input Dims": [[64, 32], [batch, 16], []]}
    events = []
    for i in range(steps):
        begin = 10_000 * i
        events += [
            {"ph": "X", "cat": "user_annotation", "name": "forward", "ts": begin, "dur": 20},
            {"ph": "X", "cat": "cpu_op", "name": "aten::embedding", "ts": begin, "dur": 5, "args": dims},
            {"ph": "X", "cat": "user_annotation", "name": "optimizer", "ts": begin + 40, "dur": 10},
            {"ph": "X", "cat": "kernel", "name": "gemm", "ts": begin + 30, "dur": step_us - 30},
        ]
        if memory:
            arguments = {"Device Type": 1, "Total Allocated": memory * 2**20}
            events.append({"ph": "i", "name": "[memory]", "ts": begin, "args": arguments})
    folder.mkdir()
    (folder / "trace_v1.json").write_text(json.dumps({"traceEvents": events}))


def test_the_documented_scaling_command_by_hand(tmp_path):
    for batch in (4, 8, 16, 32):
        scaling_trace(tmp_path / f"scaling_bs{batch}", batch, 100 + 50 * batch, memory=10 + 3 * batch)
    folders = " ".join(f"scaling_bs{batch}" for batch in (16, 32, 4, 8))  # the order of the shell
    result = call(1, f"analyze_batch_scaling.py --profile-dirs {folders} --json -", cwd=tmp_path)
    content = json.loads(result.stdout)
    assert [row["batch_size"] for row in content["rows"]] == [4, 8, 16, 32]
    assert [row["step_ms"] for row in content["rows"]] == pytest.approx([0.3, 0.5, 0.9, 1.7])
    found = [content[key] for key in ("fixed_ms", "ms_a_sequence", "fixed_mib", "mib_a_sequence")]
    assert found == pytest.approx([0.1, 0.05, 10, 3])
    assert content["rows"][1]["efficiency"] == pytest.approx((8 / 0.5) / (4 / 0.3) / 2)
    assert content["best_batch_size"] == 32


def test_scaling_reads_what_the_scripts_write(profiled, capsys):
    assert batches.main(["--profile-dirs", str(profiled[1])]) == 0
    row = capsys.readouterr().out.splitlines()[1].split()
    assert row[:3] == ["2", "16", "2"] and float(row[3]) > 0


def test_bad_input_of_the_scaling_analysis(tmp_path, capsys):
    scaling_trace(tmp_path / "a", 4, 100)
    refused(batches.main, ["--profile-dirs", "scaling_bs*"], capsys, "scaling_bs* does not exist")
    refused(batches.main, ["--profile-dirs", tmp_path / "a", FOLDERS[1]], capsys, "without kernel times")
    refused(batches.main, ["--profile-dirs", tmp_path / "a", tmp_path / "a"], capsys, "same batch size")
    refused(batches.main, ["--profile-dirs", SAMPLES / "rocm-6.2"], capsys, "no PyTorch trace")
    (tmp_path / "cut.json").write_text('{"traceEvents": [')
    refused(batches.main, ["--profile-dirs", tmp_path / "cut.json"], capsys, "cut.json is cut off or damaged")
    refused(batches.main, ["--profile-dirs", SAMPLES / "pytorch" / "trace_gpu.json"], capsys, "marks no training steps")


# ---------------------------------------------------------------- compare_versions.py


def run_of(times, peak=100.0, trained=10):
    summary = {
        "parameters": 10, "parameters_trained": trained, "first_loss": 6.9, "final_loss": 6.0, "flops_per_step": 2e9,
        "mfu": 0.1, "step_ms": {"median": 20.0}, "peak_memory_mb": peak, "graph": {"captured": False},
        "forward_ms": 1.0, "backward_ms": 2.0, "optimizer_ms": None,
    }  # fmt: skip
    options = {"batch_size": 4, "seq_len": 16}
    return {"summary": summary, "options": options, "environment": {}, "steps": [{"step_ms": t} for t in times]}


def test_figures_and_speed_ups_by_hand():
    good, bad = ({"passed": passed, "worst": {}} for passed in (True, False))
    first = versions_tool.figures("v1", [run_of([20.0, 20.0]), run_of([20.0, 30.0], peak=120.0)], None)
    assert first["step_ms"] == {"p25": 20.0, "median": 20.0, "p75": 22.5} and first["peak_memory_mb"] == 120
    assert (first["samples_per_second"], first["tokens_per_second"], first["tflops"]) == (200, 3200, 0.1)
    assert (first["forward_ms"], first["optimizer_ms"], first["mfu"]) == (1.0, None, 0.1)
    rows = [first]
    for trained, accurate in ((10, good), (9, good), (10, bad)):
        rows.append(versions_tool.figures("x", [run_of([8.0], trained=trained)], accurate))
    versions_tool.add_speedups(rows)
    assert [row["speedup"] for row in rows] == [1.0, 2.5, None, None]


def test_the_documented_comparison_runs_from_its_folder(one_process):
    options = shlex.join([*SIZES, "--rounds", "1", "--num-steps", "3"])
    result = call(2, f"compare_versions.py --v1 ../version1_pytorch_baseline --v2 . --json - {options}")
    rows = json.loads(result.stdout)["rows"]
    assert [row["name"] for row in rows] == ["v1", "v2"]
    assert rows[0]["final_loss"] == pytest.approx(rows[1]["final_loss"])
    assert rows[1]["accuracy"]["passed"] and rows[1]["speedup"] > 0
    assert "round 1 of 1, v2" in result.stderr


def test_without_folders_all_four_are_compared(one_process, capsys):
    assert versions_tool.main([*HERE, "--rounds", "1", "--num-steps", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = {line.split()[0]: line.split()[-1] for line in lines[2:6]}
    assert list(rows) == ["v1", "v2", "v3", "v4"] and rows["v1"] == "1.00x"
    interpreted = not torch.cuda.is_available()
    assert (rows["v3"] == "-") == interpreted == ("interpreter" in lines[-1])


def test_the_report_holds_tables_and_pictures(one_process, tmp_path):
    pytest.importorskip("matplotlib")
    folder = tmp_path / "our report"
    arguments = ["--v1", str(FOLDERS[1]), "--v2", str(FOLDERS[2]), "--rounds", "1", "--num-steps", "2"]
    arguments += ["--report", str(folder), "--seq-lengths", "16,32"]
    assert versions_tool.main([*arguments, *SIZES]) == 0
    content = json.loads((folder / "comparison.json").read_text())
    # by hand: 8 and 5 products with weights, each forward and twice backward, and 6 of version 1's attention
    assert [content["kernels"][v]["groups"]["GEMM"]["calls"] for v in ("v1", "v2")] == [30, 15]
    assert content["memory"]["lengths"] == [16, 32] and content["memory"]["rows"][1]["peaks_mb"][1] > 0
    page = (folder / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 5
    assert not any(word in page for word in ("http:", "https:", "<script"))
    assert f"<td>{content['rows'][1]['step_ms']['median']:.3f}</td>" in page and "ms a step" in page
    names = {path.name for path in folder.glob("*.png")}
    assert names == {"steps.png", "kernel_groups.png", "roofline_v1.png", "roofline_v2.png", "memory.png"}


def test_a_version_that_fails_is_named_and_the_rest_compared(one_process, monkeypatch, capsys):
    def failing(script, argv):
        if "version2" in str(script):
            raise Failure(1, "tiny_llama_v2.py failed: no memory")
        return analysis.train(script, argv)

    monkeypatch.setattr(versions_tool, "train", failing)
    arguments = ["--v1", str(FOLDERS[1]), "--v2", str(FOLDERS[2]), "--v4", str(FOLDERS[4]), "--rounds", "1"]
    assert versions_tool.main([*arguments, *SIZES, "--num-steps", "2"]) == 1
    output = capsys.readouterr().out
    assert "v2: tiny_llama_v2.py failed" in output and "\nv4 " in output and "\nv2 " not in output


def test_bad_input_of_the_comparison(capsys):
    refused(versions_tool.main, ["--v1", FOLDERS[1]], capsys, "give two folders")
    refused(versions_tool.main, ["--v1", "nowhere", "--v2", FOLDERS[2]], capsys, "does not exist")
    refused(versions_tool.main, ["--rounds", "0"], capsys, "--rounds: must be")
    arguments = ["--v1", FOLDERS[1], "--v2", FOLDERS[2], "--num-heads", "5"]
    refused(versions_tool.main, arguments, capsys, "--hidden-dim must be")


# ---------------------------------------------------------------- analyze_bottlenecks.py, memory_bandwidth_analyzer.py


@pytest.fixture
def known_trace(tmp_path):
    """Two steps of a product (1 GFLOP, 8 MB, 20 us), an addition (12 MB, 10 us), a kernel without shapes (10 us)."""

    def operator(i, name, *shapes):
        shapes = {
            "Input Dims": list(shapes),
            "Input type": ["float"] * len(shapes),
            "Input Strides": [[]] * len(shapes),
        }
        return {"ph": "X", "cat": "cpu_op", "name": name, "ts": i, "dur": 1, "args": {"External id": i} | shapes}

    def kernel(i, name, us, number):
        return {"ph": "X", "cat": "kernel", "name": name, "ts": 100 * i, "dur": us, "args": {"External id": number}}

    events = []
    for step in (0, 10):
        events += [
            {"ph": "X", "cat": "user_annotation", "name": "optimizer", "ts": step, "dur": 1},
            operator(step + 1, "aten::mm", [1000, 500], [500, 1000]),
            operator(step + 2, "aten::add", [1000, 1000], [1000, 1000]),
            kernel(step + 1, "gemm", 20.0, step + 1),
            kernel(step + 2, "vectorized_elementwise_kernel", 10.0, step + 2),
            kernel(step + 3, "lonely", 10.0, 0),
        ]
    folder = tmp_path / "pytorch_profiles"
    folder.mkdir()
    (folder / "trace_v1.json").write_text(json.dumps({"deviceProperties": [{"name": "GPU"}], "traceEvents": events}))
    ceilings = tmp_path / "flops_profile.json"
    ceilings.write_text(json.dumps({"ceilings": {"matmul_tflops": 100.0, "copy_tb_s": 2.0}}))
    return tmp_path


def test_the_documented_bottleneck_command_by_hand(known_trace):
    command = "analyze_bottlenecks.py --profile-data pytorch_profiles/ --output-report bottlenecks_v1.md "
    call(1, command + "--ceilings flops_profile.json", cwd=known_trace)
    with open(known_trace / "bottleneck_analysis" / "operator_timing.csv", newline="") as file:
        rows = {row["operator"]: row for row in csv.DictReader(file)}
    # 1 GFLOP at 100 TFLOP/s is 10 of 20 us; 12 MB at 2 TB/s is 6 of 10 us
    assert float(rows["aten::mm"]["of_roofline"]) == pytest.approx(0.5)
    assert float(rows["aten::mm"]["tflops"]) == pytest.approx(50)
    assert float(rows["aten::add"]["of_roofline"]) == pytest.approx(0.6)
    assert float(rows["aten::add"]["gb_s"]) == pytest.approx(1200)
    assert rows["lonely"]["bytes"] == "" and float(rows["lonely"]["ms"]) == 0.01
    targets = json.loads((known_trace / "bottleneck_analysis" / "optimization_targets.json").read_text())["targets"]
    found = [(t["rank"], t["group"], t["could_save_ms"], t["share_percent"]) for t in targets]
    assert found[0] == (1, "GEMM", pytest.approx(0.01), pytest.approx(50)) and found[1][1:3] == ("other", None)
    assert found[2] == (3, "element-wise", pytest.approx(0.004), pytest.approx(25))
    assert targets[0]["step_could_be"] == pytest.approx(4 / 3)
    report = (known_trace / "bottlenecks_v1.md").read_text()
    assert "| 1 | `aten::mm` | GEMM | 1 | 0.020 | 50.0 | 50.000 | 400.0 | 50 % |" in report
    assert "| 1 | GEMM | 0.020 | 50.0 | 0.010 | 1.33 | version 2 (one product for q, k, v" in report


def test_a_profile_of_another_device_has_no_roofline_of_this_one(known_trace, monkeypatch, capsys):
    monkeypatch.chdir(known_trace)
    assert bottlenecks.main(["--profile-data", "pytorch_profiles"]) == 0
    assert "no roofline: the profile is of GPU" in capsys.readouterr().out
    assert "No roofline" in (known_trace / "bottlenecks.md").read_text()
    refused(bandwidth.main, ["--profile-data", "pytorch_profiles"], capsys, "--ceilings FILE")


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


# ---------------------------------------------------------------- fusion_ablation_study.py


def combination(on, steps, memory=100.0, kernels=10.0):
    row = {"on": list(on), "name": "", "reason": None, "kernels": kernels}
    return ablation.finished(row | {"runs": [{"step_ms": {"median": t}, "peak_memory_mb": memory} for t in steps]})


def test_worth_of_switches_by_hand():
    rows = [
        combination("", [16.0, 16.0, 20.0], kernels=40.0),
        combination("a", [8.0, 8.0, 8.0], memory=90.0, kernels=30.0),
        combination("b", [16.0, 17.0, 15.0], kernels=40.0),
        combination("ab", [4.0, 4.0, 3.0], memory=80.0, kernels=30.0),
    ]
    first, second = ablation.worth(rows, ("a", "b"))
    # alone 16 / 8, on top of b 16 / 4; the closest round is 16 / 8, the widest 15 / 3
    assert (first["switch"], first["alone"], first["last"], first["pairs"]) == ("a", 2, 4, 2)
    assert (first["speedup"], first["low"], first["high"]) == (pytest.approx(8**0.5), 2, 5)
    assert (first["memory_mb"], first["kernels"]) == (-15, -10)
    assert (second["alone"], second["last"], second["low"]) == (1, 2, pytest.approx(16 / 17))


def test_a_combination_that_failed_is_left_out_of_all_pairs():
    rows = [combination("", [10.0]), combination("a", [5.0]), combination("b", []) | {"step_ms": None}]
    first, second = ablation.worth(rows, ("a", "b"))
    assert (first["switch"], first["pairs"], first["last"]) == ("a", 1, None)
    assert (second["pairs"], second["speedup"], second["memory_mb"]) == (0, None, None)


def test_combinations_of_switches():
    assert [len(ablation.combinations(tuple("abcd"), every)) for every in (True, False)] == [16, 10]
    for every in (True, False):  # the two that a time limit must not leave out come first
        assert ablation.combinations(("a", "b"), every)[:2] == [frozenset(), frozenset("ab")]
    names = [ablation.name_of(frozenset(on), tuple("abcd")) for on in ("", "ac", "abd", "abcd")]
    assert names == ["none", "a + c", "all but c", "all"]
    on = frozenset(["b"])
    assert ablation.switch_options(("a", "b"), on) == ["--disable-a", "--enable-b"]


def test_the_switches_are_those_of_the_scripts():
    for version, switches in ablation.SWITCHES.items():
        names = {f"enable_{switch.replace('-', '_')}" for switch in switches}
        options = vars(load_version(version).parse_options(HERE))
        assert names == {name for name in options if name.startswith("enable_")} - {
            "enable_pytorch_profiler",
            "enable_all_fusion",
        }


def test_the_documented_ablation_command(one_process):
    command = "fusion_ablation_study.py --all-combinations --switches qkv-fusion --rounds 1 --num-steps 2 --json - "
    content = json.loads(call(2, command + shlex.join(SIZES)).stdout)
    off, on = content["combinations"]
    # one product instead of three in each of forward, gradient of input and gradient of weight
    assert (off["name"], on["name"]) == ("none", "qkv-fusion") and on["kernels"] < off["kernels"] - 6
    assert content["switches"][0]["speedup"] == pytest.approx(off["step_ms"] / on["step_ms"])


def test_bad_input_of_the_ablation(capsys, monkeypatch):
    refused(ablation.main, ["--switches", "no-fusion", *SIZES], capsys, "no-fusion is none of qkv-fusion")
    refused(ablation.main, ["--rounds", "0"], capsys, "--rounds: must be")
    refused(ablation.main, ["--num-heads", "5"], capsys, "--hidden-dim must be")

    def failing(script, argv):
        raise Failure(1, "tiny_llama_v2.py failed: broken")

    monkeypatch.setattr(ablation, "train", failing)
    refused(ablation.main, ["--switches", "qkv-fusion", *SIZES], capsys, "no combination ran", status=1)


def test_the_time_limit_by_hand(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(analysis.time, "monotonic", lambda: now[0])
    limit, endless = analysis.TimeLimit(60), analysis.TimeLimit(None)
    assert limit.room(1000)  # nothing is known of how long a run takes
    for seconds in (10, 20):
        limit.timed(lambda seconds=seconds: now.__setitem__(0, now[0] + seconds))
    # 30 of 60 s are gone; a run takes 15 s in the mean, and a quarter more may be needed
    assert limit.room(1) and not limit.room(2)
    now[0] += 11
    assert not limit.room(1) and endless.room(10**9)  # the longest took 20 s


def test_what_the_time_limit_leaves_out_of_the_studies(monkeypatch, tmp_path, capsys):
    """Each run takes 10 s of a clock that stands still otherwise."""
    now = [0.0]
    monkeypatch.setattr(analysis.time, "monotonic", lambda: now[0])

    def run(script, argv):
        now[0] += 10
        return {"summary": {"peak_memory_mb": 10.0, "step_ms": {"median": 5.0}}}

    monkeypatch.setattr(memory_tool, "train", run)
    arguments = ["--versions", "1,2", "--seq-lengths", "16,32,64", "--time-limit", "50", "--json", "-", *SIZES]
    assert memory_tool.main(arguments) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["lengths"] == [16, 32] and "no time is left for 64 tokens" in captured.err

    monkeypatch.setattr(ablation, "train", run)
    monkeypatch.setattr(ablation, "profiled_run", lambda *arguments: (run(*arguments), 7.0))
    arguments = ["--all-combinations", "--switches", "qkv-fusion,torch-compile", "--json", "-", *SIZES]
    for seconds, ran, rounds in ((35, 3, 1), (75, 4, 1), (95, 4, 2)):
        now[0] = 0.0
        assert ablation.main([*arguments, "--time-limit", str(seconds)]) == 0
        rows = json.loads(capsys.readouterr().out)["combinations"]
        assert sum(row["reason"] is None for row in rows) == ran and len(rows[0]["steps_ms"]) == rounds

    monkeypatch.setattr(versions_tool, "train", run)
    for seconds, rounds in ((39, 1), (70, 2), (95, 3)):
        now[0] = 0.0
        found, _ = versions_tool.measure(dict.fromkeys("ab"), [], 3, analysis.TimeLimit(seconds), after=2)
        assert [len(of) for of in found.values()] == [rounds] * 2


# ---------------------------------------------------------------- optimize_batch_size.py


def probe_of(limit, rate):
    """A device that holds so many sequences of 10 MB beside 100 MB, and computes rate(batch size) of them a second."""

    def probe(batch_size):
        if batch_size > limit:
            raise analysis.OutOfMemory(1, "out of memory")
        speed = rate(batch_size)
        step = {"median": 1e3 * batch_size / speed}
        return {"samples_per_second": speed, "step_ms": step, "peak_memory_mb": 100 + 10 * batch_size}

    return probe


def test_the_largest_batch_is_found_despite_probes_that_run_out_of_memory():
    rows = batch_tool.Search(probe_of(23, lambda b: b), 1e9, 4096, to_the_limit=True).run()
    assert [row["batch_size"] for row in rows if not row["fits"]] == [24, 32]
    assert batch_tool.best(rows, "memory")["batch_size"] in (22, 23)
    # 100 + 10 b <= 250
    rows = batch_tool.Search(probe_of(1000, lambda b: b), 250.0, 4096, to_the_limit=True).run()
    assert batch_tool.best(rows, "memory")["batch_size"] == 15
    assert next(row for row in rows if row["batch_size"] == 16)["peak_memory_mb"] == 260


def test_throughput_takes_the_smallest_batch_that_is_as_fast():
    rows = batch_tool.Search(probe_of(10**6, lambda b: min(b, 8) + b / 1e6), 1e9, 4096, to_the_limit=False).run()
    assert [row["batch_size"] for row in rows] == [1, 2, 4, 8, 16, 32]
    assert batch_tool.best(rows, "throughput")["batch_size"] == 8
    assert batch_tool.best(rows, "latency")["batch_size"] in (1, 2, 4, 8)
    none = batch_tool.Search(probe_of(0, lambda b: b), 1e9, 8, to_the_limit=False).run()
    assert batch_tool.best(none, "throughput") is None and len(none) == 1


def test_the_documented_batch_size_command_from_its_folder(one_process):
    command = "optimize_batch_size.py --target-memory-usage 0.8 --seq-len 16 --optimization-target throughput "
    model = "--hidden-dim 32 --num-layers 1 --num-heads 2 --vocab-size 64 --device cpu --num-steps 2 --max-batch-size 2"
    result = call(2, command + model + " --json -")
    content = json.loads(result.stdout)
    assert [row["batch_size"] for row in content["probes"]] == [1, 2] and content["version"] == 2
    assert content["budget_mb"] == pytest.approx(0.8 * content["device_memory_mb"])
    assert content["best"] in content["probes"] and "batch size 2 ..." in result.stderr


def test_bad_input_of_the_batch_size_search(capsys, monkeypatch):
    version = ["--version", "2", "--hidden-dim", "32", "--num-heads", "2"]
    refused(batch_tool.main, ["--target-memory-usage", "1.5"], capsys, "--target-memory-usage must be")
    refused(batch_tool.main, ["--max-batch-size", "0"], capsys, "--max-batch-size: must be")
    refused(batch_tool.main, ["--version", "2", "--num-heads", "5"], capsys, "--hidden-dim must be")

    def out_of_memory(script, argv):
        raise analysis.OutOfMemory(1, "out of memory")

    monkeypatch.setattr(batch_tool, "train", out_of_memory)
    refused(batch_tool.main, version, capsys, "not even one sequence", status=1)


# ---------------------------------------------------------------- analyze_memory_scaling.py


def test_growth_by_hand():
    lengths = [128, 256, 512, 1024]
    linear = memory_tool.growth(lengths, [100 + 0.5 * t for t in lengths])
    assert linear["growth"] == "linear" and linear["square_mb"] == pytest.approx(0, abs=1e-6)
    quadratic = memory_tool.growth(lengths, [100 + 0.5 * t + 0.002 * t * t for t in lengths])
    assert quadratic["fit"] == pytest.approx((100, 0.5, 0.002)) and quadratic["growth"] == "quadratic"
    assert quadratic["square_mb"] == pytest.approx(0.002 * 1024**2)
    square = 0.002 * (1024**2 - 128**2)
    assert quadratic["square_share"] == pytest.approx(square / (0.5 * 896 + square))
    for peaks in ([1.0, 2.0], [5.0, 5.0, 5.0]):
        assert memory_tool.growth(lengths[: len(peaks)], peaks)["growth"] is None


def test_memory_of_versions_side_by_side(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")

    def peaks(script, argv):
        length, version = int(argv[-1]), int(script.stem[-1])
        if length == 512 and version == 1:
            raise analysis.OutOfMemory(1, "out of memory")
        return {"summary": {"peak_memory_mb": 10 + length * (length if version == 1 else 1)}}

    monkeypatch.setattr(memory_tool, "train", peaks)
    picture = tmp_path / "memory.png"
    arguments = ["--versions", "v1,v2", "--seq-lengths", "64,512,128,256", "--picture", str(picture), *SIZES[:6]]
    assert memory_tool.main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].split() == "version 1 4,106.0 16,394.0 65,546.0 out of memory 100 quadratic".split()
    assert lines[3].split() == "version 2 74.0 138.0 266.0 522.0 0 linear".split()
    assert picture.read_bytes()[:4] == b"\x89PNG"


def test_memory_is_that_of_the_scripts():
    """In real processes, as every tool that trains starts them."""
    model = "--hidden-dim 32 --num-layers 1 --num-heads 2 --vocab-size 64 --device cpu".split()
    command = [sys.executable, FOLDERS[2] / "analyze_memory_scaling.py", "--versions", "2", "--seq-lengths", "16"]
    result = subprocess.run(
        [*command, "--batch-size", "2", *model, "--json", "-"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    content = json.loads(result.stdout)
    assert content["rows"][0]["peaks_mb"][0] > 50 and content["rows"][0]["growth"] is None and content["on_cpu"]


def test_bad_input_of_the_memory_tool(capsys):
    refused(memory_tool.main, ["--versions", "5"], capsys, "choose from 1, 2, 3, 4")
    refused(memory_tool.main, ["--seq-lengths", "0"], capsys, "at least 1")
    refused(memory_tool.main, ["--versions", "1", "--num-heads", "5"], capsys, "--hidden-dim must be")


# ---------------------------------------------------------------- generate_fusion_report.py, report_page.py


@pytest.fixture
def two_profiles(profiled, tmp_path):
    """A workshop folder with the profiles of versions 1 and 2 as run_all_profilers.sh leaves them."""
    names = {1: "version1_pytorch_baseline/complete_analysis", 2: "v2/complete_rocm_analysis"}
    folders = {version: tmp_path / name for version, name in names.items()}
    for version, folder in folders.items():
        metrics = json.loads((profiled[version].parent / f"metrics_v{version}.json").read_text())
        place = folder / "pytorch_profiles"
        place.mkdir(parents=True)
        trace = next(profiled[version].glob("trace_*.json"))
        shutil.copy(trace, place)
        content = {"version": version, "trace": trace.name, "steps_profiled": 2}
        content |= {key: metrics[key] for key in ("environment", "config", "summary")}
        content["summary"]["step_ms"] = {"median": 20.0 / version, "p25": 19.0 / version, "p75": 21.0 / version}
        (place / f"profile_v{version}_1.json").write_text(json.dumps(content))
    return folders


def test_the_documented_fusion_report(two_profiles):
    pytest.importorskip("matplotlib")
    command = "generate_fusion_report.py --baseline ../version1_pytorch_baseline/complete_analysis "
    command += "--fused ./complete_rocm_analysis --output ./fusion_comparison_report.md"
    result = call(2, command, cwd=two_profiles[2].parent)
    report = (two_profiles[2].parent / "fusion_comparison_report.md").read_text()
    assert "| step, median ms | 20.000 | 10.000 | 2.00 |" in report
    assert "10.000 ms a step, version 1 20.000 ms: 2.00x." in report
    before, after = (len(traces.read_profile(two_profiles[v]).calls) // 2 for v in (1, 2))
    assert f"{before} operators a step became {after}." in result.stdout
    assert f"| all | {before:.1f} | {after:.1f} | {100 * (before - after) / before:.1f} |" in report
    page = (two_profiles[2].parent / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 2 and "<td>2.00</td>" in page
    assert not any(word in page for word in ("http:", "https:", "<script", "<link"))


def test_a_page_escapes_what_it_is_given():
    body = [report_page.table(["<h>"], [["<td>"]]), report_page.paragraph("1 < 2")]
    text = report_page.page("a < b", [("x & y", body)])
    assert "<title>a &lt; b</title>" in text and "x &amp; y" in text and "&lt;td&gt;" in text and "1 &lt; 2" in text


BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
# What the page inside the frame of a phone's size turned out as: it becomes the title, which --dump-dom prints.
LOOK = """
<script>
frame.onload = () => { const page = frame.contentDocument, all = [...page.querySelectorAll("*")];
  document.title = JSON.stringify({ width: page.documentElement.scrollWidth, height: page.body.scrollHeight,
    pictures: [...page.images].map(image => [image.naturalWidth, image.clientWidth]),
    cut: all.filter(e => e.scrollWidth > e.clientWidth + 1 && e.clientWidth).map(e => e.outerHTML.slice(0, 60)),
    type: Math.min(...all.filter(e => e.tagName == "TD").map(e => parseFloat(page.defaultView
      .getComputedStyle(e).fontSize))) }); };
</script>
"""


def seen_in_a_browser(page, folder, width):
    """What LOOK says of the page in a window so many pixels wide; a message on the browser's console is a failure."""
    frame = (
        f'<iframe id="frame" style="width:{width}px;height:900px;border:0" srcdoc="{html.escape(page.read_text())}">'
    )
    wrapper = folder / "frame.html"
    wrapper.write_text(
        f"<!DOCTYPE html><html><head><title>none</title></head><body>{frame}</iframe>{LOOK}</body></html>"
    )
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--virtual-time-budget=9000"]
    command = [BROWSER, *options, f"--user-data-dir={folder / 'profile'}", "--dump-dom", wrapper.as_uri()]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert "CONSOLE" not in result.stderr, result.stderr
    return json.loads(html.unescape(result.stdout.split("<title>")[1].split("</title>")[0]))


def assert_readable(page, folder, width):
    seen = seen_in_a_browser(page, folder, width)
    assert seen["width"] <= width and seen["cut"] == [] and seen["height"] > 500, seen
    assert seen["pictures"] and all(natural > 500 and shown > 0.8 * width for natural, shown in seen["pictures"])
    assert seen["type"] > 11


@pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed to open the page in")
def test_the_fusion_report_opens_in_a_browser_on_a_phone(two_profiles, tmp_path):
    pytest.importorskip("matplotlib")
    output = two_profiles[2].parent / "report.md"
    folders = ["--baseline", str(two_profiles[1]), "--fused", str(two_profiles[2])]
    assert fusion_report.main([*folders, "--output", str(output)]) == 0
    assert_readable(output.parent / "report.html", tmp_path, 390)


def known_comparison(monkeypatch):
    """Content and scripts of a comparison of four versions on a GPU, whose measurements are known."""
    pytest.importorskip("matplotlib")
    content = {"options": ["--preset", "medium", "--use-amp"], "problems": [], "rows": []}
    for version in range(1, 5):
        row = versions_tool.figures(f"v{version}", [run_of([1248.91 / version] * 3, peak=15613.0)], None)
        row["environment"] = {"device": "AMD Instinct MI300X", "torch": "2.13.0"}
        content["rows"].append(row | {"tokens_per_second": 1234567.8, "trained": 1.0})
    versions_tool.add_speedups(content["rows"])
    profile = traces.read_profile(SAMPLES / "pytorch" / "trace_gpu.json", steps=2)
    monkeypatch.setattr(versions_tool, "profiles_of", lambda *_: {f"v{n}": profile for n in range(1, 5)})
    ceilings = {"matmul_tflops": 100.0, "copy_tb_s": 2.0}
    monkeypatch.setattr(versions_tool, "ceilings_for", lambda *_: (ceilings, "measured here"))
    monkeypatch.setattr(memory_tool, "train", lambda _, argv: {"summary": {"peak_memory_mb": 20.0 * int(argv[-1])}})
    return content, {f"v{n}": SCRIPTS[n] for n in range(1, 5)}


def test_a_report_without_time_for_memory_says_so(tmp_path, monkeypatch):
    limit = analysis.TimeLimit(0)
    limit.took.append(1.0)
    versions_tool.write_report(*known_comparison(monkeypatch), tmp_path, [128, 256], limit)
    page = (tmp_path / "report.html").read_text()
    assert "No time was left to measure it." in page and "V4 is the fastest" in page
    content = json.loads((tmp_path / "comparison.json").read_text())
    assert not (tmp_path / "memory.png").exists() and "memory" not in content


def test_a_report_that_is_ended_while_it_measures_memory_keeps_the_rest(tmp_path, monkeypatch):
    def ended(script, argv):
        raise KeyboardInterrupt

    comparison = known_comparison(monkeypatch)
    monkeypatch.setattr(memory_tool, "train", ended)
    with pytest.raises(KeyboardInterrupt):
        versions_tool.write_report(*comparison, tmp_path, [128, 256], analysis.TimeLimit(None))
    assert "V4 is the fastest" in (tmp_path / "report.html").read_text()


def test_memory_on_a_gpu_is_measured_side_by_side(monkeypatch):
    """All versions meet in each length; the one that finds no room among the others is run again when they are gone."""
    together, inside, alone = threading.Barrier(3, timeout=20), [], []

    def run(script, argv):
        inside.append(script)
        if inside.count("two") < 2:
            together.wait()
            if script == "two":
                raise analysis.OutOfMemory(1, "no room")
        else:
            alone.append(len(inside))
        return {"summary": {"peak_memory_mb": float(argv[-1])}}

    monkeypatch.setattr(memory_tool, "train", run)
    monkeypatch.setattr(memory_tool, "on_cpu", lambda argv: False)
    scripts = {1: "one", 2: "two", 3: "three"}
    measured = memory_tool.measure(scripts, [64], [], analysis.TimeLimit(None))
    assert [row["peaks_mb"] for row in measured["rows"]] == [[64.0]] * 3 and alone == [4]

    def never(script, argv):
        raise analysis.OutOfMemory(1, "no room")

    monkeypatch.setattr(memory_tool, "train", never)
    measured = memory_tool.measure({1: "one", 2: "two"}, [64], [], analysis.TimeLimit(None))
    assert [row["peaks_mb"] for row in measured["rows"]] == [[None], [None]]


def test_memory_that_no_length_fits_into_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    rows = [{"version": 1, "peaks_mb": [None, None], "growth": None}]
    memory_tool.draw(tmp_path / "memory.png", {"device": "a GPU", "lengths": [128, 256], "rows": rows})
    assert (tmp_path / "memory.png").stat().st_size > 0


@pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed to open the page in")
def test_the_comparison_of_a_gpu_opens_in_a_browser_on_a_phone(tmp_path, monkeypatch):
    comparison = known_comparison(monkeypatch)
    versions_tool.write_report(*comparison, tmp_path, [128, 256, 512, 1024], analysis.TimeLimit(None))
    page = (tmp_path / "report.html").read_text()
    assert "V4 is the fastest: 312.228 ms a step, 4.00 times as fast as v1." in page and "AMD Instinct MI300X" in page
    assert_readable(tmp_path / "report.html", tmp_path, 390)
    broken = tmp_path / "broken.html"
    broken.write_text(page.replace("<td>15,613</td>", f"<td>{'15,613' * 20}</td>").replace("base64,", "base64,x"))
    seen = seen_in_a_browser(broken, tmp_path, 390)
    assert seen["cut"] and any(natural == 0 for natural, _ in seen["pictures"])


def test_bad_input_of_the_fusion_report(two_profiles, tmp_path, capsys):
    both = ["--baseline", two_profiles[1], "--fused", two_profiles[2]]
    refused(fusion_report.main, ["--baseline", "nowhere", "--fused", two_profiles[2]], capsys, "is no folder")
    (tmp_path / "empty").mkdir()
    refused(fusion_report.main, ["--baseline", tmp_path / "empty", *both[2:]], capsys, "holds no profile_v")
    refused(fusion_report.main, [*both, "--use-amp"], capsys, "means nothing")
    refused(fusion_report.main, [*both, "--output", "a.md", "--output-dir", "b"], capsys, "not allowed with")
    file = next(two_profiles[2].rglob("profile_v2_1.json"))
    content = json.loads(file.read_text())
    content["config"]["hidden_dim"] = 64
    file.write_text(json.dumps(content))
    refused(fusion_report.main, both, capsys, "hidden_dim: 32, 64")
    assert fusion_report.main([*map(str, both), "--allow-different", "--output", str(tmp_path / "r.md")]) == 0
    assert "differ in hidden_dim: 32, 64" in (tmp_path / "r.md").read_text()
    file.write_text("{}")
    refused(fusion_report.main, both, capsys, "damaged")


def test_without_folders_both_versions_are_profiled(two_profiles, tmp_path, monkeypatch, capsys):
    def profile(version, folder, rest):
        assert rest == ["--tf32"]
        shutil.copytree(two_profiles[version], folder)

    monkeypatch.setattr(fusion_report, "profile_version", profile)
    folder = tmp_path / "optimization_analysis"
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert fusion_report.main(["--output-dir", str(folder), "--tf32"]) == 0
    assert (folder / "fusion_report.md").is_file() and "no report.html" in capsys.readouterr().err
