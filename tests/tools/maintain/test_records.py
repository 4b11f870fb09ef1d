"""Recorded runs: rows by hand, what ran where, generated parts of pages, and the ladder's tables on made-up runs."""

import json
import os
import re
import shlex
import shutil
import subprocess

import pytest

from common.command_line import Failure
from common.machine import description
from common.measuring import suite_results
from common.measuring.suite_results import Case, read_results, rows, write_results
from common.versions import REPOSITORY, SCRIPTS
from maintain import facts, ladder, pictures, provenance, records, rungs
from maintain.records import Record
from maintain.rungs import Rung

RECORD = {
    "date": "2026-01-02T03:04:05+00:00", "command": "benchmark_suite.py --models v1", "commit": "0123456789abcdef",
    "modified": False, "device": "Toy GPU", "device_type": "cuda", "driver": "580.1", "runtime": "CUDA 13.0",
    "packages": {"torch": "2.0", "transformers": "5.1", "torchao": None},
}  # fmt: skip
FIRST = Case("v1", "small", 8, 128, "float32", False)
THIRD = Case("v3", "small", 8, 128, "bfloat16", True)
CAPTURED = {"graph": {"captured": True, "reason": None}}
V1_MS, V3_MS = [40.0, 60.0, 50.0], [4.0, 5.0, 10.0]


def run_of(case, repeat, step_ms, **more):
    summary = {
        "parameters": 1000, "parameters_trained": 1000,
        "step_ms": {"median": step_ms, "p25": step_ms - 1, "p75": step_ms + 2},
        "forward_ms": step_ms / 4, "backward_ms": step_ms / 2, "optimizer_ms": None, "peak_memory_mb": 100.0,
        "flops_per_step": 2e9, "graph": {"captured": False, "reason": "no --graph"}, **more,
    }  # fmt: skip
    run = {"case": case, "repeat": repeat, "status": "ok", "reason": None, "script_sha256": "0"}
    return run | {"summary": summary, "steps_ms": [step_ms - 1, step_ms, step_ms, step_ms, step_ms + 1]}


def results_of(runs, accuracy=(), **more):
    return {"record": RECORD | more, "runs": runs, "accuracy": list(accuracy)}


def hand_made(**more):
    runs = [run_of(FIRST, i, ms) for i, ms in enumerate(V1_MS)]
    runs += [run_of(THIRD, i, ms, peak_memory_mb=30.0 + i, warmup_s=ms, **CAPTURED) for i, ms in enumerate(V3_MS)]
    checked = {"case": THIRD, "loss_error": 1e-4, "gradient_error": 2e-3, "worst_gradient": "norm.weight"}
    return results_of(runs, [checked], **more)


# ---------------------------------------------------------------- rows


def test_rows_by_hand():
    first, third = rows(hand_made())
    assert (first["step_p25_ms"], first["step_ms"], first["step_p75_ms"]) == (40.5, 50, 59.5)  # of all steps
    assert first["samples_per_second"] == 8 / 0.050
    assert first["tflops"] == pytest.approx(2e9 / 0.050 / 1e12) and first["forward_ms"] == 12.5
    assert first["optimizer_ms"] is None and first["gradient_error"] is None
    assert (third["captured"], third["repeats"], third["peak_memory_mb"]) == (True, 3, 32)  # the peak of all
    assert third["gradient_error"] == 2e-3


def test_efficiency_is_the_median_of_the_ratios_within_rounds():
    """Steps of 4, 5 and 10 ms alone; of 5, 8 and 10 ms together, and with FSDP2: 4/5, 5/8 and 1, not 5/8."""
    results = hand_made()
    together = THIRD._replace(processes=8)
    for case in (together, together._replace(model="v3+fsdp")):
        results["runs"] += [run_of(case, i, ms) for i, ms in enumerate((5.0, 8.0, 10.0))]
    failed = {"case": together, "repeat": 3, "status": "failed", "reason": "lost"}  # a round that lacks one
    results["runs"] += [failed, run_of(THIRD, 4, 1.0, **CAPTURED)]
    alone, eight, sharded = rows(results)[1:]
    assert alone["efficiency"] is None and eight["gradient_error"] is None  # gradients are those of one process
    for found in (eight["efficiency"], sharded["efficiency"]):
        assert (found.ratio, found.low, found.high, found.rounds) == (pytest.approx(0.8), 5 / 8, 1.0, 3)
    assert eight["samples_per_second"] == 8 * 8 / 0.008
    assert str(together).endswith("x8")
    header, cells = suite_results.table_of([alone, eight], ["throughput"])
    assert "processes" in header and "80.0 % (62.5 to 100.0)" in cells[1]
    assert "processes" not in suite_results.table_of([alone], ["throughput"])[0]


def test_rounds_that_one_case_lacks_are_left_out_of_a_ratio():
    """Steps of 4, 5 and 10 ms alone; together the first round failed: 5/8 and 10/10."""
    together = THIRD._replace(processes=8)
    runs = [*hand_made()["runs"], run_of(together, 1, 8.0), run_of(together, 2, 10.0)]
    found = suite_results.efficiency(together, runs)
    assert (found.low, found.high, found.rounds) == (5 / 8, 1, 2)
    assert suite_results.ratios_between(together, THIRD, runs[:-2]) is None


def test_a_row_is_of_the_record_s_machine():
    """Of rounds on two machines it has those of the first; only a case that ran on the second alone is of that one."""
    runs = [
        run_of(FIRST, i, ms) | {"host": host} for i, (ms, host) in enumerate([(40.0, "a"), (60.0, "a"), (9.0, "b")])
    ]
    runs.append(run_of(THIRD, 2, 4.0, **CAPTURED) | {"host": "b"})
    first, third = rows(results_of(runs, host="a"))
    assert (first["repeats"], first["step_ms"], third["repeats"], third["step_ms"]) == (2, 50, 1, 4)


def test_what_went_wrong_is_noted():
    failed = {"case": FIRST, "repeat": 1, "status": "failed", "reason": "out of memory"}
    once_eager = [run_of(THIRD, 0, 4.0, **CAPTURED), run_of(THIRD, 1, 4.0)]
    fourth = FIRST._replace(model="v4")
    once_partly = [run_of(fourth, 0, 1.0), run_of(fourth, 1, 1.0, parameters_trained=16)]
    notes = "\n".join(
        suite_results.notes_of(rows(results_of([run_of(FIRST, 0, 40.0), failed, *once_eager, *once_partly])))
    )
    assert "v1 eager: a repeat failed: out of memory" in notes
    assert "v3 graph: ran eagerly: no --graph" in notes
    assert "v4 eager: trains 16 of 1,000 parameters" in notes
    (row,) = table = rows(results_of([failed | {"status": "not available"}]))
    assert (row["status"], row["repeats"]) == ("not available", 0) and suite_results.table_of(table, [])[1] == []


def test_results_survive_writing_and_reading(tmp_path):
    path = tmp_path / "suite.json"
    write_results(hand_made(), path)
    assert read_results(path) == hand_made()
    assert len(path.read_text().splitlines()) == 14  # a line for each entry, so that a diff names runs
    for text in ('{"runs": []}', "{"):
        path.write_text(text)
        with pytest.raises(Failure, match="is cut off or damaged"):
            read_results(path)
    with pytest.raises(Failure, match="isn't a regular file"):
        read_results(tmp_path)
    with pytest.raises(Failure, match="cannot be read: No such file"):
        read_results(tmp_path / "missing.json")


# ---------------------------------------------------------------- what ran where


def test_the_machine_and_the_versions_are_on_one_line():
    line = "Toy GPU, driver 580.1, CUDA 13.0; torch 2.0; 2026-01-02, commit 0123456789"
    assert provenance.machine_line(RECORD) == line
    assert provenance.machine_line(RECORD | {"modified": True}) == f"{line} with changes that are not committed"


def test_a_copy_without_history_is_told_its_commit(monkeypatch):
    monkeypatch.setenv("TINY_LLAMA_COMMIT", "fedcba")
    record = description.describe(["a b.py", "--c"])
    assert (record["commit"], record["modified"], record["command"]) == ("fedcba", False, "'a b.py' --c")


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("/home/me/run 1", "run 1"),
        ("/home/me/", "me"),
        ("--results=/home/me/run", "--results=run"),
        ("--data", "--data"),
        ("../peers/peers.json", "../peers/peers.json"),
        ("a=/b", "a=/b"),  # a name, inside a folder of this one
        (str(description.REPOSITORY / "scripts" / "x.py"), "scripts/x.py"),
        (str(description.REPOSITORY), "."),
        (f"{description.REPOSITORY}/../other/x.py", "x.py"),
        (f"{description.REPOSITORY}s/x.py", "x.py"),
    ],
)
def test_a_record_names_no_folder_of_the_machine(word, told):
    assert description.without_folders([word]) == [told]
    assert description.describe(["warm_up.py", word])["command"] == shlex.join(["warm_up.py", told])
    named = description.folder_in(["--steps", word])
    if word == told:
        assert named is None
    else:
        assert named.startswith(f"{word}: a record names no folder")


def test_a_script_that_is_not_the_commits_is_a_fault(tmp_path, monkeypatch):
    """A repository of one commit, in which the script has changed since."""
    script = tmp_path / "v1.py"
    script.write_text("one\n")
    mail = ["-c", "user.name=a", "-c", "user.email=a@example.com"]
    for command in (["init", "-q"], ["add", "v1.py"], [*mail, "commit", "-qm", "one"]):
        subprocess.run(["git", "-C", tmp_path, *command], check=True)
    for module in (description, provenance):
        monkeypatch.setattr(module, "REPOSITORY", tmp_path)
    commit, ran = description.git("rev-parse", "HEAD"), description.hash_of(script)
    assert description.describe([])["modified"] is False
    assert provenance.faults_of_commit(commit, {(script, ran)}) == []
    script.write_text("two\n")
    assert description.describe([])["modified"] is True
    (fault,) = provenance.faults_of_commit(commit, {(script, description.hash_of(script))})
    assert fault == f"v1.py of commit {commit[:10]} is not what ran"
    assert provenance.faults_of_commit("0" * 40, {(script, ran)}) == []  # a shallow clone cannot know
    # a script that has moved twice since, or is gone, is looked up where the commit has it
    moved = tmp_path / "tools" / "v1.py"
    (fault,) = provenance.faults_of_commit(commit, {(moved, ran)})
    assert fault == f"commit {commit[:10]} has no tools/v1.py: name its earlier path in provenance.MOVED"
    monkeypatch.setattr(provenance, "MOVED", {"tools/v1.py": "lib/v1.py", "lib/v1.py": "v1.py"})
    script.unlink()
    assert provenance.faults_of_commit(commit, {(moved, ran), (script, ran)}) == []
    (fault,) = provenance.faults_of_commit(commit, {(moved, "0")})
    assert fault == f"v1.py of commit {commit[:10]} is not what ran"


# ---------------------------------------------------------------- generated parts of pages


def write_part(folder, part, results, complete=True):
    (folder / part).mkdir(parents=True)
    write_results(results, folder / part / "suite.json")
    if complete:
        (folder / part / "record.json").write_text(json.dumps(results["record"]))


LADDER = [
    Rung("first", "plain (version 1)", 1, []),
    Rung("flag", "an idea", 2, [], "first"),
    Rung("compiled", "a compiler", 2, [], "flag", road=True),
    Rung("written", "kernels (version 3)", 3, [], "flag", road=True, peers=("peer",)),
    Rung("library", "operators (version 4)", 4, [], "flag", road=True),
    Rung("peer", "a library's model", "peer", []),
]
PEERS = [Rung("one", "a way to run the peer", "peer", []), Rung("two", "another way", "peer", [])]


@pytest.fixture
def recorded(tmp_path, monkeypatch):
    """Return the folder of a run with all parts; V1 takes 100 ms everywhere, V3 10 and in bfloat16 2."""
    monkeypatch.setattr(rungs, "LADDER", LADDER)
    folder = tmp_path / "toy_2026-01-02"
    runs, graph = [], []
    for preset in ("small", "medium"):
        first = Case("v1", preset, 8, 128, "float32", False)
        runs += [run_of(first, 0, 100.0, peak_memory_mb=1000.0), run_of(first._replace(model="v2"), 0, 80.0)]
        for precision, ms in (("float32", 10.0), ("bfloat16", 2.0)):
            runs.append(run_of(Case("v3", preset, 8, 128, precision, True), 0, ms, peak_memory_mb=410.0, **CAPTURED))
        runs.append(run_of(Case("hf+compile", preset, 8, 128, "bfloat16", True), 0, 4.0, **CAPTURED))
        for i, (eager, replayed) in enumerate(((100.0, 50.0), (100.0, 80.0), (50.0, 30.0))):
            graph += [run_of(first, i, eager), run_of(first._replace(graph=True), i, replayed, **CAPTURED)]
        graph.append(run_of(first._replace(model="v2"), 0, 80.0))  # whose graph failed
    alone = Case("v3", "medium", 8, 128, "bfloat16", True)
    ddp = [run_of(alone, 0, 8.0, **CAPTURED), run_of(alone._replace(processes=4), 0, 10.0, **CAPTURED)]
    checked = {"case": runs[3]["case"], "loss_error": 0.0, "gradient_error": 2e-3, "worst_gradient": "w"}
    parts = {"headline": results_of(runs, [checked]), "graph": results_of(graph), "ddp": results_of(ddp)}
    for part, results in parts.items():
        write_part(folder, part, results)
    us = {"median": 10.0}
    ours = {"name": "V3", "us": us, "rate": 3000.0, "share": 0.9}
    rope = {"operation": "RoPE forward", "size": "1 x 2", "unit": "GB/s"}
    rivals = {"PyTorch": 20.0, "torch.compile": 10.1, "Liger": 9.9}
    timed = [{"name": name, "us": {"median": us}, "rate": 1.0} for name, us in rivals.items()]
    rope["candidates"] = [ours, *timed, {"name": "other", "reason": "refused"}]
    attention = {"operation": "attention", "size": "3 x 4", "unit": "TFLOP/s"}
    attention["candidates"] = [ours, {"name": "SDPA flash", "us": {"median": 9.9}, "rate": 1.0}]
    ceilings = {"copy": 4000.0, "product": {"float32": 50.0, "bfloat16": 2.0}}
    steps = []
    for names, ms, memory, kernels in (
        ("", [5.0, 6.0], 5000.0, 9),
        ("a", [4.0, 4.0], 3000.0, 5),
        ("b", [5.0, 5.0], 4990.0, 9),
        ("ab", [2.5, 2.0], 4991.0, 8),
    ):
        steps.append(
            {
                "on": [*names],
                "name": names or "none",
                "step_ms": ms[0],
                "steps_ms": ms,
                "peak_memory_mb": memory,
                "kernels": kernels,
            }
        )
    for part, name, content in (
        ("kernels", "kernels", {"dtype": "bfloat16", "ceilings": ceilings, "operations": [rope, attention]}),
        ("ablation3", "ablation", {"combinations": steps, "switches": [{"switch": "a"}, {"switch": "b"}]}),
    ):
        (folder / part).mkdir()
        (folder / part / f"{name}.json").write_text(json.dumps(content))
        (folder / part / "record.json").write_text(json.dumps(RECORD))
    for preset, compile_s in (("small", 30), ("medium", 40)):
        starts = {"h": [started(8), started(10), started(7)], "g": [started(compile_s), started(compile_s + 1)]}
        write_starts(folder / f"start-{preset}", preset, starts)
    return folder


def started(first_step_s):
    """Return one start with empty caches, and one with filled ones whose first step takes a tenth of it."""
    phases = {"imports, model": 5, "first step": first_step_s, "other steps, graph": 1}
    return {"empty": phases, "filled": phases | {"first step": first_step_s / 10}}


def write_starts(folder, preset, starts, **more):
    folder.mkdir()
    content = {"presets": {preset: starts}, "script_sha256": dict.fromkeys("gh", "0")}
    (folder / "warm_up.json").write_text(json.dumps(content))
    (folder / "record.json").write_text(json.dumps(RECORD | more))


@pytest.mark.parametrize(
    ("table", "line"),
    [
        ("v1_v3", "| V1 | fp32 | eager | 100.0 | 100.0 to 100.0 | 80 | 0.0 | 1,000 | - |"),
        ("v1_v3", "| V3 | bf16 | graph | 2.000 | 2.000 to 2.000 | 4,000 | 1.0 | 410 | 2.0e-03 |"),
        ("v1_v3", "Toy GPU, driver 580.1, CUDA 13.0; torch 2.0; 2026-01-02, commit 0123456789; `"),
        ("v3", "| V3 | fp32 | graph | 10.00 | 10.00 to 10.00 | 800 | 0.2 | 410 |"),
        ("graph", "| small | V1 | fp32 | 100.0 | 50.00 | 1.67 (1.25 to 2.00) |"),
        ("ddp", "| V3 | bf16 | graph | 4 | 10.00 | 10.00 to 10.00 | 3,200 | 0.2 | 80.0 % (80.0 to 80.0) | 100 |"),
        ("kernels", "| RoPE forward, 1 x 2 | 2.00 | 10.0 | 3,000 GB/s | 90 % |"),
        ("kernels", "in bf16. Faster than V3's, with their time / V3's: SDPA flash's attention, 3 x 4 (0.99)."),
        ("starts", "| version 3 | 14.0 (13.0 to 16.0) | 6.8 (6.7 to 7.0) | 14.0 (13.0 to 16.0) | 6.8 (6.7 to 7.0) |"),
        ("starts", "| version 2, compiled | 36.5 (36.0 to 37.0) | 9.1 (9.0 to 9.1) | 46.5 (46.0 to 47.0) |"),
        ("starts", "| version 3, medium | 5.0 / 5.0 | 8.0 / 0.8 | 1.0 / 1.0 |"),
        ("starts", "2 or 3 starts of each"),
        ("rivals", "| RoPE forward, 1 x 2 | 10.0 | 2.00 | 1.01 | 0.99 |"),
        ("kernels", "4,000 GB/s (bytes read plus bytes written), and 8192³ matmuls reach fp32 50, bf16 2 TFLOP/s"),
        ("ablation3", "| a | 1.38 (1.25 to 1.50) | 2.25 (2.00 to 2.50) | -2,000, +1 | -4, -1 |"),
        ("ablation3", "5.000 ms with all switches off and 2.500 ms with all on. Not judged: 2 rounds of the 5 needed."),
    ],
)
def test_tables_by_hand(table, line, recorded):
    text = ladder.tables_of(Record(recorded))[table]
    assert line in text, text
    assert "| V1 |" not in text or table != "v3"
    assert "Hugging Face" not in text


def test_the_ladder_has_dots_where_nothing_was_measured(recorded):
    tables = ladder.tables_of(Record(recorded))
    assert "peers" not in tables and tables["ladder"] == tables["ladder_small"]
    page = recorded / "page.md"
    page.write_text("<!-- ladder:begin -->\n<!-- ladder:end -->\n")
    text, _ = ladder.filled(page, tables, Record(recorded))
    assert f"({os.path.relpath(SCRIPTS[1].parent, recorded)}/README.md)" in text  # links lead from the page
    lines = tables["ladder"].replace(f"{REPOSITORY}/", "").splitlines()
    assert lines[2:] == [
        "| first | plain ([version 1](version1_pytorch_baseline/README.md)) |  | ... | ... |  |",
        "| flag | an idea | ... | ... | ... | first |",
        f"|  | {ladder.ROADS} |  |  |  |  |",
        "| compiled | a compiler | ... | ... | ... | flag |",
        "| written | kernels ([version 3](version3_triton/README.md)) | ... | ... | ... | flag |",
        "| library | operators ([version 4](version4_pytorch_sdpa/README.md)) | ... | ... | ... | flag |",
        "|  | a library's model |  | ... | ... |  |",
    ]


def measured(preset, graph, date, times, count=6, known=(*LADDER, *PEERS)):
    """Return a column: {name: times of the rounds in ms}, two rounds of each start."""
    chosen = [rung for rung in known if rung.name in times]
    told = {"status": "ok", "reason": None, "parts": "a library 1.2", "peak_mib": 77.0, "loss": 6.1, "warm_s": 12.3}
    steps = [{name: [ms[i]] * 3 for name, ms in times.items()} for i in range(count)]
    found = [{"start": i // 2, "turn": i, "steps_ms": step} for i, step in enumerate(steps)]
    content = {"preset": preset, "graph": graph, "options": "", "again": "flag", "record": RECORD | {"date": date}}
    return rungs.Column(content | {"rungs": [rung.recorded() | told for rung in chosen], "rounds": found})


def test_the_ladder_by_hand(recorded):
    """The flag takes 2 ms, the kernels are 1.25 to 2 times as fast, the library within the noise of 3 %."""
    times = {"flag": [2.0] * 6, "flag again": [2.0, 2.06, 2.0, 1.98, 2.0, 2.0], "peer": [3.0] * 6}
    times |= {"written": [1.0, 1.6, 1.25, 1.25, 1.25, 1.25], "library": [1.96] * 6}
    older = measured("medium", True, "2026-01-01T00:00:00+00:00", times | {"flag": [9.0] * 6})
    newest = measured("medium", True, "2026-01-02T00:00:00+00:00", times)
    cut_off = measured("medium", True, "2026-01-03T00:00:00+00:00", times | {"flag": [9.0] * 6}, count=4)
    slow = {"flag": [4.0] * 6, "compiled": [2.0] * 6, "flag again": [4.0] * 6}
    eager = measured("medium", False, "2026-01-02T00:00:00+00:00", slow)
    for part, columns in (("ladder", [newest, older]), ("ladder_two", [cut_off, eager])):
        (recorded / part).mkdir()
        rungs.write_columns(columns, recorded / part / "ladder.json")
    text = ladder.tables_of(Record(recorded))["ladder"]
    for line in (
        "an idea | ... | 2.000 | 4.000 | first |",
        "a compiler | 2.00x (2.00 to 2.00), eager | ... | 2.000 | flag |",
        "version3_triton/README.md)) | 1.60x (1.25 to 2.00) | 1.250 | ... | flag |",
        "version4_pytorch_sdpa/README.md)) | no difference shown | 1.960 | ... | flag |",
        "|  | a library's model |  | 3.000 | ... |  |",
        "- a library's model: a library 1.2",
        "| a library's model | 2.40x (1.88 to 3.00) | ... |",
        "row flag differs by up to 3.0 % ",
        "row written, deviates by up to 28.0 % ",
        "6 rounds over 3 starts. Measured on Toy GPU, driver 580.1",
    ):
        assert line in text, text
    assert "9.000" not in text


def test_steps_gains_and_memory_over_the_vocabulary(recorded):
    """Of 1,000 entries one round too few was measured; 32,000 was measured anew, and each has a part of its own."""
    times = {"v2": [9.0] * 6, "v2 again": [9.0, 9.09, 9.0, 9.0, 9.0, 9.0], "hf liger": [3.0] * 6}
    times |= {"v3 whole": [1.0] * 6, "v3": [2.0] * 6}
    for V, date, faster, count in ((1000, 3, 1, 4), (128256, 2, 1, 6), (32000, 1, 1, 6), (32000, 4, 2, 5)):
        faster = {name: [ms / faster for ms in each] for name, each in times.items()}
        column = measured("medium", True, f"2026-01-0{date}", faster, count, rungs.VOCABULARY)
        column.content |= {"options": f"--vocab-size {V}", "again": "v2"}
        part = recorded / f"vocabulary-{V}"
        part.mkdir(exist_ok=True)
        file = part / "vocabulary.json"
        rungs.write_columns([*(rungs.read_columns(file) if file.exists() else []), column], file)
    text = ladder.tables_of(Record(recorded))["vocabulary"]
    for line in (
        "| step, ms | V = 1,000 | V = 32,000 | V = 128,256 |",
        "| V3, in chunks | ... | 1.000 | 2.000 |",
        "| V4 | ... | ... | ... |",
        "| V3, in chunks, over V3, whole logits | ... | 0.50x (0.50 to 0.50) | 0.50x (0.50 to 0.50) |",
        "| V3, in chunks | ... | 77 | 77 |",
        "We measured 5 to 6 rounds over 3 starts. ",
        "v2 differs by up to 1.0 % within a round. Measured on Toy GPU",
    ):
        assert line in text, text
    words = "vocabulary_step 32000 v3; vocabulary_peak 128256 v3; vocabulary_step 1000 v3; vocabulary_peak 32000 v4"
    found = [facts.values_of(Record(recorded), line.split())[0] for line in words.split("; ")]
    assert found == [[1.0], [77 * 2**20], [None], [None]]
    for line in ("vocabulary_step 1001 v3", "vocabulary_step 1000 h"):
        with pytest.raises(ValueError, match="is none of"):
            facts.values_of(Record(recorded), line.split())


def test_the_ladder_says_how_a_tuned_rung_was_found(recorded):
    column = measured("medium", True, "2026-01-02T00:00:00+00:00", {"flag": [2.0] * 6, "peer": [3.0] * 6})
    column.told["peer"]["tuning"] = {"chosen": "two", "steps_ms": {"one": 4.0, "two": 3.0}, "seconds": 61.4}
    (recorded / "ladder").mkdir()
    rungs.write_columns([column], recorded / "ladder" / "ladder.json")
    text = ladder.tables_of(Record(recorded))["ladder"]
    assert "- a library's model: a library 1.2 (the fastest of 2 variants, tuned in 61 s)" in text.splitlines()


def test_the_ladder_says_that_memory_made_groups(recorded):
    column = measured("medium", True, "2026-01-02T00:00:00+00:00", {"flag": [2.0] * 6, "written": [1.0] * 6})
    column.rounds.append({"start": 0, "turn": 0, "steps_ms": {"flag": [2.0] * 3}})  # once more, in the second group
    told = ladder.told_of(column, Record(recorded))
    assert "6 to 7 rounds over 3 starts" in told and "a gain uses the 6 rounds" in told


def test_other_gpus_stand_beside_this_one(recorded):
    assert ladder.other_gpus_table(Record(recorded)) is None
    for folder, device, slow in ((recorded, "GPU A", 1), (recorded.parent / "another", "GPU B", 2)):
        times = {"flag": [4.0 * slow] * 6, "flag again": [4.0 * slow] * 6, "written": [2.0] * 6}
        column = measured("medium", True, "2026-01-02T00:00:00+00:00", times)
        column.content["record"]["device"] = device
        (folder / "ladder-medium").mkdir(parents=True)
        rungs.write_columns([column], folder / "ladder-medium" / "ladder.json")
        if device == "GPU A":
            assert ladder.other_gpus_table(Record(recorded)) is None
    text = ladder.other_gpus_table(Record(recorded))
    header, _, *lines = text.splitlines()
    assert header == "|  | GPU A, ms | gain | GPU B, ms | gain |"
    assert "| written | 2.000 | 2.00x (2.00 to 2.00) | 2.000 | 4.00x (4.00 to 4.00) |" in lines
    assert "| compiled | ... | ... | ... | ... |" in lines
    assert "GPU B, driver 580.1" in text and "GPU A, driver" not in text  # this record's line stands below its ladder


def test_a_column_with_too_few_rounds_is_in_no_table(recorded):
    """A second group of a round, which memory had no room for beside the first, is no round."""
    (recorded / "ladder").mkdir()
    for count in (4, 5):
        column = measured("medium", True, "2026-01-02T00:00:00+00:00", {"flag": [3.0] * 6}, count=count)
        column.rounds.extend([round_ | {"steps_ms": {"compiled": [2.0]}} for round_ in column.rounds])
        rungs.write_columns([column], recorded / "ladder" / "ladder.json")
        assert len(rungs.columns_of(Record(recorded), "ladder")) == (count == 5)


def test_the_gpus_show_the_same_gains():
    shown = []
    for name in ("nvidia-h200_2026-11-23", "nvidia-h100_2026-11-25"):
        column = rungs.columns_of(Record(records.RECORDED / name), "ladder")["medium", True]
        gains = {rung.name: column.gain(rung.name, rung.base) for rung in column.rungs.values() if rung.base}
        shown.append({rung: gain.ratio > 1 for rung, gain in gains.items() if gain.shown})
    assert shown[0] == shown[1]


def test_another_script_than_the_commit_s_is_a_fault_of_the_ladder_too(recorded):
    column = measured("medium", True, "2026-01-02T00:00:00+00:00", {"flag": [3.0] * 6, "peer": [3.0] * 6})
    column.content["record"]["commit"] = description.git("rev-parse", "HEAD")
    hashes = {"flag": description.hash_of(rungs.script_of(column.rungs["flag"])), "peer": "0"}
    for name, sha256 in hashes.items():
        column.told[name]["script_sha256"] = sha256
    (recorded / "ladder").mkdir()
    rungs.write_columns([column], recorded / "ladder" / "ladder.json")
    (fault,) = ladder.faults_of_record(Record(recorded))
    assert fault.startswith("scripts/common/measuring/peers.py of commit") and fault.endswith("is not what ran")


def measured_peers(folder, preset, date, times):
    """Write a part of one column, and return the column."""
    column = measured(preset, True, f"2026-01-0{date}T00:00:00+00:00", times, count=1)
    column.content["options"] = ""
    folder.mkdir()
    rungs.write_columns([column], folder / "peers.json")
    return column


def test_the_peer_s_variants_by_hand(recorded):
    """A failed one has its reason below; the newest measurement counts, and the fastest of a column is bold."""
    column = measured_peers(recorded / "peers", "medium", 2, {"one": [3.0], "two": [4.0]})
    column.told["two"].update(status="failed", reason="no such kernel")
    del column.rounds[0]["steps_ms"]["two"]
    rungs.write_columns([column], recorded / "peers" / "peers.json")
    measured_peers(recorded / "peers-small", "small", 3, {"one": [2.0], "two": [1.0]})
    measured_peers(recorded / "peers-later", "small", 4, {"two": [1.5]})
    lines = ladder.tables_of(Record(recorded))["peers"].splitlines()
    assert lines[:7] == [
        "| variant | small, ms | medium, ms | medium, peak MiB | medium, ready after, s |",
        "| --- | ---: | ---: | ---: | ---: |",
        "| a way to run the peer | 2.000 | **3.000** | 77 | 12 |",
        "| another way | **1.500** | failed | 77 | 12 |",
        "",
        "medium, with a graph: another way: no such kernel",
        "",
    ]
    dates = [re.search(r"; (2026-\d+-\d+),", line)[1] for line in lines if line.startswith("Measured on")]
    assert sorted(dates) == ["2026-01-02", "2026-01-03", "2026-01-04"]


def test_a_variant_that_is_not_for_this_preset_has_no_row(recorded):
    column = measured_peers(recorded / "peers", "small", 2, {"one": [3.0], "two": [4.0]})
    column.told["two"].update(status="not run", reason=None)
    del column.rounds[0]["steps_ms"]["two"]
    rungs.write_columns([column], recorded / "peers" / "peers.json")
    table = ladder.tables_of(Record(recorded))["peers"]
    assert "| a way to run the peer | **3.000** | 77 | 12 |" in table and "another" not in table


def test_long_sequences_have_columns_of_their_own(recorded):
    """Facts and the table of variants name them; how long a variant takes to be ready is of the preset's own length."""
    for part, kind, name, ms, options in (
        ("ladder", "ladder", "flag", 2.0, ""),
        ("ladder-long", "ladder", "flag", 4.0, rungs.LONG),
        ("peers", "peers", "compiled", 3.0, ""),
        ("peers-long", "peers", "compiled", 5.0, rungs.LONG),
    ):
        column = measured("medium", True, "2026-01-03T00:00:00+00:00", {name: [ms] * 6}, known=(*LADDER, *rungs.PEERS))
        column.content["options"] = options
        column.told[name]["warm_s"] = ms
        (recorded / part).mkdir()
        rungs.write_columns([column], recorded / part / f"{kind}.json")
        (recorded / part / "record.json").write_text(json.dumps(RECORD))
    record = Record(recorded)
    words = (
        "rung medium graph flag; rung medium:long graph flag; rung small:long graph flag; peer_is_ready medium compiled"
    )
    assert [facts.values_of(record, line.split())[0] for line in words.split("; ")] == [[2.0], [4.0], [None], [3000.0]]
    with pytest.raises(ValueError, match="wide is none of"):
        facts.values_of(record, "rung medium:wide graph flag".split())
    lines = ladder.tables_of(record)["peers"].splitlines()
    assert lines[0].startswith("| variant | medium, ms | medium, T = 4,096, ms | medium, peak MiB |")
    assert lines[2] == "| as its users run it | **3.000** | **5.000** | 77 | 3 |"


def test_an_ablation_of_five_rounds_is_judged_by_its_pair(recorded):
    path = recorded / "ablation3" / "ablation.json"
    study = json.loads(path.read_text())
    for row in study["combinations"]:
        row["steps_ms"] = [row["step_ms"]] * 5
    study["combinations"][1]["steps_ms"][3] *= 1.5  # one of five: the gain's median stays
    study["again_ms"] = [2.5, 2.5, 3.2, 2.5, 2.5]  # which differs by more than 5 / 4
    path.write_text(json.dumps(study))
    text = ladder.tables_of(Record(recorded))["ablation3"]
    assert "'a', deviates by up to 50.0 % " in text
    assert "| a | no difference shown | 2.00x (2.00 to 2.00) | -2,000, +1 | -4, -1 |" in text and "judged" not in text
    assert "all on differs by up to 28.0 % " in text and "5 rounds" in text


def test_a_time_whose_way_is_named_comes_from_the_host_that_timed_both_ways(recorded):
    found = Record(recorded)
    for row in found.suite()["rows"]:
        row["step_ms"] *= 0.9
    ways = [found.row("v1", "small", "float32", way)["step_ms"] for way in ("eager", "graph")]
    assert ways == [100.0, 50.0] and found.row("v1", "small", "float32")["step_ms"] == 90.0
    assert found.row("v3", "small", "float32", "graph")["step_ms"] == 9.0  # which the part graph lacks


def test_a_part_that_was_not_recorded_has_no_table(recorded):
    tables = ladder.tables_of(Record(recorded))
    assert "ablation2" not in tables and "v4" not in tables
    (recorded / "kernels" / "record.json").unlink()  # cut off: not complete
    assert "kernels" not in ladder.tables_of(Record(recorded))


def test_a_part_that_the_run_lacks_is_another_run_s_which_its_line_names(recorded):
    newer = recorded.parent / "toy_2026-02-03"
    write_part(newer, "headline", read_results(recorded / "headline" / "suite.json"))
    tables = ladder.tables_of(Record(newer))
    for table in ("graph", "kernels", "ddp", "ablation3"):
        assert "`scripts/recorded/toy_2026-01-02`" in tables[table]
    assert "`scripts/recorded/toy_2026-02-03`" in tables["v3"]
    assert "/toy_2026-01-02/pictures/scaling.png" in pictures.texts_of(Record(newer))["picture-scaling"]


@pytest.fixture
def page(recorded, tmp_path, monkeypatch):
    """The only page, and the recorded run as the newest."""
    page = tmp_path / "README.md"
    monkeypatch.setattr(ladder, "all_pages", lambda: [page])
    monkeypatch.setattr(ladder, "newest_record", lambda: Record(recorded))
    return page


def test_check_is_green_after_write_and_red_after_a_change(page, capsys):
    page.write_text(
        "# T\n\n<!-- v3:begin -->\nold\n<!-- v3:end -->\n\n1.00 ms<!-- step v3 small float32 --> <!-- x:begin -->\n"
    )
    assert [ladder.main(words) for words in ([], ["--write"], [])] == [1, 0, 0]
    text = page.read_text()
    assert (
        "old" not in text and "10.00 ms<!-- step v3 small float32 -->" in text and text.endswith("<!-- x:begin -->\n")
    )
    for wrong, said in (("| 10.00 | 10.00 to", "-| V3 | fp32"), ("10.00 ms", "-11.00 ms")):
        page.write_text(text.replace(wrong, wrong.replace("10.00", "11.00")))
        capsys.readouterr()
        assert ladder.main([]) == 1
        shown = capsys.readouterr()
        assert said in shown.out and "disagrees with what was recorded" in shown.err
    page.write_text(text + "... ms<!-- step v4 small float32 -->\n")  # which was not recorded
    assert ladder.main([]) == 0
    page.write_text(text + "2.00 ms<!-- stpe v4 small float32 -->\n")
    assert [ladder.main(words) for words in ([], ["--write"])] == [1, 1]
    assert "README.md: <!-- stpe v4 small float32 -->: maintain/facts.py has no stpe" in capsys.readouterr().err


def test_check_is_red_where_another_script_ran_than_the_commit_has(page, recorded, capsys):
    page.write_text("")
    assert ladder.main([]) == 0
    results = read_results(recorded / "headline" / "suite.json")
    results["record"]["commit"] = description.git("rev-parse", "HEAD")
    write_results(results, recorded / "headline" / "suite.json")
    assert ladder.main([]) == 1
    assert f"tiny_llama_v1.py of commit {results['record']['commit'][:10]} is not what ran" in capsys.readouterr().err


@pytest.mark.parametrize("part", ["graph", "ddp"])
def test_another_script_than_the_commit_s_is_a_fault_of_every_part_of_the_suite(recorded, part):
    assert ladder.faults_of_record(records.Record(recorded)) == []
    results = read_results(recorded / part / "suite.json")
    results["record"]["commit"] = description.git("rev-parse", "HEAD")
    write_results(results, recorded / part / "suite.json")
    faults = ladder.faults_of_record(records.Record(recorded))
    assert faults and all(fault.endswith("is not what ran") for fault in faults)


def test_a_start_without_the_other_preset_s_is_no_table(recorded):
    assert len(ladder.starts_table(Record(recorded)).split("| version 2, compiled |")) == 2
    (recorded / "start-medium" / "record.json").unlink()
    assert ladder.starts_table(Record(recorded)) is None


def test_starts_measured_apart_say_where_and_how_often_each_was(recorded):
    """Two origins stood above the table once small was measured again, and neither named its preset."""
    assert ladder.starts_table(Record(recorded)).startswith("small and medium: Measured on Toy GPU")
    shutil.rmtree(recorded / "start-small")
    starts = {name: [started(8)] * 3 for name in "hg"}
    write_starts(recorded / "start-small", "small", starts, date="2026-01-07")
    lines = ladder.starts_table(Record(recorded)).split("\n\n")[:2]
    assert re.match("small: Measured on Toy GPU.* 2026-01-07.* 3 starts of each, in turns", lines[0])
    assert re.match("medium: Measured on Toy GPU.* 2026-01-02.* 2 or 3 starts of each, in turns", lines[1])


def test_a_start_that_failed_counts_as_none(recorded):
    """The line above the table counted it, and a row without any other start ended the tool."""
    shutil.rmtree(recorded / "start-small")
    failed = {"reason": "no memory"}
    write_starts(recorded / "start-small", "small", {"g": [started(8), failed, started(8)], "h": [failed, failed]})
    table = ladder.starts_table(Record(recorded))
    assert "0 or 2 starts of each" in table.split("\n\n")[0]
    assert "| version 3 | ... | ... | 14.0 (13.0 to 16.0) |" in table
    assert "| version 3, medium |" in table and "| version 3, small |" not in table


@pytest.mark.parametrize("preset", ["small", "medium"])
def test_starts_of_another_script_than_the_commit_s_are_a_fault(recorded, preset):
    assert ladder.faults_of_record(records.Record(recorded)) == []
    commit = description.git("rev-parse", "HEAD")
    (recorded / f"start-{preset}" / "record.json").write_text(json.dumps(RECORD | {"commit": commit}))
    faults = ladder.faults_of_record(records.Record(recorded))
    assert [fault.split()[0] for fault in faults] == [f"{SCRIPTS[v].relative_to(REPOSITORY)}" for v in (2, 3)]


def test_phases_of_starts_as_facts(recorded):
    record = Record(recorded)
    assert facts.values_of(record, ["start_phase", "first_step", "h", "filled"])[0] == [800, 800]
    assert facts.values_of(record, ["start_phase", "first_step", "g", "empty"])[0] == [30500, 40500]
    assert facts.values_of(record, ["imports_of_starts"])[0] == [5000, 5000]
    for words in ("start_phase steps h filled", "start_phase imports h cold", "start_phase imports z empty"):
        with pytest.raises(ValueError):
            facts.values_of(record, words.split())


@pytest.mark.parametrize("name", ["toy_2026-01-02", "rivals_2026-01-03"])
def test_kernels_timed_with_another_script_than_the_commit_s_are_a_fault(recorded, name):
    """Those of the run that makes the pages, and those beside rivals, which are a folder of their own."""
    rivals = [operation_of("norm", V3=10, PyTorch=30, torch_compile=9)]
    kernels_of(recorded.parent / "rivals_2026-01-03", "2026-01-03", rivals, rivals)
    assert ladder.faults_of_record(records.Record(recorded)) == []
    folder = recorded.parent / name / "kernels"
    commit = description.git("rev-parse", "HEAD")
    (folder / "record.json").write_text(json.dumps(RECORD | {"date": "2026-01-03", "commit": commit}))
    last = max(folder.glob("kernels*.json"))
    last.write_text(json.dumps(json.loads(last.read_text()) | {"environment": {"script_sha256": "0"}}))
    (fault,) = ladder.faults_of_record(records.Record(recorded))
    assert fault.endswith(f"tiny_llama_v3.py of commit {commit[:10]} is not what ran")


def test_the_newest_complete_run_is_the_default_and_contributed_ones_make_no_pages(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "RECORDED", tmp_path)
    with pytest.raises(ValueError, match="no complete recorded run"):
        records.newest_record()
    for name, month in (("b_old", 1), ("a_new", 2), ("c_cut_off", 3), ("contributed/d", 4)):
        results = results_of([run_of(FIRST, 0, 10.0)], date=f"2026-0{month}-01")
        write_part(tmp_path / name, "headline", results, complete=name != "c_cut_off")
    assert records.newest_record().folder == tmp_path / "a_new"


def test_a_part_is_this_record_s_or_else_the_newest_other_one_s(tmp_path):
    results = results_of([run_of(FIRST, 0, 10.0)])
    for name, part, day in (("a", "headline", 1), ("b", "losses", 3), ("c", "losses", 2)):
        write_part(tmp_path / name, part, results)
        (tmp_path / name / part / "record.json").write_text(json.dumps({"date": f"2026-01-0{day}"}))
    first = Record(tmp_path / "a")
    assert first.holding("losses").folder == tmp_path / "b" and first.holding("trace") is first
    assert Record(tmp_path / "c").holding("losses").folder == tmp_path / "c"
    assert first.holding("loss*").folder == tmp_path / "b" and first.holding("head*") is first


def test_the_pages_say_what_was_recorded():
    assert ladder.main([]) == 0


# ---------------------------------------------------------------- kernels beside rivals


def operation_of(name, **us):
    names = {"torch_compile": "torch.compile", "SDPA_flash": "SDPA flash", "SDPA_cudnn": "SDPA cudnn"}
    candidates = [{"name": names.get(one, one), "reason": None, "us": {"median": ms}} for one, ms in us.items()]
    refused = {"name": "SDPA math", "reason": "no kernel"}
    return {"operation": name, "size": "4 x 8", "unit": "GB/s", "candidates": [*candidates, refused]}


def kernels_of(folder, date, *runs):
    folder = folder / "kernels"
    folder.mkdir(parents=True)
    (folder / "record.json").write_text(json.dumps(RECORD | {"date": date}))
    for number, operations in enumerate(runs, 1):
        (folder / f"kernels_{number}.json").write_text(json.dumps({"operations": operations}))


def test_kernels_beside_their_rivals(tmp_path):
    """From the newest record that timed a rival; medians with their range.

    Who was faster in every run is named, also beside a kernel that has no row.
    """
    runs = [
        [
            operation_of("norm", V3=10, PyTorch=30, torch_compile=9, Liger=9 + more),
            operation_of("own", V3=10, SDPA_flash=9 + more, SDPA_cudnn=9),
        ]
        for more in (0, 3, 0)
    ]
    kernels_of(tmp_path / "old", "2026-01-01", *reversed(runs))
    kernels_of(tmp_path / "new", "2026-01-02", *runs)
    kernels_of(tmp_path / "newest without", "2026-01-03", [operation_of("norm", V3=10, PyTorch=20)])
    told, table = ladder.rivals_table(tmp_path).split("\n\n")
    assert "scripts/recorded/new`" in told and "3 runs" in told
    assert told.endswith("Faster than V3's in every run: torch.compile's norm, 4 x 8; SDPA cudnn's own, 4 x 8.")
    assert table.splitlines()[2:] == ["| norm, 4 x 8 | 10.0 | 3.00 | 0.90 | 0.90 (0.90 to 1.20) |"]
    assert ladder.rivals_table(tmp_path / "old") is None  # no record is below it
