"""Version 3's kernels: right to the measured tolerance whatever their input looks like, or a refusal before launch."""

import contextlib
import dataclasses
import itertools
from unittest import mock

import pytest
import torch
import triton

import kernel_cases
from common.measuring.guarded_memory import LAYOUTS, launches
from common.versions import load_version, relative_error
from kernel_cases import ALL_DTYPES, CASES, DTYPES, check, normal
from marks import slow
from training import train

V3 = load_version(3)
ALL_CASES = [(operation, name) for operation, cases in CASES.items() for name in cases]
ARCHITECTURES = ("gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201", "sm_80", "sm_90", "sm_100")
SMALL = {operation: next(iter(cases.values()))() for operation, cases in CASES.items()}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("operation", "name"), ALL_CASES)
@pytest.mark.quick(6, each="operation")
def test_outputs_and_gradients(operation, name, dtype, device, record_property):
    """Also: no input changes, all is written, and nothing beside it. Check_room.sh collects the errors."""
    for result, error in check(V3, CASES[operation][name](), dtype, device).items():
        record_property(result, f"{error:.2e}")


@pytest.mark.parametrize("queries_a_key", [8, 4, 2, 1])
@pytest.mark.parametrize("head_dim", V3.HEAD_DIMS)
@pytest.mark.quick(1, each="head_dim")
def test_every_head_size_and_grouping(head_dim, queries_a_key, device):
    for dtype in DTYPES:
        check(V3, kernel_cases.attention_case(1, 19, 2 * queries_a_key, 2, head_dim, rotated=True), dtype, device)


TILES = sorted({tile[:2] for tiles in (V3.CANDIDATE_TILES | V3.AMD_TILES).values() for tile in tiles})
QUICK_TILES = [(16, 32), (32, 16)]  # queries and keys: longer in each of the two ways


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU tunes its own tiles; the interpreter can take all of them")
@pytest.mark.parametrize("tile", [tile if tile in QUICK_TILES else slow(tile) for tile in TILES], ids=str)
def test_attention_tiles_of_every_gpu(tile, device):
    """A walk must end at the diagonal, whichever way a tile is longer; three tiles of the longest, the last ragged."""

    def attention_tiles(computes, *_):
        sides = tile if computes == "dkdv" else (max(tile), min(tile))
        return (V3.Tile(*sides, 4, 1),)

    with mock.patch.object(V3, "attention_tiles", attention_tiles):
        check(V3, kernel_cases.attention_case(1, 2 * max(tile) + 5, 2, 1, 16, rotated=True), torch.float32, device)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_tiles_are_measured_or_candidates(architecture):
    """Every kernel of every GPU has tiles, one where it was measured; the interpreter always has one."""
    for kernel, D, dtype, T in itertools.product(("o", "dq", "dkdv"), V3.HEAD_DIMS, ALL_DTYPES, (64, 4096)):
        measured = architecture == "sm_90" and D == 64
        tiles = V3.attention_tiles(kernel, architecture, D, dtype, T, "tf32x3")
        assert all(q % k == 0 for q, k, *_ in tiles if kernel != "dkdv")
        assert (len(tiles) == 1) == measured and len(V3.attention_tiles(kernel, "cpu", D, dtype, T, "ieee")) == 1


HOPPER = {precision: tiles for (_, precision), tiles in V3.MEASURED_TILES.items()}


@pytest.mark.parametrize(
    ("computes", "architecture", "D", "dtype", "T", "precision", "tiles"),
    [
        ("o", "sm_90", 64, torch.bfloat16, 1024, "ieee", (HOPPER["16-bit"]["o"],)),
        ("o", "sm_90", 64, torch.bfloat16, 1025, "ieee", (V3.LONG_FORWARD_TILE,)),
        ("dq", "sm_90", 64, torch.float16, 1025, "ieee", (HOPPER["16-bit"]["dq"],)),
        ("o", "sm_90", 64, torch.float32, 1025, "tf32x3", (HOPPER["tf32x3"]["o"],)),
        ("dq", "sm_90", 64, torch.float32, 64, "tf32x3", (HOPPER["tf32x3"]["dq"],)),
        ("dkdv", "sm_90", 64, torch.float32, 64, "tf32", (HOPPER["tf32"]["dkdv"],)),
        ("o", "gfx942", 64, torch.bfloat16, 64, "ieee", V3.AMD_TILES["gfx9", "o", 16]),
        ("dq", "gfx1100", 64, torch.float32, 64, "ieee", V3.AMD_TILES["gfx1", "dq", 32]),
        ("dkdv", "gfx1201", 128, torch.float16, 64, "ieee", V3.AMD_TILES["gfx1", "dkdv", 16]),
        ("dkdv", "sm_100", 64, torch.float32, 64, "tf32", V3.CANDIDATE_TILES["dkdv", 32]),
    ],
)
def test_tiles_are_those_of_the_gpu_and_the_precision(computes, architecture, D, dtype, T, precision, tiles):
    """A deterministic run takes the first: what is timed may differ from run to run."""
    assert V3.attention_tiles(computes, architecture, D, dtype, T, precision) == tiles
    torch.use_deterministic_algorithms(True)
    assert V3.attention_tiles(computes, architecture, D, dtype, T, precision) == tiles[:1]


@pytest.mark.parametrize("kernel", [V3.ATTENTION_FORWARD, V3.ATTENTION_DQ, V3.ATTENTION_DKDV], ids=lambda k: k.computes)
def test_a_choice_between_tiles_is_made_for_each_length_head_size_and_precision(kernel):
    tiles = V3.attention_tiles(kernel.computes, "gfx942", 64, torch.bfloat16, 64, "ieee")
    with mock.patch.object(triton, "autotune") as autotune:  # older Tritons ask for a GPU here
        V3.autotuned(kernel.kernel, tiles)
    ((configs,), chosen_by) = autotune.call_args
    assert set(chosen_by["key"]) == {"T", "D", "PRECISION"} <= set(kernel.kernel.arg_names)
    for config, tile in zip(configs, tiles, strict=True):
        options = {"num_warps": config.num_warps, "num_stages": config.num_stages} | config.kwargs
        assert options == tile._asdict()


@pytest.mark.parametrize(
    ("architecture", "exact", "tf32"),
    [
        ("cpu", "ieee", "ieee"),
        ("sm_75", "ieee", "ieee"),  # without TF32
        *((architecture, "tf32x3", "tf32") for architecture in ("sm_80", "sm_86", "sm_90", "sm_120")),
        ("gfx90a", "ieee", "ieee"),
        ("gfx942", "ieee", "tf32"),
        ("gfx950", "ieee", "ieee"),
        ("gfx1100", "ieee", "ieee"),
    ],
)
def test_float32_is_multiplied_in_tf32_where_it_may_and_can_be(architecture, exact, tf32):
    """Exactly as three TF32 dots on NVIDIA's GPUs; 16 bits have no choice."""
    for allowed, expected in (("highest", exact), ("high", tf32)):
        torch.set_float32_matmul_precision(allowed)
        assert V3.dot_precision(architecture, torch.float32) == expected
        assert {V3.dot_precision(architecture, dtype) for dtype in (torch.float16, torch.bfloat16)} == {"ieee"}


def test_sums_of_columns(device):
    kernel_cases.check_column_sums(V3, device)


# ---------------------------------------------------------------- how tensors lie in memory, and how they are used


TENSORS = [(name, tensor) for name, case in SMALL.items() for tensor in (*case.inputs, *case.constants, "cotangents")]


@pytest.mark.parametrize(("operation", "tensor"), TENSORS)
@pytest.mark.quick(8)
def test_layouts_are_right_or_refused(operation, tensor, device):
    """Nothing is refused that a model meets: slices, transposed and expanded activations and gradients."""
    case = SMALL[operation]
    for layout in LAYOUTS[1:]:
        met = tensor in (next(iter(case.inputs)), "cotangents") and layout in ("padded", "reversed", "expanded")
        with contextlib.nullcontext() if met else contextlib.suppress(ValueError):
            check(V3, dataclasses.replace(case, layouts={tensor: layout}), torch.float32, device)


@pytest.mark.parametrize("operation", CASES)
def test_double_use(operation, device):
    """A tensor that two operations read gets both gradients, and the second call does not disturb the first."""
    case = SMALL[operation]
    once = [tensor.to(device) for tensor in case.inputs.values()]
    constants = [tensor.to(device) for tensor in case.constants.values()]

    def gradients(function):
        inputs = [tensor.clone().requires_grad_() for tensor in once]
        uses = inputs, [0.5 * tensor for tensor in inputs]
        outputs = [output for use in uses for output in kernel_cases.as_tuple(function(*use, *constants))]
        return torch.autograd.grad(sum((o * o).sum() for o in outputs) + inputs[0].sum(), inputs)

    for gradient, wanted in zip(gradients(lambda *t: case.call(V3, *t)), gradients(case.define), strict=True):
        assert relative_error(gradient, wanted) < 1e-4


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
def test_embedding_gradient_of_a_frequent_token(dtype, device):
    """4096 gradients of one add up to 4096. A sum that is kept in 16 bits stops at 2048 or 256, as PyTorch's does."""
    w = torch.zeros(2, 3, dtype=dtype, device=device, requires_grad=True)
    tokens = torch.zeros(4, 1024, dtype=torch.int64, device=device)
    V3.EmbeddingFunction.apply(tokens, w).backward(torch.ones(4, 1024, 3, dtype=dtype, device=device))
    assert w.grad.tolist() == [[4096.0] * 3, [0.0] * 3]


def test_residual_and_branch_may_be_one_tensor(device):
    x, w = normal(5, 24).to(device).requires_grad_(), normal(24, seed=1).to(device)
    total, normed = V3.add_rms_norm(x, x, w, 1e-6)
    (gradient,) = torch.autograd.grad(normed.square().sum() + total.sum(), x)
    wanted = load_version(1).rms_norm(2 * x, w, 1e-6).square().sum() + (2 * x).sum()
    torch.testing.assert_close(gradient, *torch.autograd.grad(wanted, x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_the_norm_is_that_of_the_sum_as_it_is_stored(dtype, device):
    """The backward reads the rounded sum, too. Normalized before its rounding, a fifth of the elements are others."""
    residual, branch = (normal(37, 100, seed=seed).to(device, dtype) for seed in range(2))
    w = normal(100, seed=2).to(device)
    total, normed = V3.add_rms_norm(residual, branch, w, 1e-6)
    again = V3.add_rms_norm(total, None, w, 1e-6)[1]
    assert (normed != again).sum() <= 0.01 * again.numel()


def test_gradients_of_the_two_terms_share_no_memory(device):
    """x = residual + branch has one gradient for both; what is done to one must not reach the other."""
    residual, branch = (torch.randn(3, 16, device=device, requires_grad=True) for _ in range(2))
    V3.add_rms_norm(residual, branch, torch.ones(16, device=device), 1e-6)[1].sum().backward()
    kept = branch.grad.clone()
    residual.grad.zero_()
    assert torch.equal(branch.grad, kept)


# ---------------------------------------------------------------- refusals


def x(*shape, dtype="float32", device="cpu"):
    return torch.zeros(shape, dtype=getattr(torch, dtype), device=device)


LABELS = torch.zeros(4, dtype=torch.int64)
WRONG_INPUT = {
    "norm of integers": lambda: V3.add_rms_norm(x(4, 8, dtype="int32"), None, x(8), 1e-6),
    "norm of float64": lambda: V3.add_rms_norm(x(4, 8, dtype="float64"), None, x(8), 1e-6),
    "norm of one dimension": lambda: V3.add_rms_norm(x(8), None, x(8), 1e-6),
    "norm of nothing": lambda: V3.add_rms_norm(x(0, 8), None, x(8), 1e-6),
    "two dtypes": lambda: V3.add_rms_norm(x(4, 8), x(4, 8, dtype="float16"), x(8), 1e-6),
    "two devices": lambda: V3.add_rms_norm(x(4, 8), x(4, 8, device="meta"), x(8), 1e-6),
    "branch of another shape": lambda: V3.add_rms_norm(x(4, 8), x(2, 8), x(8), 1e-6),
    "norm weight too short": lambda: V3.add_rms_norm(x(4, 8), None, x(7), 1e-6),
    "norm weight elsewhere": lambda: V3.add_rms_norm(x(4, 8), None, x(8, device="meta"), 1e-6),
    "norm weight of integers": lambda: V3.add_rms_norm(x(4, 8), None, x(8, dtype="int64"), 1e-6),
    "rope of float64": lambda: V3.rope(x(1, 5, 3, 8, dtype="float64"), x(5, 4), x(5, 4), 2),
    "rope without a batch": lambda: V3.rope(x(5, 3, 8), x(5, 4), x(5, 4), 2),
    "too few cosines": lambda: V3.rope(x(1, 5, 3, 8), x(4, 4), x(5, 4), 2),
    "too few sines": lambda: V3.rope(x(1, 5, 3, 8), x(5, 4), x(4, 4), 2),
    "cosines of another width": lambda: V3.rope(x(1, 5, 3, 8), x(5, 8), x(5, 8), 2),
    "sines elsewhere": lambda: V3.rope(x(1, 5, 3, 8), x(5, 4), x(5, 4, device="meta"), 2),
    "odd head size": lambda: V3.rope(x(1, 5, 3, 7), x(5, 3), x(5, 3), 2),
    "negative rotated heads": lambda: V3.rope(x(1, 5, 3, 8), x(5, 4), x(5, 4), -1),
    "more rotated heads than there are": lambda: V3.rope(x(1, 5, 3, 8), x(5, 4), x(5, 4), 4),
    "SwiGLU of float64": lambda: V3.packed_swiglu(x(4, 16, dtype="float64")),
    "SwiGLU of one dimension": lambda: V3.packed_swiglu(x(8)),
    "SwiGLU of width 0": lambda: V3.packed_swiglu(x(4, 0)),
    "odd packed width": lambda: V3.packed_swiglu(x(4, 17)),
    "attention in float64": lambda: V3.flash_attention(x(1, 5, 4, 16, dtype="float64"), 2, 1),
    "attention without a batch": lambda: V3.flash_attention(x(5, 4, 16), 2, 1),
    "head size 24": lambda: V3.flash_attention(x(1, 5, 4, 24), 2, 1),
    "heads that do not divide": lambda: V3.flash_attention(x(1, 5, 7, 16), 3, 2),
    "heads that do not add up": lambda: V3.flash_attention(x(1, 5, 5, 16), 2, 1),
    "no key head": lambda: V3.flash_attention(x(1, 5, 2, 16), 2, 0),
    "negative query heads": lambda: V3.flash_attention(x(1, 5, 2, 16), -2, 2),
    "logits of float64": lambda: V3.cross_entropy(x(4, 8, dtype="float64"), LABELS),
    "logits of one dimension": lambda: V3.cross_entropy(x(8), LABELS[0]),
    "too few labels": lambda: V3.cross_entropy(x(5, 8), LABELS),
    "labels that are no integers": lambda: V3.cross_entropy(x(4, 8), LABELS.float()),
    "labels elsewhere": lambda: V3.cross_entropy(x(4, 8), LABELS.to("meta")),
    "head of another width": lambda: V3.linear_cross_entropy(x(4, 8), x(9, 7), LABELS),
    "head of another dtype": lambda: V3.linear_cross_entropy(x(4, 8), x(9, 8, dtype="float16"), LABELS),
    "head of one dimension": lambda: V3.linear_cross_entropy(x(4, 8), x(8), LABELS),
    "too few labels for the head": lambda: V3.linear_cross_entropy(x(5, 8), x(9, 8), LABELS),
}


@pytest.mark.parametrize("name", WRONG_INPUT)
def test_wrong_input_is_refused_before_launch(name):
    with launches() as launched, pytest.raises(ValueError, match=r"\w+: .+") as error:
        WRONG_INPUT[name]()
    assert not launched and "\n" not in str(error.value)


@pytest.mark.gpu
def test_changing_sequence_lengths_do_not_recompile_without_end(device):
    """Kernels compiled for lengths and token counts that are multiples of 16, and for others, serve all."""
    kernels = [value for value in vars(V3).values() if isinstance(value, triton.JITFunction)]

    def compiled_after(*lengths):
        for T in lengths:
            train(3, f"--hidden-dim 64 --num-layers 1 --num-heads 2 --batch-size 2 --no-graph --seq-len {T}".split(), 1)
        return sum(len(cache[0]) for kernel in kernels for cache in kernel.device_caches.values())

    before = compiled_after(16, 17, 24, 32, 33, 64, 65, 128, 129)
    assert compiled_after(18, 40, 48, 77, 80, 100, 112, 127) == before > 0


@pytest.mark.parametrize("rows", [33, 34, 36, 48])
def test_the_loss_of_any_number_of_rows_begins_at_16_bytes(rows):
    """Triton compiles a kernel again for an address that 16 does not divide."""
    assert [part.data_ptr() % 16 for part in V3.empty_per_row(4, rows, "cpu")] == [0] * 4


# ---------------------------------------------------------------- AdamW


# PyTorch's scaler does not take bfloat16, which has no need of one.
KINDS = [(dtype, scaled) for dtype in ALL_DTYPES for scaled in (False, True) if dtype != torch.bfloat16 or not scaled]


@pytest.mark.parametrize(("dtype", "scaled"), KINDS, ids=str)
def test_adamw(dtype, scaled, device):
    """Ragged sizes, more elements than one program takes, nothing harmed beside them; judged after every step."""
    kernel_cases.check_adamw(V3, dtype, device, scaled)


def test_a_gradient_at_any_address(device):
    """DDP's gradients are views of its buckets, which start anywhere; the kernel reads 16 bytes at a time."""
    memory, trained, kernel = normal(65).to(device), [], V3.adamw_kernel

    class Aligned:
        def __getitem__(self, grid):
            return lambda table, *others: (
                trained.append(table[0, V3.GRAD.value] % 16 == 0),
                kernel[grid](table, *others),
            )

    for gradient in (memory[1:].view(4, 16), memory[1:].clone().view(4, 16)):
        parameter = torch.nn.Parameter(normal(4, 16).to(device))
        parameter.grad = gradient
        with mock.patch.object(V3, "adamw_kernel", Aligned()):
            V3.FusedAdamW([parameter], lr=0.1).step()
        trained.append(parameter)
    assert trained[0] and trained[2] and torch.equal(trained[1], trained[3])


def test_a_strided_gradient_is_that_of_its_copy(device):
    gradient, trained = normal(16, 4).to(device).t(), []
    for given in (gradient, gradient.contiguous()):
        parameter = torch.nn.Parameter(normal(4, 16).to(device))
        parameter.grad = given
        V3.FusedAdamW([parameter], lr=0.1).step()
        trained.append(parameter)
    assert torch.equal(*trained)


def test_loads_are_wide_only_where_every_parameter_allows_it(device):
    """16 elements are 32 bytes or more: a mask that is one for all of them needs counts without a rest."""
    wide, odd = (torch.nn.Parameter(normal(*shape).to(device)) for shape in ((3, 16), (3, 7)))
    assert V3.FusedAdamW([wide], lr=0.1).aligned
    assert not V3.FusedAdamW([wide, odd], lr=0.1).aligned


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
def test_state_may_be_overwritten_in_place(dtype, device):
    """All that lasts is in optimizer.state: a restored optimizer goes on as the first one did."""
    parameter = torch.nn.Parameter(normal(8, 16).to(device))
    optimizer = V3.FusedAdamW([parameter], lr=0.1, matrix_dtype=dtype)
    state = [parameter.data, *optimizer.state[parameter].values()]

    def after(*steps):
        for step in steps:
            parameter.grad = normal(8, 16, seed=step).to(device, dtype)
            optimizer.step()
        return [tensor.clone() for tensor in state]

    start, wanted = after(), after(2, 3)
    after(0, 1)
    for tensor, saved in zip(state, start, strict=True):
        tensor.copy_(saved)
    assert all(torch.equal(a, b) for a, b in zip(after(2, 3), wanted, strict=True))


@pytest.mark.parametrize("label", [-101, -1, 8, 2**40])
def test_a_label_out_of_range_makes_the_loss_nan(label, device):
    logits, labels = normal(4, 8).to(device).requires_grad_(), torch.zeros(4, dtype=torch.int64, device=device)
    one = torch.eye(8, device=device)
    assert V3.cross_entropy(logits, labels).isfinite() and V3.linear_cross_entropy(logits, one, labels).isfinite()
    labels[2] = label
    assert V3.cross_entropy(logits, labels).isnan() and V3.linear_cross_entropy(logits, one, labels).isnan()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["in float32", "rounded to 16 bits"])
def test_a_matmul_that_rounds_its_sum_is_not_taken(dtype, monkeypatch):
    def addmm(total, a, b, out_dtype, out):
        out.copy_((total + a.float() @ b.float()).to(dtype))

    monkeypatch.setattr(torch, "addmm", addmm)
    taken = V3.sums_in_float32.__wrapped__(torch.device("cpu"), torch.bfloat16)
    assert taken == (dtype == torch.float32)


def test_all_rows_ignored_have_no_loss(device):
    """As in PyTorch, the mean of nothing is NaN, and its gradient 0."""
    logits, labels = normal(4, 8).to(device).requires_grad_(), torch.full((4,), -100, device=device)
    one = torch.eye(8, device=device)
    plain = torch.nn.functional.cross_entropy(logits, labels)
    for loss in (plain, V3.cross_entropy(logits, labels), V3.linear_cross_entropy(logits, one, labels)):
        assert loss.isnan() and not torch.autograd.grad(loss, logits)[0].any()


# Zeros, numbers about 1, the largest, which rounds to infinity, infinities and NaN, of both signs.
SPECIAL = [0, 1, 0x3F7F, 0x3F80, 0x7F7F, 0x7F80, 0x7FC0, 0x7FFF, 0x8000, 0xBF80, 0xFF7F, 0xFF80, 0xFFC0, 0xFFFF]


@pytest.mark.filterwarnings("ignore:invalid value")  # NaN, in the interpreter
@pytest.mark.parametrize("uppers", [SPECIAL, slow(range(2**16))], ids=["special", "all"])
def test_a_weight_split_in_halves_loses_no_bit(uppers, device):
    """Upper halves before lower halves around those where their rounding turns, and an optimizer that learns nothing.

    NaN stays one in both copies.
    """
    lower = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    weights = ((torch.tensor(uppers)[:, None] << 16) + lower).to(torch.int32).view(torch.float32).to(device)
    parameter, known = torch.nn.Parameter(weights.clone()), ~weights.isnan()
    optimizer = V3.FusedAdamW([parameter], lr=0.0, weight_decay=0.0, matrix_dtype=torch.bfloat16)
    before, parameter.grad = parameter.detach().clone(), torch.zeros_like(parameter)
    for step in (lambda: None, optimizer.step):
        step()
        joined = V3.get_weight(parameter, optimizer.state[parameter]).detach()
        assert torch.equal(joined[known].view(torch.int32), weights[known].view(torch.int32))
        assert torch.equal(parameter.isnan(), ~known) and joined[~known].isnan().all()
        assert torch.equal(parameter[known], before[known])
    upright = known & (weights.view(torch.int32) & 0xFFFF != 0x8000)  # PyTorch rounds halves to the even neighbour
    assert torch.equal(before[upright], weights.to(torch.bfloat16)[upright])


def test_adamw_refuses_groups(device):
    """One group is all that it supports; options of a second one would be lost."""
    with pytest.raises(TypeError):
        V3.FusedAdamW([{"params": [torch.nn.Parameter(normal(4))]}], lr=0.1)


def test_adamw_leaves_a_parameter_without_gradient_alone(device):
    parameters = [torch.nn.Parameter(weight) for weight in kernel_cases.adamw_weights(device)]
    kept = parameters[0].detach().clone()
    optimizer = V3.FusedAdamW(parameters, lr=0.1)
    kernel_cases.set_gradients(parameters, [None, *kernel_cases.adamw_gradients(0, torch.float32, device)[1:]])
    optimizer.step()
    assert torch.equal(parameters[0], kept) and not optimizer.state[parameters[0]]["exp_avg"].count_nonzero()


def test_adamw_after_unscaled_gradients(device):
    """Clipping needs GradScaler.unscale_ before the step: what was unscaled is not scaled again."""
    options = {"lr": 0.05, "weight_decay": 0.1}
    parameters = [torch.nn.Parameter(weight) for weight in kernel_cases.adamw_weights(device)]
    optimizer = V3.FusedAdamW(parameters, **options)
    scaler = torch.amp.GradScaler(device.type, init_scale=64.0)
    scaler.scale(torch.zeros((), device=device))
    gradients = kernel_cases.adamw_gradients(0, torch.float32, device)
    kernel_cases.set_gradients(parameters, [64 * gradient for gradient in gradients])
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    kernel_cases.judge_adamw(V3, optimizer, parameters, torch.float32, (0,), device, **options)
