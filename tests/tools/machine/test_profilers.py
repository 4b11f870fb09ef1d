"""The profiling wrappers, with stubs for the profilers of ten ROCm releases and of NVIDIA, and for real on a CPU."""

import concurrent.futures
import functools
import json
import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from unittest import mock

import pytest
import torch

from common.machine import profile_script
from common.profiles import limits, read_profile, steps_alone
from common.versions import REPOSITORY, SCRIPTS, load_version
from marks import slow
from processes import executable, launch, run_fork

STUBS, SAMPLES = (pathlib.Path(__file__).parents[1] / name for name in ("stubs", "samples"))
FOLDERS = [script.parent for script in SCRIPTS.values()]
FOLDER = SCRIPTS[3].parent  # replays a graph by default
WRAPPER_FILES = REPOSITORY / "scripts" / "common" / "machine" / "wrappers"
WRAPPERS = ("get_trace.sh", "get_counters.sh", "get_hotspots.sh", "get_rocprof_compute.sh", "get_rocprof_sys.sh")
ROCM = ("6.2", "6.3", "6.4", "7.0", "7.1")  # whose front ends were run
READ = ("7.13", "7.14", "10.0", "10.1", "10.2")  # read, not run: stubs of what sources and changelogs state
SUCCESS = re.compile(r"^(open|read more|the whole table|every|these are)", re.MULTILINE)  # printed by a success alone


@pytest.fixture
def python(tmp_path):
    """Return a stub that plays the training. Its path has no space: old releases of rocprof-compute take none."""
    (tmp_path / "training_python").symlink_to(STUBS / "training_python")
    return str(tmp_path / "training_python")


@pytest.fixture
def run(tmp_path, python):
    """Return a function that runs a wrapper (path) in its folder with stubs first on PATH."""

    def run_wrapper(
        wrapper, *arguments, profilers=None, choose=True, release=None, cwd=None, interrupt=None, **environment
    ):
        paths = [str(STUBS / profilers)] if profilers else []
        chosen = ("--profiler", "nsight" if profilers == "nvidia" else "rocm") if profilers and choose else ()
        at = int(wrapper == PROFILE)  # whose first word is the question
        arguments = (*arguments[:at], *chosen, *arguments[at:])
        if profilers and profilers != "nvidia" and release is None:
            release = profilers.removeprefix("rocm-")
        if profilers == "rocm-7.0":  # which has the module rocpd alone, built for one Python
            built_for = (
                "3.99" if environment.get("STAND_IN_FAULT") == "no-interpreter" else "{}.{}".format(*sys.version_info)
            )
            module = tmp_path / "rocm" / "lib" / f"python{built_for}" / "site-packages"
            shutil.copytree(STUBS / "rocpd_module", module, dirs_exist_ok=True)
            for name in ("profilers.py", "options.json"):
                shutil.copy(STUBS / name, module)
        if release:
            (tmp_path / "rocm" / ".info").mkdir(parents=True, exist_ok=True)
            (tmp_path / "rocm" / ".info" / "version").write_text(f"{release}-83\n")
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("ROCPROF", "TINY_LLAMA", "STAND_IN"))}
        environment = {
            **kept,
            "PATH": os.pathsep.join([*paths, str(tmp_path), os.path.dirname(sys.executable), os.environ["PATH"]]),
            "ROCM_PATH": str(tmp_path / "rocm"),
            "TINY_LLAMA_PYTHON": "training_python",  # up to ROCm 6.3 rocprof-compute wants its whole path
            "STAND_IN_PYTHON": sys.executable,
            "STAND_IN_RECORD": str(tmp_path / "record"),
            "OMP_NUM_THREADS": "1",
            **environment,
        }
        wrapper = FOLDER / wrapper
        command = ["bash", str(wrapper), *map(str, arguments)]
        options = {"cwd": cwd or wrapper.parent, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        options |= {"encoding": "utf-8", "errors": "replace"}
        if not interrupt:
            return subprocess.run(command, env=environment, **options)
        environment["STAND_IN_WAITS"] = str(interrupt)  # Ctrl-C as soon as the training has made this file
        process = subprocess.Popen(command, env=environment, start_new_session=True, **options)
        while not interrupt.exists() and process.poll() is None:
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGINT)
        output, errors = process.communicate()
        return subprocess.CompletedProcess(command, process.returncode, output, errors)

    return run_wrapper


def folders_of(place):
    """Return the results in a folder; before Python 3.11 glob("*/*/") finds the logs too."""
    return [path for path in place.glob("*/*") if path.is_dir()]


def result_of(folder):
    """Return the one result folder under --output-dir."""
    (result,) = folders_of(folder)
    return result


def missing_files(output, folder):
    """Return the files in the folder that the sentences about the result name and that are not there."""
    sentences = [line.replace("\\ ", " ") for line in output.splitlines() if re.match("open|read|the |every", line)]
    named = re.findall(rf"{re.escape(str(folder))}/[^\s:,]+", "\n".join(sentences))  # may have wildcards
    assert named, output
    return [path for path in named if not list(pathlib.Path("/").glob(path[1:]))]


def recorded(tmp_path):
    """Return the command lines of the profilers that ran an application, as text with the result's folder as OUT."""
    lines = [json.loads(line) for line in (tmp_path / "record").read_text().splitlines()]
    text = [" ".join(words) for words in lines if str(tmp_path / "training_python") in words]
    return [re.sub(r"\S+/\w+_\d{8}_\d{6}(_2)*", "OUT", line) for line in text]


def commands_of(tmp_path, train):
    """Return every command line of the profilers that asks for more than help, as commands.txt has it."""
    lines = [json.loads(line) for line in (tmp_path / "record").read_text().splitlines()]
    asked = [words for words in lines if words[0] != "nvidia-smi" and not {"--help", "--version"} & set(words)]
    return [re.sub(r"(?<=trace_)\d+(?=_results)", "N", line) for line in abbreviated(asked, train)]


def abbreviated(commands, train):
    """Return command lines as text with the training command as TRAIN and the result's folder as OUT."""
    text = [" ".join(re.sub(r"[^=]+/\w+_\d{8}_\d{6}(_2)*", "OUT", word) for word in words) for words in commands]
    return [line.replace(train, "TRAIN") for line in text]


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_wrapper_is_one_command_and_its_help_the_same_in_every_folder(wrapper, run):
    first, *others = [(folder / wrapper).read_text() for folder in FOLDERS]
    assert others == [first] * 3
    (command,) = [line for line in first.splitlines() if not line.startswith("#")]
    assert command.startswith("exec bash ")
    assert all(os.access(folder / wrapper, os.X_OK) for folder in FOLDERS)
    text = run(wrapper, "--help").stdout
    assert f"./{wrapper} --preset medium" in text and "--nproc-per-node N (1)" in text and "https://rocm.docs" in text
    assert ("under torchrun, a result per rank " in text) == (wrapper != "get_rocprof_compute.sh")
    assert re.search(r"^Writes \w+/\w+_<timestamp>/", text, re.MULTILINE) and "#" not in text and "uses" not in text


# ---------------------------------------------------------------- ROCm, by release

COMMANDS = [line.split(maxsplit=2) for line in (SAMPLES / "wrappers/commands.txt").read_text().splitlines()[1:]]
DELIVERED = {  # steps, files, and what the last lines say
    "get_trace.sh": ("5", "*.pftrace *_kernel_trace.csv", r"attention +1 +0.004[^#]*\nopen \S+.pftrace in http"),
    "get_counters.sh": ("3", "kernels.csv counters.csv", r"1,024.0 +5,000.0[^#]*\nevery counter .*counters.csv"),
    "get_hotspots.sh": ("10", "hotspots.csv hotspots.json", r"attention +1 +0.004 +13.3[^#]*\nthe whole table is"),
    "get_rocprof_compute.sh": (
        *("1 --warmup-steps 1", "limits.csv workloads/tiny_llama_v3/sysinfo.csv"),
        r"adamw_kernel .* 83.2 .*memory bandwidth[^#]*\nread more about a kernel with: \S+ analyze -p \S+ -k 0$",
    ),
    "get_rocprof_sys.sh": (
        *("2 --warmup-steps 1", "*.proto wall_clock-*.txt", r"attention +1 +0.009[^#]*\nopen \S+\.proto in http"),
    ),
}


# Each wrapper where its command changes, and rocprof-compute, whose files change from release to release.
NEWER = [(w, release) for w, release, _ in COMMANDS if release in READ] + [("get_rocprof_sys.sh", "10.2")]
NEWER = [*dict.fromkeys(NEWER + [("get_rocprof_compute.sh", release) for release in READ])]


@pytest.mark.parametrize(("wrapper", "release"), [(w, release) for w in WRAPPERS for release in ROCM] + NEWER)
@pytest.mark.quick(1, each="wrapper")
def test_command_files_and_last_lines_of_every_release(wrapper, release, run, python, tmp_path):
    arguments = ("--output-dir", tmp_path / "results", "--use-amp")
    result = run(wrapper, *arguments, profilers=f"rocm-{release}", ROCPROF_OUTPUT_FORMAT="rocpd")
    assert result.returncode == 0, result.stdout + result.stderr
    steps, files, last = DELIVERED[wrapper]
    train = f"{python} tiny_llama_v3.py --batch-size 8 --seq-len 128 --num-steps {steps} --use-amp"
    at = (ROCM + READ).index
    since = max((r for w, r, _ in COMMANDS if w == wrapper and r != "nvidia" and at(r) <= at(release)), key=at)
    assert commands_of(tmp_path, train) == [command for w, r, command in COMMANDS if (w, r) == (wrapper, since)]
    folder = result_of(tmp_path / "results")
    if (wrapper, release) == ("get_rocprof_sys.sh", "10.2"):  # new name of the trace, and a database too
        files = files.replace("*.proto", "*.pftrace *.db")
        last = last.replace("0.009", "0.004").replace("proto", "pftrace")
    from_database = release == "10.2" and "rocprof_" not in wrapper  # where csv is deprecated
    if from_database:
        files = files.replace("*_kernel_trace.csv", "*.db")
    elif release != "10.2":
        assert not list(folder.rglob("*.db"))
    assert all(len(list(folder.glob(file))) == 1 for file in files.split())
    assert python in (folder / "command.txt").read_text() and "training" in (folder / "log.txt").read_text()
    if from_database and wrapper == "get_trace.sh":
        assert "trace_results.pftrace in http" in result.stdout and "answers SQL" in result.stdout
    else:
        assert re.search(last, result.stdout.strip()), result.stdout
    assert not missing_files(result.stdout, folder)
    by_rocm = sum((load_version(3).PROFILERS[name] for name in ("rocprofv3", "rocprof-sys")), ())
    variables = (tmp_path / "record.variables").read_text().split()
    assert any(name.startswith(by_rocm) for name in variables)  # by which the script knows that it must run eagerly
    alone = at(release) >= at("7.0") and "rocprof_" not in wrapper
    assert ("the profile holds start-up and warm-up too" in result.stdout) == (not alone)
    assert ("the profile holds the measured steps alone\n" in result.stdout) == alone
    assert ("counters are those of the whole run" in result.stdout) == (alone and wrapper == "get_counters.sh")
    assert ("warning: every call is recorded" in result.stderr) == (wrapper == "get_rocprof_sys.sh")


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name[:8])
def test_a_dry_run_names_the_version_of_the_folder_and_writes_nothing(folder, run):
    before = sorted(folder.rglob("*"))
    result = run(folder / "get_hotspots.sh", "--dry-run", "--preset", "medium", profilers="rocm-7.0")
    assert re.search(rf"-- \S+ tiny_llama_v{folder.name[7]}.py .*--preset medium$", result.stdout.splitlines()[-1])
    assert "--batch-size" not in result.stdout and sorted(folder.rglob("*")) == before  # a preset is not overruled


@pytest.mark.parametrize(("version", "release"), [(3, "6.4"), (4, "7.2.4"), (3, "10.0"), (3, ""), (1, "7.2.4")])
@pytest.mark.parametrize("arguments", ["", "--graph", "--no-graph"])
def test_no_release_is_trusted_with_a_graph(version, release, arguments, run):
    """The script runs eagerly by itself under ROCm's profilers, so the wrapper warns of a graph and adds no option."""
    folder = SCRIPTS[version].parent
    result = run(folder / "get_trace.sh", "--dry-run", *arguments.split(), profilers="rocm-6.4", release=release)
    assert result.stdout.count("graph") == bool(arguments)
    assert ("warning: a replayed graph may hide kernels" in result.stderr) == (arguments == "--graph")


def test_words_and_variables_of_other_wrappers_of_these_names_are_answered(run):
    """The training script refused the words, and the variables had no effect without a sentence."""
    result = run("get_rocprof_compute.sh", "roof-only", "--dry-run", profilers="rocm-7.0")
    assert result.returncode == 2 and "'roof-only' is no option: --roof adds the roofline" in result.stderr
    result = run("get_trace.sh", "--dry-run", profilers="rocm-7.0", TINYTRANSFORMER_BATCH_SIZE="4")
    assert result.returncode == 0 and "TINYTRANSFORMER_BATCH_SIZE has no effect: give options" in result.stderr


SHOWS_ENVIRONMENT = """#!/usr/bin/env bash
[[ $1 != *tiny_llama_v3.py ]] || env >"$(dirname "$0")/seen"
exec training_python "$@"
"""


@pytest.mark.parametrize("given", [True, False])
def test_what_the_training_process_finds_in_its_environment(given, run, tmp_path):
    """Keep what the user sets, but for what would change the files of rocprofv3."""
    executable(tmp_path / "shows_environment", SHOWS_ENVIRONMENT)
    mine = {"ROCPROF_TMPDIR": str(tmp_path), "ROCPROF_LOG_LEVEL": "info", "TORCHINDUCTOR_COMPILE_THREADS": "4"}
    mine["KINETO_LOG_LEVEL"] = "2"
    others = {"ROCPROF_OUTPUT_FORMAT": "json", "PYTHONUNBUFFERED": "", "TINY_LLAMA_CPU": str(int(not given))}
    words = ("hotspots", "--", "./shows_environment", "tiny_llama_v3.py")
    result = run(PROFILE, *words, profilers="rocm-7.0", cwd=tmp_path, **others, **(mine if given else {}))
    assert result.returncode == 0, result.stderr
    seen = dict(line.split("=", 1) for line in (tmp_path / "seen").read_text().splitlines() if "=" in line)
    (folder,) = tmp_path.glob("hotspots/*")
    ours = {"ROCPROF_TMPDIR": str(folder), "ROCPROF_LOG_LEVEL": None, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    ours["KINETO_LOG_LEVEL"] = "6"
    assert {name: seen.get(name) for name in mine} == (mine if given else ours)
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        assert seen.get(name) == (os.environ.get(name) if given else "-1")
    assert seen["PYTHONUNBUFFERED"] == "1" and "ROCPROF_OUTPUT_FORMAT" not in seen
    assert seen["TORCH_CPP_LOG_LEVEL"] == "ERROR"  # or PyTorch prints of USDT what looks like an error


def test_the_python_of_the_training_has_its_whole_path(run, tmp_path):
    """Of a command that changes its folder too."""
    machine = {"profilers": "rocm-7.0", "cwd": tmp_path, "TINY_LLAMA_PYTHON": "./training_python"}
    result = run("get_hotspots.sh", "--dry-run", **machine)
    (words,) = [shlex.split(line) for line in result.stdout.splitlines() if "--kernel-trace" in line]
    python = pathlib.Path(words[words.index("--") + 1])
    assert python.is_absolute() and python.samefile(tmp_path / "training_python")


@pytest.mark.parametrize(
    ("fault", "status", "says"),
    [
        ("no-region", 0, "get_hotspots.sh: warning: rocprofv3 recorded no kernel in the measured steps"),
        ("whole-run", 0, "get_hotspots.sh: the profile holds start-up and warm-up too: this rocprofv3 ignores"),
        ("no-kernels", 1, ""),
    ],
)
@pytest.mark.quick(2)
def test_measured_steps_that_rocprofv3_does_not_record_alone(fault, status, says, run, tmp_path):
    """The wrapper records the whole run where it got nothing, and says what the profile holds."""
    result = run("get_hotspots.sh", "--output-dir", tmp_path / "results", profilers="rocm-7.1", STAND_IN_FAULT=fault)
    assert result.returncode == status, result.stdout + result.stderr
    assert says in result.stdout + result.stderr
    commands = recorded(tmp_path)
    whole = commands[0].replace(" --marker-trace --selected-regions", "")
    assert commands[1:] == [whole] * (fault != "whole-run") and whole != commands[0]
    if not status:
        assert len(list(result_of(tmp_path / "results").glob("kernels_*_kernel_trace.csv"))) == 1
        assert "attention_forward_kernel" in result.stdout


STARTS = [  # of the first kernel and of the range, in each process
    ([(5, 4), (6, 6)], 0, "the profile holds the measured steps alone"),
    ([(5, 4), (3, 4)], 0, "the profile holds start-up and warm-up too"),
    ([(5, 4), (5, None)], 0, "can't tell if the profile has more"),
    ([(5, 4), (None, 4)], 0, "the profile holds the measured steps alone"),
    ([(None, 4)], 1, ""),
]


@pytest.mark.parametrize(("starts", "status", "says"), STARTS)
def test_what_part_of_the_run_was_recorded_is_told_of_all_processes(starts, status, says, tmp_path, capsys):
    for number, (kernel, region) in enumerate(starts):
        rows = "" if kernel is None else f"{kernel + 1}\n{kernel}\n"
        (tmp_path / f"{number}_kernel_trace.csv").write_text(f"Start_Timestamp\n{rows}")
        rows = "" if region is None else f"{steps_alone.RANGE},{region}\n"
        (tmp_path / f"{number}_marker_api_trace.csv").write_text(f"Function,Start_Timestamp\nother,1\n{rows}")
    assert steps_alone.show(tmp_path) == status
    assert capsys.readouterr().out.startswith(says)


def test_a_script_that_cannot_begin_to_record_is_profiled_as_a_whole(run, tmp_path):
    """The script ends with a sentence where the library is missing; any other failure of it is a failure."""
    executable(
        tmp_path / "without_library",
        """#!/usr/bin/env bash
if [[ $1 = *tiny_llama_v3.py && -n ${STAND_IN_REGIONS:-} ]]; then
    echo "tiny_llama_v3.py: error: --selected-regions cannot begin to record: librocprofiler-sdk-roctx.so" >&2
    exit 2
fi
exec training_python "$@"
""",
    )
    machine = {"profilers": "rocm-7.0", "TINY_LLAMA_PYTHON": "without_library"}
    result = run("get_hotspots.sh", "--output-dir", tmp_path / "results", **machine)
    assert result.returncode == 0 and "it now records the whole run" in result.stderr, result.stdout + result.stderr
    result = run("get_hotspots.sh", "--output-dir", tmp_path / "others", STAND_IN_STATUS="7", profilers="rocm-7.0")
    assert result.returncode == 7 and "records the whole run" not in result.stderr


WHOLE = "the profile holds start-up and warm-up too"
PART = "the profile holds the part of the run that your options select\n"


def test_rocprof_compute_gets_a_folder_of_its_own(run, tmp_path):
    """From ROCm 10.0 on it refuses one that is not empty; in a Slurm job it adds the rank to the folder.

    A kernel that nothing matches is named as the reason.
    """
    arguments = ("--output-dir", tmp_path / "results")
    for job in ({}, {"SLURM_PROCID": "0"}):
        result = run("get_rocprof_compute.sh", *arguments, profilers="rocm-10.0", **job)
        assert result.returncode == 0, result.stderr
        assert ("/workloads/tiny_llama_v3/0 -k 0" in result.stdout) == bool(job)
    result = run("get_rocprof_compute.sh", *arguments, "--kernel", "nothing", profilers="rocm-10.1")
    assert result.returncode == 1 and "no kernel's name has 'nothing' in it" in result.stderr


@pytest.mark.parametrize(
    ("wrapper", "release", "words", "says"),
    [
        ("get_hotspots.sh", "6.3", "", WHOLE),
        ("get_trace.sh", "6.4", "", f"{WHOLE}; --collection-period START:LENGTH:1 selects"),
        ("get_counters.sh", "6.4", "--collection-period 20:5:1", PART),
        ("get_hotspots.sh", "7.1", "-P 20:5:1", PART),
        ("get_rocprof_sys.sh", "7.1", "-P", f"{WHOLE}\n"),
        ("get_rocprof_sys.sh", "7.1", "--trace-wait 5 --trace-duration=2", PART),
        ("get_rocprof_sys.sh", "7.13", "--selected-regions a", PART),
    ],
)
@pytest.mark.quick(2)
def test_what_part_of_the_run_the_profile_holds(wrapper, release, words, says, run):
    """From 6.4 on rocprofv3 measures a period that a user chooses, rocprof-sys in all of these releases."""
    result = run(wrapper, "--dry-run", *["--"] * bool(words), *words.split(), profilers=f"rocm-{release}")
    assert result.returncode == 0 and f"{wrapper}: {says}" in result.stdout
    assert ("--selected-regions" in result.stdout) == ("--selected-regions" in words)
    assert f"{words} -- " in result.stdout


@pytest.mark.parametrize("release", READ)
@pytest.mark.quick(2)
def test_counters_by_operator(release, run, tmp_path):
    """rocprof-compute marks the operators only of a command whose first word begins with python."""
    python = executable(tmp_path / "python3.9", f'#!/bin/sh\nexec "{STUBS}/training_python" "$@"\n')
    machine = {"profilers": f"rocm-{release}", "TINY_LLAMA_PYTHON": str(python)}
    result = run("get_rocprof_compute.sh", "--torch-trace", "--output-dir", tmp_path / "results", **machine)
    assert result.returncode == 0, result.stdout + result.stderr
    folder = result_of(tmp_path / "results")
    command = (folder / "command.txt").read_text()
    assert " --experimental --torch-trace -- python3.9 tiny_llama_v3.py " in command
    assert "PyTorch Operator Call Tree" in (folder / "operators.txt").read_text()
    assert "the operators are in" in result.stdout and not missing_files(result.stdout, folder)
    assert (folder / "limits.csv").exists()


def test_counters_by_operator_that_cannot_be_had(run, tmp_path):
    def ended(*arguments, **machine):
        result = run("get_rocprof_compute.sh", "--torch-trace", *arguments, **machine)
        return result.returncode, result.stderr

    status, said = ended("--dry-run", profilers="rocm-7.1")
    assert status == 2 and "this rocprof-compute has no --torch-trace: it needs ROCm 7.12 or later" in said
    status, said = ended("--dry-run", profilers="nvidia")
    assert status == 2 and "--torch-trace is rocprof-compute's, and ncu runs here" in said
    status, said = ended("--dry-run", "--nproc-per-node", "2", profilers="rocm-10.0")
    assert status == 2 and "leave out --nproc-per-node" in said
    status, said = ended("--dry-run", profilers="rocm-10.0")
    assert status == 2 and "needs an interpreter named python..., got " in said
    lists = '[ "$5" != --list-torch-operators ] || { echo "ERROR no markers"; exit 1; }'
    executable(tmp_path / "rocprof-compute", f'#!/bin/sh\n{lists}\nexec "{STUBS}/rocm-10.0/rocprof-compute" "$@"\n')
    python = executable(tmp_path / "python3.9", f'#!/bin/sh\nexec "{STUBS}/training_python" "$@"\n')
    arguments = ("--profiler", "rocm", "--output-dir", tmp_path / "results")
    status, said = ended(*arguments, release="10.0", TINY_LLAMA_PYTHON=str(python))
    assert status == 3 and "only a part was measured: no counters by operator" in said and "no markers" in said


def test_pytorchs_profiler_takes_no_options(run):
    result = run("get_trace.sh", "--profiler", "pytorch", "--", "--delay", "3")
    assert result.returncode == 2 and "no options after --" in result.stderr


@pytest.mark.parametrize("profilers", ["rocm-6.2", "rocm-7.1", "nvidia"])
@pytest.mark.parametrize("wrapper", [*WRAPPERS, "profile.sh"])
@pytest.mark.quick(2, each="profilers")
def test_a_word_with_a_space_stays_one_and_a_dry_run_leaves_nothing(wrapper, profilers, run, python, tmp_path):
    """For the profiler and for the script; rocprof-compute splits the script's."""
    splits = wrapper == "get_rocprof_compute.sh" and profilers != "nvidia"
    script_words = [] if splits else ["--metrics-file", "my metrics.json"]
    words = ["--output-dir", tmp_path / "my results", "--dry-run"]
    if wrapper == "profile.sh":
        extra = ["--profiler-option", "--name", "--profiler-option", "two words"]
        wrapper, words = PROFILE, ["counters", *words, *extra, "--", python, "train.py", *script_words]
    else:
        words = [*words, *script_words, "--", "--name", "two words"]
    result = run(wrapper, *words, profilers=profilers)
    assert result.returncode == 0 and not (tmp_path / "my results").exists(), result.stderr
    commands = [shlex.split(line) for line in result.stdout.splitlines() if " --name " in line]
    assert commands and all(command[command.index("--name") + 1] == "two words" for command in commands)
    assert splits or all(command[-2:] == script_words for command in commands)


def test_the_printed_conversion_can_be_pasted(run):
    result = run("get_trace.sh", "--rocpd", "--dry-run", profilers="rocm-7.1")
    assert result.returncode == 0 and result.stderr == ""
    assert re.search(r"^rocpd convert -i \S+/trace_\*_results\.db -f pftrace ", result.stdout, re.MULTILINE)


def test_a_rocm_without_rocpd_says_so(run, tmp_path):
    """The folder of the stub has rocprofv3 alone."""
    executable(tmp_path / "rocprofv3", f'#!/bin/sh\nexec "{STUBS}/rocm-7.1/rocprofv3" "$@"\n')
    arguments = ("--rocpd", "--profiler", "rocm", "--output-dir", tmp_path / "results")
    result = run("get_trace.sh", *arguments, release="7.1")
    assert result.returncode == 3 and len(list(result_of(tmp_path / "results").glob("trace_*_results.db"))) == 1
    (line,) = result.stderr.splitlines()
    assert "rocpd, which converts the database, is neither on PATH nor in" in line and "tried" not in line


@pytest.mark.parametrize(
    ("wrapper", "profilers", "words"),
    [
        ("get_counters.sh --pmc SQ_WAVES --dry-run", "rocm-6.2", "echo 'pmc: SQ_WAVES' > "),
        ("get_rocprof_compute.sh", "rocm-7.1", "rocprof-compute analyze -p "),
        ("get_rocprof_compute.sh", "nvidia", "ncu --import "),
    ],
)
def test_a_printed_command_can_be_pasted_from_a_folder_with_spaces(wrapper, profilers, words, run, tmp_path):
    wrapper, *options = wrapper.split()
    result = run(wrapper, *options, "--output-dir", tmp_path / "my results", profilers=profilers)
    line = next(line for line in reversed(result.stdout.splitlines()) if words in line)
    path = shlex.split(line.split(words)[1])[0]
    assert pathlib.Path(path).is_relative_to(tmp_path / "my results"), line


@pytest.mark.parametrize("release", ["7.0", "7.1"])
@pytest.mark.parametrize("fault", ["", "no-interpreter"])
@pytest.mark.quick(2)
def test_rocpd_is_converted_or_its_database_kept(release, fault, run, tmp_path):
    arguments = ("--rocpd", "--output-dir", tmp_path / "results")
    result = run("get_trace.sh", *arguments, profilers=f"rocm-{release}", STAND_IN_FAULT=fault)
    folder = result_of(tmp_path / "results")
    assert len(list(folder.glob("trace_*_results.db"))) == 1
    assert (folder / "trace_results.pftrace").is_file() == (not fault)
    assert "attention_forward_kernel" in result.stdout and "answers SQL" in result.stdout
    if fault:
        last = result.stderr.splitlines()[-1]
        assert (
            result.returncode == 3 and "only a part was measured: no timeline" in last and "its ROCm was built" in last
        )
        shown = result.stderr.split("the last lines of the log:\n")[1].splitlines()[:-1]
        assert shown and not any("training" in line for line in shown), shown  # the script's own went well
    else:
        assert result.returncode == 0 and "trace_results.pftrace in https" in result.stdout, result.stderr


def test_rocpd_needs_a_release_that_writes_databases(run):
    assert run("get_trace.sh", "--rocpd", profilers="rocm-6.4").returncode == 2


@pytest.mark.slow
def test_torchrun_starts_the_profiler_per_rank(run, python, tmp_path):
    arguments = ("--nproc-per-node", 2, "--output-dir", tmp_path / "results")
    result = run("get_hotspots.sh", *arguments, profilers="rocm-7.0")
    assert result.returncode == 0, result.stdout + result.stderr
    folder = result_of(tmp_path / "results")
    for rank in ("rank0", "rank1"):
        assert "attention_forward_kernel" in (folder / rank / "hotspots.csv").read_text()
        assert len(list((folder / rank).glob("kernels_*_kernel_stats.csv"))) == 1
    assert "rank 0 of 2" in result.stdout and result.stdout.count("attention_forward_kernel") == 1
    for wrapper, profilers, words in (
        ("get_rocprof_compute.sh", "rocm-7.0", rf"-- {python} -m torch.distributed.run .*--nproc-per-node 2 \S+_v3.py"),
        ("get_rocprof_compute.sh", "nvidia", r"rank@RANK@/report"),
        ("get_trace.sh", "nvidia", r"--output \S+/rank@RANK@/report"),
        ("get_rocprof_sys.sh", "rocm-6.4", r"ROCPROFSYS_OUTPUT_PATH=\S+/rank@RANK@"),
    ):
        assert re.search(words, run(wrapper, "--dry-run", *arguments, profilers=profilers).stdout), words


TWO_RANKS = """#!/usr/bin/env bash
# Plays torchrun: one rank after the other. Anything else is the stub's.
[[ $* == *torch.distributed.run* ]] || exec training_python "$@"
until [ "$1" = bash ]; do shift; done
for RANK in 0 1; do
    RANK=$RANK "$@" || exit
done
"""


@pytest.mark.parametrize(
    ("wrapper", "profilers", "files"),
    [
        ("get_hotspots.sh", "rocm-7.1", "kernels_*_kernel_trace.csv hotspots.csv"),
        ("get_trace.sh --rocpd", "rocm-7.1", "trace_*_results.db trace_results.pftrace"),
        ("get_counters.sh --pmc", "rocm-6.2", "pass_0/pmc_1/counters_*_counter_collection.csv counters.csv"),
        ("get_counters.sh", "nvidia", "report.sqlite kernels.csv ncu.csv counters.csv"),
        ("get_trace.sh", "nvidia", "report.nsys-rep report.sqlite"),
        ("get_rocprof_compute.sh", "nvidia", "report.ncu-rep limits.csv"),
        ("get_rocprof_sys.sh", "rocm-6.4", "perfetto-trace-*.proto"),
    ],
)
@pytest.mark.quick(5)
def test_every_rank_has_its_result_in_a_folder_with_spaces(wrapper, profilers, files, run, tmp_path):
    executable(tmp_path / "two_ranks", TWO_RANKS)
    wrapper, *options = wrapper.split()
    arguments = (*options, "--nproc-per-node", 2, "--output-dir", tmp_path / "my results")
    result = run(wrapper, *arguments, profilers=profilers, TINY_LLAMA_PYTHON="two_ranks")
    assert result.returncode == 0, result.stdout + result.stderr
    folder = result_of(tmp_path / "my results")
    for rank in range(2):
        assert [len(list((folder / f"rank{rank}").glob(file))) for file in files.split()] == [1] * len(files.split())
    assert not (tmp_path / "my").exists() and not missing_files(result.stdout, folder)
    dry_run = run(wrapper, *arguments, "--dry-run", profilers=profilers, TINY_LLAMA_PYTHON="two_ranks")
    started, shown, planned = [
        set(re.sub(r"\d{8}_\d{6}(_2)*", "TIME", text).splitlines())
        for text in ((folder / "command.txt").read_text(), result.stdout, dry_run.stdout)
    ]
    assert started <= planned <= shown  # a real run shows what it prints too


THREADS = """
source "$0"
DRY_RUN=1 PYTHON=python PROCESSES=$1 OUT=out
attempt profiler script
echo "threads ${OMP_NUM_THREADS-not set}"
"""


@pytest.mark.parametrize(
    ("ranks", "given", "threads"), [("2", None, "1"), ("2", "5", "5"), ("", None, "not set"), ("", "5", "5")]
)
def test_ranks_have_one_thread_each_unless_the_user_says_otherwise(ranks, given, threads):
    """As torchrun does, which warns of it."""
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    environment |= {"OMP_NUM_THREADS": given} if given else {}
    command = ["bash", "-euc", THREADS, WRAPPER_FILES / "run.sh", ranks]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == f"threads {threads}"


@pytest.mark.parametrize("ranks", [1, 2])
def test_rocprof_compute_reads_one_gpu_of_several(ranks, run, tmp_path):
    """Every GPU is in the one workload: without the number of one, the analysis takes them together."""
    executable(tmp_path / "ranks", '#!/bin/sh\n[ "$1" != -m ] || exit 0\nexec training_python "$@"\n')
    arguments = ("--nproc-per-node", ranks, "--output-dir", tmp_path / "results")
    result = run("get_rocprof_compute.sh", *arguments, profilers="rocm-7.1", TINY_LLAMA_PYTHON="ranks")
    last = result.stdout.splitlines()[-1]
    assert result.returncode == 0 and last.startswith("read more"), result.stderr
    assert last.endswith(" --gpu-id 0") == (ranks > 1) and not missing_files(
        result.stdout, result_of(tmp_path / "results")
    )


RANKS = """
source "$0"
OUT=$1 SCRIPTS=$1 PYTHON=$2 PROCESSES=2 DRY_RUN=""
export_report export.txt cat @OUT@/report.nsys-rep >/dev/null
read_result table.py @OUT@/export.txt
"""


def test_the_table_of_rank_0_is_printed_and_every_rank_is_read(tmp_path):
    (tmp_path / "table.py").write_text(
        "import sys\nword = open(sys.argv[1]).read()\nsys.exit(print(word) or word == '?')"
    )
    for rank, word in enumerate("ab"):
        (tmp_path / f"rank{rank}").mkdir()
        (tmp_path / f"rank{rank}" / "report.nsys-rep").write_text(word)
    command = [
        "bash",
        "-euc",
        RANKS,
        WRAPPER_FILES / "run.sh",
        tmp_path,
        sys.executable,
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    said = f"rank 0 of 2; the others have the same files in {tmp_path}/rank*\n"
    assert (done.returncode, done.stdout) == (0, f"{said}a\n"), done.stderr
    (tmp_path / "rank1" / "report.nsys-rep").write_text("?")
    assert subprocess.run(command, capture_output=True).returncode == 1


# ---------------------------------------------------------------- options that a profiler receives

SETS = [
    line.split(maxsplit=2)
    for line in (WRAPPER_FILES / "counter_sets.txt").read_text().splitlines()
    if not line.startswith("#")
]
RANKS_OF = (
    "PYTHON -m torch.distributed.run --standalone --nproc-per-node 2 --no-python "
    'bash -c mkdir -p "$0/rank$RANK" && exec "${@//@RANK@/$RANK}" OUT '
)
NSYS = (
    "--cuda-graph-trace=node --sample=none --cpuctxsw=none --capture-range=nvtx --nvtx-capture=measured steps "
    "--capture-range-end=stop --env-var=NSYS_NVTX_PROFILER_REGISTER_ONLY=0"
)
NCU = "ncu --nvtx --nvtx-push-pop-scope process --nvtx-include measured steps/ "
ON_NCU = "--clock-control none --kernel-name-base demangled --kernel-id"
LIMITS = ",".join(metric for _, metric in limits.COLUMNS.values() if metric)
STEPS_ALONE = "--marker-trace --selected-regions"
BY_PYTORCH = "--enable-pytorch-profiler --profile-dir OUT"
OPTIONS = [
    (
        "get_counters.sh --pmc A,B C --pmc D --kernel attn -- --kernel-iteration-range 3",
        "rocm-7.1",
        [
            f"rocprofv3 --pmc {names} --kernel-include-regex attn --output-format csv -d OUT/pass_{number} "
            "-o counters_%pid% --kernel-iteration-range 3 -- TRAIN"
            for number, names in enumerate(("A B C", "D"))
        ],
    ),
    (
        "get_counters.sh --pmc=A --kernel=attn",
        "rocm-6.2",
        [
            "echo pmc: A > OUT/pass_0.txt",
            "rocprofv3 -i OUT/pass_0.txt --kernel-names attn --output-format csv -d OUT/pass_0 -o counters_%pid% "
            "-- TRAIN",
        ],
    ),
    (
        "get_counters.sh --set pc --set thread-trace --kernel attn",
        "rocm-10.2",
        [
            "rocprofv3 --pc-sampling-beta-enabled --pc-sampling-method host_trap --pc-sampling-unit time "
            "--pc-sampling-interval 1000 --output-format csv -d OUT/pc -o pc_%pid% -- TRAIN",
            "rocprofv3 --att --kernel-include-regex attn --output-format csv -d OUT/thread-trace -o thread-trace_%pid% "
            "-- TRAIN",
        ],
    ),
    (
        "get_counters.sh --set thread-trace --nproc-per-node 2 -- --att-target-cu 1",
        "rocm-7.1",
        [
            f"{RANKS_OF}rocprofv3 --att --output-format csv -d OUT/rank@RANK@/thread-trace -o thread-trace_%pid% "
            "--att-target-cu 1 -- TRAIN"
        ],
    ),
    (
        "get_trace.sh --rocpd -- --hip-trace",
        "rocm-7.1",
        [
            f"rocprofv3 --runtime-trace {STEPS_ALONE} --output-format rocpd -d OUT -o trace_%pid% --hip-trace -- TRAIN",
            "rocpd convert -i OUT/trace_*_results.db -f pftrace -d OUT -o trace",
        ],
    ),
    (
        "get_hotspots.sh --nproc-per-node 2 -- --rccl-trace",
        "rocm-7.1",
        [
            f"{RANKS_OF}rocprofv3 --kernel-trace --stats {STEPS_ALONE} --output-format csv -d OUT/rank@RANK@ "
            "-o kernels_%pid% --rccl-trace -- TRAIN"
        ],
    ),
    (
        "get_rocprof_compute.sh --roof --kernel attn --nproc-per-node 2 -- -b 2",
        "rocm-7.1",
        [
            "rocprof-compute profile -n tiny_llama_v3 -p OUT/workloads/tiny_llama_v3 -k attn -b 2 "
            "-- PYTHON -m torch.distributed.run --standalone --nproc-per-node 2 SCRIPT"
        ],
    ),
    (
        "get_rocprof_sys.sh --nproc-per-node 2 -- --sample cputime",
        "rocm-7.1",
        [
            f"{RANKS_OF}env ROCPROFSYS_OUTPUT_PATH=OUT/rank@RANK@ ROCPROFSYS_TIME_OUTPUT=OFF "
            "rocprof-sys-run --trace --profile --sample cputime -- TRAIN"
        ],
    ),
    (
        "get_trace.sh -- --delay 3",
        "nvidia",
        [
            f"nsys profile --trace=cuda,nvtx,osrt {NSYS} --delay 3 --output OUT/report TRAIN",
            "nsys export --type sqlite --output OUT/report.sqlite OUT/report.nsys-rep",
        ],
    ),
    (
        "get_hotspots.sh --nproc-per-node 2",
        "nvidia",
        [
            f"{RANKS_OF}nsys profile --trace=cuda,nvtx {NSYS} --output OUT/rank@RANK@/report TRAIN",
            *(
                f"nsys export --type sqlite --output OUT/rank{rank}/report.sqlite OUT/rank{rank}/report.nsys-rep"
                for rank in range(2)
            ),
        ],
    ),
    (
        "get_counters.sh --pmc A B --pmc C --kernel attn -- --launch-skip 9",
        "nvidia",
        [
            f"{NCU}--metrics A,B,C {ON_NCU} ::regex:attn:1 --launch-skip 9 --export OUT/report TRAIN",
            "ncu --import OUT/report.ncu-rep --csv --page raw",
        ],
    ),
    (
        "get_rocprof_compute.sh --kernel attn --nproc-per-node 2 -- --launch-skip 9",
        "nvidia",
        [
            f"{RANKS_OF}{NCU}--set basic --metrics {LIMITS} {ON_NCU} ::regex:^(?!nccl).*attn:1 "
            "--launch-skip 9 --export OUT/rank@RANK@/report TRAIN",
            *(f"ncu --import OUT/rank{rank}/report.ncu-rep --csv --page raw" for rank in range(2)),
        ],
    ),
    ("get_hotspots.sh", None, [f"TRAIN {BY_PYTORCH}"]),
    ("get_trace.sh --nproc-per-node 2", None, [f"{RANKS_OF}TRAIN {BY_PYTORCH}/rank@RANK@"]),
    ("get_rocprof_sys.sh", None, [f"TRAIN --profile-memory {BY_PYTORCH}"]),
    ("get_rocprof_compute.sh", None, [f"TRAIN --profile-operators {BY_PYTORCH}"]),
    ("profile.sh trace", None, ["PYTHON RUNNER --warmup-steps 2 --profile-steps 3 --profile-dir OUT SCRIPT"]),
    (
        "profile.sh system --warmup-steps 4 --profile-steps=5",
        None,
        [
            "PYTHON RUNNER --warmup-steps 2 --profile-steps 3 --warmup-steps 4 --profile-steps 5 --profile-dir OUT "
            "--profile-memory SCRIPT"
        ],
    ),
    (
        "profile.sh hotspots --profiler-option --hip-trace --profiler-option --rccl-trace",
        "rocm-7.1",
        [
            "rocprofv3 --kernel-trace --stats --output-format csv -d OUT -o kernels_%pid% --hip-trace --rccl-trace "
            "-- TRAIN"
        ],
    ),
    (
        "profile.sh trace",
        "nvidia",
        [
            "nsys profile --trace=cuda,nvtx,osrt --cuda-graph-trace=node --sample=none --cpuctxsw=none "
            "--output OUT/report TRAIN",
            "nsys export --type sqlite --output OUT/report.sqlite OUT/report.nsys-rep",
        ],
    ),
]


def planned(run, python, line, profilers):
    """Return the commands of a dry run on the tiny script, abbreviated; TRAIN is PYTHON SCRIPT."""
    wrapper, *words = line.split()
    if wrapper == "profile.sh":
        wrapper, words = PROFILE, [*words, "--dry-run", "--", python, "tiny_llama_v1.py"]
        script = "tiny_llama_v1.py"
    else:
        at = words.index("--") if "--" in words else len(words)
        words[at:at] = ["--dry-run", "--preset", "tiny", "--no-graph"]
        script = r"tiny_llama_v3.py --num-steps \d+( --warmup-steps 1)? --preset tiny --no-graph"
    if not profilers:
        words.insert(int(wrapper == PROFILE), "--profiler=pytorch")
    result = run(wrapper, *words, profilers=profilers)
    assert result.returncode == 0, result.stderr
    said = re.compile(r"\w+\.sh: ")
    commands = [shlex.split(line) for line in result.stdout.splitlines() if not said.match(line)]
    commands = [[re.sub(r".+/profile_script\.py", "RUNNER", word) for word in words] for words in commands]
    text = [line.replace(python, "PYTHON") for line in abbreviated(commands, "TRAIN")]
    text = [re.sub(script, "SCRIPT", line) for line in text]
    return [line.replace("PYTHON SCRIPT", "TRAIN") for line in text]


@pytest.mark.quick(1, each="profilers")
@pytest.mark.parametrize(("line", "profilers", "commands"), OPTIONS, ids=[f"{line} {to}" for line, to, _ in OPTIONS])
def test_the_profiler_receives_every_option(line, profilers, commands, run, python):
    assert planned(run, python, line, profilers) == commands


@pytest.mark.slow
@pytest.mark.parametrize("vendor", ["rocm", "nsight"])
def test_the_profiler_receives_the_counters_of_every_set(vendor, run, python):
    """rocprofv3 in one run for each line of the file, ncu in one run."""
    line = "get_counters.sh --set waves --set memory --set matrix --set lds"
    commands = planned(run, python, line, "nvidia" if vendor == "nsight" else "rocm-7.1")
    passes = [names for owner, _, names in SETS if owner == vendor]
    if vendor == "rocm":
        assert [re.search("--pmc (.*) --output-format", command)[1] for command in commands] == passes
    else:
        assert f" --metrics {','.join(passes).replace(' ', ',')} --clock-control none " in commands[0]


# ---------------------------------------------------------------- counters and limits


@pytest.mark.parametrize("release", ROCM)
@pytest.mark.quick(1)
def test_counters_are_read_in_passes(release, run, tmp_path):
    kernel = "adamw_kernel" if release == "6.2" else "adamw"
    arguments = ("--set", "memory", "--pmc", "SQ_WAVES,GRBM_GUI_ACTIVE", "--use-amp", "--kernel", kernel)
    result = run("get_counters.sh", *arguments, "--output-dir", tmp_path / "results", profilers=f"rocm-{release}")
    assert result.returncode == 0, result.stderr
    folder = result_of(tmp_path / "results")
    rows = [line.rsplit(",", 6) for line in (folder / "counters.csv").read_text().splitlines()]
    means = {row[1]: row[4] for row in rows if row[0].startswith("adamw_kernel")}
    assert means.keys() == {"SQ_WAVES", "GRBM_GUI_ACTIVE", "FETCH_SIZE", "WRITE_SIZE", "TCC_HIT_sum", "TCC_MISS_sum"}
    assert float(means["GRBM_GUI_ACTIVE"]) == 6000 and not (folder / "kernels.csv").exists()
    commands = recorded(tmp_path)
    assert len(commands) == 3 and all(command.endswith("--use-amp") for command in commands)
    assert all(f"-d OUT/pass_{number} " in command for number, command in enumerate(commands))
    if release == "6.2":
        assert all("--kernel-names adamw_kernel" in command for command in commands)
        assert (folder / "pass_0.txt").read_text() == "pmc: SQ_WAVES GRBM_GUI_ACTIVE\n"
    else:
        assert "--pmc SQ_WAVES GRBM_GUI_ACTIVE --kernel-include-regex adamw --output-format" in commands[0]


NINE = "--pmc " + " ".join(f"SQ_{letter}" for letter in "ABCDEFGHI")
REFUSES = "lacks some of these counters: rocprofv3 -L"


@pytest.mark.parametrize(
    ("release", "arguments", "fault", "status", "words"),
    [
        ("7.1", "--pmc SQ_WAVES no_such", "", 3, "are missing: no_such ('rocprofv3 -L'"),
        # its name begins that of one that came, or of one that did not
        ("7.1", "--pmc SQ_WAVES SQ", "", 3, "are missing: SQ ('rocprofv3 -L'"),
        ("7.1", "--pmc SQ_WAVES TCC --pmc TCC_HIT_sum", "no-second-pass", 3, "are missing: TCC ('rocprofv3 -L'"),
        *((release, "--pmc no_such", "", 1, REFUSES) for release in ("6.2", "6.4", "7.0", "7.1")),
        ("6.3", "--pmc no_such", "", 1, REFUSES),  # and not 134: rocprofv3 ended the script
        ("7.0", NINE, "", 1, "don't fit into one run: spread them over several --pmc"),
        ("7.0", f"--pmc SQ_WAVES {NINE}", "", 3, "don't fit into one run"),
        ("6.4", "", "no-counters", 3, REFUSES),
        ("7.0", "--set memory", "no-second-pass", 3, "no WRITE_SIZE TCC_HIT_sum TCC_MISS_sum: "),
        ("7.0", "--pmc SQ_WAVES --kernel nosuch", "", 1, "no kernel's name has 'nosuch' in it: get_hotspots.sh"),
        ("6.2", "--pmc SQ_WAVES --kernel attention", "", 1, "ROCm 6.2 compares whole names"),
        ("7.0", "--set registers", "", 2, "--set must be times, waves"),
        ("7.0", "--set pc", "", 0, ""),
        ("7.0", "--set pc", "no-kernels", 1, "no samples: rocprofv3 left no *pc_sampling*.csv"),
        *((release, "--set pc", "no-sampling", 1, "can't sample instructions") for release in ("6.4", "7.1")),
        ("6.3", "--set pc", "", 2, "it came with ROCm 6.4"),
        ("7.0", "--set pc --profiler pytorch", "", 2, "needs rocprofv3"),
        ("6.4", "--set thread-trace --kernel attention", "", 0, ""),
        *(
            (r, "--set thread-trace --kernel nosuch", "", 1, "no kernel's name has 'nosuch'")
            for r in ("6.4", "7.0", "7.1")
        ),
        ("7.0", "--set times --set thread-trace --kernel nosuch", "", 3, "no kernel's name has 'nosuch'"),
        (
            "7.0",
            "--set thread-trace --set waves --kernel nosuch",
            "",
            1,
            "; no counters: no kernel's name has 'nosuch'",
        ),
        ("6.4", "--set thread-trace", "no-decoder", 2, "only with its decoder of thread traces"),
        ("7.1", "--set thread-trace", "no-decoder", 1, "-- --att-library-path FOLDER"),
    ],
)
@pytest.mark.quick(5)
def test_counters_and_samples_that_do_not_come(release, arguments, fault, status, words, run, tmp_path):
    arguments = (*arguments.split(), "--output-dir", tmp_path / "results")
    result = run("get_counters.sh", *arguments, profilers=f"rocm-{release}", STAND_IN_FAULT=fault)
    assert result.returncode == status, result.stdout + result.stderr
    if status == 0:
        assert result.stderr.count("\n") == ("can freeze the GPU" in result.stderr) == ("pc" in arguments)
        assert "ROCPROFILER_PC_SAMPLING_BETA_ENABLED" in (tmp_path / "record.variables").read_text().split()
        assert "the samples are in" in result.stdout
        assert not missing_files(result.stdout, result_of(tmp_path / "results"))
        return
    last = result.stderr.splitlines()[-1]
    assert words in last and ("only a part was measured" in last) == (status == 3), last
    folders = folders_of(tmp_path / "results")
    assert len(folders) == (status == 3)
    for folder in folders:  # what came before is there, read and not touched
        assert list(folder.glob("counters.csv")) + list(folder.glob("kernels.csv"))
        assert str(folder / "log.txt") in last
    assert status == 3 or not SUCCESS.search(result.stdout)


@pytest.mark.slow
def test_a_kernel_that_pc_sampling_does_not_choose_is_said(run, tmp_path):
    arguments = ("--set", "pc", "--kernel", "attn", "--output-dir", tmp_path / "results")
    result = run("get_counters.sh", *arguments, profilers="rocm-7.0")
    assert result.returncode == 0, result.stderr
    assert "PC sampling samples all kernels: --kernel attn doesn't limit it" in result.stderr


def test_counters_that_were_not_tried_are_not_called_unknown(run, tmp_path):
    arguments = ("--set", "memory", "--output-dir", tmp_path / "results")
    result = run("get_counters.sh", *arguments, profilers="rocm-7.0", STAND_IN_STATUS="4")
    last = result.stderr.splitlines()[-1]
    assert result.returncode == 3 and "no FETCH_SIZE: the training script or rocprofv3 ended with exit status 4" in last
    assert "not tried after that: WRITE_SIZE TCC_HIT_sum TCC_MISS_sum" in last and "are missing" not in last
    assert len(recorded(tmp_path)) == 1


def test_of_several_runs_that_are_lost_the_last_one_s_status_counts(run, tmp_path):
    """rocprofv3 ends the first, whose status says nothing; the second is the script's own."""
    arguments = ("--pmc", "no_such", "--pmc", "SQ_WAVES", "--kernel", "nosuch", "--output-dir", tmp_path / "results")
    result = run("get_counters.sh", *arguments, profilers="rocm-6.3", STAND_IN_STATUS="4")
    last = result.stderr.splitlines()[-1]
    assert result.returncode == 4 and "no no_such: " in last and "no SQ_WAVES: " in last, last


def test_the_largest_file_of_the_first_pattern_is_found(tmp_path):
    """Processes that the script starts leave traces beside its own."""
    for name, size in {"a.pftrace": 10, "rank0/b.pftrace": 30, "c.pftrace": 20, "d.csv": 99, "e.proto": 0}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(bytes(size))
    commands = 'source "$0"; OUT=$1 DRY_RUN=""; find_largest "*.proto" "*.pftrace" "*.csv" && echo "$FOUND"'
    file = WRAPPER_FILES / "run.sh"
    found = subprocess.run(["bash", "-euc", commands, file, tmp_path], capture_output=True, text=True, check=True)
    assert found.stdout == f"{tmp_path}/rank0/b.pftrace\n"


def test_a_run_that_is_refused_says_nothing_about_the_next(run, tmp_path):
    """The second of three passes does not fit."""
    arguments = ("--pmc", "SQ_WAVES", *NINE.split(), "--pmc", "GRBM_GUI_ACTIVE", "--pmc", "FETCH_SIZE")
    result = run("get_counters.sh", *arguments, "--output-dir", tmp_path / "results", profilers="rocm-7.0")
    last = result.stderr.splitlines()[-1]
    assert result.returncode == 3 and len(recorded(tmp_path)) == 4, result.stderr
    assert "no SQ_A SQ_B" in last and "GRBM_GUI_ACTIVE" not in last and "FETCH_SIZE" not in last, last
    table = (result_of(tmp_path / "results") / "counters.csv").read_text()
    assert ",GRBM_GUI_ACTIVE," in table and ",FETCH_SIZE," in table
    assert len((result_of(tmp_path / "results") / "command.txt").read_text().splitlines()) == 4


@pytest.mark.parametrize("kernel", ["adamw", "nosuch"])
def test_kernels_are_filtered_where_counters_come_from_a_file(kernel, run, tmp_path):
    """The sources between ROCm 6.2 and 6.3 compare expressions already, but have no --pmc yet."""
    arguments = ("--pmc", "SQ_WAVES", "--kernel", kernel, "--output-dir", tmp_path / "results")
    result = run("get_counters.sh", *arguments, profilers="rocm-6.3", STAND_IN_FAULT="no-pmc")
    (command,) = recorded(tmp_path)
    assert f"-i OUT/pass_0.txt --kernel-include-regex {kernel} " in command
    if kernel == "adamw":
        assert result.returncode == 0 and "adamw_kernel" in result.stdout, result.stderr
    else:
        assert result.returncode == 1 and "no kernel's name has 'nosuch' in it" in result.stderr


@pytest.mark.skipif(os.path.exists("/opt/rocm/lib/librocprofiler-sdk.so"), reason="rocprof-compute finds this one")
@pytest.mark.parametrize("release", ["6.4", "7.1"])
def test_rocprof_compute_is_told_where_the_library_is(release, run, tmp_path):
    """By default ROCm 7.1 looks for it in /opt/rocm alone."""
    library = tmp_path / "rocm" / "lib" / "librocprofiler-sdk.so"
    library.parent.mkdir(parents=True)
    library.touch()
    result = run("get_rocprof_compute.sh", "--output-dir", tmp_path / "results", profilers=f"rocm-{release}")
    assert result.returncode == 0, result.stderr
    (command,) = recorded(tmp_path)
    assert (f" --rocprofiler-sdk-library-path {library} -- " in command) == (release == "7.1")


@pytest.mark.parametrize("wrapper", ["get_hotspots.sh", "get_counters.sh --pmc", "get_trace.sh"])
def test_empty_files_suggest_a_full_disk(wrapper, run, tmp_path):
    """The profiler does not notice it."""
    arguments = (*wrapper.split(), "--output-dir", tmp_path / "results")
    result = run(*arguments, profilers="rocm-7.0", STAND_IN_FAULT="no-space")
    assert result.returncode == 1 and "csv is empty: the profiler was stopped or wrote nothing, or" in result.stderr
    assert "the line above says" in result.stderr.splitlines()[-1] and "profiler saw no" not in result.stderr


def test_what_cannot_be_logged_is_read_to_its_end():
    """The profiler would die of a pipe that nobody reads, with what it measured not yet written."""
    tee = [sys.executable, "-S", REPOSITORY / "scripts" / "common" / "machine" / "tee.py", "/dev/full"]
    output = b"a line\n" * 100_000  # more than a pipe holds
    done = subprocess.run(tee, input=output, capture_output=True)
    assert (done.returncode, done.stdout) == (1, output)
    assert done.stderr == b"tee.py: /dev/full: No space left on device\n"


def test_a_log_that_cannot_be_written_is_a_failure(run, tmp_path):
    """The profiler ended well, and what it measured is kept."""
    to_full_disk = '[[ $* != *tee.py* ]] || exec training_python -S "$2" /dev/full'
    executable(tmp_path / "full_disk", f'#!/usr/bin/env bash\n{to_full_disk}\nexec training_python "$@"\n')
    arguments = ("--output-dir", tmp_path / "results")
    result = run("get_hotspots.sh", *arguments, profilers="rocm-7.0", TINY_LLAMA_PYTHON="full_disk")
    assert result.returncode == 1 and not SUCCESS.search(result.stdout)
    assert "log.txt cannot be written: is the disk full?; what was measured" in result.stderr.splitlines()[-1]
    assert "tee.py: /dev/full: No space left on device" in result.stderr


def test_a_disk_that_is_full_from_the_start_ends_the_wrapper_before_the_training(run, tmp_path):
    link = 'case $1 in */hotspot_*) ln -s /dev/full "$1/command.txt" ;; esac'
    executable(tmp_path / "mkdir", f'#!/bin/sh\n"{shutil.which("mkdir")}" "$@" || exit\n{link}\n')
    result = run("get_hotspots.sh", "--output-dir", tmp_path / "results", profilers="rocm-7.0")
    (folder,) = re.findall(rf"{tmp_path}/results/hotspots/\w+", result.stderr)
    sentence = f"get_hotspots.sh: {folder} cannot be written: is the disk full?\n"
    assert (result.returncode, result.stderr) == (1, sentence)
    assert not recorded(tmp_path) and not list(tmp_path.glob("results/*"))


def test_a_trace_that_a_full_disk_cut_is_not_what_was_measured(run, tmp_path):
    """PyTorch's profiler leaves it under this name."""
    cut = 'echo cut >"${@: -1}/trace.pt.trace.json.tmp"; echo "No space left on device"; exit 1'
    executable(tmp_path / "cuts", f'#!/bin/bash\n[[ $* != *tiny_llama* ]] || {{ {cut}; }}\nexec training_python "$@"\n')
    arguments = ("--profiler", "pytorch", "--output-dir", tmp_path / "results")
    result = run("get_trace.sh", *arguments, TINY_LLAMA_PYTHON="cuts")
    last = result.stderr.splitlines()[-1]
    assert result.returncode == 1 and "the disk is full" in last and "what was measured" not in last, last
    (log,) = tmp_path.glob("results/*/*")
    assert log.name.endswith("_failed.log") and str(log) in last


@pytest.mark.parametrize("release", ROCM)
def test_rocprof_compute_without_the_kernel_says_so(release, run, tmp_path):
    arguments = ("--kernel", "nosuch", "--output-dir", tmp_path / "results")
    result = run("get_rocprof_compute.sh", *arguments, profilers=f"rocm-{release}")
    assert result.returncode == 1 and "the last lines of the log:" in result.stderr
    assert "perhaps because no kernel's name has 'nosuch' in it" in result.stderr.splitlines()[-1]
    assert not folders_of(tmp_path / "results")


def test_times_are_kept_where_counters_that_nobody_asked_for_fail(run, tmp_path):
    arguments = ("--output-dir", tmp_path / "results")
    result = run("get_counters.sh", *arguments, profilers="nvidia", STAND_IN_FAULT="no-permission")
    assert result.returncode == 3 and "part was measured: no counters: no permission for the GPU's" in result.stderr
    assert (result_of(tmp_path / "results") / "kernels.csv").is_file()
    result = run("get_counters.sh", *arguments, "--pmc", profilers="nvidia", STAND_IN_FAULT="no-permission")
    assert result.returncode == 1 and "administrator" in result.stderr


@pytest.mark.parametrize(
    ("wrapper", "status"), [("get_counters.sh --set times --set memory", 3), ("get_rocprof_compute.sh", 1)]
)
def test_ncu_without_the_kernel_says_so(wrapper, status, run, tmp_path):
    wrapper, *arguments = wrapper.split()
    result = run(wrapper, *arguments, "--kernel", "nosuch", "--output-dir", tmp_path, profilers="nvidia")
    assert (
        result.returncode == status and "ncu saw no kernel with 'nosuch' in its name" in result.stderr.splitlines()[-1]
    )
    assert len(list(tmp_path.glob("counters/*/kernels.csv"))) == (status == 3)


def test_a_script_that_ends_with_3_and_leaves_nothing_has_no_part(run, tmp_path):
    """The status 3 is the wrapper's own, for a part that is kept."""
    arguments = ("--pmc", "--kernel", "nosuch", "--output-dir", tmp_path)
    result = run("get_counters.sh", *arguments, profilers="nvidia", STAND_IN_STATUS="3")
    assert result.returncode == 1 and "no counters: " in result.stderr.splitlines()[-1], result.stderr
    assert not folders_of(tmp_path)


@pytest.mark.parametrize("release", [slow("6.4"), "7.1"])
def test_a_gpu_without_a_known_peak_has_unknown_limits(release, run, tmp_path):
    arguments = ("--output-dir", tmp_path / "results")
    result = run("get_rocprof_compute.sh", *arguments, profilers=f"rocm-{release}", STAND_IN_FAULT="no-peaks")
    assert result.returncode == 0, result.stderr
    rows = [line.split()[-1] for line in result.stdout.splitlines() if line.startswith("adamw_kernel")]
    assert rows == ["unknown"] and "unknown: the profile lacks percentages of a peak" in result.stdout


def test_limits_of_an_old_layout_and_their_names(tmp_path):
    row = limits.analysed_kernel(SAMPLES / "rocprof-compute/analysis_0.txt")
    assert row["kernel"] == "vecCopy(double*, double*, double*, int, int)" and row["mean_us"] == 20
    assert (row["matrix"], row["memory"], row["occupancy"]) == (0.5, 25.6, None)
    assert limits.cells(f"│ {'a' * 40} │\n│ b │") == ["a" * 40 + "b"]  # cut within a word
    (tmp_path / "analysis_0.txt").write_text("no table")
    assert limits.main([str(tmp_path)]) == 1
    for unit, us in {"nsecond": 4e-3, "usecond": 4, "msecond": 4e3, "second": 4e6}.items():
        values = {"mean_us": ("4", unit), "memory": ("50", "%")}
        counters = [
            {"kernel": "k", "counter": limits.COLUMNS[column][1], "mean": float(mean), "unit": unit}
            for column, (mean, unit) in values.items()
        ]
        (tmp_path / "counters.json").write_text(json.dumps({"counters": counters}))
        (row,) = limits.read_counters(tmp_path / "counters.json")
        assert row["mean_us"] == pytest.approx(us)


@pytest.mark.parametrize("name", ["TCP Cache Hit Rate", "GL0 Cache Hit Rate (TCP Cache)"])
def test_strix_halo_names_its_first_cache_otherwise_and_knows_no_peak_of_the_memory(name, tmp_path):
    text = (SAMPLES / "rocprof-compute-3/analysis_0.txt").read_text().replace("vL1D Cache Hit Rate", name)
    text = re.sub("(L2-Fabric (?:Read|Write) BW .*?│ )100.0( │ ).*?│", r"\1None\2 │", text)
    (tmp_path / "analysis_0.txt").write_text(text)
    row = limits.analysed_kernel(tmp_path / "analysis_0.txt")
    assert (row["l1_hit"], row["memory"]) == (12.4, None)


# ---------------------------------------------------------------- faults


def says(text):
    return {"STAND_IN_STATUS": "1", "STAND_IN_SAYS": text}


@pytest.mark.parametrize(
    ("wrapper", "release", "environment", "status", "words", "kept"),
    [
        ("get_hotspots.sh -- --no-such", "7.0", {}, 2, "see the lines above", False),
        ("get_hotspots.sh", "7.0", {"STAND_IN_STATUS": "4"}, 4, "ended with exit status 4", True),
        ("get_hotspots.sh", "7.0", {"STAND_IN_STATUS": "3"}, 1, "ended with exit status 3", True),  # 3 is ours
        ("get_hotspots.sh", "7.0", {"STAND_IN_STATUS": "130"}, 130, "interrupted", True),
        ("get_counters.sh --pmc", "6.2", {"STAND_IN_STATUS": "4"}, 3, "exit status 1", True),
        ("get_hotspots.sh", "7.0", {"STAND_IN_STATUS": "137"}, 137, "too little memory", True),
        ("get_trace.sh", "7.0", {"STAND_IN_FAULT": "no-report"}, 3, "left no *.pftrace: see the log", True),
        ("get_trace.sh", "7.0", says("No space left on device"), 1, "disk is full", True),
        ("get_trace.sh", "7.0", says("OSError: [Errno 122] Disk quota exceeded"), 1, "or your quota", True),
        ("get_trace.sh", "7.0", says("\x1b[31mNo module named 'torch'"), 1, "has no PyTorch", True),
        ("get_trace.sh", "7.0", says("No HIP GPUs are available"), 1, "same ROCm release", True),
        ("get_trace.sh", "7.0", says("Unable to open /dev/kfd read-write"), 1, "groups render and video", True),
        *(
            (wrapper, release, {"STAND_IN_FAULT": "no-library"}, 1, words, False)
            for wrapper in ("get_hotspots.sh", "get_trace.sh", "get_counters.sh --pmc")
            for release, words in (("6.4", "cannot be preloaded"), ("7.0", "see the lines above"))
        ),
        ("get_rocprof_compute.sh", "7.0", {"STAND_IN_FAULT": "unsupported"}, 1, "see the lines above", False),
        *(
            ("get_rocprof_compute.sh", release, {"STAND_IN_FAULT": "no-locale"}, 1, "locale-gen en_US.UTF-8", False)
            for release in ("6.2", "6.3", "6.4")
        ),
        *(
            ("get_rocprof_compute.sh", release, {"STAND_IN_FAULT": fault}, 1, r"pip install -r /opt/my\ rocm", False)
            for release, fault in (("6.4", "no-packages"), ("7.1", "other-packages"))
        ),
        ("get_rocprof_compute.sh", "7.13", {"STAND_IN_FAULT": "no-amdsmi"}, 1, "set ROCM_PATH to the ROCm", False),
        ("get_rocprof_compute.sh", "7.1", says("RuntimeError: no such kernel"), 1, "see the lines above", False),
        ("get_rocprof_compute.sh", "7.1", {"STAND_IN_FAULT": "no-kernels"}, 1, "left no pmc_perf.csv", False),
        ("get_rocprof_compute.sh", "7.1", {"STAND_IN_FAULT": "pandas-3"}, 1, "pip install pandas\\<3", False),
        ("get_rocprof_sys.sh", "7.0", {"STAND_IN_FAULT": "no-report"}, 3, "whether the disk is full", True),
        *(
            (wrapper, "6.4", {"STAND_IN_FAULT": "no-kernels"}, 1, "", "trace" in wrapper or "sys" in wrapper)
            for wrapper in WRAPPERS
        ),
    ],
)
@pytest.mark.quick(5)
def test_a_failure_ends_with_its_status_its_cause_and_what_was_measured(
    wrapper, release, environment, status, words, kept, run, tmp_path
):
    target = tmp_path / "results"
    wrapper, *options = wrapper.split()
    result = run(wrapper, "--output-dir", target, *options, profilers=f"rocm-{release}", **environment)
    assert result.returncode == status, result.stderr
    last = result.stderr.splitlines()[-1]
    assert last.startswith(f"{wrapper}: ") and words in last and "\x1b" not in last, result.stderr
    folders = folders_of(target)
    assert len(folders) == kept
    assert all(str(folder) in last for folder in folders)
    assert status == 3 or not SUCCESS.search(result.stdout)
    logs = list(target.glob("*/*_failed.log"))  # none where nothing was started
    assert len(logs) == (not kept and not environment.get("STAND_IN_FAULT", "").endswith("-packages"))
    assert all(str(log) in last for log in logs)


def test_the_last_lines_of_the_log_are_shown_as_they_are(run, tmp_path):
    def lines(wrapper, release, **environment):
        result = run(wrapper, "--output-dir", tmp_path / "results", profilers=f"rocm-{release}", **environment)
        return result.stderr.split("the last lines of the log:\n")[1].splitlines()[:-1]

    for wrapper, release in (
        *(("get_hotspots.sh", "7.0"), ("get_trace.sh", "7.1"), ("get_trace.sh", "6.2")),
        *(("get_rocprof_sys.sh", "6.2"), ("get_rocprof_sys.sh", "7.0")),
    ):
        assert lines(wrapper, release, **says("\x1b[31mValueError: 7")) == [
            "      uses       plain operations",
            "    training: ValueError: 7",
        ]  # what the profiler prints about its end and its files, which follows, is left out
    said = lines("get_rocprof_compute.sh", "6.4", STAND_IN_FAULT="no-locale")
    assert [line.split()[:3] for line in said] == [["ERROR", "Please", "ensure"], ["ERROR", "unsupported", "locale"]]
    for release, profiler in (("6.2", "rocprof"), ("7.0", "rocprofv3")):  # the tool's own last line says nothing
        said = lines("get_rocprof_compute.sh", release, **says("ValueError: 7"))
        assert [line.strip() for line in said[-2:]] == [
            f"INFO    |-> [{profiler}] training: ValueError: 7",
            "ERROR Profiling execution failed.",
        ]
    for text in ("ValueError: \udcfc", "ValueError: \ufffd"):  # a byte that is no UTF-8, and how a terminal shows it
        assert lines("get_hotspots.sh", "7.0", LC_ALL="C.UTF-8", **says(text))[-1] == "    training: ValueError: \ufffd"
    said = lines("get_counters.sh", "7.0", STAND_IN_FAULT="no-counters")  # the stack that follows is left out
    assert said == ["    F tool.cpp] Agent HW architecture is not supported, no counter metrics found."]


def test_two_wrappers_at_once_have_a_folder_each(run, tmp_path):
    """Jobs of an array start in the same second."""
    (tmp_path / "asked").mkdir()
    executable(tmp_path / "date", "#!/bin/sh\necho 20260101_120000\n")
    both = f"cd '{tmp_path}/asked'; touch $PPID; while [ $(ls | wc -l) -lt 2 ]; do sleep 0.01; done"
    executable(tmp_path / "mkdir", f'#!/bin/sh\n({both})\nexec "{shutil.which("mkdir")}" "$@"\n')
    with concurrent.futures.ThreadPoolExecutor() as pool:
        arguments = ("get_hotspots.sh", "--output-dir", tmp_path / "results")
        results = list(pool.map(lambda _: run(*arguments, profilers="rocm-7.1"), range(2)))
    assert [result.returncode for result in results] == [0, 0], [result.stderr for result in results]
    folders = list((tmp_path / "results").glob("hotspots/*"))
    assert len(folders) == 2 and all(len(list(folder.glob("*_kernel_trace.csv"))) == 1 for folder in folders)


def test_a_wrapper_that_refuses_to_start_leaves_no_folder(run, tmp_path):
    for wrapper, option, release in (("get_counters.sh", "--set=pc", "6.3"), ("get_trace.sh", "--rocpd", "6.4")):
        arguments = (*option.split("="), "--output-dir", tmp_path / "results")
        (tmp_path / "mine" / "empty").mkdir(parents=True, exist_ok=True)  # of a user who has a variable OUT
        for options in (arguments, (*arguments, "--nproc-per-node", "0")):
            result = run(wrapper, *options, profilers=f"rocm-{release}", OUT=str(tmp_path / "mine" / "empty"))
            assert result.returncode == 2 and (tmp_path / "mine" / "empty").is_dir()
            assert not list(tmp_path.glob("results/*"))


@pytest.mark.slow
def test_the_error_of_a_rank_is_shown_and_not_torchruns_summary(run, tmp_path):
    arguments = ("--nproc-per-node", 2, "--output-dir", tmp_path / "results")
    result = run("get_hotspots.sh", *arguments, profilers="rocm-7.0", **says("ValueError: 7"))
    said = result.stderr.split("the last lines of the log:\n")[1]
    assert result.returncode == 1 and "training: ValueError: 7\n" in said and "failed (exitcode: 1)" in said
    assert "Traceback" not in said and "error_file" not in said


def test_an_analysis_that_fails_leaves_the_profile(run, tmp_path):
    analyze = "case $1 in analyze) echo 'KeyError: 42'; exit 1 ;; esac"
    executable(tmp_path / "rocprof-compute", f'#!/bin/sh\n{analyze}\nexec "{STUBS}/rocm-7.0/rocprof-compute" "$@"\n')
    result = run("get_rocprof_compute.sh", "--profiler", "rocm", "--output-dir", tmp_path / "results", release="7.0")
    assert result.returncode == 3 and "    KeyError: 42\n" in result.stderr
    assert list(result_of(tmp_path / "results").rglob("pmc_perf.csv"))


@pytest.mark.slow
def test_the_five_top_kernels_are_analysed(run, tmp_path):
    """The sample has two."""
    table = SAMPLES / "rocprof-compute-3" / "analysis_1.txt"
    analyze = f"case $1 in analyze) echo \"$*\" >>'{tmp_path}/asked'; exec cat '{table}' ;; esac"
    executable(tmp_path / "rocprof-compute", f'#!/bin/sh\n{analyze}\nexec "{STUBS}/rocm-7.1/rocprof-compute" "$@"\n')
    result = run("get_rocprof_compute.sh", "--profiler", "rocm", "--output-dir", tmp_path / "results", release="7.1")
    assert result.returncode == 0, result.stderr
    asked = [line.split(" -k ")[1] for line in (tmp_path / "asked").read_text().splitlines()]
    assert asked == [f"{kernel} -b 2" for kernel in range(5)]
    shown = [line.split(" -k ")[1] for line in result.stdout.splitlines() if " analyze -p " in line]
    assert shown == [*asked, "0"]


@pytest.mark.parametrize(
    ("wrapper", "release", "status", "kept"),
    [
        ("get_hotspots.sh", "7.0", "130", True),
        ("get_hotspots.sh", "7.0", "0", True),  # some scripts end well after Ctrl-C
        ("get_rocprof_compute.sh", "7.0", "130", False),
        *(("get_hotspots.sh", release, "", float(release) >= 7) for release in ROCM),  # as Python ends by itself
        ("get_trace.sh", "6.4", "", False),
    ],
)
@pytest.mark.quick(4)
def test_ctrl_c_keeps_what_was_measured(wrapper, release, status, kept, run, tmp_path):
    """It reaches wrapper, profiler and script. From ROCm 7.0 on rocprofv3 writes its files first; before, never."""
    target = tmp_path / "results"
    machine = {"profilers": f"rocm-{release}", "interrupt": tmp_path / "started", "STAND_IN_STATUS": status}
    result = run(wrapper, "--output-dir", target, **machine)
    last = result.stderr.splitlines()[-1]
    assert result.returncode == 130 and f"{wrapper}: interrupted" in last, result.stderr
    assert bool(list(target.glob("*/*/*_kernel_trace.csv"))) == ("what was measured is in" in last) == kept
    assert "the last lines of the log" not in result.stderr  # the user knows why it ended
    assert "(log: " in last and bool(folders_of(target)) == kept  # no folder with nothing that can be read


@pytest.mark.parametrize("profilers", ["rocm-7.0", "nvidia"])
def test_after_ctrl_c_no_other_run_begins(profilers, run, tmp_path):
    arguments = ("--pmc", "SQ_WAVES", "--pmc", "GRBM_GUI_ACTIVE", "--output-dir", tmp_path / "results")
    result = run("get_counters.sh", *arguments, profilers=profilers, STAND_IN_STATUS="130")
    last = result.stderr.splitlines()[-1]
    assert result.returncode == 130 and last.startswith("get_counters.sh: interrupted"), result.stderr
    assert len(recorded(tmp_path)) == 1


SLOW_TO_LISTEN = f"""#!/usr/bin/env bash
if [[ $* == *tee.py* ]]; then # what writes the log has not started when Ctrl-C comes
    trap 'exit 1' INT
    until [ -e "$STAND_IN_WAITS" ]; do sleep 0.05; done
    sleep 1 &
    wait
fi
exec {shlex.quote(str(STUBS))}/training_python "$@"
"""


def test_ctrl_c_before_the_log_is_open_is_no_full_disk(run, tmp_path):
    executable(tmp_path / "slow_python", SLOW_TO_LISTEN)
    machine = {"profilers": "rocm-7.0", "interrupt": tmp_path / "started", "TINY_LLAMA_PYTHON": "slow_python"}
    result = run("get_hotspots.sh", "--output-dir", tmp_path / "results", STAND_IN_STATUS="130", **machine)
    assert result.returncode == 130 and "get_hotspots.sh: interrupted" in result.stderr.splitlines()[-1], result.stderr


def test_bad_options_and_places(run, tmp_path):
    (tmp_path / "file").touch()
    for arguments, status, words in (
        (["--profiler", "vtune"], 2, "must be auto"),
        (["--output-dir"], 2, "needs a value"),
        (["--output-dir", "--dry-run"], 2, "--output-dir needs a value"),  # and not a folder of this name
        (["--nproc-per-node", "0"], 2, "must be 1 or more"),
        (["--nproc-per-node=0"], 2, "must be 1 or more"),
        (["--output-dir", tmp_path / "file"], 1, "choose a writable folder with --output-dir"),
    ):
        result = run("get_trace.sh", *arguments, profilers="rocm-6.4")
        assert result.returncode == status and words in result.stderr and "\ntraining" not in result.stdout
    assert run("get_counters.sh", "--pmc", "--kernel", "--dry-run", profilers="rocm-6.4").returncode == 2
    result = run("get_trace.sh", "--dry-run", "--output-dir", "/", profilers="rocm-6.4")
    assert " -d /traces/trace_" in result.stdout  # and not the folder of the version


@pytest.mark.parametrize(
    "command",
    [
        "bash version3_triton/get_trace.sh --profiler pytorch --dry-run",
        "cd version3_triton && sh get_trace.sh --profiler pytorch --dry-run",
        "for name in quickstart test run_all_profilers profile check_room; do sh scripts/$name.sh --help; done",
        'source scripts/common/machine/environment.sh; [ "$ROOT" -ef . ]',
    ],
)
def test_neither_a_cdpath_nor_sh_matters(command):
    """With a CDPATH cd prints where it goes, if the name of the folder is relative. sh need not be bash."""
    environment = {**os.environ, "CDPATH": "."}
    result = subprocess.run(["bash", "-c", command], cwd=REPOSITORY, env=environment, capture_output=True, text=True)
    assert result.returncode == 0 and not result.stderr, result.stderr


def test_wrappers_run_from_anywhere_and_with_spaces_in_paths(run, tmp_path):
    copy = tmp_path / "a copy" / FOLDER.name
    shutil.copytree(FOLDER, copy, symlinks=True)
    (tmp_path / "a copy" / "scripts").symlink_to(REPOSITORY / "scripts")
    result = run(copy / "get_hotspots.sh", profilers="rocm-6.4", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert len(list(copy.glob("hotspots/hotspot_*/hotspots.csv"))) == 1
    (shown,) = copy.glob("hotspots/hotspot_*/command.txt")  # as it could be typed
    assert str(copy / "tiny_llama_v3.py") in shlex.split(shown.read_text())
    result = run(copy / "get_rocprof_compute.sh", profilers="rocm-7.1", cwd=tmp_path)
    assert result.returncode == 1 and "splits the command at spaces" in result.stderr
    arguments = ("--output-dir", os.path.relpath(tmp_path / "there", FOLDER))  # rocprof-compute refuses a path with ..
    assert run("get_rocprof_compute.sh", *arguments, profilers="rocm-7.0").returncode == 0
    assert list((tmp_path / "there").rglob("limits.csv"))


def test_a_wrapper_that_is_not_called_in_a_versions_folder_says_so(run):
    result = run(WRAPPER_FILES / "get_trace.sh", "--dry-run", profilers="rocm-7.0")
    assert result.returncode == 1 and "call it by its link in a version's folder" in result.stderr


# ---------------------------------------------------------------- NVIDIA


@pytest.mark.parametrize("wrapper", [*WRAPPERS, "get_counters.sh --pmc"])
def test_nvidia_profilers_leave_the_same_kind_of_result_of_the_measured_steps(wrapper, run, python, tmp_path):
    """ncu repeats every kernel that it looks at: one launch of each. It must not set the clock to the base clock."""
    wrapper, *counters = wrapper.split()
    arguments = ("--output-dir", tmp_path / "results", "--preset", "small", *counters)
    result = run(wrapper, *arguments, profilers="nvidia")
    assert result.returncode == 0, result.stdout + result.stderr
    folder = result_of(tmp_path / "results")
    graph = "--no-graph " if wrapper in ("get_counters.sh", "get_rocprof_compute.sh") else ""
    assert ("training with --no-graph, because" in result.stdout) == bool(graph)
    train = f"{python} tiny_llama_v3.py {graph}--num-steps {DELIVERED[wrapper][0]} --preset small"
    wanted = [command for w, profilers, command in COMMANDS if (w, profilers) == (wrapper, "nvidia")]
    if counters:
        wanted = [command for command in wanted if command.startswith("ncu")]
    assert commands_of(tmp_path, train) == wanted
    if wrapper in ("get_trace.sh", "get_rocprof_sys.sh"):
        assert re.search(r"attention +1 +0.004[^#]*\nopen \S+/report.nsys-rep with Nsight Systems", result.stdout)
    elif wrapper == "get_rocprof_compute.sh":
        assert re.search(r"nvjet_\S+ +6.0 +42.0 .*compute units", result.stdout)
    elif wrapper == "get_counters.sh":
        assert re.search(r"nvjet_\S+ +2 +6,000.0 +61.0", result.stdout)
        assert (folder / "kernels.csv").exists() != bool(counters)


def test_the_counters_that_were_asked_for_are_shown(run, tmp_path):
    """Beside the time, and not those that ncu adds; the CSV has them all."""
    arguments = ("--pmc", "dram__bytes.sum", "--output-dir", tmp_path / "results")
    result = run("get_counters.sh", *arguments, profilers="nvidia")
    assert re.findall(r"^  \[\d\] (\S+)", result.stdout, re.MULTILINE) == ["gpu__time_duration.sum", "dram__bytes.sum"]
    assert "sm__throughput" in (result_of(tmp_path / "results") / "counters.csv").read_text()


def test_ncu_that_finds_no_kernel_in_the_steps_looks_at_the_whole_run(run, tmp_path):
    arguments = ("--output-dir", tmp_path / "results")
    result = run("get_rocprof_compute.sh", *arguments, profilers="nvidia", STAND_IN_FAULT="no-range")
    assert result.returncode == 0 and "it now looks at the whole run" in result.stderr, result.stderr
    assert [command.startswith(NCU) for command in recorded(tmp_path)] == [True, False]


def test_ncu_that_cannot_select_the_steps_says_so(run, tmp_path):
    executable(tmp_path / "ncu", "#!/bin/sh\necho '--nvtx --metrics'\n")
    result = run("get_rocprof_compute.sh", "--dry-run", "--profiler", "nsight")
    assert "warning: this ncu cannot select the measured steps: it looks at the whole run" in result.stderr
    assert result.returncode == 0 and "--kernel-id" in result.stdout and "--nvtx" not in result.stdout


def test_times_without_counters_are_called_so(run):
    result = run("get_counters.sh", "--dry-run", "--profiler", "pytorch")
    assert result.returncode == 0
    assert "warning: these are times only: hardware counters need rocprofv3 or ncu" in result.stderr
    result = run("get_counters.sh", "--dry-run", "--profiler", "pytorch", "--set", "memory")  # asked for: no warning
    assert result.returncode == 1 and "need rocprofv3 or ncu: for times, leave out --pmc and --set" in result.stderr


@pytest.mark.parametrize(("ranks", "status"), [(1, "0"), (1, "1"), slow(2, "0")])
def test_a_recording_that_nsys_cannot_import_is_kept_and_named(ranks, status, run, tmp_path):
    """As in an image without the libraries of Nsight Systems' host part."""
    arguments = ("--output-dir", tmp_path / "results", "--nproc-per-node", ranks)
    result = run("get_hotspots.sh", *arguments, profilers="nvidia", STAND_IN_FAULT="no-import", STAND_IN_STATUS=status)
    (said,) = [line for line in result.stderr.splitlines() if line.startswith("get_hotspots.sh: ")]
    recordings = list((tmp_path / "results").rglob("report.qdstrm"))
    assert result.returncode == 1 and len(recordings) == ranks and all(str(file) in said for file in recordings)
    assert "QdstrmImporter -i" in said and "--profiler pytorch" in said and not SUCCESS.search(result.stdout)
    assert ranks > 1 or result.stderr.splitlines() == [said]


def test_the_profiler_is_chosen_by_what_is_here(run, tmp_path):
    text = run("get_trace.sh", "--dry-run", profilers="nvidia", choose=False).stdout
    if not (shutil.which("rocprofv3") and os.path.exists("/dev/kfd")):
        assert "uses nsys, because rocprofv3 is not installed" in text and "holds the measured steps alone" in text
    text = run("get_trace.sh", "--dry-run", profilers="rocm-7.0", choose=False, TINY_LLAMA_CPU="1").stdout
    assert "uses PyTorch's profiler, because rocprofv3 is installed, but there is no AMD GPU" in text
    (tmp_path / "rocm" / "bin").mkdir()  # not on PATH
    executable(tmp_path / "rocm" / "bin" / "rocprofv3", f'#!/bin/sh\nexec "{STUBS}/rocm-7.0/rocprofv3" "$@"\n')
    text = run("get_hotspots.sh", "--dry-run", "--profiler", "rocm", release="7.0").stdout
    assert "uses rocprofv3 of ROCm 7.0, because it was asked for" in text


def test_a_gpu_that_pytorch_cannot_use_counts_as_none(run):
    """As in WSL, which has a device for any GPU, or where the driver is too old."""
    machine = {"TINY_LLAMA_PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": "-1", "HIP_VISIBLE_DEVICES": "-1"}
    said = run("get_trace.sh", "--dry-run", "--profiler", "pytorch", profilers="nvidia", choose=False, **machine).stdout
    assert "PyTorch sees no GPU here: profiling a very small model" in said
    assert " --hidden-dim 64 --num-layers 2 --num-heads 4 --batch-size 2 --seq-len 32 --num-steps 5 " in said


CHOICE = """
source "$0"
have_amd_gpu() { [[ $GPUS == *amd* ]]; }
have_nvidia_gpu() { [[ $GPUS == *nvidia* ]]; }
GPUS=$1 PATH=$2
choose_profiler auto rocprofv3 nsys
echo "$PROFILER, $TOOL: $WHY"
"""
NO_AMD_GPU = "rocprofv3 is installed, but there is no AMD GPU here (no /dev/kfd)"


@pytest.mark.parametrize(
    ("gpus", "tools", "chosen"),
    [
        ("amd nvidia", "rocm-7.1 nvidia", "rocm, rocprofv3: there is an AMD GPU"),
        ("nvidia", "rocm-7.1 nvidia", f"nsight, nsys: {NO_AMD_GPU}"),
        ("amd nvidia", "nvidia", "nsight, nsys: rocprofv3 is not installed"),
        ("amd nvidia", "", "pytorch, PyTorch's profiler: rocprofv3 is not installed, and nsys is not installed"),
        ("nvidia", "rocm-7.1", f"pytorch, PyTorch's profiler: {NO_AMD_GPU}, and nsys is not installed"),
        ("amd", "nvidia", "pytorch, PyTorch's profiler: rocprofv3 is not installed"),
        ("", "rocm-7.1 nvidia", f"pytorch, PyTorch's profiler: {NO_AMD_GPU}"),
        ("", "nvidia", "pytorch, PyTorch's profiler: there is no GPU here"),
    ],
)
def test_rocms_profiler_comes_first_then_nvidias_then_pytorchs(gpus, tools, chosen):
    path = os.pathsep.join(str(STUBS / name) for name in tools.split())
    command = [
        "bash",
        "-euc",
        CHOICE,
        WRAPPER_FILES / "setup.sh",
        gpus,
        path,
    ]
    environment = {**os.environ, "WRAPPER": str(FOLDER / "get_trace.sh")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.stdout == f"{chosen}\n", done.stderr


# ---------------------------------------------------------------- all wrappers, and PyTorch's profiler for real


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
@pytest.mark.parametrize("wrapper", [*WRAPPERS, "get_counters.sh --set memory"])
def test_every_wrapper_delivers_with_the_profilers_of_this_machine(wrapper, folder, run, tmp_path):
    name, *options = wrapper.split()
    if options and not (shutil.which("ncu") or shutil.which("rocprofv3")):
        pytest.skip("nothing here reads counters")
    machine = {"TINY_LLAMA_PYTHON": sys.executable, "ROCM_PATH": os.environ.get("ROCM_PATH", "/opt/rocm")}
    options += ["--preset", "small", "--num-steps", "2", "--output-dir", str(tmp_path)]
    result = run(folder / name, *options, **machine)
    print(result.stdout[-2000:])  # which profiler, and its table
    assert result.returncode == 0 and SUCCESS.search(result.stdout), result.stderr
    assert re.search(r"attention|gemm|nvjet|Cijk|triton", result.stdout, re.IGNORECASE)


def test_interrupted_profilers_end_with_a_summary(tmp_path):
    # Without the trap bash goes on if the signal comes while touch runs.
    slow = f"*run_deepspeed*) trap 'exit 130' INT; touch '{tmp_path}/started'; sleep 60 ;; *run_pytorch*) exit 0 ;;"
    text = f'#!/bin/bash\ncase $1 in {slow} esac\nexec "{sys.executable}" "$@"\n'
    python = executable(tmp_path / "python", text)
    environment = {**os.environ, "TINY_LLAMA_PYTHON": str(python), "TINY_LLAMA_CPU": "1"}
    command = ["bash", REPOSITORY / "scripts" / "run_all_profilers.sh", "--version", "3", "--enable-rocm-tools"]
    command += ["--profile-dir", tmp_path / "all"]
    process = subprocess.Popen(command, env=environment, start_new_session=True, stdout=subprocess.PIPE)
    while not (tmp_path / "started").exists() and process.poll() is None:
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)
    outcome = process.communicate()[0].decode().split("=== all profilers")[1].splitlines()[1:]
    assert outcome[:2] == ["done     run_pytorch_profiler.py", "stopped  run_deepspeed_flops.py"]
    assert process.returncode == 130 and len(outcome) == 7


ON_THE_CPU = {"TINY_LLAMA_CPU": "1", "TINY_LLAMA_PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""}


def test_without_any_profiler_pytorch_leaves_the_same_kind_of_result(run, tmp_path):
    """The first wrapper runs its script. The others' commands leave its trace: their versions only read the words."""
    options = "--profiler pytorch --num-steps 1 --warmup-steps 1 --profile-steps 1 --device cpu".split()
    given = tmp_path / "trace_v1.json"
    copies = f"case $1 in *_v[24].py) echo \"$*\" >>'{tmp_path}/noted'; cp '{given}' \"${{@: -1}}\"; exit ;; esac"
    noting = executable(tmp_path / "noting", f"#!/bin/bash\n{copies}\nexec '{sys.executable}' \"$@\"\n")
    for version, wrapper, product in (
        (1, "get_trace.sh", None),
        (2, "get_rocprof_compute.sh", "kernels.csv"),
        (4, "get_counters.sh", "kernels.csv"),
    ):
        results = tmp_path / f"results{version}"
        machine = ON_THE_CPU | ({"TINY_LLAMA_PYTHON": str(noting)} if given.exists() else {})
        result = run(SCRIPTS[version].parent / wrapper, "--output-dir", results, *options, **machine)
        assert result.returncode == 0, result.stdout + result.stderr
        folder = result_of(results)
        (trace,) = folder.glob("trace_*.json")
        if not given.exists():
            shutil.copy(trace, given)
        assert len(json.loads(trace.read_text())["traceEvents"]) > 100
        assert "aten::mm" in ((folder / product).read_text() if product else result.stdout)
        assert f"open {trace}" in result.stdout or "times only" in result.stdout + result.stderr
    for version, words in zip((2, 4), (tmp_path / "noted").read_text().splitlines(), strict=True):
        asked = load_version(version).parse_options(words.split()[1:])
        assert asked.enable_pytorch_profiler and asked.profile_dir.startswith(str(tmp_path / f"results{version}"))


# ---------------------------------------------------------------- profile.sh: any command

PROFILE = REPOSITORY / "scripts" / "profile.sh"
TRAIN = """
import sys
import torch

model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
second = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1)
for step in range(int(sys.argv[1])):
    loss = model(torch.ones(2, 8)).square().mean()
    loss.backward()
    optimizer.step()
    second.step()
    optimizer.zero_grad()
    print("loss", loss.item())
if sys.argv[2:] == ["fails"]:
    raise ValueError("no more data")
"""


@pytest.fixture
def script(tmp_path):
    (tmp_path / "train.py").write_text(TRAIN)
    return tmp_path / "train.py"


QUESTIONS = {"hotspots": "hotspots.csv", "trace": "*.pftrace", "counters": "counters.csv", "compute": "limits.csv"}
QUESTIONS["system"] = "*.proto"


@pytest.mark.parametrize("release", ["6.2", "7.1"])
@pytest.mark.parametrize("question", QUESTIONS)
@pytest.mark.quick(3)
def test_any_command_is_profiled(question, release, run, python, tmp_path):
    (tmp_path / "here").mkdir()
    options = ("--output-dir", "results", "--", python, "tiny_llama_v1.py", "--lr", "3")
    result = run(PROFILE, question, *options, profilers=f"rocm-{release}", cwd=tmp_path / "here")
    assert result.returncode == 0, result.stdout + result.stderr
    folder = result_of(tmp_path / "here" / "results")
    assert list(folder.rglob(QUESTIONS[question])) and SUCCESS.search(result.stdout)
    assert all(command.endswith(f" -- {python} tiny_llama_v1.py --lr 3") for command in recorded(tmp_path))
    assert "the profile holds start-up and warm-up too" in result.stdout


def test_a_command_may_change_its_folder(run, python, tmp_path):
    """The profiler's library writes at the end of the process, into the folder of that time."""
    result = run(PROFILE, "hotspots", "--", python, "tiny_llama_v1.py", profilers="rocm-7.1", cwd=tmp_path)
    (folder,) = tmp_path.glob("hotspots/*")
    (line,) = (folder / "command.txt").read_text().splitlines()
    assert result.returncode == 0 and shlex.split(line)[shlex.split(line).index("-d") + 1] == str(folder)


def test_any_command_under_nvidias_profilers_is_profiled_as_a_whole(run, python, tmp_path):
    for question in ("hotspots", "counters"):
        result = run(PROFILE, question, "--", python, "tiny_llama_v1.py", profilers="nvidia", cwd=tmp_path)
        assert result.returncode == 0 and "the profile holds the whole run" in result.stdout, result.stderr
        warned = "warning: ncu looks at the first launch of each kernel in the whole run" in result.stderr
        assert warned == (question == "counters")
    assert not any("nvtx-capture" in command or "nvtx-include" in command for command in recorded(tmp_path))


def test_profiler_options_and_bad_input_of_any_command(run, python, script, tmp_path):
    def call(*arguments):
        return run(PROFILE, *arguments, profilers="rocm-7.1", cwd=tmp_path)

    options = ("--profiler-option", "--collection-period", "--profiler-option", "20:5:1", "--dry-run")
    assert " --collection-period 20:5:1 -- " in call("hotspots", *options, "--", python, "x.py").stdout
    for arguments, words in (
        (("hotspot", "--", python), "must be hotspots, trace, counters, compute or system, got 'hotspot'"),
        (("hotspots", python, "x.py"), "the command is missing: profile.sh hotspots [options] -- python"),
        (("hotspots", "--"), "the command is missing"),
        (("hotspots", "--num-steps", "3", "--", python, "x.py"), "there is no option --num-steps: "),
        (("hotspots", "--nproc-per-node", "2", "--", python, "x.py"), "write torchrun into the command"),
        (("hotspots", "--", "no-such-program", "x.py"), "there is no command no-such-program"),
        (("hotspots", "--warmup-steps", "two", "--", python, "x.py"), "--warmup-steps must be a number"),
        (("hotspots", "--profile-steps", "00", "--", python, "x.py"), "--profile-steps must be at least 1, got 00"),
    ):
        result = call(*arguments)
        assert result.returncode == 2 and words in result.stderr, (arguments, result.stderr)
        assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize("before", ["-u", "-m torch.distributed.run --standalone --nproc-per-node 2"])
def test_the_script_is_the_first_python_file_of_the_command(before, run, tmp_path):
    """The others are its arguments."""
    before = [sys.executable, *before.split()]
    words = ("hotspots", "--profiler", "pytorch", "--dry-run", "--", *before, "train.py", "model.py")
    result = run(PROFILE, *words, cwd=tmp_path)
    (command,) = [shlex.split(line) for line in result.stdout.splitlines() if "train.py" in line]
    assert [word for word in command if word.endswith(".py")][1:] == ["train.py", "model.py"], result.stdout
    assert command[: len(before)] == before and command[len(before)].endswith("profile_script.py")


@pytest.mark.parametrize(
    ("ranks", "kernel", "wanted"),
    [("1", "", "::regex:.:1"), ("1", "adamw", "::regex:adamw:1"), ("2", "adamw", "::regex:^(?!nccl).*adamw:1")],
)
def test_ncu_repeats_no_collective_kernel(ranks, kernel, wanted, run):
    """One rank alone would wait for the others forever."""
    words = ("--dry-run", "--pmc", "--nproc-per-node", ranks, *(("--kernel", kernel) if kernel else ()))
    output = run("get_counters.sh", *words, profilers="nvidia").stdout
    (command,) = [shlex.split(line) for line in output.splitlines() if "--kernel-id" in line]
    assert command[command.index("--kernel-id") + 1] == wanted


def profile_in_fork(tmp_path, *command, start=run_fork):
    """Run what profile.sh does with PyTorch's profiler, without the shell around it."""
    runner = PROFILE.parent / "common" / "machine" / "profile_script.py"
    return start(runner, "--profile-dir", "p", *command, cwd=tmp_path)


def test_pytorchs_profiler_leaves_the_warm_up_of_any_script_out(script, tmp_path):
    result = profile_in_fork(tmp_path, "train.py", "8")
    assert result.returncode == 0 and result.stdout.count("loss") == 8, result.stdout + result.stderr
    (trace,) = (tmp_path / "p").glob("trace_train_*.json")
    profile = read_profile(trace)
    assert profile.steps == 3  # of eight: two of warm-up, three after
    assert sum(call.name == "aten::addmm" for call in profile.calls) == 3 * 2


@pytest.mark.parametrize("has_gpu", [False, True])
@pytest.mark.parametrize("memory", [False, True])
def test_pytorchs_profiler_receives_what_it_records(has_gpu, memory, monkeypatch, tmp_path):
    (tmp_path / "train.py").touch()
    received = mock.Mock()
    monkeypatch.setattr(torch.profiler, "profile", received)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    words = ["--profile-dir", "p", *["--profile-memory"] * memory, str(tmp_path / "train.py")]
    profile_script.StepProfiler(profile_script.parse_arguments(words)).start()
    kinds = torch.profiler.ProfilerActivity
    activities = [kinds.CPU, kinds.CUDA][: 1 + has_gpu]
    received.assert_called_once_with(activities=activities, record_shapes=True, profile_memory=memory)


ENDS = "import torch; w = torch.nn.Parameter(torch.ones(2)); optimizer = torch.optim.SGD([w])\n{}\nexit(0)\n"
STEP = "w.sum().backward(); optimizer.step()\n"


@pytest.mark.parametrize(
    ("warm_up", "steps", "status", "words"),
    [
        (2, 1, 1, "made 1 optimizer steps: the profile begins after 2"),
        (2, 2, 1, "made 2 optimizer steps: the profile begins after 2"),
        (2, 3, 0, "profile of 1 of 3 steps, and of"),
        (0, 0, 0, "profile of 0 of 3 steps, and of"),  # of a script that never trains
    ],
)
def test_too_few_steps_are_said_whatever_the_script_ends_with(warm_up, steps, status, words, tmp_path):
    """sys.exit(0) hid that nothing was profiled; the evaluation at the end of a short script passed for its steps."""
    (tmp_path / "train.py").write_text(ENDS.format(STEP * steps))
    result = profile_in_fork(tmp_path, "--warmup-steps", warm_up, "train.py")
    assert result.returncode == status and words in result.stderr, result.stderr
    assert (tmp_path / "p").exists() == (status == 0)


def test_a_script_that_fails_leaves_its_trace(script, tmp_path):
    result = profile_in_fork(tmp_path, "train.py", "4", "fails")
    assert result.returncode == 1 and result.stderr.endswith("ValueError: no more data\n")
    assert read_profile(tmp_path / "p").steps == 2


def test_pytorchs_profiler_needs_a_script(run, tmp_path):
    result = run(PROFILE, "trace", "--profiler", "pytorch", "--", "bash", "-c", "true", cwd=tmp_path, **ON_THE_CPU)
    assert result.returncode == 1 and "the command names no .py file" in result.stderr


def test_of_several_ranks_the_first_is_profiled(script, tmp_path):
    steps = ("--warmup-steps", "1", "--profile-steps", "2")
    result = profile_in_fork(tmp_path, *steps, "train.py", "5", start=functools.partial(launch, 2))
    assert result.returncode == 0, result.stdout + result.stderr
    assert (result.stdout.count("loss"), result.stdout.count("wrote")) == (10, 1)
    (trace,) = (tmp_path / "p").glob("trace_train_*.json")
    assert read_profile(trace).steps == 2


def test_a_name_of_a_folder_carries_no_escape_code(run, tmp_path):
    """The profilers themselves may print what they like: here they print no name."""
    target = tmp_path / "results\x1b]0;PWNED\x07\x1b[2J"
    result = run("get_rocprof_sys.sh", "--output-dir", target, profilers="rocm-7.0")
    said = result.stdout + result.stderr
    assert "?]0;PWNED??[2J" in said and not re.search(r"[\0-\x09\x0b-\x1f\x7f]", said), ascii(said)
