"""Check the exercises themselves: untouched stubs, three hints, passing solutions, recognised mistakes."""

import ast
import pathlib
import re
import tempfile
import time

from answers import REGION, exercises, folder_of, grade, hints, is_started, solution_of
from common.versions import SCRIPTS
from grading import load_task


def same_outside_regions(stub, solution):
    """Return True if the solution is the stub with lines in place of each of its regions."""
    pieces = REGION.split(stub)
    return re.fullmatch("(.+)".join(map(re.escape, pieces)), solution, re.DOTALL) is not None


def kernels(path):
    """Return {name: parameters} of the kernels in a file, with True for each parameter that is a constexpr."""
    found = {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef) and node.decorator_list:
            found[node.name] = [parameter.annotation is not None for parameter in node.args.args]
    return found


def find_faults(folder, of_version3):
    """Yield sentences on what is wrong with an exercise's files, without running any."""
    stub, solution = (path.read_text(encoding="utf-8") for path in (folder / "exercise.py", solution_of(folder)))
    readme = (folder / "README.md").read_text(encoding="utf-8")
    if is_started(stub):
        yield "exercise.py is started: git restore it"
    elif not same_outside_regions(stub, solution):
        yield f"exercise.py and {solution_of(folder).name} differ outside the TODO regions"
    if len(hints(folder)) != 3 or not all(hints(folder)):
        yield "hints.md needs three sections that start with ##"
    if len(readme.splitlines()) > 60:
        yield "README.md is longer than 60 lines"
    if "**Deliverable.**" not in readme:
        yield "README.md names no deliverable"
    passed = f"{folder.name[:2]} passed: {len(load_task(folder).cases)} cases"  # in more dtypes on a GPU
    if passed not in readme:
        yield f"README.md does not say what a right answer gets: {passed}"
    for name, parameters in kernels(solution_of(folder)).items():
        if parameters != of_version3.get(name, parameters):
            yield f"{name} of solution.py could not take its place in tiny_llama_v3.py: it has other parameters"


def wrong_answers(folder, scratch):
    """Yield (name, file, mistake) of each typical mistake: the solution with one text replaced."""
    solution = solution_of(folder).read_text(encoding="utf-8")
    for i, (name, mistake) in enumerate(load_task(folder).mistakes.items()):
        path = pathlib.Path(scratch, f"{folder.name}_{i}.py")
        changed = solution.replace(mistake.text, mistake.replacement)
        path.write_text(changed if solution.count(mistake.text) == mistake.count else "", encoding="utf-8")
        yield name, path, mistake


def judge_verdict(mistake, verdict):
    """Return what is wrong with a verdict on this mistake (None: on the solution), or None."""
    if mistake is None:
        return None if verdict["passed"] else f"the solution fails: {verdict['sentence']}"
    if verdict["passed"]:
        return "passes"
    if verdict["kind"] not in (mistake.kind, mistake.gpu_kind) or verdict["tensor"] != mistake.blames:
        return f"should be blamed for {mistake.kind} of {mistake.blames}, not: {verdict['sentence']}"
    if mistake.says not in verdict["sentence"]:
        return f"should be told {mistake.says!r}, not: {verdict['sentence']}"
    return None


def verify(numbers, solutions_only=False):
    """Check all exercises or those of these numbers, print the checker's sentence on each answer, return a status."""
    start, faults = time.perf_counter(), []
    of_version3 = kernels(SCRIPTS[3])
    folders = {number: folder_of(number) for number in numbers} if numbers else exercises()
    for number, folder in folders.items():
        faults += [f"{number}: {fault}" for fault in find_faults(folder, of_version3)]
    with tempfile.TemporaryDirectory() as scratch:
        answers = []
        for folder in folders.values():
            answers.append((folder, solution_of(folder), "solution", None))
            if not solutions_only:
                answers += [(folder, path, name, mistake) for name, path, mistake in wrong_answers(folder, scratch)]
        verdicts = grade([answer[:2] for answer in answers], timeout=900)
    for (folder, _, name, mistake), verdict in zip(answers, verdicts, strict=True):
        fault = judge_verdict(mistake, verdict)
        faults += [f"{folder.name[:2]}, {name}: {fault}"] if fault else []
        print(f"{folder.name[:2]}  {verdict['seconds']:5.1f} s  {name}: {verdict['sentence']}")
    counted = f"{len(folders)} exercises"
    if not solutions_only:
        counted += f" and {len(answers) - len(folders)} wrong answers"
    print("\n".join(faults) or f"{counted} are in order")
    print(f"{time.perf_counter() - start:.0f} s")
    return int(bool(faults))
