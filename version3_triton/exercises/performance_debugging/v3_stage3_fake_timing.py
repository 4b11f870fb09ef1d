#!/usr/bin/env python3
"""Stage 3: too good to be true. Version 3 whose clock does not wait for the GPU.

    python v3_stage3_fake_timing.py                     # options of tiny_llama_v3.py go through

A GPU is given its work and the program goes on: a clock that is read at once has measured the giving.
"""

import sys
import time

from stage_tools import load_v3, run_stage

TITLE = "stage 3: can these times be true?"


def load():
    """Nothing waits before the step's clock is stopped; what the steps really took is kept in v3.really_ms."""
    v3 = load_v3()
    milliseconds, run, v3.really_ms = v3.PhaseClock.milliseconds, v3.Trainer.run, []

    def phases(clock):
        if clock.device.type == "cuda":
            v3.torch.cuda.synchronize(clock.device)  # events of the GPU can be read when they have happened
        return milliseconds(clock)

    def timed_run(trainer, tokens, labels):
        start = time.perf_counter()
        record = run(trainer, tokens, labels)  # it ends with the loss on the host, for which all has to be done
        v3.really_ms.append(1000 * (time.perf_counter() - start))
        return record

    v3.Trainer.synchronize = lambda trainer: None
    v3.PhaseClock.milliseconds = phases
    v3.Trainer.run = timed_run
    return v3


def report(v3, trainer, steps, summary):
    claimed, really = sum(step["step_ms"] for step in steps), sum(v3.really_ms[: len(steps)])
    yield f"{len(steps)} steps: the clock says {claimed:.3f} ms, and {really:.3f} ms have passed"
    phases = [summary[f"{name}_ms"] for name in ("forward", "backward", "optimizer")]
    if None in phases:
        yield "phases are not measured inside a graph here: --no-graph --preset medium shows them"
    else:
        yield f"a step of {summary['step_ms']['median']:.3f} ms has phases of {sum(phases):.3f} ms together"
    if trainer.device.type == "cpu":
        yield "a CPU works while the clock runs, so that its times are true: the fault needs a GPU to show"


if __name__ == "__main__":
    sys.exit(run_stage(load(), TITLE, report))
