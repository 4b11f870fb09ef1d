"""Hands-on kernels: stubs, solutions and wrong answers are in order, and the checker does what its help says."""

import ast
import dataclasses
import difflib
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from unittest import mock

import pytest
import torch
import triton

from common.versions import REPOSITORY, SCRIPTS
from marks import slow
from processes import run_file, running, wait_for

sys.path.insert(0, str(REPOSITORY / "exercises"))
sys.path.insert(0, str(SCRIPTS[3].parent / "exercises" / "performance_debugging"))
import stage_checks

import answers
import check
import grading
import graphs
import judge
import sessions
import speed
import verify
from common.command_line import Failure

EXERCISES = check.exercises()
VERSION3 = verify.kernels(SCRIPTS[3])
INTERPRETED = [number for number in EXERCISES if number != "12"]  # exercise 12 compiles
QUICK = INTERPRETED[5::12]
COMPILES = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 5)  # for an absent AMD GPU, in exercise 12
SLOW = [pytest.mark.slow, pytest.mark.skipif(not COMPILES, reason="Triton compiles for a GPU that it sees only")]


@pytest.mark.parametrize(
    "numbers",
    [QUICK, slow([number for number in INTERPRETED if number not in QUICK]), pytest.param(["12"], marks=SLOW)],
    ids=str,
)
def test_verify(numbers, capfd, monkeypatch):
    """Every stub is untouched, every solution passes, every typical mistake is blamed on its tensor in its words."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # a wrong kernel can crash a process that uses a GPU
    status = verify.verify(numbers)
    output = capfd.readouterr().out
    assert status == 0, output
    assert f"{len(numbers)} exercises and " in output


@pytest.mark.parametrize("number", ["15", "23", "25"])
@pytest.mark.quick(1)
def test_an_answer_is_judged_without_the_compiler(number):
    """The first TorchDispatchMode of a process imports torch._dynamo, unless it says that it needs none."""
    folder = EXERCISES[number]
    program = f"import sys, grading; verdict = grading.grade({str(folder)!r}, {str(answers.solution_of(folder))!r})\n"
    program += "print(verdict['sentence'], 'torch._dynamo' in sys.modules)"
    paths = os.pathsep.join([str(REPOSITORY / "exercises"), str(REPOSITORY / "scripts")])
    environment = os.environ | {"PYTHONPATH": paths, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert re.match(r"[34] cases in .* False$", done.stdout), done


def test_primer_shows_its_program():
    """The page's kernel, without its numbers and docstring, is that of primer.py, which prints what the page says."""
    page, program = ((REPOSITORY / "exercises" / name).read_text() for name in ("PRIMER.md", "primer.py"))
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(blocks) == 3  # the kernel, its Function, and the norm's
    for shown in blocks:
        for line in re.sub(r" +# \d+$", "", shown, flags=re.MULTILINE).splitlines():
            assert line in program.splitlines(), line
    printed = run_file(REPOSITORY / "exercises" / "primer.py").stdout
    assert printed and printed in page


# ---------------------------------------------------------------- the timetable


def test_sessions_add_up_and_hold_every_exercise():
    rest = sessions.INTRODUCTION + sessions.BREAK + sessions.DISCUSSION + sessions.SLACK
    for number in sessions.SESSIONS:
        minutes = sessions.minutes_of(number)
        assert number == 7 or (minutes == sessions.WORK and minutes + rest == 180), number
    listed = [kernel for number in sessions.SESSIONS for kernel in sessions.kernels(number)]
    assert sorted(listed) == list(EXERCISES)
    assert sessions.SESSIONS[7][2][-3][1] == "scripts/YOUR_OWN_SCRIPT.md"


def test_the_list_of_exercises_follows_the_timetable():
    page = (REPOSITORY / "exercises" / "README.md").read_text()
    listed = re.findall(r"^\| (\d) \| \[(\d\d)\].* (\d+) \|$", page, re.MULTILINE)
    planned = [
        (str(session), label[7:9], str(minutes))
        for session, (_, _, work) in sessions.SESSIONS.items()
        for label, _, minutes in work
        if label.startswith("kernel ")
    ]
    assert listed == planned


@pytest.mark.parametrize("number", sessions.SESSIONS)
def test_timetable_shows_the_sessions(number):
    timetable = (REPOSITORY / "version3_triton" / "README_WORKSHOP.md").read_text()
    assert sessions.table_row(number) in timetable.splitlines()


def lines_to_write(stub, solution):
    """Return how many lines of kernels and how many of host code a solution adds to its stub."""
    kernel = set()
    for node in ast.parse(solution).body:
        if isinstance(node, ast.FunctionDef) and any("triton.jit" in ast.unparse(each) for each in node.decorator_list):
            kernel.update(range(node.lineno, node.end_lineno + 1))
    counts = [0, 0]
    number = 0
    for change in difflib.ndiff(stub.splitlines(), solution.splitlines()):
        number += change[:2] in ("  ", "+ ")
        if change.startswith("+ ") and change[2:].strip():
            counts[number not in kernel] += 1
    return counts


def needed_minutes(number):
    """Return the minutes that sessions.py says a kernel takes: its words, the check, its lines, the deliverable."""
    folder = EXERCISES[number]
    page, stub, solution = (
        (folder / name).read_text() if (folder / name).exists() else ""
        for name in ("README.md", "exercise.py", "solution.py")
    )
    kernel_lines, host_lines = lines_to_write(stub, solution or (folder / "answer.py").read_text())
    return len(page.split()) / 180 + 1 + 2 * kernel_lines + host_lines + 5


def test_a_kernel_has_the_minutes_that_its_words_and_lines_need():
    """Rounded to five; more is left where the idea is new."""
    planned = {label[7:9]: minutes for _, _, work in sessions.SESSIONS.values() for label, _, minutes in work}
    planned = {number: planned[number] for number in EXERCISES if number != "03"}  # 03 is read only
    short = {number: (m, round(needed_minutes(number), 1)) for number, m in planned.items()}
    assert {number: pair for number, pair in short.items() if pair[0] < pair[1] - 2.5} == {}


# ---------------------------------------------------------------- the way through an exercise


@pytest.fixture
def workshop(tmp_path):
    """Return a copy of the exercises beside the real scripts, in a folder whose name has a space."""
    root = tmp_path / "a copy"
    ignored = shutil.ignore_patterns("__pycache__", ".progress.json")
    shutil.copytree(REPOSITORY / "exercises", root / "exercises", ignore=ignored)
    (root / "scripts").symlink_to(REPOSITORY / "scripts")
    return root / "exercises"


@pytest.mark.parametrize("target", [None, "gfx942"])
@pytest.mark.parametrize("passed", [True, False])
@pytest.mark.parametrize("what", ["01", "own"])
def test_the_exit_status_is_that_of_the_verdict(what, passed, target, tmp_path, monkeypatch, capsys):
    """Of an exercise and of a kernel of one's own, here and as a GPU's instructions; the grader learns which."""
    asked = []

    def grade(jobs, timeout=None, target=None, program=None):
        asked.append((target, program))
        case = None if passed else "one row"
        return [{"passed": passed, "sentence": "said", "speed": None, "case": case, "left": [], "lines": []}]

    monkeypatch.setattr(check, "grade", grade)
    monkeypatch.setattr(check, "is_started", lambda text: True)
    monkeypatch.setattr(check, "PROGRESS", tmp_path / ".progress.json")
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "task.py").touch()
    name = what if what == "01" else str(tmp_path / what)
    assert check.main([name, *(["--target", target] if target else [])]) == (0 if passed else 1)
    assert asked == [(target, "own_kernel.py" if what == "own" else None)]
    printed = capsys.readouterr().out
    assert ("said" in printed, "in case one row" in printed) == (True, not passed)
    assert any(word in printed for word in (("passed", "is right") if passed else ("failed", "is wrong")))


def call(folder, *arguments):
    """Return exit status and all output of check.py."""
    done = run_file(folder / "check.py", *arguments, cwd=folder.parent)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("01 --wach", "unrecognized arguments: --wach; did you mean --watch?"),
        ("01 --target mi300", "argument --target: invalid choice: 'mi300'"),
    ],
)
def test_a_mistyped_option_is_one_line(arguments, said, capsys):
    with pytest.raises(SystemExit, match="2"):
        check.main(arguments.split())
    err = capsys.readouterr().err
    assert err.startswith(f"check.py: error: {said}") and err.count("\n") == 1, err


def test_way_through_an_exercise(workshop):
    exercise, solution = (workshop / "01_row_sum" / name for name in ("exercise.py", "solution.py"))
    status, output = call(workshop, "01")
    assert status == 1 and "not started" in output
    status, output = call(workshop, "solution", "01")
    assert status == 1 and "not passed yet" in output
    assert "hint 1 of 3" in call(workshop, "hint", "01")[1]
    assert "hint 1 of 3" in call(workshop, "hint", "1")[1]  # the second opens after a failed check
    wrong = "    tl.store(sum_ptr + row, tl.zeros([ROWS], tl.float32), mask=row < rows)\n    # end of TODO"
    exercise.write_text(exercise.read_text().replace("    # end of TODO", wrong))
    status, output = call(workshop, "01")
    assert status == 1 and "failed in case one tile, float32" in output and "sum: relative error" in output
    assert "hint 2 of 3" in call(workshop, "hint", "01")[1]
    assert "hint 2 of 3" in call(workshop, "hint", "01")[1]  # the third opens after another failed check
    shutil.copy(solution, exercise)
    status, output = call(workshop, "01")
    assert status == 0 and "passed" in output
    exercise.write_text(exercise.read_text().replace("other=0.0", "other=0"))
    lines = [line for line in call(workshop, "solution", "01")[1].splitlines() if re.match("[-+] ", line)]
    assert [line[0] + re.search(r"other=[\d.]+", line)[0] for line in lines] == ["-other=0", "+other=0.0"]
    lines = call(workshop)[1].splitlines()
    assert lines[0] == "session 3, first kernels"
    assert lines[1].startswith("01") and lines[1].endswith("passed") and not lines[2].endswith("passed")


def test_giving_up_is_recorded(workshop):
    status, output = call(workshop, "solution", "07", "--give-up")
    assert status == 0 and "+        m_new = tl.maximum(m, tl.max(x, 0))" in output
    assert re.search("^07 .*[^ ,] +solution seen$", call(workshop, "list")[1], re.MULTILINE)


@pytest.mark.parametrize("arguments", [["99"], ["hint"], ["hint", "x"], ["hint", "01", "4"], ["solve"], ["--fast"]])
def test_bad_input(arguments):
    status, output = call(REPOSITORY / "exercises", *arguments)
    assert status == 2 and len(output.strip().splitlines()) <= 3


@pytest.mark.slow
def test_watch_ends_when_the_answer_is_right(workshop, monkeypatch):
    """The interpreter is chosen before Triton is imported, where there is no GPU."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    command = [sys.executable, workshop / "check.py", "01", "--watch"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        try:
            while "waiting for" not in (line := child.stdout.readline()):
                assert line
            shutil.copy(workshop / "01_row_sum" / "solution.py", workshop / "01_row_sum" / "exercise.py")
            assert "01 passed" in child.communicate(timeout=60)[0] and child.returncode == 0
        finally:
            child.kill()


# ---------------------------------------------------------------- what the checker says

RIGHT = "sum.copy_(x.sum(1))"
BESIDE = "{0}.as_strided((1,), (1,), {0}.storage_offset() {1}).zero_()"


@pytest.mark.parametrize(
    ("body", "kind", "said"),
    [
        (RIGHT, "no kernel", "the results are right, but no kernel was launched"),
        ("sum.zero_()", "value", "every element is wrong"),
        ("sum.copy_(2 * x.sum(1))", "value", "every element is 2 times its correct value"),
        ("sum.copy_(1.0002 * x.sum(1))", "value", "every element is 0.02 % too large"),
        ("sum.copy_(0.95 * x.sum(1))", "value", "every element is 5 % too small"),
        ("sum.copy_((x.sum(1)).half().float())", "value", "right to about 3 digits: look for a rounding to 16 bits"),
        (f"{RIGHT}; sum[2:] += 3", "value", "wrong only in row 2 to 3 of 4"),
        (f"{RIGHT}; sum[2:] += 3", "value", "(program 1)"),
        (f"{RIGHT}; sum[::2] += 3", "value", "2 of 4 elements are wrong, all of them in row 0 to 2"),
        (f"{RIGHT}; {BESIDE.format('x', '+ x.numel()')}", "stray", "x: 1 element outside the tensor written"),
        (f"{RIGHT}; {BESIDE.format('sum', '- 1')}", "stray", "sum: 1 element outside the tensor written"),
        (
            f"{RIGHT}; own = x.clone(); {BESIDE.format('own', '- 1')}",
            "stray",
            "a tensor [4, 8] that is allocated: 1 element outside",
        ),
        (f"assert 1 & 3 < 5; {RIGHT}", "precedence", "line 2: & binds tighter than a comparison"),
        (f"assert 0 < 1 | 3; {RIGHT}", "precedence", "line 2: | binds tighter than a comparison"),
        (f"assert (1 & 3) < 5; {RIGHT}", "no kernel", "the results are right"),  # it means what it says
        (f"ä = 'λλλ'; assert (1 & 3) < 5; {RIGHT}", "no kernel", "the results are right"),
        ("sum.copy_(missing)", "crash", "line 2: NameError"),
        ("sum.copy_(missing", "crash", "SyntaxError"),
        ("raise KeyboardInterrupt", "crash", "line 2: KeyboardInterrupt"),
        ("raise SystemExit(3)", "crash", "line 2: SystemExit: 3"),
    ],
)
def test_verdicts(tmp_path, body, kind, said):
    path = tmp_path / "exercise.py"
    path.write_text(f"def run(x, sum):\n    {body}\n\nROWS = 2\n", encoding="utf-8")
    verdict = grading.grade(EXERCISES["01"], path)
    assert not verdict["passed"] and verdict["kind"] == kind and said in verdict["sentence"], verdict["sentence"]


def in_kernel(lines):
    return "@triton.jit\ndef kernel(x_ptr, n, C, BLOCK: tl.constexpr):\n" + "".join(f"    {line}\n" for line in lines)


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (["row = tl.arange(0, BLOCK)", "mask = row < n and row >= 0"], "line 4: and asks .*: use &, and put each"),
        (["row, column = tl.arange(0, 4), tl.arange(0, 8)", "mask = n and column[None, :] < C"], "line 4: and asks"),
        (["i = tl.arange(0, 4)", "mask = i < n or i > 7"], "line 4: or asks .*: use |"),
        (["i = (tl.program_id(0) * 4 + tl.arange(0, 4)).to(tl.int64)", "x = not i < n"], "line 4: not asks .*: use ~"),
        (["i = tl.arange(0, 4)", "if i < n:", "    i += 1"], "line 4: if asks .*: use a mask or tl.where"),
        (["i = tl.arange(0, 4)", "j = i if i[:, None] < n else 0"], "line 4: if asks"),
        (["if n > 4 and C > 2:", "    n = 3"], None),
        (["i = tl.arange(0, 4)", "m = tl.max(i, 0)", "if m > 3 and not n:", "    n = 3"], None),
        (["i = tl.arange(0, 4)", "for j in range(n):", "    i += j", "if BLOCK > 4 or C:", "    n = 3"], None),
    ],
)
def test_a_vector_has_no_truth_value(lines, said):
    """In Triton's interpreter it is True, so `and` gives its second operand; a GPU takes it for &, or refuses it."""
    if said is None:
        grading.check_precedence(in_kernel(lines))
        return
    with pytest.raises(judge.Wrong, match=said) as caught:
        grading.check_precedence(in_kernel(lines))
    assert caught.value.kind == "precedence"


@pytest.mark.parametrize(
    ("code", "said"),
    [
        slow("import os; os.kill(os.getpid(), 15)", "was ended by SIGTERM"),
        ("import os; os.kill(os.getpid(), 11)", r"crashed Python \(SIGSEGV\): a load or store far outside"),
        slow("import os; os.kill(os.getpid(), 6)", r"crashed Python \(SIGABRT\): a load or store far outside"),
        slow("import os; os._exit(3)", "ended Python with status 3"),
        slow("while True:\n    pass", "does every loop in your kernel end"),
    ],
)
def test_a_crash_or_hang_does_not_take_the_checker_down(tmp_path, code, said):
    path = tmp_path / "exercise.py"
    path.write_text(f"{code}\n")
    with pytest.raises(Failure, match=said):
        check.grade([(EXERCISES["01"], path)], timeout=60 if "while" not in code else 1)


def test_an_environment_that_is_not_active_is_named():
    said = "Traceback ...\nModuleNotFoundError: No module named 'torch'\n"
    assert "has no torch: run `source .venv/bin/activate` first" in answers.describe_end(1, said, "exercise.py")


KERNEL = """
import triton
import triton.language as tl

ROWS = 2

@triton.jit
def kernel(sum_ptr, value):
    {body}

def run(x, sum):
    {run}
"""


@pytest.mark.parametrize(
    ("body", "run", "said"),
    [
        ("pass", f"{RIGHT}; kernel[(1,)](sum, 0.0)", "sum: right, but not written by a kernel"),
        ("pass", f"kernel[(1,)](sum, 0.0); {RIGHT}", "sum: right, but not written by a kernel"),
        ("tl.store(sum_ptr, value)", f"kernel[(1,)](sum, 0.0); {RIGHT}", "sum: right, but not written by a kernel"),
        (
            "tl.store(sum_ptr, value)",
            f"{RIGHT}; [kernel[(1,)](sum[i:], sum[i].item()) for i in range(4)]",
            "not written",
        ),
    ],
)
def test_a_launch_beside_the_result_is_no_kernel(tmp_path, body, run, said):
    (tmp_path / "exercise.py").write_text(KERNEL.format(body=body, run=run))
    verdict = grading.grade(EXERCISES["01"], tmp_path / "exercise.py")
    assert (verdict["kind"], verdict["tensor"]) == ("no kernel", "sum") and said in verdict["sentence"], verdict


@pytest.mark.skipif(torch.cuda.is_available(), reason="a compiler's error has no frame in the answer")
def test_a_crash_in_a_kernel_has_the_kernel_s_line(tmp_path):
    """The interpreter raises an error of its own from the launch; the cause has the line."""
    (tmp_path / "exercise.py").write_text(KERNEL.format(body="missing + 1", run="kernel[(1,)](sum, 0.0)"))
    verdict = grading.grade(EXERCISES["01"], tmp_path / "exercise.py")
    assert verdict["sentence"].startswith("line 9: NameError"), verdict["sentence"]


@pytest.mark.parametrize(
    "code",
    [
        "sys.path.insert(0, FOLDER); from solution import *",
        slow("exec(open(FOLDER + '/solution.py').read())"),
        slow(
            "spec = importlib.util.spec_from_file_location('mine', FOLDER + '/../01_row_sum/solution.py'); "
            "mine = importlib.util.module_from_spec(spec); spec.loader.exec_module(mine); "
            "run = mine.run; ROWS = mine.ROWS"
        ),
        slow("exec(open(FOLDER.encode() + b'/solution.py').read())"),
        slow(
            "from pathlib import Path; link = Path(__file__).with_name('mine.py'); "
            "link.symlink_to(FOLDER + '/solution.py'); exec(link.read_text())"
        ),
    ],
)
@pytest.mark.slow
def test_an_answer_that_opens_the_solution_fails(tmp_path, code):
    path = tmp_path / "exercise.py"
    path.write_text(f"import importlib.util, sys\nFOLDER = {str(EXERCISES['01'])!r}\n{code}\n")
    verdict = check.grade([(EXERCISES["01"], path)])[0]
    assert verdict["kind"] == "copied" and "the answer reads solution" in verdict["sentence"], verdict


FORKS = """
import os, time
child = os.fork()
if not child:
    time.sleep(600)
open({record!r}, "a").write(f"{{os.getpid()}} {{child}}\\n")
while {hang}:
    pass
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("hang", [True, False])
@pytest.mark.slow
def test_an_answer_ends_with_all_that_it_started(tmp_path, hang):
    path, record = tmp_path / "exercise.py", tmp_path / "pids"
    path.write_text(FORKS.format(record=str(record), hang=hang) + "\ndef run(x, sum):\n    pass\nROWS = 2\n")
    if hang:
        with pytest.raises(Failure, match="not finished after 15 s"):
            check.grade([(EXERCISES["01"], path)], timeout=15)
    else:
        assert check.grade([(EXERCISES["01"], path)])[0]["kind"] == "unwritten"
    wait_for(lambda: not any(running(pid) for pid in record.read_text().split()))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("number", [signal.SIGKILL, slow(signal.SIGINT)], ids=lambda number: number.name)
def test_a_killed_checker_leaves_no_process(workshop, number):
    exercise, record = workshop / "01_row_sum" / "exercise.py", workshop / "pids"
    exercise.write_text(FORKS.format(record=str(record), hang=True))
    with subprocess.Popen([sys.executable, workshop / "check.py", "01"], stderr=subprocess.DEVNULL) as checker:
        try:
            wait_for(lambda: record.exists() and record.read_text().endswith("\n"))
        finally:
            checker.send_signal(number)
    wait_for(lambda: not any(running(pid) for pid in record.read_text().split()))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[1]",
        "null",
        "\0",
        '{"01": 5}',
        '{"01": {"hints": "two"}}',
        '{"01": {"hints": -2}}',
        '{"03": {"passed": true, "speed": "fast"}}',
        '{"03": {"passed": true, "speed": [1e400, 1e400]}}',
        '{"03": {"passed": true, "speed": [1, 0]}}',
        f'{{"03": {{"passed": true, "speed": [{10**400}, 1]}}}}',
        "[" * 9999,
    ],
)
def test_a_damaged_progress_file_is_mended(workshop, text):
    (workshop / ".progress.json").write_text(text)
    assert call(workshop)[0] == 0
    status, output = call(workshop, "scoreboard")
    assert status == 0 and " inf" not in output and " nan" not in output
    assert "hint 1 of 3" in call(workshop, "hint", "01")[1]
    assert json.loads((workshop / ".progress.json").read_text())["01"]["hints"] == 1


@pytest.mark.parametrize("kind", ["folder", "loop", "pipe"])
def test_a_progress_file_that_cannot_be_read_ends_nothing(workshop, kind):
    progress = workshop / ".progress.json"
    make = {
        "folder": progress.mkdir,
        "loop": lambda: progress.symlink_to(progress),
        "pipe": lambda: os.mkfifo(progress),
    }
    make[kind]()
    assert call(workshop)[0] == 0
    status, output = call(workshop, "hint", "01")
    assert status == 0 and "hint 1 of 3" in output
    assert ("cannot save your progress" in output) == (kind != "loop")
    assert not list(workshop.glob(".progress.*.partial"))


def test_more_hints_than_there_are(workshop):
    (workshop / ".progress.json").write_text('{"01": {"hints": 1000000000, "failed": true}}')
    status, output = call(workshop, "hint", "01")
    assert status == 0 and "hint 3 of 3" in output and "next hint" not in output


@pytest.mark.slow
def test_an_answer_that_is_not_utf8_is_named(workshop):
    path = workshop / "01_row_sum" / "exercise.py"
    path.write_bytes(path.read_bytes().replace(b"    # end of TODO", b"    x = 1  # \xe9\n    # end of TODO"))
    status, output = call(workshop)
    assert status == 0 and re.search("^01 .* started$", output, re.MULTILINE), output
    status, output = call(workshop, "01")
    assert status == 1 and "01 failed\n   UnicodeDecodeError: 'utf-8' codec can't decode byte 0xe9" in output, output


# ---------------------------------------------------------------- verify finds what it must


def test_a_solution_that_fails_is_told_by_the_status(monkeypatch, capsys):
    verdict = {"passed": False, "kind": "value", "tensor": "y", "sentence": "y is wrong", "seconds": 0.0}
    monkeypatch.setattr(verify, "wrong_answers", lambda *_: [])
    monkeypatch.setattr(verify, "grade", lambda answers, timeout: [verdict])
    assert verify.verify(["02"]) == 1
    assert "02, solution: the solution fails: y is wrong\n" in capsys.readouterr().out


def test_solutions_alone_are_verified(monkeypatch, capsys):
    """On a GPU, hundreds of wrong answers take longer than check_room.sh has, and a stray store ends the process."""
    verdict = {"passed": True, "kind": None, "tensor": None, "sentence": "passed", "seconds": 0.0}
    graded = []
    monkeypatch.setattr(verify, "grade", lambda answers, timeout: graded.extend(answers) or [verdict] * len(answers))
    assert check.main(["verify", "02", "03", "--solutions"]) == 0
    assert graded == [(folder, verify.solution_of(folder)) for folder in map(check.folder_of, ("02", "03"))]
    assert "2 exercises are in order\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "old", "new", "said"),
    [
        ("exercise.py", "# end of TODO", "a = 1\n    # end of TODO", "is started"),
        ("exercise.py", "def run(x, y)", "def run(y, x)", "differ outside"),
        ("hints.md", "## 3", "3", "three sections"),
        ("README.md", "# SwiGLU", "\n" * 60, "longer than 60 lines"),
        ("README.md", "**Deliverable.**", "", "names no deliverable"),
        ("README.md", "4 cases", "5 cases", "does not say what a right answer gets: 03 passed: 4 cases"),
        ("solution.py", "x_ptr, y_ptr, rows", "y_ptr, rows", "could not take its place in tiny_llama_v3.py"),
    ],
)
def test_faults_of_an_exercise_are_found(workshop, name, old, new, said):
    folder = workshop / EXERCISES["03"].name
    assert list(verify.find_faults(folder, VERSION3)) == []
    (folder / name).write_text((folder / name).read_text().replace(old, new))
    assert any(said in fault for fault in verify.find_faults(folder, VERSION3))


@pytest.mark.parametrize("number", EXERCISES)
def test_a_page_is_right_on_a_gpu_too(number, monkeypatch):
    """A GPU has one dtype more than the interpreter: no page may promise their number alone."""
    task = grading.load_task(EXERCISES[number])
    if len(task.dtypes) > 1:
        task = dataclasses.replace(task, dtypes=(torch.float32, torch.float16, torch.bfloat16))
    monkeypatch.setattr(verify, "load_task", lambda folder: task)
    assert list(verify.find_faults(EXERCISES[number], VERSION3)) == []


def test_wrong_verdicts_are_found():
    mistake = grading.Mistake("a", "b", "dx", says="halves")
    right = {"passed": False, "kind": "value", "tensor": "dx", "sentence": "the halves are exchanged"}
    assert verify.judge_verdict(mistake, right) is None and not verify.judge_verdict(None, {"passed": True})
    for change in ({"tensor": "dy"}, {"kind": "crash"}, {"passed": True}, {"sentence": "wrong"}):
        assert verify.judge_verdict(mistake, right | change)
    assert verify.judge_verdict(None, right)


# ---------------------------------------------------------------- speed

TIMED = [number for number, folder in EXERCISES.items() if grading.load_task(folder).speed]


class FakeTimer:
    """Return the given milliseconds, the answer's first, and call what is timed once, as a real timer does."""

    def __init__(self, *milliseconds):
        self.left = list(milliseconds)

    def milliseconds(self, call):
        call()
        return self.left.pop(0)


def small_task(number, **changes):
    """Return a task whose inputs are small when it is timed."""
    task = grading.load_task(EXERCISES[number])
    changes = {"sizes": next(iter(task.cases.values())), "floor": 0.1} | changes
    return dataclasses.replace(task, speed=dataclasses.replace(task.speed, **changes))


def solution_module(number):
    return grading.load_module(check.solution_of(EXERCISES[number]), f"timed_{number}")


def test_speed_is_bytes_over_the_median_compared_with_a_copy():
    task, module, seen = small_task("03", floor=0.4, tiles={"ROWS": 2, "BLOCK": 64}), solution_module("03"), []
    run = module.run
    module.run = lambda **tensors: seen.append((module.ROWS, module.BLOCK)) or run(**tensors)
    moved = sum(tensor.numel() * 4 for tensor in task.inputs(**task.speed.sizes).values()) * 1.5  # x, and y half of it
    times = [moved / 3e9, moved / 2e9, 9.0], [moved / 4e9] * 3  # the median moves 2,000 GB/s
    rates = grading.check_speed(task, module, FakeTimer(*times))
    assert rates == pytest.approx((2000, 4000), rel=0.01)
    assert seen == [(2, 64)] and (module.ROWS, module.BLOCK) == (4, 32)  # the task's tiles, then the answer's
    sentence = grading.describe_pass(task, rates)
    assert "2,000 GB/s, 50 % of the copy bandwidth (4,000 GB/s); version 3 on one NVIDIA H" in sentence
    assert grading.describe_pass(task, None).endswith("on a GPU to see its speed")
    grading.check_speed(small_task("03", floor=0.499), module, FakeTimer(*times))
    with pytest.raises(judge.Wrong, match="right but slow: .* 50 % of .* at least 50 %") as caught:
        grading.check_speed(small_task("03", floor=0.501), module, FakeTimer(*times))
    assert caught.value.kind == "slow"


@pytest.mark.parametrize("number", TIMED)
def test_timed_exercises_can_be_timed(number):
    """With their own tiles on little data; their real sizes exceed any cache."""
    sizes = grading.load_task(EXERCISES[number]).speed.sizes
    assert math.prod(size for name, size in sizes.items() if name != "rotated_heads") * 4 >= speed.FLUSH_BYTES
    rates = grading.check_speed(small_task(number), solution_module(number), FakeTimer([1.0], [1.0]))
    assert rates[0] > 0.5 * rates[1]


def test_scoreboard_shows_own_and_recorded_speed(workshop):
    (workshop / ".progress.json").write_text('{"03": {"passed": true, "speed": [3000.0, 4000.0]}}')
    status, output = call(workshop, "scoreboard")
    rows = {line[:2]: line for line in output.splitlines()}
    assert status == 0 and set(TIMED) <= set(rows)
    rate, copy = speed.recorded_speed("SwiGLU forward")["V3"]
    assert "3,000 (75 %)" in rows["03"] and f"{rate:,.0f} ({100 * rate / copy:.0f} %)" in rows["03"]
    assert speed.recorded_speed("no such operation") is None and " - " in rows["01"]


def test_recorded_speed_is_of_the_newest_record(tmp_path, monkeypatch):
    """By its date: the folders' names begin with the GPU. A candidate that was refused has no rate."""
    for gpu, day, rate in (("a", 24, 100.0), ("b", 25, 200.0), ("c", 23, 300.0)):
        found = [{"name": "V3", "reason": None, "rate": rate}, {"name": "PyTorch", "reason": "out of memory"}]
        content = {
            "environment": {"date": f"2026-11-{day}", "device": gpu},
            "operations": [{"operation": "SwiGLU forward", "candidates": found}],
            "ceilings": {"copy": 2 * rate},
        }
        folder = tmp_path / f"{gpu}_2026-11-{day}" / "kernels"
        folder.mkdir(parents=True)
        (folder / "kernels.json").write_text(json.dumps(content))
    monkeypatch.setattr(speed, "RECORDED", tmp_path)
    assert speed.recorded_speed("SwiGLU forward") == {"device": "b", "V3": [200.0, 400.0]}


@pytest.mark.skipif(torch.cuda.is_available(), reason="counts in Triton's interpreter")
@pytest.mark.parametrize("number", TIMED)
def test_speed_counts_what_a_solution_moves(number):
    """A kernel could seem faster than a copy if it moved less than what counts; much more, and it misses its floor."""
    accesses = []  # of the first call: an array of addresses for each load and store

    class Timer(FakeTimer):
        def milliseconds(self, call):
            if accesses:
                return super().milliseconds(call)
            with stage_checks.noted_accesses(accesses.append):
                return super().milliseconds(call)

    rate, _ = grading.check_speed(small_task(number), solution_module(number), Timer([1.0], [1.0]))
    elements = rate * 1e6 / 4
    touched = set().union(*(addresses.tolist() for addresses in accesses))
    moved = sum(addresses.size for addresses in accesses)
    floor = grading.load_task(EXERCISES[number]).speed.floor
    assert elements <= len(touched) and moved * floor <= elements, (elements, len(touched), moved)


class Clock:
    """Simulate a GPU's events: what is launched takes its time on the host, then on the GPU."""

    def __init__(self):
        self.now, self.host, self.launched = 0.0, 0.0, []

    def launch(self, name, milliseconds, host=0.0):
        self.launched.append(name)
        self.host += host
        self.now = max(self.now, self.host) + milliseconds

    def event(self, enable_timing):
        event = mock.Mock()
        event.record.side_effect = lambda: setattr(event, "at", max(self.now, self.host))
        event.query = lambda: event.at < self.host
        event.elapsed_time = lambda later: later.at - event.at
        return event


def timer_on(clock, monkeypatch, flush):
    """Return a DeviceTimer on a simulated GPU that flushes its caches in so many ms."""
    monkeypatch.setattr(torch.cuda, "Event", clock.event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: clock.launch("wait", 0))
    monkeypatch.setattr(speed, "FLUSH_BYTES", 1)
    timer = speed.DeviceTimer(torch.device("cpu"))
    timer.flushed = mock.Mock()
    timer.flushed.zero_.side_effect = lambda: clock.launch("flush", flush)
    return timer


def test_a_call_is_timed_alone_and_with_empty_caches(monkeypatch):
    clock = Clock()
    timer = timer_on(clock, monkeypatch, flush=100)
    assert timer.milliseconds(lambda: clock.launch("call", 3)) == [3] * speed.LAUNCHES
    assert clock.launched == ["call", *(["flush"] * speed.FLUSHES + ["call"]) * speed.LAUNCHES, "wait"]
    assert not timer.host_bound


def test_the_time_is_the_gpus_even_where_the_host_needs_longer_for_the_call(monkeypatch):
    """As for a compiled function with its backward; four flushes are over before the host is through."""
    clock = Clock()
    timer = timer_on(clock, monkeypatch, flush=0.07)
    assert timer.milliseconds(lambda: clock.launch("call", 0.1, host=1)) == pytest.approx([0.1] * speed.LAUNCHES)
    assert not timer.host_bound


@pytest.mark.parametrize(("late", "flushes"), [(5, [4]), (6, [4, 8, 16, 32, 64, 128, 256])])
def test_the_gpu_may_begin_a_quarter_of_the_calls_before_the_host_is_through(late, flushes, monkeypatch):
    """More, and it gets more to flush, up to the most."""
    timer = timer_on(Clock(), monkeypatch, flush=1)
    asked = []
    monkeypatch.setattr(timer, "time_calls", lambda call, number: (asked.append(number) or [], late))
    timer.milliseconds(lambda: None)
    assert asked == flushes and timer.host_bound == (late > 5)


def test_a_call_in_which_the_gpu_waits_for_the_host_is_known(monkeypatch):
    """Such as one that asks the GPU for a value."""
    clock = Clock()
    timer = timer_on(clock, monkeypatch, flush=0.07)
    timer.milliseconds(lambda: clock.launch("call", 0.1, host=clock.now - clock.host + 1))
    assert timer.host_bound


@pytest.mark.gpu
@pytest.mark.parametrize("number", EXERCISES)
def test_solutions_pass_on_a_gpu(number, monkeypatch):
    """Those that are timed are graded here, at the sizes and with the tiles of the timing, and the times are given."""
    answer = EXERCISES[number], check.solution_of(EXERCISES[number])
    if number in TIMED:
        monkeypatch.setattr(grading, "DeviceTimer", lambda device: FakeTimer([1.0], [1.0]))
        verdict = grading.grade(*answer)
        assert not verdict["passed"] or verdict["speed"]
    else:
        verdict = check.grade([answer])[0]
    assert verdict["passed"], verdict["sentence"]


def test_the_tape_takes_a_gradient_that_each_step_makes_anew():
    """As a GPU's graph does: PyTorch's advice is zero_grad(set_to_none=True)."""
    tape, w, x = graphs.Tape(), torch.ones(3, 2, requires_grad=True), torch.ones(4, 3)

    def step():
        w.grad = None
        (x @ w).sum().backward()

    with tape.warm_up():
        step()
    with tape.capture():
        step()
    x.fill_(2)
    tape.replay()
    assert torch.equal(w.grad, torch.full((3, 2), 8.0))


def test_exercise_13_looks_for_calls():
    check_base = grading.load_task(EXERCISES["13"]).then
    assert check_base(None, "# no tl.exp(x)\nscale = math.log(2)") is None
    with pytest.raises(judge.Wrong, match="exp is used: use tl.exp2"):
        check_base(None, "from triton.language import exp\np = exp(x)")


def test_exercise_23_measures_the_memory_that_is_alive():
    """Views share their tensor's memory, a tensor in a reference cycle is garbage, and a known one does not count."""
    meter_of = grading.load_task(EXERCISES["23"]).then.__globals__["MemoryMeter"]
    known = torch.ones(1000)
    with meter_of(known) as meter:
        first = torch.zeros(100)
        cycle = [first]
        cycle.append(cycle)
        del first, cycle
        second = torch.zeros(25)
        views = [second.view(5, 5), known.view(10, 100)]
        torch.zeros(50)
    assert (meter.peak, meter.largest, len(views)) == (400, 400, 2)


@pytest.mark.gpu
def test_exercise_15_uses_the_graph_of_a_gpu():
    assert isinstance(graphs.new_graph(torch.device("cuda")), graphs.DeviceGraph)


def test_a_missing_row_of_partial_sums_is_named_though_a_gpu_loses_the_bits_of_its_nan():
    """An interpreter's sum keeps the bits that mark unwritten memory; a GPU's sum is any NaN."""
    task = grading.load_task(EXERCISES["06"])
    inputs = task.inputs(rows=6, C=8)
    exact = task.define(**inputs)
    inputs = {name: value.detach() for name, value in inputs.items()}
    judged = judge.Judge(task, solution_module("06"), inputs, lambda suspect: suspect(**inputs))
    got = {**exact, "dw": torch.full((8,), float("nan"))}
    with pytest.raises(judge.Wrong, match="8 of 8 elements are NaN .*program p stores row p"):
        judged.check_finite("dw", got, exact)


def test_a_result_may_have_twice_pytorchs_error():
    exact = torch.ones(100, dtype=torch.float64)
    task = grading.Task({}, None, None, {"y": "row"}, {}, tolerance=1e-6)
    judged = judge.Judge(task, None, {}, None)
    plain = {"y": 1.001 * exact}
    judged.check_values({"y": 1.0019 * exact}, plain, {"y": exact})
    with pytest.raises(judge.Wrong, match="relative error 2.1e-03, allowed 2.0e-03"):
        judged.check_values({"y": 1.0021 * exact}, plain, {"y": exact})


def test_a_matmul_may_add_its_products_one_after_another():
    """An H200 does, and rounds each sum; PyTorch's sums of tiles are three times closer where halves cancel."""
    task = grading.load_task(EXERCISES["17"])
    inputs = task.inputs(**task.cases["halves of K that nearly cancel"])
    x, w = inputs["x"].double(), inputs["w"].double()
    one_by_one, of_tiles = torch.zeros(2, len(x), len(w))
    for k in range(x.shape[1]):
        one_by_one = (one_by_one + x[:, k, None] * w[:, k]).float()
    for tile in range(0, x.shape[1], 16):
        of_tiles += inputs["x"][:, tile : tile + 16] @ inputs["w"][:, tile : tile + 16].T
    judged = judge.Judge(task, solution_module("17"), inputs, lambda suspect: suspect(x, w))
    judged.check_values({"y": one_by_one}, {"y": of_tiles}, task.define(x, w))


@pytest.mark.parametrize(
    ("factor", "rounds", "said"),
    [
        (2e-5, False, "all digits that 16 bits have are right: look at a small constant"),
        (1e-4, False, "right to about 3 digits: look for a rounding to 16 bits"),
        (1e-2, True, "right in float32: what is rounded to 16 bits on the way: a sum,"),
    ],
)
def test_noise_is_described_by_its_size_and_dtype(factor, rounds, said):
    """A rounding to float16 makes a relative error of about 3e-4, so 2e-5 cannot come from one."""
    exact = 1 + torch.arange(100, dtype=torch.float64) / 50
    noise = factor * torch.randn(100, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    task = grading.Task({}, None, None, {"y": "row"}, {})
    judged = judge.Judge(task, None, {}, None, rounds=rounds)
    with pytest.raises(judge.Wrong, match=said):
        judged.check_values({"y": exact * (1 + noise)}, {"y": exact}, {"y": exact})


@pytest.mark.parametrize(
    ("suspect", "said"),
    [
        (lambda y, z: {"y": 2 * y, "z": z * torch.nan}, "y is doubled"),  # any z
        (lambda y, z: {"y": y * torch.nan, "z": 2 * z}, "every element is 2 times"),  # any y explains no y
    ],
)
def test_a_typical_error_may_leave_the_later_results_open(suspect, said):
    exact = {name: torch.ones(4, dtype=torch.float64) for name in "yz"}
    task = grading.Task({}, None, None, {"y": "row", "z": "row"}, {}, suspects={"y is doubled": suspect})
    judged = judge.Judge(task, None, {}, lambda suspect: suspect(**exact))
    with pytest.raises(judge.Wrong, match=said):
        judged.check_values({name: 2 * value for name, value in exact.items()}, exact, exact)


def test_a_load_without_other_explains_what_is_nowhere_finite():
    """A typical error that is nowhere finite either looks the same."""
    task = grading.Task({}, None, None, {"y": "row"}, {}, suspects={"lost": lambda y: {"y": y * torch.nan}})
    exact = {"y": torch.ones(2, dtype=torch.float64)}
    judged = judge.Judge(task, None, {}, lambda suspect: suspect(**exact), undefined="line 3 loads without other")
    with pytest.raises(judge.Wrong, match="line 3 loads without other"):
        judged.check_finite("y", {"y": torch.full((2,), torch.nan)}, exact)


@pytest.mark.parametrize(("z", "said"), [(1, "y is doubled"), (3, "every element is 2 times its correct value")])
def test_a_typical_error_explains_all_that_is_wrong_or_nothing(z, said):
    exact = {name: torch.ones(4, dtype=torch.float64) for name in "yz"}
    task = grading.Task({}, None, None, {"y": "row"}, {}, suspects={"y is doubled": lambda y, z: {"y": 2 * y}})
    judged = judge.Judge(task, None, {}, lambda suspect: suspect(**exact))
    with pytest.raises(judge.Wrong, match=said):
        judged.check_values({"y": 2 * exact["y"], "z": z * exact["z"]}, exact, exact)


@pytest.mark.parametrize(("z", "said"), [(1, "the first is lost"), (3, "look for a load past the end")])
def test_a_typical_error_explains_all_results_where_one_is_not_finite(z, said):
    exact = {name: torch.ones(2, dtype=torch.float64) for name in "yz"}
    lost = torch.tensor([torch.nan, 1.0])
    suspects = {"the first is lost": lambda y, z: {"y": y * lost, "z": z}}
    judged = judge.Judge(
        grading.Task({}, None, None, {"y": "row"}, {}, suspects=suspects), None, {}, lambda s: s(**exact)
    )
    with pytest.raises(judge.Wrong, match=said):
        judged.check_finite("y", {"y": lost, "z": z * exact["z"]}, exact)


@pytest.mark.parametrize(
    ("value", "said"), [(torch.nan, "a NaN"), (torch.inf, "an infinity"), (-torch.inf, "an infinity")]
)
def test_of_typical_errors_that_fit_the_one_with_the_answers_nan_is_named_or_else_the_first(value, said):
    def suspect(number):
        return lambda y: {"y": y * torch.tensor([number, 1.0])}

    exact = {"y": torch.ones(2, dtype=torch.float64)}
    suspects = {"an infinity": suspect(torch.inf), "a NaN": suspect(torch.nan), "another NaN": suspect(torch.nan)}
    task = grading.Task({}, None, None, {"y": "row"}, {}, suspects=suspects)
    judged = judge.Judge(task, None, {}, lambda suspect: suspect(**exact))
    with pytest.raises(judge.Wrong, match=f": {said}$"):
        judged.check_finite("y", {"y": torch.tensor([value, 1.0])}, exact)


@pytest.mark.slow
def test_on_a_gpu_no_module_asks_for_the_interpreter_when_it_is_imported():
    """The tests import several into one process, whose other kernels are compiled."""
    names = sorted(path.stem for path in (REPOSITORY / "exercises").glob("*.py"))
    text = "import os, torch\nos.environ.pop('TRITON_INTERPRET', None)\ntorch.cuda.is_available = lambda: True\n"
    text += "\n".join(f"import {name}\nassert 'TRITON_INTERPRET' not in os.environ, '{name}'" for name in names)
    options = {"cwd": REPOSITORY / "exercises", "capture_output": True, "text": True}
    done = subprocess.run([sys.executable, "-c", text], **options)
    assert done.returncode == 0, done.stderr
