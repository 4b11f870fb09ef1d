"""The tool that runs the pages' commands: what it runs, passes over and says, on pages made up for it."""

import json
import pathlib
import sys

import pytest

from maintain import try_pages
from common.pages import PAGES, Command, commands


@pytest.fixture
def page_of(tmp_path, monkeypatch):
    """page_of(LINE...): a repository with one page, in a version's folder, that has these commands."""
    page = tmp_path / "repository" / "version1_pytorch_baseline" / "README.md"
    page.parent.mkdir(parents=True)
    (tmp_path / "repository" / ".git").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(try_pages, "REPOSITORY", tmp_path / "repository")
    monkeypatch.setattr(try_pages, "PAGES", [page])

    def write(*lines):
        page.write_text("\n".join(["# A page", "", "```bash", *lines, "```", ""]))

    return write


def test_each_command_gets_a_line(page_of, capsys, tmp_path):
    """In the page's folder of a copy, with this Python; a failure shows status and last words, and the rest goes on."""
    page_of(
        "python -c 'import sys; print(sys.executable)'",
        "pwd",
        "echo fine; echo 'no such thing' >&2; exit 3   # why not",
        "python check.py 01 || exit 1",
        "python check.py solution 01 || exit 1",
        "record.sh FOLDER",
        "echo still here",
    )
    assert try_pages.main(["--output-dir", "a folder", "--json", "tried.json"]) == 1
    said = capsys.readouterr()
    tried = json.loads((tmp_path / "tried.json").read_text())["commands"]
    assert [t["ended"] for t in tried] == ["ok", "ok", "failed", "ok", "ok", "passed over", "ok"]
    assert tried[0]["words"] == sys.executable
    assert tried[1]["words"] == str(tmp_path / "a folder" / "copy" / "version1_pytorch_baseline")
    assert tried[2]["words"] == "status 3: no such thing" and "why not" not in tried[2]["command"]
    assert "5 ok, 1 failed, 0 cut off, 0 not run, 1 passed over" in said.out
    assert said.out.count("status 3: no such thing") == 1 and "still here" in said.err
    assert not (tmp_path / "a folder" / "copy" / ".git").exists()


def test_all_well(page_of, capsys):
    page_of("true", "./scripts/test.sh")
    assert try_pages.main([]) == 0
    assert "1 ok, 0 failed, 0 cut off, 0 not run, 1 passed over" in capsys.readouterr().out


def alive(path):
    """Return whether the process whose number stands in the file still runs; a zombie does not."""
    try:
        return pathlib.Path(f"/proc/{path.read_text().strip()}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize(
    ("command", "ended"),
    [
        ("sleep 60 & echo $! >'{pid}'; sleep 60", "cut off"),
        ("sleep 60 & echo $! >'{pid}'", "ok"),
        ("trap '' TERM; echo $$ >'{pid}'; sleep 60; sleep 60", "cut off"),
    ],
    ids=["takes too long", "leaves something running", "does not end when asked"],
)
def test_a_command_is_ended_with_all_that_it_started(command, ended, page_of, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(try_pages, "GRACE_S", 1)
    page_of(command.format(pid=tmp_path / "pid"), "echo next")
    assert try_pages.main(["--each", "2", "--json", "tried.json"]) == int(ended != "ok")
    tried = json.loads((tmp_path / "tried.json").read_text())["commands"]
    assert [t["ended"] for t in tried] == [ended, "ok"] and not alive(tmp_path / "pid")


def test_a_folder_of_somebody_else_is_left_alone(page_of, tmp_path, capsys):
    page_of("true")
    (tmp_path / "mine" / "copy").mkdir(parents=True)
    (tmp_path / "mine" / "copy" / "thesis.txt").write_text("years")
    assert try_pages.main(["--output-dir", "mine"]) == 2
    assert "was not made by this program: choose another --output-dir" in capsys.readouterr().err
    assert (tmp_path / "mine" / "copy" / "thesis.txt").exists()
    assert [try_pages.main([]) for _ in range(2)] == [0, 0]  # its own is made anew


def test_results_inside_the_repository_are_not_copied_into_themselves(page_of, tmp_path):
    page_of("ls .. > listed; ! grep -q results listed")
    assert try_pages.main(["--output-dir", str(tmp_path / "repository" / "results")]) == 0


def test_the_time_limit_is_kept_to(page_of, capsys):
    page_of("sleep 60", "echo next")
    assert try_pages.main(["--time-limit", "6"]) == 1
    assert "0 ok, 0 failed, 1 cut off, 1 not run" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "gpus", "reason"),
    [
        ("torchrun --nproc-per-node gpu a.py", 1, "needs 2 GPUs"),
        ("torchrun --nproc-per-node 4 a.py", 2, "needs 4 GPUs"),
        ("torchrun --nproc-per-node 4 a.py", 4, None),
        ("torchrun --nproc-per-node 2 a.py --device cpu", 0, None),
        ("torchrun --nnodes 2 --nproc-per-node 8 a.py", 8, "needs several hosts"),
        ("sbatch --nodes 2 a.sbatch", 8, "needs several hosts"),
        (
            "python ladder.py --picture recorded/DEVICE_DATE/ladder.png",
            1,
            "DEVICE_DATE stands for something else",
        ),
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
    assert try_pages.main(["nowhere.md"]) == 2
    assert capsys.readouterr().err == (
        "try_pages.py: nowhere.md is no page whose commands are known; without a name all of them are tried\n"
    )
    for wrong in (["--each", "-1"], ["--time-limit", "0"]):
        with pytest.raises(SystemExit, match="2"):
            try_pages.main(wrong)
    assert len(PAGES) == 12
