"""Version 3's operations as cases: their inputs, the definition they must meet, and the judgement of what they return.

`check(script, case, dtype, device)` runs a case through the kernels of a script, through plain PyTorch in the same
dtype and through plain PyTorch in float64, and raises Wrong unless every output and every gradient is as close to
float64 as plain PyTorch is: at most twice its error, plus 1e-6.

Inputs, and what the kernels allocate, lie between guard bands, see common/measuring/guarded_memory.py.
"""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from triton.runtime import interpreter

from common.measuring.accuracy import allowed
from common.measuring.guarded_memory import GuardedMemory, between_bands, bits, stray_store
from common.versions import load_version, relative_error

ALL_DTYPES = [torch.float32, torch.float16, torch.bfloat16]
DTYPES = ALL_DTYPES if torch.cuda.is_available() else ALL_DTYPES[:2]  # Triton's interpreter multiplies no bfloat16
multiplies_fp8 = pytest.mark.skipif(
    not torch.cuda.is_available() and torch.__version__ < (2, 13),
    reason="PyTorch before 2.13 multiplies no fp8 rows on a CPU",
)


class Wrong(AssertionError):
    """A kernel returned something else than its definition says, or touched what it must not."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One call of one operation; call(script, *inputs, *constants) and define(*inputs, *constants) return its outputs.

    inputs are differentiated, in the dtype of the check (float32 for those in `wide`); constants are not, and are
    float32 or integers. unused: outputs without a cotangent.
    gradient_scale: of the cotangents, which are drawn from N(0, 1).
    plain: the definition in plain PyTorch with the rounding of fp8; with it every row and column is judged by itself.
    parts: result -> (names, sizes, dimension) splits a packed result, so that each part has an error of its own.
    layouts: how an input, a constant or the cotangents ("cotangents") lie in memory, one of LAYOUTS.
    gpu_tiles: with six programs, and the tiles of a GPU instead of the interpreter's large ones, so that one program
    does the work of several.
    """

    call: Callable
    define: Callable
    names: tuple[str, ...]
    inputs: dict[str, torch.Tensor]
    constants: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    wide: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    parts: dict[str, tuple] = dataclasses.field(default_factory=dict)
    layouts: dict[str, str] = dataclasses.field(default_factory=dict)
    gpu_tiles: bool = False
    plain: Callable | None = None
    gradient_scale: float = 1.0


def attention_tile_of(script, small, large):
    """Return a stub for attention_tiles: a tile is longer where its kernel keeps rows in registers."""

    def attention_tiles(computes, *_):
        if computes == "dkdv":
            return (script.Tile(small, large, 4, 1),)
        return (script.Tile(large, small, 4, 1),)

    return attention_tiles


def gpu_tiles(script, device):
    """Return a context with six programs for all the work, and on a CPU the tiles of a GPU."""
    stubs = {"program_count": lambda device: 6}
    if device.type == "cpu":  # where attention's tiles cannot be tuned
        stubs |= {"gpu_architecture": lambda device: "gfx950", "attention_tiles": attention_tile_of(script, 32, 64)}
    return mock.patch.multiple(script, **stubs)


# ---------------------------------------------------------------- judgement


def as_tuple(outputs):
    return outputs if isinstance(outputs, tuple) else (outputs,)


def evaluate(function, case, tensors, cotangents):
    """Return {name: tensor} of a function's outputs and gradients, packed ones in their parts."""
    inputs = [tensors[name].requires_grad_() for name in case.inputs]
    outputs = as_tuple(function(*inputs, *(tensors[name] for name in case.constants)))
    outputs = dict(zip(case.names, outputs, strict=True))
    used = [outputs[name] for name in cotangents]
    gradients = torch.autograd.grad(used, inputs, list(cotangents.values()), materialize_grads=True)
    gradients = {f"d{name}": gradient for name, gradient in zip(case.inputs, gradients, strict=True)}
    parts = {}
    for name, tensor in ({name: output.detach() for name, output in outputs.items()} | gradients).items():
        names, sizes, dimension = case.parts.get(name, ((name,), None, 0))
        parts.update(zip(names, tensor.split(sizes, dimension) if sizes else (tensor,), strict=True))
    return parts


def judge(name, result, plain, exact, extra=0.0):
    """Return a result's relative error; raise Wrong if it exceeds twice plain PyTorch's, plus 1e-6 and extra."""
    if result.shape != plain.shape or result.dtype != plain.dtype:
        raise Wrong(f"{name} is {result.dtype} {tuple(result.shape)}, not {plain.dtype} {tuple(plain.shape)}")
    missing = (result.isnan() & ~plain.isnan()).nonzero().tolist()
    if missing:
        raise Wrong(f"{name}: {len(missing)} of {result.numel()} elements are NaN or never written, first {missing[0]}")
    error, bound = relative_error(result, exact), allowed(relative_error(plain, exact), 1e-6 + extra)
    if not error <= bound:
        worst = (result.double() - exact).abs().flatten().argmax().item()
        raise Wrong(
            f"{name}: relative error {error:.2e}, allowed {bound:.2e}; worst at flat index {worst} of "
            f"{tuple(result.shape)}: {result.flatten()[worst]:.8g} instead of {exact.flatten()[worst]:.8g}"
        )
    return error


def judge_rows(name, result, plain, exact):
    """Return a result's relative error; raise Wrong where a row's or a column's exceeds twice plain PyTorch's + 0.1 %.

    Rows have errors of their own in fp8: a whole tensor's error does not show that one row is lost.
    """
    whole = judge(name, result, plain, exact)
    shape = (-1, exact.shape[-1])
    result, plain, exact = (tensor.reshape(shape).double() for tensor in (result, plain, exact))
    for axis, each in ((1, "row"), (0, "column")):
        error = (result - exact).norm(dim=axis)
        size = exact.norm(dim=axis)
        bound = 2 * (plain - exact).norm(dim=axis) + 1e-3 * size
        wrong = (error > bound).nonzero().flatten().tolist()
        if wrong:
            errors = (error / size.clamp_min(1e-300))[wrong[0]]
            raise Wrong(f"{name}: {len(wrong)} {each}s are wrong, {each} {wrong[0]} by {errors:.2e} of its size")
    return whole


def cast(case, tensors, dtype):
    """Convert tensors to the dtype of a run; constants and wide inputs have float32 beside 16-bit ones."""
    wide = {*case.wide, *case.constants}
    dtypes = {name: torch.promote_types(dtype, torch.float32) if name in wide else dtype for name in tensors}
    return {name: t.to(dtypes[name]) if t.is_floating_point() else t for name, t in tensors.items()}


def random_cotangents(case, values):
    """Return a cotangent in its layout for every output that is used."""
    generator, layout = torch.Generator().manual_seed(1), case.layouts.get("cotangents", "contiguous")
    with torch.no_grad():
        outputs = dict(zip(case.names, as_tuple(case.define(*values.values())), strict=True))
    scale = case.gradient_scale
    drawn = {name: scale * torch.randn(output.shape, generator=generator) for name, output in outputs.items()}
    drawn = {name: cotangent.to(outputs[name]) for name, cotangent in drawn.items()}
    return {name: between_bands(cotangent, layout) for name, cotangent in drawn.items() if name not in case.unused}


def in_double(tensors):
    return {name: t.detach().double() if t.is_floating_point() else t for name, t in tensors.items()}


def check_untouched(tensors, copies):
    for name, tensor in tensors.items():
        if not torch.equal(bits(tensor), bits(copies[name])):
            raise Wrong(f"{name} was overwritten")


def check_bands(tensors):
    for tensor in tensors:
        if found := stray_store(tensor):
            raise Wrong(f"a tensor {tuple(tensor.shape)}: {found}")


def check(script, case, dtype, device):
    """Return {result: its relative error}; raise Wrong unless the script's kernels do what the case defines."""
    given = {name: tensor.to(device) for name, tensor in (case.inputs | case.constants).items()}
    given = {n: between_bands(t, case.layouts.get(n, "contiguous")) for n, t in cast(case, given, dtype).items()}
    values = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in given.items()}
    cotangents = random_cotangents(case, values)
    copies = values | {name: tensor.clone() for name, tensor in cotangents.items()}
    plain = evaluate(case.plain or case.define, case, values, cotangents)
    exact = evaluate(case.define, case, in_double(values), in_double(cotangents))
    tiles = gpu_tiles(script, device) if case.gpu_tiles else contextlib.nullcontext()
    overflow = np.errstate(over="ignore")  # of an exponential; the scripts ignore it in the interpreter, too
    with overflow, tiles, GuardedMemory() as memory:
        results = evaluate(functools.partial(case.call, script), case, given, cotangents)
    check_bands([*memory.tensors, *given.values(), *cotangents.values()])
    check_untouched(given | cotangents, copies)
    judged = judge_rows if case.plain else judge
    return {name: judged(name, results[name], plain[name], exact[name]) for name in exact}


# ---------------------------------------------------------------- operations: version 1's functions define them


def normal(*shape, scale=1.0, seed=0):
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def norm_case(*shape, branch=True, eps=1e-6, scale=1.0, **options):
    """Return a case of add_rms_norm of [..., C]; without a branch nothing is added."""

    def define(x, *others):
        x = x + others[0] if branch else x
        return x, load_version(1).rms_norm(x, others[-1], eps)

    def call(script, x, *others):
        return script.add_rms_norm(x, others[0] if branch else None, others[-1], eps)

    added = {"branch": normal(*shape, scale=scale, seed=1)} if branch else {}
    inputs = {"residual": normal(*shape, scale=scale), **added, "w": 1 + normal(shape[-1], seed=2)}
    return Case(call, define, ("x", "y"), inputs, **options)


def check_column_sums(script, device):
    """Check column_sum_kernel on more rows than a tile has."""
    x, sums = normal(300, 24).to(device), torch.empty(24, device=device)
    script.column_sum_kernel[(3,)](x, sums, 300, 24, 128, 8)
    error = relative_error(sums.cpu(), x.cpu().double().sum(0))
    if not error < 1e-6:
        raise Wrong(f"column_sum_kernel: relative error {error:.1e}")


def rope_tables(T, D):
    return dict(zip(("cos", "sin"), load_version(1).rope_tables(T, D, 10000.0, "cpu"), strict=True))


def rope_case(B, T, H, K, D, rotated=None, scale=1.0, **options):
    """Return a case of rope of [B, T, H + 2K, D], whose first H + K heads are rotated."""
    heads, rotated = H + 2 * K, H + K if rotated is None else rotated

    def define(x, cos, sin):
        return torch.cat([load_version(1).apply_rope(x[:, :, :rotated], cos, sin), x[:, :, rotated:]], dim=2)

    def call(script, x, cos, sin):
        return script.rope(x, cos, sin, rotated)

    x, sizes, parts = normal(B, T, heads, D, scale=scale), [rotated, heads - rotated], {}
    if all(sizes):
        parts = {"y": (("rotated", "copied"), sizes, 2), "dx": (("drotated", "dcopied"), sizes, 2)}
    return Case(call, define, ("y",), {"x": x}, rope_tables(T, D), parts=parts, **options)


def swiglu_case(*shape, width, scale=1.0, **options):
    """Return a case of packed_swiglu of [..., 2 x width]."""

    def define(x):
        return load_version(1).swiglu(*x.chunk(2, dim=-1))

    inputs = {"x": normal(*shape, 2 * width, scale=scale)}
    parts = {"dx": (("dgate", "dup"), [width, width], -1)}
    return Case(lambda script, x: script.packed_swiglu(x), define, ("y",), inputs, parts=parts, **options)


def attention_case(B, T, H, K, D, rotated=False, scale=1.0, value_scale=1.0, **options):
    """Return a case of causal attention of H query and K key/value heads, packed as [B, T, H + 2K, D].

    rotated: rotary_attention, which rotates q and k first. scale: of queries and keys.
    """

    def define(qkv, *tables):
        query, key, value = qkv.split([H, K, K], dim=2)
        if rotated:
            query, key = (load_version(1).apply_rope(x, *tables) for x in (query, key))
        return load_version(1).causal_attention(query, key, value)

    def call(script, qkv, *tables):
        return (script.rotary_attention if rotated else script.flash_attention)(qkv, *tables, H, K)

    # The only token of a sequence sees itself alone: dq and dk are zero but for rounding, and have no relative error.
    parts = {"dqkv": (("dq", "dk", "dv"), [H, K, K], 2)} if T > 1 else {}
    qkv = normal(B, T, H + 2 * K, D, scale=scale)
    qkv[:, :, H + K :] *= value_scale / scale
    return Case(call, define, ("o",), {"qkv": qkv}, rope_tables(T, D) if rotated else {}, parts=parts, **options)


def loss_case(*shape, V, scale=3.0, offset=0.0, first=0.0, masked=0, ignored=0, **options):
    """Return a case of cross_entropy of logits [..., V]: normal · scale + offset, and `first` on top of the first.

    masked: so many logits of each row are -inf, the first ones in the even rows and the last ones in the odd rows.
    ignored: so many rows have the label -100.
    """

    def define(logits, labels):
        logits = load_version(1).at_least_float32(logits)
        return F.cross_entropy(logits.flatten(0, -2), labels.flatten())

    labels = torch.randint(0, V, shape, generator=torch.Generator().manual_seed(1))
    logits = normal(*shape, V, scale=scale) + offset
    logits[..., 0] += first
    if masked:
        logits[::2, :masked] = -math.inf
        logits[1::2, -masked:] = -math.inf
        labels = labels.clamp(masked, V - masked - 1)
    labels[:ignored] = -100
    inputs = {"logits": logits}, {"labels": labels}
    return Case(lambda script, *given: script.cross_entropy(*given), define, ("loss",), *inputs, **options)


def linear_loss_case(*shape, C, V, chunk, ignored=0, **options):
    """Return a case of linear_cross_entropy of x [..., C] and w [V, C]; so many rows have the label -100."""

    def define(x, w, labels):
        logits = load_version(1).at_least_float32(F.linear(x, w))
        return F.cross_entropy(logits.flatten(0, -2), labels.flatten())

    labels = torch.randint(0, V, shape, generator=torch.Generator().manual_seed(1))
    labels.view(-1)[:ignored] = -100
    inputs = {"x": normal(*shape, C), "w": normal(V, C, scale=C**-0.5, seed=2)}, {"labels": labels}
    return Case(
        lambda script, *given: script.linear_cross_entropy(*given, chunk), define, ("loss",), *inputs, **options
    )


def embedding_case(V):
    """Return a case of the embedding of tokens that occur often, once and never."""
    tokens = torch.randint(0, max(1, V // 2), (3, 50), generator=torch.Generator().manual_seed(0))
    inputs = {"w": normal(V, 24)}, {"tokens": tokens}
    return Case(lambda script, w, t: script.EmbeddingFunction.apply(t, w), lambda w, t: w[t], ("x",), *inputs)


def attention_cases(**options):
    """Return the cases of attention; small ones first, which a wrong kernel fails soonest."""
    case = functools.partial(functools.partial, attention_case, **options)
    return {
        "sharp": case(1, 40, 2, 1, 32, scale=3.0),
        "eight queries a key": case(1, 37, 8, 1, 16),
        "one token": case(3, 1, 4, 1, 64),
        "small values": case(1, 33, 4, 2, 16, scale=1e-3, value_scale=1e-3),
        "whole tiles": case(1, 64, 2, 2, 16),
        "large heads": case(1, 70, 2, 1, 128),
        "ragged": case(2, 70, 4, 2, 32),
        "three tiles": case(1, 130, 1, 1, 16),
        "tiles of a GPU": case(1, 75, 4, 1, 64, gpu_tiles=True),
    }


# Operation -> name -> function that makes the case, a small one first. Each operation has a size for every axis that no
# tile divides, one with more work than programs, a single token or row, and more than one sequence.
CASES = {
    "embedding": {"40 tokens": lambda: embedding_case(40), "one token": lambda: embedding_case(1)},
    "add_rms_norm": {
        "large epsilon": lambda: norm_case(4, 24, eps=0.5),
        "ragged": lambda: norm_case(37, 100),
        "more rows than programs": lambda: norm_case(3, 100, 100, gpu_tiles=True),
        "one row": lambda: norm_case(1, 1, 16),
        "one column": lambda: norm_case(5, 1),
        "long rows": lambda: norm_case(3, 2500),
        "nothing added": lambda: norm_case(2, 5, 48, branch=False),
        "small values": lambda: norm_case(4, 64, scale=1e-3),
        "denormal values": lambda: norm_case(4, 64, scale=1e-39, eps=1e-5),
        "large values": lambda: norm_case(4, 64, scale=1e3),
        "float32 weight": lambda: norm_case(6, 40, wide=("w",)),
        "float32 weight, nothing added": lambda: norm_case(60, 40, branch=False, wide=("w",)),
        "sum not used": lambda: norm_case(3, 24, unused=("x",)),
        "norm not used": lambda: norm_case(3, 24, unused=("y",)),
    },
    "rope": {
        "odd number of pairs": lambda: rope_case(2, 9, 8, 1, 6),
        "ragged": lambda: rope_case(2, 37, 3, 3, 32),
        "more tokens than programs": lambda: rope_case(2, 21, 4, 1, 64, gpu_tiles=True),
        "more heads than a tile": lambda: rope_case(1, 5, 40, 3, 64, gpu_tiles=True),
        "one token": lambda: rope_case(2, 1, 2, 1, 16),
        "all heads": lambda: rope_case(1, 5, 4, 2, 16, rotated=8),
        "no head": lambda: rope_case(1, 5, 4, 2, 16, rotated=0),
        "denormal values": lambda: rope_case(2, 9, 2, 1, 16, scale=1e-39),
        "large values": lambda: rope_case(2, 9, 2, 1, 16, scale=1e4),
    },
    "packed_swiglu": {
        "one token": lambda: swiglu_case(1, 1, width=8),
        "ragged": lambda: swiglu_case(37, width=50),
        "wider than a tile": lambda: swiglu_case(2, 5, width=2100, gpu_tiles=True),
        "more rows than a tile": lambda: swiglu_case(130, width=33, gpu_tiles=True),
        "large values": lambda: swiglu_case(3, 11, width=16, scale=20.0),
        "gates whose exponential overflows": lambda: swiglu_case(3, 11, width=16, scale=60.0),
        "denormal values": lambda: swiglu_case(3, 11, width=16, scale=1e-20),
    },
    "flash_attention": attention_cases(),
    "rotary_attention": attention_cases(rotated=True),
    "cross_entropy": {
        "ragged": lambda: loss_case(37, V=50),
        "one row": lambda: loss_case(1, 1, V=7),
        "longer than a tile": lambda: loss_case(3, V=70000),
        "more rows than a tile": lambda: loss_case(2, 9, V=1000, gpu_tiles=True),
        "several tiles of a GPU": lambda: loss_case(5, V=9000, gpu_tiles=True),
        "largest in the first tile": lambda: loss_case(5, V=5000, gpu_tiles=True, first=200.0),
        "tiles of -inf": lambda: loss_case(4, V=13000, gpu_tiles=True, masked=4500),
        "confident": lambda: loss_case(20, V=30, scale=50.0),
        "far from zero": lambda: loss_case(20, V=30, offset=1000.0),
        "so far that m + log(l) rounds": lambda: loss_case(20, V=30, offset=30000.0),
        "below zero, all alike": lambda: loss_case(4, 5, V=300, offset=-100.0, scale=1e-3),
        "rows ignored": lambda: loss_case(37, V=50, ignored=9),
    },
    "linear_cross_entropy": {
        "ragged chunks": lambda: linear_loss_case(2, 37, C=24, V=50, chunk=16),
        "one chunk": lambda: linear_loss_case(37, C=24, V=50, chunk=2048),
        "one row": lambda: linear_loss_case(1, 1, C=16, V=7, chunk=2048),
        "a whole chunk ignored": lambda: linear_loss_case(3, 20, C=16, V=70, chunk=8, ignored=19),
        "several tiles of a GPU": lambda: linear_loss_case(11, C=40, V=9000, chunk=4, gpu_tiles=True),
        "large values": lambda: linear_loss_case(40, C=16, V=30, chunk=32, gradient_scale=1e3),
    },
}


# ---------------------------------------------------------------- AdamW: torch.optim.AdamW defines it

ADAMW_SHAPES = [(5,), (33, 7), (1024,), (1,), (3, 1100), (32, 33)]  # the last takes wide loads


def adamw_weights(device):
    """Return float32 weights, which lie between bands of NaN."""
    return [between_bands(normal(*shape, seed=i).to(device)) for i, shape in enumerate(ADAMW_SHAPES)]


def adamw_gradients(step, dtype, device):
    """Return gradients: those of matrices in the dtype, others in float32."""
    drawn = [normal(*shape, scale=0.3, seed=100 * (step + 1) + i) for i, shape in enumerate(ADAMW_SHAPES)]
    return [between_bands(gradient.to(device, dtype if gradient.ndim == 2 else torch.float32)) for gradient in drawn]


def set_gradients(parameters, gradients):
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient


def adamw_reference(kind, dtype, steps, device, **options):
    """Return (weight, first, second moment) per parameter after steps of torch.optim.AdamW in the dtype `kind`."""
    parameters = [torch.nn.Parameter(weight.to(kind, copy=True)) for weight in adamw_weights(device)]
    optimizer = torch.optim.AdamW(parameters, foreach=False, **options)
    for step in steps:
        set_gradients(parameters, [gradient.to(kind) for gradient in adamw_gradients(step, dtype, device)])
        optimizer.step()
    return [(p.detach(), *(optimizer.state[p][name] for name in ("exp_avg", "exp_avg_sq"))) for p in parameters]


def rounded(weight, dtype):
    """Round float32 as the kernel does: bfloat16's halves away from zero."""
    copy = weight.to(dtype)
    if dtype != torch.bfloat16:
        return copy
    halves = weight.contiguous().view(torch.int32) & 0xFFFF == 0x8000
    return torch.where(halves, torch.nextafter(weight, weight * math.inf).to(dtype), copy)


def judge_adamw(script, optimizer, parameters, dtype, steps, device, **options):
    """Judge weights, their changes and moments by the measured tolerance; 16-bit copies must be the rounded weights."""
    references = (adamw_reference(kind, dtype, steps, device, **options) for kind in (torch.float32, torch.float64))
    for p, start, plain, exact in zip(parameters, adamw_weights(device), *references, strict=True):
        state = optimizer.state[p]
        weight, change = script.get_weight(p, state).detach(), exact[0] - start
        # The change is a difference of rounded weights: it is known no better than they are.
        rounding = 2**-24 * (start.double().square().mean() / change.double().square().mean()).sqrt().item()
        judge("weight", weight, plain[0], exact[0])
        judge("change", weight - start, plain[0] - start, change, extra=rounding)
        judge("exp_avg", state["exp_avg"], plain[1], exact[1])
        judge("exp_avg_sq", state["exp_avg_sq"], plain[2], exact[2])
        if not torch.equal(p.detach(), rounded(weight, p.dtype)):
            raise Wrong("a parameter is not its rounded weight")


def check_adamw(script, dtype, device, scaled=False):
    """Raise Wrong unless FusedAdamW is AdamW, step by step, and writes nowhere else.

    scaled: with a gradient scaler; a step whose gradients overflow changes nothing but the scale.
    """
    options = {"lr": 0.05, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.3}
    weights = adamw_weights(device)
    parameters = [torch.nn.Parameter(weight) for weight in weights]
    with GuardedMemory() as memory:
        optimizer = script.FusedAdamW(parameters, matrix_dtype=dtype, **options)
    scaler = torch.amp.GradScaler(device.type, init_scale=64.0, growth_interval=1000, enabled=scaled)
    scaler.scale(torch.zeros((), device=device))  # a scaler makes its scale when it is first used

    def step(gradients):
        gradients = [between_bands(gradient * scaler.get_scale()) for gradient in gradients]
        copies = [gradient.clone() for gradient in gradients]
        set_gradients(parameters, gradients)
        with GuardedMemory() as of_step:
            scaler.step(optimizer)
        check_bands([*of_step.tensors, *gradients])
        check_untouched(dict(enumerate(gradients)), copies)
        scaler.update()

    def state():
        lasting = [(p.detach(), script.get_weight(p, optimizer.state[p]).detach()) for p in parameters]
        lasting += [optimizer.state[p].values() for p in parameters]
        return dict(enumerate(tensor for tensors in lasting for tensor in tensors))

    for number in range(3):
        step(adamw_gradients(number, dtype, device))
        judge_adamw(script, optimizer, parameters, dtype, range(number + 1), device, **options)
        if scaled and number == 0:
            before, overflowed = [tensor.clone() for tensor in state().values()], adamw_gradients(7, dtype, device)
            overflowed[4][2, 1050] = math.inf
            step(overflowed)
            check_untouched(state(), before)
            if scaler.get_scale() != 32.0:
                raise Wrong("the scaler did not see the overflow")
    check_bands([*memory.tensors, *weights])


# ---------------------------------------------------------------- fp8: plain PyTorch with the same rounding defines it

FP8_LIMIT = 448.0  # the largest number of e4m3
LEAST = 1e-30  # a row without a larger magnitude counts as zeros
FLOOR = 0.01  # the least scale of a matrix's row, as a part of the matrix's largest


@contextlib.contextmanager
def fp8_rounding():
    """Round to fp8 as GPUs do, in Triton's interpreter too.

    It loses the carry of a significand that rounds up to the next power of two: 1.95 becomes 1.0 instead of 2.0.
    """
    convert = interpreter._convert_float

    def rounded(data, source, target, mode):
        if target.name != "fp8e4nv":
            return convert(data, source, target, mode)
        fp8 = torch.from_numpy(np.ascontiguousarray(data, dtype=np.float32)).to(torch.float8_e4m3fn)
        return fp8.view(torch.uint8).numpy()

    with mock.patch.object(interpreter, "_convert_float", rounded):
        yield


def to_fp8(x):
    return x.to(torch.float8_e4m3fn).float()


def plain_quantized(x):
    """Return float32 x [rows, C] in fp8, as float32, and its scales [rows, 1]."""
    scale = x.abs().amax(1, keepdim=True).clamp_min(LEAST) / FP8_LIMIT
    return to_fp8(x / scale), scale


def plain_quantized_weight(w, parts):
    """Return float32 w [o, i] in fp8, as float32, and its scales [o, 1]; parts are the rows of each matrix in it."""
    scales = []
    for matrix in w.split(parts):
        largest = matrix.abs().amax(1, keepdim=True)
        if largest.max() > LEAST:
            scales.append(largest.clamp_min(FLOOR * largest.max()) / FP8_LIMIT)
        else:
            scales.append(torch.ones_like(largest))
    scale = torch.cat(scales)
    return to_fp8(w / scale), scale


class PlainFP8Linear(torch.autograd.Function):
    """y = x wᵀ with rows in fp8; wgrad: the gradient of w in fp8 too. All that is multiplied and summed is float32."""

    @staticmethod
    def forward(ctx, x, w, parts, wgrad):
        x_q, x_scale = plain_quantized(x.flatten(0, -2).float())
        w_q, w_scale = plain_quantized_weight(w.float(), parts)
        ctx.save_for_backward(x, x_q, x_scale, w_q, w_scale)
        ctx.wgrad = wgrad
        return ((x_q * x_scale) @ (w_q * w_scale).t()).to(x.dtype).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx, dy):
        x, x_q, x_scale, w_q, w_scale = ctx.saved_tensors
        dy = dy.flatten(0, -2)
        g_q, g_scale = plain_quantized(dy.float() * w_scale.t())
        dx = g_scale * (g_q @ w_q)
        if ctx.wgrad:
            c = (x_scale * g_scale).max()
            weighted = to_fp8(x_q * (x_scale * g_scale / c.clamp_min(1e-37)))
            dw = (c / w_scale) * (g_q.t() @ weighted)
        else:
            dw = dy.t() @ x.flatten(0, -2)
        return dx.to(x.dtype).view(x.shape), dw.to(x.dtype), None, None


def fp8_layers(script, *layers):
    """Return layers (weight, its parts) of a script that are ready to multiply in fp8."""
    made = torch.nn.ModuleList()
    for weight, parts in layers:
        layer = script.FP8Linear(weight.shape[1], *parts, bias=False, device=weight.device, dtype=weight.dtype)
        with torch.no_grad():
            layer.weight.copy_(weight)
        made.append(layer)
    script.FP8Weights(made).update()
    return made


def with_rows(w, edits):
    """Return w after multiplying rows by factors: {row or (first, end): factor}."""
    for rows, factor in edits.items():
        first, end = rows if isinstance(rows, tuple) else (rows, rows + 1)
        w[first:end] *= factor
    return w


def fp8_linear_case(tokens, in_features, *parts, scale=0.1, edits=(), **options):
    """Return a case of a linear layer in fp8; edits: {rows of the weight: factor}."""

    def call(script, x, w):
        (layer,) = fp8_layers(script, (w.detach(), parts))
        return script.FP8LinearFunction.apply(x, w, layer)

    def plain(x, w):
        return PlainFP8Linear.apply(x, w, parts, False)

    weight = normal(sum(parts), in_features, scale=scale, seed=1)
    inputs = {"x": normal(*tokens, in_features), "w": with_rows(weight, dict(edits))}
    return Case(call, lambda x, w: x @ w.t(), ("y",), inputs, plain=plain, **options)


def fp8_feed_forward_case(tokens, C, width, scale=0.1, up_edits=(), down_edits=(), x_scale=1.0, **options):
    """Return a case of the feed-forward part in fp8; edits: {rows of a weight: factor}."""
    parts = (width, width)

    def call(script, x, up, down):
        layers = fp8_layers(script, (up.detach(), parts), (down.detach(), (C,)))
        return script.FP8FeedForwardFunction.apply(x, up, down, *layers)

    def define(x, up, down):
        return load_version(1).swiglu(*(x @ up.t()).chunk(2, dim=-1)) @ down.t()

    def plain(x, up, down):
        h = PlainFP8Linear.apply(x, up, parts, True)
        y = load_version(1).swiglu(*h.float().chunk(2, dim=-1))  # float32, not rounded before it is quantized
        return PlainFP8Linear.apply(y, down, (C,), True).to(x.dtype)

    inputs = {
        "x": normal(*tokens, C, scale=x_scale),
        "up": with_rows(normal(2 * width, C, scale=scale, seed=1), dict(up_edits)),
        "down": with_rows(normal(C, width, scale=scale, seed=2), dict(down_edits)),
    }
    return Case(call, define, ("y",), inputs, plain=plain, **options)


# All sizes are multiples of 16. A weight takes programs of 32 rows and tiles of 256 columns.
FP8_CASES = {
    "fp8_linear": {
        "ragged": lambda: fp8_linear_case((2, 24), 48, 112),
        "parts of other sizes": lambda: fp8_linear_case((16,), 32, 48, 16, 16, edits={(48, 64): 1e-4, (64, 80): 1e-7}),
        "one part is zero": lambda: fp8_linear_case((16,), 32, 32, 16, 16, edits={(32, 48): 0}),
        "a row of zeros": lambda: fp8_linear_case((32,), 64, 80, scale=1e-3, edits={70: 0}),
        "a small row": lambda: fp8_linear_case((32,), 64, 80, scale=1e-3, edits={3: 1e-4}),
        "a row that counts as zeros": lambda: fp8_linear_case((32,), 64, 80, edits={79: 1e-8}),
        "rows longer than a tile": lambda: fp8_linear_case((16,), 272, 48),
        "more rows than programs": lambda: fp8_linear_case((144,), 80, 32, gpu_tiles=True),
        "zeros, tiny gradients": lambda: fp8_linear_case((16,), 32, 32, edits={(0, 32): 0}, gradient_scale=1e-8),
    },
    "fp8_feed_forward": {
        "ragged": lambda: fp8_feed_forward_case((3, 16), 48, 80),
        "one tile": lambda: fp8_feed_forward_case((16,), 16, 16),
        "more rows than programs": lambda: fp8_feed_forward_case((144,), 32, 272, gpu_tiles=True),
        "rows of zeros": lambda: fp8_feed_forward_case((48,), 64, 96, 1e-3, {7: 0, 100: 0}, {5: 0}),
        "small rows": lambda: fp8_feed_forward_case((48,), 64, 96, 1e-3, {7: 1e-4, 100: 1e-4}, {5: 1e-4}),
        "small first rows": lambda: fp8_feed_forward_case((48,), 64, 96, 1e-3, {(0, 32): 1e-5}, {(0, 32): 1e-5}),
        "no activations, no gradients": lambda: fp8_feed_forward_case((16,), 16, 16, x_scale=0.0, gradient_scale=0.0),
        "rows that count as zeros": lambda: fp8_feed_forward_case((48,), 64, 96, 0.1, {7: 1e-8}, {5: 1e-8}),
        "up smaller than gate": lambda: fp8_feed_forward_case((48,), 32, 48, 0.1, {(48, 96): 1e-7}),
        "down of zeros, tiny gradients": lambda: fp8_feed_forward_case(
            (48,), 32, 48, down_edits={(0, 32): 0}, gradient_scale=1e-8
        ),
        "small activations": lambda: fp8_feed_forward_case((48,), 32, 48, scale=1e-4),
    },
}


def check_quantized(name, q, scale, wanted_q, wanted_scale):
    """Raise Wrong unless an fp8 matrix and its scales are these, but for a number at the edge of its rounding."""
    q, scale = q.cpu().float(), scale.cpu()
    near = (q - wanted_q).abs() <= 2**-3 * wanted_q.abs() + 2**-9
    if (
        not torch.allclose(scale, wanted_scale, rtol=1e-6, atol=0)
        or not near.all()
        or (q != wanted_q).sum() > 0.01 * q.numel()
    ):
        raise Wrong(f"{name} is not the quantized matrix")


def check_fp8_weights(layer, w, name="w_q"):
    """Raise Wrong unless both copies of a layer's weight hold w, quantized."""
    check_quantized(name, layer.w_q, layer.w_scale.view(-1, 1), *plain_quantized_weight(w.float().cpu(), layer.parts))
    if not torch.equal(layer.w_q_t.view(torch.uint8), layer.w_q.view(torch.uint8).t()):
        raise Wrong(f"{name}: its transpose holds something else")


FP8_SIZES = (
    "--hidden-dim 32 --num-layers 2 --num-heads 2 --intermediate-dim 48 --vocab-size 20 --batch-size 2 --seq-len 16"
)
FP8_LAYERS = ("attention.qkv_proj", "attention.o_proj", "feed_forward.gate_up_proj", "feed_forward.down_proj")
FP8_MATMULS = 10  # of a block: four in the forward, four for dx, two for dw of the feed-forward part


def check_fp8_training(script, device):
    """Raise Wrong unless in every step the layers of --fp8 multiply by that step's weights, and no other layer does."""
    argv = f"{FP8_SIZES} --learning-rate 0.01 --warmup-steps 0 --no-graph --use-amp --fp8".split()
    if device.type == "cpu":
        argv += [f"--disable-{name}-kernel" for name in ("attention", "rmsnorm", "rope", "loss")]
    config = script.parse_options(argv)
    data, trainer = script.load_data(config), script.Trainer(config)
    layers = {name: layer for name, layer in trainer.model.named_modules() if hasattr(layer, "w_q")}
    wanted = [f"layers.{block}.{name}" for block in range(2) for name in FP8_LAYERS]
    if list(layers) != wanted:
        raise Wrong(f"in fp8 are {list(layers)}")
    for step in range(3):
        before = {name: layer.weight.detach().clone() for name, layer in layers.items()}
        with mock.patch.object(script, "fp8_matmul", wraps=script.fp8_matmul) as matmul:
            trainer.run(*script.batch(data, step, config))
        if matmul.call_count != 2 * FP8_MATMULS:
            raise Wrong(f"{matmul.call_count} matmuls in fp8")
        for name, layer in layers.items():
            if torch.equal(layer.weight, before[name]):
                raise Wrong(f"{name} is not trained")
            check_fp8_weights(layer, before[name], f"{name}.w_q in step {step}")
