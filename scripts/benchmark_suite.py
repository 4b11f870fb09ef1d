"""Measure the versions, and other libraries' training step, over a grid of sizes and precisions.

    python scripts/benchmark_suite.py --models v1,v1+nodet,v2+compile,v3,hf+compile --batch-sizes 4,8 --graph on,off
    python scripts/benchmark_suite.py --presets small,medium --precisions float32,tf32,bfloat16 --nproc 1,2
    python scripts/benchmark_suite.py --results runs/h200 --append --time-limit 500    # run again for the rest

A model is v1 to v4, or another library's if its packages are installed: hf (Hugging Face's Llama) or liger (the same
with Liger's kernels). Add +compile for torch.compile, +nodet for no determinism, +fsdp for FSDP2. With +packed, hf gets
packed projections, and 16-bit weights with float32 masters. A model such as hf+compile:bfloat16:fp8 runs in these
precisions only. fp8 exists for version 3 and Hugging Face (with torchao). Options that aren't listed here go to all
scripts.

Every case runs in a process of its own; with --nproc under torchrun, with the same batch per process. A repeat is a
round over all cases, so if the machine slows down, all cases slow down. FOLDER/suite.json is saved after every process.
A case that fails, or that this machine can't run, is reported and skipped. With --append you may continue with the same
scripts on another machine of the same kind; a round always stays on one machine.

Exit status: 0; 1 if a model failed in all cases that can run here, or --time-limit left some out; 2 for a bad option;
130 if interrupted.
"""

import concurrent.futures
import datetime
import itertools
import json
import os
import pathlib
import shlex
import subprocess
import sys
import threading

import torch

from common.command_line import (
    PRECISIONS,
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
from common.measuring.accuracy import errors_of
from common.measuring.runs import TimeLimit, last_words, run_process, train
from common.measuring.suite_results import (
    SCRIPT_OF,
    Case,
    configurations,
    notes_of,
    read_results,
    rows,
    step_of,
    table_of,
    write_results,
)
from common.tables import rounded, text_table
from common.versions import load_version, loss_and_gradients

PEERS = {"hf": ["--library", "transformers"], "liger": ["--library", "liger"]}
MODIFIERS = {"compile": ["--enable-torch-compile"], "nodet": ["--no-deterministic"], "fsdp": ["--parallel", "fsdp"]}
MODIFIERS["packed"] = ["--packed", "--master-weights", "--compile-optimizer"]
METRICS = ["throughput", "memory", "accuracy"]
# Options of the training scripts that would overrule what a row is called -> the option of the suite to use instead.
NAMED = {"--preset": "--presets", "--batch-size": "--batch-sizes", "--seq-len": "--seq-lengths"}
NAMED |= dict.fromkeys(["--use-amp", "--amp-dtype", "--tf32", "--fp8"], "--precisions")
CHECK_GRADIENTS = "--check-gradients"
STEPS = {"medium": 20}  # a step of the medium preset takes up to a quarter of a second
TIMEOUT = 600  # seconds that a process may take
# Without a GPU, where version 3's kernels run in Triton's interpreter, a model that takes seconds per step.
CPU_OPTIONS = "--hidden-dim 64 --num-layers 2 --num-heads 4 --vocab-size 256"


def add_options(parser):
    add = parser.add_argument_group("what to measure").add_argument
    add("--models", type=listed(), default=["v1", "v2", "v3", "v4"], help="(v1,v2,v3,v4)")
    add("--presets", type=listed(PRESETS), help="tiny, small, medium (small; on a CPU a toy)")
    add("--batch-sizes", type=numbers, help="sequences per step and process (the preset's)")
    add("--seq-lengths", "--seq-lens", type=numbers, help="tokens (the preset's)")
    add("--precisions", type=listed(PRECISIONS), default=["float32"], help=", ".join(PRECISIONS))
    add("--graph", type=listed(["on", "off"]), help="on, off (each model's default)")
    add("--nproc", type=numbers, default=[1], help="processes per case, one per GPU: 1,2,4 (1)")
    add("--metrics", type=listed(METRICS), default=METRICS, help=f"({','.join(METRICS)})")
    add = parser.add_argument_group("how").add_argument
    add("--repeats", type=positive, default=3, help="processes of each case (%(default)s)")
    add("--num-steps", type=positive, help="measured steps of a process (50; 20 for medium)")
    add("--time-limit", type=positive, help="end after this many seconds; --append does the rest")
    add("--compile-first", type=positive, metavar="N", help="fill the compilers' caches first, N cases at a time")
    add("--spread", action="store_true", help="measure each preset on a GPU of its own, at the same time")
    add("--results", type=pathlib.Path, metavar="FOLDER", help="(benchmark_results/DATE_TIME)")
    add("--append", action="store_true", help="keep what FOLDER holds and run what it lacks")


def parse_arguments(argv):
    """Return the checked arguments; options holds those of the training scripts, models {model: its precisions}."""
    parser = Parser("benchmark_suite.py", __doc__, with_json=False)
    add_options(parser)
    arguments, rest = parser.parse_known_args(argv)
    for word in rest:
        if instead := NAMED.get(word.split("=")[0]):
            parser.error(f"{word} would run a case other than the one that the tables name: use {instead}")
    if named := folder_in(rest):
        parser.error(named)
    arguments.options = shlex.join(rest)
    cpu = on_cpu(rest)
    if cpu and not (arguments.presets or rest):
        progress("Without a GPU, and without --presets, a toy model is measured.")
        arguments.options, arguments.num_steps = CPU_OPTIONS, arguments.num_steps or 5
        arguments.batch_sizes = arguments.batch_sizes or [2]
        arguments.seq_lengths = arguments.seq_lengths or [32]
    arguments.presets = arguments.presets or ["tiny" if cpu else "small"]
    arguments.results = arguments.results or pathlib.Path(f"benchmark_results/{datetime.datetime.now():%Y%m%d_%H%M%S}")
    if (arguments.results / "suite.json").exists() and not arguments.append:
        parser.error(f"{arguments.results} already has results: add --append, or choose another --results folder")
    if arguments.spread and (max(arguments.nproc) > 1 or len(arguments.presets) > len(visible_gpus())):
        parser.error(f"--spread needs a GPU for each of {len(arguments.presets)} presets, and --nproc 1")
    models = (model.split(":") for model in arguments.models)
    arguments.models = {model: precisions or precisions_of(model) for model, *precisions in models}
    for model, precisions in arguments.models.items():
        if wrong := set(precisions) - set(PRECISIONS):
            parser.error(f"--models: {wrong.pop()} isn't one of {', '.join(PRECISIONS)}")
        name, *modifiers = model.split("+")
        if name not in SCRIPT_OF or set(modifiers) - set(MODIFIERS):
            parser.error(f"--models: {model} isn't one of {', '.join(SCRIPT_OF)}, with +{', +'.join(MODIFIERS)}")
        if not is_peer(model):  # let the version's parser refuse an option that it does not know
            load_version(int(model[1])).parse_options(rest)
    return arguments


# ---------------------------------------------------------------- cases


def is_peer(model):
    return model.startswith(tuple(PEERS))


def precisions_of(model):
    return [name for name in PRECISIONS if name != "fp8" or model.startswith(("v3", "hf"))]


def graph_choices(model, wanted):
    """Return with a graph, without, or both; peers run in a graph by default."""
    if wanted:
        return [choice == "on" for choice in wanted]
    return [is_peer(model) or load_version(int(model[1])).GRAPH_BY_DEFAULT]


def grid(arguments):
    """Return all cases in the order in which a round runs them."""
    script = load_version(1)
    sizes = {name: dict(zip(script.SIZES, script.PRESETS[name], strict=True)) for name in arguments.presets}
    return [
        Case(model, preset, batch_size, seq_len, precision, graph, arguments.options, processes)
        for preset in arguments.presets
        for batch_size in arguments.batch_sizes or [sizes[preset]["batch_size"]]
        for seq_len in arguments.seq_lengths or [sizes[preset]["seq_len"]]
        for precision in arguments.precisions
        for model, precisions in arguments.models.items()
        if precision in precisions
        for graph in graph_choices(model, arguments.graph)
        for processes in arguments.nproc
        if processes > 1 or "+fsdp" not in model
    ]


def training_options(case):
    """Return the options of the case for its script, without those that say how long and where to."""
    sizes = ["--preset", case.preset, "--batch-size", str(case.batch_size), "--seq-len", str(case.seq_len)]
    name, *modifiers = case.model.split("+")
    model = [*PEERS.get(name, []), *(option for modifier in modifiers for option in MODIFIERS[modifier])]
    return [*sizes, *PRECISIONS[case.precision], *model, *shlex.split(case.options)]


# ---------------------------------------------------------------- runs


def visible_gpus():
    """Return the names that CUDA_VISIBLE_DEVICES has for the GPUs."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",") if named else [str(gpu) for gpu in range(torch.cuda.device_count())]


def environment_of(case, arguments):
    """Return the environment of a case's process; with --spread it sees the GPU of its preset alone."""
    if not arguments.spread:
        return None
    return os.environ | {"CUDA_VISIBLE_DEVICES": visible_gpus()[arguments.presets.index(case.preset)]}


def run_case(case, arguments, limit, steps=None):
    """Run one process and return its record: status ok, failed or not available, and the summary."""
    steps = steps or arguments.num_steps or STEPS.get(case.preset, 50)
    argv = [*training_options(case), "--graph" if case.graph else "--no-graph", "--num-steps", str(steps)]
    record = {"case": case, "script_sha256": hash_of(case.script)}
    try:
        metrics = train(case.script, argv, case.processes, limit.bound(TIMEOUT), environment_of(case, arguments))
    except Failure as error:
        return record | {"status": "not available" if error.status == 2 else "failed", "reason": str(error)}
    steps_ms = [round(step["step_ms"], 4) for step in metrics["steps"]]
    return record | {"status": "ok", "reason": None, "summary": metrics["summary"], "steps_ms": steps_ms}


def compile_first(cases, arguments):
    """Run one step of every case that compiles, several at a time, so that no measured process has to.

    What is not compiled after half of the time limit compiles in its first measured process.
    """
    cases = [case for case in cases if "+compile" in case.model or case.model.startswith(("v3", "v4"))]
    progress(f"compiling {len(cases)} cases, {arguments.compile_first} at a time")
    half = TimeLimit(arguments.time_limit and arguments.time_limit / 2)
    with concurrent.futures.ThreadPoolExecutor(arguments.compile_first) as pool:
        for run in pool.map(lambda case: run_case(case, arguments, half, 1), cases):
            progress(f"  {run['case']}: {run['reason'] or 'compiled'}")


def tasks_left(cases, repeats, results):
    """Return (case, repeat) of what the results lack, a round over all cases for each repeat."""
    done = {(run["case"], run["repeat"]) for run in results["runs"] if run["status"] == "ok"}
    return [(case, repeat) for repeat in range(repeats) for case in cases if (case, repeat) not in done]


WRITING = threading.Lock()  # with --spread two threads add their results to one file


def add_result(results, arguments, kind, *entries):
    with WRITING:
        results[kind] += entries
        write_results(results, arguments.results / "suite.json")


def on_each_gpu(work, groups, arguments, limit):
    """Return the sum of work(group): one after the other, or with --spread all at the same time."""
    if not arguments.spread:
        return sum(map(work, groups))
    with concurrent.futures.ThreadPoolExecutor(len(arguments.presets)) as pool:
        try:
            return sum(pool.map(work, groups))
        except KeyboardInterrupt:
            limit.end = 0  # what runs may end, nothing else starts
            raise


def run_all(tasks, arguments, results, limit, here):
    """Run the tasks that there is time for, and write the results after each; return how many are left."""
    refused = set()
    for number, (case, repeat) in enumerate(tasks, 1):
        if not limit.room():
            return len(tasks) - number + 1
        if case in refused:
            continue
        run = limit.timed(lambda case=case: run_case(case, arguments, limit)) | {"repeat": repeat, **here}
        if run["status"] == "not available":
            refused.add(case)
        add_result(results, arguments, "runs", run)
        found = f"{run['status']}: {run['reason']}" if run["reason"] else f"{rounded(step_of(run), 4)} ms"
        left = f"{limit.took[-1]:.0f} s; {limit.left(len(tasks) - number)}"
        progress(f"[{number}/{len(tasks)}] {case}, repeat {repeat + 1}: {found}  ({left})")
    return 0


# ---------------------------------------------------------------- accuracy


def check_gradients(requests):
    """Print, for each [version, options], how far loss and gradients are from version 1's in float32: a JSON line."""
    loss, gradients = loss_and_gradients(1, requests[0][1], full_precision=True)
    for version, options in requests:
        found_loss, found = loss_and_gradients(version, options)
        errors = errors_of(found, gradients)
        worst = max(errors, key=errors.get)
        errors = {"loss_error": abs(found_loss - loss) / abs(loss), "gradient_error": errors[worst]}
        print(json.dumps({**errors, "worst_gradient": worst}), flush=True)


def gradients_left(cases, results):
    """Return a list per configuration: a case for each version and precision that ran and is not compared yet."""
    ran = {run["case"] for run in results["runs"] if run["status"] == "ok"}
    done = {entry["case"].gradients for entry in results["accuracy"]}
    found = {case.gradients: case for case in cases if case in ran and not is_peer(case.model) and case.processes == 1}
    left = [case for key, case in found.items() if key not in done]
    return [list(some) for _, some in itertools.groupby(left, lambda case: case.configuration)]


def measure_accuracy(cases, arguments, results, limit):
    """Compare cases of one configuration with version 1, all in one process of their own; return how many are left."""
    progress(f"comparing the gradients of {cases[0].preset} with version 1's: {len(cases)} cases")
    requests = json.dumps([[int(case.model[1]), training_options(case)] for case in cases])
    command = [sys.executable, str(pathlib.Path(__file__).resolve()), CHECK_GRADIENTS, requests]
    try:
        done = run_process(command, limit.bound(TIMEOUT), env=environment_of(cases[0], arguments))
    except subprocess.TimeoutExpired as error:
        progress(f"gradients of {cases[0].preset} took longer than {error.timeout:.0f} s")
        return len(cases)
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    add_result(results, arguments, "accuracy", *({"case": c, **entry} for c, entry in zip(cases, found, strict=False)))
    if len(found) < len(cases):
        progress(f"{cases[len(found)]} and what follows: gradients not compared: {last_words(done.stderr)}")
    return len(cases) - len(found)


# ---------------------------------------------------------------- the whole


def earlier_results(cases, arguments, record):
    """Return the results of FOLDER, or empty ones; Failure if they are of another device or text.

    Failed runs are left out, and what another machine measured of a round that it did not finish: ratios are of one.
    """
    path = arguments.results / "suite.json"
    results = read_results(path) if path.exists() else {"record": record, "runs": [], "accuracy": []}
    good = [run for run in results["runs"] if run["status"] == "ok"]
    then = results["record"]
    told = [f"{k} {then.get(k)}, but here it is {record[k]}" for k in SAME_RUN if then.get(k) != record[k]]
    scripts = [run["case"].script for run in good if run["script_sha256"] != hash_of(run["case"].script)]
    if told := [*told, *(f"another text of {script.name}" for script in scripts)]:
        raise Failure(2, f"{path} is of {told[0]}: choose another --results folder")
    refused = {run["case"] for run in results["runs"] if run["status"] == "not available"}
    done = {(run["case"], run["repeat"]) for run in good}
    whole = {repeat for _, repeat in done if all((case, repeat) in done or case in refused for case in cases)}
    return results | {"runs": [run for run in good if run["repeat"] in whole or run.get("host") == record["host"]]}


def measure(cases, arguments, results, record):
    """Run what the results lack, then compare the gradients; return how many processes or comparisons are left."""
    limit = TimeLimit(arguments.time_limit)
    here = {key: record[key] for key in ("host", "commit")}
    if arguments.compile_first and not any(run.get("host") == record["host"] for run in results["runs"]):
        compile_first(cases, arguments)
    groups = [tasks := tasks_left(cases, arguments.repeats, results)]
    if arguments.spread:
        groups = [[task for task in tasks if task[0].preset == preset] for preset in arguments.presets]
    left = on_each_gpu(lambda some: run_all(some, arguments, results, limit, here), groups, arguments, limit)
    if left or "accuracy" not in arguments.metrics:
        return left
    groups = gradients_left(cases, results)
    return on_each_gpu(lambda some: measure_accuracy(some, arguments, results, limit), groups, arguments, limit)


def show(results, metrics):
    """Print a table for each configuration, with what a reader must know."""
    table = rows(results)
    for title, some in configurations(table).items():
        print(f"\n{title}")
        print(text_table(*table_of(some, metrics), left=3))
        for note in notes_of(some):
            print(note)
    if results["record"]["device_type"] == "cpu" and any(row["model"].startswith("v3") for row in table):
        print("\nVersion 3's kernels ran in Triton's interpreter, which needs no GPU: its times mean nothing.")


def benchmark(arguments, argv):
    """Run, compare, report; return the exit status."""
    refuse_protected(arguments.results / "suite.json")
    cases = grid(arguments)
    record = describe(["benchmark_suite.py", *argv])
    status = 0
    results = earlier_results(cases, arguments, record)
    arguments.results.mkdir(parents=True, exist_ok=True)
    try:
        left = measure(cases, arguments, results, record)
    except KeyboardInterrupt:
        progress("interrupted: what was measured is kept")
        left, status = len(tasks_left(cases, arguments.repeats, results)), 130
    show(results, arguments.metrics)
    print(f"\n{arguments.results / 'suite.json'}")
    if left:
        print(f"{left} processes or comparisons are left: repeat the command with --append")
    ended = {(run["case"].model, run["status"]) for run in results["runs"]}
    failed = [model for model in arguments.models if (model, "failed") in ended and (model, "ok") not in ended]
    for model in failed:
        progress(f"benchmark_suite.py: no case of {model} ran")
    return status or int(bool(left or failed))


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == [CHECK_GRADIENTS]:
        return check_gradients(json.loads(argv[1]))
    arguments = parse_arguments(argv)
    return run_tool("benchmark_suite.py", lambda: benchmark(arguments, argv))


if __name__ == "__main__":
    sys.exit(main())
