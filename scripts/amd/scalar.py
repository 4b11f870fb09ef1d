"""Translate scalar instructions: SOP1, SOP2, SOPK, SOPC, SOPP and SMEM.

translate(instruction, kernel) returns a function of a wave. It returns PAUSE where the wave waits for others or ends.
"""

import re

import numpy as np

from .arithmetic import flush
from .assembly import Fault
from .machine import VCC
from .operands import BITS, reader, scalar_reader, scalar_register
from .tables import COMPARISONS, NO_EFFECT, SCALAR, VECTOR

PAUSE = True
RELATIONS = {
    "eq": lambda a, b: a == b,
    "lg": lambda a, b: a != b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
}
COMPARE = re.compile(r"s_cmp(k?)_(eq|lg|gt|ge|lt|le)_([iu])(32|64)$")
SAVE_EXEC = re.compile(r"s_(\w+)_saveexec_b(32|64)$")
FLOAT_COMPARE = re.compile(r"s_cmp_(\w+)_f32$")
LOAD = re.compile(r"s_load_(?:dwordx?(\d*)|b(\d+))$")
LOAD_PART = re.compile(r"s_load_([iu])(8|16)$")
BRANCHES = {
    "s_branch": lambda wave: True,
    "s_cbranch_scc0": lambda wave: not wave.scc,
    "s_cbranch_scc1": lambda wave: wave.scc,
    "s_cbranch_vccz": lambda wave: not wave.get_scalar(VCC, wave.words),
    "s_cbranch_vccnz": lambda wave: wave.get_scalar(VCC, wave.words),
    "s_cbranch_execz": lambda wave: not wave.exec,
    "s_cbranch_execnz": lambda wave: wave.exec,
}


def arithmetic(instruction):
    """Translate an instruction of the table."""
    sources, result, function, flag = SCALAR[instruction.name]
    destination, *texts = instruction.operands
    if sources[0] == "old":
        texts = [destination, *texts]
    if sources[-1] == "scc":
        texts = [*texts, "scc"]
    kinds = [{"old": result, "scc": "u32"}.get(kind, kind) for kind in sources]
    if len(texts) != len(kinds):
        raise Fault("a wrong number of operands")
    readers = [scalar_reader(text, kind) for text, kind in zip(texts, kinds, strict=True)]
    to = scalar_register(destination)
    words = BITS[result] // 32
    mask = (1 << BITS[result]) - 1
    if to is None:
        raise Fault(f"unknown destination {destination}")

    def run(wave):
        values = [read(wave) for read in readers]
        value = function(*values)
        if flag:
            scc = int(flag(value, *values))
        wave.set_scalar(to, value & mask, words)
        if flag:
            wave.scc = scc

    return run


def comparison(kind_and_relation, instruction):
    constant, relation, letter, bits = kind_and_relation
    first, second = instruction.operands
    compare = RELATIONS[relation]
    a = scalar_reader(first, letter + bits)
    # A constant of SOPK has 16 bits, with the sign of the comparison.
    b = scalar_reader(second, letter + ("16" if constant else bits))

    def run(wave):
        wave.scc = int(compare(a(wave), b(wave)))

    return run


def float_comparison(relation, instruction, kernel):
    """Translate a comparison of floats (RDNA 3.5 and 4)."""
    a, b = (reader(text, "f32", kernel) for text in instruction.operands)

    def run(wave):
        wave.scc = int(COMPARISONS[relation](a(wave), b(wave))[0])

    return run


def float_arithmetic(name, instruction, kernel):
    """Translate an instruction of floats in scalar registers (RDNA 3.5 and 4): it computes what the vector one does."""
    kinds, result, function = VECTOR[name]
    destination, *texts = instruction.operands
    if kinds[-1] == "old":
        texts.append(destination)
    readers = [reader(text, result if kind == "old" else kind, kernel) for text, kind in zip(texts, kinds, strict=True)]
    to = scalar_register(destination)

    def run(wave):
        value = function(*(read(wave) for read in readers))
        if wave.flushes:
            value = flush(value)
        wave.set_scalar(to, int(value.view(np.uint32)[0]))

    return run


def bit_test(instruction):
    """Translate s_bitcmp0 and s_bitcmp1: SCC says whether a bit has this value."""
    a, b = (scalar_reader(text, "u32") for text in instruction.operands)
    wanted = int(instruction.name[len("s_bitcmp")])

    def run(wave):
        wave.scc = int(a(wave) >> (b(wave) & 31) & 1 == wanted)

    return run


def save_exec(operation, bits, instruction):
    """Translate s_<op>_saveexec: keep EXEC, and combine it with a mask."""
    destination, source = instruction.operands
    _, _, function, _ = SCALAR[f"s_{operation}_b{bits}"]
    read = scalar_reader(source, f"u{bits}")
    to = scalar_register(destination)
    words = int(bits) // 32

    def run(wave):
        old = wave.exec
        mask = function(read(wave), old) & wave.whole
        wave.set_scalar(to, old, words)
        wave.set_exec(mask)
        wave.scc = int(mask != 0)

    return run


def branch(instruction, labels):
    condition = BRANCHES[instruction.name]
    target = labels[instruction.operands[0]]

    def run(wave):
        if condition(wave):
            wave.pc = target

    return run


def load(words, instruction):
    """Translate a load of scalar registers (SMEM)."""
    destination, base, *offset = instruction.operands
    to = scalar_register(destination)
    base = scalar_reader(base, "i64")
    offset = scalar_reader(offset[0], "u32") if offset and offset[0] not in ("null", "off") else lambda wave: 0
    immediate = int(instruction.modifiers.get("offset", "0"), 0)

    def run(wave):
        address = np.array([base(wave)], np.int64) + (offset(wave) + immediate)
        wave.set_scalar(to, int.from_bytes(wave.memory.load(address, 4 * words).tobytes(), "little"), words)

    return run


def load_part(bits, signed, instruction):
    """Translate a load of 8 or 16 bits into a scalar register (RDNA 4)."""
    destination, base, offset = instruction.operands
    to = scalar_register(destination)
    base = scalar_reader(base, "i64")
    offset = scalar_reader(offset, "u32")
    immediate = int(instruction.modifiers.get("offset", "0"), 0)

    def run(wave):
        address = np.array([base(wave)], np.int64) + (offset(wave) + immediate)
        data = wave.memory.load(address, bits // 8).tobytes()
        wave.set_scalar(to, int.from_bytes(data, "little", signed=signed) & 0xFFFFFFFF)

    return run


def end(wave):
    wave.ended = True
    return PAUSE


def barrier(wave):
    """Arrive at a barrier and wait for the other waves."""
    wave.barriers_reached += 1
    return PAUSE


def signal_barrier(wave):
    """Arrive at a barrier (RDNA 4): the wave goes on until it waits."""
    wave.barriers_reached += 1


def wait_for_barrier(wave):
    if wave.barriers_reached == wave.barriers_passed:
        raise Fault("waits for a barrier without a signal")
    return PAUSE


MODE = re.compile(r"hwreg\(HW_REG_(?:WAVE_)?MODE, (\d+), (\d+)\)")
# First bit and bits of a mode, and its values.
ROUND = ("2", "2")
DENORMALS = ("4", "2")
FP16_OVFL = ("23", "1")
NEAREST = 0
FLUSH = 0
KEEP = 3


def set_denormals(mode):
    """Return the function that lets float32 keep denormal numbers, or flush all to zero."""
    if mode not in (FLUSH, KEEP):
        raise Fault("unknown mode")

    def run(wave):
        wave.flushes = mode == FLUSH

    return run


def set_mode(instruction, kernel):
    """Translate a change of the modes of floats that kernels make: denormal float32, and FP16_OVFL.

    With FP16_OVFL, float16 and fp8 that overflow become the largest number, not infinity or NaN. Of float16 it is not
    modelled: one that becomes infinite is refused then (vector.without_overflow).
    """
    found = MODE.fullmatch(instruction.operands[0])
    which = found.groups() if found else None
    value = int(instruction.operands[1], 0)
    if which == DENORMALS:
        return set_denormals(value)
    if which == ROUND and value == NEAREST:  # as when the kernel started
        return lambda wave: None
    if which != FP16_OVFL or value not in (0, 1):
        raise Fault("unknown mode")
    if any(half.name.startswith("v_cvt_pk_f16_f32") for pair in kernel.code for half in pair):
        raise Fault("the mode FP16_OVFL with v_cvt_pk_f16_f32")

    def run(wave):
        wave.limits = value == 1

    return run


def set_denorm_mode(instruction):
    """Translate s_denorm_mode (RDNA): two bits for float32, then two for float16 and float64."""
    mode = int(instruction.operands[0], 0)
    if mode >> 2 != KEEP:
        raise Fault("unknown mode")
    return set_denormals(mode & 3)


FIXED = {"s_endpgm": end, "s_barrier": barrier, "s_barrier_wait": wait_for_barrier}


def translate(instruction, kernel):
    """Return the function of a scalar instruction, or raise Fault if it is not known."""
    name = instruction.name
    if name in NO_EFFECT:
        return lambda wave: None
    if name.startswith("s_barrier_") and instruction.operands != ("-1",):
        raise Fault("a barrier other than the workgroup's")
    if name == "s_barrier_signal":
        return signal_barrier
    if name in FIXED:
        return FIXED[name]
    if name == "s_setreg_imm32_b32":
        return set_mode(instruction, kernel)
    if name == "s_denorm_mode":
        return set_denorm_mode(instruction)
    if name == "s_round_mode" and instruction.operands == (str(NEAREST),):
        return lambda wave: None
    if name in BRANCHES:
        return branch(instruction, kernel.labels)
    if found := COMPARE.match(name):
        return comparison(found.groups(), instruction)
    if name.startswith("s_bitcmp") and name.endswith("_b32"):
        return bit_test(instruction)
    if found := SAVE_EXEC.match(name):
        return save_exec(*found.groups(), instruction)
    if found := LOAD.match(name):
        words = int(found[2]) // 32 if found[2] else int(found[1] or 1)
        return load(words, instruction)
    if found := LOAD_PART.match(name):
        return load_part(int(found[2]), found[1] == "i", instruction)
    if name in SCALAR:
        return arithmetic(instruction)
    if (found := FLOAT_COMPARE.match(name)) and found[1] in COMPARISONS:
        return float_comparison(found[1], instruction, kernel)
    vector_name = re.sub(r"^(v_s|s)_", "v_", name)
    if vector_name in VECTOR and vector_name.endswith("32") and "f32" in vector_name:
        return float_arithmetic(vector_name, instruction, kernel)
    raise Fault("unknown scalar instruction")
