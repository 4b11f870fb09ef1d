"""exercises/TRACES.md: its generated parts on a trace whose answers are known by hand, and on the recorded ones."""

import contextlib
import gzip
import io
import json
import re
from types import SimpleNamespace

import pytest

from common.command_line import Failure
from common.profiles import clean
from common.versions import REPOSITORY
from conftest import METADATA, event
from maintain import timeline, traces
from maintain.records import Record, newest_record

PAGE = (REPOSITORY / "exercises" / "TRACES.md").read_text(encoding="utf-8")
GPU = {"pid": 0, "tid": 7}


def kernel(name, ts, dur, number, category="kernel"):
    return event(category, name, ts, dur, correlation=number) | GPU


def call(name, ts, number):
    return event("cuda_runtime", name, ts, 2, correlation=number) | {"pid": 1, "tid": 1}


# Three kernels and a copy, each 10 us after its launch but the last, 20 us: gaps of 16, 10 and 4 us, 24 of 54 us busy.
EAGER = [
    *(call("cudaLaunchKernel", ts, number) for ts, number in ((0, 1), (20, 2), (40, 3))),
    call("cudaMemcpyAsync", 40, 4),
    kernel("gemm", 10, 4, 1),
    kernel("adam", 30, 10, 2),
    kernel("Memcpy DtoD", 50, 6, 4, "gpu_memcpy"),
    kernel("gemm", 60, 4, 3),
]
# One launch, four kernels: the third, the longest, begins 0.1 us before the second ends; the only gap follows it.
REPLAYED = [
    call("cudaGraphLaunch", 0, 9),
    kernel("gemm", 10, 6, 9),
    kernel("gemm", 16, 6, 9),
    kernel("softmax", 21.9, 8, 9),
    kernel("adam", 30, 2, 9),
]
ROWS = """| 1 | kernels | 3 | 4 |
|  | copies and fills | 1 | 0 |
|  | launches by the host | 3 | 1 |
| 2 | first kernel to last, ms | 0.05 | 0.02 |
|  | busy, ms | 0.02 | 0.02 |
|  | busy, % | 44.4 | 99.5 |
| 3 | median kernel, us | 4.0 | 6.0 |
|  | median gap, us | 10.0 | 0.1 |
| 4 | launch to kernel, median us | 10 | 19 |
| 5 | longest kernel, us | 10 | 8 |""".splitlines()
FIRST = "* Task 5, V1: optimizer 42 %, GEMM 33 %, copies 25 %. The longest kernel is `adam` (optimizer)."
FOURTH = "* Task 5, V4: GEMM 55 %, attention 36 %, optimizer 9 %. The longest kernel is `softmax` (attention)."
HIDDEN = (
    "Perfetto may leave out 1 kernel, the longest among them: each begins a moment before the previous one has ended."
)


@pytest.fixture
def tmp_path(tmp_path):
    """Return a folder that no other test's record stands beside."""
    folder = tmp_path / "record"
    folder.mkdir()
    return folder


def write(folder, **events):
    """Write a part of these traces; return the record that has it. V1 takes 30 ms without a profiler, V4 1.5."""
    (folder / "trace").mkdir(exist_ok=True)
    for name, found in events.items():
        content = {"tiny_llama": METADATA, "traceEvents": found}
        (folder / "trace" / f"trace_{name}.json.gz").write_bytes(gzip.compress(json.dumps(content).encode()))
    (folder / "trace" / "record.json").write_text(json.dumps({"device": "GPU A", "date": "2026-01-01"}))
    steps = {("v1", "small", "float32"): 30.0, ("v4", "small", "float32"): 1.5}
    rows = {key: {"step_ms": ms} for key, ms in steps.items()}
    suite = {"record": {"device": "GPU B"}}
    part_of = Record(folder).holding
    return SimpleNamespace(folder=folder, holding=part_of, row=lambda *key: rows.get(key), suite=lambda: suite)


def texts(recorded):
    return traces.traces_texts(recorded, lambda record, _: f"{record['device']};")


def test_answers_by_hand(tmp_path):
    found = texts(write(tmp_path, v1=EAGER, v4=REPLAYED))
    table, _, told = found["traces"].partition("\n\n")
    assert table.splitlines()[2:] == ROWS
    assert told.splitlines() == [FIRST, f"{FOURTH} {HIDDEN}"]
    made = "0.1 ms in V1 and 0.0 ms in V4 under the profiler. GPU A;"
    without = "30.0 ms in V1 and 1.50 ms in V4 on GPU B."
    assert made in found["traces_made"] and found["traces_made"].endswith(without)


@pytest.mark.parametrize(
    ("added", "row"),
    [
        (kernel("gemm", 66, 1, 3), "| 1 | kernels | 4 | 4 |"),  # of a launch that has one already
        (kernel("Memset", 66, 1, 5, "gpu_memset"), "|  | copies and fills | 2 | 0 |"),
        (kernel("gemm", 40, 10, 1), "|  | busy, % | 63.0 | 99.5 |"),  # fills the gap of 10 us
        (kernel("gemm", 40, 2, 1), "|  | median gap, us | 8.0 | 0.1 |"),
        (kernel("gemm", 64, 50, 1), "| 5 | longest kernel, us | 50 | 8 |"),
        (
            kernel("gemm", 64, 50, 1),
            "* Task 5, V1: GEMM 78 %, optimizer 14 %, copies 8 %. The longest kernel is `gemm` (GEMM).",
        ),
    ],
)
def test_one_kernel_more_changes_the_answers(added, row, tmp_path):
    table = texts(write(tmp_path, v1=[*EAGER, added], v4=REPLAYED))["traces"]
    assert row not in [*ROWS, FIRST] and row in table.splitlines(), table


def test_a_long_gap_inside_the_step_is_idle_time(tmp_path):
    """The readers take a gap of more than a millisecond for a pause where nothing marks a step."""
    folder = write(tmp_path, v4=[kernel("gemm", 10, 500, 1), kernel("adam", 2010, 500, 2)]).folder / "trace"
    step = traces.step_of(folder / "trace_v4.json.gz")
    assert (step.busy_us, step.whole_us, step.gap_us) == pytest.approx((1000, 2500, 1500))


def test_without_a_row_there_is_no_time_without_a_profiler(tmp_path):
    recorded = write(tmp_path, v1=EAGER, v4=REPLAYED)
    recorded.row = lambda *key: None
    assert "Without" not in texts(recorded)["traces_made"]


def test_kernels_that_follow_or_nest_are_drawn():
    """A kernel that ends when the next begins, in binary fractions a little later, does not overlap it."""
    nested = [kernel("one", 0.1, 0.2, 1), kernel("two", 0.3, 5, 1), kernel("three", 1, 2, 1), kernel("four", 5.3, 1, 1)]
    assert timeline.overlapping(nested) == []
    other_row = kernel("five", 5, 9, 1) | {"tid": 8}
    assert timeline.overlapping([*nested, other_row]) == []
    five = other_row | GPU
    assert timeline.overlapping([*nested, five]) == [five]


def test_the_readers_output_is_theirs(tmp_path):
    text = texts(write(tmp_path, v1=EAGER, v4=REPLAYED))["traces_read"]
    shown = f"scripts/recorded/{tmp_path.name}/trace/trace_v1.json.gz"
    assert f"python scripts/analyze_kernel_launches.py --trace-file {shown}\n" in text
    assert f"python scripts/kernel_times.py {shown} --top 3\n" in text
    assert "trace_v1.json.gz (version 1, 2 x 16 tokens" in text and str(tmp_path.parent) not in text
    assert "launch-bound: the GPU waits 55.6 % of the time" in text
    assert re.search(r"^gemm +GEMM +2 +0\.008 +33\.3", text, re.MULTILINE)


def test_a_record_without_traces_changes_no_page(tmp_path):
    recorded = write(tmp_path, v1=EAGER, v4=REPLAYED)
    (tmp_path / "trace" / "record.json").unlink()  # cut off
    assert texts(recorded) == {}


def test_a_trace_that_is_missing_or_cut_off_is_named(tmp_path):
    recorded = write(tmp_path, v1=EAGER)
    with pytest.raises(Failure, match="trace_v4"):
        texts(recorded)
    path = tmp_path / "trace" / "trace_v1.json.gz"
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(Failure, match="trace_v1.*cut off"):
        texts(recorded)


# ---------------------------------------------------------------- the recorded traces


@pytest.fixture(scope="module")
def recorded_steps():
    folder = newest_record().holding("trace").folder / "trace"
    return [traces.step_of(folder / f"trace_v{version}.json.gz") for version in traces.VERSIONS]


@pytest.mark.parametrize("version", traces.VERSIONS)
def test_the_page_s_lines_of_python_find_the_same(version, recorded_steps, monkeypatch):
    """They read the file without any of our readers."""
    step = recorded_steps[traces.VERSIONS.index(version)]
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    monkeypatch.chdir(REPOSITORY)
    with contextlib.redirect_stdout(io.StringIO()) as output:
        exec(code.replace("trace_v1", f"trace_v{version}"), {})
    counts, medians, longest = output.getvalue().splitlines()
    assert counts == f"{step.kernels} kernels, {step.launches} launches"
    found = [float(number) for number in re.findall(r"[\d.]+", medians)]
    assert found == pytest.approx([step.kernel_us, step.gap_us, step.wait_us], abs=0.002)  # whole ns of a reader
    took, name = re.fullmatch(r"longest: (\d+) us, (.+)", longest).groups()
    assert (int(took), clean(name)) == (round(step.longest.total_ns / 1e3), step.longest.name)


def test_the_answers_sentences_are_true_of_what_was_recorded(recorded_steps):
    first, fourth = recorded_steps
    recorded = newest_record()
    assert first.launches == first.kernels > 1 and fourth.launches == 1  # 1
    assert fourth.kernels < first.kernels
    folder = recorded.holding("trace").folder / "trace"
    names = gzip.decompress((folder / "trace_v4.json.gz").read_bytes()).decode()
    assert "triton_poi_fused_" in names and '"cpu_op"' not in names and '"user_annotation"' not in names
    assert first.busy_us / first.whole_us < 0.5 < 0.9 < fourth.busy_us / fourth.whole_us  # 2
    assert first.gap_us > first.kernel_us and 10 * fourth.gap_us < fourth.kernel_us  # 3
    assert 1e3 * recorded.row("v1", traces.PRESET, first.precision, "eager")["step_ms"] > 3 * first.busy_us
    assert first.longest.total_ns / 1e3 < 0.05 * first.whole_us  # 5
    events = json.loads(gzip.decompress((folder / "trace_v1.json.gz").read_bytes()))["traceEvents"]
    numbers = {e["args"]["correlation"] for e in events if e.get("cat") == "kernel"}
    took = sorted(e["dur"] for e in events if e.get("cat") in timeline.RUNTIMES and e["args"]["correlation"] in numbers)
    assert first.wait_us < 2 * took[len(took) // 2]  # 4
