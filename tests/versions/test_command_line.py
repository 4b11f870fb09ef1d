"""The scripts as they are called: options, refusals, what they print and write, and how they end."""

import contextlib
import datetime
import hashlib
import json
import math
import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sys

import pytest
import torch

from common.versions import SCRIPTS, load_version

MINI = "--hidden-dim 32 --num-layers 1 --num-heads 2 --vocab-size 40 --seq-len 8 --batch-size 2".split()
SHORT = [*MINI, "--num-steps", "3", "--warmup-steps", "1"]
RANGES = {
    "forward", "backward", "optimizer", "qkv projection", "rope", "attention", "output projection", "rms norm",
    "feed-forward", "output head", "loss",
}  # fmt: skip


def call(version, argv, capsys):
    """Exit status, standard output and standard error of a script's main."""
    try:
        status = load_version(version).main([str(argument) for argument in argv])
    except SystemExit as end:
        status = end.code
    except KeyboardInterrupt:  # which would end pytest
        status = "a traceback of KeyboardInterrupt"
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def strict_json(text):
    """What JSON allows: Python's own reader also takes NaN and Infinity, which no other does."""
    return json.loads(text, parse_constant=lambda constant: pytest.fail(f"{constant} is no JSON"))


# ---------------------------------------------------------------- options


def described(version, capsys):
    """The help of a script by group heading, without what differs by its number and its defaults."""
    status, text, _ = call(version, ["--help"], capsys)
    assert status == 0
    text = re.sub(r"(tiny_llama_v|version |v)[1-4]\b", r"\1N", text)
    text = re.sub(r"(HIP graph|in every run) \((True|False)\)", r"\1 (default)", text)
    paragraphs = text.split("\n\n")
    assert paragraphs[0].startswith("usage: tiny_llama_vN.py")
    return {paragraph.splitlines()[0]: paragraph for paragraph in paragraphs[1:]}


def test_help_is_the_same_but_for_each_versions_own_options(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    groups = {version: described(version, capsys) for version in SCRIPTS}
    own = {version: groups[version].keys() - groups[1].keys() for version in SCRIPTS}
    assert own[1] == set() and all(len(own[version]) == 1 for version in (2, 3, 4))
    for version in (2, 3, 4):
        shared = {heading: text for heading, text in groups[version].items() if heading not in own[version]}
        assert shared == groups[1]
        assert "--enable-" in groups[version][own[version].pop()]
    for option in "--preset --data --metrics-file --resume --profile-operators --enable-memory-profiling".split():
        assert option in "\n".join(groups[1].values())


@pytest.mark.parametrize("version", SCRIPTS)
def test_help_has_an_example_that_works(version, capsys):
    status, out, _ = call(version, ["--help"], capsys)
    assert status == 0
    program, script, *argv = shlex.split(out.split("example:")[1])
    assert (program, script) == ("python", SCRIPTS[version].name)
    assert load_version(version).parse_options(argv).num_steps > 0
    options = re.findall(r"^  (--.*)$", out, flags=re.MULTILINE)
    assert len(options) > 25


@pytest.mark.parametrize("version", SCRIPTS)
def test_defaults_and_presets(version):
    script = load_version(version)
    sizes = ("hidden_dim", "num_layers", "num_heads", "num_kv_heads", "intermediate_dim", "seq_len", "batch_size")

    def chosen(*argv):
        options = script.parse_options(argv)
        return tuple(getattr(options, name) for name in sizes)

    assert chosen() == (512, 8, 8, 4, 2048, 256, 8)
    assert chosen("--preset", "tiny") == (256, 4, 8, 4, 512, 128, 8)
    assert chosen("--preset", "small") == (512, 8, 8, 4, 2048, 128, 8)
    assert chosen("--preset", "medium") == (1024, 12, 16, 8, 4096, 512, 16)
    assert chosen("--preset", "small", "--num-layers", "2", "--seq-len", "64") == (512, 2, 8, 4, 2048, 64, 8)
    assert chosen("--hidden-dim", "64", "--num-heads", "4") == (64, 8, 4, 2, 256, 256, 8)
    assert chosen("--preset", "tiny", "--hidden-dim", "128", "--num-heads", "1") == (128, 4, 1, 1, 512, 128, 8)
    options = script.parse_options([])
    assert (options.num_steps, options.vocab_size, options.learning_rate) == (50, 1000, 3e-4)
    assert options.deterministic == (version == 1) and options.graph == (version in (3, 4))
    assert script.parse_options(["--enable-memory-profiling"]).profile_memory


@pytest.mark.parametrize("version", SCRIPTS)
def test_precision_and_determinism_are_what_is_asked_for(version, backend_settings):
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


# ---------------------------------------------------------------- refusals: status 2 and one sentence

# What the sentence must name -> options
BAD_OPTIONS = {
    "--batch-size": ["--batch-size", "0"],
    "--seq-len": ["--seq-len", "-1"],
    "--hidden-dim": ["--hidden-dim", "0"],
    "--num-layers": ["--num-layers", "0"],
    "--num-heads": ["--num-heads", "0"],
    "--num-kv-heads": ["--num-kv-heads", "0"],
    "--intermediate-dim": ["--intermediate-dim", "-5"],
    "--vocab-size": ["--vocab-size", "0"],
    "--num-steps": ["--num-steps", "0"],
    "--warmup-steps": ["--warmup-steps", "-1"],
    "--profile-steps": ["--profile-steps", "0"],
    "--save-every": ["--save-every", "-2"],
    "--seed": ["--seed", "-1"],
    "--seed -> too large": ["--seed", str(2**70)],
    "--learning-rate": ["--learning-rate", "0"],
    "--learning-rate -> not finite": ["--learning-rate", "nan"],
    "--learning-rate -> no number": ["--learning-rate", "fast"],
    "--batch-size -> no integer": ["--batch-size", "2.5"],
    "--hidden-dim -> does not divide": ["--hidden-dim", "100", "--num-heads", "8"],
    "--hidden-dim -> odd heads": ["--hidden-dim", "24", "--num-heads", "8"],
    "--num-kv-heads -> does not divide": ["--num-kv-heads", "3"],
    "--num-kv-heads -> more than heads": ["--num-kv-heads", "16"],
    "--preset": ["--preset", "huge"],
    "--amp-dtype": ["--amp-dtype", "float8"],
    "--sort-by": ["--sort-by", "beauty"],
    "--device": ["--device", "toaster"],
    "--device -> of another kind": ["--device", "meta"],
    "--device -> not there": ["--device", "cuda:99"],
    "--frobnicate": ["--frobnicate"],
    "stray": ["stray"],
    "--data": ["--data", "nowhere.txt"],
    "--data -> empty": ["--data", "empty.txt"],
    "--data -> no text": ["--data", "folder"],
    "--data -> binary": ["--data", "binary"],
    "--data -> too short": ["--data", "short.txt", "--seq-len", "100"],
    "--vocab-size -> smaller than the text's": ["--data", "long.txt", "--vocab-size", "100", "--seq-len", "8"],
    "--metrics-file": ["--metrics-file", "no/folder/metrics.json"],
    "--metrics-file -> a folder": ["--metrics-file", "folder"],
    "--resume": ["--resume", "--checkpoint-dir", "nowhere"],
}
BAD_OPTIONS_OF = {
    2: {
        "--compile-mode": ["--compile-mode", "wildly"],
        "--compile-mode -> has graphs": ["--enable-torch-compile", "--compile-mode", "reduce-overhead", "--graph"],
    },
    3: {
        "--hidden-dim -> head size": ["--hidden-dim", "96", "--num-heads", "4"],
        "--hidden-dim -> long rows": ["--hidden-dim", "65536", "--num-heads", "512"],
        "--disable-attention-kernel": ["--hidden-dim", "24", "--num-heads", "1"],
        "optimizer": ["--use-amp", "--amp-dtype", "float16", "--disable-optimizer-kernel"],
    },
    4: {
        "--attention-backend": ["--attention-backend", "fastest"],
        "--attention-backend -> not compiled": ["--attention-backend", "flex", "--disable-torch-compile"],
    },
}
ON_A_CPU = {
    3: {"bfloat16": ["--use-amp"]},
    4: {"--attention-backend": ["--attention-backend", "cudnn"]},
}


@pytest.fixture
def surroundings(tmp_path, monkeypatch):
    """A folder to run in, with texts that are no good."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "empty.txt").touch()
    (tmp_path / "short.txt").write_text("too short")
    (tmp_path / "long.txt").write_text("z" * 100)
    (tmp_path / "binary").write_bytes(bytes(1000))
    return tmp_path


def assert_refused(version, argv, words, capsys, monkeypatch):
    script = load_version(version)
    for name in ("build_model", "initial_weights"):
        monkeypatch.setattr(script, name, lambda *_: pytest.fail(f"a model was built for {argv}"))
    status, out, err = call(version, argv, capsys)
    assert status == 2, f"{argv}: status {status}"
    assert words in err and err.startswith(f"{SCRIPTS[version].name}: error: ") and err.endswith("\n"), err
    assert len(err.splitlines()) == 1 and not out, err


@pytest.mark.parametrize("name", BAD_OPTIONS)
def test_bad_options_are_refused(name, surroundings, capsys, monkeypatch):
    for version in SCRIPTS:
        assert_refused(version, BAD_OPTIONS[name], name.split(" -> ")[0], capsys, monkeypatch)


@pytest.mark.parametrize(("version", "name"), [(v, name) for v, names in BAD_OPTIONS_OF.items() for name in names])
def test_bad_options_of_one_version_are_refused(version, name, surroundings, capsys, monkeypatch):
    assert_refused(version, BAD_OPTIONS_OF[version][name], name.split(" -> ")[0], capsys, monkeypatch)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU can")
@pytest.mark.parametrize(("version", "name"), [(v, name) for v, names in ON_A_CPU.items() for name in names])
def test_what_a_cpu_cannot_is_refused(version, name, surroundings, capsys, monkeypatch):
    assert_refused(version, [*MINI, *ON_A_CPU[version][name]], name, capsys, monkeypatch)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write everywhere")
def test_a_metrics_file_in_a_read_only_folder_is_refused(surroundings, capsys, monkeypatch):
    (surroundings / "folder").chmod(0o500)
    assert_refused(1, ["--metrics-file", "folder/metrics.json"], "--metrics-file", capsys, monkeypatch)


# ---------------------------------------------------------------- what a run writes and prints

STEP_KEYS = {"step", "loss", "forward_ms", "backward_ms", "optimizer_ms", "step_ms"}
SUMMARY_KEYS = set(
    """parameters parameters_trained step_ms forward_ms backward_ms optimizer_ms samples_per_second tokens_per_second
    peak_memory_mb first_loss final_loss best_loss_known flops_per_step tflops mfu precision graph warmup_s parallel
    world_size rank_step_ms""".split()
)
ENVIRONMENT_KEYS = set("device device_type python torch triton cuda hip date commit script_sha256".split())


def check_keys(version, metrics):
    assert list(metrics) == ["version", "config", "options", "environment", "steps", "summary"]
    assert metrics["version"] == version
    assert [step.keys() for step in metrics["steps"]] == [STEP_KEYS] * 3
    assert metrics["summary"].keys() == SUMMARY_KEYS
    assert metrics["summary"]["step_ms"].keys() == {"median", "p25", "p75"}
    assert metrics["environment"].keys() == ENVIRONMENT_KEYS
    assert metrics["summary"]["graph"].keys() == {"captured", "reason"}
    options, config = metrics["options"], metrics["config"]
    assert (options["hidden_dim"], options["num_steps"], options["metrics_file"]) == (32, 3, "metrics.json")
    assert (config["hidden_dim"], config["num_kv_heads"], config["intermediate_dim"]) == (32, 1, 128)


def check_figures(steps, summary):
    """What follows from the steps, and what can be counted by hand."""
    assert [step["step"] for step in steps] == [0, 1, 2]
    assert summary["first_loss"] == steps[0]["loss"] and summary["final_loss"] == steps[-1]["loss"]
    times = sorted(step["step_ms"] for step in steps)
    assert summary["step_ms"]["median"] == pytest.approx(times[1])
    assert times[0] <= summary["step_ms"]["p25"] <= times[1] <= summary["step_ms"]["p75"] <= times[2]
    assert summary["samples_per_second"] == pytest.approx(2 * 1000 / times[1])
    assert summary["tokens_per_second"] == pytest.approx(8 * summary["samples_per_second"])
    assert summary["tflops"] == pytest.approx(summary["flops_per_step"] / times[1] / 1e9)
    for step in steps:
        phases = [step[f"{phase}_ms"] for phase in ("forward", "backward", "optimizer")]
        assert None in phases or 0 < sum(phases) <= 1.05 * step["step_ms"]
    # embedding, norms, q and o, k and v, gate and up and down
    count = 40 * 32 + 3 * 32 + 2 * 32 * 32 + 2 * 16 * 32 + 3 * 32 * 128
    assert summary["parameters"] == summary["parameters_trained"] == count
    assert summary["best_loss_known"] == pytest.approx(1.75 * math.log(2))
    assert summary["precision"] == "float32" and summary["warmup_s"] > 0 and summary["peak_memory_mb"] > 0
    assert summary["graph"]["captured"] == (summary["graph"]["reason"] is None)


def check_environment(version, environment):
    assert environment["script_sha256"] == hashlib.sha256(SCRIPTS[version].read_bytes()).hexdigest()
    age = datetime.datetime.now(datetime.timezone.utc) - datetime.datetime.fromisoformat(environment["date"])
    assert datetime.timedelta(0) <= age < datetime.timedelta(hours=1)
    assert environment["torch"] == torch.__version__ and environment["commit"] is None  # the copy has no repository
    assert environment["device_type"] == ("cuda" if torch.cuda.is_available() else "cpu")


def check_printed(version, metrics, out):
    assert out.startswith(f"Tiny LLaMA version {version} on ")
    pattern = r"^step +(\d)/3  loss +([\d.]+) +[\d.]+ samples/s +[\d.]+ ms  peak +[\d.]+ MB$"
    lines = [(int(step) - 1, float(loss)) for step, loss in re.findall(pattern, out, re.MULTILINE)]
    assert lines == [(step["step"], pytest.approx(step["loss"], abs=1e-4)) for step in metrics["steps"]]
    count = f"{metrics['summary']['parameters']:,}"
    assert f"trained    {count} of {count} parameters (100.0 %)" in out and "best reachable 1.2130" in out
    assert ("interpreter" in out) == (version == 3 and not torch.cuda.is_available())


@pytest.mark.parametrize("version", SCRIPTS)
def test_a_script_alone(version, tmp_path, capsys):
    """Copied to an empty folder with a space in its name, it runs, and prints and writes what it promises."""
    folder = tmp_path / "an empty folder"
    folder.mkdir()
    script = shutil.copy(SCRIPTS[version], folder)
    (tmp_path / "elsewhere").mkdir()
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "TRITON_INTERPRET")}
    command = [sys.executable, script, *SHORT, "--metrics-file", "metrics.json"]
    result = subprocess.run(
        command, cwd=tmp_path / "elsewhere", capture_output=True, text=True, timeout=200, env=environment
    )
    assert result.returncode == 0 and not result.stderr, result.stderr
    assert [path.name for path in folder.iterdir() if path.name != "__pycache__"] == [SCRIPTS[version].name]
    metrics = strict_json((tmp_path / "elsewhere" / "metrics.json").read_text())
    check_keys(version, metrics)
    check_figures(metrics["steps"], metrics["summary"])
    check_environment(version, metrics["environment"])
    check_printed(version, metrics, result.stdout)
    assert call(1, [*SHORT, "--metrics-file", tmp_path / "v1.json"], capsys)[0] == 0
    wanted = [step["loss"] for step in strict_json((tmp_path / "v1.json").read_text())["steps"]]
    assert [step["loss"] for step in metrics["steps"]] == pytest.approx(wanted, rel=1e-5)


def test_commit_is_that_of_the_repository():
    script = load_version(1)
    git = ["git", "-C", str(SCRIPTS[1].parent), "rev-parse", "HEAD"]
    result = subprocess.run(git, capture_output=True, text=True)
    wanted = result.stdout.strip() if result.returncode == 0 else None
    assert script.environment(torch.device("cpu"))["commit"] == wanted


@pytest.mark.parametrize(
    ("triton", "numpy", "works"), [("3.6.0", "2.4.1", False), ("3.6.0", "2.3.5", True), ("3.7.1", "2.10.0", True)]
)
def test_an_interpreter_that_numpy_stops_is_named(triton, numpy, works, monkeypatch, capsys):
    """NumPy 2.4 takes no array of one number for a number any more, and the interpreter before 3.7 counts on that."""
    script = load_version(3)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(script.triton, "__version__", triton)
    monkeypatch.setattr(script.np, "__version__", numpy)
    with contextlib.nullcontext() if works else pytest.raises(SystemExit, match="2"):
        script.parse_options(["--device", "cpu"])
    assert ("pip install 'numpy<2.4'" in capsys.readouterr().err) != works


# ---------------------------------------------------------------- how a run ends


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of numbers that overflow in the interpreter
@pytest.mark.parametrize("version", SCRIPTS)
def test_a_loss_that_is_not_finite_stops_the_run(version, tmp_path, capsys):
    metrics = tmp_path / "metrics.json"
    argv = [*MINI, "--num-steps", "9", "--warmup-steps", "0", "--learning-rate", "1e30", "--metrics-file", metrics]
    status, out, err = call(version, argv, capsys)
    assert status == 1
    assert re.fullmatch(rf"{SCRIPTS[version].name}: .*step [2-9]\b.*--learning-rate.*\n", err), err
    assert "trained" not in out  # no summary, which would look like success
    steps = strict_json(metrics.read_text())["steps"]
    assert 2 <= len(steps) < 9 and steps[0]["loss"] > 0


@pytest.mark.parametrize("version", [1, 3])
def test_interrupt_from_the_keyboard(version, tmp_path):
    """The metrics so far are written, and the status is 130."""
    metrics = tmp_path / "metrics.json"
    command = [sys.executable, SCRIPTS[version], *MINI, "--num-steps", "100000", "--metrics-file", metrics]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            for line in process.stdout:
                if line.startswith("step"):
                    process.send_signal(signal.SIGINT)
                    break
            out, err = process.communicate(timeout=100)
        finally:
            process.kill()
    assert process.returncode == 130, err
    assert "Traceback" not in err and "summary" not in out
    content = strict_json(metrics.read_text())
    assert content["steps"] and content["summary"]["first_loss"] == content["steps"][0]["loss"]


@pytest.mark.parametrize("moment", ["build_model", "initial_weights", "warm_up", "profile"])
def test_interrupt_at_other_moments(moment, tmp_path, capsys, monkeypatch):
    """Compiling and capturing takes minutes, and profiling comes after the summary."""
    script = load_version(1)

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(script.Trainer if moment == "warm_up" else script, moment, interrupt)
    status, _, err = call(1, [*SHORT, "--enable-pytorch-profiler", "--profile-dir", tmp_path], capsys)
    assert status == 130 and len(err.splitlines()) == 1


GPU_FULL = torch.OutOfMemoryError("HIP out of memory. Tried to allocate 20.00 GiB")
CPU_FULL = RuntimeError(
    "[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: you tried 4e12"
)
NUMPY_FULL = MemoryError("Unable to allocate 7.28 TiB for an array")


@pytest.mark.parametrize(
    ("moment", "error"),
    [("build_model", GPU_FULL), ("build_model", CPU_FULL), ("initial_weights", CPU_FULL), ("load_data", NUMPY_FULL)],
    ids=["model on a GPU", "model on a CPU", "weights", "data"],
)
def test_out_of_memory_says_what_to_lower(moment, error, capsys, monkeypatch):
    def fail(*_):
        raise error

    monkeypatch.setattr(load_version(1), moment, fail)
    status, _, err = call(1, SHORT, capsys)
    assert status == 1 and len(err.splitlines()) == 1
    assert "memory" in err and "--batch-size" in err and "--seq-len" in err


def test_other_errors_are_not_hidden(monkeypatch):
    """An error that no sentence is written for keeps its traceback: it is a mistake in the script."""

    def fail(*_):
        raise RuntimeError("shapes cannot be multiplied")

    monkeypatch.setattr(load_version(1), "build_model", fail)
    with pytest.raises(RuntimeError, match="shapes"):
        load_version(1).main(SHORT)


def test_a_disk_that_is_full_when_the_metrics_are_written(tmp_path, capsys, monkeypatch):
    def fail(path, *_, **__):
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(pathlib.Path, "write_text", fail)
    status, _, err = call(1, [*SHORT, "--metrics-file", tmp_path / "metrics.json"], capsys)
    assert status == 1 and len(err.splitlines()) == 1
    assert "metrics.json" in err and "No space left" in err


@pytest.mark.parametrize("version", SCRIPTS)
def test_validate_setup(version, capsys):
    status, out, _ = call(version, [*MINI, "--validate-setup"], capsys)
    assert status == 0 and "set-up check passed" in out and "step     3/3" in out


@pytest.mark.parametrize("version", SCRIPTS)
def test_validate_setup_is_small_unless_sizes_are_given(version):
    """A laptop's answer comes in seconds, in Triton's interpreter too; a given preset or size is taken."""
    parse = load_version(version).parse_options
    small = parse(["--validate-setup", "--device", "cpu"])
    assert (small.hidden_dim, small.intermediate_dim, small.num_layers, small.batch_size) == (64, 256, 2, 2)
    assert parse(["--validate-setup", "--device", "cpu", "--preset", "tiny"]).hidden_dim == 256
    assert parse(["--validate-setup", "--device", "cpu", "--seq-len", "48"]).seq_len == 48
    assert parse(["--device", "cpu"]).hidden_dim == 512


def test_validate_setup_fails_where_a_parameter_is_not_trained(capsys, monkeypatch):
    monkeypatch.setattr(load_version(1), "parameters_trained", lambda model: 1)
    status, out, _ = call(1, [*MINI, "--validate-setup"], capsys)
    assert status == 1 and "set-up check failed" in out and "passed" not in out


# ---------------------------------------------------------------- profiling


def column(table, heading):
    """The values of a column of a profiler's table, times in microseconds."""
    lines = [line.strip() for line in table.splitlines() if "  " in line.strip() and not line.startswith("-")]
    rows = [re.split(r" {2,}", line) for line in lines]
    position = rows[0].index(heading)
    units = {"us": 1.0, "ms": 1e3, "s": 1e6}
    values = []
    for row in rows[1:]:
        if len(row) == len(rows[0]):
            number, unit = re.fullmatch(r"([\d.]+)(us|ms|s|)", row[position]).groups()
            values.append(float(number) * units.get(unit, 1.0))
    return values


def events_of(folder):
    (trace,) = folder.glob("trace_*.json")
    return {event.get("name") for event in strict_json(trace.read_text())["traceEvents"]}


@pytest.mark.parametrize("version", SCRIPTS)
def test_profile_leaves_a_trace_with_named_ranges(version, tmp_path, capsys):
    argv = [*SHORT, "--enable-pytorch-profiler", "--profile-dir", tmp_path / "new" / "folder", "--profile-steps", "1"]
    argv += ["--disable-torch-compile"] * (version == 4)  # compiled code has no ranges
    status, out, _ = call(version, argv, capsys)
    assert status == 0 and "perfetto" in out and "operators by" not in out
    assert events_of(tmp_path / "new" / "folder") >= RANGES


@pytest.mark.parametrize(
    ("key", "heading"),
    [("cpu_time_total", "CPU total"), ("self_cpu_time_total", "Self CPU"), ("count", "# of Calls")],
)
def test_operators_are_sorted_by_the_key(key, heading, tmp_path, capsys):
    argv = [*SHORT, "--profile-operators", "--sort-by", key, "--profile-dir", tmp_path, "--profile-steps", "1"]
    status, out, _ = call(1, argv, capsys)
    values = column(out.split(f"operators by {key}\n")[1], heading)
    assert status == 0 and len(values) >= 10 and values == sorted(values, reverse=True) and values[0] > values[-1]


def test_memory_of_every_operator(tmp_path, capsys):
    status, out, _ = call(1, [*SHORT, "--enable-memory-profiling", "--profile-dir", tmp_path], capsys)
    assert status == 0 and re.search(r"operators by self_(cpu|device)_memory_usage", out)
    table = out.split("operators by")[1]
    assert re.search(r"(CPU|CUDA) Mem", table) and re.search(r"aten::\w+ .*\d (Kb|KB|b|B|Mb|MB)\b", table)


@pytest.mark.parametrize("version", SCRIPTS)
def test_attention_alone(version, tmp_path, capsys):
    argv = [*SHORT, "--profile-attention-only", "--profile-dir", tmp_path, "--profile-steps", "1"]
    status, _, _ = call(version, argv, capsys)
    names = events_of(tmp_path)
    assert status == 0 and names >= {"qkv projection", "attention", "output projection"}
    assert not names & {"feed-forward", "output head", "loss", "optimizer"}


def test_profiling_does_not_change_the_measured_steps(tmp_path, capsys):
    """It runs on steps of its own behind them."""
    losses = []
    for argv in ([], ["--profile-operators", "--profile-dir", tmp_path]):
        metrics = tmp_path / "metrics.json"
        assert call(1, [*SHORT, "--metrics-file", metrics, *argv], capsys)[0] == 0
        losses.append([step["loss"] for step in strict_json(metrics.read_text())["steps"]])
    assert losses[0] == losses[1] and len(losses[0]) == 3


def test_a_profile_folder_that_cannot_be_made(tmp_path, capsys):
    (tmp_path / "file").write_text("in the way")
    status, _, err = call(1, [*SHORT, "--profile-operators", "--profile-dir", tmp_path / "file"], capsys)
    assert status in (1, 2) and len(err.splitlines()) == 1 and "file" in err
