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
from common.command_line import PRECISIONS, Failure, printable
from common.tables import columns, rounded, text_table

GROUPS = ("GEMM", "attention", "normalisation", "element-wise", "optimizer", "copies", "communication", "other")

# The first pattern found in a kernel's name decides. The names of torch.compile's kernels list every operation that was
# fused into them, so they are matched before the words of single operations.
GROUP_PATTERNS = [
    ("communication", r"nccl|rccl|msccl|^Memcpy PtoP|^c10d::"),  # NCCL and RCCL, copies between GPUs, gloo on a CPU
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
    gpu: str | int | None = None  # the profiler's number or name of it, where its file has one

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
    processes: int = 1  # that launched the calls

    @property
    def on_cpu(self):
        return self.calls[0].kind == "operator"

    @property
    def interpreted(self):
        return self.on_cpu and self.metadata.get("version") == 3

    @property
    def unit(self):
        return "operators" if self.on_cpu else "kernels"

    @property
    def title(self):
        """Return the file's name, with the version, sizes and precision if a script of the workshop wrote it."""
        path = printable(str(self.path))  # it may be no UTF-8, which no report can hold
        if not self.metadata:
            return path
        sizes = "{batch_size} x {seq_len} tokens, width {hidden_dim}, {num_layers} layers".format(**self.metadata)
        alone = ", attention alone" if self.metadata["part"] == "attention" else ""
        return f"{path} (version {self.metadata['version']}, {sizes}, {self.metadata['precision']}{alone})"


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


def short(name, width):
    """Return a name to display: return type, namespaces, and arguments of templates and functions go first."""
    name = re.sub(r"^(void|int) +", "", name).replace("(anonymous namespace)::", "").replace("at::native::", "")
    if len(name) > width:
        name = re.sub(r"\(.*\)$", "", name)
    return name if len(name) <= width else name[: width - 3] + "..."


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


def is_time(value):
    """Return True for a number that can be a time; nanoseconds since 1970 need 61 bits."""
    return type(value) in (int, float) and abs(value) < 2**63


def checked_kernel(name, start_ns, total_ns, kind="kernel", gpu=None):
    """Return a Kernel; raise ValueError if a launch cannot have these times."""
    if not is_time(start_ns) or not is_time(total_ns) or total_ns < 0:
        raise ValueError(f"{clean(name)} starts at {start_ns} ns and takes {total_ns} ns")
    return Kernel(clean(name), start_ns, total_ns, kind, gpu)


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


# Instructions of SQLite's virtual machine that one file may take; reading it takes a few per byte.
LEAST_INSTRUCTIONS = 10**6
INSTRUCTIONS_PER_BYTE = 200
INSTRUCTIONS_PER_CALL = 1000  # of the progress handler


@contextlib.contextmanager
def database(path):
    """Open an SQLite file for reading; yield the connection and the names of its tables and views.

    A view can be endless, so end a query that takes many more instructions than the file has bytes.
    """
    most = LEAST_INSTRUCTIONS + INSTRUCTIONS_PER_BYTE * path.stat().st_size
    calls = itertools.count(1)

    def is_endless():
        return next(calls) * INSTRUCTIONS_PER_CALL > most

    with contextlib.closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as connection:
        connection.set_progress_handler(is_endless, INSTRUCTIONS_PER_CALL)
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


# ---------------------------------------------------------------- files and folders


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


# A folder is searched for PyTorch's traces, then for these: of the first pattern found all files, one per process.
OTHER_PROFILERS = ("*kernel_trace.csv", "*.db", "*.sqlite", "*.proto", "*.pftrace")


def matching(folder, pattern):
    return sorted(file for file in folder.rglob(pattern) if file.is_file())


def files_of(path):
    """Return the files to read for a path: itself or, in a folder, those of one run.

    PyTorch's traces of several runs share a folder: read the newest one of whole steps.
    """
    if not path.exists():
        raise Failure(2, f"{path} does not exist: give a profile, or the folder that it lies in")
    if not path.is_dir():
        return [path]
    traces = whole_traces(path)
    if traces:
        return traces[:1]
    check_one_result(path)
    for pattern in OTHER_PROFILERS:
        files = matching(path, pattern)
        if files:
            return files
    packed = matching(path, "*trace*.json.gz")
    if packed:
        raise Failure(2, f"{path} holds packed traces: name one of them, such as {packed[0].relative_to(path)}")
    raise Failure(2, f"{path} is a folder without kernel times: no CSV, database or trace of a profiler lies in it")


def check_one_result(folder):
    """Raise Failure if several calls of a wrapper left their results in a folder: their files would be added up."""
    results = sorted(matching(folder, "command.txt"), key=lambda file: file.stat().st_mtime)
    if len(results) > 1:
        raise Failure(2, f"{folder} holds {len(results)} results: name one of them, such as {results[-1].parent}")


def whole_traces(folder):
    """Return PyTorch's traces of whole steps in a folder, the newest first. Failure if it holds only partial ones."""
    files = sorted(matching(folder, "*trace*.json"), key=lambda file: (-file.stat().st_mtime, file.name))
    packed = [file for file in matching(folder, "*trace*.json.gz") if files and is_newer(file, files[0])]
    if packed:
        raise Failure(2, f"{packed[0]} is newer than the traces in {folder} that are not packed: name the one to read")
    whole = [file for file in files if metadata_of(file).get("part", "whole") == "whole"]
    if files and not whole:
        raise Failure(2, f"{folder} holds only traces of attention alone: profile whole steps, or name the file itself")
    return whole


def is_newer(file, other):
    return file.stat().st_mtime > other.stat().st_mtime


def metadata_of(file):
    """Return the metadata that a training script wrote into its trace, unchecked; {} for another file."""
    try:
        with open(file, "rb") as opened:
            start = opened.read(2**20).decode("utf-8", errors="replace")  # a trace of a GPU can have a gigabyte
        found = re.search(r'"tiny_llama":\s*(?=\{)', start)
        return json.JSONDecoder().raw_decode(start, found.end())[0] if found else {}
    except (OSError, ValueError, RecursionError):
        return {}  # if this file is chosen, read_file says what is wrong with it


def read_profile(path, steps=None):
    """Return the profile in a file or folder; files of several processes are read as one profile.

    steps: how many it holds, if the caller knows; otherwise the file may tell.
    """
    profiles = [read_file(file) for file in files_of(pathlib.Path(path))]
    calls = sorted((call for profile in profiles for call in profile.calls), key=lambda call: call.start_ns)
    if not calls:
        raise Failure(2, f"{profiles[0].path} names no kernel: the profiler saw no work on a GPU")
    if not any(call.total_ns for call in calls):
        raise Failure(2, f"{profiles[0].path} is damaged: all of its kernels take 0 ns")
    launching = [profile for profile in profiles if profile.calls]
    first = launching[0]
    if first.metadata and steps and first.steps and steps != first.steps:
        raise Failure(2, f"{first.path} marks {first.steps} steps, not {steps}: leave the number out")
    return dataclasses.replace(first, calls=calls, steps=steps or first.steps, processes=len(launching))


def check_one_gpu(profile):
    """Raise Failure if several processes or GPUs ran the kernels: their sums and gaps are those of no step."""
    if profile.processes > 1:
        kernels = f"the kernels are those of {profile.processes} processes"
        raise Failure(2, f"{kernels}: name the file of one, such as {profile.path}")
    gpus = {call.gpu for call in profile.calls if call.kind == "kernel" and call.gpu is not None}
    if len(gpus) > 1:
        raise Failure(2, f"{profile.path} holds the kernels of {len(gpus)} GPUs: profile a process that uses one")


def read_pair(first, second, steps=(None, None)):
    """Return two profiles of like runs: the newest traces in the folders whose sizes and precision agree.

    Failure names what differs if no two agree.
    """
    candidates = []
    for path in (pathlib.Path(first), pathlib.Path(second)):
        traces = whole_traces(path) or [path]
        candidates.append([(trace, metadata_of(trace)) for trace in traces])
    chosen = newest_alike(*candidates)
    one = read_profile(chosen[0], steps[0])
    other = read_profile(chosen[1], steps[1])
    check_one_gpu(one)
    check_one_gpu(other)
    found = unlike(one.metadata, other.metadata)
    if one.on_cpu != other.on_cpu or (one.device and other.device and one.device != other.device):
        found.append("device: " + ", ".join(p.device or ("CPU" if p.on_cpu else "GPU") for p in (one, other)))
    if found:
        raise Failure(2, f"{one.path} and {other.path} are unlike ({'; '.join(found)}): profile alike")
    return one, other


def newest_alike(first, second):
    """Return the newest two items whose runs are alike, or the newest two if none are.

    first, second: lists of (item, metadata), the newest first.
    """
    for other, other_metadata in second:
        for one, metadata in first:
            if not unlike(metadata, other_metadata):
                return [one, other]
    return [first[0][0], second[0][0]]


def unlike(first, second):
    """Return what differs between two traces' metadata apart from the version: "name: one, other"."""
    keys = [key for key in first if key in second and key not in ("version", "peak_memory_mb")]
    return [f"{key}: {first[key]}, {second[key]}" for key in keys if first[key] != second[key]]


def steps_needed(profile, option="--steps"):
    """Return the number of steps in a profile; Failure if neither the profile nor the option says it."""
    if profile.steps is None:
        raise Failure(2, f"{profile.path} does not say how many steps it holds: give {option} N")
    return profile.steps


def gpu_profile(path, steps):
    """Return a profile of one GPU, or raise Failure."""
    profile = read_profile(path, steps)
    check_one_gpu(profile)
    if profile.on_cpu:
        raise Failure(2, f"{profile.path} holds no launches on a GPU: record it on a machine with one")
    return profile


# ---------------------------------------------------------------- tables of kernels


def sums(calls, key):
    """Return {name or group: its calls, times in microseconds and share}, the largest total first.

    key: "name" or "group".
    """
    times = {}
    for call in calls:
        times.setdefault(getattr(call, key), []).append(call.total_ns / 1e3)
    whole = sum(call.total_ns for call in calls) / 1e3 or 1
    rows = {}
    for name, us in sorted(times.items(), key=lambda item: sum(item[1]), reverse=True):
        rows[name] = {
            "calls": len(us),
            "total_us": sum(us),
            "share_percent": 100 * sum(us) / whole,
            "mean_us": sum(us) / len(us),
            "min_us": min(us),
            "max_us": max(us),
        }
    return rows


def kernel_table(calls):
    """Return a row per kernel.

    The keys are in the order of the CSV's columns: total time, by which pages sort it, is the fourth; the name, which
    has commas, is the last.
    """
    kinds = {call.name: call.kind for call in calls}
    rows = sums(calls, "name")
    return [{"group": group_of(name), "kind": kinds[name], **row, "kernel": name} for name, row in rows.items()]


def group_table(calls):
    """Return a row per group that occurs."""
    return [{"group": name, **row} for name, row in sums(calls, "group").items()]


def groups_per_step(profile, option="--steps"):
    """Return {group: its calls and ms per step} of each group that occurs, in the order of GROUPS, and of "all"."""
    steps = steps_needed(profile, option)
    rows = sums(profile.calls, "group")
    found = {}
    for group in GROUPS:
        if group in rows:
            found[group] = {"calls": rows[group]["calls"] / steps, "ms": rows[group]["total_us"] / 1e3 / steps}
    calls = sum(row["calls"] for row in found.values())
    ms = sum(row["ms"] for row in found.values())
    return found | {"all": {"calls": calls, "ms": ms}}


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
    kernels = [row | {"ms": row["total_us"] / 1e3} for row in kernel_table(profile.calls)]
    groups = [row | {"ms": row["total_us"] / 1e3} for row in group_table(profile.calls)]
    unit = "operators on the CPU" if profile.on_cpu else "kernels and copies"
    ms = sum(row["ms"] for row in kernels)
    lines = [f"{len(kernels)} {unit}, {len(profile.calls):,} calls, {ms:,.3f} ms in all"]
    if profile.interpreted:
        lines.append(INTERPRETED)
    shown = [row | {"shown": short(row["kernel"], 44)} for row in kernels[:top]]
    lines += ["", text_table(*columns(KERNEL_COLUMNS, shown), left=2)]
    others = kernels[top:]
    if others:
        ms = sum(row["ms"] for row in others)
        share = sum(row["share_percent"] for row in others)
        lines.append(f"and {len(others)} more with {ms:,.3f} ms ({share:.1f} %)")
    lines += ["", text_table(*columns(GROUP_COLUMNS, groups))]
    return "\n".join(lines)
