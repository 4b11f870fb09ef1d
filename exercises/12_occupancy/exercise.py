"""Exercise 12: waves per SIMD, and an attention tile that fits its GPU."""

SIMDS = 4  # per compute unit or multiprocessor

# TODO: TILE = (queries, keys, warps, stages) of the attention forward in float32 with heads of 128, for gfx942
# end of TODO


def occupancy(registers, shared, warps, simd_registers, granule, most_waves, unit_shared, shared_granule):
    """Return the waves per SIMD on a unit full of programs.

    registers: per thread; shared: bytes per program, 0 if it needs none; warps: per program; simd_registers and
    most_waves: of one SIMD; unit_shared: bytes of the whole unit; granule and shared_granule: allocation units.
    """
    # TODO: compute how many whole programs registers and shared memory allow, then the waves per SIMD
    # end of TODO


def run(registers, shared, warps, waves, **limits):
    """Write the waves per SIMD [kernels] for registers, shared, warps [kernels]."""
    for i, sizes in enumerate(zip(registers.tolist(), shared.tolist(), warps.tolist(), strict=True)):
        waves[i] = occupancy(*map(int, sizes), **limits)
