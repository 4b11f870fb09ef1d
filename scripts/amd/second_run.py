"""Run a launch in Triton's interpreter, too, in a second process, and compare what both computed.

The second process is forked at the launch: it has the same kernel and the same memory. There, every function that
@triton.jit made is interpreted, which Triton otherwise decides when it is imported.
"""

import contextlib
import dataclasses
import multiprocessing
import os
import signal
import traceback
from unittest import mock

import numpy as np
import torch
import triton.language as tl
from triton import knobs
from triton._C.libtriton import ir
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpretedFunction, InterpreterBuilder, TensorHandle
from triton.runtime.jit import JITFunction

from .arithmetic import E4M3, E4M3_FNUZ, E5M2, E5M2_FNUZ, fp8_bits
from .assembly import Fault
from .compare import same, with_bfloat16
from .launch import execute_launch, storage_extent

# Differences that rounding explains, relative to the largest number of a tensor: units in the last place of 16-bit
# results, and sums in another order for wider ones.
ROUNDING = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10, torch.float32: 1e-5, torch.float64: 1e-12}
FP8_ROUNDING = 2.0**-2
FP8_FORMATS = {"fp8e4nv": E4M3, "fp8e5": E5M2, "fp8e4b8": E4M3_FNUZ, "fp8e5b16": E5M2_FNUZ}  # Triton's names


@dataclasses.dataclass
class Comparison:
    """Hold what comparing a launch found: a reason why it was not compared, or the largest difference and its place."""

    reason: str = ""
    difference: float = 0.0  # relative to the largest number of the tensor
    explained: bool = True  # by rounding
    where: str = ""

    def __str__(self):
        if self.reason:
            return f"cannot compare: {self.reason}"
        if self.difference == 0:
            return "no"
        found = f"by at most {self.difference:.1e}"
        return found if self.explained else f"{found} at {self.where}"


def widened(numbers, dtype):
    """Return the data of a handle as numbers that NumPy knows: bfloat16 as float32."""
    if dtype.scalar.name == "bf16":
        return (numbers.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
    return numbers


def rounded_to_bfloat16(numbers):
    return torch.from_numpy(np.array(numbers, np.float32)).bfloat16().view(torch.int16).numpy().view(np.uint16)


def with_bfloat16_arithmetic(operation, function_place):
    """Return an operation of Triton's interpreter that computes with bfloat16, whose bits it would take for integers.

    function_place: the place of the NumPy function among its arguments, after the operands.
    """

    def compute(builder, *args):
        operands = args[:function_place]
        function = args[function_place]
        if not any(x.dtype.scalar.name == "bf16" for x in operands) or function is np.where:
            return operation(builder, *args)
        result = function(*(widened(x.data, x.dtype) for x in operands))
        if result.dtype != bool:
            result = rounded_to_bfloat16(result)
        return TensorHandle(result, operands[0].dtype.scalar)

    return compute


def rounding_to_nearest(convert):
    """Return the conversion of floats of Triton's interpreter, which rounds to fp8 and bfloat16 as Triton does.

    The interpreter's own loses the carry when fp8 is rounded up to a power of two (7.6 becomes 4), and cuts bfloat16.
    """

    def converted(numbers, kind, to, rounding):
        if rounding not in (None, ir.ROUNDING_MODE.RTNE) or to.name not in (*FP8_FORMATS, "bf16"):
            return convert(numbers, kind, to, rounding)
        if kind.name not in ("fp16", "bf16", "fp32", "fp64"):
            return convert(numbers, kind, to, rounding)
        wide = widened(numbers, kind)
        if to.name == "bf16":
            return rounded_to_bfloat16(wide)
        codes, _ = fp8_bits(wide, FP8_FORMATS[to.name])
        return codes.astype(np.uint8)

    return converted


@contextlib.contextmanager
def interpreting():
    """Let Triton's interpreter run what @triton.jit has made."""
    made = {}
    convert = interpreter._implicit_cvt

    def interpreted(kernel):
        if kernel.fn not in made:  # a kernel's own hash visits functions that are patched here
            made[kernel.fn] = InterpretedFunction(kernel.fn)
        return made[kernel.fn]

    def converted(argument):
        if isinstance(argument, bool):  # which Triton's interpreter would hold in 32 bits, and refuse
            return tl.tensor(TensorHandle(np.array([argument]), tl.int1), tl.int1)
        return convert(argument)

    operations = {
        "create_dot": with_bfloat16(InterpreterBuilder.create_dot),
        "binary_op": with_bfloat16_arithmetic(InterpreterBuilder.binary_op, 2),
        "unary_op": with_bfloat16_arithmetic(InterpreterBuilder.unary_op, 1),
        "ternary_op": with_bfloat16_arithmetic(InterpreterBuilder.ternary_op, 3),
    }
    with (
        mock.patch.object(JITFunction, "__call__", lambda kernel, *args, **given: interpreted(kernel)(*args, **given)),
        mock.patch.multiple(InterpreterBuilder, **operations),
        mock.patch.object(interpreter, "_implicit_cvt", converted),
        mock.patch.object(interpreter, "_convert_float", rounding_to_nearest(interpreter._convert_float)),
        mock.patch.object(knobs.runtime, "interpret", True),
        np.errstate(all="ignore"),
    ):
        yield interpreted


def element_of(tensor, number):
    """Return the index of an element in words: [3, 17]."""
    return str([int(i) for i in np.unravel_index(number, tuple(tensor.shape) or (1,))])


def largest_difference(tensor, other):
    """Return the largest difference relative to the largest number, and the element's number; None if there is none."""
    differs = ~same(tensor, other).flatten()
    if not differs.any():
        return None
    a = tensor.double().flatten()
    b = other.double().flatten()
    distance = (a - b).abs()
    distance[differs & distance.isnan()] = float("inf")
    distance[~differs] = 0
    number = int(distance.argmax())
    scale = torch.cat([a[a.isfinite()], b[b.isfinite()]]).abs().max() if a.isfinite().any() else torch.tensor(1.0)
    return float(distance[number] / scale) if scale > 0 else float("inf"), number


def rounding_of(dtype):
    if not dtype.is_floating_point:
        return 0.0
    return ROUNDING.get(dtype, FP8_ROUNDING)


class SecondRun:
    """Interpret one launch in a process of its own, while this one executes it."""

    def __init__(self, target, compiled, grid, values, tensors):
        """Start it. tensors: {name: tensor} of the launch's arguments."""
        self.tensors = tensors
        self.results, theirs = multiprocessing.Pipe()
        self.process = os.fork()
        if self.process:
            theirs.close()
            return
        status = 1
        try:
            self.results.close()
            torch.set_num_threads(1)  # a forked process has no threads but this one
            with torch._C.DisableTorchFunction():
                found = self.answer(theirs, target, compiled, grid, values)
            theirs.send(dataclasses.asdict(found))  # not the object: its class may be hidden from the user's modules
            status = 0
        except (KeyboardInterrupt, EOFError, BrokenPipeError):
            pass  # the first process has ended, or ends
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)

    def answer(self, pipe, target, compiled, grid, values):
        """Return the Comparison, in the second process."""
        names = compiled.src.fn.arg_names
        before = {name: tensor.clone() for name, tensor in self.tensors.items()}
        reason = ""
        try:
            with interpreting() as interpreted:
                kernel = interpreted(compiled.src.fn)
                kernel.run(grid=grid, warmup=False, **dict(zip(names, values, strict=True)))
        except Exception as error:  # whatever that interpreter, or the kernel's Python code, raises
            reason = f"Triton's interpreter fails: {' '.join(str(error).split())[:200]}"
        theirs = pipe.recv()
        if reason:
            return Comparison(reason)
        found = Comparison()
        for name, tensor in self.tensors.items():
            other = torch.frombuffer(theirs[name], dtype=torch.uint8).view(tensor.dtype).view(tensor.shape)
            difference = largest_difference(other, tensor)
            if difference is None or difference[0] <= found.difference:
                continue
            number = difference[1]
            first = other.flatten()[number].item()
            second = tensor.flatten()[number].item()
            found.difference = difference[0]
            found.explained = difference[0] <= rounding_of(tensor.dtype)
            found.where = f"{name}{element_of(tensor, number)}: {first:.6g} on {target}, {second:.6g} interpreted"
            address = tensor.data_ptr() + tensor.element_size() * sum(
                int(i) * stride
                for i, stride in zip(np.unravel_index(number, tuple(tensor.shape)), tensor.stride(), strict=True)
            )
        if found.explained:
            return found
        for name, tensor in self.tensors.items():
            tensor.copy_(before[name])
        with contextlib.suppress(Fault):
            launch = execute_launch(target, compiled, grid, values, extent_of=storage_extent, watched=address)
            programs = sorted(set(launch.totals.writers))
            found.where += f", stored by program {', '.join(map(str, programs[:3]))}" if programs else ", never stored"
        return found

    def compare(self):
        """Send what this process has computed in the meantime, and return the second one's Comparison."""
        results = {
            name: bytearray(tensor.flatten().view(torch.uint8).numpy().tobytes())
            for name, tensor in self.tensors.items()
        }
        try:
            self.results.send(results)
            return Comparison(**self.results.recv())
        except (EOFError, BrokenPipeError):
            return Comparison("the second process ended")

    def end(self):
        """End the second process, whatever it does: a kernel may never end there, too."""
        self.results.close()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process, signal.SIGKILL)
        os.waitpid(self.process, 0)
