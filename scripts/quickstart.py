"""Train the four versions alike, check that they compute the same, and compare their speed: what quickstart.sh runs.

    python scripts/quickstart.py --preset small --num-steps 20 --results runs/today

Options that are not listed here go to all four training scripts; without a preset these take the small one on a GPU
and a very small model on a CPU. No speed is shown for a version whose losses or gradients are not version 1's.
Exit status: 0; 1 where a version fails or disagrees; 2 for a bad option; 130 when interrupted.
"""

import importlib.util
import json
import os
import shlex
import subprocess
import sys
import tempfile

import torch

from common.command_line import Failure, Parser, on_cpu, result_folder, run_tool
from common.tables import columns, text_table
from common.versions import REPOSITORY, SCRIPTS, load_version, loss_and_gradients, prepare, relative_error

# On two CPU cores, with version 3's kernels in Triton's interpreter, all of it takes about a minute.
CPU_SIZES = "--hidden-dim 64 --num-layers 2 --num-heads 4 --seq-len 64 --batch-size 2 --vocab-size 256 --num-steps 20"
LOSSES_COMPARED = 10  # steps; later losses carry every rounding before them, and training amplifies it
LOSS_BOUND = 1e-4  # relative, float32
GRADIENT_FLOOR = {"cpu": 1e-6, "cuda": 1e-5}  # relative; on a GPU libraries add in another order
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
    if "--metrics-file" in rest:
        parser.error("--metrics-file is one for each version: name a folder with --results")
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


def train(version, argv, metrics):
    """Run one training script in a process of its own; return its metrics, or None where it failed."""
    print(f"V{version}  {SCRIPTS[version].parent.name}: training", flush=True)
    command = [sys.executable, "-u", str(SCRIPTS[version]), *argv, "--metrics-file", str(metrics)]
    output = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        for line in process.stdout:
            output.append(line)
            if line.startswith("step"):
                print(f"V{version}  {line}", end="", flush=True)
    if process.returncode == 0:
        return json.loads(metrics.read_text())
    print("".join(output[-20:]), end="", file=sys.stderr)
    print(f"V{version}  failed with exit status {process.returncode}", file=sys.stderr, flush=True)
    return None


def exact_gradients(argv):
    """Return version 1's loss and gradients in float64, from one sequence at a time: float64 takes twice the memory."""
    script = load_version(1)
    trainer, data = prepare(script, argv, full_precision=True)
    model, device = trainer.model.double(), trainer.config.device
    tokens, labels = (tensor.to(device) for tensor in script.batch(data, 0, trainer.config))
    total = 0.0
    for row in range(len(tokens)):
        loss = script.compute_loss(model, tokens[row : row + 1], labels[row : row + 1], trainer.config) / len(tokens)
        loss.backward()
        total += loss.item()
    return total, {name: p.grad.cpu() for name, p in model.named_parameters()}


class Reference:
    """Hold version 1's first loss and gradients in float64, and how far from them those of a version may be.

    A gradient may be twice as far from them as version 1's in the run's precision is, and in 16 bits one rounding more,
    for it may be kept in them. A loss, a mean whose own distance may vanish by chance, may be off by one unit in the
    last place of a lower precision, or by LOSS_BOUND.
    """

    def __init__(self, options, argv):
        self.loss, self.gradients = exact_gradients(argv)
        self.version_1 = loss_and_gradients(1, argv)
        self.loss_bound, rounding = LOSS_BOUND, GRADIENT_FLOOR[torch.device(options.device).type]
        if options.use_amp or options.tf32:
            # TF32 keeps as many bits as float16.
            self.loss_bound = torch.finfo(getattr(torch, options.amp_dtype) if options.use_amp else torch.float16).eps
        if options.use_amp:
            rounding += self.loss_bound / 2
        errors = {name: relative_error(self.version_1[1][name], wanted) for name, wanted in self.gradients.items()}
        self.bounds = {name: 2 * error + rounding for name, error in errors.items()}

    def check(self, loss, gradients):
        """Return (the fault or None, a sentence with the largest error) of a version's first loss and gradients."""
        if missing := [name for name in self.gradients if name not in gradients]:
            return f"{len(missing)} weights get no gradient, {missing[0]} for one", ""
        if not abs(loss - self.loss) <= self.loss_bound * self.loss:
            return f"the first loss is {loss:.6f} instead of {self.loss:.6f}", ""
        errors = {name: relative_error(gradients[name], wanted) for name, wanted in self.gradients.items()}
        worst = max(errors, key=lambda name: errors[name] / self.bounds[name])
        found = f"relative error {errors[worst]:.1e} of the gradient of {worst}, allowed {self.bounds[worst]:.1e}"
        return (None if errors[worst] <= self.bounds[worst] else found), found


def compare_training(run, first, bound):
    """Return the first difference of a run's metrics from those of version 1's run, or None."""
    summary = run["summary"]
    if summary["parameters_trained"] != summary["parameters"]:
        return f"only {summary['parameters_trained']:,} of {summary['parameters']:,} parameters are trained"
    for step, wanted in list(zip(run["steps"], first["steps"], strict=True))[:LOSSES_COMPARED]:
        if not abs(step["loss"] - wanted["loss"]) <= bound * abs(wanted["loss"]):
            return f"the loss of step {step['step'] + 1} is {step['loss']:.6f} instead of {wanted['loss']:.6f}"
    return None


def check_agreement(options, argv, runs):
    """Return {version: its fault or None}, and print a line for each but the first."""
    print("Comparing losses and gradients, from the same weights on the same batch", flush=True)
    reference, problems = Reference(options, argv), {}
    for version, run in runs.items():
        problem, found = reference.check(*(reference.version_1 if version == 1 else loss_and_gradients(version, argv)))
        problem = problems[version] = problem or compare_training(run, runs[1], reference.loss_bound)
        if version > 1 or problem:
            print(f"V{version}  {f'disagrees: {problem}' if problem else f'agrees: {found}'}", flush=True)
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
    first, machine = runs[1]["summary"], runs[1]["environment"]
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
        runs = {version: train(version, argv, folder / f"v{version}.json") for version in VERSIONS}
    trained = {version: run for version, run in runs.items() if run}
    if 1 not in trained:
        return 1
    problems = check_agreement(options, argv, trained)
    print_table(options, trained, problems)
    if wrong := [f"V{version}" for version in VERSIONS if problems.get(version, "failed")]:
        print(f"{' and '.join(wrong)} failed or disagreed with V1, as said above.", file=sys.stderr)
        return 1
    print(f"All {'four' if len(VERSIONS) == 4 else 'three'} versions compute the same losses and gradients.")
    print_next_step()
    return 0


def print_next_step():
    """Print how to activate the environment and the command that opens the first version."""
    folder, script = SCRIPTS[1].parent.name, SCRIPTS[1].name
    print(f"\nNext:\n    cd {shlex.quote(str(REPOSITORY))}")
    if sys.prefix != sys.base_prefix:
        print(f"    source {shlex.quote(os.path.relpath(sys.prefix, REPOSITORY))}/bin/activate")
    print(f"    python {folder}/{script} --preset tiny\nand read {folder}/README.md")


def main(argv=None):
    return run_tool("quickstart", lambda: quickstart(*parse_arguments(argv)))


if __name__ == "__main__":
    sys.exit(main())
