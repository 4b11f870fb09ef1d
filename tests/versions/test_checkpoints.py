"""Checkpoints: a run killed at any moment and resumed gives the losses of one that was never stopped."""

import json
import os
import signal
import subprocess
import sys
import zipfile

import pytest
import torch

from common.versions import SCRIPTS, load_version

SIZES = "--hidden-dim 32 --num-layers 1 --num-heads 2 --intermediate-dim 40 --vocab-size 40 --seq-len 12 --batch-size 2"
LAST = 8  # steps of a run
EVERY = 2  # steps between its checkpoints
SAME = 1e-5 if torch.cuda.is_available() else 1e-6  # relative difference of losses


def arguments(folder, *argv):
    return [*SIZES.split(), "--save-every", str(EVERY), "--checkpoint-dir", str(folder), "--warmup-steps", "1", *argv]


def run(version, folder, *argv, steps=LAST):
    """Losses by step of a run in this process; it must succeed."""
    metrics = folder.parent / f"{folder.name}.json"
    status = load_version(version).main(
        arguments(folder, "--num-steps", str(steps), "--metrics-file", str(metrics), *argv)
    )
    assert status == 0
    return {step["step"]: step["loss"] for step in json.loads(metrics.read_text())["steps"]}


def saved_steps(folder):
    return [int(path.stem.removeprefix("step_")) for path in sorted(folder.glob("step_*.pt"))]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """Losses by step of a run of version 1 that nothing disturbs: those of every version."""
    return run(1, tmp_path_factory.mktemp("uninterrupted") / "all")


@pytest.fixture
def interrupted(tmp_path):
    """The folder of a run of version 1 that ended after step 5: checkpoints of steps 2 and 4."""
    folder = tmp_path / "folder with spaces"
    run(1, folder, steps=5)
    assert saved_steps(folder) == [2, 4]
    return folder


def assert_continues(losses, wanted, first):
    assert list(losses) == list(range(first, LAST))
    assert losses == {step: pytest.approx(wanted[step], rel=SAME) for step in losses}


# ---------------------------------------------------------------- killed

# Code that makes a run kill itself at some moment of its second checkpoint, of step 4; and the step it must resume at.
HALF_WRITTEN = """
def save(content, file):
    buffer = io.BytesIO()
    plain_save(content, buffer)
    file.write(buffer.getvalue()[: buffer.tell() // 2 if content["step"] == 4 else None])
    file.flush()
    content["step"] == 4 and die()
plain_save, torch.save = torch.save, save
"""
MOMENTS = {
    "before the first checkpoint": ("os.fsync = die", 0),
    "half written": (HALF_WRITTEN, 2),
    "written and not renamed": (
        "plain, os.replace = os.replace, lambda a, b: die() if '4.pt' in str(a) else plain(a, b)",
        2,
    ),
    "renamed": ("plain, os.replace = os.replace, lambda a, b: (plain(a, b), '4.pt' in str(a) and die())", 4),
    "while old ones are removed": ("pathlib.Path.unlink = die", 6),
}
RUNNER = """
import io, os, pathlib, signal, sys
sys.path.insert(0, sys.argv[1])
import torch
from common.versions import load_version
def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)
script = load_version(int(sys.argv[2]))
exec(sys.argv[3])
sys.exit(script.main(sys.argv[4:]))
"""


@pytest.mark.parametrize(("version", "moment"), [*((1, moment) for moment in MOMENTS), (3, "half written")])
def test_killed_while_saving(version, moment, tmp_path, uninterrupted, capsys):
    code, resumed_at = MOMENTS[moment]
    folder = tmp_path / "checkpoints"
    scripts = str(SCRIPTS[1].parent.parent / "scripts")
    command = [sys.executable, "-c", RUNNER, scripts, str(version), code]
    killed = subprocess.run([*command, *arguments(folder, "--num-steps", str(LAST))], capture_output=True, timeout=200)
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    if not resumed_at:
        assert load_version(version).main(arguments(folder, "--resume")) == 2
        assert "holds no sound checkpoint" in capsys.readouterr().err
        return
    assert_continues(run(version, folder, "--resume"), uninterrupted, resumed_at)
    assert not list(folder.glob("*.partial")) and len(saved_steps(folder)) == 2


@pytest.mark.parametrize("version", [1, 3])
def test_killed_from_outside(version, tmp_path, uninterrupted):
    """Wherever it is when a later step appears, which is not the same in every run."""
    folder = tmp_path / "checkpoints"
    command = [sys.executable, SCRIPTS[version], *arguments(folder, "--num-steps", "100000")]
    # A line is printed every 10000 steps: wait for files instead.
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        try:
            while process.poll() is None and not any(step >= 4 for step in saved_steps(folder)):
                try:
                    process.wait(timeout=0.02)
                except subprocess.TimeoutExpired:
                    continue
        finally:
            process.kill()
        assert process.wait() == -signal.SIGKILL, process.stderr.read()
    newest = saved_steps(folder)[-1]
    wanted = uninterrupted if newest < LAST - 1 else run(1, tmp_path / "longer", steps=newest + 3)
    losses = run(version, folder, "--resume", steps=newest + 2)
    assert losses == {step: pytest.approx(wanted[step], rel=SAME) for step in (newest, newest + 1)}


# ---------------------------------------------------------------- resumed, in any version


@pytest.mark.parametrize("version", SCRIPTS)
def test_every_version_resumes_a_run_of_version_1(version, interrupted, uninterrupted):
    assert_continues(run(version, interrupted, "--resume"), uninterrupted, 4)


def test_version_1_resumes_a_run_of_version_3(tmp_path, uninterrupted):
    run(3, tmp_path / "v3", steps=EVERY)
    assert_continues(run(1, tmp_path / "v3", "--resume"), uninterrupted, EVERY)


def test_a_run_resumed_twice(interrupted, uninterrupted):
    assert list(run(1, interrupted, "--resume", steps=6)) == [4, 5]
    assert_continues(run(1, interrupted, "--resume"), uninterrupted, 6)
    assert saved_steps(interrupted) == [6, 8]


def test_switches_may_change_between_the_runs(interrupted, uninterrupted):
    """A checkpoint holds canonical weights, not those of one fusion."""
    losses = run(2, interrupted, "--resume", "--disable-qkv-fusion", "--disable-swiglu-fusion")
    assert_continues(losses, uninterrupted, 4)


@pytest.mark.parametrize("version", [1, 3])
def test_float16_resumes_with_its_scale(version, tmp_path):
    """The scale of the gradients and, in version 3, the float32 weights behind the 16-bit ones come back."""
    half = ("--use-amp", "--amp-dtype", "float16")
    wanted = run(version, tmp_path / "all", *half, steps=4)
    run(version, tmp_path / "part", *half, steps=EVERY)
    losses = run(version, tmp_path / "part", *half, "--resume", steps=4)
    assert losses == {step: pytest.approx(wanted[step], rel=SAME) for step in (2, 3)}
    saved = torch.load(sorted((tmp_path / "part").glob("step_*.pt"))[0], weights_only=True)
    assert saved["scaler"]["scale"] > 1 and all(w.dtype == torch.float32 for w in saved["weights"].values())


# ---------------------------------------------------------------- damaged, foreign, unfit


def truncate(path):
    os.truncate(path, path.stat().st_size // 2)


def empty(path):
    os.truncate(path, 0)


def scramble(path):
    path.write_bytes(bytes(range(256)) * 40)


def flip_a_bit(path):
    """In the numbers of the largest tensor, which a reader that does not compare checksums takes as they are."""
    with zipfile.ZipFile(path) as archive:
        largest = max(archive.infolist(), key=lambda member: member.file_size)
    content = bytearray(path.read_bytes())
    content[largest.header_offset + 1000] ^= 0x40
    path.write_bytes(content)


def replace_by_weights(path):
    torch.save({"weight": torch.zeros(3)}, path)


def replace_by_a_list(path):
    torch.save([1, 2, 3], path)


@pytest.mark.parametrize(
    "damage", [truncate, empty, scramble, flip_a_bit, replace_by_weights, replace_by_a_list], ids=lambda d: d.__name__
)
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(damage, interrupted, uninterrupted, capsys):
    newest = interrupted / "step_000000004.pt"
    damage(newest)
    assert_continues(run(1, interrupted, "--resume"), uninterrupted, 2)
    errors = capsys.readouterr().err
    assert str(newest) in errors and len(errors.strip().splitlines()) == 1


def test_no_sound_checkpoint_left(interrupted, capsys):
    for path in interrupted.glob("step_*.pt"):
        truncate(path)
    assert load_version(1).main(arguments(interrupted, "--resume")) == 2
    *passed_over, error = capsys.readouterr().err.strip().splitlines()
    assert len(passed_over) == 2 and "--resume" in error and "no sound checkpoint" in error


def test_partial_files_are_ignored(interrupted, uninterrupted, capsys):
    newest = interrupted / "step_000000004.pt"
    newest.rename(interrupted / "step_000000008.pt.partial")
    assert_continues(run(1, interrupted, "--resume"), uninterrupted, 2)
    assert not capsys.readouterr().err


@pytest.mark.parametrize("version", SCRIPTS)
def test_refused_before_any_model_is_built(version, interrupted, capsys, monkeypatch):
    """Another model's checkpoint, no checkpoint at all, a step that is reached already: status 2 and one sentence."""
    script = load_version(version)
    monkeypatch.setattr(script, "build_model", lambda *_: pytest.fail("a model was built"))
    (interrupted.parent / "none").mkdir()
    for argv, words in (
        (arguments(interrupted, "--resume", "--num-layers", "2"), "other sizes"),
        (arguments(interrupted.parent / "none", "--resume"), "no sound checkpoint"),
        (arguments(interrupted, "--resume", "--num-steps", "4"), "--num-steps"),
    ):
        assert script.main(argv) == 2
        error = capsys.readouterr().err
        assert "--resume" in error and words in error and len(error.strip().splitlines()) == 1
    with pytest.raises(SystemExit, match="2"):
        script.main(arguments(interrupted.parent / "nowhere", "--resume"))
    assert "--resume" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written(tmp_path, capsys):
    (tmp_path / "file").write_text("in the way")
    assert load_version(1).main(arguments(tmp_path / "file", "--num-steps", "3")) in (1, 2)
    error = capsys.readouterr().err
    assert str(tmp_path / "file") in error and len(error.strip().splitlines()) == 1


def test_a_checkpoint_is_small(interrupted):
    """Three float32 numbers for each parameter, and little beside: no optimizer's object, no step's tensors."""
    script = load_version(1)
    options = script.parse_options(SIZES.split())
    parameters = sum(weight.numel() for weight in script.initial_weights(script.model_config(options), 0).values())
    size = (interrupted / "step_000000004.pt").stat().st_size
    assert 12 * parameters < size < 12 * parameters + 60000
