"""inspect_kernels.py: version 3's kernels and the exercises' solutions compiled for GPUs that are not here."""

import concurrent.futures
import contextlib
import copy
import importlib
import json
import multiprocessing
import os
import pathlib
import re
import signal
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from types import SimpleNamespace

import pytest
import torch

import inspect_kernels
from common.command_line import Pace
from common.formulas.occupancy import TARGETS, occupancy
from common.versions import REPOSITORY, load_version
from in_process import refused, run_here
from inspect_kernels import PRECISIONS, compiled_launches, prepare_worker
from processes import running, wait_for

pytestmark = pytest.mark.skipif(bool(inspect_kernels.too_old()), reason=f"the tool {inspect_kernels.too_old()}")

SPAWN = multiprocessing.get_context("spawn")


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """Return an empty folder, so that what is tested is compiled now."""
    return str(tmp_path_factory.mktemp("triton"))


@pytest.fixture(scope="module")
def workers():
    """The processes that the tool starts, once for all tests: importing PyTorch takes each of them seconds."""
    with ProcessPoolExecutor(2, SPAWN, prepare_worker) as pool:
        yield pool


@pytest.fixture(autouse=True)
def shared_workers(cache, workers, monkeypatch):
    """Let them compile into that folder: a process that is started now inherits the environment."""
    monkeypatch.setenv("TRITON_CACHE_DIR", cache)

    def pool(*_, max_tasks_per_child=None):
        assert max_tasks_per_child == 1  # Triton 3.6 aborts a process that compiles fp8 for gfx950, then gfx1201
        return contextlib.nullcontext(workers)

    monkeypatch.setattr(concurrent.futures, "ProcessPoolExecutor", pool)


PARENT = """
import concurrent.futures, multiprocessing, os, sys, time
from inspect_kernels import prepare_worker
if __name__ == "__main__":
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, spawn, prepare_worker) as pool:
        print(pool.submit(os.getpid).result(), flush=True)
        time.sleep(600)
"""


def test_a_worker_ends_when_its_parent_was_killed(tmp_path):
    program = tmp_path / "parent.py"
    program.write_text(PARENT)
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY / "scripts")}
    parent = subprocess.Popen([sys.executable, program], stdout=subprocess.PIPE, text=True, env=environment)
    worker = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    try:
        wait_for(lambda: not running(worker), timeout=20)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker, signal.SIGKILL)


def run_tool(*argv):
    return run_here([sys.executable, REPOSITORY / "scripts" / "inspect_kernels.py", *argv])


def kernels(*argv):
    """Return the tool's exit status and its rows."""
    result = run_tool(*argv, "--json", "-")
    assert result.stdout, result.stderr[-2000:]
    return result.returncode, [SimpleNamespace(**row) for row in json.loads(result.stdout)["kernels"]]


# ---------------------------------------------------------------- what training launches

CHECKED = {"fp32": TARGETS, "bf16": TARGETS, "fp16": ("gfx90a", "gfx1100", "sm_80")}  # fp16 has bf16's tiles
WITH_FP8 = ("gfx942", "gfx950", "gfx1201", "sm_90", "sm_100")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_everything_the_presets_launch_fits_every_target():
    """The promise to GPUs that are not here: nothing spills, all fits, matmuls of 16-bit tiles use matrix units.

    One test for all, because compiling takes a minute. Small has medium's tiles of attention, and narrower rows.
    """
    status, rows = kernels("--preset", "medium", "--dtype", "fp32", "bf16", "fp8")
    also, more = kernels("--preset", "medium", "--dtype", "fp16", "--target", *CHECKED["fp16"])
    status, rows = status or also, rows + more
    every = {name for name in vars(load_version(3)) if name.endswith("_kernel")}
    fp8 = {name for name in every if "quantize" in name or name == "transpose_kernel"}
    for precision, target in ((precision, target) for precision, targets in CHECKED.items() for target in targets):
        found = {row.kernel for row in rows if row.target == target and precision in row.precisions}
        assert found == every - fp8, (target, precision)
    for target in TARGETS:  # the quantizing kernels compute SwiGLU themselves
        found = {row.kernel for row in rows if row.target == target and "fp8" in row.precisions}
        in_bf16 = {name for name in every - fp8 if not name.startswith("swiglu")}
        assert found == (in_bf16 | fp8 if target in WITH_FP8 else set()), target
    assert (status, [(row.target, row.kernel, row.problems) for row in rows if row.problems]) == (0, [])
    assert [row for row in rows if row.registers < 9] == []  # numbers that were misread would be 0 or 1
    assert all(row.waves >= 0.5 for row in rows)
    products = [row for row in rows if "attention" in row.kernel and "fp32" not in row.precisions]
    assert products and all(row.dots >= 2 and row.matrix_instructions for row in products)
    assert_occupancy_is_what_llvm_says(pathlib.Path(os.environ["TRITON_CACHE_DIR"]))


def assert_occupancy_is_what_llvm_says(folder):
    """LLVM notes the waves that registers allow under the assembly; shared memory is not known to it."""
    seen = set()
    for file in folder.glob("*/*.amdgcn"):
        text = file.read_text()
        target = re.search(r"amdgcn_target.*--(gfx\w+)", text)[1]
        registers = int(re.search(r"\.vgpr_count:\s*(\d+)", text).group(1))
        noted = int(re.search(r"; Occupancy: (\d+)", text).group(1))
        assert occupancy(TARGETS[target], registers, 0, 4)[0] == noted, file.name
        seen.add((target, noted))
    assert {target for target, _ in seen} == {name for name, target in TARGETS.items() if target.backend == "hip"}
    assert len({noted for _, noted in seen}) >= 5


def launches_of_solutions(target):
    """Return the rows of the exercises' solutions, each on the inputs of its last case, in one of its precisions.

    The targets take turns: over all of them each solution is compiled in each precision. On sm_80, where matmuls in
    float32 have the fewest registers, every case of theirs is compiled.
    """
    folder, rows = REPOSITORY / "exercises", []
    sys.path.insert(0, str(folder))
    grading = importlib.import_module("grading")
    grading.DEVICE, options = torch.device("cpu"), SimpleNamespace(kernel="", tiles=[], warps=[], stages=[])
    for number, file in enumerate(sorted(folder.glob("[0-9][0-9]_*/solution.py")), list(TARGETS).index(target)):
        solution, task = grading.load_module(file, file.parent.name), grading.load_task(file.parent)
        cases = list(task.cases.values())
        chosen = [(cases[-1], task.dtypes[number % len(task.dtypes)])]
        if target == "sm_80" and "tl.dot" in file.read_text():
            chosen += [(case, torch.float32) for case in cases]
        for case, dtype in chosen:
            inputs = grading.cast(task, task.inputs(**case), dtype)
            storage = task.storage(task.define(**copy.deepcopy(inputs)), inputs).items()
            with compiled_launches(solution, target, str(dtype), options, Pace()) as found:
                solution.run(**inputs, **{name: torch.empty(like.shape, dtype=like.dtype) for name, like in storage})
            assert found, file.parent.name
            rows += found.values()
    return rows


def tiles_of_amd(target):
    """Return the rows of the tiles that 16-bit attention may choose on a target."""
    rows = []
    names = {"o": "attention_forward", "dq": "attention_backward_dq", "dkdv": "attention_backward_dkdv"}
    for computes, name in names.items():
        for tile in load_version(3).AMD_TILES[target[:4], computes, 16]:

            def choices(options, given, tile=tile):
                return [tile._asdict()] if "BLOCK_Q" in given else []

            options = SimpleNamespace(
                kernel=name, preset=["small"], sizes=[], tiles=[], warps=[], stages=[], dtype=["bf16"]
            )
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(inspect_kernels, "choices", choices)
                rows += inspect_kernels.inspect(target, options)
    return rows


@pytest.mark.parametrize("target", ["gfx90a", "gfx942", "gfx950"])
@pytest.mark.slow
def test_tiles_that_amd_measured_fit(target, workers):
    rows = workers.submit(tiles_of_amd, target).result()
    assert len(rows) == 9 and all(row["matrix_instructions"] and row["dots"] >= 2 for row in rows), rows
    assert [problem for row in rows for problem in inspect_kernels.problems(row)] == []


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_the_solutions_of_the_exercises_fit_every_target(target, workers):
    rows = workers.submit(launches_of_solutions, target).result()
    assert all(row["registers"] >= 6 for row in rows)  # exercise 01 needs 6 on gfx942, and no kernel needs less
    assert [(row["kernel"], inspect_kernels.problems(row)) for row in rows if inspect_kernels.problems(row)] == []


@pytest.mark.slow
def test_launches_are_those_of_the_gpu_and_its_precision():
    """fp8 weights are quantized where the target multiplies in fp8; tiles are a GPU's, not the interpreter's."""
    argv = "--preset tiny --kernel".split()
    rows = kernels(*argv, *"quantize_weights --target gfx942 gfx90a --dtype fp8".split())[1]
    assert [row.target for row in rows] == ["gfx942"] * 2  # its first launch, and its second with the floor
    rows = kernels(*argv, *"column_sum --target gfx942 --dtype fp32 --hidden-dim 512".split())[1]
    assert rows and all("ROWS=128 BLOCK=8" in row.constants for row in rows)
    assert len(kernels(*argv, *"cross_entropy --target gfx942 --dtype bf16 --enable-fused-loss".split())[1]) == 2


def intermediate_code(precision):
    """Return {kernel: Triton's intermediate code} of the attention kernels for sm_90."""
    codes, measure = {}, inspect_kernels.measurements

    def keep(target, result):
        codes[result.metadata.name] = result.asm["ttir"]
        return measure(target, result)

    options = SimpleNamespace(kernel="attention", preset=["tiny"], sizes=[], tiles=[], warps=[], stages=[])
    options.dtype = [precision]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inspect_kernels, "measurements", keep)
        inspect_kernels.inspect("sm_90", options)
    return codes


@pytest.mark.parametrize(("precision", "multiplies"), [("fp32", "tf32x3"), ("tf32", "tf32")])
@pytest.mark.slow
def test_attention_multiplies_in_one_precision(precision, multiplies, workers):
    """A dot without it multiplies float32 in TF32. No run on a CPU shows that: the interpreter is always exact."""
    codes = workers.submit(intermediate_code, precision).result()
    assert len(codes) == 3
    for name, code in codes.items():
        dots = [line for line in code.splitlines() if " tt.dot " in line]
        assert len(dots) >= 2, name
        assert [re.findall(r"inputPrecision = (\w+)", dot) for dot in dots] == [[multiplies]] * len(dots), name


# A process of its own: PyTorch's compiler, used by another test, may have told Triton of another assembler.
STEP = """
import json, sys
sys.path.insert(0, sys.argv[1])
from common.versions import load_version
v3 = load_version(3)
options = v3.parse_options(sys.argv[2:])
v3.set_up_backend(options)
v3.Trainer(options).run(*v3.batch(v3.load_data(options), 0, options))
kernels = {name: kernel for name, kernel in vars(v3).items() if name.endswith("_kernel")}
caches = {name: [cache[0] for cache in kernel.device_caches.values()] for name, kernel in kernels.items()}
print(json.dumps({name: [k.hash for cache in found for k in cache.values()] for name, found in caches.items()}))
"""


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_compiled_kernels_are_those_that_this_gpu_runs(precision):
    """Triton's hash covers source, constants, specializations, options and target: equal hashes are equal programs."""
    target = load_version(3).gpu_architecture(torch.device("cuda"))
    if target not in TARGETS:
        pytest.skip(f"{target} is no target of the tool")
    rows = kernels("--preset", "tiny", "--dtype", precision, "--target", target)[1]
    argv = [str(REPOSITORY / "scripts"), "--preset", "tiny", "--no-graph", *PRECISIONS[precision]]
    done = subprocess.run([sys.executable, "-c", STEP, *argv], capture_output=True, text=True, check=True)
    launched = json.loads(done.stdout.splitlines()[-1])
    for name in {row.kernel for row in rows}:
        assert {row.hash for row in rows if row.kernel == name} & set(launched[name]), name


# ---------------------------------------------------------------- what does not fit is seen, and what limits the rest

ATTENTION = "--preset tiny --kernel attention_forward".split()


@pytest.mark.slow
def test_tiles_too_small_for_matrix_units_and_tiles_that_do_not_compile():
    result = run_tool(*ATTENTION, *"--target gfx90a --dtype bf16 --tiles 4x4 32x64 --warps 1".split())
    faults = [line for line in result.stdout.splitlines() if line.startswith("DOES NOT FIT")]
    assert result.returncode == 1 and "\n2 of 2 kernels won't fit" in result.stdout
    assert "BLOCK_Q=4 BLOCK_K=4" in faults[0] and "4 matmuls of tiles run without matrix units" in faults[0]
    assert "does not compile: CompileTimeAssertionFailure: tl.static_assert(BLOCK_Q % BLOCK_K == 0)" in faults[1]


@pytest.mark.slow
def test_too_much_shared_memory_and_spills_are_faults():
    model = "--hidden-dim 256 --num-heads 2 --num-kv-heads 1".split()
    argv = "--target sm_90 --dtype bf16 --tiles 128x128 --warps 4 --stages 4".split()
    status, (row,) = kernels(*ATTENTION, *argv, *model)
    assert status == 1 and row.shared_bytes == 288 * 1024 and row.spills > 50 and row.waves == 0
    assert row.problems == [
        f"requests {288 * 1024} bytes of shared memory, the target has {227 * 1024}",
        f"spills {row.spills} registers",
    ]
    assert set(row.matrix_instructions) == {"wgmma.mma_async"} and "H/K=2" in row.constants
    text = inspect_kernels.as_text([vars(row)])
    assert " 288.0 KB " in text and text.endswith("\n1 of 1 kernels won't fit")


def test_what_does_not_fit():
    """Triton 3.7.1 makes a trap instead of the kernel of some TF32 matmuls on sm_100: nothing is stored."""
    row = {"shared_bytes": 227 * 1024 + 16, "tensor_memory": 513, "spills": 9, "dots": 0, "stores": 0}
    stores, shared, tensor_memory, spills = inspect_kernels.problems(row | {"target": "sm_100"})
    assert "writes no result" in stores and "requests 232464 bytes" in shared  # 227 KB of 228 are for one program
    assert "requests 513 columns" in tensor_memory and spills == "spills 9 registers"
    all_of_it = {"shared_bytes": 227 * 1024, "tensor_memory": 512, "spills": 0, "stores": 1, "target": "sm_100"}
    assert inspect_kernels.problems(row | all_of_it) == []
    row |= {"shared_bytes": 0, "tensor_memory": 0, "stores": 1, "target": "gfx1100"}
    assert inspect_kernels.problems(row) == []  # outside of data centres


@pytest.mark.parametrize("errors", [(0.1, 0.0), (0.0, 0.1), (1e-5, 0.0), (0.0, 1.01e-5)])
def test_the_worst_launch_of_a_kernel_is_judged(errors, monkeypatch):
    totals = SimpleNamespace(totals=SimpleNamespace(instructions={}, loaded=0, stored=0))
    launches = [{"kernel": "k", "described": {"hash": "h"}, "launch": totals, "error": error} for error in errors]
    results = iter([None, launches])
    monkeypatch.setattr(inspect_kernels, "in_process", lambda *_: next(results))
    (row,) = inspect_kernels.execution("gfx942", "fp32", [])
    told = [] if max(errors) == 1e-5 else [f"error {max(errors):.1e} is too large"]
    assert (row["error"], row["problems"]) == (max(errors), told)


def test_registers_in_scratch_memory_are_spills():
    """LLVM counts only those that it stored one by one."""
    assembly = " .vgpr_count: 40\n .vgpr_spill_count: 3\n .private_segment_fixed_size: 64\n"
    assert inspect_kernels.assembly_registers({"amdgcn": assembly}) == (40, 16)


def test_a_target_that_triton_cannot_compile_for_is_left_out(monkeypatch):
    from triton import knobs

    monkeypatch.setattr(knobs.NvidiaTool, "from_path", lambda path: None)
    assert "Cannot find" in inspect_kernels.obstacle("sm_90") and inspect_kernels.obstacle("gfx942") is None


@pytest.mark.parametrize(
    ("target", "registers", "shared", "warps", "waves", "limit"),
    [
        ("gfx942", 64, 0, 4, 8, "waves"),
        ("gfx942", 65, 0, 4, 7, "registers"),
        ("gfx942", 32, 33 * 1024, 4, 1, "shared"),
        ("gfx942", 32, 0, 1, 4, "programs"),
        ("gfx950", 32, 80 * 1024, 4, 2, "shared"),
        ("gfx1100", 256, 0, 4, 5, "registers"),
        ("sm_80", 128, 0, 8, 4, "registers"),
        ("sm_90", 32, 114 * 1024, 8, 2, "shared"),  # and 1 KB of each program that it cannot use
        ("gfx942", 32, 64 * 1024, 1, 0.25, "shared"),
        ("gfx1100", 32, 64 * 1024, 4, 2, "shared"),  # two compute units are one
    ],
)
def test_occupancy(target, registers, shared, warps, waves, limit):
    assert occupancy(TARGETS[target], registers, shared, warps) == (waves, limit)
    assert occupancy(TARGETS["sm_100"], 32, 0, 4, tensor_memory=256) == (2, "tensor memory")


# ---------------------------------------------------------------- the command


@pytest.mark.parametrize(("problems", "status"), [([], 0), (["spills 3 registers"], 1)])
def test_a_kernel_that_does_not_fit_is_told_by_the_status(problems, status, monkeypatch):
    monkeypatch.setattr(inspect_kernels, "inspect_all", lambda options: [{"problems": []}, {"problems": problems}])
    monkeypatch.setattr(inspect_kernels, "as_text", str)
    assert inspect_kernels.main([]) == status


def test_the_table():
    result = run_tool(*"--target gfx90a sm_80 --dtype fp32 tf32 --preset tiny --kernel rope".split())
    assert result.returncode == 0, result.stderr
    header, *lines, total = result.stdout.splitlines()
    assert header.split() == inspect_kernels.COLUMNS
    assert [line.split()[:3] for line in lines] == [[gpu, "rope", "fp32,tf32"] for gpu in ("gfx90a", "sm_80")]
    assert {line.index("ROWS") for line in lines} == {header.index("constants")} and total == "2 kernels: all fit"
    assert result.stderr.startswith("compiling for 2 targets, two at a time: gfx90a, sm_80\n")
    told = [f"{i} of 2: {gpu}, 1 kernel\n" for i, gpu in ((1, "gfx90a"), (2, "sm_80"))]
    assert all(words in result.stderr for words in told)  # one in two precisions


def told_of_silence(seconds):
    """Return what is printed while rope's kernels compile, if silence may last so long."""
    told = []
    options = SimpleNamespace(kernel="rope", preset=["tiny"], sizes=[], tiles=[], warps=[], stages=[], dtype=["fp32"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inspect_kernels, "Pace", lambda: Pace(seconds))
        patch.setattr(inspect_kernels, "progress", told.append)
        rows = inspect_kernels.inspect("gfx90a", options)
    return [row["constants"] for row in rows], told


@pytest.mark.slow
def test_what_compiles_for_long_is_told(workers):
    """A target takes minutes with several tiles and warps."""
    assert workers.submit(told_of_silence, 1000).result()[1] == []
    constants, told = workers.submit(told_of_silence, 0).result()
    assert told == [f"gfx90a: compiling rope_kernel for fp32, {words}" for words in constants] and told


WRONG = ["--target gfx1", "--target gfx942 --hidden-dim 7", "--warps 8 --kernel rope", "--kernel nope"]
WRONG += ["--tiles 63x32", "--tiles 64x31", "--tiles 64x0"]


@pytest.mark.parametrize("argv", WRONG)
def test_bad_arguments(argv, capsys, monkeypatch):
    monkeypatch.setattr(inspect_kernels, "inspect_all", None)  # nothing is compiled
    words = f"--preset tiny --dtype bf16 {argv}".split()
    refused(inspect_kernels.main, words, capsys, words[-1])


def test_an_old_triton_is_refused_in_one_sentence(monkeypatch, capsys):
    import triton

    monkeypatch.setattr(triton, "__version__", "3.3.1")
    refused(inspect_kernels.main, ["--target", "gfx942"], capsys, "needs Triton 3.6 or newer, got 3.3.1")
