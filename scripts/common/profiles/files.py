"""Choose the files of one run in a folder, and read them as one profile. Standard library only."""

import dataclasses
import gzip
import json
import pathlib
import re
import zlib

from common.command_line import Failure
from common.profiles.csv_files import A_ROW_PER_LAUNCH
from common.profiles.formats import FORMATS, TRACE, read_file
from common.profiles.model import EACH, check_one_gpu, unlike

# A folder is searched for PyTorch's traces, then for these: of the first pattern found all files, one per process.
OTHER_PROFILERS = [pattern for one in FORMATS if one is not TRACE for pattern in one.files]


def matching(folder, pattern):
    return sorted(file for file in folder.rglob(pattern) if file.is_file())


def files_of(path):
    """Return the files to read for a path: itself or, in a folder, those of one run.

    PyTorch's traces of several runs share a folder: read the newest one of whole steps.
    """
    if not path.exists():
        raise Failure(2, f"{path} does not exist: give a profile, or the folder that it lies in")
    if not path.is_dir():
        return [path]
    traces = whole_traces(path)
    if traces:
        return traces[:1]
    if files := files_of_others(path):
        return files
    foreign = traces_in(path)
    if len(foreign) == 1:
        return [foreign[0][0]]
    ranks = {rank for _, rank in foreign}
    if len(ranks) > 1:
        names = f"name the trace of one, such as {foreign[0][0].relative_to(path)}"
        raise Failure(2, f"{path} holds the traces of {len(ranks)} ranks: {names}")
    packed = [file for file, _ in foreign] or matching(path, f"{TRACE.files[0]}.gz")
    if packed:
        raise Failure(
            2,
            f"{path} holds packed traces or foreign ones: name one of them, such as {packed[0].relative_to(path)}",
        )
    raise Failure(2, f"{path} has no kernel times: there's no profiler's CSV, database or trace in this folder")


def files_of_others(folder):
    """Return the files in a folder that other profilers than PyTorch's left in one run, a file per process."""
    check_one_result(folder)
    return next(filter(None, (matching(folder, pattern) for pattern in OTHER_PROFILERS)), [])


def check_one_result(folder):
    """Raise Failure if several calls of a wrapper left their results in a folder: their files would be added up."""
    results = sorted(matching(folder, "command.txt"), key=lambda file: file.stat().st_mtime)
    if len(results) > 1:
        raise Failure(2, f"{folder} holds {len(results)} results: name one of them, such as {results[-1].parent}")


def whole_traces(folder):
    """Return PyTorch's traces of whole steps in a folder, the newest first. Failure if it holds only partial ones."""
    (pattern,) = TRACE.files
    files = sorted(matching(folder, pattern), key=lambda file: (-file.stat().st_mtime, file.name))
    packed = [file for file in matching(folder, f"{pattern}.gz") if files and is_newer(file, files[0])]
    if packed:
        raise Failure(2, f"{packed[0]} is newer than the unpacked traces in {folder}: name the one to read")
    whole = [file for file in files if metadata_of(file).get("part", "whole") == "whole"]
    if files and not whole:
        raise Failure(2, f"{folder} has traces of attention only: profile whole steps, or name the file itself")
    return whole


def head_of(file):
    """Return the first MiB of a file as text, unpacked; "" if it cannot be read."""
    try:
        with open(file, "rb") as opened:
            packed = opened.read(2) == b"\x1f\x8b"
        with (gzip.open if packed else open)(file, "rb") as opened:
            return opened.read(2**20).decode("utf-8", errors="replace")
    except (OSError, EOFError, zlib.error):
        return ""  # if this file is chosen, read_file says what is wrong with it


def traces_in(folder):
    """Return (file, rank or None) of each PyTorch trace in a folder, under any name, packed or not, by rank."""
    found = []
    for pattern in ("*.json", "*.json.gz"):
        for file in matching(folder, pattern):
            head = head_of(file)
            if '"traceEvents"' in head or '"distributedInfo"' in head or '"deviceProperties"' in head:
                rank = re.search(r'"distributedInfo":\s*\{[^{}]*"rank":\s*(\d+)', head)
                found.append((file, int(rank[1]) if rank else None))
    return sorted(found, key=lambda one: (one[1] is None, one[1] or 0, -one[0].stat().st_mtime))


def is_newer(file, other):
    return file.stat().st_mtime > other.stat().st_mtime


def metadata_of(file):
    """Return the metadata that a training script wrote into its trace, unchecked; {} for another file."""
    start = head_of(file)  # a trace of a GPU can have a gigabyte
    try:
        found = re.search(r'"tiny_llama":\s*(?=\{)', start)
        return json.JSONDecoder().raw_decode(start, found.end())[0] if found else {}
    except (ValueError, RecursionError):
        return {}  # if this file is chosen, read_file says what is wrong with it


def read_profile(path, steps=None, gpu=None):
    """Return the profile in a file or folder; files of several processes are read as one profile.

    steps: how many it holds, if the caller knows; otherwise the file may tell. gpu: the one to read, of several.
    """
    path = pathlib.Path(path)
    profile = whole([one for file in files_of(path) for one in read_file(file, gpu)], steps)
    traces = whole_traces(path) if path.is_dir() else []
    if len(traces) > 1:
        note = f"This is the newest of {len(traces)} traces in its folder."
        profile = dataclasses.replace(profile, notes=(*profile.notes, note))
    return profile


def read_ranks(path, steps=None, gpu=None):
    """Return the profile of each GPU in a file, or of the one that gpu names. Failure if it is no profile of a GPU."""
    (file,) = files_of(path)
    profiles = [whole([one], steps) for one in read_file(file, EACH if gpu is None else gpu)]
    for profile in profiles:
        check_timeline(profile)
    return profiles


TOLD = ("warnings", "notes")  # what a Profile says of its file


def whole(profiles, steps):
    """Return one profile of the launches of several processes, or raise Failure if there are none."""
    calls = sorted((call for profile in profiles for call in profile.calls), key=lambda call: call.start_ns)
    if not calls:
        why = "the profiler saw no work on a GPU, so record steps that use one"
        raise Failure(2, f"{profiles[0].path} lists no kernel: {why}")
    if not any(call.total_ns for call in calls):
        raise Failure(2, f"{profiles[0].path} is damaged: all of its kernels take 0 ns")
    launching = [profile for profile in profiles if profile.calls]
    first = launching[0]
    if first.metadata and steps and first.steps and steps != first.steps:
        raise Failure(2, f"{first.path} marks {first.steps} steps, not {steps}: leave out the number")
    more = {name: tuple(dict.fromkeys(one for profile in profiles for one in getattr(profile, name))) for name in TOLD}
    if len(launching) > 1:
        more["early"] = 0
    if steps:
        more["step_note"] = ""
    return dataclasses.replace(first, calls=calls, steps=steps or first.steps, processes=len(launching), **more)


def read_pair(first, second, steps=(None, None), gpu=None):
    """Return two profiles of like runs: the newest traces in the folders whose sizes and precision agree.

    Failure names what differs if no two agree.
    """
    candidates = []
    for path in (pathlib.Path(first), pathlib.Path(second)):
        traces = whole_traces(path) or [path]
        candidates.append([(trace, metadata_of(trace)) for trace in traces])
    chosen = newest_alike(*candidates)
    one = read_profile(chosen[0], steps[0], gpu)
    other = read_profile(chosen[1], steps[1], gpu)
    check_one_gpu(one)
    check_one_gpu(other)
    found = unlike(one.metadata, other.metadata)
    if one.on_cpu != other.on_cpu or (one.device and other.device and one.device != other.device):
        found.append("device: " + ", ".join(p.device or ("CPU" if p.on_cpu else "GPU") for p in (one, other)))
    if found:
        raise Failure(2, f"{one.path} and {other.path} differ ({'; '.join(found)}): profile both the same way")
    return one, other


def newest_alike(first, second):
    """Return the newest two items whose runs are alike, or the newest two if none are.

    first, second: lists of (item, metadata), the newest first.
    """
    for other, other_metadata in second:
        for one, metadata in first:
            if not unlike(metadata, other_metadata):
                return [one, other]
    return [first[0][0], second[0][0]]


def gpu_profile(path, steps, gpu=None):
    """Return a profile of single launches on one GPU, or raise Failure."""
    profile = read_profile(path, steps, gpu)
    check_one_gpu(profile)
    check_timeline(profile)
    return profile


def check_timeline(profile):
    """Raise Failure if a profile has no launches on a GPU, or only the sums of their times."""
    if any(call.bounds_ns for call in profile.calls):
        raise Failure(2, f"{profile.path} has only sums over the kernels' times: {A_ROW_PER_LAUNCH}")
    if profile.on_cpu:
        raise Failure(2, f"{profile.path} has no launches on a GPU: record it on a machine that has one")
