"""Version 3's --fp8: quantization against its definition, layers and training against float32 and bfloat16.

Rounding to e4m3 (3 bits of mantissa) moves a number by 2^-4 of itself at most, and by 2^-10 of a scale below the normal
numbers. Triton's interpreter loses the carry of a significand that rounds up to the next power of two (1.95 becomes 1.0
instead of 2.0): these tests convert with PyTorch's rounding there.
"""

import numpy as np
import pytest
import torch
from triton.runtime import interpreter

from common.versions import load_version
from kernel_cases import multiplies_fp8, normal
from training import train

V3 = load_version(3)
ULP = 2**-4


@pytest.fixture(autouse=True)
def rounding(monkeypatch):
    """Round to fp8 as GPUs do, in Triton's interpreter too."""
    convert = interpreter._convert_float

    def rounded(data, source, target, mode):
        if target.name != "fp8e4nv":
            return convert(data, source, target, mode)
        fp8 = torch.from_numpy(np.ascontiguousarray(data, dtype=np.float32)).to(torch.float8_e4m3fn)
        return fp8.view(torch.uint8).numpy()

    monkeypatch.setattr(interpreter, "_convert_float", rounded)


def assert_quantized(q, scale, exact):
    """Check q · scale against the float64 matrix, and that the largest number of a row uses the whole range."""
    largest = torch.finfo(q.dtype).max
    expected = exact.abs().amax(1, keepdim=True).clamp_min(1e-20) / largest
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
def test_quantized_weights(shape, device):
    """Both layouts of every matrix hold the same numbers, whatever the sizes of the matrices before it."""
    model = torch.nn.Sequential(*(V3.FP8Linear(k, n, bias=False) for n, k in (shape, shape[::-1], (16, 48))))
    model.to(device, torch.bfloat16)
    with torch.no_grad():
        model[0].weight[0] = 0
    V3.FP8Weights(model).update()
    for linear in model:
        assert_quantized(linear.w_q, linear.w_scale.view(-1, 1), linear.weight.detach().double())
        assert torch.equal(linear.w_q_t.view(torch.uint8), linear.w_q.view(torch.uint8).t())


@pytest.mark.parametrize("shape", [(16, 16), (37, 50), (96, 272)])
def test_transposition(shape, device):
    q, a = V3.quantize_rows(operand(*shape, device))
    assert torch.equal(V3.transpose_fp8(q).view(torch.uint8), q.view(torch.uint8).t())
    b = torch.rand(shape[0], 1, device=device)
    c = (a * b).max()
    weighted = V3.transpose_fp8(q, a, b, c).to(torch.float32).double().t()
    exact = q.to(torch.float32).double() * (a.double() * b / c)
    assert ((weighted - exact).abs() <= 1.001 * ULP * (exact.abs() + 2**-6)).all()


# Each operand carries an error of about 3 %; two matmuls and SwiGLU lie in a row.
@multiplies_fp8
@pytest.mark.parametrize("part", ["linear", "feed-forward"])
@pytest.mark.parametrize("tokens", [16, 80])
def test_layers_against_float32(tokens, part, device):
    """Outputs and all gradients of a linear layer and of the feed-forward part."""
    model = torch.nn.ModuleList(V3.FP8Linear(k, n, bias=False) for k, n in ((64, 192), (96, 64)))
    up, down = model.to(device, torch.bfloat16)
    V3.FP8Weights(model).update()
    x = normal(2, tokens // 2, 64).to(device, torch.bfloat16).requires_grad_()
    leaves = [x, up.weight] if part == "linear" else [x, up.weight, down.weight]
    exact = [leaf.detach().float().requires_grad_() for leaf in leaves]
    output, wanted = up(x), exact[0] @ exact[1].t()
    if part == "feed-forward":
        output = V3.FP8FeedForwardFunction.apply(x, up.weight, down.weight, up, down)
        wanted = V3.swiglu(*wanted.chunk(2, dim=-1)) @ exact[2].t()
    cotangent = normal(*output.shape, seed=1).to(output)
    grads = [output, *torch.autograd.grad(output, leaves, cotangent)]
    exact_grads = [wanted, *torch.autograd.grad(wanted, exact, cotangent.float())]
    for name, ours, theirs in zip(("y", "dx", "dup", "ddown"), grads, exact_grads, strict=False):
        assert (ours.double() - theirs.double()).norm() < 0.12 * theirs.double().norm(), name


SIZES = "--hidden-dim 32 --num-layers 1 --num-heads 2 --intermediate-dim 32 --vocab-size 20 --batch-size 2 --seq-len 16"
STEPS = 12


@multiplies_fp8
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
    for dtype, architectures in (formats | {None: "sm_80 gfx90a gfx1100"}).items():
        for architecture in architectures.split():
            assert V3.fp8_dtype(architecture) == dtype, architecture
