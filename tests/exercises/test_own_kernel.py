"""A kernel of the user's own: the folder that check.py makes, what is said of its faults, and what is no fault."""

import ast
import contextlib
import functools
import os
import re
import shlex
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import triton

from common.versions import REPOSITORY
from processes import run_file

sys.path.insert(0, str(REPOSITORY / "exercises"))
import answers
import check
import compilation
import grading
import own_kernel
import strict_interpreter
from common.command_line import Failure

interpreted = pytest.mark.skipif(not grading.INTERPRETED, reason="a GPU shows fewer faults")

TASK = """
import torch

FUNCTION = "kernel.py:centered"
GRADIENTS = ("x", "w")
DTYPES = (torch.float32, torch.float16)
CASES = [{"rows": 4, "C": 8}, {"rows": 3, "C": 6}]
TIMED = {"rows": 4, "C": 8}


def inputs(rows, C):
    return {"x": torch.randn(rows, C) + 0.5, "w": torch.randn(C) + 1.5}


def reference(x, w):
    return (x - x.mean(1, keepdim=True)).square().sum(1, keepdim=True) * w
"""

KERNEL = """
import torch
import triton
import triton.language as tl


@triton.jit
def forward_kernel(x_ptr, w_ptr, y_ptr, C, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * C + tl.arange(0, BLOCK)
    mask = tl.arange(0, BLOCK) < C
    x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    w = tl.load(w_ptr + tl.arange(0, BLOCK), mask=mask, other=0.0).to(tl.float32)
    c = tl.where(mask, x - tl.sum(x, 0) / C, 0.0)
    y = tl.sum(c * c, 0) * w
    tl.store(y_ptr + offsets, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def backward_kernel(dy_ptr, x_ptr, w_ptr, dx_ptr, dw_ptr, C, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * C + tl.arange(0, BLOCK)
    mask = tl.arange(0, BLOCK) < C
    dy = tl.load(dy_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    w = tl.load(w_ptr + tl.arange(0, BLOCK), mask=mask, other=0.0).to(tl.float32)
    c = tl.where(mask, x - tl.sum(x, 0) / C, 0.0)
    dx = 2 * c * tl.sum(dy * w, 0)
    tl.store(dx_ptr + offsets, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    tl.store(dw_ptr + offsets, dy * tl.sum(c * c, 0), mask=mask)


class Centered(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        x = x.contiguous()
        w = w.contiguous()
        ctx.save_for_backward(x, w)
        y = torch.empty_like(x)
        forward_kernel[(x.shape[0],)](x, w, y, x.shape[1], triton.next_power_of_2(x.shape[1]))
        return y

    @staticmethod
    def backward(ctx, dy):
        x, w = ctx.saved_tensors
        dy = dy.contiguous()
        dx = torch.empty_like(x)
        dw = torch.empty(x.shape, dtype=torch.float32, device=x.device)
        backward_kernel[(x.shape[0],)](dy, x, w, dx, dw, x.shape[1], triton.next_power_of_2(x.shape[1]))
        return dx, dw.sum(0).to(w.dtype)


def centered(x, w):
    return Centered.apply(x, w)
"""

LOAD = "x = tl.load(x_ptr + offsets, mask=mask, other=0.0)"


def verdict_on(folder, *changes, task=TASK, kernel=KERNEL):
    """Return the verdict on a kernel in which texts are replaced, where they first occur."""
    for old, new in changes:
        assert old in kernel, old
        kernel = kernel.replace(old, new, 1)
    (folder / "task.py").write_text(task)
    (folder / "kernel.py").write_text(kernel)
    return own_kernel.grade(folder, "check")


@interpreted
@pytest.mark.parametrize(
    "right", [[], [("x = x.contiguous()\n", "assert x.is_contiguous()\n")]], ids=["plain", "refuses"]
)
def test_a_right_kernel_passes(tmp_path, right):
    """One that loudly refuses an input that is not contiguous is right, too."""
    verdict = verdict_on(tmp_path, *right)
    assert verdict["passed"], verdict["sentence"]
    assert verdict["sentence"].startswith("2 cases in float32, float16; gradients of x, w")
    assert ("it refuses x where that is not contiguous" in verdict["sentence"]) == bool(right)


UNTRACKED = "y = torch.empty_like(x)\n    forward_kernel[(4,)](x, w, y, 8, 8)\n    return y"
FAULTS = {
    "masked elements are not neutral": (
        [("tl.where(mask, x - tl.sum(x, 0) / C, 0.0)", "x - tl.sum(x, 0) / C")],
        ("value", "y", "rows 3, C 6, float32"),
        "right where the sizes are powers of two: do masked elements enter a sum",
    ),
    "a clone does not hide a stray load": (
        [("x.contiguous()", "x.clone(memory_format=torch.contiguous_format)"), (LOAD, "x = tl.load(x_ptr + offsets)")],
        ("stray load", "a tensor [3, 6] that is allocated", "rows 3, C 6, float32"),
        "nearest 1 past the end: mask the load in line 11",
    ),
    "a load whose values nobody uses": (
        [(LOAD, "tl.load(w_ptr + C)\n    " + LOAD)],
        ("stray load", "w", "rows 4, C 8, float32"),
        "loads elements outside the tensor, the nearest 1 past the end: mask the load in line 11",
    ),
    "a mask that is too wide": (
        [("mask = tl.arange(0, BLOCK) < C", "mask = tl.arange(0, BLOCK) <= C")],
        ("stray", "y", "rows 3, C 6, float32"),
        "y: 1 element outside the tensor written, the nearest 1 past the end: the mask of the store in line 15 is",
    ),
    "rows that are never written": (
        [("forward_kernel[(x.shape[0],)]", "forward_kernel[(x.shape[0] - 1,)]")],
        ("unwritten", "y", "rows 4, C 8, float32"),
        "8 of 32 elements are never written, the first at row 3, column 0",
    ),
    "a partial sum that is never written": (
        [("tl.store(dw_ptr + offsets, dy", "tl.store(dw_ptr + tl.arange(0, BLOCK), dy")],
        ("unwritten", "dw", "rows 4, C 8, float32"),
        "8 of 8 elements are never written",
    ),
    "a gradient that is not contiguous": (
        [("dy = dy.contiguous()", "dy = dy")],
        ("stray load", "dy", "rows 4, C 8, float32, gradients expanded"),
        "wrong only where the gradient of a result is not contiguous (expanded)",
    ),
    "an input that is not contiguous": (
        [("x = x.contiguous()", "x = x"), ("torch.empty_like(x)", "torch.empty(x.shape, dtype=x.dtype)")],
        ("value", "y", "rows 4, C 8, float32, x padded"),
        "wrong only where x is not contiguous (padded): call x.contiguous()",
    ),
    "a gradient that only one input gets": (
        [("        return dx, dw.", "        dx = dx if ctx.needs_input_grad[1] else None\n        return dx, dw.")],
        ("no gradient", "dx", "rows 4, C 8, float32, x alone"),
        "wrong only where no input but x needs a gradient",
    ),
    "a gradient that is None": (
        [("return dx, dw.sum(0).to(w.dtype)", "return dx, None")],
        ("no gradient", "dw", "rows 4, C 8, float32"),
        "return a gradient for w from backward",
    ),
    "no Function": (
        [("return Centered.apply(x, w)", UNTRACKED)],
        ("no gradient", "y", "rows 4, C 8, float32"),
        "y has no grad_fn",
    ),
    "no kernel": (
        [("return Centered.apply(x, w)", "return (x - x.mean(1, keepdim=True)).square().sum(1, keepdim=True) * w")],
        ("no kernel", None, None),
        "no kernel was launched",
    ),
    "an input is changed": (
        [("    c = tl.where", "    tl.store(x_ptr + offsets, -x, mask=mask)\n    c = tl.where")],
        ("changed", "x", "rows 4, C 8, float32"),
        "x: the kernel changed its input",
    ),
    "dx is stored over dy": (
        [("dx = torch.empty_like(x)", "dx = dy")],
        ("changed", "dy", "rows 4, C 8, float32"),
        "the backward changed the gradient that it was given, which others may read",
    ),
    "a result of another dtype": (
        [("y = torch.empty_like(x)", "y = torch.empty_like(x, dtype=torch.float32)")],
        ("results", "y", "rows 4, C 8, float16"),
        "y is float32 [4, 8], but should be float16 [4, 8]",
    ),
    "two results": (
        [("return Centered.apply(x, w)", "return Centered.apply(x, w), x")],
        ("results", None, "rows 4, C 8, float32"),
        "it returns 2 results, the reference 1",
    ),
    "a masked load without other": (
        [(LOAD, "x = tl.load(x_ptr + offsets, mask=mask)")],
        ("value", "y", "rows 3, C 6, float32"),
        "line 11 loads without other",
    ),
    "and for &": (
        [("mask = tl.arange(0, BLOCK) < C", "i = tl.arange(0, BLOCK)\n    mask = i < C and i >= 0")],
        ("precedence", None, None),
        "line 11: and asks for one truth value",
    ),
    "not written yet": (
        [("return Centered.apply(x, w)", "raise NotImplementedError('write it')")],
        ("crash", None, "rows 4, C 8, float32"),
        "NotImplementedError: write it",
    ),
}  # fmt: skip


IN_ONE_WAY = {  # right in each other way to call it
    "state in the class": (
        [("ctx.save_for_backward(x, w)", "Centered.saved = x, w"), ("ctx.saved_tensors", "Centered.saved")],
        ("value", "dx", "rows 4, C 8, float32, two calls"),
        "keep what the backward needs in ctx",
    ),
    "a gradient that is refused": (
        [("dy = dy.contiguous()", "assert dy.is_contiguous()")],
        ("crash", None, "rows 4, C 8, float32, gradients expanded"),
        "wrong only where the gradient of a result is not contiguous (expanded)",
    ),
    "the last input is not contiguous": (
        [("w = w.contiguous()", "w = w")],
        ("value", "y", "rows 4, C 8, float32, w every second"),
        "wrong only where w is not contiguous (every second): call w.contiguous()",
    ),
    "a gradient that raises": (
        [("        dy = dy.contiguous()", "        assert all(ctx.needs_input_grad)\n        dy = dy.contiguous()")],
        ("crash", None, "rows 4, C 8, float32, x alone"),
        "wrong only where no input but x needs a gradient",
    ),
}  # fmt: skip
SMALLEST = {  # all results are right
    "one element after an input is written": (
        [("    c = tl.where", "    tl.store(w_ptr + C, 0.0)\n    c = tl.where")],
        ("stray", "w", "rows 4, C 8, float32"),
        "w: 1 element outside the tensor written, the nearest 1 past the end: mask the store in line 13",
    ),
    "one element after a result is written": (
        [("    c = tl.where", "    tl.store(y_ptr + tl.num_programs(0) * C, 0.0)\n    c = tl.where")],
        ("stray", "y", "rows 4, C 8, float32"),
        "y: 1 element outside the tensor written, the nearest 1 past the end: mask the store in line 13",
    ),
    "one element before a gradient is written": (
        [("    dx = 2 * c", "    tl.store(dy_ptr - 1, 0.0)\n    dx = 2 * c")],
        ("stray", "dy", "rows 4, C 8, float32"),
        "dy: 1 element outside the tensor written, the nearest 1 before the start: mask the store in line 26",
    ),
    "one element before a gradient is read": (
        [("    dx = 2 * c", "    tl.load(dy_ptr - 1)\n    dx = 2 * c")],
        ("stray load", "dy", "rows 4, C 8, float32"),
        "dy: program 0 loads elements outside the tensor, the nearest 1 before the start: mask the load in line 26",
    ),
    "one element of another program is read": (
        [("    c = tl.where", "    tl.store(y_ptr + offsets, x, mask=mask)\n    tl.load(y_ptr)\n    c = tl.where")],
        ("race", "y", "rows 4, C 8, float32"),
        "y: the values are right here, but program 1 loads what program 0 stored in the same launch",
    ),
    "one element of a gradient is changed": (
        [("    dx = 2 * c", "    tl.store(dy_ptr, 0.0)\n    dx = 2 * c")],
        ("changed", "dy", "rows 4, C 8, float32"),
        "the backward changed the gradient that it was given, which others may read",
    ),
    "one element of an input is changed": (
        [("    c = tl.where", "    tl.store(w_ptr + C - 1, 0.0)\n    c = tl.where")],
        ("changed", "w", "rows 4, C 8, float32"),
        "w: the kernel changed its input",
    ),
}  # fmt: skip


@interpreted
@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.quick(10)
def test_what_is_said_of_a_fault(name, tmp_path):
    check_fault(tmp_path, *FAULTS[name])


@interpreted
@pytest.mark.parametrize("name", IN_ONE_WAY)
def test_a_kernel_that_one_way_to_call_it_shows_wrong_is_told_which(name, tmp_path):
    check_fault(tmp_path, *IN_ONE_WAY[name])


@interpreted
def test_a_load_that_is_right_in_the_plain_way_is_not_blamed_for_a_layout(tmp_path):
    """The store masks off what this load leaves undefined; the stride of x is the fault."""
    task = TASK.replace('{"rows": 4, "C": 8}, {"rows": 3, "C": 6}', '{"rows": 3, "C": 6}')
    load = "w = tl.load(w_ptr + tl.arange(0, BLOCK), mask=mask"
    changes = [(f"{load}, other=0.0)", f"{load})"), ("x = x.contiguous()", "x = x")]
    verdict = verdict_on(tmp_path, *changes, task=task)
    assert verdict["case"].startswith("rows 3, C 6, float32, x "), verdict
    assert "wrong only where x is not contiguous" in verdict["sentence"], verdict
    assert "elements are NaN" in verdict["sentence"] and "loads without other" not in verdict["sentence"], verdict


@interpreted
@pytest.mark.parametrize("name", SMALLEST)
def test_one_element_that_a_kernel_must_not_touch_is_named(name, tmp_path):
    check_fault(tmp_path, *SMALLEST[name])


def check_fault(tmp_path, changes, blamed, said):
    verdict = verdict_on(tmp_path, *changes)
    assert not verdict["passed"] and said in verdict["sentence"], verdict
    kind, tensor, case = blamed
    assert (verdict["kind"], verdict["tensor"]) == (kind, tensor), verdict
    assert case is None or verdict["case"] == case


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("kernel.py:centered", "kernel.py:forward_kernel", "forward_kernel is a @triton.jit function"),
        ("kernel.py:centered", "kernel.py:missing", "kernel.py has no function 'missing'"),
        ("kernel.py:centered", "missing.py:centered", "names no file"),
        ("kernel.py:centered", "centered", "names no file"),
        ("def reference", "def something", "task.py does not define reference"),
        ('("x", "w")\n', '("x", "z")\n', "GRADIENTS names z, which inputs() does not return"),
        ("* w\n", "* w.detach()\n", "the reference has no gradient dw"),
    ],
)
def test_a_wrong_task_is_named(tmp_path, old, new, said):
    verdict = verdict_on(tmp_path, task=TASK.replace(old, new))
    assert verdict["kind"] == "task" and said in verdict["sentence"], verdict


SMALL = """
import torch
import triton
import triton.language as tl
{extra}

@triton.jit
def kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n, other=0.0)
    {body}

def function(x):
    y = torch.{allocate}
    kernel[(triton.cdiv(x.numel(), 4),)](x.contiguous(), y, x.numel(){block})
    return y
"""

SMALL_TASK = """
import torch

FUNCTION = "kernel.py:function"
GRADIENTS = ()
DTYPES = ({dtypes},)
CASES = [{{"n": 8}}, {{"n": 11}}]


def inputs(n):
    return {{"x": torch.randn(n)}}


def reference(x):
    return {formula}
"""


def small(folder, body, formula, dtypes="torch.float32", allocate="empty_like(x)", extra="", block=", 4"):
    kernel = SMALL.format(extra=extra, body=body, allocate=allocate, block=block)
    return verdict_on(folder, kernel=kernel, task=SMALL_TASK.format(dtypes=dtypes, formula=formula))


IN_INTEGERS = {"formula": "torch.full_like(x, 77, dtype=torch.int32)", "allocate": "empty_like(x, dtype=torch.int32)"}
TUNE = "@triton.autotune([triton.Config({{'BLOCK': 4}}, num_warps=w) for w in (4, 8)], key=['n']{})"
TUNED = {"extra": TUNE.format(", reset_to_zero=['y_ptr']"), "block": ""}
UNRESET = {"extra": TUNE.format(""), "block": ""}
ADDED = {"body": "tl.atomic_add(y_ptr, tl.sum(x, 0))", "formula": "x.sum()[None]"}
NO_FAULTS = {
    "atomics": ADDED | {"allocate": "zeros(1)"},
    "the mark of integers": IN_INTEGERS | {"body": "tl.store(y_ptr + i, tl.full([BLOCK], 77, tl.int32), mask=i < n)"},
    "added to, and set to zero before each timing": ADDED | TUNED | {"allocate": "zeros(1)"},
    "tiles that Triton chooses": {
        "body": "tl.store(y_ptr + i, 2 * x, mask=i < n)",
        "formula": "2 * x",
        "extra": "@triton.autotune([triton.Config({'BLOCK': b}) for b in (4, 8)], key=['n'])",
        "block": "",
    },
    "a sum behind a lock": {
        "body": """while tl.atomic_cas(y_ptr + 1, 0, 1) == 1:
        pass
    tl.store(y_ptr, tl.load(y_ptr) + tl.sum((x > 0).to(tl.int32), 0))
    tl.atomic_xchg(y_ptr + 1, 0)""",
        "formula": "torch.stack([(x > 0).sum(), (x > x).sum()]).int()",
        "allocate": "zeros(2, dtype=torch.int32)",
    },
}


@interpreted
@pytest.mark.parametrize("name", NO_FAULTS)
def test_what_is_no_fault(tmp_path, name):
    verdict = small(tmp_path, **NO_FAULTS[name])
    assert verdict["passed"], verdict["sentence"]


@interpreted
@pytest.mark.parametrize(
    ("arguments", "kind", "said"),
    [
        (
            ADDED | {"allocate": "empty(1)"},
            "unwritten",
            "y: line 11 adds to y, which nothing has set before: allocate it with torch.zeros",
        ),
        (ADDED | TUNED | {"allocate": "empty(1)"}, "unwritten", "nothing has set before"),
        (
            ADDED | UNRESET | {"allocate": "zeros(1)"},
            "value",
            "wrong only in the first call, in which triton.autotune runs the kernel many times: name in reset_to_zero",
        ),
        ({"body": "tl.atomic_add(y_ptr + i, x)", "formula": "x", "allocate": "zeros_like(x)"}, "stray load", "updates"),
        (IN_INTEGERS | {"body": "tl.store(y_ptr + i, i, mask=i < n)"}, "value", "instead of 77"),
    ],
)
def test_what_is_a_fault(tmp_path, arguments, kind, said):
    verdict = small(tmp_path, **arguments)
    assert verdict["kind"] == kind and said in verdict["sentence"], verdict


@interpreted
@pytest.mark.parametrize(("units", "passes"), [(8, True), (9, False)])
def test_a_result_may_be_off_by_a_millionth(units, passes, tmp_path):
    """Eight units in the last place of 1 are 0.95e-6, nine 1.07e-6; PyTorch's own result has no error."""
    verdict = small(tmp_path, f"tl.store(y_ptr + i, 0 * x + {1 + units * 2**-23!r}, mask=i < n)", "0 * x + 1")
    assert verdict["passed"] == passes, verdict


OPERATION = """
library = torch.library.Library("test_own_kernel", "FRAGMENT")
library.define("doubled(Tensor x) -> Tensor")
library.impl("doubled", lambda x: 2 * x, "CPU")
"""


@interpreted
@pytest.mark.skipif(torch.cuda.is_available(), reason="the operation is one of a CPU")
def test_one_operation_that_is_not_watched_is_named(tmp_path):
    allocate = "ops.test_own_kernel.doubled(x)"
    verdict = small(tmp_path, "tl.store(y_ptr + i, x, mask=i < n)", "x + 0", allocate=allocate, extra=OPERATION)
    said = "what test_own_kernel.doubled allocates is not watched: check the function that it wraps"
    assert verdict["passed"] and said in verdict["sentence"], verdict


def tiles(*sizes):
    return f"@triton.autotune([triton.Config({{'BLOCK': size}}) for size in {sizes}], key=['n'])"


DOUBLED = {"body": "tl.store(y_ptr + i, 2 * x, mask=i < n)", "formula": "2 * x", "block": ""}


@interpreted
@pytest.mark.parametrize("order", [(8, 2), (2, 8), (2, 2, 8), (8, 4, 2)], ids=str)
def test_a_configuration_that_fails_is_named_in_any_order(tmp_path, order):
    verdict = small(tmp_path, **DOUBLED, extra=tiles(*order))
    assert (verdict["kind"], verdict["case"]) == ("unwritten", "n 8, float32"), verdict
    assert re.match(r"with BLOCK 2, not with BLOCK 8: y: \d+ of 8 elements are never written", verdict["sentence"])


TWO_TUNED = """
@triton.autotune([triton.Config({'BLOCK': size}) for size in (4, 2)], key=['n'])
@triton.jit
def first(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    for start in range(0, n, BLOCK):
        i = start + tl.arange(0, BLOCK)
        tl.store(y_ptr + i, tl.load(x_ptr + i, mask=i < n, other=0.0), mask=i < n)

@triton.autotune([triton.Config({'BLOCK': size}) for size in (2, 4, 8)], key=['n'])
@triton.jit
def second(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    for start in range(0, n - BLOCK // 8, BLOCK):
        i = start + tl.arange(0, BLOCK)
        tl.store(y_ptr + i, 2 * tl.load(x_ptr + i, mask=i < n, other=0.0), mask=i < n - BLOCK // 8)

def function(x):
    x = x.contiguous()
    copy = torch.empty_like(x)
    y = torch.empty_like(x)
    first[(1,)](x, copy, x.numel())
    second[(1,)](copy, y, x.numel())
    return y
"""


@interpreted
def test_the_last_configuration_of_the_last_kernel_is_named(tmp_path):
    """With the largest of three tiles, one element is never written. The first kernel has two, and takes turns."""
    kernel = SMALL.partition("@triton.jit")[0].format(extra="") + TWO_TUNED
    verdict = verdict_on(tmp_path, kernel=kernel, task=SMALL_TASK.format(dtypes="torch.float32", formula="2 * x"))
    assert (verdict["kind"], verdict["case"]) == ("unwritten", "n 8, float32"), verdict
    said = "with BLOCK 4 of first, BLOCK 8 of second, not with BLOCK 4 of first, BLOCK 2 of second: y: 1 of 8 elements"
    assert verdict["sentence"].startswith(said)


@interpreted
def test_no_configuration_is_named_where_all_are_wrong(tmp_path):
    verdict = small(tmp_path, **DOUBLED, extra=tiles(2, 1))
    assert verdict["kind"] == "unwritten" and "with BLOCK" not in verdict["sentence"], verdict


@interpreted
def test_a_configuration_that_raises_is_named(tmp_path):
    body = "if BLOCK == 8:\n        missing\n    tl.store(y_ptr + i, 2 * x, mask=i < n)"
    verdict = small(tmp_path, **DOUBLED | {"body": body}, extra=tiles(4, 8))
    assert verdict["kind"] == "crash" and verdict["sentence"].startswith("with BLOCK 8, not with BLOCK 4: line 12: ")


@interpreted
@pytest.mark.parametrize("order", [(4, 2), (2, 4)], ids=str)
def test_a_configuration_that_the_autotuner_drops_is_no_fault(tmp_path, order, monkeypatch):
    """Such as one that needs more shared memory than the GPU has."""
    run = triton.runtime.interpreter.InterpretedFunction.run

    def too_large(kernel, *arguments, BLOCK, **options):
        if BLOCK == 2:
            raise own_kernel.OutOfResources(2, 1, "shared memory")
        return run(kernel, *arguments, BLOCK=BLOCK, **options)

    monkeypatch.setattr(triton.runtime.interpreter.InterpretedFunction, "run", too_large)
    verdict = small(tmp_path, **DOUBLED, extra=tiles(*order))
    assert verdict["passed"], verdict["sentence"]


@interpreted
@pytest.mark.parametrize(("sizes", "said"), [((8, 11), True), ((8, 19), False)])
def test_a_loop_that_never_runs_twice_is_named(tmp_path, sizes, said):
    """Of four programs, each takes one tile of 16 elements; of 17, one takes two."""
    body = """tl.store(y_ptr + i, 0 * x, mask=i < n)
    for start in range(4 * tl.program_id(0), n, 16):
        j = start + tl.arange(0, BLOCK)
        tl.store(y_ptr + j, 2 * tl.load(x_ptr + j, mask=j < n, other=0.0), mask=j < n)"""
    kernel = SMALL.format(extra="", body=body, allocate="empty_like(x)", block=", 4").replace(
        "cdiv(x.numel(), 4)", "cdiv(16, 4)"
    )
    task = SMALL_TASK.format(dtypes="torch.float32", formula="2 * x").replace('"n": 8', f'"n": {sizes[0]}')
    verdict = verdict_on(tmp_path, kernel=kernel, task=task.replace('"n": 11', f'"n": {sizes[1]}'))
    assert verdict["passed"], verdict
    assert ("no program runs the loop in line 12 twice" in verdict["sentence"]) == said, verdict


@interpreted
def test_a_loop_that_replaces_its_sums_is_named(tmp_path):
    body = """total = x * 0
    k = 4 * tl.program_id(0) + tl.arange(0, BLOCK)
    for start in range(0, n, 16):
        total = tl.load(x_ptr + start + k, mask=start + k < n, other=0.0)
    tl.store(y_ptr + k, total)"""
    kernel = SMALL.format(extra="", body=body, allocate="empty(16)", block=", 4").replace(
        "cdiv(x.numel(), 4)", "cdiv(16, 4)"
    )
    formula = "torch.nn.functional.pad(x, (0, -len(x) % 16)).view(-1, 16).sum(0)"
    task = SMALL_TASK.format(dtypes="torch.float32", formula=formula).replace('"n": 11', '"n": 19')
    verdict = verdict_on(tmp_path, kernel=kernel, task=task)
    said = (
        "; right where no program runs the loop in line 13 twice: does it replace what it should add up, such as with ="
    )
    assert verdict["case"] == "n 19, float32" and verdict["sentence"].endswith(f"{said} in place of +=?"), verdict


@interpreted
def test_a_poor_reference_in_16_bits_allows_no_larger_error(tmp_path):
    """PyTorch rounds x + 100 to float16, too. In float32, it has the digits."""
    body = "tl.store(y_ptr + i, (x + 100) - 100, mask=i < n)"
    verdict = small(tmp_path, body, "(x + 100) - 100", dtypes="torch.float32, torch.float16")
    assert verdict["case"] == "n 8, float16", verdict
    assert "right in float32: what is rounded to 16 bits on the way" in verdict["sentence"], verdict


@interpreted
def test_partial_sums_in_16_bits_are_named(tmp_path):
    """Their rounding lies within the bound."""
    change = ("dw = torch.empty(x.shape, dtype=torch.float32", "dw = torch.empty(x.shape, dtype=x.dtype")
    task = TASK.replace("(torch.float32, torch.float16)", "(torch.float16,)").replace(', {"rows": 3, "C": 6}', "")
    verdict = verdict_on(tmp_path, change, task=f"{task}\n\nTOLERANCE = 0.01\nCONTIGUOUS = True\n")
    said = "; a kernel stores what PyTorch adds up in 16 bits: allocate partial sums in float32"
    assert verdict["passed"] and verdict["sentence"].endswith(said), verdict


@interpreted
def test_a_number_that_the_kernel_does_not_take_from_its_argument_is_found(tmp_path):
    kernel = SMALL.format(
        extra="", body="tl.store(y_ptr + i, x + 0.5, mask=i < n)", allocate="empty_like(x)", block=", 4"
    )
    task = SMALL_TASK.format(dtypes="torch.float32", formula="x + eps").replace("randn(n)", 'randn(n), "eps": 0.5')
    task = task.replace("reference(x)", "reference(x, eps)")
    verdict = verdict_on(tmp_path, kernel=kernel.replace("function(x)", "function(x, eps)"), task=task)
    assert verdict["case"] == "n 8, float32, a tenth of each number", verdict
    assert verdict["sentence"].startswith(
        "wrong only where each number is a tenth of what inputs() gives: is it written"
    )


@interpreted
def test_a_key_that_is_no_argument_is_named(tmp_path):
    verdict = small(tmp_path, **DOUBLED, extra=tiles(4, 8).replace("'n'", "'N'"))
    assert verdict["kind"] == "autotune" and "kernel: key of its triton.autotune names N" in verdict["sentence"], (
        verdict
    )


@interpreted
def test_a_mask_is_not_blamed_for_a_layout(tmp_path):
    verdict = verdict_on(tmp_path, ("dy = dy.contiguous()", "dy = dy"))
    assert verdict["kind"] == "stray load" and verdict["sentence"].endswith("past the end"), verdict


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("tl.store(y_ptr, math.sqrt(tl.sum(x, 0) + 1))", "line 11: math.sqrt takes no tile: use tl.sqrt"),
        ("z = x * 2\n    tl.store(y_ptr + i, z[0])", "line 12: z[0]: a tile has no elements to ask for"),
    ],
)
def test_what_a_tile_is_not_for_is_one_sentence(tmp_path, body, said):
    verdict = small(tmp_path, body, "x", extra="import math")
    assert said in verdict["sentence"], verdict


@pytest.mark.parametrize(
    "line", ["z = x[:, None] + x[None, :]", "z = math.log2(8)", "z = y_ptr.dtype.element_ty", "z = pair[0]"]
)
def test_what_a_kernel_may_write(line):
    grading.check_precedence(f"@triton.jit\ndef kernel(x_ptr, pair):\n    x = tl.load(x_ptr)\n    {line}\n")


@interpreted
def test_programs_that_repeat_each_other_s_rows_are_named(tmp_path):
    """Each stores the same values, but the sums count rows several times."""
    body = """total = tl.load(x_ptr) * 0
    for j in range(tl.program_id(0), n):
        value = tl.load(x_ptr + j)
        tl.store(y_ptr + j, value)
        total += value
    tl.store(y_ptr + n + tl.program_id(0), total)"""
    programs = "-(-x.numel() // 4)"
    formula = f"torch.cat([x, torch.stack([x[p :: {programs}].sum() for p in range({programs})])])"
    verdict = small(tmp_path, body, formula, allocate=f"empty(x.numel() + {programs})")
    assert verdict["kind"] == "value", verdict
    assert "begins at the program's number and steps by the number of programs" in verdict["sentence"], verdict


@interpreted
def test_a_fault_in_16_bits_alone_is_not_the_mask_s(tmp_path):
    """The ragged case is right in float32, with the same mask."""
    body = "tl.store(y_ptr + i, tl.where(n == 11, x * (1.02 if x.dtype == tl.float16 else 1.0), x), mask=i < n)"
    verdict = small(tmp_path, body, "x", dtypes="torch.float32, torch.float16")
    assert verdict["case"] == "n 11, float16" and verdict["sentence"].endswith("or a factor?"), verdict


@interpreted
def test_a_number_is_rounded_to_bfloat16_as_on_a_gpu(tmp_path):
    """Triton's interpreter cuts the bits off, which doubles the error."""
    body = "tl.store(y_ptr + i, (x.to(tl.float32) / 3).to(tl.bfloat16), mask=i < n)"
    (tmp_path / "kernel.py").write_text(SMALL.format(extra="", body=body, allocate="empty_like(x)", block=", 4"))
    module = grading.load_module(tmp_path / "kernel.py", "rounds")
    x = torch.randn(50, generator=torch.Generator().manual_seed(0)).bfloat16()
    with strict_interpreter.Watch({}, {}):
        y = module.function(x)
    assert torch.equal(y, (x.float() / 3).bfloat16())


@interpreted
def test_arithmetic_in_bfloat16_is_left_to_a_gpu(tmp_path):
    body = "tl.store(y_ptr + i, x * x, mask=i < n)"
    verdict = small(tmp_path, body, "x * x", dtypes="torch.float32, torch.bfloat16")
    said = "bfloat16 on a GPU only, because Triton's interpreter does not compute in bfloat16"
    assert verdict["passed"] and verdict["sentence"].startswith("2 cases in float32; no gradients; " + said), verdict


@interpreted
def test_atomic_operations_in_bfloat16_are_left_to_a_gpu(tmp_path):
    body = "tl.atomic_add(y_ptr + i, x, mask=i < n)"
    verdict = small(tmp_path, body, "2 * x / 2", dtypes="torch.float32, torch.bfloat16", allocate="zeros_like(x)")
    said = "bfloat16 on a GPU only, because Triton's interpreter has no atomic operations in bfloat16: add in float32"
    assert verdict["passed"] and said in verdict["sentence"], verdict


@interpreted
def test_programs_that_store_what_they_should_add_are_told_of_atomics(tmp_path):
    verdict = small(tmp_path, "tl.store(y_ptr, tl.sum(x, 0))", "x.sum()[None]", allocate="zeros(1)")
    assert verdict["kind"] == "value" and "both store element 0 of y: should both add to it" in verdict["sentence"]


@interpreted
@pytest.mark.parametrize(
    ("function", "status", "said"),
    [
        pytest.param("tanh", 0, "2 cases in float32", marks=pytest.mark.slow),  # it is compiled, too
        (
            "fast_sinf",
            1,
            "line 11: Triton's interpreter has no libdevice.fast_sinf; check it on a GPU, or with --target",
        ),
    ],
)
@pytest.mark.slow
def test_what_the_interpreter_cannot_run_is_one_sentence(tmp_path, function, status, said):
    """In a process of its own, which may replace the functions of libdevice."""
    extra = "from triton.language.extra import libdevice"
    body = f"tl.store(y_ptr + i, libdevice.{function}(x), mask=i < n)"
    (tmp_path / "kernel.py").write_text(SMALL.format(extra=extra, body=body, allocate="empty_like(x)", block=", 4"))
    (tmp_path / "task.py").write_text(SMALL_TASK.format(dtypes="torch.float32", formula="torch.tanh(x)"))
    done = run_file(REPOSITORY / "exercises" / "check.py", tmp_path)
    assert done.returncode == status and said in done.stdout, done.stdout + done.stderr


def test_an_interpreted_kernel_can_be_wrapped(monkeypatch):
    """PyTorch 2.11 wraps none, and says that it isn't annotated with triton.jit."""
    monkeypatch.setattr(torch.library, "wrap_triton", None)
    strict_interpreter.supply_wrap_triton()
    assert torch.library.wrap_triton(forward_kernel := object()) is forward_kernel


def test_functions_of_libdevice_are_those_of_triton():
    """PyTorch has them all under the same name; on a GPU they are not replaced."""
    from triton.language.extra import libdevice

    assert all(hasattr(libdevice, name) and hasattr(torch, name) for name in strict_interpreter.OF_TORCH)


@interpreted
def test_a_function_of_a_package_is_imported_as_its_part(tmp_path):
    """A library's file imports its neighbours."""
    package = tmp_path / "library" / "ops"
    package.mkdir(parents=True)
    for folder in (package, package.parent):
        (folder / "__init__.py").write_text("")
    (package / "norm.py").write_text("from .inner import centered")
    (package / "inner.py").write_text(KERNEL)
    folder = tmp_path / "theirs"
    folder.mkdir()
    verdict = verdict_on(folder, task=TASK.replace("kernel.py:", "../library/ops/norm.py:"))
    assert verdict["passed"], verdict["sentence"]


# ---------------------------------------------------------------- what passes must compile

STORE = "tl.store(y_ptr + i, 2 * x, mask=i < n)"
SUM = "total = 0.0\n    for j in range(2):\n        total += x\n    tl.store(y_ptr + i, total, mask=i < n)"
EXTENDED = f"@triton.jit\ndef twice(x):\n    {SUM.split('    tl.store')[0]}    return total\n"
COMPILED = {  # what is added before the kernel, its body, whether it compiles, and what is said
    "right": ("", STORE, True, "; compiles for gfx942"),
    "autotuned": (tiles(4, 8), STORE, True, "; compiles for gfx942"),
    "number": (
        "",
        SUM,
        False,
        "line 12: Triton's interpreter runs it, but the compiler refuses it: Loop-carried variable",
    ),
    "global": ("", STORE.replace("2", "SCALE"), False, "pass it as an argument, or make it a tl.constexpr"),
    "callee": (EXTENDED, "tl.store(y_ptr + i, twice(x), mask=i < n)", False, "line 8: Triton's interpreter runs it"),
    "second": (
        tiles(4, 8),
        f"if BLOCK == 8:\n        x += SCALE\n    {STORE}",
        False,
        "with BLOCK 8: line 13: Triton's interpreter runs it, but the compiler refuses it: Cannot access global "
        "variable SCALE",
    ),
    "more warps": (
        TUNE.replace("8)", "64)").format(""),
        STORE,
        True,
        "; compiles for gfx942; kernel: num_warps 64 gives a program 4,096 threads on gfx942, and 1,024 are the most, "
        "so Triton's autotuner drops it",
    ),
    "64 warps": ("", STORE, False, "kernel: num_warps 64 gives a program 4,096 threads on gfx942"),
    "3 warps": (TUNE.replace("8)", "3)").format(""), STORE, False, "kernel: num_warps 3 is not a power of 2"),
    "a constant": (
        "",
        f"first = n.to(tl.int64)\n    {STORE}",
        False,
        "line 11: Triton's interpreter runs it, but the compiler refuses it: 'int' object has no attribute 'to': an "
        "argument that is 1 is a constant",
    ),
    "a number in a model": (
        "",
        SUM.replace("0.0", "x * 0").replace("+= x", "+= x * (n / n)"),
        True,
        "; compiles for gfx942; but torch.compile passes n as float64, and then the compiler refuses line 12: "
        "Loop-carried variable total has initial type <['4'], fp32> but is re-assigned to <['4'], fp64>: write "
        "tl.cast(n, tl.float32)",
    ),
    "tiles in a model": (
        "",
        STORE.replace("x", "x * (n / n)"),
        True,
        "; but torch.compile passes n as float64, and then kernel computes tiles in float64: write",
    ),
}
CHANGED = {  # by name, in the kernel or the task
    "64 warps": ("y, x.numel(), 4)", "y, x.numel(), 4, num_warps=64)"),
    "a constant": ('"n": 11', '"n": 1'),
    "a number in a model": ("y, x.numel(), 4)", "y, float(x.numel()), 4)"),
    "tiles in a model": ("y, x.numel(), 4)", "y, float(x.numel()), 4)"),
}


@pytest.mark.slow
@interpreted
@pytest.mark.skipif(compilation.obstacle() is not None, reason="Triton compiles for a GPU that it sees only")
def test_what_passes_must_compile(tmp_path):
    for name, (extra, body, *_) in COMPILED.items():
        (tmp_path / name).mkdir()
        if "SCALE" in body:
            extra = f"SCALE = {2 if name == 'global' else 0}\n{extra}"
        block = "" if "autotune" in extra else ", 4"
        kernel = SMALL.format(extra=extra, body=body, allocate="empty_like(x)", block=block)
        task = SMALL_TASK.format(dtypes="torch.float32", formula="2 * x")
        old, new = CHANGED.get(name, ("", ""))
        assert old in kernel + task
        (tmp_path / name / "kernel.py").write_text(kernel.replace(old, new))
        (tmp_path / name / "task.py").write_text(task.replace(old, new))
    jobs = [(tmp_path / name, "check") for name in COMPILED]
    verdicts = check.grade(jobs, timeout=600, program="own_kernel.py")
    for (name, (_, _, passes, said)), verdict in zip(COMPILED.items(), verdicts, strict=True):
        assert verdict["passed"] == passes and said in verdict["sentence"], (name, verdict)
        assert passes or verdict["kind"] == "compile"


DROPOUT = """
@triton.jit
def random_kernel(u_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(u_ptr + i, tl.rand(7, i), mask=i < n)


def inputs(n):
    return {"x": torch.randn(n)}


def reference(x):
    u = torch.empty(x.shape, device=x.device)
    random_kernel[(triton.cdiv(u.numel(), 4),)](u, u.numel(), 4)
    return x * (u > 0.5)
"""


@pytest.mark.slow
@interpreted
@pytest.mark.skipif(compilation.obstacle() is not None, reason="Triton compiles for a GPU that it sees only")
@pytest.mark.parametrize(("options", "said"), [([], "; compiles for gfx942"), (["--target", "gfx942"], "no gradients")])
def test_a_reference_that_launches_a_kernel_needs_no_device(tmp_path, options, said):
    """It draws the random numbers of a dropout: the compilation and the executed calls need its results' shapes."""
    body = "x = tl.load(x_ptr + i, mask=i < n)\n    "
    body += "tl.store(y_ptr + i, tl.where(tl.rand(7, i) > 0.5, x, 0.0), mask=i < n)"
    kernel = SMALL.format(extra="", body=body, allocate="empty_like(x)", block=", 4")
    task = SMALL_TASK.format(dtypes="torch.float32", formula="x").split("def inputs")[0] + DROPOUT
    (tmp_path / "kernel.py").write_text(kernel)
    (tmp_path / "task.py").write_text(f"import triton\nimport triton.language as tl\n{task}")
    done = run_file(REPOSITORY / "exercises" / "check.py", tmp_path, *options)
    assert done.returncode == 0 and said in done.stdout, done.stdout + done.stderr


def test_a_refusal_inside_triton_has_the_kernel_s_line():
    """A function that the kernel calls has the reason, and its caller's error the line."""
    source = "def test_a_refusal_inside_triton_has_the_kernel_s_line():\n"
    place = ast.parse("\n\nx").body[0]  # in line 3
    refused = triton.CompilationError(source, place, None)
    refused.__cause__ = triton.CompilationError("def sum(x):\n", place, "ValueError('invalid axis 5.')")
    refused.__cause__.__cause__ = ValueError("invalid axis 5.")
    function = test_a_refusal_inside_triton_has_the_kernel_s_line
    line = function.__code__.co_firstlineno + 2
    said = f"line {line}: Triton's interpreter runs it, but the compiler refuses it: invalid axis 5"
    assert compilation.describe_refusal(function, refused) == said


def configuration(number, **more):
    return SimpleNamespace(
        all_kwargs=lambda: {"BLOCK": number} | more, kwargs={"BLOCK": number}, num_warps=4, pre_hook=None
    )


def base_kernel(x):
    """Stand for the Python function of a kernel."""


@pytest.mark.parametrize(
    ("errors", "refused", "raised"),
    [
        ({}, None, None),
        ({0: "dropped", 1: "dropped"}, None, None),  # an autotuner takes the third
        ({0: "dropped", 1: "dropped", 2: "dropped"}, "", "dropped"),
        ({2: "refused"}, "refused", "refused"),
        ({0: "dropped", 2: "refused"}, "refused", "refused"),
    ],
)
def test_one_configuration_that_the_compiler_refuses_is_enough(errors, refused, raised, monkeypatch):
    """The last of three. Those that an autotuner drops, such as of too much shared memory, are none."""
    kinds = {"dropped": own_kernel.OutOfResources(2, 1, "shared memory"), "refused": ValueError("refused")}
    found = compilation.Compilation()
    monkeypatch.setattr(grading, "TARGET", "gfx942")
    monkeypatch.setattr(own_kernel, "configurations_of", lambda *_, **__: [configuration(i) for i in range(3)])
    kernel = SimpleNamespace(__name__="kernel", fn=base_kernel)
    asked = []

    def run(kernel, BLOCK):
        asked.append(BLOCK)
        if BLOCK in errors:
            raise kinds[errors[BLOCK]]

    run_kernel = found.compiling(run)
    tuner = SimpleNamespace(base_fn=base_kernel, fn=SimpleNamespace(run=functools.partial(run_kernel, kernel)))
    with pytest.raises(type(kinds[raised])) if raised else contextlib.nullcontext():
        found.every_configuration(tuner)
    assert asked == [0, 1, 2]
    assert (found.refused is None) if refused is None else found.refused.endswith(refused)
    assert found.kernels == (set() if len(errors) == 3 else {"kernel"})


class Stub(contextlib.nullcontext):
    refused = in_float64 = None
    kernels = ("b", "a")
    notes = ()

    def __init__(self, in_models):
        super().__init__()


@pytest.mark.parametrize("action", ["check", "time"])
@pytest.mark.parametrize(
    ("refused", "error", "passed", "said"),
    [
        (None, None, True, "compiles for gfx942"),
        ("line 3: no", None, False, "line 3: no"),  # the answer may have caught it
        ("line 3: no", ValueError("x"), False, "line 3: no"),
        (None, ValueError("x"), True, "compiled for gfx942: a, b, and no more because of ValueError in a run that"),
        (None, SystemExit(0), True, "compiled for gfx942: a, b, and no more because of SystemExit in a run that"),
    ],
)
def test_what_is_said_of_a_compilation(refused, error, passed, said, action, monkeypatch, tmp_path):
    def call():
        if error:
            raise error

    monkeypatch.setattr(grading, "TARGET", "gfx942")
    monkeypatch.setattr(compilation, "obstacle", lambda: None)
    monkeypatch.setattr(compilation, "run_own", lambda folder: call)
    monkeypatch.setattr(compilation, "Compilation", Stub)
    monkeypatch.setattr(Stub, "refused", refused)
    verdict = compilation.judge_compilation(tmp_path, action)
    assert verdict["passed"] == passed and verdict["sentence"].startswith(said)


def test_what_passed_on_a_gpu_is_compiled_for_a_model_alone(monkeypatch):
    """The GPU that an answer is compiled for is another one, so what that one refuses does not matter."""
    found = [
        {"passed": False, "kind": "compile", "sentence": "too many threads", "left": []},
        {"passed": True, "sentence": "compiles", "in_models": "but torch.compile passes eps as float64", "left": []},
    ]
    verdicts = [{"passed": True, "interpreted": False, "for_models": True, "sentence": "2 cases"} for _ in found]
    monkeypatch.setattr(answers, "grade_apart", lambda jobs, *rest: found[: len(jobs)])
    answers.compile_passed([("a", "check"), ("b", "check")], verdicts, 1)
    said = [(verdict["passed"], verdict["sentence"]) for verdict in verdicts]
    assert said == [(True, "2 cases"), (True, "2 cases; but torch.compile passes eps as float64")]


def test_a_compilation_for_a_model_that_fails_is_said(monkeypatch):
    def fail(*_):
        raise Failure(1, "not finished after 1 s")

    monkeypatch.setattr(answers, "grade_apart", fail)
    verdicts = [{"passed": True, "interpreted": False, "for_models": True, "sentence": "2 cases"}]
    answers.compile_passed([("a", "check")], verdicts, 1)
    said = "2 cases; not compiled as torch.compile does it: not finished after 1 s"
    assert verdicts == [{"passed": True, "interpreted": False, "for_models": True, "sentence": said}]


def test_without_a_compiler_that_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(compilation, "obstacle", lambda: "it has none")
    verdict = compilation.judge_compilation(tmp_path, "check")
    assert verdict == {"passed": True, "sentence": "not compiled: it has none"}


# ---------------------------------------------------------------- check.py


def test_a_new_folder_is_not_written_yet_and_its_task_is_short(tmp_path, capsys):
    folder = tmp_path / "my_norm"
    assert check.main(["new", str(folder)]) == 0
    assert len((folder / "task.py").read_text().splitlines()) <= 20
    assert check.main([str(folder)]) == 1
    said = capsys.readouterr().out
    assert f"into {folder / 'task.py'}, then write {folder / 'kernel.py'}, then run:\n   python " in said
    assert "my_norm failed in case rows 4, C 8, float32" in said and "allocate y, launch the kernel, return y" in said


def test_the_command_for_a_new_folder_can_be_pasted(tmp_path, capsys):
    folder = tmp_path / "my lab" / "my_norm"
    assert check.main(["new", str(folder)]) == 0
    command = shlex.split(capsys.readouterr().out.splitlines()[1])
    assert command[0] == "python" and command[2:] == [str(folder)]


@pytest.mark.parametrize(("passed", "said"), [(True, "mine is right"), (False, "mine is wrong")])
def test_a_verdict_on_instructions_names_the_gpu(passed, said, tmp_path, monkeypatch, capsys):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "task.py").touch()
    verdict = {"passed": passed, "sentence": "so", "lines": [], "left": [], "case": None}
    monkeypatch.setattr(check, "grade", lambda *given: [verdict])
    assert check.main([str(tmp_path / "mine"), "--target", "gfx1100"]) == (not passed)
    assert f"{said} on gfx1100's instructions" in capsys.readouterr().out


def test_a_folder_for_a_function_that_exists(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "norm.py").write_text(KERNEL)
    assert check.main(["new", "mine/their_norm", "norm.py:centered"]) == 0
    assert [path.name for path in (tmp_path / "mine" / "their_norm").iterdir()] == ["task.py"]
    assert 'FUNCTION = "../../norm.py:centered"' in (tmp_path / "mine" / "their_norm" / "task.py").read_text()


HOSTILE = ['a"b', "a'b", "a\\", "a\nb", "-rf", "=1", "<img src=x>", "a\u202eb", "\udcff", "\U0001f600"]


@pytest.mark.parametrize("name", HOSTILE)
def test_a_function_s_file_may_have_any_name(name, tmp_path, monkeypatch):
    """The task is Python, in which a quote of the name would end the string."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / f"{name}.py").write_text("def centered(x):\n    return x\n")
    assert check.main(["new", "mine", f"./{name}.py:centered"]) == 0
    task = own_kernel.load_own_task(tmp_path / "mine")
    assert task.path == tmp_path / f"{name}.py" and task.function(1) == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["new", "."], "is no name for a function"),
        (["new", "my-norm"], "'my-norm' is no name for a function"),
        (["new", "taken"], "taken exists already"),
        (["new", "mine", "norm.py:f"], "norm.py:f names no file"),
        (["taken"], "taken has no task.py: make a folder with check.py new NAME"),
        (["missing/norm"], "there is no folder missing/norm: make it with check.py new missing/norm"),
        (["scorebord"], "or a folder with a task.py"),
        ([str(REPOSITORY / "exercises" / "01_row_sum")], "01_row_sum is exercise 01: check.py 01"),
    ],
)
def test_bad_input(arguments, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").mkdir()
    with pytest.raises(Failure, match=re.escape(said)):
        check.main(arguments)


@interpreted
def test_times_need_a_gpu(tmp_path, monkeypatch):
    """It is the option that is wrong, not the kernel."""
    (tmp_path / "task.py").touch()
    monkeypatch.setattr(check, "grade", lambda jobs, *rest: [own_kernel.grade(*jobs[0])])
    with pytest.raises(Failure, match="^--time needs a GPU, and PyTorch sees none here: leave it out$") as refused:
        check.main([str(tmp_path), "--time"])
    assert refused.value.status == 2
    with pytest.raises(Failure, match="leave one out"):
        check.main([str(tmp_path), "--time", "--target", "gfx942"])


LARGE = TASK.replace('TIMED = {"rows": 4, "C": 8}', 'TIMED = {"rows": 4, "C": 40}')
NARROW = [("triton.next_power_of_2(x.shape[1])", "32"), ("triton.next_power_of_2(x.shape[1])", "32")]


@interpreted
def test_a_kernel_that_is_wrong_at_the_sizes_of_timed_is_not_timed(tmp_path, monkeypatch):
    """Its BLOCK covers the cases, and a kernel that computes half of a row is twice as fast."""
    monkeypatch.setattr(own_kernel, "check_task", lambda task, verdict: "2 cases")
    assert verdict_on(tmp_path, *NARROW, task=LARGE)["passed"]
    monkeypatch.setattr(grading, "DEVICE", SimpleNamespace(type="cuda"))
    monkeypatch.setattr(grading, "in_dtype", lambda value, dtype: value.to(dtype))
    monkeypatch.setattr(own_kernel, "time_task", lambda task, name: [name])
    verdict = own_kernel.grade(tmp_path, "time")
    assert not verdict["passed"] and verdict["lines"] == [] and verdict["case"] == "rows 4, C 40, float32"
    assert re.match("wrong at the sizes of TIMED: y: 32 of 160 elements are never written", verdict["sentence"])


@interpreted
@pytest.mark.parametrize("extra", ["", tiles(4, 8)], ids=["plain", "autotuned"])
def test_sizes_that_are_too_large_to_compare_are_timed_all_the_same(tmp_path, monkeypatch, extra):
    def too_large(*arguments):
        raise torch.OutOfMemoryError("no memory")

    small(tmp_path, **DOUBLED | {"block": "" if extra else ", 4"}, extra=extra)
    text = (tmp_path / "task.py").read_text()
    (tmp_path / "task.py").write_text(f"{text}\nTIMED = {{'n': 16}}\n")
    monkeypatch.setattr(own_kernel, "defined", too_large)
    verdict = {}
    (line,) = own_kernel.check_timed(own_kernel.load_own_task(tmp_path), verdict)
    assert line.startswith("not compared at the sizes of TIMED") and verdict == {"case": None}


@interpreted
@pytest.mark.parametrize("order", [(8, 2), (2, 8)], ids=str)
def test_every_configuration_is_compared_at_the_sizes_of_timed(tmp_path, order):
    small(tmp_path, **DOUBLED, extra=tiles(*order))
    text = (tmp_path / "task.py").read_text()
    (tmp_path / "task.py").write_text(f"{text}\nTIMED = {{'n': 16}}\n")
    with pytest.raises(own_kernel.Wrong, match="^wrong at the sizes of TIMED: with BLOCK 2, not with BLOCK 8: y: "):
        own_kernel.check_timed(own_kernel.load_own_task(tmp_path), {})


@pytest.mark.slow
def test_the_compiler_starts_no_processes_that_run_on(tmp_path):
    """torch.compile would, to time PyTorch's function; the checker would name them as the kernel's."""
    said = "raise ValueError('threads', os.environ.get('TORCHINDUCTOR_COMPILE_THREADS'))"
    kernel = KERNEL.replace("return Centered.apply(x, w)", said).replace("import torch", "import os\n\nimport torch", 1)
    (tmp_path / "kernel.py").write_text(kernel)
    (tmp_path / "task.py").write_text(TASK)
    (verdict,) = check.grade([(tmp_path, "check")], program="own_kernel.py")
    assert "('threads', '1')" in verdict["sentence"]


def test_times_stand_beside_pytorch_s_and_a_copy(tmp_path, monkeypatch):
    """The function's ms are 1, PyTorch's 2, and a copy's 0.5; a compiler that fails is named."""
    (tmp_path / "task.py").write_text(TASK)
    (tmp_path / "kernel.py").write_text(KERNEL)
    task = own_kernel.load_own_task(tmp_path)
    times = iter([0.5, 1, 2, 2, 4])

    class Timer:
        def __init__(self, device):
            self.host_bound = False

        def milliseconds(self, call):
            call()
            milliseconds = next(times)
            self.host_bound = milliseconds == 4
            return [milliseconds]

    def compiled(*inputs):
        raise RuntimeError("no compiler")

    monkeypatch.setattr(own_kernel, "DeviceTimer", Timer)
    monkeypatch.setattr(torch, "compile", lambda function: compiled)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    head, _, mine, eager, failed, copy = own_kernel.time_task(task, "mine")
    assert head.startswith("rows 4, C 8, float32, a GPU")
    assert re.search(r"^mine +1\.0000 ms +0 GB/s +50 % +2\.0000 ms .* %$", mine)
    assert re.search(r"eager +2\.0000 ms .*  with the host's time, for which the GPU waits$", eager)
    assert failed.endswith("failed: RuntimeError: no compiler") and copy.startswith("copy")


# ---------------------------------------------------------------- the page


@pytest.mark.slow
@interpreted
def test_the_page_is_right_as_it_is_typed(tmp_path):
    page = (REPOSITORY / "exercises" / "YOUR_OWN_KERNEL.md").read_text()
    assert len(page.split()) <= 1000
    task, kernel, function, tuned, script, _, operator = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    folder = tmp_path / "my_layernorm"
    program = REPOSITORY / "exercises" / "check.py"
    run_file(program, "new", folder)
    head = (folder / "kernel.py").read_text().split("@triton.jit")[0]
    old = (folder / "task.py").read_text()
    gradients, functions = task.split("\n", 1)
    typed = re.sub(r"^GRADIENTS = .*", gradients, old, flags=re.MULTILINE).split("\ndef inputs")[0] + functions
    added = re.search(r"Add `(\{.*?\})` to `CASES`", page)[1]
    typed = typed.replace('"C": 6}]', f'"C": 6}}, {added}]')
    (folder / "task.py").write_text(typed)

    def said(text):
        (folder / "kernel.py").write_text(head + text)
        return re.sub(
            "^   compiling .*\n", "", run_file(program, folder).stdout, flags=re.MULTILINE
        )  # where that is slow

    if why := compilation.obstacle():
        page = page.replace("compiles for gfx942", f"not compiled: {why}")
    printed = re.findall(r"^```\n(my_layernorm .*?)```", page, re.MULTILINE | re.DOTALL)
    assert said(kernel) == printed[0]
    assert said(kernel.replace("tl.where(mask, x - tl.sum(x, 0) / C, 0.0)", "x - tl.sum(x, 0) / C")).startswith(
        printed[1]
    )
    asked = re.search(r'`(GRADIENTS = \("x".*?)`', page)[1]
    (folder / "task.py").write_text(typed.replace(gradients, asked))
    layer = kernel.split("def my_layernorm(")[0] + function
    passed = printed[0].replace("no gradients", "gradients of x, w, b")
    assert said(layer.replace("@triton.jit", tuned + "@triton.jit", 1)) == passed
    wrapped = re.search(r"`(torch\.library\.wrap_triton.*?)`", page)[1]
    returned = re.search(r"`(my_op\(.*?)`", page)[1]
    body = layer.replace("my_layernorm_forward[(rows,)](", wrapped).split("def my_layernorm(")[0]
    assert said(f"{body}{operator}\n\ndef my_layernorm(x, w, b, eps):\n    return {returned}\n") == passed

    before = "import torch\nx, w, b = torch.randn(2, 3, 6), torch.randn(6), torch.randn(6)\n"
    after = "assert torch.allclose(y, torch.nn.functional.layer_norm(x, (6,), w, b), atol=1e-6)\nprint('right')\n"
    (tmp_path / "script.py").write_text(before + script + after)
    (folder / "kernel.py").write_text(head + layer)
    assert run_file(tmp_path / "script.py", cwd=REPOSITORY, TRITON_INTERPRET="1").stdout == "right\n"
    without = re.search(r"Triton finds `(.*?)`", page)[1]
    command = [sys.executable, str(tmp_path / "script.py")]  # Triton reads the variable when it is imported
    compiled = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "0"}, capture_output=True, text=True)
    assert without in compiled.stderr
