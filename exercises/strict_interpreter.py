"""Make Triton's interpreter as strict as a GPU can be, where it forgives what a GPU would not."""

import contextlib
import math
from unittest import mock

import numpy as np
from triton.runtime.interpreter import InterpreterBuilder, ReduceOps, TensorHandle

from common.measuring.guarded_memory import BAND, bits, launches

FLOATS = {"fp16": np.float16, "fp32": np.float32, "fp64": np.float64}  # Triton's names
LANES = 1 << 20  # more than the elements of a tile


def without_other(load):
    """Return an interpreter's masked load that reads NaN where the mask is False and the answer names no other.

    What a GPU returns there is undefined; the interpreter returns zero. Of one element it does not tell: there Triton
    drops an other of zero on the way to the interpreter.
    """

    def masked_load(builder, pointers, mask, other, *rest):
        kind = pointers.get_element_ty()
        if other is None and kind.name in FLOATS and pointers.data.size > 1:
            other = TensorHandle(np.full(pointers.data.shape, math.nan, FLOATS[kind.name]), kind)
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


class Watched:
    """Hold where a tensor lies, whether kernels loaded it, and, of an output, who stored each element: 0 is nobody."""

    def __init__(self, name, tensor, is_output):
        self.name, self.size, self.is_output = name, tensor.element_size(), is_output
        self.start = tensor.data_ptr()
        self.end = self.start + tensor.nbytes
        self.loaded = False
        if is_output:
            self.bits = bits(tensor).view(-1).numpy()
            self.writers = np.zeros(len(self.bits), np.int64)


class Watch(contextlib.ExitStack):
    """Watch the loads and stores of kernels in the interpreter inside a `with`.

    inputs, outputs: name -> tensor between guard bands.
    fault: None, or the first (kind, name of the tensor, element of it or None, sentence).
    """

    def __init__(self, inputs, outputs):
        super().__init__()
        self.tensors = [Watched(name, tensor, False) for name, tensor in inputs.items()]
        self.tensors += [Watched(name, tensor, True) for name, tensor in outputs.items()]
        self.grid, self.fault = (1, 1, 1), None

    def start_launch(self, name):
        for tensor in self.tensors:
            if tensor.is_output:
                tensor.writers.fill(0)

    def not_loaded(self):
        return [tensor.name for tensor in self.tensors if not tensor.is_output and not tensor.loaded]

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

    def check_load(self, builder, addresses):
        if self.fault or not addresses.size:
            return
        tensor = self.find(addresses)
        if tensor is None:
            self.check_bands(builder, addresses)
            return
        tensor.loaded = True
        if tensor.is_output:
            places = (addresses - tensor.start) // tensor.size
            writers, program = tensor.writers[places] - 1, self.program(builder)
            foreign = ((writers >= 0) & (writers // LANES != program)).nonzero()[0]
            if foreign.size:
                other = self.name_program(writers[foreign[0]] // LANES)
                found = f"{self.name_program(program)} loads what {other} stored in the same launch"
                said = f"{found}; on a GPU that one may not have run yet: leave it to a second kernel"
                self.fault = "race", tensor.name, int(places[foreign[0]]), said

    def check_bands(self, builder, addresses):
        for tensor in self.tensors:
            band = BAND * tensor.size
            past = addresses[(addresses >= tensor.end) & (addresses < tensor.end + band)]
            before = addresses[(addresses < tensor.start) & (addresses >= tensor.start - band)]
            if past.size:
                distance = f"{(past.min() - tensor.end) // tensor.size + 1} past the end"
            elif before.size:
                distance = f"{(tensor.start - before.max()) // tensor.size} before the start"
            else:
                continue
            program = self.name_program(self.program(builder))
            said = f"{program} loads elements outside the tensor, the nearest {distance}: mask the load"
            self.fault = "stray load", tensor.name, None, said
            return

    def checked_load(self, load):
        def masked_load(builder, pointers, mask, *rest):
            self.check_load(builder, pointers.data[mask.data.astype(bool)].astype(np.int64))
            return load(builder, pointers, mask, *rest)

        return masked_load

    def checked_store(self, store):
        def masked_store(builder, pointers, value, mask, *rest):
            lanes = np.flatnonzero(mask.data)
            addresses = pointers.data.reshape(-1)[lanes].astype(np.int64)
            output = self.find(addresses) if lanes.size and not self.fault else None
            if output is None or not output.is_output:
                return store(builder, pointers, value, mask, *rest)
            places = (addresses - output.start) // output.size
            wanted = value.data.reshape(-1)[lanes].view(output.bits.dtype)
            mine = self.program(builder) * LANES + lanes + 1
            before, writers = output.bits[places], output.writers[places]
            result = store(builder, pointers, value, mask, *rest)
            lost = output.bits[places] != wanted
            replaced = (writers > 0) & (writers != mine) & (before != wanted)
            twice = (lost | replaced).nonzero()[0]
            if twice.size:
                first = twice[0]
                programs = {self.name_program((n - 1) // LANES) for n in (writers[first] or mine[first], mine[first])}
                said = f"{' and '.join(sorted(programs))} stored it twice, with different values"
                said += "; on a GPU either value can win: mask the store"
                self.fault = "race", output.name, int(places[first]), said
            output.writers[places] = mine
            return result

        return masked_store

    def __enter__(self):
        load = without_other(InterpreterBuilder.create_masked_load)
        store = InterpreterBuilder.create_masked_store
        replaced = {"create_masked_load": self.checked_load(load), "create_masked_store": self.checked_store(store)}
        self.enter_context(launches(self.start_launch))
        self.enter_context(mock.patch.multiple(InterpreterBuilder, **replaced))
        self.enter_context(mock.patch.object(ReduceOps, "sum", in_float16(ReduceOps.sum)))
        return self
