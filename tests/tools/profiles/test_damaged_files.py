"""Readers on damaged files: every damage is one sentence that names the file, or a result made of numbers.

The damages are drawn with a fixed seed from the samples: cuts, flipped and lost bytes, and in JSON values of another
kind.
"""

import argparse
import codecs
import contextlib
import copy
import csv
import gzip
import json
import math
import os
import random
import re
import resource
import shutil
import sys

import pytest
from test_profiles import SAMPLES, sample

import analyze_batch_scaling
import analyze_bottlenecks
import analyze_communication
import analyze_gemm_operations
import analyze_kernel_launches
import analyze_kernel_reduction
import check_training
import compare_versions
import generate_fusion_report
import kernel_counters
import kernel_times
import memory_bandwidth_analyzer
import performance_regression_test as regression
import run_deepspeed_flops
import run_pytorch_profiler
import validate_numerical_accuracy
from common import files, profiles, report, tables
from common.command_line import Failure, run_tool
from common.files import number
from common.machine import room
from common.measuring import runs, suite_results
from common.profiles import limits, roofline
from common.profiles.formats import FORMATS
from conftest import METADATA, event
from in_process import refused
from maintain import rungs
from maintain.records import newest_record

SEED = 35
BYTES = [*(row.sample for row in FORMATS), "trace.json.gz"]
COUNTERS = ["rocm-7.0/counter_collection.csv", "ncu/raw.csv", "rocm-7.0/results.sql"]
DEEP = json.loads("[" * 500 + "]" * 500)
WRONG = [None, True, -1, 0, "", "x", [], {}, [None], math.inf, math.nan, 10**400, "\ud800\n<b>", DEEP]


def damaged(content, draw):
    """Return the content cut, with a flipped byte, without a part, or with a part that is foreign."""
    at, length = draw.randrange(len(content)), draw.randint(1, 40)
    foreign = draw.choice([b"", b"\0", b"\xff" * 12, b"nan", b"-", b",", b'"', b"\n", draw.randbytes(length)])
    return draw.choice(
        [
            content[:at],
            content[:at] + bytes([content[at] ^ 1 << draw.randrange(8)]) + content[at + 1 :],
            content[:at] + foreign + content[at + len(foreign) :],
            content[:at] + foreign + content[at + length :],
        ]
    )


def places(value):
    """Yield (container, key) of every value in parsed JSON."""
    for key, part in value.items() if isinstance(value, dict) else enumerate(value):
        yield value, key
        if isinstance(part, dict | list):
            yield from places(part)


def changed(content, draw):
    """Return the parsed JSON with one value of another kind, or without it."""
    content = copy.deepcopy(content)
    container, key = draw.choice(list(places(content)))
    if draw.random() < 0.2:
        del container[key]
    else:
        container[key] = draw.choice(WRONG)
    return content


def no_number(word):
    raise AssertionError(f"{word} in a result")


def answered(main, arguments, path, capsys):
    """Run a tool; check that it refuses the file in one sentence that names it, or prints no NaN and no escape code.

    Return True if it printed a result.
    """
    status = main([str(word) for word in arguments])
    found = capsys.readouterr()
    if status == 0:
        assert not re.search(r"\bnan\b|\binf\b|\x1b", found.out), found.out
        return found.out != ""
    said = [line for line in found.err.splitlines() if line.startswith(main.__module__)]
    assert len(said) == 1 and len(said[0]) < 1000 and found.err.endswith(said[0] + "\n"), found.err
    assert str(path) in said[0] and "Traceback" not in found.err and found.out == "", found
    return False


def kernel_text_and_json(path, capsys, has_bounds=True):
    """Run kernel_times.py; check that what it prints as JSON is finite and not negative.

    has_bounds: the shortest and the longest time of a kernel are always known.
    """
    good = answered(kernel_times.main, [path], path, capsys)
    if good:
        kernel_times.main([str(path), "--json", "-"])
        content = json.loads(capsys.readouterr().out, parse_constant=no_number)
        assert all(row["total_us"] >= 0 for row in content["kernels"])
        bounds = [row[key] for row in content["kernels"] for key in ("min_us", "max_us")]
        assert all(us >= 0 if us is not None else not has_bounds for us in bounds)
    return good


@pytest.mark.parametrize("name", BYTES)
def test_damaged_profiles(name, tmp_path, capsys):
    draw, path = random.Random(SEED), tmp_path / "damaged"
    if name.endswith(".gz"):
        whole = gzip.compress((SAMPLES / "pytorch/trace_gpu.json").read_bytes())
    else:
        whole = sample(name, tmp_path).read_bytes()
    path.write_bytes(whole)
    shutil.copy(SAMPLES / "pytorch/trace_gpu.json", tmp_path)  # which a profile_*.json names
    has_bounds = "stats" not in name  # its columns of them may be the damaged ones
    assert kernel_text_and_json(path, capsys)
    for _ in range(150):
        path.write_bytes(damaged(whole, draw))
        kernel_text_and_json(path, capsys, has_bounds)


@pytest.mark.parametrize("name", COUNTERS)
def test_damaged_counters(name, tmp_path, capsys):
    draw, path, whole = random.Random(SEED), tmp_path / "damaged", sample(name, tmp_path).read_bytes()
    path.write_bytes(whole)
    assert answered(kernel_counters.main, [path], path, capsys)
    for _ in range(200):
        path.write_bytes(damaged(whole, draw))
        answered(kernel_counters.main, [path], path, capsys)


TOOLS = {
    kernel_times.main: [],
    analyze_kernel_launches.main: ["--trace-file"],
    analyze_bottlenecks.main: ["--profile-data"],
    run_pytorch_profiler.main: ["--generate-report", "--analyze-existing"],
    analyze_communication.main: [],
}


@pytest.mark.parametrize("main", TOOLS, ids=lambda main: main.__module__)
@pytest.mark.quick(3)
def test_traces_with_values_of_another_kind(main, profiled, make_trace, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(roofline, "measure_ceilings", lambda *_: {"matmul_tflops": 1.0, "copy_tb_s": 1.0})
    (trace,) = profiled[1].glob("trace_*.json")
    cpu = json.loads(trace.read_text())
    cpu["traceEvents"] = [event for event in cpu["traceEvents"] if event.get("cat") in profiles.TIMED][:40]
    cpu["traceEvents"] += [
        {"ph": "i", "name": "[memory]", "ts": ts, "args": {"Device Type": 0, "Total Allocated": 4 * ts}}
        for ts in (1.0, 2.0)
    ]
    gpu = json.loads(make_trace("gpu/trace_1.json", {"gemm": 10.0, "nccl": 5.0}).read_text())
    draw, path = random.Random(SEED), tmp_path / "damaged" / "trace_1.json"
    path.parent.mkdir()
    for i in range(160):
        path.write_text(json.dumps(changed((cpu, gpu)[i % 2], draw)))
        answered(main, [*TOOLS[main], path], path, capsys)


def test_files_of_our_own_with_values_of_another_kind(profiled, make_trace, tmp_path, capsys, monkeypatch):
    draw, path = random.Random(SEED), tmp_path / "metrics.json"
    metrics = json.loads((profiled[1].parent / "metrics_v1.json").read_text())
    for _ in range(200):
        path.write_text(json.dumps(changed(metrics, draw)))
        try:
            read = runs.read_metrics(path)
        except Failure as failure:
            assert str(failure).count(str(path)) == 1 and "\n" not in str(failure)
        else:
            json.dumps(read, allow_nan=False)
    monkeypatch.chdir(tmp_path)
    folder = make_trace("damaged/trace_1.json", {"gemm": 10.0}).parent
    content = metrics | {"version": 1, "trace": "trace_1.json", "metadata": METADATA, "command": ["x"]}
    path, arguments = folder / "profile_v1_1.json", ["--baseline", folder, "--fused", folder]
    path.write_text(json.dumps(content))
    assert answered(generate_fusion_report.main, arguments, folder, capsys)
    for _ in range(200):
        path.write_text(json.dumps(changed(content, draw)))
        answered(generate_fusion_report.main, arguments, folder, capsys)


RECORDED = newest_record().folder


def losses_of(profiled):
    """Return the metrics of a run, as if its step had been captured."""
    content = json.loads((profiled[1].parent / "metrics_v1.json").read_text())
    content["summary"]["graph"]["captured"] = True
    return content


def results_of_few_runs():
    results = json.loads((RECORDED / "headline" / "suite.json").read_text())
    return results | {"runs": results["runs"][:12], "accuracy": results["accuracy"][:4]}


def columns_of_few_rounds():
    content = json.loads(next(RECORDED.glob("ladder-small/ladder.json")).read_text())
    return {"columns": [column | {"rounds": column["rounds"][:6]} for column in content["columns"][:1]]}


def print_columns(path):
    for column in rungs.read_columns(path):
        print("\n".join(rungs.lines_of(column)))


def print_rows(path):
    print(suite_results.table_of(suite_results.rows(suite_results.read_results(path)), suite_results.METRICS))


def gate(path):
    """Compare a run with one of the same numbers."""
    current = shutil.copy(path, path.with_name("current.json"))
    files = {"baseline_results": [path], "current_results": [current]}
    return regression.compare(argparse.Namespace(**files, min_speedup=1, json=None))


OWN_FILES = {  # name: reader, content
    "suite": (print_rows, lambda profiled: results_of_few_runs()),
    "ladder": (print_columns, lambda profiled: columns_of_few_rounds()),
    "room": (lambda path: room.graph(path, path), losses_of),
    "gate": (gate, losses_of),
    "limits": (lambda path: limits.show(path.parent), lambda profiled: {"counters": [COUNTER, COUNTER]}),
}
COUNTER = {"kernel": "k", "counter": "sm__throughput.avg.pct_of_peak_sustained_elapsed", "unit": "%", "mean": 61.5}


@pytest.mark.parametrize("name", OWN_FILES)
def test_results_of_our_own_with_values_of_another_kind(name, profiled, tmp_path, capsys, monkeypatch):
    """A wrong value is one sentence with the file's name, or it is shown as it stands and is finite."""
    reader, make_content = OWN_FILES[name]
    monkeypatch.chdir(tmp_path)
    draw, path, content = random.Random(SEED), tmp_path / "counters.json", make_content(profiled)
    path.write_text(json.dumps(content))
    assert run_tool("tool", lambda: reader(path) and None) == 0 and capsys.readouterr().out
    for i in range(200):
        if i % 4:
            path.write_text(json.dumps(changed(content, draw)))
        else:
            path.write_bytes(damaged(json.dumps(content).encode(), draw))
        status = run_tool("tool", lambda: reader(path) and None)
        found = capsys.readouterr()
        if status == 0:
            assert not re.search(r"\bnan\b|\binf\b|\x1b", found.out), found.out
        else:
            assert found.err.startswith("tool: ") and found.err.count("\n") == 1 and len(found.err) < 1000, found.err
            own = str(path) in found.err
            assert own or re.search("not comparable|trained|no speed-of-light|not captured", found.err), found.err


@pytest.mark.parametrize(
    "text", ["1e999", "-1e999", "NaN", "Infinity", "1" * 400, "9" * 5000, '"\\u001b[2J"', '"\u009b2J"', '"\\ud800"']
)
def test_values_that_no_file_of_our_own_holds(text, tmp_path):
    path = tmp_path / "own.json"
    path.write_text(f'{{"value": {text}}}', encoding="utf-8")
    with pytest.raises(Failure, match=f"{path} is cut off or damaged"), files.errors_of(path):
        files.read_object(path, "file")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"traceEvents": null}', "not iterable"),
        ('{"traceEvents": [null]}', "no attribute 'get'"),
        ('{"traceEvents": [{"cat": "kernel", "name": "k", "ts": 1}]}', "k starts at 1 us and takes None us"),
        ('{"traceEvents": [{"cat": "kernel", "name": "k", "ts": 1, "dur": -1}]}', "takes -1 us"),
        ('{"traceEvents": [{"cat": "kernel", "name": "k", "ts": NaN, "dur": 1}]}', "starts at nan us"),
        ('{"traceEvents": [{"cat": "kernel", "name": null, "ts": 1, "dur": 1}]}', "None isn't a name"),
        ('{"traceEvents": [{"cat": "kernel", "name": "k", "ts": 1, "dur": 1, "args": null}]}', "no attribute 'get'"),
        ('{"traceEvents": [{"cat": "kernel", "name": "k", "ts": 1, "dur": 0}]}', "take 0 ns"),
        ("[" * 10**5, "cut off or damaged"),
        ('{"trace": "damaged", "steps_profiled": 2}', "not a profiler's trace"),  # it names itself
        ('{"trace": "../damaged", "steps_profiled": 2}', "Invalid name"),
        ("Name,Start_Timestamp,End_Timestamp\nk,9,2\n", "takes -7 ns"),
        ("Name,Start_Timestamp,End_Timestamp\nk,1_0,20\n", "'1_0' isn't a number"),
        ("Name,Start_Timestamp,End_Timestamp\nk,1,2", "its last line has no end"),
    ],
)
def test_damages_by_hand(content, words, tmp_path, capsys):
    (tmp_path / "damaged").write_text(content)
    refused(kernel_times.main, [tmp_path / "damaged"], capsys, words)


@pytest.mark.parametrize("value", ["nan", "inf", "\uff11\uff12", "1_0", "", "many"])
def test_what_is_no_number(value):
    with pytest.raises(ValueError, match="number|convert"):
        number(value)
    assert number("-1.5e3") == -1500


@pytest.mark.parametrize("name", ["rocm-7.0/counter_collection.csv", "ncu/raw.csv"])
def test_counters_cut_anywhere_are_refused_or_lose_whole_lines(name, tmp_path, capsys):
    """A cut in the middle of a number leaves a shorter number."""
    path, text = tmp_path / "x.csv", (SAMPLES / name).read_text()
    path.write_text(text)
    kernel_counters.main([str(path), "--json", "-"])
    whole = {tuple(row.values())[:4]: row for row in json.loads(capsys.readouterr().out)["counters"]}
    for at in range(0, len(text), 7):
        path.write_text(text[:at])
        status = kernel_counters.main([str(path), "--json", "-"])
        output = capsys.readouterr().out
        assert status == 2 or text[:at].endswith("\n")
        for row in json.loads(output)["counters"] if status == 0 else []:
            assert row["launches"] <= whole[tuple(row.values())[:4]]["launches"]


def test_packed_files(tmp_path, capsys):
    path, content = tmp_path / "trace.json.gz", (SAMPLES / "pytorch/trace_gpu.json").read_bytes()
    path.write_bytes(gzip.compress(content))
    assert kernel_times.main([str(path)]) == 0 and "adamw_kernel" in capsys.readouterr().out
    path.write_bytes(gzip.compress(content)[:-9])
    refused(kernel_times.main, [path], capsys, "cut off or damaged: Compressed file ended")


@pytest.mark.parametrize("name", ["pytorch/trace_gpu.json", "rocm-7.0/kernel_trace.csv"])
def test_a_byte_order_mark_changes_nothing(name, tmp_path, capsys):
    """Editors on Windows write one."""
    said, path = [], tmp_path / "file"
    for mark in (b"", codecs.BOM_UTF8):
        path.write_bytes(mark + (SAMPLES / name).read_bytes())
        said.append((kernel_times.main([str(path)]), capsys.readouterr()))
    assert said[0] == said[1]


def test_a_damage_behind_a_link_is_told_of_its_file(tmp_path, capsys):
    profile, trace = tmp_path / "profile_v1_1.json", tmp_path / "trace.json"
    profile.write_text('{"trace": "trace.json", "steps_profiled": 2}')
    trace.write_text('{"traceEvents": null}')
    refused(kernel_times.main, [profile], capsys, f"{profile} names another file: {trace} is cut off or damaged: 'None")


@pytest.mark.parametrize("main", [kernel_times.main, kernel_counters.main], ids=["times", "counters"])
def test_devices_are_refused(main, capsys):
    refused(main, ["/dev/zero"], capsys, "/dev/zero isn't a regular file")


@pytest.mark.parametrize("write", [tables.write_csv, lambda rows, path: tables.emit({"rows": rows}, "", path)])
def test_a_full_disk_leaves_the_older_result(write, tmp_path):
    path = tmp_path / "result"
    path.write_text("older")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))
    try:
        with pytest.raises(OSError, match=f"File too large: '{path}'"):
            write([{"name": "x" * 500}] * 10, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [file.read_text() for file in tmp_path.iterdir()] == ["older"]


def test_an_interrupt_that_an_import_wraps_ends_a_tool(capsys):
    def work():
        raise RuntimeError("Error calling __set_name__") from KeyboardInterrupt()

    assert run_tool("tool", work) == 130 and capsys.readouterr().err == "tool: interrupted\n"


def test_a_missing_input_is_not_one_that_cannot_be_written(tmp_path, capsys):
    refused(run_deepspeed_flops.main, ["--analyze-results", tmp_path / "x.json"], capsys, "cannot be read")
    assert run_tool("tool", lambda: (tmp_path / "missing").read_text()) == 1
    assert "missing cannot be read: No such file" in capsys.readouterr().err
    assert run_tool("tool", lambda: (tmp_path / "no folder" / "x").write_text("x")) == 1
    assert "x cannot be written: No such file" in capsys.readouterr().err
    assert run_tool("tool", lambda: tmp_path.read_text()) == 1
    assert f"{tmp_path} cannot be opened: Is a directory" in capsys.readouterr().err


RESULTS = {
    "suite.json": lambda path: suite_results.write_results({"record": {}, "runs": [], "accuracy": []}, path),
    "ladder.json": lambda path: rungs.write_columns([], path),
}


@pytest.mark.parametrize("name", RESULTS)
def test_a_call_that_is_cut_off_while_it_writes_leaves_the_old_results(name, tmp_path, monkeypatch):
    def cut_off(partial, path):
        raise KeyboardInterrupt

    path = tmp_path / name
    path.write_text("of hours")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(os, "replace", cut_off)
        RESULTS[name](path)
    assert path.read_text() == "of hours"
    RESULTS[name](path)
    assert json.loads(path.read_text()) and [file.name for file in tmp_path.iterdir()] == [name]


HOSTILE = "k<script>alert(1)</script>\n\n# heading\x1b[2J | x `y`"


def test_reports_show_what_they_print(tmp_path, monkeypatch, capsys):
    """Names come from files: none of them starts HTML, ends a line or a cell, or reaches the terminal as a code."""
    monkeypatch.chdir(tmp_path)
    event = {"cat": "kernel", "name": HOSTILE, "ts": 1, "dur": 1}
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": [event], "deviceProperties": [{"name": HOSTILE}]}))
    assert analyze_bottlenecks.main(["--profile-data", str(tmp_path), "--steps", "1"]) == 0
    page = (tmp_path / "bottlenecks.md").read_text()
    assert "\x1b" not in page + capsys.readouterr().out
    device, *_, row = (line for line in page.splitlines() if "alert" in line)
    assert device == "- device: k&lt;script>alert(1)&lt;/script>\\n\\n# heading\\x1b[2J | x `y`"
    assert "`k<script>alert(1)</script>\\n\\n# heading\\x1b[2J \\| x 'y'`" in row


CODES = "_\x1b]0;PWNED\x07\x1b[2J\x9b31m"
READERS = {  # every tool that is given a file or folder: {} stands for the path
    analyze_batch_scaling.main: ["--profile-dirs", "{}", "{}"],
    analyze_bottlenecks.main: ["--profile-data", "{}"],
    analyze_communication.main: ["{}"],
    analyze_gemm_operations.main: ["--model-config", "{}"],
    analyze_kernel_launches.main: ["--trace-file", "{}"],
    analyze_kernel_reduction.main: ["--baseline", "{}", "--fused", "{}"],
    check_training.main: ["--", "{}"],
    compare_versions.main: ["--v1", "{}", "--v2", "{}"],
    generate_fusion_report.main: ["--baseline", "{}", "--fused", "{}"],
    kernel_counters.main: ["{}"],
    kernel_times.main: ["{}"],
    limits.main: ["{}"],
    memory_bandwidth_analyzer.main: ["--profile-data", "{}"],
    regression.main: ["--baseline-results", "{}", "--current-results", "{}"],
    run_deepspeed_flops.main: ["--analyze-results", "{}"],
    run_pytorch_profiler.main: ["--analyze-existing", "{}"],
    validate_numerical_accuracy.main: ["--baseline", "{}", "--optimized", "{}"],
}


@pytest.mark.parametrize("main", READERS, ids=lambda main: main.__module__)
def test_no_name_carries_an_escape_code_to_the_terminal(main, make_trace, tmp_path, capsys, monkeypatch):
    """Names of a folder, of its files, good and damaged, and of what these hold."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["x"])  # check_training.py replaces both
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.setattr(roofline, "measure_ceilings", lambda *_: {"matmul_tflops": 1.0, "copy_tb_s": 1.0})
    trace = json.loads(make_trace("made.json", {f"gemm{CODES}": 10.0, f"nccl{CODES}": 5.0}).read_text())
    trace["deviceProperties"][0]["name"] += CODES
    shapes = {"Input Dims": [[2, 2]] * 2, "Input type": ["float"] * 2, "Input Strides": [[], []]}
    trace["traceEvents"].append(event("cpu_op", "aten::mm", 1, 1, 0, **shapes))
    name, content = f"t_trace_rank0_{CODES}.json", json.dumps(trace)
    if main is kernel_counters.main:
        name, content = f"ncu{CODES}.csv", (SAMPLES / "ncu/raw.csv").read_text()
    elif main is check_training.main:
        name, content = f"train{CODES}.py", f"raise ValueError({CODES!r}  # )\n)"
    folder = tmp_path / f"runs{CODES}"
    folder.mkdir()
    said = ""
    for text in (content, content[: len(content) // 2]):
        (folder / name).write_text(text)
        for path in (folder, folder / name):
            arguments = [word.format(path) for word in READERS[main]]
            with contextlib.suppress(SystemExit):
                main(arguments)
            said += "".join(capsys.readouterr())
    assert "PWNED" in said
    assert not re.search(r"[\0-\x09\x0b-\x1f\x7f-\x9f]", said), ascii(said)


LIVE = [  # what GitHub makes a link, a picture or markup of
    *("[a](javascript:alert(1))", "![a](https://example.com/p.png)", "[a][b]", "[b]: https://example.com"),
    *("https://example.com", "WWW.example.com", "ftp://example.com", "mailto:a@example.com", "a@example.com"),
    *("<img src=x>", "<https://example.com>", "a\x1b[31mb", "a\u202eb"),
]


@pytest.mark.parametrize("name", LIVE)
def test_a_name_in_markdown_stays_text(name):
    """In a sentence, in a cell and in a list of facts; ours alone may be links."""
    page = report.markdown(name, [(name, name)], [name], [("x", [report.table([name], [[name]]), report.text(name)])])
    live = r"(?<!\\)\][(\[:]|://|(?i:www\.|mailto:)|\w@\w|<[a-zA-Z/!?]|[\0-\x09\x0b-\x1f\u202e]"
    assert re.search(live, name) and not re.search(live, page), page
    assert tables.markdown("[a](b.md), https://example.com", links=True) == "[a](b.md), https://example.com"


FORMULAS = ["=1+1", "+cmd|' /C calc'!A0", "-2+3", "@SUM(A1)", "\t=1", " =1", "\uff1d1+1", "\r\n=1"]


@pytest.mark.parametrize("name", FORMULAS)
def test_a_name_in_a_table_is_no_formula(name, tmp_path):
    """Spreadsheets calculate a cell that begins so; dashes, numbers and other names stay as they are."""
    rows = [{"kernel": name, "ms": -1.23456789, "dash": "-", "number": "-1.5", "other": "a=b, -c"}]
    tables.write_csv(rows, tmp_path / "table.csv")
    text = (tmp_path / "table.csv").read_text()
    (row,) = csv.DictReader(text.splitlines())
    assert row["kernel"].startswith(("'", "\\")) and row | {"kernel": ""} == {
        "kernel": "",
        "ms": "-1.234568",
        "dash": "-",
        "number": "-1.5",
        "other": "a=b, -c",
    }
    assert not re.search(r"[\0-\x09\x0b-\x1f]", text)


def test_kernels_with_such_names_are_written_so(make_trace, tmp_path, capsys):
    folder = make_trace("named/trace_1.json", {"=1+1": 10.0, "a\x1b[31mb": 5.0}).parent
    assert kernel_times.main([str(folder), "--csv", str(tmp_path / "kernels.csv")]) == 0
    written = (tmp_path / "kernels.csv").read_text()
    assert "'=1+1" in written and "\x1b" not in written and "[31mb" in written


def test_markdown_keeps_text_in_its_place():
    page = report.markdown(HOSTILE, [(HOSTILE, HOSTILE)], [HOSTILE], [("x", [report.table(["a"], [[HOSTILE]])])])
    assert "<script" not in page and page.count("\n# ") == 0
    lines = [line for line in page.splitlines() if "script" in line]
    assert len(lines) == 4 and lines[-1].count("|") == 3 and lines[-1].count("\\|") == 1
    assert tables.markdown("`a<b>` 1 < 2") == "`a&lt;b>` 1 < 2" and tables.markdown("`a`b<c>`") == "`a'b<c>`"
