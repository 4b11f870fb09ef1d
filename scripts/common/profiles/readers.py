"""Read the files of every profiler into profiles. Standard library only."""

import codecs
import contextlib
import csv
import dataclasses
import functools
import gzip
import io
import json
import math
import pathlib
import re
import sqlite3
import stat
import time
import zlib
from collections import Counter

from common import perfetto
from common.command_line import PRECISIONS, Failure, printable
from common.profiles.groups import clean, group_of
from common.profiles.model import PHASES, Operation, Profile, checked_kernel, is_time

# Operators that only look at tensors differently, allocate them or ask about them.
NO_WORK = re.compile(
    r"^(aten::(view|_unsafe_view|reshape|_reshape_alias|transpose|t|numpy_T|as_strided_?|expand|permute|slice|select|narrow|"
    r"split|split_with_sizes|chunk|unbind|unsqueeze|squeeze|flatten|unflatten|detach|detach_|alias|lift_fresh|empty\w*|"
    r"new_empty\w*|resize_|resolve_\w+|result_type|promote_types|is_\w+|item|_local_scalar_dense|set_|to|record_stream)$"
    r"|autograd::|torch::|Optimizer|detach_?$|\w*Backward\d+$|TorchDynamo|AOTDispatcher|Pregraph bytecode|## )"
)
# Operators that compute although they call others: a GEMM copies an operand first, the kernels that Triton interprets
# run inside a Python autograd function, and those of torch.compile inside CompiledFunction.
COMPUTES_ITSELF = re.compile(r"aten::(mm|bmm|addmm|baddbmm)$|\w+Function(Backward)?$")
# Operators that prepare the inputs or the output of their caller, which computes itself if it calls no others: sum
# clears its output first, a division converts its divisor, a convolution's backward copies a weight.
PREPARES = re.compile(r"aten::((zeros|ones)(_like)?|zero_|fill_|copy_|_to_copy|clone|contiguous|scalar_tensor)$")
# Operators that only call those.
ONLY_PREPARES = re.compile(
    PREPARES.pattern + r"|aten::(full(_like)?|new_(zeros|ones|full)|constant_pad_nd|repeat(_interleave)?|type_as|"
    r"(select|slice|diagonal)_backward)$"
)
KINDS = {"kernel": "kernel", "gpu_memcpy": "copy", "gpu_memset": "copy"}  # categories of a trace's events

# All that a reader raises if the contents do not have its format.
DAMAGE = (
    *(ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError, EOFError),
    *(csv.Error, sqlite3.Error, zlib.error, gzip.BadGzipFile),
)
LONGEST_REASON = 200  # letters: it may quote the file


@contextlib.contextmanager
def errors_of(path):
    """Turn every error in reading a file into a Failure with one sentence that names the file."""
    try:
        yield
    except DAMAGE as error:
        reason = f"it has no {error}" if isinstance(error, KeyError) else str(error)
        reason = " ".join(reason.split())
        raise Failure(2, f"{path} is cut off or damaged: {printable(reason[:LONGEST_REASON])}") from None
    except OSError as error:
        raise Failure(2, f"{path} cannot be read: {error.strerror}") from None
    except MemoryError:
        raise Failure(1, f"{path} does not fit into memory") from None
    except Failure as error:
        raise Failure(error.status, f"{path} {error}") from None


# ---------------------------------------------------------------- helpers of all readers

EMPTY = "is empty: the profiler was stopped, wrote nothing, or the disk is full"
GZIP = b"\x1f\x8b"
UNPACKED = 2**32  # bytes at most: a trace of a GPU can have a gigabyte, a damaged or foreign file any number


def content_of(path):
    """Return the bytes of a file, unpacked if gzip packed them."""
    if not stat.S_ISREG(path.stat().st_mode):  # a device or pipe may never end
        raise Failure(2, "is no regular file: name a file that a profiler or a script wrote")
    content = path.read_bytes().removeprefix(codecs.BOM_UTF8)  # an editor may have saved it
    if not content.startswith(GZIP):
        return content
    with gzip.GzipFile(fileobj=io.BytesIO(content)) as packed:
        content = packed.read(UNPACKED + 1)
    if len(content) > UNPACKED:
        raise Failure(2, f"unpacks to more than {UNPACKED / 2**30:.0f} GiB: unpack it yourself if it is yours")
    return content


CONTROL = re.compile(r"\\u00[01]|[\x7f-\x9f]")  # as JSON writes them, apart from spaces and ends of lines


def read_object(path, kind):
    """Return the object in a JSON file of this workshop; refuse numbers that are not finite and control characters.

    kind: the words for such a file in an error message.
    """
    text = content_of(pathlib.Path(path))
    whole = functools.partial(number, convert=int)
    content = json.loads(text, parse_constant=number, parse_float=number, parse_int=whole)
    if not isinstance(content, dict):
        raise Failure(2, f"is no {kind}")
    text = json.dumps(content, ensure_ascii=False)
    text.encode()  # raises where a string is no text
    if CONTROL.search(text):
        raise ValueError("a text in it holds a control character, which a terminal would obey")
    return content


def number(text, convert=float):
    """Convert the text of a number; raise ValueError for forms that only Python reads, such as 1_000 and NaN."""
    value = convert(text)
    if not math.isfinite(value) or not str(text).isascii() or "_" in str(text):
        raise ValueError(f"{text!r} is no number")
    return value


# ---------------------------------------------------------------- CSV: rocprofv3, rocpd, rocprof

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
    "counter_name": "counter",
    "counter_value": "value",
}


def read_table(text):
    """Return the header of a CSV file with our names for its columns, and an iterator over its rows as dictionaries."""
    if not text.endswith("\n"):
        raise ValueError("its last line has no end")  # its last number may be cut off
    lines = [line for line in text.splitlines() if line and not line.startswith("==")]  # ncu's messages begin with ==
    header, *rows = list(csv.reader(lines)) or [[]]
    header = [CSV_NAMES.get(cell.strip().lower(), cell.strip()) for cell in header]
    for line_number, row in enumerate(rows, 2):
        if len(row) != len(header):
            raise ValueError(f"line {line_number} has {len(row)} cells of {len(header)}")
    return header, (dict(zip(header, row, strict=True)) for row in rows)


def read_csv(text):
    """Return the kernels in a table with a row per launch."""
    header, rows = read_table(text)
    if "counter" in header or not {"name", "start", "end"} <= set(header):  # a row per counter would count twice
        raise Failure(2, "has no table of kernels' times: give a kernel_trace file (kernel_counters.py reads counters)")
    kernels = []
    for row in rows:
        start = number(row["start"], int)
        end = number(row["end"], int)
        kernels.append(checked_kernel(row["name"], start, end - start, gpu=row.get("gpu")))
    return kernels


# ---------------------------------------------------------------- databases: rocpd, nsys

SQLITE = b"SQLite format 3\0"
NSYS = "CUPTI_ACTIVITY_KIND_"
TABLES = [  # table, kind, SQL for the name; of rocpd the views, because the names of its tables change
    ("kernels", "kernel", "name"),
    ("memory_copies", "copy", "name"),
    (f"{NSYS}KERNEL", "kernel", "(SELECT value FROM StringIds WHERE id = demangledName)"),
    (f"{NSYS}MEMCPY", "copy", "'[CUDA memcpy]'"),
    (f"{NSYS}MEMSET", "copy", "'[CUDA memset]'"),
]
GPU_COLUMNS = {"agent_abs_index", "deviceId"}  # of rocpd's kernels, and of nsys


LONGEST_S = 600  # seconds that a query may take: a view can be endless
CALL_EVERY = 10**6  # instructions of SQLite's virtual machine


@contextlib.contextmanager
def database(path):
    """Open an SQLite file for reading; yield the connection and the names of its tables and views."""
    end = time.monotonic() + LONGEST_S
    with contextlib.closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as connection:
        connection.set_progress_handler(lambda: time.monotonic() > end, CALL_EVERY)
        try:
            yield connection, {name for (name,) in connection.execute("SELECT name FROM sqlite_master")}
        except sqlite3.OperationalError as error:
            if str(error) == "interrupted":
                raise Failure(2, f"takes more than {LONGEST_S} s to read: export fewer steps") from None
            raise


def read_database(path):
    """Return kernels and copies of a rocpd database or of an SQLite export of Nsight Systems."""
    with database(path) as (connection, names):
        if f"{NSYS}GRAPH_TRACE" in names and f"{NSYS}KERNEL" not in names:
            raise Failure(2, "holds CUDA graphs as a whole: record it with nsys --cuda-graph-trace=node")
        if names.isdisjoint(table for table, *_ in TABLES):
            raise Failure(2, "is a database without kernel times, neither rocpd nor an export of Nsight Systems")
        found = []
        for table, kind, column in TABLES:
            if table in names:
                known = {name for _, name, *_ in connection.execute(f"PRAGMA table_info({table})")}
                gpu_column = next(iter(GPU_COLUMNS & known), "NULL")
                rows = connection.execute(f"SELECT {column}, {gpu_column}, start, end FROM {table}")
                for name, gpu, start, end in rows:
                    found.append(checked_kernel(name, start, end - start, kind, gpu))
        return found


# ---------------------------------------------------------------- PyTorch's traces


def read_json(path, text, linked):
    """Return the profile in a trace, or in the trace that a profile_*.json of run_pytorch_profiler.py names.

    linked: a profile_*.json named this file, which must be a trace.
    """
    content = json.loads(text)
    if "traceEvents" in content:
        return read_trace(path, content)
    if "trace" in content and "steps_profiled" in content and not linked:
        try:
            return read_file(path.with_name(content["trace"]), linked=True)
        except Failure as error:
            raise Failure(error.status, f"names another file: {error}") from None
    raise Failure(2, "is JSON, but no trace of a profiler (traceEvents)")


TIMED = {*KINDS, "cpu_op", "user_annotation", "cuda_runtime", "hip_runtime"}  # categories that are read


def read_trace(path, content):
    """Return the profile in a Chrome trace: kernels and copies on the GPU or, without one, operators that compute."""
    spans = timed_events(content["traceEvents"])
    spans = with_one_optimizer_mark_per_step(spans)
    operators = [event for event in spans if event["cat"] == "cpu_op"]
    launches = [event for event in spans if event["cat"] in KINDS]
    metadata = metadata_in(content)
    if launches:
        calls = [call_of(event, KINDS[event["cat"]]) for event in launches]
        operations = operations_of_launches(launches, operators)
    else:
        computing = operators_that_compute(operators, optimizer_steps(spans))
        calls = [call_of(event, "operator") for event in computing]
        operations = [operation(event, [event]) for event in computing]
    phases = []
    for event in spans:
        if any(is_mark(event, phase) for phase in PHASES):
            phases.append((event["name"], event["ts"], event["ts"] + event["dur"]))
    devices = content.get("deviceProperties") or [{}]
    device = devices[0].get("name")
    return Profile(
        path,
        calls,
        operations,
        steps=steps_of(spans, metadata),
        device=device and clean(device),
        metadata=metadata,
        step_ms=step_times(phases, calls) if metadata else [],
        memory=memory_events(content["traceEvents"]),
        phases=phases,
    )


def timed_events(events):
    """Return the events of the categories that are read, by their start, callers before the events inside them."""
    found = [event for event in events if event.get("cat") in TIMED]
    for event in found:
        if not is_time(event.get("ts")) or not is_time(event.get("dur")) or event["dur"] < 0:
            raise ValueError(f"{clean(event['name'])} starts at {event.get('ts')} us and takes {event.get('dur')} us")
    return sorted(found, key=lambda event: (event["ts"], -event["dur"]))


def call_of(event, kind):
    gpu = event.get("args", {}).get("device") if kind == "kernel" else None
    return checked_kernel(event["name"], 1e3 * event["ts"], 1e3 * event["dur"], kind, gpu)


def memory_events(events):
    """Return the events of --profile-memory by time; with a GPU, only those of its memory."""
    found = [event for event in events if event.get("name") == "[memory]"]
    for event in found:
        if not is_time(event["ts"]) or not is_time(event["args"]["Total Allocated"]):
            raise ValueError(f"memory of {event['args']['Total Allocated']} bytes after {event['ts']} us")
    found.sort(key=lambda event: event["ts"])
    on_gpu = [event for event in found if event["args"]["Device Type"] != 0]
    return on_gpu or found


WHOLE_NUMBERS = (
    *("vocab_size", "hidden_dim", "num_layers", "num_heads", "num_kv_heads", "intermediate_dim"),
    *("batch_size", "seq_len", "version"),
)


def metadata_in(content):
    """Return the checked metadata that a training script wrote into its trace; {} for another program's trace."""
    metadata = content.get("tiny_llama") or {}
    if not metadata:
        return {}
    for name in WHOLE_NUMBERS:
        if type(metadata[name]) is not int or metadata[name] < 1:
            raise ValueError(f"tiny_llama has {name} {metadata[name]!r}")
    if not is_time(metadata["peak_memory_mb"]) or metadata["precision"] not in PRECISIONS:
        raise ValueError(f"tiny_llama has {metadata['peak_memory_mb']!r} MB in {metadata['precision']!r}")
    return metadata | {"part": clean(metadata["part"])}


def optimizer_steps(spans):
    """Return (start, end) of the steps that a training script or PyTorch marks as an optimizer's."""
    marks = (event for event in spans if re.match(r"optimizer$|Optimizer\.step#", event["name"]))
    return [(event["ts"], event["ts"] + event["dur"]) for event in marks]


@dataclasses.dataclass
class OperatorCall:
    """One call of an operator in a trace: its event, its time without its callees, whether it counts as computing."""

    event: dict
    own_us: float
    computes: bool = True

    @property
    def end_us(self):
        return self.event["ts"] + self.event["dur"]


def operators_that_compute(operators, updates):
    """Return the events of the operators that compute, without those that change no data or only call others.

    A caller stays if it matches COMPUTES_ITSELF, or if all that it calls only prepares; the time of its callees is
    taken off its "dur". An operator inside one of the updates, (start, end) of an optimizer's steps, gets a name that
    begins with "optimizer" unless its own name is one: AdamW's sqrt is no part of the model.
    """
    calls = []
    open_calls = {}  # (process, thread): the calls that have not ended, the innermost last
    for event in operators:
        callers = open_calls.setdefault((event.get("pid"), event.get("tid")), [])
        while callers and callers[-1].end_us <= event["ts"]:
            callers.pop()
        if NO_WORK.match(event["name"]):
            continue
        if callers:
            callers[-1].own_us -= event["dur"]
        for caller in callers:
            if calls_only(caller.event["name"], event["name"]):
                caller.computes = False
        call = OperatorCall(event, event["dur"])
        callers.append(call)
        calls.append(call)
    found = [call.event | {"dur": max(0.0, call.own_us)} for call in calls if call.computes]
    for event in found:
        in_update = any(start <= event["ts"] < end for start, end in updates)
        if in_update and group_of(event["name"]) != "optimizer":
            event["name"] = f"optimizer {event['name']}"
    return found


def calls_only(caller, callee):
    """Return True if an operator that calls this one does not compute itself.

    Without gradients torch.compile's kernels have no CompiledFunction: they are the region's own work.
    """
    if caller.startswith("Torch-Compiled Region"):
        return callee.startswith("CompiledFunction")
    if COMPUTES_ITSELF.match(caller):
        return False
    return bool(ONLY_PREPARES.match(caller)) or not PREPARES.match(callee)


def operations_of_launches(launches, operators):
    """Return an Operation for each operator that launched kernels, and one for each kernel without an operator.

    The kernels of a replayed graph have no operator.
    """
    operator_of = {event.get("args", {}).get("External id"): event for event in operators}
    launches_of = {}
    alone = []
    for event in launches:
        number = event.get("args", {}).get("External id")
        if number and number in operator_of:
            launches_of.setdefault(number, []).append(event)
        else:
            alone.append(event)
    found = [operation(operator_of[number], some) for number, some in launches_of.items()]
    return found + [operation(event, [event]) for event in alone]


def operation(event, launches):
    """Return the Operation of an operator's event and the events of its launches."""
    arguments = event.get("args", {})
    dims = arguments.get("Input Dims") or []
    types = arguments.get("Input type") or []
    strides = arguments.get("Input Strides") or [[] for _ in dims]
    if not are_sizes(dims) or not are_sizes(strides):
        raise ValueError(f"{clean(event['name'])} has inputs of {dims}, strides {strides}")
    longest = max(launches, key=lambda one: one["dur"])
    return Operation(
        name=clean(event["name"]),
        group=group_of(clean(longest["name"])),
        us=sum(one["dur"] for one in launches),
        dims=dims,
        types=types,
        strides=strides,
        launches=tuple(clean(one["name"]) for one in launches),
    )


def are_sizes(value):
    """Return True for a list of sizes, or of lists of sizes."""
    return isinstance(value, list) and all(are_sizes(one) or (type(one) is int and one >= 0) for one in value)


def with_one_optimizer_mark_per_step(spans):
    """Return the sorted events without the "optimizer" marks that count no step of their own.

    These are marks before the first forward, whose step began before the profile, and marks inside another one: our
    scripts mark their optimizer, and profile_script.py marks every optimizer again.
    """
    first_forward = next((event["ts"] for event in spans if is_mark(event, "forward")), 0)
    last_end = first_forward
    found = []
    for event in spans:
        if is_mark(event, "optimizer"):
            if event["ts"] < last_end:
                continue
            last_end = event["ts"] + event["dur"]
        found.append(event)
    return found


def is_mark(event, name):
    return event["cat"] == "user_annotation" and event["name"] == name


def step_times(phases, calls):
    """Return the milliseconds of each step: from its forward to the end of its optimizer or of its last kernel."""
    starts = [start for name, start, _ in phases if name == "forward"]
    ends = [end for name, _, end in phases if name == "optimizer"]
    next_starts = [*starts[1:], float("inf")]
    times = []
    for start, end, next_start in zip(starts, ends, next_starts, strict=False):  # the last step may be cut off
        if end <= start:
            raise ValueError(f"a step begins at {start} us and ends at {end} us")
        kernel_ends = [call.end_ns / 1e3 for call in calls if start <= call.start_ns / 1e3 < next_start]
        times.append((max([end, *kernel_ends]) - start) / 1e3)
    return times


def steps_of(events, metadata):
    """Count the training steps in a trace; return None if nothing marks them.

    A step is marked by its optimizer. In a trace of our scripts it is else marked by the launch of the graph that holds
    it or, with --profile-attention-only, by its attention; another program has any number of these in a step.
    """
    names = Counter(e["name"] for e in events if e.get("cat") in ("user_annotation", "cuda_runtime", "hip_runtime"))
    if not metadata:
        return names["optimizer"] or None
    graph_launches = names["cudaGraphLaunch"] + names["hipGraphLaunch"]
    return names["optimizer"] or graph_launches or names["attention"] or None


def read_file(path, linked=False):
    """Return the profile in one file; tell its format by its content, not by its name. linked: as for read_json."""
    with errors_of(path):
        content = content_of(path)
        if not content:
            raise Failure(2, EMPTY)
        if content.startswith(SQLITE):
            return Profile(path, read_database(path))
        is_json = content.lstrip()[:1] in (b"{", b"[", b"")  # b"": blanks alone, damaged in any format
        # A Perfetto trace begins with a line feed; so do PyTorch 2.7's traces, which are JSON.
        if b"\0" in content or (content.startswith(b"\n") and not is_json):
            return Profile(path, read_perfetto(content))
        text = content.decode("utf-8", errors="replace")
        if is_json:
            return read_json(path, text, linked)
        return Profile(path, read_csv(text))


def read_perfetto(content):
    """Return the kernels of a Perfetto trace.

    Raise Failure with status 0 if they are in a form that nothing here reads: the file is right, Perfetto opens it.
    """
    try:
        kernels = [checked_kernel(name, start, end - start) for name, start, end in perfetto.kernels(content)]
    except DAMAGE as error:  # a number where a message belongs, for one
        export = "turn an .nsys-rep file into a database with nsys export --type sqlite"
        raise Failure(2, f"is no Perfetto trace, or a damaged one ({error}): {export}") from None
    if not kernels and any(category.encode() in content for category in perfetto.KERNEL_CATEGORIES):
        raise Failure(0, "holds kernels in a form that this tool does not read: open it in https://ui.perfetto.dev")
    return kernels
