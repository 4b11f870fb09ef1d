#!/usr/bin/env python3
"""What every Triton kernel becomes on every GPU, without having one: registers, spills, LDS, occupancy, matrix units.

    python scripts/inspect_kernels.py                              what the presets launch, for every target
    python scripts/inspect_kernels.py --target gfx942 --dtype bf16 --kernel attention --dump-assembly assembly
    python scripts/inspect_kernels.py --all --target gfx90a        every head size, odd lengths, wide rows
    python scripts/inspect_kernels.py --target gfx1100 --dtype bf16 --tiles 32x32 64x32 --warps 4 8     what if

One training step of version 3, with the presets small and medium, runs on tensors without data, as if it were on the
target, and its launches are written down instead of being made; likewise the solutions of the exercises. So each kernel
is compiled with the tiles, warps and specializations that a real launch has.

registers   of one thread; on Instinct vector and accumulation registers together
spills      of one thread: vector registers in scratch memory, or bytes of stack on NVIDIA; "+n s" scalar registers kept
            in the lanes of vector registers, which costs instructions and no memory
shared      memory that one program asks for, LDS on AMD; tensor memory of Blackwell is checked too
occupancy   waves (warps) on a SIMD (an SM's quarter) of at most so many, and what limits it
matrix      matrix instructions in the code, MFMA or WMMA on AMD, mma.sync, wgmma or tcgen05 on NVIDIA
code        bytes of instructions

Exit status: 0 when everything fits; 1 when a kernel does not compile, or to nothing, asks for more shared or tensor
memory than the target has, spills on Instinct or a data-centre NVIDIA GPU, or multiplies 16-bit or TF32 tiles without
matrix units; 2 for bad arguments.
"""

import argparse
import concurrent.futures
import contextlib
import copy
import dataclasses
import functools
import importlib
import itertools
import json
import multiprocessing
import os
import pathlib
import re
import struct
import subprocess
import sys
import tempfile
import time
from concurrent.futures.process import BrokenProcessPool
from typing import Any, NamedTuple
from unittest import mock

from common.command_line import Failure, run_tool
from common.occupancy import KB, TARGETS, TENSOR_MEMORY, occupancy
from common.versions import REPOSITORY, load_version

EXERCISES = REPOSITORY / "exercises"

# ---------------------------------------------------------------- what is launched

PRECISIONS = {
    "fp32": [],
    "tf32": ["--tf32"],
    "bf16": ["--use-amp", "--amp-dtype", "bfloat16"],
    "fp16": ["--use-amp", "--amp-dtype", "float16"],
    "fp8": ["--use-amp", "--fp8"],  # only on targets that multiply in fp8
}
TINY = "--num-layers 1 --num-heads 2 --num-kv-heads 1 --vocab-size 16 --seq-len 16 --batch-size 1".split()


class Case(NamedTuple):
    """One run whose launches are wanted."""

    source: str  # v3, or the folder of an exercise
    label: str
    argv: tuple


class Launch(NamedTuple):
    """All that a kernel is compiled from, in a form that another process can read."""

    source: str
    kernel: str
    target: str
    signature: dict
    constexprs: dict
    attributes: dict
    options: dict

    def constants(self):
        """Constant parameters by name, without those that are None, and of the head counts only their ratio.

        Head counts scale addresses: a model of 8 heads and one of 16 run the same code, a ratio of one unrolls a loop.
        """
        names = list(self.signature)
        named = {names[path[0]]: value for path, value in self.constexprs.items() if len(path) == 1}
        ratio = {"H/K": named.pop("H") // named.pop("K")} if "H" in named and "K" in named else {}
        return ratio | {name: value for name, value in named.items() if value is not None}

    def key(self):
        """Equal for launches that need not be compiled apart."""
        return repr((self._replace(constexprs=None), self.constants()))

    def describe(self):
        """'D=64 BLOCK_Q=64 ...' of the constant parameters, warps and stages."""
        values = self.constants() | {"warps": self.options["num_warps"], "stages": self.options["num_stages"]}
        return " ".join(f"{name}={value}" for name, value in values.items())

    def with_tile(self, tile, warps, stages):
        """The launch with other tiles (queries, keys), warps and stages; None leaves what it has."""
        names = list(self.signature)
        blocks = {} if tile is None else dict(zip(("BLOCK_Q", "BLOCK_K"), tile, strict=True))
        constexprs = {path: blocks.get(names[path[0]], value) for path, value in self.constexprs.items()}
        given = {"num_warps": warps, "num_stages": stages}
        options = self.options | {name: value for name, value in given.items() if value is not None}
        return self._replace(constexprs=constexprs, options=options)


def gpu_target(name):
    from triton.backends.compiler import GPUTarget

    target = TARGETS[name]
    architecture = int(name[3:]) if target.backend == "cuda" else name
    return GPUTarget(target.backend, architecture, target.warp_size)


@contextlib.contextmanager
def recorded_launches(source, module, target):
    """Collect the launches that the module's code makes, as if on that target, instead of making them."""
    from triton.compiler import make_backend
    from triton.runtime.jit import JITFunction, create_function_from_signature

    backend, launches = make_backend(gpu_target(target)), []

    def record(kernel, *args, grid, warmup, **kwargs):
        binder = create_function_from_signature(kernel.signature, kernel.params, backend)
        bound, specialization, rest = binder(*args, **kwargs)
        options, signature, constexprs, attributes = kernel._pack_args(backend, kwargs, bound, specialization, rest)
        launches.append(
            Launch(source, kernel.fn.__name__, target, signature, constexprs, attributes, dict(vars(options)))
        )

    tiles = getattr(module, "attention_tiles", None)
    answers = {
        "gpu_architecture": lambda device: target,
        "program_count": lambda device: 4 * TARGETS[target].units,
        "attention_tiles": lambda *choice: tiles(*choice)[:1],  # what --deterministic takes, without a GPU to time them
    }
    with contextlib.ExitStack() as patches:
        patches.enter_context(mock.patch.object(JITFunction, "run", record))
        for name, answer in answers.items():
            if hasattr(module, name):
                patches.enter_context(mock.patch.object(module, name, answer))
        yield launches


def training_step(script, argv):
    """One step of version 3 with these options: the model on tensors without data, the optimizer on the CPU.

    The optimizer's launch does not depend on the sizes of the model, and its tables want real addresses.
    """
    import torch

    with mock.patch.object(script, "complete_version_options", lambda config: ""):  # asks about this machine
        config = script.parse_options([*argv, "--device", "cpu"])
        width = 32 if config.hidden_dim % 16 == 0 else 36
        small = script.parse_options([*argv, *TINY, "--hidden-dim", str(width), "--device", "cpu"])
    if config.fp8 and script.fp8_dtype(script.gpu_architecture(torch.device("meta"))) is None:
        return
    script.set_up_backend(config)
    config.device = "meta"
    with torch.device("meta"):
        model = script.TinyLlama(config)
        tokens = torch.zeros(config.batch_size, config.seq_len, dtype=torch.int64)
    script.make_optimizer(model, config)  # gives the model its 16-bit weights
    with mock.patch.object(script, "fp8_matmul", fp8_product):
        script.compute_loss(model, tokens, tokens, config).backward()
    trainer = script.Trainer(small)
    for parameter in trainer.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    trainer.scaler.scale(torch.zeros(()))  # makes its scale at the first use
    trainer.scaler.step(trainer.optimizer)


def fp8_product(x, x_scale, w, w_scale):
    """What version 3's fp8_matmul returns, which checks this machine and launches no kernel of Triton."""
    import torch

    return torch.empty(len(x), len(w), dtype=torch.bfloat16, device=x.device)


@functools.cache
def exercise_grading():
    """The module that knows what the exercises are given."""
    sys.path.insert(0, str(EXERCISES))
    return importlib.import_module("grading")


@functools.cache
def exercise_solution(name):
    return exercise_grading().load_module(EXERCISES / name / "solution.py", f"solution_{name}")


def exercise_run(name, module, argv):
    """Run a solution in a dtype on the inputs of some of its task's cases: argv is the dtype and their numbers."""
    import torch

    grading = exercise_grading()
    task, dtype = grading.load_task(EXERCISES / name), getattr(torch, argv[0])
    sizes = list(task.cases.values())
    for case in argv[1:] or range(len(sizes)):
        with mock.patch.object(grading, "DEVICE", torch.device("cpu")):
            inputs = grading.cast(task, task.inputs(**sizes[int(case)]), dtype)
        storage = task.storage(task.define(**copy.deepcopy(inputs)), inputs)
        module.run(**inputs, **{result: torch.empty(like.shape, dtype=like.dtype) for result, like in storage.items()})


class Source(NamedTuple):
    """Where kernels come from: how to load their module, and what runs the code that launches them."""

    load: Any
    run: Any


SOURCES = {"v3": Source(lambda: load_version(3), training_step)}


def source_of(name):
    """The source of that name, or the exercise whose folder it is."""
    if name in SOURCES:
        return SOURCES[name]
    return Source(functools.partial(exercise_solution, name), functools.partial(exercise_run, name))


def exercise_cases(precisions, *numbers):
    """The solutions of the exercises, on the cases of these numbers or on all; TF32 is nothing that they ask for."""
    folders = sorted(folder.name for folder in EXERCISES.glob("[0-9][0-9]_*") if (folder / "solution.py").is_file())
    dtypes = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
    return [
        Case(folder, precision, (dtypes[precision], *map(str, numbers)))
        for folder in folders
        for precision in precisions
        if precision in dtypes
    ]


def preset_cases(presets, precisions):
    return [
        Case("v3", precision, ("--preset", preset, *PRECISIONS[precision]))
        for preset in presets
        for precision in precisions
    ]


def all_cases(precisions):
    """Every head size with an even length and with one that divides nothing, long and single ones, wide rows."""
    shapes = [(D, *rest) for D in (16, 32, 64, 128) for rest in ((8, 4, 512, 1000), (8, 1, 100, 999))]
    shapes += [(64, 8, 8, 4096, 32000), (128, 8, 4, 4096, 32000), (64, 8, 4, 1, 1000)]
    shapes += [(128, C // 128, 8, 512, 128256) for C in (4096, 32768)]
    return [
        Case("v3", precision, tuple(argv.split()) + tuple(PRECISIONS[precision]))
        for D, heads, kv, T, V in shapes
        for argv in [
            f"--hidden-dim {D * heads} --num-heads {heads} --num-kv-heads {kv} --seq-len {T} --vocab-size {V} "
            "--num-layers 2 --batch-size 2"
        ]
        for precision in precisions
    ]


# ---------------------------------------------------------------- what it becomes


@dataclasses.dataclass
class Kernel:
    """A compiled kernel; counts of a thread, bytes of a program."""

    source: str
    kernel: str
    target: str
    precisions: list
    constants: str
    error: str | None = None
    registers: int = 0
    spills: int = 0
    scalar_spills: int = 0
    scratch_bytes: int = 0
    shared_bytes: int = 0
    tensor_memory: int = 0
    matrix_instructions: dict = dataclasses.field(default_factory=dict)
    low_precision_dots: int = 0
    dots_without_matrix_units: int = 0
    stores: int = 0
    code_bytes: int = 0
    waves: float = 0.0
    limit: str = ""
    hash: str = ""  # Triton's name for what it compiled, the same as for a real launch
    seconds: float = 0.0

    def title(self):
        return f"{self.target} {self.source} {self.kernel} {','.join(self.precisions)} {self.constants}"

    def problems(self):
        """Why it does not fit its target: an empty list when it does."""
        target = TARGETS[self.target]
        if self.error:
            return [f"does not compile: {self.error}"]
        found = []
        if not self.stores:
            found.append("the compiler left nothing of it: its code writes no result")
        if self.shared_bytes > target.shared:
            found.append(f"asks for {self.shared_bytes} bytes of shared memory, the target has {target.shared}")
        if self.tensor_memory > TENSOR_MEMORY:
            found.append(f"asks for {self.tensor_memory} columns of tensor memory, the target has {TENSOR_MEMORY}")
        if target.data_centre and (self.spills or self.scratch_bytes):
            found.append(f"spills {self.spills} registers, {self.scratch_bytes} bytes of scratch memory")
        if self.dots_without_matrix_units or (self.low_precision_dots and not self.matrix_instructions):
            missing = self.dots_without_matrix_units or self.low_precision_dots
            found.append(f"{missing} of {self.low_precision_dots} 16-bit or TF32 products run without matrix units")
        return found


MATRIX = {
    "amdgcn": re.compile(r"\bv_(mfma|smfmac|wmma|swmmac)_"),
    "ptx": re.compile(r"\b(mma\.sync|wgmma\.mma_async|tcgen05\.mma)\b"),
}
STORE = {"amdgcn": re.compile(r"\b(?:global|buffer|flat)_store_"), "ptx": re.compile(r"\bst\.global\b")}
DOT = re.compile(r"\btt\.dot ")
ORDINARY_DOT = re.compile(r"\btt\.dot .*parent = #blocked")
LOW_PRECISION_DOT = re.compile(r"tt\.dot .*(?:x(?:bf16|f16)[,>]|inputPrecision = tf32).*")


def assembly_facts(asm):
    """Registers and spills from the metadata that LLVM writes under the AMD assembly."""

    def entry(name):
        found = re.search(rf"^\s+\.{name}:\s*(\d+)", asm["amdgcn"], re.MULTILINE)
        return int(found.group(1)) if found else 0

    return {
        "registers": entry("vgpr_count"),
        "spills": entry("vgpr_spill_count"),
        "scalar_spills": entry("sgpr_spill_count"),
        "scratch_bytes": entry("private_segment_fixed_size"),
    }


def cubin_facts(asm):
    """Registers and stack from the resource usage that cuobjdump reads in the binary.

    A Triton kernel has no variables on the stack, so that what is there was spilled; Triton itself counts it so.
    """
    from triton import knobs

    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "kernel.cubin"
        path.write_bytes(asm["cubin"])
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(path)]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    used = {name: int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", text)}
    stack = used["STACK"] + used["LOCAL"]
    return {"registers": used["REG"], "spills": stack // 4, "scratch_bytes": stack}


def code_bytes(binary):
    """Bytes in the executable sections of an ELF file (a cubin or an hsaco)."""
    start, size, count = struct.unpack_from("<Q", binary, 40)[0], *struct.unpack_from("<HH", binary, 58)
    total = 0
    for at in range(start, start + size * count, size):
        flags, length = struct.unpack_from("<Q", binary, at + 8)[0], struct.unpack_from("<Q", binary, at + 32)[0]
        total += length if flags & 4 else 0  # SHF_EXECINSTR
    return total


def instruction_facts(asm):
    """Products of 16-bit or TF32 tiles, those left to vector units, matrix instructions and stores in the code."""
    kind = "amdgcn" if "amdgcn" in asm else "ptx"
    counts = {}
    for name in MATRIX[kind].findall(asm[kind]):
        counts[name] = counts.get(name, 0) + 1
    # A product that no matrix unit takes is compiled for the ordinary ones, at times after widening it to float32.
    low, every = len(LOW_PRECISION_DOT.findall(asm["ttir"])), len(DOT.findall(asm["ttir"]))
    ordinary = len(ORDINARY_DOT.findall(asm["ttgir"]))
    return {
        "matrix_instructions": counts,
        "low_precision_dots": low,
        "dots_without_matrix_units": ordinary if low == every else 0,
        "stores": len(STORE[kind].findall(asm[kind])),
    }


def compiled(launch):
    """Triton's compiled kernel; its cache makes the second time short."""
    import triton
    from triton.compiler import ASTSource

    kernel = getattr(source_of(launch.source).load(), launch.kernel)
    source = ASTSource(kernel, launch.signature, launch.constexprs, launch.attributes)
    return triton.compile(source, target=gpu_target(launch.target), options=launch.options)


def first_line(error):
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1] if lines else 'no message'}"


def inspect_launch(launch, dump_folder=None):
    """Compile a launch and read what became of it."""
    from triton import TritonError

    row = Kernel(launch.source, launch.kernel, launch.target, [], launch.describe())
    start = time.perf_counter()
    try:
        result = compiled(launch)
    except (TritonError, RuntimeError, ValueError, subprocess.CalledProcessError) as error:
        row.error = first_line(error)
        return row
    target, asm, metadata = TARGETS[launch.target], result.asm, result.metadata
    facts = assembly_facts(asm) if target.backend == "hip" else cubin_facts(asm)
    facts |= instruction_facts(asm)
    facts["shared_bytes"] = metadata.shared
    facts["tensor_memory"] = getattr(metadata, "tmem_size", None) or 0
    facts["hash"] = result.hash
    facts["code_bytes"] = code_bytes(asm["hsaco" if target.backend == "hip" else "cubin"])
    row = dataclasses.replace(row, **facts, seconds=time.perf_counter() - start)
    row.waves, row.limit = occupancy(target, row.registers, row.shared_bytes, metadata.num_warps, row.tensor_memory)
    if dump_folder:
        dump(launch, asm, pathlib.Path(dump_folder))
    return row


def dump(launch, asm, folder):
    """Write the assembly: AMD's as LLVM leaves it, NVIDIA's PTX."""
    constants = re.sub(r"[^\w=.]+", "_", launch.describe())
    types = "_".join(sorted({kind.strip("*") for kind in launch.signature.values() if kind.startswith("*")}))
    extension = "amdgcn" if "amdgcn" in asm else "ptx"
    name = f"{launch.target}_{launch.source[:2]}_{launch.kernel}_{types}_{constants}"[:200]
    (folder / f"{name}.{extension}").write_text(asm[extension])


# ---------------------------------------------------------------- many of them, in worker processes


def prepare_worker():
    """Before Triton is imported: compile, do not interpret."""
    os.environ["TRITON_INTERPRET"] = "0"
    import torch

    torch.set_num_threads(1)


def too_old():
    """Return the sentence about a Triton without what this tool asks of it, or None where it has that."""
    import triton

    if hasattr(triton, "knobs") and hasattr(triton.knobs.nvidia, "ptxas_blackwell"):
        return None
    return f"needs Triton 3.6 or newer, got {triton.__version__}"


def obstacle(target):
    """Why the installed Triton cannot compile for a target, or None where it can."""
    from triton import knobs
    from triton.compiler import make_backend

    try:
        make_backend(gpu_target(target))
        if TARGETS[target].backend == "cuda":  # a build for AMD alone comes without these
            _ = knobs.nvidia.cuobjdump, knobs.nvidia.ptxas_blackwell if target == "sm_100" else knobs.nvidia.ptxas
    except RuntimeError as error:
        return first_line(error)
    return None


def case_launches(case, target):
    """What the case launches on the target."""
    source = source_of(case.source)
    module = source.load()
    with recorded_launches(case.source, module, target) as launches:
        source.run(module, case.argv)
    return launches


class Workers:
    """Processes that compile, apart from this one, which may have chosen Triton's interpreter already."""

    def __init__(self, jobs):
        context = multiprocessing.get_context("spawn")
        self.pool = concurrent.futures.ProcessPoolExecutor(jobs, mp_context=context, initializer=prepare_worker)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.pool.shutdown(cancel_futures=True)

    def all(self, function, arguments, progress=lambda done, total: None):
        """function(*a) for each a of arguments, in their order; progress is told after each."""
        futures = [self.pool.submit(function, *a) for a in arguments]
        for done, _ in enumerate(concurrent.futures.as_completed(futures), 1):
            progress(done, len(futures))
        return [future.result() for future in futures]


def wanted_launches(workers, cases, targets, kernel=""):
    """Distinct launches of the cases on the targets, and the labels of the cases that each of them serves."""
    asked = [(case, target) for target in targets for case in cases]
    labels, launches = {}, {}
    for (case, _), found in zip(asked, workers.all(case_launches, asked), strict=True):
        for launch in found:
            if kernel in launch.kernel:
                launches.setdefault(launch.key(), launch)
                labels.setdefault(launch.key(), {})[case.label] = None
    return [(launch, list(labels[key])) for key, launch in launches.items()]


def other_tiles(wanted, tiles, warps, stages):
    """The attention launches with each combination of other tiles, warps and stages; [None] leaves what they have."""
    return [
        (launch.with_tile(*choice), labels)
        for launch, labels in wanted
        if "BLOCK_Q" in launch.constants()
        for choice in itertools.product(tiles, warps, stages)
    ]


def inspect_cases(cases, targets, kernel="", jobs=2, dump_folder=None, change=None, progress=lambda done, total: None):
    """Compile what the cases launch on the targets, each distinct launch once: a list of Kernel.

    kernel: a part of the name of the kernels wanted; dump_folder: where their assembly goes; change: turns the list of
    (Launch, labels) into the one that is compiled; progress: is told how many of how many are done. A target that the
    installed Triton cannot compile for is left out, with a warning.
    """
    with Workers(jobs) as workers:
        obstacles = dict(zip(targets, workers.all(obstacle, [(target,) for target in targets]), strict=True))
        for target in filter(obstacles.get, targets):
            print(f"{target} is left out, Triton cannot compile for it here: {obstacles[target]}", file=sys.stderr)
        targets = [target for target in targets if not obstacles[target]]
        wanted = wanted_launches(workers, cases, targets, kernel)
        wanted = change(wanted) if change else wanted
        rows = workers.all(inspect_launch, [(launch, dump_folder) for launch, _ in wanted], progress)
    for row, (_, labels) in zip(rows, wanted, strict=True):
        row.precisions = labels
    return rows


# ---------------------------------------------------------------- the command


COLUMNS = (
    "target",
    "from",
    "kernel",
    "for",
    "constants",
    "registers",
    "spills",
    "shared",
    "occupancy",
    "matrix",
    "code",
)


def cells(row):
    """The row of the table for a kernel."""
    target, name = TARGETS[row.target], [row.target, row.source[:2], row.kernel.removesuffix("_kernel")]
    if row.error:
        return [*name, ",".join(row.precisions), row.constants, *["-"] * 6]
    spills = f"{row.spills}" + (f"+{row.scalar_spills}s" if row.scalar_spills else "")
    return [
        *name,
        ",".join(row.precisions),
        row.constants,
        f"{row.registers}",
        spills,
        f"{row.shared_bytes / KB:.1f} KB",
        f"{row.waves:g}/{target.most_waves} {row.limit}",
        " ".join(f"{count} {name}" for name, count in row.matrix_instructions.items()) or "-",
        f"{row.code_bytes / KB:.1f} KB",
    ]


def print_table(rows):
    table = [COLUMNS, *(cells(row) for row in rows)]
    widths = [max(len(line[column]) for line in table) for column in range(len(COLUMNS))]
    for line in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def print_verdict(rows):
    """What does not fit, and what spills where that is no fault; returns the exit status."""
    failed = [(row, problem) for row in rows for problem in row.problems()]
    for row, problem in failed:
        print(f"DOES NOT FIT  {row.title()}: {problem}")
    for row in rows:
        if row.spills and not row.problems():
            print(f"spills        {row.title()}: {row.spills} registers")
    misfits = len({id(row) for row, _ in failed})
    verdict = f"{misfits} of them do not fit" if misfits else "all fit"
    print(f"{len(rows)} kernels, {sum(row.seconds for row in rows):.0f} s of processor time: {verdict}")
    return 1 if failed else 0


def show_progress(done, total):
    if sys.stderr.isatty():
        print(f"\r{done} of {total} kernels", end="" if done < total else "\n", file=sys.stderr, flush=True)
    elif done % 50 == 0:
        print(f"{done} of {total} kernels", file=sys.stderr, flush=True)


def tile(text):
    """(64, 32) of '64x32'."""
    found = re.fullmatch(r"(\d+)x(\d+)", text)
    sizes = tuple(map(int, found.groups())) if found else ()
    if not found or any(size < 1 or size & (size - 1) for size in sizes):
        raise argparse.ArgumentTypeError(f"a tile is two powers of two, as in 64x32, not {text}")
    return sizes


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one sentence, with exit status 2."""

    def error(self, message):
        self.exit(2, f"{self.prog}: error: {message}\n")


def parse_options(argv):
    parser = Parser(
        prog="inspect_kernels.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "--target", nargs="+", choices=TARGETS, default=list(TARGETS), metavar="GPU", help=f"{', '.join(TARGETS)} (all)"
    )
    add("--dtype", nargs="+", choices=PRECISIONS, default=list(PRECISIONS), help="precision of the model (all)")
    add("--source", nargs="+", choices=["v3", "exercises"], default=["v3", "exercises"], help="whose kernels (both)")
    add("--kernel", default="", metavar="PART", help="only kernels whose name contains this")
    add("--preset", nargs="+", choices=["tiny", "small", "medium"], default=["small", "medium"], help="(small medium)")
    add("--all", action="store_true", help="the whole matrix of head sizes, lengths and widths instead of presets")
    what_if = "what if: compile the attention kernels with these"
    add("--tiles", nargs="+", type=tile, metavar="QxK", help=f"{what_if} tiles of queries and keys, as in 64x32")
    add("--warps", nargs="+", type=int, metavar="N", help=f"{what_if} numbers of warps")
    add("--stages", nargs="+", type=int, metavar="N", help=f"{what_if} pipeline depths")
    add("--json", action="store_true", help="print the figures as JSON instead of a table")
    add("--dump-assembly", metavar="DIR", help="write each kernel's assembly (PTX on NVIDIA) into this folder")
    add("--jobs", type=int, default=2, metavar="N", help="kernels compiled at a time (%(default)s)")
    options = parser.parse_args(argv)
    if options.jobs < 1:
        parser.error(f"--jobs must be at least 1, not {options.jobs}")
    if options.dump_assembly:
        try:
            pathlib.Path(options.dump_assembly).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            parser.error(f"--dump-assembly {options.dump_assembly} cannot be written: {error.strerror}")
    return options


def asked_cases(options):
    if options.all:
        found = {"v3": all_cases(options.dtype), "exercises": exercise_cases(options.dtype)}
    else:
        found = {"v3": preset_cases(options.preset, options.dtype), "exercises": exercise_cases(options.dtype, -1)}
    return [case for source in options.source for case in found[source]]


def report(options):
    """Inspect and print; returns the exit status."""
    if too_old():
        raise Failure(2, too_old())
    choices = [values or [None] for values in (options.tiles, options.warps, options.stages)]
    change = None
    if options.tiles or options.warps or options.stages:
        change = functools.partial(other_tiles, tiles=choices[0], warps=choices[1], stages=choices[2])
    try:
        rows = inspect_cases(
            asked_cases(options),
            options.target,
            options.kernel,
            options.jobs,
            options.dump_assembly,
            change,
            show_progress,
        )
    except BrokenProcessPool:
        raise Failure(1, "the compiler ended its process: try one --target and one --kernel at a time") from None
    if not rows:
        raise Failure(2, f"no kernel of this kind has {options.kernel or 'tiles'} in its name")
    if options.json:
        print(json.dumps([{**dataclasses.asdict(row), "problems": row.problems()} for row in rows], indent=1))
        return int(any(row.problems() for row in rows))
    print_table(rows)
    return print_verdict(rows)


def main(argv=None):
    options = parse_options(argv)
    return run_tool("inspect_kernels.py", lambda: report(options))


if __name__ == "__main__":
    sys.exit(main())
