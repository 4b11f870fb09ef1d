"""The forward of flash attention compiled with other tiles, for a GPU that need not be here."""

import atexit
import functools
import os
from unittest import mock

import inspect_kernels

TARGET = "gfx942"
HEADS_OF_128 = "--hidden-dim 256 --num-heads 2 --num-kv-heads 1"
SMALL = "--num-layers 1 --batch-size 1 --seq-len 128 --vocab-size 64"


@functools.cache
def compiler():
    """A process that compiles, and the launch in float32 with heads of 128 whose tile is then changed."""
    workers = inspect_kernels.Workers(1)
    atexit.register(workers.pool.shutdown)
    case = inspect_kernels.Case("v3", "fp32", tuple(f"{HEADS_OF_128} {SMALL}".split()))
    with mock.patch.dict(os.environ, TRITON_INTERPRET="0"):  # read by the process when it starts, at the first task
        launches = inspect_kernels.wanted_launches(workers, [case], [TARGET], "attention_forward")
    return workers, launches[0][0]


@functools.cache
def compiled(queries, keys, warps, stages):
    """What inspect_kernels.py says of that tile: registers, spills, shared bytes, waves."""
    workers, launch = compiler()
    return workers.all(inspect_kernels.inspect_launch, [(launch.with_tile((queries, keys), warps, stages), None)])[0]
