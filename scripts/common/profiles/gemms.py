"""Rate the matmuls of a trace by their shapes. Standard library only."""

import math
import statistics

from common.formulas.gpus import peak_tflops
from common.profiles import precision_of_kernel
from common.tables import columns

# which input is the left factor
FACTORS = {"aten::mm": 0, "aten::bmm": 0, "aten::addmm": 1, "aten::baddbmm": 1, "aten::_addmm_activation": 1}
FACTORS |= {"aten::_scaled_mm": 0, "aten::linear": 0, "aten::_int_mm": 0}
VECTORS = {"aten::mv": 0, "aten::addmv": 1}  # a matrix times a vector
GROUPED = {"aten::_grouped_mm": 0, "aten::_scaled_grouped_mm": 0}  # rows, or the inner dimension, in groups
FACTORS |= VECTORS | GROUPED
PRECISION_OF_TYPE = {
    "c10::BFloat16": "bfloat16", "c10::Half": "float16", "double": "float64", "signed char": "int8"
}  # fmt: skip
SHOWN = 20
GEMM_COLUMNS = (
    "matmul: {operator} | batch x m x k x n: {batch}x{m}x{k}x{n} | precision: {shown_precision} | calls: {calls:,} | "
    "ms: {ms:,.3f} | TFLOP/s: {tflops:r} | quartiles: {low:r} to {high:r} | of peak: {of_peak:.1%}"
)
WITH_SHAPES = "profile with record_shapes=True and without a graph"
WITH_OPERATORS = "record a PyTorch program with torch.profiler and record_shapes=True"


def sizes_of(one):
    """Return (batch, m, k, n) of a matmul with recorded shapes; None for another operator, or without shapes."""
    name = one.name.removeprefix("optimizer ")
    first = FACTORS.get(name)
    if first is None or len(one.dims) < first + 2:
        return None
    left, right = one.dims[first : first + 2]
    if name in VECTORS and len(right) == 1:
        right = [*right, 1]
    if len(left) < 2 or len(right) < 2 or not all(type(size) is int for size in [*left, *right]):
        return None
    if name == "aten::linear":  # [..., k] times a weight of [n, k]
        left = [math.prod(left[:-1]), left[-1]]
        right = right[::-1]
    if left[-1] != right[-2] or not math.prod(left) or not right[-1]:
        return None
    if name in GROUPED and len(left) != len(right):  # each row, or column, belongs to one of the groups
        left = left[-2:]
    return math.prod(left[:-2]), left[-2], left[-1], right[-1]


def precision_of(one):
    """Return the precision of a matmul's operands: by the types of its inputs, else by its kernels; None: not known.

    A trace's type "float" is float32 or TF32, which only the kernel's name tells.
    """
    named = {precision_of_kernel(name) for name in one.launches} - {None}
    named = named.pop() if len(named) == 1 else None
    kind = next((kind for kind, size in zip(one.types, one.dims, strict=False) if size), None)
    if kind and "Float8" in kind:
        return "float8"
    if kind == "float":
        return named if named in ("tf32", "float32") else "float32"
    return PRECISION_OF_TYPE.get(kind) or named


def main_precision(profile):
    """Return the precision in which the matmuls with shapes take most time."""
    us = {}
    for one in profile.operations:
        if sizes_of(one):
            us[precision_of(one)] = us.get(precision_of(one), 0.0) + one.us
    return max(us, key=us.get, default=None)


def gemm_results(profile, ceilings=None):
    """Return the matmuls of a trace by shape and precision, those that lose most time against the peak first.

    ceilings: those of --peak, which hold for the precision with most time; None takes the device's data sheet.
    """
    peaks = ceilings and {main_precision(profile): ceilings["matmul_tflops"]}
    parts = {}
    without = 0.0
    convolutions = 0.0
    for one in profile.operations:
        sizes = sizes_of(one)
        if sizes and one.us:
            parts.setdefault((one.name, sizes, precision_of(one)), []).append(one.us)
        elif "conv" in one.name:
            convolutions += one.us
        elif one.group == "GEMM":
            without += one.us
    rows = []
    for (name, (batch, m, k, n), precision), us in parts.items():
        flops = 2.0 * batch * m * k * n
        rates = sorted(flops / time / 1e6 for time in us)
        low, _, high = statistics.quantiles(rates, method="inclusive") if len(rates) > 1 else rates * 3
        peak = peaks.get(precision) if peaks is not None else peak_tflops(profile.device or "", precision)
        rate = flops * len(us) / sum(us) / 1e6
        row = {"operator": name, "batch": batch, "m": m, "k": k, "n": n, "precision": precision, "calls": len(us)}
        row |= {"ms": sum(us) / 1e3, "tflops": rate, "low": low, "high": high}
        row |= {"of_peak": rate / peak if peak else None, "peak_tflops": peak}
        rows.append(row | {"lost_ms": sum(us) / 1e3 * (1 - min(1.0, rate / peak)) if peak else None})
    rows.sort(key=lambda row: -(row["ms"] if row["lost_ms"] is None else row["lost_ms"]))
    remarks = list(profile.remarks)
    if without and rows:
        remarks.append(f"{without / 1e3:,.3f} ms of matmuls have no recorded shapes, so they aren't in this table.")
    if convolutions and rows:
        remarks.append(f"{convolutions / 1e3:,.3f} ms of convolutions aren't in this table: it rates matmuls alone.")
    if rows and all(row["peak_tflops"] is None for row in rows):
        device = profile.device or "this device"
        remarks.append(f"We don't know the peak of {device} in these precisions: give it with --peak TFLOPS,TB/S.")
    if any(row["of_peak"] and row["of_peak"] > 1 for row in rows):
        remarks.append("A rate is above the peak: this was another device, or the kernel's time is wrong.")
    return {"trace": profile.title, "device": profile.device, "gemms": rows, "remarks": remarks}


def no_gemms(profile):
    """Return why a trace has no table of matmuls."""
    gemms = [one for one in profile.operations if one.group == "GEMM" or one.name in FACTORS]
    if not gemms:
        if any(call.group == "GEMM" for call in profile.step_calls):
            return f"It holds kernels without operators, so its matmuls have no shapes: {WITH_OPERATORS}."
        return " ".join(["There is no matmul in it.", *profile.warnings])
    if all("conv" in one.name for one in gemms):
        return "There is no matmul in it, only convolutions."
    others = sorted({one.name for one in gemms if one.dims and one.name not in FACTORS})
    if others and all(one.dims for one in gemms):
        return f"Its matmuls are of operators that this table doesn't rate: {', '.join(others[:3])}."
    return f"No matmul has recorded shapes: {WITH_SHAPES}."


def gemm_table(found):
    """Return header and rows of the table of matmuls."""
    rows = [row | {"shown_precision": row["precision"] or "not known"} for row in found["gemms"][:SHOWN]]
    return columns(GEMM_COLUMNS, rows)
