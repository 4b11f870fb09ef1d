"""Read databases: rocpd of ROCm 7, rpd of rocmProfileData, exports of Nsight Systems. Standard library only."""

import re

from common.command_line import Failure
from common.profiles.containers import columns_of
from common.profiles.groups import clean
from common.profiles.model import checked_kernel, finished, is_time, labels_of
from common.profiles.traces import LAUNCHES, launch_table

GPU_COLUMNS = {"agent_abs_index", "agent_absolute_index", "deviceId"}  # of rocpd's kernels, old and new, and of nsys
PROCESS_COLUMNS = {"pid", "globalPid"}
STREAM_COLUMNS = {"stream_id", "streamId"}
LAUNCH_COLUMNS = {"stack_id", "correlationId"}  # the number that a launch shares with its kernel

# ---------------------------------------------------------------- rocpd of ROCm 7

# Its views, because the names of its tables change.
ROCPD = (("kernels", "kernel", "name"), ("memory_copies", "copy", "name"))  # table, kind, SQL for the name
ROCPD_HOST = ("regions", "name", "pid", "tid")  # table, SQL for name, process and thread


def is_rocpd(found):
    return not found.names.isdisjoint({"kernels", "memory_copies", "regions", "rocpd_kernel_dispatch"})


def read_rocpd(path, content, gpu):
    """Return the profiles in a database of ROCm 7."""
    rows = rows_of(content, ROCPD)
    warnings = []
    if {"kernels", "rocpd_kernel_dispatch"} <= content.names:
        (whole,) = content.connection.execute("SELECT count(*) FROM rocpd_kernel_dispatch").fetchone()
        lost = whole - sum(kind == "kernel" for kind, *_ in rows)
        if lost > 0:
            text = f"The view of kernels leaves out {lost:,} of {whole:,} dispatches, so sums are too small."
            warnings.append(text)
    return profiles_of(path, rows, calls_of_host(content, ROCPD_HOST), gpu, warnings)


# ---------------------------------------------------------------- rpd of rocmProfileData, which has other tables

RPD = "rocpd_op"
RPD_OPERATIONS = (
    "SELECT coalesce(nullif(W.string, ''), K.string) name, O.start, O.end, pid, gpuId deviceId, queueId stream_id, "
    "api_id stack_id FROM rocpd_op O JOIN rocpd_string W ON W.id = description_id "
    "JOIN rocpd_string K ON K.id = opType_id "
    "LEFT JOIN rocpd_api_ops ON op_id = O.id LEFT JOIN rocpd_api A ON A.id = api_id WHERE"
)
RPD_COPIES = "(K.string LIKE '%copy%' OR K.string LIKE '%memcpy%' OR K.string LIKE '%memset%' OR K.string LIKE 'fill%')"
RPD_VIEWS = {  # named and made as rocpd's. A marker, such as an operator of PyTorch, is in its args.
    "kernels": f"{RPD_OPERATIONS} NOT {RPD_COPIES}",
    "memory_copies": f"{RPD_OPERATIONS} {RPD_COPIES}",
    "regions": "SELECT CASE W.string WHEN 'UserMarker' THEN M.string ELSE W.string END name, start, end, pid, tid, "
    "A.id stack_id FROM rocpd_api A JOIN rocpd_string W ON W.id = apiName_id JOIN rocpd_string M ON M.id = args_id",
}


def is_rpd(found):
    return RPD in found.names


def read_rpd(path, content, gpu):
    """Return the profiles in a database of rocmProfileData."""
    for view, query in RPD_VIEWS.items():
        content.connection.execute(f"CREATE TEMP VIEW {view} AS {query}")
    return read_rocpd(path, content._replace(names=set(RPD_VIEWS)), gpu)


# ---------------------------------------------------------------- exports of Nsight Systems

NSYS = "CUPTI_ACTIVITY_KIND_"
COPY_KINDS = {1: "HtoD", 2: "DtoH", 8: "DtoD", 10: "PtoP", 11: "HtoD", 12: "DtoH", 13: "DtoD"}  # CUPTI's
UNIFIED = "CASE WHEN copyKind BETWEEN 11 AND 13 THEN 'Unified Memory ' ELSE '' END"  # pages that a touch moved
DIRECTION = " ".join(f"WHEN {kind} THEN ' {name}'" for kind, name in COPY_KINDS.items())
NSYS_TABLES = (
    (f"{NSYS}KERNEL", "kernel", "(SELECT value FROM StringIds WHERE id = demangledName)"),
    (f"{NSYS}MEMCPY", "copy", f"'[CUDA ' || {UNIFIED} || 'memcpy' || CASE copyKind {DIRECTION} ELSE '' END || ']'"),
    (f"{NSYS}MEMSET", "copy", "'[CUDA memset]'"),
)
NSYS_HOST = (f"{NSYS}RUNTIME", "(SELECT value FROM StringIds WHERE id = nameId)", "globalTid & ~0xFFFFFF", "globalTid")


def is_nsys(found):
    return any(name.startswith((NSYS, "TARGET_INFO_")) for name in found.names)


def read_nsys(path, content, gpu):
    """Return the profiles in an SQLite export of Nsight Systems."""
    if f"{NSYS}GRAPH_TRACE" in content.names and f"{NSYS}KERNEL" not in content.names:
        raise Failure(2, "has one entry for a whole CUDA graph: record it with nsys --cuda-graph-trace=node")
    host = calls_of_host(content, NSYS_HOST)
    if content.names.isdisjoint(table for table, *_ in NSYS_TABLES):
        check_kernels_are_there(host)
        way = "record it with nsys profile --trace=cuda, and let the program end by itself"
        raise Failure(2, f"is an export of Nsight Systems without kernels: {way}")
    return profiles_of(path, rows_of(content, NSYS_TABLES), host, gpu)


# ---------------------------------------------------------------- of all of them


def rows_of(found, tables):
    """Return the rows of a database's tables of kernels and copies.

    Each is kind, name, start, end, process, GPU, stream and the number that it shares with its launch.
    """
    rows = []
    for table, kind, name in tables:
        if table in found.names:
            known = (PROCESS_COLUMNS, GPU_COLUMNS, STREAM_COLUMNS, LAUNCH_COLUMNS)
            more = ", ".join(columns_of(found.connection, table, *known))
            query = f"SELECT {name}, start, end, {more} FROM {table}"
            rows += [(kind, *row) for row in found.connection.execute(query)]
    return rows


def profiles_of(path, rows, host, gpu, warnings=()):
    """Return the profiles of the rows of rows_of. host: the result of calls_of_host."""
    if all(kind == "copy" for kind, *_ in rows):
        check_kernels_are_there(host)
    launches = launch_table(host, {number for *_, number in rows} - {None})
    labels = labels_of((process, gpu) for kind, _, _, _, process, gpu, *_ in rows if kind == "kernel")
    calls = []
    for kind, name, start, end, process, number_of_gpu, stream, number in rows:
        label = labels.get((process, number_of_gpu)) if number_of_gpu is not None or process is not None else None
        candidates = launches.get(number, {})
        launch = candidates.get(process) if process is not None else next(iter(candidates.values()), None)
        calls.append(checked_kernel(name, start, end - start, kind, label, stream=stream, launch=launch))
    return finished(path, calls, gpu, warnings, host)


def check_kernels_are_there(host):
    """Raise Failure if the host launched kernels; called where a database holds none."""
    launches = sum(bool(LAUNCHES.match(call["name"])) for call in host)
    if launches:
        way = "the profiler lost them; if its version is older than the driver, try a newer one"
        raise Failure(2, f"holds {launches:,} launches and none of their kernels: {way}")


def calls_of_host(found, columns):
    """Return the host's calls in a database as a trace has them, in order of time, in us.

    columns: the table, and SQL for its names, processes and threads.
    """
    table, name, process, thread = columns
    if table not in found.names:
        return []
    (number,) = columns_of(found.connection, table, LAUNCH_COLUMNS)
    query = f"SELECT {name}, start, end, {process}, {thread}, {number} FROM {table}"
    calls = []
    for words, start, end, pid, tid, launch in found.connection.execute(query):
        if not is_time(start) or not is_time(end):
            raise ValueError(f"{clean(words)} lasts from {start} to {end} ns")
        event = {"name": re.sub(r"_v\d+$", "", clean(words)), "ts": start / 1e3, "dur": (end - start) / 1e3}
        calls.append(event | {"pid": pid, "tid": tid, "args": {"correlation": launch}})
    return sorted(calls, key=lambda event: event["ts"])
