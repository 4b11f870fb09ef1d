"""Hold execute_on_amd.py: other people's scripts and tests run unchanged, and its table says what happened."""

import json
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", minversion="3.6", reason="scripts/inspect_kernels.py needs it, too")

from amd.cuda_on_cpu import cuda_on_cpu
from common.versions import REPOSITORY
from marks import slow

COMMAND = REPOSITORY / "scripts" / "execute_on_amd.py"
HEAD = """
import torch, triton, triton.language as tl
D = torch.device("cuda")
"""

# A project that has modules named as ours, and does what libraries do around their kernels.
PROJECT = {
    "common.py": "def size():\n    return 300\n",
    "amd.py": "NAME = 'theirs'\n",
    "train.py": HEAD
    + '''
import sys
import amd, common

@triton.jit
def twice(x):
    return x + x

@triton.autotune([triton.Config({"BLOCK": 64}), triton.Config({"BLOCK": 128})], key=["n"])
@triton.jit
def scale_kernel(x, y, n, negative: "u1", BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a = twice(tl.load(x + i, mask=i < n))
    tl.store(y + i, tl.where(negative, -a, a * a), mask=i < n)

@triton.jit
def count_kernel(x, counter):
    tl.atomic_add(counter, tl.sum(tl.load(x + tl.arange(0, 64))))

assert amd.NAME == "theirs" and sys.argv[1:] == ["--steps", "2"] and __name__ == "__main__"
assert torch.cuda.is_available() and torch.version.hip
properties = triton.runtime.driver.active.utils.get_device_properties(0)
assert torch.cuda.get_device_properties(0).multi_processor_count == properties["multiprocessor_count"] == 304
n = common.size()
x = torch.randn(n, device=D).bfloat16().requires_grad_()
assert x.is_cuda and torch.empty_like(x, device="cuda:0").cuda().to(D, non_blocking=True).is_cuda
for negative in (True, False):
    y = torch.zeros(n, device="cuda", dtype=torch.bfloat16)
    scale_kernel[lambda meta: (triton.cdiv(n, meta["BLOCK"]),)](x.detach(), y, n, negative)
    a = x.detach() * 2
    torch.testing.assert_close(y, -a if negative else a * a)
counter = torch.zeros(1, device=D, dtype=torch.int32)
ones = torch.ones(64, device=D, dtype=torch.int32)
compiled = count_kernel.warmup(ones, counter, grid=(1,))
compiled._init_handles()
assert compiled.n_regs > 0 and counter.item() == 0, "warmup only compiles"
compiled[(3, 1, 1)](ones, counter)
assert counter.item() == 192
assert triton.testing.do_bench(lambda: count_kernel[(2,)](ones, counter)) == 1.0
assert counter.item() == 320
print("all of it ran")
''',
}  # fmt: skip


def write(folder, files):
    for name, text in files.items():
        (folder / name).write_text(text)


def run(folder, *options, status=0):
    """Return the table's rows {kernel: row}, as in the JSON, and all that the command printed."""
    command = [sys.executable, str(COMMAND), "--json", "rows.json", *options]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert result.returncode == status, result.stdout + result.stderr
    rows = json.loads((folder / "rows.json").read_text())["kernels"]
    return {row["kernel"]: row for row in rows}, result.stdout + result.stderr


@pytest.mark.slow
@pytest.mark.parametrize(("configurations", "launches", "compiled"), [("first", 2, 1), ("all", 4, 2)])
def test_a_project_runs_unchanged(configurations, launches, compiled, tmp_path, monkeypatch):
    """Also where Triton keeps the autotuner's choices of earlier runs, as version 3 asks it to."""
    monkeypatch.setenv("TRITON_CACHE_AUTOTUNING", "1")
    write(tmp_path, PROJECT)
    options = ["--target", "gfx942", "--compare", "--configurations", configurations]
    rows, text = run(tmp_path, *options, "--", "train.py", "--steps", "2")
    assert "all of it ran" in text and "times mean nothing" in text
    scale, count = rows["scale_kernel"], rows["count_kernel"]
    assert (scale["launches"], scale["configurations"]) == (launches, compiled)
    assert count["launches"] == 2 and count["differs"] == scale["differs"] == "no"
    assert scale["instructions"]["vector"] and not scale["faults"] and not scale["unsupported"]


TUNED = (
    HEAD
    + """
configs = [triton.Config({"STEP": step}) for step in (1, 2, 3, 65536)]

@triton.autotune(configs, key=[], restore_value=["y"])
@triton.jit
def steps_kernel(y, STEP: tl.constexpr):
    i = tl.arange(0, 64)
    tl.static_assert(STEP != 1 and STEP < 65536, "does not fit")
    tl.store(y + i, tl.load(y + i) + STEP)

for turn in range(2):
    y = torch.zeros(64, device=D)
    steps_kernel[(1,)](y)
    print("step", *y.unique().tolist())
"""
)


@pytest.mark.parametrize(
    ("asked", "step", "launches"), [("first", 2, 2), ("1", 2, 2), ("2", 3, 2), ("9", 3, 2), ("all", 2, 4)]
)
def test_a_script_gets_the_results_of_the_configuration_that_is_asked_for(asked, step, launches, tmp_path):
    """Only the first one's could be seen, so a kernel that is wrong in another one passed."""
    write(tmp_path, {"script.py": TUNED})
    rows, text = run(tmp_path, "--target", "gfx942", "--configurations", asked, "--", "script.py")
    assert text.count(f"step {step}.0") == 2 and rows["steps_kernel"]["launches"] == launches


@pytest.mark.parametrize("asked", ["0", "each"])
def test_configurations_that_are_none(asked, tmp_path):
    write(tmp_path, {"script.py": TUNED})
    command = [sys.executable, str(COMMAND), "--configurations", asked, "--", "script.py"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 2 and "--configurations" in result.stderr


FAULTS = (
    HEAD
    + """
from triton.language.extra import libdevice

@triton.jit
def flushes_kernel(a, b, c):
    i = tl.arange(0, 32)
    at = i[:, None] * 32 + i[None, :]
    tl.store(c + at, tl.dot(tl.load(a + at), tl.load(b + at)))

@triton.jit
def asin_kernel(x, y):
    i = tl.arange(0, 64)
    tl.store(y + i, libdevice.asin(tl.load(x + i)))

@triton.jit
def strays_kernel(x, y):
    i = tl.arange(0, 128)
    tl.store(y + i, tl.load(x + i))

@triton.jit
def endless_kernel(x):
    while tl.atomic_cas(x, 0, 1) == 1:
        pass

a = torch.full((32, 32), 2.0**-20, device=D, dtype=torch.float16)
flushes_kernel[(1,)](a, torch.ones_like(a), torch.empty(32, 32, device=D))
x = torch.rand(64, device=D)
y = torch.empty_like(x)
asin_kernel[(1,)](x, y)
torch.testing.assert_close(y, x.asin())
for kernel, *tensors in ((strays_kernel, x, y), (endless_kernel, torch.ones(1, device=D, dtype=torch.int32))):
    try:
        kernel[(1,)](*tensors)
    except Exception as error:
        print("caught", error)
"""
)


def test_the_table_says_what_differs_and_what_is_wrong(tmp_path):
    """CDNA 2's matrix units flush float16 numbers below 6e-5 to zero: only AMD's code shows it."""
    write(tmp_path, {"script.py": FAULTS})
    rows, text = run(tmp_path, "--target", "gfx90a", "--compare", "--instructions", "3000", "--", "script.py", status=1)
    flushes = rows["flushes_kernel"]["differs"]
    assert flushes.startswith("by at most 1.0e+00 at c[0, 0]: 0 on gfx90a, 3.05176e-05 interpreted")
    assert rows["flushes_kernel"]["matrix_cycles"] == 4 * 4 * 64  # each wave multiplies all: 4 instructions deep
    assert flushes.endswith("stored by program (0, 0, 0)") and f"flushes_kernel: differs {flushes}" in text
    assert rows["asin_kernel"]["differs"].startswith("cannot compare: Triton's interpreter fails")
    (fault,) = rows["strays_kernel"]["faults"]
    assert "a load outside every tensor" in fault and "script.py:21" in fault and f"caught gfx90a {fault}" in text
    assert rows["endless_kernel"]["faults"] == ["endless_kernel: more than 3,000 instructions"]
    options = ["--target", "gfx942", "--compare", "--kernel", "flushes", "--instructions", "3000"]
    rows, _ = run(tmp_path, *options, "--", "script.py", status=1)
    assert list(rows) == ["flushes_kernel", "strays_kernel", "endless_kernel"]  # those that are wrong are listed, too
    assert rows["flushes_kernel"]["differs"] == "no"


BYTES = (
    HEAD
    + """
import sys

@triton.jit
def quantized_kernel(a, b, scale, c, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, STEP: tl.constexpr):
    i, j, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, STEP)
    total = tl.zeros((M, N), dtype=tl.int32)
    for first in range(0, K, STEP):
        rows = tl.load(a + i[:, None] * K + first + k[None, :])
        total += tl.dot(rows, tl.load(b + (first + k)[:, None] * N + j[None, :]))
    tl.store(c + i[:, None] * N + j[None, :], total.to(tl.float32) * tl.load(scale + j)[None, :])

@triton.jit
def matmul_kernel(a, b, c, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    i, j, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    tl.store(c + i[:, None] * N + j[None, :], tl.dot(tl.load(a + i[:, None] * K + k[None, :]),
                                                     tl.load(b + k[:, None] * N + j[None, :])))

fp8 = [torch.float8_e4m3fn, torch.float8_e5m2]
if "fnuz" in sys.argv:
    fp8 = [torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]
scale = torch.rand(64, device=D)
for M, N, K, step in ((32, 64, 128, 64), (16, 16, 96, 32)):
    a = torch.randint(-128, 128, (M, K), dtype=torch.int8, device=D)
    b = torch.randint(-128, 128, (K, N), dtype=torch.int8, device=D)
    c = torch.empty(M, N, device=D)
    quantized_kernel[(1,)](a, b, scale, c, M, N, K, step)
    assert torch.equal(c, (a.int() @ b.int()).float() * scale[:N])
    for dtype in fp8:
        a, b = (torch.randint(-6, 7, shape, device=D).float() for shape in ((M, step), (step, N)))
        matmul_kernel[(1,)](a.to(dtype), b.to(fp8[0]), c, M, N, step)
        assert torch.equal(c, a @ b), dtype
print("all of it ran")
"""
)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201"])
def test_matmuls_of_bytes(target, tmp_path):
    write(tmp_path, {"script.py": BYTES})
    rows, text = run(tmp_path, "--target", target, "--", "script.py", *["fnuz"] * (target == "gfx942"))
    assert "all of it ran" in text
    assert rows["quantized_kernel"]["instructions"]["matrix"] and rows["matmul_kernel"]["launches"] == 4


CHOICES = (
    HEAD
    + """
@triton.autotune([triton.Config({"SIDE": 128}, num_stages=1), triton.Config({"SIDE": 16}, num_stages=1)], key=[])
@triton.jit
def transpose_kernel(x, y, SIDE: tl.constexpr):
    i = tl.arange(0, SIDE)
    a = tl.load(x + i[:, None] * 128 + i[None, :])
    tl.store(y + i[:, None] * 128 + i[None, :], tl.trans(a))

x = torch.randn(128, 128, device=D, dtype=torch.float64)
y = torch.zeros_like(x)
transpose_kernel[(1,)](x, y)
print("side", transpose_kernel.best_config.kwargs["SIDE"])
assert y[3, 5] == x[5, 3]
"""
)


@pytest.mark.parametrize(("target", "side"), [("gfx942", 16), slow("gfx950", 128)])
@pytest.mark.slow
def test_autotune_takes_the_first_configuration_that_fits(target, side, tmp_path):
    """128 x 128 numbers of 8 bytes need 128 KiB of LDS or more: too much for gfx942, not for gfx950."""
    write(tmp_path, {"script.py": CHOICES})
    _, text = run(tmp_path, "--target", target, "--", "script.py")
    assert f"side {side}" in text


LIBRARY = {
    "library.py": HEAD.replace('D = torch.device("cuda")', "")
    + '''
@triton.jit
def square_kernel(x, y, N: tl.constexpr):
    i = tl.arange(0, N)
    a = tl.load(x + i)
    tl.store(y + i, a * a)

def square(x):
    y = torch.empty_like(x)
    square_kernel[(1,)](x, y, x.numel())
    return y
''',
    "test_library.py": '''
import pytest, torch
from library import square

@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_square(dtype):
    x = torch.randn(64, device="cuda", dtype=dtype)
    torch.testing.assert_close(square(x), x * x)

def test_wrong():
    x = torch.randn(64, device="cuda")
    torch.testing.assert_close(square(x), x + x)
''',
}  # fmt: skip


@pytest.mark.slow
def test_a_library_runs_its_own_tests(tmp_path):
    write(tmp_path, LIBRARY)
    pytest_options = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "test_library.py"]
    rows, text = run(tmp_path, "--target", "gfx1100", "--", *pytest_options, "-k", "square")
    assert rows["square_kernel"]["launches"] == 2 and "2 passed, 1 deselected" in text
    rows, text = run(tmp_path, "--target", "gfx1100", "--", *pytest_options, status=1)
    assert rows["square_kernel"]["launches"] == 3 and "1 failed, 2 passed" in text


@pytest.mark.slow
def test_what_cannot_be_run_is_said(tmp_path):
    for command, sentence in (
        (["none.py"], "there is no script none.py"),
        (["-m"], "-m needs the name of a module"),
    ):
        result = subprocess.run([sys.executable, COMMAND, "--", *command], capture_output=True, text=True, cwd=tmp_path)
        assert result.returncode == 2 and sentence in result.stderr and "Traceback" not in result.stderr
    write(tmp_path, {"script.py": "print('nothing here')\n"})
    rows, text = run(tmp_path, "--", "script.py")
    assert not rows and "launched no Triton kernel" in text


WAITS = (
    HEAD
    + """
import time

@triton.jit
def one_kernel(x):
    tl.store(x + tl.arange(0, 64), 1)

x = torch.zeros(64, device=D, dtype=torch.int32)
one_kernel[(1,)](x)
print("launched", flush=True)
time.sleep(600)
"""
)


@pytest.mark.slow
def test_ctrl_c_prints_the_table_of_what_was_executed(tmp_path):
    write(tmp_path, {"script.py": WAITS})
    command = [sys.executable, str(COMMAND), "--compare", "--", "script.py"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stdout.readline() == "launched\n"
        time.sleep(0.5)
        os.killpg(process.pid, signal.SIGINT)
        text = process.stdout.read()
    assert process.returncode == 130 and "one_kernel" in text


@pytest.mark.parametrize(
    "made",
    [
        lambda: torch.ones(2, device=0),
        lambda: torch.ones(2).to(0, torch.float16),
        lambda: torch.ones(2).to(device=0),
        lambda: torch.ones(2, device=torch.device(0)),
        lambda: torch.nn.Linear(2, 2).to(0).weight,
        lambda: torch.nn.Linear(2, 2, device=0).to(torch.float16, non_blocking=True).weight,
        lambda: torch.randn(2, device=0, generator=torch.Generator(device=0)),
    ],
)
def test_a_gpu_may_be_given_as_a_number(made):
    """Scripts pass their rank: Module.to(rank)."""
    with cuda_on_cpu("gfx942"):
        assert torch.device(0) == torch.device("cuda:0") and made().is_cuda


@pytest.mark.parametrize("name", ["AdamW", "RMSprop", "SGD"])
def test_an_optimizer_steps(name):
    """Most of PyTorch 2.13's ask the accelerator's stream whether a graph is being captured."""
    with cuda_on_cpu("gfx942"):
        layer = torch.nn.Linear(4, 4).cuda()
        before = layer.weight.detach().clone()
        optimizer = getattr(torch.optim, name)(layer.parameters(), lr=0.1)
        layer(torch.ones(2, 4, device="cuda")).sum().backward()
        optimizer.step()
    assert not torch.equal(layer.weight, before)


CAPTURABLE = ("Adadelta", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop")


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, {"foreach": foreach}) for name in CAPTURABLE for foreach in (False, True)),
        *((name, {"fused": True}) for name in ("Adam", "AdamW")),
    ],
    ids=str,
)
def test_a_capturable_optimizer_steps(name, options):
    """As the same optimizer does on the CPU, with a learning rate in a tensor."""

    def weights_after_three_steps(device, **given):
        torch.manual_seed(0)
        layer = torch.nn.Linear(4, 4).to(device)
        optimizer = getattr(torch.optim, name)(layer.parameters(), **given)
        for _ in range(3):
            layer(torch.ones(2, 4, device=device)).square().sum().backward()
            optimizer.step()
        return layer.weight.detach()

    wanted = weights_after_three_steps("cpu", lr=0.125)
    with cuda_on_cpu("gfx942"):
        lr = torch.tensor(0.125, device="cuda")
        found = weights_after_three_steps("cuda", lr=lr, capturable=True, **options)
    torch.testing.assert_close(found, wanted)


def test_a_graph_is_refused_in_one_sentence():
    with cuda_on_cpu("gfx942"), pytest.raises(RuntimeError, match="captures no graph"):
        torch.cuda.CUDAGraph()


def test_a_script_reports_its_memory():
    """PyTorch's own functions ask whether what they are given is a torch.cuda.device."""
    with cuda_on_cpu("gfx942"), torch.cuda.device(0):
        assert not isinstance(0, torch.cuda.device)
        assert torch.cuda.memory_stats().get("num_ooms", 0) == 0
        print(torch.cuda.memory_summary(abbreviated=True))


@pytest.mark.parametrize("place", ["cuda", "cuda:0", torch.device("cuda"), {"cpu": "cuda:0"}, None])
def test_a_checkpoint_is_loaded(place, tmp_path):
    torch.save({"weight": torch.arange(3.0)}, tmp_path / "saved.pt")
    with cuda_on_cpu("gfx942"):
        loaded = torch.load(tmp_path / "saved.pt", map_location=place)
    assert loaded["weight"].tolist() == [0.0, 1.0, 2.0]


def test_a_stream_is_set():
    with cuda_on_cpu("gfx942"):
        for module in (torch.cuda, torch.accelerator):
            module.set_stream(torch.cuda.Stream())


def test_accesses_of_a_source_line_are_added_up():
    from amd.execute import Totals
    from amd.own_kernels import Session

    load, other, store = (f"global_{name}" for name in ("load_dword v1, v0, s[2:3]", "load_dword v2, v0", "store_b64"))
    lines = {("a.py:3", load): [2, 8, 4], ("a.py:3", other): [1, 3, 1], ("a.py:4", store): [5, 10, 10]}
    banks = {("a.py:5", "ds_read_b32 v1, v0"): [1, 2, 1], ("a.py:6", "ds_read_b32 v1, v0"): [1, 1600, 1]}
    session = Session("gfx942")
    for totals in (Totals(lines=lines, banks=banks), Totals(lines=lines)):
        session.row("copy_kernel").add(SimpleNamespace(hash="", totals=totals))
    assert [line.split() for line in session.access_table("lines").splitlines()[1:]] == [
        ["copy_kernel", "a.py:3", "global_load_dword", "6", "22", "10"]
    ]
    assert [line.split()[1:] for line in session.access_table("banks").splitlines()[1:]] == [
        ["a.py:6", "ds_read_b32", "1", "1,600", "1"],
        ["a.py:5", "ds_read_b32", "1", "2", "1"],
    ]
    (content,) = session.report()
    loads, stores = content["memory"]
    assert loads["cache_lines"] == 22 and stores["times"] == 10 and len(content["lds"]) == 2
    assert Session("gfx942").access_table("lines") == ""


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("to", [torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16])
def test_the_comparison_rounds_as_triton_does(kind, to):
    """Triton's interpreter makes 4 of 7.6 in float8_e5m2."""
    import numpy as np
    import triton.language as tl
    from triton._C.libtriton import ir
    from triton.runtime import interpreter

    from amd.second_run import interpreting

    names = {
        torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32,
        torch.float8_e4m3fn: tl.float8e4nv, torch.float8_e5m2: tl.float8e5,
    }  # fmt: skip
    given = torch.cat([torch.linspace(-9, 9, 999), 2.0 ** torch.arange(-20, 8)]).to(kind)
    numbers = given.view(torch.int16).numpy().view(np.uint16) if kind is torch.bfloat16 else given.numpy()
    with interpreting():
        found = interpreter._convert_float(numbers, names[kind], names[to], ir.ROUNDING_MODE.RTNE)
    bits = torch.uint16 if to is torch.bfloat16 else torch.uint8
    assert torch.equal(torch.from_numpy(found).view(bits), given.to(to).view(bits))


def test_differences_are_measured_against_the_largest_number():
    from amd.second_run import largest_difference, rounding_of

    a = torch.tensor([[1.0, -8.0], [float("nan"), 2.0]])
    assert largest_difference(a, a.clone()) is None
    assert largest_difference(a, a + torch.tensor([[0.0, 0.0], [0.0, 0.5]])) == (0.0625, 3)
    assert largest_difference(a, a.nan_to_num(0.0)) == (float("inf"), 2)
    assert largest_difference(torch.tensor([1, 2]), torch.tensor([1, 3])) == (1 / 3, 1)
    assert rounding_of(torch.int32) == 0 and rounding_of(torch.bfloat16) == 2.0**-7
