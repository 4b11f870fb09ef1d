#!/usr/bin/env python3
"""Stage 3: version 3 with the timed step below. Find the fault and repair it. On a CPU it does not show.

python v3_stage3_fake_timing.py                # train; options of tiny_llama_v3.py are passed on
python v3_stage3_fake_timing.py --check        # is it repaired? (on a simulated GPU)
python v3_stage3_fake_timing.py --reveal       # explain it
"""

import sys
import time

from stage_tools import load_v3, main

v3 = load_v3()


def run(trainer, tokens, labels):
    """Train on a batch [B, T] and return its record: loss, milliseconds of the step and of its phases."""
    trainer.tokens.copy_(tokens)
    trainer.labels.copy_(labels)
    start = time.perf_counter()
    trainer.graph.replay() if trainer.graph else trainer.step()
    step_ms = 1000 * (time.perf_counter() - start)
    loss = trainer.loss.item()
    pairs = zip(trainer.marks, trainer.marks[1:], strict=False)
    phases = [a.elapsed_time(b) if trainer.options.on_gpu else 1000 * (b - a) for a, b in pairs]
    return {"loss": loss, **dict(zip(v3.PHASES, phases or [None] * 3, strict=True)), "step_ms": step_ms}


v3.Trainer.run = run

if __name__ == "__main__":
    sys.exit(main(v3, 3))
