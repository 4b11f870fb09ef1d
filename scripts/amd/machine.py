"""Hold what instructions read and write: a wave's registers, a workgroup's LDS, and the tensors in memory.

Registers, LDS and scratch memory start as noise. Every access is checked: a register must be allocated, an address in
memory must lie inside a tensor, and between two barriers no two waves may touch one byte of the LDS if one of them
changes it.
"""

import functools

import numpy as np

from .assembly import Fault
from .banks import BankCounts
from .lines import LineCounts

DTYPES = {
    "u32": np.uint32, "i32": np.int32, "f32": np.float32,
    "u64": np.uint64, "i64": np.int64, "f64": np.float64,
    "u16": np.uint16, "i16": np.int16, "f16": np.float16,
}  # fmt: skip
# Where a scalar register has a name instead of a number. The numbers of VCC and EXEC are those of the encodings.
VCC, TTMP, M0, EXEC = 106, 108, 124, 126
SCALARS = {"vcc": VCC, "vcc_lo": VCC, "vcc_hi": VCC + 1, "m0": M0, "exec": EXEC, "exec_lo": EXEC, "exec_hi": EXEC + 1}
SCALARS |= {f"ttmp{i}": TTMP + i for i in range(16)}
FIRST_ADDRESS = 1 << 16  # NumPy accepts no array at address 0
TOUCHED = {np.uint8: 1, np.uint32: 0x01010101}  # the mark of a byte, and of the four of a word


class AllMemory:
    """Stand for the memory of this process as one array of bytes, whose index is the address - FIRST_ADDRESS."""

    __array_interface__ = {
        "data": (FIRST_ADDRESS, False),
        "typestr": "|u1",
        "shape": ((1 << 47) - FIRST_ADDRESS,),
        "version": 3,
    }


def places(address, size):
    """Return the indices of `size` bytes per address, and what they count: words, or bytes if one is not aligned."""
    if size % 4 == 0 and not (address & 3).any():
        return (address[:, None] >> 2) + np.arange(size // 4), np.uint32
    return address[:, None] + np.arange(size), np.uint8


class Memory:
    """Read and write the memory of this process at addresses that lie inside one of these ranges of bytes.

    Note in `writers` the workgroups that store to a watched address.
    """

    def __init__(self, ranges, target, watched=None):
        self.lines = LineCounts(target)
        self.watched = watched
        self.writers = []
        merged = []
        for first, end in sorted(ranges):
            if merged and first < merged[-1][1]:  # views of one tensor
                merged[-1][1] = max(merged[-1][1], end)
            else:
                merged.append([first, end])
        self.first = np.array([first for first, _ in merged], np.int64)
        self.end = np.array([end for _, end in merged], np.int64)
        self.bytes = np.asarray(AllMemory())
        self.loaded = self.stored = 0  # bytes so far

    def places(self, address, size, word):
        i = np.searchsorted(self.first, address, "right") - 1
        outside = (i < 0) | (address > self.end[i] - size)
        if outside.any():
            raise Fault(f"a {word} outside every tensor in {outside.sum()} lanes, first at {address[outside][0]:#x}")
        return places(address - FIRST_ADDRESS, size)

    def count_lines(self, instruction, address, size):
        """Count the cache lines of an access. A range begins with a line, as PyTorch's allocations on a GPU do."""
        i = np.searchsorted(self.first, address, "right") - 1
        self.lines.add(instruction, address - self.first[i] + (i << 48), size)  # ranges share no line

    def load(self, address, size):
        """Return what lies at each address, as words or bytes [lane, number]."""
        at, dtype = self.places(address, size, "load")
        self.loaded += size * len(address)
        return self.bytes.view(dtype)[at]

    def store(self, address, data):
        """Store words or bytes [lane, number] at each address."""
        size = data.shape[1] * data.itemsize
        at, dtype = self.places(address, size, "store")
        if self.watched is not None and ((address <= self.watched) & (self.watched < address + size)).any():
            self.writers.append(self.workgroup)
        self.stored += size * len(address)
        self.bytes.view(dtype)[at] = data.view(dtype)


def check_order(first_word, first, second_word, second, touched):
    """Raise Fault if a byte was touched in these two ways, by more than one wave. All are booleans [wave, byte]."""
    unordered = first.any(0) & second.any(0) & (touched.sum(0) > 1)
    if unordered.any():
        byte = int(unordered.argmax())
        waves = [np.nonzero(way[:, byte])[0] for way in (first, second)]
        who = f"{first_word} by waves {waves[0]}, {second_word} by waves {waves[1]}"
        raise Fault(f"a race: {unordered.sum()} bytes of LDS, first {byte}, {who} without a barrier in between")


class LDS:
    """The local memory of a workgroup, and who touched which byte of it since the last barrier.

    Two waves may store the same value to a byte: Triton's layouts hold some elements in several waves. Between arriving
    at a barrier and waiting for it, which are two instructions on RDNA4, an access is unordered with those before the
    barrier and those after it: it counts for both. Atomic updates are ordered among each other, but not with other
    accesses.
    """

    def __init__(self, size, waves, target):
        self.size = size
        self.banks = BankCounts(target)
        self.bytes = np.empty(size + -size % 4, np.uint8)
        self.waves = waves
        # number of a barrier -> whether a wave [wave, byte] loaded from it, and stored to it, before; and updated it
        self.touched = {}
        self.updated = {}

    def start(self, noise):
        self.bytes[:] = np.frombuffer(noise.bytes(len(self.bytes)), np.uint8)
        self.touched.clear()
        self.updated.clear()

    def places(self, address, size):
        if len(address) and address.max() + size > self.size:
            raise Fault(f"an access outside the {self.size} bytes of LDS, at {address.max()}")
        return places(address, size)

    def intervals(self, wave, dtype):
        """Yield the loads and the stores of each interval between barriers that the wave is in."""
        for barrier in range(wave.barriers_passed, wave.barriers_reached + 1):
            if barrier not in self.touched:
                self.touched[barrier] = np.zeros((2, self.waves, len(self.bytes)), np.uint8)
            yield self.touched[barrier].view(dtype)

    def load(self, wave, address, size):
        """Return what lies at each address, as words or bytes [lane, number]."""
        at, dtype = self.places(address, size)
        for loads, _ in self.intervals(wave, dtype):
            loads[wave.number, at] = TOUCHED[dtype]
        return self.bytes.view(dtype)[at]

    def store(self, wave, address, data):
        """Store words or bytes [lane, number] at each address."""
        at, dtype = self.places(address, data.shape[1] * data.itemsize)
        memory = self.bytes.view(dtype)
        before = memory[at]
        memory[at] = data.view(dtype)  # of lanes with the same address the last one wins
        changed = at[before != memory[at]]
        for _, stores in self.intervals(wave, dtype):
            if len(changed) and np.delete(stores[:, changed], wave.number, 0).any():
                raise Fault("a race: two waves store different values to one byte of LDS without a barrier in between")
            stores[wave.number, at] = TOUCHED[dtype]

    def read(self, address, size):
        """Return what lies at each address, as words or bytes [lane, number], for an update that is marked."""
        at, dtype = self.places(address, size)
        return self.bytes.view(dtype)[at]

    def write(self, address, data):
        """Store the result of an update that is marked."""
        at, dtype = self.places(address, data.shape[1] * data.itemsize)
        self.bytes.view(dtype)[at] = data.view(dtype)

    def mark_update(self, wave, address, size):
        """Note an atomic update of the bytes at each address."""
        at, dtype = self.places(address, size)
        for barrier in range(wave.barriers_passed, wave.barriers_reached + 1):
            if barrier not in self.updated:
                self.updated[barrier] = np.zeros((self.waves, len(self.bytes)), np.uint8)
            self.updated[barrier].view(dtype)[wave.number, at] = TOUCHED[dtype]

    def end_of_interval(self, barrier):
        """Raise Fault if a wave stored to a byte that another one loaded, since the barrier before this one.

        The same holds for a byte that one wave updated and another one loaded or stored.
        """
        touched = self.touched.pop(barrier, None)
        updates = self.updated.pop(barrier, None)
        if touched is None:
            return
        loads, stores = touched
        plain = loads | stores
        check_order("stored", stores, "loaded", loads, plain)
        if updates is not None:
            check_order("updated", updates, "loaded or stored", plain, plain | updates)


@functools.lru_cache(1 << 16)
def lanes_of(mask, width):
    """Return the bits of a mask as booleans [width]."""
    lanes = np.unpackbits(np.frombuffer(mask.to_bytes(8, "little"), np.uint8), bitorder="little")[:width].astype(bool)
    lanes.flags.writeable = False
    return lanes


@functools.lru_cache(1 << 16)
def numbers_of(mask, width):
    """Return the numbers of the lanes in a mask, as an index: a slice of all, or an array."""
    return slice(None) if mask == (1 << width) - 1 else np.nonzero(lanes_of(mask, width))[0]


def mask_of(lanes):
    """Return booleans as the bits of a mask."""
    return int.from_bytes(np.packbits(lanes, bitorder="little").tobytes(), "little")


class Wave:
    """The state of one wave: scalar registers, vector registers [register, lane], EXEC, SCC and where it is.

    Accumulation registers (AGPRs) follow the vector registers in the same array.
    """

    def __init__(self, kernel, number, lds, memory):
        self.width = kernel.width
        self.starts_flushing = kernel.flushes
        self.words = kernel.width // 32  # scalar registers that a mask of lanes takes
        self.number = number
        self.lds = lds
        self.memory = memory
        self.s = np.empty(128, np.uint32)
        self.v = np.empty((kernel.vgprs + kernel.agprs, self.width), np.uint32)
        self.scratch = np.empty((self.width, kernel.scratch), np.uint8)
        self.whole = (1 << self.width) - 1
        # Typed views of each register: to make them anew for each instruction would take most of the time.
        self.vector = {kind: list(self.v.view(DTYPES[kind])) for kind in ("u32", "i32", "f32")}
        self.scalar = {kind: [self.s[i : i + 1].view(DTYPES[kind]) for i in range(128)] for kind in self.vector}

    def start(self, noise):
        """Fill the registers with noise and go to the first instruction."""
        for array in (self.s, self.v, self.scratch):
            array.view(np.uint8).reshape(-1)[:] = np.frombuffer(noise.bytes(array.nbytes), np.uint8)
        self.pc = 0
        self.flushes = self.starts_flushing  # denormal float32
        self.limits = False  # float16 and fp8 that overflow become the largest number (FP16_OVFL)
        self.scc = int(noise.integers(2))
        self.barriers_reached = self.barriers_passed = 0
        self.ended = False
        self.set_exec(self.whole)

    def set_exec(self, mask):
        self.exec = mask
        self.s[EXEC] = mask & 0xFFFFFFFF
        self.s[EXEC + 1] = mask >> 32
        self.active = lanes_of(mask, self.width)
        self.lanes = numbers_of(mask, self.width)

    def get_scalar(self, i, words=1):
        """Return scalar registers from i on as one number."""
        if words == 1:
            return self.s.item(i)
        return int.from_bytes(self.s[i : i + words].tobytes(), "little")

    def set_scalar(self, i, value, words=1):
        for k in range(words):
            self.s[i + k] = value >> 32 * k & 0xFFFFFFFF
        if i + words > EXEC:
            self.set_exec(self.get_scalar(EXEC, self.words))

    def get_lanes(self, i):
        """Return a mask of lanes in scalar registers as booleans."""
        return lanes_of(self.get_scalar(i, self.words), self.width)

    def set_lanes(self, i, lanes):
        """Store booleans as a mask of lanes; it is zero where a lane is not active."""
        self.set_scalar(i, mask_of(lanes & self.active), self.words)

    def put(self, kind, i, value, where=None):
        """Store one 32-bit value per lane in vector register i, in the active lanes or those of `where`."""
        row = self.vector[kind][i]
        if where is None and self.exec == self.whole:
            row[:] = value
        else:
            np.copyto(row, value, where=self.active if where is None else where)
