"""maintain/record.sh: what it runs, that it goes on where it was cut off, its errors."""

import contextlib
import gzip
import json
import os
import pathlib
import re
import shlex
import subprocess
import time

import pytest

import benchmark_suite
from common.command_line import Failure
from common.measuring import runs
from common.profiles import Kernel, Profile
from common.versions import REPOSITORY
from conftest import METADATA, event
from in_process import refused
from maintain import measure_ladder, rungs, timeline, warm_up
from processes import executable

RECORD = REPOSITORY / "scripts" / "maintain" / "record.sh"
SUITE = "benchmark_suite.py"
LONG_RUNGS = "g,h,i,k,peer,peer fp8,library,library fp8"
# Answers for the number of GPUs and for provenance.py; notes every other program and where it ran.
PYTHON = """#!/bin/bash
[[ $1 != -c ]] || { echo "$GPUS"; exit 0; }
[[ $1 != *provenance.py ]] || { echo '{"command": "'"${*:2}"'"}'; exit 0; }
echo "$(basename "$PWD") $*" >>"$LOG"
[[ "$*" != *"$FAILS"* ]] || { echo "it broke" >&2; exit 1; }
"""


@pytest.fixture
def record(tmp_path):
    """Return record(argument, ...), which runs the script with the stub and returns its finished process."""
    python = executable(tmp_path / "a python", PYTHON)

    def run(*arguments, gpus=1, fails="nothing"):
        given = {"TINY_LLAMA_PYTHON": str(python), "LOG": str(tmp_path / "log"), "GPUS": str(gpus), "FAILS": fails}
        command = ["bash", RECORD, tmp_path / "re sults", *arguments]
        return subprocess.run(command, capture_output=True, text=True, env=os.environ | given)

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
    assert kept["command"] == f"a python {REPOSITORY}/scripts/benchmark_kernels.py --json kernels.json"
    (tmp_path / "log").unlink()
    second = record(*some)
    assert second.returncode == 0 and second.stdout.count(": kept") == 5 and not (tmp_path / "log").exists()


def test_what_was_cut_off_goes_on_and_a_failure_is_named(record, tmp_path):
    done = record("--only", "kernels,ablation2", fails="benchmark_kernels")
    assert done.returncode == 1
    assert "kernels: status 1" in done.stdout and "it broke" in done.stdout and "ablation2: done" in done.stdout
    assert done.stdout.endswith("not complete yet: kernels; run the same command again\n")
    assert (tmp_path / "re sults" / "kernels" / "log.txt").read_text() == "it broke\n"
    assert record("--only", "kernels").returncode == 0
    assert {path.name for path in (tmp_path / "re sults" / "kernels").iterdir()} == {"log.txt", "record.json"}
    assert [part for part, _ in ran(tmp_path)] == ["kernels", "ablation2", "kernels"]


@pytest.mark.parametrize(("limit", "bounded"), [("560", 530), ("100000", 1770)])
def test_the_headline_is_bounded(limit, bounded, record, tmp_path):
    """By its minutes or by what is left of the limit, which is counted in whole seconds."""
    start = time.monotonic()
    assert record("--only", "headline", "--time-limit", limit).returncode == 0
    given = int(re.search(r"--time-limit (\d+)", (tmp_path / "log").read_text())[1])
    passed = time.monotonic() - start if limit == "560" else 0
    assert bounded - passed - 1 <= given <= bounded


def test_what_would_not_end_in_time_is_left(record, tmp_path):
    done = record("--only", "kernels", "--time-limit", "50")
    assert done.returncode == 1 and "kernels: no time left" in done.stdout and not (tmp_path / "log").exists()


@pytest.mark.parametrize(("gpus", "counts"), [(2, "1,2"), (6, "1,2,4")])
def test_several_gpus_are_measured_where_there_are_some(gpus, counts, record, tmp_path):
    assert record("--only", "ddp", gpus=gpus).returncode == 0
    assert ran(tmp_path) == [("ddp", SUITE)]
    log = (tmp_path / "log").read_text()
    assert f"--nproc {counts} " in log and "v3,v4,v3+fsdp,hf+compile+packed,hf+compile+fsdp" in log


@pytest.mark.parametrize("toy", [[], ["--toy"]], ids=["whole", "toy"])
def test_the_suite_takes_the_options_that_it_is_given(toy, record, tmp_path, monkeypatch):
    """Every case of the headline once: versions in all precisions, version 1 with determinism and without, peers."""
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
    assert (len(headline), len(graph)) == (25 * len(presets), 10 * len(presets))
    assert len(set(headline)) == len(headline) and len(set(graph)) == len(graph)
    in_fp8 = [model for preset, model, precision, _ in headline if precision == "fp8"]
    assert in_fp8 == ["v3", "hf+compile", "hf+compile+packed"] * len(presets)


@pytest.mark.parametrize("toy", [[], ["--toy"]], ids=["whole", "toy"])
def test_the_ladder_takes_the_options_that_it_is_given(toy, record, tmp_path, monkeypatch):
    """Ways to run the peer first: from them the tuned rungs of the same preset and length take their options."""
    peers_of = {"medium": "peers", "small": "peers-small", "long": "peers-long"}
    ladders = [f"ladder-{name}" for name in ("medium", "medium-eager", "small", "small-eager", "long")]
    entries = [64, 128] if toy else rungs.VOCABULARIES
    vocabularies = {f"vocabulary-{V}": (V,) for V in entries}
    parts = [*peers_of.values(), "peers-autotuned", *ladders, *vocabularies]
    assert record("--only", ",".join(parts), *toy, gpus=1 - len(toy)).returncode == 0
    monkeypatch.setattr(measure_ladder, "on_cpu", lambda argv: bool(toy))
    given = {}
    for line in (tmp_path / "log").read_text().splitlines():
        text = line.split("measure_ladder.py ")[1].replace(LONG_RUNGS, shlex.quote(LONG_RUNGS))
        words = shlex.split(text)
        given[line.split()[0]] = measure_ladder.parse_arguments([*words, "--results", str(tmp_path / "new")])
    assert {*given} == {*parts} and [*given][:4] == ["peers-small", "peers", "peers-long", "peers-autotuned"]
    for part, one in given.items():
        preset = "small" if "small" in part else "medium"
        graph = "off" if toy or "eager" in part else "on"
        assert (one.presets, one.graph) == (["tiny"] if toy else [preset], [graph])
        assert one.starts == (1 if toy or "peers" in part else 3)
    for part in peers_of.values():
        assert given[part].rungs == rungs.PEERS and not given[part].tuned
    assert given["peers-autotuned"].rungs == [rungs.SLOW_PEER]
    assert all(given[part].rungs == rungs.LADDER for part in ladders[:-1])
    for part, only in vocabularies.items():
        assert given[part].rungs == rungs.VOCABULARY and tuple(given[part].vocabularies) == only
    for part in [*ladders, *vocabularies]:
        size = next((size for size in peers_of if size in part), "medium")
        assert str(given[part].tuned) == f"../{peers_of[size]}/peers.json"
        assert given[part].options == given[peers_of[size]].options
    if not toy:
        assert [given[part].options for part in ("peers", "peers-long")] == ["", rungs.LONG]


@pytest.mark.parametrize("toy", [[], ["--toy"]], ids=["whole", "toy"])
def test_the_starts_take_the_options_that_they_are_given(toy, record, tmp_path):
    assert record("--only", "start-small,start-medium", *toy, gpus=1 - len(toy)).returncode == 0
    for line, preset in zip((tmp_path / "log").read_text().splitlines(), ("small", "medium"), strict=True):
        words = line.split("warm_up.py ")[1].split()
        given = warm_up.parse_arguments([*words, "--results", str(tmp_path / "new")])
        assert line.startswith(f"start-{preset} ") and given.append
        assert given.presets == (["tiny"] if toy else [preset])
        assert (given.rounds, given.rungs[0]) == ((1, "b") if toy else (3, "b"))


@pytest.mark.parametrize(
    ("arguments", "gpus", "said"),
    [
        (["--frobnicate"], 1, "unknown option --frobnicate"),
        (["--time-limit", "soon"], 1, "needs a positive number, got soon"),
        (["another"], 1, "one folder"),
        (["--only"], 1, "--only needs a value"),
        (["--only", "suite"], 1, "suite isn't one of peers peers-small"),
        (["--only", "ddp"], 1, "ddp isn't one of peers"),
        ([], 0, "PyTorch sees no GPU here"),
    ],
)
def test_bad_options_are_one_sentence(record, arguments, gpus, said):
    done = record(*arguments, gpus=gpus)
    assert done.returncode == 2 and said in done.stderr and done.stderr.count("\n") == 1


# ---------------------------------------------------------------- timeline.py


def test_a_timeline_is_the_last_step_without_copies():
    names = ["gemm", "memcpy", "adam"] * 2
    kinds = {"memcpy": "copy"}
    calls = [Kernel(name, 1e6 + 2e3 * i, 1e3, kind=kinds.get(name, "kernel")) for i, name in enumerate(names)]
    profile = Profile(pathlib.Path("trace"), calls, steps=2)
    assert timeline.kernels_of_a_step(profile) == ["0.0 1.0 GEMM", "4.0 1.0 optimizer"]


@pytest.mark.slow
def test_both_versions_are_profiled(tmp_path, one_process):
    toy = "--hidden-dim 32 --num-layers 1 --num-heads 2 --vocab-size 64 --batch-size 2 --seq-len 16 --num-steps 2"
    assert timeline.main([*toy.split(), "--device", "cpu", "--json", str(tmp_path / "timeline.json")]) == 0
    found = json.loads((tmp_path / "timeline.json").read_text())["kernels"]
    assert len(found["v1"]) > len(found["v4"]) > 50 and found["v4"][0].startswith("0.0 ")


def traced(first, replayed=False):
    """Return the events of a step that begins at a time: the host launches for 40 us and waits until 100 us."""
    host = {"pid": 1, "tid": 1}
    number = int(first)
    names = ["cudaGraphLaunch"] if replayed else ["cudaLaunchKernel", "cudaLaunchKernel"]
    events = [event("cpu_op", "aten::view", first + 1, 2) | host]
    if not replayed:
        marks = [("forward", 0, 20), ("backward", 20, 10), ("optimizer", 30, 10)]
        events = [event("user_annotation", name, first + ts, dur) | host for name, ts, dur in marks] + events
        more = {"Input Dims": [[2, 2]], "Call stack": "/a"}
        events.append(event("cpu_op", "aten::mm", first + 5, 5, number, **more) | host)
    for i, name in enumerate(names):
        events.append(event("cuda_runtime", name, first + 6 + 10 * i, 1, correlation=number + i) | host)
    for i in range(2):
        which = number if replayed else number + i
        kernel = event("kernel", f"gemm_{number}", first + 30 + 10 * i, 5, correlation=which)
        events.append(kernel | {"pid": 0, "tid": 7})
    arrow = {"ph": "s", "cat": "ac2g", "name": "ac2g", "id": number, "ts": first + 6} | host
    return [*events, arrow, event("cuda_runtime", "cudaDeviceSynchronize", first + 45, 55) | host]


@pytest.mark.parametrize("replayed", [False, True])
def test_the_last_step_of_a_trace_is_cut_out(replayed):
    names = [{"ph": "M", "name": "process_name", "pid": 1, "ts": 5.0, "args": {"name": "python"}}]
    after = [event("cpu_op", "aten::item", 1102, 3) | {"tid": 1}, event("kernel", "late", 1105, 3, correlation=9)]
    after.append(event("cuda_runtime", "cudaDeviceSynchronize", 1110, 5) | {"tid": 1})  # which the step's end is not
    events = [*names, *traced(100, replayed), *traced(1000, replayed), *after]
    found = timeline.one_step({"traceName": "/home/user", "tiny_llama": METADATA, "traceEvents": events})
    assert set(found) == {"tiny_llama", "traceEvents"} and found["traceEvents"][0] == names[0]
    kept = {}
    for one in found["traceEvents"][1:]:
        kept.setdefault(one["cat"], []).append((one["name"], one["ts"]))
    start = 1006 if replayed else 1000
    assert kept["kernel"] == [("gemm_1000", 1030 - start), ("gemm_1000", 1040 - start)]
    assert kept["ac2g"] == [("ac2g", 1006 - start)] and kept["cuda_runtime"][-1][0] == "cudaDeviceSynchronize"
    if replayed:
        assert "cpu_op" not in kept
    else:
        assert kept["cpu_op"] == [("aten::mm", 5)]  # aten::view launches nothing
        (operator,) = (one for one in found["traceEvents"] if one.get("cat") == "cpu_op")
        assert operator["args"] == {"External id": 1000, "Input Dims": [[2, 2]]}


def test_kernels_that_overlap_get_a_row_of_their_own():
    """The second begins 0.1 us before the first has ended; the third follows it, the fourth lies within the third."""
    events = [one for one in traced(1000, replayed=True) if one["cat"] != "kernel"]
    times = [("a", 10, 10.1), ("b", 20, 20), ("c", 40, 20), ("d", 45, 5)]
    row = {"pid": 0, "tid": 7}
    events += [event("kernel", name, 1000 + ts, dur, correlation=1000) | row for name, ts, dur in times]
    events += [{"ph": "f", "cat": "ac2g", "name": name, "id": 1000, "ts": 1000 + ts} | row for name, ts, _ in times]
    found = timeline.one_step({"traceEvents": events})["traceEvents"]
    rows = {one["name"]: one["tid"] for one in found if one.get("cat") == "kernel"}
    assert rows == {"a": 7, "b": 7 + timeline.SECOND_ROW, "c": 7, "d": 7}
    assert {one["name"]: one["tid"] for one in found if one.get("cat") == "ac2g" and one["ph"] == "f"} == rows
    (label,) = (one for one in found if one["ph"] == "M")
    assert label["tid"] == rows["b"] and label["args"] == {"name": "stream 7, overlapping"}
    assert timeline.overlapping(found) == []


def test_a_trace_without_steps_is_no_step():
    with pytest.raises(Failure, match="marks no step"):
        timeline.one_step({"traceEvents": [event("cpu_op", "aten::mm", 0, 5)]})


def test_a_trace_of_a_step_says_what_it_was_made_with_and_is_read(tmp_path, monkeypatch, capsys):
    def train(script, argv, tell):
        tell("step     1/8  loss 7\n")
        folder = pathlib.Path(argv[argv.index("--profile-dir") + 1])
        replayed = "--graph" in argv
        content = {"tiny_llama": METADATA, "traceEvents": [*traced(100, replayed), *traced(1000, replayed)]}
        (folder / "trace_v1.pt.trace.json").write_text(json.dumps(content))

    monkeypatch.setattr(timeline, "train", train)
    monkeypatch.setattr(runs.Pace, "is_due", lambda pace: True)
    assert timeline.main(["--preset", "small", "--traces", str(tmp_path)]) == 0
    printed = capsys.readouterr()
    assert printed.out.count("2 kernels and 0 copies of 1 step") == 2
    told = [f"profiling tiny_llama_v{version}.py ...\n   step     1/8  loss 7\n" for version in (1, 4)]
    assert printed.err == "".join(told)
    for version, way in ((1, "--no-graph"), (4, "--graph")):
        path = tmp_path / f"trace_v{version}.json.gz"
        record = json.loads(gzip.decompress(path.read_bytes()))["record"]
        assert record["command"].startswith(f"python tiny_llama_v{version}.py") and way in record["command"]
        assert str(tmp_path) not in record["command"]
    monkeypatch.setattr(timeline, "LARGEST", 100)
    refused(timeline.main, ["--preset", "small", "--traces", str(tmp_path)], capsys, "may have 100", 1)


def test_the_options_of_a_timeline_name_no_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(timeline, "profiled", lambda script, argv: [])
    file = tmp_path / "timeline.json"
    assert timeline.main(["--preset", "small", "--data", "/home/me/text", "--json", str(file)]) == 0
    assert json.loads(file.read_text())["options"][-2:] == ["--data", "text"]


@pytest.mark.parametrize("more", [0, 1])
def test_a_trace_may_have_so_many_bytes_and_no_byte_more(more, monkeypatch, tmp_path):
    def train(script, argv, tell):
        folder = pathlib.Path(argv[argv.index("--profile-dir") + 1])
        content = {"tiny_llama": METADATA, "traceEvents": [*traced(100), *traced(1000)]}
        (folder / "trace_v1.pt.trace.json").write_text(json.dumps(content))

    monkeypatch.setattr(timeline, "train", train)
    monkeypatch.setattr(timeline, "describe", lambda command: {})
    timeline.write_trace(1, ["--no-graph"], tmp_path)
    size = (tmp_path / "trace_v1.json.gz").stat().st_size
    monkeypatch.setattr(timeline, "LARGEST", size - more)
    with pytest.raises(Failure, match=f"has {size:,} bytes, but may have") if more else contextlib.nullcontext():
        timeline.write_trace(1, ["--no-graph"], tmp_path)
