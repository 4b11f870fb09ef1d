"""Tables for terminals, Markdown pages and files."""

import contextlib
import csv
import io
import json
import os
import re
import string


def text_table(header, rows, left=1):
    """Return aligned lines; the first `left` columns start at the left, the others end at the right."""
    lines = [header, *([str(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(c.ljust(w) if i < left else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True)))
        for line in lines
    )


def markdown(text):
    """Return the text, or text in backticks, so that Markdown shows it in one line and starts no HTML but <br>."""
    text = " ".join(str(text).split())
    if len(text) > 2 and text.startswith("`") and text.endswith("`"):
        return "`" + text[1:-1].replace("`", "'") + "`"
    return re.sub(r"<(?!br>)(?=[A-Za-z/!?])", "&lt;", text)


def markdown_table(header, rows, left=1):
    marks = ["---" if place < left else "---:" for place in range(len(header))]
    header, *rows = ([markdown(cell).replace("|", "\\|") for cell in row] for row in (header, *rows))
    return "\n".join("| " + " | ".join(line) + " |" for line in (header, marks, *rows))


def known(value, pattern):
    """Return the formatted value, or a dash where it is not known."""
    return "-" if value is None else format(value, pattern)


def rounded(value, digits=3):
    """Return the number with so many significant digits and separated thousands, or a dash: 0.0123, 1.23, 12,345."""
    if value is None:
        return "-"
    if not value:
        return "0"
    number = float(f"{value:.{digits - 1}e}")
    places = digits - 1 - int(f"{number:e}".split("e")[1])
    return f"{value if places <= 0 else number:,.{max(0, places)}f}"


def emit(content, text, target):
    """Print the text, and write the content as JSON where --json asked for it."""
    if target == "-":
        print(json.dumps(content, indent=1))
        return
    if target:
        write_whole(target, json.dumps(content, indent=1) + "\n")
    print(text)


def write_whole(path, text):
    """Write a file whole or not at all: a full disk leaves the older one. A pipe, which is no file, is written into."""
    if os.path.exists(path) and not os.path.isfile(path):
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
        return
    partial = f"{path}.partial"
    try:
        with open(partial, "w", encoding="utf-8", newline="") as file:
            file.write(text)
        os.replace(partial, os.path.realpath(path))  # through a symbolic link
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(partial)
        raise type(error)(error.errno, error.strerror, str(path)) from None


def write_csv(rows, path):
    """Write rows of equal keys to a file, with at most six decimals."""
    table = io.StringIO()
    writer = csv.DictWriter(table, rows[0].keys(), lineterminator="\n")
    writer.writeheader()
    writer.writerows({k: round(v, 6) if isinstance(v, float) else v for k, v in row.items()} for row in rows)
    write_whole(path, table.getvalue())


class Cells(string.Formatter):
    """Format cells: None as a dash, {x:r} by rounded(), {x:.0%} as 40 %, {x:G.2f} in billions, {x:M.2f} in millions."""

    def format_field(self, value, pattern):
        if value is None or pattern == "r":
            return rounded(value)
        scale = {"G": 1e9, "M": 1e6}.get(pattern[:1])
        return (format(value / scale, pattern[1:]) if scale else format(value, pattern)).replace("%", " %")


def columns(template, rows):
    """Return header and cells of a table of dictionaries: "batch: {batch_size} | of peak: {share:.0%}"."""
    parts = [part.strip().split(": ", 1) for part in template.split("|")]
    return [heading for heading, _ in parts], [[Cells().vformat(cell, (), row) for _, cell in parts] for row in rows]
