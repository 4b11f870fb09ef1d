"""Judge whether two scripts compute the same: data, outputs, losses, gradients and updates, in the order of a step.

A bound follows from the old script alone: how far a second run of it is from the first, and a run whose weights were
nudged by one rounding. A tensor of the new script may be twice as far, and one rounding more
(common/measuring/accuracy.py).
"""

import math
from typing import NamedTuple

import torch

import check_training
from common.measuring.accuracy import LAST_PLACE, allowed, loss_bound, rounding, same_loss
from common.own_script.names import in_parts, module_names
from common.ratios import counted

RUNS = ("old", "new", "control", "nudged")
SMALL = 0.1  # relative error of a gradient: a larger one is no rounding, and no kink such as ReLU's
NOISE = 1e-3  # of the gradients' root mean square: a much smaller gradient may be all rounding
CLEAR = 10  # times the allowed error of a gradient: a smaller one may have either sign, and so Adam's step


class Difference(NamedTuple):
    """Hold what differs first."""

    kind: str  # data, shapes, outputs, loss, gradients, stepped, settings (the optimizer's), updates, buffers, modules
    text: str
    module: str | None = None
    lacking: bool = False  # does new lack gradients?
    small: bool = False  # may it be that a rounding put values on the other side of a kink, such as ReLU's?
    step: int = 1

    def with_lacking(self, gradients):
        """Add the gradients that new lacks, which matter more than any difference before them."""
        if gradients is None or not gradients.lacking or gradients.text in self.text:  # two outputs may tell the same
            return self
        return self._replace(text=f"{self.text}; {gradients.text}", lacking=True)


class Compared(NamedTuple):
    """Hold the comparison of one tensor; error and bound are relative."""

    name: str
    error: float
    bound: float
    factor: float  # new's size over old's

    @property
    def passed(self):
        return self.error <= self.bound


def rms(tensor):
    """Return the root of the mean square, 0 without elements; NaN and infinity stay."""
    if not tensor.numel():
        return 0.0
    return tensor.double().square().mean().sqrt().item()


def relative(size, whole):
    """Return size / whole, infinity over zero unless nothing is there."""
    if size == 0:
        return 0.0
    return size / whole if whole > 0 else math.inf


def nudged(weights, precision, times=1):
    """Return weights that differ by a rounding of the precision that the script computes in, or by several."""
    generator = torch.Generator().manual_seed(times)
    size = 2.0**-23  # half of it would be rounded away
    if precision["use_amp"]:
        size = LAST_PLACE[precision["amp_dtype"]] / 2
    elif precision["tf32"]:
        size = LAST_PLACE["float16"] / 2
    found = {}
    for name, value in weights.items():
        if value.is_floating_point():
            sign = torch.randint(2, value.shape, generator=generator) * 2 - 1
            value = (value.double() * (1 + times * size * sign)).to(value.dtype)
        found[name] = value
    return found


# ---------------------------------------------------------------- data


def describe_data(old, new):
    """Return what differs between the data of two calls, or None; old and new: lists of tensors.

    Where one script hands over fewer tensors, as with labels outside of the call, those that it has count.
    """
    if len(old) != len(new):
        fewer, more = sorted((old, new), key=len)
        found = all(any(is_equal(one, other) for other in more) for one in fewer)
        if fewer and found:
            return None
        return f"new hands its model {counted(len(new), 'tensor')}, old hands it {len(old)}"
    for number, (one, other) in enumerate(zip(old, new, strict=True), 1):
        if not is_equal(one, other):
            return f"{ordinal(number, len(old))} is {difference_of(one, other)}"
    return None


def as_one_batch(old, new):
    """Return the data of old's calls and of new's with micro-batches joined, if they are parts of the other's batches.

    None if both make as many calls, or if the parts are not those of the other's batches.
    """
    fewer, more = sorted((old, new), key=len)
    if not fewer or len(fewer) == len(more) or len(more) % len(fewer):
        return None
    number = len(more) // len(fewer)
    joined = [joined_data(more[first : first + number]) for first in range(0, len(more), number)]
    if not all(describe_data(one, other) is None for one, other in zip(fewer, joined, strict=True)):
        return None
    return (fewer, joined) if more is new else (joined, fewer)


def joined_data(calls):
    """Return the tensors of several calls, those of one place one below the other."""
    return [torch.cat(parts) if parts[0].dim() else parts[0] for parts in zip(*calls, strict=False)]


def is_equal(one, other):
    """Tell whether two tensors hold the same values, whatever their dtypes."""
    return one.shape == other.shape and not unequal(one, other).any()


def unequal(one, other):
    """Return where two tensors of one shape differ; NaN, which may stand for a missing value, equals NaN."""
    one = one.double()
    other = other.double()
    return (one != other) & ~(one.isnan() & other.isnan())


def ordinal(number, count):
    return "its input" if count == 1 else f"tensor {number} of its input"


def difference_of(one, other):
    """Say how the second of two unequal tensors differs."""
    if one.dim() and one.dim() == other.dim() and one.shape[1:] == other.shape[1:]:
        if len(one) != len(other):
            fewer, more = sorted((one, other), key=len)
            inside = is_equal(more[: len(fewer)], fewer)
            if inside and more is other:
                return f"old's {len(one)} rows and {len(other) - len(one)} more"
            kind = "the first" if inside else "a different batch of"
            return f"{kind} {len(other)} rows, and old has {len(one)}"
        if sorted_rows(one) == sorted_rows(other):
            return "the same rows in another order"
        return f"a different one: {unequal(one, other).sum():,} of its {one.numel():,} values differ"
    return f"{list(other.shape)}, and old's is {list(one.shape)}"


def sorted_rows(tensor):
    return sorted(row.contiguous().numpy().tobytes() for row in tensor.double())


# ---------------------------------------------------------------- the judge


class Judge:
    """Compare what the runs recorded, step by step; the first difference ends it.

    pairs: of the names. shapes: {"old": {name: shape}, "new": ...}. precision: old's. weights: old's first values.
    """

    def __init__(self, pairs, shapes, precision, weights):
        self.pairs = pairs
        self.shapes = shapes
        self.modules = module_names(pairs)
        self.loss_bound = loss_bound(precision)
        self.rounding = rounding(precision)
        # a gradient is a sum over the whole batch, and on a CPU too libraries add in another order
        self.sum_rounding = rounding(precision | {"device": "cuda"})
        self.sizes = {name: rms(value) for name, value in self.parts(weights, "old").items() if value is not None}
        self.last_place = 2.0**-23 if not precision["use_amp"] else LAST_PLACE[precision["amp_dtype"]]
        self.clear = {}  # part -> where a gradient was clearly not zero
        self.nonzero = {}  # part -> where it was not exactly zero in every run
        self.worst = {}  # kind -> (number in a step, Compared, names of those that cannot be compared)

    def parts(self, values, side):
        return in_parts(self.pairs, values, self.shapes, side)

    def note(self, kind, found):
        """Keep the worst of a kind, how many there were in this step, and those of which old itself is too unsure."""
        loose = [item.name for item in found if item.passed and item.bound >= 1]
        judged = [item for item in found if item.name not in loose]
        _, worst, before = self.worst.get(kind, (0, None, []))
        worst = max(filter(None, [worst, *judged]), key=lambda item: relative(item.error, item.bound), default=None)
        self.worst[kind] = (len(found), worst, list(dict.fromkeys(before + loose)))

    # ------------------------------------------------------------ a step
    def step(self, number, runs):
        """Return the first Difference of a step, or None; runs: {"old", "new", "control", "nudged": recorded step}.

        There may be further runs of old, for gradients and updates alone: no output jumps at a kink.
        """
        difference = self.difference(number, runs)
        return difference and difference._replace(step=number)

    def difference(self, number, runs):
        old = runs["old"]
        new = runs["new"]
        difference = self.data(number, old, new)
        if difference:
            return difference
        difference = self.outputs(number, runs) or self.losses(number, runs)
        gradients = self.gradients(number, {name: run["given"] for name, run in runs.items()})
        if difference:
            return difference.with_lacking(gradients)
        difference = (
            gradients
            or self.stepped(number, {name: run["gradients"] for name, run in runs.items()})
            or self.settings(number, old, new)
        )
        if difference:
            return difference
        difference = self.updates(number, {name: run["updates"] for name, run in runs.items()})
        if difference is None:
            return self.buffers(number, runs) or self.module_settings(number, old, new)
        if bool(old["outside"]) != bool(new["outside"]):
            one, other = ("new", "old") if new["outside"] else ("old", "new")
            text = f"; {one} changes weights outside of optimizer.step() too, and {other} does not"
            difference = difference._replace(text=difference.text + text)
        return difference

    def data(self, number, old, new):
        data = [[call["data"] for call in step["calls"]] for step in (old, new)]
        data = as_one_batch(*data) or data
        if len(data[0]) != len(data[1]):
            one, other = (counted(len(step["calls"]), "time") for step in (old, new))
            return Difference("data", f"step {number}: new calls its model {other}, old calls it {one}")
        for call, (one, other) in enumerate(zip(*data, strict=True), 1):
            text = describe_data(one, other)
            if text:
                where = f", call {call}" if len(old["calls"]) > 1 else ""
                return Difference("data", f"step {number}{where}: {text}")
        return None

    def outputs(self, number, runs):
        """Compare the outputs of the model's calls, and of the modules inside the first one; not those of parts."""
        if len(runs["old"]["calls"]) != len(runs["new"]["calls"]):
            return None
        for four in zip(*(runs[name]["calls"] for name in RUNS), strict=False):
            calls = dict(zip(RUNS, four, strict=True))
            places = places_in_common(calls["old"]["shapes"], calls["new"]["shapes"])
            difference = self.call_outputs(calls, places, f"step {number}: " if number > 1 else "")
            if difference:
                return difference
        return None

    def call_outputs(self, calls, places, when=""):
        """Compare outputs, at these places of old's and new's; the loss may stand inside or outside of the model."""
        self.allow_for_batch_norm(calls["old"])
        found = []
        for old, new in places:
            values = [calls[name]["outputs"][new if name == "new" else old].float() for name in RUNS]
            found.append(self.compare(f"output {old + 1}", values, self.rounding))
        if found:
            self.note("outputs", found)
        if all(item.passed for item in found):
            return None
        worst = max(found, key=lambda item: item.error)
        module, place = self.first_module(calls)
        for side, other, names in self.in_evaluation_mode(calls):
            place += f"; {folded(names)} in evaluation mode in {side}, and not in {other}"
        drew = [calls[name].get("drew") for name in ("old", "new")]
        if drew == [True, False]:
            place += "; old draws random numbers in its model and new does not: is dropout off?"
        if drew == [False, True]:
            place += "; new draws random numbers in its model and old does not"
        return Difference("outputs", f"{when}the outputs are off by {worst.error:.2g}{place}", module)

    def in_evaluation_mode(self, calls):
        """Return [(side, other side, names)] of the modules that are in evaluation mode on one side only."""
        asleep = {
            "old": {name for name in self.modules if name in calls["old"].get("evaluating", ())},
            "new": {name for name, other in self.modules.items() if other in calls["new"].get("evaluating", ())},
        }
        found = []
        for side, other in (("new", "old"), ("old", "new")):
            names = sorted(name or "the model" for name in asleep[side] - asleep[other])
            if names:
                found.append((side, other, names))
        return found

    def allow_for_batch_norm(self, call):
        """Let outputs differ by the rounding of sums once a call had a batch norm: it sums over the whole batch."""
        if any("BatchNorm" in event["class"] for event in call.get("trace", ())):
            self.rounding = self.sum_rounding

    def first_module(self, calls):
        """Return the module where the first call differs first, and a sentence about it."""
        new = {}
        for event in calls["new"].get("trace", ()):
            new.setdefault((event["side"], event["name"]), []).append(event)
        seen = {}
        same = None  # the last module that returned the same
        for event, control, nudge in zip(
            *(calls[name].get("trace", ()) for name in ("old", "control", "nudged")), strict=False
        ):
            name = self.modules.get(event["name"])
            key = (event["side"], name)
            place = seen.get(key, 0)
            seen[key] = place + 1
            if name is None or key not in new:
                if event["name"] in self.modules and event["side"] == "in" and calls["new"].get("trace"):
                    return event["name"], f": {event['name']} ({event['class']}) does not run in new"
                continue
            if place >= len(new[key]):
                continue
            other = new[key][place]
            if [v.shape for v in event["values"]] != [v.shape for v in other["values"]]:
                continue
            values = zip(event["values"], other["values"], control["values"], nudge["values"], strict=True)
            found = [self.compare("", four, self.rounding) for four in values]
            if all(item.error <= 2 * item.bound for item in found):
                if found and event["side"] == "out":
                    same = event["name"]
                continue
            title = f"{event['name'] or 'the model'} ({event['class']})"
            if event["side"] == "out":
                return event["name"] or "the model", f", first inside {title}"
            around = event["name"].rpartition(".")[0]
            while around and ("in", self.modules.get(around)) not in seen:  # a list of modules is not called
                around = around.rpartition(".")[0]
            around = around or "the model"
            after = f", after {same}" if same else ""
            return around, f", first inside {around}{after} and before {title}"
        return None, ""

    def losses(self, number, runs):
        losses = [runs[name]["losses"] for name in RUNS]
        if len({len(values) for values in losses}) > 1:  # several backward passes, or one of their sum
            losses = [[sum(values)] for values in losses]
        found = []
        for wanted, loss, *others in zip(*losses, strict=True):
            error = relative(abs(loss - wanted), abs(wanted))
            noise = max(relative(abs(other - wanted), abs(wanted)) for other in others)
            bound = max(self.loss_bound, 2 * noise)  # an optimizer that calls the model again amplifies a rounding
            found.append(Compared(f"step {number}", error, bound, relative(loss, wanted)))
            if not same_loss(loss, wanted, bound):
                self.note("losses", found)
                times = f", {loss / wanted:.4g} times" if wanted and error > 0.001 else ""
                text = f"step {number}: the loss is {loss:.6g} in new and {wanted:.6g} in old{times}"
                if "outputs" in self.worst:
                    text += "; the model's outputs are the same, so the loss is computed differently"
                return Difference("loss", text)
        if found:
            self.note("losses", found)
        return None

    def compare(self, name, values, one, least=0.0):
        """Return the comparison of one tensor; values: of old, new and old's other runs.

        one: relative error of a rounding. least: absolute error allowed.
        """
        old, new, *others = without_infinities(values)
        size = rms(old) or least / one  # all zeros, of which no error is relative: to all tensors' size
        noise = max(rms(other - old) for other in others)
        bound = allowed(relative(noise, size), one) + relative(least, size)
        return Compared(name, relative(rms(new - old), size), bound, relative(rms(new), size))

    def gradients(self, number, runs):
        """Compare the gradients that backward leaves."""
        found, lacking, absent = self.compare_gradients("gradients", runs)
        failed = [item for item in found if not item.passed]
        if not failed:
            return None
        text = f"step {number}: {len(failed)} of {len(found)} gradients differ"
        small = False
        if lacking:
            text = f"step {number}: new lacks {len(lacking)} of {len(found)} gradients: {folded(lacking)}"
        elif absent:
            text = f"step {number}: old lacks {len(absent)} of {len(found)} gradients that new has: {folded(absent)}"
        elif factor := common_factor(failed, found):
            text += f", all by one factor, {factor:.4g}: the loss's divisor?"
        else:
            text += f": {folded([item.name for item in failed])}"
            small = are_small(failed)
        # backward meets the last module first
        return Difference("gradients", text, failed[-1].name.rpartition(".")[0], bool(lacking), small)

    def stepped(self, number, runs):
        """Compare the gradients that the optimizer gets."""
        found, lacking, absent = self.compare_gradients("stepped", runs)
        failed = [item for item in found if not item.passed]
        if not failed:
            return None
        count = f"{len(failed)} of {len(found)}"
        text = f"step {number}: backward leaves the same gradients, but {count} that the optimizer gets differ"
        if lacking:
            text += f", new's optimizer lacks {folded(lacking)}"
        elif absent:
            text += f", old's optimizer lacks {folded(absent)}"
        elif factor := common_factor(failed, found):
            text += f", all by one factor, {factor:.4g}: clipping?"
        else:
            text += f": {folded([item.name for item in failed])}"
        return Difference("stepped", text)

    def compare_gradients(self, kind, runs):
        """Return what was compared, the names that new lacks, and those that old lacks and new has.

        None counts as zeros, which change nothing. Note where gradients are clear and where they are not zero:
        updates() asks for it.
        """
        parts = {name: self.parts(run, "new" if name == "new" else "old") for name, run in runs.items()}
        whole = size_of(parts["old"].values())
        found, lacking, absent = [], [], []
        for name, old in parts["old"].items():
            new = parts["new"][name]
            if old is None and new is None:
                continue
            shown = [part[name] for part in parts.values()]
            like = old if new is None else new
            shown = [torch.zeros_like(like, dtype=torch.float32) if v is None else v.float() for v in shown]
            item = self.compare(name, shown, self.sum_rounding, self.sum_rounding * whole)
            found.append(item)
            if not item.passed and item.factor == 0:
                lacking.append(name)
            elif not item.passed and not shown[0].any():
                absent.append(name)
            clear = shown[0].abs() > CLEAR * item.bound * rms(shown[0])
            self.clear[name] = clear | self.clear.get(name, clear)
            nonzero = torch.stack(shown).any(0)
            self.nonzero[name] = nonzero | self.nonzero.get(name, nonzero)
        if found:
            self.note(kind, found)
        return found, lacking, absent

    def has_kinks(self, old, near, far, times):
        """Tell whether old's gradients jump: nudges that grow by a factor move them by quite another one.

        near, far: {name: gradient} with weights nudged less and more. times: the factor.
        """
        old, near, far = (self.parts(values, "old") for values in (old, near, far))
        whole = size_of(old.values())
        for name, value in old.items():
            if value is None or near[name] is None or far[name] is None or rms(value) < NOISE * whole:
                continue
            moved = rms(far[name] - value)
            ratio = relative(moved, rms(near[name] - value))
            # A smooth gradient moves in proportion; 4 leaves room for what rounding adds to the smaller move.
            if moved > self.sum_rounding * rms(value) and not times / 4 <= ratio <= times * 4:
                return True
        return False

    def settings(self, number, old, new):
        """Compare what the optimizer's groups say of each parameter, if both have a setting."""
        parts = {name: self.parts_of_settings(run["settings"], name) for name, run in (("old", old), ("new", new))}
        differ = {}
        for name, one in parts["old"].items():
            other = parts["new"].get(name)
            for setting in (one or {}).keys() & (other or {}).keys():
                if not is_close(one[setting], other[setting]):
                    key = (setting, setting_text(one[setting]), setting_text(other[setting]))
                    differ.setdefault(key, []).append(name)
        if not differ:
            return None
        words = []
        for (setting, one, other), names in sorted(differ.items()):
            which = "all parameters" if len(names) == len(parts["old"]) else folded(names)
            words.append(f"{setting} {other} in new and {one} in old for {which}")
        return Difference("settings", f"step {number}: the optimizer's {'; '.join(words)}")

    def module_settings(self, number, old, new):
        """Compare the numbers that the modules compute with, if both sides have a module and a number."""
        differ = {}
        first, others = (step["calls"][0].get("modules", {}) for step in (old, new))
        for name, one in first.items():
            other = others.get(self.modules.get(name, name), {})
            for setting in one.keys() & other.keys():
                if not is_close(one[setting], other[setting]):
                    key = (setting, setting_text(one[setting]), setting_text(other[setting]))
                    differ.setdefault(key, []).append(name or "the model")
        if not differ:
            return None
        words = []
        for (setting, one, other), names in sorted(differ.items()):
            words.append(f"{setting} {other} in new and {one} in old for {folded(names)}")
        return Difference("modules", f"step {number}: the modules' {'; '.join(words)}")

    def parts_of_settings(self, settings, side):
        found = {}
        for pair in self.pairs:
            parts = pair.old if len(pair.old) >= len(pair.new) else pair.new
            own = getattr(pair, side)
            names = own if len(own) == len(parts) else own * len(parts)
            found |= {part: settings.get(name) for part, name in zip(parts, names, strict=True)}
        return found

    def updates(self, number, runs):
        """Compare what the step added to each parameter; not where a gradient may be a rounding, with either sign."""
        parts = {name: self.parts(run, "new" if name == "new" else "old") for name, run in runs.items()}
        whole = size_of(parts["old"].values())
        found, still, still_in_old = [], [], []
        for name, old in parts["old"].items():
            new = parts["new"][name]
            if old is None and new is None:
                continue
            like = old if new is None else new
            shown = [part[name] for part in parts.values()]
            shown = [torch.zeros_like(like) if v is None else v for v in shown]
            if name in self.clear:
                known = self.clear[name] | ~self.nonzero[name]
                shown = [value[known] for value in shown]
            least = self.sum_rounding * whole + self.last_place * self.sizes.get(name, 0.0)
            item = self.compare(name, shown, self.sum_rounding, least)
            found.append(item)
            if not item.passed and item.factor == 0:
                still.append(name)
            elif not item.passed and not shown[0].any():
                still_in_old.append(name)
        if found:
            self.note("updates", found)
        failed = [item for item in found if not item.passed]
        if not failed:
            return None
        text = f"step {number}: the gradients agree, but {len(failed)} of {len(found)} updates differ"
        small = False
        if still:
            text = f"step {number}: new never updates {len(still)} of {len(found)} parameters: {folded(still)}"
        elif len(still_in_old) == len(failed):  # else clipped weights, say, would be told by those without a gradient
            text = (
                f"step {number}: old never updates {len(still_in_old)} of {len(found)} parameters that new updates: "
                f"{folded(still_in_old)}"
            )
        elif factor := common_factor(failed, found):
            text += f", all by one factor, {factor:.4g}"
        else:
            text += f": {folded([item.name for item in failed])}"
            small = are_small(failed)
        return Difference("updates", text, failed[0].name.rpartition(".")[0], small=small)

    def buffers(self, number, runs):
        """Compare buffers that a step changes, such as a batch norm's running mean; a loss may never show them."""
        still = {side: set(runs[side]["still"]) for side in ("old", "new")}
        compared = {}
        for name, value in runs["old"]["buffers"].items():
            other = self.buffer_in_new(name)
            if name in still["old"] and other in still["new"]:
                continue
            values = [run["buffers"].get(other if side == "new" else name) for side, run in runs.items()]
            if any(item is None or item.shape != value.shape for item in values):
                continue  # new may keep it in another way
            finite = value.isfinite()  # the infinities of a mask have no size; outputs show them
            compared[name] = [item[finite].float() for item in values]
        least = self.sum_rounding * size_of([values[0] for values in compared.values()])  # a mean may be about 0
        found = [self.compare(name, values, self.sum_rounding, least) for name, values in compared.items()]
        if found:
            self.note("buffers", found)
        failed = [item.name for item in found if not item.passed]
        if not failed:
            return None
        text = f"step {number}: the updates agree, but buffers differ: {folded(failed)}"
        frozen = [name for name in failed if self.buffer_in_new(name) in still["new"]]
        if frozen:
            text = f"step {number}: new never updates {folded(frozen)}, and old does"
        return Difference("buffers", text, failed[0].rpartition(".")[0])

    def buffer_in_new(self, name):
        """Return the name that a buffer of old's has in new, if the modules inside a known one have equal names."""
        known = name.rpartition(".")[0]
        while known not in self.modules:
            known = known.rpartition(".")[0]
        return f"{self.modules[known]}.{name[len(known) :].lstrip('.')}".lstrip(".")

    # ------------------------------------------------------------ a replay
    def replay(self, runs):
        """Compare outputs and gradients of one call on old's data; return a Difference or None."""
        old, new = ([list(value.shape) for value in runs[name]["outputs"]] for name in ("old", "new"))
        places = places_in_common(old, new)
        if not places:
            text = f"on old's data the models return {shapes_text(new)} in new and {shapes_text(old)} in old"
            return Difference("shapes", text)
        difference = self.call_outputs(runs, places)
        for one, other in places:
            gradients = {name: run["gradients"][other if name == "new" else one] for name, run in runs.items()}
            found = self.gradients(1, gradients)
            difference = difference.with_lacking(found) if difference else found
        return difference


def places_in_common(old, new):
    """Return the places in old and new of outputs with equal shapes, each used once."""
    left = list(enumerate(new))
    found = []
    for place, shape in enumerate(old):
        match = next((item for item in left if item[1] == shape), None)
        if match:
            left.remove(match)
            found.append((place, match[0]))
    return found


def shapes_text(shapes):
    return "; ".join(map(str, shapes))


def size_of(values):
    """Return the root mean square of all elements."""
    values = [value for value in values if value is not None]
    count = sum(value.numel() for value in values)
    return math.sqrt(sum(rms(value) ** 2 * value.numel() for value in values) / count) if count else 0.0


def without_infinities(values):
    """Return values with 0 for each infinity of the first that they share, such as a masked logit."""
    masked = values[0].isinf()
    if not masked.any():
        return values
    return [value.where(~masked, torch.where(value == values[0], 0.0, math.inf)) for value in values]


def are_small(failed):
    return max(item.error for item in failed) <= SMALL


def common_factor(failed, found):
    """Return the factor between new and old if it is one for all tensors, and explains how far they are apart."""
    factors = [item.factor for item in found if 0 < item.factor < math.inf]
    if any(item.error > 1.1 * abs(item.factor - 1) for item in failed):
        return None
    if len(failed) < len(found) or len(factors) < 2 or max(factors) > 1.01 * min(factors):
        return None
    return factors[0]


def setting_text(value):
    if isinstance(value, list):
        return ", ".join(map(setting_text, value))
    return f"{value:.6g}"


def is_close(one, other):
    """Tell whether two settings are equal but for a rounding."""
    ones, others = (value if isinstance(value, list) else [value] for value in (one, other))
    return len(ones) == len(others) and all(math.isclose(a, b, rel_tol=1e-6) for a, b in zip(ones, others, strict=True))


def folded(names):
    """Shorten a list of names."""
    return check_training.folded(names, 3)
