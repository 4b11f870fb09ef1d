"""Find version 3 and the workshop's tools, and hold the sizes at which the stages train."""

import pathlib
import sys

HERE = pathlib.Path(__file__).resolve().parent
SCRIPT = HERE.parents[1] / "tiny_llama_v3.py"
sys.path.append(str(HERE.parents[2] / "scripts"))

GPU_SIZES = "--batch-size 8 --seq-len 128 --num-steps 20".split()
CPU_SIZES = (
    "--batch-size 2 --seq-len 16 --hidden-dim 32 --num-heads 2 --num-layers 2 --intermediate-dim 32 --vocab-size 100 "
    "--num-steps 5 --warmup-steps 1"
).split()
