#!/usr/bin/env python3
"""Measure how fast the processes of a job sum tensors: the all-reduce that DDP does with every bucket of gradients.

    torchrun --nproc-per-node 8 scripts/measure_allreduce.py --json links.json

Prints and writes, for tensors of 64 KiB to 512 MiB, the median time of one all-reduce on the slowest rank, and two
rates: bytes / time, and the bus rate 2 (n - 1) / n x bytes / time. The bus rate is what each link carries in a ring of
n processes, so compare it with the link's data sheet. scripts/estimate_scaling.py reads the file.

Exit status: 0, 2 for a bad option or if torchrun did not start it.
"""

import os
import statistics
import sys
import time

import torch
import torch.distributed as dist

from common.command_line import Failure, Parser, positive, run_tool
from common.tables import emit, text_table
from common.versions import load_version

KIB, MIB = 2**10, 2**20


def time_of_one(tensor, repeats, synchronize):
    """Return the median seconds of one all-reduce; each repeat starts together and is timed alone."""
    times = []
    for _ in range(repeats + 3):  # the first ones set up the connections
        dist.barrier()
        synchronize()
        start = time.perf_counter()
        dist.all_reduce(tensor)
        synchronize()
        times.append(time.perf_counter() - start)
        tensor.zero_()  # sums of sums would soon overflow
    return statistics.median(times[3:])


def measure(config, largest, repeats, gather):
    """Return a row for each size in bytes, from 64 KiB on: microseconds, GB/s, GB/s on the bus."""
    rows, size, ring = [], 64 * KIB, 2 * (config.world_size - 1) / config.world_size
    dtype = torch.bfloat16 if config.on_gpu else torch.float32
    synchronize = torch.cuda.synchronize if config.on_gpu else lambda: None
    while size <= largest:
        tensor = torch.zeros(size // dtype.itemsize, dtype=dtype, device=config.device)
        seconds = gather([time_of_one(tensor, repeats, synchronize)], config).max().item()
        rate = size / seconds / 1e9
        rows.append({"bytes": size, "us": 1e6 * seconds, "gb_s": rate, "bus_gb_s": ring * rate})
        size *= 4 if size < 64 * MIB else 2
    return rows


def as_text(content):
    header = ["MiB", "us", "GB/s", "bus GB/s"]
    cells = [
        [f"{r['bytes'] / MIB:.4g}", *(f"{r[k]:.1f}" for k in ("us", "gb_s", "bus_gb_s"))] for r in content["allreduce"]
    ]
    first = f"all-reduce of {content['processes']} processes, {content['backend']}, {content['environment']['device']}"
    return f"{first}\n{text_table(header, cells)}"


def run(arguments):
    script = load_version(1)
    config = script.parse_options(["--device", arguments.device] if arguments.device else [])
    if not config.parallel:
        raise Failure(2, "start it with torchrun --nproc-per-node N: one process has nobody to sum with")
    script.set_up_backend(config)
    with script.process_group(config):
        rows = measure(config, arguments.largest_mib * MIB, arguments.repeats, script.gather)
        content = {"processes": config.world_size, "backend": dist.get_backend()}
        content |= {"environment": script.environment(config), "allreduce": rows}
        emit(content, as_text(content), arguments.json if config.rank == 0 else None)


def main(argv=None):
    description = "Measure how fast the processes of a job sum tensors; start it with torchrun."
    parser = Parser("measure_allreduce.py", description, "--json links.json")
    parser.add_argument("--device", help="cpu for gloo (one GPU per process)")
    parser.add_argument("--largest-mib", type=positive, default=512, metavar="N", help="the last size (%(default)s)")
    parser.add_argument("--repeats", type=positive, default=20, metavar="N", help="of each size (%(default)s)")
    arguments = parser.parse_args(argv)
    return run_tool("measure_allreduce.py", lambda: run(arguments))


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    # Threads of the communication libraries can abort the interpreter's clean-up.
    (os._exit if "RANK" in os.environ else sys.exit)(status)
