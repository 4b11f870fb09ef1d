"""Tables for terminals, Markdown pages and files."""

import contextlib
import csv
import io
import json
import os
import re
import string

from common.command_line import printable, refuse_protected
from common.versions import workshop


def text_table(header, rows, left=1):
    """Return aligned lines; the first `left` columns start at the left, the others end at the right."""
    lines = [header, *([str(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(c.ljust(w) if i < left else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True)))
        for line in lines
    )


INERT = str.maketrans({":": "&#58;", ".": "&#46;"})  # GitHub makes links of addresses, but not of these


def markdown(text, links=False):
    """Return the text, or text in backticks, so that Markdown shows it in one line and obeys nothing in it but <br>.

    links: its links, pictures and addresses are ours and stay alive; else it may hold a name from anybody's file.
    """
    text = printable(" ".join(str(text).split()))
    if len(text) > 2 and text.startswith("`") and text.endswith("`"):
        return "`" + text[1:-1].replace("`", "'") + "`"
    text = re.sub(r"<(?!br>)(?=[A-Za-z/!?])", "&lt;", text)
    if links:
        return text
    text = re.sub(r"\](?=[(\[:])", r"\]", text)
    text = re.sub(r"(?i)(://|\b(?:mailto|xmpp):|\bwww\.)", lambda match: match[0].translate(INERT), text)
    return re.sub(r"(?<=\w)@(?=\w)", "&#64;", text)


def columns_of_words(rows):
    """Return the places of the first column and of all that hold no number."""
    holds_number = [any(re.match(r"[-+<~]?\d", str(cell)) for cell in column) for column in zip(*rows, strict=True)]
    return {0} | {place for place, found in enumerate(holds_number) if not found}


def markdown_table(header, rows, left=1, links=False):
    """Return a table; links: those in its cells are ours, see markdown().

    left: the columns that start at the left: so many, or the places of these.
    """
    at_left = range(left) if isinstance(left, int) else left
    marks = ["---" if place in at_left else "---:" for place in range(len(header))]
    header, *rows = ([markdown(cell, links).replace("|", "\\|") for cell in row] for row in (header, *rows))
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
    """Print the text, and write the content, an object, as JSON where --json asks; if one fails, the other is done."""
    if target:
        content = {"workshop": workshop()} | content
    if target == "-":
        print(json.dumps(content, indent=1))
        return
    try:
        if target:
            write_whole(target, json.dumps(content, indent=1) + "\n")
    finally:
        print(text)


def write_whole(path, text):
    """Write a file whole or not at all: a full disk leaves the older one. A pipe, which is no file, is written into.

    A write-protected file is not replaced.
    """
    refuse_protected(path)
    if os.path.exists(path) and not os.path.isfile(path):
        with open(path, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
        return
    partial = f"{path}.partial"
    try:
        with open(partial, "w", encoding="utf-8", errors="backslashreplace", newline="") as file:
            file.write(text)
        os.replace(partial, os.path.realpath(path))  # through a symbolic link
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(partial)
        raise type(error)(error.errno, error.strerror, str(path)) from None


def csv_cell(value):
    """Return a value for a cell: a number with at most six decimals, or a text that no spreadsheet takes for a formula.

    A text that begins like one gets an apostrophe before it. Control characters become escapes.
    """
    if isinstance(value, float):
        return round(value, 6)
    if not isinstance(value, str):
        return value
    return re.sub(r"^(?![+-]?[\d.,]+$)(?=\s*[=+@\uff1d\uff0b\uff20-]\s*\S)", "'", printable(value))


def write_csv(rows, path):
    """Write rows of equal keys to a file."""
    table = io.StringIO()
    writer = csv.DictWriter(table, rows[0].keys(), lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: csv_cell(value) for name, value in row.items()} for row in rows)
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
