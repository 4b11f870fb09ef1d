"""Files that tools write: write-protected ones stay, and no name of a folder or script breaks what is written."""

import json
import subprocess
import sys

import pytest

import analyze_bottlenecks
import benchmark_suite
import check_training
import compare_training
import compare_versions
import execute_on_amd
import generate_fusion_report
import kernel_times
import run_deepspeed_flops
import run_pytorch_profiler
from common import tables
from common.command_line import Failure, run_tool
from common.machine import profile_script
from common.measuring import roofline_picture
from common.versions import REPOSITORY
from in_process import refused
from processes import run_fork

KEPT = "kept.json"
BEFORE_WORK = {  # tool: a command that names the file, and is refused before anything is read or run
    "kernel_times.py --json": (kernel_times.main, ["missing", "--json", KEPT]),
    "kernel_times.py --csv": (kernel_times.main, ["missing", "--csv", KEPT]),
    "analyze_bottlenecks.py": (analyze_bottlenecks.main, ["--profile-data", "missing", "--output-report", KEPT]),
    "check_training.py": (check_training.main, ["--json", KEPT, "--", "train.py"]),
    "compare_training.py --json": (compare_training.main, ["--json", KEPT, "--", "train.py", "--versus", "train.py"]),
    "compare_training.py --markdown": (
        compare_training.main,
        ["--markdown", KEPT, "--", "train.py", "--versus", "train.py"],
    ),
    "compare_versions.py": (compare_versions.main, ["--report", "."]),
    "generate_fusion_report.py": (generate_fusion_report.main, ["--output", KEPT]),
    "run_deepspeed_flops.py": (run_deepspeed_flops.main, ["--version", "1", "--profile-dir", "."]),
    "benchmark_suite.py": (benchmark_suite.main, ["--results", ".", "--append", "--models", "v1"]),
    "execute_on_amd.py": (execute_on_amd.main, ["--json", KEPT, "--", "train.py"]),
}
NAMES = {
    "benchmark_suite.py": "suite.json",
    "compare_versions.py": "report.html",
    "run_deepspeed_flops.py": "roofline.png",
}


@pytest.fixture
def protect(tmp_path, monkeypatch):
    """protect(NAME): make a write-protected file in the folder in which the test runs; return its path."""
    monkeypatch.chdir(tmp_path)

    def make(name):
        path = tmp_path / name
        path.write_text("kept")
        path.chmod(0o444)
        return path

    return make


@pytest.mark.parametrize("tool", BEFORE_WORK)
def test_a_write_protected_file_is_refused_before_the_work(tool, protect, tmp_path, capsys):
    """Replacing it needs no permission but the folder's, and root may write it."""
    main, command = BEFORE_WORK[tool]
    (tmp_path / "train.py").write_text("print('it ran')")
    path = protect(NAMES.get(tool, KEPT))
    refused(main, command, capsys, f"{path.name} is write-protected: name another file")
    assert path.read_text() == "kept" and path.stat().st_mode & 0o777 == 0o444
    assert capsys.readouterr().out == ""


def test_a_write_protected_file_beside_a_report_stays(protect, tmp_path, capsys, make_trace):
    make_trace("trace_v1_1.json", {"gemm": 10.0})
    path = protect("profiling_report.md")
    command = ["--analyze-existing", tmp_path / "trace_v1_1.json", "--generate-report"]
    refused(run_pytorch_profiler.main, command, capsys, "is write-protected: name another file")
    assert path.read_text() == "kept"


@pytest.mark.parametrize("link", [False, True])
def test_nothing_replaces_a_write_protected_file(link, protect, tmp_path):
    path = protect("kept")
    if link:
        path = tmp_path / "link"
        path.symlink_to("kept")
    with pytest.raises(Failure, match="write-protected") as caught:
        tables.write_whole(path, "new")
    with pytest.raises(Failure, match="write-protected"):
        tables.write_csv([{"a": 1}], path)
    assert caught.value.status == 2 and path.read_text() == "kept" and path.is_symlink() == link


def test_a_result_that_cannot_be_written_is_printed(protect, capsys):
    path = protect(KEPT)
    assert run_tool("tool", lambda: tables.emit({}, "what was measured", path)) == 2
    assert capsys.readouterr() == ("what was measured\n", f"tool: {path} is write-protected: name another file\n")


def test_a_name_with_lost_bytes_does_not_lose_the_file(tmp_path):
    tables.write_whole(tmp_path / "page.html", "a\udcff")
    assert (tmp_path / "page.html").read_text() == "a\\udcff"


@pytest.mark.slow
def test_a_picture_takes_any_name(tmp_path):
    """Matplotlib reads text between dollars as a formula, and has no picture for a control character."""
    pytest.importorskip("matplotlib")
    points = [("a$x_{$b", 1.0, 0.1, 2.0), ("a\x1b[2Jb", 1.0, 0.1, 1.0)]
    roofline_picture.draw_roofline(tmp_path / "a.png", "$x_{$", {"matmul_tflops": 1.0, "copy_tb_s": 1.0}, points)
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", ["od\udcffd", "a\x1bb", "a\nb", 'a"b', "a\\b"])
def test_a_folder_that_would_break_a_trace_is_refused(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("raise ValueError('it ran')")
    said = "must be UTF-8 without control characters, quotes and backslashes"
    refused(profile_script.main, ["--profile-dir", name, "train.py"], capsys, said)
    refused(run_pytorch_profiler.main, ["--version", "1", "--profile-dir", name], capsys, said)
    refused(compare_versions.main, ["--report", name], capsys, said)
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


# ---------------------------------------------------------------- what a script does to its output

LOUD = """
import torch
w = torch.nn.Parameter(torch.ones(2))
optimizer = torch.optim.SGD([w])
for _ in range(4):
    w.sum().backward()
    optimizer.step()
"""
SILENT = """
import builtins, os, sys
builtins.print = None
sys.stdout.close()
sys.stderr = None
os.dup2(os.open("log", os.O_CREAT | os.O_WRONLY), 1)
"""


@pytest.mark.slow
def test_a_profile_of_a_script_that_closes_its_output_is_named(tmp_path):
    """And one whose own name would break the trace: PyTorch writes it as it is."""
    (tmp_path / 'a"b.py').write_text(SILENT + LOUD)
    runner = REPOSITORY / "scripts" / "common" / "machine" / "profile_script.py"
    done = run_fork(runner, "--profile-dir", "p", "--profile-steps", "1", 'a"b.py', cwd=tmp_path)
    (trace,) = (tmp_path / "p").iterdir()
    assert done.stdout == f"profile_script.py: wrote p/{trace.name}\n" and (tmp_path / "log").read_bytes() == b""
    assert json.loads(trace.read_text())["traceName"] == f"p/{trace.name}" and done.returncode == 0


@pytest.mark.slow
def test_the_table_of_an_executed_script_reaches_the_terminal(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "train.py").write_text(SILENT + "os.chdir('folder')\nos._exit(3)\n")
    command = [sys.executable, execute_on_amd.__file__, "--json", "rows.json", "--", "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout == "\ngfx942: the script launched no Triton kernel\n" and done.returncode == 3, done.stderr
    assert json.loads((tmp_path / "rows.json").read_text())["status"] == 3


def test_a_report_is_written_where_it_was_asked_for(tmp_path, monkeypatch, capsys):
    """Scripts change their folder, those of Hydra always."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", sys.argv[:])
    monkeypatch.setattr(sys, "path", sys.path[:])
    (tmp_path / "folder").mkdir()
    (tmp_path / "train.py").write_text("import os\nos.chdir('folder')\n" + LOUD)
    check_training.main(["--no-slopes", "--json", "report.json", "--", "train.py"])
    assert json.loads((tmp_path / "report.json").read_text())["steps"] == 4


def test_a_report_whose_file_is_gone_is_printed(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", sys.argv[:])
    monkeypatch.setattr(sys, "path", sys.path[:])
    (tmp_path / "folder").mkdir()
    (tmp_path / "train.py").write_text(f"import os\nos.rmdir({str(tmp_path / 'folder')!r})\n" + LOUD)
    file = tmp_path / "folder" / "report.json"
    assert check_training.main(["--no-slopes", "--json", str(file), "--", str(tmp_path / "train.py")]) == 2
    printed = capsys.readouterr()
    assert "\nverdict     " in printed.out
    assert printed.err == f"check_training: --json {file} cannot be written: No such file or directory\n"
