"""Read databases: rocpd of ROCm 7, rpd of rocmProfileData, the old rocprof's, exports of Nsight Systems.

Standard library only.
"""

import re

from common.command_line import Failure
from common.files import errors_of
from common.profiles.containers import DATABASE, columns_of, opened
from common.profiles.groups import clean
from common.profiles.launches import Row, check_kernels_are_there, host_calls, profiles_of
from common.profiles.model import ONE_BY_ONE

GPU_COLUMNS = {"agent_abs_index", "agent_absolute_index", "deviceId"}  # of rocpd's kernels, old and new, and of nsys
PROCESS_COLUMNS = {"pid", "globalPid"}
STREAM_COLUMNS = {"stream_id", "streamId"}
LAUNCH_COLUMNS = {"stack_id", "correlationId"}  # the number that a launch shares with its kernel
SOURCE_COLUMNS = {"src_agent_abs_index", "src_agent_absolute_index"}  # of rocpd's copies
DESTINATION_COLUMNS = {"dst_agent_abs_index", "dst_agent_absolute_index"}

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
        lost = whole - sum(row.kind == "kernel" for row in rows)
        if lost > 0:
            text = f"The view of kernels leaves out {lost:,} of {whole:,} dispatches, so sums are too small."
            warnings.append(text)
    if rows_in(content, "counters_collection"):
        warnings.append(ONE_BY_ONE)
    host, notes = calls_of_host(content, ROCPD_HOST)
    return profiles_of(path, rows, host, gpu, warnings, notes)


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


# ---------------------------------------------------------------- the old rocprof, version 1

# With a trace of HIP, kernels are in OPS, else in KERN, which older releases call A.
OLD_KERNELS = {
    "OPS": ("Name", '"dev-id"', '"Index"'),
    "KERN": ("KernelName", '"gpu-id"', "NULL"),
    "A": ("KernelName", '"gpu-id"', "NULL"),
}
OLD_CALLS = {"HIP": '"Index"', "HSA": "NULL"}  # kernels name calls of HIP, by numbers that HSA's calls have, too
OLD = {"OPS", "KERN", "HIP", "HSA"}
NO_BARRIER = "NOT LIKE '%<barrier packet>%'"


def is_old_rocprof(found):
    return not found.names.isdisjoint(OLD)


def read_old_rocprof(path, content, gpu):
    """Return the profiles in a database of the old rocprof."""
    views = {}
    for table, (name, device, number) in OLD_KERNELS.items():
        if rows_in(content, table) and "kernels" not in views:
            views["kernels"] = (
                f"SELECT trim({name}, '\"') name, BeginNs start, EndNs end, pid, {device} deviceId, "
                f'"queue-id" stream_id, {number} stack_id FROM {table} WHERE {name} {NO_BARRIER}'
            )
    if rows_in(content, "COPY"):
        columns = columns_of(content.connection, "COPY", {"dev-id"})
        device, number = ("NULL", "NULL") if columns == ["NULL"] else ('"dev-id"', '"Index"')  # HSA's or HIP's
        views["memory_copies"] = (
            f"SELECT Name name, BeginNs start, EndNs end, pid, {device} deviceId, {number} stack_id FROM COPY"
        )
    calls = [
        f"SELECT Name name, BeginNs start, EndNs end, pid, tid, {number} stack_id FROM {table}"
        for table, number in OLD_CALLS.items()
        if rows_in(content, table)
    ]
    if calls:
        views["regions"] = " UNION ALL ".join(calls)
    for view, query in views.items():
        content.connection.execute(f"CREATE TEMP VIEW {view} AS {query}")
    found = content._replace(names=set(views))
    host, notes = calls_of_host(found, ROCPD_HOST)
    return profiles_of(path, rows_of(found, ROCPD), host, gpu, notes=notes)


def beside_old_table(path):
    """Return the numbers of copies and of the host's calls in the old rocprof's database beside its table."""
    beside = path.with_suffix(".db")
    if not beside.is_file():
        return 0, 0
    with errors_of(beside), opened(beside) as (container, content):
        if container != DATABASE or not is_old_rocprof(content):
            return 0, 0
        return rows_in(content, "COPY"), sum(rows_in(content, table) for table in OLD_CALLS)


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
    rows = rows_of(content, NSYS_TABLES)
    graphs = rows_of_graphs(content)
    if GRAPHS in content.names and not any(row.kind == "kernel" for row in rows):
        raise Failure(2, f"has one entry for a whole CUDA graph: record it with {NODES}")
    host, left_out = calls_of_host(content, NSYS_HOST)
    warnings, notes = diagnostics_of(content, {row.process for row in rows}, {call["pid"] for call in host})
    if content.names.isdisjoint(table for table, *_ in NSYS_TABLES):
        check_kernels_are_there(host, [*warnings, *notes])
        way = "record it with nsys profile --trace=cuda, and let the program end by itself"
        raise Failure(2, f"is an export of Nsight Systems without kernels: {way}")
    if graphs:
        words = "entries are whole CUDA graphs, whose kernels this file doesn't name"
        warnings.append(f"{len(graphs):,} {words}: record with {NODES}.")
    return profiles_of(path, [*rows, *graphs], host, gpu, warnings, [*notes, *left_out, *unread_tables(content)])


NODES = "nsys profile --cuda-graph-trace=node"
GRAPHS = f"{NSYS}GRAPH_TRACE"  # nsys's default: one entry for all kernels of a graph


def rows_of_graphs(found):
    """Return a Row for each entry of a whole graph, which counts as one kernel."""
    if GRAPHS not in found.names:
        return []
    executable, graph = columns_of(found.connection, GRAPHS, {"graphExecId"}, {"graphId"})
    name = f"'[CUDA graph ' || coalesce({executable}, {graph}, '') || ', whole]'"
    return rows_of(found, [(GRAPHS, "kernel", name)])


DIAGNOSTICS = "DIAGNOSTIC_EVENT"
INFORMATION = 1  # a severity; 2 is a warning, 3 an error
LOSS = re.compile(r"not all CUDA events|CUDA.*(lost|dropped|discarded)|(lost|dropped|discarded).*CUDA", re.IGNORECASE)
OF_CUDA = re.compile(
    r"(?=.*(CUDA|CUPTI|driver|GPU)).*(not supported|newer|older|might|fail|could not|unable)", re.IGNORECASE
)


def diagnostics_of(found, launching, calling):
    """Return what Nsight Systems says of its own recording: lists of warnings about lost events, and of notes.

    launching: the processes of kernels and copies. What it says of others, such as a shell or those calling that launch
    nothing, says nothing about these.
    """
    if DIAGNOSTICS not in found.names:
        return [], []
    others = set(calling)
    if "PROCESSES" in found.names:
        others |= {process for (process,) in found.connection.execute("SELECT globalPid FROM PROCESSES")}
    if launching:
        others -= launching
    else:
        others = set()
    process, severity = columns_of(found.connection, DIAGNOSTICS, PROCESS_COLUMNS, {"severity"})
    texts = {}
    for text, of, level in found.connection.execute(f"SELECT text, {process}, {severity} FROM {DIAGNOSTICS}"):
        if of not in others and level != INFORMATION:
            texts[f"Nsight Systems says: {clean(text)}"] = text
    warnings = [words for words, text in texts.items() if LOSS.search(text)]
    return warnings, [words for words, text in texts.items() if words not in warnings and OF_CUDA.search(text)]


NO_WORK = re.compile(r"SYNCHRONIZATION|CUDA_EVENT|CUDA_UM|OVERHEAD|CONTEXT|METRICS")  # tables that name a GPU


def unread_tables(found):
    """Return notes about tables of what ran on a GPU that nothing here reads, such as graphics or video."""
    notes = []
    read = {table for table, *_ in NSYS_TABLES} | {GRAPHS}
    for table in sorted(name for name in found.names - read if not NO_WORK.search(name)):
        if "NULL" in columns_of(found.connection, table, {"start"}, {"end"}, {"deviceId", "gpuId", "gpu"}):
            continue
        (count,) = found.connection.execute(f"SELECT count(*) FROM {table}").fetchone()
        if count:
            notes.append(f"{count:,} rows of {clean(table)} aren't read, which may be work of the GPU, too.")
    return notes


# ---------------------------------------------------------------- of all of them


def rows_in(found, table):
    """Return the number of rows in a table, 0 if there is none."""
    if table not in found.names:
        return 0
    return found.connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0]


def rows_of(found, tables):
    """Return a Row for each row of a database's tables of kernels and copies."""
    rows = []
    known = (PROCESS_COLUMNS, GPU_COLUMNS, STREAM_COLUMNS, LAUNCH_COLUMNS, SOURCE_COLUMNS, DESTINATION_COLUMNS)
    for table, kind, name in tables:
        if table in found.names:
            more = ", ".join(columns_of(found.connection, table, *known))
            query = f"SELECT {name}, start, end, {more} FROM {table}"
            rows += [Row(kind, *row) for row in found.connection.execute(query)]
    return rows


def calls_of_host(found, columns):
    """Return the host's calls in a database and notes, as host_calls does.

    columns: the table, and SQL for its names, processes and threads.
    """
    table, name, process, thread = columns
    if table not in found.names:
        return [], []
    (number,) = columns_of(found.connection, table, LAUNCH_COLUMNS)
    query = f"SELECT {name}, start, end, {process}, {thread}, {number} FROM {table}"
    return host_calls(found.connection.execute(query))
