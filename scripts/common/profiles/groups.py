"""Tell the group of a kernel by its name, and add kernels up by name and group. Standard library only."""

import functools
import os
import re

from common.command_line import Failure, printable
from common.tables import columns, text_table

# The first pattern found in a kernel's name decides. In a mangled name a digit stands before each word. The names of
# torch.compile's kernels list every operation that was fused into them, so they are matched before the words of single
# operations.
GROUP_PATTERNS = [
    ("GEMM", r"^triton_tem_(?!.*attention)"),
    ("optimizer", r"^(triton|cpp)_.*_foreach_|^triton_for_fused"),
    ("other", r"^(triton|cpp)_.*(log_softmax|nll_loss|embedding)"),
    ("attention", r"^(triton|cpp)_.*(softmax|attention)"),
    ("normalisation", r"^(triton|cpp)_.*(rsqrt|norm)"),
    ("element-wise", r"^(triton_poi|cpp_fused)_"),
    ("other", r"^triton_(per|red|unk)_fused_"),
    (
        "communication",
        r"nccl|rccl|msccl|nvshmem|rocshmem|^(\[CUDA )?Memcpy PtoP|^c10d::|^gloo:|\bep::|deep_?ep(::|\d)|userbuffers",
    ),
    ("communication", r"^MEMORY_COPY_\w+ \(peer\)"),  # of rocprofv3, by model.copy_name
    # of PyTorch's symmetric memory, vLLM, TensorRT-LLM and AMD's quickreduce: in the name, not in an argument
    (
        "communication",
        r"^[^<(]*((multimem|one_?shot|two_?shot|quick)_?(all_?)?reduce|cross_device_reduce)",
    ),
    ("communication", r"^[^<(]*(all_?reduce|all_?gather|reduce_?scatter|all_?to_?all)_?(\w*kernel|fusion|[12]stage)"),
    ("optimizer", r"adam|multi_tensor|_foreach_|optimizer|(?<![a-z])lerp|addcdiv|addcmul|amp_update|amp_.*unscale"),
    # softmax_warp_forward<input, output, accumulator, log2 of the row, is_log, ...>: a logarithm makes it the loss
    (
        "other",
        r"log_?softmax|softmax_warp_\w+<[^<>]*, *\d+, *true|softmax_warp_\w+?Li\d+ELb1|topk\w*softmax|softmax\w*topk",
    ),
    ("copies", r"^[^<(]*(reshape_and_cache|concat_and_cache|store_kv_?cache|copy_blocks)"),
    # quantizing alone, not fused into another operation
    ("copies", r"^(?![^<(]*(norm|silu|act_and_mul))[^<(]*((?<![a-z_])quantize|_quant_kernel)"),
    ("copies", r"^(void +)?(cpy_scalar|concat_cont|k_get_rows|k_set_rows)"),  # llama.cpp's
    ("other", r"^[^<(]*flashinfer_kv_indices"),
    ("attention", r"attention|attn|fmha|flash|sdpa|sage_fwd|bwd_kernel_(dk|dv|dq|fuse)|bwd_preprocess|softmax"),
    ("attention", r"^[^<(]*(soft_max_|delta_net|delta_rule)"),
    ("attention", r"^(_ZN\w*|[^<(]*\b)((kn_)?mla_|fmla|pa_decode|pa_fwd|mha_fwd|mha_bwd)"),
    ("attention", r"^_(fwd|bwd)_(grouped_)?kernel(_stage\d+)?$"),  # of Triton, as in SGLang
    ("attention", r"^[^<(]*(?<![a-z])chunk_\w*(fwd|bwd|kkt|cumsum)"),  # of flash-linear-attention and Mamba
    (
        "normalisation",
        r"(rms|layer|batch|group)_?norm|GammaBeta|rsqrt|MeanOps|pow_tensor|aten::(mean|pow)|(Mean|Pow)Back|"
        r"(?<![a-z])bn_(fw|bw)_|WelfordOps|RowwiseMoments|l2_norm_",
    ),
    ("GEMM", r"^Cijk_|(?<!fb)gemm|gemv|cutlass|nvjet|cublas|hipblas|rocblas|xmma|spli?tK|scaled_mm"),
    ("GEMM", r"aten::_?(add|b|baddb)?mm$"),
    ("GEMM", r"^[^<(]*(matmul|matrix_?mul|mul_mat_|\bbmm_|fused_moe|mm_kernel)"),
    # convolutions, which are matmuls too
    ("GEMM", r"miopen\w*conv|naive_conv|scudnn|winograd|[dw]grad_\w*engine|convolve"),
    ("GEMM", r"(dgrad|wgrad|fprop|conv2?d?)_\w*kernel|aten::\w*conv"),
    ("copies", r"mem_?cpy|memset|memory_?copy|copyBuffer|fillBuffer|^Copy[A-Z]|copy_kernel|FillFunctor|CatArray"),
    ("copies", r"transpose_kernel|^(batched_)?transpose_|nchwToNhwc|nhwcToNchw"),
    ("copies", r"aten::(_to_copy|to|copy_|clone|contiguous|cat|fill_|zero_|(zeros|ones)(_like)?)$"),
    ("element-wise", r"element_?wise|swiglu|silu|rope|rotary|sigmoid|vectorized|unrolled|act_and_mul|^SubTensorOp"),
    ("element-wise", r"^(void +)?(k_bin_bcast|unary_(gated_)?op_kernel|scale_f32)"),  # llama.cpp's
    ("element-wise", r"aten::(add|sub|mul|div|neg|exp|sqrt|sin|cos|where|masked_fill|triu|tril)_?$"),
    ("element-wise", r"aten::(\w*relu|gelu|clamp\w*|threshold|tanh)(_backward)?_?$"),
]
# The precision that a matmul's name tells, if any. Tensile's names (Cijk_) list the types of the inputs, the output and
# the sums after the layouts: BBS is bfloat16 summed in single precision, B_BS likewise; S_MX multiplies in XF32.
PRECISION_PATTERNS = [
    ("float8", r"^Cijk_[a-z]+_[a-z]+_(F8|B8)|e4m3|e5m2|float8|fp8|f8f8|_f8_|nvjet_q"),
    ("tf32", r"^Cijk_[a-z]+_[a-z]+_S_MX_|tf32|xf32|nvjet_[st]ss|s1688gemm_(?!bf16|f16|fp16)"),
    ("bfloat16", r"^Cijk_[a-z]+_[a-z]+_B(_?[BS])*(_|$)|bf16|bfloat16|nvjet_t"),
    (
        "float16",
        r"^Cijk_[a-z]+_[a-z]+_H(_?[HS])*(_|$)|(?<![a-z])f16|fp16|hgemm|h16816|h1688|\bhalf\b|_half|nvjet_h",
    ),
    ("float32", r"^Cijk_[a-z]+_[a-z]+_S(_?[BS])*(_|$)|sgemm|scudnn|f32f32_f32f32_f32"),
]
BY_HAND = "Custom_"  # which hipBLASLt puts before the names of kernels that Tensile did not write
INTERPRETED = "Version 3's kernels ran in Triton's interpreter: these times say nothing about a GPU."


@functools.cache
def group_of(name):
    """Return the group of a kernel or operator, one of GROUPS, by its name."""
    name = name.replace("(anonymous namespace)::", "").removeprefix(BY_HAND)
    return next((group for group, pattern in GROUP_PATTERNS if re.search(pattern, name, re.IGNORECASE)), "other")


@functools.cache
def precision_of_kernel(name):
    """Return the precision of a matmul's operands by its kernel's name; None where the name does not tell."""
    name = name.removeprefix(BY_HAND)
    found = (precision for precision, pattern in PRECISION_PATTERNS if re.search(pattern, name, re.IGNORECASE))
    return next(found, None)


@functools.cache
def clean(name):
    """Return the kernel's name without control characters and the mark of its code object that some tools append."""
    if not isinstance(name, str):
        raise ValueError(f"{name!r} isn't a name")
    return printable(re.sub(r"(\.kd| \[clone \.kd\])$", "", name.strip()))


def short(name, width):
    """Return a name to display: return type, namespaces, and the function's arguments go first."""
    if name.startswith("_Z"):
        name = " ".join(identifiers(name)) or name
    name = re.sub(r"^(void|int) +", "", name).replace("(anonymous namespace)::", "").replace("at::native::", "")
    if len(name) > width:
        name = name[: arguments_begin(name)]
    return name if len(name) <= width else name[: width - 3] + "..."


# In a mangled name: a constant, an abbreviation, a parameter, a type, and the length of the identifier that follows.
MANGLED = re.compile(r"L[a-z]n?\d+E|S[0-9A-Z]*_|T\d*_|DF\d+_|(\d+)")
PLACES = re.compile(r"at|native|std|c10|_GLOBAL__N_.*")


def identifiers(name):
    """Return the identifiers in a mangled C++ name, which PyTorch writes on Windows, without PyTorch's namespaces."""
    found = []
    at = 2
    while match := MANGLED.search(name, at):
        at = match.end()
        if match[1]:
            at += int(match[1])
            word = name[match.end() : at]
            if len(word) == int(match[1]) and word.isidentifier() and len(word) > 1 and not PLACES.fullmatch(word):
                found.append(word)
    return found


def arguments_begin(name):
    """Return where the last balanced pair of parentheses begins, if the name ends with one, else its end."""
    depth = 0
    for at in range(len(name) - 1, -1, -1):
        depth += (name[at] == ")") - (name[at] == "(")
        if depth == 0:
            return at if name[at] == "(" and at else len(name)
    return len(name)


def shown_names(names, width):
    """Return {name: what to print of it}: no two of the names look alike."""
    alike = {}
    for name in dict.fromkeys(names):
        alike.setdefault(short(name, width), []).append(name)
    shown = {}
    for text, some in alike.items():
        if len(some) == 1:
            shown[some[0]] = text
            continue
        whole = {name: short(name, len(name)) for name in some}
        prefix = os.path.commonprefix(list(whole.values()))
        word = re.search(r"\w*$", prefix)[0]  # show the word in which they differ from its begin
        if len(word) >= width // 2:
            word = re.search(r"[^\W_]*$", prefix)[0]  # a long one from its last underscore
        start = len(prefix) - len(word)
        for i, name in enumerate(some, 1):
            part = whole[name][start : start + width // 2]
            text = f"{whole[name][: width - len(part) - 3]}...{part}"
            shown[name] = text if text not in shown.values() else f"{text[: width - 4]} #{i}"
    return shown


def steps_needed(profile, option="--steps"):
    """Return the number of steps in a profile; Failure if neither the profile nor the option says it."""
    if profile.steps is None:
        raise Failure(2, f"{profile.path} doesn't say how many steps it has: give {option} N")
    return profile.steps


# ---------------------------------------------------------------- tables of kernels


def sums(calls, key):
    """Return {name or group: its calls, times in microseconds and share}, the largest total first.

    key: "name" or "group".
    """
    parts = {}
    for call in calls:
        parts.setdefault(getattr(call, key), []).append(call)
    whole = sum(call.total_ns for call in calls) / 1e3 or 1
    rows = {}
    for name, some in parts.items():
        us = sum(call.total_ns for call in some) / 1e3
        count = sum(call.calls for call in some)
        bounds = [call.bounds_ns or (call.total_ns, call.total_ns) for call in some]
        rows[name] = {
            "calls": count,
            "total_us": us,
            "share_percent": 100 * us / whole,
            "mean_us": us / count,
            "min_us": None if (None, None) in bounds else min(least for least, _ in bounds) / 1e3,
            "max_us": None if (None, None) in bounds else max(most for _, most in bounds) / 1e3,
        }
    rows = dict(sorted(rows.items(), key=lambda item: -item[1]["total_us"]))
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
    count = sum(row["calls"] for row in kernels)
    lines = [f"{len(kernels)} {unit}, {count:,} calls, {ms:,.3f} ms in all", *profile.remarks]
    if profile.interpreted:
        lines.append(INTERPRETED)
    names = shown_names([row["kernel"] for row in kernels[:top]], 44)
    shown = [row | {"shown": names[row["kernel"]]} for row in kernels[:top]]
    lines += ["", text_table(*columns(KERNEL_COLUMNS, shown), left=2)]
    others = kernels[top:]
    if others:
        ms = sum(row["ms"] for row in others)
        share = sum(row["share_percent"] for row in others)
        lines.append(f"and {len(others)} more with {ms:,.3f} ms ({share:.1f} %)")
    lines += ["", text_table(*columns(GROUP_COLUMNS, groups))]
    return "\n".join(lines)
