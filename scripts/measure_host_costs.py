#!/usr/bin/env python3
"""Measure how long the CPU needs to launch a kernel, call an operator, record an autograd node and annotate a region.

example: python measure_host_costs.py --repeats 30

Each call is repeated without waiting for the GPU, on tensors so small that the GPU never falls behind. A launch-bound
step takes about as long as all its calls together. version3_triton/HOST_COSTS.md predicts
such a step. Without a GPU an operator's time includes its work, and Triton's interpreter launches nothing.
"""

import functools
import itertools
import os
import sys
import time

import torch

from common.command_line import Failure, Parser, positive
from common.tables import emit, text_table
from common.versions import load_version

CALLS = 100  # a GPU's queue holds more launches, so the host never waits for a place in it
WIDTH = 64
LAUNCH = "launch of a Triton kernel"


class Node(torch.autograd.Function):
    """Return x: the smallest node that Python can add to autograd's graph."""

    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, dy):
        return dy


def repeated(function, *arguments):
    """Return a function that calls this one CALLS times."""

    def call():
        for _ in range(CALLS):
            function(*arguments)

    return call


def chained(function, leaf, *others):
    """Return a function that applies this one to a leaf, then to its result and so on, and computes all gradients."""

    def call():
        x = leaf
        for other in others:
            x = function(x, *other)
        leaves = [leaf, *(tensor for other in others for tensor in other)]
        torch.autograd.grad(x, leaves, torch.ones_like(x))

    return call


def calls_to_time(script, device):
    """Return {name: function that makes CALLS calls}."""
    x = torch.eye(WIDTH, device=device)  # the product of any number of them is finite
    y = torch.empty_like(x)
    rstd = torch.empty(WIDTH, device=device)
    leaf = x.clone().requires_grad_()
    weights = [(x.clone().requires_grad_(),) for _ in range(CALLS)]
    node = script.guarded(twice_differentiable=False)(Node)  # with the checks that every kernel of version 3 has
    norm = script.rmsnorm_forward_kernel, WIDTH, WIDTH, x, None, x[0], x, y, rstd, 1e-6

    def region():
        with script.annotate("region"):
            pass

    return {
        LAUNCH: repeated(functools.partial(script.launch_tiles, *norm, whole_row=True)),
        "operator: add": repeated(torch.add, x, x),
        "operator: mm": repeated(torch.mm, x, x),
        "view: t": repeated(torch.t, x),
        "allocation: empty_like": repeated(torch.empty_like, x),
        "Function of version 3, forward and backward": chained(node.apply, leaf, *itertools.repeat((), CALLS)),
        "linear layer, forward and backward": chained(torch.nn.functional.linear, leaf, *weights),
        "region, nobody records": repeated(region),
        "region, PyTorch's profiler records": repeated(region),
    }


def microseconds(call, synchronize, repeats):
    """Return the quartiles of the host's time per call; the GPU is waited for between repeats, outside the clock."""
    call()  # compiles, and allocates what is then used again
    times = []
    for _ in range(repeats):
        synchronize()
        start = time.perf_counter()
        call()
        times.append(1e6 * (time.perf_counter() - start) / CALLS)
    synchronize()
    return load_version(3).quartiles(times)


def measure(options):
    has_gpu = torch.cuda.is_available()
    if options.device == "cuda" and not has_gpu:
        raise Failure(2, "--device cuda needs a GPU, and PyTorch sees none: leave it out")
    device = options.device or ("cuda" if has_gpu else "cpu")
    synchronize = torch.cuda.synchronize
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    remark = ""
    calls = calls_to_time(load_version(3), device)
    if device == "cpu":
        torch.set_num_threads(1)  # else it waits for other threads
        synchronize = int  # does nothing
        del calls[LAUNCH]
        remark = f"\n{LAUNCH}: not measured, because Triton's interpreter launches nothing"
    *most, last = calls
    us = {each: microseconds(calls[each], synchronize, options.repeats) for each in most}
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else PyTorch prints what looks like an error
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        us[last] = microseconds(calls[last], synchronize, options.repeats)
    rows = [[each, *(f"{found[part]:.2f}" for part in ("median", "p25", "p75"))] for each, found in us.items()]
    table = text_table(["host's time per call, us", "median", "25 %", "75 %"], rows)
    title = f"{name}, torch {torch.__version__}, {options.repeats} repeats of {CALLS} calls"
    emit({"device": name, "torch": torch.__version__, "us": us}, f"{title}\n{table}{remark}", options.json)


def main(argv=None):
    parser = Parser("measure_host_costs.py", __doc__)
    parser.add_argument("--device", choices=["cuda", "cpu"], help="(cuda where PyTorch sees a GPU, else cpu)")
    parser.add_argument("--repeats", type=positive, default=20, metavar="N", help="of each measurement (%(default)s)")
    return parser.run(measure, argv)


if __name__ == "__main__":
    sys.exit(main())
