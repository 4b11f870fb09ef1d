"""Hold what participants call: check.py NN --target, and inspect_kernels.py --execute."""

import json
import pathlib
import re
import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton", minversion="3.6", reason="scripts/inspect_kernels.py needs it, too")

import inspect_kernels
from amd.launch import tables_of_addresses
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


SMALL = "--preset tiny --hidden-dim 32 --num-heads 2 --num-kv-heads 1 --intermediate-dim 48".split()


@pytest.mark.slow
def test_only_kernels_that_are_asked_for_are_executed(capfd):
    argv = ["--execute", "gfx942", *SMALL, "--kernel", "rope", "--dtype"]
    assert inspect_kernels.main([*argv, "fp32"]) == 0
    out, err = capfd.readouterr()
    assert re.findall(r"(\w+)_kernel, ", err) == ["rope"] and "1 kernels: all are right" in out
    assert inspect_kernels.main([*argv, "fp8"]) == 2  # nothing is executed in it


def prepare_worker_whose_stores_are_lost():
    from amd.machine import Memory

    prepare_worker()
    Memory.store = lambda *_: None


prepare_worker = inspect_kernels.prepare_worker


@pytest.mark.slow
def test_a_kernel_that_stores_nothing_is_wrong(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")  # the new process reads this file before it is prepared
    monkeypatch.setattr(inspect_kernels, "prepare_worker", prepare_worker_whose_stores_are_lost)
    rows = inspect_kernels.execution("gfx942", "fp32", SMALL)
    assert len(rows) >= 12 and all(row["problems"] for row in rows)


def test_tensors_behind_addresses_have_the_order_of_the_table():
    made = [torch.zeros(3) for _ in range(8)]
    tensors = [made[i] for i in (5, 2, 7, 0, 3, 1, 6, 4)]
    found = tables_of_addresses([torch.tensor([x.data_ptr() for x in tensors]), torch.zeros(2)])
    assert [x.data_ptr() for x in found.values()] == [x.data_ptr() for x in tensors]


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
    argv = ["--execute", target, "--dtype", dtype, *SMALL, "--json", str(tmp_path / "rows.json")]
    result = subprocess.run([sys.executable, script, *argv], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    rows = json.loads(pathlib.Path(tmp_path / "rows.json").read_text())["kernels"]
    assert len({row["kernel"] for row in rows}) == 12
    exact = ("adamw_kernel", "column_sum_kernel")  # may be without an error
    assert all(0 < row["error"] < 0.016 or row["kernel"] in exact for row in rows)
    assert all(row["instructions"]["vector"] and row["loaded"] and row["stored"] for row in rows)
    attention = [row for row in rows if "attention" in row["kernel"]]
    assert all(bool(row["instructions"].get("matrix")) == (target == "gfx942") for row in attention)
    assert "all are right" in result.stdout and f"{target} {dtype}: adamw_kernel" in result.stderr
