#!/usr/bin/env python3
"""Measure how much of a step's communication between GPUs is hidden behind computation, from one trace per rank.

example: python analyze_communication.py pytorch_profiles/

Communication is a kernel of NCCL or RCCL, or a copy to or from another GPU. It's hidden while another kernel or copy
runs on the same GPU, and exposed otherwise. (HolisticTraceAnalysis also calls it exposed while only a copy runs.) For
each collective the tool prints the bandwidth and which rank came last.

Record the traces with --enable-pytorch-profiler under torchrun. The tool reads each rank's newest trace in the folder,
whatever its name. One file may hold several ranks. If no trace says its rank, or if another profiler wrote the files,
each file counts as a rank.
"""

import pathlib
import re
import sys
from collections import Counter

from common.command_line import Failure, Parser, add_gpu, add_steps
from common.profiles import files_of_others, read_ranks, steps_needed, traces_in, unlike, whole_traces
from common.profiles.collectives import COLUMNS as COLLECTIVE_COLUMNS
from common.profiles.collectives import MEANING, collective_rows, on_cpu
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
    transfers = [kernel for kernel in profile.step_calls if kernel.group == "communication"]
    others = [kernel for kernel in profile.step_calls if kernel.group != "communication"]
    busy, communication, hiding = (busy_ms(some) / steps for some in (profile.step_calls, transfers, others))
    row = {"trace": str(profile.path), "steps": steps, "transfers_per_step": len(transfers) / steps, "busy_ms": busy}
    exposed = busy - hiding
    return row | {"communication_ms": communication, "exposed_ms": exposed, "exposed_share": exposed / (busy or 1)}


def trace_files(path):
    """Return the file or, of a folder, the newest trace of each rank, and remarks about what is left out.

    Traces that name no rank, and other profilers' files, are a rank each.
    """
    if not path.is_dir():
        return [path], []
    ranked = []
    for file in whole_traces(path):
        if rank := re.search(r"_rank(\d+)_", file.name):
            ranked.append((file, int(rank[1])))
    nameless = []
    if not ranked:
        traces = traces_in(path)
        ranked = [(file, rank) for file, rank in traces if rank is not None]
        nameless = [file for file, rank in traces if rank is None]
    if not ranked and nameless:
        remark = "No trace here says its rank, so each file counts as one."
        return sorted(nameless), [remark] if len(nameless) > 1 else []
    if not ranked:
        files = files_of_others(path)
        if not files:
            way = "record with --enable-pytorch-profiler under torchrun"
            raise Failure(2, f"{path} holds no trace of a rank: {way}")
        return files, []
    newest = {}
    older = []
    for file, rank in ranked:
        if newest.setdefault(rank, file) is not file:
            older.append(f"{file.relative_to(path)} (rank {rank})")
    remarks = []
    if older:
        more = f" and {len(older) - NAMED} more" if len(older) > NAMED else ""
        shown = f"{', '.join(older[:NAMED])}{more}"
        remarks.append(f"Left out, because a newer file says that it's of the same rank: {shown}.")
    if nameless:
        remarks.append(f"{len(nameless)} traces in the folder name no rank, and are left out.")
    return [newest[rank] for rank in sorted(newest)], remarks


NAMED = 3  # files that a remark names


def differences(first, other):
    """Return what shows that two profiles are not of one run, in words: sizes, version, or time."""
    found = unlike(first.metadata, other.metadata)
    versions = [profile.metadata.get("version") for profile in (first, other)]
    if versions[0] != versions[1]:
        found.append(f"version: {versions[0]}, {versions[1]}")
    moved_ns = other.origin_ns - first.origin_ns
    after_ns = moved_ns + other.calls[0].start_ns - first.calls[-1].end_ns
    apart_ns = max(after_ns, first.calls[0].start_ns - other.calls[-1].end_ns - moved_ns)
    if apart_ns / 1e9 > APART_S:
        found.append(f"{apart_ns / 1e9:,.0f} s between them")
    return found


def names_of(profiles):
    """Return a name for each rank: its number, else that of its file or, of several in one file, of its GPU."""
    names = []
    in_file = Counter(profile.path for profile in profiles)
    for profile in profiles:
        name = profile.path.name
        if profile.rank is not None:
            name = f"rank {profile.rank}"
        elif profile.sources and in_file[profile.path] > 1:
            name = profile.sources[0]
        names.append(name)
    return names if len(set(names)) == len(names) else [f"{name} #{i}" for i, name in enumerate(names, 1)]


def analyze(options):
    path = pathlib.Path(options.traces)
    files, left_out = trace_files(path)
    first, *others = found = [rank for file in files for rank in read_ranks(file, options.steps, options.gpu)]
    for profile in others:
        if unlike_in := differences(first, profile):
            where = f"{first.path} and {profile.path} differ ({'; '.join(unlike_in)})"
            raise Failure(2, f"{where}: give the ranks of one run")
    rows = [rank_row(profile) for profile in found]
    if len(files) < len(found):
        rows = [row | {"trace": f"{row['trace']} {name}"} for row, name in zip(rows, names_of(found), strict=True)]
    way = "the folder must hold the traces of all ranks" if path.is_dir() else "give the folder with all ranks"
    collectives, remarks = collective_rows(found, names_of(found), way)
    remarks = [*left_out, *remarks, *on_cpu(found)]
    remarks += dict.fromkeys(remark for profile in found for remark in profile.remarks)
    text = [text_table(*columns(COLUMNS, rows))]
    if collectives:
        text += ["", text_table(*columns(COLLECTIVE_COLUMNS, collectives)), MEANING]
    content = {"processes": rows, "collectives": collectives, "remarks": remarks}
    emit(content, "\n".join([*text, *remarks]), options.json)


def main(argv=None):
    parser = Parser("analyze_communication.py", __doc__)
    parser.add_argument("traces", metavar="DIR", help="folder with a run's traces, or one trace")
    add_steps(parser)
    add_gpu(parser)
    return parser.run(analyze, argv)


if __name__ == "__main__":
    sys.exit(main())
