"""Each session has ten questions with folded answers, and their numbers follow from the tools and the record."""

import math
import re
import sys

import pytest
import torch

from common import counts, occupancy
from common.gpus import gpu_named
from common.versions import REPOSITORY, load_version
from maintain import rungs
from maintain.records import newest_record

sys.path.insert(0, str(REPOSITORY / "exercises"))
from sessions import SESSIONS

TEXT = (REPOSITORY / "exercises" / "QUESTIONS.md").read_text(encoding="utf-8")
PARTS = {int(part[0]): part for part in TEXT.split("## Session ")[1:]}
CEILINGS = newest_record().json("kernels", "kernels.json")["ceilings"]
COPY = round(CEILINGS["copy"] / 1000, 2)  # TB/s, as the page has it
MATMUL = round(CEILINGS["product"]["bfloat16"])  # TFLOP/s
EAGER, REPLAYED = (
    round(newest_record().row("v1+nodet", "medium", "bfloat16", way)["step_ms"]) for way in ("eager", "graph")
)
RECORDED_GPU = gpu_named(newest_record().suite()["record"]["device"])


def sizes(preset):
    return counts.sizes_of(load_version(1).parse_options(["--preset", preset, "--device", "cpu"]))


SMALL, MEDIUM = sizes("small"), sizes("medium")


def answers(session):
    """Return the session's answers by their numbers."""
    folded = PARTS[session].split("<details><summary>Answers</summary>")[1].split("</details>")[0]
    return {int(number): text for number, text in re.findall(r"^(\d+)\. (.*)$", folded, re.MULTILINE)}


def test_a_session_has_ten_questions_and_ten_folded_answers():
    assert list(PARTS) == [number for number in SESSIONS if number != 7]
    for session, part in PARTS.items():
        assert part.splitlines()[0] == f"{session}: {SESSIONS[session][0]}"
        asked = re.findall(r"^(\d+)\. ", part.split("<details>")[0], re.MULTILINE)
        assert asked == [str(number) for number in range(1, 11)] == [str(number) for number in answers(session)]


def test_sizes_are_those_of_the_preset():
    told = f"T {SMALL.T}, {SMALL.L} layers, C {SMALL.C}, H {SMALL.H}, K {SMALL.K}, F {SMALL.F}, V {SMALL.V}"
    assert f"B {SMALL.B}, {told}, {counts.parameter_count(SMALL):,} parameters" in " ".join(TEXT.split())


def test_every_page_of_the_frame_links_the_questions():
    for page in ("version3_triton/README_WORKSHOP.md", "exercises/README.md", "exercises/INSTRUCTOR.md"):
        assert "QUESTIONS.md" in (REPOSITORY / page).read_text(encoding="utf-8"), page


def launch_us():
    """Return how long a launch takes by the page on the GPU, in us."""
    page = (REPOSITORY / "exercises" / "GPU.md").read_text(encoding="utf-8")
    (found,) = re.findall(r"launches become one: the host needs (\d+) us for each", page)
    return int(found)


def launches(version, precision):
    return counts.total(counts.step_counts(version, precision, SMALL), "launches")


def forward_bytes(version, part):
    return counts.step_counts(version, "float32", SMALL)[part]["forward"]["bytes"]


def part_bytes(version, part):
    return counts.both_phases(counts.step_counts(version, "float32", SMALL), "bytes")[part]


def flop_per_byte(m, n):
    return 2 * m * n / (2 * (m + n))  # in bfloat16


def online_softmax(*tiles):
    """Return m and l after the last tile."""
    m, total = -math.inf, 0.0
    for tile in tiles:
        new = max(m, *tile)
        total = total * math.exp(m - new) + sum(math.exp(x - new) for x in tile)
        m = new
    return m, total


def swiglu_gradients(gate, up):
    gate, up = (torch.tensor(float(x), requires_grad=True) for x in (gate, up))
    (torch.nn.functional.silu(gate) * up).backward()
    return gate.grad.item(), up.grad.item()


def stage(number):
    """Return the stage's recorded step, phases and trained percentage."""
    table = (newest_record().folder / "stages" / "comparison.txt").read_text()
    (line,) = (line for line in table.splitlines() if line.split()[0] == str(number))
    found = line.split()
    return {"step": float(found[1]), "phases": [float(x) for x in found[5:8]], "trained": float(found[-2])}


def bf16_spacing(value):
    near = torch.tensor(value, dtype=torch.bfloat16)
    return (torch.nextafter(near, torch.tensor(math.inf, dtype=torch.bfloat16)) - near).item()


def numbers():
    """Return {(session, question): [text that the answer must contain]}."""
    m, total = online_softmax((1, 3), (2, 7), (0,))
    dgate, dup = swiglu_gradients(0, 2)
    gfx942 = occupancy.TARGETS["gfx942"]
    one_norm = 65_536 * 1024 * 2
    registers = math.ceil(195 / gfx942.granule) * gfx942.granule
    return {
        (1, 1): [f"= {math.log(SMALL.V):.2f}"],
        (1, 3): [f"{sum(counts.required_flops(SMALL).values()) / 1e9:.1f} GFLOP"],
        (1, 4): [f"{16 * counts.parameter_count(SMALL) / 2**20:.0f} MiB"],
        (1, 5): [f"{MEDIUM.B * MEDIUM.H * MEDIUM.T**2 * 4 / 1e6:.0f} MB"],
        (1, 8): [f"= {4 * SMALL.F // SMALL.H}"],
        (1, 9): [
            f"{launches(1, 'bfloat16'):,} launches",
            f"{launches(1, 'bfloat16') * launch_us() / 1000:.1f} ms ([{launch_us()} us](GPU.md)",
        ],
        (1, 10): [f"{len({thread * 512 * 4 // 128 for thread in range(32)})} lines", f"{100 * 4 / 128:.1f} %"],
        (2, 1): [f"{100 * (1 - 1 / 3):.0f} %"],
        (2, 2): [f"{launches(1, 'float32'):,} and {launches(2, 'float32'):,}"],
        (2, 3): [f"{100 * (1 - forward_bytes(2, 'QKV projection') / forward_bytes(1, 'QKV projection')):.0f} %"],
        (2, 5): [f"{3 * 3} and {1 * 3}"],
        (2, 6): [f"{8 * 8 * 1024 * 4 / 1e6:.2f} MB"],
        (2, 7): [f"{part_bytes(2, 'SwiGLU') / part_bytes(1, 'SwiGLU'):.2f} times"],
        (2, 8): [f"{1 / 0.6:.2f} times"],
        (2, 9): [f"{MATMUL / COPY:.0f} FLOP"],
        (2, 10): [f": {5 / 40}"],
        (3, 1): [f"{math.ceil(37 / 4)} programs", f"{4 * math.ceil(37 / 4) - 37} rows"],
        (3, 2): [f"{128 - 100} columns"],
        (3, 4): [f"{4 * 1024 * 2:,} bytes", f"writes of {1024 * 2:,}"],
        (3, 5): [f"{2 * one_norm / COPY / 1e6:.1f} us", f"{one_norm / 1e6:.1f} MB"],
        (3, 7): [f"dgate = {dgate}, dup = {dup}"],
        (4, 1): [f"{2 * MEDIUM.B * MEDIUM.T * MEDIUM.C * 2 * MEDIUM.F / 1e9:.1f} GFLOP"],
        (4, 2): [f"{flop_per_byte(64, 64)} and {flop_per_byte(1, 1)}"],
        (4, 3): [f"{COPY * flop_per_byte(64, 64):.0f} TFLOP/s. BLAS reaches {MATMUL} "],
        (4, 4): [f"{math.ceil(50 / 16) * math.ceil(70 / 32)} programs"],
        (4, 5): [f"m = {m}, l = {total:.4f}"],
        (4, 8): [f"{4096**2 * 4 // 2**20} MiB"],
        (4, 9): [f"{100 * 64 / (64 * 65 / 2):.1f} %", f"64 of {64 * 65 // 2:,}"],
        (4, 10): [f"head {11 // (16 // 8)}"],
        (5, 1): [f"{math.log(1000) + 0.02**2 * 512 / 2:.2f}"],
        (5, 3): [f"{512**0.5:.1f}"],
        (5, 4): [f"{512 * 4 // 64} and {len({i * 1024 * 4 // 64 for i in range(512)})}"],
        (5, 5): [f"{sum(stage(3)['phases']):.2f} ms"],
        (5, 6): [f"{SMALL.B * SMALL.T * SMALL.F:,} programs"],
        (5, 7): [
            f"{SMALL.B * SMALL.T * SMALL.F * 3 * SMALL.C * 4 / 1e9:.1f} GB",
            f"{(SMALL.B * SMALL.T * SMALL.C + 2 * SMALL.F * SMALL.C) * 4 / 1e6:.1f} MB",
        ],
        (5, 8): [f"{stage(6)['trained']} %", f"{SMALL.V * SMALL.C:,} of {counts.parameter_count(SMALL):,}"],
        (5, 9): [f"{12 * counts.parameter_count(SMALL) / 1e6:.1f} MB"],
        (5, 10): [f"of {stage(6)['phases'][1]} ms after a forward of {stage(6)['phases'][0]} ms"],
        (6, 2): [f"{100 * (EAGER - REPLAYED) / EAGER:.0f} %"],
        (6, 7): [f"{bf16_spacing(0.4):.5f}; from about {bf16_spacing(0.4) / 2:.5f}"],
        (6, 8): [f"{512 // registers} waves", f"rounded up to {registers}"],
    }


@pytest.mark.parametrize(("at", "told"), numbers().items(), ids=str)
def test_numbers_of_an_answer(at, told):
    session, question = at
    answer = answers(session)[question]
    assert [text for text in told if text not in answer] == [], answer


def test_recorded_times_that_questions_quote():
    assert f"says {stage(3)['step']:.3f} ms" in PARTS[5]
    assert f"A step takes {EAGER} ms eagerly and {REPLAYED} ms replayed." in PARTS[6]
    assert f"use {COPY} TB/s, that of a copy on the recorded {RECORDED_GPU};" in TEXT
    assert f"computes {MATMUL} TFLOP/s and copies {COPY}" in PARTS[2]
    assert f"how long do they take at {launch_us()} us each?" in PARTS[1]
    graph = rungs.columns_of(newest_record(), "ladder")["small", True]
    assert f"take {graph.step_ms('b'):.2f} ms in a graph" in PARTS[1]
