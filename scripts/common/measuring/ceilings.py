"""Measure a device's ceilings, a matrix product's TFLOP/s and a copy's TB/s, and say which one bounds an operation."""

from common.command_line import finite, progress
from common.formulas.gpus import emulates_tf32
from common.formulas.tf32 import rounds_to_tf32


def peak(text):
    """Convert "989,4.8" to ceilings."""
    tflops, bandwidth = map(finite, text.split(","))
    if not tflops or not bandwidth:
        raise ValueError(f"{text} has a zero")
    return {"matmul_tflops": tflops, "copy_tb_s": bandwidth}


def balance(ceilings):
    """Return the FLOP per byte at which the two ceilings meet: below it the device is memory-bound."""
    return ceilings["matmul_tflops"] / ceilings["copy_tb_s"]


def bound(flop_per_byte, ceilings):
    return "compute" if flop_per_byte > balance(ceilings) else "memory"


def ceilings_line(ceilings):
    top = ceilings["matmul_tflops"]
    copy = 1e3 * ceilings["copy_tb_s"]
    return f"matmul {top:,.3f} TFLOP/s, copy {copy:,.1f} GB/s: {balance(ceilings):,.1f} FLOP/byte"


def precision_here(precision, device):
    """Return the precision of a device's matmuls if this one is asked for: float32 where TF32 has no effect.

    To find out, it allows TF32 in this process.
    """
    import torch

    if precision != "tf32":
        return precision
    torch.set_float32_matmul_precision("high")
    emulated = device != "cpu" and emulates_tf32(torch.cuda.get_device_name(device))
    return "tf32" if emulated or rounds_to_tf32(device) else "float32"


def measure_ceilings(device, precision):
    """Return what a device reaches: TFLOP/s of a large matrix product, TB/s of a copy (read and written)."""
    import torch

    progress("measuring this device's ceilings ...")
    size, megabytes = (8192, 1024) if device.startswith("cuda") else (1024, 128)
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    a, b = torch.randn(2, size, size, device=device).to(getattr(torch, precision, torch.float32))
    source = torch.zeros(megabytes * 2**18, device=device)
    target = torch.empty_like(source)
    return {
        "matmul_tflops": 2 * size**3 / shortest_s(lambda: a @ b) / 1e12,
        "copy_tb_s": 2 * 4 * source.numel() / shortest_s(lambda: target.copy_(source)) / 1e12,
    }


def shortest_s(task, repeats=5):
    """Return the shortest time of a call in seconds; the timer warms up before each, and waits for the GPU."""
    import torch
    from torch.utils.benchmark import Timer

    timer = Timer("task()", globals={"task": task}, num_threads=torch.get_num_threads())
    return min(timer.timeit(1).mean for _ in range(repeats))
