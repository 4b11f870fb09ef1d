"""Hold the sizes at which the stages train."""

GPU_SIZES = "--batch-size 8 --seq-len 128 --num-steps 20".split()
CPU_SIZES = (
    "--batch-size 2 --seq-len 16 --hidden-dim 32 --num-heads 2 --num-layers 2 --intermediate-dim 32 --vocab-size 100 "
    "--num-steps 5 --warmup-steps 1"
).split()
