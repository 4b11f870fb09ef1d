"""Read the kernels of every profiler's files. Standard library only.

The table in formats.py lists the formats. A file that is no database may be packed with gzip. A file that is missing,
cut off, damaged or of another kind raises Failure with one sentence that names it.

Imports common's loose modules, formulas and, for a device's ceilings, measuring. Begin with model.py, which says what a
profile holds, and formats.py, which has one row per format.
"""

from common.profiles.containers import DATABASE, MAY_BE_CUT, NO_END, TABLE, columns_of, opened
from common.profiles.csv_files import old_counters
from common.profiles.databases import GPU_COLUMNS, PROCESS_COLUMNS
from common.profiles.files import (
    check_one_result,
    files_of,
    files_of_others,
    gpu_profile,
    matching,
    newest_alike,
    read_pair,
    read_profile,
    read_ranks,
    traces_in,
    whole_traces,
)
from common.profiles.formats import read_file
from common.profiles.groups import (
    INTERPRETED,
    clean,
    group_of,
    group_table,
    kernel_table,
    kernel_text,
    precision_of_kernel,
    short,
    shown_names,
    steps_needed,
    sums,
)
from common.profiles.launches import GRAPH_LAUNCHES
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
from common.profiles.trace_events import KINDS, RUNTIMES, TIMED
