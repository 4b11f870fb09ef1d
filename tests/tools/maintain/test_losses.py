"""maintain/losses.py: pairs of runs, what they show, and results that are refused."""

import json

import pytest

from common.command_line import Failure
from maintain import losses
from maintain.losses import VARIANTS, judged, path_of, read_complete, verdict
from maintain.records import Record

RECORD = {"commit": "0123456789", "device": "Toy GPU", "driver": None, "packages": {}, "host": "a"}
ABOUT = {"what": "pages", "packages": ["a 1", "b 2"]}
ABOUT |= {part: {"bytes": 10, "files": 1, "sha256": ""} for part in ("train", "held_out")}
SETTINGS = {"preset": "medium", "steps": 40, "batch_size": 2, "seq_len": 8, "seeds": 3, "held_out_tokens": 64}
LOSSES = {  # of seeds 0 to 2
    "bfloat16": (1.0, 1.5, 2.0),
    "nudged": (1.01, 1.49, 2.01),
    "fp8": (1.03, 1.52, 2.01),
    "tf32": (0.9, 1.6, 1.9),
}


def made(variant, seed):
    """Return a run with known losses; the held-out loss is twice the training loss."""
    loss = LOSSES[variant][seed]
    numbers = {"training_loss": loss, "held_out_loss": 2 * loss, "curve": [loss + 1, loss], "seconds": 1}
    told = {"record": RECORD, "script_sha256": "0", "settings": SETTINGS, "text": ABOUT, "batches_sha256": str(seed)}
    return told | numbers | {"variant": variant, "seed": seed}


@pytest.fixture
def folder(tmp_path):
    """A recorded run's folder with the part of losses, complete."""
    part = tmp_path / "record" / "losses"
    part.mkdir(parents=True)
    for variant in VARIANTS:
        for seed in range(3):
            path_of(part, variant, seed).write_text(json.dumps(made(variant, seed)))
    (part / "record.json").write_text("{}")
    return part.parent


def test_differences_are_taken_within_a_seed(folder):
    runs = read_complete(folder / "losses")
    assert judged(runs, "fp8", "training_loss").values == pytest.approx([0.03, 0.02, 0.01])
    assert judged(runs, "tf32", "held_out_loss").values == pytest.approx([-0.2, 0.2, -0.2])
    assert str(judged(runs, "fp8", "held_out_loss")) == "+0.0400 (+0.0200 to +0.0600)"


def test_a_difference_is_shown_if_all_seeds_agree_and_chaos_is_smaller(folder):
    runs = read_complete(folder / "losses")
    assert verdict(runs, "fp8", "training_loss") == "the training loss is 0.0200 higher"
    assert verdict(runs, "tf32", "training_loss") == "the training loss shows no difference"  # the seeds disagree
    assert not judged(runs, "nudged", "training_loss").shown
    runs["nudged", 2]["training_loss"] = 2.0 - 0.021  # chaos goes further than fp8's mean
    assert not judged(runs, "fp8", "training_loss").shown
    for seed, loss in enumerate(LOSSES["bfloat16"]):
        runs["fp8", seed]["training_loss"] = loss - 0.03
    assert verdict(runs, "fp8", "training_loss") == "the training loss is 0.0300 lower"


def test_a_page_says_that_nothing_is_measured_until_the_part_is_complete(folder):
    recorded = Record(folder)
    text = losses.losses_text(recorded, lambda record, _: f"Measured on {record['device']}.")
    assert text.startswith("We trained the medium preset for 40 steps of 2 sequences of 8 tokens")
    assert "Measured on Toy GPU." in text
    assert "| fp8 | 1.5200 | 3.0400 | +0.0200 (+0.0100 to +0.0300) | +0.0400 (+0.0200 to +0.0600) |" in text
    assert "With fp8, the training loss is 0.0200 higher, and the held-out loss is 0.0400 higher." in text
    assert "With TF32, neither loss shows a difference." in text
    path = path_of(folder / "losses", "fp8", 2)
    path.write_text(json.dumps(made("fp8", 2) | {"record": {**RECORD, "host": "b"}}))
    assert " 2 machines." in losses.losses_text(recorded, lambda record, _: "") and "machines" not in text
    (folder / "losses" / "record.json").unlink()
    assert losses.losses_text(recorded, None) == losses.NOT_MEASURED


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"training_loss": float("nan")}, "fp8_seed1.json is cut off or damaged: 'NaN' isn't a number"),
        ({"held_out_loss": None}, "damaged: held_out_loss must be a finite number, got None"),
        ({"curve": [1.0, "low"]}, "damaged: the curve must be a finite number, got low"),
        ({"seed": 2}, "damaged: it belongs to fp8, seed 2"),
        ({"text": {**ABOUT, "what": "books"}}, "differs from the other runs in its text"),
        ({"settings": {**SETTINGS, "steps": 41}}, "differs from the other runs in its settings"),
        ({"record": {**RECORD, "device": "Another GPU"}}, "differs from the other runs in its device"),
        ({"record": {**RECORD, "commit": "9876543210"}}, "differs from the other runs in its commit"),
        ({"batches_sha256": "7"}, "the runs of seed 1 had different batches and cannot be compared"),
    ],
)
def test_damaged_results_are_refused_in_one_sentence(changes, said, folder):
    path_of(folder / "losses", "fp8", 1).write_text(json.dumps(made("fp8", 1) | changes))
    with pytest.raises(Failure, match=said):
        losses.losses_text(Record(folder), None)


def test_missing_results_are_named(folder):
    for variant, seed in (("fp8", 1), ("tf32", 2)):
        path_of(folder / "losses", variant, seed).unlink()
    with pytest.raises(Failure, match="losses lacks fp8 with seed 1, tf32 with seed 2: take them"):
        read_complete(folder / "losses")
    path_of(folder / "losses", "bfloat16", 0).write_text('{"record": {}}')
    with pytest.raises(Failure, match="bfloat16_seed0.json is cut off or damaged: it has no 'script_sha256'"):
        read_complete(folder / "losses")
    with pytest.raises(Failure, match="holds no results of long runs"):
        read_complete(folder)
