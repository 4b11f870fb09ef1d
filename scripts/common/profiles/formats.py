"""The table of the formats that are read, and the reading of a file by it. Standard library only.

A row says what a file looks like, which function reads it, and which sample shows it. To add a format, write such a
function, put a small sample into tests/tools/samples, and add a row. The search in folders, the tests of damaged files
and the list in scripts/ANY_PROFILE.md (python scripts/maintain/ladder.py --write) follow the table.
"""

from collections.abc import Callable
from typing import NamedTuple

from common.command_line import Failure
from common.files import errors_of
from common.profiles.containers import DATABASE, JSON, PERFETTO, TABLE, opened, without_collection
from common.profiles.csv_files import (
    A_ROW_PER_LAUNCH,
    CALLS_ALONE,
    has_copies,
    has_launches,
    has_sums,
    is_of_host,
    read_launches,
    read_sums,
)
from common.profiles.databases import (
    is_nsys,
    is_old_rocprof,
    is_rocpd,
    is_rpd,
    read_nsys,
    read_old_rocprof,
    read_rocpd,
    read_rpd,
)
from common.profiles.perfetto import read_perfetto
from common.profiles.rocprof_json import is_rocprof_json, read_rocprof_json
from common.profiles.trace_events import is_trace
from common.profiles.traces import read_trace
from common.tables import markdown_table


class Format(NamedTuple):
    """A kind of file that is read.

    read(path, content, gpu) returns the profiles in the content: of the GPU that gpu names, of EACH or, with None,
    of all together. files: the names by which a folder is searched.
    """

    writer: str  # of such a file, in Markdown
    files: tuple[str, ...]
    container: str
    looks_like: Callable  # looks_like(content) of that container
    read: Callable
    sample: str  # in tests/tools/samples; a database is made from its SQL


def names_a_trace(content):
    """Return True for a profile_*.json of run_pytorch_profiler.py."""
    return "trace" in content and "steps_profiled" in content


def read_named_trace(path, content, gpu):
    """Return the profiles in the trace that a profile_*.json names, which must be a trace."""
    try:
        return read_file(path.with_name(content["trace"]), gpu, [TRACE])
    except Failure as error:
        raise Failure(error.status, f"names another file: {error}") from None


TRACE = Format(
    "PyTorch's profiler (`export_chrome_trace`), Triton's Proton",
    ("*trace*.json",),
    JSON,
    is_trace,
    read_trace,
    "pytorch/trace_gpu.json",
)
# In the order in which a folder is searched: the first that is found says most about the run.
FORMATS = (
    TRACE,
    Format(
        "a row per launch: `rocprofv3 --kernel-trace --output-format csv`, `rocpd`, the old `rocprof --timestamp on`, "
        "`nsys stats --report cuda_gpu_trace --format csv`",
        ("*kernel_trace.csv",),
        TABLE,
        has_launches,
        read_launches,
        "rocm-7.0/kernel_trace.csv",
    ),
    Format("`rocprofv3` from ROCm 7 on", ("*.db",), DATABASE, is_rocpd, read_rocpd, "rocm-7.0/results.sql"),
    Format("rocmProfileData", ("*.rpd",), DATABASE, is_rpd, read_rpd, "rpd/trace.sql"),
    Format(
        "the old `rocprof --hip-trace`",
        ("results.db",),
        DATABASE,
        is_old_rocprof,
        read_old_rocprof,
        "rocprof/results.sql",
    ),
    Format("`nsys export --type sqlite`", ("*.sqlite",), DATABASE, is_nsys, read_nsys, "nsys/report.sql"),
    Format(
        "`rocprof-sys-run --trace`",
        ("*.proto", "*.pftrace"),
        PERFETTO,
        lambda content: True,
        read_perfetto,
        "rocprof-sys/kernels.proto",
    ),
    Format(
        "`rocprofv3 --output-format json`",
        ("*_results.json",),
        JSON,
        is_rocprof_json,
        read_rocprof_json,
        "rocm-7.0/results.json",
    ),
    Format(
        "sums, no timeline: `rocprofv3 --stats`, `rocpd summary`, the old `rocprof --stats`, `nsys stats --report "
        "cuda_gpu_kern_sum --format csv`",
        ("*kernel_stats.csv",),
        TABLE,
        has_sums,
        read_sums,
        "rocm-7.0/kernel_stats.csv",
    ),
    Format(
        "`run_pytorch_profiler.py`: the name of its trace",
        ("profile_v*.json",),
        JSON,
        names_a_trace,
        read_named_trace,
        "pytorch/profile_v1.json",
    ),
)
UNKNOWN = {  # what a file is that looks like none of its container's formats
    DATABASE: "is a database without kernel times, neither rocpd, rpd nor rocprof's nor an export of Nsight Systems",
    JSON: "is JSON, but not a profiler's trace (it has no traceEvents): give what torch.profiler's "
    "export_chrome_trace writes",
    TABLE: f"has no kernel times: {A_ROW_PER_LAUNCH} (kernel_counters.py reads counters)",
}


def read_file(path, gpu=None, formats=FORMATS):
    """Return the profiles in one file; tell its format by its content, not by its name.

    gpu: the one to read, of several; EACH reads a profile of each, None one of all.
    """
    with errors_of(path), without_collection(), opened(path) as (container, content):
        for one in formats:
            if one.container == container and one.looks_like(content):
                return one.read(path, content, gpu)
        if container == TABLE and has_copies(content):
            raise Failure(2, "has only copies: give the kernel_trace file beside it")
        if container == TABLE and is_of_host(content):
            raise Failure(2, CALLS_ALONE)
        raise Failure(2, UNKNOWN[container])


def table_of_formats():
    """Return the table for the page: who writes a file, and what it is called in a folder."""
    rows = [[one.writer, one.container, f"`{' '.join(one.files)}`"] for one in FORMATS]
    return markdown_table(["written by", "form", "found in a folder as"], rows, left=3)
