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


def message(data):
    """Return {field number: its values} of a message, each an int or bytes."""
    found, at = {}, 0
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
        found.setdefault(key >> 3, []).append(value)
    return found


def last(fields, number, default=0):
    """Return the last value of a field, which is the one that counts where it must not repeat."""
    return fields.get(number, [default])[-1]


class Sequence:
    """Hold what later packets of one writer refer to: interned names, its clock and default track, open slices."""

    def __init__(self):
        self.names, self.categories, self.clock, self.now, self.track, self.open = {}, {}, 0, 0, 0, {}

    def kernel(self, packet):
        """Read a packet; return (name, start, end) where it ends a kernel, else None."""
        if last(packet, 13) & 1 or 59 in packet:  # forget the names of before, take new defaults
            defaults = message(last(packet, 59, b""))
            self.names, self.categories, self.clock = {}, {}, last(defaults, 58)
            self.track = last(message(last(defaults, 11, b"")), 11)
        for clock in map(message, message(last(packet, 6, b"")).get(1, [])):
            if last(clock, 1) == INCREMENTAL_CLOCK:
                self.now = last(clock, 2)
        interned = message(last(packet, 12, b""))
        for number, names in ((1, self.categories), (2, self.names)):
            for entry in map(message, interned.get(number, [])):
                names[last(entry, 1)] = last(entry, 2, b"?").decode(errors="replace")
        now = last(packet, 8)
        if last(packet, 58, self.clock) == INCREMENTAL_CLOCK:  # every packet moves it
            self.now = now = self.now + now
        return self.event(message(packet[11][-1]), now) if 11 in packet else None

    def event(self, event, now):
        """Open or close a slice; return the kernel that it closes, else None."""
        categories = {self.categories.get(number) for number in event.get(3, [])}
        categories |= {name.decode(errors="replace") for name in event.get(22, [])}
        name = event[23][-1].decode(errors="replace") if 23 in event else self.names.get(last(event, 10), "?")
        track = last(event, 11, self.track)
        stack = self.open.setdefault(track, [])
        if last(event, 9) == SLICE_BEGIN:
            stack.append((name, now, bool(categories & KERNEL_CATEGORIES)))
        elif last(event, 9) == SLICE_END and stack:
            name, start, kernel = stack.pop()
            return (name, start, now) if kernel else None
        return None


def kernels(data):
    """Return (name, start_ns, end_ns) of every kernel in a trace."""
    sequences, found = {}, []
    for packet in map(message, message(data).get(1, [])):
        found.append(sequences.setdefault(last(packet, 10), Sequence()).kernel(packet))
    return list(filter(None, found))
