"""Measure the versions, and other libraries' training step, over a grid of sizes and precisions.

    python scripts/benchmark_suite.py --models v1,v2,v3,v4 --batch-sizes 4,8 --seq-lengths 128,256
    python scripts/benchmark_suite.py --presets small,medium --precisions float32,tf32,bfloat16 --repeats 3
    python scripts/benchmark_suite.py --models v1,v1+nodet,v2+compile,v3,hf+compile --graph on,off
    python scripts/benchmark_suite.py --results runs/h200 --append --time-limit 500    # what fits; again: the rest
    python scripts/benchmark_suite.py --models v3,v3+fsdp --presets medium --precisions bfloat16 --nproc 1,2

A model is v1 to v4, or a peer where its packages are installed: hf (Hugging Face's Llama) or liger (the same with
Liger's kernels). +compile, +nodet, +det and +fsdp switch torch.compile, determinism and FSDP2; any other +NAME is the
script's own option --NAME, as in v3+disable-attention-kernel. hf+compile:bfloat16:fp8 runs in these precisions alone.
Options that are not listed go to all scripts. The precision fp8 is version 3's and Hugging Face's (with torchao).

Every case runs in a process of its own, or with --nproc under torchrun with the same batch per process. A repeat is a
round over all cases, so that drift hits all alike. Results are written after every process: FOLDER/suite.json and, at
the end, suite.csv. A case that fails, or that this machine cannot run, is reported and skipped. --append may go on with
the same scripts on another machine of the same kind; a round is always of one machine.

Exit status: 0; 1 if all cases of a model failed or --time-limit left some out; 2 for a bad option; 130 if interrupted.
"""

import concurrent.futures
import datetime
import json
import os
import pathlib
import shlex
import signal
import subprocess
import sys
import threading

from common import command_line
from common.command_line import Failure, Parser, listed, positive, progress, run_tool
from common.provenance import SAME_RUN, describe, hash_of
from common.records import (
    Case,
    configurations,
    notes_of,
    read_results,
    rows,
    significant,
    step_of,
    table_of,
    write_results,
)
from common.runs import TimeLimit, last_words, run_process, train
from common.tables import text_table, write_csv
from common.versions import REPOSITORY, SCRIPTS, load_version, loss_and_gradients, relative_error

PEERS = {"hf": ["--library", "transformers"], "liger": ["--library", "liger"]}
SCRIPT_OF = {f"v{version}": path for version, path in SCRIPTS.items()}
SCRIPT_OF |= dict.fromkeys(PEERS, REPOSITORY / "scripts" / "common" / "peers.py")
MODIFIERS = {"compile": ["--enable-torch-compile"], "nodet": ["--no-deterministic"], "det": ["--deterministic"]}
MODIFIERS["fsdp"] = ["--parallel", "fsdp"]
PRECISIONS = command_line.PRECISIONS | {"fp8": [*command_line.PRECISIONS["bfloat16"], "--fp8"]}
ONLY = {"fp8": ("v3", "hf")}  # models with this precision; the others have all
METRICS = ("throughput", "memory", "accuracy")
CHECK_GRADIENTS = "--check-gradients"
STEPS = {"medium": 20}  # a step of the medium preset takes up to a quarter of a second
# Without a GPU, where version 3's kernels run in Triton's interpreter, a model that takes seconds per step.
CPU_DEFAULTS = {"presets": ["tiny"], "batch_sizes": [2], "seq_lengths": [32], "num_steps": 5}
CPU_OPTIONS = "--hidden-dim 64 --num-layers 2 --num-heads 4 --vocab-size 256"


def add_options(parser):
    add = parser.add_argument_group("what to measure").add_argument
    presets = [name for name in load_version(1).PRESETS if name not in ("default", "check")]
    add("--models", type=listed(), default=["v1", "v2", "v3", "v4"], help="(v1,v2,v3,v4)")
    add("--presets", type=listed(presets), help="tiny, small, medium (small; on a CPU a toy)")
    add("--batch-sizes", type=listed(convert=positive), help="sequences per step and process (the preset's)")
    add("--seq-lengths", "--seq-lens", type=listed(convert=positive), help="tokens (the preset's)")
    add("--precisions", type=listed(PRECISIONS), default=["float32"], help=", ".join(PRECISIONS))
    add("--graph", type=listed(["on", "off", "default"]), default=["default"], help="on, off, default")
    add("--nproc", type=listed(convert=positive), default=[1], help="processes per case, one per GPU: 1,2,4 (1)")
    add("--metrics", type=listed(METRICS), default=list(METRICS), help=f"({','.join(METRICS)})")
    add = parser.add_argument_group("how").add_argument
    add("--repeats", type=positive, default=3, help="processes of each case (%(default)s)")
    add("--num-steps", type=positive, help="measured steps of a process (50; 20 for medium)")
    add("--device", help="as in the training scripts (a GPU if there is one)")
    add("--timeout", type=positive, default=600, help="seconds that a process may take (%(default)s)")
    add("--time-limit", type=positive, help="seconds after which all ends; --append does the rest")
    add("--compile-first", type=positive, metavar="N", help="fill the compilers' caches first, N cases at a time")
    add("--spread", action="store_true", help="measure each preset on a GPU of its own, at the same time")
    add("--results", type=pathlib.Path, metavar="FOLDER", help="(benchmark_results/DATE_TIME)")
    add("--append", action="store_true", help="keep what FOLDER/suite.json holds and run what it lacks")


def parse_arguments(argv):
    """Return the checked arguments; options holds those of the training scripts."""
    parser = Parser("benchmark_suite.py", __doc__, with_json=False)
    add_options(parser)
    arguments, rest = parser.parse_known_args(argv)
    arguments.options = shlex.join(rest)
    on_cpu = arguments.device == "cpu" or not gpu_count()
    if on_cpu:
        os.environ["TRITON_INTERPRET"] = "1"  # before version 3 imports Triton, here and in its own process
        if not (arguments.presets or rest):
            arguments.options = CPU_OPTIONS
            for name, value in CPU_DEFAULTS.items():
                setattr(arguments, name, getattr(arguments, name) or value)
    arguments.presets = arguments.presets or ["tiny" if on_cpu else "small"]
    moment = datetime.datetime.now().strftime("%Y%m%d_%H%M%S")
    arguments.results = arguments.results or pathlib.Path("benchmark_results") / moment
    if (arguments.results / "suite.json").exists() and not arguments.append:
        parser.error(f"{arguments.results} holds results already: add --append, or choose another --results folder")
    if arguments.spread and (max(arguments.nproc) > 1 or on_cpu or len(arguments.presets) > gpu_count()):
        parser.error(f"--spread needs a GPU for each of {len(arguments.presets)} presets, and --nproc 1")
    arguments.limits = {model.split(":")[0]: model.split(":")[1:] for model in arguments.models}
    arguments.models = list(arguments.limits)
    for model, precisions in arguments.limits.items():
        if wrong := set(precisions) - set(PRECISIONS):
            parser.error(f"--models: {wrong.pop()} is none of {', '.join(PRECISIONS)}")
        if name_of(model) not in SCRIPT_OF:
            parser.error(f"--models: {model} is none of {', '.join(SCRIPT_OF)}")
        if name_of(model) not in PEERS:  # let the version's parser refuse an option that it does not know
            known = [option for option in own_options(model) if option not in MODIFIERS["fsdp"]]  # needs torchrun
            load_version(int(model[1])).parse_options([*known, *shlex.split(arguments.options)])
    return arguments


def gpu_count():
    import torch  # here, so that a wrong option is answered at once

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


# ---------------------------------------------------------------- cases


def name_of(model):
    """Return v1 to v4, hf or liger: the model without its modifiers."""
    return model.split("+")[0]


def script_of(case):
    return SCRIPT_OF[name_of(case.model)]


def own_options(model):
    """Return the options that make a version's or a peer's script the model of that name."""
    name, *modifiers = model.split("+")
    return [*PEERS.get(name, []), *(o for m in modifiers for o in MODIFIERS.get(m, [f"--{m}"]))]


def graph_choices(model, wanted):
    """Return with a graph, without, or both; peers run in a graph by default."""
    default = True if name_of(model) in PEERS else load_version(int(model[1])).GRAPH_BY_DEFAULT
    return list(dict.fromkeys({"on": True, "off": False, "default": default}[choice] for choice in wanted))


def process_counts(model, wanted):
    """Return those of the wanted numbers of processes that a model can run with."""
    if name_of(model) in PEERS:
        return [1]
    return [count for count in wanted if count > 1 or "+fsdp" not in model]


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
        for model in arguments.models
        if name_of(model) in ONLY.get(precision, SCRIPT_OF) and precision in (arguments.limits[model] or PRECISIONS)
        for graph in graph_choices(model, arguments.graph)
        for processes in process_counts(model, arguments.nproc)
    ]


def training_options(case, arguments):
    """Return the options of the case for its script, without those that say how long and where to."""
    sizes = ["--preset", case.preset, "--batch-size", str(case.batch_size), "--seq-len", str(case.seq_len)]
    device = ["--device", arguments.device] if arguments.device else []
    return [*sizes, *PRECISIONS[case.precision], *device, *own_options(case.model), *shlex.split(case.options)]


# ---------------------------------------------------------------- runs


def environment_of(case, arguments):
    """Return the environment of a case's process; with --spread it sees the GPU of its preset alone."""
    if not arguments.spread:
        return None
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(gpu_count())))).split(",")
    return os.environ | {"CUDA_VISIBLE_DEVICES": gpus[arguments.presets.index(case.preset)]}


def run_case(case, arguments, limit, steps=None):
    """Run one process and return its record: status ok, failed or not available, and the summary."""
    steps = steps or arguments.num_steps or STEPS.get(case.preset, 50)
    argv = [*training_options(case, arguments), "--graph" if case.graph else "--no-graph", "--num-steps", str(steps)]
    record = {"case": case, "script_sha256": hash_of(script_of(case))}
    try:
        environment, timeout = environment_of(case, arguments), limit.bound(arguments.timeout)
        metrics = train(script_of(case), argv, case.processes, timeout, environment)
        steps_ms = [round(step["step_ms"], 4) for step in metrics["steps"]]
        return record | {"status": "ok", "reason": None, "summary": metrics["summary"], "steps_ms": steps_ms}
    except Failure as error:
        return record | {"status": "not available" if error.status == 2 else "failed", "reason": str(error)}


def compile_first(cases, arguments, limit):
    """Run one step of every case that compiles, several at a time, so that no measured process has to.

    What is not compiled after half of the time limit compiles in its first measured process.
    """

    def compile_one(case):
        if limit.seconds and limit.bound(limit.seconds) < limit.seconds / 2:
            return f"{case}: left to its first run"
        return f"{case}: {run_case(case, arguments, limit, 1)['reason'] or 'compiled'}"

    cases = [case for case in cases if "+compile" in case.model or name_of(case.model) in ("v3", "v4")]
    progress(f"compiling {len(cases)} cases, {arguments.compile_first} at a time")
    with concurrent.futures.ThreadPoolExecutor(arguments.compile_first) as pool:
        for done in concurrent.futures.as_completed([pool.submit(compile_one, case) for case in cases]):
            progress(f"  {done.result()}")


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
            limit.seconds = 0  # what runs may end, nothing else starts
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
        found = f"{run['status']}: {run['reason']}" if run["reason"] else f"{significant(step_of(run))} ms"
        left = f"{limit.took[-1]:.0f} s; {limit.left(len(tasks) - number)}"
        progress(f"[{number}/{len(tasks)}] {case}, repeat {repeat + 1}: {found}  ({left})")
    return 0


# ---------------------------------------------------------------- accuracy


def check_gradients(requests):
    """Print, for each [version, options], how far loss and gradients are from version 1's in float32: a JSON line."""
    loss, gradients = loss_and_gradients(1, requests[0][1], full_precision=True)
    for version, options in requests:
        found_loss, found = loss_and_gradients(version, options)
        errors = {
            name: relative_error(found[name], wanted) if name in found else float("inf")
            for name, wanted in gradients.items()
        }
        worst = max(errors, key=errors.get)
        errors = {"loss_error": abs(found_loss - loss) / abs(loss), "gradient_error": errors[worst]}
        print(json.dumps({**errors, "worst_gradient": worst}), flush=True)


def accuracy_cases(cases, results):
    """Return {configuration: one case per version and precision that ran and whose gradients are not compared yet}."""
    ran = {run["case"] for run in results["runs"] if run["status"] == "ok"}
    done = {(e["case"].configuration, e["case"].model, e["case"].precision) for e in results["accuracy"]}
    found = {}
    for case in cases:
        key = case.configuration, case.model, case.precision
        if case in ran and name_of(case.model) not in PEERS and case.processes == 1 and key not in done:
            found.setdefault(case.configuration, {}).setdefault(key, case)
    return {configuration: list(chosen.values()) for configuration, chosen in found.items()}


def measure_accuracy(cases, arguments, results, limit):
    """Compare cases of one configuration with version 1, all in one process of their own; return how many are left."""
    progress(f"comparing the gradients of {cases[0].preset} with version 1's: {len(cases)} cases")
    requests = json.dumps([[int(case.model[1]), training_options(case, arguments)] for case in cases])
    command = [sys.executable, str(pathlib.Path(__file__).resolve()), CHECK_GRADIENTS, requests]
    try:
        done = run_process(command, limit.bound(arguments.timeout), env=environment_of(cases[0], arguments))
    except subprocess.TimeoutExpired as error:
        progress(f"gradients of {cases[0].preset} took longer than {error.timeout:.0f} s")
        return len(cases)
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    add_result(results, arguments, "accuracy", *({"case": c, **entry} for c, entry in zip(cases, found, strict=False)))
    if len(found) < len(cases):
        progress(f"{cases[len(found)]} and what follows: gradients not compared: {last_words(done.stderr)}")
    return len(cases) - len(found)


# ---------------------------------------------------------------- the whole


def results_to_fill(arguments, record):
    """Return empty results, or those of FOLDER; Failure if they are of another device or text."""
    path = arguments.results / "suite.json"
    if not path.exists():
        return {"record": record, "runs": [], "accuracy": []}
    results = read_results(path)
    for key in SAME_RUN:
        if results["record"].get(key) != record[key]:
            told = f"{key} {results['record'].get(key)}, but here it is {record[key]}"
            raise Failure(2, f"{path} is of {told}: choose another --results folder")
    for run in results["runs"]:
        if run["status"] == "ok" and run["script_sha256"] != hash_of(script_of(run["case"])):
            raise Failure(2, f"{path} is of another text of {script_of(run['case']).name}: choose another folder")
    return results


def keep_what_went_well(cases, results, host):
    """Drop failed runs, and what another machine measured of a round that it did not finish: ratios are of one."""
    good = [run for run in results["runs"] if run["status"] == "ok"]
    refused = {run["case"] for run in results["runs"] if run["status"] == "not available"}
    done = {(run["case"], run["repeat"]) for run in good}
    whole = {repeat for _, repeat in done if all((case, repeat) in done or case in refused for case in cases)}
    results["runs"] = [run for run in good if run["repeat"] in whole or run.get("host") == host]


def write_tables(arguments, results):
    """Print the tables and write suite.csv."""
    table = rows(results)
    for title, some in configurations(table).items():
        print("\n".join([f"\n{title}", text_table(*table_of(some, arguments.metrics), left=3), *notes_of(some)]))
    if results["record"]["device_type"] == "cpu" and any(row["model"].startswith("v3") for row in table):
        print("\nVersion 3's kernels ran in Triton's interpreter, which needs no GPU: its times mean nothing.")
    with open(arguments.results / "suite.csv", "w", newline="") as file:
        columns = max(table, key=len)  # a case that failed has fewer
        write_csv([{name: row.get(name) for name in columns} for row in table], file)
    print(f"\n{arguments.results}: suite.json, suite.csv")


def benchmark(arguments, argv):
    """Run, compare, report; return the exit status."""
    cases = grid(arguments)
    if arguments.options == CPU_OPTIONS:
        progress("Without a GPU, and without --presets, a toy model is measured.")
    record = describe(["benchmark_suite.py", *argv])
    here = {key: record[key] for key in ("host", "commit")}
    results = results_to_fill(arguments, record)
    keep_what_went_well(cases, results, record["host"])
    arguments.results.mkdir(parents=True, exist_ok=True)
    tasks, limit, status = tasks_left(cases, arguments.repeats, results), TimeLimit(arguments.time_limit), 0
    try:
        if arguments.compile_first and not any(run.get("host") == record["host"] for run in results["runs"]):
            compile_first(cases, arguments, limit)
        groups = [[task for task in tasks if task[0].preset == preset] for preset in arguments.presets]
        groups = groups if arguments.spread else [tasks]
        left = on_each_gpu(lambda some: run_all(some, arguments, results, limit, here), groups, arguments, limit)
        if "accuracy" in arguments.metrics and not left:
            groups = accuracy_cases(cases, results).values()
            left = on_each_gpu(lambda some: measure_accuracy(some, arguments, results, limit), groups, arguments, limit)
    except KeyboardInterrupt:
        progress("interrupted: what was measured is kept")
        left, status = len(tasks_left(cases, arguments.repeats, results)), 130
    if results["runs"]:
        write_tables(arguments, results)
    if left:
        print(f"{left} processes or comparisons are left: repeat the command with --append")
    statuses = {model: {r["status"] for r in results["runs"] if r["case"].model == model} for model in arguments.models}
    failed = [model for model, found in statuses.items() if found == {"failed"}]
    for model in failed:
        progress(f"benchmark_suite.py: all cases of {model} failed")
    return status or int(bool(left or failed))


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == [CHECK_GRADIENTS]:
        return check_gradients(json.loads(argv[1]))
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # `timeout` ends it like Ctrl-C: its process ends too
    arguments = parse_arguments(argv)
    return run_tool("benchmark_suite.py", lambda: benchmark(arguments, argv))


if __name__ == "__main__":
    sys.exit(main())
