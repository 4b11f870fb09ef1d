#!/usr/bin/env python3
"""Print parameters, FLOPs, bytes, launches and saved activations of every part of a training step.

    python scripts/model_counts.py --preset small --version 3 --precision bfloat16
    python scripts/model_counts.py --version 1 --seq-len 1024 --json counts.json
    python scripts/model_counts.py --write                    # put the tables into TINY_LLAMA_ARCHITECTURE.md
    python scripts/model_counts.py --check                    # compare that page with them

The formulas stand in common/counts.py, which also says what each quantity counts.

Exit status: 0; 1 if --check finds a difference; 2 for a bad option or a file that cannot be read or written.
"""

import itertools
import pathlib
import sys
from collections import defaultdict

import sympy

from common import counts
from common.command_line import Failure, Parser, add_version_option, run_tool, version_meant
from common.counts import PARTS, PHASES, QUANTITIES, Part, Sizes, both_phases, step_counts, total
from common.pages import fill, write_or_check
from common.provenance import machine_line
from common.records import PRECISIONS, Record, newest_record
from common.tables import emit, markdown_table, text_table
from common.versions import REPOSITORY, SCRIPTS, load_version

PAGE = REPOSITORY / "TINY_LLAMA_ARCHITECTURE.md"
PRESETS = ("tiny", "small", "medium")
VERSIONS = [f"V{version}" for version in SCRIPTS]
GPUS = ("MI300X", "H200", "MI250X")  # in the tables; --json has all that are known

# ---------------------------------------------------------------- formulas as text

LETTERS = sympy.symbols("B T C H K D F V L")  # in the order of the page


def letters(sizes):
    """Return sizes whose values are their letters: with them the functions of counts.py return formulas."""

    class Letters(Sizes):
        one_hot = sizes.one_hot

    return Letters(*LETTERS)


def formula(value, power="^{}"):
    """Return a polynomial in the letters, highest powers first: 4BTC + 2BT^2H; nothing for zero."""
    found = []
    for powers, factor in sympy.Poly(value, *LETTERS).terms(order="grlex") if value != 0 else []:
        name = "".join(f"{x}{power.format(n) if n > 1 else ''}" for x, n in zip(LETTERS, powers, strict=True) if n)
        found.append(name if factor == 1 and name else f"{factor}{name}")
    return " + ".join(found)


def part_formulas(version, precision, sizes):
    """Return {part: {phase: {"layer" or "once": {quantity: formula}}}}."""
    s = letters(sizes)
    flops = counts.flops_done(version, s)
    pieces = {"layer": counts.parts_of_layer(version, precision, s), "once": counts.parts_once(version, precision, s)}
    found = {part: {phase: {} for phase in PHASES} for part in PARTS}
    for part, phase, (i, (where, parts)) in itertools.product(PARTS, PHASES, enumerate(pieces.items())):
        piece = parts.get(part, Part())
        launches = getattr(piece, phase)
        values = {
            "flops": flops.get(part, {}).get(phase, (0, 0))[i],
            "bytes": sum(launches),
            "launches": len(launches),
            "saved": piece.saved if phase == "forward" else 0,
        }
        if any(value != 0 for value in values.values()):
            found[part][phase][where] = {quantity: value for quantity, value in values.items() if value != 0}
    return found


# ---------------------------------------------------------------- the page's tables


def sizes_of_options(argv):
    """Return the sizes that a training script's options choose; every version has the same ones."""
    return counts.sizes_of(load_version(1).parse_options([*argv, "--device", "cpu"]))


def preset_sizes(preset):
    return sizes_of_options(["--preset", preset])


def steps_of(preset, precision):
    """Return the counts of every version's step."""
    return [step_counts(version, precision, preset_sizes(preset)) for version in SCRIPTS]


def math(value):
    return f"${formula(value, '^{{{}}}')}$" if value != 0 else ""


def presets_table():
    rows = [[f"`{preset}`", *preset_sizes(preset)] for preset in PRESETS]
    return markdown_table(["preset", *(f"${letter}$" for letter in LETTERS)], rows)


def parameter_table():
    sizes = [preset_sizes(preset) for preset in PRESETS]
    tables, rows = [counts.parameters(s) for s in sizes], []
    for part, (layer, once) in counts.parameters(letters(sizes[0])).items():
        cells = [f"{s.L * table[part][0] + table[part][1]:,}" for s, table in zip(sizes, tables, strict=True)]
        rows.append([part, math(layer), math(once), *cells])
    rows.append(["**all**", "", "", *(f"**{counts.parameter_count(s):,}**" for s in sizes)])
    return markdown_table(["part", "in each layer", "once", *(f"`{preset}`" for preset in PRESETS)], rows)


def flops_table():
    """Return what the model needs: matmuls forward, backward twice that, and everything else for comparison."""
    sizes = [preset_sizes(preset) for preset in PRESETS]
    required, rows = [counts.required_flops(s) for s in sizes], []
    for part, (layer, once) in counts.forward_flops(letters(sizes[0])).items():
        rows.append([part, math(layer), math(once), *(f"{flops[part] / 1e9:,.2f}" for flops in required)])
    rows.append(["**all**", "", "", *(f"**{sum(flops.values()) / 1e9:,.2f}**" for flops in required)])
    others = [sum(map(sum, counts.operations(s).values())) for s in sizes]
    rows.append(["everything else, operations", "", "", *(f"{n / 1e9:,.2f}" for n in others)])
    return markdown_table(
        ["GFLOP of a step", "forward, each layer", "forward, once", *(f"`{preset}`" for preset in PRESETS)], rows
    )


def launches_table():
    """Return forward + backward of a layer for each version, what comes once, and whole steps."""
    s, rows = preset_sizes("small"), []
    functions = {"in each layer": counts.parts_of_layer, "once": counts.parts_once}
    for where, function in functions.items():
        found = [function(version, "float32", s) for version in SCRIPTS]
        for part in [part for part in PARTS if part in found[0] and found[0][part].backward + found[0][part].forward]:
            rows.append([f"{part}, {where}", *(f"{len(p[part].forward)} + {len(p[part].backward)}" for p in found)])
    for preset in PRESETS:
        sums = [total(step, "launches") for step in steps_of(preset, "float32")]
        rows.append([f"**step of `{preset}`**", *(f"**{n:,}**" for n in sums)])
    return markdown_table(["launches, forward + backward", *VERSIONS], rows)


def formula_table(quantity):
    """Return formulas of a layer, or of what comes once, for versions 1 and 3 in fp32."""
    found = [part_formulas(version, "float32", preset_sizes("small")) for version in (1, 3)]
    rows = []
    for part in PARTS[:-1]:  # AdamW's bytes are a number per parameter
        cells = []
        for version in found:
            layer, once = (
                sum(version[part][phase].get(where, {}).get(quantity, 0) for phase in PHASES)
                for where in ("layer", "once")
            )
            cells.append(math(layer) + (" a layer; " if layer and once else "") + math(once))
        if any(cells):
            rows.append([part, *cells])
    return markdown_table(["part", "V1", "V3"], rows, left=3)


def step_table(quantity, unit, name):
    """Return the numbers of one step by part for each version, and the sums for all presets and precisions."""
    rows, steps = [], [both_phases(step, quantity) for step in steps_of("small", "float32")]
    for part in PARTS:
        if any(step[part] for step in steps):
            rows.append([part, *(f"{step[part] / unit:,.1f}" for step in steps)])
    for preset, precision in itertools.product(PRESETS, ("float32", "bfloat16")):
        sums = [total(step, quantity) / unit for step in steps_of(preset, precision)]
        rows.append([f"**step of `{preset}`, {PRECISIONS[precision]}**", *(f"**{n:,.0f}**" for n in sums)])
    return markdown_table([f"{name}, `small`, fp32", *VERSIONS], rows)


def gpu_table():
    """Return data-sheet peaks and bandwidths, and the FLOP/B from which on the GPU is compute-bound."""
    rows = []
    for gpu in GPUS:
        bandwidth = counts.BANDWIDTH_TB_S[gpu]
        peaks = [counts.peak_tflops(gpu, precision) for precision in ("float32", "tf32", "bfloat16")]
        cells = ["" if p is None else f"{p:,.1f}" for p in peaks] + [f"{bandwidth:.3f}"]
        rows.append([gpu, *cells, *("" if p is None else f"{p / bandwidth:,.0f}" for p in peaks)])
    return markdown_table(["GPU", "fp32 TFLOP/s", "TF32", "bf16", "TB/s", "ridge FLOP/B, fp32", "TF32", "bf16"], rows)


def roofline_table(version, precision, preset):
    step, rows = step_counts(version, precision, preset_sizes(preset)), []
    columns = [counts.rooflines(step, gpu, precision) for gpu in GPUS]
    work = counts.intensity(step)
    for part in PARTS:
        times = [f"**{us:,.0f}**" if bound == "compute" else f"{us:,.0f}" for us, bound in (c[part] for c in columns)]
        row = work[part]
        cells = [f"{row['flops'] / 1e9:,.2f}", f"{row['bytes'] / 1e6:,.0f}", f"{row['flop_per_byte']:,.1f}"]
        rows.append([part, *cells, *times])
    sums = [f"{1e3 * counts.shortest_step_ms(step, gpu, precision):,.0f}" for gpu in GPUS]
    rows.append(["all, one after the other", "", "", "", *sums])
    header = [f"V{version}, `{preset}`, {PRECISIONS[precision]}", "GFLOP", "MB", "FLOP/B"]
    return markdown_table([*header, *(f"{gpu}, us" for gpu in GPUS)], rows)


def shortest_table():
    """Return the shortest possible step of every version: its FLOPs and bytes at the peaks, launches for nothing."""
    rows = []
    for preset, precision, gpu in itertools.product(("small", "medium"), ("float32", "bfloat16"), GPUS):
        times = [f"{counts.shortest_step_ms(step, gpu, precision):,.2f}" for step in steps_of(preset, precision)]
        rows.append([f"`{preset}`, {PRECISIONS[precision]}, {gpu}", *times])
    return markdown_table(["shortest step, ms", *VERSIONS], rows)


def corrections():
    """Return what the published document says about `tiny` and about fusions, beside the counts."""
    one, full = preset_sizes("tiny")._replace(B=1), preset_sizes("small")
    full = full._replace(K=full.H)  # as published: no grouped queries
    required = sum(counts.required_flops(one).values()) / 3
    computed = sum(phases["forward"]["flops"] for phases in step_counts(1, "float32", one).values())
    layers = [counts.parts_of_layer(version, "float32", full) for version in (1, 2)]
    forward, backward = ([sum(len(getattr(p, phase)) for p in layer.values()) for layer in layers] for phase in PHASES)
    saved = 1 - (forward[1] + backward[1]) / (forward[0] + backward[0])
    separate, packed = (sum(layer["QKV projection"].forward) for layer in layers)
    forward_text = f"{required / 1e6:,.1f} MFLOP; {computed / 1e6:,.1f} with the masked half of the scores"
    bytes_text = f"{1 - packed / separate:.0%} of the forward (`small` with $K = H$, as published)"
    rows = [
        ["forward of one sequence of `tiny`", "about 368 M", forward_text],
        ["kernels in a layer of V1", "17, elsewhere 10 + 7 + 2 + 2", f"{forward[0]} forward, {backward[0]} backward"],
        ["launches that V2's fusions save", "40 to 60 %", f"{saved:.0%} of a layer"],
        ["bytes that one QKV product saves", "about 40 %", bytes_text],
    ]
    return markdown_table(["", "published", "counted"], rows, left=3)


# ---------------------------------------------------------------- predicted and measured


def predicted_and_measured(row, gpu, sizes):
    """Return the cells of a recorded step: what its counts predict, and the measurement."""
    version, precision = int(row["model"][1:]), row["precision"]
    step = step_counts(version, precision, sizes)
    launches = total(step, "launches")
    least = counts.state_bytes(version, precision) * counts.parameter_count(sizes) + total(step, "saved")
    shortest = f"{counts.shortest_step_ms(step, gpu, precision):.2f}" if gpu else ""
    counted = [f"{launches:,}", f"{total(step, 'bytes') / 1e6:,.0f}", shortest, f"{least / 2**20:,.0f}"]
    rate = f"{1e3 * row['step_ms'] / launches:.1f}"
    if version == 4:  # it runs compiled, but is counted without torch.compile
        counted, rate = [f"≤&nbsp;{cell}" if cell else "" for cell in counted], ""
    title = f"V{version}&nbsp;{PRECISIONS[precision]}&nbsp;{'graph' if row['captured'] else 'eager'}"
    return [title, *counted, f"{row['step_ms']:.2f}", rate, f"{row['peak_memory_mb']:,.0f}"]


def measured_tables(recorded):
    """Return the recorded steps of the four versions, one table per configuration."""
    tables, record = defaultdict(list), recorded.suite()["record"]
    for row in recorded.suite()["rows"]:
        if row["model"] in ("v1", "v2", "v3", "v4") and row["precision"] in counts.ELEMENT_BYTES:
            tables[row["preset"], row["batch_size"], row["seq_len"], row["options"]].append(row)
    texts = [f"{machine_line(record)}; `scripts/recorded/{recorded.folder.name}`."]
    for (preset, batch_size, seq_len, more), chosen in tables.items():
        argv = ["--preset", preset, "--batch-size", str(batch_size), "--seq-len", str(seq_len), *more.split()]
        sizes, gpu = sizes_of_options(argv), counts.known_gpu(record["device"])
        header = [f"`{preset}`", "launches", "MB", "least ms", "least MiB", "step ms", "us/launch", "peak MiB"]
        texts.append(markdown_table(header, [predicted_and_measured(row, gpu, sizes) for row in chosen]))
    return "\n\n".join(texts)


# ---------------------------------------------------------------- the page


def page_tables(recorded):
    """Return {name of the markers in the page: table}."""
    tables = {
        "presets": presets_table(),
        "parameters": parameter_table(),
        "flops": flops_table(),
        "launches": launches_table(),
        "bytes": formula_table("bytes"),
        "bytes-of-a-step": step_table("bytes", 1e6, "MB"),
        "saved": formula_table("saved"),
        "saved-of-a-step": step_table("saved", 2**20, "MiB"),
        "gpus": gpu_table(),
        "roofline": roofline_table(1, "float32", "small") + "\n\n" + roofline_table(3, "bfloat16", "medium"),
        "shortest": shortest_table(),
        "corrections": corrections(),
        "measured": measured_tables(recorded),
    }
    return {f"counts-{name}": table for name, table in tables.items()}


def write_page(options):
    """Write or check the tables of the page."""
    tables = page_tables(Record(options.recorded) if options.recorded else newest_record())
    text = PAGE.read_text(encoding="utf-8")
    for name in tables:
        if f"<!-- {name}:begin -->" not in text or f"<!-- {name}:end -->" not in text:
            raise Failure(2, f"{PAGE} must have the lines <!-- {name}:begin --> and <!-- {name}:end -->")
    return write_or_check({PAGE: fill(text, tables)}, options.check, "python scripts/model_counts.py --write")


# ---------------------------------------------------------------- one step


def content_of(version, precision, sizes):
    """Return everything about one step, for --json."""
    step, formulas = step_counts(version, precision, sizes), part_formulas(version, precision, sizes)
    weights, work, parts = counts.parameters(sizes), counts.intensity(step), {}
    gpus = {gpu: counts.rooflines(step, gpu, precision) for gpu in counts.PEAK_TFLOPS}
    for part in PARTS:
        layer, once = weights.get(part, (0, 0))
        parts[part] = {
            "parameters": sizes.L * layer + once,
            **step[part],
            "flop_per_byte": work[part]["flop_per_byte"],
            "roofline": {gpu: dict(zip(("us", "bound"), rows[part], strict=True)) for gpu, rows in gpus.items()},
            "formulas": {
                phase: {where: {q: formula(value) for q, value in found.items()} for where, found in places.items()}
                for phase, places in formulas[part].items()
            },
        }
    totals = {quantity: total(step, quantity) for quantity in QUANTITIES}
    totals["parameters"] = counts.parameter_count(sizes)
    totals["required_flops"] = sum(counts.required_flops(sizes).values())
    return {"version": version, "precision": precision, "sizes": sizes._asdict(), "step": totals, "parts": parts}


def as_text(content):
    """Return formulas, numbers and rooflines as three tables."""
    formulas, numbers, roofs = [], [], []
    for part, row in content["parts"].items():
        for phase in PHASES:
            for where, found in row["formulas"][phase].items():
                cells = [found.get(q, "") for q in ("flops", "bytes", "saved", "launches")]
                formulas.append([f"{part}, {phase}, {'each layer' if where == 'layer' else 'once'}", *cells])
        pair = [row[phase] for phase in PHASES]
        cells = [f"{done[q] / unit:,.2f}" for q, unit in (("flops", 1e9), ("bytes", 1e6)) for done in pair]
        saved, launches = f"{pair[0]['saved'] / 2**20:,.2f}", " + ".join(str(done["launches"]) for done in pair)
        numbers.append([part, f"{row['parameters']:,}", *cells, saved, launches])
        times = [f"{row['roofline'][gpu]['us']:,.1f} {row['roofline'][gpu]['bound']}" for gpu in GPUS]
        roofs.append([part, f"{row['flop_per_byte']:,.1f}", *times])
    step = content["step"]
    header = ["part", "parameters", "GFLOP forward", "backward", "MB forward", "backward", "MiB saved", "launches"]
    sizes = ", ".join(f"{letter} {size}" for letter, size in content["sizes"].items())
    tables = [
        f"version {content['version']}, {content['precision']}, {sizes}",
        text_table(["formulas", "FLOPs", "bytes", "bytes saved", "launches"], formulas, left=5),
        text_table(header, numbers),
        text_table(["shortest time of a step, us", "FLOP/B", *GPUS], roofs),
        f"step: {step['parameters']:,} parameters, {step['required_flops'] / 1e9:,.2f} GFLOP needed, "
        f"{step['flops'] / 1e9:,.2f} done, {step['bytes'] / 1e6:,.1f} MB moved, {step['saved'] / 2**20:,.1f} MiB "
        f"saved, {step['launches']:,} launches",
    ]
    return "\n\n".join(tables)


def count(options, argv):
    if {"--use-amp", "--tf32", "--amp-dtype"} & set(argv):
        raise Failure(2, "choose the precision with --precision, not with the training script's options")
    content = content_of(version_meant(options.version), options.precision, sizes_of_options(argv))
    emit(content, as_text(content), options.json)
    return 0


def main(argv=None):
    example = "--preset small --version 3 --precision bfloat16; options that are not listed go to the training script"
    parser = Parser("model_counts.py", __doc__.splitlines()[0], example)
    add_version_option(parser)
    parser.add_argument("--precision", choices=counts.ELEMENT_BYTES, default="float32", help="(%(default)s)")
    parser.add_argument("--write", action="store_true", help=f"put the tables into {PAGE.name}")
    parser.add_argument("--check", action="store_true", help="compare that page with them")
    parser.add_argument("--recorded", type=pathlib.Path, metavar="FOLDER", help="a recorded run (the newest)")
    options, rest = parser.parse_known_args(argv)

    def work():
        return write_page(options) if options.write or options.check else count(options, rest)

    return run_tool("model_counts.py", work)


if __name__ == "__main__":
    sys.exit(main())
