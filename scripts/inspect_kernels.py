#!/usr/bin/env python3
"""Compile version 3's kernels for a GPU, without having one: registers, spills, LDS, occupancy, matrix units.

    python scripts/inspect_kernels.py                              what the presets launch, for every target
    python scripts/inspect_kernels.py --target gfx90a --preset small --hidden-dim 256 --num-heads 2     other sizes
    python scripts/inspect_kernels.py --target gfx1100 --dtype bf16 --tiles 32x32 64x32 --warps 4 8     what if
    python scripts/inspect_kernels.py --execute gfx942 --kernel attention     run them as AMD's instructions

One training step of version 3 runs on tensors without data. Triton is told that it's on the target, so each launch
compiles its kernel with the tiles, warps and specializations of a real launch, but doesn't start it. Options that
aren't listed here go to version 3.

registers   per thread; on Instinct vector and accumulation registers together
spills      per thread: registers in scratch memory (AMD) or on the stack (NVIDIA)
shared      memory that one program requests, LDS on AMD; tensor memory of Blackwell is checked too
occupancy   waves (warps) per SIMD (quarter of an SM) and their maximum, and what limits them
matrix      matrix instructions in the code: MFMA or WMMA on AMD, mma.sync, wgmma or tcgen05 on NVIDIA

--execute runs the same kernels in our interpreter of AMD's instructions (scripts/amd/README.md), on a short
sequence. For each kernel it prints the relative error compared with Triton's interpreter, the instructions that its
waves executed, by kind, and the bytes they loaded and stored. With --kernel only those kernels run, on inputs that
Triton's interpreter computed. It takes up to a minute per precision.

Exit status: 0 if everything fits and is right, 1 if something doesn't (the last lines say what and why), 2 for bad
input.
"""

import ast
import concurrent.futures
import contextlib
import functools
import itertools
import multiprocessing
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from concurrent.futures.process import BrokenProcessPool
from types import SimpleNamespace
from unittest import mock

from common import command_line
from common.command_line import PRESETS, Failure, Pace, Parser, on_cpu, positive, progress
from common.formulas.occupancy import KB, TARGETS, TENSOR_MEMORY, occupancy
from common.measuring.accuracy import LAST_PLACE
from common.ratios import counted
from common.tables import emit, text_table
from common.versions import SCRIPTS, load_version

# fp8 only on targets that multiply in it
PRECISIONS = {command_line.SHORT_PRECISIONS[name].lower(): argv for name, argv in command_line.PRECISIONS.items()}
TINY = "--num-layers 1 --num-heads 2 --num-kv-heads 1 --vocab-size 16 --seq-len 16 --batch-size 1".split()
CODE = {"hip": "amdgcn", "cuda": "ptx"}
MATRIX = {"hip": r"\bv_(mfma|smfmac|wmma|swmmac)_", "cuda": r"\b(mma\.sync|wgmma\.mma_async|tcgen05\.mma)\b"}
STORE = {"hip": r"\b(?:global|buffer|flat)_store_", "cuda": r"\bst\.global\b"}
LOW_PRECISION_DOT = r"tt\.dot .*(?:x(?:bf16|f16)[,>]|inputPrecision = tf32)"

# ---------------------------------------------------------------- what a kernel becomes


def assembly_registers(asm):
    """Return registers and spills from the metadata that LLVM writes under the AMD assembly."""
    found = {name: int(value) for name, value in re.findall(r"^\s+\.(\w+):\s*(\d+)", asm["amdgcn"], re.MULTILINE)}
    return found["vgpr_count"], max(found["vgpr_spill_count"], found["private_segment_fixed_size"] // 4)


def cubin_registers(asm):
    """Return registers and spills as cuobjdump reports them; a Triton kernel has nothing else on its stack."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        pathlib.Path(file.name).write_bytes(asm["cubin"])
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    used = {name: int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", text)}
    return used["REG"], (used["STACK"] + used["LOCAL"]) // 4


def last_line(error):
    lines = [line.strip() for line in str(error).splitlines() if re.search(r"\w", line)]
    return f"{type(error).__name__}: {lines[-1] if lines else 'no message'}"


def measurements(target, result):
    """Return what the table shows of a compiled kernel; counts per thread, bytes and columns per program."""
    asm, metadata, backend = result.asm, result.metadata, target.backend
    registers, spills = assembly_registers(asm) if backend == "hip" else cubin_registers(asm)
    shared, tensor_memory = metadata.shared, getattr(metadata, "tmem_size", None) or 0
    waves, limit = occupancy(target, registers, shared, metadata.num_warps, tensor_memory)
    return {
        "registers": registers,
        "spills": spills,
        "shared_bytes": shared,
        "tensor_memory": tensor_memory,
        "matrix_instructions": Counter(sorted(re.findall(MATRIX[backend], asm[CODE[backend]]))),
        "dots": len(re.findall(LOW_PRECISION_DOT, asm["ttir"])),
        "stores": len(re.findall(STORE[backend], asm[CODE[backend]])),
        "waves": waves,
        "limit": limit,
        "hash": result.hash,  # Triton's name for what it compiled, the same as for a real launch
    }


def problems(row):
    """Return why a kernel does not fit its target, an empty list if it does."""
    target = TARGETS[row["target"]]
    if "error" in row:
        return [f"does not compile: {row['error']}"]
    shared = row["shared_bytes"]
    columns = row["tensor_memory"]
    found = {
        "its code writes no result: the compiler has removed everything": not row["stores"],
        f"requests {shared} bytes of shared memory, the target has {target.shared}": shared > target.shared,
        f"requests {columns} columns of tensor memory, the target has {TENSOR_MEMORY}": columns > TENSOR_MEMORY,
        f"spills {row['spills']} registers": target.data_centre and row["spills"],
        f"{row['dots']} matmuls of tiles run without matrix units": row["dots"] and not row["matrix_instructions"],
    }
    return [sentence for sentence, true in found.items() if true]


# ---------------------------------------------------------------- compiling instead of launching


def driver_of(name):
    """Return a stand-in for the driver of a GPU that need not be present: Triton asks it what to compile for."""
    from triton.backends.compiler import GPUTarget

    target = TARGETS[name]
    gpu = GPUTarget(target.backend, int(name[3:]) if target.backend == "cuda" else name, target.warp_size)
    return SimpleNamespace(
        get_current_target=lambda: gpu,
        get_current_device=lambda: name,  # Triton keeps the kernels of each device apart
        get_current_stream=lambda device: 0,
    )


def describe(kernel, args, given):
    """Return the compile-time constants of a launch as text, and Triton's specialization of its other arguments.

    Of the head counts only their ratio: they scale addresses, and a model of 8 heads and one of 16 run the same code.
    """
    from triton.runtime import driver

    *_, bind = kernel.device_caches[driver.active.get_current_device()]
    bound, specialization, _ = bind(*args, **given)
    constants = {p.name: bound[p.name] for p in kernel.params if p.is_constexpr}
    if {"H", "K"} <= constants.keys():
        constants["H/K"] = constants.pop("H") // constants.pop("K")
    constants |= {"warps": given.get("num_warps", 4), "stages": given.get("num_stages")}
    kinds = [kind for p, kind in zip(kernel.params, specialization, strict=True) if not p.is_constexpr]
    return " ".join(f"{name}={value}" for name, value in constants.items() if value is not None), str(kinds)


def choices(options, given):
    """Return what --tiles, --warps and --stages change in a launch: nothing without them, no launch but attention's."""
    if "BLOCK_Q" not in given:
        return [] if options.tiles or options.warps or options.stages else [{}]
    tiles = [{"BLOCK_Q": queries, "BLOCK_K": keys} for queries, keys in options.tiles]
    warps, stages = ([{name: n} for n in getattr(options, name[4:])] for name in ("num_warps", "num_stages"))
    return [one | two | three for one, two, three in itertools.product(tiles or [{}], warps or [{}], stages or [{}])]


def compiled(target, compilation):
    """Return what a kernel compiles to, or the error of the compiler or the assembler."""
    from triton import TritonError

    try:
        return measurements(TARGETS[target], compilation())
    except (TritonError, RuntimeError, ValueError, subprocess.CalledProcessError) as error:
        return {"error": last_line(error)}


@contextlib.contextmanager
def compiled_launches(module, target, label, options, pace):
    """Compile what the module's code launches, as if on that target, instead of launching it; yield {launch: row}.

    Where the pace tells so, print which kernel is compiled now.
    """
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    rows = {}
    run = JITFunction.run
    tiles = getattr(module, "attention_tiles", None)

    def compile_only(kernel, *args, grid, warmup, **given):
        name = kernel.fn.__name__
        for change in choices(options, given) if options.kernel in name else []:
            constants, kinds = describe(kernel, args, given | change)
            if (name, constants, kinds) not in rows:
                if pace.is_due():
                    progress(f"{target}: compiling {name} for {label}, {constants}")
                compilation = functools.partial(run, kernel, *args, grid=None, warmup=True, **given | change)
                row = {"kernel": name, "target": target, "precisions": [label]}
                rows[name, constants, kinds] = row | {"constants": constants} | compiled(target, compilation)

    answers = {
        "gpu_architecture": lambda device: target,
        "program_count": lambda device: 4 * TARGETS[target].units,
        "attention_tiles": lambda *choice: tiles(*choice)[:1],  # what --deterministic takes, without a GPU to time them
    }
    driver.set_active(driver_of(target))
    with mock.patch.object(JITFunction, "run", compile_only), mock.patch.multiple(module, create=True, **answers):
        yield rows


# ---------------------------------------------------------------- what is launched


def training_step(script, argv):
    """Run one step of version 3 with these options: the model on tensors without data, the optimizer on the CPU.

    The optimizer's launch does not depend on the sizes of the model, and its tables need real addresses.
    """
    import torch

    # The script's own matmuls ask about this machine, and launch no Triton kernel.
    def fp8_matmul(x, x_scale, w, w_scale):
        return x.new_empty(len(x), len(w), dtype=torch.bfloat16)

    with mock.patch.object(script, "complete_version_options", lambda options: {}):  # asks about this machine
        config = script.parse_options([*argv, "--device", "cpu"])
        width = 32 if config.hidden_dim % 16 == 0 else 36
        small = script.parse_options([*argv, *TINY, "--hidden-dim", str(width), "--device", "cpu"])
    if config.fp8 and script.fp8_dtype(script.gpu_architecture(torch.device("meta"))) is None:
        return
    script.set_up_backend(config)
    config.device = "meta"
    with torch.device("meta"):
        model = script.make_model(config)
        tokens = torch.zeros(config.batch_size, config.seq_len, dtype=torch.int64)
    script.make_optimizer(model, config)  # gives the model its 16-bit weights
    matmuls = {"fp8_matmul": fp8_matmul, "add_matmul": lambda *operands, first: None}
    with mock.patch.multiple(script, **matmuls):
        script.compute_loss(model, tokens, tokens, config).backward()
    trainer = script.Trainer(small)
    for parameter in trainer.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    trainer.scaler.scale(torch.zeros(()))  # makes its scale at the first use
    trainer.scaler.step(trainer.optimizer)


def inspect(target, options):
    """Return a row for each distinct kernel that version 3 launches on the target, in each precision."""
    pace = Pace()
    script = load_version(3)
    found = []
    for label in options.dtype:
        with compiled_launches(script, target, label, options, pace) as rows:
            for preset in options.preset:
                training_step(script, ["--preset", preset, *PRECISIONS[label], *options.sizes])
        found += rows.values()
    return found


# ---------------------------------------------------------------- many of them, in worker processes


def end_with_parent():
    """Let this worker process end when its parent is gone: one that was killed cannot end its workers."""

    def wait():
        multiprocessing.parent_process().join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def prepare_worker():
    """Have Triton compile, not interpret; it and PyTorch read these when they are imported."""
    end_with_parent()
    os.environ.update(TRITON_INTERPRET="0", OMP_NUM_THREADS="1")


def too_old():
    """Return the sentence about a Triton without what this tool needs, or "" where it has that."""
    import triton

    old = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 6)
    return f"needs Triton 3.6 or newer, got {triton.__version__}" if old else ""


def obstacle(target):
    """Return why the installed Triton cannot compile for a target, or None where it can."""
    from triton import knobs
    from triton.compiler import make_backend

    try:
        make_backend(driver_of(target).get_current_target())
        if TARGETS[target].backend == "cuda":  # a build for AMD alone comes without these
            _ = knobs.nvidia.cuobjdump, knobs.nvidia.ptxas_blackwell if target == "sm_100" else knobs.nvidia.ptxas
    except RuntimeError as error:
        return last_line(error)
    return None


def inspect_all(options):
    """Return a row per distinct kernel: those that are the same in several precisions are one.

    Compile in processes of their own: this one may have chosen Triton's interpreter already. Leave out, with a warning,
    a target that the installed Triton cannot compile for.
    """
    rows = {}
    obstacles = {name: obstacle(name) for name in options.target}
    for target in filter(obstacles.get, obstacles):
        progress(f"leaving out {target}, because Triton can't compile for it here: {obstacles[target]}")
    targets = [target for target in obstacles if not obstacles[target]]
    progress(f"compiling for {counted(len(targets), 'target')}, two at a time: {', '.join(targets) or 'none'}")
    spawn = multiprocessing.get_context("spawn")
    # Triton 3.6 aborts a process that compiled fp8 for gfx950 and then does so for gfx1201.
    with concurrent.futures.ProcessPoolExecutor(2, spawn, prepare_worker, max_tasks_per_child=1) as pool:
        futures = [pool.submit(inspect, target, options) for target in targets]
        for done, (target, future) in enumerate(zip(targets, futures, strict=True), 1):
            for row in future.result():
                row["problems"] = problems(row)
                key = row["target"], row["kernel"], row.get("hash", row["constants"])
                same = rows.setdefault(key, row)["precisions"]
                same += [label for label in row["precisions"] if label not in same]
            distinct = sum(row["target"] == target for row in rows.values())
            progress(f"{done} of {len(targets)}: {target}, {counted(distinct, 'kernel')}")
    return list(rows.values())


# ---------------------------------------------------------------- executing them

EXECUTABLE = [name for name, target in TARGETS.items() if target.backend == "hip"]
KINDS = ("matrix", "vector", "scalar", "LDS", "memory")
# Largest relative error that is no fault: two units in the last place. Triton's interpreter cuts bfloat16 off.
ALLOWED = {label: 2 * LAST_PLACE[name] for name, label in command_line.SHORT_PRECISIONS.items() if name in LAST_PLACE}
ALLOWED = {label.lower(): error for label, error in ALLOWED.items()} | {"fp32": 1e-5}


def in_process(prepare, task, *arguments):
    """Return what a task returns in a process of its own, in which Triton compiles or interprets."""
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, spawn, prepare) as pool:
        return pool.submit(task, *arguments).result()


def prepare_interpreter():
    end_with_parent()
    os.environ.update(TRITON_INTERPRET="1", OMP_NUM_THREADS="1")


def interpret(target, label, argv):
    from amd.compare import interpret_step

    return interpret_step(target, argv, f"Triton's interpreter, {label}")


def execute(target, label, argv, interpreted, part):
    """Return the launches of a step that were executed; "described": the row of what each compiles to."""
    from amd.compare import execute_step

    def row(kernel, args, given, compilation):
        constants, _ = describe(kernel, args, given)
        return {"constants": constants} | measurements(TARGETS[target], compilation)

    return execute_step(target, argv, f"{target} {label}", interpreted, part, row)


def execution(target, label, argv, part=""):
    """Return a row for each distinct kernel of a step: what it compiles to, what it executed, and the worst error.

    Only launches of kernels with `part` in their name are executed.
    """
    from amd.assembly import Fault

    interpreted = in_process(prepare_interpreter, interpret, target, label, argv)
    try:
        launches = in_process(prepare_worker, execute, target, label, argv, interpreted, part)
    except Fault as fault:
        raise Failure(1, str(fault)) from None
    rows = {}
    for one in launches:
        totals = one["launch"].totals
        row = {"kernel": one["kernel"], "target": target, "precisions": [label], **one["described"]}
        row |= {"instructions": totals.instructions, "loaded": totals.loaded, "stored": totals.stored, "error": 0.0}
        same = rows.setdefault((row["kernel"], row["hash"]), row)
        same["error"] = max(same["error"], one["error"])
        same["problems"] = [] if same["error"] <= ALLOWED[label] else [f"error {same['error']:.1e} is too large"]
    return list(rows.values())


def execute_all(options):
    """Return the rows of every target and precision."""
    rows = []
    for target, label in itertools.product(options.execute, options.dtype):
        if label in ALLOWED:
            for preset in options.preset:
                argv = ["--preset", preset, *PRECISIONS[label], *options.sizes]
                rows += execution(target, label, argv, options.kernel)
    return rows


def execution_cells(row):
    shared = f"{row['shared_bytes'] / KB:.1f} KB"
    counts = [row["instructions"].get(kind, 0) for kind in KINDS]
    name = [row["target"], row["kernel"].removesuffix("_kernel"), row["precisions"][0], row["constants"]]
    used = [row["registers"], row["spills"], shared]
    return [*name, *used, f"{row['error']:.1e}", *counts, row["loaded"], row["stored"]]


def execution_text(rows):
    """Return the table of what was executed, and under it what is wrong."""
    columns = [*"target kernel for constants registers spills shared error".split(), *KINDS, "loaded", "stored"]
    lines = [line.rstrip() for line in text_table(columns, map(execution_cells, rows), 4).splitlines()]
    lines += [f"WRONG  {' '.join(execution_cells(row)[:4])}: {problem}" for row in rows for problem in row["problems"]]
    wrong = sum(bool(row["problems"]) for row in rows)
    return "\n".join([*lines, f"{len(rows)} kernels: " + (f"{wrong} are wrong" if wrong else "all are right")])


# ---------------------------------------------------------------- the command

COLUMNS = "target kernel for constants registers spills shared occupancy matrix".split()


def cells(row):
    """Return a kernel's line of the table."""
    name = [row["target"], row["kernel"].removesuffix("_kernel"), ",".join(row["precisions"]), row["constants"]]
    if "error" in row:
        return [*name, *["-"] * 5]
    matrix = " ".join(f"{count} {name}" for name, count in row["matrix_instructions"].items())
    waves = f"{row['waves']:g}/{TARGETS[row['target']].most_waves} {row['limit']}"
    return [*name, row["registers"], row["spills"], f"{row['shared_bytes'] / KB:.1f} KB", waves, matrix or "-"]


def as_text(rows):
    """Return the table, and under it what does not fit."""
    lines = [line.rstrip() for line in text_table(COLUMNS, map(cells, rows), len(COLUMNS)).splitlines()]
    lines += [f"DOES NOT FIT  {' '.join(cells(row)[:4])}: {problem}" for row in rows for problem in row["problems"]]
    misfits = sum(bool(row["problems"]) for row in rows)
    verdict = f"{misfits} of {len(rows)} kernels won't fit" if misfits else f"{len(rows)} kernels: all fit"
    return "\n".join([*lines, verdict])


def tile(text):
    """Convert "64x32" to (64, 32)."""
    queries, keys = map(int, text.split("x"))
    if min(queries, keys) < 1 or queries & (queries - 1) or keys & (keys - 1):
        raise ValueError(f"{text}: both sides must be powers of two")
    return queries, keys


def kernel_parameters():
    """Return {name: names of its parameters} of version 3's kernels, without importing what they need."""
    nodes = [node for node in ast.parse(SCRIPTS[3].read_bytes()).body if isinstance(node, ast.FunctionDef)]
    return {node.name: {one.arg for one in node.args.args} for node in nodes if node.name.endswith("_kernel")}


def check_names(options):
    """Raise Failure if no kernel can be meant; only attention's have tiles to choose."""
    what_if = options.tiles or options.warps or options.stages
    names = [name for name, words in kernel_parameters().items() if not what_if or "BLOCK_Q" in words]
    if not any(options.kernel in name for name in names):
        raise Failure(2, f"--kernel {options.kernel}: no name has this in it: {', '.join(names)}")


def report(options, sizes):
    options.sizes = sizes
    options.preset = options.preset or (["small"] if options.execute else ["small", "medium"])
    if options.execute and (options.tiles or options.warps or options.stages):
        raise Failure(2, "--execute runs what version 3 launches: leave out --tiles, --warps and --stages")
    check_names(options)
    if too_old():
        raise Failure(2, too_old())
    if sizes and on_cpu(["--device", "cpu"]):  # a wrong option ends it here, before any process starts
        load_version(3).parse_options([*sizes, "--device", "cpu"])
    try:
        rows = execute_all(options) if options.execute else inspect_all(options)
    except BrokenProcessPool:
        raise Failure(1, "the compiler ended its process: try one --target and one --kernel at a time") from None
    if not rows:
        raise Failure(2, "none of these kernels is launched on these targets and in these precisions")
    emit({"kernels": rows}, execution_text(rows) if options.execute else as_text(rows), options.json)
    return int(any(row["problems"] for row in rows))


def main(argv=None):
    parser = Parser("inspect_kernels.py", __doc__)
    add = parser.add_argument
    targets = ", ".join(TARGETS)
    add("--target", nargs="+", choices=TARGETS, default=list(TARGETS), metavar="GPU", help=f"{targets} (all)")
    add("--execute", nargs="+", choices=EXECUTABLE, default=[], metavar="GPU", help=f"{', '.join(EXECUTABLE)} (none)")
    add("--dtype", nargs="+", choices=PRECISIONS, default=list(PRECISIONS), help="precision of the model (all)")
    add("--kernel", default="", metavar="PART", help="only kernels whose name contains this")
    add("--preset", nargs="+", choices=PRESETS, help="(small medium; with --execute small)")
    what_if = "what if: compile the attention kernels with these"
    add("--tiles", nargs="+", type=tile, default=[], metavar="QxK", help=f"{what_if} tiles of queries and keys")
    add("--warps", nargs="+", type=positive, default=[], metavar="N", help=f"{what_if} numbers of warps")
    add("--stages", nargs="+", type=positive, default=[], metavar="N", help=f"{what_if} pipeline depths")
    return parser.run(report, argv, passes_on=True)


if __name__ == "__main__":
    sys.exit(main())
