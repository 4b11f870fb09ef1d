"""Four versions of one model: the same weights and the same gradient for every one of them, switch by switch."""

import contextlib
import functools
import math
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from common.measuring.guarded_memory import launches
from common.versions import SCRIPTS, load_version, loss_and_gradients, relative_error
from marks import slow
from training import tensors, train

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # PyTorch's own compiler causes it

# Only the head size is a power of two, which the attention kernel requires.
MODEL = "--hidden-dim 48 --num-layers 2 --num-heads 3 --num-kv-heads 1 --intermediate-dim 72 --vocab-size 50".split()
MODEL += "--seq-len 19 --batch-size 3".split()
GRADIENT_ERROR = 1e-4 if torch.cuda.is_available() else 1e-5
V2_SWITCHES = ("qkv-fusion", "flash-attention", "swiglu-fusion", "torch-compile")
ATTENTION_KERNELS = {f"attention_{part}_kernel" for part in ("forward", "backward_dq", "backward_dkdv")}
V3_KERNELS = {
    "rmsnorm-kernel": {"rmsnorm_forward_kernel", "rmsnorm_backward_kernel", "column_sum_kernel"},
    "rope-kernel": {"rope_kernel"},
    "swiglu-kernel": {"swiglu_forward_kernel", "swiglu_backward_kernel"},
    "attention-kernel": ATTENTION_KERNELS,
    "loss-kernel": {"cross_entropy_forward_kernel", "cross_entropy_backward_kernel"},
    "optimizer-kernel": {"adamw_kernel"},
}


def only(switch, of):
    return [f"--{'enable' if other == switch else 'disable'}-{other}" for other in of]


@functools.cache
def exact():
    """Return loss and gradients of version 1 computed in float64 throughout."""
    script = load_version(1)
    config = script.parse_options(MODEL)
    trainer, data = script.Trainer(config), script.load_data(config)
    model = trainer.model.double()
    tokens, labels = (tensor.to(config.device) for tensor in script.batch(data, 1, config))
    loss = script.compute_loss(model, tokens, labels, config)
    loss.backward()
    return loss.item(), {name: p.grad.cpu() for name, p in model.named_parameters()}


def assert_exact(version, *switches):
    wanted_loss, wanted = exact()
    loss, gradients = loss_and_gradients(version, [*MODEL, *switches], step=1)
    assert loss == pytest.approx(wanted_loss, rel=1e-6)
    assert {name: g.shape for name, g in gradients.items()} == {name: g.shape for name, g in wanted.items()}
    for name, gradient in gradients.items():
        assert gradient.count_nonzero(), name
        assert relative_error(gradient, wanted[name]) <= GRADIENT_ERROR, name


@pytest.mark.parametrize(
    ("version", "switches"),
    [
        *((version, []) for version in SCRIPTS if version != 3),
        *((2, only(switch, V2_SWITCHES)) for switch in (*V2_SWITCHES[:3], None)),
        slow(2, only("torch-compile", V2_SWITCHES)),
        (2, ["--enable-all-fusion"]),
        pytest.param(4, ["--attention-backend", "flex", "--enable-torch-compile"], marks=pytest.mark.gpu),
    ],
    ids=str,
)
def test_every_gradient_in_float32_is_that_of_float64(version, switches, monkeypatch):
    if not torch.cuda.is_available():  # the C++ that torch.compile would generate takes half a minute to compile
        monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    assert_exact(version, *switches)


@pytest.mark.parametrize("backend", load_version(4).SDPA_BACKENDS)
def test_every_attention_of_version_4(backend, capsys):
    try:
        assert_exact(4, "--attention-backend", backend)
    except SystemExit:
        assert backend != "math"
        pytest.skip(capsys.readouterr().err.strip())


def test_fusions_of_version_2_do_what_they_say():
    script = load_version(2)
    fused, plain = (
        script.make_model(script.parse_options([*MODEL, *argv, "--device", "cpu"]))
        for argv in (["--enable-all-fusion"], only(None, V2_SWITCHES))
    )
    assert {"qkv_proj", "gate_up_proj"} <= {name.split(".")[-2] for name, _ in fused.named_parameters()}
    assert not any("qkv" in name or "gate_up" in name for name, _ in plain.named_parameters())
    assert fused._compiled_call_impl is not None and plain._compiled_call_impl is None
    called = mock.patch("torch.nn.functional.scaled_dot_product_attention", side_effect=RuntimeError("called"))
    for model, expected in ((fused, pytest.raises(RuntimeError, match="called")), (plain, contextlib.nullcontext())):
        with called, expected:
            model.layers[0].attention(torch.zeros(1, 19, 48), model.cos, model.sin)


@pytest.mark.parametrize("switch", [name for name in V3_KERNELS if name != "optimizer-kernel"])
@pytest.mark.quick(2)
def test_kernels_of_version_3(switch):
    """Each kernel alone, and all but that one."""
    with launches() as launched:
        assert_exact(3, *only(switch, V3_KERNELS))
    assert launched == V3_KERNELS[switch]
    assert_exact(3, f"--disable-{switch}")


def test_kernels_of_version_3_all_together():
    """With the optimizer's, which changes no gradient."""
    assert_exact(3)
    for switches, names in (([], V3_KERNELS), (only("optimizer-kernel", V3_KERNELS), ["optimizer-kernel"])):
        with launches() as launched:
            train(3, [*MODEL, *switches, "--no-graph", "--warmup-steps", "0"], steps=1)
        assert launched == set().union(*(V3_KERNELS[name] for name in names))


class Shapes(TorchDispatchMode):
    """Collect the shapes of all tensors that operators return."""

    def __init__(self):
        super().__init__()
        self.shapes = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.shapes |= {tuple(x.shape) for x in tree_leaves(result) if isinstance(x, torch.Tensor)}
        return result


def test_the_fused_loss_of_version_3(monkeypatch):
    """In several chunks, whose logits are all that exist: no operator makes a tensor of all tokens by vocabulary."""
    script = load_version(3)
    monkeypatch.setattr(script.linear_cross_entropy, "__defaults__", (16,))
    monkeypatch.setattr(script, "MAX_ONE_HOT", 0)  # the embedding's one-hot matrix has this shape, too
    exact()  # version 1's tensors are not to be seen
    with Shapes() as seen:
        assert_exact(3, "--enable-fused-loss")
    rows = {shape[0] for shape in seen.shapes if shape[1:] == (50,)}
    assert rows == {16, 57 - 3 * 16, 48}  # whole chunks, the last one, and wᵀ


@functools.cache
def autocast(dtype):
    return loss_and_gradients(1, [*MODEL, "--use-amp", "--amp-dtype", dtype], step=1)[1]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    ("version", "switches"), [(2, ()), (3, ()), (3, ("--enable-fused-loss",)), (4, ())], ids=lambda value: str(value)
)
def test_mixed_precision_is_as_good_as_plain_autocast(version, switches, dtype):
    """At most twice as far from float64 as version 1."""
    if version == 3 and dtype == "bfloat16" and not torch.cuda.is_available():
        pytest.skip("Triton's interpreter has no bfloat16 dot")
    plain, wanted = autocast(dtype), exact()[1]
    _, gradients = loss_and_gradients(version, [*MODEL, *switches, "--use-amp", "--amp-dtype", dtype], step=1)
    assert gradients.keys() == wanted.keys()
    for name, gradient in gradients.items():
        assert gradient.count_nonzero(), name
        allowed = relative_error(plain[name], wanted[name])
        assert allowed > 1e-5, name  # it does compute in 16 bits
        assert relative_error(gradient, wanted[name]) <= 2 * allowed + 1e-6, name


def initial_weights(version, *argv):
    trainer = train(version, [*MODEL, *argv, "--warmup-steps", "0", "--no-graph"], steps=0)[1]
    named = {name: p.detach().cpu() for name, p in trainer.model.named_parameters()}
    return load_version(version).canonical_views(named, trainer.options.model)


def test_same_seed_same_initial_weights_in_every_version():
    """Ones for norms, N(0, 0.02) for matrices, each drawn on its own."""
    wanted, other_seed = initial_weights(1, "--seed", "5"), initial_weights(1, "--seed", "6")
    for argv in ([2], [2, *only(None, V2_SWITCHES)], [3], [4]):
        weights = initial_weights(*argv, "--seed", "5")
        assert weights.keys() == wanted.keys()
        assert all(torch.equal(weight, wanted[name]) for name, weight in weights.items())
    for name, weight in wanted.items():
        if weight.ndim == 1:
            assert torch.equal(weight, torch.ones_like(weight)), name
        else:
            assert weight.std().item() == pytest.approx(0.02, rel=0.1), name
            assert abs(weight.mean().item()) < 0.002 and not torch.equal(weight, other_seed[name]), name
    matrices = [tuple(weight.flatten()[:50].tolist()) for weight in wanted.values() if weight.ndim == 2]
    assert len(set(matrices)) == len(matrices)


@pytest.mark.parametrize("version", [slow(3), 4])
def test_16_bit_weights_have_float32_masters(version):
    """After some steps the float32 weight rounds to the 16-bit one, and moved by less than 16 bits can hold."""
    script, dtype = load_version(version), "bfloat16" if version == 4 or torch.cuda.is_available() else "float16"
    argv = [*MODEL, "--use-amp", "--amp-dtype", dtype, "--learning-rate", "1e-6", "--warmup-steps", "0"]
    _, trainer = train(version, argv, steps=2)
    for name, p in trainer.model.named_parameters():
        if p.ndim == 2:
            weight = script.get_weight(p, trainer.optimizer.state[p])
            assert p.dtype == getattr(torch, dtype) and weight.dtype == torch.float32
            assert relative_error(p.detach(), weight) < 2**-8, name
    initial = initial_weights(1)
    for name, weight in tensors(script, trainer)["weights"].items():
        moved = (weight - initial[name]).abs()
        assert 0 < moved.max() < 5e-6 and moved.count_nonzero() > 0.9 * moved.numel(), name


# ---------------------------------------------------------------- scripts/common/versions.py


def test_a_version_is_loaded_once_from_its_own_file():
    modules = [load_version(version) for version in SCRIPTS]
    assert [module.VERSION for module in modules] == list(SCRIPTS)
    assert modules == [load_version(version) for version in SCRIPTS]
    assert [module.__file__ for module in modules] == [str(path) for path in SCRIPTS.values()]


def test_relative_error():
    ones = torch.ones(4)
    assert relative_error(ones, ones) == 0
    assert relative_error(ones + torch.tensor([0.2, 0, 0, 0]), ones) == pytest.approx(0.1, rel=1e-6)
    assert relative_error(0 * ones, 0 * ones) == 0
    assert relative_error(ones, 0 * ones) == math.inf
    assert relative_error(ones * math.nan, ones) == math.inf
    assert relative_error(ones * math.inf, ones) == math.inf == relative_error(ones, ones * math.inf)


def test_full_precision_overrides_the_options():
    half = [*MODEL, "--use-amp"]
    wanted, gradients = loss_and_gradients(1, MODEL)
    loss, same = loss_and_gradients(1, half, full_precision=True)
    assert loss == wanted and all(torch.equal(same[name], gradients[name]) for name in gradients)
    assert loss_and_gradients(1, half)[0] != wanted


@pytest.mark.parametrize(("version", "scale"), [(1, 2.0**40), slow(3, 2.0**20)])  # version 3 has its own optimizer
def test_float16_gradients_are_unscaled(version, scale, monkeypatch):
    """And a scale that overflows is halved until it does not."""
    monkeypatch.setattr(torch.amp.GradScaler, "get_scale", lambda scaler: scale)
    _, wanted = loss_and_gradients(1, MODEL)
    _, gradients = loss_and_gradients(version, [*MODEL, "--use-amp", "--amp-dtype", "float16"])
    assert max(relative_error(gradients[name], wanted[name]) for name in wanted) < 1e-2
