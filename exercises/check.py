#!/usr/bin/env python3
"""Hands-on kernels: check your answer, ask for a hint, compare with the solution.

    python exercises/check.py                    # list the exercises by session, and your progress
    python exercises/check.py 02                 # check exercises/02_*/exercise.py
    python exercises/check.py 02 --watch         # check again whenever you save, until it passes
    python exercises/check.py 02 --target gfx942 # check it on an AMD GPU's instructions, without the GPU
    python exercises/check.py hint 02            # show the next hint; `hint 02 1` shows the first one again
    python exercises/check.py solution 02        # compare your file with the solution, once you've passed
    python exercises/check.py scoreboard         # your GB/s compared with recorded ones
    python exercises/check.py new my_layernorm   # a folder for a kernel of your own, see YOUR_OWN_KERNEL.md
    python exercises/check.py my_layernorm       # check it; --target as above, and --time to time it on a GPU
    python exercises/check.py verify             # for maintainers: check stubs, hints, solutions and wrong answers
    python exercises/check.py verify --solutions # the same without the hundreds of wrong answers

Without a GPU the kernels run in Triton's interpreter, one program after another. The checker notices if two programs
store different values in one place, but it can't see every race. What passes must compile, too: the checker compiles it
for gfx942, and runs none of that.
"""

import difflib
import json
import os
import pathlib
import shlex
import shutil
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "scripts"))

from answers import exercises, folder_of, grade, hints, is_started, relative, solution_of
from common.command_line import Failure, Parser, run_tool
from common.formulas.occupancy import TARGETS
from common.tables import write_whole
from sessions import SESSIONS, kernels

AMD_TARGETS = [name for name, target in TARGETS.items() if target.backend == "hip"]
EXECUTION_TIMEOUT = 1800  # seconds; a case takes some, and an attention kernel a minute
PROGRESS = HERE / ".progress.json"
TEMPLATE = HERE / "own_kernel_template"


def title(folder):
    return (folder / "README.md").read_text(encoding="utf-8").splitlines()[0].lstrip("# ")


def read_progress():
    """Return {number: {passed, given_up, hints: how many were shown, failed: since the last hint, speed}}.

    What is damaged counts as not done.
    """
    return sound_progress()[0]


def sound_progress():
    """Return the progress, and whether the file holds more, which is damaged."""
    if not PROGRESS.is_file():  # reading a pipe would wait forever
        return {}, False
    try:
        found = json.loads(PROGRESS.read_text(encoding="utf-8"))
    except OSError:
        return {}, False
    except (ValueError, RecursionError):
        return {}, True
    if not isinstance(found, dict):
        return {}, True
    progress = {number: state for number, state in found.items() if is_sound(state)}
    return progress, len(progress) < len(found)


def is_sound(state):
    """Return True for what remember() writes."""
    if not isinstance(state, dict) or type(state.get("hints", 0)) is not int or state.get("hints", 0) < 0:
        return False
    speed = state.get("speed") or [1, 1]
    return (
        isinstance(speed, list)
        and len(speed) == 2
        and all(type(rate) in (int, float) and 0 < rate < 1e9 for rate in speed)  # GB/s
    )


def remember(folder, **changes):
    """Save progress after all that matters more is printed; where that is impossible, say so."""
    progress, damaged = sound_progress()
    progress[folder.name[:2]] = progress.get(folder.name[:2], {}) | changes
    try:
        if PROGRESS.exists() and not PROGRESS.is_file():
            raise OSError(None, "it isn't a file")
        if damaged:
            keep_damaged()
        write_whole(PROGRESS, json.dumps(progress, indent=1) + "\n")
    except OSError as error:
        print(f"check.py: cannot save your progress: {PROGRESS}: {error.strerror}", file=sys.stderr)
    except Failure as error:
        print(f"check.py: cannot save your progress: {error}", file=sys.stderr)


def keep_damaged():
    """Copy a damaged file of progress to a name that is free, before it is written anew."""
    number = 1
    while (copy := PROGRESS.with_name(f"{PROGRESS.name}.damaged{number}")).exists():
        number += 1
    shutil.copyfile(PROGRESS, copy)
    print(f"check.py: a part of your progress is damaged: {copy} keeps it", file=sys.stderr)


def progress_of(folder):
    return read_progress().get(folder.name[:2], {})


# ---------------------------------------------------------------- commands


def show_list():
    progress, folders = read_progress(), exercises()
    for session, (name, _, _) in SESSIONS.items():
        if kernels(session):
            print(f"session {session}, {name}")
        for number in kernels(session):
            folder, state = folders[number], progress.get(number, {})
            started = is_started((folder / "exercise.py").read_text(encoding="utf-8", errors="replace"))
            words = ["passed"] if state.get("passed") else ["started"] if started else []
            words += ["solution seen"] if state.get("given_up") else []
            print(f"{number}  {title(folder):50s} {', '.join(words)}".rstrip())
    print("New to Triton? Start with exercises/PRIMER.md. Then read an exercise's README.md and run: check.py NN")
    return 0


def check(folder):
    """Check the answer in exercise.py and return the exit status."""
    number, path = folder.name[:2], folder / "exercise.py"
    if not is_started(path.read_text(encoding="utf-8", errors="replace")):
        print(f"{number} not started: read {relative(folder / 'README.md')}, then write your lines between")
        print(f"   # TODO and # end of TODO in {relative(path)}")
        return 1
    verdict = grade([(folder, path)])[0]
    if verdict["passed"]:
        print(f"{number} passed: {verdict['sentence']}\n   compare: python exercises/check.py solution {number}")
        print_left(verdict)
        remember(folder, passed=True, **({"speed": verdict["speed"]} if verdict["speed"] else {}))
        return 0
    case = f" in case {verdict['case']}" if verdict["case"] else ""
    print(f"{number} failed{case}\n   {verdict['sentence']}\n   stuck? python exercises/check.py hint {number}")
    print_left(verdict)
    remember(folder, failed=True)
    return 1


def print_left(verdict):
    """Name what an answer let run, which the checker has ended."""
    if verdict["left"]:
        print(f"   still ran after the verdict, so the checker ended it: {'; '.join(verdict['left'])}")


def check_on(folder, target):
    """Check the answer in exercise.py as an AMD GPU's instructions, and return the exit status."""
    number, path = folder.name[:2], folder / "exercise.py"
    if not is_started(path.read_text(encoding="utf-8", errors="replace")):
        raise Failure(1, f"{number} is not started: {relative(path)}")
    from grading import load_task

    if not load_task(folder).kernel:
        raise Failure(2, f"exercise {number} launches no kernel, so {target} has nothing to execute: omit --target")
    print(f"{number} as the instructions of {target}, which scripts/amd/README.md explains:", flush=True)
    verdict = grade([(folder, path)], EXECUTION_TIMEOUT, target)[0]
    if verdict["passed"]:
        print(f"{number} is right on {target}'s instructions: {verdict['sentence']}")
        print_left(verdict)
        return 0
    case = f" in case {verdict['case']}" if verdict["case"] else ""
    print(f"{number} is wrong on {target}'s instructions{case}\n   {verdict['sentence']}")
    print_left(verdict)
    return 1


def watch(folder):
    """Check whenever the file is saved, until it passes."""
    path = folder / "exercise.py"
    while True:
        saved = path.stat().st_mtime_ns
        try:
            if check(folder) == 0:
                return 0
        except Failure as error:
            print(f"   {error}")
        print(f"   waiting for you to save {relative(path)}; Ctrl-C ends", flush=True)
        while path.exists() and path.stat().st_mtime_ns == saved:
            time.sleep(0.3)
        while not path.exists():  # some editors replace the file
            time.sleep(0.3)


def show_hint(folder, wanted):
    """Show hint number `wanted`, or the next one, which opens after another failed check."""
    texts, state = hints(folder), progress_of(folder)
    shown = min(state.get("hints", 0), len(texts))
    if wanted is None:
        opens = shown == 0 or (state.get("failed", False) and shown < len(texts))
        wanted = shown + 1 if opens else shown
    if not 1 <= wanted <= len(texts):
        raise Failure(2, f"exercise {folder.name[:2]} has hints 1 to {len(texts)}, not {wanted}")
    print(f"hint {wanted} of {len(texts)}\n{texts[wanted - 1]}")
    if wanted > shown:
        remember(folder, hints=wanted, failed=False)
    elif wanted < len(texts):
        print("(the next hint opens after another failed check)")
    return 0


def show_solution(folder, give_up):
    """Print the difference between the participant's file and the solution."""
    number, mine, solution = folder.name[:2], folder / "exercise.py", solution_of(folder)
    passed = progress_of(folder).get("passed")
    if not passed and not give_up:
        raise Failure(1, f"exercise {number} is not passed yet: ask for a hint, or add --give-up")
    texts = (path.read_text(encoding="utf-8", errors="replace").splitlines() for path in (mine, solution))
    lines = list(difflib.unified_diff(*texts, "yours", "solution", lineterm=""))
    print("\n".join(lines) or "your file is the solution, letter for letter")
    if not passed:
        remember(folder, given_up=True)
    return 0


def new_kernel(folder, function=None):
    """Make a folder for a kernel of the user's own, or for a function that exists: "file.py:function"."""
    folder = pathlib.Path(folder)
    if not folder.name.isidentifier():
        raise Failure(2, f"{folder.name!r} is no name for a function: use letters, digits and _")
    if folder.exists():
        raise Failure(2, f"{folder} exists already: choose another name")
    files = ["task.py"] if function else ["task.py", "kernel.py"]
    texts = {name: (TEMPLATE / name).read_text(encoding="utf-8").replace("my_kernel", folder.name) for name in files}
    if function:
        file, _, name = function.rpartition(":")
        if not pathlib.Path(file).is_file():
            raise Failure(2, f"{function} names no file: give its path, a colon and the function, such as norm.py:norm")
        path = os.path.relpath(pathlib.Path(file).resolve(), folder.resolve())
        named = json.dumps(f"{path}:{name}", ensure_ascii=False)  # its quotes and escapes are Python's, too
        texts["task.py"] = texts["task.py"].replace(f'"kernel.py:{folder.name}"', named)
    folder.mkdir(parents=True)
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8", errors="backslashreplace")
    then = "" if function else f"then write {folder / 'kernel.py'}, "
    print(f"made {folder}: put the shapes and the formula into {folder / 'task.py'}, {then}then run:")
    print(f"   python {shlex.quote(relative(HERE / 'check.py'))} {shlex.quote(str(folder))}")
    return 0


def check_own(folder, target, timed):
    """Check the kernel in a user's folder, print what it says, and return the exit status."""
    if target and timed:
        raise Failure(2, "--time runs the kernel on a GPU, and --target without one: leave one out")
    folder = pathlib.Path(folder).resolve()
    job = (folder, "time" if timed else "check")
    (verdict,) = grade([job], EXECUTION_TIMEOUT, target, "own_kernel.py")
    if verdict.get("kind") == "no GPU":
        raise Failure(2, verdict["sentence"])
    right, wrong = ("is right", "is wrong") if target else ("passed", "failed")
    on = f" on {target}'s instructions" if target else ""
    if verdict["passed"]:
        print("\n".join([f"{folder.name} {right}{on}: {verdict['sentence']}", *verdict["lines"]]))
        print_left(verdict)
        return 0
    case = f" in case {verdict['case']}" if verdict["case"] else ""
    print(f"{folder.name} {wrong}{on}{case}\n   {verdict['sentence']}")
    print_left(verdict)
    return 1


def show_scoreboard():
    """Print the participant's GB/s beside those of version 3 and PyTorch in the newest recorded run."""
    from grading import load_task
    from speed import recorded_speed

    def cells(speed):
        return f"{speed[0]:,.0f} ({100 * speed[0] / speed[1]:.0f} %)" if speed else "-"

    progress, device = read_progress(), None
    rows = [("", "exercise", "yours", "version 3", "PyTorch")]
    for number, folder in exercises().items():
        speed = load_task(folder).speed
        if speed:
            recorded = recorded_speed(speed.operation) or {}
            device = recorded.get("device", device)
            others = [cells(recorded.get(name)) for name in ("V3", "PyTorch")]
            rows.append((number, title(folder), cells(progress.get(number, {}).get("speed")), *others))
    print("GB/s, and the percentage of the same GPU's copy bandwidth")
    for number, name, *numbers in rows:
        print(f"{number:2s}  {name:42s}" + "".join(f"{text:>16s}" for text in numbers))
    print(f"version 3 and PyTorch: recorded in bfloat16 on one {device}. Yours: float32, when a check passes on a GPU")
    return 0


# ---------------------------------------------------------------- main


def parse(argv):
    parser = Parser("check.py", __doc__, with_json=False)
    commands = "list, NN, hint, solution, scoreboard, verify, new, or the folder of a kernel of your own"
    parser.add_argument("command", nargs="?", default="list", help=commands)
    parser.add_argument("arguments", nargs="*", metavar="NN", help="number of the exercise, then of the hint")
    parser.add_argument("--watch", action="store_true", help="check again whenever the file is saved")
    on_amd = f"execute an AMD GPU's instructions in our interpreter, without the GPU: {', '.join(AMD_TARGETS)}"
    parser.add_argument("--target", choices=AMD_TARGETS, metavar="GPU", help=on_amd)
    parser.add_argument("--time", action="store_true", help="time a kernel of your own beside PyTorch, on a GPU")
    parser.add_argument("--give-up", action="store_true", help="show the solution before you have passed")
    parser.add_argument("--solutions", action="store_true", help="verify: leave out the wrong answers")
    options, rest = parser.parse_known_intermixed_args(argv)
    if rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}{parser.nearest(rest)}")
    return options


def main(argv=None):
    options = parse(argv)
    command, arguments = options.command, options.arguments
    if command == "new" and len(arguments) in (1, 2):
        return new_kernel(*arguments)
    given = pathlib.Path(command).resolve()
    for number, folder in exercises().items():
        if given in (folder, folder / "exercise.py") and not command.isdecimal():
            raise Failure(2, f"{command} is exercise {number}: check.py {number}")
    if not command.isdecimal() and not arguments and pathlib.Path(command, "task.py").is_file():
        return check_own(command, options.target, options.time)
    if pathlib.Path(command).is_dir() and not command.isdecimal():
        raise Failure(2, f"{command} has no task.py: make a folder with check.py new NAME")
    if pathlib.Path(command).name != command:
        raise Failure(2, f"there is no folder {command}: make it with check.py new {command}")
    if not all(argument.isdecimal() for argument in arguments):
        raise Failure(2, f"{command} takes numbers, got {' '.join(arguments)}; for example: check.py hint 02")
    if command == "verify":
        from verify import verify

        return verify(arguments, options.solutions)
    if command.isdecimal() and not arguments:
        folder = folder_of(command)
        if options.target:
            return check_on(folder, options.target)
        return watch(folder) if options.watch else check(folder)
    if command in ("list", "scoreboard") and not arguments:
        return show_list() if command == "list" else show_scoreboard()
    if command == "hint" and len(arguments) in (1, 2):
        return show_hint(folder_of(arguments[0]), int(arguments[1]) if arguments[1:] else None)
    if command == "solution" and len(arguments) == 1:
        return show_solution(folder_of(arguments[0]), options.give_up)
    used = "list, NN, hint NN [n], solution NN [--give-up], scoreboard, verify, new NAME or a folder with a task.py"
    raise Failure(2, f"use {used}; see --help")


if __name__ == "__main__":
    sys.exit(run_tool("check.py", main))
