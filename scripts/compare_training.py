#!/usr/bin/env python3
"""Compare two training scripts, before and after an optimization: do they compute the same, and how much faster is one?

    python compare_training.py -- train.py --batch-size 8 --versus train_packed.py --batch-size 8
    python compare_training.py -- train.py --versus train.py --compile

The first script is "old", the one after --versus "new". Both run unchanged, each in a process of its own, with old's
weights. The tool compares, in this order:

1. The data that each script hands its model.
2. If the data agree: outputs, losses, gradients, updates and buffers of the first steps. New begins each of them with
   the weights that old begins it with. How much they may differ comes from two more runs of old: the same again, and
   with weights nudged by one rounding.
3. If the data differ: the two models on old's data, with one fixed gradient at their outputs.
4. If 1 and 2 agree: the speed of the two loops. They take turns, and old runs a second time to show the noise.

The verdict comes first: faster, slower or no difference shown; same model, data or loss not compared; not the same
computation; not comparable. Each script needs one model, one process and a torch.optim optimizer that steps.

Exit status: 0 the same computation, whatever the speed; 1 not the same, or other data; 2 not comparable, or bad input;
130 interrupted by Ctrl-C, with a report on what was compared until then.
"""

import argparse
import os
import re
import sys

from check_training import BadInput, script_of
from common.command_line import Failure, Parser, is_protected, positive, progress
from common.own_script.judge import Judge
from common.own_script.names import Pair
from common.own_script.report import as_markdown, as_text, row_of, speed_rows, weights_row
from common.own_script.runs import Short
from common.own_script.session import (
    CONTROL,
    FURTHER,
    NEW,
    NOT_COMPARABLE,
    NOT_SAME,
    NUDGED,
    OLD,
    SAME_MODEL,
    Session,
    Verdict,
)
from common.own_script.speed import TIMED, Rounds
from common.ratios import counted
from common.tables import emit, write_whole

RECORDED = 3  # steps whose numbers are compared
INTERRUPTED = "interrupted"
STATUS = {SAME_MODEL: 1, NOT_SAME: 1, NOT_COMPARABLE: 2, INTERRUPTED: 130}
KINKS = "old's own gradients jump when its weights are nudged (a ReLU at zero?), so new's may differ as much"
NO_SPEED = "the same computation, speed not measured"

# ---------------------------------------------------------------- the same computation?


class Comparison:
    """Compare what two scripts compute."""

    def __init__(self, session):
        self.session = session
        self.judge = None
        self.recorded = {}
        self.kinks = False  # do old's own gradients jump?

    def check(self):
        """Return if all recorded steps agree; raise the Verdict if not."""
        difference = self.first_difference()
        if difference and self.session.guesses and difference.kind in ("outputs", "loss", "gradients"):
            self.prove_names(difference)
            difference = self.first_difference()
        if difference is None:
            self.check_length()
            return
        if difference.kind == "data":
            self.judge_models(difference)
        if self.may_be_chance(difference):
            self.judge_without_chance(difference)
        raise Verdict(NOT_SAME, self.explained(difference), difference.module)

    def first_difference(self):
        """Record the first steps, and return the first Difference."""
        progress("recording the first steps of old, new, old again and old with nudged weights")
        self.kinks = False
        self.recorded = self.session.record([OLD, NEW, CONTROL, NUDGED], RECORDED)
        self.check_scope()
        self.check_control()
        difference = self.judged(self.recorded)
        if difference and difference.small and not self.session.held[OLD].is_coarse:
            progress("gradients differ a little: nudging old's weights further, to see if its own gradients jump")
            further = self.session.record([*FURTHER], RECORDED)
            self.kinks = self.has_kinks(further)
            if self.kinks:
                difference = self.judged(self.recorded | further)
        return difference

    def judged(self, recorded):
        """Return the first Difference between these runs."""
        self.judge = self.new_judge(self.session.pairs)
        for number, steps in enumerate(zip(*(run.steps for run in recorded.values()), strict=False), 1):
            difference = self.judge.step(number, dict(zip(recorded, steps, strict=True)))
            if difference:
                return difference
        return None

    def has_kinks(self, further):
        """Tell whether old's gradients jump in any step: a rounding puts a value on the other side of a kink."""
        near, far = FURTHER.values()
        steps = zip(self.recorded[OLD].steps, *(run.steps for run in further.values()), strict=False)
        return any(self.judge.has_kinks(*(step["given"] for step in three), far / near) for three in steps)

    def new_judge(self, pairs):
        old = self.session.held[OLD]
        return Judge(pairs, {OLD: old.shapes, NEW: self.session.held[NEW].shapes}, old.precision, old.weights)

    def drew(self, name):
        """Tell whether a script's model draws random numbers."""
        return any(call["drew"] for call in self.recorded[name].steps[0]["calls"])

    def may_be_chance(self, difference):
        """Tell whether both models draw random numbers, and the difference may be that they draw other ones."""
        if difference.step > 1 or not (self.drew(OLD) and self.drew(NEW)):
            return False
        if self.judge.in_evaluation_mode({name: self.recorded[name].steps[0]["calls"][0] for name in (OLD, NEW)}):
            return False
        unseen = "outputs" not in self.judge.worst
        return difference.kind == "outputs" or (unseen and difference.kind in ("loss", "gradients"))

    def check_scope(self):
        """Raise the Verdict on scripts that this tool is not made for."""
        for name in (OLD, NEW):
            facts = self.recorded[name].facts
            if facts["models"] or facts["strays"]:
                others = ", ".join(facts["models"]) or f"{counted(facts['strays'], 'tensor')} outside the first"
                raise Verdict(NOT_COMPARABLE, f"{name} trains several models: also {others}")
            if facts["steps_in_backward"]:
                raise Verdict(NOT_COMPARABLE, f"{name} steps its optimizer inside backward: step after it")
        if not all(run.steps for run in self.recorded.values()):
            raise Verdict(NOT_COMPARABLE, "no whole step was recorded")

    def check_length(self):
        """Raise the Verdict where one script has fewer steps than were compared in the other."""
        counts = {name: len(self.recorded[name].steps) for name in (OLD, NEW)}
        short, other = sorted(counts, key=counts.get)
        if counts[short] < counts[other]:
            text = f"{short} ended after {counted(counts[short], 'step')}, {other} did not: let it train for {RECORDED}"
            raise Verdict(NOT_COMPARABLE, text)

    def check_control(self):
        """Raise the Verdict where old does not repeat its own numbers."""
        held = self.session.held[OLD]
        pairs = [Pair((name,), (name,)) for name in held.weights]
        judge = Judge(pairs, {OLD: held.shapes, NEW: held.shapes}, held.precision, held.weights)
        steps = zip(*(self.recorded[name].steps for name in (OLD, CONTROL, NUDGED)), strict=False)
        for number, (old, control, nudge) in enumerate(steps, 1):
            difference = judge.step(number, {OLD: old, NEW: control, CONTROL: old, NUDGED: nudge})
            if difference:
                text = difference.text.replace("in old", "in its first run").replace("in new", "in its second")
                raise Verdict(NOT_COMPARABLE, f"old doesn't repeat itself; set all its seeds: {text}")

    # ------------------------------------------------------------ on old's data
    def replayed(self, evaluate):
        """Return the pairs with which the models agree on old's data, and the first order's Difference."""
        found = self.session.replay(evaluate)
        first = None
        for pairs, new in found[NEW]:
            self.judge = self.new_judge(pairs)
            difference = self.judge.replay({**found, NEW: new})
            if difference is None:
                return pairs, None
            first = first or difference
        return None, first

    def prove_names(self, difference):
        """Find the order of the packed parts that were guessed; raise the Verdict if none gives old's outputs."""
        progress("the outputs differ, but the names were only guessed: trying other orders of the packed parts")
        pairs, _ = self.replayed(evaluate=True)
        if pairs is None:
            guess = f"{self.session.guesses[0]} is a guess, and no order of these parts gives old's outputs"
            raise Verdict(NOT_COMPARABLE, f"{guess}: pair the names with --fuse or --map; {difference.text}")
        self.session.pairs = pairs

    def judge_models(self, difference):
        """Raise the Verdict on two scripts with other data: are the models the same on old's?"""
        found = None
        if difference.step == 1:
            progress("the data differ: running both models on old's")
            _, found = self.replayed(evaluate=False)
            if found and self.drew(OLD):
                _, found = self.replayed(evaluate=True)
        if found is None:
            raise Verdict(SAME_MODEL, difference.text)
        kind = NOT_SAME
        if found.kind == "shapes" or self.session.guesses:
            kind = NOT_COMPARABLE
        raise Verdict(kind, f"{self.explained(found)}; and {difference.text}", found.module)

    def judge_without_chance(self, difference):
        """Raise the Verdict on two models that draw random numbers: are they the same in evaluation mode?"""
        progress("both draw random numbers: running both models in evaluation mode")
        _, found = self.replayed(evaluate=True)
        if found is None or found.kind == "shapes":
            reason = "both models draw random numbers, but different ones"
            if found is None:
                reason += "; in evaluation mode they agree"
            raise Verdict(NOT_COMPARABLE, f"{reason}: compare with dropout set to 0")
        raise Verdict(NOT_SAME, self.explained(found), found.module)

    def explained(self, difference):
        """Return a difference's text with what may be the reason."""
        text = difference.text
        old, new = (self.session.held[name].precision for name in (OLD, NEW))
        if old != new and difference.kind not in ("settings", "modules"):
            text += f"; new computes in {precision_text(new)}, old in {precision_text(old)}"
        kinds = {name: ", ".join(self.recorded[name].facts["optimizers"]) for name in (OLD, NEW)}
        if difference.kind in ("settings", "updates") and kinds[OLD] != kinds[NEW]:
            text += f"; the optimizer is {kinds[NEW]} in new and {kinds[OLD]} in old"
        return text


def precision_text(precision):
    text = "float32"
    if precision["use_amp"]:
        text = precision["amp_dtype"]
    elif precision["tf32"]:
        text = "TF32"
    return f"{text} on {precision['device']}"


# ---------------------------------------------------------------- verdict and speed


def compare(session, options):
    """Return the content of the report."""
    comparison = Comparison(session)
    verdict = reason = module = speed = None
    try:
        comparison.check()
    except Verdict as found:
        verdict, reason, module = found.kind, found.reason, found.module
    except Failure as error:  # of a script
        verdict, reason = NOT_COMPARABLE, str(error)
    except KeyboardInterrupt:
        verdict, reason = INTERRUPTED, "the computation was not compared to the end"
    status = STATUS.get(verdict, 0)
    if not options.no_speed and (status == 0 or (status == 1 and options.allow_different)):
        try:
            speed, none = measured(session, options.rounds)
            reason = "; ".join(filter(None, (reason, none))) or None
        except KeyboardInterrupt:
            reason = f"{verdict or 'the same computation'}, and the speed was not measured to the end"
            verdict, status = INTERRUPTED, 130
    if status == 0:
        verdict = speed.verdict() if speed else NO_SPEED
    rows = {}
    if session.pairs:
        rows["weights"] = weights_row(session.pairs)
    if comparison.judge:
        rows |= {kind: row_of(kind, *found) for kind, found in comparison.judge.worst.items()}
    if comparison.kinks:
        rows["kinks"] = KINKS
    if speed:
        note = f", but {verdict}" if status else ""
        rows |= speed_rows(speed, session, comparison.recorded, note)
    return {
        "old": " ".join(session.commands[OLD]),
        "new": " ".join(session.commands[NEW]),
        "verdict": verdict,
        "reason": reason,
        "module": module,
        "status": status,
        "rows": rows,
        "speed": speed and speed._asdict() | {"gain": speed.gain()._asdict()},
    }


def measured(session, rounds):
    """Return the Speed, or None and why there is none."""
    if session.together and not session.children.alive.keys() >= set(TIMED):
        session.children.end()
    elif NUDGED in session.children.alive:
        session.children.end(NUDGED)
    try:
        return Rounds(session, rounds).measure(), None
    except Short as error:
        return None, f"{error}, before the rounds were done: let it train longer"
    except (Failure, Verdict) as error:
        return None, str(error)


# ---------------------------------------------------------------- main


def run(options, words):
    if "--versus" not in words:
        raise Failure(2, "name two scripts: compare_training.py -- old.py --versus new.py")
    place = words.index("--versus")
    old = words[:place]
    new = words[place + 1 :]
    check_command(OLD, old)
    check_command(NEW, new)
    check_result("--json", options.json, words)
    check_result("--markdown", options.markdown, words)
    session = Session(old, new, options.map, options.fuse)
    with session.children:
        content = compare(session, options)
    try:
        if options.markdown:
            write_whole(options.markdown, as_markdown(content))
    finally:
        emit(content, as_text(content), options.json)
    return content["status"]


def check_command(side, command):
    """Raise Failure unless the command names a Python script."""
    try:
        script_of(command)
    except BadInput as error:
        sentence = str(error).partition(", and put a launcher")[0].partition(": check_training")[0]
        raise Failure(2, f"{side}: {sentence}") from None


def check_result(option, file, words):
    """Raise Failure where a file for results cannot be written, before minutes of work, or is a file of the command."""
    if file is None:
        return
    if not os.path.isdir(os.path.dirname(os.path.abspath(file))):
        raise Failure(2, f"{option} {file}: its folder does not exist")
    if is_protected(file):
        raise Failure(2, f"{option} {file} is write-protected: name another file")
    if os.path.isfile(file) and any(os.path.isfile(word) and os.path.samefile(word, file) for word in words):
        raise Failure(2, f"{option} {file} is a file that the command uses: choose another name")


def rule(text):
    """Convert REGEX=REPLACEMENT."""
    pattern, equals, replacement = text.partition("=")
    if not equals or not pattern or not replacement:
        raise argparse.ArgumentTypeError(f"{text!r} isn't of the form REGEX=REPLACEMENT")
    try:
        re.compile(pattern)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{pattern!r} isn't a regular expression: {error}") from None
    return pattern, replacement


def packing(text):
    """Convert PACKED=PART,PART."""
    packed, parts = rule(text)
    names = parts.split(",")
    if len(names) < 2:
        raise argparse.ArgumentTypeError(f"{text!r} names one part: give two or more, with commas")
    return packed, names


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    place = argv.index("--") if "--" in argv else len(argv)
    parser = Parser("compare_training.py", __doc__)
    add = parser.add_argument
    words = r"tensors of old that new packs into one, or the reverse, as regular expressions: '(.*)kv=\1k,\1v'"
    add("--fuse", action="append", default=[], metavar="PACKED=PART,PART", type=packing, help=words)
    words = "how new names old's tensors: 'REGEX=REPLACEMENT'"
    add("--map", action="append", default=[], metavar="REGEX=REPLACEMENT", type=rule, help=words)
    add("--rounds", type=positive, default=6, metavar="N", help="rounds in which the speed is measured (%(default)s)")
    add("--no-speed", action="store_true", help="compare the computation only")
    add("--allow-different", action="store_true", help="measure the speed even if the computation differs")
    add("--markdown", metavar="FILE", help="write the report for a pull request")
    add("--versus", metavar="NEW", help="separates the two command lines, which come last, after --")
    return parser.run(lambda options: run(options, argv[place + 1 :]), argv[:place])


if __name__ == "__main__":
    sys.exit(main())
