"""maintain/record.sh and contribute_record.sh: what they run, that they go on where they were cut off, their errors."""

import json
import os
import re
import subprocess

import pytest

import benchmark_suite
from common.versions import REPOSITORY
from processes import executable

MAINTAIN = REPOSITORY / "scripts" / "maintain"
SUITE = "benchmark_suite.py"
# Answers for the number of GPUs and for provenance.py; notes every other program and where it ran.
PYTHON = """#!/bin/bash
[[ $1 != -c ]] || { echo "$GPUS"; exit 0; }
[[ $1 != *provenance.py ]] || { echo '{"command": "'"${*:2}"'"}'; exit 0; }
echo "$(basename "$PWD") $*" >>"$LOG"
[[ "$*" != *"$FAILS"* ]] || { echo "it broke"; exit 1; }
"""


def bash(script, *arguments, **given):
    given = {name: str(value) for name, value in given.items()}
    return subprocess.run(["bash", script, *arguments], capture_output=True, text=True, env=os.environ | given)


@pytest.fixture
def record(tmp_path):
    """Return record(argument, ...), which runs the script with the stub and returns its finished process."""
    python = executable(tmp_path / "a python", PYTHON)

    def run(*arguments, gpus=1, fails="nothing"):
        given = {"TINY_LLAMA_PYTHON": python, "LOG": tmp_path / "log", "GPUS": gpus, "FAILS": fails}
        return bash(MAINTAIN / "record.sh", tmp_path / "re sults", *arguments, **given)

    return run


def ran(tmp_path):
    """Return (part, program) of every line of the log."""
    lines = (tmp_path / "log").read_text().splitlines()
    return [(line.split()[0], re.findall(r"/(\w+\.py)", line)[-1]) for line in lines]


def test_each_part_is_complete_in_itself_and_kept(record, tmp_path):
    some = ["--only", "headline,kernels,ablation2,ablation3,memory"]
    first = record(*some)
    assert first.returncode == 0 and first.stdout.endswith(f"complete: {tmp_path / 're sults'}\n"), first.stdout
    study = "fusion_ablation_study.py"
    wanted = [("headline", SUITE), ("kernels", "benchmark_kernels.py"), ("ablation2", study), ("ablation3", study)]
    assert ran(tmp_path) == [*wanted, ("memory", "analyze_memory_scaling.py")]
    kept = json.loads((tmp_path / "re sults" / "kernels" / "record.json").read_text())
    # what is published names no folder of the machine
    assert kept["command"] == "a python scripts/maintain/benchmark_kernels.py --json kernels.json"
    second = record(*some)
    assert second.returncode == 0 and second.stdout.count(": kept") == 5 and len(ran(tmp_path)) == 5


def test_what_was_cut_off_goes_on_and_a_failure_is_named(record, tmp_path):
    done = record("--only", "kernels,ablation2", fails="benchmark_kernels")
    assert done.returncode == 1
    assert "kernels: status 1" in done.stdout and "it broke" in done.stdout and "ablation2: done" in done.stdout
    assert done.stdout.endswith("not complete yet: kernels; the same command goes on\n")
    assert record("--only", "kernels").returncode == 0
    assert [part for part, _ in ran(tmp_path)] == ["kernels", "ablation2", "kernels"]


@pytest.mark.parametrize(("limit", "bounded"), [("560", 530), ("100000", 1770)])
def test_the_headline_is_bounded(limit, bounded, record, tmp_path):
    assert record("--only", "headline", "--time-limit", limit).returncode == 0
    given = int(re.search(r"--time-limit (\d+)", (tmp_path / "log").read_text())[1])
    assert bounded - 10 <= given <= bounded


def test_what_would_not_end_in_time_is_left(record, tmp_path):
    done = record("--only", "kernels", "--time-limit", "50")
    assert done.returncode == 1 and "kernels: no time left" in done.stdout and not (tmp_path / "log").exists()


@pytest.mark.parametrize(("gpus", "counts"), [(2, "1,2"), (4, "1,2,4"), (6, "1,2,4")])
def test_several_gpus_are_measured_where_there_are_some(gpus, counts, record, tmp_path):
    assert record("--only", "ddp", gpus=gpus).returncode == 0
    assert ran(tmp_path) == [("ddp", SUITE)]
    log = (tmp_path / "log").read_text()
    assert f"--nproc {counts} " in log and "v3,v4,v3+fsdp" in log


@pytest.mark.parametrize("toy", [[], ["--toy"]], ids=["whole", "toy"])
def test_the_suite_takes_the_options_that_it_is_given(toy, record, tmp_path, monkeypatch):
    """Every case of the headline once: versions in all precisions, peers in bfloat16 and fp8 alone."""
    assert record("--only", "headline,graph", *toy, gpus=1 - len(toy)).returncode == 0
    monkeypatch.setattr(benchmark_suite, "on_cpu", lambda argv: False)
    cases = []
    for line in (tmp_path / "log").read_text().splitlines():
        words = line.split("benchmark_suite.py ")[1].split()
        arguments = benchmark_suite.parse_arguments([*words, "--results", str(tmp_path / "new")])
        cases.append([(c.preset, c.model, c.precision, c.graph) for c in benchmark_suite.grid(arguments)])
    headline, graph = cases
    presets = {"tiny"} if toy else {"small", "medium"}
    assert {preset for preset, *_ in headline} == presets
    assert (len(headline), len(graph)) == (20 * len(presets), 10 * len(presets))
    assert len(set(headline)) == len(headline) and len(set(graph)) == len(graph)
    in_fp8 = [model for preset, model, precision, _ in headline if precision == "fp8"]
    assert in_fp8 == ["v3", "hf+compile"] * len(presets)


@pytest.mark.parametrize(
    ("arguments", "gpus", "said"),
    [
        (["--frobnicate"], 1, "unknown option --frobnicate"),
        (["--time-limit", "soon"], 1, "needs a positive number, got soon"),
        (["another"], 1, "one folder"),
        (["--only"], 1, "--only needs a value"),
        (["--only", "suite"], 1, "suite is none of headline"),
        (["--only", "ddp"], 1, "ddp is none of headline"),
        ([], 0, "PyTorch sees no GPU here"),
    ],
)
def test_bad_options_are_one_sentence(record, arguments, gpus, said):
    done = record(*arguments, gpus=gpus)
    assert done.returncode == 2 and said in done.stderr and done.stderr.count("\n") == 1


# ---------------------------------------------------------------- contribute_record.sh


@pytest.fixture
def contribute(tmp_path):
    """Run contribute_record.sh in a copy whose tools only note how they were called."""
    scripts, name = tmp_path / "scripts", "contribute_record.sh"
    script = executable(scripts / "maintain" / name, (MAINTAIN / name).read_text())
    python = """#!/bin/bash
if [[ $1 == -c ]]; then echo "$GPU"; else echo "$*" >>"$LOG"; fi
[[ "$*" != "-m pytest"* ]] || { echo "passed in $LOG"; exit "$TESTS"; }
"""
    stub = executable(tmp_path / "python", python)
    executable(scripts / "common" / "environment.sh", f"ROOT={tmp_path} PYTHON={stub}\nuse_environment() {{ :; }}\n")
    executable(scripts / "maintain" / "record.sh", '#!/bin/bash\necho "record $*" >>"$LOG"\nexit "$RECORD"\n')

    def run(*arguments, gpu="AMD Instinct MI300X", tests=0, record=0):
        return bash(script, *arguments, LOG=tmp_path / "log", GPU=gpu, TESTS=tests, RECORD=record)

    return run


def test_contribute_tests_then_records_within_the_limit(contribute, tmp_path):
    result = contribute("--time-limit", "600")
    assert result.returncode == 0 and "The record is complete" in result.stdout, result.stderr
    tests, record, table = (tmp_path / "log").read_text().splitlines()
    assert "pytest -q tests/kernels" in tests and table.endswith("ladder.py --write")
    (folder,) = (tmp_path / "scripts" / "recorded" / "contributed").iterdir()
    assert folder.name.startswith("amd-instinct-mi300x_20")
    assert (folder / "tests.txt").read_text() == "passed in log\n"  # and not in a folder of this machine
    limit = int(record.split("--time-limit ")[1])
    assert f"record {folder} --only headline,kernels" in record and 500 < limit <= 600
    contribute()
    assert (tmp_path / "log").read_text().count("-m pytest") == 1  # what passed is kept


def test_contribute_says_what_is_not_there(contribute):
    failed = contribute(tests=1)
    assert failed.returncode == 1 and "tests.log: please open an issue" in failed.stderr
    assert "The record is complete" not in failed.stdout
    assert contribute(record=1).returncode == 1
    wrong = {"--bad": "--bad is unknown", "--folder": "--folder needs a value", "": "no GPU"}
    wrong |= dict.fromkeys(("--time-limit", "--time-limit soon"), "--time-limit needs a value")
    for arguments, said in wrong.items():
        refused = contribute(*arguments.split(), gpu="a GPU" if arguments else "")
        assert refused.returncode == 2 and said in refused.stderr and not refused.stdout
