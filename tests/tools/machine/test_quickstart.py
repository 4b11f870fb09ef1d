"""quickstart: four versions that agree, and versions that do not."""

import copy
import json
import os
import re
import subprocess
import sys

import pytest

import quickstart
from common.measuring import runs
from common.versions import REPOSITORY, load_version
from in_process import refused, run_here
from processes import run_fork

TINY = "--hidden-dim 32 --num-layers 1 --num-heads 2 --seq-len 16 --batch-size 2 --vocab-size 256".split()
SHORT = [*TINY, "--num-steps", "3", "--warmup-steps", "1"]
NORM = "layers.0.attention_norm.weight"


TRAINS_HERE = """
import sys
import quickstart
from common.measuring import runs
from in_process import process_here

runs.run_process = process_here
sys.exit(quickstart.main(sys.argv[1:]))
"""


@pytest.fixture
def command(tmp_path):
    """Return the command of quickstart that runs the versions' scripts in its own process."""
    (tmp_path / "trains_here.py").write_text(TRAINS_HERE)
    return [sys.executable, tmp_path / "trains_here.py", *SHORT, "--device", "cpu"]


def rows(output):
    """Version -> the cells of its row in the table."""
    table = output.split("\n\n")[1].splitlines()[1:]
    return {row[:2]: re.split(r" {2,}", row) for row in table}


@pytest.mark.slow
def test_four_versions_agree_on_real_text(command, tmp_path):
    path = os.pathsep.join(str(REPOSITORY / name) for name in ("scripts", "tests"))
    command += ["--results", tmp_path / "kept here"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=250, env=os.environ | {"PYTHONPATH": path})
    assert result.returncode == 0, result.stdout + result.stderr
    assert "\nAll four versions compute the same losses and gradients.\n" in result.stdout
    assert result.stdout.count("agrees: relative error") == 3
    assert "in Triton's interpreter, which needs no GPU: its times mean nothing" in result.stdout
    table = rows(result.stdout)
    assert list(table) == ["V1", "V2", "V3", "V4"]
    for version, cells in enumerate(table.values(), start=1):
        metrics = json.loads((tmp_path / "kept here" / f"v{version}.json").read_text())
        assert metrics["version"] == version and metrics["options"]["data"] == os.path.dirname(os.__file__)
        assert cells[2] == f"{metrics['summary']['step_ms']['median']:.2f}"
        assert cells[-1] == "100 %"
    assert len({cells[1] for cells in table.values()}) == 1  # loss, first -> last
    assert [cells[-2][-1] for cells in table.values()] == ["x", "x", "-", "x"]  # the interpreter has no speed


def test_the_next_step_can_be_typed_in_a_shell_anywhere(tmp_path, monkeypatch, capsys):
    """Without the environment that it names: the activation is replaced by one that says so."""
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "my env"))
    quickstart.print_next_step()
    *commands, read = capsys.readouterr().out.splitlines()[2:]
    (tmp_path / "my env/bin").mkdir(parents=True)
    (tmp_path / "my env/bin/activate").write_text("python() { ls $1; echo $2 $3; }")
    shown = subprocess.run(["bash", "-ec", "\n".join(commands)], cwd=tmp_path, capture_output=True, text=True).stdout
    assert shown.split() == ["version1_pytorch_baseline/tiny_llama_v1.py", "--preset", "tiny"]
    assert read == "and read version1_pytorch_baseline/README.md"


@pytest.mark.slow
def test_version_3_is_passed_over_without_triton(command):
    """As on macOS and Windows; None in sys.modules is how Python says that a module is not to be found."""
    _, program, *options = command
    program.write_text('import sys\nsys.modules["triton"] = None\n' + TRAINS_HERE)
    result = run_fork(program, *options)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "V3  passed over: its kernels need Triton" in result.stdout
    assert "All three versions compute the same losses and gradients.\n" in result.stdout
    assert list(rows(result.stdout)) == ["V1", "V2", "V4"]


def test_versions_that_fail_or_disagree_get_no_speed(monkeypatch, capsys):
    """Train in this process: version 2 loses half a gradient, version 4 has another learning rate, version 3 fails."""

    def train(command, timeout, tell, **options):
        python, _, script, *words = command
        if "v3" in script:
            result = subprocess.CompletedProcess(
                command, 1, "  warm-up    step 1 of 3\nstep 1\nthe kernel did not compile\n", ""
            )
        else:
            result = run_here([python, script, *words])
        for line in result.stdout.splitlines(keepends=True):
            tell(line)
        return result

    def faster(model, config):
        optimizer = make_optimizer(model, config)
        optimizer.param_groups[0]["lr"] *= 2
        return optimizer

    second, fourth = load_version(2), load_version(4)
    swiglu, make_optimizer = second.swiglu, fourth.make_optimizer
    monkeypatch.setattr(runs, "run_process", train)
    monkeypatch.setattr(second, "swiglu", lambda gate, up: swiglu(gate, (up + up.detach()) / 2))
    monkeypatch.setattr(fourth, "make_optimizer", faster)
    assert quickstart.main(["--device", "cpu", *SHORT]) == 1
    output, errors = capsys.readouterr()
    assert "V2  disagrees: relative error 5.0e-01 of the gradient of layers.0.feed_forward.up_proj" in output
    assert "the kernel did not compile\nV3  tiny_llama_v3.py failed: the kernel did not compile\n" in errors
    assert (
        "V3  version3_triton: training in Triton's interpreter, which is slow\nV3    warm-up    step 1 of 3\n" in output
    )
    assert "V4  disagrees: the loss of step 2 is" in output
    assert errors.endswith("V2 and V3 and V4 failed or disagreed with V1, as said above.\n")
    table = rows(output)
    assert list(table) == ["V1", "V2", "V4"] and table["V1"][2] != "-"
    assert table["V2"][2:-1] == table["V4"][2:-1] == ["-"] * 6 and "fwd / bwd" not in output


def test_without_version_1_there_is_nothing_to_compare_with(monkeypatch, capsys):
    monkeypatch.setattr(quickstart, "train_version", lambda version, argv, metrics: None if version == 1 else {})
    assert quickstart.main(["--device", "cpu", *SHORT]) == 1
    assert "All four versions" not in capsys.readouterr().out


def test_a_preset_is_trained_as_it_is_and_single_options_change_the_small_model_of_a_cpu():
    for preset in (["--preset", "tiny"], ["--preset=tiny"]):
        assert "--hidden-dim" not in quickstart.parse_arguments(["--device", "cpu", *preset])[1]
    config = load_version(1).parse_options(quickstart.parse_arguments(["--device", "cpu", "--seq-len", "8"])[1])
    assert (config.num_layers, config.seq_len, config.num_steps) == (2, 8, 20)


@pytest.mark.parametrize(
    ("arguments", "status", "word"),
    [
        ("--hidden-dim 30", 2, "--hidden-dim"),
        ("--data no/such/text", 2, "no/such/text"),
        ("--metrics-file x.json", 2, "leave out --metrics-file"),
        ("--preset gigantic", 2, "--preset"),
        ("--results /dev/null/folder", 1, "--results /dev/null/folder cannot be made"),
    ],
)
def test_bad_options_end_in_one_sentence_before_any_training(arguments, status, word, capsys, monkeypatch):
    monkeypatch.setattr(quickstart, "train_version", None)
    refused(quickstart.main, ["--device", "cpu", *arguments.split()], capsys, word, status)


@pytest.mark.parametrize(("option", "said"), [("x", "no python3.99"), ("--presett=tiny", "no option --presett")])
def test_a_mistyped_option_is_answered_before_the_environment_is_made(option, said, tmp_path):
    """All options of version 1 pass, up to the interpreter that is not there."""
    known = [name for name in load_version(1).build_parser()._option_string_actions if name not in ("-h", "--help")]
    environment = os.environ | {"TINY_LLAMA_VENV": str(tmp_path / "new"), "TINY_LLAMA_PYTHON": "python3.99"}
    command = [REPOSITORY / "scripts" / "quickstart.sh", "--results", *known, "--preset=tiny", option]
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert result.returncode == (1 if option == "x" else 2) and said in result.stderr, result.stderr
    assert result.stderr.count("\n") == 1 and not (tmp_path / "new").exists()


def test_a_row_of_the_table_by_known_answers():
    """A step of 20 ms where version 1's takes 30: 1.5 times as fast."""
    phases = {"forward_ms": 5.0, "backward_ms": 10.0, "optimizer_ms": 4.0}
    summary = {"step_ms": {"median": 20.0}, "graph": {"captured": True}, "parameters": 8, "parameters_trained": 6}
    row = quickstart.table_row(2, {"summary": summary | phases}, 30.0, None)
    assert (row["speed"], row["step"], row["phases"]) == ("1.50x", 20.0, "5.00 / 10.00 / 4.00")
    assert (row["runs"], row["trained"]) == ("graph", 0.75)


@pytest.mark.parametrize(
    ("changed", "value", "said"),
    [
        ("loss", 4.6046, "the loss of step 5 is 4.604600 instead of 4.600000"),
        ("loss", float("nan"), "the loss of step 5 is nan instead of 4.600000"),
        ("parameters_trained", 1, "only 1 of 10 parameters are trained"),
        ("loss", 4.6001, None),
    ],
)
def test_training_is_compared_with_version_1(changed, value, said):
    steps = [{"step": step, "loss": 5.0 - step / 10} for step in range(12)]
    first = {"summary": {"parameters": 10, "parameters_trained": 10}, "steps": steps}
    other = copy.deepcopy(first)
    (other["steps"][4] if changed == "loss" else other["summary"])[changed] = value
    assert quickstart.compare_training(other, first, 1e-4) == said


@pytest.mark.parametrize(("step", "compared"), [(10, True), (11, False)])
def test_the_first_ten_losses_are_compared(step, compared):
    """Later ones carry every rounding before them."""
    steps = [{"step": step, "loss": 5.0} for step in range(12)]
    first = {"summary": {"parameters": 10, "parameters_trained": 10}, "steps": steps}
    other = copy.deepcopy(first)
    other["steps"][step - 1]["loss"] = 6.0
    said = "the loss of step 10 is 6.000000 instead of 5.000000"
    assert quickstart.compare_training(other, first, 1e-4) == (said if compared else None)
