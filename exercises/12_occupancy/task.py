"""Exercise 12: what run() must compute, and typical mistakes."""

import torch

from common.formulas.occupancy import TARGETS
from common.formulas.occupancy import occupancy as reference
from grading import Mistake, Task, Wrong
from tile_compiler import TARGET, compiled

LEAST_QUERIES, LEAST_WAVES = 64, 2


def inputs(target, sizes):
    """Return registers per thread, shared bytes and warps per program of some kernels, and the limits of a GPU."""
    registers, shared, warps = (torch.tensor(column, dtype=torch.float32) for column in zip(*sizes, strict=True))
    gpu = TARGETS[target]
    return {
        "registers": registers,
        "shared": shared,
        "warps": warps,
        "simd_registers": gpu.registers,
        "granule": gpu.granule,
        "most_waves": gpu.most_waves,
        "unit_shared": gpu.unit_shared,
        "shared_granule": gpu.shared_granule,
    }


def define(registers, shared, warps, simd_registers, **limits):
    target = TARGETS[TARGET]._replace(registers=simd_registers, **limits)
    rows = zip(registers.tolist(), shared.tolist(), warps.tolist(), strict=True)
    waves = [reference(target, *map(int, row))[0] for row in rows]
    return {"waves": torch.tensor(waves, dtype=registers.dtype, device=registers.device)}


def describe_kernel(module, name, index, inputs):
    registers, shared, warps = (int(inputs[key][index]) for key in ("registers", "shared", "warps"))
    return f"{registers} registers, {shared:,} bytes, {warps} warps"


def count(
    registers, shared, warps, simd_registers, granule, most_waves, unit_shared, shared_granule,
    simds=4, whole=True, with_shared=True,
):  # fmt: skip
    """Return a wrong answer's waves: the right ones if nothing is changed."""
    registers, shared = (
        torch.ceil(value / step) * step for value, step in ((registers, granule), (shared, shared_granule))
    )
    waves = (simd_registers // registers).clamp(max=most_waves)
    programs = waves * simds / warps
    if whole:
        programs = programs.floor()
    if with_shared:
        programs = torch.minimum(programs, unit_shared // shared)  # inf where there is none
    return {"waves": programs * warps / 4}


def find_tile_fault(tile, registers, spills, shared):
    """Return why a tile cannot be launched on the target or is no good there, or None."""
    waves, limit = reference(TARGETS[TARGET], registers, shared, tile[2])
    if shared > TARGETS[TARGET].shared:
        return f"it needs {shared:,} bytes of LDS, but a program can have only {TARGETS[TARGET].shared:,}"
    if spills:
        return f"it spills {spills} registers to memory, because a thread has at most 512"
    if tile[0] < LEAST_QUERIES:
        return f"it owns {tile[0]} queries, but it must own at least {LEAST_QUERIES}"
    if waves < LEAST_WAVES:
        return f"{registers} registers per thread leave {waves:g} wave per SIMD ({limit}): it takes {LEAST_WAVES}"
    return None


def check_tile(module, source):
    """Compile the attention forward with TILE for the target, and return what it became.

    Raise Wrong if it cannot be launched or is no good.
    """
    tile = getattr(module, "TILE", None)
    positive = isinstance(tile, tuple) and len(tile) == 4 and all(isinstance(n, int) and n > 0 for n in tile)
    if not positive or any(n & (n - 1) for n in tile[:3]) or min(tile[:2]) < 16:
        wanted = "(queries, keys, warps, stages): powers of two, queries and keys at least 16"
        raise Wrong("tile", "TILE", f"TILE must be {wanted}, got {tile}")
    result = compiled(*tile)
    fault = f"it {result}" if isinstance(result, str) else find_tile_fault(tile, *result)
    if fault:
        raise Wrong("tile", "TILE", f"TILE {tile} on {TARGET}: {fault}")
    registers, _, shared = result
    waves, limit = reference(TARGETS[TARGET], registers, shared, tile[2])
    became = f"{registers} registers per thread, {shared:,} bytes of LDS, {waves:g} waves per SIMD ({limit})"
    return f"TILE {tile} on {TARGET}: {became}"


TASK = Task(
    cases={
        "registers limit": {"target": "gfx942", "sizes": [(128, 512, 4), (130, 512, 4), (222, 1024, 4)]},
        "shared memory limits": {"target": "gfx942", "sizes": [(40, 32768, 4), (40, 24000, 8)]},
        "granules": {"target": "gfx942", "sizes": [(97, 21600, 4), (169, 10000, 2)]},
        "many waves": {"target": "gfx942", "sizes": [(16, 512, 4), (100, 512, 8)]},
        "wide and narrow programs": {"target": "gfx942", "sizes": [(160, 4096, 8), (160, 4096, 16), (90, 9000, 1)]},
        "another GPU": {"target": "gfx1100", "sizes": [(256, 8192, 4), (200, 30000, 8), (100, 16384, 4)]},
        "many waves of another GPU": {"target": "gfx1100", "sizes": [(90, 512, 8), (100, 512, 8)]},
        "other granules of LDS": {"target": "gfx950", "sizes": [(64, 20000, 4), (64, 32300, 4)]},
        "no LDS": {"target": "gfx942", "sizes": [(128, 0, 4), (200, 0, 8)]},
    },
    suspects={
        "the registers are not rounded up to granules": lambda **i: count(**i | {"granule": 1}),
        "the bytes of LDS are not rounded up to granules": lambda **i: count(**i | {"shared_granule": 1}),
        "one SIMD is counted; a unit has four": lambda **i: count(**i, simds=1),
        "half a program is counted: round the programs down": lambda **i: count(**i, whole=False),
        "LDS is forgotten: all programs of the unit share it": lambda **i: count(**i, with_shared=False),
        "most_waves is forgotten: a SIMD holds no more": lambda **i: count(**i | {"most_waves": 1 << 20}),
    },
    owner=describe_kernel,
    inputs=inputs,
    define=define,
    names={"waves": "kernel"},
    wide=("registers", "shared", "warps"),
    dtypes=(torch.float32,),
    kernel=False,
    then=check_tile,
    mistakes={
        "registers not rounded": Mistake(
            "(-(-registers // granule) * granule)", "registers", "waves", says="the registers are not rounded up"
        ),
        "shared bytes not rounded": Mistake(
            "(-(-max(shared, 1) // shared_granule) * shared_granule)",
            "max(shared, 1)",
            "waves",
            says="LDS are not rounded up",
        ),
        "one SIMD instead of four": Mistake("waves * SIMDS // warps", "waves // warps", "waves", says="one SIMD"),
        "half a program": Mistake("waves * SIMDS // warps", "waves * SIMDS / warps", "waves", says="half a program"),
        "shared memory forgotten": Mistake(
            "unit_shared // (-(-max(shared, 1) // shared_granule) * shared_granule)",
            "99",
            "waves",
            says="LDS is forgotten",
        ),
        "more waves than a SIMD can hold": Mistake(
            "min(most_waves, simd_registers", "min(99, simd_registers", "waves", says="most_waves is forgotten"
        ),
        "waves of this GPU": Mistake("min(most_waves,", "min(8,", "waves", says="90 registers, 512 bytes, 8 warps"),
        "LDS granule of this GPU": Mistake(
            "(-(-max(shared, 1) // shared_granule) * shared_granule)", "(-(-max(shared, 1) // 512) * 512)", "waves"
        ),
        "no kernel without LDS": Mistake("max(shared, 1)", "shared", None, "crash", says="ZeroDivisionError"),
        "two stages of a large tile": Mistake("(64, 32, 8, 1)", "(64, 64, 4, 2)", "TILE", "tile"),
        "a tile that spills": Mistake("(64, 32, 8, 1)", "(64, 64, 8, 1)", "TILE", "tile"),
        "one wave": Mistake("(64, 32, 8, 1)", "(64, 64, 4, 1)", "TILE", "tile"),
        "too few queries": Mistake("(64, 32, 8, 1)", "(32, 32, 4, 1)", "TILE", "tile"),
        "no power of two": Mistake("(64, 32, 8, 1)", "(96, 32, 8, 1)", "TILE", "tile"),
    },
)
