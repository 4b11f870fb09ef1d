"""Measure programs in rounds, in which they take turns: warm processes that run some steps when asked, or whole runs.

    class Script(Process): ...                          # a training script that runs as many steps as it is asked for
    with Processes() as running:
        running.add("old", lambda: Script(start_old, {"steps": 10}))
        running.alive["old"].ask(steps=10)
        found = running.alive["old"].answer(seconds=60)

The ladder and compare_training.py keep processes warm. compare_versions.py and the ablation study start one for each
run. The statistics of what is measured here are those of common/ratios.py.
"""

import contextlib
import json
import os
import select
import subprocess
import tempfile
import time

from common.command_line import Failure, progress
from common.measuring.runs import OutOfMemory, end, last_words, ran_out_of_memory, uninterrupted
from common.ratios import rotated

PASSES = 5  # how often a round asks each process of which the host sets the speed: that drifts within seconds

# ---------------------------------------------------------------- a process


def start(command, log, pipes, **options):
    """Start a process that leads a session of its own, prints into a log and holds its ends of two pipes."""
    streams = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
    return subprocess.Popen(command, pass_fds=pipes, start_new_session=True, **streams, **options)


class Process:
    """Start a process and talk to it; each request and each answer is a line of JSON.

    start(request, log, pipes): start it with a request, a text. Its "inbox" and "outbox" are the ends of the pipes.
    """

    grace_s = 10  # seconds that it has to end after SIGTERM

    def __init__(self, start, request):
        self.log = tempfile.NamedTemporaryFile()  # noqa: SIM115  end() closes it
        theirs_in, self.outbox = os.pipe()
        self.inbox, theirs_out = os.pipe()
        request = request | {"inbox": theirs_in, "outbox": theirs_out}
        self.process = start(json.dumps(request), self.log, (theirs_in, theirs_out))
        os.close(theirs_in)
        os.close(theirs_out)
        self.unread = b""

    def ask(self, **request):
        with contextlib.suppress(BrokenPipeError):  # answer() says how it ended
            os.write(self.outbox, (json.dumps(request) + "\n").encode())

    def answer(self, seconds):
        """Return the next message; raise late() or failure()."""
        until = time.monotonic() + seconds
        while b"\n" not in self.unread:
            if not select.select([self.inbox], [], [], max(0.0, until - time.monotonic()))[0]:
                raise self.late(seconds)
            found = os.read(self.inbox, 2**16)
            if not found:
                raise self.failure()
            self.unread += found
        line, _, self.unread = self.unread.partition(b"\n")
        return json.loads(line)

    def late(self, seconds):
        return Failure(1, f"no answer within {seconds:.0f} s")

    def ended(self):
        """Return its exit status and the last line that it printed."""
        status = self.process.wait()
        self.log.seek(0)
        return status, last_words(self.log.read().decode(errors="replace"))

    def failure(self):
        """Return why it ended: status 2 if it refused its options."""
        status, words = self.ended()
        if ran_out_of_memory(status, words):
            return OutOfMemory(1, "out of memory")
        return Failure(2 if status == 2 else 1, words)

    def let_go(self):
        """Close its input, at which it ends by itself if it waits for a request."""
        if self.outbox is not None:
            os.close(self.outbox)
        self.outbox = None

    def end(self):
        """End it and everything that it started."""
        self.let_go()
        end(self.process, self.grace_s)
        os.close(self.inbox)
        self.log.close()


class Processes(contextlib.AbstractContextManager):
    """Hold the processes that are alive, by name, and end all of them with the block."""

    def __init__(self):
        self.alive = {}

    def add(self, name, make):
        """Keep the process that make() starts; an interrupt waits until the block knows what it has to end."""
        with uninterrupted():
            self.alive[name] = make()

    def end(self, *names):
        """End these processes, or all; none waits for the end of another."""
        names = names or list(self.alive)
        for name in names:
            self.alive[name].let_go()
        for name in names:
            self.alive.pop(name).end()

    def __exit__(self, *_):
        self.end()


# ---------------------------------------------------------------- who runs beside whom


def chosen(sets, fits):
    """Return the names of as many sets as fit into memory together, at least of the first."""
    found = set()
    for names in sets:
        if not found or fits(found.union(names)):
            found.update(names)
    return found


def in_groups(sets, choose, work):
    """Have the names of each set run at the same time, in as few groups as memory allows.

    choose(sets): return the names of a group, those of the first set among them.
    work(names, alone): run a group; return the names that memory had no room for, and those that failed, which are left
    out from then on. A first set that had no room runs alone next, where it must have room or fail.
    """
    crowded = False
    while sets:
        first = sets[0]
        names = list(first) if crowded else choose(sets)
        absent, failed = work(names, set(names) == set(first))
        done = set(names).difference(absent)
        left = [tuple(name for name in each if name not in failed) for each in sets]
        sets = [each for each in left if not done.issuperset(each)]
        crowded = first in sets


# ---------------------------------------------------------------- the order


def passes(names, turns):
    """Yield the names pass by pass: the order of a turn begins one place later than that of the turn before."""
    for turn in turns:
        yield from rotated(names, turn)


def run_in_rounds(work, names, rounds, limit):
    """Call work(name) for every name, round by round; return {name: results} and {name: reason why it failed}.

    Each runs once in every round, in rotated order, so that drift hits all of them alike.
    limit: a TimeLimit. It leaves out names of the first round, and whole further rounds where it has no room for them.
    """
    results = {name: [] for name in names}
    reasons = {}
    for i in range(rounds):
        going = [name for name in names if name not in reasons]
        if not going:
            break
        if i and not limit.room(len(going)):
            progress(f"there's no time left for round {i + 1} of {rounds}")
            break
        for place, name in enumerate(passes(going, [i])):
            if not i and not limit.room():
                reasons[name] = "not run: no time was left"
                continue
            left = limit.left((rounds - i) * len(going) - place)
            progress(f"round {i + 1} of {rounds}, {name}: training, {left} ...")
            try:
                results[name].append(limit.timed(lambda name=name: work(name)))
            except Failure as error:
                if error.status == 2:
                    raise
                reasons[name] = str(error)
    return results, reasons
