"""Repeat runs that are compared in rounds: each runs once in every round, so that drift hits all of them alike."""

import functools

from common.command_line import Failure, progress


def run_in_rounds(work, names, rounds, limit):
    """Call work(name) for every name, round by round; return {name: results} and {name: reason why it failed}.

    limit: a TimeLimit. It leaves out names of the first round, and whole further rounds where it has no room for them.
    """
    results, reasons = {name: [] for name in names}, {}
    for i in range(rounds):
        going = [name for name in names if name not in reasons]
        if i and not limit.room(len(going)):
            progress(f"no time is left for round {i + 1} of {rounds}")
            break
        for place, name in enumerate(going):
            if not i and not limit.room():
                reasons[name] = "not run: no time was left"
                continue
            left = limit.left((rounds - i) * len(going) - place)
            progress(f"round {i + 1} of {rounds}, {name}: training, {left} ...")
            try:
                results[name].append(limit.timed(functools.partial(work, name)))
            except Failure as error:
                if error.status == 2:
                    raise
                reasons[name] = str(error)
    return results, reasons
