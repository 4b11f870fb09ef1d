"""Read the losses of version 3 in several precisions, and judge their differences to bfloat16, seed by seed.

The study is finished: its code is scripts/maintain/train_precisions.py of the commit that its record names. It wrote a
file per run: a variant (a precision, or bfloat16 from nudged weights) and a seed. All variants of a seed start from the
same weights and see the same batches, so their losses differ by the precision alone, and by chaos: training amplifies
any rounding. The nudged runs show how far chaos alone takes two losses apart.
"""

import math
import pathlib
import statistics
from typing import NamedTuple

from common.command_line import SHORT_PRECISIONS, Failure
from common.files import errors_of, read_object
from common.machine.description import SAME_RUN
from common.tables import markdown_table

REFERENCE = "bfloat16"
VARIANTS = {  # name -> precision; in the order of training
    "bfloat16": "bfloat16",
    "fp8": "fp8",
    "nudged": "bfloat16",
    "tf32": "tf32",
}
COMPARED = [name for name in VARIANTS if name != REFERENCE]
QUANTITIES = {"training_loss": "training loss", "held_out_loss": "held-out loss"}
POINT = 20  # steps of which a point of a curve is the mean
LAST = 100  # steps of which the training loss is the mean
NEEDED = ("record", "script_sha256", "settings", "text", "batches_sha256", "curve", *QUANTITIES)
NOT_MEASURED = "We haven't measured longer runs on real text yet."


def title(variant):
    """Return a variant's name on pages and in pictures."""
    return "nudged bf16" if variant == "nudged" else SHORT_PRECISIONS[variant]


# ---------------------------------------------------------------- files


def path_of(folder, variant, seed):
    return pathlib.Path(folder) / f"{variant}_seed{seed}.json"


def check_loss(name, value):
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"{name} must be a finite number, got {value}")


def read_run(path):
    """Return the run in a file; Failure with one sentence where it is damaged or another's."""
    with errors_of(path):
        run = read_object(path, "result of a long run")
        for name in NEEDED:
            run[name]  # a KeyError names what is missing
        if run["variant"] not in VARIANTS or path_of("", run["variant"], run["seed"]).name != path.name:
            raise ValueError(f"it belongs to {run['variant']}, seed {run['seed']}")
        for name in QUANTITIES:
            check_loss(name, run[name])
        for value in run["curve"]:
            check_loss("the curve", value)
        return run


def read_runs(folder):
    """Return {(variant, seed): run} of a folder."""
    runs = [read_run(path) for path in sorted(pathlib.Path(folder).glob("*_seed*.json"))]
    return {(run["variant"], run["seed"]): run for run in runs}


def check_same(run, wanted, path):
    """Raise Failure unless a run has the settings, text, commit and kind of machine of another."""
    for name in ("settings", "text", "script_sha256"):
        if run[name] != wanted[name]:
            raise Failure(2, f"{path} differs from the other runs in its {name}")
    for name in ("commit", *SAME_RUN):
        if run["record"].get(name) != wanted["record"].get(name):
            raise Failure(2, f"{path} differs from the other runs in its {name}")


def read_complete(folder):
    """Return {(variant, seed): run} with every variant for every seed; Failure with one sentence otherwise."""
    runs = read_runs(folder)
    if not runs:
        raise Failure(2, f"{folder} holds no results of long runs")
    first = next(iter(runs.values()))
    for (variant, seed), run in runs.items():
        check_same(run, first, path_of(folder, variant, seed))
    seeds = range(first["settings"]["seeds"])
    lacking = [f"{variant} with seed {seed}" for seed in seeds for variant in VARIANTS if (variant, seed) not in runs]
    if lacking:
        raise Failure(2, f"{folder} lacks {', '.join(lacking)}: take them from the commit that recorded them")
    for seed in seeds:
        if len({runs[variant, seed]["batches_sha256"] for variant in VARIANTS}) > 1:
            raise Failure(2, f"{folder}: the runs of seed {seed} had different batches and cannot be compared")
    return runs


# ---------------------------------------------------------------- pairs


def signed(value):
    return f"{round(value, 4) + 0.0:+.4f}"  # + 0.0: no -0.0000


class Difference(NamedTuple):
    """Hold the paired differences of a loss to the reference's, one per seed, and whether they show anything."""

    values: list
    shown: bool = False

    @property
    def mean(self):
        return statistics.fmean(self.values)

    def __str__(self):
        return f"{signed(self.mean)} ({signed(min(self.values))} to {signed(max(self.values))})"


def seeds_of(runs):
    return sorted({seed for _, seed in runs})


def losses_of(runs, variant, quantity):
    """Return a loss of each seed."""
    return [runs[variant, seed][quantity] for seed in seeds_of(runs)]


def differences(runs, variant, quantity):
    """Return the loss of each seed less the reference's of the same seed."""
    pairs = zip(losses_of(runs, variant, quantity), losses_of(runs, REFERENCE, quantity), strict=True)
    return [loss - reference for loss, reference in pairs]


def judged(runs, variant, quantity):
    """Return the Difference of a variant.

    It is shown if all seeds agree about its sign and its mean is larger than the furthest of the nudged pairs.
    """
    values = differences(runs, variant, quantity)
    chaos = max(abs(value) for value in differences(runs, "nudged", quantity))
    agree = min(values) > 0 or max(values) < 0
    return Difference(values, variant != "nudged" and agree and abs(statistics.fmean(values)) > chaos)


def verdict(runs, variant, quantity):
    """Return what a variant's difference shows, in words."""
    found = judged(runs, variant, quantity)
    if not found.shown:
        return f"the {QUANTITIES[quantity]} shows no difference"
    direction = "higher" if found.mean > 0 else "lower"
    return f"the {QUANTITIES[quantity]} is {abs(found.mean):.4f} {direction}"


def verdict_sentence(runs, variant):
    """Return a sentence about both losses of a variant."""
    if not any(judged(runs, variant, quantity).shown for quantity in QUANTITIES):
        return f"With {title(variant)}, neither loss shows a difference."
    return f"With {title(variant)}, {', and '.join(verdict(runs, variant, quantity) for quantity in QUANTITIES)}."


# ---------------------------------------------------------------- the page


def described(about):
    """Return sentences about the text."""
    train = about["train"]
    held_out = about["held_out"]
    names = sorted({package.rsplit(" ", 1)[0] for package in about["packages"]})
    return (
        f"The text is {about['what']}. It comes from {len(names)} packages: "
        f"{train['bytes']:,} bytes in {train['files']:,} files to train on, "
        f"and {held_out['bytes']:,} bytes in {held_out['files']:,} held-out files."
    )


def recorded_losses(recorded):
    """Return the runs of the part; None where neither this record nor another has it."""
    folder = recorded.holding("losses").folder / "losses"
    return read_complete(folder) if (folder / "record.json").exists() else None


def table(runs):
    """Return a row for each variant: mean losses over the seeds, and the paired differences."""
    rows = []
    for variant in (REFERENCE, *COMPARED):
        means = [f"{statistics.fmean(losses_of(runs, variant, quantity)):.4f}" for quantity in QUANTITIES]
        pairs = [str(judged(runs, variant, quantity)) if variant != REFERENCE else "" for quantity in QUANTITIES]
        rows.append([title(variant), *means, *pairs])
    header = [*QUANTITIES.values(), *(f"{name} - bf16's (smallest to largest)" for name in QUANTITIES.values())]
    return markdown_table(["", *header], rows)


def losses_text(recorded, origin):
    """Return the table with its origin and verdicts; a sentence where the part was not recorded.

    origin(record, recorded) returns a line that says where a part was measured.
    """
    runs = recorded_losses(recorded)
    if not runs:
        return NOT_MEASURED
    first = next(iter(runs.values()))
    settings = first["settings"]
    where = origin(first["record"], recorded.holding("losses"))
    trained = f"the {settings['preset']} preset" if settings["preset"] else "a toy model"
    told = (
        f"We trained {trained} for {settings['steps']:,} steps of "
        f"{settings['batch_size']} sequences of {settings['seq_len']} tokens, with {settings['seeds']} seeds. "
        f"{described(first['text'])} The training loss is the mean over the last {LAST} steps, and the held-out "
        f"loss the mean over {settings['held_out_tokens']:,} tokens, both in nats per byte. We compare runs with the "
        "same seed. To see what rounding alone does, the nudged runs start with every weight moved by one unit in the "
        "last place of bfloat16. We report a difference only if all seeds agree on its sign and its mean exceeds the "
        f"largest difference of a nudged run. {where}"
    )
    hosts = {run["record"]["host"] for run in runs.values()}
    if len(hosts) > 1:
        told += f" The runs come from {len(hosts)} machines."
    verdicts = [verdict_sentence(runs, variant) for variant in COMPARED if variant != "nudged"]
    return "\n\n".join([told, table(runs), " ".join(verdicts)])
