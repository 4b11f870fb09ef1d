"""The tools that read traces: their numbers against cases known by hand, and the documented commands."""

import csv
import io
import json
import os
import pathlib
import re
import shutil
import sys

import pytest
import torch

import analyze_batch_scaling as batches
import analyze_bottlenecks as bottlenecks
import analyze_communication as communication
import analyze_kernel_launches as launches
import analyze_kernel_reduction as reduction
import kernel_times
import memory_bandwidth_analyzer as bandwidth
from common.profiles import Kernel, Operation, Profile, idle, operators, read_profile, roofline
from common.tables import rounded
from common.versions import REPOSITORY, SCRIPTS, load_version
from conftest import METADATA, SIZES
from in_process import call, refused

SAMPLES = pathlib.Path(__file__).parents[1] / "samples"
OFFERED = {  # what a version's folder links to, beside the profilers that every folder has
    1: "analyze_batch_scaling analyze_bottlenecks analyze_gemm_operations",
    2: "analyze_kernel_launches analyze_kernel_reduction analyze_memory_scaling compare_versions fusion_ablation_study "
    "generate_fusion_report memory_bandwidth_analyzer optimize_batch_size performance_regression_test "
    "validate_numerical_accuracy",
}


@pytest.mark.parametrize(
    ("tool", "options", "result"),
    [
        (kernel_times.main, ["@"], "--csv"),
        (kernel_times.main, ["@"], "--json"),
        (bottlenecks.main, ["--profile-data", "@"], "--output-report"),
        (reduction.main, ["--baseline", "other", "--fused", "@"], "--json"),
    ],
)
def test_no_result_is_written_over_what_is_read(tool, options, result, make_trace, tmp_path, monkeypatch, capsys):
    path = make_trace("p/trace.json", {"gemm": 1})
    before = path.read_bytes()
    monkeypatch.chdir(tmp_path)
    options = [str(path) if word == "@" else word for word in options]
    words = f"{result} p/../p/trace.json is a file that this tool reads: choose another name"
    refused(tool, [*options, result, "p/../p/trace.json"], capsys, words)
    assert path.read_bytes() == before


@pytest.mark.parametrize("version", SCRIPTS)
def test_every_tool_is_offered_by_a_relative_link_and_explains_itself(version):
    """The link must stay right where the repository is copied."""
    tools = [f"{tool}.py" for tool in OFFERED.get(version, "").split()]
    for tool in [*tools, "run_pytorch_profiler.py", "run_deepspeed_flops.py", "run_all_profilers.sh"]:
        link = SCRIPTS[version].parent / tool
        assert link.samefile(REPOSITORY / "scripts" / tool) and not os.path.isabs(os.readlink(link))
    for tool in tools:
        text = call(version, f"{tool} --help").stdout
        assert f"example: python {tool}" in " ".join(text.split()) and "--json" in text


def test_no_tool_imports_another_tool():
    """But check_training.py: one file to carry home, so what others need of it cannot move to common/."""
    tools = {path.stem for path in (REPOSITORY / "scripts").glob("*.py")}
    found = set()
    for path in [*(REPOSITORY / "scripts").glob("*.py"), *(REPOSITORY / "scripts" / "common").rglob("*.py")]:
        imported = set(re.findall(r"^(?:import|from) (\w+)", path.read_text(), re.MULTILINE))
        found |= {(path.stem, name) for name in tools & imported}
    assert found == {("compare_training", "check_training"), ("judge", "check_training")}


def test_numbers_are_rounded_to_three_digits():
    values = {None: "-", 0: "0", 0.012345: "0.0123", 1.0: "1.00", 9.996: "10.0", 999.6: "1,000", 12345.6: "12,346"}
    assert {value: rounded(value) for value in values} == values


# ---------------------------------------------------------------- FLOPs and bytes of operators


def operator(name, *tensors):
    dims, types, strides = zip(*((t[0], t[1], t[2] if len(t) > 2 else []) for t in tensors), strict=True)
    return operators.work(name, list(dims), list(types), list(strides))


@pytest.mark.parametrize(
    ("name", "tensors", "expected"),
    [
        # 2 x 3 times 3 x 4: 24 multiply-adds; 6 + 12 + 8 numbers
        ("aten::mm", [([2, 3], "float"), ([3, 4], "float")], (48, 104)),
        ("aten::bmm", [([5, 2, 3], "c10::Half"), ([5, 3, 4], "c10::Half")], (240, 260)),
        ("aten::addmm", [([4], "float"), ([2, 3], "float"), ([3, 4], "float")], (48, 120)),
        ("aten::mul", [([2, 8], "float"), ([2, 1], "float")], (0, 64 + 8 + 64)),
        ("aten::mul", [([2, 1], "float"), ([2, 8], "float")], (0, 8 + 64 + 64)),  # whichever is expanded
        ("aten::add_", [([2, 8], "float"), ([2, 8], "float")], (0, 192)),
        ("aten::copy_", [([8], "float"), ([8], "c10::Half")], (0, 48)),
        # a dimension that was expanded is one row in memory
        ("aten::copy_", [([4, 8], "float", [8, 1]), ([4, 8], "float", [0, 1])], (0, 128 + 32)),
        # the length of a vector is one number, but a normalisation writes as much as it reads
        ("aten::linalg_vector_norm", [([4, 8], "float")], (0, 128)),
        ("aten::sum", [([4, 8], "float")], (0, 128)),
        ("aten::cumsum", [([4, 8], "float")], (0, 256)),
        ("aten::_fused_rms_norm", [([4, 8], "c10::Half"), ([], "ScalarList"), ([8], "c10::Half")], (0, 64 + 16 + 64)),
        ("aten::native_layer_norm", [([4, 8], "float"), ([], "ScalarList"), *[([8], "float")] * 2], (0, 256 + 64)),
        ("aten::cat", [([[2, 8], [2, 8]], "TensorList", [[8, 1], [8, 1]])], (0, 256)),
        ("aten::embedding", [([100, 8], "float"), ([2, 3], "long int")], (0, 48 + 2 * 4 * 6 * 8)),
        # batch 1, 2 heads, 4 tokens, width 8: two matmuls of 4 x 4 x 8 per head, halved, a multiply-add being two
        ("aten::_scaled_dot_product_flash_attention_for_cpu", [([1, 2, 4, 8], "float")] * 3, (1024 / 2, 1024)),
        ("aten::_flash_attention_forward", [([1, 4, 2, 8], "float")] * 3, (1024 / 2, 1024)),
        ("aten::_efficient_attention_forward", [([1, 4, 2, 8], "float")] * 3, (1024 / 2, 1024)),
        ("aten::_scaled_dot_product_efficient_attention", [([1, 2, 4, 8], "float")] * 3, (1024 / 2, 1024)),
        ("aten::_cudnn_attention_forward", [([1, 2, 4, 8], "float")] * 3, (1024 / 2, 1024)),
        # five matmuls; reads gradient, q, k, v, writes three gradients
        ("aten::_flash_attention_backward", [([1, 4, 2, 8], "float")] * 4, (2.5 * 1024 / 2, 7 * 256)),
        ("AttentionFunctionBackward", [([1, 4, 2, 8], "float")], (None, None)),
        # the mark of an operator inside a CPU's optimizer does not change its work
        ("optimizer aten::mm", [([2, 3], "float"), ([3, 4], "float")], (48, 104)),
        ("aten::_addmm_activation", [([4], "float"), ([2, 3], "float"), ([3, 4], "float")], (48, 120)),
        # a convolution's FLOPs depend on strides and padding, an LSTM's on its layers, another library's on its code
        ("aten::mkldnn_convolution", [([1, 3, 8, 8], "float"), ([4, 3, 3, 3], "float")], (None, None)),
        ("aten::convolution_backward", [([1, 4, 8, 8], "float"), ([1, 3, 8, 8], "float")], (None, None)),
        ("aten::lstm", [([3, 2, 8], "float")], (None, None)),
        ("aten::_fft_r2c", [([1000, 8], "float")], (None, None)),
        ("aten::linalg_lu_factor_ex", [([8, 8], "float")], (None, None)),
        ("flash_attn::_flash_attn_forward", [([1, 4, 2, 8], "float")] * 3, (None, None)),
        # the pointers of a Triton kernel that torch.compile launches hold its output already
        ("triton_poi_fused_pow_relu_9", [([4, 8], "float"), ([4, 8], "float"), ([], "Scalar")], (0, 256)),
        ("triton_poi_fused_slice_mul_0", [([4, 8], "float"), ([4, 4], "float")], (None, None)),  # reads a part
        ("XXT_kernel_0", [([4, 8], "float"), ([4, 4], "float")], (None, None)),
        ("triton_tem_fused_mm", [([8, 8], "float")] * 2, (None, None)),
        ("Torch-Compiled Region: 0/0", [([8, 8], "float")], (None, None)),
        # a type whose size is not known is not free
        ("aten::_scaled_mm", [([32, 64], "c10::Float8_e4m3fn"), ([64, 32], "c10::Float8_e4m3fn")], (None, None)),
        ("aten::mul", [([8], "c10::Unheard"), ([], "double")], (None, None)),
        ("aten::add", [([8], "signed char"), ([], "long int")], (0, 8 + 8 + 8)),
        ("aten::fill_", [([0], "float"), ([], "Scalar")], (0, 0)),  # an empty tensor is known to move nothing
        # a part of the table is read: 4 rows of 8 numbers, 4 numbers of the rows
        ("aten::index_select", [([1000, 8], "float"), ([], "Scalar"), ([4], "long int")], (0, 32 + 2 * 128)),
        ("aten::gather", [([1000, 8], "float"), ([], "Scalar"), ([4, 1], "long int")], (0, 32 + 2 * 16)),
        ("aten::index", [([1000, 8], "float"), ([], "")], (None, None)),
        ("aten::_index_put_impl_", [([1000, 8], "float"), ([], "")], (None, None)),
        # the output is smaller than the input
        ("aten::amax", [([4, 8], "float")], (0, 128)),
        ("aten::topk", [([4, 8], "float")], (0, 128)),
        ("aten::max_pool2d_with_indices", [([1, 1, 8, 8], "float")], (0, 256)),
    ],
)
def test_flops_and_bytes_of_operators_by_hand(name, tensors, expected):
    assert operator(name, *tensors) == expected


def test_the_lists_and_the_attention_of_another_program_are_not_told():
    """A list's type is not recorded, nor whether attention is causal: only of our own traces are they known."""
    lists = Operation("aten::cat", "copies", 1.0, [[[2, 8], [2, 8]]], ["TensorList"], [[[8, 1], [8, 1]]], ())
    name = "aten::_scaled_dot_product_flash_attention"
    attention = Operation(name, "attention", 1.0, [[1, 2, 4, 8]] * 3, ["float"] * 3, [[]] * 3, ())
    ours = operators.counted_kernels(METADATA)
    assert [operators.work_of(one, {}) for one in (lists, attention)] == [(None, None)] * 2
    assert [operators.work_of(one, ours) for one in (lists, attention)] == [(0, 256), (512, 1024)]


@pytest.mark.parametrize(("kind", "precision"), [("float", "float32"), ("c10::BFloat16", "bfloat16")])
def test_ceilings_of_another_program_are_in_its_matmuls_precision(kind, precision, known_trace, capsys, monkeypatch):
    asked = []
    monkeypatch.setattr(roofline, "peak_tflops", lambda gpu, precision: asked.append(precision) or 100.0)
    trace = known_trace / "pytorch_profiles" / "trace_v1.json"
    trace.write_text(trace.read_text().replace('"float"', f'"{kind}"'))
    profile = read_profile(trace)
    assert (f" in {precision}") in roofline.ceilings_for(profile)[1] and set(asked) == {precision}


def test_an_operator_with_a_call_without_shapes_has_no_flops():
    known = Operation("aten::mm", "GEMM", 1.0, [[2, 3], [3, 4]], ["float", "float"], [[], []], ())
    calls = [known, known._replace(dims=[], types=[], strides=[])]
    (row,) = operators.operator_table(Profile(None, [], calls), 1, None)
    assert (row["calls"], row["flops"], row["bytes"]) == (2, None, None)


@pytest.mark.parametrize("version", [1, 2])
def test_matmuls_of_a_trace_are_those_of_the_model(profiled, version):
    profile = read_profile(profiled[version])
    rows = operators.operator_table(profile, profile.steps, None)
    script = load_version(version)
    config = script.parse_options(SIZES)
    model = script.make_model(config)
    matrices = 6 * 2 * 16 * sum(p.numel() for p in model.parameters() if p.ndim == 2)
    assert profile.steps == 2 and sum(row["flops"] for row in rows if row["operator"] == "aten::mm") == matrices


# ---------------------------------------------------------------- analyze_kernel_reduction.py


def test_kernels_per_step_are_counted_from_the_traces(make_trace, capsys):
    baseline = make_trace("v1/trace_1.json", {"gemm_q": 2, "gemm_k": 2, "gemm_v": 2, "softmax_kernel": 2}, steps=3)
    fused = make_trace("v2/trace_1.json", {"gemm_qkv": 2, "flash_fwd": 2}, version=2)
    arguments = ["--baseline", str(baseline), "--fused", str(fused)]
    assert reduction.main([*arguments, "--json", "-"]) == 0
    content = json.loads(capsys.readouterr().out)
    calls = {name: [part["calls"] for part in content[name].values()] for name in ("baseline", "fused")}
    assert calls == {"baseline": [3, 1, 4], "fused": [1, 1, 2]}
    assert content["baseline"]["all"]["ms"] == pytest.approx(0.008)
    assert content["change"]["gemm_qkv"] == 1 and content["change"]["gemm_q"] == -1
    assert reduction.main(arguments) == 0
    assert re.search(r"^GEMM +3.0 +1.0 +66.7 % +0.00600 +0.00200$", capsys.readouterr().out, re.MULTILINE)


def test_the_documented_reduction_command(profiled):
    command = "analyze_kernel_reduction.py --baseline ../version1_pytorch_baseline/pytorch_profiles --fused "
    result = call(2, command + "./fusion_analysis", cwd=profiled[2].parent)
    # q, k, v become one matmul and gate, up one, in each of forward, gradient of input and gradient of weight
    assert "-9.0  aten::mm" in result.stdout and "operators per step became" in result.stdout
    assert "baseline  ../version1_pytorch_baseline/pytorch_profiles/trace_v1_" in result.stdout


def test_bad_input_of_the_reduction(profiled, make_trace, tmp_path, capsys):
    gpu = SAMPLES / "pytorch" / "trace_gpu.json"
    small, large = (make_trace(f"{n}/trace_1.json", {"gemm": 1}, batch_size=n) for n in (4, 8))
    for baseline, fused, words in (
        (profiled[1], gpu, "differ (device: CPU, "),
        (gpu, gpu, "--baseline-steps"),
        (tmp_path / "no", gpu, "does not exist"),
        (small, large, "batch_size: 4, 8"),
    ):
        refused(reduction.main, ["--baseline", baseline, "--fused", fused], capsys, words)


# ---------------------------------------------------------------- analyze_kernel_launches.py


@pytest.mark.parametrize("name", ["pytorch/trace_gpu.json", "rocm-6.2/kernel_trace.csv"])
def test_gaps_of_the_samples_by_hand(name, capsys):
    assert launches.main(["--trace-file", str(SAMPLES / name), "--steps", "2", "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out)["results"]
    copy = "rocm" not in name  # that sample has its one copy, 997 to 999, in a file of its own
    # kernels 1000-1001 1002-1007 1009-1013 1014-1021 1022-1024.5 1026-1032 1034-1035.5 1040-1043
    assert found["busy_us"] == pytest.approx(30 + 2 * copy) and found["idle_us"] == pytest.approx(13 + copy)
    assert (found["launches"], found["launches_per_step"]) == (8 + copy, (8 + copy) / 2)
    assert found["launch_bound"]


def profile_of(times, steps=None):
    """Return a profile of kernels k0, k1, ... that start and last so many us."""
    calls = [Kernel(f"k{i}", 1e3 * start, 1e3 * us) for i, (start, us) in enumerate(times)]
    return Profile("a trace", calls, steps=steps)


@pytest.mark.parametrize(
    ("steps", "unsure", "words"), [(None, 5000, "marks none"), (2, 5000, "marks none"), (1, 0, "host's calls")]
)
def test_overlapping_queues_are_busy_once_and_every_gap_is_idle(steps, unsure, words):
    """Without marks a gap of 5 ms may lie between two steps. One step has no pause, but why it idled is not known."""
    found = idle.idle_results(profile_of([(0, 10), (4, 4), (9, 6), (17, 3), (5020, 10)], steps))
    assert (found["busy_us"], found["idle_us"], found["paused_us"], found["gaps"]) == (28, 5002, 0, 2)
    assert found["unsure_us"] == unsure and found["idle_share"] == 5002 / 5030
    assert [gap["gap_us"] for gap in found["largest_gaps"]] == [5000, 2]
    assert found["launch_bound"] is None and "no verdict" in found["verdict"] and words in found["verdict"]


@pytest.mark.parametrize(("steps", "words"), [(1, "2 kernels and copies in one step"), (2, "1.0 in each of 2 steps")])
def test_a_replay_is_one_launch_so_the_text_counts_kernels(steps, words):
    text = idle.idle_text("a trace", idle.idle_results(profile_of([(0, 10), (15, 10)], steps)))
    assert words in text and "launches" not in text and "not counted" not in text


def test_a_gap_inside_a_step_is_idle_however_long_it_is(make_trace, capsys):
    """Each of two steps takes 50 us on the host and 10 ms until the next; its kernels are 3 ms apart, or not."""
    trace = make_trace("p/trace_1.json", {"gemm": 5.0, "softmax_kernel": 5.0})
    content = json.loads(trace.read_text())
    for one in content["traceEvents"]:
        if one["name"] == "softmax_kernel":
            one["ts"] += 3000
    trace.write_text(json.dumps(content))
    assert launches.main(["--trace-file", str(trace), "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out)["results"]
    # gemm from 30 to 35, softmax from 3035 to 3040; the next step begins at 10000, its gemm at 10030
    assert (found["idle_us"], found["paused_us"]) == (pytest.approx(3000 + 30 + 3000), pytest.approx(6960))
    assert found["busy_us"] == pytest.approx(20) and found["largest_gaps"][0]["gap_us"] == pytest.approx(3000)
    assert launches.main(["--trace-file", str(trace)]) == 0
    told = capsys.readouterr().out  # what is not counted is more than what is
    assert "6.96 ms in pauses over 1000 us between steps" in told and "\nno verdict: between its steps" in told


def test_the_documented_launch_command_reads_results_csv(tmp_path, capsys):
    (tmp_path / "results.csv").write_bytes((SAMPLES / "rocm-6.4" / "kernel_trace.csv").read_bytes())
    result = call(2, "analyze_kernel_launches.py --trace-file results.csv", cwd=tmp_path)
    assert "8 kernels and copies, steps not known (--steps N)" in result.stdout
    assert "not counted" not in result.stdout and "launch-bound: the GPU waits 30.2 %" in result.stdout
    for name, words in (
        ("rocm-6.2/kernel_stats.csv", "only sums over the kernels' times"),
        ("pytorch/trace_cpu.json", "on a GPU"),
    ):
        refused(launches.main, ["--trace-file", SAMPLES / name], capsys, words)


# ---------------------------------------------------------------- analyze_communication.py


def test_of_a_folder_the_newest_trace_of_each_rank_is_read(make_trace, capsys):
    for name, us in (("1", 1), ("rank0_1", 9), ("rank1_1", 9), ("rank0_2", 4), ("rank1_2", 6)):
        folder = make_trace(f"p/trace_v1_{name}.pt.trace.json", {"gemm": 6, "ncclDevKernel_AllReduce": us}).parent
    assert communication.main([str(folder), "--json", "-"]) == 0
    rows = json.loads(capsys.readouterr().out)["processes"]
    assert [pathlib.Path(row["trace"]).name[9:16] for row in rows] == ["rank0_2", "rank1_2"]
    assert [row["exposed_share"] for row in rows] == pytest.approx([0.4, 0.5])
    other = make_trace("p/trace_v1_rank1_3.pt.trace.json", {"ncclDevKernel": 1}, batch_size=99)
    refused(communication.main, [folder], capsys, "batch_size: 2, 99")
    assert communication.main([str(other)]) == 0


def test_ranks_of_two_runs_are_not_one_run(make_trace, capsys):
    """Versions are compared elsewhere; a rank that only an older run had stays in the folder."""
    name = "p/trace_v{}_rank{}_1.pt.trace.json"
    folder = make_trace(name.format(1, 0), {"ncclDevKernel": 1}).parent
    other = make_trace(name.format(2, 1), {"ncclDevKernel": 1}, version=2)
    refused(communication.main, [folder], capsys, "differ (version: 1, 2): give the ranks of one run")
    content = json.loads(other.read_text())
    content["tiny_llama"]["version"] = 1
    for seconds in (50, 70, 3600):
        for later in other, folder / pathlib.Path(name.format(1, 0)).name:
            for rank in (0, 1):
                (folder / f"trace_v{rank + 1}_rank{rank}_1.pt.trace.json").write_text(json.dumps(content))
            moved = [event | {"ts": event["ts"] + 1e6 * seconds} for event in content["traceEvents"]]
            later.write_text(json.dumps(content | {"traceEvents": moved}))
            if seconds == 50:
                assert communication.main([str(folder)]) == 0
            else:
                refused(communication.main, [folder], capsys, f"differ ({seconds:,} s between them)")


# ---------------------------------------------------------------- analyze_batch_scaling.py


def test_the_documented_scaling_command_by_hand(make_trace, tmp_path):
    for batch in (4, 8, 16, 32):
        folder = f"scaling_bs{batch}"
        make_trace(f"{folder}/trace_1.json", {"gemm": 1.0}, batch_size=99)  # an older run in the same folder
        make_trace(f"{folder}/trace_2.json", {"gemm": 70 + 50 * batch}, batch_size=batch, peak_memory_mb=10 + 3 * batch)
        make_trace(f"{folder}/trace_3.json", {"gemm": 1.0}, part="attention")
    folders = " ".join(f"scaling_bs{batch}" for batch in (16, 32, 4, 8))  # the order of the shell
    result = call(1, f"analyze_batch_scaling.py --profile-dirs {folders} --json -", cwd=tmp_path)
    content = json.loads(result.stdout)
    assert [row["batch_size"] for row in content["rows"]] == [4, 8, 16, 32]
    assert [row["step_ms"] for row in content["rows"]] == pytest.approx([0.3, 0.5, 0.9, 1.7])
    found = [content[key] for key in ("fixed_ms", "ms_per_sequence", "fixed_mib", "mib_per_sequence")]
    assert found == pytest.approx([0.1, 0.05, 10, 3])
    assert content["rows"][1]["efficiency"] == pytest.approx((8 / 0.5) / (4 / 0.3) / 2)
    assert content["best_batch_size"] == 32
    text = call(1, f"analyze_batch_scaling.py --profile-dirs {folders}", cwd=tmp_path).stdout
    assert "memory     10.0 MiB + 3.00 MiB per sequence" in text and "scaling_bs4/trace_2.json" in text
    assert "can't be negative" not in text


def test_a_batch_s_step_is_the_median_of_its_steps():
    profile = Profile("a", [], step_ms=[2.0, 1.0, 9.0], metadata={"batch_size": 4, "peak_memory_mb": 7.0})
    row = batches.row_of(profile)
    assert (row["steps"], row["step_ms"], row["samples_per_second"], row["peak_mib"]) == (3, 2, 2000, 7)


def test_a_negative_cost_is_said_to_make_no_sense(make_trace, capsys):
    for part, times in {"fixed part": (100, 400, 900), "part per sequence": (90, 80, 70)}.items():
        sizes = zip((10, 20, 30), times, strict=True)
        folders = [str(make_trace(f"{b}/trace.json", {"gemm": us}, batch_size=b).parent) for b, us in sizes]
        assert batches.main(["--profile-dirs", *folders]) == 0
        assert f"ms per sequence: a cost can't be negative ({part})" in capsys.readouterr().out


def test_bad_input_of_the_scaling_analysis(make_trace, tmp_path, capsys):
    first = make_trace("a/trace_1.json", {"gemm": 1}).parent
    refused(batches.main, ["--profile-dirs", "scaling_bs*"], capsys, "scaling_bs* does not exist")
    other = make_trace("b/trace_1.json", {"gemm": 1}, batch_size=4).parent
    for folders in ([first], [first, other, other]):
        refused(batches.main, ["--profile-dirs", *folders], capsys, "give two or more that differ")
    refused(batches.main, ["--profile-dirs", SAMPLES / "rocm-6.2"], capsys, "marks no training steps")
    refused(batches.main, ["--profile-dirs", SAMPLES / "pytorch" / "trace_gpu.json"], capsys, "marks no training steps")
    (tmp_path / "cut.json").write_text('{"traceEvents": [')
    refused(batches.main, ["--profile-dirs", tmp_path / "cut.json"], capsys, "cut.json is cut off or damaged")
    for key, value in (("seq_len", 64), ("num_layers", 9), ("version", 2)):
        other = make_trace(f"{key}/trace_1.json", {"gemm": 1}, batch_size=4, **{key: value}).parent
        refused(batches.main, ["--profile-dirs", first, other], capsys, f"differ in more than the batch ({key}: ")
    other = make_trace("device/trace_1.json", {"gemm": 1}, batch_size=4)
    other.write_text(other.read_text().replace("MI300X", "H100"))
    folders = ["--profile-dirs", first, other.parent]
    refused(batches.main, folders, capsys, "differ in more than the batch (device: MI300X, H100)")


# ---------------------------------------------------------------- analyze_bottlenecks.py


def test_the_documented_bottleneck_command_by_hand(known_trace):
    command = "analyze_bottlenecks.py --profile-data pytorch_profiles/ --output-report bottlenecks_v1.md"
    call(1, command, cwd=known_trace)
    with open(known_trace / "bottleneck_analysis" / "operator_timing.csv", newline="") as file:
        rows = {row["operator"]: row for row in csv.DictReader(file)}
    # at the data sheet's peaks 1 GFLOP at 163.4 TFLOP/s takes 6.12 of 20 us, 12 MB at 5.3 TB/s takes 2.264 of 10 us
    found = [float(rows["aten::mm"][key]) for key in ("of_roofline", "tflops")]
    assert found == pytest.approx([0.306, 50], rel=1e-3)
    assert [float(rows["aten::add"][key]) for key in ("of_roofline", "gb_s")] == pytest.approx([0.2264, 1200], rel=1e-3)
    assert rows["lonely"]["bytes"] == "" and float(rows["lonely"]["ms"]) == 0.01
    targets = json.loads((known_trace / "bottleneck_analysis" / "optimization_targets.json").read_text())["targets"]
    found = [(t["rank"], t["group"], t["could_save_ms"], t["share_percent"]) for t in targets]
    assert found[0] == (1, "GEMM", pytest.approx(0.01388, rel=1e-3), pytest.approx(50))
    assert found[1][1:3] == ("other", None)
    assert found[2] == (3, "element-wise", pytest.approx(0.007736, rel=1e-3), pytest.approx(25))
    # from the first kernel to the last two steps take 1,210 us, in which the GPU waits for most of the time
    assert targets[0]["step_could_be"] == pytest.approx(605 / (605 - 13.88), rel=1e-3)
    report = (known_trace / "bottlenecks_v1.md").read_text()
    assert "| 1 | `aten::mm` | GEMM | 1 | 0.0200 | 50.0 | 50.0 | 400 | 31 % |" in report
    assert "| 1 | GEMM | 0.0200 | 50.0 | 0.0139 | 1.02 | one matmul for q, k, v" in report
    assert "| 3 | `lonely` | other | 1 | 0.0100 | 25.0 | - | - | - |" in report
    (cached,) = bottlenecks.targets([{"group": "copies", "ms": 1.0, "roofline_ms": 2.0}])
    assert cached["could_save_ms"] == 0
    times = (("other", 4, 1), ("other", 2, None), ("GEMM", 4, 4))
    mixed, _ = bottlenecks.targets([{"group": group, "ms": ms, "roofline_ms": roof} for group, ms, roof in times])
    # 3 ms are above the roofline, and of 2 ms nobody knows how much: at most 10 / (10 - 5)
    assert mixed["could_save_ms"] == 3 and mixed["step_could_be"] == 2
    unknown = (("other", 3, 1), ("other", 3.1, None))  # most of it
    (whole,) = bottlenecks.targets([{"group": group, "ms": ms, "roofline_ms": roof} for group, ms, roof in unknown])
    assert whole["could_save_ms"] is None and whole["step_could_be"] is None
    for known, verdict in ((5.1, True), (4.9, False)):
        rows = [{"ms": known, "roofline_ms": 1.0}, {"ms": 10 - known, "roofline_ms": None}]
        assert (bottlenecks.evidence(rows) == []) == verdict


@pytest.mark.parametrize("tool", [bottlenecks, bandwidth])
def test_what_makes_ceilings_of_now_doubtful_is_said(tool, profiled, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(profiled[1], "profiles")
    data = ["--profile-data", "profiles"]
    monkeypatch.setattr(roofline, "measure_ceilings", lambda *_: {"matmul_tflops": 1e3, "copy_tb_s": 1e3})
    assert tool.main(data) == 0
    told = capsys.readouterr().out
    assert "neither machine nor threads" in told and "hours old" not in told and "above a ceiling" not in told
    (trace,) = pathlib.Path("profiles").glob("trace_*.json")
    os.utime(trace, (trace.stat().st_mtime - 7200,) * 2)
    monkeypatch.setattr(roofline, "measure_ceilings", lambda *_: {"matmul_tflops": 1e-9, "copy_tb_s": 1e-9})
    assert tool.main(data) == 0
    told = capsys.readouterr().out
    assert "The trace is 2 hours old" in told and "operators are above a ceiling (" in told


@pytest.mark.parametrize(
    ("peak", "said"),
    [
        ("51,1.3", None),
        ("49,1.3", "One operator is above a ceiling (aten::mm): its data"),
        ("49,1.1", "2 operators are above a ceiling (aten::mm, ...): their data"),
    ],
)
def test_operators_above_a_ceiling_are_counted(known_trace, peak, said, monkeypatch, capsys):
    """The matmul reaches 50 TFLOP/s, the addition 1.2 TB/s."""
    monkeypatch.chdir(known_trace)
    assert bottlenecks.main(["--profile-data", "pytorch_profiles", "--peak", peak]) == 0
    told = capsys.readouterr().out
    assert (said in told) if said else ("above a ceiling" not in told)


def test_a_profile_of_another_device_has_no_roofline_of_this_one(known_trace, monkeypatch, capsys):
    monkeypatch.chdir(known_trace)
    trace = known_trace / "pytorch_profiles" / "trace_v1.json"
    trace.write_text(trace.read_text().replace("MI300X", "GPU"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "another GPU")
    assert bottlenecks.main(["--profile-data", "pytorch_profiles"]) == 0
    assert "no roofline: the ceilings of GPU" in capsys.readouterr().out
    assert "No roofline" in (known_trace / "bottlenecks.md").read_text()


@pytest.mark.skipif(sys.platform != "linux", reason="names of files are bytes on Linux alone")
def test_a_name_that_is_no_text_ends_no_tool(known_trace, monkeypatch):
    """It emptied the report of an earlier call, and ended the readers after half of what they print."""
    folder = (known_trace / "pytorch_profiles").rename(known_trace / "pro\udcfffiles")
    report = known_trace / "report.md"
    report.write_text("an earlier one")
    strict = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="strict")
    monkeypatch.setattr(sys, "stdout", strict)
    assert bottlenecks.main(["--profile-data", str(folder), "--output-report", str(report)]) == 0
    assert kernel_times.main([str(folder)]) == 0
    assert "pro\\udcfffiles/trace_v1.json" in report.read_text(encoding="utf-8").splitlines()[0]
    strict.flush()
    assert b"pro\\udcfffiles/trace_v1.json" in strict.buffer.getvalue()


def test_bad_input_of_the_bottleneck_analysis(known_trace, capsys, monkeypatch):
    monkeypatch.chdir(known_trace)
    rocm, trace = SAMPLES / "rocm-6.2" / "kernel_trace.csv", SAMPLES / "pytorch" / "trace_gpu.json"
    refused(bottlenecks.main, ["--profile-data", rocm], capsys, "--enable-pytorch-profiler")
    refused(bottlenecks.main, ["--profile-data", trace], capsys, "--steps N")
