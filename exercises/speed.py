"""How fast an answer's kernels are on a GPU, beside a copy that is measured in the same run."""

import dataclasses
import statistics

import torch

LAUNCHES = 20  # timed ones, of which the median counts
FLUSH_BYTES = 1 << 28  # more than the last cache of any GPU so far
FLUSHES = 4  # long enough for the host to get ahead of the GPU, so that its own time is not measured


@dataclasses.dataclass(frozen=True)
class Speed:
    """How a kernel is timed on a GPU.

    sizes: of inputs too large for a cache. tiles: names of the answer's module that are then larger, since small tiles
    suit the interpreter. floor: the least share of a copy's GB/s, each input and output moved once.
    """

    sizes: dict[str, int]
    tiles: dict[str, int]
    floor: float = 0.5


class DeviceTimer:
    """Milliseconds of calls by the events of a GPU, its caches emptied before each."""

    def __init__(self, device):
        self.device, self.flushed = device, torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)

    def milliseconds(self, call):
        """Of LAUNCHES calls, after one that compiles."""
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
    """Of a call that moves so many bytes: the median."""
    return moved / statistics.median(timer.milliseconds(call)) / 1e6


def copy_rate(moved, device, timer):
    """GB/s of a kernel that reads and writes as many bytes together."""
    x = torch.ones(moved // 8, dtype=torch.float32, device=device)
    y = torch.empty_like(x)
    # A kernel and no plain copy: that may be left to engines of its own, which are slower.
    return gigabytes_per_second(lambda: torch.neg(x, out=y), 8 * x.numel(), timer)


def measure(run, inputs, outputs, device, timer):
    """(GB/s of run on inputs and outputs, name -> tensor or number, each moved once; GB/s of a copy)."""
    tensors = [value for value in (*inputs.values(), *outputs.values()) if isinstance(value, torch.Tensor)]
    moved = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    return gigabytes_per_second(lambda: run(**inputs, **outputs), moved, timer), copy_rate(moved, device, timer)
