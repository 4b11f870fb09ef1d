"""Start two training scripts, give both old's weights, and have them recorded or replayed.

Four processes: old, new, control (old again) and nudged (old with weights that differ by one rounding). Where gradients
differ a little, two more: old with weights that differ by several roundings.
"""

import time
from typing import NamedTuple

import torch

from common.command_line import progress
from common.measuring.rounds import chosen, in_groups
from common.measuring.runs import OutOfMemory
from common.own_script.judge import nudged
from common.own_script.names import Unpaired, orders, pair_names, to_new
from common.own_script.runs import MODEL_S, STEP_S, Children

OLD, NEW, CONTROL, NUDGED = "old", "new", "control", "nudged"
FURTHER = {"nudged 16 times": 16, "nudged 256 times": 256}  # old with weights that differ by several roundings
SAME_MODEL = "same model, data or loss not compared"
NOT_SAME = "not the same computation"
NOT_COMPARABLE = "not comparable"


class Verdict(Exception):
    """End the comparison with a verdict, its reason, and the module where the difference begins."""

    def __init__(self, kind, reason, module=None):
        super().__init__(reason)
        self.kind = kind
        self.reason = reason
        self.module = module


class Held(NamedTuple):
    """Hold what a script told at the first call of its model."""

    weights: dict
    data: list
    tied: dict  # name -> all names of a tensor that has several
    precision: dict

    @property
    def is_coarse(self):
        """Tell whether it computes in less than float32: one rounding of that is a large nudge already."""
        return self.precision["use_amp"] or self.precision["tf32"]

    @property
    def shapes(self):
        return {name: tuple(value.shape) for name, value in self.weights.items()}


class Recorded(NamedTuple):
    steps: list
    facts: dict


class Session:
    """Hold the commands of two scripts, their running processes, and how their names are paired."""

    def __init__(self, old, new, maps, fuses):
        self.commands = {OLD: old, NEW: new, CONTROL: old, NUDGED: old} | dict.fromkeys(FURTHER, old)
        self.maps = maps
        self.fuses = fuses
        self.children = Children()
        self.together = True  # do the processes fit into memory beside each other?
        self.start_s = 0.0  # seconds that a start took
        self.held = {}
        self.dry_runs = {OLD: 0, NEW: 0}  # times that a script's model was held before it was whole
        self.path = {}  # number of a step -> old's weights before it
        self.pairs = []

    @property
    def guesses(self):
        return [pair for pair in self.pairs if pair.guess]

    def visit(self, names, steps, prepare, collect):
        """Start these scripts anew, prepare all and collect from each; return {name: what was collected}.

        Where they do not fit into memory together, each is started when the one before has ended.
        """
        began = time.monotonic()
        self.children.end()
        found = {}

        def work(group, alone):
            try:
                for name in group:
                    self.children.start(name, self.commands[name], steps)
                for name in group:
                    prepare(name, self.children.alive[name])
                collected = {name: collect(name, self.children.alive[name]) for name in group}
            except OutOfMemory:
                if alone:
                    raise
                progress("the processes don't fit into memory together, so they take turns")
                self.children.end()
                self.together = False
                return group, ()
            found.update(collected)
            if not self.together:
                self.children.end()
            return (), ()

        in_groups([(name,) for name in names], self.group, work)
        self.start_s = time.monotonic() - began
        return found

    def group(self, sets):
        """Return who runs at the same time: all, or one after the other."""
        names = chosen(sets, lambda _: self.together)
        return [name for (name,) in sets if name in names]

    def hold(self, name, run):
        """Wait for the first call of a script's whole model, and give it old's weights."""
        for _ in range(self.dry_runs[NEW if name == NEW else OLD]):
            run.answer(MODEL_S)
            run.ask(do="record")
        self.take_in(name, run, run.answer(MODEL_S))

    def take_in(self, name, run, message):
        """Keep what a script told about its model, and give it old's weights."""
        content = read_tensors(message["file"])
        self.held[name] = Held(content["weights"], content["data"], message["tied"], message["precision"])
        if name == NEW and not self.pairs:
            self.pair()
        self.load(name, run)

    def take_in_again(self, name, run, message):
        """Take in a model that has grown since it was held; return the Verdict if its names still don't fit."""
        if name in self.dry_runs:
            self.dry_runs[name] += 1
        if name == NEW:
            self.pairs = []
        try:
            self.take_in(name, run, message)
        except Verdict as error:
            return error
        return None

    def pair(self):
        """Pair the names of the two models; raise a Verdict where they do not fit."""
        old = self.held[OLD]
        new = self.held[NEW]
        for one, other, who in ((old, new, "old ties"), (new, old, "new ties")):
            for name, aliases in one.tied.items():
                apart = [alias for alias in aliases if alias != name and alias in other.weights]
                if apart and name in other.weights:
                    raise Verdict(NOT_SAME, f"{who} {apart[0]} to {name}, and the other script has two tensors")
        try:
            self.pairs = pair_names(old.shapes, new.shapes, self.maps, self.fuses)
        except Unpaired as error:
            raise Verdict(NOT_COMPARABLE, str(error)) from None

    def load(self, name, run, weights=None, pairs=None):
        """Have a script overwrite its weights with old's: these, or the first."""
        weights = weights or self.held[OLD].weights
        if name == OLD:
            return
        if name == NUDGED or name in FURTHER:
            weights = nudged(weights, self.held[OLD].precision, FURTHER.get(name, 1))
        if name == NEW:
            weights = to_new(pairs or self.pairs, weights, self.held[NEW].shapes)
        run.ask(do="load", file=run.write("weights", {key: value.clone() for key, value in weights.items()}))
        run.answer(STEP_S)

    def record(self, names, steps):
        """Record the first steps of these scripts, old before the others; return {name: Recorded}.

        The others begin each step with the weights that old begins it with: a rounding does not grow from step to step.
        """
        if OLD in names:
            self.path = {}

        def prepare(name, run):
            self.hold(name, run)
            run.ask(do="record")

        def collect(name, run):
            found = []
            unpaired = None
            while True:
                message = run.answer(STEP_S)
                if message["at"] == "model":  # what was held before was only a part of it
                    unpaired = self.take_in_again(name, run, message)
                    run.ask(do="record")
                    continue
                if unpaired:
                    raise unpaired
                if message["at"] == "recorded":
                    return Recorded(found, message)
                if message["at"] == "held":
                    if name == OLD:
                        run.ask(do="weights")
                        self.path[len(found)] = read_tensors(run.answer(STEP_S)["file"])
                    elif len(found) in self.path:
                        self.load(name, run, self.path[len(found)])
                    run.ask(do="record")
                    continue
                found.append(read_tensors(message["file"]))

        return self.visit(names, steps, prepare, collect)

    def replay(self, evaluate):
        """Run all models on old's data; return {name: outputs and gradients}, for new a list with every order of parts.

        evaluate: in evaluation mode, where no dropout draws.
        """

        def ask(name, run):
            file = run.write("data", {"data": self.held[OLD].data})
            run.ask(do="replay", file=file, evaluate=evaluate)
            message = run.answer(STEP_S)
            if "failed" in message:
                raise Verdict(NOT_COMPARABLE, f"{name}'s model can't take old's data: {message['failed']}")
            return read_tensors(message["file"])

        def collect(name, run):
            if name != NEW:
                return ask(name, run)
            found = []
            for pairs in orders(self.pairs):
                self.load(NEW, run, pairs=pairs)
                found.append((pairs, ask(name, run)))
            return found

        found = self.visit([OLD, NEW, CONTROL, NUDGED], 1, self.hold, collect)
        self.children.end()
        return found


def read_tensors(file):
    return torch.load(file, weights_only=True, mmap=True)
