"""Run one training step of version 3 twice, as AMD's instructions and in Triton's interpreter, and compare each launch.

Both runs take the tiles of the target, the same weights and the same tokens. Each needs a process of its own, in which
TRITON_INTERPRET is 0 or 1 before Triton is imported.
"""

import contextlib
import functools
from unittest import mock

import numpy as np
import torch

from ..command_line import progress
from ..versions import load_version, relative_error
from .launch import choices_of, executed, tables_of_addresses

# A short and narrow step. T is a multiple of 16, as in the presets: the compiled kernels are those that they launch.
SIZES = "--num-layers 1 --batch-size 1 --seq-len 48 --vocab-size 128".split()
OPTIMIZER_SIZES = "--hidden-dim 32 --num-heads 2 --num-kv-heads 1 --intermediate-dim 48".split()


def same(a, b):
    """Return where two tensors hold the same numbers, NaN included."""
    return (a == b) | (a.isnan() & b.isnan())


@contextlib.contextmanager
def recorded(owner, note):
    """Call note(kernel, args, options, result, tensors, changed) after each launch, which owner.run() makes.

    result: what run() returns. tensors: {name: tensor} of its arguments, and of what tables of addresses among them
    point to. changed: {name: where a tensor changed}.
    """
    run = owner.run

    def run_and_note(kernel, *args, grid, warmup, **options):
        arguments = dict(zip(kernel.arg_names, args, strict=False)) | options
        tensors = {name: value for name, value in arguments.items() if isinstance(value, torch.Tensor)}
        tables = tables_of_addresses(tensors.values())
        tensors |= {f"address {i}": tensor for i, tensor in enumerate(tables.values())}
        before = {name: tensor.clone() for name, tensor in tensors.items()}
        result = run(kernel, *args, grid=grid, warmup=warmup, **options)
        changed = {name: ~same(tensor, before[name]) for name, tensor in tensors.items()}
        note(kernel, args, options, result, tensors, {name: where for name, where in changed.items() if where.any()})
        return result

    with mock.patch.object(owner, "run", run_and_note):
        yield


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


def error_of(found, wanted, where):
    """Return the relative error of the elements of a tensor that a launch changed in either run."""
    found = found[where].double()
    wanted = wanted[where].double()
    if not torch.equal(found.isnan(), wanted.isnan()):
        return float("inf")
    return relative_error(found.nan_to_num(0.0), wanted.nan_to_num(0.0))


def execute_step(target, argv, label, describe):
    """Return the launches of a step as AMD's instructions: {"kernel", "outputs", "changed", "launch", "described"}.

    outputs: {name: tensor} of those that the launch changed; changed: where. describe(kernel, args, options, compiled):
    what "described" is.
    """
    from triton.runtime.jit import JITFunction

    script = load_version(3)
    found = []

    def note(kernel, args, options, compiled, tensors, changed):
        launch = launches[-1]
        outputs = {name: tensors[name].clone() for name in changed}
        entry = {"kernel": launch.kernel, "outputs": outputs, "changed": changed, "launch": launch}
        found.append(entry | {"described": describe(kernel, args, options, compiled)})
        progress(f"{label}: {launch.kernel}, {launch.seconds:.1f} s")

    with choices_of(script, target), executed(target) as launches, recorded(JITFunction, note):
        step(script, argv, label)
    return found


def interpret_step(target, argv, label, entries):
    """Return the worst relative error of each launch's outputs, compared with Triton's interpreter.

    The outputs of execute_step then take the place of the interpreter's: the next launch has the same inputs.
    """
    from triton.runtime.interpreter import InterpretedFunction, InterpreterBuilder

    script = load_version(3)
    errors = []

    def note(kernel, args, options, result, tensors, changed):
        wanted = entries[len(errors)]
        if wanted["kernel"] != kernel.fn.__name__:
            raise ValueError(f"{kernel.fn.__name__} was launched in place of {wanted['kernel']}")
        found = []
        for name in {*changed, *wanted["outputs"]}:
            where = [launch[name] for launch in (changed, wanted["changed"]) if name in launch]
            output = wanted["outputs"].get(name, tensors[name])
            found.append(error_of(output, tensors[name], functools.reduce(torch.logical_or, where)))
        errors.append(max(found, default=float("inf")))
        for name, tensor in wanted["outputs"].items():
            tensors[name].copy_(tensor)

    dot = with_bfloat16(InterpreterBuilder.create_dot)
    with (
        choices_of(script, target),
        mock.patch.object(InterpreterBuilder, "create_dot", dot),
        recorded(InterpretedFunction, note),
        np.errstate(all="ignore"),
    ):
        step(script, argv, label)
    return errors
