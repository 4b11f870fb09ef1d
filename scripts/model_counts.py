#!/usr/bin/env python3
"""Parameters, FLOPs, bytes, kept activations and launches of every part of a training step, as formulas and numbers.

    python scripts/model_counts.py --preset small --version 3 --precision bfloat16
    python scripts/model_counts.py --version 1 --seq-len 1024 --json counts.json
    python scripts/model_counts.py --markdown                 # the tables of TINY_LLAMA_ARCHITECTURE.md
    python scripts/model_counts.py --write                    # put them between the markers of that page
    python scripts/model_counts.py --check                    # does the page say what the scripts do?

No formula is typed here. One step of the version's own script runs on the CPU with sizes that are products of primes of
their own, so that the number of elements of every tensor tells its dimensions: 221 = 13 · 17 is B · T and nothing else.
The operators that run are added up as polynomials in the letters of the scripts' docstrings, and these are evaluated
for the sizes asked for. Triton kernels are noted instead of run.

flops       of matrix products, 2 for a multiply-add; of attention kernels the causal half of the square
operations  of everything else: one for each element of the largest operand (as version 1 computes in float32)
bytes       every operator reads its operands once and writes its results once; a cache may save some of it
kept        bytes that the backward needs of the forward, each storage once, parameters and tables left out
launches    operators that compute; PyTorch's may take more than one kernel each, a Triton kernel is one

Version 4 is counted without torch.compile, and gradient scaling (float16) is left out.

Exit status: 0; 1 where --check finds a difference; 2 for a bad option or a file that cannot be read or written.
"""

import contextlib
import dataclasses
import difflib
import functools
import inspect
import pathlib
import sys
from collections import Counter, defaultdict
from fractions import Fraction
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from common.analysis import Parser, emit, markdown_table, text_table
from common.command_line import Failure, add_version_option, run_tool, version_meant
from common.provenance import machine_line
from common.records import PRECISIONS, Record, newest_record
from common.versions import REPOSITORY, SCRIPTS, load_version

PAGE = REPOSITORY / "TINY_LLAMA_ARCHITECTURE.md"
PARTS = (
    "embedding", "norms and residual", "QKV projection", "RoPE", "attention", "output projection", "gate and up",
    "SwiGLU", "down projection", "output head", "cross-entropy", "AdamW",
)  # fmt: skip
PHASES = ("forward", "backward")
PRECISION_OPTIONS = {
    "float32": [],
    "tf32": ["--tf32"],
    "bfloat16": ["--use-amp", "--amp-dtype", "bfloat16"],
    "float16": ["--use-amp", "--amp-dtype", "float16"],
}
# Data sheets, TB/s of a GPU as PyTorch sees it: MI250X is one of its two dies. Peaks stand in the scripts' PEAK_TFLOPS.
BANDWIDTH_TB_S = {"MI300X": 5.3, "H200": 4.8, "MI250X": 1.638}

# ---------------------------------------------------------------- formulas

LETTERS = "LBTCHKDFV"


class Formula:
    """A polynomial in the letters of the model's sizes. terms: sorted letters -> coefficient."""

    def __init__(self, terms=None):
        self.terms = {letters: c for letters, c in (terms or {}).items() if c}

    @classmethod
    def of(cls, coefficient, letters=""):
        """One term, with C for every H · D."""
        pairs = min(letters.count("H"), letters.count("D"))
        letters = letters.replace("H", "", pairs).replace("D", "", pairs) + "C" * pairs
        return cls({"".join(sorted(letters, key=LETTERS.index)): Fraction(coefficient)})

    def __add__(self, other):
        total = Counter(self.terms)
        for letters, coefficient in other.terms.items():
            total[letters] += coefficient
        return Formula(total)

    def __sub__(self, other):
        return self + other * -1

    def __mul__(self, other):
        other = other if isinstance(other, Formula) else Formula.of(other)
        product = Formula()
        for ours, c in self.terms.items():
            for theirs, d in other.terms.items():
                product += Formula.of(c * d, ours + theirs)
        return product

    def __eq__(self, other):
        return self.terms == other.terms

    def __bool__(self):
        return bool(self.terms)

    def at(self, sizes):
        """The value for {letter: size}, a whole number wherever it counts something."""
        value = Fraction(0)
        for letters, coefficient in self.terms.items():
            for letter in letters:
                coefficient *= sizes[letter]
            value += coefficient
        return int(value) if value.denominator == 1 else float(value)

    def written(self, power="^{}"):
        """The formula as text, for example 4BTC + 2BHT^2; highest powers first."""
        ordered = sorted(self.terms.items(), key=lambda item: (-len(item[0]), [LETTERS.index(x) for x in item[0]]))
        return " + ".join(term(coefficient, letters, power) for letters, coefficient in ordered) or "0"


def term(coefficient, letters, power):
    counts = {letter: letters.count(letter) for letter in dict.fromkeys(letters)}
    text = "".join(letter + (power.format(n) if n > 1 else "") for letter, n in counts.items())
    number = "" if coefficient == 1 and text else str(coefficient)
    return number + text


# Each size has a prime of its own. H = 3 K, so that H + 2K = 5 K; D = 2 · 11, because rotary embeddings turn pairs.
PRIME_SIZES = {"B": 13, "T": 17, "K": 7, "H": 21, "D": 22, "F": 19, "V": 23}
PRIME_OPTIONS = (
    "--batch-size 13 --seq-len 17 --num-kv-heads 7 --num-heads 21 --hidden-dim 462 --intermediate-dim 19 "
    "--vocab-size 23 --device cpu --no-graph"
).split()


@functools.cache
def factored(number):
    """The product of sizes that a number of elements is; ValueError where it is none."""
    if number < 1:
        raise ValueError(f"{number} elements are no product of the model's sizes")
    powers, rest = {}, number
    for prime in (2, 3, 5, 7, 11, 13, 17, 19, 23):
        powers[prime] = 0
        while rest % prime == 0:
            rest //= prime
            powers[prime] += 1
    heads = powers[7] - powers[3] - powers[5]
    if rest != 1 or heads < 0:
        raise ValueError(f"{number} elements are no product of the model's sizes")
    powers |= {"H": powers[3], "K": heads}
    letters = "".join(
        letter * powers[prime] for letter, prime in zip("BTFVDHK", (13, 17, 19, 23, 11, "H", "K"), strict=True)
    )
    formula = Formula.of(Fraction(2) ** (powers[2] - powers[11]), letters)
    for _ in range(powers[5]):
        formula = formula * (Formula.of(1, "H") + Formula.of(2, "K"))
    return formula


def elements(tensor):
    """Distinct elements of a tensor: those of an expanded dimension exist once."""
    number = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        number *= size if stride else 1
    return factored(number)


def total_bytes(tensors):
    total = Formula()
    for tensor in tensors:
        total += elements(tensor) * tensor.element_size()
    return total


# ---------------------------------------------------------------- one step, looked at


@dataclasses.dataclass
class Counts:
    """What a part does in a phase."""

    flops: Formula = dataclasses.field(default_factory=Formula)
    operations: Formula = dataclasses.field(default_factory=Formula)
    bytes: Formula = dataclasses.field(default_factory=Formula)
    launches: Formula = dataclasses.field(default_factory=Formula)
    kept: Formula = dataclasses.field(default_factory=Formula)

    def combined(self, other, times):
        """self + times · other; times is a number or a formula."""
        names = [field.name for field in dataclasses.fields(self)]
        return Counts(*(getattr(self, name) + getattr(other, name) * times for name in names))


RANGES = {
    "qkv projection": "QKV projection", "rope": "RoPE", "attention": "attention", "feed-forward": "feed-forward",
    "output projection": "output projection", "rms norm": "norms and residual", "output head": "output head",
    "loss": "cross-entropy", "embedding": "embedding", "gate and up projection": "gate and up",
}  # fmt: skip
MODULES = {
    "embed_tokens": "embedding", "gate_proj": "gate and up", "up_proj": "gate and up", "gate_up_proj": "gate and up",
    "down_proj": "down projection",
}  # fmt: skip
NO_LAUNCH = "empty empty_like empty_strided new_empty new_empty_strided _unsafe_view lift_fresh".split()
ONLY_MOVES = "_to_copy copy_ clone cat embedding zero_ fill_ ones ones_like zeros zeros_like triu repeat".split()
ONLY_WRITES = ("copy_", "_foreach_copy_", "zero_", "fill_")  # their first argument
# Products over the causal half of the scores in one launch.
ATTENTION_PRODUCTS = {
    "attention_forward_kernel": 2,
    "attention_backward_dq_kernel": 3,
    "attention_backward_dkdv_kernel": 4,
    "_scaled_dot_product_flash_attention_for_cpu": 2,
    "_scaled_dot_product_flash_attention_for_cpu_backward": 5,
}


def tensors_in(arguments):
    return [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, torch.Tensor)]


def operator_bytes(function, args, kwargs, results):
    """Bytes of every operand that is read and of every result or operand that is written."""
    name = function.overloadpacket.__name__
    if name == "embedding":  # of the table only the rows that the tokens name
        return total_bytes([args[1], *results, *results])
    reads = tensors_in((args[name in ONLY_WRITES :], kwargs))
    written = []
    for declared, value in zip(function._schema.arguments, args, strict=False):
        # The fused optimizer declares that it may unscale gradients in place; without a scaler it does not.
        if declared.alias_info is not None and declared.alias_info.is_write and declared.name != "grads":
            written += tensors_in(value)
    return total_bytes(reads) + total_bytes(written or results)


class Collector(TorchDispatchMode):
    """A mode that adds up, for each part and phase, the operators that run inside it."""

    def __init__(self):
        super().__init__()
        self.counts, self.stack, self.ranges = defaultdict(Counts), [], []
        self.start()
        self.host_scalars = False  # whether what touches scalars alone happens on the host

    @contextlib.contextmanager
    def inside(self, part):
        """Everything in here, and the backward of it, belongs to the part."""
        start = torch.autograd._get_sequence_nr()
        self.stack.append(part)
        try:
            yield
        finally:  # a checkpoint leaves its second forward by an exception
            self.stack.pop()
            self.ranges.append((start, torch.autograd._get_sequence_nr(), part))

    def part(self, name):
        """The part that runs now: told by ranges, in the backward by those in which its node was made."""
        if self.phase == "optimizer":
            return "AdamW"
        if self.phase == "forward":
            found = self.stack[-1] if self.stack else None
        else:
            node = torch._C._current_autograd_node()
            number = -1 if node is None else node._sequence_nr()
            around = [(end - start, part) for start, end, part in self.ranges if start <= number < end]
            if not around and (node is None or "AccumulateGrad" in node.name()):
                return self.last  # sums of gradients belong to what ran before them
            found = min(around)[1] if around else None
        found = found or "norms and residual"  # the residual additions stand between the ranges
        # A checkpoint computes the input of the down projection once more, in that one's backward.
        if found == "feed-forward" or found == "down projection" and self.phase == "backward":
            found = "down projection" if name in ("mm", "bmm", "addmm") else "SwiGLU"
        self.last = found
        return found

    def start(self):
        """Forget what was added so far."""
        self.counts.clear()
        self.ranges.clear()
        self.phase, self.last = "forward", "cross-entropy"

    def add(self, name, moved, flops=None, operations=None):
        phase = "backward" if self.phase == "optimizer" else self.phase
        key = (self.part(name), phase)
        done = Counts(flops or Formula(), operations or Formula(), moved, Formula.of(1))
        self.counts[key] = self.counts[key].combined(done, 1)

    def keep(self, formula):
        key = (self.part("keep"), "forward")
        self.counts[key] = self.counts[key].combined(Counts(kept=formula), 1)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        results = function(*args, **(kwargs or {}))
        name, schema = function.overloadpacket.__name__, function._schema
        view = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
        outputs = tensors_in(results)
        everything = [tensor for tensor in (*tensors_in((args, kwargs)), *outputs) if tensor.numel()]
        scalars = all(tensor.ndim == 0 for tensor in everything)
        on_host = scalars and self.phase == "optimizer" and self.host_scalars
        if view or name in NO_LAUNCH or on_host or not everything:
            return results
        flops = operations = None
        if name in ("mm", "bmm"):
            flops = elements(outputs[0]) * 2 * factored(args[0].shape[-1])
        elif name in ATTENTION_PRODUCTS:
            flops = attention_flops(name)
        elif name not in ONLY_MOVES:
            largest = args[0] if isinstance(args[0], (list, tuple)) else [max(everything, key=torch.Tensor.numel)]
            operations = sum(map(elements, largest), Formula())
        self.add(name, operator_bytes(function, args, kwargs, outputs), flops, operations)
        return results


def attention_flops(name):
    return Formula.of(ATTENTION_PRODUCTS[name], "BTTC")


class NotedKernel:
    """Stands for a Triton kernel: notes its launch instead of making it."""

    def __init__(self, collector, name, kernel):
        self.collector, self.name = collector, name
        self.parameters = list(inspect.signature(kernel.fn).parameters)

    def __getitem__(self, grid):
        return self.launch

    def launch(self, *args, **kwargs):
        given = dict(zip(self.parameters, args, strict=False)) | kwargs
        flops = attention_flops(self.name) if self.name in ATTENTION_PRODUCTS else None
        self.collector.add(self.name, self.moved(given), flops)

    def moved(self, given):
        """Every tensor that the kernel was handed moves once, some of them in part."""
        if self.name == "adamw_kernel":
            return adamw_bytes(given)
        tensors = {t.data_ptr(): t for t in given.values() if isinstance(t, torch.Tensor)}
        moved = total_bytes(tensors.values())
        # The two backward kernels of attention share the packed gradient: one writes that of H heads, one of 2K.
        others = {"attention_backward_dq_kernel": (2, "BTKD"), "attention_backward_dkdv_kernel": (1, "BTC")}
        if self.name in others:
            moved -= Formula.of(*others[self.name]) * given["dqkv_ptr"].element_size()
        return moved


def adamw_bytes(given):
    """Weight and both moments read and written, the gradient read; beside float16 the rounded copy written."""
    wide = 24 + {"fp32": 4, "bf16": 2, "fp16": 4}[given["DTYPE"].name]
    total = Formula()
    counts = given["table_ptr"][:, 5].tolist()
    for row in set(given["chunk_ptr"][:, 0].tolist()):  # the rows of the table that this launch works on
        total += factored(counts[row]) * wide
    return total


def noted_rms_norm(collector):
    """F.rms_norm as a GPU runs it, one kernel each way; on a CPU PyTorch takes it apart."""

    class Norm(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            rstd, y = torch.empty(*x.shape[:-1], 1), torch.empty_like(x)
            ctx.save_for_backward(x, weight, rstd)
            collector.add("rms_norm", total_bytes([x, weight, rstd, y]))
            return y

        @staticmethod
        def backward(ctx, dy):
            x, weight, rstd = ctx.saved_tensors
            dx, dw = torch.empty_like(x), torch.empty_like(weight)
            collector.add("rms_norm_backward", total_bytes([dy, x, weight, rstd, dx, dw]))
            return dx, dw

    return lambda x, shape, weight, eps: Norm.apply(x, weight)


@contextlib.contextmanager
def looked_into(script, collector):
    """Within this the script tells the collector its parts, and its kernels are noted instead of run."""
    with contextlib.ExitStack() as patches:

        def replace(target, name, value):
            patches.enter_context(mock.patch.object(target, name, value))

        replace(script, "annotate", lambda name: named_range(collector, name))
        for name, kernel in list(vars(script).items()):
            if name.endswith("_kernel") and hasattr(kernel, "fn"):
                replace(script, name, NotedKernel(collector, name, kernel))
        if hasattr(script, "program_count"):  # shares of a gradient that depend on the GPU: counted as one
            replace(script, "program_count", lambda device: 1)
        replace(torch.nn.functional, "rms_norm", noted_rms_norm(collector))
        yield


def named_range(collector, name):
    return collector.inside(RANGES[name]) if name in RANGES else contextlib.nullcontext()


def watch_modules(model, collector):
    """Let the modules that have no range of their own tell the collector when they run."""
    for name, module in model.named_modules():
        part = MODULES.get(name.rsplit(".", 1)[-1])
        if part:
            module.forward = within(collector, part, module.forward)


def within(collector, part, forward):
    def run(x):
        with collector.inside(part):
            return forward(x)

    return run


def keep_hooks(model, collector):
    """Hooks that add up what the backward will need, each storage once, without the model's own tensors."""
    seen = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    alive = []  # a storage that is freed could give its address to another

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.nbytes() and storage.data_ptr() not in seen:  # a checkpoint of PyTorch 2.11 keeps an empty one
            seen.add(storage.data_ptr())
            alive.append(storage)
            collector.keep(factored(storage.nbytes() // tensor.element_size()) * tensor.element_size())
        return tensor

    return torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)


def prime_options(script, precision, argv, layers):
    """The script's options for the sizes that can be told apart; whether this machine can run them is not asked."""
    with mock.patch.object(script, "check_version_options", lambda options: None):
        options = script.parse_options(
            [*argv, *PRECISION_OPTIONS[precision], *PRIME_OPTIONS, "--num-layers", str(layers)]
        )
    if getattr(options, "enable_torch_compile", False) or getattr(options, "enable_all_fusion", False):
        raise Failure(2, "what torch.compile makes of a model cannot be counted: leave it disabled")
    return options


def counted_step(version, precision, argv, layers):
    """{(part, phase): Counts} of one step of a model with so many layers and the prime sizes."""
    script, collector = load_version(version), Collector()
    options = prime_options(script, precision, argv, layers)
    with mock.patch.object(script, "HEAD_DIMS", (PRIME_SIZES["D"],), create=True), looked_into(script, collector):
        trainer = script.Trainer(options)
        group = trainer.optimizer.param_groups[0]
        if "foreach" in group and not group["fused"]:
            group["foreach"], collector.host_scalars = True, True  # as on a GPU
        watch_modules(trainer.model, collector)
        trainer.step()  # attention's backend is chosen, and the optimizer makes its state
        trainer.optimizer.zero_grad(set_to_none=True)
        collector.start()
        with collector:
            with keep_hooks(trainer.model, collector):
                loss = script.compute_loss(trainer.model, trainer.tokens, trainer.labels, options)
            collector.phase = "backward"
            loss.backward()
            collector.phase = "optimizer"
            trainer.optimizer.step()
    return collector.counts


@functools.cache
def step_formulas(version, precision, argv=()):
    """{(part, phase): (Counts of each layer, Counts that come once)}: how a second layer changes the first's counts."""
    one, two = (counted_step(version, precision, argv, layers) for layers in (1, 2))
    formulas = {}
    for key in [(part, phase) for part in PARTS for phase in PHASES]:
        layer = two[key].combined(one[key], -1)
        formulas[key] = layer, one[key].combined(layer, -1)
    return formulas


# ---------------------------------------------------------------- numbers

WEIGHTS = {
    "embed_tokens": "embedding", "norm": "norms and residual", "attention_norm": "norms and residual",
    "feed_forward_norm": "norms and residual", "q_proj": "QKV projection", "k_proj": "QKV projection",
    "v_proj": "QKV projection", "o_proj": "output projection", "gate_proj": "gate and up", "up_proj": "gate and up",
    "down_proj": "down projection",
}  # fmt: skip
QUANTITIES = ("flops", "operations", "bytes", "launches", "kept")


@functools.cache
def parameter_formulas():
    """{part: (parameters of each layer, parameters that come once)}."""
    script, found = load_version(1), defaultdict(lambda: [Formula(), Formula()])
    config = script.model_config(prime_options(script, "float32", (), 1))
    for name, shape in script.weight_shapes(config).items():
        once = not name.startswith("layers.")
        found[WEIGHTS[name.split(".")[-2]]][once] += factored(script.math.prod(shape))
    return dict(found)


def of_step(pair):
    """The formula of a whole step from those of a layer and of what comes once."""
    layer, once = pair
    return layer * Formula.of(1, "L") + once


def sizes_of(options):
    """{letter: size} of a script's options."""
    names = {"L": "num_layers", "B": "batch_size", "T": "seq_len", "C": "hidden_dim", "H": "num_heads"}
    names |= {"K": "num_kv_heads", "F": "intermediate_dim", "V": "vocab_size"}
    sizes = {letter: getattr(options, name) for letter, name in names.items()}
    return sizes | {"D": sizes["C"] // sizes["H"]}


def preset_sizes(preset):
    return sizes_of(load_version(1).parse_options(["--preset", preset, "--device", "cpu"]))


def parameters(sizes):
    return {part: of_step(pair).at(sizes) for part, pair in parameter_formulas().items()}


def step_numbers(version, precision, sizes, argv=()):
    """{part: {phase: {quantity: number}}} of a whole step.

    Operations outside of products are those of version 1 in float32, whatever the version makes of them.
    """
    formulas, plain = step_formulas(version, precision, argv), step_formulas(1, "float32")
    numbers = {}
    for part in PARTS:
        numbers[part] = {}
        for phase in PHASES:
            counts = {q: [getattr(c, q) for c in formulas[part, phase]] for q in QUANTITIES}
            counts["operations"] = [c.operations for c in plain[part, phase]]
            numbers[part][phase] = {q: of_step(pair).at(sizes) for q, pair in counts.items()}
    return numbers


def both_phases(numbers, quantity):
    """{part: forward and backward together}."""
    return {part: sum(phases[phase][quantity] for phase in PHASES) for part, phases in numbers.items()}


def total(numbers, quantity):
    return sum(both_phases(numbers, quantity).values())


def required_flops(sizes):
    """{part: FLOPs of forward and backward that no version can do without}: of attention the causal half."""
    flops = both_phases(step_numbers(1, "float32", sizes), "flops")
    return flops | {"attention": flops["attention"] // 2}


def peak(gpu, precision):
    """TFLOP/s of matrix products in that precision, in float32 where the GPU has no units for it."""
    script = load_version(1)
    return script.peak_tflops(gpu, precision) or script.peak_tflops(gpu, "float32")


def roofline(work, gpu, precision):
    """(shortest time in us, 'memory' or 'compute') of {quantity: number}: what its FLOPs and its bytes take."""
    compute = work["flops"] / peak(gpu, precision) + work["operations"] / peak(gpu, "float32")
    memory = work["bytes"] / BANDWIDTH_TB_S[gpu]
    return max(compute, memory) / 1e6, "compute" if compute > memory else "memory"


def part_roofline(numbers, gpu, precision):
    """{part: (us, bound)}; the forward and the backward are bound apart, the longer one names the bound."""
    rows = {}
    for part, phases in numbers.items():
        times = [roofline(phases[phase], gpu, precision) for phase in PHASES]
        rows[part] = sum(us for us, _ in times), max(times)[1]
    return rows


def shortest_step_ms(numbers, gpu, precision):
    return sum(us for us, _ in part_roofline(numbers, gpu, precision).values()) / 1e3


def state_bytes(version, precision):
    """Bytes of a parameter that lie there during the forward: weight, both moments, and a 16-bit copy if there is one.

    Of versions 3 and 4 the 16-bit weights; versions 1 and 2 make theirs in each step, and they count as kept.
    """
    return 12 + 2 * (version > 2 and precision in ("bfloat16", "float16"))


# ---------------------------------------------------------------- the page's tables


def math(formula):
    return f"${formula.written('^{{{}}}')}$" if formula else ""


def gpu_table():
    """Peaks and bandwidths of the data sheets, and FLOP a byte from which on the GPU is bound by computing."""
    rows = []
    for gpu, bandwidth in BANDWIDTH_TB_S.items():
        peaks = [load_version(1).peak_tflops(gpu, precision) for precision in ("float32", "tf32", "bfloat16")]
        cells = ["" if p is None else f"{p:,.1f}" for p in peaks] + [f"{bandwidth:.3f}"]
        rows.append([gpu, *cells, *("" if p is None else f"{p / bandwidth:,.0f}" for p in peaks)])
    header = ["GPU", "fp32 TFLOP/s", "TF32", "bf16", "TB/s", "ridge FLOP/B, fp32", "TF32", "bf16"]
    return markdown_table(header, rows)


def presets_table():
    letters = list("BTCHKDFVL")
    presets = load_version(1).PRESETS
    return markdown_table(
        ["preset", *(f"${letter}$" for letter in letters)],
        [[f"`{name}`", *(preset_sizes(name)[letter] for letter in letters)] for name in presets],
    )


def parameter_table():
    presets = {name: preset_sizes(name) for name in load_version(1).PRESETS}
    rows = []
    for part, (layer, once) in parameter_formulas().items():
        cells = [f"{parameters(sizes)[part]:,}" for sizes in presets.values()]
        rows.append([part, math(layer), math(once), *cells])
    rows.append(["**all**", "", "", *(f"**{sum(parameters(sizes).values()):,}**" for sizes in presets.values())])
    return markdown_table(["part", "in each layer", "once", *(f"`{name}`" for name in presets)], rows)


def halved(formulas):
    return [Counts(flops=c.flops * Fraction(1, 2)) for c in formulas]


def flops_table():
    """What the model asks for: products forward, backward twice that, and everything else for comparison."""
    presets = {name: preset_sizes(name) for name in load_version(1).PRESETS}
    formulas, required = step_formulas(1, "float32"), {name: required_flops(s) for name, s in presets.items()}
    rows = []
    for part in PARTS:
        pair = formulas[part, "forward"]
        layer, once = halved(pair) if part == "attention" else pair
        if layer.flops or once.flops:
            cells = [f"{flops[part] / 1e9:,.2f}" for flops in required.values()]
            rows.append([part, math(layer.flops), math(once.flops), *cells])
    rows.append(["**all**", "", "", *(f"**{sum(flops.values()) / 1e9:,.2f}**" for flops in required.values())])
    others = [total(step_numbers(1, "float32", s), "operations") for s in presets.values()]
    rows.append(["everything else, operations", "", "", *(f"{n / 1e9:,.2f}" for n in others)])
    header = ["GFLOP of a step", "forward, each layer", "forward, once", *(f"`{name}`" for name in presets)]
    return markdown_table(header, rows)


def launches_table():
    """Forward + backward of a layer for each version, what comes once, and whole steps."""
    formulas = {version: step_formulas(version, "float32") for version in SCRIPTS}

    def cell(version, part, which):
        counts = [formulas[version][part, phase][which].launches.at({}) for phase in PHASES]
        return f"{counts[0]} + {counts[1]}" if any(counts) else ""

    rows = []
    for title, which in (("in each layer", 0), ("once", 1)):
        for part in PARTS:
            cells = [cell(version, part, which) for version in SCRIPTS]
            if any(cells):
                rows.append([f"{part}, {title}", *cells])
    for preset in load_version(1).PRESETS:
        sizes = preset_sizes(preset)
        counts = [total(step_numbers(version, "float32", sizes), "launches") for version in SCRIPTS]
        rows.append([f"**step of `{preset}`**", *(f"**{n:,}**" for n in counts)])
    return markdown_table(["launches, forward + backward", *(f"V{version}" for version in SCRIPTS)], rows)


def formula_table(quantity, versions, phases):
    """Formulas of a layer, and of what comes once where a part has nothing in the layers."""
    rows = []
    for part in PARTS:
        cells = []
        for version in versions:
            formulas = step_formulas(version, "float32")
            pairs = [[getattr(c, quantity) for c in formulas[part, phase]] for phase in phases]
            layer, once = (sum((pair[which] for pair in pairs), Formula()) for which in (0, 1))
            cells.append(math(layer) + (" a layer; " if layer and once else "") + math(once))
        if any(cells) and part != "AdamW":
            rows.append([part, *cells])
    return markdown_table(["part", *(f"V{version}" for version in versions)], rows, left=len(versions) + 1)


def step_table(quantity, unit, name, preset="small"):
    """Numbers of one step by part for each version, and the sums for all presets and precisions."""
    numbers = {version: step_numbers(version, "float32", preset_sizes(preset)) for version in SCRIPTS}
    rows = []
    for part in PARTS:
        values = [both_phases(numbers[version], quantity)[part] for version in SCRIPTS]
        if any(values):
            rows.append([part, *(f"{value / unit:,.1f}" for value in values)])
    for other in load_version(1).PRESETS:
        for precision in ("float32", "bfloat16"):
            sums = [total(step_numbers(v, precision, preset_sizes(other)), quantity) / unit for v in SCRIPTS]
            rows.append([f"**step of `{other}`, {PRECISIONS[precision]}**", *(f"**{n:,.0f}**" for n in sums)])
    return markdown_table([f"{name}, `{preset}`, fp32", *(f"V{version}" for version in SCRIPTS)], rows)


def bounded(us, bound):
    """The time, in bold where computing bounds it."""
    return f"**{us:,.0f}**" if bound == "compute" else f"{us:,.0f}"


def roofline_table(version, precision, preset):
    numbers = step_numbers(version, precision, preset_sizes(preset))
    columns = {gpu: part_roofline(numbers, gpu, precision) for gpu in BANDWIDTH_TB_S}
    flops, operations, moved = (both_phases(numbers, quantity) for quantity in QUANTITIES[:3])
    rows = []
    for part in PARTS:
        times = [bounded(*column[part]) for column in columns.values()]
        work = flops[part] + operations[part]
        rows.append([part, f"{work / 1e9:,.2f}", f"{moved[part] / 1e6:,.0f}", f"{work / moved[part]:,.1f}", *times])
    sums = [f"{1e3 * shortest_step_ms(numbers, gpu, precision):,.0f}" for gpu in BANDWIDTH_TB_S]
    rows.append(["all, one after the other", "", "", "", *sums])
    header = [f"V{version}, `{preset}`, {PRECISIONS[precision]}", "GFLOP", "MB", "FLOP/B"]
    return markdown_table([*header, *(f"{gpu}, us" for gpu in BANDWIDTH_TB_S)], rows)


def shortest_table():
    """The shortest possible step of every version: what its FLOPs and bytes take, launches for nothing."""
    rows = []
    for preset in ("small", "medium"):
        for precision in ("float32", "bfloat16"):
            for gpu in BANDWIDTH_TB_S:
                steps = [step_numbers(version, precision, preset_sizes(preset)) for version in SCRIPTS]
                times = [f"{shortest_step_ms(step, gpu, precision):,.2f}" for step in steps]
                rows.append([f"`{preset}`, {PRECISIONS[precision]}, {gpu}", *times])
    return markdown_table(["shortest step, ms", *(f"V{version}" for version in SCRIPTS)], rows)


def known_gpu(name):
    return next((gpu for gpu in BANDWIDTH_TB_S if gpu in name), None)


def predicted_and_measured(row, version, gpu, sizes):
    """The cells of a recorded step: what its counts say, and what was measured."""
    precision = row["precision"]
    numbers = step_numbers(version, precision, sizes)
    launches = total(numbers, "launches")
    least = state_bytes(version, precision) * sum(parameters(sizes).values()) + total(numbers, "kept")
    shortest = "" if gpu is None else f"{shortest_step_ms(numbers, gpu, precision):.2f}"
    counted = [f"{launches:,}", f"{total(numbers, 'bytes') / 1e6:,.0f}", shortest, f"{least / 2**20:,.0f}"]
    rate = f"{1e3 * row['step_ms'] / launches:.1f}"
    if version == 4:  # it runs compiled, and is counted as it is not
        counted, rate = [f"≤&nbsp;{cell}" if cell else "" for cell in counted], ""
    title = f"V{version}&nbsp;{PRECISIONS[precision]}&nbsp;{'graph' if row['captured'] else 'eager'}"
    return [title, *counted, f"{row['step_ms']:.2f}", rate, f"{row['peak_memory_mb']:,.0f}"]


def measured_tables(recorded):
    """Each recorded step of the four versions, a table for each configuration."""
    versions, gpu = {f"v{n}": n for n in SCRIPTS}, known_gpu(recorded.suite()["record"]["device"])
    tables = defaultdict(list)
    for row in [*recorded.suite()["rows"], *recorded.suite("graph")["rows"]]:
        if row["model"] in versions and row["precision"] in PRECISION_OPTIONS:
            tables[row["preset"], row["batch_size"], row["seq_len"], row["options"]].append(row)
    texts = []
    for (preset, batch_size, seq_len, more), chosen in tables.items():
        argv = ["--preset", preset, "--batch-size", str(batch_size), "--seq-len", str(seq_len), *more.split()]
        sizes = sizes_of(load_version(1).parse_options([*argv, "--device", "cpu"]))
        rows = [predicted_and_measured(row, versions[row["model"]], gpu, sizes) for row in chosen]
        header = [f"`{preset}`", "launches", "MB", "least ms", "least MiB", "step ms", "us/launch", "peak MiB"]
        texts.append(markdown_table(header, rows))
    return "\n\n".join(texts)


def corrections():
    """What the published document says of one sequence of `tiny` and of fusions, beside what is counted here."""
    one, full = preset_sizes("tiny") | {"B": 1}, preset_sizes("small")
    full["K"] = full["H"]  # as published: no grouped queries
    required, plain, fused = required_flops(one), step_formulas(1, "float32"), step_formulas(2, "float32")
    whole = sum(step_numbers(1, "float32", one)[part]["forward"]["flops"] for part in PARTS)
    before, after = (
        {phase: sum(table[part, phase][0].launches.at({}) for part in PARTS) for phase in PHASES}
        for table in (plain, fused)
    )
    fewer = 1 - sum(after.values()) / sum(before.values())
    separate, joined = (table["QKV projection", "forward"][0].bytes.at(full) for table in (plain, fused))
    rows = [
        [
            "forward of one sequence of `tiny`",
            "about 368 M",
            f"{sum(required.values()) / 3e6:,.1f} MFLOP; {whole / 1e6:,.1f} with the masked half of the scores",
        ],
        [
            "kernels in a layer of V1",
            "17, elsewhere 10 + 7 + 2 + 2",
            f"{before['forward']} forward, {before['backward']} backward",
        ],
        ["launches that V2's fusions save", "40 to 60 %", f"{fewer:.0%} of a layer"],
        [
            "bytes that one QKV product saves",
            "about 40 %",
            f"{1 - joined / separate:.0%} of the forward (`small` with $K = H$, as published)",
        ],
    ]
    return markdown_table(["", "published", "counted"], rows, left=3)


def machine(recorded):
    return f"{machine_line(recorded.suite()['record'])}; `scripts/recorded/{recorded.folder.name}`."


def blocks(recorded):
    """{name: the text between its markers in the page}."""
    return {
        "presets": presets_table(),
        "parameters": parameter_table(),
        "flops": flops_table(),
        "launches": launches_table(),
        "bytes": formula_table("bytes", (1, 3), PHASES),
        "bytes of a step": step_table("bytes", 1e6, "MB"),
        "kept": formula_table("kept", (1, 3), ["forward"]),
        "kept of a step": step_table("kept", 2**20, "MiB"),
        "gpus": gpu_table(),
        "roofline": roofline_table(1, "float32", "small") + "\n\n" + roofline_table(3, "bfloat16", "medium"),
        "shortest": shortest_table(),
        "corrections": corrections(),
        "measured": machine(recorded) + "\n\n" + measured_tables(recorded),
    }


def markers(name):
    return f"<!-- counts: {name} -->", f"<!-- end of counts: {name} -->"


def filled(text, tables):
    """The page's text with every table between its markers; Failure where a marker is missing."""
    for name, table in tables.items():
        begin, end = markers(name)
        if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
            raise Failure(2, f"{PAGE.name} needs one line {begin} and, further down, one line {end}")
        before, rest = text.split(begin)
        text = f"{before}{begin}\n{table}\n{end}{rest.split(end)[1]}"
    return text


def check(path, tables):
    """0 where the page says what the scripts do, else 1 with the difference."""
    found = page_text(path)
    wanted = filled(found, tables)
    if found == wanted:
        print(f"{path.name} agrees with the scripts and the recorded run")
        return 0
    difference = difflib.unified_diff(found.splitlines(), wanted.splitlines(), path.name, "counted", "", "", 0, "")
    print("\n".join(difference))
    print(f"{path.name} disagrees: python scripts/model_counts.py --write", file=sys.stderr)
    return 1


# ---------------------------------------------------------------- main


def content_of(version, precision, sizes, argv):
    """Everything about one step, for --json."""
    numbers, formulas = step_numbers(version, precision, sizes, argv), step_formulas(version, precision, argv)
    counted = parameters(sizes)
    parts = {}
    for part in PARTS:
        work = {q: both_phases(numbers, q)[part] for q in QUANTITIES}
        parts[part] = {"parameters": counted.get(part, 0), **numbers[part]}
        parts[part]["flop_per_byte"] = (work["flops"] + work["operations"]) / work["bytes"]
        parts[part]["roofline"] = {
            gpu: dict(zip(("us", "bound"), part_roofline(numbers, gpu, precision)[part], strict=True))
            for gpu in BANDWIDTH_TB_S
        }
        parts[part]["formulas"] = {
            phase: {
                title: {q: getattr(counts, q).written() for q in QUANTITIES if getattr(counts, q)}
                for title, counts in zip(("layer", "once"), formulas[part, phase], strict=True)
            }
            for phase in PHASES
        }
    totals = {q: total(numbers, q) for q in QUANTITIES}
    totals |= {"parameters": sum(counted.values()), "required_flops": sum(required_flops(sizes).values())}
    return {"version": version, "precision": precision, "sizes": sizes, "step": totals, "parts": parts}


def as_text(content):
    """Formulas, numbers and rooflines as three tables."""
    formulas, numbers, roofs = [], [], []
    for part, row in content["parts"].items():
        for phase in PHASES:
            for title, found in row["formulas"][phase].items():
                if found:
                    cells = [found.get(q, "") for q in ("flops", "bytes", "kept", "launches")]
                    formulas.append([f"{part}, {phase}, {'each layer' if title == 'layer' else 'once'}", *cells])
        pair = [row[phase] for phase in PHASES]
        cells = [f"{counts[q] / unit:,.2f}" for q, unit in (("flops", 1e9), ("bytes", 1e6)) for counts in pair]
        kept, launches = f"{pair[0]['kept'] / 2**20:,.2f}", " + ".join(str(counts["launches"]) for counts in pair)
        numbers.append([part, f"{row['parameters']:,}", *cells, kept, launches])
        times = [f"{roof['us']:,.1f} {roof['bound']}" for roof in row["roofline"].values()]
        roofs.append([part, f"{row['flop_per_byte']:,.1f}", *times])
    step = content["step"]
    header = ["part", "parameters", "GFLOP forward", "backward", "MB forward", "backward", "MiB kept", "launches"]
    return "\n\n".join(
        [
            f"version {content['version']}, {content['precision']}, "
            + ", ".join(f"{letter} {size}" for letter, size in content["sizes"].items()),
            text_table(["formulas", "FLOPs", "bytes", "bytes kept", "launches"], formulas, left=5),
            text_table(header, numbers),
            text_table(["shortest time of a step, us", "FLOP/B", *BANDWIDTH_TB_S], roofs),
            f"step: {step['parameters']:,} parameters, {step['required_flops'] / 1e9:,.2f} GFLOP needed, "
            f"{step['flops'] / 1e9:,.2f} done, {step['bytes'] / 1e6:,.1f} MB moved, {step['kept'] / 2**20:,.1f} MiB "
            f"kept, {step['launches']:,} launches",
        ]
    )


def count(options, argv):
    if {"--use-amp", "--tf32", "--amp-dtype"} & set(argv):
        raise Failure(2, "choose the precision with --precision, not with the training script's options")
    version = version_meant(options.version)
    script = load_version(version)
    with mock.patch.object(script, "check_version_options", lambda options: None):
        sizes = sizes_of(script.parse_options([*argv, "--device", "cpu"]))
    content = content_of(version, options.precision, sizes, tuple(argv))
    emit(content, as_text(content), options.json)
    return 0


def page_text(path):
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        raise Failure(2, f"--page {path} cannot be read: name a copy of {PAGE.name}") from None


def page(options):
    """Print, write or check the tables of the page."""
    tables = blocks(Record(options.recorded) if options.recorded else newest_record())
    if options.write:
        options.page.write_text(filled(page_text(options.page), tables), encoding="utf-8")
    if options.check:
        return check(options.page, tables)
    if options.markdown:
        print("\n\n".join(f"{markers(name)[0]}\n{table}\n{markers(name)[1]}" for name, table in tables.items()))
    return 0


def main(argv=None):
    parser = Parser(
        "model_counts.py",
        "Parameters, FLOPs, bytes, kept activations and launches of every part of a training step.",
        "--preset small --version 3 --precision bfloat16; options that are not listed go to the training script",
    )
    add_version_option(parser)
    parser.add_argument("--precision", choices=PRECISION_OPTIONS, default="float32", help="(%(default)s)")
    parser.add_argument("--markdown", action="store_true", help=f"print the tables of {PAGE.name}")
    parser.add_argument("--write", action="store_true", help="put them into the page")
    parser.add_argument("--check", action="store_true", help="compare the page with them")
    parser.add_argument("--page", type=pathlib.Path, default=PAGE, metavar="FILE", help=f"({PAGE.name})")
    parser.add_argument("--recorded", type=pathlib.Path, metavar="FOLDER", help="which recorded run (the newest)")
    options, rest = parser.parse_known_args(argv)

    def work():
        return page(options) if options.markdown or options.write or options.check else count(options, rest)

    return run_tool("model_counts.py", work)


if __name__ == "__main__":
    sys.exit(main())
