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
from typing import NamedTuple

from common.command_line import Failure, progress
from common.files import EMPTY, GZIP, content_of

DATABASE = "database"
PERFETTO = "Perfetto trace"
JSON = "JSON"
TABLE = "table"
NO_TEXT = re.compile(rb"[\x01-\x08\x0e-\x1f]")


@contextlib.contextmanager
def opened(path):
    """Yield a file's container and its contents: a Database, bytes of Perfetto, parsed JSON, or a Table."""
    content = content_of(path)
    if not content:
        raise Failure(2, EMPTY)
    if content.startswith(SQLITE):
        with database(path) as found:
            yield DATABASE, found
        return
    if path.name.endswith(".xplane.pb"):
        raise Failure(2, "is a profile of JAX or TensorFlow: record the program with nsys or rocprofv3")
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
    with open(path, "rb") as file:
        if file.read(len(GZIP)) == GZIP:
            raise Failure(2, "is a packed database: unpack it with gunzip")
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


class Table(NamedTuple):
    """A CSV file: the header, with our names for its columns, and an iterator over its rows as dictionaries."""

    header: list
    rows: object


def read_table(text):
    """Return the Table in the text of a CSV file."""
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
    return Table(header, (dict(zip(header, row, strict=True)) for row in rows))
