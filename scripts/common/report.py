"""Write tables and charts as one self-contained HTML page, for screens, phones, dark mode and print, or as Markdown.

    parts = [text("..."), table(header, rows), step_bars(rows), group_bars(columns, "kernels")]
    html = page("Comparison", facts, notice, [("The steps", parts)])

The markup is in report.html, a Jinja2 template; the functions here compute what it shows and where.
"""

import pathlib

from common import tables
from common.ratios import gain
from common.step_parts import GROUPS, PHASES
from common.tables import rounded

COLORS = {group: f"c{i}" for i, group in enumerate(GROUPS)}


def page(title, facts, notice, sections):
    """Return a whole page: facts [(name, value)], sentences to notice, and sections [(heading, parts)]."""
    import jinja2  # here: it comes with PyTorch, and the readers of traces do without both

    loader = jinja2.FileSystemLoader(pathlib.Path(__file__).parent)
    environment = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, undefined=jinja2.StrictUndefined)
    content = {"title": title, "facts": facts, "notice": notice, "sections": sections, "colors": len(COLORS)}
    return environment.get_template("report.html").render(content).lstrip()


def markdown(title, facts, notice, sections):
    """Return texts and tables as Markdown."""
    lines = [f"# {tables.markdown(title)}", "", *(tables.markdown(f"- {name}: {value}") for name, value in facts), ""]
    lines += map(tables.markdown, notice)
    for heading, parts in sections:
        lines += ["", f"## {heading}"]
        for part in parts:
            table = "rows" in part and tables.markdown_table(part["header"], part["rows"], part["words"])
            lines += ["", table or tables.markdown(part["text"])]
    return "\n".join(lines) + "\n"


def text(sentence):
    return {"kind": "text", "text": sentence[:1].upper() + sentence[1:]}


def table(header, rows):
    rows = [list(row) for row in rows]
    return {"kind": "table", "header": header, "rows": rows, "words": tables.columns_of_words(rows)}


# ---------------------------------------------------------------- what was measured


def row_of(name, metrics):
    """Return one row from the content of a metrics file or a profile_*.json: summary, environment and sizes."""
    return {"name": name, **metrics["summary"], **{key: metrics[key] for key in ("environment", "config", "options")}}


def facts_of(row):
    """Return device, sizes, precision and software of a row."""
    config = row["config"]
    options = row["options"]
    environment = row["environment"]
    heads = f"{config['num_heads']} query and {config['num_kv_heads']} key/value heads"
    width = f"width {config['hidden_dim']}, feed-forward {config['intermediate_dim']}"
    model = f"{config['num_layers']} layers, {width}, {heads}, vocabulary {config['vocab_size']}"
    software = [f"PyTorch {environment['torch']}"]
    if environment["triton"]:
        software.append(f"Triton {environment['triton']}")
    return [
        ("device", environment["device"]),
        ("sizes", f"{model}, {options['batch_size']} sequences of {options['seq_len']} tokens"),
        ("precision", row["precision"]),
        ("software", ", ".join([*software, environment["date"][:10]])),
        ("workshop", environment.get("workshop", "1.0")),  # which wrote no version yet
    ]


def result_lines(rows):
    """Return the lines of a table of measured steps, a column per row: a page of them fits a phone."""
    steps = {"step, median ms": "median", "lower quartile ms": "p25", "upper quartile ms": "p75"}
    return [
        *([name, *(rounded(row["step_ms"][key]) for row in rows)] for name, key in steps.items()),
        *([f"{phase} ms", *(rounded(row[f"{phase}_ms"]) for row in rows)] for phase in PHASES),
        ["tokens/s", *(f"{row['tokens_per_second']:,.0f}" for row in rows)],
        ["TFLOP/s", *(rounded(row["tflops"]) for row in rows)],
        ["peak memory MiB", *(f"{row['peak_memory_mb']:,.0f}" for row in rows)],
        ["parameters trained", *(f"{100 * row['parameters_trained'] / row['parameters']:.0f} %" for row in rows)],
    ]


def times_as_fast(first, other):
    """Return how many times as fast as the first row the other one is, in words; one run of each is not judged."""
    found = gain([first["step_ms"]["median"]], [other["step_ms"]["median"]])
    return f"{found.range_text()} times as fast as {first['name']} ({found})"


# ---------------------------------------------------------------- bars


def step_bars(rows, caption):
    """Return the step time of each row as a bar with its quartiles, and its gain."""
    scale = 100 / max(row["step_ms"]["p75"] for row in rows)
    bars = []
    for row in rows:
        step = row["step_ms"]
        words = f"{rounded(row['step_ms']['median'])} ms"
        piece = {"name": row["name"], "text": words, "color": "c0", "percent": step["median"] * scale}
        bar = {
            "name": row["name"],
            "text": words if row["gain"] == "-" else f"{words}, {row['gain']}",
            "pieces": [piece],
        }
        bars.append(bar | {"low": step["p25"] * scale, "high": step["p75"] * scale})
    return {"kind": "bars", "bars": bars, "legend": {}, "caption": caption}


def group_bars(columns, caption):
    """Return a stacked bar per name: {name: result of groups_per_step}."""
    longest = max(groups["all"]["ms"] for groups in columns.values())
    bars = []
    for name, groups in columns.items():
        bars.append({"name": name, "pieces": [], "text": f"{rounded(groups['all']['ms'])} ms"})
        for group in (group for group in GROUPS if group in groups):
            ms = groups[group]["ms"]
            piece = {"name": group, "color": COLORS[group]}
            bars[-1]["pieces"].append(piece | {"text": f"{rounded(ms)} ms", "percent": 100 * ms / longest})
    used = {group: color for group, color in COLORS.items() if any(group in groups for groups in columns.values())}
    return {"kind": "bars", "bars": bars, "legend": used, "caption": caption}


# ---------------------------------------------------------------- memory over time


def memory_over_time(points, phases, caption):
    """Return a chart of memory in MiB over time in ms, with a band for each phase (name, start, end)."""
    memory = [one for _, one in points]
    colors = {name: f"c{i}" for i, name in enumerate(dict.fromkeys(name for name, _, _ in phases), 1)}
    chart = {"kind": "chart", "caption": caption, "legend": colors, "bands": phases, "points": thinned(points)}
    return chart | {"end": points[-1][0] or 1.0, "peak": max(memory), "least": min(0.0, *memory)}


def thinned(points, most=2000):
    """Return at most so many of the points: of each stretch of time the highest, and no peak is lost."""
    stretch = max(1, -(-len(points) // most))
    return [max(points[i : i + stretch], key=lambda point: point[1]) for i in range(0, len(points), stretch)]
