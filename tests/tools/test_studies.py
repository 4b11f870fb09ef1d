"""The studies: regression check, fusion ablation and the search for a batch size."""

import json
import math
import re
import shlex
import statistics
from types import SimpleNamespace
from unittest import mock

import pytest

import benchmark_suite
import fusion_ablation_study as ablation
import optimize_batch_size as batch_tool
import performance_regression_test as regression
from common.command_line import Failure
from common.measuring import runs
from common.ratios import NO_PAIR
from common.versions import load_version
from conftest import SIZES
from in_process import call, refused


@pytest.mark.parametrize("written", ["--metrics-file x.json", "--metrics-file=x.json"])
@pytest.mark.parametrize("main", [ablation.main, batch_tool.main, benchmark_suite.parse_arguments])
def test_a_metrics_file_is_refused_by_tools_that_name_their_own(main, written, capsys, monkeypatch):
    monkeypatch.setattr(runs, "run_process", None)  # nothing is started
    refused(main, written.split(), capsys, "leave out --metrics-file")


# ---------------------------------------------------------------- performance_regression_test.py


def metrics(folder, name, times, **changes):
    """A metrics file with these step times in ms; changes replace entries of its parts."""
    low, median, high = statistics.quantiles(times, n=4, method="inclusive")
    content = {
        "version": 1,
        "config": {"hidden_dim": 32, "num_layers": 1},
        "options": {"batch_size": 2, "seq_len": 16, "data": None, "use_amp": False, "tf32": False},
        "environment": {"device": "MI300X", "device_type": "cuda", "torch": "2.13", "cuda": None, "hip": "7.0"},
        "steps": [{"step_ms": time} for time in times],
        "summary": {"parameters": 10, "parameters_trained": 10, "first_loss": 6.9},
    }
    content["summary"]["step_ms"] = {"p25": low, "median": median, "p75": high}
    for part, values in changes.items():
        content[part] = content[part] | values
    path = folder / f"{name}.json"
    path.write_text(json.dumps(content))
    return path


def judge(folder, before, after, *options):
    """Run the test on a metrics file for each round, with these medians in ms."""
    arguments = []
    for option, side in (("--baseline-results", before), ("--current-results", after)):
        files = [metrics(folder, f"{option}{i}", [ms - 1, ms, ms + 5]) for i, ms in enumerate(side)]
        arguments += [option, *map(str, files)]
    return regression.main([*arguments, *options])


@pytest.mark.parametrize(
    ("before", "after", "wanted", "status", "words"),
    [
        # within rounds 2, 1.5, 1.2, 3, 2.5: the median of the ratios, not the ratio of the medians
        ([20, 30, 30, 30, 50], [10, 20, 25, 10, 20], "1.2", 0, "2.00x, in the rounds 1.20x to 3.00x\nPASSED"),
        ([20, 30, 30, 30, 50], [10, 20, 25, 10, 20], "1.3", 3, "too close to tell"),
        ([20, 30, 30, 30, 50], [10, 20, 25, 10, 20], "3.0", 3, "too close to tell"),
        ([20, 30, 30, 30, 50], [10, 20, 25, 10, 20], "3.1", 1, "FAILED: slower than the 3.1x"),
        ([22] * 5, [25, 25, 25, 25, 22.5], "1.0", 1, "0.88x, in the rounds 0.88x to 0.98x\nFAILED"),
        ([22] * 5, [25, 25, 25, 25, 21.5], "1.0", 3, "0.88x, in the rounds 0.88x to 1.02x\ntoo close to tell"),
        ([20, 20], [10, 10], "2.0", 0, "judged by 2 rounds: 5 are better\nPASSED"),
        ([20] * 4, [10] * 4, "2.0", 0, "judged by 4 rounds: 5 are better\nPASSED"),
        ([20] * 5, [10] * 5, "2.0", 0, "2.00x, in the rounds 2.00x to 2.00x\nPASSED"),
        ([22], [25], "1.0", 1, "judged by one pair of runs, so the noise isn't known: give 5 files each"),
        ([20], [10], "2.0", 0, "PASSED: at least the 2.0x"),
    ],
)
def test_the_speed_up_its_range_and_verdict_by_hand(before, after, wanted, status, words, tmp_path, capsys):
    assert judge(tmp_path, before, after, "--min-speedup", wanted) == status
    assert words in capsys.readouterr().out


@pytest.mark.parametrize("wanted", ["nan", "inf", "-1", "0", "fast"])
def test_a_wanted_speed_up_that_is_none_is_refused(wanted, tmp_path, capsys):
    refused(lambda more: judge(tmp_path, [20], [10], "--min-speedup", wanted), [], capsys, "--min-speedup: ")


@pytest.mark.parametrize("side", ["base", "other"])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"step_ms": {"median": 0.0}}, "step_ms median must be a finite, positive number, got 0.0"),
        ({"step_ms": {"median": -20.0}}, "step_ms median must be a finite, positive number, got -20.0"),
        ({"step_ms": {"median": float("nan")}}, "'NaN' isn't a number"),
        ({"step_ms": {"median": float("inf")}}, "'Infinity' isn't a number"),
        ({"step_ms": {"median": None}}, "got None"),
        ({"step_ms": 3.0}, "step_ms median must be a finite, positive number, got None"),
        ({"parameters": None, "parameters_trained": None}, "parameters must be a finite, positive number, got None"),
        ({"parameters": 0, "parameters_trained": 0}, "parameters must be a finite, positive number, got 0"),
        ({"parameters": 9, "parameters_trained": 9}, "not comparable (parameters: "),
        ({"final_loss": None}, "final_loss must be a finite, positive number, got None"),  # it became NaN
        ({"first_loss": None}, "first_loss must be a finite, positive number, got None"),
        ({"first_loss": True}, "first_loss must be a finite, positive number, got True"),
    ],
)
def test_numbers_that_mean_nothing_are_refused_on_both_sides(change, words, side, tmp_path, capsys):
    changes = {name: {"summary": change} if name == side else {} for name in ("base", "other")}
    files = {name: metrics(tmp_path, name, [20.0] * 9, **changes[name]) for name in changes}
    arguments = ["--baseline-results", files["base"], "--current-results", files["other"]]
    refused(regression.main, arguments, capsys, words)


def test_every_round_is_checked_and_needs_both_sides(tmp_path, capsys):
    base, other = (metrics(tmp_path, name, [20.0] * 9) for name in ("base", "other"))
    half = metrics(tmp_path, "half", [20.0] * 9, summary={"parameters_trained": 5})
    more = metrics(tmp_path, "more", [20.0] * 9)
    arguments = ["--baseline-results", base, more, "--current-results", other]
    refused(regression.main, arguments, capsys, "a file of every round each, got 2 and 1")
    refused(regression.main, [*arguments, half], capsys, "trained 5 of 10", status=1)


def test_a_run_is_no_second_run(tmp_path, capsys):
    """Neither beside itself, nor as one more round, by whatever name."""
    base, other = (metrics(tmp_path, name, [20.0] * 9) for name in ("base", "other"))
    (tmp_path / "link").symlink_to("other.json")
    arguments = ["--baseline-results", base, "--current-results"]
    refused(regression.main, [*arguments, base], capsys, f"{base} is named twice")
    more = metrics(tmp_path, "more", [20.0] * 9)
    rounds = ["--baseline-results", base, more, "--current-results", other, tmp_path / "link"]
    refused(regression.main, rounds, capsys, f"{other} is named twice")


def test_a_ratio_that_is_no_number_is_refused(tmp_path, capsys):
    base = metrics(tmp_path, "base", [1.0] * 9, summary={"step_ms": {"median": 1e308}})
    other = metrics(tmp_path, "other", [1.0] * 9, summary={"step_ms": {"median": 1e-308}})
    for first, second, ratio in ((base, other, "inf"), (other, base, "0.0")):
        arguments = ["--baseline-results", first, "--current-results", second]
        refused(regression.main, arguments, capsys, f"must be finite and positive, got {ratio}")


@pytest.mark.parametrize(("use_amp", "status"), [(True, 2), (False, 0)])
def test_a_16_bit_format_counts_where_it_was_used(use_amp, status, tmp_path, capsys):
    options = [{"use_amp": use_amp, "amp_dtype": name} for name in ("bfloat16", "float16")]
    base, other = (metrics(tmp_path, name, [20.0] * 9, options=o) for name, o in zip("ab", options, strict=True))
    assert regression.main(["--baseline-results", str(base), "--current-results", str(other)]) == status
    assert ("not comparable (amp_dtype: bfloat16, float16)" in capsys.readouterr().err) == use_amp


@pytest.mark.parametrize(
    ("change", "words", "status"),
    [
        ({"environment": {"device": "H200"}}, "not comparable (device: MI300X, H200)", 2),
        ({"options": {"seq_len": 99}}, "not comparable (seq_len: 16, 99)", 2),
        ({"summary": {"parameters_trained": 5}}, "trained 5 of 10", 1),
        ({"summary": {"first_loss": 7.2}}, "the first loss is 7.2000, not 6.9000", 1),
    ],
)
@pytest.mark.parametrize("side", ["baseline", "current"])
def test_a_later_round_that_differs_on_one_side_alone_is_refused(side, change, words, status, tmp_path, capsys):
    """Its ratio would be one of the rounds, and decide the verdict."""
    arguments = []
    for name in ("baseline", "current"):
        first = metrics(tmp_path, f"{name} 1", [20.0] * 9)
        second = metrics(tmp_path, f"{name} 2", [20.0] * 9, **(change if name == side else {}))
        arguments += [f"--{name}-results", first, second]
    refused(regression.main, arguments, capsys, words, status)


@pytest.mark.parametrize(
    ("options", "bound"),
    [({}, 1e-4), ({"tf32": True}, 2**-10), ({"use_amp": True, "amp_dtype": "bfloat16"}, 2**-7)],
    ids=["float32", "tf32", "bfloat16"],
)
def test_first_losses_may_differ_by_what_the_precision_rounds(options, bound, tmp_path, capsys):
    base = metrics(tmp_path, "base", [20.0] * 9, options=options)
    for relative, status in ((0.9 * bound, 0), (1.1 * bound, 1)):
        summary = {"first_loss": 6.9 * (1 + relative)}
        other = metrics(tmp_path, "other", [10.0] * 9, options=options, summary=summary)
        assert regression.main(["--baseline-results", str(base), "--current-results", str(other)]) == status
        assert ("something else" in capsys.readouterr().err) == status


def test_runs_that_cannot_be_compared_are_refused(tmp_path, capsys):
    base = metrics(tmp_path, "base", [20.0] * 9)
    changed = [("config", "num_layers")]
    changed += [("environment", key) for key in ("device", "device_type", "torch", "cuda", "hip")]
    changed += [("options", key) for key in ("batch_size", "seq_len", "data", "use_amp", "tf32", "world_size")]
    for part, key in changed:
        other = metrics(tmp_path, "other", [10.0] * 9, **{part: {key: 99}})
        words = f"not comparable ({key}: "
        refused(regression.main, ["--baseline-results", base, "--current-results", other], capsys, words)
    other, nothing = tmp_path / "other.json", json.dumps(json.loads(base.read_text()) | {"summary": {}})
    for content, words in (
        ("{", "cut off or damaged"),
        ('{"summary": {"a": 1}}', "isn't a metrics file"),
        ("[1]", "isn't a metrics file"),
        (nothing, "has no measured step"),
    ):
        other.write_text(content)
        refused(regression.main, ["--baseline-results", base, "--current-results", other], capsys, words)
    refused(regression.main, ["--baseline-results", base, "--current-results", "none"], capsys, "cannot be read")


def test_the_documented_regression_command_reads_what_the_scripts_write(tmp_path):
    (tmp_path / "v2").mkdir()
    for version, name in ((1, "version1_baseline_metrics"), (2, "v2/version2_metrics")):
        file = tmp_path / f"{name}.json"
        assert load_version(version).main([*SIZES, "--num-steps", "6", "--metrics-file", str(file)]) == 0
    command = "performance_regression_test.py --baseline-results ../version1_baseline_metrics.json "
    result = call(2, command + "--current-results ./version2_metrics.json --min-speedup 0.01", cwd=tmp_path / "v2")
    assert "PASSED" in result.stdout and "judged by one pair of runs" in result.stdout


def test_metrics_of_another_format_are_damaged(tmp_path, capsys):
    precision = {"options": {"use_amp": "yes", "amp_dtype": "x"}}
    base, other = (metrics(tmp_path, name, [20, 20], **precision) for name in ("base", "other"))
    arguments = ["--baseline-results", base, "--current-results", other]
    refused(regression.main, arguments, capsys, "the baseline is cut off or damaged: it has no 'x'")
    other.write_text(json.dumps(json.loads(other.read_text()) | {"environment": {"device": "MI300X"}}))
    refused(regression.main, arguments, capsys, "its environment does not name cuda, device_type, hip, torch")


def test_an_option_of_files_that_is_repeated_adds_them(tmp_path, capsys):
    """The last one alone was read, and the other rounds were dropped without a word."""
    arguments = []
    for option, name, ms in (("baseline", "a", 20), ("current", "b", 10), ("baseline", "c", 20), ("current", "d", 9)):
        arguments += [f"--{option}-results", str(metrics(tmp_path, name, [ms, ms]))]
    assert regression.main(arguments) == 0
    assert "judged by 2 rounds" in capsys.readouterr().out


def test_of_a_cpu_the_machine_is_not_known(tmp_path, capsys):
    environment = {"environment": {"device": "x86_64", "device_type": "cpu"}}
    files = [metrics(tmp_path, name, [ms, ms], **environment) for name, ms in (("a", 20), ("b", 10))]
    assert regression.main(["--baseline-results", str(files[0]), "--current-results", str(files[1])]) == 0
    assert "name neither machine nor threads" in capsys.readouterr().out


# ---------------------------------------------------------------- fusion_ablation_study.py


def combination(on, steps, memory=100.0, kernels=10.0):
    middle = statistics.median(steps) if steps else None
    row = {"on": list(on), "name": on, "reason": None, "steps_ms": steps, "step_ms": middle}
    return row | {"peak_memory_mb": memory, "kernels": kernels}


def numbers_of(found):
    return found.ratio, found.low, found.high


def test_worth_of_switches_by_hand():
    rows = [
        combination("", [16.0, 16.0, 20.0, 16.0, 16.0], kernels=40.0),
        combination("a", [8.0, 8.0, 8.0, 8.0, 8.0], memory=90.0, kernels=30.0),
        combination("b", [16.0, 17.0, 15.0, 16.0, 16.0], kernels=40.0),
        combination("ab", [4.0, 4.0, 3.0, 4.0, 5.0], memory=80.0, kernels=30.0),
    ]
    again = [4.0, 4.0, 3.15, 4.0, 5.0]  # within 5 %
    first, second = ablation.worth(rows, ("a", "b"), again)
    # alone 16 / 8 and 20 / 8; on top of b 16 / 4 and, of the other rounds, 17 / 4, 15 / 3 and 16 / 5
    assert (first["switch"], first["pairs"]) == ("a", 2)
    assert numbers_of(first["alone"]) == (2, 2, 2.5) and numbers_of(first["last"]) == (4, 3.2, 5)
    # within a round the geometric mean of both pairs: 8 ** 0.5 in the first and the fourth
    assert first["speedup"].ratio == pytest.approx(8**0.5)
    assert numbers_of(first["speedup"])[1:] == (pytest.approx(6.4**0.5), pytest.approx(12.5**0.5))
    assert first["speedup"].noise == pytest.approx(math.log(1.05))
    assert (first["memory_mb"], first["kernels"]) == (-15, -10)
    # alone 16 / 16, 16 / 17, 20 / 15, 1, 1
    assert numbers_of(second["alone"]) == (1, pytest.approx(16 / 17), pytest.approx(4 / 3))
    text = ablation.as_text(rows, [first, second], again)
    assert "all on differs by up to 5.0 % " in text
    assert "'ab', deviates by up to 33.3 % " in text  # 4 / 3
    once = [row | {"steps_ms": row["steps_ms"][:1]} for row in rows]
    assert "deviates" not in ablation.as_text(once, ablation.worth(once, ("a", "b"), again[:1]), again[:1])
    assert text.endswith("worth most: a, 2.83x (2.53 to 3.54)")
    slower = [row | {"steps_ms": [20.0 + len(row["on"])] * 5} for row in rows]
    slower_text = ablation.as_text(slower, ablation.worth(slower, ("a", "b"), [22.0] * 5), [22.0] * 5)
    assert slower_text.endswith("no switch is shown to make the step faster")
    row = next(line for line in text.splitlines() if line.startswith("b ") and "1.41x" in line)
    assert re.search(r"no difference shown +2.00x \(1.60 to 2.67\)", row), row
    assert re.search(r"\nab .* 4.00x \(3.20 to 6.67\)", text), text
    json_row = ablation.plain(first)
    assert (json_row["last"], json_row["gains"]["last"]["shown"]) == (4, True) and json.dumps(json_row)
    # without its second run nothing is judged
    assert ablation.worth(rows, ("a", "b"))[0]["last"].missing == NO_PAIR
    # a combination that failed is left out of all pairs
    first, second = ablation.worth([rows[0], rows[1], combination("b", [])], ("a", "b"))
    assert (first["switch"], first["pairs"], first["last"]) == ("a", 1, None)
    assert (second["pairs"], second["speedup"], second["memory_mb"]) == (0, None, None)


def test_combinations_of_switches():
    assert [len(ablation.combinations(tuple("abcd"), every)) for every in (True, False)] == [16, 10]
    for every in (True, False):  # the two that a time limit must not leave out come first
        assert ablation.combinations(("a", "b"), every)[:2] == [frozenset(), frozenset("ab")]
    names = [ablation.name_of(frozenset(on), tuple("abcd")) for on in ("", "ac", "abd", "abcd")]
    assert names == ["none", "a + c", "all but c", "all"]


def test_the_switches_are_those_of_the_scripts():
    for version, switches in ablation.SWITCHES.items():
        names = {f"enable_{switch.replace('-', '_')}" for switch in switches}
        options = vars(load_version(version).parse_options([]))
        # AdamW in one kernel is no fusion of the model: all combinations are sixteen, and it is on in all of them
        # and the fused loss is one of memory.
        others = {"enable_pytorch_profiler", "enable_all_fusion", "enable_fused_optimizer", "enable_fused_loss"}
        if version == 3:
            others.add("enable_torch_compile")  # it adds to the kernels, and takes none away
        assert options.get("enable_fused_optimizer", True)
        assert names == {name for name in options if name.startswith("enable_")} - others


def test_the_documented_ablation_command(one_process):
    command = "fusion_ablation_study.py --all-combinations --switches qkv-fusion --rounds 1 --num-steps 2 --json - "
    content = json.loads(call(2, command + shlex.join(SIZES)).stdout)
    off, on = content["combinations"]
    # one product instead of three in each of forward, gradient of input and gradient of weight
    assert (off["name"], on["name"]) == ("none", "qkv-fusion")
    assert off["kernels"] - 60 < on["kernels"] < off["kernels"] - 6  # per step, of which three were profiled
    assert content["switches"][0]["speedup"] == pytest.approx(off["step_ms"] / on["step_ms"])
    assert [len(steps) for steps in on["every_step_ms"]] == [2] and content["again_every_step_ms"][0][1] > 0


def test_bad_input_of_the_ablation(capsys, monkeypatch):
    refused(ablation.main, ["--switches", "no-fusion", *SIZES], capsys, "'no-fusion': choose from qkv-fusion")
    refused(ablation.main, ["--rounds", "0"], capsys, "--rounds: must be")
    for limit in ("nan", "inf", "-5", "1_0"):
        refused(ablation.main, ["--time-limit", limit], capsys, f"must be a finite number of at least 0, got {limit}")
    refused(ablation.main, ["--num-heads", "5"], capsys, "--hidden-dim must be")

    monkeypatch.setattr(ablation, "train", mock.Mock(side_effect=Failure(1, "tiny_llama_v2.py failed: broken")))
    refused(ablation.main, ["--switches", "qkv-fusion", *SIZES], capsys, "no combination ran", status=1)


TIME_LIMITS = [(35, 3, 1), (75, 4, 1), (125, 4, 2)]


@pytest.mark.parametrize(("seconds", "ran", "rounds"), TIME_LIMITS)
def test_what_the_time_limit_leaves_out_of_the_ablation(seconds, ran, rounds, monkeypatch, tmp_path, capsys):
    """Each run takes 10 s of a clock that stands still otherwise; what is switched on takes 2 ms off a step of 9."""
    now = [0.0]
    monkeypatch.setattr(runs.time, "monotonic", lambda: now[0])

    def run(script, argv):
        now[0] += 10
        assert argv[[word.endswith("qkv-fusion") for word in argv].index(True) - 1] == "--graph"
        on = len({"--enable-qkv-fusion", "--enable-torch-compile"} & set(argv))
        steps = [{"step_ms": 9.0 - 2 * on + late} for late in (0, 0.5, -0.25)]
        return {"summary": {"peak_memory_mb": now[0]}, "steps": steps}

    monkeypatch.setattr(ablation, "train", run)
    monkeypatch.setattr(ablation, "read_profile", lambda folder: SimpleNamespace(calls=[None] * 7, steps=1))
    arguments = ["--all-combinations", "--switches", "qkv-fusion,torch-compile", *SIZES]
    arguments += ["--checkpoint-dir", str(tmp_path / "kept"), "--graph"]
    file = tmp_path / "ablation.json"
    assert ablation.main([*arguments, "--time-limit", str(seconds), "--json", str(file)]) == 1
    content = json.loads(file.read_text())
    assert content["options"][-4:] == ["--checkpoint-dir", "kept", "--graph", "--graph"]
    rows = content["combinations"]
    assert sum(row["reason"] is None for row in rows) == ran and len(rows[0]["steps_ms"]) == rounds
    assert [row["step_ms"] for row in rows[:3]] == [9, 5, 7]
    assert rows[1]["every_step_ms"] == [[5.0, 5.5, 4.75]] * rounds
    output = capsys.readouterr().out
    assert ("torch-compile: not run: no time was left" in output) == (ran < 4)
    peak = 20 if rounds == 1 else 60  # of the second run, and of the sixth, with which the second round begins
    words = f"not judged: {rounds} round{'s' * (rounds > 1)} of the 5 needed"
    assert re.search(rf"^qkv-fusion \+ torch-compile +5.000 +5.000 to 5.000 +{words} +{peak} +7$", output, re.MULTILINE)
    # record.sh shows the last line, and the status keeps its part open
    end = f"which is worth most is {words}\n{rounds} of 5 rounds: no time was left for the rest\n"
    assert output.endswith(f"\n{end}")


# ---------------------------------------------------------------- optimize_batch_size.py


def probe_of(limit, rate):
    """A device that holds so many sequences of 10 MB beside 100 MB, and computes rate(batch size) of them a second."""

    def probe(batch_size):
        if batch_size > limit:
            raise runs.OutOfMemory(1, "out of memory")
        speed = rate(batch_size)
        step = {"median": 1e3 * batch_size / speed}
        return {"samples_per_second": speed, "step_ms": step, "peak_memory_mb": 100 + 10 * batch_size}

    return probe


def test_the_largest_batch_is_found_and_the_first_that_does_not_fit_ends_the_search():
    rows = batch_tool.search(probe_of(23, lambda b: min(b, 2)), 1e9, 4096, to_the_limit=True)
    assert [row["outcome"] for row in rows] == ["fits"] * 5 + ["out of memory"]
    assert batch_tool.best(rows, "memory")["batch_size"] == 16
    rows = batch_tool.search(probe_of(23, lambda b: b), 230.0, 4096, to_the_limit=True)  # 100 + 10 b <= 230
    assert [row["outcome"] for row in rows] == ["fits"] * 4 + ["above the limit"]
    content = {"version": 2, "budget_mb": 230.0, "device_memory_mb": 500.0, "target": "memory", "probes": rows}
    text = batch_tool.as_text(content | {"best": batch_tool.best(rows, "memory")})
    assert text.endswith("memory: --batch-size 8, 8.0 samples/s, 180 MiB (36.0 % of the device)")
    assert re.search(r"\n +8 .* 180 +fits\n +16 .* 260 +above the limit\n", text)
    rows = batch_tool.search(probe_of(23, lambda b: b), 180.0, 8, to_the_limit=True)
    assert rows[-1]["batch_size"] == 8 and rows[-1]["outcome"] == "fits"  # all that it may take
    rows = batch_tool.search(probe_of(10**6, lambda b: b), 1e9, 7, to_the_limit=True)
    text = batch_tool.as_text(content | {"probes": rows, "best": batch_tool.best(rows, "memory")})
    assert text.endswith("a larger one may fit: --max-batch-size ended the search after 4")


def test_throughput_takes_the_fastest_batch_and_names_a_smaller_one_nearly_as_fast():
    rows = batch_tool.search(probe_of(10**6, lambda b: min(b, 8) + b / 1e6), 1e9, 4096, to_the_limit=False)
    assert [row["batch_size"] for row in rows] == [1, 2, 4, 8, 16, 32]
    found = batch_tool.best(rows, "throughput")
    assert found["batch_size"] == 32 and found["samples_per_second"] == max(row["samples_per_second"] for row in rows)
    content = {"version": 2, "budget_mb": 1e9, "device_memory_mb": 500.0, "target": "throughput", "probes": rows}
    lines = batch_tool.as_text(content | {"best": found}).splitlines()
    assert "best for throughput: --batch-size 32, 8.0 samples/s" in lines[-2]
    assert lines[-1] == "within 2 % of it: --batch-size 8, 8.0 samples/s, 180 MiB"
    for gain, last in ((0.009, 4), (0.011, 64)):  # of a doubling; two in a row must bring 2 %
        rows = batch_tool.search(probe_of(10**6, lambda b, g=gain: (1 + g) ** math.log2(b)), 1e9, 64, False)
        assert rows[-1]["batch_size"] == last
    none = batch_tool.search(probe_of(0, lambda b: b), 1e9, 8, to_the_limit=False)
    assert batch_tool.best(none, "throughput") is None and len(none) == 1


def test_the_documented_batch_size_command_from_its_folder(one_process):
    command = "optimize_batch_size.py --target-memory-usage 0.8 --seq-len 16 --optimization-target throughput "
    model = "--hidden-dim 32 --num-layers 1 --num-heads 2 --vocab-size 64 --device cpu --num-steps 2 --max-batch-size 2"
    result = call(2, command + model + " --json -")
    content = json.loads(result.stdout)
    assert [row["batch_size"] for row in content["probes"]] == [1, 2] and content["version"] == 2
    assert content["budget_mb"] == pytest.approx(0.8 * content["device_memory_mb"])
    assert content["device_memory_mb"] < 2**23  # 8 TiB
    assert content["best"] in content["probes"] and "batch size 2 ..." in result.stderr


def test_memory_of_a_device_is_all_that_it_has(monkeypatch):
    """On a CPU the machine's, not what is free of it now."""
    pages = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 2**20, "SC_AVPHYS_PAGES": 2**18}
    monkeypatch.setattr(batch_tool.os, "sysconf", pages.__getitem__)
    assert batch_tool.device_memory_mb(SimpleNamespace(on_gpu=False)) == 4096
    gpus = {"cuda:1": SimpleNamespace(total_memory=80 * 2**30)}
    monkeypatch.setattr("torch.cuda.get_device_properties", gpus.__getitem__)
    assert batch_tool.device_memory_mb(SimpleNamespace(on_gpu=True, device="cuda:1")) == 80 * 1024


def test_bad_input_of_the_batch_size_search(capsys, monkeypatch):
    version = ["--version", "2", "--hidden-dim", "32", "--num-heads", "2"]
    refused(batch_tool.main, ["--target-memory-usage", "1.5"], capsys, "--target-memory-usage must be")
    refused(batch_tool.main, ["--max-batch-size", "0"], capsys, "--max-batch-size: must be")
    refused(batch_tool.main, ["--version", "2", "--num-heads", "5"], capsys, "--hidden-dim must be")

    def train(script, argv, tell):
        tell("step     1/10  loss 7\n")
        raise runs.OutOfMemory(1, "out of memory")

    monkeypatch.setattr(batch_tool, "train", train)
    monkeypatch.setattr(runs.Pace, "is_due", lambda pace: True)
    assert batch_tool.main(version) == 1
    first, followed, said = capsys.readouterr().err.splitlines()
    assert (first, followed) == ("batch size 1 ...", "   step     1/10  loss 7") and "not even one sequence" in said
