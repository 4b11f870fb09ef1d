"""The scripts as they are called: options, refusals, and what they print and write."""

import contextlib
import datetime
import hashlib
import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from common.command_line import PRESETS
from common.measuring.peers import peer_script
from common.versions import SCRIPTS, load_version, workshop
from marks import slow
from processes import run_fork
from training import train

MINI = "--hidden-dim 32 --num-layers 1 --num-heads 2 --vocab-size 40 --seq-len 8 --batch-size 2".split()
SHORT = [*MINI, "--num-steps", "3", "--warmup-steps", "1"]
OF_ATTENTION = {"qkv projection", "rope", "attention", "output projection"}
RANGES = {"forward", "backward", "optimizer", "rms norm", "feed-forward", "output head", "loss"} | OF_ATTENTION


def call(version, argv, capsys):
    """Return exit status, standard output and standard error of a script's main."""
    with mock.patch.object(sys, "argv", [str(SCRIPTS[version])]):  # argparse takes the program's name from it
        try:
            status = load_version(version).main([str(argument) for argument in argv])
        except SystemExit as end:
            status = end.code
        except KeyboardInterrupt:  # it would end pytest
            status = "a traceback of KeyboardInterrupt"
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def strict_json(text):
    """Parse JSON without NaN and Infinity, which only Python's reader accepts."""
    return json.loads(text, parse_constant=lambda constant: pytest.fail(f"{constant} is not JSON"))


# ---------------------------------------------------------------- options

# The options of the workshop's guides and all others, but for the switches of test_gradients.py: each line must parse.
COMMAND_LINES = {
    "1234": """
        --batch-size 8 --seq-len 128 --num-steps 20 --hidden-dim 512 --num-layers 8 --num-heads 8 --learning-rate 3e-4
        --lr 1e-3
        --num-kv-heads 4 --intermediate-dim 1408 --vocab-size 32000 --preset tiny --seed 3 --warmup-steps 0
        --preset small --deterministic --no-graph
        --preset medium --no-deterministic --graph --tf32
        --use-amp --amp-dtype float16 --data long.txt --seq-len 8 --vocab-size 128
        --device DEVICE --validate-setup --save-every 5 --checkpoint-dir folder/new --metrics-file metrics.json --resume
        --enable-pytorch-profiler --profile-dir folder --profile-steps 5 --profile-memory --profile-operators
        --enable-memory-profiling --profile-attention-only --profile-operators --sort-by self_cpu_time_total
    """,
    "2": """
        --enable-torch-compile --compile-mode max-autotune
        --enable-all-fusion --use-amp --amp-dtype bfloat16
        --disable-all-fusion
    """,
    "3": """
        --disable-attention-kernel --use-amp --fp8
        --hidden-dim 32768 --num-heads 256
    """,
    "4": """
        --attention-backend auto --disable-torch-compile
        --enable-torch-compile --compile-mode default
    """,
}
# Option: values that must be refused, each alone on a command line; the error names the option.
ODD_VALUES = {
    "--batch-size": "0 2.5 1e3 1_0 \uff11\uff10 \u0661 99999999999999999999999 ''",
    "--seq-len": "-1 eight 16777217",
    "--hidden-dim": "0 -512 100",
    "--num-layers": "0 1000000000",
    "--num-heads": "0 7",
    "--num-kv-heads": "0 3 16",
    "--intermediate-dim": "-5 nan",
    "--vocab-size": "0 1000000000000",
    "--num-steps": "0 -3 1000000000 inf",
    "--warmup-steps": "-1 9223372036854775808",
    "--profile-steps": "0 10001",
    "--save-every": "-2 often",
    "--seed": "-1 1180591620717411303424 0x10",
    "--learning-rate": "0 -1e-3 nan inf 1e400 1_0 \uff11 fast",
    "--preset": "huge default ''",
    "--amp-dtype": "float8 ''",
    "--sort-by": "beauty ''",
    "--parallel": "ddp fsdp zero",
    "--device": "toaster meta mps CPU cpu:0 cpu:5 cuda:99 cuda:-1 cuda:1e3 cuda:99999999999999999999 ''",
    "--data": "'' nowhere.txt empty.txt folder binary short.txt long.txt/below LONGNAME fifo /dev/zero",
    "--metrics-file": "'' no/folder/metrics.json folder / long.txt/metrics.json dangling fifo /dev/null",
    "--save-every 1 --checkpoint-dir": "'' long.txt long.txt/below dangling LONGNAME /proc/none",
    "--profile-operators --profile-dir": "'' long.txt long.txt/below dangling LONGNAME /proc/none",
    "--resume --checkpoint-dir": "nowhere folder LONGNAME long.txt not-ours damaged",
}
# Words of the error, a colon, and a command line with the error.
ODD_COMMAND_LINES = {
    "1234": """
        --batch-size: --batch-size
        --hidden-dim: --hidden-dim 24 --num-heads 8
        --use-amp: --use-amp=yes
        --resume: --resume=yes
        --frobnicate: --frobnicate
        stray --presett huge (did you mean --preset?): stray --presett huge
        (did you mean --num-steps?): --steps 3
        (did you mean --batch-size?): -batch-size 8
        (did you mean --preset?): \u2013preset small
        --amp-dtype needs --use-amp: --amp-dtype bfloat16
        GPUs): use --device cpu: --device cuda:99
        --lr: must be a number from 1e-30 to 1e+30, got 0,1: --lr 0,1
        must be a whole number from 1 to 999999999, got 1,000: --num-steps 1,000
        --peer-adamw: --peer-adamw
        --compress-gradients: --compress-gradients
        stray: stray
        (run run_deepspeed_flops.py instead): --enable-deepspeed-flops
        (run get_hotspots.sh, get_trace.sh or another wrapper instead): --enable-rocm-profiling
        (run run_all_profilers.sh instead): --enable-all-profiling
        (run compare_versions.py instead): --compare-with-v1 v1.json
        --profile-dir has no effect without --enable-pytorch-profiler: --profile-dir folder
        --profile-steps has no effect without --enable-pytorch-profiler: --profile-steps 5
        --sort-by has no effect without --profile-operators: --enable-pytorch-profiler --sort-by count
        (did you mean --seed?): -s 3
        -x: -x
        --data: --data
        --vocab-size: --data long.txt --vocab-size 100 --seq-len 8
        holds no text: a file with a NUL byte: --data binary
        would become text of --data: --data long.txt --metrics-file folder/../long.txt
        would become text of --data: --data folder --metrics-file folder/metrics.json
    """,
    "1": "(--help lists what version 1 has): --compile",
    "24": "(did you mean --enable-torch-compile?): --compile",
    "2": """
        --compile-mode: --compile-mode wildly
        needs --enable-torch-compile: --compile-mode max-autotune
        --compile-mode: --enable-torch-compile --compile-mode reduce-overhead --graph
        --enable: --enable
    """,
    "3": """
        --hidden-dim: --hidden-dim 96 --num-heads 4
        at most 32768: --hidden-dim 32896 --num-heads 257 --num-kv-heads 1
        --disable-attention-kernel: --hidden-dim 24 --num-heads 1
        optimizer: --use-amp --amp-dtype float16 --disable-optimizer-kernel
        loss kernel: --enable-fused-loss --disable-loss-kernel
        --use-amp: --fp8
        bfloat16: --fp8 --use-amp --amp-dtype float16
        of 16: batch_size x seq_len is 24: --fp8 --use-amp --disable-attention-kernel --batch-size 1 --seq-len 24
        of 16: key width is 40: --fp8 --use-amp --disable-attention-kernel --hidden-dim 80 --num-heads 2
        swiglu kernel: --fp8 --use-amp --disable-attention-kernel --disable-swiglu-kernel
        of 16: intermediate_dim is 40: --fp8 --use-amp --disable-attention-kernel --intermediate-dim 40
    """,
    "4": """
        --attention-backend: --attention-backend fastest
        --attention-backend: --attention-backend flex --disable-torch-compile
        needs --enable-torch-compile: --compile-mode max-autotune --disable-torch-compile
    """,
}
ON_A_CPU = {
    "3": f"""
        needs a GPU: --enable-torch-compile
        add --amp-dtype float16 or --disable-attention-kernel: --use-amp
        {"add --disable-attention-kernel" if torch.__version__ >= (2, 13) else "leave out --fp8"}: --use-amp --fp8
    """,
    "4": "--attention-backend: --attention-backend cudnn",
}


def lines_of(table, version):
    lines = [line.strip() for versions, text in table.items() if str(version) in versions for line in text.splitlines()]
    return [line for line in lines if line]


@pytest.fixture
def surroundings(tmp_path, monkeypatch):
    """Run in a folder with texts, links and checkpoints that are no good."""
    monkeypatch.chdir(tmp_path)
    for name in ("folder", "damaged", "not-ours"):
        (tmp_path / name).mkdir()
    (tmp_path / "read-only").mkdir(mode=0o500)
    (tmp_path / "dangling").symlink_to("nowhere/below")
    (tmp_path / "empty.txt").touch()
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "short.txt").write_text("too short")
    (tmp_path / "long.txt").write_text("z" * 100)
    (tmp_path / "binary").write_bytes(bytes(1000))
    (tmp_path / "damaged" / "step_000000005.pt").write_bytes(b"half of a checkpoint")
    (tmp_path / "not-ours" / "step_best.pt").write_bytes(b"somebody's")


@pytest.mark.parametrize("version", SCRIPTS)
def test_every_documented_option_parses(version, surroundings, device):
    script, given = load_version(version), {"-h", "--help", "--parallel"}  # the last under torchrun only
    for line in lines_of(COMMAND_LINES, version):
        given |= {word for word in line.split() if word.startswith("--")}
        if "--fp8" not in line or torch.cuda.is_available() or torch.__version__ >= (2, 13):
            script.parse_options(line.replace("DEVICE", device.type).split())
    known = {option for action in script.build_parser()._actions for option in action.option_strings}
    assert not {option for option in known - given if not re.match("--(enable|disable)", option)}


@pytest.mark.parametrize("version", SCRIPTS)
def test_odd_command_lines_are_refused_in_one_sentence(version, surroundings, capsys, monkeypatch):
    script = load_version(version)
    monkeypatch.setattr(script, "Trainer", lambda *_: pytest.fail("a model was built"))
    lines = lines_of(ODD_COMMAND_LINES, version)
    for options, values in ODD_VALUES.items():
        named = options.split()[0 if "resume" in options else -1]
        lines += [f"{named}: {options} {value}" for value in values.split()]
    assert len(lines) >= 95
    if os.geteuid() != 0:  # root may write everywhere
        lines += ["--metrics-file: --metrics-file read-only/metrics.json"]
        lines += ["--profile-dir: --profile-memory --profile-dir read-only"]
        lines += ["--checkpoint-dir: --save-every 1 --checkpoint-dir read-only"]
    if not torch.cuda.is_available():
        lines += lines_of(ON_A_CPU, version)
    for line in lines:
        words, _, argv = line.rpartition(": ")
        status, out, err = call(version, shlex.split(argv.replace("LONGNAME", "n" * 5000)), capsys)
        assert status == 2 and not out, f"{line}: status {status}"
        assert words in err and err.startswith(SCRIPTS[version].name) and err.count("\n") == 1, f"{line}: {err}"


@pytest.mark.parametrize(("text", "needed"), [("zzzz", 123), ("a~za", 127), ("\t" * 4, 10), ("\xff" * 4, 256)])
def test_the_vocabulary_must_hold_the_largest_byte(text, needed, tmp_path, monkeypatch):
    """Python's max over bytes takes 20 s per GiB."""
    script = load_version(1)
    (tmp_path / "text").write_text(text, encoding="latin-1")
    options = ["--data", str(tmp_path / "text"), "--seq-len", "2", "--vocab-size"]
    enough, too_few = (script.parse_options([*options, str(size)]) for size in (needed, needed - 1))
    monkeypatch.setattr(script, "max", lambda *_: pytest.fail("Python's max"), raising=False)
    script.load_data(enough)
    with pytest.raises(script.UserError, match=rf"^--vocab-size must be at least {needed} for --data"):
        script.load_data(too_few)


def test_data_larger_than_the_memory_is_named(surroundings, monkeypatch):
    """As a sparse file is: no smaller batch would help."""

    def fromfile(path, dtype):
        raise MemoryError

    script = load_version(1)
    config = script.parse_options(["--data", "long.txt"])
    monkeypatch.setattr(script.np, "fromfile", fromfile)
    with pytest.raises(script.UserError, match=r"^--data long.txt does not fit into memory$"):
        script.load_data(config)


@pytest.mark.parametrize("version", SCRIPTS)
def test_help_has_an_example_that_works(version, capsys):
    _, out, _ = call(version, ["--help"], capsys)
    program, script, *argv = shlex.split(out.split("example:")[1])
    assert (program, script) == ("python", SCRIPTS[version].name)
    assert load_version(version).parse_options(argv).num_steps > 0


@pytest.mark.parametrize("version", SCRIPTS)
def test_defaults_and_presets(version):
    script = load_version(version)
    assert set(script.PRESETS) == {"default", "check", *PRESETS}
    sizes = ("hidden_dim", "num_layers", "num_heads", "num_kv_heads", "intermediate_dim", "seq_len", "batch_size")
    for argv, wanted in {
        "": (512, 8, 8, 4, 2048, 256, 8),
        "--preset tiny": (256, 4, 8, 4, 512, 128, 8),
        "--preset small": (512, 8, 8, 4, 2048, 128, 8),
        "--preset medium": (1024, 12, 16, 8, 4096, 512, 16),
        "--preset small --num-layers 2 --seq-len 64": (512, 2, 8, 4, 2048, 64, 8),
        "--hidden-dim 64 --num-heads 4": (64, 8, 4, 2, 256, 256, 8),
        "--preset tiny --hidden-dim 128 --num-heads 1": (128, 4, 1, 1, 512, 128, 8),
        "--preset tiny --hidden-dim 256": (256, 4, 8, 4, 512, 128, 8),  # the preset's width: its feed-forward fits
        "--validate-setup": (64, 2, 4, 2, 256, 32, 2),
        "--validate-setup --preset tiny": (256, 4, 8, 4, 512, 128, 8),
        "--validate-setup --seq-len 48": (64, 2, 4, 2, 256, 48, 2),
    }.items():
        config = script.parse_options(argv.split())
        assert tuple(getattr(config, name) for name in sizes) == wanted, argv
    config = script.parse_options([])
    assert (config.num_steps, config.vocab_size, config.learning_rate) == (50, 1000, 3e-4)
    assert (config.norm_eps, config.rope_theta) == (1e-6, 10000.0)
    assert config.deterministic == (version == 1) and config.graph == (version in (3, 4))
    assert script.parse_options(["--enable-memory-profiling"]).profile_memory


FUSIONS = ("qkv_fusion", "flash_attention", "swiglu_fusion", "fused_optimizer", "torch_compile")


@pytest.mark.parametrize(
    "argv, on, parts",
    [
        ("", FUSIONS[:4], "qkv-fusion, flash-attention, swiglu-fusion, fused-optimizer"),
        ("--disable-all-fusion", (), "none fused"),
        (" ".join(f"--disable-{name.replace('_', '-')}" for name in FUSIONS), (), "none fused"),
        ("--enable-all-fusion", FUSIONS, "qkv-fusion, flash-attention, swiglu-fusion, fused-optimizer, torch-compile"),
        ("--disable-all-fusion --enable-swiglu-fusion", ("swiglu_fusion",), "swiglu-fusion"),
        ("--enable-flash-attention --disable-all-fusion", ("flash_attention",), "flash-attention"),
        ("--enable-all-fusion --disable-torch-compile --disable-qkv-fusion", FUSIONS[1:4], None),
    ],
)
def test_one_option_for_all_fusions(argv, on, parts):
    """A fusion's own option wins, wherever it stands."""
    config = load_version(2).parse_options(argv.split())
    assert {name for name in FUSIONS if getattr(config, f"enable_{name}")} == set(on)
    assert parts in (None, config.parts)
    assert config.model.enable_qkv_fusion == ("qkv_fusion" in on)


@pytest.mark.parametrize("version", SCRIPTS)
def test_precision_and_determinism_are_set(version, backend_settings):
    script = load_version(version)
    for argv, tf32, deterministic in (
        ([], False, version == 1),
        (["--tf32", "--deterministic"], True, True),
        (["--no-deterministic"], False, False),
    ):
        torch.use_deterministic_algorithms(False)
        script.set_up_backend(script.parse_options(argv))
        assert torch.get_float32_matmul_precision() == ("high" if tf32 else "highest")
        assert torch.are_deterministic_algorithms_enabled() == deterministic
        assert not (deterministic and torch.utils.deterministic.fill_uninitialized_memory)


@pytest.mark.parametrize(
    ("triton", "numpy", "works"), [("3.6.0", "2.4.1", False), ("3.6.0", "2.3.5", True), ("3.7.1", "2.10.0", True)]
)
def test_an_interpreter_that_numpy_stops_is_named(triton, numpy, works, monkeypatch, capsys):
    """NumPy 2.4 refuses one-element arrays as loop bounds, which Triton's interpreter uses before 3.7."""
    script = load_version(3)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(script.triton, "__version__", triton)
    monkeypatch.setattr(script.np, "__version__", numpy)
    monkeypatch.setattr(script, "Trainer", lambda *_: sys.exit(0))
    status, _, err = call(3, ["--device", "cpu"], capsys)
    assert (status, "numpy must be < 2.4" in err) == ((0, False) if works else (2, True))


# ---------------------------------------------------------------- what a run writes and prints

STEP_KEYS = {"step", "loss", "forward_ms", "backward_ms", "optimizer_ms", "step_ms"}
SUMMARY_KEYS = set(
    """parameters parameters_trained step_ms forward_ms backward_ms optimizer_ms samples_per_second tokens_per_second
    peak_memory_mb first_loss final_loss best_loss_known flops_per_step tflops precision graph warmup_s parallel
    world_size rank_step_ms rounds_to_tf32""".split()
)
ENVIRONMENT_KEYS = set("workshop device device_type python torch triton cuda hip date commit script_sha256".split())


def check_metrics(version, metrics):
    """Check the keys, what follows from the steps, and what can be counted by hand."""
    assert list(metrics) == ["version", "config", "options", "environment", "steps", "summary"]
    steps, summary, options, config = (metrics[name] for name in ("steps", "summary", "options", "config"))
    environment, device = metrics["environment"], "cuda" if torch.cuda.is_available() else "cpu"
    assert metrics["version"] == version and environment.keys() == ENVIRONMENT_KEYS
    assert environment["workshop"] == workshop()
    assert environment["script_sha256"] == hashlib.sha256(SCRIPTS[version].read_bytes()).hexdigest()
    assert (environment["torch"], environment["device_type"]) == (torch.__version__, device)
    age = datetime.datetime.now(datetime.timezone.utc) - datetime.datetime.fromisoformat(environment["date"])
    assert environment["commit"] is None and age < datetime.timedelta(hours=1)  # the copy has no repository
    assert (options["hidden_dim"], options["num_steps"], options["metrics_file"]) == (32, 3, "metrics.json")
    assert (config["hidden_dim"], config["num_kv_heads"], config["intermediate_dim"]) == (32, 1, 128)
    assert [step.keys() for step in steps] == [STEP_KEYS] * 3 and [step["step"] for step in steps] == [0, 1, 2]
    for step in steps:
        phases = [step[f"{phase}_ms"] for phase in ("forward", "backward", "optimizer")]
        assert None in phases or 0 < sum(phases) <= 1.05 * step["step_ms"]
    reason = summary["graph"]["reason"] if device == "cuda" else "a CPU has no graphs"
    reason = reason if version > 2 else "no --graph"
    low, median, high = sorted(step["step_ms"] for step in steps)
    # embedding, norms, q and o, k and v, gate and up and down
    count = 40 * 32 + 3 * 32 + 2 * 32 * 32 + 2 * 16 * 32 + 3 * 32 * 128
    assert summary.keys() == SUMMARY_KEYS and summary["warmup_s"] > 0 and summary["peak_memory_mb"] > 0
    expected = {
        "first_loss": steps[0]["loss"],
        "final_loss": steps[-1]["loss"],
        "best_loss_known": pytest.approx(1.75 * math.log(2)),
        "step_ms": pytest.approx({"median": median, "p25": (low + median) / 2, "p75": (median + high) / 2}),
        "samples_per_second": pytest.approx(2 * 1000 / median),
        "tokens_per_second": pytest.approx(8 * 2 * 1000 / median),
        "tflops": pytest.approx(summary["flops_per_step"] / median / 1e9),
        "parameters": count,
        "parameters_trained": count,
        "precision": "float32",
        "rounds_to_tf32": None,
        "graph": {"captured": reason is None, "reason": reason},
    }
    assert {name: summary[name] for name in expected} == expected


def check_printed(version, metrics, out):
    assert out.startswith(f"Tiny LLaMA version {version} on ")
    pattern = r"^step +(\d)/3  loss +([\d.]+) +[\d.]+ samples/s +[\d.]+ ms  peak +[\d.]+ MiB$"
    lines = [(int(step) - 1, float(loss)) for step, loss in re.findall(pattern, out, re.MULTILINE)]
    assert lines == [(step["step"], pytest.approx(step["loss"], abs=1e-4)) for step in metrics["steps"]]
    count = f"{metrics['summary']['parameters']:,}"
    assert f"trained    {count} of {count} parameters (100.0 %)" in out and "entropy of the data 1.2130" in out
    assert ("interpreter" in out) == (version == 3 and not torch.cuda.is_available())


@pytest.mark.parametrize("version", [version if version == 3 else slow(version) for version in SCRIPTS])
def test_a_script_alone(version, tmp_path, capsys):
    """Copied to a folder with a space in its name, it runs, and prints and writes what it promises.

    Versions 2 and 4 run in forks; a test of the harness shows that no script imports this repository.
    """
    for name in ("an empty folder", "elsewhere"):
        (tmp_path / name).mkdir()
    script = shutil.copy(SCRIPTS[version], tmp_path / "an empty folder")
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "TRITON_INTERPRET")}
    words, folder = [script, *SHORT, "--metrics-file", "metrics.json"], tmp_path / "elsewhere"
    if version in (2, 4):
        result = run_fork(*words, cwd=folder, env=environment)
    else:
        pipes = {"capture_output": True, "text": True, "timeout": 200, "env": environment}
        result = subprocess.run([sys.executable, *words], cwd=folder, **pipes)
    assert result.returncode == 0 and not result.stderr, result.stderr
    written = [path.name for path in tmp_path.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    assert sorted(written) == ["metrics.json", SCRIPTS[version].name]
    metrics = strict_json((tmp_path / "elsewhere" / "metrics.json").read_text())
    check_metrics(version, metrics)
    check_printed(version, metrics, result.stdout)
    assert call(1, [*SHORT, "--metrics-file", tmp_path / "v1.json"], capsys)[0] == 0
    wanted = [step["loss"] for step in strict_json((tmp_path / "v1.json").read_text())["steps"]]
    assert [step["loss"] for step in metrics["steps"]] == pytest.approx(wanted, rel=1e-5)


def test_commit_is_that_of_the_repository():
    script = load_version(1)
    git = subprocess.run(["git", "-C", SCRIPTS[1].parent, "rev-parse", "HEAD"], capture_output=True, text=True)
    wanted = git.stdout.strip() if git.returncode == 0 else None
    assert script.environment(script.parse_options([]))["commit"] == wanted


@pytest.mark.parametrize("version", [slow(version) if version == 3 else version for version in SCRIPTS])
def test_validate_setup(version, capsys):
    status, out, _ = call(version, [*MINI, "--validate-setup"], capsys)
    assert status == 0 and "set-up check passed" in out and "step     3/3" in out


# ---------------------------------------------------------------- profiling


def trace_in(folder):
    """Return the names of the events, and the script's metadata, of the only trace in a folder."""
    (path,) = folder.glob("trace_*.json")
    content = strict_json(path.read_text())
    return {event.get("name") for event in content["traceEvents"]}, content["tiny_llama"]


@pytest.mark.parametrize("part", ["whole", "attention"])
@pytest.mark.parametrize("version", SCRIPTS)
@pytest.mark.quick(1, each="part")
def test_a_trace_has_named_ranges_and_says_what_it_is_of(version, part, tmp_path, capsys):
    option = "--enable-pytorch-profiler" if part == "whole" else "--profile-attention-only"
    argv = [*SHORT, option, "--profile-dir", tmp_path / "new" / "folder", "--profile-steps", "1"]
    argv += ["--disable-torch-compile"] * (version == 4)  # compiled code has no ranges
    status, out, _ = call(version, argv, capsys)
    assert status == 0 and "perfetto" in out and "operators by" not in out
    names, metadata = trace_in(tmp_path / "new" / "folder")
    assert names & RANGES == (RANGES if part == "whole" else OF_ATTENTION)
    assert (metadata["version"], metadata["part"], metadata["precision"]) == (version, part, "float32")
    assert (metadata["hidden_dim"], metadata["seq_len"], metadata["batch_size"]) == (32, 8, 2)
    assert metadata["peak_memory_mb"] > 0 and metadata["rounds_to_tf32"] is None


def test_profiled_steps_go_on_with_the_batches_after_the_measured_ones(tmp_path, capsys, monkeypatch):
    script = load_version(1)
    drawn = []
    batch = script.batch
    monkeypatch.setattr(script, "batch", lambda data, step, config: drawn.append(step) or batch(data, step, config))
    argv = [*SHORT, "--enable-pytorch-profiler", "--profile-dir", tmp_path, "--profile-steps", "2"]
    assert call(1, argv, capsys)[0] == 0
    assert drawn == [0, 0, 1, 2, 3, 4]  # the first is that of the warm-up


def test_operators_are_sorted_by_the_key(tmp_path, capsys):
    """And profiling does not change the measured steps."""
    device, file = "device" if torch.cuda.is_available() else "cpu", tmp_path / "metrics.json"
    argv = [*SHORT, "--profile-operators", "--profile-memory", "--profile-dir", tmp_path, "--profile-steps", "1"]
    status, out, _ = call(1, [*argv, "--sort-by", "count", "--metrics-file", file], capsys)
    operators, memory = out.split("operators by ")[1:]
    counts = [int(count) for count in re.findall(r" (\d+) *$", operators, re.MULTILINE)]
    assert status == 0 and operators.startswith("count\n") and memory.startswith(f"self_{device}_memory_usage\n")
    assert len(counts) == 20 and counts == sorted(counts, reverse=True) and counts[0] > counts[-1]
    assert re.search(r"aten::\w+ .*\d (Kb|KB|b|B|Mb|MB)\b", memory)
    assert f"operators by {device}_time_total\n" in call(1, argv, capsys)[1]
    by_memory = call(1, [*argv, "--sort-by", "self_device_memory_usage"], capsys)[1]
    assert by_memory.count("operators by ") == 1  # both options ask for this table
    losses = [step["loss"] for step in strict_json(file.read_text())["steps"]]
    assert losses == train(1, [*SHORT, "--no-graph"], steps=3)[0]


@pytest.mark.parametrize("length", [100_000, 100_001, 300, 8])
def test_version_4_tries_its_attention_at_a_short_length_of_the_same_kind(length, monkeypatch):
    """At full length the check took a minute before any other option was looked at."""
    script, tried = load_version(4), []
    monkeypatch.setattr(script, "causal_attention", lambda q, k, v: tried.append(q.shape[1]) or q)
    script.parse_options(["--seq-len", str(length), "--device", "cpu"])
    assert tried and all(max(T - 511, T - length) <= 0 and (length - T) % 256 == 0 for T in tried)


@pytest.mark.parametrize(
    ("argv", "dtype"),
    [([], "float32"), (["--use-amp"], "bfloat16"), (["--use-amp", "--amp-dtype", "float16"], "float16")],
    ids=["float32", "bfloat16", "float16"],
)
def test_version_4_tries_its_attention_in_the_dtype_of_the_run(argv, dtype, monkeypatch):
    """A GPU's flash and cuDNN attention take 16 bits alone: tried in another dtype, a run would fail later."""
    script, tried = load_version(4), []
    monkeypatch.setattr(script, "causal_attention", lambda *qkv: tried.extend(x.dtype for x in qkv) or sum(qkv))
    same_heads = ["--num-heads", "2", "--num-kv-heads", "2"]
    script.parse_options([*argv, *same_heads, "--seq-len", "8", "--device", "cpu"])
    assert set(tried) == {getattr(torch, dtype)}


interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's kernels run on the GPU here")
needs_fp8_on_a_cpu = pytest.mark.skipif(torch.__version__ < (2, 13), reason="PyTorch has no fp8 matmul on a CPU")


class Outside(TorchDispatchMode):
    """Count the operations that run while no context of one_stream is open."""

    def __init__(self, script):
        super().__init__()
        self.open, self.count = 0, 0
        one_stream = script.Options.one_stream

        @contextlib.contextmanager
        def watched(options):
            with one_stream(options):
                self.open += 1
                yield
                self.open -= 1

        self.patch = mock.patch.object(script.Options, "one_stream", watched)

    def __torch_dispatch__(self, operation, types, arguments=(), named=None):
        self.count += not self.open
        return operation(*arguments, **named or {})


@pytest.mark.parametrize(
    ("version", "argv"),
    [
        (1, []),
        (2, []),
        pytest.param(3, ["--disable-attention-kernel"], marks=interpreted),
        pytest.param(3, ["--disable-attention-kernel", "--use-amp", "--fp8"], marks=[interpreted, needs_fp8_on_a_cpu]),
        (4, []),
        (4, ["--attention-backend", "math"]),
        ("peer", ["--attention-backend", "math", "--no-graph"]),
    ],
)
def test_trials_of_options_and_steps_share_one_stream(version, argv):
    """A graph is 5 % slower on a GPU where another stream has been used, if only to try an attention."""
    if version == "peer":
        pytest.importorskip("transformers")
    script = peer_script() if version == "peer" else load_version(version)
    outside = Outside(script)
    with outside.patch, outside:
        assert script.main([*MINI, *argv, "--num-steps", "1", "--warmup-steps", "1", "--device", "cpu"]) == 0
    assert outside.count == 0


def test_a_process_has_one_stream(monkeypatch):
    script, made = load_version(1), []
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: made.append(device) or device)
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    for options in (script.Options(device="cuda:7"), script.Options(device="cuda:7")):
        with options.one_stream() as stream:
            assert stream == "cuda:7"
    assert made == ["cuda:7"]
    with script.Options(device="cpu").one_stream() as stream:
        assert stream is None


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("version", "argv"),
    [(1, []), (3, []), (3, ["--fp8"]), (4, ["--attention-backend", "flash"]), (4, ["--seq-len", "4096"])],
)
def test_no_kernel_of_a_run_is_on_another_stream(version, argv, capsys):
    sizes = "--preset tiny --use-amp --num-steps 1 --batch-size 2 --no-graph".split()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        assert call(version, [*sizes, *argv], capsys)[0] == 0
        torch.cuda.synchronize()
    work = [event for event in profiler.profiler.kineto_results.events() if "CUDA" in str(event.device_type())]
    kernels = [event for event in work if not event.name().startswith("Memset")]  # cuDNN clears on streams of its own
    assert len(kernels) > 10 and len({event.device_resource_id() for event in kernels}) == 1


BACKENDS = [  # on a GPU, compiled, precision, length, the backends that can run, the one that is chosen
    (True, True, "bfloat16", 4095, ["math"], "flex"),
    (True, True, "bfloat16", 4096, ["efficient", "math"], "efficient"),
    (True, True, "tf32", 4096, [], "flex"),
    (True, True, "float32", 64, ["math"], "math"),
    (True, False, "bfloat16", 64, [], "math"),
    (False, True, "bfloat16", 64, ["math"], "math"),
]


@pytest.mark.parametrize(("on_gpu", "compiled", "precision", "length", "can_run", "chosen"), BACKENDS)
def test_version_4_chooses_the_attention_that_is_fastest(
    on_gpu, compiled, precision, length, can_run, chosen, monkeypatch
):
    script = load_version(4)
    monkeypatch.setattr(script, "can_run", lambda backend, options: backend in can_run)
    use_amp = precision == "bfloat16"
    options = SimpleNamespace(on_gpu=on_gpu, precision=precision, use_amp=use_amp, seq_len=length)
    assert script.choose_backend(options, compiled) == chosen


FUSED_LOSSES = [  # given, vocabulary, the loss kernel, torch.compile, what is chosen
    (None, 16383, True, False, False),
    (None, 16384, True, False, True),
    (None, 16384, False, False, False),
    (None, 16384, True, True, False),
    (False, 16384, True, False, False),
    (True, 50, True, False, True),
]


@pytest.mark.parametrize(("given", "vocabulary", "kernel", "compiled", "chosen"), FUSED_LOSSES)
def test_version_3_fuses_the_loss_of_a_large_vocabulary_where_it_can(given, vocabulary, kernel, compiled, chosen):
    options = SimpleNamespace(enable_fused_loss=given, vocab_size=vocabulary)
    options.enable_loss_kernel, options.enable_torch_compile = kernel, compiled
    assert load_version(3).choose_fused_loss(options) == chosen
