"""Sequences of every length up to --seq-len, and vocabularies of every size."""

from unittest import mock

import pytest
import torch

from common.measuring.accuracy import outcome
from common.versions import SCRIPTS, load_version, relative_error

SIZES = "--hidden-dim 32 --num-layers 2 --num-heads 2 --num-kv-heads 1 --intermediate-dim 40 --seq-len 12".split()
SIZES += "--batch-size 2 --no-graph".split()


@pytest.mark.parametrize("version", SCRIPTS)
def test_a_shorter_sequence_is_a_prefix(version):
    """A token sees those before it alone: its logits are the same without those after it."""
    script, bound = load_version(version), 1e-4 if torch.cuda.is_available() else 1e-5
    config = script.parse_options([*SIZES, "--vocab-size", "50"])
    model = script.Trainer(config).model
    tokens = script.batch(script.load_data(config), 0, config)[0].to(config.device)
    with torch.no_grad():
        logits = model(tokens)
        for T in (1, 5, 11):
            assert relative_error(model(tokens[:, :T]), logits[:, :T]) < bound, T


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_version_4_computes_the_same_with_flex_attention():
    """Of sequences of the length that its mask was made for; a CPU has it without gradients alone."""
    script = load_version(4)
    config = script.parse_options([*SIZES, "--vocab-size", "50", "--device", "cpu"])
    model = script.make_model(config).requires_grad_(False)
    tokens = script.batch(script.load_data(config), 0, config)[0]
    logits = model(tokens)
    script.use_flex_attention(model, config.seq_len, "cpu")
    with mock.patch.object(script, "compiled_flex_attention", wraps=script.compiled_flex_attention) as flex:
        assert relative_error(model(tokens), logits) < 1e-5
        assert flex.call_count == config.num_layers
        assert relative_error(model(tokens[:, :11]), logits[:, :11]) < 1e-5
        assert flex.call_count == config.num_layers


@pytest.mark.parametrize("version", SCRIPTS)
def test_angles_of_far_positions_are_exact(version):
    """Angles in float32 would be off by 1e-4 at position 4095; computed in float64, tables are rounded once."""
    tables = load_version(version).rope_tables(4096, 64, 10000.0, "cpu")
    frequencies = 10000.0 ** (-torch.arange(32, dtype=torch.float64) / 32)
    angles = torch.arange(4096, dtype=torch.float64)[:, None] * frequencies
    for table, exact in zip(tables, (angles.cos(), angles.sin()), strict=True):
        assert table.dtype == torch.float32 and (table - exact).abs().max() < 1e-7


@pytest.mark.parametrize("version", SCRIPTS)
def test_a_vocabulary_above_4096_is_trained(version):
    """Version 3 then adds the embedding's gradient row by row. float64 of version 1 is the reference."""
    argv = [*SIZES, "--vocab-size", "4999", "--num-layers", "1"]
    script = load_version(1)
    config = script.parse_options([*argv, "--device", "cpu"])
    model = script.Trainer(config).model.double()
    script.compute_loss(model, *script.batch(script.load_data(config), 0, config), config).backward()
    found = outcome(load_version(version), argv, steps=1)["gradients"]
    for name, p in model.named_parameters():
        assert relative_error(found[name], p.grad) < (1e-4 if torch.cuda.is_available() else 1e-5), name
