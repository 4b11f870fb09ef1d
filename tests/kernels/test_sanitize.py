"""maintain/sanitize_kernels.py with a stub for the sanitizer, and the kernels that it watches."""

import re

import pytest
import torch

from common.measuring.guarded_memory import launches
from common.versions import SCRIPTS
from kernel_cases import multiplies_fp8
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
@pytest.mark.slow
def test_the_program_launches_every_kernel(capsys):
    with launches() as launched:
        assert sanitize_kernels.main(["--run"]) == 0, capsys.readouterr().err
    assert len(KERNELS) >= 10 and launched >= KERNELS
    assert capsys.readouterr().err.startswith("launching the kernels in torch.float32 on ")


@multiplies_fp8
def test_the_matmul_that_stands_in_gives_what_the_library_gives(device):
    v3 = sanitize_kernels.load_version(3)
    x, a = v3.quantize_rows(torch.randn(48, 32).to(device))
    w, s = v3.quantize_rows(torch.randn(16, 32).to(device))
    ours = sanitize_kernels.matmul_of_scaled(x, a, w, s.view(1, -1))
    assert torch.allclose(ours.float(), v3.fp8_matmul(x, a, w, s.view(1, -1)).float(), rtol=2**-7, atol=1e-6)


def test_a_result_that_is_not_finite_is_found(monkeypatch, capsys):
    monkeypatch.setattr(sanitize_kernels.load_version(3), "packed_swiglu", lambda x: x / 0)
    assert (
        sanitize_kernels.main(["--run"]) == 1
        and "DivBackward0 in torch.float32 gives a result" in capsys.readouterr().err
    )


@pytest.fixture
def sanitize(tmp_path, monkeypatch, capfd):
    """Return a function that runs the tool with stubs: `found` is its result, `without` names what is missing.

    It returns the exit status, standard output and standard error.
    """

    def run(*argv, found="nothing", without=""):
        program = "echo a kernel failed && exit 1" if found == "broken" else "echo all kernels ran"
        for name, text in {"compute-sanitizer": SANITIZER, "program stub": program}.items():
            executable(tmp_path / name, f"#!/bin/bash\n{text}\n")
        if without == "compute-sanitizer":
            monkeypatch.setattr(sanitize_kernels.shutil, "which", lambda *_, **__: None)  # a machine may have its own
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
        monkeypatch.setenv("FOUND", found)
        monkeypatch.setattr(sanitize_kernels, "PROGRAM", [str(tmp_path / "program stub")])
        monkeypatch.setattr(torch.cuda, "is_available", lambda: without != "a GPU")
        status = sanitize_kernels.main([*argv])
        return status, *capfd.readouterr()

    return run


def test_sanitize_prints_a_line_for_each_tool(sanitize):
    status, out, err = sanitize()
    assert status == 0 and out.endswith("\nnothing was found\n"), err
    tools = [line.split()[0] for line in out.splitlines() if "SUMMARY: 0" in line]
    assert tools == ["memcheck", "racecheck", "initcheck"]
    assert err.splitlines()[1:] == [f"running them under {tool}" for tool in tools]
    assert sanitize("racecheck")[1].startswith("racecheck  ERROR SUMMARY: 0 errors\nnothing")


@pytest.mark.parametrize("found", ["errors", "hazards", "refused", "silence"])
def test_sanitize_fails_where_something_is_found(sanitize, found):
    status, out, _ = sanitize("memcheck", found=found)
    assert status == 1 and "nothing was found" not in out
    assert out.count("option --tool memcheck") == 1
    assert set(re.findall("--kernel-name kns=(.*)", out)) == KERNELS
    assert "kns=" not in sanitize("initcheck", found=found)[1]


def test_one_tool_that_finds_something_is_enough(sanitize, monkeypatch):
    monkeypatch.setattr(sanitize_kernels, "watch", lambda sanitizer, tool: tool != "racecheck")
    assert sanitize()[0] == 1


@pytest.mark.parametrize(
    ("argv", "problem", "status", "words"),
    [
        (["nonsense"], {}, 2, "nonsense is no tool"),
        ([], {"found": "broken"}, 1, "do not run even without a tool"),
        ([], {"without": "a GPU"}, 1, "there is none here"),
        ([], {"without": "compute-sanitizer"}, 1, "is not installed"),
    ],
)
def test_sanitize_says_in_one_sentence_why_it_does_not_begin(sanitize, argv, problem, status, words):
    ended, out, err = sanitize(*argv, **problem)
    assert ended == status and words in err and "SUMMARY" not in out
    assert err.splitlines()[-1].startswith("sanitize_kernels.py: ") and err.count("sanitize_kernels.py: ") == 1
    assert out == "a kernel failed\n" * ("found" in problem)
