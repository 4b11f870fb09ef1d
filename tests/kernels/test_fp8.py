"""Version 3's --fp8: quantization against its definition, layers and training against float32 and bfloat16.

Rounding to e4m3 (3 bits of mantissa) moves a number by 2^-4 of itself at most, and by 2^-10 of a scale below the normal
numbers. Triton's interpreter loses the carry of a significand that rounds up to the next power of two (1.95 becomes 1.0
instead of 2.0): these tests convert with PyTorch's rounding there.
"""

import pytest
import torch

import kernel_cases
from common.measuring.guarded_memory import GuardedMemory
from common.versions import load_version
from kernel_cases import FP8_CASES, check, check_fp8_training, check_fp8_weights, fp8_layers, multiplies_fp8, normal
from training import train

V3 = load_version(3)
ULP = 2**-4
ALL_CASES = [(operation, name) for operation, cases in FP8_CASES.items() for name in cases]


@pytest.fixture(autouse=True)
def rounding():
    with kernel_cases.fp8_rounding():
        yield


@multiplies_fp8
@pytest.mark.parametrize(("operation", "name"), ALL_CASES)
@pytest.mark.quick(4, each="operation")
def test_outputs_and_gradients(operation, name, device):
    """Every row and column; also: no input changes, all is written, and nothing beside it."""
    check(V3, FP8_CASES[operation][name](), torch.bfloat16, device)


def row_errors(case, device):
    """Return {gradient: the relative error of each row against float64} of a case of the feed-forward part."""
    values = {name: tensor.to(device, torch.bfloat16) for name, tensor in case.inputs.items()}
    cotangents = {"y": case.gradient_scale * normal(*values["x"].shape, seed=1).to(device, torch.bfloat16)}
    found = kernel_cases.evaluate(lambda *inputs: case.call(V3, *inputs), case, dict(values), cotangents)
    doubles = (kernel_cases.in_double(tensors) for tensors in (values, cotangents))
    exact = kernel_cases.evaluate(case.define, case, *doubles)
    return {name: (found[name].double() - e).norm(dim=1) / e.norm(dim=1) for name, e in exact.items()}


@multiplies_fp8
@pytest.mark.parametrize("factor", [0, 1e-8, 1e-6, 1e-4])
@pytest.mark.parametrize("gradient_scale", [1e-8, 1.0])
@pytest.mark.quick(2)
def test_a_row_of_any_size_gets_its_gradient(factor, gradient_scale, device):
    """And the rows beside it, and dx, are as exact as without it; weights of 1e-3.

    Row 20 is of gate and row 150 of up: the gradients of their partners, rows 148 and 22, are about as small as they.
    """
    options = {"scale": 1e-3, "gradient_scale": gradient_scale}
    edits = {"up_edits": {20: factor, 150: factor}, "down_edits": {7: factor}}
    usual = row_errors(kernel_cases.fp8_feed_forward_case((64,), 64, 128, **options), device)
    errors = row_errors(kernel_cases.fp8_feed_forward_case((64,), 64, 128, **options, **edits), device)
    if factor < 1e-4:  # their partners count as zeros, or are rounded to one bit
        errors["dup"][[148, 22]] = 0.0
    for name in ("dx", "dup", "ddown"):
        assert usual[name].max() < 0.15, name  # 0.08 to 0.137 over eight sizes of the gradient
        assert errors[name].max() < 1.3 * usual[name].max(), name


@multiplies_fp8
@pytest.mark.parametrize("size", [1e-8, 1e-6, 1e-4, 1e-2, 1.0])
@pytest.mark.quick(2)
def test_a_zero_initialised_down_projection_is_trained(size, device):
    case = kernel_cases.fp8_feed_forward_case((64,), 64, 128, down_edits={(0, 64): 0}, gradient_scale=size)
    assert row_errors(case, device)["ddown"].max() < 0.1


@multiplies_fp8
def test_every_step_multiplies_by_its_weights(device):
    check_fp8_training(V3, device)


def assert_quantized(q, scale, exact):
    """Check q · scale against the float64 matrix, and that the largest number of a row uses the whole range."""
    largest = torch.finfo(q.dtype).max
    expected = exact.abs().amax(1, keepdim=True).clamp_min(1e-30) / largest
    torch.testing.assert_close(scale.double(), expected, rtol=1e-5, atol=0)
    error = (q.to(torch.float32).double() * scale - exact).abs()
    assert (error <= ULP * exact.abs() * 1.001 + 2**-6 * ULP * scale * 1.001).all()


def operand(rows, columns, device, seed=0):
    """Return a bfloat16 matrix with a row of zeros, a row of large and one of small numbers."""
    x = normal(rows, columns, seed=seed)
    x[0] = 0
    x[-1] *= 1e-4 if rows > 1 else 1
    x[rows // 2] *= 1e3
    return x.to(device, torch.bfloat16)


@pytest.mark.parametrize("shape", [(1, 16), (37, 48), (5, 100), (130, 16)])
@pytest.mark.parametrize("scaled", [False, True])
def test_quantized_rows(shape, scaled, device):
    x, factor = operand(*shape, device), torch.rand(1, shape[1], device=device) + 0.5 if scaled else None
    q, scale = V3.quantize_rows(x, factor)
    assert_quantized(q, scale, x.double() * (factor.double() if scaled else 1))


def test_quantized_swiglu(device):
    """Forward and backward, of rows that no tile divides, against float64."""
    rows, width = 19, 50
    h, dy = operand(rows, 2 * width, device), operand(rows, width, device, seed=1)
    factor = torch.rand(1, 2 * width, device=device) + 0.5
    (y, y_scale), (dh, dh_scale) = (V3.empty_fp8(rows, n * width, h.device) for n in (1, 2))
    limit = torch.finfo(y.dtype).max
    V3.launch_tiles(V3.swiglu_quantize_kernel, rows, width, h, y, y_scale, limit, whole_row=True)
    arguments = (dy, h, factor, dh, dh_scale, limit)
    V3.launch_tiles(V3.swiglu_backward_quantize_kernel, rows, width, *arguments, whole_row=True)
    exact = h.double().requires_grad_()
    output = V3.swiglu(*exact.chunk(2, dim=-1))
    output.backward(dy.double())
    assert_quantized(y, y_scale, output.detach())
    assert_quantized(dh, dh_scale, exact.grad * factor.double())


@pytest.mark.parametrize("shape", [(16, 16), (48, 144), (112, 32), (64, 256), (256, 1024)])
@pytest.mark.quick(2)
def test_quantized_weights(shape, device):
    """Both layouts of every matrix hold the same numbers, whatever the sizes of the matrices before it."""
    zeros = torch.zeros(16, 48)
    weights = [normal(*shape, seed=1), normal(*shape[::-1], seed=2), zeros, normal(80, 48, seed=3)]
    weights = [weight.to(device, torch.bfloat16) for weight in weights]
    weights[0][0] = 0
    weights[1][-1] *= 1e-4
    weights[3][:64] *= 1e-5
    parts = [shape[:1], shape[1:], (16,), (32, 32, 16)]
    with GuardedMemory() as memory:
        layers = fp8_layers(V3, *zip(weights, parts, strict=True))
    kernel_cases.check_bands(memory.tensors)
    for layer, weight in zip(layers, weights, strict=True):
        check_fp8_weights(layer, weight)


@pytest.mark.parametrize("shape", [(16, 16), (37, 50), (96, 272)])
def test_transposition(shape, device):
    q, a = V3.quantize_rows(operand(*shape, device))
    assert torch.equal(V3.transpose_fp8(q).view(torch.uint8), q.view(torch.uint8).t())
    b = torch.rand(shape[0], 1, device=device)
    c = (a * b).max()
    weighted = V3.transpose_fp8(q, a, b, c).to(torch.float32).double().t()
    exact = q.to(torch.float32).double() * (a.double() * b / c)
    assert ((weighted - exact).abs() <= 1.001 * ULP * (exact.abs() + 2**-6)).all()


# ---------------------------------------------------------------- what is refused


def refuse(capsys, *argv):
    """Return the sentence that refuses these options beside those of --fp8."""
    with pytest.raises(SystemExit):
        V3.parse_options([*"--fp8 --use-amp --disable-attention-kernel".split(), *argv])
    sentence = capsys.readouterr().err
    assert sentence.count("\n") == 1
    return sentence.strip()


def test_an_ablation_of_swiglu_is_refused(capsys):
    """The kernels of --fp8 compute SwiGLU themselves: switching its kernel off would change nothing."""
    assert "--fp8 must have the swiglu kernel" in refuse(capsys, "--disable-swiglu-kernel")


class Refused(Exception):
    """An error of a type that nobody foresees."""


@pytest.mark.parametrize("error", [RuntimeError, ValueError, NotImplementedError, AttributeError, TypeError, Refused])
@pytest.mark.parametrize("message", ["not for this device\nException raised from somewhere", ""])
def test_a_matmul_that_fails_is_one_sentence(message, error, monkeypatch, capsys):
    """Some GPUs, and some builds of PyTorch for others, have no fp8 matmul with a scale per row."""

    def fails(*_):
        raise error(message)

    monkeypatch.setattr(V3, "fp8_matmul", fails)
    sentence = refuse(capsys)
    assert "leave out --fp8: it needs fp8 matmuls with a scale per row" in sentence
    assert sentence.endswith(": not for this device" if message else f": {error.__name__}")


@pytest.mark.parametrize("result", [float("nan"), 16.0, 96.0, 8.0])
def test_a_matmul_that_is_wrong_is_refused(result, monkeypatch, capsys):
    """Without the scales the sums are 16, with those of one operand alone 96 or 8."""
    monkeypatch.setattr(V3, "fp8_matmul", lambda *_: torch.full((16, 16), result))
    assert refuse(capsys).endswith("computes wrong")


@pytest.mark.parametrize("architecture", ["sm_80", "gfx90a", "gfx1100"])
def test_a_gpu_without_fp8_is_refused(architecture, monkeypatch, capsys):
    monkeypatch.setattr(V3, "gpu_architecture", lambda device: architecture)
    assert refuse(capsys).endswith(f"which {architecture} does not have")


SIZES = "--hidden-dim 32 --num-layers 1 --num-heads 2 --intermediate-dim 32 --vocab-size 20 --batch-size 2 --seq-len 16"
STEPS = 12


@multiplies_fp8
@pytest.mark.slow
def test_training_stays_near_bfloat16(device):
    """The loss falls as in bfloat16, and every parameter gets a gradient."""
    argv = f"{SIZES} --learning-rate 0.01 --warmup-steps 0 --no-graph --use-amp".split()
    if device.type == "cpu":
        argv += [f"--disable-{name}-kernel" for name in ("attention", "rmsnorm", "rope", "loss")]
    (bf16, _), (fp8, trainer) = train(3, argv, STEPS), train(3, [*argv, "--fp8"], STEPS)
    assert V3.parameters_trained(trainer) == sum(p.numel() for p in trainer.model.parameters())
    assert bf16[-1] < bf16[0] - 0.5 and fp8 != bf16
    assert abs(sum(fp8[-5:]) - sum(bf16[-5:])) < 0.05 * sum(bf16[-5:])


def test_format_of_each_gpu():
    formats = {torch.float8_e4m3fn: "sm_89 sm_90 sm_100 gfx950 gfx1201", torch.float8_e4m3fnuz: "gfx942"}
    for dtype, architectures in (formats | {None: "sm_80 sm_88 gfx90a gfx1100"}).items():
        for architecture in architectures.split():
            assert V3.fp8_dtype(architecture) == dtype, architecture
