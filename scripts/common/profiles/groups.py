"""Tell the group of a kernel by its name, and add kernels up by name and group. Standard library only."""

import functools
import re

from common.command_line import Failure, printable
from common.tables import columns, rounded, text_table

GROUPS = ("GEMM", "attention", "normalisation", "element-wise", "optimizer", "copies", "communication", "other")

# The first pattern found in a kernel's name decides. The names of torch.compile's kernels list every operation that was
# fused into them, so they are matched before the words of single operations.
GROUP_PATTERNS = [
    ("communication", r"nccl|rccl|msccl|^Memcpy PtoP|^c10d::"),  # NCCL and RCCL, copies between GPUs, gloo on a CPU
    ("GEMM", r"^triton_tem_(?!.*attention)"),
    ("optimizer", r"^(triton|cpp)_.*_foreach_|^triton_for_fused"),
    ("other", r"^(triton|cpp)_.*(log_softmax|nll_loss|embedding)"),
    ("attention", r"^(triton|cpp)_.*(softmax|attention)"),
    ("normalisation", r"^(triton|cpp)_.*(rsqrt|norm)"),
    ("element-wise", r"^(triton_poi|cpp_fused)_"),
    ("optimizer", r"adam|multi_tensor|_foreach_|optimizer|\blerp|addcdiv|addcmul|amp_update|amp_.*unscale"),
    # softmax_warp_forward<input, output, accumulator, log2 of the row, is_log, ...>: a logarithm makes it the loss
    ("other", r"log_?softmax|softmax_warp_\w+<[^<>]*, *\d+, *true"),
    ("attention", r"attention|attn|fmha|flash|sdpa|bwd_kernel_(dk|dv|dq|fuse)|bwd_preprocess|softmax"),
    (
        "normalisation",
        r"(rms|layer|batch|group)_?norm|GammaBeta|rsqrt|MeanOps|pow_tensor|aten::(mean|pow)|(Mean|Pow)Back",
    ),
    ("GEMM", r"^Cijk_|gemm|gemv|cutlass|nvjet|cublas|hipblas|rocblas|xmma|splitK|aten::_?(add|b|baddb)?mm$|scaled_mm"),
    ("copies", r"mem_?cpy|memset|memory_?copy|copyBuffer|fillBuffer|^Copy[A-Z]|copy_kernel|FillFunctor|CatArray"),
    ("copies", r"quantize_(rows|weights)_kernel|transpose_kernel"),
    ("copies", r"aten::(_to_copy|to|copy_|clone|contiguous|cat|fill_|zero_|(zeros|ones)(_like)?)$"),
    ("element-wise", r"element_?wise|swiglu|silu|rope|rotary|sigmoid|vectorized|unrolled"),
    ("element-wise", r"aten::(add|sub|mul|div|neg|exp|sqrt|sin|cos|where|masked_fill|triu|tril)_?$"),
]
INTERPRETED = "Version 3's kernels ran in Triton's interpreter: these times say nothing about a GPU."


@functools.cache
def group_of(name):
    """Return the group of a kernel or operator, one of GROUPS, by its name."""
    return next((group for group, pattern in GROUP_PATTERNS if re.search(pattern, name, re.IGNORECASE)), "other")


@functools.cache
def clean(name):
    """Return the kernel's name without control characters and the mark of its code object that some tools append."""
    if not isinstance(name, str):
        raise ValueError(f"{name!r} is no name")
    return printable(re.sub(r"(\.kd| \[clone \.kd\])$", "", name.strip()))


def short(name, width):
    """Return a name to display: return type, namespaces, and arguments of templates and functions go first."""
    name = re.sub(r"^(void|int) +", "", name).replace("(anonymous namespace)::", "").replace("at::native::", "")
    if len(name) > width:
        name = re.sub(r"\(.*\)$", "", name)
    return name if len(name) <= width else name[: width - 3] + "..."


def steps_needed(profile, option="--steps"):
    """Return the number of steps in a profile; Failure if neither the profile nor the option says it."""
    if profile.steps is None:
        raise Failure(2, f"{profile.path} does not say how many steps it holds: give {option} N")
    return profile.steps


# ---------------------------------------------------------------- tables of kernels


def sums(calls, key):
    """Return {name or group: its calls, times in microseconds and share}, the largest total first.

    key: "name" or "group".
    """
    times = {}
    for call in calls:
        times.setdefault(getattr(call, key), []).append(call.total_ns / 1e3)
    whole = sum(call.total_ns for call in calls) / 1e3 or 1
    rows = {}
    for name, us in sorted(times.items(), key=lambda item: sum(item[1]), reverse=True):
        rows[name] = {
            "calls": len(us),
            "total_us": sum(us),
            "share_percent": 100 * sum(us) / whole,
            "mean_us": sum(us) / len(us),
            "min_us": min(us),
            "max_us": max(us),
        }
    return rows


def kernel_table(calls):
    """Return a row per kernel.

    The keys are in the order of the CSV's columns: total time, by which pages sort it, is the fourth; the name, which
    has commas, is the last.
    """
    kinds = {call.name: call.kind for call in calls}
    rows = sums(calls, "name")
    return [{"group": group_of(name), "kind": kinds[name], **row, "kernel": name} for name, row in rows.items()]


def group_table(calls):
    """Return a row per group that occurs."""
    return [{"group": name, **row} for name, row in sums(calls, "group").items()]


def groups_per_step(profile, option="--steps"):
    """Return {group: its calls and ms per step} of each group that occurs, in the order of GROUPS, and of "all"."""
    steps = steps_needed(profile, option)
    rows = sums(profile.calls, "group")
    found = {}
    for group in GROUPS:
        if group in rows:
            found[group] = {"calls": rows[group]["calls"] / steps, "ms": rows[group]["total_us"] / 1e3 / steps}
    calls = sum(row["calls"] for row in found.values())
    ms = sum(row["ms"] for row in found.values())
    return found | {"all": {"calls": calls, "ms": ms}}


def group_cells(first, second):
    """Return a row per group in either of two results of groups_per_step: calls, % fewer, milliseconds."""
    cells = []
    nothing = {"calls": 0.0, "ms": 0.0}
    for group in (group for group in (*GROUPS, "all") if group in first | second):
        one = first.get(group, nothing)
        other = second.get(group, nothing)
        fewer = f"{100 - 100 * other['calls'] / one['calls']:.1f} %" if one["calls"] else "-"
        calls = [f"{part['calls']:,.1f}" for part in (one, other)]
        cells.append([group, *calls, fewer, rounded(one["ms"]), rounded(other["ms"])])
    return cells


GROUP_COLUMNS = "group: {group} | total ms: {ms:,.3f} | %: {share_percent:.1f}"
KERNEL_COLUMNS = (
    "kernel: {shown} | group: {group} | calls: {calls:,} | total ms: {ms:,.3f} | %: {share_percent:.1f} | "
    "mean us: {mean_us:,.1f} | min us: {min_us:,.1f} | max us: {max_us:,.1f}"
)


def kernel_text(profile, top):
    """Return the table of the longest kernels and the sums by group, for reading."""
    kernels = [row | {"ms": row["total_us"] / 1e3} for row in kernel_table(profile.calls)]
    groups = [row | {"ms": row["total_us"] / 1e3} for row in group_table(profile.calls)]
    unit = "operators on the CPU" if profile.on_cpu else "kernels and copies"
    ms = sum(row["ms"] for row in kernels)
    lines = [f"{len(kernels)} {unit}, {len(profile.calls):,} calls, {ms:,.3f} ms in all"]
    if profile.interpreted:
        lines.append(INTERPRETED)
    shown = [row | {"shown": short(row["kernel"], 44)} for row in kernels[:top]]
    lines += ["", text_table(*columns(KERNEL_COLUMNS, shown), left=2)]
    others = kernels[top:]
    if others:
        ms = sum(row["ms"] for row in others)
        share = sum(row["share_percent"] for row in others)
        lines.append(f"and {len(others)} more with {ms:,.3f} ms ({share:.1f} %)")
    lines += ["", text_table(*columns(GROUP_COLUMNS, groups))]
    return "\n".join(lines)
