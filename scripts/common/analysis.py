"""Names of command_line.py, tables.py, runs.py and report.py, until their callers have moved."""

from common.command_line import (  # noqa: F401
    CPU_SIZES,
    Failure,
    Parser,
    add_steps,
    add_time_limit,
    load_script,
    numbers,
    on_cpu,
    positive,
    progress,
    script_path,
    with_sizes,
)
from common.report import legend_below, matplotlib_figure  # noqa: F401
from common.runs import OutOfMemory, TimeLimit, differences, read_metrics, train  # noqa: F401
from common.tables import emit, known, markdown_table, text_table  # noqa: F401
