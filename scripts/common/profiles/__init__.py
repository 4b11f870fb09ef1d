"""Read the kernels of every profiler's files. Standard library only.

Reads CSV files of rocprofv3 (ROCm 6.2 to 10), rocpd, rocprof and nsys stats, rocpd databases (ROCm 7 and later), .rpd
files of rocmProfileData, SQLite exports of Nsight Systems, Perfetto traces of rocprof-sys, and the traces of PyTorch
and of Triton's Proton. Those that are no databases may be packed with gzip. A file that is missing, cut off, damaged or
of another kind raises Failure with one sentence that names it.

Imports common's loose modules, formulas and, for a device's ceilings, measuring. Begin with model.py, which says what a
profile holds, and readers.py, which has one reader per kind of file.
"""

from common.profiles.files import (
    check_one_result,
    files_of,
    gpu_profile,
    matching,
    newest_alike,
    read_pair,
    read_profile,
    read_ranks,
    traces_in,
    whole_traces,
)
from common.profiles.groups import (
    INTERPRETED,
    clean,
    group_cells,
    group_of,
    group_table,
    groups_per_step,
    kernel_table,
    kernel_text,
    precision_of_kernel,
    short,
    shown_names,
    steps_needed,
    sums,
)
from common.profiles.model import (
    Kernel,
    Launch,
    Operation,
    Profile,
    check_one_gpu,
    count_of,
    is_time,
    labels_of,
    several_sources,
    unlike,
)
from common.profiles.readers import (
    GPU_COLUMNS,
    PROCESS_COLUMNS,
    SQLITE,
    columns_of,
    database,
    old_counters,
    read_file,
    read_table,
)
from common.profiles.traces import GRAPH_LAUNCHES, KINDS, RUNTIMES, TIMED
