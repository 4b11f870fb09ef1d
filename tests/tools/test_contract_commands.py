"""The commands that the workshop's pages name: each is run by a test, from the folder that the page runs it in.

COMMANDS holds them as the pages print them, TESTED where each is run. What no other file runs is run here: the text of
the command with the options of a toy model behind it, the first version's and the second's commands in the order of
their pages, so that a command finds what the ones before it left.
"""

import ast
import glob
import json
import math
import os
import pathlib
import re
import shlex
import subprocess
import sys

import pytest
import torch

import benchmark_suite
import kernel_times
from common import profiles, runs
from common.versions import REPOSITORY, SCRIPTS, load_version
from in_process import process_here, run_here

STUBS = pathlib.Path(__file__).parent / "stubs"
MODEL = " --hidden-dim 32 --num-layers 1 --num-heads 2 --vocab-size 64 --device cpu"
TOY = MODEL + " --seq-len 16 --num-steps 2"
TRAIN_2 = "-- python tiny_llama_v2.py --batch-size 8 --seq-len 128 --num-steps 30"
# number -> (version in whose folder it is run, command)
COMMANDS = {
    "C24": (2, "python run_pytorch_profiler.py --batch-size 8 --profile-dir ./fusion_analysis --generate-report"),
    "C25": (
        2,
        "python analyze_kernel_reduction.py --baseline ../version1_pytorch_baseline/pytorch_profiles "
        "--fused ./fusion_analysis",
    ),
    "C26": (
        2,
        "python tiny_llama_v2.py --seq-len $seq_len --batch-size 4 --enable-memory-profiling "
        "--profile-dir ./flash_attention_seq${seq_len}",
    ),
    "C27": (
        2,
        "python run_deepspeed_flops.py --batch-size 8 --seq-len 256 --computational-intensity --generate-roofline",
    ),
    "C28": (2, f"rocprofv3 --kernel-trace --stats --truncate-kernels {TRAIN_2}"),
    "C29": (2, f"rocprof-sys-run --profile --trace {TRAIN_2}"),
    "C30": (2, f"rocprof-compute profile -n roof --kernel-names --roof-only --device 0 {TRAIN_2}"),
    "C31": (2, f"rocprof-compute profile -n ver2 --no-roof {TRAIN_2.replace('python', 'python3')}"),
    "C34": (
        2,
        "bash run_all_profilers.sh --batch-size 8 --seq-len 128 --enable-rocm-tools "
        "--profile-dir ./complete_rocm_analysis",
    ),
    "C35": (
        2,
        "python generate_fusion_report.py --baseline ../version1_pytorch_baseline/complete_analysis "
        "--fused ./complete_rocm_analysis --output ./fusion_comparison_report.md",
    ),
    "C36": (
        2,
        "python tiny_llama_v2.py --enable-qkv-fusion --enable-flash-attention --disable-swiglu-fusion "
        "--enable-torch-compile",
    ),
    "C37": (2, "python fusion_ablation_study.py --all-combinations"),
    "C38": (
        2,
        "python optimize_batch_size.py --target-memory-usage 0.8 --seq-len 128 --optimization-target throughput",
    ),
    "C39": (2, "python tiny_llama_v2.py --use-amp --amp-dtype bfloat16 --enable-all-fusion"),
    "C40": (
        2,
        "python validate_numerical_accuracy.py --baseline ../version1_pytorch_baseline/tiny_llama_v1.py "
        "--optimized ./tiny_llama_v2.py --tolerance 1e-4",
    ),
    "C41": (
        2,
        "python performance_regression_test.py --baseline-results ../version1_baseline_metrics.json "
        "--current-results ./version2_metrics.json --min-speedup 1.3",
    ),
    "C42": (
        2,
        "python benchmark_suite.py --models v1,v2 --batch-sizes 4,8,16,32 --seq-lengths 128,256,512 "
        "--metrics throughput,memory,accuracy",
    ),
    "C49": (2, "rocprof --hip-trace --kernel-trace python tiny_llama_v2.py"),
    "C50": (2, "python analyze_kernel_launches.py --trace-file results.csv"),
    "C51": (
        2,
        "python memory_bandwidth_analyzer.py --profile-data ./complete_rocm_analysis --generate-roofline-plot",
    ),
    "C53": (2, "python tiny_llama_v2.py --batch-size 8 --enable-all-fusion"),
    "C54": (2, "bash run_all_profilers.sh --enable-rocm-tools"),
    "C55": (2, "python compare_versions.py --v1 ../version1_pytorch_baseline --v2 ."),
    "C56": (2, "python generate_fusion_report.py --output-dir ./optimization_analysis"),
    "C57": (1, "python tiny_llama_v1.py --batch-size 8 --seq-len 128 --num-steps 10"),
    "C58": (
        1,
        "python tiny_llama_v1.py --batch-size 8 --seq-len 128 --num-steps 10 --enable-pytorch-profiler "
        "--profile-dir ./pytorch_profiles",
    ),
    "C60": (1, "python run_pytorch_profiler.py --analyze-existing pytorch_profiles/profile_*.json"),
    "C61": (1, "python run_deepspeed_flops.py --batch-size 8 --seq-len 128 --num-steps 10"),
    "C62": (1, "python run_deepspeed_flops.py --analyze-results flops_profile.json"),
    "C63": (
        1,
        "python tiny_llama_v1.py --batch-size 8 --seq-len 128 --enable-pytorch-profiler --profile-memory "
        "--profile-dir ./memory_analysis",
    ),
    "C65": (
        1,
        "python tiny_llama_v1.py --batch-size $bs --seq-len 128 --num-steps 5 --enable-pytorch-profiler "
        "--profile-dir ./scaling_bs$bs",
    ),
    "C66": (1, "python analyze_batch_scaling.py --profile-dirs scaling_bs*"),
    "C67": (
        1,
        "python tiny_llama_v1.py --batch-size 8 --seq-len 128 --enable-pytorch-profiler --profile-operators "
        "--sort-by cuda_time_total",
    ),
    "C68": (
        1,
        "python analyze_bottlenecks.py --profile-data pytorch_profiles/ --output-report bottlenecks_v1.md",
    ),
    "C69": (
        1,
        "python tiny_llama_v1.py --batch-size 8 --seq-len 128 --profile-attention-only --enable-pytorch-profiler",
    ),
    "C70": (
        1,
        "python analyze_gemm_operations.py --model-config tiny_llama_v1_config.yaml "
        '--batch-sizes "4,8,16,32" --sequence-lengths "64,128,256"',
    ),
    "C71": (1, "python tiny_llama_v1.py --batch-size 4 --seq-len 64"),
    "C74": (
        1,
        "python tiny_llama_v1.py --batch-size 4 --seq-len 64 --num-steps 3 --enable-pytorch-profiler --validate-setup",
    ),
}
# number -> (file and test that runs it, what there is to know of it)
TESTED = {
    "C24": ("test_profiling_tools.py::test_a_profile_holds_kernels_figures_and_a_trace", ""),
    "C25": ("test_analysis.py::test_the_documented_reduction_command", "after C58 and C24"),
    "C26": ("test_contract_commands.py::test_memory_for_every_sequence_length", "for seq_len in 128 256 512 1024"),
    "C27": ("test_flops_tools.py::test_the_documented_command_writes_all_its_files", ""),
    "C28": ("test_contract_commands.py::test_rocprofv3_as_printed", "ROCm 7 leaves a database, which our tools read"),
    "C29": ("test_contract_commands.py::test_rocprof_sys_as_printed", "ROCm 6.3 and later"),
    "C30": (
        "test_contract_commands.py::test_rocprof_compute_as_printed",
        "ROCm 6.3 to 7.2; later get_rocprof_compute.sh --roof",
    ),
    "C31": ("test_contract_commands.py::test_rocprof_compute_as_printed", "ROCm 6.3 and later"),
    "C34": ("test_profiling_tools.py::test_all_profilers_run_and_missing_ones_are_named", ""),
    "C35": ("test_comparison.py::test_the_documented_fusion_report", "after C34, and the same in version 1's folder"),
    "C36": ("test_contract_commands.py::test_switches_of_version_2", ""),
    "C37": ("test_studies.py::test_the_documented_ablation_command", ""),
    "C38": ("test_studies.py::test_the_documented_batch_size_command_from_its_folder", ""),
    "C39": ("test_contract_commands.py::test_switches_of_version_2", ""),
    "C40": ("test_comparison.py::test_the_documented_accuracy_command_passes", ""),
    "C41": (
        "test_studies.py::test_the_documented_regression_command_reads_what_the_scripts_write",
        "after both scripts wrote their --metrics-file",
    ),
    "C42": ("test_contract_commands.py::test_the_printed_grid_of_the_suite", "run in toy size by test_benchmark.py"),
    "C49": (
        "test_contract_commands.py::test_launches_of_a_kernel_trace",
        "rocprof of ROCm 5 and 6 knows no --kernel-trace: get_counters.sh traces the launches",
    ),
    "C50": ("test_analysis.py::test_the_documented_launch_command_reads_results_csv", "after a kernel trace"),
    "C51": ("test_flops_tools.py::test_the_documented_bandwidth_command_by_hand", "after C34"),
    "C53": ("test_contract_commands.py::test_switches_of_version_2", ""),
    "C54": ("test_profiling_tools.py::test_all_profilers_go_on_after_a_failure_and_end_with_1", ""),
    "C55": ("test_comparison.py::test_the_documented_comparison", ""),
    "C56": ("test_contract_commands.py::test_a_fusion_report_without_profiles_makes_them", ""),
    "C57": ("test_contract_commands.py::test_the_first_run", ""),
    "C58": ("test_contract_commands.py::test_the_first_profile_and_what_reads_it", ""),
    "C60": ("test_contract_commands.py::test_the_first_profile_and_what_reads_it", "after C58"),
    "C61": ("test_contract_commands.py::test_flops_of_version_1", ""),
    "C62": ("test_contract_commands.py::test_flops_of_version_1", "after C61"),
    "C63": ("test_contract_commands.py::test_memory_of_version_1", ""),
    "C65": ("test_contract_commands.py::test_batch_scaling", "for bs in 4 8 16 32"),
    "C66": ("test_contract_commands.py::test_batch_scaling", "after C65"),
    "C67": ("test_contract_commands.py::test_operators_by_their_time", ""),
    "C68": ("test_contract_commands.py::test_the_first_profile_and_what_reads_it", "after C58"),
    "C69": ("test_command_line.py::test_attention_alone", ""),
    "C70": ("test_flops_tools.py::test_the_documented_gemm_command", ""),
    "C71": ("test_contract_commands.py::test_the_first_run", ""),
    "C74": ("test_contract_commands.py::test_the_setup_is_validated", ""),
}


def test_every_command_has_a_test_that_exists():
    assert list(TESTED) == list(COMMANDS)
    for place, _ in TESTED.values():
        file, name = place.split("::")
        tree = ast.parse(next(pathlib.Path(__file__).parents[1].glob(f"*/{file}")).read_text())
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, place


@pytest.mark.parametrize("number", COMMANDS)
def test_the_programs_lie_where_the_commands_run(number):
    version, command = COMMANDS[number]
    named = re.findall(r"(?<!\S)(\S+\.(?:py|sh|yaml))", command)
    assert named and all((SCRIPTS[version].parent / name).is_file() for name in named)


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """Empty folders of a workshop in which the commands run; the programs are the repository's."""
    places = {version: tmp_path / "a workshop" / script.parent.name for version, script in SCRIPTS.items()}
    for place in places.values():
        place.mkdir(parents=True)
    monkeypatch.setattr(subprocess, "run", run_here)
    monkeypatch.setattr(runs, "run_process", process_here)
    return places


def run(folders, number, more="", **variables):
    """What the command prints; variables stand for $name in it, and patterns for files as in a shell."""
    version, command = COMMANDS[number]
    for name, value in variables.items():
        command = command.replace(f"${{{name}}}", str(value)).replace(f"${name}", str(value))
    python, program, *words = shlex.split(command + more)
    assert python == "python" and "$" not in command
    place = folders[version]
    words = [found for word in words for found in sorted(glob.glob(word, root_dir=place)) or [word]]
    result = run_here([sys.executable, SCRIPTS[version].parent / program, *words], cwd=place)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def trained_all(text, steps):
    """Whether a training script took so many steps, with losses that are numbers, and trained every parameter."""
    losses = [float(loss) for loss in re.findall(r"^step .* loss +(\S+)", text, re.MULTILINE)]
    complete = f"summary of {steps} steps" in text and "parameters (100.0 %)" in text
    return complete and len(losses) > 0 and all(map(math.isfinite, losses))


# ---------------------------------------------------------------- version 1


def test_the_first_run(folders):
    text = run(folders, "C57", MODEL + " --seq-len 16")
    assert trained_all(text, 10) and "8 sequences of 16 tokens" in text
    text = run(folders, "C71", MODEL)
    assert trained_all(text, 50) and "4 sequences of 64 tokens" in text


def test_the_first_profile_and_what_reads_it(folders):
    text = run(folders, "C58", MODEL + " --seq-len 16")
    profile = profiles.read_profile(folders[1] / "pytorch_profiles")
    assert trained_all(text, 10) and f"open pytorch_profiles/{profile.path.name} in https://ui.perfetto.dev" in text
    # by hand: 8 products with weights, each forward and twice backward
    assert sum(operation.name == "aten::mm" for operation in profile.operations) == 24 * profile.steps

    text = run(folders, "C60")
    total = sum(call.total_ns for call in kernel_times.read_kernels(profile.path)) / 1e6
    assert "reading the newest trace in pytorch_profiles" in text and f"{total:,.3f} ms in all" in text

    text = run(folders, "C68")
    place = folders[1] / "bottleneck_analysis"
    targets = json.loads((place / "optimization_targets.json").read_text())["targets"]
    assert f"1. {targets[0]['group']}: " in text and targets[0]["addressed_by"].startswith("version ")
    assert f"| 1 | {targets[0]['group']} |" in (folders[1] / "bottlenecks_v1.md").read_text()
    assert "aten::mm,GEMM,float," in (place / "operator_timing.csv").read_text()


def test_flops_of_version_1(folders):
    text = run(folders, "C61", MODEL + " --seq-len 16")
    content = json.loads((folders[1] / "flops_analysis" / "flops_profile.json").read_text())
    assert content["version"] == 1 and text.count("as expected") == len(content["checks"]) == 2
    assert content["measured"]["tflops"] > 0 and "TFLOP/s in float32" in text
    again = run(folders, "C62")
    body = again.splitlines()[1:]
    assert body and body[0].startswith("version 1: one step of 8 x 16 tokens") and "\n".join(body) in text


def memory_peak(folder):
    trace = json.loads(next(folder.glob("trace_*.json")).read_text())
    return max(event["args"]["Total Allocated"] for event in trace["traceEvents"] if event["name"] == "[memory]")


def test_memory_of_version_1(folders):
    text = run(folders, "C63", TOY)
    assert "operators by self_cpu_memory_usage" in text and memory_peak(folders[1] / "memory_analysis") > 0


def test_batch_scaling(folders):
    for size in (4, 8, 16, 32):
        assert trained_all(run(folders, "C65", MODEL + " --seq-len 16 --profile-steps 1", bs=size), 5)
    rows = json.loads(run(folders, "C66", " --json -"))["rows"]
    assert [row["batch_size"] for row in rows] == [4, 8, 16, 32] and all(row["step_ms"] > 0 for row in rows)


def test_operators_by_their_time(folders):
    table = run(folders, "C67", TOY).split("operators by cpu_time_total")[1]  # what cuda_time_total is without a GPU
    totals = [in_microseconds(line.split()[-3]) for line in table.splitlines() if re.search(r"s +\d+ *$", line)]
    assert len(totals) > 10 and "aten::mm" in table and totals == sorted(totals, reverse=True)


def in_microseconds(text):
    number, unit = re.fullmatch(r"([\d.]+)(us|ms|s)", text).groups()
    return float(number) * {"us": 1, "ms": 1e3, "s": 1e6}[unit]


def test_the_setup_is_validated(folders):
    text = run(folders, "C74", MODEL)
    assert "set-up check passed" in text and trained_all(text, 3)
    assert profiles.read_profile(folders[1] / "pytorch_profiles").steps == 3


# ---------------------------------------------------------------- version 2


def test_memory_for_every_sequence_length(folders):
    peaks = []
    for length in (128, 256, 512, 1024):
        run(folders, "C26", MODEL + " --num-steps 1 --warmup-steps 1 --profile-steps 1", seq_len=length)
        peaks.append(memory_peak(folders[2] / f"flash_attention_seq{length}"))
    # weights and their moments are small here: what grows with the tokens doubles with them
    assert all(1.5 < after / before < 2.2 for before, after in zip(peaks, peaks[1:], strict=False)), peaks


@pytest.mark.parametrize(
    ("number", "parts"),
    [
        ("C36", "qkv-fusion, flash-attention, torch-compile"),
        ("C39", "qkv-fusion, flash-attention, swiglu-fusion, torch-compile"),
        ("C53", "qkv-fusion, flash-attention, swiglu-fusion, torch-compile"),
    ],
)
def test_switches_of_version_2(number, parts, folders, monkeypatch):
    compile_module = torch.nn.Module.compile
    modes = []

    def traced(module, mode):  # test_gradients.py waits for the code of the real backend
        modes.append(mode)
        compile_module(module, backend="aot_eager")

    monkeypatch.setattr(torch.nn.Module, "compile", traced)
    text = run(folders, number, TOY)
    assert trained_all(text, 2) and f"  uses       {parts}\n" in text and modes == ["default"]
    assert ("  precision  bfloat16" in text) == (number == "C39")


def test_the_printed_grid_of_the_suite():
    _, command = COMMANDS["C42"]
    arguments = benchmark_suite.parse_arguments([*shlex.split(command)[2:], "--presets", "tiny"])
    cases = benchmark_suite.grid(arguments)
    options = [" ".join(benchmark_suite.training_options(case, arguments)) for case in cases]
    for batch in (4, 8, 16, 32):
        for length in (128, 256, 512):
            assert sum(f"--batch-size {batch} --seq-len {length}" in text for text in options) == 2
    assert len(cases) == 24 and arguments.metrics == ["throughput", "memory", "accuracy"]


def test_a_fusion_report_without_profiles_makes_them(folders):
    text = run(folders, "C56", MODEL + " --seq-len 16 --profile-steps 1")
    place = folders[2] / "optimization_analysis"
    report = (place / "fusion_report.md").read_text()
    assert "operators per step became" in text and "| GEMM | 30.0 | 15.0 | 50.0 % |" in report
    assert {path.name for path in place.glob("profile_v*")} == {"profile_v1", "profile_v2"}


# ---------------------------------------------------------------- external profilers, on stand-ins for each release


def run_profiler(number, release, folder):
    """Run the command as it is printed, where `python` is a stand-in that notes what it was to train with."""
    programs = folder / "bin"
    programs.mkdir()
    for name in ("python", "python3"):
        (programs / name).symlink_to(STUBS / "training_python")
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("ROCPROF")},
        "PATH": os.pathsep.join([str(STUBS / f"rocm-{release}"), str(programs), os.environ["PATH"]]),
        "STAND_IN_PYTHON": sys.executable,
        "STAND_IN_OPTIONS": str(folder / "options"),
    }
    result = subprocess.run(
        ["bash", "-c", COMMANDS[number][1]], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout + result.stderr
    script, *options = (folder / "options").read_text().splitlines()[-1].split()
    chosen = load_version(2).parse_options(options)
    assert script == "tiny_llama_v2.py" and (chosen.batch_size, chosen.seq_len, chosen.num_steps) == (8, 128, 30)


@pytest.mark.parametrize("release", ["6.2", "6.4", "7.0", "10.0"])
def test_rocprofv3_as_printed(release, tmp_path):
    run_profiler("C28", release, tmp_path)
    kernels = {kernel.name for kernel in kernel_times.read_kernels(tmp_path / "host")}
    assert {"adamw_kernel", "attention_forward_kernel"} <= kernels


@pytest.mark.parametrize("release", ["6.4", "7.0", "10.0"])
def test_rocprof_sys_as_printed(release, tmp_path):
    run_profiler("C29", release, tmp_path)
    assert len(list(tmp_path.rglob("perfetto-trace-*.proto"))) == len(list(tmp_path.rglob("wall_clock-*.txt"))) == 1


@pytest.mark.parametrize(
    ("number", "release"), [("C30", "6.4"), ("C30", "7.0"), ("C31", "6.4"), ("C31", "7.0"), ("C31", "10.0")]
)
def test_rocprof_compute_as_printed(number, release, tmp_path):
    run_profiler(number, release, tmp_path)
    (result,) = [*tmp_path.glob("workloads/*/*/pmc_perf.csv"), *tmp_path.glob("workloads/*/*/results_*.csv")]
    assert result.parent.parent.name == {"C30": "roof", "C31": "ver2"}[number]


@pytest.mark.parametrize("release", ["6.4", "7.0"])
def test_launches_of_a_kernel_trace(release, tmp_path):
    environment = {"TINY_LLAMA_PYTHON": str(STUBS / "training_python"), "STAND_IN_PYTHON": sys.executable}
    environment["PATH"] = os.pathsep.join([str(STUBS / f"rocm-{release}"), os.environ["PATH"]])
    command = ["bash", SCRIPTS[2].parent / "get_counters.sh", "--profiler", "rocm", "--output-dir", tmp_path]
    result = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    (folder,) = tmp_path.glob("counters/counter_*")
    tool = REPOSITORY / "scripts" / "analyze_kernel_launches.py"
    text = run_here([sys.executable, tool, "--trace-file", folder, "--steps", "2"]).stdout
    assert "8 launches, 2 steps" in text and "launch-bound: the GPU waits 30.2 %" in text
