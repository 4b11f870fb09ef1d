"""Four versions of one model: the same weights, and the same gradient for every one of them, switch by switch."""

import contextlib
import functools
from unittest import mock

import pytest
import torch

from common.versions import SCRIPTS, load_version, loss_and_gradients, relative_error
from kernel_cases import launches

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # PyTorch's, of what its compiler uses

# No size is a power of two but the head's, which the attention kernel wants.
MODEL = "--hidden-dim 48 --num-layers 2 --num-heads 3 --num-kv-heads 1 --intermediate-dim 72 --vocab-size 50".split()
MODEL += "--seq-len 19 --batch-size 3".split()
GRADIENT_ERROR = 1e-4 if torch.cuda.is_available() else 1e-5
V2_SWITCHES = ("qkv-fusion", "flash-attention", "swiglu-fusion", "torch-compile")
V3_KERNELS = {
    "rmsnorm-kernel": {"rmsnorm_forward_kernel", "rmsnorm_backward_kernel", "column_sum_kernel"},
    "rope-kernel": {"rope_kernel"},
    "swiglu-kernel": {"swiglu_forward_kernel", "swiglu_backward_kernel"},
    "attention-kernel": {
        "attention_forward_kernel",
        "attention_backward_dq_kernel",
        "attention_backward_dkdv_kernel",
    },
    "loss-kernel": {"cross_entropy_forward_kernel", "cross_entropy_backward_kernel"},
    "optimizer-kernel": {"adamw_kernel"},
}


@functools.cache
def baseline():
    """Loss and gradients of version 1, which defines the model."""
    return loss_and_gradients(1, MODEL, step=1)


def assert_same_gradients(version, *switches):
    wanted_loss, wanted = baseline()
    loss, gradients = loss_and_gradients(version, [*MODEL, *switches], step=1)
    assert loss == pytest.approx(wanted_loss, rel=1e-6)
    assert gradients.keys() == wanted.keys()
    for name, gradient in gradients.items():
        assert gradient.isfinite().all() and gradient.count_nonzero(), name
        assert relative_error(gradient, wanted[name]) <= GRADIENT_ERROR, name


def test_every_weight_of_version_1_has_a_gradient():
    script = load_version(1)
    options = script.parse_options(MODEL)
    _, gradients = baseline()
    assert {name: g.shape for name, g in gradients.items()} == {
        name: w.shape for name, w in script.initial_weights(script.model_config(options), 0).items()
    }
    assert all(g.isfinite().all() and g.count_nonzero() for g in gradients.values())


@pytest.mark.parametrize("version", [2, 3, 4])
def test_every_gradient_equals_that_of_version_1(version):
    assert_same_gradients(version)


def compiled_without_a_compiler():
    """On a CPU, torch.compile traces and runs what it traced: the C++ that it would generate takes half a minute."""
    if torch.cuda.is_available():
        return contextlib.nullcontext()
    return mock.patch.object(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))


def only(switch, of):
    return [f"--{'enable' if other == switch else 'disable'}-{other}" for other in of]


@pytest.mark.parametrize("switch", [*V2_SWITCHES, None])
def test_fusions_of_version_2_each_alone(switch):
    with compiled_without_a_compiler():
        assert_same_gradients(2, *only(switch, V2_SWITCHES))


def test_fusions_of_version_2_all_together():
    with compiled_without_a_compiler():
        assert_same_gradients(2, "--enable-all-fusion")


def test_fusions_of_version_2_do_what_they_say():
    script = load_version(2)

    def model(*switches):
        options = script.parse_options([*MODEL, *switches])
        return script.build_model(options, options.device)

    fused, plain = model("--enable-all-fusion"), model(*only(None, V2_SWITCHES))
    assert {"qkv_proj", "gate_up_proj"} <= {name.split(".")[-2] for name, _ in fused.named_parameters()}
    assert not any("qkv" in name or "gate_up" in name for name, _ in plain.named_parameters())
    assert fused._compiled_call_impl is not None and plain._compiled_call_impl is None
    for built, fused_attention in ((fused, True), (plain, False)):
        with mock.patch.object(torch.nn.functional, "scaled_dot_product_attention") as attention:
            attention.side_effect = RuntimeError("called")
            with pytest.raises(RuntimeError, match="called") if fused_attention else contextlib.nullcontext():
                built.layers[0].attention(torch.zeros(1, 19, 48, device=fused.cos.device), fused.cos, fused.sin)


def launched(*switches):
    """Names of the kernels that one training step of version 3 launches."""
    script = load_version(3)
    options = script.parse_options([*MODEL, *switches, "--no-graph"])
    trainer, batch = script.Trainer(options), script.load_data(options).batch(0)
    with launches() as names:
        trainer.run(*batch)
    return names


@pytest.mark.parametrize("switch", V3_KERNELS)
def test_kernels_of_version_3_each_alone(switch):
    """Each on its own, and all but that one."""
    assert_same_gradients(3, *only(switch, V3_KERNELS))
    assert_same_gradients(3, f"--disable-{switch}")
    assert launched(*only(switch, V3_KERNELS)) == V3_KERNELS[switch]


def test_kernels_of_version_3_all_together():
    assert launched() == set().union(*V3_KERNELS.values())


@pytest.mark.parametrize("backend", load_version(4).SDPA_BACKENDS)
def test_every_attention_of_version_4(backend, device):
    if not load_version(4).can_run(backend, torch.float32, str(device), 19, 3, 1, 16):
        pytest.skip(f"the {backend} attention does not run in float32 on this device")
    assert_same_gradients(4, "--attention-backend", backend)


@pytest.mark.gpu
def test_version_4_with_flexible_attention():
    assert_same_gradients(4, "--attention-backend", "flex", "--enable-torch-compile")


def exact_gradients(version, argv):
    """Version 1's gradients computed in float64 throughout."""
    script = load_version(version)
    options = script.parse_options([*argv, "--no-graph"])
    model = script.build_model(options, options.device).double()
    tokens, labels = (tensor.to(options.device) for tensor in script.load_data(options).batch(1))
    script.compute_loss(model, tokens, labels, options).backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return script.canonical_views(gradients, script.model_config(options))


@pytest.mark.parametrize(("version", "dtype"), [(v, d) for v in (2, 3, 4) for d in ("bfloat16", "float16")])
def test_mixed_precision_is_as_good_as_plain_pytorch(version, dtype):
    """No further from float64 than twice version 1, which is plain PyTorch under autocast."""
    if version == 3 and dtype == "bfloat16" and not torch.cuda.is_available():
        pytest.skip("Triton's interpreter cannot multiply bfloat16")
    mixed = [*MODEL, "--use-amp", "--amp-dtype", dtype]
    exact = exact_gradients(1, MODEL)
    _, plain = loss_and_gradients(1, mixed, step=1)
    _, gradients = loss_and_gradients(version, mixed, step=1)
    assert gradients.keys() == exact.keys()
    for name, gradient in gradients.items():
        wanted = exact[name].cpu()
        assert gradient.isfinite().all() and gradient.count_nonzero(), name
        assert relative_error(gradient, wanted) <= 2 * relative_error(plain[name], wanted) + 1e-6, name


@pytest.mark.parametrize("version", SCRIPTS)
def test_same_seed_same_initial_weights(version):
    script = load_version(version)
    wanted = load_version(1).initial_weights(load_version(1).Config(50, 48, 2, 3, 1, 72), 5)
    for switches in ([], only(None, V2_SWITCHES) if version == 2 else ["--no-graph"]):
        options = script.parse_options([*MODEL, "--seed", "5", *switches])
        parameters = dict(script.build_model(options, options.device).named_parameters())
        weights = script.canonical_views(parameters, script.model_config(options))
        assert weights.keys() == wanted.keys()
        assert all(torch.equal(weight.cpu(), wanted[name]) for name, weight in weights.items())
    another = script.initial_weights(script.model_config(options), 6)
    assert not any(torch.equal(another[name], wanted[name]) for name in wanted if wanted[name].ndim == 2)


def test_initial_weights_are_as_documented():
    """Ones for the norms, N(0, 0.02) for the rest, every matrix of its own."""
    script = load_version(1)
    weights = script.initial_weights(script.Config(200, 64, 2, 4, 2, 128), 0)
    for name, weight in weights.items():
        if weight.ndim == 1:
            assert torch.equal(weight, torch.ones_like(weight)), name
        else:
            assert weight.std().item() == pytest.approx(0.02, rel=0.1), name
            assert abs(weight.mean().item()) < 0.002, name
    matrices = [weight.flatten()[:50] for weight in weights.values() if weight.ndim == 2]
    assert len({tuple(matrix.tolist()) for matrix in matrices}) == len(matrices)
