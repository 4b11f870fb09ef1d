#!/usr/bin/env python3
"""Stage 5: version 3 as it is.

python v3_stage5_optimized.py                       # options of tiny_llama_v3.py go through
"""

import sys

from stage_tools import load_v3, run_stage

TITLE = "stage 5: version 3"


def load():
    return load_v3()


def report(v3, trainer, steps, summary):
    yield f"none: {summary['parameters_trained']:,} of {summary['parameters']:,} parameters are trained"


if __name__ == "__main__":
    sys.exit(run_stage(load(), TITLE, report))
