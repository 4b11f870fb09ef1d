#!/usr/bin/env python3
"""Weak scaling on paper: from one GPU's measured step and measured or stated links to a thousand GPUs.

    python scripts/estimate_scaling.py --metrics v3.json --links links.json --measured scripts/recorded/NAME/suite.json

v3.json is what --metrics-file of a training script wrote on one GPU; links.json what measure_allreduce.py wrote on one
host. What is assumed, and can be changed by options or is printed with the result:

- A gradient is as wide as the weights that the model computes with, and ready when its share of the backward is over.
  DDP adds up buckets of 25 MiB, one after the other, beside the backward.
- What is hidden there is not free: it holds units and bandwidth that the backward wants, and slows it by a fifth of its
  own time. That is what two and four H200 with NVLink measured (scripts/SCALING.md).
- All-reduce of b bytes over n GPUs: every byte crosses 2 (n - 1) / n times, within a host at the measured bus rate for
  that size, between hosts over one network port a GPU. To start up it takes the measured time of the smallest tensor
  within a host, and between m hosts 2 (m - 1) hops in a ring or 2 log2(m) in a tree. The faster of the two is taken, as
  NCCL and RCCL do.
- All wait for the slowest: a normal spread of single steps, of which n draws exceed the mean by about s sqrt(2 ln n).

Exit status: 0, 2 for bad input.
"""

import argparse
import itertools
import json
import math
import pathlib
import sys
from typing import NamedTuple

from common.benchmark_results import read_results, rows

from common.analysis import Parser, emit, known, read_metrics, text_table
from common.command_line import Failure, run_tool

MIB = 2**20
SIXTEEN_BIT_WEIGHTS = (3, 4)  # versions whose --use-amp computes with, and sends gradients of, 16-bit weights
QUARTILES_APART = 1.349  # of a normal distribution, in standard deviations
TIMES = {
    "ring_ms": "ring ms",
    "tree_ms": "tree ms",
    "exposed_ms": "exposed ms",
    "slower_ms": "backward +ms",
    "waiting_ms": "slowest ms",
    "step_ms": "step ms",
}


class Work(NamedTuple):
    """One GPU's step: times in seconds, what its backward leaves to be added up in bytes."""

    step_s: float
    spread_s: float
    backward_s: float
    gradient_bytes: int


class Links(NamedTuple):
    """start_s and network_hop_s in seconds; bus, a list of (bytes, bytes / s) within a host; network in bytes / s."""

    gpus_per_host: int
    start_s: float
    bus: list[tuple[float, float]]
    network: float
    network_hop_s: float


def read_work(path: str) -> Work:
    content = read_metrics(path)
    summary = content["summary"]
    if summary.get("world_size", 1) != 1:
        raise Failure(2, f"{path} is of {summary['world_size']} processes: give the metrics of one")
    if summary["backward_ms"] is None:
        raise Failure(2, f"{path} has no time of the backward: run the script with --no-graph, or on NVIDIA")
    narrow = summary["precision"] in ("bfloat16", "float16") and content["version"] in SIXTEEN_BIT_WEIGHTS
    step = summary["step_ms"]
    spread = (step["p75"] - step["p25"]) / QUARTILES_APART
    width = 2 if narrow else 4
    return Work(step["median"] / 1e3, spread / 1e3, summary["backward_ms"] / 1e3, width * summary["parameters"])


def read_links(path: str, network: float, network_hop_s: float) -> Links:
    try:
        content = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
        table = [(row["bytes"], 1e9 * row["bus_gb_s"]) for row in content["allreduce"]]
        return Links(content["processes"], content["allreduce"][0]["us"] / 1e6, table, network, network_hop_s)
    except OSError as error:
        raise Failure(2, f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, IndexError):
        raise Failure(2, f"{path} is no file of measure_allreduce.py") from None


def bus_rate(links: Links, size: float) -> float:
    """Bytes a second within a host for a tensor of that size, straight between the measured sizes."""
    (size0, rate0), *more = links.bus
    if size <= size0:
        return rate0
    for size1, rate1 in more:
        if size <= size1:
            return rate0 + (rate1 - rate0) * (size - size0) / (size1 - size0)
        size0, rate0 = size1, rate1
    return rate0


def allreduce_s(size: float, gpus: int, links: Links, tree: bool) -> float:
    """Seconds to add up that many bytes over that many GPUs."""
    if gpus == 1:
        return 0.0
    hosts = math.ceil(gpus / links.gpus_per_host)
    crossing = 2 * (gpus - 1) / gpus * size
    carried = crossing / bus_rate(links, size)
    if hosts > 1:
        carried = max(carried, crossing / (links.gpus_per_host * links.network))
    hops = 2 * math.ceil(math.log2(hosts)) if tree else 2 * (hosts - 1)
    return links.start_s + hops * links.network_hop_s + carried


def fastest_s(size: float, gpus: int, links: Links) -> float:
    return min(allreduce_s(size, gpus, links, tree) for tree in (False, True))


def buckets(gradient_bytes: int, bucket_bytes: int) -> list[int]:
    """Sizes of DDP's buckets in the order in which the backward fills them."""
    sizes, left = [], gradient_bytes
    while left:
        sizes.append(min(left, bucket_bytes))
        left -= sizes[-1]
    return sizes


def exposed_s(work: Work, gpus: int, links: Links, bucket_bytes: int) -> float:
    """How long the last all-reduce outlasts the backward."""
    end, filled = 0.0, 0
    for size in buckets(work.gradient_bytes, bucket_bytes):
        filled += size
        ready = work.backward_s * filled / work.gradient_bytes
        end = max(end, ready) + fastest_s(size, gpus, links)
    return max(0.0, end - work.backward_s)


def estimate(work: Work, gpus: int, links: Links, bucket_bytes: int, contention: float) -> dict:
    """Step, its parts and the efficiency on so many GPUs; times in ms.

    contention: by which share of the time that communication is hidden the backward gets longer.
    """
    waiting = work.spread_s * math.sqrt(2 * math.log(gpus))
    exposed = exposed_s(work, gpus, links, bucket_bytes)
    hidden = sum(fastest_s(size, gpus, links) for size in buckets(work.gradient_bytes, bucket_bytes)) - exposed
    slower = contention * hidden
    step = work.step_s + exposed + slower + waiting
    return {
        "gpus": gpus,
        "ring_ms": 1e3 * allreduce_s(work.gradient_bytes, gpus, links, tree=False),
        "tree_ms": 1e3 * allreduce_s(work.gradient_bytes, gpus, links, tree=True),
        "exposed_ms": 1e3 * exposed,
        "slower_ms": 1e3 * slower,
        "waiting_ms": 1e3 * waiting,
        "step_ms": 1e3 * step,
        "efficiency": work.step_s / step,
    }


def measured_efficiencies(path: str, metrics: str) -> dict[int, float]:
    """Processes -> efficiency of the same version, sizes and precision in a file of benchmark_suite.py."""
    content = read_metrics(metrics)
    options = content["options"]
    wanted = (f"v{content['version']}", options["batch_size"], options["seq_len"], content["summary"]["precision"])
    found = {}
    for row in rows(read_results(path)):
        same = (row["model"], row["batch_size"], row["seq_len"], row["precision"]) == wanted
        if same and row["status"] == "ok" and row["processes"] > 1 and row["captured"] == was_captured(content):
            found[row["processes"]] = row["efficiency"]
    return found


def was_captured(metrics: dict) -> bool:
    return metrics["summary"]["graph"]["captured"]


def as_text(content: dict) -> str:
    work = content["work"]
    cells = [
        [
            row["gpus"],
            *(f"{row[name]:.3f}" for name in TIMES),
            f"{100 * row['efficiency']:.1f} %",
            known(row["measured"], ".1%"),
        ]
        for row in content["estimates"]
    ]
    header = ["GPUs", *TIMES.values(), "efficiency", "measured"]
    network = content["network"]
    return (
        f"one GPU: step {work['step_ms']:.3f} ms, of it backward {work['backward_ms']:.3f} ms; "
        f"{work['gradient_mb']:,.1f} MB of gradients\n"
        f"hosts of {content['gpus_per_host']} GPUs, measured; between them, assumed, {network['gb_s']:g} GB/s "
        f"a GPU and {network['us']:g} us a hop\n\n{text_table(header, cells)}"
    )


def run(options: argparse.Namespace) -> None:
    work = read_work(options.metrics)
    links = read_links(options.links, 1e9 * options.network_gb_s, options.network_us / 1e6)
    measured = measured_efficiencies(options.measured, options.metrics) if options.measured else {}
    sizes = itertools.takewhile(lambda gpus: gpus <= options.gpus, (2**power for power in itertools.count()))
    found = [estimate(work, gpus, links, int(options.bucket_mib * MIB), options.contention) for gpus in sizes]
    content = {
        "work": {
            "step_ms": 1e3 * work.step_s,
            "backward_ms": 1e3 * work.backward_s,
            "gradient_mb": work.gradient_bytes / 1e6,
        },
        "gpus_per_host": links.gpus_per_host,
        "network": {"gb_s": options.network_gb_s, "us": options.network_us},
        "estimates": [row | {"measured": measured.get(row["gpus"])} for row in found],
    }
    emit(content, as_text(content), options.json)


def main(argv: list[str] | None = None) -> int:
    parser = Parser(
        "estimate_scaling.py",
        "Weak scaling on paper: from one GPU's measured step and measured or stated links to a thousand GPUs.",
        "--metrics v3.json --links links.json --network-gb-s 50",
    )
    parser.add_argument("--metrics", required=True, metavar="FILE", help="of a training script on one GPU")
    parser.add_argument("--links", required=True, metavar="FILE", help="of measure_allreduce.py on one host")
    parser.add_argument("--measured", metavar="FILE", help="suite.json with the same case on several GPUs, to compare")
    parser.add_argument("--gpus", type=int, default=1024, metavar="N", help="up to so many (%(default)s)")
    parser.add_argument(
        "--network-gb-s",
        type=float,
        default=50.0,
        metavar="X",
        help="of each GPU's port (%(default)s: 400 Gbit/s)",
    )
    parser.add_argument("--network-us", type=float, default=5.0, metavar="X", help="a hop between hosts (%(default)s)")
    parser.add_argument("--bucket-mib", type=float, default=25.0, metavar="X", help="DDP's buckets (%(default)s)")
    parser.add_argument(
        "--contention",
        type=float,
        default=0.2,
        metavar="X",
        help="share of the hidden communication's time by which it slows the backward (%(default)s)",
    )
    options = parser.parse_args(argv)
    if options.contention < 0:
        parser.error("--contention must not be negative: 0 hides communication for nothing")
    if min(options.gpus, options.network_gb_s, options.network_us, options.bucket_mib) <= 0:
        parser.error("--gpus, --network-gb-s, --network-us and --bucket-mib must be positive")
    return run_tool("estimate_scaling.py", lambda: run(options))


if __name__ == "__main__":
    sys.exit(main())
