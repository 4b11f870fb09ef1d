"""Units by known answers: phases, steps, rates, FLOPs and memory, from a clock and an allocator that are known."""

import contextlib
import os
import pathlib
import sys
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from common.versions import SCRIPTS, load_version
from training import train

SIZES = "--hidden-dim 32 --num-layers 2 --num-heads 2 --num-kv-heads 1 --intermediate-dim 72 --vocab-size 50".split()
SIZES += "--seq-len 18 --batch-size 2 --device cpu --no-graph --warmup-steps 0".split()

# On a machine with a GPU, Triton's interpreter, and with it version 3 on the CPU, needs a process of its own.
VERSIONS = [version for version in SCRIPTS if version != 3 or not torch.cuda.is_available()]


class Clock:
    """A clock in seconds, which only work() moves."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now

    def work(self, seconds):
        self.now += seconds


class Event:
    """A device event on that clock; elapsed_time is in milliseconds, as PyTorch's."""

    def __init__(self, clock):
        self.clock = clock

    def record(self):
        self.time = self.clock()

    def elapsed_time(self, later):
        return 1000 * (later.time - self.time)


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr("time.perf_counter", clock)
    return clock


def timed_trainer(version, clock, monkeypatch):
    """Return a trainer whose forward takes 10 ms, its backward 20 ms and its optimizer 40 ms of the clock."""
    script = load_version(version)
    _, trainer = train(version, SIZES, steps=0)
    loss = SimpleNamespace(backward=lambda: clock.work(0.020), detach=lambda: torch.tensor(2.5))

    def compute_loss(*_):
        clock.work(0.010)
        return loss

    monkeypatch.setattr(script, "compute_loss", compute_loss)
    monkeypatch.setattr(trainer.optimizer, "step", lambda: clock.work(0.040))
    return trainer


KNOWN = {"loss": 2.5, "forward_ms": 10, "backward_ms": 20, "optimizer_ms": 40, "step_ms": 70}


@pytest.mark.parametrize("version", VERSIONS)
def test_phases_of_a_known_step(version, clock, monkeypatch):
    trainer = timed_trainer(version, clock, monkeypatch)
    assert trainer.run(trainer.tokens, trainer.labels) == pytest.approx(KNOWN)


def test_phases_of_a_known_step_on_a_gpu(clock, monkeypatch):
    """Device events measure the phases; the step ends when the GPU has finished, 5 ms after the host."""
    trainer = timed_trainer(1, clock, monkeypatch)
    monkeypatch.setattr(type(trainer.options), "on_gpu", True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: Event(clock))
    trainer.synchronize = lambda: clock.work(0.005)
    assert trainer.run(trainer.tokens, trainer.labels) == pytest.approx(KNOWN | {"step_ms": 75})


def test_a_step_ends_with_the_slowest_rank(clock, monkeypatch):
    """Two ranks: the loss is their mean, the step time that of the slower one, the phases this rank's."""
    script = load_version(1)
    trainer = timed_trainer(1, clock, monkeypatch)
    trainer.options.parallel = "ddp"
    monkeypatch.setattr("torch.distributed.barrier", lambda: clock.work(1.0))  # does not count

    def gather(values, config):
        return torch.tensor([values, [3.5, 90.0, *values[2:]]], dtype=torch.float64)

    monkeypatch.setattr(script, "gather", gather)
    found = trainer.run(trainer.tokens, trainer.labels)
    assert found.pop("rank_step_ms") == pytest.approx([70, 90])
    assert found == pytest.approx(KNOWN | {"loss": 3.0, "step_ms": 90})


@pytest.mark.parametrize(("mine", "other", "stopped"), [(0, 0, 0), (15, 0, 15), (0, 15, 15), (1, 15, 15)])
def test_a_signal_that_reaches_one_rank_stops_all(mine, other, stopped, clock, monkeypatch):
    """One that stopped alone would leave the others waiting."""
    trainer = timed_trainer(1, clock, monkeypatch)
    trainer.signal = mine
    monkeypatch.setattr(
        load_version(1),
        "gather",
        lambda values, config: torch.tensor([values, [*values[:2], other]], dtype=torch.float64),
    )
    trainer.run(trainer.tokens, trainer.labels)
    assert trainer.stopped == stopped


def test_warm_up_is_in_seconds(clock, monkeypatch):
    """Its steps, the capture and its proof, and the weights that are restored."""
    trainer = timed_trainer(1, clock, monkeypatch)
    monkeypatch.setattr(trainer, "capture", lambda start: clock.work(2.0))
    monkeypatch.setattr(trainer, "restore", lambda start: clock.work(0.5))
    trainer.options.warmup_steps = 3
    trainer.options.graph = False
    assert trainer.warm_up(trainer.tokens, trainer.labels, None) == pytest.approx(3 * 0.070 + 0.5)
    trainer.options.graph = True
    assert trainer.warm_up(trainer.tokens, trainer.labels, None) == pytest.approx(3 * 0.070 + 2.5)


# ---------------------------------------------------------------- the summary

# The mean is 40 ms, the median 20 ms: the rates follow from the median. Neither first nor last step is the median.
STEPS = [
    {
        "step": i,
        "loss": loss,
        "forward_ms": forward,
        "backward_ms": backward,
        "optimizer_ms": optimizer,
        "step_ms": step,
    }
    for i, (loss, forward, backward, optimizer, step) in enumerate(
        [(5.0, 3, 4, 1, 10.0), (4.0, 6, 8, 2, 20.0), (3.0, 30, 40, 10, 90.0)]
    )
]
FLOPS = 36 * 6 * (50 * 32 + 2 * (2 * 32 * 32 + 2 * 16 * 32 + 3 * 72 * 32) + 2 * 18 * 32)  # of 2 x 18 tokens


def summary_of(version, ranks, monkeypatch):
    script = load_version(version)
    _, trainer = train(version, SIZES, steps=1)
    monkeypatch.setattr(script, "peak_memory_mb", lambda config: 1536.0)
    trainer.options.world_size = ranks

    def gather(values, config):
        """Return this rank's values, and those of each later rank, which are 512 larger than the one's before it."""
        return torch.tensor(values, dtype=torch.float64) + 512 * torch.arange(ranks).view(-1, 1)

    monkeypatch.setattr(script, "gather", gather)
    return script.summarize(trainer, STEPS, 2.5, script.load_data(trainer.options))


@pytest.mark.parametrize("version", VERSIONS)
def test_summary_of_known_steps(version, monkeypatch):
    found = summary_of(version, 1, monkeypatch)
    assert found["step_ms"] == {"p25": 15, "median": 20, "p75": 55}
    assert (found["forward_ms"], found["backward_ms"], found["optimizer_ms"]) == (6, 8, 2)
    assert (found["samples_per_second"], found["tokens_per_second"]) == (100, 1800)
    assert (found["first_loss"], found["final_loss"], found["warmup_s"]) == (5, 3, 2.5)
    assert (found["peak_memory_mb"], found["flops_per_step"]) == (1536, FLOPS)
    assert found["tflops"] == pytest.approx(FLOPS / 0.020 / 1e12)
    assert found["parameters"] == found["parameters_trained"] == 50 * 32 + 2 * (10240 + 2 * 32) - 2 * 256 + 32


def test_summary_of_two_ranks(monkeypatch):
    """Rates and FLOPs are those of both, the peak is that of the one that needs more."""
    found = summary_of(1, 2, monkeypatch)
    assert found["peak_memory_mb"] == 2048
    assert (found["samples_per_second"], found["tokens_per_second"]) == (200, 3600)
    assert found["flops_per_step"] == 2 * FLOPS
    assert found["tflops"] == pytest.approx(2 * FLOPS / 0.020 / 1e12)


def test_printed_summary(monkeypatch, capsys):
    found = summary_of(1, 1, monkeypatch)
    load_version(1).print_summary(found | {"tflops": 12.5}, STEPS)
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "summary of 3 steps, after 2.5 s of warm-up, eager (no --graph)" in lines
    assert "step 20.000 ms median, quartiles 15.000 to 55.000" in lines
    assert "phases forward 6.000 ms, backward 8.000 ms, optimizer 2.000 ms" in lines
    assert "speed 100.0 samples/s, 1,800 tokens/s" in lines
    assert "compute 12.500 TFLOP/s" in lines
    assert "memory 1,536.0 MiB peak" in lines


@pytest.mark.parametrize("ranks", [1, 2])
def test_printed_step(ranks, monkeypatch, capsys):
    """The rate is that of all ranks."""
    script = load_version(1)
    _, trainer = train(1, [*SIZES, "--num-steps", "1"], steps=0)
    trainer.options.world_size = ranks
    monkeypatch.setattr(trainer, "run", lambda tokens, labels: {"loss": 2.5, "step_ms": 50.0})
    monkeypatch.setattr(script, "peak_memory_mb", lambda config: 1536.0)
    script.train(trainer, script.load_data(trainer.options), 0, [])
    shown = " ".join(capsys.readouterr().out.split())
    assert shown == f"step 1/1 loss 2.5000 {40 * ranks}.0 samples/s 50.000 ms peak 1536.0 MiB"


# ---------------------------------------------------------------- parameters trained


@pytest.mark.parametrize("version", [1, 4])  # an optimizer of PyTorch's, and one that keeps masters
def test_parameters_trained_after_a_last_step_that_overflowed(version):
    """float16's scaler skips that step: the parameters were trained by those before it, or by none."""
    script = load_version(version)
    half = ["--use-amp", "--amp-dtype", "float16"]
    for steps in (0, 2):
        _, trainer = train(version, [*SIZES, *half], steps=steps)
        trainer.scaler.load_state_dict(trainer.scaler.state_dict() | {"scale": 2.0**40})
        trainer.run(trainer.tokens, trainer.labels)
        total = sum(p.numel() for p in trainer.model.parameters())
        assert any(not p.grad.isfinite().all() for p in trainer.model.parameters())
        assert (script.parameters_trained(trainer) == total) == (steps > 0)


def test_parameters_trained_are_those_of_the_last_step_unless_it_overflowed():
    """A gradient that is zero in float16 is none, whatever the steps before it left in the moments."""
    script = load_version(4)
    _, trainer = train(4, [*SIZES, "--use-amp", "--amp-dtype", "float16"], steps=2)
    total = sum(p.numel() for p in trainer.model.parameters())
    norm = trainer.model.norm.weight
    assert script.parameters_trained(trainer) == total and trainer.optimizer.state[norm]["exp_avg"].any()
    norm.grad.zero_()
    assert script.parameters_trained(trainer) == total - norm.numel()
    norm.grad[-1] = 1e-3  # one element is enough
    assert script.parameters_trained(trainer) == total


# ---------------------------------------------------------------- memory


def test_peak_memory_is_counted_after_the_first_step(clock, monkeypatch):
    """The first step allocates what compilers and tuning need."""
    trainer = timed_trainer(1, clock, monkeypatch)
    calls = []
    step = trainer.step
    event = SimpleNamespace(record=lambda: None, elapsed_time=lambda later: 1.0)
    monkeypatch.setattr(trainer, "step", lambda: calls.append("step") or step())
    monkeypatch.setattr(trainer, "restore", lambda saved: None)
    monkeypatch.setattr(type(trainer.options), "on_gpu", True)
    monkeypatch.setattr(torch.cuda, "Event", lambda **_: event)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: calls.append(f"reset {device}"))
    trainer.options.warmup_steps = 3
    trainer.warm_up(trainer.tokens, trainer.labels, None)
    assert calls == ["step", "reset cpu", "step", "step"]


def test_peak_memory_of_a_gpu(monkeypatch):
    """PyTorch's allocator counts bytes."""
    asked = []
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: asked.append(device) or 3 * 2**29)
    script = load_version(1)
    assert script.peak_memory_mb(script.Options(device="cuda:1")) == 1536
    assert asked == ["cuda:1"]


def test_peak_memory_of_a_process(monkeypatch):
    """Linux counts KiB; so does getrusage, but on macOS, which counts bytes."""
    script = load_version(1)
    config = script.Options(device="cpu")
    monkeypatch.setattr(pathlib.Path, "exists", lambda path: True)
    monkeypatch.setattr(
        pathlib.Path, "read_text", lambda path: "VmPeak:\t 9999 kB\nVmHWM:\t 1572864 kB\nVmRSS:\t 77 kB\n"
    )
    assert script.peak_memory_mb(config) == 1536
    monkeypatch.setattr(pathlib.Path, "exists", lambda path: False)
    for platform, count in (("linux", 3 * 2**19), ("darwin", 3 * 2**29)):
        monkeypatch.setattr(sys, "platform", platform)
        monkeypatch.setattr("resource.getrusage", lambda who, count=count: SimpleNamespace(ru_maxrss=count))
        assert script.peak_memory_mb(config) == 1536


# ---------------------------------------------------------------- regions in profiles

REGIONS = {"forward", "backward", "optimizer", "qkv projection", "attention", "feed-forward", "rms norm", "loss"}


@pytest.fixture
def pushed(monkeypatch):
    """Collect NVTX/ROCTX ranges, in a process that no profiler started."""
    ranges = []

    @contextlib.contextmanager
    def nvtx_range(name):
        ranges.append(name)
        yield
        ranges.append("end of " + name)

    for name in [name for name in os.environ if name.startswith(sum(load_version(1).PROFILERS.values(), ()))]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(torch.cuda.nvtx, "range", nvtx_range)
    scripts = [load_version(version) for version in SCRIPTS]
    for script in scripts:
        script.outside_profiler.cache_clear()
    yield ranges
    for script in scripts:
        script.outside_profiler.cache_clear()


@pytest.mark.parametrize("version", VERSIONS)
def test_regions_are_named_for_pytorchs_profiler_and_cost_nothing_without(version, pushed):
    script = load_version(version)
    _, trainer = train(version, SIZES, steps=0)
    with mock.patch.object(torch.profiler, "record_function", side_effect=AssertionError("a region was recorded")):
        trainer.step()
    assert script.annotate("loss") is script.annotate("rope") is script.NO_REGION
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        trainer.step()
    assert {event.key for event in profiler.key_averages()} >= REGIONS
    assert script.annotate("loss") is script.NO_REGION and not pushed


def test_a_compiled_model_has_no_regions(pushed, monkeypatch):
    """Not even if a profiler records while it is compiled."""
    script = load_version(1)
    monkeypatch.setenv("NSYS_PROFILING_SESSION_ID", "4711")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    @torch.compile(backend="eager", fullgraph=True)
    def double(x):
        with script.annotate("loss"):
            return 2 * x

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        double(torch.ones(2))
    assert "loss" not in {event.key for event in profiler.key_averages()}


# What they set in the process that they start: rocprofv3 and rocprof-sys-run by their sources, nsys and ncu as seen in
# programs under them; our wrapper gives nsys the first of its variables, before the session that it records has begun.
STARTED_BY = [
    ("rocprofv3", "ROCP_TOOL_LIBRARIES=/opt/rocm/lib/rocprofiler-sdk/librocprofiler-sdk-tool.so"),
    ("rocprofv3", "HSA_TOOLS_LIB=librocprofiler64.so"),  # rocprof of ROCm 6
    ("rocprofv3", "ROCPROF_COUNTER_COLLECTION=0 ROCPROF_KERNEL_TRACE=1"),  # rocprof-compute from ROCm 7.12 on
    ("rocprof-sys", "ROCPROFSYS_SCRIPT_PATH=/opt/rocm/libexec ROCP_TOOL_LIBRARIES=librocprof-sys.so"),
    ("rocprof-sys", "OMNITRACE_OUTPUT_PATH=profile"),  # ROCm 6.2
    ("nsys", "NSYS_NVTX_PROFILER_REGISTER_ONLY=0 CUDA_INJECTION64_PATH=libToolsInjection64.so"),
    ("nsys", "NSYS_PROFILING_SESSION_ID=4711"),
    ("ncu", "NV_NSIGHT_INJECTION_PORT_BASE=49152 NV_COMPUTE_PROFILER_PERFWORKS_DIR=/opt"),
    ("an NVTX tool", "NVTX_INJECTION64_PATH=libtool.so"),
]


@pytest.mark.parametrize("profiler, variables", STARTED_BY)
def test_ranges_are_pushed_for_the_profiler_that_started_the_process(profiler, variables, pushed, monkeypatch):
    for variable in variables.split():
        monkeypatch.setenv(*variable.split("="))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    script = load_version(1)
    assert script.outside_profiler() == profiler
    with script.measured_steps(), script.annotate("loss"):
        pass
    assert pushed == ["measured steps", "loss", "end of loss", "end of measured steps"]


@pytest.mark.parametrize("profiler, variables", STARTED_BY)
@pytest.mark.parametrize("version", VERSIONS)
def test_under_rocms_profilers_a_step_is_captured_only_if_it_is_asked_for(
    version, profiler, variables, pushed, monkeypatch
):
    for variable in variables.split():
        monkeypatch.setenv(*variable.split("="))
    script = load_version(version)
    reason = script.default_eager_reason(profile=False, device="cuda:0")
    if version > 2 and profiler in ("rocprofv3", "rocprof-sys"):
        assert reason.startswith("ROCm's profilers may miss") and "pass --graph" in reason
    else:
        assert reason == (None if version > 2 else "no --graph")
    parse = script.parse_options
    asked = parse(["--graph"])
    assert (asked.graph, asked.eager_reason) == (True, None)
    assert parse(["--no-graph", "--profile-operators"]).eager_reason == "no --graph"


@pytest.mark.parametrize("version", [3, 4])
def test_a_profiled_step_is_not_captured_unless_it_is_asked_for(version, monkeypatch):
    """Options for a GPU cannot be parsed everywhere: here the device's name alone says that it is one."""
    script = load_version(version)
    assert script.default_eager_reason(profile=True, device="cuda:0").endswith("pass --graph to capture one anyway")
    assert script.default_eager_reason(profile=True, device="cpu") is None
    asked = []
    monkeypatch.setattr(script, "default_eager_reason", lambda profile, device: asked.append((profile, device)))
    for argv in ([], ["--enable-pytorch-profiler"]):
        script.parse_options(["--device", "cpu", *argv])
    script.parse_options(["--device", "cpu", "--graph"])
    assert asked == [(False, "cpu"), (True, "cpu")]


@pytest.mark.parametrize("version", [3, 4])
def test_the_graph_line_says_why_a_profiled_step_is_not_captured(version, pushed, monkeypatch, capsys):
    """On a CPU no option could capture it. A run that is eager because it was told to says so in the summary alone."""
    script = load_version(version)
    argv = [*SIZES, "--device", "cpu", "--num-steps", "1"]
    assert script.main(argv) == 0 and "  graph " not in capsys.readouterr().out
    argv = [word for word in argv if word != "--no-graph"]
    monkeypatch.setenv("ROCP_TOOL_LIBRARIES", "librocprofiler-sdk-tool.so")
    script.outside_profiler.cache_clear()
    assert script.main(argv) == 0
    reason = "a CPU has no graphs"
    printed = capsys.readouterr().out
    assert f"\n  graph      not captured, running eagerly: {reason}\n" in printed and f"eager ({reason})" in printed


@pytest.mark.parametrize("value, selected", [("1", True), ("0", False), (None, False)])
def test_rocprofv3_records_the_measured_steps_alone_where_it_was_told_to(value, selected, pushed, monkeypatch):
    """Training that fails ends the recording too."""
    library = SimpleNamespace(
        roctxProfilerResume=lambda thread: pushed.append(f"resume {thread.value}"),
        roctxProfilerPause=lambda thread: pushed.append(f"pause {thread.value}"),
    )
    path = "/opt/rocm/lib/librocprofiler-sdk-roctx.so.1"  # there may be no file without the number
    monkeypatch.setattr("ctypes.CDLL", lambda name: {path: library}[name])
    monkeypatch.setenv("LD_PRELOAD", f"/opt/rocm/lib/librocprofiler-sdk.so.1:{path}")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("ROCP_TOOL_LIBRARIES", "librocprofiler-sdk-tool.so")
    if value:
        monkeypatch.setenv("ROCPROF_SELECTED_REGIONS", value)
    with pytest.raises(FloatingPointError), load_version(1).measured_steps():
        raise FloatingPointError
    assert pushed == ["resume 0", "measured steps", "pause 0"] if selected else ["measured steps"]


def test_selected_regions_without_its_library(pushed, monkeypatch):
    monkeypatch.setenv("ROCPROF_SELECTED_REGIONS", "1")
    script = load_version(1)
    message = "--selected-regions cannot begin to record: librocprofiler-sdk-roctx"
    with pytest.raises(script.UserError, match=message), script.measured_steps():
        pass


# ---------------------------------------------------------------- the phases of the warm-up


def test_each_phase_of_the_warm_up_is_named_as_it_begins(clock, monkeypatch, capsys):
    """A run that hangs shows where: the line is there before the work."""
    trainer = timed_trainer(1, clock, monkeypatch)
    seen = []

    def note(what):
        seen.append((what, [" ".join(line.split()[1:4]) for line in capsys.readouterr().out.splitlines()]))

    def results_of_two_steps(saved):
        note("two steps")
        return [("w", torch.zeros(1))]

    def capture_step():
        note("capture")
        trainer.graph = object()

    monkeypatch.setattr(trainer, "step", lambda: note("step"))
    monkeypatch.setattr(trainer, "results_of_two_steps", results_of_two_steps)
    monkeypatch.setattr(trainer, "capture_step", capture_step)
    monkeypatch.setattr(trainer, "restore", lambda saved: note("restore"))
    monkeypatch.setattr(type(trainer.options), "on_gpu", True)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    trainer.options.warmup_steps = 3
    trainer.options.graph = True
    trainer.graph_reason = None
    trainer.warm_up(trainer.tokens, trainer.labels, None)
    assert seen == [
        ("step", ["step 1 of"]),
        ("step", ["steps 2 to"]),
        ("step", []),
        ("two steps", ["eager steps that"]),
        ("two steps", []),
        ("capture", ["capture a step"]),
        ("two steps", ["prove the graph:"]),
        ("restore", []),
    ]
