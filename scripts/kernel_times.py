#!/usr/bin/env python3
"""Kernel times of a profile as one table, whichever profiler wrote it.

Reads rocprofv3 CSV files (ROCm 6.2 to 10, and those of rocpd2csv), rocpd databases (ROCm 7 and later), Nsight Systems
databases and statistics, PyTorch (Chrome) traces, plain or gzipped, and its own JSON. A folder is searched for them;
where it holds one run in several forms, the most detailed is read. Standard library only.

As a module: `read_kernels(path)` gives records, `table(records)` a row for each kernel, `groups(records)` one for each
group. Records of single launches know their start, so gaps and overlaps can be told from them.
"""

import argparse
import contextlib
import csv
import dataclasses
import gzip
import io
import json
import pathlib
import re
import sqlite3
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator

from common.command_line import run_tool

GROUPS = ("GEMM", "attention", "normalisation", "element-wise", "optimizer", "copies", "other")

# The first pattern that is found in a kernel's name decides. The names of torch.compile's kernels list every operation
# that was fused into them, so they are told apart before the words of single operations are looked for.
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
# What the statistics of other domains list, in files of the same layout.
NOT_KERNELS = re.compile(r"(hip[A-Z]\w*|hsa_\w+|KERNEL_DISPATCH|H[IS][AP]_\w*API)$")
COMPILED_PATTERNS = [(group, re.compile(pattern, re.IGNORECASE)) for group, pattern in GROUP_PATTERNS]


class KernelFileError(ValueError):
    """A file or folder that gives no kernel times; the message is one sentence that says why and what to do."""


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One launch of a kernel, or all launches of one name where a file keeps sums alone. Times are nanoseconds.

    kind is "kernel", "copy" (memory copies and fills outside kernels) or "operator" (work on the CPU, without the
    operators that it calls). Launches of one track (process, device, queue or thread) follow each other.
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


def group_of(name: str) -> str:
    """The group of a kernel or operator, one of GROUPS, told by its name."""
    return next((group for group, pattern in COMPILED_PATTERNS if pattern.search(name)), "other")


def launch(name: str, start_ns: float, duration_ns: float, track: str = "", kind: str = "kernel") -> Kernel:
    return Kernel(clean(name), duration_ns, 1, duration_ns, duration_ns, start_ns, track, kind)


def clean(name: str) -> str:
    """The kernel's name without the mark of its code object that some tools leave at the end."""
    return re.sub(r"(\.kd| \[clone \.kd\])$", "", name.strip())


# ---------------------------------------------------------------- CSV: rocprofv3, rocpd2csv, rocprof, nsys stats


def column(header: list[str], *names: str) -> int | None:
    """Index of the first of these columns that the header has, whatever their case; None if it has none of them."""
    lowered = [cell.strip().lower() for cell in header]
    return next((lowered.index(name) for name in names if name in lowered), None)


def unit_ns(heading: str) -> float:
    """Nanoseconds in the unit that a heading names in brackets, as in "Total Time (us)"; 1 where it names none."""
    unit = re.search(r"\((\w+?)(?:ec)?\)", heading)
    return {"u": 1e3, "us": 1e3, "m": 1e6, "ms": 1e6, "s": 1e9}.get(unit[1].lower(), 1.0) if unit else 1.0


def header_row(lines: list[str]) -> int:
    """Index of the line that heads the table: nsys prints some text before it."""
    for index, line in enumerate(lines[:50]):
        cells = next(csv.reader([line]), [])
        if column(cells, "counter_name") is not None:
            raise KernelFileError("holds hardware counters, not kernel times: read it with kernel_counters.py")
        if len(cells) > 3 and (columns_of_launches(cells) or columns_of_sums(cells)):
            return index
    raise KernelFileError(
        "has no columns of kernel times: give kernel_trace or kernel_stats files of rocprofv3, or nsys stats as CSV"
    )


def columns_of_launches(header: list[str]) -> dict[str, int | None] | None:
    """Where name, start, end (or duration) and place of single launches stand; None for another kind of table."""
    found = {
        "name": column(header, "kernel_name", "kernelname", "name", "direction"),
        "start": column(header, "start_timestamp", "beginns", "start (ns)"),
        "end": column(header, "end_timestamp", "endns"),
        "duration": column(header, "duration (ns)"),
        "agent": column(header, "agent_id", "gpu-id", "device"),
        "queue": column(header, "queue_id", "queue-id", "strm"),
    }
    complete = None not in (found["name"], found["start"]) and (found["end"], found["duration"]) != (None, None)
    return found if complete else None


def columns_of_sums(header: list[str]) -> dict[str, int | None] | None:
    """Where name, calls, total, smallest and largest time stand in statistics, or None for another kind of table."""

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
    """Kernels of a CSV file of any supported layout."""
    lines = text.splitlines()
    first = header_row(lines)
    header = next(csv.reader([lines[first]]))
    launches, sums = columns_of_launches(header), columns_of_sums(header)
    kernels = []
    for number, row in enumerate(csv.reader(io.StringIO("\n".join(lines[first + 1 :]))), first + 2):
        if not any(row):
            break  # a blank line ends the table: nsys prints the next report behind it
        if len(row) != len(header):
            raise KernelFileError(f"is cut off or damaged: line {number} has {len(row)} cells of {len(header)}")
        try:
            kernel = launch_of_row(header, launches, row) if launches else sums_of_row(header, sums, row)
        except ValueError:
            raise KernelFileError(f"is damaged: line {number} has text where a number belongs") from None
        kernels.append(kernel)
    if any(NOT_KERNELS.match(kernel.name) for kernel in kernels):
        raise KernelFileError(
            "lists calls of an API or whole domains, not kernels: give the kernel_stats file beside it"
        )
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
    return Kernel(
        name, time("total"), int(row[at["calls"]]), time("min"), time("max"), kind="copy" if moves else "kernel"
    )


# ---------------------------------------------------------------- databases: rocpd, nsys


def read_database(path: pathlib.Path) -> list[Kernel]:
    """Kernels and copies of a rocpd database or of an SQLite export of Nsight Systems."""
    try:
        connection = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)
        with contextlib.closing(connection):
            names = {name for (name,) in connection.execute("SELECT name FROM sqlite_master")}
            if "kernels" in names:
                return list(rocpd_kernels(connection, names))
            if any(name.startswith("CUPTI_ACTIVITY_KIND") for name in names):
                return list(nsys_kernels(connection, names))
    except sqlite3.Error as error:
        raise KernelFileError(f"is a damaged or cut-off database ({error})") from None
    if "rocpd_op" in names:
        raise KernelFileError("is an RPD file of RocmProfileData; profile with rocprofv3 instead")
    raise KernelFileError("is a database without kernel times, neither rocpd nor an export of Nsight Systems")


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
        raise KernelFileError("holds CUDA graphs as a whole: record it with nsys --cuda-graph-trace=node")
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


def read_json(text: str) -> list[Kernel]:
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        raise KernelFileError(f"is cut off or damaged: no valid JSON at line {error.lineno}") from None
    if isinstance(content, dict) and isinstance(content.get("kernels"), list):
        return read_table(content["kernels"])
    events = content.get("traceEvents") if isinstance(content, dict) else content
    if not isinstance(events, list):
        raise KernelFileError("is JSON, but neither a trace (traceEvents) nor a table of this tool (kernels)")
    complete = [e for e in events if isinstance(e, dict) and e.get("ph") == "X" and "dur" in e and "ts" in e]
    return gpu_launches(complete) or cpu_operators([e for e in complete if e.get("cat") == "cpu_op"])


def read_table(rows: list[dict]) -> list[Kernel]:
    """The rows that `table` gives, read back from a file that --json wrote."""

    def nanoseconds(row: dict, key: str) -> float | None:
        return None if row[key] is None else 1e3 * row[key]

    try:
        return [
            Kernel(
                row["kernel"],
                1e3 * row["total_us"],
                row["calls"],
                nanoseconds(row, "min_us"),
                nanoseconds(row, "max_us"),
                kind=row["kind"],
            )
            for row in rows
        ]
    except (KeyError, TypeError):
        raise KernelFileError("is a table of kernels with columns missing: write it again with --json") from None


def gpu_launches(events: list[dict]) -> list[Kernel]:
    """What ran on a GPU, in order; the trace's microseconds become nanoseconds."""
    kinds = {"kernel": "kernel", "gpu_memcpy": "copy", "gpu_memset": "copy"}
    return [
        launch(e["name"], 1e3 * e["ts"], 1e3 * e["dur"], f"{e.get('pid')} {e.get('tid')}", kinds[e["cat"]])
        for e in sorted(events, key=lambda e: e["ts"])
        if e.get("cat") in kinds
    ]


def cpu_operators(events: list[dict]) -> list[Kernel]:
    """Operators of a CPU with the time spent in themselves: what they call is taken off, so that times add up."""
    kernels, open_calls = [], {}
    for event in sorted(events, key=lambda e: (e["ts"], -e["dur"])):
        track = f"{event.get('pid')} {event.get('tid')}"
        stack = open_calls.setdefault(track, [])
        while stack and stack[-1]["ts"] + stack[-1]["dur"] <= event["ts"]:
            kernels.append(stack.pop())
        if stack:
            stack[-1]["self"] -= event["dur"]
        stack.append({**event, "self": event["dur"], "track": track})
    kernels += [event for stack in open_calls.values() for event in stack]
    return [
        launch(e["name"], 1e3 * e["ts"], max(0.0, 1e3 * e["self"]), e["track"], "operator")
        for e in sorted(kernels, key=lambda e: e["ts"])
    ]


# ---------------------------------------------------------------- files and folders


def read_file(path: pathlib.Path) -> list[Kernel]:
    """Kernels of one file, whose kind is told by its content, not by its name."""
    try:
        with open(path, "rb") as file:
            start = file.read(16)
        if not start:
            raise KernelFileError("is empty: the profiler was stopped, or wrote nothing")
        if start == b"SQLite format 3\0":
            return read_database(path)
        content = gzip.decompress(path.read_bytes()) if start[:2] == b"\x1f\x8b" else path.read_bytes()
    except (EOFError, zlib.error, gzip.BadGzipFile):
        raise KernelFileError("is cut off or damaged: it cannot be unpacked") from None
    except OSError as error:
        raise KernelFileError(f"cannot be read: {error.strerror}") from None
    if b"\0" in content:
        raise KernelFileError(
            "is binary: open .pftrace and .proto files in https://ui.perfetto.dev, and turn an .nsys-rep file into a "
            "database with nsys export --type sqlite"
        )
    text = content.decode("utf-8", errors="replace")
    return read_json(text) if text.lstrip()[:1] in ("{", "[") else read_csv(text)


TRACE_PATTERNS = ("*trace*.json", "*trace*.json.gz")
# What a folder is searched for: the first kind that is there is read. All its files count, one a process; of PyTorch's
# traces, which pile up in one folder from run to run, the newest.
FOLDER_PATTERNS = [
    ("*kernel_trace.csv", "*memory_copy_trace.csv"),
    ("*kernel_stats.csv", "*memory_copy_stats.csv"),
    ("*.db",),
    ("*.sqlite",),
    ("*cuda_gpu_trace.csv",),
    ("*cuda_gpu_kern_sum.csv", "*cuda_gpu_mem_time_sum.csv"),
    TRACE_PATTERNS,
]


def files_of(path: pathlib.Path) -> list[pathlib.Path]:
    """The files that are read for a path given by the user: itself, or those of a folder that hold one run."""
    if not path.is_dir():
        return [path]
    for patterns in FOLDER_PATTERNS:
        files = sorted(file for pattern in patterns for file in path.rglob(pattern) if file.is_file())
        if files:
            return [max(files, key=lambda file: file.stat().st_mtime)] if patterns is TRACE_PATTERNS else files
    raise KernelFileError("is a folder without kernel times: no CSV, database or trace of a profiler lies in it")


def read_kernels(*paths: str | pathlib.Path) -> list[Kernel]:
    """Records of all launches (or sums, where a file keeps no more) in these files and folders, taken as one run.

    Raises KernelFileError, a sentence for the user, for what is missing, empty, cut off, damaged or of another kind,
    and where no file names a single kernel.
    """
    kernels, at = [], None
    for path in map(pathlib.Path, paths):
        try:
            if not path.exists():
                raise KernelFileError("does not exist")
            at = path
            for at in files_of(path):
                kernels += read_file(at)
        except KernelFileError as error:
            raise KernelFileError(f"{at or path} {error}") from None
    if not kernels:
        raise KernelFileError(f"{', '.join(map(str, paths))} names no kernel: the profiler saw no work on a GPU")
    return kernels


# ---------------------------------------------------------------- tables


def sums(kernels: Iterable[Kernel], key: Callable[[Kernel], str]) -> list[dict]:
    """Calls, times in microseconds and share of the whole for each value of key, largest total first."""
    parts: dict[str, list[Kernel]] = {}
    for kernel in kernels:
        parts.setdefault(key(kernel), []).append(kernel)
    whole = sum(kernel.total_ns for part in parts.values() for kernel in part)
    rows = []
    for name, part in parts.items():
        total, calls = sum(k.total_ns for k in part), sum(k.calls for k in part)
        known = all(k.min_ns is not None and k.max_ns is not None for k in part)
        rows.append(
            {
                key.__name__: name,
                "calls": calls,
                "total_us": total / 1e3,
                "share_percent": 100 * total / whole if whole else 0.0,
                "mean_us": total / calls / 1e3 if calls else 0.0,
                "min_us": min(k.min_ns for k in part) / 1e3 if known else None,
                "max_us": max(k.max_ns for k in part) / 1e3 if known else None,
            }
        )
    return sorted(rows, key=lambda row: -row["total_us"])


def table(kernels: list[Kernel]) -> list[dict]:
    """A row for each kernel, largest total first.

    Keys: kernel group kind calls total_us share_percent mean_us min_us max_us; the last two are None where a file does
    not say.
    """

    def kernel(record: Kernel) -> str:
        return record.name

    kinds = {record.name: record.kind for record in kernels}
    return [
        {"kernel": row["kernel"], "group": group_of(row["kernel"]), "kind": kinds[row["kernel"]], **row}
        for row in sums(kernels, kernel)
    ]


def groups(kernels: list[Kernel]) -> list[dict]:
    """A row for each group that occurs, largest total first, with the keys of `table` except kernel and kind."""

    def group(record: Kernel) -> str:
        return record.group

    return sums(kernels, group)


def short(name: str, width: int) -> str:
    """A name to display: return type, namespaces and arguments of templates and functions go first."""
    name = re.sub(r"^(void|int) +", "", name).replace("(anonymous namespace)::", "").replace("at::native::", "")
    if len(name) > width:
        name = re.sub(r"\(.*\)$", "", name)
    return name if len(name) <= width else name[: width - 3] + "..."


def as_text(kernels: list[Kernel], top: int, width: int = 44) -> str:
    """The table of the hottest kernels and the sums by group, for reading."""
    rows, whole_us = table(kernels), sum(kernel.total_ns for kernel in kernels) / 1e3
    what = "operators on the CPU (time in themselves)" if kernels[0].kind == "operator" else "kernels and copies"
    calls = sum(kernel.calls for kernel in kernels)
    lines = [f"{len(rows)} {what}, {calls:,} calls, {whole_us / 1e3:,.3f} ms in all", ""]
    form = f"{{:<{width}}}  {{:<13}}  {{:>7}}  {{:>10}}  {{:>5}}  {{:>9}}  {{:>9}}  {{:>9}}"
    lines.append(form.format("kernel", "group", "calls", "total ms", "%", "mean us", "min us", "max us"))
    for row in rows[:top]:
        times = ["-" if row[key] is None else f"{row[key]:,.1f}" for key in ("mean_us", "min_us", "max_us")]
        share, total = f"{row['share_percent']:.1f}", f"{row['total_us'] / 1e3:,.3f}"
        lines.append(form.format(short(row["kernel"], width), row["group"], f"{row['calls']:,}", total, share, *times))
    if len(rows) > top:
        rest = sum(row["total_us"] for row in rows[top:])
        share = 100 * rest / whole_us if whole_us else 0.0
        lines.append(f"and {len(rows) - top} more with {rest / 1e3:,.3f} ms ({share:.1f} %)")
    lines.append("")
    for row in groups(kernels):
        lines.append(f"{row['group']:<13}  {row['total_us'] / 1e3:>11,.3f} ms  {row['share_percent']:>5.1f} %")
    return "\n".join(lines)


def write_csv(rows: list[dict], file) -> None:
    writer = csv.DictWriter(file, rows[0].keys(), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)


def write_json(kernels: list[Kernel], file) -> None:
    json.dump({"kernels": table(kernels), "groups": groups(kernels)}, file, indent=1)
    file.write("\n")


def launches_of(kernels: list[Kernel]) -> list[dict]:
    """A row for each launch in order of time; raises KernelFileError where a file keeps sums alone."""
    if any(kernel.start_ns is None for kernel in kernels):
        raise KernelFileError("these files keep sums of kernel times, not single launches: give a trace")
    return [
        {
            "kernel": kernel.name,
            "group": kernel.group,
            "kind": kernel.kind,
            "track": kernel.track,
            "start_ns": kernel.start_ns,
            "duration_ns": kernel.total_ns,
        }
        for kernel in sorted(kernels, key=lambda kernel: kernel.start_ns)
    ]


def write_trace(kernels: list[Kernel], file) -> None:
    """The launches as a Chrome trace, which ui.perfetto.dev opens."""
    rows = launches_of(kernels)
    # One process for each kind and one line for each track; Perfetto wants whole numbers for both.
    kinds, tracks = (sorted({row[key] for row in rows}) for key in ("kind", "track"))
    events = [{"ph": "M", "name": "process_name", "pid": i, "args": {"name": kind}} for i, kind in enumerate(kinds)]
    for row in rows:
        place = {"pid": kinds.index(row["kind"]), "tid": tracks.index(row["track"])}
        times = {"ts": row["start_ns"] / 1e3, "dur": row["duration_ns"] / 1e3}
        cat = {"copy": "gpu_memcpy", "operator": "cpu_op"}.get(row["kind"], "kernel")
        events.append({"ph": "X", "cat": cat, "name": row["kernel"], **place, **times, "args": {"group": row["group"]}})
    json.dump({"displayTimeUnit": "ms", "traceEvents": events}, file)


# ---------------------------------------------------------------- main


def parse_options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="kernel_times.py",
        description="The kernel times of a profile as one table, whichever profiler wrote it.",
        epilog="example: python kernel_times.py hotspots/hotspot_20260101_120000 --top 10 --csv kernels.csv",
    )
    parser.add_argument("paths", nargs="+", metavar="PATH", help="files or folders of one run (several: one a process)")
    parser.add_argument("--top", type=int, default=20, metavar="N", help="kernels to print (%(default)s)")
    parser.add_argument("--csv", metavar="FILE", help="write the whole table as CSV (- prints it instead of the text)")
    parser.add_argument("--json", metavar="FILE", help="write kernels and groups as JSON (- prints it)")
    parser.add_argument(
        "--launches", metavar="FILE", help="write every launch with start and duration as CSV (- prints)"
    )
    parser.add_argument("--trace", metavar="FILE", help="write the launches as a trace for ui.perfetto.dev (- prints)")
    return parser.parse_args(argv)


def write_results(kernels: list[Kernel], options: argparse.Namespace) -> None:
    """Write the files that were asked for, and the table to standard output unless one of them goes there."""
    writers = {
        "csv": lambda file: write_csv(table(kernels), file),
        "json": lambda file: write_json(kernels, file),
        "launches": lambda file: write_csv(launches_of(kernels), file),
        "trace": lambda file: write_trace(kernels, file),
    }
    chosen = {name: getattr(options, name) for name in writers if getattr(options, name)}
    for name, target in chosen.items():
        if target == "-":
            writers[name](sys.stdout)
        else:
            with open(target, "w", encoding="utf-8", newline="") as file:
                writers[name](file)
    if "-" not in chosen.values():
        print(as_text(kernels, options.top))


def main(argv: list[str] | None = None) -> int:
    options = parse_options(argv)

    def work() -> None:
        if options.top < 1:
            raise KernelFileError(f"--top must be at least 1, not {options.top}")
        write_results(read_kernels(*options.paths), options)

    return run_tool("kernel_times.py", work)


if __name__ == "__main__":
    sys.exit(main())
