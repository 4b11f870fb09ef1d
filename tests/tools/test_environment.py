"""scripts/common/environment.sh on machines of many kinds, without a network: stand-in wheels and GPU tools on PATH."""

import os
import pathlib
import shutil
import subprocess
import sys
import venv
import zipfile

import pytest

from common.versions import REPOSITORY

PINNED = {"torch": "2.13.0", "triton": "3.7.1", "numpy": "2.3.5" if sys.version_info >= (3, 11) else "2.2.6"}
TORCH = "class version:\n    hip, cuda = {hip!r}, {cuda!r}\n"


def write_module(folder, name, version, hip=None, cuda=None):
    """A stand-in for an installed package: a module with a version, and its metadata."""
    body = f"__version__ = {version!r}\n" + (TORCH.format(hip=hip, cuda=cuda) if name == "torch" else "")
    files = {
        f"{name}/__init__.py": body,
        f"{name}-{version}.dist-info/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{name}-{version}.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    return files


def write_wheel(folder, name, version, **build):
    unpacked = folder / f"unpacked_{name}"
    files = write_module(unpacked, name, version, **build)
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        for path in files:
            wheel.write(unpacked / path, path)
        wheel.writestr(f"{name}-{version}.dist-info/RECORD", "")


def write_tool(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


class Machine:
    """A checkout in a folder with a space, a python3 without packages, pip without a network, and no GPU."""

    def __init__(self, folder):
        self.checkout = folder / "a checkout"
        (self.checkout / "scripts" / "common").mkdir(parents=True)
        for name in (
            "pyproject.toml",
            *(f"scripts/{n}" for n in ("common/environment.sh", "common/environment.py", "constraints.txt")),
        ):
            shutil.copy(REPOSITORY / name, self.checkout / name)
        self.venv = self.checkout / ".venv"
        self.python = folder / "python"
        venv.create(self.python, with_pip=False)
        self.packages = next((self.python / "lib").glob("python3*")) / "site-packages"
        self.wheels = folder / "wheels"
        self.wheels.mkdir()
        self.tools = folder / "tools"
        for tool in ("nvidia-smi", "rocminfo"):
            write_tool(self.tools / tool, "exit 1")
        self.settings = {"TINY_LLAMA_CPU": "1"}  # a real /dev/kfd cannot be hidden

    def add_wheels(self, **build):
        for name, version in PINNED.items():
            write_wheel(self.wheels, name, version, **(build if name == "torch" else {}))
        write_wheel(self.wheels, "triton", "99.0")  # newer than the pinned one

    def has_amd_gpu(self):
        self.settings.pop("TINY_LLAMA_CPU")
        write_tool(self.tools / "rocminfo", "echo '  Device Type:             GPU'")

    def has_nvidia_gpu(self):
        self.settings.pop("TINY_LLAMA_CPU")
        write_tool(self.tools / "nvidia-smi", "echo 'GPU 0: a card'")

    def run(self, commands='use_environment run; echo "$PYTHON"'):
        """Source environment.sh and run the commands; the finished process."""
        environment = {
            "PATH": f"{self.tools}:{self.python / 'bin'}:/usr/local/bin:/usr/bin:/bin",
            "HOME": str(self.checkout),
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": str(self.wheels),
            "PIP_CONFIG_FILE": os.devnull,
            **self.settings,
        }
        script = f"set -euo pipefail; source scripts/common/environment.sh; {commands}"
        return subprocess.run(
            ["bash", "-c", script], cwd=self.checkout, env=environment, capture_output=True, text=True, timeout=250
        )

    def fails(self, *words):
        """The environment is refused with status 1; the last line is the sentence that has these words."""
        result = self.run()
        assert result.returncode == 1 and result.stdout == "", result.stderr
        sentence = result.stderr.splitlines()[-1]
        for word in words:
            assert word in sentence, result.stderr
        return result

    def versions(self):
        """Name -> (version, file) of what the environment's interpreter imports."""
        program = "import torch, triton, numpy\nfor m in torch, triton, numpy: print(m.__version__, m.__file__)"
        python = self.venv / "bin" / "python"
        lines = subprocess.run([python, "-c", program], capture_output=True, text=True, check=True).stdout.splitlines()
        return dict(zip(PINNED, (line.split(" ", 1) for line in lines), strict=True))


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


def test_fresh_machine_gets_the_pinned_versions_once(machine):
    machine.add_wheels()
    machine.settings["PIP_USER"] = "1"  # as clusters set it; it must not lead out of the environment
    first = machine.run()
    assert first.returncode == 0, first.stderr
    assert first.stdout == f"{machine.venv}/bin/python\n"
    assert "Installing torch triton numpy" in first.stderr
    assert {name: version for name, (version, _) in machine.versions().items()} == PINNED

    shutil.rmtree(machine.wheels)
    second = machine.run()
    assert (second.returncode, second.stdout, second.stderr) == (0, first.stdout, "")
    # Activated, python3 is the environment's own.
    activated = machine.run("source .venv/bin/activate; use_environment run")
    assert (activated.returncode, activated.stderr) == (0, "")


@pytest.mark.parametrize("vendor", ["none", "amd", "nvidia"])
def test_pytorch_of_the_current_python_is_used_as_it_is(machine, vendor):
    if vendor != "none":
        getattr(machine, f"has_{vendor}_gpu")()
    build = {"none": {}, "amd": {"hip": "7.0"}, "nvidia": {"cuda": "13.0"}}[vendor]
    for name, version in {"torch": "2.11.0", "triton": "3.6.0", "numpy": "2.2.0"}.items():
        write_module(machine.packages, name, version, **(build if name == "torch" else {}))
    result = machine.run()
    assert result.returncode == 0, result.stderr
    assert "Installing" not in result.stderr
    assert machine.versions()["torch"] == ["2.11.0", str(machine.packages / "torch" / "__init__.py")]


def test_only_what_the_current_python_lacks_is_installed(machine):
    machine.add_wheels()
    write_module(machine.packages, "torch", "2.12.0")
    write_module(machine.packages, "numpy", "2.4.1")  # Triton's interpreter cannot use it
    result = machine.run()
    assert result.returncode == 0, result.stderr
    assert "Installing triton numpy\n" in result.stderr
    assert {name: version for name, (version, _) in machine.versions().items()} == {**PINNED, "torch": "2.12.0"}


def test_an_old_pytorch_is_not_used(machine):
    machine.add_wheels()
    write_module(machine.packages, "torch", "2.6.0")
    assert machine.run().returncode == 0
    assert machine.versions()["torch"][0] == PINNED["torch"]


@pytest.mark.parametrize(
    "installed",
    [None, ("2.13.0", {"cuda": "13.0"}), ("2.13.0", {}), ("2.6.0", {"hip": "6.2"})],
    ids=["none", "cuda", "cpu", "old rocm"],
)
def test_amd_gpu_without_rocm_pytorch_is_told_what_to_install(machine, installed):
    machine.has_amd_gpu()
    machine.add_wheels(cuda="13.0")
    if installed:
        write_module(machine.packages, "torch", installed[0], **installed[1])
    result = machine.fails("AMD GPU", "ROCm build of PyTorch", "TINY_LLAMA_CPU=1")
    assert len(result.stderr.splitlines()) == 1
    assert not machine.venv.exists()


def test_nvidia_gpu_gets_another_environment_than_no_gpu(machine):
    machine.add_wheels()
    assert machine.run().returncode == 0
    machine.has_nvidia_gpu()
    machine.add_wheels(cuda="13.0")
    result = machine.run()
    assert result.returncode == 0 and "without CUDA" not in result.stderr
    build = subprocess.run(
        [machine.venv / "bin" / "python", "-c", "import torch; print(torch.version.cuda)"],
        capture_output=True,
        text=True,
    )
    assert build.stdout == "13.0\n"


def test_nvidia_gpu_that_will_not_be_used_is_said(machine):
    machine.has_nvidia_gpu()
    machine.add_wheels()
    result = machine.run()
    assert result.returncode == 0 and "PyTorch without CUDA" in result.stderr


def test_without_packages_to_install_it_says_so_and_recovers(machine):
    machine.fails("pip could not install torch triton numpy", "PIP_INDEX_URL")
    machine.add_wheels()
    assert machine.run().returncode == 0


def test_no_python(machine):
    machine.settings["TINY_LLAMA_PYTHON"] = "python3.99"
    assert len(machine.fails("no python3.99", "Python 3.10").stderr.splitlines()) == 1


def test_old_python(machine):
    write_tool(machine.tools / "python3", f'case "$*" in *version_info*) exit 1 ;; esac\nexec "{sys.executable}" "$@"')
    assert len(machine.fails("older than Python 3.10", "TINY_LLAMA_PYTHON").stderr.splitlines()) == 1


def test_no_venv_module(machine):
    write_tool(machine.tools / "python3", f'case "$*" in *ensurepip*) exit 1 ;; esac\nexec "{sys.executable}" "$@"')
    write_module(machine.packages, "torch", "2.13.0")
    machine.fails("cannot make virtual environments", "python3-venv")


def test_a_place_that_cannot_be_written(machine):
    (machine.checkout / "file").write_text("")
    machine.settings["TINY_LLAMA_VENV"] = str(machine.checkout / "file" / "venv")
    machine.fails("Cannot write", "TINY_LLAMA_VENV")


def test_a_folder_of_the_user_is_left_alone(machine):
    machine.settings["TINY_LLAMA_VENV"] = "home"
    (machine.checkout / "home").mkdir()
    (machine.checkout / "home" / "thesis.tex").write_text("years of work")
    machine.fails("was not made by this script")
    assert (machine.checkout / "home" / "thesis.tex").read_text() == "years of work"


@pytest.mark.parametrize("kind, configured", [("none", "false"), ("none", "true"), ("nvidia", "false")])
def test_a_large_download_is_announced(machine, kind, configured):
    write_tool(machine.tools / "recorder", 'case "$*" in *unmet*) echo torch numpy ;; *) echo "pip: $*" ;; esac')
    result = machine.run(f"pip_is_configured() {{ {configured}; }}; PYTHON=recorder; install_unmet {kind} run")
    assert result.returncode == 0, result.stderr
    (call,) = [line for line in result.stderr.splitlines() if line.startswith("pip:")]
    assert call.endswith("torch numpy")
    assert ("gigabytes" in result.stderr) == ((kind, configured) == ("none", "false"))


def test_shell_scripts_are_clean():
    checker = shutil.which("shellcheck", path=f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}")
    if not checker:
        pytest.skip("shellcheck is not installed")
    hidden = (".venv", ".git")
    scripts = {p.resolve() for p in REPOSITORY.rglob("*.sh") if p.relative_to(REPOSITORY).parts[0] not in hidden}
    scripts = sorted({*scripts, REPOSITORY / ".ci" / "run", REPOSITORY / "scripts" / "train.sbatch"})
    result = subprocess.run([checker, *scripts], cwd=REPOSITORY, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stdout + result.stderr


def test_the_tests_install_no_other_extra():
    """What plots and peers need would be gigabytes and minutes for whoever runs the tests."""
    from common import environment

    names = {group: [name for name, _, _ in environment.requirements(group)] for group in ("run", "test")}
    assert names["run"] == ["torch", "triton", "numpy"]
    assert set(names["run"]) < set(names["test"]) and "pytest" in names["test"]
    assert "transformers" not in names["test"] and "transformers" in (REPOSITORY / "pyproject.toml").read_text()
