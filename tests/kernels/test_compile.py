"""Version 3's kernels inside torch.compile's graph: --enable-torch-compile."""

import json
import os
import subprocess
import sys

import pytest
import torch

from common.versions import SCRIPTS, load_version, loss_and_gradients, relative_error

MODEL = "--hidden-dim 128 --num-layers 2 --num-heads 2 --num-kv-heads 1 --intermediate-dim 160 --vocab-size 500".split()
MODEL += "--seq-len 48 --batch-size 2".split()

# Traces a whole step on the CPU, as if on an sm_90, and launches nothing: prints the kernels and what Dynamo counted.
TRACE = """
import functools, json, sys
from unittest import mock
import torch, torch._dynamo, torch.utils._triton
from triton.runtime import driver
from triton.runtime.jit import JITFunction
import inspect_kernels
from common.versions import load_version

script = load_version(3)
driver.set_active(inspect_kernels.driver_of("sm_90"))
answers = {
    "gpu_architecture": functools.cache(lambda device: "sm_90"),
    "program_count": functools.cache(lambda device: 528),
}
launched = []
with mock.patch.object(script, "complete_version_options", lambda options: {}):  # refuses a CPU
    options = script.parse_options([*sys.argv[1:], "--device", "cpu", "--enable-torch-compile"])
with (
    mock.patch.object(JITFunction, "run", lambda kernel, *args, **given: launched.append(kernel.fn.__name__)),
    mock.patch.object(torch.utils._triton, "has_triton", lambda *device: True),
    mock.patch.object(torch.nn.Module, "compile", lambda module: None),
    mock.patch.multiple(script, **answers),
):
    model = script.make_model(options)
    script.make_optimizer(model, options)  # gives the model its 16-bit weights
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    tokens = torch.zeros(options.batch_size, options.seq_len, dtype=torch.int64)
    script.compute_loss(compiled, tokens, tokens, options).backward()
counters = torch._dynamo.utils.counters
print(json.dumps([sorted(set(launched)), dict(counters["stats"]), dict(counters["graph_break"])]))
"""
KERNELS = set("rmsnorm_forward rmsnorm_backward column_sum rope swiglu_forward swiglu_backward".split())
KERNELS |= set("attention_forward attention_backward_dq attention_backward_dkdv".split())
KERNELS |= set("cross_entropy_forward cross_entropy_backward".split())  # outside of the model, not compiled


@pytest.mark.slow
@pytest.mark.parametrize("switches", [[], ["--use-amp"]], ids=str)
def test_a_step_is_traced_as_one_graph(switches):
    folders = [str(SCRIPTS[3].parents[1] / name) for name in ("scripts", "tests")]
    environment = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join(folders)}
    command = [sys.executable, "-c", TRACE, *MODEL, "--num-layers", "1", *switches]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "lru_cache" not in done.stderr
    launched, stats, breaks = json.loads(done.stdout.splitlines()[-1])
    assert {name.removesuffix("_kernel") for name in launched} == KERNELS
    assert stats["unique_graphs"] == 1 and not breaks


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [2, 4], ids=["D=64", "D=32"])
@pytest.mark.parametrize(
    "switches",
    [[], ["--tf32"], ["--use-amp"], ["--use-amp", "--amp-dtype", "float16"], ["--use-amp", "--fp8"]],
    ids=str,
)
def test_compiled_gradients_are_as_good_as_those_of_the_kernels_alone(switches, heads):
    model = [*MODEL, "--num-heads", str(heads)]
    wanted = loss_and_gradients(1, model, step=1)[1]
    alone = loss_and_gradients(3, [*model, *switches], step=1)[1]
    torch._dynamo.reset()
    compiled = loss_and_gradients(3, [*model, *switches, "--enable-torch-compile"], step=1)[1]
    for name, gradient in compiled.items():
        allowed = 1.5 * relative_error(alone[name], wanted[name]) + 1e-5
        assert relative_error(gradient, wanted[name]) <= allowed, name


@pytest.mark.gpu
def test_a_second_derivative_is_refused():
    script = load_version(3)
    options = script.parse_options([*MODEL, "--enable-torch-compile"])
    trainer = script.Trainer(options)
    loss = script.compute_loss(trainer.replica, trainer.tokens, trainer.labels, options)
    weights = list(trainer.model.parameters())
    with pytest.raises(RuntimeError, match="second derivative|double backward"):
        gradients = torch.autograd.grad(loss, weights, create_graph=True)
        sum(gradient.sum() for gradient in gradients).backward()
