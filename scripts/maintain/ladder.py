"""The READMEs' measured tables, generated from a recorded run: no figure in them is typed by hand.

    python scripts/maintain/ladder.py                         # print README.md's tables of the newest recorded run
    python scripts/maintain/ladder.py --write                 # put them between the markers of all READMEs
    python scripts/maintain/ladder.py --check                 # do the READMEs say what was recorded?
    python scripts/maintain/ladder.py --picture ladder.png --recorded scripts/recorded/nvidia-h200_2026-11-22

A recorded run is a folder scripts/recorded/<device>_<date> with suite.json of benchmark_suite.py and, where kernels
were measured, kernels.json of benchmark_kernels.py. The newest run with version 1 counts. What it lacks is taken,
marked or with its date, from the newest other run of the same device that has it. The markers are
<!-- ladder:begin --> and <!-- ladder:end -->.

Exit status: 0; 1 where --check finds a difference; 2 for a bad option or a file that cannot be read.
"""

import argparse
import difflib
import functools
import json
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from common.benchmark_results import Case, draw, number, read_results, reference_steps, rows
from common.versions import REPOSITORY, SCRIPTS

RECORDED = REPOSITORY / "scripts" / "recorded"
BEGIN, END = "<!-- ladder:begin -->", "<!-- ladder:end -->"
PRECISIONS = {"float32": "fp32", "tf32": "TF32", "bfloat16": "bf16", "float16": "fp16"}
NAMES = {
    "v1": "V1",
    "v1+nodet": "V1, `--no-deterministic`",
    "v2": "V2",
    "v2+compile": "V2, torch.compile",
    "v3": "V3",
    "v4": "V4",
    "v3+peer-adamw": "V3, `--peer-adamw`",
    "v3+copies": "V3, by copies, an older way",
    "hf": "Hugging Face",
    "hf-compile": "Hugging Face, torch.compile",
    "hf-graph": "Hugging Face",
    "hf-compile-graph": "Hugging Face, torch.compile",
    "liger": "Hugging Face with Liger",
}
PRESETS = ("tiny", "small", "medium")
ADAMW_BYTES = 28  # a parameter: weight and two moments read and written, gradient read; all float32
SUPERSCRIPTS = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")
GRAPH_BY_DEFAULT = {"v1": False, "v2": False, "v3": True, "v4": True}
SPEED_GOALS = {"float32": (5.5, 1.15), "tf32": (15, 5), "bfloat16": (30, 12)}  # small, medium
KERNEL_GOALS = {"RMSNorm": 0.8, "RMSNorm + residual": 0.8, "RoPE": 0.8, "SwiGLU": 0.8}
ATTENTION_GOALS = {512: 1.0, 2048: 0.7, 8192: 0.7}
SCALING_GOALS = {2: 0.95, 4: 0.92, 8: 0.90}  # of the medium preset in bfloat16, the better of V3 and V4


def graph_by_default(model):
    return GRAPH_BY_DEFAULT.get(model.split("+")[0], model.endswith("-graph"))


class Recorded:
    """The rows of a recorded run, its machine, and the rates of its device."""

    def __init__(self, folder):
        self.folder = pathlib.Path(folder)
        results = read_results(self.folder / "suite.json")
        self.runs = [run for run in results["runs"] if run["status"] == "ok"]
        told = [session.get("arguments", {}).get("commit") for session in results["sessions"]]
        self.commits = {told[run["session"]] or run["environment"]["commit"] for run in self.runs} - {None}
        self.date = results["sessions"][-1]["date"]
        measured = [row for row in rows(results) if row["status"] == "ok"]
        self.rows = sorted((row for row in measured if row["processes"] == 1), key=self.place)
        self.scaled = [row for row in measured if row["processes"] > 1]
        if not self.rows:
            raise ValueError(f"{self.folder / 'suite.json'} holds no successful run")

    @property
    def device(self):
        return self.runs[0]["environment"]["device"]

    @functools.cached_property
    def others(self):
        """The runs beside it on a device of the same name, newest first."""
        folder = self.folder.absolute()
        paths = [path.parent for path in folder.parent.glob("*_????-??-??/suite.json") if path.parent != folder]
        runs = [run for run in map(Recorded, paths) if run.device == self.device]
        return sorted(runs, key=lambda run: run.date, reverse=True)

    def of_all_runs(self, rows_of):
        """The rows of this run, and those that it lacks of the newest other one that has them; `run` says whose."""
        found = {}
        for run in (self, *self.others):
            for row in rows_of(run):
                found.setdefault(tuple(row[name] for name in Case._fields), row | {"run": run})
        return list(found.values())

    @functools.cached_property
    def known(self):
        """The rows on one GPU, in the order of the tables."""
        return sorted(self.of_all_runs(lambda run: run.rows), key=self.place)

    @functools.cached_property
    def known_scaled(self):
        """The rows on several GPUs."""
        return sorted(self.of_all_runs(lambda run: run.scaled), key=lambda row: row["processes"])

    @functools.cached_property
    def marked(self):
        """The other runs in the order of their marks, those with rows in the tables first."""
        return sorted(self.others, key=lambda run: all(row["run"] is not run for row in self.known))

    def mark(self, run):
        """' ²' for behind a figure of the second of the other runs."""
        return "" if run is self else f" {1 + self.marked.index(run)}".translate(SUPERSCRIPTS)

    def notes(self, text):
        """A sentence that says which other runs the marks in the cells of tables mean; "" where there are none."""
        found = [run for run in self.marked if f"{self.mark(run)} |" in text]
        told = "; ".join(
            f"{self.mark(run).strip()} {run.date[:10]}, `scripts/recorded/{run.folder.name}`" for run in found
        )
        return f"Taken from other runs, with their own ratios: {told}." if told else ""

    @functools.cached_property
    def kernels(self):
        """What benchmark_kernels.py wrote, here or in the newest other run that has it; None where there is none."""
        return next(iter(self.all_kernels), None)

    @functools.cached_property
    def all_kernels(self):
        """What benchmark_kernels.py wrote in this run and in the others, in their order."""
        paths = [run.folder / "kernels.json" for run in (self, *self.others)]
        return [json.loads(path.read_text()) for path in paths if path.exists()]

    def place(self, row):
        """Where a row stands in tables and pictures: by preset, precision, eager or graph, and model."""
        preset = [*PRESETS, row["preset"]].index(row["preset"]), str(row["preset"])
        models = {model: place for place, model in enumerate(NAMES)}
        precision = list(PRECISIONS).index(row["precision"])
        return preset, precision, row["captured"], models.get(row["model"], 99), row["model"]

    def by_default(self, row):
        """Whether a row is of a model as it runs without being asked for a graph, or for none."""
        return row["graph"] == graph_by_default(row["model"])

    def row(self, preset, model, precision, graph=None):
        """The row of a model, run as it is by default or as said; None where it was not measured."""
        graph = graph_by_default(model) if graph is None else graph
        asked = (preset, model, precision, graph)
        return next((r for r in self.rows if (r["preset"], r["model"], r["precision"], r["graph"]) == asked), None)

    def floor_ms(self, row):
        """Its FLOPs at the measured rate of matrix products, and AdamW's bytes at that of a copy; None if not known.

        The rates are the highest of all runs: GPUs of one name differ, and a floor lies below all of them.
        """
        ceilings = [kernels["ceilings"] for kernels in self.all_kernels]
        rate = max((known["product"].get(row["precision"], 0) for known in ceilings), default=0)
        if not rate:
            return None
        copy = max(known["copy"] for known in ceilings)
        return row["flops_per_step"] / rate / 1e9 + ADAMW_BYTES * row["parameters"] / copy / 1e6


def newest_folder():
    """The recorded run whose last session is the newest, of those with version 1, to which all is compared."""
    found = {path.parent: read_results(path) for path in RECORDED.glob("*/suite.json")}
    dates = {folder: results["sessions"][-1]["date"] for folder, results in found.items() if reference_steps(results)}
    if not dates:
        raise ValueError(f"there is no recorded run of version 1 below {RECORDED.name}: name one with --recorded")
    return max(dates, key=dates.get)


# ---- the ladder


def markdown_table(header, lines):
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (header, ["---"] * len(header), *lines))


def machine_line(recorded):
    """Where and when it was measured, in one sentence."""
    environments = [run["environment"] for run in recorded.runs]
    first, dates = environments[0], sorted(e["date"][:10] for e in environments)
    commits = sorted(commit[:10] for commit in recorded.commits)
    backend = f"CUDA {first['cuda']}" if first["cuda"] else f"HIP {first['hip']}" if first["hip"] else "CPU"
    triton = next((e["triton"] for e in environments if e["triton"]), None)
    versions = ", ".join([f"PyTorch {first['torch']}", *([f"Triton {triton}"] if triton else []), backend])
    period = dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
    repeats = sorted({row["repeats"] for row in recorded.rows})
    count = str(repeats[0]) if len(repeats) == 1 else f"{repeats[0]} to {repeats[-1]}"
    each = "each figure is the median of the steps of one process"
    if repeats[-1] > 1:
        each = f"each figure is the median of {count} processes"
    return (
        f"{first['device']} ({versions}), {period}, {each}{', commit ' * bool(commits)}{', '.join(commits)}. Step in "
        f"ms, and in brackets how many times faster than V1 in fp32 as it runs by default, both on one GPU. All runs: "
        f"`scripts/recorded/{recorded.folder.name}`.{spread_of_version_1(recorded)}"
    )


def spread_of_version_1(recorded):
    """A sentence where version 1 took a tenth more in one run than in another: the host launches its kernels."""
    steps = {configuration: [] for configuration, _ in reference_steps({"runs": recorded.runs})}
    for run in (recorded, *recorded.others):
        for (configuration, _), ms in reference_steps({"runs": run.runs}).items():
            if configuration in steps:
                steps[configuration].append(ms)
    told = [f"{min(ms):.1f} to {max(ms):.1f} ms ({of[0]})" for of, ms in steps.items() if max(ms) > 1.1 * min(ms)]
    if not told:
        return ""
    return f" V1 took {', '.join(told)}, by host: a bracket is a ratio on one host, eager steps of two do not compare."


def step_cell(row, recorded):
    if row is None:
        return ""
    times = "" if row["speed"] is None else f" ({row['speed']:.2f}x)"
    return f"{row['step_ms']:.2f}{times}{recorded.mark(row['run'])}"


def ladder_table(recorded, configuration, rows):
    """One line for each model and way to run it, a column for each precision; memory and compute of the last one."""
    chosen = [r for r in rows if (r["preset"], r["batch_size"], r["seq_len"], r["options"]) == configuration]
    precisions = [name for name in PRECISIONS if any(r["precision"] == name for r in chosen)]
    order = {model: place for place, model in enumerate(NAMES)}
    asked_for = sorted(chosen, key=lambda r: r["graph"] == r["captured"])  # a graph that failed gives way to eager
    found = {(r["model"], r["captured"], r["precision"]): r for r in asked_for}
    ways = sorted({(r["model"], r["captured"]) for r in chosen}, key=lambda way: (order.get(way[0], 99), way))
    last = PRECISIONS[precisions[-1]]
    header = ["", "runs", *(PRECISIONS[p] for p in precisions), f"{last} peak MB", f"{last} TFLOP/s", f"{last} MFU"]
    lines = []
    for model, captured in ways:
        steps = [found.get((model, captured, precision)) for precision in precisions]
        row, more = steps[-1], ["", "", ""]
        if row:
            more = [f"{row['peak_memory_mb']:,.0f}", f"{row['tflops']:.1f}", number(row["mfu"], ".1%")]
        cells = [step_cell(step, recorded) for step in steps]
        lines.append([NAMES.get(model, model), "graph" if captured else "eager", *cells, *more])
    preset, batch_size, seq_len, options = configuration
    title = f"**{preset}**: batch {batch_size}, {seq_len} tokens {options}".rstrip()
    return f"{title}\n\n{markdown_table(header, lines)}"


def fastest(rows):
    """Of rows on several GPUs, the one of versions 3 and 4 that counts for the goal of each number of GPUs."""
    found = {}
    for row in sorted(rows, key=lambda r: r["efficiency"] or 0):
        counts = (row["preset"], row["precision"]) == ("medium", "bfloat16") and row["model"].startswith(("v3", "v4"))
        if counts:
            found[row["processes"]] = row
    return sorted(found.values(), key=lambda r: r["processes"])


def scaling_goal(row, best):
    """The efficiency of a row, and the goal beside one of the best where there is one."""
    bound = SCALING_GOALS.get(row["processes"]) if row in best else None
    return verdict(row["efficiency"], bound, ".3f") if bound else number(row["efficiency"], ".3f")


def scaling_table(recorded, chosen=list):
    """Weak scaling: this run's or the newest row of each model, the same batch on each GPU; of those the chosen."""
    best = fastest(recorded.known_scaled)
    lines = [
        [
            f"{NAMES.get(row['model'], row['model'])}, {row['preset']}, {PRECISIONS[row['precision']]}",
            "graph" if row["captured"] else "eager",
            str(row["processes"]),
            f"{row['step_ms']:.2f}",
            f"{row['samples_per_second']:,.0f}",
            scaling_goal(row, best),
            row["run"].date[:10],
        ]
        for row in chosen(recorded.known_scaled)
    ]
    header = ["several GPUs, one batch on each", "runs", "GPUs", "step ms", "samples/s", "rate of each / of one", "on"]
    return markdown_table(header, lines) if lines else None


# ---- the goals


def verdict(value, bound, pattern, least=True):
    """'31.20 (>= 30)', with a word where it was missed."""
    reached = value >= bound if least else value <= bound
    return f"{format(value, pattern)} ({'>=' if least else '<='} {bound:g}{'' if reached else ', missed'})"


def newest(recorded, figure, show=str):
    """A figure as this run or the newest other has it, the range of a number over all, and the mark of another run."""
    found = [(figure(run), run) for run in (recorded, *recorded.others)]
    found = [(value, run) for value, run in found if value is not None]
    if not found:
        return "not measured"
    (value, run), values = found[0], [value for value, _ in found]
    spread = ""
    if not isinstance(value, str) and f"{min(values):.2f}" != f"{max(values):.2f}":
        spread = f"; {min(values):.2f} to {max(values):.2f} in {len(values)} runs"
    return show(value) + spread + recorded.mark(run)


def both(recorded, preset, precision, figure):
    """[figure of V3, of V4], or None unless both were measured."""
    found = [recorded.row(preset, model, precision) for model in ("v3", "v4")]
    values = [figure(row) if row else None for row in found]
    return None if None in values else values


def speed_goal(recorded, preset, precision):
    values = both(recorded, preset, precision, lambda row: row["speed"])
    return min(values) if values else None


def peer_goal(recorded, preset):
    ours = both(recorded, preset, "bfloat16", lambda row: row["step_ms"])
    peer = recorded.row(preset, "hf-compile-graph", "bfloat16")
    return peer["step_ms"] / min(ours) if ours and peer else None


def floor_goal(recorded, preset):
    shares = both(recorded, preset, "bfloat16", lambda row: (recorded.floor_ms(row) or 0) / row["step_ms"])
    return max(shares) or None if shares else None


def memory_goal(recorded, preset):
    peaks = both(recorded, preset, "bfloat16", lambda row: row["peak_memory_mb"])
    first = recorded.row(preset, "v1", "float32")
    return max(peaks) / first["peak_memory_mb"] if peaks and first else None


def reported_speeds(recorded, preset, model, precisions):
    """'1.09x fp32, 5.53x bf16' against V1 in float32."""
    found = [(PRECISIONS[p], recorded.row(preset, model, p, graph=False)) for p in precisions]
    return ", ".join(f"{row['speed']:.2f}x {name}" for name, row in found if row and row["speed"]) or None


def graph_gains(recorded, preset, precision):
    """'V1 3.10x, V2 2.95x': the step launched operation by operation over the step in a graph."""
    gains = []
    for model in ("v1", "v1+nodet", "v2", "v2+compile", "v3", "v4"):
        eager = recorded.row(preset, model, precision, graph=False)
        graph = recorded.row(preset, model, precision, graph=True)
        if eager and graph and graph["captured"]:
            gains.append(f"{NAMES[model]} {eager['step_ms'] / graph['step_ms']:.2f}x")
    return ", ".join(gains) or None


def goals_table(recorded):
    """The goals of the steps of the presets small and medium, with what was reached."""
    presets = ("small", "medium")

    def line(name, figure, bounds=None):
        cells = []
        for i, preset in enumerate(presets):
            show = functools.partial(verdict, bound=bounds[i], pattern=".2f") if bounds else str
            cells.append(newest(recorded, lambda run, preset=preset: figure(run, preset), show))
        return [name, *cells]

    lines = [
        line(
            f"V3 and V4, {PRECISIONS[precision]}: the slower, against V1 fp32",
            functools.partial(speed_goal, precision=precision),
            bounds,
        )
        for precision, bounds in SPEED_GOALS.items()
    ]
    lines.append(line("best of V3 and V4, bf16, against Hugging Face, torch.compile, graph", peer_goal, (1.5, 1.3)))
    lines.append(line("best of V3 and V4, bf16: share of the floor", floor_goal, (0.33, 0.68)))
    memory = newest(recorded, lambda run: memory_goal(run, "medium"), lambda value: verdict(value, 0.4, ".2f", False))
    lines.append(["V3 and V4, bf16: the larger peak memory, against V1 fp32", "", memory])
    for name, model in (("V2 with torch.compile, eager", "v2+compile"), ("V1 with `--no-deterministic`", "v1+nodet")):
        figure = functools.partial(reported_speeds, model=model, precisions=("float32", "bfloat16"))
        lines.append(line(f"{name}, against V1 fp32", figure))
    for precision in ("float32", "bfloat16"):
        figure = functools.partial(graph_gains, precision=precision)
        lines.append(line(f"eager step / step in a graph, {PRECISIONS[precision]}", figure))
    measured = [line for line in lines if set(line[1:]) - {"not measured", ""}]
    left_out = len(lines) - len(measured)
    note = f"\n\n{left_out} goals have not been measured yet." if left_out else ""
    return markdown_table(["goal", *presets], measured) + note


def kernel_goal(name):
    """(the figure that counts, the least it should be) of version 3's kernel for that operation, or None."""
    for kernel, bound in KERNEL_GOALS.items():
        if name in (f"{kernel} forward", f"{kernel} backward"):
            return "share", bound
    return None


def attention_goal(size):
    return next((bound for tokens, bound in ATTENTION_GOALS.items() if f" {tokens} tokens" in size), None)


def kernels_table(kernels):
    """Each of version 3's kernels beside the ceiling and the fastest of PyTorch's operators."""
    lines = []
    for record in kernels["operations"]:
        ours = next((c for c in record["candidates"] if c["name"] == "V3" and "us" in c), None)
        if ours is None:
            continue
        others = [c for c in record["candidates"] if c["name"] != "V3" and "us" in c]
        best = min(others, key=lambda c: c["us"]["median"], default=None)
        share, times = f"{ours['share']:.0%}", "" if best is None else f"{ours['against_pytorch']:.2f}"
        goal = kernel_goal(record["operation"])
        if goal:
            share = verdict(ours["share"], goal[1], ".2f")
        elif record["operation"].startswith("attention") and best:
            bound = attention_goal(record["size"])
            times = verdict(ours["against_pytorch"], bound, ".2f") if bound else times
        rate = f"{ours['rate']:,.0f} {record['unit']}"
        name = f"{record['operation']}, {record['size']}"
        lines.append([name, f"{ours['us']['median']:.1f}", rate, share, best["name"] if best else "", times])
    header = ["V3's kernel", "us", "rate", "share of the ceiling", "fastest of PyTorch's", "its time / V3's"]
    return markdown_table(header, lines)


def kernels_text(kernels):
    products = ", ".join(f"{PRECISIONS[p]} {rate:.0f}" for p, rate in kernels["ceilings"]["product"].items())
    environment = kernels["environment"]
    return (
        f"Ceilings of this {environment['device']}, {environment['date'][:10]}: copy "
        f"{kernels['ceilings']['copy']:,.0f} GB/s (read and written), 8192³ products {products} TFLOP/s. Kernels in "
        f"{PRECISIONS[kernels['dtype']]}, alone:\n\n"
        f"{kernels_table(kernels)}"
    )


def steps_text(recorded, rows, scaled=list):
    """The machine, the given rows, the goals, and several GPUs with the rows that scaled chooses."""
    configurations = dict.fromkeys((r["preset"], r["batch_size"], r["seq_len"], r["options"]) for r in rows)
    tables = [*(ladder_table(recorded, c, rows) for c in configurations), goals_table(recorded)]
    notes = recorded.notes("\n".join(tables))
    return "\n\n".join(filter(None, [machine_line(recorded), *tables, notes, scaling_table(recorded, scaled)]))


def readme_markdown(recorded):
    """Everything between the markers of README.md: the versions and the strongest peer, as they run by default."""
    weaker = ("hf", "hf-compile", "hf-graph")
    shown = [row for row in recorded.known if recorded.by_default(row) and row["model"] not in weaker]
    return steps_text(recorded, shown, fastest)


def markdown(recorded):
    """All that was recorded."""
    kernels = [kernels_text(recorded.kernels)] if recorded.kernels else []
    return "\n\n".join([steps_text(recorded, recorded.known), *kernels])


def version_markdown(recorded, model):
    """Everything between the markers of a version's README: its own runs, beside version 1's default."""
    chosen = [row for row in recorded.known if row["model"].split("+")[0] == model]
    lines = []
    for row in chosen:
        phases = [row[name] for name in ("forward_ms", "backward_ms", "optimizer_ms")]
        lines.append(
            [
                f"{row['preset']}, {PRECISIONS[row['precision']]}",
                NAMES.get(row["model"], row["model"]),
                "graph" if row["captured"] else "eager",
                step_cell(row, recorded),
                "" if None in phases else " / ".join(f"{phase:.2f}" for phase in phases),
                f"{row['samples_per_second']:,.0f}",
                f"{row['peak_memory_mb']:,.0f}",
                number(row["mfu"], ".1%"),
            ]
        )
    header = ["", "", "runs", "step ms", "forward / backward / optimizer ms", "samples/s", "peak MB", "MFU"]
    if not lines:
        return f"The recorded run, `scripts/recorded/{recorded.folder.name}`, has no row of this version yet."
    kernels = [kernels_text(recorded.kernels)] if model == "v3" and recorded.kernels else []
    table = markdown_table(header, lines)
    return "\n\n".join(filter(None, [machine_line(recorded), table, recorded.notes(table), *kernels]))


# ---- the READMEs


def pages(recorded, readme=None):
    """(path, what is to stand between its markers) of every page, or of one that takes README.md's place."""
    if readme:
        return [(readme, readme_markdown(recorded))]
    of_versions = [
        (script.parent / "README.md", version_markdown(recorded, f"v{version}")) for version, script in SCRIPTS.items()
    ]
    return [(REPOSITORY / "README.md", readme_markdown(recorded)), *of_versions]


def split_readme(path):
    """(text up to and with the first marker, between the markers, the second marker and the rest)."""
    text = path.read_text()
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise ValueError(f"{path} needs one line {BEGIN} and, further down, one line {END}")
    start, end = text.index(BEGIN) + len(BEGIN), text.index(END)
    return text[:start], text[start:end], text[end:]


def check(path, wanted):
    """0 where the page says what was recorded, else 1 with the difference."""
    _, found, _ = split_readme(path)
    if found.strip() == wanted.strip():
        print(f"{path} agrees with the recorded run")
        return 0
    difference = difflib.unified_diff(
        found.strip().splitlines(), wanted.splitlines(), str(path), "recorded", n=0, lineterm=""
    )
    print("\n".join(difference))
    print(f"{path} disagrees with the recorded run: python scripts/maintain/ladder.py --write", file=sys.stderr)
    return 1


def draw_ladder(recorded, path):
    """The versions and the strongest peer, each as it runs by default."""
    chosen = ("v1", "v2", "v2+compile", "v3", "v4", "hf-compile-graph")
    shown = [
        r for r in recorded.rows if r["model"] in chosen and r is recorded.row(r["preset"], r["model"], r["precision"])
    ]
    try:
        draw(shown or recorded.rows, path)
    except ImportError:
        raise ValueError("--picture needs matplotlib: pip install '.[plots]'") from None


def parse_arguments(argv):
    class Parser(argparse.ArgumentParser):
        def error(self, message):
            self.exit(2, f"{self.prog}: error: {message}\n")

    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, prog="ladder.py")
    parser.add_argument("--recorded", type=pathlib.Path, metavar="FOLDER", help="which recorded run (the newest)")
    parser.add_argument(
        "--readme", type=pathlib.Path, metavar="FILE", help="one page instead of all, with README.md's tables"
    )
    parser.add_argument("--write", action="store_true", help="put the tables into the READMEs")
    parser.add_argument("--check", action="store_true", help="compare the READMEs with them")
    parser.add_argument("--picture", type=pathlib.Path, metavar="PNG", help="draw the ladder")
    return parser.parse_args(argv)


def main(argv=None):
    arguments = parse_arguments(argv)
    try:
        recorded = Recorded(arguments.recorded or newest_folder())
        if arguments.picture:
            draw_ladder(recorded, arguments.picture)
        for path, text in pages(recorded, arguments.readme) if arguments.write else []:
            before, _, after = split_readme(path)
            path.write_text(f"{before}\n{text}\n{after}")
        if arguments.check:
            return max([check(path, text) for path, text in pages(recorded, arguments.readme)])
        if not (arguments.write or arguments.picture):
            print(markdown(recorded))
    except ValueError as error:
        print(f"ladder.py: error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"ladder.py: error: {error.filename} cannot be read or written: {error.strerror}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
