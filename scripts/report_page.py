"""Pictures of a comparison, and one self-contained HTML page for tables and pictures: for screens, phones and print."""

import base64
import html
import pathlib
from collections.abc import Iterable

from analysis import matplotlib_figure
from kernel_times import GROUPS

GROUP_COLOURS = dict(
    zip(GROUPS, ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#999999"), strict=True)
)
STYLE = """
:root { color-scheme: light; }
body { font: 16px/1.5 system-ui, sans-serif; color: #222; background: #fff; max-width: 60rem; margin: 0 auto;
  padding: 1rem; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.2rem; margin-top: 2rem; }
.table { overflow-x: auto; } table { border-collapse: collapse; font-size: .9rem; }
th, td { padding: .3rem .7rem; border-bottom: 1px solid #ddd; text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; } th { border-bottom: 2px solid #888; }
figure { margin: 1rem 0; } img { max-width: 100%; height: auto; }
@media print { body { max-width: none; font-size: 10pt; } h2, figure, tr { break-inside: avoid; }
  .table { overflow: visible; } th, td { white-space: normal; } }
"""


def step_bars(path: pathlib.Path, rows: list[dict]) -> None:
    """Step time of each {"name", "step_ms": {"median", "p25", "p75"}} as a bar with its quartiles."""
    with matplotlib_figure(path, figsize=(8, 0.7 * len(rows) + 1.3)) as (_, axes):
        medians = [row["step_ms"]["median"] for row in rows]
        below = [row["step_ms"]["median"] - row["step_ms"]["p25"] for row in rows]
        above = [row["step_ms"]["p75"] - row["step_ms"]["median"] for row in rows]
        places = range(len(rows))
        axes.barh(places, medians, xerr=[below, above], color="#4477aa", capsize=4, height=0.6)
        axes.set_yticks(places, [row["name"] for row in rows])
        axes.invert_yaxis()
        ends = [median + more for median, more in zip(medians, above, strict=True)]
        for place, median, end in zip(places, medians, ends, strict=True):
            axes.text(end, place, f"  {median:.2f} ms, {medians[0] / median:.2f}x", va="center")
        axes.set_xlim(0, 1.35 * max(ends))
        axes.set_xlabel("ms a step, median and quartiles")
        axes.spines[["top", "right"]].set_visible(False)


def group_bars(path: pathlib.Path, columns: dict[str, dict[str, float]], unit: str) -> None:
    """A stacked bar for each name: the unit (such as ms a step) that each group of kernels takes."""
    with matplotlib_figure(path, figsize=(8, 0.7 * len(columns) + 1.8)) as (_, axes):
        for place, groups in enumerate(columns.values()):
            left = 0.0
            for group in GROUPS:
                width = groups.get(group, 0.0)
                axes.barh(place, width, left=left, color=GROUP_COLOURS[group], height=0.6)
                left += width
            axes.text(left, place, f"  {left:,.3g}", va="center")
        axes.set_yticks(range(len(columns)), list(columns))
        axes.invert_yaxis()
        axes.set_xlim(0, 1.15 * max(sum(groups.values()) for groups in columns.values()))
        axes.set_xlabel(unit)
        axes.spines[["top", "right"]].set_visible(False)
        used = [group for group in GROUPS if any(group in groups for groups in columns.values())]
        handles = [axes.barh(0, 0, color=GROUP_COLOURS[group]) for group in used]
        axes.legend(handles, used, loc="upper center", bbox_to_anchor=(0.45, -0.35), ncol=4, frameon=False)


def table(header: list[str], rows: Iterable[Iterable]) -> str:
    """An HTML table in a box that scrolls sideways where the screen is narrow."""
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in header)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(str(cell))}</td>" for cell in row) + "</tr>\n" for row in rows)
    return f'<div class="table"><table><thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table></div>'


def paragraph(text: str) -> str:
    return f"<p>{html.escape(text)}</p>"


def picture(path: pathlib.Path, meaning: str) -> str:
    """The PNG as part of the page."""
    data = base64.b64encode(path.read_bytes()).decode()
    return f'<figure><img alt="{html.escape(meaning)}" src="data:image/png;base64,{data}"></figure>'


def page(title: str, sections: list[tuple[str, list[str]]]) -> str:
    """A whole page of headings, each with its paragraphs, tables and pictures; it needs nothing from elsewhere."""
    parts = [
        f"<section><h2>{html.escape(heading)}</h2>\n" + "\n".join(body) + "</section>" for heading, body in sections
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{STYLE}</style></head>\n"
        f"<body><h1>{html.escape(title)}</h1>\n" + "\n".join(parts) + "\n</body></html>\n"
    )
