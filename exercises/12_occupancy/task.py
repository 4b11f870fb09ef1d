"""Exercise 12: what run() must compute, and typical mistakes."""

import torch

from common.occupancy import TARGETS
from common.occupancy import occupancy as reference
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


def find_tile_fault(tile):
    """Return why a tile cannot be launched on the target or is no good there, or None."""
    result = compiled(*tile)
    if isinstance(result, str):
        return f"it {result}"
    registers, spills, shared = result
    waves, limit = reference(TARGETS[TARGET], registers, shared, tile[2])
    if shared > TARGETS[TARGET].shared:
        return f"it needs {shared:,} bytes of LDS, and a program can have {TARGETS[TARGET].shared:,}"
    if spills:
        return f"it spills {spills} of its registers to memory: a thread has at most 512"
    if tile[0] < LEAST_QUERIES:
        return f"it owns {tile[0]} queries, at least {LEAST_QUERIES} are required"
    if waves < LEAST_WAVES:
        return f"{registers} registers per thread leave {waves:g} wave per SIMD ({limit}), {LEAST_WAVES} are required"
    return None


def check_tile(module, source):
    """Compile the attention forward with TILE for the target; raise Wrong if it cannot be launched or is no good."""
    tile = getattr(module, "TILE", None)
    positive = isinstance(tile, tuple) and len(tile) == 4 and all(isinstance(n, int) and n > 0 for n in tile)
    if not positive or any(n & (n - 1) for n in tile[:3]) or min(tile[:2]) < 16:
        wanted = "(queries, keys, warps, stages): powers of two, queries and keys at least 16"
        raise Wrong("tile", "TILE", f"TILE must be {wanted}, got {tile}")
    fault = find_tile_fault(tile)
    if fault:
        raise Wrong("tile", "TILE", f"TILE {tile} on {TARGET}: {fault}")


TASK = Task(
    cases={
        "registers limit": {"target": "gfx942", "sizes": [(128, 512, 4), (130, 512, 4), (222, 1024, 4)]},
        "shared memory limits": {"target": "gfx942", "sizes": [(40, 32768, 4), (40, 24000, 8)]},
        "granules": {"target": "gfx942", "sizes": [(97, 21600, 4), (169, 10000, 2)]},
        "many waves": {"target": "gfx942", "sizes": [(16, 512, 4), (100, 512, 8)]},
        "wide and narrow programs": {"target": "gfx942", "sizes": [(160, 4096, 8), (160, 4096, 16), (90, 9000, 1)]},
        "another GPU": {"target": "gfx1100", "sizes": [(256, 8192, 4), (200, 30000, 8), (100, 16384, 4)]},
    },
    inputs=inputs,
    define=define,
    names={"waves": "kernel"},
    wide=("registers", "shared", "warps"),
    dtypes=(torch.float32,),
    kernel=False,
    then=check_tile,
    mistakes={
        "registers not rounded": Mistake("(-(-registers // granule) * granule)", "registers", "waves"),
        "shared bytes not rounded": Mistake("(-(-shared // shared_granule) * shared_granule)", "shared", "waves"),
        "one SIMD instead of four": Mistake("waves * SIMDS // warps", "waves // warps", "waves"),
        "half a program": Mistake("waves * SIMDS // warps", "waves * SIMDS / warps", "waves"),
        "shared memory forgotten": Mistake(
            "unit_shared // (-(-shared // shared_granule) * shared_granule)", "99", "waves"
        ),
        "more waves than a SIMD can hold": Mistake("min(most_waves, simd_registers", "min(99, simd_registers", "waves"),
        "two stages of a large tile": Mistake("(64, 32, 8, 1)", "(64, 64, 4, 2)", "TILE", "tile"),
        "a tile that spills": Mistake("(64, 32, 8, 1)", "(64, 64, 8, 1)", "TILE", "tile"),
        "one wave": Mistake("(64, 32, 8, 1)", "(64, 64, 4, 1)", "TILE", "tile"),
        "too few queries": Mistake("(64, 32, 8, 1)", "(32, 32, 4, 1)", "TILE", "tile"),
        "no power of two": Mistake("(64, 32, 8, 1)", "(96, 32, 8, 1)", "TILE", "tile"),
    },
)
