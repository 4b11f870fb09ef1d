"""Hold what participants call: check.py NN --target, and inspect_kernels.py --execute."""

import json
import pathlib
import subprocess
import sys

import pytest

pytest.importorskip("triton", minversion="3.6", reason="scripts/inspect_kernels.py needs it, too")

from common.versions import REPOSITORY

EXERCISES = REPOSITORY / "exercises"


@pytest.fixture
def answers(monkeypatch):
    monkeypatch.syspath_prepend(str(EXERCISES))
    import answers

    return answers


def test_an_answer_is_right_or_wrong_on_the_instructions(answers, tmp_path):
    folder = answers.folder_of("01")
    solution = (folder / "solution.py").read_text()
    wrong = tmp_path / "exercise.py"
    wrong.write_text(solution.replace("row[:, None] < rows) & (", "row[:, None] < rows + 1) & ("))
    assert wrong.read_text() != solution
    right, stray = answers.grade([(folder, folder / "solution.py"), (folder, wrong)], target="gfx1100")
    assert right["passed"] and "3 dtypes" in right["sentence"]
    assert (
        not stray["passed"]
        and "a load outside every tensor" in stray["sentence"]
        and "exercise.py" in stray["sentence"]
    )


@pytest.mark.slow
def test_what_follows_the_cases_runs_on_the_instructions_too(answers):
    """Exercise 23 launches its kernel once more, to measure memory."""
    folder = answers.folder_of("23")
    (verdict,) = answers.grade([(folder, folder / "solution.py")], timeout=600, target="gfx942")
    assert verdict["passed"], verdict["sentence"]


@pytest.mark.slow
@pytest.mark.parametrize(("target", "dtype"), [("gfx942", "bf16"), ("gfx1201", "fp32")])
def test_a_step_is_executed_and_compared(target, dtype, tmp_path):
    script = str(REPOSITORY / "scripts" / "inspect_kernels.py")
    argv = ["--execute", target, "--dtype", dtype, "--preset", "tiny", "--json", str(tmp_path / "rows.json")]
    result = subprocess.run([sys.executable, script, *argv], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    rows = json.loads(pathlib.Path(tmp_path / "rows.json").read_text())["kernels"]
    assert len({row["kernel"] for row in rows}) == 12
    assert all(0 < row["error"] < 0.016 or row["kernel"] == "adamw_kernel" for row in rows)
    assert all(row["instructions"]["vector"] and row["loaded"] and row["stored"] for row in rows)
    attention = [row for row in rows if "attention" in row["kernel"]]
    assert all(bool(row["instructions"].get("matrix")) == (target == "gfx942") for row in attention)
    assert "all are right" in result.stdout and f"{target} {dtype}: adamw_kernel" in result.stderr
