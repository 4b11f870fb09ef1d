"""The answers of exercises/TRACES.md, from the recorded traces of one step of versions 1 and 4."""

import gzip
import json
import statistics
from typing import NamedTuple

from analyze_kernel_launches import launch_results
from common.profiles import KINDS, group_table, read_file, short
from common.tables import markdown_table
from maintain.timeline import RUNTIMES

VERSIONS = (1, 4)


def path_of(recorded, version):
    return recorded.folder / "trace" / f"trace_v{version}.json.gz"


class Step(NamedTuple):
    """Hold what the five tasks ask about one step. Times in us."""

    kernels: int
    launches: int  # calls of the host that started them
    busy_us: float
    idle_share: float
    median_kernel_us: float
    median_gap_us: float
    median_wait_us: float  # from the launch to its kernel's begin
    groups: list  # the three groups with most time, as (name, percent)
    longest: str
    longest_us: float


def step_of(path):
    """Return what is in a trace of one step."""
    calls = read_file(path).calls
    kernels = [call for call in calls if call.kind == "kernel"]
    gaps = []
    free = kernels[0].end_ns
    for kernel in kernels[1:]:
        if kernel.start_ns > free:
            gaps.append((kernel.start_ns - free) / 1e3)
        free = max(free, kernel.end_ns)
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    runtime = {e["args"].get("correlation"): e["ts"] for e in events if e.get("cat") in RUNTIMES}
    launched = [e for e in events if KINDS.get(e.get("cat")) == "kernel" and e["args"].get("correlation") in runtime]
    waits = [e["ts"] - runtime[e["args"]["correlation"]] for e in launched]
    found = launch_results(calls, 1, step_starts_ns=[])  # one step: no gap is a pause between two
    longest = max(kernels, key=lambda call: call.total_ns)
    return Step(
        kernels=len(kernels),
        launches=len({e["args"]["correlation"] for e in launched}),
        busy_us=found["busy_us"],
        idle_share=found["idle_share"],
        median_kernel_us=statistics.median(kernel.total_ns / 1e3 for kernel in kernels),
        median_gap_us=statistics.median(gaps) if gaps else 0.0,
        median_wait_us=statistics.median(waits) if waits else 0.0,
        groups=[(row["group"], row["share_percent"]) for row in group_table(calls)[:3]],
        longest=short(longest.name, 40),
        longest_us=longest.total_ns / 1e3,
    )


def traces_table(recorded):
    """Return the answers to the five tasks; None where the traces were not recorded."""
    paths = [path_of(recorded, version) for version in VERSIONS]
    if not all(path.exists() for path in paths):
        return None
    steps = [step_of(path) for path in paths]
    busy = [f"{100 - 100 * step.idle_share:.1f} %" for step in steps]
    rows = [
        ["1", "kernels", *(f"{step.kernels:,}" for step in steps)],
        ["1", "launches by the host", *(f"{step.launches:,}" for step in steps)],
        ["2", "GPU busy, ms", *(f"{step.busy_us / 1e3:.2f}" for step in steps)],
        ["2", "of the time from the first kernel to the last", *busy],
        ["3", "median kernel, us", *(f"{step.median_kernel_us:.1f}" for step in steps)],
        ["3", "median gap, us", *(f"{step.median_gap_us:.1f}" for step in steps)],
        ["4", "from launch to kernel, median us", *(f"{step.median_wait_us:,.0f}" for step in steps)],
    ]
    texts = [markdown_table(["task", "", "V1, eager", "V4, graph"], rows, left=2)]  # narrow: a phone shows it whole
    for version, step in zip(VERSIONS, steps, strict=True):
        groups = ", ".join(f"{name} {share:.0f} %" for name, share in step.groups)
        texts.append(
            f"Task 5, version {version}: {groups}. Longest kernel: `{step.longest}`, {step.longest_us:.0f} us."
        )
    return "\n\n".join(texts)
