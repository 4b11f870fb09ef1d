"""Version 3's kernels against what hypothesis draws: shapes, layouts, dtypes, magnitudes, groupings, lengths.

A fixed, bounded set of cases; KERNEL_CASES=2000 in the environment makes it that many new ones for each operation, and
a failure prints the decorator that repeats it.
"""

import dataclasses
import os

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from common.versions import load_version
from kernel_cases import DTYPES, LAYOUTS, attention_case, check, loss_case, norm_case, rope_case, swiglu_case

V3 = load_version(3)
ASKED_FOR = int(os.environ.get("KERNEL_CASES", 0))
SETTINGS = settings(
    max_examples=ASKED_FOR or 15,
    derandomize=not ASKED_FOR,
    deadline=None,
    database=None,
    print_blob=True,
    phases=[Phase.generate, Phase.shrink],
    suppress_health_check=list(HealthCheck),
)


def up_to(most):
    return st.integers(1, most)


def rows_of(width):
    return st.tuples(up_to(40), width) | st.tuples(up_to(4), up_to(40), width)


def scales(dtype):
    """Draw magnitudes from those that only denormal numbers have to 10,000."""
    smallest = -7 if dtype == torch.float16 else -40
    return st.one_of(st.just(1.0), st.integers(smallest, 4).map(lambda power: 10.0**power))


def draw_norm(draw, scale):
    # Of the gradient of a row of a few columns little is left but rounding: the norm takes the part along the row away.
    options = {"eps": draw(st.sampled_from([1e-6, 1e-5, 0.1])), "branch": draw(st.booleans(), label="branch")}
    options |= {"wide": draw(st.sampled_from([(), ("w",)])), "unused": draw(st.sampled_from([(), ("x",), ("y",)]))}
    return norm_case(*draw(rows_of(st.integers(8, 300)), label="shape"), scale=draw(scale), **options)


def draw_rope(draw, scale):
    B, T, K, ratio, half = (
        draw(up_to(most), label=name) for name, most in zip("BTKrD", (3, 40, 3, 4, 64), strict=True)
    )
    return rope_case(B, T, ratio * K, K, 2 * half, scale=draw(scale))


def draw_swiglu(draw, scale):
    *shape, width = draw(rows_of(up_to(300)), label="shape")
    return swiglu_case(*shape, width=width, scale=draw(scale))


def draw_attention(draw, scale):
    B, K, T = draw(up_to(2)), draw(up_to(2)), draw(up_to(40) | st.sampled_from([1, 31, 32, 33, 65]), label="T")
    ratio, D = draw(st.sampled_from([1, 2, 4, 8]), label="ratio"), draw(st.sampled_from([16, 32, 64, 128]), label="D")
    of_q_and_k, of_v = draw(scale), draw(scale) if T > 1 else 1.0
    # Where one key takes all of a query, dq and dk are sums that cancel, of which only rounding is left.
    rough = ("dqkv", "dq", "dk", "dv") if of_q_and_k > 1 else ()
    rotated = draw(st.booleans(), label="rotated")
    return attention_case(B, T, ratio * K, K, D, rotated, scale=of_q_and_k, value_scale=of_v, rough=rough)


def draw_loss(draw, scale):
    *shape, V = draw(rows_of(up_to(5000)), label="shape")
    return loss_case(*shape, V=V, scale=draw(scale), offset=draw(st.sampled_from([0.0, 0.0, -100.0, 1000.0])))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy in the interpreter: drawn values overflow
@pytest.mark.parametrize("draw_case", [draw_norm, draw_rope, draw_swiglu, draw_attention, draw_loss])
@SETTINGS
@given(data=st.data(), dtype=st.sampled_from(DTYPES))
def test_drawn_cases(draw_case, device, data, dtype):
    """Kernels do what the case defines, or refuse it for its layout."""
    case = draw_case(data.draw, scales(dtype))
    names = [*case.inputs, *case.constants, "cotangents"]
    layouts = data.draw(st.dictionaries(st.sampled_from(names), st.sampled_from(LAYOUTS), max_size=2), label="layouts")
    case = dataclasses.replace(case, layouts=layouts, gpu_tiles=data.draw(st.booleans(), label="gpu tiles"))
    try:
        check(V3, case, dtype, device, conditioned=True)
    except ValueError:
        assert set(layouts.values()) - {"contiguous"}, "a plain layout was refused"
