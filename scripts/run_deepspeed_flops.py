#!/usr/bin/env python3
"""Count the floating-point operations of a version's training step, and compare them with the time it takes.

The formula of the training script is checked against PyTorch's FlopCounterMode (forward and backward) and, where it is
installed, against DeepSpeed's profiler (forward). The version's own script then trains some steps, and the operations
over the measured time give TFLOP/s and MFU. Writes into --profile-dir

    flops_profile.json      counts, checks, measured figures
    model_profile.txt       FLOPs of every module
    mfu_analysis.csv        this run, and the shortest possible step at the peak of known GPUs
    roofline.png            with --generate-roofline (needs matplotlib)

A multiply-add counts as two operations. Options that are not listed here go to the training script.
"""

import argparse
import importlib.util
import json
import pathlib
import subprocess
import sys
import time

from common.analysis import Parser, legend_below, matplotlib_figure
from common.command_line import Failure, add_version_option, result_folder, run_tool, version_meant
from common.versions import SCRIPTS, load_version
from kernel_times import write_csv

# AdamW in float32 reads weight, gradient and both moments and writes three of them: bytes a parameter.
ADAMW_BYTES = 28


# ---------------------------------------------------------------- counting


def analytic_count(script, options) -> dict:
    """FLOPs of a step by the script's formula, split into matrix products with weights and causal attention."""
    config = script.model_config(options)
    once, twice = (script.flops_per_step(config, options.batch_size, n * options.seq_len) for n in (1, 2))
    attention = (twice - 2 * once) // 2  # the part that grows with the square of the sequence
    return {"total": once, "matrix_products": once - attention, "attention": attention}


def plain_operations(options) -> None:
    """Switch off what a counter of PyTorch's operators cannot look into; the products stay the same."""
    for name in vars(options):
        if name == "enable_torch_compile" or (name.startswith("enable_") and name.endswith("_kernel")):
            setattr(options, name, False)


def attention_formulas() -> dict:
    """FLOPs of fused attention for FlopCounterMode: every backend, and query heads that share key heads.

    All T x T pairs count, masked or not, and the backward computes the scores again: 2 products forward, 5 backward.
    """
    import torch

    def forward(query, key, value, *args, out_shape=None, **kwargs):
        *heads, queries, width = query
        return 4 * heads[0] * heads[1] * queries * key[-2] * width

    def backward(grad_out, query, key, value, *args, out_shape=None, **kwargs):
        return 5 * forward(query, key, value) // 2

    formulas = {}
    backends = (
        "flash_attention efficient_attention cudnn_attention flash_attention_for_cpu fused_attention_overrideable"
    )
    for backend in backends.split():
        for name, formula in ((backend, forward), (f"{backend}_backward", backward)):
            operator = getattr(torch.ops.aten, f"_scaled_dot_product_{name}", None)
            if operator is not None:
                formulas[operator] = formula
    return formulas


def product_recorder():
    """A mode that keeps (batch, m, k, n, bytes an element) of every matrix product that runs inside it."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    aten = torch.ops.aten
    operands = {aten.mm: (0, 1), aten.bmm: (0, 1), aten.addmm: (1, 2), aten.baddbmm: (1, 2)}

    class Products(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.products = []

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            places = operands.get(function.overloadpacket)
            if places:
                left, right = (args[place] for place in places)
                batch = left.shape[0] if left.dim() == 3 else 1
                self.products.append((batch, *left.shape[-2:], right.shape[-1], left.element_size()))
            return function(*args, **(kwargs or {}))

    return Products()


def counted(script, options) -> tuple[dict, list, str]:
    """Counts of FlopCounterMode for one step, the matrix products that ran, and a table of modules."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    model = script.build_model(options, torch.device(options.device))
    tokens, labels = (tensor.to(options.device) for tensor in script.load_data(options).batch(0))
    script.compute_loss(model, tokens, labels, options)  # the first pass may try out attention backends
    recorder, counter = product_recorder(), FlopCounterMode(display=False, custom_mapping=attention_formulas())
    with recorder, counter:
        loss = script.compute_loss(model, tokens, labels, options)
        forward, modules = counter.get_total_flops(), module_table(counter.get_flop_counts())
        loss.backward()
    operators = {str(operator): flops for operator, flops in counter.get_flop_counts()["Global"].items()}
    attention = sum(
        n for name, n in operators.items() if "scaled_dot_product" in name or name in ("aten.bmm", "aten.baddbmm")
    )
    total = counter.get_total_flops()
    counts = {
        "total": total,
        "forward": forward,
        "backward": total - forward,
        "matrix_products": total - attention,
        "attention": attention,
        "operators": operators,
    }
    return counts, recorder.products, modules


def module_table(counts: dict) -> str:
    """FLOPs of every module and, under it, of the operators in it; counts as FlopCounterMode gives them."""
    whole = sum(counts["Global"].values())
    lines = [f"{'module and operator':<64} {'GFLOP':>12} {'%':>6}"]

    def in_order(module: str) -> list:
        return [(word.isdigit(), int(word) if word.isdigit() else word) for word in module.split(".")]

    for module in sorted(set(counts) - {"Global"}, key=in_order):
        rows = [(module, sum(counts[module].values()))]
        rows += [(f"    {operator}", flops) for operator, flops in counts[module].items()]
        lines += [f"{str(name):<64} {flops / 1e9:>12,.4f} {100 * flops / whole:>6.1f}" for name, flops in rows]
    return "\n".join(lines)


def deepspeed_count(script, options) -> dict:
    """Forward FLOPs by DeepSpeed's profiler, or the reason why there are none."""
    if importlib.util.find_spec("deepspeed") is None:
        return {"forward": None, "reason": "DeepSpeed is not installed"}
    import torch

    try:
        from deepspeed.profiling.flops_profiler import FlopsProfiler
    except Exception as error:  # without a CUDA or ROCm toolkit its import ends in an exception of its own
        return {"forward": None, "reason": f"DeepSpeed does not start: {str(error).splitlines()[0]}"}
    model = script.build_model(options, torch.device(options.device))
    tokens, _ = script.load_data(options).batch(0)
    profiler = FlopsProfiler(model)
    profiler.start_profile()
    model(tokens.to(options.device))
    profiler.stop_profile()
    # its own FLOPs include activations; twice the multiply-adds is what the others count
    forward = 2 * profiler.get_total_macs()
    profiler.end_profile()
    return {"forward": forward, "reason": None}


def embedding_product(script, options) -> int:
    """FLOPs of the embedding's gradient, which the formula does not count: only version 3 takes it as a product."""
    config = script.model_config(options)
    if config.vocab_size > getattr(script, "PRODUCT_WORDS", 0):
        return 0
    return 2 * options.batch_size * options.seq_len * config.vocab_size * config.hidden_dim


def checks(analytic: dict, counter: dict, deepspeed: dict, embedding: int) -> list[dict]:
    """What was counted against the formula: the products must agree, attention must be its known multiple."""
    # An attention of plain products computes the whole square, twice the causal half; a fused one the scores once more.
    fused = any("scaled_dot_product" in name for name in counter["operators"])
    multiple = 7 / 3 if fused else 2
    rows = [
        ("matrix products", "FlopCounterMode", counter["matrix_products"], analytic["matrix_products"] + embedding),
        ("attention", "FlopCounterMode", counter["attention"], multiple * analytic["attention"]),
    ]
    if deepspeed["forward"] is not None:
        forward = (analytic["matrix_products"] + 2 * analytic["attention"]) / 3
        rows.append(("forward", "DeepSpeed", deepspeed["forward"], forward))
    return [
        {
            "what": what,
            "counter": by,
            "counted": n,
            "expected": expected,
            "agrees": abs(n - expected) <= 1e-6 * expected,
        }
        for what, by, n, expected in rows
    ]


# ---------------------------------------------------------------- measuring


def measure(version: int, options, arguments: list[str], folder: pathlib.Path) -> dict | None:
    """Metrics of some steps of the training script; None where version 3 has no GPU for its kernels."""
    if options.device == "cpu" and any(name.endswith("_kernel") and on for name, on in vars(options).items()):
        print("not measured: without a GPU the kernels run in Triton's interpreter, whose times mean nothing")
        return None
    metrics = folder / f"metrics_v{version}.json"
    command = [sys.executable, str(SCRIPTS[version]), *arguments, "--metrics-file", str(metrics)]
    status = subprocess.run(command).returncode
    if status:
        raise Failure(status)  # the script has said why
    return json.loads(metrics.read_text())


def measured_figures(metrics: dict | None, peaks: dict) -> dict | None:
    if metrics is None:
        return None
    summary, environment = metrics["summary"], metrics["environment"]
    column = {"tf32": 1, "float32": 2}.get(summary["precision"], 0)
    peak = next((columns[column] for name, columns in peaks.items() if name in environment["device"]), None)
    return {
        "environment": environment,
        "step_ms": summary["step_ms"]["median"],
        "tflops": summary["tflops"],
        "mfu": summary["mfu"],
        "precision": summary["precision"],
        "peak_tflops": peak,
    }


def mfu_rows(flops: int, measured: dict | None, peaks: dict) -> list[dict]:
    """This run first, then the shortest possible step at the data-sheet peak of each known GPU and precision."""
    rows = []
    if measured:
        keys = ("precision", "peak_tflops", "step_ms", "tflops", "mfu")
        rows.append([measured["environment"]["device"], *(measured[key] for key in keys)])
    for gpu, columns in peaks.items():
        for precision, peak in zip(("bfloat16", "tf32", "float32"), columns, strict=True):
            if peak:
                rows.append([f"{gpu} at its peak", precision, peak, flops / peak / 1e9, peak, 1.0])
    names = ("device", "precision", "peak_tflops", "step_ms", "tflops", "mfu")
    return [dict(zip(names, row, strict=True)) for row in rows]


# ---------------------------------------------------------------- intensity and roofline


def intensity(products: list, parameters: int, flops: int) -> dict:
    """FLOP a byte of every shape of matrix product, if each operand moves once, and an upper bound for the step."""
    shapes: dict[tuple, int] = {}
    for product in products:
        shapes[product] = shapes.get(product, 0) + 1
    rows = []
    for (batch, m, k, n, size), calls in shapes.items():
        work, moved = 2 * batch * m * k * n, size * batch * (m * k + k * n + m * n)
        rows.append(
            {"batch": batch, "m": m, "k": k, "n": n, "calls": calls}
            | {"flops": calls * work, "bytes": calls * moved, "flop_per_byte": work / moved}
        )
    rows.sort(key=lambda row: -row["flops"])
    least = sum(row["bytes"] for row in rows) + ADAMW_BYTES * parameters
    return {"products": rows, "step_bytes_at_least": least, "step_flop_per_byte_at_most": flops / least}


def timed(work, device, repeats: int) -> float:
    """Seconds of one call, the shortest of some."""
    import torch

    def finish():
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    best = float("inf")
    for _ in range(repeats):
        finish()
        start = time.perf_counter()
        work()
        finish()
        best = min(best, time.perf_counter() - start)
    return best


def ceilings(options, precision: str) -> dict:
    """What this device reaches at most: TFLOP/s of a large matrix product, and TB/s of a copy (read and written)."""
    import torch

    device = torch.device(options.device)
    size, megabytes = (8192, 1024) if device.type == "cuda" else (1024, 128)
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    dtype = getattr(torch, precision, torch.float32)
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    source = torch.zeros(megabytes * 2**18, device=device)
    target = torch.empty_like(source)
    return {
        "matmul_tflops": 2 * size**3 / timed(lambda: a @ b, device, 10) / 1e12,
        "copy_tb_s": 2 * 4 * source.numel() / timed(lambda: target.copy_(source), device, 10) / 1e12,
    }


def roofline_png(path: pathlib.Path, content: dict) -> None:
    """Attainable TFLOP/s over FLOP a byte: measured roofs, the step, and where the matrix products stand."""
    top, bandwidth = content["ceilings"]["matmul_tflops"], content["ceilings"]["copy_tb_s"]
    measured = content["measured"]
    products = [row["flop_per_byte"] for row in content["intensity"]["products"]]
    step = content["intensity"]["step_flop_per_byte_at_most"]
    span = [min(*products, step, top / bandwidth) / 4, max(*products, step, top / bandwidth) * 4]

    def roof(places):
        return [min(top, bandwidth * place) for place in places]

    with matplotlib_figure(path, height=3.6) as (figure, axes):
        corner = [span[0], top / bandwidth, span[1]]
        axes.plot(corner, roof(corner), color="black", label="measured: copy and matrix product")
        if measured and measured["peak_tflops"]:
            label = f"data sheet: {measured['peak_tflops']:,.0f} TFLOP/s"
            axes.axhline(measured["peak_tflops"], color="gray", linestyle="--", label=label)
        axes.plot(products, roof(products), "o", mfc="none", color="#4477aa", label="products of the step: attainable")
        if measured:
            axes.plot(step, measured["tflops"], "s", color="#ee6677", label="the whole step: measured")
        axes.set(xscale="log", yscale="log", xlim=span, xlabel="FLOP a byte, each operand moved once", ylabel="TFLOP/s")
        axes.set_title(f"Roofline of version {content['version']}, {content['precision']}")
        axes.grid(True, alpha=0.3)
        legend_below(figure, *axes.get_legend_handles_labels(), columns=1)


# ---------------------------------------------------------------- results


def as_text(content: dict) -> str:
    """The counts, what the checks say of them, and the measured figures."""
    analytic, measured = content["analytic"], content["measured"]
    total, products, attention = (analytic[key] / 1e9 for key in ("total", "matrix_products", "attention"))
    lines = [
        f"version {content['version']}: one step of {content['batch_size']} x {content['seq_len']} tokens",
        f"  formula          {total:,.3f} GFLOP: {products:,.3f} matrix products, {attention:,.3f} causal attention",
    ]
    for row in content["checks"]:
        verdict = "as expected" if row["agrees"] else f"NOT the expected {row['expected'] / 1e9:,.3f}"
        lines.append(f"  {row['counter']:<16} {row['counted'] / 1e9:,.3f} GFLOP {row['what']}: {verdict}")
    if content["deepspeed"]["reason"]:
        lines.append(f"  DeepSpeed        {content['deepspeed']['reason']}")
    if measured:
        share = "peak of this device not known" if measured["mfu"] is None else f"MFU {100 * measured['mfu']:.1f} %"
        lines.append(
            f"  measured         {measured['step_ms']:,.3f} ms a step, {measured['tflops']:,.3f} TFLOP/s in "
            f"{measured['precision']}; {share}"
        )
    if content["intensity"]:
        lines += intensity_lines(content["intensity"])
    return "\n".join(lines)


def intensity_lines(found: dict) -> list[str]:
    lines = ["", f"  {'calls':>5} {'batch':>6} {'m':>6} {'k':>6} {'n':>6} {'GFLOP':>10} {'MB':>10} {'FLOP/byte':>10}"]
    for row in found["products"]:
        sizes = f"{row['batch']:>6} {row['m']:>6} {row['k']:>6} {row['n']:>6}"
        work = f"{row['flops'] / 1e9:>10,.3f} {row['bytes'] / 1e6:>10,.1f} {row['flop_per_byte']:>10,.1f}"
        lines.append(f"  {row['calls']:>5} {sizes} {work}")
    at_most, least = found["step_flop_per_byte_at_most"], found["step_bytes_at_least"] / 1e6
    return [
        *lines,
        f"  the step: at most {at_most:,.1f} FLOP/byte, with at least {least:,.1f} MB moved (products, AdamW)",
    ]


def count_all(version: int, options) -> tuple[dict, list, str]:
    """The counts and checks of a version, the matrix products that ran, and the table of modules."""
    script = load_version(version)
    plain = argparse.Namespace(**vars(options))
    plain_operations(plain)
    print("counting the operations of one step ...", flush=True)
    analytic = analytic_count(script, options)
    counter, products, modules = counted(script, plain)
    deepspeed = deepspeed_count(script, plain)
    content = {
        "version": version,
        "batch_size": options.batch_size,
        "seq_len": options.seq_len,
        "precision": script.precision_name(options),
        "analytic": analytic,
        "flop_counter_mode": counter,
        "deepspeed": deepspeed,
        "checks": checks(analytic, counter, deepspeed, embedding_product(script, options)),
    }
    return content, products, modules


def training_arguments(options, rest: list[str]) -> list[str]:
    """Options for the training script; the sizes of a preset are not overruled by this tool's own."""
    preset = any(word.startswith("--preset") for word in rest)
    sizes = {"--batch-size": options.batch_size, "--seq-len": options.seq_len, "--num-steps": options.num_steps}
    own = {} if preset else {"--batch-size": "8", "--seq-len": "128"}
    return [word for name, value in sizes.items() if value or name in own for word in (name, value or own[name])] + rest


def run(version: int, options, rest: list[str]) -> int:
    """Count, measure and write; returns the exit status, 1 where a count does not agree with the formula."""
    folder = result_folder(options.profile_dir)
    arguments = training_arguments(options, rest)
    script = load_version(version)
    chosen = script.parse_options([*arguments, "--no-graph"])
    content, products, modules = count_all(version, chosen)
    content["measured"] = measured_figures(measure(version, chosen, arguments, folder), script.PEAK_TFLOPS)
    content["peak_tflops"] = script.PEAK_TFLOPS
    with_intensity = options.computational_intensity or options.generate_roofline
    parameters = sum(script.math.prod(shape) for shape in script.weight_shapes(script.model_config(chosen)).values())
    content["intensity"] = intensity(products, parameters, content["analytic"]["total"]) if with_intensity else None
    if options.generate_roofline:
        print("measuring this device's ceilings ...", flush=True)
        content["ceilings"] = ceilings(chosen, content["precision"])
    write_results(content, modules, folder)
    if options.generate_roofline:
        roofline_png(folder / "roofline.png", content)
        print(f"drew {folder / 'roofline.png'}")
    return 0 if all(row["agrees"] for row in content["checks"]) else 1


def write_results(content: dict, modules: str, folder: pathlib.Path) -> None:
    names = ("flops_profile.json", "model_profile.txt", "mfu_analysis.csv")
    profile, table, mfu = (folder / name for name in names)
    profile.write_text(json.dumps(content, indent=1) + "\n")
    table.write_text(f"FLOPs of the forward pass, by module\n\n{modules}\n")
    with open(mfu, "w", encoding="utf-8", newline="") as file:
        write_csv(mfu_rows(content["analytic"]["total"], content["measured"], content["peak_tflops"]), file)
    print(f"\n{as_text(content)}\n\nwrote {profile}, {table}, {mfu}")


def analyze(path: pathlib.Path, folder: pathlib.Path) -> int:
    """Print the figures of an earlier flops_profile.json."""
    if not path.exists() and (folder / path.name).exists():
        path = folder / path.name
    try:
        content = json.loads(path.read_text())
    except OSError as error:
        raise Failure(2, f"--analyze-results {path} cannot be read: {error.strerror}") from None
    except ValueError:
        raise Failure(2, f"--analyze-results {path} is cut off or damaged: it is no valid JSON") from None
    if not isinstance(content, dict) or not {"analytic", "checks", "measured"} <= content.keys():
        raise Failure(2, f"--analyze-results {path} is not a flops_profile.json of this tool")
    print(f"{path}:")
    print(as_text(content))
    return 0 if all(row["agrees"] for row in content["checks"]) else 1


# ---------------------------------------------------------------- main


def parse_options(argv: list[str] | None) -> tuple[argparse.Namespace, list[str]]:
    parser = Parser(
        "run_deepspeed_flops.py",
        "Count the floating-point operations of a training step, and measure how fast they run.",
        "--batch-size 8 --seq-len 256 --computational-intensity --generate-roofline; options that are not listed go to "
        "the training script",
        with_json=False,  # its flops_profile.json is always written
    )
    parser.add_argument("--batch-size", metavar="B", help="sequences in a step (8)")
    parser.add_argument("--seq-len", metavar="T", help="tokens in a sequence (128)")
    parser.add_argument("--num-steps", default="10", metavar="N", help="steps to measure (%(default)s)")
    parser.add_argument("--profile-dir", default="flops_analysis", metavar="DIR", help="results (%(default)s)")
    parser.add_argument("--computational-intensity", action="store_true", help="FLOP a byte of every matrix product")
    parser.add_argument("--generate-roofline", action="store_true", help="measure ceilings and draw roofline.png")
    parser.add_argument("--analyze-results", metavar="FILE", help="print an earlier flops_profile.json, nothing else")
    add_version_option(parser)
    return parser.parse_known_args(argv)


def main(argv: list[str] | None = None) -> int:
    options, rest = parse_options(argv)

    def work() -> int:
        if options.analyze_results:
            return analyze(pathlib.Path(options.analyze_results), pathlib.Path(options.profile_dir))
        return run(version_meant(options.version), options, rest)

    return run_tool("run_deepspeed_flops.py", work)


if __name__ == "__main__":
    sys.exit(main())
