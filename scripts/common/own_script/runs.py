"""Start training scripts as children of compare_training.py, and talk to them."""

import os
import pathlib
import sys
import tempfile

import torch

from common.command_line import Failure
from common.measuring.rounds import Process, Processes, start
from common.measuring.runs import OutOfMemory, ran_out_of_memory
from common.ratios import counted

CHILD = pathlib.Path(__file__).with_name("child.py")
MODEL_S = 900  # seconds until a script calls its model
STEP_S = 900  # seconds for a step, which may compile
TITLES = {"control": "old's second run", "nudged": "old with nudged weights"}


def start_child(request, log, pipes):
    """Start a child; tests fork one instead, which has imported PyTorch."""
    return start([sys.executable, "-u", str(CHILD), request], log, pipes)


class Run(Process):
    """Run one training script as a child process."""

    grace_s = 5

    def __init__(self, name, command, steps):
        self.name = name
        self.folder = tempfile.TemporaryDirectory(prefix="compare_training_")
        super().__init__(start_child, {"command": command, "folder": self.folder.name, "steps": steps})

    def write(self, name, content):
        """Write tensors for the child; return the file's name."""
        file = os.path.join(self.folder.name, f"{name}.pt")
        torch.save(content, file)
        return file

    def answer(self, seconds):
        """Return the next message; Failure if the script ends, fails or takes too long."""
        message = super().answer(seconds)
        if message["at"] == "ended":
            raise self.failure(message["reason"], message["steps"])
        return message

    def late(self, seconds):
        return Failure(2, f"{self.name} didn't reach its next step within {seconds:.0f} s")

    def failure(self, reason=None, steps=0):
        """Return why the script ended; where it ended by itself its last words say more.

        reason: what it told; None if something else ended it.
        """
        status, words = self.ended()
        if reason is None:
            no_memory = ran_out_of_memory(status, words)
            reason = "it was ended"
        else:
            no_memory = "out of memory" in reason or "out of memory" in words
        if no_memory:
            return OutOfMemory(2, f"{self.name}: out of memory")
        if reason == "short":
            return Short(2, f"{self.name} ended after {counted(steps, 'step')}")
        if reason.startswith("it ") and words != "it printed nothing":
            reason += f", and its last line is: {words}"
        return Failure(2, f"{self.name}: {reason}")

    def end(self):
        super().end()
        self.folder.cleanup()


class Short(Failure):
    """A script that ended by itself, before there was enough of it."""


class Children(Processes):
    """Hold the runs that are alive."""

    def start(self, name, command, steps):
        self.add(name, lambda: Run(TITLES.get(name, name), command, steps))
        return self.alive[name]
