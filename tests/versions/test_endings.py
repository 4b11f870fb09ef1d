"""A run ends with one line and a status for each reason, with whole files and its metrics written."""

import contextlib
import errno
import io
import os
import pathlib
import re
import resource
import signal
import subprocess
import sys

import pytest
import torch
from test_command_line import MINI, SHORT, call, strict_json

from common.machine import profile_script
from common.versions import SCRIPTS, load_version
from marks import slow
from processes import Fork, run_fork


def started(version, *argv, **options):
    """Fork a script; it prints a line after step 1 and a tenth of its steps."""
    return Fork(SCRIPTS[version], *MINI, "--warmup-steps", "1", *argv, **options)


def test_version_3_without_triton_ends_in_one_line(tmp_path):
    (tmp_path / "triton.py").write_text("raise ModuleNotFoundError(\"No module named 'triton'\")")
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    result = subprocess.run([sys.executable, SCRIPTS[3], "--help"], env=environment, capture_output=True, text=True)
    said = (
        "tiny_llama_v3.py needs Triton (No module named 'triton'): pip install triton on Linux, or run another version"
    )
    assert (result.returncode, result.stdout, result.stderr) == (1, "", f"{said}\n")


# ---------------------------------------------------------------- signals


@pytest.mark.slow
@pytest.mark.parametrize(("version", "name", "status"), [(1, "SIGTERM", 143), (3, "SIGINT", 130)])
def test_a_signal_ends_the_run_with_its_metrics(version, name, status, tmp_path):
    metrics = tmp_path / "metrics.json"
    with started(version, "--num-steps", "1000000", "--metrics-file", metrics) as process:
        process.wait_for_line("step")
        process.send_signal(getattr(signal, name))
        process.wait()
        out, err = process.stdout, process.stderr
    assert process.returncode == status and err.count("\n") == 1, err
    assert "interrupted" in err and "summary" not in out
    content = strict_json(metrics.read_text())
    assert content["steps"] and content["summary"]["first_loss"] == content["steps"][0]["loss"]


@pytest.mark.parametrize("name", ["SIGTERM", slow("SIGHUP")])
def test_a_signal_leaves_a_last_checkpoint_and_the_run_resumes_exactly(name, tmp_path, capsys):
    metrics, saving = tmp_path / "metrics.json", ["--save-every", 10**8, "--checkpoint-dir", tmp_path / "checkpoints"]
    with started(1, "--num-steps", 10**9 - 1, "--metrics-file", metrics, *saving) as process:
        process.wait_for_line("step")
        process.send_signal(getattr(signal, name))
        process.wait()
        err = process.stderr
    assert process.returncode == 128 + getattr(signal, name) and err == "tiny_llama_v1.py: interrupted\n"
    content, (checkpoint,) = strict_json(metrics.read_text()), (tmp_path / "checkpoints").iterdir()
    steps = int(checkpoint.stem.removeprefix("step_"))
    assert len(content["steps"]) == steps and content["summary"]["final_loss"] == content["steps"][-1]["loss"]
    last = ["--num-steps", steps + 3, "--warmup-steps", 1, "--metrics-file", metrics]
    assert call(1, [*MINI, *last, *saving, "--resume"], capsys)[0] == 0
    resumed = strict_json(metrics.read_text())["steps"]
    assert call(1, [*MINI, *last], capsys)[0] == 0
    unbroken = strict_json(metrics.read_text())["steps"]
    assert [step["loss"] for step in resumed] == [step["loss"] for step in unbroken[steps:]]


# The first fsync is that of an ordinary checkpoint, and asks the run to end; the second is that of the last checkpoint,
# and kills it.
KILLED_IN_THE_LAST_WRITE = """
import os, runpy, signal, sys
fsync, calls = os.fsync, []

def counted(file):
    calls.append(file)
    if len(calls) == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    if len(calls) == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    fsync(file)

os.fsync = counted
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.slow
def test_a_kill_in_the_middle_of_the_last_checkpoint_leaves_the_one_before(tmp_path, capsys):
    saving = ["--save-every", "3", "--checkpoint-dir", str(tmp_path / "checkpoints")]
    (tmp_path / "killed.py").write_text(KILLED_IN_THE_LAST_WRITE)
    process = run_fork(tmp_path / "killed.py", SCRIPTS[1], *MINI, "--num-steps", "9", *saving)
    assert process.returncode == -signal.SIGKILL, process.stderr
    left = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert "step_000000003.pt" in left and len(left) == 2  # and what was written of the last
    metrics = tmp_path / "metrics.json"
    last = ["--num-steps", 9, "--warmup-steps", 1, "--metrics-file", metrics]
    assert call(1, [*MINI, *last, *saving, "--resume"], capsys)[0] == 0
    resumed = strict_json(metrics.read_text())["steps"]
    assert call(1, [*MINI, *last], capsys)[0] == 0
    unbroken = strict_json(metrics.read_text())["steps"]
    assert [step["loss"] for step in resumed] == [step["loss"] for step in unbroken[3:]]


NOHUP = """
import runpy, signal, sys
signal.signal(signal.SIGHUP, signal.SIG_IGN)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.slow
def test_a_run_under_nohup_outlives_its_terminal(tmp_path):
    (tmp_path / "nohup.py").write_text(NOHUP)
    with Fork(tmp_path / "nohup.py", SCRIPTS[1], *MINI, "--num-steps", "200") as process:
        process.wait_for_line("step")
        process.send_signal(signal.SIGHUP)
        process.wait()
        assert process.returncode == 0 and process.stderr == "" and "summary of 200 steps" in process.stdout


@pytest.mark.parametrize("moment", ["checkpoint", "step"])
def test_sigterm_during_a_checkpoint_or_a_step_ends_the_next_step(moment, tmp_path, capsys, monkeypatch):
    """The checkpoint of step 2 is written whole, and another one at the end of the running step."""
    script, sent = load_version(1), []

    def send(*_):
        if not sent:
            sent.append(os.kill(os.getpid(), signal.SIGTERM))

    if moment == "checkpoint":
        monkeypatch.setattr(os, "fsync", send)
    else:
        backward = torch.Tensor.backward
        steps = iter(range(100))
        monkeypatch.setattr(torch.Tensor, "backward", lambda loss: (next(steps) == 3 and send(), backward(loss)))
    argv = [*MINI, "--num-steps", 9, "--warmup-steps", 1, "--save-every", 2, "--checkpoint-dir", tmp_path / "saved"]
    status, _, err = call(1, [*argv, "--metrics-file", tmp_path / "m.json"], capsys)
    assert status == 143 and err == "tiny_llama_v1.py: interrupted\n" and sent
    names = sorted(path.name for path in (tmp_path / "saved").iterdir())
    assert names == ["step_000000002.pt", "step_000000003.pt"]
    assert len(strict_json((tmp_path / "m.json").read_text())["steps"]) == 3
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL and script.stop_handlers()


@pytest.mark.parametrize("moment", ["load_data", "make_model", "warm_up", "summarize", "print_summary", "profile"])
def test_an_interrupt_at_any_other_moment(moment, tmp_path, capsys, monkeypatch):
    """Compiling and capturing take minutes, and profiling comes after the summary."""
    script = load_version(1)

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(script.Trainer if moment == "warm_up" else script, moment, interrupt)
    argv = [*SHORT, "--enable-pytorch-profiler", "--profile-dir", tmp_path, "--metrics-file", tmp_path / "metrics.json"]
    status, _, err = call(1, argv, capsys)
    assert status == 130 and err == "tiny_llama_v1.py: interrupted\n"
    assert (tmp_path / "metrics.json").exists() == (moment in ("print_summary", "profile"))


@pytest.mark.parametrize(("end", "status"), [(KeyboardInterrupt(), 130), (SystemExit(143), 143)], ids=str)
def test_an_interrupt_that_an_import_wraps(end, status, capsys, monkeypatch):
    """Up to Python 3.11 a class does, where Ctrl-C comes while its names are set, as in the import of torch._dynamo."""

    def interrupted_import(*_):
        raise RuntimeError("Error calling __set_name__ on 'property' instance") from end

    monkeypatch.setattr(load_version(1), "make_optimizer", interrupted_import)
    assert call(1, SHORT, capsys)[::2] == (status, "tiny_llama_v1.py: interrupted\n")


def test_sigterm_while_the_metrics_are_written(tmp_path, capsys, monkeypatch):
    """torchrun sends it to the other ranks when one has ended."""
    metrics, fsync = tmp_path / "metrics.json", os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: (os.kill(os.getpid(), signal.SIGTERM), fsync(file)))
    handler = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as the script's last lines do
    argv = [*MINI, "--num-steps", 9, "--warmup-steps", 0, "--learning-rate", "1e30", "--metrics-file", metrics]
    status, _, err = call(1, argv, capsys)
    signal.signal(signal.SIGTERM, handler)
    assert status == 1 and err.count("\n") == 1, err
    assert strict_json(metrics.read_text())["steps"]


# ---------------------------------------------------------------- standard output


@pytest.mark.slow
def test_a_broken_pipe(tmp_path):
    """Python itself says nothing about it at its end, so that this is a process of its own."""
    metrics = tmp_path / "metrics.json"
    command = [sys.executable, SCRIPTS[1], *MINI, "--num-steps", "1000", "--metrics-file", metrics]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        while not process.stdout.readline().startswith("step"):
            assert process.poll() is None, process.stderr.read()
        process.stdout.close()
        err = process.stderr.read()
    assert process.returncode == 1 and err == "tiny_llama_v1.py: cannot access standard output: Broken pipe\n"
    assert strict_json(metrics.read_text())["summary"]["final_loss"] > 0


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="Linux has a device that is always full")
@pytest.mark.slow
def test_standard_output_on_a_full_disk():
    done = run_fork(SCRIPTS[1], *SHORT, stdout="/dev/full")
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and "standard output: No space left" in done.stderr


def test_a_disk_that_fills_after_the_summary(capsys, monkeypatch):
    """The last lines are printed into a buffer: no status 0 before they are written."""

    class Filled(io.StringIO):
        def flush(self):
            if "check passed" in self.getvalue():
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(sys, "stdout", Filled())
    status, _, err = call(1, ["--validate-setup"], capsys)
    assert status == 1 and err == "tiny_llama_v1.py: cannot access standard output: No space left on device\n"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="Linux has a device that is always full")
@pytest.mark.slow
def test_standard_error_on_a_full_disk(tmp_path):
    """The status is that of the error, which has no line to be said in."""
    command = [sys.executable, SCRIPTS[1], *SHORT, "--resume", "--checkpoint-dir", tmp_path]
    with open("/dev/full", "w") as full:
        assert subprocess.run(command, stdout=subprocess.DEVNULL, stderr=full, timeout=200).returncode == 2


# ---------------------------------------------------------------- full disks


def checked_run(folder, capsys):
    """Run with checkpoints and metrics in a folder that may be too small; return the status."""
    (folder / "metrics.json").write_text('"older"')
    argv = [*SHORT, "--num-steps", 4, "--save-every", 2, "--checkpoint-dir", folder / "checkpoints"]
    status, _, err = call(1, [*argv, "--metrics-file", folder / "metrics.json"], capsys)
    left = [path.name for path in folder.rglob("*") if path.is_file()]
    assert not [name for name in left if "partial" in name]
    content = strict_json((folder / "metrics.json").read_text())
    if status:
        assert status in (1, 2) and err.count("\n") == 1, err
        assert re.search(r"cannot access /.*: (No space left|File too large)", err), err
    else:
        assert content["summary"] and len(left) == 3
    assert content == "older" or content["steps"]
    return status


SPACE = [4, 12, 40, 80, 110, 150, 200, 240, 280, 1000]  # KiB; a checkpoint takes about 110


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a file system")
def test_a_full_disk_leaves_whole_files_only(tmp_path, capsys):
    outcomes = set()
    for space in SPACE:
        if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={space}k", "tmpfs", tmp_path]).returncode:
            pytest.skip("no tmpfs can be mounted here")
        try:
            status = checked_run(tmp_path, capsys)
            for path in (tmp_path / "checkpoints").glob("*"):
                torch.load(path, weights_only=True)
            outcomes.add((status, len(list((tmp_path / "checkpoints").glob("*")))))
        finally:
            subprocess.run(["umount", tmp_path], check=True)
    assert {(1, 0), (1, 1), (0, 2)} <= outcomes  # too small for one checkpoint, for two, and large enough


def test_a_file_that_may_not_grow_leaves_the_older_one(tmp_path, capsys):
    """As a disk quota does, for users who may not mount a file system."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))
    try:
        assert checked_run(tmp_path, capsys) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (tmp_path / "metrics.json").read_text() == '"older"'


class CutTrace:
    """Write a part of a trace, as PyTorch's profiler does on a full disk, where no file may grow further."""

    def __init__(self, suffix, content):
        self.suffix = suffix
        self.content = content

    def export_chrome_trace(self, path):
        pathlib.Path(path + self.suffix).write_bytes(self.content)
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(self.content), resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


@pytest.mark.parametrize(
    ("suffix", "content"),
    [(".tmp", b""), (".tmp", b'{"traceEvents": [{}'), ("", b'{"traceEvents": [], "traceName": "/a/trace')],
    ids=["empty", "cut", "cut in the last buffer"],  # the last has its final name
)
@pytest.mark.parametrize("module", [load_version(1), profile_script], ids=["script", "profile_script"])
def test_a_trace_that_is_cut_is_removed_and_its_cause_named(module, suffix, content, tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        with pytest.raises(OSError, match=f"File too large: '{tmp_path}/trace.json'"):
            module.export_trace(CutTrace(suffix, content), tmp_path / "trace.json")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(tmp_path.iterdir())


def test_a_trace_that_the_profiler_cuts_ends_the_run(tmp_path, capsys):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))
    try:
        status, out, err = call(1, [*SHORT, "--enable-pytorch-profiler", "--profile-dir", tmp_path], capsys)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert status == 1 and "perfetto" not in out and not list(tmp_path.iterdir())
    assert re.fullmatch(r"tiny_llama_v1.py: cannot access \S+.pt.trace.json: File too large\n", err), err


@pytest.mark.parametrize(
    ("name", "number"), [("/dev/stdout", 1), ("/dev/stderr", 2), ("/dev/stdin", 0), ("/dev/fd/1", 1)]
)
def test_metrics_into_a_pipe_are_refused_in_plain_words(name, number, capfd):
    """The file of /dev/stdout is a pipe here, to which the resolved link leads by a name that does not exist."""
    kept, ends, err = os.dup(number), os.pipe(), io.StringIO()
    os.dup2(ends[1], number)
    try:
        with contextlib.redirect_stderr(err), pytest.raises(SystemExit, match="2"):
            load_version(1).main([*SHORT, "--metrics-file", name])
    finally:
        os.dup2(kept, number)
        for file in (kept, *ends):
            os.close(file)
    words = f"--metrics-file must be a regular file, got {name}: name a new file and print it after the run"
    assert err.getvalue().endswith(f": error: {words}\n") and err.getvalue().count("\n") == 1
    assert capfd.readouterr().out == ""


@pytest.mark.skipif(sys.platform != "linux", reason="macOS has names in UTF-8 only")
@pytest.mark.slow
def test_names_that_are_not_utf8(tmp_path):
    """Standard output is strict outside of C locales."""
    name = os.fsdecode(b"od\xffd")
    (tmp_path / name).write_text("text " * 20)
    command = [SCRIPTS[1], *SHORT, "--vocab-size", "256", "--data", name]
    saving = ["--save-every", "2", "--checkpoint-dir", name + " saved"]
    ended = run_fork(*command, *saving, "--metrics-file", name + ".json", cwd=tmp_path)
    assert ended.returncode == 0 and "text from od\\udcffd" in ended.stdout, ended.stderr
    ended = run_fork(*command, *saving, "--num-steps", "4", "--resume", cwd=tmp_path)
    assert ended.returncode == 0 and "resuming from od\\udcffd saved/step_000000002.pt" in ended.stdout, ended.stderr


NASTY = "a\x1b]0;title\x07\x1b[2J\r\n\x9b\u202e"


def test_no_name_carries_escape_codes_to_the_terminal(tmp_path, capsys, monkeypatch):
    """Of a file in a folder, an option's value, or an option."""
    monkeypatch.chdir(tmp_path)
    pathlib.Path(NASTY).mkdir()
    pathlib.Path(NASTY, NASTY).write_text("text " * 20)
    saving = [*SHORT, "--save-every", 2, "--checkpoint-dir", NASTY]
    profiling = ["--vocab-size", 256, "--data", f"{NASTY}/{NASTY}", "--profile-operators"]
    for argv, wanted, words in (
        ([*saving, *profiling], 0, "bytes of text from a\\x1b"),
        ([*saving, "--vocab-size", 256, "--resume", "--num-steps", 4], 0, "resuming from a\\x1b"),
        ([*saving, "--resume"], 2, "--resume"),
        ([f"--{NASTY}"], 2, "unrecognized"),
        ([NASTY], 2, "unrecognized"),
        (["--preset", NASTY], 2, "--preset"),
        (["--data", f"{NASTY}/none"], 2, "--data"),
        (["--metrics-file", f"{NASTY}/none/metrics.json"], 2, "--metrics-file"),
        (["--profile-operators", "--profile-dir", NASTY], 2, "--profile-dir"),
    ):
        status, out, err = call(1, argv, capsys)
        assert status == wanted and words in out + err, err
        assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", out + err), (out, err)
        assert err.count("\n") == (status != 0)


@pytest.mark.parametrize("name", ["od\udcffd", "a\x1bb", "a\nb", 'a"b', "a\\b"])
def test_a_folder_whose_traces_would_be_no_json_is_refused_before_training(name, tmp_path, capsys, monkeypatch):
    """PyTorch raised a TypeError after the training, or wrote the name into the trace as it is."""
    monkeypatch.chdir(tmp_path)
    status, out, err = call(1, [*SHORT, "--profile-operators", "--profile-dir", name], capsys)
    assert (status, out) == (2, "") and "--profile-dir must be UTF-8 without control characters" in err
    assert err.count("\n") == 1 and not list(tmp_path.iterdir())


def test_a_write_protected_file_is_not_replaced(tmp_path, capsys):
    kept = tmp_path / "kept.json"
    kept.write_text("kept")
    kept.chmod(0o444)
    status, out, err = call(1, [*SHORT, "--metrics-file", kept], capsys)
    assert (status, out) == (2, "") and "kept.json is write-protected: name another file" in err
    assert kept.read_text() == "kept"


def test_metrics_through_a_link(tmp_path, capsys):
    (tmp_path / "link").symlink_to("target")
    assert call(1, [*SHORT, "--metrics-file", tmp_path / "link"], capsys)[0] == 0
    assert strict_json((tmp_path / "target").read_text())["summary"]
    assert (tmp_path / "link").is_symlink()


def test_metrics_leave_a_link_beside_them_alone(tmp_path, capsys):
    """A file is written under a name of its own first, never through a link that has such a name."""
    (tmp_path / "users").write_text("the user's")
    (tmp_path / "metrics.json.partial").symlink_to("users")
    assert call(1, [*SHORT, "--metrics-file", tmp_path / "metrics.json"], capsys)[0] == 0
    assert strict_json((tmp_path / "metrics.json").read_text())["summary"]
    assert (tmp_path / "users").read_text() == "the user's"


# ---------------------------------------------------------------- errors of the run


@pytest.mark.filterwarnings("error::RuntimeWarning")  # as NumPy's, of numbers that overflow in the interpreter
@pytest.mark.parametrize("version", [slow(version) if version == 3 else version for version in SCRIPTS])
def test_a_loss_that_is_not_finite_stops_the_run(version, tmp_path, capsys):
    metrics = tmp_path / "metrics.json"
    argv = [*MINI, "--num-steps", "9", "--warmup-steps", "0", "--learning-rate", "1e30", "--metrics-file", metrics]
    status, out, err = call(version, argv, capsys)
    assert status == 1 and "trained" not in out  # no summary, which would look like success
    assert re.fullmatch(rf"{SCRIPTS[version].name}: .*step [2-9]\b.*--learning-rate.*\n", err), err
    steps = strict_json(metrics.read_text())["steps"]
    assert 2 <= len(steps) < 9 and steps[0]["loss"] > 0 and steps[-1]["loss"] is None  # JSON has no NaN


def test_a_last_update_that_is_not_finite_fails_the_run(tmp_path, capsys):
    """Its loss is finite, and no step follows that would show it."""
    argv = [*MINI, "--num-steps", 2, "--warmup-steps", 0, "--learning-rate", "1e30", "--metrics-file", tmp_path / "m"]
    status, out, err = call(1, argv, capsys)
    assert status == 1 and "trained" not in out and "not finite after step 2: lower --learning-rate" in err
    assert len(strict_json((tmp_path / "m").read_text())["steps"]) == 2


def test_one_number_of_the_weights_that_is_not_finite_fails_the_run(capsys, monkeypatch):
    script = load_version(1)
    run = script.Trainer.run

    def ruin(trainer, tokens, labels):
        record = run(trainer, tokens, labels)
        trainer.model.norm.weight.data[3] = float("nan")
        return record

    monkeypatch.setattr(script.Trainer, "run", ruin)
    status, out, err = call(1, [*MINI, "--num-steps", 1, "--warmup-steps", 0], capsys)
    assert status == 1 and "trained" not in out and "the weights are not finite after step 1" in err


LARGE = [f"--hidden-dim {2**24} --vocab-size {2**24}", f"--batch-size {2**24} --seq-len {2**20}"]


@pytest.mark.parametrize("words", ["HIP error: invalid device function", "CUDA error: no kernel image is available"])
def test_a_gpu_that_pytorch_was_not_built_for_is_named(words):
    status, told = load_version(1).user_message(RuntimeError(f"{words}\nCompile with ..."))
    assert status == 1 and told.startswith(f"{words}: this PyTorch was not built for this GPU")


@pytest.mark.parametrize("argv", LARGE)
def test_out_of_memory_says_what_to_lower(argv, capsys):
    """Sizes for which this machine has no memory, whichever it is."""
    status, _, err = call(1, [*SHORT, *argv.split()], capsys)
    assert status == 1 and err.count("\n") == 1
    assert "out of memory" in err and "--batch-size" in err and "--seq-len" in err


def test_other_errors_keep_their_traceback(monkeypatch):
    def fail(*_):
        raise RuntimeError("shapes cannot be multiplied")

    monkeypatch.setattr(load_version(1), "make_model", fail)
    with pytest.raises(RuntimeError, match="shapes"):
        load_version(1).main(SHORT)


def test_validate_setup_fails_where_a_parameter_is_not_trained(capsys, monkeypatch):
    monkeypatch.setattr(load_version(1), "parameters_trained", lambda model: 1)
    status, out, _ = call(1, [*MINI, "--validate-setup"], capsys)
    assert status == 1 and "set-up check failed" in out and "passed" not in out
