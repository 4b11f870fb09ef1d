"""benchmark_suite.py on stubs and on real scripts, the runner of training scripts, and the peers."""

import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time
import types
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

import benchmark_suite
from common.command_line import Failure
from common.machine import description
from common.measuring import peers, runs, suite_results
from common.measuring.suite_results import Case, read_results, rows, write_results
from common.versions import (
    REPOSITORY,
    SCRIPTS,
    batch_gradients,
    load_file,
    load_version,
    loss_and_gradients,
    prepare,
    relative_error,
)
from in_process import refused
from processes import run_file, run_fork, run_process_forked

STUBS = pathlib.Path(__file__).parents[1] / "stubs"
TOY = "--hidden-dim 32 --num-layers 1 --num-heads 2 --vocab-size 64".split()
SUMMARY = {
    "parameters": 1000, "parameters_trained": 1000, "step_ms": {"median": 40.0, "p25": 39.0, "p75": 42.0},
    "forward_ms": 10.0, "backward_ms": 20.0, "optimizer_ms": None, "peak_memory_mb": 100.0,
    "first_loss": 7.0, "final_loss": 6.0, "flops_per_step": 2e9, "warmup_s": 1.0,
    "graph": {"captured": False, "reason": "no --graph"},
}  # fmt: skip


# ---------------------------------------------------------------- the runner


def script(folder, text):
    path = folder / "script.py"
    path.write_text(f"import json, os, pathlib, subprocess, sys, time\nmetrics = pathlib.Path(sys.argv[-1])\n{text}\n")
    return path


@pytest.mark.parametrize(
    ("text", "kind", "status", "said"),
    [
        ("raise ValueError('no such thing')", Failure, 1, "script.py failed: ValueError: no such thing"),
        ("print('x.py: error: no bf16', file=sys.stderr); sys.exit(2)", Failure, 2, "script.py failed: no bf16"),
        ("print('x.py: out of memory: lower it', file=sys.stderr); sys.exit(1)", runs.OutOfMemory, 1, "out of memory"),
        ("os.kill(os.getpid(), 9)", runs.OutOfMemory, 1, "script.py: out of memory"),
        ("sys.exit(3)", Failure, 1, "script.py failed: it printed nothing"),
    ],
)
def test_how_a_script_failed_is_said(text, kind, status, said, tmp_path):
    with pytest.raises(Failure, match=said) as caught:
        runs.train(script(tmp_path, text), [])
    assert type(caught.value) is kind and caught.value.status == status


@pytest.mark.parametrize(
    ("processes", "tell", "launcher"),
    [
        (1, None, []),
        (1, print, ["-u"]),
        (3, None, ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]),
        (3, print, ["-u", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]),
    ],
)
def test_a_script_and_torchrun_receive_their_options(processes, tell, launcher, monkeypatch, tmp_path):
    started = mock.Mock(return_value=mock.Mock(returncode=0))
    monkeypatch.setattr(runs, "run_process", started)
    kept = tmp_path / "kept.json"
    kept.write_text('{"steps": []}')
    found = runs.train("script.py", ["--lr", "3"], processes, 60, {"A": "1"}, tell, keep=kept)
    command = [sys.executable, *launcher, "script.py", "--lr", "3", "--metrics-file", str(kept)]
    started.assert_called_once_with(command, 60, env={"A": "1"}, tell=tell)
    assert found == {"steps": []}


def test_of_several_processes_the_first_that_has_a_reason_tells_it():
    report = "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n=====\nRoot Cause: rank 0\n====="
    refused = "tiny_llama_v3.py: error: --hidden-dim must be positive"
    assert runs.last_words(f"W1122 warning\n{refused}\n{report}") == refused.partition("error: ")[2]
    died = "[rank1]: Traceback:\n[rank1]: RuntimeError: out of luck\ntiny_llama_v1.py, process 0 of 2: another ended"
    assert runs.last_words(f"{died}\n{report}") == "RuntimeError: out of luck"
    assert runs.last_words(report) == "====="
    assert runs.last_words("Traceback:\nValueError: no\n") == "ValueError: no"


def test_time_for_further_runs_has_a_reserve(monkeypatch):
    """Of a quarter of their mean, and enough for the longest so far."""
    monkeypatch.setattr("time.monotonic", lambda: 0.0)
    limit = runs.TimeLimit(100)
    assert limit.room(1000)  # nothing is known yet, and one must run
    limit.took = [8.0, 12.0]
    assert limit.room(8) and not limit.reached
    assert not limit.room(9) and limit.reached
    limit.took = [1.0, 101.0, 1.0, 1.0, 1.0]
    assert not limit.room(1)


# ---------------------------------------------------------------- the suite on stubs of the training scripts


@pytest.fixture
def stubs(tmp_path, monkeypatch):
    """Return a folder of scripts v1 to v4 that the suite runs in place of the real ones; its log says what was run."""
    folder = tmp_path / "stub scripts"
    folder.mkdir()
    for name in ("v1", "v2", "v3", "v4"):
        shutil.copy(STUBS / "training_script.py", folder / f"{name}.py")
        monkeypatch.setitem(suite_results.SCRIPT_OF, name, folder / f"{name}.py")
    (folder / "metrics.json").write_text(json.dumps({"summary": SUMMARY, "steps": [{"step_ms": 40.0}] * 3}))
    monkeypatch.setattr(benchmark_suite, "on_cpu", lambda argv: False)  # the same defaults on every machine
    return folder


def suite(folder, options, *more):
    words = ["--results", str(folder / "results"), "--metrics", "throughput", *options.split(), *more]
    try:
        return benchmark_suite.main(words)
    except SystemExit as end:
        return end.code


def log_of(folder):
    return [line.split() for line in (folder / "log").read_text().splitlines()]


def results_in(folder):
    return read_results(folder / "results" / "suite.json")


def test_cases_run_in_turns_and_say_what_is_left(stubs, capsys):
    assert suite(stubs, "--models v1,v3 --precisions float32,tf32 --presets small,tiny --repeats 2 --graph off") == 0
    ran = [(line[line.index("--preset") + 1], line[0], "--tf32" in line) for line in log_of(stubs)]
    one = [("small", "v1", False), ("small", "v3", False), ("small", "v1", True), ("small", "v3", True)]
    assert ran == 2 * [*one, *(("tiny", *rest) for _, *rest in one)]
    assert [run["repeat"] for run in results_in(stubs)["runs"]] == [0] * 8 + [1] * 8
    said = capsys.readouterr().err
    assert "[16/16] tiny b8 t128 tf32 v3 eager, repeat 2: 40.00 ms" in said and "s left)" in said


def test_presets_are_spread_over_gpus(stubs, monkeypatch, capsys):
    """Two GPUs: each preset on one of them, its cases in turns. One GPU: refused."""
    options = "--models v1,v3 --presets small,tiny --repeats 2 --graph off --spread"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4")
    assert suite(stubs, options) == 2 and "--spread needs a GPU for each of 2 presets" in capsys.readouterr().err
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    script = (stubs / "v1.py").read_text().replace("import pathlib", "import os, pathlib")
    script = script.replace("file=log", '"gpu" + os.environ["CUDA_VISIBLE_DEVICES"], file=log')
    for name in ("v1", "v3"):
        (stubs / f"{name}.py").write_text(script)
    assert suite(stubs, options) == 0
    for preset, gpu in (("small", "gpu4"), ("tiny", "gpu5")):
        assert [line[0] for line in log_of(stubs) if preset in line and gpu in line] == ["v1", "v3"] * 2
    assert len(results_in(stubs)["runs"]) == len(log_of(stubs)) == 8


def test_a_run_records_once_what_ran_where(stubs):
    assert suite(stubs, "--models v1 --repeats 2 --num-steps 7") == 0
    content = json.loads((stubs / "results" / "suite.json").read_text())
    record = content["record"]
    assert torch.__version__.startswith(record["packages"]["torch"])
    assert {"transformers", "torchao"} < record["packages"].keys()
    assert "--num-steps 7" in record["command"] and record["commit"] == description.git("rev-parse", "HEAD")
    assert content["runs"][0]["steps_ms"] == [40.0] * 3 and "environment" not in content["runs"][0]
    assert content["runs"][0]["script_sha256"] == description.hash_of(stubs / "v1.py")


def test_failing_and_refused_cases_are_reported_and_survived(stubs, capsys):
    assert suite(stubs, "--models v2,v3,v1 --precisions float32,bfloat16 --repeats 2") == 1
    shown = capsys.readouterr()
    assert "no case of v2 ran" in shown.err and "case of v3" not in shown.err
    assert "float32 v2 eager: failed: v2.py failed: RuntimeError: no such kernel" in shown.out
    assert "bfloat16 v3 graph: not available: v3.py failed: no bfloat16 here" in shown.out
    statuses = {(r["case"].model, r["case"].precision): r["status"] for r in results_in(stubs)["runs"]}
    assert list(statuses.values()) == ["failed", "ok", "ok", "failed", "not available", "ok"]
    # what a machine cannot run is asked once, what failed is tried in each round
    names = [line[0] for line in log_of(stubs)]
    assert (names.count("v1"), names.count("v2"), names.count("v3")) == (4, 4, 3)
    assert re.search(r"\nV1 +fp32 +eager +40.00 ", shown.out)


def test_a_model_whose_cases_failed_or_could_not_run_has_failed(stubs, capsys):
    """Version 3's stub cannot run bfloat16; this one fails in float32."""
    text = (stubs / "v3.py").read_text()
    (stubs / "v3.py").write_text(f'import sys\nif "--use-amp" not in sys.argv:\n    sys.exit("no kernel")\n{text}')
    assert suite(stubs, "--models v3 --precisions float32,bfloat16 --repeats 1") == 1
    assert "no case of v3 ran" in capsys.readouterr().err
    assert [run["status"] for run in results_in(stubs)["runs"]] == ["failed", "not available"]


def test_without_a_gpu_the_default_is_a_toy(stubs, monkeypatch, capsys):
    monkeypatch.setattr(benchmark_suite, "on_cpu", lambda argv: True)
    assert suite(stubs, "--models v1,v3 --repeats 1") == 0
    assert "--batch-size 2 --seq-len 32 --hidden-dim 64" in " ".join(log_of(stubs)[0])
    shown = capsys.readouterr()
    assert "a toy model is measured" in shown.err
    assert ("its times mean nothing" in shown.out) == (not torch.cuda.is_available())


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ("--models v1,v3 --graph on,off", ["v1 --graph", "v1 --no-graph", "v3 --graph", "v3 --no-graph"]),
        ("--models v1,v3 --precisions fp8", ["v3 --graph"]),  # and the stub refuses 16 bits
        ("--models v1:tf32,v3 --precisions tf32,float32", ["v1 --no-graph", "v3 --graph", "v3 --graph"]),
        ("--models v3+nodet --compile-first 2", ["v3 --graph"] * 2),
        ("--models v1 --compile-first 2", ["v1 --no-graph"]),  # which compiles nothing
    ],
)
def test_what_a_grid_runs(options, wanted, stubs):
    assert suite(stubs, f"{options} --repeats 1") == 0
    ran = [f"{line[0]} {'--graph' if '--graph' in line else '--no-graph'}" for line in log_of(stubs)]
    assert ran == wanted


def test_compiling_first_has_half_of_the_time(tmp_path, monkeypatch):
    """The clock stands still: of 100 s a process that compiles may take 50, and one that is measured 100."""
    monkeypatch.setattr("time.monotonic", lambda: 0.0)
    bounds = []

    def run_case(case, arguments, limit, steps):
        bounds.append(limit.bound(benchmark_suite.TIMEOUT))
        return {"case": case, "reason": None}

    monkeypatch.setattr(benchmark_suite, "run_case", run_case)
    for limit in (["--time-limit", "100"], []):
        words = ["--models", "v1,v3", "--presets", "tiny", "--compile-first", "1", "--results", str(tmp_path), *limit]
        arguments = benchmark_suite.parse_arguments(words)
        benchmark_suite.compile_first(benchmark_suite.grid(arguments), arguments)
    assert bounds == [50, benchmark_suite.TIMEOUT]


def test_compiling_first_is_a_part_of_the_time_limit(tmp_path, monkeypatch):
    """Of 100 s compiling takes 40: the first process that is measured may take the other 60."""
    now = [0.0]
    bounds = []
    monkeypatch.setattr(runs.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(benchmark_suite, "compile_first", lambda cases, arguments: now.__setitem__(0, 40.0))

    def run_case(case, arguments, limit):
        bounds.append(limit.bound(benchmark_suite.TIMEOUT))
        return {"case": case, "status": "failed", "reason": "a stub"}

    monkeypatch.setattr(benchmark_suite, "run_case", run_case)
    options = "--models v3 --presets tiny --repeats 1 --compile-first 1 --time-limit 100 --metrics throughput --results"
    arguments = benchmark_suite.parse_arguments([*options.split(), str(tmp_path)])
    record = {"host": "here", "commit": "this"}
    results = {"record": record, "runs": [], "accuracy": []}
    assert benchmark_suite.measure(benchmark_suite.grid(arguments), arguments, results, record) == 0
    assert bounds == [60]


def test_comparing_gradients_ends_at_the_time_limit(stubs, monkeypatch, capsys):
    """The clock stands still: of 100 s all are left."""
    bounds = []

    def run_process(command, timeout=None, **options):
        if benchmark_suite.CHECK_GRADIENTS not in command:
            return runs.run_process(command, timeout, **options)
        bounds.append(timeout)
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(runs.time, "monotonic", lambda: 0.0)
    monkeypatch.setattr(benchmark_suite, "run_process", run_process)
    assert suite(stubs, "--models v1 --repeats 1 --metrics accuracy --time-limit 100") == 1
    assert bounds == [100] and "gradients of small took longer than 100 s" in capsys.readouterr().err


def test_options_reach_the_scripts(stubs):
    options = "--models v1+nodet --batch-sizes 3 --seq-lengths 16 --precisions float16 --num-steps 7 --repeats 1"
    assert suite(stubs, options, "--hidden-dim", "64") == 0
    line = " ".join(log_of(stubs)[0])
    wanted = ["--batch-size 3 --seq-len 16 --use-amp --amp-dtype float16", "--no-deterministic", "--num-steps 7"]
    assert all(words in line for words in [*wanted, "--hidden-dim 64"])
    assert results_in(stubs)["runs"][0]["case"].options == "--hidden-dim 64"


def test_append_runs_what_is_missing_and_tries_again_what_failed(stubs, capsys):
    assert suite(stubs, "--models v1,v3 --precisions float32,bfloat16 --repeats 1") == 0
    assert suite(stubs, "--models v1,v3 --precisions float32,bfloat16 --repeats 1 --append") == 0
    assert suite(stubs, "--models v1 --repeats 2 --append") == 0
    assert [line[0] for line in log_of(stubs)] == ["v1", "v3", "v1", "v3", "v3", "v1"]
    assert suite(stubs, "--models v1") == 2
    assert "already has results: add --append" in capsys.readouterr().err


@pytest.mark.parametrize("change", ["device", "driver", "packages", "script"])
def test_runs_of_another_device_or_text_are_not_mixed(change, stubs, capsys, monkeypatch):
    assert suite(stubs, "--models v1 --repeats 1") == 0
    if change == "script":
        with open(stubs / "v1.py", "a") as file:
            file.write("# tuned\n")
    else:
        record = description.describe([]) | {change: "another"}
        monkeypatch.setattr(benchmark_suite, "describe", lambda command: record)
    capsys.readouterr()
    assert suite(stubs, "--models v1 --repeats 2 --append") == 2
    said = capsys.readouterr().err
    assert ("another text of v1.py" if change == "script" else f"is of {change} ") in said and said.count("\n") == 1
    assert len(results_in(stubs)["runs"]) == 1


def test_another_machine_measures_broken_rounds_again(stubs, monkeypatch):
    options = "--models v1,v3 --precisions float32,bfloat16 --repeats 2"  # the stub of V3 refuses 16 bits
    assert suite(stubs, options) == 0
    results = results_in(stubs)
    results["runs"] = [run for run in results["runs"] if (run["case"].model, run["repeat"]) != ("v3", 1)]
    write_results(results, stubs / "results" / "suite.json")  # of the second round V3 is missing
    (stubs / "log").unlink()
    record = description.describe([]) | {"host": "another"}
    monkeypatch.setattr(benchmark_suite, "describe", lambda command: record)
    assert suite(stubs, f"{options} --append --compile-first 2") == 0
    ran = [run for run in results_in(stubs)["runs"] if run["status"] == "ok"]
    assert [run["host"] == "another" for run in ran] == [run["repeat"] == 1 for run in ran] and len(ran) == 6
    # V3 compiles here first, its 16 bits are tried once more, and the second round is measured.
    assert [line[0] for line in log_of(stubs)] == ["v3", "v3", "v3", "v1", "v3", "v1"]


def test_the_time_limit_leaves_out_what_would_not_end(stubs, capsys, monkeypatch):
    monkeypatch.setattr(runs.TimeLimit, "room", lambda self: not self.took)
    assert suite(stubs, "--models v1,v3 --repeats 1 --time-limit 600") == 1
    assert "1 processes or comparisons are left: repeat the command with --append" in capsys.readouterr().out


def test_a_process_that_hangs_is_ended_at_the_limit(stubs, capsys):
    assert suite(stubs, "--models v4 --repeats 1 --time-limit 1") == 1
    assert re.search(r"v4.py ran longer than (1|0|0\.\d+) s", capsys.readouterr().out)  # what was left of the limit


def test_an_interrupted_suite_keeps_its_rows_and_ends_what_runs(stubs):
    """A process of its own, as `timeout` ends it; its second training script hangs."""
    program = f"""if True:
        import pathlib, sys, benchmark_suite
        paths = {{v: pathlib.Path({str(stubs)!r}, f"{{v}}.py") for v in ("v1", "v4")}}
        benchmark_suite.SCRIPT_OF.update(paths)
        benchmark_suite.on_cpu = lambda argv: False
        sys.exit(benchmark_suite.main())
    """
    options = ["--models", "v1,v4", "--repeats", "1", "--results", str(stubs / "results")]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY / "scripts")}
    command = [sys.executable, "-c", program, *options]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        while process.poll() is None and not ((stubs / "log").exists() and "v4 " in (stubs / "log").read_text()):
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        said = process.communicate(timeout=60)[0]
    assert process.returncode == 130 and "1 processes or comparisons are left" in said
    assert [run["case"].model for run in results_in(stubs)["runs"]] == ["v1"]
    commands = [path.read_bytes() for path in pathlib.Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    assert not [words for words in commands if str(stubs / "v4.py").encode() in words]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ("--models v7", "v7 isn't one of v1, v2"),
        ("--models v2+foo", "v2+foo isn't one of v1, v2, v3, v4, hf, liger, with +compile, +nodet, +fsdp"),
        ("--models v1:fp7", "fp7 isn't one of float32"),
        ("--presets huge", "choose from tiny, small, medium"),
        ("--precisions int8", "choose from float32, tf32"),
        ("--batch-sizes 0", "--batch-sizes"),
        ("--hiden-dim 3", "unrecognized arguments: --hiden-dim 3"),
        ("--nproc 0", "--nproc"),
        ("--models v1 --data=/home/me/text", "--data=/home/me/text: a record names no folder of this machine"),
        # a row called float32 trained in bfloat16, and one called small was medium
        ("--models v1 --use-amp", "the tables name: use --precisions"),
        ("--models v1 --preset=medium", "the tables name: use --presets"),
        ("--models v1 --batch-size 9", "the tables name: use --batch-sizes"),
    ],
)
def test_bad_options_are_answered_in_a_sentence(options, sentence, tmp_path, capsys):
    refused(lambda words: suite(tmp_path, options), [], capsys, sentence)
    assert not (tmp_path / "results").exists()


def test_fsdp_needs_several_processes_and_peers_run_with_the_processes_they_can(tmp_path):
    words = "--models v3+nodet+fsdp,hf+compile+packed --presets tiny --precisions bfloat16,fp8 --nproc 1,2,4 --results"
    cases = benchmark_suite.grid(benchmark_suite.parse_arguments([*words.split(), str(tmp_path)]))
    wanted = [("v3+nodet+fsdp", 2), ("v3+nodet+fsdp", 4), *(("hf+compile+packed", count) for count in (1, 2, 4))]
    assert [(case.model, case.processes) for case in cases] == 2 * wanted and all(case.graph for case in cases)
    sharded, peer = (" ".join(benchmark_suite.training_options(cases[place])) for place in (0, -1))
    assert sharded.endswith("--amp-dtype bfloat16 --no-deterministic --parallel fsdp")
    start, end = peer.split(" --library transformers ")
    assert start.endswith("--use-amp --amp-dtype bfloat16 --fp8")
    assert end == "--enable-torch-compile --packed --master-weights --compile-optimizer"


# ---------------------------------------------------------------- accuracy, and the real scripts


def test_a_missing_gradient_is_infinitely_wrong(monkeypatch, capsys):
    ones = {"a": torch.ones(2), "b": torch.ones(2)}
    gradients = {1: (2.0, ones), 2: (1.0, {"a": ones["a"]})}
    monkeypatch.setattr(benchmark_suite, "loss_and_gradients", lambda version, options, **more: gradients[version])
    benchmark_suite.check_gradients([[2, []]])
    found = json.loads(capsys.readouterr().out)
    assert found == {"loss_error": 0.5, "gradient_error": float("inf"), "worst_gradient": "b"}


def test_gradients_that_cannot_be_compared_are_named(tmp_path, monkeypatch, capsys):
    """The process dies at the second of two cases."""
    line = '{"loss_error": 0.0, "gradient_error": 0.0, "worst_gradient": "w"}\n'
    died = subprocess.CompletedProcess([], 1, line, "Traceback\nRuntimeError: lost")
    monkeypatch.setattr(benchmark_suite, "run_process", lambda *arguments, **options: died)
    arguments = benchmark_suite.parse_arguments(["--results", str(tmp_path)])
    cases = [Case(model, "tiny", 8, 128, "float32", graph) for model in ("v1", "v2", "hf") for graph in (False, True)]
    results = {"record": {}, "runs": [{"case": case, "status": "ok"} for case in cases], "accuracy": []}
    (chosen,) = benchmark_suite.gradients_left(cases, results)
    assert benchmark_suite.measure_accuracy(chosen, arguments, results, runs.TimeLimit(None)) == 1
    assert [entry["case"].model for entry in results["accuracy"]] == ["v1"]
    assert benchmark_suite.gradients_left(cases, results) == [chosen[1:]]
    assert "v2 graph and what follows: gradients not compared: RuntimeError: lost" in capsys.readouterr().err


@pytest.fixture
def real_suite(tmp_path, monkeypatch):
    """real_suite(path, options) runs the suite in a folder; its training scripts are forked."""

    def run(path, options):
        words = ["--repeats", "1", "--num-steps", "3", "--batch-sizes", "2", "--presets", "tiny", "--seq-lengths", "16"]
        words += ["--device", "cpu", "--results", "my runs", *TOY]
        done = run_file(path, *options.split(), *words, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        return done.stdout, read_results(tmp_path / "my runs" / "suite.json")

    monkeypatch.setattr(runs, "run_process", run_process_forked)
    return run


@pytest.mark.slow
def test_suite_on_real_scripts(real_suite):
    """Through a version folder's command, in a folder with a space."""
    printed, results = real_suite(SCRIPTS[2].parent / "benchmark_suite.py", "--models v1,v2")
    first, second = rows(results)
    assert (first["model"], second["model"]) == ("v1", "v2")
    assert first["gradient_error"] == 0 and 0 < second["gradient_error"] < 1e-4
    assert "gradient error" in printed


@pytest.mark.slow
@pytest.mark.skipif(torch.__version__ < (2, 9), reason="this PyTorch's FSDP2 is wrong on a CPU")
def test_suite_on_two_processes(real_suite):
    _, results = real_suite(REPOSITORY / "scripts" / "benchmark_suite.py", "--models v1,v1+fsdp --nproc 1,2")
    alone, *together = found = rows(results)
    assert [(row["model"], row["processes"]) for row in found] == [("v1", 1), ("v1", 2), ("v1+fsdp", 2)]
    flops = [run["summary"]["flops_per_step"] for run in results["runs"]]
    assert flops == [flops[0], 2 * flops[0], 2 * flops[0]]
    for row in together:
        assert row["parameters_trained"] == row["parameters"] == alone["parameters"]
        assert row["gradient_error"] is None
        # of one round, whose steps are kept to 0.0001 ms
        assert row["efficiency"].ratio == pytest.approx(alone["step_ms"] / row["step_ms"], rel=1e-3)


# ---------------------------------------------------------------- peers, with the library itself


def traced(model, tokens, labels):
    """Return the loss that torch.compile's one graph computes, and the options of its calls of SDPA."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    loss = torch.compile(model, backend=backend, fullgraph=True)(tokens, labels)
    (graph,) = graphs
    calls = [node for node in graph.graph.nodes if node.target is F.scaled_dot_product_attention]
    return loss, [node.kwargs for node in calls]


@pytest.mark.parametrize("precision", [[], ["--use-amp"]], ids=["float32", "bfloat16"])
@pytest.mark.slow
def test_the_peer_s_compiled_attention_is_causal_and_has_no_mask(precision):
    """The traced graph decides which kernel runs; the library left alone gives it a mask tensor."""
    pytest.importorskip("transformers")
    script = peers.peer_script()
    sizes = ["--batch-size", "2", "--seq-len", "16", "--device", "cpu"]
    config = script.parse_options([*sizes, *TOY, "--num-layers", "2", *precision])
    trainer = script.Trainer(config)
    tokens, labels = (part.contiguous() for part in script.batch(script.load_data(config), 0, config))

    def model(tokens, labels):
        return script.compute_loss(trainer.model, tokens, labels, config)

    loss, calls = traced(model, tokens, labels)
    assert len(calls) == 2
    for options in calls:
        assert options["is_causal"] is True and options["attn_mask"] is None
        assert options["enable_gqa"] is bool(precision)  # in float32 the fused kernels lack it
    trainer.model.llama.set_attn_implementation("sdpa")  # as the library would run it
    plain, masked = traced(model, tokens, labels)
    assert all(options["attn_mask"] is not None for options in masked)  # so the check above can fail
    assert loss.item() == pytest.approx(plain.item(), rel=2e-3 if precision else 1e-6)


RAGGED = "--hidden-dim 96 --num-layers 2 --num-heads 3 --num-kv-heads 1 --intermediate-dim 71 --vocab-size 51".split()
RAGGED += "--seq-len 19 --batch-size 2 --device cpu".split()
MASTERS = ["--use-amp", "--master-weights"]


def batch_of(script, data, step, options):
    return [part.contiguous() for part in script.batch(data, step, options)]  # as Trainer.run copies it


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--packed"],
        ["--use-amp"],
        MASTERS,
        [*MASTERS, "--packed"],
        [*MASTERS, "--packed", "--attention-backend", "math"],
    ],
    ids=" ".join,
)
def test_the_peer_s_gradients_are_float32_s(options):
    """In 16 bits they are as near to version 1's in float32 as version 1's under autocast are."""
    pytest.importorskip("transformers")
    loss, wanted = loss_and_gradients(1, RAGGED)
    script = peers.peer_script()
    trainer, data = prepare(script, [*RAGGED, *options])
    found_loss, found = batch_gradients(script, trainer, *batch_of(script, data, 0, trainer.options))
    assert found.keys() == wanted.keys()
    allowed = 1e-5
    if "--use-amp" in options:
        _, rounded = loss_and_gradients(1, [*RAGGED, "--use-amp"])
        allowed = 1.25 * max(relative_error(rounded[name], wanted[name]) for name in wanted)
    assert max(relative_error(found[name], wanted[name]) for name in wanted) < allowed
    assert found_loss == pytest.approx(loss, rel=allowed)


@pytest.mark.slow
def test_the_peer_s_masters_are_updated_as_version_3_updates_its_weights(device):
    """The peer is on the CPU; version 3's kernel is on the GPU, if there is one."""
    pytest.importorskip("transformers")
    script = peers.peer_script()
    trainer, data = prepare(script, [*RAGGED, *MASTERS, "--packed", "--learning-rate", "1e-2"])
    version_3 = load_version(3)
    ours = {name: torch.nn.Parameter(w.to(device, copy=True)) for name, w in trainer.initial["tensors"].items()}
    optimizer = version_3.FusedAdamW(ours.values(), lr=1e-2, matrix_dtype=torch.bfloat16)
    for step in range(3):
        trainer.run(*script.batch(data, step, trainer.options))
        for name, theirs in trainer.model.named_parameters():
            ours[name].grad = theirs.grad.to(ours[name])
        optimizer.step()
    for name, theirs in trainer.model.named_parameters():
        master = script.get_weight(theirs, trainer.optimizer.state[theirs])
        wanted = version_3.get_weight(ours[name], optimizer.state[ours[name]]).cpu()
        torch.testing.assert_close(master, wanted, rtol=1e-5, atol=1e-7)
        assert torch.equal(theirs, master.bfloat16())  # norms too


@pytest.mark.parametrize(
    ("options", "flash", "autocast"),
    [(["--use-amp"], True, True), (MASTERS, True, False), ([*MASTERS, "--attention-backend", "math"], False, False)],
)
def test_the_peer_s_backend_and_dtypes_are_those_of_its_options(options, flash, autocast):
    pytest.importorskip("transformers")

    def model(tokens, labels):
        return torch.backends.cuda.flash_sdp_enabled(), torch.is_autocast_enabled("cpu")

    parsed = peers.peer_script().parse_options([*RAGGED, *options])
    assert peers.compute_loss(model, torch.zeros(1), None, parsed) == (flash, autocast)


@pytest.mark.parametrize("parallel", [[], ["--compile-blocks"]], ids=["whole", "layer by layer"])
def test_what_of_the_peer_is_compiled(parallel, monkeypatch):
    stub = load_file(STUBS / "library" / "transformers" / "__init__.py", "transformers_stub")
    monkeypatch.setitem(sys.modules, "transformers", stub)
    compiled = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda module, mode: compiled.append((type(module).__name__, mode)))
    script = peers.peer_script()
    mode = "max-autotune-no-cudagraphs"
    options = script.parse_options([*RAGGED, "--enable-torch-compile", "--compile-mode", mode, *parallel])
    peers.LibraryLlama(options)
    assert compiled == ([("Layer", mode)] * 2 if parallel else [("LibraryLlama", mode)])


# ---------------------------------------------------------------- peers, with a stub of the library


def test_liger_s_loss_is_the_library_s_and_reads_nothing_back(monkeypatch):
    """A graph cannot be captured while a value is read back; of a tensor on meta none can be."""

    budgets = []

    def fused_linear_cross_entropy_forward(x, w, labels, accum_dtype, chunk_mem_const=1):
        budgets.append(chunk_mem_const)
        count = (labels != -100).sum().to("meta").item()
        with torch.enable_grad():
            x, w = (tensor.detach().requires_grad_() for tensor in (x, w))
            loss = F.cross_entropy(x @ w.t(), labels, reduction="sum") / count
        return loss.detach(), None, *torch.autograd.grad(loss, (x, w)), None

    names = "liger_kernel", "liger_kernel.ops", "liger_kernel.ops.fused_linear_cross_entropy"
    for name in names:
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules[names[-1]].fused_linear_cross_entropy_forward = fused_linear_cross_entropy_forward
    stub = load_file(STUBS / "library" / "transformers" / "__init__.py", "transformers_stub")
    monkeypatch.setitem(sys.modules, "transformers", stub)
    script = peers.peer_script()
    sizes = ["--batch-size", "2", "--seq-len", "16", *TOY, "--vocab-size", "80"]
    config = script.parse_options(["--device", "cpu", *sizes])
    tokens, labels = (part.contiguous() for part in script.batch(script.load_data(config), 0, config))
    found = []
    # 32 rows in one chunk: its logits, 80 wide, are at most 3 times as large as x, 32 wide. In two chunks: twice.
    for config.liger_loss, config.liger_chunk in ((False, None), (True, None), (True, 32), (True, 20)):
        model = script.Trainer(config).model
        loss = script.compute_loss(model, tokens, labels, config)
        loss.backward()
        found.append([loss.detach(), *(p.grad for p in model.parameters())])
    for library, *others in zip(*found, strict=True):
        for ours in others:
            torch.testing.assert_close(ours, library)
    assert budgets == [1, 3, 2]


@pytest.mark.slow
def test_peers_train_the_same_model_from_the_same_weights(tmp_path):
    kept = ["--save-every", "3", "--checkpoint-dir"]
    argv = ["--batch-size", "2", "--seq-len", "16", "--num-steps", "3", *TOY, *kept]
    words = [*argv, tmp_path / "peer", "--metrics-file", tmp_path / "peer.json"]
    packages = os.environ | {"PYTHONPATH": str(STUBS / "library")}  # before all others
    done = run_fork(REPOSITORY / "scripts" / "common" / "measuring" / "peers.py", *words, env=packages)
    assert done.returncode == 0, done.stderr
    words = [*argv, str(tmp_path / "v1"), "--metrics-file", str(tmp_path / "v1.json"), "--no-deterministic"]
    assert load_version(1).main(words) == 0
    peer, first = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("peer", "v1"))
    assert [s["loss"] for s in peer["steps"]] == pytest.approx([s["loss"] for s in first["steps"]], rel=1e-5)
    found, wanted = (torch.load(tmp_path / name / "step_000000003.pt")["tensors"] for name in ("peer", "v1"))
    assert found.keys() == wanted.keys()
    assert max(relative_error(found[name], wanted[name]) for name in wanted) < 1e-4
    for key in ("parameters", "parameters_trained", "flops_per_step"):
        assert peer["summary"][key] == first["summary"][key]
    assert peer["environment"]["script_sha256"] == description.hash_of(suite_results.SCRIPT_OF["hf"])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "transformers cannot be imported (import of transformers halted; None in sys.modules): install it"),
        (["--fp8", "--use-amp"], "--fp8 needs a GPU, got cpu"),
        (["--library", "liger"], "--library liger needs a GPU, got cpu"),
        (["--liger-loss"], "--liger-loss needs a GPU, got cpu"),
        (["--liger-chunk", "64"], "--liger-chunk needs --liger-loss and at least one row, got 64"),
        (["--master-weights"], "--master-weights needs --use-amp: it sets the weights' dtype"),
        (["--compile-optimizer"], "--compile-optimizer needs --master-weights: PyTorch's fused AdamW is one kernel"),
        (["--compile-blocks"], "--compile-blocks needs --enable-torch-compile"),
        (["--attention-backend", "cudnn"], "--attention-backend cudnn cannot run this model in float32: use auto"),
    ],
)
def test_what_a_peer_cannot_do_is_one_sentence(options, said, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    refused(peers.peer_script().main, ["--device", "cpu", *options], capsys, f"peers.py: error: {said}")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--packed", "--library", "liger"], "--packed needs --library transformers"),
        (["--use-amp", "--master-weights", "--parallel", "fsdp"], "--master-weights doesn't work with --parallel fsdp"),
        (["--liger-loss", "--liger-chunk", "0"], "at least one row, got 0"),
        (["--use-amp", "--amp-dtype", "float16", "--liger-loss"], "--liger-loss needs --amp-dtype bfloat16"),
    ],
)
def test_what_a_peer_cannot_do_on_a_gpu_is_one_sentence(options, said):
    given = peers.peer_script().build_parser().parse_args(options)
    given.on_gpu = True
    with pytest.raises(ValueError, match=said):
        peers.complete_version_options(given, ValueError)
