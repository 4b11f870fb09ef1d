"""common/measuring/accuracy.py: what counts as the same numbers, per parameter, by known answers and by faults."""

import pytest
import torch

from common.measuring import accuracy
from common.versions import load_version
from in_process import restored_settings

TINY = "--hidden-dim 32 --num-layers 1 --num-heads 2 --seq-len 16 --batch-size 2 --vocab-size 256".split()
NORM = "layers.0.attention_norm.weight"
# Largest bound of a gradient on a CPU. Measured: 1.7e-6, 0.016 and 0.0023 in float32, bfloat16 and float16.
LARGEST = {"float32": 5e-6, "bfloat16": 0.04, "float16": 0.006}
SUMS_ON_A_GPU = 1e-5  # what every bound on a GPU contains in addition
PRECISIONS = {"float32": [], "bfloat16": ["--use-amp"], "float16": ["--use-amp", "--amp-dtype", "float16"]}


def test_errors_of_two_outcomes_by_hand():
    w, v = torch.tensor([3.0, 4.0]), torch.tensor([1.0])
    same = {"logits": torch.ones(2)}
    one = same | {"loss": 2.0, "gradients": {"w": w, "v": v}, "losses": [4.0, 5.0]}
    other = same | {"loss": 2.02, "gradients": {"w": torch.tensor([3.0, 4.5])}, "losses": [4.0, 5.5]}
    entries = accuracy.compare(one, other, lambda kind, name: 0.05)
    expected = {"logits": 0, "loss": 0.01, "w": 0.1, "v": float("inf"), "step 1": 0, "step 2": 0.1}
    assert {entry["name"]: entry["error"] for entry in entries} == pytest.approx(expected)
    result = accuracy.verdict(entries)
    assert (result["passed"], result["beyond"], result["worst"]["name"]) == (False, 3, "v")
    assert accuracy.verdict([e for e in entries if e["error"] <= 0.05])["passed"]
    nan = accuracy.compare(one, one | {"loss": float("nan")}, lambda kind, name: 1e9)
    found = accuracy.verdict(nan)
    assert not found["passed"] and (found["worst"]["kind"], found["worst"]["error"]) == ("loss", float("inf"))


def test_the_worst_is_the_furthest_beyond_its_own_bound():
    """An error of 0.2 where 0.4 is allowed is none; one of 0.03 where 0.01 is allowed is."""
    wanted = {"logits": torch.ones(2), "loss": 1.0, "gradients": {"w": torch.ones(1), "v": torch.ones(1)}}
    found = wanted | {"gradients": {"w": torch.tensor([1.2]), "v": torch.tensor([1.03])}}
    bounds = {"w": 0.4, "v": 0.01}
    result = accuracy.verdict(accuracy.compare(wanted, found, lambda kind, name: bounds.get(name, 0.0)))
    assert result["worst"]["name"] == "v" and result["beyond"] == 1
    assert result["largest_error"] == pytest.approx(0.2, rel=1e-5)


@pytest.mark.parametrize(
    ("options", "bound"),
    [
        ({"use_amp": False, "tf32": False}, 1e-4),
        ({"use_amp": False, "tf32": True}, 2**-10),
        ({"use_amp": True, "tf32": False, "amp_dtype": "bfloat16"}, 2**-7),
        ({"use_amp": True, "tf32": True, "amp_dtype": "float16"}, 2**-10),
    ],
)
def test_bounds_of_a_loss(options, bound):
    assert accuracy.loss_bound(options) == bound
    if options["use_amp"]:
        assert bound == torch.finfo(getattr(torch, options["amp_dtype"])).eps


def test_bounds_of_a_tensor():
    """Twice the error of plain PyTorch and one rounding: of float32 sums, and in mixed precision of a 16-bit number."""
    assert accuracy.allowed(0.01, 1e-6) == pytest.approx(0.020001)
    for device, sums in (("cpu", 1e-6), ("cuda:1", 1e-5)):
        assert accuracy.rounding({"use_amp": False, "device": device}) == sums
        for dtype in ("bfloat16", "float16"):
            half_a_unit = torch.finfo(getattr(torch, dtype)).eps / 2
            options = {"use_amp": True, "amp_dtype": dtype, "device": device}
            assert accuracy.rounding(options) == pytest.approx(half_a_unit + sums)


@pytest.fixture(scope="module", params=PRECISIONS)
def measured(request):
    """(precision, what version 1 must compute, what it computes) in a precision."""
    with restored_settings():
        argv = [*TINY, *PRECISIONS[request.param]]
        reference = accuracy.Reference(argv)
        return request.param, reference, accuracy.outcome(load_version(1), argv, steps=0)


def blamed(reference, found):
    """Return the name of the worst entry if the outcome is refused, else None."""
    result = accuracy.verdict(reference.compare(found))
    return None if result["passed"] else result["worst"]["name"]


def test_a_reference_accepts_version_1_and_no_wrong_number(measured):
    _, reference, found = measured
    gradients = found["gradients"]
    norm = gradients[NORM]
    assert blamed(reference, found) is None
    for spoiled in (1.1 * norm, 0 * norm, torch.where(torch.arange(len(norm)) == 0, float("nan"), norm)):
        assert blamed(reference, found | {"gradients": gradients | {NORM: spoiled}}) == NORM
    for wrong in (1.01 * found["loss"], float("nan")):
        assert blamed(reference, found | {"loss": wrong}) == "loss"
    assert blamed(reference, found | {"logits": 1.1 * found["logits"]}) == "logits"
    without = {name: gradient for name, gradient in gradients.items() if name != NORM}
    assert blamed(reference, found | {"gradients": without}) == NORM


def test_bounds_follow_from_version_1s_own_errors(measured):
    """Per parameter, at most three times that error and a rounding; a fault as small as three bounds is seen."""
    precision, reference, found = measured
    exact = reference.exact["gradients"]
    bounds = {name: reference.bound_of("gradient", name) for name in exact}
    largest = LARGEST[precision] + (SUMS_ON_A_GPU if torch.cuda.is_available() else 0)
    assert len(set(bounds.values())) > 1 and max(bounds.values()) < largest
    for name, bound in bounds.items():
        off = exact[name] * (1 + 3 * bound)
        assert blamed(reference, found | {"gradients": found["gradients"] | {name: off}}) == name
        near = exact[name] * (1 + bound / 3)
        assert blamed(reference, found | {"gradients": found["gradients"] | {name: near}}) is None


def test_a_loss_that_keeps_no_logits_is_compared_with_logits():
    with restored_settings():
        script = load_version(3)
        others = [f"--disable-{kernel}-kernel" for kernel in script.KERNELS if kernel != "loss"]
        argv = [*TINY, "--vocab-size", "16", "--enable-fused-loss", *others]
        reference = accuracy.Reference(argv)
        assert blamed(reference, accuracy.outcome(script, argv, steps=0)) is None


def test_options_that_version_1_does_not_know_are_left_out_of_its_own():
    """They choose how another version computes, not what."""
    script = load_version(1)
    words = ["--seq-len", "8", "--disable-qkv-fusion", "--compile-mode", "default", "--use-amp"]
    assert accuracy.known_options(script, words) == ["--seq-len", "8", "--use-amp"]
