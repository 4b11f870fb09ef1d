"""Read PyTorch's traces: which events are kernels, which operator launched them, what is a step. Standard library only.

A trace holds every number that a question needs, and half of the programs leave a part of it out: the GPU's number may
be in "device" or in "pid", an old profiler writes other categories, and several ranks can be fused into one file.
"""

import dataclasses
import itertools
import re
from collections import Counter
from typing import NamedTuple

from common.command_line import PRECISIONS, Failure
from common.formulas.gpus import name_of
from common.profiles.groups import clean, group_of
from common.profiles.launches import (
    GRAPH_LAUNCHES,
    LAUNCHES,
    captured_launches,
    launch_table,
    lost_in_replays,
    lost_launches,
)
from common.profiles.model import (
    EACH,
    Launch,
    Operation,
    Profile,
    checked_kernel,
    early_calls,
    in_order,
    is_time,
    labels_of,
    natural,
    overruns,
    without_times,
    without_twins,
)
from common.profiles.trace_events import (
    KINDS,
    RUNTIMES,
    check_accelerator,
    paired,
    part_processes,
    place_of,
    time_in,
    timed_events,
    without_zeros,
)
from common.step_parts import PHASES

# Operators that only look at tensors differently, allocate them or ask about them.
NO_WORK = re.compile(
    r"^(aten::(view|_unsafe_view|reshape|_reshape_alias|transpose|t|numpy_T|as_strided_?|expand|permute|slice|select|narrow|"
    r"split|split_with_sizes|chunk|unbind|unsqueeze|squeeze|flatten|unflatten|detach|detach_|alias|lift_fresh|empty\w*|"
    r"new_empty\w*|resize_|resolve_\w+|result_type|promote_types|is_\w+|item|_local_scalar_dense|set_|to|record_stream)$"
    r"|autograd::|torch::|Optimizer|detach_?$|\w*Backward\d+$|TorchDynamo|AOTDispatcher|Pregraph bytecode|## )"
)
# Operators that compute although they call others: a GEMM copies an operand first, the kernels that Triton interprets
# run inside a Python autograd function, and those of torch.compile inside CompiledFunction.
PRODUCT = re.compile(r"aten::(mm|bmm|addmm|baddbmm)$")
COMPUTES_ITSELF = re.compile(PRODUCT.pattern + r"|\w+Function(Backward)?$")
# Operators that prepare the inputs or the output of their caller, which computes itself if it calls no others: sum
# clears its output first, a division converts its divisor, a convolution's backward copies a weight.
PREPARES = re.compile(r"aten::((zeros|ones)(_like)?|zero_|fill_|copy_|_to_copy|clone|contiguous|scalar_tensor)$")
# Operators that only call those.
ONLY_PREPARES = re.compile(
    PREPARES.pattern + r"|aten::(full(_like)?|new_(zeros|ones|full)|constant_pad_nd|repeat(_interleave)?|type_as|"
    r"(select|slice|diagonal)_backward)$"
)
CLOCK_US = 1  # to which old profilers round times


def read_trace(path, content, gpu=None):
    """Return the profiles in a Chrome trace: kernels and copies on the GPU or, without one, operators that compute.

    gpu: the one to read, of several; EACH reads a profile of each, None one of all.
    """
    if isinstance(content, list):
        content = {"traceEvents": content}
    if any("BeginNs" in (event.get("args") or {}) for event in itertools.islice(content["traceEvents"], 100)):
        raise Failure(2, "is rocprof's old trace: give its results.db")
    content["traceEvents"], unended = paired(content["traceEvents"])
    spans, empty = without_zeros(timed_events(content["traceEvents"]))
    if not spans and content["traceEvents"] and "schemaVersion" not in content:
        refuse_foreign_events(content["traceEvents"])
    origin_us = spans[0]["ts"] if spans else 0
    launches = []
    host = []
    for event in spans:
        event["ts"] -= origin_us  # before any multiplication: a double holds a quarter of a microsecond since 1970
        if event["cat"] in KINDS:
            launches.append(event)
        else:
            host.append(event)
    number_launches([*launches, *empty], host)
    part_processes(launches, host)
    kernels = [event for event in empty if event["cat"] in KINDS]
    warnings = [*unended, *without_times(len(kernels), len(launches) + len(kernels), "kernels and copies")]
    calls = len(empty) - len(kernels)
    notes = [f"Without times (0 in the file): {calls:,} events of the CPU, which are left out."] if calls else []
    told = {"warnings": warnings, "notes": notes, "empty": kernels}
    common = (path, content, origin_us, memory_events(content["traceEvents"], origin_us))
    labels = labels_of(map(place_of, launches)) if launches else {}
    if gpu is None or len(labels) < 2:
        return [profile_of(*common, launches, host, labels, **told)]
    if gpu is not EACH and gpu not in labels.values():
        raise Failure(2, f"has no GPU {gpu}: it has {', '.join(labels.values())}")
    hosts = hosts_of(host, launches)
    found = []
    for place, label in labels.items():
        if gpu in (EACH, label):
            its_launches = [event for event in launches if place_of(event) == place]
            its_host = [event for event in host if event.get("pid") == hosts.get(place)]
            found.append(profile_of(*common, its_launches, its_host, {place: label}, **told))
    return found


def refuse_foreign_events(events):
    """Raise Failure for a trace none of whose events is read."""
    if any((event.get("args") or {}).get("desc") == "KernelExecution" for event in events):
        raise Failure(2, "was made of an .rpd: give that one")
    kinds = "none of a kind that PyTorch's profiler writes"
    way = "record a PyTorch program with torch.profiler, and another one with nsys or rocprofv3"
    raise Failure(2, f"holds {len(events):,} events, {kinds}: {way}")


def profile_of(path, content, origin_us, memory, launches, host, labels, warnings, notes, empty):
    """Return the profile of events of memory, GPU and host, which are in order of time from the origin on.

    labels: {place: name} of the GPUs that ran the launches. warnings and notes: about the file. empty: launches without
    times.
    """
    host = with_one_optimizer_mark_per_step(host)
    operators = [event for event in host if event["cat"] == "cpu_op"]
    runtime = [event for event in host if event["cat"] in RUNTIMES]
    marks = [event for event in host if event["cat"] == "user_annotation"]
    metadata = metadata_in(content)
    device = device_of(content, launches)
    if launches:
        work = work_of_gpus(launches, labels, runtime, operators, empty)
    else:
        check_cpu_only(content, runtime, memory, device)
        device = None  # the GPU of that machine did nothing
        computing = operators_that_compute(operators, optimizer_steps(host))
        calls = [checked_kernel(one["name"], 1e3 * one["ts"], 1e3 * one["dur"], "operator") for one in computing]
        work = Work(calls, [operation(event, [event]) for event in computing])
    phases = []
    for event in marks:
        if event["name"] in PHASES:
            phases.append((event["name"], event["ts"], event["ts"] + event["dur"]))
    steps, step_spans, step_note = steps_in(marks, runtime, operators, metadata)
    return Profile(
        path,
        work.calls,
        work.operations,
        steps=steps,
        device=device,
        metadata=metadata,
        step_ms=step_times(phases, work.calls) if metadata else [],
        memory=memory,
        phases=phases,
        spans=step_spans,
        origin_ns=round(origin_us * 1000) + whole_number(content.get("baseTimeNanoseconds")),
        rank=rank_of(content),
        host=host,
        sources=tuple(labels.values()),
        warnings=(*warnings, *work.warnings),
        notes=(*notes, *work.notes),
        early=work.early,
        step_note=step_note,
    )


class Work(NamedTuple):
    """The calls and operations of a profile, what the launches say of it, and how many began before it."""

    calls: list
    operations: list
    warnings: tuple = ()
    notes: tuple = ()
    early: int = 0


def work_of_gpus(launches, labels, runtime, operators, empty):
    """Return the Work of launches on GPUs. empty: those without times."""
    wanted = {event["args"].get("correlation") for event in launches if event.get("args")} - {None}
    host_calls = launch_table(runtime, wanted)
    if numbers_are_launches(launches):
        operator_of = operators_around(operators, host_calls)
    else:
        operator_of = {operator_number(event): event for event in operators}
    calls = [gpu_call(event, labels, host_calls, operator_of) for event in launches]
    calls, warnings = without_twins(calls)
    lacking, notes = lost_in_replays(runtime, launches)
    notes += captured_launches(runtime)
    warnings = (*warnings, *lost_launches(runtime, [*launches, *empty]), *lacking, *overruns(calls))
    if len(labels) > 1:  # of several GPUs no tool asks for operators, nor for steps
        return Work(calls, [], warnings, notes)
    early = early_calls(calls)
    launches = [event for event in launches if 1e3 * event["ts"] >= calls[early].start_ns]
    return Work(calls, operations_of_launches(launches, operator_of, host_calls), warnings, notes, early)


def check_cpu_only(content, runtime, memory, device):
    """Refuse a trace without kernels whose work was not a CPU's."""
    lost = sum(bool(LAUNCHES.match(event["name"])) for event in runtime)
    if lost:
        raise Failure(2, f"holds {lost:,} launches on {device or 'a GPU'} and none of their kernels: {LOST_ALL}")
    check_accelerator(content["traceEvents"])
    if memory and memory[0]["args"]["Device Type"] != 0:
        raise Failure(2, f"holds memory of {device or 'a GPU'} and no launch: {NOT_SEEN}")


NOT_SEEN = "record it with ProfilerActivity.CUDA; if it was, the profiler can't see this GPU (as in some WSL): try nsys"
LOST_ALL = "the profiler lost them or can't see this GPU (as in WSL): profile fewer steps, beside no other profiler"


def whole_number(value):
    return value if type(value) is int and abs(value) < 2**63 else 0


def rank_of(content):
    """Return the rank that wrote a trace, if it says so."""
    said = content.get("distributedInfo")
    rank = said.get("rank") if isinstance(said, dict) else None
    return rank if type(rank) is int else None


def device_of(content, launches):
    """Return the name of the GPU that ran the launches, if the trace has it."""
    devices = content.get("deviceProperties") or [{}]
    used = {place_of(event)[1] for event in launches[:1]}
    found = next((one for one in devices if one.get("id") in used), devices[0])
    name = found.get("name")
    return name_of(clean(name), whole_number(found.get("numSms"))) if name else None


# ---------------------------------------------------------------- which process launched


def hosts_of(host, launches):
    """Return {place of a GPU: the process that launched its kernels}.

    Ranks that were fused into one file may share every number: then processes and GPUs are paired in their order.
    """
    by_number = {}
    for event in host:
        if event["cat"] in RUNTIMES:
            by_number.setdefault((event.get("args") or {}).get("correlation"), set()).add(event.get("pid"))
    votes = {}
    for event in launches:
        found = by_number.get((event.get("args") or {}).get("correlation"), ())
        count = votes.setdefault(place_of(event), Counter())
        if len(found) == 1:
            count.update(found)
    hosts = {place: count.most_common(1)[0][0] for place, count in votes.items() if count}
    if len(hosts) < len(votes):
        processes = sorted({event.get("pid") for event in host if event["cat"] == "cpu_op"}, key=natural)
        if len(processes) == 1:
            hosts = dict.fromkeys(votes, processes[0])
        elif len(processes) == len(votes):
            hosts = dict(zip(in_order(votes), processes, strict=True))
    return hosts


# ---------------------------------------------------------------- launches


def number_launches(launches, host):
    """Write the number of each launch into it and its kernel, where a build for ROCm calls it "External id".

    That is an operator's number elsewhere: then the operator that has it is around the launch.
    """
    if any("correlation" in (event.get("args") or {}) for event in launches):
        return
    runtime = [event for event in host if event["cat"] in RUNTIMES]
    launching = {operator_number(event): event["ts"] for event in runtime if LAUNCHES.match(event["name"])}
    operators = {operator_number(event): event for event in host if event["cat"] == "cpu_op"}
    numbers = [operator_number(event) for event in launches]
    named = [number for number in numbers if number is not None and number in launching]
    inside = 0
    for number in named:
        operator = operators.get(number)
        inside += bool(operator and operator["ts"] <= launching[number] <= operator["ts"] + operator["dur"])
    if len(named) <= len(launches) / 2 or inside > len(named) / 2:
        return
    for event in (*launches, *runtime):
        if event.get("args"):
            event["args"]["correlation"] = operator_number(event)


def gpu_call(event, labels, host_calls, operator_of):
    """Return the Kernel of an event on the GPU. operator_of: {number: event}, for launches that were not recorded."""
    arguments = event.get("args") or {}
    candidates = host_calls.get(arguments.get("correlation")) or {}
    launch = next(iter(candidates.values())) if len(candidates) == 1 else None
    number = operator_number(event)
    if launch is None and number and (caller := operator_of.get(number)):
        start = 1e3 * caller["ts"]
        thread = (caller.get("pid"), caller.get("tid"))
        launch = Launch(start, start + 1e3 * caller["dur"], thread, is_operator=True)
    collective = None
    if "Collective name" in arguments:
        collective = {name: arguments.get(name) for name in COLLECTIVE}
    return checked_kernel(
        event["name"],
        1e3 * event["ts"],
        1e3 * event["dur"],
        KINDS[event["cat"]],
        labels[place_of(event)],
        stream=arguments.get("stream", event.get("tid")),
        launch=launch,
        collective=collective,
    )


COLLECTIVE = ("Collective name", "In msg nelems", "Out msg nelems", "Group size", "dtype", "Seq")
COLLECTIVE += ("Process Group Name", "Process Group Ranks")


# ---------------------------------------------------------------- what is a step


def steps_in(marks, runtime, operators, metadata):
    """Return the number of training steps, or None, (start, end) of each on the host in nanoseconds, and a note or "".

    A script of the workshop marks forward and optimizer, or launches the graph that holds a step: what lies between
    its steps is the profiler's. In another program's trace "ProfilerStep#N" of PyTorch's scheduler is a step from mark
    to mark, unless it's the last one and nothing happens in it: a script's last prof.step() begins it. Without these a
    step ends where an optimizer does, and loading its data belongs to it.
    """
    if metadata:
        forwards = [event["ts"] for event in marks if event["name"] == "forward"]
        ends = [*forwards[1:], float("inf")]
        updates = [event["ts"] + event["dur"] for event in marks if event["name"] == "optimizer"]
        found = []
        for start, end in zip(forwards, ends, strict=False):
            inside = [update for update in updates if start < update <= end]
            found.append((1e3 * start, 1e3 * max(inside, default=start)))
        names = Counter(event["name"] for event in marks)
        graphs = sum(event["name"] in GRAPH_LAUNCHES for event in runtime)
        return names["optimizer"] or graphs or names["attention"] or None, found if names["optimizer"] else [], ""
    note = ""
    scheduled = {}
    for event in marks:
        if event["name"].startswith("ProfilerStep#"):
            scheduled.setdefault(event.get("pid"), []).append((1e3 * event["ts"], 1e3 * (event["ts"] + event["dur"])))
    launches = (event for event in runtime if "Launch" in event["name"])
    last_work = max((1e3 * event["ts"] for event in (*operators, *launches)), default=float("inf"))
    for spans in scheduled.values():
        if len(spans) > 1 and last_work < spans[-1][0]:
            spans.pop()
    if not scheduled:
        ours = [event for event in marks if event["name"] == "optimizer"]
        other = [event for event in marks if event["name"].startswith("Optimizer.step#")]
        first = next((event["name"] for event in other), None)  # of several optimizers the first one, as our profiler
        for event in ours or [event for event in other if event["name"] == first]:
            scheduled.setdefault(event.get("pid"), []).append(1e3 * (event["ts"] + event["dur"]))
        if other and not ours:
            steps = max(map(len, scheduled.values()))
            calls = f"calls of {clean(first).removeprefix('Optimizer.step#')}"
            note = f"Its {steps} steps are {calls}: if an iteration has several, as a GAN's has, give --steps N."
        for process, ends in scheduled.items():
            scheduled[process] = list(zip([float("-inf"), *ends[:-1]], ends, strict=True))
    counts = {len(found) for found in scheduled.values()}
    if len(counts) != 1:  # nothing is marked, or processes disagree
        return None, [], ""
    return counts.pop(), next(iter(scheduled.values())), note


def step_times(phases, calls):
    """Return the milliseconds of each step: from its forward to the end of its optimizer or of its last kernel."""
    starts = [start for name, start, _ in phases if name == "forward"]
    ends = [end for name, _, end in phases if name == "optimizer"]
    next_starts = [*starts[1:], float("inf")]
    times = []
    for start, end, next_start in zip(starts, ends, next_starts, strict=False):  # the last step may be cut off
        if end <= start:
            raise ValueError(f"a step begins at {start} us and ends at {end} us")
        kernel_ends = [call.end_ns / 1e3 for call in calls if start <= call.start_ns / 1e3 < next_start]
        times.append((max([end, *kernel_ends]) - start) / 1e3)
    return times


def with_one_optimizer_mark_per_step(host):
    """Return the sorted events without the "optimizer" marks that count no step of their own.

    These are marks before the first forward, whose step began before the profile, and marks inside another one: our
    scripts mark their optimizer, and profile_script.py marks every optimizer again.
    """
    marks = [event for event in host if event["cat"] == "user_annotation"]
    first_forward = next((event["ts"] for event in marks if is_mark(event, "forward")), 0)
    last_end = first_forward
    dropped = set()
    for event in marks:
        if is_mark(event, "optimizer"):
            if event["ts"] < last_end:
                dropped.add(id(event))
            else:
                last_end = event["ts"] + event["dur"]
    return [event for event in host if id(event) not in dropped] if dropped else host


def is_mark(event, name):
    return event["cat"] == "user_annotation" and event["name"] == name


# ---------------------------------------------------------------- operators


def operator_number(event):
    """Return the number that joins an operator with its kernels."""
    arguments = event.get("args") or {}
    return arguments.get("External id", arguments.get("external id"))


def numbers_are_launches(launches):
    """Return True if most kernels name their own launch instead of an operator, as old PyTorch may."""
    numbers = [(operator_number(event), (event.get("args") or {}).get("correlation")) for event in launches]
    return sum(number is not None and number == launch for number, launch in numbers) > len(launches) / 2


def operators_around(operators, host_calls):
    """Return {number of a launch: the innermost operator of its thread at that time}. host_calls: of launch_table.

    A graph's launch, which starts the kernels of many operators, and one whose process is not known have none.
    """
    moments = [(event["ts"], 0, (event.get("pid"), event.get("tid")), event) for event in operators]
    for number, found in host_calls.items():
        launch = next(iter(found.values()))
        if len(found) == 1 and not launch.is_graph:
            moments.append((launch.start_ns / 1e3, 1, launch.thread, number))
    moments.sort(key=lambda moment: moment[:2])  # callers stay before the operators inside them
    open_operators = {}  # thread: those that have not ended, the innermost last
    around = {}
    for ts, is_launch, thread, what in moments:
        callers = open_operators.setdefault(thread, [])
        while callers and callers[-1]["ts"] + callers[-1]["dur"] < ts:
            callers.pop()
        if not is_launch:
            callers.append(what)
        elif callers:
            around[what] = callers[-1]
    return around


def launched_elsewhere(event, operator, host_calls):
    """Return True if a kernel was launched outside the operator that its number names.

    Until PyTorch 1.13 the number can be the launch's own, which only by chance is an operator's too.
    """
    candidates = host_calls.get((event.get("args") or {}).get("correlation")) or {}
    start = 1e3 * (operator["ts"] - CLOCK_US)
    end = 1e3 * (operator["ts"] + operator["dur"] + CLOCK_US)
    return bool(candidates) and not any(start <= launch.start_ns <= end for launch in candidates.values())


def operations_of_launches(launches, operator_of, host_calls):
    """Return the Operations of each operator that launched kernels, and one for each kernel without an operator.

    operator_of: {number: event}. host_calls: those of launch_table. The kernels of a replayed graph have no operator.
    """
    launches_of = {}  # identity of an operator's event: it and its launches, which may have numbers of their own
    alone = []
    for event in launches:
        number = operator_number(event)
        operator = operator_of.get(number) if number else None
        if operator and not launched_elsewhere(event, operator, host_calls):
            launches_of.setdefault(id(operator), (operator, []))[1].append(event)
        else:
            alone.append(event)
    found = []
    for operator, some in launches_of.values():
        found += parts_by_group(operator, some)
    return found + [operation(event, [event]) for event in alone]


def parts_by_group(event, launches):
    """Return the Operation of an operator of aten, or one per group of the kernels that another one launched.

    The helpers of a matmul, a sum of its parts for one, belong to it. A compiled region is no single operation.
    """
    if event["name"].startswith("aten::") or len(launches) == 1:
        return [operation(event, launches)]
    parts = {}
    for one in launches:
        parts.setdefault(group_of(clean(one["name"])), []).append(one)
    return [operation(event, some) for some in parts.values()]


def operation(event, launches):
    """Return the Operation of an operator's event and the events of its launches."""
    arguments = event.get("args", {})
    dims = arguments.get("Input Dims") or []
    types = arguments.get("Input type") or []
    strides = arguments.get("Input Strides") or [[] for _ in dims]
    if not are_sizes(dims) or not are_sizes(strides):
        raise ValueError(f"{clean(event['name'])} has inputs of {dims}, strides {strides}")
    us = [one["dur"] for one in launches]
    names = tuple(clean(one["name"]) for one in launches)
    group = group_of(names[us.index(max(us))])  # of the longest
    return Operation(clean(event["name"]), group, sum(us), dims, types, strides, names)


def are_sizes(value):
    """Return True for a list of sizes, or of lists of sizes."""
    return isinstance(value, list) and all(one >= 0 if type(one) is int else are_sizes(one) for one in value)


# ---------------------------------------------------------------- on a CPU


def optimizer_steps(host):
    """Return (start, end) of the steps that a training script or PyTorch marks as an optimizer's."""
    marks = (event for event in host if re.match(r"optimizer$|Optimizer\.step#", event["name"]))
    return [(event["ts"], event["ts"] + event["dur"]) for event in marks]


@dataclasses.dataclass
class OperatorCall:
    """One call of an operator in a trace: its event, its time without its callees, whether it counts as computing."""

    event: dict
    own_us: float
    computes: bool = True

    @property
    def end_us(self):
        return self.event["ts"] + self.event["dur"]


def operators_that_compute(operators, updates):
    """Return the events of the operators that compute, without those that change no data or only call others.

    A caller stays if it matches COMPUTES_ITSELF, or if all that it calls only prepares; the time of its callees is
    taken off its "dur". An operator inside one of the updates, (start, end) of an optimizer's steps, gets a name that
    begins with "optimizer" unless its own name is one: AdamW's sqrt is no part of the model.
    """
    calls = []
    open_calls = {}  # (process, thread): the calls that have not ended, the innermost last
    for event in operators:
        callers = open_calls.setdefault((event.get("pid"), event.get("tid")), [])
        while callers and callers[-1].end_us <= event["ts"]:
            callers.pop()
        if NO_WORK.match(event["name"]):
            continue
        if callers:
            callers[-1].own_us -= event["dur"]
        for caller in callers:
            if calls_only(caller.event["name"], event["name"]):
                caller.computes = False
        call = OperatorCall(event, event["dur"])
        callers.append(call)
        calls.append(call)
    found = [call.event | {"dur": max(0.0, call.own_us)} for call in calls if call.computes]
    for event in found:
        in_update = any(start <= event["ts"] < end for start, end in updates)
        if in_update and group_of(event["name"]) != "optimizer":
            event["name"] = f"optimizer {event['name']}"
    return found


def calls_only(caller, callee):
    """Return True if an operator that calls this one does not compute itself.

    Without gradients torch.compile's kernels have no CompiledFunction: they are the region's own work. A matmul may
    call another one: in bfloat16 PyTorch transposes the result by calling mm again.
    """
    if PRODUCT.match(caller):
        return bool(PRODUCT.match(callee))
    if caller.startswith("Torch-Compiled Region"):
        return callee.startswith("CompiledFunction")
    if COMPUTES_ITSELF.match(caller):
        return False
    return bool(ONLY_PREPARES.match(caller)) or not PREPARES.match(callee)


# ---------------------------------------------------------------- what a trace says of itself


def memory_events(events, origin_us):
    """Return the events of --profile-memory by time, from the origin on; with a GPU, only those of its memory."""
    found = [event for event in events if event.get("name") == "[memory]"]
    if found and not any("Total Allocated" in event["args"] for event in found):  # until PyTorch 1.9
        return []
    for event in found:
        event["ts"] = time_in(event["ts"])
        if not is_time(event["ts"]) or not is_time(event["args"]["Total Allocated"]):
            raise ValueError(f"memory of {event['args']['Total Allocated']} bytes after {event['ts']} us")
        event["ts"] -= origin_us
    found.sort(key=lambda event: event["ts"])
    on_gpu = [event for event in found if event["args"]["Device Type"] != 0]
    return on_gpu or found


WHOLE_NUMBERS = (
    *("vocab_size", "hidden_dim", "num_layers", "num_heads", "num_kv_heads", "intermediate_dim"),
    *("batch_size", "seq_len", "version"),
)


def metadata_in(content):
    """Return the checked metadata that a training script wrote into its trace; {} for another program's trace."""
    metadata = content.get("tiny_llama") or {}
    if not metadata:
        return {}
    for name in WHOLE_NUMBERS:
        if type(metadata[name]) is not int or metadata[name] < 1:
            raise ValueError(f"tiny_llama has {name} {metadata[name]!r}")
    if not is_time(metadata["peak_memory_mb"]) or metadata["precision"] not in PRECISIONS:
        raise ValueError(f"tiny_llama has {metadata['peak_memory_mb']!r} MB in {metadata['precision']!r}")
    return metadata | {"part": clean(metadata["part"])}
