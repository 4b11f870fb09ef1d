"""Write tables and charts as one self-contained HTML page, for screens, phones, dark mode and print, or as Markdown.

    parts = [text("..."), table(header, rows), step_bars(rows), group_bars(columns, "kernels")]
    html = page("Comparison", facts, notice, [("The steps", parts)])

The markup is in report.html, a Jinja2 template; the functions here compute what it shows and where.
"""

import contextlib
import math
import pathlib

from common.command_line import Failure
from common.profiles import GROUPS, PHASES, short
from common.tables import markdown_table, rounded

COLORS = {group: f"c{i}" for i, group in enumerate(GROUPS)}
WIDTH, HEIGHT = 460, 320  # of a chart, in the pixels of its 15-pixel type: a phone shows it at three quarters
LEFT, RIGHT, TOP, BOTTOM = 62, 450, 28, 270  # of its axes
LETTER = 8.5  # the width of most letters


def page(title, facts, notice, sections):
    """Return a whole page: facts [(name, value)], sentences to notice, and sections [(heading, parts)]."""
    import jinja2  # here: it comes with PyTorch, and the readers of traces do without both

    loader = jinja2.FileSystemLoader(pathlib.Path(__file__).parent)
    environment = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, undefined=jinja2.StrictUndefined)
    content = {"title": title, "facts": facts, "notice": notice, "sections": sections}
    return environment.get_template("report.html").render(content).lstrip()


def markdown(title, facts, notice, sections):
    """Return texts and tables as Markdown."""
    lines = [f"# {title}", "", *(f"- {name}: {value}" for name, value in facts), "", *notice]
    for heading, parts in sections:
        lines += ["", f"## {heading}"]
        for part in parts:
            lines += ["", markdown_table(part["header"], part["rows"]) if "rows" in part else part["text"]]
    return "\n".join(lines) + "\n"


def text(sentence):
    return {"kind": "text", "text": sentence[:1].upper() + sentence[1:]}


def table(header, rows):
    return {"kind": "table", "header": header, "rows": [list(row) for row in rows]}


# ---------------------------------------------------------------- what was measured


def row_of(name, metrics):
    """Return one row from the content of a metrics file or a profile_*.json: summary, environment and sizes."""
    return {"name": name, **metrics["summary"], **{key: metrics[key] for key in ("environment", "config", "options")}}


def facts_of(row):
    """Return device, sizes, precision and software of a row."""
    config, options, environment = row["config"], row["options"], row["environment"]
    heads = f"{config['num_heads']} query and {config['num_kv_heads']} key/value heads"
    width = f"width {config['hidden_dim']}, feed-forward {config['intermediate_dim']}"
    model = f"{config['num_layers']} layers, {width}, {heads}, vocabulary {config['vocab_size']}"
    software = [f"PyTorch {environment['torch']}", *[f"Triton {environment['triton']}"] * bool(environment["triton"])]
    return [
        ("device", environment["device"]),
        ("sizes", f"{model}, {options['batch_size']} sequences of {options['seq_len']} tokens"),
        ("precision", row["precision"]),
        ("software", ", ".join([*software, environment["date"][:10]])),
    ]


def result_lines(rows):
    """Return the lines of a table of measured steps, a column per row: a page of them fits a phone."""
    return [
        ["step, median ms", *(rounded(row["step_ms"]["median"]) for row in rows)],
        ["lower quartile ms", *(rounded(row["step_ms"]["p25"]) for row in rows)],
        ["upper quartile ms", *(rounded(row["step_ms"]["p75"]) for row in rows)],
        *([f"{phase} ms", *(rounded(row[f"{phase}_ms"]) for row in rows)] for phase in PHASES),
        ["tokens/s", *(f"{row['tokens_per_second']:,.0f}" for row in rows)],
        ["TFLOP/s", *(rounded(row["tflops"]) for row in rows)],
        ["peak memory MB", *(f"{row['peak_memory_mb']:,.0f}" for row in rows)],
        ["parameters trained", *(f"{row['parameters_trained'] / row['parameters']:.0%}" for row in rows)],
    ]


def times_as_fast(first, other):
    """Return how many times as fast as the first row the other one is, in words; say if the quartiles overlap."""
    one, two = first["step_ms"], other["step_ms"]
    apart = two["p75"] < one["p25"] or one["p75"] < two["p25"]
    ratio = f"{one['median'] / two['median']:.2f} times as fast as {first['name']}"
    return ratio if apart else f"{ratio}, but the quartiles overlap"


# ---------------------------------------------------------------- bars


def step_bars(rows, caption):
    """Return the step time of each row as a bar with its quartiles."""
    scale, first, bars = 100 / max(row["step_ms"]["p75"] for row in rows), rows[0]["step_ms"]["median"], []
    for row in rows:
        step, words = row["step_ms"], f"{rounded(row['step_ms']['median'])} ms"
        piece = {"name": row["name"], "text": words, "color": "c0", "percent": step["median"] * scale}
        bar = {"name": row["name"], "text": f"{words}, {first / step['median']:.2f}x", "pieces": [piece]}
        bars.append(bar | {"low": step["p25"] * scale, "high": step["p75"] * scale})
    return {"kind": "bars", "bars": bars, "legend": {}, "caption": caption}


def group_bars(columns, caption):
    """Return a stacked bar per name: {name: result of groups_per_step}."""
    longest, bars = max(groups["all"]["ms"] for groups in columns.values()), []
    for name, groups in columns.items():
        parts = [(group, groups[group]["ms"]) for group in GROUPS if group in groups]
        pieces = [
            {"name": group, "text": f"{rounded(ms)} ms", "color": COLORS[group], "percent": 100 * ms / longest}
            for group, ms in parts
        ]
        bars.append({"name": name, "pieces": pieces, "text": f"{rounded(groups['all']['ms'])} ms"})
    used = {group: color for group, color in COLORS.items() if any(group in groups for groups in columns.values())}
    return {"kind": "bars", "bars": bars, "legend": used, "caption": caption}


# ---------------------------------------------------------------- charts with axes


class Chart:
    """Place lines, discs and texts on linear or logarithmic axes."""

    def __init__(self, xs, ys, log=False):
        self.change = math.log10 if log else float
        self.xs, self.ys = (tuple(map(self.change, ends)) for ends in (xs, ys))
        self.shapes = {"paths": [], "discs": [], "texts": [], "bands": []}

    def place(self, value, ends, first, last):
        share = (self.change(value) - ends[0]) / (ends[1] - ends[0])
        return round(first + (last - first) * min(max(share, 0), 1), 1)

    def x(self, value):
        return self.place(value, self.xs, LEFT, RIGHT)

    def y(self, value):
        return self.place(value, self.ys, BOTTOM, TOP)

    def write(self, x, y, words, anchor="start", color=""):
        self.shapes["texts"].append({"x": x, "y": y, "text": words, "anchor": anchor, "color": color})

    def disc(self, x, y, radius, name, color):
        self.shapes["discs"].append({"x": x, "y": y, "r": radius, "name": name, "color": color})

    def path(self, d, color):
        self.shapes["paths"].append({"d": d, "color": color})

    def band(self, name, start, end, color):
        box = {"x": self.x(start), "y": TOP, "width": max(0.5, self.x(end) - self.x(start)), "height": BOTTOM - TOP}
        self.shapes["bands"].append(box | {"name": name, "color": color})

    def axes(self, x_ticks, y_ticks, x_label, y_label):
        for tick in y_ticks:
            self.write(LEFT - 6, self.y(tick) + 5, f"{tick:,g}", "end")
            self.path(f"M{LEFT} {self.y(tick)}H{RIGHT}", "grid")
        for tick in x_ticks:
            self.write(self.x(tick), BOTTOM + 19, f"{tick:,g}", "middle")
        self.write(4, 15, y_label)
        self.write(RIGHT, HEIGHT - 6, x_label, "end")

    def part(self, caption):
        return {"kind": "chart", "width": WIDTH, "height": HEIGHT, "caption": caption, **self.shapes}


def even_ticks(most, least=0.0):
    """Return five values from least on, in steps of 1, 2, 2.5 or 5 times a power of ten, that reach most."""
    span = max(most - least, 1e-9)
    power = 10.0 ** math.floor(math.log10(span / 4))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if 4 * power * factor >= span * (1 - 1e-9))
    return [least + step * i for i in range(5)]


def log_ticks(least, most):
    """Return the powers of ten between two values, and their multiples by 2 and 5 if those are few."""
    powers = range(math.floor(math.log10(least)), math.ceil(math.log10(most)) + 1)
    factors = (1,) if len(powers) > 5 else (1, 2, 5)
    return [value for i in powers for value in (factor * 10.0**i for factor in factors) if least <= value <= most]


def memory_over_time(points, phases, caption):
    """Return memory in MiB over time in ms, with a mark at the peak and bands for the phases (name, start, end)."""
    end, peak = points[-1][0] or 1.0, max(points, key=lambda point: point[1])
    ticks = even_ticks(peak[1], min(0.0, *(memory for _, memory in points)))
    chart = Chart((0, end), (ticks[0], ticks[-1]))
    colors = {}
    for name, start, stop in phases:
        if name not in colors:
            colors[name] = f"c{len(colors)}"
            chart.write(chart.x(start) + 2, TOP + 12 + 14 * len(colors), name, color=colors[name])
        chart.band(f"{name}, {stop - start:.2f} ms", start, stop, colors[name])
    chart.axes([tick for tick in even_ticks(end) if tick <= 0.97 * end], ticks, "ms since the profile began", "MiB")
    stairs = [f"H{chart.x(x)}V{chart.y(y)}" for x, y in thinned(points)]  # memory stays until the next event
    chart.path(f"M{LEFT} {chart.y(points[0][1])}{''.join(stairs)}", "c0")
    chart.disc(chart.x(peak[0]), chart.y(peak[1]), 4, "peak", "c1")
    return chart.part(caption)


def thinned(points, most=2000):
    """Return at most so many of the points: of each stretch of time the highest, and no peak is lost."""
    stretch = max(1, -(-len(points) // most))
    return [max(points[i : i + stretch], key=lambda point: point[1]) for i in range(0, len(points), stretch)]


def roofline(rows, ceilings, limits, caption):
    """Return measured TFLOP/s over FLOP per byte of the operators with counted FLOPs; a disc's area is its time.

    limits: (least, most) FLOP per byte and TFLOP/s, one scale for all charts of a page.
    """
    chart, (least, most) = Chart(*limits, log=True), limits[0]
    chart.axes(log_ticks(least, most), log_ticks(*limits[1]), "FLOP per byte", "TFLOP/s")
    top, copy = ceilings["matmul_tflops"], ceilings["copy_tb_s"]
    roof = [(x, min(top, copy * x)) for x in (least, min(max(top / copy, least), most), most)]
    chart.path("M" + "L".join(f"{chart.x(x)} {chart.y(y)}" for x, y in roof), "ink")
    rows = sorted((row for row in rows if row["flops"]), key=lambda row: -row["ms"])
    named = []
    for row in rows:
        x, y = chart.x(row["flops"] / row["bytes"]), chart.y(row["tflops"])
        radius = round(3 + 15 * math.sqrt(row["ms"] / rows[0]["ms"]), 1)
        chart.disc(x, y, radius, f"{row['operator']}, {row['ms']:.3f} ms", COLORS[row["group"]])
        if all(abs(x - a) > 150 or abs(y - b) > 15 for a, b in named):
            named.append((x, y))
            name = short(row["operator"].removeprefix("aten::"), 26)
            fits = x + radius + 4 + LETTER * len(name) < WIDTH
            chart.write(x + radius + 4 if fits else x - radius - 4, y + 4, name, "start" if fits else "end")
    return chart.part(caption)


def roofline_limits(rows, ceilings):
    """Return the range of FLOP per byte and TFLOP/s in which the operators and the roof's corner are."""
    counted = [row for row in rows if row["flops"] and row["tflops"]]
    xs = [ceilings["matmul_tflops"] / ceilings["copy_tb_s"], *(row["flops"] / row["bytes"] for row in counted)]
    ys = [ceilings["matmul_tflops"], *(row["tflops"] for row in counted)]
    return (min(xs) / 2, 3 * max(xs)), (min(ys) / 2, 2 * max(ys))


@contextlib.contextmanager
def matplotlib_figure(path, height):
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
