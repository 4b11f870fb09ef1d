"""Measure an answer's GB/s on a GPU, compared with a copy kernel in the same run and with recorded results."""

import dataclasses
import json
import pathlib
import statistics

import torch

RECORDED = pathlib.Path(__file__).resolve().parent.parent / "scripts" / "recorded"
LAUNCHES = 20  # timed launches, of which the median counts
FLUSH_BYTES = 1 << 28  # larger than the last-level cache of any GPU so far
FLUSHES = 4  # enough for the host to run ahead of the GPU, so that launch overhead is not measured


@dataclasses.dataclass(frozen=True)
class Speed:
    """Tell how a kernel is timed on a GPU.

    sizes: of inputs too large for a cache. tiles: names of the answer's module that are then larger, because small
    tiles suit the interpreter. operation: its name in kernels.json of a recorded run. floor: the required fraction of
    the copy bandwidth, counting each input and output once.
    """

    sizes: dict[str, int]
    tiles: dict[str, int]
    operation: str = ""
    floor: float = 0.5


class DeviceTimer:
    """Time calls with the GPU's events, and empty its caches before each."""

    def __init__(self, device):
        self.device, self.flushed = device, torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)

    def milliseconds(self, call):
        """Return the times of LAUNCHES calls, after one that compiles."""
        call()
        pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(LAUNCHES)]
        for start, end in pairs:
            for _ in range(FLUSHES):
                self.flushed.zero_()
            start.record()
            call()
            end.record()
        torch.cuda.synchronize(self.device)
        return [start.elapsed_time(end) for start, end in pairs]


def gigabytes_per_second(call, moved, timer):
    """Return the median rate of a call that moves so many bytes."""
    return moved / statistics.median(timer.milliseconds(call)) / 1e6


def copy_rate(moved, device, timer):
    """Return the GB/s of a kernel that reads and writes as many bytes together."""
    x = torch.ones(moved // 8, dtype=torch.float32, device=device)
    y = torch.empty_like(x)
    # A kernel instead of copy_(), which the driver may hand to slower copy engines.
    return gigabytes_per_second(lambda: torch.neg(x, out=y), 8 * x.numel(), timer)


def measure(run, inputs, outputs, device, timer):
    """Return the GB/s of run on these inputs and outputs, each moved once, and those of a copy."""
    tensors = [value for value in (*inputs.values(), *outputs.values()) if isinstance(value, torch.Tensor)]
    moved = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    return gigabytes_per_second(lambda: run(**inputs, **outputs), moved, timer), copy_rate(moved, device, timer)


def recorded_speed(operation):
    """Return {"device": name, "V3": [GB/s, copy], "PyTorch": ...} of an operation from the newest record, or None."""
    runs = [json.loads(path.read_text()) for path in RECORDED.glob("*/kernels/kernels.json")]
    newest = max(runs, key=lambda run: run["environment"]["date"])
    found = [entry for entry in newest["operations"] if entry["operation"] == operation]
    if not found:
        return None
    rates = {c["name"]: [c["rate"], newest["ceilings"]["copy"]] for c in found[0]["candidates"] if c["reason"] is None}
    return {"device": newest["environment"]["device"], **rates}
