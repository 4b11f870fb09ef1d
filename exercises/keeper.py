"""Run a command, then end all that it started, and name what it left. answers.py calls this in a process of its own.

    python keeper.py PIPE FOLDER SECONDS COMMAND...

PIPE is the number of an open pipe: when its other end closes, as it does if check.py is killed, everything ends at
once. So it does when the command has taken SECONDS of its own time, see OwnTime. The command writes FOLDER/done, a JSON
list of its threads, when its work is done: soon after, what it started ends. FOLDER/end.json then holds {"status": the
command's, "left": [words, ...], "late": whether it took too long, "computed": seconds, "waited": seconds}.
"""

import contextlib
import ctypes
import functools
import json
import os
import pathlib
import select
import signal
import subprocess
import sys
import time

LOOK = 0.5  # seconds between two looks at what the command's processes do
THREADS = 3  # seconds of their own after the work in which threads and processes of the command may end
EXIT = 20  # the same for Python that has neither
ORPHANS = 0.5  # seconds of their own in which processes may notice that the command has ended
KILL = 10  # seconds for the kernel to end what was killed
NAMED = 3  # processes
PR_SET_PDEATHSIG = 1  # of linux/prctl.h
PR_SET_CHILD_SUBREAPER = 36


def ask_kernel(option, value):
    """Set an option of this process; only Linux has these two."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def parents():
    """Return {process: its parent} of those that run; zombies are left out."""
    found = {}
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            if state != "Z":
                found[int(folder.name)] = int(parent)
    return found


def descendants(ancestor):
    """Return the processes below one."""
    parent = parents()
    found = {ancestor}
    size = 0
    while len(found) > size:
        size = len(found)
        found |= {process for process in parent if parent[process] in found}
    return found - {ancestor}


def ticks_of(process):
    """Return the CPU time of a process and of its children that have ended, in ticks; 0 if it is gone."""
    with contextlib.suppress(OSError):
        fields = pathlib.Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, fields[11:15]))  # utime, stime, cutime and cstime
    return 0


def is_runnable(process):
    """Return whether a thread of a process computes, or would if it had a CPU."""
    for stat in pathlib.Path(f"/proc/{process}/task").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if stat.read_text().rpartition(")")[2].split()[0] == "R":
                return True
    return False


class OwnTime:
    """Measure the time that all processes below this one take, but not the time in which they lack a CPU.

    So an answer has as many seconds on a machine with other work. The clock runs while one of them computes, at most as
    fast as the one on the wall however many compute, and while all wait, as those of a deadlock do. Without /proc
    everything counts as waiting.
    """

    def __init__(self):
        self.seen = time.monotonic()
        self.cpu_seconds = 0.0
        self.computed = 0.0
        self.waited = 0.0

    def look(self, after=LOOK):
        """Return the seconds until now, or until the last look if that was just now: looking takes time, too."""
        now = time.monotonic()
        passed = now - self.seen
        if passed >= after:
            processes = descendants(os.getpid())
            ended = os.times()
            ticks = sum(map(ticks_of, processes))
            cpu_seconds = ended.children_user + ended.children_system + ticks / os.sysconf("SC_CLK_TCK")
            computed = min(max(cpu_seconds - self.cpu_seconds, 0), passed)
            self.computed += computed
            if not any(map(is_runnable, processes)):
                self.waited += passed - computed
            self.cpu_seconds = cpu_seconds
            self.seen = now
        return self.computed + self.waited


def name_of(process, command):
    """Return words on a process."""
    try:
        words = pathlib.Path(f"/proc/{process}/cmdline").read_bytes().decode(errors="backslashreplace").split("\0")[:-1]
    except OSError:
        words = []
    if words == command:
        return f"process {process}, a fork of the answer"
    return f"process {process}: {' '.join(words)[:100]}"


def reap():
    """Let the kernel forget the adopted processes that have ended."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def end_all(command):
    """End all processes below this one, and return their names."""
    names = {}
    end = time.monotonic() + KILL
    while (found := descendants(os.getpid())) and time.monotonic() < end:
        for process in found:
            names.setdefault(process, name_of(process, command))
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.01)
        reap()
    listed = list(names.values())[:NAMED]
    if len(names) > NAMED:
        listed.append(f"{len(names) - NAMED} more processes")
    return listed


def wait_for_end(child, pipe, done, limit, own):
    """Wait until the command ends or has had its time after its work; return what of it is left.

    None: nobody waits any more, since the pipe is closed or the work has taken longer than the limit.
    """
    worked = None  # the time when the work was done
    while child.poll() is None:
        if select.select([pipe], [], [], 0.02)[0]:
            return None
        seconds = own.look()
        if worked is None and done.exists():
            worked = own.look(after=0)
        if worked is None and seconds > limit:
            return None
        if worked is None or seconds < worked + THREADS:
            continue
        if threads := json.loads(done.read_text()):
            return [f"thread {', '.join(threads)}"]
        if descendants(child.pid):
            return []
        if seconds > worked + EXIT:
            return ["Python, in a function that runs at its exit"]
    return []


def keep(pipe, folder, limit, *command):
    ask_kernel(PR_SET_CHILD_SUBREAPER, 1)  # daemons become children of this process; elsewhere only the group is known
    end_with_keeper = functools.partial(ask_kernel, PR_SET_PDEATHSIG, signal.SIGKILL)
    child = subprocess.Popen(command, start_new_session=True, preexec_fn=end_with_keeper)
    own = OwnTime()
    left = wait_for_end(child, int(pipe), pathlib.Path(folder, "done"), float(limit), own)
    status = child.poll()
    end = {"late": left is None, "computed": own.computed, "waited": own.waited}
    if status is None:
        child.kill()
        child.wait()
    orphans_end = own.look(after=0) + ORPHANS
    while left is not None and descendants(os.getpid()) and own.look() < orphans_end:
        time.sleep(0.01)
        reap()
    left = [*(left or []), *end_all(list(command))]
    with contextlib.suppress(ProcessLookupError, PermissionError):  # nothing of the group is left
        os.killpg(child.pid, signal.SIGKILL)
    pathlib.Path(folder, "end.partial").write_text(json.dumps({"status": status, "left": left} | end))
    os.replace(pathlib.Path(folder, "end.partial"), pathlib.Path(folder, "end.json"))


if __name__ == "__main__":
    keep(*sys.argv[1:])
