"""The analysis tools: their numbers against cases known by hand, and the documented commands from their folders."""

import json
import os
import shlex
import subprocess
import sys

import performance_regression_test as regression
import pytest
import torch
import validate_numerical_accuracy as accuracy
from versions import REPOSITORY, SCRIPTS, load_version

SIZES = "--hidden-dim 32 --num-layers 1 --num-heads 2 --batch-size 2 --seq-len 16 --vocab-size 64 --device cpu".split()
FOLDERS = {version: script.parent for version, script in SCRIPTS.items()}


def call(version, command, cwd=None, status=0):
    """Run a documented command in a version's folder; its result, whose status must be as expected."""
    program, *arguments = shlex.split(command)
    result = subprocess.run(
        [sys.executable, FOLDERS[version] / program, *arguments],
        cwd=cwd or FOLDERS[version],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == status, result.stdout + result.stderr
    assert "Traceback" not in result.stderr
    return result


def refused(main, arguments, capsys, words, status=2):
    """The tool answers bad input with one sentence and this status."""
    try:
        found = main([str(word) for word in arguments])
    except SystemExit as error:
        found = error.code
    errors = capsys.readouterr().err.strip().splitlines()
    assert found == status and words in errors[-1], errors


TOOLS = {
    "validate_numerical_accuracy.py": [2],
    "performance_regression_test.py": [2],
}


@pytest.mark.parametrize("tool", TOOLS)
def test_every_tool_is_offered_by_relative_links_and_explains_itself(tool):
    for version in TOOLS[tool]:
        assert os.readlink(FOLDERS[version] / tool) == f"../scripts/{tool}"
    text = subprocess.run(
        [sys.executable, REPOSITORY / "scripts" / tool, "--help"], capture_output=True, text=True, check=True
    ).stdout
    assert f"example: python {tool}" in " ".join(text.split()) and "--json" in text


# ---------------------------------------------------------------- validate_numerical_accuracy.py


def test_errors_of_two_outcomes_by_hand():
    def outcome(loss, gradient, losses):
        weights = {"w": torch.tensor([3.0, 4.0])}
        return {"logits": torch.ones(2), "loss": loss, "gradients": gradient, "losses": losses, "weights": weights}

    one = {"w": torch.tensor([3.0, 4.0]), "v": torch.tensor([1.0])}
    entries = accuracy.compare(
        outcome(2.0, one, [4.0, 5.0]), outcome(2.02, {"w": torch.tensor([3.0, 4.5])}, [4.0, 5.5])
    )
    errors = {
        entry["name"] if entry["kind"] != "weight after training" else "after": entry["error"] for entry in entries
    }
    expected = {"logits": 0, "loss": 0.01, "w": 0.1, "v": float("inf"), "after": 0, "step 1": 0, "step 2": 0.1}
    assert errors == pytest.approx(expected)
    result = accuracy.verdict(entries, 0.05)
    assert (result["passed"], result["beyond"], result["worst"]["name"]) == (False, 3, "v")
    assert accuracy.verdict([e for e in entries if e["error"] <= 0.05], 0.05)["passed"]


def test_not_a_number_is_beyond_every_tolerance():
    entries = [{"kind": "loss", "name": "loss", "error": accuracy.scalar_error(float("nan"), 1.0)}]
    assert not accuracy.verdict(entries, 1e9)["passed"]


def test_the_documented_accuracy_command_passes():
    command = "validate_numerical_accuracy.py --baseline ../version1_pytorch_baseline/tiny_llama_v1.py "
    result = call(2, command + f"--optimized ./tiny_llama_v2.py --tolerance 1e-4 --json - {shlex.join(SIZES)}")
    content = json.loads(result.stdout)
    kinds = [entry["kind"] for entry in content["entries"]]
    # embedding, last norm, and 9 weights in the only layer
    assert (kinds.count("gradient"), kinds.count("loss of a step"), kinds.count("logits")) == (11, 10, 1)
    assert content["verdict"]["passed"] and 0 < content["verdict"]["worst"]["error"] < 1e-5


def test_versions_3_and_4_agree_with_version_1(capsys):
    for version in (3, 4):
        arguments = ["--baseline", FOLDERS[1], "--optimized", FOLDERS[version], "--steps", "2", *SIZES]
        assert accuracy.main([str(word) for word in arguments]) == 0
        assert "passed" in capsys.readouterr().out


def test_a_copy_without_a_gradient_is_found(tmp_path, capsys):
    text = SCRIPTS[2].read_text()
    copy = tmp_path / "my copy.py"
    copy.write_text(
        text.replace("return self.o_proj(mixed.flatten(-2))", "return self.o_proj(mixed.flatten(-2)).detach()")
    )
    assert copy.read_text() != text
    arguments = ["--baseline", str(SCRIPTS[1]), "--optimized", str(copy), "--steps", "1", *SIZES]
    assert accuracy.main(arguments) == 1
    captured = capsys.readouterr().out
    assert "FAILED" in captured and "attention" in captured.splitlines()[-1] and "inf" in captured


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--baseline", "nowhere.py", "--optimized", SCRIPTS[2]], "does not exist"),
        (["--baseline", FOLDERS[1].parent, "--optimized", SCRIPTS[2]], "holds 0 files"),
        (["--baseline", SCRIPTS[1], "--optimized", REPOSITORY / "scripts" / "versions.py", *SIZES], "has no Trainer"),
        (["--baseline", SCRIPTS[1], "--optimized", SCRIPTS[2], "--steps", "0"], "--steps must be"),
        (["--baseline", SCRIPTS[1]], "--optimized"),
        (["--baseline", SCRIPTS[1], "--optimized", SCRIPTS[2], "--num-heads", "5"], "--hidden-dim"),
    ],
)
def test_bad_input_of_the_accuracy_check(arguments, words, capsys):
    refused(accuracy.main, arguments, capsys, words)


# ---------------------------------------------------------------- performance_regression_test.py


def metrics(folder, name, times, **changes):
    """A metrics file with these step times in ms; changes replace entries of its parts."""
    content = {
        "version": 1,
        "config": {"hidden_dim": 32, "num_layers": 1},
        "options": {"batch_size": 2, "seq_len": 16, "data": None, "use_amp": False, "tf32": False},
        "environment": {"device": "MI300X", "device_type": "cuda", "torch": "2.13", "cuda": None, "hip": "7.0"},
        "steps": [{"step_ms": time} for time in times],
        "summary": {"parameters": 10, "parameters_trained": 10, "first_loss": 6.9},
    }
    for part, values in changes.items():
        content[part] = content[part] | values
    path = folder / f"{name}.json"
    path.write_text(json.dumps(content))
    return path


def regression_status(baseline, current, *options):
    return regression.main(["--baseline-results", str(baseline), "--current-results", str(current), *options])


def test_the_speed_up_and_its_interval_by_hand():
    # every draw of equal steps is the same: 20 / 8
    assert regression.speedup([[20.0] * 9], [[8.0] * 9])["low"] == 2.5
    result = regression.speedup([[20.0] * 9], [[10.0] * 5 + [16.0] * 4])
    assert (result["speedup"], result["low"], result["high"]) == (2.0, 1.25, 2.0)
    assert [regression.judge(result, x) for x in (1.2, 1.3, 2.1)] == ["faster", "too close to tell", "slower"]


def test_slower_fails_faster_passes_and_the_open_case_is_said(tmp_path, capsys):
    base, fast = metrics(tmp_path, "base", [20.0] * 9), metrics(tmp_path, "fast", [10.0] * 9)
    assert regression_status(base, fast, "--min-speedup", "1.3") == 0
    assert "speed-up       2.000x" in capsys.readouterr().out
    assert regression_status(fast, base, "--min-speedup", "1.0") == 1
    assert "FAILED" in capsys.readouterr().out
    spread = metrics(tmp_path, "spread", [10.0] * 5 + [16.0] * 4)
    assert regression_status(base, spread, "--min-speedup", "1.3") == 0
    assert "too close to tell" in capsys.readouterr().out
    assert regression_status(base, spread, "--min-speedup", "1.3", "--strict", "--json", "-") == 1
    assert json.loads(capsys.readouterr().out)["result"]["low"] == 1.25


def test_runs_that_cannot_be_compared_are_refused(tmp_path, capsys):
    base = metrics(tmp_path, "base", [20.0] * 9)
    for part, key in (("environment", "device"), ("config", "num_layers"), ("options", "seq_len"), ("options", "tf32")):
        other = metrics(tmp_path, "other", [10.0] * 9, **{part: {key: 99}})
        arguments = ["--baseline-results", base, "--current-results", other]
        refused(regression.main, arguments, capsys, f"{key}: ")
        assert regression_status(base, other, "--allow-different") == 0
        assert f"different: {key}: " in capsys.readouterr().out
    for summary, words in (({"parameters_trained": 9}, "trained 9 of 10"), ({"first_loss": 7.2}, "first loss is 7.2")):
        other = metrics(tmp_path, "other", [10.0] * 9, summary=summary)
        refused(regression.main, ["--baseline-results", base, "--current-results", other], capsys, words, status=1)


@pytest.mark.parametrize(
    ("content", "words"),
    [(None, "cannot be read"), ("{", "no valid JSON"), ("[]", "no metrics file"), ('{"a": 1}', "no metrics file")],
)
def test_files_that_are_no_metrics_are_refused(content, words, tmp_path, capsys):
    path = tmp_path / "other.json"
    if content is not None:
        path.write_text(content)
    base = metrics(tmp_path, "base", [20.0])
    refused(regression.main, ["--baseline-results", base, "--current-results", path], capsys, words)


def test_the_documented_regression_command_reads_what_the_scripts_write(tmp_path):
    (tmp_path / "v2").mkdir()
    for version, name in ((1, "version1_baseline_metrics"), (2, "v2/version2_metrics")):
        file = tmp_path / f"{name}.json"
        assert load_version(version).main([*SIZES, "--num-steps", "6", "--metrics-file", str(file)]) == 0
    command = "performance_regression_test.py --baseline-results ../version1_baseline_metrics.json "
    result = call(2, command + "--current-results ./version2_metrics.json --min-speedup 0.01", cwd=tmp_path / "v2")
    assert "PASSED" in result.stdout and "6 steps" in result.stdout
