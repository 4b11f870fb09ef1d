"""Hold what decides how a trace's events belong together: just at each limit, and just beyond it."""

import pytest

from common.command_line import Failure
from common.profiles import traces
from common.profiles.model import Kernel, Launch


def event(cat, name, ts=0.0, dur=1.0, pid=1, tid=1, **args):
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "pid": pid, "tid": tid, "args": args}


def kernel(ts=0.0, dur=1.0, name="k", pid=0, **args):
    return event("kernel", name, ts, dur, pid, 7, **args)


def launch(ts=0.0, dur=1.0, pid=1, tid=1, **args):
    return event("cuda_runtime", "cudaLaunchKernel", ts, dur, pid, tid, **args)


def operator(ts=0.0, dur=10.0, name="aten::mm", **args):
    return event("cpu_op", name, ts, dur, **args)


def mark(name, ts, dur=1.0, pid=1):
    return event("user_annotation", name, ts, dur, pid)


# ---------------------------------------------------------------- which process launched


def fused(processes, numbers):
    """Return the hosts of GPUs 0, 1, ... whose launches have these numbers, all of which the processes share.

    numbers: those of each GPU. A number that is a text is of the process of this name alone.
    """
    host = [operator(pid=pid) for pid in processes]
    launches = []
    for gpu, some in enumerate(numbers):
        for number in some:
            owners = [int(number)] if isinstance(number, str) else processes
            host += [launch(pid=pid, correlation=number) for pid in owners]
            launches.append(kernel(pid="fused", device=gpu, correlation=number))
    hosts = traces.hosts_of(host, launches)
    assert traces.hosts_of(host, launches[::-1]) == hosts
    return {gpu: process for (_, gpu), process in hosts.items()}


@pytest.mark.parametrize(
    ("processes", "numbers", "hosts"),
    [
        ([11, 12], [["12"], ["11"]], {0: 12, 1: 11}),
        ([11, 12], [["12", "12", "11"], ["11", 5]], {0: 12, 1: 11}),  # most of its own numbers
        ([11, 12], [[5], [6]], {0: 11, 1: 12}),  # in their order, if no number tells
        ([11, 12], [["11"], [6]], {0: 11, 1: 12}),  # or none of one GPU
        ([11], [[5], [6]], {0: 11, 1: 11}),
        ([11, 12, 13], [[5], [6]], {}),
        ([999, 1000], [[5], [6]], {0: 999, 1: 1000}),
        ([*range(21, 33)], [[gpu] for gpu in range(12)], dict(zip(range(12), range(21, 33), strict=True))),
    ],
)
def test_the_process_of_a_gpu_in_a_fused_trace(processes, numbers, hosts):
    assert fused(processes, numbers) == hosts


@pytest.mark.parametrize(
    ("named", "of", "inside", "numbered"),
    [(2, 3, 0, True), (1, 2, 0, False), (2, 2, 1, True), (2, 2, 2, False), (3, 3, 2, False)],
)
def test_an_external_id_is_a_launchs_if_most_kernels_name_one_that_lies_outside_its_operator(
    named, of, inside, numbered
):
    launches = [kernel(**{"External id": i}) for i in range(1, of + 1)]
    host = [launch(ts=10.0, **{"External id": i}) for i in range(1, named + 1)]
    host += [operator(ts=5.0 if i <= inside else 11.0, dur=10.0, **{"External id": i}) for i in range(1, of + 1)]
    traces.number_launches(launches, host)
    assert ["correlation" in one["args"] for one in launches] == [numbered] * of


@pytest.mark.parametrize(("ts", "inside"), [(9.99, False), (10.0, True), (20.0, True), (20.01, False)])
def test_a_launch_at_either_end_of_an_operator_is_inside_it(ts, inside):
    launches = [kernel(**{"External id": 1})]
    host = [launch(ts=ts, **{"External id": 1}), operator(ts=10.0, dur=10.0, **{"External id": 1})]
    traces.number_launches(launches, host)
    assert ("correlation" in launches[0]["args"]) is not inside


def test_a_kernel_whose_number_two_processes_have_has_no_launch():
    one = Launch(1.0, 2.0, (1, 1))
    labels = {("0", 0): "0"}
    for candidates, found in (({1: one}, one), ({1: one, 2: one}, None), ({}, None)):
        call = traces.gpu_call(kernel(correlation=5, device=0), labels, {5: candidates}, {})
        assert call.launch is found


@pytest.mark.parametrize("early", [0, 1])
def test_the_first_kernel_that_a_step_launched_has_its_operation(early):
    """Those before it were launched before the profile began."""
    launches = [kernel(10.0 * i, correlation=i, device=0) for i in range(3)]
    runtime = [launch(10.0 * i, correlation=i) for i in range(early, 3)]
    work = traces.work_of_gpus(launches, {("0", 0): "0"}, runtime, [], [])
    assert (len(work.operations), work.early) == (3 - early, early)


def test_operators_are_those_of_one_gpu_alone():
    """A step's kernels on several GPUs have none, whose sum would be that of no step."""
    launches = [kernel(10.0 * i, correlation=i, device=i) for i in range(2)]
    runtime = [launch(10.0 * i, correlation=i) for i in range(1, 2)]
    work = traces.work_of_gpus(launches, {("0", 0): "0", ("0", 1): "1"}, runtime, [], [])
    assert (work.operations, work.early, len(work.calls)) == ([], 0, 2)


@pytest.mark.parametrize("gpu", [None, "0", "1", traces.EACH])
def test_a_profile_of_one_gpu_of_two_has_its_launches_alone(gpu):
    events = [kernel(10.0 + i, correlation=i, device=i) for i in range(2)]
    found = traces.read_trace("a trace", {"traceEvents": events, "baseTimeNanoseconds": 10**9}, gpu)
    assert [len(profile.calls) for profile in found] == ([2] if gpu is None else [1, 1] if gpu is traces.EACH else [1])
    assert {profile.origin_ns for profile in found} == {10**9 + 10_000}


# ---------------------------------------------------------------- steps


@pytest.mark.parametrize(("end", "first", "second"), [(50.0, 50.0, 60.0), (50.1, 10.0, 60.0)])
def test_an_update_that_ends_where_the_next_forward_begins_is_of_the_step_before(end, first, second):
    marks = [mark("forward", 10.0), mark("optimizer", 20.0, end - 20.0), mark("forward", 50.0)]
    marks += [mark("optimizer", 55.0, 5.0)]
    steps, spans, _ = traces.steps_in(marks, [], [], {"version": 1})
    assert steps == 2 and spans == [(1e4, 1e3 * first), (5e4, 1e3 * second)]


def test_a_step_ends_with_the_last_of_its_updates_and_not_with_one_that_ends_where_it_begins():
    marks = [mark("optimizer", 5.0, 5.0), mark("forward", 10.0), mark("optimizer", 20.0), mark("optimizer", 30.0)]
    _, spans, _ = traces.steps_in(marks, [], [], {"version": 1})
    assert spans == [(1e4, 31e3)]
    _, spans, _ = traces.steps_in(marks[:2], [], [], {"version": 1})
    assert spans == [(1e4, 1e4)]


@pytest.mark.parametrize(
    ("marks", "graphs", "steps", "spans"),
    [
        (["forward", "optimizer"], 3, 1, 1),
        (["forward"], 3, 3, 0),
        (["forward", "attention", "attention"], 0, 2, 0),
        (["forward"], 0, None, 0),
    ],
)
def test_a_step_of_ours_is_an_update_else_a_graph_else_an_attention(marks, graphs, steps, spans):
    marks = [mark(name, 10.0 * i) for i, name in enumerate(marks)]
    runtime = [event("cuda_runtime", "cudaGraphLaunch")] * graphs
    found, times, _ = traces.steps_in(marks, runtime, [], {"version": 1})
    assert (found, len(times)) == (steps, spans)


@pytest.mark.parametrize(("ts", "steps"), [(99.9, 1), (100.0, 2)])
@pytest.mark.parametrize("kind", ["operator", "launch"])
def test_the_last_mark_of_the_scheduler_is_a_step_if_work_begins_in_it(kind, ts, steps):
    marks = [mark("ProfilerStep#3", 0.0, 100.0), mark("ProfilerStep#4", 100.0, 100.0)]
    work = {"operator": [operator(50.0)], "launch": [launch(50.0)]}
    work[kind].append(operator(ts) if kind == "operator" else launch(ts))
    assert traces.steps_in(marks, work["launch"], work["operator"], {})[0] == steps
    assert traces.steps_in(marks[1:], work["launch"], work["operator"], {})[0] == 1  # the only one


def test_steps_of_processes_that_disagree_are_not_counted():
    marks = [mark("ProfilerStep#1", 0.0, pid=1), mark("ProfilerStep#1", 0.0, pid=2)]
    work = [operator(0.5)]
    assert traces.steps_in(marks, [], work, {})[0] == 1
    marks.append(mark("ProfilerStep#2", 0.1, pid=2))
    assert traces.steps_in(marks, [], work, {}) == (None, [], "")


def test_of_several_optimizers_the_first_one_ends_a_step_each_from_the_end_of_the_one_before():
    names = ["Optimizer.step#SGD.step", "Optimizer.step#Adam.step"] * 2
    marks = [mark(name, 10.0 * i) for i, name in enumerate(names)]
    steps, spans, note = traces.steps_in(marks, [], [], {})
    assert steps == 2 and "calls of SGD.step" in note
    assert spans == [(float("-inf"), 1e3), (1e3, 21e3)]


@pytest.mark.parametrize(("start", "ms"), [(9.99, 0.02), (10.0, 0.1), (99.9, 0.1899), (100.0, 0.02)])
def test_a_kernel_is_of_the_step_in_which_it_starts(start, ms):
    """The first of two, from 10 us on; the second begins at 100 us."""
    phases = [
        ("forward", 10.0, 11.0),
        ("optimizer", 20.0, 30.0),
        ("forward", 100.0, 110.0),
        ("optimizer", 120.0, 130.0),
    ]
    end = 110.0 if start < 99 else start + 100.0
    times = traces.step_times(phases, [Kernel("k", 1e3 * start, 1e3 * (end - start))])
    assert times[0] == pytest.approx(ms)


def test_a_step_takes_time():
    with pytest.raises(ValueError, match="a step begins at 10.0 us and ends at 10.0 us"):
        traces.step_times([("forward", 10.0, 11.0), ("optimizer", 5.0, 10.0)], [])
    assert traces.step_times([("forward", 10.0, 11.0), ("optimizer", 5.0, 10.1)], []) == [pytest.approx(1e-4)]


@pytest.mark.parametrize(("ts", "kept"), [(29.9, 1), (30.0, 2)])
def test_a_mark_inside_another_one_is_no_step(ts, kept):
    host = [mark("forward", 10.0), mark("optimizer", 20.0, 10.0), mark("optimizer", ts)]
    assert len(traces.with_one_optimizer_mark_per_step(host)) == 1 + kept


@pytest.mark.parametrize(("ts", "kept"), [(9.9, 0), (10.0, 1)])
def test_a_mark_before_the_first_forward_is_no_step(ts, kept):
    """A profiler that is started by the optimizer's hook records the end of that optimizer's mark."""
    host = sorted([mark("optimizer", ts), mark("forward", 10.0)], key=lambda one: one["ts"])
    assert len(traces.with_one_optimizer_mark_per_step(host)) == 1 + kept


# ---------------------------------------------------------------- operators


@pytest.mark.parametrize(("equal", "of", "answer"), [(1, 2, False), (2, 3, True), (3, 3, True), (0, 1, False)])
def test_numbers_are_launches_if_most_kernels_name_their_own(equal, of, answer):
    launches = [kernel(correlation=i, **{"External id": i if i < equal else 99}) for i in range(of)]
    assert traces.numbers_are_launches(launches) is answer


@pytest.mark.parametrize(
    ("ts", "found"), [(9.9, None), (10.0, "outer"), (12.0, "inner"), (15.0, "inner"), (15.1, "outer")]
)
def test_a_launch_belongs_to_the_innermost_operator_of_its_thread(ts, found):
    operators = [operator(10.0, 10.0, "outer"), operator(12.0, 3.0, "inner")]
    around = traces.operators_around(operators, {5: {1: Launch(1e3 * ts, 1e3 * ts + 1, (1, 1))}})
    assert (around[5]["name"] if around else None) == found
    assert not traces.operators_around(operators, {5: {1: Launch(1e3 * ts, 1e3 * ts + 1, (1, 2))}})


def test_a_graphs_launch_and_one_of_two_processes_have_no_operator():
    operators = [operator(10.0, 10.0)]
    one = Launch(12e3, 13e3, (1, 1))
    assert not traces.operators_around(operators, {5: {1: one._replace(is_graph=True)}})
    assert not traces.operators_around(operators, {5: {1: one, 2: one}})


@pytest.mark.parametrize(
    ("start", "elsewhere"), [(8.999, True), (9.0, False), (21.0, False), (21.001, True), (None, False)]
)
def test_a_launch_may_lie_a_microsecond_outside_its_operator(start, elsewhere):
    """Old profilers round to it. A launch that was not recorded contradicts nothing."""
    found = {} if start is None else {5: {1: Launch(1e3 * start, 1e3 * start + 1, (1, 1))}}
    assert traces.launched_elsewhere(kernel(correlation=5), operator(10.0, 10.0), found) is elsewhere


def test_an_operation_is_of_the_group_of_its_longest_kernel():
    some = [kernel(dur=us, name=name) for name, us in (("vectorized_elementwise_kernel", 1.0), ("a_gemm_kernel", 1.1))]
    for launches in (some, some[::-1]):
        assert traces.operation(operator(), launches).group == "GEMM"


@pytest.mark.parametrize(
    ("dims", "taken"), [([[0, 5]], True), ([[-1, 5]], False), ([[[2], 5]], True), ([[1.5]], False)]
)
def test_a_size_is_zero_or_more(dims, taken):
    one = operator(**{"Input Dims": dims})
    if taken:
        assert traces.operation(one, [kernel()]).dims == dims
    else:
        with pytest.raises(ValueError, match="has inputs of"):
            traces.operation(one, [kernel()])


# ---------------------------------------------------------------- on a CPU


def computing(*operators, updates=()):
    return [(one["name"], one["dur"]) for one in traces.operators_that_compute(list(operators), list(updates))]


@pytest.mark.parametrize("outer", ["aten::mm", "aten::addmm", "aten::bmm"])
@pytest.mark.parametrize("inner", ["aten::mm", "aten::baddbmm"])
def test_a_matmul_that_calls_another_one_counts_once(outer, inner):
    """PyTorch computes a bfloat16 result on a CPU as its transpose, with the same shapes."""
    parts = [operator(1, 2, "aten::copy_"), operator(4, 5, inner), operator(5, 1, "aten::copy_")]
    assert computing(operator(0, 10, outer), *parts) == [("aten::copy_", 2), (inner, 4), ("aten::copy_", 1)]
    assert computing(operator(0, 10, outer), parts[0]) == [(outer, 8), ("aten::copy_", 2)]  # it only copies


def test_an_operator_that_begins_where_another_ends_is_not_called_by_it():
    assert computing(operator(0, 10, "aten::foo"), operator(10, 5, "aten::bar")) == [
        ("aten::foo", 10),
        ("aten::bar", 5),
    ]
    assert computing(operator(0, 10, "aten::foo"), operator(9.9, 0.1, "aten::bar")) == [("aten::bar", 0.1)]


def test_a_callee_that_is_longer_than_its_caller_leaves_it_no_time():
    """The profiler rounds."""
    assert computing(operator(0, 10, "aten::mm"), operator(0, 10.5, "aten::copy_")) == [
        ("aten::mm", 0.0),
        ("aten::copy_", 10.5),
    ]


def test_a_caller_of_a_caller_only_calls_too():
    assert computing(operator(0, 10, "aten::foo"), operator(1, 8, "aten::contiguous"), operator(2, 5, "aten::bar")) == [
        ("aten::bar", 5)
    ]


@pytest.mark.parametrize(("ts", "name"), [(9.9, "aten::sqrt"), (10, "optimizer aten::sqrt"), (20, "aten::sqrt")])
def test_an_operator_is_the_optimizers_if_it_begins_in_its_step(ts, name):
    assert computing(operator(ts, 1, "aten::sqrt"), updates=[(10, 20)]) == [(name, 1)]


# ---------------------------------------------------------------- what a trace says of itself


@pytest.mark.parametrize(("before", "refused"), [(99, True), (100, False)])
def test_rocprofs_old_trace_is_known_by_its_first_hundred_events(before, refused):
    events = [{"ph": "M"}] * before + [{"ph": "X", "args": {"BeginNs": "1"}}]
    with pytest.raises(Failure) as caught:
        traces.read_trace("a trace", {"traceEvents": events})
    assert ("is rocprof's old trace" in str(caught.value)) is refused


@pytest.mark.parametrize(("kind", "refused"), [(0, False), (1, True), (20, True)])
def test_memory_of_any_device_but_a_cpu_says_that_launches_are_missing(kind, refused):
    """The first event decides."""
    memory = [{"args": {"Device Type": kind}}, {"args": {"Device Type": 0}}]
    if refused:
        with pytest.raises(Failure, match="holds memory of a GPU and no launch"):
            traces.check_cpu_only({"traceEvents": []}, [], memory, None)
    else:
        traces.check_cpu_only({"traceEvents": []}, [], memory, None)


def test_one_launch_without_kernels_says_that_the_profiler_lost_them():
    with pytest.raises(Failure, match="holds 1 launches on a GPU and none of their kernels"):
        traces.check_cpu_only({"traceEvents": []}, [launch()], [], None)


def test_memory_of_the_gpu_comes_before_that_of_the_cpu():
    events = [
        {"name": "[memory]", "ts": ts, "args": {"Device Type": kind, "Total Allocated": 1}}
        for ts, kind in ((30, 20), (20, 0), (10, 20))
    ]
    assert [one["ts"] for one in traces.memory_events(events, 5)] == [5, 25]
    for one in events:
        one["args"]["Device Type"] = 0
        one["ts"] += 5
    assert [one["ts"] for one in traces.memory_events(events, 5)] == [5, 15, 25]


def test_the_name_of_the_gpu_is_that_of_the_launches():
    devices = {"deviceProperties": [{"id": 0, "name": "H100"}, {"id": 1, "name": "MI300X"}]}
    assert traces.device_of(devices, [kernel(device=1)]) == "MI300X"
    assert traces.device_of(devices, [kernel(device=2)]) == traces.device_of(devices, []) == "H100"


def test_a_whole_number_has_64_bits():
    assert traces.whole_number(2**63 - 1) == 2**63 - 1 and traces.whole_number(2**63) == 0
    assert traces.whole_number(True) == traces.whole_number(1.0) == 0


SIZES = dict.fromkeys(traces.WHOLE_NUMBERS, 1) | {"precision": "float32", "peak_memory_mb": 0.0, "part": "whole"}


@pytest.mark.parametrize("name", traces.WHOLE_NUMBERS)
def test_sizes_in_a_trace_are_at_least_1(name):
    assert traces.metadata_in({"tiny_llama": SIZES})[name] == 1
    for value in (0, 1.0, True):
        with pytest.raises(ValueError, match=f"has {name} {value!r}"):
            traces.metadata_in({"tiny_llama": SIZES | {name: value}})
