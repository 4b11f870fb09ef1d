"""Describe where a command runs: date, commit, machine and versions of packages."""

import contextlib
import datetime
import hashlib
import importlib.metadata
import os
import pathlib
import platform
import re
import shlex
import subprocess

from common.formulas.gpus import name_here
from common.versions import REPOSITORY, workshop

PACKAGES = ("torch", "triton", "numpy", "transformers", "liger-kernel", "torchao")
SAME_RUN = ("device", "driver", "packages")  # equal in the records of all calls that fill one results file


def hash_of(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def git(*arguments):
    """Return what git prints about this repository; None without git or history."""
    try:
        done = subprocess.run(["git", "-C", str(REPOSITORY), *arguments], capture_output=True, text=True)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def first_match(path, pattern):
    """Return the first group of a pattern in a file of the system; None without the file or a match."""
    with contextlib.suppress(OSError):
        found = re.search(pattern, pathlib.Path(path).read_text())
        return found and found[1].strip()
    return None


def package_version(name):
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(name)
    return None


def without_folders(words):
    """Return the words of a command without this machine's folders.

    Of an absolute path stays what is inside the repository, or else its last name. It may follow an option and "=".
    """
    told = []
    for word in words:
        option, equals, path = word.partition("=") if word.startswith("-") else ("", "", word)
        if path.startswith("/"):
            path = pathlib.PurePath(os.path.normpath(path))
            path = path.relative_to(REPOSITORY) if path.is_relative_to(REPOSITORY) else path.name
        told.append(f"{option}{equals}{path}")
    return told


def folder_in(words):
    """Return a sentence on a word that names a folder, None if none does.

    A results file that several calls complete has to hold the options as they are.
    """
    for word, told in zip(words, without_folders(words), strict=True):
        if word != told:
            return f"{word}: a record names no folder of this machine, so give the path from the current folder"
    return None


def describe(command):
    """Return the record of a command that runs now: date, commit, machine and versions of packages.

    TINY_LLAMA_COMMIT names the commit where the files are a copy without the repository's own history.
    """
    import torch

    on_gpu = torch.cuda.is_available()
    told = os.environ.get("TINY_LLAMA_COMMIT")
    boot = first_match("/proc/sys/kernel/random/boot_id", r"(\S+)") or platform.node()
    driver = first_match("/proc/driver/nvidia/version", r"  (\d[\d.]+) ")
    runtime = f"CUDA {torch.version.cuda}" if torch.version.cuda else f"HIP {torch.version.hip}"
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join(without_folders(command)),
        "workshop": workshop(),
        "commit": told or git("rev-parse", "HEAD"),
        "modified": not told and bool(git("status", "--porcelain", "--untracked-files=no")),
        "device": name_here() if on_gpu else platform.machine(),
        "device_type": "cuda" if on_gpu else "cpu",
        "driver": driver or first_match("/sys/module/amdgpu/version", "(.+)"),
        "runtime": runtime if on_gpu else "no GPU",
        "packages": {name: package_version(name) for name in PACKAGES},
        "python": platform.python_version(),
        "host": hashlib.sha256(boot.encode()).hexdigest()[:12],
        "cpu": first_match("/proc/cpuinfo", r"model name\s*:(.*)") or platform.processor(),
        "cores": os.cpu_count(),
    }
