"""The guard of every autograd Function of version 3: contiguous tensors, their device, no wrong second derivative."""

import pytest
import torch

from common.measuring.guarded_memory import LAYOUTS, between_bands, launches
from common.versions import load_version, relative_error
from kernel_cases import as_tuple, fp8_layers, multiplies_fp8, normal

V1, V3 = load_version(1), load_version(3)
TWICE_DIFFERENTIABLE = ("RoPEFunction", "EmbeddingFunction")


def tables(T, D, device):
    return V3.rope_tables(T, D, 10000.0, device)


def of_fp8(function):
    """Return a call of an fp8 Function with x and weights, and with layers that hold these weights."""
    return lambda x, *w: function.apply(x, *w, *fp8_layers(V3, *((weight.detach(), (len(weight),)) for weight in w)))


# Name of a Function (and what is special) -> a call of it, and the shapes of the tensors that it differentiates.
FUNCTIONS = {
    "AddRMSNormFunction": (lambda x, b, w: V3.AddRMSNormFunction.apply(x, b, w, 1e-6), [(3, 5, 24), (3, 5, 24), (24,)]),
    "AddRMSNormFunction, nothing added": (
        lambda x, w: V3.AddRMSNormFunction.apply(x, None, w, 1e-6),
        [(15, 24), (24,)],
    ),
    "RoPEFunction": (lambda x: V3.RoPEFunction.apply(x, *tables(5, 16, x.device), 3, 1.0), [(2, 5, 4, 16)]),
    "SwiGLUFunction": (V3.SwiGLUFunction.apply, [(7, 24)]),
    "AttentionFunction": (lambda x: V3.AttentionFunction.apply(x, None, None, 2, 1), [(2, 7, 4, 16)]),
    "AttentionFunction, rotary": (
        lambda x: V3.AttentionFunction.apply(x, *tables(7, 16, x.device), 2, 1),
        [(2, 7, 4, 16)],
    ),
    "CrossEntropyFunction": (lambda x: V3.CrossEntropyFunction.apply(x, torch.arange(7, device=x.device)), [(7, 20)]),
    "LinearCrossEntropyFunction": (
        lambda x, w: V3.LinearCrossEntropyFunction.apply(x, w, torch.arange(7, device=x.device), 4),
        [(7, 12), (20, 12)],
    ),
    "EmbeddingFunction": (lambda w: V3.EmbeddingFunction.apply(torch.arange(6, device=w.device) % 4, w), [(5, 8)]),
    "FP8LinearFunction": (of_fp8(V3.FP8LinearFunction), [(2, 16, 32), (48, 32)]),
    "FP8FeedForwardFunction": (of_fp8(V3.FP8FeedForwardFunction), [(2, 16, 32), (96, 32), (32, 48)]),
}
NAMES = [pytest.param(name, marks=[multiplies_fp8] if "FP8" in name else []) for name in FUNCTIONS]
MULTIPLIES_ITS_INPUTS = "LinearCrossEntropyFunction"  # a BLAS may add in another order where tensors begin elsewhere
LAUNCHING = [case for case in NAMES if case.values != ("EmbeddingFunction",)]


def drawn(name, device):
    """Return a call of a Function and the tensors for it."""
    function, shapes = FUNCTIONS[name]
    dtype = torch.bfloat16 if "FP8" in name else torch.float32
    return function, [normal(*shape, seed=i, scale=0.5).to(device, dtype) for i, shape in enumerate(shapes)]


def results(function, tensors, cotangents=None, layout="contiguous"):
    """Return the outputs of a Function, the cotangents (drawn and laid out unless given), and the gradients."""
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    outputs = as_tuple(function(*leaves))
    if cotangents is None:
        cotangents = [between_bands(normal(*output.shape, seed=9).to(output), layout) for output in outputs]
    return outputs, cotangents, torch.autograd.grad(outputs, leaves, cotangents)


def test_every_function_is_here():
    types = {name: value for name, value in vars(V3).items() if isinstance(value, type)}
    found = {name for name, value in types.items() if issubclass(value, torch.autograd.Function)}
    assert found == {name.split(",")[0] for name in FUNCTIONS}


@pytest.mark.parametrize("layout", LAYOUTS[1:])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.quick(1, each="name")
def test_strided_tensors_give_the_same_results(name, layout, device):
    """Sliced, transposed and expanded inputs and gradients give what their contiguous copies give."""
    function, tensors = drawn(name, device)
    strided = [between_bands(tensor, layout) for tensor in tensors]
    outputs, cotangents, gradients = results(function, strided, layout=layout)
    packed = [[t.clone(memory_format=torch.contiguous_format) for t in group] for group in (strided, cotangents)]
    right_outputs, _, right_gradients = results(function, *packed)
    allowed = 1e-6 if name == MULTIPLIES_ITS_INPUTS else 0
    for result, right in zip([*outputs, *gradients], [*right_outputs, *right_gradients], strict=True):
        assert torch.equal(result, right) or relative_error(result, right) < allowed


@pytest.mark.parametrize("name", [case for case in NAMES if case.values[0] not in TWICE_DIFFERENTIABLE])
def test_a_second_derivative_is_refused(name, device):
    """A penalty on the gradients differentiates the backward: kernels have no formula for that."""
    function, tensors = drawn(name, device)
    leaves = [tensor.requires_grad_() for tensor in tensors]
    loss = sum(output.float().square().sum() for output in as_tuple(function(*(2 * leaf for leaf in leaves))))
    with pytest.raises(RuntimeError, match=f"{name.split(',')[0]} has no second derivative"):
        torch.autograd.grad(loss, leaves, create_graph=True)


@pytest.mark.parametrize("name", TWICE_DIFFERENTIABLE)
def test_a_second_derivative_is_right(name, device):
    function, (x,) = drawn(name, device)

    def define(x):
        if name == "EmbeddingFunction":
            return x[torch.arange(6, device=device) % 4]
        return torch.cat([V1.apply_rope(x[:, :, :3], *tables(5, 16, device)), x[:, :, 3:]], dim=2)

    def second(f):
        leaf = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(f(leaf).pow(3).sum(), leaf, create_graph=True)
        return torch.autograd.grad(gradient.square().sum(), leaf)[0]

    wanted = second(define)
    assert wanted.count_nonzero() and relative_error(second(function), wanted) < 1e-6


class Device:
    """Stand for torch.cuda.device_of, and note what is entered."""

    entered = []

    def __init__(self, tensor):
        self.device = tensor.device

    def __enter__(self):
        self.entered.append(self.device)

    def __exit__(self, *_):
        self.entered.pop()


@pytest.fixture
def launched(monkeypatch):
    """Return a list that gets (kernel, the devices that are entered) of each launch."""
    found = []
    monkeypatch.setattr(torch.cuda, "device_of", Device)
    with launches(lambda name: found.append((name, list(Device.entered)))):
        yield found


@pytest.mark.parametrize("name", LAUNCHING)
def test_kernels_are_launched_on_the_device_of_their_tensors(name, device, launched):
    """Triton launches on the current device, which need not be the one that holds the tensors."""
    function, tensors = drawn(name, device)
    results(function, tensors)
    assert len(launched) > 1 and all(devices and set(devices) == {tensors[0].device} for _, devices in launched)


def test_the_optimizer_launches_on_the_device_of_its_parameters(device, launched):
    parameter = torch.nn.Parameter(normal(4, 8).to(device))
    parameter.grad = torch.ones_like(parameter)
    V3.FusedAdamW([parameter], lr=0.1).step()
    assert launched == [("adamw_kernel", [parameter.device])]
