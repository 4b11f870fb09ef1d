"""Open the file of a profiler: a database, a Perfetto trace, JSON or a table. Standard library only.

formats.py tells what an opened file holds.
"""

import contextlib
import csv
import gc
import json
import re
import sqlite3
import time
from collections.abc import Iterator
from typing import NamedTuple

from common.command_line import Failure, progress
from common.files import EMPTY, check_regular, content_of

DATABASE = "database"
PERFETTO = "Perfetto trace"
JSON = "JSON"
TABLE = "table"
NO_TEXT = re.compile(rb"[\x01-\x08\x0e-\x1f]")


@contextlib.contextmanager
def opened(path):
    """Yield a file's container and its contents: a Database, bytes of Perfetto, parsed JSON, or a Table."""
    check_regular(path)
    with open(path, "rb") as file:
        is_database = file.read(len(SQLITE)) == SQLITE
    if is_database:
        with database(path) as found:
            yield DATABASE, found
        return
    content = content_of(path)
    if not content:
        raise Failure(2, EMPTY)
    if content.startswith(SQLITE):
        raise Failure(2, "is a packed database: unpack it with gunzip")
    refuse_foreign(path, content)
    is_json = re.match(rb"\s*($|[{[])", content)  # blanks alone are damaged in any format
    # A Perfetto trace begins with a line feed; so do PyTorch 2.7's traces, which are JSON, and nsys stats' tables.
    if b"\0" in content or (content.startswith(b"\n") and not is_json and NO_TEXT.search(content)):
        yield PERFETTO, content
        return
    text = content.decode("utf-8", errors="replace")
    del content  # a trace can have a gigabyte, and each copy of it takes memory and time
    if is_json:
        found = parsed(path, text)
        del text
        yield JSON, found
    else:
        yield TABLE, read_table(text)


# What users give instead of a profiler's file: how it begins, or its name ends, and what to do.
FOREIGN_BEGINS = {
    rb"PK\x03\x04": "is a zip archive: unpack it with unzip",
    rb"\xfd7zXZ\0": "is packed with xz: unpack it with unxz",
    rb"BZh\d": "is packed with bzip2: unpack it with bunzip2",
    rb"\x28\xb5\x2f\xfd": "is packed with zstd: unpack it with unzstd",
    rb"7z\xbc\xaf": "is a 7z archive: unpack it with 7z x",
    rb".{257}ustar": "is a tar archive: unpack it with tar xf",
    rb"\xff\xfe|\xfe\xff": "is text in UTF-16: convert it with iconv -f UTF-16 -t UTF-8",
    rb"version https://git-lfs": "is a pointer of Git LFS, not the file: fetch it with git lfs pull",
    rb"\s*<(!doctype html|html)": "is a web page, not the file: download the raw file",
    rb"\x80[\x02-\x05]": "is a pickle: PyTorch's memory snapshots open in https://docs.pytorch.org/memory_viz",
}
NSYS_REPORT = (
    "is a report of Nsight Systems: turn it into a database with nsys export --type sqlite, or into a table with "
    "nsys stats --report cuda_gpu_trace --format csv"
)
FOREIGN_ENDS = {
    ".ncu-rep": "is a report of Nsight Compute: write its table with ncu --import FILE --csv --page raw > ncu.csv, for "
    "kernel_counters.py",
    ".nsys-rep": NSYS_REPORT,
    ".qdrep": NSYS_REPORT,
    ".qdstrm": NSYS_REPORT,
    ".xplane.pb": "is a profile of JAX or TensorFlow: record the program with nsys or rocprofv3",
}


def refuse_foreign(path, content):
    """Raise Failure for a file of another kind that is known, with what to do instead."""
    for end, words in FOREIGN_ENDS.items():
        if path.name.endswith(end):
            raise Failure(2, words)
    for begin, words in FOREIGN_BEGINS.items():
        if re.match(begin, content, re.DOTALL | re.IGNORECASE):
            raise Failure(2, words)


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


# ---------------------------------------------------------------- databases

SQLITE = b"SQLite format 3\0"
LONGEST_S = 600  # seconds that a query may take: a view can be endless
CALL_EVERY = 10**6  # instructions of SQLite's virtual machine


class Database(NamedTuple):
    """An SQLite file that is open for reading."""

    connection: sqlite3.Connection
    names: set  # of its tables and views


@contextlib.contextmanager
def database(path):
    """Open an SQLite file for reading; yield it as a Database."""
    end = time.monotonic() + LONGEST_S
    with contextlib.closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as connection:
        connection.set_progress_handler(lambda: time.monotonic() > end, CALL_EVERY)
        try:
            yield Database(connection, {name for (name,) in connection.execute("SELECT name FROM sqlite_master")})
        except sqlite3.OperationalError as error:
            if str(error) == "interrupted":
                raise Failure(2, f"takes more than {LONGEST_S} s to read: export fewer steps") from None
            raise


def columns_of(connection, table, *alternatives):
    """Return of each set of names the one that is a column of the table, "NULL" where none is."""
    known = {name for _, name, *_ in connection.execute(f"PRAGMA table_info({table})")}
    return [next(iter(wanted & known), "NULL") for wanted in alternatives]


# ---------------------------------------------------------------- JSON

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
            if re.match(r'\s*\{(?=.{0,9999}"traceEvents")', text[error.pos :], re.DOTALL):
                way = "two processes wrote to one name, so record again with the process or rank in the name"
                raise Failure(2, f"holds several traces, one after the other: {way}") from None
            raise
        # Triton's Proton writes a trace per stream
        return {"traceEvents": [event for line in lines for event in json.loads(line)["traceEvents"]]}


# ---------------------------------------------------------------- tables

CSV_NAMES = {  # a profiler's heading, in lower case -> our name
    "name": "name",
    "kernel_name": "name",
    "kernel name": "name",
    "kernelname": "name",
    "start_timestamp": "start",
    "beginns": "start",
    "end_timestamp": "end",
    "stop_timestamp": "end",
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
    "strm": "queue",
    "metric name": "counter",
    "metric value": "value",
    "metric unit": "unit",
    "counter_name": "counter",
    "counter_value": "value",
}
TIME_NAMES = {
    "start": "start",
    "duration": "duration",
    "total time": "total",
    "min": "least",
    "max": "most",
}  # "Start (us)"
TIME_NAMES |= {"minimum": "least", "maximum": "most"}
NS_PER_UNIT = {"n": 1, "u": 1e3, "m": 1e6, "s": 1e9}  # by the first letter of the unit
TIME_HEADING = re.compile(rf"({'|'.join(TIME_NAMES)}) ?\(([num]?s(?:ec)?)\)")
# of ncu, and of nsys stats
MESSAGES = re.compile(r"==|Processing \[|Generating SQLite|NOTICE: |SKIPPED: | +(It is assumed|Consider using) ")
TABLE_TO_READ = re.compile(r"^ *(-{3,} +-{3,}|\|-{9,}|[╒┌╔])", re.MULTILINE)  # of ncu, nsys stats, and ROCm's profilers
NCU_HEADER = '"ID","'


class Table(NamedTuple):
    """A CSV file: the header, with our names for its columns, and an iterator over its rows as dictionaries.

    ns_per_unit: of the columns whose heading names a unit of time. notes: what a reader must know of the file.
    """

    header: list
    rows: Iterator
    ns_per_unit: dict
    notes: tuple = ()


NO_END = "Its last line has no end: if the file was cut off, rows are missing."
MAY_BE_CUT = "its last line has no end, and its last number may be cut off (if the file is whole, add the end of line)"
READ = {*CSV_NAMES.values(), *TIME_NAMES.values()}  # our names of the columns that are read


def names_of_columns(cells):
    """Return our names for the cells of a header, and {name: nanoseconds per unit} of those that name a unit."""
    header = []
    ns_per_unit = {}
    for cell in cells:
        heading = cell.strip().lower()
        if found := TIME_HEADING.fullmatch(heading):
            header.append(TIME_NAMES[found[1]])
            ns_per_unit[header[-1]] = NS_PER_UNIT[found[2][0]]
        else:
            name = CSV_NAMES.get(heading, cell.strip())
            header.append(cell.strip() if name in header else name)  # rocpd names a process twice
    if "calls" in header:  # rocpd's summary calls a sum "DURATION"; nsys's of 2021 names no unit beside these
        more = {"duration": "total", "Minimum": "least", "Maximum": "most"}
        ns_per_unit = {more.get(name, name): scale for name, scale in ns_per_unit.items()}
        header = [more.get(name, name) for name in header]
    return header, ns_per_unit


def read_table(text):
    """Return the Table in the text of a CSV file."""
    if len(re.findall(r"^Processing \[", text, re.MULTILINE)) > 1:
        raise Failure(2, "holds several reports of nsys stats: write one, with --report cuda_gpu_trace --format csv")
    lines = [line for line in text.splitlines() if line and not MESSAGES.match(line)]
    begin = next((i for i, line in enumerate(lines) if line.startswith(NCU_HEADER)), None)
    if begin is None and TABLE_TO_READ.search(text):
        way = "write it with nsys stats --format csv or ncu --csv, or give the profiler's trace or database"
        raise Failure(2, f"is a table to read, not CSV: {way}")
    lines = lines[begin:]  # the program may have printed something before
    cells, *rows = list(csv.reader(lines)) or [[]]
    header, ns_per_unit = names_of_columns(cells)
    notes = ()
    if not text.endswith("\n"):
        if len((rows or [cells])[-1]) != len(header) or not rows:
            raise ValueError("its last line has no end")
        if header[-1] in READ or "__" in header[-1]:  # also ncu's metrics
            raise ValueError(MAY_BE_CUT)
        notes = (NO_END,)
    for line_number, row in enumerate(rows, 2):
        more = len(row) - len(header)
        if more > 0 and header[0] == "name":  # the old rocprof doesn't quote names, which have commas
            row[: more + 1] = [",".join(row[: more + 1])]
        if len(row) != len(header):
            raise ValueError(f"line {line_number} has {len(row)} cells of {len(header)}")
    return Table(header, (dict(zip(header, row, strict=True)) for row in rows), ns_per_unit, notes)
