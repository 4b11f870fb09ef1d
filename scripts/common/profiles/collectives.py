"""Match the collectives of a run's ranks: their bandwidth, and which rank came last. Standard library only."""

import re
import statistics
from collections import Counter

from common.profiles import short

BYTES = {"Float": 4, "Half": 2, "BFloat16": 2, "Double": 8, "Int": 4, "Long": 8, "Byte": 1, "Char": 1, "Bool": 1}
BYTES |= {"Float8_e4m3fn": 1, "Float8_e5m2": 1, "Float8_e4m3fnuz": 1, "Float8_e5m2fnuz": 1}
COLUMNS = (
    "collective: {name} | ranks: {ranks} | MB: {bytes:M,.3f} | calls: {calls:,} | median us: {us:,.1f} | "
    "GB/s: {gb_s:,.1f} | bus GB/s: {bus_gb_s:,.1f} | others waited ms: {waited_ms:,.3f} | came last: {last}"
)
MEANING = (
    "A collective begins when its last rank arrives. So the shortest time of its ranks is the transfer; whatever the "
    "others took longer, they waited. Bus bandwidth is as NCCL defines it."
)


def bytes_of(one):
    """Return the bytes that a collective's bandwidth counts, from what NCCL says of it; None if it does not."""
    sizes = [one.get("In msg nelems"), one.get("Out msg nelems")]
    width = BYTES.get(one.get("dtype"))
    if width is None or not all(type(size) is int and size >= 0 for size in sizes):
        return None
    return width * max(sizes)


def bus_factor(name, ranks):
    """Return the bytes over a link per byte of a collective, as nccl-tests count them."""
    if "reduce" in name and "scatter" not in name and "all" in name:
        return 2 * (ranks - 1) / ranks
    if any(word in name for word in ("gather", "scatter", "all_to_all", "alltoall")):
        return (ranks - 1) / ranks
    return 1.0


def keyed(profile):
    """Return {(group, name, number within both): kernel} of a rank's collectives, in order of time."""
    seen = Counter()
    found = {}
    for call in profile.calls:
        if call.group != "communication" or call.kind != "kernel":
            continue
        said = call.collective or {}
        name = str(said.get("Collective name") or call.name)
        group = f"{said.get('Process Group Name', '')} {said.get('Process Group Ranks', '')}"
        seen[group, name] += 1
        found[group, name, seen[group, name]] = call
    return found


ON_CPU = re.compile("(gloo|mpi):")


def on_cpu(profiles):
    """Return remarks about collectives of libraries that communicate on the CPU."""
    found = {}
    for profile in profiles:
        for event in profile.host:
            if library := ON_CPU.match(event["name"]):
                found.setdefault(library[1], []).append(event["dur"])
    remarks = []
    for library, us in found.items():
        part = f"for {sum(us) / 1e3:,.3f} ms in {len(us):,} calls here"
        remarks.append(f"{library} communicates on the CPU, {part}: this table has GPUs alone.")
    return remarks


def collective_rows(profiles, names, way="give the folder with all ranks"):
    """Return a row per kind of collective that all ranks of a group made, and remarks about what does not match.

    names: of the ranks, in the order of the profiles. way: to the bandwidths, where one rank's trace is all.
    """
    of_rank = [keyed(profile) for profile in profiles]
    whole = Counter(key for found in of_rank for key in found)
    parts = {}
    single = 0
    for key, count in whole.items():
        some = [(name, found[key]) for name, found in zip(names, of_rank, strict=True) if key in found]
        said = some[0][1].collective or {}
        size = said.get("Group size")
        if count < 2 or (type(size) is int and count < size):
            single += 1
        moved = {bytes_of(call.collective or {}) for _, call in some}
        kind = (key[1], size if type(size) is int else None, moved.pop() if len(moved) == 1 else None)
        parts.setdefault(kind, []).append(some)
    rows = []
    for (name, size, moved), calls in parts.items():
        shortest = [min(call.total_ns for _, call in some) / 1e3 for some in calls]
        ranks = size or (max(map(len, calls)) if len(profiles) > 1 else None)
        row = {"name": short(name, 40), "ranks": ranks, "bytes": moved, "calls": len(calls)}
        row |= {"us": statistics.median(shortest), "gb_s": None, "bus_gb_s": None, "waited_ms": None, "last": "-"}
        row["total_ms"] = sum(shortest) / 1e3
        if moved and sum(shortest):
            row["gb_s"] = moved * len(calls) / sum(shortest) / 1e3
            row["bus_gb_s"] = row["gb_s"] * bus_factor(name.lower(), ranks) if ranks else None
        if all(len(some) > 1 for some in calls):
            waits = [(max(c.total_ns for _, c in some) - min(c.total_ns for _, c in some)) / 1e6 for some in calls]
            last = Counter(min(some, key=lambda one: one[1].total_ns)[0] for some in calls)
            who, times = last.most_common(1)[0]
            row |= {"waited_ms": sum(waits), "last": f"{who} ({times} of {len(calls)})"}
        rows.append(row)
    rows.sort(key=lambda row: -row["total_ms"])
    remarks = []
    if single and len(profiles) > 1:
        remarks.append(f"{single:,} collectives are missing from the trace of a rank, which may have come last.")
    if single and len(profiles) == 1:
        remarks.append(f"One rank's trace also contains its waiting: for bandwidths, {way}.")
    return rows, remarks
