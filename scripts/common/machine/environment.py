"""Answer environment.sh's questions about an interpreter. Standard library only: it runs before any installation.

python3 environment.py unmet GROUP KIND   the requirements of the four scripts (run), of check_room.sh (room), of the
                                          test suite (test) or of test.sh --all (all) that it lacks; KIND: none,
                                          nvidia or amd GPU
python3 environment.py torch              build (rocm, cuda or cpu) and folder of a usable PyTorch, else status 1
python3 environment.py summary            one line of versions, after a real import
python3 environment.py rocm               "6.4.1 2.9.1 rocm6.4": this machine's ROCm release, the PyTorch to install
                                          and its folder in PyTorch's index
python3 environment.py cuda               "12.2 2.11.0 cu126": the CUDA release of this machine's NVIDIA driver, the
                                          PyTorch to install and its folder, "-" if none of its builds can run here;
                                          status 1 where the build that pip takes by default can
python3 environment.py unseen             why PyTorch sees no GPU, empty if it sees one
"""

import contextlib
import importlib.metadata
import os
import pathlib
import re
import subprocess
import sys
import warnings

# of pyproject.toml, without plots and peers
EXTRAS = {"run": [], "room": ["room"], "test": ["test"], "all": ["test", "pin"]}
OPT = pathlib.Path("/opt")
PYPROJECT = pathlib.Path(__file__).resolve().parents[3] / "pyproject.toml"
ROCM_BUILDS = pathlib.Path(__file__).with_name("environment_rocm.txt")
NVIDIA_PINS = pathlib.Path(__file__).with_name("constraints-nvidia.txt")


def requirements(group):
    """(name, lower bound, upper bound or "") of each dependency in pyproject.toml; group is a key of EXTRAS."""
    text = PYPROJECT.read_text().split("[project]")[1].split("[tool.")[0]
    text, extras = text.split("[project.optional-dependencies]")
    for extra in EXTRAS[group]:
        text += re.search(rf"^{extra} = \[.*?\]", extras, re.DOTALL | re.MULTILINE)[0]
    # tomllib came with Python 3.11; these lists need no more than a pattern
    found = re.findall(r'"([\w-]+)>=([\d.]+)(?:,<([\d.]+))?(; sys_platform == \'linux\')?"', text)
    return [(name, low, high) for name, low, high, linux in found if not linux or sys.platform == "linux"]


def numbers(version):
    """Return (2, 13, 0) for "2.13.0+cpu"."""
    return tuple(int(part) for part in re.findall(r"\d+", version.split("+")[0]))


def within(version, low, high):
    """Return low <= version < high, high "" meaning any."""
    return numbers(low) <= numbers(version) and (not high or numbers(version) < numbers(high))


def has_other_name(name):
    """Return True if a distribution of another name has this module, as ROCm's builds of Triton do.

    A folder alone does not count: pip leaves one when it is interrupted.
    """
    distributions = importlib.metadata.distributions()
    return any(f"{name}/__init__.py" in map(str, found.files or ()) for found in distributions)


def unmet(group, kind):
    """Return the names of the group's requirements that are missing here or outside their bounds.

    Upper bounds are those of Triton's interpreter, which nobody uses where there is a GPU.
    """
    names = []
    for name, low, high in requirements(group):
        try:
            met = within(importlib.metadata.version(name), low, high if kind == "none" else "")
        except importlib.metadata.PackageNotFoundError:
            met = has_other_name(name)
        if not met and name not in names:
            names.append(name)
    return names


def torch_build():
    """Return "cpu FOLDER" of a PyTorch that imports and is new enough, else ""."""
    try:
        import torch
    except (ImportError, OSError):
        return ""
    low, high = next(bounds for name, *bounds in requirements("run") if name == "torch")
    if not within(torch.__version__, low, high):
        return ""
    build = "cpu"
    if torch.version.hip:
        build = "rocm"
    elif torch.version.cuda:
        build = "cuda"
    return f"{build} {pathlib.Path(torch.__file__).parent.parent}"


def summary():
    """Return the versions of the requirements of the four scripts, each imported."""
    return ", ".join(f"{name} {importlib.import_module(name).__version__}" for name, _, _ in requirements("run"))


def answer_of(*command):
    """Return what a command prints, "" without it."""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        return subprocess.run(command, capture_output=True, text=True, timeout=30).stdout
    return ""


def cuda_build():
    """Return "CUDA PYTORCH FOLDER" where pip's default build, for CUDA 13, cannot run, else "".

    Builds for CUDA 12 run on every driver for CUDA 12. PyTorch 2.11 has cu126 for GPUs up to Hopper, the only one for
    those before Turing, and cu128 for GPUs from Turing up to Blackwell, which needs a driver for 12.8 itself.
    """
    driver = re.search(r"CUDA (?:UMD )?Version *: *(\d+\.\d+)", answer_of("nvidia-smi"))  # UMD: from driver 610 on
    if not driver:
        return ""
    capabilities = answer_of("nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader")
    before_turing = any(numbers(found) < (7, 5) for found in re.findall(r"^\d+\.\d+$", capabilities, re.MULTILINE))
    release = numbers(driver[1])
    if release >= (13,) and not before_turing:
        return ""
    folder = "cu126" if before_turing or release < (12, 8) else "cu128"
    pinned = re.search(r"^torch==(\S+)", NVIDIA_PINS.read_text(), re.MULTILINE)[1]
    return f"{driver[1]} {pinned} {folder if release >= (12,) else '-'}"


def unseen():
    """Return why PyTorch sees no GPU, "" if it sees one."""
    import torch

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        if torch.cuda.is_available():
            return ""
    return str(told[-1].message).partition("\n")[0] if told else "torch.cuda.is_available() is False"


def rocm_release():
    """Return "6.4.1", the ROCm release that is named, installed or known to amd-smi; "" where none of them tells."""
    if os.environ.get("TINY_LLAMA_ROCM"):
        return os.environ["TINY_LLAMA_ROCM"]
    roots = [pathlib.Path(os.environ["ROCM_PATH"])] if os.environ.get("ROCM_PATH") else []
    for pattern in ("rocm", "rocm/core*", "rocm-*"):
        roots += sorted(OPT.glob(pattern), key=lambda folder: numbers(folder.name), reverse=True)  # 10.0 before 7.14
    told = [path.read_text() for path in (root / ".info" / "version" for root in roots) if path.is_file()]
    told += re.findall("ROCm version:(.*)", answer_of("amd-smi", "version"))
    return next((found[0] for text in told if (found := re.search(r"\d+\.\d+\.\d+", text))), "")


def rocm_builds():
    """Return {(7, 2): (PyTorch, folder in its index)}."""
    lines = [line.split() for line in ROCM_BUILDS.read_text().splitlines() if not line.startswith("#")]
    return {numbers(release): (torch, folder) for release, torch, folder in lines}


def rocm_build(release):
    """Return "RELEASE TORCH FOLDER"; "-" for the release "", "unknown" and the newest folder without a known build."""
    builds = rocm_builds()
    newest = builds[max(builds)][1]
    return " ".join((release or "-", *builds.get(numbers(release)[:2], ("unknown", newest))))


def main(question, *arguments):
    answers = {"torch": torch_build, "summary": summary, "cuda": cuda_build, "unseen": unseen}
    answers["rocm"] = lambda: rocm_build(rocm_release())
    answer = " ".join(unmet(*arguments)) if question == "unmet" else answers[question]()
    print(answer)
    return int(question in ("torch", "cuda") and not answer)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
