"""Readers name all that a file holds and they cannot use; a verdict that rests on a part is none.

Times of traces are in us, those of tables and databases in ns.
"""

import bz2
import contextlib
import io
import json
import lzma
import os
import sqlite3
import zipfile

import pytest
from test_foreign_profiles import GEMM, database_of, host, idle_of, kernel, launched, mark, result_of, write  # noqa: F401
from test_profiles import begin, end, message

import analyze_communication as communication
import analyze_gemm_operations as gemm_operations
import analyze_kernel_launches as launches
import kernel_counters
import kernel_times
from common.profiles import idle, read_profile
from in_process import refused

# ---------------------------------------------------------------- one refusal per cause


def zipped(text):
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("trace.json", text)
    return packed.getvalue()


TRACE = json.dumps({"traceEvents": [kernel(GEMM, 20 * i, 10) for i in range(9)]})
TABLE = "Kernel_Name,Start_Timestamp,End_Timestamp,Grid_Size_Z\n" + "".join(
    f"k,{1000 * i},{1000 * i + 900},1\n" for i in range(1, 9)
)
FOREIGN = {  # name: content, words that say how to make it readable
    "trace.zip": (zipped(TRACE), "is a zip archive: unpack it with unzip"),
    "trace.json.xz": (lzma.compress(TRACE.encode()), "is packed with xz: unpack it with unxz"),
    "trace.json.bz2": (bz2.compress(TRACE.encode()), "is packed with bzip2: unpack it with bunzip2"),
    "trace.json.zst": (b"\x28\xb5\x2f\xfd" + bytes(99), "is packed with zstd: unpack it with unzstd"),
    "trace.7z": (b"7z\xbc\xaf\x27\x1c" + bytes(99), "is a 7z archive: unpack it"),
    "trace.tar": (b"trace.json".ljust(257, b"\0") + b"ustar\x0000" + bytes(99), "is a tar archive: unpack it with tar"),
    "utf16.json": (TRACE.encode("utf-16"), "is text in UTF-16: convert it with iconv -f UTF-16 -t UTF-8"),
    "utf16.csv": (b"\xfe\xff" + TABLE.encode("utf-16-be"), "is text in UTF-16: convert it with iconv"),
    "r.ncu-rep": (b"NVR\0" + bytes(99), "is a report of Nsight Compute: write its table with ncu --import"),
    "r.nsys-rep": (b"NV\0\xff" + bytes(99), "is a report of Nsight Systems: turn it into a database with nsys export"),
    "r.qdrep": (b"\x01\0\xff" + bytes(99), "is a report of Nsight Systems: turn it into a database with nsys export"),
    "lfs.json": (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:1234\nsize 9\n",
        "is a pointer of Git LFS, not the file: fetch it with git lfs pull",
    ),
    "page.json": (
        b"\n<!DOCTYPE html>\n<html>trace.json</html>\n",
        "is a web page, not the file: download the raw file",
    ),
    "memory.pickle": (b"\x80\x04\x95" + bytes(99), "is a pickle: PyTorch's memory snapshots open in"),
    "a.xplane.pb": (b"\n\x05\0abc", "is a profile of JAX or TensorFlow"),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_each_foreign_file_gets_its_own_way_out(name, tmp_path, capsys):
    """All of them were "no Perfetto trace, or damaged: turn an .nsys-rep file into a database"."""
    content, words = FOREIGN[name]
    (tmp_path / name).write_bytes(content)
    for main in (kernel_times.main, kernel_counters.main):
        refused(main, [tmp_path / name], capsys, f"{tmp_path / name} {words}")


def test_two_traces_in_one_file_are_said(tmp_path, capsys):
    path = tmp_path / "trace.json"
    path.write_text(TRACE + TRACE)
    refused(kernel_times.main, [path], capsys, "holds several traces, one after the other")
    path.write_text(TRACE + TRACE[:99])  # the second process was ended
    refused(kernel_times.main, [path], capsys, "holds several traces, one after the other")


def test_a_table_without_a_last_end_of_line_is_read(tmp_path, capsys):
    """The last number may be cut off, if it is one that is read: add the end of line if the file is whole."""
    path = tmp_path / "kernel_trace.csv"
    path.write_text(TABLE)
    whole = idle_of(path, capsys)
    path.write_text(TABLE.rstrip("\n"))
    found = idle_of(path, capsys)
    assert found["launch_bound"] is whole["launch_bound"] is False and found["launches"] == 8
    words = "Its last line has no end: if the file was cut off, rows are missing."
    assert found["remarks"] == [words, *whole["remarks"]]
    path.write_text(TABLE.replace(",Grid_Size_Z", "").replace(",1\n", "\n").rstrip("\n"))
    refused(kernel_times.main, [path], capsys, "its last number may be cut off (if the file is whole, add the end")
    path.write_text(TABLE[:-8])
    refused(kernel_times.main, [path], capsys, "its last line has no end")


def test_a_counter_that_may_be_cut_off_is_refused(tmp_path, capsys):
    path = tmp_path / "results.csv"
    path.write_text("Index,KernelName,gpu-id,queue-id,pid,obj,FETCH_SIZE\n0,k,0,0,7,0x0,1234")
    refused(kernel_counters.main, [path], capsys, "its last number may be cut off (if the file is whole, add the end")


UNITS = {  # heading of start and duration: ns per unit
    "Start (ns),Duration (ns)": 1,
    "Start(nsec),Duration(nsec)": 1,  # Nsight Systems 2021
    "Start (us),Duration (us)": 1e3,
    "Start (usec),Duration (usec)": 1e3,
    "Start (ms),Duration (ms)": 1e6,
    "Start (s),Duration (sec)": 1e9,
}


@pytest.mark.parametrize("heading", UNITS)
def test_a_timeline_of_nsys_stats_in_any_unit(heading, tmp_path, capsys):
    path = tmp_path / "trace.csv"
    scale = UNITS[heading]
    rows = [f"{2e6 * i / scale},{1e6 / scale},{i},H100 (0),7,k" for i in range(1, 4)]
    path.write_text("\n".join([f"{heading},CorrId,Device,Strm,Name", *rows, ""]))
    found = idle_of(path, capsys)
    assert (found["busy_us"], found["idle_us"]) == pytest.approx((3000, 2000))


@pytest.mark.parametrize(
    ("heading", "us"),
    [
        ("Time(%),Total Time(ns),Instances,Average,Minimum,Maximum,Name", 0.9),
        ("Time (%),Total Time (us),Instances,Avg (us),Min (us),Max (us),Name", 900),
    ],
)
def test_sums_of_nsys_stats_in_any_unit(heading, us, tmp_path, capsys):
    path = tmp_path / "sums.csv"
    path.write_text(f"{heading}\n100,900,3,300,250,350,k\n")
    (row,) = result_of(kernel_times.main, [path], capsys)["kernels"]
    assert [row[key] for key in ("total_us", "min_us", "max_us")] == pytest.approx([us, us * 250 / 900, us * 350 / 900])


# ---------------------------------------------------------------- times


def test_times_as_text_are_times(write):  # noqa: F811
    events = [kernel(GEMM, 20 * i, 10) for i in range(5)]
    for event in events:
        event |= {"ts": str(event["ts"]), "dur": f"{event['dur']:.3f}"}
    calls = read_profile(write(events)).calls
    assert [(call.start_ns, call.total_ns) for call in calls] == [(20_000 * i, 10_000) for i in range(5)]
    events[2]["ts"] = "soon"
    with pytest.raises(Exception, match="could not convert string to float: 'soon'"):
        read_profile(write(events))


def test_events_of_begin_and_end_are_read(write, capsys):  # noqa: F811
    """A legal form of Chrome's traces: an end belongs to the last begin of its thread."""
    events = []
    for i in range(3):
        for phase, ts in (("B", 100 * i), ("E", 100 * i + 90)):
            events.append({key: value for key, value in kernel(GEMM, ts, 0).items() if key != "dur"} | {"ph": phase})
    outer = host("cpu_op", "outer", 0, 0) | {"ph": "B"}
    inner = host("cpu_op", "inner", 10, 0) | {"ph": "B"}
    ends = [{"ph": "E", "pid": 9, "tid": 9, "ts": ts} for ts in (20, 300)]
    found = read_profile(write([*events, outer, inner, *ends]))
    assert [(call.start_ns, call.total_ns) for call in found.calls] == [(100_000 * i, 90_000) for i in range(3)]
    assert [(event["name"], event["dur"]) for event in found.host] == [("outer", 300), ("inner", 10)]
    assert not found.warnings
    path = write(events[:-1])
    assert idle_of(path, capsys)["launch_bound"] is None
    assert read_profile(path).warnings == ("Without an end: 1 of 3 events that begin, which are left out.",)


ZERO = {  # how many of 40 kernels have no times, and the time at which the others begin
    "many": (20, 1000.0),
    "three": (3, 1000.0),
    "one": (1, 1000.0),
    "since 1970": (1, 5.3e12),
}


def launches_and_kernels(count, begin, zero=0):
    """Return steps of 10 launches with their kernels, of which the last ones have zero for a time."""
    events = []
    for i in range(count):
        if i % 10 == 0:
            events.append(mark(f"ProfilerStep#{i // 10}", begin + 100 * i, 1000))
        events.append(launched(i + 1, begin + 100 * i + 1))
        lost = i >= count - zero
        events.append(kernel(GEMM, 0 if lost else begin + 100 * i + 10, 0 if lost else 80, correlation=i + 1))
    return events


@pytest.mark.parametrize("name", ZERO)
def test_zero_is_no_time(name, write, capsys):  # noqa: F811
    """PyTorch 2.12 writes it where CUPTI gave none: KeyError, "rows repeat a dispatch", "idle 5,300,000,002 ms"."""
    zero, begin = ZERO[name]
    path = write(launches_and_kernels(40, begin, zero))
    found = idle_of(path, capsys)
    assert (found["launches"], found["launch_bound"]) == (40 - zero, None)
    words = f"Without times (0 in the file): {zero} of 40 kernels and copies, which all sums lack."
    assert found["warnings"] == [words]
    assert not any("warm-up" in remark for remark in found["remarks"])
    assert found["idle_us"] < 1e5
    assert not idle_of(write(launches_and_kernels(40, begin)), capsys)["warnings"]


@pytest.mark.parametrize("times", ["5000,0", "0,0"])
def test_a_row_without_times_is_left_out(times, tmp_path, capsys):
    """One End_Timestamp of 0 refused the whole file."""
    path = tmp_path / "kernel_trace.csv"
    path.write_text(TABLE + f"k,{times},1\n")
    found = idle_of(path, capsys)
    assert (found["launches"], found["launch_bound"]) == (8, None)
    assert found["warnings"] == ["Without times (0 in the file): 1 of 9 rows, which all sums lack."]
    refused(launches.main, ["--trace-file", empty_of(path)], capsys, "is damaged: all of its times are 0")


@pytest.mark.parametrize("kind", ["nsys", "rocpd"])
@pytest.mark.parametrize("times", ["start = 0, end = 0", "end = 0", "start = NULL", "end = NULL"])
def test_rows_of_a_database_without_times_are_left_out(kind, times, tmp_path, capsys):
    path = database_of([kernel("k", 20 * i, 15) for i in range(9)], kind, tmp_path / "report.db")
    with contextlib.closing(sqlite3.connect(path)) as connection:
        table = "kernels" if kind == "rocpd" else "CUPTI_ACTIVITY_KIND_KERNEL"
        connection.execute(f"UPDATE {table} SET {times} WHERE rowid = 3")
        connection.commit()
    found = idle_of(path, capsys)
    assert (found["launches"], found["launch_bound"]) == (8, None)
    assert found["warnings"] == ["Without times (0 in the file): 1 of 9 rows, which all sums lack."]


def test_records_of_rocprofs_json_without_times_are_left_out(tmp_path, capsys):
    path = peers("json", tmp_path)
    content = json.loads(path.read_text())
    content["rocprofiler-sdk-tool"][0]["buffer_records"]["kernel_dispatch"][3]["end_timestamp"] = 0
    path.write_text(json.dumps(content))
    assert idle_of(path, capsys)["warnings"] == ["Without times (0 in the file): 1 of 15 rows, which all sums lack."]


def empty_of(path):
    path.write_text("Kernel_Name,Start_Timestamp,End_Timestamp\nk,0,0\n")
    return path


# ---------------------------------------------------------------- the other tables and files of a run


def graph_export(folder, *, kernels=True, entries=3):
    """Return an export with entries for whole graphs, of 900 us, and kernels of 20 us."""
    events = []
    for i in range(4):
        events += [launched(100 + i, 1000 * i + 915), kernel("k", 1000 * i + 920, 20, correlation=100 + i)]
    path = database_of(events, "nsys", folder / "report.sqlite")
    with contextlib.closing(sqlite3.connect(path)) as connection:
        if not kernels:
            connection.execute("DROP TABLE CUPTI_ACTIVITY_KIND_KERNEL")
        columns = "start, end, deviceId, graphId, streamId, correlationId, globalPid, graphExecId"
        connection.execute(f"CREATE TABLE CUPTI_ACTIVITY_KIND_GRAPH_TRACE ({columns})")
        for i in range(entries):
            start = 10_000_000 + 1_000_000 * i
            row = (start, start + 900_000, 0, 1, 1, 200 + i, 9 * 2**24, 5)
            connection.execute(f"INSERT INTO CUPTI_ACTIVITY_KIND_GRAPH_TRACE VALUES ({', '.join('?' * 8)})", row)
        connection.commit()
    return path


def test_whole_graphs_beside_kernels_are_work(tmp_path, capsys):
    """nsys's default: "launch-bound: the GPU waits 97.8 %" where it waited 7.4 %."""
    path = graph_export(tmp_path)
    words = "3 entries are whole CUDA graphs, whose kernels this file doesn't name: record with nsys profile"
    found = idle_of(path, capsys)
    assert found["busy_us"] == pytest.approx(3 * 920 + 20) and found["launch_bound"] is None
    assert found["warnings"] == [f"{words} --cuda-graph-trace=node."]
    rows = result_of(kernel_times.main, [path], capsys)["kernels"]
    assert [(row["kernel"], row["calls"], row["total_us"]) for row in rows] == [
        ("[CUDA graph 5, whole]", 3, 2700),
        ("k", 4, 80),
    ]
    (tmp_path / "report.sqlite").unlink()
    assert idle_of(graph_export(tmp_path, entries=0), capsys)["warnings"] == []
    (tmp_path / "report.sqlite").unlink()
    alone = graph_export(tmp_path, kernels=False)
    refused(kernel_times.main, [alone], capsys, "has one entry for a whole CUDA graph: record it with nsys")


def with_table(path, name, columns, *rows):
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute(f"CREATE TABLE {name} ({columns})")
        connection.executemany(f"INSERT INTO {name} VALUES ({', '.join('?' * len(rows[0]))})", rows)
        connection.commit()
    return path


LOSS = "Not all CUDA events might have been collected."
DRIVER = "Installed CUDA driver version (13.2) is not supported by this build of Nsight Systems."


def test_what_nsight_systems_says_of_itself_is_said(tmp_path, capsys):
    """It had a verdict all the same. Another process's diagnostics say nothing about the one that launched."""
    events = [event for i in range(9) for event in (launched(i, 20 * i), kernel("k", 20 * i + 5, 15, correlation=i))]
    for number, (rows, warnings, remarks) in enumerate(
        [
            ([(0, 3, LOSS, 9 * 2**24)], [f"Nsight Systems says: {LOSS}"], []),
            ([(0, 3, LOSS, None)], [f"Nsight Systems says: {LOSS}"], []),
            ([(0, 3, LOSS, 8 * 2**24)], [], []),
            ([(0, 3, LOSS, 1)], [f"Nsight Systems says: {LOSS}"], []),  # of no process that the file names
            ([(0, 3, DRIVER, 9 * 2**24), (0, 1, "CUDA hardware tracing is not supported", 9 * 2**24)], [], [DRIVER]),
            ([(0, 3, "Not all NVTX events might have been collected.", 9 * 2**24)], [], []),
        ]
    ):
        path = database_of(events, "nsys", tmp_path / f"{number}.sqlite")
        with_table(path, "DIAGNOSTIC_EVENT", "timestamp, severity, text, globalPid", *rows)
        found = idle_of(path, capsys)
        assert found["warnings"] == warnings and (found["launch_bound"] is None) == bool(warnings), rows
        assert found["remarks"] == [f"Nsight Systems says: {text}" for text in remarks]


def test_lost_kernels_are_blamed_on_what_nsight_systems_says(tmp_path, capsys):
    path = database_of([launched(i, 20 * i) for i in range(9)], "nsys", tmp_path / "report.sqlite")
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("DROP TABLE CUPTI_ACTIVITY_KIND_KERNEL")
        connection.execute("DROP TABLE CUPTI_ACTIVITY_KIND_MEMCPY")
        connection.commit()
    refused(kernel_times.main, [path], capsys, "none of their kernels: the profiler lost them; if its version is older")
    with_table(path, "DIAGNOSTIC_EVENT", "timestamp, severity, text, globalPid", (0, 3, DRIVER, 9 * 2**24))
    refused(kernel_times.main, [path], capsys, f"none of their kernels; Nsight Systems says: {DRIVER}")


def test_work_of_a_gpu_in_a_table_that_is_not_read_is_named(tmp_path):
    path = database_of([kernel("k", 20 * i, 15) for i in range(9)], "nsys", tmp_path / "report.sqlite")
    with_table(path, "VULKAN_WORKLOAD", "start, end, deviceId", (1, 2, 0), (3, 4, 0))
    with_table(path, "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION", "start, end, deviceId", (1, 2, 0))
    assert read_profile(path).notes == ("2 rows of VULKAN_WORKLOAD aren't read, which may be work of the GPU, too.",)


COPY = "Kind,Direction,Stream_Id,Source_Agent_Id,Destination_Agent_Id,Correlation_Id,Start_Timestamp,End_Timestamp\n"
KERNELS = "Agent_Id,Queue_Id,Kernel_Name,Start_Timestamp,End_Timestamp,Grid\n"


def rocprof_csv(folder, direction, agents, name="1_kernel_trace.csv", agent="Agent 4"):
    """Return the trace of ten kernels of 10 us, 50 us apart, and beside it one of copies that fill the gaps."""
    path = folder / name
    rows = [f"{agent},1,gemm,{1_000_000 + 50_000 * i},{1_010_000 + 50_000 * i},1\n" for i in range(10)]
    path.write_text(KERNELS + "".join(rows))
    copies = [
        f"MEMORY_COPY,{direction},0,{agents},{i},{1_011_000 + 50_000 * i},{1_049_000 + 50_000 * i}\n" for i in range(10)
    ]
    path.with_name(name.replace("kernel_trace", "memory_copy_trace")).write_text(COPY + "".join(copies))
    return path


@pytest.mark.parametrize("agents", ["Agent 0,Agent 4", "Agent 4,Agent 0"])
def test_the_copies_beside_a_table_of_kernels_are_read(agents, tmp_path, capsys):
    """They fill each gap: "launch-bound: the GPU waits 78.3 %", where rocprofv3's JSON of the run said 3.9 %."""
    path = rocprof_csv(tmp_path, "MEMORY_COPY_HOST_TO_DEVICE", agents)
    for place in (tmp_path, path):
        found = idle_of(place, capsys)
        assert found["launch_bound"] is False and found["idle_us"] == pytest.approx(19)
        assert found["per_step"][0]["exposed_copies_ms"] == pytest.approx(0.38)
        assert "Its copies are those of 1_memory_copy_trace.csv." in found["remarks"]
    row = result_of(communication.main, [path, "--steps", 1], capsys)["processes"][0]
    assert (row["busy_ms"], row["communication_ms"]) == (pytest.approx(0.48), 0)
    copies = path.with_name("1_memory_copy_trace.csv")
    refused(kernel_times.main, [copies], capsys, "has only copies: give the kernel_trace file beside it")
    whole = copies.read_text()
    copies.write_text("Start_Timestamp,End_Timestamp\n1,2\n")
    found = idle_of(path, capsys)
    assert found["launch_bound"] is None and found["warnings"][0].startswith(f"{copies.name} has no columns of copies")
    copies.write_text(whole[:-30])
    refused(kernel_times.main, [path], capsys, f"{copies} is cut off or damaged")


def test_a_table_of_kernels_alone_says_what_it_lacks(tmp_path):
    path = rocprof_csv(tmp_path, "MEMORY_COPY_HOST_TO_DEVICE", "Agent 0,Agent 4")
    path.with_name("1_memory_copy_trace.csv").unlink()
    words = "There is no table of copies beside it: if the program copied, that time counts as idle here."
    assert read_profile(path).notes == (words,)


def peers(kind, folder):
    """Return four peer copies from GPU 4 to GPU 5, and one inside of GPU 4, in a file of rocprofv3."""
    between = [(1_011_000 + 50_000 * i, 1_013_000 + 50_000 * i, 4, 5) for i in range(4)] + [
        (1_211_000, 1_213_000, 4, 4)
    ]
    if kind == "csv":
        path = rocprof_csv(folder, "MEMORY_COPY_DEVICE_TO_DEVICE", "Agent 4,Agent 5")
        rows = [f"MEMORY_COPY,MEMORY_COPY_DEVICE_TO_DEVICE,0,Agent {a},Agent {b},1,{s},{e}\n" for s, e, a, b in between]
        path.with_name("1_memory_copy_trace.csv").write_text(COPY + "".join(rows))
        return path
    kernels = [(1_000_000 + 50_000 * i, 1_010_000 + 50_000 * i) for i in range(10)]
    if kind == "json":
        dispatches = []
        for start, end in kernels:
            what = {"kernel_id": 1, "agent_id": {"handle": 4}, "queue_id": {"handle": 1}}
            dispatches.append({"start_timestamp": start, "end_timestamp": end, "dispatch_info": what})
        copies = []
        for start, end, source, destination in between:
            ends = {"src_agent_id": {"handle": source}, "dst_agent_id": {"handle": destination}}
            copies.append({"start_timestamp": start, "end_timestamp": end, "operation": 4} | ends)
        part = {"kernel_symbols": [{"kernel_id": 1, "formatted_kernel_name": "gemm"}]}
        part["buffer_records"] = {"kernel_dispatch": dispatches, "memory_copy": copies}
        path = folder / "x_results.json"
        path.write_text(json.dumps({"rocprofiler-sdk-tool": [part]}))
        return path
    path = folder / "x_results.db"
    rows = [(start, end, 7, 4, 1, None, "gemm") for start, end in kernels]
    with_table(path, "kernels", "start, end, pid, agent_abs_index, stream_id, stack_id, name", *rows)
    rows = [(s, e, 7, a, b, "MEMORY_COPY_DEVICE_TO_DEVICE") for s, e, a, b in between]
    with_table(path, "memory_copies", "start, end, pid, src_agent_abs_index, dst_agent_abs_index, name", *rows)
    return path


@pytest.mark.parametrize("kind", ["csv", "json", "rocpd"])
def test_copies_between_gpus_communicate(kind, tmp_path, capsys):
    """As PyTorch's PtoP copies do; one inside of a GPU doesn't. They were left out of "GPU busy" as well."""
    path = peers(kind, tmp_path)
    row = result_of(communication.main, [path, "--steps", 1], capsys)["processes"][0]
    assert row["transfers_per_step"] == 4 and row["communication_ms"] == pytest.approx(0.008)
    assert row["busy_ms"] == pytest.approx(0.11)
    assert idle_of(path, capsys)["busy_us"] == pytest.approx(110)


def test_a_copy_of_no_gpu_in_particular_is_said_where_one_gpu_is_read(tmp_path, capsys):
    path = tmp_path / "trace.csv"
    rows = [f"{2000 * i},900,{i},H100 ({i % 2}),7,k" for i in range(1, 7)] + ["20000,100,9,,,[CUDA memcpy HtoD]"]
    path.write_text("\n".join(["Start (ns),Duration (ns),CorrId,Device,Strm,Name", *rows, ""]))
    found = idle_of(path, capsys, "--gpu", "H100 (0)")
    assert (found["launches"], found["launch_bound"]) == (3, None)
    assert found["warnings"] == ["1 copies name no GPU, so they are left out here."]


def test_copies_in_a_perfetto_trace_are_copies(tmp_path):
    packets = []
    for start, name, category in (
        (10, "k", "rocm_kernel_dispatch"),
        (30, "MEMORY_COPY_HOST_TO_DEVICE", "rocm_memory_copy"),
        (50, "SCRATCH_MEMORY_ALLOC", "rocm_hip_stream"),
        (70, "MEMORY_COPY_DEVICE_TO_HOST", "rocm_hip_stream"),
    ):
        packets += [begin(start, 1, name, category), end(start + 10, 1)]
    (tmp_path / "trace.pftrace").write_bytes(message({1: packets}))
    calls = read_profile(tmp_path / "trace.pftrace").calls
    assert [(call.start_ns, call.kind) for call in calls] == [(10, "kernel"), (30, "copy"), (70, "copy")]


# ---------------------------------------------------------------- which process, which rank, which step


def merged(numbers):
    """Return the events of two processes that both call their GPU 0. numbers: the first launch of each."""
    events = []
    for pid, first, offset in ((100, numbers[0], 0), (200, numbers[1], 50)):
        for i in range(10):
            ts = 100 * i + offset
            events.append(launched(first + i, ts) | {"pid": pid, "tid": pid})
            events.append(kernel(GEMM, ts + 4, 46, correlation=first + i))
    return events


def test_two_processes_that_call_their_gpu_0_are_two(write, capsys):  # noqa: F811
    """Their kernels filled each other's gaps: "not launch-bound", where each waits more than half of the time."""
    path = write(merged((1, 101)))
    words = "holds the kernels of 2 processes: choose one with --gpu, of process-100, process-200"
    refused(launches.main, ["--trace-file", path], capsys, words)
    found = idle_of(path, capsys, "--gpu", "process-200")
    assert (found["launches"], found["busy_us"], found["launch_bound"]) == (10, 460, True)
    assert len(result_of(communication.main, [path, "--steps", 1], capsys)["processes"]) == 2
    words = "holds the kernels of 2 processes that both call their GPU 0, and doesn't tell which launched which"
    refused(launches.main, ["--trace-file", write(merged((1, 1)))], capsys, words)


def test_a_second_file_of_a_rank_is_named(write, tmp_path, capsys):  # noqa: F811
    """Engines that share the data all say that they are rank 0: one was left out without a word."""
    events = [mark("ProfilerStep#1", 0, 200), kernel(GEMM, 0, 50), kernel("ncclDevKernel_AllReduce", 60, 9)]
    os.utime(write(events, "a.json", distributedInfo={"rank": 0}), (1, 1))
    write(events, "b.json", distributedInfo={"rank": 0})
    told, alone = result_of(communication.main, [tmp_path], capsys)["remarks"]
    assert alone.endswith("for bandwidths, the folder must hold the traces of all ranks.")
    assert told == "Left out, because a newer file says that it's of the same rank: a.json (rank 0)."
    write(events, "c.json", distributedInfo={"rank": 1})
    found = result_of(communication.main, [tmp_path], capsys)
    assert len(found["processes"]) == 2 and found["remarks"][0] == told


def test_traces_that_name_no_rank_are_a_rank_each(write, tmp_path, capsys):  # noqa: F811
    """They were told to be recorded again."""
    for number, us in ((0, 90), (1, 40)):
        said = {"Collective name": "allreduce", "Group size": 2}
        nccl = kernel("ncclDevKernel_Generic", 150 - us, us, 2, **said)
        write([mark("ProfilerStep#1", 0, 200), kernel(GEMM, 0, 50), nccl], f"host_{number}.json")
    found = result_of(communication.main, [tmp_path], capsys)
    assert [row["communication_ms"] for row in found["processes"]] == [0.09, 0.04]
    assert found["collectives"][0]["last"] == "host_1.json (1 of 1)"
    assert found["remarks"] == ["No trace here says its rank, so each file counts as one."]


def test_a_folder_of_tables_has_a_rank_per_process(tmp_path, capsys):
    for name in ("1_kernel_trace.csv", "2_kernel_trace.csv"):
        rocprof_csv(tmp_path, "MEMORY_COPY_DEVICE_TO_DEVICE", "Agent 4,Agent 5", name)
    rows = result_of(communication.main, [tmp_path, "--steps", 1], capsys)["processes"]
    assert [row["transfers_per_step"] for row in rows] == [10, 10]


def test_older_traces_in_a_folder_are_named(write, tmp_path):  # noqa: F811
    os.utime(write([kernel(GEMM, 0, 9)], "trace_1.json"), (1, 1))
    assert read_profile(tmp_path).notes == ()
    write([kernel(GEMM, 0, 9)], "trace_2.json")
    assert read_profile(tmp_path).notes == ("This is the newest of 2 traces in its folder.",)


def test_steps_that_an_optimizer_marks_may_be_several_per_iteration(write, capsys):  # noqa: F811
    """A GAN's two optimizers share a name: 4 iterations were 8 steps."""
    events = []
    for i in range(8):
        events += [kernel(GEMM, 500 * i, 300), mark("Optimizer.step#Adam.step", 500 * i + 300, 80)]
    path = write(events)
    words = "Its 8 steps are calls of Adam.step: if an iteration has several, as a GAN's has, give --steps N."
    assert words in idle_of(path, capsys)["remarks"]
    found = idle_of(path, capsys, "--steps", 4)
    assert found["launches_per_step"] == 2 and words not in found["remarks"]
    scheduled = write([*events, mark("ProfilerStep#1", 0, 4000)])
    assert words not in idle_of(scheduled, capsys)["remarks"]


def replays(lengths, graphs):
    """Return replays of so many kernels each, of the graph with that number, or without its number."""
    events = []
    for i, (length, graph) in enumerate(zip(lengths, graphs, strict=True)):
        events.append(launched(i + 1, 1000 * i, name="hipGraphLaunch"))
        more = {"correlation": i + 1} | ({"graph id": graph} if graph else {})
        events += [kernel(f"gemm{k}", 1000 * i + 20 + 60 * k, 55, **more) for k in range(length)]
    return events


def test_replays_of_a_graph_that_lack_kernels_are_said(write, capsys):  # noqa: F811
    """Every second replay had lost half of its kernels: "launch-bound: the GPU waits 64.7 %"."""
    found = idle_of(write(replays((8, 4, 8, 4), (7, 7, 7, 7))), capsys)
    assert found["warnings"] == ["2 of 4 replays lack kernels that others of their graph have: the profiler lost them."]
    assert found["launch_bound"] is None
    whole = idle_of(write(replays((8, 4, 8, 4), (7, 8, 7, 8))), capsys)
    assert whole["launch_bound"] is not None and not whole["warnings"]
    unnamed = idle_of(write(replays((8, 4, 8, 4), (None,) * 4)), capsys)
    words = "2 of 4 graph launches have fewer kernels than others that begin alike: if it's one graph, some were lost."
    assert unnamed["warnings"] == [] and words in unnamed["remarks"]
    assert idle_of(write(replays((4, 4), (None,) * 2)), capsys)["remarks"] == []


# ---------------------------------------------------------------- words


def test_what_ran_on_the_cpu_is_no_missing_communication(write, capsys):  # noqa: F811
    events = [mark("ProfilerStep#1", 0, 500), kernel(GEMM, 0, 50)]
    events += [host("cpu_op", "gloo:all_reduce", 100, 300), host("cpu_op", "gloo:broadcast", 410, 50)]
    found = result_of(communication.main, [write(events)], capsys)
    assert found["remarks"] == [
        "gloo communicates on the CPU, for 0.350 ms in 2 calls here: this table has GPUs alone."
    ]


@pytest.mark.parametrize(
    ("name", "dims", "sizes"),
    [
        ("aten::_int_mm", [[64, 32], [32, 16]], (1, 64, 32, 16)),
        ("aten::mv", [[64, 32], [32]], (1, 64, 32, 1)),
        ("aten::addmv", [[64], [64, 32], [32]], (1, 64, 32, 1)),
        ("aten::_grouped_mm", [[64, 32], [8, 32, 16], [8]], (1, 64, 32, 16)),  # each row has one of 8 weights
        ("aten::_grouped_mm", [[8, 64, 32], [8, 32, 16]], (8, 64, 32, 16)),
        ("aten::_grouped_mm", [[64, 128], [128, 16], [8]], (1, 64, 128, 16)),  # a weight's gradient
        ("aten::_scaled_grouped_mm", [[64, 32], [8, 32, 16], [64], [8, 16], [8]], (1, 64, 32, 16)),
    ],
)
def test_matmuls_of_other_names_have_shapes(name, dims, sizes, write, capsys):  # noqa: F811
    shapes = {"Input Dims": dims, "Input type": ["c10::BFloat16"] * len(dims)}
    call = host("cpu_op", name, 0, 50, **{"External id": 1}, **shapes)
    (row,) = result_of(gemm_operations.main, ["--trace-file", write([call, on_gpu(1)])], capsys)["gemms"]
    assert tuple(row[key] for key in ("batch", "m", "k", "n")) == sizes


def on_gpu(number):
    return kernel(GEMM, 100, 50, **{"External id": number})


def test_an_operator_that_the_table_of_matmuls_leaves_out_is_named(write, capsys):  # noqa: F811
    """It said that no matmul had recorded shapes."""
    call = host("cpu_op", "vllm::cutlass_mm", 0, 50, **{"External id": 1}, **{"Input Dims": [[8, 8], [8, 8]]})
    path = write([call, on_gpu(1)])
    refused(
        gemm_operations.main, ["--trace-file", path], capsys, "its matmuls are of operators that this table doesn't"
    )


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        (idle.QUEUE, "mostly from kernel to kernel in a queue"),
        (idle.LATE, "mostly because the host launched late"),
        (idle.UNKNOWN, "mostly for reasons that the profile doesn't tell"),
        (idle.STREAM, "mostly for another stream or an event"),
        (idle.PEER, "mostly for a collective with other ranks"),
    ],
)
def test_the_verdicts_reason_is_a_sentence(reason, words):
    found = {"idle_us": 40.0, "unsure_us": 0.0, "idle_share": 0.4, "warnings": [], "paused_us": 0.0, "warm_up": None}
    found |= {"host_known": True, "late_us": 0.0, "reasons": [{"reason": reason, "percent": 45.0}]}
    assert idle.verdict(found)[1].endswith(words)


# ---------------------------------------------------------------- launches without kernels


def some_lost(lost, capture=None):
    """Return 40 launches, of which the last ones have no kernel. capture: (begin, end) of one on their thread."""
    events = []
    for i in range(40):
        events.append(launched(i, 100 * i))
        if i < 40 - lost:
            events.append(kernel("k", 100 * i + 5, 90, correlation=i))
    for name, ts in zip(("Begin", "End"), capture or (), strict=False):
        events.append(host("cuda_runtime", f"cudaStream{name}Capture", ts, 1, correlation=500 + ts))
    return events


@pytest.mark.parametrize("kind", ["nsys", "rocpd", "trace"])
def test_launches_without_kernels_are_lost_unless_a_graph_captured_them(kind, write, tmp_path, capsys):  # noqa: F811
    """Of databases nobody asked."""
    words = ("20 of 40 launches have no kernel: they were captured into a graph, or the profiler lost them.",)
    for name, events, warnings in (
        ("lost", some_lost(20), words),
        ("few", some_lost(2), ()),
        ("captured", some_lost(20, (1990, 4000)), ()),
        ("later", some_lost(20, (4100, 4200)), words),
    ):
        path = write(events) if kind == "trace" else database_of(events, kind, tmp_path / f"{name}.db")
        profile = read_profile(path)
        assert profile.warnings == warnings, name
        captured = any("launches were captured into a graph, and ran nothing." in note for note in profile.notes)
        assert captured == (name == "captured")
        assert (idle_of(path, capsys)["launch_bound"] is None) == bool(warnings)


def test_launches_of_another_process_or_layer_are_not_lost(tmp_path):
    """Kernels may name HSA's calls instead of HIP's, where those are recorded, too."""
    path = database_of(some_lost(0), "rocpd", tmp_path / "x.db")
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("UPDATE kernels SET stack_id = stack_id + 1000")
        connection.commit()
    assert read_profile(path).warnings == ()
    path = database_of(
        [*some_lost(0), *(launched(900 + i, i) | {"pid": 5} for i in range(9))], "nsys", tmp_path / "y.db"
    )
    assert read_profile(path).warnings == ()
