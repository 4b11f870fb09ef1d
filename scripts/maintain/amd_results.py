"""Run version 3 on every AMD target in the interpreter, in several processes, and write its pages of results.

    python scripts/maintain/amd_results.py runs.jsonl --processes 15              # all: 54 minutes of one core
    python scripts/maintain/amd_results.py runs.jsonl --only gfx942 D=64 bfloat16 # those whose name has all these words
    python scripts/maintain/amd_results.py runs.jsonl --write                     # write the pages

The file gets a line of JSON for each run, and a first one with the commit and the versions. A run that the file holds
is not repeated: start the same command again after it was stopped. TINY_LLAMA_COMMIT names the commit if the files are
a copy without Git's history.

Exit status: 0 if all is right, 1 if something is wrong or left to do, 2 for bad input.
"""

import concurrent.futures
import contextlib
import itertools
import json
import multiprocessing
import os
import pathlib
import sys
import time
from collections import Counter
from concurrent.futures.process import BrokenProcessPool

ROOT = pathlib.Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "tests"), str(ROOT / "tests" / "amd")]
    os.environ.update(TRITON_INTERPRET="0", OMP_NUM_THREADS="1")  # a process that is started imports this file first

import amd_cases
import mutants

from common.command_line import Failure, Parser, positive, progress
from common.machine.description import describe
from common.versions import load_version
from inspect_kernels import prepare_worker
from maintain import execute_training

PAGE = ROOT / "scripts" / "amd" / "RESULTS.md"
TABLES_PAGE = ROOT / "scripts" / "amd" / "RESULTS_TABLES.md"
TILES = 3  # at most, that attention may choose from
# All combinations of these run, for each size of a head.
EACH = {"target": amd_cases.TARGETS, "dtype": amd_cases.DTYPES, "tile": tuple(range(TILES)), "D": (16, 32, 64, 128)}
# These take turns. Triton compiles another kernel for a length that 16 divides.
TURNS = {
    "T": (37, 64, 75, 150),
    "heads": ((1, 2, 2), (1, 2, 1), (2, 2, 1), (1, 4, 2), (1, 3, 1)),  # B, H, K
    "rotated": (True, False),
    "order": (1, -1),
}
OF_TILES = ("attention", "attention, two sequences", "attention, D=16", "attention, D=32")  # run with each tile anyway
OPERATIONS = [*(name for name in amd_cases.CASES if name not in OF_TILES), *amd_cases.OPTIMIZERS]
MUTANTS = 30  # of each kernel

# ---------------------------------------------------------------- what is run


def with_turns(rows, turns):
    """Add values to rows {factor: value}: of each factor the one that has met the row's other values least often."""
    met = Counter()
    for row in rows:
        for factor, values in turns.items():

            def often(value, row=row, factor=factor):
                return sum(met[other, factor, value] for other in row.items())

            value = min(values, key=often)
            met.update((other, factor, value) for other in row.items())
            row[factor] = value
    return rows


def all_runs():
    """Return every run, long ones first: {"work": "training", "mutants" or "case", ...}."""
    labels = {"float32": "fp32", "bfloat16": "bf16"}
    runs = [
        {"work": "training", "target": target, "dtype": label}
        for label, target in itertools.product(labels.values(), amd_cases.TARGETS)
    ]
    runs += [{"work": "mutants", "target": "gfx942", "dtype": "bfloat16", "kernel": name} for name in mutants.CASES]
    rows = [dict(zip(EACH, values, strict=True)) for values in itertools.product(*EACH.values())]
    attention = []
    for row in with_turns(rows, TURNS):
        B, H, K = row.pop("heads")
        sizes = {"B": B, "T": row.pop("T"), "H": H, "K": K, "D": row.pop("D"), "rotated": row.pop("rotated")}
        attention.append({"work": "case", "case": sizes, **row})
    attention.sort(key=lambda run: -run["case"]["B"] * run["case"]["H"] * run["case"]["T"] * run["case"]["D"])
    others = [
        {"work": "case", "case": name, "target": target, "dtype": dtype, "tile": 0}
        for target, name, dtype in itertools.product(amd_cases.TARGETS, OPERATIONS, amd_cases.DTYPES)
    ]
    others += [
        {"work": "case", "case": name, "target": target, "dtype": "bfloat16", "tile": 0}
        for target, name in itertools.product(amd_cases.FP8_TARGETS, amd_cases.FP8_CASES)
    ]
    return runs + attention + with_turns(others, {"order": TURNS["order"]})


def name_of(run):
    """Return a run in words."""
    if run["work"] != "case":
        return f"{run['target']} {run['dtype']} {run['work']} {run.get('kernel', '')}".strip()
    case = run["case"]
    if isinstance(case, dict):
        case = "attention " + " ".join(f"{name}={value}" for name, value in case.items())
    return f"{run['target']} {run['dtype']} {case}, tile {run['tile']}, order {run['order']}"


def perform(run):
    """Return what a run found, in a process in which Triton compiles."""
    start = time.perf_counter()
    if run["work"] == "training":
        found = execute_training.measure(run["target"], run["dtype"], 2)
    elif run["work"] == "mutants":
        found = mutants.measure(run["target"], run["kernel"], run["dtype"], MUTANTS)
    else:
        found = amd_cases.run(run["target"], run["case"], run["dtype"], run["tile"], run["order"])
    return found | {"seconds": time.perf_counter() - start}


def problem(run, found):
    """Return what is wrong with a result, "" if nothing is."""
    if run["work"] == "training":
        return "" if found["right"] else "losses or weights are too far from float64"
    if run["work"] == "mutants":
        return ""
    known = amd_cases.KNOWN.get((run["target"], str(run["case"]), run["dtype"]))
    if known:
        return "" if known in found["fault"] else f"should say: {known}"
    return found["fault"]


# ---------------------------------------------------------------- the page

TEXT = """# Version 3's kernels, executed as AMD's instructions

We ran these by hand on {date} on a CPU, with Triton {triton}, PyTorch {torch}, NumPy {numpy} and commit {commit}.
Nobody has run the kernels on an AMD GPU.

    python scripts/maintain/amd_results.py runs.jsonl --processes 15    # {runs} runs, {minutes:.0f} minutes of one core
    python scripts/maintain/amd_results.py runs.jsonl --write           # this page

All runs but one are right: the error of each output and gradient is at most twice that of plain PyTorch in the same
precision, plus 1e-6. The wrong one is attention in float16 with values around 1e-3 on gfx90a, whose matrix units flush
denormal numbers to zero. [Every operation and every tile](RESULTS_TABLES.md) has a row of its own.

## Two training steps
The table compares two steps of version 3 with two of version 1 in the same precision: the losses, and the error of all
weights afterwards. Errors are relative to version 1 in float64, whose losses are {losses}.

    python scripts/maintain/execute_training.py

{training}

## Single instructions deleted or changed
We deleted or changed {mutants} instructions of each kernel, one at a time, on gfx942 in bfloat16. *Faults* are changes
that stopped the interpreter with an error, *wrong results* those that made the error larger than we allow. The others
weren't noticed. We haven't looked at each of these: some can't change anything (a check for NaN, a scale that isn't
needed, a register that holds the same value), others change too little. We left out waits, which the interpreter
doesn't model.

{changed}
"""
TABLES_TEXT = """\
# Every operation and every tile, executed as AMD's instructions

These are the tables behind [RESULTS.md](RESULTS.md), which says with which versions we ran them.

## Operations
Errors are relative to a float64 computation. An output or gradient may have twice the error of plain PyTorch in the
same precision, plus 1e-6. A cell shows the error of the output or gradient that came closest to its limit; *allowed*
is that limit on gfx942. Half of the cases run a workgroup's waves in reverse order. In fp8 we execute the
conversions, and PyTorch multiplies in float32.

{operations}

One case is wrong, because gfx90a's matrix units flush denormal float16 numbers to zero. That cell shows another tensor
than the rest of its row, one with a smaller limit.

## Attention with each tile
These {attention} runs cover each tile that version 3 may choose, on each target, in each precision and for each head
size D. Other factors vary between runs: the number of tokens ({lengths}), sequences x query/key heads
({heads}), RoPE, and the order of waves. For any two factors, every pair of their values
occurs in at least {meetings} runs. A cell shows the largest error in percent of what we allow; gfx9 stands for gfx90a,
gfx942 and gfx950, and gfx1 for gfx1100 and gfx1201.

{tiles}
"""
OUTPUTS = {"o": ["o"], "dq": ["dq"], "dkdv": ["dk", "dv"]}  # of the kernel that computes it


def table(columns, rows):
    head, *lines = (f"| {' | '.join(map(str, line))} |" for line in [columns, *rows])
    return "\n".join([head, "|---" * len(columns) + "|", *lines])


def nearest(errors):
    """Return the (error, bound) of the tensor that is nearest to its bound."""
    return max(errors, key=lambda pair: pair[0] / pair[1])


def operations_table(cases):
    """Return the table of operations; cases: {(case, dtype, target): what was found}."""
    rows = []
    labels = [*itertools.product(OPERATIONS, amd_cases.DTYPES), *((name, "bfloat16") for name in amd_cases.FP8_CASES)]
    for name, dtype in labels:
        cells = []
        for target in amd_cases.TARGETS:
            found = cases.get((name, dtype, target))
            if found is None:  # it has no fp8
                cells.append("-")
                continue
            error, bound = nearest(found["errors"].values())
            cells.append(f"{error:.1e} (wrong)" if found["fault"] else f"{error:.1e}")
            if target == "gfx942":
                allowed = f"{bound:.1e}"
        rows.append([name, dtype, allowed, *cells])
    return table(["case", "precision", "allowed", *amd_cases.TARGETS], rows)


def tiles_table(lines):
    """Return the table of attention's tiles: a row for each kernel, tile and precision."""
    import torch

    def place(computes, family, dtype, tile):
        return list(OUTPUTS).index(computes), family == "gfx1", amd_cases.DTYPES.index(dtype), tile

    script = load_version(3)
    worst = {}
    for line in lines:
        run = line["run"]
        for computes, outputs in OUTPUTS.items():
            D = run["case"]["D"]
            candidates = script.attention_tiles(computes, run["target"], D, getattr(torch, run["dtype"]), 0, "ieee")
            tile = candidates[run["tile"] % len(candidates)]
            row = (computes, run["target"][:4], run["dtype"], tile)
            error, bound = nearest([pair for name, pair in line["found"]["errors"].items() if name in outputs])
            cells = worst.setdefault(row, {})
            cells[D] = max(cells.get(D, 0), error / bound)
    rows = []
    for (computes, family, dtype, tile), cells in sorted(worst.items(), key=lambda item: place(*item[0])):
        size = f"{tile.BLOCK_Q}x{tile.BLOCK_K}, {tile.num_warps} waves"
        rows.append([computes, family, dtype, size, *(f"{100 * cells[D]:.0f}" for D in EACH["D"])])
    return table(["computes", "GPUs", "precision", "queries x keys", *(f"D={D}" for D in EACH["D"])], rows)


def fewest_meetings():
    """Return in how many runs of attention two values of two factors meet at least."""
    rows = [dict(zip(EACH, values, strict=True)) for values in itertools.product(*EACH.values())]
    factors = EACH | TURNS
    met = Counter(pair for row in with_turns(rows, TURNS) for pair in itertools.combinations(sorted(row.items()), 2))
    wanted = [
        tuple(sorted(((a, x), (b, y))))
        for a, b in itertools.combinations(factors, 2)
        for x, y in itertools.product(factors[a], factors[b])
    ]
    return min(met[pair] for pair in wanted)


def pages(made, lines):
    """Return the texts of RESULTS.md and RESULTS_TABLES.md.

    made: the first line of the file of runs, lines: the others.
    """
    by_work = {}
    for line in lines:
        by_work.setdefault(line["run"]["work"], []).append(line)
    of_tiles = [line for line in by_work["case"] if isinstance(line["run"]["case"], dict)]
    cases = {
        (line["run"]["case"], line["run"]["dtype"], line["run"]["target"]): line["found"]
        for line in by_work["case"]
        if line not in of_tiles
    }
    training = []
    for line in sorted(by_work["training"], key=lambda line: all_runs().index(line["run"])):
        found = line["found"]
        losses = [", ".join(f"{loss:.6f}" for loss in found[name]) for name in ("losses", "own_losses")]
        errors = [f"{found[name]:.1e}" for name in ("weights_error", "own_error")]
        training.append([line["run"]["target"], line["run"]["dtype"], *losses, *errors, f"{found['instructions']:,}"])
    columns = ["target", "precision", "losses", "version 1's", "weights", "version 1's weights", "instructions"]
    changed = {
        line["run"]["kernel"].removesuffix("_kernel"): [
            line["found"]["fault"],
            line["found"]["wrong"],
            len(line["found"]["not noticed"]),
        ]
        for line in by_work["mutants"]
    }
    kernels = [name.removesuffix("_kernel") for name in mutants.CASES]
    tables = TABLES_TEXT.format(
        operations=operations_table(cases),
        attention=len(of_tiles),
        lengths=", ".join(map(str, TURNS["T"])),
        heads=", ".join(f"{B} x {H}/{K}" for B, H, K in TURNS["heads"]),
        meetings=fewest_meetings(),
        tiles=tiles_table(of_tiles),
    )
    text = TEXT.format(
        date=made["date"][:10],
        commit=made["commit"][:10] + " with changes that are not committed" * made["modified"],
        **{name: made["packages"][name] for name in ("triton", "torch", "numpy")},
        runs=len(lines),
        minutes=sum(line["found"]["seconds"] for line in lines) / 60,
        losses=" and ".join(f"{loss:.6f}" for loss in by_work["training"][0]["found"]["exact_losses"]),
        training=table(columns, training),
        mutants=MUTANTS,
        changed=table(["kernel", "faults", "wrong results", "not noticed"], [[k, *changed[k]] for k in kernels]),
    )
    return text, tables


# ---------------------------------------------------------------- running it


def read(path):
    """Return the lines of a file of runs, without one that a killed process left unfinished."""
    text = path.read_text() if path.exists() else ""
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        path.write_text(whole)
    return [json.loads(line) for line in whole.splitlines()]


class Pools(contextlib.ExitStack):
    """Perform runs in processes that compile for one target each.

    Triton 3.6 aborts a process that compiled fp8 for gfx950 and then does so for gfx1201.
    """

    def __init__(self, processes):
        super().__init__()
        self.processes = processes
        self.of_target = {}

    def submit(self, run):
        """Return the run's future; a pool whose process was aborted is replaced."""
        target = run["target"]
        try:
            return self.of_target[target].submit(perform, run)
        except (KeyError, BrokenProcessPool):
            spawn = multiprocessing.get_context("spawn")
            pool = concurrent.futures.ProcessPoolExecutor(self.processes, spawn, prepare_worker)
            self.of_target[target] = self.enter_context(pool)
            return pool.submit(perform, run)


def perform_all(runs, options):
    """Perform runs and add each to the file; return how many are wrong, failed, or were not begun in time."""
    end = time.perf_counter() + 60 * (options.minutes or 1e9)
    waiting = iter(runs)
    begun = {}
    wrong = 0
    done = 0
    pools = Pools(options.processes)
    with pools, options.file.open("a") as file:
        while True:
            while len(begun) < options.processes and time.perf_counter() < end and (run := next(waiting, None)):
                begun[pools.submit(run)] = run
            if not begun:
                break
            for future in concurrent.futures.wait(begun, return_when="FIRST_COMPLETED").done:
                run = begun.pop(future)
                done += 1
                if error := future.exception():
                    said = repr(error)
                else:
                    found = future.result()
                    said = problem(run, found)
                    file.write(json.dumps({"run": run, "found": found}) + "\n")
                    file.flush()
                wrong += bool(said)
                progress(f"{done} of {len(runs)}: {name_of(run)}: {said or 'right'}")
    return wrong + len(runs) - done


def report(options):
    lines = read(options.file)
    here = describe(sys.argv)
    if not lines:
        lines = [here]
        options.file.write_text(json.dumps(here) + "\n")
    if any(lines[0][key] != here[key] for key in ("commit", "packages")) and not options.write:
        raise Failure(2, f"{options.file} is of another commit or other versions: name another file")
    have = [line["run"] for line in lines[1:]]
    chosen = [run for run in all_runs() if all(word in name_of(run) for word in options.only)]
    left = [run for run in chosen if run not in have]
    progress(f"{len(chosen)} runs, {len(chosen) - len(left)} of them in {options.file}")
    if options.write:
        if left:
            raise Failure(2, f"{options.file} lacks {len(left)} runs: make them first")
        for path, text in zip((PAGE, TABLES_PAGE), pages(lines[0], lines[1:]), strict=True):
            path.write_text(text)
        return 0
    count = perform_all(left, options)
    print(f"{len(chosen)} runs, {count} of them wrong, failed or left to do")
    return int(count > 0)


def main(argv=None):
    parser = Parser("amd_results.py", __doc__, with_json=False)
    add = parser.add_argument
    add("file", type=pathlib.Path, metavar="FILE", help="of the runs, one JSON per line")
    add("--processes", type=positive, default=1, metavar="N", help="(1)")
    add("--minutes", type=float, metavar="N", help="begin no run after so many (no limit)")
    add("--only", nargs="+", default=[], metavar="WORD", help="only runs with all of these in their name (all)")
    add("--write", action="store_true", help="run nothing, write the pages from the file")
    return parser.run(report, argv)


if __name__ == "__main__":
    sys.exit(main())
