"""Ratios that a GPU should show at medium: measured where a run was recorded, else predicted from data sheets.

A prediction divides two roofline times of common/counts.py. It knows peaks and bytes, but neither launches nor how far
a kernel stays below its peak. The recorded GPU stands in the table both ways, which shows what a prediction is worth.
"""

from common import counts
from common.tables import markdown_table
from common.versions import load_version

PRESET = "medium"
# Title of a ratio, then the two steps (version, precision) whose times it divides.
RATIOS = [
    ("V1 fp32 / bf16", (1, "float32"), (1, "bfloat16")),
    ("bf16 V1 / V2", (1, "bfloat16"), (2, "bfloat16")),
    ("bf16 V1 / V3", (1, "bfloat16"), (3, "bfloat16")),
]


def predicted_ms(step, gpu):
    """Return the roofline time of a step (version, precision) at medium on a GPU of the tables."""
    options = load_version(1).parse_options(["--preset", PRESET, "--device", "cpu"])
    version, precision = step
    return counts.shortest_step_ms(counts.step_counts(version, precision, counts.sizes_of(options)), gpu, precision)


def predicted_ratios(gpu):
    """Return {title: ratio of two roofline times} of a GPU."""
    return {title: predicted_ms(first, gpu) / predicted_ms(second, gpu) for title, first, second in RATIOS}


def measured_ratios(recorded):
    """Return {title: ratio of two recorded step times}; a ratio without both rows is left out."""
    found = {}
    for title, first, second in RATIOS:
        rows = [recorded.row(f"v{version}", PRESET, precision) for version, precision in (first, second)]
        if all(rows):
            found[title] = rows[0]["step_ms"] / rows[1]["step_ms"]
    return found


def expected_table(recorded):
    """Return the ratios of the recorded GPU and of all GPUs that the tables know; None without a recorded GPU."""
    here = counts.known_gpu(recorded.suite()["record"]["device"])
    measured = measured_ratios(recorded)
    if here is None or not measured:
        return None
    titles = [title for title, _, _ in RATIOS]
    rows = [[here, "measured", *(f"{measured[title]:.2f}" if title in measured else "..." for title in titles)]]
    for gpu in sorted(counts.PEAK_TFLOPS, key=lambda name: name != here):
        found = predicted_ratios(gpu)
        rows.append([gpu, "predicted", *(f"{found[title]:.2f}" for title in titles)])
    return markdown_table(["GPU", "how known", *titles], rows, left=2)
