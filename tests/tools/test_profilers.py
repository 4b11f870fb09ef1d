"""The profiling wrappers, against stand-ins for the profilers of four ROCm releases and NVIDIA, and really on a CPU."""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

import kernel_counters
import kernel_times
from common.versions import REPOSITORY, SCRIPTS

STUBS = pathlib.Path(__file__).parent / "stubs"
SAMPLES = pathlib.Path(__file__).parent / "samples"
FOLDERS = [script.parent for script in SCRIPTS.values()]
WRAPPERS = ("get_trace.sh", "get_counters.sh", "get_hotspots.sh", "get_rocprof_compute.sh", "get_rocprof_sys.sh")
ROCM = ("6.2", "6.4", "7.0", "10.0")
SUCCESS = re.compile(r"^(open|read it|the whole table|every|these are)", re.MULTILINE)  # what only a success prints


def run_wrapper(wrapper, *arguments, profilers=None, cwd=None, **environment):
    """Run a wrapper (path) with a folder of stubs/ first on PATH; training is played by a stand-in as well."""
    paths = [str(STUBS / profilers)] if profilers else []
    environment = {
        **{
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("ROCPROF", "TINY_LLAMA", "STAND_IN"))
        },
        "PATH": os.pathsep.join([*paths, str(pathlib.Path(sys.executable).parent), os.environ["PATH"]]),
        "TINY_LLAMA_PYTHON": str(STUBS / "training_python"),
        "STAND_IN_PYTHON": sys.executable,
        "OMP_NUM_THREADS": "1",
        **environment,
    }
    return subprocess.run(
        ["bash", str(wrapper), *map(str, arguments)], env=environment, cwd=cwd, capture_output=True, text=True
    )


def result_of(folder):
    """The one result folder that a wrapper left under --output-dir."""
    results = [path for path in folder.glob("*/*") if path.is_dir()]
    assert len(results) == 1, results
    return results[0]


def recorded(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def without_time(text):
    return re.sub(r"\d{8}_\d{6}(_2)*", "TIME", text)


# ---------------------------------------------------------------- the files themselves


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_wrapper_is_the_same_text_in_every_folder(wrapper):
    first, *others = [(folder / wrapper).read_bytes() for folder in FOLDERS]
    assert others == [first] * 3
    assert all(os.access(folder / wrapper, os.X_OK) for folder in FOLDERS)


SHELLCHECK = shutil.which("shellcheck", path=os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]]))


@pytest.mark.skipif(not SHELLCHECK, reason="shellcheck is not installed")
def test_shellcheck_finds_nothing():
    scripts = [FOLDERS[0] / wrapper for wrapper in WRAPPERS]
    scripts += [*REPOSITORY.glob("scripts/**/*profile*.sh"), REPOSITORY / "scripts" / "maintain" / "try_wrappers.sh"]
    scripts += [STUBS / "training_python"]
    result = subprocess.run([SHELLCHECK, "--external-sources", *scripts], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_help_has_an_example_and_runs_nothing(wrapper):
    result = run_wrapper(FOLDERS[0] / wrapper, "--help")
    assert (
        result.returncode == 0 and f"./{wrapper} --preset medium" in result.stdout or "--num-steps 5" in result.stdout
    )
    assert "#" not in result.stdout and "uses" not in result.stdout


# ---------------------------------------------------------------- ROCm, by release

TRAIN = "{python} tiny_llama_v3.py --batch-size 8 --seq-len 128 "
TRACE_62 = "--hip-runtime-trace --kernel-trace --memory-copy-trace --marker-trace"
TRACE = " --output-format pftrace -d traces/trace_TIME -o trace_%pid% -- " + TRAIN + "--num-steps 5 --use-amp"
KERNELS = (
    " --output-format csv -d {folder}_TIME -o {name}_%pid% -- " + TRAIN + "--num-steps {steps} --no-graph --use-amp"
)
COMPUTE = " -- " + TRAIN + "--num-steps 1 --warmup-steps 1 --no-graph --use-amp"
SYSTEM = "--trace --profile -- " + TRAIN + "--num-steps 2 --warmup-steps 1 --use-amp"
HOTSPOTS = "rocprofv3 --kernel-trace --stats" + KERNELS.replace("{folder}", "hotspots/hotspot")
COUNTERS = KERNELS.replace("{folder}", "counters/counter").replace("{steps}", "3")
WORK = "rocprof_compute/profile_TIME/workloads/tiny_llama_v3"
ENVIRONMENT = "env {0}_OUTPUT_PATH=rocprof_sys/profile_TIME {0}_TIME_OUTPUT=OFF "
COMMANDS = {
    ("get_trace.sh", "6.2"): f"rocprofv3 {TRACE_62}" + TRACE,
    ("get_trace.sh", "6.4"): "rocprofv3 --runtime-trace" + TRACE,
    ("get_trace.sh", "7.0"): "rocprofv3 --runtime-trace" + TRACE,
    ("get_trace.sh", "10.0"): "rocprofv3 --runtime-trace" + TRACE,
    **{
        ("get_hotspots.sh", release): HOTSPOTS.replace("{name}", "kernels").replace("{steps}", "10") for release in ROCM
    },
    **{
        ("get_counters.sh", release): "rocprofv3 --kernel-trace" + COUNTERS.replace("{name}", "kernels")
        for release in ROCM
    },
    ("get_rocprof_compute.sh", "6.2"): f"omniperf profile -n tiny_llama_v3 -p {WORK} --no-roof" + COMPUTE,
    ("get_rocprof_compute.sh", "6.4"): f"rocprof-compute profile -n tiny_llama_v3 -p {WORK} --no-roof" + COMPUTE,
    ("get_rocprof_compute.sh", "7.0"): f"rocprof-compute profile -n tiny_llama_v3 -p {WORK} --no-roof" + COMPUTE,
    ("get_rocprof_compute.sh", "10.0"): f"rocprof-compute profile -n tiny_llama_v3 --output-directory {WORK} --no-roof"
    + COMPUTE,
    ("get_rocprof_sys.sh", "6.2"): ENVIRONMENT.format("OMNITRACE") + "omnitrace-run " + SYSTEM,
    **{
        ("get_rocprof_sys.sh", release): ENVIRONMENT.format("ROCPROFSYS") + "rocprof-sys-run " + SYSTEM
        for release in ROCM[1:]
    },
}


@pytest.mark.parametrize(("wrapper", "release"), COMMANDS, ids=[" ".join(key) for key in COMMANDS])
def test_dry_run_prints_the_exact_command_of_the_release(wrapper, release):
    folder = SCRIPTS[3].parent
    before = sorted(folder.rglob("*"))
    result = run_wrapper(
        folder / wrapper, "--profiler", "rocm", "--dry-run", "--use-amp", profilers=f"rocm-{release}", cwd=folder
    )
    assert result.returncode == 0, result.stderr
    command = without_time(result.stdout.splitlines()[-1])
    python = str(STUBS / "training_python").replace(" ", "\\ ")  # as bash quotes it
    assert command == COMMANDS[wrapper, release].format(python=python)
    assert sorted(folder.rglob("*")) == before


def test_a_preset_is_not_overruled_by_sizes_of_the_wrapper():
    result = run_wrapper(
        FOLDERS[0] / "get_trace.sh", *("--profiler", "rocm", "--dry-run", "--preset", "medium"), profilers="rocm-7.0"
    )
    assert "--preset medium" in result.stdout and "--batch-size" not in result.stdout


RESULTS = {
    "get_trace.sh": ("traces/trace_*", "*.pftrace"),
    "get_counters.sh": ("counters/counter_*", "launches.csv"),
    "get_hotspots.sh": ("hotspots/hotspot_*", "hotspots.csv"),
    "get_rocprof_compute.sh": ("rocprof_compute/profile_*", "workloads/tiny_llama_v*/pmc_perf.csv"),
    "get_rocprof_sys.sh": ("rocprof_sys/profile_*", "*.proto"),
}


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name[:8])
@pytest.mark.parametrize("release", ROCM)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_every_wrapper_in_every_folder_with_every_release(wrapper, release, folder, tmp_path):
    record, options = tmp_path / "record", tmp_path / "options"
    result = run_wrapper(
        folder / wrapper,
        *("--profiler", "rocm", "--output-dir", tmp_path / "results", "--num-steps", "7"),
        profilers=f"rocm-{release}",
        STAND_IN_RECORD=str(record),
        STAND_IN_OPTIONS=str(options),
    )
    assert result.returncode == 0, result.stdout + result.stderr
    place, product = RESULTS[wrapper]
    assert len(list((tmp_path / "results").glob(f"{place}/{product}"))) == 1
    command = recorded(record)[-1]
    assert command[command.index("--") + 1] == str(STUBS / "training_python")
    assert re.search(rf"{folder.name}/tiny_llama_v\d.py .* --num-steps 7$", options.read_text())
    assert SUCCESS.search(result.stdout)


def test_hot_kernels_are_printed_and_kept(tmp_path):
    result = run_wrapper(
        FOLDERS[2] / "get_hotspots.sh", "--profiler", "rocm", "--output-dir", tmp_path, profilers="rocm-7.0"
    )
    assert re.search(r"attention_forward_kernel +attention +1 +0.004 +13.3", result.stdout)
    content = json.loads((result_of(tmp_path) / "hotspots.json").read_text())
    assert [row["group"] for row in content["groups"]][0] == "GEMM"
    assert "tiny_llama_v3.py" in (result_of(tmp_path) / "command.txt").read_text()


def test_processes_do_not_overwrite_each_other(tmp_path):
    for wrapper, product, count in (("get_hotspots.sh", "*kernel_stats.csv", 2), ("get_trace.sh", "*.pftrace", 2)):
        target = tmp_path / wrapper
        arguments = ("--profiler", "rocm", "--output-dir", target)
        result = run_wrapper(FOLDERS[0] / wrapper, *arguments, profilers="rocm-6.4", STAND_IN_PROCESSES="2")
        assert result.returncode == 0, result.stderr
        assert len(list(result_of(target).glob(product))) == count
    kernels = kernel_times.read_kernels(result_of(tmp_path / "get_hotspots.sh"))
    assert sum(kernel.calls for kernel in kernels) == 16


def test_an_inherited_output_format_is_not_added(tmp_path):
    arguments = ("--profiler", "rocm", "--output-dir", tmp_path)
    result = run_wrapper(
        FOLDERS[0] / "get_hotspots.sh", *arguments, profilers="rocm-7.0", ROCPROF_OUTPUT_FORMAT="rocpd"
    )
    assert result.returncode == 0 and not list(tmp_path.rglob("*.db"))


@pytest.mark.parametrize("release", ROCM)
def test_counters_are_read_on_every_release(release, tmp_path):
    record = tmp_path / "record"
    result = run_wrapper(
        FOLDERS[2] / "get_counters.sh",
        *("--pmc", "SQ_WAVES,GRBM_GUI_ACTIVE", "--use-amp", "--profiler", "rocm", "--output-dir", tmp_path),
        profilers=f"rocm-{release}",
        STAND_IN_RECORD=str(record),
    )
    assert result.returncode == 0, result.stderr
    assert re.search(r"rmsnorm_backward_kernel +1 +1,024.0 +5,000.0", result.stdout)
    rows = kernel_counters.table(kernel_counters.read_counters(result_of(tmp_path)))
    assert {row["counter"]: row["mean"] for row in rows if row["group"] == "GEMM"} == {
        "SQ_WAVES": 1024,
        "GRBM_GUI_ACTIVE": 12000,
    }
    command = recorded(record)[-1]
    if release == "6.2":
        assert pathlib.Path(command[command.index("-i") + 1]).read_text() == "pmc: SQ_WAVES GRBM_GUI_ACTIVE\n"
    else:
        at = command.index("--pmc")
        assert command[at + 1 : at + 4] == ["SQ_WAVES", "GRBM_GUI_ACTIVE", "--output-format"]
    assert command[-1] == "--use-amp"


def test_the_roofline_benchmark_and_sampling_are_asked_for_by_name():
    arguments = ("--profiler", "rocm", "--dry-run")
    compute = run_wrapper(FOLDERS[0] / "get_rocprof_compute.sh", "--roof", *arguments, profilers="rocm-7.0").stdout
    assert "--no-roof" not in compute and "--roof" not in compute
    system = run_wrapper(FOLDERS[0] / "get_rocprof_sys.sh", "--sample", *arguments, profilers="rocm-7.0")
    assert "--profile --sample cputime -- " in system.stdout and "compare no times" in system.stderr


def test_the_command_that_analyses_is_printed(tmp_path):
    arguments = ("--profiler", "rocm", "--output-dir", tmp_path)
    result = run_wrapper(FOLDERS[3] / "get_rocprof_compute.sh", *arguments, profilers="rocm-6.4")
    folder = re.search(r"^read it with: rocprof-compute analyze -p (\S+) --list-stats$", result.stdout, re.MULTILINE)[1]
    assert (pathlib.Path(folder) / "sysinfo.csv").is_file()


def test_the_workload_is_where_its_table_lies_not_a_larger_database(tmp_path):
    (tmp_path / "pass_1").mkdir()
    (tmp_path / "pass_1" / "results.db").write_bytes(b"x" * 999)
    (tmp_path / "sysinfo.csv").write_text("x")
    source = f"source '{REPOSITORY}/scripts/common/profile_common.sh'; DRY_RUN=; OUT='{tmp_path}'; TOOL=rocprof-compute"
    command = f"{source}; largest pmc_perf.csv sysinfo.csv '*.db'"
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert result.stdout == f"{tmp_path / 'sysinfo.csv'}\n", result.stderr


def test_a_path_that_goes_up_is_made_plain_for_rocprof_compute(tmp_path):
    (tmp_path / "here").mkdir()
    arguments = ("--profiler", "rocm", "--output-dir", "../there")
    result = run_wrapper(FOLDERS[0] / "get_rocprof_compute.sh", *arguments, profilers="rocm-7.0", cwd=tmp_path / "here")
    assert result.returncode == 0, result.stderr
    assert list((tmp_path / "there").rglob("pmc_perf.csv"))


@pytest.mark.parametrize(
    ("release", "arguments", "status"),
    [
        ("6.2", "--runtime-trace -- true", 2),
        ("6.2", "--kernel-trace true", 2),
        ("6.2", "--pmc SQ_WAVES -- true", 2),
        ("6.4", "--stats -- true", 1),
        ("6.4", "--kernel-trace true", 1),
        ("6.4", "--output-format rocpd --kernel-trace -- true", 2),
        ("6.4", "--pmc SQ_WAVES --stats -- true", 1),
        ("7.0", "--stats -- true", 1),
        ("7.0", "--pmc SQ_WAVES --stats -- true", 0),
        ("7.0", "--output-format rocpd --kernel-trace -- true", 0),
        ("7.0", "--kernel-trace", 1),
        ("7.0", "--hip-run -- true", 2),
        ("10.0", "--kernel-trace -- false", 1),
    ],
)
def test_the_stubs_refuse_what_the_real_rocprofv3_refuses(release, arguments, status, tmp_path):
    program = STUBS / f"rocm-{release}" / "rocprofv3"
    result = subprocess.run([sys.executable, program, *arguments.split()], cwd=tmp_path, capture_output=True)
    assert result.returncode == status, result.stderr


# ---------------------------------------------------------------- what goes wrong


@pytest.mark.parametrize(
    ("wrapper", "environment", "status", "words"),
    [
        ("get_hotspots.sh", {"STAND_IN_STATUS": "3"}, 3, "ended with exit status 3"),
        ("get_hotspots.sh", {"STAND_IN_STATUS": "2"}, 2, "ended with exit status 2"),
        ("get_hotspots.sh", {"STAND_IN_STATUS": "130"}, 130, "interrupted"),
        ("get_hotspots.sh", {"STAND_IN_FAULT": "no-kernels"}, 1, "holds no result"),
        ("get_trace.sh", {"STAND_IN_FAULT": "no-report"}, 1, "left no *.pftrace"),
        ("get_trace.sh", {"STAND_IN_STATUS": "1", "STAND_IN_SAYS": "No space left on device"}, 1, "disk is full"),
        ("get_trace.sh", {"STAND_IN_STATUS": "1", "STAND_IN_SAYS": "No module named 'torch'"}, 1, "has no PyTorch"),
        (
            "get_trace.sh",
            {"STAND_IN_STATUS": "1", "STAND_IN_SAYS": "No HIP GPUs are available"},
            1,
            "same ROCm release",
        ),
        (
            "get_trace.sh",
            {"STAND_IN_STATUS": "1", "STAND_IN_SAYS": "Unable to open /dev/kfd read-write"},
            1,
            "groups render and video",
        ),
        ("get_rocprof_compute.sh", {"STAND_IN_FAULT": "unsupported"}, 1, "does not support this GPU"),
        ("get_rocprof_compute.sh", {"STAND_IN_STATUS": "5"}, 5, "ended with exit status 5"),
        ("get_rocprof_sys.sh", {"STAND_IN_FAULT": "no-report"}, 1, "left no *.proto"),
        ("get_counters.sh", {"STAND_IN_FAULT": "no-kernels"}, 1, "holds no result"),
    ],
)
def test_a_failure_is_one_sentence_with_its_status_and_no_success(wrapper, environment, status, words, tmp_path):
    arguments = ("--profiler", "rocm", "--output-dir", tmp_path)
    result = run_wrapper(FOLDERS[1] / wrapper, *arguments, profilers="rocm-7.0", **environment)
    assert result.returncode == status
    sentences = [
        line for line in result.stderr.splitlines() if line.startswith(f"{wrapper}: ") and "warning" not in line
    ]
    assert len(sentences) == 1 and words in sentences[0], result.stderr
    assert not SUCCESS.search(result.stdout)


def test_bad_options_of_the_wrapper_end_with_2(tmp_path):
    for arguments, words in ((["--profiler", "vtune"], "must be auto"), (["--output-dir"], "needs a value")):
        result = run_wrapper(FOLDERS[0] / "get_trace.sh", *arguments)
        assert result.returncode == 2 and words in result.stderr


def test_a_place_that_cannot_be_written_is_said_before_anything_runs(tmp_path):
    (tmp_path / "file").touch()
    arguments = ("--profiler", "rocm", "--output-dir", tmp_path / "file")
    result = run_wrapper(FOLDERS[0] / "get_trace.sh", *arguments, profilers="rocm-6.4")
    assert result.returncode == 1 and "--output-dir" in result.stderr and "\ntraining" not in result.stdout


def test_an_installed_profiler_without_its_gpu_is_not_used(tmp_path):
    result = run_wrapper(FOLDERS[0] / "get_trace.sh", "--dry-run", profilers="rocm-7.0", TINY_LLAMA_CPU="1")
    assert "uses PyTorch's profiler, because rocprofv3 is installed, but there is no AMD GPU" in result.stdout


def test_wrappers_run_from_anywhere_and_with_spaces_in_paths(tmp_path):
    copy = tmp_path / "a copy" / FOLDERS[0].name
    scripts = tmp_path / "a copy" / "scripts"
    copy.mkdir(parents=True)
    (scripts / "common").mkdir(parents=True)
    for name in ("tiny_llama_v1.py", "get_hotspots.sh"):
        shutil.copy(FOLDERS[0] / name, copy)
    for name in ("common/profile_common.sh", "kernel_times.py", "common/command_line.py", "common/versions.py"):
        shutil.copy(REPOSITORY / "scripts" / name, scripts / name)
    result = run_wrapper(copy / "get_hotspots.sh", "--profiler", "rocm", profilers="rocm-6.4", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert len(list(copy.glob("hotspots/hotspot_*/hotspots.csv"))) == 1
    assert not [path for path in tmp_path.iterdir() if path.name not in ("a copy",)]


# ---------------------------------------------------------------- NVIDIA


@pytest.mark.parametrize("wrapper", [*WRAPPERS, "get_counters.sh --pmc"])
def test_nvidia_profilers_leave_the_same_kind_of_result(wrapper, tmp_path):
    wrapper, *counters = wrapper.split()
    record = tmp_path / "record"
    arguments = ("--output-dir", tmp_path, "--profiler", "nsight", "--preset", "small", *counters)
    result = run_wrapper(FOLDERS[2] / wrapper, *arguments, profilers="nvidia", STAND_IN_RECORD=str(record))
    assert result.returncode == 0, result.stdout + result.stderr
    folder = result_of(tmp_path)
    profiled = recorded(record)[0]
    if profiled[0] == "ncu":  # which repeats every kernel that it looks at: one launch of each, by its full name
        assert profiled[profiled.index("--kernel-id") + 1] == "::regex:.:1" and "demangled" in profiled
    if wrapper in ("get_trace.sh", "get_rocprof_sys.sh"):
        assert len(json.loads((folder / "trace.json").read_text())["traceEvents"]) > 8
    elif wrapper == "get_hotspots.sh":
        assert "attention_forward_kernel" in (folder / "hotspots.csv").read_text()
    elif counters or wrapper == "get_rocprof_compute.sh":
        assert re.search(r"nvjet_\S+ +2 +6,000.0 +61.0", result.stdout)
    else:
        assert len((folder / "launches.csv").read_text().splitlines()) == 10


def test_an_nvidia_gpu_without_rocm_is_profiled_by_nsys():
    result = run_wrapper(FOLDERS[0] / "get_trace.sh", "--dry-run", profilers="nvidia", ROCM_PATH="/nowhere")
    if shutil.which("rocprofv3") and os.path.exists("/dev/kfd"):
        pytest.skip("an AMD GPU is here and comes first")
    assert "uses nsys, because rocprofv3 is " in result.stdout
    assert "--cuda-graph-trace=node" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "fault", "words"),
    [
        (["get_counters.sh", "--pmc"], "no-permission", "administrator"),
        (["get_trace.sh"], "no-report", "left no report"),
        (["get_hotspots.sh"], "no-report", "left no report"),
    ],
)
def test_faults_of_nvidia_profilers(arguments, fault, words, tmp_path):
    wrapper, *counters = arguments
    arguments = ("--output-dir", tmp_path, "--profiler", "nsight", *counters)
    result = run_wrapper(FOLDERS[0] / wrapper, *arguments, profilers="nvidia", STAND_IN_FAULT=fault)
    assert result.returncode == 1 and words in result.stderr
    assert not SUCCESS.search(result.stdout)


def try_wrappers(tmp_path, *arguments, **environment):
    """try_wrappers.sh on version 3, where nvidia's stand-ins are and run_deepspeed_flops.py ends with status 2."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\ncase $1 in *run_*.py) exit 2 ;; esac\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    arguments = ("--version", "3", "--output-dir", tmp_path / "all of them", *arguments)
    script = REPOSITORY / "scripts" / "maintain" / "try_wrappers.sh"
    environment = {"STAND_IN_PYTHON": str(python), "ROCM_PATH": "/nowhere", **environment}
    return run_wrapper(script, *arguments, profilers="nvidia", **environment)


def test_all_wrappers_are_tried_and_each_has_its_line(tmp_path):
    result = try_wrappers(tmp_path, STAND_IN_FAULT="no-permission")
    lines = {line.split("version3_triton/")[1].split("  ")[0]: line for line in result.stdout.splitlines()[:-1]}
    assert list(lines)[:5] == ["get_trace.sh", "get_hotspots.sh", *WRAPPERS[1:2], "get_rocprof_sys.sh", WRAPPERS[3]]
    words = {name: line.split("  ")[0] for name, line in lines.items()}
    assert [words.pop(name) for name in (WRAPPERS[3], "get_counters.sh --pmc")] == ["FAILED (1)"] * 2
    assert words.pop("run_deepspeed_flops.py --generate-roofline") == "FAILED (2)"
    assert set(words.values()) == {"done"} and "administrator" in lines["get_counters.sh --pmc"]
    assert result.returncode == 1 and result.stdout.splitlines()[-1].startswith("4 delivered, 3 failed")
    assert "--preset small" in next(tmp_path.rglob("get_trace.sh.log")).read_text()


def test_what_the_time_limit_leaves_no_room_for_is_not_tried(tmp_path):
    result = try_wrappers(tmp_path, "--time-limit", "20")
    assert result.returncode == 1 and result.stdout.startswith("0 delivered, 0 failed")
    assert "not tried for lack of time: version3_triton/get_trace.sh" in result.stdout


# ---------------------------------------------------------------- PyTorch's profiler, for real


def test_counters_without_a_profiler_that_has_them_are_refused(tmp_path):
    arguments = ("--pmc", "SQ_WAVES", "--profiler", "pytorch", "--output-dir", tmp_path)
    result = run_wrapper(FOLDERS[0] / "get_counters.sh", *arguments)
    assert result.returncode == 1 and "need rocprofv3 or ncu" in result.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("version", "wrapper"),
    [(1, "get_trace.sh"), (1, "get_rocprof_sys.sh"), (2, "get_rocprof_compute.sh"), (3, "get_hotspots.sh")]
    + [(4, "get_counters.sh")],
)
def test_without_any_profiler_pytorch_leaves_the_same_kind_of_result(version, wrapper, tmp_path):
    result = run_wrapper(
        SCRIPTS[version].parent / wrapper,
        *("--output-dir", tmp_path, "--profiler", "pytorch", "--num-steps", "1", "--warmup-steps", "1"),
        *("--profile-steps", "1", "--device", "cpu"),
        TINY_LLAMA_CPU="1",
        TINY_LLAMA_PYTHON=sys.executable,
        CUDA_VISIBLE_DEVICES="",
    )
    assert result.returncode == 0, result.stdout + result.stderr
    folder = result_of(tmp_path)
    trace = next(folder.glob("trace_*.json"))
    assert len(json.loads(trace.read_text())["traceEvents"]) > 100
    products = {
        "get_trace.sh": [],
        "get_rocprof_sys.sh": [],
        "get_rocprof_compute.sh": ["kernels.csv"],
        "get_hotspots.sh": ["hotspots.csv", "hotspots.json"],
        "get_counters.sh": ["launches.csv"],
    }
    for product in products[wrapper]:
        assert "aten::mm" in (folder / product).read_text()
    assert f"open {trace}" in result.stdout or "aten::mm" in result.stdout
