"""Tell what limits the top kernels: occupancy, memory bandwidth, cache hit rates, matrix units. Standard library only.

python limits.py FOLDER     reads what `rocprof-compute analyze -k N -b 2` printed to analysis_N.txt, or else Nsight
                            Compute's metrics in counters.json; prints the top 5, writes limits.csv beside them
python limits.py            prints the metrics for Nsight Compute to collect
"""

import pathlib
import re
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from common.command_line import run_tool
from common.files import content_of, errors_of, read_object
from common.files import number as finite_number
from common.profiles import clean, is_time, short
from common.tables import columns, text_table, write_csv

TOP = 5  # kernels to print
BUSY = 60  # a unit above this percentage of its peak limits the kernel
FEW_WAVES = 30  # below this percentage of the resident waves, latency is hardly hidden
COLUMNS = {  # our name -> its heading, and Nsight Compute's metric
    "time_percent": ("time %", None),
    "mean_us": ("mean us", "gpu__time_duration.sum"),
    "occupancy": ("waves %", "sm__warps_active.avg.pct_of_peak_sustained_active"),
    "memory": ("memory %", "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed"),
    "l2_hit": ("L2 hit %", "lts__t_sector_hit_rate.pct"),
    "l1_hit": ("L1 hit %", "l1tex__t_sector_hit_rate.pct"),
    "matrix": ("matrix %", "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active"),
    "compute": ("compute %", "sm__throughput.avg.pct_of_peak_sustained_elapsed"),
}
# The names of rocprof-compute's metrics by release; where several are listed in one tuple, their percentages add up.
ROCM_METRICS = {
    "occupancy": [("Wavefront Occupancy",)],
    "memory": [("L2-Fabric Read BW", "L2-Fabric Write BW"), ("HBM BW",), ("HBM Bandwidth",)],
    "l2_hit": [("L2 Cache Hit Rate",), ("GL2 Cache Hit Rate",)],
    "l1_hit": [
        ("vL1D Cache Hit Rate",),
        ("Vector L1D Cache Hit Rate",),
        ("GL0 Cache Hit Rate",),
        ("GL0 Cache Hit Rate (TCP Cache)",),  # Strix Halo
        ("TCP Cache Hit Rate",),
    ],
    "matrix": [("MFMA Utilization",), ("MFMA Util",), ("WMMA Utilization",)],
    "compute": [("VALU Utilization",), ("VALU Util",)],
}
MICROSECONDS = {"n": 1e-3, "u": 1, "m": 1e3, "s": 1e6}  # by the first letter of Nsight Compute's unit


def number(text):
    """Return a cell's number, or None for an empty one, or one that is none."""
    try:
        return finite_number(text.replace(",", ""))
    except ValueError:
        return None


def cells(block):
    """Return the cells of a row of a boxed table; one of 40 letters was cut within a word."""
    lines = [line.strip().strip("│").split("│") for line in block.splitlines() if line.strip()[:1] == "│"]
    columns = zip(*([part.strip() for part in line] for line in lines), strict=False)
    return ["".join(part if len(part) == 40 else f"{part} " for part in column).strip() for column in columns]


def tables(text):
    """Yield the rows of every boxed table as dictionaries."""
    for box in re.findall("╒.*?╘", text, re.DOTALL):
        header, *rows = map(cells, re.split("[╞├]", box))
        yield [dict(zip(header, row, strict=False)) for row in rows]


def first_of(row, *starts):
    """Return the first cell whose column begins with one of the words."""
    return next((row[name] for start in starts for name in row if name.startswith(start)), "")


def analysed_kernel(path):
    """Return the limits of kernel N from analysis_N.txt, or None where it has no metrics."""
    text = content_of(path).decode("utf-8", errors="replace")
    index = int(path.stem[-1])
    kernel = {}
    percents = {}
    for rows in tables(text):
        if not kernel and len(rows) > index and (name := first_of(rows[index], "Kernel")):
            mean_ns, percent = (number(first_of(rows[index], *names)) for names in (["Mean"], ["Pct", "Percent"]))
            kernel = {"kernel": clean(name), "time_percent": percent, "mean_us": mean_ns and mean_ns / 1e3}
        if rows and "Metric" in rows[0]:
            percents |= {row.get("Metric"): number(first_of(row, "Pct", "Percent", "PoP")) for row in rows}
    if not percents or not kernel:
        return None
    for column, choices in ROCM_METRICS.items():
        found = next((names for names in choices if names[0] in percents), ())
        parts = [percents[name] for name in found if percents.get(name) is not None]
        kernel[column] = sum(parts) if parts else None
    return kernel


def read_counters(path):
    """Return a row per kernel from the JSON of kernel_counters.py, the longest first."""
    kernels = {}
    names = {metric: column for column, (_, metric) in COLUMNS.items()}
    for row in read_object(path, "file of kernel_counters.py")["counters"]:
        kernel = kernels.setdefault(row["kernel"], {"kernel": clean(row["kernel"])} | dict.fromkeys(COLUMNS))
        if not is_time(row["mean"]) or row["mean"] < 0:
            raise ValueError(f"{row['counter']} of {row['kernel']} is {row['mean']}")
        if column := names.get(row["counter"]):
            kernel[column] = row["mean"] * (MICROSECONDS[row["unit"][:1]] if column == "mean_us" else 1)
    rows = [kernel for kernel in kernels.values() if kernel["memory"] is not None or kernel["compute"] is not None]
    return sorted(rows, key=lambda row: -(row["mean_us"] or 0))


def limit_of(row):
    """Name the unit that limits the kernel; latency only where all units are known to be far from their peaks."""
    memory, matrix, compute = (row[column] or 0 for column in ("memory", "matrix", "compute"))
    if memory >= max(BUSY, matrix):
        return "memory bandwidth"
    if matrix >= BUSY:  # before compute, in which Nsight Compute counts the matrix units too
        return "matrix units"
    if compute >= BUSY:
        return "compute units"
    if row["memory"] is None or row["compute"] is None:
        return "unknown"
    return "latency, few waves" if row["occupancy"] is not None and row["occupancy"] < FEW_WAVES else "latency"


def read_rows(folder):
    """Return a row per kernel from the files in a folder; Failure with one sentence where one is damaged."""
    analysed = []
    for path in sorted(folder.glob("analysis_[0-9].txt")):
        with errors_of(path):
            analysed.append(analysed_kernel(path))
    if analysed:
        return [row for row in analysed if row]
    path = folder / "counters.json"
    with errors_of(path):
        return read_counters(path)


def main(argv):
    """Print the metrics to collect, or what limits the kernels; return the exit status."""
    if not argv:
        print(",".join(metric for _, metric in COLUMNS.values() if metric))
        return 0
    return run_tool("limits.py", lambda: show(pathlib.Path(argv[0])))


def show(folder):
    """Print the table and write it as CSV; return the exit status."""
    rows = read_rows(folder)
    if not rows:
        print(f"limits.py: {folder} has no speed-of-light metrics: the profile saw no kernel", file=sys.stderr)
        return 1
    rows = [row | {"limited_by": limit_of(row)} for row in rows]
    shown = [row | {"shown": short(row["kernel"], 40)} for row in rows[:TOP]]
    write_csv(rows, folder / "limits.csv")
    print("what limits the top kernels, in percent of the GPU's peak")
    known = [column for column in COLUMNS if any(row[column] is not None for row in rows)]  # ncu knows no share of time
    cells = "".join(f" | {COLUMNS[column][0]}: {{{column}:,.1f}}" for column in known)
    print(text_table(*columns(f"kernel: {{shown}}{cells} | limited by: {{limited_by}}", shown)))
    print(f"limited by: a unit at {BUSY} % of its peak or more, else latency (few waves: under {FEW_WAVES} %)")
    if any(row["limited_by"] == "unknown" for row in rows):
        print("unknown: the profile lacks percentages of a peak, perhaps because the profiler doesn't know this GPU's")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
