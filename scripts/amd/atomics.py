"""Translate atomic instructions: LDS (DS), buffer, global and flat. Each reads, computes and stores in one step.

The lanes of a wave follow one another, the first lane first; the hardware promises no order. So the last bits of a sum
of floats may differ there, and so may the lane that finds a lock open.
"""

import re

import numpy as np

from .arithmetic import bfloat16, bfloat16_bits
from .assembly import Fault
from .machine import DTYPES
from .memory import buffer_places, global_places, lds_addresses, load_lanes, stored_lanes
from .operands import vector_register
from .tables import maximum, minimum

OPERATIONS = {
    "add": lambda old, x: old + x,
    "sub": lambda old, x: old - x,
    "rsub": lambda old, x: x - old,
    "and": lambda old, x: old & x,
    "or": lambda old, x: old | x,
    "xor": lambda old, x: old ^ x,
    "min": minimum,
    "max": maximum,
    "swap": lambda old, x: x,
    "inc": lambda old, x: np.where(old >= x, 0, old + 1).astype(old.dtype),
    "dec": lambda old, x: np.where((old == 0) | (old > x), x, old - 1).astype(old.dtype),
}
SYNONYMS = {"wrxchg": "swap", "storexchg": "swap", "min_num": "min", "max_num": "max", "cmpst": "cmpswap"}
SYNONYMS |= {"pk_add": "add", "smin": "min", "umin": "min", "smax": "max", "umax": "max"}
WORDS = "cmpswap|swap|pk_add|add|sub|smin|umin|smax|umax|min_num|max_num|min|max|and|or|xor|inc|dec"
KIND = r"(?:_([uifb](?:16|32|64)|bf16))?"
MEMORY_NAME = re.compile(rf"(buffer|global|flat)_atomic_({WORDS}){KIND}(_x2)?$")
LDS_NAME = re.compile(
    r"ds_(add|sub|rsub|and|or|xor|min_num|max_num|min|max|inc|dec|pk_add|wrxchg|storexchg|cmpstore|cmpst)"
    r"(_rtn)?_([uifb](?:16|32|64)|bf16)$"
)
RETURNS = {"glc", "sc0"}  # RDNA 4: th:TH_ATOMIC_RETURN


def kind_of(word, kind, doubled):
    """Return the kind of number that an atomic updates; "2f16" and "2bf16" are two of them."""
    if word == "pk_add":
        return f"2{kind}"
    if kind:
        return kind.replace("b", "u") if kind != "bf16" else kind
    letter = "i" if word.startswith("s") and word.endswith(("min", "max")) else "u"
    return letter + ("64" if doubled else "32")


def size_of(kind):
    return 4 if kind.startswith("2") else int(kind[1:]) // 8


def numbers_of(data, kind):
    """Return words or bytes [lane, number] as numbers that can be computed with, one or two per lane."""
    data = np.ascontiguousarray(data)
    if kind == "2bf16":
        return bfloat16(data.view(np.uint16))
    if kind == "2f16":
        return data.view(np.float16)
    return data.view(DTYPES[kind])[:, 0]


def words_of(numbers, kind):
    """Return numbers as words [lane, number]: the inverse of numbers_of."""
    if kind == "2bf16":
        numbers = bfloat16_bits(numbers).astype(np.uint16)
    if numbers.ndim == 1:
        numbers = numbers[:, None]
    return np.ascontiguousarray(numbers).view(np.uint32)


def turns(address):
    """Yield indices of lanes whose addresses differ, so that lanes with one address follow one another."""
    order = np.argsort(address, kind="stable")
    ordered = address[order]
    position = np.arange(len(order))
    first = np.concatenate([[True], ordered[1:] != ordered[:-1]])
    turn = position - np.maximum.accumulate(np.where(first, position, 0))
    for number in range(turn.max(initial=-1) + 1):
        yield order[turn == number]


def update(load, store, address, operation, kind, data, compared=None):
    """Update the numbers at these addresses, and return what was there before, as words [lane, number].

    load, store: of the memory, with addresses. data, compared: words [lane, number]; compared only of a cmpswap.
    """
    size = size_of(kind)
    if (address % size).any():
        raise Fault(f"an atomic at an address that is no multiple of {size}")
    before = np.empty_like(data)
    for lanes in turns(address):
        words = np.ascontiguousarray(load(address[lanes], size)).view(np.uint32)
        before[lanes] = words
        if operation == "cmpswap":
            is_same = (words == compared[lanes]).all(1)
            result = np.where(is_same[:, None], data[lanes], words)
        else:
            result = words_of(OPERATIONS[operation](numbers_of(words, kind), numbers_of(data[lanes], kind)), kind)
        store(address[lanes], result)
    return before


def lds_atomic(instruction, kernel, word, returns, kind):
    operation = SYNONYMS.get(word, word).replace("cmpstore", "cmpswap")
    kind = kind_of(word, kind, False)
    size = size_of(kind)
    operands = [vector_register(text, kernel) for text in instruction.operands]
    destination = operands.pop(0) if returns else None
    address, data, *second = operands
    if set(instruction.modifiers) - {"offset"}:
        raise Fault("unknown modifier")
    offset = int(instruction.modifiers.get("offset", "0"), 0)
    compared = None
    if operation == "cmpswap":  # until RDNA 2 and on CDNA, the number to compare with comes first
        (second,) = second
        data, compared = (second, data) if word == "cmpst" else (data, second)
    counted = (instruction.place, instruction.text)

    def run(wave):
        lanes = wave.lanes
        at = lds_addresses(wave.v[address, lanes], offset)
        wave.lds.banks.add(counted, wave, at, size, load=False)
        wave.lds.mark_update(wave, at, size)
        numbers = stored_lanes(wave, size, lanes, data, "")
        wanted = None if compared is None else stored_lanes(wave, size, lanes, compared, "")
        before = update(wave.lds.read, wave.lds.write, at, operation, kind, numbers, wanted)
        if returns:
            load_lanes(wave, before, lanes, destination, False, "")

    return run


def memory_atomic(instruction, kernel, space, word, kind, doubled):
    operation = SYNONYMS.get(word, word)
    kind = kind_of(word, kind, doubled)
    size = size_of(kind)
    modifiers = instruction.modifiers
    returns = bool(RETURNS & set(modifiers)) or "RETURN" in modifiers.get("th", "")
    operands = list(instruction.operands)
    if space == "buffer":
        data, *rest = operands
        destination = data  # what was there replaces the data
        places = buffer_places(rest, modifiers, size, kernel)
    else:
        destination = operands.pop(0) if returns else None
        address, data, *base = operands
        places = global_places(address, base, modifiers, kernel)
    data = vector_register(data, kernel)
    destination = vector_register(destination, kernel) if returns else None
    counted = (instruction.place, instruction.text)

    def run(wave):
        lanes, at, outside = places(wave)
        if not len(at) and not len(outside):
            return
        wave.memory.count_lines(counted, at, size)
        numbers = stored_lanes(wave, size, lanes, data, "")
        wanted = stored_lanes(wave, size, lanes, data + size // 4, "") if operation == "cmpswap" else None
        before = update(wave.memory.load, wave.memory.store, at, operation, kind, numbers, wanted)
        if returns:
            load_lanes(wave, before, lanes, destination, False, "")
            load_lanes(wave, np.zeros((len(outside), size), np.uint8), outside, destination, False, "")

    return run


def is_atomic(name):
    return "_atomic_" in name or LDS_NAME.match(name) is not None


def translate(instruction, kernel):
    """Return the function of an atomic instruction, or raise Fault if it is not known."""
    if found := LDS_NAME.match(instruction.name):
        word, returns, kind = found.groups()
        return lds_atomic(instruction, kernel, word, bool(returns), kind)
    if found := MEMORY_NAME.match(instruction.name):
        space, word, kind, doubled = found.groups()
        return memory_atomic(instruction, kernel, space, word, kind, bool(doubled))
    raise Fault("unknown atomic instruction")
