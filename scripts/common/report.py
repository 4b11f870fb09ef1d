"""Write tables and charts as one self-contained HTML page, for screens, phones, dark mode and print.

    parts = [text("..."), table(header, rows), step_bars(rows), group_bars(columns, "kernels")]
    html = page("Comparison", facts, notice, [("The steps", parts)])

The markup is in report.html, a Jinja2 template; the functions here compute what it shows and where.
"""

import contextlib
import math
import pathlib
from collections.abc import Iterable

from common.command_line import Failure
from common.profiles import GROUPS, short
from common.tables import rounded

COLORS = {group: f"c{i}" for i, group in enumerate(GROUPS)}
WIDTH, HEIGHT = 460, 320  # of a chart, in the pixels of its 15-pixel type: a phone shows it at three quarters
LEFT, RIGHT, TOP, BOTTOM = 62, 10, 28, 50


def page(title: str, facts: list[tuple[str, str]], notice: list[str], sections: list[tuple[str, list[dict]]]) -> str:
    """Return a whole page: what was measured, what to notice, and headings with their parts."""
    import jinja2  # here: it comes with PyTorch, and the readers of traces do without both

    loader = jinja2.FileSystemLoader(pathlib.Path(__file__).parent)
    environment = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, undefined=jinja2.StrictUndefined)
    content = {"title": title, "facts": facts, "notice": notice, "sections": sections}
    return environment.get_template("report.html").render(content).lstrip()


def model_sizes(config: dict) -> str:
    """Return the sizes of a model in words, from the config of a metrics file or a trace's metadata."""
    heads = f"{config['num_heads']} query and {config['num_kv_heads']} key/value heads"
    width = f"width {config['hidden_dim']}, feed-forward {config['intermediate_dim']}"
    return f"{config['num_layers']} layers, {width}, {heads}, vocabulary {config['vocab_size']}"


def text(sentence: str, small: bool = False) -> dict:
    return {"kind": "small" if small else "text", "text": sentence[:1].upper() + sentence[1:]}


def table(header: list[str], rows: Iterable[Iterable]) -> dict:
    return {"kind": "table", "header": header, "rows": [list(row) for row in rows]}


# ---------------------------------------------------------------- bars


def step_bars(rows: list[dict], caption: str) -> dict:
    """Return the step time of each {"name", "step_ms": {"median", "p25", "p75"}} as a bar with its quartiles."""
    scale, first, bars = 100 / max(row["step_ms"]["p75"] for row in rows), rows[0]["step_ms"]["median"], []
    for row in rows:
        step = row["step_ms"]
        piece = {"name": row["name"], "short": "", "text": f"{rounded(step['median'])} ms", "color": "c0"}
        bar = {"name": row["name"], "text": f"{rounded(step['median'])} ms, {first / step['median']:.2f}x"}
        bar |= {"low": step["p25"] * scale, "high": step["p75"] * scale}
        bars.append(bar | {"pieces": [piece | {"percent": step["median"] * scale}]})
    return {"kind": "bars", "bars": bars, "legend": [], "caption": caption}


def group_bars(columns: dict[str, dict[str, float]], caption: str) -> dict:
    """Return a stacked bar per name: the milliseconds that each group of kernels takes in a step."""
    longest, bars = max(sum(groups.values()) for groups in columns.values()), []
    for name, groups in columns.items():
        pieces = [
            {"name": group, "short": group, "text": f"{rounded(groups[group])} ms", "color": COLORS[group]}
            | {"percent": 100 * groups[group] / longest}
            for group in GROUPS
            if groups.get(group)
        ]
        bars.append({"name": name, "pieces": pieces, "text": f"{rounded(sum(groups.values()))} ms"})
    used = [group for group in GROUPS if any(groups.get(group) for groups in columns.values())]
    legend = [{"name": group, "color": COLORS[group]} for group in used]
    return {"kind": "bars", "bars": bars, "legend": legend, "caption": caption}


# ---------------------------------------------------------------- charts with axes


class Chart:
    """Place lines, discs and texts on linear or logarithmic axes."""

    def __init__(self, xs: tuple[float, float], ys: tuple[float, float], log: bool = False, right: int = RIGHT):
        self.change = math.log10 if log else float
        self.xs, self.ys = (tuple(map(self.change, ends)) for ends in (xs, ys))
        self.right, self.log = WIDTH - right, log
        self.paths, self.discs, self.texts, self.bands = [], [], [], []

    def x(self, value: float) -> float:
        share = (self.change(value) - self.xs[0]) / (self.xs[1] - self.xs[0])
        return round(LEFT + (self.right - LEFT) * min(max(share, 0), 1), 1)

    def y(self, value: float) -> float:
        share = (self.change(value) - self.ys[0]) / (self.ys[1] - self.ys[0])
        return round(HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * min(max(share, 0), 1), 1)

    def write(self, x: float, y: float, words: str, anchor: str = "start", color: str = "") -> None:
        self.texts.append({"x": x, "y": y, "text": words, "anchor": anchor, "color": color})

    def line(self, points: list[tuple[float, float]], color: str) -> None:
        d = "M" + "L".join(f"{self.x(x)} {self.y(y)}" for x, y in points)
        self.paths.append({"d": d, "color": color})

    def stairs(self, points: list[tuple[float, float]], color: str) -> None:
        """Draw a line that keeps its value from one point to the next."""
        (x, y), *rest = points
        d = f"M{self.x(x)} {self.y(y)}" + "".join(f"H{self.x(x)}V{self.y(y)}" for x, y in rest)
        self.paths.append({"d": d, "color": color})

    def band(self, name: str, start: float, end: float, color: str) -> None:
        box = {"x": self.x(start), "y": TOP, "width": max(0.5, self.x(end) - self.x(start))}
        self.bands.append(box | {"height": HEIGHT - BOTTOM - TOP, "name": name, "color": color})

    def axes(self, x_ticks: Iterable[float], y_ticks: Iterable[float], x_label: str, y_label: str) -> None:
        for tick in y_ticks:
            self.write(LEFT - 6, self.y(tick) + 5, f"{tick:,.4g}", "end")
            self.paths.append({"d": f"M{LEFT} {self.y(tick)}H{self.right}", "color": "grid"})
        for tick in x_ticks:
            self.write(self.x(tick), HEIGHT - BOTTOM + 19, f"{tick:,.4g}", "middle")
        self.write(4, 15, y_label)
        self.write(self.right, HEIGHT - 6, x_label, "end")

    def part(self, caption: str) -> dict:
        shapes = {"paths": self.paths, "discs": self.discs, "texts": self.texts, "bands": self.bands}
        return {"kind": "chart", "width": WIDTH, "height": HEIGHT, "caption": caption, **shapes}


def even_ticks(most: float, least: float = 0.0) -> list[float]:
    """Return five values from least on, in steps of 1, 2, 2.5 or 5 times a power of ten, that reach most."""
    span = max(most - least, 1e-9)
    power = 10.0 ** math.floor(math.log10(span / 4))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if 4 * power * factor >= span * (1 - 1e-9))
    return [least + step * i for i in range(5)]


def log_ticks(least: float, most: float) -> list[float]:
    """Return the powers of ten between two values, and their multiples by 2 and 5 if those are few."""
    powers = range(math.floor(math.log10(least)), math.ceil(math.log10(most)) + 1)
    factors = (1,) if len(powers) > 5 else (1, 2, 5)
    return [value for i in powers for value in (factor * 10.0**i for factor in factors) if least <= value <= most]


def apart(places: list[float], gap: float) -> list[float]:
    """Return the places moved down as little as needed to keep this gap between any two."""
    moved = list(places)
    order = sorted(range(len(places)), key=lambda i: places[i])
    for before, after in zip(order, order[1:], strict=False):
        moved[after] = max(moved[after], moved[before] + gap)
    return moved


def memory_over_time(points: list[tuple[float, float]], phases: list[tuple], caption: str) -> dict:
    """Return memory in MiB over time in ms, with a mark at the peak and bands for the phases (name, start, end)."""
    end, peak = points[-1][0] or 1.0, max(points, key=lambda point: point[1])
    ticks = even_ticks(peak[1], min(0.0, *(memory for _, memory in points)))
    chart = Chart((0, end), (ticks[0], ticks[-1]))
    colors: dict[str, str] = {}
    for name, start, stop in phases:
        if name not in colors:
            colors[name] = f"c{len(colors)}"
            chart.write(chart.x(start) + 2, TOP + 12 + 14 * len(colors), name, color=colors[name])
        chart.band(f"{name}, {stop - start:.2f} ms", start, stop, colors[name])
    chart.axes([tick for tick in even_ticks(end) if tick <= 0.97 * end], ticks, "ms since the profile began", "MiB")
    chart.stairs(thinned(points), "c0")
    chart.discs.append({"x": chart.x(peak[0]), "y": chart.y(peak[1]), "r": 4, "name": "peak", "color": "c1"})
    return chart.part(caption)


def thinned(points: list[tuple[float, float]], most: int = 2000) -> list[tuple[float, float]]:
    """Return at most so many of the points: of each stretch of time the highest, and no peak is lost."""
    stretch = max(1, -(-len(points) // most))
    return [max(points[i : i + stretch], key=lambda point: point[1]) for i in range(0, len(points), stretch)]


def memory_lines(lengths: list[int], series: dict[str, list[float | None]], caption: str) -> dict:
    """Return peak memory in MB over sequence length, a line per name; a cross at the top where it ran out."""
    top = max((peak for peaks in series.values() for peak in peaks if peak is not None), default=1.0)
    ticks = even_ticks(1.05 * top)
    chart = Chart((0, lengths[-1]), (0, ticks[-1]), right=90)
    chart.axes(lengths, ticks, "tokens in a sequence", "peak memory, MB")
    ends = []
    for i, (name, peaks) in enumerate(series.items()):
        points = [(t, peak) for t, peak in zip(lengths, peaks, strict=True) if peak is not None]
        if points:
            chart.line(points, f"c{i}")
            chart.discs += [
                {"x": chart.x(x), "y": chart.y(y), "r": 3, "name": name, "color": f"c{i}"} for x, y in points
            ]
        for length in (t for t, peak in zip(lengths, peaks, strict=True) if peak is None):
            chart.write(chart.x(length), TOP + 14 + 14 * i, f"x {name}: out of memory", "end", f"c{i}")
        ends.append(chart.y(points[-1][1]) if points else TOP)
    for i, (name, y) in enumerate(zip(series, apart(ends, 15), strict=True)):
        chart.write(chart.right + 6, y + 4, name, color=f"c{i}")
    return chart.part(caption)


def roofline(rows: list[dict], ceilings: dict, limits: tuple, caption: str) -> dict:
    """Return measured TFLOP/s over FLOP per byte of the operators with counted FLOPs; a disc's area is its time.

    limits: (least, most) FLOP per byte and TFLOP/s, one scale for all charts of a page.
    """
    chart = Chart(*limits, log=True)
    chart.axes(log_ticks(*limits[0]), log_ticks(*limits[1]), "FLOP per byte", "TFLOP/s")
    (least, most), balance = limits[0], ceilings["matmul_tflops"] / ceilings["copy_tb_s"]
    corners = sorted({least, min(max(balance, least), most), most})
    chart.line([(x, min(ceilings["matmul_tflops"], ceilings["copy_tb_s"] * x)) for x in corners], "ink")
    rows = sorted((row for row in rows if row["flops"]), key=lambda row: -row["ms"])
    placed = []
    for row in rows:
        x, y = chart.x(row["flops"] / row["bytes"]), chart.y(row["tflops"])
        disc = {"x": x, "y": y, "r": round(3 + 15 * math.sqrt(row["ms"] / rows[0]["ms"]), 1)}
        chart.discs.append(disc | {"name": f"{row['operator']}, {row['ms']:.3f} ms", "color": COLORS[row["group"]]})
        if all(abs(x - a) > 150 or abs(y - b) > 15 for a, b in placed):
            placed.append((x, y))
            anchor = "end" if x > 0.6 * WIDTH else "start"
            side = -disc["r"] - 4 if anchor == "end" else disc["r"] + 4
            chart.write(x + side, y + 4, short(row["operator"].removeprefix("aten::"), 26), anchor)
    return chart.part(caption)


def roofline_limits(rows: list[dict], ceilings: dict) -> tuple | None:
    """Return the range of FLOP per byte and TFLOP/s in which the operators and the roof's corner are."""
    counted = [row for row in rows if row["flops"] and row["tflops"]]
    if not counted:
        return None
    balance = ceilings["matmul_tflops"] / ceilings["copy_tb_s"]
    xs = [balance, *(row["flops"] / row["bytes"] for row in counted)]
    ys = [ceilings["matmul_tflops"], *(row["tflops"] for row in counted)]
    return (min(xs) / 2, 3 * max(xs)), (min(ys) / 2, 2 * max(ys))


# ---------------------------------------------------------------- pictures by matplotlib


@contextlib.contextmanager
def matplotlib_figure(path: pathlib.Path, height: float):
    """Yield figure and axes on white paper, saved to path; Failure without matplotlib.

    The picture is as wide as a phone's screen in inches of its type, which keeps the type readable there.
    """
    try:
        import matplotlib
    except ImportError:
        raise Failure(1, f"{path.name} needs matplotlib: pip install '.[plots]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(5.5, height), facecolor="white", layout="constrained")
    yield figure, axes
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, bbox_inches="tight", dpi=200, facecolor="white")
    pyplot.close(figure)


def legend_below(figure, handles: list, labels: list[str], columns: int, title: str | None = None) -> None:
    """Add a legend under everything else, where it hides nothing."""
    figure.legend(
        handles, labels, loc="upper center", bbox_to_anchor=(0.5, -0.01), ncols=columns, frameon=False, title=title
    )
