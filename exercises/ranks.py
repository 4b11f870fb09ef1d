"""Run an answer on several ranks on the CPU, and judge what they send: a process per rank, a referee in the middle.

    records = on_ranks(path, [{"x": x0}, {"x": x1}])     # [Record of rank 0, Record of rank 1]

Each rank is a fork of the checker, so it starts within milliseconds. In a rank, torch.distributed's functions hand
their tensors to the referee, a loop in the checker that takes the network's place (one_rank.py). It waits until every
rank waits or has ended, then carries out what has partners. What it sees depends on no clock: the same answer always
gets the same sentence, and if no rank can go on, it says which call waits for what.

It is as strict as NCCL, or stricter, also where gloo forgives: a rank's calls run in the order in which it made them,
messages too, and only a batch runs together; partners must agree about function, shape, dtype, operation and root.
"""

import dataclasses
import math
import multiprocessing
import signal
import types
from multiprocessing import connection

import torch

from judge import Wrong
from one_rank import REDUCTIONS, be_rank, from_bytes, short, to_bytes

LOOK_SECONDS = 0.5  # between two looks at silent ranks


@dataclasses.dataclass
class Record:
    """Hold what one rank did. events: ("compute", FLOP), ("call", index of it) and ("wait", index of the call).

    early: the first line that read what had not arrived, or None.
    """

    events: list
    calls: list
    results: dict
    early: int | None

    def sent_bytes(self, size):
        return sum(call.sent_bytes(size) for call in self.calls)


class Referee:
    """Follow the calls of all ranks, carry out what has partners, and say why no rank can go on."""

    def __init__(self, pipes, processes):
        self.pipes, self.processes, self.size = pipes, processes, len(pipes)
        self.calls = [[] for _ in pipes]
        self.waiting = {}  # rank -> index of the call that it waits for
        self.ended = {}  # rank -> (events, results, early)
        self.failures = {}
        self.meetings = 0

    def follow(self):
        """Return a Record of each rank; raise Wrong if one fails or none can go on."""
        while True:
            self.listen()
            if self.failures:  # of several, always the same one
                raise Wrong(*self.failures[min(self.failures)])
            if len(self.ended) == self.size:
                break
            while self.carry_out():
                pass
            free = [rank for rank, index in sorted(self.waiting.items()) if self.calls[rank][index].meeting is not None]
            if not free:
                raise Wrong("deadlock", None, self.describe_deadlock())
            for rank in free:
                self.pipes[rank].send(self.calls[rank][self.waiting.pop(rank)].result)
        records = []
        for rank in range(self.size):
            events, results, early = self.ended[rank]
            records.append(Record(events, self.calls[rank], results, early))
        return records

    def listen(self):
        """Hear the ranks until each of them waits or has ended."""
        while busy := set(range(self.size)) - set(self.waiting) - set(self.ended) - set(self.failures):
            ready = connection.wait([self.pipes[rank] for rank in busy], LOOK_SECONDS)
            for pipe in ready:
                self.hear(self.pipes.index(pipe))
            if not ready:
                self.find_dead(busy)

    def find_dead(self, ranks):
        """Note which ranks have ended without a word, while a fork of theirs keeps the pipe open."""
        for rank in ranks:
            if not self.processes[rank].is_alive() and not self.pipes[rank].poll():
                self.failures[rank] = self.describe_death(rank)

    def hear(self, rank):
        try:
            what, content = self.pipes[rank].recv()
        except EOFError:
            what, content = "failed", self.describe_death(rank)
        if what == "call":
            self.calls[rank].append(content)
        if what == "wait":
            self.waiting[rank] = content
        if what == "end":
            self.ended[rank] = content
        if what == "failed":
            self.failures[rank] = content

    def describe_death(self, rank):
        self.processes[rank].join()
        status = self.processes[rank].exitcode
        how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended Python with status {status}"
        return "crash", None, f"the process of rank {rank} {how}"

    def head(self, rank):
        """Return the calls of a rank's first batch that is not carried out; the later ones wait for it."""
        left = [call for call in self.calls[rank] if call.meeting is None]
        return [call for call in left if call.batch == left[0].batch]

    def carry_out(self):
        """Carry out one collective, or one message, that has all its partners; return False if there is none."""
        heads = [self.head(rank) for rank in range(self.size)]
        collectives = {rank: head[0] for rank, head in enumerate(heads) if head and head[0].collective}
        self.check_alike(collectives)
        if len(collectives) == self.size:
            calls = list(collectives.values())
            for call, result in zip(calls, self.results_of(calls), strict=True):
                call.result = None if result is None else to_bytes(result)
            self.close(*calls)
            return True
        for rank, head in enumerate(heads):
            for sent in head:
                partners = heads[sent.peer] if sent.sends else []
                received = next((call for call in partners if call.receives and call.peer == rank), None)
                if received:
                    self.check_message(rank, sent, received)
                    received.result = sent.payload
                    self.close(sent, received)
                    return True
        return False

    def close(self, *calls):
        for call in calls:
            call.payload = None
            call.meeting = self.meetings
        self.meetings += 1

    def results_of(self, calls):
        """Return what a collective gives each rank."""
        first = calls[0]
        if first.name == "barrier":
            return [None] * self.size
        stacked = torch.stack([from_bytes(call.payload, call.dtype, call.shape) for call in calls])
        if first.name == "broadcast":
            return [stacked[first.peer]] * self.size
        if first.name == "all_gather_into_tensor":
            return [stacked] * self.size
        reduced = REDUCTIONS[first.op](stacked)
        if first.name == "reduce_scatter_tensor":
            return list(reduced.flatten().chunk(self.size))
        return [reduced] * self.size

    def check_alike(self, calls):
        """Raise Wrong unless the collectives {rank: call} that wait for partners can be each other's."""
        ranks = sorted(calls)
        for rank in ranks[1:]:
            first = calls[ranks[0]]
            if not calls[rank].alike(first):
                number = 1 + sum(call.collective and call.meeting is not None for call in self.calls[rank])
                said = f"collective {number} is {first} on rank {ranks[0]}, but {calls[rank]} on rank {rank}"
                raise Wrong("mismatch", None, f"{said}: all ranks must make the same calls in the same order")

    def check_message(self, rank, sent, received):
        same_size = math.prod(sent.shape) == math.prod(received.shape)
        if not same_size or (sent.dtype, sent.tag) != (received.dtype, received.tag):
            said = f"rank {rank} calls {sent}, but rank {sent.peer} calls {received}"
            raise Wrong("mismatch", None, f"{said}: both ends must name the same size, dtype and tag")

    def describe_deadlock(self):
        heads = [self.head(rank) for rank in range(self.size)]
        batched = "a rank's calls run in order, so start isend and irecv together, in one batch_isend_irecv"
        if all(head and all(call.sends for call in head) for head in heads):
            return f"every rank first sends, and none receives: {batched}"
        if all(head and all(call.receives for call in head) for head in heads):
            return f"every rank first receives, and none sends: {batched}"
        words = []
        for rank, head in enumerate(heads):
            if rank in self.waiting:
                words.append(f"rank {rank} waits in {' and '.join(map(str, head))}")
            else:
                count = len(self.calls[rank])
                words.append(f"rank {rank} has ended after {count} call{'' if count == 1 else 's'}")
        return f"no rank can go on: {'; '.join(words)}{self.first_difference()}"

    def first_difference(self):
        """Return words on the first collective that the ranks make in different lines; messages may differ."""
        if not all(call.collective for calls in self.calls for call in calls):
            return ""
        for number in range(max(map(len, self.calls))):
            lines = [calls[number].line if number < len(calls) else None for calls in self.calls]
            if len(set(lines)) > 1:
                words = [f"in line {line}" if line else "missing" for line in lines]
                places = [f"{word} on rank {rank}" for rank, word in enumerate(words)]
                return f". Call {number + 1} is {', '.join(places)}"
        return ""


def on_ranks(path, arguments):
    """Run the answer in a fork per rank with these arguments of run(), one dictionary per rank; return the Records."""
    if torch.cuda.is_available():
        raise RuntimeError("ranks are forked, so no GPU may be visible here: grade through answers.grade")
    context = multiprocessing.get_context("fork")
    pairs = [context.Pipe() for _ in arguments]
    processes = []
    try:
        for number, own in enumerate(arguments):
            processes.append(context.Process(target=be_rank, args=(number, pairs, path, own), daemon=True))
            processes[-1].start()
        for _, rank_end in pairs:
            rank_end.close()
        return Referee([referees_end for referees_end, _ in pairs], processes).follow()
    finally:
        for process in processes:
            process.kill()
            process.join()
        for referees_end, _ in pairs:
            referees_end.close()


recorded = []  # the Records of every run, for a task's then(), which asks for the last ones


def on_each_rank(*split, meanings=types.MappingProxyType({})):
    """Return a Task's launch: run() on as many ranks as the inputs named in split have parts, a part for each.

    meanings: part of a sentence of the referee -> what it means in this exercise.
    """

    def run_and_copy(module, inputs, outputs):
        arguments = [
            {name: value[rank] if name in split else value for name, value in inputs.items()}
            for rank in range(len(inputs[split[0]]))
        ]
        recorded.append(on_ranks(module.__file__, arguments))
        for rank, record in enumerate(recorded[-1]):
            for name, output in outputs.items():
                if record.results[name] is None:
                    raise Wrong("crash", name, f"{name} is None on rank {rank}")
                content, dtype, shape = record.results[name]
                if shape != tuple(output[rank].shape):
                    said = f"it has the shape {list(shape)} on rank {rank}, and must have {list(output[rank].shape)}"
                    raise Wrong("shape", name, f"{name}: {said}")
                if dtype != output.dtype:
                    said = f"it has the dtype {short(dtype)} on rank {rank}, and must have {short(output.dtype)}"
                    raise Wrong("dtype", name, f"{name}: {said}")
                output[rank].copy_(from_bytes(content, dtype, shape))
                if record.early and output[rank].isnan().any():
                    said = f"line {record.early} reads a tensor before its wait(), and until then the checker fills it"
                    raise Wrong("race", name, f"{name}: NaN on rank {rank}: {said} with NaN: wait first")

    def launch(module, inputs, outputs):
        try:
            run_and_copy(module, inputs, outputs)
        except Wrong as wrong:
            for part, meaning in meanings.items():
                if part in str(wrong):
                    raise Wrong(wrong.kind, wrong.tensor, f"{wrong}: {meaning}") from None
            raise

    launch.split = split
    return launch


def describe_calls():
    """Return words on the last run's calls, which may be why a sum or mean over the ranks is wrong, or None."""
    records = recorded[-1]
    for call in records[0].calls:
        if call.op not in ("", "SUM", "AVG"):
            return f"line {call.line}: {call.name} takes the {call.op} over the ranks: leave op= out, and it's the sum"
        if call.dtype in (torch.float16, torch.bfloat16):
            return f"line {call.line}: {call.name} gets {short(call.dtype)}, which has about 3 digits: send float32"
    for number, calls in enumerate(zip(*(record.calls for record in records), strict=False), 1):
        lines = [call.line for call in calls]
        if all(call.collective for call in calls) and len(set(lines)) > 1:
            places = ", ".join(f"in line {line} on rank {rank}" for rank, line in enumerate(lines))
            return f"call {number} is {places}: different calls of the ranks met, and their tensors were added"
    for call in records[0].calls:
        if call.name == "broadcast":
            return f"line {call.line}: broadcast gives every rank what rank {call.peer} has, and nothing of the others"
    return None
