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
from common.profiles import busy_intervals, gpu_launches, steps_needed, unlike, whole_traces
from common.tables import columns, emit, text_table

COLUMNS = (
    "per step of: {trace} | steps: {steps} | transfers: {transfers_per_step:.1f} | communication ms: "
    "{communication_ms:.3f} | exposed ms: {exposed_ms:.3f} | GPU busy ms: {busy_ms:.3f} | exposed: {exposed_share:.1%}"
)
COMMUNICATES = re.compile(r"(nccl|rccl|msccl|Memcpy PtoP)", re.IGNORECASE)  # ncclDevKernel_...


def rank_row(profile, launches):
    """Return times in ms per step: communicating, of that exposed, and busy with anything."""
    steps, talking = steps_needed(profile), [kernel for kernel in launches if COMMUNICATES.match(kernel.name)]

    def busy_ms(some):
        return sum(end - start for start, end in busy_intervals(some)) / steps / 1e6

    busy = busy_ms(launches)
    exposed = busy - busy_ms([kernel for kernel in launches if not COMMUNICATES.match(kernel.name)])
    row = {"trace": str(profile.path), "steps": steps, "transfers_per_step": len(talking) / steps, "busy_ms": busy}
    return row | {"communication_ms": busy_ms(talking), "exposed_ms": exposed, "exposed_share": exposed / busy}


def trace_files(names):
    """Return the files that are named and, of each folder, the newest trace of each rank."""
    files = []
    for path in map(pathlib.Path, names):
        newest = {}
        for file in whole_traces(path) if path.is_dir() else []:
            rank = re.search(r"_rank(\d+)_", file.name)
            newest.setdefault(int(rank[1]) if rank else -1, file)
        if len(newest) > 1:
            newest.pop(-1, None)  # a run of one process
        files += [newest[rank] for rank in sorted(newest)] if path.is_dir() else [path]
    if not files:
        raise Failure(2, f"{' '.join(names)} holds no trace_*.pt.trace.json: record one with --enable-pytorch-profiler")
    return files


def analyze(options):
    found = [gpu_launches(file, options.steps) for file in trace_files(options.traces)]
    (first, _), *others = found
    for profile, _ in others:
        if differences := unlike(first.metadata, profile.metadata):
            where = f"{first.path} and {profile.path} are unlike ({'; '.join(differences)})"
            raise Failure(2, f"{where}: give the ranks of one run")
    rows = [rank_row(*one) for one in found]
    emit({"processes": rows}, text_table(*columns(COLUMNS, rows)), options.json)


def main(argv=None):
    parser = Parser("analyze_communication.py", __doc__)
    parser.add_argument("traces", nargs="+", metavar="TRACE", help="traces of one run's ranks, or their folder")
    add_steps(parser)
    return parser.run(analyze, argv)


if __name__ == "__main__":
    sys.exit(main())
