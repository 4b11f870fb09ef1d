"""The hands-on kernels: stubs, solutions and wrong answers are in order, and the checker behaves as its help says."""

import dataclasses
import math
import re
import shutil
import subprocess
import sys
import time

import pytest
import torch

from common.versions import REPOSITORY, SCRIPTS

sys.path.insert(0, str(REPOSITORY / "exercises"))
import check
import grading
import graphs
import speed
from common.command_line import Failure

EXERCISES = check.exercises()


def test_verify(capfd, monkeypatch):
    """Every stub is untouched, every solution passes, and every typical mistake is blamed on the right tensor."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # a wrong kernel can take a GPU's program down
    start = time.perf_counter()
    status = check.verify([])
    output = capfd.readouterr().out
    assert status == 0, output
    assert time.perf_counter() - start < 120  # 60 on an idle machine
    assert f"{len(EXERCISES)} exercises and " in output


@pytest.mark.gpu
@pytest.mark.parametrize("number", EXERCISES)
def test_solutions_pass_on_a_gpu(number):
    verdict = check.grade([(EXERCISES[number], check.solution_of(EXERCISES[number]))])[0]
    assert verdict["passed"], verdict["sentence"]


def test_all_are_there():
    assert list(EXERCISES) == [f"{i:02d}" for i in range(1, 17)]


def test_kernels_of_version_3_are_compared():
    """Not vacuously: most exercises end at a kernel of the script, under its name."""
    of_version3 = check.kernels(SCRIPTS[3])
    of_exercises = {name for folder in EXERCISES.values() for name in check.kernels(check.solution_of(folder))}
    assert {
        "rmsnorm_forward_kernel",
        "rmsnorm_backward_kernel",
        "column_sum_kernel",
        "swiglu_forward_kernel",
        "swiglu_backward_kernel",
        "rope_kernel",
        "attend",
        "attention_forward_kernel",
        "dq_step",
        "dkdv_step",
    } <= of_exercises & set(of_version3)


@pytest.fixture
def workshop(tmp_path):
    """A copy of the exercises beside the real scripts, in a folder whose name has a space."""
    root = tmp_path / "a copy"
    ignored = shutil.ignore_patterns("__pycache__", ".progress.json")
    shutil.copytree(REPOSITORY / "exercises", root / "exercises", ignore=ignored)
    (root / "scripts").symlink_to(REPOSITORY / "scripts")
    return root / "exercises"


def command(folder, *arguments):
    return [sys.executable, str(folder / "check.py"), *arguments]


def call(folder, *arguments):
    """(exit status, all that was printed) of check.py."""
    done = subprocess.run(command(folder, *arguments), capture_output=True, text=True, cwd=folder.parent)
    assert "Traceback" not in done.stderr
    return done.returncode, done.stdout + done.stderr


def answer(folder, number, line):
    """Put a line between the comments of a stub with one place to fill."""
    path = next(folder.glob(f"{number}_*")) / "exercise.py"
    path.write_text(path.read_text().replace("    # end of TODO", f"    {line}\n    # end of TODO"))


def test_way_through_an_exercise(workshop):
    status, output = call(workshop, "01")
    assert status == 1 and "not started" in output
    status, output = call(workshop, "solution", "01")
    assert status == 1 and "not passed yet" in output
    assert "hint 1 of 3" in call(workshop, "hint", "01")[1]
    assert "hint 1 of 3" in call(workshop, "hint", "1")[1]  # the second opens after a failure
    answer(workshop, "01", "tl.store(sum_ptr + row, tl.zeros([ROWS], tl.float32), mask=row < rows)")
    status, output = call(workshop, "01")
    assert status == 1 and "failed in case one tile, float32" in output and "sum: relative error" in output
    assert "hint 2 of 3" in call(workshop, "hint", "01")[1]
    folder = workshop / "01_row_sum"
    shutil.copy(folder / "solution.py", folder / "exercise.py")
    status, output = call(workshop, "01")
    assert status == 0 and "passed" in output
    status, output = call(workshop, "solution", "01")
    assert status == 0 and "def row_sum_kernel" in output
    lines = call(workshop)[1].splitlines()
    assert lines[0].endswith("passed") and not lines[1].endswith("passed")


def test_giving_up_is_recorded(workshop):
    status, output = call(workshop, "solution", "07", "--give-up")
    assert status == 0 and "online_softmax_kernel" in output
    assert "07  Online softmax" in call(workshop, "list")[1] and "solution seen" in call(workshop, "list")[1]


@pytest.mark.parametrize("arguments", [["17"], ["hint"], ["hint", "x"], ["hint", "01", "4"], ["solve"], ["--fast"]])
def test_bad_input(arguments):
    status, output = call(REPOSITORY / "exercises", *arguments)
    assert status == 2 and len(output.strip().splitlines()) <= 3


def test_watch_ends_when_the_answer_is_right(workshop):
    folder = workshop / "01_row_sum"
    child = subprocess.Popen(command(workshop, "01", "--watch"), stdout=subprocess.PIPE, text=True)
    try:
        while "waiting for" not in (line := child.stdout.readline()):
            assert line
        (folder / "exercise.py").write_text((folder / "solution.py").read_text())
        output, _ = child.communicate(timeout=200)
        assert child.returncode == 0 and "01 passed" in output
    finally:
        child.kill()
        child.wait()


# ---------------------------------------------------------------- verdicts on answers of other kinds


def verdict_of(tmp_path, text, number="01"):
    path = tmp_path / "exercise.py"
    path.write_text(f"{text}ROWS = 2\n")
    return grading.grade(EXERCISES[number], path)


def test_answer_without_a_kernel(tmp_path):
    verdict = verdict_of(tmp_path, "def run(x, sum):\n    sum.copy_(x.sum(1))\n")
    assert not verdict["passed"] and verdict["kind"] == "no kernel"


def test_constant_answer(tmp_path):
    verdict = verdict_of(tmp_path, "def run(x, sum):\n    sum.zero_()\n")
    assert verdict["kind"] == "value" and verdict["tensor"] == "sum"


def test_factor_is_named(tmp_path):
    verdict = verdict_of(tmp_path, "def run(x, sum):\n    sum.copy_(2 * x.sum(1))\n")
    assert "every element is 2 times what it should be" in verdict["sentence"]


def test_place_is_named(tmp_path):
    verdict = verdict_of(tmp_path, "def run(x, sum):\n    sum.copy_(x.sum(1))\n    sum[2:] += 3\n")
    assert "only row 2 to 3 of (4,) is wrong" in verdict["sentence"] and "(program 1)" in verdict["sentence"]


def test_crash_names_its_line(tmp_path):
    verdict = verdict_of(tmp_path, "def run(x, sum):\n\n    sum.copy_(missing)\n")
    assert verdict["kind"] == "crash" and verdict["sentence"].startswith("line 3: NameError")
    assert "SyntaxError" in verdict_of(tmp_path, "def run(x, sum:\n")["sentence"]


def test_store_far_outside_does_not_take_the_checker_down(tmp_path):
    path = tmp_path / "exercise.py"
    path.write_text("import os, signal\n\n\ndef run(x, sum):\n    os.kill(os.getpid(), signal.SIGSEGV)\n")
    with pytest.raises(Failure, match="far outside"):
        check.grade([(EXERCISES["01"], path)])


def test_endless_loop_is_ended(tmp_path):
    path = tmp_path / "exercise.py"
    path.write_text("while True:\n    pass\n")
    with pytest.raises(Failure, match="does a loop"):
        check.grade([(EXERCISES["01"], path)], timeout=1)


def test_interpreter_is_chosen_before_triton_is_imported(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert check.grade([(EXERCISES["01"], EXERCISES["01"] / "solution.py")])[0]["passed"]


# ---------------------------------------------------------------- verify sees what it must


def damaged(tmp_path, name, change):
    """Exercise 03 with one of its files changed."""
    folder = tmp_path / EXERCISES["03"].name
    shutil.copytree(EXERCISES["03"], folder, ignore=shutil.ignore_patterns("__pycache__"))
    path = folder / name
    path.write_text(change(path.read_text()))
    return list(check.faults_of(folder, check.kernels(SCRIPTS[3])))


def test_faults_of_an_exercise_are_seen(tmp_path):
    def faults(name, change):
        shutil.rmtree(tmp_path / EXERCISES["03"].name, ignore_errors=True)
        return damaged(tmp_path, name, change)

    assert faults("README.md", str) == []
    assert (
        "is started" in faults("exercise.py", lambda text: text.replace("# end of TODO", "a = 1\n    # end of TODO"))[0]
    )
    assert "differ outside" in faults("exercise.py", lambda text: text.replace("def run(x, y)", "def run(y, x)"))[0]
    assert "three sections" in faults("hints.md", lambda text: text.replace("## 3", "3"))[0]
    assert "longer than a page" in faults("README.md", lambda text: text + "\n" * 60)[0]
    assert "is not that of" in faults("solution.py", lambda text: text.replace("a * tl.sigmoid(a) * b", "b * a"))[0]


def test_stale_kernels_are_copied_again(tmp_path):
    folder = tmp_path / EXERCISES["09"].name
    shutil.copytree(EXERCISES["09"], folder, ignore=shutil.ignore_patterns("__pycache__"))
    of_version3 = check.kernels(SCRIPTS[3])
    changed = of_version3 | {"load_tile": of_version3["load_tile"].replace("other=0.0", "other=0")}
    assert "load_tile of solution.py is not" in next(check.faults_of(folder, changed))
    check.copy_kernels(folder, changed)
    assert list(check.faults_of(folder, changed)) == []


def test_wrong_verdicts_are_seen():
    mistake = grading.Mistake("a", "b", "dx")
    right = {"passed": False, "kind": "value", "tensor": "dx", "sentence": ""}
    assert check.judge_verdict(mistake, right) is None
    assert check.judge_verdict(mistake, right | {"tensor": "dy"})
    assert check.judge_verdict(mistake, right | {"kind": "crash"})
    assert check.judge_verdict(mistake, right | {"passed": True})
    assert check.judge_verdict(None, right) and not check.judge_verdict(None, {"passed": True})


# ---------------------------------------------------------------- speed


class FakeTimer:
    """Takes the given milliseconds for each kind of call, the answer's first; calls it once, as a real one does."""

    def __init__(self, *milliseconds):
        self.left = [list(times) for times in milliseconds]

    def milliseconds(self, call):
        call()
        return self.left.pop(0)


def small_task(floor):
    task = grading.load_task(EXERCISES["03"])
    sizes, tiles = {"rows": 4, "F": 64}, {"ROWS": 2, "BLOCK": 64}
    return dataclasses.replace(task, speed=speed.Speed(sizes, tiles, floor))


def solution_module(number):
    return grading.load_module(check.solution_of(EXERCISES[number]), f"timed_{number}")


def test_speed_is_bytes_over_the_median_beside_a_copy():
    moved = 4 * (4 * 128 + 4 * 64)  # x [4, 128] and y [4, 64] in float32
    timer = FakeTimer([moved / 3e9, moved / 2e9, 9.0], [moved / 4e9] * 3)  # the median moves 2,000 GB/s
    sentence = grading.check_speed(small_task(0.4), solution_module("03"), timer)
    assert sentence == "2,000 GB/s, 50% of a copy's 4,000"


def test_speed_below_the_floor_fails():
    with pytest.raises(grading.Wrong, match="right but slow: .* at least 60% are asked") as caught:
        grading.check_speed(small_task(0.6), solution_module("03"), FakeTimer([2.0], [1.0]))
    assert caught.value.kind == "slow"


def test_speed_is_measured_with_the_task_s_tiles_and_puts_the_answer_s_back():
    module, seen = solution_module("03"), []
    run = module.run
    module.run = lambda **tensors: seen.append((module.ROWS, module.BLOCK)) or run(**tensors)
    grading.check_speed(small_task(0.1), module, FakeTimer([1.0], [1.0]))
    assert seen == [(2, 64)] and (module.ROWS, module.BLOCK) == (4, 32)


def test_speed_without_a_gpu_is_said_to_need_one(monkeypatch):
    monkeypatch.setattr(grading, "INTERPRETED", True)
    assert grading.describe_speed(small_task(0.5), None) == "; its speed needs a GPU"
    assert grading.describe_speed(grading.load_task(EXERCISES["12"]), None) == ""


TIMED = [number for number, folder in EXERCISES.items() if grading.load_task(folder).speed]


@pytest.mark.parametrize("number", TIMED)
def test_timed_exercises_can_be_timed(number):
    """With their own tiles and few data, through the interpreter where there is no GPU."""
    task = grading.load_task(EXERCISES[number])
    small = dataclasses.replace(task.speed, sizes=next(iter(task.cases.values())))
    sentence = grading.check_speed(
        dataclasses.replace(task, speed=small), solution_module(number), FakeTimer([1.0], [1.0])
    )
    assert re.search(r"\d+% of a copy's", sentence)


def test_sizes_of_timed_exercises_are_too_large_for_a_cache():
    assert TIMED == ["01", "02", "03", "04", "05", "13"]
    for number in TIMED:
        task = grading.load_task(EXERCISES[number])
        sizes = task.speed.sizes
        assert set(sizes) <= set().union(*task.cases.values()) | {"D"}
        assert math.prod(size for name, size in sizes.items() if name != "turned") * 4 >= speed.FLUSH_BYTES


@pytest.mark.gpu
@pytest.mark.parametrize("number", TIMED)
def test_speed_on_a_gpu(number):
    """The solution reaches the floor, and no kernel is faster than the copy by more than noise."""
    task, module = grading.load_task(EXERCISES[number]), solution_module(number)
    sentence = grading.check_speed(task, module, speed.DeviceTimer(grading.DEVICE))
    print(f"exercise {number}: {sentence}")
    assert int(re.search(r"(\d+)%", sentence)[1]) < 115


@pytest.mark.gpu
def test_a_kernel_of_tiny_programs_is_too_slow_on_a_gpu():
    task, module = grading.load_task(EXERCISES["03"]), solution_module("03")
    slow = dataclasses.replace(task, speed=dataclasses.replace(task.speed, tiles={"ROWS": 1, "BLOCK": 16}))
    with pytest.raises(grading.Wrong, match="right but slow"):
        grading.check_speed(slow, module, speed.DeviceTimer(grading.DEVICE))


# ---------------------------------------------------------------- the stand-in for a graph


def test_tape_computes_nothing_while_it_captures_and_the_same_at_every_replay():
    x, total, tape = torch.tensor([1.0, 2.0]), torch.zeros(2), graphs.Tape()

    def work():
        total.add_(2 * x)
        return total.sum()

    with tape.warm_up():
        work()
    total.zero_()
    with tape.capture():
        result = work()
    assert total.tolist() == [0, 0]
    tape.replay()
    assert total.tolist() == [2, 4] and result.item() == 6
    x.copy_(torch.tensor([5.0, 0.0]))
    tape.replay()
    assert total.tolist() == [12, 4] and result.item() == 16 and tape.replays == 2


@pytest.mark.gpu
def test_exercise_15_uses_the_graph_of_a_gpu():
    assert isinstance(graphs.new_graph(torch.device("cuda")), graphs.DeviceGraph)
