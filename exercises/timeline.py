"""Show when the ranks of a Record would compute and send on a made-up machine, the same on every laptop."""

import dataclasses

# Times are in microseconds. The machine is slow, so the small tensors of an exercise take a visible time.
FLOP_PER_US = 20_000.0
BYTES_PER_US = 100.0
LATENCY_US = 5.0
WIDTH = 64  # columns of a picture


@dataclasses.dataclass
class Timeline:
    """Hold when each rank computes and waits, and when something is sent, as (begin, end) in order.

    exposed: how long the rank waits that waits longest, and computes nothing.
    """

    compute: list
    waits: list
    network: list
    total: float

    communication = property(lambda self: sum(end - begin for begin, end in self.network))
    exposed = property(lambda self: max(sum(end - begin for begin, end in waits) for waits in self.waits))

    def picture(self):
        """Draw who is busy when. Each exchange has a letter."""
        scale = WIDTH / self.total

        def row(spans):
            cells = [" "] * WIDTH
            for begin, end, mark in spans:
                first = min(int(begin * scale), WIDTH - 1)
                for i in range(first, max(first + 1, round(end * scale))):
                    cells[i] = mark
            return f"|{''.join(cells)}|"

        lines = [f"rank {rank}   {row([(*one, '#') for one in spans])}" for rank, spans in enumerate(self.compute)]
        letters = [(*one, chr(ord("a") + i % 26)) for i, one in enumerate(self.network)]
        lines.append(f"network  {row(letters)}")
        lines.append(f"# computes, each letter is an exchange: {self.total:.0f} us, exposed {self.exposed:.0f} us")
        return "\n".join(f"   {line}" for line in lines)


class Simulation:
    """Replay the events of all ranks: a rank's exchanges run one batch after another, once all partners have called."""

    def __init__(self, records):
        self.records, self.size = records, len(records)
        self.clocks = [0.0] * self.size
        self.places = [0] * self.size
        self.called = {}  # (rank, index of the call) -> time
        self.done = {}  # meeting -> time
        self.partners = {}  # meeting -> [(rank, index of the call), ...], in the order in which meetings were held
        for rank, record in enumerate(records):
            for index, call in enumerate(record.calls):
                self.partners.setdefault(call.meeting, []).append((rank, index))
        self.compute = [[] for _ in records]
        self.waits = [[] for _ in records]
        self.network = []

    def run(self):
        while any(place < len(record.events) for place, record in zip(self.places, self.records, strict=True)):
            for rank in range(self.size):
                self.advance(rank)
            for meeting in sorted(self.partners):
                if meeting not in self.done:
                    self.hold(meeting)
        return Timeline(self.compute, self.waits, sorted(self.network), max(self.clocks))

    def advance(self, rank):
        """Replay a rank's events up to a wait for something that is not done."""
        events = self.records[rank].events
        while self.places[rank] < len(events):
            what, content = events[self.places[rank]]
            now = self.clocks[rank]
            if what == "compute":
                self.clocks[rank] = now + content / FLOP_PER_US
                self.compute[rank].append((now, self.clocks[rank]))
            elif what == "call":
                self.called[rank, content] = now
            else:
                meeting = self.records[rank].calls[content].meeting
                if meeting not in self.done:
                    return
                if self.done[meeting] > now:
                    self.waits[rank].append((now, self.done[meeting]))
                    self.clocks[rank] = self.done[meeting]
            self.places[rank] += 1

    def hold(self, meeting):
        """Find the time of an exchange, unless a partner has not called, or is still busy with an earlier batch."""
        begin = 0.0
        sent = 0
        for rank, index in self.partners[meeting]:
            calls = self.records[rank].calls
            earlier = [call.meeting for call in calls[:index] if call.batch < calls[index].batch]
            if (rank, index) not in self.called or any(one not in self.done for one in earlier):
                return
            begin = max(begin, self.called[rank, index], *(self.done[one] for one in earlier))
            sent = max(sent, calls[index].sent_bytes(self.size))
        self.done[meeting] = begin + LATENCY_US + sent / BYTES_PER_US
        self.network.append((begin, self.done[meeting]))


def simulate(records):
    return Simulation(records).run()
