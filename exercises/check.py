#!/usr/bin/env python3
"""Hands-on kernels: check an answer, ask for a hint, see the solution.

    python exercises/check.py                    # the exercises, and how far you are
    python exercises/check.py 02                 # check exercises/02_*/exercise.py
    python exercises/check.py 02 --watch         # again whenever the file is saved, until it is right
    python exercises/check.py hint 02            # the next hint; `hint 02 1` shows the first one again
    python exercises/check.py solution 02        # once 02 is right; before that with --give-up
    python exercises/check.py verify             # for maintainers: stubs, hints, solutions and wrong answers

Without a GPU the kernels run in Triton's interpreter: right results, one program after another, so that races between
programs do not show.
"""

import argparse
import ast
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "scripts"))

from common.command_line import Failure, run_tool
from common.versions import SCRIPTS

PROGRESS = HERE / ".progress.json"
TIMEOUT = 120  # seconds an answer may take; the slowest solution needs a few
REGION = re.compile(r"^ *# TODO\b.*?^ *# end of TODO\n", re.DOTALL | re.MULTILINE)


def exercises():
    """Number -> folder."""
    return {folder.name[:2]: folder for folder in sorted(HERE.glob("[0-9][0-9]_*")) if folder.is_dir()}


def folder_of(number):
    found = exercises()
    if number.zfill(2) not in found:
        raise Failure(2, f"there is no exercise {number}: choose one of {', '.join(found)}")
    return found[number.zfill(2)]


def solution_of(folder):
    """solution.py, which inspect_kernels.py compiles for every GPU; answer.py where no kernel is launched."""
    return next(path for path in (folder / "solution.py", folder / "answer.py") if path.is_file())


def title(folder):
    return (folder / "README.md").read_text(encoding="utf-8").splitlines()[0].lstrip("# ")


def hints(folder):
    """The sections of hints.md, each of which starts with '## '."""
    text = (folder / "hints.md").read_text(encoding="utf-8")
    return [section.split("\n", 1)[1].strip() for section in re.split(r"^## ", text, flags=re.MULTILINE)[1:]]


def read_progress():
    """Number -> {passed, given_up, hints: how many were shown, failed: a check failed since the last hint}."""
    try:
        return json.loads(PROGRESS.read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return {}


def remember(folder, **changes):
    progress = read_progress()
    progress[folder.name[:2]] = progress.get(folder.name[:2], {}) | changes
    try:
        PROGRESS.write_text(json.dumps(progress, indent=1) + "\n")
    except OSError as error:
        print(f"check.py: progress is not remembered: {PROGRESS}: {error.strerror}", file=sys.stderr)


def progress_of(folder):
    return read_progress().get(folder.name[:2], {})


# ---------------------------------------------------------------- answers


def is_started(text):
    """Whether any region between '# TODO' and '# end of TODO' holds more than comments; True without such regions."""
    regions = REGION.findall(text)
    lines = [line.strip() for region in regions for line in region.splitlines()]
    return not regions or any(line and line != "pass" and not line.startswith("#") for line in lines)


def same_outside_regions(stub, solution):
    """Whether the solution is the stub with lines in place of each of its regions."""
    pieces = REGION.split(stub)
    return re.fullmatch("(.+)".join(map(re.escape, pieces)), solution, re.DOTALL) is not None


def grade(jobs, timeout=TIMEOUT):
    """Verdicts of grading.py on [folder, file] pairs, in a process that cannot take this one down or hang it."""
    with tempfile.TemporaryDirectory() as scratch:
        job_file, verdict_file = pathlib.Path(scratch, "jobs.json"), pathlib.Path(scratch, "verdicts.json")
        job_file.write_text(json.dumps([[str(folder), str(path)] for folder, path in jobs]))
        child = [sys.executable, "-W", "ignore", str(HERE / "grading.py"), str(job_file), str(verdict_file)]
        try:
            done = subprocess.run(child, timeout=timeout, stderr=subprocess.PIPE, text=True)
        except subprocess.TimeoutExpired:
            raise Failure(1, f"not finished after {timeout} s: does a loop in the kernel end?") from None
        verdicts = json.loads(verdict_file.read_text()) if verdict_file.exists() else []
    if len(verdicts) < len(jobs):
        missing = re.search(r"No module named '(\w+)'", done.stderr)
        if missing:
            raise Failure(1, f"{sys.executable} has no {missing[1]}: run scripts/quickstart.sh first")
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise Failure(
            1, f"the check of {jobs[len(verdicts)][1]} ended with status {done.returncode}, as when a kernel reaches "
            f"far outside its tensors: {last}"
        )  # fmt: skip
    return verdicts


# ---------------------------------------------------------------- commands


def show_list():
    progress = read_progress()
    for number, folder in exercises().items():
        state = progress.get(number, {})
        started = is_started((folder / "exercise.py").read_text(encoding="utf-8"))
        word = "passed" if state.get("passed") else "started" if started else ""
        word += ", solution seen" if state.get("given_up") else ""
        print(f"{number}  {title(folder):50s} {word}".rstrip())
    print("next: python exercises/check.py NN, with the number of an exercise whose README.md you have read")


def check(folder):
    """Check the answer in exercise.py; returns the exit status."""
    number, path = folder.name[:2], folder / "exercise.py"
    if not is_started(path.read_text(encoding="utf-8")):
        print(f"{number} not started: read {relative(folder / 'README.md')}, then write between the two comments")
        print(f"   of {relative(path)}")
        return 1
    verdict = grade([(folder, path)])[0]
    if verdict["passed"]:
        remember(folder, passed=True)
        print(f"{number} passed: {verdict['sentence']}; compare with: python exercises/check.py solution {number}")
        return 0
    remember(folder, failed=True)
    case = f" in case {verdict['case']}" if verdict["case"] else ""
    print(f"{number} failed{case}\n   {verdict['sentence']}\n   stuck? python exercises/check.py hint {number}")
    return 1


def relative(path):
    return os.path.relpath(path)


def watch(folder):
    """Check whenever the file is saved, until it is right."""
    path = folder / "exercise.py"
    while True:
        saved = path.stat().st_mtime_ns
        try:
            if check(folder) == 0:
                return 0
        except Failure as error:
            print(f"   {error}")
        print(f"   waiting for {relative(path)} to be saved, Ctrl-C ends", flush=True)
        while path.exists() and path.stat().st_mtime_ns == saved:
            time.sleep(0.3)
        while not path.exists():  # some editors replace the file
            time.sleep(0.3)


def show_hint(folder, wanted):
    """Hint number `wanted`, or the next one, which opens when a check has failed since the last."""
    texts, state = hints(folder), progress_of(folder)
    shown = state.get("hints", 0)
    if wanted is None:
        opens = shown == 0 or (state.get("failed", False) and shown < len(texts))
        wanted = shown + 1 if opens else shown
    if not 1 <= wanted <= len(texts):
        raise Failure(2, f"exercise {folder.name[:2]} has hints 1 to {len(texts)}, not {wanted}")
    print(f"hint {wanted} of {len(texts)}\n{texts[wanted - 1]}")
    if wanted > shown:
        remember(folder, hints=wanted, failed=False)
    elif wanted < len(texts):
        print("(the next hint opens after another check that fails)")
    return 0


def show_solution(folder, give_up):
    number = folder.name[:2]
    if not progress_of(folder).get("passed"):
        if not give_up:
            raise Failure(1, f"exercise {number} is not passed yet: try a hint, or add --give-up")
        remember(folder, given_up=True)
    print(solution_of(folder).read_text(encoding="utf-8"), end="")
    return 0


# ---------------------------------------------------------------- verify


def kernels(path):
    """Name -> source text, decorators included, of the kernels of a file."""
    source = path.read_text(encoding="utf-8")
    lines, found = source.splitlines(), {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef) and node.decorator_list:
            end = node.end_lineno
            while lines[end : end + 1] and lines[end].startswith(" "):  # comments belong to it as well
                end += 1
            found[node.name] = "\n".join(lines[node.decorator_list[0].lineno - 1 : end])
    return found


def faults_of(folder, of_version3):
    """Sentences on what is wrong with an exercise's files, before anything is run."""
    stub, solution = (path.read_text(encoding="utf-8") for path in (folder / "exercise.py", solution_of(folder)))
    if is_started(stub):
        yield "exercise.py is started: git restore it"
    elif not same_outside_regions(stub, solution):
        yield f"exercise.py and {solution_of(folder).name} differ outside the TODO regions"
    if len(hints(folder)) != 3 or not all(hints(folder)):
        yield "hints.md needs three sections that start with ##"
    if len((folder / "README.md").read_text(encoding="utf-8").splitlines()) > 60:
        yield "README.md is longer than a page of 60 lines"
    for name, text in kernels(solution_of(folder)).items():
        if name in of_version3 and text != of_version3[name]:
            yield f"{name} of solution.py is not that of tiny_llama_v3.py: verify --fix copies it"


def copy_kernels(folder, of_version3):
    """Bring the kernels shared with tiny_llama_v3.py to its text; those with a TODO stay as they are."""
    for path in (solution_of(folder), folder / "exercise.py"):
        text = path.read_text(encoding="utf-8")
        for name, old in kernels(path).items():
            if name in of_version3 and not REGION.search(old + "\n"):
                text = text.replace(old, of_version3[name])
        path.write_text(text, encoding="utf-8")


def wrong_answers(folder, scratch):
    """(name, file, mistake) of each typical mistake: the solution with one text replaced."""
    from grading import load_task

    solution = solution_of(folder).read_text(encoding="utf-8")
    for i, (name, mistake) in enumerate(load_task(folder).mistakes.items()):
        path = pathlib.Path(scratch, f"{folder.name}_{i}.py")
        changed = solution.replace(mistake.text, mistake.replacement)
        path.write_text(changed if solution.count(mistake.text) == mistake.count else "", encoding="utf-8")
        yield name, path, mistake


def judge_verdict(mistake, verdict):
    """A sentence where a verdict is not the one that this mistake (None: the solution) must get."""
    if mistake is None:
        return None if verdict["passed"] else f"the solution fails: {verdict['sentence']}"
    if verdict["passed"]:
        return "passes"
    if verdict["kind"] not in (mistake.kind, mistake.gpu_kind) or verdict["tensor"] != mistake.blames:
        return f"should be blamed for {mistake.kind} of {mistake.blames}, not: {verdict['sentence']}"
    return None


def verify(numbers, fix=False):
    """Whether stubs are not started, solutions pass, and each mistake is blamed on the right tensor."""
    start, faults = time.perf_counter(), []
    of_version3 = kernels(SCRIPTS[3])
    folders = {number: folder_of(number) for number in numbers} if numbers else exercises()
    for number, folder in folders.items():
        if fix:
            copy_kernels(folder, of_version3)
        faults += [f"{number}: {fault}" for fault in faults_of(folder, of_version3)]
    with tempfile.TemporaryDirectory() as scratch:
        answers = []
        for folder in folders.values():
            answers.append((folder, solution_of(folder), "solution", None))
            answers += [(folder, path, name, mistake) for name, path, mistake in wrong_answers(folder, scratch)]
        verdicts = grade([answer[:2] for answer in answers], timeout=600)
    for (folder, _, name, mistake), verdict in zip(answers, verdicts, strict=True):
        fault = judge_verdict(mistake, verdict)
        faults += [f"{folder.name[:2]}, {name}: {fault}"] if fault else []
        print(f"{folder.name[:2]}  {verdict['seconds']:5.1f} s  {name}: {verdict['sentence']}")
    print("\n".join(faults) or f"{len(folders)} exercises and {len(answers) - len(folders)} wrong answers are in order")
    print(f"{time.perf_counter() - start:.0f} s")
    return int(bool(faults))


# ---------------------------------------------------------------- main


def parse(argv):
    usage, _, rest = __doc__.partition("\n\n")
    parser = argparse.ArgumentParser(
        prog="check.py", description=usage, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", nargs="?", default="list", help="list, NN, hint, solution or verify")
    parser.add_argument("arguments", nargs="*", metavar="NN", help="number of an exercise, and of a hint")
    parser.add_argument("--watch", action="store_true", help="check again whenever the file is saved")
    parser.add_argument("--give-up", action="store_true", help="show the solution of an exercise that is not passed")
    parser.add_argument("--fix", action="store_true", help="verify: first copy the kernels of tiny_llama_v3.py")
    return parser.parse_intermixed_args(argv)


def main(argv=None):
    options = parse(argv)
    command, arguments = options.command, options.arguments
    if not all(argument.isdecimal() for argument in arguments):
        raise Failure(2, f"{' '.join(arguments)}: after {command} come numbers, as in: check.py hint 02")
    if command == "list" and not arguments:
        return show_list()
    if command == "verify":
        return verify(arguments, options.fix)
    if command.isdecimal() and not arguments:
        return watch(folder_of(command)) if options.watch else check(folder_of(command))
    if command == "hint" and len(arguments) in (1, 2):
        return show_hint(folder_of(arguments[0]), int(arguments[1]) if arguments[1:] else None)
    if command == "solution" and len(arguments) == 1:
        return show_solution(folder_of(arguments[0]), options.give_up)
    raise Failure(2, "say list, NN, hint NN [n], solution NN [--give-up] or verify; see --help")


if __name__ == "__main__":
    sys.exit(run_tool("check.py", main))
