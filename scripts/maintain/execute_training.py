#!/usr/bin/env python3
"""Train version 3 for some steps as AMD's instructions, and compare losses and weights with version 1's.

    python scripts/maintain/execute_training.py                                  every target, float32 and bfloat16
    python scripts/maintain/execute_training.py gfx942 --dtype fp32 --steps 5    one of them, longer

Every kernel is compiled for the target and runs in the interpreter in scripts/amd. Version 1 runs the same steps
in PyTorch on this CPU, in the same precision and in float64. For the weights the tool prints one relative error
compared with float64, over all of them. Each target and precision takes a minute. Exit status: 0 if losses and weights
are close enough to float64, 1 if not, 2 for bad input.
"""

import os
import pathlib
import sys
import time
from unittest import mock

if __name__ == "__main__":
    os.environ.update(TRITON_INTERPRET="0", OMP_NUM_THREADS="1")
    sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import torch

from amd.launch import executed_version
from common.command_line import Parser, positive, progress
from common.formulas.occupancy import TARGETS
from common.measuring.accuracy import LAST_PLACE, allowed, same_loss
from common.ratios import counted
from common.tables import emit, text_table
from common.versions import load_version, relative_error

AMD = [name for name, target in TARGETS.items() if target.backend == "hip"]
DTYPES = {"fp32": [], "bf16": ["--use-amp"], "fp16": ["--use-amp", "--amp-dtype", "float16"]}
SIZES = (
    "--num-layers 1 --hidden-dim 64 --num-heads 2 --num-kv-heads 1 --intermediate-dim 96 --vocab-size 128 --seq-len 24 "
    "--batch-size 2 --warmup-steps 0 --no-graph --device cpu"
).split()
COLUMNS = ["target", "precision", "step", "loss", "version 1", "float64", "launches", "instructions"]


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


def measure(target, label, steps):
    """Return losses and errors of version 3 on a target, beside version 1's, and whether they are close enough."""
    argv = DTYPES[label]
    exact_losses, exact = train(1, [], steps, double=True)
    own_losses, own = train(1, argv, steps)
    start = time.perf_counter()
    with executed_version(load_version(3), target) as launches:
        losses, weights = train(3, argv, steps)
    seconds = time.perf_counter() - start
    bound = LAST_PLACE[{"bf16": "bfloat16", "fp16": "float16"}[label]] if argv else 1e-5
    close = all(same_loss(a, b, bound) for a, b in zip(losses, exact_losses, strict=True))
    weights_error = error(weights, exact)
    own_error = error(own, exact)
    return {
        "losses": losses,
        "own_losses": own_losses,
        "exact_losses": exact_losses,
        "weights_error": weights_error,
        "own_error": own_error,
        "launches": len(launches),
        "instructions": sum(sum(launch.totals.instructions.values()) for launch in launches),
        "seconds": seconds,
        "right": close and weights_error <= allowed(own_error, 1e-6),
    }


def report(options):
    rows = []
    found = []
    for label in options.dtype:
        for target in options.target or AMD:
            progress(f"{target} {label}: training {counted(options.steps, 'step')} of versions 1 and 3 ...")
            one = measure(target, label, options.steps)
            found.append({"target": target, "dtype": label, **one})
            progress(f"{target} {label}: {one['seconds']:.0f} s, {'right' if one['right'] else 'WRONG'}")
            numbers = zip(one["losses"], one["own_losses"], one["exact_losses"], strict=True)
            for step, each in enumerate(numbers, 1):
                cells = [one["launches"], one["instructions"]] if step == 1 else ["", ""]
                rows.append([target, label, step, *(f"{loss:.6f}" for loss in each), *cells])
            errors = one["weights_error"], one["own_error"]
            rows.append([target, label, "weights", *(f"{e:.1e}" for e in errors), "0", "", ""])
    emit({"rows": found}, text_table(COLUMNS, rows, 3), options.json)
    return int(not all(one["right"] for one in found))


def main(argv=None):
    parser = Parser("execute_training.py", __doc__)
    add = parser.add_argument
    add("target", nargs="*", choices=[[], *AMD], metavar="GPU", help=f"{', '.join(AMD)} (all)")
    add("--dtype", nargs="+", choices=DTYPES, default=["fp32", "bf16"], help="(fp32 bf16)")
    add("--steps", type=positive, default=2, metavar="N", help="(2)")
    return parser.run(report, argv)


if __name__ == "__main__":
    sys.exit(main())
