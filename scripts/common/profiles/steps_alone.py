"""Tell whether rocprofv3 recorded the measured steps alone, as --selected-regions asks. Standard library only.

python steps_alone.py FOLDER    prints a sentence; exit status 1 if no kernel was recorded
"""

import contextlib
import csv
import pathlib
import sqlite3
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from common.command_line import run_tool
from common.files import errors_of

RANGE = "measured steps"  # which our scripts put around them
KERNELS = "SELECT MIN(start) FROM kernels"
RANGES = f"SELECT MIN(start) FROM regions WHERE json_extract(extdata, '$.message') = '{RANGE}'"


def first_start(path, name=None):
    """Return the first start in a CSV file, of rows whose Function is the name if one is given; None without a row."""
    if not path.is_file():
        return None
    with errors_of(path), open(path, newline="") as file:
        rows = [row for row in csv.DictReader(file) if name in (None, row.get("Function"))]
        return min((int(row["Start_Timestamp"]) for row in rows), default=None)


def starts(folder):
    """Yield the first start of a kernel and that of the range, for each process; None where there is none."""
    for path in sorted(folder.rglob("*_kernel_trace.csv")):
        markers = path.with_name(path.name.replace("_kernel_trace.csv", "_marker_api_trace.csv"))
        yield first_start(path), first_start(markers, RANGE)
    for path in sorted(folder.rglob("*_results.db")):
        with errors_of(path), contextlib.closing(sqlite3.connect(path)) as connection:
            kernel = connection.execute(KERNELS).fetchone()[0]
            try:
                marker = connection.execute(RANGES).fetchone()[0]
            except sqlite3.OperationalError:  # a schema without the view, or without its column
                marker = None
            yield kernel, marker


def show(folder):
    """Print the sentence; return the exit status."""
    found = [(kernel, marker) for kernel, marker in starts(folder) if kernel is not None]
    if not found:
        return 1
    if any(marker is None for _, marker in found):
        print(f"can't tell if the profile has more than the measured steps: the range '{RANGE}' is missing")
    elif all(kernel >= marker for kernel, marker in found):
        print("the profile holds the measured steps alone")
    else:
        print("the profile holds start-up and warm-up too: this rocprofv3 ignores --selected-regions")
    return 0


if __name__ == "__main__":
    sys.exit(run_tool("steps_alone.py", lambda: show(pathlib.Path(sys.argv[1]))))
