"""Profile a step of versions 1 and 4, and record when each of its kernels ran, for the picture "timeline".

    python scripts/maintain/timeline.py --preset small --use-amp --json timeline.json
    python scripts/maintain/timeline.py --preset small --use-amp --traces .

With --traces DIR it writes trace_v1.json.gz (launched eagerly) and trace_v4.json.gz (replayed from a graph) instead:
one step each, for https://ui.perfetto.dev and our own tools. All other options but --json go to the training scripts.
Exit status: 0; 1 if a run fails; 2 for a bad option.
"""

import bisect
import gzip
import json
import pathlib
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from common.command_line import Failure, Parser, progress, result_folder, with_sizes
from common.machine.description import describe, without_folders
from common.measuring.runs import followed, train
from common.profiles import KINDS, read_profile, steps_needed, whole_traces
from common.tables import emit
from common.versions import SCRIPTS

LARGEST = 200_000  # bytes of a packed trace
SECOND_ROW = 1000  # added to the number of a stream
RUNTIMES = ("cuda_runtime", "cuda_driver", "hip_runtime")
GRAPH_LAUNCHES = ("cudaGraphLaunch", "hipGraphLaunch")
# Arrows from launches to kernels (ac2g), and the ranges of the host as the GPU saw them.
CATEGORIES = {*KINDS, *RUNTIMES, "cpu_op", "user_annotation", "gpu_user_annotation", "ac2g"}
ARGUMENTS = ("External id", "correlation", "stream", "device", "grid", "block", "registers per thread")
ARGUMENTS += ("Input Dims", "Input type")

# ---------------------------------------------------------------- kernels of a step


def kernels_of_a_step(profile):
    """Return "start duration group" of each kernel of the last step, in us from the first one's start."""
    kernels = [call for call in profile.calls if call.kind != "copy"]
    step = kernels[-(len(kernels) // steps_needed(profile)) :]
    return [f"{(one.start_ns - step[0].start_ns) / 1e3:.1f} {one.total_ns / 1e3:.1f} {one.group}" for one in step]


def profiled(script, argv):
    with tempfile.TemporaryDirectory() as folder:
        progress(f"profiling {script.name} ...")
        train(script, [*argv, "--enable-pytorch-profiler", "--profile-dir", folder], tell=followed())
        return kernels_of_a_step(read_profile(folder))


# ---------------------------------------------------------------- traces of a step


def last_step(events):
    """Return (begin, end) of the last step in us: from its forward or graph launch until the host has waited for it."""
    spans = [event for event in events if event.get("ph") == "X"]
    graphs = [e["ts"] for e in spans if e.get("cat") in RUNTIMES and e["name"] in GRAPH_LAUNCHES]
    forwards = [e["ts"] for e in spans if e.get("cat") == "user_annotation" and e["name"] == "forward"]
    updates = [e["ts"] + e["dur"] for e in spans if e.get("cat") == "user_annotation" and e["name"] == "optimizer"]
    if not graphs and not (forwards and updates):
        raise Failure(1, "the trace marks no step")
    if graphs:
        start = host_end = max(graphs)
    else:
        start = max(forwards)
        host_end = max(updates)
    waits = [e for e in spans if e.get("cat") in RUNTIMES and "Synchronize" in e["name"] and e["ts"] >= host_end]
    if not waits:  # a CPU waits for nothing
        return start, host_end
    first = min(waits, key=lambda e: e["ts"])
    return start, first["ts"] + first["dur"]


def launching(events):
    """Return the operators in which a kernel was launched, by identity; all of them where nothing was launched."""
    operators = [event for event in events if event.get("cat") == "cpu_op"]
    numbers = {event["args"].get("correlation") for event in events if event.get("cat") in KINDS}
    times = {}
    for event in events:
        if event.get("cat") in RUNTIMES and event["args"].get("correlation") in numbers:
            times.setdefault(event["tid"], []).append(event["ts"])
    for found in times.values():
        found.sort()

    def has_launch(operator):
        found = times.get(operator["tid"], [])
        first = bisect.bisect_left(found, operator["ts"])
        return first < len(found) and found[first] < operator["ts"] + operator["dur"]

    return {id(operator) for operator in operators if not numbers or has_launch(operator)}


def overlapping(events):
    """Return the kernels that begin before the one before them in their row ends, and end after it.

    Perfetto draws what follows or lies within another event of a row, and may leave these out.
    """
    kernels = [event for event in events if KINDS.get(event.get("cat")) == "kernel"]
    spans = [(round(1e3 * e["ts"]), round(1e3 * (e["ts"] + e["dur"])), e) for e in kernels]  # whole ns: no rounding
    ends = {}
    found = []
    for start, end, event in sorted(spans, key=lambda span: (span[0], -span[1])):
        row = (event.get("pid"), event.get("tid"))
        if start < ends.get(row, start) < end:
            found.append(event)
        else:
            ends[row] = max(end, ends.get(row, end))
    return found


def move(kernel, events):
    """Put a kernel, and the end of its launch's arrow, into a second row of its stream."""
    place = (kernel["pid"], kernel["tid"], kernel["ts"])
    row = SECOND_ROW + kernel["tid"]
    label = {"name": f"stream {kernel['tid']}, overlapping"}
    for event in events:
        arrow = event.get("cat") == "ac2g" and (event["pid"], event["tid"], event["ts"]) == place
        if event is kernel or arrow:
            event["tid"] = row
    named = {"ph": "M", "name": "thread_name", "pid": kernel["pid"], "tid": row, "args": label}
    if named not in events:
        events.append(named)


def one_step(content):
    """Return a trace with its last step alone, from 0 us on, without the operators that launch nothing.

    Kernels that overlap the one before them get a row of their own.
    """
    start, end = last_step(content["traceEvents"])
    events = [e for e in content["traceEvents"] if e.get("cat") in CATEGORIES and start <= e["ts"] < end]
    launchers = launching(events)
    found = [event for event in content["traceEvents"] if event.get("ph") == "M"]  # the names of the rows
    for event in events:
        if event["cat"] == "cpu_op" and id(event) not in launchers:
            continue
        kept = event | {"ts": round(event["ts"] - start, 3)}
        arguments = {name: value for name, value in event.get("args", {}).items() if name in ARGUMENTS}
        if "args" in event:
            kept["args"] = arguments
        found.append(kept)
    for event in overlapping(found):
        move(event, found)
    said = ("schemaVersion", "deviceProperties", "displayTimeUnit", "tiny_llama")
    return {name: content[name] for name in said if name in content} | {"traceEvents": found}


def write_trace(version, argv, folder):
    """Profile a version, and write its last step with the record of the run; return one line about it."""
    with tempfile.TemporaryDirectory() as place:
        progress(f"profiling {SCRIPTS[version].name} ...")
        train(SCRIPTS[version], [*argv, "--enable-pytorch-profiler", "--profile-dir", place], tell=followed())
        (trace,) = whole_traces(pathlib.Path(place))
        content = one_step(json.loads(trace.read_bytes()))
    command = ["python", SCRIPTS[version].name, *argv, "--enable-pytorch-profiler"]
    text = json.dumps({"record": describe(command)} | content, separators=(",", ":"))
    path = folder / f"trace_v{version}.json.gz"
    path.write_bytes(gzip.compress(text.encode(), 9, mtime=0))
    size = path.stat().st_size
    profile = read_profile(path)
    if size > LARGEST:
        raise Failure(1, f"{path} has {size:,} bytes, but may have {LARGEST:,}: use fewer layers")
    copies = sum(call.kind == "copy" for call in profile.calls)
    kernels = len(profile.calls) - copies
    return f"{path}: {kernels:,} {profile.unit} and {copies:,} copies of {profile.steps} step, {size:,} bytes"


# ---------------------------------------------------------------- the tool


def work(options, rest):
    argv = with_sizes(["--num-steps", "8", *rest])
    if options.traces:
        folder = result_folder(options.traces)
        for version, way in ((1, "--no-graph"), (4, "--graph")):
            print(write_trace(version, [*argv, way], folder), flush=True)
        return
    kernels = {f"v{version}": profiled(SCRIPTS[version], argv) for version in (1, 4)}
    content = {"options": without_folders(argv), "kernels": kernels}
    told = [f"version {name[1:]}: {len(found)} kernels" for name, found in content["kernels"].items()]
    emit(content, "\n".join(told), options.json)


def main(argv=None):
    parser = Parser("timeline.py", __doc__)
    parser.add_argument("--traces", metavar="DIR", help="write a trace of one step of each version")
    return parser.run(work, argv, passes_on=True)


if __name__ == "__main__":
    sys.exit(main())
