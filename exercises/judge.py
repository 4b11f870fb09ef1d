"""Judge the results of one case, and say in one sentence what is wrong with them."""

import math
import re

import torch

from common.measuring.accuracy import allowed
from common.measuring.guarded_memory import bits, never_written, stray_store
from common.versions import relative_error

SMALL = 3e-5  # relative error: a rounding to float16 makes ten times as much
ALIKE = 1e-2  # relative error of two results that are the same one: bfloat16 rounds by 4e-3 at most
ROOM = 10  # times the bound of a right result: a wrong one may round more, in larger numbers
SHOWN = 6  # labels of a result
ALONE = "its only element"  # the place in a result without dimensions, such as a loss
DIVISORS = range(2, 17)  # in place of the number of ranks; a larger one would be found in any factor
FACTORS = {2: "2", 0.5: "1/2", -1: "-1", math.log2(math.e): "log2(e)", math.log(2): "ln(2)"}


class Wrong(Exception):
    """Tell what is wrong with an answer: its kind, the tensor that shows it, and one sentence."""

    def __init__(self, kind, tensor, sentence):
        super().__init__(sentence)
        self.kind, self.tensor = kind, tensor


def alike_where_finite(a, b):
    """Return True if a and b are finite in the same places and nearly equal there."""
    finite = a.isfinite()
    if not torch.equal(finite, b.isfinite()):
        return False
    return not finite.any() or relative_error(a[finite], b[finite]) < ALIKE


def differs(result, exact):
    """Return True if a typical error is far from right where it says what it computes."""
    known = ~result.isnan()
    return relative_error(result[known], exact[known]) > ALIKE


def check_inputs(inputs, originals):
    for name, tensor in inputs.items():
        if not torch.equal(bits(tensor), bits(originals[name])):
            raise Wrong("changed", name, f"{name}: the kernel changed its input; store to the outputs only")


def check_bands(tensors, remedies):
    """Raise Wrong for a store beside one of the tensors, pairs (name, tensor).

    remedies: address of a tensor -> what to do about the store, where that is known.
    """
    for name, tensor in tensors:
        if found := stray_store(tensor):
            raise Wrong("stray", name, f"{name}: {found}: {remedies.get(tensor.data_ptr(), 'mask the store')}")


def describe_factor(factor):
    """Return how all elements differ from what they should be, given their common factor."""
    known = next((text for value, text in FACTORS.items() if math.isclose(factor, value, rel_tol=1e-3)), None)
    if not known and abs(factor - 1) < 0.1:
        return f"every element is {100 * abs(factor - 1):.2g} % too {'large' if factor > 1 else 'small'}"
    return f"every element is {known or f'{factor:.4g}'} times its correct value"


class Judge:
    """Hold what the sentences on one case need: the task, the answer's module and the inputs.

    compute(suspect): what a suspect of the task returns for these inputs.
    seen: None, or words on a load that reads what it must not. undefined: the same on a masked load without other.
    unset: None, or words on an addition to what nothing has set.
    rounds: the dtype has 16 bits, and the same case is right in float32.
    """

    def __init__(self, task, module, inputs, compute, seen=None, undefined=None, unset=None, rounds=False):
        self.task, self.module, self.inputs, self.compute = task, module, inputs, compute
        self.seen, self.undefined, self.unset, self.rounds = seen, undefined, unset, rounds
        split = getattr(getattr(task, "launch", None), "split", ())
        self.ranks = len(inputs[split[0]]) if split else 0  # on which the answer runs, see ranks.py

    def describe_ranks(self, factor):
        """Return what may be the cause of a factor: a mean or sum over the ranks too many, or another divisor."""
        if not self.ranks:
            return ""
        for value, said in ((1 / self.ranks, "divided"), (self.ranks, "summed")):
            if math.isclose(factor, value, rel_tol=1e-3):
                return f", and there are {self.ranks} ranks: is it {said} once too often?"
        divisor = round(self.ranks / factor)  # of a sum of which the mean was wanted
        if divisor in DIVISORS and divisor % self.ranks and math.isclose(factor, self.ranks / divisor, rel_tol=1e-3):
            return f", and there are {self.ranks} ranks: is it divided by {divisor}?"
        return ""

    def place(self, name, index):
        """Return 'row 7, column 96 (program 1)', or in the brackets the words that the task has for an element."""
        names = self.task.names[name].split()
        where = ", ".join(f"{dimension} {i}" for dimension, i in zip(names, index, strict=True)) or ALONE
        owner = self.task.owner(self.module, name, index, self.inputs)
        if isinstance(owner, tuple) and owner:
            owner = f"program {', '.join(map(str, owner))}"
        return f"{where} ({owner})" if owner else where

    def place_in_memory(self, name, element, shape):
        """Return 'row 7, column 96' of an output's element, counted in memory; a packed output has no such names."""
        names = self.task.names.get(name, "").split()
        if len(names) != len(shape):
            return f"element {element}"
        index = torch.unravel_index(torch.tensor(element), shape)
        return ", ".join(f"{dimension} {int(i)}" for dimension, i in zip(names, index, strict=True)) or ALONE

    def check_written(self, name, got):
        unwritten = never_written(got).nonzero().tolist()
        if unwritten:
            missing = f"{len(unwritten)} of {got.numel()} elements are never written"
            sentence = f"{name}: {missing}, the first at {self.place(name, unwritten[0])}"
            if self.unset:
                sentence = f"{name}: {self.unset}"
            elif name in self.task.unwritten:
                sentence += f": {self.task.unwritten[name]}"
            raise Wrong("unwritten", name, sentence)

    def check_finite(self, name, got, exact):
        bad = (~got[name].isfinite() & exact[name].isfinite()).nonzero().tolist()
        if bad:
            place = self.place(name, bad[0])
            found = f"{len(bad)} of {got[name].numel()} elements are NaN or infinite, the first at {place}"
            cause = self.find_infinite_suspect(name, got)
            places = "a load past the end of an input, a masked load without other, an overflow, or inf - inf"
            if self.ranks:
                places = "memory of torch.empty that nothing was written to, an overflow, a division by 0, or inf - inf"
            cause = cause or self.seen or self.undefined or f"look for {places}"
            raise Wrong("value", name, f"{name}: {found}: {cause}")

    def find_infinite_suspect(self, name, got):
        """Return the typical error whose results are NaN or infinite in the same places, and alike elsewhere.

        The first whose NaN lie where those of the answer lie. Where nothing is finite, each load without other is a
        better explanation.
        """
        found = []
        for sentence, suspect in self.task.suspects.items():
            results = self.compute(suspect)
            if name in results and all(alike_where_finite(got[other], results[other]) for other in results):
                exact = all(torch.equal(got[other].isnan(), results[other].isnan()) for other in results)
                found.append((not exact, sentence))
        if not found or (self.undefined and not got[name].isfinite().any()):
            return None
        return min(found, key=lambda each: each[0])[1]

    def tolerance(self):
        tolerance = self.task.tolerance
        return tolerance(**self.inputs) if callable(tolerance) else tolerance

    def check_values(self, got, plain, exact, bounds=None):
        """Blame the first wrong result: the others follow from it, or are computed after it.

        bounds: {name: relative error that it may have}; None: twice that of plain, and the tolerance.
        """
        got = {name: got[name].double() for name in exact}
        errors = {name: relative_error(got[name], exact[name]) for name in exact}
        if bounds is None:
            tolerance = self.tolerance()
            bounds = {name: allowed(relative_error(plain[name], exact[name]), tolerance) for name in exact}
        wrong = [name for name in exact if not errors[name] <= bounds[name]]
        if not wrong:
            return
        name, *others = wrong
        if name in self.task.labels:
            said = self.describe_labels(name, got[name], exact[name])
            cause = self.task.explain(name, got[name], self.inputs)
            raise Wrong("value", name, f"{said}; {cause}" if cause else said)
        distance = (got[name] - exact[name]).abs()
        worst = tuple(int(i) for i in torch.unravel_index(distance.argmax(), distance.shape))
        cause = self.find_suspect(got, exact, bounds, wrong) or self.task.explain(name, got[name], self.inputs)
        raise Wrong(
            "value",
            name,
            f"{name}: relative error {errors[name]:.1e}, allowed {bounds[name]:.1e}; worst at "
            f"{self.place(name, worst)}: {got[name][worst]:.6g} instead of {exact[name][worst]:.6g}; "
            + (cause or self.describe_pattern(name, got[name], exact[name], bounds[name], errors[name]))
            + (f"; also wrong: {', '.join(others)}" if others else ""),
        )

    def describe_labels(self, name, got, exact):
        """Return which elements of a result of zeros and ones are wrong, by what they stand for."""
        faults = [
            f"{label} gives {bool(mine)}, but should give {bool(right)}"
            for label, mine, right in zip(self.task.labels[name], got.tolist(), exact.tolist(), strict=True)
            if mine != right
        ]
        more = [f"{len(faults) - SHOWN} more"] if len(faults) > SHOWN else []
        return f"{name}: {'; '.join(faults[:SHOWN] + more)}"

    def find_suspect(self, got, exact, bounds, wrong):
        """Return the typical error that computes these results, or None."""
        for sentence, suspect in self.task.suspects.items():
            results = self.compute(suspect)
            known = {name: ~value.isnan() for name, value in results.items()}  # NaN stands for any value
            known = {name: mask for name, mask in known.items() if mask.any()}
            errors = {name: relative_error(got[name][mask], results[name][mask]) for name, mask in known.items()}
            alike = known and all(errors[name] < ROOM * bounds[name] for name in known)
            explained = {name for name in results if name not in known or differs(results[name], exact[name])}
            if alike and wrong[0] in known and explained >= set(wrong):
                return sentence
        return None

    def describe_pattern(self, name, got, exact, bound, error):
        """Return what the error looks like: a common factor, a region, or noise."""
        said = self.describe_elements(name, got, exact, bound, error)
        return said if exact.numel() > 1 else re.sub("every element is|all elements are", "it is", said)

    def describe_elements(self, name, got, exact, bound, error):
        """Return describe_pattern's sentence as one on many elements."""
        if self.rounds:
            return "right in float32: what is rounded to 16 bits on the way: a sum, what it adds up, or a factor?"
        factor = ((got * exact).sum() / (exact * exact).sum()).item()
        # a factor explains an error of which it leaves little
        if factor and relative_error(got / factor, exact) < min(ROOM * bound, error / 4):
            return describe_factor(factor) + self.describe_ranks(factor)
        wrong = ((got - exact).abs() > ROOM * bound * exact.square().mean().sqrt()).nonzero()
        if error < SMALL:
            places = "a small constant such as eps, its place, or a difference of nearly equal numbers"
            return f"all digits that 16 bits have are right: look at {places}"
        if bool(((got - exact).abs() <= 2e-3 * exact.abs() + bound * exact.abs().max()).all()):
            return "all elements are right to about 3 digits: look for a rounding to 16 bits, or a missing one"
        if not len(wrong):
            return "all elements are slightly off: is a sum or a product taken in 16 bits?"
        if len(wrong) == got.numel():
            return "every element is wrong"
        parts, volume = [], 1
        for dimension, size, indices in zip(self.task.names[name].split(), got.shape, wrong.T, strict=True):
            low, high = int(indices.min()), int(indices.max())
            volume *= high - low + 1
            if high - low + 1 < size:
                parts.append(f"{dimension} {low}" + (f" to {high}" if high > low else "") + f" of {size}")
        if volume == len(wrong):
            return f"wrong only in {', '.join(parts)}"
        region = f", all of them in {', '.join(parts)}" if parts else ""
        return f"{len(wrong)} of {got.numel()} elements are wrong{region}"
