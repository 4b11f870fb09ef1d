"""Read the kernels of Perfetto traces (.proto, .pftrace), where alone rocprof-sys keeps them. Standard library only.

The field numbers are those of Perfetto's trace_packet.proto, track_event.proto, interned_data.proto and
clock_snapshot.proto.
"""

import re

from common.command_line import Failure
from common.files import DAMAGE
from common.profiles.model import WITH_LAUNCHES, checked_kernel, finished

KERNEL_CATEGORIES = {"rocm_kernel_dispatch", "kernel_dispatch", "device_hip", "hip_activity", "roctracer_hip_activity"}
KERNEL_CATEGORIES |= {"rocm_hip_stream"}  # of rocprof-sys from ROCm 7.1 on, which has copies and NO_WORK in it too
COPY_CATEGORIES = {"rocm_memory_copy", "memory_copy"}
HOST_CATEGORY = re.compile(r"(\w+_)?h(ip|sa)(_\w+)?_api(_\w+)?")
COPY = re.compile("MEMORY_COPY_")
NO_WORK = re.compile("SCRATCH_MEMORY_")
SLICE_BEGIN, SLICE_END = 1, 2
INCREMENTAL_CLOCK = 64  # the clock of Perfetto's C++ library, whose time stamps are differences


def varint(data, at):
    """Return a variable-length integer and the position after it."""
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 127) << shift
        at = at + 1
        shift = shift + 7
        if shift > 70:
            raise ValueError("a number has more than 64 bits")
        if byte < 128:
            return value, at


class Message(dict):
    """Map the field numbers of an encoded message to their values, each an int or bytes."""

    def __init__(self, data=b""):
        at = 0
        while at < len(data):
            key, at = varint(data, at)
            kind = key & 7
            value, at = varint(data, at) if kind in (0, 2) else ({1: 8, 5: 4}[kind], at)
            if kind:  # a number, or so many bytes
                begin = at
                at = begin + value
                value = data[begin:at]
            if at > len(data):
                raise ValueError("it is cut off")
            self.setdefault(key >> 3, []).append(value)

    def last(self, number, default=0):
        """Return the last value of a field, which is the one that counts where it must not repeat."""
        return self.get(number, [default])[-1]

    def text(self, number):
        return self.last(number, b"?").decode(errors="replace")

    def part(self, number):
        return Message(self.last(number, b""))

    def parts(self, number):
        return map(Message, self.get(number, []))


class Sequence:
    """Hold what later packets of one writer refer to: interned names, its clock and default track, open slices."""

    def __init__(self):
        self.names = {}
        self.categories = {}
        self.clock = 0
        self.now = 0
        self.track = 0
        self.open = {}
        self.host_calls = 0

    def call(self, packet):
        """Read a packet; return (name, start, end, kind) where it ends a kernel or a copy, else None."""
        if packet.last(13) & 1 or 59 in packet:  # forget the names of before, take new defaults
            defaults = packet.part(59)
            self.names = {}
            self.categories = {}
            self.clock = defaults.last(58)
            self.track = defaults.part(11).last(11)
        for clock in packet.part(6).parts(1):
            if clock.last(1) == INCREMENTAL_CLOCK:
                self.now = clock.last(2)
        self.categories |= {entry.last(1): entry.text(2) for entry in packet.part(12).parts(1)}
        self.names |= {entry.last(1): entry.text(2) for entry in packet.part(12).parts(2)}
        now = packet.last(8)
        if packet.last(58, self.clock) == INCREMENTAL_CLOCK:  # every packet moves it
            self.now = now = self.now + now
        event = packet.part(11)
        stack = self.open.setdefault(event.last(11, self.track), [])
        if event.last(9) == SLICE_BEGIN:
            categories = {self.categories.get(number) for number in event.get(3, [])}
            categories |= {name.decode(errors="replace") for name in event.get(22, [])}
            name = event.text(23) if 23 in event else self.names.get(event.last(10), "?")
            works = bool(categories & (KERNEL_CATEGORIES | COPY_CATEGORIES)) and not NO_WORK.match(name)
            kind = "copy" if categories & COPY_CATEGORIES or COPY.match(name) else "kernel"
            if any(HOST_CATEGORY.fullmatch(category or "") for category in categories):
                self.host_calls += 1
            stack.append((name, now, kind if works else None))
        elif event.last(9) == SLICE_END and stack:
            name, start, kind = stack.pop()
            return (name, start, now, kind) if kind else None
        return None


def calls_in(data):
    """Return (name, start_ns, end_ns, kind) of every kernel and copy in a trace, and the number of the host's calls."""
    sequences = {}
    found = []
    for packet in Message(data).parts(1):
        found.append(sequences.setdefault(packet.last(10), Sequence()).call(packet))
    return list(filter(None, found)), sum(sequence.host_calls for sequence in sequences.values())


def read_perfetto(path, content, gpu):
    """Return the profiles in a Perfetto trace.

    Raise Failure with status 0 if its kernels are in a form that nothing here reads: the file is right, Perfetto opens
    it.
    """
    try:
        calls, host_calls = calls_in(content)
        found = [checked_kernel(name, start, end - start, kind) for name, start, end, kind in calls]
    except DAMAGE as error:  # a number where a message belongs, for one
        export = "turn an .nsys-rep file into a database with nsys export --type sqlite"
        raise Failure(2, f"isn't a Perfetto trace, or is damaged ({error}): {export}") from None
    if not any(call.kind == "kernel" for call in found) and any(
        category.encode() in content for category in KERNEL_CATEGORIES
    ):
        raise Failure(0, "has its kernels in a form that this tool can't read: open it in https://ui.perfetto.dev")
    notes = [f"Its {host_calls:,} calls of HIP and HSA aren't read: {WITH_LAUNCHES}."] if host_calls else []
    return finished(path, found, gpu, notes=notes)
