"""The quick part of the tests, which ./scripts/test.sh runs without --all: what is not marked slow."""

import pytest


def slow(*values):
    """Return a case of parametrize that is left to --all: another case shows nearly the same."""
    return pytest.param(*values, marks=pytest.mark.slow)


def mark_slow_cases(items):
    """Mark the cases of a test as slow but for so many as its mark quick says, which are spread over all of them.

    With quick(number, each="argument") there are so many for each value of that argument. Each value begins one case
    later than the one before it, so that the other arguments take turns.
    """
    groups = {}
    for item in items:
        if mark := item.get_closest_marker("quick"):
            value = item.callspec.params[mark.kwargs["each"]] if mark.kwargs else None
            groups.setdefault(item.nodeid.split("[")[0], {}).setdefault(str(value), []).append(item)
    for by_value in groups.values():
        for first, cases in enumerate(by_value.values()):
            (number,) = cases[0].get_closest_marker("quick").args
            quick = {(first + i * len(cases) // number) % len(cases) for i in range(number)}
            for i, case in enumerate(cases):
                if i not in quick:
                    case.add_marker("slow")
