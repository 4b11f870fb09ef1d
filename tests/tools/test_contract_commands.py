"""The commands that the workshop's pages name, in contract_commands.txt: each is run by a test, from its page's folder.

What no other file runs is run here: the text of the command with the options of a toy model behind it, the first
version's and the second's commands in the order of their pages, so that a command finds what the ones before it left.
"""

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
LINES = pathlib.Path(__file__).with_name("contract_commands.txt").read_text().splitlines()
COMMANDS = {line.split()[0]: line.split(maxsplit=3)[1:] for line in LINES if line[0] != "#"}


def test_every_command_has_a_test_that_exists():
    assert len(COMMANDS) == 38
    for number, (_, place, _) in COMMANDS.items():
        file, _, name = place.partition("::")
        if file == "here":
            assert f'"{number}"' in pathlib.Path(__file__).read_text()
        else:
            assert f"def {name}(" in next(pathlib.Path(__file__).parents[1].glob(f"*/{file}")).read_text(), place


@pytest.mark.parametrize("number", COMMANDS)
def test_the_programs_lie_where_the_commands_run(number):
    version, _, command = COMMANDS[number]
    named = re.findall(r"(?<!\S)(\S+\.(?:py|sh|yaml))", command)
    assert named and all((SCRIPTS[int(version)].parent / name).is_file() for name in named)


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """Return empty folders of a workshop in which the commands run; the programs are the repository's."""
    places = {version: tmp_path / "a workshop" / script.parent.name for version, script in SCRIPTS.items()}
    for place in places.values():
        place.mkdir(parents=True)
    monkeypatch.setattr(subprocess, "run", run_here)
    monkeypatch.setattr(runs, "run_process", process_here)
    return places


def run(folders, number, more="", **variables):
    """Return what the command prints; variables replace $name in it, and patterns name files as in a shell."""
    version, command = int(COMMANDS[number][0]), COMMANDS[number][2]
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
    """Return True if a training script took so many steps with finite losses and trained every parameter."""
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
    cells = [re.fullmatch(r"([\d.]+)(us|ms|s)", line.split()[-3]) for line in table.splitlines() if line[-1:] == " "]
    totals = [float(cell[1]) * {"us": 1, "ms": 1e3, "s": 1e6}[cell[2]] for cell in cells if cell]
    assert len(totals) > 10 and "aten::mm" in table and totals == sorted(totals, reverse=True)


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
    arguments = benchmark_suite.parse_arguments([*shlex.split(COMMANDS["C42"][2])[2:], "--presets", "tiny"])
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


RELEASES = {
    "C28": ("6.2", "6.4", "7.0", "10.0"),
    "C29": ("6.4", "7.0", "10.0"),
    "C30": ("6.4", "7.0"),
    "C31": ("6.4", "7.0", "10.0"),
}


@pytest.mark.parametrize(
    ("number", "release"), [(n, release) for n, releases in RELEASES.items() for release in releases]
)
def test_profilers_as_printed(number, release, tmp_path):
    """Run the command as it is printed, where `python` is a stub that notes what it was to train with."""
    (tmp_path / "bin").mkdir()
    for name in ("python", "python3"):
        (tmp_path / "bin" / name).symlink_to(STUBS / "training_python")
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("ROCPROF")},
        "PATH": os.pathsep.join([str(STUBS / f"rocm-{release}"), str(tmp_path / "bin"), os.environ["PATH"]]),
        "STAND_IN_PYTHON": sys.executable,
        "STAND_IN_OPTIONS": str(tmp_path / "options"),
    }
    command = ["bash", "-c", COMMANDS[number][2]]
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    script, *options = (tmp_path / "options").read_text().splitlines()[-1].split()
    chosen = load_version(2).parse_options(options)
    assert script == "tiny_llama_v2.py" and (chosen.batch_size, chosen.seq_len, chosen.num_steps) == (8, 128, 30)
    if number == "C28":
        kernels = {kernel.name for kernel in kernel_times.read_kernels(tmp_path / "host")}
        assert {"adamw_kernel", "attention_forward_kernel"} <= kernels
    elif number == "C29":
        assert len(list(tmp_path.rglob("perfetto-trace-*.proto"))) == len(list(tmp_path.rglob("wall_clock-*.txt"))) == 1
    else:
        (result,) = [*tmp_path.glob("workloads/*/*/pmc_perf.csv"), *tmp_path.glob("workloads/*/*/results_*.csv")]
        assert result.parent.parent.name == {"C30": "roof", "C31": "ver2"}[number]


@pytest.mark.parametrize("release", ["6.4", "7.0"])
def test_launches_of_a_kernel_trace(release, tmp_path):
    """Instead of "C49", which no rocprof takes."""
    environment = {"TINY_LLAMA_PYTHON": str(STUBS / "training_python"), "STAND_IN_PYTHON": sys.executable}
    environment["PATH"] = os.pathsep.join([str(STUBS / f"rocm-{release}"), os.environ["PATH"]])
    command = ["bash", SCRIPTS[2].parent / "get_counters.sh", "--profiler", "rocm", "--output-dir", tmp_path]
    result = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    (folder,) = tmp_path.glob("counters/counter_*")
    tool = REPOSITORY / "scripts" / "analyze_kernel_launches.py"
    text = run_here([sys.executable, tool, "--trace-file", folder, "--steps", "2"]).stdout
    assert "8 launches, 2 steps" in text and "launch-bound: the GPU waits 30.2 %" in text
