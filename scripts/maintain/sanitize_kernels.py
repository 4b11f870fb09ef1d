"""Watch every kernel of version 3, forward and backward, with NVIDIA's compute-sanitizer.

    python scripts/maintain/sanitize_kernels.py                        # all three tools: more than five minutes
    python scripts/maintain/sanitize_kernels.py racecheck initcheck    # some of them
    python scripts/maintain/sanitize_kernels.py --run                  # launch the kernels once, without a tool

memcheck finds reads and writes outside a tensor, racecheck races in shared memory, and initcheck reads of memory that
nothing has written. The kernels run at shapes that no tile divides. Prints a line for each tool, and what the tool said
if it found something. Without a GPU, --run uses Triton's interpreter.

Exit status: 0 if nothing was found; 1 if something was, a result isn't finite, or there's no NVIDIA GPU or no
compute-sanitizer; 2 for a bad option.
"""

import os
import pathlib
import re
import shutil
import subprocess
import sys
from unittest import mock

import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from common.command_line import Failure, Parser, progress
from common.versions import SCRIPTS, load_version

TOOLS = ("memcheck", "racecheck", "initcheck")
FINISHED = "all kernels ran"
PROGRAM = [sys.executable, str(pathlib.Path(__file__).resolve()), "--run"]
LINES_SHOWN = 60  # of what a tool said
ATTENTION = [(2, 97, 4, 2, 32), (1, 1, 4, 1, 64), (1, 130, 8, 1, 16), (1, 200, 2, 1, 128), (1, 1100, 2, 2, 64)]

# ---------------------------------------------------------------- what is watched


def operations(v3, leaf, device):
    """Yield the outputs of each operation; leaf(*shape) makes its inputs."""

    def tables(T, D):
        return v3.rope_tables(T, D, 10000.0, device)

    for rows, C in ((37, 100), (1, 16), (300, 513)):
        w = leaf(C, dtype=torch.float32)
        yield v3.add_rms_norm(leaf(rows, C), leaf(rows, C), w, 1e-6)
        yield v3.add_rms_norm(leaf(rows, C), None, w, 1e-6)[1:]
    for B, T, H, K, D in ((2, 37, 3, 3, 32), (1, 5, 4, 2, 16), (1, 1, 2, 1, 128)):
        yield (v3.rope(leaf(B, T, H + 2 * K, D), *tables(T, D), H + K),)
    for rows, width in ((37, 50), (3, 3000), (1, 1)):
        yield (v3.packed_swiglu(leaf(rows, 2 * width)),)
    for B, T, H, K, D in ATTENTION:
        if device.type == "cuda" or T <= 100:  # the interpreter would take minutes
            yield (v3.flash_attention(leaf(B, T, H + 2 * K, D), H, K),)
            yield (v3.rotary_attention(leaf(B, T, H + 2 * K, D), *tables(T, D), H, K),)
    for rows, V in ((37, 50), (5, 1000), (3, 70001)):
        labels = torch.randint(V, (rows,), device=device)
        yield (v3.cross_entropy(leaf(rows, V), labels),)
        # In float32, whatever the dtype: a Hopper GPU's 16-bit matmul cannot be followed, see fp8_operations.
        x = leaf(rows, 16, dtype=torch.float32)
        w = leaf(V, 16, dtype=torch.float32)
        yield (v3.linear_cross_entropy(x, w, labels, 16),)


def matmul_of_scaled(x, x_scale, w, w_scale):
    """Return (x · x_scale) (w · w_scale)ᵀ in bfloat16, as version 3's fp8_matmul does, with a float32 matmul."""
    return ((x.float() * x_scale) @ (w.float() * w_scale.view(-1, 1)).t()).to(torch.bfloat16)


def fp8_operations(v3, leaf, device):
    """Yield the outputs of feed-forward parts in fp8, whose sizes must be multiples of 16.

    compute-sanitizer cannot follow the library's fp8 matmul on a Hopper GPU, even alone: initcheck sees nothing write
    its result, and racecheck ends with an error of its own. So a matmul in float32 stands in for it.
    """
    with mock.patch.object(v3, "fp8_matmul", matmul_of_scaled):
        for tokens, C, width in ((112, 48, 80), (16, 16, 16), (48, 304, 528)):
            gate_up = v3.FP8Linear(C, 2 * width, bias=False, device=device, dtype=torch.bfloat16)
            down = v3.FP8Linear(width, C, bias=False, device=device, dtype=torch.bfloat16)
            v3.FP8Weights(torch.nn.Sequential(gate_up, down)).update()
            yield (v3.FP8FeedForwardFunction.apply(leaf(tokens, C), gate_up.weight, down.weight, gate_up, down),)


def check_finite(tensors, what):
    if not all(tensor.isfinite().all() for tensor in tensors):
        raise Failure(1, f"{what} gives a result that is not finite")


def differentiate(function, v3, device, dtype):
    """Run the operations of a function and their backward with random gradients."""
    leaves = []

    def leaf(*shape, dtype=dtype):
        leaves.append(torch.randn(shape, device=device, dtype=dtype, requires_grad=True))
        return leaves[-1]

    for outputs in function(v3, leaf, device):
        torch.autograd.backward(outputs, [torch.randn_like(output) for output in outputs])
        check_finite([*outputs, *(tensor.grad for tensor in leaves)], f"{outputs[0].grad_fn.name()} in {dtype}")


def update(v3, device, dtype):
    """Take two steps of AdamW; with float16 the gradients of the second overflow."""
    shapes = ((7, 13), (4096,), (1,), (3, 5000))
    parameters = [torch.nn.Parameter(torch.randn(shape, device=device)) for shape in shapes]
    optimizer = v3.FusedAdamW(parameters, lr=1e-3, matrix_dtype=dtype)
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
    scaler.scale(torch.zeros((), device=device))
    for last in (1.0, float("inf")):
        parameters[0].grad[-1] = last if scaler.is_enabled() else 1.0
        scaler.step(optimizer)
        scaler.update()
    check_finite(parameters, f"AdamW in {dtype}")


def run_kernels():
    """Launch every kernel of version 3 and check that the results are finite."""
    v3 = load_version(3)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    dtypes = [torch.float32, torch.float16]
    if device.type == "cuda":
        dtypes.append(torch.bfloat16)
    for dtype in dtypes:
        progress(f"launching the kernels in {dtype} on {device.type}")
        differentiate(operations, v3, device, dtype)
        update(v3, device, dtype)
    if v3.fp8_dtype(v3.gpu_architecture(device)) is not None:
        differentiate(fp8_operations, v3, device, torch.bfloat16)
    print(FINISHED)


# ---------------------------------------------------------------- the tools


def find_sanitizer():
    """Return the path of compute-sanitizer; Failure with one sentence where it cannot watch anything."""
    if not torch.cuda.is_available() or torch.version.hip:
        instead = "on any machine, scripts/test.sh checks the same kernels between guard bands"
        raise Failure(1, f"compute-sanitizer watches NVIDIA GPUs only, and there is none here: {instead}")
    places = os.pathsep.join([os.environ.get("PATH", ""), "/usr/local/cuda/bin"])
    found = shutil.which("compute-sanitizer", path=places)
    if found is None:
        source = "it comes with the CUDA toolkit, or as the package nvidia-cuda-sanitizer-api"
        raise Failure(1, f"compute-sanitizer is not installed: {source}; put its folder on PATH")
    return found


def run(command, environment=None):
    """Run a command and return its exit status and all its output."""
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "errors": "replace"}
    done = subprocess.run(command, env=environment, **output)
    return done.returncode, done.stdout


def options_of(tool):
    """Return compute-sanitizer's options: initcheck must see what PyTorch's kernels write, the others only ours."""
    options = ["--tool", tool, "--target-processes", "application-only", "--error-exitcode", "1"]
    if tool == "memcheck":
        options += ["--padding", "4096"]
    if tool != "initcheck":
        for kernel in re.findall(r"^def (\w*_kernel)\(", SCRIPTS[3].read_text(), re.MULTILINE):
            options += ["--kernel-name", f"kns={kernel}"]
    return options


def watch(sanitizer, tool):
    """Run the kernels under a tool, print its line, and return whether it found nothing."""
    # Every tensor is an allocation of its own, with a gap behind it, instead of a part of PyTorch's pool.
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    progress(f"running them under {tool}")
    status, said = run([sanitizer, *options_of(tool), *PROGRAM], environment)
    summaries = re.findall(r"^=* ([A-Z]* SUMMARY: .*)", said, re.MULTILINE)
    summary = summaries[-1] if summaries else f"the tool ended with status {status} and no summary"
    print(f"{tool:10} {summary}", flush=True)
    finished = re.search(f"^{FINISHED}", said, re.MULTILINE)
    if status == 0 and "SUMMARY: 0 " in summary and finished:
        return True
    print("\n".join(said.splitlines()[:LINES_SHOWN]), flush=True)
    return False


def work(options):
    if options.run:
        return run_kernels()
    for tool in options.tools:
        if tool not in TOOLS:
            raise Failure(2, f"{tool} is no tool: choose memcheck, racecheck or initcheck")
    sanitizer = find_sanitizer()
    # Without the tools first: Triton compiles then, and a failure here is none of memory.
    progress("compiling the kernels, and running them without a tool")
    status, said = run(PROGRAM)
    if status:
        print(said, end="", flush=True)
        raise Failure(1, "the kernels do not run even without a tool: see above")
    clean = [watch(sanitizer, tool) for tool in options.tools or TOOLS]
    if not all(clean):
        raise Failure(1, "something was found: it is printed below its line")
    print("nothing was found")


def main(argv=None):
    parser = Parser("sanitize_kernels.py", __doc__, with_json=False)
    parser.add_argument("tools", nargs="*", metavar="TOOL", help=f"{', '.join(TOOLS)} (all)")
    parser.add_argument("--run", action="store_true", help="launch the kernels once, without a tool")
    return parser.run(work, argv)


if __name__ == "__main__":
    sys.exit(main())
