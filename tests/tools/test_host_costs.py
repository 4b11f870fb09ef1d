"""measure_host_costs.py, and the counts with which version 3's page predicts an eager step."""

import json
import os
import re

import pytest
import torch

import measure_host_costs
from common.measuring.guarded_memory import launches
from common.versions import REPOSITORY, load_version, prepare

SIZES = "--use-amp --amp-dtype float16 --hidden-dim 32 --num-heads 2 --seq-len 16 --batch-size 1 --vocab-size 64"


def test_every_cost_is_measured_but_a_launch_that_nothing_makes(capsys, monkeypatch):
    monkeypatch.setattr(os, "environ", {k: v for k, v in os.environ.items() if k != "KINETO_LOG_LEVEL"})
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)
    monkeypatch.setattr(measure_host_costs, "CALLS", 5)
    assert measure_host_costs.main(["--device", "cpu", "--repeats", "2", "--json", "-"]) == 0
    us = json.loads(capsys.readouterr().out)["us"]
    assert os.environ["KINETO_LOG_LEVEL"] == "6"  # the profiler reads it once per process
    assert len(us) == 8 and measure_host_costs.LAUNCH not in us
    assert all(0 < found["p25"] <= found["median"] <= found["p75"] for found in us.values())


def test_a_cost_is_that_of_one_call_without_waiting_for_the_gpu(monkeypatch):
    """The first call compiles for a second; then five take 10, 20 and 30 us together; the GPU works for 7 s."""
    now = [0.0]
    taken = iter([1.0, 10e-6, 20e-6, 30e-6])

    def advance(seconds):
        now[0] += seconds

    monkeypatch.setattr(measure_host_costs, "CALLS", 5)
    monkeypatch.setattr(measure_host_costs.time, "perf_counter", lambda: now[0])
    found = measure_host_costs.microseconds(lambda: advance(next(taken)), lambda: advance(7), 3)
    assert [found[part] for part in ("p25", "median", "p75")] == pytest.approx([3, 4, 5], rel=1e-3)


def test_a_gpu_that_is_not_there_is_refused(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert measure_host_costs.main(["--device", "cuda"]) == 2
    assert "PyTorch sees none" in capsys.readouterr().err


def nodes_of(loss):
    """Return the names of the nodes in the graph of a loss."""
    seen = set()
    new = [loss.grad_fn]
    while new:
        node = new.pop()
        if node and node not in seen:
            seen.add(node)
            new += [following for following, _ in node.next_functions]
    return [node.name() for node in seen]


def counts_of_a_step(layers, monkeypatch):
    """Return how many linear layers, Functions, launches and regions an eager step of version 3 has."""
    script = load_version(3)
    trainer, data = prepare(script, f"{SIZES} --num-layers {layers}".split())
    nodes = []
    launched = []
    regions = []
    annotate = script.annotate
    backward = torch.Tensor.backward
    with monkeypatch.context() as patch, launches(launched.append):
        patch.setattr(script, "annotate", lambda name: regions.append(name) or annotate(name))
        patch.setattr(torch.Tensor, "backward", lambda loss: nodes.extend(nodes_of(loss)) or backward(loss))
        trainer.run(*script.batch(data, 0, trainer.options))
    functions = [name for name in nodes if name.endswith("FunctionBackward")]
    return [nodes.count("MmBackward0"), len(functions), len(launched), len(regions)]


def test_the_page_counts_what_a_step_does(monkeypatch):
    """Its table has a formula in L, the number of layers, and its value at small's eight, for each of four counts.

    The answer multiplies the values by the costs that the page shows.
    """
    page = (REPOSITORY / "version3_triton" / "HOST_COSTS.md").read_text()
    formulas = re.findall(r"\| (\d+) L \+ (\d+) \| (\d+) \|$", page, re.MULTILINE)
    found = counts_of_a_step(1, monkeypatch)
    assert [int(each) + int(rest) for each, rest, _ in formulas] == found
    more = counts_of_a_step(2, monkeypatch)
    assert [int(each) for each, _, _ in formulas] == [two - one for one, two in zip(found, more, strict=True)]
    assert [int(at_small) for _, _, at_small in formulas] == [8 * int(each) + int(rest) for each, rest, _ in formulas]
    at_small = re.findall(r" L(?: \+ \d+)? \| (\d+) \|$", page, re.MULTILINE)
    ((terms, total),) = re.findall(r"^(\d.* x .*) = (\d+) us$", page, re.MULTILINE)
    factors = [term.split(" x ") for term in terms.split(" + ")]
    assert [count for count, _ in factors] == at_small
    assert all(f" {cost} " in page.split("**Predict**")[0] for _, cost in factors)
    assert round(sum(int(count) * float(cost) for count, cost in factors)) == int(total)
