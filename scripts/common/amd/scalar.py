"""Translate scalar instructions: SOP1, SOP2, SOPK, SOPC, SOPP and SMEM.

translate(instruction, kernel) returns a function of a wave. It returns PAUSE where the wave waits for others or ends.
"""

import re

import numpy as np

from .assembly import Fault
from .machine import VCC
from .operands import BITS, scalar_reader, scalar_register
from .tables import NO_EFFECT, SCALAR

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
LOAD = re.compile(r"s_load_(?:dwordx?(\d*)|b(\d+))$")
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
    to, words, mask = scalar_register(destination), BITS[result] // 32, (1 << BITS[result]) - 1
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
    read, to, words = scalar_reader(source, f"u{bits}"), scalar_register(destination), int(bits) // 32

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
    to, base = scalar_register(destination), scalar_reader(base, "u64")
    offset = scalar_reader(offset[0], "u32") if offset and offset[0] not in ("null", "off") else lambda wave: 0
    immediate = int(instruction.modifiers.get("offset", "0"), 0)

    def run(wave):
        address = np.array([base(wave) + offset(wave) + immediate], np.int64)
        places = wave.memory.places(address, 4 * words, store=False)[0]
        wave.set_scalar(to, int.from_bytes(wave.memory.bytes[places].tobytes(), "little"), words)

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
    if name in SCALAR:
        return arithmetic(instruction)
    raise Fault("unknown scalar instruction")
