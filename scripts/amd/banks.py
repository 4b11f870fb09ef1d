"""Count bank conflicts of LDS accesses, from the addresses of a wave's lanes.

LDS is divided into banks 4 bytes wide. A wave's access is served in phases, each for some of its lanes. In a phase a
bank serves one word per cycle; lanes that access the same word share it. Without conflicts a phase takes one cycle.

Published are the phases of 16-byte accesses (AMD's blog "Avoiding LDS Bank Conflicts") and, measured by the authors of
HipKittens, those of 8 and 16 bytes on gfx950, where loads see 64 banks and stores 32. For other accesses a phase takes
as many consecutive lanes as the banks can serve, a power of two, at most 32.
"""

import functools

import numpy as np

BANKS = 32
# Lanes of a phase, of 32; the other 32 lanes repeat them.
READ_16_BYTES = (
    (0, 1, 2, 3, 20, 21, 22, 23),
    (4, 5, 6, 7, 16, 17, 18, 19),
    (8, 9, 10, 11, 28, 29, 30, 31),
    (12, 13, 14, 15, 24, 25, 26, 27),
)
READ_16_BYTES_GFX950 = (
    (0, 1, 2, 3, 12, 13, 14, 15, 20, 21, 22, 23, 24, 25, 26, 27),
    (4, 5, 6, 7, 8, 9, 10, 11, 16, 17, 18, 19, 28, 29, 30, 31),
)


@functools.cache
def phases(target, size, load):
    """Return the number of banks, and the phase of each of 64 lanes, of an access of `size` bytes per lane."""
    is_gfx950_load = target == "gfx950" and load
    banks = 64 if is_gfx950_load else BANKS
    if size == 16 and is_gfx950_load:
        groups = READ_16_BYTES_GFX950
    elif size == 16 and load and target.startswith("gfx9"):
        groups = READ_16_BYTES
    else:
        count = min(32, banks * 4 // size)
        count = 1 << count.bit_length() - 1  # of the lanes of 12 bytes, 8 and not 10
        groups = np.arange(32).reshape(-1, count)
    phase = np.empty(64, np.int64)
    for number, lanes in enumerate(groups):
        phase[list(lanes)] = number
        phase[np.asarray(lanes) + 32] = number + len(groups)
    return banks, phase


@functools.lru_cache(1 << 16)
def cycles_of(target, size, load, lanes, addresses):
    """Return the cycles that an access takes, and those that it would take without conflicts.

    lanes: numbers of the active lanes, addresses: theirs, both as bytes of int64.
    """
    lanes = np.frombuffer(lanes, np.int64)
    banks, phase = phases(target, size, load)
    words = (np.frombuffer(addresses, np.int64) >> 2)[:, None] + np.arange(max(1, size // 4))  # [lane, word]
    phase = np.broadcast_to(phase[lanes][:, None], words.shape)
    found = np.unique(np.stack([phase.ravel(), words.ravel()]), axis=1)  # lanes that share a word count once
    used, index = np.unique(found[0], return_inverse=True)
    in_bank = np.bincount(index * banks + found[1] % banks, minlength=len(used) * banks).reshape(-1, banks)
    return int(in_bank.max(1).sum()), len(used)


def add_counts(sums, key, counts):
    """Add counts to those of a key, which start at zero."""
    sums[key] = [a + b for a, b in zip(sums.get(key, (0, 0, 0)), counts, strict=True)]


class BankCounts:
    """Sum up the cycles of each LDS instruction of a launch."""

    def __init__(self, target):
        self.target = target
        self.cycles = {}  # (place, instruction) -> [times executed, cycles, cycles without conflicts]

    def add(self, instruction, wave, address, size, load):
        """Count one access of the wave's active lanes."""
        if not len(address):
            return
        lanes = np.arange(wave.width)[wave.lanes]
        relative = address - address[0] // 256 * 256  # the banks repeat after 256 bytes at most
        cycles = cycles_of(self.target, size, load, lanes.tobytes(), relative.tobytes())
        add_counts(self.cycles, instruction, (1, *cycles))
