"""Fixtures of all tests. Without a GPU, Triton's kernels run in its interpreter, chosen before Triton is imported.

--reverse and --shuffle SEED run the tests in another order: no test may leave a setting of the process behind.
"""

import os
import random
import signal
import sys

os.environ.setdefault("OMP_NUM_THREADS", "1")  # one process per core, and tensors too small for threads
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it, and so would its processes

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest

from in_process import process_settings, restored_settings
from marks import mark_slow_cases

SETTINGS = pytest.StashKey()


def pytest_addoption(parser):
    parser.addoption("--reverse", action="store_true", help="run the last test first")
    parser.addoption("--shuffle", type=int, metavar="SEED", help="run the tests in a random order")


@pytest.hookimpl(tryfirst=True)  # before pytest chooses by marks
def pytest_collection_modifyitems(config, items):
    mark_slow_cases(items)
    if config.getoption("shuffle") is not None:
        random.Random(config.getoption("shuffle")).shuffle(items)
    if config.getoption("reverse"):
        items.reverse()
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a GPU"))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item):
    item.stash[SETTINGS] = process_settings()
    return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item):
    """Fail a test that leaves a setting behind, its fixtures of a module or the session included."""
    result = yield
    before, after = item.stash[SETTINGS], process_settings()
    left = [f"{name}: {before.get(name)} -> {value}" for name, value in after.items() if before.get(name) != value]
    left += [f"{name}: gone" for name in before.keys() - after.keys()]
    if left:
        raise AssertionError(f"the test left settings of the process behind: {', '.join(left)}")
    return result


@pytest.fixture(scope="session")
def device():
    """Return the device that kernels are tested on: the GPU if there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def backend_settings():
    with restored_settings():
        yield


@pytest.fixture(autouse=True)
def empty_compiler():
    """Forget what a test compiled, since a function compiled for eight models is not compiled for a ninth.

    If the test hid the GPU, the compiler keeps in mind that there is none: forget that too.
    """
    yield
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
        torch.utils._triton.has_triton.cache_clear()
