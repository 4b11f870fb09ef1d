"""Ratios that a GPU should show at medium in a graph: measured where its ladder was recorded, else predicted.

A prediction divides two roofline times of common/formulas/counts.py. It knows peaks and bytes, but neither launches
nor how far a kernel stays below its peak. A recorded GPU stands in the table both ways, which shows what a prediction
is worth.
"""

from common.formulas import counts
from common.formulas.gpus import gpu_named
from common.tables import markdown_table
from common.versions import load_version
from maintain import rungs

PRESET = "medium"
PREDICTED = ("MI250X", "MI300A", "MI300X", "MI325X", "MI355X", "A100", "H100", "H200", "B200")  # GPUs of clusters


def wanted():
    """Return {title of a ratio: the two rungs whose times it divides}."""
    found = {}
    for rung in rungs.LADDER:
        if rung.predicted:
            title, other = rung.predicted
            found[title] = (rungs.by_name(rungs.LADDER)[other], rung)
    return found


def predicted_ms(rung, gpu):
    """Return the roofline time of a rung's step at medium on a GPU of the tables."""
    options = load_version(1).parse_options(["--preset", PRESET, "--device", "cpu"])
    step = counts.step_counts(rung.version, rung.precision, counts.sizes_of(options))
    return counts.shortest_step_ms(step, gpu, rung.precision)


def predicted_ratios(gpu):
    """Return {title: ratio of two roofline times} of a GPU."""
    return {title: predicted_ms(first, gpu) / predicted_ms(second, gpu) for title, (first, second) in wanted().items()}


def measured_ratio(column, first, second):
    """Return the ratio of two rungs within rounds; of their medians where memory kept them apart; "..." without one."""
    if found := column.gain(second.name, first.name):
        return str(found)
    times = column.step_ms(first.name), column.step_ms(second.name)
    return f"{times[0] / times[1]:.2f}x, apart" if all(times) else "..."


def measured_row(column):
    """Return the row of a ladder's column; None where the tables do not know its GPU."""
    gpu = gpu_named(column.content["record"]["device"])
    return [gpu, "measured", *(measured_ratio(column, *pair) for pair in wanted().values())] if gpu else None


def expected_table(columns):
    """Return the ratios of the GPUs of these ladders at medium, and of those that are predicted; None without any."""
    measured = [row for row in map(measured_row, columns) if row]
    if not measured:
        return None
    recorded = [row[0] for row in measured]
    others = [gpu for gpu in PREDICTED if gpu not in recorded]
    rows = []
    for gpu in [*recorded, *others]:
        rows += [row for row in measured if row[0] == gpu]
        rows.append([gpu, "predicted", *(f"{ratio:.2f}x" for ratio in predicted_ratios(gpu).values())])
    return markdown_table(["GPU", "how known", *wanted()], rows, left=2)
