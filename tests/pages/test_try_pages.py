"""The tool that runs the pages' commands: what it runs, passes over and says, on pages made up for it."""

import os
import pathlib
import sys

import pytest

from in_process import refused
from maintain import try_pages
from maintain.pages import Command, commands
from processes import running, wait_for


@pytest.fixture
def page_of(tmp_path, monkeypatch):
    """page_of(LINE...): a repository with one page, in a version's folder, that has these commands."""
    page = tmp_path / "repository" / "version1_pytorch_baseline" / "README.md"
    page.parent.mkdir(parents=True)
    (tmp_path / "repository" / ".git").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(try_pages, "REPOSITORY", tmp_path / "repository")
    monkeypatch.setattr(try_pages, "all_pages", lambda: [page])

    def write(*lines):
        page.write_text("\n".join(["# A page", "", "```bash", *lines, "```", ""]))

    return write


def test_each_command_gets_a_line(page_of, capsys, tmp_path):
    """In the page's folder of a copy, with this Python; a failure shows status and last words, and the rest goes on."""
    page_of(
        "python -c 'import sys; print(sys.executable)'",
        "ls -a ..; pwd",
        "echo fine; echo 'no such thing' >&2; exit 3   # why not",
        "python check.py 01 || exit 1",
        "python check.py solution 01 || exit 1",
        "python check.py 02 || exit 2",
        "python compare_training.py -- ways.py mended --versus ways.py found || exit 1",
        "python compare_training.py -- ways.py mended --versus ways.py kept || exit 1",
        "python check_training.py -- train_characters.py || exit 1",
        "python compare_training.py -- v3_stage5_x.py --versus v3_stage6_x.py || exit 1",
        "python inspect_kernels.py --tiles 128x64 --stages 2 6 || exit 1",
        "python v3_stage1_x.py --check || exit 1",
        "python v3_stage1_x.py || exit 1",
        "record.sh FOLDER",
        "echo $TINY_LLAMA_PYTHON >>environment",
        "cat environment",
    )
    assert try_pages.main(["--output-dir", "a folder"]) == 1
    *tried, again, _, _, _, summary = capsys.readouterr().out.splitlines()
    ended, words = zip(*((line[:12].strip(), line.split("  | ")[1]) for line in tried), strict=True)
    said = ["ok", "failed", *["ok"] * 4, "failed"]  # of training, tiles and stages
    assert ended == ("ok", "ok", "failed", "ok", "ok", "failed", *said, "passed over", "ok", "ok")
    place = pathlib.Path(words[1])
    assert place.name == "version1_pytorch_baseline" and not place.is_relative_to(tmp_path)
    assert pathlib.Path(words[0]).parent == pathlib.Path(sys.executable).parent and words[15] == sys.executable
    assert words[2] == "status 3: no such thing" and "why not" not in tried[2]
    assert again == tried[2] and summary.startswith("11 ok, 4 failed, 0 cut off, 1 passed over")
    logs = sorted((tmp_path / "a folder").iterdir())
    assert len(logs) == 15 and ".git" not in logs[1].read_text().split()


def test_a_file_that_the_page_asks_to_save_is_there(page_of, capsys):
    saved = ["Save this as `said.py` in this folder:", "", "```python", "print('as', 'saved')", "```"]
    page_of("echo first", "```", *saved, "```bash", "python said.py")
    assert try_pages.main([]) == 0
    assert capsys.readouterr().out.splitlines()[1].endswith("| as saved")


@pytest.mark.parametrize(
    ("command", "ended"),
    [
        ("sleep 600 & echo $! >'{pid}'; sleep 600", "cut off"),
        ("sleep 600 & echo $! >'{pid}'", "ok"),
        ("trap '' TERM; echo $$ >'{pid}'; while :; do sleep 1; done", "cut off"),
    ],
    ids=["takes too long", "leaves something running", "does not end when asked"],
)
@pytest.mark.timeout(100)
def test_a_command_is_ended_with_all_that_it_started(command, ended, page_of, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(try_pages, "GRACE_S", 0.2)
    page_of(command.format(pid=tmp_path / "pid"), "echo next")
    run = try_pages.run

    def run_shortly(command, place, log, environment, seconds):
        assert seconds == 90
        too_long = ended == "cut off" and command.text != "echo next"
        return run(command, place, log, environment, 1 if too_long else seconds)

    monkeypatch.setattr(try_pages, "run", run_shortly)
    assert try_pages.main(["--each", "90"]) == int(ended != "ok")
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{ended} ") and second.startswith("ok ")
    wait_for(lambda: not running((tmp_path / "pid").read_text().strip()))


@pytest.mark.timeout(100)
def test_a_command_is_ended_when_the_tool_is_terminated(page_of, tmp_path, capsys):
    """By SIGTERM, as `timeout` and schedulers send it."""
    page_of(f"echo $$ >'{tmp_path / 'pid'}'; kill {os.getpid()}; sleep 600", "echo next")
    assert try_pages.main([]) == 130
    assert capsys.readouterr().err.endswith("try_pages.py: interrupted\n")
    wait_for(lambda: not running((tmp_path / "pid").read_text().strip()))


@pytest.mark.parametrize(
    ("text", "gpus", "reason"),
    [
        ("torchrun --nproc-per-node gpu a.py", 1, "needs 2 GPUs"),
        ("torchrun --nproc-per-node 4 a.py", 2, "needs 4 GPUs"),
        ("torchrun --nproc-per-node 4 a.py", 4, None),
        ("torchrun --nproc-per-node 2 a.py --device cpu", 0, None),
        ("torchrun --nnodes 2 --nproc-per-node 8 a.py", 8, "needs several hosts"),
        ("sbatch --nodes 2 a.sbatch", 8, "needs several hosts"),
        ("python ladder.py recorded/DEVICE_DATE", 1, "DEVICE_DATE is a placeholder"),
        ("python scripts/maintain/try_pages.py", 1, "run it by itself"),
        ("python exercises/check.py 01 --watch", 1, "waits for its user"),
        ("ROCR_VISIBLE_DEVICES=0 python a.py", 0, None),
    ],
)
def test_what_is_passed_over(text, gpus, reason):
    assert try_pages.passed_over(Command(1, text), gpus) == reason


def test_comments_say_what_needs_gpus(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("```bash\na\nb  # with a GPU\n```\n\n```bash\n# with GPUs: all\nc\nd\n```\n")
    assert [(c.text[0], c.gpus) for c in commands(page)] == [("a", 0), ("b", 1), ("c", 2), ("d", 2)]
    found = [try_pages.passed_over(command, 0) for command in commands(page)]
    assert found == [None, "needs a GPU", "needs 2 GPUs", "needs 2 GPUs"]


def test_pages_that_are_none(capsys):
    refused(try_pages.main, ["nowhere.md"], capsys, "nowhere.md isn't a page whose commands we know")
    refused(try_pages.main, ["--each", -1], capsys, "--each")
