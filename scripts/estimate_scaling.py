#!/usr/bin/env python3
"""Estimate weak scaling to a thousand GPUs from one GPU's measured step and the measured all-reduce of one host.

    python scripts/estimate_scaling.py --metrics v3.json --links links.json

v3.json is the --metrics-file of a training script on one GPU, links.json that of measure_allreduce.py on one host. What
is assumed is an option or one of these:

- DDP sums buckets of 25 MiB one after the other during the backward; a gradient is as wide as the weights that the
  model computes with, and ready when its share of the backward is over.
- Hidden communication slows the backward by a fifth of its own time (--contention): it needs units and bandwidth. That
  is what two and four H200 with NVLink measured (scripts/SCALING.md).
- An all-reduce over n GPUs moves every byte 2 (n - 1) / n times: within a host at the measured bus rate for its size,
  between hosts through one network port per GPU. It starts after the measured time of the smallest tensor, plus
  2 (m - 1) hops between m hosts in a ring or 2 log2(m) in a tree; the faster one is taken, as NCCL and RCCL do.
- All wait for the slowest: of n draws of a normal spread one exceeds the mean by about s sqrt(2 ln n).

Exit status: 0, 2 for bad input.
"""

import json
import math
import pathlib
import sys
from typing import NamedTuple

import numpy as np

from common.command_line import Failure, Parser, run_tool
from common.records import significant
from common.runs import read_metrics
from common.tables import emit, text_table

BUCKET_BYTES = 25 * 2**20
SIXTEEN_BIT_WEIGHTS = (3, 4)  # versions whose --use-amp computes with, and sends gradients of, 16-bit weights
QUARTILES_APART = 1.349  # of a normal distribution, in standard deviations
COLUMNS = {"allreduce_ms": "all-reduce ms", "exposed_ms": "exposed ms", "slower_ms": "backward +ms"}
COLUMNS |= {"waiting_ms": "slowest ms", "step_ms": "step ms"}


class Work(NamedTuple):
    """One GPU's step: times in seconds, and the bytes of gradients that its backward leaves to be summed."""

    step_s: float
    spread_s: float
    backward_s: float
    gradient_bytes: int


class Links(NamedTuple):
    """Times in seconds; bus: (bytes, bytes / s) within a host; network: bytes / s of one GPU's port."""

    gpus_per_host: int
    start_s: float
    bus: list[tuple[float, float]]
    network: float
    network_hop_s: float


def read_work(path):
    """Return the step of a metrics file; Failure if it is of several GPUs or has no time of the backward."""
    content = read_metrics(path)
    summary = content["summary"]
    if summary.get("world_size", 1) != 1:
        raise Failure(2, f"{path} is of {summary['world_size']} processes: give the metrics of one")
    if summary["backward_ms"] is None:
        raise Failure(2, f"{path} has no time of the backward: run the script with --no-graph, or on NVIDIA")
    narrow = summary["precision"] in ("bfloat16", "float16") and content["version"] in SIXTEEN_BIT_WEIGHTS
    step = summary["step_ms"]
    spread = (step["p75"] - step["p25"]) / QUARTILES_APART
    gradient_bytes = (2 if narrow else 4) * summary["parameters"]
    return Work(step["median"] / 1e3, spread / 1e3, summary["backward_ms"] / 1e3, gradient_bytes)


def read_links(path, network, network_hop_s):
    try:
        content = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
        table = [(row["bytes"], 1e9 * row["bus_gb_s"]) for row in content["allreduce"]]
        return Links(content["processes"], content["allreduce"][0]["us"] / 1e6, table, network, network_hop_s)
    except OSError as error:
        raise Failure(2, f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, IndexError):
        raise Failure(2, f"{path} is no file of measure_allreduce.py") from None


def allreduce_s(size, gpus, links):
    """Return the seconds of summing so many bytes over so many GPUs."""
    if gpus == 1:
        return 0.0
    hosts, crossing = math.ceil(gpus / links.gpus_per_host), 2 * (gpus - 1) / gpus * size
    carried = crossing / float(np.interp(size, *zip(*links.bus, strict=True)))
    if hosts > 1:
        carried = max(carried, crossing / (links.gpus_per_host * links.network))
    hops = min(2 * (hosts - 1), 2 * math.ceil(math.log2(hosts)))
    return links.start_s + hops * links.network_hop_s + carried


def buckets(gradient_bytes):
    """Return the sizes of DDP's buckets in the order in which the backward fills them."""
    full, rest = divmod(gradient_bytes, BUCKET_BYTES)
    return [BUCKET_BYTES] * full + [rest] * bool(rest)


def communication_s(work, gpus, links):
    """Return the seconds of communication that outlast the backward, and those that it hides."""
    end, filled, total = 0.0, 0, 0.0
    for size in buckets(work.gradient_bytes):
        filled += size
        ready = work.backward_s * filled / work.gradient_bytes
        end = max(end, ready) + allreduce_s(size, gpus, links)
        total += allreduce_s(size, gpus, links)
    exposed = max(0.0, end - work.backward_s)
    return exposed, total - exposed


def estimate(work, gpus, links, contention):
    """Return step, its parts in ms and the efficiency on so many GPUs.

    contention: share of the hidden communication's time by which it slows the backward.
    """
    exposed, hidden = communication_s(work, gpus, links)
    waiting, slower = work.spread_s * math.sqrt(2 * math.log(gpus)), contention * hidden
    step = work.step_s + exposed + slower + waiting
    allreduce = allreduce_s(work.gradient_bytes, gpus, links)
    times = dict(zip(COLUMNS, (allreduce, exposed, slower, waiting, step), strict=True))
    return {"gpus": gpus, **{name: 1e3 * value for name, value in times.items()}, "efficiency": work.step_s / step}


def as_text(content):
    work, network = content["work"], content["network"]
    rows = [
        [row["gpus"], *(f"{row[name]:.2f}" for name in COLUMNS), f"{row['efficiency']:.1%}"]
        for row in content["estimates"]
    ]
    return (
        f"one GPU: step {significant(work['step_ms'])} ms, of it backward {significant(work['backward_ms'])} ms; "
        f"{work['gradient_mb']:,.1f} MB of gradients\n"
        f"hosts of {content['gpus_per_host']} GPUs, measured; between them, assumed, {network['gb_s']:g} GB/s "
        f"per GPU and {network['us']:g} us per hop\n\n{text_table(['GPUs', *COLUMNS.values(), 'efficiency'], rows)}"
    )


def run(options):
    work = read_work(options.metrics)
    links = read_links(options.links, 1e9 * options.network_gb_s, options.network_us / 1e6)
    sizes = [2**power for power in range(int(math.log2(options.gpus)) + 1)]
    numbers = {"step_ms": 1e3 * work.step_s, "backward_ms": 1e3 * work.backward_s}
    content = {
        "work": numbers | {"gradient_mb": work.gradient_bytes / 1e6},
        "gpus_per_host": links.gpus_per_host,
        "network": {"gb_s": options.network_gb_s, "us": options.network_us},
        "estimates": [estimate(work, gpus, links, options.contention) for gpus in sizes],
    }
    emit(content, as_text(content), options.json)


def main(argv=None):
    description = "Estimate weak scaling from one GPU's measured step and the measured all-reduce of one host."
    parser = Parser("estimate_scaling.py", description, "--metrics v3.json --links links.json --network-gb-s 50")
    add = parser.add_argument
    add("--metrics", required=True, metavar="FILE", help="of a training script on one GPU")
    add("--links", required=True, metavar="FILE", help="of measure_allreduce.py on one host")
    add("--gpus", type=int, default=1024, metavar="N", help="up to so many (%(default)s)")
    add("--network-gb-s", type=float, default=50.0, metavar="X", help="of a GPU's port (%(default)s: 400 Gbit/s)")
    add("--network-us", type=float, default=5.0, metavar="X", help="per hop between hosts (%(default)s)")
    add("--contention", type=float, default=0.2, metavar="X", help="of hidden communication (%(default)s)")
    options = parser.parse_args(argv)
    if options.contention < 0:
        parser.error("--contention must not be negative: 0 hides communication for nothing")
    if min(options.gpus, options.network_gb_s, options.network_us) <= 0:
        parser.error("--gpus, --network-gb-s and --network-us must be positive")
    return run_tool("estimate_scaling.py", lambda: run(options))


if __name__ == "__main__":
    sys.exit(main())
