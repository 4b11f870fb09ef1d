"""Train two steps of each case under torchrun; rank 0 saves the results. test_parallel.py starts it.

    torchrun --nproc-per-node 2 tests/versions/parallel_worker.py results.pt CASES

CASES is JSON: a list of [version, [option, ...]]. The results are a list with one dict per case: "losses" of all steps,
tensors of the last step as in training.tensors, and "graph": whether the steps were replayed.
"""

import contextlib
import json
import pathlib
import sys

import torch

sys.path[:0] = [str(pathlib.Path(__file__).resolve().parents[2] / name) for name in ("scripts", "tests")]
from common.versions import load_version
from training import tensors, train

STEPS = 2
WORKER = pathlib.Path(__file__).resolve()


def trained(version, argv):
    losses, trainer = train(version, argv, STEPS)
    return {"losses": losses, "graph": trainer.graph is not None, **tensors(load_version(version), trainer)}


def main(results, cases):
    first = load_version(1)
    config = first.parse_options([])
    with first.process_group(config) if config.parallel else contextlib.nullcontext():
        found = [trained(version, argv) for version, argv in json.loads(cases)]
        if config.rank == 0:
            torch.save(found, results)


if __name__ == "__main__":
    main(*sys.argv[1:])
