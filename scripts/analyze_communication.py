#!/usr/bin/env python3
"""Measure how much of a step's communication between GPUs is hidden behind computation, from one trace per rank.

example: python analyze_communication.py pytorch_profiles/

A kernel of NCCL or RCCL communicates, and so does a copy to or from another GPU. It is hidden while any other kernel or
copy runs on the same GPU, and exposed while none does. Record the traces with --enable-pytorch-profiler under torchrun;
of a folder the newest trace of each rank is read.
"""

import pathlib
import re
import sys

from common.command_line import Failure, Parser, add_steps
from common.profiles import gpu_profile, steps_needed, unlike, whole_traces
from common.tables import columns, emit, text_table

COLUMNS = (
    "per step of: {trace} | steps: {steps} | transfers: {transfers_per_step:.1f} | communication ms: "
    "{communication_ms:.3f} | exposed ms: {exposed_ms:.3f} | GPU busy ms: {busy_ms:.3f} | exposed: {exposed_share:.1%}"
)
APART_S = 60  # seconds  between the ranks of one run at most: hosts' clocks differ by less


def busy_ms(launches):
    """Return how long anything ran, whatever the queue, of launches in order of time."""
    busy = end = 0
    for one in launches:
        busy += max(0, one.end_ns - max(one.start_ns, end))
        end = max(end, one.end_ns)
    return busy / 1e6


def rank_row(profile):
    """Return times in ms per step: communicating, of that exposed, and busy with anything."""
    steps = steps_needed(profile)
    transfers = [kernel for kernel in profile.calls if kernel.group == "communication"]
    others = [kernel for kernel in profile.calls if kernel.group != "communication"]
    busy, communication, hiding = (busy_ms(some) / steps for some in (profile.calls, transfers, others))
    row = {"trace": str(profile.path), "steps": steps, "transfers_per_step": len(transfers) / steps, "busy_ms": busy}
    exposed = busy - hiding
    return row | {"communication_ms": communication, "exposed_ms": exposed, "exposed_share": exposed / busy}


def trace_files(path):
    """Return the file, or of a folder the newest trace of each rank."""
    if not path.is_dir():
        return [path]
    newest = {}
    for file in whole_traces(path):
        if rank := re.search(r"_rank(\d+)_", file.name):
            newest.setdefault(int(rank[1]), file)
    if not newest:
        raise Failure(2, f"{path} holds no trace of a rank: record with --enable-pytorch-profiler under torchrun")
    return [newest[rank] for rank in sorted(newest)]


def differences(first, other):
    """Return what shows that two profiles are not of one run, in words: sizes, version, or time."""
    found = unlike(first.metadata, other.metadata)
    versions = [profile.metadata.get("version") for profile in (first, other)]
    if versions[0] != versions[1]:
        found.append(f"version: {versions[0]}, {versions[1]}")
    apart_ns = max(other.calls[0].start_ns - first.calls[-1].end_ns, first.calls[0].start_ns - other.calls[-1].end_ns)
    if apart_ns / 1e9 > APART_S:
        found.append(f"{apart_ns / 1e9:,.0f} s between them")
    return found


def analyze(options):
    first, *others = found = [gpu_profile(file, options.steps) for file in trace_files(pathlib.Path(options.traces))]
    for profile in others:
        if unlike_in := differences(first, profile):
            where = f"{first.path} and {profile.path} are unlike ({'; '.join(unlike_in)})"
            raise Failure(2, f"{where}: give the ranks of one run")
    rows = [rank_row(profile) for profile in found]
    emit({"processes": rows}, text_table(*columns(COLUMNS, rows)), options.json)


def main(argv=None):
    parser = Parser("analyze_communication.py", __doc__)
    parser.add_argument("traces", metavar="DIR", help="folder with the traces of a run's ranks, or one of them")
    add_steps(parser)
    return parser.run(analyze, argv)


if __name__ == "__main__":
    sys.exit(main())
