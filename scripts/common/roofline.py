"""Count FLOPs and bytes of the operators in a trace from their recorded shapes, and relate them to ceilings."""

import argparse
import functools
import itertools
import math
import re
import time

from common import counts
from common.command_line import Failure, add_gpu, add_steps, finite, progress
from common.gemm_probe import rounds_to_tf32
from common.gemms import FACTORS
from common.gemms import precision_of as precision_of_gemm
from common.gpus import GPUS, emulates_tf32, gpu_named, name_here, peak_tflops
from common.profiles import check_one_gpu, errors_of, precision_of_kernel, read_profile, steps_needed
from common.tables import rounded

ELEMENT_BYTES = {
    "float": 4, "double": 8, "c10::Half": 2, "c10::BFloat16": 2, "long int": 8, "int": 4, "bool": 1, "unsigned char": 1,
    "signed char": 1, "short int": 2, "c10::complex<float>": 8, "c10::complex<double>": 16,
    "TensorList": 4,  # the trace does not say which: the lists of this model are float32
}  # fmt: skip
PRODUCTS = {name: at for name, at in FACTORS.items() if name not in ("aten::_scaled_mm", "aten::linear")}
ATTENTION = re.compile(r"aten::_(scaled_dot_product|cudnn_attention|flash_attention|efficient_attention)_\w+")
OVER_A_LINK = re.compile("^Memcpy (HtoD|DtoH|PtoP)|HOST_TO_DEVICE|DEVICE_TO_HOST")

# Operators whose work does not follow from the shapes of their inputs.
UNTOLD = re.compile(
    r"^(?!aten::|triton_|Mem)|^triton_tem|"  # compiled regions, autograd functions, other libraries and kernels
    r"^triton_\w*(embedding|index|gather|scatter|slice|select|split)|"
    r"^aten::\w*(conv|lstm|gru|rnn|fft|linear|cdist)|^aten::linalg_(?!vector_norm)|^aten::_\w+_mm$|"  # other products
    r"^aten::_?(index(?!_select)|scatter|take|put|embedding_bag|grid_sampl)"  # they read or write a part
)


@functools.cache
def is_untold(name):
    return bool(UNTOLD.search(name))


def tensor_bytes(dims, kind, strides):
    """Return the bytes of a tensor, or of a list of tensors; a dimension with stride 0 is one and the same memory."""
    if kind not in ELEMENT_BYTES or (kind == "TensorList" and not dims):
        return 0
    pairs = itertools.zip_longest(dims, strides)
    if dims and isinstance(dims[0], list):
        return sum(tensor_bytes(size, kind, stride or []) for size, stride in pairs)
    return ELEMENT_BYTES[kind] * math.prod(1 if stride == 0 and size else size for size, stride in pairs)


def work(name, dims, types, strides):
    """Return FLOPs and the fewest possible bytes of an operator with these inputs; None where it cannot be told.

    Every input is read once and, where its size follows from them, the output written once. A Python autograd function,
    whose kernels read saved tensors too, cannot be told from its inputs, nor can a convolution, whose strides are none.
    """
    name = name.removeprefix("optimizer ")  # the mark of profiles.operators_that_compute
    tensors = [(size, kind) for size, kind in zip(dims, types, strict=False) if size]
    if is_untold(name) or any(kind not in ELEMENT_BYTES for _, kind in tensors):
        return None, None
    inputs = [tensor_bytes(*tensor) for tensor in zip(dims, types, strides, strict=False)]
    if tensors and not any(inputs):
        return 0.0, 0.0  # they are empty
    if not any(inputs):
        return None, None
    size = next(ELEMENT_BYTES[kind] for kind, n in zip(types, inputs, strict=False) if n)
    if name in PRODUCTS:
        (*batch, rows, inner), (*_, columns) = dims[PRODUCTS[name] :][:2]
        results = math.prod(batch) * rows * columns
        return 2.0 * inner * results, float(sum(inputs) + size * results)
    if attention := ATTENTION.fullmatch(name):
        # the causal half of two products; the backward makes five, and its first input is the output's gradient
        backward = name.endswith("backward")
        tokens = 1 if attention[1] in ("flash_attention", "efficient_attention") else 2  # their dimension of the query
        query = dims[1 if backward else 0]
        flops = 2.0 * math.prod(query) * query[tokens] * (2.5 if backward else 1)
        return flops, float(sum(inputs) + (sum(inputs[1:4]) if backward else inputs[0]))
    return 0.0, float(bytes_without_products(name, dims, inputs, size))


def bytes_without_products(name, dims, inputs, size):
    """Return the bytes read and written by an operator without matrix products."""
    if name == "aten::embedding":
        return inputs[1] + 2 * size * math.prod(dims[1]) * dims[0][-1]
    if name == "aten::gather":
        return inputs[2] + 2 * size * math.prod(dims[2])
    if name == "aten::index_select":  # along which dimension is not recorded: the longest one moves least
        return inputs[2] + 2 * size * math.prod(dims[2]) * math.prod(dims[0]) // max(dims[0], default=1)
    small = (
        r"copy_$|fill_$|zero_$|(?<!cum)sum|mean|vector_norm|foreach_norm|nll_loss_forward|^Mem|"
        r"::(arg|a)?(max|min)$|::(all|any|prod|std|var|var_mean|topk|count_nonzero|nonzero)$|pool\w*(?<!backward)$"
    )
    if re.search(small, name) or name.startswith("triton_"):
        return sum(inputs)  # the output is among the inputs, or small
    if name.endswith("cat"):
        return 2 * sum(inputs)
    return sum(inputs) + (inputs[0] if name.endswith("_") else max(inputs))


def operator_table(profile, steps, ceilings):
    """Return a row, per step, for each operator and group, longest first."""
    parts = {}
    fused = any(one.name == "LinearCrossEntropyFunction" for one in profile.operations)
    known = counted_kernels(profile.metadata, fused)
    for one in profile.operations:
        parts.setdefault((one.name, one.group, crosses_a_link(one)), []).append(one)
    rows = [operator_row(calls, steps, ceilings, known) for calls in parts.values()]
    whole = sum(row["ms"] for row in rows)
    return [row | {"share_percent": 100 * row["ms"] / (whole or 1)} for row in sorted(rows, key=lambda row: -row["ms"])]


def crosses_a_link(one):
    """Return True for a copy between CPU and GPU, or two GPUs, whose limit is not the GPU's memory."""
    return any(OVER_A_LINK.search(name) for name in one.launches)


def counted_kernels(metadata, fused=None):
    """Return {kernel: (FLOPs, bytes) of a launch} of the kernels whose work the sizes in a trace tell.

    fused tells whether version 3's loss was the fused one, None that it was its default.
    """
    if not metadata:
        return {}
    config = argparse.Namespace(**metadata, head_dim=metadata["hidden_dim"] // metadata["num_heads"])
    sizes = counts.sizes_of(config)
    precision = metadata["precision"]
    attention = counts.step_counts(2, precision, sizes._replace(L=1))["attention"]
    forward, backward = ((phase["flops"], phase["bytes"]) for phase in attention.values())
    flex = {"flex_attention": forward, "flex_attention_backward": backward}
    return counts.kernel_counts(precision, sizes, fused) | flex


def work_of(one, known):
    """Return FLOPs and bytes of an operation: of its kernels where the counts know them, else from its shapes.

    known: the result of counted_kernels, empty for the trace of another program.
    """
    if known:
        names = [re.sub(r"^triton_tem_\w*?(flex_attention(_backward)?).*", r"\1", name) for name in one.launches]
        if found := [known[name] for name in names if name in known]:
            return tuple(map(sum, zip(*found, strict=True)))
    elif ATTENTION.fullmatch(one.name) or "TensorList" in one.types:
        return None, None  # another program's attention may be causal or not, and its lists of any type
    return work(one.name, one.dims, one.types, one.strides)


def operator_row(calls, steps, ceilings, known):
    """Return the row of some calls; FLOPs and bytes are None where one of them did not record its shapes."""
    us = sum(one.us for one in calls)
    first = calls[0]
    works = [work_of(one, known) for one in calls]
    kinds = (kind for kind, shape in zip(first.types, first.dims, strict=False) if shape and kind in ELEMENT_BYTES)
    row = {"operator": first.name, "group": first.group, "dtype": next(kinds, ""), "calls": len(calls) / steps}
    row |= {"ms": us / steps / 1e3} | dict.fromkeys(("flops", "bytes", "roofline_ms", "of_roofline", "tflops", "gb_s"))
    if crosses_a_link(first):
        places = "two GPUs" if first.group == "communication" else "CPU and GPU"
        return row | {"operator": f"{first.name} ({places})"}
    if any(moved is None for _, moved in works):
        return row
    flops, moved = map(sum, zip(*works, strict=True))
    row |= {"flops": flops / steps, "bytes": moved / steps}
    if us:
        row |= {"tflops": flops / us / 1e6, "gb_s": moved / us / 1e3}
    if us and ceilings:
        matmul = ceilings["matmul_tflops"]
        copy = ceilings["copy_tb_s"]
        shortest_us = sum(max(flops / matmul, moved / copy) for flops, moved in works) / 1e6
        row |= {"roofline_ms": shortest_us / steps / 1e3, "of_roofline": shortest_us / us}
    return row


def add_trace_options(parser):
    parser.add_argument("--profile-data", required=True, metavar="DIR", help="PyTorch trace, or a folder with one")
    words = "ceilings of the GPU you profiled, as 989,4.8 (default: measured here, or else from its data sheet)"
    parser.add_argument("--peak", type=peak, metavar="TFLOPS,TB/S", help=words)
    add_steps(parser)
    add_gpu(parser)


def peak(text):
    """Convert "989,4.8" to ceilings."""
    tflops, bandwidth = map(finite, text.split(","))
    if not tflops or not bandwidth:
        raise ValueError(f"{text} has a zero")
    return {"matmul_tflops": tflops, "copy_tb_s": bandwidth}


def analyzed_trace(options):
    """Return the profile that --profile-data names, and what the tools' JSON has of it: operators and ceilings."""
    profile = read_profile(options.profile_data, options.steps, options.gpu)
    check_one_gpu(profile)
    if not profile.operations:
        way = "give a trace of PyTorch's profiler (--enable-pytorch-profiler), or read it with kernel_times.py"
        raise Failure(2, f"{profile.path} has no operators: {way}")
    steps = steps_needed(profile)
    ceilings, origin, remarks = (options.peak, "those of --peak", []) if options.peak else ceilings_for(profile)
    remarks = list(remarks)
    with errors_of(profile.path):  # shapes can be no matrix's
        operators = operator_table(profile, steps, ceilings)
    if above := [row["operator"] for row in operators if (row["of_roofline"] or 0) > 1]:
        cause = "their data were in a cache, or the ceilings aren't those of this run"
        remarks.append(f"{len(above)} operators are above a ceiling ({above[0]}, ...): {cause}.")
    remarks += profile.remarks
    return profile, {
        "trace": profile.title,
        "device": profile.device or ("CPU" if profile.on_cpu else "GPU"),
        "on_cpu": profile.on_cpu,
        "interpreted": profile.interpreted,
        "steps": steps,
        "ceilings": ceilings,
        "ceilings_from": origin,
        "remarks": remarks,
        "operators": operators,
    }


# ---------------------------------------------------------------- ceilings


OLD_HOURS = 1  # from which on a trace is not of now


def balance(ceilings):
    """Return the FLOP per byte at which the two ceilings meet: below it the device is memory-bound."""
    return ceilings["matmul_tflops"] / ceilings["copy_tb_s"]


def bound(flop_per_byte, ceilings):
    return "compute" if flop_per_byte > balance(ceilings) else "memory"


def ceilings_line(ceilings):
    top = ceilings["matmul_tflops"]
    copy = 1e3 * ceilings["copy_tb_s"]
    return f"matmul {top:,.3f} TFLOP/s, copy {copy:,.1f} GB/s: {balance(ceilings):,.1f} FLOP/byte"


def ceilings_for(profile):
    """Return {"matmul_tflops", "copy_tb_s"}, or None, where they come from or why there are none, and remarks.

    They are measured if this is the device that was profiled, else those of its data sheet are taken.
    """
    import torch

    precision = profile.metadata.get("precision") or precision_of(profile)
    gpu = gpu_named(profile.device or "")
    if profile.metadata.get("rounds_to_tf32") is False and not emulates_tf32(profile.device or ""):
        precision = "float32"  # the run asked for TF32, and its matmuls took no notice
    here = name_here() if torch.cuda.is_available() else None
    if profile.on_cpu or (precision and here and profile.device in (None, here)):
        device = "cpu" if profile.on_cpu else "cuda"
        precision = precision_here(precision or "float32", device)
        return measure_ceilings(device, precision), f"measured here and now, matmuls in {precision}", doubts(profile)
    if precision is None:
        way = "give its peak with --peak TFLOPS,TB/S"
        return None, f"this profile doesn't tell the precision of its matmuls: {way}", []
    if gpu is None:
        way = "take them from its data sheet, or measure them there, and give them with --peak TFLOPS,TB/S"
        return None, f"the ceilings of {profile.device or 'the GPU'} are not known here: {way}", []
    if precision == "float64" or (precision == "tf32" and emulates_tf32(gpu)):
        return None, f"the peak of {gpu} in {precision} is not in our table: give it with --peak TFLOPS,TB/S", []
    if peak_tflops(gpu, precision) is None:
        precision = "float32"  # in which a GPU without units for a precision computes
    found = {"matmul_tflops": peak_tflops(gpu, precision), "copy_tb_s": GPUS[gpu].tb_s}
    return found, f"the data sheet's of {gpu} in {precision}", []


def precision_of(profile):
    """Return the precision in which another program's matmuls take most time; None if most of it is not known.

    A matmul whose operator is not in the trace, of a graph for one, is known by its kernel's name. Without any matmul
    the precision decides nothing.
    """
    us = {}
    for one in profile.operations:
        if (one.name in FACTORS or one.group == "GEMM") and one.types:
            precision = precision_of_gemm(one)
        elif one.group in ("GEMM", "attention"):
            named = {precision_of_kernel(name) for name in one.launches} - {None}
            precision = named.pop() if len(named) == 1 else None
            if one.group == "attention" and precision is None:
                continue
        else:
            continue
        us[precision] = us.get(precision, 0.0) + one.us
    return max(us, key=us.get) if us else "float32"


def precision_here(precision, device):
    """Return the precision of a device's matmuls if this one is asked for: float32 where TF32 has no effect.

    To find out, it allows TF32 in this process.
    """
    import torch

    if precision != "tf32":
        return precision
    torch.set_float32_matmul_precision("high")
    emulated = device != "cpu" and emulates_tf32(torch.cuda.get_device_name(device))
    return "tf32" if emulated or rounds_to_tf32(device) else "float32"


def doubts(profile):
    """Return why ceilings that are measured now need not be those of the profiled run, in sentences."""
    found = []
    hours = (time.time() - profile.path.stat().st_mtime) / 3600
    if hours > OLD_HOURS:
        found.append(f"The trace is {hours:,.0f} hours old: back then the device may have had other clocks or loads.")
    if profile.on_cpu:
        found.append("A CPU's trace names neither machine nor threads: the fractions hold only if neither has changed.")
    return found


def measure_ceilings(device, precision):
    """Return what a device reaches: TFLOP/s of a large matrix product, TB/s of a copy (read and written)."""
    import torch

    progress("measuring this device's ceilings ...")
    size, megabytes = (8192, 1024) if device.startswith("cuda") else (1024, 128)
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    a, b = torch.randn(2, size, size, device=device).to(getattr(torch, precision, torch.float32))
    source = torch.zeros(megabytes * 2**18, device=device)
    target = torch.empty_like(source)
    return {
        "matmul_tflops": 2 * size**3 / shortest_s(lambda: a @ b) / 1e12,
        "copy_tb_s": 2 * 4 * source.numel() / shortest_s(lambda: target.copy_(source)) / 1e12,
    }


def shortest_s(task, repeats=5):
    """Return the shortest time of a call in seconds; the timer warms up before each, and waits for the GPU."""
    import torch
    from torch.utils.benchmark import Timer

    timer = Timer("task()", globals={"task": task}, num_threads=torch.get_num_threads())
    return min(timer.timeit(1).mean for _ in range(repeats))


# ---------------------------------------------------------------- picture

FLOP_PER_BYTE = (0.05, 3000)  # of every picture: the rooflines of two versions can be laid side by side
LEAST_SHOWN = 1.5 * FLOP_PER_BYTE[0]  # where operators with fewer FLOP per byte are drawn
NAMED = 14  # the points with the longest times get a name


def draw_roofline(path, title, ceilings, points):
    """Draw points (name, FLOP per byte, TFLOP/s or None, ms or None) under the device's ceilings, into a file.

    A point's area is its time. One without a rate was not timed: a dotted line shows its FLOP per byte and no more. The
    scales follow from the ceilings alone. Failure without matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise Failure(1, f"{path.name} needs matplotlib: pip install '.[plots]'") from None
    top = ceilings["matmul_tflops"]
    bandwidth = ceilings["copy_tb_s"]
    (low, high) = FLOP_PER_BYTE
    longest = max((ms for *_, ms in points if ms), default=1)
    figure = Figure(figsize=(5.5, 5.0), layout="constrained")  # as wide as a phone's screen
    axes = figure.subplots()
    axes.plot([low, top / bandwidth, high], [bandwidth * low, top, top], color="black", linewidth=2)
    axes.text(high, 1.15 * top, f"matmul {rounded(top)} TFLOP/s", ha="right", fontsize=9)
    axes.text(1.3 * low, 25 * bandwidth * low, f"copy {rounded(1e3 * bandwidth)} GB/s", fontsize=9)
    axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(bandwidth * low / 100, 3 * top), title=title)
    axes.set(xlabel="FLOP per byte", ylabel="TFLOP/s")
    for i, (name, x, rate, ms) in enumerate(sorted(points, key=lambda point: -(point[3] or 0))):
        color = f"C{i % 10}"
        label = name.lstrip("_") if i < NAMED else None  # a legend leaves out names that begin with "_"
        if rate is None:
            axes.axvline(x, color=color, linestyle=":", label=label)
            continue
        marker = "os^"[i // 10 % 3]  # there are ten colors
        area = 20 + 400 * (ms or longest / 8) / longest
        axes.scatter(x, rate, area, color, marker=marker, alpha=0.7, zorder=3, label=label)
    legend = axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=2, frameon=False, fontsize=9)
    for handle in legend.legend_handles:
        if hasattr(handle, "set_sizes"):
            handle.set_sizes([40])
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=200)
