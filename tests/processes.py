"""Start programs under torchrun on this machine."""

import os
import subprocess
import sys

# Sizes that do not divide by two: FSDP2 gives the processes unequal parts of some weights.
SIZES = "--hidden-dim 32 --num-layers 2 --num-heads 2 --intermediate-dim 44 --vocab-size 51 --seq-len 11 --seed 3"


def launch(processes, *command, timeout=300, variables=(), **options):
    """torchrun on this machine with that many processes; its finished process."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    return subprocess.run(
        [*torchrun, *map(str, command)],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=environment() | dict(variables),
        **options,
    )


def environment():
    """Threads as a machine of two cores needs them for two processes; no rank of a launch around this one."""
    outside = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return {name: value for name, value in os.environ.items() if name not in outside} | {"OMP_NUM_THREADS": "1"}
