#!/usr/bin/env python3
"""Print parameters, FLOPs, bytes, launches and saved activations of every part of a training step.

    python scripts/model_counts.py --preset small --version 3 --precision bfloat16
    python scripts/model_counts.py --write                    # put the tables into TINY_LLAMA_ARCHITECTURE.md
    python scripts/model_counts.py --check                    # compare that page with them

The formulas stand in common/counts.py, which also says what each quantity counts; options that are not listed go to the
training script.
"""

import itertools
import sys
from collections import defaultdict

import sympy

from common import counts
from common.command_line import Failure, Parser, add_version_option, version_meant
from common.counts import PARTS, PHASES, Part, Sizes, both_phases, step_counts, total
from common.pages import fill, write_or_check
from common.provenance import machine_line
from common.records import PRECISIONS, newest_record
from common.tables import columns, markdown_table, text_table
from common.versions import REPOSITORY, SCRIPTS, load_version

PAGE = REPOSITORY / "TINY_LLAMA_ARCHITECTURE.md"
PRESETS = ("tiny", "small", "medium")
VERSIONS = [f"V{version}" for version in SCRIPTS]
GPUS = ("MI300X", "H200", "MI250X")
STEP_COLUMNS = (
    "part: {part} | parameters: {parameters:,} | GFLOP forward: {forward[flops]:G,.2f} | "
    "backward: {backward[flops]:G,.2f} | MB forward: {forward[bytes]:M,.2f} | backward: {backward[bytes]:M,.2f} | "
    "MiB saved: {mib:,.2f} | launches: {forward[launches]} + {backward[launches]}"
)
ROOF_COLUMNS = "shortest time of a step, us: {part} | FLOP/B: {flop_per_byte:,.1f}"
PLACES = {"each layer": counts.parts_of_layer, "once": counts.parts_once}

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


def math(value):
    return f"${formula(value, '^{{{}}}')}$" if value != 0 else ""


# ---------------------------------------------------------------- one step


def sizes_of_options(argv):
    """Return the sizes that a training script's options choose; every version has the same ones."""
    return counts.sizes_of(load_version(1).parse_options([*argv, "--device", "cpu"]))


def step_text(version, precision, sizes):
    """Return numbers and rooflines of a step as two tables, and its sums."""
    step, weights, rows = step_counts(version, precision, sizes), counts.parameters(sizes), []
    work, times = counts.intensity(step), {gpu: counts.rooflines(step, gpu, precision) for gpu in GPUS}
    for part, phases in step.items():
        layer, once = weights.get(part, (0, 0))
        row = {"part": part, "parameters": sizes.L * layer + once, "mib": phases["forward"]["saved"] / 2**20}
        rows.append(row | phases | work[part] | {gpu: found[part] for gpu, found in times.items()})
    needed = sum(counts.required_flops(sizes).values())
    roofs = [f"{gpu}: {{{gpu}[0]:,.1f}} {{{gpu}[1]}}" for gpu in GPUS]
    return (
        f"version {version}, {precision}, {', '.join(f'{x} {size}' for x, size in sizes._asdict().items())}\n\n"
        f"{text_table(*columns(STEP_COLUMNS, rows))}\n\n"
        f"{text_table(*columns(' | '.join([ROOF_COLUMNS, *roofs]), rows))}\n\n"
        f"step: {counts.parameter_count(sizes):,} parameters, {needed / 1e9:,.2f} GFLOP needed, "
        f"{total(step, 'flops') / 1e9:,.2f} done, {total(step, 'bytes') / 1e6:,.1f} MB moved, "
        f"{total(step, 'saved') / 2**20:,.1f} MiB saved, {total(step, 'launches'):,} launches"
    )


# ---------------------------------------------------------------- the page's tables


def preset_sizes(preset):
    return sizes_of_options(["--preset", preset])


def steps_of(preset, precision):
    """Return the counts of every version's step."""
    return [step_counts(version, precision, preset_sizes(preset)) for version in SCRIPTS]


def presets_compared(names, function, unit, pattern, more=()):
    """Return the formulas of function(sizes), {part: (of each layer, once)}, and its numbers for every preset."""
    sizes = [preset_sizes(preset) for preset in PRESETS]
    numbers = [{part: (s.L * layer + once) / unit for part, (layer, once) in function(s).items()} for s in sizes]
    rows = [
        [part, math(layer), math(once), *(format(found[part], pattern) for found in numbers)]
        for part, (layer, once) in function(letters(sizes[0])).items()
    ]
    rows.append(["**all**", "", "", *(f"**{sum(found.values()):{pattern}}**" for found in numbers)])
    return markdown_table([*names, *(f"`{preset}`" for preset in PRESETS)], [*rows, *more])


def flops_table():
    """Return what the model needs: matmuls forward, backward twice that, and everything else for comparison."""
    others = [sum(map(sum, counts.operations(preset_sizes(preset)).values())) for preset in PRESETS]
    more = ["everything else, operations", "", "", *(f"{n / 1e9:,.2f}" for n in others)]
    names = ["GFLOP of a step", "forward, each layer", "forward, once"]
    return presets_compared(names, counts.forward_flops, 1e9 / 3, ",.2f", [more])


def launches_table():
    """Return forward + backward of a layer for each version, what comes once, and whole steps."""
    s, rows = preset_sizes("small"), []
    for where, function in PLACES.items():
        found = [function(version, "float32", s) for version in SCRIPTS]
        for part in [part for part in PARTS if part in found[0] and found[0][part].backward + found[0][part].forward]:
            cells = [f"{len(parts[part].forward)} + {len(parts[part].backward)}" for parts in found]
            rows.append([f"{part}, {where.replace('each', 'in each')}", *cells])
    for preset in PRESETS:
        sums = [f"**{total(step, 'launches'):,}**" for step in steps_of(preset, "float32")]
        rows.append([f"**step of `{preset}`**", *sums])
    return markdown_table(["launches, forward + backward", *VERSIONS], rows)


def formulas_compared(quantity):
    """Return quantity(Part) as formulas of a layer, or of what comes once, for versions 1 and 3 in fp32."""
    s, rows = letters(preset_sizes("small")), []
    for part in PARTS[:-1]:  # AdamW's bytes are a number per parameter
        cells = []
        for version in (1, 3):
            found = (function(version, "float32", s).get(part, Part()) for function in PLACES.values())
            layer, once = map(quantity, found)
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
    times = [counts.rooflines(step, gpu, precision) for gpu in GPUS]
    work = counts.intensity(step)
    for part in PARTS:
        shown = [f"**{us:,.0f}**" if bound == "compute" else f"{us:,.0f}" for us, bound in (t[part] for t in times)]
        row = work[part]
        cells = [f"{row['flops'] / 1e9:,.2f}", f"{row['bytes'] / 1e6:,.0f}", f"{row['flop_per_byte']:,.1f}"]
        rows.append([part, *cells, *shown])
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


# ---------------------------------------------------------------- the command


def page_tables():
    """Return {name of the markers in the page: table}."""
    presets = [[f"`{preset}`", *preset_sizes(preset)] for preset in PRESETS]
    tables = {
        "presets": markdown_table(["preset", *(f"${x}$" for x in LETTERS)], presets),
        "parameters": presets_compared(["part", "in each layer", "once"], counts.parameters, 1, ",.0f"),
        "flops": flops_table(),
        "launches": launches_table(),
        "bytes": formulas_compared(lambda part: sum(part.forward + part.backward)),
        "bytes-of-a-step": step_table("bytes", 1e6, "MB"),
        "saved": formulas_compared(lambda part: part.saved),
        "saved-of-a-step": step_table("saved", 2**20, "MiB"),
        "gpus": gpu_table(),
        "roofline": roofline_table(1, "float32", "small") + "\n\n" + roofline_table(3, "bfloat16", "medium"),
        "shortest": shortest_table(),
        "corrections": corrections(),
        "measured": measured_tables(newest_record()),
    }
    return {f"counts-{name}": table for name, table in tables.items()}


def write_page(check):
    tables, text = page_tables(), PAGE.read_text(encoding="utf-8")
    for name in tables:
        if f"<!-- {name}:begin -->" not in text or f"<!-- {name}:end -->" not in text:
            raise Failure(2, f"{PAGE} must have the lines <!-- {name}:begin --> and <!-- {name}:end -->")
    return write_or_check({PAGE: fill(text, tables)}, check, "python scripts/model_counts.py --write")


def count(options, argv):
    """Write or check the tables of the page, or print a step."""
    if options.write or options.check:
        return write_page(options.check)
    if {"--use-amp", "--tf32", "--amp-dtype"} & set(argv):
        raise Failure(2, "choose the precision with --precision, not with the training script's options")
    print(step_text(version_meant(options.version), options.precision, sizes_of_options(argv)))


def main(argv=None):
    parser = Parser("model_counts.py", __doc__, with_json=False)
    add_version_option(parser)
    parser.add_argument("--precision", choices=counts.ELEMENT_BYTES, default="float32", help="(%(default)s)")
    parser.add_argument("--write", action="store_true", help=f"put the tables into {PAGE.name}")
    parser.add_argument("--check", action="store_true", help="compare that page with them")
    return parser.run(count, argv, passes_on=True)


if __name__ == "__main__":
    sys.exit(main())
