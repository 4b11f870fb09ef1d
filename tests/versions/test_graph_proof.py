"""A graph proves itself before it is believed: stubs for the graph on a CPU, real graphs on a GPU."""

import contextlib
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from common.versions import load_version
from marks import slow
from training import train

SIZES = "--hidden-dim 32 --num-layers 2 --num-heads 2 --intermediate-dim 72 --vocab-size 50 --seq-len 18".split()
SIZES += ["--batch-size", "2", "--warmup-steps", "0"]
HALF = ["--use-amp", "--amp-dtype", "float16"]
SHORT = ["--num-layers", "1", "--seq-len", "7"]  # Triton's interpreter takes seconds for a step
ON_CPU = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter needs a process of its own")
KINDS = [(1, []), (2, ["--use-amp"]), (3, [*HALF, *SHORT]), (4, ["--use-amp"]), (4, HALF)]


@contextlib.contextmanager
def stubbed_graphs(trainer, replay):
    """Let a trainer on a CPU capture a graph whose replay is replay(trainer); trainer.captured is the batch then."""
    event = SimpleNamespace(record=lambda: None, elapsed_time=lambda later: 1.0)

    def graph(*_, **__):
        trainer.captured = {"tokens": trainer.tokens.clone(), "labels": trainer.labels.clone()}
        return contextlib.nullcontext()

    stubs = {
        "CUDAGraph": lambda: SimpleNamespace(replay=lambda: replay(trainer)),
        "graph": graph,
        "current_stream": lambda: None,
        "is_current_stream_capturing": lambda: False,
        "Event": lambda **_: event,
    }
    with mock.patch.multiple(torch.cuda, **stubs), mock.patch.object(type(trainer.options), "on_gpu", True):
        yield


def captured(version, argv, replay):
    """Return a trainer of that version after it captured a graph with that replay."""
    _, trainer = train(version, [*SIZES, "--device", "cpu", "--no-graph", *argv], steps=0)
    trainer.graph_reason = None
    with stubbed_graphs(trainer, replay):
        trainer.capture(trainer.initial)
    return trainer


def whole_step(trainer):
    trainer.step()


# ---------------------------------------------------------------- seeded faults: what a replay does wrong


def frozen(trainer, name, rows):
    """Read some rows of the captured batch instead of those of the step."""
    held = getattr(trainer, name)
    given = held.clone()
    held[rows] = trainer.captured[name][rows]
    trainer.step()
    held.copy_(given)


def frozen_tokens(trainer):
    frozen(trainer, "tokens", slice(None))


def frozen_labels(trainer):
    frozen(trainer, "labels", slice(None))


def last_tokens_frozen(trainer):
    frozen(trainer, "tokens", slice(-1, None))


def last_labels_frozen(trainer):
    frozen(trainer, "labels", slice(-1, None))


def first_batch_kept(trainer):
    """Read in every replay the batch of the first."""
    first = trainer.__dict__.setdefault("first", {"tokens": trainer.tokens.clone(), "labels": trainer.labels.clone()})
    for name, batch in first.items():
        getattr(trainer, name).copy_(batch)
    trainer.step()


def no_rope(trainer):
    name = "rotary_attention" if trainer.options.version == 3 else "apply_rope"
    script = load_version(trainer.options.version)
    original = getattr(script, name)

    def without(x, cos, sin, *heads):
        return original(x, torch.ones_like(cos), torch.zeros_like(sin), *heads)

    with mock.patch.object(script, name, without):
        trainer.step()


def no_optimizer(trainer):
    with mock.patch.object(trainer.optimizer, "step"):
        trainer.step()


def one_gradient_lost(trainer):
    """Leave out the kernel that computes the gradient of one norm's weight."""
    weight = trainer.model.layers[1].attention_norm.weight
    hook = weight.register_hook(torch.zeros_like)
    trainer.step()
    hook.remove()


def one_weight_not_written(trainer):
    script = load_version(trainer.options.version)
    p = trainer.model.layers[0].feed_forward.down_proj.weight
    state = trainer.optimizer.state[p]
    with torch.no_grad():
        before = script.get_weight(p, state).clone()
    trainer.step()
    with torch.no_grad():
        script.set_weight(p, state, before)


def gradients_too_large(trainer):
    """AdamW's first update is blind to the scale of a gradient; the moments are not."""
    step = trainer.optimizer.step

    def doubled():
        for p in trainer.model.parameters():
            p.grad *= 2
        step()

    with mock.patch.object(trainer.optimizer, "step", doubled):
        trainer.step()


def loss_not_written(trainer):
    loss = trainer.loss
    trainer.step()
    trainer.loss = loss


FAULTS = [
    frozen_tokens, frozen_labels, last_tokens_frozen, last_labels_frozen, first_batch_kept, no_rope,
    no_optimizer, one_gradient_lost, one_weight_not_written, gradients_too_large, loss_not_written,
]  # fmt: skip


@ON_CPU
@pytest.mark.parametrize(("version", "argv"), KINDS, ids=str)
def test_a_right_graph_is_believed(version, argv):
    trainer = captured(version, argv, whole_step)
    assert trainer.graph is not None, trainer.graph_reason


SEEDED = [(version, argv, fault) for version, argv in ((1, []), (4, ["--use-amp"])) for fault in FAULTS]
SEEDED += [slow(3, [*HALF, *SHORT], one_weight_not_written)]


@ON_CPU
@pytest.mark.parametrize(("version", "argv", "fault"), SEEDED)
def test_a_wrong_graph_is_not(version, argv, fault):
    trainer = captured(version, argv, fault)
    assert trainer.graph is None and "a replay is not an eager step" in trainer.graph_reason


BOUNDS = [
    ([], 0.0, 0.02),
    ([], 0.01, 0.04),
    ([], 0.2, 0.5),
    (["--tf32"], 0.0, 0.3),
    (["--use-amp"], 0.0, 0.3),
    (["--use-amp"], 0.1, 0.4),
    (["--use-amp"], 0.2, 0.5),
]


@ON_CPU
@pytest.mark.parametrize(("argv", "eager", "bound"), BOUNDS, ids=str)
def test_an_error_is_believed_up_to_its_bound(argv, eager, bound):
    """Four times the error of eager steps, but at least 2 % (TF32 and 16 bits: 30 %) and at most 50 %."""
    for error in (0.99 * bound, 1.01 * bound):
        errors = iter([eager, error])

        def largest_error(found, expected, errors=errors):
            list(found)  # run the steps
            return next(errors), "x"

        with mock.patch.object(load_version(1), "largest_error", largest_error):
            trainer = captured(1, argv, whole_step)
        assert (trainer.graph is not None) == (error < bound), trainer.graph_reason


@ON_CPU
@pytest.mark.parametrize("wrong", [(0.0, 0.0), (0.0, 1.0), (1.0, 0.0)])
def test_a_graph_that_is_wrong_on_one_rank_is_believed_on_none(wrong):
    """Of two ranks: one that replays and one that runs eagerly would wait for each other."""
    with mock.patch.object(load_version(1), "gather", lambda values, options: torch.tensor(wrong)[:, None]):
        trainer = captured(1, [], whole_step)
    assert (trainer.graph is None) == any(wrong)


@ON_CPU
def test_a_scaler_that_synchronises_is_not_captured():
    """AdamW of version 1 asks the host whether a gradient overflowed: a replay would never ask again."""
    trainer = captured(1, HALF, whole_step)
    assert trainer.graph is None and "the gradient scaler synchronises" in trainer.graph_reason


@ON_CPU
@pytest.mark.parametrize(("parallel", "mode"), [(None, "global"), ("ddp", "thread_local"), ("fsdp", "thread_local")])
def test_how_several_ranks_capture(parallel, mode):
    """NCCL's thread may query its events meanwhile; FSDP2 cannot go on from the middle of a step."""
    _, trainer = train(1, [*SIZES, "--device", "cpu", "--no-graph"], steps=0)
    trainer.options.parallel = parallel
    trainer.step = mock.Mock(side_effect=RuntimeError("not permitted\nand more"))
    graph = mock.Mock(side_effect=lambda *_, **__: contextlib.nullcontext())
    said = contextlib.nullcontext()
    if parallel == "fsdp":
        said = pytest.raises(load_version(1).UserError, match="^--parallel fsdp needs --no-graph here: not permitted$")
    with stubbed_graphs(trainer, whole_step), mock.patch.object(torch.cuda, "graph", graph), said:
        trainer.capture_step()
    assert graph.call_args.kwargs["capture_error_mode"] == mode
    assert (trainer.graph, trainer.graph_reason) == (None, "not permitted")


def test_a_run_without_its_graph_goes_on_as_if_it_had_never_tried():
    wanted, _ = train(1, [*SIZES, "--device", "cpu", "--no-graph"], steps=4)
    script = load_version(1)
    config = script.parse_options([*SIZES, "--device", "cpu", "--graph"])
    trainer, data = script.Trainer(config), script.load_data(config)
    with stubbed_graphs(trainer, no_optimizer):
        trainer.warm_up(*script.batch(data, 0, config), trainer.initial)
        assert trainer.graph is None
    assert [trainer.run(*script.batch(data, step, config))["loss"] for step in range(4)] == wanted


def test_the_proof_costs_six_steps():
    """Two and two eager ones and two replays; the captured step is not run, but by this stub."""
    _, trainer = train(1, [*SIZES, "--device", "cpu", "--no-graph"], steps=0)
    trainer.graph_reason = None
    ran = []
    step = trainer.step
    trainer.step = lambda: ran.append("eager") or step()
    tokens = trainer.tokens.clone()
    with stubbed_graphs(trainer, lambda trainer: ran.append("replay") or step()):
        trainer.capture(trainer.initial)
    assert ran == ["eager"] * 4 + ["eager"] + ["replay"] * 2
    assert torch.equal(trainer.tokens, tokens)


def test_a_step_that_overflows_is_tried_again_with_a_lower_scale():
    """A skipped step proves nothing: it changes nothing."""
    _, trainer = train(4, [*SIZES, "--device", "cpu", "--no-graph", *HALF], steps=0)
    trainer.graph_reason = None
    saved = {**trainer.initial, "scaler": trainer.initial["scaler"] | {"scale": 2.0**30}}
    with stubbed_graphs(trainer, whole_step):
        trainer.capture(saved)
    assert trainer.graph is not None
    with stubbed_graphs(trainer, one_gradient_lost):
        trainer.graph = None
        trainer.capture(saved)
    assert trainer.graph is None


@pytest.mark.parametrize("tried", [[4.0, 2.0], [8.0, 4.0, 2.0, 1.0]])
def test_a_step_that_always_overflows_is_not_tried_for_ever(tried):
    """The scale is 1 after the first two steps, or 2 after them and less after two more."""
    _, trainer = train(4, [*SIZES, "--device", "cpu", "--no-graph", *HALF], steps=0)
    trainer.model.norm.weight.register_hook(lambda gradient: gradient * torch.inf)
    scales = []
    launch = trainer.launch
    trainer.launch = lambda: scales.append(trainer.scaler.get_scale()) or launch()
    trainer.run_two_steps({**trainer.initial, "scaler": trainer.initial["scaler"] | {"scale": tried[0]}})
    assert scales == tried


@ON_CPU
@pytest.mark.parametrize(("asked", "steps"), [(0, 7), (9, 9)])
def test_ddp_runs_eleven_steps_before_a_capture(asked, steps, monkeypatch):
    """As PyTorch's notes on graphs ask; the proof runs four of them."""
    _, trainer = train(1, [*SIZES, "--device", "cpu", "--no-graph"], steps=0)
    trainer.options.graph, trainer.options.parallel, trainer.options.warmup_steps = True, "ddp", asked
    ran = []
    trainer.step = lambda: ran.append("eager")
    trainer.capture = lambda saved: ran.append("capture")
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    with stubbed_graphs(trainer, whole_step):
        trainer.warm_up(trainer.tokens, trainer.labels, trainer.initial)
    assert ran == ["eager"] * steps + ["capture"]


def test_not_a_number_is_no_proof():
    script = load_version(1)

    def error(expected, **found):
        return script.largest_error((expected | found).items(), expected)

    one = {"x": torch.ones(3), "y": torch.zeros(2)}
    assert error(one) == (0, "x")
    loss = {"loss": torch.tensor(4.0)}
    assert error(loss, loss=torch.tensor(4.01)) == (pytest.approx(0.25, rel=1e-4), "loss")
    assert error(one, x=torch.tensor([1.0, 1.0, 2.0])) == (pytest.approx(3**-0.5), "x")
    for wrong in (torch.tensor([0.0, torch.nan]), torch.tensor([0.0, torch.inf]), torch.ones(2)):
        found, name = error(one, y=wrong)
        assert found > 0.5 and name == "y"


# ---------------------------------------------------------------- phases inside a graph


def refuse_the_option(external=False, **_):
    """Refuse the option as a PyTorch does that does not know it."""
    if external:
        raise TypeError("'external' is an invalid keyword argument for Event()")
    return SimpleNamespace(record=lambda: None)


def refuse_the_record(external=False, **_):
    """Refuse as PyTorch does for a ROCm that cannot: when the event is created, at the first record."""

    def record():
        if external:
            raise RuntimeError("External events are not possible here")

    return SimpleNamespace(record=record)


def take_the_time(**_):
    return SimpleNamespace(record=lambda: None)


EVENTS = [(take_the_time, 4), (refuse_the_option, 0), (refuse_the_record, 0)]


@ON_CPU
@pytest.mark.parametrize("cuda", [None, "13.0"])
@pytest.mark.parametrize(("event", "marks"), EVENTS)
def test_phases_in_a_graph_depend_on_what_its_events_can_do(event, marks, cuda, monkeypatch):
    """The name of the vendor and the number of the release decide nothing."""
    _, trainer = train(1, [*SIZES, "--device", "cpu", "--no-graph"], steps=0)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    with stubbed_graphs(trainer, whole_step), mock.patch.object(torch.cuda, "Event", event):
        trainer.step()
        assert len(trainer.marks) == 4  # outside a graph every GPU can
        with mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: True):
            trainer.step()
    assert len(trainer.marks) == marks


@ON_CPU
def test_an_event_that_fails_outside_a_graph_is_an_error():
    def fail(**_):
        raise RuntimeError("a kernel before it failed")

    _, trainer = train(1, [*SIZES, "--device", "cpu", "--no-graph"], steps=0)
    refused = pytest.raises(RuntimeError, match="a kernel before it")
    with stubbed_graphs(trainer, whole_step), mock.patch.object(torch.cuda, "Event", fail), refused:
        trainer.step()


# ---------------------------------------------------------------- real graphs


@pytest.mark.gpu
@pytest.mark.parametrize(("version", "argv"), KINDS, ids=str)
def test_a_graph_of_the_gpu_is_believed(version, argv):
    _, trainer = train(version, [*SIZES, "--graph", *argv], steps=3)
    assert trainer.graph is not None, trainer.graph_reason


@pytest.mark.gpu
@pytest.mark.parametrize("fault", ["input not read", "kernel left out"])
@pytest.mark.parametrize(("version", "argv"), [(1, []), (3, ["--use-amp"]), (4, ["--use-amp"])], ids=str)
def test_a_wrong_graph_of_the_gpu_is_not(version, argv, fault, monkeypatch):
    """The step is wrong while it is captured, and right eagerly."""
    script = load_version(version)
    compute_loss, frozen = script.compute_loss, {}

    def wrong(model, tokens, labels, config):
        if "tokens" not in frozen:
            frozen["tokens"] = tokens.clone()
        if not torch.cuda.is_current_stream_capturing():
            return compute_loss(model, tokens, labels, config)
        if fault == "input not read":
            return compute_loss(model, frozen["tokens"], labels, config)
        hook = trainer_of[0].model.norm.weight.register_hook(torch.zeros_like)
        hooks.append(hook)
        return compute_loss(model, tokens, labels, config)

    trainer_of, hooks = [], []
    make_trainer = script.Trainer.__init__
    monkeypatch.setattr(script, "compute_loss", wrong)
    monkeypatch.setattr(
        script.Trainer, "__init__", lambda self, config: (trainer_of.append(self), make_trainer(self, config))[1]
    )
    losses, trainer = train(version, [*SIZES, "--graph", *argv], steps=3)
    for hook in hooks:
        hook.remove()
    assert trainer.graph is None and "a replay is not an eager step" in trainer.graph_reason
    assert len(set(losses)) == 3
