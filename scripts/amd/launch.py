"""Execute the launches of Triton kernels on tensors of the CPU: compiled for an AMD GPU, run by the interpreter.

    with executed("gfx942") as launches:
        kernel[grid](x, y, ...)
    launches[0].totals.instructions

Triton must have been imported with TRITON_INTERPRET=0: it decides then whether kernels can be compiled.
"""

import contextlib
import dataclasses
import functools
import gc
import struct
import time
from types import SimpleNamespace
from unittest import mock

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from common.formulas.occupancy import TARGETS

from .assembly import Fault, parse_kernel
from .execute import Program, Totals

FORMATS = {
    "i1": "<?", "i8": "<b", "u8": "<B", "i16": "<h", "u16": "<H", "i32": "<i", "u32": "<I", "i64": "<q", "u64": "<Q",
    "fp32": "<f", "fp64": "<d",
}  # fmt: skip


MOST_LANES = 1024  # of a workgroup
PROGRAMS = 3  # of kernels that loop over their work: fewer than there is work for


@dataclasses.dataclass
class Launch:
    """One launch that was executed."""

    kernel: str
    grid: tuple[int, int, int]
    warps: int
    hash: str  # Triton's name for what it compiled
    totals: Totals
    seconds: float


def driver_of(target):
    """Return a stub for the driver of a GPU that is not here: Triton asks it what to compile for."""
    gpu = GPUTarget("hip", target, TARGETS[target].warp_size)
    return SimpleNamespace(
        get_current_target=lambda: gpu,
        get_current_device=lambda: target,  # Triton keeps the kernels of each device apart
        get_current_stream=lambda device: 0,
    )


@functools.lru_cache(64)
def program_of(assembly):
    return Program(parse_kernel(assembly))


def extent(tensor):
    """Return the first address of a tensor and the one after its last element."""
    if not tensor.numel():
        return tensor.data_ptr(), tensor.data_ptr()
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (1 + last) * tensor.element_size()


def tensors_at(addresses):
    """Return {address: the largest living tensor that begins there}."""
    found = {}
    for x in gc.get_objects():
        # type() and not isinstance(): some objects answer for their class, and fail
        if type(x) in (torch.Tensor, torch.nn.Parameter) and x.device.type == "cpu" and x.layout == torch.strided:
            grad = x.grad if x.is_leaf else None  # a gradient that only C++ holds is no object of Python's
            for tensor in (x, grad):
                address = None if tensor is None else tensor.data_ptr()
                if address in addresses and (address not in found or extent(found[address]) < extent(tensor)):
                    found[address] = tensor
    return found


def tables_of_addresses(tensors):
    """Return {address: tensor} of what tensors of int64 point to, in their order; most hold no addresses."""
    tables = [tensor.flatten().tolist() for tensor in tensors if tensor.dtype == torch.int64]
    addresses = [address for table in tables for address in table if address >= 1 << 16]
    found = tensors_at(set(addresses)) if addresses else {}
    return {address: found[address] for address in addresses if address in found}


def arguments_of(kernel, signature, bound):
    """Return the bytes of each argument, and the ranges of memory that the tensors among them allow.

    A tensor of int64 may be a table of addresses: the tensors that begin there are allowed, too.
    """
    given = []
    tensors = []
    for parameter in kernel.params:
        kind = signature[parameter.name]
        value = bound[parameter.name]
        if kind == "constexpr":
            continue
        if kind.startswith("*"):
            tensors.append(value)
            given.append(struct.pack("<Q", value.data_ptr()))
        elif kind in FORMATS:
            given.append(struct.pack(FORMATS[kind], value))
        else:
            raise Fault(f"{kernel.fn.__name__}: an argument of type {kind}")
    return given, [extent(tensor) for tensor in [*tensors, *tables_of_addresses(tensors).values()]]


def check_size(target, name, metadata):
    """Raise Fault for a launch that the target refuses."""
    limits = TARGETS[target]
    lanes = metadata.num_warps * limits.warp_size
    if lanes > MOST_LANES:
        raise Fault(f"{target} {name}: {lanes} lanes in a workgroup, at most {MOST_LANES} are possible")
    if metadata.shared > limits.shared:
        raise Fault(f"{target} {name}: {metadata.shared} bytes of LDS, at most {limits.shared} are possible")


@contextlib.contextmanager
def executed(target, order=1, seed=0, progress=None):
    """Execute what is launched, as if on that target; yield a list that gets a Launch for each.

    order: 1 or -1, the order of the waves of a workgroup. progress(kernel, done, of): called after each workgroup.
    """
    run = JITFunction.run
    launches = []

    def execute(kernel, *args, grid, warmup, **given):
        compiled = run(kernel, *args, grid=None, warmup=True, **given)
        *_, bind = kernel.device_caches[driver.active.get_current_device()]  # gives arguments their parameters' names
        bound, _, _ = bind(*args, **given)
        if callable(grid):
            grid = grid(bound)
        grid = (*grid, 1, 1)[:3]
        name = kernel.fn.__name__
        check_size(target, name, compiled.metadata)
        start = time.perf_counter()
        arguments, ranges = arguments_of(kernel, compiled.src.signature, bound)
        totals = program_of(compiled.asm["amdgcn"]).launch(
            grid,
            arguments,
            ranges,
            compiled.metadata.num_warps,
            compiled.metadata.shared,
            order,
            seed,
            progress=functools.partial(progress, name) if progress else None,
        )
        seconds = time.perf_counter() - start
        launches.append(Launch(name, grid, compiled.metadata.num_warps, compiled.hash, totals, seconds))
        return compiled

    with mock.patch.object(driver, "_active", driver_of(target)), mock.patch.object(JITFunction, "run", execute):
        yield launches


@contextlib.contextmanager
def choices_of(script, target, tile=0):
    """Let version 3 choose what it would on the target, and the tile of this number among those it would try."""
    tiles = script.attention_tiles

    def attention_tiles(*choice):
        candidates = tiles(*choice)
        return (candidates[tile % len(candidates)],)

    answers = {
        "gpu_architecture": lambda device: target,
        "program_count": lambda device: PROGRAMS,
        "attention_tiles": attention_tiles,
    }
    with mock.patch.multiple(script, **answers):
        yield


@contextlib.contextmanager
def executed_version(script, target, tile=0, **options):
    """Execute what version 3 launches, with the choices that it would make on the target; yield the launches."""
    with executed(target, **options) as launches, choices_of(script, target, tile):
        yield launches
