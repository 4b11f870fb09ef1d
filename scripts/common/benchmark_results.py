"""The results of benchmark_suite.py: one JSON file of runs, and the table, CSV and picture that follow from it.

A results file holds "sessions" (when, on what machine and with which arguments the suite was started), "runs" (one
process each: case, repeat, status, environment, summary) and "accuracy" (one comparison with version 1 each). Every
figure of a table is computed from it by rows(); none is stored twice.
"""

import csv
import json
import os
import pathlib
from typing import NamedTuple

import numpy as np

PHASES = ("forward_ms", "backward_ms", "optimizer_ms")
PEER_ADAMW = "+peer-adamw"  # version 3 on several GPUs without DDP; on one it is the model without it
COPIES = "+copies"  # another way, of older recorded runs


class Case(NamedTuple):
    """What one run measures. options: further options for the training script, as one string.

    processes: how many torchrun starts on one machine, with batch_size sequences each; 1 is the script alone.
    """

    model: str
    preset: str
    batch_size: int
    seq_len: int
    precision: str
    graph: bool
    options: str = ""
    processes: int = 1

    @property
    def configuration(self):
        """What two cases must share to be compared."""
        return self.preset, self.batch_size, self.seq_len, self.options

    def __str__(self):
        way = "graph" if self.graph else "eager"
        together = f" x{self.processes}" if self.processes > 1 else ""
        return f"{self.preset} b{self.batch_size} t{self.seq_len} {self.precision} {self.model} {way}{together}"


def empty_results():
    return {"sessions": [], "runs": [], "accuracy": []}


def read_results(path):
    """The contents of a results file; ValueError with one sentence where it is none."""
    try:
        results = json.loads(pathlib.Path(path).read_text())
        for run in results["runs"]:
            run["case"] = Case(**run["case"])
        for entry in results["accuracy"]:
            entry["case"] = Case(**entry["case"])
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no results file of benchmark_suite.py ({error!r})") from None
    return results


def write_results(results, path):
    """Write the file whole or not at all, with a run on each line."""
    parts = []
    for kind, entries in results.items():
        flat = [e | {"case": e["case"]._asdict()} if "case" in e else e for e in entries]
        parts.append(f'"{kind}": [\n' + ",\n".join(json.dumps(entry) for entry in flat) + "\n]")
    partial = pathlib.Path(f"{path}.partial")
    partial.write_text("{\n" + ",\n".join(parts) + "\n}\n")
    os.replace(partial, path)


def quartiles(values):
    return [float(value) for value in np.percentile(values, [25, 50, 75])]


def step_quartiles(runs):
    """Over the medians of the repeats; of a single run over its own steps."""
    if len(runs) == 1:
        step = runs[0]["summary"]["step_ms"]
        return [step["p25"], step["median"], step["p75"]]
    return quartiles([run["summary"]["step_ms"]["median"] for run in runs])


def reference_steps(results):
    """(configuration, repeat) -> step time of version 1 as it runs by default, in float32."""
    return {
        (run["case"].configuration, run["repeat"]): run["summary"]["step_ms"]["median"]
        for run in results["runs"]
        if run["status"] == "ok" and run["case"][0] == "v1" and run["case"].precision == "float32"
        if not run["case"].graph and run["case"].processes == 1
    }


def single_steps(results):
    """Case -> step times of its runs in one process, which several GPUs shared: they differ by some percent."""
    steps = {}
    for run in results["runs"]:
        if run["status"] == "ok" and run["case"].processes == 1:
            steps.setdefault(run["case"], []).append(run["summary"]["step_ms"]["median"])
    return steps


def interpreted(run):
    """Whether Triton's interpreter ran the kernels of this process, so that its times mean nothing."""
    on_cpu = run["status"] == "ok" and run["environment"]["device_type"] == "cpu"
    return on_cpu and run["case"].model.split("+")[0] == "v3"


def speed(runs, reference):
    """Throughput over that of version 1 alone, the median over the repeats that have both; None without any."""
    ratios = []
    for run in runs:
        first = reference.get((run["case"].configuration, run["repeat"]))
        if first is not None and not interpreted(run):
            ratios.append(run["case"].processes * first / run["summary"]["step_ms"]["median"])
    return quartiles(ratios)[1] if ratios else None


def efficiency(runs, singles):
    """Weak scaling: throughput a process over that of one process alone, medians of both; None without the latter."""
    case = runs[0]["case"]
    model = case.model.replace(PEER_ADAMW, "").replace(COPIES, "")
    alone = singles.get(case._replace(model=model, processes=1))
    steps = [run["summary"]["step_ms"]["median"] for run in runs]
    return quartiles(alone)[1] / quartiles(steps)[1] if alone else None


def phase_median(summaries, phase):
    times = [summary[phase] for summary in summaries]
    return None if None in times else quartiles(times)[1]


def measured_row(runs, reference, singles):
    """The figures of one case from its successful runs."""
    summaries = [run["summary"] for run in runs]
    first = summaries[0]
    low, step, high = step_quartiles(runs)
    case = runs[0]["case"]
    tflops = first["flops_per_step"] / step / 1e9
    return {
        "repeats": len(runs),
        "step_ms": step,
        "step_p25_ms": low,
        "step_p75_ms": high,
        **{phase: phase_median(summaries, phase) for phase in PHASES},
        "samples_per_second": 1000 * case.processes * case.batch_size / step,
        "tokens_per_second": 1000 * case.processes * case.batch_size * case.seq_len / step,
        "tflops": tflops,
        "mfu": first["mfu"] and first["mfu"] * tflops / first["tflops"],
        "speed": speed(runs, reference),
        "efficiency": efficiency(runs, singles) if case.processes > 1 else None,
        "peak_memory_mb": max(summary["peak_memory_mb"] for summary in summaries),
        "flops_per_step": first["flops_per_step"],
        "parameters": first["parameters"],
        "parameters_trained": min(summary["parameters_trained"] for summary in summaries),
        "first_loss": first["first_loss"],
        "final_loss": first["final_loss"],
        "captured": all(summary["graph"]["captured"] for summary in summaries),
        "graph_reason": next((s["graph"]["reason"] for s in summaries if not s["graph"]["captured"]), None),
        "warmup_s": quartiles([summary["warmup_s"] for summary in summaries])[1],
    }


def rows(results):
    """One flat dictionary for each case, in the order of their first runs: its figures, or why there are none.

    Times in ms, memory in MiB of the process that needs most; speed is throughput over that of version 1 in float32 in
    the same round of processes, efficiency throughput a process over that of the same case in one process; errors are
    relative to version 1 in float32. status: ok, failed, or not available.
    """
    reference, singles, runs_of, found = reference_steps(results), single_steps(results), {}, []
    accuracy = {(e["case"].configuration, e["case"].model, e["case"].precision): e for e in results["accuracy"]}
    for run in results["runs"]:
        runs_of.setdefault(run["case"], []).append(run)
    for case, runs in runs_of.items():
        good = [run for run in runs if run["status"] == "ok"]
        # A round on another host brings its own run of version 1, for its ratios alone.
        good = [run for run in good if not run.get("yardstick")] or good
        row = case._asdict() | {"status": "ok" if good else runs[-1]["status"]}
        row["reason"] = next((run["reason"] for run in runs if run["status"] != "ok"), None)
        row |= measured_row(good, reference, singles) if good else {"repeats": 0}
        checked = accuracy.get((case.configuration, case.model, case.precision), {}) if case.processes == 1 else {}
        found.append(row | {key: checked.get(key) for key in ("loss_error", "gradient_error", "worst_gradient")})
    return found


def write_csv(table, path):
    """The rows of a table; the columns are those of the most complete row."""
    columns = list(max(table, key=len))
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(table)


def number(value, pattern):
    return "-" if value is None else format(value, pattern)


# Heading, which metric it belongs to, and the cell of a measured row.
COLUMNS = [
    ("precision", "", lambda row: row["precision"]),
    ("model", "", lambda row: row["model"]),
    ("runs", "", lambda row: "graph" if row["captured"] else "eager" + "!" * row["graph"]),
    ("processes", "scaling", lambda row: str(row["processes"])),
    ("step ms", "", lambda row: f"{row['step_ms']:.3f}"),
    ("quartiles", "", lambda row: f"{row['step_p25_ms']:.3f} - {row['step_p75_ms']:.3f}"),
    ("repeats", "", lambda row: str(row["repeats"])),
    ("samples/s", "throughput", lambda row: f"{row['samples_per_second']:,.1f}"),
    ("tokens/s", "throughput", lambda row: f"{row['tokens_per_second']:,.0f}"),
    ("TFLOP/s", "throughput", lambda row: f"{row['tflops']:.2f}"),
    ("MFU", "throughput", lambda row: number(row["mfu"], ".1%")),
    ("speed", "throughput", lambda row: number(row["speed"], ".2f") + "x" * (row["speed"] is not None)),
    ("efficiency", "scaling", lambda row: number(row["efficiency"], ".1%")),
    ("peak MB", "memory", lambda row: f"{row['peak_memory_mb']:,.0f}"),
    ("trained", "", lambda row: f"{row['parameters_trained'] / row['parameters']:.0%}"),
    ("loss error", "accuracy", lambda row: number(row["loss_error"], ".1e")),
    ("gradient error", "accuracy", lambda row: number(row["gradient_error"], ".1e")),
]


def text_table(table, metrics):
    """Aligned lines for the measured rows of one configuration, and a sentence for each of the others."""
    scaled = ["scaling"] if any(row["processes"] > 1 for row in table) else []
    columns = [column for column in COLUMNS if not column[1] or column[1] in [*metrics, *scaled]]
    lines = [[heading for heading, _, _ in columns]]
    lines += [[cell(row) for _, _, cell in columns] for row in table if row["status"] == "ok"]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    left = 3
    text = [
        "  ".join([c.ljust(w) if i < left else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True))])
        for line in lines
    ]
    notes = []
    for row in table:
        together = f" x{row['processes']}" if row["processes"] > 1 else ""
        name = f"{row['precision']} {row['model']} {'graph' if row['graph'] else 'eager'}{together}"
        if row["reason"]:
            notes.append(f"{name}: {row['status'] if row['status'] != 'ok' else 'a repeat failed'}: {row['reason']}")
        elif row["graph"] and not row["captured"]:
            notes.append(f"{name}: ran operation by operation: {row['graph_reason']}")
    return "\n".join([*text, *notes])


# ---- picture

COLOURS = {"float32": "#4477aa", "tf32": "#228833", "bfloat16": "#ee6677", "float16": "#aa3377"}


def draw(table, path):
    """Bars of samples/s with their quartiles, a panel for each configuration; ImportError without matplotlib.

    On white paper of its own, so that it reads on a light and on a dark page.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels = {}
    for row in table:
        if row["status"] == "ok":
            panels.setdefault((row["preset"], row["batch_size"], row["seq_len"]), []).append(row)
    heights = [0.28 * len(panel) + 1.1 for panel in panels.values()] or [1]
    figure, axes = plt.subplots(
        len(heights), 1, figsize=(9, sum(heights)), squeeze=False, height_ratios=heights, facecolor="white"
    )
    for ax, (configuration, panel) in zip(axes[:, 0], panels.items(), strict=False):
        draw_panel(ax, configuration, panel)
    figure.tight_layout()
    figure.savefig(path, dpi=120, facecolor="white")
    plt.close(figure)


def draw_panel(ax, configuration, panel):
    preset, batch_size, seq_len = configuration
    rates = [row["samples_per_second"] for row in panel]
    low = [1000 * row["processes"] * batch_size / row["step_p75_ms"] for row in panel]
    high = [1000 * row["processes"] * batch_size / row["step_p25_ms"] for row in panel]
    spread = np.maximum(0, [np.subtract(rates, low), np.subtract(high, rates)]).tolist()
    places = range(len(panel))
    ax.barh(places, rates, xerr=spread, color=[COLOURS[row["precision"]] for row in panel], capsize=2)
    names = [
        f"{row['model']}{' x' + str(row['processes']) if row['processes'] > 1 else ''}, "
        f"{'graph' if row['captured'] else 'eager'}, {row['precision']}"
        for row in panel
    ]
    ax.set_yticks(places, names)
    ax.invert_yaxis()
    ax.set_xlim(0, 1.3 * max(high))
    ax.set_xlabel("samples/s (whiskers: quartiles; text: step in ms, times V1 in float32)")
    for place, row, end in zip(places, panel, high, strict=True):
        times = "" if row["speed"] is None else f"  {row['speed']:.2f}x"
        ax.text(end, place, f"  {row['step_ms']:.2f} ms{times}", va="center", fontsize=8)
    ax.set_title(f"{preset}: batch {batch_size}, {seq_len} tokens", loc="left")
