"""A graph of operations for exercise 15: the GPU's own, or a tape that behaves like one on a CPU.

A graph is captured once and then replays the same operations on the same addresses. Like a GPU's, the tape computes
nothing while it captures, refuses to hand a value to the host then, and wants every operation to have run before.
It refuses to replay when a tensor has moved: a GPU would read and write the old address.
"""

import contextlib

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only


def tensors(values):
    return [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]


def address(tensor):
    return tensor.untyped_storage().data_ptr()


def places(values):
    """Return where the elements of each tensor begin."""
    return [tensor.data_ptr() for tensor in tensors(values)]


class DispatchMode(TorchDispatchMode):
    """Leave torch.compile alone. Else the first mode of a process imports torch._dynamo, which takes seconds."""

    @classmethod
    def _should_skip_dynamo(cls):
        return False


class Watching(DispatchMode):
    """Note every operation; while capturing, refuse what a capture cannot hold.

    A GPU's libraries forgive a missing warm-up once others have used them; this does not.
    """

    def __init__(self, known, capturing=False):
        super().__init__()
        self.known, self.capturing = known, capturing

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if not self.capturing:
            self.known.add(function)
        elif function is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("operation not permitted when stream is capturing: the host asks for a value")
        elif function not in self.known:
            raise RuntimeError(f"{function} has not run before the capture, so its library isn't ready: warm up first")
        return self.run(function, args, kwargs or {})

    def run(self, function, args, kwargs):
        return function(*args, **kwargs)


class Recording(Watching):
    """Run and keep every operation, and how the tensors from outside looked before."""

    def __init__(self, known):
        super().__init__(known, capturing=True)
        self.calls, self.before, self.own = [], {}, set()

    def run(self, function, args, kwargs):
        for tensor in tensors((args, kwargs)):
            if address(tensor) not in self.own | self.before.keys():
                self.before[address(tensor)] = tensor.untyped_storage(), tensor.untyped_storage().clone()
        where = places((args, kwargs))
        out = function(*args, **kwargs)
        self.own |= {address(tensor) for tensor in tensors(out)} - self.before.keys()
        # An alias: autograd copies a gradient that somebody else holds instead of taking it as w.grad.
        alias = tree_map_only(torch.Tensor, torch.Tensor.detach, out)
        self.calls.append((function, args, kwargs, alias, where))
        return out


class Tape:
    """Stand in for a graph on a CPU."""

    def __init__(self):
        self.known, self.calls, self.replays = set(), [], 0

    def warm_up(self):
        """Return a context for the runs before the capture."""
        return Watching(self.known)

    @contextlib.contextmanager
    def capture(self):
        """Record the context's operations; what they changed is as before when it ends."""
        with Recording(self.known) as recording:
            yield
        for storage, contents in recording.before.values():
            storage.copy_(contents)
        self.calls = recording.calls

    @torch.no_grad()
    def replay(self):
        self.replays += 1
        for function, args, kwargs, out, where in self.calls:
            if places((args, kwargs)) != where:
                raise RuntimeError(
                    "a tensor of the graph has moved since the capture (by .data = or set_), and a GPU would use its "
                    "old address: keep the tensor, and change its contents with copy_"
                )
            given = {address(tensor) for tensor in tensors((args, kwargs))}
            for old, new in zip(tensors(out), tensors(function(*args, **kwargs)), strict=True):
                if address(old) not in given:
                    old.copy_(new)


class DeviceGraph:
    """A CUDA or HIP graph; warm-up and capture share a stream, so that what is made for it exists."""

    def __init__(self):
        self.graph, self.stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        self.known, self.replays = set(), 0

    @contextlib.contextmanager
    def warm_up(self):
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream), Watching(self.known):
            yield
        torch.cuda.current_stream().wait_stream(self.stream)

    @contextlib.contextmanager
    def capture(self):
        with torch.cuda.graph(self.graph, stream=self.stream), Watching(self.known, capturing=True):
            yield

    def replay(self):
        self.replays += 1
        self.graph.replay()


made = []  # every graph, for the checker, which asks the last one how often it was replayed


def new_graph(device):
    made.append(DeviceGraph() if device.type == "cuda" else Tape())
    return made[-1]
