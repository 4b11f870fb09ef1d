"""Draw operators under a device's two ceilings."""

from common.command_line import Failure, printable, refuse_protected
from common.tables import rounded

FLOP_PER_BYTE = (0.05, 3000)  # of every picture: the rooflines of two versions can be laid side by side
LEAST_SHOWN = 1.5 * FLOP_PER_BYTE[0]  # where operators with fewer FLOP per byte are drawn
NAMED = 14  # the points with the longest times get a name


def draw_roofline(path, title, ceilings, points):
    """Draw points (name, FLOP per byte, TFLOP/s or None, ms or None) under the device's ceilings, into a file.

    A point's area is its time. One without a rate was not timed: a dotted line shows its FLOP per byte and no more. The
    scales follow from the ceilings alone. Failure without matplotlib.
    """
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError:
        raise Failure(1, f"{path.name} needs matplotlib: pip install '.[plots]'") from None
    refuse_protected(path)
    figure = Figure(figsize=(5.5, 5.0), layout="constrained")  # as wide as a phone's screen
    with rc_context({"text.parse_math": False}):  # names from a profile may contain $
        draw_points(figure, title, ceilings, points)
        figure.savefig(path, dpi=200)


def draw_points(figure, title, ceilings, points):
    """Draw the ceilings, the points and their legend into a figure."""
    top = ceilings["matmul_tflops"]
    bandwidth = ceilings["copy_tb_s"]
    (low, high) = FLOP_PER_BYTE
    longest = max((ms for *_, ms in points if ms), default=1)
    axes = figure.subplots()
    axes.plot([low, top / bandwidth, high], [bandwidth * low, top, top], color="black", linewidth=2)
    axes.text(high, 1.15 * top, f"matmul {rounded(top)} TFLOP/s", ha="right", fontsize=9)
    axes.text(1.3 * low, 25 * bandwidth * low, f"copy {rounded(1e3 * bandwidth)} GB/s", fontsize=9)
    axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(bandwidth * low / 100, 3 * top))
    axes.set(xlabel="FLOP per byte", ylabel="TFLOP/s", title="\n".join(map(printable, title.split("\n"))))
    for i, (name, x, rate, ms) in enumerate(sorted(points, key=lambda point: -(point[3] or 0))):
        color = f"C{i % 10}"
        label = printable(name.lstrip("_")) if i < NAMED else None  # a legend leaves out names that begin with "_"
        if rate is None:
            axes.axvline(x, color=color, linestyle=":", label=label)
            continue
        marker = "os^"[i // 10 % 3]  # there are ten colors
        area = 20 + 400 * (ms or longest / 8) / longest
        axes.scatter(x, rate, area, color, marker=marker, alpha=0.7, zorder=3, label=label)
    legend = axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=2, frameon=False, fontsize=9)
    for handle in legend.legend_handles:
        if hasattr(handle, "set_sizes"):
            handle.set_sizes([40])
    axes.spines[["top", "right"]].set_visible(False)
