#!/usr/bin/env python3
"""Count the FLOPs of a version's training step, and compare them with the time that it takes.

example: python run_deepspeed_flops.py --batch-size 8 --seq-len 256 --computational-intensity --generate-roofline

It checks the formulas (common/formulas/counts.py) with PyTorch's FlopCounterMode, forward and backward, and with
DeepSpeed's profiler, forward only, if DeepSpeed is installed. Then the version's script trains some steps, which gives
TFLOP/s and MFU. Writes into --profile-dir

    flops_profile.json      counts, checks and measurements
    model_profile.txt       FLOPs of every module: DeepSpeed's table, or without it FlopCounterMode's
    mfu_analysis.csv        time, TFLOP/s and MFU of the run
    roofline.png            with --generate-roofline (needs matplotlib)

A multiply-add counts as two operations. FLOP per byte exists for versions 1 to 3 only, because the compiler decides
what version 4 launches. Options that aren't listed here go to the training script, after --num-steps 10 and, without a
--preset, --batch-size 8 --seq-len 128.
"""

import json
import pathlib
import re
import sys

from common.command_line import (
    Parser,
    add_version_option,
    progress,
    refuse_protected,
    result_folder,
    version_meant,
    with_first_batch,
)
from common.files import errors_of, read_object
from common.formulas import counts
from common.formulas.gpus import emulates_tf32, name_here, peak_tflops
from common.measuring.ceilings import ceilings_line, measure_ceilings
from common.measuring.roofline_picture import draw_roofline
from common.measuring.runs import followed, train
from common.tables import columns, text_table, write_csv, write_whole
from common.versions import SCRIPTS, load_version

PARTS = "part of the step: {part} | GFLOP: {flops:G,.3f} | MB: {bytes:M,.1f} | FLOP/byte: {flop_per_byte:,.1f}"

# ---------------------------------------------------------------- counting


def model_and_batch(script, config):
    import torch

    with torch.device(config.device):
        model = script.make_model(config)
    return model, *(tensor.to(config.device) for tensor in script.batch(script.load_data(config), 0, config))


def flop_counter(script, config):
    """Return what FlopCounterMode counts in one step with plain matmuls for attention, and a table of modules.

    Tensors without data make it fast, and the T x T scores need no memory.
    """
    from torch import ops
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    with FakeTensorMode(allow_non_fake_inputs=True):
        model, tokens, labels = model_and_batch(script, config)
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
            loss = script.compute_loss(model, tokens, labels, config)
            modules = counter.get_flop_counts().items()
            rows = [[module, f"{sum(found.values()) / 1e9:,.4f}"] for module, found in modules]
            loss.backward()
    attention = counter.get_flop_counts()["Global"].get(ops.aten.bmm, 0)
    found = {"matmuls": counter.get_total_flops() - attention, "attention": attention}
    return found, f"FLOPs of the forward pass, by module\n\n{text_table(['module', 'GFLOP'], rows)}\n"


def deepspeed_count(script, config, table):
    """Return {"forward": FLOPs that DeepSpeed's profiler counts}, and write its table of modules; {} without it."""
    try:
        from deepspeed.profiling.flops_profiler import FlopsProfiler
    except Exception as error:  # without a CUDA or ROCm toolkit its import raises an exception of its own
        if isinstance(error, ModuleNotFoundError) and error.name.split(".")[0] == "deepspeed":
            progress("DeepSpeed isn't installed")
        else:
            progress(f"DeepSpeed does not start: {str(error).splitlines()[0]}")
        return {}
    model, tokens, _ = model_and_batch(script, config)
    profiler = FlopsProfiler(model)
    profiler.start_profile()
    model(tokens)
    profiler.stop_profile()
    forward = 2 * profiler.get_total_macs()  # its own FLOPs include activations
    profiler.print_model_profile(output_file=str(table))
    profiler.end_profile()
    return {"forward": forward}


def count(version, config, table):
    """Return a version's FLOPs, from formulas and counters, and write the table of modules.

    The counters must agree with the formulas: equal matmuls, and in attention the whole square of the scores.
    """
    progress("counting the operations of one step ...")
    script = load_version(version)
    sizes = counts.sizes_of(config)
    # Counters see PyTorch's operators only.
    fusions = [name for name in vars(config) if re.fullmatch(r"enable_(torch_compile|fused_loss|\w+_kernel)", name)]
    vars(config).update(dict.fromkeys(fusions, False), attention_backend="math")
    counted, modules = flop_counter(script, config)
    write_whole(table, modules)
    found = {"FlopCounterMode": counted, "DeepSpeed": deepspeed_count(script, config, table)}
    flops = counts.required_flops(sizes)
    total = sum(flops.values())
    attention = flops["attention"]
    products = total - attention
    _, embedding = counts.flops_done(version, sizes).get("embedding", (0, 0))  # a matmul in version 3
    expected = {"matmuls": products + embedding, "attention": 2 * attention, "forward": (total + attention) / 3}
    checks = [
        {"what": what, "counter": counter, "counted": n, "expected": expected[what]}
        | {"agrees": abs(n - expected[what]) <= 1e-6 * expected[what]}
        for counter, results in found.items()
        for what, n in results.items()
    ]
    needed = {"total": total, "matrix_products": products, "attention": attention}
    content = {"version": version, "batch_size": sizes.B, "seq_len": sizes.T, "precision": config.precision}
    return content | {"analytic": needed, "checks": checks}


# ---------------------------------------------------------------- measuring and results


def measure(version, config, arguments):
    """Return time, TFLOP/s and MFU of some steps; None for version 3 without a GPU for its kernels.

    mfu is None where the peak is not known. precision is that of the matmuls: float32 where --tf32 has no effect.
    """
    if version == 3 and config.device == "cpu":
        progress("not measured: without a GPU the kernels run in Triton's interpreter, whose times mean nothing")
        return None
    progress(f"training {config.num_steps} steps of version {version} ...")
    metrics = train(SCRIPTS[version], arguments, tell=followed())
    summary = metrics["summary"]
    device = metrics["environment"]["device"] if config.device == "cpu" else name_here(config.device)
    precision = summary["precision"]
    if summary["rounds_to_tf32"] is False and not emulates_tf32(device):
        precision = "float32"
    peak = peak_tflops(device, precision)
    rate = summary["tflops"]
    rates = {"device": device, "precision": precision, "peak_tflops": peak, "tflops": rate}
    mfu = rate / peak / summary["world_size"] if peak else None
    return rates | {"step_ms": summary["step_ms"]["median"], "mfu": mfu}


def draw(path, content):
    """Draw the measured step under the ceilings, and a dotted line at the FLOP per byte of each part."""
    work = {part: row["flop_per_byte"] for part, row in content["intensity"].items()}
    measured = content["measured"]
    points = [(part, x, None, None) for part, x in work.items() if part != "step"]
    points += [("step, measured", work["step"], measured["tflops"], None)] if measured else []
    title = f"Version {content['version']}, {content['precision']}: the step; dotted: its parts, not timed"
    draw_roofline(path, title, content["ceilings"], points)


def as_text(content):
    """Return counts, the result of the checks, and the measurements."""
    total, products, attention = (content["analytic"][key] / 1e9 for key in ("total", "matrix_products", "attention"))
    lines = [
        f"version {content['version']}: one step of {content['batch_size']} x {content['seq_len']} tokens",
        f"  formula          {total:,.3f} GFLOP: {products:,.3f} matmuls, {attention:,.3f} causal attention",
    ]
    for row in content["checks"]:
        verdict = "as expected" if row["agrees"] else f"NOT the expected {row['expected'] / 1e9:,.3f}"
        lines.append(f"  {row['counter']:<16} {row['counted'] / 1e9:,.3f} GFLOP {row['what']}: {verdict}")
    if measured := content["measured"]:
        share = (
            f"MFU {100 * measured['mfu']:.1f} %"
            if measured["mfu"]
            else "this device's peak isn't known here: divide by the one in its data sheet"
        )
        rate = f"{measured['step_ms']:,.3f} ms per step, {measured['tflops']:,.3f} TFLOP/s in {measured['precision']}"
        lines.append(f"  measured         {rate}; {share}")
    if content["intensity"]:
        rows = [row | {"part": part} for part, row in content["intensity"].items()]
        lines += ["", text_table(*columns(PARTS, rows)), "each launch reads its operands and writes its results once"]
    if content["ceilings"]:
        lines.append(f"ceilings of this device: {ceilings_line(content['ceilings'])}; below it memory is the limit")
    return "\n".join(lines)


def run(options, rest):
    """Count, measure and write; return 1 if a counter does not agree with the formula."""
    folder = pathlib.Path(options.profile_dir)
    if options.analyze_results:
        return analyze(pathlib.Path(options.analyze_results), folder)
    version = version_meant(options.version)
    arguments = ["--num-steps", "10", *with_first_batch(rest)]
    config = load_version(version).parse_options([*arguments, "--no-graph"])
    sizes, device = counts.sizes_of(config), config.device
    result_folder(folder)
    for name in ("model_profile.txt", "flops_profile.json", "mfu_analysis.csv", "roofline.png"):
        refuse_protected(folder / name)
    measured = measure(version, config, arguments)
    content = count(version, config, folder / "model_profile.txt")
    content |= {"measured": measured, "intensity": None, "ceilings": None}
    roofline = options.generate_roofline
    if version == 4 and (options.computational_intensity or roofline):
        progress("version 4 is compiled: memory_bandwidth_analyzer.py has FLOP/byte and roofline, from a profile")
    elif options.computational_intensity or roofline:
        content["intensity"] = counts.intensity(counts.step_counts(version, content["precision"], sizes))
        content["ceilings"] = measure_ceilings(device, content["precision"]) if roofline else None
    write_whole(folder / "flops_profile.json", json.dumps(content, indent=1) + "\n")
    if measured:
        write_csv([measured], folder / "mfu_analysis.csv")
    print(f"\n{as_text(content)}\n\nresults are in {folder}")
    if content["ceilings"]:
        draw(folder / "roofline.png", content)
    return int(not all(row["agrees"] for row in content["checks"]))


def analyze(path, folder):
    """Print an earlier flops_profile.json, from the folder of results if there is none at the path."""
    path = path if path.exists() else folder / path.name
    with errors_of(path):
        content = read_object(path, "flops_profile.json")
        print(f"{path}:\n{as_text(content)}")
        return int(not all(row["agrees"] for row in content["checks"]))


def main(argv=None):
    parser = Parser("run_deepspeed_flops.py", __doc__, with_json=False)  # its flops_profile.json is always written
    add = parser.add_argument
    add("--profile-dir", "--output-dir", default="flops_analysis", metavar="DIR", help="results (%(default)s)")
    add("--computational-intensity", action="store_true", help="print FLOP per byte of every part of the step")
    add("--generate-roofline", action="store_true", help="measure ceilings and draw roofline.png")
    add("--analyze-results", metavar="FILE", help="print an earlier flops_profile.json, nothing else")
    add_version_option(parser)
    return parser.run(run, argv, passes_on=True)


if __name__ == "__main__":
    sys.exit(main())
