"""Train the four versions alike, check that they compute the same, and compare their speed. quickstart.sh runs this.

    python scripts/quickstart.py --preset small --num-steps 20 --results runs/today

Options that aren't listed here go to all four training scripts. Without a preset they train the small one on a GPU and
a very small model on a CPU. A version whose losses or gradients differ from version 1's gets no speed.
Exit status: 0; 1 if a version fails or disagrees; 2 for a bad option; 130 when interrupted.
"""

import importlib.util
import os
import shlex
import sys
import tempfile

from common.command_line import Failure, Parser, on_cpu, result_folder, run_tool
from common.measuring.accuracy import Reference, outcome, same_loss, verdict
from common.measuring.runs import train
from common.tables import columns, text_table
from common.versions import REPOSITORY, SCRIPTS, load_version

# On two CPU cores, with version 3's kernels in Triton's interpreter, all of it takes about two minutes.
CPU_SIZES = "--hidden-dim 64 --num-layers 2 --num-heads 4 --seq-len 64 --batch-size 2 --vocab-size 256 --num-steps 20"
LOSSES_COMPARED = 10  # steps; later losses carry every rounding before them, and training amplifies it
# Version 3's kernels are written in Triton, which has packages for Linux only.
VERSIONS = [version for version in SCRIPTS if version != 3 or importlib.util.find_spec("triton")]
COLUMNS = (
    "version: {name} | loss: {first_loss:.4f} -> {final_loss:.4f} | step ms: {step:.2f} | "
    "{phases}runs: {runs} | samples/s: {samples_per_second:,.1f} | "
    "tokens/s: {tokens_per_second:,.0f} | peak MiB: {peak_memory_mb:,.0f} | speed: {speed} | trained: {trained:.0%}"
)
PHASES = "fwd / bwd / opt ms: {phases} | "  # on a CPU, in steps of a few milliseconds, they are noise
SPEEDS = ("step", "phases", "runs", "samples_per_second", "tokens_per_second", "peak_memory_mb", "speed")


def parse_arguments(argv):
    """Return (folder for the metrics files or None, options for the training scripts)."""
    parser = Parser("quickstart", __doc__, with_json=False)
    parser.add_argument("--results", metavar="FOLDER", help="keep the metrics files v1.json ... there")
    parser.add_argument("--data", default=os.path.dirname(os.__file__), help="text to train on (%(default)s)")
    arguments, rest = parser.parse_known_args(argv)
    sizes = ["--preset", "small"]  # a later --preset takes its place
    if on_cpu(rest) and not any(word.startswith("--preset") for word in rest):
        sizes = CPU_SIZES.split()
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # so small a model only waits for a second thread
    return arguments.results, [*sizes, "--data", arguments.data, *rest]


def check_options(argv):
    """Return version 1's options if all versions accept theirs and the data can be read."""
    first, *_ = [load_version(version).parse_options(argv) for version in VERSIONS]
    try:
        load_version(1).load_data(first)
    except load_version(1).UserError as error:
        raise Failure(2, f"error: {error}") from None
    return first


def train_version(version, argv, metrics):
    """Run one training script and show its steps; return its metrics, or None where it failed."""
    slowly = ""
    if version == 3 and on_cpu(argv):
        slowly = " in Triton's interpreter, which is slow"
    print(f"V{version}  {SCRIPTS[version].parent.name}: training{slowly}", flush=True)
    output = []

    def tell(line):
        output.append(line)
        if line.startswith("step") or line.strip().startswith("warm-up"):
            print(f"V{version}  {line}", end="", flush=True)

    try:
        return train(SCRIPTS[version], argv, tell=tell, keep=metrics)
    except Failure as error:
        print("".join(output[-20:]), end="", file=sys.stderr)
        print(f"V{version}  {error}", file=sys.stderr, flush=True)
        return None


def first_fault(found):
    """Return (the fault or None, a sentence with the worst gradient) of a verdict on a version's first batch."""
    worst = found["worst_of_each_kind"]["gradient"]
    sentence = f"relative error {worst['error']:.1e} of the gradient of {worst['name']}, allowed {worst['bound']:.1e}"
    if found["passed"]:
        return None, sentence
    if worst["error"] > worst["bound"]:
        return sentence, sentence
    kind = found["worst"]["kind"]
    return f"the first {kind} is off by {found['worst']['error']:.1e}, allowed {found['worst']['bound']:.1e}", sentence


def compare_training(run, first, bound):
    """Return the first difference of a run's metrics from those of version 1's run, or None."""
    summary = run["summary"]
    if summary["parameters_trained"] != summary["parameters"]:
        return f"only {summary['parameters_trained']:,} of {summary['parameters']:,} parameters are trained"
    for step, wanted in list(zip(run["steps"], first["steps"], strict=True))[:LOSSES_COMPARED]:
        if not same_loss(step["loss"], wanted["loss"], bound):
            return f"the loss of step {step['step'] + 1} is {step['loss']:.6f} instead of {wanted['loss']:.6f}"
    return None


def check_agreement(argv, runs):
    """Return {version: its fault or None}, and print a line for each but the first."""
    print("Comparing losses and gradients, from the same weights on the same batch", flush=True)
    reference = Reference(argv)
    problems = {}
    for version, run in runs.items():
        computed = reference.own if version == 1 else outcome(load_version(version), argv, steps=0)
        problem, sentence = first_fault(verdict(reference.compare(computed)))
        problem = problem or compare_training(run, runs[1], reference.loss_bound)
        problems[version] = problem
        if problem:
            print(f"V{version}  disagrees: {problem}", flush=True)
        elif version > 1:
            print(f"V{version}  agrees: {sentence}", flush=True)
    return problems


def table_row(version, run, first_ms, problem):
    """Return a row of the table; of a version that disagrees without what says how fast it is."""
    summary = run["summary"]
    step = summary["step_ms"]["median"]
    phases = [summary[f"{phase}_ms"] for phase in ("forward", "backward", "optimizer")]
    row = summary | {
        "name": f"V{version} {SCRIPTS[version].parent.name.split('_', 1)[1]}",
        "step": step,
        "phases": None if None in phases else " / ".join(f"{phase:.2f}" for phase in phases),
        "runs": "graph" if summary["graph"]["captured"] else "eager",
        "speed": f"{first_ms / step:.2f}x",
        "trained": summary["parameters_trained"] / summary["parameters"],
    }
    return row | dict.fromkeys(SPEEDS if problem else ())


def print_table(options, runs, problems):
    first = runs[1]["summary"]
    machine = runs[1]["environment"]
    first_ms = first["step_ms"]["median"]
    rows = {version: table_row(version, run, first_ms, problems[version]) for version, run in runs.items()}
    interpreted = 3 in runs and machine["device_type"] == "cpu"
    if interpreted:
        rows[3]["speed"] = None
    template = COLUMNS.replace("{phases}", PHASES if machine["device_type"] == "cuda" else "")
    print(
        f"\n{text_table(*columns(template, rows.values()))}\n\n"
        f"{machine['device']}, PyTorch {machine['torch']}, {first['precision']}; step: median of "
        f"{len(runs[1]['steps'])}, after warm-up; speed: V1's step / this step; data: {options.data}"
    )
    if interpreted:
        print("V3's kernels ran in Triton's interpreter, which needs no GPU: its times mean nothing.")


def quickstart(results, argv):
    """Train, check, compare; return the exit status."""
    options = check_options(argv)
    if 3 not in VERSIONS:
        print("V3  passed over: its kernels need Triton, which is not installed (it exists for Linux only)", flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        folder = result_folder(results or temporary, "--results").resolve()
        runs = {version: train_version(version, argv, folder / f"v{version}.json") for version in VERSIONS}
    trained = {version: run for version, run in runs.items() if run}
    if 1 not in trained:
        return 1
    problems = check_agreement(argv, trained)
    print_table(options, trained, problems)
    if wrong := [f"V{version}" for version in VERSIONS if problems.get(version, "failed")]:
        print(f"{' and '.join(wrong)} failed or disagreed with V1, as said above.", file=sys.stderr)
        return 1
    print(f"All {'four' if len(VERSIONS) == 4 else 'three'} versions compute the same losses and gradients.")
    print_next_step()
    return 0


def print_next_step():
    """Print how to activate the environment and the command that opens the first version."""
    folder = SCRIPTS[1].parent.name
    script = SCRIPTS[1].name
    print(f"\nNext:\n    cd {shlex.quote(str(REPOSITORY))}")
    if sys.prefix != sys.base_prefix:
        print(f"    source {shlex.quote(os.path.relpath(sys.prefix, REPOSITORY))}/bin/activate")
    print(f"    python {folder}/{script} --preset tiny\nand read {folder}/README.md")


def main(argv=None):
    return run_tool("quickstart", lambda: quickstart(*parse_arguments(argv)))


if __name__ == "__main__":
    sys.exit(main())
