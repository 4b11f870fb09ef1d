"""maintain/pictures.py draws the numbers that it tells: bars, points and lines of the newest record's pictures."""

import itertools
import statistics

import pytest

from maintain import pictures
from maintain.records import newest_record

plt = pytest.importorskip("matplotlib.pyplot", reason="matplotlib is missing: pip install '.[test]'")
from matplotlib.collections import LineCollection, PathCollection

TFLOPS = 1e-3  # of a GB/s with one FLOP per byte


@pytest.fixture
def draw():
    """Return a function that draws a picture of the newest record: what it found, and its axes."""
    plt.switch_backend("Agg")
    figures = []

    def drawn(name):
        picture = pictures.PICTURES[name]
        found = picture.find(newest_record().holding(picture.part))
        if not found:
            pytest.skip(f"no record has the part {picture.part}")
        figure, axes = plt.subplots(picture.panels, squeeze=False)
        figures.append(figure)
        picture.draw(axes[:, 0], found)
        return found, axes[:, 0]

    yield drawn
    for figure in figures:
        plt.close(figure)


def bars(ax):
    """Return (left, right, middle of the row) of an axis's bars, without those of the legend."""
    found = [(bar.get_x(), bar.get_x() + bar.get_width(), bar.get_y() + bar.get_height() / 2) for bar in ax.patches]
    return [bar for bar in found if bar[0] != bar[1]]


def points(ax):
    """Return (x, y) of an axis's points."""
    scatters = [found for found in ax.collections if isinstance(found, PathCollection)]
    return [tuple(point) for scatter in scatters for point in scatter.get_offsets()]


def ranges(ax):
    """Return (smallest, largest, row) of an axis's horizontal lines."""
    lines = [found for found in ax.collections if isinstance(found, LineCollection)]
    return [(*segment[:, 0], segment[0, 1]) for each in lines for segment in each.get_segments()]


def close(found, wanted):
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        assert one == pytest.approx(other), (one, other)


def test_the_slowest_step_is_the_first_bar(draw):
    found, (ax,) = draw("steps")
    times = [ms for _, ms in found["ms"]]
    assert times == sorted(times, reverse=True)
    longest = 1.2 * next(ms for rung, ms in found["ms"] if rung.name == "peer")
    close(bars(ax), [(0, min(ms, longest), place) for place, ms in enumerate(times)])
    assert [text.get_text().split()[0] for text in ax.texts] == [pictures.rounded(ms) for ms in times]


def test_falls_lead_from_the_step_that_a_rung_builds_on_to_its_own(draw):
    (column,), (ax,) = draw("ladder")
    timed = pictures.timed_rungs(column)
    wanted = [(column.step_ms(rung.base), column.step_ms(rung.name), place) for place, rung, _ in timed if rung.saves]
    close(bars(ax), wanted)
    close(points(ax), [(column.step_ms(rung.name), place) for place, rung, _ in timed])
    close(ranges(ax), [(min(times), max(times), place) for place, _, times in timed])


def test_pairs_are_the_medians_of_both_ways(draw):
    columns, (ax,) = draw("ladder_small")
    timed = [found for column in columns for found in pictures.timed_rungs(column)]
    close(points(ax), [(statistics.median(times), place) for place, _, times in timed])
    close(ranges(ax), [(min(times), max(times), place) for place, _, times in timed])


def test_memory_is_in_gib_over_tokens(draw):
    found, (ax,) = draw("memory")
    lines = {line.get_label(): list(zip(*line.get_data(), strict=True)) for line in ax.lines}
    for row in found["rows"]:
        peaks = zip(found["lengths"], row["peaks_mb"], strict=True)
        close(lines[f"V{row['version']}"], [(length, peak / 2**10) for length, peak in peaks if peak])


def test_levels_of_memory_have_their_bytes(draw):
    found, (ax,) = draw("levels")
    close([right for _, right, _ in bars(ax)], [size for sizes in found.values() for size in sizes])
    units = dict(zip(pictures.LEVELS, found["NVIDIA H100"], strict=True))
    assert units["registers, per unit"] == 64 * 1024 * 4  # NVIDIA's guide: 64 K registers of 32 bits
    assert units["registers, all"] == 132 * units["registers, per unit"]
    units = dict(zip(pictures.LEVELS, found["AMD MI300X"], strict=True))
    assert units["registers, per unit"] == 512 * 2**10  # AMD's white paper: 128 KB of each of four SIMDs
    assert units["shared memory, per unit"] == 64 * 2**10


def test_a_switch_s_bar_ends_at_its_gain(draw):
    found, (ax,) = draw("ablation2")
    gains = [(key, place, row[key]) for key in ("alone", "last") for place, row in enumerate(found)]
    shown = [(gain.ratio, place) for _, place, gain in gains if gain and (gain.shown or gain.missing)]
    close([(right, round(place)) for _, right, place in bars(ax)], shown)


def test_phases_of_a_stage_follow_one_another(draw):
    found, (ax,) = draw("stages")
    rows = []
    for phase in range(3):
        for place, row in enumerate(found):
            ends = list(itertools.accumulate(row["phases"], initial=0))
            rows.append((ends[phase], ends[phase + 1], place))
    close(bars(ax), rows)


def test_the_roofline_is_copy_and_matmul_rate(draw):
    found, (ax,) = draw("roofline")
    roof = list(zip(*ax.lines[0].get_data(), strict=True))
    assert roof[1][0] * found["copy"] * TFLOPS == pytest.approx(found["top"]) == roof[1][1]
    assert roof[0][0] * found["copy"] * TFLOPS == pytest.approx(roof[0][1])
    close(points(ax), [point for _, x, *both in found["points"] for point in ((x, both[0]), (x, both[1]))])


def test_efficiencies_are_bars_in_percent(draw):
    found, (ax,) = draw("scaling")
    close(bars(ax), [(0, percent, place) for place, (_, percent) in enumerate(found)])


def test_a_timeline_s_bars_are_kernels(draw):
    found, axes = draw("timeline")
    for ax, (_, kernels) in zip(axes, found, strict=True):
        boxes = [path.get_extents() for path in ax.collections[0].get_paths()]
        close([(box.x0, box.width) for box in boxes], [(start, us) for start, us, _ in kernels])
    assert all(0 <= start < pictures.WINDOW_US for _, kernels in found[:2] for start, *_ in kernels)
