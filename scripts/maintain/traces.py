"""Generate what exercises/TRACES.md says of the recorded traces: one step of version 1, and one of version 4."""

import contextlib
import gzip
import io
import json
import statistics
from typing import NamedTuple

import analyze_kernel_launches
import kernel_times
from common.profiles import KINDS, Kernel, clean, group_table, read_file, short
from common.profiles.idle import gaps_of, windows_of
from common.ratios import counted
from common.tables import markdown_table, rounded
from maintain.timeline import RUNTIMES, overlapping

VERSIONS = (1, 4)
PRESET = "small"  # of the part, in record.sh
# What reads a trace, the words behind its name, and how many lines of its output the page shows.
READERS = [(analyze_kernel_launches, ["--trace-file", "{}"], 6), (kernel_times, ["{}", "--top", "3"], 6)]


class Step(NamedTuple):
    """Hold what the five tasks ask about one step. Times in us."""

    kernels: int
    copies: int  # and fills, outside kernels
    launches: int  # calls of the host that started kernels
    busy_us: float
    whole_us: float  # from the first kernel's begin to the last one's end
    kernel_us: float  # median
    gap_us: float  # median
    wait_us: float  # median, from the begin of the host's call to that of its kernel
    groups: list  # the three with most time, as "name share"
    longest: Kernel
    hidden: list  # names of the kernels that Perfetto may not draw
    precision: str | None  # where a training script wrote the trace


def waits_of(events):
    """Return ({number of a host's call}, [us]): the calls that started kernels, and how long after each one began."""
    calls = {event["args"].get("correlation"): event["ts"] for event in events if event.get("cat") in RUNTIMES}
    kernels = [event for event in events if KINDS.get(event.get("cat")) == "kernel"]
    launched = [(event["args"].get("correlation"), event["ts"]) for event in kernels]
    launched = [(number, start) for number, start in launched if number in calls]
    return {number for number, _ in launched}, [start - calls[number] for number, start in launched]


def step_of(path):
    """Return what is in a trace of one step."""
    (profile,) = read_file(path)
    calls = profile.calls
    kernels = [call for call in calls if call.kind == "kernel"]
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    launches, waits = waits_of(events)
    gaps_us = [gap["gap_us"] for gap in gaps_of(calls, windows_of(profile)[1])]
    whole_us = (max(call.end_ns for call in calls) - calls[0].start_ns) / 1e3
    return Step(
        kernels=len(kernels),
        copies=len(calls) - len(kernels),
        launches=len(launches),
        busy_us=whole_us - sum(gaps_us),
        whole_us=whole_us,
        kernel_us=statistics.median(kernel.total_ns / 1e3 for kernel in kernels),
        gap_us=statistics.median(gaps_us) if gaps_us else 0.0,
        wait_us=statistics.median(waits) if waits else 0.0,
        groups=[f"{row['group']} {row['share_percent']:.0f} %" for row in group_table(calls)[:3]],
        longest=max(kernels, key=lambda call: call.total_ns),
        hidden=[clean(event["name"]) for event in overlapping(events)],
        precision=profile.metadata.get("precision"),
    )


def answers(steps):
    """Return the answers to the five tasks, in a table narrow enough for a phone."""
    rows = [
        ["1", "kernels", *(f"{step.kernels:,}" for step in steps)],
        ["", "copies and fills", *(f"{step.copies:,}" for step in steps)],
        ["", "launches by the host", *(f"{step.launches:,}" for step in steps)],
        ["2", "first kernel to last, ms", *(f"{step.whole_us / 1e3:.2f}" for step in steps)],
        ["", "busy, ms", *(f"{step.busy_us / 1e3:.2f}" for step in steps)],
        ["", "busy, %", *(f"{100 * step.busy_us / step.whole_us:.1f}" for step in steps)],
        ["3", "median kernel, us", *(f"{step.kernel_us:.1f}" for step in steps)],
        ["", "median gap, us", *(f"{step.gap_us:.1f}" for step in steps)],
        ["4", "launch to kernel, median us", *(f"{step.wait_us:,.0f}" for step in steps)],
        ["5", "longest kernel, us", *(f"{step.longest.total_ns / 1e3:.0f}" for step in steps)],
    ]
    table = markdown_table(["task", "", *(f"V{version}" for version in VERSIONS)], rows, left=2)
    told = [table, ""]
    for version, step in zip(VERSIONS, steps, strict=True):
        longest = f"`{short(step.longest.name, 40)}` ({step.longest.group})"
        told.append(f"* Task 5, V{version}: {', '.join(step.groups)}. The longest kernel is {longest}.")
        if step.hidden:
            among = ", the longest among them" if step.longest.name in step.hidden else ""
            told[-1] += f" Perfetto may leave out {counted(len(step.hidden), 'kernel')}{among}:"
            told[-1] += " each begins a moment before the previous one has ended."
    return "\n".join(told)


def made_with(made, recorded, steps):
    """Return how long the traces' steps took, and how long steps of the record took without a profiler.

    made: a line that says where the traces were made.
    """
    under = " and ".join(f"{step.whole_us / 1e3:.1f} ms in V{v}" for v, step in zip(VERSIONS, steps, strict=True))
    told = f"From its first kernel to its last, each recorded step takes {under} under the profiler. {made}"
    rows = [recorded.row(f"v{version}", PRESET, step.precision) for version, step in zip(VERSIONS, steps, strict=True)]
    if all(rows):
        without = " and ".join(f"{rounded(row['step_ms'])} ms in V{v}" for v, row in zip(VERSIONS, rows, strict=True))
        told += f" Without the profiler a whole step takes {without} on {recorded.suite()['record']['device']}."
    return told


def readers(path, shown):
    """Return the commands that read a trace without a network, and the first lines of what they print.

    shown: the path that the commands name.
    """
    commands = []
    printed = []
    for tool, words, count in READERS:
        with contextlib.redirect_stdout(io.StringIO()) as output:
            tool.main([word.format(path) for word in words])
        commands.append(" ".join([f"python scripts/{tool.__name__}.py", *words]).format(shown))
        printed += [*output.getvalue().replace(str(path), path.name).splitlines()[:count], "...", ""]
    fold = ["<details><summary>What they print for version 1, shortened</summary>", "", "```text", *printed[:-1], "```"]
    return "\n".join(["```bash", *commands, "```", "", *fold, "</details>"])


def traces_texts(recorded, origin):
    """Return the page's generated parts by name; none where the traces were not recorded.

    origin(record, recorded): one line that says where a part was measured.
    """
    holder = recorded.holding("trace")
    folder = holder.folder / "trace"
    if not (folder / "record.json").exists():
        return {}
    record = json.loads((folder / "record.json").read_text(encoding="utf-8"))
    paths = [folder / f"trace_v{version}.json.gz" for version in VERSIONS]
    steps = [step_of(path) for path in paths]
    shown = f"scripts/recorded/{holder.folder.name}/trace/{paths[0].name}"
    made = {"traces_made": made_with(origin(record, holder), recorded, steps), "traces_read": readers(paths[0], shown)}
    return made | {"traces": answers(steps)}
