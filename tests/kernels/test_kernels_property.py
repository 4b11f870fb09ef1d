"""Version 3's kernels against what hypothesis draws: shapes, layouts, dtypes, magnitudes, groupings, lengths.

A fixed, bounded set of cases; KERNEL_CASES=2000 in the environment makes it that many new ones for each operation, and
a failure prints the decorator that repeats it.
"""

import dataclasses
import os

import pytest
import torch
from hypothesis import HealthCheck, Phase, event, given, settings
from hypothesis import strategies as st

from common.versions import load_version
from kernel_cases import (
    DTYPES,
    LAYOUTS,
    attention_case,
    check,
    loss_case,
    norm_case,
    rope_case,
    swiglu_case,
)

V3 = load_version(3)
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy in the interpreter: drawn values overflow
ASKED_FOR = int(os.environ.get("KERNEL_CASES", 0))


def cases(bounded):
    """Return settings of so many drawn cases, always the same ones; or of as many new ones as were asked for."""
    return settings(
        max_examples=ASKED_FOR or bounded,
        derandomize=not ASKED_FOR,
        deadline=None,
        database=None,
        print_blob=True,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )


dtypes = st.sampled_from(DTYPES)
sizes = st.integers(1, 40)


def scales(dtype, largest=4):
    """Draw magnitudes from those that only denormal numbers have to 10 to the power of `largest`."""
    smallest = -7 if dtype == torch.float16 else -40
    return st.one_of(st.just(1.0), st.integers(smallest, largest).map(lambda power: 10.0**power))


def drawn(data, make, *args, **options):
    """Return a case whose tensors lie in memory as drawn."""
    case = make(*args, **options)
    names = [*case.inputs, *case.constants, "cotangents"]
    layouts = data.draw(st.dictionaries(st.sampled_from(names), st.sampled_from(LAYOUTS), max_size=2), label="layouts")
    return dataclasses.replace(case, layouts=layouts, gpu_tiles=data.draw(st.booleans(), label="gpu tiles"))


def hold(case, dtype, device):
    """Check that the kernels do what the case defines, or refuse it for its layout."""
    try:
        check(V3, case, dtype, device, conditioned=True)
    except ValueError:
        assert set(case.layouts.values()) - {"contiguous"}, "a plain layout was refused"
        event("refused for its layout")


@cases(30)
@given(st.data(), dtypes)
def test_add_rms_norm(device, data, dtype):
    # Of the gradient of a row of a few columns little is left but rounding: the norm takes the part along the row away.
    columns = st.integers(8, 300)
    shape = data.draw(st.tuples(sizes, columns) | st.tuples(st.integers(1, 4), sizes, columns), label="shape")
    scale, eps = data.draw(scales(dtype), label="scale"), data.draw(st.sampled_from([1e-6, 1e-5, 0.1]), label="eps")
    wide = data.draw(st.sampled_from([(), ("w",)]), label="float32 weight")
    unused = data.draw(st.sampled_from([(), ("x",), ("y",)]), label="unused")
    branch = data.draw(st.booleans(), label="branch")
    hold(drawn(data, norm_case, *shape, scale=scale, eps=eps, wide=wide, unused=unused, branch=branch), dtype, device)


@cases(30)
@given(st.data(), dtypes)
def test_rope(device, data, dtype):
    B, T, K, ratio = (data.draw(st.integers(1, most)) for most in (3, 40, 3, 4))
    D, scale = 2 * data.draw(st.integers(1, 64), label="D / 2"), data.draw(scales(dtype), label="scale")
    hold(drawn(data, rope_case, B, T, ratio * K, K, D, scale=scale), dtype, device)


@cases(30)
@given(st.data(), dtypes)
def test_packed_swiglu(device, data, dtype):
    shape = data.draw(st.tuples(sizes) | st.tuples(st.integers(1, 4), sizes), label="shape")
    width = data.draw(st.integers(1, 300), label="width")
    scale = data.draw(scales(dtype), label="scale")
    hold(drawn(data, swiglu_case, *shape, width=width, scale=scale), dtype, device)


@cases(20)
@given(st.data(), dtypes)
def test_flash_attention(device, data, dtype):
    B, K = data.draw(st.integers(1, 2), label="B"), data.draw(st.integers(1, 2), label="K")
    T = data.draw(st.one_of(st.integers(1, 80), st.sampled_from([1, 31, 32, 33, 63, 64, 65])), label="T")
    ratio, D = data.draw(st.sampled_from([1, 2, 4, 8]), label="ratio"), data.draw(st.sampled_from([16, 32, 64, 128]))
    scale = data.draw(scales(dtype), label="scale of queries and keys")
    value_scale = data.draw(scales(dtype), label="scale of values") if T > 1 else 1.0
    # Where one key takes all of a query, dq and dk are sums that cancel, of which only rounding is left.
    rough = ("dqkv", "dq", "dk", "dv") if scale > 1 else ()
    rotated, magnitudes = data.draw(st.booleans(), label="rotated"), {"scale": scale, "value_scale": value_scale}
    hold(drawn(data, attention_case, B, T, ratio * K, K, D, rotated, rough=rough, **magnitudes), dtype, device)


@cases(30)
@given(st.data(), dtypes)
def test_cross_entropy(device, data, dtype):
    shape = data.draw(st.tuples(sizes) | st.tuples(st.integers(1, 4), sizes), label="shape")
    V, scale = data.draw(st.integers(1, 5000), label="V"), data.draw(scales(dtype), label="scale")
    offset = data.draw(st.sampled_from([0.0, 0.0, -100.0, 1000.0]), label="offset")
    hold(drawn(data, loss_case, *shape, V=V, scale=scale, offset=offset), dtype, device)
