"""Marks of cases."""

import pytest


def slow(*values):
    """Return a case of parametrize that the quick part of the tests leaves out: another case shows nearly the same."""
    return pytest.param(*values, marks=pytest.mark.slow)
