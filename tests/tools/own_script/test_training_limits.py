"""check_training.py: each number that decides a finding, just below and just above it."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import check_training
from check_training import Arrival, Compared, Optimizers, Peak, Record, Seen, Slopes, Step, Work


def record_of(seen=(), arrivals=(), name="weight", shape=(4, 4)):
    """Return a parameter's record; seen: one Seen per step."""
    return Record(nn.Parameter(torch.ones(shape)), name, seen=list(seen), arrivals=list(arrivals), trainable=True)


def steps_of(number, gradient="another", size=1.0, begins="another"):
    """Return what was seen in a number of steps that all change the parameter."""
    seen = []
    for step in range(number):
        before = 0 if begins == "the same" else step
        seen.append(Seen(0 if gradient == "the same" else step, size, True, before, before + 1))
    return seen


def facts_on(trained, steps=8):
    """Return what the judgement knows about a run in which all these parameters train."""
    models = SimpleNamespace(roots={})
    optimizers = SimpleNamespace(known=[], skipped=0)
    watch = SimpleNamespace(
        models=models, optimizers=optimizers, steps=[Step(gradients=1)] * steps, records={}, rates={}
    )
    return SimpleNamespace(
        watch=watch, live=list(trained), of=lambda *fates: list(trained) if "trained" in fates else []
    )


def kinds_of(findings):
    return [finding.kind for finding in findings]


# ---------------------------------------------------------------- gradients
@pytest.mark.parametrize(("steps", "found"), [(2, []), (3, ["repeated"])])
def test_a_gradient_that_repeats_needs_three_steps(steps, found):
    facts = facts_on([record_of(steps_of(steps, "the same"))])
    assert kinds_of(check_training.gradient_findings(facts)) == found


@pytest.mark.parametrize(("sizes", "found"), [((0, 0, 1), False), ((0, 1, 1), True)])
def test_a_gradient_repeats_if_it_comes_twice(sizes, found):
    assert record_of([Seen(size, size, True) for size in sizes]).repeats == found


@pytest.mark.parametrize(("kind", "same"), [("repeated", "gradient"), ("put_back", "begins")])
@pytest.mark.parametrize(("odd", "whole"), [(9, 10), (10, 11)])
def test_one_of_ten_biases_may_be_odd_and_one_of_eleven_not(kind, same, odd, whole):
    """More than 90 % of the tensors have the same gradient in every step, or are put back after it."""
    records = [record_of(steps_of(3, **{same: "the same"}), name="bias", shape=4) for _ in range(odd)]
    records += [record_of(steps_of(3), name="bias", shape=4) for _ in range(whole - odd)]
    facts = facts_on(records)
    findings = check_training.gradient_findings(facts) + check_training.change_findings(facts)
    assert kinds_of(findings) == [kind] * (odd == 10)


@pytest.mark.parametrize(("steps", "shape", "found"), [(2, (4, 4), []), (3, (4, 4), ["put_back"]), (3, 4, [])])
def test_one_matrix_that_is_put_back_in_three_steps_is_a_finding(steps, shape, found):
    """A clip may hold a bias at its bound."""
    one = record_of(steps_of(steps, begins="the same"), shape=shape)
    facts = facts_on([one, *(record_of(steps_of(3)) for _ in range(9))])
    assert kinds_of(check_training.change_findings(facts)) == found


@pytest.mark.parametrize("unchanged", [None, 0, 1, 2])
def test_what_is_put_back_was_changed_by_every_step(unchanged):
    """A learning rate of 0 in some step leaves the weights where they were."""
    seen = [Seen(step, 1.0, step != unchanged, 0, int(step != unchanged)) for step in range(3)]
    assert record_of(seen).put_back == (unchanged is None)


def arrivals_in(*steps, weights=None):
    """Return a gradient in each of these steps; weights: the parameter's bit sum at each, or another in every step."""
    sums = weights or steps
    return [
        Arrival(step, torch.tensor(1.0), False, weights=torch.tensor(value))
        for step, value in zip(steps, sums, strict=True)
    ]


@pytest.mark.parametrize(
    ("gradients", "steps", "found"),
    [
        ([1, 1, 2, 2], [0, 2], ["stepped_again"]),
        ([1, 1, 2, 3], [0, 2, 3], []),  # once, as at the end of an accumulation
        ([1, 1, 2, 2], [0, 1, 2, 3], []),  # the same gradient, but a new one
        ([1, 2, 3, 4], [0, 2], []),  # computed by hand
        ([1, 1, 2, 2], [], []),  # from no backward that we watch
        ([1, 1, 1, 1], [0], ["repeated"]),
    ],
)
def test_a_second_step_with_an_old_gradient_counts_from_the_second_time(gradients, steps, found):
    seen = [Seen(value, 1.0, True, number, number + 1) for number, value in enumerate(gradients)]
    facts = facts_on([record_of(seen, arrivals_in(*steps)) for _ in range(3)])
    assert kinds_of(check_training.gradient_findings(facts)) == found


@pytest.mark.parametrize(
    ("weights", "found"),
    [([5, 5], []), ([5, 5, 5], ["put_back"]), ([5, 5, 6], []), ([5, 5, 5, 5], ["put_back"])],
)
def test_weights_that_a_perturbation_hides_are_put_back_if_three_first_backwards_find_the_same(weights, found):
    facts = facts_on([record_of(steps_of(len(weights)), arrivals_in(*range(len(weights)), weights=weights))])
    assert kinds_of(check_training.change_findings(facts)) == found


@pytest.mark.parametrize(("empty", "found"), [(1, []), (2, ["empty_steps"])])
def test_one_step_may_have_no_gradient(empty, found):
    facts = facts_on([record_of(steps_of(8))])
    facts.watch.steps = [Step(gradients=int(number >= empty)) for number in range(8)]
    assert kinds_of(check_training.gradient_findings(facts)) == found


def two_arrivals(steps, cleared=True):
    """Return arrivals of two micro-batches per step. cleared: the second finds no gradient of the first."""
    one = torch.ones(())
    added = [False, not cleared]
    return [Arrival(step, one, is_added, total=one) for step in range(steps) for is_added in added]


@pytest.mark.parametrize(("steps", "lost"), [(1, 0), (2, 2)])
def test_cleared_micro_batches_are_lost_in_two_steps_or_more(steps, lost):
    assert len(record_of(steps_of(3), two_arrivals(steps)).overwritten) == lost


@pytest.mark.parametrize(
    ("counts", "lost"), [((1, 2, 2), 2), ((2, 1, 2), 0), ((1, 1, 2, 2), 0), ((1, 2), 0), ((1, 1, 1), 0)]
)
def test_only_the_first_step_may_have_one_micro_batch(counts, lost):
    """As with `if i % 4 == 0: optimizer.step()`. A later one shows that the script sometimes goes backward twice."""
    one = torch.ones(())
    arrivals = [Arrival(step, one, False, total=one) for step, count in enumerate(counts) for _ in range(count)]
    assert len(record_of(steps_of(4), arrivals).overwritten) == lost


@pytest.mark.parametrize(("lost", "whole", "found"), [(9, 10, 0), (10, 11, 10)])
def test_nearly_all_tensors_lose_their_micro_batches(lost, whole, found):
    records = [record_of(steps_of(3), two_arrivals(2, cleared=number < lost)) for number in range(whole)]
    assert len(check_training.overwritten(facts_on(records))) == found


# ---------------------------------------------------------------- updates, values and inputs
@pytest.mark.parametrize(("gradient", "is_small"), [(0.99, True), (1.01, False)])
def test_an_update_is_too_small_below_the_rounding_of_the_largest_weight(gradient, is_small):
    eps = torch.finfo(torch.float32).eps
    record = record_of([Seen(0, gradient * eps * 3 / 0.01, False)])
    record.param.data[0, 0] = -3
    groups = [{"params": [record.param, torch.ones(1)], "lr": 0.01}]
    assert check_training.too_small([record], groups) == [record] * is_small


@pytest.mark.parametrize(("dtype", "is_small"), [(torch.float32, True), (torch.float16, False)])
def test_an_update_that_16_bits_round_away_is_none_too_small(dtype, is_small):
    """It is a finding: float32 weights would keep it."""
    record = record_of([Seen(0, 1e-12, False)])
    record.param = nn.Parameter(torch.ones(2, dtype=dtype))
    groups = [{"params": [record.param, torch.ones(1)], "lr": 1e-3}]
    assert check_training.too_small([record], groups) == [record] * is_small


@pytest.mark.parametrize(("steps", "found"), [(2, []), (3, ["same_input", "loss_constant"])])
def test_the_same_input_and_the_same_loss_need_three_steps(steps, found):
    step = Step(inputs={7}, loss=torch.tensor(2.5))
    watch = SimpleNamespace(steps=[step] * steps, hidden=SimpleNamespace(captured=False))
    assert kinds_of(check_training.run_findings(watch)) == found


@pytest.mark.parametrize(
    ("values", "copies", "pairs"), [([0.0, 1.0], 2, 0), ([0.0, 1.0, 2.0], 2, 1), ([0.0, 1.0, 2.0], 3, 0)]
)
def test_two_equal_matrices_of_three_values_may_be_a_tie(values, copies, pairs):
    """Masks and constants are equal by chance, and so are the layers of a deep copy, of which there are more."""
    records = [record_of(shape=(2, 3)) for _ in range(copies)]
    for record, owner in zip(records, (nn.Embedding(1, 1), nn.Linear(1, 1), nn.Bilinear(1, 1, 1)), strict=False):
        record.owners = {owner: "layer"}
        record.start = 1
        record.param.data = torch.tensor(values * 3)[:6].view(2, 3)
    assert len(check_training.copied_ties(facts_on(records))) == pairs


@pytest.mark.parametrize(("p", "found"), [(0.0, 0), (1e-3, 1)])
def test_a_dropout_of_0_may_stay_in_evaluation_mode(p, found):
    dropout = nn.Dropout(p)
    model = nn.Sequential(nn.Linear(2, 2), dropout)
    models = SimpleNamespace(roots={model: SimpleNamespace(reached=True)}, ran={model, dropout}, training={model})
    assert len(check_training.in_evaluation_mode(SimpleNamespace(models=models))) == found


@pytest.mark.parametrize(("size", "differs"), [(2**16 - 1, True), (2**16, False)])
def test_the_place_of_a_change_counts_in_small_tensors(size, differs):
    """In large ones +lr in one place and -lr in another cancel, but not in all of their places."""
    value = torch.full((size,), 1.5)
    swapped = value.clone()
    swapped[-2:] += torch.tensor([0.25, -0.25])
    first, second = check_training.bit_sums([value, swapped])
    assert (first != second) == differs


@pytest.mark.parametrize(
    ("rates", "found"),
    [
        ([0.0, 0.0], True),  # nothing trains
        ([0.0, 1.0], False),  # a warm-up
        ([1.0, 0.001], False),
        ([1.0, 0.000999], True),
        ([0.5, 1.0, 0.000999], True),  # the largest is neither the first nor the last
        ([1.0, 0.0, 1.0], False),
    ],
)
@pytest.mark.parametrize("group", [0, 1])
def test_a_learning_rate_that_is_0_or_falls_by_more_than_a_thousand_is_a_warning(rates, found, group):
    """In the first and in the last group."""
    steps = [[0.1, 0.1] for _ in rates]
    for step, rate in zip(steps, rates, strict=True):
        step[group] = rate
    watch = SimpleNamespace(rates={("AdamW", 0): steps}, steps=steps)
    assert kinds_of(check_training.rate_findings(watch, {})) == ["learning_rate"] * found


# ---------------------------------------------------------------- what the output depends on
@pytest.mark.parametrize(("moved", "depends"), [(1.99, False), (2.01, True)])
def test_an_output_depends_on_what_moves_it_by_more_than_twice_the_noise(moved, depends):
    rerun = object.__new__(check_training.Rerun)
    rerun.usual = ([torch.zeros(3)], [torch.tensor([0.0, -1.0, 0.0])])
    rerun.outputs = lambda: [torch.tensor([moved, 0.0, 0.0])]
    param = nn.Parameter(torch.ones(2))
    assert rerun.depends_on([param]) == depends
    assert torch.equal(param, torch.ones(2))


@pytest.mark.parametrize(("count", "found"), [(1, 0), (2, 2)])
def test_two_factors_that_are_zero_explain_each_other(count, found):
    """A single zero factor is the fault."""
    records = [record_of() for _ in range(count)]
    for record in records:
        record.arrived = True
        record.param.data.zero_()
    rerun = SimpleNamespace(usual=None, depends_on=lambda params: True)
    assert len(check_training.zero_factors(rerun, records, float("inf"))) == found
    assert all(not record.param.any() for record in records)


@pytest.mark.parametrize(
    ("features", "silent", "found"), [(16, 3, False), (16, 4, True), (48, 5, False), (48, 6, True), (47, 5, True)]
)
def test_a_block_without_a_gradient_has_four_rows_and_an_eighth(features, silent, found):
    """Fewer may be dead units side by side."""
    record = record_of(shape=(features, 2))
    record.owners = {nn.Linear(1, 1): "layer"}
    gradient = torch.ones(features, 2)
    gradient[3 : 3 + silent] = 0
    record.rows = (gradient != 0).any(1)
    assert check_training.silent_block(record, gradient) == ((3, 3 + silent) if found else (0, 0))


@pytest.mark.parametrize(
    ("tokens", "found"), [([[0, 1, 1]], False), ([[0, 1, 2]], True), ([[0], [1], [2]], False), ([[0, 1], [2, 2]], True)]
)
def test_tokens_have_three_values_and_two_positions(tokens, found):
    """Two values are a mask."""
    assert check_training.is_tokens(torch.tensor(tokens)) == found


@pytest.mark.parametrize(("noise", "moved"), [(0.1, 0.2009), (0.0, 0.9e-3), (0.1, 0.2011), (0.0, 1.1e-3)])
def test_an_earlier_output_moves_by_more_than_twice_the_noise_and_a_rounding(noise, moved):
    """The rounding is 1e-5 of the largest output."""
    usual = torch.zeros(1, 3, 1)
    usual[0, 0] = 100.0
    again, new = usual.clone(), usual.clone()
    again[0, 1] = noise
    new[0, 1] = moved
    new[0, 2] = 50.0  # the last position may move
    runs = iter([usual, again, new])
    rerun = SimpleNamespace(run=lambda call: next(runs))
    call = check_training.Call(args=(torch.tensor([[0, 1, 2]]),))
    assert check_training.earlier_outputs_moved(rerun, call) == (moved > 2 * noise + 1e-3)


# ---------------------------------------------------------------- slopes
@pytest.mark.parametrize(("error", "found"), [(0.2, []), (0.201, ["wrong_slope"])])
def test_a_slope_is_wrong_from_a_fifth_on(monkeypatch, error, found):
    record = record_of()
    monkeypatch.setattr(check_training, "compare_slopes", lambda facts: Compared(errors={record: error}))
    facts = facts_on([record])
    assert kinds_of(check_training.slope_findings(facts, {})) == found
    assert facts.proven == (not found)


@pytest.mark.parametrize(("error", "found"), [(0.2, False), (0.201, True), (None, False)])
def test_rows_are_lost_where_their_slope_is_wrong(error, found):
    record = record_of(shape=(16, 2))
    record.owners = {nn.Linear(1, 1): "layer"}
    record.rows = torch.tensor([False] * 8 + [True] * 8)
    gradient = record.rows[:, None].float().expand(16, 2)
    compared = Compared()
    check_training.compare_one(SimpleNamespace(error=lambda *_: error), record, gradient, compared)
    assert compared.rows == ({record: (0, 7)} if found else {})


def slopes_of(differences, rounding=0.0):
    """Return Slopes whose differences are a factor of the true one, by their length."""
    slopes = object.__new__(Slopes)
    slopes.rounding = rounding
    slopes.asked = []

    def difference(param, direction, length):
        slopes.asked.append(length)
        return differences.get(length, 1.0) * float(direction @ direction)

    slopes.difference = difference
    return slopes


PARAM = torch.ones(10, dtype=torch.float64)
ALONG = torch.randn(10, generator=torch.Generator().manual_seed(3)).to(PARAM)  # the direction that Slopes draws


@pytest.mark.parametrize(("second", "known"), [(1.0499, True), (1.0501, False)])
def test_two_differences_agree_within_a_twentieth(second, known):
    error = slopes_of({0.02: second}).error(PARAM, ALONG)
    assert (error is not None) == known


@pytest.mark.parametrize(("rounding", "hidden"), [(1.001, True), (0.999, False)])
def test_slopes_within_the_rounding_have_no_verdict(rounding, hidden):
    """Of the longest difference, here of a gradient that is twice the slope."""
    scale = 2 * float(ALONG @ ALONG)
    error = slopes_of({}, rounding * 0.02 * scale).error(PARAM, 2 * ALONG)
    assert (error is None) == hidden


@pytest.mark.parametrize(("rounding", "asked"), [(0.99, True), (1.01, False)])
def test_the_shortest_difference_is_asked_where_it_exceeds_the_rounding(rounding, asked):
    """Five times the rounding of one output, within the noise that two differences may have."""
    scale = 2 * float(ALONG @ ALONG)
    slopes = slopes_of({}, rounding * 0.05 * 0.001 * scale / 5)
    assert slopes.error(PARAM, 2 * ALONG) == pytest.approx(0.5)
    assert (0.001 in slopes.asked) == asked


# ---------------------------------------------------------------- time and the end
@pytest.mark.parametrize(("backward", "found"), [(2.24, ["fast_backward"]), (2.26, [])])
def test_a_backward_is_fast_below_a_quarter_of_the_forward(backward, found):
    steps = [Step({"forward": 9.0, "backward": backward}, backwards=1)]
    assert kinds_of(check_training.fast_backward(facts_on([]), steps)) == found


@pytest.mark.parametrize(("least", "found"), [(10.9, []), (11.1, ["impossible"])])
def test_a_clock_may_be_a_tenth_above_the_data_sheets(monkeypatch, least, found):
    monkeypatch.setattr(check_training, "work_of", lambda facts: Work(least * 1e9, 32, 0))
    facts = facts_on([])
    facts.watch.steps = [Step({"forward": 0.01})] * 5
    rows = {}
    assert kinds_of(check_training.speed_findings(facts, Peak({32: 1.0}, 1.0, 0, ""), rows)) == found


@pytest.mark.parametrize(("steps", "timed"), [(4, False), (5, True)])
def test_steps_are_timed_after_the_four_that_are_looked_at(monkeypatch, steps, timed):
    monkeypatch.setattr(check_training, "work_of", lambda facts: Work(0.0, 32, 0))
    facts = facts_on([], steps)
    facts.watch.steps = [Step({"forward": 0.01})] * steps
    rows = {}
    check_training.speed_findings(facts, None, rows)
    assert ("work" in rows) == timed == (not rows["step"].startswith("not timed"))


@pytest.mark.parametrize(
    ("backwards", "optimizers", "ended"),
    [(49, 0, False), (50, 0, True), (50, 1, False), (950, 1, False), (1000, 1, True)],
)
def test_many_backward_passes_without_a_step_end_the_script(monkeypatch, backwards, optimizers, ended):
    """An optimizer that exists may accumulate gradients."""
    monkeypatch.setattr(check_training, "existing", lambda kind: [None] * optimizers)
    watcher = SimpleNamespace(optimizers=Optimizers(before=[]), backwards=backwards)
    assert check_training.Watcher.waits_in_vain(watcher) == ended


def test_the_third_step_after_the_end_ends_the_process():
    """One or two may belong to a finally."""
    ended = []
    watcher = SimpleNamespace(done=True, late=0, end_process=lambda: ended.append(watcher.late))
    for _ in range(3):
        check_training.Watcher.end_late(watcher)
    assert ended == [3]


@pytest.mark.parametrize(("ways", "kept"), [(4, 4), (5, 4)])
def test_the_last_four_ways_to_call_a_model_are_run_again(monkeypatch, ways, kept):
    model = nn.Linear(1, 1)
    monkeypatch.setattr(check_training, "existing", lambda kind: [model])
    watch = check_training.Watch(8)
    watch.models.discover(model)
    for rows in range(1, ways + 1):
        x = torch.ones(rows, 1)
        watch.remember(model, (x,), {}, model(x))
    calls = watch.models.outermost[model].calls.values()
    assert [len(call.args[0]) for call in calls] == list(range(ways - kept + 1, ways + 1))


def test_a_higher_order_operator_of_a_script_is_counted():
    """torch.library.wrap_triton launches a kernel as one."""
    x = torch.ones(2, dtype=torch.bfloat16)
    with check_training.Widths() as widths:
        torch.ops.higher_order.cond(torch.tensor(True), lambda x: 2 * x, lambda x: x, (x,))
    assert widths.sizes == {2}
