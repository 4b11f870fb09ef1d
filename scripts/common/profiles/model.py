"""The model of a profile: its kernels, operators and steps. Standard library only."""

import dataclasses
import pathlib
from typing import NamedTuple

from common.command_line import Failure, printable
from common.profiles.groups import clean, group_of


class Launch(NamedTuple):
    """The host's call that started a kernel, or all kernels of a graph. Times are in nanoseconds."""

    start_ns: float
    end_ns: float
    thread: object
    is_graph: bool = False
    after_wait: bool = False  # the host made a stream wait for an event since its call before
    is_operator: bool = False  # the call itself was not recorded: these are the times of the operator around it


class Kernel(NamedTuple):
    """One launch of a kernel. Times are in nanoseconds.

    kind is "kernel", "copy" (memory copies and fills outside kernels) or "operator" (work on the CPU).
    """

    name: str
    start_ns: float
    total_ns: float
    kind: str = "kernel"
    gpu: str | int | None = None  # the profiler's number or name of it, where its file has one
    stream: object = None
    launch: Launch | None = None
    collective: dict | None = None  # what NCCL or RCCL says of it
    calls: int = 1  # more where the profiler kept only their sum
    bounds_ns: tuple | None = None  # then the shortest and the longest

    @property
    def end_ns(self):
        return self.start_ns + self.total_ns

    @property
    def group(self):
        return group_of(self.name)


class Operation(NamedTuple):
    """One call of a PyTorch operator: the time of all that it launched, and the shapes of its inputs if recorded.

    An operator outside aten, such as a compiled region, is one Operation per group of its kernels.
    """

    name: str
    group: str  # of the longest kernel that it launched
    us: float
    dims: list
    types: list
    strides: list
    launches: tuple[str, ...]  # the names of its kernels; on a CPU its own


@dataclasses.dataclass(frozen=True)
class Profile:
    """The contents of one profile. calls, in order, are kernels and copies, or on a CPU the operators that compute.

    All times of a trace are relative to its origin, so that no digit is lost.
    """

    path: pathlib.Path
    calls: list[Kernel]
    operations: list[Operation] = dataclasses.field(default_factory=list)
    steps: int | None = None
    device: str | None = None
    metadata: dict = dataclasses.field(default_factory=dict)  # what the training scripts write
    step_ms: list[float] = dataclasses.field(default_factory=list)  # of each marked step, under the profiler
    memory: list[dict] = dataclasses.field(default_factory=list)  # events of --profile-memory, in order of time
    phases: list[tuple[str, float, float]] = dataclasses.field(default_factory=list)  # name, start and end in us
    processes: int = 1  # that launched the calls
    spans: list[tuple[float, float]] = dataclasses.field(default_factory=list)  # of the host's steps, in ns
    origin_ns: int = 0
    rank: int | None = None
    host: list[dict] = dataclasses.field(default_factory=list)  # events of the host, in order of time, in us
    sources: tuple[str, ...] = ()  # the names of the GPUs, or of the processes on one GPU
    warnings: tuple[str, ...] = ()  # what shows that the profile is not complete: there is no verdict then
    notes: tuple[str, ...] = ()  # what else a reader must know of the file
    step_note: str = ""  # by what its steps were counted, if that may be wrong
    early: int = 0  # so many of the first calls were launched before the profile began, by none of its steps

    @property
    def on_cpu(self):
        return self.calls[0].kind == "operator"

    @property
    def interpreted(self):
        return self.on_cpu and self.metadata.get("version") == 3

    @property
    def step_calls(self):
        """Return the calls that the steps launched."""
        return self.calls[self.early :]

    @property
    def remarks(self):
        """Return what a table of calls must say: several GPUs are added up, early calls, what is not complete."""
        told = []
        if len(self.sources) > 1:
            one = f"--gpu reads one of {', '.join(self.sources)}"
            told.append(f"This profile {several_sources(self)}, and they are added up here: {one}.")
        if self.early:
            ms = sum(call.total_ns for call in self.calls[: self.early]) / 1e6
            some = f"{self.early:,} of {len(self.calls):,} kernels and copies ({ms:,.3f} ms)"
            told.append(f"{some} were launched before the profile began, so steps and idle time don't count them.")
        if self.step_note:
            told.append(self.step_note)
        return [*told, *self.notes, *self.warnings]

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


def checked_kernel(name, start_ns, total_ns, kind="kernel", gpu=None, **more):
    """Return a Kernel; raise ValueError if a launch cannot have these times."""
    if not is_time(start_ns) or not is_time(total_ns) or total_ns < 0:
        raise ValueError(f"{clean(name)} starts at {start_ns} ns and takes {total_ns} ns")
    return Kernel(clean(name), start_ns, total_ns, kind, gpu, **more)


LONG_NS = 10**9  # before all others: a start of 0 is none then


def untimed(spans):
    """Return the places of the (start, end) in nanoseconds that a profiler left at zero, or empty."""
    if all(start and end for start, end in spans):
        return set()
    first = min((start for start, _ in spans if start), default=0)
    found = set()
    for at, (start, end) in enumerate(spans):
        if start is None or end is None or (end == 0 and start >= 0) or (start == 0 and first - end > LONG_NS):
            found.add(at)
    return found


def with_times(rows, spans, what):
    """Return (row, start, end) of the rows with times, and a list of warnings about the others.

    spans: (start, end) of each row, in nanoseconds. what: the word for the rows.
    """
    empty = untimed(spans)
    if not empty:
        return [(row, *span) for row, span in zip(rows, spans, strict=True)], []
    found = [(row, *span) for at, (row, span) in enumerate(zip(rows, spans, strict=True)) if at not in empty]
    return found, without_times(len(empty), len(rows), what)


def without_times(empty, whole, what):
    """Return a list of warnings about rows without times; raise Failure if no row has one."""
    if empty and empty == whole:
        raise Failure(2, "is damaged: all of its times are 0, so record it again, with another version of the profiler")
    return [f"Without times (0 in the file): {empty:,} of {whole:,} {what}, which all sums lack."] if empty else []


# ---------------------------------------------------------------- which GPU, which process


def natural(part):
    """Return the key that sorts processes or GPUs: 999 before 1000, though some are text."""
    return len(str(part)), str(part)


def in_order(places):
    """Return (process, GPU) pairs sorted by their numbers."""
    return sorted(places, key=lambda place: [natural(part) for part in place])


def labels_of(places):
    """Return {(process, GPU): a name that tells it from the others}; the GPU's number if that is enough."""
    places = in_order(set(places))
    if len({gpu for _, gpu in places}) == len(places):
        return {place: str(place[1]) for place in places}
    if len({process for process, _ in places}) == len(places):
        return {place: f"process-{place[0]}" for place in places}
    return {place: f"process-{place[0]}-{place[1]}" for place in places}


ONE_BY_ONE = "Counters were read in this run, so its kernels ran one by one, and the gaps between them mean nothing."
WITH_LAUNCHES = "a rocpd database (rocprofv3 --output-format rocpd) tells why the GPU idled"


def label_of_copy(labels, process, *ends):
    """Return the label of the GPU that a copy is counted for, the first of its ends that ran kernels, or None."""
    places = [(process, end) for end in ends if process is not None or end is not None]
    return next((labels[place] for place in places if place in labels), None)


def copy_name(name, source, destination):
    """Return the name of a copy, which says so if it's one between two GPUs: then it communicates."""
    between = None not in (source, destination) and source != destination
    return f"{name} (peer)" if "DEVICE_TO_DEVICE" in name and between else name


EACH = object()  # for gpu: a profile of each GPU


def parts_of(profile, gpu):
    """Return the profiles of one GPU, of EACH or, with None, of all together."""
    if gpu is EACH:
        return [only_source(profile, source) for source in profile.sources or [None]]
    return [only_source(profile, gpu)]


def only_source(profile, wanted):
    """Return the profile of the GPU or process that --gpu names; all of it if wanted is None."""
    if wanted is None or not profile.sources:
        return profile
    if wanted not in profile.sources:
        raise Failure(2, f"{profile.path} has no GPU or process {wanted}: it has {', '.join(profile.sources)}")
    calls = [call for call in profile.calls if call.gpu == wanted]
    warnings = profile.warnings
    if nameless := sum(call.gpu is None for call in profile.calls):
        warnings += (f"{nameless:,} copies name no GPU, so they are left out here.",)
    return dataclasses.replace(profile, calls=calls, sources=(wanted,), warnings=warnings)


def check_one_gpu(profile):
    """Raise Failure if several processes or GPUs ran the kernels: their sums and gaps are those of no step."""
    if profile.processes > 1:
        kernels = f"the kernels are those of {profile.processes} processes"
        raise Failure(2, f"{kernels}: name the file of one, such as {profile.path}")
    if len(profile.sources) > 1:
        choose = f"choose one with --gpu, of {', '.join(profile.sources)}"
        raise Failure(2, f"{profile.path} {several_sources(profile)}: {choose}")


def several_sources(profile):
    """Return the words for a profile with several GPUs or processes."""
    return f"holds the kernels of {count_of(profile.sources)}"


def count_of(sources):
    """Return the number of GPUs or processes in words."""
    return f"{len(sources)} {'processes' if sources[0].startswith('process-') else 'GPUs'}"


# ---------------------------------------------------------------- complete or not


def early_calls(calls):
    """Return how many calls were launched before the profile began, and waited in the queue: they come first.

    0 if launches are missing later too: then nobody knows which these are.
    """
    launched = [call.launch is not None and not call.launch.is_operator for call in calls]
    early = launched.index(True) if True in launched else 0
    return early if all(launched[early:]) else 0


OVERRUN = 10  # so many later kernels of its own stream end before a kernel does: its time is wrong


def without_twins(calls):
    """Return the calls without exact repetitions, and warnings about those."""
    keys = [(call.name, call.start_ns, call.total_ns, call.gpu, call.stream, call.kind) for call in calls]
    if len(set(keys)) == len(keys) or calls[0].kind == "operator":
        return calls, ()
    found = list(dict(zip(keys, calls, strict=True)).values())
    twice = len(calls) - len(found)
    return found, (f"{twice:,} of {len(calls):,} rows repeat a dispatch; each dispatch counts once.",)


def overruns(calls):
    """Return warnings about kernels that end after many later ones of their own stream: calls are in order."""
    kernels = [call for call in calls if call.kind == "kernel" and call.stream is not None]
    of_stream = {}
    for kernel in kernels:
        of_stream.setdefault((kernel.gpu, kernel.stream), []).append(kernel)
    found = []
    for some in of_stream.values():
        for i, kernel in enumerate(some[:-OVERRUN]):
            if some[i + OVERRUN].end_ns < kernel.end_ns:
                beaten = sum(later.end_ns < kernel.end_ns for later in some[i + 1 :])
                if beaten >= OVERRUN and not (kernel.launch and kernel.launch.is_graph):
                    found.append((beaten, kernel))
    if not found:
        return ()
    beaten, kernel = max(found, key=lambda one: one[0])
    what = f"one of {kernel.total_ns / 1e6:,.3f} ms ends after {beaten} later ones of its own stream"
    return (f"{len(found):,} kernels have impossible times ({what}), so sums with them are wrong.",)


# ---------------------------------------------------------------- of a file without operators


def finished(path, calls, gpu=None, warnings=(), host=(), notes=()):
    """Return the profiles of kernels without operators.

    gpu: the one to read, of several; EACH reads a profile of each, None one of all. host: events of the host.
    """
    sources = {call.gpu for call in calls if call.kind == "kernel" and call.gpu is not None}
    if len(sources) == 1:  # what names no GPU ran on this one
        calls = [call if call.gpu is not None else call._replace(gpu=next(iter(sources))) for call in calls]
    calls.sort(key=lambda call: call.start_ns)
    if calls:
        calls, twice = without_twins(calls)
        warnings = (*warnings, *twice, *overruns(calls))
    early = early_calls(calls) if len(sources) < 2 else 0
    more = {"warnings": tuple(warnings), "notes": tuple(notes), "early": early}
    return parts_of(Profile(path, calls, sources=tuple(sorted(sources)), host=list(host), **more), gpu)


# ---------------------------------------------------------------- several profiles


def unlike(first, second):
    """Return what differs between two traces' metadata apart from the version: "name: one, other"."""
    keys = [key for key in first if key in second and key not in ("version", "peak_memory_mb")]
    return [f"{key}: {first[key]}, {second[key]}" for key in keys if first[key] != second[key]]
