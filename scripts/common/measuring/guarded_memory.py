"""Find out what kernels did to memory that they must not touch, and to memory that they must write.

    x = between_bands(x)                    # a copy between guard bands: a load outside it gives NaN
    with GuardedMemory(), launches() as names:
        x = x.contiguous()                  # between guard bands, whichever operation allocates
        y = torch.empty_like(x)             # between guard bands too, and marked as never written
        kernel[grid](x, y)
    stray_store(x), stray_store(y)          # None, or words on what was written beside a tensor
    never_written(y)                        # a mask

Every tensor here is a view of memory of its own. Bands and unwritten elements are marked with the bits of NaN that no
arithmetic gives. The bands of two tensors differ, so a value from beside one tensor shows beside the other.
"""

import contextlib
import itertools
import math
from unittest import mock

import torch
from torch._library.custom_ops import OPDEFS
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import KernelInterface

BAND = 1 << 17  # elements; more than any tile holds, so that a stray store ends inside the band
SENTINEL = 77  # the mark of integers
NUMBERS = itertools.cycle(range(32))  # of bands: so many tensors have marks of their own
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Bytes of an element -> bits of a NaN (2: in float16 and in bfloat16). fp8 has one NaN, which is every mark.
OUTSIDE = {2: 0x7FC1, 4: 0x7FC00B01, 8: 0x7FF8000000000B01}  # in the first band; one more in the next
UNWRITTEN = {2: 0x7FFE, 4: 0x7FC0BEEF, 8: 0x7FF800000000BEEF}
LEAVE_UNWRITTEN = ("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided")
OWN = ("aten", "prim", "prims", "quantized", "inductor", "c10d", "_c10d_functional")  # namespaces of PyTorch
LAUNCH = "triton_kernel_wrapper_mutation"  # the higher-order operator behind wrap_triton; it allocates nothing
LAYOUTS = ("contiguous", "shifted", "padded", "reversed", "every second", "expanded")


def bits(tensor):
    """View the elements of a tensor as integers: NaN equals NaN there, and 0 differs from -0."""
    return tensor.detach().view(INTEGERS[tensor.element_size()])


def mark(tensor, marks, number=0):
    """Return what bits(tensor) has where an element is UNWRITTEN, or lies in the band of that number."""
    if not tensor.is_floating_point():
        return SENTINEL + number
    if tensor.element_size() == 1:
        return bits(torch.full((1,), math.nan).to(tensor.dtype)).item()
    return marks[tensor.element_size()] + number


def strides_of(shape, layout):
    """Return strides, in elements, of one of LAYOUTS."""
    widened = [*shape[:-1], shape[-1] + 3] if layout == "padded" and len(shape) else shape
    strides = [math.prod(widened[i + 1 :]) for i in range(len(shape))]
    if layout == "reversed":
        strides = [math.prod(shape[:i]) for i in range(len(shape))]
    if layout == "every second":
        strides = [2 * stride for stride in strides]
    if layout == "expanded" and strides:
        strides[0] = 0
    return strides


def extent(shape, strides):
    """Return the number of elements from the first of a tensor to its last, gaps included."""
    return 0 if 0 in shape else 1 + sum(stride * (size - 1) for stride, size in zip(strides, shape, strict=True))


def outside(shape, strides, dtype, device, start=BAND):
    """Return a tensor in new memory between guard bands; all of it is marked as OUTSIDE."""
    memory = torch.empty(start + extent(shape, strides) + BAND, dtype=dtype, device=device)
    bits(memory).fill_(mark(memory, OUTSIDE, next(NUMBERS)))
    return memory.as_strided(shape, strides, start)


def between_bands(tensor, layout="contiguous"):
    """Copy a tensor into that layout, between guard bands."""
    start = BAND + (layout == "shifted")  # one element further: no longer at a multiple of 16 bytes
    view = outside(tensor.shape, strides_of(tensor.shape, layout), tensor.dtype, tensor.device, start)
    expanded = layout == "expanded" and tensor.ndim
    (view[:1] if expanded else view).copy_(tensor[:1] if expanded else tensor)
    return view


class GuardedMemory(TorchDispatchMode):
    """While entered, what PyTorch allocates in this thread, or in a backward of it, lies between guard bands.

    tensors: all of them, in order; what torch.empty and its kin allocate is marked as never written.
    opaque: names of operations that are neither PyTorch's own nor functions given to torch.library.custom_op or
    triton_op, and of higher-order ones: what they allocate on the way is not seen.
    summed: tensors of 16 bits that began as never written, and that PyTorch adds up.
    """

    supports_higher_order_operators = True  # in the backward of a triton_op, wrap_triton launches a kernel as one

    @classmethod
    def _should_skip_dynamo(cls):
        """Leave torch.compile alone: else the first mode of a process imports torch._dynamo, which takes seconds."""
        return False

    def __init__(self):
        super().__init__()
        self.tensors = []
        self.opaque = set()
        self.blank = set()
        self.summed = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if function := function_behind(operation):
            with self:
                return function(*args, **(kwargs or {}))
        known = set()
        for kind in (torch.Tensor, torch.UntypedStorage):
            tree_map_only(kind, lambda value: known.add(address(value)), (args, kwargs))
        results = operation(*args, **(kwargs or {}))
        if isinstance(operation, HigherOrderOperator):
            unwritten = False
            self.opaque |= {operation.name()} - {LAUNCH}
        else:
            unwritten = operation.overloadpacket.__name__ in LEAVE_UNWRITTEN
            if operation.namespace not in OWN:
                self.opaque.add(str(operation.overloadpacket))
            summed = operation.overloadpacket is torch.ops.aten.sum and address(args[0]) in self.blank
            if summed and args[0].element_size() == 2:
                self.summed.append(args[0].detach())

        def guard(tensor):
            if address(tensor) in known or not has_marks(tensor):
                return tensor
            view = outside(tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
            if unwritten:
                bits(view).fill_(mark(view, UNWRITTEN))
                self.blank.add(address(view))
            else:
                view.copy_(tensor)
            self.tensors.append(view.detach())  # whose memory stays, whatever becomes of the other
            return view

        return tree_map_only(torch.Tensor, guard, results)


def function_behind(operation):
    """Return the function that torch.library made an operation of, or None; no public name leads to it."""
    definition = OPDEFS.get(operation.name().partition(".")[0])  # of a higher-order operator, too, which has none
    return definition._init_fn if definition else None


def address(value):
    """Return where a storage, or a tensor's, begins; None if it has no memory of its own, such as a meta tensor's."""
    if isinstance(value, torch.UntypedStorage):
        return value.data_ptr()
    plain = value.layout == torch.strided and value.device.type != "meta"
    return value.untyped_storage().data_ptr() if plain else None


def has_marks(tensor):
    """Return True for a tensor in memory whose elements can be marked, and that no other device reads.

    Not for an empty vector: Triton's interpreter makes several for each argument of a launch.
    """
    plain = tensor.layout == torch.strided and tensor.device.type != "meta" and type(tensor) is torch.Tensor
    return plain and tensor.shape != (0,) and tensor.element_size() in INTEGERS and not tensor.is_pinned()


def never_written(tensor):
    """Return where a tensor of GuardedMemory holds what it began with."""
    return bits(tensor) == mark(tensor, UNWRITTEN)


def stray_store(tensor):
    """Return words on the stores outside a tensor that lies between guard bands, or None."""
    first = tensor.storage_offset()
    last = first + extent(tensor.shape, tensor.stride())
    memory = bits(tensor.detach().as_strided((last + BAND,), (1,), 0))
    for side, band in (("before the start", memory[:first].flip(0)), ("past the end", memory[last:])):
        touched = (band != memory[0]).nonzero()  # no store goes as far as that one
        if len(touched):
            count = f"{len(touched)} element{'s' * (len(touched) > 1)}"
            return f"{count} outside the tensor written, the nearest {int(touched[0]) + 1} {side}"
    return None


@contextlib.contextmanager
def launches(before=lambda name: None, after=lambda: None):
    """Record the names of launched kernels in the set that this returns; call before(name) and after() for each."""
    names = set()

    def recording(get_launcher):
        def getitem(kernel, grid):
            launcher = get_launcher(kernel, grid)
            name = getattr(kernel, "base_fn", kernel).__name__  # base_fn: an Autotuner has no name of its own

            def launch(*arguments, **options):
                names.add(name)
                before(name)
                result = launcher(*arguments, **options)
                after()
                return result

            return launch

        return getitem

    with contextlib.ExitStack() as patches:
        for interface in (KernelInterface, InterpretedFunction):
            if "__getitem__" in vars(interface):  # the interpreter of Triton before 3.6 has its own
                patches.enter_context(mock.patch.object(interface, "__getitem__", recording(interface.__getitem__)))
        yield names
