"""Exercise 12: waves on a SIMD, and a tile of attention that fits its GPU."""

SIMDS = 4  # of a compute unit or multiprocessor

TILE = (64, 32, 8, 1)


def occupancy(registers, shared, warps, simd_registers, granule, most_waves, unit_shared, shared_granule):
    """Waves on a SIMD when a unit is full of programs of `warps` warps; registers of a thread, bytes of a program.

    simd_registers and most_waves are those of one SIMD, unit_shared is of the whole unit.
    """
    waves = min(most_waves, simd_registers // (-(-registers // granule) * granule))
    programs = min(waves * SIMDS // warps, unit_shared // (-(-shared // shared_granule) * shared_granule))
    return programs * warps / SIMDS


def run(registers, shared, warps, waves, **limits):
    """registers, shared, warps [kernels] -> waves [kernels]."""
    for i, sizes in enumerate(zip(registers.tolist(), shared.tolist(), warps.tolist(), strict=True)):
        waves[i] = occupancy(*map(int, sizes), **limits)
