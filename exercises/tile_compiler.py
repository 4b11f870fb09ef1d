"""Compile the flash-attention forward kernel with a given tile for a GPU that need not be present."""

import concurrent.futures
import functools
import multiprocessing
import os
import re
from unittest import mock

from common.formulas.occupancy import TARGETS
from common.versions import load_version

TARGET = "gfx942"
POINTERS = {"qkv_ptr": "*fp32", "o_ptr": "*fp32", "lse_ptr": "*fp32"}
CONSTANTS = {"H": 2, "K": 1, "D": 128, "PRECISION": "ieee"}


def obstacle():
    """Return why the installed Triton cannot compile for an AMD GPU, or None where it can."""
    import triton
    from triton.backends import backends

    if "amd" not in backends:
        return f"this build of Triton {triton.__version__} has no compiler for AMD GPUs"
    if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 5) and not os.path.exists("/opt/rocm/llvm/bin/ld.lld"):
        return f"needs Triton 3.5 or newer to be compiled without ROCm, this is {triton.__version__}"
    return None


def compile_tile(queries, keys, warps, stages):
    """Return registers, spilled registers and shared bytes of the kernel, or a sentence if it does not compile."""
    from triton import TritonError, compile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    if why := obstacle():
        return why
    kernel = load_version(3).attention_forward_kernel
    constants = {**CONSTANTS, "BLOCK_Q": queries, "BLOCK_K": keys}
    types = POINTERS | {"T": "i32", "scale": "fp32"}
    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    constexprs = {(i,): constants[name] for i, name in enumerate(kernel.arg_names) if name in constants}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(kernel.arg_names) if name in (*POINTERS, "T")}
    gpu = GPUTarget("hip", TARGET, TARGETS[TARGET].warp_size)
    try:
        source = ASTSource(kernel, signature, constexprs, aligned)
        binary = compile(source, target=gpu, options={"num_warps": warps, "num_stages": stages})
    except (TritonError, RuntimeError, ValueError) as error:
        return f"does not compile: {(str(error).strip().splitlines() or ['no message'])[-1]}"
    count = {
        key: int(re.search(rf"\.{key}:\s*(\d+)", binary.asm["amdgcn"])[1]) for key in ("vgpr_count", "vgpr_spill_count")
    }
    return count["vgpr_count"], count["vgpr_spill_count"], binary.metadata.shared


@functools.cache
def compiled(*tile):
    """Return compile_tile's result from a new process: this one may have replaced the compiler with the interpreter."""
    spawn = multiprocessing.get_context("spawn")
    # The process reads TRITON_INTERPRET when it starts. It ends here: what outlives the verdict counts as the answer's.
    with mock.patch.dict(os.environ, TRITON_INTERPRET="0"), concurrent.futures.ProcessPoolExecutor(1, spawn) as pool:
        return pool.submit(compile_tile, *tile).result()
