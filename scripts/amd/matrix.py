"""Translate matrix instructions: MFMA (CDNA) and WMMA (RDNA). D = A · B + C, a few elements of each in every lane.

Which lane holds which element is what the documents give as tables, and AMD's "Matrix Instruction Calculator". Elements
of 16 or 8 bits lie one after another in a lane's registers. Sums are taken in float64 and rounded once, while hardware
rounds on its way, in an order that is not documented.
"""

import re

import numpy as np

from .arithmetic import SMALLEST_NORMAL
from .assembly import Fault
from .operands import constant, register_count, vector_register

MFMA = re.compile(r"v_mfma_f32_(\d+)x\d+x(\d+)_?(f32|xf32|f16|bf16)(_1k)?$")
WMMA = re.compile(r"v_wmma_f32_16x16x16_(f16|bf16)$")


def elements(registers, kind):
    """Return float64 [lane, element] of registers [register, lane]."""
    by_lane = np.ascontiguousarray(registers.T)
    if kind == "bf16":
        return (by_lane.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)
    if kind == "f16":
        return by_lane.view(np.float16).astype(np.float64)
    if kind == "xf32":  # float32 without its last 13 bits
        by_lane = by_lane & np.uint32(0xFFFFE000)
    return by_lane.view(np.float32).astype(np.float64)


def without_denormals(x, kind):
    return np.where(np.abs(x) < (2.0**-14 if kind == "f16" else SMALLEST_NORMAL), 0.0, x)


def mfma_layout(size, depth):
    """Return rows (of A; columns of B) and k of [lane, element], and rows and columns of D [register, lane].

    size: rows of A and columns of B. Each group of `size` lanes holds a slice of k.
    """
    lane = np.arange(64)
    group = lane // size
    each = depth * size // 64
    rows = np.repeat(lane % size, each).reshape(64, each)
    k = group[:, None] * each + np.arange(each)
    register = np.arange(size * size // 64)[:, None]
    if size == 16:
        d_rows = register + 4 * group
    else:
        d_rows = register // 4 * 8 + 4 * group + register % 4
    return rows, k, d_rows, np.broadcast_to(lane % size, d_rows.shape)


def wmma_layout(target):
    """Return the same for the WMMA of a target with waves of 32 lanes.

    RDNA 3: lanes 16 to 31 hold the rows of lanes 0 to 15 again. RDNA 4: each half of the lanes holds two runs of four
    of k.
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
        k = element // 4 * 8 + lane[:, None] // 16 * 4 + element % 4
        d_rows = register + 8 * (lane // 16)
    rows = np.repeat(lane % 16, each).reshape(32, each)
    return rows, k, d_rows, np.broadcast_to(lane % 16, d_rows.shape)


def shape_of(instruction, kernel):
    """Return size, depth, kind and layout of a matrix instruction, or raise Fault if it is not known."""
    if found := MFMA.match(instruction.name):
        size = int(found[1])
        depth = int(found[2])
        return size, depth, found[3], mfma_layout(size, depth)
    if found := WMMA.match(instruction.name):
        return 16, 16, found[1], wmma_layout(kernel.target)
    raise Fault("unknown matrix instruction")


def cycles_of(instruction, kernel):
    """Return the cycles for which a matrix instruction keeps the matrix unit of its SIMD busy, whatever its depth.

    From AMD's "Matrix Instruction Calculator" and, for gfx950, AMD's library Origami.
    """
    size, _, kind, _ = shape_of(instruction, kernel)
    if WMMA.match(instruction.name):
        return 32 if kernel.target.startswith("gfx11") else 16
    is_fast = kernel.target != "gfx90a" and kind != "f32"
    return size if is_fast else 2 * size


def translate(instruction, kernel):
    """Return (compute, put) of a matrix instruction, or raise Fault if it is not known."""
    size, depth, kind, layout = shape_of(instruction, kernel)
    if instruction.modifiers:
        raise Fault(f"unknown modifier {', '.join(instruction.modifiers)}")
    destination, a, b, c = instruction.operands
    first, a_first, b_first, c_first = (vector_register(text, kernel) for text in instruction.operands)
    rows, k, d_rows, d_columns = layout
    counts = [register_count(text) for text in (destination, a, b)]
    per_register = 1 if kind.endswith("f32") else 2
    sources = rows.shape[1] // per_register  # registers of A, and of B
    if counts != [len(d_rows), sources, sources]:
        raise Fault(f"operands of {counts} registers")
    start = constant(c, "f32") if c_first is None else None
    is_wmma = instruction.name.startswith("v_wmma")
    repeats = is_wmma and rows.shape[1] == 16
    flushes = kernel.target == "gfx90a" and kind in ("f16", "bf16")  # CDNA 2 alone

    def compute(wave):
        if is_wmma and wave.exec != wave.whole:
            raise Fault("WMMA with inactive lanes, which is undefined")
        x = wave.v[a_first : a_first + sources]
        y = wave.v[b_first : b_first + sources]
        if repeats and ((x[:, :16] != x[:, 16:]).any() or (y[:, :16] != y[:, 16:]).any()):
            raise Fault("WMMA whose lanes 16 to 31 do not repeat lanes 0 to 15")
        x = elements(x, kind)
        y = elements(y, kind)
        if flushes:
            x = without_denormals(x, kind)
            y = without_denormals(y, kind)
        matrix_a = np.empty((size, depth))
        matrix_b = np.empty((depth, size))
        matrix_a[rows, k] = x
        matrix_b[k, rows] = y
        added = start if c_first is None else wave.v[c_first : c_first + len(d_rows)].view(np.float32)
        product = (matrix_a @ matrix_b)[d_rows, d_columns]  # [register, lane]
        total = (product + added).astype(np.float32)
        if flushes:
            return np.where(np.abs(total) < SMALLEST_NORMAL, np.float32(0), total)
        return total

    def put(wave, total):  # in all lanes: MFMA ignores EXEC
        wave.v[first : first + len(total)] = total.view(np.uint32)

    return compute, put
