"""The profiling wrappers, with stubs for the profilers of five ROCm releases and of NVIDIA, and for real on a CPU."""

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

import pytest

from common import limits
from common.versions import REPOSITORY, SCRIPTS
from processes import executable

STUBS, SAMPLES = (pathlib.Path(__file__).parent / name for name in ("stubs", "samples"))
FOLDERS = [script.parent for script in SCRIPTS.values()]
FOLDER = SCRIPTS[3].parent  # replays a graph by default
WRAPPERS = ("get_trace.sh", "get_counters.sh", "get_hotspots.sh", "get_rocprof_compute.sh", "get_rocprof_sys.sh")
ROCM = ("6.2", "6.3", "6.4", "7.0", "10.0")
SUCCESS = re.compile(r"^(open|read more|the whole table|every|these are)", re.MULTILINE)  # printed by a success alone


@pytest.fixture
def python(tmp_path):
    """Return a stub that plays the training. Its path has no space: old releases of rocprof-compute take none."""
    (tmp_path / "training_python").symlink_to(STUBS / "training_python")
    return str(tmp_path / "training_python")


@pytest.fixture
def run(tmp_path, python):
    """Return a function that runs a wrapper (path) in its folder with stubs first on PATH."""

    def run_wrapper(wrapper, *arguments, profilers=None, choose=True, release=None, cwd=None, **environment):
        paths = [str(STUBS / profilers)] if profilers else []
        if profilers and choose:
            arguments = ("--profiler", "nsight" if profilers == "nvidia" else "rocm", *arguments)
        if profilers and profilers != "nvidia" and release is None:
            release = profilers.removeprefix("rocm-")
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
        return subprocess.run(command, env=environment, cwd=cwd or wrapper.parent, capture_output=True, text=True)

    return run_wrapper


def result_of(folder):
    """Return the one result folder under --output-dir."""
    (result,) = [path for path in folder.glob("*/*") if path.is_dir()]
    return result


def recorded(tmp_path):
    """Return the command lines of the profilers that ran an application, as text with the result's folder as OUT."""
    lines = [json.loads(line) for line in (tmp_path / "record").read_text().splitlines()]
    text = [" ".join(words) for words in lines if str(tmp_path / "training_python") in words]
    return [re.sub(r"\S+/\w+_\d{8}_\d{6}(_2)*", "OUT", line) for line in text]


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_wrapper_is_one_command_and_its_help_the_same_in_every_folder(wrapper, run):
    first, *others = [(folder / wrapper).read_text() for folder in FOLDERS]
    assert others == [first] * 3
    (command,) = [line for line in first.splitlines() if not line.startswith("#")]
    assert command.startswith("exec bash ")
    assert all(os.access(folder / wrapper, os.X_OK) for folder in FOLDERS)
    text = run(wrapper, "--help").stdout
    assert f"./{wrapper} --preset medium" in text and "--nproc-per-node N (1)" in text and "https://rocm.docs" in text
    assert re.search(r"^Writes \w+/\w+_<timestamp>/", text, re.MULTILINE) and "#" not in text and "uses" not in text


# ---------------------------------------------------------------- ROCm, by release

COMMANDS = [line.split(maxsplit=2) for line in (SAMPLES / "wrappers/commands.txt").read_text().splitlines()[1:]]
DELIVERED = {  # steps, files, and what the last lines say
    "get_trace.sh": ("5", "*.pftrace *_kernel_trace.csv", r"attention +1 +0.004[^#]*\nopen \S+.pftrace in http"),
    "get_counters.sh": ("3", "kernels.csv counters.csv", r"1,024.0 +5,000.0[^#]*\nevery counter .*counters.csv"),
    "get_hotspots.sh": ("10", "hotspots.csv hotspots.json", r"attention +1 +0.004 +13.3[^#]*\nthe whole table is"),
    "get_rocprof_compute.sh": (
        *("1 --warmup-steps 1", "limits.csv workloads/tiny_llama_v3/sysinfo.csv"),
        r"adamw_kernel .* 83.2 .*memory bandwidth[^#]*\nread more of a kernel with: \S+ analyze -p \S+ -k 0$",
    ),
    "get_rocprof_sys.sh": (
        *("2 --warmup-steps 1", "*.proto wall_clock-*.txt", r"attention +1 +0.009[^#]*\nopen \S+\.proto in http"),
    ),
}


@pytest.mark.parametrize("release", ROCM)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_command_files_and_last_lines_of_every_release(wrapper, release, run, python, tmp_path):
    arguments = ("--output-dir", tmp_path / "results", "--use-amp")
    result = run(wrapper, *arguments, profilers=f"rocm-{release}", ROCPROF_OUTPUT_FORMAT="rocpd")
    assert result.returncode == 0, result.stdout + result.stderr
    steps, files, last = DELIVERED[wrapper]
    no_graph = "--no-graph " * (release != "10.0" or wrapper == "get_rocprof_compute.sh")
    train = f"{python} tiny_llama_v3.py --batch-size 8 --seq-len 128 {no_graph}--num-steps {steps} --use-amp"
    since = max((r for w, r, _ in COMMANDS if w == wrapper and ROCM.index(r) <= ROCM.index(release)), key=ROCM.index)
    assert recorded(tmp_path) == [f"{command} -- {train}" for w, r, command in COMMANDS if (w, r) == (wrapper, since)]
    folder = result_of(tmp_path / "results")
    assert all(len(list(folder.glob(file))) == 1 for file in files.split()) and not list(folder.rglob("*.db"))
    assert python in (folder / "command.txt").read_text() and "training" in (folder / "log.txt").read_text()
    assert re.search(last, result.stdout.strip()), result.stdout
    assert ("because profilers before ROCm 7.2.2" in result.stdout) == (no_graph != "" and "compute" not in wrapper)
    assert "the profile holds start-up and warm-up too" in result.stdout


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name[:8])
def test_a_dry_run_names_the_version_of_the_folder_and_writes_nothing(folder, run):
    before = sorted(folder.rglob("*"))
    result = run(folder / "get_hotspots.sh", "--dry-run", "--preset", "medium", profilers="rocm-7.0")
    assert re.search(rf"-- \S+ tiny_llama_v{folder.name[7]}.py .*--preset medium$", result.stdout.splitlines()[-1])
    assert "--batch-size" not in result.stdout and sorted(folder.rglob("*")) == before  # a preset is not overruled


@pytest.mark.parametrize(
    ("version", "release", "arguments", "chosen"),
    [(3, "7.2.1", "", True), (4, "7.2.2", "", False), (3, "10.0", "", False), (3, "", "", True), (1, "6.2", "", False)]
    + [(3, "6.4", "--graph", False), (3, "6.4", "--no-graph", False)],
)
def test_the_release_decides_about_graphs(version, release, arguments, chosen, run):
    folder = SCRIPTS[version].parent
    result = run(folder / "get_trace.sh", "--dry-run", *arguments.split(), profilers="rocm-6.4", release=release)
    assert ("--no-graph --num-steps" in result.stdout) == ("because profilers before" in result.stdout) == chosen
    assert ("lose the kernels" in result.stderr) == (arguments == "--graph")


def test_options_after_two_hyphens_go_to_the_profiler(run):
    def last(wrapper, *arguments, **options):
        return run(wrapper, "--dry-run", *arguments, **options).stdout.splitlines()[-1]

    filters = ("--", "--kernel-iteration-range", "3")
    assert " -o kernels_%pid% --kernel-iteration-range 3 -- " in last("get_hotspots.sh", *filters, profilers="rocm-7.0")
    command = last("get_rocprof_compute.sh", "--kernel", "attn", "--roof", "--", "-b", "2", profilers="rocm-6.4")
    assert " -k attn -b 2 -- " in command and "roof" not in command.split(" profile ")[1].replace("rocprof", "")
    assert " --sample cputime --trace-wait 5 -- " in last(
        "get_rocprof_sys.sh", "--", "--sample", "cputime", "--trace-wait", "5", profilers="rocm-7.0"
    )
    result = run("get_counters.sh", "--dry-run", "--set", "lds", "--", "--launch-skip=9", profilers="nvidia")
    assert " --launch-skip=9 --export " in result.stdout
    result = run("get_trace.sh", "--profiler", "pytorch", "--", "--delay", "3")
    assert result.returncode == 2 and "no options after --" in result.stderr


def test_rocpd_is_converted(run, tmp_path):
    result = run("get_trace.sh", "--rocpd", "--output-dir", tmp_path / "results", profilers="rocm-10.0")
    folder = result_of(tmp_path / "results")
    assert result.returncode == 0 and (folder / "trace_results.pftrace").is_file(), result.stderr
    assert "attention_forward_kernel" in result.stdout and "rocpd summary -i" in result.stdout
    assert run("get_trace.sh", "--rocpd", profilers="rocm-6.4").returncode == 2


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


# ---------------------------------------------------------------- counters and limits


@pytest.mark.parametrize("release", ROCM)
def test_counters_are_read_in_passes(release, run, tmp_path):
    arguments = ("--set", "memory", "--pmc", "SQ_WAVES,GRBM_GUI_ACTIVE", "--use-amp", "--kernel", "attention")
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
        assert all("--kernel-names attention" in command for command in commands)
        assert (folder / "pass_0.txt").read_text() == "pmc: SQ_WAVES GRBM_GUI_ACTIVE\n"
    else:
        assert "--pmc SQ_WAVES GRBM_GUI_ACTIVE --kernel-include-regex attention --output-format" in commands[0]


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        ("--pmc SQ_WAVES no_such", 0, "did not come: no_such; 'rocprofv3 -L'"),
        ("--pmc no_such", 1, "none of the counters came: 'rocprofv3 -L'"),
        ("--pmc " + " ".join(f"SQ_{letter}" for letter in "ABCDEFGHI"), 134, "exit status 134"),
        ("--set registers", 2, "--set must be times, waves"),
        ("--set pc", 0, ""),
        ("--set pc --profiler pytorch", 2, "needs rocprofv3"),
    ],
)
def test_counters_that_do_not_come(arguments, status, words, run, tmp_path):
    arguments = (*arguments.split(), "--output-dir", tmp_path / "results")
    result = run("get_counters.sh", *arguments, profilers="rocm-7.0")
    assert result.returncode == status and words in result.stderr, result.stdout + result.stderr
    assert status == 0 or not [path for path in (tmp_path / "results").glob("*/*") if path.is_dir()]


def test_times_are_kept_where_counters_that_nobody_asked_for_fail(run, tmp_path):
    arguments = ("--output-dir", tmp_path / "results")
    result = run("get_counters.sh", *arguments, profilers="nvidia", STAND_IN_FAULT="no-permission")
    assert result.returncode == 0 and "times alone: no permission for the GPU's counters" in result.stderr
    assert (result_of(tmp_path / "results") / "kernels.csv").is_file()
    result = run("get_counters.sh", *arguments, "--pmc", profilers="nvidia", STAND_IN_FAULT="no-permission")
    assert result.returncode == 1 and "administrator" in result.stderr


def test_limits_of_an_old_layout_and_their_names(tmp_path):
    row = limits.analysed_kernel(SAMPLES / "rocprof-compute/analysis_0.txt")
    assert row["kernel"] == "vecCopy(double*, double*, double*, int, int)" and row["mean_us"] == 20
    assert (row["matrix"], row["memory"], row["occupancy"]) == (0.5, 25.6, None)
    assert limits.cells(f"│ {'a' * 40} │\n│ b │") == ["a" * 40 + "b"]  # cut within a word
    base = dict.fromkeys(limits.COLUMNS)
    for values, limit in (
        ({"memory": 83.0, "matrix": 10.0}, "memory bandwidth"),
        ({"matrix": 81.0, "compute": 85.0, "memory": 70.0}, "matrix units"),
        ({"compute": 60.0}, "compute units"),
        ({"memory": 59.9, "occupancy": 12.0}, "latency, few waves"),
        ({"occupancy": 50.0}, "latency"),
    ):
        assert limits.limit_of(base | values) == limit
    (tmp_path / "analysis_0.txt").write_text("no table")
    assert limits.main([str(tmp_path)]) == 1


# ---------------------------------------------------------------- faults


def says(text):
    return {"STAND_IN_STATUS": "1", "STAND_IN_SAYS": text}


@pytest.mark.parametrize(
    ("wrapper", "release", "environment", "status", "words"),
    [
        ("get_hotspots.sh -- --no-such", "7.0", {}, 2, "exit status 2: rocprofv3: error: unrecognized"),
        ("get_hotspots.sh", "7.0", {"STAND_IN_STATUS": "3"}, 3, "ended with exit status 3"),
        ("get_hotspots.sh", "7.0", {"STAND_IN_STATUS": "130"}, 130, "interrupted"),
        ("get_trace.sh", "7.0", {"STAND_IN_FAULT": "no-report"}, 1, "left no *.pftrace"),
        ("get_trace.sh", "7.0", says("No space left on device"), 1, "disk is full"),
        ("get_trace.sh", "7.0", says("\x1b[31mNo module named 'torch'"), 1, "has no PyTorch"),
        ("get_trace.sh", "7.0", says("No HIP GPUs are available"), 1, "same ROCm release"),
        ("get_trace.sh", "7.0", says("Unable to open /dev/kfd read-write"), 1, "groups render and video"),
        ("get_rocprof_compute.sh", "7.0", {"STAND_IN_FAULT": "unsupported"}, 1, "Cannot find a supported arch"),
        ("get_rocprof_compute.sh", "6.3", {"STAND_IN_FAULT": "no-locale"}, 1, "the 'en_US.UTF-8' locale"),
        ("get_rocprof_compute.sh", "6.4", {"STAND_IN_FAULT": "no-packages"}, 1, "astunparse, dash: install them with"),
        ("get_rocprof_compute.sh", "10.0", {"STAND_IN_FAULT": "no-kernels"}, 1, "left no pmc_perf.csv"),
        ("get_rocprof_sys.sh", "7.0", {"STAND_IN_FAULT": "no-report"}, 1, "left no *.proto"),
        *((wrapper, "6.4", {"STAND_IN_FAULT": "no-kernels"}, 1, "") for wrapper in WRAPPERS),
    ],
)
def test_a_failure_is_one_sentence_with_its_status_and_no_result(
    wrapper, release, environment, status, words, run, tmp_path
):
    target = tmp_path / "results"
    wrapper, *options = wrapper.split()
    result = run(wrapper, "--output-dir", target, *options, profilers=f"rocm-{release}", **environment)
    assert result.returncode == status
    said = [line for line in result.stderr.splitlines() if line.startswith(f"{wrapper}: ") and "warning" not in line]
    assert len(said) == 1 and words in said[0] and "\x1b" not in said[0], result.stderr
    assert not SUCCESS.search(result.stdout) and not [path for path in target.glob("*/*") if path.is_dir()]
    logs = list(target.glob("*/*_failed.log"))  # none where nothing was started
    assert len(logs) == ("no-packages" not in environment.values())


def test_bad_options_and_places(run, tmp_path):
    (tmp_path / "file").touch()
    for arguments, status, words in (
        (["--profiler", "vtune"], 2, "must be auto"),
        (["--output-dir"], 2, "needs a value"),
        (["--nproc-per-node", "0"], 2, "must be 1 or more"),
        (["--output-dir", tmp_path / "file"], 1, "choose a writable folder with --output-dir"),
    ):
        result = run("get_trace.sh", *arguments, profilers="rocm-6.4")
        assert result.returncode == status and words in result.stderr and "\ntraining" not in result.stdout


def test_wrappers_run_from_anywhere_and_with_spaces_in_paths(run, tmp_path):
    copy = tmp_path / "a copy" / FOLDER.name
    shutil.copytree(FOLDER, copy, symlinks=True)
    (tmp_path / "a copy" / "scripts").symlink_to(REPOSITORY / "scripts")
    result = run(copy / "get_hotspots.sh", profilers="rocm-6.4", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert len(list(copy.glob("hotspots/hotspot_*/hotspots.csv"))) == 1
    (shown,) = copy.glob("hotspots/hotspot_*/command.txt")  # as it could be typed
    assert str(copy / "tiny_llama_v3.py") in shlex.split(shown.read_text())
    for release, refused in (("6.4", True), ("7.0", True), ("10.0", False)):
        result = run(copy / "get_rocprof_compute.sh", profilers=f"rocm-{release}", cwd=tmp_path)
        assert result.returncode == refused and ("splits the command at spaces" in result.stderr) == refused
    arguments = ("--output-dir", os.path.relpath(tmp_path / "there", FOLDER))  # rocprof-compute refuses a path with ..
    assert run("get_rocprof_compute.sh", *arguments, profilers="rocm-7.0").returncode == 0
    assert list((tmp_path / "there").rglob("limits.csv"))


# ---------------------------------------------------------------- NVIDIA

NSYS = "--nvtx-capture=measured steps --capture-range-end=stop --env-var=NSYS_NVTX_PROFILER_REGISTER_ONLY=0"
NCU = "ncu --nvtx --nvtx-push-pop-scope process --nvtx-include measured steps/ "


@pytest.mark.parametrize("wrapper", [*WRAPPERS, "get_counters.sh --pmc"])
def test_nvidia_profilers_leave_the_same_kind_of_result_of_the_measured_steps(wrapper, run, tmp_path):
    wrapper, *counters = wrapper.split()
    arguments = ("--output-dir", tmp_path / "results", "--preset", "small", *counters)
    result = run(wrapper, *arguments, profilers="nvidia")
    assert result.returncode == 0, result.stdout + result.stderr
    folder, commands = result_of(tmp_path / "results"), recorded(tmp_path)
    for command in commands:
        if command.startswith("ncu"):  # which repeats every kernel that it looks at: one launch of each
            assert command.startswith(NCU) and "--kernel-id ::regex:.:1 --export" in command and "demangled" in command
        else:
            assert NSYS in command and "--cuda-graph-trace=node" in command
    assert [command.split()[0] for command in commands] == {
        "get_counters.sh": ["ncu"] if counters else ["nsys", "ncu"],
        "get_rocprof_compute.sh": ["ncu"],
    }.get(wrapper, ["nsys"])
    if wrapper in ("get_trace.sh", "get_rocprof_sys.sh"):
        assert re.search(r"attention +1 +0.004[^#]*\nopen \S+/report.nsys-rep with Nsight Systems", result.stdout)
    elif wrapper == "get_rocprof_compute.sh":
        assert re.search(r"nvjet_\S+ +6.0 +42.0 .*compute units", result.stdout)
    elif wrapper == "get_counters.sh":
        assert re.search(r"nvjet_\S+ +2 +6,000.0 +61.0", result.stdout)
        assert (folder / "kernels.csv").exists() != bool(counters)


def test_ncu_that_finds_no_kernel_in_the_steps_looks_at_the_whole_run(run, tmp_path):
    arguments = ("--output-dir", tmp_path / "results")
    result = run("get_rocprof_compute.sh", *arguments, profilers="nvidia", STAND_IN_FAULT="no-range")
    assert result.returncode == 0 and "it now looks at the whole run" in result.stderr, result.stderr
    assert [command.startswith(NCU) for command in recorded(tmp_path)] == [True, False]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_recording_that_nsys_cannot_import_is_kept_and_named(ranks, run, tmp_path):
    """As in an image without the libraries of Nsight Systems' host part."""
    arguments = ("--output-dir", tmp_path / "results", "--nproc-per-node", ranks)
    result = run("get_hotspots.sh", *arguments, profilers="nvidia", STAND_IN_FAULT="no-import")
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
    (tmp_path / "rocm" / "bin" / "rocprofv3").symlink_to(STUBS / "rocm-7.0" / "rocprofv3")
    text = run("get_hotspots.sh", "--dry-run", "--profiler", "rocm", release="7.0").stdout
    assert "uses rocprofv3 of ROCm 7.0, because it was asked for" in text


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
    slow = f"*run_deepspeed*) touch '{tmp_path}/started'; exec sleep 60 ;; *run_pytorch*) exit 0 ;;"
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


@pytest.mark.parametrize(
    ("version", "wrapper", "product"),
    [(1, "get_trace.sh", None), (2, "get_rocprof_compute.sh", "kernels.csv"), (4, "get_counters.sh", "kernels.csv")],
)
def test_without_any_profiler_pytorch_leaves_the_same_kind_of_result(version, wrapper, product, run, tmp_path):
    machine = {"TINY_LLAMA_CPU": "1", "TINY_LLAMA_PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""}
    options = "--profiler pytorch --num-steps 1 --warmup-steps 1 --profile-steps 1 --device cpu".split()
    result = run(SCRIPTS[version].parent / wrapper, "--output-dir", tmp_path / "results", *options, **machine)
    assert result.returncode == 0, result.stdout + result.stderr
    folder = result_of(tmp_path / "results")
    trace = next(folder.glob("trace_*.json"))
    assert len(json.loads(trace.read_text())["traceEvents"]) > 100
    assert "aten::mm" in ((folder / product).read_text() if product else result.stdout)
    assert f"open {trace}" in result.stdout or "times alone" in result.stdout + result.stderr
