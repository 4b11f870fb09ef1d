"""Let a script's "cuda" mean the CPU, while torch.cuda and Triton answer for a GPU that is not here.

Only what scripts commonly ask is answered. Tensors live on the CPU and PyTorch's own operations run there.
"""

import contextlib
import functools
import sys
import time
from types import SimpleNamespace
from unittest import mock

import torch
import triton.testing
from torch.overrides import TorchFunctionMode

from common.command_line import progress
from common.formulas.occupancy import TARGETS

GPU_NAMES = ("cuda", "hip")


def is_index(value):
    """Tell whether a device is given as the number of a GPU."""
    return isinstance(value, int) and not isinstance(value, bool)


def on_cpu(value):
    """Return "cpu" for a device that is a GPU; anything else as it is."""
    if is_index(value):
        return "cpu"
    if isinstance(value, torch.device):
        name = value.type
    elif isinstance(value, str):
        name = value.split(":")[0]
    else:
        return value
    return "cpu" if name in GPU_NAMES else value


class GpuIsCpu(TorchFunctionMode):
    """Replace a GPU by the CPU in calls of PyTorch's functions."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = {name: on_cpu(value) if name == "device" else value for name, value in (kwargs or {}).items()}
        name = getattr(function, "__name__", "")
        if function in (torch.Tensor.cuda, torch.Tensor.pin_memory):
            return args[0]
        if function is torch.Tensor.record_stream:
            return None
        if function is torch.Tensor.get_device:
            return 0
        if function is torch.Tensor.to:
            args = (args[0], *map(on_cpu, args[1:]))
        if function is torch._C._nn._parse_to:  # what Module.to was given
            args = tuple(map(on_cpu, args))
        if function is torch.device and len(args) == 1 and is_index(args[0]):
            args = ("cuda", *args)
        if name == "__get__" and getattr(function, "__self__", None) is torch.Tensor.is_cuda:
            return True
        return function(*args, **kwargs)


class Stream:
    """Stand for a stream: everything has happened when a call returns."""

    cuda_stream = 0
    device_index = 0

    def __init__(self, *_, **__):
        pass

    def nothing(self, *_, **__):
        pass

    synchronize = wait_event = wait_stream = nothing
    __enter__ = __exit__ = nothing

    def query(self):
        return True

    def is_capturing(self):
        return False

    def record_event(self, event=None):
        event = event or Event()
        event.record()
        return event


class Device:
    """Stand for torch.cuda.device and device_of, which are classes: PyTorch asks isinstance of them."""

    def __init__(self, *_, **__):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


class CUDAGraph:
    """Stand for torch.cuda.CUDAGraph: what runs on the CPU cannot be captured."""

    def __init__(self, *_, **__):
        raise RuntimeError("execute_on_amd.py captures no graph, because there is no GPU: run without CUDA graphs")


class Event:
    """Stand for an event, which knows when it was recorded."""

    def __init__(self, *_, **__):
        self.time = 0.0

    def record(self, *_):
        self.time = time.perf_counter()

    def elapsed_time(self, other):
        return 1e3 * (other.time - self.time)

    def synchronize(self):
        pass

    def wait(self, stream=None):
        pass

    def query(self):
        return True


def capability(target):
    """Return the numbers that PyTorch reports for a target: (9, 4) of gfx942, (11, 0) of gfx1100."""
    return int(target[3:-2]), int(target[-2], 16)


def cuda_answers(target):
    """Return {name: what torch.cuda.name becomes}."""
    limits = TARGETS[target]
    properties = SimpleNamespace(
        name=target,
        gcnArchName=target,
        major=capability(target)[0],
        minor=capability(target)[1],
        total_memory=64 << 30,
        multi_processor_count=limits.units,
        warp_size=limits.warp_size,
        shared_memory_per_block=limits.shared,
        shared_memory_per_block_optin=limits.shared,
        shared_memory_per_multiprocessor=limits.unit_shared,
        regs_per_multiprocessor=limits.registers * limits.warp_size * 4,
        max_threads_per_multi_processor=limits.most_waves * limits.warp_size * 4,
        L2_cache_size=4 << 20,
        is_integrated=0,
    )
    answers = {
        "is_available": True, "is_initialized": True, "device_count": 1, "current_device": 0, "synchronize": None,
        "set_device": None, "set_stream": None, "init": None, "empty_cache": None, "get_device_name": target,
        "get_device_capability": capability(target), "get_device_properties": properties, "is_bf16_supported": True,
        "is_current_stream_capturing": False, "current_stream": Stream(), "default_stream": Stream(),
        "max_memory_allocated": 0, "max_memory_reserved": 0, "memory_allocated": 0, "memory_reserved": 0,
        "reset_peak_memory_stats": None, "reset_max_memory_allocated": None, "mem_get_info": (64 << 30, 64 << 30),
        "manual_seed": None, "manual_seed_all": None, "memory_stats": {}, "memory_summary": "",
    }  # fmt: skip
    functions = {name: functools.partial(lambda value, *_, **__: value, value) for name, value in answers.items()}
    nothing = lambda *_, **__: contextlib.nullcontext()  # noqa: E731
    return functions | {
        "device": Device,
        "device_of": Device,
        "stream": nothing,
        "Event": Event,
        "Stream": Stream,
        "CUDAGraph": CUDAGraph,
        "get_rng_state": lambda *_: torch.get_rng_state(),
        "set_rng_state": lambda state, *_: torch.set_rng_state(state),
        "get_rng_state_all": lambda: [torch.get_rng_state()],
        "set_rng_state_all": lambda states: torch.set_rng_state(states[0]),
    }


def mapped(function):
    """Return a function whose first argument, or argument device_type, may be a GPU: it becomes the CPU."""

    @functools.wraps(function)
    def call(*args, **kwargs):
        kwargs = {name: on_cpu(value) if name == "device_type" else value for name, value in kwargs.items()}
        return function(*map(on_cpu, args), **kwargs)

    return call


def load_on_cpu(load):
    """Return torch.load, which puts on the CPU what belongs on a GPU."""

    @functools.wraps(load)
    def call(file, map_location=None, *args, **kwargs):
        if isinstance(map_location, dict):
            map_location = {saved: on_cpu(wanted) for saved, wanted in map_location.items()}
        return load(file, on_cpu(map_location or "cpu"), *args, **kwargs)

    return call


def custom_op(define):
    """Return torch.library.custom_op, whose operations for GPUs are for the CPU, too."""

    @functools.wraps(define)
    def call(*args, device_types=None, **kwargs):
        asked = device_types or ()
        kinds = [asked] if isinstance(asked, str) else asked
        return define(*args, device_types=None if "cuda" in kinds else device_types, **kwargs)

    return call


def capturable_on_cpu(stack):
    """Let PyTorch's optimizers compute on the CPU as they do on a GPU if they are capturable."""
    name = "_get_capturable_supported_devices"
    for path, module in sys.modules.copy().items():
        if path.startswith("torch.optim.") and hasattr(module, name):
            devices = getattr(module, name)
            also_cpu = functools.partial(lambda devices, *given, **named: [*devices(*given, **named), "cpu"], devices)
            stack.enter_context(mock.patch.object(module, name, also_cpu))


class Generator(torch.Generator):
    """A generator of random numbers on the CPU, whatever device is asked for."""

    def __new__(cls, device="cpu"):
        return super().__new__(cls, on_cpu(device))


@functools.cache
def say_that_times_mean_nothing():
    progress("execute_on_amd: do_bench runs its function once and returns 1 ms: there is no GPU, so times mean nothing")


def run_once(function, *_, quantiles=None, return_mode="mean", **__):
    """Stand for do_bench: call the function once, and return 1 ms as often as a time is asked for."""
    say_that_times_mean_nothing()
    function()
    if quantiles is not None:
        return [1.0 for _ in quantiles] if len(quantiles) > 1 else 1.0
    return [1.0] if return_mode == "all" else 1.0


def skip_benchmark(mark, *_, **__):
    """Stand for the run of a perf_report, which would measure many sizes."""
    progress(f"execute_on_amd: the benchmark {mark.fn.__name__} is left out: there is no GPU, so times mean nothing")


@contextlib.contextmanager
def cuda_on_cpu(target):
    """Let "cuda" mean the CPU, and torch.cuda answer for that target."""
    accelerator = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_accelerator": lambda check_available=False: torch.device("cuda"),
        "current_device_index": lambda: 0,
        "current_stream": lambda *_: Stream(),
        "set_stream": lambda *_: None,
        "synchronize": lambda *_: None,
    }
    testing = {"do_bench": run_once, "do_bench_cudagraph": run_once}
    with (
        contextlib.ExitStack() as stack,
        mock.patch.multiple(torch.cuda, create=True, **cuda_answers(target)),
        mock.patch.multiple(torch.accelerator, create=True, **accelerator),
        mock.patch.object(torch.version, "hip", "6.4"),
        mock.patch.object(torch, "Generator", Generator),
        mock.patch.object(torch, "set_default_device", mapped(torch.set_default_device)),
        mock.patch.object(torch, "is_autocast_enabled", mapped(torch.is_autocast_enabled)),
        mock.patch.object(torch, "get_autocast_dtype", mapped(torch.get_autocast_dtype)),
        mock.patch.object(torch.autocast, "__init__", mapped(torch.autocast.__init__)),
        mock.patch.object(torch, "load", load_on_cpu(torch.load)),
        mock.patch.object(torch.library, "custom_op", custom_op(torch.library.custom_op)),
        mock.patch.multiple(triton.testing, **testing),
        mock.patch.object(triton.testing.Mark, "run", skip_benchmark),
        GpuIsCpu(),
    ):
        capturable_on_cpu(stack)
        yield
