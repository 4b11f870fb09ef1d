"""Processes that take turns: what is asked and answered, how they end, and who runs beside whom."""

import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from common.command_line import Failure
from common.measuring import rounds, runs
from common.measuring.runs import OutOfMemory, TimeLimit
from processes import running, wait_for

ECHO = """
import json, os, signal, subprocess, sys, time
request = json.loads(sys.argv[1])
inbox = os.fdopen(request["inbox"])
outbox = os.fdopen(request["outbox"], "w")
def say(**content):
    print(json.dumps(content), file=outbox, flush=True)
"""


def begin(text):
    def start(request, log, pipes):
        return rounds.start([sys.executable, "-c", ECHO + text, request], log, pipes)

    return rounds.Process(start, {"steps": 3})


@pytest.fixture
def process():
    """process(TEXT): start a process that runs the text; it is ended with the test."""
    with rounds.Processes() as started:

        def make(text):
            name = len(started.alive)
            started.add(name, lambda: begin(text))
            return started.alive[name]

        yield make


def test_each_answer_is_read_once_however_they_arrive(process):
    """Two lines at once, and one in two pieces."""
    text = 'os.write(request[\'outbox\'], b\'{"first": 1}\\n{"second": 2}\\n{"thi\')\n'
    text += "asked = json.loads(inbox.readline())\nos.write(request['outbox'], b'rd\": %d}\\n' % asked['steps'])\n"
    text += "say(steps=request['steps'])\ninbox.read()"
    one = process(text)
    assert one.answer(20) == {"first": 1} and one.answer(0) == {"second": 2}
    one.ask(steps=7)
    assert one.answer(20) == {"third": 7} and one.answer(20) == {"steps": 3}
    with pytest.raises(Failure, match="^no answer within 0 s$"):
        one.answer(0)


@pytest.mark.parametrize(
    ("text", "kind", "status", "said"),
    [
        ("print('loss 3')\nsys.exit('x.py: error: no such GPU')", Failure, 1, "no such GPU"),
        ("print('no such GPU', file=sys.stderr)\nsys.exit(2)", Failure, 2, "no such GPU"),
        ("raise RuntimeError('out of memory')", OutOfMemory, 1, "out of memory"),
        ("print('loss 3', flush=True)\nos.kill(os.getpid(), signal.SIGKILL)", OutOfMemory, 1, "out of memory"),
        ("print('loss 3', flush=True)\nos.kill(os.getpid(), signal.SIGTERM)", Failure, 1, "loss 3"),
    ],
)
def test_how_a_process_ended_is_read_from_its_status_and_its_last_line(process, text, kind, status, said):
    one = process(text)
    one.process.wait()
    one.ask()  # nobody reads it
    with pytest.raises(Failure) as ended:
        one.answer(20)
    assert (type(ended.value), ended.value.status, str(ended.value)) == (kind, status, said)


def test_a_process_and_what_it_started_end_with_the_block():
    """Also if it waits for no request."""
    with rounds.Processes() as started:
        started.alive["one"] = begin("say(child=subprocess.Popen(['sleep', '600']).pid)\ntime.sleep(600)")
        started.alive["two"] = begin("say(child=os.getpid())\ninbox.read()")
        pids = [one.answer(20)["child"] for one in started.alive.values()]
        assert all(map(running, pids))
    assert not started.alive
    for pid in pids:
        wait_for(lambda pid=pid: not running(pid))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_while_a_process_starts_waits_until_it_is_known(number):
    before = signal.signal(number, signal.default_int_handler)
    seen = []

    def make():
        seen.append(begin("say()\ninbox.read()"))
        signal.raise_signal(number)
        return seen[0]

    try:
        with pytest.raises(KeyboardInterrupt), rounds.Processes() as started:
            started.add("one", make)
        assert signal.getsignal(number) is signal.default_int_handler
    finally:
        signal.signal(number, before)
    assert not started.alive and seen[0].process.returncode is not None


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_process_is_ended_however_early_the_interrupt_comes(number, monkeypatch):
    """While it starts, when nobody holds it yet."""
    before = signal.signal(number, signal.default_int_handler)
    seen = []
    Popen = subprocess.Popen

    def interrupted(*arguments, **options):
        seen.append(Popen(*arguments, **options))
        signal.raise_signal(number)
        return seen[0]

    monkeypatch.setattr(subprocess, "Popen", interrupted)
    try:
        with pytest.raises(KeyboardInterrupt):
            runs.run_process(["sleep", "600"])
        assert signal.getsignal(number) is signal.default_int_handler
    finally:
        signal.signal(number, before)
    assert seen[0].returncode is not None and seen[0].stdout.closed


def test_a_process_of_another_thread_is_run():
    """No handler of a signal may be set there."""
    with ThreadPoolExecutor() as pool:
        assert pool.submit(runs.run_process, ["echo", "fine"]).result().stdout == "fine\n"


def test_no_process_waits_for_the_end_of_another():
    """All are let go before the first is waited for."""
    log = []
    with rounds.Processes() as started:
        for name in "ab":
            calls = {call: lambda call=call, name=name: log.append(f"{call} {name}") for call in ("let_go", "end")}
            started.alive[name] = SimpleNamespace(**calls)
        started.end("a")
        started.alive["c"] = SimpleNamespace(**calls)
    assert log == ["let_go a", "end a", "let_go b", "let_go b", "end b", "end b"]


@pytest.mark.parametrize(
    ("sets", "wanted"),
    [
        # b fails, and e, which was to run beside it, still runs
        (["ab", "ac", "be"], [("abc", False), ("e", True)]),
        # d has no room beside others: once it was the first set, it runs alone next
        (["d", "ac", "ef"], [("acd", False), ("d", True), ("ef", True)]),
        (["ac", "d", "ce"], [("acd", False), ("cde", False), ("d", True)]),
    ],
)
def test_sets_of_names_run_in_as_few_groups_as_memory_allows(sets, wanted):
    """Memory holds three."""
    groups = []

    def choose(sets):
        return sorted(rounds.chosen(sets, lambda names: len(names) <= 3))

    def work(names, alone):
        groups.append(("".join(names), alone))
        return set() if alone else {"d"} & set(names), {"b"}

    rounds.in_groups([tuple(names) for names in sets], choose, work)
    assert groups == wanted


def test_the_order_rotates_from_turn_to_turn_and_from_round_to_round():
    assert "".join(rounds.passes(list("abc"), [0, 1, 1, 5])) == "abcbcabcacab"
    asked = []
    results, reasons = rounds.run_in_rounds(lambda name: asked.append(name) or name, list("abc"), 4, TimeLimit(None))
    assert "".join(asked) == "abcbcacababc" and not reasons
    assert results == {name: [name] * 4 for name in "abc"}


def test_a_program_that_fails_leaves_the_rounds_and_one_that_is_refused_ends_them():
    def work(name):
        if name == "a":
            return name
        raise Failure(1 if name == "b" else 2, "lost")

    none = TimeLimit(None)
    assert rounds.run_in_rounds(work, ["a", "b"], 2, none) == ({"a": ["a", "a"], "b": []}, {"b": "lost"})
    assert rounds.run_in_rounds(work, ["b"], 2, none) == ({"b": []}, {"b": "lost"})
    with pytest.raises(Failure, match="lost"):
        rounds.run_in_rounds(work, ["a", "c"], 2, none)
