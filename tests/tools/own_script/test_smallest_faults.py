"""check_training.py at its smallest faults: a leak of one token, and one step that is large enough."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch

import check_training


@dataclasses.dataclass
class Call:
    args: tuple
    kwargs: dict


TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9], [2, 6, 5, 3, 5, 8]])


def sees_the_next(tokens):
    return tokens.roll(-1, 1).float()[..., None]  # the last position sees the first token


MODELS = {  # outputs [B, T, 1] of tokens: at how many places before the last they change with the last token
    "sound": (lambda tokens: tokens.cumsum(1).float()[..., None], 0),
    "the next token": (sees_the_next, 2),
    "the next token, of [B, T]": (lambda tokens: sees_the_next(tokens)[..., 0], 2),
    "in one row": (lambda tokens: torch.cat([sees_the_next(tokens[:1]), tokens[1:].float()[..., None]]), 1),
    "all tokens": (lambda tokens: tokens.sum(1, keepdim=True).expand_as(tokens).float()[..., None], 10),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_leak_of_one_token_is_seen(name):
    model, places = MODELS[name]
    rerun = SimpleNamespace(run=lambda call: model(call.args[0]))
    assert check_training.earlier_outputs_moved(rerun, Call((TOKENS,), {})) == places


@pytest.mark.parametrize(
    ("updates", "small"), [([1e-9, 1e-9], True), ([1e-9, 1.0], False), ([1.0, 1e-9], False), ([1.0, 1.0], False)]
)
def test_an_update_that_one_step_does_not_round_away_is_none_too_small(updates, small):
    param, other = (torch.nn.Parameter(torch.ones(4)) for _ in range(2))
    record = SimpleNamespace(param=param, seen=[SimpleNamespace(largest=largest) for largest in updates])
    groups = [{"params": [param, other], "lr": 1e-3}]
    assert check_training.too_small([record], groups) == [record] * small


@pytest.mark.parametrize(
    ("last", "apart"),
    [
        ((1, 5), []),
        ((1, 6), ["b"]),  # one parameter of two, on the last of three ranks
        ((2, 6), []),  # it began with another value there
        (None, []),  # and that rank's DDP has no such parameter
    ],
)
def test_one_parameter_of_one_rank_that_went_apart_is_named(last, apart):
    ranks = [{"a": (1, 5), "b": (1, 5)} for _ in range(3)]
    ranks[2]["b"] = last
    if last is None:
        del ranks[2]["b"]
    found = check_training.apart_findings(ranks)
    assert [(finding.kind, finding.tensors) for finding in found] == [("apart", apart)] * len(apart)
    assert not found or found[0].text.endswith("no longer: 1 tensor")


@pytest.mark.parametrize("place", [0, 1])
def test_a_leak_of_one_of_two_outputs_is_seen(place):
    """And one of the second of two inputs."""
    outputs = [TOKENS.float()[..., None]] * 2

    def model(first, second):
        found = [tokens.float()[..., None] for tokens in (first, second)]
        found[place] = sees_the_next((first, second)[place])
        return found

    rerun = SimpleNamespace(run=lambda call: model(*call.args))
    assert check_training.earlier_outputs_moved(rerun, Call((TOKENS, TOKENS.clone()), {})) == 2
    rerun = SimpleNamespace(run=lambda call: outputs)
    assert check_training.earlier_outputs_moved(rerun, Call((TOKENS, TOKENS.clone()), {})) == 0


def finding_of(*tensors, kind="unchanged", warning=False):
    return check_training.Finding(kind, "words", list(tensors), warning=warning)


@pytest.mark.parametrize(
    ("patterns", "finding", "row"),
    [
        (["a"], finding_of("a"), "unchanged=a"),
        (["a"], finding_of("a", "b"), None),  # one of its tensors is not meant
        (["b"], finding_of("a", "b"), None),
        (["a", "b"], finding_of("a", "b"), None),
        (["?"], finding_of("a", "b"), "unchanged=?"),
        (["?", "*"], finding_of("a"), "unchanged=?; not seen: unchanged"),  # the first one is enough
        (["?"], finding_of("a", warning=True), None),  # a warning stays
        (["?"], finding_of("a", kind="put_back"), None),
        (["*"], finding_of(), "unchanged"),
        (["?"], finding_of(), None),
    ],
)
def test_a_finding_is_accepted_if_one_pattern_fits_all_that_it_names(patterns, finding, row):
    options = SimpleNamespace(accept=[check_training.Accepted("unchanged", pattern) for pattern in patterns])
    rows = {}
    left = check_training.accept(options, [finding], rows)
    assert left == ([] if row else [finding])
    assert rows["accepted"] == (row or f"not seen: {', '.join(one.name for one in options.accept)}")
