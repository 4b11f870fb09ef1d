"""Run version 3's operations through the interpreter of AMD's instructions, and return how far they are from float64.

In a process of its own: Triton decides when it is imported whether its kernels can be compiled.
"""

import contextlib
import dataclasses
import time
from collections import Counter
from unittest import mock

import torch

import kernel_cases
from amd.assembly import Fault
from amd.launch import executed_version
from common.versions import load_version, relative_error
from kernel_cases import attention_case, loss_case, norm_case, rope_case, swiglu_case

TARGETS = ("gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1151", "gfx1201")
DTYPES = ("float32", "bfloat16", "float16")
OPTIMIZERS = ("adamw", "adamw, scaled")


# Small ones, with sizes that no tile divides.
CASES = {
    "norm": lambda: norm_case(13, 200),
    "norm, nothing added": lambda: norm_case(2, 5, 48, branch=False),
    "norm, large": lambda: norm_case(3, 700),
    "rope": lambda: rope_case(2, 19, 3, 1, 32),
    "swiglu": lambda: swiglu_case(19, width=50),
    "swiglu, exponential overflows": lambda: swiglu_case(3, 11, width=16, scale=60.0),
    "loss": lambda: loss_case(7, V=1500),
    "loss, in place and with ignored rows": lambda: kernel_cases.linear_loss_case(7, C=8, V=1500, chunk=4, ignored=5),
    "loss, several tiles": lambda: loss_case(2, V=5000, first=200.0),
    "attention": lambda: attention_case(1, 43, 2, 1, 64, rotated=True),
    "attention, two sequences": lambda: attention_case(2, 35, 4, 2, 64),
    "attention, D=16": lambda: attention_case(1, 37, 4, 2, 16, rotated=True),
    "attention, D=32": lambda: attention_case(1, 37, 4, 2, 32, rotated=True),
    "attention, one token": lambda: attention_case(3, 1, 4, 1, 64),
    "attention, small values": lambda: attention_case(1, 33, 2, 1, 64, scale=1e-3, value_scale=1e-3),
}
# In bfloat16, on the targets that multiply in fp8.
FP8_TARGETS = ("gfx942", "gfx950", "gfx1201")
FP8_CASES = {
    f"{operation}, {name}": case for operation, cases in kernel_cases.FP8_CASES.items() for name, case in cases.items()
}
# Where a target computes something else: (target, case, dtype) -> part of what the check says.
KNOWN = {
    # Its matrix units take float16 below 6e-5 for zero.
    ("gfx90a", "attention, small values", "float16"): "0 instead of",
}


@contextlib.contextmanager
def fp8_of(script, target):
    """Multiply fp8 in float32, which PyTorch may be unable to on this CPU, and define it by the target's e4m3."""
    dtype = script.fp8_dtype(target)

    def fp8_matmul(x_q, x_scale, w_q, w_scale):
        return ((x_q.float() @ w_q.float().t()) * x_scale * w_scale).bfloat16()

    with (
        mock.patch.object(script, "fp8_matmul", fp8_matmul),
        mock.patch.object(kernel_cases, "FP8_LIMIT", torch.finfo(dtype).max),
        mock.patch.object(kernel_cases, "to_fp8", lambda x: x.to(dtype).float()),
    ):
        yield


def run(target, case, dtype, tile=0, order=1):
    """Return {"errors": {tensor: (error, bound)}, "fault": sentence or "", "instructions": {kind: number}, ...}.

    case: the name of one of CASES or OPTIMIZERS, or the arguments of an attention_case. tile: number of the tile among
    those that attention may choose on the target. order: 1 or -1, the order of the waves of a workgroup.
    """
    script = load_version(3)
    dtype = getattr(torch, dtype)
    cpu = torch.device("cpu")
    torch.set_num_threads(1)
    errors = {}
    judge = kernel_cases.judge

    def noting(tensor, result, plain, exact, extra=0.0):
        bound = 2 * relative_error(plain, exact) + 1e-6 + extra
        if not relative_error(result, exact) <= errors.get(tensor, (-1, 0))[0]:  # the worst of several steps
            errors[tensor] = relative_error(result, exact), bound
        judge(tensor, result, plain, exact, extra)

    start = time.perf_counter()
    found = {"errors": errors, "fault": ""}
    execution = executed_version(script, target, tile=tile, order=order)
    with mock.patch.object(kernel_cases, "judge", noting), execution as launches:
        try:
            if isinstance(case, dict):
                kernel_cases.check(script, attention_case(**case), dtype, cpu)
            elif case in FP8_CASES:
                made = dataclasses.replace(FP8_CASES[case](), gpu_tiles=False)  # the target's own, and its e4m3
                with fp8_of(script, target):
                    kernel_cases.check(script, made, dtype, cpu)
            elif case in OPTIMIZERS:
                kernel_cases.check_adamw(script, dtype, cpu, scaled=case == "adamw, scaled")
            else:
                kernel_cases.check(script, CASES[case](), dtype, cpu)
        except (Fault, kernel_cases.Wrong) as error:
            found["fault"] = f"{type(error).__name__}: {error}"
    instructions = sum((launch.totals.instructions for launch in launches), Counter())
    return found | {
        "instructions": dict(instructions),
        "kernels": sorted({launch.kernel for launch in launches}),
        "seconds": time.perf_counter() - start,
    }
