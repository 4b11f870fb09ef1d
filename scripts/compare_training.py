#!/usr/bin/env python3
"""Compare two training scripts, before and after an optimization: the same computation, and how much faster?

    python compare_training.py -- train.py --batch-size 8 --versus train_packed.py --batch-size 8
    python compare_training.py --fuse '(.*)qkv.weight=\\1q.weight,\\1k.weight,\\1v.weight' -- old.py --versus new.py

Both scripts run unchanged, each in a process of its own, with old's weights. In this order:

1. The data that each script hands its own model are compared.
2. If they are equal: losses, gradients and updates of the first steps, per parameter. The bounds come from two more runs
   of old: the same again, and with weights nudged by one rounding.
3. If they are not: the models are compared on old's data, under one fixed gradient of their outputs.
4. If 1 and 2 agree: the speed of their own loops, in rounds in turns, with old under two names.

The verdict stands first: faster, slower, no difference shown; same model, data or loss not compared; not the same
computation; not comparable. One model, one torch.optim optimizer that steps, one process per script.

Exit status: 0 the same computation, whatever the speed; 1 not the same, or other data; 2 not comparable, or bad input.
"""

import math
import os
import sys
from typing import NamedTuple

from common.command_line import Failure, Parser, positive, progress
from common.ratios import ROUNDS_NEEDED, STARTS_NEEDED, counted, gain, median, noise_line
from common.runs import OutOfMemory
from common.tables import emit, markdown, markdown_table, rounded, write_whole

RECORDED = 3  # steps whose numbers are compared
OLD, NEW, CONTROL, NUDGED = "old", "new", "control", "nudged"
SAME_MODEL = "same model, data or loss not compared"
NOT_SAME = "not the same computation"
NOT_COMPARABLE = "not comparable"
STATUS = {SAME_MODEL: 1, NOT_SAME: 1, NOT_COMPARABLE: 2}


class Verdict(Exception):
    """End the comparison with a verdict and its reason."""

    def __init__(self, kind, reason, module=None):
        super().__init__(reason)
        self.kind = kind
        self.reason = reason
        self.module = module


class Held(NamedTuple):
    """Hold what a script told at the first call of its model."""

    weights: dict
    data: list
    tied: dict
    compiled: bool
    precision: dict

    @property
    def shapes(self):
        return {name: tuple(value.shape) for name, value in self.weights.items()}


class Recorded(NamedTuple):
    steps: list
    facts: dict


# ---------------------------------------------------------------- processes


class Session:
    """Start the scripts, give them old's weights, and have them recorded, replayed or timed."""

    def __init__(self, commands, options, children):
        self.commands = {OLD: commands[0], NEW: commands[1], CONTROL: commands[0], NUDGED: commands[0]}
        self.options = options
        self.children = children
        self.together = True  # do the processes fit beside each other?
        self.held = {}
        self.pairs = []
        self.orders = None  # of packed parts that were guessed

    def visit(self, names, steps, prepare, collect):
        """Start these scripts; prepare and collect each. One at a time where they do not fit into memory together."""
        if self.together:
            try:
                for name in names:
                    self.children.start(name, self.commands[name], steps)
                for name in names:
                    prepare(name, self.children.alive[name])
                return {name: collect(name, self.children.alive[name]) for name in names}
            except OutOfMemory:
                self.children.end()
                self.together = False
                progress("the processes do not fit into memory together: they take turns")
        found = {}
        for name in names:
            run = self.children.start(name, self.commands[name], steps)
            prepare(name, run)
            found[name] = collect(name, run)
            self.children.end(name)
        return found

    def hold(self, name, run):
        """Wait for the first call of a script's model, and give it old's weights."""
        from common.training_runs import MODEL_S

        message = run.answer(MODEL_S)
        content = read_tensors(message["file"])
        known = {field: message[field] for field in ("tied", "compiled", "precision")}
        self.held[name] = Held(content["weights"], content["data"], **known)
        if name == NEW and not self.pairs:
            self.pair()
        self.load(name, run)

    def pair(self):
        """Pair the names of the two models."""
        from common.training_names import Unpaired, pair_names

        old = self.held[OLD]
        new = self.held[NEW]
        for one, other, names in ((old, new, "old ties"), (new, old, "new ties")):
            for name, aliases in one.tied.items():
                apart = [alias for alias in aliases if alias != name and alias in other.weights]
                if apart and name in other.weights:
                    raise Verdict(NOT_SAME, f"{names} {apart[0]} to {name}, and the other script has two tensors")
        try:
            self.pairs = pair_names(old.shapes, new.shapes, self.options.map, self.options.fuse)
        except Unpaired as error:
            raise Verdict(NOT_COMPARABLE, str(error)) from None

    def load(self, name, run, pairs=None):
        """Have a script overwrite its weights with old's."""
        import torch

        from common.training_judge import nudged
        from common.training_names import to_new

        weights = self.held[OLD].weights
        if name == OLD:
            return
        if name == NUDGED:
            weights = nudged(weights, self.held[OLD].precision)
        if name == NEW:
            weights = to_new(pairs or self.pairs, weights, self.held[NEW].shapes)
        file = os.path.join(run.folder.name, "weights.pt")
        torch.save({key: value.clone() for key, value in weights.items()}, file)
        run.ask(do="load", file=file)
        run.answer(60)

    def record(self, names, steps):
        """Record the first steps of these scripts."""
        from common.training_runs import STEP_S

        def prepare(name, run):
            self.hold(name, run)
            run.ask(do="record")

        def collect(name, run):
            found = []
            while True:
                message = run.answer(STEP_S)
                if message["at"] == "recorded":
                    return Recorded(found, message)
                found.append(read_tensors(message["file"]))

        return self.visit(names, steps, prepare, collect)

    def replay(self, evaluate):
        """Run all models on old's data; return {name: outputs and gradients}, new's in every order of packed parts."""
        import torch

        from common.training_names import orders
        from common.training_runs import STEP_S

        self.children.end()

        def ask(run):
            file = os.path.join(run.folder.name, "data.pt")
            torch.save({"data": self.held[OLD].data}, file)
            run.ask(do="replay", file=file, evaluate=evaluate)
            message = run.answer(STEP_S)
            if "failed" in message:
                reason = f"{run.name}'s model does not take old's data: {message['failed']}"
                raise Verdict(NOT_COMPARABLE, reason)
            return read_tensors(message["file"])

        def collect(name, run):
            if name != NEW:
                return ask(run)
            found = []
            for pairs in orders(self.pairs):
                self.load(NEW, run, pairs)
                found.append((pairs, ask(run)))
            return found

        found = self.visit([OLD, NEW, CONTROL, NUDGED], 1, self.hold, collect)
        self.children.end()
        return found


def read_tensors(file):
    import torch

    return torch.load(file, weights_only=True, mmap=True)


# ---------------------------------------------------------------- the same computation?


class Comparison:
    """Compare what two scripts compute; verdict() raises a Verdict, or returns where they are the same."""

    def __init__(self, session):
        self.session = session
        self.judge = None
        self.recorded = {}

    def check(self):
        """Raise the Verdict unless all recorded steps agree."""
        names = [OLD, NEW, CONTROL, NUDGED]
        progress("recording the first steps: old, new, old again, old with nudged weights")
        self.recorded = self.session.record(names, RECORDED)
        self.check_scope()
        self.check_control()
        difference = self.first_difference()
        if difference is None:
            return
        if difference.kind == "data":
            self.judge_model(difference)
        guessed = any(pair.guess for pair in self.session.pairs)
        drew = any(call["drew"] for name in (OLD, NEW) for call in self.recorded[name].steps[0]["calls"])
        early = difference.kind in ("outputs", "loss", "gradients")
        if early and (guessed or drew):
            difference = self.ask_without_chance(difference, guessed, drew)
        raise Verdict(NOT_SAME, self.explained(difference), difference.module)

    def check_scope(self):
        """Raise the Verdict for scripts that this tool is not made for."""
        for name in (OLD, NEW):
            facts = self.recorded[name].facts
            if facts["models"] or facts["strays"]:
                others = ", ".join(facts["models"]) or counted(facts["strays"], "other tensor")
                raise Verdict(NOT_COMPARABLE, f"{name} trains several models: besides the first {others}")
        counts = {name: len(found.steps) for name, found in self.recorded.items()}
        if min(counts.values()) < 1:
            raise Verdict(NOT_COMPARABLE, "no whole step was recorded")

    def check_control(self):
        """Raise the Verdict where old does not repeat its own numbers."""
        from common.training_judge import Judge
        from common.training_names import Pair

        held = self.session.held[OLD]
        pairs = [Pair((name,), (name,)) for name in held.weights]
        judge = Judge(pairs, {OLD: held.shapes, NEW: held.shapes}, held.precision, held.weights)
        steps = zip(*(self.recorded[name].steps for name in (OLD, CONTROL, NUDGED)), strict=False)
        for number, (old, control, nudge) in enumerate(steps, 1):
            runs = {OLD: old, NEW: control, CONTROL: old, NUDGED: nudge}
            difference = judge.step(number, runs)
            if difference:
                text = difference.text.replace("new", "its second run").replace("old", "its first")
                raise Verdict(NOT_COMPARABLE, f"old does not repeat itself, set its seeds: {text}")

    def new_judge(self, pairs=None):
        from common.training_judge import Judge

        old = self.session.held[OLD]
        shapes = {OLD: old.shapes, NEW: self.session.held[NEW].shapes}
        return Judge(pairs or self.session.pairs, shapes, old.precision, old.weights)

    def first_difference(self):
        """Return the first Difference of the recorded steps."""
        self.judge = self.new_judge()
        steps = zip(*(found.steps for found in self.recorded.values()), strict=False)
        for number, runs in enumerate(steps, 1):
            difference = self.judge.step(number, dict(zip(self.recorded, runs, strict=True)))
            if difference:
                return difference
        return None

    def judge_model(self, difference):
        """Raise the Verdict on two scripts with other data: are the models the same on old's?"""
        from common.training_judge import Difference

        if difference.text.startswith("step 1"):
            progress("the data differ: running both models on old's")
            found = self.replayed(evaluate=False)
            if isinstance(found, Difference):
                drew = any(call["drew"] for call in self.recorded[OLD].steps[0]["calls"])
                if drew or any(pair.guess for pair in self.session.pairs):
                    found = self.replayed(evaluate=True)
            if isinstance(found, Difference):
                kind = NOT_COMPARABLE if found.kind == "shapes" else NOT_SAME
                raise Verdict(kind, f"{self.explained(found)}; and {difference.text}", found.module)
        raise Verdict(SAME_MODEL, difference.text)

    def replayed(self, evaluate):
        """Return the pairs with which the models agree on old's data, or the Difference in the first order of parts."""
        found = self.session.replay(evaluate)
        first = None
        for pairs, new in found[NEW]:
            self.judge = self.new_judge(pairs)
            difference = self.judge.replay({**found, NEW: new})
            if difference is None:
                return pairs
            first = first or difference
        return first

    def ask_without_chance(self, difference, guessed, drew):
        """Return the Difference of two models that guess at names, or draw random numbers; or raise a Verdict."""
        from common.training_judge import Difference

        progress("the outputs differ: running both models in evaluation mode, where nothing is drawn")
        found = self.replayed(evaluate=True)
        packed = [str(pair) for pair in self.session.pairs if pair.guess]
        if isinstance(found, Difference):
            if guessed:
                reason = f"guessed by shape, {packed[0]}, and no order of the parts gives old's outputs"
                raise Verdict(NOT_COMPARABLE, f"{reason}: pair the names with --fuse or --map; {difference.text}")
            return difference if found.kind == "shapes" else found
        if drew:
            one_draws = {name: self.recorded[name].steps[0]["calls"][0]["drew"] for name in (OLD, NEW)}
            if one_draws[OLD] == one_draws[NEW]:
                reason = "both draw random numbers in their models, and not the same ones; without them they agree"
                raise Verdict(NOT_COMPARABLE, f"{reason}: compare with dropout set to 0")
            return difference
        if found != self.session.pairs:
            self.session.pairs = found
            self.session.children.end()
            self.check()
            raise Agreed
        return difference

    def explained(self, difference):
        """Return a difference's text with what may be the reason."""
        text = difference.text
        old, new = (self.session.held[name].precision for name in (OLD, NEW))
        if old != new and difference.kind != "settings":
            text += f"; old computes in {precision_text(old)}, new in {precision_text(new)}"
        kinds = [self.recorded[name].facts["optimizers"] for name in (OLD, NEW)]
        if difference.kind in ("settings", "updates") and kinds[0] != kinds[1]:
            text += f"; another optimizer: {', '.join(kinds[1])} in new, {', '.join(kinds[0])} in old"
        return text


class Agreed(Exception):
    """Say that a second recording, with other pairs, agreed."""


def precision_text(precision):
    low = precision["amp_dtype"] if precision["use_amp"] else "TF32" if precision["tf32"] else "float32"
    return f"{low} on {precision['device']}"


# ---------------------------------------------------------------- speed


class Speed(NamedTuple):
    seconds: dict  # name -> of each round
    memory: dict  # name -> peak in MiB, None on a CPU
    starts: int
    steps: int  # of a pass

    def gain(self, base=OLD, times=NEW):
        return gain(self.seconds[base], self.seconds[times], (self.seconds[OLD], self.seconds[CONTROL]), self.starts)


def measure(session, rounds):
    """Time the loops of old, new and old again in rounds; return a Speed."""
    from common.training_runs import Clock, one_round, steps_of_pass, warm_up

    names = [OLD, NEW, CONTROL]
    seconds = {name: [] for name in names}
    memory = dict.fromkeys(names)
    clock = Clock(rounds)
    starts = STARTS_NEEDED if session.together else rounds
    steps = None
    done = 0
    for start in range(starts):
        here = len(range(start, rounds, starts))  # rounds of this start
        if session.together:
            if start:
                session.children.end()
                session.record(names, 1)
        if session.together:
            runs = {name: session.children.alive[name] for name in names}
            warm = [warm_up(run) for run in runs.values()]
            steps = steps or steps_of_pass(min(warm))
        for _ in range(here):
            clock.tell(f"round {done + 1} of {rounds}")
            if session.together:
                times, peaks = one_round(runs, done, steps)
            else:
                times, peaks, steps = round_apart(session, rotated(names, done), steps)
            for name in names:
                seconds[name].append(times[name])
                memory[name] = max(filter(None, (memory[name], peaks[name])), default=None)
            done += 1
    return Speed(seconds, memory, starts, steps)


def rotated(names, turn):
    turn %= len(names)
    return names[turn:] + names[:turn]


def round_apart(session, names, steps):
    """Measure a round of scripts that do not fit into memory together: each starts anew, alone."""
    from common.training_runs import STEP_S, one_round, steps_of_pass, warm_up

    session.children.end()
    times, memory = {}, {}
    for name in names:
        run = session.children.start(name, session.commands[name], 1)
        session.hold(name, run)
        run.ask(do="record")
        while run.answer(STEP_S)["at"] != "recorded":
            pass
        warm = warm_up(run)
        steps = steps or steps_of_pass(warm)
        time, peak = one_round({name: run}, 0, steps)
        times |= time
        memory |= peak
        session.children.end(name)
    return times, memory, steps


def speed_verdict(speed):
    """Return the verdict on the speed of two scripts that compute the same."""
    found = speed.gain()
    if found.missing or not found.shown:
        return "no difference shown" if not found.missing else f"speed {found}"
    if found.ratio > 1:
        return f"faster by {found}"
    return f"slower by {speed.gain(NEW, OLD)}"


# ---------------------------------------------------------------- report


def number(value):
    return "0" if not value else f"{value:.2g}"


def row_of(kind, judge):
    """Return the row of the report on what was compared of a kind."""
    worst = judge.worst[kind]
    count = counted(judge.compared[kind], {"losses": "loss", "outputs": "output"}.get(kind, kind[:-1]))
    count = count.replace("losss", "losses")
    return f"{count}, off by at most {number(worst.error)} ({worst.name}, allowed {number(worst.bound)})"


def work_of(step):
    """Return the number of tokens or samples of a recorded step, and the word for them; None where no batch tells."""
    batches = [call["data"][0] for call in step["calls"] if call["data"]]
    if not batches or not batches[0].dim():
        return None
    if batches[0].dim() == 2 and not batches[0].is_floating_point():
        return sum(batch.numel() for batch in batches), "tokens"
    return sum(len(batch) for batch in batches), "samples"


def rows_of(comparison, speed, note):
    """Return the rows of the report, {name: text}."""
    rows = {}
    session = comparison.session
    pairs = session.pairs
    if pairs:
        packed = [str(pair) for pair in pairs if len(pair.old + pair.new) > 2]
        renamed = sum(pair.old != pair.new for pair in pairs) - len(packed)
        rows["weights"] = f"{counted(len(pairs), 'tensor')} of new have old's values"
        if packed:
            rows["weights"] += f"; {len(packed)} packed, such as {packed[0]}"
        if renamed:
            rows["weights"] += f"; {renamed} renamed"
    judge = comparison.judge
    if judge:
        rows |= {kind: row_of(kind, judge) for kind in judge.worst}
    if speed:
        times = {name: rounded(1e3 * median(values)) for name, values in speed.seconds.items()}
        how = f"{counted(len(speed.seconds[OLD]), 'round')} over {counted(speed.starts, 'start')}"
        rows["step"] = f"old {times[OLD]} ms, new {times[NEW]} ms; {how}{note}"
        if not session.together:
            rows["step"] += "; one process at a time, started anew for each round, since two do not fit into memory"
        rows["old / new"] = speed.gain().range_text() + note
        rows["noise"] = noise_line(OLD, speed.gain().noise)
        if speed.memory[OLD]:
            rows["memory"] = f"peak: old {rounded(speed.memory[OLD])} MiB, new {rounded(speed.memory[NEW])} MiB{note}"
        work = {name: work_of(comparison.recorded[name].steps[0]) for name in (OLD, NEW)}
        if all(work.values()):
            words = [f"{name} {rounded(work[name][0] / median(speed.seconds[name]))}" for name in (OLD, NEW)]
            rows[f"{work[OLD][1]}/s"] = ", ".join(words) + note
    return rows


def as_text(content):
    lines = [f"compare_training: {content['old']}", f"versus: {content['new']}", ""]
    lines.append(f"{'verdict':<12}{content['verdict']}")
    if content["reason"]:
        lines.append(f"{'':<12}{content['reason']}")
    lines.append("")
    return "\n".join(lines + [f"{name:<12}{text}" for name, text in content["rows"].items()])


def as_markdown(content):
    """Return the report for a pull request."""
    title = f"**{content['verdict']}**"
    if content["reason"]:
        title += f": {markdown(content['reason'])}"
    rows = [["old", f"`{content['old']}`"], ["new", f"`{content['new']}`"], *content["rows"].items()]
    return f"{title}\n\n{markdown_table(['', ''], rows, left=2)}\n"


# ---------------------------------------------------------------- main


def compare(commands, options, children):
    """Return the verdict, its reason, the module, the Comparison and the Speed."""
    session = Session(commands, options, children)
    comparison = Comparison(session)
    verdict = reason = module = speed = None
    try:
        comparison.check()
    except Agreed:
        pass
    except Verdict as found:
        verdict, reason, module = found.kind, found.reason, found.module
    except OutOfMemory:
        raise
    if verdict == NOT_COMPARABLE or options.no_speed or (verdict and not options.allow_different):
        return verdict or "the same computation, speed not measured", reason, module, comparison, None
    if NUDGED in children.alive:
        children.end(NUDGED)
    speed, reason_of_none = try_to_measure(session, options.rounds)
    if verdict is None:
        verdict = speed_verdict(speed) if speed else "the same computation, speed not measured"
    if reason_of_none:
        reason = "; ".join(filter(None, (reason, reason_of_none)))
    return verdict, reason, module, comparison, speed


def try_to_measure(session, rounds):
    """Return the Speed, or None and why a script was too short for it."""
    from common.training_runs import Short

    try:
        if session.together and not session.children.alive:
            session.record([OLD, NEW, CONTROL], 1)
        return measure(session, rounds), None
    except Short as error:
        return None, f"{error}, before the rounds were done: let it train longer"


def run(options, commands):
    from common.training_runs import Children

    with Children() as children:
        verdict, reason, module, comparison, speed = compare(commands, options, children)
        note = ""
        if verdict in STATUS and speed:
            note = f" ({verdict})"
        content = {"old": " ".join(commands[0]), "new": " ".join(commands[1])}
        content |= {"verdict": verdict, "reason": reason, "module": module, "status": STATUS.get(verdict, 0)}
        content["rows"] = rows_of(comparison, speed, note)
    content["rounds"] = None
    if speed:
        found = speed.gain()
        content["rounds"] = {"seconds_per_step": speed.seconds, "starts": speed.starts, "steps_per_pass": speed.steps}
        content["rounds"] |= {"ratio": found.ratio, "low": found.low, "high": found.high, "shown": found.shown}
        content["rounds"] |= {"peak_memory_mib": speed.memory}
    if options.markdown:
        write_whole(options.markdown, as_markdown(content))
    emit(finite_numbers(content), as_text(content), options.json)
    return content["status"]


def finite_numbers(tree):
    """Return nested content with None for numbers that JSON does not know."""
    if isinstance(tree, dict):
        return {key: finite_numbers(value) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [finite_numbers(value) for value in tree]
    return None if isinstance(tree, float) and not math.isfinite(tree) else tree


def split_commands(words):
    """Return the two scripts' command lines; Failure in one sentence."""
    if "--versus" not in words:
        raise Failure(2, "name two scripts: compare_training.py -- old.py --versus new.py")
    place = words.index("--versus")
    commands = [words[:place], words[place + 1 :]]
    for side, command in zip(("old", "new"), commands, strict=True):
        check_command(side, command)
    return commands


def check_command(side, command):
    from check_training import BadInput, script_of

    try:
        script_of(command)
    except BadInput as error:
        words = str(error).replace("check_training.py -- train.py", "compare_training.py -- old.py --versus new.py")
        raise Failure(2, f"{side}: {words}") from None


def parse_rule(option, parts):
    """Return a converter of LEFT=RIGHT with a regular expression on the left."""
    import re

    def parse(text):
        left, equals, right = text.partition("=")
        names = right.split(",")
        if not equals or not left or not right or (parts and len(names) < 2):
            raise ValueError
        re.compile(left)
        return (left, names) if parts else (left, right)

    parse.__name__ = option  # argparse names it where the value is wrong
    return parse


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    place = argv.index("--") if "--" in argv else len(argv)
    parser = Parser("compare_training.py", __doc__)
    add = parser.add_argument
    words = "pack old's tensors into one of new, or the reverse: '(.*)kv=\\1k,\\1v', regular expressions"
    add("--fuse", action="append", default=[], metavar="PACKED=PART,PART", type=parse_rule("--fuse", True), help=words)
    words = "what old's names are called in new: 'REGEX=REPLACEMENT'"
    add("--map", action="append", default=[], metavar="REGEX=NAME", type=parse_rule("--map", False), help=words)
    add("--rounds", type=positive, default=6, metavar="N", help="rounds of the speed (%(default)s)")
    add("--no-speed", action="store_true", help="compare the computation only")
    add("--allow-different", action="store_true", help="measure the speed of another computation, too")
    add("--markdown", metavar="FILE", help="write the report for a pull request")
    add("--versus", metavar="NEW", help="after -- and old's command line: new's command line")
    return parser.run(lambda options: run(options, split_commands(argv[place + 1 :])), argv[:place])


if __name__ == "__main__":
    sys.exit(main())
