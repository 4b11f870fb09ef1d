"""Numbers that decide what the maintainer's tools say: just at each limit, and just beyond it."""

import contextlib
from types import SimpleNamespace

import pytest
import torch

from maintain import execute_training, huggingface, rounds


@pytest.mark.parametrize(("room", "fits"), [(22_048, True), (22_047, False)])
def test_each_process_needs_a_gib_beside_its_tensors(room, fits):
    """Two of 10,000 MiB, of which one runs under its second name; or a third, not yet seen, may be as large."""
    told = {name: {"reserved_mib": 10_000, "gpu_mib": room} for name in ("a", "b")}
    work = SimpleNamespace(told=told)
    for names in (["a", "b"], ["a", "a" + rounds.AGAIN], ["a", "c"]):
        assert rounds.Rounds.fits(work, names) is fits
    assert rounds.Rounds.fits(work, ["a"]) and rounds.Rounds.fits(SimpleNamespace(told={}), ["a", "b"])


@pytest.mark.parametrize(
    ("label", "loss", "weights", "right"),
    [
        ("fp32", 0.999e-5, 2e-4 + 0.99e-6, True),  # twice version 1's own error, and a rounding
        ("fp32", 1.001e-5, 0.0, False),
        ("fp32", 0.0, 2e-4 + 1.01e-6, False),
        ("bf16", 0.999 * 2**-7, 2e-4, True),
        ("bf16", 1.001 * 2**-7, 2e-4, False),
        ("fp16", 0.999 * 2**-10, 2e-4, True),
        ("fp16", 1.001 * 2**-10, 2e-4, False),
    ],
)
def test_training_as_amds_instructions_is_right_up_to_its_bounds(label, loss, weights, right, monkeypatch, capsys):
    """The last of two losses, and all weights together."""
    exact = {"w": torch.ones(8, dtype=torch.float64)}

    def train(version, argv, steps, double=False):
        if double:
            return [2.0, 1.0], exact
        if version == 1:
            return [2.0, 1.0], {"w": exact["w"] * (1 + 1e-4)}
        return [2.0, 1.0 + loss], {"w": exact["w"] * (1 + weights)}

    monkeypatch.setattr(execute_training, "train", train)
    monkeypatch.setattr(execute_training, "executed_version", lambda *_: contextlib.nullcontext([]))
    monkeypatch.setattr(execute_training, "load_version", lambda version: None)
    assert execute_training.main(["gfx942", "--dtype", label, "--steps", "2"]) == 1 - right
    told = capsys.readouterr().err.splitlines()
    assert told[0] == f"gfx942 {label}: training 2 steps of versions 1 and 3 ..."
    assert told[1].endswith("right" if right else "WRONG")


def test_each_case_of_the_golden_values_is_told(monkeypatch, capsys):
    pytest.importorskip("transformers")
    monkeypatch.setattr(huggingface, "mixed_precision_errors", lambda case, dtype: {})
    monkeypatch.setattr(huggingface, "outcome", lambda case: {"losses": [], "logits": torch.ones(1), "gradients": {}})
    cases = huggingface.golden()["cases"]
    told = capsys.readouterr().err.splitlines()
    assert told[-1] == f"{[*cases][-1]}, float32" and len(told) == len(cases) + len(huggingface.AMP_CASES)
