"""Judge a difference between two step times: the one statistics function of all tools that compare times.

A ratio is taken within a round, in which all programs take turns on one machine. A pair of names for one and
the same program (A/A) says what no difference looks like: its times differ by compilation, memory layout, clocks and
other noise alone.
"""

import math
import statistics
from typing import NamedTuple

ROUNDS_NEEDED = 5
STARTS_NEEDED = 3
NO_PAIR = "nothing was timed against itself"


def rotated(names, turn):
    """Return a round's order: its turn is one place later in every round."""
    turn %= len(names)
    return names[turn:] + names[:turn]


class Gain(NamedTuple):
    """Hold a ratio of times: its median over the rounds, its range, and whether it shows a difference."""

    ratio: float
    low: float
    high: float
    rounds: int
    noise: float | None  # the A/A pair's furthest |log ratio|; None without a pair
    missing: str | None  # what keeps the rounds from being judged
    shown: bool

    def __str__(self):
        if self.missing:
            return f"not judged: {self.missing}"
        if not self.shown:
            return "no difference shown"
        return f"{self.ratio:.2f}x ({self.low:.2f} to {self.high:.2f})"

    def range_text(self):
        """Return the ratio and its range without a verdict: "1.22 (1.21 to 1.24)"."""
        if self.rounds == 1:
            return f"{self.ratio:.2f}"
        return f"{self.ratio:.2f} ({self.low:.2f} to {self.high:.2f})"


def check_times(times):
    """Raise ValueError for a time, or a ratio of times, that is not finite and positive."""
    for value in times:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
            raise ValueError(f"a time must be finite and positive, got {value}")


def ratios(base, times):
    """Return base over times, round by round; ValueError for a time that is not finite and positive."""
    check_times([*base, *times])
    if len(base) != len(times) or not base:
        raise ValueError(f"a ratio needs both times of every round, got {len(base)} and {len(times)} rounds")
    found = [b / t for b, t in zip(base, times, strict=True)]
    check_times(found)  # 1e308 over 1e-308 is infinite
    return found


def furthest(ratios_of_pair):
    """Return the largest |log ratio| of the rounds."""
    return max(abs(math.log(ratio)) for ratio in ratios_of_pair)


def noisiest(times):
    """Return the name whose times, one for each round, differ most from their median, and by how many percent.

    times: {name: times}.
    """
    found = {}
    for name, rounds in times.items():
        middle = statistics.median(rounds)
        found[name] = 100 * math.expm1(furthest(ratios([middle for _ in rounds], rounds)))
    name = max(found, key=found.get)
    return name, found[name]


def median(values):
    """Return the median; None without values or where one is not known."""
    values = list(values)
    if not values or None in values:
        return None
    return float(statistics.median(values))


def gain(base, times, pair=None, starts=None):
    """Return the Gain of times over base, two lists with a time for each round.

    pair: the two lists of an A/A pair, one program under two names. starts: how often each process was started; by
    default once for each round.
    A difference is shown if all rounds agree about its direction and the log of the median ratio is larger than the
    pair's furthest. At least five rounds and three starts are needed, for compilation, tiles and memory layout are
    drawn at a start.
    """
    found = ratios(base, times)
    noise = furthest(ratios(*pair)) if pair else None
    starts = len(found) if starts is None else starts
    missing = None
    if len(found) < ROUNDS_NEEDED:
        missing = f"{counted(len(found), 'round')} of the {ROUNDS_NEEDED} needed"
    elif starts < STARTS_NEEDED:
        missing = f"{counted(starts, 'start')} of the {STARTS_NEEDED} needed"
    elif noise is None:
        missing = NO_PAIR
    middle = statistics.median(found)
    agree = min(found) > 1 or max(found) < 1
    shown = missing is None and agree and abs(math.log(middle)) > noise
    return Gain(middle, min(found), max(found), len(found), noise, missing, shown)


def gain_text(gain):
    """Return a gain, without a verdict where there were too few rounds for one; "-" for None."""
    if gain is None:
        return "-"
    return gain.range_text() if gain.missing else str(gain)


def counted(number, word):
    return f"{number} {word}{'s' * (number != 1)}"


def noise_line(name, noise):
    """Return the sentence about an A/A pair: one program that was measured twice in every round."""
    return f"Timed against itself, {name} differs by up to {100 * math.expm1(noise):.1f} % within a round"


def noisiest_line(name, percent):
    """Return the sentence about what noisiest() found."""
    return f"The noisiest step, {name}, deviates by up to {percent:.1f} % from its own median"
