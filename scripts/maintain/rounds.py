"""Measure rungs in rounds of warm processes, one process for each rung.

A process imports a training script, warms the script's own Trainer up, and runs ten steps whenever it is asked. In a
round every process is asked once, one after the other, and the order rotates from round to round. An eager step takes
as long as the host needs, whose speed drifts within seconds: an eager round goes around several times. All processes
start anew several times, for compilation, tiles and memory layout are drawn at a start.

    python scripts/maintain/rounds.py '{"version": 2, "options": [], "steps": 10, "inbox": 0, "outbox": 1}'

starts such a process. It writes a line of JSON when it is warm and one for each line that it reads, and ends with its
input. How processes are talked to, their order and their groups stand in common/measuring/rounds.py.
"""

import contextlib
import functools
import itertools
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

if __name__ == "__main__":
    sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from common.command_line import Failure, progress
from common.measuring.rounds import PASSES, Process, Processes, chosen, in_groups, passes, start
from common.measuring.runs import OutOfMemory
from common.versions import load_version

AGAIN = " again"  # added to the name of the rung that runs under two names
WARM_S = 900  # seconds until all processes are warm: a cold compiler, and as many processes as rungs
ANSWER_S = 300  # seconds that ten steps may take
CONTEXT_MIB = 1024  # kept free for what a process holds beside its tensors: its context and its libraries' buffers
GRACE_S = 10  # seconds that a process has to end by itself, and as many after SIGTERM

# ---------------------------------------------------------------- the warm process


def load_script(version):
    if version != "peer":
        return load_version(version)
    from common.measuring.peers import peer_script

    return peer_script()


def memory_of(config):
    """Return what the process holds of its GPU's memory, and how much the GPU has, in MiB; None for a CPU's."""
    import torch

    if not config.on_gpu:
        return {"reserved_mib": 0, "gpu_mib": None}
    total = torch.cuda.get_device_properties(config.device).total_memory
    return {"reserved_mib": torch.cuda.max_memory_reserved(config.device) / 2**20, "gpu_mib": total / 2**20}


def serve(script, config, steps, inbox, answer):
    """Warm up, say so, and run the next steps for each line of the input."""
    data = script.load_data(config)
    trainer = script.Trainer(config)
    warm_s = trainer.warm_up(*script.batch(data, 0, config), trainer.initial)
    parameters = sum(p.numel() for p in trainer.model.parameters())
    told = {"warm_s": warm_s, "parts": config.parts, "parameters": parameters} | memory_of(config)
    answer(told | {"captured": trainer.graph is not None, "graph_reason": trainer.graph_reason})
    step = 0
    for _ in inbox:
        times = []
        for _ in range(steps):
            record = trainer.run(*script.batch(data, step, config))
            times.append(record["step_ms"])
            step += 1
        trained = script.parameters_trained(trainer)
        memory = script.peak_memory_mb(config)
        answer({"steps_ms": times, "loss": record["loss"], "parameters_trained": trained, "peak_mib": memory})


def work(request):
    """Run a warm process and return its exit status; errors end it as they end the script."""
    inbox = os.fdopen(request["inbox"])
    outbox = os.fdopen(request["outbox"], "w")

    def answer(content):
        print(json.dumps(content), file=outbox, flush=True)

    script = load_script(request["version"])
    config = script.parse_options(request["options"])
    try:
        script.set_up_backend(config)
        with config.one_stream():
            serve(script, config, request["steps"], inbox, answer)
    except BaseException as error:
        status, message = script.user_message(error)
        if message is None:
            raise
        print(message, file=sys.stderr)
        return status
    return 0


class WarmProcess(Process):
    """Hold a process that runs a rung's steps."""

    grace_s = GRACE_S

    def __init__(self, version, options, steps):
        super().__init__(start_rung, {"version": version, "options": options, "steps": steps})

    def end(self):
        """Let it end by itself, which frees a GPU in order."""
        self.let_go()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(GRACE_S)
        super().end()


def start_rung(request, log, pipes):
    # thirteen processes compile at the same time
    threads = {"TORCHINDUCTOR_COMPILE_THREADS": str(max(1, (os.cpu_count() or 1) // 4))}
    return start([sys.executable, __file__, request], log, pipes, env=threads | os.environ)


# ---------------------------------------------------------------- rounds


def with_pair(names, again):
    """Return the names with a second one for the A/A pair, half of the list away from the first."""
    place = names.index(again) + (len(names) + 1) // 2
    if place > len(names):
        place -= len(names)
    return [*names[:place], again + AGAIN, *names[place:]]


class Rounds:
    """Measure rungs in rounds, and collect the rounds and what each rung told, or why it failed.

    programs: {name: (version, options)}. told: {name: dictionary}, completed here. rounds: a list, added to here.
    """

    def __init__(self, programs, told, rounds, graph, steps):
        self.programs = programs
        self.told = told
        self.rounds = rounds
        self.graph = graph
        self.steps = steps
        self.failed = set()  # names, in this start

    def version_and_options(self, name):
        return self.programs[name.removesuffix(AGAIN)]

    def note(self, name, **found):
        self.told.setdefault(name, {}).update(found)

    def fail(self, name, error):
        status = "not available" if error.status == 2 else "failed"
        self.note(name, status=status, reason=str(error))
        self.failed.add(name)
        progress(f"  {name}: {status}: {error}")

    def not_captured(self, reason):
        """Return the error of a step that is not in a graph; without memory for it the rung is measured later."""
        if "out of memory" in reason:
            return OutOfMemory(1, "out of memory")
        return Failure(2, f"not captured: {reason}")

    def fits(self, names):
        """Return whether the GPU has memory for these processes at a time.

        One that was never warm counts as the largest that was.
        """
        told = {name: found for name, found in self.told.items() if "reserved_mib" in found}
        room = next((found["gpu_mib"] for found in told.values()), None)
        if room is None:  # nothing is known yet, or it is a CPU
            return True
        known = {name.removesuffix(AGAIN): found["reserved_mib"] for name, found in told.items()}
        largest = max(known.values())
        return sum(known.get(name.removesuffix(AGAIN), largest) + CONTEXT_MIB for name in names) <= room

    def has_room(self, name, running):
        """Return whether one more process may start beside those that run.

        The very first one runs alone, and so shows its size.
        """
        seen = any("reserved_mib" in found for found in self.told.values())
        return not running or (seen and self.fits([*running, name]))

    def warm(self, names, running, timeout):
        """Start the processes that memory has room for, wait until they are warm, and return who had no room.

        running: Processes, filled here. No compiler runs any more when this returns.
        """
        until = time.monotonic() + timeout
        waiting = list(names)
        warming = []
        crowded = []
        while waiting or warming:
            # two are tried whatever is known, for without a round of both they cannot be compared
            while waiting and (len(names) < 3 or self.has_room(waiting[0], running.alive)):
                name = waiting.pop(0)
                version, options = self.version_and_options(name)
                running.add(name, functools.partial(WarmProcess, version, options, self.steps))
                warming.append(name)
            if not warming:
                return crowded + waiting
            name = warming.pop(0)
            try:
                found = running.alive[name].answer(max(0.0, until - time.monotonic()))
                if self.graph and not found["captured"]:
                    raise self.not_captured(found["graph_reason"])
            except Failure as error:
                running.end(name)
                if isinstance(error, OutOfMemory) and len(names) > 1:
                    crowded.append(name)
                else:
                    self.fail(name, error)
                continue
            self.note(name, **found)
        return crowded

    def ask(self, name, running):
        """Return the times of a process's next steps; None, and the process ended, if it failed."""
        running.alive[name].ask()
        try:
            found = running.alive[name].answer(ANSWER_S)
            if found["parameters_trained"] != self.told[name]["parameters"]:
                raise Failure(1, f"trained {found['parameters_trained']:,} parameters only")
        except Failure as error:
            running.end(name)
            self.fail(name, error)
            return None
        times = [round(ms, 4) for ms in found.pop("steps_ms")]
        self.note(name, **found, status="ok")  # a reason of another start stays
        return times

    def turn(self, names, running, start, turn):
        """Ask every process, eager ones several times; keep what they measured as one round."""
        times = {}
        turns = itertools.repeat(turn, 1 if self.graph else PASSES)
        for name in passes(names, turns):
            if name not in running.alive:
                continue
            measured = self.ask(name, running)
            if measured is None:
                times.pop(name, None)
            else:
                times.setdefault(name, []).extend(measured)
        if times:
            self.rounds.append({"start": start, "turn": turn, "steps_ms": times})

    def start(self, names, start, turns, timeout=WARM_S):
        """Start a process for every name, measure these turns, and end all; return the names without room."""
        began = time.monotonic()
        with Processes() as running:
            crowded = self.warm(names, running, timeout)
            progress(f"  start {start + 1}: {len(running.alive)} processes warm after {time.monotonic() - began:.0f} s")
            for turn in turns:
                began = time.monotonic()
                self.turn(names, running, start, turn)
                progress(f"  start {start + 1}, round {turn + 1}: {time.monotonic() - began:.0f} s")
        return crowded

    def group(self, pairs):
        """Return the names of as many pairs as memory has room for, in the order of a round."""
        found = chosen(pairs, self.fits)
        names = [name for name in self.programs if name in found]
        for name in names:
            if name + AGAIN in found:
                return with_pair(names, name)
        return names

    def measure(self, pairs, start, turns):
        """Measure one start; the names of a pair run at the same time, in as few groups as memory allows.

        pairs: tuples of names, or of one name that is compared with none.
        """
        self.failed = set()
        groups = 0

        def work(names, alone):
            nonlocal groups
            groups += 1
            if groups > 1:
                progress(f"  no room with the others, so measured next: {' '.join(sorted(names))}")
            absent = self.start(names, start, turns)
            if alone:
                for name in absent:
                    self.fail(name, OutOfMemory(1, "out of memory"))
            return absent, self.failed

        in_groups(pairs, self.group, work)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(work(json.loads(sys.argv[1])))
