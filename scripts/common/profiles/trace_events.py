"""Read the events of PyTorch's traces: their times, their GPU, and the process that launched. Standard library only."""

import re
from collections import Counter

from common.command_line import Failure
from common.files import number as finite_number
from common.profiles.groups import clean
from common.profiles.launches import GRAPH_LAUNCHES
from common.profiles.model import untimed

KINDS = {"kernel": "kernel", "gpu_memcpy": "copy", "gpu_memset": "copy"}  # categories of a trace's events
RUNTIMES = {"cuda_runtime", "hip_runtime", "cuda_driver", "xpu_runtime", "xpu_driver"}
TIMED = {*KINDS, *RUNTIMES, "cpu_op", "user_annotation"}  # categories that are read
OLD_CATEGORIES = {  # until PyTorch 1.12
    "Kernel": "kernel",
    "Memcpy": "gpu_memcpy",
    "Memset": "gpu_memset",
    "Operator": "cpu_op",
    "Runtime": "cuda_runtime",
}
OLD_MARKS = re.compile(r"ProfilerStep#|Optimizer\.step#")  # which were operators then
OTHER_ACCELERATORS = re.compile(r"mtia|hpu|xpu|privateuse|async_npu")  # their events are no operators of a CPU
KNOWN_GPUS = "it reads those of AMD's, NVIDIA's and Intel's GPUs"


def is_trace(content):
    """Return True for a Chrome trace, also in its short form: the list of events."""
    if isinstance(content, list):
        events = all(isinstance(one, dict) and ("ph" in one or not one) for one in content)
        return any(content) and events
    return isinstance(content, dict) and "traceEvents" in content


def check_accelerator(events):
    """Refuse the events of an accelerator that is no GPU."""
    categories = {event.get("cat") for event in events if type(event.get("cat")) is str}
    if others := sorted(name for name in categories if OTHER_ACCELERATORS.match(name)):
        raise Failure(2, f"has the work of an accelerator that this tool can't read ({clean(others[0])}): {KNOWN_GPUS}")


def timed_events(events):
    """Return the events of the categories that are read, by their start, callers before the events inside them."""
    found = [event for event in events if event.get("cat") in TIMED]
    if not any(event["cat"] in KINDS for event in found) and any(
        event.get("cat") in OLD_CATEGORIES for event in events
    ):
        for event in events:
            if event.get("cat") in OLD_CATEGORIES and event.get("ph") == "X":
                event["cat"] = OLD_CATEGORIES[event["cat"]]
                if OLD_MARKS.match(str(event.get("name"))):
                    event["cat"] = "user_annotation"
                if "Input dims" in (arguments := event.get("args") or {}):
                    arguments["Input Dims"] = arguments["Input dims"]
        found = [event for event in events if event.get("cat") in TIMED]
    numbers = (int, float)
    limit = 2**63
    for event in found:
        ts = event.get("ts")
        dur = event.get("dur")
        if type(ts) is str or type(dur) is str:
            event["ts"] = ts = time_in(ts)
            event["dur"] = dur = time_in(dur)
        if not (type(ts) in numbers and type(dur) in numbers and -limit < ts < limit and 0 <= dur < limit):
            check_accelerator(events)
            raise ValueError(f"{clean(event['name'])} starts at {ts} us and takes {dur} us")
    found.sort(key=lambda event: (event["ts"], -event["dur"]))
    return found


def time_in(value):
    """Return a time of an event, which some programs write as text."""
    return finite_number(value) if type(value) is str else value


def paired(events):
    """Return the events with one of a begin and its end for each such pair, and warnings about those without an end."""
    if not any(event.get("ph") == "B" and event.get("cat") in TIMED for event in events):
        return events, ()
    found = []
    open_events = {}  # (process, thread): those that have not ended, the innermost last
    begun = 0
    halves = [event for event in events if event.get("ph") in ("B", "E")]
    for event in sorted(halves, key=lambda event: time_in(event["ts"])):
        stack = open_events.setdefault((event.get("pid"), event.get("tid")), [])
        if event["ph"] == "B":
            begun += 1
            stack.append(event)
        elif stack:
            begin = stack.pop()
            dur = time_in(event["ts"]) - time_in(begin["ts"])
            found.append(begin | {"ph": "X", "dur": dur})
    lost = begun - len(found)
    warnings = [f"Without an end: {lost:,} of {begun:,} events that begin, which are left out."] if lost else []
    return [*(event for event in events if event.get("ph") not in ("B", "E")), *found], warnings


def without_zeros(spans):
    """Return the sorted events that have times, and those whose times the profiler left at zero."""
    if not spans or spans[0]["ts"] > 0:
        return spans, []
    empty = untimed([(1e3 * event["ts"], 1e3 * (event["ts"] + event["dur"])) for event in spans])
    return [event for at, event in enumerate(spans) if at not in empty], [spans[at] for at in sorted(empty)]


def place_of(event):
    """Return (process or group of a fused trace, number of the GPU) of a kernel's event."""
    arguments = event.get("args") or {}
    device = arguments.get("device")
    process = event.get("pid")
    if device is None:
        device = process
    return str(event.get(LAUNCHER, process)), device


LAUNCHER = "launched by"  # a process that part_processes writes into a launch


def part_processes(launches, host):
    """Write into each launch which process launched it, where several processes call their GPU by one number.

    Raise Failure if these share the numbers of their launches, too.
    """
    if len({event.get("pid") for event in host if event["cat"] in RUNTIMES}) < 2:
        return
    launchers = {}  # number of a launch: its processes
    graphs = set()
    for event in host:
        if event["cat"] in RUNTIMES:
            number = (event.get("args") or {}).get("correlation")
            launchers.setdefault(number, set()).add(event.get("pid"))
            if event["name"] in GRAPH_LAUNCHES:
                graphs.add(number)
    of_place = {}
    for event in launches:
        of_place.setdefault(place_of(event), []).append(event)
    for (_, device), events in of_place.items():
        numbers = Counter((event.get("args") or {}).get("correlation") for event in events)
        processes = set()
        twice = set()
        for number, count in numbers.items():
            found = launchers.get(number, set())
            if len(found) == 1:
                processes |= found
            elif count > 1 and number not in graphs:
                twice |= found
        unknown = any(len(launchers.get(number, ())) != 1 for number in numbers)
        if len(processes | twice) > 1 and (twice or unknown):
            words = f"{len(processes | twice)} processes that both call their GPU {clean(str(device))}"
            way = "give each process's own trace"
            raise Failure(2, f"holds the kernels of {words}, and doesn't tell which launched which: {way}")
        if len(processes) > 1:
            for event in events:
                (event[LAUNCHER],) = launchers[event["args"]["correlation"]]
