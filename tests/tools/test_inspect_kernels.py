"""Version 3's kernels compiled for GPUs that are not here, and the sense of the tool that does it."""

import functools
import itertools
import json
import os
import re
import subprocess
import sys

import pytest
import torch

import inspect_kernels
from common.versions import REPOSITORY, load_version
from inspect_kernels import (
    PRECISIONS,
    TARGETS,
    Kernel,
    exercise_cases,
    inspect_cases,
    occupancy,
    other_tiles,
    preset_cases,
)

TOOL = REPOSITORY / "scripts" / "inspect_kernels.py"
pytestmark = pytest.mark.skipif(bool(inspect_kernels.too_old()), reason=f"the tool {inspect_kernels.too_old()}")

# Kernels that do not fit, in a module of their own; read by a process that does not interpret.
WRONG = """
import torch
import triton
import triton.language as tl


@triton.jit
def product_kernel(x_ptr, y_ptr, SIZE: tl.constexpr):
    offsets = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    x = tl.load(x_ptr + offsets)
    tl.store(y_ptr + offsets, tl.dot(x, x, input_precision="ieee"))


@triton.jit
def rows_kernel(x_ptr, y_ptr, SIZE: tl.constexpr):
    offsets = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    x = tl.load(x_ptr + offsets)
    tl.store(y_ptr + offsets, x / tl.sum(x))


@triton.jit
def missing_kernel(x_ptr):
    tl.store(x_ptr, nowhere)


def gpu_architecture(device):
    return "cpu"


def program_count(device):
    return 1


def tensors(dtype, size):
    return [torch.empty(size, size, dtype=d, device="meta") for d in (dtype, torch.float32)]


def product(dtype, size, warps):
    product_kernel[(1,)](*tensors(dtype, size), size, num_warps=warps)


def rows(size):
    rows_kernel[(1,)](*tensors(torch.float32, size), size, num_warps=1)
"""
DRIVER = """
import importlib, json, os, sys
os.environ["TRITON_INTERPRET"] = "0"
sys.path[:0] = [{scripts!r}, {folder!r}]
import torch
import triton
from unittest import mock
from inspect_kernels import Case, SOURCES, Source, case_launches, inspect_launch, obstacle
wrong = importlib.import_module("wrong")
for name, target, run in (
    ("too much shared memory", "gfx942", lambda module, argv: module.product(torch.bfloat16, 256, 8)),
    ("spills", "sm_90", lambda module, argv: module.product(torch.bfloat16, 256, 8)),
    ("spills", "gfx1100", lambda module, argv: module.rows(128)),
    ("spills", "sm_80", lambda module, argv: module.rows(128)),
    ("fits", "gfx942", lambda module, argv: module.product(torch.bfloat16, 64, 4)),
    ("fits", "sm_90", lambda module, argv: module.product(torch.bfloat16, 64, 4)),
    ("fits", "gfx1100", lambda module, argv: module.product(torch.float32, 16, 4)),
    ("too small for matrix units", "gfx90a", lambda module, argv: module.product(torch.bfloat16, 4, 1)),
    ("missing", "gfx950", lambda module, argv: module.missing_kernel[(1,)](torch.empty(4, device="meta"))),
):
    SOURCES["wrong"] = Source(lambda: wrong, run)
    row = inspect_launch(*case_launches(Case("wrong", "", ()), target))
    print(json.dumps([name, target, row.problems(), vars(row)]))
with mock.patch.object(triton.knobs.NvidiaTool, "from_path", lambda path: None):
    print(json.dumps(["obstacle", "sm_90", obstacle("sm_90"), None]))
print(json.dumps(["obstacle", "gfx942", obstacle("gfx942"), None]))
"""


@pytest.fixture(autouse=True, scope="module")
def own_cache(tmp_path_factory):
    """Nothing compiled before, so that what is tested is compiled now; inherited by the tool's processes."""
    saved = os.environ.get("TRITON_CACHE_DIR")
    os.environ["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    yield
    os.environ.pop("TRITON_CACHE_DIR") if saved is None else os.environ.update(TRITON_CACHE_DIR=saved)


def run_tool(*argv):
    command = [sys.executable, str(TOOL), *argv]
    return subprocess.run(command, capture_output=True, text=True, check=False)


# ---------------------------------------------------------------- what training launches


CHECKED = ("fp32", "bf16", "fp16")
WITH_FP8 = ("gfx942", "gfx950", "sm_90", "sm_100")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_everything_the_presets_launch_fits_every_target(tmp_path):
    """The promise to GPUs that are not here: nothing spills, all fits, products of 16-bit tiles use matrix units.

    One test for all, because compiling takes minutes.
    """
    cases = preset_cases(["small", "medium"], (*CHECKED, "fp8")) + exercise_cases(CHECKED, -1)
    rows = inspect_cases(cases, list(TARGETS), dump_folder=tmp_path)
    every = {name for name in vars(load_version(3)) if name.endswith("_kernel")}
    fp8 = {name for name in every if "quantize" in name or name == "transpose_kernel"}
    kernels = every - fp8
    exercises = {file.parent.name for file in inspect_kernels.EXERCISES.glob("*/solution.py")}
    for target, precision in itertools.product(TARGETS, CHECKED):
        found = [row for row in rows if row.target == target and precision in row.precisions]
        assert {row.kernel for row in found if row.source == "v3"} == kernels, (target, precision)
        assert {row.source for row in found} - {"v3"} == exercises, (target, precision)
    for target in TARGETS:  # the quantizing kernels compute SwiGLU themselves
        found = {row.kernel for row in rows if row.target == target and "fp8" in row.precisions}
        in_bf16 = {name for name in kernels if not name.startswith("swiglu")}
        assert found == (in_bf16 | fp8 if target in WITH_FP8 else set()), target
    assert [f"{row.title()}: {row.problems()}" for row in rows if row.problems()] == []
    # Figures that were misread would be 0 or 1. Exercise 01 needs 6 registers on gfx942, and no kernel needs less.
    small = [row.title() for row in rows if row.registers < (9 if row.source == "v3" else 6) or row.code_bytes <= 300]
    assert small == []
    assert all(row.waves >= 0.5 for row in rows)
    products = [row for row in rows if "attention" in row.kernel and "fp32" not in row.precisions]
    assert products and all(row.low_precision_dots >= 2 and row.matrix_instructions for row in products)
    assert_fewest_spills([row for row in rows if row.spills])
    assert_occupancy_is_what_llvm_says(tmp_path)


def assert_fewest_spills(spilling):
    """Where spills are no fault: no smaller tile and no more warps give fewer of them than what the kernel has."""
    for row in spilling:
        cases = preset_cases(["small", "medium"], row.precisions) + exercise_cases(row.precisions, -1)
        cases = [case for case in cases if case.source == row.source]
        tiles = [(16, 16), (32, 16), (32, 32), (64, 32)]  # the shorter side divides the longer: the walks need it
        tiles = [tile[::-1] for tile in tiles] if "dkdv" in row.kernel else tiles
        change = functools.partial(other_tiles, tiles=tiles, warps=[4, 8, 16], stages=[1])
        others = inspect_cases(cases, [row.target], row.kernel, change=change)
        better = [other.constants for other in others if other.spills < row.spills]
        assert not better, f"{row.title()} spills {row.spills} registers"


def assert_occupancy_is_what_llvm_says(folder):
    """LLVM notes the waves that registers allow under the assembly; shared memory is not known to it."""
    seen = set()
    for file in folder.glob("*.amdgcn"):
        text, target = file.read_text(), file.name.split("_")[0]
        registers = int(re.search(r"\.vgpr_count:\s*(\d+)", text).group(1))
        noted = int(re.search(r"; Occupancy: (\d+)", text).group(1))
        assert occupancy(TARGETS[target], registers, 0, 4)[0] == noted, file.name
        seen.add((target, noted))
    assert {target for target, _ in seen} == {name for name, target in TARGETS.items() if target.backend == "hip"}
    assert len({noted for _, noted in seen}) >= 5


def test_a_launch_has_the_specializations_of_a_real_one():
    """Multiples of 16 and ones are known to the compiler; a sequence length that is neither is not."""
    cases = [inspect_kernels.Case("v3", "", ("--preset", "tiny", "--seq-len", length)) for length in ("48", "49", "1")]
    with inspect_kernels.Workers(1) as workers:
        found = workers.all(inspect_kernels.case_launches, [(case, "gfx942") for case in cases])
    described = []
    for launches in found:
        launch = next(launch for launch in launches if launch.kernel == "attention_forward_kernel")
        T = list(launch.signature).index("T")
        described.append((launch.signature["T"], launch.attributes.get((T,), []), launch.constexprs.get((T,))))
        assert launch.signature["qkv_ptr"] == "*fp32" and launch.signature["scale"] == "fp32"
        assert ["tt.divisibility", 16] in launch.attributes[(0,)] and ["tt.pointer_range", 32] in launch.attributes[
            (0,)
        ]
    assert described == [("i32", [["tt.divisibility", 16]], None), ("i32", [], None), ("constexpr", [], 1)]


@pytest.mark.parametrize("target", ["gfx942", "gfx90a"])
def test_fp8_is_launched_where_it_is_multiplied(target):
    """Its weights are quantized on targets that multiply in fp8; on others the case has no launch at all."""
    (case,) = preset_cases(["tiny"], ["fp8"])
    with inspect_kernels.Workers(1) as workers:
        (launches,) = workers.all(inspect_kernels.case_launches, [(case, target)])
    assert ("quantize_weights_kernel" in {launch.kernel for launch in launches}) == (target in WITH_FP8)
    assert bool(launches) == (target in WITH_FP8)
    for launch in launches:
        if launch.kernel == "quantize_rows_kernel":
            assert launch.signature["x_ptr"] == "*bf16" and launch.signature["q_ptr"] == "*fp8e4b8"


def test_launches_have_the_tiles_of_a_gpu():
    """Small in every kernel: the interpreter's tiles are made for few programs, and cover whole rows."""
    rows = inspect_cases(preset_cases(["small"], ["fp32"]), ["gfx942"], "column_sum")
    assert rows and all("ROWS=128 BLOCK=8" in row.title() for row in rows)


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
    rows = inspect_cases(preset_cases(["tiny"], [precision]), [target])
    argv = [str(REPOSITORY / "scripts"), "--preset", "tiny", "--no-graph", *PRECISIONS[precision]]
    done = subprocess.run([sys.executable, "-c", STEP, *argv], capture_output=True, text=True, check=True)
    launched = json.loads(done.stdout.splitlines()[-1])
    for name in {row.kernel for row in rows}:
        assert {row.hash for row in rows if row.kernel == name} & set(launched[name]), name


# ---------------------------------------------------------------- what does not fit is seen


@functools.cache
def wrong_kernels(folder):
    (folder / "wrong.py").write_text(WRONG)
    (folder / "driver.py").write_text(DRIVER.format(scripts=str(TOOL.parent), folder=str(folder)))
    result = subprocess.run([sys.executable, str(folder / "driver.py")], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    rows = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("[")]
    return {(name, target): (problems, facts) for name, target, problems, facts in rows}


def test_kernels_that_do_not_fit_are_named(tmp_path_factory):
    found = wrong_kernels(tmp_path_factory.getbasetemp())
    problems, facts = found["too much shared memory", "gfx942"]
    assert any("shared memory" in text for text in problems) and facts["shared_bytes"] == 128 * 1024
    for key in (("too much shared memory", "gfx942"), ("spills", "sm_80"), ("spills", "sm_90")):
        problems, facts = found[key]
        assert any(f"spills {facts['spills']} registers" in text for text in problems) and facts["spills"] > 50
    problems, facts = found["too small for matrix units", "gfx90a"]
    assert any("matrix units" in text for text in problems) and facts["dots_without_matrix_units"] == 1
    assert any("does not compile" in text and "nowhere" in text for text in found["missing", "gfx950"][0])


def test_a_target_that_triton_cannot_compile_for_is_left_out(tmp_path_factory):
    found = wrong_kernels(tmp_path_factory.getbasetemp())
    assert "Cannot find" in found["obstacle", "sm_90"][0] and found["obstacle", "gfx942"][0] is None


def test_spills_are_no_fault_outside_of_data_centres(tmp_path_factory):
    problems, facts = wrong_kernels(tmp_path_factory.getbasetemp())["spills", "gfx1100"]
    assert problems == [] and facts["spills"] > 100


def test_kernels_that_fit_have_nothing_against_them(tmp_path_factory):
    found = wrong_kernels(tmp_path_factory.getbasetemp())
    assert {key[1]: problems for key, (problems, _) in found.items() if key[0] == "fits"} == {
        "gfx942": [], "sm_90": [], "gfx1100": [],
    }  # fmt: skip
    assert set(found["fits", "gfx942"][1]["matrix_instructions"]) == {"mfma"}
    assert set(found["fits", "sm_90"][1]["matrix_instructions"]) <= {"wgmma.mma_async", "mma.sync"}
    assert found["fits", "gfx1100"][1]["low_precision_dots"] == 0


def test_a_kernel_of_which_nothing_is_left_is_seen():
    """As Triton 3.7.1 makes of some TF32 products on sm_100: a trap instead of the kernel."""
    assert "writes no result" in Kernel("v3", "k", "sm_100", ["fp32"], "", registers=4).problems()[0]


# ---------------------------------------------------------------- occupancy


@pytest.mark.parametrize(
    ("target", "registers", "shared", "warps", "waves", "limit"),
    [
        ("gfx942", 64, 0, 4, 8, "waves"),
        ("gfx942", 65, 0, 4, 7, "registers"),
        ("gfx942", 256, 0, 4, 2, "registers"),
        ("gfx942", 257, 0, 4, 1, "registers"),
        ("gfx942", 32, 33 * 1024, 4, 1, "shared"),
        ("gfx950", 32, 80 * 1024, 4, 2, "shared"),
        ("gfx1100", 96, 0, 4, 16, "waves"),
        ("gfx1100", 256, 0, 4, 5, "registers"),
        ("sm_80", 255, 0, 4, 2, "registers"),
        ("sm_80", 128, 0, 8, 4, "registers"),
        ("sm_90", 32, 227 * 1024, 8, 2, "shared"),
        ("sm_90", 32, 113 * 1024, 8, 4, "shared"),
        ("gfx942", 32, 0, 1, 4, "programs"),
    ],
)
def test_occupancy(target, registers, shared, warps, waves, limit):
    assert occupancy(TARGETS[target], registers, shared, warps) == (waves, limit)


def test_occupancy_counts_tensor_memory():
    assert occupancy(TARGETS["sm_100"], 32, 0, 4, tensor_memory=256) == (2, "tensor memory")


# ---------------------------------------------------------------- the command


def test_table_and_assembly(tmp_path):
    folder = tmp_path / "two words"
    argv = ["--target", "gfx90a", "sm_80", "--dtype", "bf16", "--preset", "tiny", "--kernel", "rope", "--source", "v3"]
    result = run_tool(*argv, "--dump-assembly", str(folder), "--jobs", "1")
    assert result.returncode == 0, result.stderr
    header, *lines, total = result.stdout.splitlines()
    assert header.split() == list(inspect_kernels.COLUMNS)
    assert [line.split()[:3] for line in lines] == [["gfx90a", "v3", "rope"], ["sm_80", "v3", "rope"]]
    starts = {line.index(cell) for line, cell in zip(lines, ["ROWS"] * 2, strict=True)}
    assert starts == {header.index("constants")} and total.startswith("2 kernels, ") and total.endswith("all fit")
    assert sorted(file.suffix for file in folder.iterdir()) == [".amdgcn", ".ptx"]
    assert all("rope_kernel" in file.read_text() for file in folder.iterdir())


def test_json():
    argv = ["--target", "gfx942", "--dtype", "fp32", "tf32", "--preset", "tiny", "--source", "v3"]
    result = run_tool(*argv, "--kernel", "swiglu_f", "--json")
    (row,) = json.loads(result.stdout)
    assert result.returncode == 0 and row["problems"] == [] and row["precisions"] == ["fp32", "tf32"]
    assert row["registers"] > 0 and row["code_bytes"] > 500


@pytest.mark.parametrize(
    "argv",
    [
        ["--target", "gfx1"],
        ["--jobs", "0"],
        ["--dtype", "fp4"],
        ["--tiles", "3x32"],
        ["--target", "gfx942", "--kernel", "nothing"],
        ["--target", "gfx942", "--warps", "8", "--kernel", "rope"],
    ],
)
def test_bad_arguments(argv):
    result = run_tool("--preset", "tiny", *argv)
    assert result.returncode == 2 and argv[-1] in result.stderr and result.stderr.count("\n") == 1


def test_an_old_triton_is_refused_in_one_sentence(monkeypatch, capsys):
    import triton

    monkeypatch.delattr(triton, "knobs", raising=False)
    monkeypatch.setattr(triton, "__version__", "3.3.1")
    assert inspect_kernels.main(["--target", "gfx942"]) == 2
    assert capsys.readouterr().err == "inspect_kernels.py: needs Triton 3.6 or newer, got 3.3.1\n"


def test_help_has_an_example():
    result = run_tool("--help")
    assert result.returncode == 0 and "python scripts/inspect_kernels.py --all --target gfx90a" in result.stdout
