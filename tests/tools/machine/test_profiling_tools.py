"""run_pytorch_profiler.py and run_all_profilers.sh, from the folders that offer them."""

import contextlib
import functools
import io
import json
import math
import os
import pathlib
import re
import shutil
import subprocess
import sys
from unittest import mock

import pytest
import torch

import run_pytorch_profiler as profiler
from common import command_line, report
from common.command_line import Failure, run_tool, version_meant
from common.formulas import tf32
from common.machine import environment, gemm_probe
from common.machine import room as common_room
from common.profiles import read_profile
from common.step_parts import GROUPS
from common.tables import markdown_table, rounded
from common.versions import REPOSITORY, SCRIPTS
from in_process import refused, restored_settings, run_here
from kernel_cases import CASES
from maintain import room_reports
from marks import slow
from processes import executable, run_fork

STUBS, SAMPLES = (pathlib.Path(__file__).parents[1] / name for name in ("stubs", "samples"))
SMALL = "--batch-size 2 --seq-len 32 --hidden-dim 64 --num-layers 2 --num-heads 4 --device cpu".split()


def call(version, tool, *arguments, cwd=None, **environment):
    """Run a tool as its version's folder offers it."""
    folder = SCRIPTS[version].parent
    program = sys.executable if tool.endswith(".py") else "bash"
    command = [program, tool if cwd is None else folder / tool, *map(str, arguments)]
    return subprocess.run(command, cwd=cwd or folder, env={**os.environ, **environment}, capture_output=True, text=True)


def test_the_folder_tells_the_version(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for version, script in SCRIPTS.items():
        monkeypatch.setattr(sys, "argv", [str(script.parent / "run_pytorch_profiler.py")])
        assert version_meant() == version
        assert version_meant(2) == 2
    monkeypatch.setattr(sys, "argv", [str(profiler.__file__)])
    with pytest.raises(Failure, match="--version"):
        version_meant()
    monkeypatch.chdir(SCRIPTS[4].parent)
    assert version_meant() == 4


@pytest.mark.parametrize(
    ("argv", "on_the_cpu", "small", "first_batch"),
    [
        ("", False, False, True),
        ("--device cuda:1", False, False, True),
        ("--device cpu", True, True, True),
        ("--device=cpu --batch-size 3", True, True, True),
        ("--device cuda --device cpu --preset tiny", True, False, False),
        ("--device cpu --device cuda --preset=tiny", False, False, False),
        ("--device=cpu --preset=tiny", True, False, False),
        ("--device=cpu --num-layers=3", True, False, True),
        ("--device cpu --hidden-dim 32", True, False, True),
    ],
)
def test_sizes_that_the_tools_add_overrule_none_that_are_given(argv, on_the_cpu, small, first_batch, monkeypatch):
    """On a machine with a GPU; an option and its value may be one word."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    given = argv.split()
    assert command_line.on_cpu(given) == on_the_cpu == (os.environ["TRITON_INTERPRET"] == "1")
    assert command_line.with_sizes(given) == command_line.CPU_SIZES * small + given
    assert command_line.with_first_batch(given) == ["--batch-size", "8", "--seq-len", "128"] * first_batch + given


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (ModuleNotFoundError(name="torch"), 1, "has no torch: run `source .venv/bin/activate` first"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_what_ends_any_tool_is_said_in_one_sentence(error, status, said, capsys):
    refused(lambda _: run_tool("a_tool.py", mock.Mock(side_effect=error)), [], capsys, said, status)


# ---------------------------------------------------------------- run_pytorch_profiler.py


@pytest.fixture(scope="module")
def profile_folder(tmp_path_factory):
    """Run run_pytorch_profiler.py once; return the folder that it leaves."""
    folder = tmp_path_factory.mktemp("profile") / "fusion analysis"
    folder.mkdir()
    earlier = folder / "trace_v2_0.json"
    earlier.write_text("{}")
    arguments = (*SMALL, "--num-steps", "2", "--profile-steps", "2", "--profile-dir", folder, "--generate-report")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "run", run_here)
        result = run_here([sys.executable, SCRIPTS[2].parent / "run_pytorch_profiler.py", *arguments])
    assert result.returncode == 0, result.stdout + result.stderr
    assert "trace_v2_" in result.stdout and "aten::mm" in result.stdout
    earlier.unlink()
    return folder


def test_lines_of_pytorchs_own_are_left_out(monkeypatch, tmp_path):
    """They look like errors: USDT, and memory blocks of unknown size."""
    ended = mock.Mock(return_value=mock.Mock(returncode=7))
    monkeypatch.setattr(subprocess, "run", ended)
    monkeypatch.setenv("KINETO_LOG_LEVEL", "0")  # the user's
    with pytest.raises(Failure):
        profiler.profile(1, tmp_path, [])
    given = ended.call_args.kwargs["env"]
    assert given == os.environ | {"TORCH_CPP_LOG_LEVEL": "ERROR"} and given["KINETO_LOG_LEVEL"] == "0"


def test_a_profile_holds_kernels_figures_and_a_trace(profile_folder):
    content = json.loads(next(profile_folder.glob("profile_v2_*.json")).read_text())
    assert (content["version"], content["steps_profiled"], content["config"]["hidden_dim"]) == (2, 2, 64)
    assert sum(row["share_percent"] for row in content["groups"]) == pytest.approx(100)
    trace = json.loads((profile_folder / content["trace"]).read_text())
    calls = sum(event.get("name") == "aten::mm" and event["ph"] == "X" for event in trace["traceEvents"])
    assert calls == next(row["calls"] for row in content["kernels"] if row["kernel"] == "aten::mm") > 0
    text = (profile_folder / "profiling_report.md").read_text()
    gemms = next(row for row in content["groups"] if row["group"] == "GEMM")
    assert f"| GEMM | {gemms['calls'] / 2:,.0f} | {rounded(gemms['total_us'] / 2e3)} |" in text
    assert f"| peak memory MiB | {content['summary']['peak_memory_mb']:,.0f} |" in text
    assert f"| step, median ms | {rounded(content['summary']['step_ms']['median'])} |" in text
    assert "interpreter" not in text and "- sizes: 2 layers, width 64," in text
    assert "- command: python tiny_llama_v2.py --num-steps 5 " in text
    assert f"--profile-dir '{profile_folder.name}' --metrics-file metrics_v2.json" in text  # no folder of the machine
    peak = max(e["args"]["Total Allocated"] for e in trace["traceEvents"] if e["name"] == "[memory]") / 2**20
    page = (profile_folder / "memory_timeline.html").read_text()
    assert f"Peak {peak:,.1f} MiB" in page and "version 2, 2 x 32 tokens" in page
    assert page.count("<title>forward,") == 2 and "http" not in page


def test_the_report_of_interpreted_kernels_says_so_at_each_table(profile_folder, tmp_path):
    content = json.loads(next(profile_folder.glob("trace_*.json")).read_text())
    content["tiny_llama"]["version"] = 3
    (tmp_path / "trace_v3.json").write_text(json.dumps(content))
    assert profiler.main(["--analyze-existing", str(tmp_path), "--generate-report"]) == 0
    text = (tmp_path / "profiling_report.md").read_text()
    assert text.count("ran in Triton's interpreter") == 2 and "# Profile of version 3" in text


def test_on_a_gpu_the_memory_of_the_gpu_is_shown(make_trace):
    def event(ts, device, total):
        return {"name": "[memory]", "ph": "i", "ts": ts, "args": {"Device Type": device, "Total Allocated": total}}

    trace = make_trace("p/trace.json", {"gemm": 1})
    content = json.loads(trace.read_text())
    content["traceEvents"] += [event(2000.0, 1, 3 * 2**20), event(1000.0, 0, 2**30), event(1500.0, 1, 2**20)]
    trace.write_text(json.dumps(content))
    page = profiler.memory_timeline(read_profile(trace))
    assert "Peak 3.0 MiB after 0.500 ms, 2 allocations and releases: all tensors" in page and "MI300X" in page
    assert 'viewBox="0 0 0.5 3.0"' in page and 'd="M0 2H0V2H0.5V0"' in page  # 2 MiB below the peak of 3, then 3


def test_the_line_of_memory_keeps_its_peak_when_it_is_thinned():
    points = [(float(i), 1.0) for i in range(5000)]
    points[3334] = (3334.0, 9.0)
    thin = report.thinned(points)
    assert len(thin) <= 2000 and (3334.0, 9.0) in thin
    # less than at the beginning: what was freed was allocated before
    page = report.page("", [], [], [("", [report.memory_over_time([(0.0, -1.0), (1.0, 3.0)], [], "")])])
    assert 'viewBox="0 0 1.0 4.0"' in page and 'd="M0 4H0V4H1V0"' in page


def test_every_group_has_a_colour_of_its_own_in_light_and_dark():
    times = {group: {"ms": 1.0} for group in GROUPS}
    columns = {"version 1": times | {"all": {"ms": float(len(GROUPS))}}}
    page = report.page("", [], [], [("", [report.group_bars(columns, "kernels")])])
    pieces = re.findall(r'class="piece (c\d+)" style="width:([\d.]+)%', page)
    assert sum(float(width) for _, width in pieces) == pytest.approx(100)
    colors = [color for color, _ in pieces]
    assert len(set(colors)) == len(GROUPS)
    for color in colors:
        assert f".{color} {{ --c: var(--{color}); }}" in page and page.count(f"--{color}: #") == 2
    for scheme in re.findall(r":root \{[^}]*\}", page):
        assert len(set(re.findall(r"--c\d+: (#\w+)", scheme))) == len(GROUPS)


@pytest.mark.parametrize("with_memory", [True, False])
def test_the_guides_two_commands_leave_every_file(with_memory, profile_folder, tmp_path):
    """The script alone leaves a trace; --analyze-existing, whose pattern finds nothing yet, makes the rest of it."""
    trace = pathlib.Path(shutil.copy(next(profile_folder.glob("trace_*.json")), tmp_path))
    if not with_memory:  # as profile.sh leaves it
        content = json.loads(trace.read_text())
        content["traceEvents"] = [event for event in content["traceEvents"] if event["name"] != "[memory]"]
        trace.write_text(json.dumps(content))
    result = call(1, "run_pytorch_profiler.py", "--analyze-existing", tmp_path / "profile_*.json")
    assert result.returncode == 0 and "aten::mm" in result.stdout and f"newest trace in {tmp_path}" in result.stdout
    assert (tmp_path / "memory_timeline.html").exists() == with_memory
    assert ("--profile-memory" in result.stdout) != with_memory
    (made,) = tmp_path.glob("profile_v*_*.json")
    made.write_text(json.dumps(json.loads(made.read_text()) | {"kernels": [], "measured": "kept"}))
    again = call(1, "run_pytorch_profiler.py", "--analyze-existing", made, "--generate-report")
    assert again.returncode == 0 and "## Groups of operators in 2" in (tmp_path / "profiling_report.md").read_text()
    content = json.loads(made.read_text())
    assert list(tmp_path.glob("profile_v*_*.json")) == [made] and content["kernels"] and content["measured"] == "kept"


def test_bad_input_of_the_profiler_is_one_sentence(tmp_path, capsys):
    table = SAMPLES / "rocm-6.4" / "kernel_trace.csv"
    refused(profiler.main, ["--analyze-existing", "nowhere.json"], capsys, "does not exist")
    refused(profiler.main, ["--analyze-existing", "x.json", "--use-amp"], capsys, "has no effect")
    refused(profiler.main, ["--analyze-existing", table], capsys, "isn't a trace of versions 1 to 4: read it with")
    refused(profiler.main, ["--version", "9"], capsys, "invalid choice")
    refused(profiler.main, ["--version", "1", "--profile-dir", __file__], capsys, "cannot be made", 1)
    result = call(1, "run_pytorch_profiler.py", "--num-heads", "5", cwd=tmp_path)
    assert result.returncode == 2 and result.stderr.startswith("tiny_llama_v1.py: error: --hidden-dim")
    assert len(result.stderr.splitlines()) == 1


# ---------------------------------------------------------------- run_all_profilers.sh


@pytest.mark.slow
def test_all_profilers_run_and_missing_ones_are_named(one_process, tmp_path):
    """The tools' commands are noted, and run here: PyTorch is imported already."""
    documented = "--batch-size 8 --seq-len 128 --enable-rocm-tools --profile-dir ./complete_rocm_analysis".split()
    options = [*documented, *SMALL, "--num-steps", "1", "--warmup-steps", "1", "--profile-steps", "1"]
    noted = f"case $1 in *run_*.py) printf '%s\\n' \"$@\" '' >>'{tmp_path}/noted' && exit ;; esac"  # a word a line
    text = f"#!/bin/sh\n{noted}\nexec '{sys.executable}' \"$@\"\n"
    machine = {"TINY_LLAMA_CPU": "1", "TINY_LLAMA_PYTHON": str(executable(tmp_path / "python", text))}
    result = call(2, "run_all_profilers.sh", *options, cwd=tmp_path, **machine)
    assert result.returncode == 0, result.stdout + result.stderr
    outcome = result.stdout.split("=== all profilers")[1]
    assert "done     run_pytorch_profiler.py" in outcome and "done     run_deepspeed_flops.py" in outcome
    assert len(re.findall(r"^missing  get_\w+\.sh: (there is no GPU|\S+ is installed)", outcome, re.MULTILINE)) == 5
    for command in (tmp_path / "noted").read_text().split("\n\n")[:-1]:
        done = run_here([sys.executable, *command.splitlines()], cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
    folder = tmp_path / "complete_rocm_analysis"
    assert read_profile(folder / "pytorch_profiles").metadata["hidden_dim"] == 64  # of the options for the script
    assert (folder / "pytorch_profiles" / "profiling_report.md").exists()
    assert json.loads((folder / "flops_analysis" / "flops_profile.json").read_text())["version"] == 2


@pytest.mark.slow
def test_all_profilers_go_on_after_a_failure_and_end_with_1(tmp_path):
    text = f'#!/bin/sh\ncase $1 in *run_*.py) exit 2 ;; esac\nexec "{sys.executable}" "$@"\n'
    machine = {"PATH": f"{STUBS / 'nvidia'}{os.pathsep}{os.environ['PATH']}", "TINY_LLAMA_CPU": ""}
    machine["TINY_LLAMA_PYTHON"] = str(STUBS / "training_python")
    machine |= {"STAND_IN_PYTHON": str(executable(tmp_path / "python", text)), "STAND_IN_FAULT": "no-permission"}
    result = call(2, "run_all_profilers.sh", "--enable-rocm-tools", cwd=tmp_path, **machine)
    outcome = result.stdout.split("=== all profilers")[1].splitlines()[1:]
    failed = [f"FAILED   {name}.py (exit status 2)" for name in ("run_pytorch_profiler", "run_deepspeed_flops")]
    assert result.returncode == 1 and outcome[:2] == failed
    assert [line.split()[0] for line in outcome[2:]] == ["done", "done", "PARTLY", "done", "FAILED"]
    assert list(tmp_path.glob("all_profiles/counters/*/kernels.csv"))
    (table,) = tmp_path.glob("all_profiles/hotspots/hotspot_*/hotspots.csv")
    assert ",attention_forward_kernel" in table.read_text()


@pytest.mark.parametrize(
    ("statuses", "wanted"), [("00000", 0), ("03000", 3), ("30001", 1), ("10003", 1), ("00900", 1), ("3 130 0 0 0", 130)]
)
def test_all_profilers_end_with_a_failure_before_a_part(statuses, wanted, tmp_path):
    """In whatever order they come; Ctrl-C ends them."""
    folder = tmp_path / "version1_stub"
    folder.mkdir()
    ends = statuses.split() if " " in statuses else statuses
    for wrapper, status in zip("hotspots trace counters rocprof_sys rocprof_compute".split(), ends, strict=True):
        executable(folder / f"get_{wrapper}.sh", f'echo "get_x.sh: uses x"\n[ "$1" = --dry-run ] || exit {status}\n')
    environment = os.environ | {"TINY_LLAMA_PYTHON": str(executable(tmp_path / "python", "#!/bin/sh\nexit 0\n"))}
    command = ["bash", REPOSITORY / "scripts" / "run_all_profilers.sh", "--enable-rocm-tools"]
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    words = [line.split()[0] for line in result.stdout.split("=== all profilers")[1].splitlines()[1:]]
    assert result.returncode == wanted and words[:2] == ["done"] * 2, result.stderr
    names = {"0": "done", "3": "PARTLY", "1": "FAILED", "9": "FAILED", "130": "stopped"}
    shown = [names[status] for status in ends]
    assert words[2:] == (["PARTLY", "stopped", "not", "not", "not"] if wanted == 130 else shown)


@pytest.mark.parametrize("profilers", ["nvidia", None])
@pytest.mark.quick(1)
def test_all_profilers_print_their_commands(profilers, tmp_path):
    """As the wrappers do. The training script took --dry-run for an option of its own, and everything failed."""
    paths = [str(STUBS / profilers)] if profilers else []
    machine = {"PATH": os.pathsep.join([*paths, os.environ["PATH"]]), "TINY_LLAMA_CPU": "", "STAND_IN_RECORD": ""}
    options = ["--enable-rocm-tools", "--dry-run", "--profile-dir", str(tmp_path / "new"), "--preset", "tiny"]
    result = call(2, "run_all_profilers.sh", *options, "--profile-steps", "4", cwd=tmp_path, **machine)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert [line.split("/scripts/")[1] for line in lines if "/run_" in line] == [
        f"run_pytorch_profiler.py --version 2 --profile-dir {tmp_path}/new/pytorch_profiles "
        "--generate-report --profile-steps 4 --preset tiny",
        f"run_deepspeed_flops.py --version 2 --profile-dir {tmp_path}/new/flops_analysis "
        "--computational-intensity --preset tiny",
    ]
    assert bool([line for line in lines if line.startswith("nsys profile")]) == bool(profilers)
    assert not {"done", "FAILED"} & {line.split()[0] for line in lines if line} and not list(tmp_path.iterdir())
    assert len([line for line in lines if line.startswith("missing ")]) == (0 if profilers else 5)


def test_a_version_that_is_not_there_is_refused(tmp_path):
    result = call(1, "run_all_profilers.sh", "--version", "7", cwd=tmp_path)
    assert result.returncode == 2 and "--version 1, 2, 3 or 4" in result.stderr
    command = ["bash", REPOSITORY / "scripts" / "run_all_profilers.sh", "--profile-dir", __file__]  # not its link
    result = subprocess.run(command, cwd=SCRIPTS[1].parent, capture_output=True, text=True)
    assert result.returncode == 1 and "cannot be made: choose a writable folder" in result.stderr


def test_all_profilers_take_a_value_after_an_equals_sign(tmp_path):
    """The tools took it and left their results there, and the summary named the folder that it had not left."""
    python = executable(tmp_path / "python", '#!/bin/sh\necho "called $*"\n')
    environment = os.environ | {"TINY_LLAMA_PYTHON": str(python), "TINY_LLAMA_CPU": "1"}
    options = ["--profile-dir=my results", "--version=2", "--lr=3"]
    command = ["bash", REPOSITORY / "scripts" / "run_all_profilers.sh", *options]
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert result.returncode == 0 and "results in my results\n" in result.stdout, result.stderr
    calls = [line for line in result.stdout.splitlines() if line.startswith("called")]
    assert len(calls) == 2 and all(" --version 2 --profile-dir my results/" in line for line in calls)
    assert all(line.endswith(" --lr=3") and "=my" not in line for line in calls)


# ---------------------------------------------------------------- check_room.sh

ROOM_ENVIRONMENT = """
ROOT=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../../.." && pwd -P)
say() { printf '%s\\n' "$*" >&2; }
usage() { echo usage; }
gpu_kind() { echo "$ROOM_GPU"; }
use_environment() { PYTHON=$ROOM_PYTHON && say "the environment of: $1"; }
"""
ROOM_PYTHON = """#!/bin/sh
case "$*" in
    *"room.py facts") [ -z "$ROOM_FACTS" ] || exec "{python}" "$@" ;; # imports PyTorch
    *room.py*) exec "{python}" "$@" ;;
    *v2.py*--validate-setup)
        [ -z "$ROOM_SOUND" ] || exit 0
        echo Traceback; echo "RuntimeError: $USER at $(hostname) in $HOME/x" >&2; exit 1 ;;
    *logs/steps_*) for file; do :; done; cp "$ROOM_STEPS" "$file" ;;
    *--metrics-file*)
        for file; do :; done
        case "$*" in *--graph*) loss=$ROOM_LOSS ;; *) loss=2.5 ;; esac
        summary='"summary": {{"graph": {{"captured": true}}}}' options='"options": {{"use_amp": false, "tf32": false}}'
        rest='"version": 4, "config": {{}}, "environment": {{}}'
        echo '{{"steps": [{{"loss": '$loss'}}], '"$summary, $options, $rest"'}}' >"$file" ;;
    *) echo fine && printf '%s\\n' "$@" ;;
esac
"""


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """Return a checkout of stubs."""
    checkout = tmp_path_factory.mktemp("checkout")
    for version, script in SCRIPTS.items():
        folder = checkout / script.parent.name
        folder.mkdir(parents=True)
        (folder / script.name).touch()
        for wrapper in ("hotspots", "trace", "counters", "rocprof_compute", "rocprof_sys"):
            ends = "${ROOM_COUNTERS:-exit 3}" if wrapper == "counters" else "exit 0"
            says = f'echo "get_x.sh: V{version} uses rocprofv3"\necho "open $2/x.json"\n{ends}\n'
            executable(folder / f"get_{wrapper}.sh", says)
    shutil.copytree(REPOSITORY / "scripts" / "common", checkout / "scripts" / "common", symlinks=True)
    shutil.copy(REPOSITORY / "scripts" / "check_room.sh", checkout / "scripts")
    shutil.copy(REPOSITORY / "pyproject.toml", checkout)
    (checkout / "scripts" / "common" / "machine" / "environment.sh").write_text(ROOM_ENVIRONMENT)
    executable(checkout / "python", ROOM_PYTHON.format(python=sys.executable))
    return checkout


def check_room(checkout, folder, *arguments, **variables):
    """Run check_room.sh in a folder; return the process, the text and the words that the kernels' tests have."""
    machine = {"USER": "jdoe", "ROOM_PYTHON": str(checkout / "python"), "ROOM_GPU": "amd", "ROOM_LOSS": "2.5"}
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", **machine, **variables}
    command = ["bash", checkout / "scripts" / "check_room.sh", *arguments]
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    text, tests = folder / "check_room.txt", folder / "check_room.txt.logs" / "kernel_tests.txt"
    words = tests.read_text().splitlines()[1:] if tests.exists() else []
    return result, text.read_text() if text.exists() else "", words


@pytest.fixture
def room(checkout, tmp_path):
    return functools.partial(check_room, checkout, tmp_path)


@pytest.fixture(scope="module")
def whole_room(checkout, tmp_path_factory):
    """Run check_room.sh once as its users do."""
    return check_room(checkout, tmp_path_factory.mktemp("room"), ROOM_FACTS="1")


def collected(words, **variables):
    """Return the tests that these words of `python` choose."""
    assert words[:2] == ["-m", "pytest"]
    done = run_fork(
        pytest.__path__[0] + "/__main__.py",
        *words[2:],
        "--collect-only",
        cwd=REPOSITORY,
        env={**os.environ, **variables},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_check_room_writes_a_table_and_a_text_without_names(whole_room):
    result, text, _ = whole_room
    assert result.returncode == 1, result.stderr  # V2 failed, and the counters came only in part
    outcomes = dict(re.findall(r"^(\S.*?)  +(ok|partly|FAILED \(\d+\)|not run) ", result.stdout, re.MULTILINE))
    assert (
        outcomes.pop("set-up check of tiny_llama_v2.py") == "FAILED (1)" and outcomes.pop("get_counters.sh") == "partly"
    )
    assert set(outcomes.values()) == {"ok"} and len(outcomes) == 2 + 3 + 2 + 4 + 1
    assert "losses of the graph and of eager steps agree to 0.0e+00" in text and "V3 uses rocprofv3" in text
    assert re.search(r"^get_trace.sh +ok +\d+ +open profiles/x.json *$", text, re.MULTILINE)
    shown = text.split("=== the last lines of: set-up check of tiny_llama_v2.py\n")[1]
    assert shown.startswith("Traceback\nRuntimeError: USER at HOST in HOME/x")
    assert "jdoe" not in text and str(pathlib.Path.home()) + "/" not in text and os.uname().nodename not in text


def test_a_repository_in_the_home_folder_is_called_so(monkeypatch, capsys):
    """Not HOME/..., which shows how its owner called the folder. The names of host and user go as whole words only."""
    monkeypatch.setattr(pathlib.Path, "home", lambda: pathlib.Path("/home/jdoe"))
    monkeypatch.setattr("platform.node", lambda: "gpu07.site.org")
    monkeypatch.setenv("USER", "jdoe")
    said = "/home/jdoe/secret/a.py in /home/jdoe/b, /data/room.txt.logs/c, "
    said += "jdoe on gpu07.site.org and gpu07: jdoes, gpu070\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(said))
    common_room.scrub("/home/jdoe/secret", "/data/room.txt.logs")
    assert capsys.readouterr().out == "REPOSITORY/a.py in HOME/b, LOGS/c, USER on HOST and HOST: jdoes, gpu070\n"


def test_a_report_names_no_path_that_a_shell_would_quote(monkeypatch, capsys):
    """A wrapper shows its command as it could be typed, and JSON doubles the backslashes of such a path."""
    typed = r"/home/jdoe/my\ lab\ \(1\)/a.py"
    said = f"{typed} {json.dumps(typed)} '/home/jdoe/my lab (1)/b' /home/jdoe/my/c\n"
    monkeypatch.setattr(pathlib.Path, "home", lambda: pathlib.Path("/home/jdoe"))
    monkeypatch.setattr(sys, "stdin", io.StringIO(said))
    common_room.scrub("/home/jdoe/my lab (1)", "/home/jdoe/my lab (1)/room.txt.logs")
    assert capsys.readouterr().out == "REPOSITORY/a.py \"REPOSITORY/a.py\" 'REPOSITORY/b' HOME/my/c\n"


@pytest.mark.parametrize(
    ("counters", "outcome", "status"),
    [
        ("exit 3", "partly", 1),
        ("exit 137", "FAILED (killed)", 1),
        slow("exec sleep 60", "FAILED (time)", 1),
        slow("exit 0", "ok", 0),
    ],
)
def test_check_room_ends_with_1_unless_every_line_is_whole(counters, outcome, status, room):
    result, text, _ = room("--time-limit", "3", ROOM_GPU="none", ROOM_SOUND="1", ROOM_COUNTERS=counters)
    assert result.returncode == status, result.stdout
    assert re.search(rf"^get_counters.sh +{re.escape(outcome)} ", text, re.MULTILINE), text
    assert ("the last lines of: get_counters.sh" in text) == bool(status) and "FAILED (1)" not in text


@pytest.mark.slow
def test_check_room_needs_no_more_than_it_installs(whole_room):
    """Neither plugins of pytest nor linters: on a machine without a network they cannot be had."""
    result, _, words = whole_room
    assert "the environment of: room\n" in result.stderr
    assert {name for name, *_ in environment.requirements("room")} == {"torch", "numpy", "triton", "pytest"}
    found = collected(words, PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
    tested = re.findall(r"test_outputs_and_gradients\[(\w+)-(.+?)-torch", found)
    assert {operation for operation, _ in tested} == CASES.keys() and "::test_adamw[" in found
    attention = [CASES[operation][name]() for operation, name in tested if operation.endswith("attention")]
    assert {case.inputs["qkv"].shape[-1] for case in attention} == {64}, (
        "each other width of a head is tuned: 18 compilations"
    )


OF_A_RUN = {
    "version": 4,
    "config": {},
    "options": {"use_amp": True, "metrics_file": "/data/somebody/room.txt.logs/steps.json", "data": "/data/somebody"},
    "environment": {},
    "steps": [],
    "summary": {
        "step_ms": {"p25": 1.9, "median": 2.0, "p75": 2.1},
        "warmup_s": 3.0,
        "tokens_per_second": 4000.0,
        "peak_memory_mb": 12.0,
        "precision": "bfloat16",
        "graph": {"captured": True},
        "first_loss": 5.5,
        "final_loss": 4.25,
        "parameters": 100,
        "parameters_trained": 100,
    },
}
RESULTS_OF_TESTS = """<testsuites><testsuite>
<testcase name="test_outputs_and_gradients[swiglu-rows-torch.float32]"><properties>
<property name="y" value="1.50e-07" /><property name="dgate" value="{error}" /></properties></testcase>
<testcase name="test_outputs_and_gradients[swiglu-rows-torch.bfloat16]"><failure message="Wrong"/></testcase>
<testcase name="test_adamw[torch.float32-False]" /><testcase name="test_tiles"><skipped /></testcase>
<testcase name="test_adamw[torch.bfloat16-False]"><error message="failed on setup"/></testcase>
</testsuite></testsuites>"""


@pytest.fixture
def logs(tmp_path):
    """Return a folder of logs as check_room.sh leaves it on a GPU."""
    (tmp_path / "facts.txt").write_text("GPU         Toy GPU\n")
    (tmp_path / "kernels.xml").write_text(RESULTS_OF_TESTS.format(error="2.50e-07"))
    (tmp_path / "interpreted.xml").write_text(RESULTS_OF_TESTS.format(error="1.25e-07"))
    (tmp_path / "steps_tiny_llama_v4.json").write_text(json.dumps(OF_A_RUN))
    (tmp_path / "benchmark.json").write_text('{"operations": [{"operation": "RoPE forward"}]}')
    (tmp_path / "kernel_tests.txt").write_text("first\n\x1b[31mat fault\n")
    return tmp_path


PARTS = "part|outcome|seconds|last line\nkernel tests|FAILED (1)|3|at fault\ngraph|ok|2|agree\nRoPE|not run|-|no GPU\n"


def reported(logs, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO(PARTS))
    common_room.report(logs, "75")
    return json.loads(capsys.readouterr().out)


def test_a_report_holds_what_a_record_of_the_machine_needs(logs, monkeypatch, capsys):
    """Errors of the kernels here and in the interpreter, steps, times, and the log of what failed."""
    content = reported(logs, monkeypatch, capsys)
    first, failed, adamw, not_set_up = content["kernels"]
    assert first["passed"] and first["errors"] == {"y": 1.5e-7, "dgate": 2.5e-7}
    assert first["interpreter"] == {"passed": True, "errors": {"y": 1.5e-7, "dgate": 1.25e-7}}
    assert not failed["passed"] and not not_set_up["passed"]
    assert adamw["test"] == "test_adamw[torch.float32-False]" and adamw["passed"]
    (steps,) = content["steps"]
    assert steps["step_ms"]["median"] == 2.0 and steps["parameters_trained"] == 100 and steps["version"] == 4
    assert steps["options"] == {"use_amp": True}  # no paths
    assert content["operations"] == [{"operation": "RoPE forward"}] and content["seconds"] == 75
    assert (
        content["parts"][0]["last lines"] == ["first", "\\x1b[31mat fault"] and "last lines" not in content["parts"][1]
    )
    assert content["machine"].keys() >= {"workshop", "commit", "device", "packages", "text"}
    assert content["machine"].keys().isdisjoint({"host", "command"})
    (logs / "kernels.xml").write_text("<testsuites>")
    monkeypatch.setattr(sys, "stdin", io.StringIO(PARTS))
    with pytest.raises(Failure, match="kernels.xml is cut off or damaged"):
        common_room.report(logs, "75")


def test_the_interpreter_is_asked_for_the_tests_that_it_can_run(logs, capsys):
    common_room.tests(logs / "kernels.xml")
    names = capsys.readouterr().out.splitlines()
    start = "tests/kernels/test_kernels.py::"
    assert names == [
        f"{start}test_outputs_and_gradients[swiglu-rows-torch.float32]",
        f"{start}test_adamw[torch.float32-False]",
    ]


def test_a_report_becomes_a_row_of_what_was_tested(logs, monkeypatch, capsys, tmp_path):
    content = reported(logs, monkeypatch, capsys)
    machine = {"date": "2027-01-02T03:04:05+00:00", "device": "Toy | GPU", "device_type": "cuda", "driver": "6.14"}
    content["machine"] |= machine | {"runtime": "HIP 7.1", "packages": {"torch": "2.11.0", "triton": "3.6.0"}}
    file = tmp_path / "room.json"
    file.write_text(json.dumps(content))
    monkeypatch.setattr(room_reports, "ROOMS", tmp_path / "rooms")
    monkeypatch.setattr(room_reports, "REPOSITORY", tmp_path)
    assert room_reports.main([str(file), "--add"]) == 0
    told = capsys.readouterr().out
    assert re.search(r"^swiglu, float32 +1 +0 +2.5e-07 +1.5e-07$", told, re.MULTILINE), told
    assert re.search(r"^swiglu, bfloat16 +1 +1 +- +-$", told, re.MULTILINE)
    assert re.search(r"^V4 +graph +2.000 +5.5000 -> 4.2500 +100%$", told, re.MULTILINE)
    (row,) = room_reports.rows_of_rooms(tmp_path / "rooms")
    assert row[2] == "driver 6.14, PyTorch 2.11.0, Triton 3.6.0, ROCm 7.1"
    assert row[3] == "check_room.sh: 1 of 2 parts ok, not kernel tests; on 2027-01-02"
    assert (tmp_path / "rooms" / "toy-gpu_2027-01-02.json").exists()
    refused(room_reports.main, [file, "--add"], capsys, "toy-gpu_2027-01-02.json exists already: remove it first")
    table = markdown_table(["", "platform", "versions", "what"], [row])
    assert "| Toy \\| GPU |" in table
    content["machine"] |= {"date": "2027-03-04T03:04:05+00:00", "device": "A newer GPU"}
    file.write_text(json.dumps(content))
    assert room_reports.main([str(file), "--add"]) == 0
    assert [row[1] for row in room_reports.rows_of_rooms(tmp_path / "rooms")] == ["A newer GPU", "Toy | GPU"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "is cut off or damaged"),
        ("{}", "isn't a report: give the file that check_room.sh --report wrote"),
        ('{"format": 1, "parts": []}', "is cut off or damaged: it has no 'machine'"),
    ],
)
def test_a_file_that_is_no_report_is_refused(content, said, tmp_path, capsys):
    (tmp_path / "room.json").write_text(content)
    refused(room_reports.main, [tmp_path / "room.json"], capsys, said)


@pytest.mark.slow
@pytest.mark.parametrize("gpu", ["amd", "none"])
def test_check_room_writes_a_report_without_names(gpu, room, tmp_path):
    steps = tmp_path / "steps.json"
    steps.write_text(json.dumps(OF_A_RUN))
    options = {"ROOM_GPU": gpu, "ROOM_COUNTERS": "exit 0", "ROOM_FACTS": "1", "ROOM_STEPS": str(steps)}
    result, _, _ = room("--report", "room.json", **options)
    assert result.returncode == 1 and "room.json holds all that" in result.stdout, result.stderr
    text = (tmp_path / "room.json").read_text()
    content = room_reports.read_report(tmp_path / "room.json")
    outcomes = {part["part"]: part["outcome"] for part in content["parts"]}
    assert outcomes["steps of tiny_llama_v3"] == "ok" and len(content["steps"]) == 4
    assert (
        outcomes["kernels' times"]
        == outcomes["kernel tests in the interpreter"]
        == ("ok" if gpu == "amd" else "not run")
    )
    (failed,) = (part for part in content["parts"] if "last lines" in part)
    assert failed["part"] == "set-up check of tiny_llama_v2.py"
    assert failed["last lines"] == ["Traceback", "RuntimeError: USER at HOST in HOME/x"]
    assert "jdoe" not in text and os.uname().nodename not in text and str(tmp_path) not in text


@pytest.mark.slow
def test_check_room_compares_the_graph_with_eager_steps(room):
    result, text, _ = room(ROOM_LOSS="2.4", ROOM_SOUND="1", ROOM_COUNTERS="exit 0")
    assert result.returncode == 1
    words = r"^graph +FAILED \(1\) .*the graph's losses differ from the eager ones by 4.0e-02"
    assert re.search(words, text, re.MULTILINE)


@pytest.mark.parametrize(
    ("losses", "captured", "said"),
    [
        ([2.5, 2.5], True, None),
        ([2.5, 2.6], True, "the graph's losses differ from the eager ones by 4.0e-02"),
        ([2.5, math.nan], True, "isn't a number"),
        ([2.5, 2.5], False, "the step was not captured"),
    ],
)
def test_every_loss_of_a_graph_is_compared(losses, captured, said, tmp_path):
    for name, values, graph in (("graph", losses, captured), ("eager", [2.5, 2.5], False)):
        content = {"version": 4, "config": {}, "options": {"use_amp": False, "tf32": False}, "environment": {}}
        content |= {"steps": [{"loss": loss} for loss in values], "summary": {"graph": {"captured": graph}}}
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    with pytest.raises(Failure, match=said) if said else contextlib.nullcontext():
        common_room.graph(tmp_path / "graph.json", tmp_path / "eager.json")


def test_the_gpu_is_told_by_its_architecture(monkeypatch, capsys):
    """PyTorch's CUDA builds give the GPU's name as its gcnArchName."""
    gpu = mock.Mock(gcnArchName="NVIDIA H100 80GB HBM3", major=9, minor=0)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: gpu.gcnArchName)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    common_room.facts()
    assert re.search("^arch +sm_90$", capsys.readouterr().out, re.MULTILINE)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    gpu.gcnArchName = "gfx942:sramecc+:xnack-"
    assert common_room.load_version(3).gpu_architecture.__wrapped__(torch.device("cuda")) == "gfx942"


# ---------------------------------------------------------------- gemm_probe.py


def stubbed_gemm(seconds, cut):
    """Return a matmul that takes this long on the clock, and the clock; cut rounds its inputs to TF32 or not at all."""
    now = [0.0]

    def multiply(a, b):
        now[0] += seconds
        if a.dtype == torch.float32 and cut is not None:
            a, b = (((x.view(torch.int32) + cut) & ~0x1FFF).view(torch.float32) for x in (a, b.contiguous()))
        return a @ b

    return multiply, lambda: now[0]


NEEDED_MS = 2 * 8192 * 1024 * 4096 / 653.7e12 * 1e3  # of a GEMM in TF32 on MI300X: 0.105 ms


@pytest.mark.parametrize(
    "precision, seconds, cut, status, says",
    [
        ("bfloat16", 1e-4, None, 0, "a GEMM takes 0.10 ms, 1.9 times what it needs"),
        ("bfloat16", 0.6, None, 1, "PREFER_HIPBLASLT=0: a GEMM takes 600.00 ms, 11,415.1 times what it needs"),
        ("tf32", 1.5 * NEEDED_MS / 1e3, 0x1000, 0, r"TF32 rounds to nearest: mean signed error \S+e-0[67]; .* 1.5 "),
        ("tf32", 1.5 * NEEDED_MS / 1e3, 0, 0, r"TF32 rounds down: mean signed error -6.\de-04; .*1.5 times"),
        ("tf32", 99 * NEEDED_MS / 1e3, None, 0, "no TF32, or an emulated one .*HIPBLASLT_ALLOW_TF32=1; .* 99.0 times"),
        ("tf32", 101 * NEEDED_MS / 1e3, 0, 1, "PREFER_HIPBLASLT=0: a GEMM takes .* 101.0 times"),
    ],
)
def test_gemm_probe(precision, seconds, cut, status, says, monkeypatch, capsys):
    """A GEMM that stalls names the switch; one that truncates shows it as a mean signed error."""
    multiply, clock = stubbed_gemm(seconds, cut)
    real_randn = torch.randn
    monkeypatch.setattr(tf32, "multiply", multiply)
    monkeypatch.setattr("time.perf_counter", clock)
    monkeypatch.setattr(torch, "randn", lambda *shape, **options: real_randn(*(n // 64 for n in shape)))
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(gemm_probe, "gpu_named", lambda name: "MI300X")
    monkeypatch.setattr(gemm_probe, "peak_tflops", lambda name, precision: gemm_probe.GPUS["MI300X"].tflops[precision])
    work = functools.partial(gemm_probe.probe, precision, device="cpu")
    with restored_settings():
        assert run_tool("gemm_probe.py", lambda: work() or 0) == status
    out, err = capsys.readouterr()
    assert re.search(says, (err if status else out).splitlines()[-1]), out + err
    assert not err or "PREFER_HIPBLASLT=0" in err[:100]  # check_room's table shows 100 letters
    assert "if this hangs, set TORCH_BLAS_PREFER_HIPBLASLT=0" in out.splitlines()[0]


@pytest.mark.parametrize("arguments, status, says", [(["tf32"], 0, "skipped: needs a GPU"), (["fp64"], 2, "invalid")])
def test_gemm_probe_elsewhere(arguments, status, says, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) if status else contextlib.nullcontext():
        assert gemm_probe.main(arguments) == status
    assert says in "".join(capsys.readouterr())


def test_gemm_probe_on_a_board_that_is_not_in_our_table():
    """It needs what the slowest board of the table does."""
    slowest = max(gemm_probe.needed_ms("bfloat16", 2, name) for name in gemm_probe.GPUS)
    assert gemm_probe.needed_ms("bfloat16", 2, "a new one") >= slowest


@pytest.mark.slow
def test_check_room_without_a_gpu_is_quick_and_leaves_the_graph_out(room):
    _, text, words = room(ROOM_GPU="none")
    assert re.search(r"^graph +not run +- +needs a GPU", text, re.MULTILINE)
    assert len(re.findall(r"^GEMM in \w+ +not run +- +skipped: needs a GPU", text, re.MULTILINE)) == 2
    found = collected(words)
    names = set(re.findall(r"test_outputs_and_gradients\[(\w+)-", found))
    assert names == {"add_rms_norm", "packed_swiglu"}
    assert "V1 uses rocprofv3" in text and re.search(r"^took .* quick$", text, re.MULTILINE)


@pytest.mark.parametrize("arguments", [["--no-such"], ["--output"], ["--output", "/"], ["--time-limit", "soon"]])
def test_check_room_refuses_bad_options_in_one_sentence(arguments, room):
    result, text, _ = room(*arguments)
    assert result.returncode == 2 and result.stderr.startswith("check_room.sh: ") and not text
    assert len(result.stderr.splitlines()) == 1
