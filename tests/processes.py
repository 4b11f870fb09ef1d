"""Start programs under torchrun on this machine."""

import os
import subprocess
import sys

# Odd sizes: FSDP2 gives the two processes unequal parts of some weights.
SIZES = "--hidden-dim 32 --num-layers 2 --num-heads 2 --intermediate-dim 44 --vocab-size 51 --seq-len 11 --seed 3"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]


def launch(processes, *command, timeout=300, variables=(), **options):
    """Run a command under torchrun; return the completed process."""
    command = [*TORCHRUN, str(processes), *map(str, command)]
    variables = environment() | dict(variables)
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=variables, **options)


def environment():
    """Return the environment without the ranks of a launch around this one, and with one thread per process."""
    outside = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return {name: value for name, value in os.environ.items() if name not in outside} | {"OMP_NUM_THREADS": "1"}
