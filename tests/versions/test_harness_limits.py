"""Numbers of the harness that decide what is refused: the last value that is accepted, and the first that is not."""

import math

import pytest
import torch
from torch.torch_version import TorchVersion

from common.versions import load_version
from training import train

SIZES = "--hidden-dim 32 --num-layers 2 --num-heads 2 --vocab-size 128 --seq-len 8 --batch-size 2 --device cpu".split()

# ---------------------------------------------------------------- options

RANGES = {  # the smallest and the largest value
    "--batch-size": (1, 2**24),
    "--seq-len": (1, 2**24),
    "--hidden-dim": (1, 2**24),
    "--num-layers": (1, 10_000),
    "--num-heads": (1, 2**24),
    "--num-kv-heads": (1, 2**24),
    "--intermediate-dim": (1, 2**24),
    "--vocab-size": (1, 2**24),
    "--num-steps": (1, 10**9 - 1),  # a checkpoint's name has nine digits
    "--warmup-steps": (0, 2**63 - 1),
    "--save-every": (0, 2**63 - 1),
    "--seed": (0, 2**63 - 1),  # what PyTorch's generators take
    "--profile-steps": (1, 10_000),
}


@pytest.mark.parametrize("option", RANGES)
def test_whole_numbers_are_taken_from_the_smallest_to_the_largest(option, capsys):
    parse = load_version(1).build_parser().parse_args
    name = option.strip("-").replace("-", "_")
    for value in RANGES[option]:
        assert getattr(parse([option, str(value)]), name) == value
    low, high = RANGES[option]
    for value in (low - 1, high + 1):
        with pytest.raises(SystemExit):
            parse([option, str(value)])
        assert f"must be a whole number from {low} to {high}, got {value}" in capsys.readouterr().err


@pytest.mark.parametrize(("text", "taken"), [("1e-30", True), ("0.9e-30", False), ("1e30", True), ("1.1e30", False)])
def test_a_learning_rate_leaves_room_for_its_square(text, taken, capsys):
    parse = load_version(1).build_parser().parse_args
    if taken:
        assert parse(["--lr", text]).learning_rate == float(text)
    else:
        with pytest.raises(SystemExit):
            parse(["--lr", text])


def test_a_gpu_that_pytorch_sees_is_taken(monkeypatch, capsys):
    script = load_version(1)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert script.parse_options([*SIZES, "--device", "cuda:1"]).device == "cuda:1"
    with pytest.raises(SystemExit):
        script.parse_options([*SIZES, "--device", "cuda:2"])
    assert "--device cuda:2 does not exist (PyTorch sees 2 GPUs)" in capsys.readouterr().err


@pytest.mark.parametrize(("version", "taken"), [("2.8.1", False), ("2.9.0", True), ("2.10.0", True)])
def test_fsdp_on_a_cpu_needs_a_pytorch_that_can(version, taken, monkeypatch):
    script = load_version(1)
    options = script.parse_options(SIZES)
    vars(options).update(parallel="fsdp", launched=True)
    monkeypatch.setattr(torch, "__version__", TorchVersion(version))
    if taken:
        script.check_options(options)
    else:
        with pytest.raises(script.UserError, match="--parallel fsdp on a CPU needs PyTorch 2.9, got 2.8.1"):
            script.check_options(options)


# ---------------------------------------------------------------- text


@pytest.mark.parametrize(("size", "taken"), [(8, False), (9, True)])
def test_a_text_holds_at_least_one_window(size, taken, tmp_path):
    """A window of 8 tokens and their labels are 9 bytes."""
    path = tmp_path / "text"
    path.write_bytes(bytes(range(97, 97 + size)))
    script = load_version(1)
    options = script.parse_options([*SIZES, "--data", str(path)])
    if taken:
        tokens, labels = script.batch(script.load_data(options), 0, options)
        assert tokens.tolist() == [[*range(97, 105)]] * 2 and labels.tolist() == [[*range(98, 106)]] * 2
    else:
        with pytest.raises(script.UserError, match=f"--seq-len must be less than the {size} bytes of text"):
            script.load_data(options)


def test_the_last_window_of_a_text_is_drawn_too(tmp_path):
    path = tmp_path / "text"
    path.write_bytes(b"abcdefghij")
    script = load_version(1)
    options = script.parse_options([*SIZES, "--data", str(path), "--batch-size", "64"])
    tokens, labels = script.batch(script.load_data(options), 0, options)
    assert set(tokens[:, 0].tolist()) == {97, 98} and labels.max() == 106


@pytest.mark.parametrize(
    ("files", "text"), [(["only one"], b"only one"), (["one", "two\n"], b"one\ntwo\n"), (["1", "2", "3"], b"1\n2\n3")]
)
def test_a_line_break_stands_between_two_files_of_a_folder_and_not_after_the_last(files, text, tmp_path):
    """In the order of their names; a folder in it is left out."""
    (tmp_path / "0").mkdir()
    for number, content in reversed([*enumerate(files, 1)]):
        (tmp_path / f"{number}.txt").write_text(content)
    script = load_version(1)
    options = script.parse_options([*SIZES, "--seq-len", "4", "--data", str(tmp_path)])
    assert script.load_data(options).bytes.tobytes() == text


@pytest.mark.parametrize(("place", "taken"), [(7999, False), (8000, True)])
def test_a_nul_byte_among_the_first_8000_makes_a_file_binary(place, taken, tmp_path):
    """As for git."""
    path = tmp_path / "text"
    path.write_bytes(b"a" * place + b"\0" + b"a" * 9)
    script = load_version(1)
    options = script.parse_options([*SIZES, "--data", str(path)])
    if taken:
        assert "8,010 bytes of text" in script.load_data(options).description
    else:
        with pytest.raises(script.UserError, match="holds no text"):
            script.load_data(options)


# ---------------------------------------------------------------- what a run computes


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_one_weight_that_is_not_finite_fails_the_run(value):
    """The last element of the last parameter, after the last step, whose loss does not show it."""
    script = load_version(1)
    _, trainer = train(1, [*SIZES, "--num-steps", "1"], steps=0)
    data = script.load_data(trainer.options)
    last = list(trainer.model.parameters())[-1]
    run = trainer.run

    def spoil(*batch):
        record = run(*batch)
        with torch.no_grad():
            last.view(-1)[-1] = value
        return record

    trainer.run = spoil
    with pytest.raises(FloatingPointError, match="the weights are not finite after step 1"):
        script.train(trainer, data, 0, [])


@pytest.mark.parametrize("value", [math.inf, math.nan])
@pytest.mark.parametrize("key", ["weight", "exp_avg", "exp_avg_sq"])
def test_no_checkpoint_holds_a_number_that_is_not_finite(key, value, tmp_path):
    """Not even as the last element of the last parameter."""
    script = load_version(1)
    _, trainer = train(1, [*SIZES, "--save-every", "1", "--checkpoint-dir", str(tmp_path)], steps=1)
    name, last = list(trainer.model.named_parameters())[-1]
    held = last if key == "weight" else trainer.optimizer.state[last][key]
    with torch.no_grad():
        held.view(-1)[-1] = value
    told = name if key == "weight" else f"{name}.{key}"
    with pytest.raises(FloatingPointError, match=f"^{told} is not finite after step 1"):
        script.save_checkpoint(trainer, 1)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("bits", "is_tf32"), [(10, True), (11, True), (12, False), (23, False)])
@pytest.mark.parametrize("version", [1, 2, 3, 4])
def test_matmuls_that_keep_12_fraction_bits_are_no_tf32(version, bits, is_tf32, monkeypatch):
    class Rounded:
        def __init__(self, shape, value, device):
            self.whole = torch.ones(shape) * round(value * 2**bits) / 2**bits

        def __matmul__(self, other):
            return self.whole @ other

    monkeypatch.setattr(torch, "full", Rounded)
    assert load_version(version).rounds_to_tf32("cpu") is is_tf32


# ---------------------------------------------------------------- version 3


@pytest.mark.parametrize(("width", "taken"), [(32768, True), (32769, False)])
def test_the_norms_kernel_takes_rows_up_to_a_width(width, taken):
    script = load_version(3)
    options = script.parse_options([*SIZES, "--disable-attention-kernel"])
    vars(options).update(hidden_dim=width)
    if taken:
        script.complete_version_options(options)
    else:
        with pytest.raises(
            script.UserError, match="--hidden-dim must be at most 32768 for the RMSNorm kernel, got 32769"
        ):
            script.complete_version_options(options)


@pytest.mark.parametrize(
    ("release", "numpy_release", "taken"),
    [
        ("3.6.9", "2.4.0", False),
        ("3.6.9", "2.10.0", False),
        ("3.6.9", "2.3.9", True),
        ("3.7.0", "2.4.0", True),
        ("3.10.0", "2.10.0", True),
    ],
)
def test_old_interpreters_need_an_old_numpy(release, numpy_release, taken, monkeypatch):
    script = load_version(3)
    options = script.parse_options(SIZES)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(script.triton, "__version__", release)
    monkeypatch.setattr(script.np, "__version__", numpy_release)
    if taken:
        script.complete_version_options(options)
    else:
        with pytest.raises(script.UserError, match=f"numpy must be < 2.4 for the interpreter of Triton {release}, got"):
            script.complete_version_options(options)
