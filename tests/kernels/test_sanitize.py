"""maintain/sanitize.sh with a stub for the sanitizer, and the program that it watches."""

import re
import subprocess

import pytest
import torch

from common.versions import REPOSITORY, SCRIPTS
from kernel_cases import launches, multiplies_fp8
from maintain import sanitize_kernels
from processes import executable

KERNELS = set(re.findall(r"^def (\w+_kernel)\(", SCRIPTS[3].read_text(), re.MULTILINE))
SANITIZER = """
while [ "${1#--}" != "$1" ]; do echo "option $1 $2" && shift 2; done
case $FOUND in
    errors) "$@" && echo "========= Invalid __global__ read" && echo "========= ERROR SUMMARY: 3 errors" && exit 1 ;;
    hazards) "$@" && echo "========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)" ;;
    refused) echo "========= Error: Device not supported" && echo "========= ERROR SUMMARY: 0 errors" ;;
    silence) "$@" ;;
    *) echo "========= ERROR SUMMARY: 0 errors" && "$@" ;;
esac
"""


@multiplies_fp8
def test_the_program_launches_every_kernel(capsys):
    with launches() as launched:
        assert sanitize_kernels.main([]) == 0, capsys.readouterr().err
    assert len(KERNELS) >= 10 and launched >= KERNELS


@multiplies_fp8
def test_the_matmul_that_stands_in_gives_what_the_library_gives(device):
    v3 = sanitize_kernels.load_version(3)
    x, a = v3.quantize_rows(torch.randn(48, 32).to(device))
    w, s = v3.quantize_rows(torch.randn(16, 32).to(device))
    ours = sanitize_kernels.matmul_of_scaled(x, a, w, s.view(1, -1))
    assert torch.allclose(ours.float(), v3.fp8_matmul(x, a, w, s.view(1, -1)).float(), rtol=2**-7, atol=1e-6)


def test_a_result_that_is_not_finite_is_found(monkeypatch, capsys):
    monkeypatch.setattr(sanitize_kernels.load_version(3), "packed_swiglu", lambda x: x / 0)
    assert sanitize_kernels.main([]) == 1 and "DivBackward0 in torch.float32 gives a result" in capsys.readouterr().err


@pytest.fixture
def sanitize(tmp_path):
    """Return a function that runs sanitize.sh with stubs: `found` is its result, `without` names a missing tool."""

    def run(*argv, found="nothing", without=""):
        python = "echo a kernel failed && exit 1" if found == "broken" else "echo all kernels ran"
        for name, text in {"nvidia-smi": "exit 0", "compute-sanitizer": SANITIZER, "python stub": python}.items():
            if name != without:
                executable(tmp_path / name, f"#!/bin/bash\n{text}\n")
        environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "FOUND": found}
        environment["TINY_LLAMA_PYTHON"] = str(tmp_path / "python stub")
        command = ["bash", str(REPOSITORY / "scripts" / "maintain" / "sanitize.sh"), *argv]
        return subprocess.run(command, env=environment, capture_output=True, text=True, cwd=tmp_path, check=False)

    return run


def test_sanitize_prints_a_line_for_each_tool(sanitize):
    result = sanitize()
    assert result.returncode == 0 and result.stdout.endswith("\nnothing was found\n"), result.stderr
    tools = [line.split()[0] for line in result.stdout.splitlines() if "SUMMARY: 0" in line]
    assert tools == ["memcheck", "racecheck", "initcheck"]
    assert sanitize("racecheck").stdout.startswith("racecheck  ERROR SUMMARY: 0 errors\nnothing")


@pytest.mark.parametrize("found", ["errors", "hazards", "refused", "silence"])
def test_sanitize_fails_where_something_is_found(sanitize, found):
    result = sanitize("memcheck", found=found)
    assert result.returncode == 1 and "nothing was found" not in result.stdout
    assert result.stdout.count("option --tool memcheck") == 1
    assert set(re.findall("--kernel-name kns=(.*)", result.stdout)) == KERNELS
    assert "kns=" not in sanitize("initcheck", found=found).stdout


@pytest.mark.parametrize(
    ("argv", "problem", "status", "words"),
    [
        (["nonsense"], {}, 2, "nonsense is no tool"),
        ([], {"found": "broken"}, 1, "do not run even without a tool"),
        ([], {"without": "nvidia-smi"}, 1, "there is none here"),
        ([], {"without": "compute-sanitizer"}, 1, "is not installed"),
    ],
)
def test_sanitize_says_in_one_sentence_why_it_does_not_begin(sanitize, argv, problem, status, words):
    if "without" in problem and torch.cuda.is_available():
        pytest.skip("this machine has what the test does without")
    result = sanitize(*argv, **problem)
    assert result.returncode == status and words in result.stderr and "SUMMARY" not in result.stdout
    assert result.stderr.startswith("sanitize.sh: ") and result.stderr.count("\n") == 1
    assert result.stdout == "a kernel failed\n" * ("found" in problem)
