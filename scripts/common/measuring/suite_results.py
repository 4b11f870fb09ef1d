"""Read and write the results of benchmark_suite.py, and compute the rows of its tables.

A results file suite.json holds one "record" (command, commit, machine, versions of packages), "runs" (one process each:
case, repeat, status, summary) and "accuracy" (one comparison with version 1 each). rows() turns it into one row per
case.
"""

import json
from typing import NamedTuple

import numpy as np

from common.command_line import PRESETS, SHORT_PRECISIONS
from common.files import errors_of, read_object
from common.ratios import check_times, gain, median
from common.tables import known, rounded, write_whole
from common.versions import REPOSITORY, SCRIPTS

PHASES = ("forward_ms", "backward_ms", "optimizer_ms")
SCRIPT_OF = {f"v{version}": path for version, path in SCRIPTS.items()}
SCRIPT_OF |= dict.fromkeys(("hf", "liger"), REPOSITORY / "scripts" / "common" / "measuring" / "peers.py")
MODELS = {
    "v1": "V1",
    "v1+nodet": "V1, `--no-deterministic`",
    "v2": "V2",
    "v2+compile": "V2, torch.compile",
    "v3": "V3",
    "v3+fsdp": "V3, `--parallel fsdp`",
    "v4": "V4",
    "hf": "Hugging Face",
    "hf+compile": "Hugging Face, torch.compile",
    "hf+compile+packed": "Hugging Face, torch.compile, packed, 16-bit weights",
    "hf+compile+fsdp": "Hugging Face, torch.compile, `--parallel fsdp`",
    "liger": "Hugging Face with Liger",
    "liger+compile": "Hugging Face with Liger, torch.compile",
}


class Case(NamedTuple):
    """Name what one run measures. options: further options of the training script, as one string.

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
    def script(self):
        return SCRIPT_OF[self.model.split("+")[0]]

    @property
    def gradients(self):
        """Return what two cases with the same gradients share."""
        return self.configuration, self.model, self.precision

    @property
    def configuration(self):
        """Return what two cases must share to be compared."""
        return self.preset, self.batch_size, self.seq_len, self.options

    def __str__(self):
        way = "graph" if self.graph else "eager"
        together = f" x{self.processes}" if self.processes > 1 else ""
        return f"{self.preset} b{self.batch_size} t{self.seq_len} {self.precision} {self.model} {way}{together}"


# ---------------------------------------------------------------- results files


def read_results(path):
    """Return the contents of a results file; Failure with one sentence where it is none."""
    with errors_of(path):
        results = read_object(path, "results file")
        for entry in [*results["runs"], *results["accuracy"]]:
            entry["case"] = Case(**entry["case"])
        for run in results["runs"]:
            check_times(run.get("steps_ms", []))
        table = rows(results)  # raises an error where something that the tables show is missing or of another kind
        table_of(table, METRICS)
        notes_of(table)
    return results


def write_results(results, path):
    """Write the file whole or not at all, with one line per run."""
    parts = [f'"record": {json.dumps(results["record"])}']
    for kind in ("runs", "accuracy"):
        lines = [json.dumps(entry | {"case": entry["case"]._asdict()}) for entry in results[kind]]
        parts.append(f'"{kind}": [\n' + ",\n".join(lines) + "\n]")
    write_whole(path, "{\n" + ",\n".join(parts) + "\n}\n")


# ---------------------------------------------------------------- rows


def step_of(run):
    return run["summary"]["step_ms"]["median"]


def rounds_of(case, good):
    """Return {round: median step in ms} of the runs of a case."""
    return {run["repeat"]: step_of(run) for run in good if run["case"] == case and run["status"] == "ok"}


def ratios_between(case, base, good):
    """Return the Gain of a case over another from the rounds that have both; None without such a round."""
    times = rounds_of(case, good)
    before = rounds_of(base, good)
    both = sorted(times.keys() & before.keys())
    return gain([before[i] for i in both], [times[i] for i in both]) if both else None


def efficiency(case, good):
    """Return weak scaling, throughput per process over that of one process alone, as a Gain; None for one process."""
    single = case._replace(model=case.model.replace("+fsdp", ""), processes=1)
    return ratios_between(case, single, good) if case.processes > 1 else None


def of_one_machine(runs, host):
    """Return the runs of the record's machine; those of another only where it has none.

    Rounds on two machines have two medians, and what lies between them is the step of neither.
    """
    return [run for run in runs if run.get("host") == host] or runs


def measured_row(runs, good):
    """Return the numbers of one case from its runs, among all runs that went well."""
    summaries = [run["summary"] for run in runs]
    case = runs[0]["case"]
    steps = [step for run in runs for step in run["steps_ms"]]
    low, step, high = (float(value) for value in np.percentile(steps, [25, 50, 75]))
    return {
        "repeats": len(runs),
        "step_ms": step,
        "step_p25_ms": low,
        "step_p75_ms": high,
        **{name: median(summary[name] for summary in summaries) for name in PHASES},
        "samples_per_second": 1000 * case.processes * case.batch_size / step,
        "tflops": summaries[0]["flops_per_step"] / step / 1e9,
        "efficiency": efficiency(case, good),
        "peak_memory_mb": max(summary["peak_memory_mb"] for summary in summaries),
        "parameters": summaries[0]["parameters"],
        "parameters_trained": min(summary["parameters_trained"] for summary in summaries),
        "captured": all(summary["graph"]["captured"] for summary in summaries),
        "graph_reason": next((s["graph"]["reason"] for s in summaries if not s["graph"]["captured"]), None),
    }


def rows(results):
    """Return one flat dictionary per case in the order of the tables: its numbers, or why there are none.

    Times in ms, memory in MiB of the process that needs most. The gradients' error is relative to version 1 in float32.
    status: ok, failed, or not available.
    """
    good = [run for run in results["runs"] if run["status"] == "ok"]
    errors = {entry["case"].gradients: entry["gradient_error"] for entry in results["accuracy"]}
    found = []
    for case in dict.fromkeys(run["case"] for run in results["runs"]):
        ran = [run for run in good if run["case"] == case]
        bad = [run for run in results["runs"] if run["case"] == case and run["status"] != "ok"]
        row = case._asdict() | {"case": case, "status": "ok" if ran else bad[-1]["status"]}
        here = of_one_machine(ran, results["record"].get("host"))
        row |= measured_row(here, good) if here else {"repeats": 0}
        row["reason"] = bad[0]["reason"] if bad else None
        found.append(row | {"gradient_error": errors.get(case.gradients) if case.processes == 1 else None})
    return sorted(found, key=place)


def place(row):
    """Return where a row stands in tables and pictures: by preset and sizes, model, precision, processes."""
    preset = PRESETS.index(row["preset"])
    models = [*MODELS, row["model"]]  # others come last
    way = row["model"], list(SHORT_PRECISIONS).index(row["precision"]), row["processes"], row["graph"]
    return preset, row["case"].configuration, models.index(row["model"]), way


def configurations(table):
    """Return {title of a configuration: its rows}."""
    found = {}
    for row in table:
        title = "{preset}: batch {batch_size}, {seq_len} tokens {options}".format(**row).rstrip()
        found.setdefault(title, []).append(row)
    return found


# ---------------------------------------------------------------- tables


def percent_range(found):
    """Return a ratio in percent with its smallest and largest round: "91.3 % (90.8 to 91.8)"."""
    if found is None:
        return "-"
    return f"{100 * found.ratio:.1f} % ({100 * found.low:.1f} to {100 * found.high:.1f})"


# Heading, the metric it belongs to, and the cell of a measured row.
COLUMNS = [
    ("", "", lambda row: MODELS.get(row["model"], row["model"])),
    ("precision", "", lambda row: SHORT_PRECISIONS[row["precision"]]),
    ("runs", "", lambda row: "graph" if row["captured"] else "eager"),
    ("processes", "scaling", lambda row: str(row["processes"])),
    ("step ms", "", lambda row: rounded(row["step_ms"], 4)),
    ("quartiles", "", lambda row: f"{rounded(row['step_p25_ms'], 4)} to {rounded(row['step_p75_ms'], 4)}"),
    ("samples/s", "throughput", lambda row: f"{row['samples_per_second']:,.0f}"),
    ("TFLOP/s", "throughput", lambda row: f"{row['tflops']:.1f}"),
    ("efficiency", "scaling", lambda row: percent_range(row["efficiency"])),
    ("peak MiB", "memory", lambda row: f"{row['peak_memory_mb']:,.0f}"),
    ("gradient error", "accuracy", lambda row: known(row["gradient_error"], ".1e")),
]


METRICS = list(dict.fromkeys(metric for _, metric, _ in COLUMNS if metric))


def table_of(table, metrics):
    """Return header and cells of the measured rows, with the columns of these metrics."""
    wanted = ["", *metrics, *(["scaling"] if any(row["processes"] > 1 for row in table) else [])]
    columns = {heading: cell for heading, metric, cell in COLUMNS if metric in wanted}
    return list(columns), [[cell(row) for cell in columns.values()] for row in table if row["status"] == "ok"]


def notes_of(table):
    """Return a sentence for each row that failed, ran eagerly against its wish, or did not train all parameters."""
    notes = []
    for row in table:
        name = row["case"]
        if row["reason"]:
            notes.append(f"{name}: {row['status'] if row['status'] != 'ok' else 'a repeat failed'}: {row['reason']}")
        elif row["graph"] and not row["captured"]:
            notes.append(f"{name}: ran eagerly: {row['graph_reason']}")
        if row["repeats"] and row["parameters_trained"] != row["parameters"]:
            notes.append(f"{name}: trains {row['parameters_trained']:,} of {row['parameters']:,} parameters")
    return notes
