"""Fixtures of all tests. Without a GPU, Triton's kernels run in its interpreter, chosen before Triton is imported."""

import os
import signal

os.environ.setdefault("OMP_NUM_THREADS", "1")  # one process per core, and tensors too small for threads
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it, and so would its processes

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest

from in_process import restored_settings


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a GPU"))


@pytest.fixture(scope="session")
def device():
    """Return the device that kernels are tested on: the GPU if there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def backend_settings():
    with restored_settings():
        yield
