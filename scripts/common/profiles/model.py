"""The model of a profile: its kernels, operators and steps. Standard library only."""

import dataclasses
import pathlib

from common.command_line import Failure, printable
from common.profiles.groups import clean, group_of

PHASES = ("forward", "backward", "optimizer")


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One launch of a kernel. Times are in nanoseconds.

    kind is "kernel", "copy" (memory copies and fills outside kernels) or "operator" (work on the CPU).
    """

    name: str
    start_ns: float
    total_ns: float
    kind: str = "kernel"
    gpu: str | int | None = None  # the profiler's number or name of it, where its file has one

    @property
    def end_ns(self):
        return self.start_ns + self.total_ns

    @property
    def group(self):
        return group_of(self.name)


@dataclasses.dataclass(frozen=True)
class Operation:
    """One call of a PyTorch operator: the time of all that it launched, and the shapes of its inputs if recorded."""

    name: str
    group: str  # of the longest kernel that it launched
    us: float
    dims: list
    types: list
    strides: list
    launches: tuple[str, ...]  # the names of its kernels; on a CPU its own


@dataclasses.dataclass(frozen=True)
class Profile:
    """The contents of one profile. calls, in order, are kernels and copies, or on a CPU the operators that compute."""

    path: pathlib.Path
    calls: list[Kernel]
    operations: list[Operation] = dataclasses.field(default_factory=list)
    steps: int | None = None
    device: str | None = None
    metadata: dict = dataclasses.field(default_factory=dict)  # version, part, sizes, precision, peak_memory_mb
    step_ms: list[float] = dataclasses.field(default_factory=list)  # of each marked step, under the profiler
    memory: list[dict] = dataclasses.field(default_factory=list)  # events of --profile-memory, in order of time
    phases: list[tuple[str, float, float]] = dataclasses.field(default_factory=list)  # name, start and end in us
    processes: int = 1  # that launched the calls

    @property
    def on_cpu(self):
        return self.calls[0].kind == "operator"

    @property
    def interpreted(self):
        return self.on_cpu and self.metadata.get("version") == 3

    @property
    def unit(self):
        return "operators" if self.on_cpu else "kernels"

    @property
    def title(self):
        """Return the file's name, with the version, sizes and precision if a script of the workshop wrote it."""
        path = printable(str(self.path))  # it may be no UTF-8, which no report can hold
        if not self.metadata:
            return path
        sizes = "{batch_size} x {seq_len} tokens, width {hidden_dim}, {num_layers} layers".format(**self.metadata)
        alone = ", attention alone" if self.metadata["part"] == "attention" else ""
        return f"{path} (version {self.metadata['version']}, {sizes}, {self.metadata['precision']}{alone})"


def is_time(value):
    """Return True for a number that can be a time; nanoseconds since 1970 need 61 bits."""
    return type(value) in (int, float) and abs(value) < 2**63


def checked_kernel(name, start_ns, total_ns, kind="kernel", gpu=None):
    """Return a Kernel; raise ValueError if a launch cannot have these times."""
    if not is_time(start_ns) or not is_time(total_ns) or total_ns < 0:
        raise ValueError(f"{clean(name)} starts at {start_ns} ns and takes {total_ns} ns")
    return Kernel(clean(name), start_ns, total_ns, kind, gpu)


def check_one_gpu(profile):
    """Raise Failure if several processes or GPUs ran the kernels: their sums and gaps are those of no step."""
    if profile.processes > 1:
        kernels = f"the kernels are those of {profile.processes} processes"
        raise Failure(2, f"{kernels}: name the file of one, such as {profile.path}")
    gpus = {call.gpu for call in profile.calls if call.kind == "kernel" and call.gpu is not None}
    if len(gpus) > 1:
        raise Failure(2, f"{profile.path} holds the kernels of {len(gpus)} GPUs: profile a process that uses one")


def unlike(first, second):
    """Return what differs between two traces' metadata apart from the version: "name: one, other"."""
    keys = [key for key in first if key in second and key not in ("version", "peak_memory_mb")]
    return [f"{key}: {first[key]}, {second[key]}" for key in keys if first[key] != second[key]]
