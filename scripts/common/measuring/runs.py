"""Run training scripts in processes of their own, and read the metrics files that they write."""

import contextlib
import json
import math
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time

from common.command_line import Failure, Pace, printable, progress
from common.files import errors_of, read_object

GRACE_S = 40  # torchrun kills after 30 seconds the ranks that ignore SIGTERM
STOPS = (signal.SIGINT, signal.SIGTERM)
# Options and environment that two runs must share before their times may be compared.
SAME_OPTIONS = ("batch_size", "seq_len", "data", "use_amp", "tf32", "world_size")
SAME_MACHINE = ("device", "device_type", "torch", "cuda", "hip")


class OutOfMemory(Failure):
    """A training script that did not fit into the device's memory."""


def end(process, grace_s=GRACE_S):
    """End a process that leads a session and everything it started; a launcher gets time to end its ranks."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(grace_s)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@contextlib.contextmanager
def uninterrupted():
    """Hold SIGINT and SIGTERM back until the block ends, so that what it starts is known to whoever must end it.

    Only the main thread gets signals: in another one this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came = []
    before = {number: signal.signal(number, lambda number, _: came.append(number)) for number in STOPS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for number in came:
            signal.raise_signal(number)


@contextlib.contextmanager
def started(command, grace_s=GRACE_S, **options):
    """Start a process that leads a session; end it, with what it started, if an error leaves the block."""
    process = None
    try:
        with uninterrupted():
            process = subprocess.Popen(command, start_new_session=True, **options)
        yield process
    except BaseException:
        if process:
            end(process, grace_s)
        raise
    finally:
        if process:
            with process:  # waits for it, and closes its pipes
                pass


def run_process(command, timeout=None, *, tell=None, **options):
    """Run a command like subprocess.run, but on a timeout or an interrupt end its children too.

    tell(line) is called with each line as it is printed, to standard error too; then there is no timeout.
    """
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT if tell else subprocess.PIPE, "text": True}
    with started(command, **pipes, **options) as process:
        if tell:
            output, errors = told_lines(process, tell), ""
        else:
            output, errors = process.communicate(timeout=timeout)
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


def told_lines(process, tell):
    """Return what a process prints, each line of which tell gets as it comes."""
    lines = []
    for line in process.stdout:
        lines.append(line)
        tell(line)
    process.wait()
    return "".join(lines)


def followed():
    """Return a tell for train() that prints a line of the script whenever nothing was printed for ten seconds."""
    pace = Pace()

    def tell(line):
        if line.strip() and pace.is_due():
            progress(f"   {line.strip()}")

    return tell


def last_words(output):
    """Return the last line without the program's name; under torchrun the first rank's error instead of its report."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    if "ChildFailedError" in output:
        lines = [line for line in lines if re.match(r"\S+\.py\b.*: \S|\[rank\d+\]: [\w.]+: \S", line)][:1] or lines
    return re.sub(r"^(\S+\.py\b[^:]*: (error: )?|\[rank\d+\]: )", "", lines[-1]) if lines else "it printed nothing"


def ran_out_of_memory(status, words):
    """Tell whether a process that ended with this exit status and these last words lacked memory.

    The kernel ends one that takes more than the machine has, without a word.
    """
    return "out of memory" in words or status == -signal.SIGKILL


def train(script, argv, processes=1, timeout=None, environment=None, tell=None, keep=None):
    """Run a training script, under torchrun if several processes are wanted, and return its metrics.

    tell(line) is called with each line that the script prints. keep: the path where the metrics file stays.
    Raise OutOfMemory, or Failure with the script's last line: status 2 if it refused its options, else 1.
    """
    launcher = [sys.executable, "-u"] if tell else [sys.executable]
    if processes > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    with tempfile.TemporaryDirectory() as folder:
        metrics = keep or pathlib.Path(folder) / "metrics.json"
        try:
            command = [*launcher, str(script), *argv, "--metrics-file", str(metrics)]
            result = run_process(command, timeout, env=environment, tell=tell)
        except subprocess.TimeoutExpired:
            raise Failure(1, f"{script.name} ran longer than {timeout:g} s") from None
        if result.returncode == 0:
            return json.loads(metrics.read_text())
    words = last_words(result.stderr or result.stdout)
    if ran_out_of_memory(result.returncode, words):
        raise OutOfMemory(1, f"{script.name}: out of memory")
    raise Failure(2 if result.returncode == 2 else 1, f"{script.name} failed: {words}")


class TimeLimit:
    """Measure how long runs take, to say how long the others will and to start none that would pass the limit."""

    def __init__(self, seconds):
        self.end = math.inf if seconds is None else time.monotonic() + seconds
        self.took, self.reached = [], False  # seconds of each run; whether something was left out

    def timed(self, work):
        """Return work() and remember how long it took."""
        start = time.monotonic()
        try:
            return work()
        finally:
            self.took.append(time.monotonic() - start)

    def bound(self, seconds):
        """Return so many seconds, or those that are left of the limit if they are fewer."""
        return max(0.0, min(seconds, self.end - time.monotonic()))

    def room(self, runs=1):
        """Return whether so many further runs would end in time; the first run is always let through."""
        if not self.took:
            return True
        needed = max(max(self.took), 1.25 * runs * sum(self.took) / len(self.took))
        fits = needed <= self.bound(needed)
        self.reached = self.reached or not fits
        return fits

    def left(self, runs):
        """Return how long so many further runs will take, in words."""
        if not self.took:
            return "time left unknown"
        seconds = runs * sum(self.took) / len(self.took)
        return f"about {seconds / 60:.0f} min left" if seconds > 90 else f"about {seconds:.0f} s left"


def read_metrics(path):
    """Return the content of a file that --metrics-file wrote; Failure with one sentence where it is none."""
    with errors_of(path):
        content = read_object(path, "metrics file")
        if not {"version", "config", "options", "environment", "steps", "summary"} <= content.keys():
            raise Failure(2, "isn't a metrics file: write one with tiny_llama_v*.py --metrics-file")
        if not content["summary"]:
            raise Failure(2, "has no measured step: its run failed before the first one")
        for name in ("config", "options", "environment", "summary"):
            if not isinstance(content[name], dict):
                raise TypeError(f"its {name} has no names")
    return content


def differences(first, second):
    """Return what makes the times of two metrics incomparable, as "name: one, other"."""
    options = (*SAME_OPTIONS, "amp_dtype") if first["options"].get("use_amp") else SAME_OPTIONS
    keys = {"environment": SAME_MACHINE, "options": options, "config": first["config"]}
    pairs = [(key, first[part].get(key), second[part].get(key)) for part in keys for key in keys[part]]
    return [printable(f"{key}: {one}, {other}") for key, one, other in pairs if one != other]
