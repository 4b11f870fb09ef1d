"""Read CSV files: a row per launch, or the sums over each kernel's launches. Standard library only."""

import contextlib
import re
from typing import NamedTuple

from common.command_line import Failure
from common.files import errors_of
from common.files import number as finite_number
from common.profiles.containers import TABLE, opened
from common.profiles.databases import beside_old_table
from common.profiles.groups import clean
from common.profiles.launches import LOST, Row, host_calls, profiles_of
from common.profiles.model import ONE_BY_ONE, checked_kernel, finished

HOST_CALLS = re.compile(  # rows of ROCm's tables of API functions, and of its table of domains
    r"(__)?hip[A-Z]\w*|hsa_\w+|(nccl|roctx|rocdec|rocJpeg)(?!\w*Kernel)[A-Z]\w*|[A-Z]+_API|KERNEL_DISPATCH|"
    r"MEMORY_(COPY|ALLOCATION)|SCRATCH_MEMORY"
)
COUNTERS = re.compile(r"(SQ|TCC|TCP|TA|TD|SPI|GRBM)_")  # of AMD's GPUs, as columns
# The last is rocprof-compute's, one per pass.
NO_COUNTERS = re.compile(r"DispatchNs|start|end|CompleteNs|DurationNs|Kernel_ID(_\d+)?")
A_ROW_PER_LAUNCH = "give a kernel_trace file, or nsys stats --report cuda_gpu_trace --format csv"
CALLS_ALONE = "has the calls of the CPU, not kernels: give the table of kernels beside it, or record kernels, too"
BARRIER = "<barrier packet>"  # in the old rocprof's tables: a queue waits at it, and no kernel runs


def has_launches(table):
    """Return True for a table with a row per launch."""
    header = set(table.header)
    return {"name", "start"} <= header and not header.isdisjoint(("end", "duration")) and "counter" not in header


def has_sums(table):
    """Return True for a table with a row per kernel: the sum over its launches."""
    return {"name", "calls", "total"} <= set(table.header) and "counter" not in table.header


def has_copies(content):
    """Return True for a table of copies of rocprofv2 or rocprofv3."""
    header = set(content.header)
    ends = {"Source_Agent_Id", "Destination_Agent_Id"} <= header
    return {"start", "end"} <= header and (ends or ("Operation" in header and "name" not in header))


def read_launches(path, content, gpu):
    """Return the profiles in a table with a row per launch, and in the tables of copies and calls beside it."""
    if is_of_host(content):
        raise Failure(2, CALLS_ALONE)
    number = number_column(content.header)
    rows = []
    dispatches = {}  # process: numbers
    for row in content.rows:
        if row["name"] == BARRIER or MARKER.match(row.get("Operation", "")):
            continue
        rows.append(row_of(row, content.ns_per_unit, number))
        if "dispatch" in row:
            dispatches.setdefault(row.get("process"), set()).add(finite_number(row["dispatch"], int))
    warnings = []
    if any(map(COUNTERS.match, content.header)) or old_counters(content.header):
        warnings.append(ONE_BY_ONE)
    warnings += missing_dispatches(dispatches)
    counted, maybe = counters_beside(path, rows)
    copies, more, notes = copies_beside(path, content)
    host, told = calls_beside(path, number)
    warnings += [*counted, *more]
    return profiles_of(path, [*rows, *copies], host, gpu, warnings, [*content.notes, *notes, *told, *maybe])


def row_of(row, ns_per_unit, number):
    """Return the Row of a line. number: the column with the number that it shares with its launch, or None."""
    operation = row.get("Operation", "")  # rocprofv2 puts kernels and copies into one table
    return Row(
        "copy" if row["name"].startswith("[CUDA mem") or COPIED.search(operation) else "kernel",
        row["name"] or operation,
        *span_of(row, ns_per_unit),
        process=row.get("process"),
        gpu=row.get("gpu"),
        stream=row.get("queue") and (row["queue"], row.get("Stream_Id")),
        launch=row[number] if number else None,
    )


COPIED = re.compile("Memcpy|Copy|Fill")  # in the column Operation of rocprofv2
MARKER = re.compile("Marker|Barrier")


def number_column(header):
    """Return the column with the numbers that launches share with their kernels, or None."""
    return next((name for name in header if name.lower() in ("correlation_id", "corrid")), None)


def is_of_host(table):
    """Return True for a table of the host's calls."""
    return bool({"Function", "Tid", "TID"} & set(table.header)) and "gpu" not in table.header


# ---------------------------------------------------------------- the files of one run


class Run(NamedTuple):
    """The names of a run's tables. The group of kernels stands where the others have braces."""

    kernels: re.Pattern
    copies: str | None  # None: they are in the table of kernels
    calls: tuple[str, ...]
    counters: str | None = None  # None: they are columns of the table of kernels


RUNS = (
    Run(  # rocprofv3 and rocpd
        re.compile(r"(.*)kernel_trace\.csv"),
        "{}memory_copy_trace.csv",
        ("{}hip_api_trace.csv", "{}hsa_api_trace.csv"),
        "{}counter_collection.csv",
    ),
    Run(  # rocprofv2 --kernel-trace
        re.compile(r"results_(.*)\.csv"),
        "async_copy_trace_{}.csv",
        ("hip_api_trace_{}.csv", "hsa_api_trace_{}.csv"),
    ),
    Run(  # rocprofv2 --hip-trace
        re.compile(r"hcc_ops_trace_(.*)\.csv"),
        None,
        ("hip_api_trace_{}.csv", "hsa_api_trace_{}.csv"),
    ),
    Run(re.compile(r"(.*)cuda_gpu_trace\.csv"), None, ("{}cuda_api_trace.csv",)),  # nsys stats
)
NO_COPIES = "There is no table of copies beside it: if the program copied, that time counts as idle here."


def run_of(path):
    """Return the Run to which a table of kernels belongs by its name, and what stands for the braces; or None, ""."""
    for run in RUNS:
        if found := run.kernels.fullmatch(path.name):
            return run, found[1]
    return None, ""


@contextlib.contextmanager
def table_beside(path):
    """Yield the Table in a file beside a table of kernels, or None for another file."""
    with errors_of(path), opened(path) as (container, content):
        yield content if container == TABLE else None


def counters_beside(path, kernels):
    """Return warnings and notes on a file of counters beside a table of kernels, which may be of another run."""
    run, name = run_of(path)
    beside = run and run.counters and path.with_name(run.counters.format(name))
    if not beside or not beside.is_file():
        return [], []
    with table_beside(beside) as content:
        first = next(content.rows, None) if content else None
        if first is None:
            return [], []
        if "start" not in first:  # up to ROCm 6.3
            same = f"If {beside.name} is of the same run"
            return [], [f"{same}, its kernels ran one by one, and the gaps between them mean nothing."]
        start = time_of(first, "start", content.ns_per_unit)
    one_by_one = any(start == kernel.start for kernel in kernels)
    return [ONE_BY_ONE] if one_by_one else [], []


def copies_beside(path, kernels):
    """Return the copies in the file beside a table of kernels, warnings about them, and notes on the run's files."""
    if "Operation" in kernels.header or "duration" in kernels.header:  # rocprofv2's and nsys' kernels and copies
        return [], [], []
    copied, called = beside_old_table(path)
    if copied or called:
        old = path.with_suffix(".db").name
        words = f"{old} beside it has {copied:,} copies and {called:,} calls of the CPU, which this table lacks"
        words += ": give that file."
        return ([], [words], []) if copied else ([], [], [words])
    run, name = run_of(path)
    beside = run and run.copies and path.with_name(run.copies.format(name))
    if not beside or not beside.is_file():
        return [], [], [NO_COPIES]
    with table_beside(beside) as content:
        if content is None or not has_copies(content):
            return [], [f"{beside.name} has no columns of copies, so it isn't read, and copies count as idle."], []
        number = number_column(content.header)
        copies = [copy_of(row, content.ns_per_unit, number) for row in content.rows]
        notes = [f"Its copies are those of {beside.name}.", *notes_of(beside, content)]
    return copies, [], notes


def copy_of(row, ns_per_unit, number):
    """Return the Row of a line of a table of copies."""
    return Row(
        "copy",
        row.get("Direction") or row.get("Operation") or row.get("name") or "MEMORY_COPY",
        *span_of(row, ns_per_unit),
        process=row.get("process"),
        stream=row.get("Stream_Id"),
        launch=row[number] if number else None,
        source=row.get("Source_Agent_Id"),
        destination=row.get("Destination_Agent_Id"),
    )


def calls_beside(path, number):
    """Return the host's calls in the files beside a table of kernels, in order of time, and notes on these files.

    number: the column of the kernels with the numbers that they share with their launches, or None.
    """
    run, name = run_of(path)
    if run is None:
        return [], []
    host = []
    notes = []
    used = []
    for beside in [path.with_name(calls.format(name)) for calls in run.calls]:
        if not beside.is_file():
            continue
        if number is None:
            words = "the kernels don't name their launches, so why the GPU idled stays open"
            notes.append(f"{beside.name} isn't used: {words}.")
            continue
        with table_beside(beside) as content:
            if content is None or not has_calls(content):
                notes.append(f"{beside.name} has no columns of calls, so it isn't read: why the GPU idled stays open.")
                continue
            host += calls_in(content)
            used.append(beside.name)
            notes += notes_of(beside, content)
    if used:
        notes.insert(0, f"The host's calls are those of {' and '.join(used)}.")
    host, left_out = host_calls(host)
    return host, [*notes, *left_out]


def has_calls(table):
    """Return True for a table of the host's calls whose numbers kernels share."""
    return is_of_host(table) and "start" in table.header and number_column(table.header) is not None


def calls_in(table):
    """Return the host's calls in a table, as host_calls takes them."""
    number = number_column(table.header)
    found = []
    for row in table.rows:
        thread = row.get("Thread_Id") or row.get("Tid") or row.get("TID")
        span = span_of(row, table.ns_per_unit)
        found.append((row.get("Function") or row["name"], *span, row.get("process"), thread, row[number]))
    return found


def notes_of(path, table):
    """Return the notes on a table that is read beside another one."""
    return [f"{path.name}: {note}" for note in table.notes]


# ---------------------------------------------------------------- of both kinds of tables


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


def missing_dispatches(numbers):
    """Return warnings about dispatches that are not in the table, though their numbers lie between others.

    numbers: {process: those of its dispatches}.
    """
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
