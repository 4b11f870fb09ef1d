#!/usr/bin/env python3
"""Print parameters, FLOPs, bytes, launches and saved activations of every part of a training step.

    python scripts/model_counts.py --preset small --version 3 --precision bfloat16

The formulas are in common/formulas/counts.py, which also explains what each quantity counts. Options that aren't
listed here go to the training script. Version 4 has no counts: the compiler decides what it launches, so no formula
can tell.
"""

import sys

from common.command_line import PRESETS, Failure, Parser, add_version_option, version_meant
from common.formulas import counts
from common.formulas.counts import of_step, step_counts, total
from common.tables import columns, text_table
from common.versions import load_version

GPUS = ("MI300X", "H100", "MI250X")
STEP_COLUMNS = (
    "part: {part} | parameters: {parameters:,} | GFLOP forward: {forward[flops]:G,.2f} | "
    "backward: {backward[flops]:G,.2f} | MB forward: {forward[bytes]:M,.2f} | backward: {backward[bytes]:M,.2f} | "
    "MiB saved: {mib:,.2f} | launches: {forward[launches]} + {backward[launches]}"
)
ROOF_COLUMNS = "shortest time of a step, us: {part} | FLOP/B: {flop_per_byte:,.1f}"


def sizes_of_options(argv):
    """Return the sizes that a training script's options choose; every version has the same ones."""
    return counts.sizes_of(load_version(1).parse_options([*argv, "--device", "cpu"]))


def step_text(version, precision, sizes):
    """Return numbers and rooflines of a step as two tables, and its sums."""
    step = step_counts(version, precision, sizes)
    weights = counts.parameters(sizes)
    rows = []
    work = counts.intensity(step)
    times = {gpu: counts.rooflines(step, gpu, precision) for gpu in GPUS}
    for part, phases in step.items():
        row = {"part": part, "parameters": of_step(weights.get(part, (0, 0)), sizes)}
        row |= phases | work[part] | {"mib": phases["forward"]["saved"] / 2**20}
        rows.append(row | {gpu: found[part] for gpu, found in times.items()})
    needed = sum(counts.required_flops(sizes).values())
    autocast = ""
    if version < 3 and counts.ELEMENT_BYTES[precision] == 4:
        autocast = "\nwithout autocast: --precision bfloat16 counts the casts of --use-amp too"
    chunks = ", output head and loss in chunks" if counts.loss_is_fused(version, sizes) else ""
    roofs = [f"{gpu}: {{{gpu}[0]:,.1f}} {{{gpu}[1]}}" for gpu in GPUS]
    return (
        f"version {version}, {precision}, {', '.join(f'{x} {size}' for x, size in sizes._asdict().items())}{chunks}\n\n"
        f"{text_table(*columns(STEP_COLUMNS, rows))}\n\n"
        f"{text_table(*columns(' | '.join([ROOF_COLUMNS, *roofs]), rows))}\n\n"
        f"step: {counts.parameter_count(sizes):,} parameters, {needed / 1e9:,.2f} GFLOP needed, "
        f"{total(step, 'flops') / 1e9:,.2f} done, {total(step, 'bytes') / 1e6:,.1f} MB moved, "
        f"{total(step, 'saved') / 2**20:,.1f} MiB saved, {total(step, 'launches'):,} launches{autocast}"
    )


def count(options, argv):
    """Print a step."""
    if {"--use-amp", "--tf32", "--amp-dtype"} & {word.split("=")[0] for word in argv}:
        raise Failure(2, "choose the precision with --precision, not with the training script's options")
    if options.preset:
        argv = ["--preset", options.preset, *argv]
    sizes = sizes_of_options(argv)  # a wrong option ends it here
    print(step_text(version_meant(options.version), options.precision, sizes))


def main(argv=None):
    parser = Parser("model_counts.py", __doc__, with_json=False)
    add_version_option(parser)
    parser.add_argument("--preset", choices=PRESETS, help="sizes (the training script's)")
    parser.add_argument("--precision", choices=counts.ELEMENT_BYTES, default="float32", help="(%(default)s)")
    return parser.run(count, argv, passes_on=True)


if __name__ == "__main__":
    sys.exit(main())
