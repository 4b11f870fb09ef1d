"""Numbers that decide what is said of a profile: just below each of them, and just above."""

import gzip
import os
from types import SimpleNamespace

import pytest

from common import files
from common.command_line import Failure
from common.profiles import collectives, csv_files, gemms, idle, launches, limits, roofline, trace_events
from common.profiles.model import Kernel, Launch, Operation, Profile, overruns, untimed
from common.profiles.perfetto import varint


@pytest.mark.parametrize(("missing", "told"), [(5, False), (6, True)])
def test_a_twentieth_of_the_dispatches_may_be_missing(missing, told):
    """They were written at the profile's edges; the first and the last number are there."""
    numbers = [1, *range(2 + missing, 101)]
    found = list(csv_files.missing_dispatches({"7": {*numbers}}))
    assert [f"{missing} of 100 dispatches" in words for words in found] == [True] * told


def test_dispatches_are_counted_for_each_process():
    (found,) = csv_files.missing_dispatches({"7": {1, 2}, "9": {50, 52}})
    assert found.startswith("1 of 5 dispatches aren't in this file")


@pytest.mark.parametrize(("lost", "told"), [(5, False), (6, True)])
def test_a_twentieth_of_the_launches_may_lack_a_kernel(lost, told):
    runtime = [{"name": "cudaLaunchKernel", "ts": i, "dur": 1, "args": {"correlation": i}} for i in range(100)]
    found = list(launches.lost_kernels(runtime, set(range(100 - lost))))
    assert [f"{lost} of 100 launches have no kernel" in words for words in found] == [True] * told


def test_one_launch_waits_for_an_event_and_those_after_it_do_not():
    """The next one of the thread that asked for it."""
    names = ["cudaStreamWaitEvent", *["cudaLaunchKernel"] * 3]
    threads = [1, 2, 1, 1]
    runtime = [
        {"name": name, "ts": i, "dur": 1, "pid": 9, "tid": thread, "args": {"correlation": i}}
        for i, (name, thread) in enumerate(zip(names, threads, strict=True))
    ]
    found = launches.launch_table(runtime, {1, 2, 3})
    assert [found[number][9].after_wait for number in (1, 2, 3)] == [False, True, False]


@pytest.mark.parametrize(("lacking", "told"), [(1, False), (2, True)])
def test_a_twentieth_of_the_replays_may_lack_a_kernel(lacking, told):
    """Of twenty, whose kernels are two; what is lost is the last one."""
    runtime = [{"name": "cudaGraphLaunch", "ts": i, "args": {"correlation": i}} for i in range(20)]
    kernels = []
    for i in range(20):
        for name in ("a", "b")[: 1 if i < lacking else 2]:
            kernels.append({"name": name, "args": {"correlation": i, "graph id": 3}})
    warnings, _ = launches.lost_in_replays(runtime, kernels)
    assert [f"{lacking} of 20 replays lack kernels" in words for words in warnings] == [True] * told


@pytest.mark.parametrize(("named", "told"), [(5, False), (6, True)])
def test_kernels_of_a_database_are_missed_if_most_name_a_launch(named, told):
    """Of ten; the others name calls of another layer, such as HSA's."""
    rows = [SimpleNamespace(kind="kernel", launch=i if i < named else 100 + i, process=7) for i in range(10)]
    host = [{"name": "cudaLaunchKernel", "ts": i, "dur": 1, "pid": 7, "args": {"correlation": i}} for i in range(10)]
    found = launches.lost_of(rows, host, dict.fromkeys(range(10)))
    assert [f"{10 - named} of 10 launches have no kernel" in words for words in found] == [True] * told


@pytest.mark.parametrize(("later", "graph", "found"), [(10, False, 1), (9, False, 0), (10, True, 0)])
def test_a_kernel_that_ends_after_ten_later_ones_has_a_wrong_time(later, graph, found):
    launch = Launch(0.0, 1.0, 9, is_graph=graph)
    calls = [Kernel("long", 0.0, 1e6, stream=1, launch=launch)]
    calls += [Kernel("short", 1e3 * i, 900.0, stream=1, launch=launch) for i in range(1, later + 1)]
    assert len(overruns(calls)) == found
    calls[-1] = calls[-1]._replace(start_ns=1e6 - 900.0)  # the last one ends as the long one does
    assert overruns(calls) == ()


@pytest.mark.parametrize(("seconds", "told"), [(3590, False), (3610, True)])
def test_ceilings_of_now_are_doubted_for_a_trace_that_is_an_hour_old(seconds, told, tmp_path, monkeypatch):
    path = tmp_path / "trace.json"
    path.touch()
    os.utime(path, (1e9, 1e9))
    monkeypatch.setattr(roofline.time, "time", lambda: 1e9 + seconds)
    found = roofline.doubts(SimpleNamespace(path=path, on_cpu=False))
    assert ["hours old" in words for words in found] == [True] * told


@pytest.mark.parametrize(("us", "told"), [(1.001, False), (0.999, True)])
def test_a_rate_above_the_peak_is_said(us, told):
    """2 GFLOP within 1 us are 2,000 TFLOP/s."""
    flops = 2 * 1000 * 1000 * 1000
    one = Operation(
        "aten::mm", "GEMM", us * 1000, [[1000, 1000], [1000, 1000]], ["c10::BFloat16"] * 2, [[], []], ("gemm",)
    )
    profile = Profile("a trace", [Kernel("gemm", 0.0, 1e6)], [one], steps=1)
    found = gemms.gemm_results(profile, {"matmul_tflops": flops / 1e9})
    assert any(words.startswith("A rate is above the peak") for words in found["remarks"]) is told


@pytest.mark.parametrize(
    ("values", "limit"),
    [
        ({"memory": 60.0}, "memory bandwidth"),
        ({"memory": 59.9, "compute": 0.0}, "latency"),
        ({"memory": 70.0, "matrix": 70.0}, "memory bandwidth"),
        ({"memory": 70.0, "matrix": 70.1}, "matrix units"),
        ({"memory": 0.0, "compute": 60.0}, "compute units"),
        ({"memory": 0.0, "compute": 59.9, "occupancy": 29.9}, "latency, few waves"),
        ({"memory": 0.0, "compute": 59.9, "occupancy": 30.0}, "latency"),
        ({"matrix": 60.0, "compute": 60.0, "memory": 59.0}, "matrix units"),
        ({"matrix": 81.0, "compute": 85.0, "memory": 70.0}, "matrix units"),
        ({"matrix": 60.0, "memory": 60.0}, "memory bandwidth"),
        ({"compute": 60.0}, "compute units"),
        ({"compute": 3.0, "occupancy": 50.0}, "unknown"),
        ({"memory": 3.0, "occupancy": 12.0}, "unknown"),
    ],
)
def test_a_unit_limits_a_kernel_from_60_percent_of_its_peak_on(values, limit):
    assert limits.limit_of(dict.fromkeys(limits.COLUMNS) | values) == limit


@pytest.mark.parametrize(("early", "of", "differ"), [(2, 100, False), (3, 100, True), (1, 50, False), (1, 49, True)])
def test_clocks_differ_if_more_than_two_percent_of_the_kernels_start_before_their_launch(early, of, differ):
    calls = [Kernel("a", 1e3 * i, 1.0, launch=Launch(1e3 * i + (1 if i < early else 0), 0, 9)) for i in range(of)]
    assert idle.clocks_differ(SimpleNamespace(calls=calls)) is differ


@pytest.mark.parametrize(
    ("times", "empty"),
    [
        ([(0, 0), (5, 6)], {0}),
        ([(0, 1), (10**9 + 2, 10**9 + 3)], {0}),  # it would have begun more than a second before all others
        ([(0, 1), (10**9 + 1, 10**9 + 3)], set()),
        ([(-1, 0), (5, 6)], set()),  # relative to the profile's begin
        ([(None, 4), (5, 6)], {0}),
        ([(5, 6), (7, None)], {1}),
        ([(0, 1), (0, 2)], set()),  # clocks may begin at zero
        ([(-10, 0), (0, 10), (20, 30)], set()),
        ([(0, 0), (5, 0), (None, 5), (5, None), (5, 6)], {0, 1, 2, 3}),
    ],
)
def test_a_start_of_zero_is_no_time_if_all_others_are_a_second_later(times, empty):
    assert untimed(times) == empty


@pytest.mark.parametrize(("ts", "empty"), [(1e-3, 0), (0.0, 1), (-1.0, 0)])
def test_events_of_a_trace_are_looked_at_for_zeros_if_the_first_is_not_after_zero(ts, empty):
    spans = [{"ts": ts, "dur": 0 if ts == 0 else 1}, {"ts": 5.0, "dur": 1}]
    kept, without = trace_events.without_zeros(spans)
    assert (len(kept), len(without)) == (2 - empty, empty)


@pytest.mark.parametrize(
    ("with_kernels", "kernels", "told"),
    [
        (10, 10, None),
        (9, 9, "10 graph launches, but kernels of only 9 of them"),
        (0, 9, "10 graph launches, but kernels of none of them"),
        (0, 10, None),  # of a profiler that doesn't tell which launch they are of
    ],
)
def test_one_replay_without_its_kernels_is_told(with_kernels, kernels, told):
    runtime = [{"name": "cudaGraphLaunch", "args": {"correlation": i}} for i in range(10)]
    found = [{"args": {"correlation": i if i < with_kernels else 100 + i}} for i in range(kernels)]
    warnings = list(launches.lost_launches(runtime, found))
    assert [told in words for words in warnings] == [True] * bool(told)


def test_one_number_that_two_processes_have_parts_no_launches():
    """The same GPU's number in both. A graph has many kernels of one number."""
    host = [event("cuda_runtime", pid, number) for pid, number in ((1, 5), (2, 6))]

    def parted(*numbers, names="cudaLaunchKernel"):
        given = [one | {"name": names, "cat": "cuda_runtime"} for one in (*host, *shared)]
        found = [event("kernel", 0, number) for number in numbers]
        trace_events.part_processes(found, given)
        return [one.get(trace_events.LAUNCHER) for one in found]

    shared = []
    assert parted(5, 6) == [1, 2] and parted(5, 5) == [None, None]
    shared = [event("cuda_runtime", pid, 7) for pid in (1, 2)]
    assert parted(5, 7) == [None, None]  # whose 7 is, nobody knows, but both may be of process 1
    with pytest.raises(Failure, match="of 2 processes that both call their GPU 0"):
        parted(5, 6, 7)
    with pytest.raises(Failure, match="of 2 processes that both call their GPU 0"):
        parted(7, 7)
    assert parted(7, 7, names="cudaGraphLaunch") == [None, None]


def event(category, pid, number):
    return {"cat": category, "name": "k", "pid": pid, "args": {"correlation": number, "device": 0}}


def collective(start, us=10.0, **said):
    said = {
        "Collective name": "allreduce",
        "Group size": 3,
        "In msg nelems": 4,
        "Out msg nelems": 8,
        "dtype": "Float",
    } | said
    return Kernel("ncclDevKernel_AllReduce", 1e3 * start, 1e3 * us, collective=said)


@pytest.mark.parametrize(("ranks", "size", "told"), [(3, 3, 0), (2, 3, 1), (2, None, 0), (1, None, 1)])
def test_one_rank_that_lacks_one_collective_is_told(ranks, size, told):
    """The last of two, in the trace of the last rank; without a size two ranks are enough."""
    profiles = []
    for rank in range(3):
        calls = [collective(0.0), *([collective(20.0, **{"Group size": size})] if rank < ranks else [])]
        profiles.append(Profile("a trace", calls))
    if size is None:
        for profile in profiles:
            profile.calls[0] = collective(0.0, **{"Group size": None})
    _, remarks = collectives.collective_rows(profiles, ["0", "1", "2"])
    assert [words.startswith(f"{told} collectives are missing") for words in remarks] == [True] * told


@pytest.mark.parametrize(
    ("sizes", "moved"), [((4, 8), 32), ((8, 4), 32), ((0, 0), 0), ((-1, 8), None), ((4, 8.0), None)]
)
def test_the_bytes_of_a_collective_are_those_of_its_larger_side(sizes, moved):
    said = dict(zip(("In msg nelems", "Out msg nelems"), sizes, strict=True)) | {"dtype": "Float"}
    assert collectives.bytes_of(said) == moved and collectives.bytes_of(said | {"dtype": "x"}) is None


@pytest.mark.parametrize(("share", "told"), [(1.0, False), (1.001, True)])
def test_one_operator_above_a_ceiling_is_told(share, told, monkeypatch):
    rows = [{"operator": "a", "of_roofline": None}, {"operator": "b", "of_roofline": share}]
    one = Operation("aten::mm", "GEMM", 1.0, [], [], [], ("gemm",))
    profile = Profile("a trace", [Kernel("gemm", 0.0, 1.0)], [one], steps=1)
    monkeypatch.setattr(roofline, "operator_table", lambda *_: rows)
    monkeypatch.setattr(roofline, "read_profile", lambda *_: profile)
    options = SimpleNamespace(profile_data="a trace", steps=None, gpu=None, peak={"matmul_tflops": 1, "copy_tb_s": 1})
    remarks = roofline.analyzed_trace(options)[1]["remarks"]
    assert [words.startswith("One operator is above a ceiling (b)") for words in remarks] == [True] * told


def test_a_number_of_perfetto_has_64_bits():
    assert varint(b"\xff" * 9 + b"\x01", 0) == (2**64 - 1, 10)
    with pytest.raises(ValueError, match="more than 64 bits"):
        varint(b"\xff" * 10 + b"\x01", 0)


@pytest.mark.parametrize(
    ("calls", "least", "most", "taken"),
    [(1, 0, 0, True), (0, 0, 0, False), (1, 5, 5, True), (1, 6, 5, False), (1, -1, 5, False)],
)
def test_a_summed_kernel_has_a_call_and_bounds_in_order(calls, least, most, taken):
    row = {"name": "k", "calls": str(calls), "total": "5", "least": str(least), "most": str(most)}
    if taken:
        assert csv_files.summed_kernel(row, {}).calls == calls
    else:
        with pytest.raises(ValueError, match=f"k has {calls} calls"):
            csv_files.summed_kernel(row, {})


@pytest.mark.parametrize(("size", "taken"), [(100, True), (101, False)])
def test_a_packed_file_may_unpack_to_so_much_and_no_byte_more(size, taken, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "UNPACKED", 100)
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(b"x" * size))
    if taken:
        assert files.content_of(path) == b"x" * size
    else:
        with pytest.raises(Failure, match="unpacks to more than"):
            files.content_of(path)
