"""The bounds of 16-bit results: a right answer passes on any GPU, one that rounds on the way does not."""

import math
import sys

import numpy as np
import pytest
import torch

from common.versions import REPOSITORY, relative_error
from marks import slow

sys.path.insert(0, str(REPOSITORY / "exercises"))

import check
import grading
import judge
import rounding

# isort: split
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

BOTH = [torch.float16, torch.bfloat16]
EXERCISES = check.exercises()


def product(x, y, z, on_the_way=lambda product: product):
    return {"p": on_the_way(x * y) * z}


def bounds(define, inputs, dtype, tolerance=1e-6):
    inputs = {name: value.to(dtype) for name, value in inputs.items()}
    exact = define(**{name: value.double() for name, value in inputs.items()})
    found = rounding.bounds_in_16_bits(define, inputs, dtype, define(**inputs), exact, tolerance)
    return inputs, exact, found


def factors():
    return {name: grading.random(40, seed=seed) for seed, name in enumerate("xyz")}


@pytest.mark.parametrize("dtype", BOTH)
def test_a_result_is_rounded_once(dtype):
    inputs, exact, bound = bounds(product, factors(), dtype)
    wide = product(**{name: value.float() for name, value in inputs.items()})["p"]
    assert relative_error(wide.to(dtype), exact["p"]) <= bound["p"]
    twice = product(**{name: value.float() for name, value in inputs.items()}, on_the_way=lambda p: p.to(dtype).float())
    assert relative_error(twice["p"].to(dtype), exact["p"]) > bound["p"]


@pytest.mark.parametrize("e", [1e-6, -1e-6, 1e-5])
@pytest.mark.parametrize("dtype", BOTH)
def test_what_an_answer_in_float32_may_have_moves_no_result_beyond_the_bound(dtype, e):
    """Each number lies halfway between two numbers of the dtype, so the smallest e decides to which it is rounded."""
    exact = 1 + (torch.arange(64, dtype=torch.float64) + 0.5) * torch.finfo(dtype).eps
    once = relative_error(exact.to(dtype), exact)
    got = (exact * (1 + e)).to(dtype)
    assert relative_error(got, exact) <= once + 2 * abs(e)


@pytest.mark.parametrize("dtype", BOTH)
def test_a_rounding_that_is_asked_for_counts_twice_and_only_in_the_bound(dtype):
    def define(x, y, z):
        return product(x, y, z, on_the_way=rounding.stored)

    inputs, exact, bound = bounds(define, factors(), dtype, tolerance=0.0)
    wide = {name: value.double() for name, value in inputs.items()}
    assert torch.equal(exact["p"], product(**wide)["p"])
    once = relative_error(exact["p"].to(dtype), exact["p"])
    way = relative_error(product(**wide, on_the_way=lambda p: p.to(dtype).double())["p"], exact["p"])
    assert bound["p"] == pytest.approx(math.hypot(once, 2 * way), rel=1e-3)


def test_the_gradient_alone_can_be_rounded():
    x = torch.tensor([1 / 3], dtype=torch.float64, requires_grad=True)
    with rounding.reference_in(torch.float16, stores=True):
        y = rounding.stored(x, value=False, gradient=True)
        (dx,) = torch.autograd.grad(y, x, torch.full_like(x, 1 / 7))
    assert y.item() == 1 / 3 and dx.item() == torch.tensor(1 / 7).half().item()


def test_only_a_given_rounding_belongs_to_the_exact_result():
    x = torch.tensor([1 / 3], dtype=torch.float64)
    near = x.half().double()
    with rounding.reference_in(torch.float16):
        assert torch.equal(rounding.rounded(x), near) and torch.equal(rounding.stored(x), x)
    with pytest.raises(KeyError), rounding.reference_in(torch.float16, stores=True):
        assert torch.equal(rounding.rounded(x), near) and torch.equal(rounding.stored(x), near)
        raise KeyError
    assert torch.equal(rounding.rounded(x), x) and torch.equal(rounding.stored(x), x)
    with rounding.reference_in(torch.float32, stores=True):
        assert torch.equal(rounding.rounded(x), x) and torch.equal(rounding.stored(x), x)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("batch", [(), (2,)])
def test_a_matrix_unit_adds_four_products_at_once_and_cuts_the_sum_off(sign, batch):
    """1 + 0.99 ulp is 1 for it, though the next float32 is nearer; one ulp counts."""
    ulp = 2**-23
    a = torch.tensor([[sign, 0, 0, 0, *4 * [sign * 0.99 * ulp / 4]], [sign, 0, 0, 0, *4 * [sign * ulp / 4]]])
    b = torch.ones(8, 1)
    with rounding.MatrixUnit():
        found = a.expand(*batch, 2, 8) @ b.expand(*batch, 8, 1)
    assert found.shape == (*batch, 2, 1) and found.dtype == torch.float32
    assert found[..., 0, 0].eq(sign).all() and found[..., 1, 0].eq(sign * (1 + ulp)).all()


def test_a_matrix_unit_multiplies_in_a_backward_too():
    x, w = torch.ones(1, 1, requires_grad=True), torch.ones(1, 8)
    dy = torch.tensor([[1.0, 0, 0, 0, *4 * [0.99 * 2**-25]]])
    with rounding.MatrixUnit():
        (dx,) = torch.autograd.grad(x @ w, x, dy)
    assert dx.item() == 1.0
    assert (dy.double() @ w.T.double()).float().item() > 1.0


@pytest.mark.parametrize("dtype", BOTH)
def test_what_a_forward_kept_follows_from_the_rounded_inputs(dtype):
    """Otherwise the backward's error would be that of rstd, and not its own."""
    task = grading.load_task(EXERCISES["06"])
    given = grading.cast(task, task.inputs(rows=6, C=8), dtype)
    rstd = (given["x"].double().square().mean(1) + 1e-6).rsqrt()
    assert given["rstd"].dtype == torch.float32 and relative_error(given["rstd"], rstd) < 1e-7
    task = grading.load_task(EXERCISES["11"])
    given = grading.cast(task, task.inputs(B=1, T=8, H=2, K=1), dtype)
    exact = task.forward(**{name: given[name] for name in ("qkv", "do", "H", "K")})
    assert all(torch.equal(given[name], exact[name]) for name in ("lse", "delta"))


def test_the_gradient_of_the_queries_is_that_of_the_given_delta():
    task = grading.load_task(EXERCISES["10"])
    given = task.inputs(B=1, T=8, H=2, K=1)
    wide = {name: value.double() if isinstance(value, torch.Tensor) else value for name, value in given.items()}
    right = task.define(**wide)["dq"]
    shifted = task.define(**wide | {"o": wide["o"] + 0.5})
    q, k, v = wide["qkv"].split([2, 1, 1], dim=2)
    scores = torch.einsum("bthd,bsd->bhts", q, k[:, :, 0]) / 4
    P = scores.masked_fill(torch.ones(8, 8, dtype=torch.bool).triu(1), -math.inf).softmax(3)
    dP = torch.einsum("bthd,bsd->bhts", wide["do"], v[:, :, 0])
    for o, found in ((wide["o"], right), (wide["o"] + 0.5, shifted["dq"])):
        delta = (wide["do"] * o).sum(3).transpose(1, 2)
        dS = P * (dP - delta[..., None])
        assert relative_error(found, torch.einsum("bhts,bsd->bthd", dS, k[:, :, 0]) / 4) < 1e-6


# ---------------------------------------------------------------- a GPU that computes less accurately


def biased(function, ulps):
    """Return an operation of Triton's interpreter whose float32 results are this many ulps too large."""

    def call(builder, *arguments):
        found = function(builder, *arguments)
        return TensorHandle((found.data * np.float32(1 + ulps * 2.0**-23)).astype(found.data.dtype), found.dtype)

    return call


@pytest.mark.parametrize("ulps", [2, -2])
@pytest.mark.parametrize(
    "numbers",
    [["03", "08", "17"], slow(["02", "04", "06", "07", "09", "10", "11", "13", "16", "20", "22", "23", "24"])],
    ids=str,
)
def test_a_right_answer_passes_on_the_least_accurate_gpu(numbers, ulps, monkeypatch):
    """tl.dot cuts its sums off after every four products, and all functions are 2 ulps off in the same direction."""
    if not grading.INTERPRETED:
        pytest.skip("changes Triton's interpreter")
    dots = []
    dot = InterpreterBuilder.create_dot

    def cut_off(builder, a, b, sums, *options):
        if a.data.dtype != np.float16:
            return dot(builder, a, b, sums, *options)
        dots.append(a.data.shape)
        found, left, right = (matrix.data.astype(np.float64) for matrix in (sums, a, b))
        for k in range(0, left.shape[1], 4):
            found = found + left[:, k : k + 4] @ right[k : k + 4]
            nearest = found.astype(np.float32)
            found = np.where(np.abs(nearest) > np.abs(found), np.nextafter(nearest, np.float32(0)), nearest)
        return TensorHandle(found.astype(sums.data.dtype), sums.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", cut_off)
    for name in ("exp", "exp2", "log", "log2", "rsqrt", "sqrt"):
        function = getattr(InterpreterBuilder, f"create_{name}")
        monkeypatch.setattr(InterpreterBuilder, f"create_{name}", biased(function, ulps))
    monkeypatch.setattr(InterpreterBuilder, "create_fdiv", biased(InterpreterBuilder.create_fdiv, ulps))
    for number in numbers:
        task = grading.load_task(EXERCISES[number])
        module = grading.load_module(check.solution_of(EXERCISES[number]), f"solution_{number}")
        for sizes in task.cases.values():
            grading.run_case(task, module, sizes, torch.float16)
        assert not {"08", "17"} & {number} or dots


@pytest.mark.parametrize("factor", [0.7, 1.0, 1.4])
@pytest.mark.parametrize("wide", [False, True])
def test_an_answer_may_round_p_relative_to_anything_or_not_at_all(factor, wide, tmp_path):
    """The maximum of a row is 1 if it is relative to m, and has no error then."""
    source = check.solution_of(EXERCISES["08"]).read_text()
    changed = f"tl.dot((P * {factor}), v.to(tl.float32), o" if wide else f"tl.dot((P * {factor}).to(v.dtype), v, o"
    source = source.replace("tl.dot(P.to(v.dtype), v, o", changed).replace("o / l", f"o / {factor} / l")
    path = tmp_path / "answer.py"
    path.write_text(source)
    task = grading.load_task(EXERCISES["08"])
    for sizes in list(task.cases.values())[:5]:
        grading.run_case(task, grading.load_module(path, "answer_scaled"), sizes, torch.float16)


@pytest.mark.parametrize("times", [0.99, 1.01])
def test_the_judge_takes_the_bound_that_it_is_given(times):
    exact = {"y": torch.ones(8, dtype=torch.float64)}
    judged = judge.Judge(grading.Task({}, None, None, {"y": "row"}, {}), None, {}, None)
    got = {"y": exact["y"] * (1 + times * 1e-3)}
    if times < 1:
        judged.check_values(got, exact, exact, {"y": 1e-3})
    else:
        with pytest.raises(judge.Wrong, match="allowed 1.0e-03"):
            judged.check_values(got, exact, exact, {"y": 1e-3})
