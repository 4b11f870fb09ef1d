"""The pictures of the pages: what each shows of a recorded run, how it is drawn, and a text for who cannot see it.

A picture lies in the run's folder pictures/, and is five inches wide: on a telephone its letters have the size of the
text around it.
"""

import io
import itertools
import math
import re
import statistics
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from common.formulas import counts
from common.formulas.occupancy import SIMDS, TARGETS
from common.ratios import gain_text
from common.tables import rounded
from common.versions import load_version
from fusion_ablation_study import worth
from maintain import rungs

BLUE, RED, YELLOW, GREEN, GREY = "#4477aa", "#ee6677", "#ccbb44", "#228833", "#666666"


def ink():
    """Return the color of axes and letters, black on a light page."""
    import matplotlib  # here: only who draws needs it

    return matplotlib.rcParams["text.color"]


def paper():
    """Return the color of the page."""
    import matplotlib

    return matplotlib.rcParams["axes.facecolor"]


def log_axis(ax, name, ticks):
    """Make an axis logarithmic, with plain numbers at these ticks only."""
    ax.set(**{f"{name}scale": "log"})
    axis = getattr(ax, f"{name}axis")
    axis.set_ticks(ticks, [f"{tick:,g}" for tick in ticks])
    axis.set_ticks([], minor=True)


def name_rows(ax, names):
    """Write names beside horizontal rows, the first one at the top."""
    ax.set_yticks(range(len(names)), names)
    ax.set_ylim(len(names) - 0.4, -0.6)
    ax.tick_params(axis="y", length=0)


# ---------------------------------------------------------------- the first picture, for who does not know the project

GREY, OURS, THEIRS = "#8b949e", "#3b82c4", "#d9730d"  # GitHub shows them on white or on black


def steps(recorded):
    """Return the GPU and [(rung, ms)] of medium in a graph, the slowest first; None where one has no time.

    Rungs that are newer than the record are left out.
    """
    column = rungs.columns_of(recorded, "ladder").get(("medium", True))
    if not column:
        return None
    wanted = [rung for rung in rungs.LADDER if rung.first_picture and rung.name in column.rungs]
    timed = [(rung, column.step_ms(rung.name)) for rung in wanted]
    if not timed or not all(ms for _, ms in timed):
        return None
    return {"device": column.content["record"]["device"], "ms": sorted(timed, key=lambda pair: -pair[1])}


def color_of(rung):
    if rung.version == "peer":
        return THEIRS
    return OURS if rung.peers else GREY


def draw_steps(axes, found):
    """Draw a bar per rung on an axis on which the fast ones can be told apart; cut longer bars, and write their ms."""
    (ax,) = axes
    timed = found["ms"]
    axis_end = 1.2 * next(ms for rung, ms in timed if rung.name == "peer")
    for place, (rung, ms) in enumerate(timed):
        shown = min(ms, axis_end)
        ax.barh(place, shown, 0.62, color=color_of(rung))
        weight = "bold" if rung.peers else "normal"
        ax.text(shown, place, f" {rounded(ms)} ms", va="center", weight=weight)
        if ms > axis_end:
            for at in (0.9, 0.925):
                ax.plot([at * axis_end, (at + 0.02) * axis_end], [place + 0.4, place - 0.4], color=paper(), lw=3)
    name_rows(ax, [rung.first_picture for rung, _ in timed])
    ax.set_xlim(0, 1.3 * axis_end)
    ax.spines["bottom"].set_bounds(0, axis_end)
    ax.set_xticks([tick for tick in range(0, 100, 5) if tick <= axis_end])
    ax.set_xlabel("ms per step (CUDA graph)")
    title = "One step of the same LLaMA: shorter is faster\n"
    ax.figure.suptitle(title, x=0.02, ha="left", weight="bold", fontsize=13)
    told = f"one {found['device']}; bfloat16, except the first bar"
    ax.figure.text(0.02, 0.89, told, va="center", fontsize=10)


def tell_steps(found):
    times = {rung.name: f"{rounded(ms)} ms" for rung, ms in found["ms"]}
    slowest = next(iter(times.values()))
    ours = next(times[rung.name] for rung, _ in found["ms"] if rung.peers)
    strongest = f", {times['library']} with the strongest stack around it" if "library" in times else ""
    libraries = f", {times['k']} with PyTorch's fused parts" if "k" in times else ""
    return (
        f"One training step takes {slowest} in plain PyTorch in float32. In bfloat16, it takes {times['peer']} with "
        f"Hugging Face's compiled LLaMA{strongest}{libraries} and {ours} with our Triton kernels."
    )


# ---------------------------------------------------------------- the ladder

SAVES = {"bits": RED, "launches": YELLOW, "bytes": BLUE, "launches and bytes": GREEN}


def label(rung):
    """Return how the pictures call a rung."""
    return rung.shown if rung.version == "peer" else f"{rung.name}  {rung.shown}"


def ladders(recorded, *wanted):
    """Return the ladder's columns of these (preset, in a graph); None where one lacks."""
    columns = rungs.columns_of(recorded, "ladder")
    return [columns[place] for place in wanted] if columns.keys() >= set(wanted) else None


def ladder_of_medium(recorded):
    return ladders(recorded, ("medium", True))


def both_ladders_at_small(recorded):
    return ladders(recorded, ("small", False), ("small", True))


def timed_rungs(column):
    """Return (place on the picture, rung, times of its rounds in ms) of the rungs that ran."""
    found = []
    for place, rung in enumerate(rungs.LADDER):
        if rung.name in column.rungs:
            (times,) = column.medians(rung.name)
            if times:
                found.append((place, rung, times))
    return found


def write_step(ax, place, times, right):
    """Draw the range of a rung's rounds, and write its step time to the right."""
    ax.hlines(place, min(times), max(times), color=ink(), lw=2)
    ax.text(right, place, f"  {rounded(statistics.median(times), 4)}", va="center", fontsize=10)


def name_steps(ax, columns):
    """Name the rungs, and make the steps' axis logarithmic with room for numbers at its end."""
    timed = [found for column in columns for found in timed_rungs(column)]
    steps = [step for _, _, times in timed for step in times]
    name_rows(ax, [label(rung) for rung in rungs.LADDER])
    for place in set(range(len(rungs.LADDER))) - {place for place, _, _ in timed}:
        ax.text(0.02, place, "...", transform=ax.get_yaxis_transform(), va="center", fontsize=10)
    log_axis(ax, "x", [tick for tick in (1, 2, 5, 10, 20, 50, 100, 200) if min(steps) / 2 < tick < 2 * max(steps)])
    ax.set_xlim(min(steps) / 1.3, 2.2 * max(steps))
    ax.set_xlabel("ms per step")
    ax.legend(loc="upper center", bbox_to_anchor=(0.4, 1.18), ncols=2, frameon=False, fontsize=10)


def draw_falls(axes, found):
    """Draw a bar from the step that each rung builds on to its own, which has a dot.

    Bars of equal length are equal ratios.
    """
    (ax,), (column,) = axes, found
    for saved, color in SAVES.items():
        ax.barh(0, 0, color=color, label=f"fewer {saved}")
    for place, rung, times in timed_rungs(column):
        step = column.step_ms(rung.name)
        base = step
        if rung.saves:
            base = column.step_ms(rung.base)
            ax.barh(place, step - base, 0.6, left=base, color=SAVES[rung.saves])
        ax.scatter(step, place, color=ink(), s=12, zorder=3)
        write_step(ax, place, times, max(base, *times))
    name_steps(ax, found)


def draw_pairs(axes, found):
    """Draw each rung's eager step and the one in a graph."""
    (ax,) = axes
    for way, color, column in zip(("eager", "with a graph"), (GREY, BLUE), found, strict=True):
        timed = timed_rungs(column)
        steps = [statistics.median(times) for _, _, times in timed]
        ax.scatter(steps, [place for place, _, _ in timed], color=color, zorder=3, label=way)
        for place, _, times in timed:
            write_step(ax, place, times, max(times))
    name_steps(ax, found)


def tell_ladders(found):
    told = []
    for column in found:
        steps = [f"{label(rung)} {rounded(statistics.median(times), 4)}" for _, rung, times in timed_rungs(column)]
        told.append(f"{column.title}: {', '.join(' '.join(step.split()) for step in steps)}")
    return f"The ladder, ms per step. {'; '.join(told)}."


# ---------------------------------------------------------------- levels of memory

# Bytes of the last cache before HBM, and of HBM.
CHIPS = {"NVIDIA H100": ("sm_90", 50e6, 80e9), "AMD MI300X": ("gfx942", 256 * 2**20, 192e9)}
LEVELS = ["shared memory, per unit", "registers, per unit", "shared memory, all", "registers, all", "last cache", "HBM"]
SIZES = {  # of medium in bfloat16, the scores in float32
    "a row of a norm": 2 * 1024,
    "a tile 64 x 64": 2 * 64 * 64,
    "a weight [4096, 1024]": 2 * 4096 * 1024,
    "scores of a layer": 4 * 16 * 16 * 512 * 512,
}


def levels(recorded):
    """Return {GPU: bytes of each of LEVELS}, from the limits that inspect_kernels.py uses; the same for every run."""
    found = {}
    for name, (target, cache, memory) in CHIPS.items():
        limits = TARGETS[target]
        registers = limits.registers * limits.warp_size * SIMDS * 4  # a register has four bytes
        unit = [limits.unit_shared, registers]
        found[name] = [*unit, *(limits.units * size for size in unit), cache, memory]
    return found


def in_bytes(size):
    """Return a size in powers of 1024, or of 1000 where the data sheet does."""
    base, letter = (1000, "") if size % 1e6 == 0 else (1024, "i")
    power = min(int(np.log2(size)) // 10, 3)
    return f"{size / base**power:,.3g} {('', 'K', 'M', 'G')[power]}{letter if power else ''}B"


def draw_levels(axes, found):
    (ax,) = axes
    box = {"color": paper(), "pad": 0.5}  # no dotted line crosses a word
    for shift, (name, sizes), color in zip((-0.2, 0.2), found.items(), (BLUE, RED), strict=True):
        for place, size in enumerate(sizes):
            ax.barh(place + shift, size - 1, 0.38, left=1, color=color, label=None if place else name)
            ax.text(1.4 * size, place + shift, in_bytes(size), va="center", fontsize=9, bbox=box)
    for place, (name, size) in enumerate(SIZES.items()):
        ax.axvline(size, color=ink(), lw=1, ls=":", zorder=0.9)  # behind the bars
        ax.text(1.25 * size, len(LEVELS) + 0.35 * place - 0.3, name, va="center", fontsize=9, bbox=box)
    name_rows(ax, LEVELS)
    ax.set_ylim(len(LEVELS) + 1.1, -0.6)
    log_axis(ax, "x", [])
    powers = (10, 20, 30)
    ax.set_xticks([2.0**power for power in powers], [in_bytes(2.0**power) for power in powers])
    ax.set_xlim(64, 3e13)
    ax.set_xlabel("size in bytes")
    ax.legend(loc="upper center", bbox_to_anchor=(0.4, 1.14), ncols=2, frameon=False)


def tell_levels(found):
    told = [
        f"{name}: {', '.join(f'{level} {in_bytes(size)}' for level, size in zip(LEVELS, sizes, strict=True))}"
        for name, sizes in found.items()
    ]
    held = ", ".join(f"{name} {in_bytes(size)}" for name, size in SIZES.items())
    return f"What each level of memory holds. {'; '.join(told)}. For comparison: {held}."


# ---------------------------------------------------------------- memory, switches, stages


def memory(recorded):
    """Return the peak memory of each version over the length of the sequences."""
    return recorded.json("memory", "memory.json")


def draw_memory(axes, found):
    (ax,), lengths = axes, found["lengths"]
    for row, color in zip(found["rows"], (GREY, BLUE, RED, GREEN), strict=False):
        points = [(n, peak / 1024) for n, peak in zip(lengths, row["peaks_mb"], strict=True) if peak]
        ax.plot(*zip(*points, strict=True), marker="o", color=color, lw=2, label=f"V{row['version']}")
        if len(points) < len(lengths):
            ax.annotate("  longer: out of memory", points[-1], color=color, va="center", fontsize=10)
    peaks = [peak / 1024 for row in found["rows"] for peak in row["peaks_mb"] if peak]
    log_axis(ax, "x", lengths)
    log_axis(ax, "y", [tick for tick in (1, 2, 5, 10, 20, 50, 100) if min(peaks) / 2 < tick < 2 * max(peaks)])
    ax.set(xlabel="tokens per sequence", ylabel="peak memory in GiB")
    ax.legend(frameon=False)


def tell_memory(found):
    last = []
    for row in found["rows"]:
        peak = row["peaks_mb"][-1]
        last.append(f"V{row['version']} {f'{peak / 1024:.1f} GiB' if peak else 'out of memory'}")
    return f"Peak memory by sequence length. At {found['lengths'][-1]:,} tokens: {', '.join(last)}."


def ablation(recorded):
    """Return what version 2's switches were worth, in the rows of fusion_ablation_study.worth()."""
    study = recorded.json("ablation2", "ablation.json")
    if not study:
        return None
    return worth(study["combinations"], [row["switch"] for row in study["switches"]], study.get("again_ms", ()))


def draw_ablation(axes, found):
    """Draw a bar for each gain that is shown, with a line from its smallest to its largest round."""
    (ax,) = axes
    for shift, color, key, label in ((-0.2, BLUE, "alone", "alone"), (0.2, RED, "last", "last")):
        for y, row in enumerate(found):
            gain = row[key]
            if gain and (gain.shown or gain.missing):
                ax.barh(y + shift, gain.ratio - 1, 0.38, left=1, color=color, label=None if y else label)
                ax.plot([gain.low, gain.high], [y + shift] * 2, color=ink(), lw=1.5)
                ax.text(max(1, gain.high), y + shift, f" {gain.ratio:.2f}x", va="center", fontsize=10)
            elif gain:
                ax.text(1, y + shift, f" {gain}", va="center", fontsize=10)
    name_rows(ax, [row["switch"] for row in found])
    ax.axvline(1, color=GREY, lw=1)
    ax.margins(x=0.25)
    ax.set_xlabel("times as fast (thin line: range of the rounds)")
    ax.legend(loc="upper center", bbox_to_anchor=(0.4, 1.2), ncols=2, frameon=False)


def tell_ablation(found):
    told = [f"{row['switch']} {gain_text(row['alone'])} and {gain_text(row['last'])}" for row in found]
    return f"Speed-up by each switch, alone and last: {'; '.join(told)}."


def stages(recorded):
    """Return what compare_stages.py printed of each stage."""
    path = recorded.folder / "stages" / "comparison.txt"
    found = []
    for line in path.read_text().splitlines() if path.exists() else []:
        cells = line.replace("%", "").split()
        if len(cells) > 11 and cells[9] == "->":
            step, *phases, peak = (float(cells[place]) for place in (1, 4, 5, 6, 7))
            row = {"step": step, "phases": phases, "peak": peak}
            found.append(row | {"loss": float(cells[8]), "trained": float(cells[11])})
    return found or None


def draw_stages(axes, found):
    (ax,) = axes
    y = np.arange(len(found))
    left = np.zeros(len(found))
    for phase, (name, color) in enumerate({"forward": BLUE, "backward": RED, "optimizer": YELLOW}.items()):
        widths = np.array([row["phases"][phase] for row in found])
        ax.barh(y, widths, 0.55, left=left, color=color, label=name)
        left += widths
    ax.vlines([row["step"] for row in found], y - 0.42, y + 0.42, color=ink(), lw=3, label="step, as timed")
    for place, row in enumerate(found):
        end = max(left[place], row["step"])
        ax.text(end, place, f"  loss {row['loss']:.0f}, {row['trained']:.0f} % trained", va="center", fontsize=10)
    name_rows(ax, [f"stage {stage + 1}" for stage in y])
    ax.set_xlim(-0.15, 1.65 * max(left))
    ax.set_xlabel("ms (loss: of the first step)")
    ax.legend(loc="upper center", bbox_to_anchor=(0.42, 1.28), ncols=2, frameon=False, fontsize=10)


def tell_stages(found):
    told = [f"stage {n}: {sum(row['phases']):.1f} and {row['step']:.2f}" for n, row in enumerate(found, 1)]
    return f"The phases added up, and the step as timed, in ms. {'; '.join(told)}."


ROOFLINE = {  # what benchmark_kernels.py timed -> the kernel, and the elements of its tensor at sizes s
    "SwiGLU forward": ("swiglu_forward_kernel", lambda s: s.B * s.T * s.F),
    "RoPE forward": ("rope_kernel", lambda s: s.B * s.T * (s.H + 2 * s.K) * s.D),  # q, k and v are packed
    "RMSNorm forward": ("rmsnorm_forward_kernel", lambda s: s.B * s.T * s.C),
    "cross-entropy forward": ("cross_entropy_forward_kernel", lambda s: s.B * s.T * s.V),
    "attention forward": ("attention_forward_kernel", None),  # counted at the sizes that were timed
}


def norm_alone(precision, sizes):
    """Return (FLOPs, bytes) of version 3's RMSNorm forward without a residual add, as the final norm runs it."""
    flops, _ = counts.operations(sizes._replace(L=0))["norms and residual"]
    final = counts.norm(sizes, 3, counts.ELEMENT_BYTES[precision], residual=False)
    return flops, sum(final.forward)


def rates(recorded):
    """Return {"copy" in GB/s, "top" in TFLOP/s, "points": [(name, FLOP per byte, TFLOP/s of V3, of PyTorch)]}."""
    found = recorded.json("kernels", "kernels.json")
    if not found:
        return None
    medium = counts.sizes_of(load_version(1).parse_options(["--preset", "medium"]))
    points = []
    for one in (one for one in found["operations"] if one["operation"] in ROOFLINE):
        name, sizes = one["operation"].removesuffix(" forward"), medium
        kernel, elements = ROOFLINE[one["operation"]]
        if name == "attention":
            batch, tokens = map(int, re.match(r"batch (\d+), (\d+) tokens", one["size"]).groups())
            name = f"{name}, {tokens:,} tokens"
            sizes = medium._replace(B=batch, T=tokens)
        flops, moved = counts.kernel_counts(found["dtype"], sizes)[kernel]
        if name == "RMSNorm":  # timed without the residual add, which the kernel does in a step
            flops, moved = norm_alone(found["dtype"], sizes)
        timed = flops
        if elements:
            timed *= math.prod(map(int, one["size"].split(" x "))) / elements(medium)
        rate = {each["name"]: timed / each["us"]["median"] / 1e6 for each in one["candidates"] if "us" in each}
        pytorch = max(value for each, value in rate.items() if each == "PyTorch" or each.startswith("SDPA"))
        points.append((name, flops / moved, rate["V3"], pytorch))
    return {"copy": found["ceilings"]["copy"], "top": found["ceilings"]["product"][found["dtype"]], "points": points}


def draw_rates(axes, found):
    (ax,) = axes
    top = found["top"]
    slope = found["copy"] / 1e3
    ax.plot([0.05, top / slope, 5000], [0.05 * slope, top, top], color=ink(), lw=2)
    ax.text(5000, 1.2 * top, f"matmul {top:,.0f} TFLOP/s", ha="right")
    ax.text(0.07, 5 * slope, f"copy {found['copy']:,.0f} GB/s")
    for i, (name, x, ours, theirs) in enumerate(found["points"]):
        ax.plot([x, x], [ours, theirs], color=f"C{i}", lw=1)
        # Smaller and on top: both points are seen if they're equal.
        ax.scatter(x, ours, s=25, color=f"C{i}", zorder=4, label=name)
        ax.scatter(x, theirs, s=60, color=paper(), edgecolors=f"C{i}", zorder=3)
    log_axis(ax, "x", [0.1, 1, 10, 100, 1000])
    log_axis(ax, "y", [0.1, 1, 10, 100, 1000])
    ax.set(xlim=(0.05, 5000), ylim=(0.05, 2000), xlabel="FLOP per byte", ylabel="TFLOP/s")
    ax.legend(title="filled: V3, hollow: PyTorch", loc="lower right", frameon=False, fontsize=9, title_fontsize=9)


def tell_rates(found):
    told = [f"{name} {ours:,.2f} and {theirs:,.2f}" for name, _, ours, theirs in found["points"]]
    theirs = "PyTorch's eager function, for attention SDPA's fastest backend"
    return f"TFLOP/s of version 3's kernel and of {theirs}, under the GPU's roofline: {'; '.join(told)}."


def efficiencies(recorded):
    """Return [(name, efficiency in percent)] of the rows with several GPUs."""
    suite = recorded.suite("ddp")
    rows = [row for row in suite["rows"] if row["efficiency"]] if suite else []
    titles = {"v3": "V3, DDP", "v3+fsdp": "V3, FSDP2", "v4": "V4, DDP"}
    titles |= {"hf+compile+packed": "HF, DDP", "hf+compile+fsdp": "HF, FSDP2"}
    return [(f"{titles[row['model']]}, {row['processes']} GPUs", 100 * row["efficiency"].ratio) for row in rows] or None


def draw_efficiencies(axes, found):
    (ax,), (names, percent) = axes, zip(*found, strict=True)
    ax.barh(range(len(found)), percent, 0.55, color=[BLUE if "DDP" in name else RED for name in names])
    for place, value in enumerate(percent):
        ax.text(value, place, f"{value:.1f} % ", va="center", ha="right", color="white", weight="bold")
    name_rows(ax, names)
    ax.axvline(100, color=GREY, lw=1)
    ax.set(xlim=(0, 102), xlabel="% of the speed without communication")


def tell_efficiencies(found):
    return f"Efficiency of several GPUs: {'; '.join(f'{name} {percent:.1f} %' for name, percent in found)}."


WINDOW_US = 2000  # of a step that the timelines show
GROUP_COLORS = {"GEMM": BLUE, "attention": RED, "normalisation": GREEN, "element-wise": YELLOW, "optimizer": "#aa3377"}


def middle(step):
    """Return the kernels of a window that begins an eighth into a step, from its start."""
    first = step[len(step) // 8][0]
    return [(start - first, us, group) for start, us, group in step if first <= start < first + WINDOW_US]


def timelines(recorded):
    """Return [(title, kernels as (start, duration, group) in us)] of a step of versions 1 and 4, and 4 without gaps."""
    found = recorded.json("timeline", "timeline.json")
    if not found:
        return None
    steps = {}
    for name, lines in found["kernels"].items():
        steps[name] = [(float(start), float(us), group) for start, us, group in map(str.split, lines)]
    rows = []
    for name, step in steps.items():
        busy = sum(us for _, us, _ in step) / 1e3
        whole = (step[-1][0] + step[-1][1]) / 1e3
        title = f"V{name[1:]}, eager, under the profiler: {len(step):,} kernels, {busy:.1f} of {whole:.0f} ms busy"
        rows.append((title, middle(step)))
    ends = itertools.accumulate(us for _, us, _ in steps["v4"])
    packed = [(end - us, us, group) for end, (_, us, group) in zip(ends, steps["v4"], strict=True)]
    return [*rows, (f"The same kernels of V4 laid end to end, without the gaps: {busy:.1f} ms", packed)]


def draw_timeline(axes, found):
    from matplotlib.patches import Patch

    for ax, (title, kernels) in zip(axes, found, strict=True):
        colors = [GROUP_COLORS.get(group, GREY) for *_, group in kernels]
        ax.broken_barh([(start, us) for start, us, _ in kernels], (0, 1), facecolors=colors)
        ax.set_title(title, loc="left", fontsize=10)
        ax.set(xlim=(0, WINDOW_US), ylim=(0, 1), yticks=[], xticks=[])
    axes[-1].set(xticks=range(0, WINDOW_US + 1, 500), xlabel="time in us")
    handles = [Patch(color=color, label=name) for name, color in (GROUP_COLORS | {"other": GREY}).items()]
    axes[-1].legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, -0.6), ncols=3, frameon=False)


def tell_timeline(found):
    return f"{WINDOW_US / 1e3:.0f} ms of a step, every kernel a bar. {'; '.join(title for title, _ in found)}."


# ---------------------------------------------------------------- pictures and pages


class Picture(NamedTuple):
    part: str  # of a recorded run
    find: Callable  # from a recorded run what is drawn; None where the run lacks it
    draw: Callable  # on these axes
    tell: Callable  # for readers who cannot see it
    height: float  # inches
    panels: int = 1


PICTURES = {
    "steps": Picture("ladder-medium", steps, draw_steps, tell_steps, 2.9),
    "ladder": Picture("ladder-medium", ladder_of_medium, draw_falls, tell_ladders, 4.4),
    "ladder_small": Picture("ladder-small", both_ladders_at_small, draw_pairs, tell_ladders, 4.2),
    "levels": Picture("headline", levels, draw_levels, tell_levels, 4.0),
    "memory": Picture("memory", memory, draw_memory, tell_memory, 3.6),
    "ablation2": Picture("ablation2", ablation, draw_ablation, tell_ablation, 3.4),
    "timeline": Picture("timeline", timelines, draw_timeline, tell_timeline, 4.0, 3),
    "roofline": Picture("kernels", rates, draw_rates, tell_rates, 4.2),
    "scaling": Picture("ddp", efficiencies, draw_efficiencies, tell_efficiencies, 2.2),
    "stages": Picture("stages", stages, draw_stages, tell_stages, 4.0),
}


LIGHT = ("white", "black")  # paper and ink
DARK = ("#0d1117", "#f0f6fc")


def save(picture, found, path, colors=LIGHT):
    """Draw a picture into a PNG file."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from PIL import Image

    page, letters = colors
    style = {"font.size": 11, "axes.titlesize": 12, "axes.spines.top": False, "axes.spines.right": False}
    style |= {"axes.facecolor": page}
    style |= dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), letters)
    with plt.rc_context(style):
        figure, axes = plt.subplots(picture.panels, figsize=(5, picture.height), squeeze=False, layout="constrained")
        picture.draw(axes[:, 0], found)
    path.parent.mkdir(exist_ok=True)
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=160, facecolor=page)
    plt.close(figure)
    Image.open(drawn).convert("RGB").quantize(128).save(path, optimize=True)  # a third of the bytes


def texts_of(recorded, draw=False):
    """Return {name of the markers: text} of the pictures; each lies in the folder of the run that has its part."""
    texts = {}
    for name, picture in PICTURES.items():
        holder = recorded.holding(picture.part)
        if found := picture.find(holder):
            path = holder.folder / "pictures" / f"{name}.png"
            text = f'<img src="{path}" width="480" alt="{picture.tell(found)}">'
            if draw:
                save(picture, found, path)
                save(picture, found, path.with_name(f"{name}_dark.png"), DARK)
            dark = f'<source media="(prefers-color-scheme: dark)" srcset="{path.with_name(f"{name}_dark.png")}">'
            text = f"<picture>\n{dark}\n{text}\n</picture>"
            texts[f"picture-{name}"] = text
    return texts
