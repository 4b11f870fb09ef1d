#!/usr/bin/env python3
"""Write the kernels of Perfetto traces (.proto, .pftrace) as CSV that kernel_times.py reads. Standard library only.

rocprof-sys keeps kernels nowhere else. The field numbers are those of Perfetto's trace_packet.proto, track_event.proto,
interned_data.proto and clock_snapshot.proto.
"""

import argparse
import csv
import pathlib
import sys

KERNEL_CATEGORIES = {"rocm_kernel_dispatch", "kernel_dispatch", "device_hip", "hip_activity", "roctracer_hip_activity"}
HEADER = ("Kind", "Agent_Id", "Queue_Id", "Kernel_Name", "Start_Timestamp", "End_Timestamp")
SLICE_BEGIN, SLICE_END = 1, 2
INCREMENTAL_CLOCK = 64  # the clock of Perfetto's C++ library, whose time stamps are differences


def varint(data, at):
    """Return a variable-length integer and the position after it."""
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at


def fields(data):
    """Yield (number, value) of every field of a message: an int, or bytes."""
    at = 0
    while at < len(data):
        key, at = varint(data, at)
        kind = key & 7
        if kind == 0:
            value, at = varint(data, at)
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
            value, at = int.from_bytes(data[at : at + size], "little"), at + size
        elif kind == 2:
            size, at = varint(data, at)
            value, at = data[at : at + size], at + size
            if len(value) < size:
                raise IndexError("the trace is cut off")
        else:
            raise ValueError(f"unknown wire type {kind}")
        yield key >> 3, value


def one(data, number, default=None):
    """Return the last value of one field."""
    return next((value for field, value in reversed(list(fields(data))) if field == number), default)


class Sequence:
    """Hold what later packets of one writer refer to: interned names, its clock, open slices."""

    def __init__(self):
        self.names, self.categories, self.clock, self.now, self.defaults, self.open = {}, {}, 0, 0, b"", {}

    def reset(self, defaults):
        """Take the packet's defaults and forget the names of before."""
        self.names, self.categories, self.defaults = {}, {}, defaults
        self.clock = one(defaults, 58, 0)

    def learn(self, interned):
        """Remember interned categories (1) and event names (2)."""
        for field, value in fields(interned):
            if field in (1, 2):
                target = self.categories if field == 1 else self.names
                target[one(value, 1)] = one(value, 2, b"").decode(errors="replace")

    def time(self, packet):
        """Return the packet's time in nanoseconds."""
        stamp = packet.get(8, 0)
        if packet.get(58, self.clock) == INCREMENTAL_CLOCK:
            self.now += stamp
            return self.now
        return stamp

    def set_clock(self, snapshot):
        """Set the start of the incremental clock."""
        for field, clock in fields(snapshot):
            if field == 1 and one(clock, 1) == INCREMENTAL_CLOCK:
                self.now = one(clock, 2, 0)

    def event(self, event, now):
        """Return (track, name, start, end) where this event ends a kernel, else None."""
        categories, name, kind = set(), None, None
        track = one(one(self.defaults, 11, b""), 11, 0)
        for field, value in fields(event):
            if field in (3, 22):
                categories.add(self.categories.get(value, "") if field == 3 else value.decode(errors="replace"))
            elif field in (10, 23):
                name = self.names.get(value, "?") if field == 10 else value.decode(errors="replace")
            elif field == 9:
                kind = value
            elif field == 11:
                track = value
        stack = self.open.setdefault(track, [])
        if kind == SLICE_BEGIN:
            stack.append((name or "?", now, bool(categories & KERNEL_CATEGORIES)))
        elif kind == SLICE_END and stack:
            name, start, kernel = stack.pop()
            return (track, name, start, now) if kernel else None
        return None


def kernels_of(data):
    """Yield (track, name, start_ns, end_ns) of every kernel in a trace."""
    sequences = {}
    for field, content in fields(data):
        if field != 1:
            continue
        packet = dict(fields(content))
        sequence = sequences.setdefault(packet.get(10, 0), Sequence())
        if packet.get(13, 0) & 1 or 59 in packet:
            sequence.reset(packet.get(59, b""))
        if 6 in packet:
            sequence.set_clock(packet[6])
        if 12 in packet:
            sequence.learn(packet[12])
        now = sequence.time(packet) if 8 in packet else sequence.now
        if 11 in packet:
            kernel = sequence.event(packet[11], now)
            if kernel:
                yield kernel


def main(argv=None):
    """Write the CSV file; return the exit status, 1 for a trace without kernels."""
    parser = argparse.ArgumentParser(prog="perfetto.py", description="Write the kernels of Perfetto traces as CSV.")
    parser.add_argument("path", type=pathlib.Path, help="a trace, or a folder of them")
    parser.add_argument("--csv", required=True, metavar="FILE", help="the CSV file")
    options = parser.parse_args(argv)
    path = options.path
    files = sorted([*path.rglob("*.proto"), *path.rglob("*.pftrace")]) if path.is_dir() else [path]
    rows, named = [], False
    try:
        for file in files:
            data = file.read_bytes()
            named = named or any(name.encode() in data for name in KERNEL_CATEGORIES)
            rows += [("KERNEL_DISPATCH", 0, f"{file.stem}:{track}", *rest) for track, *rest in kernels_of(data)]
        if not rows and named:
            print(f"perfetto.py: {path}: kernels are in it, but in a form that this tool does not read")
            return 0
        if not rows:
            raise ValueError("no kernel is in it: the profiler saw no work on a GPU")
        with open(options.csv, "w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file, quoting=csv.QUOTE_NONNUMERIC, lineterminator="\n")
            writer.writerows([HEADER, *rows])
    except (OSError, IndexError, ValueError) as error:
        print(f"perfetto.py: {path}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
