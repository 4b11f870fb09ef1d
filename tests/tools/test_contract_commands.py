"""The commands that the workshop's pages name, in contract_commands.txt: each is run by a test, from its page's folder.

What no other file runs is run here: the text of the command with the options of a toy model behind it, the first
version's and the second's commands in the order of their pages, so that a command finds what the ones before it left.
"""

import glob
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys

import pytest
import torch

import benchmark_suite
from common.profiles import read_profile
from common.versions import SCRIPTS, load_version
from in_process import run_here

MODEL = " --hidden-dim 32 --num-layers 1 --num-heads 2 --vocab-size 64 --device cpu"
SHORT = MODEL + " --seq-len 16"
TOY = SHORT + " --num-steps 2"
LINES = pathlib.Path(__file__).with_name("contract_commands.txt").read_text().splitlines()
COMMANDS = {line.split()[0]: line.split(maxsplit=3)[1:] for line in LINES if line[0] != "#"}
# Commands of the same pages, C24 to C74, that run no program of this repository.
OTHERS = {
    "rocprof-compute analyze": "C32 C33",
    "python -c": "C43 C64",
    "export, usermod": "C44 C45 C46 C47 C48",
    "cd, mkdir, chmod": "C52 C72 C73",
    "tensorboard": "C59",
}


def test_every_documented_command_is_listed_once():
    numbers = [line.split()[0] for line in LINES if line[0] != "#"] + " ".join(OTHERS.values()).split()
    assert sorted(numbers) == [f"C{number}" for number in range(24, 75)]


def test_every_command_has_a_test_that_exists():
    for number, (_, place, _) in COMMANDS.items():
        file, _, name = place.partition("::")
        if file == "here":
            assert f'"{number}"' in pathlib.Path(__file__).read_text()
        else:
            assert f"def {name}(" in next(pathlib.Path(__file__).parents[1].rglob(file)).read_text(), place


@pytest.mark.parametrize("number", COMMANDS)
def test_the_programs_lie_where_the_commands_run(number):
    version, _, command = COMMANDS[number]
    named = re.findall(r"(?<!\S)(\S+\.(?:py|sh|yaml))", command)
    assert named and all((SCRIPTS[int(version)].parent / name).is_file() for name in named)


@pytest.mark.skipif(not (SCRIPTS[1].parents[1] / ".git").exists(), reason="no checkout")
def test_git_ignores_what_the_commands_leave():
    """bottlenecks_v1.md and fusion_comparison_report.md stood in git status."""
    left = []
    for version, _, command in COMMANDS.values():
        named = re.findall(r"--(?:output|output-report|output-dir|profile-dir) (\S+)", command)
        left += [SCRIPTS[int(version)].parent / re.sub(r"\$\{?\w+\}?", "128", name) for name in named]
    names = [str(name if name.suffix else name / "a file") for name in left]
    done = subprocess.run(["git", "check-ignore", *names], cwd=SCRIPTS[1].parent, capture_output=True, text=True)
    assert len(names) == 9 and set(done.stdout.splitlines()) == set(names)


@pytest.fixture
def folders(tmp_path, one_process):
    """Return empty folders of a workshop in which the commands run; the programs are the repository's."""
    places = {version: tmp_path / "a workshop" / script.parent.name for version, script in SCRIPTS.items()}
    for place in places.values():
        place.mkdir(parents=True)
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


def trained(steps, sizes=""):
    """Return what a training script prints at its end, and before it the sizes."""
    return f"{sizes}.*summary of {steps} steps.*parameters \\(100.0 %\\)"


# Command, options behind it, what its output matches, files that it leaves: one after the other in one folder.
SEQUENCES = {
    "first run": [
        ("C57", SHORT, trained(10, "8 sequences of 16 tokens"), ""),
        ("C71", MODEL, trained(50, "4 sequences of 64 tokens"), ""),
    ],
    "first profile": [
        (
            "C58",
            SHORT,
            trained(10) + r".*open (pytorch_profiles/trace_\S+\.json) in http",
            "pytorch_profiles/trace_*.json",
        ),
        # by hand: 8 products with weights, each forward and twice backward, in 3 steps
        (
            "C60",
            "",
            r"reading the newest trace in pytorch_profiles.*aten::mm +\S+ +72 ",
            "pytorch_profiles/profile_*.json pytorch_profiles/memory_timeline.html",
        ),
        ("C68", "", r"1\. \S+: .* could be saved", "bottlenecks_v1.md bottleneck_analysis/optimization_targets.json"),
    ],
    "kernel reduction": [  # the baseline says how long its sequences are, the fused profile does not
        ("C58", MODEL + " --profile-steps 1", trained(10, "8 sequences of 128 tokens"), ""),
        ("C24", MODEL + " --profile-steps 1", "8 x 128 tokens.*wrote fusion_analysis", ""),
        ("C25", "", "operators per step became", ""),
    ],
    "FLOPs": [
        ("C61", SHORT, "(as expected.*){2}TFLOP/s in float32", "flops_analysis/flops_profile.json"),
        ("C62", "", "version 1: one step of 8 x 16 tokens.*as expected", ""),
    ],
    "memory": [("C63", TOY, trained(2) + ".*operators by self_cpu_memory_usage", "memory_analysis/trace_*.json")],
    # without a GPU cuda_time_total is cpu_time_total
    "operators": [("C67", TOY, trained(2) + ".*operators by cpu_time_total.*aten::mm", "")],
    "set-up": [("C74", MODEL, trained(3) + ".*set-up check passed", "pytorch_profiles/trace_*.json")],
    "fusion report": [
        ("C56", SHORT + " --profile-steps 1", "operators per step became", "optimization_analysis/fusion_report.md"),
    ],
}


@pytest.mark.parametrize("name", SEQUENCES)
@pytest.mark.quick(4)
def test_documented_sequences(name, folders):
    for number, more, output, files in SEQUENCES[name]:
        text = run(folders, number, more)
        assert re.search(output, text, re.DOTALL), text
        place = folders[int(COMMANDS[number][0])]
        assert all(len(list(place.glob(file))) == 1 for file in files.split())


def test_batch_scaling(folders):
    for size in (4, 8, 16, 32):
        run(folders, "C65", SHORT + " --profile-steps 1", bs=size)
    rows = json.loads(run(folders, "C66", " --json -"))["rows"]
    assert [row["batch_size"] for row in rows] == [4, 8, 16, 32] and all(row["step_ms"] > 0 for row in rows)


def test_memory_for_every_sequence_length(folders):
    peaks = []
    for length in (128, 256, 512, 1024):
        run(folders, "C26", MODEL + " --num-steps 1 --warmup-steps 1 --profile-steps 1", seq_len=length)
        trace = next((folders[2] / f"flash_attention_seq{length}").glob("trace_*.json"))
        events = json.loads(trace.read_text())["traceEvents"]
        memory = sorted((event for event in events if event["name"] == "[memory]"), key=lambda event: event["ts"])
        totals = [event["args"]["Total Allocated"] for event in memory]
        before = totals[0] - memory[0]["args"]["Bytes"]  # what an earlier profile of this process left behind
        peaks.append(max(totals) - before)
    # weights and their moments are small here: what grows with the tokens doubles with them
    assert all(1.5 < after / before < 2.2 for before, after in zip(peaks, peaks[1:], strict=False)), peaks


@pytest.mark.parametrize(
    ("number", "parts"),
    [
        ("C36", "qkv-fusion, flash-attention, fused-optimizer, torch-compile"),
        ("C39", "qkv-fusion, flash-attention, swiglu-fusion, fused-optimizer, torch-compile"),
        ("C53", "qkv-fusion, flash-attention, swiglu-fusion, fused-optimizer, torch-compile"),
    ],
)
@pytest.mark.quick(1)
@pytest.mark.slow
def test_switches_of_version_2(number, parts, folders, monkeypatch):
    compile_module = torch.nn.Module.compile
    modes = []

    def traced(module, mode):  # test_gradients.py waits for the code of the real backend
        modes.append(mode)
        compile_module(module, backend="aot_eager")

    monkeypatch.setattr(torch.nn.Module, "compile", traced)
    text = run(folders, number, TOY)
    assert re.search(trained(2), text, re.DOTALL) and f"  uses       {parts}\n" in text and modes == ["default"]
    assert ("  precision  bfloat16" in text) == (number == "C39")


def test_the_printed_grid_of_the_suite():
    arguments = benchmark_suite.parse_arguments([*shlex.split(COMMANDS["C42"][2])[2:], "--presets", "tiny"])
    cases = benchmark_suite.grid(arguments)
    options = [" ".join(benchmark_suite.training_options(case)) for case in cases]
    for batch in (4, 8, 16, 32):
        for length in (128, 256, 512):
            assert sum(f"--batch-size {batch} --seq-len {length}" in text for text in options) == 2
    assert len(cases) == 24 and arguments.metrics == ["throughput", "memory", "accuracy"]


RAW = [  # number, release of ROCm whose profilers the stubs play, what the command leaves
    ("C28", "6.4", "*/*_kernel_stats.csv"),
    ("C28", "7.0", "*/*_results.db"),
    ("C29", "7.0", "rocprofsys-*-output/*/perfetto-trace-*.proto"),
    ("C30", "7.0", "workloads/roof/*/sysinfo.csv"),
    ("C31", "7.0", "workloads/ver2/*/pmc_perf.csv"),
]


@pytest.mark.parametrize(("number", "release", "left"), RAW)
def test_a_raw_profiler_command_runs_as_it_is_printed(number, release, left, tmp_path):
    """With a stub for the profiler and one for Python, in a folder that holds the script alone."""
    stubs = pathlib.Path(__file__).parent / "stubs"
    folder = tmp_path / "a workshop"
    folder.mkdir()
    (folder / "tiny_llama_v2.py").touch()
    for name in ("python", "python3"):
        (tmp_path / name).symlink_to(stubs / "training_python")
    path = [str(tmp_path), str(stubs / f"rocm-{release}"), os.environ["PATH"]]
    variables = os.environ | {"PATH": os.pathsep.join(path), "STAND_IN_PYTHON": sys.executable}
    command = ["bash", "-c", COMMANDS[number][2]]
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True)
    assert done.returncode == 0 and "training" in done.stdout, done.stderr
    assert len(list(folder.glob(left))) == 1, sorted(folder.rglob("*"))
    if number == "C28":  # our tools read what it leaves
        assert read_profile(folder).unit == "kernels"


@pytest.mark.parametrize("number", ["C28", "C29", "C30", "C31"])
def test_the_script_takes_the_options_behind_a_profiler(number):
    python, script, *options = COMMANDS[number][2].split(" -- ")[1].split()
    chosen = load_version(2).parse_options(options)
    assert script == "tiny_llama_v2.py" and (chosen.batch_size, chosen.seq_len, chosen.num_steps) == (8, 128, 30)


def test_a_compiler_that_fails_gets_a_way_out():
    """C36, C39 and C53 without a GPU: PyTorch gives g++ the folder of its libraries as -L, without quotes."""
    from torch._inductor.exc import CppCompileError

    status, words = load_version(2).user_message(CppCompileError(["g++"], "cannot find group/env: No such file"))
    assert status == 1 and words.startswith("torch.compile failed, run with --disable-torch-compile: C++ compile error")
