"""Read the files of every profiler into profiles. Standard library only."""

import contextlib
import csv
import gc
import itertools
import json
import re
import sqlite3
import time

from common.command_line import Failure, progress
from common.files import DAMAGE, EMPTY, GZIP, content_of, errors_of
from common.files import number as finite_number
from common.profiles import perfetto
from common.profiles.groups import clean
from common.profiles.model import (
    Profile,
    checked_kernel,
    early_calls,
    is_time,
    labels_of,
    overruns,
    parts_of,
    without_twins,
)
from common.profiles.traces import LAUNCHES, LOST, launch_table, read_trace

# ---------------------------------------------------------------- CSV: rocprofv3, rocpd, rocprof, nsys stats

CSV_NAMES = {  # a profiler's heading, in lower case -> our name
    "name": "name",
    "kernel_name": "name",
    "kernel name": "name",
    "kernelname": "name",
    "start_timestamp": "start",
    "beginns": "start",
    "end_timestamp": "end",
    "endns": "end",
    "agent_id": "gpu",
    "gpu-id": "gpu",
    "gpu_id": "gpu",
    "guid": "process",
    "process_id": "process",
    "process id": "process",
    "device": "gpu",
    "pid": "process",
    "queue_id": "queue",
    "queue-id": "queue",
    "dispatch_id": "dispatch",
    "calls": "calls",
    "totaldurationns": "total",
    "minns": "least",
    "maxns": "most",
    "instances": "calls",
    "total time (ns)": "total",
    "min (ns)": "least",
    "max (ns)": "most",
    "duration (nsec)": "total",
    "min (nsec)": "least",
    "max (nsec)": "most",
    "start (ns)": "start",
    "duration (ns)": "duration",
    "strm": "queue",
    "metric name": "counter",
    "metric value": "value",
    "metric unit": "unit",
    "counter_name": "counter",
    "counter_value": "value",
}


# of ncu, and of nsys stats
MESSAGES = re.compile(r"==|Processing \[|Generating SQLite|NOTICE: |SKIPPED: | +(It is assumed|Consider using) ")
TABLE_TO_READ = re.compile(r"^ *(-{3,} +-{3,}|\|-{9,}|[╒┌╔])", re.MULTILINE)  # of ncu, nsys stats, and ROCm's profilers
NCU_HEADER = '"ID","'
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


def read_table(text):
    """Return the header of a CSV file with our names for its columns, and an iterator over its rows as dictionaries."""
    if not text.endswith("\n"):
        raise ValueError("its last line has no end")  # its last number may be cut off
    if len(re.findall(r"^Processing \[", text, re.MULTILINE)) > 1:
        raise Failure(2, "holds several reports of nsys stats: write one, with --report cuda_gpu_trace --format csv")
    lines = [line for line in text.splitlines() if line and not MESSAGES.match(line)]
    begin = next((i for i, line in enumerate(lines) if line.startswith(NCU_HEADER)), None)
    if begin is None and TABLE_TO_READ.search(text):
        way = "write it with nsys stats --format csv or ncu --csv, or give the profiler's trace or database"
        raise Failure(2, f"is a table to read, not CSV: {way}")
    lines = lines[begin:]  # the program may have printed something before
    header, *rows = list(csv.reader(lines)) or [[]]
    header = [CSV_NAMES.get(cell.strip().lower(), cell.strip()) for cell in header]
    for line_number, row in enumerate(rows, 2):
        more = len(row) - len(header)
        if more > 0 and header[0] == "name":  # the old rocprof doesn't quote names, which have commas
            row[: more + 1] = [",".join(row[: more + 1])]
        if len(row) != len(header):
            raise ValueError(f"line {line_number} has {len(row)} cells of {len(header)}")
    return header, (dict(zip(header, row, strict=True)) for row in rows)


def read_csv(text):
    """Return the kernels in a table and warnings. A row is a launch, or a kernel with the sum over its launches."""
    header, rows = read_table(text)
    rows = [row for row in rows if row.get("name") != BARRIER]
    if "counter" not in header and {"name", "calls", "total"} <= set(header):
        if rows and all(HOST_CALLS.fullmatch(row["name"]) for row in rows):
            raise Failure(2, "has sums over calls of the CPU, not over kernels: give a kernel_stats file")
        return [summed_kernel(row) for row in rows], ()
    if "counter" in header or not (
        {"name", "start"} <= set(header) and {"end", "duration"} & set(header)
    ):  # a row per counter would count twice
        raise Failure(2, f"has no kernel times: {A_ROW_PER_LAUNCH} (kernel_counters.py reads counters)")
    labels = labels_of((row.get("process"), row.get("gpu")) for row in rows)
    kernels = []
    for row in rows:
        start = whole_ns(row["start"])
        total = whole_ns(row["end"]) - start if "end" in row else whole_ns(row["duration"])
        kind = "copy" if row["name"].startswith("[CUDA mem") else "kernel"
        gpu = labels[row.get("process"), row.get("gpu")] if "gpu" in row or "process" in row else None
        stream = row.get("queue") and (row["queue"], row.get("Stream_Id"))
        kernels.append(checked_kernel(row["name"], start, total, kind, gpu, stream=stream))
    warnings = [ONE_BY_ONE] if any(map(COUNTERS.match, header)) or old_counters(header) else []
    return kernels, (*warnings, *missing_dispatches(rows))


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


def whole_ns(text):
    """Return a time in nanoseconds; the means of rocprof-compute have decimals."""
    return finite_number(re.sub(r"\.\d+$", "", text), int)


def summed_kernel(row):
    """Return the launches of a kernel that a kernel_stats file adds up. The old rocprof's has no bounds."""
    bounds = (None, None)
    if "least" in row and "most" in row:
        bounds = (finite_number(row["least"]), finite_number(row["most"]))
    calls = finite_number(row["calls"], int)
    if calls < 1 or (bounds[0] is not None and not 0 <= bounds[0] <= bounds[1]):
        raise ValueError(f"{clean(row['name'])} has {calls} calls of {bounds[0]} to {bounds[1]} ns")
    return checked_kernel(row["name"], 0, finite_number(row["total"]), calls=calls, bounds_ns=bounds)


# ---------------------------------------------------------------- databases: rocpd, rpd, nsys

SQLITE = b"SQLite format 3\0"
NSYS = "CUPTI_ACTIVITY_KIND_"
COPY_KINDS = {1: "HtoD", 2: "DtoH", 8: "DtoD", 10: "PtoP", 11: "HtoD", 12: "DtoH", 13: "DtoD"}  # CUPTI's
UNIFIED = "CASE WHEN copyKind BETWEEN 11 AND 13 THEN 'Unified Memory ' ELSE '' END"  # pages that a touch moved
DIRECTION = " ".join(f"WHEN {kind} THEN ' {name}'" for kind, name in COPY_KINDS.items())
TABLES = [  # table, kind, SQL for the name; of rocpd the views, because the names of its tables change
    ("kernels", "kernel", "name"),
    ("memory_copies", "copy", "name"),
    (f"{NSYS}KERNEL", "kernel", "(SELECT value FROM StringIds WHERE id = demangledName)"),
    (f"{NSYS}MEMCPY", "copy", f"'[CUDA ' || {UNIFIED} || 'memcpy' || CASE copyKind {DIRECTION} ELSE '' END || ']'"),
    (f"{NSYS}MEMSET", "copy", "'[CUDA memset]'"),
]
HOST_TABLES = [  # of the host's calls: table, SQL for name and process
    ("regions", "name", "pid", "tid"),
    (f"{NSYS}RUNTIME", "(SELECT value FROM StringIds WHERE id = nameId)", "globalTid & ~0xFFFFFF", "globalTid"),
]
RPD = "rocpd_op"  # the table of rocmProfileData's .rpd files, which have other tables than ROCm 7's rocpd
RPD_OPERATIONS = (
    "SELECT coalesce(nullif(W.string, ''), K.string) name, O.start, O.end, pid, gpuId deviceId, queueId stream_id, "
    "api_id stack_id FROM rocpd_op O JOIN rocpd_string W ON W.id = description_id "
    "JOIN rocpd_string K ON K.id = opType_id "
    "LEFT JOIN rocpd_api_ops ON op_id = O.id LEFT JOIN rocpd_api A ON A.id = api_id WHERE"
)
RPD_COPIES = "(K.string LIKE '%copy%' OR K.string LIKE '%memcpy%' OR K.string LIKE '%memset%' OR K.string LIKE 'fill%')"
RPD_VIEWS = {  # of them what TABLES and HOST_TABLES ask for. A marker, such as an operator of PyTorch, is in its args.
    "kernels": f"{RPD_OPERATIONS} NOT {RPD_COPIES}",
    "memory_copies": f"{RPD_OPERATIONS} {RPD_COPIES}",
    "regions": "SELECT CASE W.string WHEN 'UserMarker' THEN M.string ELSE W.string END name, start, end, pid, tid, "
    "A.id stack_id FROM rocpd_api A JOIN rocpd_string W ON W.id = apiName_id JOIN rocpd_string M ON M.id = args_id",
}
GPU_COLUMNS = {"agent_abs_index", "agent_absolute_index", "deviceId"}  # of rocpd's kernels, old and new, and of nsys
PROCESS_COLUMNS = {"pid", "globalPid"}
STREAM_COLUMNS = {"stream_id", "streamId"}
LAUNCH_COLUMNS = {"stack_id", "correlationId"}  # the number that a launch shares with its kernel


def columns_of(connection, table, *alternatives):
    """Return of each set of names the one that is a column of the table, "NULL" where none is."""
    known = {name for _, name, *_ in connection.execute(f"PRAGMA table_info({table})")}
    return [next(iter(wanted & known), "NULL") for wanted in alternatives]


LONGEST_S = 600  # seconds that a query may take: a view can be endless
CALL_EVERY = 10**6  # instructions of SQLite's virtual machine


@contextlib.contextmanager
def database(path):
    """Open an SQLite file for reading; yield the connection and the names of its tables and views."""
    with open(path, "rb") as opened:
        if opened.read(len(GZIP)) == GZIP:
            raise Failure(2, "is a packed database: unpack it with gunzip")
    end = time.monotonic() + LONGEST_S
    with contextlib.closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as connection:
        connection.set_progress_handler(lambda: time.monotonic() > end, CALL_EVERY)
        try:
            names = {name for (name,) in connection.execute("SELECT name FROM sqlite_master")}
            if RPD in names:
                for view, query in RPD_VIEWS.items():
                    connection.execute(f"CREATE TEMP VIEW {view} AS {query}")
                names |= set(RPD_VIEWS)
            yield connection, names
        except sqlite3.OperationalError as error:
            if str(error) == "interrupted":
                raise Failure(2, f"takes more than {LONGEST_S} s to read: export fewer steps") from None
            raise


def read_database(path):
    """Return the profile in a rocpd database or in an SQLite export of Nsight Systems."""
    with database(path) as (connection, names):
        if f"{NSYS}GRAPH_TRACE" in names and f"{NSYS}KERNEL" not in names:
            raise Failure(2, "has one entry for a whole CUDA graph: record it with nsys --cuda-graph-trace=node")
        if names.isdisjoint(table for table, *_ in TABLES):
            check_kernels_are_there(calls_of_host(connection, names))
            if any(name.startswith("TARGET_INFO_") for name in names):
                way = "record it with nsys profile --trace=cuda, and let the program end by itself"
                raise Failure(2, f"is an export of Nsight Systems without kernels: {way}")
            if "OPS" in names:
                raise Failure(2, "is rocprof's old database: give its results.csv")
            raise Failure(2, "is a database without kernel times, neither rocpd, rpd nor an export of Nsight Systems")
        rows = []
        for table, kind, column in TABLES:
            if table in names:
                known = (PROCESS_COLUMNS, GPU_COLUMNS, STREAM_COLUMNS, LAUNCH_COLUMNS)
                more = ", ".join(columns_of(connection, table, *known))
                found = connection.execute(f"SELECT {column}, start, end, {more} FROM {table}")
                rows += [(kind, *row) for row in found]
        lost = 0
        if {"kernels", "rocpd_kernel_dispatch"} <= names:
            (all_of_them,) = connection.execute("SELECT count(*) FROM rocpd_kernel_dispatch").fetchone()
            lost = all_of_them - sum(kind == "kernel" for kind, *_ in rows)
        host = calls_of_host(connection, names)
    if all(kind == "copy" for kind, *_ in rows):
        check_kernels_are_there(host)
    launches = launch_table(host, {number for *_, number in rows} - {None})
    labels = labels_of((process, gpu) for kind, _, _, _, process, gpu, *_ in rows if kind == "kernel")
    calls = []
    for kind, name, start, end, process, gpu, stream, number in rows:
        label = labels.get((process, gpu)) if gpu is not None or process is not None else None
        candidates = launches.get(number, {})
        launch = candidates.get(process) if process is not None else next(iter(candidates.values()), None)
        calls.append(checked_kernel(name, start, end - start, kind, label, stream=stream, launch=launch))
    warnings = ()
    if lost > 0:
        warnings = (f"The view of kernels leaves out {lost:,} of {all_of_them:,} dispatches, so sums are too small.",)
    return finished(path, calls, warnings, host)


def check_kernels_are_there(host):
    """Raise Failure if the host launched kernels; called where a database holds none."""
    launches = sum(bool(LAUNCHES.match(call["name"])) for call in host)
    if launches:
        way = "the profiler lost them; if its version is older than the driver, try a newer one"
        raise Failure(2, f"holds {launches:,} launches and none of their kernels: {way}")


def calls_of_host(connection, names):
    """Return the host's calls in a database as a trace has them, in order of time, in us."""
    found = []
    for table, name, process, thread in HOST_TABLES:
        if table in names:
            (number,) = columns_of(connection, table, LAUNCH_COLUMNS)
            for words, start, end, pid, tid, launch in connection.execute(
                f"SELECT {name}, start, end, {process}, {thread}, {number} FROM {table}"
            ):
                if not is_time(start) or not is_time(end):
                    raise ValueError(f"{clean(words)} lasts from {start} to {end} ns")
                event = {"name": re.sub(r"_v\d+$", "", clean(words)), "ts": start / 1e3, "dur": (end - start) / 1e3}
                found.append(event | {"pid": pid, "tid": tid, "args": {"correlation": launch}})
    return sorted(found, key=lambda event: event["ts"])


# ---------------------------------------------------------------- JSON of rocprofv3


def read_rocprof_json(content):
    """Return kernels and copies in what rocprofv3 --output-format json writes, one part per process."""
    rows = []
    for i, part in enumerate(content["rocprofiler-sdk-tool"]):
        names = {one["kernel_id"]: one["formatted_kernel_name"] for one in part["kernel_symbols"]}
        process = part.get("metadata", {}).get("pid", i)
        for one in part["buffer_records"]["kernel_dispatch"]:
            what = one["dispatch_info"]
            gpu = what.get("agent_id", {}).get("handle")
            stream = (what.get("queue_id", {}).get("handle"), one.get("stream_id", {}).get("handle"))
            row = (names[what["kernel_id"]], one["start_timestamp"], one["end_timestamp"])
            rows.append(("kernel", *row, process, gpu, stream))
        for one in part["buffer_records"].get("memory_copy", []):
            rows.append(("copy", "MEMORY_COPY", one["start_timestamp"], one["end_timestamp"], process, None, None))
    labels = labels_of((process, gpu) for kind, *_, process, gpu, _ in rows if kind == "kernel")
    calls = []
    for kind, name, start, end, process, gpu, stream in rows:
        calls.append(checked_kernel(name, start, end - start, kind, labels.get((process, gpu)), stream=stream))
    return calls


# ---------------------------------------------------------------- any file


def read_json(path, content, linked, gpu):
    """Return the profiles in a trace, or in the trace that a profile_*.json of run_pytorch_profiler.py names.

    content: what is parsed of the file. linked: a profile_*.json named this file, which must be a trace.
    """
    if (
        isinstance(content, list)
        and any(content)
        and all(isinstance(one, dict) and ("ph" in one or not one) for one in content)
    ):
        content = {"traceEvents": content}  # the short form of a Chrome trace
    if isinstance(content, dict) and "traceEvents" in content:
        if any("BeginNs" in (event.get("args") or {}) for event in itertools.islice(content["traceEvents"], 100)):
            raise Failure(2, "is rocprof's old trace: give its results.csv")
        return read_trace(path, content, gpu)
    if "rocprofiler-sdk-tool" in content:
        return parts_of(finished(path, read_rocprof_json(content)), gpu)
    if "trace" in content and "steps_profiled" in content and not linked:
        try:
            return read_file(path.with_name(content["trace"]), gpu, linked=True)
        except Failure as error:
            raise Failure(error.status, f"names another file: {error}") from None
    way = "give what torch.profiler's export_chrome_trace writes"
    raise Failure(2, f"is JSON, but not a profiler's trace (it has no traceEvents): {way}")


LARGE = 2**24  # bytes from which on reading is announced


def parsed(path, text):
    """Return the content of a JSON file; tell about a large one, which takes seconds."""
    if len(text) > LARGE:
        progress(f"reading {path} ({len(text) / 1e6:,.0f} MB) ...")
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        if error.msg != "Extra data":
            raise
        lines = text.splitlines()
        if not all(line.startswith('{"displayTimeUnit"') for line in lines):
            raise
        # Triton's Proton writes a trace per stream
        return {"traceEvents": [event for line in lines for event in json.loads(line)["traceEvents"]]}


@contextlib.contextmanager
def without_collection():
    """Look for no cycles of garbage meanwhile: the millions of objects of a trace have none."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()  # what was read has none later either
        if was_enabled:
            gc.enable()


def finished(path, calls, warnings=(), host=()):
    """Return the profile of kernels without operators. host: events of the host."""
    sources = {call.gpu for call in calls if call.kind == "kernel" and call.gpu is not None}
    calls.sort(key=lambda call: call.start_ns)
    if calls:
        calls, twice = without_twins(calls)
        warnings = (*warnings, *twice, *overruns(calls))
    early = early_calls(calls) if len(sources) < 2 else 0
    return Profile(path, calls, sources=tuple(sorted(sources)), host=list(host), warnings=warnings, early=early)


NO_TEXT = re.compile(rb"[\x01-\x08\x0e-\x1f]")


def read_file(path, gpu=None, linked=False):
    """Return the profiles in one file; tell its format by its content, not by its name.

    gpu: the one to read, of several; EACH reads a profile of each, None one of all. linked: as for read_json.
    """
    with errors_of(path), without_collection():
        content = content_of(path)
        if not content:
            raise Failure(2, EMPTY)
        if content.startswith(SQLITE):
            return parts_of(read_database(path), gpu)
        if path.name.endswith(".xplane.pb"):
            raise Failure(2, "is a profile of JAX or TensorFlow: record the program with nsys or rocprofv3")
        is_json = re.match(rb"\s*($|[{[])", content)  # blanks alone are damaged in any format
        # A Perfetto trace begins with a line feed; so do PyTorch 2.7's traces, which are JSON, and nsys stats' tables.
        if b"\0" in content or (content.startswith(b"\n") and not is_json and NO_TEXT.search(content)):
            return parts_of(finished(path, read_perfetto(content)), gpu)
        text = content.decode("utf-8", errors="replace")
        del content  # a trace can have a gigabyte, and each copy of it takes memory and time
        if is_json:
            content = parsed(path, text)
            del text
            return read_json(path, content, linked, gpu)
        return parts_of(finished(path, *read_csv(text)), gpu)


def read_perfetto(content):
    """Return the kernels of a Perfetto trace.

    Raise Failure with status 0 if they are in a form that nothing here reads: the file is right, Perfetto opens it.
    """
    try:
        kernels = [checked_kernel(name, start, end - start) for name, start, end in perfetto.kernels(content)]
    except DAMAGE as error:  # a number where a message belongs, for one
        export = "turn an .nsys-rep file into a database with nsys export --type sqlite"
        raise Failure(2, f"isn't a Perfetto trace, or is damaged ({error}): {export}") from None
    if not kernels and any(category.encode() in content for category in perfetto.KERNEL_CATEGORIES):
        raise Failure(0, "has its kernels in a form that this tool can't read: open it in https://ui.perfetto.dev")
    return kernels
