"""scripts/maintain/record.sh: what it runs, that it goes on where it was cut off, and that a failure is one."""

import os
import subprocess

import pytest

from common.versions import REPOSITORY

SCRIPT = REPOSITORY / "scripts" / "maintain" / "record.sh"
# Answers for the number of GPUs; else notes the program and writes the file that --json or --results names.
PYTHON = """#!/bin/bash
if [[ $1 == -c ]]; then echo "$GPUS"; exit 0; fi
echo "$* on ${CUDA_VISIBLE_DEVICES-all}" >>"$LOG"
[[ "$*" != *"$FAILS"* ]] || { echo "it broke" ; exit 1; }
while [[ $# -gt 0 ]]; do
    [[ $1 != --json ]] || echo '{}' >"$2"
    [[ $1 != --results ]] || { mkdir -p "$2"; echo '{}' >"$2/suite.json"; }
    shift
done
echo "$LAST_WORDS"
"""


@pytest.fixture
def record(tmp_path):
    """record(argument, ...) runs the script with the stand-in; its finished process."""
    python = tmp_path / "a python"
    python.write_text(PYTHON)
    python.chmod(0o755)

    def run(*arguments, gpus=1, fails="nothing", last_words="done"):
        given = {"TINY_LLAMA_PYTHON": str(python), "LOG": str(tmp_path / "log"), "GPUS": str(gpus), "FAILS": fails}
        return subprocess.run(
            ["bash", SCRIPT, tmp_path / "re sults", *arguments],
            capture_output=True, text=True, timeout=60, env=os.environ | given | {"LAST_WORDS": last_words},
        )  # fmt: skip

    return run


def lines_of(tmp_path):
    return (tmp_path / "log").read_text().splitlines()


def programs(tmp_path):
    words = [line.split() for line in lines_of(tmp_path)]
    return [next(os.path.basename(word) for word in line if word.endswith(".py")) for line in words]


def test_what_is_there_is_kept(record, tmp_path):
    some = ["--only", "suite,kernels,ablation2,ablation3,pages"]
    first = record(*some)
    assert first.returncode == 0 and "all there" in first.stdout
    study = "fusion_ablation_study.py"
    assert programs(tmp_path) == ["benchmark_suite.py"] * 2 + ["benchmark_kernels.py", study, study, "try_pages.py"]
    second = record(*some)
    assert second.returncode == 0 and second.stdout.count(": kept") == 4
    assert programs(tmp_path)[6:] == ["benchmark_suite.py"] * 2  # it knows itself what it lacks


def test_several_gpus_are_measured_together(record, tmp_path):
    done = record("--only", "scaling,links", gpus=4)
    assert done.returncode == 0, done.stdout
    assert programs(tmp_path) == ["benchmark_suite.py", "measure_allreduce.py"]
    log = (tmp_path / "log").read_text()
    assert "--nproc 1,2,4 " in log.replace("\n", " \n") and "--nproc-per-node 4" in log


def test_what_needs_one_gpu_runs_side_by_side(record, tmp_path, monkeypatch):
    """Four steps on three GPUs, of which one fails: each sees one, the fourth that of the first."""
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    some = ["--only", "kernels,report,ablation2,ablation3"]
    done = record(*some, gpus=3, fails="benchmark_kernels")
    assert done.returncode == 1 and done.stdout.endswith("not there yet: kernels; the same command goes on\n")
    on = {name: line.rpartition(" ")[2] for name, line in zip(programs(tmp_path), lines_of(tmp_path), strict=True)}
    assert set(on) == {"benchmark_kernels.py", "compare_versions.py", "fusion_ablation_study.py"}
    assert (on["benchmark_kernels.py"], on["compare_versions.py"]) == ("0", "1")
    assert sorted(line.rpartition(" ")[2] for line in lines_of(tmp_path)) == ["0", "0", "1", "2"]
    assert record(*some, gpus=3).returncode == 0


def test_gpus_are_counted_among_the_visible_ones(record, tmp_path, monkeypatch):
    monkeypatch.delenv("HIP_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6,7")
    assert record("--only", "kernels,report", gpus=2).returncode == 0
    assert sorted(line.rpartition(" ")[2] for line in lines_of(tmp_path)) == ["6", "7"]


def test_several_gpus_take_a_part_of_the_suite_each(record, tmp_path):
    assert record("--only", "suite", gpus=3).returncode == 0
    assert (tmp_path / "log").read_text().count("--gpus 0,1,2") == 2
    assert record("--only", "scaling", gpus=3).returncode == 0
    assert (tmp_path / "log").read_text().count("--gpus") == 2


def test_a_copy_without_history_says_its_commit(record, tmp_path):
    assert record("--only", "suite", "--commit", "0123abc").returncode == 0
    assert all("--commit 0123abc" in line for line in (tmp_path / "log").read_text().splitlines())


def test_what_would_not_end_in_time_is_left(record, tmp_path):
    done = record("--only", "kernels", "--time-limit", "100")
    assert done.returncode == 1
    assert "kernels: left for the next run" in done.stdout and "not there yet: kernels" in done.stdout
    assert not (tmp_path / "log").exists()


def test_what_the_suite_left_is_said(record):
    done = record("--only", "suite", last_words="3 of 9 processes were not run: repeat the command with --append")
    assert done.returncode == 1
    assert "3 of 9 processes were not run" in done.stdout and "not there yet: suite" in done.stdout


def test_a_failure_is_named_and_its_result_is_no_result(record, tmp_path):
    done = record("--only", "kernels,ablation2", fails="benchmark_kernels")
    assert done.returncode == 1
    assert "kernels: failed" in done.stdout and "it broke" in done.stdout and "ablation2: done" in done.stdout
    assert record("--only", "kernels").returncode == 0
    assert programs(tmp_path).count("benchmark_kernels.py") == 2


@pytest.mark.parametrize(
    "arguments, gpus, said",
    [
        (["--frobnicate"], 1, "unknown option --frobnicate"),
        (["--time-limit", "soon"], 1, "needs a positive number"),
        (["another"], 1, "one folder"),
        (["--only", "suite"], 0, "PyTorch sees no GPU here"),
    ],
)
def test_bad_options_are_one_sentence(record, arguments, gpus, said):
    done = record(*arguments, gpus=gpus)
    assert done.returncode == 2
    assert said in done.stderr and done.stderr.count("\n") == 1


CONTRIBUTE = REPOSITORY / "scripts" / "maintain" / "contribute_record.sh"


@pytest.mark.parametrize(
    "arguments", [["--bad"], ["--time-limit"], ["--time-limit", "soon"], ["--folder"]], ids=" ".join
)
def test_contribute_refuses_a_bad_option_before_it_installs_anything(arguments):
    result = subprocess.run(["bash", CONTRIBUTE, *arguments], capture_output=True, text=True, timeout=60)
    assert result.returncode == 2 and arguments[0] in result.stderr and result.stdout == ""


@pytest.fixture
def contribute(tmp_path):
    """Run contribute_record.sh in a copy whose tools only note how they were called."""
    (tmp_path / "scripts" / "common").mkdir(parents=True)
    (tmp_path / "scripts" / "maintain").mkdir()
    script = tmp_path / "scripts" / "maintain" / CONTRIBUTE.name
    script.write_text(CONTRIBUTE.read_text())
    python = tmp_path / "python"
    python.write_text("""#!/bin/bash
if [[ $1 == -c ]]; then echo "$GPU"; else echo "$*" >>"$LOG"; fi
[[ "$*" != "-m pytest"* ]] || exit "$TESTS"
""")
    python.chmod(0o755)
    (tmp_path / "scripts" / "common" / "environment.sh").write_text(
        f"ROOT={tmp_path} PYTHON={python}\nuse_environment() {{ :; }}\n"
    )
    record = tmp_path / "scripts" / "maintain" / "record.sh"
    record.write_text('#!/bin/bash\necho "record $*" >>"$LOG"\nexit "$RECORD"\n')
    record.chmod(0o755)

    def run(*arguments, gpu="AMD Instinct MI300X", tests=0, record=0):
        given = {"LOG": str(tmp_path / "log"), "GPU": gpu, "TESTS": str(tests), "RECORD": str(record)}
        return subprocess.run(
            ["bash", script, *arguments], capture_output=True, text=True, timeout=60, env=os.environ | given
        )

    return run


def test_contribute_tests_then_records_within_the_limit(contribute, tmp_path):
    result = contribute("--time-limit", "600")
    assert result.returncode == 0 and "The record is complete" in result.stdout, result.stderr
    tests, record, table = lines_of(tmp_path)
    assert "pytest -q tests/kernels" in tests and table.endswith("tested_on.py --write")
    (folder,) = (tmp_path / "scripts" / "recorded").iterdir()
    assert folder.name.startswith("amd-instinct-mi300x_20") and (folder / "tests.txt").exists()
    limit = int(record.split("--time-limit ")[1])
    assert f"record {folder} --only suite,kernels --repeats 1" in record and 500 < limit <= 600
    contribute()
    assert len([line for line in lines_of(tmp_path) if line.startswith("-m pytest")]) == 1  # what passed is kept


def test_contribute_says_what_is_not_there(contribute, tmp_path):
    failed = contribute(tests=1)
    assert failed.returncode == 1 and "tests.log: please open an issue" in failed.stderr
    assert "The record is complete" not in failed.stdout
    assert contribute(record=1).returncode == 1
    without = contribute(gpu="")
    assert without.returncode == 2 and "no GPU" in without.stderr
