#!/usr/bin/env python3
"""How fast the processes of a job add tensors up: the all-reduce that DDP does with every bucket of gradients.

    torchrun --nproc-per-node 8 scripts/measure_allreduce.py --json links.json

Prints and writes, for tensors of 64 KiB to 512 MiB, the median time of one all-reduce as the slowest process sees it,
and two rates: bytes / time, and the bus rate 2 (n - 1) / n · bytes / time, which is what each link must carry in a ring
of n and so compares with the link's data sheet. scripts/estimate_scaling.py reads the file.

Exit status: 0, 2 for a bad option or where torchrun did not start it.
"""

import json
import pathlib
import statistics
import time

import torch
import torch.distributed as dist

from common.analysis import Parser, text_table
from common.command_line import Failure, run_tool
from common.versions import load_version

KIB, MIB = 2**10, 2**20
DTYPE = {"cuda": torch.bfloat16, "cpu": torch.float32}


def synchronize(device):
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def time_of_one(tensor, repeats):
    """Seconds of one all-reduce, its median over the repeats; each is timed alone, from a common start."""
    times = []
    for _ in range(repeats + 3):  # the first ones set up the connections
        dist.barrier()
        synchronize(tensor.device)
        start = time.perf_counter()
        dist.all_reduce(tensor)
        synchronize(tensor.device)
        times.append(time.perf_counter() - start)
        tensor.zero_()  # sums of sums would soon overflow
    return statistics.median(times[3:])


def measure(device, largest, repeats, gather):
    """A row for each size in bytes, four times the last: microseconds, GB/s, GB/s on the bus."""
    rows, size, processes = [], 64 * KIB, dist.get_world_size()
    while size <= largest:
        tensor = torch.zeros(size // DTYPE[device.type].itemsize, dtype=DTYPE[device.type], device=device)
        seconds = gather([time_of_one(tensor, repeats)], device).max().item()
        rate = size / seconds / 1e9
        bus = 2 * (processes - 1) / processes * rate
        rows.append({"bytes": size, "us": 1e6 * seconds, "gb_s": rate, "bus_gb_s": bus})
        size *= 4 if size < 64 * MIB else 2
    return rows


def report(content, target):
    cells = [
        [f"{r['bytes'] / MIB:.4g}", f"{r['us']:.1f}", f"{r['gb_s']:.2f}", f"{r['bus_gb_s']:.2f}"]
        for r in content["allreduce"]
    ]
    print(f"all-reduce of {content['processes']} processes, {content['backend']}, {content['device']}")
    print(text_table(["MiB", "us", "GB/s", "bus GB/s"], cells))
    if target:
        pathlib.Path(target).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def run(arguments):
    script = load_version(1)
    options = script.parse_options(["--device", arguments.device] if arguments.device else [])
    if not options.parallel:
        raise Failure(2, "start it with torchrun --nproc-per-node N: one process has nobody to add up with")
    device = torch.device(options.device)
    with script.process_group(options):
        rows = measure(device, arguments.largest_mib * MIB, arguments.repeats, script.gather)
        content = {
            "processes": options.world_size,
            "backend": dist.get_backend(),
            "device": script.device_name(device),
            "date": script.environment(device)["date"],
            "torch": torch.__version__,
            "allreduce": rows,
        }
        report(content, arguments.json if options.rank == 0 else None)


def main(argv=None):
    parser = Parser(
        "measure_allreduce.py",
        "How fast the processes of a job add tensors up; start it with torchrun.",
        "--json links.json",
    )
    parser.add_argument("--device", help="cpu for gloo (a GPU each, where there are some)")
    parser.add_argument("--largest-mib", type=int, default=512, metavar="N", help="the last size (%(default)s)")
    parser.add_argument("--repeats", type=int, default=20, metavar="N", help="of each size (%(default)s)")
    arguments = parser.parse_args(argv)
    if arguments.largest_mib < 1 or arguments.repeats < 1:
        parser.error("--largest-mib and --repeats must be positive")
    return run_tool("measure_allreduce.py", lambda: run(arguments))


if __name__ == "__main__":
    load_version(1).leave(main())
