"""The benchmarks: figures of recorded runs, the suite on stand-ins and on real scripts, peers, kernels, the ladder."""

import csv
import json
import os
import shutil
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

import benchmark_suite
from common import benchmark_results
from common.benchmark_results import Case, read_results, rows, write_results
from common.versions import REPOSITORY, load_version, loss_and_gradients, relative_error
from maintain import benchmark_kernels, ladder

TOY = "--hidden-dim 32 --num-layers 1 --num-heads 2 --vocab-size 64".split()
HALF = ["--use-amp", "--amp-dtype", "float16"]
V1_MS, V3_MS = [40.0, 60.0, 50.0], [4.0, 5.0, 10.0]


# ---- figures from hand-made runs


def summary_of(step_ms, **more):
    return {
        "parameters": 1000, "parameters_trained": 1000,
        "step_ms": {"median": step_ms, "p25": step_ms - 1, "p75": step_ms + 2},
        "forward_ms": step_ms / 4, "backward_ms": step_ms / 2, "optimizer_ms": None, "peak_memory_mb": 100.0,
        "first_loss": 7.0, "final_loss": 6.0, "flops_per_step": 2e9, "tflops": 2 / step_ms, "mfu": 0.1 / step_ms,
        "graph": {"captured": False, "reason": "not asked for"}, "warmup_s": 1.0, **more,
    }  # fmt: skip


ENVIRONMENT = {
    "device": "Toy GPU", "device_type": "cuda", "torch": "2.0", "triton": "3.0", "cuda": "13.0", "hip": None,
    "date": "2026-01-02T03:04:05+00:00", "commit": "0123456789abcdef", "script_sha256": "0",
}  # fmt: skip


def run_of(case, repeat, step_ms, **more):
    run = {"case": case, "repeat": repeat, "status": "ok", "reason": None, "seconds": 1.0, "session": 0}
    return run | {"environment": ENVIRONMENT, "config": {}, "summary": summary_of(step_ms, **more)}


def results_of(runs, accuracy=()):
    sessions = [{"date": "2026-01-02T03:04:05+00:00"}]
    return {"sessions": sessions, "runs": runs, "accuracy": list(accuracy)}


FIRST = Case("v1", "small", 8, 128, "float32", False)
THIRD = Case("v3", "small", 8, 128, "bfloat16", True)


def hand_made():
    captured = {"graph": {"captured": True, "reason": None}}
    runs = [run_of(FIRST, i, ms) for i, ms in enumerate(V1_MS)]
    runs += [run_of(THIRD, i, ms, peak_memory_mb=30.0 + i, **captured) for i, ms in enumerate(V3_MS)]
    checked = {"case": THIRD, "loss_error": 1e-4, "gradient_error": 2e-3, "worst_gradient": "norm.weight"}
    return results_of(runs, [checked])


def test_rows_are_medians_over_repeats():
    first, third = rows(hand_made())
    assert (first["step_p25_ms"], first["step_ms"], first["step_p75_ms"]) == (45, 50, 55)
    assert first["samples_per_second"] == 8 / 0.050 and first["tokens_per_second"] == 8 * 128 / 0.050
    assert first["tflops"] == pytest.approx(2e9 / 0.050 / 1e12) and first["mfu"] == pytest.approx(0.1 / 50)
    assert first["forward_ms"] == 12.5 and first["optimizer_ms"] is None
    assert (third["step_ms"], third["captured"], third["repeats"]) == (5, True, 3)
    assert third["peak_memory_mb"] == 32  # the peak of all
    assert third["gradient_error"] == 2e-3 and first["gradient_error"] is None


def test_speed_is_a_ratio_within_a_round():
    """10, 12 and 5 times: the median of the ratios, not the ratio of the medians."""
    first, third = rows(hand_made())
    assert first["speed"] == 1
    assert third["speed"] == 10


def test_speed_needs_version_1_of_the_same_configuration():
    results = hand_made()
    results["runs"] = [r | {"case": THIRD._replace(seq_len=64)} if r["case"] == THIRD else r for r in results["runs"]]
    assert rows(results)[1]["speed"] is None


def test_times_of_the_interpreter_are_no_speed():
    results = hand_made()
    for run in results["runs"]:
        run["environment"] = ENVIRONMENT | {"device_type": "cpu"}
    assert [row["speed"] for row in rows(results)] == [1, None]


def test_efficiency_is_throughput_a_process_over_that_of_one():
    """Steps of 4, 5 and 10 ms alone, on three GPUs; of 6, 8 and 10 ms together: the ratio of the medians."""
    results = hand_made()
    together = THIRD._replace(processes=8)
    results["runs"] += [run_of(together, i, ms) for i, ms in enumerate((6.0, 8.0, 10.0))]
    for model in ("v3+peer-adamw", "v3+copies"):
        results["runs"] += [run_of(together._replace(model=model), 0, 6.25)]
    alone, eight, *others = rows(results)[1:]
    assert V3_MS == [4.0, 5.0, 10.0]
    assert [row["efficiency"] for row in (alone, eight, *others)] == [None, 5 / 8, 5 / 6.25, 5 / 6.25]
    assert eight["samples_per_second"] == 8 * 8 / 0.008
    assert eight["speed"] == pytest.approx(8 * np.median(np.divide(V1_MS, [6.0, 8.0, 10.0])))
    assert "v3" in str(together) and str(together).endswith("x8") and "x" not in str(THIRD).split()[-1]
    table = benchmark_results.text_table([alone, eight], ["throughput"])
    assert "processes" in table and "62.5%" in table
    assert "processes" not in benchmark_results.text_table([alone], ["throughput"])


def test_a_single_run_keeps_its_own_quartiles():
    row = rows(results_of([run_of(FIRST, 0, 40.0)]))[0]
    assert (row["step_p25_ms"], row["step_ms"], row["step_p75_ms"]) == (39, 40, 42)


def test_a_failed_repeat_is_named_and_left_out():
    failed = {"case": FIRST, "repeat": 1, "status": "failed", "reason": "out of memory", "seconds": 1}
    row = rows(results_of([run_of(FIRST, 0, 40.0), failed]))[0]
    assert (row["status"], row["repeats"], row["reason"]) == ("ok", 1, "out of memory")
    assert "a repeat failed: out of memory" in benchmark_results.text_table([row], ["memory"])
    row = rows(results_of([failed]))[0]
    assert (row["status"], row["repeats"]) == ("failed", 0)


def test_results_survive_writing_and_reading(tmp_path):
    path = tmp_path / "suite.json"
    write_results(hand_made(), path)
    assert read_results(path) == hand_made()
    assert len(path.read_text().splitlines()) == 16  # a line for each entry, so that a diff names runs
    path.write_text('{"runs": [{"case": {"model": "v1"}}], "accuracy": []}')
    with pytest.raises(ValueError, match="no results file"):
        read_results(path)


# ---- the suite on stand-ins of the training scripts

STUBS = REPOSITORY / "tests" / "tools" / "stubs"


@pytest.fixture
def stubs(tmp_path, monkeypatch):
    """A folder of scripts v1 to v4 that the suite runs in place of the real ones; its log says what was run."""
    folder = tmp_path / "stand ins"
    folder.mkdir()
    for name in ("v1", "v2", "v3", "v4"):
        shutil.copy(STUBS / "training_script.py", folder / f"{name}.py")
    metrics = {"environment": ENVIRONMENT, "config": {}, "summary": summary_of(40.0)}
    (folder / "metrics.json").write_text(json.dumps(metrics))
    monkeypatch.setattr(benchmark_suite, "script_of", lambda model: folder / f"{model.split('+')[0]}.py")
    monkeypatch.setattr(benchmark_suite, "gpu_count", lambda: 1)  # the same defaults on every machine
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("HIP_VISIBLE_DEVICES", raising=False)
    return folder


def suite(folder, *options):
    return benchmark_suite.main(["--results", str(folder / "results"), "--metrics", "throughput", *options])


def log_of(folder):
    return [line.split() for line in (folder / "log").read_text().splitlines()]


def results_in(folder):
    return read_results(folder / "results" / "suite.json")


def test_repeats_are_interleaved(stubs, capsys):
    options = "--models v1,v3 --precisions float32,tf32 --presets small,tiny --repeats 2 --graph off".split()
    assert suite(stubs, *options) == 0
    ran = [(line[line.index("--preset") + 1], line[0], "--tf32" in line) for line in log_of(stubs)]
    one = [("small", "v1", False), ("small", "v3", False), ("small", "v1", True), ("small", "v3", True)]
    other = [("tiny", *rest) for _, *rest in one]
    assert ran == [*one, *other, *one, *other]
    assert [run["repeat"] for run in results_in(stubs)["runs"]] == [0] * 8 + [1] * 8
    assert "[16/16] tiny b8 t128 tf32 v3 eager, repeat 2: 40.000 ms" in capsys.readouterr().err


def test_a_failing_and_a_refused_case_are_reported_and_survived(stubs, capsys):
    assert suite(stubs, *"--models v2,v3,v1 --precisions float32,bfloat16 --repeats 2".split()) == 1
    shown = capsys.readouterr()
    assert "all cases of v2 failed" in shown.err and "cases of v3" not in shown.err
    assert "float32 v2 eager: failed: RuntimeError: no such kernel" in shown.out
    assert "bfloat16 v3 graph: not available: no bfloat16 here" in shown.out
    statuses = {(r["case"].model, r["case"].precision): r["status"] for r in results_in(stubs)["runs"]}
    assert statuses == {
        ("v1", "float32"): "ok",
        ("v1", "bfloat16"): "ok",
        ("v2", "float32"): "failed",
        ("v2", "bfloat16"): "failed",
        ("v3", "float32"): "ok",
        ("v3", "bfloat16"): "not available",
    }
    # what a machine cannot run is asked once, what failed is tried in each round
    names = [line[0] for line in log_of(stubs)]
    assert (names.count("v1"), names.count("v2"), names.count("v3")) == (4, 4, 3)
    with open(stubs / "results" / "suite.csv", newline="") as file:
        table = list(csv.DictReader(file))
    assert [(row["model"], row["status"], row["step_ms"]) for row in table[:3]] == [
        ("v2", "failed", ""),
        ("v3", "ok", "40.0"),
        ("v1", "ok", "40.0"),
    ]


def test_without_a_gpu_the_default_is_a_toy(stubs, monkeypatch, capsys):
    monkeypatch.setenv("TRITON_INTERPRET", os.environ.get("TRITON_INTERPRET", "0"))
    monkeypatch.setattr(benchmark_suite, "gpu_count", lambda: 0)
    assert suite(stubs, *"--models v1 --repeats 1".split()) == 0
    assert "--batch-size 2 --seq-len 32 --hidden-dim 64" in " ".join(log_of(stubs)[0])
    assert "a toy model is measured" in capsys.readouterr().err


def test_a_refused_model_is_no_failure(stubs):
    assert suite(stubs, *"--models v3 --precisions bfloat16 --repeats 1".split()) == 0


def test_graph_default_is_not_run_twice(stubs):
    assert suite(stubs, *"--models v1,v3 --graph on,off,default --repeats 1".split()) == 0
    ran = [(line[0], "--graph" in line, "--no-graph" in line) for line in log_of(stubs)]
    assert ran == [("v1", True, False), ("v1", False, True), ("v3", True, False), ("v3", False, True)]


def test_options_reach_the_scripts(stubs):
    options = "--models v1+nodet --batch-sizes 3 --seq-lengths 16 --precisions float16 --num-steps 7 --repeats 1"
    assert suite(stubs, *options.split(), "--hidden-dim", "64") == 0
    line = " ".join(log_of(stubs)[0])
    for wanted in ("--batch-size 3 --seq-len 16 --use-amp --amp-dtype float16", "--no-deterministic", "--num-steps 7"):
        assert wanted in line
    assert "--hidden-dim 64" in line and results_in(stubs)["runs"][0]["case"].options == "--hidden-dim 64"


def test_append_runs_only_what_is_missing(stubs, capsys):
    assert suite(stubs, *"--models v1,v3 --repeats 1".split()) == 0
    assert suite(stubs, *"--models v1,v3 --repeats 1".split(), "--append") == 0
    assert suite(stubs, *"--models v1 --repeats 2".split(), "--append") == 0
    assert [line[0] for line in log_of(stubs)] == ["v1", "v3", "v1"]
    assert [(r["case"].model, r["repeat"], r["session"]) for r in results_in(stubs)["runs"]] == [
        ("v1", 0, 0),
        ("v3", 0, 0),
        ("v1", 1, 1),
    ]
    with pytest.raises(SystemExit, match="2"):
        suite(stubs, "--models", "v1")
    assert "holds results already: add --append" in capsys.readouterr().err


def test_append_leaves_out_runs_of_an_older_script(stubs, capsys):
    assert suite(stubs, *"--models v1,v3 --repeats 1".split()) == 0
    with open(stubs / "v3.py", "a") as script:
        script.write("# tuned\n")
    assert suite(stubs, *"--models v1,v3 --repeats 1".split(), "--append") == 0
    assert [line[0] for line in log_of(stubs)] == ["v1", "v3", "v3"]
    assert len(results_in(stubs)["runs"]) == 2
    assert "1 runs are of an older text of their script" in capsys.readouterr().err


def test_append_keeps_what_was_not_available_until_it_is_asked_for_again(stubs):
    assert suite(stubs, *"--models v1,v3 --precisions float32,bfloat16 --repeats 1".split()) == 0
    assert suite(stubs, *"--models v1 --precisions tf32 --repeats 1".split(), "--append") == 0
    assert [r["status"] for r in results_in(stubs)["runs"]].count("not available") == 1
    assert suite(stubs, *"--models v3 --precisions bfloat16 --repeats 1".split(), "--append") == 0
    assert [r["status"] for r in results_in(stubs)["runs"]].count("not available") == 1
    assert [line[0] for line in log_of(stubs)] == ["v1", "v3", "v1", "v3", "v1", "v3"]


def test_results_of_two_machines_are_not_mixed(stubs, capsys):
    assert suite(stubs, *"--models v1 --repeats 1".split()) == 0
    metrics = json.loads((stubs / "metrics.json").read_text())
    metrics["environment"]["device"] = "Other GPU"
    (stubs / "metrics.json").write_text(json.dumps(metrics))
    assert suite(stubs, *"--models v1 --repeats 2".split(), "--append") == 2
    assert "the results are of Toy GPU, but this is Other GPU" in capsys.readouterr().err
    assert len(results_in(stubs)["runs"]) == 1


def test_the_time_limit_starts_nothing_that_would_not_end_in_time(stubs, capsys):
    assert suite(stubs, *"--models v1 --repeats 2 --time-limit 1".split()) == 0
    assert not (stubs / "log").exists()
    assert "2 of 2 processes were not run" in capsys.readouterr().out
    assert suite(stubs, *"--models v1 --repeats 2 --time-limit 60".split(), "--append") == 0
    assert len(results_in(stubs)["runs"]) == 2


def test_a_process_that_hangs_is_ended(stubs, capsys):
    started = time.monotonic()
    assert suite(stubs, *"--models v4,v1 --repeats 1 --timeout 2".split()) == 1
    assert time.monotonic() - started < 30
    assert "it ran longer than --timeout 2 s" in capsys.readouterr().out


def test_rounds_are_shared_between_gpus_and_stay_on_one(stubs):
    options = "--models v1,v3 --presets small,tiny --repeats 2 --gpus 0,5".split()
    assert suite(stubs, *options) == 0
    of_round = {}
    for line in log_of(stubs):
        of_round.setdefault(line[1], []).append((line[line.index("--preset") + 1], line[0]))
    assert set(of_round) == {"0", "5"}
    gpus = {}
    for run in results_in(stubs)["runs"]:
        gpus.setdefault((run["case"].preset, run["repeat"]), set()).add(run["gpu"])
    assert len(gpus) == 4 and all(len(used) == 1 for used in gpus.values())
    if hasattr(os, "sched_getaffinity") and len(os.sched_getaffinity(0)) > 1:
        cores = {line[1]: set(line[2].split(",")) for line in log_of(stubs)}
        assert not cores["0"] & cores["5"]


@pytest.mark.parametrize("gpus, wanted", [(1, [None, None, None]), (2, [0, 1, 0]), (8, [0, 1, 0])])
def test_one_process_beside_several_takes_another_gpu_in_each_repeat(stubs, monkeypatch, gpus, wanted):
    """Of those that two processes use; the stand-ins run without torchrun."""
    monkeypatch.setattr(benchmark_suite, "gpu_count", lambda: gpus)
    monkeypatch.setattr(benchmark_suite, "launcher", lambda processes: [sys.executable])
    assert suite(stubs, *"--models v1 --nproc 1,2 --repeats 3".split()) == 0
    runs = results_in(stubs)["runs"]
    assert [run["gpu"] for run in runs if run["case"].processes == 1] == wanted
    assert [run["gpu"] for run in runs if run["case"].processes == 2] == [None] * 3


@pytest.mark.parametrize(
    "variable, visible, wanted",
    [("CUDA_VISIBLE_DEVICES", "4,6", "6"), ("HIP_VISIBLE_DEVICES", "2,3", "3"), ("OTHER", "", "1")],
)
def test_a_gpu_is_counted_among_the_visible_ones(variable, visible, wanted, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("HIP_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv(variable, visible)
    name = variable if variable != "OTHER" else "CUDA_VISIBLE_DEVICES"
    assert benchmark_suite.environment_for(1)[name] == wanted


def test_an_interrupted_suite_keeps_what_it_has(stubs, monkeypatch, capsys):
    run_case = benchmark_suite.run_case

    def interrupted(case, *rest):
        if case.model == "v3":
            raise KeyboardInterrupt
        return run_case(case, *rest)

    monkeypatch.setattr(benchmark_suite, "run_case", interrupted)
    assert suite(stubs, *"--models v1,v3 --repeats 1".split()) == 130
    shown = capsys.readouterr()
    assert "interrupted" in shown.err and "1 of 2 processes were not run" in shown.out
    assert len(results_in(stubs)["runs"]) == 1


@pytest.mark.parametrize(
    "options, sentence",
    [
        ("--models v7", "v7 is none of v1 to v4"),
        ("--models v2+foo", "unrecognized arguments: --foo"),
        ("--presets huge", "huge is none of tiny, small, medium"),
        ("--precisions fp8", "choose from float32, tf32"),
        ("--batch-sizes 0", "--batch-sizes"),
        ("--hiden-dim 3", "unrecognized arguments: --hiden-dim 3"),
        ("--gpus 0 --device cpu", "exclude each other"),
        ("--gpus 0,1 --nproc 2", "leave one of them out"),
        ("--nproc 0", "--nproc"),
        ("--models v1,v3+peer-adamw", "v3+peer-adamw is for several GPUs: add --nproc 2"),
        ("--models v3+peer-adamw+foo --nproc 2", "unrecognized arguments: --foo"),
        ("--models v3,v4+peer-adamw --nproc 2", "unrecognized arguments: --peer-adamw"),
    ],
)
def test_bad_options_are_answered_in_a_sentence(options, sentence, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", os.environ.get("TRITON_INTERPRET", "0"))
    with pytest.raises(SystemExit, match="2"):
        benchmark_suite.main(["--results", str(tmp_path / "results"), *options.split()])
    shown = capsys.readouterr()
    assert sentence in shown.err and len(shown.err.splitlines()) == 1
    assert not (tmp_path / "results").exists()


def test_gradients_behind_a_case_that_crashes_are_still_compared(tmp_path, capsys):
    """The process dies at the second of three cases; the third is compared by the next process."""
    line = '{"loss_error": 0.0, "gradient_error": 0.0, "worst_gradient": "w"}\n'
    cases = [Case(model, "tiny", 8, 128, "float32", False) for model in ("v1", "v2", "v3")]
    asked = []

    class Processes(benchmark_suite.Processes):
        def run(self, command, timeout, gpu=None):
            asked.append([version for version, _ in json.loads(command[-1])])
            return (1, line, "Traceback\nRuntimeError: lost") if len(asked) == 1 else (0, line, "")

    arguments = benchmark_suite.parse_arguments(["--results", str(tmp_path)])
    measured = benchmark_suite.Suite(arguments, results_of([]), [])
    measured.processes = Processes()
    benchmark_suite.measure_accuracy(measured, cases, None)
    assert asked == [[1, 2, 3], [3]]
    assert [entry["case"].model for entry in measured.results["accuracy"]] == ["v1", "v3"]
    assert "v2 eager: gradients not compared: RuntimeError: lost" in capsys.readouterr().err


def test_gradient_errors_are_those_of_the_versions(capsys):
    options = ["--preset", "tiny", "--batch-size", "2", "--seq-len", "16", *TOY]
    benchmark_suite.check_gradients([[1, options], [2, [*options, *HALF]]])
    exact, half = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert (exact["loss_error"], exact["gradient_error"]) == (0, 0)
    assert 1e-5 < half["gradient_error"] < 1e-2
    wanted, found = (loss_and_gradients(v, [*options, *more])[1] for v, more in ((1, []), (2, HALF)))
    errors = {name: relative_error(found[name], wanted[name]) for name in wanted}
    assert half["worst_gradient"] == max(errors, key=errors.get)
    assert half["gradient_error"] == pytest.approx(max(errors.values()), rel=1e-6)


def test_a_missing_gradient_is_infinitely_wrong(monkeypatch, capsys):
    ones = {"a": torch.ones(2), "b": torch.ones(2)}
    gradients = {1: (2.0, ones), 2: (1.0, {"a": ones["a"]})}
    monkeypatch.setattr(benchmark_suite, "loss_and_gradients", lambda version, options, **more: gradients[version])
    benchmark_suite.check_gradients([[2, []]])
    found = json.loads(capsys.readouterr().out)
    assert found == {"loss_error": 0.5, "gradient_error": float("inf"), "worst_gradient": "b"}


# ---- the suite on the real scripts, through a version folder's command, in a folder with a space


@pytest.mark.slow
def test_suite_on_real_scripts(tmp_path):
    command = [sys.executable, str(REPOSITORY / "version2_pytorch_fused" / "benchmark_suite.py"), "--models", "v1,v2"]
    command += ["--presets", "tiny", "--batch-sizes", "2", "--seq-lengths", "16", "--repeats", "1", "--num-steps", "3"]
    done = subprocess.run(
        [*command, "--results", "my runs", *TOY], cwd=tmp_path, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr
    results = read_results(tmp_path / "my runs" / "suite.json")
    first, second = rows(results)
    assert (first["model"], second["model"], first["speed"]) == ("v1", "v2", 1)
    assert first["parameters_trained"] == first["parameters"] == second["parameters"]
    assert first["gradient_error"] == 0 and 0 < second["gradient_error"] < 1e-4
    assert second["first_loss"] == pytest.approx(first["first_loss"], rel=1e-5)
    assert results["runs"][0]["environment"]["torch"] == torch.__version__
    assert (tmp_path / "my runs" / "suite.png").read_bytes().startswith(b"\x89PNG")
    assert "gradient error" in done.stdout and "2 of 2" not in done.stdout


@pytest.mark.slow
def test_suite_on_two_processes(tmp_path):
    sizes = [
        "--presets",
        "tiny",
        "--batch-sizes",
        "2",
        "--seq-lengths",
        "16",
        "--repeats",
        "1",
        "--num-steps",
        "3",
        *TOY,
    ]
    command = [sys.executable, str(REPOSITORY / "scripts" / "benchmark_suite.py"), "--models", "v1", "--nproc", "1,2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "--results", "runs", "--device", "cpu", *sizes],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=280,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    alone, together = rows(read_results(tmp_path / "runs" / "suite.json"))
    assert (alone["processes"], together["processes"]) == (1, 2)
    assert together["parameters_trained"] == together["parameters"] == alone["parameters"]
    assert together["flops_per_step"] == 2 * alone["flops_per_step"]
    assert together["efficiency"] == pytest.approx(alone["step_ms"] / together["step_ms"])
    assert together["gradient_error"] is None and alone["gradient_error"] == 0


def test_peers_are_for_several_processes_alone():
    assert benchmark_suite.own_options("v3+peer-adamw") == ["--peer-adamw"]
    assert benchmark_suite.own_options("v3+nodet+peer-adamw") == ["--no-deterministic", "--peer-adamw"]
    for model in ("v3+peer-adamw", "v3+peer-adamw+nodet"):
        assert benchmark_suite.process_counts(model, [1, 2, 4]) == [2, 4]
    assert benchmark_suite.process_counts("v3", [1, 2]) == [1, 2]


def test_of_several_processes_the_reason_is_told_by_the_first_that_has_one():
    report = "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n=====\nRoot Cause: rank 0\n====="
    refused = "tiny_llama_v3.py: error: --peer-adamw needs GPUs: leave it out"
    assert benchmark_suite.last_words(f"W1122 warning\n{refused}\n{report}") == refused.partition("error: ")[2]
    died = "[rank1]: Traceback:\n[rank1]: RuntimeError: out of luck\ntiny_llama_v1.py, process 0 of 2: another ended"
    assert benchmark_suite.last_words(f"{died}\n{report}") == "RuntimeError: out of luck"
    assert benchmark_suite.last_words(report) == "====="
    assert benchmark_suite.last_words("Traceback:\nValueError: no\n") == "ValueError: no"


# ---- peers, with a stand-in of the library


def run_peer(packages, *options):
    """peers.py with the packages of that folder before all others."""
    sizes = ["--batch-size", "2", "--seq-len", "16", "--num-steps", "3", *TOY]
    command = [sys.executable, str(REPOSITORY / "scripts" / "common" / "peers.py"), *sizes, *options]
    environment = os.environ | {"PYTHONPATH": str(packages)}
    return subprocess.run(command, capture_output=True, text=True, timeout=250, env=environment)


def test_peers_train_the_same_model_from_the_same_weights(tmp_path):
    kept = ["--save-every", "3", "--checkpoint-dir", str(tmp_path)]
    done = run_peer(STUBS / "library", "--metrics-file", str(tmp_path / "peer.json"), *kept)
    assert done.returncode == 0, done.stderr
    metrics = json.loads((tmp_path / "peer.json").read_text())
    script = load_version(1)
    options = script.parse_options(
        ["--batch-size", "2", "--seq-len", "16", "--num-steps", "3", "--no-deterministic", *TOY]
    )
    trainer = script.Trainer(options)
    data = script.load_data(options)
    trainer.warm_up(*data.batch(0), {"weights": script.initial_weights(trainer.config, options.seed), "step": 0})
    wanted = [trainer.run(*data.batch(step))["loss"] for step in range(3)]
    assert [step["loss"] for step in metrics["steps"]] == pytest.approx(wanted, rel=1e-5)
    trained = script.training_state(trainer)["weights"]
    found = torch.load(tmp_path / "step_000000003.pt")["weights"]
    assert found.keys() == trained.keys()
    assert max(relative_error(found[name], weight.cpu()) for name, weight in trained.items()) < 1e-4
    assert metrics["summary"]["parameters_trained"] == sum(p.numel() for p in trainer.model.parameters())
    assert metrics["summary"]["flops_per_step"] == script.flops_per_step(trainer.config, 2, 16)
    assert metrics["environment"]["script_sha256"] == benchmark_suite.hash_of(benchmark_suite.PEER_SCRIPT)


def test_a_missing_package_is_one_sentence(tmp_path):
    (tmp_path / "transformers.py").write_text("raise ImportError('nothing here')")
    done = run_peer(tmp_path)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == (
        "peers.py: error: --library transformers needs the package transformers (nothing here): install it\n"
    )


def test_every_peer_has_options_that_its_script_takes():
    for peer in benchmark_suite.PEERS:
        assert benchmark_suite.own_options(peer)[:2] in (["--library", "transformers"], ["--library", "liger"])
        assert benchmark_suite.graph_choices(peer, ["on", "off"]) == [peer.endswith("graph")]


# ---- single kernels


@pytest.fixture
def toy_kernels(monkeypatch):
    """Toy sizes on a GPU too, where so small tensors need not exceed the cache."""
    monkeypatch.setitem(benchmark_kernels.SIZES, "cuda", benchmark_kernels.SIZES["cpu"])
    monkeypatch.setattr(benchmark_kernels.Bench, "cache_bytes", lambda self: 0)


def test_kernels_are_timed_beside_pytorch(tmp_path, toy_kernels, capsys):
    path = tmp_path / "kernels.json"
    assert benchmark_kernels.main(["--json", str(path)]) == 0
    found = json.loads(path.read_text())
    names = [record["operation"] for record in found["operations"]]
    assert names == [
        *("RMSNorm forward", "RMSNorm backward", "RMSNorm + residual forward", "RMSNorm + residual backward"),
        *("RoPE forward", "RoPE backward", "SwiGLU forward", "SwiGLU backward"),
        *("cross-entropy forward", "cross-entropy backward", "AdamW, float32"),
        *("attention forward", "attention forward + backward"),
    ]
    for record in found["operations"]:
        ours, *others = record["candidates"]
        assert ours["name"] == "V3" and ours["us"]["p25"] <= ours["us"]["median"] <= ours["us"]["p75"]
        scale = 1e3 if record["unit"] == "GB/s" else 1e6
        assert ours["rate"] == pytest.approx(ours["work"] / ours["us"]["median"] / scale)
        assert any("us" in c for c in others)
    if not torch.cuda.is_available():
        assert "these times mean nothing" in capsys.readouterr().out


def test_work_of_the_kernels():
    """Bytes and FLOPs by hand, for the toy sizes."""
    bench = benchmark_kernels.Bench(torch.device("cpu"), torch.float32)
    families = benchmark_kernels.all_operations(bench)
    work = {kind.name: kind.work for family in families.values() for part in family for kind in part()}
    assert work["RMSNorm forward"]["V3"] == 2 * 32 * 32 * 4
    assert work["RMSNorm + residual backward"]["V3"] == 4 * 32 * 32 * 4
    assert work["SwiGLU backward"] == {"V3": 5 * 16 * 32 * 4, "PyTorch": 5 * 16 * 32 * 4}
    assert work["AdamW, float32"]["V3"] == 28 * 2 * 16 * 32
    assert work["attention forward"]["V3"] == 2 * 2 * 32 * 32 * 16
    assert work["attention forward + backward"]["V3"] == 7 * 2 * 32 * 32 * 16


def test_kernels_compute_what_pytorch_does(device, toy_kernels):
    """Both candidates of an operation are given the same task: their results agree."""
    bench = benchmark_kernels.Bench(device, torch.float32)
    for name, families in benchmark_kernels.all_operations(bench).items():
        for family in families if name not in ("optimizer", "attention") else []:
            for kind in family():
                ours, theirs = (kind.candidates[c](kind.sets[0]) for c in ("V3", "PyTorch"))
                ours, theirs = ([t] if isinstance(t, torch.Tensor) else list(t) for t in (ours, theirs))
                for a, b in zip(ours, theirs, strict=False):
                    assert relative_error(a.detach().reshape(b.shape), b.detach()) < 1e-5, kind.name


def test_inputs_exceed_twice_the_cache(monkeypatch):
    bench = benchmark_kernels.Bench(torch.device("cpu"), torch.float32)
    bench.device = torch.device("cuda")
    monkeypatch.setattr(benchmark_kernels.Bench, "cache_bytes", lambda self: 1000)
    assert len(bench.sets(lambda: {"x": torch.zeros(100)})) == 5
    assert len(bench.sets(lambda: {"x": torch.zeros(100)}, used=0.5)) == 10
    assert len(bench.sets(lambda: {"x": torch.zeros(10000)})) == 2


def test_a_candidate_that_cannot_run_is_named(toy_kernels, monkeypatch, capsys):
    script = load_version(3)

    def refuse(*arguments):
        raise RuntimeError("no room\nfor it")

    monkeypatch.setattr(script, "rope", refuse)
    assert benchmark_kernels.main(["--only", "rope"]) == 1
    shown = capsys.readouterr()
    assert "V3               not available: no room" in shown.out and "PyTorch" in shown.out
    assert "RoPE forward of version 3 failed" in shown.err


def test_shares_and_ratios_of_a_hand_made_record():
    times = {"V3": 50.0, "PyTorch": 100.0, "other": 75.0}
    record = {"candidates": [{"name": n, "us": {"median": us}, "rate": 1e4 / us} for n, us in times.items()]}
    record["candidates"].append({"name": "refused", "reason": "no"})
    benchmark_kernels.add_ratios(record, 400.0)
    assert [c.get("share") for c in record["candidates"]] == pytest.approx([0.5, 0.25, 1 / 3, None])
    assert record["candidates"][0]["against_pytorch"] == 1.5


# ---- the ladder


def recorded_folder(folder):
    """A recorded run with figures that are easy to follow by hand; V1 takes 100 ms everywhere."""
    steps = {
        "small": {"float32": (10.0, 20.0), "tf32": (5.0, 4.0), "bfloat16": (2.0, 2.5), "peer": 4.0},
        "medium": {"float32": (50.0, 40.0), "tf32": (10.0, 10.0), "bfloat16": (8.0, 10.0), "peer": 10.0},
    }
    captured = {"graph": {"captured": True, "reason": None}}
    runs = []
    for preset, of_precision in steps.items():
        first = Case("v1", preset, 8, 128, "float32", False)
        runs += [run_of(first, 0, 100.0, peak_memory_mb=1000.0), run_of(first._replace(model="v2"), 0, 80.0)]
        runs.append(run_of(first._replace(graph=True), 0, 50.0, **captured))
        for precision, pair in list(of_precision.items())[:3]:
            for model, ms in zip(("v3", "v4"), pair, strict=True):
                case = Case(model, preset, 8, 128, precision, True)
                runs.append(run_of(case, 0, ms, peak_memory_mb=400.0 + 5 * ms, **captured))
        runs.append(
            run_of(Case("hf-compile-graph", preset, 8, 128, "bfloat16", True), 0, of_precision["peer"], **captured)
        )
    folder.mkdir()
    write_results(results_of(runs), folder / "suite.json")
    us = {"median": 10.0, "p25": 10.0, "p75": 10.0}

    def record(name, size, share, times):
        ours = {"name": "V3", "us": us, "rate": 3000.0, "share": share, "against_pytorch": times}
        theirs = {"name": "SDPA flash", "us": us, "rate": 3000.0, "share": share, "against_pytorch": 1.0}
        return {"operation": name, "size": size, "unit": "GB/s", "candidates": [ours, theirs]}

    operations = [record("RoPE forward", "1 x 2", 0.9, 2.0), record("RMSNorm backward", "1 x 2", 0.7, 3.0)]
    operations += [
        record(f"attention forward, batch 1, {t} tokens", f"batch 1, {t} tokens", 0.5, 0.8) for t in (512, 2048)
    ]
    ceilings = {"copy": 4000.0, "product": {"float32": 50.0, "bfloat16": 2.0}}
    content = {"environment": ENVIRONMENT, "dtype": "bfloat16", "ceilings": ceilings, "operations": operations}
    (folder / "kernels.json").write_text(json.dumps(content))
    return folder


def line_with(text, start):
    return next(line for line in text.splitlines() if line.startswith(f"| {start}"))


def test_ladder_tables(tmp_path):
    text = ladder.markdown(ladder.Recorded(recorded_folder(tmp_path / "toy_2026-01-02")))
    assert "Toy GPU (PyTorch 2.0, Triton 3.0, CUDA 13.0), 2026-01-02, each figure is the median of the steps" in text
    assert "of one process, commit 0123456789. Step in ms" in text
    assert "**small**: batch 8, 128 tokens" in text and "**medium**" in text
    assert line_with(text, "V1 | eager") == "| V1 | eager | 100.00 (1.00x) |  |  |  |  |  |"
    assert line_with(text, "V1 | graph") == "| V1 | graph | 50.00 (2.00x) |  |  |  |  |  |"
    wanted = "| V3 | graph | 10.00 (10.00x) | 5.00 (20.00x) | 2.00 (50.00x) | 410 | 1.0 | 5.0% |"
    assert line_with(text, "V3 | graph") == wanted
    readme = ladder.readme_markdown(ladder.Recorded(tmp_path / "toy_2026-01-02"))
    assert line_with(readme, "V3 | graph") == wanted and "| goal |" in readme
    assert "| V1 | graph" not in readme and "RoPE forward" not in readme  # those stand on the versions' pages


def test_ladder_goals(tmp_path):
    """Speeds of the slower of V3 and V4; the floor of 2 GFLOP at 2 TFLOP/s is 1 ms, 1000 parameters take no time."""
    text = ladder.markdown(ladder.Recorded(recorded_folder(tmp_path / "toy_2026-01-02")))
    assert line_with(text, "V3 and V4, fp32").endswith("| 5.00 (>= 5.5, missed) | 2.00 (>= 1.15) |")
    assert line_with(text, "V3 and V4, TF32").endswith("| 20.00 (>= 15) | 10.00 (>= 5) |")
    assert line_with(text, "V3 and V4, bf16: the slower").endswith("| 40.00 (>= 30) | 10.00 (>= 12, missed) |")
    assert line_with(text, "best of V3 and V4, bf16, against").endswith("| 2.00 (>= 1.5) | 1.25 (>= 1.3, missed) |")
    assert line_with(text, "best of V3 and V4, bf16: share").endswith("| 0.50 (>= 0.33) | 0.13 (>= 0.68, missed) |")
    assert line_with(text, "V3 and V4, bf16: the larger peak").endswith("|  | 0.45 (<= 0.4, missed) |")
    assert line_with(text, "eager step / step in a graph, fp32").endswith("| V1 2.00x | V1 2.00x |")
    assert "V2 with torch.compile" not in text  # what was not measured is counted, not listed
    assert "3 goals have not been measured yet." in text
    assert (
        line_with(text, "RoPE forward")
        == "| RoPE forward, 1 x 2 | 10.0 | 3,000 GB/s | 0.90 (>= 0.8) | SDPA flash | 2.00 |"
    )
    assert "0.70 (>= 0.8, missed)" in line_with(text, "RMSNorm backward")
    attention = [line.split("|")[-2].strip() for line in text.splitlines() if line.startswith("| attention")]
    assert attention == ["0.80 (>= 1, missed)", "0.80 (>= 0.7)"]


def test_ladder_scaling(tmp_path):
    """The goal stands beside the better version alone, and the row of several GPUs is none of the ladder's."""
    folder = recorded_folder(tmp_path / "toy_2026-01-02")
    results = read_results(folder / "suite.json")
    text = ladder.markdown(ladder.Recorded(folder))
    assert "several GPUs" not in text
    for model, ms in (("v3", 8.5), ("v4", 12.5)):
        case = Case(model, "medium", 8, 128, "bfloat16", True, processes=4)
        results["runs"].append(run_of(case, 0, ms, graph={"captured": True, "reason": None}))
    write_results(results, folder / "suite.json")
    scaled = ladder.markdown(ladder.Recorded(folder))
    assert scaled.startswith(text.split("Ceilings")[0].rstrip())
    three, four = line_with(scaled, "V3, medium"), line_with(scaled, "V4, medium")
    assert three == "| V3, medium, bf16 | graph | 4 | 8.50 | 3,765 | 0.941 (>= 0.92) | 2026-01-02 |"
    assert four == "| V4, medium, bf16 | graph | 4 | 12.50 | 2,560 | 0.800 | 2026-01-02 |"
    readme = ladder.readme_markdown(ladder.Recorded(folder))
    assert three in readme and "V4, medium" not in readme


def test_ladder_takes_what_a_run_lacks_from_another(tmp_path):
    """Kernels and rows of several GPUs, with their own date; never from another device."""
    old, new = (recorded_folder(tmp_path / f"toy_2026-01-0{day}") for day in (2, 5))
    results = read_results(old / "suite.json")
    case = Case("v3", "medium", 8, 128, "bfloat16", True, processes=4)
    results["runs"].append(run_of(case, 0, 8.5, graph={"captured": True, "reason": None}))
    write_results(results, old / "suite.json")
    (new / "kernels.json").unlink()
    results = read_results(new / "suite.json")
    results["sessions"][-1]["date"] = "2026-01-05T00:00:00+00:00"
    write_results(results, new / "suite.json")
    text = ladder.markdown(ladder.Recorded(new))
    assert "2026-01-02: copy" in text.split("Ceilings")[1]
    assert line_with(text, "V3, medium").endswith("| 2026-01-02 |")
    for run in results["runs"]:
        run["environment"]["device"] = "another toy"
    write_results(results, new / "suite.json")
    other = ladder.markdown(ladder.Recorded(new))
    assert "Ceilings" not in other and "several GPUs" not in other
    (old / "kernels.json").rename(new / "kernels.json")
    assert "Ceilings" not in ladder.markdown(ladder.Recorded(old))


def test_ladder_marks_the_rows_of_another_run(tmp_path):
    """A step and a goal that the newer run has not measured, with a note that names the older."""
    old, new = (recorded_folder(tmp_path / f"toy_2026-01-0{day}") for day in (2, 5))
    assert "other runs" not in ladder.markdown(ladder.Recorded(new))
    results = read_results(new / "suite.json")
    results["runs"] = [run for run in results["runs"] if run["case"].model != "v2" and not run["case"].graph]
    results["runs"][0]["summary"]["step_ms"]["median"] = 90.0
    results["sessions"][-1]["date"] = "2026-01-05T00:00:00+00:00"
    write_results(results, new / "suite.json")
    text = ladder.markdown(ladder.Recorded(new))
    assert line_with(text, "V1 | eager").startswith("| V1 | eager | 90.00 (1.00x) |")
    # What runs in a graph, as versions 3 and 4 do, is left out of the newer run.
    assert line_with(text, "V3 and V4, fp32").endswith("| 5.00 (>= 5.5, missed) ¹ | 2.00 (>= 1.15) ¹ |")
    assert line_with(text, "V2 | eager").startswith("| V2 | eager | 80.00 (1.25x) ¹ |")
    assert line_with(text, "eager step / step in a graph, fp32").endswith("| V1 2.00x ¹ | V1 2.00x ¹ |")
    assert "from other runs, with their own ratios: ¹ 2026-01-02, `scripts/recorded/toy_2026-01-02`." in text
    assert "80.00 (1.25x) ¹" in ladder.version_markdown(ladder.Recorded(new), "v2")
    assert "¹" not in ladder.markdown(ladder.Recorded(old))


def test_ladder_says_how_far_the_runs_are_apart(tmp_path):
    """Version 1 takes 100 ms at small in the older run and 80 in the newer, versions 3 and 4 the same in both."""
    old, new = (recorded_folder(tmp_path / f"toy_2026-01-0{day}") for day in (2, 5))
    results = read_results(new / "suite.json")
    for run in results["runs"]:
        if run["case"].model == "v1" and run["case"].preset == "small":
            run["summary"]["step_ms"]["median"] *= 0.8
    results["sessions"][-1]["date"] = "2026-01-05T00:00:00+00:00"
    write_results(results, new / "suite.json")
    told = line_with(ladder.markdown(ladder.Recorded(new)), "V3 and V4, fp32")
    assert told.endswith("| 4.00 (>= 5.5, missed); 4.00 to 5.00 in 2 runs | 2.00 (>= 1.15) |")
    told = line_with(ladder.markdown(ladder.Recorded(old)), "V3 and V4, fp32")
    assert told.endswith("| 5.00 (>= 5.5, missed); 4.00 to 5.00 in 2 runs | 2.00 (>= 1.15) |")


def test_ladder_names_the_commit_that_the_suite_was_told(tmp_path):
    results = hand_made()
    for run in results["runs"]:
        run["environment"] = ENVIRONMENT | {"commit": None}
    results["sessions"][0]["arguments"] = {"commit": "fedcba9876543210"}
    write_results(results, tmp_path / "suite.json")
    assert "commit fedcba9876." in ladder.markdown(ladder.Recorded(tmp_path))
    results["sessions"][0]["arguments"] = {"commit": None}
    write_results(results, tmp_path / "suite.json")
    assert ", commit " not in ladder.markdown(ladder.Recorded(tmp_path))


def test_ladder_says_when_version_1_depends_on_the_host(tmp_path):
    folder = recorded_folder(tmp_path / "toy_2026-01-02")
    assert "by host" not in ladder.markdown(ladder.Recorded(folder))
    results = read_results(folder / "suite.json")
    results["runs"].append(run_of(Case("v1", "small", 8, 128, "float32", False), 1, 70.0))
    write_results(results, folder / "suite.json")
    assert " V1 took 70.0 to 100.0 ms (small), by host: " in ladder.markdown(ladder.Recorded(folder))


def test_a_yardstick_is_for_the_ratios_of_its_round_alone():
    runs = [run_of(FIRST, 0, 100.0), run_of(FIRST, 1, 60.0) | {"yardstick": True}, run_of(THIRD, 1, 2.0)]
    first, third = rows(results_of(runs))
    assert (first["step_ms"], first["speed"], first["repeats"]) == (100.0, 1.0, 1)
    assert third["speed"] == 30.0


def test_ladder_without_kernels_has_no_floor(tmp_path):
    folder = recorded_folder(tmp_path / "toy_2026-01-02")
    assert "share of the floor" in ladder.markdown(ladder.Recorded(folder))
    (folder / "kernels.json").unlink()
    assert "share of the floor" not in ladder.markdown(ladder.Recorded(folder))


def test_a_version_page_has_the_runs_of_that_version(tmp_path):
    recorded = ladder.Recorded(recorded_folder(tmp_path / "toy_2026-01-02"))
    text = ladder.version_markdown(recorded, "v3")
    assert "| RoPE forward, 1 x 2 |" in text and "Ceilings" not in ladder.version_markdown(recorded, "v4")
    rows = [line for line in text.splitlines() if "| V3 |" in line]
    assert len(rows) == 6 and "V4" not in text.split("All runs")[1]
    assert rows[0] == "| small, fp32 | V3 | graph | 10.00 (10.00x) |  | 800 | 450 | 1.0% |"
    assert "no row of this version" in ladder.version_markdown(recorded, "v9")


def test_ladder_check_is_green_after_write_and_red_after_a_change(tmp_path, capsys):
    folder, readme = recorded_folder(tmp_path / "toy_2026-01-02"), tmp_path / "README.md"
    readme.write_text(f"# Title\n\n{ladder.BEGIN}\nold\n{ladder.END}\n\nmore\n")
    options = ["--recorded", str(folder), "--readme", str(readme)]
    assert ladder.main([*options, "--check"]) == 1
    assert ladder.main([*options, "--write"]) == 0
    assert ladder.main([*options, "--check"]) == 0
    text = readme.read_text()
    assert text.startswith(f"# Title\n\n{ladder.BEGIN}\n") and text.endswith(f"\n{ladder.END}\n\nmore\n")
    assert ladder.main([*options, "--write"]) == 0 and readme.read_text() == text
    capsys.readouterr()
    readme.write_text(text.replace("10.00 (10.00x)", "9.00 (11.11x)"))
    assert ladder.main([*options, "--check"]) == 1
    shown = capsys.readouterr()
    assert "-| V3 | graph | 9.00 (11.11x)" in shown.out and "disagrees with the recorded run" in shown.err


def test_ladder_picture_and_errors(tmp_path, capsys):
    folder = recorded_folder(tmp_path / "toy_2026-01-02")
    assert ladder.main(["--recorded", str(folder), "--picture", str(tmp_path / "ladder.png")]) == 0
    assert (tmp_path / "ladder.png").read_bytes().startswith(b"\x89PNG")
    (tmp_path / "README.md").write_text("no markers\n")
    for options, sentence in (
        (["--recorded", str(tmp_path / "nothing")], "cannot be read"),
        (["--recorded", str(folder), "--readme", str(tmp_path / "README.md"), "--check"], "needs one line"),
    ):
        assert ladder.main(options) == 2
        shown = capsys.readouterr()
        assert sentence in shown.err and len(shown.err.splitlines()) == 1


def test_the_newest_recorded_run_is_the_default(tmp_path, monkeypatch):
    monkeypatch.setattr(ladder, "RECORDED", tmp_path)
    with pytest.raises(ValueError, match="no recorded run"):
        ladder.newest_folder()
    for name, month, case in (("b_old", 1, FIRST), ("a_new", 2, FIRST), ("c_newest", 3, THIRD)):
        (tmp_path / name).mkdir()
        results = results_of([run_of(case, 0, 10.0)]) | {"sessions": [{"date": f"2026-0{month}-01"}]}
        write_results(results, tmp_path / name / "suite.json")
    # The newest has nothing that its figures could be compared to.
    assert ladder.newest_folder() == tmp_path / "a_new"


def test_the_readme_says_what_was_recorded():
    if not list(ladder.RECORDED.glob("*/suite.json")):
        pytest.skip("nothing is recorded yet")
    assert ladder.main(["--check"]) == 0
