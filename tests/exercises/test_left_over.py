"""The checker's verdict reaches the participant whatever the answer left, and nothing of the answer stays."""

import io
import json
import os
import pathlib
import re
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

from common.command_line import Failure
from common.versions import REPOSITORY
from processes import running, wait_for

sys.path.insert(0, str(REPOSITORY / "exercises"))
import answers
import check
import grading
import keeper
import ranks
import tile_compiler

EXERCISES = check.exercises()
ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a process that leaves its group is not found")


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("raise type('E', (Exception,), {'__str__': lambda self: 1 / 0})()", "E: its __str__ raises ZeroDivisionError"),
        ("raise type('E', (Exception,), {'__str__': lambda self: exit()})()", "E: its __str__ raises SystemExit"),
        ("raise ValueError('x' * 10**7)", f"ValueError: {'x' * 388} ..."),
        (
            "a, b = OSError('a'), ValueError('b'); a.__cause__ = b; b.__cause__ = a; raise a",
            "ValueError: b",
        ),
    ],
)
def test_an_error_that_cannot_tell_itself_is_told(tmp_path, body, reason):
    path = tmp_path / "exercise.py"
    path.write_text(f"def run(x, sum):\n    {body}\n\nROWS = 2\n")
    verdict = grading.grade(EXERCISES["01"], path)
    assert verdict["sentence"] == f"line 2: {reason}"


@pytest.mark.slow
def test_an_answer_that_deletes_itself_is_judged(tmp_path):
    path = tmp_path / "exercise.py"
    path.write_text("import os\nos.unlink(__file__)\n" + (EXERCISES["01"] / "solution.py").read_text())
    assert grading.grade(EXERCISES["01"], path)["passed"] and not path.exists()


@pytest.mark.parametrize("stdout", [None, SimpleNamespace(), io.TextIOWrapper(io.BytesIO())])
def test_a_case_is_told_whatever_the_answer_did_to_print(monkeypatch, capfd, stdout):
    monkeypatch.setattr("builtins.print", None)
    monkeypatch.setattr(sys, "stdout", stdout)
    grading.tell("one tile")
    assert capfd.readouterr().out == "one tile\n"


def test_a_fork_of_the_answer_writes_no_verdict(tmp_path, monkeypatch):
    def end(status):
        raise SystemExit(status)

    numbers = iter(range(9))
    (tmp_path / "jobs.json").write_text('[["folder", "file"]]')
    monkeypatch.setattr(grading.os, "getpid", lambda: next(numbers))
    monkeypatch.setattr(grading.os, "_exit", end)
    with pytest.raises(SystemExit):
        grading.answer_jobs(lambda folder, path: {"passed": True}, tmp_path)
    assert not (tmp_path / "verdicts.json").exists() and not (tmp_path / "done").exists()


# ---------------------------------------------------------------- what an answer leaves

WORK = "import json, os, subprocess, sys, threading, time\nfolder = sys.argv[1]\n"
DONE = "open(folder + '/done', 'w').write(json.dumps([t.name for t in threading.enumerate()[1:] if not t.daemon]))\n"
SLEEP = "subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
LEFT = {
    "nothing": ("", []),
    "daemon thread": ("threading.Thread(target=time.sleep, args=[600], daemon=True).start()\n", []),
    "thread": ("threading.Thread(target=time.sleep, args=[600], name='mine').start()\n", ["thread mine"]),
    "process": (SLEEP, ["process N: sleep 600"]),
    "daemon": (
        "if not os.fork():\n    os.setsid()\n    if os.fork():\n        os._exit(0)\n    time.sleep(600)\n",
        ["process N, a fork of the answer"],
    ),
    "five": (5 * SLEEP, [*(3 * ["process N: sleep 600"]), "2 more processes"]),
    "at exit": ("import atexit\natexit.register(time.sleep, 600)\n", ["Python, in a function that runs at its exit"]),
}


def kept(tmp_path, code, pipe):
    """Run a program under the keeper; return the keeper's process."""
    (tmp_path / "work.py").write_text(WORK + code)
    command = [sys.executable, "-I", "-S", str(tmp_path / "short.py"), str(pipe), str(tmp_path), "600"]
    text = (REPOSITORY / "exercises" / "keeper.py").read_text()
    text = text.replace("\nTHREADS = 3 ", "\nTHREADS = 0.2 ").replace("\nEXIT = 20 ", "\nEXIT = 1 ")
    (tmp_path / "short.py").write_text(text)
    work = [sys.executable, "-S", str(tmp_path / "work.py"), str(tmp_path)]
    return subprocess.Popen([*command, *work], pass_fds=[pipe])


@ON_LINUX
@pytest.mark.parametrize("left", LEFT)
@pytest.mark.slow
def test_what_an_answer_leaves_is_ended_and_named(tmp_path, left):
    code, names = LEFT[left]
    pipe, other_end = os.pipe()
    assert kept(tmp_path, code + DONE, pipe).wait(60) == 0
    os.close(pipe)
    os.close(other_end)
    end = json.loads((tmp_path / "end.json").read_text())
    assert [re.sub(r"^process \d+", "process N", name) for name in end["left"]] == names
    assert not any(running(number) for number in re.findall(r"process (\d+)", str(end["left"])))


@ON_LINUX
@pytest.mark.slow
def test_a_daemon_ends_with_the_checker(tmp_path):
    """As check.py's end does, whatever ends it, the other end of the pipe closes."""
    pipe, other_end = os.pipe()
    code = f"child = {SLEEP}open(folder + '/pid', 'w').write(f'{{child.pid}}\\n')\ntime.sleep(600)\n"
    process = kept(tmp_path, code, pipe)
    os.close(pipe)
    file = tmp_path / "pid"
    wait_for(lambda: file.exists() and file.read_text().endswith("\n"))
    os.close(other_end)
    assert process.wait(60) == 0 and not running(int(file.read_text()))


@pytest.mark.slow
def test_a_thread_takes_no_verdict_away(tmp_path):
    path = tmp_path / "exercise.py"
    text = "import threading, time\nthreading.Thread(target=time.sleep, args=[600], name='mine').start()\n"
    path.write_text(text + (EXERCISES["01"] / "solution.py").read_text())
    (verdict,) = check.grade([(EXERCISES["01"], path)])
    assert verdict["passed"] and verdict["left"] == ["thread mine"]


@pytest.mark.skipif(sys.platform != "linux", reason="ranks are forked")
@pytest.mark.slow
def test_the_end_of_a_rank_is_seen_though_a_fork_of_it_lives(tmp_path):
    path = tmp_path / "exercise.py"
    path.write_text(
        "import os, time\ndef run(x):\n    child = os.fork()\n    if not child:\n        time.sleep(600)\n"
        f"    open({str(tmp_path / 'pid')!r}, 'w').write(str(child))\n    os._exit(3)\n"
    )
    with pytest.raises(grading.Wrong, match="the process of rank 0 ended Python with status 3"):
        ranks.on_ranks(path, [{"x": None}])
    os.kill(int((tmp_path / "pid").read_text()), 9)


def test_the_compiler_of_exercise_12_leaves_no_thread(monkeypatch):
    """Otherwise a slow machine reports it as left by the answer."""
    before = threading.enumerate()
    monkeypatch.setattr(tile_compiler, "compile_tile", max)  # which needs no compiler
    assert tile_compiler.compiled.__wrapped__(64, 32, 8, 1) == 64
    assert threading.enumerate() == before


# ---------------------------------------------------------------- the time that an answer may take


@pytest.mark.parametrize(
    ("runnable", "cpu", "seconds"),
    [
        ([1], [0.5, 0.5], (1, 0)),  # a loop on a CPU of its own
        ([1], [0.05, 0.1], (0.15, 0)),  # a loop that others keep from the CPU
        ([1, 2], [3, 4], (1, 0)),  # on eight CPUs
        ([], [0, 0], (0, 1)),  # a deadlock
        ([], [0.2, 0], (0.2, 0.8)),  # something that polls
        ([2], [0.25, -7], (0.25, 0)),  # the kernel has forgotten a process
    ],
)
def test_the_time_of_an_answer_by_hand(monkeypatch, runnable, cpu, seconds):
    """Two looks, half a second apart; cpu: what the processes 1 and 2 and their children have computed in between."""
    now = [0.0]
    ticks = {1: 0, 2: 0}
    monkeypatch.setattr(keeper.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(keeper.os, "times", lambda: SimpleNamespace(children_user=0, children_system=0))
    monkeypatch.setattr(keeper, "descendants", lambda ancestor: ticks)
    monkeypatch.setattr(keeper, "ticks_of", ticks.get)
    monkeypatch.setattr(keeper, "is_runnable", runnable.__contains__)
    own = keeper.OwnTime()
    for computed in cpu:
        ticks[1] += computed * os.sysconf("SC_CLK_TCK")
        now[0] += keeper.LOOK
        own.look()
    assert (own.computed, own.waited) == pytest.approx(seconds)


@ON_LINUX
def test_the_time_of_children_that_have_ended_counts():
    subprocess.run([sys.executable, "-S", "-c", "sum(range(10**7))"])
    user, system, of_children, in_system, _ = os.times()
    ticks = (user + system + of_children + in_system) * os.sysconf("SC_CLK_TCK")
    assert keeper.ticks_of(os.getpid()) == pytest.approx(ticks, abs=5)  # the child took more


@pytest.mark.parametrize(
    ("threads", "processes", "seconds", "left"),
    [
        (["mine"], [], keeper.THREADS, ["thread mine"]),
        ([], [7], keeper.THREADS, []),  # end_all names it
        ([], [], keeper.EXIT + 1, ["Python, in a function that runs at its exit"]),
        (None, [], 11, None),
    ],
)
def test_what_is_left_has_its_seconds_after_the_work(monkeypatch, threads, processes, seconds, left):
    """The work takes 50 of 60 seconds, longer than what follows may; with threads None it does not end."""
    now = [0]

    def look(after=keeper.LOOK):
        now[0] += after > 0
        return now[0]

    done = SimpleNamespace(exists=lambda: threads is not None and now[0] >= 50, read_text=lambda: json.dumps(threads))
    monkeypatch.setattr(keeper, "descendants", lambda ancestor: processes)
    monkeypatch.setattr(keeper.select, "select", lambda *_: ([], [], []))
    child = SimpleNamespace(pid=1, poll=lambda: None)
    assert keeper.wait_for_end(child, 0, done, 60, SimpleNamespace(look=look)) == left
    assert now[0] == 50 + seconds


WORK_OF = {  # what a program does until it ends by itself, if it does
    "loop": "while True:\n    pass\n",
    "loops of children": "for _ in range(2):\n    os.fork()\nwhile True:\n    pass\n",
    "children in a row": "while True:\n    subprocess.run([sys.executable, '-S', '-c', 'sum(range(10**7))'])\n",
    "deadlock": "lock = threading.Lock()\nlock.acquire()\nlock.acquire()\n",
    "stopped": "os.kill(os.getpid(), 19)\n",
}
VERDICT = "open(folder + '/verdicts.json', 'w').write('[{}]')\n"


@ON_LINUX
@pytest.mark.parametrize("work", WORK_OF)
@pytest.mark.slow
def test_what_does_not_end_is_ended_and_said(tmp_path, work):
    (tmp_path / "work.py").write_text(WORK + WORK_OF[work] + VERDICT)
    with pytest.raises(Failure) as caught:
        answers.grade_apart([("", "")], 2, os.environ, tmp_path / "work.py")
    said = str(caught.value)
    computed, waited = map(int, re.search(r"^not finished after 2 s.* for (\d+) s.* for (\d+) s", said).groups())
    assert computed + waited >= 2 and (waited > computed) == (work in ("deadlock", "stopped"))
    assert ("does every loop in your kernel end?" in said) == (computed > waited)


# A child that ends a quarter of a second after its parent, if it has a CPU.
ENDING = """parent = os.getpid()
if not os.fork():
    while os.getppid() == parent:
        time.sleep(0.01)
    end = time.process_time() + 0.25
    while time.process_time() < end:
        pass
    os._exit(0)
"""


@ON_LINUX
@pytest.mark.slow
def test_an_answer_has_its_seconds_on_a_machine_with_other_work(tmp_path):
    """Five programs share a CPU: two seconds of work take ten, and the answer may take five of its own."""
    (tmp_path / "work.py").write_text(WORK + ENDING + "while time.process_time() < 2:\n    pass\n" + VERDICT)
    cpus = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cpus)})
    others = [subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) for _ in range(4)]
    try:
        assert answers.grade_apart([("", "")], 5, os.environ, tmp_path / "work.py") == [{"left": []}]
    finally:
        os.sched_setaffinity(0, cpus)
        for other in others:
            other.kill()
            other.wait()


@pytest.mark.parametrize("due", [True, False])
@pytest.mark.slow
def test_long_grading_is_followed(tmp_path, monkeypatch, due):
    """The second answer goes on until it is told, or for a moment."""
    file = tmp_path / "told"
    write = "open(folder + '/new', 'w').write({!r}); os.replace(folder + '/new', folder + '/verdicts.json')\n"
    wait = f"while not os.path.exists({str(file)!r}):\n    time.sleep(0.1)\n" if due else "time.sleep(1.5)\n"
    (tmp_path / "work.py").write_text(WORK + write.format("[{}]") + wait + write.format("[{}, {}]"))
    second = "   05_rope: checking answer 2 of 2"
    told = []

    def tell(sentence):
        told.append(sentence)
        if sentence == second:
            file.touch()

    monkeypatch.setattr(answers, "progress", tell)
    monkeypatch.setattr(answers.Pace, "is_due", lambda pace: due)
    jobs = [("exercises/01_row_sum", "x"), ("exercises/05_rope", "x")]
    assert len(answers.grade_apart(jobs, 60, os.environ, tmp_path / "work.py")) == 2
    assert set(told) <= {"   01_row_sum: checking answer 1 of 2", second} and (second in told) == due


# ---------------------------------------------------------------- progress that cannot be written

PASSED = {"passed": True, "sentence": "4 cases", "speed": None, "case": None, "left": ["thread mine"]}


@pytest.fixture
def progress(tmp_path, monkeypatch):
    """Return the file of progress, in a folder of its own; every answer passes."""
    monkeypatch.setattr(check, "PROGRESS", tmp_path / ".progress.json")
    monkeypatch.setattr(check, "grade", lambda jobs: [PASSED])
    monkeypatch.setattr(check, "is_started", lambda text: True)
    return tmp_path / ".progress.json"


def test_a_verdict_is_printed_where_progress_cannot_be_saved(progress, monkeypatch, capsys):
    """As in a read-only checkout, also where removing the half-written file fails."""

    def refuse(*_, **__):
        raise OSError(30, "Read-only file system")

    for name in ("open", "unlink", "replace"):
        monkeypatch.setattr(os, name, refuse)
    monkeypatch.setattr("builtins.open", refuse)
    assert check.check(EXERCISES["01"]) == 0
    printed = capsys.readouterr()
    assert printed.out.splitlines()[0] == "01 passed: 4 cases"
    assert printed.out.endswith("   still ran after the verdict, so the checker ended it: thread mine\n")
    assert printed.err == f"check.py: cannot save your progress: {progress}: Read-only file system\n"


def test_a_write_protected_progress_file_stays(progress, capsys):
    progress.write_text("{}")
    progress.chmod(0o444)
    assert check.check(EXERCISES["01"]) == 0
    said = f"check.py: cannot save your progress: {progress} is write-protected: name another file\n"
    assert capsys.readouterr().err == said and progress.read_text() == "{}"


def test_progress_is_saved_through_a_link(progress):
    progress.symlink_to("target")
    assert check.check(EXERCISES["01"]) == 0
    assert progress.is_symlink() and json.loads(progress.with_name("target").read_text())["01"]["passed"]


@pytest.mark.parametrize("text", ['{"02": {"passed": true},}', '{"02": {"passed": true}, "03": {"hints": -1}}'])
def test_damaged_progress_is_kept(progress, capsys, text):
    for number in (1, 2):
        progress.write_text(text)
        assert check.check(EXERCISES["01"]) == 0
        copy = pathlib.Path(f"{progress}.damaged{number}")
        assert capsys.readouterr().err == f"check.py: a part of your progress is damaged: {copy} keeps it\n"
        assert copy.read_text() == text and json.loads(progress.read_text())["01"]["passed"]
    assert check.check(EXERCISES["01"]) == 0 and capsys.readouterr().err == ""


def test_names_are_of_this_process():
    assert keeper.name_of(os.getpid(), []).startswith(f"process {os.getpid()}: ")
    assert os.getpid() in keeper.descendants(os.getppid())
