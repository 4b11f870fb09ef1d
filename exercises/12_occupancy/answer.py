"""Exercise 12: waves per SIMD, and an attention tile that fits its GPU."""

SIMDS = 4  # per compute unit or multiprocessor

TILE = (64, 32, 8, 1)


def occupancy(registers, shared, warps, simd_registers, granule, most_waves, unit_shared, shared_granule):
    """Return the waves per SIMD on a unit full of programs.

    registers: per thread; shared: bytes per program, 0 if it needs none; warps: per program; simd_registers and
    most_waves: of one SIMD; unit_shared: bytes of the whole unit; granule and shared_granule: allocation units.
    """
    waves = min(most_waves, simd_registers // (-(-registers // granule) * granule))
    programs = min(waves * SIMDS // warps, unit_shared // (-(-max(shared, 1) // shared_granule) * shared_granule))
    return programs * warps / SIMDS


def run(registers, shared, warps, waves, **limits):
    """Write the waves per SIMD [kernels] for registers, shared, warps [kernels]."""
    for i, sizes in enumerate(zip(registers.tolist(), shared.tolist(), warps.tolist(), strict=True)):
        waves[i] = occupancy(*map(int, sizes), **limits)
