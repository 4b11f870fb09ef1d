"""Faults of a kernel in memory, and what the kernels' cases and the exercises' grading say of each."""

import contextlib
import sys

import pytest
import torch

from common.measuring.guarded_memory import BAND, LAYOUTS, GuardedMemory, between_bands, never_written, stray_store
from common.versions import REPOSITORY
from kernel_cases import Case, Wrong, check, normal

sys.path.insert(0, str(REPOSITORY / "exercises"))
import grading
import judge

SOURCE = """
import triton
import triton.language as tl

BLOCK = 4

@triton.jit
def kernel(x_ptr, y_ptr, count, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < count
    x = tl.load(x_ptr + i, mask=inside, other=0.0)
    # the fault
    tl.store(y_ptr + i, 2 * x, mask=inside)

def run(x, y):
    kernel[(3,)](x.contiguous(), y, x.numel(), BLOCK)
"""
FAULT = "# the fault"
NAN = "NaN or"  # "NaN or never written", "NaN or infinite"
# Fault -> a text of the source, what replaces it, and what each side says of it; None: it is not seen there.
FAULTS = {
    "nothing": (FAULT, "pass", None, None),
    "load past the end": (FAULT, "x += 0 * tl.load(x_ptr + count)", NAN, NAN),
    "load before the start": (FAULT, "x += 0 * tl.load(x_ptr - 1)", NAN, NAN),
    "load past the end of an output": (FAULT, "x += 0 * tl.load(y_ptr + count)", NAN, NAN),
    "load of what is not written yet": (FAULT, "x += 0 * tl.load(y_ptr + i, inside, 0.0)", NAN, "4 of|never written"),
    "load past the end, not used": (FAULT, "tl.load(x_ptr + count)", None, "nearest 1 past the end: mask the load"),
    "load before the start, not used": (FAULT, "tl.load(x_ptr - 2)", None, "nearest 2 before the start: mask the load"),
    "masked load without other": (FAULT, "x += 0 * tl.sum(tl.load(x_ptr + i, inside), 0)", None, "without other"),
    "store past the end": (FAULT, "tl.store(y_ptr + count, 0.0)", "1 past the end", "y: 1 element .* 1 past the end"),
    "store before the start": (FAULT, "tl.store(y_ptr - 1 - i, x)", "1 before the", "y: 12 elements .* 1 before the"),
    "store of NaN": (FAULT, "tl.store(y_ptr + count + 2, float('nan'))", "3 past the end", "y: .* 3 past the end"),
    "store past the end of an input": (FAULT, "tl.store(x_ptr + count, 0.0)", "1 past the end", "x: .* 1 past the end"),
    "store before an input": (FAULT, "tl.store(x_ptr - 2, 0.0)", "2 before the start", "x: .* 2 before the start"),
    "store of a band": (FAULT, "tl.store(y_ptr + count, tl.load(x_ptr + count))", "1 past the end", "y: .* 1 past the"),
    "input changed": (FAULT, "tl.store(x_ptr + i, -x, mask=inside)", "x was overwritten", "x: the kernel changed its"),
    "an element never written": ("mask=inside)\n\n", "mask=i < 9)\n\n", "1 of 10", "1 of 10 .* at row 1, column 4"),
    "a program not launched": ("[(3,)]", "[(2,)]", "2 of 10 elements are", "y: 2 of 10 elements are never written"),
    "strides ignored": ("x.contiguous()", "x", "y: relative error|NaN", None),
    "stored twice by one program": (
        FAULT,
        "tl.store(y_ptr + 0 * i, tl.where(i == 3, 2 * tl.load(x_ptr), x), mask=i < BLOCK)",
        None,
        "program 0 stored it twice",
    ),
    "stored twice": (FAULT, "tl.store(y_ptr + i + BLOCK, x, mask=i + BLOCK < count)", None, "stored it twice"),
    "another program's result": (FAULT, "x += 0 * tl.load(y_ptr + i - 4, inside & (i > 3), 0.0)", None, "same launch"),
}


def faulty(name, folder):
    """Return a module whose kernel has this fault."""
    old, new, *_ = FAULTS[name]
    assert SOURCE.count(old) == 1
    path = folder / "faulty.py"
    path.write_text(SOURCE.replace(old, new))
    return grading.load_module(path, "faulty")


def doubled(module, x):
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    module.run(x.detach(), y)
    return y + 0 * x


def judged(said, kind):
    return pytest.raises(kind, match=said) if said else contextlib.nullcontext()


@pytest.mark.skipif(not grading.INTERPRETED, reason="a GPU shows fewer faults")
@pytest.mark.parametrize("name", FAULTS)
def test_what_is_said_of_a_fault(name, tmp_path, device):
    """In float16, which has the fewest bits for marks."""
    module, (*_, of_kernel, of_answer) = faulty(name, tmp_path), FAULTS[name]
    layout = "reversed" if name == "strides ignored" else "contiguous"
    x = {"x": normal(2, 5)}
    case = Case(doubled, lambda x: 2 * x.detach() + 0 * x, ("y",), x, layouts={"x": layout})
    with judged(of_kernel, Wrong):
        check(module, case, torch.float16, device)
    task = grading.Task({}, lambda: x, lambda x: {"y": 2 * x}, {"y": "row column"}, {})
    with judged(of_answer, judge.Wrong):
        grading.run_case(task, module, {}, torch.float16)


STRIDES = {"padded": (6, 1), "reversed": (1, 2), "every second": (6, 2), "expanded": (0, 1)}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_is_what_it_is_called(layout):
    """A kernel's cases ask for it by name: contiguous, it would show nothing."""
    x = normal(2, 3)
    laid_out = between_bands(x, layout)
    assert laid_out.stride() == STRIDES.get(layout, (3, 1))
    assert laid_out.storage_offset() == BAND + (layout == "shifted")
    assert torch.equal(laid_out, x[:1].expand(2, 3) if layout == "expanded" else x)


@pytest.mark.parametrize("name", "float64 float32 bfloat16 float8_e4m3fn float8_e4m3fnuz int64 int32".split())
def test_marks_of_every_dtype(name, device):
    with GuardedMemory():
        x = torch.empty(3, 2, dtype=getattr(torch, name), device=device)
    assert never_written(x).all() and stray_store(x) is None
    assert "float" not in name or x.float().isnan().all()
    x.zero_()
    assert not never_written(x).any() and stray_store(x) is None
    x.as_strided((1,), (1,), x.storage_offset() + 6).zero_()
    assert stray_store(x) == "1 element outside the tensor written, the nearest 1 past the end"


@pytest.mark.parametrize(
    ("allocate", "unwritten"),
    [
        (lambda x: x.clone(), False),
        (lambda x: x.t().contiguous(), False),
        (lambda x: x + 1, False),
        (lambda x: torch.zeros_like(x), False),
        (lambda x: x.new_empty(3, 2), True),
        (lambda x: torch.empty_strided((3, 2), (1, 3)), True),
    ],
)
def test_whatever_allocates_is_guarded(allocate, unwritten):
    """A load past the end of a copy would otherwise read what belongs to nobody, and show nothing."""
    x = torch.ones(2, 3)
    with GuardedMemory() as memory:
        y = allocate(x)
        view = y.t()
    assert [tensor.data_ptr() for tensor in memory.tensors] == [y.data_ptr()] == [view.data_ptr()]
    assert stray_store(y) is None and never_written(y).all() == unwritten
    y.as_strided((1,), (1,), y.storage_offset() + 6).zero_()
    assert stray_store(y) == "1 element outside the tensor written, the nearest 1 past the end"


def test_a_backward_allocates_between_bands_too():
    x = torch.ones(2, 3, requires_grad=True)
    y = (x * x).sum()
    with GuardedMemory() as memory:
        y.backward()
    assert x.grad.data_ptr() in [tensor.data_ptr() for tensor in memory.tensors]


def test_an_operation_that_is_not_pytorchs_is_named():
    """Its own allocations are not seen."""
    library = torch.library.Library("test_guarded_memory", "FRAGMENT")
    library.define("doubled(Tensor x) -> Tensor")
    library.impl("doubled", lambda x: 2 * x, "CPU")
    with GuardedMemory() as memory:
        torch.ops.test_guarded_memory.doubled(torch.ones(2) + 1)
    assert memory.opaque == {"test_guarded_memory.doubled"}


def test_what_a_function_made_an_operation_allocates_is_seen():
    @torch.library.custom_op("test_guarded_memory::tripled", mutates_args=())
    def tripled(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(2 * x).copy_(3 * x)

    x = torch.ones(2)
    with GuardedMemory() as memory:
        y = tripled(x)
    assert y.tolist() == [3, 3] and not memory.opaque
    assert [tensor.tolist() for tensor in memory.tensors] == [[2, 2], [3, 3], [3, 3]]


@pytest.mark.slow  # it imports the compiler
def test_a_wrapped_kernel_is_launched_inside_a_backward():
    """In the backward of a triton_op, wrap_triton calls a higher-order operator."""
    from torch._higher_order_ops import triton_kernel_wrap

    class Kernel:
        arg_names = ["x", "y", "factor"]

        def __getitem__(self, grid):
            return lambda x, y, factor: y.copy_(factor * x)

    table = triton_kernel_wrap.kernel_side_table
    numbers = {"kernel_idx": table.add_kernel(Kernel()), "constant_args_idx": table.add_constant_args({})}
    x = torch.ones(2)
    with GuardedMemory() as memory:
        y = torch.empty(2)
        given = {"x": x, "y": y, "factor": 2}
        triton_kernel_wrap.triton_kernel_wrapper_mutation(
            **numbers, grid=[(1,)], tma_descriptor_metadata={}, kwargs=given
        )
    assert y.tolist() == [2, 2] and not memory.opaque
    assert [tensor.data_ptr() for tensor in memory.tensors] == [y.data_ptr()]


def test_another_higher_order_operator_is_named():
    x = torch.ones(2)
    with GuardedMemory() as memory:
        y = torch.ops.higher_order.cond(torch.tensor(True), lambda x: 2 * x, lambda x: x, (x,))
    assert y.tolist() == [2, 2] and memory.opaque == {"cond"}
