"""Run a command, then end all that it started, and name what it left. answers.py calls this in a process of its own.

    python keeper.py PIPE FOLDER COMMAND...

PIPE is the number of an open pipe: when its other end closes, as it does if check.py is killed or has waited long
enough, everything ends at once. The command writes FOLDER/done, a JSON list of its threads, when its work is done: soon
after, what it started ends. FOLDER/end.json then holds {"status": the command's, "left": [words, ...]}.
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

THREADS = 3  # seconds after the work in which threads and processes of the command may end
EXIT = 20  # seconds in which Python may end that has neither; on a machine with other work it takes some
ORPHANS = 0.5  # seconds in which processes may notice that the command has ended
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


def wait_for_end(child, pipe, done):
    """Wait until the command ends or has had its time after its work; return what of it is left.

    None: nobody waits any more, since the pipe is closed.
    """
    worked = None  # the time when the work was done
    while child.poll() is None:
        if select.select([pipe], [], [], 0.02)[0]:
            return None
        if worked is None and done.exists():
            worked = time.monotonic()
        if worked is None or time.monotonic() < worked + THREADS:
            continue
        if threads := json.loads(done.read_text()):
            return [f"thread {', '.join(threads)}"]
        if descendants(child.pid):
            return []
        if time.monotonic() > worked + EXIT:
            return ["Python, in a function that runs at its exit"]
    return []


def keep(pipe, folder, *command):
    ask_kernel(PR_SET_CHILD_SUBREAPER, 1)  # daemons become children of this process; elsewhere only the group is known
    end_with_keeper = functools.partial(ask_kernel, PR_SET_PDEATHSIG, signal.SIGKILL)
    child = subprocess.Popen(command, start_new_session=True, preexec_fn=end_with_keeper)
    left = wait_for_end(child, int(pipe), pathlib.Path(folder, "done"))
    status = child.poll()
    if status is None:
        child.kill()
        child.wait()
    orphans_end = time.monotonic() + ORPHANS
    while left is not None and descendants(os.getpid()) and time.monotonic() < orphans_end:
        time.sleep(0.01)
        reap()
    left = [*(left or []), *end_all(list(command))]
    with contextlib.suppress(ProcessLookupError, PermissionError):  # nothing of the group is left
        os.killpg(child.pid, signal.SIGKILL)
    pathlib.Path(folder, "end.partial").write_text(json.dumps({"status": status, "left": left}))
    os.replace(pathlib.Path(folder, "end.partial"), pathlib.Path(folder, "end.json"))


if __name__ == "__main__":
    keep(*sys.argv[1:])
