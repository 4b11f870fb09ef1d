"""Measure an answer's GB/s on a GPU, compared with a copy kernel in the same run and with recorded results."""

import dataclasses
import json
import pathlib
import statistics

import torch

RECORDED = pathlib.Path(__file__).resolve().parent.parent / "scripts" / "recorded"
LAUNCHES = 20  # timed launches, of which the median counts
FLUSH_BYTES = 1 << 28  # larger than the last-level cache of any GPU so far
FLUSHES = 4  # before a call; more where the host needs longer for the call, so that launch overhead isn't measured
MOST_FLUSHES = 256  # about 20 ms


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
    """Time calls with the GPU's events, and empty its caches before each.

    host_bound: in the last calls that were timed, the GPU waited for the host.
    """

    def __init__(self, device):
        self.device, self.flushed = device, torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)
        self.host_bound = False

    def milliseconds(self, call):
        """Return the times of LAUNCHES calls, after one that compiles.

        The GPU flushes its caches before each call. It must not finish that before the host has launched the whole
        call, or the time would be the host's: where it does, it gets more to flush.
        """
        call()
        flushes = FLUSHES
        while True:
            pairs, late = self.time_calls(call, flushes)
            self.host_bound = late > LAUNCHES // 4
            if not self.host_bound or flushes >= MOST_FLUSHES:
                return [start.elapsed_time(end) for start, end in pairs]
            flushes *= 2

    def time_calls(self, call, flushes):
        """Return the events around LAUNCHES calls, and how many the GPU had begun before the host was through."""
        pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(LAUNCHES)]
        late = 0
        for start, end in pairs:
            for _ in range(flushes):
                self.flushed.zero_()
            start.record()
            call()
            end.record()
            late += start.query()
        torch.cuda.synchronize(self.device)
        return pairs, late


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
