"""run_deepspeed_flops.py, analyze_gemm_operations.py and memory_bandwidth_analyzer.py: their numbers by hand."""

import csv
import importlib.util
import inspect
import json
import re
import shlex
import sys
from types import SimpleNamespace

import pytest
import torch

import analyze_gemm_operations as gemm_tool
import memory_bandwidth_analyzer as bandwidth
import run_deepspeed_flops as flops
from common.command_line import numbers
from common.formulas import counts
from common.measuring import roofline_picture, runs
from common.profiles import Operation, operators
from common.versions import SCRIPTS, load_version
from in_process import refused, run_here

FOLDERS = {version: script.parent for version, script in SCRIPTS.items()}
# hidden 32, 1 layer, 2 query heads and 1 key head of 16, feed-forward 16, vocabulary 10; 1 sequence of 4 tokens
BY_HAND = (
    "--batch-size 1 --seq-len 4 --hidden-dim 32 --num-layers 1 --num-heads 2 --intermediate-dim 16 --vocab-size 10 "
    "--device cpu"
).split()


# ---------------------------------------------------------------- run_deepspeed_flops.py


@pytest.fixture
def without_training(monkeypatch):
    monkeypatch.setattr(flops, "measure", lambda *arguments: None)
    monkeypatch.setenv("TRITON_INTERPRET", "1")


@pytest.mark.parametrize("version", SCRIPTS)
def test_a_step_counted_by_hand(version, tmp_path, without_training):
    argv = ["--version", str(version), *BY_HAND, "--computational-intensity", "--profile-dir", str(tmp_path)]
    status = flops.main(argv)
    content = json.loads((tmp_path / "flops_profile.json").read_text())
    # q and o 1024, k, v, gate, up and down 512, head 320: 4928 weights, 4 tokens, 6 operations each;
    # attention: 3 x 2 matmuls x 2 operations x 4 x 4 pairs, halved, of 32 numbers
    assert content["analytic"] == {"total": 121344, "matrix_products": 118272, "attention": 3072}
    counted = {row["what"]: row["counted"] for row in content["checks"]}
    # version 3 computes the embedding's gradient as a matmul too: 2 x 4 tokens x 320
    assert counted["matmuls"] == 118272 + 2560 * (version == 3)
    assert counted["attention"] == 6144  # both halves of the scores
    assert status == 0 and all(row["agrees"] for row in content["checks"])
    assert (content["intensity"] is None) == (version == 4)
    deepspeed = importlib.util.find_spec("deepspeed") is not None  # its forward and its table, where it is installed
    assert deepspeed == ("forward" in counted)
    assert deepspeed == ("DeepSpeed Flops Profiler" in (tmp_path / "model_profile.txt").read_text())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "DeepSpeed isn't installed\n"),
        ("raise RuntimeError('no toolkit\\nsee there')", "DeepSpeed does not start: no toolkit\n"),
        ("import not_there", "DeepSpeed does not start: No module named 'not_there'\n"),
    ],
)
def test_why_deepspeed_counts_nothing(text, said, tmp_path, monkeypatch, capsys):
    if text:
        (tmp_path / "deepspeed.py").write_text(text)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "deepspeed", raising=False)
    else:
        monkeypatch.setitem(sys.modules, "deepspeed", None)
    assert flops.deepspeed_count(None, None, None) == {}
    assert capsys.readouterr().err.endswith(said)


def test_the_counters_see_the_head_of_a_large_vocabulary(tmp_path, without_training):
    """Version 3's fused loss is a kernel's, and its default there."""
    vocabulary = ["--vocab-size", str(counts.FUSED_LOSS_FROM)]
    assert flops.main(["--version", "3", *BY_HAND, *vocabulary, "--profile-dir", str(tmp_path)]) == 0


def test_a_wrong_formula_is_found(tmp_path, monkeypatch, without_training, capsys):
    right = counts.required_flops
    monkeypatch.setattr(counts, "required_flops", lambda sizes: {part: 2 * n for part, n in right(sizes).items()})
    assert flops.main(["--version", "1", *BY_HAND, "--profile-dir", str(tmp_path)]) == 1
    assert "NOT the expected" in capsys.readouterr().out
    assert flops.main(["--analyze-results", str(tmp_path / "flops_profile.json")]) == 1


@pytest.mark.parametrize(
    ("device", "rounds_to_tf32", "precision", "peak"),
    [
        ("NVIDIA H200", True, "tf32", 494.7),
        ("AMD Instinct MI300X", False, "float32", 163.4),  # PyTorch before 2.10 ignores --tf32
        ("AMD Instinct MI250X / MI250", False, "float32", 47.9),  # has no units for it
        ("AMD Instinct MI355X", False, "tf32", None),  # emulated, if it isn't ignored: faster than float32's peak
        ("x86_64", False, "float32", None),
    ],
)
def test_mfu_is_the_rate_of_each_gpu_over_the_peak_of_its_matmuls(
    device, rounds_to_tf32, precision, peak, monkeypatch, capsys
):
    summary = {"step_ms": {"median": 2.0}, "tflops": 100.0, "precision": "tf32", "world_size": 2}
    summary["rounds_to_tf32"] = rounds_to_tf32

    def train(script, argv, tell):
        tell("step     1/10  loss 7\n")
        return {"summary": summary, "environment": {"device": device}}

    monkeypatch.setattr(flops, "train", train)
    monkeypatch.setattr(runs.Pace, "is_due", lambda pace: True)
    found = flops.measure(1, load_version(1).parse_options(BY_HAND), BY_HAND)
    assert capsys.readouterr().err.endswith("\n   step     1/10  loss 7\n")  # a CPU trains for minutes
    assert (found["precision"], found["peak_tflops"]) == (precision, peak)
    assert found["mfu"] == (peak and pytest.approx(100 / peak / 2))


@pytest.mark.slow
def test_the_documented_command_writes_all_its_files(tmp_path):
    pytest.importorskip("matplotlib")
    folder, tool = tmp_path / "flops_analysis", [sys.executable, FOLDERS[2] / "run_deepspeed_flops.py"]
    options = ("--num-steps", "2", "--computational-intensity", "--generate-roofline")
    result = run_here([*tool, *BY_HAND, *options], cwd=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    content = json.loads((folder / "flops_profile.json").read_text())
    step_ms = content["measured"]["step_ms"]
    assert content["measured"]["tflops"] == pytest.approx(content["analytic"]["total"] / step_ms / 1e9, rel=1e-6)
    parts = content["intensity"]
    assert parts["down projection"]["flops"] == 3 * 2 * 4 * 32 * 16
    assert parts["down projection"]["bytes"] == 3 * 4 * (4 * 32 + 4 * 16 + 32 * 16)
    assert content["ceilings"]["matmul_tflops"] > 0 and content["ceilings"]["copy_tb_s"] > 0
    assert (folder / "roofline.png").read_bytes()[:4] == b"\x89PNG"
    assert re.search(r"TinyLlama\.layers\.0\.attention +0\.\d+", (folder / "model_profile.txt").read_text())
    with open(folder / "mfu_analysis.csv", newline="") as file:
        assert float(next(csv.DictReader(file))["step_ms"]) == pytest.approx(step_ms, rel=1e-5)
    again = run_here([*tool, "--analyze-results", "flops_profile.json"], cwd=tmp_path)
    assert again.returncode == 0 and "as expected" in again.stdout and "FLOP/byte" in again.stdout


def test_without_matplotlib_everything_but_the_picture_is_there(tmp_path, monkeypatch, without_training, capsys):
    monkeypatch.setattr(flops, "measure_ceilings", lambda *arguments: {"matmul_tflops": 1.0, "copy_tb_s": 1.0})
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    arguments = ["--version", "1", *BY_HAND, "--generate-roofline", "--profile-dir", tmp_path]
    refused(flops.main, arguments, capsys, "needs matplotlib", status=1)
    assert {path.name for path in tmp_path.iterdir()} == {"flops_profile.json", "model_profile.txt"}


def test_earlier_results_that_are_none_are_refused(tmp_path, capsys):
    path = tmp_path / "flops_profile.json"
    refused(flops.main, ["--analyze-results", path], capsys, "cannot be read")
    for content in ("{", "{}"):
        path.write_text(content)
        refused(flops.main, ["--analyze-results", path], capsys, "flops_profile.json is cut off or damaged")


# ---------------------------------------------------------------- analyze_gemm_operations.py

CONFIG = dict(zip(gemm_tool.NAMES, (64, 32, 2, 4, 2, 48), strict=True))


@pytest.fixture
def toy_config(tmp_path):
    file = tmp_path / "tiny_llama_v1_config.yaml"
    file.write_text("\n".join(f"{name}: {value}" for name, value in CONFIG.items()))
    return file


def test_the_gemms_are_those_of_the_step():
    sizes = gemm_tool.sizes_of(CONFIG, 3, 8)
    found = gemm_tool.gemms(sizes, 4)
    # the FLOPs and bytes of version 1's matmuls, as test_counts.py compares them with the script
    step = counts.step_counts(1, "float32", sizes)
    assert sum(g["calls"] * g["flops"] for g in found) == counts.total(step, "flops")
    down = step["down projection"]
    moved = down["forward"]["bytes"] + down["backward"]["bytes"]
    assert sum(g["calls"] * g["bytes"] for g in found if g["names"] == "down") == moved
    keys = next(g for g in found if g["names"] == "k, v" and g["part"] == "weight gradient")
    assert [keys[name] for name in ("m", "k", "n", "calls")] == [16, 24, 32, 4]


@pytest.mark.parametrize(
    ("us", "copy_tb_s", "processors", "bound"),
    [
        (250, 1.0, 65, "compute"),
        (500, 1.0, 65, "too small"),  # 8 x 8 tiles
        (500, 1.0, 64, "slow"),
        (500, 1.0, 0, "slow"),  # on a CPU a slow GEMM has another reason
        (500, 0.03, 65, "memory"),
    ],
)
def test_what_limits_a_gemm_by_hand(us, copy_tb_s, processors, bound):
    square = {"flops": 2e9, "flop_per_byte": 500 / 3, "us": us, "calls": 2, "batch": 1, "m": 1000, "k": 1000, "n": 1000}
    roofs = {"matmul_tflops": 10.0, "copy_tb_s": copy_tb_s}
    row = gemm_tool.rated(square, roofs, processors)
    assert (row["bound"], row["tflops"], row["share_of_peak"]) == (bound, 1e3 / us * 2, 1e2 / us * 2)
    step = gemm_tool.step_row(gemm_tool.sizes_of(CONFIG, 1, 2), [row], roofs)
    found = [step[key] for key in ("share_of_peak", "ms", "calls", "flops", "too_small")]
    assert found == [pytest.approx(2e2 / us), 2e-3 * us, 2, 4e9, 2 * (bound == "too small")]


LAYOUTS = {"forward": (True, False), "input gradient": (True, True), "weight gradient": (False, True)}


@pytest.mark.parametrize("part", LAYOUTS)
def test_operands_of_a_gemm_lie_as_in_training(part, monkeypatch):
    """x Wᵀ, dy W and dyᵀ x of tensors that are contiguous: another layout is another kernel of the library."""
    timed = []
    monkeypatch.setattr(gemm_tool, "shortest_s", lambda call, repeats: timed.append(inspect.getclosurevars(call)))
    gemm_tool.seconds({"part": part, "batch": 1, "m": 2, "k": 3, "n": 4}, "cpu", torch.float32)
    left, right = (timed[0].nonlocals[name] for name in ("left", "right"))
    assert (left.shape, right.shape) == ((2, 3), (3, 4))
    assert (left.is_contiguous(), right.is_contiguous()) == LAYOUTS[part]


def test_the_documented_gemm_command(toy_config):
    command = [sys.executable, FOLDERS[1] / "analyze_gemm_operations.py", "--model-config", toy_config.name]
    lists = ["--batch-sizes", "4,8", "--sequence-lengths", "8,16", "--json", "gemms.json", "--device", "cpu"]
    result = run_here([*command, *lists], cwd=toy_config.parent)
    assert result.returncode == 0, result.stderr
    steps = json.loads((toy_config.parent / "gemms.json").read_text())["steps"]
    assert [(step["batch_size"], step["seq_len"]) for step in steps] == [(4, 8), (4, 16), (8, 8), (8, 16)]
    assert all(g["us"] > 0 and 0 < g["share_of_peak"] <= 1 for step in steps for g in step["gemms"])
    assert "gate, up, weight gradient" in result.stdout and "batch 8, 16 tokens" in result.stderr
    assert not any(step["too_small"] for step in steps)  # for a CPU, which has no tiles to fill


def test_the_fastest_gemm_of_all_steps_is_the_peak_where_the_square_one_is_slower(toy_config, monkeypatch, capsys):
    """Each takes as long: the rate follows from the size alone, and the largest is of the last step."""
    monkeypatch.setattr(gemm_tool, "measure_ceilings", lambda *_: {"matmul_tflops": 1e-6, "copy_tb_s": 1.0})
    monkeypatch.setattr(gemm_tool, "seconds", lambda *_: 1e-3)
    sizes = ["--batch-sizes", "1", "--sequence-lengths", "8,16", "--device", "cpu"]
    assert gemm_tool.main(["--model-config", str(toy_config), *sizes, "--precision", "tf32", "--json", "-"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["precision"] == "float32"  # a CPU has no TF32
    assert [max(gemm["share_of_peak"] for gemm in step["gemms"]) for step in content["steps"]] == [0.5, 1.0]
    assert content["ceilings"]["matmul_tflops"] == pytest.approx(2 * 16 * 32 * 64 / 1e-3 / 1e12)


def test_a_device_or_a_size_that_is_not_there_ends_the_gemms_with_one_line(toy_config, monkeypatch, capsys):
    config = ["--model-config", toy_config]
    refused(gemm_tool.main, [*config, "--device", "tpu"], capsys, "--device must be cpu, cuda or cuda:N, got tpu")
    monkeypatch.setattr(gemm_tool, "measure_ceilings", lambda *_: {"matmul_tflops": 1.0, "copy_tb_s": 1.0})
    huge = ["--batch-sizes", str(2**24), "--sequence-lengths", str(2**16), "--device", "cpu"]
    refused(gemm_tool.main, [*config, *huge], capsys, "65536 tokens don't fit into memory", status=1)


def test_the_configuration_of_version_1_is_its_default():
    config = load_version(1).parse_options(["--device", "cpu"])
    found = gemm_tool.read_config(FOLDERS[1] / "tiny_llama_v1_config.yaml")
    assert gemm_tool.sizes_of(found, 8, 256) == counts.sizes_of(config)


def test_bad_input_of_the_gemm_tool(toy_config, capsys):
    given, good = ["--model-config", toy_config], toy_config.read_text()
    refused(gemm_tool.main, ["--model-config", "nowhere.yaml"], capsys, "cannot be read")
    refused(gemm_tool.main, [*given, "--batch-sizes", "0"], capsys, "--batch-sizes")
    wide = good.replace("32", "wide"), "--hidden-dim"
    for text, words in (
        ("just text", "must name vocab_size"),
        wide,
        (good.replace("heads: 2", "heads: 3"), "must divide"),
    ):
        toy_config.write_text(text)
        refused(gemm_tool.main, given, capsys, words)


# ---------------------------------------------------------------- rooflines of traces


def test_the_documented_bandwidth_command_by_hand(known_trace):
    """1 GFLOP, 8 MB in 20 us, 12 MB in 10 us and 10 us unknown, under 163.4 TFLOP/s and 5.3 TB/s."""
    pytest.importorskip("matplotlib")
    (known_trace / "complete_rocm_analysis").mkdir()
    folder = (known_trace / "pytorch_profiles").rename(known_trace / "complete_rocm_analysis" / "pytorch_profiles")
    command = [sys.executable, FOLDERS[2] / "memory_bandwidth_analyzer.py", "--generate-roofline-plot", "--json", "-"]
    result = run_here([*command, "--profile-data", "./complete_rocm_analysis"], cwd=known_trace)
    assert result.returncode == 0, result.stderr
    content = json.loads(result.stdout)
    rows = {row["operator"]: row for row in content["operators"]}
    assert (rows["aten::mm"]["bound"], rows["aten::add"]["bound"]) == ("compute", "memory")
    assert [rows["aten::mm"][key] for key in ("flop_per_byte", "tflops", "of_roofline")] == pytest.approx(
        [125, 50, 0.306], rel=1e-3
    )
    summary = content["summary"]
    found = [rows["aten::add"]["share_of_copy"], summary["unknown_ms"], summary["memory_bound_ms"]]
    assert found == pytest.approx([0.2264, 0.01, 0.01], rel=1e-3)
    # 20 MB in the 30 us of the two operators whose bytes are known
    found = [summary[key] for key in ("bytes", "ms", "gb_s", "share_of_copy")]
    assert found == pytest.approx([20e6, 0.04, 666.7, 0.1258], rel=1e-3)
    assert (folder / "roofline.png").read_bytes()[:4] == b"\x89PNG"


def test_fused_attention_counts_alike_whichever_way_the_trace_names_it():
    B, T, H, K, D = 16, 512, 16, 8, 64
    sizes = {"hidden_dim": H * D, "num_layers": 12, "num_heads": H, "num_kv_heads": K, "intermediate_dim": 4096}
    sizes |= {"vocab_size": 1000, "seq_len": T, "batch_size": B, "precision": "bfloat16"}
    known = operators.counted_kernels(sizes)
    dims, kinds = [[B, T, H, D], [B, T, K, D], [B, T, K, D]], ["c10::BFloat16"] * 3
    flash = Operation("aten::_flash_attention_forward", "attention", 1, dims, kinds, [[]] * 3, ("fmha",))
    flops, moved = operators.work_of(flash, known)
    for name, matmuls in (
        ("attention_forward_kernel", 2),
        ("triton_tem_fused_flex_attention_3", 2),
        ("triton_tem_fused_flex_attention_backward_4", 5),
    ):
        found = operators.work_of(Operation("CompiledFunction", "attention", 1, [], [], [], (name,)), known)
        assert found[0] == flops / 2 * matmuls == matmuls * B * T * T * H * D
        assert matmuls == 5 or found[1] == pytest.approx(moved, rel=0.02)  # the operator's shapes lack the row sums


def test_kernel_counts_are_those_of_the_parts():
    sizes = gemm_tool.sizes_of(CONFIG, 2, 16)
    kernels, step = counts.kernel_counts("float32", sizes), counts.step_counts(3, "float32", sizes)
    launches = {"rmsnorm_forward_kernel": 5, "rmsnorm_backward_kernel": 5, "column_sum_kernel": 5}

    def moved(*names):
        return sum(launches.get(name, 2) * kernels[name][1] for name in names)

    norm = step["norms and residual"]
    assert moved("rmsnorm_forward_kernel") == pytest.approx(norm["forward"]["bytes"])
    assert moved("rmsnorm_backward_kernel", "column_sum_kernel") == pytest.approx(norm["backward"]["bytes"])
    backward = [f"attention_backward_{name}_kernel" for name in ("dq", "dkdv")]
    assert moved(*backward) == step["attention"]["backward"]["bytes"]
    assert sum(2 * kernels[name][0] for name in backward) == step["attention"]["backward"]["flops"]
    assert all(hasattr(getattr(load_version(3), name), "fn") for name in counts.KERNELS)


def test_kernel_counts_of_the_fused_loss_are_those_of_a_chunk(monkeypatch):
    sizes = gemm_tool.sizes_of(CONFIG, 2, counts.LOSS_CHUNK)._replace(V=counts.FUSED_LOSS_FROM)  # two chunks
    chunks = counts.kernel_counts("float32", sizes)
    monkeypatch.setattr(counts, "FUSED_LOSS_FROM", sizes.V + 1)
    whole = counts.kernel_counts("float32", sizes)
    for name in ("cross_entropy_forward_kernel", "cross_entropy_backward_kernel"):  # two numbers are a scale, or one
        assert [2 * number for number in chunks[name]] == list(whole[name])
    assert chunks["rope_kernel"] == whole["rope_kernel"]


@pytest.mark.parametrize("vocabulary", [64, counts.FUSED_LOSS_FROM])
def test_bytes_of_the_loss_kernel_are_those_of_the_loss_that_ran(vocabulary):
    """--enable-fused-loss and --disable-fused-loss override the vocabulary's default; the operator's name shows it."""
    sizes = gemm_tool.sizes_of(CONFIG, 2, counts.LOSS_CHUNK)  # two chunks
    names = ("hidden_dim", "num_heads", "num_kv_heads", "intermediate_dim", "num_layers")
    metadata = {name: CONFIG[name] for name in names} | {"vocab_size": vocabulary, "precision": "float32"}
    metadata |= {"batch_size": sizes.B, "seq_len": sizes.T}

    def moved(operator):
        call = Operation(operator, "loss", 1.0, [], [], [], ("cross_entropy_forward_kernel",))
        profile = SimpleNamespace(metadata=metadata, operations=[call])
        return operators.operator_table(profile, 1, None)[0]["bytes"]

    assert moved("CrossEntropyFunction") == 2 * moved("LinearCrossEntropyFunction") > 0


@pytest.fixture
def drawn(monkeypatch):
    """Return the axes of the pictures that are drawn."""
    figure = pytest.importorskip("matplotlib.figure").Figure
    pictures = []
    monkeypatch.setattr(figure, "savefig", lambda figure, path, **options: pictures.append(figure.axes[0]))
    return pictures


def places(axes):
    return [tuple(dots.get_offsets()[0]) for dots in axes.collections]


def named(axes):
    return [text.get_text() for text in axes.get_legend().texts]


def test_the_picture_shows_every_point_and_names_the_longest(tmp_path, drawn):
    points = [(f"_{i}", 1000, 0.04, None) for i in range(20)] + [("mm", 100, 0.05, 2.0)]
    for top in (0.1, 700.0):  # a CPU, a GPU
        roofline_picture.draw_roofline(tmp_path / "a.png", "", {"matmul_tflops": top, "copy_tb_s": 1.0}, points)
    assert [axes.get_xlim() for axes in drawn] == [roofline_picture.FLOP_PER_BYTE] * 2  # one scale for all
    for axes, words in zip(drawn, ("0.100", "700"), strict=True):
        assert places(axes) == [(100, 0.05)] + [(1000, 0.04)] * 20
        assert axes.texts[0].get_text() == f"matmul {words} TFLOP/s"
        assert named(axes) == ["mm", *map(str, range(13))]


def test_a_part_without_a_measured_rate_gets_no_height(tmp_path, drawn):
    work = {"SwiGLU": {"flop_per_byte": 0.1}, "step": {"flop_per_byte": 20.0}}
    content = {"version": 1, "precision": "float32", "intensity": work, "measured": {"tflops": 3.0}}
    flops.draw(tmp_path / "a.png", content | {"ceilings": {"matmul_tflops": 50.0, "copy_tb_s": 4.0}})
    (axes,) = drawn
    assert places(axes) == [(20, 3)]
    roof, part = axes.lines
    assert list(part.get_xdata()) == [0.1, 0.1] and part.get_linestyle() == ":"
    assert sorted(named(axes)) == ["SwiGLU", "step, measured"]


def test_time_in_memory_bound_operators_is_not_that_of_operators_without_flops():
    """Two products, one with few FLOP per byte, and an addition, under 10 FLOP per byte; 5 ms are not known."""
    rates = dict.fromkeys(("tflops", "of_roofline"))
    rows = [
        {"flops": flops, "bytes": 1e9, "gb_s": 1e3 / ms, "ms": ms, **rates}
        for flops, ms in ((9e10, 1), (9e9, 2), (0, 4))
    ]
    ceilings = {"matmul_tflops": 10.0, "copy_tb_s": 1.0}
    known = bandwidth.bandwidth_rows([*rows, {"bytes": None, "gb_s": None, "ms": 5}], ceilings)
    found = bandwidth.summary(known, [*rows, {"ms": 5}], ceilings)
    assert [row["bound"] for row in known] == ["compute", "memory", "memory"]
    assert (found["memory_bound_ms"], found["unknown_ms"], found["ms"]) == (6, 5, 12)
    assert found["gb_s"] == pytest.approx(3 / 7e-3) and found["share_of_copy"] == pytest.approx(3 / 7)


def test_the_roofline_of_a_trace_has_the_operators_that_only_move_data(known_trace, drawn, capsys, monkeypatch):
    monkeypatch.chdir(known_trace)
    assert bandwidth.main(["--profile-data", "pytorch_profiles", "--generate-roofline-plot"]) == 0
    (axes,) = drawn
    # 125 FLOP per byte at 50 TFLOP/s; an addition at 1,200 of 5,300 GB/s
    (first, second), edge = places(axes), roofline_picture.LEAST_SHOWN
    assert first == pytest.approx((125, 50)) and second == pytest.approx((edge, 5.3 * edge * 0.2264), rel=1e-3)
    assert named(axes) == ["mm", "add"] and "left edge" in axes.get_title()
    assert "not in it: 0.010 ms per step whose bytes are not known" in capsys.readouterr().err


def test_bad_input_of_the_bandwidth_tool(known_trace, capsys, monkeypatch):
    monkeypatch.chdir(known_trace)
    data = ["--profile-data", "pytorch_profiles"]
    trace = known_trace / "pytorch_profiles" / "trace_v1.json"
    trace.write_text(trace.read_text().replace("MI300X", "GPU"))
    refused(bandwidth.main, data, capsys, "are not known here: take them from its data sheet")
    refused(bandwidth.main, [*data, "--peak", "989"], capsys, "argument --peak")
    assert bandwidth.main([*data, "--peak", "989,4.8"]) == 0 and "989" in capsys.readouterr().out
    refused(bandwidth.main, ["--profile-data", "nowhere"], capsys, "does not exist")


def test_a_list_whose_quotes_were_escaped_for_the_shell_is_read(toy_config, capsys):
    """As version 1's page of the starting documents prints it: --batch-sizes "\\"4,8\\""."""
    words = shlex.split(r'--batch-sizes "\"4,8,16,32\"" --sequence-lengths \'64,128\'')
    assert [numbers(word) for word in words[1::2]] == [[4, 8, 16, 32], [64, 128]]
    given = ["--model-config", str(toy_config), "--batch-sizes", "4;8"]
    refused(gemm_tool.main, given, capsys, "'4;8': separate whole numbers with commas, as in 4,8")


@pytest.mark.parametrize("text", ["1_0", "\uff14", "4.0", "4,1_0"])
def test_a_number_is_written_in_plain_digits(text, capsys):
    """int alone reads 1_0 as 10, and a fullwidth digit as its number."""
    refused(gemm_tool.main, ["--batch-sizes", text], capsys, "separate whole numbers with commas, as in 4,8")
