"""Attention in 16 bits at more than 1,024 tokens, and the row sums that its kernels hand on in float32."""

import math

import pytest
import torch
from test_mutants import Mutant, load_source, mutate, tree

from common.measuring.guarded_memory import GuardedMemory
from common.versions import load_version, relative_error
from kernel_cases import Wrong, attention_case, cast, check, evaluate, in_double, random_cotangents

V3 = load_version(3)
DTYPE = torch.bfloat16 if torch.cuda.is_available() else torch.float16  # Triton's interpreter has no bfloat16 dot
H, K, D = 2, 1, 16
# Errors against float64 as multiples of plain PyTorch's in the same dtype. Plain PyTorch rounds scores and weights,
# the kernels do not. Measured in float16 on a CPU: 0.97, 1.09, 0.63, 0.56.
BOUNDS = {"o": 1.3, "dq": 1.4, "dk": 0.9, "dv": 0.8}
SHOWS = 500  # tokens, after which a sum in 16 bits has 1.3 to 1.7 times the error that is allowed


def check_long(script, T, device):
    """Raise Wrong where a result is further from float64 than BOUNDS allow."""
    case = attention_case(1, T, H, K, D)
    case.inputs["qkv"][:, :, H + K :] += 1.0  # a sum over all keys is as large as it is long
    given = cast(case, {name: tensor.to(device) for name, tensor in case.inputs.items()}, DTYPE)
    cotangents = random_cotangents(case, given)
    results = evaluate(lambda qkv: case.call(script, qkv), case, dict(given), cotangents)
    plain = evaluate(case.define, case, {name: tensor.detach() for name, tensor in given.items()}, cotangents)
    exact = evaluate(case.define, case, in_double(given), in_double(cotangents))
    for name, bound in BOUNDS.items():
        ratio = relative_error(results[name], exact[name]) / relative_error(plain[name], exact[name])
        if not ratio <= bound:
            raise Wrong(f"{name}: {ratio:.2f} times plain PyTorch's error, allowed {bound}")


def row_sums(script, T, device):
    """Return lse and Δ [B, H, T] of a forward and backward, each with its value in float64 from the same inputs."""
    case = attention_case(2, T, H, K, D, scale=2.0)
    qkv = case.inputs["qkv"].to(device, DTYPE).requires_grad_()
    with GuardedMemory() as memory:
        o = script.flash_attention(qkv, H, K)
        do = torch.randn(o.shape, generator=torch.Generator().manual_seed(1)).to(o)
        o.backward(do)
    lse, delta = (tensor for tensor in memory.tensors if tensor.shape == (2, H, T) and tensor.dtype == torch.float32)
    q, k, _ = qkv.detach().double().split([H, K, K], dim=2)
    scores = torch.einsum("bthd,bsd->bhts", q, k[:, :, 0]) / math.sqrt(D)
    scores = scores.masked_fill(torch.ones(T, T, dtype=torch.bool, device=device).triu(1), -math.inf)
    exact_delta = (o.detach().double() * do.double()).sum(-1).transpose(1, 2)
    return (lse.double(), scores.logsumexp(-1) / math.log(2)), (delta.double(), exact_delta)


def check_row_sums(script, device):
    """Raise Wrong unless lse, in units of log 2, and Δ = Σ do · o are float32 sums, rounded nowhere to 16 bits."""
    for name, (found, exact) in zip(("lse", "delta"), row_sums(script, 70, device), strict=True):
        error = relative_error(found, exact)
        if not error <= 5e-6:  # measured on a CPU: 6e-8 and 5e-8
            raise Wrong(f"{name}: relative error {error:.1e}")


def test_row_sums_are_float32(device):
    check_row_sums(V3, device)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="the bounds are those of the interpreter")
@pytest.mark.parametrize("T", [SHOWS, 1100])
def test_long_sequences_in_16_bits(T, device):
    check_long(V3, T, device)


@pytest.mark.gpu
@pytest.mark.parametrize("T", [1024, 1100, 4096])
def test_long_sequences_on_a_gpu(T, device):
    """In bfloat16, with several key/value heads: at most twice plain PyTorch's error."""
    for dtype in (torch.bfloat16, torch.float16):
        check(V3, attention_case(1, T, 8, 4, 64, rotated=True), dtype, device)


ROW_SUM_MUTANTS = {
    "delta from a 16-bit product": Mutant(
        "attention_backward_dq_kernel", "do.to(tl.float32) * o.to(tl.float32)", "(do * o).to(tl.float32)"
    ),
    "delta rounded to 16 bits": Mutant(
        "attention_backward_dq_kernel", "store(delta_ptr + row, delta, query < T)",
        "store(delta_ptr + row, delta.to(tl.float16).to(tl.float32), query < T)",
    ),
    "lse from a sum in 16 bits": Mutant(
        "attention_forward_kernel", "tl.log2(l)", "tl.log2(l.to(tl.float16).to(tl.float32))"
    ),
}  # fmt: skip
LONG_MUTANTS = {
    "o summed in 16 bits": Mutant(
        "attention_forward_kernel",
        "tl.dot(P.to(v.dtype), v, o * alpha[:, None], input_precision=PRECISION)",
        "tl.dot(P.to(v.dtype), v, o * alpha[:, None], input_precision=PRECISION).to(tl.float16).to(tl.float32)",
    ),
    "dk summed in 16 bits": Mutant(
        "attention_backward_dkdv_kernel",
        "tl.dot(dS.to(q.dtype), q, dk, input_precision=PRECISION)",
        "tl.dot(dS.to(q.dtype), q, dk, input_precision=PRECISION).to(tl.float16).to(tl.float32)",
    ),
    "dv summed in 16 bits": Mutant(
        "attention_backward_dkdv_kernel",
        "tl.dot(P.to(do.dtype), do, dv, input_precision=PRECISION)",
        "tl.dot(P.to(do.dtype), do, dv, input_precision=PRECISION).to(tl.float16).to(tl.float32)",
    ),
    "l summed in 16 bits": Mutant(
        "attention_forward_kernel", "l = l * alpha + tl.sum(P, 1)",
        "l = (l * alpha + tl.sum(P, 1)).to(tl.float16).to(tl.float32)",
    ),
}  # fmt: skip


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter shows the same")
@pytest.mark.parametrize("mistake", ROW_SUM_MUTANTS)
@pytest.mark.quick(1)
def test_a_rounded_row_sum_is_caught(mistake, tmp_path, device):
    mutant = load_source(mutate(tree(), ROW_SUM_MUTANTS[mistake]), tmp_path)
    with pytest.raises(Wrong):
        check_row_sums(mutant, device)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter shows the same")
@pytest.mark.parametrize("mistake", LONG_MUTANTS)
def test_a_sum_in_16_bits_is_caught(mistake, tmp_path, device):
    mutant = load_source(mutate(tree(), LONG_MUTANTS[mistake]), tmp_path)
    with pytest.raises(Wrong):
        check_long(mutant, SHOWS, device)
