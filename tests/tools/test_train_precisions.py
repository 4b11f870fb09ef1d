"""maintain/train_precisions.py, corpus.py and losses.py: the text, the pairs of runs, and results that are refused."""

import contextlib
import io
import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from common.command_line import Failure
from common.versions import load_version
from in_process import refused, restored_settings
from maintain import corpus, losses, train_precisions
from maintain.losses import VARIANTS, judged, path_of, read_complete, verdict
from maintain.records import Record

SIZES = (
    "--hidden-dim 16 --num-layers 1 --num-heads 1 --intermediate-dim 16 --batch-size 1 --seq-len 16 --vocab-size 256"
)
OPTIONS = [*SIZES.split(), "--num-steps", "2", "--warmup-steps", "1"]
OPTIONS += [f"--disable-{kernel}-kernel" for kernel in ("attention", "rmsnorm", "rope", "loss")]
SEEDS = 2
HAS_FP8 = torch.cuda.is_available() or torch.__version__ >= (2, 13)  # a TorchVersion compares to tuples


def write_files(folder, number=40, size=300):
    """Write files of random letters; return (package, path) of each."""
    folder.mkdir(exist_ok=True)
    rng = np.random.default_rng(0)
    found = []
    for i in range(number):
        path = folder / f"{i}.py"
        path.write_bytes(rng.integers(97, 123, size).astype(np.uint8).tobytes())
        found.append((f"package{i % 3} 1.0", path))
    return found


# ---------------------------------------------------------------- the text


def test_a_held_out_file_is_never_trained_on(tmp_path):
    files = write_files(tmp_path / "files")
    copies = [("another 2.0", shutil.copy(path, tmp_path / f"copy{i}.py")) for i, (_, path) in enumerate(files[:20])]
    for name, content in (("tiny.py", b"x = 1"), ("binary.txt", bytes(500)), ("table.txt", b"1 " * 200_000)):
        (tmp_path / name).write_bytes(content)
        files.append(("odd 1.0", tmp_path / name))
    text = corpus.collect([*files, *((name, tmp_path / path) for name, path in copies)], enough=12_000)
    contents = [path.read_bytes() for _, path in files[:40]]
    held_out = [content for content in contents if content in text.held_out]
    assert len(held_out) == 4 and not any(content in text.train for content in held_out)
    assert sum(content in text.train for content in contents) == 36
    assert [text.about[part]["files"] for part in ("train", "held_out")] == [36, 4]
    assert len(text.train) == 36 * 301 - 1  # each once, a new line between two
    packages = ["another 2.0", *(f"package{i} 1.0" for i in range(3))]  # a text of two is the first one's by name
    assert text.about["packages"] == packages
    assert "10,835 bytes of 36 files to train on" in corpus.described(text.about)


def test_the_text_does_not_depend_on_the_order_of_the_files(tmp_path):
    files = write_files(tmp_path)
    assert corpus.collect(files, 6000) == corpus.collect(files[::-1], 6000)


def test_too_little_text_is_an_error(tmp_path):
    with pytest.raises(Failure, match="hold 12,000 bytes of text, 12,001 are needed"):
        corpus.collect(write_files(tmp_path), 12_001)


def test_the_installed_packages_are_those_of_this_environment():
    found = dict(reversed(list(corpus.installed_files())))
    assert any(name.startswith("numpy ") for name in found)
    assert {path.suffix for path in found.values()} <= set(corpus.SUFFIXES)


def test_a_packed_text_is_read_back_and_damage_is_refused(tmp_path):
    text = corpus.collect(write_files(tmp_path / "files"), 12_000)
    for name in ("a.xz", "b.xz"):
        corpus.write(text, tmp_path / name)
    packed = (tmp_path / "a.xz").read_bytes()
    assert packed == (tmp_path / "b.xz").read_bytes()
    assert corpus.read(tmp_path / "a.xz") == text
    corpus.write(text._replace(held_out=text.train), tmp_path / "swapped.xz")
    (tmp_path / "half.xz").write_bytes(packed[: len(packed) // 2])
    (tmp_path / "other.xz").write_bytes(b"no archive")
    for name, said in (("swapped", "SHA-256 of held_out.txt"), ("half", "end-of-stream"), ("other", "not supported")):
        with pytest.raises(Failure, match=f"{name}.xz is cut off or damaged: .*{said}"):
            corpus.read(tmp_path / f"{name}.xz")


# ---------------------------------------------------------------- the runs


def test_a_nudge_moves_every_weight_by_one_unit_of_bfloat16():
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    smallest = torch.tensor([0.0, -0.0, 1e-40, -1e-40]).repeat(10)  # which can only grow
    weights = {"a": torch.cat([values, smallest]), "b": torch.ones(64)}
    before = {name: weight.clone() for name, weight in weights.items()}
    moved = train_precisions.nudged(weights, seed=3)
    for name, weight in weights.items():
        assert torch.equal(weight, before[name])
        bits = moved[name].view(torch.int32).long() - weight.view(torch.int32).long()
        assert (bits.abs() == 1 << 16).all()
        assert 0.4 < (bits > 0).float().mean() < 0.6
    upper = moved["b"].bfloat16()
    assert set(upper.tolist()) == {1 + 2**-7, 1 - 2**-8}  # the neighbours of 1
    assert moved["a"].isfinite().all()
    again, other = (train_precisions.nudged(weights, seed) for seed in (3, 4))
    assert torch.equal(moved["a"], again["a"]) and not torch.equal(moved["a"], other["a"])


def test_windows_are_of_the_whole_text_and_fixed():
    data = SimpleNamespace(bytes=np.arange(200, dtype=np.uint8))
    config = SimpleNamespace(seq_len=9, batch_size=3)
    windows = train_precisions.fixed_windows(data, config, 2)
    assert windows.shape == (2, 3, 10)
    assert windows[0, 0].tolist() == list(range(10)) and windows[-1, -1].tolist() == list(range(190, 200))
    assert (windows.diff() == 1).all()


def test_a_run_is_expected_to_take_as_long_as_the_longest():
    """Of its kind, or of all where there was none of its kind."""
    study = object.__new__(train_precisions.Study)
    study.took = {}
    assert study.expected_seconds("fp8") == 0
    for variant, seconds in (("fp8", 30.0), ("fp8", 20.0), ("tf32", 40.0)):
        study.note(variant, seconds)
    assert [study.expected_seconds(variant) for variant in ("fp8", "tf32", "nudged")] == [30, 40, 40]


def test_collecting_the_text_is_a_part_of_the_time_limit(tmp_path, monkeypatch):
    """It begins at 50 s and takes 30 s of the 100 s: the end stays at 150 s."""
    now = [50.0]
    ends = []

    def collect(enough):
        now[0] += 30
        return SimpleNamespace(about=ABOUT)

    study = SimpleNamespace(measure=lambda end: ends.append(end) or 1)
    monkeypatch.setattr(train_precisions.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(train_precisions.corpus, "collect", collect)
    monkeypatch.setattr(train_precisions, "Study", lambda *arguments: study)
    assert train_precisions.main(["--results", str(tmp_path), "--time-limit", "100"]) == 1
    assert ends == [150]


def test_losses_of_a_run_by_hand(monkeypatch):
    """Of 250 steps the training loss is the mean of the last 100, a point of the curve that of 20, or of the rest."""
    losses = [float(loss) for loss in range(250, 0, -1)]
    given = []

    def train(trainer, text, first_step, records):
        records += [{"loss": loss, "step_ms": ms} for loss, ms in zip(losses, [9.0] + [2.0, 3.0] * 125, strict=False)]

    script = SimpleNamespace(set_up_backend=lambda config: None, train=train)
    trainer = object.__new__(train_precisions.WarmTrainer)
    trainer.script, trainer.options, trainer.data = script, SimpleNamespace(seed=None), None
    initial = {"step": 0, "tensors": "weights of 0"}
    trainer.trainer = SimpleNamespace(graph=None, initial=initial, restore=lambda start: given.append(start["tensors"]))
    monkeypatch.setattr(train_precisions, "initial_weights", lambda script, config: f"weights of {config.seed}")
    monkeypatch.setattr(train_precisions, "nudged", lambda weights, seed: f"{weights}, nudged by {seed}")
    monkeypatch.setattr(trainer, "held_out_loss", lambda: 7.0)
    run = trainer.train(3, nudge=False)
    assert (run["first_loss"], run["training_loss"], run["held_out_loss"], run["step_ms"]) == (250, 50.5, 7, 2.5)
    assert run["curve"] == [240.5 - 20 * i for i in range(12)] + [5.5] and not run["captured"]
    trainer.train(4, nudge=True)
    assert given == ["weights of 3", "weights of 4, nudged by 4"]


def test_the_held_out_loss_is_the_mean_of_all_windows_by_the_version_itself():
    def compute_loss(model, tokens, labels, config):
        assert not torch.is_grad_enabled() and torch.equal(tokens + 1, labels) and model == "model"
        return tokens[0, 0].float()

    trainer = object.__new__(train_precisions.WarmTrainer)
    trainer.script = SimpleNamespace(compute_loss=compute_loss)
    trainer.options = SimpleNamespace(device="cpu")
    trainer.trainer = SimpleNamespace(model="model")
    trainer.windows = torch.tensor([[[2, 3, 4]], [[5, 6, 7]]])
    assert trainer.held_out_loss() == 3.5


def test_a_trainer_trains_on_one_part_and_judges_the_other(monkeypatch):
    monkeypatch.setattr(train_precisions, "fixed_windows", lambda data, config, batches: (data, batches))
    warm = SimpleNamespace(initial="initial", graph=None, graph_reason="", warm_up=lambda *given: float(len(given)))
    script = SimpleNamespace(
        parse_options=lambda argv: SimpleNamespace(data=argv[-1], fp8="--fp8" in argv),
        set_up_backend=lambda config: None,
        load_data=lambda config: (config.data, config.fp8),
        Trainer=lambda config: warm,
        batch=lambda data, step, config: (data, step),
    )
    files = {"train": "train.txt", "held_out": "held_out.txt"}
    trainer = train_precisions.WarmTrainer(script, [], "fp8", files, 7)
    assert trainer.data == ("train.txt", True) and trainer.windows == (("held_out.txt", True), 7)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with the results of two seeds, and the text beside it."""
    place = tmp_path_factory.mktemp("trained")
    corpus.write(corpus.collect(write_files(place / "files"), 12_000), place / "text.xz")
    said = io.StringIO()
    with restored_settings(), pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(said):
        if not HAS_FP8:
            patch.setitem(VARIANTS, "fp8", "bfloat16")
        assert train_precisions.main(arguments(place / "results", place / "text.xz")) == 0, said.getvalue()
    (place / "log.txt").write_text(said.getvalue())
    return place


def arguments(results, text, *more):
    given = ["--results", str(results), "--text", str(text), "--seeds", str(SEEDS), "--held-out-batches", "2"]
    return [*given, *more, *OPTIONS]


@pytest.mark.slow
def test_the_same_seed_has_the_same_batches_and_weights_in_all_precisions(trained):
    runs = read_complete(trained / "results")
    assert runs.keys() == {(variant, seed) for variant in VARIANTS for seed in range(SEEDS)}
    for seed in range(SEEDS):
        of_seed = [runs[variant, seed] for variant in VARIANTS]
        assert len({run["batches_sha256"] for run in of_seed}) == 1
        first = [run["first_loss"] for run in of_seed]
        assert max(first) - min(first) < 0.01
        distinct = len({run["training_loss"] for run in of_seed})
        assert distinct == len(VARIANTS) - (not HAS_FP8)  # no run is another one's copy
    seeds = [{run["batches_sha256"] for (_, seed), run in runs.items() if seed == n} for n in range(SEEDS)]
    assert not seeds[0] & seeds[1]
    run = runs["nudged", 1]
    assert len(run["curve"]) == 1 and run["curve"][0] == pytest.approx(run["training_loss"], abs=1e-5)
    assert run["settings"]["held_out_tokens"] == 32 and run["text"]["train"]["files"] == 36
    assert "/" not in run["record"]["command"]
    assert (trained / "log.txt").read_text().count("s of warm-up") == 3 - (not HAS_FP8)  # once a precision


@pytest.mark.slow
def test_a_run_is_the_one_of_the_version_itself(trained, tmp_path):
    (tmp_path / "train.txt").write_bytes(corpus.read(trained / "text.xz").train)
    script = load_version(3)
    metrics = tmp_path / "metrics.json"
    own = ["--data", str(tmp_path / "train.txt"), "--seed", "1", "--use-amp", "--metrics-file", str(metrics)]
    assert script.main([*OPTIONS, *own]) == 0
    found = [step["loss"] for step in json.loads(metrics.read_text())["steps"]]
    run = read_complete(trained / "results")["bfloat16", 1]
    assert run["first_loss"] == pytest.approx(found[0], rel=1e-5)
    assert run["training_loss"] == pytest.approx(sum(found) / 2, rel=1e-5)
    config = script.parse_options([*OPTIONS, "--seed", "1"])
    wanted = script.Trainer(config).initial["tensors"]
    weights = train_precisions.initial_weights(script, config)
    assert weights.keys() == wanted.keys() and all(torch.equal(weights[name], wanted[name]) for name in wanted)


# ---------------------------------------------------------------- what is missing is trained


@pytest.fixture
def stubbed(trained, monkeypatch):
    """Let no run train: it copies the result of the session's run. Return the list of what was run."""
    ran = []

    def run(study, variant, seed, files):
        assert files["train"].read_bytes() == study.text.train and files["held_out"].read_bytes()
        ran.append((variant, seed))
        found = losses.read_run(path_of(trained / "results", variant, seed))
        losses.write_run(found | study.common, study.folder)

    if not HAS_FP8:
        monkeypatch.setitem(VARIANTS, "fp8", "bfloat16")
    monkeypatch.setattr(train_precisions.Study, "run", run)
    return ran


@pytest.mark.slow
def test_a_cut_off_study_goes_on_with_what_is_missing(trained, stubbed, tmp_path, monkeypatch, capsys):
    stub = train_precisions.Study.run

    def cut_off(study, variant, seed, files):
        if len(stubbed) == 3:
            raise KeyboardInterrupt
        stub(study, variant, seed, files)

    given = arguments(tmp_path / "new", trained / "text.xz")
    monkeypatch.setattr(train_precisions.Study, "run", cut_off)
    assert train_precisions.main(given) == 130
    monkeypatch.setattr(train_precisions.Study, "run", stub)
    assert train_precisions.main(given) == 0
    assert stubbed == [(variant, seed) for seed in range(SEEDS) for variant in VARIANTS]  # each once
    assert "| nudged bf16 | " in capsys.readouterr().out
    assert train_precisions.main(given) == 0 and len(stubbed) == len(VARIANTS) * SEEDS


@pytest.mark.slow
def test_nothing_is_begun_that_would_not_end_in_time(trained, stubbed, tmp_path, capsys):
    shutil.copytree(trained / "results", tmp_path / "new")
    for variant in ("bfloat16", "fp8"):
        path_of(tmp_path / "new", variant, 1).unlink()
    for variant, seconds in (("bfloat16", 1), ("fp8", 1000)):
        path = path_of(tmp_path / "new", variant, 0)
        path.write_text(json.dumps(json.loads(path.read_text()) | {"seconds": seconds}))
    assert train_precisions.main(arguments(tmp_path / "new", trained / "text.xz", "--time-limit", "500")) == 1
    assert stubbed == [("bfloat16", 1)] and "1 runs are left" in capsys.readouterr().err


@pytest.mark.parametrize("more", [["--seed", "3"], ["--use-amp"], ["--data=x"], ["--fp8"]])
def test_options_that_the_tool_chooses_are_refused(more, tmp_path, capsys):
    given = [*arguments(tmp_path, "text.xz"), *more]
    refused(train_precisions.main, given, capsys, f"{more[0]} is chosen by this tool for each run")


@pytest.mark.slow
def test_results_of_another_study_are_refused(trained, stubbed, tmp_path, capsys):
    shutil.copytree(trained / "results", tmp_path / "new")
    given = [*arguments(tmp_path / "new", trained / "text.xz"), "--num-steps", "3"]
    refused(train_precisions.main, given, capsys, "has another settings than the other runs: choose another folder")
    assert stubbed == []


@pytest.mark.slow
def test_a_loss_that_is_not_finite_is_a_failure_in_one_sentence(trained, tmp_path, monkeypatch, capsys):
    def train(trainer, seed, nudge):
        raise FloatingPointError("the loss of step 2 is nan: lower --learning-rate")

    if not HAS_FP8:
        monkeypatch.setitem(VARIANTS, "fp8", "bfloat16")
    monkeypatch.setattr(train_precisions.WarmTrainer, "train", train)
    given = arguments(tmp_path / "new", trained / "text.xz")
    refused(train_precisions.main, given, capsys, "bfloat16, seed 0: stopped: the loss of step 2 is nan", status=1)
    assert list((tmp_path / "new").iterdir()) == []


# ---------------------------------------------------------------- pairs and pages

RECORD = {"commit": "0123456789", "device": "Toy GPU", "driver": None, "packages": {}, "host": "a"}
ABOUT = {"what": "pages", "packages": ["a 1", "b 2"]}
ABOUT |= {part: {"bytes": 10, "files": 1, "sha256": ""} for part in ("train", "held_out")}
SETTINGS = {"preset": "medium", "steps": 40, "batch_size": 2, "seq_len": 8, "seeds": 3, "held_out_tokens": 64}
LOSSES = {  # of seeds 0 to 2
    "bfloat16": (1.0, 1.5, 2.0),
    "nudged": (1.01, 1.49, 2.01),
    "fp8": (1.03, 1.52, 2.01),
    "tf32": (0.9, 1.6, 1.9),
}


def made(variant, seed):
    """Return a run with known losses; the held-out loss is twice the training loss."""
    loss = LOSSES[variant][seed]
    numbers = {"training_loss": loss, "held_out_loss": 2 * loss, "curve": [loss + 1, loss], "seconds": 1}
    told = {"record": RECORD, "script_sha256": "0", "settings": SETTINGS, "text": ABOUT, "batches_sha256": str(seed)}
    return told | numbers | {"variant": variant, "seed": seed}


@pytest.fixture
def folder(tmp_path):
    """A recorded run's folder with the part of losses, complete."""
    part = tmp_path / "record" / "losses"
    part.mkdir(parents=True)
    for variant in VARIANTS:
        for seed in range(3):
            losses.write_run(made(variant, seed), part)
    (part / "record.json").write_text("{}")
    return part.parent


def test_differences_are_taken_within_a_seed(folder):
    runs = read_complete(folder / "losses")
    assert judged(runs, "fp8", "training_loss").values == pytest.approx([0.03, 0.02, 0.01])
    assert judged(runs, "tf32", "held_out_loss").values == pytest.approx([-0.2, 0.2, -0.2])
    assert str(judged(runs, "fp8", "held_out_loss")) == "+0.0400 (+0.0200 to +0.0600)"


def test_a_difference_is_shown_if_all_seeds_agree_and_chaos_is_smaller(folder):
    runs = read_complete(folder / "losses")
    assert verdict(runs, "fp8", "training_loss") == "the training loss is 0.0200 higher"
    assert verdict(runs, "tf32", "training_loss") == "no difference shown in the training loss"  # the seeds disagree
    assert not judged(runs, "nudged", "training_loss").shown
    runs["nudged", 2]["training_loss"] = 2.0 - 0.021  # chaos goes further than fp8's mean
    assert not judged(runs, "fp8", "training_loss").shown
    for seed, loss in enumerate(LOSSES["bfloat16"]):
        runs["fp8", seed]["training_loss"] = loss - 0.03
    assert verdict(runs, "fp8", "training_loss") == "the training loss is 0.0300 lower"


def test_a_page_says_that_nothing_is_measured_until_the_part_is_complete(folder):
    recorded = Record(folder)
    text = losses.losses_text(recorded, lambda record, _: f"Measured on {record['device']}.")
    assert text.startswith("We trained medium for 40 steps of 2 sequences of 8 tokens")
    assert "Measured on Toy GPU." in text
    assert "| fp8 | 1.5200 | 3.0400 | +0.0200 (+0.0100 to +0.0300) | +0.0400 (+0.0200 to +0.0600) |" in text
    assert "fp8: the training loss is 0.0200 higher; the held-out loss is 0.0400 higher. TF32: no diff" in text
    path = path_of(folder / "losses", "fp8", 2)
    path.write_text(json.dumps(made("fp8", 2) | {"record": {**RECORD, "host": "b"}}))
    assert " 2 machines." in losses.losses_text(recorded, lambda record, _: "") and "machines" not in text
    (folder / "losses" / "record.json").unlink()
    assert losses.losses_text(recorded, None) == losses.NOT_MEASURED


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"training_loss": float("nan")}, "fp8_seed1.json is cut off or damaged: 'NaN' isn't a number"),
        ({"held_out_loss": None}, "damaged: held_out_loss must be a finite number, got None"),
        ({"curve": [1.0, "low"]}, "damaged: the curve must be a finite number, got low"),
        ({"seed": 2}, "damaged: it is of fp8, seed 2"),
        ({"text": {**ABOUT, "what": "books"}}, "has another text than the other runs"),
        ({"settings": {**SETTINGS, "steps": 41}}, "has another settings than the other runs"),
        ({"record": {**RECORD, "device": "Another GPU"}}, "is of another device than the other runs"),
        ({"record": {**RECORD, "commit": "9876543210"}}, "is of another commit than the other runs"),
        ({"batches_sha256": "7"}, "the runs of seed 1 had different batches and cannot be compared"),
    ],
)
def test_damaged_results_are_refused_in_one_sentence(changes, said, folder):
    path_of(folder / "losses", "fp8", 1).write_text(json.dumps(made("fp8", 1) | changes))
    with pytest.raises(Failure, match=said):
        losses.losses_text(Record(folder), None)


def test_missing_results_are_named(folder):
    for variant, seed in (("fp8", 1), ("tf32", 2)):
        path_of(folder / "losses", variant, seed).unlink()
    with pytest.raises(Failure, match="losses lacks fp8 with seed 1, tf32 with seed 2: repeat the command"):
        read_complete(folder / "losses")
    path_of(folder / "losses", "bfloat16", 0).write_text('{"record": {}}')
    with pytest.raises(Failure, match="bfloat16_seed0.json is cut off or damaged: it has no 'script_sha256'"):
        read_complete(folder / "losses")
    with pytest.raises(Failure, match="holds no results of train_precisions.py"):
        read_complete(folder)
