"""The judge of compare_training.py at its bounds: what is just allowed, and what is just not."""

import math
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from common.measuring.accuracy import LAST_PLACE
from common.own_script import child, judge, report, speed
from common.own_script.names import Pair, orders

FLOAT32 = {"use_amp": False, "tf32": False, "device": "cpu"}
ONE = 1e-6  # relative error of a float32 sum on a CPU; 1e-5 for a sum over the whole batch, whose order may change
SUM = 1e-5
PAIRS = [Pair((name,), (name,)) for name in "ab"]
SHAPES = dict.fromkeys(("old", "new"), {"a": (4,), "b": (1, 1000)})


def judge_of(weights=None):
    return judge.Judge(PAIRS, SHAPES, FLOAT32, weights or {})


def ones(factor=1.0):
    return torch.full((4,), factor, dtype=torch.float64)


# ---------------------------------------------------------------- one tensor


@pytest.mark.parametrize(
    ("control", "nudged", "bound"),
    [(0.0, 0.0, ONE), (0.01, 0.0, 0.02 + ONE), (0.0, 0.01, 0.02 + ONE), (0.02, 0.01, 0.04 + ONE)],
)
def test_new_may_be_twice_as_far_as_the_furthest_of_olds_own_runs(control, nudged, bound):
    others = [ones(1 + control), ones(1 + nudged)]
    for error, passed in ((0.999 * bound, True), (1.001 * bound, False)):
        found = judge_of().compare("x", [ones(), ones(1 + error), *others], ONE)
        assert found.bound == pytest.approx(bound, rel=1e-6) and found.passed is passed
    assert judge.Compared("x", 0.5, 0.5, 1.0).passed and not judge.Compared("x", math.nan, 0.5, 1.0).passed


def test_zeros_may_differ_by_what_is_small_for_all_tensors():
    zeros = torch.zeros(4, dtype=torch.float64)
    for error, passed in ((1.99e-7, True), (2.01e-7, False)):
        values = [zeros, ones(error), zeros, zeros]
        assert judge_of().compare("x", values, ONE, least=1e-7).passed is passed
    assert not judge_of().compare("x", [zeros, ones(1e-30), zeros, zeros], ONE).passed


@pytest.mark.parametrize(("bound", "judged"), [(0.999, True), (1.0, False)])
def test_a_tensor_of_which_old_is_unsure_by_its_whole_size_is_not_judged(bound, judged):
    found = judge_of()
    found.note("updates", [judge.Compared("a", 0.5, bound, 1.0), judge.Compared("b", 1e-9, 1e-5, 1.0)])
    count, worst, loose = found.worst["updates"]
    assert (count, worst.name, loose) == ((2, "a", []) if judged else (2, "b", ["a"]))


def test_weights_are_nudged_by_one_rounding_of_what_the_script_computes_in():
    weights = {"w": torch.linspace(0.5, 1.5, 64, dtype=torch.float64), "steps": torch.tensor([3])}
    sizes = [
        (FLOAT32, 2.0**-23),
        (FLOAT32 | {"tf32": True}, LAST_PLACE["float16"] / 2),
        (FLOAT32 | {"use_amp": True, "amp_dtype": "bfloat16"}, LAST_PLACE["bfloat16"] / 2),
        (FLOAT32 | {"use_amp": True, "amp_dtype": "float16", "tf32": True}, LAST_PLACE["float16"] / 2),
    ]
    for precision, size in sizes:
        signs = []
        for times in (1, 16, 256):
            found = judge.nudged(weights, precision, times)
            moved = found["w"] / weights["w"] - 1
            signs.append(tuple(moved.sign().tolist()))
            assert moved.abs().tolist() == pytest.approx([times * size] * 64) and moved.min() < 0 < moved.max()
            assert torch.equal(found["steps"], weights["steps"])
        assert len(set(signs)) == 3  # the same one, only longer, would show the same roundings again


# ---------------------------------------------------------------- losses


def step(loss, **more):
    return {"losses": loss if isinstance(loss, list) else [loss]} | more


@pytest.mark.parametrize(
    ("control", "bound"),
    [(0.0, 1e-4), (4e-5, 1e-4), (1e-3, 2e-3)],
    ids=["of float32", "smaller noise", "larger noise"],
)
def test_a_loss_may_be_off_by_its_bound_or_twice_the_noise(control, bound):
    for nudged in (0.0, control):  # either of old's own runs may be the furthest
        others = {"control": step(2 * (1 + control - nudged)), "nudged": step(2 * (1 + nudged))}
        for error, same in ((0.999 * bound, True), (1.001 * bound, False)):
            runs = {"old": step(2.0), "new": step(2 * (1 + error)), **others}
            assert (judge_of().losses(1, runs) is None) is same


@pytest.mark.parametrize(("error", "said"), [(0.0009, False), (0.0011, True)])
def test_how_many_times_a_loss_is_as_large_is_said_where_four_digits_show_it(error, said):
    runs = dict.fromkeys(("old", "control", "nudged"), step(2.0)) | {"new": step(2 * (1 + error))}
    assert (" times" in judge_of().losses(1, runs).text) is said


def test_several_backward_passes_are_one_of_their_sum():
    runs = dict.fromkeys(("old", "control", "nudged"), step([1.0, 2.0])) | {"new": step(3.0)}
    assert judge_of().losses(1, runs) is None
    assert judge_of().losses(1, runs | {"new": step(3.001)}).kind == "loss"


# ---------------------------------------------------------------- gradients and updates


@pytest.mark.parametrize(("error", "small"), [(0.1, True), (0.101, False)])
def test_an_error_beyond_a_tenth_is_no_kink(error, small):
    """The largest decides."""
    found = [judge.Compared("a", 1e-4, 1e-5, 1.0), judge.Compared("b", error, 1e-5, 1.0)]
    assert judge.are_small(found) is small


FACTORS = {  # errors and factors of two tensors that differ: the one factor of both, or None
    "one": ([(0.5, 0.5), (0.5, 0.5)], 0.5),
    "within a percent": ([(0.5, 0.5), (0.495, 0.505)], 0.5),
    "more than a percent apart": ([(0.5, 0.5), (0.494, 0.506)], None),
    "the error is the factor's": ([(0.549, 0.5), (0.5, 0.5)], 0.5),
    "the error is larger": ([(0.551, 0.5), (0.5, 0.5)], None),
}


@pytest.mark.parametrize("name", FACTORS)
def test_one_factor_explains_all_or_nothing(name):
    pairs, factor = FACTORS[name]
    found = [judge.Compared(str(i), error, 1e-5, size) for i, (error, size) in enumerate(pairs)]
    assert judge.common_factor(found, found) == factor
    assert judge.common_factor(found[1:], found) is None  # one of them is right
    assert judge.common_factor(found[:1], found[:1]) is None  # of one tensor nothing is common


KINKS = {  # what the smaller and the larger nudge move, and the size of the gradient: does it jump?
    "nearly four times too far": (1e-3, 3.9 * 16e-3, 1.0, False),
    "further": (1e-3, 4.1 * 16e-3, 1.0, True),
    "more than a quarter": (3.9e-3, 16e-3, 1.0, False),
    "less than a quarter": (4.1e-3, 16e-3, 1.0, True),
    "no more than sums in another order": (1.0e-5, 0.99e-5, 1.0, False),
    "more than these": (1.0e-5, 1.01e-5, 1.0, True),
    "a gradient that may be noise": (1e-2, 1e-2, 0.99e-3, False),
    "one that is none": (1e-2, 1e-2, 1.01e-3, True),
}


@pytest.mark.parametrize("name", KINKS)
def test_a_kink_is_a_move_quite_out_of_proportion(name):
    """b has 1000 elements of 1, which make the gradients' root mean square; a is looked at."""
    near, far, size, jumps = KINKS[name]
    whole = math.sqrt((4 * size**2 + 1000) / 1004)
    runs = [
        {"a": ones(size * whole * (1 + moved)), "b": torch.ones(1, 1000).double() * whole} for moved in (0, near, far)
    ]
    assert judge_of().has_kinks(*runs, 16) is jumps


@pytest.mark.parametrize(("size", "compared"), [(9.9, False), (10.1, True), (0.0, True)])
def test_an_update_counts_where_a_gradient_is_clear_or_exactly_zero(size, compared):
    """Adam's step is a sign: where the gradient is ten times its allowed error or less, new's may be the other."""
    found = judge_of()
    gradient = torch.tensor([1.0, 1.0, 1.0, 0.0])
    gradient /= judge.rms(gradient)
    gradient[-1] = 2 * SUM * size  # allowed are a rounding of this sum, and one of all tensors' size
    gradients = dict.fromkeys(judge.RUNS, {"a": gradient, "b": None})
    found.compare_gradients("gradients", gradients)
    update = {"a": torch.tensor([1e-3] * 4), "b": None}
    flipped = {"a": torch.tensor([1e-3] * 3 + [-1e-3]), "b": None}
    updates = dict.fromkeys(judge.RUNS, update) | {"new": flipped}
    assert (found.updates(1, updates) is not None) is compared


@pytest.mark.parametrize(
    ("precision", "one", "last_place"),
    [
        (FLOAT32, SUM, 2.0**-23),
        (FLOAT32 | {"use_amp": True, "amp_dtype": "bfloat16"}, SUM + 2.0**-8, 2.0**-7),
        (FLOAT32 | {"use_amp": True, "amp_dtype": "float16"}, SUM + 2.0**-11, 2.0**-10),
    ],
)
def test_an_update_may_be_off_by_a_rounding_of_the_weight(precision, one, last_place):
    """And by one of the gradient's sum, and by one of all updates together, which here have its size."""
    weights = {"a": ones(1000.0), "b": torch.ones(1, 1000)}
    update = ones(64 * 1000 * last_place)
    size = judge.rms(update)
    bound = 2 * one * size + 1000 * last_place
    for error, same in ((0.999 * bound, True), (1.001 * bound, False)):
        found = judge.Judge(PAIRS, SHAPES, precision, weights)
        runs = dict.fromkeys(judge.RUNS, {"a": update, "b": None}) | {"new": {"a": update + error, "b": None}}
        assert (found.updates(1, runs) is None) is same


@pytest.mark.parametrize(("other", "same"), [(1e-3 * (1 + 0.9e-6), True), (1e-3 * (1 + 1.1e-6), False)])
def test_a_setting_may_differ_by_a_rounding(other, same):
    assert judge.is_close(1e-3, other) is same and judge.is_close([1e-3, 0.9], [other, 0.9]) is same
    assert not judge.is_close([1e-3], [1e-3, 1e-3])


# ---------------------------------------------------------------- where it begins


def event(name, error, side="out"):
    return {"name": name, "side": side, "class": "Linear", "values": [torch.ones(4) * (1 + error)]}


@pytest.mark.parametrize(("times", "module"), [(1.9, None), (2.1, "a")])
def test_a_module_differs_if_its_output_is_off_by_twice_its_bound(times, module):
    """The last of them all is the only one that differs."""
    found = judge.Judge([Pair(("a.weight",), ("a.weight",))], {"old": {}, "new": {}}, FLOAT32, {})
    calls = {name: {"trace": [event("a", 0.0)]} for name in judge.RUNS}
    calls["nudged"] = {"trace": [event("a", 0.01)]}
    calls["new"] = {"trace": [event("a", times * 0.02)]}
    assert found.first_module(calls)[0] == module


# ---------------------------------------------------------------- orders of packed parts


def packed(number):
    return Pair(tuple(f"old{i}" for i in range(number)), ("new",), 0, guess=True)


@pytest.mark.parametrize(
    ("numbers", "count"), [([], 1), ([2], 2), ([3], 6), ([2, 3], 12), ([4], 12), ([3, 4], 12), ([2, 2], 2)]
)
def test_q_k_v_and_gate_and_up_are_tried_in_all_their_orders(numbers, count):
    """Twelve are two times six; more would cost a replay each."""
    found = list(orders([packed(number) for number in numbers]))
    assert len(found) == count and len({str(order) for order in found}) == count


# ---------------------------------------------------------------- speed


@pytest.mark.parametrize(
    ("seconds", "steps"), [(1.0, 1), (0.1, 1), (0.0667, 1), (0.066, 2), (0.011, 9), (0.01, 10), (0.0001, 10), (0.0, 10)]
)
def test_a_pass_takes_a_tenth_of_a_second_or_ten_steps(seconds, steps):
    assert speed.steps_of_pass(seconds) == steps


@pytest.mark.parametrize(
    ("times", "passes"),
    [
        ([1.0, 1.2], 2),  # a fifth more: warm
        ([1.0, 0.8], 2),
        ([1.0, 1.21, 1.21], 3),
        ([1.0, 0.79, 0.79], 3),
        ([2.0**-i for i in range(20)], 11),  # never settled: ten are enough
    ],
)
def test_a_script_is_warm_when_two_passes_differ_by_a_fifth_at_most(times, passes, monkeypatch):
    asked = []

    def ask(run, steps, reset=False):
        asked.append((steps, reset))
        return times[len(asked) - 1], None

    monkeypatch.setattr(speed, "ask_steps", ask)
    assert speed.warm_up(None) == times[passes - 1]
    assert asked == [(2, True)] + [(2, False)] * (passes - 1)


# ---------------------------------------------------------------- the smallest faults


@pytest.mark.parametrize("fault", ["the first value", "the last value", "a missing value"])
def test_one_value_of_the_last_tensor_of_the_last_call_is_other_data(fault):
    """A NaN stands for a missing value, and equals itself."""
    tokens = torch.arange(4000).view(4, 1000)
    labels = tokens.double().index_put_((torch.tensor(2), torch.tensor(2)), torch.tensor(math.nan).double())
    other = labels.clone()
    other[(0, 0) if fault == "the first value" else (2, 2) if fault == "a missing value" else (3, 999)] = -100
    calls = [{"data": [tokens, labels]}, {"data": [tokens, labels]}]
    assert judge_of().data(1, {"calls": calls}, {"calls": calls}) is None
    found = judge_of().data(3, {"calls": calls}, {"calls": [calls[0], {"data": [tokens, other]}]})
    said = "step 3, call 2: tensor 2 of its input is a different one: 1 of its 4,000 values differ"
    assert (found.kind, found.text) == ("data", said)


def call_with(outputs):
    return {"calls": [{"outputs": outputs, "shapes": [list(value.shape) for value in outputs]}] * 2}


def test_one_element_of_the_last_output_of_the_last_call_is_off():
    outputs = [torch.ones(2), torch.ones(100, 100)]
    runs = dict.fromkeys(judge.RUNS, call_with(outputs))
    assert judge_of().outputs(2, runs) is None
    wrong = call_with([outputs[0], outputs[1].clone()])
    wrong["calls"] = [runs["old"]["calls"][0], wrong["calls"][1]]
    wrong["calls"][1]["outputs"][1][-1, -1] = 1.001
    found = judge_of().outputs(2, runs | {"new": wrong})
    assert found.text.startswith("step 2: the outputs are off by 1e-05")


GRADIENTS = {"a": torch.ones(4), "b": torch.ones(1, 1000)}


def with_last(values, name, value):
    changed = {key: tensor.clone() for key, tensor in values.items()}
    changed[name].view(-1)[-1] = value
    return changed


@pytest.mark.parametrize("name", ["a", "b"])
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("gradients", "step 2: 1 of 2 gradients differ"),
        ("stepped", "step 2: backward leaves the same gradients, but 1 of 2 that the optimizer gets differ"),
        ("updates", "step 2: the gradients agree, but 1 of 2 updates differ"),
    ],
)
def test_one_element_of_one_gradient_or_update_is_off(kind, words, name):
    """By an eighth; all others are right."""
    runs = dict.fromkeys(judge.RUNS, GRADIENTS)
    assert getattr(judge_of(), kind)(2, runs) is None
    found = getattr(judge_of(), kind)(2, runs | {"new": with_last(GRADIENTS, name, 1.125)})
    assert (found.kind, found.text) == (kind, f"{words}: {name}")


@pytest.mark.parametrize("gone", [None, torch.zeros(1, 1000)])
def test_one_parameter_that_lacks_its_gradient_or_its_update_is_named(gone):
    runs = dict.fromkeys(judge.RUNS, GRADIENTS) | {"new": GRADIENTS | {"b": gone}}
    assert judge_of().gradients(1, runs).text == "step 1: new lacks 1 of 2 gradients: b"
    assert judge_of().stepped(1, runs).text.endswith("1 of 2 that the optimizer gets differ, new's optimizer lacks b")
    assert judge_of().updates(1, runs).text == "step 1: new never updates 1 of 2 parameters: b"


@pytest.mark.parametrize("gone", [None, torch.zeros(1, 1000)])
def test_one_parameter_whose_gradient_or_update_only_old_lacks_is_named(gone):
    """Somebody mended the script: the sentence says which side had the fault."""
    runs = dict.fromkeys(judge.RUNS, GRADIENTS | {"b": gone}) | {"new": GRADIENTS}
    assert judge_of().gradients(1, runs).text == "step 1: old lacks 1 of 2 gradients that new has: b"
    assert judge_of().stepped(1, runs).text.endswith("1 of 2 that the optimizer gets differ, old's optimizer lacks b")
    assert judge_of().updates(1, runs).text == "step 1: old never updates 1 of 2 parameters that new updates: b"


def test_one_setting_of_the_last_parameter_differs():
    old = {"settings": {name: {"lr": 1e-3, "weight_decay": 0.1} for name in "ab"}}
    new = {"settings": old["settings"] | {"b": {"lr": 1e-3, "weight_decay": 0.0}}}
    assert judge_of().settings(1, old, old) is None
    said = "step 1: the optimizer's weight_decay 0 in new and 0.1 in old for b"
    assert judge_of().settings(1, old, new).text == said


@pytest.mark.parametrize(
    ("still", "said"),
    [((), "the updates agree, but buffers differ: mean"), (("mean",), "new never updates mean, and old does")],
)
def test_one_element_of_the_last_buffer_is_off(still, said):
    buffers = {"count": torch.ones(1), "mean": torch.ones(1000)}
    run = {"buffers": buffers, "still": []}
    runs = dict.fromkeys(judge.RUNS, run)
    found = judge.Judge([Pair(("w",), ("w",))], {"old": {}, "new": {}}, FLOAT32, {})
    assert found.buffers(1, runs) is None
    runs |= {"new": {"buffers": with_last(buffers, "mean", 1.01), "still": list(still)}}
    assert found.buffers(1, runs).text == f"step 1: {said}"


def test_each_call_of_a_step_draws_other_numbers_and_those_of_two_scripts_are_the_same():
    """Whatever either drew before: dropout of two micro-batches differs, and of the same one does not."""

    def record(number):
        torch.manual_seed(number)
        recording = SimpleNamespace(step={"calls": []}, params={}, modules={}, calls=0, value_of=None)
        recording.sums_of = lambda params: {}
        recording.buffers_now = dict
        recording.traced = lambda run, module, args, kwargs: run(module, *args, **kwargs)
        for _ in range(2):
            child.Child.recorded(recording, lambda module, x: module(x), torch.nn.Dropout(), (torch.ones(99),), {})
        return [call["outputs"][0] for call in recording.step["calls"]]

    one = record(1)
    assert all(map(torch.equal, one, record(2))) and not torch.equal(*one)


def test_what_a_script_draws_is_not_what_it_draws_while_it_is_recorded():
    draws = {"torch": lambda: torch.rand(()).item(), "python": random.random, "numpy": np.random.random}
    child.seed(5)
    wanted = {name: draw() for name, draw in draws.items()}
    child.seed(5)
    with child.seeded(3) as drew:
        inside = {name: draw() for name, draw in draws.items()}
    assert {name: draw() for name, draw in draws.items()} == wanted and drew == [True]
    assert not set(inside.values()) & set(wanted.values())
    with child.seeded(3) as drew:
        pass
    assert drew == [False]


@pytest.mark.parametrize("evaluate", [False, True])
@pytest.mark.parametrize("inputs", [3, 5])
def test_a_replay_leaves_the_model_as_it_was(tmp_path, inputs, evaluate):
    """The next order of packed parts is replayed with the same buffers; a layer with 5 inputs fails after the norm."""
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.Linear(inputs, 2), torch.nn.Dropout().eval())
    names = {id(param): name for name, param in model.named_parameters()}
    replaying = SimpleNamespace(model=model, names=names, trace=None, save=lambda content: len(content["gradients"]))
    torch.save({"data": [torch.randn(4, 3)]}, tmp_path / "data.pt")
    request = {"file": tmp_path / "data.pt", "evaluate": evaluate}
    before = {name: value.clone() for name, value in model.state_dict().items()}
    told = child.Child.replay(replaying, model, (torch.ones(4, 3),), {}, request)
    assert told == {"file": 1} if inputs == 3 else told["failed"].startswith("RuntimeError")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [part.training for part in model.modules()] == [True, True, True, False] and replaying.trace is None


@pytest.mark.parametrize(
    "shape", [(4096, 129), (240, 768), (16, 768), (64, 128, 768), (2000, 3), (3, 5), (1, 4097), (8, 50257)]
)
def test_a_sample_of_what_a_module_returns_has_every_column(shape):
    """Or one that is wrong would be blamed on the module after it. A sample has 4096 elements or so."""
    columns = shape[-1]
    found = child.sample(torch.arange(columns, dtype=torch.float64).expand(shape))
    assert min(len(found.unique()), 4000) == min(columns, 4000) and len(found) <= 2 * child.SAMPLE


# ---------------------------------------------------------------- micro-batches and modules


@pytest.mark.parametrize(
    ("rows", "joined"),
    [([4, 4], True), ([2, 2, 2, 2], True), ([4, 3], False), ([8], False), ([8, 8], False)],
    ids=str,
)
def test_micro_batches_are_joined_if_they_are_the_batch(rows, joined):
    """On either side; parts that leave a row out, or that repeat the batch, are other data."""
    batch = torch.arange(16.0).view(8, 2)
    starts = [sum(rows[:number]) % 8 for number in range(len(rows))]
    parts = [[batch[start : start + size], torch.tensor(3)] for start, size in zip(starts, rows, strict=True)]
    whole = [[batch, torch.tensor(3)]]
    for found in (judge.as_one_batch(whole, parts), judge.as_one_batch(parts, whole)):
        assert (found is not None) is joined
        if found:
            assert all(len(side) == 1 and torch.equal(side[0][0], batch) for side in found)


@pytest.mark.parametrize(
    ("one", "other", "words"),
    [
        ({"eps": 1e-5}, {"eps": 1e-5 * (1 + 9e-7)}, None),
        ({"eps": 1e-5}, {"eps": 1e-5 * (1 + 2e-6)}, "step 1: the modules' eps 1e-05 in new and 1e-05 in old for norm"),
        ({"eps": 1e-5, "p": 0.1}, {"eps": 1e-6}, "step 1: the modules' eps 1e-06 in new and 1e-05 in old for norm"),
        ({"eps": 1e-5}, {"momentum": 0.1}, None),
    ],
)
def test_settings_of_modules_are_compared_where_both_have_them(one, other, words):
    """A norm's eps is too small a difference for the outputs. What only one side has is another class's."""
    steps = [{"calls": [{"modules": {"norm": found, "only": {}}}]} for found in (one, other)]
    found = judge_of().module_settings(1, *steps)
    assert (found and found.text) == words


def test_a_line_break_in_a_name_makes_no_line_of_its_own():
    names = {"old": "a\nverdict     the same computation.py", "new": "b.py"}
    content = names | {"verdict": "not comparable", "reason": "", "module": "", "rows": {}}
    assert report.as_text(content).splitlines()[:3] == [
        "compare_training: a\\nverdict     the same computation.py",
        "          versus: b.py",
        "",
    ]
