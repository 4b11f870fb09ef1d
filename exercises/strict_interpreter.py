"""Make Triton's interpreter as strict as a GPU can be, where it forgives what a GPU would not."""

import contextlib
import importlib
import inspect
import math
import pathlib
import sys
from unittest import mock

import numpy as np
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder, ReduceOps, ScanOps, TensorHandle

from common.measuring.guarded_memory import BAND, UNWRITTEN, bits, extent, launches, mark

NAN = {  # Triton's names of dtypes
    "fp16": np.float16(math.nan),
    "bf16": np.uint16(0x7FC0),  # NumPy has no bfloat16: the interpreter keeps its bits
    "fp32": np.float32(math.nan),
    "fp64": np.float64(math.nan),
}
LANES = 1 << 20  # more than the elements of a tile
NOT_THE_KERNEL = (__file__, str(pathlib.Path(triton.__file__).parent))


def kernel_line():
    """Return the line of the kernel that the interpreter executes, the innermost one of the answer's own."""
    frame = sys._getframe()
    while frame and frame.f_code.co_filename.startswith(NOT_THE_KERNEL):
        frame = frame.f_back
    return frame.f_lineno if frame else None


def without_other(load):
    """Return an interpreter's masked load that reads NaN where the mask is False and the answer names no other.

    What a GPU returns there is undefined; the interpreter returns zero. Of one element it does not tell: there Triton
    drops an other of zero on the way to the interpreter.
    """

    def masked_load(builder, pointers, mask, other, *rest):
        kind = pointers.get_element_ty()
        if other is None and kind.name in NAN and pointers.data.size > 1:
            other = TensorHandle(np.full(pointers.data.shape, NAN[kind.name]), kind)
        return load(builder, pointers, mask, other, *rest)

    return masked_load


def in_float16(sum):
    """Return an interpreter's sum that rounds a float16 sum in every step; NumPy adds in float32."""

    def rounded_sum(operation, values):
        data, axis = values.handle.data, operation.axis
        if data.dtype != np.float16 or axis is None:
            return sum(operation, values)
        total = np.take(np.add.accumulate(data, axis), [-1], axis)
        return operation.to_tensor(total if operation.keep_dims else total.squeeze(axis), values.dtype)

    return rounded_sum


# ---------------------------------------------------------------- what the interpreter cannot do, or does wrongly

OF_TORCH = (  # functions of libdevice that PyTorch has under the same name
    "acos acosh asin asinh atan atan2 atanh ceil copysign cos cosh erf erfc exp exp2 expm1 floor fmod hypot lgamma log "
    "log10 log1p log2 pow rsqrt sin sinh sqrt tan tanh trunc"
).split()


class Unsupported(Exception):
    """Tell what Triton's interpreter cannot do."""


def is_bfloat16(value):
    return isinstance(value, TensorHandle | tl.tensor) and value.dtype.scalar == tl.bfloat16


def without_bfloat16(operation):
    """Return an operation of the interpreter that refuses bfloat16, with whose bits it would compute as integers."""

    def refusing(self, *operands, **options):
        flat = [each for value in operands for each in (value if isinstance(value, tuple) else (value,))]
        if any(map(is_bfloat16, flat)):
            raise Unsupported("does not compute in bfloat16: convert what you load with .to(tl.float32)")
        return operation(self, *operands, **options)

    return refusing


def rounding(cast):
    """Return an interpreter's cast that rounds float32 to bfloat16 as a GPU does, instead of cutting bits off."""

    def cast_impl(builder, source, kind):
        if source.dtype.scalar == tl.float32 and kind.scalar == tl.bfloat16:
            rounded = torch.from_numpy(np.ascontiguousarray(source.data)).bfloat16()
            return TensorHandle(rounded.view(torch.int16).numpy().view(np.uint16), kind.scalar)
        return cast(builder, source, kind)

    return cast_impl


def with_floats(convert):
    """Return the interpreter's conversion of arguments that makes a float a float32 scalar too, as a GPU gets it."""

    def implicit_cvt(argument):
        if isinstance(argument, float):
            return tl.tensor(TensorHandle(np.array([argument], np.float32), tl.float32), tl.float32)
        return convert(argument)

    return implicit_cvt


def by_torch(name):
    """Return a function of libdevice that computes tiles with PyTorch's function of the same name."""

    def function(*operands):
        tiles = [operand for operand in operands if isinstance(operand, tl.tensor)]
        if any(map(is_bfloat16, tiles)):
            raise Unsupported(f"has no libdevice.{name} in bfloat16: convert what you load with .to(tl.float32)")
        values = [torch.tensor(each.handle.data if isinstance(each, tl.tensor) else each) for each in operands]
        found = getattr(torch, name)(*values).to(values[0].dtype).numpy()
        kind = tiles[0].dtype
        if any(tile.type.is_block() for tile in tiles):
            kind = tl.block_type(kind, list(found.shape))
        return tl.tensor(TensorHandle(found, kind.scalar), kind)

    return function


def refused(name):
    def function(*operands, **options):
        raise Unsupported(f"has no libdevice.{name}")

    return function


def supply_libdevice():
    """Replace the functions of libdevice, which return None in the interpreter, before a kernel's file imports them."""
    for module in ("", "cuda.", "hip."):
        library = importlib.import_module(f"triton.language.extra.{module}libdevice")
        for name, _ in inspect.getmembers(library, inspect.isfunction):
            setattr(library, name, by_torch(name) if name in OF_TORCH else refused(name))


def supply_wrap_triton():
    """Let torch.library.wrap_triton return an interpreted kernel as it is, as PyTorch 2.13 does; 2.11 refuses it."""
    torch.library.wrap_triton = lambda kernel: kernel


# ---------------------------------------------------------------- loads and stores


def describe_shape(tensor):
    return f"a tensor {list(tensor.shape)} that is allocated"


class Watched:
    """Hold where a tensor lies, whether kernels loaded it, and, of an output, who stored each element: 0 is nobody."""

    def __init__(self, name, tensor, is_output):
        self.name, self.size, self.is_output = name, tensor.element_size(), is_output
        elements = extent(tensor.shape, tensor.stride())
        self.start = tensor.data_ptr()
        self.end = self.start + elements * self.size
        self.loaded = False
        if is_output:
            self.bits = bits(tensor.as_strided((elements,), (1,))).numpy()
            self.unwritten = mark(tensor, UNWRITTEN)
            self.writers = np.zeros(elements, np.int64)


class Watch(contextlib.ExitStack):
    """Watch the loads and stores of kernels in the interpreter inside a `with`.

    inputs, outputs: name -> tensor between guard bands.
    allocated: a list of more outputs, which may grow until a launch begins: the tensors of GuardedMemory.
    fault: None, or the first (kind, Watched, element of it or None, sentence).
    stores: address of a tensor -> what to do about the first store outside it.
    unwritten: None, or words on the first load of what nobody has written.
    undefined: None, or words on the first masked load that names no other.
    lines: (file, line) of loads and stores, and of what they are called from. repeated: those that a program ran twice.
    """

    def __init__(self, inputs, outputs, allocated=()):
        super().__init__()
        self.tensors = [Watched(name, tensor, False) for name, tensor in inputs.items()]
        self.tensors += [Watched(name, tensor, True) for name, tensor in outputs.items()]
        self.allocated, self.taken = allocated, 0
        self.grid = (1, 1, 1)
        self.fault, self.stores = None, {}
        self.unwritten = self.undefined = None
        self.added = None  # or the line and the tensor of the first addition to what nobody has written
        self.stored_again = None  # or the tensor, the element and the programs that stored it
        self.lines, self.repeated = set(), set()
        self.running, self.paths = None, set()  # the program that runs, and how it came to its loads and stores
        self.masked = True  # does the load or store that runs have a mask?
        self.atomics = False  # has this launch had an atomic operation? Then a program can wait for another one.

    def start_launch(self, name):
        self.atomics = False
        self.running = None
        for tensor in self.allocated[self.taken :]:
            self.tensors.append(Watched(describe_shape(tensor), tensor, True))
        self.taken = len(self.allocated)
        for tensor in self.tensors:
            if tensor.is_output:
                tensor.writers.fill(0)

    def not_loaded(self):
        return [tensor.name for tensor in self.tensors if not tensor.is_output and not tensor.loaded]

    def describe_load(self):
        """Return words on the first load of what does not belong to the tensors, or of what nobody has written."""
        if self.fault and self.fault[0] == "stray load":
            _, tensor, _, sentence = self.fault
            return sentence.replace("the tensor", tensor.name, 1)
        return self.unwritten

    @property
    def unset(self):
        """Return words on the first addition to what nobody has written, or None; a tensor may get its name later."""
        if not self.added:
            return None
        line, tensor = self.added
        return f"line {line} adds to {tensor.name}, which nothing has set before: allocate it with torch.zeros"

    @property
    def shared(self):
        """Return words on an element that two programs stored alike, or None; a tensor may get its name later."""
        if not self.stored_again:
            return None
        tensor, element, programs = self.stored_again
        said = (
            f"{programs} both store element {element} of {tensor.name}: should both add to it, with tl.atomic_add, or"
        )
        said += " do they count the same work twice? A loop over rows begins at the program's number"
        return f"{said} and steps by the number of programs"

    def note_lines(self, builder):
        """Note the lines that the kernel has come to a load or store by, and whether this program was there before."""
        program = self.program(builder)
        if program != self.running:
            self.running, self.paths = program, set()
        path = []
        frame = sys._getframe()
        while frame and frame.f_code is not GridExecutor.__call__.__code__:
            if not frame.f_code.co_filename.startswith(NOT_THE_KERNEL):
                path.append((frame.f_code.co_filename, frame.f_lineno, frame.f_lasti))
            frame = frame.f_back
        lines = {(file, line) for file, line, _ in path}
        self.lines |= lines
        if tuple(path) in self.paths:
            self.repeated |= lines
        self.paths.add(tuple(path))

    def program(self, builder):
        """Return the number of the program that runs, in the order in which the interpreter runs them."""
        (x, y, z), self.grid = builder.grid_idx, builder.grid_dim
        return (x * self.grid[1] + y) * self.grid[2] + z

    def name_program(self, number):
        x, rest = divmod(int(number), self.grid[1] * self.grid[2])
        return f"program {x}, {rest}" if self.grid[1] > 1 else f"program {x}"

    def find(self, addresses):
        """Return the tensor that all addresses lie in, or None."""
        low, high = addresses.min(), addresses.max()
        return next((tensor for tensor in self.tensors if tensor.start <= low and high < tensor.end), None)

    def mend(self, access):
        """Return what to do about the mask of this load or store, with its line."""
        if self.masked:
            return f"the mask of the {access} in line {kernel_line()} is too wide"
        return f"mask the {access} in line {kernel_line()}"

    def check_load(self, builder, addresses):
        if self.fault or not addresses.size:
            return
        tensor = self.find(addresses)
        if tensor is None:
            self.check_bands(builder, addresses, "loads", "load")
            return
        tensor.loaded = True
        if not tensor.is_output:
            return
        places = (addresses - tensor.start) // tensor.size
        if not self.unwritten and (tensor.bits[places] == tensor.unwritten).any():
            self.unwritten = f"line {kernel_line()} reads elements of {tensor.name} that nobody has written"
        if not self.atomics:
            writers, program = tensor.writers[places] - 1, self.program(builder)
            foreign = ((writers >= 0) & (writers // LANES != program)).nonzero()[0]
            if foreign.size:
                other = self.name_program(writers[foreign[0]] // LANES)
                found = f"{self.name_program(program)} loads what {other} stored in the same launch"
                said = f"{found}; on a GPU that one may not have run yet: leave it to a second kernel"
                self.fault = "race", tensor, int(places[foreign[0]]), said

    def outside(self, addresses):
        """Return the tensor whose bands some of the addresses lie in, and how far outside the nearest is; or None."""
        for tensor in self.tensors:
            band = BAND * tensor.size
            past = addresses[(addresses >= tensor.end) & (addresses < tensor.end + band)]
            before = addresses[(addresses < tensor.start) & (addresses >= tensor.start - band)]
            if past.size:
                return tensor, f"{(past.min() - tensor.end) // tensor.size + 1} past the end"
            if before.size:
                return tensor, f"{(tensor.start - before.max()) // tensor.size} before the start"
        return None

    def check_bands(self, builder, addresses, does, access):
        if found := self.outside(addresses):
            tensor, distance = found
            program = self.name_program(self.program(builder))
            said = f"{program} {does} elements outside the tensor, the nearest {distance}: {self.mend(access)}"
            self.fault = "stray load", tensor, None, said

    def check_update(self, builder, addresses):
        tensor = self.find(addresses)
        if tensor is None:
            self.check_bands(builder, addresses, "updates", "atomic operation")
        elif tensor.is_output and not self.unwritten:
            places = (addresses - tensor.start) // tensor.size
            if (tensor.bits[places] == tensor.unwritten).any():
                self.added = kernel_line(), tensor
                self.unwritten = (
                    f"line {kernel_line()} adds to elements of {tensor.name} that nobody has written: zero it"
                )

    def unmasked(self, access):
        """Return an interpreter's load or store without a mask, which calls the masked one."""

        def unmasked_access(builder, *arguments):
            self.masked = False
            try:
                return access(builder, *arguments)
            finally:
                self.masked = True

        return unmasked_access

    def checked_load(self, load):
        def masked_load(builder, pointers, mask, other, *rest):
            self.note_lines(builder)
            self.check_load(builder, pointers.data[mask.data.astype(bool)].astype(np.int64))
            if other is None and not self.undefined and not mask.data.all():
                self.undefined = f"line {kernel_line()} loads without other, so what is masked off is undefined"
            return load(builder, pointers, mask, other, *rest)

        return masked_load

    def checked_store(self, store):
        def masked_store(builder, pointers, value, mask, *rest):
            self.note_lines(builder)
            lanes = np.flatnonzero(mask.data)
            addresses = pointers.data.reshape(-1)[lanes].astype(np.int64)
            output = self.find(addresses) if lanes.size else None
            if lanes.size and output is None and (found := self.outside(addresses)):
                self.stores.setdefault(found[0].start, self.mend("store"))
            if self.fault or self.atomics or output is None or not output.is_output:
                return store(builder, pointers, value, mask, *rest)
            places = (addresses - output.start) // output.size
            wanted = value.data.reshape(-1)[lanes].view(output.bits.dtype)
            mine = self.program(builder) * LANES + lanes + 1
            before, writers = output.bits[places], output.writers[places]
            result = store(builder, pointers, value, mask, *rest)
            lost = output.bits[places] != wanted
            replaced = (writers > 0) & (writers != mine) & (before != wanted)
            twice = (lost | replaced).nonzero()[0]
            again = ((writers > 0) & ((writers - 1) // LANES != self.program(builder))).nonzero()[0]
            if again.size and not self.stored_again:
                lane = again[0]
                programs = {self.name_program((n - 1) // LANES) for n in (writers[lane], mine[lane])}
                self.stored_again = output, places[lane], " and ".join(sorted(programs))
            if twice.size:
                first = twice[0]
                programs = {self.name_program((n - 1) // LANES) for n in (writers[first] or mine[first], mine[first])}
                said = f"{' and '.join(sorted(programs))} stored it twice, with different values"
                said += f"; on a GPU either value can win: see the offsets and the mask in line {kernel_line()}"
                self.fault = "race", output, int(places[first]), said
            output.writers[places] = mine
            return result

        return masked_store

    def noted_exchange(self, exchange):
        def atomic_cas(builder, *arguments):
            self.atomics = True
            return exchange(builder, *arguments)

        return atomic_cas

    def checked_update(self, update):
        def atomic_rmw(builder, operation, pointers, value, mask, *rest):
            if is_bfloat16(value):
                raise Unsupported("has no atomic operations in bfloat16: add in float32, which rounds less, too")
            self.atomics = True
            self.note_lines(builder)
            addresses = pointers.data[mask.data.astype(bool)].astype(np.int64)
            if addresses.size and not self.fault:
                self.check_update(builder, addresses)
            return update(builder, operation, pointers, value, mask, *rest)

        return atomic_rmw

    def __enter__(self):
        load = without_other(InterpreterBuilder.create_masked_load)
        replaced = {
            "create_load": self.unmasked(InterpreterBuilder.create_load),
            "create_store": self.unmasked(InterpreterBuilder.create_store),
            "create_masked_load": self.checked_load(load),
            "create_masked_store": self.checked_store(InterpreterBuilder.create_masked_store),
            "create_atomic_cas": self.noted_exchange(InterpreterBuilder.create_atomic_cas),
            "create_atomic_rmw": self.checked_update(InterpreterBuilder.create_atomic_rmw),
        }
        for name in ("binary_op", "unary_op", "create_fma", "create_clampf", "create_dot"):
            replaced[name] = without_bfloat16(getattr(InterpreterBuilder, name))
        replaced["cast_impl"] = rounding(InterpreterBuilder.cast_impl)
        self.enter_context(launches(self.start_launch))
        self.enter_context(mock.patch.multiple(InterpreterBuilder, **replaced))
        self.enter_context(mock.patch.object(interpreter, "_implicit_cvt", with_floats(interpreter._implicit_cvt)))
        self.enter_context(mock.patch.object(ReduceOps, "sum", in_float16(ReduceOps.sum)))
        for operation in (ReduceOps, ScanOps):
            self.enter_context(mock.patch.object(operation, "apply_impl", without_bfloat16(operation.apply_impl)))
        return self
