"""The checker's sentences at their bounds: which of them is said, and from which error on."""

import math
import sys

import pytest
import torch

from common.versions import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "exercises"))

import grading
import judge

BOUND = 1e-6


def alternating(size, *shape):
    """Return numbers of this size and of both signs, which no common factor explains."""
    return size * (1 - 2 * (torch.arange(math.prod(shape)) % 2)).double().view(shape)


def judge_of(suspects=None, names="row column"):
    inputs = {"x": torch.ones(4, 8, dtype=torch.float64)}
    task = grading.Task({}, None, None, {"y": names}, {}, suspects=suspects or {})
    return judge.Judge(task, None, inputs, lambda suspect: suspect(**inputs))


def pattern(off, bound=BOUND, error=1.0, factor=1.0):
    """Return the sentence on a result of ones, times a factor, that is off by these numbers."""
    exact = torch.ones(off.shape, dtype=torch.float64)
    return judge_of().describe_pattern("y", factor * (exact + off), exact, bound, error)


@pytest.mark.parametrize(
    ("factor", "said"),
    [
        (2 * (1 + 0.9e-3), "every element is 2 times its correct value"),
        (2 * (1 + 1.1e-3), "every element is 2.002 times its correct value"),
        (math.log(2) * (1 - 0.9e-3), "every element is ln(2) times its correct value"),
        (1.099, "every element is 9.9 % too large"),
        (0.901, "every element is 9.9 % too small"),
        (1.101, "every element is 1.101 times its correct value"),
        (0.899, "every element is 0.899 times its correct value"),
    ],
)
def test_a_factor_has_a_name_within_a_thousandth(factor, said):
    assert judge.describe_factor(factor) == said


@pytest.mark.parametrize(
    ("ranks", "factor", "said"),
    [
        (0, 1.5, ""),
        (3, 3.0, ", and there are 3 ranks: is it summed once too often?"),
        (3, 1 / 3, ", and there are 3 ranks: is it divided once too often?"),
        (3, 1.5, ", and there are 3 ranks: is it divided by 2?"),
        (3, 1.5 * (1 + 1.1e-3), ""),
        (2, 2 / 3, ", and there are 2 ranks: is it divided by 3?"),
        (3, 3 / 16, ", and there are 3 ranks: is it divided by 16?"),
        (3, 3 / 17, ""),
        (3, 1 / 2, ""),  # of a sum it would be division by 2, of a mean by 6
        (3, -1.5, ""),
    ],
)
def test_a_factor_is_explained_by_the_number_of_ranks(ranks, factor, said):
    judged = judge_of()
    judged.ranks = ranks
    assert judged.describe_ranks(factor) == said


@pytest.mark.parametrize(("bound", "error", "limit"), [(BOUND, 1.0, 10 * BOUND), (1.0, 0.4, 0.1)])
def test_a_common_factor_explains_all_but_ten_bounds_or_a_quarter_of_the_error(bound, error, limit):
    for size, found in ((0.99 * limit, True), (1.01 * limit, False)):
        said = pattern(alternating(size, 4, 8), bound, error, factor=3.0)
        assert (said == "every element is 3 times its correct value") is found


@pytest.mark.parametrize(
    ("bound", "size", "said"),
    [
        (BOUND, 2e-3, "right to about 3 digits"),
        (BOUND, 2.01e-3, "every element is wrong"),
        (1e-3, 2.99e-3, "right to about 3 digits"),
        (1e-3, 3.01e-3, "all elements are slightly off"),
        (1e-3, 9.99e-3, "all elements are slightly off"),
        (1e-3, 10.01e-3, "every element is wrong"),
    ],
)
def test_errors_of_all_elements_are_told_by_their_size(bound, size, said):
    assert said in pattern(alternating(size, 4, 8), bound, error=size)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ((slice(None), slice(7, 8)), "wrong only in column 7 of 8"),
        ((slice(1, 4), slice(None)), "wrong only in row 1 to 3 of 4"),
        ((slice(2, 4), slice(None)), "wrong only in row 2 to 3 of 4"),
        ((slice(3, 4), slice(7, 8)), "wrong only in row 3 of 4, column 7 of 8"),
        ((slice(0, 4), slice(0, 7)), "wrong only in column 0 to 6 of 8"),
    ],
)
def test_a_region_is_told_down_to_its_last_element(wrong, said):
    off = torch.zeros(4, 8, dtype=torch.float64)
    off[wrong] = alternating(0.5, *off[wrong].shape)
    assert pattern(off) == said


def test_two_wrong_corners_are_no_region():
    off = torch.zeros(4, 8, dtype=torch.float64)
    off[0, 0], off[3, 7] = 0.5, -0.5
    assert pattern(off) == "2 of 32 elements are wrong"


# ---------------------------------------------------------------- typical errors


@pytest.mark.parametrize(("error", "alike"), [(0.99e-2, True), (1.01e-2, False)])
def test_results_are_alike_within_a_percent_where_they_are_finite(error, alike):
    one = torch.tensor([1.0, torch.nan, 1.0])
    assert judge.alike_where_finite(one * (1 + error), one) is alike
    assert judge.differs(one * (1 + error), torch.ones(3)) is not alike
    assert not judge.alike_where_finite(torch.tensor([1.0, 1.0, 1.0]), one)  # not even if one element is finite more


@pytest.mark.parametrize(("times", "named"), [(9.9, True), (10.1, False)])
def test_a_typical_error_is_recognised_up_to_ten_bounds(times, named):
    exact = {"y": torch.ones(4, 8, dtype=torch.float64)}
    judged = judge_of({"doubled": lambda x: {"y": 2 * x}})
    got = {"y": 2 * (1 + alternating(times * BOUND, 4, 8))}
    assert (judged.find_suspect(got, exact, {"y": BOUND}, ["y"]) == "doubled") is named


@pytest.mark.parametrize(("value", "said"), [(0.5, "worst at its only element: 0.5 instead of 1; "), (math.nan, "NaN")])
def test_a_result_without_dimensions_has_a_place(value, said):
    """Such as a loss."""
    exact = {"y": torch.ones((), dtype=torch.float64)}
    judged = judge_of(names="")
    got = {"y": torch.tensor(value, dtype=torch.float64)}
    with pytest.raises(judge.Wrong, match=said) as wrong:
        judged.check_finite("y", got, exact)
        judged.check_values(got, exact, exact)
    assert "its only element" in str(wrong.value)
    assert judged.place_in_memory("y", 0, got["y"].shape) == "its only element"


@pytest.mark.parametrize("element", [(0, 0), (3, 7)])
def test_one_wrong_element_is_wrong(element):
    """In the first place and in the last."""
    exact = {"y": torch.ones(4, 8, dtype=torch.float64)}
    got = {"y": exact["y"].clone()}
    row, column = element
    place = f"row {row}, column {column}"
    got["y"][element] = 1.01
    with pytest.raises(judge.Wrong, match=f"worst at {place}: .* wrong only in row {row} of 4, column {column} of 8"):
        judge_of().check_values(got, exact, exact)
    got["y"][element] = 1 + 1.01 * BOUND * math.sqrt(32)  # of 32 elements
    with pytest.raises(judge.Wrong, match=f"worst at {place}"):
        judge_of().check_values(got, exact, exact)
    got["y"][element] = 1 + 0.99 * BOUND * math.sqrt(32)
    judge_of().check_values(got, exact, exact)
