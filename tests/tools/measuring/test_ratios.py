"""The statistics function, against numbers that are known by hand."""

import math

import pytest

from common.ratios import NO_PAIR, gain, median, noise_line, ratios

BASE = [30.0, 33.0, 30.0, 36.0, 31.5]
TIMES = [20.0, 30.0, 24.0, 20.0, 21.0]  # ratios 1.5, 1.1, 1.25, 1.8, 1.5
QUIET = ([10.0] * 5, [10.0, 10.2, 10.1, 9.9, 10.0])


def noisy(ratio):
    """Return an A/A pair whose furthest round differs by this ratio."""
    return [10.0] * 4 + [10.0 * ratio], [10.0] * 5


def test_the_median_and_the_range_of_the_ratios_within_rounds():
    found = gain(BASE, TIMES, QUIET)
    assert (found.ratio, found.low, found.high) == pytest.approx((1.5, 1.1, 1.8))
    assert found.rounds == 5 and found.shown and str(found) == "1.50x (1.10 to 1.80)"
    assert found.noise == pytest.approx(math.log(1.02))
    # not the ratio of the medians, which is 31.5 / 21 here too, but 36 / 24 after an exchange of two rounds
    assert gain([30.0, 33.0, 36.0, 30.0, 31.5], TIMES, QUIET).ratio == pytest.approx(1.5)
    assert gain([1.0, 2.0, 40.0, 50.0, 60.0], [2.0, 5.0, 10.0, 60.0, 80.0], QUIET).ratio == pytest.approx(0.75)


@pytest.mark.parametrize(
    ("base", "times", "pair", "shown"),
    [
        ([10.0] * 5, [9.5] * 5, noisy(1.04), True),
        ([10.0] * 5, [9.5] * 5, noisy(1.06), False),  # as large as the noise
        ([10.0] * 5, [9.5] * 5, noisy(1 / 1.06), False),  # in whichever direction the noise goes
        ([9.5] * 5, [10.0] * 5, noisy(1.04), True),  # a loss is a difference
        ([10.0] * 5, [9.0, 9.0, 9.0, 9.0, 10.1], noisy(1.01), False),  # one round disagrees
        ([10.0] * 5, [9.0, 9.0, 9.0, 9.0, 10.0], noisy(1.01), False),  # and one without any difference
        ([10.0] * 5, [11.0, 11.0, 11.0, 11.0, 10.0], noisy(1.01), False),  # a loss with such a round is none either
        ([10.0] * 5, [10.0] * 5, ([10.0] * 5, [10.0] * 5), False),
    ],
)
def test_when_a_difference_is_shown(base, times, pair, shown):
    found = gain(base, times, pair)
    assert found.shown == shown and ("no difference shown" in str(found)) != shown


@pytest.mark.parametrize(("ms", "shown"), [(8.0, False), (7.99, True), (12.5, False), (12.51, True)])
def test_a_difference_exceeds_the_noise_to_be_shown(ms, shown):
    """The pair's furthest round is 1.25 times as fast."""
    assert gain([10.0] * 5, [ms] * 5, ([10.0] * 5, [10.0] * 4 + [8.0])).shown is shown


def test_what_is_not_judged_says_why():
    few = gain(BASE[:4], TIMES[:4], QUIET)
    assert not few.shown and str(few) == "not judged: 4 rounds of the 5 needed"
    assert str(gain([2.0], [1.0])) == "not judged: 1 round of the 5 needed"
    assert str(gain(BASE, TIMES, QUIET, starts=2)) == "not judged: 2 starts of the 3 needed"
    assert gain(BASE, TIMES, QUIET, starts=3).shown
    assert few.range_text() == "1.38 (1.10 to 1.80)" and gain([3.0], [2.0]).range_text() == "1.50"
    assert str(gain(BASE, TIMES)) == f"not judged: {NO_PAIR}" and not gain(BASE, TIMES).shown


@pytest.mark.parametrize("wrong", [0.0, -3.0, math.nan, math.inf, None, True, "7"])
def test_a_time_that_is_none_is_refused_everywhere(wrong):
    bad = [10.0, 10.0, wrong, 10.0, 10.0]
    good = [10.0] * 5
    for arguments in ((bad, good), (good, bad), (good, good, (bad, good)), (good, good, (good, bad))):
        with pytest.raises(ValueError, match=f"must be finite and positive, got {wrong}"):
            gain(*arguments)
    with pytest.raises(ValueError, match="got 5 and 4 rounds"):
        ratios(good, good[:4])
    with pytest.raises(ValueError, match="got 0 and 0 rounds"):
        ratios([], [])


def test_a_median_is_that_of_all_values_or_not_known():
    """A phase that one run could not measure has no median of the others."""
    assert median([3.0, 1.0, 2.0]) == 2 and median([3, 1]) == 2.0
    assert median([]) is None is median([3.0, None, 1.0])


def test_the_line_about_a_pair():
    assert "g differs by up to 2.5 % " in noise_line("g", math.log(1.025))
