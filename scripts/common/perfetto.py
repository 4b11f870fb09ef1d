"""Read the kernels of Perfetto traces (.proto, .pftrace), where alone rocprof-sys keeps them. Standard library only.

The field numbers are those of Perfetto's trace_packet.proto, track_event.proto, interned_data.proto and
clock_snapshot.proto.
"""

KERNEL_CATEGORIES = {"rocm_kernel_dispatch", "kernel_dispatch", "device_hip", "hip_activity", "roctracer_hip_activity"}
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
        elif kind in (1, 2, 5):
            size, at = varint(data, at) if kind == 2 else ({1: 8, 5: 4}[kind], at)
            value, at = data[at : at + size], at + size
            if len(value) < size:
                raise ValueError("it is cut off")
            value = value if kind == 2 else int.from_bytes(value, "little")
        else:
            raise ValueError(f"unknown wire type {kind}")
        yield key >> 3, value


class Sequence:
    """Hold what later packets of one writer refer to: interned names, its clock and default track, open slices."""

    def __init__(self):
        self.names, self.categories, self.clock, self.now, self.track, self.open = {}, {}, 0, 0, 0, {}

    def kernel(self, packet):
        """Read a packet; return (track, name, start, end) where it ends a kernel, else None."""
        if packet.get(13, 0) & 1 or 59 in packet:  # forget the names of before, take new defaults
            defaults = dict(fields(packet.get(59, b"")))
            self.names, self.categories, self.clock = {}, {}, defaults.get(58, 0)
            self.track = dict(fields(defaults.get(11, b""))).get(11, 0)
        for number, clock in fields(packet.get(6, b"")):
            clock = dict(fields(clock)) if number == 1 else {}
            if clock.get(1) == INCREMENTAL_CLOCK:
                self.now = clock.get(2, 0)
        for number, entry in fields(packet.get(12, b"")):
            if number in (1, 2):
                entry = dict(fields(entry))
                (self.categories if number == 1 else self.names)[entry[1]] = entry[2].decode(errors="replace")
        now = packet.get(8, 0)
        if packet.get(58, self.clock) == INCREMENTAL_CLOCK:  # every packet moves it
            self.now = now = self.now + now
        return self.event(packet[11], now) if 11 in packet else None

    def event(self, event, now):
        """Open or close a slice; return the kernel that it closes, else None."""
        content, categories = dict(fields(event)), set()
        for number, value in fields(event):
            if number in (3, 22):
                categories.add(self.categories.get(value) if number == 3 else value.decode(errors="replace"))
        name = content[23].decode(errors="replace") if 23 in content else self.names.get(content.get(10), "?")
        track = content.get(11, self.track)
        stack = self.open.setdefault(track, [])
        if content.get(9) == SLICE_BEGIN:
            stack.append((name, now, bool(categories & KERNEL_CATEGORIES)))
        elif content.get(9) == SLICE_END and stack:
            name, start, kernel = stack.pop()
            return (track, name, start, now) if kernel else None
        return None


def kernels(data):
    """Return (track, name, start_ns, end_ns) of every kernel in a trace."""
    sequences, found = {}, []
    for packet in (dict(fields(content)) for number, content in fields(data) if number == 1):
        found.append(sequences.setdefault(packet.get(10, 0), Sequence()).kernel(packet))
    return [kernel for kernel in found if kernel]
