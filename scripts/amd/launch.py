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
import re
import struct
import time
from types import SimpleNamespace
from unittest import mock

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import CompiledKernel
from triton.runtime import driver

from common.formulas.occupancy import SIMDS, TARGETS

from .assembly import Fault, UnsupportedError, parse_kernel
from .execute import Program, Totals

FORMATS = {
    "i1": "<?", "u1": "<?", "i8": "<b", "u8": "<B", "i16": "<h", "u16": "<H", "i32": "<i", "u32": "<I", "i64": "<q",
    "u64": "<Q", "fp32": "<f", "fp64": "<d",
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
    limits = TARGETS[target]
    gpu = GPUTarget("hip", target, limits.warp_size)
    properties = {
        "multiprocessor_count": limits.units,
        "max_shared_mem": limits.shared,
        "max_num_regs": limits.registers * limits.warp_size,
        "max_threads_per_sm": limits.most_waves * SIMDS * limits.warp_size,
        "warpSize": limits.warp_size,
        "arch": target,
    }
    return SimpleNamespace(
        get_current_target=lambda: gpu,
        get_current_device=lambda: target,  # Triton keeps the kernels of each device apart
        get_current_stream=lambda device: 0,
        get_active_torch_device=lambda: torch.device("cpu"),
        utils=SimpleNamespace(get_device_properties=lambda device: properties),
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


def storage_extent(tensor):
    """Return the first address of the memory that a tensor is a view of, and the one after its end."""
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()


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


def flat_arguments(kind, value):
    """Yield (type, value) of an argument: of each of a tuple's or a tensor descriptor's parts, and of no constant.

    The AMD compiler takes a descriptor apart, and passes its shape and strides twice.
    """
    if isinstance(kind, tuple):
        for one_kind, one_value in zip(kind, value, strict=True):
            yield from flat_arguments(one_kind, one_value)
    elif kind.startswith("tensordesc"):
        yield "*", value.base
        yield from (("i64", number) for number in (*value.shape, *value.strides))
        yield from (("i1", flag) for flag in (value.padding == "nan", getattr(value, "round_f32_to_tf32", None)))
        yield from (("i32", number) for number in value.shape)
        yield from (("i64", number) for number in value.strides)
    elif kind != "constexpr":
        yield kind, value


def tensor_of(value):
    """Return the tensor of an argument, which Triton may have wrapped to read it as another type."""
    return value if isinstance(value, torch.Tensor) else value.base


def arguments_of(name, signature, values):
    """Return the bytes of each argument, and the tensors among them.

    signature: {parameter: type}. values: one per parameter. A tensor of int64 may be a table of addresses: the tensors
    that begin there count, too.
    """
    given = []
    tensors = []
    for kind, value in zip(signature.values(), values, strict=True):
        for one_kind, one_value in flat_arguments(kind, value):
            if one_kind.startswith("*"):
                tensor = tensor_of(one_value)
                tensors.append(tensor)
                given.append(struct.pack("<Q", tensor.data_ptr()))
            elif one_kind in FORMATS:
                given.append(struct.pack(FORMATS[one_kind], one_value))
            else:
                raise UnsupportedError(f"{name}: an argument of type {one_kind}")
    return given, [*tensors, *tables_of_addresses(tensors).values()]


def check_size(target, name, metadata):
    """Raise Fault for a launch that the target refuses."""
    limits = TARGETS[target]
    lanes = metadata.num_warps * limits.warp_size
    if lanes > MOST_LANES:
        raise Fault(f"{target} {name}: {lanes} lanes in a workgroup, at most {MOST_LANES} are possible")
    if metadata.shared > limits.shared:
        raise Fault(f"{target} {name}: {metadata.shared} bytes of LDS, at most {limits.shared} are possible")


def set_register_counts(compiled):
    """Stand for CompiledKernel._init_handles, which loads a kernel: a script may ask what it needs."""
    found = dict(re.findall(r"^\s+\.(\w+):\s*(\d+)", compiled.asm["amdgcn"], re.MULTILINE))
    compiled.n_regs = int(found["vgpr_count"])
    compiled.n_spills = int(found["vgpr_spill_count"])
    compiled.n_max_threads = MOST_LANES


@contextlib.contextmanager
def launched_with(target, execute):
    """Compile what is launched for that target, and call execute(compiled, grid, values of all parameters) for it."""

    def run(compiled):
        def launch(x, y, z, stream, function, packed_metadata, launch_metadata, enter_hook, exit_hook, *values):
            execute(compiled, (x, y, z), values)

        return launch

    with (
        mock.patch.object(driver, "_active", driver_of(target)),
        mock.patch.object(CompiledKernel, "_init_handles", set_register_counts),
        mock.patch.object(CompiledKernel, "run", property(run)),
    ):
        yield


def execute_launch(
    target, compiled, grid, values, order=1, seed=0, progress=None, limit=None, extent_of=extent, watched=None
):
    """Execute one launch and return its Launch.

    progress(kernel, workgroups done, of, instructions): called now and then. limit: of instructions, of all waves.
    extent_of: extent or storage_extent, which says what memory a tensor among the arguments allows. watched: as in
    Program.launch.
    """
    name = compiled.src.fn.__name__
    check_size(target, name, compiled.metadata)
    start = time.perf_counter()
    arguments, tensors = arguments_of(name, compiled.src.signature, values)
    totals = program_of(compiled.asm["amdgcn"]).launch(
        grid,
        arguments,
        [extent_of(tensor) for tensor in tensors],
        compiled.metadata.num_warps,
        compiled.metadata.shared,
        order,
        seed,
        progress=functools.partial(progress, name) if progress else None,
        limit=limit,
        watched=watched,
    )
    seconds = time.perf_counter() - start
    return Launch(name, grid, compiled.metadata.num_warps, compiled.hash, totals, seconds)


@contextlib.contextmanager
def executed(target, order=1, seed=0):
    """Execute what is launched, as if on that target; yield a list that gets a Launch for each.

    order: 1 or -1, the order of the waves of a workgroup.
    """
    launches = []

    def execute(compiled, grid, values):
        launches.append(execute_launch(target, compiled, grid, values, order, seed))

    with launched_with(target, execute):
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
