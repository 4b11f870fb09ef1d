"""Training: no trace of the warm-up, falling losses, graphs, data of known entropy, honest clocks, FLOPs that count."""

import functools
import math
import os
import pathlib
from unittest import mock

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from common.versions import SCRIPTS, load_version
from marks import slow
from training import tensors, train

SIZES = "--hidden-dim 32 --num-layers 2 --num-heads 2 --intermediate-dim 72 --vocab-size 50 --seq-len 18".split()
SIZES += ["--batch-size", "2"]


# ---------------------------------------------------------------- losses


@pytest.mark.parametrize("version", [slow(version) if version == 3 else version for version in SCRIPTS])
def test_warm_up_leaves_no_trace(version):
    """Weights, moments and step count are those of a run without warm-up, where sums have one order."""
    options = [*SIZES, "--num-layers", "1", "--deterministic"]
    runs = [train(version, [*options, "--warmup-steps", steps], steps=2) for steps in "02"]
    assert runs[0][0] == runs[1][0]
    first, second = (tensors(load_version(version), trainer) for _, trainer in runs)
    for kind, named in first.items():
        assert all(torch.equal(tensor, second[kind][name]) for name, tensor in named.items()), kind


def test_loss_falls_on_the_stream_but_not_below_its_entropy():
    """From ln V, the loss of a uniform guess, to the entropy of the stream."""
    losses, trainer = train(1, [*SIZES, "--learning-rate", "1e-2", "--batch-size", "8", "--no-graph"], steps=120)
    best = load_version(1).load_data(trainer.options).best_loss
    assert losses[0] == pytest.approx(math.log(50), abs=0.2)
    assert best - 0.1 < sum(losses[-10:]) / 10 < 2.0


@pytest.mark.gpu
@pytest.mark.parametrize("precision", [[], ["--use-amp"], ["--use-amp", "--amp-dtype", "float16"]], ids=" ".join)
@pytest.mark.parametrize("version", SCRIPTS)
def test_graph_gives_the_losses_of_eager(version, precision):
    eager, _ = train(version, [*SIZES, "--no-graph", *precision])
    replayed, trainer = train(version, [*SIZES, "--graph", *precision])
    if version == 1 and "float16" in precision:  # its AdamW reads on the host what the gradient scaler found
        assert trainer.graph is None and "gradient scaler" in trainer.graph_reason
    else:
        assert trainer.graph is not None, trainer.graph_reason
    assert replayed == pytest.approx(eager, rel=1e-5 if not precision else 2e-3)


def test_version_4_compiles_once_and_keeps_what_it_compiled(monkeypatch):
    script, compile_function, given = load_version(4), torch.compile, []

    def record(function, **_):
        given.append(function.__name__)
        return compile_function(function, backend="eager")

    monkeypatch.setattr(script, "compiled", functools.cache(script.compiled.__wrapped__))  # empty, and not kept
    monkeypatch.setattr(torch, "compile", record)
    train(4, [*SIZES, "--device", "cpu", "--no-graph", "--use-amp", "--enable-torch-compile"], steps=2)
    assert sorted(given) == ["_call_impl", "adamw_update", "mean_loss"]


# ---------------------------------------------------------------- graph capture and clocks, with stubs for the GPU


def test_a_failed_capture_keeps_its_reason_and_the_run_goes_on(monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("operation not permitted when stream is capturing\nand a second line")

    _, trainer = train(1, [*SIZES, "--device", "cpu"], steps=1)
    event = mock.Mock(elapsed_time=lambda later: 1.0)
    stubs = {"CUDAGraph": object, "current_stream": lambda: None, "graph": fail, "Event": lambda **_: event}
    for name, stub in (stubs | {"is_current_stream_capturing": lambda: False}).items():
        monkeypatch.setattr(torch.cuda, name, stub)
    trainer.graph_reason = None
    with monkeypatch.context() as patch:
        patch.setattr(type(trainer.options), "on_gpu", True)
        trainer.capture(trainer.initial)
    assert (trainer.graph, trainer.graph_reason) == (None, "operation not permitted when stream is capturing")
    trainer.restore(trainer.initial)
    losses = [trainer.run(trainer.tokens, trainer.labels)["loss"] for _ in range(9)]
    assert losses == sorted(losses, reverse=True) and losses[-1] < losses[0]


@pytest.mark.parametrize("work", ["step", "replay"])
def test_a_timed_step_lies_between_two_synchronisations(work, monkeypatch):
    """The clock starts after the GPU is idle and stops after it has finished."""
    _, trainer = train(1, [*SIZES, "--device", "cpu"], steps=1)
    calls = mock.Mock(clock=mock.Mock(return_value=0.0))
    trainer.synchronize, trainer.step = calls.synchronize, calls.step
    trainer.graph = calls if work == "replay" else None
    monkeypatch.setattr("time.perf_counter", calls.clock)
    trainer.run(trainer.tokens, trainer.labels)
    names = [call[0] for call in calls.mock_calls]
    assert names == ["synchronize", "clock", work, "synchronize", "clock"]


def test_ddp_averages_the_gradients_of_gpus(monkeypatch):
    """AdamW would hide their sum but for epsilon. A CPU has DDP's own average instead of this hook."""
    script = load_version(1)
    replica, calls = mock.Mock(), mock.Mock()
    monkeypatch.setattr(torch.nn.parallel, "DistributedDataParallel", replica)
    monkeypatch.setattr("torch.distributed.all_reduce", calls.all_reduce)
    config = script.parse_options([*SIZES, "--device", "cpu"])
    config.parallel = "ddp"
    monkeypatch.setattr(type(config), "on_gpu", True)
    model = torch.nn.Linear(2, 2)
    script.replicate(model, config)
    replica.assert_called_once_with(model, gradient_as_bucket_view=True, bucket_cap_mb=25)
    assert replica.return_value.broadcast_buffers is False
    _, hook = replica.return_value.register_comm_hook.call_args.args
    hook(None, calls.bucket)
    calls.all_reduce.assert_called_once_with(calls.bucket.buffer(), op=torch.distributed.ReduceOp.AVG, async_op=True)


# ---------------------------------------------------------------- data, and what is counted


@pytest.fixture(params=["stream", "text"])
def source(request, tmp_path):
    """Return the options of the stream, or of real text that every machine has, one byte per character."""
    path = tmp_path / "some text.txt"
    path.write_bytes(pathlib.Path(os.__file__).read_bytes()[:20000])
    return ["--data", str(path)] if request.param == "text" else []


def draw(step, *argv, version=1):
    """Return tokens and labels of a step, and the data they were drawn from."""
    script = load_version(version)
    config = script.parse_options([*SIZES, *map(str, argv)])
    data = script.load_data(config)
    return *script.batch(data, step, config), data


def test_best_loss_of_the_stream_is_its_entropy():
    """Probabilities 1/2, 1/4, 1/8, 1/8 have 1/2 · 1 + 1/4 · 2 + 1/8 · 3 + 1/8 · 3 = 1.75 bits."""
    for vocabulary, bits in {1: 0, 2: 1, 3: 1.5, 4: 1.75, 1000: 1.75}.items():
        tokens, labels, data = draw(0, "--vocab-size", vocabulary)
        assert data.best_loss == pytest.approx(bits * math.log(2), abs=1e-12)
        assert tokens.min() >= 0 and labels.max() < vocabulary
    tokens, labels, data = draw(0, "--vocab-size", 20, "--batch-size", 400, "--seq-len", 100)
    counts = torch.zeros(20, 20, dtype=torch.float64)
    counts.index_put_((tokens.flatten(), labels.flatten()), torch.ones(tokens.numel(), dtype=torch.float64), True)
    assert (counts > 0).sum(dim=1).tolist() == [4] * 20
    entropy = -torch.xlogy(counts, counts / counts.sum(dim=1, keepdim=True)).sum() / counts.sum()
    assert entropy.item() == pytest.approx(data.best_loss, rel=0.01)


def test_batches_are_a_function_of_seed_and_step(source):
    argv = ["--vocab-size", 128, "--batch-size", 4, *source]
    batches = {(seed, step): draw(step, *argv, "--seed", seed)[:2] for seed in (0, 1) for step in (0, 1, 7)}
    again = draw(7, *argv, version=3)[:2]
    assert all(torch.equal(*pair) for pair in zip(batches[0, 7], again, strict=True))
    assert len({tuple(tokens.flatten().tolist()) for tokens, _ in batches.values()}) == len(batches)
    for tokens, labels in batches.values():
        assert tokens.shape == labels.shape == (4, 18) and tokens.dtype == labels.dtype == torch.int64
        assert torch.equal(tokens[:, 1:], labels[:, :-1])  # a label is the next token


def test_two_ranks_draw_the_batch_of_one(source):
    script, argv, parts = load_version(1), [*SIZES, "--vocab-size", "128", *source], []
    for rank in range(2):
        config = script.parse_options(argv)
        config.rank, config.world_size = rank, 2
        parts.append(script.batch(script.load_data(config), 5, config))
    for wanted, got in zip(draw(5, *argv, "--batch-size", 4)[:2], zip(*parts, strict=True), strict=True):
        assert torch.equal(torch.cat(got), wanted)


def test_windows_of_text_are_text_and_every_window_can_be_drawn(tmp_path):
    """From the first window to the last one, whose last label is the last byte."""
    path = tmp_path / "text"
    path.write_bytes(bytes(range(1, 29)))
    tokens, labels, _ = draw(0, "--vocab-size", 29, "--batch-size", 500, "--data", path)
    assert set(tokens[:, 0].tolist()) == set(range(1, 11))
    assert torch.equal(labels, tokens + 1) and torch.equal(tokens, tokens[:, :1] + torch.arange(18))
    path.write_bytes(bytes(range(1, 20)))  # a single window: 18 tokens and the last label
    tokens, labels, _ = draw(0, "--data", path)
    assert tokens[0].tolist() == list(range(1, 19)) and labels[0].tolist() == list(range(2, 20))


def test_a_folder_of_texts_is_read_in_the_order_of_names(tmp_path):
    texts = {"b.txt": b"second" * 4, "a.txt": b"first" * 4, "e.txt": b"x" * 8000 + b"\0"}
    binaries = {"c.bin": b"\0\1\2" * 9, "d.bin": b"x" * 7999 + b"\0"}  # as git says, by the first 8000 bytes
    for name, content in (texts | binaries).items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "folder").mkdir()
    data = draw(0, "--data", tmp_path, "--vocab-size", 128)[2]
    assert bytes(data.bytes) == b"\n".join(content for _, content in sorted(texts.items()))


@pytest.mark.parametrize("version", [1, 2])
def test_flops_are_those_that_pytorch_counts(version):
    """Both compute the whole T x T scores, of which half is needed: 6 · L · B · T² · C less."""
    script = load_version(version)
    config = script.parse_options([*SIZES, "--no-graph"] + ["--disable-flash-attention"] * (version == 2))
    trainer, data = script.Trainer(config), script.load_data(config)
    tokens, labels = (tensor.to(config.device) for tensor in script.batch(data, 0, config))
    with FlopCounterMode(display=False) as counter:
        script.compute_loss(trainer.model, tokens, labels, config).backward()
    unneeded = 6 * config.num_layers * config.batch_size * config.seq_len**2 * config.hidden_dim
    assert script.flops_per_step(trainer.model, config) == counter.get_total_flops() - unneeded


def test_parameters_trained_counts_what_has_a_gradient():
    _, trainer = train(1, SIZES, steps=1)
    count, model = load_version(1).parameters_trained, trainer.model
    total = sum(p.numel() for p in model.parameters())
    assert count(trainer) == total
    model.layers[0].attention.q_proj.weight.grad = None
    model.layers[1].attention.q_proj.weight.grad.zero_()
    model.norm.weight.grad[3] = math.nan
    assert count(trainer) == total - 2 * 32 * 32 - 32
