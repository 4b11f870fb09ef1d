"""Count FLOPs and bytes of the operators in a trace from their recorded shapes, and relate them to ceilings."""

import argparse
import functools
import itertools
import math
import re

from common.formulas import counts
from common.profiles.gemms import FACTORS, GROUPED, VECTORS

ELEMENT_BYTES = {
    "float": 4, "double": 8, "c10::Half": 2, "c10::BFloat16": 2, "long int": 8, "int": 4, "bool": 1, "unsigned char": 1,
    "signed char": 1, "short int": 2, "c10::complex<float>": 8, "c10::complex<double>": 16,
    "TensorList": 4,  # the trace does not say which: the lists of this model are float32
}  # fmt: skip
NO_PRODUCTS = {"aten::_scaled_mm", "aten::_int_mm", "aten::linear", *VECTORS, *GROUPED}  # counted in gemms.py alone
PRODUCTS = {name: at for name, at in FACTORS.items() if name not in NO_PRODUCTS}
ATTENTION = re.compile(r"aten::_(scaled_dot_product|cudnn_attention|flash_attention|efficient_attention)_\w+")
OVER_A_LINK = re.compile("^Memcpy (HtoD|DtoH|PtoP)|HOST_TO_DEVICE|DEVICE_TO_HOST")

# Operators whose work does not follow from the shapes of their inputs.
UNTOLD = re.compile(
    r"^(?!aten::|triton_|Mem)|^triton_tem|"  # compiled regions, autograd functions, other libraries and kernels
    r"^triton_\w*(embedding|index|gather|scatter|slice|select|split)|"
    r"^aten::\w*(conv|lstm|gru|rnn|fft|linear|cdist)|^aten::linalg_(?!vector_norm)|"  # other products
    r"^aten::_\w+_mm$|^aten::(add)?mv$|"
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
    """Return the bytes read and written by an operator without matmuls."""
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
