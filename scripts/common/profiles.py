"""Read kernels, counters and traces of every profiler. Standard library only.

    profile = read_profile("pytorch_profiles")     # a folder's newest trace of whole steps, or another profiler's files
    profile.calls, profile.operations, profile.steps, profile.metadata
    kernel_table(profile.calls), group_table(profile.calls)

Kernel times come from rocprofv3 CSV files (ROCm 6.2 to 10, and those of rocpd2csv), rocpd databases (ROCm 7 and later),
Nsight Systems databases and statistics, PyTorch (Chrome) traces, plain or gzipped, and the JSON of kernel_times.py.
Counters come from rocprofv3 (CSV or rocpd), rocprof-compute (pmc_perf.csv) and Nsight Compute (CSV). Everything that
is missing, cut off, damaged or of another kind raises Failure with one sentence that names the file.
"""

import contextlib
import csv
import dataclasses
import gzip
import io
import json
import pathlib
import re
import sqlite3
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from common.command_line import Failure
from common.tables import rounded

GROUPS = ("GEMM", "attention", "normalisation", "element-wise", "optimizer", "copies", "other")

# The first pattern found in a kernel's name decides. The names of torch.compile's kernels list every operation that was
# fused into them, so they are matched before the words of single operations.
GROUP_PATTERNS = [
    ("GEMM", r"^triton_tem_(?!.*attention)"),
    ("optimizer", r"^(triton|cpp)_.*_foreach_"),
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
        r"(rms|layer|batch|group)_?norm|GammaBeta|rsqrt|MeanOps|pow_tensor|aten::(mean|pow)|(Mean|Pow)Backward",
    ),
    (
        "GEMM",
        r"^Cijk_|gemm|gemv|cutlass|nvjet|cublas|hipblas|rocblas|xmma|splitK|aten::_?(mm|addmm|bmm|baddbmm)$|scaled_mm",
    ),
    ("copies", r"mem_?cpy|memset|memory_?copy|copyBuffer|fillBuffer|^Copy[A-Z]|copy_kernel|FillFunctor|CatArray"),
    ("copies", r"aten::(_to_copy|to|copy_|clone|contiguous|cat|fill_|zero_|zeros|zeros_like|ones|ones_like)$"),
    ("element-wise", r"element_?wise|swiglu|silu|rope|rotary|sigmoid|vectorized|unrolled"),
    ("element-wise", r"aten::(add|sub|mul|div|neg|exp|sqrt|sin|cos|where|masked_fill|triu|tril)_?$"),
]
COMPILED_PATTERNS = [(group, re.compile(pattern, re.IGNORECASE)) for group, pattern in GROUP_PATTERNS]
# Entries of statistics of other domains, in files of the same layout.
NOT_KERNELS = re.compile(r"(hip[A-Z]\w*|hsa_\w+|KERNEL_DISPATCH|H[IS][AP]_\w*API)$")
# Operators that only look at tensors differently, allocate them or ask about them.
NO_WORK = re.compile(
    r"^(aten::(view|_unsafe_view|reshape|_reshape_alias|transpose|t|numpy_T|as_strided|expand|permute|slice|select|narrow|"
    r"split|split_with_sizes|chunk|unbind|unsqueeze|squeeze|flatten|unflatten|detach|detach_|alias|lift_fresh|empty\w*|"
    r"new_empty\w*|resize_|resolve_\w+|result_type|promote_types|is_\w+|item|_local_scalar_dense|set_|to|record_stream)$"
    r"|autograd::|torch::|Optimizer|detach$|\w*Backward\d+$|Torch-Compiled|TorchDynamo|CompiledFunction|## )"
)
KEEPS_TIME = re.compile(r"aten::(mm|bmm|addmm|baddbmm)$|\w+Function(Backward)?$")
PHASES = ("forward", "backward", "optimizer")
HOST = ("operator", "interpreted")  # kinds of calls on a CPU
INTERPRETED = "Version 3's kernels ran in Triton's interpreter: these times say nothing about a GPU."


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One launch of a kernel, or all launches of one name where a file keeps only sums. Times are in nanoseconds.

    kind is "kernel", "copy" (memory copies and fills outside kernels), "operator" (work on the CPU) or "interpreted"
    (an operator while version 3's kernels ran in Triton's interpreter). Launches of one track (process, device, queue
    or thread) follow each other.
    """

    name: str
    total_ns: float
    calls: int = 1
    min_ns: float | None = None
    max_ns: float | None = None
    start_ns: float | None = None
    track: str = ""
    kind: str = "kernel"

    @property
    def end_ns(self) -> float | None:
        return None if self.start_ns is None else self.start_ns + self.total_ns

    @property
    def group(self) -> str:
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
    """The contents of one profile. calls are kernels and copies, or on a CPU the operators that compute."""

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
    def on_cpu(self) -> bool:
        return self.calls[0].kind in HOST

    @property
    def interpreted(self) -> bool:
        return self.calls[0].kind == "interpreted"

    @property
    def what(self) -> str:
        return "operators" if self.on_cpu else "kernels"

    @property
    def title(self) -> str:
        """Return the file's name and, if it says so itself, the version, sizes and precision in it."""
        found, parts = self.metadata, []
        if found:
            parts = [f"version {found['version']}", f"{found['batch_size']} x {found['seq_len']} tokens"]
            parts += [f"width {found['hidden_dim']}", f"{found['num_layers']} layers", found["precision"]]
            parts += ["attention alone"] * (found["part"] == "attention")
        return f"{self.path}" + (f" ({', '.join(parts)})" if parts else "")


def group_of(name: str) -> str:
    """Return the group of a kernel or operator, one of GROUPS, by its name."""
    return next((group for group, pattern in COMPILED_PATTERNS if pattern.search(name)), "other")


def launch(name: str, start_ns: float, duration_ns: float, track: str = "", kind: str = "kernel") -> Kernel:
    return Kernel(clean(name), duration_ns, 1, duration_ns, duration_ns, start_ns, track, kind)


def clean(name: str) -> str:
    """Return the kernel's name without the mark of its code object that some tools leave at the end."""
    return re.sub(r"(\.kd| \[clone \.kd\])$", "", name.strip())


def short(name: str, width: int) -> str:
    """Return a name to display: return type, namespaces, and arguments of templates and functions go first."""
    name = re.sub(r"^(void|int) +", "", name).replace("(anonymous namespace)::", "").replace("at::native::", "")
    if len(name) > width:
        name = re.sub(r"\(.*\)$", "", name)
    return name if len(name) <= width else name[: width - 3] + "..."


# ---------------------------------------------------------------- CSV: rocprofv3, rocpd2csv, rocprof, nsys stats


def column(header: list[str], *names: str) -> int | None:
    """Return the index of the first of these columns that the header has, whatever their case."""
    lowered = [cell.strip().lower() for cell in header]
    return next((lowered.index(name) for name in names if name in lowered), None)


def unit_ns(heading: str) -> float:
    """Return the nanoseconds in the unit that a heading names in brackets, as in "Total Time (us)"; 1 without any."""
    unit = re.search(r"\((\w+?)(?:ec)?\)", heading)
    return {"u": 1e3, "us": 1e3, "m": 1e6, "ms": 1e6, "s": 1e9}.get(unit[1].lower(), 1.0) if unit else 1.0


def header_row(lines: list[str]) -> int:
    """Return the index of the line that heads the table: nsys prints some text before it."""
    for index, line in enumerate(lines[:50]):
        cells = next(csv.reader([line]), [])
        if column(cells, "counter_name") is not None:
            raise Failure(2, "holds hardware counters, not kernel times: read it with kernel_counters.py")
        if len(cells) > 3 and (columns_of_launches(cells) or columns_of_sums(cells)):
            return index
    raise Failure(
        2, "has no columns of kernel times: give kernel_trace or kernel_stats files of rocprofv3, or nsys stats as CSV"
    )


def columns_of_launches(header: list[str]) -> dict[str, int | None] | None:
    """Return the columns of name, start, end (or duration) and place of launches; None for another kind of table."""
    found = {
        "name": column(header, "kernel_name", "kernelname", "name", "direction", "kernel"),
        "start": column(header, "start_timestamp", "beginns", "start (ns)", "start_ns"),
        "end": column(header, "end_timestamp", "endns"),
        "duration": column(header, "duration (ns)", "duration_ns"),
        "agent": column(header, "agent_id", "gpu-id", "device", "track"),
        "queue": column(header, "queue_id", "queue-id", "strm"),
    }
    complete = None not in (found["name"], found["start"]) and (found["end"], found["duration"]) != (None, None)
    return found if complete else None


def columns_of_sums(header: list[str]) -> dict[str, int | None] | None:
    """Return the columns of name, calls and total, smallest and largest time; None for another kind of table."""

    def timed(*words: str) -> int | None:
        starts = tuple(f"{word}{rest}" for word in words for rest in ("ns", " (", "durationns"))
        return next((i for i, cell in enumerate(header) if cell.strip().lower().startswith(starts)), None)

    found = {
        "name": column(header, "name", "operation", "kernel_name"),
        "calls": column(header, "calls", "instances", "count", "total_calls"),
        "total": timed("total", "total time", "duration"),
        "min": timed("min"),
        "max": timed("max"),
    }
    return found if None not in (found["name"], found["calls"], found["total"]) else None


def read_csv(text: str) -> list[Kernel]:
    """Return the kernels of a CSV file of any supported layout."""
    lines = text.splitlines()
    first = header_row(lines)
    header = next(csv.reader([lines[first]]))
    launches, sums = columns_of_launches(header), columns_of_sums(header)
    kernels = []
    for number, row in enumerate(csv.reader(io.StringIO("\n".join(lines[first + 1 :]))), first + 2):
        if not any(row):
            break  # a blank line ends the table: nsys prints the next report after it
        if len(row) != len(header):
            raise Failure(2, f"is cut off or damaged: line {number} has {len(row)} cells of {len(header)}")
        try:
            kernels.append(launch_of_row(header, launches, row) if launches else sums_of_row(header, sums, row))
        except ValueError:
            raise Failure(2, f"is damaged: line {number} has text where a number belongs") from None
    if any(NOT_KERNELS.match(kernel.name) for kernel in kernels):
        raise Failure(2, "lists calls of an API or whole domains, not kernels: give the kernel_stats file beside it")
    return kernels


def launch_of_row(header: list[str], at: dict[str, int | None], row: list[str]) -> Kernel:
    start = float(row[at["start"]])
    duration = float(row[at["end"]]) - start if at["end"] is not None else float(row[at["duration"]])
    if duration < 0:
        raise ValueError("end before start")
    # "Agent 4" in ROCm 7 is the bare 4 of ROCm 6
    track = " ".join(row[at[key]].removeprefix("Agent ") for key in ("agent", "queue") if at[key] is not None)
    moves = "direction" in header[at["name"]].lower() or row[at["name"]].startswith("[CUDA mem")
    return launch(row[at["name"]], start, duration, track, "copy" if moves else "kernel")


def sums_of_row(header: list[str], at: dict[str, int | None], row: list[str]) -> Kernel:
    def time(key: str) -> float | None:
        return None if at[key] is None else float(row[at[key]]) * unit_ns(header[at[key]])

    name = clean(row[at["name"]])
    moves = "operation" in header[at["name"]].lower() or name.startswith(("MEMORY_COPY", "[CUDA mem"))
    kind = "copy" if moves else "kernel"
    return Kernel(name, time("total"), int(row[at["calls"]]), time("min"), time("max"), kind=kind)


# ---------------------------------------------------------------- databases: rocpd, nsys


@contextlib.contextmanager
def database(path: pathlib.Path):
    """Open an SQLite file for reading; yield the connection and the names of its tables and views."""
    try:
        with contextlib.closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as connection:
            yield connection, {name for (name,) in connection.execute("SELECT name FROM sqlite_master")}
    except sqlite3.Error as error:
        raise Failure(2, f"is a damaged or cut-off database ({error})") from None


def read_database(path: pathlib.Path) -> list[Kernel]:
    """Return kernels and copies of a rocpd database or of an SQLite export of Nsight Systems."""
    with database(path) as (connection, names):
        if "kernels" in names:
            return list(rocpd_kernels(connection, names))
        if any(name.startswith("CUPTI_ACTIVITY_KIND") for name in names):
            return list(nsys_kernels(connection, names))
    if "rocpd_op" in names:
        raise Failure(2, "is an RPD file of RocmProfileData; profile with rocprofv3 instead")
    raise Failure(2, "is a database without kernel times, neither rocpd nor an export of Nsight Systems")


def rocpd_kernels(connection: sqlite3.Connection, names: set[str]) -> Iterator[Kernel]:
    # The views, not the tables behind them: those carry a suffix that differs from file to file.
    for view, kind in (("kernels", "kernel"), ("memory_copies", "copy")):
        if view not in names:
            continue
        columns = {row[1] for row in connection.execute(f"PRAGMA table_info({view})")}
        places = [place for place in ("pid", "agent_abs_index", "queue_id") if place in columns]
        query = f"SELECT {', '.join(['name', 'start', 'duration', *places])} FROM {view} ORDER BY start"
        for name, start, duration, *where in connection.execute(query):
            yield launch(name, start, duration, " ".join(map(str, where)), kind)


def nsys_kernels(connection: sqlite3.Connection, names: set[str]) -> Iterator[Kernel]:
    if "CUPTI_ACTIVITY_KIND_GRAPH_TRACE" in names and "CUPTI_ACTIVITY_KIND_KERNEL" not in names:
        raise Failure(2, "holds CUDA graphs as a whole: record it with nsys --cuda-graph-trace=node")
    place = "deviceId || ' ' || streamId"
    if "CUPTI_ACTIVITY_KIND_KERNEL" in names:
        query = f"""SELECT s.value, start, end - start, {place} FROM CUPTI_ACTIVITY_KIND_KERNEL k
                    JOIN StringIds s ON s.id = k.demangledName ORDER BY start"""
        for row in connection.execute(query):
            yield launch(*row)
    if "CUPTI_ACTIVITY_KIND_MEMCPY" in names:
        kinds = {1: "Host-to-Device", 2: "Device-to-Host", 8: "Device-to-Device", 10: "Peer-to-Peer"}
        query = f"SELECT copyKind, start, end - start, {place} FROM CUPTI_ACTIVITY_KIND_MEMCPY ORDER BY start"
        for kind, *row in connection.execute(query):
            yield launch(f"[CUDA memcpy {kinds.get(kind, 'other')}]", *row, kind="copy")
    if "CUPTI_ACTIVITY_KIND_MEMSET" in names:
        query = f"SELECT '[CUDA memset]', start, end - start, {place} FROM CUPTI_ACTIVITY_KIND_MEMSET ORDER BY start"
        for row in connection.execute(query):
            yield launch(*row, kind="copy")


# ---------------------------------------------------------------- JSON: PyTorch and Chrome traces, our own tables


def read_json(path: pathlib.Path, text: str) -> Profile:
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        raise Failure(2, f"is cut off or damaged: no valid JSON at line {error.lineno}") from None
    if isinstance(content, dict) and isinstance(content.get("kernels"), list):
        return Profile(path, read_table(content["kernels"]), steps=content.get("steps_profiled"))
    events = content.get("traceEvents") if isinstance(content, dict) else content
    if not isinstance(events, list):
        raise Failure(2, "is JSON, but neither a trace (traceEvents) nor a table of kernel_times.py (kernels)")
    return read_trace(path, events, content if isinstance(content, dict) else {})


def read_table(rows: list[dict]) -> list[Kernel]:
    """Return the kernels of rows that `kernel_table` gave and --json wrote."""

    def nanoseconds(row: dict, key: str) -> float | None:
        return None if row[key] is None else 1e3 * row[key]

    try:
        return [
            Kernel(
                *(row["kernel"], nanoseconds(row, "total_us"), row["calls"]),
                *(nanoseconds(row, "min_us"), nanoseconds(row, "max_us")),
                kind=row["kind"],
            )
            for row in rows
        ]
    except (KeyError, TypeError):
        raise Failure(2, "is a table of kernels with columns missing: write it again with --json") from None


def read_trace(path: pathlib.Path, events: list, head: dict) -> Profile:
    """Return the profile in a Chrome trace: what ran on the GPU or, without one, the operators that compute."""
    complete = [e for e in events if isinstance(e, dict) and e.get("ph") == "X" and "dur" in e and "ts" in e]
    operators = [e for e in complete if e.get("cat") == "cpu_op"]
    metadata, devices = head.get("tiny_llama") or {}, head.get("deviceProperties") or [{}]
    calls = gpu_calls(complete)
    if calls:
        operations = operations_of_kernels(complete, operators)
    else:
        kind = "interpreted" if metadata.get("version") == 3 else "operator"
        working = sorted(operators_that_work(operators), key=lambda e: e["ts"])
        calls = [launch(e["name"], 1e3 * e["ts"], 1e3 * e["dur"], track_of(e), kind) for e in working]
        operations = [operation(e, [e]) for e in working]
    memory = [e for e in events if isinstance(e, dict) and e.get("name") == "[memory]"]
    memory = [e for e in memory if e["args"]["Device Type"] != 0] or memory  # of the GPU, if there is one
    memory = sorted(memory, key=lambda e: e["ts"])
    phases = phases_of(complete)
    steps, device = steps_of(complete), devices[0].get("name")
    return Profile(path, calls, operations, steps, device, metadata, step_times(phases, calls), memory, phases)


def track_of(event: dict) -> str:
    return f"{event.get('pid')} {event.get('tid')}"


def gpu_calls(events: list[dict]) -> list[Kernel]:
    """Return what ran on a GPU, in order; the trace's microseconds become nanoseconds."""
    kinds = {"kernel": "kernel", "gpu_memcpy": "copy", "gpu_memset": "copy"}
    return [
        launch(e["name"], 1e3 * e["ts"], 1e3 * e["dur"], track_of(e), kinds[e["cat"]])
        for e in sorted(events, key=lambda e: e["ts"])
        if e.get("cat") in kinds
    ]


def operators_that_work(operators: list[dict]) -> list[dict]:
    """Return the innermost operators that compute: those that only call others, or change no data, are left out.

    A matrix product stays although it copies an operand first, and a Python autograd function, in which interpreted
    kernels run, although it copies tensors; that time is taken off its "dur".
    """
    working, open_calls = [], {}
    for event in sorted(operators, key=lambda e: (e["ts"], -e["dur"])):
        stack = open_calls.setdefault(track_of(event), [])
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
    return [event | {"dur": max(0.0, own)} for event, innermost, own in working if innermost]


def operations_of_kernels(events: list[dict], operators: list[dict]) -> list[Operation]:
    """Return the operators that launched the kernels, each with all of its launches; kernels of a graph have none."""
    by_id = {e.get("args", {}).get("External id"): e for e in operators}
    launched: dict[int, list[dict]] = {}
    alone = []
    for event in events:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            number = event.get("args", {}).get("External id")
            launched.setdefault(number, []).append(event) if number in by_id and number else alone.append(event)
    found = [operation(by_id[number], kernels) for number, kernels in launched.items()]
    return found + [operation(event, [event]) for event in alone]


def operation(event: dict, launches: list[dict]) -> Operation:
    arguments = event.get("args", {})
    dims = arguments.get("Input Dims") or []
    longest = max(launches, key=lambda e: e["dur"])
    return Operation(
        clean(event["name"]),
        group_of(clean(longest["name"])),
        sum(e["dur"] for e in launches),
        dims,
        arguments.get("Input type") or [],
        arguments.get("Input Strides") or [[]] * len(dims),
        tuple(clean(e["name"]) for e in launches),
    )


def phases_of(events: list[dict]) -> list[tuple[str, float, float]]:
    """Return name, start and end of each marked phase of a step, in order of time."""
    marks = [e for e in events if e.get("cat") == "user_annotation" and e["name"] in PHASES]
    return sorted(((e["name"], e["ts"], e["ts"] + e["dur"]) for e in marks), key=lambda phase: phase[1])


def step_times(phases: list[tuple[str, float, float]], calls: list[Kernel]) -> list[float]:
    """Return the milliseconds of each step: from its forward to the end of its optimizer or of its last kernel."""
    starts, optimizers = ([phase for phase in phases if phase[0] == name] for name in ("forward", "optimizer"))
    times = []
    borders = [start for _, start, _ in starts[1:]] + [float("inf")]
    for (_, start, _), (_, _, end), border in zip(starts, optimizers, borders, strict=False):
        ends = [call.end_ns / 1e3 for call in calls if start <= call.start_ns / 1e3 < border]
        times.append((max([end, *ends]) - start) / 1e3)
    return times


def steps_of(events: list[dict]) -> int | None:
    """Return the training steps in a trace: marked phases, else launches of a graph that holds a whole step."""
    names = Counter(e["name"] for e in events if e.get("cat") in ("user_annotation", "cuda_runtime", "hip_runtime"))
    for marks in (("optimizer",), ("cudaGraphLaunch", "hipGraphLaunch"), ("attention",)):
        found = sum(names[mark] for mark in marks)
        if found:
            return found
    return None


# ---------------------------------------------------------------- files and folders


def read_file(path: pathlib.Path) -> Profile:
    """Return the profile in one file, whose kind is told by its content and not by its name."""
    try:
        with open(path, "rb") as file:
            start = file.read(16)
        if not start:
            raise Failure(2, "is empty: the profiler was stopped, or wrote nothing")
        if start == b"SQLite format 3\0":
            return Profile(path, read_database(path))
        content = gzip.decompress(path.read_bytes()) if start[:2] == b"\x1f\x8b" else path.read_bytes()
        if b"\0" in content:
            raise Failure(
                2,
                "is binary: open .pftrace and .proto files in https://ui.perfetto.dev, and turn an .nsys-rep file into "
                "a database with nsys export --type sqlite",
            )
        text = content.decode("utf-8", errors="replace")
        return read_json(path, text) if text.lstrip()[:1] in ("{", "[") else Profile(path, read_csv(text))
    except (EOFError, zlib.error, gzip.BadGzipFile):
        raise Failure(2, f"{path} is cut off or damaged: it cannot be unpacked") from None
    except OSError as error:
        raise Failure(2, f"{path} cannot be read: {error.strerror}") from None
    except Failure as error:
        raise Failure(2, f"{path} {error}") from None


PYTORCH = ("trace_*.json", "trace_*.json.gz", "*.pt.trace.json", "*.pt.trace.json.gz")
# What a folder is searched for: the first kind that is there is read. All its files count, one per process.
OTHER_PROFILERS = [
    ("*kernel_trace.csv", "*memory_copy_trace.csv"),
    ("*kernel_stats.csv", "*memory_copy_stats.csv"),
    ("*.db",),
    ("*.sqlite",),
    ("*cuda_gpu_trace.csv",),
    ("*cuda_gpu_kern_sum.csv", "*cuda_gpu_mem_time_sum.csv"),
]


def matching(folder: pathlib.Path, patterns: Iterable[str]) -> list[pathlib.Path]:
    return sorted({file for pattern in patterns for file in folder.rglob(pattern) if file.is_file()})


def files_of(path: pathlib.Path, traces_first: bool = False) -> list[pathlib.Path]:
    """Return the files to read for a path: itself or, in a folder, those of one run.

    PyTorch's traces pile up in one folder from run to run: of these the newest one of whole steps is read.
    """
    if not path.exists():
        raise Failure(2, f"{path} does not exist: give a profile, or the folder that it lies in")
    if not path.is_dir():
        return [path]
    others = next(filter(None, (matching(path, patterns) for patterns in OTHER_PROFILERS)), [])
    if others and not (traces_first and matching(path, PYTORCH)):
        return others
    traces = whole_traces(path) or matching(path, ("*trace*.json", "*trace*.json.gz"))[:1]
    if not traces:
        raise Failure(2, f"{path} is a folder without kernel times: no CSV, database or trace of a profiler lies in it")
    return traces[:1]


def whole_traces(folder: pathlib.Path) -> list[pathlib.Path]:
    """Return PyTorch's traces of whole steps in a folder, the newest first. Failure if it holds only partial ones."""
    files = sorted(matching(folder, PYTORCH), key=lambda file: (-file.stat().st_mtime, file.name))
    whole = [file for file in files if metadata_of(file).get("part", "whole") == "whole"]
    if files and not whole:
        raise Failure(2, f"{folder} holds only traces of attention alone: profile whole steps, or name the file itself")
    return whole


def metadata_of(file: pathlib.Path) -> dict:
    """Return what a training script wrote into its trace about itself; nothing for another file."""
    try:
        with gzip.open(file) if file.suffix == ".gz" else open(file, "rb") as opened:
            start = opened.read(2**20).decode("utf-8", errors="replace")  # a trace of a GPU can have a gigabyte
        found = re.search(r'"tiny_llama":\s*(?=\{)', start)
        return json.JSONDecoder().raw_decode(start, found.end())[0] if found else {}
    except (OSError, EOFError, zlib.error, ValueError):
        return {}  # read_file says what is wrong with it, if it is the one to be read


def read_kernels(*paths: str | pathlib.Path) -> list[Kernel]:
    """Return all launches (or sums, where a file keeps no more) in these files and folders, taken as one run."""
    files = [file for path in paths for file in files_of(pathlib.Path(path))]
    kernels = [kernel for file in files for kernel in read_file(file).calls]
    if not kernels:
        raise Failure(2, f"{', '.join(map(str, paths))} names no kernel: the profiler saw no work on a GPU")
    return kernels


def read_profile(path: str | pathlib.Path, steps: int | None = None) -> Profile:
    """Return the profile in a file or folder; PyTorch's trace where there is one, which knows shapes and steps."""
    profiles = [read_file(file) for file in files_of(pathlib.Path(path), traces_first=True)]
    calls = [call for profile in profiles for call in profile.calls]
    if not calls:
        raise Failure(2, f"{profiles[0].path} names no kernel: the profiler saw no work on a GPU")
    return dataclasses.replace(profiles[0], calls=calls, steps=steps or profiles[0].steps)


def read_pair(
    first: str | pathlib.Path, second: str | pathlib.Path, steps: tuple = (None, None), allow_different: bool = False
) -> tuple[Profile, Profile]:
    """Return two profiles of like runs: of the traces in the folders the newest pair whose sizes and precision agree.

    Failure names what differs if no two agree, unless that is allowed; the newest ones are read then.
    """
    choices = [run_choices(pathlib.Path(path)) for path in (first, second)]
    heads = {path: metadata_of(path) for paths in choices for path in paths}
    alike = [(one, other) for other in choices[1] for one in choices[0] if not unlike(heads[one], heads[other])]
    chosen = alike[0] if alike else (choices[0][0], choices[1][0])
    profiles = tuple(read_profile(path, number) for path, number in zip(chosen, steps, strict=True))
    found = unlike(*(profile.metadata for profile in profiles))
    found += [f"device: {profiles[0].device}, {profiles[1].device}"] * (profiles[0].device != profiles[1].device)
    if profiles[0].on_cpu != profiles[1].on_cpu:
        raise Failure(2, "one profile is of a CPU and the other of a GPU: profile both on the same device")
    if found and not allow_different:
        where = f"{profiles[0].path} and {profiles[1].path}"
        raise Failure(2, f"{where} are unlike ({'; '.join(found)}): profile alike, or add --allow-different")
    return profiles


def run_choices(path: pathlib.Path) -> list[pathlib.Path]:
    """Return the traces of a folder, the newest first; for other profilers' files and for a file the path itself."""
    return whole_traces(path) or [path]


def unlike(first: dict, second: dict) -> list[str]:
    """Return what differs between two traces' metadata apart from the version: "name: one, other"."""
    keys = [key for key in first if key in second and key not in ("version", "peak_memory_mb")]
    return [f"{key}: {first[key]}, {second[key]}" for key in keys if first[key] != second[key]]


def steps_needed(profile: Profile, option: str = "--steps") -> int:
    if profile.steps is None:
        raise Failure(2, f"{profile.path} does not say how many steps it holds: give {option} N")
    return profile.steps


# ---------------------------------------------------------------- tables of kernels


def sums(kernels: Iterable[Kernel], key: Callable[[Kernel], str]) -> Iterator[tuple[str, list[Kernel], dict]]:
    """Yield each value of key, its kernels and its row: calls, times in microseconds, share; largest total first."""
    parts: dict[str, list[Kernel]] = {}
    for kernel in kernels:
        parts.setdefault(key(kernel), []).append(kernel)
    totals = {name: sum(kernel.total_ns for kernel in part) for name, part in parts.items()}
    whole = sum(totals.values())
    for name in sorted(parts, key=lambda name: -totals[name]):
        part, calls = parts[name], sum(kernel.calls for kernel in parts[name])
        known = all(k.min_ns is not None and k.max_ns is not None for k in part)
        row = {
            "calls": calls,
            "total_us": totals[name] / 1e3,
            "share_percent": 100 * totals[name] / whole if whole else 0.0,
            "mean_us": totals[name] / calls / 1e3 if calls else 0.0,
            "min_us": min(k.min_ns for k in part) / 1e3 if known else None,
            "max_us": max(k.max_ns for k in part) / 1e3 if known else None,
        }
        yield name, part, row


def kernel_table(kernels: list[Kernel]) -> list[dict]:
    """Return a row per kernel, largest total first. min_us and max_us are None where a file does not say.

    The order of the columns is that of the CSV: total time is the fourth, and the name, which has commas, the last.
    """
    return [
        {"group": part[0].group, "kind": part[0].kind, **row, "kernel": name}
        for name, part, row in sums(kernels, lambda kernel: kernel.name)
    ]


def group_table(kernels: list[Kernel]) -> list[dict]:
    """Return a row per group that occurs, largest total first."""
    return [{"group": name, **row} for name, _, row in sums(kernels, lambda kernel: kernel.group)]


def counts_per_step(profile: Profile, steps: int) -> dict:
    """Return calls and milliseconds per step: in all, by group and, calls only, by name."""
    calls, times, names = Counter(), Counter(), Counter()
    for kernel in profile.calls:
        calls[kernel.group] += kernel.calls
        times[kernel.group] += kernel.total_ns
        names[kernel.name] += kernel.calls
    return {
        "path": str(profile.path),
        "title": profile.title,
        "steps": steps,
        "calls": sum(calls.values()) / steps,
        "ms": sum(times.values()) / 1e6 / steps,
        "groups": {g: {"calls": calls[g] / steps, "ms": times[g] / 1e6 / steps} for g in GROUPS if g in calls},
        "names": {name: number / steps for name, number in names.items()},
    }


def compare_counts(baseline: dict, fused: dict) -> dict:
    """Return two results of `counts_per_step`, a row per group with both, and the change per name."""
    rows = []
    for group in (*GROUPS, "all"):
        before, after = (part if group == "all" else part["groups"].get(group) for part in (baseline, fused))
        if before or after:
            before, after = (part or {"calls": 0.0, "ms": 0.0} for part in (before, after))
            fewer = 100 * (before["calls"] - after["calls"]) / before["calls"] if before["calls"] else None
            row = {"group": group, "baseline_calls": before["calls"], "fused_calls": after["calls"]}
            rows.append(row | {"fewer_percent": fewer, "baseline_ms": before["ms"], "fused_ms": after["ms"]})
    names = set(baseline["names"]) | set(fused["names"])
    change = {name: fused["names"].get(name, 0) - baseline["names"].get(name, 0) for name in names}
    return {"baseline": baseline, "fused": fused, "rows": rows, "change": change}


def count_cells(rows: list[dict]) -> list[list[str]]:
    """Return the cells of a table of `compare_counts`: group, calls before and after, % fewer, ms before and after."""
    return [
        [row["group"], f"{row['baseline_calls']:,.1f}", f"{row['fused_calls']:,.1f}"]
        + ["-" if row["fewer_percent"] is None else f"{row['fewer_percent']:.1f} %"]
        + [rounded(row["baseline_ms"]), rounded(row["fused_ms"])]
        for row in rows
    ]


def launches_of(kernels: list[Kernel]) -> list[Kernel]:
    """Return single launches in order of time; Failure where a file keeps only sums."""
    if any(kernel.start_ns is None for kernel in kernels):
        raise Failure(2, "these files keep sums of kernel times, not single launches: give a trace")
    return sorted(kernels, key=lambda kernel: kernel.start_ns)


def gpu_launches(path: str | pathlib.Path, steps: int | None) -> tuple[Profile, list[Kernel]]:
    """Return a profile and its launches in order of time; Failure where nothing ran on a GPU."""
    profile = read_profile(path, steps)
    if profile.on_cpu:
        raise Failure(2, f"{profile.path} holds no launches on a GPU: record it on a machine with one")
    return profile, launches_of(profile.calls)


def busy_intervals(launches: Iterable[Kernel]) -> list[tuple[float, float]]:
    """Return start and end in ns of the stretches in which something ran, whatever the queue. Ordered by time."""
    merged: list[list[float]] = []
    for kernel in launches:
        if merged and kernel.start_ns <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], kernel.end_ns)
        else:
            merged.append([kernel.start_ns, kernel.end_ns])
    return [(start, end) for start, end in merged]


def kernel_text(kernels: list[Kernel], top: int, width: int = 44) -> str:
    """Return the table of the longest kernels and the sums by group, for reading."""
    rows, whole_us = kernel_table(kernels), sum(kernel.total_ns for kernel in kernels) / 1e3
    what = "operators on the CPU" if kernels[0].kind in HOST else "kernels and copies"
    calls = sum(kernel.calls for kernel in kernels)
    lines = [f"{len(rows)} {what}, {calls:,} calls, {whole_us / 1e3:,.3f} ms in all"]
    lines += [INTERPRETED] * (kernels[0].kind == "interpreted")
    form = f"{{:<{width}}}  {{:<13}}  {{:>7}}  {{:>10}}  {{:>5}}  {{:>9}}  {{:>9}}  {{:>9}}"
    lines += ["", form.format("kernel", "group", "calls", "total ms", "%", "mean us", "min us", "max us")]
    for row in rows[:top]:
        times = ["-" if row[key] is None else f"{row[key]:,.1f}" for key in ("mean_us", "min_us", "max_us")]
        share, total = f"{row['share_percent']:.1f}", f"{row['total_us'] / 1e3:,.3f}"
        lines.append(form.format(short(row["kernel"], width), row["group"], f"{row['calls']:,}", total, share, *times))
    if len(rows) > top:
        rest = sum(row["total_us"] for row in rows[top:])
        share = 100 * rest / whole_us if whole_us else 0.0
        lines.append(f"and {len(rows) - top} more with {rest / 1e3:,.3f} ms ({share:.1f} %)")
    lines.append("")
    for row in group_table(kernels):
        lines.append(f"{row['group']:<13}  {row['total_us'] / 1e3:>11,.3f} ms  {row['share_percent']:>5.1f} %")
    return "\n".join(lines)


# ---------------------------------------------------------------- hardware counters

COUNTER_FILES = ("*counter_collection.csv", "*.db", "ncu*.csv", "pmc_perf.csv")
COUNTER = re.compile(r"\w+__\w|(SQ|SQC|TA|TD|TCP|TCC|SPI|CPC|CPF|GRBM)_")  # columns of ncu, of rocprof-compute
Value = tuple[str, str, str, float]  # kernel, counter, unit, value


def read_counters(*paths: str | pathlib.Path) -> list[Value]:
    """Return (kernel, counter, unit, value) of every launch in these files and folders."""
    values = []
    for path in map(pathlib.Path, paths):
        if not path.exists():
            raise Failure(2, f"{path} does not exist")
        found = [matching(path, [pattern]) for pattern in COUNTER_FILES] if path.is_dir() else [[path]]
        files = next(filter(None, found), [])
        if not files:
            raise Failure(2, f"{path} is a folder without counters: no counter_collection or ncu file lies in it")
        for file in files:
            try:
                values += counters_of_file(file)
            except OSError as error:
                raise Failure(2, f"{file} cannot be read: {error.strerror}") from None
            except Failure as error:
                raise Failure(2, f"{file} {error}") from None
    if not values:
        raise Failure(2, f"{', '.join(map(str, paths))} holds no counter of any kernel")
    return values


def counters_of_file(file: pathlib.Path) -> list[Value]:
    if file.read_bytes()[:16] != b"SQLite format 3\0":
        return list(counters_of_csv(counter_rows(file)))
    with database(file) as (connection, names):
        if "counters_collection" not in names:
            raise Failure(2, "holds no counters")
        query = "SELECT kernel_name, counter_name, value FROM counters_collection"
        return [(clean(kernel), counter, "", float(value)) for kernel, counter, value in connection.execute(query)]


def counter_rows(file: pathlib.Path) -> list[list[str]]:
    """Return the rows of a CSV file from its header on; ncu may print lines that begin with == before it."""
    lines = [line for line in file.read_text(errors="replace").splitlines() if line and not line.startswith("==")]
    if not lines:
        raise Failure(2, "is empty: the profiler was stopped, or wrote nothing")
    rows = list(csv.reader(lines))
    for number, row in enumerate(rows, 1):
        if len(row) != len(rows[0]):
            raise Failure(2, f"is cut off or damaged: row {number} has {len(row)} cells of {len(rows[0])}")
    return rows


def counters_of_csv(rows: list[list[str]]) -> Iterator[Value]:
    """Yield the values of a table with a row per counter, or with a column per counter."""
    header, *rows = rows
    kernel, counter = column(header, "kernel_name", "kernel name"), column(header, "counter_name", "metric name")
    wide = [i for i, name in enumerate(header) if COUNTER.match(name)]
    if kernel is None or (counter is None and not (wide and rows)):
        raise Failure(2, "has no counters of kernels: give a counter_collection file of rocprofv3 or CSV of ncu")
    value, unit = column(header, "counter_value", "metric value"), column(header, "metric unit")
    units = rows[0] if counter is None and "__" in header[wide[0]] else None  # ncu's first row
    for number, row in enumerate(rows[units is not None :], 2 + (units is not None)):
        if counter is not None and row[counter]:
            yield clean(row[kernel]), row[counter], row[unit] if unit is not None else "", to_number(row[value], number)
        for i in wide if counter is None else []:
            if row[i] and row[i][0] in "-.0123456789":  # some metrics are words
                yield clean(row[kernel]), header[i], units[i] if units else "", to_number(row[i], number)


def to_number(text: str, row: int) -> float:
    try:
        return float(text.replace(",", ""))  # ncu writes 1,024
    except ValueError:
        raise Failure(2, f"is damaged: row {row} has text where a number belongs") from None


def counter_table(values: list[Value]) -> list[dict]:
    """Return a row per kernel and counter: kernel group counter unit launches mean min max."""
    parts: dict[tuple[str, str, str], list[float]] = {}
    for kernel, counter, unit, value in values:
        parts.setdefault((kernel, counter, unit), []).append(value)
    return [
        {"kernel": kernel, "group": group_of(kernel), "counter": counter, "unit": unit, "launches": len(part)}
        | {"mean": sum(part) / len(part), "min": min(part), "max": max(part)}
        for (kernel, counter, unit), part in parts.items()
    ]
