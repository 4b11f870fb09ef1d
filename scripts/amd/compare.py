"""Run one training step of version 3 twice, in Triton's interpreter and as AMD's instructions, and compare each launch.

Both runs take the tiles of the target, the same weights and the same tokens. Each needs a process of its own, in which
TRITON_INTERPRET is 1 or 0 before Triton is imported.
"""

from unittest import mock

import numpy as np
import torch

from common.command_line import progress
from common.versions import load_version, relative_error

from .launch import choices_of, executed, tables_of_addresses

# A short and narrow step. T is a multiple of 16, as in the presets: the compiled kernels are those that they launch.
SIZES = "--num-layers 1 --batch-size 1 --seq-len 48 --vocab-size 128".split()
OPTIMIZER_SIZES = "--hidden-dim 32 --num-heads 2 --num-kv-heads 1 --intermediate-dim 48".split()


def same(a, b):
    """Return where two tensors hold the same numbers, NaN included."""
    return (a == b) | (a.isnan() & b.isnan())


def tensors_of(kernel, args, options):
    """Return {name: tensor} of a launch's arguments, and of what tables of addresses among them point to."""
    arguments = dict(zip(kernel.arg_names, args, strict=False)) | options
    tensors = {name: value for name, value in arguments.items() if isinstance(value, torch.Tensor)}
    tables = tables_of_addresses(tensors.values())
    return tensors | {f"address {i}": tensor for i, tensor in enumerate(tables.values())}


def with_bfloat16(create_dot):
    """Return the dot of Triton's interpreter for bfloat16, too, whose bits it would multiply as integers."""
    from triton.language import float32
    from triton.runtime.interpreter import TensorHandle

    def widened(handle):
        if handle.dtype.scalar.name != "bf16":
            return handle
        data = (handle.data.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
        return TensorHandle(data, float32)

    return lambda builder, a, b, *rest: create_dot(builder, widened(a), widened(b), *rest)


def step(script, argv, label):
    """Run forward and backward of a model of these options, and the optimizer on a narrow one: it takes no tiles."""

    def parse(words):
        with mock.patch.object(script, "complete_version_options", lambda options: {}):  # asks about this machine
            return script.parse_options([*words, "--device", "cpu", "--no-graph", "--deterministic"])

    options, narrow = parse([*SIZES, *argv]), parse([*SIZES, *argv, *OPTIMIZER_SIZES])
    script.set_up_backend(options)
    torch.utils.deterministic.fill_uninitialized_memory = True  # with NaN: both runs begin with the same memory
    trainer = script.Trainer(options)
    tokens, labels = script.batch(script.load_data(options), 0, options)
    progress(f"{label}: forward and backward of a model {options.hidden_dim} wide, {options.seq_len} tokens")
    trainer.scaler.scale(script.compute_loss(trainer.model, tokens, labels, options)).backward()
    progress(f"{label}: optimizer")
    trainer = script.Trainer(narrow)
    generator = torch.Generator().manual_seed(0)
    for parameter in trainer.model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
    trainer.scaler.scale(torch.zeros(()))  # makes its scale at the first use
    trainer.scaler.step(trainer.optimizer)


def error_of(found, wanted, before):
    """Return the relative error of the elements of a tensor that either run changed, None if neither changed any."""
    where = ~same(found, before) | ~same(wanted, before)
    if not where.any():
        return None
    found = found[where].double()
    wanted = wanted[where].double()
    if not torch.equal(found.isnan(), wanted.isnan()):
        return float("inf")
    return relative_error(found.nan_to_num(0.0), wanted.nan_to_num(0.0))


def interpret_step(target, argv, label):
    """Return the launches of a step in Triton's interpreter: {"kernel", "outputs": {name: tensor} that it changed}."""
    from triton.runtime.interpreter import InterpretedFunction, InterpreterBuilder

    script = load_version(3)
    run = InterpretedFunction.run
    launches = []

    def launch(kernel, *args, **options):
        tensors = tensors_of(kernel, args, options)
        before = {name: tensor.clone() for name, tensor in tensors.items()}
        run(kernel, *args, **options)
        outputs = {name: tensor.clone() for name, tensor in tensors.items() if not same(tensor, before[name]).all()}
        launches.append({"kernel": kernel.fn.__name__, "outputs": outputs})

    dot = with_bfloat16(InterpreterBuilder.create_dot)
    with (
        choices_of(script, target),
        mock.patch.object(InterpreterBuilder, "create_dot", dot),
        mock.patch.object(InterpretedFunction, "run", launch),
        np.errstate(all="ignore"),
    ):
        step(script, argv, label)
    return launches


def execute_step(target, argv, label, interpreted, part, describe):
    """Execute the launches of a step whose kernel has `part` in its name, and compare each with interpret_step's.

    Return {"kernel", "error": worst of its outputs, "launch", "described"} of each; described: what describe(kernel,
    args, options, compiled) returns. Every launch, executed or not, leaves what Triton's interpreter computed: the next
    one has the same inputs.
    """
    from triton.runtime.jit import JITFunction

    script = load_version(3)
    left = iter(interpreted)
    found = []

    def launch(kernel, *args, **options):
        wanted = next(left)
        name = kernel.fn.__name__
        if wanted["kernel"] != name:
            raise ValueError(f"{name} was launched in place of {wanted['kernel']}")
        tensors = tensors_of(kernel, args, options)
        if part in name:
            before = {key: tensor.clone() for key, tensor in tensors.items()}
            compiled = run(kernel, *args, **options)
            expected = before | wanted["outputs"]
            errors = [error_of(tensor, expected[key], before[key]) for key, tensor in tensors.items()]
            worst = max((error for error in errors if error is not None), default=float("inf"))
            described = describe(kernel, args, options, compiled)
            found.append({"kernel": name, "error": worst, "launch": launches[-1], "described": described})
            progress(f"{label}: {name}, {launches[-1].seconds:.1f} s")
        for key, output in wanted["outputs"].items():
            tensors[key].copy_(output)

    with choices_of(script, target), executed(target) as launches:
        run = JITFunction.run
        with mock.patch.object(JITFunction, "run", launch):
            step(script, argv, label)
    return found
