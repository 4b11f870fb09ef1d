"""Pins of version 1 by what is not version 1: Hugging Face's Llama, its golden values, and numbers by hand."""

import collections
import contextlib
import json
import math

import huggingface
import pytest
import torch
from huggingface import CASES, GOLDEN, STEPS, fingerprint, options

from common.accuracy import outcome, script_logits
from common.records import RECORDED, read_results
from common.versions import SCRIPTS, load_version, relative_error

golden = json.loads(GOLDEN.read_text())["cases"]
# Relative differences measured on a CPU, all cases and versions: fingerprints 1.3e-7, losses of five steps 5.2e-6.
SAME = {"fingerprints": 2e-6, "losses": 5e-5}
if torch.cuda.is_available():
    SAME = {"fingerprints": 1e-4, "losses": 5e-4}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("version", SCRIPTS)
def test_golden_values_of_hugging_face(version, case):
    assert golden[case]["options"].split() == options(case)
    found = outcome(load_version(version), options(case), STEPS)
    tensors = {"logits": found["logits"], **found["gradients"]}
    assert found["losses"] == pytest.approx(golden[case]["losses"], rel=SAME["losses"])
    assert tensors.keys() == golden[case]["fingerprints"].keys()
    for name, tensor in tensors.items():
        norm, projection = golden[case]["fingerprints"][name]
        tolerance = SAME["fingerprints"] * norm + 1e-7  # of one token, q and k have no gradient but rounding
        assert fingerprint(tensor) == pytest.approx([norm, projection], rel=0, abs=tolerance), name


# ---------------------------------------------------------------- the library itself

# Largest relative errors measured in float32 and float64: logits 2.0e-7 and 4.8e-16, gradients 3.9e-7 and 9.7e-16,
# losses 2.4e-6 and 4.9e-15, weights after five steps 5.9e-5 and 9.3e-14: AdamW divides rounding by rounding.
LIBRARY_ERRORS = {
    torch.float32: {"logits": 1e-6, "gradients": 2e-6, "losses": 2e-5, "weights": 3e-4},
    torch.float64: {"logits": 2e-15, "gradients": 5e-15, "losses": 3e-14, "weights": 5e-13},
}
# Of one token, the gradients of q and k are zero; SDPA leaves rounding there.
LIBRARY_CASES = [(case, "eager") for case in CASES] + [(case, "sdpa") for case in CASES if case != "one token"]


def version_1(case, dtype):
    """Return what huggingface.outcome returns, computed by version 1 on a CPU."""
    script = load_version(1)
    config = script.parse_options([*options(case), "--device", "cpu"])
    script.set_up_backend(config)
    trainer, data = script.Trainer(config), script.load_data(config)
    model, found = trainer.model.to(dtype), {}
    with torch.no_grad():
        found["logits"] = script_logits(script, trainer, *script.batch(data, 0, config))
    losses = [trainer.run(*script.batch(data, 0, config))["loss"]]
    found["gradients"] = {name: p.grad.clone() for name, p in model.named_parameters()}
    losses += [trainer.run(*script.batch(data, step, config))["loss"] for step in range(1, STEPS)]
    return found | {"losses": losses, "weights": {name: p.detach() for name, p in model.named_parameters()}}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", LIBRARY_ERRORS, ids=str)
@pytest.mark.parametrize(("case", "attention"), LIBRARY_CASES)
def test_hugging_face_computes_the_same(case, attention, dtype):
    pytest.importorskip("transformers", reason="transformers is missing: pip install '.[pin]'")
    with huggingface.float64_throughout() if dtype == torch.float64 else contextlib.nullcontext():
        wanted, found = huggingface.outcome(case, attention, dtype), version_1(case, dtype)
    assert found["logits"].dtype == wanted["logits"].dtype == dtype
    allowed = LIBRARY_ERRORS[dtype]
    assert relative_error(found["logits"], wanted["logits"]) <= allowed["logits"]
    assert found["losses"] == pytest.approx(wanted["losses"], rel=allowed["losses"])
    for kind in ("gradients", "weights"):
        assert found[kind].keys() == wanted[kind].keys()
        for name, tensor in wanted[kind].items():
            assert relative_error(found[kind][name], tensor) <= allowed[kind], f"{kind} of {name}"


@pytest.mark.slow
def test_golden_values_are_what_the_library_computes():
    pytest.importorskip("transformers", reason="transformers is missing: pip install '.[pin]'")
    for case, again in huggingface.golden()["cases"].items():
        assert again["losses"] == pytest.approx(golden[case]["losses"], rel=SAME["losses"])
        for name, numbers in golden[case]["fingerprints"].items():
            assert again["fingerprints"][name] == pytest.approx(
                numbers, rel=0, abs=SAME["fingerprints"] * numbers[0]
            ), name


# ---------------------------------------------------------------- by hand

MINI = "--num-heads 2 --hidden-dim 32 --num-layers 1 --seq-len 12 --vocab-size 40 --device cpu --no-graph".split()


def model_of(version):
    script = load_version(version)
    return script, script.TinyLlama(script.parse_options(MINI)).to("cpu")


@pytest.mark.parametrize("version", SCRIPTS)
def test_rope_angles_by_hand(version):
    """With heads of 16, pair i of position t is rotated by t · 10000^(-2i / 16) = t · 10^(-i / 2)."""
    script, model = model_of(version)
    assert model.cos.shape == model.sin.shape == (12, 8)
    for t, i, angle in [
        (0, 5, 0),
        (1, 0, 1),
        (11, 0, 11),
        (7, 2, 0.7),
        (11, 4, 0.11),
        (3, 6, 0.003),
        (2, 1, 0.632455532),
    ]:
        assert model.cos[t, i].item() == pytest.approx(math.cos(angle), abs=1e-7)
        assert model.sin[t, i].item() == pytest.approx(math.sin(angle), abs=1e-7)
        x = torch.zeros(1, 12, 1, 16)
        x[0, t, 0, i] = 1  # the unit vector of a pair's first half turns towards its second half
        y = script.apply_rope(x, model.cos, model.sin)[0, t, 0]
        assert y[i].item() == pytest.approx(math.cos(angle), abs=1e-7)
        assert y[i + 8].item() == pytest.approx(math.sin(angle), abs=1e-7)
        assert y.count_nonzero() <= 2


@pytest.mark.parametrize("version", SCRIPTS)
def test_epsilon_of_the_norm_by_hand(version):
    """At x = 0.001 the mean of x² is 1e-6, as large as epsilon: x / sqrt(2e-6) = 0.707; at x = 1 it is 0.9999995."""
    _, model = model_of(version)
    for norm in (model.norm, model.layers[0].attention_norm, model.layers[0].feed_forward_norm):
        for x, wanted in ((1e-3, math.sqrt(0.5)), (1.0, 1 - 5e-7), (0.0, 0.0)):
            rows = torch.full((1, 3, 32), x)
            y = norm(rows, None)[1] if version == 3 else norm(rows)
            torch.testing.assert_close(y, torch.full_like(rows, wanted), rtol=1e-6, atol=0)


# ---------------------------------------------------------------- recorded runs

RECORDED_ERRORS = {"float32": 3e-6, "tf32": 2e-4, "bfloat16": 2e-3}  # measured 1e-6, 1e-4 and 6e-4


def test_recorded_losses_of_the_peers_are_version_1s():
    compared = set()
    for path in RECORDED.rglob("suite.json"):
        losses = collections.defaultdict(list)
        for run in read_results(path)["runs"]:
            case, summary = run["case"], run["summary"]
            if run["status"] == "ok" and case.model.split("+")[0] in ("v1", "hf", "liger") and case.processes == 1:
                key = (*case.configuration, case.precision)
                losses[key].append((case.model, summary["first_loss"], summary["final_loss"]))
        for (*_, precision), runs in losses.items():
            first = next((run[1:] for run in runs if run[0] == "v1"), None)  # fp8 is not version 1's
            for model, *found in runs if first else []:
                assert found == pytest.approx(first, rel=RECORDED_ERRORS[precision]), f"{path}: {model}"
                compared.add((model, precision))
    assert {("hf", "float32"), ("hf+compile", "bfloat16")} <= compared
