#!/usr/bin/env python3
"""Train version 3 for some steps as AMD's instructions, and compare losses and weights with version 1's.

    python scripts/maintain/execute_training.py                                  every target, float32 and bfloat16
    python scripts/maintain/execute_training.py gfx942 --dtype fp32 --steps 5    one of them, longer

Every kernel is compiled for the target and run by the interpreter in scripts/common/amd. Version 1 runs the same steps
in PyTorch on this CPU, in the same precision and in float64. Weights are compared by the relative error of all of them,
with float64. A minute for each target and precision. Exit status: 0 if losses and weights are as close to float64 as
they may be, 1 if not, 2 for bad input.
"""

import os
import pathlib
import sys
import time
from unittest import mock

os.environ.update(TRITON_INTERPRET="0", OMP_NUM_THREADS="1")
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import torch

from common.accuracy import LAST_PLACE
from common.amd.launch import executed_version
from common.command_line import Parser, positive, progress
from common.occupancy import TARGETS
from common.tables import emit, text_table
from common.versions import load_version, relative_error

AMD = [name for name, target in TARGETS.items() if target.backend == "hip"]
DTYPES = {"fp32": [], "bf16": ["--use-amp"], "fp16": ["--use-amp", "--amp-dtype", "float16"]}
SIZES = (
    "--num-layers 1 --hidden-dim 64 --num-heads 2 --num-kv-heads 1 --intermediate-dim 96 --vocab-size 128 --seq-len 24 "
    "--batch-size 2 --warmup-steps 0 --no-graph --device cpu"
).split()
COLUMNS = ["target", "precision", "step", "loss", "version 1", "float64", "launches", "instructions", "seconds"]


def train(version, argv, steps, double=False):
    """Return the losses of some steps, and the weights after them {canonical name: float64}."""
    script = load_version(version)
    with mock.patch.object(script, "complete_version_options", lambda options: {}):  # asks about this machine
        options = script.parse_options([*SIZES, *argv, "--num-steps", str(steps)])
    script.set_up_backend(options)
    trainer = script.Trainer(options)
    if double:
        trainer.model.double()
    data = script.load_data(options)
    losses = [trainer.run(*script.batch(data, step, options))["loss"] for step in range(steps)]
    state = trainer.optimizer.state
    weights = {n: script.get_weight(p, state[p]).detach().double() for n, p in trainer.model.named_parameters()}
    return losses, dict(script.canonical_views(weights, options.model))


def error(weights, exact):
    """Return the relative error of all weights together."""
    names = sorted(exact)
    return relative_error(*(torch.cat([w[name].flatten() for name in names]) for w in (weights, exact)))


def report(options):
    rows, right = [], True
    for label in options.dtype:
        argv = DTYPES[label]
        exact_losses, exact = train(1, [], options.steps, double=True)
        own_losses, own = train(1, argv, options.steps)
        for target in options.target or AMD:
            start = time.perf_counter()
            with executed_version(load_version(3), target) as launches:
                losses, weights = train(3, argv, options.steps)
            seconds = time.perf_counter() - start
            count = sum(sum(launch.totals.instructions.values()) for launch in launches)
            errors = error(weights, exact), error(own, exact)
            bound = LAST_PLACE[{"bf16": "bfloat16", "fp16": "float16"}[label]] if argv else 1e-5
            close = all(abs(a - b) <= bound * b for a, b in zip(losses, exact_losses, strict=True))
            right &= close and errors[0] <= 2 * errors[1] + 1e-6
            numbers = zip(losses, own_losses, exact_losses, strict=True)
            for step, each in enumerate(numbers, 1):
                cells = [len(launches), count, f"{seconds:.0f}"] if step == 1 else ["", "", ""]
                rows.append([target, label, step, *(f"{loss:.6f}" for loss in each), *cells])
            rows.append([target, label, "weights", *(f"{e:.1e}" for e in errors), "0", "", "", ""])
            progress(f"{target} {label}: {seconds:.0f} s, losses {losses}, version 1 {own_losses}, errors {errors}")
    emit({"rows": rows}, text_table(COLUMNS, rows, 3), options.json)
    return int(not right)


def main(argv=None):
    parser = Parser("execute_training.py", __doc__)
    add = parser.add_argument
    add("target", nargs="*", choices=[[], *AMD], metavar="GPU", help=f"{', '.join(AMD)} (all)")
    add("--dtype", nargs="+", choices=DTYPES, default=["fp32", "bf16"], help="(fp32 bf16)")
    add("--steps", type=positive, default=2, metavar="N", help="(2)")
    return parser.run(report, argv)


if __name__ == "__main__":
    sys.exit(main())
