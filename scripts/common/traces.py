"""PyTorch traces with their steps, and the work that each launch does: FLOPs and bytes from the recorded shapes.

    profile = read_profile("pytorch_profiles")
    profile.steps, profile.calls, profile.operations

A profile of another tool (rocprofv3, Nsight Systems) gives calls without shapes, and its number of steps must be said.
"""

import argparse
import dataclasses
import gzip
import json
import math
import pathlib
import re
from collections import Counter

import kernel_times
from common.command_line import Failure
from kernel_times import Kernel, KernelFileError, group_of

ELEMENT_BYTES = {
    "float": 4, "double": 8, "c10::Half": 2, "c10::BFloat16": 2, "long int": 8, "int": 4, "bool": 1, "unsigned char": 1,
    "TensorList": 4,  # the trace does not say which: the lists of this model are float32
}  # fmt: skip
# Operators that only look at tensors differently, allocate them or ask about them.
NO_WORK = re.compile(
    r"^(aten::(view|_unsafe_view|reshape|_reshape_alias|transpose|t|numpy_T|as_strided|expand|permute|slice|select|narrow|"
    r"split|split_with_sizes|chunk|unbind|unsqueeze|squeeze|flatten|unflatten|detach|detach_|alias|lift_fresh|empty\w*|"
    r"resize_|resolve_\w+|result_type|promote_types|is_\w+|item|_local_scalar_dense|set_|to|record_stream)$"
    r"|autograd::|torch::|Optimizer|detach$|\w*Backward\d*$|Torch-Compiled|TorchDynamo|CompiledFunction|## )"
)
ATTENTION_TOKENS = {  # where the tokens stand in the shape of the query, for each way to name the operator
    r"_scaled_dot_product_\w+": 2,
    r"_(flash|efficient)_attention_\w+": 1,
}
PRODUCTS = {"aten::mm": 0, "aten::bmm": 0, "aten::addmm": 1, "aten::baddbmm": 1}  # which input is the left factor


@dataclasses.dataclass(frozen=True)
class Operation:
    """One call of an operator, and what it took. Times in microseconds; flops and bytes None where not known.

    bytes is the least that must move: every input read once and, where its size follows from them, the output written.
    launches are the names of the kernels that it started; on a CPU, the operator itself.
    """

    name: str
    group: str
    us: float
    flops: float | None
    bytes: float | None
    dtype: str
    shapes: str
    launches: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Profile:
    """What was read from one profile: calls are kernels and copies, or on a CPU the operators that compute."""

    path: pathlib.Path
    calls: list[Kernel]
    operations: list[Operation]
    steps: int | None
    device: str | None

    @property
    def on_cpu(self) -> bool:
        return self.calls[0].kind == "operator"

    @property
    def what(self) -> str:
        return "operators" if self.on_cpu else "kernels"


# ---------------------------------------------------------------- reading


def read_profile(path: str | pathlib.Path, steps: int | None = None) -> Profile:
    """The profile in a file or folder; Failure or KernelFileError, one sentence, where there is none."""
    path = pathlib.Path(path)
    kernels = kernel_times.read_kernels(path)
    file = newest_trace(path)
    if file is None:
        return Profile(path, kernels, [], steps or recorded_steps(path), None)
    content = content_of(file)
    events = content["traceEvents"] if isinstance(content, dict) else content
    complete = [e for e in events if isinstance(e, dict) and e.get("ph") == "X" and "dur" in e and "ts" in e]
    operators = [e for e in complete if e.get("cat") == "cpu_op"]
    devices = content.get("deviceProperties") if isinstance(content, dict) else None
    if kernels[0].kind == "operator":
        working = operators_that_work(operators)
        kernels = [kernel_times.launch(e["name"], 1e3 * e["ts"], 1e3 * e["dur"], "", "operator") for e in working]
        operations = [operation(e, [e]) for e in working]
    else:
        operations = operations_of_kernels(complete, operators)
    if not kernels:
        raise KernelFileError(f"{file} holds no operator that computes")
    device = devices[0].get("name") if devices else None
    return Profile(file, kernels, operations, steps or steps_of(complete) or recorded_steps(path), device)


def newest_trace(path: pathlib.Path) -> pathlib.Path | None:
    """The PyTorch trace that kernel_times reads for this path; None where it reads something else."""
    if not path.exists():
        raise Failure(2, f"{path} does not exist: give a profile, or the folder that it lies in")
    try:
        files = kernel_times.files_of(path)
    except KernelFileError as error:
        raise Failure(2, f"{path} {error}") from None
    for file in files:
        if file.name.endswith((".json", ".json.gz")) and '"traceEvents"' in text_of(file):
            return file
    return None


def text_of(file: pathlib.Path) -> str:
    content = file.read_bytes()
    return (gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content).decode("utf-8", errors="replace")


def content_of(file: pathlib.Path):
    """The JSON in a file, which may be compressed; Failure where it is damaged."""
    try:
        return json.loads(text_of(file))
    except json.JSONDecodeError as error:
        raise Failure(2, f"{file} is cut off or damaged: no valid JSON at line {error.lineno}") from None


def steps_of(events: list[dict]) -> int | None:
    """Training steps in a trace: marked phases, else launches of a graph that holds a whole step; None without any."""
    names = Counter(e["name"] for e in events if e.get("cat") in ("user_annotation", "cuda_runtime", "hip_runtime"))
    for marks in (("optimizer",), ("cudaGraphLaunch", "hipGraphLaunch"), ("attention",)):
        found = sum(names[mark] for mark in marks)
        if found:
            return found
    return None


def recorded_steps(path: pathlib.Path) -> int | None:
    """What a profile_*.json of run_pytorch_profiler.py at that path says; None without one."""
    files = [path] if path.is_file() else sorted(path.glob("profile_*.json"))
    for file in files:
        if file.suffix == ".json":
            content = content_of(file)
            if isinstance(content, dict) and "steps_profiled" in content:
                return content["steps_profiled"]
    return None


def steps_needed(profile: Profile, option: str = "--steps") -> int:
    if profile.steps is None:
        raise Failure(2, f"{profile.path} does not say how many steps it holds: give {option} N")
    return profile.steps


def operators_that_work(operators: list[dict]) -> list[dict]:
    """The innermost operators that compute: those that only call others, or change no data, are left out.

    A matrix product stays although it copies an operand first; that time is taken off its "dur".
    """
    working, open_calls = [], {}
    for event in sorted(operators, key=lambda e: (e["ts"], -e["dur"])):
        stack = open_calls.setdefault((event.get("pid"), event.get("tid")), [])
        while stack and stack[-1][0]["ts"] + stack[-1][0]["dur"] <= event["ts"]:
            stack.pop()
        if NO_WORK.match(event["name"]):
            continue
        for caller in stack:
            if caller[0]["name"] in PRODUCTS:
                caller[2] -= event["dur"]
            else:
                caller[1] = False
        stack.append([event, True, event["dur"]])
        working.append(stack[-1])
    return [event | {"dur": max(0.0, own)} for event, innermost, own in working if innermost]


def operations_of_kernels(events: list[dict], operators: list[dict]) -> list[Operation]:
    """The operators behind the kernels, each with all that it launched; kernels of a graph have none."""
    by_id = {e.get("args", {}).get("External id"): e for e in operators}
    launched: dict[int, list[dict]] = {}
    alone = []
    for event in events:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            number = event.get("args", {}).get("External id")
            launched.setdefault(number, []).append(event) if number in by_id and number else alone.append(event)
    found = [operation(by_id[number], kernels) for number, kernels in launched.items()]
    return found + [operation(event, [event]) for event in alone]


# ---------------------------------------------------------------- work


def operation(event: dict, launches: list[dict]) -> Operation:
    """What an operator's event and its launches say of one call."""
    arguments = event.get("args", {})
    dims, types = arguments.get("Input Dims") or [], arguments.get("Input type") or []
    strides = arguments.get("Input Strides") or [[]] * len(dims)
    longest = max(launches, key=lambda e: e["dur"])
    name = kernel_times.clean(event["name"])
    flops, moved = work(name, dims, types, strides)
    kinds = [kind for kind, shape in zip(types, dims, strict=False) if shape and kind in ELEMENT_BYTES]
    return Operation(
        name=name,
        group=group_of(kernel_times.clean(longest["name"])),
        us=sum(e["dur"] for e in launches),
        flops=flops,
        bytes=moved,
        dtype=kinds[0] if kinds else "",
        shapes=" ".join("x".join(map(str, shape)) for shape in dims if shape and not isinstance(shape[0], list)),
        launches=tuple(kernel_times.clean(e["name"]) for e in launches),
    )


def tensor_bytes(dims: list, kind: str, strides: list) -> int:
    """Bytes of a tensor, or of a list of tensors; a dimension with stride 0 is one and the same memory."""
    if kind not in ELEMENT_BYTES or (kind == "TensorList" and not dims):
        return 0
    if dims and isinstance(dims[0], list):
        parts = strides or [[]] * len(dims)
        return sum(tensor_bytes(d, kind, s) for d, s in zip(dims, parts, strict=False))
    repeated = [stride == 0 and size > 1 for size, stride in zip(dims, strides, strict=False)]
    repeated += [False] * (len(dims) - len(repeated))
    return ELEMENT_BYTES[kind] * math.prod(1 if same else size for size, same in zip(dims, repeated, strict=True))


def work(name: str, dims: list, types: list, strides: list) -> tuple[float | None, float | None]:
    """(FLOPs, bytes at least) of an operator with inputs of these shapes; None where it cannot be told."""
    inputs = [tensor_bytes(*tensor) for tensor in zip(dims, types, strides, strict=False)]
    if not any(inputs):
        return None, None
    size = next(ELEMENT_BYTES[kind] for kind, n in zip(types, inputs, strict=False) if n)
    if name in PRODUCTS:
        left, right = dims[PRODUCTS[name] :][:2]
        rows, inner, columns = left[-2], left[-1], right[-1]
        batch = left[0] if len(left) == 3 else 1
        return 2.0 * batch * rows * inner * columns, float(sum(inputs) + size * batch * rows * columns)
    for pattern, place in ATTENTION_TOKENS.items():
        if re.fullmatch(rf"aten::{pattern}", name):
            # the causal half of two products; the backward makes five, and its first input is the output's gradient
            backward = name.endswith("backward")
            query = dims[1 if backward else 0]
            flops = 2.0 * math.prod(query) * query[place] * (2.5 if backward else 1)
            return flops, float(sum(inputs) + (sum(inputs[1:4]) if backward else inputs[0]))
    if name == "aten::embedding":
        return 0.0, float(inputs[1] + 2 * size * math.prod(dims[1]) * dims[0][-1])
    if re.search(r"copy_$|fill_$|zero_$|sum|mean|norm|nll_loss_forward|index_select|^Mem", name):
        return 0.0, float(sum(inputs))  # the output is among the inputs, or small
    if name.endswith("cat"):
        return 0.0, 2.0 * sum(inputs)
    written = inputs[0] if name.endswith("_") else max(inputs)
    return 0.0, float(sum(inputs) + written)


def roofline_us(flops: float | None, moved: float | None, ceilings: dict) -> float | None:
    """The shortest time that the device's ceilings (matmul_tflops, copy_tb_s) allow; None where no bytes are known."""
    if moved is None:
        return None
    return max((flops or 0.0) / ceilings["matmul_tflops"] / 1e6, moved / ceilings["copy_tb_s"] / 1e6)


def operator_table(profile: Profile, steps: int, ceilings: dict | None) -> list[dict]:
    """A row a step for each operator and group, longest first.

    Keys: operator group dtype calls ms share_percent flops bytes roofline_ms of_roofline tflops gb_s. flops, bytes and
    what follows from them are None where some call did not record its shapes, roofline_ms also without ceilings;
    of_roofline is the shortest possible time over the measured one.
    """
    parts: dict[tuple[str, str], list[Operation]] = {}
    for one in profile.operations:
        parts.setdefault((one.name, one.group), []).append(one)
    whole = sum(one.us for one in profile.operations)
    rows = []
    for (name, group), calls in parts.items():
        us = sum(one.us for one in calls)
        shapes_known = all(one.bytes is not None for one in calls)
        flops, moved = (sum(getattr(one, key) or 0 for one in calls) / steps for key in ("flops", "bytes"))
        shortest = None
        if shapes_known and ceilings:
            shortest = sum(roofline_us(one.flops, one.bytes, ceilings) for one in calls)
        rows.append(
            {
                "operator": name,
                "group": group,
                "dtype": calls[0].dtype,
                "calls": len(calls) / steps,
                "ms": us / steps / 1e3,
                "share_percent": 100 * us / whole if whole else 0.0,
                "flops": flops if shapes_known else None,
                "bytes": moved if shapes_known else None,
                "roofline_ms": None if shortest is None else shortest / steps / 1e3,
                "of_roofline": None if shortest is None or not us else shortest / us,
                "tflops": flops * steps / us / 1e6 if shapes_known and us else None,
                "gb_s": moved * steps / us / 1e3 if shapes_known and us else None,
            }
        )
    return sorted(rows, key=lambda row: -row["ms"])


def ceilings_for(profile: Profile, file: str | None) -> tuple[dict | None, str]:
    """({"matmul_tflops", "copy_tb_s"} or None, where they come from or why there are none).

    file: a flops_profile.json of run_deepspeed_flops.py --generate-roofline. Without one they are measured here, if
    this is the device that was profiled, in the precision of the profile's first matrix product.
    """
    if file:
        return read_ceilings(pathlib.Path(file)), f"read from {file}"
    import torch

    here = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    if not profile.on_cpu and (here is None or profile.device not in (None, here)):
        return None, f"the profile is of {profile.device or 'a GPU'}, not of this machine: give its --ceilings FILE"
    from run_deepspeed_flops import ceilings

    kinds = {"c10::BFloat16": "bfloat16", "c10::Half": "float16"}
    dtype = next((one.dtype for one in profile.operations if one.name in PRODUCTS), "float")
    precision = kinds.get(dtype, "float32")
    options = argparse.Namespace(device="cpu" if profile.on_cpu else "cuda")
    return ceilings(options, precision), f"measured here, products in {precision}"


def read_ceilings(file: pathlib.Path) -> dict:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        found = content.get("ceilings", content)
        return {key: float(found[key]) for key in ("matmul_tflops", "copy_tb_s")}
    except OSError as error:
        raise Failure(2, f"--ceilings {file} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise Failure(
            2, f"--ceilings {file} holds no ceilings: write it with run_deepspeed_flops.py --generate-roofline"
        ) from None
