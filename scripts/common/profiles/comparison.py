"""Compare the work of profiles per step: kernels, or operators, and their time by group. Standard library only."""

from typing import NamedTuple

from common.profiles import INTERPRETED, steps_needed, sums
from common.step_parts import GROUPS
from common.tables import rounded


class Comparison(NamedTuple):
    """Hold the work of several profiles per step, for whoever prints it.

    groups: {name of the profile: {group: its calls and ms per step}}, as groups_per_step returns them.
    """

    unit: str  # of calls: "kernels" or "operators"
    groups: dict
    remarks: list

    def rows(self):
        """Return a row per group in either of the first two profiles: calls, % fewer, milliseconds."""
        first, second = list(self.groups.values())[:2]
        nothing = {"calls": 0.0, "ms": 0.0}
        cells = []
        for group in (group for group in (*GROUPS, "all") if group in first | second):
            one = first.get(group, nothing)
            other = second.get(group, nothing)
            fewer = f"{100 - 100 * other['calls'] / one['calls']:.1f} %" if one["calls"] else "-"
            calls = [f"{part['calls']:,.1f}" for part in (one, other)]
            cells.append([group, *calls, fewer, rounded(one["ms"]), rounded(other["ms"])])
        return cells

    @property
    def sentence(self):
        """Return how many calls per step became how many."""
        before, after = [f"{groups['all']['calls']:,.0f}" for groups in self.groups.values()][:2]
        return f"{before} {self.unit} per step became {after}"


def compared(profiles, steps_option="--steps"):
    """Return the Comparison of profiles, {name: Profile}. steps_option: the option that says a profile's steps."""
    groups = {name: groups_per_step(one, steps_option.format(name=name)) for name, one in profiles.items()}
    remarks = list(dict.fromkeys(remark for one in profiles.values() for remark in one.remarks))
    if any(one.interpreted for one in profiles.values()):
        remarks.append(INTERPRETED)
    return Comparison(next(iter(profiles.values())).unit, groups, remarks)


def groups_per_step(profile, option="--steps"):
    """Return {group: its calls and ms per step} of each group that occurs, in the order of GROUPS, and of "all"."""
    steps = steps_needed(profile, option)
    rows = sums(profile.step_calls, "group")
    found = {}
    for group in GROUPS:
        if group in rows:
            found[group] = {"calls": rows[group]["calls"] / steps, "ms": rows[group]["total_us"] / 1e3 / steps}
    calls = sum(row["calls"] for row in found.values())
    ms = sum(row["ms"] for row in found.values())
    return found | {"all": {"calls": calls, "ms": ms}}
