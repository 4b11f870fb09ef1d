"""Find the files of an exercise, and have answers graded in a process of their own."""

import contextlib
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "scripts"))

from common.command_line import Failure, Pace, missing_package, progress

TARGET_VARIABLE = "EXECUTE_ON_TARGET"
COMPILED_FOR = "gfx942"  # what passes in Triton's interpreter is compiled for this GPU, which need not be here
TIMEOUT = 120  # seconds of its own, see keeper.OwnTime, that an answer may take; the slowest solution needs a few
REGION = re.compile(r"^ *# TODO\b.*?^ *# end of TODO\n", re.DOTALL | re.MULTILINE)

# ---------------------------------------------------------------- files


def exercises():
    """Return {number: folder}."""
    return {folder.name[:2]: folder for folder in sorted(HERE.glob("[0-9][0-9]_*")) if folder.is_dir()}


def folder_of(number):
    found = exercises()
    if number.zfill(2) not in found:
        raise Failure(2, f"there is no exercise {number}: choose one of {', '.join(found)}")
    return found[number.zfill(2)]


def solution_of(folder):
    """Return solution.py, or answer.py where no kernel is launched: inspect_kernels.py compiles every solution.py."""
    return next(path for path in (folder / "solution.py", folder / "answer.py") if path.is_file())


def hints(folder):
    """Return the sections of hints.md, each of which starts with '## '."""
    text = (folder / "hints.md").read_text(encoding="utf-8")
    return [section.split("\n", 1)[1].strip() for section in re.split(r"^## ", text, flags=re.MULTILINE)[1:]]


def relative(path):
    return os.path.relpath(path)


# ---------------------------------------------------------------- answers


def is_started(text):
    """Return True if a region between '# TODO' and '# end of TODO' holds more than comments, or if there is none."""
    regions = REGION.findall(text)
    lines = [line.strip() for region in regions for line in region.splitlines()]
    return not regions or any(line and line != "pass" and not line.startswith("#") for line in lines)


def describe_end(status, said, path):
    """Return why a grading process that ended left no verdict."""
    missing = re.search(r"No module named '(\w+)'", said)
    if missing:
        return missing_package(missing[1])
    last = (said.strip().splitlines() or ["no message"])[-1]
    if -status in (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT):
        name = signal.Signals(-status).name
        what = "a load or store far outside a tensor does that, or a recursion without end"
        return f"{path} crashed Python ({name}): {what}. It said: {last}"
    if status < 0:
        return f"{path} was ended by {signal.Signals(-status).name}: {last}"
    return f"{path} ended Python with status {status}: {last}"


def describe_late(limit, computed, waited):
    """Return what a grading process did in the seconds after which it was ended."""
    said = f"not finished after {limit} s, in which it computed for {computed:.0f} s and waited for {waited:.0f} s"
    if waited > computed:
        return f"{said}, perhaps for a GPU kernel whose loop doesn't end, for a lock or for another process"
    return f"{said}: does every loop in your kernel end?"


def runs_on_ranks(folder):
    """Return True for an exercise whose answer runs on several ranks."""
    task = pathlib.Path(folder, "task.py")
    return task.is_file() and "import ranks\n" in task.read_text(encoding="utf-8")


def grade(jobs, timeout=TIMEOUT, target=None, program="grading.py"):
    """Return a program's verdicts on pairs of a folder and a file.

    What passes in Triton's interpreter must compile, too.
    target: an AMD GPU, whose instructions are executed instead of the kernel in Triton's interpreter or on a GPU.
    program: grading.py, or own_kernel.py, whose jobs have an action in place of the file.
    Ranks are forks of their checker, and no fork of a process that sees a GPU can use autograd: theirs sees none.
    """
    on_ranks = [runs_on_ranks(folder) for folder, _ in jobs]
    if any(on_ranks) and sys.platform != "linux":
        raise Failure(
            1, f"ranks are forked, which is not safe on {sys.platform}: use Linux, in a container for example"
        )
    environment = os.environ | ({"TRITON_INTERPRET": "0", TARGET_VARIABLE: target} if target else {})
    without_gpu = environment | dict.fromkeys(("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"), "")
    verdicts = [None] * len(jobs)
    for wanted, variables in ((False, environment), (True, without_gpu)):
        chosen = [i for i, on in enumerate(on_ranks) if on == wanted]
        found = grade_apart([jobs[i] for i in chosen], timeout, variables, program) if chosen else []
        for i, verdict in zip(chosen, found, strict=True):
            verdicts[i] = verdict
    compile_passed(jobs, verdicts, timeout)
    return verdicts


def compile_passed(jobs, verdicts, timeout):
    """Change the verdicts on answers that passed in Triton's interpreter to what its compiler says.

    A kernel of the user's own that passed on a GPU is compiled as torch.compile does it.
    """
    environment = os.environ | {"TRITON_INTERPRET": "0", TARGET_VARIABLE: COMPILED_FOR}
    ran = [i for i, verdict in enumerate(verdicts) if verdict["passed"] and verdict.get("for_models")]
    try:
        found = grade_apart([jobs[i] for i in ran], timeout, environment, "compilation.py") if ran else []
        said = [compiled.get("in_models") for compiled in found]
    except Failure as error:  # no fault of a kernel that is right on this GPU
        said = [f"not compiled as torch.compile does it: {error}"] * len(ran)
    for i, words in zip(ran, said, strict=True):
        verdicts[i]["sentence"] += f"; {words}" if words else ""
    chosen = [i for i, verdict in enumerate(verdicts) if verdict["passed"] and verdict.get("interpreted")]
    if not chosen:
        return
    try:
        found = grade_apart([jobs[i] for i in chosen], timeout, environment, "compilation.py")
    except Failure as error:
        raise Failure(1, f"right in Triton's interpreter, but compiled for {COMPILED_FOR}: {error}") from None
    for i, compiled in zip(chosen, found, strict=True):
        if compiled["passed"]:
            verdicts[i]["sentence"] += f"; {compiled['sentence']}"
        else:
            verdicts[i] |= {name: compiled[name] for name in ("passed", "kind", "sentence")}


def grade_apart(jobs, timeout, environment, program):
    """Return a program's verdicts on pairs of a folder and a file, from a process that may crash, hang or start others.

    keeper.py ends it after the timeout, in seconds of its own, and all that it leaves, of which the last verdict's
    "left" has the names. If this process is killed, a pipe that closes tells the keeper.
    """
    with tempfile.TemporaryDirectory() as scratch:
        pathlib.Path(scratch, "jobs.json").write_text(json.dumps([[str(folder), str(path)] for folder, path in jobs]))
        pipe, other_end = os.pipe()
        keeper = [sys.executable, "-I", "-S", str(HERE / "keeper.py"), str(pipe), scratch, str(timeout)]
        command = [sys.executable, "-W", "ignore", str(HERE / program), scratch]
        try:
            with open(pathlib.Path(scratch, "said.txt"), "wb") as said:
                streams = {"stderr": said, "pass_fds": [pipe]}
                child = subprocess.Popen([*keeper, *command], start_new_session=True, env=environment, **streams)
            os.close(pipe)
            if program == "compilation.py":
                follow(child, scratch, jobs, "compiling")
            elif TARGET_VARIABLE not in environment:  # with a target each case is printed
                follow(child, scratch, jobs, "checking")
            child.wait()
        finally:
            os.close(other_end)  # the keeper ends everything
            child.wait()
        verdicts = read_json(pathlib.Path(scratch, "verdicts.json"), [])
        end = read_json(pathlib.Path(scratch, "end.json"), {"status": child.returncode, "left": [], "late": False})
        words = last_words(pathlib.Path(scratch, "said.txt"))
    if len(verdicts) == len(jobs):
        verdicts[-1]["left"] = end["left"]
        return verdicts
    if end["late"]:
        raise Failure(1, describe_late(timeout, end["computed"], end["waited"]))
    raise Failure(1, describe_end(end["status"], words, relative(jobs[len(verdicts)][program == "grading.py"])))


def follow(child, scratch, jobs, doing):
    """Wait for a grading process; every ten seconds print which answer it is at."""
    pace = Pace()
    while child.poll() is None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(1)
        done = len(read_json(pathlib.Path(scratch, "verdicts.json"), []))
        if child.poll() is None and done < len(jobs) and pace.is_due():
            number = f" {done + 1} of {len(jobs)}" if len(jobs) > 1 else ""
            progress(f"   {pathlib.Path(jobs[done][0]).name}: {doing} answer{number}")


def read_json(path, otherwise):
    """Return the contents of a JSON file, or something else if there is none."""
    return json.loads(path.read_text()) if path.exists() else otherwise


def last_words(path):
    """Return the end of what a process wrote to standard error; an answer may have written gigabytes."""
    if not path.exists():
        return ""
    with open(path, "rb") as file:
        file.seek(max(0, path.stat().st_size - 2**16))
        return file.read().decode(errors="replace")
