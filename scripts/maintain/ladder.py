"""Generate the measured tables, pictures and numbers of the pages from the newest recorded run.

    python scripts/maintain/ladder.py                # do the pages say what was recorded, and did the commit run it?
    python scripts/maintain/ladder.py --write        # put tables, numbers and links to pictures into all pages
    python scripts/maintain/ladder.py --draw         # draw the pictures, which needs matplotlib

A recorded run is a folder that maintain/record.sh wrote. A table goes wherever a page has its markers, and so does a
number of maintain/facts.py. In the ladder and in vocabulary, "..." means that nothing was measured.

    ladder, ladder_small, peers, vocabulary                the parts whose names begin like that
    v1 to v4, v1_v3                                        the part headline
    graph, kernels, ablation2, ablation3, ddp              the part of that name
    starts                                                 the parts start-small and start-medium
    traces, traces_made, traces_read                       the part trace
    expected                                               all ladders of medium, and formulas/gpus.py's data sheets
    rivals                                                 the newest part kernels that timed them, all its runs
    tested_on                                              all recorded runs, inspect_kernels.py's targets,
                                                           tests/tools/stubs, common/machine/constraints*.txt

If the newest run lacks a part, it comes from the newest run that has it, and the line above the table says so. Headline
and ladder always come from the newest run.

Exit status: 0; 1 if a page differs, or without matplotlib; 2 for a bad option or a file that can't be read.
"""

import json
import os
import pathlib
import re
import statistics
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import fusion_ablation_study as ablation
from common.command_line import PRESETS, SHORT_PRECISIONS, Failure, Parser
from common.formulas.occupancy import TARGETS
from common.machine.environment import numbers, rocm_builds
from common.measuring.suite_results import MODELS, SCRIPT_OF, configurations, ratios_between, table_of
from common.profiles.formats import table_of_formats
from common.ratios import counted, furthest, gain_text, noise_line, noisiest, noisiest_line, ratios
from common.tables import known, markdown_table, rounded
from common.versions import REPOSITORY, SCRIPTS
from maintain import facts, pictures, room_reports, rungs, warm_up
from maintain.expected import expected_table
from maintain.pages import all_pages, fill, fill_facts, write_or_check
from maintain.provenance import faults_of_commit, machine_line
from maintain.records import RECORDED, Record, newest_record
from maintain.traces import traces_texts


def origin(record, recorded):
    """Return one line that says where a part was measured."""
    return f"Measured on {machine_line(record)}; `scripts/recorded/{recorded.folder.name}`."


def explained(results):
    """Return what a row's numbers are, in short sentences."""
    repeats = sorted({row["repeats"] for row in results["rows"]})
    count = counted(repeats[-1], "run")
    if repeats[0] < repeats[-1]:
        count = f"{repeats[0]} to {count}"
    gradients = " The gradient error is that of the worst parameter, compared with V1 in fp32."
    return (
        f"Step times are medians with quartiles, over {count} per row. The rows took turns on one machine. "
        f"Peak memory is the largest that we saw.{gradients if results['accuracy'] else ''}"
    )


def suite_table(recorded, part, keep=lambda model: True):
    """Return the rows of a part, one table per preset; None without any."""
    results = recorded.suite(part)
    shown = [row for row in results["rows"] if keep(row["model"])]
    if not shown:
        return None
    metrics = ["throughput", "memory"]
    if any(row["gradient_error"] is not None for row in shown):
        metrics.append("accuracy")
    parts = [origin(results["record"], recorded), explained(results)]
    for title, rows in configurations(shown).items():
        parts += [f"**{title}**", markdown_table(*table_of(rows, metrics), left=3)]
    return "\n\n".join(parts)


# ---------------------------------------------------------------- the ladder

EMPTY = "..."  # not measured yet
ROADS = "**from here there are three roads, and each row bundles several ideas**"


def step_cell(column, name):
    if column is None or name not in column.rungs:
        return EMPTY
    return rounded(column.step_ms(name), 4) if column.step_ms(name) else column.told[name]["status"]


def gain_cell(columns, rung):
    """Return the gain in a graph, or the eager one where no graph was measured."""
    for column, remark in zip(columns, ("", ", eager"), strict=True):
        found = column and column.gain(rung.name, rung.base)
        if found:
            return f"{found}{remark}"
    return EMPTY


def linked(idea):
    """Return a rung's text with a link to the page of each version that it names."""
    return re.sub(r"version (\d)", lambda m: f"[version {m[1]}]({SCRIPTS[int(m[1])].parent}/README.md)", idea)


def parts_of(name, *columns):
    """Return what a rung said of its parts, versions of libraries among them; None where it was not measured."""
    found = [column.told[name].get("parts") for column in columns if column and name in column.told]
    return next(filter(None, found), None)


def tuning_of(name, *columns):
    """Return how a tuned rung's options were found, in words; nothing for others."""
    found = [column.told[name].get("tuning") for column in columns if column and name in column.told]
    if not any(found):
        return ""
    tuning = next(filter(None, found))
    variants = counted(len(tuning["steps_ms"]), "variant")
    return f" (the fastest of {variants}, tuned in {known(tuning['seconds'], '.0f')} s)"


def ladder_table(recorded, preset):
    """Return the ladder of a preset: each rung's gain over its base, and its steps with a graph and eager."""
    columns = rungs.columns_of(recorded, "ladder")
    graph, eager = columns.get((preset, True)), columns.get((preset, False))
    lines = []
    recipes = []
    first_road = next((rung for rung in rungs.LADDER if rung.road), None)
    for rung in rungs.LADDER:
        if rung is first_road:
            lines.append(["", ROADS, "", "", "", ""])
        if rung.version == "peer" and (parts := parts_of(rung.name, graph, eager)):
            recipes.append(f"- {rung.idea}: {parts}{tuning_of(rung.name, graph, eager)}")
        steps = [step_cell(column, rung.name) for column in (graph, eager)]
        cell = gain_cell((graph, eager), rung) if rung.base else ""
        name = "" if rung.version == "peer" else rung.name
        lines.append([name, linked(rung.idea), cell, *steps, rung.base or ""])
    texts = [
        markdown_table(["", "idea", "gain", "with a graph, ms", "eager, ms", "builds on"], lines, left=2, links=True)
    ]
    if recipes:
        texts.append("\n".join(["What the rows without a letter ran:", "", *recipes]))
    measured = [column for column in (graph, eager) if column]
    return "\n\n".join([*texts, *leads_table(measured), *(told_of(column, recorded) for column in measured)])


def leads_table(columns):
    """Return a table of the leads over the peers, with a column for each of these; nothing where none was measured."""
    ideas = {rung.name: rung.idea for rung in rungs.LADDER}  # a record keeps the words of its time
    lines = []
    for name, peer in dict.fromkeys(pair for column in columns for pair in column.over_peers()):
        found = [column.gain(name, peer) for column in columns]
        if any(found):
            lines.append([ideas[peer], *(str(gain or EMPTY) for gain in found)])
    return [markdown_table(["version 3 over", *(column.way for column in columns)], lines)] if lines else []


def span(numbers, word="round"):
    """Return "6 rounds", or "6 to 12 rounds"."""
    least = f"{min(numbers)} to " if min(numbers) < max(numbers) else ""
    return least + counted(max(numbers), word)


def row_title(name):
    """Return how a sentence names a row of the ladder: "row g (compiler)"."""
    rung = rungs.by_name(rungs.LADDER).get(name)
    if rung is None or not rung.shown:
        return f"row {name}"
    return f"row {rung.shown}" if rung.version == "peer" else f"row {name} ({rung.shown})"


def told_of(column, recorded):
    """Return what stands below a ladder about a column: its noise, and where it was measured."""
    rounds = [len(times) for name in column.rungs for times in column.medians(name) if times]
    lines = [f"**{column.way.capitalize()}.**"]
    if pair := column.pair():
        lines.append(f"{noise_line(row_title(column.content['again']), furthest(ratios(*pair)))}.")
        name, percent = column.noisiest()
        lines.append(f"{noisiest_line(row_title(name), percent)}.")
    lines.append(f"We measured {span(rounds)} over {counted(column.starts(), 'start')}.")
    if len(column.rounds) > column.turns():
        lines.append(memory_line([column]))
    lines.append(origin(column.content["record"], recorded))
    return " ".join(lines)


def memory_line(columns):
    """Return why a gain has fewer rounds than a row: one that others are compared with is in each of their groups."""
    pairs = [(column, pair) for column in columns for pair in [*column.over_peers(), *column.over_bases()]]
    gains = [gain for column, (name, base) in pairs if (gain := column.gain(name, base))]
    shared = span([gain.rounds for gain in gains])
    return f"Memory doesn't hold all rows at once, so a gain uses the {shared} that ran both of its rows."


def ladders_of_gpus(recorded):
    """Return (record, column) of medium in a graph, of this record and of all others that have it."""
    others = [folder for folder in sorted(recorded.folder.parent.glob("*")) if folder != recorded.folder]
    records = [recorded, *map(Record, others)]
    found = [(record, rungs.columns_of(record, "ladder").get(("medium", True))) for record in records]
    return [(record, column) for record, column in found if column]


def other_gpus_table(recorded):
    """Return medium's ladder in a graph on this record's GPU beside those of other records; None without any."""
    found = ladders_of_gpus(recorded)
    if len(found) < 2 or found[0][0] is not recorded:
        return None
    lines = []
    for rung in rungs.LADDER:
        line = [rung.shown if rung.version == "peer" else rung.name]
        for _, column in found:
            line += [step_cell(column, rung.name), gain_cell((column, None), rung) if rung.base else ""]
        lines.append(line)
    header = [""]
    for _, column in found:
        header += [f"{column.content['record']['device']}, ms", "gain"]
    told = [text for record, column in found[1:] for text in (*leads_table([column]), told_of(column, record))]
    return "\n\n".join([markdown_table(header, lines, left=1), *told])


def peers_table(recorded):
    """Return a row for each way to run the peer: its steps over presets and lengths, a precision's fastest in bold.

    Where a way was measured again, the newest counts. Memory and the time to get ready are the last preset's.
    """
    columns = [*rungs.all_columns(recorded, "peers"), *rungs.all_columns(recorded, "peers", rungs.LONG)]
    if not columns:
        return None
    ways = {}  # {name: Rung}, in the order of rungs.PEERS
    newest = {}  # {(preset, options): {name: Column}}
    for column in columns:
        sizes = column.content["preset"], column.content["options"]
        for name, rung in column.rungs.items():
            if column.told[name]["status"] != "not run":
                ways[name] = rung
                newest.setdefault(sizes, {})[name] = column
    order = [*rungs.by_name([*rungs.PEERS, rungs.SLOW_PEER]), *ways]
    newest = dict(sorted(newest.items(), key=lambda way: (way[0][1] != "", PRESETS.index(way[0][0]))))
    last = next(preset for preset, options in reversed(newest) if not options)
    lines = []
    words = {tuple(rung.options): rung.idea for rung in [*rungs.PEERS, rungs.SLOW_PEER]}  # a record keeps older ones
    ideas = {name: words.get(tuple(rung.options), rung.idea) for name, rung in ways.items()}
    for name in sorted(ways, key=order.index):
        steps = [peer_cell(name, ways[name], found) for found in newest.values()]
        told = newest[last, ""][name].told[name] if name in newest[last, ""] else {}
        lines.append([ideas[name], *steps, known(told.get("peak_mib"), ",.0f"), known(told.get("warm_s"), ".0f")])
    header = ["variant"]
    header += [f"{preset}, {rungs.LONG_SHOWN}, ms" if options else f"{preset}, ms" for preset, options in newest]
    measured = dict.fromkeys(column for found in newest.values() for column in found.values())
    reasons = [f"{column.title}: {ideas[name]}: {told['reason']}" for column in measured
               for name, told in column.told.items() if told["reason"]]  # fmt: skip
    texts = [markdown_table([*header, f"{last}, peak MiB", f"{last}, ready after, s"], lines), *reasons]
    return "\n\n".join([*texts, *dict.fromkeys(origin(column.content["record"], recorded) for column in measured)])


def peer_cell(name, rung, columns):
    """Return the step of a way to run the peer; bold if none of its precision was faster. columns: {name: Column}"""
    if name not in columns or not columns[name].step_ms(name):
        return step_cell(columns.get(name), name)
    rivals = [other for other, column in columns.items() if column.rungs[other].precision == rung.precision]
    steps = [columns[other].step_ms(other) for other in rivals]
    fastest = columns[name].step_ms(name) == min(filter(None, steps))
    return f"**{step_cell(columns[name], name)}**" if fastest else step_cell(columns[name], name)


def peak_cell(column, name):
    """Return a row's peak memory in MiB, or what stands for its time where it has none."""
    if column is None or not column.step_ms(name):
        return step_cell(column, name)
    return f"{column.told[name]['peak_mib']:,.0f}"


def vocabulary_table(recorded):
    """Return step, gains and peak memory over the number of vocabulary entries; "..." where nothing was measured."""
    columns = rungs.columns_over_vocabulary(recorded)
    across = [columns.get(V) for V in rungs.VOCABULARIES]
    ideas = {rung.name: rung.idea for rung in rungs.VOCABULARY}
    compared = [(rung.name, other) for rung in rungs.VOCABULARY for other in (rung.base, *rung.peers) if other]
    steps = [[idea, *(step_cell(column, name) for column in across)] for name, idea in ideas.items()]
    peaks = [[idea, *(peak_cell(column, name) for column in across)] for name, idea in ideas.items()]
    gains = []
    for name, other in compared:
        found = [column and column.gain(name, other) for column in across]
        gains.append([f"{ideas[name]}, over {ideas[other]}", *(str(gain) if gain else EMPTY for gain in found)])
    texts = []
    for name, lines in (("step, ms", steps), ("speed-up (smallest to largest)", gains), ("peak, MiB", peaks)):
        texts.append(markdown_table([name, *(f"V = {V:,}" for V in rungs.VOCABULARIES)], lines))
    measured = columns.values()
    if measured:
        rounds = [len(times) for column in measured for name in column.rungs for times in column.medians(name) if times]
        told = f"We measured {span(rounds)} "
        told += f"over {span([c.starts() for c in measured], 'start')}"
        pairs = [furthest(ratios(*pair)) for column in measured if (pair := column.pair())]
        if pairs:
            told += f". {noise_line(next(iter(measured)).content['again'], max(pairs))}"
        lines = [f"{told}."]
        if any(len(column.rounds) > column.turns() for column in measured):
            lines.append(memory_line(measured))
        texts.append(" ".join([*lines, *dict.fromkeys(origin(c.content["record"], recorded) for c in measured)]))
    return "\n\n".join(texts)


def graph_table(recorded):
    """Return the steps launched one operation at a time, and the same ones replayed from a graph."""
    results = recorded.suite("graph")
    captured = [row for row in results["rows"] if row["captured"]]
    measured = {row["case"]: row for row in results["rows"]}
    lines = []
    few = 0
    for row in captured:
        eager = measured.get(row["case"]._replace(graph=False))
        if not eager:
            continue
        found = ratios_between(row["case"], eager["case"], results["runs"])
        few = max(few, found.rounds if found and found.missing else 0)
        ratio = found.range_text() if found else "-"
        name = [row["preset"], MODELS.get(row["model"], row["model"]), SHORT_PRECISIONS[row["precision"]]]
        lines.append([*name, rounded(eager["step_ms"], 4), rounded(row["step_ms"], 4), ratio])
    if not lines:
        return None
    told = origin(results["record"], recorded)
    if few:
        told += f" {counted(few, 'round')} can't settle a small difference."
    ratio = "eager / graph" if few == 1 else "eager / graph (smallest to largest)"
    header = ["preset", "", "precision", "eager ms", "graph ms", ratio]
    return f"{told}\n\n{markdown_table(header, lines, left=3)}"


# ---------------------------------------------------------------- the other parts


RIVALS = ("torch.compile", "Liger")  # beside PyTorch's own function, which every record has


def kernels_of_rivals(folder):
    """Return record.json, Record and runs of the newest part kernels below a folder that timed rivals, or None.

    Each file kernels*.json is a run of its own.
    """
    found = []
    for record in folder.glob("*/kernels/record.json"):
        runs = [json.loads(path.read_text()) for path in sorted(record.parent.glob("kernels*.json"))]
        operations = [operation for run in runs for operation in run["operations"]]
        if any(c["name"] in RIVALS for operation in operations for c in operation["candidates"]):
            found.append((json.loads(record.read_text()), Record(record.parents[1]), runs))
    return max(found, key=lambda one: one[0]["date"], default=None)


def against_v3(runs):
    """Return for each operation its name, version 3's times in us, and for each candidate its ratios, run by run."""
    found = []
    for operation in zip(*(run["operations"] for run in runs), strict=True):
        us = [{c["name"]: c["us"]["median"] for c in run["candidates"] if "us" in c} for run in operation]
        names = [name for name in us[0] if name != "V3" and all(name in times for times in us)]
        ratios_of = {name: [times[name] / times["V3"] for times in us] for name in names}
        found.append((f"{operation[0]['operation']}, {operation[0]['size']}", [times["V3"] for times in us], ratios_of))
    return found


def rivals_table(folder):
    """Return each of version 3's kernels beside its rivals, from the newest record below a folder that timed them.

    A kernel whose only rival is PyTorch is not in the table. A candidate that was faster is named all the same.
    """
    newest = kernels_of_rivals(folder)
    if not newest:
        return None
    record, recorded, runs = newest
    names = ("PyTorch", *RIVALS)
    lines = []
    faster = []
    for name, us, ratios_of in against_v3(runs):
        faster += [f"{rival}'s {name}" for rival, found in ratios_of.items() if max(found) < 1]
        if ratios_of.keys() & {*RIVALS}:
            cells = [with_range(ratios_of[rival]) if rival in ratios_of else "-" for rival in names]
            lines.append([name, f"{statistics.median(us):,.1f}", *cells])
    told = f"{counted(len(runs), 'run')}, one after the other. Faster than V3's in every run: {'; '.join(faster)}."
    header = ["V3's kernel", "V3 us", *(f"{name}'s time / V3's" for name in names)]
    return f"{origin(record, recorded)} {told}\n\n{markdown_table(header, lines)}"


def with_range(ratios):
    """Return the median of ratios, and the smallest and largest where they print otherwise."""
    low, high = (f"{ratio:.2f}" for ratio in (min(ratios), max(ratios)))
    return f"{statistics.median(ratios):.2f}" + (f" ({low} to {high})" if low != high else "")


def kernels_table(recorded):
    """Return each of version 3's kernels with the ceiling and PyTorch's time."""
    kernels = recorded.json("kernels", "kernels.json")
    operations = kernels["operations"] if kernels else []
    lines = []
    faster = []
    for operation in operations:
        timed = {c["name"]: c for c in operation["candidates"] if "us" in c and c["name"] not in RIVALS}
        if ours := timed.pop("V3", None):
            ratios_of = {name: one["us"]["median"] / ours["us"]["median"] for name, one in timed.items()}
            name = f"{operation['operation']}, {operation['size']}"
            faster += [f"{rival}'s {name} ({ratio:.2f})" for rival, ratio in ratios_of.items() if ratio < 1]
            sdpa = min((rival for rival in timed if rival.startswith("SDPA")), key=ratios_of.get, default=None)
            if sdpa:
                cells = [f"{ratios_of[sdpa]:.2f}, {sdpa.removeprefix('SDPA ')}"]
            else:
                cells = [f"{ratios_of['PyTorch']:.2f}" if "PyTorch" in ratios_of else "-"]
            cells += [f"{ours['us']['median']:.1f}", f"{ours['rate']:,.0f} {operation['unit']}"]
            cells.append(f"{100 * ours['share']:.0f} %")
            lines.append([name, *cells])
    if not lines:
        return None
    rates = ", ".join(f"{SHORT_PRECISIONS[p]} {rate:,.0f}" for p, rate in kernels["ceilings"]["product"].items())
    copy = f"A large copy reaches {kernels['ceilings']['copy']:,.0f} GB/s (bytes read plus bytes written)"
    matmuls = f"8192³ matmuls reach {rates} TFLOP/s"
    header = ["V3's kernel", "PyTorch's time / V3's", "V3 us", "rate", "of the ceiling"]
    told = f"{copy}, and {matmuls}. Each kernel ran on its own, in {SHORT_PRECISIONS[kernels['dtype']]}."
    if faster:
        told += f" Faster than V3's, with their time / V3's: {'; '.join(faster)}."
    return f"{origin(kernels['record'], recorded)} {told}\n\n{markdown_table(header, lines)}"


EXPLAINED_STARTS = ("h", "j", "k")  # the rungs whose phases are shown


def starts_table(recorded):
    """Return the seconds from each script's start to its first measured step, and the phases of versions 3 and 4."""
    parts = warm_up.parts_of(recorded)
    if not parts:
        return None
    presets = warm_up.presets_of(parts)
    totals = []
    phases = []
    for name in next(iter(presets.values())):
        seconds = [warm_up.total_s(found[name], way) for found in presets.values() for way in warm_up.WAYS]
        cells = [warm_up.with_range(total) if total else EMPTY for total in seconds]
        totals.append([warm_up.title_of(name), *cells])
        for preset, found in presets.items():
            if name in EXPLAINED_STARTS and warm_up.finished(found[name]):
                seconds = [warm_up.phases_s(found[name], way) for way in warm_up.WAYS]
                cells = [" / ".join(f"{one[phase]:.1f}" for one in seconds) for phase in warm_up.PHASES]
                phases.append([f"{warm_up.title_of(name)}, {preset}", *cells])
    header = ["", *(text for preset in presets for text in (f"{preset}, caches empty", "filled"))]
    tables = [
        starts_origins(recorded, parts),
        "Median seconds (smallest to largest):",
        markdown_table(header, totals),
        "Where they go, with empty / filled caches (medians):",
        markdown_table(["", *warm_up.PHASES], phases),
    ]
    return "\n\n".join(tables)


def starts_origins(recorded, parts):
    """Return where each preset's starts were measured and how often, one line for all that agree."""
    presets_of_line = {}
    for name, part in zip(warm_up.PARTS, parts, strict=True):
        for preset, found in part["presets"].items():
            counts = sorted({len(warm_up.finished(starts)) for starts in found.values()})
            where = origin(part["record"], recorded.holding(name))
            line = f"{where} {' or '.join(map(str, counts))} starts of each, in turns."
            presets_of_line.setdefault(line, []).append(preset)
    return "\n\n".join(f"{' and '.join(presets)}: {line}" for line, presets in presets_of_line.items())


def changes(study, switch, key):
    """Return by how much a switch changes a value alone, and as the last one switched on, as text."""
    values = {frozenset(row["on"]): row[key] for row in study["combinations"]}
    every = frozenset(row["switch"] for row in study["switches"])
    pairs = [(frozenset(), frozenset([switch])), (every - {switch}, every)]
    found = [(values.get(before), values.get(after)) for before, after in pairs]
    return ", ".join("-" if None in pair else f"{round(pair[1] - pair[0]):+,}" for pair in found)


def ablation_table(recorded, part):
    """Return what each switch is worth alone, and as the last one switched on."""
    study = recorded.json(part, "ablation.json")
    if not study:
        return None
    steps = {frozenset(row["on"]): row["step_ms"] for row in study["combinations"]}
    switches = [row["switch"] for row in study["switches"]]
    none, every = steps.get(frozenset()), steps.get(frozenset(switches))
    found = ablation.worth(study["combinations"], switches, study.get("again_ms", ()))
    lines = []
    few = set()
    for row in found:
        gains = [row["alone"], row["last"]]
        few |= {gain.missing for gain in gains if gain and gain.missing}
        cells = [gain_text(gain) for gain in gains]
        cells += [changes(study, row["switch"], key) for key in ("peak_memory_mb", "kernels")]
        lines.append([row["switch"], *cells])
    told = f"A step takes {rounded(none, 4)} ms with all switches off and {rounded(every, 4)} ms with all on. "
    if few:
        told += f"Not judged: {', '.join(sorted(few))}. "
    elif noise := ablation.pair_of(study["combinations"], switches, study.get("again_ms", ())):
        told += f"{noise_line('the step with all on', furthest(ratios(*noise)))}. "
        runs = {row["name"]: row["steps_ms"] for row in study["combinations"] if row["steps_ms"]}
        name, percent = noisiest(runs)
        told += f"{noisiest_line(repr(name), percent)}. "
        told += f"We measured {counted(len(noise[0]), 'round')}. "
    told += "Alone: all others are off. Last: all others are on."
    header = ["switch", "speed-up alone", "speed-up last"]
    header += ["peak MiB (alone, last)", "kernels per step (alone, last)"]
    return f"{origin(study['record'], recorded)} {told}\n\n{markdown_table(header, lines)}"


# ---------------------------------------------------------------- what was tested where


def scripts_that_ran(record):
    """Return (record of the run, version) for each script that ran in a headline, a ladder or the starts."""
    suite = record.suite()
    ran = [(suite["record"], row["model"][1]) for row in suite["rows"] if re.match(r"v\d", row["model"])]
    for column in rungs.all_columns(record, "ladder"):
        finished = [told for told in column.told.values() if told["status"] == "ok"]
        ran += [(column.content["record"], str(told["version"])) for told in finished]
    for part in filter(None, (record.json(name, warm_up.FILE) for name in warm_up.PARTS)):
        started = [
            name for found in part["presets"].values() for name, starts in found.items() if warm_up.finished(starts)
        ]
        ran += [(part["record"], str(warm_up.KNOWN[name].version)) for name in started]
    return [(found, version) for found, version in ran if version != "peer"]


def executed(recorded):
    """Return a row per device and versions of the software, of all records below the folder, newest first."""
    dates, versions = {}, {}
    for folder in [*recorded.glob("*"), *recorded.glob("contributed/*")]:
        for found, version in scripts_that_ran(Record(folder)):
            runtime = found["runtime"].replace("HIP", "ROCm")
            driver = f"driver {found['driver']}" if found["driver"] else "driver not recorded"
            packages = (
                f"{driver}, PyTorch {found['packages']['torch']}, Triton {found['packages']['triton']}, {runtime}"
            )
            machine = (found["device"], packages)
            dates[machine] = max(found["date"][:10], dates.get(machine, ""))
            versions.setdefault(machine, set()).add(version)
    newest = sorted(dates, key=lambda machine: (dates[machine], machine), reverse=True)
    told = {machine: f"versions {', '.join(sorted(versions[machine]))}; last on {dates[machine]}" for machine in newest}
    return [("executed", *machine, what) for machine, what in told.items()]


def versions_of(name):
    """Return "PyTorch 2.7.1 with Triton 3.3.1" of a set of versions."""
    text = (REPOSITORY / "scripts" / "common" / "machine" / name).read_text()
    least = {key: min(re.findall(rf"^{key}==([\d.]+)", text, re.MULTILINE), key=numbers) for key in ("torch", "triton")}
    return f"PyTorch {least['torch']} with Triton {least['triton']}"


def executed_with():
    """Return the versions that compiled the kernels of the interpreter's last manual run, from its page."""
    page = (REPOSITORY / "scripts" / "amd" / "RESULTS.md").read_text()
    triton, pytorch = re.search(r"Triton ([\d.]+), PyTorch ([\d.]+)", page).groups()
    return f"PyTorch {pytorch} with Triton {triton}"


def tested_on(recorded):
    """Return what ran on which platform, from the records below a folder."""
    rows = executed(recorded)
    sets = f"{versions_of('constraints-oldest.txt')} to {versions_of('constraints.txt')}"
    stubs = REPOSITORY / "tests" / "tools" / "stubs"
    read = json.loads((stubs / "options.json").read_text())["read, not run"]["rocprofv3"]
    ran = sorted({path.name[5:] for path in stubs.glob("rocm-*")} - {*read}, key=numbers)
    releases = ", ".join(f"{major}.{minor}" for major, minor in rocm_builds())
    devices = " ".join(device for _, device, _, _ in rows)
    amd = "" if re.search("AMD|Radeon", devices) else "any AMD GPU, "
    rows += room_reports.rows_of_rooms(recorded / "rooms")
    rows += [
        ("executed", "CPU, Linux on x86-64", sets, "test suite; Triton's kernels in its interpreter"),
        (
            "executed in our interpreter of AMD's instructions",
            ", ".join(name for name, target in TARGETS.items() if target.backend == "hip"),
            ", ".join(dict.fromkeys((executed_with(), versions_of("constraints.txt")))),
            "version 3's kernels, forward and backward, in float32, bfloat16 and float16, and those of fp8 on gfx942, "
            "gfx950 and gfx1201 (but not PyTorch's fp8 matmuls)",
        ),
        ("compiled", ", ".join(TARGETS), "", "version 3's kernels: registers, LDS, spills"),
        ("run against stubs", f"profilers of ROCm {', '.join(ran)}", "", "wrappers: command lines, result files"),
        ("read, not run: stubs of sources and changelogs", f"profilers of ROCm {', '.join(read)}", "", "the same"),
        (
            "run against stubs",
            f"machines with ROCm {releases}; NVIDIA drivers for CUDA 11 to 13",
            "",
            "quickstart's choice of a PyTorch build",
        ),
        ("not tried", f"{amd}aarch64, macOS, Windows (in WSL it's Linux)", "", ""),
    ]
    return markdown_table(["", "platform", "versions", "what"], rows, left=4)


# ---------------------------------------------------------------- pages

LINKED = r'(?<= src=")/[^"]+|(?<= srcset=")/[^"]+|(?<=\]\()/[^)]+'  # paths from the root of the file system


def tables_of(recorded):
    """Return {name of a table: its text} of all tables that the run has the measurements for."""
    made = {}
    for name in (f"v{version}" for version in SCRIPTS):
        made[name] = suite_table(recorded, "headline", lambda model, name=name: model.split("+")[0] == name)
    made |= {"v1_v3": suite_table(recorded, "headline", lambda model: model in ("v1", "v3"))}
    made |= {"ladder": ladder_table(recorded, "medium"), "ladder_small": ladder_table(recorded, "small")}
    made |= {"peers": peers_table(recorded.holding("peers")), "other_gpus": other_gpus_table(recorded)}
    made |= {"vocabulary": vocabulary_table(recorded.holding("vocabulary-*"))}
    made |= {"graph": graph_table(recorded.holding("graph")), "kernels": kernels_table(recorded.holding("kernels"))}
    made |= {"starts": starts_table(recorded)}
    made |= {"ddp": suite_table(recorded.holding("ddp"), "ddp")}
    made |= {part: ablation_table(recorded.holding(part), part) for part in ("ablation2", "ablation3")}
    made |= {"expected": expected_table([column for _, column in ladders_of_gpus(recorded)])}
    made |= traces_texts(recorded, origin)
    made |= {
        "rivals": rivals_table(recorded.folder.parent),
        "formats": table_of_formats(),
        "tested_on": tested_on(RECORDED),
    }
    return {name: text for name, text in made.items() if text}


SUITES = ("headline", "graph", "ddp", "ddp_four_gpus")  # the parts that benchmark_suite.py writes


def faults_of_record(recorded):
    """Return which scripts that ran are not those of their commit."""
    faults = []
    for part in SUITES:
        results = recorded.holding(part).suite(part)
        ran = {(run["case"].script, run["script_sha256"]) for run in results["runs"]}
        if ran:
            faults += faults_of_commit(results["record"]["commit"], ran)
    columns = [column for record, column in ladders_of_gpus(recorded) if record is not recorded]
    columns += rungs.all_columns(recorded.holding("peers"), "peers")
    columns += rungs.columns_over_vocabulary(recorded.holding("vocabulary-*")).values()
    columns += rungs.all_columns(recorded, "ladder", rungs.LONG)
    for column in [*rungs.all_columns(recorded, "ladder"), *columns]:
        ran = {(rungs.script_of(rung), column.told[name]["script_sha256"]) for name, rung in column.rungs.items()}
        faults += faults_of_commit(column.content["record"]["commit"], ran)
    kernels = recorded.holding("kernels").json("kernels", "kernels.json")
    timed = [(kernels["record"], [kernels])] if kernels else []
    if newest := kernels_of_rivals(recorded.folder.parent):
        timed.append((newest[0], newest[2]))
    for part in warm_up.parts_of(recorded):
        started = {name for starts in part["presets"].values() for name in starts}
        ran = {(rungs.script_of(warm_up.KNOWN[name]), part["script_sha256"][name]) for name in started}
        faults += faults_of_commit(part["record"]["commit"], ran)
    for record, runs in timed:
        ran = {(SCRIPT_OF["v3"], run["environment"]["script_sha256"]) for run in runs if "environment" in run}
        faults += faults_of_commit(record["commit"], ran)
    return [*dict.fromkeys(faults)]


def filled(page, tables, recorded):
    """Return the text of a page as it should be, and its faulty markers; links lead from the page to other files."""
    text = fill(page.read_text(encoding="utf-8"), tables)
    if page.parent.name == "slides":  # which are light, whatever the reader's screen is
        text = re.sub(r"</?picture>\n|<source .*>\n|\n</picture>", "", text)
    text = re.sub(LINKED, lambda match: os.path.relpath(match[0], page.parent), text)
    text, faults = fill_facts(text, lambda words: facts.values_of(recorded, words))
    return text, [f"{page.name}: {fault}" for fault in faults]


def work(options):
    recorded = newest_record()
    paths = all_pages()
    try:
        tables = tables_of(recorded) | pictures.texts_of(recorded, options.draw)
    except ImportError:
        raise Failure(1, "the pictures need matplotlib: pip install '.[plots]'") from None
    found = {path: filled(path, tables, recorded) for path in paths}
    texts = {path: text for path, (text, _) in found.items()}
    status = write_or_check(texts, not options.write, "python scripts/maintain/ladder.py --write")
    faults = [fault for _, faulty in found.values() for fault in faulty]
    if not options.write:
        faults += [f"{recorded.folder.name}: {fault}" for fault in faults_of_record(recorded)]
    for fault in faults:
        print(fault, file=sys.stderr)
        status = 1
    print(f"{len(paths)} pages compared with {recorded.folder.name}")
    return status


def main(argv=None):
    parser = Parser("ladder.py", __doc__, with_json=False)
    parser.add_argument("--write", action="store_true", help="put tables, numbers and links into the pages")
    parser.add_argument("--draw", action="store_true", help="draw the pictures")
    return parser.run(work, argv)


if __name__ == "__main__":
    sys.exit(main())
