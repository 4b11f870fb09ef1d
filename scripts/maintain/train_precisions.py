"""Train version 3 on real text in bfloat16, fp8 and TF32, to see what fewer bits do to the loss.

    python scripts/maintain/train_precisions.py --make-text text.tar.xz
    python scripts/maintain/train_precisions.py --text text.tar.xz --results losses --time-limit 560

Each precision runs once per seed, and bfloat16 once more from nudged weights: every initial weight moves by one unit in
the last place of bfloat16, in a random direction. All four runs of a seed start from that seed's weights and see the
same batches, so you can compare their losses in pairs. The nudged run shows what any rounding does in the long run.

Every run writes its own file: the curve, the training loss (mean of the last 100 steps) and the loss on the held-out
text, in the run's precision. If --time-limit ends it, the same command trains what is missing. Without --text it
collects the text from the installed packages, as --make-text does. Other options go to version 3. By default it trains
2,000 steps of --preset medium, or on a CPU four steps of a very small model.
Exit status: 0; 1 if a run fails or runs are left; 2 for a bad option or results that don't belong together.
"""

import contextlib
import hashlib
import pathlib
import statistics
import sys
import tempfile
import time

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from common.command_line import (
    PRECISIONS,
    Failure,
    Parser,
    add_time_limit,
    on_cpu,
    positive,
    progress,
    result_folder,
    with_sizes,
)
from common.machine import describe, hash_of
from common.versions import SCRIPTS, load_version
from maintain import corpus
from maintain.losses import LAST, POINT, VARIANTS, check_same, path_of, read_complete, read_run, table, write_run

OWN = ("--seed", "--data", "--use-amp", "--amp-dtype", "--tf32", "--fp8", "--device", "--parallel", "--resume")
BYTES = 256  # tokens: one per byte
ULP = 1 << 16  # of bfloat16, in the bits of a float32
NUDGE_SEED = 1_000_000  # plus the run's seed: other random numbers than the weights'
# Triton's interpreter has no bfloat16 dot.
ON_CPU = ["--disable-attention-kernel", "--warmup-steps", "1", "--num-steps", "4"]
ON_GPU = ["--preset", "medium", "--num-steps", "2000"]
SEEDS = {"cpu": 2, "cuda": 5}
HELD_OUT_BATCHES = {"cpu": 2, "cuda": 128}
TEXT_BYTES = {"cpu": 200_000, "cuda": corpus.ENOUGH}

# ---------------------------------------------------------------- weights and text


def initial_weights(script, config):
    """Return the version's initial weights of config.seed, {name: float32 tensor on the CPU}."""
    import torch

    with torch.device("cpu"):
        model = script.make_model(config)
    script.initialize(model, config)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def nudged(weights, seed):
    """Return the weights, each moved by one unit in the last place of bfloat16, up or down in magnitude at random."""
    import torch

    generator = torch.Generator().manual_seed(NUDGE_SEED + seed)
    moved = {}
    for name, weight in weights.items():
        bits = weight.view(torch.int32)
        up = torch.randint(2, weight.shape, generator=generator, dtype=torch.bool)
        up |= (bits & 0x7FFFFFFF) < ULP  # a smaller magnitude does not exist
        moved[name] = torch.where(up, bits + ULP, bits - ULP).view(torch.float32)
    return moved


class HashedText:
    """Draw from a version's text, and hash what is drawn."""

    def __init__(self, data):
        self.data = data
        self.sha256 = hashlib.sha256()

    def draw(self, rng, rows):
        windows = self.data.draw(rng, rows)
        self.sha256.update(windows.tobytes())
        return windows


def fixed_windows(data, config, batches):
    """Return batches of windows, int64 [batches, B, T + 1], that begin at even distances in a version's text."""
    import torch

    rows = batches * config.batch_size
    starts = np.linspace(0, len(data.bytes) - config.seq_len - 1, rows).astype(np.int64).reshape(rows, 1)
    windows = data.bytes[starts + np.arange(config.seq_len + 1)].astype(np.int64)
    return torch.from_numpy(windows).view(batches, config.batch_size, config.seq_len + 1)


# ---------------------------------------------------------------- training


class WarmTrainer:
    """Hold a version's trainer in one precision, compiled and captured once for all seeds."""

    def __init__(self, script, argv, precision, files, held_out_batches):
        self.script = script
        self.options = script.parse_options([*argv, *PRECISIONS[precision], "--data", str(files["train"])])
        script.set_up_backend(self.options)
        self.data = script.load_data(self.options)
        self.trainer = script.Trainer(self.options)
        seconds = self.trainer.warm_up(*script.batch(self.data, 0, self.options), self.trainer.initial)
        way = "in a graph" if self.trainer.graph else f"eager ({self.trainer.graph_reason})"
        progress(f"{precision}: {seconds:.0f} s of warm-up, {way}")
        held_out = script.parse_options([*argv, *PRECISIONS[precision], "--data", str(files["held_out"])])
        self.windows = fixed_windows(script.load_data(held_out), held_out, held_out_batches)

    def train(self, seed, nudge):
        """Train from the initial weights of a seed on its batches; return what a result says of it."""
        self.script.set_up_backend(self.options)  # the other trainers have other settings
        self.options.seed = seed
        weights = initial_weights(self.script, self.options)
        if nudge:
            weights = nudged(weights, seed)
        self.trainer.restore({**self.trainer.initial, "tensors": weights})
        text = HashedText(self.data)
        records = []
        with contextlib.redirect_stdout(sys.stderr):
            self.script.train(self.trainer, text, 0, records)
        losses = [record["loss"] for record in records]
        return {
            "batches_sha256": text.sha256.hexdigest(),
            "captured": self.trainer.graph is not None,
            "step_ms": statistics.median(record["step_ms"] for record in records),
            "first_loss": losses[0],
            "training_loss": statistics.fmean(losses[-LAST:]),
            "held_out_loss": self.held_out_loss(),
            "curve": [round(statistics.fmean(losses[i : i + POINT]), 5) for i in range(0, len(losses), POINT)],
        }

    def held_out_loss(self):
        """Return the mean loss of the held-out windows, computed by the version in the precision of the run."""
        import torch

        losses = []
        with torch.no_grad():
            for windows in self.windows.to(self.options.device):
                tokens = windows[:, :-1].contiguous()
                labels = windows[:, 1:].contiguous()
                loss = self.script.compute_loss(self.trainer.model, tokens, labels, self.options)
                losses.append(loss.item())
        return statistics.fmean(losses)


class Study:
    """Train the runs that a folder lacks."""

    def __init__(self, script, argv, text, options):
        self.script = script
        self.argv = argv
        self.text = text
        self.options = options
        self.folder = result_folder(options.results, "--results")
        for precision in VARIANTS.values():  # refuse what this device cannot do before anything is trained
            config = script.parse_options([*argv, *PRECISIONS[precision]])
        self.common = {
            "record": describe(["train_precisions.py", *options.command]),
            "script_sha256": hash_of(SCRIPTS[3]),
            "settings": {
                "preset": config.preset,
                "steps": config.num_steps,
                "batch_size": config.batch_size,
                "seq_len": config.seq_len,
                "seeds": options.seeds,
                "held_out_tokens": options.held_out_batches * config.batch_size * config.seq_len,
                "options": argv,
            },
            "text": text.about,
        }
        self.trainers = {}
        self.took = {}  # variant -> seconds of its longest run

    def kept(self, variant, seed):
        """Return whether a run is there already, of the same settings, text, commit and kind of machine."""
        path = path_of(self.folder, variant, seed)
        if not path.exists():
            return False
        run = read_run(path)
        check_same(run, self.common, path)
        self.note(variant, run["seconds"])
        return True

    def note(self, variant, seconds):
        self.took[variant] = max(seconds, self.took.get(variant, 0))

    def expected_seconds(self, variant):
        """Return how long a run will take: as long as its longest, or as the longest of all where there was none."""
        return self.took.get(variant, max(self.took.values(), default=0))

    def trainer(self, precision, files):
        if precision not in self.trainers:
            arguments = (self.script, self.argv, precision, files, self.options.held_out_batches)
            self.trainers[precision] = WarmTrainer(*arguments)
        return self.trainers[precision]

    def run(self, variant, seed, files):
        """Train one run and write its file."""
        trainer = self.trainer(VARIANTS[variant], files)
        start = time.monotonic()
        found = trainer.train(seed, nudge=variant == "nudged")
        seconds = round(time.monotonic() - start, 1)
        self.note(variant, seconds)
        write_run({**self.common, "variant": variant, "seed": seed, "seconds": seconds, **found}, self.folder)
        losses = f"training loss {found['training_loss']:.4f}, held-out loss {found['held_out_loss']:.4f}"
        progress(f"{variant}, seed {seed}: {losses}, {found['step_ms']:.2f} ms a step, {seconds:.0f} s")

    def measure(self, end):
        """Train what is missing until the time `end`, seed by seed; return how many runs are left."""
        runs = [(variant, seed) for seed in range(self.options.seeds) for variant in VARIANTS]
        missing = [run for run in runs if not self.kept(*run)]
        with tempfile.TemporaryDirectory() as place, stream_of(self.script, self.argv):
            files = {name: pathlib.Path(place, f"{name}.txt") for name in ("train", "held_out")}
            for name, path in files.items():
                path.write_bytes(getattr(self.text, name))
            for number, (variant, seed) in enumerate(missing):
                if time.monotonic() + self.expected_seconds(variant) > end:
                    return len(missing) - number
                try:
                    self.run(variant, seed, files)
                except Exception as error:
                    status, message = self.script.user_message(error)
                    if message is None:
                        raise
                    raise Failure(status, f"{variant}, seed {seed}: {message}") from None
        return 0


def stream_of(script, argv):
    """Return a context with one stream for everything, which a graph needs; on a CPU one that does nothing."""
    import torch

    if not script.parse_options(argv).on_gpu:
        return contextlib.nullcontext()
    return torch.cuda.stream(torch.cuda.Stream())


# ---------------------------------------------------------------- the tool


def options_of(rest, device):
    """Return the options for version 3: the defaults, those given, and a token for every byte."""
    for word in rest:
        if word.split("=")[0] in OWN:
            raise Failure(2, f"{word} is chosen by this tool for each run: leave it out")
    argv = [*(ON_CPU if device == "cpu" else ON_GPU), *with_sizes(rest)]
    if load_version(3).parse_options(argv).vocab_size < BYTES:
        argv += ["--vocab-size", str(BYTES)]
    return argv


def work(options, rest):
    began = time.monotonic()
    device = "cpu" if on_cpu(rest) else "cuda"
    options.command = [word.rsplit("/", 1)[-1] for word in options.command]  # without the folders of this machine
    enough = options.text_bytes or TEXT_BYTES[device]
    if options.make_text:
        text = corpus.collect(enough=options.text_bytes or corpus.ENOUGH)
        corpus.write(text, options.make_text)
        size = pathlib.Path(options.make_text).stat().st_size
        print(f"{corpus.described(text.about)}; {options.make_text}: {size:,} bytes")
        return 0
    argv = options_of(rest, device)
    options.seeds = options.seeds or SEEDS[device]
    options.held_out_batches = options.held_out_batches or HELD_OUT_BATCHES[device]
    text = corpus.read(options.text) if options.text else corpus.collect(enough=enough)
    progress(corpus.described(text.about))
    study = Study(load_version(3), argv, text, options)
    end = began + (float("inf") if options.time_limit is None else options.time_limit)
    left = study.measure(end)
    if left:
        progress(f"{left} runs are left: repeat the command")
        return 1
    print(table(read_complete(study.folder)))
    return 0


def main(argv=None):
    parser = Parser("train_precisions.py", __doc__, with_json=False)
    parser.add_argument("--results", metavar="DIR", default=".", help="folder of the results (%(default)s)")
    parser.add_argument("--text", metavar="FILE", help="text that --make-text wrote (collect it now)")
    parser.add_argument("--make-text", metavar="FILE", help="collect the text, write it packed, and train nothing")
    words = "size of the text to collect (20,000,000; on a CPU 200,000 to train)"
    parser.add_argument("--text-bytes", type=positive, metavar="N", help=words)
    parser.add_argument("--seeds", type=positive, metavar="N", help="runs of each kind, from seed 0 on (5; on a CPU 2)")
    words = "batches of held-out windows (128; on a CPU 2)"
    parser.add_argument("--held-out-batches", type=positive, metavar="N", help=words)
    add_time_limit(parser)
    parser.set_defaults(command=list(sys.argv[1:] if argv is None else argv))
    return parser.run(work, argv, passes_on=True)


if __name__ == "__main__":
    sys.exit(main())
