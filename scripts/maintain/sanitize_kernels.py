"""Run every kernel of version 3, forward and backward, at shapes that divide no tile; sanitize.sh watches.

    python sanitize_kernels.py --list            groups, and what the names of their kernels contain
    python sanitize_kernels.py rmsnorm rope      runs these groups on the GPU, or in Triton's interpreter

Exit status: 0; 1 where a result is not finite; 2 for an unknown group.
"""

import pathlib
import sys

import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from common.command_line import Failure, Parser, run_tool
from common.versions import load_version


def backward(*outputs):
    """Back-propagate random gradients of the outputs."""
    torch.autograd.backward(outputs, [torch.randn_like(output) for output in outputs])


def random_leaf(*shape, device, dtype):
    return torch.randn(shape, device=device, dtype=dtype, requires_grad=True)


def rmsnorm(script, like):
    for rows, C in ((37, 100), (1, 16), (300, 513)):
        residual, branch = random_leaf(rows, C, **like), random_leaf(rows, C, **like)
        w = random_leaf(C, device=like["device"], dtype=torch.float32)
        backward(*script.add_rms_norm(residual, branch, w, 1e-6))
        backward(script.add_rms_norm(residual, None, w, 1e-6)[1])
        yield from (residual.grad, branch.grad, w.grad)


def rope(script, like):
    for B, T, H, K, D in ((2, 37, 3, 3, 32), (1, 5, 4, 2, 16), (1, 1, 2, 1, 128)):
        x = random_leaf(B, T, H + 2 * K, D, **like)
        backward(script.rope(x, *script.rope_tables(T, D, 10000.0, like["device"]), H + K))
        yield x.grad


def swiglu(script, like):
    for rows, width in ((37, 50), (3, 3000), (1, 1)):
        x = random_leaf(rows, 2 * width, **like)
        y = script.packed_swiglu(x)
        backward(y)
        yield from (y.detach(), x.grad)


def attention(script, like):
    shapes = (2, 97, 4, 2, 32), (1, 1, 4, 1, 64), (1, 130, 8, 1, 16), (1, 200, 2, 1, 128), (1, 1100, 2, 2, 64)
    for B, T, H, K, D in shapes:
        if like["device"].type == "cpu" and T > 100:
            continue  # the interpreter would take minutes
        qkv = random_leaf(B, T, H + 2 * K, D, **like)
        backward(script.flash_attention(qkv, H, K))
        yield qkv.grad
        qkv = random_leaf(B, T, H + 2 * K, D, **like)
        backward(script.rotary_attention(qkv, *script.rope_tables(T, D, 10000.0, like["device"]), H, K))
        yield qkv.grad


def cross_entropy(script, like):
    for rows, V in ((37, 50), (5, 1000), (3, 70001)):
        logits = random_leaf(rows, V, **like)
        script.cross_entropy(logits, torch.randint(V, (rows,), device=like["device"])).backward()
        yield logits.grad


def adamw(script, like):
    """One step, and with float16 one whose gradients overflow."""
    shapes = ((7, 13), (4096,), (1,), (3, 5000))
    parameters = [torch.nn.Parameter(torch.randn(shape, device=like["device"])) for shape in shapes]
    optimizer = script.FusedAdamW(parameters, lr=1e-3, matrix_dtype=like["dtype"])
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    scaler = torch.amp.GradScaler(like["device"].type, enabled=like["dtype"] == torch.float16)
    scaler.scale(torch.zeros((), device=like["device"]))
    for last in (1.0, float("inf")):
        parameters[0].grad[-1] = last if scaler.is_enabled() else 1.0
        scaler.step(optimizer)
        scaler.update()
    yield from (parameter.detach() for parameter in parameters)


def fp8(script, like):
    """A feed-forward part, once: its weights are bfloat16 in any model; its sizes must be multiples of 16."""
    if like["dtype"] != torch.float32 or script.fp8_dtype(script.gpu_architecture(like["device"])) is None:
        return
    like = like | {"dtype": torch.bfloat16}
    for tokens, C, width in ((112, 48, 80), (16, 16, 16), (48, 304, 528)):
        gate_up = script.FP8Linear(C, 2 * width, bias=False, **like)
        down = script.FP8Linear(width, C, bias=False, **like)
        script.FP8Weights(torch.nn.Sequential(gate_up, down)).update()
        x = random_leaf(tokens, C, **like)
        y = script.FP8FeedForwardFunction.apply(x, gate_up.weight, down.weight, gate_up, down)
        backward(y)
        yield from (y.detach(), x.grad, gate_up.weight.grad, down.weight.grad)


# group -> what runs it, and what the names of its kernels contain
GROUPS = {
    "rmsnorm": (rmsnorm, ("rmsnorm_", "column_sum_")),
    "rope": (rope, ("rope_",)),
    "swiglu": (swiglu, ("swiglu_forward_kernel", "swiglu_backward_kernel")),
    "attention": (attention, ("attention_",)),
    "cross_entropy": (cross_entropy, ("cross_entropy_",)),
    "adamw": (adamw, ("adamw_",)),
    "fp8": (fp8, ("quantize_", "transpose_")),
}


def run_group(name, device):
    """Run a group in every dtype the device can compute with; Failure where a result is left unwritten."""
    script, (function, _) = load_version(3), GROUPS[name]
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.float16) + ((torch.bfloat16,) if device.type == "cuda" else ()):
        for result in function(script, {"device": device, "dtype": dtype}):
            if not result.isfinite().all():
                raise Failure(1, f"{name} in {dtype} gives a result that is not finite")


def work(argv):
    parser = Parser("sanitize_kernels.py", __doc__, with_json=False)
    parser.add_argument("groups", nargs="*", metavar="GROUP", help=f"{', '.join(GROUPS)} (all)")
    parser.add_argument("--list", action="store_true", help="print the groups and the names of their kernels")
    options = parser.parse_args(argv)
    for name in options.groups:
        if name not in GROUPS:
            parser.error(f"there is no group {name}: choose from {', '.join(GROUPS)}")
    if options.list:
        print("\n".join(" ".join((name, *kernels)) for name, (_, kernels) in GROUPS.items()))
        return
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for name in options.groups or GROUPS:
        run_group(name, device)
        print(f"{name}: done", flush=True)


def main(argv=None):
    return run_tool("sanitize_kernels.py", lambda: work(argv))


if __name__ == "__main__":
    sys.exit(main())
