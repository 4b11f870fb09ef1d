"""Training: the same losses in every version, losses that fall, a stream whose entropy is known, FLOPs that count."""

import contextlib
import math
import os
import pathlib

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from common.versions import SCRIPTS, load_version

SIZES = "--hidden-dim 32 --num-layers 2 --num-heads 2 --intermediate-dim 72 --vocab-size 50 --seq-len 18 --batch-size 2"
SAME_LOSS = 1e-4 if torch.cuda.is_available() else 1e-5  # relative, after ten steps


def train(version, argv, steps=10):
    """Losses of some steps, and the trainer; a graph is captured where the options ask for one."""
    script = load_version(version)
    options = script.parse_options([*SIZES.split(), *argv])
    script.set_up_backend(options)
    data, weights = script.load_data(options), script.initial_weights(script.model_config(options), options.seed)
    # A graph is captured on a stream of its own, as the scripts do.
    with torch.cuda.stream(torch.cuda.Stream()) if torch.cuda.is_available() else contextlib.nullcontext():
        trainer = script.Trainer(options)
        trainer.warm_up(*data.batch(0), {"weights": weights, "step": 0})
        return [trainer.run(*data.batch(step))["loss"] for step in range(steps)], trainer


@pytest.fixture(scope="module")
def baseline():
    return train(1, [])[0]


# ---------------------------------------------------------------- losses


@pytest.mark.parametrize("version", [2, 4])
def test_ten_steps_give_the_losses_of_version_1(version, baseline):
    """Version 3's ten steps: test_loss_falls_through_the_kernels."""
    losses, _ = train(version, ["--no-graph"])
    assert losses == pytest.approx(baseline, rel=SAME_LOSS)
    assert len(set(losses)) == 10


def test_warm_up_leaves_no_trace():
    """Warm-up trains on a throw-away batch; weights, moments and step count are those of a run without it."""
    runs = [train(1, ["--warmup-steps", steps], steps=4)[0] for steps in ("0", "5")]
    assert runs[0] == runs[1]


def test_seeds_differ(baseline):
    losses, _ = train(1, ["--seed", "1"], steps=3)
    assert all(abs(a - b) > 1e-3 for a, b in zip(losses, baseline, strict=False))


@pytest.mark.parametrize("version", SCRIPTS)
def test_a_cpu_says_why_it_has_no_graph(version):
    if torch.cuda.is_available() and version == 3:
        pytest.skip("version 3 was loaded for the GPU, not for the interpreter")
    _, trainer = train(version, ["--graph", "--device", "cpu", "--num-layers", "1"], steps=0)
    assert trainer.graph is None and trainer.graph_reason == "a CPU has no graphs"


@pytest.mark.gpu
@pytest.mark.parametrize("precision", [[], ["--use-amp"], ["--use-amp", "--amp-dtype", "float16"]], ids=" ".join)
@pytest.mark.parametrize("version", SCRIPTS)
def test_graph_gives_the_losses_of_eager(version, precision):
    eager, _ = train(version, ["--no-graph", *precision])
    replayed, trainer = train(version, ["--graph", *precision])
    if version in (1, 2) and "float16" in precision:
        assert trainer.graph is None and "gradient scaler" in trainer.graph_reason
    else:
        assert trainer.graph is not None, trainer.graph_reason
    assert replayed == pytest.approx(eager, rel=1e-5 if not precision else 2e-3)


@pytest.mark.parametrize(
    ("version", "argv"),
    [
        (1, []),
        pytest.param(1, ["--use-amp"], marks=pytest.mark.gpu),
        pytest.param(2, ["--use-amp", "--deterministic"], marks=pytest.mark.gpu),
        pytest.param(3, ["--use-amp"], marks=pytest.mark.gpu),
        pytest.param(4, ["--use-amp", "--deterministic"], marks=pytest.mark.gpu),
    ],
)
def test_two_runs_are_bitwise_equal(version, argv):
    """Version 1 is deterministic by default, version 3's kernels by design, the others where they are told to be."""
    runs = [train(version, argv, steps=20) for _ in range(2)]
    assert runs[0][0] == runs[1][0]
    first, second = (dict(trainer.model.named_parameters()) for _, trainer in runs)
    assert all(torch.equal(first[name], second[name]) for name in first)


LEARNING = ["--learning-rate", "1e-2", "--batch-size", "8", "--no-graph"]


@pytest.mark.parametrize("version", [1, 2, 4])
def test_loss_falls_on_the_stream_but_not_below_its_entropy(version):
    """Far below what knowing the tokens' frequencies alone gives, ln V; never below what the stream leaves open."""
    losses, trainer = train(version, LEARNING, steps=120)
    best = load_version(version).load_data(trainer.options).best_loss
    assert losses[0] == pytest.approx(math.log(50), abs=0.2)
    assert best - 0.1 < sum(losses[-10:]) / 10 < 2.0


@pytest.mark.parametrize("precision", [[], ["--use-amp", "--amp-dtype", "float16"]], ids=["float32", "float16"])
def test_loss_falls_through_the_kernels(precision):
    """Few steps, for the interpreter takes a third of a second for one."""
    argv = [*LEARNING, "--num-layers", "1", "--vocab-size", "20", "--warmup-steps", "0", *precision]
    losses, _ = train(3, argv, steps=10)
    assert losses[-1] < losses[0] - 0.5
    assert losses == pytest.approx(train(1, argv, steps=10)[0], rel=0.02 if precision else SAME_LOSS)


@pytest.fixture
def text(tmp_path):
    """Real text that every machine has, of one byte a character."""
    path = tmp_path / "some text.txt"
    path.write_bytes(pathlib.Path(os.__file__).read_bytes()[:20000])
    return path


def test_loss_falls_on_text(text):
    losses, _ = train(1, [*LEARNING, "--data", str(text), "--vocab-size", "128"], steps=150)
    assert losses[0] > math.log(128) - 0.2 and sum(losses[-5:]) / 5 < 2.9


@pytest.mark.parametrize("version", [2, 3, 4])
def test_losses_on_text_are_those_of_version_1(version, text):
    argv = ["--data", str(text), "--vocab-size", "128", "--no-graph", "--num-layers", "1", "--warmup-steps", "0"]
    assert train(version, argv, steps=3)[0] == pytest.approx(train(1, argv, steps=3)[0], rel=SAME_LOSS)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("version", [3, 4])
def test_a_thousand_steps_in_bfloat16_stay_with_float32(version):
    argv = ["--preset", "tiny", "--learning-rate", "1e-3", "--vocab-size", "500"]
    wanted, _ = train(1, [*argv, "--graph"], steps=1000)
    losses, _ = train(version, [*argv, "--use-amp"], steps=1000)
    for start in range(0, 1000, 50):  # single losses part with rounding, their means do not
        mean, wanted_mean = (sum(of[start : start + 50]) / 50 for of in (losses, wanted))
        assert mean == pytest.approx(wanted_mean, rel=0.02), f"steps {start} to {start + 50}"


# ---------------------------------------------------------------- data


def options_for(*argv):
    return load_version(1).parse_options([*SIZES.split(), *argv])


@pytest.mark.parametrize(
    ("vocabulary", "entropy"),
    [(1, 0.0), (2, math.log(2)), (3, 1.5 * math.log(2)), (4, 1.75 * math.log(2)), (1000, 1.75 * math.log(2))],
)
def test_best_loss_of_the_stream_is_its_entropy(vocabulary, entropy):
    """1/2, 1/4, 1/8, 1/8 is 1/2 · 1 + 1/4 · 2 + 1/8 · 3 + 1/8 · 3 = 1.75 bits."""
    stream = load_version(1).load_data(options_for("--vocab-size", str(vocabulary)))
    assert stream.best_loss == pytest.approx(entropy, abs=1e-12)
    tokens, labels = stream.batch(0)
    assert tokens.min() >= 0 and labels.max() < vocabulary


def test_best_loss_of_the_stream_is_what_counting_finds():
    """The entropy of the next token given the token, from counts of what follows what."""
    stream = load_version(1).load_data(options_for("--vocab-size", "20", "--batch-size", "400", "--seq-len", "100"))
    tokens, labels = stream.batch(0)
    counts = torch.zeros(20, 20, dtype=torch.float64)
    counts.index_put_((tokens.flatten(), labels.flatten()), torch.ones(tokens.numel(), dtype=torch.float64), True)
    assert (counts > 0).sum(dim=1).tolist() == [4] * 20
    share = counts / counts.sum(dim=1, keepdim=True)
    entropy = -(torch.xlogy(share, share).sum(dim=1) * counts.sum(dim=1)).sum() / counts.sum()
    assert entropy.item() == pytest.approx(stream.best_loss, rel=0.01)


@pytest.mark.parametrize("source", ["stream", "text"])
def test_batches_are_a_function_of_seed_and_step(source, text):
    argv = ["--vocab-size", "128", "--batch-size", "4"] + (["--data", str(text)] if source == "text" else [])
    batches = {
        (seed, step): load_version(1).load_data(options_for(*argv, "--seed", str(seed))).batch(step)
        for seed in (0, 1)
        for step in (0, 1, 7)
    }
    again = load_version(3).load_data(load_version(3).parse_options([*SIZES.split(), *argv])).batch(7)
    assert all(torch.equal(*pair) for pair in zip(batches[0, 7], again, strict=True))
    assert len({tuple(tokens.flatten().tolist()) for tokens, _ in batches.values()}) == len(batches)
    for tokens, labels in batches.values():
        assert tokens.shape == labels.shape == (4, 18) and tokens.dtype == labels.dtype == torch.int64
        assert torch.equal(tokens[:, 1:], labels[:, :-1])  # the next token, shifted once


def test_windows_of_text_are_text(text):
    content = text.read_bytes()
    tokens, labels = load_version(1).load_data(options_for("--vocab-size", "128", "--data", str(text))).batch(3)
    for row, following in zip(tokens.tolist(), labels.tolist(), strict=True):
        assert bytes([*row, following[-1]]) in content


def test_a_window_may_be_the_whole_text(tmp_path):
    path = tmp_path / "short.txt"
    path.write_bytes(bytes(range(19)))  # --seq-len 18 and one byte to predict
    with pytest.raises(ValueError, match="0 bytes of text"):
        load_version(1).load_data(options_for("--data", str(path)))
    path.write_bytes(bytes(range(1, 20)))
    tokens, labels = load_version(1).load_data(options_for("--data", str(path))).batch(0)
    assert tokens[0].tolist() == list(range(1, 19)) and labels[0].tolist() == list(range(2, 20))


def test_a_folder_of_texts_is_read_in_the_order_of_names(tmp_path):
    for name, content in {"b.txt": b"second" * 4, "a.txt": b"first" * 4, "c.bin": b"\0\1\2" * 9}.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "folder").mkdir()
    stream = load_version(1).load_data(options_for("--data", str(tmp_path), "--vocab-size", "128"))
    assert bytes(stream.bytes) == b"first" * 4 + b"\n" + b"second" * 4


# ---------------------------------------------------------------- counts


@pytest.mark.parametrize("version", [1, 2])
def test_flops_are_those_that_pytorch_counts(version):
    """Version 1 computes the whole T x T square in attention, of which half is needed: 6 · L · B · T² · C less."""
    script = load_version(version)
    options = script.parse_options([*SIZES.split(), "--no-graph"] + ["--disable-flash-attention"] * (version == 2))
    model = script.build_model(options, options.device)
    tokens, labels = (tensor.to(options.device) for tensor in script.load_data(options).batch(0))
    with FlopCounterMode(display=False) as counter:
        script.compute_loss(model, tokens, labels, options).backward()
    L, B, T, C = options.num_layers, options.batch_size, options.seq_len, options.hidden_dim
    config = script.model_config(options)
    assert script.flops_per_step(config, B, T) == counter.get_total_flops() - 6 * L * B * T**2 * C


def test_flops_of_the_presets():
    """199.7 and 9 638 GFLOP a step for small and medium: 6 · N · tokens + 6 · L · B · T² · C."""
    script = load_version(1)
    counts = {}
    for preset in script.PRESETS:
        options = script.parse_options(["--preset", preset])
        config = script.model_config(options)
        counts[preset] = script.flops_per_step(config, options.batch_size, options.seq_len) / 1e9
    assert counts["small"] == pytest.approx(199.7, rel=0.05)
    assert counts["medium"] == pytest.approx(9638, rel=0.05)


def test_parameters_trained_counts_what_has_a_gradient():
    _, trainer = train(1, [], steps=1)
    script, model = load_version(1), trainer.model
    total = sum(p.numel() for p in model.parameters())
    assert script.parameters_trained(model) == total
    model.layers[0].attention.q_proj.weight.grad = None
    model.layers[1].attention.q_proj.weight.grad.zero_()
    model.norm.weight.grad[3] = math.nan
    assert script.parameters_trained(model) == total - 2 * 32 * 32 - 32
