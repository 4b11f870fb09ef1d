"""common/machine/environment.sh on machines of many kinds, without a network: stubs of wheels and of GPU tools."""

import itertools
import os
import pathlib
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import venv
import zipfile

import pytest

from common.machine import environment
from common.versions import REPOSITORY
from maintain.records import newest_record
from marks import slow
from processes import executable

PINNED = {"torch": "2.13.0", "triton": "3.7.1", "numpy": "2.3.5" if sys.version_info >= (3, 11) else "2.2.6"}
TORCH = "class version:\n    hip, cuda = {hip!r}, {cuda!r}\nclass cuda:\n    def is_available(): {sees}\n"
# A python3 that copies pip into an environment instead of installing it, which takes seconds.
PYTHON = """
case "$1 $2" in "-m venv")
    "{python}" "$@" --without-pip || exit
    for folder; do :; done
    exec cp -Rp "{pip}/." "$folder"/lib/python3*/site-packages ;;
esac
exec "{python}" "$@"
"""


def write_module(folder, name, version, hip=None, cuda=None, sees="return True", project=None, requires=None):
    """Write a stub of an installed package: a module with a version, and its metadata under the project's name."""
    metadata = f"Metadata-Version: 2.1\nName: {project or name}\nVersion: {version}\n"
    info = f"{project or name}-{version}.dist-info"
    torch = TORCH.format(hip=hip, cuda=cuda, sees=sees)
    files = {
        f"{name}/__init__.py": f"__version__ = {version!r}\n{torch * (name == 'torch')}",
        f"{info}/METADATA": metadata + f"Requires-Dist: {requires}\n" * bool(requires),
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    return [*files, f"{info}/RECORD"]


def write_wheel(folder, name, version, **build):
    unpacked = folder / f"unpacked_{name}"
    *files, record = write_module(unpacked, name, version, **build)
    with zipfile.ZipFile(folder / f"{record.split('.dist-info')[0]}-py3-none-any.whl", "w") as wheel:
        for path in files:
            wheel.write(unpacked / path, path)
        wheel.writestr(record, "")


def write_tool(path, text):
    executable(path, f"#!/bin/sh\n{text}\n")


class Machine:
    """A checkout in a folder with a space, a python3 without packages, pip without a network, and no GPU."""

    def __init__(self, folder, pip):
        self.checkout = folder / "a checkout"
        common = self.checkout / "scripts" / "common" / "machine"
        common.mkdir(parents=True)
        shutil.copy(REPOSITORY / "pyproject.toml", self.checkout)
        for pattern in ("environment*", "constraints*.txt"):
            for file in (REPOSITORY / "scripts" / "common" / "machine").glob(pattern):
                shutil.copy(file, common)
        self.opt = folder / "opt"  # a ROCm of this machine's own must not be found
        probe = common / "environment.py"
        probe.write_text(probe.read_text().replace('Path("/opt")', f"Path({str(self.opt)!r})"))
        self.venv = self.checkout / ".venv"
        self.python = folder / "python"
        venv.create(self.python, with_pip=False)
        self.packages = next((self.python / "lib").glob("python3*")) / "site-packages"
        self.wheels = folder / "wheels"
        self.wheels.mkdir()
        self.tools = folder / "tools"
        for tool in ("nvidia-smi", "rocminfo", "amd-smi"):
            write_tool(self.tools / tool, "exit 1")
        write_tool(self.tools / "python3", PYTHON.format(python=self.python / "bin" / "python3", pip=pip))
        self.started = []
        self.settings = {"TINY_LLAMA_CPU": "1"}  # a real /dev/kfd cannot be hidden

    def add_wheels(self, versions=PINNED, **build):
        for name, version in versions.items():
            write_wheel(self.wheels, name, version, **(build if name == "torch" else {}))
        write_wheel(self.wheels, "triton", "99.0")  # newer than the pinned one

    def has_amd_gpu(self):
        self.settings.pop("TINY_LLAMA_CPU")
        write_tool(self.tools / "rocminfo", "echo '  Device Type:             GPU' && seq 100000")

    def has_torch_index(self, folder="", version=""):
        """Serve a folder of PyTorch's index from files; as there, triton is required under another name."""
        whl = self.wheels.parent / "whl"
        self.settings |= {"TINY_LLAMA_TORCH_INDEX": whl.as_uri(), "PIP_NO_INDEX": "0"}
        self.settings["PIP_INDEX_URL"] = (self.wheels.parent / "no index").as_uri()
        if not folder:
            return
        project = "pytorch-triton-rocm" if "rocm" in folder else "triton"
        torch, triton = whl / folder / "torch", whl / folder / project
        for path in (torch, triton):
            path.mkdir(parents=True)
        build = {"hip": folder[4:]} if "rocm" in folder else {"cuda": "12.6"}
        write_wheel(torch, "torch", f"{version}+{folder}", requires=f"{project}==3.4.0", **build)
        write_wheel(triton, "triton", "3.4.0", project=project.replace("-", "_"))
        for path in (torch, triton):
            wheel = next(path.glob("*.whl")).name
            (path / "index.html").write_text(f'<a href="{wheel.replace("+", "%2B")}">{wheel}</a>')

    def python_fails_at(self, part):
        """Let python3 fail where a program has this part."""
        program = f'case "$*" in *{part}*) exit 1 ;; esac\nexec "{sys.executable}" "$@"'
        write_tool(self.tools / "python3", program)

    def has_nvidia_gpu(self, banner="| CUDA Version: 13.0 |", capability="9.0"):
        self.settings.pop("TINY_LLAMA_CPU")
        cases = f"-L) echo 'GPU 0: a card' && seq 100000 ;; *compute_cap*) echo {capability} ;; '') echo '{banner}' ;;"
        write_tool(self.tools / "nvidia-smi", f'case "$*" in {cases} esac')

    def waits_in_venv(self):
        """Let python3 stop before it makes an environment until the file go is there, and end of Ctrl-C as pip does."""
        waits = 'trap "exit 1" INT; touch begun; until [ -e go ]; do sleep 0.05; done'
        tool = self.tools / "python3"
        write_tool(tool, f'case "$1 $2" in "-m venv") {waits} ;; esac\n{tool.read_text()}')

    def start(self, commands='use_environment run; echo "$PYTHON"'):
        """Source environment.sh and run the commands; return the process, which leads a group as a terminal's does."""
        environment = {
            "PATH": f"{self.tools}:{self.python / 'bin'}:/usr/local/bin:/usr/bin:/bin",
            "HOME": str(self.checkout),
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": str(self.wheels),
            "PIP_CONFIG_FILE": os.devnull,
            **self.settings,
        }
        environment = {name: value for name, value in environment.items() if value is not None}
        command = ["bash", "-c", f"set -euo pipefail; source scripts/common/machine/environment.sh; {commands}"]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        process = subprocess.Popen(command, cwd=self.checkout, env=environment, start_new_session=True, **pipes)
        self.started.append(process)
        return process

    def run(self, *commands):
        """Return the finished process of start."""
        process = self.start(*commands)
        output, errors = process.communicate(timeout=250)
        return subprocess.CompletedProcess(process.args, process.returncode, output, errors)

    def fails(self, *words):
        """Check that the environment is refused with status 1 and that the last line has these words."""
        result = self.run()
        assert result.returncode == 1 and result.stdout == "", result.stderr
        sentence = result.stderr.splitlines()[-1]
        for word in words:
            assert word in sentence, result.stderr
        return result

    def versions(self):
        """Return {name: (version, file)} of what the environment's interpreter imports."""
        program = "import torch, triton, numpy\nfor m in torch, triton, numpy: print(m.__version__, m.__file__)"
        python = self.venv / "bin" / "python"
        lines = subprocess.run([python, "-c", program], capture_output=True, text=True, check=True).stdout.splitlines()
        return dict(zip(PINNED, (line.split(" ", 1) for line in lines), strict=True))


@pytest.fixture(scope="session")
def pip(tmp_path_factory):
    """Return a folder of packages with pip."""
    venv.create(tmp_path_factory.mktemp("pip") / "venv", with_pip=True)
    return next(tmp_path_factory.getbasetemp().glob("pip*/venv/lib/python3*/site-packages"))


@pytest.fixture
def machine(tmp_path, pip):
    machine = Machine(tmp_path, pip)
    yield machine
    for process in machine.started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.slow
def test_fresh_machine_gets_the_pinned_versions_once(machine):
    machine.add_wheels()
    (machine.tools / "python3").unlink()  # venv and pip as they are
    machine.settings["PIP_USER"] = "1"  # as clusters set it; it must not lead out of the environment
    first = machine.run()
    assert first.stdout == f"{machine.venv}/bin/python\n" and "Installing torch triton numpy" in first.stderr
    assert {name: version for name, (version, _) in machine.versions().items()} == PINNED

    shutil.rmtree(machine.wheels)
    second = machine.run()
    assert (second.returncode, second.stdout, second.stderr) == (0, first.stdout, "")
    assert machine.run("source .venv/bin/activate; use_environment run").stderr == ""  # python3 is its own now


@pytest.mark.parametrize("vendor", ["none", "amd", "nvidia"])
@pytest.mark.quick(1)
@pytest.mark.slow
def test_pytorch_of_the_current_python_is_used_as_it_is(machine, vendor):
    if vendor != "none":
        getattr(machine, f"has_{vendor}_gpu")()
    build = {"none": {}, "amd": {"hip": "6.2"}, "nvidia": {"cuda": "13.0"}}[vendor]
    for name, version in {"torch": "2.7.1", "triton": "3.3.1", "numpy": "2.2.0"}.items():
        write_module(machine.packages, name, version, **(build if name == "torch" else {}))
    result = machine.run()
    assert result.returncode == 0, result.stderr
    assert "Installing" not in result.stderr
    assert machine.versions()["torch"] == ["2.7.1", str(machine.packages / "torch" / "__init__.py")]


def test_only_what_the_current_python_lacks_is_installed(machine):
    machine.add_wheels()
    write_module(machine.packages, "torch", "2.12.0")
    write_module(machine.packages, "numpy", "2.4.1")  # Triton's interpreter cannot use it
    result = machine.run()
    assert result.returncode == 0, result.stderr
    assert "Installing triton numpy\n" in result.stderr
    assert {name: version for name, (version, _) in machine.versions().items()} == {**PINNED, "torch": "2.12.0"}

    machine.settings["TINY_LLAMA_PYTHON"] = sys.executable
    told = machine.run().stderr
    assert f"{machine.venv} was not made from {sys.executable}, but is used: remove it" in told
    assert machine.run().stderr == ""


RELEASES = {  # file below /opt and its text, or amd-smi's answer; release; PyTorch and its folder in the index
    "6.2": ("rocm/.info/version", "6.2.0-66\n", "6.2.0", "2.7.1", "rocm6.2.4"),
    "6.4": ("rocm-6.4.1/.info/version", "6.4.1-83\n", "6.4.1", "2.9.1", "rocm6.4"),
    "7.0": ("rocm/.info/version", "7.0.2-56\n", "7.0.2", "2.10.0", "rocm7.0"),
    "7.1 in a folder of its own": ("rocm/core-7.1/.info/version", "7.1.1", "7.1.1", "2.13.0", "rocm7.1"),
    "7.2": ("rocm/.info/version", "7.2.0-43\n", "7.2.0", "2.13.0", "rocm7.2"),
    "6.3 without files": ("amd-smi", "Tool: 24.7.1+0012a68 | ROCm version: 6.3.4", "6.3.4", "2.9.1", "rocm6.3"),
}


def install_release(machine, file, text):
    """Put what tells the ROCm release where an installed one has it."""
    machine.has_amd_gpu()
    if file == "amd-smi":
        write_tool(machine.tools / "amd-smi", f'echo "{text}"')
    else:
        (machine.opt / file).parent.mkdir(parents=True)
        (machine.opt / file).write_text(text)


@pytest.mark.parametrize("file, text, release, version, folder", RELEASES.values(), ids=RELEASES)
def test_every_rocm_has_its_pytorch(machine, file, text, release, version, folder):
    install_release(machine, file, text)
    assert machine.run('"$(base_python)" "$PROBE" rocm').stdout == f"{release} {version} {folder}\n"


RECORDED = re.search("^torch==(.*)", environment.NVIDIA_PINS.read_text(), re.MULTILINE)[1]
DRIVERS = {  # the banner of nvidia-smi, the compute capability, and what environment.py answers
    "CUDA 11.8": ("CUDA Version: 11.8", "8.0", f"11.8 {RECORDED} -"),
    "CUDA 12.0": ("CUDA Version: 12.0", "8.0", f"12.0 {RECORDED} cu126"),
    "CUDA 12.2": ("CUDA Version: 12.2", "8.0", f"12.2 {RECORDED} cu126"),
    "CUDA 12.7": ("CUDA Version: 12.7", "9.0", f"12.7 {RECORDED} cu126"),
    "CUDA 12.8": ("CUDA Version: 12.8", "12.0", f"12.8 {RECORDED} cu128"),
    "CUDA 12.8, Volta": ("CUDA Version: 12.8", "7.0", f"12.8 {RECORDED} cu126"),
    "CUDA 13.0": ("CUDA Version: 13.0", "7.5", ""),
    "CUDA 13.0, Volta": ("CUDA Version: 13.0", "7.0", f"13.0 {RECORDED} cu126"),
    "CUDA 13.0, Turing and Volta": ("CUDA Version: 13.0", "'7.5\n7.0'", f"13.0 {RECORDED} cu126"),
    "CUDA 13.3, driver 610": ("KMD Version: 610.43.02     CUDA UMD Version: 13.3", "12.1", ""),
    "no library": ("CUDA Version: N/A", "[N/A]", ""),
}


@pytest.mark.parametrize("banner, capability, answer", DRIVERS.values(), ids=DRIVERS)
def test_every_nvidia_driver_has_its_pytorch(machine, banner, capability, answer):
    machine.has_nvidia_gpu(f"| NVIDIA-SMI 1.0   {banner}     |", capability)
    assert machine.run('"$(base_python)" "$PROBE" cuda || true').stdout == f"{answer}\n"


def test_nvidia_driver_for_cuda_12_gets_a_pytorch_that_it_can_run(machine):
    machine.has_nvidia_gpu(*DRIVERS["CUDA 12.2"][:2])
    machine.add_wheels(cuda="13.0")
    machine.has_torch_index("cu126", RECORDED)
    result = machine.run()
    assert result.returncode == 0, result.stderr
    assert f"driver for CUDA 12.2: installing PyTorch {RECORDED} built for CUDA 12.6" in result.stderr
    assert "Installing numpy\n" in result.stderr and "no GPU" not in result.stderr
    assert machine.versions()["torch"][0] == f"{RECORDED}+cu126"


def test_a_pytorch_that_sees_no_gpu_is_named_with_the_reason(machine):
    machine.has_nvidia_gpu()
    machine.add_wheels(
        {"torch": "2.11.0", "triton": "3.6.0", "numpy": PINNED["numpy"]},
        cuda="13.0",
        sees="import warnings; warnings.warn('The NVIDIA driver is too old')",
    )
    result = machine.run()
    assert result.returncode == 0, result.stderr
    assert "PyTorch sees no GPU here, and everything will run on the CPU: The NVIDIA driver is too old" in result.stderr


@pytest.mark.parametrize("name", ["6.3 without files", slow("7.1 in a folder of its own")])
def test_amd_gpu_gets_the_pytorch_of_its_rocm(machine, name):
    file, text, release, version, folder = RELEASES[name]
    install_release(machine, file, text)
    machine.add_wheels(cuda="13.0")
    machine.has_torch_index(folder, version)
    result = machine.run()
    assert result.returncode == 0, result.stderr
    assert f"ROCm {release}: installing PyTorch {version} built for {folder.replace('rocm', 'ROCm ')}" in result.stderr
    assert "Installing numpy\n" in result.stderr  # triton came with torch
    assert [machine.versions()[name][0] for name in ("torch", "triton")] == [f"{version}+{folder}", "3.4.0"]
    assert machine.run().stderr == ""


def test_a_named_rocm_is_installed_where_no_gpu_is_and_kept_where_one_is(machine):
    """A cluster's login node has a network and no GPU, and its compute nodes may have it the other way round."""
    machine.settings.pop("TINY_LLAMA_CPU")
    machine.settings["TINY_LLAMA_ROCM"] = "6.4"
    machine.add_wheels()
    machine.has_torch_index("rocm6.4", "2.9.1")
    result = machine.run()
    assert result.returncode == 0, result.stderr
    assert machine.versions()["torch"][0] == "2.9.1+rocm6.4"

    del machine.settings["TINY_LLAMA_ROCM"], machine.settings["TINY_LLAMA_TORCH_INDEX"]
    shutil.rmtree(machine.wheels)
    machine.settings["TINY_LLAMA_CPU"] = ""
    machine.has_amd_gpu()
    assert machine.run().stderr == ""


def test_amd_gpu_without_a_network_is_told_the_command(machine):
    file, text, release, version, folder = RELEASES["6.2"]
    install_release(machine, file, text)
    machine.add_wheels(cuda="13.0")
    machine.has_torch_index()
    command = f"torch=={version}+{folder} --index-url {machine.settings['TINY_LLAMA_TORCH_INDEX']}/{folder}"
    machine.fails(f"PyTorch {version} for ROCm {release}", "PyTorch module", command)


def has_rocm(text):
    return lambda machine: install_release(machine, "rocm/.info/version", text)


def has_a_file_in_the_way(machine):
    (machine.checkout / "file").write_text("")
    machine.settings["TINY_LLAMA_VENV"] = str(machine.checkout / "file" / "venv")


def has_no_venv_module(machine):
    machine.python_fails_at("ensurepip")
    write_module(machine.packages, "torch", "2.13.0")


@pytest.mark.parametrize(
    ("name", "made"),
    [
        ("PYTHONPATH", False),
        ("PYTHONPATH", True),
        ("PYTHONHOME", False),
        ("PYTHONHOME", True),
        ("LD_LIBRARY_PATH", True),
    ],
)
@pytest.mark.quick(2)
def test_a_setting_that_breaks_python_is_named(name, made, machine, tmp_path):
    """The message said that the environment does not work and to remove it, or that Python was too old."""
    for package, version in PINNED.items():
        write_module(machine.packages, package, version)
    with open(machine.packages / "torch" / "__init__.py", "a") as file:
        file.write(
            "import os\nif 'broken' in os.environ.get('LD_LIBRARY_PATH', ''):\n    raise ImportError('libc10.so')\n"
        )
    broken = tmp_path / "broken"
    (broken / "torch").mkdir(parents=True)
    (broken / "torch" / "__init__.py").write_text("raise ImportError('broken')")
    if made:
        assert machine.run().returncode == 0
    machine.add_wheels()
    machine.settings[name] = str(broken)
    machine.fails(f"{name}={broken}", "unset it")
    del machine.settings[name]
    assert machine.run().returncode == 0


def test_a_damaged_configuration_of_pip_is_named(machine, tmp_path):
    machine.add_wheels()
    (tmp_path / "pip.conf").write_text("no section")
    machine.settings["PIP_CONFIG_FILE"] = str(tmp_path / "pip.conf")
    result = machine.fails("pip's configuration is damaged", "PIP_CONFIG_FILE=/dev/null")
    assert "pip.conf" in result.stderr


@pytest.mark.parametrize(
    ("prepare", "words"),
    [
        (has_rocm("6.0.2-115"), ["for ROCm 6.0.2 is unknown", "ROCm from 6.2 on", "TINY_LLAMA_CPU=1"]),
        (has_rocm("7.14.0"), ["for ROCm 7.14.0 is unknown", "PyTorch module", "=7.2 ./scripts/quick"]),
        (has_rocm("10.0.0"), ["for ROCm 10.0.0 is unknown", "=7.2 ./scripts/quick", "rocm/pytorch"]),
        (Machine.has_amd_gpu, ["no ROCm release was found", "ROCM_PATH", "TINY_LLAMA_ROCM=7.2 ./scripts/quick"]),
        (lambda machine: machine.has_nvidia_gpu("CUDA Version: 11.4"), ["for CUDA 11.4", "525", "TINY_LLAMA_CPU=1"]),
        (lambda machine: machine.settings.update(TINY_LLAMA_PYTHON="python3.99"), ["no python3.99", "Python 3.10"]),
        (lambda machine: machine.python_fails_at("version_info"), ["older than Python 3.10", "TINY_LLAMA_PYTHON"]),
        (has_no_venv_module, ["cannot make virtual environments", "python3-venv"]),
        (has_a_file_in_the_way, ["Cannot write", "TINY_LLAMA_VENV"]),
    ],
    ids="ROCm 6.0,ROCm 7.14,ROCm 10,no ROCm,CUDA 11,no Python,old Python,no venv,not writable".split(","),
)
def test_what_cannot_be_set_up_is_said_in_one_sentence(machine, prepare, words):
    prepare(machine)
    said = machine.fails(*words).stderr.splitlines()
    assert len([line for line in said if not line.startswith("Using the PyTorch")]) == 1
    assert not machine.venv.exists()


@pytest.mark.parametrize("pattern", ["rocm/core-{}", "rocm-{}"])
def test_releases_are_compared_as_numbers(machine, pattern):
    for release in ("7.2", "10.0", "7.14"):
        file = machine.opt / pattern.format(release) / ".info" / "version"
        file.parent.mkdir(parents=True)
        file.write_text(f"{release}.0-1")
    assert machine.run('"$(base_python)" "$PROBE" rocm').stdout == "10.0.0 unknown rocm7.2\n"


def test_a_new_release_is_one_line_of_the_table(machine):
    install_release(machine, "rocm/.info/version", "10.0.0")
    with open(machine.checkout / "scripts" / "common" / "machine" / "environment_rocm.txt", "a") as table:
        table.write("10.0   2.15.0   rocm10.0\n")
    assert machine.run('"$(base_python)" "$PROBE" rocm').stdout == "10.0.0 2.15.0 rocm10.0\n"
    machine.settings["TINY_LLAMA_ROCM"] = "7.9"
    assert machine.run('"$(base_python)" "$PROBE" rocm').stdout == "7.9 unknown rocm10.0\n"


def test_the_rocm_of_a_module_comes_before_the_installed_one(machine):
    install_release(machine, "rocm/.info/version", "6.2.0-66")
    (machine.opt / "modules" / ".info").mkdir(parents=True)
    (machine.opt / "modules" / ".info" / "version").write_text("6.4.3-128")
    machine.settings["ROCM_PATH"] = str(machine.opt / "modules")
    assert machine.run('"$(base_python)" "$PROBE" rocm').stdout == "6.4.3 2.9.1 rocm6.4\n"
    machine.settings["TINY_LLAMA_ROCM"] = "7.0"  # what the user says comes before both
    assert machine.run('"$(base_python)" "$PROBE" rocm').stdout == "7.0 2.10.0 rocm7.0\n"


@pytest.mark.parametrize(
    "version, build", [slow("2.13.0", {"cuda": "13.0"}), slow("2.13.0", {}), ("2.6.0", {"hip": "6.2"})], ids=str
)
def test_amd_gpu_does_not_use_another_build(machine, version, build):
    install_release(machine, "rocm/.info/version", "6.4.1-83")
    write_module(machine.packages, "torch", version, **build)
    machine.has_torch_index("rocm6.4", "2.9.1")
    machine.add_wheels()
    assert machine.run().returncode == 0
    assert machine.versions()["torch"][0] == "2.9.1+rocm6.4"


@pytest.mark.slow
def test_the_oldest_set_has_an_environment_of_its_own(machine):
    oldest = {"torch": "2.7.1", "triton": "3.3.1", "numpy": "1.26.4"}
    if sys.version_info >= (3, 13) or platform.machine() == "aarch64":
        pytest.skip("the oldest set has other versions here")
    machine.add_wheels()
    for name, version in oldest.items():
        write_wheel(machine.wheels, name, version)
    write_module(machine.packages, "torch", "2.12.0")  # of another set: not used
    machine.settings["TINY_LLAMA_SET"] = "oldest"
    result = machine.run()
    assert result.returncode == 0, result.stderr
    assert result.stdout == f"{machine.checkout}/.venv-oldest/bin/python\n"
    machine.venv = machine.checkout / ".venv-oldest"
    assert {name: version for name, (version, _) in machine.versions().items()} == oldest
    machine.settings["TINY_LLAMA_SET"] = "newest"
    assert "pinned or oldest, not newest" in machine.run().stderr


@pytest.mark.parametrize(
    ("version", "within"),
    [("2.4", True), ("2.4.1+cpu", True), ("2.10", True), ("2.3.9", False), ("2.11", False), ("2.11.0", False)],
)
def test_a_version_is_from_the_lower_bound_up_to_the_upper_one(version, within):
    """The upper one is the first version that is not allowed."""
    assert environment.within(version, "2.4", "2.11") == within


def test_the_oldest_set_is_the_floor_of_pyproject():
    """The floor is what the suite runs with: the least version of each set of constraints-oldest.txt."""
    text = (REPOSITORY / "scripts" / "common" / "machine" / "constraints-oldest.txt").read_text()
    for name, low, high in environment.requirements("run"):
        versions = re.findall(rf"^{name}==([\d.]+)", text, re.MULTILINE)
        least = min(environment.numbers(version) for version in versions)
        floor = environment.numbers(low)
        assert least[: len(floor)] == floor, f"{name}: {low} in pyproject.toml, {least} in the oldest set"
        assert not high or all(environment.within(version, low, high) for version in versions)


@pytest.mark.slow
def test_nvidia_gpu_gets_the_versions_that_were_recorded(machine):
    machine.add_wheels()
    assert machine.run().returncode == 0  # without a GPU
    recorded = newest_record().suite()["record"]["packages"]
    machine.has_nvidia_gpu()
    for build in ({}, {"cuda": "13.0"}):
        machine.add_wheels({"torch": recorded["torch"], "triton": recorded["triton"]}, **build)
        shutil.rmtree(machine.venv)
        result = machine.run()
        assert result.returncode == 0 and ("PyTorch without CUDA" in result.stderr) == (not build)
    found = {name: version for name, (version, _) in machine.versions().items()}
    assert found == PINNED | {name: recorded[name] for name in ("torch", "triton")}
    pins = (REPOSITORY / "scripts" / "common" / "machine" / "constraints-nvidia.txt").read_text()
    assert all(f"{name}=={recorded[name]}\n" in pins for name in ("transformers", "liger-kernel", "torchao"))


@pytest.mark.slow
def test_without_packages_to_install_it_says_so_and_recovers(machine):
    machine.fails("pip could not install torch triton numpy", "PIP_INDEX_URL")
    machine.add_wheels()
    assert machine.run().returncode == 0


OWN = {  # the environment's packages and what is said of it
    "no environment": (None, "has no PyTorch that fits and was not made by this script"),
    "no packages": ([], "has no PyTorch that fits and was not made by this script"),
    "some packages": (["torch"], "lacks triton numpy and was not made by this script"),
    "all packages": (PINNED, ""),
}


@pytest.mark.parametrize(("packages", "said"), OWN.values(), ids=OWN)
def test_a_folder_of_the_user_is_left_alone(machine, packages, said):
    machine.add_wheels()
    machine.settings["TINY_LLAMA_VENV"] = "home"
    home = machine.checkout / "home"
    home.mkdir()
    (home / "thesis.tex").write_text("years of work")
    if packages is not None:
        venv.create(home, with_pip=False)
    for name in packages or ():
        write_module(next(home.glob("lib/python3*/site-packages")), name, PINNED[name])
    times = {path: path.stat().st_mtime_ns for path in home.rglob("*") if path.is_file()}
    if said:
        machine.fails(said)
    else:
        assert machine.run().returncode == 0
    for path in home.rglob("*.pyc"):
        times.setdefault(path, path.stat().st_mtime_ns)  # the interpreter's own
    assert {path: path.stat().st_mtime_ns for path in home.rglob("*") if path.is_file()} == times


@pytest.mark.slow
def test_what_an_interrupted_call_left_is_completed(machine):
    machine.add_wheels()
    venv.create(machine.venv, with_pip=False)
    (machine.venv / "made-by-tiny-llama").touch()
    write_tool(machine.tools / "rm", '/bin/rm -f "$3/made-by-tiny-llama"; exit 1')
    assert machine.run().returncode == 1  # interrupted while it removes the folder of its last argument
    (machine.tools / "rm").unlink()
    result = machine.run()
    assert result.returncode == 0, result.stderr
    # This python3 has no PyTorch: "Using the PyTorch of" it would be wrong.
    assert result.stderr.startswith("Making the Python environment in ")
    assert "pip's default index" not in result.stderr  # pip's settings name another

    packages = next(machine.venv.glob("lib/python3*/site-packages"))
    (packages / "torch-2.13.0.dist-info" / "INSTALLER").unlink()
    (packages / "triton-3.7.1.dist-info" / "METADATA").unlink()
    (packages / "triton-3.7.1.dist-info" / "INSTALLER").unlink()
    shutil.rmtree(next(packages.glob("numpy-*.dist-info")))
    (packages / "numpy" / "__init__.py").unlink()
    (machine.venv / "run.stamp").unlink()
    result = machine.run()
    assert result.returncode == 0, result.stderr
    assert "Making" not in result.stderr and "Installing torch triton numpy\n" in result.stderr
    assert {name: version for name, (version, _) in machine.versions().items()} == PINNED


@pytest.mark.parametrize("end", ["finishes", signal.SIGINT, signal.SIGKILL])
@pytest.mark.quick(1)
def test_of_two_calls_one_waits_for_the_other(machine, end):
    machine.add_wheels()
    machine.waits_in_venv()
    first = machine.start()
    while not (machine.checkout / "begun").exists():
        assert first.poll() is None
    second = machine.start()
    waits = f"Another call is making a Python environment in {machine.checkout}: waiting until it ends\n"
    assert second.stderr.readline() == waits
    if end != "finishes":
        os.killpg(first.pid, end)
        errors = first.communicate(timeout=60)[1]
        assert first.returncode == (130 if end == signal.SIGINT else -end)
        said = "Interrupted: the next call completes the environment in " if end == signal.SIGINT else "Making"
        assert errors.splitlines()[-1].startswith(said)
    (machine.checkout / "go").touch()
    output, errors = second.communicate(timeout=250)
    assert second.returncode == 0 and output == f"{machine.venv}/bin/python\n", errors
    if end == "finishes":
        assert errors == "" and first.communicate(timeout=60)[0] == output


@pytest.mark.parametrize("gpu", ["none", "amd"])
def test_a_command_that_is_told_can_be_pasted(machine, gpu):
    """The checkout's folder has a space in its name."""
    if gpu == "amd":
        install_release(machine, "rocm/.info/version", "6.2.0-66")
        machine.has_torch_index()
    else:  # pip's own index, which cannot be reached
        machine.settings |= dict.fromkeys(("PIP_NO_INDEX", "PIP_FIND_LINKS"))
        machine.settings |= {"PIP_RETRIES": "0", "HTTPS_PROXY": "http://127.0.0.1:9"}
    told = next(line for line in machine.run().stderr.splitlines() if " -m pip install " in line)
    words = shlex.split(told[told.index(": /") + 2 :])
    assert words[:4] == [f"{machine.venv}/bin/python", "-m", "pip", "install"]
    assert gpu == "amd" or words[6] == f"{machine.checkout}/scripts/common/machine/constraints.txt"


@pytest.mark.slow
def test_shell_scripts_are_clean():
    checker = shutil.which("shellcheck", path=f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}")
    if not checker:
        pytest.skip("shellcheck is not installed")
    hidden = (".venv", ".venv-oldest", ".git", ".dev")  # .dev is scratch room that git ignores
    scripts = {p.resolve() for p in REPOSITORY.rglob("*.sh") if p.relative_to(REPOSITORY).parts[0] not in hidden}
    scripts = sorted({*scripts, REPOSITORY / ".ci" / "run", REPOSITORY / "scripts" / "train.sbatch"})
    result = subprocess.run([checker, *scripts], cwd=REPOSITORY, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("script", ["quickstart.sh", "test.sh", "check_room.sh", "maintain/record.sh"])
def test_the_help_is_the_first_comment_alone(script):
    path = REPOSITORY / "scripts" / script
    result = subprocess.run([path, "--help"], capture_output=True, text=True, timeout=20)
    _, *lines = path.read_text().splitlines()
    told = [line[2:] for line in itertools.takewhile(lambda line: line.startswith("#"), lines)]
    assert (result.returncode, result.stderr) == (0, "") and result.stdout.splitlines() == told
