"""Numbers that decide a command's verdict or exit status: just below each of them, and just above."""

import argparse
import json
import math
from types import SimpleNamespace
from unittest import mock

import pytest

import analyze_batch_scaling as batch_scaling
import analyze_bottlenecks as bottlenecks
import analyze_communication as communication
import analyze_gemm_operations as gemms
import analyze_memory_scaling as memory_scaling
import compare_training
import compare_versions
import fusion_ablation_study as ablation
import inspect_kernels
import kernel_counters
import optimize_batch_size as batch_tool
import performance_regression_test as regression
import quickstart
import run_deepspeed_flops as flops_tool
from common import command_line
from common.command_line import Failure
from common.formulas import tf32
from common.machine import gemm_probe, room
from common.measuring import accuracy, ceilings, runs
from common.measuring.runs import OutOfMemory, TimeLimit
from common.profiles.model import Kernel, Profile
from common.ratios import gain


@pytest.mark.parametrize(("seconds", "due"), [(9.9, False), (10.0, True)])
def test_long_work_is_told_every_ten_seconds(seconds, due, monkeypatch):
    now = [5.0]
    monkeypatch.setattr(command_line.time, "monotonic", lambda: now[0])
    pace = command_line.Pace()
    for _ in range(2):
        now[0] += seconds
        assert pace.is_due() is due and not pace.is_due()
        pace.begin()


@pytest.mark.parametrize(("seconds", "told"), [(9.9, ""), (10.0, "   step 1\n")])
def test_a_silent_script_is_followed(seconds, told, monkeypatch, capsys):
    now = [5.0]
    monkeypatch.setattr(command_line.time, "monotonic", lambda: now[0])
    tell = runs.followed()
    now[0] += seconds
    for line in ("\n", "step 1\n", "step 2\n"):
        tell(line)
    assert capsys.readouterr().err == told


# ---------------------------------------------------------------- accuracy, speed


@pytest.mark.parametrize(("loss", "same"), [(2.25, True), (2.2501, False), (1.75, True), (1.7499, False)])
def test_a_loss_may_be_off_by_its_bound(loss, same):
    assert accuracy.same_loss(loss, 2.0, 0.125) is same and accuracy.same_loss(-loss, -2.0, 0.125) is same
    assert not accuracy.same_loss(math.nan, 2.0, 0.125)


@pytest.mark.parametrize(("error", "passed"), [(0.125, True), (0.1251, False)])
def test_an_error_may_be_as_large_as_its_bound(error, passed):
    """The last of the entries decides."""
    entries = [{"kind": "gradient", "name": name, "error": 0.0, "bound": 0.125} for name in "ab"]
    entries[-1]["error"] = error
    found = accuracy.verdict(entries)
    assert found["passed"] is passed and found["worst"]["name"] == "b"


@pytest.mark.parametrize(("intensity", "limit"), [(249.9, "memory"), (250.0, "memory"), (250.1, "compute")])
def test_an_operation_is_bound_by_memory_up_to_where_the_ceilings_meet(intensity, limit):
    assert ceilings.bound(intensity, {"matmul_tflops": 1000.0, "copy_tb_s": 4.0}) == limit


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (1.2, 1.5, "faster"),
        (1.199, 1.5, "too close to tell"),
        (1.0, 1.2, "too close to tell"),
        (1.0, 1.199, "slower"),
    ],
)
def test_all_rounds_reach_the_speed_up_or_none_does(low, high, verdict):
    assert regression.judge(gain([low, high], [1.0, 1.0]), 1.2) == verdict


@pytest.mark.parametrize(("took", "fits"), [(40.0, True), (40.1, False)])
def test_a_run_is_begun_if_there_is_time_for_a_quarter_more(took, fits, monkeypatch):
    """Two runs of 40 s each want 100 s."""
    monkeypatch.setattr(runs.time, "monotonic", lambda: 0.0)
    limit = TimeLimit(100)
    limit.took = [took]
    assert limit.room(2) is fits and limit.reached is not fits


@pytest.mark.parametrize(("longest", "fits"), [(100.0, True), (100.1, False)])
def test_a_run_is_begun_if_there_is_time_for_the_longest_so_far(longest, fits, monkeypatch):
    monkeypatch.setattr(runs.time, "monotonic", lambda: 0.0)
    limit = TimeLimit(100)
    limit.took = [longest, 1.0, 1.0]
    assert limit.room() is fits


def test_the_first_differing_gradient_is_named_only_if_it_is_beyond_its_bound():
    gradient = {"kind": "gradient", "name": "w", "error": 0.125, "bound": 0.125}
    logits = {"kind": "logits", "name": "logits", "error": 0.2, "bound": 0.1}
    found = {"passed": False, "worst": logits, "worst_of_each_kind": {"gradient": gradient}}
    assert quickstart.first_fault(found)[0] == "the first logits is off by 2.0e-01, allowed 1.0e-01"
    found["worst_of_each_kind"]["gradient"] = gradient | {"error": 0.126}
    assert quickstart.first_fault(found)[0].startswith("relative error 1.3e-01 of the gradient of w")


@pytest.mark.parametrize(("factor", "same"), [(1 + 0.99e-4, True), (1 + 1.01e-4, False)])
def test_the_last_loss_of_a_graph_may_be_off_by_a_losss_bound(factor, same, tmp_path, capsys):
    for name, last, captured in (("graph", 2.5 * factor, True), ("eager", 2.5, False)):
        content = {"version": 4, "config": {}, "options": {"use_amp": False, "tf32": False}, "environment": {}}
        content |= {"steps": [{"loss": 3.0}, {"loss": last}], "summary": {"graph": {"captured": captured}}}
        (tmp_path / name).write_text(json.dumps(content))
    if same:
        room.graph(tmp_path / "graph", tmp_path / "eager")
        assert "agree to 9.9e-05" in capsys.readouterr().out
    else:
        with pytest.raises(Failure, match="differ from the eager ones by 1.0e-04"):
            room.graph(tmp_path / "graph", tmp_path / "eager")


# ---------------------------------------------------------------- GEMMs, kernels


@pytest.mark.parametrize(("rate", "limit"), [(5.0, "compute"), (4.99, "slow")])
def test_a_gemm_is_slow_below_half_of_what_it_could_reach(rate, limit):
    gemm = {"flops": 1e9, "flop_per_byte": 1000.0, "us": 1e3 / rate, "batch": 1, "m": 1280, "n": 1280}
    assert gemms.rated(gemm, {"matmul_tflops": 10.0, "copy_tb_s": 1.0}, 100)["bound"] == limit


@pytest.mark.parametrize(
    ("m", "n", "processors", "limit"),
    [
        (128, 128, 1, "slow"),
        (128, 128, 2, "too small"),
        (129, 128, 2, "slow"),
        (129, 129, 4, "slow"),
        (129, 129, 5, "too small"),
    ],
)
def test_a_gemm_is_too_small_if_it_has_fewer_tiles_than_the_gpu_processors(m, n, processors, limit):
    gemm = {"flops": 1e9, "flop_per_byte": 1000.0, "us": 1e3, "batch": 1, "m": m, "n": n}
    assert gemms.rated(gemm, {"matmul_tflops": 10.0, "copy_tb_s": 1.0}, processors)["bound"] == limit


def test_a_step_counts_the_small_gemms_of_all_its_rows():
    rows = [
        {"calls": calls, "flops": 1.0, "us": 1.0, "bound": bound} for calls, bound in ((2, "slow"), (3, "too small"))
    ]
    found = gemms.step_row(SimpleNamespace(B=1, T=1), [*rows, rows[1]], {"matmul_tflops": 1.0})
    assert found["too_small"] == 6


@pytest.mark.parametrize(("error", "said"), [(-1.01e-4, "rounds down"), (-0.99e-4, "rounds to nearest")])
def test_tf32_rounds_down_if_its_errors_do_not_cancel(error, said, monkeypatch):
    """Cut off, they are -7e-4 on average; rounded, 1e-6."""
    monkeypatch.setattr(tf32, "rounds_to_tf32", lambda device: True)
    assert said in gemm_probe.describe_rounding(error, "cpu")


@pytest.mark.parametrize(("times", "stalled"), [(100.0, False), (100.1, True)])
def test_a_gemm_stalls_if_it_takes_a_hundred_times_what_it_needs(times, stalled, monkeypatch, capsys):
    """The last of the three decides. One that no library was tuned for takes 2 to 20 times that."""
    taken = iter([(1.0, 1.0), (1.0, 1.0), (1.0, times)])
    monkeypatch.setattr(gemm_probe, "time_calls", lambda *_: next(taken))
    monkeypatch.setattr(gemm_probe, "needed_ms", lambda *_: 1.0)
    monkeypatch.setattr(gemm_probe, "TOKENS", 2)
    if stalled:
        with pytest.raises(Failure, match="set TORCH_BLAS_PREFER_HIPBLASLT=0: a GEMM takes 100.10 ms, 100.1 times"):
            gemm_probe.probe("bfloat16", "cpu")
    else:
        gemm_probe.probe("bfloat16", "cpu")
        assert "100.0 times what it needs" in capsys.readouterr().out


@pytest.mark.parametrize(("text", "number"), [("1", 1), ("+2", 2), ("0", None), ("-1", None), ("1.0", None)])
def test_a_positive_number_is_a_whole_one_from_1_on(text, number):
    if number:
        assert command_line.positive(text) == number
    else:
        with pytest.raises((argparse.ArgumentTypeError, ValueError)):
            command_line.positive(text)


@pytest.mark.parametrize(("text", "number"), [("1e-9", 1e-9), ("0", None), ("-1", None), ("inf", None)])
def test_a_demanded_speed_up_is_positive(text, number):
    if number:
        assert regression.speedup(text) == number
    else:
        with pytest.raises((argparse.ArgumentTypeError, ValueError)):
            regression.speedup(text)


@pytest.mark.parametrize(("text", "number"), [("1,234.5", 1234.5), ("12,345", 12345), ("1,23", None), ("1.2.3", None)])
def test_a_counter_has_its_decimals_after_a_point(text, number):
    if number:
        assert kernel_counters.value_of(text) == number
    else:
        with pytest.raises(Failure, match="has numbers like"):
            kernel_counters.value_of(text)


@pytest.mark.parametrize(("rounds", "said"), [(4, ["speed-ups are not judged: 4 rounds of the 5 needed"]), (5, [])])
def test_versions_are_compared_in_five_rounds(rounds, said, monkeypatch):
    monkeypatch.setattr(compare_versions, "run_in_rounds", lambda *_: ({"v1": [1]}, {"v1 again": "it failed"}))
    monkeypatch.setattr(compare_versions, "accuracies", lambda *_: {"v1": {}})
    monkeypatch.setattr(compare_versions, "measured_row", lambda *_: {})
    monkeypatch.setattr(compare_versions, "add_speedups", lambda *_: [])
    monkeypatch.setattr(compare_versions, "load_script", lambda *_: mock.Mock())
    found = compare_versions.study({"v1": "v1.py"}, [], rounds)
    assert (found["noise"], found["problems"]) == (said, ["v1 again: it failed"])


def compiled(**more):
    row = {"target": "NVIDIA H100", "shared_bytes": 0, "tensor_memory": 0, "stores": 1, "spills": 0, "dots": 0}
    return row | {"matrix_instructions": 0} | more


def test_a_kernel_may_use_all_of_its_target_and_no_byte_more(monkeypatch):
    target = SimpleNamespace(shared=232448, data_centre=True)
    monkeypatch.setitem(inspect_kernels.TARGETS, "NVIDIA H100", target)
    assert inspect_kernels.problems(compiled(shared_bytes=232448, tensor_memory=512)) == []
    (shared,) = inspect_kernels.problems(compiled(shared_bytes=232449))
    (columns,) = inspect_kernels.problems(compiled(tensor_memory=513))
    assert "requests 232449 bytes of shared memory, the target has 232448" in shared
    assert "requests 513 columns of tensor memory, the target has 512" in columns
    assert inspect_kernels.problems(compiled(spills=1)) == ["spills 1 registers"]
    assert inspect_kernels.problems(compiled(dots=1)) and not inspect_kernels.problems(
        compiled(dots=1, matrix_instructions=1)
    )
    assert "writes no result" in inspect_kernels.problems(compiled(stores=0))[0]


@pytest.mark.parametrize(("version", "old"), [("3.5.1", True), ("3.6.0", False), ("3.10.0", False), ("2.9.9", True)])
def test_kernels_are_inspected_from_triton_3_6_on(version, old, monkeypatch):
    monkeypatch.setattr("triton.__version__", version)
    assert bool(inspect_kernels.too_old()) is old


@pytest.mark.parametrize(
    ("text", "taken"), [("1x1", True), ("64x32", True), ("0x32", False), ("64x0", False), ("48x16", False)]
)
def test_both_sides_of_a_tile_are_powers_of_two(text, taken):
    if taken:
        assert inspect_kernels.tile(text) == tuple(map(int, text.split("x")))
    else:
        with pytest.raises(ValueError, match="both sides must be powers of two"):
            inspect_kernels.tile(text)


def test_executed_kernels_may_be_off_by_two_units_in_the_last_place():
    """Triton's interpreter cuts bfloat16 off."""
    assert inspect_kernels.ALLOWED == {"bf16": 2**-6, "fp16": 2**-9, "fp32": 1e-5}


@pytest.mark.parametrize(("share", "agrees"), [(0.999e-6, True), (1.001e-6, False)])
@pytest.mark.parametrize("sign", [1, -1])
def test_a_counter_agrees_with_the_formula_to_a_millionth(share, agrees, sign, monkeypatch, tmp_path):
    script = flops_tool.load_version(1)
    options = script.parse_options(["--preset", "tiny", "--device", "cpu"])
    required = flops_tool.counts.required_flops(flops_tool.counts.sizes_of(options))
    products = sum(required.values()) - required["attention"]
    counted = {"matmuls": products * (1 + sign * share), "attention": 2 * required["attention"]}
    monkeypatch.setattr(flops_tool, "flop_counter", lambda script, config: (counted, "a table"))
    monkeypatch.setattr(flops_tool, "deepspeed_count", lambda script, config, table: {})
    found = {row["what"]: row["agrees"] for row in flops_tool.count(1, options, tmp_path / "table")["checks"]}
    assert found == {"matmuls": agrees, "attention": True}


# ---------------------------------------------------------------- versions


@pytest.mark.parametrize(("ms", "faster"), [(9.0, True), (11.0, False)])
def test_a_version_is_faster_if_it_is_shown_to_take_less_time(ms, faster):
    sound = {"parameters": 1, "parameters_trained": 1, "interpreted": False, "accuracy": {"passed": True}}
    rows = [sound | {"name": name, "rounds_ms": [time] * 5} for name, time in (("v1", 10.0), ("v2", ms))]
    for row in rows:
        row["accuracy"]["worst"] = {"kind": "loss", "name": "loss", "error": 0.0, "bound": 1.0}
    assert compare_versions.add_speedups(rows, [10.1] * 5) == []
    assert rows[1]["faster"] is faster and rows[1]["gain"] != "-"
    rows[1]["parameters_trained"] = 0  # one parameter that doesn't train
    assert "no speed-up" in compare_versions.add_speedups(rows, [10.1] * 5)[0] and not rows[1]["faster"]


@pytest.mark.parametrize(
    ("ms", "line"), [(9.0, "worth most: x, 1.11x (1.11 to 1.11)"), (11.0, "no switch is shown to")]
)
def test_a_switch_is_worth_most_if_it_is_shown_to_take_less_time(ms, line):
    row = {"step_ms": 10.0, "steps_ms": [10.0] * 5, "peak_memory_mb": 1.0, "kernels": 1.0, "reason": None}
    rows = [row | {"on": [], "name": "none"}, row | {"on": ["x"], "name": "x", "steps_ms": [ms] * 5, "step_ms": ms}]
    found = ablation.worth(rows, ["x"], again=[ms * 1.01] * 5)
    assert ablation.as_text(rows, found, [ms * 1.01] * 5).splitlines()[-1].startswith(line)


@pytest.mark.parametrize(("text", "parts"), [("qkv=q,k", ["q", "k"]), ("qkv=q", None)])
def test_a_packed_tensor_has_two_parts_or_more(text, parts):
    if parts:
        assert compare_training.packing(text) == ("qkv", parts)
    else:
        with pytest.raises(argparse.ArgumentTypeError, match="names one part: give two or more"):
            compare_training.packing(text)


# ---------------------------------------------------------------- what a profile shows


def group(group, ms, floor, operator="x"):
    return {"group": group, "ms": ms, "roofline_ms": floor, "operator": operator}


@pytest.mark.parametrize(("unknown", "saved"), [(1.0, 0.5), (1.01, None)])
def test_what_a_group_could_save_is_known_if_half_of_its_time_has_a_floor(unknown, saved):
    (row,) = bottlenecks.targets(
        [group("GEMM", 2.0 - unknown, 1.5 - unknown), group("GEMM", unknown, None)], step_ms=9.0
    )
    assert row["could_save_ms"] == pytest.approx(saved)


@pytest.mark.parametrize(("known", "told"), [(1.0, False), (0.99, True)])
def test_nothing_is_said_to_come_first_if_most_of_the_time_has_no_floor(known, told):
    rows = [group("GEMM", known, 0.5), group("other", 2.0 - known, None)]
    assert bool(bottlenecks.evidence(rows)) is told


def copies(*names_and_ns):
    calls = [Kernel(name, 0.0, ns, "copy") for name, ns in names_and_ns]
    return Profile("a trace", [Kernel("gemm", 0.0, 1.0), *calls])


@pytest.mark.parametrize(("over_link", "told"), [(101.0, True), (100.0, False)])
def test_copies_between_host_and_gpu_are_named_if_they_are_most(over_link, told):
    profile = copies(("Memcpy HtoD (Pageable -> Device)", over_link), ("Memcpy DtoD (Device -> Device)", 100.0))
    advice = bottlenecks.advice_for(profile, [])
    assert (advice["copies"] == bottlenecks.FOR_HOST_COPIES) is told


@pytest.mark.parametrize(("seconds", "same"), [(60.0, True), (60.1, False)])
def test_traces_of_one_run_are_at_most_a_minute_apart(seconds, same):
    first, second = (
        Profile("a trace", [Kernel("gemm", 0.0, 1e9)], origin_ns=int(start * 1e9)) for start in (0, 1 + seconds)
    )
    assert (communication.differences(first, second) == []) is same
    assert (communication.differences(second, first) == []) is same


# ---------------------------------------------------------------- scaling


@pytest.mark.parametrize(
    ("peaks", "growth"),
    [
        ([100, 102, 104.9], None),
        ([100, 102.6, 105.1], "linear"),
        ([100.0 + 0.751 * T + 0.249 * T * T / 3 for T in (0, 1, 3)], "linear"),
        ([100.0 + 0.749 * T + 0.251 * T * T / 3 for T in (0, 1, 3)], "quadratic"),
    ],
)
def test_memory_grows_quadratically_from_a_quarter_of_its_growth_on(peaks, growth):
    """Less than 5 % of growth shows none."""
    peaks = [peak - 90 if growth and max(peaks) < 105 else peak for peak in peaks]
    assert memory_scaling.growth([0, 1, 3], peaks)["growth"] == growth


@pytest.mark.parametrize(("own", "threshold"), [(None, "65536"), ("7", "7")])
def test_a_process_returns_the_memory_that_it_frees(own, threshold, monkeypatch):
    """Or how much glibc keeps would be measured; a setting of the user's own comes first."""
    given = []

    def train(script, options, environment, tell):
        given.append(environment)
        return {"summary": {"peak_memory_mb": 1.0}}

    monkeypatch.setattr(memory_scaling, "train", train)
    monkeypatch.delenv("MALLOC_MMAP_THRESHOLD_", raising=False)
    if own:
        monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", own)
    memory_scaling.measure([1], [8, 16], [], TimeLimit(None))
    assert [environment["MALLOC_MMAP_THRESHOLD_"] for environment in given] == [threshold] * 2
    assert all("PATH" in environment for environment in given)


def test_two_lengths_show_no_curve():
    assert memory_scaling.growth([1, 2], [100, 200])["growth"] is None
    assert memory_scaling.growth([1, 2, 3], [100, 200, 300])["growth"] == "linear"


def searched(rates, peaks, budget=1000.0, largest=64, to_the_limit=False):
    def probe(batch_size):
        place = batch_size.bit_length() - 1
        if peaks[place] is None:
            raise OutOfMemory(1, "out of memory")
        summary = {"samples_per_second": rates[place], "peak_memory_mb": peaks[place]}
        return summary | {"step_ms": {"median": 1.0}}

    return batch_tool.search(probe, budget, largest, to_the_limit)


@pytest.mark.parametrize(("third", "asked"), [(101.9, 3), (102.0, 4)])
def test_the_search_ends_when_two_batches_gain_less_than_two_percent(third, asked):
    rates = [100, 100, third, 200]
    assert len(searched(rates, [1] * 4, largest=8)) == asked
    assert len(searched(rates, [1] * 4, largest=8, to_the_limit=True)) == 4
    assert len(searched([100, third, 100, 200], [1] * 4, largest=8)) == asked  # either of the two may gain


def test_a_batch_fits_if_it_needs_no_more_than_the_budget():
    rows = searched([1, 2, 4], [900, 1000, 1000.1], to_the_limit=True)
    assert [row["outcome"] for row in rows] == ["fits", "fits", "above the limit"]
    assert [row["batch_size"] for row in searched([1, 2, 4, 8], [1] * 4, largest=4, to_the_limit=True)] == [1, 2, 4]
    assert searched([1, 2], [1, None])[-1]["outcome"] == "out of memory"


@pytest.mark.parametrize(("rate", "size"), [(98.03, 2), (98.04, 1)])
def test_a_batch_is_nearly_as_fast_within_two_percent(rate, size):
    rows = searched([rate, 100], [1, 1], largest=2)
    assert batch_tool.nearly_as_fast(rows, rows[1])["batch_size"] == size


@pytest.mark.parametrize(("share", "said"), [(0.0, True), (1e-9, False), (1.0, False), (1.001, True)])
def test_a_share_of_memory_is_more_than_nothing_and_at_most_all(share, said):
    options = SimpleNamespace(target_memory_usage=share, version=9)  # no such version
    with pytest.raises((Failure, KeyError)) as caught:
        batch_tool.optimize(options, [])
    assert ("--target-memory-usage must be above 0 and at most 1" in str(caught.value)) is said


@pytest.mark.parametrize(("sizes", "told"), [([1, 2], None), ([2, 2], "2, 2"), ([4], "4"), ([1, 2, 1], "1, 2, 1")])
def test_batches_that_are_compared_differ(sizes, told):
    profiles = [SimpleNamespace(metadata={"version": 1, "batch_size": size}, device="cpu", path="x") for size in sizes]
    if told is None:
        batch_scaling.check_alike(profiles)
    else:
        with pytest.raises(Failure, match=f"the batch sizes are {told}: give two or more that differ"):
            batch_scaling.check_alike(profiles)


@pytest.mark.parametrize(
    ("fixed", "each", "said"),
    [
        (-0.1, 1.0, "can't be negative (fixed part)"),
        (1.0, -0.1, "can't be negative (part per sequence)"),
        (0.0, 1.0, None),
        (1.0, 0.0, None),
    ],
)
def test_a_cost_below_zero_is_nonsense(fixed, each, said):
    line = batch_scaling.fit_line("memory", "MiB", fixed, each)
    assert said in line if said else "negative" not in line
