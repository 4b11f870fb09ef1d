"""Join the host's launches with their kernels, and tell which kernels are lost. Standard library only."""

import itertools
import re
from collections import Counter
from typing import NamedTuple

from common.command_line import Failure
from common.profiles.groups import clean
from common.profiles.model import (
    Launch,
    checked_kernel,
    copy_name,
    finished,
    is_time,
    label_of_copy,
    labels_of,
    with_times,
)

LAUNCHES = re.compile(r"(cuda|hip|cu)(Ext|Module)*(Cooperative)?Launch(Cooperative)?Kernel|urEnqueueKernelLaunch")
GRAPH_LAUNCHES = ("cudaGraphLaunch", "hipGraphLaunch", "cuGraphLaunch")
LOST = 0.05  # of the launches without a kernel: fewer lie at the edges of the profile


def launch_table(runtime, wanted):
    """Return {number: {process: the host's Launch}} of the calls with these numbers, which kernels and copies name."""
    found = {}
    waited = set()  # threads whose last calls made a stream wait
    for event in runtime:
        name = event["name"]
        if "StreamWaitEvent" in name:
            waited.add((event.get("pid"), event.get("tid")))
            continue
        number = (event.get("args") or {}).get("correlation")
        if number not in wanted:
            continue
        thread = (event.get("pid"), event.get("tid"))
        start = 1e3 * event["ts"]
        launch = Launch(start, start + 1e3 * event["dur"], thread, name in GRAPH_LAUNCHES, thread in waited)
        found.setdefault(number, {})[thread[0]] = launch
        waited.discard(thread)
    return found


def lost_launches(runtime, launches):
    """Return warnings about launches, of graphs and of kernels, whose kernels are not in the trace."""
    with_kernel = {number_of_launch(event) for event in launches}
    if with_kernel == {None}:
        return
    graphs = [number_of_launch(event) for event in runtime if event["name"] in GRAPH_LAUNCHES]
    replayed = sum(number in with_kernel for number in graphs)
    if 0 < replayed < len(graphs):
        yield f"{len(graphs):,} graph launches, but kernels of only {replayed:,} of them: the profiler lost the others."
    elif graphs and not replayed and len(launches) < len(graphs):
        yield f"{len(graphs):,} graph launches, but kernels of none of them: the profiler lost them."
    yield from lost_kernels(runtime, with_kernel)


def lost_kernels(runtime, with_kernel):
    """Return warnings about launches of single kernels that are not in the profile.

    runtime: the host's calls in order of time. with_kernel: the numbers that kernels share with their launches.
    """
    names = {event["name"] for event in runtime}
    launching = {name for name in names if LAUNCHES.match(name)}
    single = [event for event in runtime if event["name"] in launching]
    lost = sum(number_of_launch(event) not in with_kernel for event in single)
    if lost > LOST * len(single) and any(CAPTURE.search(name) for name in names):
        single = [event for event in outside_captures(runtime) if event["name"] in launching]
        lost = sum(number_of_launch(event) not in with_kernel for event in single)
    if lost > LOST * len(single):
        cause = "they were captured into a graph, or the profiler lost them"
        yield f"{lost:,} of {len(single):,} launches have no kernel: {cause}."


def captured_launches(runtime):
    """Return notes about launches that a graph captured, which ran nothing."""
    names = {event["name"] for event in runtime}
    if not any(CAPTURE.search(name) for name in names):
        return ()
    launching = {name for name in names if LAUNCHES.match(name)}
    whole = sum(event["name"] in launching for event in runtime)
    captured = whole - sum(event["name"] in launching for event in outside_captures(runtime))
    return (f"{captured:,} of {whole:,} launches were captured into a graph, and ran nothing.",) if captured else ()


CAPTURE = re.compile("Stream(Begin|End)Capture")


def outside_captures(runtime):
    """Return the host's calls without those that a graph captured in their process, which launched nothing."""
    capturing = set()
    found = []
    for event in runtime:
        if change := CAPTURE.search(event["name"]):
            if change[1] == "Begin":
                capturing.add(event.get("pid"))
            else:
                capturing.discard(event.get("pid"))
        elif event.get("pid") not in capturing:
            found.append(event)
    return found


def number_of_launch(event):
    return (event.get("args") or {}).get("correlation")


def lost_in_replays(runtime, launches):
    """Return warnings about replays that lack kernels which others of their graph have, and notes that suspect it.

    Without the number of its graph, a replay that begins as a longer one does may be one of another graph.
    """
    replayed = {number_of_launch(event) for event in runtime if event["name"] in GRAPH_LAUNCHES}
    if not replayed:
        return (), ()
    replays = {}  # (number of the graph, number of the launch): names of the kernels
    for event in launches:
        arguments = event.get("args") or {}
        if (number := arguments.get("correlation")) is not None and number in replayed:
            replays.setdefault((arguments.get("graph id"), number), []).append(event["name"])
    longest = Counter()
    for (graph, _), names in replays.items():
        longest[graph] = max(longest[graph], len(names))
    known = [(graph, names) for (graph, _), names in replays.items() if graph is not None]
    lacking = sum(len(names) < longest[graph] for graph, names in known)
    warnings = ()
    if lacking > LOST * len(known):
        words = "lack kernels that others of their graph have: the profiler lost them"
        warnings = (f"{lacking:,} of {len(known):,} replays {words}.",)
    unknown = [tuple(names) for (graph, _), names in replays.items() if graph is None]
    kinds = sorted(set(unknown))  # right behind one that others begin with stands one of these
    shorter = {one for one, other in itertools.pairwise(kinds) if other[: len(one)] == one}
    if not shorter:
        return warnings, ()
    count = sum(one in shorter for one in unknown)
    words = "have fewer kernels than others that begin alike: if it's one graph, some were lost"
    return warnings, (f"{count:,} of {len(unknown):,} graph launches {words}.",)


# ---------------------------------------------------------------- of files without operators


class Row(NamedTuple):
    """A kernel or a copy. source and destination are the GPUs of a copy, where they are known."""

    kind: str
    name: str
    start: int  # in ns
    end: int
    process: int | str | None = None
    gpu: int | str | None = None
    stream: object = None
    launch: int | str | None = None  # the number that it shares with its launch
    source: int | str | None = None
    destination: int | str | None = None


def host_calls(rows):
    """Return the host's calls as a trace has them, in us and in order of time, and notes on those without times.

    rows: (name, start, end, process, thread, number) of each, in ns; the number is what kernels share with it.
    """
    found = []
    empty = 0
    for name, start, end, process, thread, number in rows:
        if start is None or end is None or (end == 0 and start >= 0):
            empty += 1
            continue
        if not is_time(start) or not is_time(end):
            raise ValueError(f"{clean(name)} lasts from {start} to {end} ns")
        event = {"name": re.sub(r"_v\d+$", "", clean(name)), "ts": start / 1e3, "dur": (end - start) / 1e3}
        found.append(event | {"pid": process, "tid": thread, "args": {"correlation": number}})
    found.sort(key=lambda event: event["ts"])
    words = f"Without times (0 in the file): {empty:,} calls of the CPU, which are left out."
    return found, [words] if empty else []


def profiles_of(path, rows, host, gpu, warnings=(), notes=()):
    """Return the profiles of rows. host: the host's calls, as host_calls returns them."""
    if all(row.kind == "copy" for row in rows):
        check_kernels_are_there(host)
    launches = launch_table(host, {row.launch for row in rows} - {None})
    lost = lost_of(rows, host, launches)
    timed, empty = with_times(rows, [(row.start, row.end) for row in rows], "rows")
    labels = labels_of((row.process, row.gpu) for row, _, _ in timed if row.kind == "kernel")
    calls = []
    for row, start, end in timed:
        name = row.name
        if row.kind == "copy":
            label = label_of_copy(labels, row.process, row.gpu, row.source, row.destination)
            name = copy_name(name, row.source, row.destination)
        else:
            label = labels[row.process, row.gpu] if row.gpu is not None or row.process is not None else None
        candidates = launches.get(row.launch, {})
        launch = candidates.get(row.process) if row.process is not None else next(iter(candidates.values()), None)
        calls.append(checked_kernel(name, start, end - start, row.kind, label, stream=row.stream, launch=launch))
    return finished(path, calls, gpu, [*warnings, *lost, *empty], host, [*notes, *captured_launches(host)])


def lost_of(rows, host, launches):
    """Return warnings about launches without kernels, where the kernels name them. launches: of launch_table.

    Where HSA's calls are recorded too, kernels may name those: then nothing is known.
    """
    kernels = [row for row in rows if row.kind == "kernel"]
    if sum(row.launch in launches for row in kernels) <= len(kernels) / 2:
        return []
    launching = {row.process for row in kernels}
    calls = [call for call in host if call["pid"] in launching or launching == {None}]
    return list(lost_kernels(calls, {row.launch for row in rows}))


def check_kernels_are_there(host, told=()):
    """Raise Failure if the host launched kernels; called where a database holds none.

    told: what the profiler says of itself.
    """
    launches = sum(bool(LAUNCHES.match(call["name"])) for call in host)
    if launches:
        way = ": the profiler lost them; if its version is older than the driver, try a newer one"
        if told:
            way = f"; {told[0]}"
        raise Failure(2, f"holds {launches:,} launches and none of their kernels{way}")
