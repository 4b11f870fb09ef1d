"""Turn the operands of an instruction into functions that read or write them.

A reader takes a wave and returns an array of the kind that the instruction computes with: one value per lane, or one
alone ([1]) of a scalar register or a constant. "u32", "i32" and "f32" are 32 bits of a register, "u16", "i16" and "f16"
its lower half, and "u64", "i64" and "f64" two registers.
"""

import re

import numpy as np

from .arithmetic import flush
from .assembly import Fault
from .machine import DTYPES, SCALARS, lanes_of

REGISTER = re.compile(r"([vsa])(?:(\d+)|\[(\d+):(\d+)\])")
NUMBER = re.compile(r"-?(?:0x[0-9a-f]+|\d+(?:\.\d+)?)")
BITS = {kind: np.dtype(dtype).itemsize * 8 for kind, dtype in DTYPES.items()}


def scalar_register(text):
    """Return the number of a scalar register or of the first of several, or None."""
    if text in SCALARS:
        return SCALARS[text]
    found = REGISTER.fullmatch(text)
    if not found and (pair := re.fullmatch(r"ttmp\[(\d+):\d+\]", text)):
        return SCALARS[f"ttmp{pair[1]}"]
    return int(found[2] or found[3]) if found and found[1] == "s" else None


def vector_register(text, kernel):
    """Return the number of a vector register or of the first of several, or None; AGPRs come after VGPRs."""
    found = REGISTER.fullmatch(text)
    if not found or found[1] == "s":
        return None
    first = int(found[2] or found[3])
    last = int(found[2] or found[4])
    is_agpr = found[1] == "a"
    if last >= (kernel.agprs if is_agpr else kernel.vgprs):
        raise Fault(f"{text} is not allocated")
    return kernel.vgprs + first if is_agpr else first


def register_count(text):
    """Return how many registers an operand names."""
    found = REGISTER.fullmatch(text)
    return int(found[4]) - int(found[3]) + 1 if found and found[3] else 1


def constant(text, kind):
    """Return the value of a literal or an inline constant as an operand of this kind reads it, as an array [1]."""
    if not NUMBER.fullmatch(text):
        raise Fault(f"unknown operand {text}")
    dtype = np.dtype(DTYPES[kind])
    if "." in text:
        if dtype.kind == "f":
            return np.array([float(text)], dtype)
        return (
            np.array([float(text)], np.float32).view(np.uint32).astype(dtype)
        )  # an integer instruction reads its bits
    value = int(text, 0)
    if kind == "f64" and "0x" in text:  # a literal has 32 bits: the upper half
        value <<= 32
    bits = np.array([value & (1 << BITS[kind]) - 1], np.uint64)
    return bits.astype(f"u{dtype.itemsize}").view(dtype)


def change_sign(bits, width, absolute, negative):
    """Return the bits of a floating-point number after |x|, then -x."""
    sign = bits.dtype.type(1 << (width - 1))
    if absolute:
        bits = bits & ~sign
    return bits ^ sign if negative else bits


def without_signs(text):
    """Return an operand without -, neg(), | | and abs(), and whether it is absolute and negative."""
    if named := re.fullmatch(r"neg\((.*)\)", text):  # LLVM writes neg(0), because -0 is the integer 0
        text, negative = named[1], True
    else:
        negative = text.startswith("-") and not NUMBER.fullmatch(text)
        text = text[1:] if negative else text
    bare = re.fullmatch(r"\|(.*)\||abs\((.*)\)", text)
    return (bare[1] or bare[2] if bare else text), bare is not None, negative


def flags(modifiers, name, count, default):
    """Return the numbers of op_sel:[0,1] or its kin."""
    if name not in modifiers:
        return [default for _ in range(count)]
    found = [int(x) for x in modifiers[name].strip("[]").split(",")]
    return found + [default for _ in range(count - len(found))]


def plain_reader(text, kind, kernel):
    """Return the reader of a register or a constant as it is; 16-bit kinds read the lower half."""
    dtype = DTYPES[kind]
    scalar = scalar_register(text)
    vector = vector_register(text, kernel)
    if scalar is None and vector is None:
        value = constant(text, kind) if text not in ("null", "off") else np.zeros(1, dtype)
        return lambda wave: value
    if BITS[kind] == 64:
        if scalar is not None:
            return lambda wave: wave.s[scalar : scalar + 2].copy().view(dtype)

        def read_pair(wave):
            low, high = wave.vector["u32"][vector : vector + 2]
            return (low | high.astype(np.uint64) << np.uint64(32)).view(dtype)

        return read_pair
    if BITS[kind] == 16:
        if scalar is not None:
            return lambda wave: wave.scalar["u32"][scalar].astype(np.uint16).view(dtype)
        return lambda wave: wave.vector["u32"][vector].astype(np.uint16).view(dtype)
    if scalar is not None:
        return lambda wave: wave.scalar[kind][scalar]
    return lambda wave: wave.vector[kind][vector]


def reader(text, kind, kernel, part=None):
    """Return the reader of a source operand; part: (first bit, bits, signed) of a register that is read instead of all.

    Signs act on what is read: on the 16 bits of a half, for one.
    """
    text, absolute, negative = without_signs(text)
    text = {"src_scc": "scc"}.get(text, text)
    # True 16-bit names of RDNA4 and of later compilers: v1.l and v1.h.
    if half := re.fullmatch(r"(.*)\.([lh])", text):
        text = half[1]
        part = (16 * (half[2] == "h"), 16, False)
    width = BITS[kind]
    read = plain_reader(text, kind, kernel)
    is_constant = scalar_register(text) is None and vector_register(text, kernel) is None
    if part and not is_constant:
        first, bits, signed = part
        read_bits = plain_reader(text, "u32", kernel)

        def read(wave):
            found = read_bits(wave) >> np.uint32(first) & np.uint32((1 << bits) - 1)
            if signed:
                found = ((found << np.uint32(32 - bits)).view(np.int32) >> np.int32(32 - bits)).view(np.uint32)
            return found.astype(f"u{width // 8}").view(DTYPES[kind])

    if kind == "f32" and kernel.may_flush:
        with_denormals = read

        def read(wave):
            value = with_denormals(wave)
            return flush(value) if wave.flushes else value

    if not absolute and not negative:
        return read
    dtype = DTYPES[kind]
    unsigned = f"u{width // 8}"
    whole = read
    return lambda wave: change_sign(whole(wave).view(unsigned), width, absolute, negative).view(dtype)


def lanes_reader(text, wave_width):
    """Return the reader of a mask of lanes as booleans; the bits of a constant are one, too."""
    i = scalar_register(text)
    if i is None:
        value = lanes_of(int(constant(text, "i32")[0]) & (1 << wave_width) - 1, wave_width)
        return lambda wave: value
    return lambda wave: wave.get_lanes(i)


def lanes_writer(text):
    """Return the writer of booleans as a mask of lanes."""
    if text == "null":
        return lambda wave, lanes: None
    i = scalar_register(text)
    return lambda wave, lanes: wave.set_lanes(i, lanes)


def writer(text, kind, kernel, keeps_upper=False):
    """Return a function (wave, value, where) that stores a vector result in the active lanes, or those of `where`.

    keeps_upper: a 16-bit result leaves the upper half of its register alone; else the half becomes zero.
    """
    half = re.fullmatch(r"(.*)\.([lh])", text)
    text = half[1] if half else text
    i = vector_register(text, kernel)
    if i is None:
        raise Fault(f"unknown destination {text}")
    if BITS[kind] == 64:

        def put_pair(wave, value, where=None):
            bits = value.view(np.uint64)
            wave.put("u32", i, bits.astype(np.uint32), where)
            wave.put("u32", i + 1, (bits >> np.uint64(32)).astype(np.uint32), where)

        return put_pair
    if BITS[kind] == 16:
        high = half is not None and half[2] == "h"

        def put_half(wave, value, where=None):
            bits = value.view(np.uint16).astype(np.uint32)
            old = wave.vector["u32"][i]
            if high:
                bits = bits << np.uint32(16) | old & np.uint32(0xFFFF)
            elif keeps_upper or half:
                bits = bits | old & np.uint32(0xFFFF0000)
            wave.put("u32", i, bits, where)

        return put_half
    if kind == "f32" and kernel.may_flush:
        return lambda wave, value, where=None: wave.put(kind, i, flush(value) if wave.flushes else value, where)
    return lambda wave, value, where=None: wave.put(kind, i, value, where)


def scalar_reader(text, kind):
    """Return a function wave -> Python integer of a scalar source; kind "u32", "i32", "u64" or "i64"."""
    bits = BITS[kind]
    signed = kind.startswith("i")
    if text == "scc":
        return lambda wave: wave.scc
    i = scalar_register(text)
    if i is None:
        # A 32-bit literal of a 64-bit instruction is extended with zeros, or with its sign for a signed one.
        value = int(constant(text, kind)[0]) if text != "null" else 0
        return lambda wave: value
    if signed:
        sign = 1 << (bits - 1)  # two's complement: (x ^ sign) - sign is x with its sign
        return lambda wave: (wave.get_scalar(i, bits // 32) ^ sign) - sign
    return lambda wave: wave.get_scalar(i, bits // 32)
