"""The instructor's page answers every deliverable of the timetable, with right numbers."""

import math
import re
import sys

import pytest

from common import counts
from common.versions import REPOSITORY, load_version
from maintain.records import newest_record

sys.path.insert(0, str(REPOSITORY / "exercises"))
from sessions import SESSIONS

PAGE = REPOSITORY / "exercises" / "INSTRUCTOR.md"
TEXT = PAGE.read_text(encoding="utf-8")
ANSWERS = TEXT.split("## Answers to the deliverables")[1].split("## Other GPUs")[0]
ASKS = re.compile(r"\*\*Deliverable|[Hh]and in")
CEILINGS = newest_record().json("kernels", "kernels.json")["ceilings"]
COPY = round(CEILINGS["copy"] / 1000, 2)  # TB/s, as the page of exercise 17 has it
SMALL = counts.sizes_of(load_version(1).parse_options(["--preset", "small", "--device", "cpu"]))


def row(link):
    """Return the answer in the line that links to a page."""
    (line,) = (line for line in ANSWERS.splitlines() if line.startswith("| [") and f"]({link})" in line.split("|")[1])
    return line.split("|")[2]


def asking():
    """Return the pages of the timetable that ask for a deliverable."""
    pages = [page for _, _, work in SESSIONS.values() for _, page, _ in work]
    return [page for page in pages if ASKS.search((REPOSITORY / page).read_text(encoding="utf-8"))]


@pytest.mark.parametrize("page", asking())
def test_every_deliverable_is_answered(page):
    if page.endswith("exercise_3_rocm_tools.md"):
        return  # the hottest kernel of an AMD GPU, where nothing has been measured
    link = page.removeprefix("exercises/") if page.startswith("exercises/") else f"../{page}"
    assert row(link).strip()


def running(*tiles):
    """Return "m 3, l 1.1353; ..." of an online softmax over these tiles."""
    m, total, told = -math.inf, 0.0, []
    for tile in tiles:
        new = max(m, *tile)
        total = total * math.exp(m - new) + sum(math.exp(x - new) for x in tile)
        m = new
        told.append(f"m {m}, l {total:.4f}")
    return "; ".join(told)


def flop_per_byte(m, n):
    return 2 * m * n / (2 * (m + n))  # in bfloat16


TILES = [(1, 1), (16, 32), (64, 64), (128, 256)]
NUMBERS = {
    "01_row_sum/README.md": [f"{math.ceil(37 / 4)} programs", f"; {4 * math.ceil(37 / 4) - 37} rows"],
    "06_rmsnorm_backward/README.md": [f"{132 * 1024 * 4:,} bytes", f"{132 * 4 / 8192 / 2:.1%}".replace("%", " %")],
    "07_online_softmax/README.md": [running((1, 3), (2, 7), (0,))],
    "08_flash_attention/README.md": [f"{4096**2 * 4 // 2**20} MiB"],
    "22_causal_mask/README.md": [f"{64 * 65 // 2:,} tiles of the {64 * 64:,}", f"{100 * 65 / 128:.1f} %"],
    "09_causal_attention/README.md": [f"{64 * 65 // 2:,} tiles", f"{100 * 64 / (64 * 65 / 2):.1f} %"],
    "11_attention_dkdv/README.md": [f"= {8 * 4 * 512 // 64} programs"],
    "17_matmul/README.md": [
        f"{', '.join(f'{flop_per_byte(*tile):.3g}' for tile in TILES[:3])} and {flop_per_byte(*TILES[3]):.1f} FLOP",
        f"{', '.join(f'{COPY * flop_per_byte(*tile):.0f}' for tile in TILES[:3])} and "
        f"{COPY * flop_per_byte(*TILES[3]):.0f} TFLOP/s",
    ],
    "../version1_pytorch_baseline/exercises/exercise_1_baseline_analysis.md": [
        f"ln(1000) = {math.log(1000):.2f}",
        f"{sum(counts.required_flops(SMALL).values()) / 1e9:.1f} GFLOP",
    ],
    "../version1_pytorch_baseline/exercises/exercise_2_memory_analysis.md": [
        f"is {newest_record().row('v1', 'small', 'float32')['peak_memory_mb']:.0f} MiB",
        f"{16 * counts.parameter_count(SMALL) / 2**20:.0f} MiB do not",
        f"4F / H = {4 * SMALL.F // SMALL.H}",
    ],
    "../version2_pytorch_fused/exercises/exercise_2_attention_memory.md": [
        f"(4F + 10C) / H = {(4 * SMALL.F + 10 * SMALL.C) // SMALL.H}"
    ],
}


def test_the_page_of_exercise_17_asks_about_the_recorded_gpu():
    page = " ".join((REPOSITORY / "exercises" / "17_matmul" / "README.md").read_text(encoding="utf-8").split())
    matmul = CEILINGS["product"]["bfloat16"]
    assert f"a GPU with {COPY} TB/s could reach if no cache helped. BLAS reaches {matmul:.0f}." in page


@pytest.mark.parametrize("link", NUMBERS)
def test_numbers_of_the_answers(link):
    answer = row(link)
    assert [number for number in NUMBERS[link] if number not in answer] == []
