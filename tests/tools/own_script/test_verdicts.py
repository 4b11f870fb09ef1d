"""The verdicts of compare_training.py at the smallest difference: one element, of the last tensor, in the last step."""

import re
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import compare_training
from common.command_line import Failure
from common.own_script import child
from common.own_script.names import Pair, Unpaired, packed_dim, pair_names
from common.own_script.runs import Run, Short
from common.own_script.session import (
    CONTROL,
    FURTHER,
    NEW,
    NOT_COMPARABLE,
    NOT_SAME,
    NUDGED,
    OLD,
    SAME_MODEL,
    Held,
    Recorded,
    Session,
    Verdict,
)

FLOAT32 = {"use_amp": False, "tf32": False, "device": "cpu", "amp_dtype": "bfloat16"}
WEIGHTS = {"a.weight": torch.ones(2, 3), "b.weight": torch.ones(3)}
OF_PARAMETERS = ("given", "gradients", "updates")
FACTS = {"optimizers": ["AdamW"], "models": [], "strays": 0, "steps_in_backward": False}


def new_step():
    """Return what is recorded of a step of a small model: one call, with one output of six elements."""
    data = [torch.arange(6.0).view(2, 3), torch.tensor([0, 1])]
    call = {"data": data, "outputs": [torch.ones(6)], "shapes": [[2, 3]], "trace": [], "drew": False}
    call |= {"evaluating": [], "modules": {"a": {"eps": 1e-5}, "b": {"eps": 1e-5}}}
    step = {"calls": [call], "losses": [1.0], "settings": {name: {"lr": 0.1} for name in WEIGHTS}}
    step |= {kind: {name: value.clone() for name, value in WEIGHTS.items()} for kind in OF_PARAMETERS}
    return step | {"outside": [], "buffers": {"b.mean": torch.ones(4)}, "still": []}


class StubSession:
    """Hold four runs that agree, for a test to change one of them.

    replayed: evaluate -> what a replay finds in new's place; asked: the replays that were asked for.
    """

    def __init__(self, steps=4):
        self.held = {name: Held(WEIGHTS, [], {}, dict(FLOAT32)) for name in (OLD, NEW)}
        self.pairs = [Pair((name,), (name,)) for name in WEIGHTS]
        self.guesses = []
        names = (OLD, NEW, CONTROL, NUDGED, *FURTHER)
        self.runs = {name: Recorded([new_step() for _ in range(steps)], dict(FACTS)) for name in names}
        self.replayed, self.asked = {}, []

    def record(self, names, number):
        return {name: self.runs[name]._replace(steps=self.runs[name].steps[:number]) for name in names}

    def replay(self, evaluate):
        self.asked.append(evaluate)
        run = {"outputs": [torch.ones(6)], "gradients": [{name: torch.ones_like(v) for name, v in WEIGHTS.items()}]}
        new = run | self.replayed.get(evaluate, {})
        return {OLD: run, NEW: [(self.pairs, new)], CONTROL: run, NUDGED: run}

    def draws(self, *names):
        for name in names:
            self.runs[name].steps[0]["calls"][0]["drew"] = True


def verdict_on(session):
    """Return the verdict and its reason; None for the same computation."""
    try:
        compare_training.Comparison(session).check()
    except Verdict as found:
        return found.kind, found.reason
    return None, ""


def spoil(tensor):
    tensor.view(-1)[-1] += 1


def spoil_loss(step):
    step["losses"][-1] *= 1.001


def spoil_setting(step):
    step["settings"]["b.weight"]["lr"] = 0.2


def spoil_module(step):
    step["calls"][-1]["modules"]["b"]["eps"] = 1e-6


SMALLEST = {  # how one element of a step is changed: new's verdict, and words of the reason
    "data": (lambda step: spoil(step["calls"][-1]["data"][-1]), SAME_MODEL, "tensor 2 of its input is a different one"),
    "output": (lambda step: spoil(step["calls"][-1]["outputs"][-1]), NOT_SAME, "step 3: the outputs are off by"),
    "loss": (spoil_loss, NOT_SAME, "step 3: the loss is 1.001 in new and 1 in old"),
    "gradient": (lambda step: spoil(step["given"]["b.weight"]), NOT_SAME, "1 of 2 gradients differ: b.weight"),
    "stepped": (
        lambda step: spoil(step["gradients"]["b.weight"]),
        NOT_SAME,
        "1 of 2 that the optimizer gets differ: b.w",
    ),
    "update": (lambda step: spoil(step["updates"]["b.weight"]), NOT_SAME, "1 of 2 updates differ: b.weight"),
    "setting": (spoil_setting, NOT_SAME, "the optimizer's lr 0.2 in new and 0.1 in old for b.weight"),
    "buffer": (lambda step: spoil(step["buffers"]["b.mean"]), NOT_SAME, "buffers differ: b.mean"),
    "module": (spoil_module, NOT_SAME, "the modules' eps 1e-06 in new and 1e-05 in old for b"),
}


@pytest.mark.parametrize("name", SMALLEST)
def test_one_element_in_the_last_recorded_step_decides(name):
    change, kind, words = SMALLEST[name]
    session = StubSession()
    assert verdict_on(session) == (None, "")
    change(session.runs[NEW].steps[3])
    assert verdict_on(session) == (None, "")  # three steps are compared
    change(session.runs[NEW].steps[2])
    found, reason = verdict_on(session)
    assert found == kind and words in reason and "step 3" in reason
    assert session.asked == []  # after the first step the models have other weights than at their first call


@pytest.mark.parametrize("name", SMALLEST)
def test_old_repeats_each_element_of_each_step(name):
    """Or no difference of new's could be told from chance."""
    change, _, words = SMALLEST[name]
    session = StubSession()
    change(session.runs[CONTROL].steps[2])
    found, reason = verdict_on(session)
    assert found == NOT_COMPARABLE and reason.startswith("old doesn't repeat itself; set all its seeds: step 3")
    assert words.replace("in new", "in its second").replace("in old", "in its first run") in reason


# ---------------------------------------------------------------- what cannot be compared


@pytest.mark.parametrize("name", [OLD, NEW])
@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"models": ["GPT"]}, "trains several models: also GPT"),
        ({"strays": 1}, "trains several models: also 1 tensor outside the first"),
        ({"steps_in_backward": True}, "steps its optimizer inside backward: step after it"),
    ],
)
def test_one_script_that_the_tool_is_not_made_for_is_named(name, facts, words):
    session = StubSession()
    session.runs[name].facts.update(facts)
    assert verdict_on(session) == (NOT_COMPARABLE, f"{name} {words}")


@pytest.mark.parametrize(("name", "other"), [(OLD, NEW), (NEW, OLD)])
def test_a_script_that_is_one_step_short_is_named(name, other):
    """Whatever was compared agrees."""
    session = StubSession()
    del session.runs[name].steps[2:]
    said = f"{name} ended after 2 steps, {other} did not: let it train for 3"
    assert verdict_on(session) == (NOT_COMPARABLE, said)


@pytest.mark.parametrize("name", [OLD, NEW, CONTROL, NUDGED])
def test_one_run_without_a_step_ends_the_comparison(name):
    session = StubSession()
    session.runs[name].steps.clear()
    assert verdict_on(session) == (NOT_COMPARABLE, "no whole step was recorded")


@pytest.mark.parametrize(("one", "who"), [(OLD, "old ties"), (NEW, "new ties")])
def test_one_tie_that_only_one_script_has_is_named(one, who):
    """An alias of two tensors, of which the other script has both; where it lacks one of them the names do not fit."""
    session = object.__new__(Session)
    session.maps, session.fuses = (), ()
    tied = {"a": ["a", "b"]}
    session.held = {name: Held({"a": torch.ones(2), "b": torch.ones(2)}, [], {}, FLOAT32) for name in (OLD, NEW)}
    session.pair()
    session.held[one] = Held({"a": torch.ones(2)}, [], tied, FLOAT32)
    with pytest.raises(Verdict, match=f"{who} b to a, and the other script has two tensors") as caught:
        session.pair()
    assert caught.value.kind == NOT_SAME
    session.held = dict.fromkeys((OLD, NEW), session.held[one])
    session.pair()
    assert session.pairs == [Pair(("a",), ("a",))]


@pytest.mark.parametrize("parts", [[(2, 4), (1, 4)], [(2, 4), (2, 5)], [(2, 4), (2,)]])
@pytest.mark.parametrize("new_is_packed", [True, False])
def test_parts_of_which_one_has_a_row_too_few_are_no_concatenation(parts, new_is_packed):
    def pairs(parts):
        singles = dict(zip(("q", "k"), parts, strict=True))
        sides = [singles, {"qk": (4, 4)}]
        return pair_names(*(sides if new_is_packed else sides[::-1]), fuses=[("qk", ["q", "k"])])

    assert len(pairs([(2, 4), (2, 4)])) == len(pairs([(4, 1), (4, 3)])) == 1
    with pytest.raises(Unpaired, match=re.escape("--fuse: qk [4, 4] isn't a concatenation of [2, 4], [")):
        pairs(parts)


@pytest.mark.parametrize(("parts", "guessed"), [(1, True), (2, True), (4, True), (5, False)])
@pytest.mark.parametrize("new_is_packed", [True, False])
def test_up_to_four_parts_of_one_weight_are_guessed(parts, guessed, new_is_packed):
    sides = [{f"p{i}.w": (2, 3) for i in range(parts)}, {"packed.w": (2 * parts, 3)}]
    sides = sides if new_is_packed else sides[::-1]
    if guessed:
        (pair,) = pair_names(*sides)
        assert pair.guess and len(pair.old + pair.new) == 1 + parts
    else:
        with pytest.raises(Unpaired, match="have no counterpart"):
            pair_names(*sides)


def test_each_run_gets_olds_weights_with_as_many_roundings_as_its_name_says():
    session = object.__new__(Session)
    held = Held({"w": torch.linspace(0.5, 1.5, 64, dtype=torch.float64)}, [], {}, FLOAT32)
    session.held = {OLD: held, NEW: held}
    session.pairs = [Pair(("w",), ("w",))]
    written = {name: [] for name in (OLD, NEW, CONTROL, NUDGED, *FURTHER)}
    for name, given in written.items():
        run = SimpleNamespace(ask=lambda **_: None, answer=lambda seconds: None)
        run.write = lambda _, content, given=given: given.append(content["w"] / held.weights["w"] - 1)
        session.load(name, run)
    roundings = {
        name: [round(float(each.abs().mean()) * 2**23, 2) for each in given] for name, given in written.items()
    }
    assert roundings == {
        OLD: [],  # has them
        NEW: [0],
        CONTROL: [0],
        NUDGED: [1],
        "nudged 16 times": [16],
        "nudged 256 times": [256],
    }


@pytest.mark.parametrize(("dim", "packs"), [(0, True), (1, True), (2, False)])
def test_weights_are_packed_along_their_first_or_second_dimension(dim, packs):
    """Of a convolution's third no script packs, and equal numbers there would be chance."""
    parts = [[2, 2, 2], [2, 2, 2]]
    parts[0][dim] = 1
    whole = [2, 2, 2]
    whole[dim] = 3
    assert packed_dim(tuple(whole), [tuple(part) for part in parts]) == (dim if packs else None)


# ---------------------------------------------------------------- other data, and chance

OTHER_SHAPES = {"outputs": [torch.ones(5)]}
OTHER_OUTPUTS = {"outputs": [torch.ones(6) * 1.001]}
OF_OTHER_DATA = {  # do the models draw, what a replay finds of new with and without drawing: verdict, replays
    "the same": (False, {}, SAME_MODEL, [False]),
    "another model": (False, {False: OTHER_OUTPUTS}, NOT_SAME, [False]),
    "other shapes": (False, {False: OTHER_SHAPES}, NOT_COMPARABLE, [False]),
    "drew": (True, {False: OTHER_OUTPUTS}, SAME_MODEL, [False, True]),
    "drew, another model": (True, dict.fromkeys((False, True), OTHER_OUTPUTS), NOT_SAME, [False, True]),
}


@pytest.mark.parametrize("name", OF_OTHER_DATA)
def test_models_are_compared_on_olds_data_where_new_has_one_other_value(name):
    drew, replayed, kind, asked = OF_OTHER_DATA[name]
    session = StubSession()
    spoil(session.runs[NEW].steps[0]["calls"][0]["data"][1])
    if drew:
        session.draws(OLD, NEW, CONTROL, NUDGED)
    session.replayed = replayed
    found, reason = verdict_on(session)
    assert (found, session.asked) == (kind, asked) and "step 1: tensor 2 of its input is a different one" in reason


def test_a_difference_on_old_s_data_is_not_comparable_if_one_name_is_a_guess():
    session = StubSession()
    session.guesses = [Pair(("b.weight",), ("b.weight",), guess=True)]
    spoil(session.runs[NEW].steps[0]["calls"][0]["data"][1])
    session.replayed = {False: OTHER_OUTPUTS}
    assert verdict_on(session)[0] == NOT_COMPARABLE


CHANCE = {  # who draws, the step, what differs: what a replay finds; the verdict, replays
    "both": ([OLD, NEW], 0, "outputs", {}, NOT_COMPARABLE, [True]),
    "both, and another model": ([OLD, NEW], 0, "outputs", {True: OTHER_OUTPUTS}, NOT_SAME, [True]),
    "both, and other shapes": ([OLD, NEW], 0, "outputs", {True: OTHER_SHAPES}, NOT_COMPARABLE, [True]),
    "old alone": ([OLD], 0, "outputs", {}, NOT_SAME, []),
    "new alone": ([NEW], 0, "outputs", {}, NOT_SAME, []),
    "the second step": ([OLD, NEW], 1, "outputs", {}, NOT_SAME, []),  # its outputs were the same in the first
    "the gradients": ([OLD, NEW], 0, "given", {}, NOT_SAME, []),  # of equal outputs
    "a loss alone": ([OLD, NEW], 0, "loss alone", {}, NOT_COMPARABLE, [True]),  # a model that returns no outputs
    "evaluation": ([OLD, NEW], 0, "evaluating", {}, NOT_SAME, []),
}


@pytest.mark.parametrize("name", CHANCE)
def test_a_difference_may_be_chance_if_both_models_draw(name):
    who, step, what, replayed, kind, asked = CHANCE[name]
    session = StubSession()
    session.draws(*who)
    if OLD in who:
        session.draws(CONTROL, NUDGED)
    session.replayed = replayed
    changed = session.runs[NEW].steps[step]
    if what in ("given", "loss alone"):
        spoil(changed["given"]["b.weight"])
    else:
        spoil(changed["calls"][0]["outputs"][0])
    if what == "evaluating":
        changed["calls"][0]["evaluating"] = ["b"]
    if what == "loss alone":
        spoil_loss(changed)
        for run in session.runs.values():
            run.steps[0]["calls"][0].update(outputs=[], shapes=[])
    found, reason = verdict_on(session)
    assert (found, session.asked) == (kind, asked)
    assert ("both models draw random numbers, but different ones" in reason) == (kind == NOT_COMPARABLE)
    assert ("in evaluation mode they agree" in reason) == (name in ("both", "a loss alone"))


@pytest.mark.parametrize("place", [0, 1, None])
def test_one_call_of_a_step_that_draws_is_enough(place):
    comparison = compare_training.Comparison(StubSession())
    calls = [{"drew": number == place} for number in range(2)]
    comparison.recorded = {NEW: Recorded([{"calls": calls}, {"calls": []}], FACTS)}
    assert comparison.drew(NEW) == (place is not None)


@pytest.mark.parametrize(
    ("precision", "words"),
    [
        ({"use_amp": True}, "new computes in bfloat16 on cpu, old in float32 on cpu"),
        ({"tf32": True}, "new computes in TF32 on cpu, old in float32 on cpu"),
        ({"device": "cuda"}, "new computes in float32 on cuda, old in float32 on cpu"),
    ],
)
def test_one_difference_in_precision_is_told_with_whatever_it_may_explain(precision, words):
    session = StubSession()
    session.held[NEW].precision.update(precision)
    spoil(session.runs[NEW].steps[0]["calls"][0]["outputs"][0])
    assert words in verdict_on(session)[1]
    for change in (spoil_setting, spoil_module):
        session.runs[NEW].steps[0] = new_step()
        change(session.runs[NEW].steps[0])
        found, reason = verdict_on(session)
        assert found == NOT_SAME and words not in reason


@pytest.mark.parametrize(
    ("name", "told"),
    [("setting", True), ("update", True), ("gradient", False), ("buffer", False), ("module", False)],
)
def test_another_optimizer_is_told_where_it_may_be_the_reason(name, told):
    session = StubSession()
    session.runs[NEW].facts["optimizers"] = ["AdamW", "SGD"]
    assert verdict_on(session) == (None, "")
    SMALLEST[name][0](session.runs[NEW].steps[2])
    assert ("; the optimizer is AdamW, SGD in new and AdamW in old" in verdict_on(session)[1]) == told


# ---------------------------------------------------------------- the exit status, and the speed


@pytest.mark.parametrize("allowed", [False, True])
@pytest.mark.parametrize(
    ("raised", "status", "measured"),
    [
        (None, 0, True),
        (Verdict(SAME_MODEL, "r"), 1, "allowed"),
        (Verdict(NOT_SAME, "r"), 1, "allowed"),
        (Verdict(NOT_COMPARABLE, "r"), 2, False),
        (Failure(2, "r"), 2, False),
        (KeyboardInterrupt(), 130, False),
    ],
)
def test_the_status_and_who_is_timed_follow_from_the_verdict(raised, status, measured, allowed, monkeypatch):
    def check(self):
        if raised:
            raise raised

    asked = []
    monkeypatch.setattr(compare_training.Comparison, "check", check)
    monkeypatch.setattr(compare_training, "measured", lambda *given: asked.append(given) or (None, "no speed"))
    session = StubSession()
    session.commands = {OLD: ["a.py"], NEW: ["b.py"]}
    options = SimpleNamespace(no_speed=False, allow_different=allowed, rounds=6)
    assert compare_training.compare(session, options)["status"] == status
    assert bool(asked) == (allowed if measured == "allowed" else measured)
    asked.clear()
    options.no_speed = True
    assert compare_training.compare(session, options)["status"] == status and not asked


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (Short(2, "new ended after 40 steps"), "new ended after 40 steps, before the rounds were done: let it train"),
        (Failure(2, "new: out of memory"), "new: out of memory"),
        (Verdict(NOT_COMPARABLE, "the names do not fit"), "the names do not fit"),
    ],
)
def test_why_there_is_no_speed_is_said(error, said, monkeypatch):
    def measure(self):
        raise error

    monkeypatch.setattr(compare_training.Rounds, "measure", measure)
    session = StubSession()
    session.together = True
    session.children = SimpleNamespace(alive=dict.fromkeys((OLD, NEW, CONTROL)), end=lambda *names: None)
    speed, reason = compare_training.measured(session, 6)
    assert speed is None and reason.startswith(said)


def test_a_script_that_never_reaches_its_next_step_is_named():
    run = object.__new__(Run)
    run.name = "new"
    assert str(run.late(900)) == "new didn't reach its next step within 900 s"


# ---------------------------------------------------------------- why a script's end came too early


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"model": None}, "no module with parameters was called with gradients"),
        ({"foreign": {"SGD"}}, "its SGD holds no parameter of the model that ran first, a Linear"),
        ({"backwards": 10}, "no torch.optim optimizer stepped in 10 backward passes"),
        ({"steps": 1, "foreign": {"SGD"}}, "short"),  # one step is enough
    ],
)
def test_why_a_script_ended_too_early(state, words, monkeypatch):
    monkeypatch.setattr(child.check, "compiled_graphs", lambda: 0)
    ended = SimpleNamespace(**{"model": nn.Linear(1, 1), "steps": 0, "foreign": set(), "backwards": 0} | state)
    assert child.Child.why_it_ended(ended).startswith(words)


@pytest.mark.parametrize("graphs", [0, 1])
def test_one_compiled_function_may_hide_the_model(graphs, monkeypatch):
    monkeypatch.setattr(child.check, "compiled_graphs", lambda: graphs)
    said = child.Child.why_it_ended(SimpleNamespace(model=None))
    assert ("its model runs in a compiled function only" in said) == bool(graphs)
