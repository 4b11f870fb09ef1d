"""Pair the parameters of two scripts' models by name: equal, renamed, or packed into one.

A packed weight is the concatenation of several: one projection for q, k and v. What no name and no option decides is
guessed by order and shape, and only a comparison of the outputs proves a guess.
"""

import itertools
import re
from typing import NamedTuple

ORDERS = 12  # orders of packed parts that are tried


class Pair(NamedTuple):
    """Hold the names of one or several old tensors and of one or several new ones; one side has one."""

    old: tuple
    new: tuple
    dim: int = 0  # along which the several are concatenated
    guess: bool = False

    def __str__(self):
        return f"{' + '.join(self.new)} = {' + '.join(self.old)}"


class Unpaired(Exception):
    """Say which parameters have no counterpart."""


# ---------------------------------------------------------------- pairing


def pair_names(old, new, maps=(), fuses=()):
    """Return the Pairs of two models; old and new: {name: shape}. Raise Unpaired with a sentence.

    maps: [(regular expression, replacement)] for old names. fuses: [(name of a packed tensor, [names of its parts])],
    regular expressions and replacements too.
    """
    renamed = {}  # what an old name is called in new -> its own name
    for name in old:
        other = name
        for pattern, replacement in maps:
            other = re.sub(pattern, replacement, other)
        if other in renamed:
            raise Unpaired(f"--map gives {name} and {renamed[other]} the same name {other}")
        renamed[other] = name
    renamed = with_prefix(renamed, new)
    pairs = [Pair((renamed[name],), (name,)) for name in new if name in renamed]
    for pair in pairs:
        if old[pair.old[0]] != new[pair.new[0]]:
            shapes = f"{list(old[pair.old[0]])} in old and {list(new[pair.new[0]])} in new"
            raise Unpaired(f"{pair.new[0]} is {shapes}")
    left_old = {other: old[name] for other, name in renamed.items() if other not in new}
    left_new = {name: shape for name, shape in new.items() if name not in renamed}
    for packed, parts in fuses:
        pairs += fused(packed, parts, left_old, left_new)
    pairs += guessed(left_old, left_new)
    if left_old or left_new:
        missing = [f"old's {', '.join(list(left_old)[:3])}"] if left_old else []
        missing += [f"new's {', '.join(list(left_new)[:3])}"] if left_new else []
        raise Unpaired(f"{' and '.join(missing)} have no counterpart: pair the names with --map or --fuse")
    return [pair._replace(old=tuple(renamed.get(name, name) for name in pair.old)) for pair in pairs]


def with_prefix(renamed, new):
    """Add or remove a prefix that all names of one model have and the other's lack, as of a model in a wrapper."""
    if not renamed or renamed.keys() & new.keys():
        return renamed
    first = next(iter(renamed))
    for name in new:
        if name.endswith(f".{first}"):
            prefix = name.removesuffix(first)
            return {prefix + other: own for other, own in renamed.items()}
        if first.endswith(f".{name}"):
            prefix = first.removesuffix(name)
            return {other.removeprefix(prefix): own for other, own in renamed.items()}
    return renamed


def packed_dim(whole, parts):
    """Return along which dimension the parts' shapes make the whole's, or None."""
    for dim in range(min(2, len(whole))):
        alike = all(len(part) == len(whole) for part in parts)
        if not alike or sum(part[dim] for part in parts) != whole[dim]:
            continue
        if all(part[:dim] + part[dim + 1 :] == whole[:dim] + whole[dim + 1 :] for part in parts):
            return dim
    return None


def fused(packed, parts, left_old, left_new):
    """Return the Pairs that an option --fuse names, on whichever side is packed, and take them out of what is left."""
    pairs = []
    for wholes, singles, is_new in ((left_new, left_old, True), (left_old, left_new, False)):
        for name in list(wholes):
            match = re.fullmatch(packed, name)
            names = [match.expand(part) for part in parts] if match else []
            if not names or not singles.keys() >= set(names):
                continue
            dim = packed_dim(wholes[name], [singles[part] for part in names])
            if dim is None:
                shapes = ", ".join(str(list(singles[part])) for part in names)
                raise Unpaired(f"--fuse: {name} {list(wholes[name])} isn't a concatenation of {shapes}")
            pairs.append(Pair(tuple(names), (name,), dim) if is_new else Pair((name,), tuple(names), dim))
            del wholes[name]
            for part in names:
                del singles[part]
    if not pairs:
        raise Unpaired(f"--fuse {packed}={','.join(parts)} fits no parameters that are left")
    return pairs


def guessed(left_old, left_new):
    """Pair what is left by order and shape, weights with weights and biases with biases, until something does not fit.

    What was paired is taken out of left_old and left_new.
    """
    pairs = []
    for kind in dict.fromkeys(name.rpartition(".")[2] for name in left_new):
        old = [name for name in left_old if name.rpartition(".")[2] == kind]
        new = [name for name in left_new if name.rpartition(".")[2] == kind]
        while old and new:
            pair = next_pair(old, new, left_old, left_new)
            if pair is None:
                break
            pairs.append(pair)
            del old[: len(pair.old)]
            del new[: len(pair.new)]
    for pair in pairs:
        for name in pair.old:
            del left_old[name]
        for name in pair.new:
            del left_new[name]
    return pairs


def next_pair(old, new, left_old, left_new):
    """Return the Pair of the first names that are left: equal shapes, or one that several of the other side make."""
    if left_old[old[0]] == left_new[new[0]]:
        return Pair((old[0],), (new[0],), guess=True)
    for number in (2, 3, 4):
        dim = packed_dim(left_new[new[0]], [left_old[name] for name in old[:number]])
        if dim is not None and len(old) >= number:
            return Pair(tuple(old[:number]), (new[0],), dim, guess=True)
        dim = packed_dim(left_old[old[0]], [left_new[name] for name in new[:number]])
        if dim is not None and len(new) >= number:
            return Pair((old[0],), tuple(new[:number]), dim, guess=True)
    return None


def orders(pairs):
    """Yield the pairs with the guessed packed parts in every order, the given one first; all layers have one order."""
    numbers = sorted({len(pair.old + pair.new) - 1 for pair in pairs if pair.guess and len(pair.old + pair.new) > 2})
    choices = [list(itertools.permutations(range(number))) for number in numbers]
    for chosen in itertools.islice(itertools.product(*choices), ORDERS):
        order = dict(zip(numbers, chosen, strict=True))
        yield [reordered(pair, order) for pair in pairs]


def reordered(pair, order):
    places = order.get(len(pair.old + pair.new) - 1)
    if not pair.guess or not places:
        return pair
    if len(pair.old) > 1:
        return pair._replace(old=tuple(pair.old[place] for place in places))
    return pair._replace(new=tuple(pair.new[place] for place in places))


# ---------------------------------------------------------------- values


def to_new(pairs, values, shapes):
    """Return {new name: value} from old's values; shapes: new's."""
    found = {}
    for pair in pairs:
        if len(pair.old) > 1:
            found[pair.new[0]] = concatenated([values[name] for name in pair.old], pair.dim)
        elif len(pair.new) > 1:
            sizes = [shapes[name][pair.dim] for name in pair.new]
            found |= zip(pair.new, values[pair.old[0]].split(sizes, pair.dim), strict=True)
        else:
            found[pair.new[0]] = values[pair.old[0]]
    return found


def concatenated(values, dim):
    import torch

    return torch.cat(values, dim)


def in_parts(pairs, values, shapes, side):
    """Return {label: tensor or None} in the finer parts of each Pair, from the values of one side: "old" or "new".

    Both sides have equal labels: the names of the parts. shapes: {name: shape} of both sides' tensors.
    """
    found = {}
    for pair in pairs:
        parts = pair.old if len(pair.old) >= len(pair.new) else pair.new
        own = getattr(pair, side)
        if len(own) == len(parts):
            found |= {part: values.get(name) for part, name in zip(parts, own, strict=True)}
        elif values.get(own[0]) is None:
            found |= dict.fromkeys(parts)
        else:
            sizes = [shapes["old" if parts is pair.old else "new"][part][pair.dim] for part in parts]
            found |= zip(parts, values[own[0]].split(sizes, pair.dim), strict=True)
    return found


def module_names(pairs):
    """Return {module of old: module of new} of parameters that are paired one to one, and of the modules around."""
    found = {"": ""}
    for pair in pairs:
        if len(pair.old) + len(pair.new) > 2:
            continue
        old = pair.old[0].split(".")[:-1]
        new = pair.new[0].split(".")[:-1]
        while old and new:
            found.setdefault(".".join(old), ".".join(new))
            if old.pop() != new.pop():
                break
    return found
