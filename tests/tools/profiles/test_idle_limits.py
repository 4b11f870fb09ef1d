"""The causes of idle time, at the numbers that decide: one gap from 1000 us on, and what the host did about then."""

import pytest

from common.profiles import idle
from common.profiles.model import Kernel, Launch, Profile

START_US = 1000  # the gap's
THREAD = (9, 9)


def launch(start_us, end_us, **more):
    return Launch(1e3 * start_us, 1e3 * end_us, THREAD, **more)


def gap_of(us, launched, after="gemm", before="gemm", streams=(1, 1), kind="kernel"):
    """Return a gap of so many us between two calls."""
    first = Kernel(after, 0.0, 1e3 * START_US, kind, stream=streams[0], launch=launch(0, 1))
    second = Kernel(before, 1e3 * (START_US + us), 1e3, stream=streams[1], launch=launched)
    return {"gap_us": us, "start_ns": 1e3 * START_US, "after": first, "before": second}


def host(*events):
    """Return the Host of these events: (name, start, end) in us of the launching thread."""
    found = [
        {"name": name, "cat": "cpu_op", "ts": start, "dur": end - start, "pid": 9, "tid": 9}
        for name, start, end in events
    ]
    calls = [Kernel("gemm", 0.0, 1.0)]
    return idle.Host(Profile("a trace", calls, host=sorted(found, key=lambda event: event["ts"])))


WAIT = "cudaStreamSynchronize"
LIMITS = {  # the gap, the host's events: the reason
    "launched as it begins": (gap_of(8, launch(1000, 1004)), [], idle.QUEUE),
    "launched after that": (gap_of(8, launch(1000.1, 1001)), [], idle.LATE),
    "the launch ends in its first half": (gap_of(8, launch(900, 1004)), [], idle.QUEUE),
    "in its second half": (gap_of(8, launch(900, 1004.1)), [], idle.LATE),
    "an operator from before": (gap_of(8, launch(1000, 1500, is_operator=True)), [], idle.UNKNOWN),
    "an operator from then on": (gap_of(8, launch(1000.1, 1500, is_operator=True)), [], idle.LATE),
    "no launch": (gap_of(8, None), [], idle.UNKNOWN),
    "short": (gap_of(10, launch(5, 6)), [], idle.QUEUE),
    "longer": (gap_of(10.1, launch(5, 6)), [], idle.UNKNOWN),
    "another stream": (gap_of(8, launch(5, 6), streams=(1, 2)), [], idle.STREAM),
    "an event": (gap_of(8, launch(5, 6, after_wait=True)), [], idle.STREAM),
    "another stream's copy": (gap_of(8, launch(5, 6), streams=(1, 2), kind="copy"), [], idle.COPY),
    "its own copy and an event": (gap_of(8, launch(5, 6, after_wait=True), kind="copy"), [], idle.STREAM),
    "another stream's collective": (gap_of(8, launch(5, 6), "ncclDevKernel_AllReduce", streams=(1, 2)), [], idle.PEER),
    "soon after a copy": (gap_of(100, launch(1090, 1091), kind="copy"), [(WAIT, 900, 1001)], idle.COPY),
    "later after a copy": (gap_of(101, launch(1090, 1091), kind="copy"), [(WAIT, 900, 1001)], idle.LATE),
    "waited for half of it": (gap_of(200, launch(1190, 1191), kind="copy"), [(WAIT, 900, 1100.1)], idle.COPY),
    "not for half": (gap_of(200, launch(1190, 1191), kind="copy"), [(WAIT, 900, 1100)], idle.LATE),
    "waited as it began": (gap_of(50, launch(1040, 1041), kind="copy"), [(WAIT, 1000, 1001)], idle.COPY),
    "no longer": (gap_of(50, launch(1040, 1041), kind="copy"), [(WAIT, 900, 1000)], idle.LATE),
    "no copy": (gap_of(50, launch(1040, 1041)), [(WAIT, 900, 1001)], idle.LATE),
    "a collective": (gap_of(200, launch(1190, 1191)), [("gloo:all_reduce", 1099.9, 1100.1)], idle.PEER),
    "a collective around short ones": (
        gap_of(200, launch(1190, 1191)),
        [("gloo:all_reduce", 900, 1101), *(("gloo:barrier", start, start + 1) for start in range(1000, 1100))],
        idle.PEER,
    ),
    "waited around short calls": (
        gap_of(50, launch(1040, 1041), kind="copy"),
        [(WAIT, 800, 1001), *((WAIT, start, start + 1) for start in range(900, 1000))],
        idle.COPY,
    ),
    "a collective before": (gap_of(200, launch(1190, 1191)), [("gloo:all_reduce", 1000, 1100)], idle.LATE),
}


@pytest.mark.parametrize("name", LIMITS)
def test_the_reason_of_a_gap(name):
    gap, events, reason = LIMITS[name]
    assert idle.reason_of(gap, host(*events)) == reason


def test_kernels_of_one_graph_follow_each_other_on_any_stream():
    started = launch(5, 6, is_graph=True)
    gap = gap_of(500, started, streams=(1, 2))
    gap["after"] = gap["after"]._replace(launch=started)
    assert idle.reason_of(gap, host()) == idle.QUEUE
    gap["after"] = gap["after"]._replace(launch=launch(5, 6, is_graph=True))  # an equal one of another replay
    assert idle.reason_of(gap, host()) == idle.STREAM


DURING = {  # the gap of 100 us, the host's events: what it did
    "not known": (None, [], "not recorded"),
    "launched before": (launch(5, 6), [], "it had launched already"),
    "launched as it begins": (launch(1000, 1001), [], "it had launched already"),
    "launches for half": (launch(5, 1050), [], "the call that launches (50 %)"),
    "not for half": (launch(5, 1049), [], "it had launched already"),
    "nothing": (launch(1100, 1101), [], "nothing that was recorded"),
    "half": (launch(1100, 1101), [("a", 1000, 1050), ("b", 900, 1200)], "a (50 %)"),
    "less": (launch(1100, 1101), [("a", 1000, 1049), ("b", 900, 1200)], "b (100 %)"),
    "ended as it began": (launch(1100, 1101), [("a", 900, 1000)], "nothing that was recorded"),
    "ended in it": (launch(1100, 1101), [("a", 900, 1001)], "many short operators, and Python between them"),
    "half in parts": (launch(1100, 1101), [("a", 1000, 1025), ("a", 1030, 1055)], "a (50 % in 2 calls)"),
    "less in parts": (
        launch(1100, 1101),
        [("a", 1000, 1024), ("a", 1030, 1055)],
        "many short operators, and Python between them",
    ),
}


@pytest.mark.parametrize("name", DURING)
def test_what_the_host_did_meanwhile(name):
    launched, events, told = DURING[name]
    assert host(*events).during(gap_of(100, launched)) == told


# ---------------------------------------------------------------- sums


def results(gaps_us, steps=None, launched=None):
    """Return the results on kernels of 1000 us, with these gaps between them, unmarked."""
    calls = []
    at = 0.0
    for us in (*gaps_us, None):
        calls.append(Kernel("gemm", 1e3 * at, 1e6, launch=launched and launch(at - launched, at - launched + 1)))
        at += 1000 + (us or 0)
    return idle.idle_results(Profile("a trace", calls, steps=steps))


@pytest.mark.parametrize(("us", "unsure"), [(1000, 0), (1001, 1001)])
def test_a_gap_beyond_a_millisecond_may_be_a_pause(us, unsure):
    found = results([us, 10])
    assert (found["unsure_us"], found["long_us"]) == (unsure, unsure)
    late = results([us, 10], launched=1)  # the host launches a microsecond before each kernel
    assert (late["late_us"], late["idle_us"]) == (unsure, us + 10)


@pytest.mark.parametrize(("steps", "unsure"), [(1, 0), (2, 3000), (3, 5000), (4, 6500), (9, 6500), (None, 6500)])
def test_as_many_gaps_may_be_pauses_as_lie_between_the_steps(steps, unsure):
    """The longest of them."""
    assert results([2000, 1500, 3000, 900], steps)["unsure_us"] == unsure


@pytest.mark.parametrize(("share", "hardly"), [(0.25, True), (0.2501, False)])
def test_a_gpu_hardly_waits_up_to_a_quarter_of_the_time(share, hardly):
    assert idle.hardly_waits({"idle_share": share, "warm_up": None}) is hardly
    assert idle.hardly_waits({"idle_share": 0.9, "warm_up": {"idle_share_later": share}}) is hardly


@pytest.mark.parametrize(("ms", "told"), [(5.0, ""), (5.1, ", but exposed copies take 51 %")])
def test_what_takes_more_than_half_of_the_time_is_said(ms, told):
    row = {"whole_ms": 10.0, "exposed_copies_ms": ms, "exposed_communication_ms": 10.0 - ms}
    if ms == 5.0:
        row["exposed_communication_ms"] = 5.0
    assert idle.instead(row) == told


def test_a_gap_is_counted_from_the_last_call_that_ended():
    """One call inside another leaves none; one that begins as another ends leaves none; a nanosecond later one."""
    calls = [Kernel("a", 0.0, 100.0), Kernel("b", 10.0, 20.0), Kernel("c", 100.0, 10.0), Kernel("d", 111.0, 5.0)]
    (gap,) = idle.gaps_of(calls, [])
    assert (gap["gap_us"], gap["after"].name, gap["before"].name) == (0.001, "c", "d")
    assert idle.gaps_of(calls, [(110.0, 111.0)]) == []  # a pause fills it
    (gap,) = idle.gaps_of(calls, [(110.0, 110.5)])
    assert gap["gap_us"] == 0.0005
