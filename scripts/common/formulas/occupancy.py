"""Compute the occupancy of a kernel: how many waves (warps) share a SIMD of a GPU that need not be present."""

from typing import NamedTuple


class Target(NamedTuple):
    """Limits of a compute unit (AMD) or multiprocessor (NVIDIA), which has four SIMDs (NVIDIA: partitions).

    On RDNA a work-group processor, two compute units, counts as one.
    """

    backend: str
    warp_size: int
    data_centre: bool
    registers: int  # per lane of a SIMD
    granule: int  # registers are allocated in multiples of it
    most_waves: int  # on a SIMD
    shared: int  # bytes that one program may request
    unit_shared: int  # bytes of all programs on the unit
    shared_granule: int
    shared_overhead: int  # bytes per program that the program cannot use
    most_programs: int  # on the unit
    units: int  # of the most common GPU of this kind


KB = 1024
# AMD: LLVM's AMDGPUUsage (granules of registers and LDS), instruction set manuals of CDNA2 to CDNA4 and RDNA3 to RDNA4.
# NVIDIA: CUDA C++ Programming Guide, technical specifications per compute capability; 64 K registers of an SM are 512
# per lane of its four partitions, and a warp allocates them in units of 256, which is 8 per lane.
TARGETS = {
    "gfx90a": Target("hip", 64, True, 512, 8, 8, 64 * KB, 64 * KB, 512, 0, 16, 104),
    "gfx942": Target("hip", 64, True, 512, 8, 8, 64 * KB, 64 * KB, 512, 0, 16, 304),
    "gfx950": Target("hip", 64, True, 512, 8, 8, 160 * KB, 160 * KB, 1280, 0, 16, 256),
    "gfx1100": Target("hip", 32, False, 1536, 24, 16, 64 * KB, 128 * KB, 512, 0, 32, 48),
    "gfx1151": Target("hip", 32, False, 1536, 24, 16, 64 * KB, 128 * KB, 512, 0, 32, 20),
    "gfx1201": Target("hip", 32, False, 1536, 24, 16, 64 * KB, 128 * KB, 512, 0, 32, 32),
    "sm_80": Target("cuda", 32, True, 512, 8, 16, 163 * KB, 164 * KB, 128, KB, 32, 108),
    "sm_90": Target("cuda", 32, True, 512, 8, 16, 227 * KB, 228 * KB, 128, KB, 32, 132),
    "sm_100": Target("cuda", 32, True, 512, 8, 16, 227 * KB, 228 * KB, 128, KB, 32, 148),
}
SIMDS = 4
TENSOR_MEMORY = 512  # columns of a Blackwell multiprocessor


def round_up(value, granule):
    return -(-value // granule) * granule


def occupancy(target, registers, shared, warps, tensor_memory=0):
    """Return the waves per SIMD on a unit full of programs, and the resource that limits them.

    registers: per thread; shared: bytes per program; warps: per program; tensor_memory: columns per program.
    """
    waves = min(target.most_waves, target.registers // round_up(max(registers, 1), target.granule))
    bytes_each = round_up(shared, target.shared_granule) + target.shared_overhead
    programs = {
        "waves": target.most_waves * SIMDS // warps,
        "registers": waves * SIMDS // warps,
        "programs": target.most_programs,
        "shared": target.unit_shared // bytes_each if bytes_each else target.most_programs,
        "tensor memory": TENSOR_MEMORY // tensor_memory if tensor_memory else target.most_programs,
    }
    limit = min(programs, key=programs.get)
    return programs[limit] * warps / SIMDS, limit
