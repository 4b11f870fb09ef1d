"""Start training scripts as children of compare_training.py, and talk to them."""

import contextlib
import json
import os
import pathlib
import select
import subprocess
import sys
import tempfile
import time

import torch

from common.command_line import Failure
from common.measuring.runs import OutOfMemory, end, last_words
from common.ratios import counted

CHILD = pathlib.Path(__file__).with_name("child.py")
MODEL_S = 900  # seconds until a script calls its model
STEP_S = 900  # seconds for a step, which may compile
GRACE_S = 5
TITLES = {"control": "old's second run", "nudged": "old with nudged weights"}


class Run:
    """Run one training script as a child process."""

    def __init__(self, name, command, steps):
        self.name = name
        self.folder = tempfile.TemporaryDirectory(prefix="compare_training_")
        self.log = pathlib.Path(self.folder.name) / "log.txt"
        theirs_in, self.outbox = os.pipe()
        self.inbox, theirs_out = os.pipe()
        request = {"command": command, "folder": self.folder.name, "steps": steps}
        request |= {"inbox": theirs_in, "outbox": theirs_out}
        with open(self.log, "w") as log:
            self.process = start_child(json.dumps(request), log, (theirs_in, theirs_out))
        os.close(theirs_in)
        os.close(theirs_out)
        self.unread = b""

    def ask(self, **request):
        with contextlib.suppress(BrokenPipeError):  # answer() says how it ended
            os.write(self.outbox, (json.dumps(request) + "\n").encode())

    def write(self, name, content):
        """Write tensors for the child; return the file's name."""
        file = os.path.join(self.folder.name, f"{name}.pt")
        torch.save(content, file)
        return file

    def answer(self, seconds):
        """Return the next message; Failure if the script ends, fails or takes too long."""
        until = time.monotonic() + seconds
        while b"\n" not in self.unread:
            if not select.select([self.inbox], [], [], max(0.0, until - time.monotonic()))[0]:
                raise Failure(2, f"{self.name} didn't reach its next step within {seconds:.0f} s")
            found = os.read(self.inbox, 2**16)
            if not found:
                raise self.failure("it was ended")
            self.unread += found
        line, _, self.unread = self.unread.partition(b"\n")
        message = json.loads(line)
        if message["at"] == "ended":
            raise self.failure(message["reason"], message["steps"])
        return message

    def failure(self, reason, steps=0):
        """Return why the script ended; where it ended by itself its last words say more."""
        self.process.wait()
        words = last_words(self.log.read_text(errors="replace"))
        if "out of memory" in reason or "out of memory" in words:
            return OutOfMemory(2, f"{self.name}: out of memory")
        if reason == "short":
            return Short(2, f"{self.name} ended after {counted(steps, 'step')}")
        if reason.startswith("it ") and words != "it printed nothing":
            reason += f", and its last line is: {words}"
        return Failure(2, f"{self.name}: {reason}")

    def end(self):
        end(self.process, GRACE_S)
        os.close(self.inbox)
        os.close(self.outbox)
        self.folder.cleanup()


class Short(Failure):
    """A script that ended by itself, before there was enough of it."""


def start_child(request, log, pipes):
    """Start a child; tests fork one instead, which has imported PyTorch."""
    command = [sys.executable, "-u", str(CHILD), request]
    options = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
    return subprocess.Popen(command, pass_fds=pipes, start_new_session=True, **options)


class Children(contextlib.AbstractContextManager):
    """Hold the runs that are alive, and end all of them with the block."""

    def __init__(self):
        self.alive = {}

    def start(self, name, command, steps):
        self.alive[name] = Run(TITLES.get(name, name), command, steps)
        return self.alive[name]

    def end(self, *names):
        for name in names or list(self.alive):
            self.alive.pop(name).end()

    def __exit__(self, *_):
        self.end()
