"""Time the GEMMs of one layer of the medium preset, and show how a GPU rounds TF32.

python scripts/common/machine/gemm_probe.py bfloat16    y = x Wᵀ, dx = dy W and dW = dyᵀ x of the feed-forward layer
python scripts/common/machine/gemm_probe.py tf32        the same; first whether TF32 took effect, its mean signed error

Exit status: 0; 1 where a GEMM takes a hundred times what its bytes and FLOPs need; without a GPU 0: skipped.
"""

import pathlib
import statistics
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from common.command_line import Failure, Parser
from common.formulas import tf32
from common.formulas.gpus import GPUS, gpu_named, name_here, peak_tflops

TOKENS, WIDTH, FEED_FORWARD = 16 * 512, 1024, 4096  # of the medium preset
CALLS = 5
STALLED = 100  # times what bytes and FLOPs need; a GEMM that no library was tuned for takes 2 to 20 times that
ROUNDS_DOWN = -1e-4  # mean signed relative error: -7e-4 where 13 bits are cut off, 1e-6 where they are rounded
HANGS = "if this hangs, set TORCH_BLAS_PREFER_HIPBLASLT=0 on an AMD GPU (scripts/AMD.md)"


def needed_ms(precision, bytes_per_element, device_name):
    """Return the time that a GEMM's FLOPs or bytes need, whichever is longer; on unknown boards the slowest we know."""
    board = GPUS.get(gpu_named(device_name))
    known = [board] if board else GPUS.values()
    rates = [peak_tflops(device_name, precision)] if board else []
    tflops = min(filter(None, rates), default=min(gpu.tflops["float32"] for gpu in known))
    tb_s = min(gpu.tb_s for gpu in known)
    flops = 2 * TOKENS * WIDTH * FEED_FORWARD
    elements = TOKENS * WIDTH + WIDTH * FEED_FORWARD + TOKENS * FEED_FORWARD
    return 1e3 * max(flops / (1e12 * tflops), bytes_per_element * elements / (1e12 * tb_s))


def time_calls(task, synchronize):
    """Return the first call's time and the median of the next ones, in ms."""
    times = []
    for _ in range(1 + CALLS):
        synchronize()
        start = time.perf_counter()
        task()
        synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    return times[0], statistics.median(times[1:])


def describe_rounding(error, device):
    """Say what a mean signed error of float32 matmuls means."""
    import torch

    if not tf32.rounds_to_tf32(device):
        way_out = ": on an MI300, PyTorch before 2.10 needs HIPBLASLT_ALLOW_TF32=1" if torch.version.hip else ""
        return f"no TF32, or an emulated one that keeps more bits{way_out}"
    if error < ROUNDS_DOWN:
        return f"TF32 rounds down: mean signed error {error:.1e}"
    return f"TF32 rounds to nearest: mean signed error {error:.1e}"


def probe(precision, device="cuda"):
    """Print what the GEMMs take; raise Failure if they stall."""
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        print("skipped: needs a GPU")
        return
    print(f"GEMMs of the medium preset in {precision}; {HANGS}", flush=True)
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    said = describe_rounding(tf32.mean_signed_error(device), device) + "; " if precision == "tf32" else ""
    dtype = torch.float32 if precision == "tf32" else getattr(torch, precision)
    x = torch.randn(TOKENS, WIDTH, device=device, dtype=dtype)
    w = torch.randn(FEED_FORWARD, WIDTH, device=device, dtype=dtype)
    dy = torch.randn(TOKENS, FEED_FORWARD, device=device, dtype=dtype)
    name = name_here() if device == "cuda" else device
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    needed = needed_ms(precision, dtype.itemsize, name)
    slowest = 0.0
    for what, a, b in (("y = x Wᵀ", x, w.T), ("dx = dy W", dy, w), ("dW = dyᵀ x", dy.T, x)):
        first, ms = time_calls(lambda a=a, b=b: tf32.multiply(a, b), synchronize)
        print(f"{what}: {ms:.3f} ms, the first call {first:.0f} ms", flush=True)
        slowest = max(slowest, ms)
    times = f"a GEMM takes {slowest:.2f} ms, {slowest / needed:,.1f} times what it needs"
    if slowest > STALLED * needed:
        raise Failure(1, f"on an AMD GPU set TORCH_BLAS_PREFER_HIPBLASLT=0: {times} (scripts/AMD.md)")
    print(f"{said}{times}")


def main(argv=None):
    parser = Parser("gemm_probe.py", __doc__, with_json=False)
    parser.add_argument("precision", choices=["bfloat16", "tf32"])
    return parser.run(lambda options: probe(options.precision) or 0, argv)


if __name__ == "__main__":
    sys.exit(main())
