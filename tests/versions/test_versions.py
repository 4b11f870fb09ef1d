"""scripts/common/versions.py: loading a version, its gradients in full precision."""

import math

import pytest
import torch

from common.versions import SCRIPTS, load_version, loss_and_gradients, relative_error

SIZES = "--hidden-dim 32 --num-layers 1 --num-heads 2 --seq-len 8 --batch-size 2 --vocab-size 50".split()


def test_a_version_is_loaded_once_from_its_own_file():
    modules = [load_version(version) for version in SCRIPTS]
    assert [module.VERSION for module in modules] == [1, 2, 3, 4]
    assert modules == [load_version(version) for version in SCRIPTS]
    assert [module.__file__ for module in modules] == [str(path) for path in SCRIPTS.values()]


def test_relative_error():
    ones = torch.ones(4)
    assert relative_error(ones, ones) == 0
    assert relative_error(ones + torch.tensor([0.2, 0, 0, 0]), ones) == pytest.approx(0.1, rel=1e-6)
    assert relative_error(0 * ones, 0 * ones) == 0
    assert relative_error(ones, 0 * ones) == math.inf
    assert relative_error(ones * math.nan, ones) == math.inf
    assert relative_error(ones * math.inf, ones) == math.inf


def test_full_precision_overrides_the_options():
    half = [*SIZES, "--use-amp"]
    wanted, gradients = loss_and_gradients(1, SIZES)
    loss, same = loss_and_gradients(1, half, full_precision=True)
    assert loss == wanted and all(torch.equal(same[name], gradients[name]) for name in gradients)
    assert loss_and_gradients(1, half)[0] != wanted


@pytest.mark.parametrize("version", [1, 3])  # version 3 has an optimizer of its own
def test_float16_gradients_are_unscaled(version, monkeypatch):
    """And a scale that overflows is halved until it does not."""
    monkeypatch.setattr(torch.amp.GradScaler, "get_scale", lambda scaler: 2.0**40)
    _, wanted = loss_and_gradients(1, SIZES)
    _, gradients = loss_and_gradients(version, [*SIZES, "--use-amp", "--amp-dtype", "float16"])
    assert max(relative_error(gradients[name], wanted[name]) for name in wanted) < 1e-2
