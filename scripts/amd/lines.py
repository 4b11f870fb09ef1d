"""Count the cache lines that memory accesses touch, from the addresses of a wave's lanes (coalescing).

One access of a wave asks the cache for each line that a byte of an active lane lies in. The fewest lines possible would
hold the same bytes without gaps. Bytes that several lanes share count once.

Lines are those of the cache next to the lanes: 64 bytes on gfx90a, 128 on RDNA 3 (both from Linux's driver, in
kfd_crat.c) and on gfx942 and gfx950 (AMD's rocprof-compute). For RDNA 4 we assume RDNA 3's.
"""

import functools

import numpy as np

from .banks import add_counts


@functools.lru_cache(1 << 16)
def lines_of(line, size, addresses):
    """Return the cache lines that an access of `size` bytes per lane touches, and the fewest that could hold its bytes.

    line: bytes of a cache line. addresses: of the active lanes, as bytes of int64.
    """
    first = np.unique(np.frombuffer(addresses, np.int64))  # lanes with the same address count once
    last = first + size - 1
    touched = np.unique(np.concatenate([first // line, last // line]))  # size <= line: no lane has bytes in between
    count = size + np.minimum(np.diff(first), size).sum()  # of bytes: those of two lanes may overlap
    return len(touched), int(-(-count // line))


class LineCounts:
    """Sum up the cache lines of each memory instruction of a launch."""

    def __init__(self, target):
        self.line = 64 if target == "gfx90a" else 128
        self.lines = {}  # (place, instruction) -> [times executed, cache lines, the fewest possible]

    def add(self, instruction, address, size):
        """Count one access of the active lanes. Line 0 begins at address 0."""
        if len(address):
            relative = address - address[0] // self.line * self.line
            add_counts(self.lines, instruction, (1, *lines_of(self.line, size, relative.tobytes())))
