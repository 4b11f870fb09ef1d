"""Translate instructions that load and store: LDS, buffer, global, flat and scratch.

Each active lane has an address. Memory is read in the order of the instructions: waits and caches are not modelled.
"""

import re

import numpy as np

from .assembly import Fault, UnsupportedError
from .operands import scalar_reader, scalar_register, vector_register
from .tables import NO_EFFECT

# Bytes of what a name moves. A load of 8 or 16 bits is extended with zeros, or with its sign.
SIZES = {
    "dword": 4, "dwordx2": 8, "dwordx3": 12, "dwordx4": 16, "b32": 4, "b64": 8, "b96": 12, "b128": 16,
    "ubyte": 1, "byte": 1, "u8": 1, "b8": 1, "ushort": 2, "short": 2, "u16": 2, "b16": 2,
    "sbyte": 1, "i8": 1, "sshort": 2, "i16": 2,
}  # fmt: skip
SIGNED = {"sbyte", "i8", "sshort", "i16"}
CACHE_HINTS = {"glc", "slc", "dlc", "sc0", "sc1", "nt", "th", "scope"}
# A buffer whose addresses include the lane's number (ADD_TID_ENABLE and swizzling): each lane has memory of its own.
SCRATCH_BUFFER = 1 << 40 | 1 << 63 | 0xFFFFFFFF << 64 | 1 << 119
LDS_NAME = re.compile(r"ds_(read|write|load|store)(2|_2addr)?(st64|_stride64)?_(\w+?)(_d16|_d16_hi)?$")
GLOBAL_NAME = re.compile(r"(buffer|global|flat|scratch)_(load|store)_(?:(d16_hi|d16)_)?(\w+?)(?:_(d16_hi|d16))?$")


def size_of(name):
    if name not in SIZES:
        raise Fault("unknown size")
    return SIZES[name]


def load_lanes(wave, data, lanes, first, signed, half):
    """Store words or bytes [lane, number] in these lanes of registers from `first` on; half: "d16", "d16_hi" or ""."""
    size = data.shape[1] * data.itemsize
    if size >= 4:
        data = np.ascontiguousarray(data).view(np.uint32)
        wave.v[first : first + size // 4, lanes] = data.T
        return
    value = np.ascontiguousarray(data).view(f"{'i' if signed else 'u'}{size}")[:, 0].astype(np.int64).astype(np.uint32)
    row = wave.v[first]
    if half == "d16":
        value = row[lanes] & np.uint32(0xFFFF0000) | value & np.uint32(0xFFFF)
    elif half == "d16_hi":
        value = row[lanes] & np.uint32(0xFFFF) | value << np.uint32(16)
    row[lanes] = value


def stored_lanes(wave, size, lanes, first, half):
    """Return words or bytes [lane, number] of these lanes of registers from `first` on."""
    if size >= 4:
        return np.ascontiguousarray(wave.v[first : first + size // 4, lanes].T)
    value = wave.v[first, lanes]
    if half == "d16_hi":
        value = value >> np.uint32(16)
    return np.ascontiguousarray(value[:, None].view(np.uint8)[:, :size])


# ---------------------------------------------------------------- LDS (DS)


def lds_addresses(base, offset):
    """Return base + offset, which wraps around at 32 bits: the compiler's base may be negative."""
    return (base + np.uint32(offset)).astype(np.int64)


def lds_access(instruction, kernel, load, pair, stride, kind, half):
    """Translate a load from or a store to the LDS; pair: two at two offsets."""
    size = size_of(kind)
    signed = kind in SIGNED
    modifiers = instruction.modifiers
    operands = instruction.operands
    address = vector_register(operands[1 if load else 0], kernel)
    data = vector_register(operands[0 if load else 1], kernel)
    if pair:
        unit = size * (64 if stride else 1)
        offsets = [int(modifiers.get(name, "0"), 0) * unit for name in ("offset0", "offset1")]
        registers = [data, data + size // 4] if load else [data, vector_register(operands[2], kernel)]
        unknown = set(modifiers) - {"offset0", "offset1"}
    else:
        offsets = [int(modifiers.get("offset", "0"), 0)]
        registers = [data]
        unknown = set(modifiers) - {"offset"}
    if unknown:
        raise Fault(f"unknown modifier {', '.join(unknown)}")
    counted = (instruction.place, instruction.text)

    def run(wave):
        lanes = wave.lanes
        base = wave.v[address, lanes]
        found = []
        for offset, first in zip(offsets, registers, strict=True):
            at = lds_addresses(base, offset)
            wave.lds.banks.add(counted, wave, at, size, load)
            if load:
                found.append(wave.lds.load(wave, at, size))
            else:
                wave.lds.store(wave, at, stored_lanes(wave, size, lanes, first, half))
        for data, first in zip(found, registers, strict=False):  # the address may lie in one of these registers
            load_lanes(wave, data, lanes, first, signed, half)

    return run


def swizzled_lanes(pattern, width):
    """Return the lane that each lane reads with ds_swizzle."""
    lane = np.arange(width)
    found = re.fullmatch(r"swizzle\((\w+),\s*(.*)\)", pattern)
    kind, values = (found[1], found[2].split(",")) if found else ("", [])
    if kind == "SWAP":
        return lane ^ int(values[0])
    if kind == "REVERSE":
        return lane ^ (int(values[0]) - 1)
    if kind == "BROADCAST":
        return lane // int(values[0]) * int(values[0]) + int(values[1])
    if kind == "QUAD_PERM":
        return lane // 4 * 4 + np.array([int(x) for x in values])[lane % 4]
    raise Fault(f"unknown swizzle {pattern}")


def exchange(instruction, kernel):
    """Translate ds_bpermute, ds_permute and ds_swizzle: lanes exchange registers, and no LDS is used."""
    name = instruction.name
    modifiers = instruction.modifiers
    destination, first, *rest = (vector_register(text, kernel) for text in instruction.operands)
    if name == "ds_swizzle_b32":
        lanes = swizzled_lanes(modifiers["offset"], kernel.width)

        def swizzle(wave):
            wave.put("u32", destination, np.where(wave.active[lanes], wave.v[first][lanes], np.uint32(0)))

        return swizzle
    offset = int(modifiers.get("offset", "0"), 0)
    (data,) = rest

    def permute(wave):
        other = ((wave.v[first] + np.uint32(offset)) >> np.uint32(2)) % np.uint32(wave.width)
        if name == "ds_bpermute_b32":  # each lane reads from the lane that it names
            wave.put("u32", destination, np.where(wave.active[other], wave.v[data][other], np.uint32(0)))
        else:  # each lane sends to the lane that it names; the last one wins
            received = np.zeros(wave.width, np.uint32)
            received[other[wave.active]] = wave.v[data][wave.active]
            wave.put("u32", destination, received)

    return permute


def transposed_read(instruction, kernel):
    """Translate ds_read_b64_tr_b16 and _b8 (CDNA 4): 16 lanes read a matrix, and each gets a column of it.

    Each lane reads 8 bytes. Of the 64 halves (or 128 bytes) that 16 lanes read, as 4 (or 8) rows of 16, lane i gets
    column i.
    """
    dtype = np.uint8 if instruction.name.endswith("b8") else np.uint16
    each = 8 // np.dtype(dtype).itemsize
    destination, address = (vector_register(text, kernel) for text in instruction.operands)
    offset = int(instruction.modifiers.get("offset", "0"), 0)
    counted = (instruction.place, instruction.text)

    def run(wave):
        if wave.exec != wave.whole:
            raise Fault("a transposed read with inactive lanes")
        at = lds_addresses(wave.v[address], offset)
        wave.lds.banks.add(counted, wave, at, 8, load=True)
        data = wave.lds.load(wave, at, 8)
        rows = data.view(dtype).reshape(kernel.width // 16, each, 16)  # [group of 16 lanes, row, column]
        columns = np.ascontiguousarray(rows.transpose(0, 2, 1)).reshape(kernel.width, each)
        wave.v[destination : destination + 2] = columns.view(np.uint32).T

    return run


# ---------------------------------------------------------------- memory (MUBUF, FLAT)


def transfer(wave, counted, address, lanes, size, first, load, signed, half):
    """Move bytes between memory and registers of these lanes, which have these addresses.

    counted: the place and the text of the instruction.
    """
    if not len(address):
        return
    wave.memory.count_lines(counted, address, size)
    if load:
        load_lanes(wave, wave.memory.load(address, size), lanes, first, signed, half)
    else:
        wave.memory.store(address, stored_lanes(wave, size, lanes, first, half))


def data_and_address(instruction, load):
    """Return the operands in the order of a load: data, address, base if any. A store names its address first."""
    if load:
        return instruction.operands
    address, data, *base = instruction.operands
    return data, address, *base


def check_modifiers(modifiers, known):
    if unknown := set(modifiers) - CACHE_HINTS - known:
        raise Fault(f"unknown modifier {', '.join(sorted(unknown))}")


def buffer_places(operands, modifiers, size, kernel):
    """Return a function of a wave: the lanes inside a raw buffer, their addresses, and the lanes outside it.

    operands: of the offsets, the buffer and a scalar offset.
    """
    check_modifiers(modifiers, {"offen", "offset"})
    offsets, resource, scalar_offset = operands
    offsets = vector_register(offsets, kernel) if "offen" in modifiers else None
    resource = scalar_register(resource)
    scalar_offset = scalar_reader(scalar_offset, "u32")
    immediate = int(modifiers.get("offset", "0"), 0)

    def places(wave):
        extra = scalar_offset(wave)
        base = wave.get_scalar(resource) | (wave.get_scalar(resource + 1) & 0xFFFF) << 32
        records = wave.get_scalar(resource + 2)
        if wave.get_scalar(resource + 1) >> 16 & 0x3FFF:
            raise UnsupportedError("a buffer with a stride")
        lanes = np.arange(wave.width)[wave.lanes]
        if offsets is None:
            at = np.full(len(lanes), immediate)
        else:
            at = wave.v[offsets, lanes].astype(np.int64) + immediate
        inside = at + size <= records - extra
        if inside.all():
            return lanes, base + extra + at, lanes[:0]
        if (~inside & (at < records - extra)).any():
            raise UnsupportedError("an access that the end of its buffer cuts")
        return lanes[inside], base + extra + at[inside], lanes[~inside]

    return places


def buffer_access(instruction, kernel, load, size, signed, half):
    """Translate a raw buffer: base + offsets, where loads out of range give zero and stores do nothing."""
    modifiers = instruction.modifiers
    data, *operands = instruction.operands
    first = vector_register(data, kernel)
    places = buffer_places(operands, modifiers, size, kernel)
    scratch = scratch_places(operands, modifiers, kernel)
    resource = scalar_register(operands[1])
    counted = (instruction.place, instruction.text)

    def run(wave):
        if wave.get_scalar(resource, 4) == SCRATCH_BUFFER:
            lanes, at = scratch(wave)
            transfer_scratch(wave, kernel.scratch, at, lanes, size, first, load, signed, half)
            return
        lanes, at, outside = places(wave)
        if load and len(outside):
            load_lanes(wave, np.zeros((len(outside), size), np.uint8), outside, first, False, half)
        transfer(wave, counted, at, lanes, size, first, load, signed, half)

    return run


def scratch_places(operands, modifiers, kernel):
    """Return a function of a wave: its active lanes, and the bytes of their scratch memory that a buffer points to."""
    offsets, _, scalar_offset = operands
    offsets = vector_register(offsets, kernel) if "offen" in modifiers else None
    scalar_offset = scalar_reader(scalar_offset, "u32")
    immediate = int(modifiers.get("offset", "0"), 0)

    def places(wave):
        lanes = np.arange(wave.width)[wave.lanes]
        at = np.full(len(lanes), immediate + scalar_offset(wave))
        if offsets is not None:
            at += wave.v[offsets, lanes]
        return lanes, at

    return places


def global_places(address, base, modifiers, kernel):
    """Return a function of a wave: its active lanes, their addresses, and no lanes outside.

    An address has 64 bits, or it is an offset of 32 bits to a scalar base. base: the operand in a list, none of a flat
    address.
    """
    check_modifiers(modifiers, {"offset"})
    address = vector_register(address, kernel)
    immediate = int(modifiers.get("offset", "0"), 0)
    base = None if base in ([], ["off"]) else scalar_reader(base[0], "i64")

    def places(wave):
        lanes = np.arange(wave.width)[wave.lanes]
        at = wave.v[address, lanes].astype(np.int64) + immediate
        if base is None:
            at += wave.v[address + 1, lanes].astype(np.int64) << 32
        else:
            at += base(wave)
        return lanes, at, lanes[:0]

    return places


def global_access(instruction, kernel, load, size, signed, half):
    """Translate a load or store at an address of 64 bits, or at a scalar base and an offset of 32 bits."""
    data, address, *base = data_and_address(instruction, load)
    first = vector_register(data, kernel)
    places = global_places(address, base, instruction.modifiers, kernel)
    counted = (instruction.place, instruction.text)

    def run(wave):
        lanes, at, _ = places(wave)
        transfer(wave, counted, at, lanes, size, first, load, signed, half)

    return run


def transfer_scratch(wave, available, at, lanes, size, first, load, signed, half):
    """Load or store at the bytes `at` of the lanes' own memory, of which each has `available` bytes."""
    if len(at) and not (at.min() >= 0 and at.max() + size <= available):
        raise Fault(f"an access outside the {available} bytes of scratch memory")
    place = (lanes[:, None], at[:, None] + np.arange(size))  # an index [lane, byte]
    if load:
        load_lanes(wave, wave.scratch[place], lanes, first, signed, half)
    else:
        wave.scratch[place] = stored_lanes(wave, size, lanes, first, half).view(np.uint8)


def scratch_access(instruction, kernel, load, size, signed, half):
    """Translate a load from or a store to the memory of each lane, where a compiler spills registers."""
    data, address, base = data_and_address(instruction, load)
    check_modifiers(instruction.modifiers, {"offset"})
    first = vector_register(data, kernel)
    offsets = None if address == "off" else vector_register(address, kernel)
    base = scalar_reader("0" if base == "off" else base, "u32")
    immediate = int(instruction.modifiers.get("offset", "0"), 0)

    def run(wave):
        lanes = np.arange(wave.width)[wave.lanes]
        at = np.full(len(lanes), base(wave) + immediate)
        if offsets is not None:
            at += wave.v[offsets, lanes]
        transfer_scratch(wave, kernel.scratch, at, lanes, size, first, load, signed, half)

    return run


ACCESS = {"buffer": buffer_access, "global": global_access, "flat": global_access, "scratch": scratch_access}


def translate(instruction, kernel):
    """Return the function of a memory instruction, or raise Fault if it is not known."""
    name = instruction.name
    if name in NO_EFFECT:
        return lambda wave: None
    if name in ("ds_bpermute_b32", "ds_permute_b32", "ds_swizzle_b32"):
        return exchange(instruction, kernel)
    if name in ("ds_read_b64_tr_b16", "ds_read_b64_tr_b8"):
        return transposed_read(instruction, kernel)
    if found := LDS_NAME.match(name):
        word, pair, stride, kind, half = found.groups()
        return lds_access(instruction, kernel, word in ("read", "load"), pair, stride, kind, (half or "").strip("_"))
    if found := GLOBAL_NAME.match(name):
        space, word, before, kind, after = found.groups()
        size = size_of(kind)
        return ACCESS[space](instruction, kernel, word == "load", size, kind in SIGNED, before or after)
    raise Fault("unknown memory instruction")
