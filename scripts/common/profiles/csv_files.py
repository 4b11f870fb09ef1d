"""Read CSV files: a row per launch, or the sums over each kernel's launches. Standard library only."""

import re

from common.command_line import Failure
from common.files import errors_of
from common.files import number as finite_number
from common.profiles.containers import TABLE, opened
from common.profiles.groups import clean
from common.profiles.launches import LOST
from common.profiles.model import (
    WITH_LAUNCHES,
    checked_kernel,
    copy_name,
    finished,
    label_of_copy,
    labels_of,
    with_times,
)

HOST_CALLS = re.compile(  # rows of ROCm's tables of API functions, and of its table of domains
    r"(__)?hip[A-Z]\w*|hsa_\w+|(nccl|roctx|rocdec|rocJpeg)(?!\w*Kernel)[A-Z]\w*|[A-Z]+_API|KERNEL_DISPATCH|"
    r"MEMORY_(COPY|ALLOCATION)|SCRATCH_MEMORY"
)
COUNTERS = re.compile(r"(SQ|TCC|TCP|TA|TD|SPI|GRBM)_")  # of AMD's GPUs, as columns
# The last is rocprof-compute's, one per pass.
NO_COUNTERS = re.compile(r"DispatchNs|start|end|CompleteNs|DurationNs|Kernel_ID(_\d+)?")
A_ROW_PER_LAUNCH = "give a kernel_trace file, or nsys stats --report cuda_gpu_trace --format csv"
BARRIER = "<barrier packet>"  # in the old rocprof's tables: a queue waits at it, and no kernel runs
ONE_BY_ONE = "Counters were read in this run, so its kernels ran one by one, and the gaps between them mean nothing."


def has_launches(table):
    """Return True for a table with a row per launch."""
    header = set(table.header)
    return {"name", "start"} <= header and not header.isdisjoint(("end", "duration")) and "counter" not in header


def has_sums(table):
    """Return True for a table with a row per kernel: the sum over its launches."""
    return {"name", "calls", "total"} <= set(table.header) and "counter" not in table.header


def has_copies(content):
    """Return True for rocprofv3's table of copies."""
    return {"Source_Agent_Id", "Destination_Agent_Id", "start", "end"} <= set(content.header)


def read_launches(path, content, gpu):
    """Return the profiles in a table with a row per launch, and in rocprofv3's table of copies beside it."""
    rows = [row for row in content.rows if row["name"] != BARRIER]
    rows, warnings = with_times(rows, [span_of(row, content.ns_per_unit) for row in rows], "rows")
    labels = labels_of(place_of(row) for row, _, _ in rows if not is_copy(row))
    kernels = []
    for row, start, end in rows:
        kind = "copy" if is_copy(row) else "kernel"
        label = labels.get(place_of(row)) if "gpu" in row or "process" in row else None
        stream = row.get("queue") and (row["queue"], row.get("Stream_Id"))
        kernels.append(checked_kernel(row["name"], start, end - start, kind, label, stream=stream))
    if any(map(COUNTERS.match, content.header)) or old_counters(content.header):
        warnings.append(ONE_BY_ONE)
    warnings += missing_dispatches([row for row, _, _ in rows])
    copies, more_warnings, notes = copies_beside(path, labels)
    return finished(path, [*kernels, *copies], gpu, [*warnings, *more_warnings], notes=[*content.notes, *notes])


def place_of(row):
    return row.get("process"), row.get("gpu")


def is_copy(row):
    """Return True for a copy or a fill of nsys stats."""
    return row["name"].startswith("[CUDA mem")


KERNEL_TRACE = "kernel_trace.csv"  # as rocprofv3 and rocpd name it, behind a prefix


def copies_beside(path, labels):
    """Return the copies in the file beside a kernel_trace, warnings about them, and notes on the run's files.

    labels: {(process, GPU): name} of the kernels.
    """
    if not path.name.endswith(KERNEL_TRACE):
        return [], [], []
    prefix = path.name.removesuffix(KERNEL_TRACE)
    beside = path.with_name(f"{prefix}memory_copy_trace.csv")
    calls = path.with_name(f"{prefix}hip_api_trace.csv")
    more = [f"{calls.name} isn't read: {WITH_LAUNCHES}."] if calls.is_file() else []
    if not beside.is_file():
        lack = "There is no memory_copy_trace file beside it: if the program copied, that time counts as idle here."
        return [], [], [lack, *more]
    with errors_of(beside), opened(beside) as (container, content):
        if container != TABLE or not has_copies(content):
            return [], [f"{beside.name} has no columns of copies, so it isn't read, and copies count as idle."], more
        rows = list(content.rows)
        spans = [span_of(row, content.ns_per_unit) for row in rows]
        rows, warnings = with_times(rows, spans, f"rows of {beside.name}")
    copies = []
    for row, start, end in rows:
        ends = (row["Source_Agent_Id"], row["Destination_Agent_Id"])
        name = copy_name(row.get("Direction") or row.get("name") or "MEMORY_COPY", *ends)
        label = label_of_copy(labels, row.get("process"), *ends)
        copies.append(checked_kernel(name, start, end - start, "copy", label, stream=row.get("Stream_Id")))
    return copies, warnings, [f"Its copies are those of {beside.name}.", *more]


def span_of(row, ns_per_unit):
    """Return when a launch starts and ends, in nanoseconds."""
    start = time_of(row, "start", ns_per_unit)
    end = time_of(row, "end", ns_per_unit) if "end" in row else start + time_of(row, "duration", ns_per_unit)
    return start, end


def time_of(row, name, ns_per_unit):
    """Return a time in nanoseconds: whole, although the means of rocprof-compute have decimals."""
    text = row[name]
    scale = ns_per_unit.get(name, 1)
    if scale == 1:
        return finite_number(re.sub(r"\.\d+$", "", text), int)
    return round(finite_number(text) * scale)


def read_sums(path, content, gpu):
    """Return the profiles in a table of sums over each kernel's launches."""
    rows = [row for row in content.rows if row["name"] != BARRIER]
    if rows and all(HOST_CALLS.fullmatch(row["name"]) for row in rows):
        raise Failure(2, "has sums over calls of the CPU, not over kernels: give a kernel_stats file")
    return finished(path, [summed_kernel(row, content.ns_per_unit) for row in rows], gpu, notes=content.notes)


def old_counters(header):
    """Return the columns that are counters in a table of rocprof, version 1 or 2: they come last."""
    last = next((name for name in ("obj", "Correlation_ID") if name in header), None)
    columns = header[header.index(last) + 1 :] if last else []
    return [name for name in columns if not NO_COUNTERS.fullmatch(name)]


def missing_dispatches(rows):
    """Return warnings about dispatches whose numbers lie between those of a process, but are not in the table."""
    numbers = {}
    for row in rows:
        if "dispatch" in row:
            numbers.setdefault(row.get("process"), set()).add(finite_number(row["dispatch"], int))
    whole = sum(max(some) - min(some) + 1 for some in numbers.values())
    missing = whole - sum(map(len, numbers.values()))
    if missing > LOST * whole:
        yield f"{missing:,} of {whole:,} dispatches aren't in this file, so the GPU need not have idled in its gaps."


def summed_kernel(row, ns_per_unit):
    """Return the launches of a kernel that a kernel_stats file adds up. The old rocprof's has no bounds."""
    bounds = (None, None)
    if "least" in row and "most" in row:
        bounds = tuple(finite_number(row[name]) * ns_per_unit.get(name, 1) for name in ("least", "most"))
    calls = finite_number(row["calls"], int)
    if calls < 1 or (bounds[0] is not None and not 0 <= bounds[0] <= bounds[1]):
        raise ValueError(f"{clean(row['name'])} has {calls} calls of {bounds[0]} to {bounds[1]} ns")
    total = finite_number(row["total"]) * ns_per_unit.get("total", 1)
    return checked_kernel(row["name"], 0, total, calls=calls, bounds_ns=bounds)
