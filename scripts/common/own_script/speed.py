"""Time the loops of two training scripts in rounds of warm processes, with the old one under two names.

The statistics are those of common/ratios.py: a gain needs five rounds over three starts, and must exceed the noise.
"""

import statistics
from typing import NamedTuple

from common.command_line import progress
from common.measuring.rounds import PASSES, passes
from common.own_script.runs import STEP_S
from common.own_script.session import CONTROL, NEW, OLD
from common.ratios import STARTS_NEEDED, gain, rotated

PASS_S = 0.1  # seconds of a pass, at least, unless ten steps are fewer
STEPS = 10  # of a pass, at most
SETTLED = 0.2  # relative difference between two passes of a script that is warm
WARM_PASSES = 10  # at most
TIMED = [OLD, NEW, CONTROL]


class Speed(NamedTuple):
    """Hold the seconds of a step in each round, the peaks of GPU memory in MiB (None on a CPU), and the conditions."""

    seconds: dict
    memory: dict
    starts: int
    steps: int  # of a pass

    def gain(self, base=OLD, times=NEW):
        return gain(self.seconds[base], self.seconds[times], (self.seconds[OLD], self.seconds[CONTROL]), self.starts)

    def verdict(self):
        """Return the verdict on two scripts that compute the same."""
        found = self.gain()
        if found.missing:
            return f"the same computation, speed {found}"
        if not found.shown:
            return str(found)
        return f"faster by {found}" if found.ratio > 1 else f"slower by {self.gain(NEW, OLD)}"


def ask_steps(run, steps, reset=False):
    """Let a script run some steps of its loop; return the seconds of a step, and the peak of its GPU memory."""
    run.ask(steps=steps, reset=reset)
    found = run.answer(STEP_S * steps)
    return found["seconds"] / steps, found["memory_mib"]


def warm_up(run):
    """Let a script run until two passes take equally long: the first ones compile, tune and capture. Return a time."""
    last, _ = ask_steps(run, 2, reset=True)
    for _ in range(WARM_PASSES):
        now, _ = ask_steps(run, 2)
        if abs(now - last) <= SETTLED * last:
            break
        last = now
    return now


def steps_of_pass(seconds):
    """Return how many steps a pass has where a step takes so many seconds."""
    return max(1, min(STEPS, round(PASS_S / max(seconds, 1e-9))))


def measure_round(runs, turn, steps):
    """Ask every script several times, in rotated order; return {name: seconds of a step} and {name: peak memory}."""
    times = {name: [] for name in runs}
    memory = {}
    for name in passes(list(runs), range(turn, turn + PASSES)):
        seconds, memory[name] = ask_steps(runs[name], steps)
        times[name].append(seconds)
    return {name: statistics.median(found) for name, found in times.items()}, memory


class Rounds:
    """Measure the rounds, and say how long the others will take."""

    def __init__(self, session, rounds):
        self.session = session
        self.rounds = rounds
        self.seconds = {name: [] for name in TIMED}
        self.memory = dict.fromkeys(TIMED)
        self.steps = None  # of a pass

    def measure(self):
        """Return the Speed: together, in three starts of all processes; or else each process of each round starts."""
        starts = min(STARTS_NEEDED, self.rounds)
        if self.session.together and all(self.start(start, starts) for start in range(starts)):
            return Speed(self.seconds, self.memory, starts, self.steps)
        self.seconds = {name: [] for name in TIMED}
        for _ in range(self.rounds):
            self.tell(0)
            self.note(*self.apart())
        return Speed(self.seconds, self.memory, self.rounds, self.steps)

    def tell(self, starts_left):
        done = len(self.seconds[OLD])
        took = sum(sum(times) for times in self.seconds.values()) * PASSES * (self.steps or 1)
        left = starts_left * self.session.start_s
        if done:
            left += took / done * (self.rounds - done)
        progress(f"round {done + 1} of {self.rounds}, about {left:.0f} s left" if left else f"round 1 of {self.rounds}")

    def note(self, times, memory):
        """Keep what a round measured."""
        for name in TIMED:
            self.seconds[name].append(times[name])
            self.memory[name] = max(filter(None, (self.memory[name], memory[name])), default=None)

    def start(self, start, starts):
        """Measure the rounds of one start, and return True; the processes of the first are there from the recording.

        Return False if they do not fit into memory together.
        """
        if start or not self.session.children.alive:
            self.session.record(TIMED, 1)
        if not self.session.together:
            return False
        runs = {name: self.session.children.alive[name] for name in TIMED}
        warm = [warm_up(run) for run in runs.values()]
        self.steps = self.steps or steps_of_pass(min(warm))
        for _ in range(start, self.rounds, starts):
            self.tell(starts - 1 - start)
            self.note(*measure_round(runs, len(self.seconds[OLD]), self.steps))
        return True

    def apart(self):
        """Measure one round of scripts that do not fit into memory together."""

        def prepare(name, run):
            self.session.hold(name, run)
            run.ask(do="record")

        def collect(name, run):
            while run.answer(STEP_S)["at"] != "recorded":
                pass
            warm = warm_up(run)
            self.steps = self.steps or steps_of_pass(warm)
            return measure_round({name: run}, 0, self.steps)

        found = self.session.visit(rotated(TIMED, len(self.seconds[OLD])), 1, prepare, collect)
        return {name: found[name][0][name] for name in TIMED}, {name: found[name][1][name] for name in TIMED}
