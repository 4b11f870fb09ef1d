"""Read the kernels of every profiler's files. Standard library only.

Reads CSV files of rocprofv3 (ROCm 6.2 to 10), rocpd and rocprof, rocpd databases (ROCm 7 and later), SQLite exports of
Nsight Systems, Perfetto traces of rocprof-sys, and PyTorch's traces. A file that is missing, cut off, damaged or of
another kind raises Failure with one sentence that names it.
"""

import contextlib
import csv
import dataclasses
import functools
import json
import pathlib
import re
import sqlite3
from collections import Counter

from common import perfetto
from common.command_line import Failure
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


def clean(name):
    """Return the kernel's name without the mark of its code object that some tools leave at the end."""
    return re.sub(r"(\.kd| \[clone \.kd\])$", "", name.strip())


def short(name, width):
    """Return a name to display: return type, namespaces, and arguments of templates and functions go first."""
    name = re.sub(r"^(void|int) +", "", name).replace("(anonymous namespace)::", "").replace("at::native::", "")
    if len(name) > width:
        name = re.sub(r"\(.*\)$", "", name)
    return name if len(name) <= width else name[: width - 3] + "..."


@contextlib.contextmanager
def errors_of(path):
    """Turn whatever is wrong with a file into one sentence that names it."""
    try:
        yield
    except OSError as error:
        raise Failure(2, f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, LookupError, csv.Error, sqlite3.Error) as error:
        raise Failure(2, f"{path} is cut off or damaged: {error}") from None
    except Failure as error:
        raise Failure(error.status, f"{path} {error}") from None


# ---------------------------------------------------------------- CSV: rocprofv3, rocpd, rocprof

COLUMNS = {  # a profiler's heading, in lower case -> our name
    **{"name": "name", "kernel_name": "name", "kernel name": "name", "kernelname": "name"},
    **{"start_timestamp": "start", "beginns": "start", "end_timestamp": "end", "endns": "end"},
    **{"counter_name": "counter", "counter_value": "value"},
}


def read_table(text):
    """Return the columns of a CSV file by our names, and its rows as dictionaries, read when they are asked for."""
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
    times = ((clean(row["name"]), int(row["start"]), int(row["end"])) for row in rows)
    return [Kernel(name, start, end - start) for name, start, end in times]


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


@contextlib.contextmanager
def database(path):
    """Open an SQLite file for reading; yield the connection and the names of its tables and views."""
    with contextlib.closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as connection:
        yield connection, {name for (name,) in connection.execute("SELECT name FROM sqlite_master")}


def read_database(path):
    """Return kernels and copies of a rocpd database or of an SQLite export of Nsight Systems."""
    with database(path) as (connection, names):
        if f"{NSYS}GRAPH_TRACE" in names and f"{NSYS}KERNEL" not in names:
            raise Failure(2, "holds CUDA graphs as a whole: record it with nsys --cuda-graph-trace=node")
        found = [
            Kernel(clean(name), start, ns, kind)
            for table, kind, column in TABLES
            if table in names
            for name, start, ns in connection.execute(f"SELECT {column}, start, end - start FROM {table}")
        ]
        if names.isdisjoint(table for table, *_ in TABLES):
            raise Failure(2, "is a database without kernel times, neither rocpd nor an export of Nsight Systems")
        return found


# ---------------------------------------------------------------- PyTorch's traces


def read_json(path, text):
    """Return the profile in a trace, or in the trace beside a profile_*.json of run_pytorch_profiler.py."""
    content = json.loads(text)
    if "traceEvents" in content:
        return read_trace(path, content)
    if "trace" in content and "steps_profiled" in content:
        return read_file(path.with_name(content["trace"]))
    raise Failure(2, "is JSON, but no trace of a profiler (traceEvents)")


def read_trace(path, content):
    """Return the profile in a Chrome trace: what ran on the GPU or, without one, the operators that compute."""
    events = [event for event in content["traceEvents"] if "ts" in event]
    events.sort(key=lambda event: (event["ts"], -event.get("dur", 0)))
    spans = [event for event in events if event.get("ph") == "X" and "dur" in event]
    operators = [event for event in spans if event.get("cat") == "cpu_op"]
    launches = [event for event in spans if event.get("cat") in KINDS]
    metadata, devices = content.get("tiny_llama") or {}, content.get("deviceProperties") or [{}]
    if launches:
        calls, operations = [call_of(event, KINDS[event["cat"]]) for event in launches], launched(launches, operators)
    else:
        working = operators_that_work(operators, optimizer_steps(spans))
        calls, operations = [call_of(one, "operator") for one in working], [operation(one, [one]) for one in working]
    memory = [event for event in events if event.get("name") == "[memory]"]
    memory = [event for event in memory if event["args"]["Device Type"] != 0] or memory  # of the GPU, if there is one
    marks = [event for event in spans if event.get("cat") == "user_annotation" and event["name"] in PHASES]
    phases = [(event["name"], event["ts"], event["ts"] + event["dur"]) for event in marks]
    times, device = step_times(phases, calls), devices[0].get("name")
    return Profile(path, calls, operations, steps_of(spans), device, metadata, times, memory, phases)


def call_of(event, kind):
    return Kernel(clean(event["name"]), 1e3 * event["ts"], 1e3 * event["dur"], kind)


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
    working, open_calls = [], {}
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
    found, alone = {}, []
    for event in launches:
        number = event.get("args", {}).get("External id")
        found.setdefault(number, []).append(event) if number and number in by_id else alone.append(event)
    return [operation(by_id[number], part) for number, part in found.items()] + [operation(e, [e]) for e in alone]


def operation(event, launches):
    arguments, longest = event.get("args", {}), max(launches, key=lambda one: one["dur"])
    dims, types, strides = (arguments.get(f"Input {word}") or [] for word in ("Dims", "type", "Strides"))
    names, us = tuple(clean(one["name"]) for one in launches), sum(one["dur"] for one in launches)
    group = group_of(clean(longest["name"]))
    return Operation(clean(event["name"]), group, us, dims, types, strides or [[]] * len(dims), names)


def step_times(phases, calls):
    """Return the milliseconds of each step: from its forward to the end of its optimizer or of its last kernel."""
    starts = [start for name, start, _ in phases if name == "forward"]
    ends = [end for name, _, end in phases if name == "optimizer"]
    times = []
    for start, end, border in zip(starts, ends, [*starts[1:], float("inf")], strict=False):
        last = max((call.end_ns / 1e3 for call in calls if start <= call.start_ns / 1e3 < border), default=end)
        times.append((max(end, last) - start) / 1e3)
    return times


def steps_of(events):
    """Return the training steps in a trace: marked phases, else launches of a graph that holds a whole step."""
    names = Counter(e["name"] for e in events if e.get("cat") in ("user_annotation", "cuda_runtime", "hip_runtime"))
    graphs = names["cudaGraphLaunch"] + names["hipGraphLaunch"]
    return names["optimizer"] or graphs or names["attention"] or None


# ---------------------------------------------------------------- files and folders


def read_file(path):
    """Return the profile in one file, whose kind is told by its content and not by its name."""
    with errors_of(path):
        content = path.read_bytes()
        if not content:
            raise Failure(2, "is empty: the profiler was stopped, or wrote nothing")
        if content.startswith(SQLITE):
            return Profile(path, read_database(path))
        first = content.lstrip()[:1]  # PyTorch 2.7 begins its traces with an empty line, as a Perfetto trace begins
        if b"\0" in content or (content.startswith(b"\n") and first not in b"{["):
            return Profile(path, read_perfetto(content))
        text = content.decode("utf-8", errors="replace")
        return read_json(path, text) if first in b"{[" else Profile(path, read_csv(text))


def read_perfetto(content):
    """Return the kernels of a Perfetto trace; end with status 0 where they are in a form that nothing here reads."""
    try:
        kernels = [Kernel(name, start, end - start) for name, start, end in perfetto.kernels(content)]
    except (ValueError, LookupError, TypeError, AttributeError) as error:  # a number where a message belongs
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
    except (OSError, ValueError):
        return {}  # read_file says what is wrong with it, if it is the one to be read


def read_profile(path, steps=None):
    """Return the profile in a file or folder; PyTorch's trace where there is one, which knows shapes and steps."""
    profiles = [read_file(file) for file in files_of(pathlib.Path(path))]
    calls = sorted((call for profile in profiles for call in profile.calls), key=lambda call: call.start_ns)
    if not calls:
        raise Failure(2, f"{profiles[0].path} names no kernel: the profiler saw no work on a GPU")
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
    times, whole = {}, sum(call.total_ns for call in calls) / 1e3 or 1
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
    kinds, rows = {call.name: call.kind for call in calls}, sums(calls, "name")
    return [{"group": group_of(name), "kind": kinds[name], **row, "kernel": name} for name, row in rows.items()]


def group_table(calls):
    """Return a row per group that occurs."""
    return [{"group": name, **row} for name, row in sums(calls, "group").items()]


def groups_per_step(profile, option="--steps"):
    """Return {"calls", "ms"} per step of each group that occurs, in the order of GROUPS, and of all."""
    steps, rows = steps_needed(profile, option), sums(profile.calls, "group")
    found = {
        group: {"calls": rows[group]["calls"] / steps, "ms": rows[group]["total_us"] / 1e3 / steps}
        for group in GROUPS
        if group in rows
    }
    return found | {"all": {unit: sum(row[unit] for row in found.values()) for unit in ("calls", "ms")}}


def group_cells(first, second):
    """Return a row per group in either of two results of groups_per_step: calls, % fewer, milliseconds."""
    cells, nothing = [], {"calls": 0.0, "ms": 0.0}
    for group in (group for group in (*GROUPS, "all") if group in first | second):
        one, other = first.get(group, nothing), second.get(group, nothing)
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
    lines += [*[INTERPRETED] * profile.interpreted, "", text_table(*columns(KERNEL_COLUMNS, shown), left=2)]
    if rest := kernels[top:]:
        ms, share = (sum(row[key] for row in rest) for key in ("ms", "share_percent"))
        lines.append(f"and {len(rest)} more with {ms:,.3f} ms ({share:.1f} %)")
    return "\n".join([*lines, "", text_table(*columns(GROUP_COLUMNS, groups))])
