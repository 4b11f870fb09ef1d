"""The tool that times scripts from their start to the first step, with a script made up for it."""

import json
import os

import pytest

from common.command_line import Failure
from common.machine.description import SAME_RUN
from in_process import refused
from maintain import warm_up

LINES = ["version 1", "  warm-up    step 1 of 3: compiles", "  warm-up    steps 2 to 3: little", "step     1/1  loss 7"]


@pytest.fixture
def scripts(monkeypatch, tmp_path):
    """Return the calls of scripts: (name, options, whether its caches were empty); each leaves a file in a cache."""
    calls = []
    clock = [0.0]

    def train(script, argv, environment, tell):
        caches = [environment[name] for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "CUDA_CACHE_PATH")]
        empty = not any(map(os.path.exists, caches))
        os.makedirs(caches[0], exist_ok=True)
        calls.append((script.name, argv, empty))
        if "--fp8" in argv:
            raise Failure(1, "no GPU")
        for line, seconds in zip(LINES, (1, 2, 30 if empty else 3, 4), strict=True):
            clock[0] += seconds
            tell(line)

    monkeypatch.setattr(warm_up, "train", train)
    monkeypatch.setattr(warm_up.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(
        warm_up, "describe", lambda command: dict.fromkeys(("host", "commit", *SAME_RUN), "a") | changed
    )
    changed = {}
    return calls, changed


def measure(folder, *options):
    return warm_up.main(["--results", str(folder), "--presets", "small", *options])


def test_each_start_is_timed_with_empty_and_with_filled_caches(scripts, tmp_path, capsys):
    calls, _ = scripts
    assert measure(tmp_path, "--rungs", "b,h", "--rounds", "2", "--batch-size", "4") == 0
    assert [name for name, _, _ in calls[1:]] == 2 * [*2 * ["tiny_llama_v1.py"], *2 * ["tiny_llama_v3.py"]]
    assert [empty for _, _, empty in calls[1:]] == 4 * [True, False]
    assert calls[1][1] == ["--preset", "small", "--batch-size", "4", "--use-amp", "--num-steps", "1"]
    first = json.loads((tmp_path / "warm_up.json").read_text())["presets"]["small"]["b"][0]
    assert first["empty"] == {"imports, model": 3, "first step": 30, "other steps, graph": 4}
    assert first["filled"]["first step"] == 3
    table, told = capsys.readouterr()
    assert told.splitlines()[:2] == [
        "a start that isn't kept: it reads the libraries from the disk",
        "small, round 1: version 1",
    ]
    assert "37.0 (37.0 to 37.0)" in table and "10.0 (10.0 to 10.0)" in table


def test_what_is_missing_is_measured_afterwards(scripts, tmp_path, capsys):
    calls, _ = scripts
    assert measure(tmp_path, "--rungs", "b", "--rounds", "1") == 0
    assert measure(tmp_path, "--rungs", "b,h", "--rounds", "2", "--append") == 0
    starts = json.loads((tmp_path / "warm_up.json").read_text())["presets"]["small"]
    assert {name: len(found) for name, found in starts.items()} == {"b": 2, "h": 2}
    assert len(calls) == 3 + 7  # one start for nobody in each call


@pytest.mark.parametrize(("seconds", "measured", "left"), [(142, ["b"], 3), (143, ["b", "h"], 2)])
def test_what_a_time_limit_leaves_out_is_told(scripts, tmp_path, capsys, seconds, measured, left):
    """The start that isn't kept takes 37 s and a rung's two take 47 s; the next are expected to take 58.75 s."""
    assert measure(tmp_path, "--rungs", "b,h", "--rounds", "2", "--time-limit", str(seconds)) == 1
    starts = json.loads((tmp_path / "warm_up.json").read_text())["presets"]["small"]
    assert [name for name, found in starts.items() if found] == measured
    assert f"\nnot measured: {left} start" in capsys.readouterr().out


def test_what_was_measured_before_ctrl_c_is_kept(scripts, tmp_path, capsys, monkeypatch):
    train = warm_up.train

    def interrupted(script, *arguments, **more):
        if script.name == "tiny_llama_v3.py":
            raise KeyboardInterrupt
        train(script, *arguments, **more)

    monkeypatch.setattr(warm_up, "train", interrupted)
    assert measure(tmp_path, "--rungs", "b,h,k", "--rounds", "1") == 130
    assert json.loads((tmp_path / "warm_up.json").read_text())["presets"]["small"].keys() == {"b"}
    table, told = capsys.readouterr()
    assert "version 1" in table and "interrupted: the starts that were measured are kept" in told


def test_a_script_that_fails_is_named(scripts, tmp_path, capsys):
    assert measure(tmp_path, "--rungs", "b,i", "--rounds", "1") == 1
    assert "i failed: no GPU" in capsys.readouterr().out


def test_a_script_without_the_lines_is_named(scripts, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(warm_up, "PHASES", warm_up.PHASES | {"more": "never"})
    assert measure(tmp_path, "--rungs", "b", "--rounds", "1") == 1
    assert "b printed no line that ends: more" in capsys.readouterr().err


def test_another_commit_begins_another_file(scripts, tmp_path, capsys):
    _, changed = scripts
    assert measure(tmp_path, "--rungs", "b", "--rounds", "1") == 0
    changed["commit"] = "d"
    assert measure(tmp_path, "--rungs", "b", "--rounds", "2", "--append") == 2
    assert "is of another machine, commit or options" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--rungs b,none", "--rungs: none isn't one of a, b"),
        ("--rounds 0", "--rounds"),
        ("--hiden-dim 3", "unrecognized arguments: --hiden-dim 3"),
        ("--data /home/me/text", "/home/me/text: a record names no folder of this machine"),
    ],
)
def test_bad_options(options, words, tmp_path, capsys):
    refused(lambda more: measure(tmp_path, *options.split()), [], capsys, words)


def test_results_that_exist_are_kept(tmp_path, capsys):
    (tmp_path / "warm_up.json").write_text("{}")
    refused(lambda more: measure(tmp_path), [], capsys, "exists already: add --append")
