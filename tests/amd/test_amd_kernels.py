"""Version 3's kernels, executed as AMD's instructions: as close to float64 as kernel_cases demands, on every target.

Each result is judged like those of Triton's interpreter. Also: no access lies outside of a tensor, no wave reads what
another one stores without a barrier in between, all waves meet at barriers, and every instruction is known. These are
some of the runs that amd_results.py makes.
"""

import concurrent.futures
import multiprocessing
import os
import signal
from concurrent.futures.process import BrokenProcessPool

import pytest
import torch

pytest.importorskip("triton", minversion="3.6", reason="scripts/inspect_kernels.py needs it, too")

import wrong_kernels

from inspect_kernels import prepare_worker
from maintain import amd_results
from marks import slow

# target, case, dtype, order of the waves: every target, kernel and dtype, and both orders.
HEADS = {"B": 1, "T": 37, "H": 2, "K": 1, "D": 32, "rotated": True}
RUNS = [
    ("gfx942", HEADS, "bfloat16", 1),
    ("gfx942", "attention, D=16", "float32", -1),
    ("gfx942", "norm", "float16", 1),
    ("gfx942", "adamw", "bfloat16", -1),
    ("gfx1100", "attention", "float16", -1),
    ("gfx1100", "loss, in place and with ignored rows", "float32", 1),
    ("gfx1100", "swiglu", "bfloat16", -1),
    ("gfx1100", "norm, nothing added", "float32", 1),
    ("gfx90a", "attention", "bfloat16", 1),
    ("gfx90a", "rope", "float16", -1),
    ("gfx950", "attention", "float16", 1),
    ("gfx950", "loss, several tiles", "bfloat16", -1),
    ("gfx1201", "attention", "bfloat16", -1),
    ("gfx1201", "swiglu, exponential overflows", "float16", 1),
    ("gfx1201", "adamw", "float32", 1),
    ("gfx90a", "loss", "float16", -1),
    ("gfx90a", "swiglu", "float32", 1),
    ("gfx950", "norm", "bfloat16", -1),
    ("gfx950", "rope", "float32", 1),
    ("gfx1100", "adamw", "float16", 1),
    ("gfx1201", "norm, large", "float16", 1),
    ("gfx1201", "loss", "bfloat16", -1),
    ("gfx1201", "attention, D=32", "float32", 1),
    ("gfx1100", "attention, two sequences", "bfloat16", 1),
    ("gfx1151", "attention", "bfloat16", 1),
    ("gfx1151", "adamw", "float32", -1),
    ("gfx942", "fp8_linear, a row that counts as zeros", "bfloat16", 1),
    ("gfx950", "fp8_feed_forward, small rows", "bfloat16", 1),
    ("gfx1201", "fp8_linear, a small row", "bfloat16", 1),
]
CASES = [case if number < 8 else slow(*case) for number, case in enumerate(RUNS)]


@pytest.fixture(scope="module")
def worker():
    """Return a process in which Triton compiles for one target."""
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, spawn, prepare_worker) as pool:
        yield pool


@pytest.fixture(scope="module")
def pools():
    """Return a process for each target, in which Triton compiles; it keeps what it compiled."""
    with amd_results.Pools(1) as pools:
        yield pools


@pytest.mark.parametrize(("target", "case", "dtype", "order"), CASES)
def test_results_are_right(target, case, dtype, order, pools):
    run = {"work": "case", "target": target, "case": case, "dtype": dtype, "tile": 0, "order": order}
    found = pools.submit(run).result()
    assert not amd_results.problem(run, found) and found["instructions"]["vector"] > 1000


@pytest.mark.slow
def test_a_pool_whose_process_was_aborted_is_replaced(pools):
    run = {"work": "mutants", "target": "gfx90a", "kernel": "none", "dtype": "bfloat16"}
    with pytest.raises(KeyError):
        pools.submit(run).result()
    os.kill(next(iter(pools.of_target["gfx90a"]._processes)), signal.SIGKILL)
    with pytest.raises((KeyError, BrokenProcessPool)):
        pools.submit(run).result()
    with pytest.raises(KeyError):
        pools.submit(run).result()


def test_the_runs_of_the_page_have_every_tile_and_pair():
    runs = [run for run in amd_results.all_runs() if isinstance(run.get("case"), dict)]
    rows = [(run["target"], run["dtype"], run["tile"], run["case"]["D"]) for run in runs]
    assert len(set(rows)) == len(rows) == 6 * 3 * 3 * 4
    assert amd_results.fewest_meetings() >= 6


def test_a_line_that_a_killed_run_left_unfinished_is_dropped(tmp_path):
    path = tmp_path / "runs.jsonl"
    path.write_text('{"commit": "1"}\n{"run": 1}\n{"run": 2, "fou')
    assert amd_results.read(path) == [{"commit": "1"}, {"run": 1}]
    assert path.read_text() == '{"commit": "1"}\n{"run": 1}\n'


@pytest.mark.skipif(torch.cuda.is_available(), reason="compares with Triton's interpreter, which a GPU replaces")
@pytest.mark.parametrize("name", wrong_kernels.WRONG_KERNELS)
@pytest.mark.quick(2)
def test_faults_that_only_the_machine_code_shows(name, worker):
    """Triton's interpreter, in this process, finds these kernels right."""
    _, function, expected = wrong_kernels.WRONG_KERNELS[name]
    assert wrong_kernels.is_right(*function())
    said, right = worker.submit(wrong_kernels.run, name).result()
    assert not right and expected in said and bool(expected) == bool(said)
