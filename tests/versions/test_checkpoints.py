"""Checkpoints: exact continuation after any kill, damaged and foreign files refused, and no file of others touched."""

import contextlib
import hashlib
import io
import itertools
import json
import os
import random
import re
import shutil
import signal

import pytest
import torch

from common.versions import SCRIPTS, load_version
from in_process import restored_settings
from marks import slow
from processes import Fork

SIZES = "--hidden-dim 32 --num-layers 1 --num-heads 2 --intermediate-dim 40 --vocab-size 40 --seq-len 12 --batch-size 2"
LAST = 8  # steps of a run
EVERY = 2  # steps between its checkpoints
SAME = 1e-5 if torch.cuda.is_available() else 0  # relative difference of losses


def arguments(folder, *argv):
    words = [*SIZES.split(), "--save-every", EVERY, "--checkpoint-dir", folder, "--warmup-steps", 1, *argv]
    return list(map(str, words))


def run(version, folder, *argv, steps=LAST):
    """Run in this process, successfully; return {step: loss}."""
    metrics = folder.parent / f"{folder.name}.json"
    argv = arguments(folder, "--num-steps", steps, "--metrics-file", metrics, *argv)
    assert load_version(version).main(argv) == 0
    return {step["step"]: step["loss"] for step in json.loads(metrics.read_text())["steps"]}


def saved_steps(folder):
    return [int(path.stem.removeprefix("step_")) for path in sorted(folder.glob("step_?????????.pt"))]


def write_content(path, content, **options):
    """Write a checkpoint whose SHA-256 is valid; return what torch.save wrote."""
    buffer = io.BytesIO()
    torch.save(content, buffer, **options)
    path.write_bytes(buffer.getvalue() + hashlib.sha256(buffer.getvalue()).digest())
    return buffer


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """Losses by step of a run of version 1 that nothing disturbs."""
    with restored_settings():
        return run(1, tmp_path_factory.mktemp("uninterrupted") / "all")


@pytest.fixture
def interrupted(tmp_path):
    """The folder of a run of version 1 that ended after step 5, with checkpoints of steps 2 and 4."""
    folder = tmp_path / "folder with spaces"
    run(1, folder, steps=5)
    assert saved_steps(folder) == [2, 4]
    return folder


def assert_continues(losses, wanted, first):
    assert losses == {step: pytest.approx(wanted[step], rel=SAME) for step in range(first, len(wanted))}


def refusal(capsys, folder, *argv, version=1):
    """Return the one line with which a resumed run exits with status 2."""
    assert load_version(version).main(arguments(folder, "--resume", *argv)) == 2
    error = capsys.readouterr().err
    assert "--resume" in error and error.count("\n") == 1
    return error


def test_ranks_that_find_different_checkpoints_are_refused(interrupted, capsys, monkeypatch):
    """Such as on hosts that have a folder each."""
    monkeypatch.setattr(load_version(1), "gather", lambda values, config: torch.tensor([values, [2]]))
    said = refusal(capsys, interrupted, "--num-steps", LAST)
    assert f"the ranks find different checkpoints in {interrupted}: share the folder" in said


# ---------------------------------------------------------------- ended by a signal


def end_by(status):
    """End this process with SIGKILL, or raise what Python's handlers of SIGTERM and SIGINT raise."""
    if status == -9:
        os.kill(os.getpid(), signal.SIGKILL)
    raise SystemExit(status) if status == 143 else KeyboardInterrupt


def end_at(moment, end, monkeypatch):
    """End a run at that moment of its second checkpoint, of step 4, or before the first."""
    link, save, files = os.link, torch.save, itertools.count(EVERY, EVERY)

    def is_fourth():
        return next(files) == 4

    owner, name, replacement = {
        "before the first": (os, "fsync", lambda file: end()),
        "serialised": (torch, "save", lambda content, file: (save(content, file), content["step"] == 4 and end())),
        "half written": (os, "fsync", lambda file: is_fourth() and (os.ftruncate(file, 5000), end())),
        "written, not linked": (os, "link", lambda a, b: end() if "4.pt" in str(b) else link(a, b)),
        "linked": (os, "link", lambda a, b: (link(a, b), "4.pt" in str(b) and end())),
    }[moment]
    monkeypatch.setattr(owner, name, replacement)


CANNOT_FORK = pytest.mark.skipif(torch.cuda.is_available(), reason="a process that has used a GPU cannot be forked")


@pytest.mark.filterwarnings("ignore:.*fork")
@pytest.mark.parametrize("status", [pytest.param(-9, marks=CANNOT_FORK), 143, 130])
@pytest.mark.parametrize(
    ("moment", "saved"),
    [("before the first", 0), ("serialised", 2), ("half written", 2), ("written, not linked", 2), ("linked", 4)],
)
def test_ended_while_saving(moment, saved, status, tmp_path, uninterrupted, capsys, monkeypatch):
    folder, main = tmp_path / "checkpoints", load_version(1).main
    with monkeypatch.context() as patch:
        end_at(moment, lambda: end_by(status), patch)
        if status > 0:
            assert main(arguments(folder, "--num-steps", LAST)) == status
            assert capsys.readouterr().err.count("\n") == 1 and not list(folder.glob("*.partial"))
        elif child := os.fork():
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == status
        else:
            os._exit(main(arguments(folder, "--num-steps", LAST)))
    if saved:
        assert_continues(run(1, folder, "--resume"), uninterrupted, saved)
    else:
        assert "holds no checkpoint" in refusal(capsys, folder)


# ---------------------------------------------------------------- resumed


@pytest.mark.parametrize(
    ("version", "dtype"), [(2, ""), slow(3, ""), (4, ""), (1, "float16"), slow(3, "float16"), (4, "bfloat16")]
)
def test_every_version_resumes_exactly(version, dtype, tmp_path):
    """The scale of the gradients and the float32 weights of versions 3 and 4 come back."""
    half = ["--use-amp", "--amp-dtype", dtype] if dtype else []
    wanted = run(version, tmp_path / "all", *half, steps=4)
    run(version, tmp_path / "part", *half, steps=2)
    assert_continues(run(version, tmp_path / "part", *half, "--resume", steps=4), wanted, 2)
    files = [tmp_path / name / "step_000000004.pt" for name in ("all", "part")]
    unbroken, resumed = (torch.load(file, weights_only=True) for file in files)
    assert unbroken["scaler"] == resumed["scaler"] and (dtype != "float16" or resumed["scaler"]["scale"] > 1)
    assert all(tensor.dtype == torch.float32 for name, tensor in resumed["tensors"].items() if "step" not in name)


def test_float16_continues_a_run_that_had_no_scaler_with_a_new_one(tmp_path):
    """The gradients' scale and the steps that it has lasted are not those of the warm-up."""
    folder, half = tmp_path / "checkpoints", ["--use-amp", "--amp-dtype", "float16"]
    run(1, folder, steps=2)
    run(1, folder, *half, "--resume", steps=4)
    saved = torch.load(folder / "step_000000004.pt", weights_only=True)["scaler"]
    assert (saved["scale"], saved["_growth_tracker"]) == (2.0**10, 2)


def test_float16_resumes_exactly_after_a_warm_up_that_overflows(tmp_path, monkeypatch):
    """PyTorch's AdamW has no moments to overwrite until a step is not skipped."""
    half = ["--use-amp", "--amp-dtype", "float16"]
    wanted = run(1, tmp_path / "all", *half, steps=4)
    run(1, tmp_path / "part", *half, steps=2)
    scaler = torch.amp.GradScaler
    monkeypatch.setattr(torch.amp, "GradScaler", lambda device, *_, **options: scaler(device, 2.0**40, **options))
    assert_continues(run(1, tmp_path / "part", *half, "--resume", steps=4), wanted, 2)


def test_a_run_resumed_twice(interrupted, uninterrupted):
    assert list(run(1, interrupted, "--resume", steps=6)) == [4, 5]
    assert_continues(run(1, interrupted, "--resume"), uninterrupted, 6)
    assert saved_steps(interrupted) == [2, 4, 6, 8]  # a run removes what it wrote itself, and what it continued from
    run(1, interrupted, "--resume", steps=12)
    assert saved_steps(interrupted) == [2, 4, 6, 10, 12]


def test_a_run_keeps_its_two_newest_checkpoints(tmp_path):
    """Each has three float32 numbers per parameter, and little else."""
    run(1, tmp_path / "checkpoints")
    assert saved_steps(tmp_path / "checkpoints") == [LAST - EVERY, LAST]
    newest = tmp_path / "checkpoints" / f"step_{LAST:09d}.pt"
    tensors = torch.load(newest, weights_only=True)["tensors"]
    count = sum(tensor.numel() for name, tensor in tensors.items() if name.endswith("weight"))
    assert 12 * count < newest.stat().st_size < 12 * count + 60000


def test_other_options_than_the_checkpoints_are_said_in_one_line(interrupted, tmp_path, capsys):
    text = tmp_path / "text"
    text.write_bytes(bytes(range(1, 40)))
    newest = interrupted / "step_000000004.pt"
    content = torch.load(newest, weights_only=True)
    content["options"]["world_size"] = 2
    write_content(newest, content)
    changed = ["--seed", 7, "--learning-rate", "1e-3", "--data", text, "--batch-size", 4, "--seq-len", 6]
    changed += ["--use-amp", "--amp-dtype", "float16", "--tf32"]
    run(1, interrupted, "--resume", *changed)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("resuming from")]
    _, _, told = line.partition(" with other options: ")
    assert told.split(", ") == [
        "seed 0 -> 7",
        "learning_rate 0.0003 -> 0.001",
        f"data None -> {text}",
        "batch_size 2 -> 4",
        "world_size 2 -> 1",
        "seq_len 12 -> 6",
        "use_amp False -> True",
        "amp_dtype bfloat16 -> float16",
        "tf32 False -> True",
    ]
    run(1, interrupted, "--resume", *changed, steps=10)
    assert "other options" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("version", "argv", "words"),
    [
        (1, ["--num-layers", "2"], "another model: num_layers 1 -> 2"),
        (1, ["--num-steps", "4"], "step 4 is reached already"),
        (2, [], "another model: version 1 -> 2"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused(interrupted, capsys, monkeypatch, version, argv, words):
    monkeypatch.setattr(load_version(version), "Trainer", lambda *_: pytest.fail("a model was built"))
    assert words in refusal(capsys, interrupted, *argv, version=version)


def test_other_switches_than_the_checkpoints_are_refused(tmp_path, capsys):
    """Version 2 names its weights after its fusions."""
    run(2, tmp_path / "checkpoints", steps=2)
    assert "--enable-" in refusal(capsys, tmp_path / "checkpoints", "--disable-qkv-fusion", version=2)


# ---------------------------------------------------------------- damaged and malicious files


def test_random_damages_are_all_refused(interrupted):
    """Changed bytes, cut, extended and swapped files: each is named, and none raises or is accepted."""
    script, newest, draw = load_version(1), interrupted / "step_000000004.pt", random.Random(0)
    sound, config = newest.read_bytes(), script.parse_options(arguments(interrupted, "--resume"))
    assert script.find_checkpoint(config)["step"] == 4
    damages = {
        "byte": lambda at: sound[:at] + bytes([sound[at] ^ draw.randrange(1, 256)]) + sound[at + 1 :],
        "one of the last": lambda at: damages["byte"](len(sound) - 1 - at % 300),
        "cut": lambda at: sound[:at],
        "begun later": lambda at: sound[at + 1 :],
        "extended": lambda at: sound + draw.randbytes(1 + at % 50),
        "noise": lambda at: draw.randbytes(at % 1000),
    }
    for name in [*damages] * 60:
        newest.write_bytes(damages[name](draw.randrange(len(sound))))
        with pytest.raises(script.UserError, match=r"4\.pt is damaged.*: move .* away to .* step_000000002"):
            pytest.fail(f"accepted: {name} {script.find_checkpoint(config)['step']}")


class Command:
    """Run a command when it is unpickled."""

    def __init__(self, command):
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


@pytest.mark.parametrize("zipped", [False, True])
def test_a_pickle_that_would_run_a_command_is_refused(zipped, tmp_path, capsys):
    """Its SHA-256 is valid: only the loader's weights_only stands between the file and the command."""
    proof = tmp_path / "executed"
    content = {"step": 4, "options": Command(f"touch {proof}"), "tensors": {}, "scaler": {}}
    saved = write_content(tmp_path / "step_000000004.pt", content, _use_new_zipfile_serialization=zipped)
    assert "is damaged" in refusal(capsys, tmp_path) and not proof.exists()
    saved.seek(0)
    torch.load(saved, weights_only=False)
    assert proof.exists()  # the command would have run


def test_a_damaged_checkpoint_removed_the_one_before_it_is_used(interrupted, uninterrupted):
    (interrupted / "step_000000004.pt").unlink()
    (interrupted / "step_000000006.pt.partial").write_bytes(b"half of one")
    assert_continues(run(1, interrupted, "--resume"), uninterrupted, 2)


def change(key, value):
    return lambda saved: saved["tensors"].update({key: value(saved["tensors"][key]) if callable(value) else value})


WEIGHT = "layers.0.attention.q_proj.weight"
UNLIKE_THE_MODEL = {
    "a shape that broadcasts": change(WEIGHT, lambda w: w[:1]),
    "float64": change(WEIGHT, lambda w: w.double()),
    "NaN": change(WEIGHT, lambda w: w * torch.nan),
    "infinite moments": change(f"{WEIGHT}.exp_avg", lambda w: w + torch.inf),
    "no moments": lambda saved: saved["tensors"].pop(f"{WEIGHT}.exp_avg"),
    "no weight": lambda saved: saved["tensors"].pop(WEIGHT),
    "a tensor more": change("more", torch.zeros(3)),
}


@pytest.mark.parametrize("name", UNLIKE_THE_MODEL)
def test_contents_unlike_the_model_are_refused(name, interrupted, capsys):
    newest = interrupted / "step_000000004.pt"
    saved = torch.load(newest, weights_only=True)
    UNLIKE_THE_MODEL[name](saved)
    write_content(newest, saved)
    assert re.search("the checkpoint (lacks|has another)|in the checkpoint is no finite", refusal(capsys, interrupted))


def test_a_ruined_run_says_how_to_leave_it(interrupted, uninterrupted, capsys):
    """Its weights are finite, and so large that the next loss is not."""
    newest = interrupted / "step_000000004.pt"
    saved = torch.load(newest, weights_only=True)
    saved["tensors"]["norm.weight"] *= 3e38
    write_content(newest, saved)
    assert load_version(1).main(arguments(interrupted, "--resume", "--num-steps", LAST)) == 1
    said = capsys.readouterr().err
    assert f"lower --learning-rate, or move {newest} away to continue from step_000000002.pt" in said
    newest.rename(interrupted / "ruined.pt")
    assert_continues(run(1, interrupted, "--resume"), uninterrupted, 2)


# ---------------------------------------------------------------- files of others


def test_a_fresh_run_refuses_a_folder_that_holds_checkpoints(interrupted, capsys):
    before = {path: path.read_bytes() for path in interrupted.iterdir()}
    with pytest.raises(SystemExit, match="2"):
        load_version(1).main(arguments(interrupted))
    assert "holds checkpoints: add --resume" in capsys.readouterr().err
    assert before == {path: path.read_bytes() for path in interrupted.iterdir()}


def test_files_of_the_user_are_neither_read_nor_removed(tmp_path, uninterrupted):
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    names = ("step_best.pt", "step_5.pt", "step_000000002.pt.bak", "notes.txt")
    for name in names:
        (folder / name).write_text(name)
    run(1, folder, steps=5)
    assert_continues(run(1, folder, "--resume"), uninterrupted, 4)
    assert all((folder / name).read_text() == name for name in names)


@pytest.mark.parametrize(("steps", "found"), [(4, 2), (6, 6)])
def test_a_second_run_in_the_folder_ends_and_the_first_ones_files_stay(steps, found, tmp_path, capsys, monkeypatch):
    """The second run starts before the first has saved anything, and finds step 2, or newer ones, when it writes it."""
    folder, script = tmp_path / "checkpoints", load_version(1)
    config = script.parse_options(arguments(folder, "--num-steps", 4, "--seed", 1))
    run(1, folder, steps=steps)
    before = {path: path.read_bytes() for path in folder.iterdir()}
    monkeypatch.setattr(script, "parse_options", lambda argv: config)
    assert script.main() == 1
    error = capsys.readouterr().err
    assert f"step_{found:09d}.pt: it exists already: does another run use this folder?" in error
    assert before == {path: path.read_bytes() for path in folder.iterdir()}


# The run that writes its first checkpoint first waits until the other one has written its own, and then moves on first.
SLOWED = """
import os, pathlib, runpy, sys, time
folder, fsync, calls = pathlib.Path(sys.argv[1]), os.fsync, []

def wait_for(found):
    while not found():
        time.sleep(0.01)

def slow(file):
    calls.append(file)
    if len(calls) == 1:
        try:
            (folder / "first has written").mkdir()
        except FileExistsError:
            (folder / "second has written").touch()
            wait_for(lambda: list(folder.glob("checkpoints/step_*.pt")))
        else:
            wait_for((folder / "second has written").exists)
    fsync(file)

os.fsync = slow
sys.argv = sys.argv[2:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize(("steps", "left"), [(2, [2]), (6, [4, 6])])
@pytest.mark.slow
def test_two_runs_that_save_at_the_same_time(steps, left, tmp_path):
    """One keeps the folder, and its checkpoints are its own; the other one says why it ends."""
    (tmp_path / "slowed.py").write_text(SLOWED)
    folder, runs = tmp_path / "checkpoints", []
    with contextlib.ExitStack() as stack:
        for seed in (1, 2):
            argv = arguments(folder, "--num-steps", steps, "--seed", seed)
            runs.append(stack.enter_context(Fork(tmp_path / "slowed.py", tmp_path, SCRIPTS[1], *argv)))
        for one in runs:
            one.wait()
        said = {seed: one.stderr for seed, one in zip((1, 2), runs, strict=True)}
    assert sorted(one.returncode for one in runs) == [0, 1], said
    winner = 1 if runs[0].returncode == 0 else 2
    for path in folder.glob("*.pt"):
        assert torch.load(path, weights_only=True)["options"]["seed"] == winner
    assert said[winner] == "" and "it exists already: does another run use this folder?" in said[3 - winner]
    assert saved_steps(folder) == left and len(list(folder.iterdir())) == len(left)


@pytest.mark.parametrize(
    ("become", "words"),
    [
        (lambda folder: None, "No such file or directory"),
        (lambda folder: folder.write_text("a file"), "Not a directory"),
    ],
    ids=["gone", "file"],
)
def test_a_folder_that_is_replaced_meanwhile_leaves_the_metrics(become, words, tmp_path, capsys, monkeypatch):
    folder, metrics, save = tmp_path / "checkpoints", tmp_path / "metrics.json", torch.save

    def replace(content, file):
        save(content, file)
        if content["step"] == 4:
            shutil.rmtree(folder)
            become(folder)

    monkeypatch.setattr(torch, "save", replace)
    assert load_version(1).main(arguments(folder, "--num-steps", LAST, "--metrics-file", metrics)) == 1
    assert capsys.readouterr().err == f"tiny_llama_v1.py: cannot access {folder}/step_000000004.pt: {words}\n"
    assert len(json.loads(metrics.read_text())["steps"]) == 4


def test_a_diverged_run_saves_nothing(tmp_path, capsys):
    """The loss of a step is finite, and its update is not: the checkpoint refuses it."""
    argv = arguments(tmp_path / "checkpoints", "--save-every", 1, "--learning-rate", "1e30", "--num-steps", 5)
    assert load_version(1).main(argv) == 1
    assert "lower --learning-rate" in capsys.readouterr().err
    for path in (tmp_path / "checkpoints").iterdir():
        saved = torch.load(path, weights_only=True)
        assert all(bool(tensor.isfinite().all()) for tensor in saved["tensors"].values()), path
