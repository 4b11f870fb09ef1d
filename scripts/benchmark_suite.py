"""Measure the versions, and what one would take instead of them, over a grid of sizes and precisions.

    python scripts/benchmark_suite.py --models v1,v2,v3,v4 --batch-sizes 4,8 --seq-lengths 128,256
    python scripts/benchmark_suite.py --presets small,medium --precisions float32,tf32,bfloat16 --repeats 3
    python scripts/benchmark_suite.py --models v1,v1+nodet,v2+compile,v3,hf-compile-graph --graph on,off
    python scripts/benchmark_suite.py --results runs/h200 --append --time-limit 500    # what fits; again: the rest
    python scripts/benchmark_suite.py --models v3,v4 --presets medium --precisions bfloat16 --nproc 1,2,4,8

A model is v1 to v4, or a peer where its packages are installed: hf, hf-compile, hf-graph, hf-compile-graph (Hugging
Face's Llama) and liger. v2+compile, v1+nodet and v1+det switch torch.compile and determinism; any other +NAME stands
for the version's own option --NAME, as in v3+disable-attention-kernel. v3+peer-adamw is for several GPUs. Options that
are not listed go to all scripts.

Every case runs in a process of its own, or with --nproc in as many as it says, started by torchrun with the same batch
each. A repeat is a round over all cases of a configuration, so that what drifts hits all of them; a round stays on one
GPU. With --nproc it takes the first ones, and one process alone the next GPU in each repeat. Results are written after
every process: FOLDER/suite.json, suite.csv and, with matplotlib, suite.png. A case that fails, or that this machine
cannot run, is reported and passed over.

Exit status: 0; 1 where all cases of a model failed; 2 for a bad option; 130 when interrupted.
"""

import argparse
import concurrent.futures
import contextlib
import datetime
import functools
import hashlib
import json
import os
import pathlib
import platform
import queue
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time

from common.benchmark_results import (
    PEER_ADAMW,
    Case,
    draw,
    empty_results,
    interpreted,
    read_results,
    rows,
    text_table,
    write_csv,
    write_results,
)
from common.versions import REPOSITORY, SCRIPTS, load_version, loss_and_gradients, relative_error

PEER_SCRIPT = REPOSITORY / "scripts" / "common" / "peers.py"
PEERS = {
    "hf": ["--library", "transformers"],
    "hf-compile": ["--library", "transformers", "--enable-torch-compile"],
    "hf-graph": ["--library", "transformers"],
    "hf-compile-graph": ["--library", "transformers", "--enable-torch-compile"],
    "liger": ["--library", "liger"],
}
MODIFIERS = {"compile": "enable-torch-compile", "nodet": "no-deterministic", "det": "deterministic"}
PRECISIONS = {
    "float32": [],
    "tf32": ["--tf32"],
    "bfloat16": ["--use-amp", "--amp-dtype", "bfloat16"],
    "float16": ["--use-amp", "--amp-dtype", "float16"],
}
METRICS = ("throughput", "memory", "accuracy")
CHECK_GRADIENTS = "--check-gradients"
EXPECTED_SECONDS = 20  # of a process, until one has been seen
SECONDS_TO_END = 40  # torchrun kills what has not ended after 30
STEPS = {"medium": 20}  # a step of the medium preset takes up to a quarter of a second
# Without a GPU, where version 3's kernels run in Triton's interpreter, a model that takes seconds a step.
CPU_DEFAULTS = {"presets": ["tiny"], "batch_sizes": [2], "seq_lengths": [32], "num_steps": 5}
CPU_OPTIONS = "--hidden-dim 64 --num-layers 2 --num-heads 4 --vocab-size 256"
REFUSED = 2  # exit status of a script for what it cannot do here: an option, a precision, a missing package


def listed(choices=None, convert=str):
    """A type for argparse: values separated by commas, each converted and, if choices are given, one of them."""

    def parse(text):
        values = [convert(part) for part in text.split(",") if part]
        wrong = [value for value in values if choices and value not in choices]
        if wrong or not values:
            raise argparse.ArgumentTypeError(f"{text!r}: choose from {', '.join(choices or ['one or more values'])}")
        return list(dict.fromkeys(values))

    return parse


def positive(text):
    if int(text) < 1:
        raise ValueError
    return int(text)


class Parser(argparse.ArgumentParser):
    def error(self, message):
        self.exit(2, f"{self.prog}: error: {message}\n")


def add_grid_options(parser):
    group = parser.add_argument_group("what to measure")
    group.add_argument("--models", type=listed(), default=["v1", "v2", "v3", "v4"], help="(v1,v2,v3,v4)")
    group.add_argument("--presets", type=listed(), help="tiny, small, medium (small; on a CPU a toy)")
    group.add_argument("--batch-sizes", type=listed(convert=positive), help="sequences in a step (the preset's)")
    group.add_argument("--seq-lengths", "--seq-lens", type=listed(convert=positive), help="tokens (the preset's)")
    group.add_argument(
        "--precisions", type=listed(PRECISIONS), default=["float32"], help="float32, tf32, bfloat16, float16"
    )
    group.add_argument("--graph", type=listed(["on", "off", "default"]), default=["default"], help="on, off, default")
    group.add_argument(
        "--nproc", type=listed(convert=positive), default=[1], help="processes of a case, one a GPU: 1,2,4,8 (1)"
    )
    group.add_argument("--metrics", type=listed(METRICS), default=list(METRICS), help=f"({','.join(METRICS)})")


def add_run_options(parser):
    group = parser.add_argument_group("how")
    group.add_argument("--repeats", type=positive, default=3, help="processes of each case (%(default)s)")
    group.add_argument("--num-steps", type=positive, help="measured steps of a process (50; 20 for medium)")
    group.add_argument("--device", help="as in the training scripts (a GPU if there is one)")
    group.add_argument("--gpus", type=listed(convert=int), help="indices of like GPUs that share the rounds: 0,1,2,3")
    group.add_argument("--timeout", type=positive, default=600, help="seconds that a process may take (%(default)s)")
    group.add_argument("--time-limit", type=positive, help="seconds after which no further process is started")
    group.add_argument("--results", type=pathlib.Path, metavar="FOLDER", help="(benchmark_results/DATE_TIME)")
    group.add_argument(
        "--commit", metavar="HASH", help="of this code, for a copy without Git's history or with an older one"
    )
    group.add_argument("--append", action="store_true", help="keep what FOLDER/suite.json holds and run what it lacks")


def parse_arguments(argv):
    parser = Parser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        prog="benchmark_suite.py",
    )
    add_grid_options(parser)
    add_run_options(parser)
    arguments, rest = parser.parse_known_args(argv)
    arguments.options = shlex.join(rest)
    if arguments.gpus and arguments.device:
        parser.error("--gpus and --device exclude each other")
    if arguments.gpus and max(arguments.nproc) > 1:
        parser.error("--gpus shares GPUs among rounds, but --nproc takes them for one: leave one of them out")
    several = [model for model in arguments.models if PEER_ADAMW in model]
    if several and max(arguments.nproc) == 1:
        parser.error(f"{several[0]} is for several GPUs: add --nproc 2, or as many as there are")
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
    return arguments


def gpu_count():
    import torch  # here, so that a wrong option is answered at once

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


# ---- the cases


def script_of(model):
    name = model.split("+")[0]
    return PEER_SCRIPT if name in PEERS else SCRIPTS[int(name[1:])]


def own_options(model):
    """The options that make a version's or peer's script the model of that name."""
    name, *modifiers = model.split("+")
    return [*PEERS.get(name, []), *(f"--{MODIFIERS.get(modifier, modifier)}" for modifier in modifiers)]


def check_model(model, options):
    """Refuse, in one sentence, a model that there is not, and an option that its script does not know."""
    name = model.split("+")[0]
    if name not in PEERS and name not in {f"v{version}" for version in SCRIPTS}:
        print(f"benchmark_suite.py: error: --models: {name} is none of v1 to v4, {', '.join(PEERS)}", file=sys.stderr)
        sys.exit(2)
    if name not in PEERS:
        # Several processes are not here yet, to be asked for.
        alone = own_options(model.replace(PEER_ADAMW, "") if name == "v3" else model)
        load_version(int(name[1:])).parse_options([*alone, *shlex.split(options)])


def graph_choices(model, wanted):
    """With a graph, without, or both; a peer's name says which."""
    if model in PEERS:
        return [model.endswith("-graph")]
    default = load_version(int(model[1])).GRAPH_BY_DEFAULT
    return list(dict.fromkeys({"on": True, "off": False, "default": default}[choice] for choice in wanted))


def configurations(arguments):
    """(preset, batch size, sequence length) of each configuration of the grid."""
    presets = load_version(1).PRESETS
    for preset in arguments.presets:
        if preset not in presets:
            print(f"benchmark_suite.py: error: --presets: {preset} is none of {', '.join(presets)}", file=sys.stderr)
            sys.exit(2)
        for batch_size in arguments.batch_sizes or [presets[preset]["batch_size"]]:
            for seq_len in arguments.seq_lengths or [presets[preset]["seq_len"]]:
                yield preset, batch_size, seq_len


def process_counts(model, wanted):
    """Of the wanted numbers of processes, those that a model can have."""
    if model in PEERS:
        return [1]
    return [count for count in wanted if count > 1 or PEER_ADAMW not in model]


def grid(arguments):
    """The cases of each configuration, in the order in which a round runs them."""
    return [
        [
            Case(model, *configuration, precision, graph, arguments.options, processes)
            for precision in arguments.precisions
            for model in arguments.models
            for graph in graph_choices(model, arguments.graph)
            for processes in process_counts(model, arguments.nproc)
        ]
        for configuration in configurations(arguments)
    ]


def training_options(case, arguments):
    """Options of the case for its script, without those that say how long and where to."""
    sizes = ["--preset", case.preset, "--batch-size", str(case.batch_size), "--seq-len", str(case.seq_len)]
    device = ["--device", arguments.device] if arguments.device else []
    return [*sizes, *PRECISIONS[case.precision], *device, *own_options(case.model), *shlex.split(case.options)]


# ---- one process


def hash_of(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def environment_for(gpu):
    """Environment variables that leave a process this GPU alone, counted among those that are visible here."""
    if gpu is None:
        return dict(os.environ)
    name = "HIP_VISIBLE_DEVICES" if "HIP_VISIBLE_DEVICES" in os.environ else "CUDA_VISIBLE_DEVICES"  # HIP reads both
    visible = os.environ[name].split(",") if os.environ.get(name) else None
    return os.environ | {name: visible[gpu] if visible else str(gpu)}


def last_words(output):
    """The last line that says something, without the name of the script; of a traceback, its exception.

    Behind torchrun's report of several processes it is the first of them that says why it ended.
    """
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    if "ChildFailedError" in output:
        lines = [line for line in lines if re.match(r"\S+\.py\b.*: \S|\[rank\d+\]: [\w.]+: \S", line)][:1] or lines
    return re.sub(r"^(\S+\.py\b[^:]*: (error: )?|\[rank\d+\]: )", "", lines[-1]) if lines else "it printed nothing"


def kill(process):
    """End a process with all that it started: torchrun the others, torch.compile workers."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):  # it ended just now
            process.terminate()  # torchrun then ends its processes, which are no group of its own
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(SECONDS_TO_END)
            os.killpg(process.pid, signal.SIGKILL)


class Processes:
    """Runs child processes that can all be ended at once."""

    def __init__(self):
        self.running, self.stopped = set(), False

    def run(self, command, timeout, gpu=None):
        """(exit status or None where it ran out of time, stdout, stderr)."""
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment_for(gpu),
            start_new_session=True,
        )
        self.running.add(process)
        try:
            if self.stopped:
                kill(process)
            output, errors = process.communicate(timeout=timeout)
            return process.returncode, output, errors
        except subprocess.TimeoutExpired:
            kill(process)
            output, errors = process.communicate()
            return None, output, errors
        finally:
            self.running.discard(process)

    def stop(self):
        self.stopped = True
        for process in list(self.running):
            kill(process)


def launcher(processes):
    """What starts a script that many times on this machine."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    return [sys.executable, *(torchrun if processes > 1 else [])]


def run_case(case, arguments, processes, gpu=None):
    """The record of one process: status ok, failed or not available, and its environment and summary."""
    steps = arguments.num_steps or STEPS.get(case.preset, 50)
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        metrics_file = pathlib.Path(folder) / "metrics.json"
        command = [*launcher(case.processes), str(script_of(case.model)), *training_options(case, arguments)]
        command += ["--graph" if case.graph else "--no-graph", "--num-steps", str(steps)]
        status, output, errors = processes.run([*command, "--metrics-file", str(metrics_file)], arguments.timeout, gpu)
        record = {
            "seconds": round(time.monotonic() - started, 1),
            "script_sha256": hash_of(script_of(case.model)),
            "status": "ok",
            "reason": None,
        }
        if status == 0:
            metrics = json.loads(metrics_file.read_text())
            return record | {key: metrics[key] for key in ("environment", "config", "summary")}
    if status is None:
        return record | {"status": "failed", "reason": f"it ran longer than --timeout {arguments.timeout} s"}
    return record | {
        "status": "not available" if status == REFUSED else "failed",
        "reason": last_words(errors or output),
    }


# ---- all of them


def rounds_to_run(cases_of_configurations, repeats, results):
    """Lists of (case, repeat) that the results lack, each to be run in one go on one GPU."""
    done = {(run["case"], run["repeat"]) for run in results["runs"] if run["status"] == "ok"}
    todo = [
        [(case, repeat) for case in cases if (case, repeat) not in done]
        for repeat in range(repeats)
        for cases in cases_of_configurations
    ]
    return [tasks for tasks in todo if tasks]


def keep_to_own_cores(place, places):
    """Give this thread, and the processes that it starts, an equal part of the cores, so that lanes do not disturb."""
    if places > 1 and hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        own = cores[place * len(cores) // places : (place + 1) * len(cores) // places]
        os.sched_setaffinity(0, own or cores)


class Suite:
    """Runs the rounds, on one GPU or on several at once, and keeps the results file up to date."""

    def __init__(self, arguments, results, rounds):
        self.arguments, self.results = arguments, results
        self.lanes = arguments.gpus or [None]
        self.take_turns = min(max(arguments.nproc), gpu_count())  # GPUs on which one process alone runs, beside several
        self.processes, self.lock = Processes(), threading.Lock()
        self.rounds = rounds
        self.left = [task for tasks in rounds for task in tasks]
        self.total = len(self.left)
        self.deadline = time.monotonic() + (arguments.time_limit or float("inf"))
        self.refused, self.problem = set(), None

    def run(self):
        """Run all that there is time for."""
        self.share(self.rounds, self.run_round)

    def share(self, items, work):
        """work(item, gpu) for every item, each GPU taking the next one when it is free."""
        waiting = queue.SimpleQueue()
        for item in items:
            waiting.put(item)

        def take(place, gpu):
            keep_to_own_cores(place, len(self.lanes))
            while True:
                try:
                    item = waiting.get_nowait()
                except queue.Empty:
                    return
                work(item, gpu)

        with concurrent.futures.ThreadPoolExecutor(len(self.lanes)) as pool:
            try:
                for lane in [pool.submit(take, place, gpu) for place, gpu in enumerate(self.lanes)]:
                    lane.result()
            except BaseException:
                self.processes.stop()
                raise

    def run_round(self, tasks, gpu):
        for case, repeat in tasks:
            if case in self.refused:
                self.left.remove((case, repeat))
                continue
            if self.processes.stopped or time.monotonic() + self.expected(case) > self.deadline:
                return
            place = repeat % self.take_turns if case.processes == 1 and self.take_turns > 1 else gpu
            record = run_case(case, self.arguments, self.processes, place)
            with self.lock:
                if not self.processes.stopped:
                    self.keep({"case": case, "repeat": repeat, "gpu": place, **record})

    def expected(self, case):
        """Seconds that a process of this case will take: as before, or as those of its configuration, or as any."""
        runs = [run for run in self.results["runs"] if run["status"] == "ok"]
        same = [run["seconds"] for run in runs if run["case"] == case]
        alike = [run["seconds"] for run in runs if run["case"].configuration == case.configuration]
        seen = same or alike or [run["seconds"] for run in runs] or [EXPECTED_SECONDS]
        return sum(seen) / len(seen)

    def keep(self, run):
        """Take a record into the results, unless it comes from another kind of machine, and say what is left."""
        known = next((r["environment"] for r in self.results["runs"] if r["status"] == "ok"), None)
        if known and run["status"] == "ok":
            for key in ("device", "torch"):
                if run["environment"][key] != known[key]:
                    self.problem = f"the results are of {known[key]}, but this is {run['environment'][key]}"
                    self.processes.stop()
                    return
        if run["status"] == "not available":
            self.refused.add(run["case"])
        run["session"] = len(self.results["sessions"]) - 1
        self.results["runs"].append(run)
        write_results(self.results, self.arguments.results / "suite.json")
        self.left.remove((run["case"], run["repeat"]))
        self.report(run)

    def report(self, run):
        found = run["reason"] if run["status"] != "ok" else f"{run['summary']['step_ms']['median']:.3f} ms"
        seconds = sum(self.expected(case) for case, _ in self.left) / len(self.lanes)
        left = f"about {seconds / 60:.0f} min left" if seconds > 90 else f"about {seconds:.0f} s left"
        print(
            f"[{self.total - len(self.left)}/{self.total}] {run['case']}, repeat {run['repeat'] + 1}: "
            f"{'' if run['status'] == 'ok' else run['status'] + ': '}{found}  ({run['seconds']:.0f} s; {left})",
            file=sys.stderr,
            flush=True,
        )


# ---- accuracy


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


def accuracy_cases(cases_of_configurations, results):
    """For each configuration, one case of each version and precision that ran and whose gradients are not checked."""
    ran = {run["case"] for run in results["runs"] if run["status"] == "ok"}
    done = {(e["case"].configuration, e["case"].model, e["case"].precision) for e in results["accuracy"]}
    found = []
    for cases in cases_of_configurations:
        chosen = {}
        for case in cases:
            key = case.configuration, case.model, case.precision
            if case in ran and case.model not in PEERS and case.processes == 1 and key not in done:
                chosen.setdefault(key, case)
        found.append(list(chosen.values()))
    return [cases for cases in found if cases]


def measure_accuracy(suite, cases, gpu):
    """Compare with version 1 in a process of its own; where it dies, go on behind the case that killed it."""
    arguments, results = suite.arguments, suite.results
    while cases and not suite.processes.stopped and time.monotonic() + EXPECTED_SECONDS < suite.deadline:
        print(
            f"comparing gradients of {cases[0].preset} with version 1's: {len(cases)} cases",
            file=sys.stderr,
            flush=True,
        )
        requests = json.dumps([[int(case.model[1]), training_options(case, arguments)] for case in cases])
        command = [sys.executable, str(pathlib.Path(__file__).resolve()), CHECK_GRADIENTS, requests]
        _, output, errors = suite.processes.run(
            command, max(1, min(arguments.timeout, suite.deadline - time.monotonic())), gpu
        )
        found = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
        with suite.lock:
            for case, entry in zip(cases, found, strict=False):
                results["accuracy"].append({"case": case, "script_sha256": hash_of(script_of(case.model)), **entry})
            write_results(results, arguments.results / "suite.json")
        if len(found) < len(cases):
            print(f"{cases[len(found)]}: gradients not compared: {last_words(errors)}", file=sys.stderr, flush=True)
        cases = cases[len(found) + 1 :]


# ---- the whole


def cpu_name():
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor()
    )


def driver():
    """The GPU driver's own line about its version, or None."""
    for path in ("/proc/driver/nvidia/version", "/sys/module/amdgpu/version"):
        try:
            return pathlib.Path(path).read_text().splitlines()[0]
        except (OSError, IndexError):
            continue
    return None


def session(arguments):
    """When, with which arguments and on what host the suite was started."""
    kept = {name: value for name, value in vars(arguments).items() if name not in ("results", "append")}
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "arguments": kept,
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "driver": driver(),
        "system": platform.platform(),
    }


def earlier_results(arguments, cases_of_configurations):
    """What the folder holds already, without what an older text of a script left and what is to be tried again."""
    if not (arguments.results / "suite.json").exists():
        return empty_results()
    results = read_results(arguments.results / "suite.json")
    wanted = {case for cases in cases_of_configurations for case in cases}
    runs = [run for run in results["runs"] if run["script_sha256"] == hash_of(script_of(run["case"].model))]
    if len(runs) < len(results["runs"]):
        stale = len(results["runs"]) - len(runs)
        print(f"{stale} runs are of an older text of their script: they are left out", file=sys.stderr)
    runs = [run for run in runs if run["status"] == "ok" or run["case"] not in wanted]
    accuracy = [e for e in results["accuracy"] if e["script_sha256"] == hash_of(script_of(e["case"].model))]
    return {"sessions": results["sessions"], "runs": runs, "accuracy": accuracy}


def write_tables(arguments, results):
    """Print the tables and write suite.csv and suite.png."""
    table = rows(results)
    of_configuration = {}
    for row in table:
        name = f"{row['preset']}: batch {row['batch_size']}, {row['seq_len']} tokens {row['options']}"
        of_configuration.setdefault(name, []).append(row)
    for name, some in of_configuration.items():
        print(f"\n{name}\n{text_table(some, arguments.metrics)}")
    if any(map(interpreted, results["runs"])):
        print("\nv3's kernels ran in Triton's interpreter, which needs no GPU: its times mean nothing.")
    write_csv(table, arguments.results / "suite.csv")
    files = ["suite.json", "suite.csv"]
    try:
        draw(table, arguments.results / "suite.png")
        files.append("suite.png")
    except ImportError:
        print("\nno picture: matplotlib is not installed (pip install '.[plots]')")
    print(f"\n{arguments.results}: {', '.join(files)}")


def exit_status(arguments, results):
    """1, with a sentence for each, where all cases of a model failed."""
    wrong = []
    for model in arguments.models:
        statuses = {run["status"] for run in results["runs"] if run["case"].model == model}
        if statuses == {"failed"}:
            wrong.append(model)
            print(f"benchmark_suite.py: all cases of {model} failed", file=sys.stderr)
    return 1 if wrong else 0


def benchmark(arguments):
    """Run, compare, report; the exit status."""
    for model in arguments.models:
        check_model(model, arguments.options)
    cases = grid(arguments)
    if arguments.options == CPU_OPTIONS:
        print("Without a GPU, and without --presets, a toy model is measured.", file=sys.stderr)
    arguments.results.mkdir(parents=True, exist_ok=True)
    results = earlier_results(arguments, cases)
    results["sessions"].append(session(arguments))
    suite = Suite(arguments, results, rounds_to_run(cases, arguments.repeats, results))
    status = 0
    try:
        suite.run()
        if "accuracy" in arguments.metrics and not suite.problem:
            suite.share(accuracy_cases(cases, results), functools.partial(measure_accuracy, suite))
    except KeyboardInterrupt:
        print("interrupted: what was measured is kept", file=sys.stderr)
        status = 130
    if suite.problem:
        print(f"benchmark_suite.py: error: {suite.problem}: choose another --results folder", file=sys.stderr)
        return 2
    if results["runs"]:
        write_tables(arguments, results)
    if suite.left:
        print(f"{len(suite.left)} of {suite.total} processes were not run: repeat the command with --append")
    return status or exit_status(arguments, results)


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == [CHECK_GRADIENTS]:
        check_gradients(json.loads(argv[1]))
        return 0
    arguments = parse_arguments(argv)
    try:
        return benchmark(arguments)
    except ValueError as error:
        print(f"benchmark_suite.py: error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"benchmark_suite.py: error: {error.filename} cannot be written: {error.strerror}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
