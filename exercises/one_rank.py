"""Take torch.distributed's place in one rank: tell the referee of ranks.py of each call, and deliver its result.

Stricter than gloo and NCCL, which forgive these by chance: an asynchronous call's tensor holds NaN until wait()
returns, nobody may write to a tensor that is being sent, and every call must be waited for.
"""

import contextlib
import dataclasses
import functools
import math
import os
import pathlib
import resource
import signal
import sys
import traceback
from unittest import mock

import torch
import torch.distributed as dist
from torch.utils.flop_counter import flop_registry

from answers import REGION
from common.measuring.guarded_memory import SENTINEL, extent
from grading import load_module, reason_of
from graphs import DispatchMode
from judge import Wrong

CPU_SECONDS = 10  # that a rank may compute, whatever else runs on the machine; an answer needs less than one
MOST_CALLS = 200  # of one rank; an answer makes less than 100
# What a rank sends, as a multiple of the whole tensor's bytes, if N ranks form a ring.
SENT = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather_into_tensor": lambda n: (n - 1) / n,
    "reduce_scatter_tensor": lambda n: (n - 1) / n,
    "broadcast": lambda n: (n - 1) / n,  # the last rank of the chain passes nothing on: the mean
    "barrier": lambda n: 0,
}
# The names that PyTorch has for two of them from 2.13 on -> those before, which it still takes.
RENAMED = {"all_gather_single": "all_gather_into_tensor", "reduce_scatter_single": "reduce_scatter_tensor"}
EMPTY = tuple(f"aten::{name}" for name in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"))
MESSAGES = ("send", "recv", "isend", "irecv", "batch_isend_irecv")
ONLY = f"here torch.distributed has these functions only: {', '.join((*SENT, *MESSAGES))}"
REDUCTIONS = {
    "SUM": lambda stacked: stacked.sum(0, dtype=stacked.dtype),
    "AVG": lambda stacked: stacked.mean(0),
    "PRODUCT": lambda stacked: stacked.prod(0, dtype=stacked.dtype),
    "MIN": lambda stacked: stacked.amin(0),
    "MAX": lambda stacked: stacked.amax(0),
}


@dataclasses.dataclass
class Call:
    """One call of torch.distributed by one rank, as the referee sees it.

    shape: of the tensor that this rank hands over, or else receives into; whole: bytes of the whole of all parts.
    batch: calls of a rank with one number run together. op: of a reduction. peer: the other rank of a message, the root
    of a broadcast. meeting: number of the exchange in which it was carried out, equal for all partners.
    """

    name: str
    shape: tuple
    dtype: torch.dtype
    whole: int
    batch: int
    line: int | None
    op: str = ""
    peer: int | None = None
    tag: int = 0
    payload: bytes | None = None
    result: bytes | None = None
    meeting: int | None = None

    sends = property(lambda self: self.name in ("send", "isend"))
    receives = property(lambda self: self.name in ("recv", "irecv"))
    collective = property(lambda self: self.name in SENT)

    def __str__(self):
        words = self.name
        if self.peer is not None:
            words += f" {'to' if self.sends else 'from'} rank {self.peer}"
        if self.name != "barrier":
            words += f" of {list(self.shape)} {short(self.dtype)}"
        if self.op:
            words += f" ({self.op})"
        if self.tag:
            words += f" with tag {self.tag}"
        return words + (f", line {self.line}" if self.line else "")

    def alike(self, other):
        """Return True if two ranks' collectives can be each other's."""
        mine = self.name, self.shape, self.dtype, self.op, self.peer
        return mine == (other.name, other.shape, other.dtype, other.op, other.peer)

    def sent_bytes(self, size):
        if self.collective:
            return SENT[self.name](size) * self.whole
        return self.whole if self.sends else 0


def short(dtype):
    """Return "float32" for torch.float32."""
    return str(dtype).removeprefix("torch.")


def to_bytes(tensor):
    """Return a tensor's contents; a pipe would put the tensor itself into shared memory."""
    return tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def from_bytes(content, dtype, shape):
    if not content:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(content), dtype=dtype).reshape(shape)


def packed(name, value):
    """Return a tensor's contents, dtype and shape; a number or None stays what it is."""
    if isinstance(value, torch.Tensor):
        return to_bytes(value), value.dtype, tuple(value.shape)
    if not isinstance(value, int | float | None):  # the pipe may be unable to carry it
        raise Wrong("crash", name, f"{name} is of the type {type(value).__name__}: make it one tensor")
    return value


# ---------------------------------------------------------------- in a rank


def span(tensor):
    """Return the first byte of a tensor's elements in memory, and the one after the last."""
    first = tensor.data_ptr()
    return first, first + extent(tensor.shape, tensor.stride()) * tensor.element_size()


def overlap(a, b):
    (first_a, last_a), (first_b, last_b) = span(a), span(b)
    return first_a < last_b and first_b < last_a


def tensors_in(value):
    """Return the tensors of an operation's argument, which may be a list of them."""
    values = value if isinstance(value, list | tuple) else [value]
    return [one for one in values if isinstance(one, torch.Tensor)]


def written_by(function, args, kwargs):
    """Yield the tensors that an operation writes to, as its schema tells."""
    for i, argument in enumerate(function._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from tensors_in(args[i] if i < len(args) else kwargs.get(argument.name))


def read_by(function, args, kwargs):
    """Yield the tensors whose numbers an operation reads; a view's are read later, and empty_like reads a shape."""
    name = function._schema.name.rpartition("::")[2]
    if name.endswith("_like") or name.startswith("new_"):
        return
    for i, argument in enumerate(function._schema.arguments):
        if argument.alias_info is None:
            yield from tensors_in(args[i] if i < len(args) else kwargs.get(argument.name))


class Pending:
    """Stand for a call that a rank has made: wait() delivers its result, as the Work of torch.distributed does."""

    def __init__(self, rank, index, call, given, received):
        self.rank, self.index, self.call = rank, index, call
        self.given, self.received = given, received

    def wait(self, timeout=None):
        if self in self.rank.pending:
            self.rank.wait(self)
        return True

    def is_completed(self):
        return self not in self.rank.pending


@dataclasses.dataclass
class P2POp:
    """Name one message of a batch, as torch.distributed.P2POp does, which needs a process group."""

    op: object
    tensor: torch.Tensor
    peer: int | None = None
    group: object = None
    tag: int = 0
    group_peer: int | None = None


class Rank(DispatchMode):
    """Take torch.distributed's place in one rank, and note what it computes and writes."""

    def __init__(self, number, size, referee, path):
        super().__init__()
        self.number, self.size, self.referee, self.path = number, size, referee, str(path)
        self.inputs = {}  # of run()
        self.events = []
        self.pending = []  # in the order of the calls
        self.made = 0  # calls
        self.batches = 0
        self.early = None  # the first line that reads what has not arrived
        self.own = False  # True while the functions below compute, not the answer

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if self.own:
            return function(*args, **kwargs)
        for tensor in written_by(function, args, kwargs):
            self.check_free(tensor, f"line {self.line()} writes to", writes=True)
            self.check_input(tensor, f"line {self.line()} changes it")
        if self.pending and not self.early:
            self.note_early(read_by(function, args, kwargs))
        result = function(*args, **kwargs)
        if function._schema.name in EMPTY:
            self.fill(result)
        count = flop_registry.get(function._overloadpacket)
        if count:
            self.events.append(("compute", count(*args, **kwargs, out_val=result)))
        return result

    def line(self):
        """Return the line of the answer that is running, or None."""
        frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_stack(sys._getframe())]
        return line_to_name(self.path, frames)

    def note_early(self, tensors):
        """Note the line if it reads a tensor that has not arrived. It's wrong only if the results depend on it."""
        for tensor in tensors:
            if any(pending.received is not None and overlap(tensor, pending.received) for pending in self.pending):
                self.early = self.line()

    def fill(self, tensor):
        """Make a tensor that nothing was written to differ from all that it should hold."""
        self.own = True
        with torch.no_grad():
            tensor.fill_(math.nan if tensor.is_floating_point() else SENTINEL)
        self.own = False

    def contents(self, tensors):
        """Return the bytes of some tensors, read by the checker, not the answer."""
        self.own = True
        found = [to_bytes(tensor) for tensor in tensors]
        self.own = False
        return found

    def check_free(self, tensor, who, writes, batch=None):
        """Raise Wrong if `who` would read what has not arrived, or write to what is being sent. batch: of a call."""
        for pending in self.pending:
            state = None
            if writes and pending.given is not None and overlap(tensor, pending.given):
                state = "is being sent"
            if pending.received is not None and overlap(tensor, pending.received):
                state = "has not arrived yet"
            if state:
                remedy = f"first wait() for the {pending.call}"
                if batch == pending.call.batch:
                    remedy = f"the {pending.call} is in the same batch, so give them different memory"
                said = f"{who} a tensor on rank {self.number} that {state}: {remedy}"
                raise Wrong("race", None, said)

    def check_input(self, tensor, how):
        """Raise Wrong if a tensor that is written to is an input of run()."""
        for name, given in self.inputs.items():
            if overlap(tensor, given):
                raise Wrong("changed", name, f"{name}: {how} on rank {self.number}, but it's an input: work on a clone")

    def refuse(self, name, why):
        def refused(*args, **kwargs):
            raise self.wrong("bypass", name, why)

        return refused

    @contextlib.contextmanager
    def in_place_of_distributed(self):
        """Have torch.distributed's functions call this rank; the others find no process group, and say so."""
        stubs = {name: getattr(self, name) for name in (*SENT, *MESSAGES)}
        stubs |= {new: stubs[old] for new, old in RENAMED.items() if hasattr(dist, new)}
        stubs |= {"get_rank": lambda group=None: self.number, "get_world_size": lambda group=None: self.size}
        stubs |= {"is_initialized": lambda: True, "get_backend": lambda group=None: "gloo", "P2POp": self.name_message}
        for name in ("init_process_group", "destroy_process_group", "new_group", "init_device_mesh"):
            stubs[name] = self.refuse(name, "would make groups, but the checker has set the ranks up: leave it out")
        wrapper = torch.nn.parallel.DistributedDataParallel  # which would find out after importing the compiler
        refused = self.refuse(wrapper.__name__, f"is not to be used: {ONLY}")
        with mock.patch.multiple(dist, **stubs), mock.patch.object(wrapper, "__init__", refused):
            yield

    # ------------------------------------------------------------ making a call

    def wrong(self, kind, name, sentence):
        return Wrong(kind, None, f"line {self.line()}: {name} {sentence}")

    def check_tensors(self, name, group, *tensors):
        if group is not None:
            raise self.wrong("group", name, "has a group=, but there is one group, of all ranks: leave it out")
        for tensor in tensors:
            if not isinstance(tensor, torch.Tensor):
                raise self.wrong("tensor", name, f"got {tensor!r:.40} on rank {self.number}, and needs a tensor")
            if not tensor.is_contiguous():
                layout = f"one of {list(tensor.shape)} with strides {list(tensor.stride())}"
                raise self.wrong("tensor", name, f"needs a contiguous tensor, not {layout}: send its contiguous()")
        if len({tensor.dtype for tensor in tensors}) > 1:
            dtypes = " and ".join(short(tensor.dtype) for tensor in tensors)
            raise self.wrong("tensor", name, f"got tensors of {dtypes}: give both one dtype")

    def next_batch(self):
        self.batches += 1
        return self.batches

    def make(self, name, given, received, batch, whole=None, op="", peer=None, tag=0):
        """Tell the referee of a call that hands `given` over and writes to `received`; return its Pending."""
        of = received if given is None else given
        shape = () if of is None else tuple(of.shape)
        dtype = None if of is None else of.dtype
        if whole is None:
            whole = of.nbytes
        if self.made == MOST_CALLS:
            said = f"rank {self.number} has made {MOST_CALLS} calls, the last in line {self.line()}"
            raise Wrong("hang", None, f"{said}, and an answer needs less than 100")
        call = Call(name, shape, dtype, whole, batch, self.line(), op, peer, tag)
        if given is not None:
            self.check_free(given, f"line {call.line}: {name} sends", False, batch)
        if received is not None:
            self.check_free(received, f"line {call.line}: {name} writes to", True, batch)
            self.check_input(received, f"line {call.line} lets {name} write its result there")
        call.payload = None if given is None else self.contents([given])[0]
        if received is not None:
            self.fill(received)
        pending = Pending(self, self.made, call, given, received)
        self.made += 1
        self.events.append(("call", pending.index))
        self.referee.send(("call", call))
        self.pending.append(pending)
        return pending

    def wait(self, pending):
        self.events.append(("wait", pending.index))
        self.referee.send(("wait", pending.index))
        content = self.referee.recv()
        self.pending.remove(pending)
        if pending.received is not None:
            self.own = True
            with torch.no_grad():
                pending.received.copy_(from_bytes(content, pending.received.dtype, pending.received.shape))
            self.own = False

    def finish(self, pending, async_op):
        if async_op:
            return pending
        pending.wait()
        return None

    def check_finished(self):
        if self.pending:
            calls = ", ".join(f"its {pending.call}" for pending in self.pending[:2])
            raise Wrong(
                "unfinished", None, f"rank {self.number} never waits for {calls}: call wait() on what it returned"
            )

    # ------------------------------------------------------------ the functions of torch.distributed

    def all_reduce(self, tensor, op=dist.ReduceOp.SUM, group=None, async_op=False):
        self.check_tensors("all_reduce", group, tensor)
        op = self.reduction("all_reduce", op, tensor)
        return self.finish(self.make("all_reduce", tensor, tensor, self.next_batch(), op=op), async_op)

    def broadcast(self, tensor, src=None, group=None, async_op=False, group_src=None):
        self.check_tensors("broadcast", group, tensor)
        root = self.check_peer("broadcast", src, group_src)
        return self.finish(self.make("broadcast", tensor, tensor, self.next_batch(), peer=root), async_op)

    def all_gather_into_tensor(self, output_tensor, input_tensor, group=None, async_op=False):
        name = "all_gather_into_tensor"
        self.check_tensors(name, group, output_tensor, input_tensor)
        self.check_parts(name, output_tensor, input_tensor)
        pending = self.make(name, input_tensor, output_tensor, self.next_batch(), output_tensor.nbytes)
        return self.finish(pending, async_op)

    def reduce_scatter_tensor(self, output, input, op=dist.ReduceOp.SUM, group=None, async_op=False):
        name = "reduce_scatter_tensor"
        self.check_tensors(name, group, output, input)
        self.check_parts(name, input, output)
        op = self.reduction(name, op, input)
        return self.finish(self.make(name, input, output, self.next_batch(), op=op), async_op)

    def barrier(self, group=None, async_op=False, device_ids=None):
        self.check_tensors("barrier", group)
        return self.finish(self.make("barrier", None, None, self.next_batch(), 0), async_op)

    def send(self, tensor, dst=None, group=None, tag=0, group_dst=None):
        self.message("send", tensor, dst, group, tag, group_dst, self.next_batch()).wait()

    def recv(self, tensor, src=None, group=None, tag=0, group_src=None):
        pending = self.message("recv", tensor, src, group, tag, group_src, self.next_batch())
        pending.wait()
        return pending.call.peer

    def isend(self, tensor, dst=None, group=None, tag=0, group_dst=None):
        return self.message("isend", tensor, dst, group, tag, group_dst, self.next_batch())

    def irecv(self, tensor, src=None, group=None, tag=0, group_src=None):
        return self.message("irecv", tensor, src, group, tag, group_src, self.next_batch())

    def name_message(self, op, tensor, peer=None, group=None, tag=0, group_peer=None):
        if not isinstance(tensor, torch.Tensor):
            takes = "takes dist.isend or dist.irecv, a tensor and a rank, in this order"
            got = getattr(tensor, "__name__", repr(tensor))[:40]
            raise self.wrong("tensor", "P2POp", f"{takes}, and got {got} for the tensor")
        return P2POp(op, tensor, peer, group, tag, group_peer)

    def batch_isend_irecv(self, p2p_op_list):
        batch = self.next_batch()
        works = []
        for one in p2p_op_list:
            if one.op not in (self.isend, self.irecv):
                raise self.wrong("tensor", "batch_isend_irecv", "takes P2POps of dist.isend or dist.irecv only")
            name = "isend" if one.op == self.isend else "irecv"
            works.append(self.message(name, one.tensor, one.peer, one.group, one.tag, one.group_peer, batch))
        return works

    def message(self, name, tensor, peer, group, tag, group_peer, batch):
        self.check_tensors(name, group, tensor)
        peer = self.check_peer(name, peer, group_peer)
        if peer == self.number:
            raise self.wrong("peer", name, f"names rank {peer}, which is the one that calls it")
        sends = name in ("send", "isend")
        given, received = (tensor, None) if sends else (None, tensor)
        return self.make(name, given, received, batch, peer=peer, tag=tag)

    def check_peer(self, name, rank, group_rank):
        rank = group_rank if rank is None else rank
        if rank not in range(self.size):
            raise self.wrong("peer", name, f"names rank {rank}, but there are ranks 0 to {self.size - 1}")
        return rank

    def check_parts(self, name, whole, part):
        if not part.ndim or whole.shape != (self.size * len(part), *part.shape[1:]):
            shapes = f"a whole of {list(whole.shape)} and a part of {list(part.shape)}"
            raise self.wrong("tensor", name, f"got {shapes}: {self.size} parts one after another must make the whole")

    def reduction(self, name, op, tensor):
        """Return "SUM" for ReduceOp.SUM."""
        op = str(op).rpartition(".")[2]
        if op not in REDUCTIONS or op == "AVG" and not tensor.is_floating_point():
            raise self.wrong("tensor", name, f"can't use ReduceOp.{op} of {tensor.dtype}: use {', '.join(REDUCTIONS)}")
        return op


@functools.cache
def written_lines(path):
    """Return the numbers of the lines between the comments TODO and end of TODO."""
    text = pathlib.Path(path).read_text()
    spans = [(text.count("\n", 0, found.start()), text.count("\n", 0, found.end())) for found in REGION.finditer(text)]
    return {line + 1 for first, end in spans for line in range(first, end)}


def line_to_name(path, frames):
    """Return the line of the answer for a message, or None: the innermost that the reader wrote, or else the innermost.

    frames: (file, line), the innermost first.
    """
    lines = [line for name, line in frames if name == str(path)]
    written = written_lines(path) if lines else ()
    return next((line for line in lines if line in written), lines[0] if lines else None)


def describe_failure(rank, error, path):
    """Return (kind, tensor, sentence) of what ended a rank."""
    if isinstance(error, Wrong):
        return error.kind, error.tensor, str(error)
    frames = [(frame.filename, frame.lineno) for frame in reversed(traceback.extract_tb(error.__traceback__))]
    line = line_to_name(path, frames)
    where = f"line {line}" if line else "outside of your file"
    reason = reason_of(error)
    if "process group has not been initialized" in reason:  # what any other function of torch.distributed says
        return "bypass", None, f"{where}: {ONLY}"
    return "crash", None, f"rank {rank}, {where}: {reason}"


def guard_arguments(module, rank):
    """Raise Wrong where a method of the answer's autograd functions changes its argument, unless it says mark_dirty."""

    def guarded(owner, name, method):
        @functools.wraps(method)
        def call(ctx, *args):
            tensors = [one for one in args if isinstance(one, torch.Tensor)]
            before = rank.contents(tensors)
            result = method(ctx, *args)
            dirty = getattr(ctx, "dirty_tensors", None) or ()
            for tensor, old, new in zip(tensors, before, rank.contents(tensors), strict=True):
                if old != new and not any(tensor is one for one in dirty):
                    said = f"{owner}.{name} changes its argument on rank {rank.number}"
                    raise Wrong("changed", None, f"{said}, which other operations may need as it is: work on a clone")
            return result

        return staticmethod(call)

    for owner, value in list(vars(module).items()):
        if isinstance(value, type) and issubclass(value, torch.autograd.Function):
            # With setup_context, forward gets no ctx, and mark_dirty is called after it.
            methods = {"backward"} if "setup_context" in vars(value) else {"forward", "backward"}
            for name in methods & set(vars(value)):
                setattr(value, name, guarded(owner, name, getattr(value, name)))


def be_rank(number, pairs, path, arguments):
    """Run the answer as one rank, tell the referee how it ended, and end this process."""
    referee = pairs[number][1]
    for i, (referees_end, rank_end) in enumerate(pairs):
        referees_end.close()  # whose copies would keep a pipe open after the checker's death
        if i != number:
            rank_end.close()
    rank = Rank(number, len(pairs), referee, path)

    def tell_where(signal_number, frame):
        said = f"rank {number} has computed for {CPU_SECONDS} s, and is in line {rank.line()}"
        raise Wrong("hang", None, f"{said}: does every loop end?")

    signal.signal(signal.SIGXCPU, tell_where)
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 2))  # for answers that catch everything
    try:
        torch.set_num_threads(1)
        with rank.in_place_of_distributed():
            module = load_module(path, f"answer_of_rank_{number}")
            rank.inputs = arguments
            guard_arguments(module, rank)
            with rank:
                results = module.run(**arguments)
            rank.check_finished()
        last = "end", (rank.events, {name: packed(name, value) for name, value in results.items()}, rank.early)
    except BaseException as error:  # whatever a participant's code raises is a verdict on it
        last = "failed", describe_failure(number, error, path)
    sys.stdout.flush()
    with contextlib.suppress(OSError):  # the checker may have gone
        referee.send(last)
    os._exit(0)
