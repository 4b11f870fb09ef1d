"""Run your answer to an exercise on several ranks on this machine's GPUs, and see what it sends and what that costs.

    torchrun --nproc-per-node gpu exercises/on_gpus.py 26     # NCCL or RCCL; 25 to 29
    torchrun --nproc-per-node 2 exercises/on_gpus.py 26       # gloo, without a GPU

First the results on small tensors are compared with the exercise's definition. Then large tensors are timed, with calls
that send and with calls that don't: the difference is what sending costs.
"""

import contextlib
import os
import pathlib
import statistics
import sys
import time
import warnings
from unittest import mock

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "scripts")]
if __name__ == "__main__":
    os.environ.setdefault("TRITON_INTERPRET", "1")  # no exercise here launches a kernel

import torch
import torch.distributed as dist

warnings.filterwarnings("ignore", "`torch.distributed.*deprecated")  # PyTorch before 2.13 has the old names only

from answers import exercises, folder_of, is_started, relative, runs_on_ranks, solution_of
from common.command_line import Failure, Parser
from common.tables import text_table
from common.versions import relative_error
from grading import load_module, load_task
from one_rank import RENAMED, SENT

REPEATS = 7
PARTS = 1680  # can be cut into as many equal parts as there are ranks: up to 8, and 10, 12, 14, 15, 16
# number -> sizes of the comparison, and those that keep a GPU and a CPU core busy for milliseconds
SIZES = {
    "25": ({"n": PARTS}, {"n": PARTS << 16}, {"n": PARTS << 10}),
    "26": (
        {"steps": 2, "L": 5},
        {"steps": 2, "L": 24, "B": 8192, "C": 2048},
        {"steps": 2, "L": 12, "B": 256, "C": 512},
    ),
    "27": ({}, None, None),  # compares, and computes nothing
    "28": ({"steps": 3, "n": PARTS}, {"steps": 3, "n": PARTS << 15}, {"steps": 3, "n": PARTS << 10}),
    "29": (
        {"rows": 3, "C": 4, "F": PARTS},
        {"rows": 8192, "C": 2048, "F": 4 * PARTS},
        {"rows": 512, "C": 256, "F": PARTS},
    ),
}
SMALL, LARGE = 0, 1 if torch.cuda.is_available() else 2
TOLERANCE = 1e-4  # sums in another order than the definition's


class Done:
    """Stand for a call that has sent nothing."""

    def wait(self):
        return True


class Meter(contextlib.ExitStack):
    """Count this rank's calls and the bytes that it sends, as in a ring; muted: send nothing."""

    def __init__(self, muted=False):
        super().__init__()
        self.muted = muted
        self.calls = 0
        self.bytes = 0

    def __enter__(self):
        renamed = {old: new for new, old in RENAMED.items() if hasattr(dist, new)}  # a function that the old one calls
        names = [*(renamed.get(name, name) for name in SENT), "send", "recv", "isend", "irecv"]
        counted = {name: self.counted(name, getattr(dist, name)) for name in names}
        if self.muted:
            counted["batch_isend_irecv"] = lambda messages: [Done() for _ in messages]
        for module in (dist, dist.distributed_c10d):  # a P2POp knows the functions of the second
            self.enter_context(mock.patch.multiple(module, **counted))
        return self

    def counted(self, name, call):
        def replacement(*args, **kwargs):
            if self.muted:
                return Done()
            tensors = [one for one in (*args, *kwargs.values()) if isinstance(one, torch.Tensor)]
            whole = max((tensor.nbytes for tensor in tensors), default=0)
            self.calls += 1
            share = SENT.get(RENAMED.get(name, name))
            if share:
                self.bytes += share(dist.get_world_size()) * whole
            elif name in ("send", "isend"):
                self.bytes += whole
            return call(*args, **kwargs)

        return replacement


def on_device(values, split, rank, device):
    """Return a rank's inputs on its device."""
    own = {name: value[rank] if name in split else value for name, value in values.items()}
    return {name: value.to(device) for name, value in own.items()}


def is_right(task, module, sizes, device):
    """Return True if every rank gets what the exercise's definition gives."""
    rank = dist.get_rank()
    inputs = task.inputs(size=dist.get_world_size(), **sizes)
    expected = task.storage(task.define(**inputs), inputs)
    found = module.run(**on_device(inputs, task.launch.split, rank, device))
    right = all(relative_error(found[name].cpu(), rows[rank]) < TOLERANCE for name, rows in expected.items())
    verdict = torch.tensor(float(right), device=device)
    dist.all_reduce(verdict, op=dist.ReduceOp.MIN)
    return bool(verdict)


def median_ms(run, device):
    """Return the median time of a run that all ranks begin together, if anything is sent."""
    times = []
    for _ in range(1 + REPEATS):
        dist.barrier()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times[1:])


def measure(task, module, sizes, device):
    """Return every rank's calls, MB sent, ms, and ms if the calls send nothing."""
    inputs = on_device(task.inputs(size=1, **sizes), task.launch.split, 0, device)  # the same data on every rank
    with Meter() as meter:
        module.run(**inputs)
    sending = median_ms(lambda: module.run(**inputs), device)
    with Meter(muted=True):
        alone = median_ms(lambda: module.run(**inputs), device)
    row = torch.tensor([meter.calls, meter.bytes / 1e6, sending, alone], dtype=torch.float64, device=device)
    rows = [torch.empty_like(row) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, row)
    return torch.stack(rows).tolist()


def refuse(sentence):
    """Raise a Failure that one rank prints."""
    raise Failure(2, sentence if os.environ.get("LOCAL_RANK", "0") == "0" else "")


@contextlib.contextmanager
def ranks_of_torchrun():
    """Join the ranks that torchrun has started, and yield this one's device."""
    if "RANK" not in os.environ:
        refuse("start it with torchrun: torchrun --nproc-per-node gpu exercises/on_gpus.py 26")
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        if device.index >= torch.cuda.device_count():
            refuse(f"there are {torch.cuda.device_count()} GPUs: use --nproc-per-node gpu")
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    on_gpu = device.type == "cuda"
    dist.init_process_group("nccl" if on_gpu else "gloo", device_id=device if on_gpu else None)
    yield device
    dist.destroy_process_group()


def show(rows):
    """Print each rank's measurements, and say so if there was nobody to send to."""
    if len(rows) == 1:
        print("nothing was sent, because there is one rank: the difference is what the calls themselves take")
    header = ["one run", "calls", "MB sent", "ms", "ms, sending nothing", "difference"]
    cells = [
        [f"rank {i}", f"{calls:.0f}", f"{sent:.3f}", f"{ms:.3f}", f"{alone:.3f}", f"{ms - alone:.3f}"]
        for i, (calls, sent, ms, alone) in enumerate(rows)
    ]
    print(text_table(header, cells))


def run(options):
    number = options.exercise.zfill(2)
    folder = folder_of(number)
    if not runs_on_ranks(folder):
        on_ranks = [name for name, other in exercises().items() if runs_on_ranks(other)]
        refuse(f"exercise {number} runs on one GPU: choose one of {', '.join(on_ranks)}")
    path = solution_of(folder) if options.solution else folder / "exercise.py"
    if not is_started(path.read_text(encoding="utf-8", errors="replace")):
        refuse(f"{relative(path)} is not started: write your lines first, or add --solution")
    with ranks_of_torchrun() as device:
        size = dist.get_world_size()
        if PARTS % size:
            refuse(f"{size} ranks can't share {PARTS} parts equally: start fewer")
        if number == "27" and size == 1:
            refuse("exercise 27 compares ranks, and there is one: start at least two")
        task = load_task(folder)
        module = load_module(path, "answer")
        right = is_right(task, module, SIZES[number][SMALL], device)
        first = dist.get_rank() == 0
        if first:
            verdict = "right" if right else f"WRONG; python exercises/check.py {number} says why"
            print(f"{number} on {size} x {device.type} with {dist.get_backend()}: {verdict}", flush=True)
        if right and SIZES[number][LARGE]:
            rows = measure(task, module, SIZES[number][LARGE], device)
            if first:
                show(rows)
    return 0 if right else 1


def main(argv=None):
    parser = Parser("on_gpus.py", __doc__, with_json=False)
    parser.add_argument("exercise", metavar="NN", help="number of the exercise")
    parser.add_argument("--solution", action="store_true", help="run the solution")
    return parser.run(run, argv)


if __name__ == "__main__":
    sys.exit(main())
