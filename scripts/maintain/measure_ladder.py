"""Measure the ladder, the ways to run Hugging Face's model, or output heads for several vocabularies.

    python scripts/maintain/measure_ladder.py --peer-variants --presets medium,small --graph on --results PEERS
    python scripts/maintain/measure_ladder.py --tuned PEERS/peers.json --presets medium --graph on --results FOLDER
    python scripts/maintain/measure_ladder.py --vocabularies 1000,32000 --tuned PEERS/peers.json --presets medium \\
        --graph on --results FOLDER
    python scripts/maintain/measure_ladder.py --results FOLDER --append --time-limit 500    # what is missing

Each rung in maintain/rungs.py is one idea away from the rung that it builds on. A process for each rung stays warm, and
they take turns, in rounds. FOLDER/ladder.json keeps every step. --peer-variants times each way to run Hugging Face's
model, and writes FOLDER/peers.json. Give that file to --tuned: the strongest stack of libraries then runs with the
options of the fastest way in its precision. --vocabularies measures the rows of rungs.VOCABULARY, with whole logits or
in chunks, for each number of entries, and writes FOLDER/vocabulary.json. Options that aren't listed here go to all
scripts.

Exit status: 0; 1 if nothing was measured or --time-limit left some out; 2 for a bad option; 130 if interrupted.
"""

import functools
import itertools
import pathlib
import shlex
import sys
import time

if __name__ == "__main__":
    sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from common.command_line import (
    PRESETS,
    Failure,
    Parser,
    listed,
    numbers,
    on_cpu,
    positive,
    progress,
    refuse_protected,
    run_tool,
)
from common.machine.description import SAME_RUN, describe, folder_in, hash_of
from common.measuring.runs import TimeLimit
from common.ratios import counted
from common.versions import load_version
from maintain import rounds, rungs

PROGRAM = "measure_ladder.py"


def build_parser():
    parser = Parser(PROGRAM, __doc__, with_json=False)
    add = parser.add_argument
    add("--peer-variants", action="store_true", help="measure ways to run Hugging Face's model, not the ladder")
    add("--vocabularies", type=numbers, metavar="V,V", help="measure output heads with this many entries instead")
    add("--presets", type=listed(PRESETS), help="tiny, small, medium (small; tiny on a CPU)")
    add("--graph", type=listed(["on", "off"]), default=["on", "off"], help="on, off (both)")
    slow = rungs.SLOW_PEER.name
    add("--rungs", type=listed(), help=f"rungs to measure, by name (all but {slow}, which takes minutes to compile)")
    add("--tuned", type=pathlib.Path, metavar="FILE", help="peers.json that holds the options of tuned rungs")
    add("--starts", type=positive, help="starts of every process (3; 1 for --peer-variants)")
    add("--rounds", type=positive, default=2, help="rounds after each start (%(default)s)")
    add("--num-steps", type=positive, default=10, help="steps of a process per turn (%(default)s)")
    add("--again", metavar="RUNG", help="rung that is timed against itself (the noisiest one)")
    add("--time-limit", type=positive, help="end after this many seconds; --append does the rest")
    add("--results", type=pathlib.Path, metavar="FOLDER", required=True)
    add("--append", action="store_true", help="keep what FOLDER holds and run what it lacks")
    return parser


def parse_arguments(argv):
    """Return the checked arguments; rungs holds the Rungs to measure, options those of the training scripts."""
    parser = build_parser()
    arguments, rest = parser.parse_known_args(argv)
    arguments.options = shlex.join(rest)
    arguments.presets = arguments.presets or ["tiny" if on_cpu(rest) else "small"]
    arguments.starts = arguments.starts or (1 if arguments.peer_variants else 3)
    if arguments.peer_variants and arguments.vocabularies:
        parser.error("--peer-variants and --vocabularies measure different rows: give one of them")
    known_rungs = rungs.by_name(rows_of(arguments))
    for name in [*(arguments.rungs or []), *([arguments.again] if arguments.again else [])]:
        if name not in known_rungs:
            parser.error(f"--rungs, --again: {name} isn't one of {', '.join(known_rungs)}")
    if not arguments.rungs:
        arguments.rungs = default_rungs(known_rungs, arguments.tuned)
    arguments.rungs = [known_rungs[name] for name in known_rungs if name in arguments.rungs]
    if tuned := [rung.name for rung in arguments.rungs if rung.tuned and not arguments.tuned]:
        parser.error(f"{', '.join(tuned)}: add --tuned with the peers.json that --peer-variants wrote")
    if arguments.again and arguments.again not in rungs.by_name(arguments.rungs):
        parser.error(f"--again: {arguments.again} is not among the --rungs")
    file = results_file(arguments)
    if file.exists() and not arguments.append:
        parser.error(f"{file} exists already: add --append, or choose another --results folder")
    if named := folder_in(rest):
        parser.error(named)
    load_version(1).parse_options(rest)  # refuses an option that it does not know
    return arguments


def default_rungs(known_rungs, tuned):
    """Return the names of all rungs, without the slowest compiler and without those whose options nobody tuned."""
    found = [name for name, rung in known_rungs.items() if rung != rungs.SLOW_PEER and (tuned or not rung.tuned)]
    if left := [name for name, rung in known_rungs.items() if rung.tuned and not tuned]:
        progress(f"leaving out {', '.join(left)}: give --tuned to measure them")
    return found


def rows_of(arguments):
    """Return the Rungs that may be measured."""
    if arguments.peer_variants:
        return [*rungs.PEERS, rungs.SLOW_PEER]
    return rungs.VOCABULARY if arguments.vocabularies else rungs.LADDER


def results_file(arguments):
    if arguments.peer_variants:
        return arguments.results / "peers.json"
    return arguments.results / ("vocabulary.json" if arguments.vocabularies else "ladder.json")


def options_of_columns(arguments):
    """Return the options of the training scripts, a text for each column of a preset."""
    if not arguments.vocabularies:
        return [arguments.options]
    return [f"{arguments.options} {rungs.VOCABULARY_OPTION} {V}".strip() for V in arguments.vocabularies]


def choose_options(rung, arguments, preset):
    """Return a rung as it runs at a preset, and what was tried to find its options; nothing unless it is tuned."""
    if not rung.tuned:
        return rung, {}
    try:
        tuned, tuning = rungs.tuned(rung, rungs.read_columns(arguments.tuned), preset, arguments.options)
    except LookupError:
        words = f"--peer-variants --presets {preset} {arguments.options}".rstrip()
        told = f"{arguments.tuned} has no {rung.precision} variant for {rung.name}: measure with {words}"
        raise Failure(2, told) from None
    return tuned, {"tuning": tuning}


def begin_column(arguments, preset, graph, options, record, columns):
    """Return the column to go on with: of this machine, commit, text and choice of rungs; else a new one."""
    names = [rung.name for rung in arguments.rungs]
    way = "graph" if graph else "eager"
    again = arguments.again or next((rung.name for rung in arguments.rungs if rung.noisiest == way), names[-1])
    wanted = {"preset": preset, "graph": graph, "options": options, "again": again}
    chosen = []
    tuning = {}
    for rung in arguments.rungs:
        tuned, tuning[rung.name] = choose_options(rung, arguments, preset)
        chosen.append(tuned.recorded() | {"script_sha256": hash_of(rungs.script_of(rung))})
    for content in (column.content for column in columns):
        here = all(content["record"].get(key) == record[key] for key in ("host", "commit", *SAME_RUN))
        asked = all(content[key] == value for key, value in wanted.items())
        texts = [{key: rung[key] for key in chosen[0]} for rung in content["rungs"]]
        if here and asked and texts == chosen:
            return rungs.Column(content)
    told = [rung | {"status": "not run", "reason": None} | tuning[rung["name"]] for rung in chosen]
    columns.append(rungs.Column(wanted | {"record": record, "rungs": told, "rounds": []}))
    return columns[-1]


def pairs_of(column, with_again):
    """Return the names that are compared with each other: rung and base, rung and peer, the A/A pair."""
    pairs = [(base, name) for name, base in column.over_bases()]
    pairs += column.over_peers()
    again = column.content["again"]
    if with_again:
        pairs.append((again, again + rounds.AGAIN))
    compared = set().union(*pairs)
    return [*pairs, *((name,) for name in column.rungs if name not in compared)]


def measure_column(column, arguments, limit, save):
    """Measure the starts that the column lacks; return how many are left."""
    content = column.content
    way = "--graph" if content["graph"] else "--no-graph"
    shared = ["--preset", content["preset"], way, *shlex.split(content["options"])]
    programs = {rung.name: (rung.version, [*shared, *rung.options]) for rung in column.rungs.values()}
    work = rounds.Rounds(programs, column.told, column.rounds, content["graph"], arguments.num_steps)
    pairs = pairs_of(column, with_again=not arguments.peer_variants)
    begin = 1 + max((found["start"] for found in column.rounds), default=-1)
    for start in range(begin, arguments.starts):
        if not limit.room():
            return arguments.starts - start
        turns = range(start * arguments.rounds, (start + 1) * arguments.rounds)
        progress(f"{column.title}: start {start + 1} of {arguments.starts}, {len(set().union(*pairs))} processes")
        began = time.monotonic()
        try:
            limit.timed(functools.partial(work.measure, pairs, start, turns))
        finally:
            content["seconds"] = round(content.get("seconds", 0) + time.monotonic() - began, 1)
            save()
    return 0


def measure(arguments, argv):
    """Measure the ladder's columns and print them; return the exit status."""
    record = describe([PROGRAM, *argv])
    file = results_file(arguments)
    refuse_protected(file)
    columns = rungs.read_columns(file) if file.exists() else []
    arguments.results.mkdir(parents=True, exist_ok=True)
    limit = TimeLimit(arguments.time_limit)
    status = 0
    left = 0
    measured = []
    try:
        wanted = itertools.product(arguments.presets, arguments.graph, options_of_columns(arguments))
        for preset, choice, options in wanted:
            column = begin_column(arguments, preset, choice == "on", options, record, columns)
            measured.append(column)
            left += measure_column(column, arguments, limit, lambda: rungs.write_columns(columns, file))
    except KeyboardInterrupt:
        progress("interrupted: the rounds that were measured are kept")
        status = 130
    for column in measured:
        print("\n".join(["", *rungs.lines_of(column)]))
    print(f"\n{file}")
    if left:
        print(f"not measured: {counted(left, 'start')}; repeat the command with --append")
    return status or int(bool(left) or not any(column.rounds for column in measured))


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    arguments = parse_arguments(argv)
    return run_tool(PROGRAM, lambda: measure(arguments, argv))


if __name__ == "__main__":
    sys.exit(main())
