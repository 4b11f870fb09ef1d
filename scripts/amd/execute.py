"""Execute a kernel: translate its instructions, then run the waves of each workgroup from barrier to barrier."""

import dataclasses
import re
from collections import Counter

import numpy as np

from . import atomics, matrix, memory, scalar, vector
from .assembly import Fault, UnsupportedError
from .machine import LDS, TTMP, Memory, Wave
from .tables import NO_EFFECT

# First letters of a name -> kind of instruction, in the order in which they are tried.
KINDS = {
    r"v_(mfma|wmma)": "matrix",
    r"v_s_": "scalar",
    r"v_": "vector",
    r"s_load": "memory",
    r"s_": "scalar",
    r"ds_": "LDS",
    r"(buffer|global|flat|scratch)_": "memory",
}


def kind_of(instruction):
    """Return the kind of an instruction for counts; "no effect" for waits and their like."""
    if instruction.name in NO_EFFECT:
        return "no effect"
    return next(kind for start, kind in KINDS.items() if re.match(start, instruction.name))


@dataclasses.dataclass
class Totals:
    """Count what a launch did: instructions of all waves by kind, cycles of matrix units, bytes that lanes moved."""

    instructions: Counter = dataclasses.field(default_factory=Counter)
    matrix_cycles: int = 0  # of all SIMDs
    loaded: int = 0
    stored: int = 0
    workgroups: int = 0
    banks: dict = dataclasses.field(default_factory=dict)  # as in banks.BankCounts.cycles
    lines: dict = dataclasses.field(default_factory=dict)  # as in lines.LineCounts.lines
    writers: list = dataclasses.field(default_factory=list)  # workgroups that stored to the watched address


def located(instruction, kernel, translate):
    """Return a translation, or raise Fault with the instruction that it is of."""
    try:
        return translate(instruction, kernel)
    except (Fault, ValueError, KeyError, TypeError) as error:
        raise Fault(f"{instruction}: {error}") from None


def translate_vector(instruction, kernel):
    module = matrix if kind_of(instruction) == "matrix" else vector
    return module.translate(instruction, kernel)


def translate(pair, kernel):
    """Return a function of a wave for one instruction, or for two that execute at once."""
    if len(pair) == 1:
        (instruction,) = pair
        if instruction.name == "v_nop":
            return lambda wave: None
        if instruction.name.startswith(("s_", "v_s_")):
            return located(instruction, kernel, scalar.translate)
        if not instruction.name.startswith("v_"):
            module = atomics if atomics.is_atomic(instruction.name) else memory
            return located(instruction, kernel, module.translate)
        compute, put = located(instruction, kernel, translate_vector)
        return lambda wave: put(wave, compute(wave))
    (compute1, put1), (compute2, put2) = (located(half, kernel, translate_vector) for half in pair)

    def dual(wave):
        first = np.array(compute1(wave))  # a copy: it may be a view of the register that put2 changes
        second = np.array(compute2(wave))
        put1(wave, first)
        put2(wave, second)

    return dual


class Program:
    """Hold a kernel whose instructions are translated."""

    def __init__(self, kernel, limit=10**7):
        """Translate a kernel; an instruction that a launch executes more often than `limit` is in an endless loop."""
        self.kernel = kernel
        self.limit = limit
        self.most = limit  # of the launch that runs
        self.steps = []
        if "hidden_hostcall_buffer" in [kind for _, _, kind in kernel.arguments]:
            raise UnsupportedError(
                f"{kernel.target} {kernel.name}: calls of the host are not modelled: remove tl.device_print, and "
                "tl.device_assert if it is switched on"
            )
        unknown = {}  # names -> fault of the first instruction that has them
        for pair in kernel.code:
            try:
                self.steps.append(translate(pair, kernel))
            except Fault as fault:
                unknown.setdefault(tuple(half.name for half in pair), str(fault))
        if unknown:
            raise UnsupportedError(f"{kernel.target} {kernel.name}: {'; '.join(unknown.values())}")

    def arguments(self, given, grid, warps, dynamic_lds):
        """Return the bytes of a launch's arguments: those given, in order, and the hidden ones."""
        memory = np.zeros(self.kernel.kernarg_size + 64, np.uint8)  # a load may be wider than what is read of it
        hidden = {f"hidden_block_count_{axis}": count for axis, count in zip("xyz", grid, strict=True)}
        hidden |= {"hidden_group_size_x": warps * self.kernel.width, "hidden_group_size_y": 1, "hidden_group_size_z": 1}
        hidden |= {"hidden_grid_dims": 3, "hidden_dynamic_lds_size": dynamic_lds}
        visible = iter(given)
        for offset, size, kind in self.kernel.arguments:
            if kind.startswith("hidden_"):
                data = hidden.get(kind, 0).to_bytes(size, "little")
            else:
                data = next(visible, bytes(size))  # Triton adds two addresses of scratch memory, which nobody uses
            if len(data) != size:
                raise Fault(f"an argument has {len(data)} bytes, the kernel expects {size}")
            memory[offset : offset + size] = np.frombuffer(data, np.uint8)
        return memory

    def start(self, wave, workgroup, address, noise):
        """Set the registers that the hardware sets before the first instruction."""
        wave.start(noise)
        kernel = self.kernel
        wave.set_scalar(kernel.kernarg_sgpr, address, 2)
        if kernel.target.startswith("gfx12"):
            wave.s[TTMP + 9] = workgroup[0]
            wave.s[TTMP + 7] = workgroup[1] | workgroup[2] << 16
            wave.s[TTMP + 8] = wave.s.item(TTMP + 8) & ~(31 << 25) | wave.number << 25
        else:
            at = kernel.user_sgprs
            for enabled, number in zip(kernel.workgroup_ids, workgroup, strict=True):
                if enabled:
                    wave.s[at] = number
                    at += 1
            if kernel.scratch_buffer:  # spilled registers on gfx90a
                wave.set_scalar(0, memory.SCRATCH_BUFFER, 4)
                wave.s[at] = 0  # where the wave's part begins
        if kernel.vgprs:
            wave.v[0] = wave.number * wave.width + np.arange(wave.width)

    def run(self, wave, counts):
        """Execute a wave until it waits for others or ends."""
        steps = self.steps
        while True:
            pc = wave.pc
            wave.pc = pc + 1
            counts[pc] += 1
            if counts[pc] > self.most:
                raise Fault(f"{self.kernel.target} {self.kernel.name}: a loop does not end: {self.kernel.code[pc][0]}")
            try:
                paused = steps[pc](wave)
            except Fault as fault:
                text = " :: ".join(map(str, self.kernel.code[pc]))
                raise type(fault)(f"{self.kernel.target} {self.kernel.name}: {text}: {fault}") from None
            if paused:
                return

    def end_of_interval(self, lds, barrier):
        try:
            lds.end_of_interval(barrier)
        except Fault as fault:
            raise Fault(f"{self.kernel.target} {self.kernel.name}: {fault}") from None

    def run_workgroup(self, waves, lds, order, counts, after_wave=None):
        """Run all waves of a workgroup, in the order 1 (first wave first) or -1, from barrier to barrier.

        after_wave: called whenever a wave has reached a barrier or its end.
        """
        barrier = 0
        while True:
            for wave in waves[::order]:
                self.run(wave, counts)
                if after_wave:
                    after_wave()
            self.end_of_interval(lds, barrier)
            if len({wave.ended for wave in waves}) > 1:
                raise Fault(f"{self.kernel.target} {self.kernel.name}: some waves ended, others wait at a barrier")
            if waves[0].ended:
                return
            barrier += 1
            for wave in waves:
                wave.barriers_passed = barrier
                if wave.barriers_reached != barrier:
                    raise Fault(f"{self.kernel.target} {self.kernel.name}: waves wait at different barriers")

    def launch(self, grid, given, ranges, warps, dynamic_lds, order, seed, progress=None, limit=None, watched=None):
        """Run every workgroup of a grid (x, y, z), and return the Totals.

        given: the bytes of each argument. ranges: (first address, end) of what the kernel may touch.
        progress(workgroups that are done, all workgroups, instructions): called now and then, unless it is None. limit:
        of instructions of all waves, after which the launch ends with a Fault. watched: an address; Totals.writers gets
        the workgroups that store there.
        """
        self.most = min(self.limit, limit or self.limit)
        noise = np.random.default_rng(seed)
        arguments = self.arguments(given, grid, warps, dynamic_lds)
        address = arguments.ctypes.data
        memory = Memory([*ranges, (address, address + len(arguments))], self.kernel.target, watched)
        lds = LDS(self.kernel.lds + dynamic_lds, warps, self.kernel.target)
        waves = [Wave(self.kernel, number, lds, memory) for number in range(warps)]
        counts = [0 for _ in self.steps]
        workgroups = [(x, y, z) for z in range(grid[2]) for y in range(grid[1]) for x in range(grid[0])]

        def after_wave():
            executed = sum(counts)
            if limit and executed > limit:
                raise Fault(f"{self.kernel.target} {self.kernel.name}: more than {limit:,} instructions")
            if progress:
                progress(done, len(workgroups), executed)

        with np.errstate(all="ignore"):
            for done, workgroup in enumerate(workgroups):  # noqa: B007 (after_wave reads it)
                lds.start(noise)
                memory.workgroup = workgroup
                for wave in waves:
                    self.start(wave, workgroup, address, noise)
                self.run_workgroup(waves, lds, order, counts, after_wave if limit or progress else None)
        totals = Totals(
            loaded=memory.loaded,
            stored=memory.stored,
            workgroups=len(workgroups),
            banks=lds.banks.cycles,
            lines=memory.lines.lines,
            writers=memory.writers,
        )
        for pair, count in zip(self.kernel.code, counts, strict=True):
            for instruction in pair:
                kind = kind_of(instruction)
                totals.instructions[kind] += count
                if kind == "matrix":
                    totals.matrix_cycles += count * matrix.cycles_of(instruction, self.kernel)
        return totals
