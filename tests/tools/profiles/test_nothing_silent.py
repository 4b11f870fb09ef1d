"""What a file holds and a reader cannot use is named, and a verdict that rests on a part is none.

Times of traces are in us, those of tables and databases in ns.
"""

import bz2
import io
import json
import lzma
import zipfile

import pytest
from test_foreign_profiles import GEMM, host, idle_of, kernel, launched, mark, result_of, write  # noqa: F401

import analyze_kernel_launches as launches
import kernel_counters
import kernel_times
from common.profiles import read_profile
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
    """Where a number that is read stands last, it may be cut off: add the end of line if the file is whole."""
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


def empty_of(path):
    path.write_text("Kernel_Name,Start_Timestamp,End_Timestamp\nk,0,0\n")
    return path
