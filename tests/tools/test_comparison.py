"""Comparisons of versions: accuracy, compare_versions.py, memory over length, the fusion report, and the HTML page."""

import dataclasses
import html
import json
import os
import re
import shlex
import shutil
import subprocess
from unittest import mock

import pytest
import torch

import analyze_memory_scaling as memory_tool
import compare_versions as versions_tool
import generate_fusion_report as fusion_report
import run_pytorch_profiler as profiler
import validate_numerical_accuracy as accuracy_tool
from common import report
from common.command_line import load_script
from common.measuring import runs
from common.measuring.runs import OutOfMemory
from common.profiles import read_profile
from common.versions import REPOSITORY, SCRIPTS, load_version
from conftest import SIZES
from in_process import call, process_here, refused

# Version 3 computes on this machine's GPU, or else in the interpreter that Triton was imported with.
HERE = [*SIZES[:-1], "cuda" if torch.cuda.is_available() else "cpu"]
FOLDERS = {version: script.parent for version, script in SCRIPTS.items()}

LINE = "return self.o_proj(context.flatten(-2))"
DETACHED, SCALED = (LINE, f"{LINE}.detach()"), (LINE, f"{LINE} * 1.01")


def changed(version, old, new, folder):
    """Return a copy of a version's script with that change."""
    text, copy = SCRIPTS[version].read_text(), folder / SCRIPTS[version].name
    assert old in text
    copy.write_text(text.replace(old, new))
    return str(copy)


# ---------------------------------------------------------------- validate_numerical_accuracy.py


def test_the_documented_accuracy_command_passes():
    command = "validate_numerical_accuracy.py --baseline ../version1_pytorch_baseline/tiny_llama_v1.py "
    result = call(2, command + f"--optimized ./tiny_llama_v2.py --tolerance 1e-4 --json - {shlex.join(SIZES)}")
    content = json.loads(result.stdout)
    kinds = [entry["kind"] for entry in content["entries"]]
    # embedding, last norm, and 9 weights in the only layer
    assert (kinds.count("gradient"), kinds.count("loss of a step"), kinds.count("logits")) == (11, 10, 1)
    assert content["verdict"]["passed"] and 0 < content["verdict"]["worst"]["error"] < 1e-5


def test_a_copy_without_a_gradient_is_found(tmp_path, capsys):
    copy = changed(2, *DETACHED, tmp_path)
    arguments = ["--baseline", str(SCRIPTS[1]), "--optimized", copy, "--steps", "1", *SIZES, "--use-amp"]
    assert accuracy_tool.main(arguments) == 1
    captured = capsys.readouterr().out
    *_, verdict, hint = captured.splitlines()
    assert verdict.startswith("FAILED") and "attention" in verdict and "try --tolerance 3e-2" in hint
    assert "gradient 11 inf" in " ".join(captured.split())


@pytest.mark.parametrize(
    ("baseline", "optimized", "options", "words"),
    [
        ("nowhere.py", SCRIPTS[2], "", "does not exist"),
        (REPOSITORY, SCRIPTS[2], "", "has no tiny_llama_v"),
        (SCRIPTS[1], REPOSITORY / "scripts/common/tables.py", "", "has no Trainer"),
        (SCRIPTS[1], REPOSITORY / "README.md", "", "isn't valid Python"),
        (SCRIPTS[1], SCRIPTS[2], "--steps 0", "--steps: must be"),
        (SCRIPTS[1], SCRIPTS[2], "--tolerance -1", "must be a finite number of at least 0, got -1"),
        (SCRIPTS[1], SCRIPTS[2], "--tolerance inf", "must be a finite number of at least 0, got inf"),
        (SCRIPTS[1], SCRIPTS[2], "--tolerance 1_0", "must be a finite number of at least 0, got 1_0"),
        (SCRIPTS[1], SCRIPTS[2], "--num-heads 5", "--hidden-dim"),
    ],
)
def test_bad_input_of_the_accuracy_check(baseline, optimized, options, words, capsys, monkeypatch):
    monkeypatch.setattr(accuracy_tool, "outcome", None)  # nothing is computed
    arguments = ["--baseline", baseline, "--optimized", optimized, *SIZES, *options.split()]
    refused(accuracy_tool.main, arguments, capsys, words)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("import sys\nsys.exit(0)\n", "train.py ended the process when it was imported"),
        ("int('--steps')\n", "train.py cannot be imported: ValueError: invalid literal"),
        ("open('no such file')\n", "train.py cannot be imported: FileNotFoundError"),
    ],
)
def test_a_script_that_ends_when_it_is_imported_passes_no_check(text, words, tmp_path, capsys):
    """Its status, 0, was the tool's."""
    (tmp_path / "train.py").write_text(f"from common.versions import *\n{text}")
    arguments = ["--baseline", SCRIPTS[1], "--optimized", tmp_path / "train.py", *SIZES]
    refused(accuracy_tool.main, arguments, capsys, words)


@pytest.mark.parametrize("byte", [0x00, 0xFE])
def test_a_file_that_is_no_text_is_refused(byte, tmp_path, capsys):
    (tmp_path / "train.py").write_bytes(bytes([byte]))
    arguments = ["--baseline", SCRIPTS[1], "--optimized", tmp_path / "train.py", *SIZES]
    refused(accuracy_tool.main, arguments, capsys, "isn't valid Python")


@pytest.mark.parametrize("found", ["", "class Trainer: pass\n", "from shutil import copy as Trainer\n"])
def test_another_program_is_refused_before_it_runs(found, tmp_path, capsys):
    (tmp_path / "train.py").write_text(f"{found}open(__file__ + '.ran', 'w').close()\n")
    arguments = ["--baseline", SCRIPTS[1], "--optimized", tmp_path / "train.py", *SIZES]
    refused(accuracy_tool.main, arguments, capsys, "has no Trainer; check_training.py takes any script")
    assert not (tmp_path / "train.py.ran").exists()


def test_a_copy_may_import_its_trainer(tmp_path):
    for names in ("*", "Trainer, canonical_views"):
        path = tmp_path / f"copy_{len(names)}.py"
        path.write_text(f"from tiny_llama_v1 import {names}\n")
        load_version(1)
        assert load_script(path, "--optimized").Trainer is load_version(1).Trainer


# ---------------------------------------------------------------- compare_versions.py


def run_of(times, peak=100.0, trained=10):
    summary = {"parameters": 10, "parameters_trained": trained, "first_loss": 6.9, "final_loss": 6.0}
    summary |= {"flops_per_step": 2e9, "peak_memory_mb": peak, "graph": {"captured": False}, "precision": "float32"}
    summary |= {"forward_ms": 1.0, "backward_ms": 2.0, "optimizer_ms": None}
    content = {"summary": summary, "options": {"batch_size": 4, "seq_len": 16}, "config": {}, "environment": {}}
    return content | {"steps": [{"step_ms": time} for time in times]}


def test_results_and_speed_ups_by_hand():
    worst = {"kind": "gradient", "name": "w", "error": 0.5, "bound": 0.1}
    good, bad = ({"passed": passed, "worst": worst} for passed in (True, False))
    second = run_of([20.0, 30.0], peak=120.0)
    second["summary"] |= {"forward_ms": 3.0, "parameters_trained": 9, "graph": {"captured": True}}
    first = versions_tool.measured_row("v1", [run_of([20.0, 20.0]), second], good)
    assert first["step_ms"] == {"p25": 20.0, "median": 20.0, "p75": 22.5} and first["peak_memory_mb"] == 120
    assert (first["tokens_per_second"], first["tflops"]) == (3200, 0.1)
    # phases are medians over the runs, and what one run did not train is not trained
    assert [first[name] for name in ("forward_ms", "backward_ms", "optimizer_ms")] == [2.0, 2.0, None]
    assert first["parameters_trained"] == 9
    assert not first["captured"] and versions_tool.measured_row("v1", [second], good)["captured"]
    assert first["rounds_ms"] == [20.0, 25.0]
    rows = [first | {"parameters_trained": 10}]
    for trained, accurate in ((10, good), (9, good), (10, bad)):
        rows.append(versions_tool.measured_row("x", [run_of([8.0], trained=trained), run_of([8.0])], accurate))
    problems = versions_tool.add_speedups(rows)
    assert len(problems) == 2 and problems[0].endswith("gradient w is off by 5.0e-01, allowed 1.0e-01")
    assert [row["speedup"] for row in rows] == [1.0, pytest.approx((20 / 8 + 25 / 8) / 2), None, None]
    assert [row["gain"] for row in rows] == ["-", "not judged", "-", "-"]


# v1's steps of five rounds, and those of its second name, which differ by up to 10 %
FIRST, AGAIN = [20.0, 22.0, 20.0, 30.0, 20.0], [20.0, 20.0, 20.0, 30.0, 20.0]


@pytest.mark.parametrize(
    ("times", "gain", "reach", "finding"),
    [
        # 2, 2.2, 2.5, 3, 1.6
        (
            [10.0, 10.0, 8.0, 10.0, 12.5],
            "2.20x",
            "1.60 to 3.00",
            "x has the shortest step: 10.0 ms, 2.20x over v1 (1.60",
        ),
        (
            [19.0, 21.0, 19.0, 28.5, 19.0],
            "none shown",
            "1.05 to 1.05",
            "No version is shown to be faster than v1, which",
        ),
        (
            [10.0, 10.0, 8.0, 31.0, 12.5],
            "none shown",
            "0.97 to 2.50",
            "No version is shown to be faster than v1, which",
        ),
        ([40.0, 44.0, 40.0, 50.0, 40.0], "0.50x", "0.50 to 0.60", "No version is shown to be faster than v1, which"),
    ],
)
def test_a_speed_up_is_printed_where_the_rounds_show_it(times, gain, reach, finding):
    good = {"passed": True, "worst": {"kind": "gradient", "name": "w", "error": 0.5}, "largest_error": 0.5}
    rows = [
        versions_tool.measured_row(name, [run_of([ms]) for ms in some], good)
        for name, some in (("v1", FIRST), ("x", times))
    ]
    assert versions_tool.add_speedups(rows, AGAIN) == []
    assert rows[1]["gain"] == gain and rows[1]["range"].startswith(reach[:4]) and rows[1]["range"].endswith(reach[-4:])
    assert versions_tool.finding(rows).startswith(finding)
    if rows[1]["faster"]:  # the shortest step of those that are faster, wherever it stands
        shorter = rows[1] | {"name": "y", "step_ms": {"median": 5.0}, "peak_memory_mb": 50.0}
        slower = shorter | {"name": "z", "step_ms": {"median": 1.0}, "faster": False}
        for some in ([*rows, shorter, slower], [rows[0], slower, shorter, rows[1]]):
            assert versions_tool.finding(some).startswith("y has the shortest step: 5.00 ms, 2.20x over v1")
            assert versions_tool.finding(some).endswith("with 50 % of its peak memory.")
    lines = {line[0]: line[1:] for line in versions_tool.result_lines([row | {"final_loss": 6.0} for row in rows])}
    assert lines["speed-up over v1"] == ["-", gain]
    first, second = report.step_bars(rows, "")["bars"]
    assert first["text"] == "20.0 ms" and second["text"].endswith(f" ms, {gain}")


def test_a_profile_is_so_many_times_as_fast_as_another_and_one_run_of_each_is_not_judged():
    one, two = ({"name": name, "step_ms": {"median": ms}} for name, ms in (("a", 20.0), ("b", 8.0)))
    assert report.times_as_fast(one, two) == "2.50 times as fast as a (not judged: 1 round of the 5 needed)"
    assert report.times_as_fast(two, one) == "0.40 times as fast as b (not judged: 1 round of the 5 needed)"


def line_of(output, name):
    return next(line for line in output.splitlines() if line.startswith(name)).removeprefix(name).split()


@pytest.mark.slow
def test_without_folders_all_four_are_compared(one_process, capsys):
    assert versions_tool.main([*HERE, "--rounds", "1", "--num-steps", "2"]) == 0
    output, errors = capsys.readouterr()
    said = ("sizes: 1 layers, width 32", f"software: PyTorch {torch.__version__}", "\nprecision: float32\n")
    assert all(words in output for words in said)
    assert re.search(r"\n +v1 +v2 +v3 +v4\n", output) and line_of(output, "parameters trained") == ["100", "%"] * 4
    interpreted = not torch.cuda.is_available()
    judged = ["not", "judged"]
    assert line_of(output, "speed-up over v1") == ["-", *judged, *(["-"] if interpreted else judged), *judged]
    assert interpreted == ("interpreter" in output) and "v1 differs by up to" in output
    assert "speed-ups are not judged: 1 round of the 5 needed" in output
    assert "round 1 of 1, v2: training, about" in errors and "gradients, 4 of 4: v4" in errors


@pytest.fixture(scope="module")
def comparison(tmp_path_factory):
    """The page that the documented command leaves with --report, and the JSON that it prints."""
    folder = tmp_path_factory.mktemp("comparison") / "our report"
    options = shlex.join([*SIZES, "--rounds", "1", "--num-steps", "3", "--checkpoint-dir", str(folder / "kept")])
    command = f"compare_versions.py --v1 ../version1_pytorch_baseline --v2 . --report '{folder}' --json - {options}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs, "run_process", process_here)
        content = json.loads(call(2, command).stdout)
    return (folder / "report.html").read_text(), content


def test_the_documented_comparison(comparison):
    page, content = comparison
    first, second = content["rows"]
    assert (first["name"], second["name"]) == ("v1", "v2")
    assert first["final_loss"] == pytest.approx(second["final_loss"])
    assert 0 < second["accuracy"]["largest_error"] < 1e-5 and second["speedup"] > 0
    # by hand: 8 and 5 matmuls with weights, each forward and twice backward, and 6 of version 1's attention
    assert [content["kernels"][v]["GEMM"]["calls"] for v in ("v1", "v2")] == [30, 15]
    firsts = ("<dt>device", "1 layers, width 32", "float32", 'class="notice"', "<h2>The")
    places = [page.index(words) for words in firsts]
    assert places == sorted(places) and page.count('<div class="bar">') == 4
    assert not any(word in page for word in ("http:", "https:", "<script", "{{"))
    assert "--checkpoint-dir kept" in page  # no folder of the machine
    assert f"<td>{report.rounded(second['step_ms']['median'])}</td>" in page


@pytest.mark.slow
def test_a_version_that_fails_or_computes_something_else_gets_no_speed_up(one_process, tmp_path, capsys):
    """Version 2 is a copy that fails after its options are read, version 4 one 1 % off in attention."""
    fails = changed(2, "def run(options):", "def run(options):\n    sys.exit('no room at all')\n", tmp_path)
    arguments = ["--v1", str(FOLDERS[1]), "--v2", fails, "--v4", changed(4, *SCALED, tmp_path), "--rounds", "1"]
    assert versions_tool.main([*arguments, *SIZES, "--num-steps", "2"]) == 1
    output = capsys.readouterr().out
    assert "v2: tiny_llama_v2.py failed: no room at all" in output and re.search(r"\n +v1 +v4\n", output)
    said = r"v4: no speed-up, because it doesn't compute what version 1 does: gradient \S+ is off by \d.\de-0[23]"
    assert re.search(said, output), output
    assert line_of(output, "speed-up over v1") == ["-", "-"]


@pytest.mark.parametrize(("problems", "status"), [([], 0), (["v2: out of memory"], 1)])
def test_a_comparison_with_a_problem_has_failed(problems, status, monkeypatch):
    monkeypatch.setattr(versions_tool, "study", lambda *_: {"problems": problems})
    monkeypatch.setattr(versions_tool, "as_text", str)
    assert versions_tool.main([]) == status


def test_bad_input_of_the_comparison(capsys):
    refused(versions_tool.main, ["--v1", FOLDERS[1]], capsys, "give two folders")
    refused(versions_tool.main, ["--v1", "nowhere", "--v2", FOLDERS[2]], capsys, "does not exist")
    refused(versions_tool.main, ["--rounds", "0"], capsys, "--rounds: must be")
    arguments = ["--v1", FOLDERS[1], "--v2", FOLDERS[2], "--num-heads", "5"]
    refused(versions_tool.main, arguments, capsys, "--hidden-dim must be")


# ---------------------------------------------------------------- analyze_memory_scaling.py


def test_growth_by_hand():
    lengths = [128, 256, 512, 1024]
    linear = memory_tool.growth(lengths, [100 + 0.5 * t for t in lengths])
    assert linear["growth"] == "linear" and linear["square_share"] == pytest.approx(0, abs=1e-6)
    quadratic = memory_tool.growth(lengths, [100 + 0.5 * t + 0.002 * t * t for t in lengths])
    assert quadratic["growth"] == "quadratic"
    square = 0.002 * (1024**2 - 128**2)
    assert quadratic["square_share"] == pytest.approx(square / (0.5 * 896 + square))
    for share, growth in ((0.24, "linear"), (0.26, "quadratic")):  # of what 128 tokens and 1024 differ by
        factor = share / (1 - share) * 896 / (1024**2 - 128**2)
        found = memory_tool.growth(lengths, [100 + t + factor * t * t for t in lengths])
        assert (found["growth"], found["square_share"]) == (growth, pytest.approx(share))
    for peaks in ([1.0, 2.0], [5.0, 5.0, 5.0], [400.0, 401.0, 419.0]):
        assert memory_tool.growth(lengths[: len(peaks)], peaks)["growth"] is None
    assert memory_tool.growth(lengths[:3], [400.0, 407.0, 421.0])["growth"] == "linear"  # by 5 %


def test_memory_of_versions_by_hand(monkeypatch, capsys):
    def run(script, argv, environment, tell):
        assert environment == os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}  # freed tensors leave the process
        length, version = int(argv[-1]), int(script.stem[-1])
        if version == 1 and length == 512:
            raise OutOfMemory(1, "out of memory")
        return {"summary": {"peak_memory_mb": 10 + length * (length if version == 1 else 1)}}

    monkeypatch.setattr(memory_tool, "train", run)
    arguments = ["--versions", "v1,2", "--seq-lengths", "64,512,128,256", *SIZES[:6]]
    assert memory_tool.main([*arguments, "--device", "cpu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].split() == "version 1 4,106 16,394 65,546 out of memory 100 quadratic".split()
    assert lines[3].split() == "version 2 74 138 266 522 0 linear".split()


def test_a_length_is_begun_if_there_is_time_for_all_versions(monkeypatch, capsys):
    """Each run takes 10 s of a clock that stands still otherwise: a third length of two versions wants 25 of 20 s."""
    now = [0.0]
    monkeypatch.setattr(runs.time, "monotonic", lambda: now[0])

    def run(script, argv, environment, tell):
        now[0] += 10
        tell("step     1/2\n")
        return {"summary": {"peak_memory_mb": 100.0}}

    monkeypatch.setattr(memory_tool, "train", run)
    arguments = ["--versions", "1,2", "--seq-lengths", "64,128,256", "--time-limit", "60", "--json", "-"]
    assert memory_tool.main([*arguments, *SIZES[:6], "--device", "cpu", "--data", os.path.dirname(os.__file__)]) == 1
    told = capsys.readouterr()
    assert told.err.count(" ...\n   step     1/2\n") == 4  # after ten silent seconds
    left = re.findall("about .* left|time left unknown", told.err)
    assert left == ["time left unknown", *(f"about {s} s left" for s in (50, 40, 30))]
    content = json.loads(told.out)
    assert content["lengths"] == [64, 128] and [len(row["peaks_mb"]) for row in content["rows"]] == [2, 2]
    assert content["options"][-2:] == ["--data", os.path.basename(os.path.dirname(os.__file__))]


@pytest.mark.slow
def test_memory_is_that_of_the_scripts_and_ends_at_the_limit():
    """In real processes, as every tool that trains starts them."""
    command = "analyze_memory_scaling.py --versions 2 --seq-lengths 16,32 --time-limit 0 --json - "
    result = call(2, command + "--hidden-dim 32 --num-layers 1 --num-heads 2 --batch-size 2 --device cpu", status=1)
    content = json.loads(result.stdout)
    assert content["lengths"] == [16] and "no time is left for 32 tokens" in result.stderr
    assert content["rows"][0]["peaks_mb"][0] > 50 and content["rows"][0]["growth"] is None and content["on_cpu"]


def test_bad_input_of_the_memory_tool(capsys, monkeypatch):
    refused(memory_tool.main, ["--versions", "5"], capsys, "choose from 1, 2, 3, 4")
    refused(memory_tool.main, ["--seq-lengths", "0"], capsys, "at least 1")
    refused(memory_tool.main, ["--versions", "1", "--num-heads", "5"], capsys, "--hidden-dim must be")
    monkeypatch.setattr(memory_tool, "train", mock.Mock(side_effect=OutOfMemory(1, "")))
    refused(memory_tool.main, ["--versions", "1", "--seq-lengths", "8"], capsys, "not even 8 tokens fit", status=1)


# ---------------------------------------------------------------- generate_fusion_report.py


@pytest.fixture
def two_profiles(profiled, tmp_path):
    """A workshop folder with the profiles of versions 1 and 2 as run_all_profilers.sh leaves them."""
    names = {1: "version1_pytorch_baseline/complete_analysis", 2: "v2/complete_rocm_analysis"}
    folders = {version: tmp_path / name for version, name in names.items()}
    for version, folder in folders.items():
        content = json.loads((profiled[version].parent / f"metrics_v{version}.json").read_text())
        place = folder / "pytorch_profiles"
        place.mkdir(parents=True)
        trace = read_profile(shutil.copy(next(profiled[version].glob("trace_*.json")), place))
        content |= {"trace": trace.path.name, "metadata": trace.metadata}
        content["summary"]["step_ms"] = {"median": 20.0 / version, "p25": 19.0 / version, "p75": 21.0 / version}
        (place / f"profile_v{version}_1.json").write_text(json.dumps(content))
    return folders


def test_the_documented_fusion_report(two_profiles):
    command = "generate_fusion_report.py --baseline ../version1_pytorch_baseline/complete_analysis "
    command += "--fused ./complete_rocm_analysis --output ./fusion_comparison_report.md"
    result = call(2, command, cwd=two_profiles[2].parent)
    text = (two_profiles[2].parent / "fusion_comparison_report.md").read_text()
    assert "| step, median ms | 20.0 | 10.0 |\n| lower quartile ms | 19.0 | 9.50 |" in text
    assert "- baseline (version 1): ../version1_pytorch_baseline" in text
    assert "Fused (version 2) takes 10.0 ms per step, 2.00 times as fast as baseline (version 1) (not judged: " in text
    before, after = (len(read_profile(two_profiles[v]).calls) // 2 for v in (1, 2))
    assert f"{before} operators per step became {after}." in result.stdout
    assert f"| all | {before:.1f} | {after:.1f} | {100 * (before - after) / before:.1f} % |" in text


def test_the_fusion_report_takes_the_newest_profiles_of_like_runs(two_profiles, make_trace, capsys):
    place = two_profiles[2] / "pytorch_profiles"
    content = json.loads((place / "profile_v2_1.json").read_text())
    wider = {**content["metadata"], "hidden_dim": 64}
    newer = make_trace("newer/trace_9.json", {"gemm": 1}, **wider)
    newer.rename(place / newer.name)
    (place / "profile_v2_2.json").write_text(json.dumps(content | {"trace": newer.name, "metadata": wider}))
    both = ["--baseline", str(two_profiles[1]), "--fused", str(two_profiles[2])]
    partly = content | {"summary": content["summary"] | {"parameters_trained": 1}}
    (place / "profile_v2_0.json").write_text(json.dumps(content))
    os.utime(place / "profile_v2_0.json", (1, 1))
    (place / "profile_v2_1.json").write_text(json.dumps(partly))
    assert fusion_report.main([*both, "--output", str(place / "r.md")]) == 0
    text = (place / "r.md").read_text()
    assert "trace_9" not in text and "\nFused (version 2) does not train every parameter" in text
    assert "| parameters trained | 100 % | 0 % |" in text and "Baseline (version 1) does not train" not in text
    baseline = next(two_profiles[1].rglob("profile_v1_1.json"))
    baseline.write_text(json.dumps(json.loads(baseline.read_text()) | {"summary": partly["summary"]}))
    assert fusion_report.main([*both, "--output", str(place / "r.md")]) == 0
    assert (
        "\nBaseline (version 1) does not train every parameter: its speed means nothing."
        in (place / "r.md").read_text()
    )
    (place / "profile_v2_0.json").unlink()
    (place / "profile_v2_1.json").unlink()
    refused(fusion_report.main, both, capsys, "differ (hidden_dim: 32, 64; device: CPU, MI300X)")


def test_bad_input_of_the_fusion_report(two_profiles, one_process, tmp_path, capsys):
    both = ["--baseline", two_profiles[1], "--fused", two_profiles[2]]
    refused(fusion_report.main, ["--baseline", "nowhere", "--fused", two_profiles[2]], capsys, "holds no profile_v")
    refused(fusion_report.main, [*both, "--use-amp"], capsys, "has no effect")
    wrong = ["--output-dir", tmp_path / "new", "--num-heads", "5"]
    assert fusion_report.main([str(word) for word in wrong]) == 2  # after the words of run_pytorch_profiler.py
    for version, folder in two_profiles.items():  # as an earlier call has left them
        shutil.copytree(folder, tmp_path / "new" / f"profile_v{version}", dirs_exist_ok=True)
    assert fusion_report.main([str(word) for word in wrong]) == 2 and not list((tmp_path / "new").glob("*.md"))
    file = next(two_profiles[2].rglob("profile_v2_1.json"))
    for text, words in (("{", "damaged"), ("{}", "profile_v2_1.json: made from a trace alone")):
        file.write_text(text)
        refused(fusion_report.main, both, capsys, words)


def test_a_profile_without_measured_steps_is_named(two_profiles, capsys):
    """As run_pytorch_profiler.py --analyze-existing leaves it beside a trace of the training script."""
    both = ["--baseline", str(two_profiles[1]), "--fused", str(two_profiles[2])]
    place = two_profiles[2] / "pytorch_profiles"
    target = ["--output", str(place / "report.md")]
    only_a_trace = json.loads((place / "profile_v2_1.json").read_text())
    del only_a_trace["summary"]
    other = place / "profile_v2_9.json"
    other.write_text(json.dumps(only_a_trace))
    assert fusion_report.main([*both, *target]) == 0
    sentence = f"Left out, made from a trace alone (--analyze-existing), so without measured steps: {other}."
    assert sentence in capsys.readouterr().out and "Left out" in (place / "report.md").read_text()
    (place / "profile_v2_1.json").unlink()
    refused(fusion_report.main, both, capsys, "or compare traces with analyze_kernel_reduction.py")
    other.unlink()
    refused(fusion_report.main, both, capsys, "holds no profile_v*.json")


# ---------------------------------------------------------------- pages


def test_words_start_at_the_left_and_numbers_end_at_the_right():
    """The bottlenecks' report had its advice at the right edge."""
    rows = [["a", "1.5", "-", "version 2 (one matmul)"], ["b", "not judged", "-2", "`x`"]]
    parts = [report.table(["name", "ms", "gain", "what may help"], rows)]
    assert "| --- | ---: | ---: | --- |" in report.markdown("t", [], [], [("s", parts)])
    page = report.page("t", [], [], [("s", parts)])
    assert '<th class="word">what may help</th>' in page and '<td class="word">version 2 (one matmul)</td>' in page
    assert "<td>1.5</td>" in page and "<td>not judged</td>" in page and "<td>-</td>" in page


def test_a_page_escapes_what_it_is_given():
    parts = [report.table(["<h>"], [["<td>"]]), report.text("1 < 2")]
    text = report.page("a < b", [("<k>", "<v>")], ["<n>"], [("x & y", parts)])
    escaped = ("<title>a &lt; b</title>", "x &amp; y", "&lt;td&gt;", "1 &lt; 2", "&lt;k&gt;", "&lt;v&gt;", "&lt;n&gt;")
    assert all(words in text for words in escaped)


def test_bars_are_drawn_to_one_scale():
    """Of the largest upper quartile, or of the longest sum: nothing lies outside."""
    steps = {"a": (9.0, 10.0, 40.0), "b": (19.0, 20.0, 21.0)}
    rows = [
        {"name": name, "gain": "-", "step_ms": dict(zip(("p25", "median", "p75"), step, strict=True))}
        for name, step in steps.items()
    ]
    first, second = report.step_bars(rows, "")["bars"]
    assert (first["low"], first["pieces"][0]["percent"], first["high"]) == (22.5, 25, 100)
    assert (second["low"], second["pieces"][0]["percent"], second["high"]) == (47.5, 50, 52.5)
    groups = {"a": {"GEMM": {"ms": 6.0}, "copies": {"ms": 2.0}, "all": {"ms": 8.0}}}
    groups["b"] = {"copies": {"ms": 4.0}, "all": {"ms": 4.0}}
    bars = report.group_bars(groups, "")["bars"]
    assert [[piece["percent"] for piece in bar["pieces"]] for bar in bars] == [[75, 25], [50]]


def test_phases_and_memory_are_drawn_on_one_axis(make_trace, monkeypatch):
    """The first allocation, 1000 us after the clock's zero, is at 0 ms."""
    drawn = []
    monkeypatch.setattr(report, "memory_over_time", lambda *chart: drawn.append(chart) or report.text("a chart"))
    sizes = [{"ts": 1000.0 + 500 * i, "args": {"Device Type": 1, "Total Allocated": i * 2**20}} for i in range(2)]
    trace = read_profile(make_trace("p/trace.json", {"gemm": 1}))
    trace = dataclasses.replace(trace, memory=sizes, phases=[("forward", 1250.0, 1500.0)])
    profiler.memory_timeline(trace)
    ((points, phases, _),) = drawn
    assert (points, phases) == ([(0.0, 0.0), (0.5, 1.0)], [("forward", 0.25, 0.5)])


BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
# In a frame as wide as a phone: the width of the page, its paper, and what is cut off. --dump-dom prints the title.
FRAME = """<!DOCTYPE html><title>none</title>
<iframe id="frame" style="width:390px;height:900px;border:0" srcdoc="PAGE"></iframe>
<script>
frame.onload = () => { const page = frame.contentDocument, view = page.defaultView;
  const cut = [...page.querySelectorAll("h1, dd, td, .table, .value")].filter(e => e.scrollWidth > e.clientWidth + 1);
  document.title = JSON.stringify([page.documentElement.scrollWidth,
    view.getComputedStyle(page.body).backgroundColor, cut.map(e => e.outerHTML.slice(0, 60))]); };
</script>"""


def seen_on_a_phone(page, folder, dark=False):
    (folder / "frame.html").write_text(FRAME.replace("PAGE", html.escape(page)))
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--virtual-time-budget=9000"]
    options += ["--blink-settings=preferredColorScheme=0"] * dark + [f"--user-data-dir={folder / 'profile'}"]
    command = [BROWSER, *options, "--dump-dom", (folder / "frame.html").as_uri()]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert "CONSOLE" not in result.stderr, result.stderr
    return json.loads(html.unescape(result.stdout.split("<title>")[1].split("</title>")[0]))


@pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed to open the page in")
@pytest.mark.slow
def test_the_report_is_readable_on_a_phone_and_in_dark_mode(comparison, tmp_path):
    page = comparison[0]
    width, paper, cut = seen_on_a_phone(page, tmp_path)
    assert width <= 390 and cut == [] and paper == "rgb(255, 255, 255)"
    assert seen_on_a_phone(page, tmp_path, dark=True) == [width, "rgb(22, 24, 28)", []]
    row = page[page.index(">tokens/s<") :].split("</tr>")[0]
    assert seen_on_a_phone(page.replace(row, row.replace("<td>", "<td>1,234,567,890")), tmp_path)[2]
