"""Version 3's operations as cases: their inputs, the definition they must meet, and the judgement of what they return.

`check(script, case, dtype, device)` runs a case through the kernels of a script, through plain PyTorch in the same
dtype and through plain PyTorch in float64, and raises Wrong unless every output and every gradient is as close to
float64 as plain PyTorch is: at most twice its error, plus 1e-6.

Inputs lie between bands of NaN, so that a load past their end shows. What the kernels allocate holds NaN, so that an
element that is never written shows, and lies between bands of a number, so that a store past its end shows.
"""

import contextlib
import dataclasses
import math
from collections.abc import Callable
from unittest import mock

import torch
import torch.nn.functional as F
from triton.runtime.jit import KernelInterface

from common.versions import load_version, relative_error

ALL_DTYPES = [torch.float32, torch.float16, torch.bfloat16]
DTYPES = ALL_DTYPES if torch.cuda.is_available() else ALL_DTYPES[:2]  # Triton's interpreter multiplies no bfloat16
BAND = 1 << 17  # elements; more than any tile holds, so that a stray store ends inside the band
SENTINEL = 77
ALLOCATORS = {name: getattr(torch, name) for name in ("empty", "empty_like", "zeros", "zeros_like")}


class Wrong(AssertionError):
    """A kernel returned something else than its definition says, or touched what it must not."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One call of one operation; call(script, *inputs, *constants) and define(*inputs, *constants) return its outputs.

    inputs are differentiated, in the dtype of the check (float32 for those in `wide`); constants are not, and are
    float32 or integers. unused: outputs without a cotangent; rough: results that need only be numbers.
    parts: result -> (names, sizes, dimension) splits a packed result, so that each part has an error of its own.
    layouts: how an input, a constant or the cotangents ("cotangents") lie in memory, see strides_of.
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
    rough: tuple[str, ...] = ()
    parts: dict[str, tuple] = dataclasses.field(default_factory=dict)
    layouts: dict[str, str] = dataclasses.field(default_factory=dict)
    gpu_tiles: bool = False


# ---------------------------------------------------------------- memory


def strides_of(shape, layout):
    """Strides, in elements, of one of LAYOUTS."""
    widened = [*shape[:-1], shape[-1] + 3] if layout == "padded" and len(shape) else shape
    strides = [math.prod(widened[i + 1 :]) for i in range(len(shape))]
    if layout == "reversed":
        strides = [math.prod(shape[:i]) for i in range(len(shape))]
    if layout == "every second":
        strides = [2 * stride for stride in strides]
    if layout == "expanded":
        strides[:1] = [0] * len(strides[:1])
    return strides


LAYOUTS = ("contiguous", "shifted", "padded", "reversed", "every second", "expanded")


def placed(tensor, layout="contiguous"):
    """A copy in that layout, with NaN (integers: 0) around it and in its gaps; expanded, its first row repeats."""
    strides = strides_of(tensor.shape, layout)
    extent = 1 + sum(stride * (size - 1) for stride, size in zip(strides, tensor.shape, strict=True))
    start = BAND + (layout == "shifted")  # one element further: no longer at a multiple of 16 bytes
    fill = math.nan if tensor.is_floating_point() else 0
    memory = ALLOCATORS["empty"](start + extent + BAND, dtype=tensor.dtype, device=tensor.device).fill_(fill)
    view = memory.as_strided(tensor.shape, strides, start)
    expanded = layout == "expanded" and tensor.ndim
    (view[:1] if expanded else view).copy_(tensor[:1] if expanded else tensor)
    return view


def around(view):
    """What lies before and behind a contiguous tensor that was placed."""
    memory = view.detach().as_strided((view.numel() + 2 * BAND,), (1,), 0)
    return torch.cat([memory[:BAND], memory[BAND + view.numel() :]])


class GuardedMemory(contextlib.ExitStack):
    """While entered, torch.empty and its kin give NaN between bands of a number (torch.zeros: zeros between them)."""

    def __enter__(self):
        self.bands = []
        for name in ALLOCATORS:
            self.enter_context(mock.patch.object(torch, name, getattr(self, name)))
        return self

    def guarded(self, like, fill, device):
        memory = ALLOCATORS["empty"](like.numel() + 2 * BAND, dtype=like.dtype, device=device).fill_(SENTINEL)
        self.bands.append((tuple(like.shape), memory[:BAND], memory[BAND + like.numel() :]))
        return memory.as_strided(like.shape, like.stride(), BAND).fill_(fill)

    def allocated(self, name, args, device, options):
        """As the allocator of that name would, on the meta device for shape and strides alone."""
        like = ALLOCATORS[name](*args, device="meta", **options)
        fill = 0 if "zeros" in name else math.nan if like.is_floating_point() else SENTINEL
        return self.guarded(like, fill, device)

    def empty(self, *size, device=None, pin_memory=False, **options):
        if pin_memory or str(device) == "meta":
            return ALLOCATORS["empty"](*size, device=device, pin_memory=pin_memory, **options)
        return self.allocated("empty", size, device, options)

    def zeros(self, *size, device=None, **options):
        return self.allocated("zeros", size, device, options)

    def empty_like(self, tensor, device=None, **options):
        return self.allocated("empty_like", (tensor,), device or tensor.device, options)

    def zeros_like(self, tensor, device=None, **options):
        return self.allocated("zeros_like", (tensor,), device or tensor.device, options)

    def check(self):
        """Raise Wrong where a store went past a tensor's ends."""
        for shape, before, after in self.bands:
            for side, band in (("before the start", before.flip(0)), ("past the end", after)):
                touched = (band != SENTINEL).nonzero()
                if len(touched):
                    raise Wrong(f"a store {int(touched[0]) + 1} elements {side} of a tensor {shape}")


def attention_tile_of(small, large):
    """Return a stub for attention_tiles: a tile is longer where its kernel keeps rows in registers."""

    def attention_tiles(kernel, *_):
        return ((small, large, 4, 1) if kernel == "dkdv" else (large, small, 4, 1),)

    return attention_tiles


@contextlib.contextmanager
def gpu_tiles(script, device, architecture="gfx942"):
    """Six programs for all the work, and on a CPU the tiles of a GPU."""
    with contextlib.ExitStack() as patches:
        patches.enter_context(mock.patch.object(script, "program_count", lambda device: 6))
        if device.type == "cpu":
            patches.enter_context(mock.patch.object(script, "gpu_architecture", lambda device: architecture))
            # Without a GPU there is nothing to tune.
            patches.enter_context(mock.patch.object(script, "attention_tiles", attention_tile_of(32, 64)))
        yield


@contextlib.contextmanager
def launches(refuse=False):
    """The set of names of the kernels that are launched while in use; or, refusing, Wrong for the first of them."""
    names, launch = set(), KernelInterface.__getitem__

    def record(kernel, grid):
        if refuse:
            raise Wrong(f"{kernel.__name__} was launched")
        names.add(kernel.__name__)
        return launch(kernel, grid)

    with mock.patch.object(KernelInterface, "__getitem__", record):
        yield names


# ---------------------------------------------------------------- judgement


def evaluate(function, case, inputs, constants, cotangents, backwards=1):
    """Name -> tensor of the outputs and gradients; and the gradients of further passes through the same graph.

    cotangents: name -> tensor, or a function that makes them of the outputs.
    """
    inputs = {name: tensor.requires_grad_() for name, tensor in inputs.items()}
    outputs = function(*inputs.values(), *constants.values())
    outputs = dict(zip(case.names, outputs if isinstance(outputs, tuple) else (outputs,), strict=True))
    cotangents = cotangents(outputs) if callable(cotangents) else cotangents
    used = [outputs[name] for name in cotangents]
    passes = []
    for _ in range(backwards):
        gradients = torch.autograd.grad(
            used, list(inputs.values()), list(cotangents.values()), retain_graph=True, materialize_grads=True
        )
        passes.append({f"d{name}": gradient for name, gradient in zip(inputs, gradients, strict=True)})
    return {name: output.detach() for name, output in outputs.items()} | passes[0], passes[1:], cotangents


def split(case, results):
    """Packed results in their parts, each of which is judged alone."""
    parts = {}
    for name, tensor in results.items():
        names, sizes, dimension = case.parts.get(name, ((name,), None, 0))
        parts.update(zip(names, tensor.split(sizes, dimension) if sizes else (tensor,), strict=True))
    return parts


def judge(name, result, plain, exact, extra=0.0):
    """How far a result is from float64, and how far it may be; raises Wrong where it is too far."""
    if result.shape != plain.shape or result.dtype != plain.dtype:
        raise Wrong(f"{name} is {result.dtype} {tuple(result.shape)}, not {plain.dtype} {tuple(plain.shape)}")
    missing = (result.isnan() & ~plain.isnan()).nonzero().tolist()
    if missing:
        raise Wrong(f"{name}: {len(missing)} of {result.numel()} elements are NaN or never written, first {missing[0]}")
    error, bound = relative_error(result, exact), 2 * relative_error(plain, exact) + 1e-6 + extra
    if not error <= bound:
        worst = (result.double() - exact).abs().flatten().argmax().item()
        raise Wrong(
            f"{name}: relative error {error:.2e}, allowed {bound:.2e}; worst at flat index {worst} of "
            f"{tuple(result.shape)}: {result.flatten()[worst]:.8g} instead of {exact.flatten()[worst]:.8g}"
        )
    return error, bound


def cast(case, tensors, dtype):
    """Tensors in the dtype of a run; constants and wide inputs have float32 beside 16-bit ones."""
    wide = {*case.wide, *case.constants}
    dtypes = {name: torch.promote_types(dtype, torch.float32) if name in wide else dtype for name in tensors}
    return {name: t.to(dtypes[name]) if t.is_floating_point() else t for name, t in tensors.items()}


def random_cotangents(case, device):
    """A function that makes a cotangent in its layout for every output that is used."""

    def make(outputs):
        generator = torch.Generator().manual_seed(1)
        layout = case.layouts.get("cotangents", "contiguous")
        return {
            name: placed(torch.randn(output.shape, generator=generator).to(device, output.dtype), layout)
            for name, output in outputs.items()
            if name not in case.unused
        }

    return make


def references(case, values, dtype, device, conditioned):
    """Results of plain PyTorch and of float64, how far each may move besides (see check), and the cotangents."""

    def definition(tensors, cotangents):
        inputs = {name: tensors[name].detach().clone() for name in case.inputs}
        return evaluate(case.define, case, inputs, {name: tensors[name] for name in case.constants}, cotangents)

    plain, _, cotangents = definition(values, random_cotangents(case, device))
    doubled = {name: t.double() if t.is_floating_point() else t for name, t in values.items()}
    wanted = {name: tensor.double() for name, tensor in cotangents.items()}
    exact = split(case, definition(doubled, wanted)[0])
    extra = dict.fromkeys(exact, 0.0)
    if conditioned:
        generator = torch.Generator().manual_seed(2)
        for name in case.inputs:  # half a unit of the last place, up or down
            signs = torch.randn(doubled[name].shape, generator=generator).sign().to(device)
            doubled[name] = doubled[name] * (1 + 0.5 * torch.finfo(dtype).eps * signs)
        moved = split(case, definition(doubled, wanted)[0])
        extra = {name: 2 * relative_error(moved[name], exact[name]) for name in exact}
    return split(case, plain), exact, extra, cotangents


def check_untouched(tensors, copies):
    for name, tensor in tensors.items():
        if not torch.equal(tensor, copies[name]):
            raise Wrong(f"{name} was overwritten")


def check_repeated(first, passes):
    for later in passes:
        for name, gradient in later.items():
            if not torch.equal(gradient, first[name]):
                raise Wrong(f"{name} of a second backward differs from that of the first")


def check(script, case, dtype, device, backwards=1, conditioned=False):
    """Raise Wrong unless the script's kernels do what the case defines; returns name -> (error, bound).

    conditioned: also allow what one more rounding of the inputs would do. Drawn cases may have two elements, or
    subtract nearly equal numbers until only rounding is left, and then it is luck whose error is twice the other's.
    """
    given = {name: tensor.to(device) for name, tensor in (case.inputs | case.constants).items()}
    given = {n: placed(t, case.layouts.get(n, "contiguous")) for n, t in cast(case, given, dtype).items()}
    values = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in given.items()}
    plain, exact, extra, cotangents = references(case, values, dtype, device, conditioned)
    copies = {name: tensor.clone() for name, tensor in cotangents.items()}
    inputs, constants = ({name: given[name] for name in names} for names in (case.inputs, case.constants))
    with gpu_tiles(script, device) if case.gpu_tiles else contextlib.nullcontext(), GuardedMemory() as memory:
        results, later, _ = evaluate(
            lambda *tensors: case.call(script, *tensors), case, inputs, constants, cotangents, backwards
        )
    memory.check()
    check_untouched(given | cotangents, values | copies)
    check_repeated(results, later)
    results = split(case, results)
    extra |= dict.fromkeys(case.rough, math.inf)
    return {name: judge(name, results[name], plain[name], exact[name], extra[name]) for name in exact}


# ---------------------------------------------------------------- operations: version 1's functions define them


def normal(*shape, scale=1.0, seed=0):
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def norm_case(*shape, branch=True, eps=1e-6, scale=1.0, **options):
    """add_rms_norm of [..., C]; without a branch nothing is added."""

    def define(x, *others):
        x = x + others[0] if branch else x
        return x, load_version(1).rms_norm(x, others[-1], eps)

    def call(script, x, *others):
        return script.add_rms_norm(x, others[0] if branch else None, others[-1], eps)

    terms = {"residual": normal(*shape, scale=scale)} | (
        {"branch": normal(*shape, scale=scale, seed=1)} if branch else {}
    )
    return Case(call, define, ("x", "y"), terms | {"w": 1 + normal(shape[-1], seed=2)}, **options)


def check_column_sums(script, device):
    """Check column_sum_kernel on more rows than a tile has."""
    x, sums = normal(300, 24).to(device), torch.empty(24, device=device)
    script.column_sum_kernel[(3,)](x, sums, 300, 24, 128, 8)
    error = relative_error(sums.cpu(), x.cpu().double().sum(0))
    if not error < 1e-6:
        raise Wrong(f"column_sum_kernel: relative error {error:.1e}")


def rope_case(B, T, H, K, D, turned=None, scale=1.0, **options):
    """rope of [B, T, H + 2K, D], whose first H + K heads are turned."""
    heads, turned = H + 2 * K, H + K if turned is None else turned

    def define(x, cos, sin):
        return torch.cat([load_version(1).apply_rope(x[:, :, :turned], cos, sin), x[:, :, turned:]], dim=2)

    cos, sin = load_version(1).rope_tables(T, D, 10000.0, "cpu")
    sizes = [turned, heads - turned]
    return Case(
        lambda script, x, cos, sin: script.rope(x, cos, sin, turned),
        define,
        ("y",),
        {"x": normal(B, T, heads, D, scale=scale)},
        {"cos": cos, "sin": sin},
        parts={"y": (("turned", "copied"), sizes, 2), "dx": (("dturned", "dcopied"), sizes, 2)} if all(sizes) else {},
        **options,
    )


def swiglu_case(*shape, width, scale=1.0, **options):
    """packed_swiglu of [..., 2 x width]."""

    def define(x):
        return load_version(1).swiglu(*x.chunk(2, dim=-1))

    inputs = {"x": normal(*shape, 2 * width, scale=scale)}
    parts = {"dx": (("dgate", "dup"), [width, width], -1)}
    return Case(lambda script, x: script.packed_swiglu(x), define, ("y",), inputs, parts=parts, **options)


def attention_case(B, T, H, K, D, scale=1.0, value_scale=1.0, **options):
    """flash_attention of H query heads over K key/value heads, packed as [B, T, H + 2K, D]."""
    # The only token of a sequence sees itself alone: dq and dk are zero but for rounding, and have no relative error.
    parts = {"dqkv": (("dq", "dk", "dv"), [H, K, K], 2)} if T > 1 else {}
    qkv = normal(B, T, H + 2 * K, D, scale=scale)
    qkv[:, :, H + K :] *= value_scale / scale
    return Case(
        lambda script, qkv: script.flash_attention(qkv, H, K),
        lambda qkv: load_version(1).causal_attention(*qkv.split([H, K, K], dim=2)),
        ("o",),
        {"qkv": qkv},
        parts=parts,
        **options,
    )


def rotary_case(B, T, H, K, D, scale=1.0, **options):
    """rotary_attention, whose q and k are turned before they meet."""
    case = attention_case(B, T, H, K, D, scale, **options)

    def define(qkv, cos, sin):
        query, key, value = qkv.split([H, K, K], dim=2)
        query, key = (load_version(1).apply_rope(x, cos, sin) for x in (query, key))
        return load_version(1).causal_attention(query, key, value)

    tables = dict(zip(("cos", "sin"), load_version(1).rope_tables(T, D, 10000.0, "cpu"), strict=True))
    return Case(
        lambda script, qkv, cos, sin: script.rotary_attention(qkv, cos, sin, H, K),
        define,
        ("o",),
        case.inputs,
        tables,
        parts=case.parts,
        **options,
    )


def loss_case(*shape, V, scale=3.0, offset=0.0, first=0.0, **options):
    """cross_entropy of logits [..., V], normal ones times `scale` plus `offset`, and `first` on top of the first."""

    def define(logits, labels):
        logits = load_version(1).at_least_float32(logits)
        return F.cross_entropy(logits.flatten(0, -2), labels.flatten())

    labels = torch.randint(0, V, shape, generator=torch.Generator().manual_seed(1))
    logits = normal(*shape, V, scale=scale) + offset
    logits[..., 0] += first
    return Case(
        lambda script, logits, labels: script.cross_entropy(logits, labels),
        define,
        ("loss",),
        {"logits": logits},
        {"labels": labels},
        **options,
    )


# Operation -> name -> arguments of its case. Each has a size for every axis that no tile divides, one with more work
# than programs, a single token or row, and more than one sequence.
CASES = {
    "add_rms_norm": (
        norm_case,
        {
            "ragged": ((37, 100), {}),
            "more rows than programs": ((3, 100, 100), {"gpu_tiles": True}),
            "one row": ((1, 1, 16), {}),
            "one column": ((5, 1), {}),
            "long rows": ((3, 2500), {}),
            "nothing added": ((2, 5, 48), {"branch": False}),
            "large epsilon": ((4, 24), {"eps": 0.5}),
            "small values": ((4, 64), {"scale": 1e-3}),
            "float32 weight": ((6, 40), {"wide": ("w",)}),
            "sum not used": ((3, 24), {"unused": ("x",)}),
            "norm not used": ((3, 24), {"unused": ("y",)}),
        },
    ),
    "rope": (
        rope_case,
        {
            "ragged": ((2, 37, 3, 3, 32), {}),
            "more tokens than programs": ((2, 21, 4, 1, 64), {"gpu_tiles": True}),
            "more heads than a tile": ((1, 5, 40, 3, 64), {"gpu_tiles": True}),
            "one token": ((2, 1, 2, 1, 16), {}),
            "odd number of pairs": ((2, 9, 8, 1, 6), {}),
            "all heads": ((1, 5, 4, 2, 16), {"turned": 8}),
            "no head": ((1, 5, 4, 2, 16), {"turned": 0}),
        },
    ),
    "packed_swiglu": (
        swiglu_case,
        {
            "ragged": ((37,), {"width": 50}),
            "wider than a tile": ((2, 5), {"width": 2100, "gpu_tiles": True}),
            "more rows than a tile": ((130,), {"width": 33, "gpu_tiles": True}),
            "one token": ((1, 1), {"width": 8}),
            "large values": ((3, 11), {"width": 16, "scale": 20.0}),
        },
    ),
    "flash_attention": (
        attention_case,
        {
            "ragged": ((2, 70, 4, 2, 32), {}),
            "whole tiles": ((1, 64, 2, 2, 16), {}),
            "one token": ((3, 1, 4, 1, 64), {}),
            "three tiles": ((1, 130, 1, 1, 16), {}),
            "eight queries a key": ((1, 37, 8, 1, 16), {}),
            "tiles of a GPU": ((1, 75, 4, 1, 64), {"gpu_tiles": True}),
            "large heads": ((1, 70, 2, 1, 128), {}),
            "sharp": ((1, 40, 2, 1, 32), {"scale": 3.0}),
        },
    ),
    "rotary_attention": (
        rotary_case,
        {
            "ragged": ((2, 70, 4, 2, 32), {}),
            "whole tiles": ((1, 64, 2, 2, 16), {}),
            "one token": ((3, 1, 4, 1, 64), {}),
            "three tiles": ((1, 130, 1, 1, 16), {}),
            "tiles of a GPU": ((1, 75, 4, 1, 64), {"gpu_tiles": True}),
            "large heads": ((1, 70, 2, 1, 128), {}),
        },
    ),
    "cross_entropy": (
        loss_case,
        {
            "ragged": ((37,), {"V": 50}),
            "longer than a tile": ((3,), {"V": 70000}),
            "more rows than a tile": ((2, 9), {"V": 1000, "gpu_tiles": True}),
            "several tiles of a GPU": ((5,), {"V": 9000, "gpu_tiles": True}),
            "largest in the first tile": ((5,), {"V": 5000, "gpu_tiles": True, "first": 200.0}),
            "one row": ((1, 1), {"V": 7}),
            "confident": ((20,), {"V": 30, "scale": 50.0}),
            "far from zero": ((20,), {"V": 30, "offset": 1000.0}),
        },
    ),
}


def case_of(operation, name):
    make, cases = CASES[operation]
    args, options = cases[name]
    return make(*args, **options)


# ---------------------------------------------------------------- AdamW: torch.optim.AdamW defines it

ADAMW_SHAPES = [(5,), (33, 7), (1024,), (1,), (3, 1100)]


def adamw_parameters(device, shapes=ADAMW_SHAPES):
    """Return float32 weights and the parameters that hold them, which lie between bands of NaN."""
    masters = [placed(normal(*shape, seed=i).to(device)) for i, shape in enumerate(shapes)]
    return masters, [torch.nn.Parameter(master) for master in masters]


def adamw_gradients(step, dtype, device, shapes=ADAMW_SHAPES):
    """Return gradients: those of matrices in the dtype, others in float32."""
    seeds = range(100 * step + 100, 100 * step + 100 + len(shapes))
    dtypes = [dtype if len(shape) == 2 else torch.float32 for shape in shapes]
    drawn = [normal(*shape, scale=0.3, seed=seed) for shape, seed in zip(shapes, seeds, strict=True)]
    return [placed(gradient.to(device, kind)) for gradient, kind in zip(drawn, dtypes, strict=True)]


def adamw_reference(kind, dtype, steps, device, **options):
    """(weight, first moment, second moment) of each parameter after steps of torch.optim.AdamW in the dtype `kind`."""
    masters, _ = adamw_parameters(device)
    parameters = [torch.nn.Parameter(master.to(kind, copy=True)) for master in masters]
    optimizer = torch.optim.AdamW(parameters, foreach=False, **options)
    for step in steps:
        for parameter, gradient in zip(parameters, adamw_gradients(step, dtype, device), strict=True):
            parameter.grad = gradient.to(kind)
        optimizer.step()
    return [(p.detach(), *(optimizer.state[p][name] for name in ("exp_avg", "exp_avg_sq"))) for p in parameters]


def exact_weights(script, optimizer, parameters):
    """Return the float32 weights."""
    return [script.get_weight(parameter, optimizer.state[parameter]).detach() for parameter in parameters]


def rounded(weight, dtype):
    """Round float32 as the kernel does: bfloat16's halves away from zero."""
    copy = weight.to(dtype)
    if dtype != torch.bfloat16:
        return copy
    halves = weight.contiguous().view(torch.int32) & 0xFFFF == 0x8000
    return torch.where(halves, torch.nextafter(weight, weight * math.inf).to(dtype), copy)


def judge_adamw(script, optimizer, parameters, dtype, steps, device, **options):
    """Weights, what they changed by, and moments, by the measured tolerance; 16-bit copies are the rounded weights."""
    start, _ = adamw_parameters(device)
    plain, exact = (adamw_reference(kind, dtype, steps, device, **options) for kind in (torch.float32, torch.float64))
    for i, (weight, parameter) in enumerate(zip(exact_weights(script, optimizer, parameters), parameters, strict=True)):
        judge("weight", weight, plain[i][0], exact[i][0])
        change = exact[i][0] - start[i]
        # The change is a difference of rounded weights: it is known no better than they are.
        rounding = 2**-24 * (start[i].double().square().mean() / change.double().square().mean()).sqrt().item()
        judge("change", weight - start[i], plain[i][0] - start[i], change, extra=rounding)
        for j, name in enumerate(("exp_avg", "exp_avg_sq"), start=1):
            judge(name, optimizer.state[parameter][name], plain[i][j], exact[i][j])
        if not torch.equal(parameter.detach(), rounded(weight, parameter.dtype)):
            raise Wrong("a parameter is not its rounded weight")


def guarded_step(step, parameters, gradients):
    copies = [gradient.clone() for gradient in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    with GuardedMemory() as memory:
        step()
    memory.check()
    check_untouched(dict(enumerate(gradients)), copies)


def check_adamw(script, dtype, device):
    """Raise Wrong unless FusedAdamW is AdamW, step by step, and writes nowhere else."""
    options = {"lr": 0.05, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.3}
    masters, parameters = adamw_parameters(device)
    with GuardedMemory() as memory:
        optimizer = script.FusedAdamW(parameters, matrix_dtype=dtype, **options)
    for step in range(3):
        guarded_step(optimizer.step, parameters, adamw_gradients(step, dtype, device))
        judge_adamw(script, optimizer, parameters, dtype, range(step + 1), device, **options)
    memory.check()
    for tensor in masters:
        if not around(tensor).isnan().all():
            raise Wrong("a store beside a parameter")


def check_adamw_with_scaler(script, dtype, device):
    """Raise Wrong unless scaled gradients train as others do, and a step whose gradients overflow changes nothing."""
    options = {"lr": 0.05, "weight_decay": 0.1}
    _, parameters = adamw_parameters(device)
    optimizer = script.FusedAdamW(parameters, matrix_dtype=dtype, **options)
    scaler = torch.amp.GradScaler(device.type, init_scale=64.0, growth_interval=1000)

    def scaled_step(gradients):
        scaler.scale(torch.zeros((), device=device))  # a scaler makes its scale when it is first used
        scaled = [placed(gradient * scaler.get_scale()) for gradient in gradients]
        guarded_step(lambda: scaler.step(optimizer), parameters, scaled)
        scaler.update()

    def state():
        moments = [optimizer.state[p][name] for p in parameters for name in ("step", "exp_avg", "exp_avg_sq")]
        tensors = (*exact_weights(script, optimizer, parameters), *parameters, *moments)
        return dict(enumerate(tensor.detach() for tensor in tensors))

    scaled_step(adamw_gradients(0, dtype, device))
    before = [tensor.clone() for tensor in state().values()]
    overflowed = adamw_gradients(7, dtype, device)
    overflowed[-1][2, 1050] = math.inf
    scaled_step(overflowed)
    check_untouched(state(), before)
    if scaler.get_scale() != 32.0:
        raise Wrong("the scaler did not see the overflow")
    scaled_step(adamw_gradients(1, dtype, device))
    judge_adamw(script, optimizer, parameters, dtype, (0, 1), device, **options)
