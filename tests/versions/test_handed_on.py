"""Options that a script hands on: the library receives what the command line says."""

import datetime
from unittest import mock

import pytest
import torch
import torch._dynamo
import torch._inductor.config

from common.versions import load_version

SIZES = "--hidden-dim 32 --num-layers 2 --num-heads 2 --vocab-size 40 --seq-len 8 --batch-size 2 --device cpu".split()


def options_of(version, *argv, **more):
    """Return the options of a command line, and the script; more: what they are on another machine."""
    script = load_version(version)
    options = script.parse_options([*SIZES, *argv])
    vars(options).update(more)
    return script, options


# ---------------------------------------------------------------- torch.compile


@pytest.mark.parametrize("parallel", [None, "ddp"])
@pytest.mark.parametrize("version", [2, 4])
def test_torch_compile_receives_its_mode(version, parallel, monkeypatch):
    """For the whole model; under torchrun for each block, whose graph is not split at DDP's buckets."""
    compiled = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda module, mode: compiled.append((type(module).__name__, mode)))
    mode = "max-autotune-no-cudagraphs"
    script, options = options_of(version, "--enable-torch-compile", "--compile-mode", mode, parallel=parallel)
    with torch._dynamo.config.patch(optimize_ddp=bool(parallel)):
        model = script.make_model(options)
        assert torch._dynamo.config.optimize_ddp is (not parallel)
    names = [type(module).__name__ for module in (model.layers if parallel else [model])]
    assert compiled == [(name, mode) for name in names]


@pytest.mark.parametrize("parallel", [None, "ddp"])
def test_version_3_is_compiled_as_a_whole_or_by_its_blocks(parallel, monkeypatch):
    compiled = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda module: compiled.append(type(module).__name__))
    monkeypatch.setattr(torch.compiler, "assume_constant_result", lambda function: function)
    script, options = options_of(3, enable_torch_compile=True, parallel=parallel)
    scatter = torch._inductor.config.patch(optimize_scatter_upon_const_tensor=True)
    with torch._dynamo.config.patch(optimize_ddp=bool(parallel)), scatter:
        model = script.make_model(options)
        assert torch._dynamo.config.optimize_ddp is (not parallel)
        assert torch._inductor.config.optimize_scatter_upon_const_tensor is False
    assert compiled == [type(module).__name__ for module in (model.layers if parallel else [model])]


@pytest.mark.parametrize("version", [2, 4])
def test_without_the_option_nothing_is_compiled(version, monkeypatch):
    monkeypatch.setattr(torch.nn.Module, "compile", mock.Mock(side_effect=AssertionError))
    script, options = options_of(version)
    script.make_model(options)


# ---------------------------------------------------------------- attention


@pytest.mark.parametrize("backend", ["math", "flash", "efficient", "cudnn"])
def test_version_4_attends_with_the_backend_that_is_asked_for(backend, monkeypatch):
    script, options = options_of(4, attention_backend=backend)
    model = script.make_model(options)
    chosen = mock.MagicMock()
    monkeypatch.setattr(script, "sdpa_kernel", chosen)
    tokens = torch.zeros(2, 8, dtype=torch.int64)
    script.compute_loss(model, tokens, tokens, options)
    ((given,), _) = chosen.call_args
    assert given is script.SDPA_BACKENDS[backend]


# ---------------------------------------------------------------- the optimizer


@pytest.mark.parametrize(
    ("version", "argv", "more", "settings"),
    [
        (1, [], {}, {"capturable": False}),
        (1, [], {"graph": True, "device": "cuda:0"}, {"capturable": True}),
        (2, ["--disable-fused-optimizer"], {}, {"fused": None, "capturable": False}),
        (2, [], {"device": "cuda:0"}, {"fused": True, "capturable": False}),
        (2, [], {"graph": True, "device": "cuda:0"}, {"fused": True, "capturable": True}),
        (2, [], {"graph": True}, {"fused": True, "capturable": False}),
        (3, ["--disable-optimizer-kernel"], {"graph": True, "device": "cuda:0"}, {"fused": None, "capturable": True}),
        (3, ["--disable-optimizer-kernel"], {"parallel": "fsdp"}, {"fused": True, "capturable": False}),
        (4, [], {}, {"fused": True, "capturable": False}),
        (4, [], {"device": "cuda:0"}, {"fused": True, "capturable": True}),
    ],
)
def test_adamw_receives_its_options(version, argv, more, settings, monkeypatch):
    made = mock.Mock()
    monkeypatch.setattr(torch.optim, "AdamW", made)
    script, options = options_of(version, "--learning-rate", "0.125", *argv, **more)
    model = mock.Mock()
    assert script.make_optimizer(model, options) is made.return_value
    made.assert_called_once_with(model.parameters.return_value, lr=0.125, **settings)


def test_the_masters_of_version_4_receive_rate_dtype_and_compiler(monkeypatch):
    made = mock.Mock()
    script, options = options_of(
        4, "--lr", "0.125", "--use-amp", "--amp-dtype", "float16", enable_torch_compile="asked"
    )
    monkeypatch.setattr(script, "MasterAdamW", made)
    model = mock.Mock()
    script.make_optimizer(model, options)
    made.assert_called_once_with(model.parameters.return_value, 0.125, torch.float16, "asked")


# ---------------------------------------------------------------- several processes


@pytest.mark.parametrize(("device", "backend"), [("cpu", "gloo"), ("cuda:1", "nccl")])
def test_the_process_group_has_ten_minutes_and_the_backend_of_its_device(device, backend, monkeypatch):
    """A rank may wait while another compiles; a host that vanished is noticed after that time."""
    group = mock.Mock()
    monkeypatch.setattr("torch.distributed.init_process_group", group)
    monkeypatch.setattr("torch.distributed.destroy_process_group", group.destroy)
    script, options = options_of(1, device=device)
    with script.process_group(options):
        wanted = None if device == "cpu" else torch.device(device)
        group.assert_called_once_with(backend, timeout=datetime.timedelta(minutes=10), device_id=wanted)
        assert not group.destroy.called
    group.destroy.assert_called_once_with()


@pytest.mark.parametrize(
    ("version", "argv", "dtype"),
    [
        (1, ["--use-amp"], None),
        (2, ["--use-amp"], None),
        (4, ["--use-amp"], torch.bfloat16),
        (4, [], None),
    ],
)
def test_fsdp_shards_block_by_block_and_gathers_the_dtype_of_the_version(version, argv, dtype, monkeypatch):
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    script, options = options_of(version, *argv, parallel="fsdp", world_size=3)
    model = script.make_model(options)
    sharded = mock.Mock()
    mesh = mock.Mock()
    monkeypatch.setattr(fsdp, "fully_shard", sharded)
    monkeypatch.setattr("torch.distributed.init_device_mesh", mesh)
    script.shard(model, options)
    mesh.assert_called_once_with("cpu", (3,))
    assert [call.args[0] for call in sharded.call_args_list] == [*model.layers, model]
    for call in sharded.call_args_list:
        assert call.kwargs["mesh"] is mesh.return_value and call.kwargs["mp_policy"].param_dtype is dtype
        assert call.kwargs["mp_policy"].cast_forward_inputs is False


def test_the_scaler_begins_where_16_bit_gradients_do_not_overflow():
    """PyTorch begins at 65536, which skips the first steps."""
    script, options = options_of(1, "--use-amp", "--amp-dtype", "float16")
    trainer = script.Trainer(options)
    assert (trainer.scaler.get_scale(), trainer.scaler.is_enabled()) == (1024, True)
    for argv in ([], ["--use-amp"]):
        script, options = options_of(1, *argv)
        assert not script.Trainer(options).scaler.is_enabled()


# ---------------------------------------------------------------- the profiler


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_the_profiler_records_shapes_memory_and_the_gpu(device, monkeypatch, tmp_path):
    script, options = options_of(1, "--enable-pytorch-profiler", "--profile-dir", str(tmp_path), "--profile-steps", "2")
    vars(options)["device"] = device
    profiler = mock.MagicMock()
    monkeypatch.setattr(torch.profiler, "profile", profiler)
    monkeypatch.setattr(script, "export_trace", mock.Mock())
    monkeypatch.setattr(script, "peak_memory_mb", lambda options: 1.0)
    trainer = mock.Mock(options=options, rounds_to_tf32=None)
    script.profile(trainer, script.load_data(options))
    kinds = torch.profiler.ProfilerActivity
    activities = [kinds.CPU] if device == "cpu" else [kinds.CPU, kinds.CUDA]
    profiler.assert_called_once_with(activities=activities, record_shapes=True, profile_memory=True, acc_events=True)
    assert trainer.run.call_count == 2


@pytest.mark.parametrize(
    ("argv", "device", "keys"),
    [
        (["--profile-operators"], "cpu", ["cpu_time_total"]),
        (["--profile-operators"], "cuda:0", ["device_time_total"]),
        (["--profile-operators", "--sort-by", "self_cuda_time_total"], "cuda:0", ["self_device_time_total"]),
        (["--profile-operators", "--sort-by", "count", "--profile-memory"], "cpu", ["count", "self_cpu_memory_usage"]),
        (["--profile-memory"], "cuda:0", ["self_device_memory_usage"]),
        (
            ["--profile-memory", "--profile-operators", "--sort-by", "self_device_memory_usage"],
            "cpu",
            ["self_cpu_memory_usage"],
        ),
    ],
)
def test_the_table_of_operators_is_sorted_by_the_device_s_column(argv, device, keys, monkeypatch, tmp_path, capsys):
    """Each table is printed once."""
    script, options = options_of(1, "--profile-dir", str(tmp_path), *argv)
    vars(options)["device"] = device
    profiler = mock.MagicMock()
    monkeypatch.setattr(torch.profiler, "profile", profiler)
    monkeypatch.setattr(script, "export_trace", mock.Mock())
    monkeypatch.setattr(script, "peak_memory_mb", lambda options: 1.0)
    script.profile(mock.Mock(options=options, rounds_to_tf32=None), script.load_data(options))
    table = profiler.return_value.__enter__.return_value.key_averages.return_value.table
    assert [call.kwargs["sort_by"] for call in table.call_args_list] == keys
