"""Read the kernels of every profiler's files. Standard library only.

Reads CSV files of rocprofv3 (ROCm 6.2 to 10), rocpd and rocprof, rocpd databases (ROCm 7 and later), SQLite exports of
Nsight Systems, Perfetto traces of rocprof-sys, and PyTorch's traces, each also packed with gzip. A file that is
missing, cut off, damaged or of another kind raises Failure with one sentence that names it.
"""

import codecs
import contextlib
import csv
import dataclasses
import functools
import gzip
import io
import itertools
import json
import math
import pathlib
import re
import sqlite3
import stat
import zlib
from collections import Counter

from common import perfetto
from common.command_line import PRECISIONS, Failure
from common.tables import columns, rounded, text_table

GROUPS = ("GEMM", "attention", "normalisation", "element-wise", "optimizer", "copies", "communication", "other")

# The first pattern found in a kernel's name decides. The names of torch.compile's kernels list every operation that was
# fused into them, so they are matched before the words of single operations.
GROUP_PATTERNS = [
    ("communication", r"nccl|rccl|msccl|^Memcpy PtoP"),  # kernels of NCCL and RCCL, copies between GPUs
    ("GEMM", r"^triton_tem_(?!.*attention)"),
    ("optimizer", r"^(triton|cpp)_.*_foreach_|^triton_for_fused"),
    ("other", r"^(triton|cpp)_.*(log_softmax|nll_loss|embedding)"),
    ("attention", r"^(triton|cpp)_.*(softmax|attention)"),
    ("normalisation", r"^(triton|cpp)_.*(rsqrt|norm)"),
    ("element-wise", r"^(triton_poi|cpp_fused)_"),
    ("optimizer", r"adam|multi_tensor|_foreach_|optimizer|\blerp|addcdiv|addcmul|amp_update|amp_.*unscale"),
    # softmax_warp_forward<input, output, accumulator, log2 of the row, is_log, ...>: a logarithm makes it the loss
    ("other", r"log_?softmax|softmax_warp_\w+<[^<>]*, *\d+, *true"),
    ("attention", r"attention|attn|fmha|flash|sdpa|bwd_kernel_(dk|dv|dq|fuse)|bwd_preprocess|softmax"),
    (
        "normalisation",
        r"(rms|layer|batch|group)_?norm|GammaBeta|rsqrt|MeanOps|pow_tensor|aten::(mean|pow)|(Mean|Pow)Back",
    ),
    ("GEMM", r"^Cijk_|gemm|gemv|cutlass|nvjet|cublas|hipblas|rocblas|xmma|splitK|aten::_?(add|b|baddb)?mm$|scaled_mm"),
    ("copies", r"mem_?cpy|memset|memory_?copy|copyBuffer|fillBuffer|^Copy[A-Z]|copy_kernel|FillFunctor|CatArray"),
    ("copies", r"quantize_(rows|weights)_kernel|transpose_kernel"),
    ("copies", r"aten::(_to_copy|to|copy_|clone|contiguous|cat|fill_|zero_|(zeros|ones)(_like)?)$"),
    ("element-wise", r"element_?wise|swiglu|silu|rope|rotary|sigmoid|vectorized|unrolled"),
    ("element-wise", r"aten::(add|sub|mul|div|neg|exp|sqrt|sin|cos|where|masked_fill|triu|tril)_?$"),
]

# Operators that only look at tensors differently, allocate them or ask about them.
NO_WORK = re.compile(
    r"^(aten::(view|_unsafe_view|reshape|_reshape_alias|transpose|t|numpy_T|as_strided|expand|permute|slice|select|narrow|"
    r"split|split_with_sizes|chunk|unbind|unsqueeze|squeeze|flatten|unflatten|detach|detach_|alias|lift_fresh|empty\w*|"
    r"new_empty\w*|resize_|resolve_\w+|result_type|promote_types|is_\w+|item|_local_scalar_dense|set_|to|record_stream)$"
    r"|autograd::|torch::|Optimizer|detach$|\w*Backward\d+$|Torch-Compiled|TorchDynamo|CompiledFunction|## )"
)
KEEPS_TIME = re.compile(r"aten::(mm|bmm|addmm|baddbmm)$|\w+Function(Backward)?$")
PHASES = ("forward", "backward", "optimizer")
KINDS = {"kernel": "kernel", "gpu_memcpy": "copy", "gpu_memset": "copy"}  # categories of a trace's events
INTERPRETED = "Version 3's kernels ran in Triton's interpreter: these times say nothing about a GPU."


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One launch of a kernel. Times are in nanoseconds.

    kind is "kernel", "copy" (memory copies and fills outside kernels) or "operator" (work on the CPU).
    """

    name: str
    start_ns: float
    total_ns: float
    kind: str = "kernel"

    @property
    def end_ns(self):
        return self.start_ns + self.total_ns

    @property
    def group(self):
        return group_of(self.name)


@dataclasses.dataclass(frozen=True)
class Operation:
    """One call of a PyTorch operator: the time of all that it launched, and the shapes of its inputs if recorded."""

    name: str
    group: str  # of the longest kernel that it launched
    us: float
    dims: list
    types: list
    strides: list
    launches: tuple[str, ...]  # the names of its kernels; on a CPU its own


@dataclasses.dataclass(frozen=True)
class Profile:
    """The contents of one profile. calls, in order, are kernels and copies, or on a CPU the operators that compute."""

    path: pathlib.Path
    calls: list[Kernel]
    operations: list[Operation] = dataclasses.field(default_factory=list)
    steps: int | None = None
    device: str | None = None
    metadata: dict = dataclasses.field(default_factory=dict)  # version, part, sizes, precision, peak_memory_mb
    step_ms: list[float] = dataclasses.field(default_factory=list)  # of each marked step, under the profiler
    memory: list[dict] = dataclasses.field(default_factory=list)  # events of --profile-memory, in order of time
    phases: list[tuple[str, float, float]] = dataclasses.field(default_factory=list)  # name, start and end in us

    @property
    def on_cpu(self):
        return self.calls[0].kind == "operator"

    @property
    def interpreted(self):
        return self.on_cpu and self.metadata.get("version") == 3

    @property
    def what(self):
        return "operators" if self.on_cpu else "kernels"

    @property
    def title(self):
        """Return the file's name and, if it says so itself, the version, sizes and precision in it."""
        if not self.metadata:
            return str(self.path)
        sizes = "{batch_size} x {seq_len} tokens, width {hidden_dim}, {num_layers} layers".format(**self.metadata)
        alone = ", attention alone" if self.metadata["part"] == "attention" else ""
        return f"{self.path} (version {self.metadata['version']}, {sizes}, {self.metadata['precision']}{alone})"


@functools.cache
def group_of(name):
    """Return the group of a kernel or operator, one of GROUPS, by its name."""
    return next((group for group, pattern in GROUP_PATTERNS if re.search(pattern, name, re.IGNORECASE)), "other")


@functools.cache
def clean(name):
    """Return the kernel's name without control characters and the mark of its code object that some tools append."""
    if not isinstance(name, str):
        raise ValueError(f"{name!r} is no name")
    return printable(re.sub(r"(\.kd| \[clone \.kd\])$", "", name.strip()))


def printable(text):
    """Return the text with a question mark for each control character, which a terminal would obey."""
    return text if text.isprintable() else "".join(letter if letter.isprintable() else "?" for letter in text)


def short(name, width):
    """Return a name to display: return type, namespaces, and arguments of templates and functions go first."""
    name = re.sub(r"^(void|int) +", "", name).replace("(anonymous namespace)::", "").replace("at::native::", "")
    if len(name) > width:
        name = re.sub(r"\(.*\)$", "", name)
    return name if len(name) <= width else name[: width - 3] + "..."


# Whatever a reader raises where the contents are not those of its format.
DAMAGE = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError, EOFError)
DAMAGE += (csv.Error, sqlite3.Error, zlib.error, gzip.BadGzipFile)
SAID = 200  # letters of a reason: it may quote what it found


@contextlib.contextmanager
def errors_of(path):
    """Turn whatever is wrong with a file into one sentence that names it."""
    try:
        yield
    except DAMAGE as error:
        reason = f"it has no {error}" if isinstance(error, KeyError) else str(error)
        raise Failure(2, f"{path} is cut off or damaged: {printable(' '.join(reason.split())[:SAID])}") from None
    except OSError as error:
        raise Failure(2, f"{path} cannot be read: {error.strerror}") from None
    except MemoryError:
        raise Failure(1, f"{path} does not fit into memory") from None
    except Failure as error:
        raise Failure(error.status, f"{path} {error}") from None


# ---------------------------------------------------------------- what every reader needs

GZIP = b"\x1f\x8b"
UNPACKED = 2**32  # bytes: a trace of a GPU can have a gigabyte, a damaged or foreign file any number


def content_of(path):
    """Return the bytes of a file, unpacked if gzip packed them. A device or pipe, which may never end, is refused."""
    if not stat.S_ISREG(path.stat().st_mode):
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
    """Return the object in a JSON file of this workshop, whose numbers are all finite; kind says what it is."""
    content = content_of(pathlib.Path(path))
    whole = functools.partial(number, convert=int)
    content = json.loads(content, parse_constant=number, parse_float=number, parse_int=whole)
    if not isinstance(content, dict):
        raise Failure(2, f"is no {kind}")
    text = json.dumps(content, ensure_ascii=False)
    text.encode()  # raises where a string is no text
    if CONTROL.search(text):
        raise ValueError("a text in it holds a control character, which a terminal would obey")
    return content


def number(text, convert=float):
    """Return a cell's number, or raise ValueError; Python's own forms, as 1_000 and NaN, are none."""
    value = convert(text)
    if not math.isfinite(value) or not str(text).isascii() or "_" in str(text):
        raise ValueError(f"{text!r} is no number")
    return value


def is_time(value):
    """Return True for a number that can be a time; nanoseconds since 1970 need 61 bits."""
    return type(value) in (int, float) and abs(value) < 2**63


def launch(name, start, ns, kind="kernel"):
    """Return a Kernel that starts at a time and takes so many nanoseconds; raise ValueError unless it can."""
    if not is_time(start) or not is_time(ns) or ns < 0:
        raise ValueError(f"{clean(name)} starts at {start} ns and takes {ns} ns")
    return Kernel(clean(name), start, ns, kind)


# ---------------------------------------------------------------- CSV: rocprofv3, rocpd, rocprof

COLUMNS = {  # a profiler's heading, in lower case -> our name
    **{"name": "name", "kernel_name": "name", "kernel name": "name", "kernelname": "name"},
    **{"start_timestamp": "start", "beginns": "start", "end_timestamp": "end", "endns": "end"},
    **{"counter_name": "counter", "counter_value": "value"},
}


def read_table(text):
    """Return the columns of a CSV file by our names, and its rows as dictionaries, read when they are asked for."""
    if not text.endswith("\n"):
        raise ValueError("its last line has no end")  # the number in it may be a part of one
    lines = [line for line in text.splitlines() if line and not line.startswith("==")]  # as ncu's messages do
    header, *rows = list(csv.reader(lines)) or [[]]
    header = [COLUMNS.get(cell.strip().lower(), cell.strip()) for cell in header]
    for number, row in enumerate(rows, 2):
        if len(row) != len(header):
            raise ValueError(f"line {number} has {len(row)} cells of {len(header)}")
    return header, (dict(zip(header, row, strict=True)) for row in rows)


def read_csv(text):
    """Return the launches in a table."""
    header, rows = read_table(text)
    if "counter" in header or not {"name", "start", "end"} <= set(header):  # a row per counter would count twice
        raise Failure(2, "has no table of kernels' times: give a kernel_trace file (kernel_counters.py reads counters)")
    times = ((row["name"], number(row["start"], int), number(row["end"], int)) for row in rows)
    return [launch(name, start, end - start) for name, start, end in times]


# ---------------------------------------------------------------- databases: rocpd, nsys

SQLITE = b"SQLite format 3\0"
NSYS = "CUPTI_ACTIVITY_KIND_"
TABLES = [  # table, kind, name; the views of rocpd keep their names, its tables do not
    ("kernels", "kernel", "name"),
    ("memory_copies", "copy", "name"),
    (f"{NSYS}KERNEL", "kernel", "(SELECT value FROM StringIds WHERE id = demangledName)"),
    (f"{NSYS}MEMCPY", "copy", "'[CUDA memcpy]'"),
    (f"{NSYS}MEMSET", "copy", "'[CUDA memset]'"),
]


LEAST_STEPS, STEPS_PER_BYTE = 10**6, 200  # of SQLite's machine; reading a file takes a few per byte


@contextlib.contextmanager
def database(path):
    """Open an SQLite file for reading; yield the connection and the names of its tables and views.

    A view can be endless: end a query that takes many more steps than the file has bytes.
    """
    calls = itertools.repeat(0, (LEAST_STEPS + STEPS_PER_BYTE * path.stat().st_size) // 1000)
    with contextlib.closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as connection:
        connection.set_progress_handler(lambda: next(calls, 1), 1000)
        try:
            yield connection, {name for (name,) in connection.execute("SELECT name FROM sqlite_master")}
        except sqlite3.OperationalError as error:
            if str(error) == "interrupted":
                raise Failure(2, "holds a view that does not end, or takes too long to read") from None
            raise


def read_database(path):
    """Return kernels and copies of a rocpd database or of an SQLite export of Nsight Systems."""
    with database(path) as (connection, names):
        if f"{NSYS}GRAPH_TRACE" in names and f"{NSYS}KERNEL" not in names:
            raise Failure(2, "holds CUDA graphs as a whole: record it with nsys --cuda-graph-trace=node")
        found = [
            launch(name, start, end - start, kind)
            for table, kind, column in TABLES
            if table in names
            for name, start, end in connection.execute(f"SELECT {column}, start, end FROM {table}")
        ]
        if names.isdisjoint(table for table, *_ in TABLES):
            raise Failure(2, "is a database without kernel times, neither rocpd nor an export of Nsight Systems")
        return found


# ---------------------------------------------------------------- PyTorch's traces


def read_json(path, text, linked):
    """Return the profile in a trace, or in the trace beside a profile_*.json of run_pytorch_profiler.py."""
    content = json.loads(text)
    if "traceEvents" in content:
        return read_trace(path, content)
    if "trace" in content and "steps_profiled" in content and not linked:
        try:
            return read_file(path.with_name(content["trace"]), linked=True)
        except Failure as error:
            raise Failure(error.status, f"names another file: {error}") from None
    raise Failure(2, "is JSON, but no trace of a profiler (traceEvents)")


TIMED = {*KINDS, "cpu_op", "user_annotation", "cuda_runtime", "hip_runtime"}  # the events that are read


def read_trace(path, content):
    """Return the profile in a Chrome trace: what ran on the GPU or, without one, the operators that compute."""
    spans = [event for event in content["traceEvents"] if event.get("cat") in TIMED]
    for event in spans:
        if not is_time(event.get("ts")) or not is_time(event.get("dur")) or event["dur"] < 0:
            raise ValueError(f"{clean(event['name'])} starts at {event.get('ts')} us and takes {event.get('dur')} us")
    spans.sort(key=lambda event: (event["ts"], -event["dur"]))
    spans = with_marks_of_whole_steps(spans)
    operators = [event for event in spans if event["cat"] == "cpu_op"]
    launches = [event for event in spans if event["cat"] in KINDS]
    metadata = metadata_in(content)
    devices = content.get("deviceProperties") or [{}]
    if launches:
        calls = [call_of(event, KINDS[event["cat"]]) for event in launches]
        operations = launched(launches, operators)
    else:
        working = operators_that_work(operators, optimizer_steps(spans))
        calls = [call_of(one, "operator") for one in working]
        operations = [operation(one, [one]) for one in working]
    marks = [event for event in spans if event["cat"] == "user_annotation" and event["name"] in PHASES]
    phases = [(event["name"], event["ts"], event["ts"] + event["dur"]) for event in marks]
    times = step_times(phases, calls)
    device = devices[0].get("name")
    memory = memory_events(content["traceEvents"])
    return Profile(path, calls, operations, steps_of(spans), device and clean(device), metadata, times, memory, phases)


def call_of(event, kind):
    return launch(event["name"], 1e3 * event["ts"], 1e3 * event["dur"], kind)


def memory_events(events):
    """Return the events of --profile-memory by time: of the GPU, if there is one."""
    found = [event for event in events if event.get("name") == "[memory]"]
    for event in found:
        if not is_time(event["ts"]) or not is_time(event["args"]["Total Allocated"]):
            raise ValueError(f"memory of {event['args']['Total Allocated']} bytes after {event['ts']} us")
    found.sort(key=lambda event: event["ts"])
    return [event for event in found if event["args"]["Device Type"] != 0] or found


SIZES = ("vocab_size", "hidden_dim", "num_layers", "num_heads", "num_kv_heads", "intermediate_dim")
SIZES += ("batch_size", "seq_len", "version")


def metadata_in(content):
    """Return what a training script wrote into its trace about itself; nothing for another program's trace."""
    metadata = content.get("tiny_llama") or {}
    if not metadata:
        return {}
    for name in SIZES:
        if type(metadata[name]) is not int or metadata[name] < 1:
            raise ValueError(f"tiny_llama has {name} {metadata[name]!r}")
    if not is_time(metadata["peak_memory_mb"]) or metadata["precision"] not in PRECISIONS:
        raise ValueError(f"tiny_llama has {metadata['peak_memory_mb']!r} MB in {metadata['precision']!r}")
    return metadata | {"part": clean(metadata["part"])}


def optimizer_steps(spans):
    """Return (start, end) of what a training script marks as "optimizer", or PyTorch as an optimizer's step."""
    marks = (event for event in spans if re.match(r"optimizer$|Optimizer\.step#", event["name"]))
    return [(event["ts"], event["ts"] + event["dur"]) for event in marks]


def operators_that_work(operators, updates):
    """Return the innermost operators that compute: those that only call others, or change no data, are left out.

    A matrix product stays although it copies an operand first, and a Python autograd function, in which interpreted
    kernels run, although it copies tensors; that time is taken off its "dur". The name of an operator in one of the
    updates begins with "optimizer", unless it tells that itself: AdamW's sqrt is no part of the model.
    """
    working = []
    open_calls = {}
    for event in operators:
        stack = open_calls.setdefault((event.get("pid"), event.get("tid")), [])
        while stack and stack[-1][0]["ts"] + stack[-1][0]["dur"] <= event["ts"]:
            stack.pop()
        if NO_WORK.match(event["name"]):
            continue
        for caller in stack:
            if KEEPS_TIME.match(caller[0]["name"]):
                caller[2] -= event["dur"]
            else:
                caller[1] = False
        stack.append([event, True, event["dur"]])
        working.append(stack[-1])
    found = [event | {"dur": max(0.0, own)} for event, innermost, own in working if innermost]
    for event in found:
        inside = any(start <= event["ts"] < end for start, end in updates)
        if inside and group_of(event["name"]) != "optimizer":
            event["name"] = f"optimizer {event['name']}"
    return found


def launched(launches, operators):
    """Return the operators that launched the kernels, each with all of its launches; kernels of a graph have none."""
    by_id = {event.get("args", {}).get("External id"): event for event in operators}
    found = {}
    alone = []
    for event in launches:
        number = event.get("args", {}).get("External id")
        if number and number in by_id:
            found.setdefault(number, []).append(event)
        else:
            alone.append(event)
    return [operation(by_id[number], part) for number, part in found.items()] + [operation(e, [e]) for e in alone]


def operation(event, launches):
    arguments = event.get("args", {})
    longest = max(launches, key=lambda one: one["dur"])
    dims, types, strides = (arguments.get(f"Input {word}") or [] for word in ("Dims", "type", "Strides"))
    if not are_sizes(dims) or not are_sizes(strides):
        raise ValueError(f"{clean(event['name'])} has inputs of {dims}, strides {strides}")
    names = tuple(clean(one["name"]) for one in launches)
    us = sum(one["dur"] for one in launches)
    group = group_of(clean(longest["name"]))
    if not strides:
        strides = [[] for _ in dims]
    return Operation(clean(event["name"]), group, us, dims, types, strides, names)


def are_sizes(value):
    """Return True for a list of sizes, or of lists of sizes."""
    return isinstance(value, list) and all(are_sizes(one) or (type(one) is int and one >= 0) for one in value)


def with_marks_of_whole_steps(spans):
    """Return sorted spans with one mark "optimizer" for each step whose forward is in the trace.

    The first forward has none before it: such a step began unprofiled. Our scripts mark their optimizer, and
    profile_script.py marks every optimizer again, outside or inside of that.
    """
    ended = next((event["ts"] for event in spans if is_mark(event, "forward")), 0)
    found = []
    for event in spans:
        if is_mark(event, "optimizer"):
            if event["ts"] < ended:
                continue
            ended = event["ts"] + event["dur"]
        found.append(event)
    return found


def is_mark(event, name):
    return event["cat"] == "user_annotation" and event["name"] == name


def step_times(phases, calls):
    """Return the milliseconds of each step: from its forward to the end of its optimizer or of its last kernel."""
    starts = [start for name, start, _ in phases if name == "forward"]
    ends = [end for name, _, end in phases if name == "optimizer"]
    times = []
    for start, end, border in zip(starts, ends, [*starts[1:], float("inf")], strict=False):
        last = max((call.end_ns / 1e3 for call in calls if start <= call.start_ns / 1e3 < border), default=end)
        if end <= start:
            raise ValueError(f"a step begins at {start} us and ends at {end} us")
        times.append((max(end, last) - start) / 1e3)
    return times


def steps_of(events):
    """Return the training steps in a trace: marked phases, else launches of a graph that holds a whole step."""
    names = Counter(e["name"] for e in events if e.get("cat") in ("user_annotation", "cuda_runtime", "hip_runtime"))
    graphs = names["cudaGraphLaunch"] + names["hipGraphLaunch"]
    return names["optimizer"] or graphs or names["attention"] or None


# ---------------------------------------------------------------- files and folders


def read_file(path, linked=False):
    """Return the profile in one file, whose kind is told by its content and not by its name.

    linked: a profile_*.json named it, and it names no other.
    """
    with errors_of(path):
        content = content_of(path)
        if not content:
            raise Failure(2, "is empty: the profiler was stopped, or wrote nothing")
        if content.startswith(SQLITE):
            return Profile(path, read_database(path))
        first = content.lstrip()[:1]  # PyTorch 2.7 begins its traces with an empty line, as a Perfetto trace begins
        if b"\0" in content or (content.startswith(b"\n") and first not in b"{["):
            return Profile(path, read_perfetto(content))
        text = content.decode("utf-8", errors="replace")
        return read_json(path, text, linked) if first in b"{[" else Profile(path, read_csv(text))


def read_perfetto(content):
    """Return the kernels of a Perfetto trace; end with status 0 where they are in a form that nothing here reads."""
    try:
        kernels = [launch(name, start, end - start) for name, start, end in perfetto.kernels(content)]
    except DAMAGE as error:  # a number where a message belongs, for one
        export = "turn an .nsys-rep file into a database with nsys export --type sqlite"
        raise Failure(2, f"is no Perfetto trace, or a damaged one ({error}): {export}") from None
    if not kernels and any(category.encode() in content for category in perfetto.KERNEL_CATEGORIES):
        raise Failure(0, "holds kernels in a form that this tool does not read: open it in https://ui.perfetto.dev")
    return kernels


# A folder is searched for traces, then for these; of the first kind that is there all files count, one per process.
OTHER_PROFILERS = ("*kernel_trace.csv", "*.db", "*.sqlite", "*.proto", "*.pftrace")


def matching(folder, pattern):
    return sorted(file for file in folder.rglob(pattern) if file.is_file())


def files_of(path):
    """Return the files to read for a path: itself or, in a folder, those of one run.

    PyTorch's traces pile up in one folder from run to run: of these the newest one of whole steps is read.
    """
    if not path.exists():
        raise Failure(2, f"{path} does not exist: give a profile, or the folder that it lies in")
    if not path.is_dir():
        return [path]
    others = (matching(path, pattern) for pattern in OTHER_PROFILERS)
    files = whole_traces(path)[:1] or next(filter(None, others), [])
    if not files:
        raise Failure(2, f"{path} is a folder without kernel times: no CSV, database or trace of a profiler lies in it")
    return files


def whole_traces(folder):
    """Return PyTorch's traces of whole steps in a folder, the newest first. Failure if it holds only partial ones."""
    files = sorted(matching(folder, "*trace*.json"), key=lambda file: (-file.stat().st_mtime, file.name))
    whole = [file for file in files if metadata_of(file).get("part", "whole") == "whole"]
    if files and not whole:
        raise Failure(2, f"{folder} holds only traces of attention alone: profile whole steps, or name the file itself")
    return whole


def metadata_of(file):
    """Return what a training script wrote into its trace about itself; nothing for another file."""
    try:
        with open(file, "rb") as opened:
            start = opened.read(2**20).decode("utf-8", errors="replace")  # a trace of a GPU can have a gigabyte
        found = re.search(r'"tiny_llama":\s*(?=\{)', start)
        return json.JSONDecoder().raw_decode(start, found.end())[0] if found else {}
    except (OSError, ValueError, RecursionError):
        return {}  # read_file says what is wrong with it, if it is the one to be read


def read_profile(path, steps=None):
    """Return the profile in a file or folder; PyTorch's trace where there is one, which knows shapes and steps."""
    profiles = [read_file(file) for file in files_of(pathlib.Path(path))]
    calls = sorted((call for profile in profiles for call in profile.calls), key=lambda call: call.start_ns)
    if not calls:
        raise Failure(2, f"{profiles[0].path} names no kernel: the profiler saw no work on a GPU")
    if not any(call.total_ns for call in calls):
        raise Failure(2, f"{profiles[0].path} is damaged: all of its kernels take 0 ns")
    return dataclasses.replace(profiles[0], calls=calls, steps=steps or profiles[0].steps)


def read_pair(first, second, steps=(None, None)):
    """Return two profiles of like runs: of the traces in the folders the newest pair whose sizes and precision agree.

    Failure names what differs if no two agree.
    """
    choices = [whole_traces(path) or [path] for path in map(pathlib.Path, (first, second))]
    chosen = newest_alike(*([(path, metadata_of(path)) for path in paths] for paths in choices))
    one, other = (read_profile(path, number) for path, number in zip(chosen, steps, strict=True))
    found = unlike(one.metadata, other.metadata)
    if one.on_cpu != other.on_cpu or (one.device and other.device and one.device != other.device):
        found.append("device: " + ", ".join(p.device or ("CPU" if p.on_cpu else "GPU") for p in (one, other)))
    if found:
        raise Failure(2, f"{one.path} and {other.path} are unlike ({'; '.join(found)}): profile alike")
    return one, other


def newest_alike(first, second):
    """Return of two lists of (item, metadata), newest first, the newest two items whose runs are alike, if any are."""
    pairs = [(one, other) for other in second for one in first]
    chosen = next((pair for pair in pairs if not unlike(pair[0][1], pair[1][1])), pairs[0])
    return [item for item, _ in chosen]


def unlike(first, second):
    """Return what differs between two traces' metadata apart from the version: "name: one, other"."""
    keys = [key for key in first if key in second and key not in ("version", "peak_memory_mb")]
    return [f"{key}: {first[key]}, {second[key]}" for key in keys if first[key] != second[key]]


def steps_needed(profile, option="--steps"):
    if profile.steps is None:
        raise Failure(2, f"{profile.path} does not say how many steps it holds: give {option} N")
    return profile.steps


def gpu_profile(path, steps):
    """Return a profile of a GPU, or raise Failure."""
    profile = read_profile(path, steps)
    if profile.on_cpu:
        raise Failure(2, f"{profile.path} holds no launches on a GPU: record it on a machine with one")
    return profile


# ---------------------------------------------------------------- tables of kernels


def sums(calls, key):
    """Return {name or group: calls, times in microseconds, share}, the largest total first."""
    times = {}
    whole = sum(call.total_ns for call in calls) / 1e3 or 1
    for call in calls:
        times.setdefault(getattr(call, key), []).append(call.total_ns / 1e3)
    rows = {}
    for name, us in sorted(times.items(), key=lambda one: -sum(one[1])):
        rows[name] = {"calls": len(us), "total_us": sum(us), "share_percent": 100 * sum(us) / whole}
        rows[name] |= {"mean_us": sum(us) / len(us), "min_us": min(us), "max_us": max(us)}
    return rows


def kernel_table(calls):
    """Return a row per kernel. The order of the columns is that of the CSV: total time is the fourth, as pages sort it,
    and the name, which has commas, the last.
    """
    kinds = {call.name: call.kind for call in calls}
    rows = sums(calls, "name")
    return [{"group": group_of(name), "kind": kinds[name], **row, "kernel": name} for name, row in rows.items()]


def group_table(calls):
    """Return a row per group that occurs."""
    return [{"group": name, **row} for name, row in sums(calls, "group").items()]


def groups_per_step(profile, option="--steps"):
    """Return {"calls", "ms"} per step of each group that occurs, in the order of GROUPS, and of all."""
    steps = steps_needed(profile, option)
    rows = sums(profile.calls, "group")
    found = {
        group: {"calls": rows[group]["calls"] / steps, "ms": rows[group]["total_us"] / 1e3 / steps}
        for group in GROUPS
        if group in rows
    }
    return found | {"all": {unit: sum(row[unit] for row in found.values()) for unit in ("calls", "ms")}}


def group_cells(first, second):
    """Return a row per group in either of two results of groups_per_step: calls, % fewer, milliseconds."""
    cells = []
    nothing = {"calls": 0.0, "ms": 0.0}
    for group in (group for group in (*GROUPS, "all") if group in first | second):
        one = first.get(group, nothing)
        other = second.get(group, nothing)
        fewer = f"{100 - 100 * other['calls'] / one['calls']:.1f} %" if one["calls"] else "-"
        calls = [f"{part['calls']:,.1f}" for part in (one, other)]
        cells.append([group, *calls, fewer, rounded(one["ms"]), rounded(other["ms"])])
    return cells


GROUP_COLUMNS = "group: {group} | total ms: {ms:,.3f} | %: {share_percent:.1f}"
KERNEL_COLUMNS = (
    "kernel: {shown} | group: {group} | calls: {calls:,} | total ms: {ms:,.3f} | %: {share_percent:.1f} | "
    "mean us: {mean_us:,.1f} | min us: {min_us:,.1f} | max us: {max_us:,.1f}"
)


def kernel_text(profile, top):
    """Return the table of the longest kernels and the sums by group, for reading."""
    calls = profile.calls
    kernels, groups = ([row | {"ms": row["total_us"] / 1e3} for row in f(calls)] for f in (kernel_table, group_table))
    what = "operators on the CPU" if profile.on_cpu else "kernels and copies"
    lines = [f"{len(kernels)} {what}, {len(calls):,} calls, {sum(row['ms'] for row in kernels):,.3f} ms in all"]
    shown = [row | {"shown": short(row["kernel"], 44)} for row in kernels[:top]]
    if profile.interpreted:
        lines.append(INTERPRETED)
    lines += ["", text_table(*columns(KERNEL_COLUMNS, shown), left=2)]
    if rest := kernels[top:]:
        ms, share = (sum(row[key] for row in rest) for key in ("ms", "share_percent"))
        lines.append(f"and {len(rest)} more with {ms:,.3f} ms ({share:.1f} %)")
    return "\n".join([*lines, "", text_table(*columns(GROUP_COLUMNS, groups))])
