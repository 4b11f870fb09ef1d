"""Translate matrix instructions: MFMA (CDNA) and WMMA (RDNA). D = A · B + C, a few elements of each in every lane.

Which lane holds which element is what the documents give as tables, and AMD's "Matrix Instruction Calculator". Elements
of 16 or 8 bits lie one after another in a lane's registers. Sums of floats are taken in float64 and rounded once, while
hardware rounds on its way, in an order that is not documented. Sums of integers are exact, and wrap around at 32 bits.
Those of float64 are taken in NumPy's longdouble.
"""

import re

import numpy as np

from .arithmetic import SMALLEST_NORMAL, bfloat16, fp8_format, fp8_values
from .assembly import Fault
from .operands import DTYPES, constant, flags, register_count, vector_register

FP8_PAIR = "(?:fp8|bf8)_(?:fp8|bf8)"
MFMA = re.compile(rf"v_mfma_(?:[fi]32|f64)_(\d+)x\d+x(\d+)_?(f64|f32|xf32|f16|bf16|i8|f8f6f4|{FP8_PAIR})(_1k)?$")
WMMA = re.compile(rf"v_wmma_[fi]32_16x16x16_(f16|bf16|iu8|{FP8_PAIR})$")
BYTES = {"f64": 8, "f32": 4, "xf32": 4, "f16": 2, "bf16": 2, "i8": 1, "u8": 1, "fp8": 1, "bf8": 1}
# The modifiers cbsz and blgp of f8f6f4 -> format of A and of B. Others have 6 or 4 bits.
F8F6F4 = {"0": "fp8", "1": "bf8"}


def elements(registers, kind, target):
    """Return float64 [lane, element] of registers [register, lane]."""
    by_lane = np.ascontiguousarray(registers.T)
    if kind == "f64":
        return by_lane.view(np.float64)
    if kind in ("i8", "u8"):
        return by_lane.view(np.int8 if kind == "i8" else np.uint8).astype(np.float64)
    if kind in ("fp8", "bf8"):
        return fp8_values(by_lane.view(np.uint8), fp8_format(kind, target)).astype(np.float64)
    if kind == "bf16":
        return bfloat16(by_lane.view(np.uint16)).astype(np.float64)
    if kind == "f16":
        return by_lane.view(np.float16).astype(np.float64)
    if kind == "xf32":  # float32 without its last 13 bits
        by_lane = by_lane & np.uint32(0xFFFFE000)
    return by_lane.view(np.float32).astype(np.float64)


def without_denormals(x, kind):
    return np.where(np.abs(x) < (2.0**-14 if kind == "f16" else SMALLEST_NORMAL), 0.0, x)


def mfma_layout(size, depth, kind=""):
    """Return rows (of A; columns of B) and k of [lane, element], and rows and columns of D [register, lane].

    Of float64, a register of D means two.

    size: rows of A and columns of B. Each group of `size` lanes holds a slice of k.
    """
    lane = np.arange(64)
    group = lane // size
    each = depth * size // 64
    rows = np.repeat(lane % size, each).reshape(64, each)
    k = group[:, None] * each + np.arange(each)
    register = np.arange(size * size // 64)[:, None]
    if kind == "f64":
        d_rows = 4 * register + group
    elif size == 16:
        d_rows = register + 4 * group
    else:
        d_rows = register // 4 * 8 + 4 * group + register % 4
    return rows, k, d_rows, np.broadcast_to(lane % size, d_rows.shape)


def wmma_layout(target, size=2):
    """Return the same for the WMMA of a target with waves of 32 lanes; size: bytes of an element.

    RDNA 3: lanes 16 to 31 hold the rows of lanes 0 to 15 again. RDNA 4: each half of the lanes holds two runs of four
    of k, or one run of eight if an element has a byte.
    """
    lane = np.arange(32)
    register = np.arange(8)[:, None]
    if target.startswith("gfx11"):
        each = 16
        k = np.broadcast_to(np.arange(16), (32, 16))
        d_rows = 2 * register + lane // 16
    else:
        each = 8
        element = np.arange(each)
        run = 4 if size == 2 else 8
        k = element // run * 2 * run + lane[:, None] // 16 * run + element % run
        d_rows = register + 8 * (lane // 16)
    rows = np.repeat(lane % 16, each).reshape(32, each)
    return rows, k, d_rows, np.broadcast_to(lane % 16, d_rows.shape)


def kinds_of(name, modifiers):
    """Return the kinds of A and B; name: the last part of an instruction's name."""
    if name == "f8f6f4":
        formats = [modifiers.get(modifier, "0") for modifier in ("cbsz", "blgp")]
        if not set(formats) <= set(F8F6F4):
            raise Fault("numbers of 6 or 4 bits")
        return [F8F6F4[form] for form in formats]
    if name == "iu8":  # neg_lo says whether A and B are signed
        signed = flags(modifiers, "neg_lo", 3, 0)
        if signed[2]:
            raise Fault("a negative C")
        return ["i8" if sign else "u8" for sign in signed[:2]]
    return name.split("_") if "_" in name else [name, name]


def shape_of(instruction, kernel):
    """Return size, depth, the last part of the name and layout of a matrix instruction, or raise Fault.

    The last part is f16, i8, fp8_bf8 and so on.
    """
    if found := MFMA.match(instruction.name):
        size = int(found[1])
        depth = int(found[2])
        return size, depth, found[3], mfma_layout(size, depth, found[3])
    if found := WMMA.match(instruction.name):
        is_byte = found[1] not in ("f16", "bf16")
        return 16, 16, found[1], wmma_layout(kernel.target, 1 if is_byte else 2)
    raise Fault("unknown matrix instruction")


def cycles_of(instruction, kernel):
    """Return the cycles for which a matrix instruction keeps the matrix unit of its SIMD busy, whatever its depth.

    From AMD's "Matrix Instruction Calculator" and, for gfx950, AMD's library Origami.
    """
    size, _, kind, _ = shape_of(instruction, kernel)
    if WMMA.match(instruction.name):
        if kernel.target.startswith("gfx11"):
            return 32
        return 16 if kind in ("f16", "bf16") else 8
    if kind == "f8f6f4":
        return 2 * size
    if kind == "f64":
        return 64 if kernel.target == "gfx950" else 32
    is_fast = kernel.target != "gfx90a" and kind != "f32"
    return size if is_fast else 2 * size


def modifiers_of(kind):
    """Return the modifiers that a matrix instruction may have."""
    return {"f8f6f4": {"cbsz", "blgp"}, "iu8": {"neg_lo", "clamp"}}.get(kind, set())


def translate(instruction, kernel):
    """Return (compute, put) of a matrix instruction, or raise Fault if it is not known."""
    size, depth, name, layout = shape_of(instruction, kernel)
    unknown = set(instruction.modifiers) - modifiers_of(name)
    if unknown:
        raise Fault(f"unknown modifier {', '.join(sorted(unknown))}")
    kind_a, kind_b = kinds_of(name, instruction.modifiers)
    destination, a, b, c = instruction.operands
    first, a_first, b_first, c_first = (vector_register(text, kernel) for text in instruction.operands)
    rows, k, d_rows, d_columns = layout
    counts = [register_count(text) for text in (destination, a, b)]
    sources = rows.shape[1] * BYTES[kind_a] // 4  # registers of A, and of B
    results = len(d_rows) * (2 if kind_a == "f64" else 1)  # registers of C and D
    if counts != [results, sources, sources]:
        raise Fault(f"operands of {counts} registers")
    is_integer = kind_a in ("i8", "u8")
    if is_integer:
        result = "i32"
    else:
        result = "f64" if kind_a == "f64" else "f32"
    start = constant(c, result) if c_first is None else None
    is_wmma = instruction.name.startswith("v_wmma")
    repeats = is_wmma and rows.shape[1] == 16
    flushes = kernel.target == "gfx90a" and kind_a in ("f16", "bf16")  # CDNA 2 alone
    clamps = "clamp" in instruction.modifiers

    def compute(wave):
        if is_wmma and wave.exec != wave.whole:
            raise Fault("WMMA with inactive lanes, which is undefined")
        x = wave.v[a_first : a_first + sources]
        y = wave.v[b_first : b_first + sources]
        if repeats and ((x[:, :16] != x[:, 16:]).any() or (y[:, :16] != y[:, 16:]).any()):
            raise Fault("WMMA whose lanes 16 to 31 do not repeat lanes 0 to 15")
        x = elements(x, kind_a, kernel.target)
        y = elements(y, kind_b, kernel.target)
        if flushes:
            x = without_denormals(x, kind_a)
            y = without_denormals(y, kind_b)
        wide = np.longdouble if result == "f64" else np.float64
        matrix_a = np.empty((size, depth), wide)
        matrix_b = np.empty((depth, size), wide)
        matrix_a[rows, k] = x
        matrix_b[k, rows] = y
        added = start
        if c_first is not None:
            added = wave.v[c_first : c_first + results]
            added = elements(added, "f64", kernel.target).T if result == "f64" else added.view(DTYPES[result])
        total = (matrix_a @ matrix_b)[d_rows, d_columns] + added  # [register, lane]
        if is_integer:  # float64 holds it exactly
            if clamps:
                total = np.clip(total, -(2.0**31), 2.0**31 - 1)
            return total.astype(np.int64).astype(np.uint32)
        if result == "f64":
            return np.ascontiguousarray(total.astype(np.float64).T).view(np.uint32).T
        total = total.astype(np.float32)
        if flushes:
            total = np.where(np.abs(total) < SMALLEST_NORMAL, np.float32(0), total)
        return total.view(np.uint32)

    def put(wave, total):  # in all lanes: MFMA ignores EXEC
        wave.v[first : first + len(total)] = total

    return compute, put
