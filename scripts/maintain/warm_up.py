"""Measure from outside how long training scripts take from their start to their first measured step, and where it goes.

    python scripts/maintain/warm_up.py --presets small,medium --results FOLDER
    python scripts/maintain/warm_up.py --results FOLDER --append --time-limit 500    # what is missing

A script starts with caches of its own that are empty (Triton's, Inductor's and the driver's), then with what that start
left in them. All scripts take turns: --rounds says how often. A start is timed by the lines that the script prints, and
the interpreter's start and all imports count. FOLDER/warm_up.json keeps every start.

Exit status: 0; 1 if a script failed or --time-limit left some out; 2 for a bad option; 130 if interrupted.
"""

import functools
import json
import os
import pathlib
import statistics
import sys
import tempfile
import time

if __name__ == "__main__":
    sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from common.command_line import PRESETS, Failure, Parser, listed, on_cpu, positive, progress, refuse_protected, run_tool
from common.files import errors_of, read_object
from common.machine.description import SAME_RUN, describe, folder_in, hash_of
from common.measuring.runs import TimeLimit, train
from common.ratios import counted
from common.tables import text_table, write_whole
from common.versions import load_version
from maintain import rungs

PROGRAM = "warm_up.py"
FILE = "warm_up.json"
PARTS = ("start-small", "start-medium")  # of a recorded run
WAYS = ("empty", "filled")
CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "CUDA_CACHE_PATH")
STEPS = ["--num-steps", "1"]
# Phase -> what its last line begins with. The first begins with the process.
PHASES = {
    "imports, model": "warm-up    step 1 of",
    "first step": "warm-up    steps 2 to",
    "other steps, graph": "step     1/",
}
KNOWN = {rung.name: rung for rung in [*rungs.LADDER, *rungs.PEERS] if not rung.tuned}
TITLES = {  # of the rungs that are started unless --rungs says which
    "b": "version 1",
    "f": "version 2",
    "g": "version 2, compiled",
    "h": "version 3",
    "i": "version 3, fp8",
    "j": "version 3, compiled",
    "k": "version 4",
    "peer": "Hugging Face, compiled",
    "liger": "Hugging Face, Liger",
    "updated": "Hugging Face, 16-bit weights, compiled AdamW",
}


def title_of(name):
    return TITLES.get(name, KNOWN[name].idea)


class Watch:
    """Note when a script's phases end, by the lines that it prints."""

    def __init__(self):
        self.last = time.monotonic()
        self.phases = {}

    def tell(self, line):
        for phase, words in PHASES.items():
            if phase not in self.phases and line.strip().startswith(words):
                now = time.monotonic()
                self.phases[phase] = now - self.last
                self.last = now


def started(rung, options, caches):
    """Start a rung's script; return the seconds of its phases. Failure if it fails or prints other lines."""
    watch = Watch()
    environment = os.environ | {name: str(caches / name.lower()) for name in CACHES}
    train(rungs.script_of(rung), [*options, *rung.options, *STEPS], environment=environment, tell=watch.tell)
    if missing := PHASES.keys() - watch.phases:
        raise Failure(1, f"{rung.name} printed no line that ends: {', '.join(sorted(missing))}")
    return watch.phases


def both_ways(rung, options):
    """Return a start with empty caches and one with what that left in them, or the reason why it failed."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            return {way: started(rung, options, pathlib.Path(folder)) for way in WAYS}
        except Failure as failure:
            progress(f"failed: {failure}")
            return {"reason": str(failure)}


def measure_round(content, preset, names, options, number, limit, save):
    """Start each rung twice, unless this round has it; return how many rungs are left."""
    left = 0
    for name in names:
        starts = content["presets"].setdefault(preset, {}).setdefault(name, [])
        if len(starts) > number:
            continue
        if not limit.room():
            left += 1
            continue
        progress(f"{preset}, round {number + 1}: {title_of(name)}")
        starts.append(limit.timed(functools.partial(both_ways, KNOWN[name], ["--preset", preset, *options])))
        save()
    return left


def finished(starts):
    """Return the starts that did not fail."""
    return [start for start in starts if "reason" not in start]


def total_s(starts, way):
    """Return the seconds from start to first step, of each start with empty or with filled caches."""
    return [sum(start[way].values()) for start in finished(starts)]


def phases_s(starts, way):
    """Return {phase: its median seconds}."""
    timed = [start[way] for start in finished(starts)]
    return {phase: statistics.median(found[phase] for found in timed) for phase in PHASES}


def with_range(seconds):
    """Return the median of seconds, the smallest and the largest."""
    return f"{statistics.median(seconds):.1f} ({min(seconds):.1f} to {max(seconds):.1f})"


def text_of(preset, found):
    """Return the starts of a preset as a table: medians with smallest and largest."""
    header = ["", "caches", "seconds", *PHASES]
    lines = []
    failed = []
    for name, starts in found.items():
        for way in WAYS:
            if total := total_s(starts, way):
                cells = [f"{seconds:.1f}" for seconds in phases_s(starts, way).values()]
                lines.append([title_of(name), way, with_range(total), *cells])
        failed += [f"{name} failed: {start['reason']}" for start in starts if "reason" in start]
    return "\n".join([preset, text_table(header, lines), *dict.fromkeys(failed)])


def parts_of(recorded):
    """Return the contents of both parts of a recorded run, or of the newest that has them; [] where one lacks."""
    found = [recorded.holding(part).json(part, FILE) for part in PARTS]
    return found if all(found) else []


def presets_of(parts):
    """Return {preset: {rung: its starts}}, the small preset first."""
    return {preset: starts for part in parts for preset, starts in part["presets"].items()}


def content_of(file, record, options):
    """Return what the file holds of this machine, commit and options; Failure if it holds another's."""
    if not file.exists():
        texts = {name: hash_of(rungs.script_of(rung)) for name, rung in KNOWN.items()}
        return {"record": record, "options": options, "script_sha256": texts, "presets": {}}
    with errors_of(file):
        content = read_object(file, "file of starts")
        same = all(content["record"].get(key) == record[key] for key in ("host", "commit", *SAME_RUN))
    if not same or content["options"] != options:
        raise Failure(2, f"{file} is of another machine, commit or options: choose another --results folder")
    return content


def measure(arguments, argv):
    """Measure what the file lacks, and print it; return the exit status."""
    file = arguments.results / FILE
    refuse_protected(file)
    content = content_of(file, describe([PROGRAM, *argv]), arguments.options)
    arguments.results.mkdir(parents=True, exist_ok=True)

    def save():
        write_whole(file, json.dumps(content, indent=1) + "\n")

    limit = TimeLimit(arguments.time_limit)
    status = 0
    left = 0
    try:
        progress("a start that isn't kept: it reads the libraries from the disk")
        with tempfile.TemporaryDirectory() as folder:
            started(KNOWN["b"], ["--preset", "tiny", *arguments.options], pathlib.Path(folder))
        for number in range(arguments.rounds):
            for preset in arguments.presets:
                left += measure_round(content, preset, arguments.rungs, arguments.options, number, limit, save)
    except KeyboardInterrupt:
        progress("interrupted: the starts that were measured are kept")
        status = 130
    print("\n\n".join(text_of(preset, found) for preset, found in content["presets"].items()))
    print(f"\n{file}")
    if left:
        print(f"not measured: {counted(left, 'start')}; repeat the command with --append")
    failed = any("reason" in start for found in content["presets"].values() for s in found.values() for start in s)
    return status or int(bool(left) or failed)


def parse_arguments(argv):
    """Return the checked arguments; options are those of the training scripts."""
    parser = Parser(PROGRAM, __doc__, with_json=False)
    add = parser.add_argument
    add("--presets", type=listed(PRESETS), help="tiny, small, medium (small,medium; tiny on a CPU)")
    add("--rungs", type=listed(), default=[*TITLES], help=f"rungs to start, by name ({','.join(TITLES)})")
    add("--rounds", type=positive, default=3, help="starts of each kind (%(default)s)")
    add("--time-limit", type=positive, help="end after this many seconds; --append does the rest")
    add("--results", type=pathlib.Path, metavar="FOLDER", required=True)
    add("--append", action="store_true", help="keep what FOLDER holds and run what it lacks")
    arguments, arguments.options = parser.parse_known_args(argv)
    arguments.presets = arguments.presets or (["tiny"] if on_cpu(arguments.options) else ["small", "medium"])
    if unknown := [name for name in arguments.rungs if name not in KNOWN]:
        parser.error(f"--rungs: {unknown[0]} isn't one of {', '.join(KNOWN)}")
    file = arguments.results / FILE
    if file.exists() and not arguments.append:
        parser.error(f"{file} exists already: add --append, or choose another --results folder")
    if named := folder_in(arguments.options):
        parser.error(named)
    load_version(1).parse_options(arguments.options)  # refuses an option that it does not know
    return arguments


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    arguments = parse_arguments(argv)
    return run_tool(PROGRAM, lambda: measure(arguments, argv))


if __name__ == "__main__":
    sys.exit(main())
