"""The tables of one run: kernels, copies and the host's calls may lie in several files, and each is used or named.

Times of events are in us, those of tables, JSON and databases in ns.
"""

import contextlib
import csv
import json
import sqlite3

import pytest
from test_foreign_profiles import WHY, database_of, idle_of, pair
from test_nothing_silent import some_lost
from test_profiles import begin, end, message

import kernel_times
from common.profiles import idle, read_profile
from in_process import refused

CLOCK_US = 1e4  # before the first event


def times(event):
    return int(1e3 * (CLOCK_US + event["ts"])), int(1e3 * (CLOCK_US + event["ts"] + event["dur"]))


def table(path, header, rows):
    """Write a CSV file, unless it has no rows: the profilers write none then."""
    if rows:
        with open(path, "w", newline="") as file:
            csv.writer(file, quoting=csv.QUOTE_NONNUMERIC).writerows([header.split(","), *rows])
    return path


def split(events):
    """Return the kernels, copies and calls among the events of a trace."""
    kinds = {"kernel": 0, "gpu_memcpy": 1, "cuda_runtime": 2}
    found = [[], [], []]
    for event in events:
        found[kinds[event["cat"]]].append((event, *times(event), event["args"].get("correlation")))
    return found


def rocprofv3(events, folder, guid=False):
    """Write the tables of rocprofv3, or with guid those of rocpd, whose kernels name a process."""
    kernels, copies, calls = split(events)
    first = "Guid," * guid
    process = ["0000a5f1-62c8"] * guid
    rows = [[*process, "Agent 4", one["args"]["stream"], one["name"], number, *at] for one, *at, number in kernels]
    columns = first + "Agent_Id,Queue_Id,Kernel_Name,Correlation_Id,Start_Timestamp,End_Timestamp"
    path = table(folder / "7_kernel_trace.csv", columns, rows)
    rows = [[*process, one["name"], 0, "Agent 4", "Agent 0", number, *at] for one, *at, number in copies]
    columns = first + "Direction,Stream_Id,Source_Agent_Id,Destination_Agent_Id,Correlation_Id,Start_Timestamp,"
    table(folder / "7_memory_copy_trace.csv", columns + "End_Timestamp", rows)
    columns = first + "Domain,Function,Process_Id,Thread_Id,Correlation_Id,Start_Timestamp,End_Timestamp"
    for layer in ("hip", "hsa"):  # every second call is one of HSA
        some = calls[layer == "hsa" :: 2]
        rows = [[*process, "API", one["name"], 9, one["tid"], number, *at] for one, *at, number in some]
        table(folder / f"7_{layer}_api_trace.csv", columns, rows)
    return path


def rocpd_csv(events, folder):
    return rocprofv3(events, folder, guid=True)


def rocprofv3_json(events, folder):
    kernels, copies, calls = split(events)

    def record(at, number, **more):
        return {"start_timestamp": at[0], "end_timestamp": at[1], "correlation_id": {"internal": number}} | more

    dispatches = []
    for i, (one, *at, number) in enumerate(kernels):
        queue = {"handle": one["args"]["stream"]}
        what = {"kernel_id": i, "agent_id": {"handle": 4}, "queue_id": queue}
        dispatches.append(record(at, number, dispatch_info=what))
    names = [one["name"] for one, *_ in calls]
    api = [record(at, number, kind=1, operation=i, thread_id=one["tid"]) for i, (one, *at, number) in enumerate(calls)]
    part = {
        "metadata": {"pid": 9},
        "kernel_symbols": [
            {"kernel_id": i, "formatted_kernel_name": one["name"]} for i, (one, *_) in enumerate(kernels)
        ],
        "strings": {"buffer_records": [{"kind": "NONE"}, {"kind": "HIP_RUNTIME_API", "operations": names}]},
        "buffer_records": {
            "kernel_dispatch": dispatches,
            "memory_copy": [record(at, number, operation=3) for _, *at, number in copies],
            "hip_api": api[::2],
            "hsa_api": api[1::2],
        },
    }
    path = folder / "7_results.json"
    path.write_text(json.dumps({"rocprofiler-sdk-tool": [part]}))
    return path


def rocprofv2(events, folder):
    """Write the tables of rocprofv2 --hip-trace: kernels and copies are in one."""
    kernels, copies, calls = split(events)
    rows = [["HIP_OPS_DOMAIN", "KernelExecution", one["name"], *at, number] for one, *at, number in kernels]
    rows += [["HIP_OPS_DOMAIN", "CopyDeviceToHost", "", *at, number] for _, *at, number in copies]
    rows += [["HIP_OPS_DOMAIN", "BarrierMarker", "", 10**8, 10**8 + 9, 10**6]]
    columns = "Domain,Operation,Kernel_Name,Start_Timestamp,Stop_Timestamp,Correlation_ID"
    path = table(folder / "hcc_ops_trace_7.csv", columns, rows)
    rows = [["HIP_API_DOMAIN", one["name"], *at, number] for one, *at, number in calls]
    table(folder / "hip_api_trace_7.csv", "Domain,Function,Start_Timestamp,End_Timestamp,Correlation_ID", rows)
    return path


def nsys_csv(events, folder):
    kernels, copies, calls = split(events)
    rows = [[at[0], at[1] - at[0], n, "H100 (0)", one["args"]["stream"], one["name"]] for one, *at, n in kernels]
    rows += [[at[0], at[1] - at[0], n, "H100 (0)", 1, "[CUDA memcpy DtoH]"] for _, *at, n in copies]
    path = table(folder / "7_cuda_gpu_trace.csv", "Start (ns),Duration (ns),CorrId,Device,Strm,Name", rows)
    rows = [[at[0], at[1] - at[0], f"{one['name']}_v7000", 0, n, 9, one["tid"]] for one, *at, n in calls]
    table(folder / "7_cuda_api_trace.csv", "Start (ns),Duration (ns),Name,Result,CorrID,Pid,Tid", rows)
    return path


def old_rocprof(events, folder, name="results.db", kernels_in="OPS"):
    """Write the database of the old rocprof: with a trace of HIP kernels are in OPS, else in KERN."""
    kernels, copies, calls = split(events)
    tables = {
        "OPS": ('BeginNs, EndNs, "dev-id", "queue-id", Name, pid, "Index"', []),
        "KERN": ('BeginNs, EndNs, "gpu-id", "queue-id", KernelName, pid, "Index"', []),
        "COPY": ('BeginNs, EndNs, "dev-id", Name, pid, "Index"', []),
        "HIP": ('BeginNs, EndNs, pid, tid, Name, "Index"', []),
        "HSA": ('BeginNs, EndNs, pid, tid, Name, "Index"', []),
    }
    for one, *at, number in kernels:
        tables[kernels_in][1].append((*at, 0, one["args"]["stream"], f'"{one["name"]}"', 9, number))
    tables[kernels_in][1].append((1, 9, 0, 1, '"<barrier packet>"', 9, 10**6))
    tables["COPY"][1].extend((*at, 0, "CopyDeviceToHost", 9, number) for _, *at, number in copies)
    tables["HIP"][1].extend((*at, 9, one["tid"], one["name"], number) for one, *at, number in calls)
    tables["HSA"][1].extend((10**8 + i, 10**8 + i, 9, 5, "hsa_signal_create", i) for i in range(9))
    with contextlib.closing(sqlite3.connect(folder / name)) as connection:
        for table_name, (columns, rows) in tables.items():
            connection.execute(f"CREATE TABLE {table_name} ({columns})")
            marks = ", ".join("?" * len(columns.split(",")))
            connection.executemany(f"INSERT INTO {table_name} VALUES ({marks})", rows)
        connection.commit()
    return folder / name


WRITERS = (rocprofv3, rocpd_csv, rocprofv3_json, rocprofv2, nsys_csv, old_rocprof)
BY_NAME = {writer.__name__: writer for writer in WRITERS}


@pytest.mark.parametrize("name", ["loader", "call", "stream", "event", "peer", "copy", "queue"])
@pytest.mark.parametrize("kind", BY_NAME)
def test_why_the_gpu_idled_from_the_calls_of_a_run(kind, name, tmp_path, capsys):
    """Of the calls in a second table nobody but the databases' readers made anything."""
    events, reason, meanwhile = WHY[name]
    if kind == "rocprofv2" and name in ("stream", "peer"):  # its table has no queues
        reason = idle.UNKNOWN
    found = idle_of(BY_NAME[kind](events, tmp_path), capsys)
    (gap,) = found["largest_gaps"]
    assert (gap["gap_us"], gap["reason"], gap["host"]) == (300, reason, meanwhile)
    assert found["host_known"] and not found["warnings"]
    assert found["launch_bound"] is {idle.LATE: True, idle.UNKNOWN: None}.get(reason, False)


@pytest.mark.parametrize("kind", BY_NAME)
def test_without_calls_a_run_says_what_stays_open(kind, tmp_path, capsys):
    events = [event for event in pair(390) if event["cat"] == "kernel"]
    found = idle_of(BY_NAME[kind](events, tmp_path), capsys)
    assert found["launch_bound"] is True and not found["host_known"]
    assert any(remark.startswith("We can't tell why the GPU idled") for remark in found["remarks"])


@pytest.mark.parametrize("kind", BY_NAME)
def test_launches_of_a_run_without_kernels_are_lost(kind, tmp_path, capsys):
    found = idle_of(BY_NAME[kind](some_lost(20), tmp_path), capsys)
    words = "20 of 40 launches have no kernel: they were captured into a graph, or the profiler lost them."
    assert found["launch_bound"] is None and words in found["warnings"]


def test_the_tables_of_a_run_are_named(tmp_path, capsys):
    path = rocprofv3(WHY["copy"][0], tmp_path)
    copies = "Its copies are those of 7_memory_copy_trace.csv."
    assert read_profile(tmp_path).notes == (
        copies,
        "The host's calls are those of 7_hip_api_trace.csv and 7_hsa_api_trace.csv.",
    )
    path.with_name("7_hsa_api_trace.csv").write_text("Start_Timestamp,End_Timestamp\n1,2\n")
    words = "7_hsa_api_trace.csv has no columns of calls, so it isn't read: why the GPU idled stays open."
    assert read_profile(path).notes == (copies, "The host's calls are those of 7_hip_api_trace.csv.", words)
    calls = path.with_name("7_hip_api_trace.csv")
    calls.write_text(calls.read_text()[:-9])
    refused(kernel_times.main, [path], capsys, f"{calls} is cut off or damaged")


@pytest.mark.parametrize("name", ["7_hip_api_trace.csv", "7_cuda_api_trace.csv"])
def test_a_table_of_calls_alone_is_no_table_of_kernels(name, tmp_path, capsys):
    """nsys' calls were read as kernels, by their names and times."""
    writer = rocprofv3 if "hip" in name else nsys_csv
    writer(pair(390), tmp_path)
    words = "has the calls of the CPU, not kernels: give the table of kernels beside it, or record kernels, too"
    refused(kernel_times.main, [tmp_path / name], capsys, words)


def test_rocprofv2s_kernels_without_numbers_leave_the_reason_open(tmp_path, capsys):
    rows = [[i, f"k{i}", 0, 1, 9, 9, 1000 * i, 1000 * i + 100] for i in range(1, 9)]
    path = table(tmp_path / "results_7.csv", "Index,KernelName,gpu-id,queue-id,pid,tid,BeginNs,EndNs", rows)
    lack = "There is no table of copies beside it: if the program copied, that time counts as idle here."
    assert read_profile(path).notes == (lack,)
    rows = [["HSA_OPS_DOMAIN", "MEMORY_COPY", 1000 * i + 100, 1000 * i + 1000, i] for i in range(1, 8)]
    columns = "Domain,Operation,Start_Timestamp,Stop_Timestamp,Correlation_ID"
    table(tmp_path / "async_copy_trace_7.csv", columns, rows)
    rows = [["HIP_API_DOMAIN", "hipLaunchKernel", 1000 * i, 1000 * i + 9, i] for i in range(9)]
    table(tmp_path / "hip_api_trace_7.csv", "Domain,Function,Start_Timestamp,End_Timestamp,Correlation_ID", rows)
    found = idle_of(path, capsys)
    assert found["idle_us"] == 0 and found["launch_bound"] is False
    assert found["remarks"] == [
        "Its copies are those of async_copy_trace_7.csv.",
        "hip_api_trace_7.csv isn't used: the kernels don't name their launches, so why the GPU idled stays open.",
    ]


def test_what_the_old_rocprofs_table_lacks_is_in_its_database(tmp_path, capsys):
    """A folder with both was refused, and the database told to give the table, which has no copies."""
    rows = [[i, f"k{i}", 0, 1, 9, 9, 10_000_000 + 1000 * i, 10_000_100 + 1000 * i] for i in range(1, 9)]
    path = table(tmp_path / "results.csv", "Index,KernelName,gpu-id,queue-id,pid,tid,BeginNs,EndNs", rows)
    before = idle_of(path, capsys)
    assert before["launch_bound"] is True
    database = old_rocprof(WHY["copy"][0], tmp_path)
    found = idle_of(path, capsys)
    words = "results.db beside it has 1 copies and 12 calls of the CPU, which this table lacks: give that file."
    assert (found["launch_bound"], found["warnings"]) == (None, [words])
    assert idle_of(tmp_path, capsys)["largest_gaps"][0]["reason"] == idle.COPY
    with contextlib.closing(sqlite3.connect(database)) as connection:
        connection.execute("DELETE FROM COPY")
        connection.commit()
    found = idle_of(path, capsys)
    assert found["launch_bound"] is True and found["remarks"][0] == words.replace("1 copies", "0 copies")


def test_the_old_rocprof_without_a_trace_of_hip(tmp_path):
    """Its kernels have no numbers of launches then."""
    events = [event for event in pair(390) if event["cat"] == "kernel"]
    profile = read_profile(old_rocprof(events, tmp_path, kernels_in="KERN"))
    assert [(call.name, call.launch) for call in profile.calls] == [("gemm", None), ("gemm", None)]


def test_json_whose_calls_have_no_names_says_so(tmp_path):
    path = rocprofv3_json(pair(390), tmp_path)
    content = json.loads(path.read_text())
    del content["rocprofiler-sdk-tool"][0]["strings"]
    path.write_text(json.dumps(content))
    (note,) = read_profile(path).notes
    assert note.startswith("Its 2 calls of the CPU have no names, so they aren't read: a rocpd database")


def test_the_calls_in_a_perfetto_trace_are_named(tmp_path):
    packets = [begin(5, 2, "hipLaunchKernel", "hip_api"), end(6, 2), begin(10, 1, "k", "kernel_dispatch"), end(20, 1)]
    (tmp_path / "trace.pftrace").write_bytes(message({1: packets}))
    profile = read_profile(tmp_path / "trace.pftrace")
    (note,) = profile.notes
    assert len(profile.calls) == 1 and note.startswith("Its 1 calls of HIP and HSA aren't read: a rocpd database")


def counted(kind, path, of_this_run=True):
    """Add counters to a run of rocprofv3, whose kernels ran one by one then."""
    if kind == "rocprofv3":
        start = int(1e3 * (CLOCK_US + 10)) + (not of_this_run)
        columns = "Agent_Id,Kernel_Name,Counter_Name,Counter_Value,Start_Timestamp,End_Timestamp"
        row = ["Agent 4", "gemm", "SQ_WAVES", 1.0, start, start + 9]
        table(path.with_name("7_counter_collection.csv"), columns, [row])
    elif kind == "rocprofv3_json":
        content = json.loads(path.read_text())
        content["rocprofiler-sdk-tool"][0]["callback_records"] = {"counter_collection": [{}] * of_this_run}
        path.write_text(json.dumps(content))
    else:
        with contextlib.closing(sqlite3.connect(path)) as connection:
            connection.execute("CREATE TABLE counters_collection (dispatch_id, value)")
            connection.executemany("INSERT INTO counters_collection VALUES (?, 1)", [(1,)] * of_this_run)
            connection.commit()


@pytest.mark.parametrize("kind", ["rocprofv3", "rocprofv3_json", "rocpd"])
def test_kernels_whose_counters_were_read_ran_one_by_one(kind, tmp_path, capsys):
    """In a run of rocprofv3 --kernel-trace --pmc: only tables with the counters as columns were known to be such."""
    events = pair(390)
    path = database_of(events, kind, tmp_path / "x.db") if kind == "rocpd" else BY_NAME[kind](events, tmp_path)
    counted(kind, path)
    found = idle_of(path, capsys)
    assert found["launch_bound"] is None and found["warnings"][0].startswith("Counters were read in this run")


@pytest.mark.parametrize("kind", ["rocprofv3", "rocprofv3_json", "rocpd"])
def test_counters_of_another_run_forbid_no_verdict(kind, tmp_path, capsys):
    events = pair(390)
    path = database_of(events, kind, tmp_path / "x.db") if kind == "rocpd" else BY_NAME[kind](events, tmp_path)
    counted(kind, path, of_this_run=False)
    assert idle_of(path, capsys)["launch_bound"] is True


def test_counters_without_times_may_be_of_the_same_run(tmp_path, capsys):
    path = rocprofv3(pair(390), tmp_path)
    path.with_name("7_counter_collection.csv").write_text(
        "Kernel_Name,Counter_Name,Counter_Value,X\ngemm,SQ_WAVES,1,1\n"
    )
    found = idle_of(path, capsys)
    assert found["launch_bound"] is True
    assert found["remarks"][-1].startswith("If 7_counter_collection.csv is of the same run, its kernels ran one by one")


@pytest.mark.parametrize("kind", [*BY_NAME, "rocpd", "nsys"])
def test_calls_of_the_host_without_times_are_left_out(kind, tmp_path):
    """A NULL in a database refused the whole file."""
    events = [*pair(390), {**pair(390)[0], "ts": -CLOCK_US, "dur": 0, "args": {"correlation": 9}}]
    if kind in BY_NAME:
        path = BY_NAME[kind](events, tmp_path)
    else:
        path = database_of(events, kind, tmp_path / "x.db")
        calls = "regions" if kind == "rocpd" else "CUPTI_ACTIVITY_KIND_RUNTIME"
        with contextlib.closing(sqlite3.connect(path)) as connection:
            connection.execute(f"DELETE FROM {calls} WHERE start < 0")  # of the other process
            connection.execute(f"UPDATE {calls} SET end = NULL WHERE end = 0")
            connection.commit()
    profile = read_profile(path)
    assert "Without times (0 in the file): 1 calls of the CPU, which are left out." in profile.notes
    assert min(event["ts"] for event in profile.host) > 0 and profile.calls[1].launch
