"""Translate vector instructions: VOP1, VOP2, VOP3, VOP3P and VOPC, with DPP, SDWA, op_sel and dual issue.

translate(instruction, kernel) returns (compute, put): compute(wave) returns the result, put(wave, result) stores it.
The two halves of a dual-issue pair compute before either stores.
"""

import re

import numpy as np

from . import arithmetic
from .assembly import Fault, UnsupportedError
from .machine import VCC
from .operands import (
    BITS,
    DTYPES,
    change_sign,
    flags,
    lanes_reader,
    lanes_writer,
    reader,
    scalar_reader,
    scalar_register,
    vector_register,
    writer,
)
from .tables import CLEARS_UPPER_HALF, COMPARISONS, SATURATES, VECTOR

DPP_CONTROLS = (
    "quad_perm row_shl row_shr row_ror row_mirror row_half_mirror row_bcast row_newbcast row_share row_xmask".split()
)
# Encoding -> the modifiers that it may have.
MODIFIERS = {
    "": {"op_sel", "clamp"},
    "e32": set(),
    "e64": {"op_sel", "clamp"},
    "sdwa": {"dst_sel", "dst_unused", "src0_sel", "src1_sel", "clamp"},
    "dpp": {"row_mask", "bank_mask", "bound_ctrl", "fi", *DPP_CONTROLS},
    "packed": {"op_sel", "op_sel_hi", "neg_lo", "neg_hi", "clamp"},
}
MODIFIERS["e64_dpp"] = MODIFIERS["dpp"] | MODIFIERS["e64"]

# ---------------------------------------------------------------- modifiers


def moved_lanes(modifiers, width):
    """Return the lane that each lane reads with DPP, and which of them exist."""
    lane = np.arange(width)
    row = lane // 16 * 16
    column = lane % 16
    everywhere = np.ones(width, bool)
    name = next(name for name in modifiers if name in DPP_CONTROLS)
    value = modifiers[name]
    if name == "quad_perm":
        return lane // 4 * 4 + np.array([int(x) for x in value.strip("[]").split(",")])[lane % 4], everywhere
    n = int(value or 0)
    if name == "row_shl":
        return np.minimum(lane + n, width - 1), column + n < 16
    if name == "row_shr":
        return np.maximum(lane - n, 0), column >= n
    if name == "row_ror":
        return row + (column - n) % 16, everywhere
    if name == "row_mirror":
        return row + 15 - column, everywhere
    if name == "row_half_mirror":
        return lane // 8 * 8 + 7 - lane % 8, everywhere
    if name == "row_bcast":  # lane 15 of a row to the next row, or lane 31 to the upper half; GCN and CDNA alone
        return (np.maximum(row - 1, 0), row > 0) if n == 15 else (np.full(width, 31), lane >= 32)
    if name in ("row_newbcast", "row_share"):
        return row + n, everywhere
    return row + (column ^ n), everywhere  # row_xmask


class Dpp:
    """Move the first source between lanes (data-parallel primitives)."""

    def __init__(self, modifiers, width):
        self.lanes, self.exists = moved_lanes(modifiers, width)
        lane = np.arange(width)
        rows = int(modifiers.get("row_mask", "0xf"), 0)  # a bit for each row of 16 lanes
        banks = int(modifiers.get("bank_mask", "0xf"), 0)  # a bit for each four lanes of a row
        self.enabled = (rows >> lane // 16 & 1 == 1) & (banks >> lane % 16 // 4 & 1 == 1)
        # bound_ctrl:1 in current assembly: a lane without a source reads zero. Without, it keeps its old result.
        self.zeros = modifiers.get("bound_ctrl") in ("0", "1")
        self.fetch_inactive = modifiers.get("fi") == "1"

    def valid(self, wave):
        return self.exists if self.fetch_inactive else self.exists & wave.active[self.lanes]

    def move(self, read):
        def moved(wave):
            value = np.broadcast_to(read(wave), wave.width)
            return np.where(self.valid(wave), value[self.lanes], value.dtype.type(0))

        return moved

    def limit(self, put):
        """Return the writer that stores a result in those lanes alone that get one."""

        def put_some(wave, value):
            lanes = wave.active & self.enabled
            if not self.zeros:
                lanes = lanes & self.valid(wave)
            put(wave, value, lanes)

        return put_some


def sdwa_part(select, signed):
    """Return (first bit, bits, signed) of an SDWA selector."""
    kind, _, number = select.partition("_")
    if kind == "DWORD":
        return None
    bits = {"WORD": 16, "BYTE": 8}[kind]
    return bits * int(number), bits, signed


def sdwa_reader(modifiers, i, text, kind, kernel):
    """Return the reader of source i, of which src0_sel or src1_sel names a part; sext() extends its sign."""
    signed = text.startswith("sext(")
    text = text.removeprefix("sext(").removesuffix(")") if signed else text
    return reader(text, kind, kernel, sdwa_part(modifiers.get(f"src{i}_sel", "DWORD"), signed))


def sdwa_put(modifiers, put, destination):
    """Return the writer that puts a result into the part of a register that dst_sel names."""
    part = sdwa_part(modifiers.get("dst_sel", "DWORD"), False)
    if part is None:
        return put
    first, bits, _ = part
    unused = modifiers.get("dst_unused", "UNUSED_PAD")
    if unused not in ("UNUSED_PAD", "UNUSED_PRESERVE"):
        raise Fault(f"dst_unused:{unused} is not known")
    mask = np.uint32(((1 << bits) - 1) << first)

    def put_part(wave, value, where=None):
        bits_of_value = value.view(f"u{value.dtype.itemsize}").astype(np.uint32)
        whole = bits_of_value << np.uint32(first) & mask
        if unused == "UNUSED_PRESERVE":
            whole = whole | wave.vector["u32"][destination] & ~mask
        wave.put("u32", destination, whole, where)

    return put_part


def half_of(selected):
    """Return the part of an operand that op_sel selects: its upper half, or all of it."""
    return (16, 16, False) if selected else None


def clamp(value):
    """Return floats between 0 and 1, NaN as 0 (DX10_CLAMP)."""
    return np.fmin(np.fmax(value, value.dtype.type(0)), value.dtype.type(1))


def saturated(function, readers, kind):
    """Return a function of a wave that computes with 64 bits and limits the result to an integer kind's range."""
    limits = np.iinfo(DTYPES[kind])

    def compute(wave):
        exact = function(*(read(wave).astype(np.int64) for read in readers))
        return np.clip(exact, limits.min, limits.max).astype(DTYPES[kind])

    return compute


def check_clamp(name, modifiers, kind):
    if "clamp" in modifiers and kind[0] != "f" and name not in SATURATES:
        raise Fault("clamp of an instruction that has none")


def without_overflow(compute, readers, kind, kernel):
    """Return compute, which raises UnsupportedError where the mode FP16_OVFL would change a float16 result.

    An infinity that comes from an infinite source stays one.
    """
    if kind != "f16" or not kernel.limits_half:
        return compute

    def checked(wave):
        value = compute(wave)
        if not wave.limits:
            return value
        infinite = np.isinf(value) & wave.active
        for read in readers:
            source = read(wave)
            if source.dtype.kind == "f":
                infinite = infinite & ~np.isinf(source)
        if infinite.any():
            raise UnsupportedError("float16 becomes infinite in the mode FP16_OVFL, which is not modelled")
        return value

    return checked


# ---------------------------------------------------------------- regular instructions


def keeps_upper(name, kernel):
    return not (kernel.target.startswith("gfx9") and name in CLEARS_UPPER_HALF)


def regular(instruction, kernel):
    """Translate an instruction of the tables."""
    name = instruction.name
    modifiers = instruction.modifiers
    kinds, result, function = VECTOR[name]
    destination, *texts = instruction.operands
    if kinds[-1:] == ("old",):
        texts.append(destination)
    kinds = [result if kind == "old" else kind for kind in kinds]
    if len(texts) != len(kinds):
        raise Fault("a wrong number of operands")
    readers = []
    selected = flags(modifiers, "op_sel", len(texts) + 1, 0)
    for i, (text, kind) in enumerate(zip(texts, kinds, strict=True)):
        if instruction.encoding == "sdwa" and i < 2:
            readers.append(sdwa_reader(modifiers, i, text, kind, kernel))
        else:
            readers.append(reader(text, kind, kernel, half_of(selected[i])))
    put = writer(destination, result, kernel, keeps_upper(name, kernel))
    if selected[len(texts)]:
        put = writer(f"{destination}.h", result, kernel)
    if instruction.encoding == "sdwa":
        put = sdwa_put(modifiers, put, vector_register(destination, kernel))
    if instruction.encoding in ("dpp", "e64_dpp"):
        dpp = Dpp(modifiers, kernel.width)
        readers[0] = dpp.move(readers[0])
        put = dpp.limit(put)
    check_clamp(name, modifiers, result)
    compute = applied(function, readers, "clamp" in modifiers, result)
    return without_overflow(compute, readers, result, kernel), put


def applied(function, readers, clamped=False, kind="f32"):
    """Return a function of a wave that applies a function to what readers read."""
    if clamped:
        if kind[0] != "f":
            return saturated(function, readers, kind)
        whole = applied(function, readers)
        return lambda wave: clamp(whole(wave))
    if len(readers) == 1:
        (a,) = readers
        return lambda wave: function(a(wave))
    if len(readers) == 2:
        a, b = readers
        return lambda wave: function(a(wave), b(wave))
    a, b, c = readers
    return lambda wave: function(a(wave), b(wave), c(wave))


def conditional(instruction, kernel):
    """Translate v_cndmask: the second source where a mask is set, else the first."""
    modifiers = instruction.modifiers
    destination, *texts = instruction.operands
    sdwa = instruction.encoding == "sdwa"
    kind = "u16" if instruction.name.endswith("b16") else "u32"
    selected = flags(modifiers, "op_sel", 4, 0)
    if sdwa:
        otherwise, chosen = (sdwa_reader(modifiers, i, texts[i], kind, kernel) for i in range(2))
    else:
        otherwise, chosen = (reader(texts[i], kind, kernel, half_of(selected[i])) for i in range(2))
    mask = lanes_reader(texts[2] if len(texts) > 2 else "vcc", kernel.width)
    put = writer(f"{destination}.h" if selected[3] else destination, kind, kernel, keeps_upper=True)
    if sdwa:
        put = sdwa_put(modifiers, put, vector_register(destination, kernel))
    if instruction.encoding in ("dpp", "e64_dpp"):
        dpp = Dpp(modifiers, kernel.width)
        otherwise = dpp.move(otherwise)
        put = dpp.limit(put)
    return lambda wave: np.where(mask(wave), chosen(wave), otherwise(wave)), put


def is_of_class(x, mask):
    """Return where the class of a float is one of those in a mask."""
    return mask >> arithmetic.classes(x).astype(np.uint32) & np.uint32(1) == 1


def comparison(instruction, kernel):
    """Translate v_cmp and v_cmpx, whose result is a mask of lanes."""
    prefix, relation, kind = instruction.name[2:].split("_")
    kind = kind.replace("b", "u")
    if relation not in {*COMPARISONS, "class"} or kind not in BITS:
        raise Fault("unknown comparison")
    compare = COMPARISONS.get(relation, is_of_class)
    kinds = (kind, "u32" if relation == "class" else kind)
    operands = list(instruction.operands)
    if prefix == "cmpx" and len(operands) == 2:  # RDNA: the mask is EXEC
        operands.insert(0, "exec")
    destination, *texts = operands
    modifiers = instruction.modifiers
    if len(texts) != 2:
        raise Fault("a wrong number of operands")
    if instruction.encoding == "sdwa":
        readers = [sdwa_reader(modifiers, i, texts[i], kinds[i], kernel) for i in range(2)]
    else:
        selected = flags(modifiers, "op_sel", 3, 0)
        readers = [reader(texts[i], kinds[i], kernel, half_of(selected[i])) for i in range(2)]
    if instruction.encoding in ("dpp", "e64_dpp"):
        readers[0] = Dpp(modifiers, kernel.width).move(readers[0])
    put = lanes_writer(destination)
    if prefix == "cmpx" and destination != "exec":  # GCN and CDNA: both
        put_one, put_exec = put, lanes_writer("exec")

        def put(wave, lanes):
            put_one(wave, lanes)
            put_exec(wave, lanes)

    return applied(compare, readers), put


# ---------------------------------------------------------------- packed instructions (VOP3P)

PACKED = re.compile(r"v_pk_(\w+)_([fiub])(32|16)$")
MIXED = {"v_fma_mix_f32": None, "v_fma_mixlo_f16": "l", "v_fma_mixhi_f16": "h"}


def half_reader(text, kind, kernel, high, negative):
    """Return the reader of one of the two numbers that a packed operand holds."""
    is_vector = vector_register(text, kernel) is not None
    is_register = is_vector or scalar_register(text) is not None
    if BITS[kind] == 32:
        if is_register:
            found = re.fullmatch(r"([vsa])\[(\d+):\d+\]", text)
            if not found:
                raise Fault(f"{text} is no pair of registers")
            text = f"{found[1]}{int(found[2]) + high}"
        elif high and text != "0":
            raise Fault("the upper half of a constant")
        return reader(f"neg({text})" if negative else text, kind, kernel)
    if high and not is_register and text != "0":
        raise Fault("the upper half of a constant")
    read = reader(text, kind, kernel, (16 * high, 16, False) if is_register else None)
    if not negative:
        return read
    return lambda wave: change_sign(read(wave).view(np.uint16), 16, False, True).view(DTYPES[kind])


def packed(instruction, kernel):
    """Translate v_pk_*: the same operation on two numbers, of 32 or 16 bits."""
    operation, letter, bits = PACKED.match(instruction.name).groups()
    destination, *texts = instruction.operands
    modifiers = instruction.modifiers
    count = len(texts)
    kind = f"{letter.replace('b', 'u')}{bits}"
    scalar_name = f"v_{operation}_{letter}{bits}"
    if operation == "mov":  # the lower result is half of the first source, the upper one is half of the second
        halves = zip(texts, flags(modifiers, "op_sel", 2, 0), strict=True)
        low, high = (half_reader(text, kind, kernel, half, 0) for text, half in halves)
    else:
        if scalar_name not in VECTOR:
            raise Fault("unknown packed instruction")
        function = VECTOR[scalar_name][2]
        check_clamp(scalar_name, modifiers, kind)

        def half(select, default, negate):
            halves = flags(modifiers, select, count, default)
            signs = flags(modifiers, negate, count, 0)
            readers = [half_reader(t, kind, kernel, h, n) for t, h, n in zip(texts, halves, signs, strict=True)]
            return without_overflow(applied(function, readers, "clamp" in modifiers, kind), readers, kind, kernel)

        low = half("op_sel", 0, "neg_lo")
        high = half("op_sel_hi", 1, "neg_hi")
    first = vector_register(destination, kernel)
    if bits == "32":
        pair = re.fullmatch(r"([va])\[(\d+):(\d+)\]", destination)
        puts = [writer(f"{pair[1]}{number}", kind, kernel) for number in pair.groups()[1:]]

        def put(wave, value):
            for put_one, number in zip(puts, value, strict=True):
                put_one(wave, number)

    else:

        def put(wave, value):
            parts = [half.view(np.uint16).astype(np.uint32) for half in value]
            wave.put("u32", first, arithmetic.pack(*parts))

    # Copies: a result may be a view of the register that the other half of the pair is about to change.
    return lambda wave: (np.array(low(wave)), np.array(high(wave))), put


def widened(read):
    return lambda wave: read(wave).astype(np.float32)


def mixed(instruction, kernel):
    """Translate v_fma_mix: each source is float32, or a half of a register as float16 where op_sel_hi says so."""
    destination, *texts = instruction.operands
    wide = flags(instruction.modifiers, "op_sel_hi", 3, 0)
    upper = flags(instruction.modifiers, "op_sel", 3, 0)
    readers = []
    for text, is_half, high in zip(texts, wide, upper, strict=True):
        if is_half:
            readers.append(widened(reader(text, "f16", kernel, (16 * high, 16, False))))
        else:
            readers.append(reader(text, "f32", kernel))
    compute = applied(arithmetic.fma, readers, "clamp" in instruction.modifiers)
    half = MIXED[instruction.name]
    if half is None:
        return compute, writer(destination, "f32", kernel)
    put = writer(f"{destination}.{half}", "f16", kernel)

    # Rounded once: from the exact sum to float16, which float64 holds nearly always.
    def compute_half(wave):
        a, b, c = (read(wave) for read in readers)
        total = (a.astype(np.float64) * b + c).astype(np.float16)
        return clamp(total) if "clamp" in instruction.modifiers else total

    return without_overflow(compute_half, readers, "f16", kernel), put


# ---------------------------------------------------------------- fp8


CONVERSION = re.compile(r"v_cvt_(?:scalef32_)?pk_(f32|f16|bf16|fp8|bf8)_(f32|f16|bf16|fp8|bf8)$")


def check_scale(texts):
    if texts not in ([], ["1.0"]):
        raise Fault("a scale other than 1.0")


def float_pair(texts, kind, kernel):
    """Return the readers of two numbers as float32: of two sources, or of the halves of one."""
    if kind == "f32":
        return [reader(text, "f32", kernel) for text in texts]
    (text,) = texts
    parts = [reader(text, "f16" if kind == "f16" else "u16", kernel, (first, 16, False)) for first in (0, 16)]
    if kind == "f16":
        return [widened(part) for part in parts]
    return [lambda wave, part=part: arithmetic.bfloat16(part(wave)) for part in parts]


def to_fp8(instruction, kernel):
    """Translate v_cvt_pk_fp8_f32 and its kin, some with a scale: two numbers into half a register."""
    to, kind = CONVERSION.match(instruction.name).groups()
    destination, *texts = instruction.operands
    count = 2 if kind == "f32" else 1
    check_scale(texts[count:])
    readers = float_pair(texts[:count], kind, kernel)
    upper = flags(instruction.modifiers, "op_sel", len(instruction.operands), 0)[-1]
    form = arithmetic.fp8_format(to, kernel.target)

    def compute(wave):
        codes = []
        for read in readers:
            value = read(wave)
            code, overflows = arithmetic.fp8_bits(value, form)  # the largest number's, with its sign, if it overflows
            if wave.limits:
                overflows = np.isinf(value)
            if (overflows & wave.active).any():
                raise UnsupportedError("an infinite number becomes fp8, or one overflows, which is not modelled")
            codes.append(code)
        return np.broadcast_to(codes[0] | codes[1] << np.uint32(8), wave.width).astype(np.uint16)

    return compute, writer(f"{destination}.{'h' if upper else 'l'}", "u16", kernel)


def from_fp8(instruction, kernel):
    """Translate v_cvt_pk_f32_fp8 and its kin, some with a scale: half a register into two registers, or one."""
    kind, source_kind = CONVERSION.match(instruction.name).groups()
    destination, source, *scale = instruction.operands
    check_scale(scale)
    upper = flags(instruction.modifiers, "op_sel", len(instruction.operands), 0)[0]
    if instruction.encoding == "sdwa":
        upper = instruction.modifiers.get("src0_sel") == "WORD_1"
    read = reader(source, "u32", kernel, (16 * upper, 16, False))
    first = vector_register(destination, kernel)
    form = arithmetic.fp8_format(source_kind, kernel.target)

    def compute(wave):
        codes = read(wave)
        return [arithmetic.fp8_values(codes >> np.uint32(shift) & np.uint32(255), form) for shift in (0, 8)]

    def put(wave, values):
        wave.put("f32", first, values[0])
        wave.put("f32", first + 1, values[1])

    def put_halves(wave, values):
        bits = arithmetic.half_bits if kind == "f16" else arithmetic.bfloat16_bits
        wave.put("u32", first, arithmetic.pack(*map(bits, values)))

    return compute, put if kind == "f32" else put_halves


# ---------------------------------------------------------------- instructions with two results, or of several lanes


def with_carry(instruction, kernel):
    """Translate additions and subtractions that return a carry in a mask of lanes, and may take one."""
    destination, carries, a, b, *carry_in = instruction.operands
    read_a, read_b = reader(a, "u32", kernel), reader(b, "u32", kernel)
    carry = lanes_reader(carry_in[0], kernel.width) if carry_in else lambda wave: 0
    sign = 1 if "add" in instruction.name else -1
    if "rev" in instruction.name:
        read_a, read_b = read_b, read_a
    put_sum = writer(destination, "u32", kernel)
    put_carry = lanes_writer(carries)

    def compute(wave):
        total = read_a(wave).astype(np.int64) + sign * (read_b(wave).astype(np.int64) + carry(wave))
        return np.broadcast_to(total, wave.width)

    def put(wave, total):
        put_sum(wave, total.astype(np.uint32))
        put_carry(wave, total >> 32 != 0)

    return compute, put


def wide_multiply_add(instruction, kernel):
    """Translate v_mad_u64_u32 and v_mad_i64_i32: 32 x 32 + 64 bits."""
    destination, carries, a, b, c = instruction.operands
    kind, wide = ("i32", "i64") if "i64" in instruction.name else ("u32", "u64")
    readers = reader(a, kind, kernel), reader(b, kind, kernel), reader(c, wide, kernel)
    put_sum = writer(destination, wide, kernel)
    carry = scalar_register(carries)

    def compute(wave):
        x, y, z = (read(wave) for read in readers)
        return np.broadcast_to(x.astype(DTYPES[wide]) * y.astype(DTYPES[wide]) + z, wave.width).copy()

    def put(wave, value):
        put_sum(wave, value)
        if carry is not None:  # kernels throw it away; where one reads it, noise shows that it is not modelled
            wave.set_scalar(carry, 0xDEADBEEF, wave.words)

    return compute, put


def division_scale(instruction, kernel):
    destination, mask, *texts = instruction.operands
    kind = instruction.name[-3:]
    readers = [reader(text, kind, kernel) for text in texts]
    put_value = writer(destination, kind, kernel)
    put_mask = lanes_writer(mask)

    def put(wave, value):
        put_value(wave, value[0])
        put_mask(wave, np.broadcast_to(value[1], wave.width))

    return lambda wave: arithmetic.div_scale(*(read(wave) for read in readers)), put


def division_fmas(instruction, kernel):
    destination, *texts = instruction.operands
    kind = instruction.name[-3:]
    readers = [reader(text, kind, kernel) for text in texts]

    def compute(wave):
        return arithmetic.div_fmas(*(read(wave) for read in readers), wave.get_lanes(VCC))

    return compute, writer(destination, kind, kernel)


def read_lane(instruction, kernel):
    """Translate v_readlane and v_readfirstlane: one lane of a vector register into a scalar one, whatever EXEC is."""
    destination, source, *lane = instruction.operands
    to = scalar_register(destination)
    source = vector_register(source, kernel)
    if lane:
        index = scalar_reader(lane[0], "u32")
        return (
            lambda wave: int(wave.v[source, index(wave) % wave.width]),
            lambda wave, value: wave.set_scalar(to, value),
        )
    return lambda wave: int(wave.v[source, wave.active.argmax()]), lambda wave, value: wave.set_scalar(to, value)


def write_lane(instruction, kernel):
    destination, source, lane = instruction.operands
    to = vector_register(destination, kernel)
    value = scalar_reader(source, "u32")
    index = scalar_reader(lane, "u32")

    def put(wave, value):
        wave.v[to, index(wave) % wave.width] = value & 0xFFFFFFFF

    return value, put


def permute_rows(instruction, kernel):
    """Translate v_permlane16 and v_permlanex16: each lane reads one of 16 of its row, or of the row beside it."""
    destination, source, low, high = instruction.operands
    fetch_inactive, bound = flags(instruction.modifiers, "op_sel", 2, 0)
    read = reader(source, "u32", kernel)
    select_low = scalar_reader(low, "u32")
    select_high = scalar_reader(high, "u32")
    to = vector_register(destination, kernel)
    lane = np.arange(kernel.width)
    row = (lane // 16 ^ ("x16" in instruction.name)) * 16

    def compute(wave):
        select = select_low(wave) & 0xFFFFFFFF | (select_high(wave) & 0xFFFFFFFF) << 32
        lanes = row + np.array([select >> 4 * k & 15 for k in range(16)])[lane % 16]
        valid = True if fetch_inactive else wave.active[lanes]
        otherwise = np.uint32(0) if bound else wave.vector["u32"][to]
        return np.where(valid, read(wave)[lanes], otherwise)

    return compute, writer(destination, "u32", kernel)


def swap_rows(instruction, kernel):
    """Translate v_permlane16_swap and v_permlane32_swap (CDNA 4): odd rows of the first register, even of the second.

    A row is 16 or 32 lanes.
    """
    first, second = (vector_register(text, kernel) for text in instruction.operands)
    size = int(re.search(r"permlane(\d+)", instruction.name)[1])
    lane = np.arange(kernel.width)
    odd = lane // size % 2 == 1

    def compute(wave):
        a = wave.v[first]
        b = wave.v[second]
        return np.where(odd, b[lane ^ size], a), np.where(odd, b, a[lane ^ size])

    def put(wave, values):
        wave.put("u32", first, values[0])
        wave.put("u32", second, values[1])

    return compute, put


def swap(instruction, kernel):
    first, second = (vector_register(text, kernel) for text in instruction.operands)

    def put(wave, values):
        wave.put("u32", first, values[0])
        wave.put("u32", second, values[1])

    return lambda wave: (wave.v[second].copy(), wave.v[first].copy()), put


def bit_operation(instruction, kernel):
    """Translate v_bitop3: any function of three bits, by its truth table."""
    destination, *texts = instruction.operands
    table = int(instruction.modifiers.get("bitop3", "0"), 0)
    kind = "u16" if instruction.name.endswith("b16") else "u32"
    readers = [reader(text, kind, kernel) for text in texts]
    put = writer(destination, kind, kernel, keeps_upper=True)
    return applied(lambda a, b, c: arithmetic.bit_operation(a, b, c, table), readers), put


def dot_of_bytes(instruction, kernel):
    """Translate v_dot4_i32_iu8 (RDNA): neg_lo says which of the sources has signed bytes."""
    destination, *texts = instruction.operands
    *signed, negative = flags(instruction.modifiers, "neg_lo", 3, 0)
    if negative:
        raise Fault("a negative third source")
    kinds = [np.int8 if sign else np.uint8 for sign in signed]
    readers = [reader(text, kind, kernel) for text, kind in zip(texts, ("u32", "u32", "i32"), strict=True)]
    return applied(lambda a, b, c: arithmetic.dot4(a, b, c, *kinds), readers), writer(destination, "i32", kernel)


def count_below(instruction, kernel):
    """Translate v_mbcnt: the bits of a mask that belong to lanes below each lane, plus a number.

    lo counts among the first 32 lanes, hi among the others.
    """
    destination, mask, added = instruction.operands
    mask, added = reader(mask, "u32", kernel), reader(added, "u32", kernel)
    first = 32 if "_hi_" in instruction.name else 0
    lanes_below = np.clip(np.arange(kernel.width) - first, 0, 32)
    below = ((1 << lanes_below.astype(np.uint64)) - 1).astype(np.uint32)

    def compute(wave):
        return arithmetic.count_bits(mask(wave) & below) + added(wave)

    return compute, writer(destination, "u32", kernel)


FP8 = ("fp8", "bf8")
FLOATS = ("f32", "f16", "bf16")
SPECIAL = {
    "v_cndmask_b32": conditional, "v_cndmask_b16": conditional,
    "v_mad_u64_u32": wide_multiply_add, "v_mad_i64_i32": wide_multiply_add,
    "v_mad_co_u64_u32": wide_multiply_add, "v_mad_co_i64_i32": wide_multiply_add,
    "v_div_scale_f32": division_scale, "v_div_fmas_f32": division_fmas,
    "v_div_scale_f64": division_scale, "v_div_fmas_f64": division_fmas,
    "v_readlane_b32": read_lane, "v_readfirstlane_b32": read_lane, "v_writelane_b32": write_lane,
    "v_permlane16_b32": permute_rows, "v_permlanex16_b32": permute_rows,
    "v_permlane16_swap_b32": swap_rows, "v_permlane32_swap_b32": swap_rows, "v_swap_b32": swap,
    **{f"v_cvt_pk_{name}_f32": to_fp8 for name in FP8},
    **{f"v_cvt_pk_f32_{name}": from_fp8 for name in FP8},
    **{f"v_cvt_scalef32_pk_{name}_{kind}": to_fp8 for name in FP8 for kind in FLOATS},
    **{f"v_cvt_scalef32_pk_{kind}_{name}": from_fp8 for name in FP8 for kind in FLOATS},
    "v_dot4_i32_iu8": dot_of_bytes,
    "v_bitop3_b32": bit_operation, "v_bitop3_b16": bit_operation,
    "v_mbcnt_lo_u32_b32": count_below, "v_mbcnt_hi_u32_b32": count_below,
    **dict.fromkeys(MIXED, mixed),
    **dict.fromkeys("v_add_co_u32 v_sub_co_u32 v_subrev_co_u32".split(), with_carry),
    **dict.fromkeys("v_addc_co_u32 v_subb_co_u32 v_subbrev_co_u32".split(), with_carry),
    **dict.fromkeys("v_add_co_ci_u32 v_sub_co_ci_u32 v_subrev_co_ci_u32".split(), with_carry),
}  # fmt: skip


# Those of SPECIAL, and the comparisons, that read op_sel.
SELECTS = frozenset(
    {"v_cndmask_b16", "v_permlane16_b32", "v_permlanex16_b32"}
    | {name for name, translate in SPECIAL.items() if translate in (to_fp8, from_fp8)}
)


def modifiers_of(instruction):
    """Return the modifiers that an instruction may have."""
    name = instruction.name
    if name == "v_dot4_i32_iu8":
        return {"neg_lo"}
    if name.startswith("v_dot"):
        return {"clamp", "op_sel"} if name in ("v_dot2_f16_f16", "v_dot2_bf16_bf16") else set()
    if name.startswith("v_bitop3"):
        return {"bitop3"}
    if PACKED.match(name) or name in MIXED:
        return MODIFIERS["packed"]
    found = MODIFIERS[instruction.encoding]
    if name in SPECIAL:
        found = found - ({"clamp"} if name in SELECTS else {"clamp", "op_sel"})
    elif name.startswith(("v_cmp_", "v_cmpx_")):
        found = found - {"clamp"}
    return found


def translate(instruction, kernel):
    """Return (compute, put) of a vector instruction, or raise Fault if it is not known."""
    name = instruction.name
    unknown = set(instruction.modifiers) - modifiers_of(instruction)
    if unknown:
        raise Fault(f"unknown modifier {', '.join(sorted(unknown))}")
    if name in SPECIAL:
        return SPECIAL[name](instruction, kernel)
    if name.startswith(("v_cmp_", "v_cmpx_")):
        return comparison(instruction, kernel)
    if PACKED.match(name):
        return packed(instruction, kernel)
    if name in VECTOR:
        return regular(instruction, kernel)
    raise Fault("unknown vector instruction")
