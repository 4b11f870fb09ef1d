"""Generate the counted tables of TINY_LLAMA_ARCHITECTURE.md: formulas, and numbers for the presets.

    python scripts/maintain/counted_tables.py                # does the page say what common/formulas/counts.py counts?
    python scripts/maintain/counted_tables.py --write        # put the tables into the page

Exit status: 0; 1 if the page differs; 2 for a bad option.
"""

import itertools
import pathlib
import sys
from collections import defaultdict

import sympy

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from common.command_line import PRESETS, SHORT_PRECISIONS, Parser
from common.formulas import counts, gpus
from common.formulas.counts import PARTS, Part, Sizes, both_phases, of_step, step_counts, total
from common.formulas.gpus import gpu_named
from common.tables import markdown_table
from common.versions import REPOSITORY
from maintain.pages import fill, write_or_check
from maintain.provenance import machine_line
from maintain.records import newest_record
from model_counts import GPUS, sizes_of_options

PAGE = REPOSITORY / "TINY_LLAMA_ARCHITECTURE.md"
COUNTED = {1: "V1", 2: "V2", 3: "V3"}
LETTERS = sympy.symbols("B T C H K D F V L")  # in the order of the page


def preset_sizes(preset):
    return sizes_of_options(["--preset", preset])


# ---------------------------------------------------------------- the page's formulas


def formula(value):
    """Return a polynomial in the letters for a page, highest powers first; nothing for zero."""
    terms = []
    for powers, factor in sympy.Poly(value, *LETTERS).terms(order="grlex") if value != 0 else []:
        letters = [f"{x}^{{{n}}}" if n > 1 else f"{x}" for x, n in zip(LETTERS, powers, strict=True) if n]
        terms.append("".join(letters if factor == 1 and letters else [str(factor), *letters]))
    return f"${' + '.join(terms)}$" if terms else ""


def presets_compared(names, function, unit, pattern, more=()):
    """Return the formulas of function(sizes), {part: (of each layer, once)}, and its numbers for every preset."""
    sizes = [preset_sizes(preset) for preset in PRESETS]
    numbers = [{part: of_step(pair, s) / unit for part, pair in function(s).items()} for s in sizes]
    rows = [
        [part, *map(formula, pair), *(format(found[part], pattern) for found in numbers)]
        for part, pair in function(Sizes(*LETTERS)).items()
    ]
    rows.append(["**all**", "", "", *(f"**{sum(found.values()):{pattern}}**" for found in numbers)])
    return markdown_table([*names, *(f"`{preset}`" for preset in PRESETS)], [*rows, *more])


def flops_table():
    """Return what the model needs: matmuls forward, backward twice that, and everything else for comparison."""
    others = [sum(map(sum, counts.operations(preset_sizes(preset)).values())) for preset in PRESETS]
    more = ["everything else, operations", "", "", *(f"{n / 1e9:,.2f}" for n in others)]
    names = ["GFLOP of a step", "forward, each layer", "forward, once"]
    return presets_compared(names, counts.forward_flops, 1e9 / 3, ",.2f", [more])


def formulas_compared(quantity):
    """Return quantity(Part) as formulas of a layer, or of what comes once, for versions 1 and 3 in fp32."""
    found = [counts.parts(version, "float32", Sizes(*LETTERS)) for version in (1, 3)]
    rows = []
    for part in PARTS[:-1]:  # AdamW's bytes are a number per parameter
        pairs = [[formula(quantity(place.get(part, Part()))) for place in places] for places in found]
        cells = [(" a layer; " if all(pair) else "").join(pair) for pair in pairs]
        if any(cells):
            rows.append([part, *cells])
    return markdown_table(["part", "V1", "V3"], rows, left=3)


# ---------------------------------------------------------------- the page's numbers


def steps_of(preset, precision):
    """Return the counts of every version's step."""
    return [step_counts(version, precision, preset_sizes(preset)) for version in COUNTED]


def launches_table():
    """Return forward + backward of a layer for each version, what comes once, and whole steps."""
    found = [counts.parts(version, "float32", preset_sizes("small")) for version in COUNTED]
    rows = []
    for where, places in zip(("in each layer", "once"), zip(*found, strict=True), strict=True):
        for part in [part for part in PARTS if part in places[0]]:
            cells = [f"{len(place[part].forward)} + {len(place[part].backward)}" for place in places]
            rows.append([f"{part}, {where}", *cells])
    for preset, precision in itertools.product(PRESETS, ("float32", "bfloat16")):
        sums = [f"**{total(step, 'launches'):,}**" for step in steps_of(preset, precision)]
        rows.append([f"**step of `{preset}`, {SHORT_PRECISIONS[precision]}**", *sums])
    return markdown_table(["launches, forward + backward", *COUNTED.values()], rows)


def step_table(quantity, unit, name):
    """Return the numbers of one step by part for each version, and the sums for all presets and precisions."""
    rows = []
    steps = [both_phases(step, quantity) for step in steps_of("small", "float32")]
    for part in PARTS:
        if any(step[part] for step in steps):
            rows.append([part, *(f"{step[part] / unit:,.1f}" for step in steps)])
    for preset, precision in itertools.product(PRESETS, ("float32", "bfloat16")):
        sums = [total(step, quantity) / unit for step in steps_of(preset, precision)]
        rows.append([f"**step of `{preset}`, {SHORT_PRECISIONS[precision]}**", *(f"**{n:,.0f}**" for n in sums)])
    return markdown_table([f"{name}, `small`, fp32", *COUNTED.values()], rows)


def peaks_table():
    """Return each GPU's peaks, its bandwidth, and the FLOPs per byte at which the two take equally long."""
    rows = []
    for gpu in GPUS:
        peaks = [gpus.peak_tflops(gpu, precision) for precision in ("float32", "tf32", "bfloat16")]
        bandwidth = gpus.GPUS[gpu].tb_s
        ridges = ["" if peak is None else f"{peak / bandwidth:.0f}" for peak in peaks]
        rows.append([gpu, *("" if peak is None else f"{peak:,.1f}" for peak in peaks), f"{bandwidth:.3f}", *ridges])
    header = ["GPU", "fp32 TFLOP/s", "TF32", "bf16", "TB/s", "ridge FLOP/B, fp32", "TF32", "bf16"]
    return markdown_table(header, rows)


def roofline_table(version, precision, preset):
    """Return work and shortest time of every part on each GPU, bold where compute is the limit."""
    step = step_counts(version, precision, preset_sizes(preset))
    rows = []
    times = [counts.rooflines(step, gpu, precision) for gpu in GPUS]
    work = counts.intensity(step)
    for part in PARTS:
        shown = [f"**{us:,.0f}**" if bound == "compute" else f"{us:,.0f}" for us, bound in (t[part] for t in times)]
        row = work[part]
        cells = [f"{row['flops'] / 1e9:,.2f}", f"{row['bytes'] / 1e6:,.0f}", f"{row['flop_per_byte']:,.1f}"]
        rows.append([part, *cells, *shown])
    sums = [f"{1e3 * counts.shortest_step_ms(step, gpu, precision):,.0f}" for gpu in GPUS]
    rows.append(["all, one after the other", "", "", "", *sums])
    header = [f"V{version}, `{preset}`, {SHORT_PRECISIONS[precision]}", "GFLOP", "MB", "FLOP/B"]
    return markdown_table([*header, *(f"{gpu}, us" for gpu in GPUS)], rows)


def shortest_table():
    """Return the shortest possible step of every version: its FLOPs and bytes at the peaks, launches for nothing."""
    rows = []
    for preset, precision, gpu in itertools.product(("small", "medium"), ("float32", "bfloat16"), GPUS):
        times = [f"{counts.shortest_step_ms(step, gpu, precision):,.2f}" for step in steps_of(preset, precision)]
        rows.append([f"`{preset}`, {SHORT_PRECISIONS[precision]}, {gpu}", *times])
    return markdown_table(["shortest step, ms", *COUNTED.values()], rows)


def predicted_and_measured(row, record, sizes):
    """Return the cells of a recorded step: what its counts predict, and the measurement."""
    version = int(row["model"][1:])
    precision = row["precision"]
    gpu = gpu_named(record["device"])
    step = step_counts(version, precision, sizes)
    launches = total(step, "launches")
    moved = total(step, "bytes") / 1e6
    # Bytes of a weight and two moments, and of version 3's float16 copy; its bfloat16 copy is a part of the weight.
    held = 14 if (version, precision) == (3, "float16") else 12
    least = held * counts.parameter_count(sizes) + total(step, "saved")
    shortest = f"{counts.shortest_step_ms(step, gpu, precision):.2f}" if gpu else ""
    title = f"V{version}&nbsp;{SHORT_PRECISIONS[precision]}&nbsp;{'graph' if row['captured'] else 'eager'}"
    counted = [f"{launches:,}", f"{moved:,.0f}", shortest, f"{least / 2**20:,.0f}"]
    measured = [f"{row['step_ms']:.2f}", f"{1e3 * row['step_ms'] / launches:.1f}", f"{row['peak_memory_mb']:,.0f}"]
    return [title, *counted, *measured]


def measured_tables(recorded):
    """Return the recorded steps of the counted versions, one table per configuration."""
    tables = defaultdict(list)
    record = recorded.suite()["record"]
    for row in recorded.suite()["rows"]:
        counted = row["model"].upper() in COUNTED.values() and row["precision"] in counts.ELEMENT_BYTES
        if counted and not row["options"]:
            tables[row["preset"], row["batch_size"], row["seq_len"]].append(row)
    texts = [f"Measured on {machine_line(record)}; `scripts/recorded/{recorded.folder.name}`."]
    for (preset, batch_size, seq_len), chosen in tables.items():
        sizes = sizes_of_options(["--preset", preset, "--batch-size", str(batch_size), "--seq-len", str(seq_len)])
        header = [f"`{preset}`", "launches", "MB", "least ms", "least MiB", "step ms", "us/launch", "peak MiB"]
        texts.append(markdown_table(header, [predicted_and_measured(row, record, sizes) for row in chosen]))
    return "\n\n".join(texts)


# ---------------------------------------------------------------- the command


def page_tables():
    """Return {name of the markers in the page: table}."""
    presets = [[f"`{preset}`", *preset_sizes(preset)] for preset in PRESETS]
    tables = {
        "presets": markdown_table(["preset", *(f"${x}$" for x in LETTERS)], presets),
        "parameters": presets_compared(["part", "in each layer", "once"], counts.parameters, 1, ",.0f"),
        "flops": flops_table(),
        "launches": launches_table(),
        "bytes": formulas_compared(lambda part: sum(part.forward) + sum(part.backward)),
        "bytes-of-a-step": step_table("bytes", 1e6, "MB"),
        "saved": formulas_compared(lambda part: part.saved),
        "saved-of-a-step": step_table("saved", 2**20, "MiB"),
        "peaks": peaks_table(),
        "roofline": roofline_table(1, "float32", "small") + "\n\n" + roofline_table(3, "bfloat16", "medium"),
        "shortest": shortest_table(),
        "measured": measured_tables(newest_record()),
    }
    return {f"counts-{name}": table for name, table in tables.items()}


def work(options):
    text = fill(PAGE.read_text(encoding="utf-8"), page_tables())
    return write_or_check({PAGE: text}, not options.write, "python scripts/maintain/counted_tables.py --write")


def main(argv=None):
    parser = Parser("counted_tables.py", __doc__, with_json=False)
    parser.add_argument("--write", action="store_true", help=f"put the tables into {PAGE.name}")
    return parser.run(work, argv)


if __name__ == "__main__":
    sys.exit(main())
