"""Pictures of a comparison, and one self-contained HTML page for tables and pictures: for screens, phones and print."""

import base64
import html
import pathlib
from collections.abc import Iterable

from common.analysis import legend_below, matplotlib_figure
from kernel_times import GROUPS

GROUP_COLOURS = dict(
    zip(GROUPS, ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#999999"), strict=True)
)
STYLE = """
:root { color-scheme: only light; }
body { font: 16px/1.5 system-ui, sans-serif; color: #222; background: #fff; max-width: 46rem; margin: 0 auto;
  padding: 1rem; }
h1 { font-size: 1.6rem; line-height: 1.2; } h2 { font-size: 1.2rem; margin-top: 2.5rem; }
p { overflow-wrap: anywhere; } figcaption, .small { color: #555; font-size: .85rem; }
.table { overflow-x: auto; margin: 1rem 0; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .4rem; border-bottom: 1px solid #ddd; text-align: right; } td { white-space: nowrap; }
th:first-child, td:first-child { text-align: left; white-space: normal; } th { border-bottom: 2px solid #888; }
figure { margin: 1rem 0; } img { display: block; width: 100%; max-width: 38rem; height: auto; }
@media (max-width: 30rem) { table { font-size: .74rem; } th, td { padding: .25rem .15rem; } }
@media print { body { max-width: none; padding: 0; font-size: 10pt; } h2, figcaption { break-after: avoid; }
  figure, .table { break-inside: avoid; } img { max-width: 11cm; } .table { overflow: visible; } }
"""


def step_bars(path: pathlib.Path, rows: list[dict]) -> None:
    """Step time of each {"name", "step_ms": {"median", "p25", "p75"}} as a bar with its quartiles."""
    with matplotlib_figure(path, height=0.5 * len(rows) + 0.8) as (_, axes):
        medians = [row["step_ms"]["median"] for row in rows]
        below = [row["step_ms"]["median"] - row["step_ms"]["p25"] for row in rows]
        above = [row["step_ms"]["p75"] - row["step_ms"]["median"] for row in rows]
        places = range(len(rows))
        axes.barh(places, medians, xerr=[below, above], color="#4477aa", capsize=3, height=0.6)
        axes.set_yticks(places, [row["name"] for row in rows])
        axes.invert_yaxis()
        ends = [median + more for median, more in zip(medians, above, strict=True)]
        for place, median, end in zip(places, medians, ends, strict=True):
            axes.text(end, place, f"  {median:,.2f} ms, {medians[0] / median:.2f}x", va="center")
        axes.set_xlim(0, 1.5 * max(ends))
        axes.set_xlabel("ms a step, median and quartiles")


def group_bars(path: pathlib.Path, columns: dict[str, dict[str, float]], what: str) -> None:
    """A stacked bar for each name: the milliseconds of a step that each group of kernels (what) takes."""
    with matplotlib_figure(path, height=0.5 * len(columns) + 0.8) as (figure, axes):
        for place, groups in enumerate(columns.values()):
            left = 0.0
            for group in GROUPS:
                width = groups.get(group, 0.0)
                axes.barh(place, width, left=left, color=GROUP_COLOURS[group], height=0.6)
                left += width
            axes.text(left, place, f"  {left:,.2f} ms", va="center")
        axes.set_yticks(range(len(columns)), list(columns))
        axes.invert_yaxis()
        axes.set_xlim(0, 1.25 * max(sum(groups.values()) for groups in columns.values()))
        axes.set_xlabel(f"ms of {what} a step")
        used = [group for group in GROUPS if any(group in groups for groups in columns.values())]
        handles = [axes.barh(0, 0, color=GROUP_COLOURS[group]) for group in used]
        legend_below(figure, handles, used, columns=4)


def table(header: list[str], rows: Iterable[Iterable]) -> str:
    """An HTML table, in a box that scrolls sideways where even a phone's small type does not fit."""
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in header)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(str(cell))}</td>" for cell in row) + "</tr>\n" for row in rows)
    return f'<div class="table"><table><thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table></div>'


def paragraph(text: str, small: bool = False) -> str:
    return f"<p{' class=small' if small else ''}>{html.escape(text[:1].upper() + text[1:])}</p>"


def picture(path: pathlib.Path, meaning: str) -> str:
    """The PNG as part of the page, with what it means under it."""
    data = base64.b64encode(path.read_bytes()).decode()
    text = html.escape(meaning)
    return f'<figure><img alt="{text}" src="data:image/png;base64,{data}"><figcaption>{text}</figcaption></figure>'


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
