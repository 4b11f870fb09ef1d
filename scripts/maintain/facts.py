"""The numbers that sentences on pages take from the record and from the counts: an expression with a name for each.

A page names one in a marker behind its number, see maintain/pages.py: 5.39 ms<!-- rung small graph b -->. The words
after the name are the expression's arguments; "on H200" behind them asks the newest record of that GPU. An expression
returns one value, or a list for as many numbers. It has no value where the record lacks what it needs. What follows
from constants in the same sentence is a term without blanks: 1.67<!-- calc 1/0.6 -->.
"""

import functools
import math
import re
import statistics

from common.command_line import PRESETS, SHORT_PRECISIONS
from common.formulas import counts, occupancy
from common.formulas.gpus import GPUS
from common.measuring.suite_results import MODELS
from common.ratios import furthest, ratios
from common.versions import REPOSITORY, SCRIPTS
from maintain import pictures, rungs, warm_up
from maintain.records import RECORDED, Record
from model_counts import sizes_of_options


class NotMeasured(LookupError):
    """Say that the record lacks what an expression needs."""


def needed(found):
    """Return what was found in a record; NotMeasured for nothing."""
    if not found:
        raise NotMeasured
    return found


def one_of(known, word):
    """Return a word of a marker; ValueError where it is none of the known ones."""
    if word not in known:
        raise ValueError(f"{word} is none of {', '.join(map(str, known))}")
    return word


@functools.cache
def newest_of(gpu):
    """Return the newest record of a GPU."""
    found = [Record(path.parents[1]) for path in RECORDED.glob("*/headline/record.json")]
    found = [one for one in found if gpu in one.suite()["record"]["device"]]
    if not found:
        raise ValueError(f"there is no record of {gpu}")
    return max(found, key=lambda one: one.suite()["record"]["date"])


# ---------------------------------------------------------------- the record


def row(record, model, preset, precision, way=None):
    """Return a row of the suite; where the way is named, of the host that timed both ways."""
    one_of(MODELS, model.split("+")[0])
    one_of(PRESETS, preset)
    one_of((None, "eager", "graph"), way)
    return needed(record.row(model, preset, one_of(SHORT_PRECISIONS, precision), way))


def runs(record, *words):
    """Return the summaries of all starts of a row."""
    case = row(record, *words)["case"]
    return [run["summary"] for run in record.suite()["runs"] if run["case"] == case]


def of_file(record, part, name):
    return needed(record.holding(part).json(part, name))


def warm_up_of(record, *words):
    """Return the ms of warm-up, compilation and capture of a row that was timed eagerly and in a graph."""
    case = row(record, *words)["case"]
    found = [run["summary"] for run in record.holding("graph").suite("graph")["runs"] if run["case"] == case]
    return 1000 * needed(found)[0]["warmup_s"]


def starts(record):
    """Return {preset: {rung: its starts}}, each from the process to the first measured step."""
    return needed(warm_up.presets_of(warm_up.parts_of(record)))


def start_phase(record, phase, name, way):
    """Return the median ms that a phase took with the small and with the medium preset.

    phase: imports, first_step or other_steps.
    """
    named = {one.split(",")[0].replace(" ", "_"): one for one in warm_up.PHASES}
    told = named[one_of(named, phase)]
    one_of(warm_up.WAYS, way)
    return [1000 * warm_up.phases_s(names[name], way)[told] for names in starts(record).values()]


def imports_of_starts(record):
    """Return the shortest and the longest median ms of imports and model, of all starts."""
    first = next(iter(warm_up.PHASES))
    every = [found for names in starts(record).values() for found in names.values()]
    seconds = [warm_up.phases_s(one, way)[first] for one in every for way in warm_up.WAYS]
    return [1000 * min(seconds), 1000 * max(seconds)]


def on_gpus(record, part, model, processes):
    """Return the summaries of a model's runs on so many GPUs."""
    found = of_file(record, part, "suite.json")["runs"]
    asked = (model, int(processes))
    return needed([run["summary"] for run in found if (run["case"]["model"], run["case"]["processes"]) == asked])


def four_gpus(record, model, processes):
    """Return a model's steps on so many of one host's four GPUs, the shortest first."""
    return sorted(summary["step_ms"]["median"] for summary in on_gpus(record, "ddp_four_gpus", model, processes))


@functools.cache
def columns(record, kind, options=""):
    return rungs.columns_of(record, kind, options)


def column_of(record, preset, way, *names):
    """Return a column of the ladder that measured rungs of these names."""
    graph = one_of(("eager", "graph"), way) == "graph"
    for name in names:
        one_of(rungs.by_name((*rungs.LADDER, *rungs.PEERS, rungs.SLOW_PEER)), name)
    preset, _, long = preset.partition(":")
    one_of(("", "long"), long)
    found = needed(columns(record, "ladder", rungs.LONG if long else "").get((preset, graph)))
    needed(all(name in found.rungs and found.step_ms(name) for name in names))
    return found


def peer_of(record, preset, name):
    """Return the last column that timed a way to run the peer in a graph."""
    one_of(rungs.by_name((*rungs.PEERS, rungs.SLOW_PEER)), name)
    found = [column for column in rungs.all_columns(record.holding("peers"), "peers") if column.content["graph"]]
    found = [column for column in found if column.content["preset"] == preset and column.step_ms(name)]
    return needed(found)[-1]


def over_vocabulary(record, entries, name):
    """Return the column of a number of vocabulary entries, which measured a row of this name."""
    one_of(map(str, rungs.VOCABULARIES), entries)
    one_of(rungs.by_name(rungs.VOCABULARY), name)
    found = needed(rungs.columns_over_vocabulary(record.holding("vocabulary-*")).get(int(entries)))
    needed(name in found.rungs and found.step_ms(name))
    return found


def losses(record, preset, way, precision):
    """Return the smallest and the largest loss of the versions' rungs in a precision."""
    column = column_of(record, preset, way)
    rows = [rung for rung in column.rungs.values() if rung.precision == precision and rung.version != "peer"]
    found = [column.told[rung.name]["loss"] for rung in rows]
    return [min(found), max(found)]


def gain_of(record, preset, way, name, base):
    """Return the Gain of a rung over another. A page may have its number only where a difference is shown."""
    found = needed(column_of(record, preset, way, name, base).gain(name, base))
    needed(not found.missing)
    return shown(found, f"{name} over {base}")


def shown(gain, name):
    if not gain.shown:
        raise ValueError(f"{name}: no difference shown, so it has no number")
    return gain


def ceiling(record, precision=None):
    """Return the rate of large matmuls of a precision in TFLOP/s, or without one that of a copy in GB/s."""
    found = of_file(record, "kernels", "kernels.json")["ceilings"]
    return found["product"][precision] if precision else found["copy"]


def rounded_copy(record):
    """Return the copy's TB/s with two decimals, with which a reader computes."""
    return round(ceiling(record) / 1000, 2)


def candidates(record, operation):
    """Return the candidates of the first operation, with its size, that begins so; the first of them is version 3's."""
    found = of_file(record, "kernels", "kernels.json")["operations"]
    found = [one["candidates"] for one in found if f"{one['operation']}, {one['size']}".startswith(operation)]
    return needed(found)[0]


def attention(record, batch, tokens):
    """Return the time of version 3's attention, forward and backward, and of the fastest other one."""
    found = candidates(record, f"attention forward + backward, batch {batch}, {tokens} tokens")
    ours, *others = (one["us"]["median"] / 1000 for one in found if "us" in one)
    return [ours, min(others)]


def combined(record, part, key, name):
    """Return a value of a combination of switches."""
    return {row["name"]: row[key] for row in of_file(record, part, "ablation.json")["combinations"]}[name]


def switched(record, part, key, before, after):
    """Return by how much a value is smaller in the second of two combinations."""
    return combined(record, part, key, before) - combined(record, part, key, after)


def switches(record):
    """Return {switch of version 2: the Gain of adding it to none}."""
    return {row["switch"]: row["alone"] for row in needed(pictures.ablation(record))}


def kernels(record, version, *groups):
    """Return the ms of each kernel in the timeline of a version, or of those in these groups."""
    lines = of_file(record, "timeline", "timeline.json")["kernels"][version]
    found = [line.split(maxsplit=2) for line in lines]
    return [float(us) / 1000 for _, us, group in found if not groups or group in groups]


def stage(record, number, *names):
    """Return the sum of these cells of a stage of the debugging exercise."""
    found = needed(pictures.stages(record))[int(number) - 1]
    found |= zip(("forward", "backward", "optimizer"), found["phases"], strict=True)
    return sum(found[name] for name in names)


# ---------------------------------------------------------------- the counts


@functools.cache
def sizes(preset):
    """Return the sizes of a preset; "small:1024" has another sequence length."""
    name, _, length = preset.partition(":")
    return sizes_of_options(["--preset", name, *(["--seq-len", length] if length else [])])


@functools.cache
def step_counts(version, precision, preset):
    return counts.step_counts(int(version), precision, sizes(preset))


def parameters(preset):
    return counts.parameter_count(sizes(preset))


def norm_weights(preset):
    return counts.of_step(counts.parameters(sizes(preset))["norms and residual"], sizes(preset))


def flops(preset):
    return sum(counts.required_flops(sizes(preset)).values())


def launches(version, precision, preset):
    return counts.total(step_counts(version, precision, preset), "launches")


def layer_launches(version, *phases):
    layer = counts.parts(int(version), "float32", sizes("small"))[0]
    for phase in phases:
        one_of(counts.PHASES, phase)
    return sum(len(getattr(part, phase)) for part in layer.values() for phase in phases or counts.PHASES)


def moved(version, precision, preset, *names):
    """Return the bytes of a step, or of these parts and phases of it."""
    step = step_counts(version, precision, preset)
    for name in names:
        one_of([*step, *counts.PHASES], name)
    phases = [name for name in names if name in counts.PHASES] or counts.PHASES
    return sum(
        step[part][phase]["bytes"] for part in [name for name in names if name in step] or step for phase in phases
    )


def launch(record, name):
    """Return the host's ms per launch: the eager step at small of version 1's rung in bfloat16 over its launches."""
    return column_of(record, "small", "eager", name).step_ms(name) / launches(1, "bfloat16", "small")


def lesson_lines(version):
    """Return the lines of a script's lesson, which ends where the harness begins."""
    return SCRIPTS[version].read_text(encoding="utf-8").split("# ============ The training")[0].count("\n")


def patience():
    """Return the minutes that a rank waits for another one."""
    (minutes,) = re.findall(r"timedelta\(minutes=(\d+)\)", SCRIPTS[1].read_text(encoding="utf-8"))
    return int(minutes)


# ---------------------------------------------------------------- arithmetic


def number(word):
    """Return a number, or a product: 4096x4096x4."""
    return math.prod(map(float, word.split("x")))


def flop_per_byte(tile):
    """Return the FLOPs per loaded byte of a tile such as 64x64, in bfloat16."""
    m, n = map(int, tile.split("x"))
    return 2 * m * n / (2 * (m + n))


FUNCTIONS = {"max": max, "ceil": math.ceil, "exp": math.exp, "log": math.log, "sqrt": math.sqrt}


def calculated(term):
    """Return the value of a term of constants, such as log(1000) or 1-4/7; ValueError where it is none."""
    try:
        return eval(term, {"__builtins__": {}}, FUNCTIONS)
    except (SyntaxError, NameError, ArithmeticError) as error:
        raise ValueError(f"{term} cannot be calculated: {error}") from None


# ---------------------------------------------------------------- what a page can name

UNITS = {  # what is measured -> the units in which a page may have it
    "number": {"": 1, "x": 1, "%": 0.01, "million": 1e6},
    "time": {"us": 1e-3, "ms": 1, "s": 1e3, "seconds": 1e3, "minutes": 6e4},
    "bytes": {"bytes": 1, "KiB": 2**10, "MB": 1e6, "MiB": 2**20, "GB": 1e9},
    "bandwidth": {"GB/s": 1, "TB/s": 1e3},
    "work": {"GFLOP": 1e9, "TFLOP": 1e12},
    "speed": {"TFLOP/s": 1},
}
UNITS["constant"] = UNITS["number"] | UNITS["bytes"] | UNITS["work"]
FACTS = {  # r: the record
    "number": {
        # measured
        "gradient_error": lambda r, *words: row(r, *words)["gradient_error"],
        "first_loss": lambda r, *words: runs(r, *words)[0]["first_loss"],
        "backward_over_forward": lambda r, *words: row(r, *words)["backward_ms"] / row(r, *words)["forward_ms"],
        "backward_over_forward_of_two_starts": lambda r, *words: sorted(
            run["backward_ms"] / run["forward_ms"] for run in runs(r, *words)
        ),
        "removed_by_the_graph": lambda r, *words: (
            1 - row(r, *words, "graph")["step_ms"] / row(r, *words, "eager")["step_ms"]
        ),
        "gain": lambda r, *words: gain_of(r, *words).ratio,
        "gain_with_range": lambda r, *words: list(gain_of(r, *words)[:3]),
        "loss": lambda r, preset, way, name: column_of(r, preset, way, name).told[name]["loss"],
        "losses": losses,
        "noise": lambda r, preset, way: math.expm1(furthest(ratios(*needed(column_of(r, preset, way).pair())))),
        "balance": lambda r: round(ceiling(r, "bfloat16")) / rounded_copy(r),
        "three_matmuls_over_one": lambda r: 3 * ceiling(r, "float32") / ceiling(r, "tf32"),
        "fewer_kernels": lambda r, part, before, after: switched(r, part, "kernels", before, after),
        "time_saved": lambda r, switch: 1 - 1 / shown(switches(r)[switch], switch).ratio,
        "time_added": lambda r, switch: 1 / shown(switches(r)[switch], switch).ratio - 1,
        "gains_multiplied": lambda r: math.prod(gain.ratio for gain in switches(r).values()),
        "gain_of_all_switches": lambda r: (
            combined(r, "ablation2", "step_ms", "none") / combined(r, "ablation2", "step_ms", "all")
        ),
        "kernels": lambda r, version: len(kernels(r, version)),
        "share": lambda r, version, *groups: sum(kernels(r, version, *groups)) / sum(kernels(r, version)),
        "stage_trained": lambda r, stage_number: stage(r, stage_number, "trained") / 100,
        # counted
        "size": lambda r, preset, *letters: [sizes(preset)._asdict()[letter] for letter in letters],
        "parameters": lambda r, preset: parameters(preset),
        "norm_weights": lambda r, preset: norm_weights(preset),
        "matrix_weights": lambda r, preset: parameters(preset) - norm_weights(preset),
        "tokens": lambda r, preset: sizes(preset).B * sizes(preset).T,
        "launches": lambda r, *words: launches(*words),
        "layer_launches": lambda r, *words: layer_launches(*words),
        "fewer_layer_launches": lambda r, before, after: 1 - layer_launches(after) / layer_launches(before),
        "moved_over": lambda r, one, other, *words: moved(one, *words) / moved(other, *words),
        "more_moved": lambda r, one, other, *words: moved(one, *words) / moved(other, *words) - 1,
        "less_moved": lambda r, one, other, *words: 1 - moved(one, *words) / moved(other, *words),
        "less_moved_in_16_bits": lambda r, v, preset: 1 - moved(v, "bfloat16", preset) / moved(v, "float32", preset),
        # the T at which scores are as large as so many tensors of width F and of width C
        "scores_are_as_large": lambda r, preset, wide, narrow: (
            (int(wide) * sizes(preset).F + int(narrow) * sizes(preset).C) / sizes(preset).H
        ),
        "ridge": lambda r, gpu: GPUS[gpu].tflops["bfloat16"] / GPUS[gpu].tb_s,
        "units": lambda r, target: occupancy.TARGETS[target].units,
        "lesson_lines": lambda r, version: lesson_lines(int(version)),
        "exercises": lambda r: len(list(REPOSITORY.glob("exercises/[0-9][0-9]_*"))),
    },
    "time": {
        "step": lambda r, *words: row(r, *words)["step_ms"],
        "warm_up": warm_up_of,
        "start_phase": start_phase,
        "imports_of_starts": imports_of_starts,
        "phases": lambda r, *words: [row(r, *words)[f"{phase}_ms"] for phase in ("forward", "backward", "optimizer")],
        "longer_backwards": lambda r: [
            two["backward_ms"] - one["backward_ms"]
            for one, two in zip(on_gpus(r, "ddp", "v3", 1), on_gpus(r, "ddp", "v3", 2), strict=True)
        ],
        "alone_on_each_of_four": lambda r: [four_gpus(r, "v3", 1)[0], four_gpus(r, "v3", 1)[-1]],
        "on_four_gpus": lambda r, model, processes: statistics.median(four_gpus(r, model, processes)),
        "rung": lambda r, preset, way, name: column_of(r, preset, way, name).step_ms(name),
        "vocabulary_step": lambda r, entries, name: over_vocabulary(r, entries, name).step_ms(name),
        "peer_is_ready": lambda r, preset, name: 1000 * peer_of(r, preset, name).told[name]["warm_s"],
        "variant": lambda r, preset, name: peer_of(r, preset, name).step_ms(name),
        "matmul_time": lambda r, preset, precision: flops(preset) / ceiling(r, precision) / 1e9,
        "copied": lambda r, elements, times: 2 * number(elements) * int(times) / rounded_copy(r) / 1e9,  # 16 bits
        "attention": attention,
        "shorter": lambda r, part, before, after: switched(r, part, "step_ms", before, after),
        "shorter_per_kernel": lambda r, part, before, after: (
            switched(r, part, "step_ms", before, after) / switched(r, part, "kernels", before, after)
        ),
        "busy": lambda r, version, *groups: sum(kernels(r, version, *groups)),
        "stage": stage,
        "launch": launch,
        "launches_by_hand": lambda r, name, count=None: (  # of whole us
            int(count or launches(1, "bfloat16", "small")) * round(launch(r, name), 3)
        ),
        "more_copied": lambda r, one, other, *words: (moved(one, *words) - moved(other, *words)) / ceiling(r) / 1e6,
        "patience": lambda r: 60_000 * patience(),
    },
    "bytes": {
        "peak": lambda r, *words: 2**20 * row(r, *words)["peak_memory_mb"],
        "vocabulary_peak": lambda r, entries, name: 2**20 * over_vocabulary(r, entries, name).told[name]["peak_mib"],
        "logits": lambda r, preset, entries, each: (  # of so many bytes each
            int(each) * sizes(preset).B * sizes(preset).T * int(entries)
        ),
        "stage_peak": lambda r, stage_number: 2**20 * stage(r, stage_number, "peak"),
        "ring_bytes": lambda r, preset, gpus: (  # that each GPU sends, to sum gradients in 16 bits
            2 * (int(gpus) - 1) / int(gpus) * 2 * parameters(preset)
        ),
        "parameter_bytes": lambda r, preset, each: int(each) * parameters(preset),
        "moved_by": lambda r, one, other, *words: [moved(one, *words), moved(other, *words)],
        "more_bytes": lambda r, one, other, *words: moved(one, *words) - moved(other, *words),
        "scores": lambda r, preset: 4 * sizes(preset).B * sizes(preset).H * sizes(preset).T ** 2,  # of a layer
        "swiglu_tensors": lambda r, preset: (  # x, and the weights of gate and up
            4 * (sizes(preset).B * sizes(preset).T + 2 * sizes(preset).F) * sizes(preset).C
        ),
        "level": lambda r, gpu, name: pictures.levels(r)[gpu][pictures.LEVELS.index(name)],
    },
    "bandwidth": {
        "copy": lambda r: ceiling(r),
        "rate": lambda r, operation: candidates(r, operation)[0]["rate"],
        "bandwidth": lambda r, gpu: 1000 * GPUS[gpu].tb_s,
    },
    "work": {
        "flops": lambda r, preset: flops(preset),
    },
    "constant": {
        "calc": lambda r, *terms: [calculated(term) for term in terms],
    },
    "speed": {
        "matmul": lambda r, precision: ceiling(r, precision),
        "peak_speed": lambda r, gpu, precision: GPUS[gpu].tflops[precision],
        "without_a_cache": lambda r, tile: rounded_copy(r) * flop_per_byte(tile),
    },
}
KIND_OF = {name: kind for kind, named in FACTS.items() for name in named}
TWO = "backward_over_forward_of_two_starts losses longer_backwards alone_on_each_of_four attention".split()
TWO += ["start_phase", "imports_of_starts"]
SEVERAL = {"phases": 3, "gain_with_range": 3} | dict.fromkeys(TWO, 2)  # how many values these take from the record


def values_of(record, words):
    """Return what a marker's words name: values, None for what is not measured, and {unit: its size}.

    ValueError where the words name nothing.
    """
    if words[-2:-1] == ["on"]:
        record = newest_of(words[-1])
        words = words[:-2]
    name, *words = words
    if name not in KIND_OF:
        raise ValueError(f"maintain/facts.py has no {name}")
    kind = KIND_OF[name]
    try:
        found = FACTS[kind][name](record, *words)
    except NotMeasured:
        found = [None for _ in range(SEVERAL.get(name, 1))]
    except (TypeError, KeyError):  # words that are too many, too few or unknown
        raise ValueError(f"{name} does not take these words") from None
    return found if isinstance(found, list) else [found], UNITS[kind]
