"""Measure the ladder for benchmark_suite.py --ladder and --peer-variants: rungs in rounds of warm processes."""

import functools
import shlex

from common.command_line import progress
from common.machine import describe
from common.runs import TimeLimit
from common.versions import load_version
from maintain import rounds, rungs
from maintain.provenance import SAME_RUN, hash_of

AUTOTUNE_S = 240  # seconds without which the slowest compiler is not begun
NOISIEST = {False: "c", True: "g"}  # eager, in a graph


def check(parser, arguments, rest):
    """Return the arguments, checked and completed for the ladder: rungs is what it measures."""
    if arguments.ladder and arguments.peer_variants:
        parser.error("--ladder and --peer-variants measure different things: give one of them")
    known_rungs = rungs.by_name(rungs.LADDER if arguments.ladder else [*rungs.PEERS, rungs.SLOW_PEER])
    for name in [*(arguments.rungs or []), *([arguments.again] if arguments.again else [])]:
        if name not in known_rungs:
            parser.error(f"--rungs, --again: {name} is none of {', '.join(known_rungs)}")
    arguments.rungs = [known_rungs[name] for name in known_rungs if name in (arguments.rungs or known_rungs)]
    if arguments.again and arguments.again not in rungs.by_name(arguments.rungs):
        parser.error(f"--again: {arguments.again} is not among the --rungs")
    arguments.starts = arguments.starts or (3 if arguments.ladder else 1)
    arguments.graph = arguments.graph or ["on", "off"]
    file = arguments.results / results_file(arguments)
    if file.exists() and not arguments.append:
        parser.error(f"{file} exists already: add --append, or choose another --results folder")
    load_version(1).parse_options(rest)  # refuses an option that it does not know
    return arguments


def results_file(arguments):
    return "ladder.json" if arguments.ladder else "peers.json"


def begin_column(arguments, preset, graph, record, columns):
    """Return the column to go on with: of this machine, commit, text and choice of rungs; else a new one."""
    names = [rung.name for rung in arguments.rungs]
    again = arguments.again or (NOISIEST[graph] if NOISIEST[graph] in names else names[-1])
    wanted = {"preset": preset, "graph": graph, "options": arguments.options, "again": again}
    chosen = [rung._asdict() | {"script_sha256": hash_of(rungs.script_of(rung))} for rung in arguments.rungs]
    for content in (column.content for column in columns):
        here = all(content["record"].get(key) == record[key] for key in ("host", "commit", *SAME_RUN))
        asked = all(content[key] == value for key, value in wanted.items())
        texts = [{key: rung[key] for key in chosen[0]} for rung in content["rungs"]]
        if here and asked and texts == chosen:
            return rungs.Column(content)
    told = [rung | {"status": "not run", "reason": None} for rung in chosen]
    columns.append(rungs.Column(wanted | {"record": record, "rungs": told, "rounds": []}))
    return columns[-1]


def related(names, column):
    """Return these names and those that they are compared with, in the order of the rungs, with the A/A pair."""
    plain = {name.removesuffix(rounds.AGAIN) for name in names}
    pairs = [(rung.name, rung.base) for rung in column.rungs.values() if rung.base]
    wanted = plain.union(*(pair for pair in [*pairs, *rungs.LEADS] if plain & set(pair)))
    return with_again([name for name in column.rungs if name in wanted], column)


def with_again(names, column):
    again = column.content["again"]
    return rounds.with_pair(names, again) if again in names else names


def measure_column(column, arguments, limit, save):
    """Measure the starts that the column lacks; return how many are left."""
    content = column.content
    way = "--graph" if content["graph"] else "--no-graph"
    shared = ["--preset", content["preset"], way, *shlex.split(content["options"])]
    programs = {rung.name: (rung.version, [*shared, *rung.options]) for rung in column.rungs.values()}
    work = rounds.Rounds(programs, column.told, column.rounds, content["graph"], arguments.num_steps or 10)
    names = [name for name in column.rungs if name != rungs.SLOW_PEER.name]
    groups = [with_again(names, column) if arguments.ladder else names]
    begin = 1 + max((found["start"] for found in column.rounds), default=-1)
    for start in range(begin, arguments.starts):
        if not limit.room():
            return arguments.starts - start
        turns = range(start * arguments.rounds, (start + 1) * arguments.rounds)
        progress(f"{column.title}: start {start + 1} of {arguments.starts}, {sum(map(len, groups))} processes")
        try:
            companions = functools.partial(related, column=column)
            groups = limit.timed(functools.partial(work.measure, groups, start, turns, companions))
        finally:
            save()
    slow = column.rungs.get(rungs.SLOW_PEER.name)
    if slow and content["preset"] == "medium" and column.step_ms(slow.name) is None:
        measure_slowly(slow.name, work, arguments, limit)
        save()
    return 0


def measure_slowly(name, work, arguments, limit):
    """Measure the peer whose compiler takes minutes, alone and last."""
    seconds = limit.bound(rounds.WARM_S)
    if seconds < AUTOTUNE_S:
        work.note(name, reason=f"no time was left: it needs {AUTOTUNE_S} s")
        return
    progress(f"{name}: at most {seconds:.0f} s")
    work.start([name], 0, range(arguments.rounds), seconds)


def measure(arguments, argv):
    """Measure the ladder's columns and print them; return the exit status."""
    record = describe(["benchmark_suite.py", *argv])
    file = arguments.results / results_file(arguments)
    columns = rungs.read_columns(file) if file.exists() else []
    arguments.results.mkdir(parents=True, exist_ok=True)
    limit, left, status = TimeLimit(arguments.time_limit), 0, 0
    measured = []
    try:
        for preset in arguments.presets:
            for choice in arguments.graph:
                column = begin_column(arguments, preset, choice == "on", record, columns)
                measured.append(column)
                left += measure_column(column, arguments, limit, lambda: rungs.write_columns(columns, file))
    except KeyboardInterrupt:
        progress("interrupted: the rounds that were measured are kept")
        status = 130
    for column in measured:
        print("\n".join(["", *rungs.lines_of(column)]))
    print(f"\n{file}")
    if left:
        print(f"{left} starts are left: repeat the command with --append")
    return status or int(bool(left) or not any(column.rounds for column in measured))
