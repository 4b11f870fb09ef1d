#!/usr/bin/env python3
"""Count the FLOPs of a version's training step, and compare them with the time that it takes.

example: python run_deepspeed_flops.py --batch-size 8 --seq-len 256 --computational-intensity --generate-roofline

The formulas (common/counts.py) are checked with PyTorch's FlopCounterMode, forward and backward, and with DeepSpeed's
profiler, forward, if it is installed. The version's script then trains some steps, which gives TFLOP/s and MFU. Writes
into --profile-dir

    flops_profile.json      counts, checks and measurements
    model_profile.txt       FLOPs of every module: DeepSpeed's table, or without it FlopCounterMode's
    mfu_analysis.csv        this run, and the shortest possible step at the peak of known GPUs
    roofline.png            with --generate-roofline (needs matplotlib)

A multiply-add counts as two operations; options that are not listed go to the training script, after --num-steps 10
and, without a --preset, --batch-size 8 --seq-len 128.
"""

import importlib.util
import json
import pathlib
import re
import sys

from common import counts
from common.command_line import Failure, Parser, add_version_option, progress, result_folder, version_meant
from common.roofline import ceilings_line, draw_roofline, measure_ceilings
from common.runs import train
from common.tables import columns, text_table, write_csv
from common.versions import SCRIPTS, load_version

PARTS = "part of the step: {part} | GFLOP: {flops:G,.3f} | MB: {bytes:M,.1f} | FLOP/byte: {flop_per_byte:,.1f}"

# ---------------------------------------------------------------- counting


def split(total, attention):
    """Return a number of FLOPs and its parts in causal attention and in matmuls with weights."""
    return {"total": total, "matrix_products": total - attention, "attention": attention}


def switch_off_fusions(config):
    """Switch off what a counter of PyTorch's operators cannot see; the matmuls stay the same."""
    for name in [name for name in vars(config) if re.fullmatch(r"enable_(torch_compile|\w+_kernel)", name)]:
        setattr(config, name, False)
    config.attention_backend = "math"


def model_and_batch(script, config):
    import torch

    with torch.device(config.device):
        model = script.TinyLlama(config)
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
            forward, modules = counter.get_total_flops(), counter.get_flop_counts()
            rows = [[module, f"{sum(found.values()) / 1e9:,.4f}"] for module, found in modules.items()]
            loss.backward()
    total, attention = counter.get_total_flops(), counter.get_flop_counts()["Global"].get(ops.aten.bmm, 0)
    found = split(total, attention) | {"forward": forward, "backward": total - forward}
    return found, text_table(["module", "GFLOP"], rows)


def deepspeed_count(script, config, table):
    """Return the forward FLOPs that DeepSpeed's profiler counts, or why there are none; write its table of modules."""
    if importlib.util.find_spec("deepspeed") is None:
        return {"forward": None, "reason": "DeepSpeed is not installed"}
    try:
        from deepspeed.profiling.flops_profiler import FlopsProfiler
    except Exception as error:  # without a CUDA or ROCm toolkit its import raises an exception of its own
        return {"forward": None, "reason": f"DeepSpeed does not start: {str(error).splitlines()[0]}"}
    model, tokens, _ = model_and_batch(script, config)
    profiler = FlopsProfiler(model)
    profiler.start_profile()
    model(tokens)
    profiler.stop_profile()
    forward = 2 * profiler.get_total_macs()  # its own FLOPs include activations
    profiler.print_model_profile(output_file=str(table))
    profiler.end_profile()
    return {"forward": forward, "reason": None}


def count(version, config, table):
    """Return a version's FLOPs, from formulas and counters, and write the table of modules.

    The counters must agree with the formulas: equal matmuls, and in attention the whole square of the scores.
    """
    progress("counting the operations of one step ...")
    script, sizes, precision = load_version(version), counts.sizes_of(config), config.precision
    switch_off_fusions(config)
    counter, modules = flop_counter(script, config)
    deepspeed, flops = deepspeed_count(script, config, table), counts.required_flops(sizes)
    needed = split(sum(flops.values()), flops["attention"])
    if deepspeed["reason"]:
        table.write_text(f"FLOPs of the forward pass, by module\n\n{modules}\n")
    # version 3 computes the embedding's gradient as a matmul
    embedding = counts.step_counts(version, precision, sizes)["embedding"]["backward"]["flops"]
    products, attention = needed["matrix_products"], 2 * needed["attention"]
    pairs = [
        ("matrix products", "FlopCounterMode", counter["matrix_products"], products + embedding),
        ("attention", "FlopCounterMode", counter["attention"], attention),
        ("forward", "DeepSpeed", deepspeed["forward"], (products + attention) / 3),
    ]
    checks = [
        {"what": what, "counter": name, "counted": counted, "expected": expected}
        | {"agrees": abs(counted - expected) <= 1e-6 * expected}
        for what, name, counted, expected in pairs
        if counted is not None
    ]
    content = {"version": version, "batch_size": sizes.B, "seq_len": sizes.T, "precision": precision}
    return content | {"analytic": needed, "flop_counter_mode": counter, "deepspeed": deepspeed, "checks": checks}


# ---------------------------------------------------------------- measuring


def measure(version, config, arguments):
    """Return time, TFLOP/s and MFU of some steps; None for version 3 without a GPU for its kernels."""
    if version == 3 and config.device == "cpu":
        progress("not measured: without a GPU the kernels run in Triton's interpreter, whose times mean nothing")
        return None
    progress(f"training {config.num_steps} steps of version {version} ...")
    metrics = train(SCRIPTS[version], arguments)
    return measured_rates(metrics["summary"], metrics["environment"])


def measured_rates(summary, environment):
    """Return time, TFLOP/s and MFU of a run; mfu is None on a device whose peak is not known."""
    peak = counts.peak_tflops(environment["device"], summary["precision"])
    rates = {"device": environment["device"], "precision": summary["precision"], "peak_tflops": peak}
    rates |= {"step_ms": summary["step_ms"]["median"], "tflops": summary["tflops"]}
    return rates | {"mfu": summary["tflops"] / peak / summary["world_size"] if peak else None}


def mfu_rows(flops, measured):
    """Return this run, then the shortest possible step at the data-sheet peak of each known GPU and precision."""
    return [measured] * bool(measured) + [
        {"device": f"{gpu} at its peak", "precision": precision, "peak_tflops": peak}
        | {"step_ms": flops / peak / 1e9, "tflops": peak, "mfu": 1.0}
        for gpu, peaks in counts.PEAK_TFLOPS.items()
        for precision, peak in peaks.items()
    ]


# ---------------------------------------------------------------- results


def draw(path, content):
    """Draw the measured step under the ceilings, and the parts on them, where their FLOP per byte is."""
    work, measured = {part: row["flop_per_byte"] for part, row in content["intensity"].items()}, content["measured"]
    points = [(part, x, None, None) for part, x in work.items() if part != "step"]
    points += [("step, measured", work["step"], measured["tflops"], None)] if measured else []
    title = f"Version {content['version']}, {content['precision']}: the step and its parts"
    draw_roofline(path, title, content["ceilings"], points)


def as_text(content):
    """Return counts, the result of the checks, and the measurements."""
    needed, measured = content["analytic"], content["measured"]
    total, products, attention = (needed[key] / 1e9 for key in ("total", "matrix_products", "attention"))
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
        share = f"MFU {100 * measured['mfu']:.1f} %" if measured["mfu"] else "peak of this device not known"
        rate = f"{measured['step_ms']:,.3f} ms per step, {measured['tflops']:,.3f} TFLOP/s in {measured['precision']}"
        lines.append(f"  measured         {rate}; {share}")
    if content["intensity"]:
        rows = [row | {"part": part} for part, row in content["intensity"].items()]
        lines += ["", text_table(*columns(PARTS, rows)), "each launch reads its operands and writes its results once"]
    if content["ceilings"]:
        lines.append(f"ceilings of this device: {ceilings_line(content['ceilings'])}; below it memory is the limit")
    return "\n".join(lines)


def verdict(content):
    return int(not all(row["agrees"] for row in content["checks"]))


def run(options, rest):
    """Count, measure and write; return 1 if a counter does not agree with the formula."""
    if options.analyze_results:
        return analyze(pathlib.Path(options.analyze_results), pathlib.Path(options.profile_dir))
    sizes = [] if any(word.startswith("--preset") for word in rest) else ["--batch-size", "8", "--seq-len", "128"]
    version, arguments = version_meant(options.version), ["--num-steps", "10", *sizes, *rest]
    folder = result_folder(options.profile_dir)
    profile, table, mfu = (folder / name for name in ("flops_profile.json", "model_profile.txt", "mfu_analysis.csv"))
    config = load_version(version).parse_options([*arguments, "--no-graph"])
    sizes, device = counts.sizes_of(config), config.device
    measured = measure(version, config, arguments)
    content = count(version, config, table) | {"measured": measured, "intensity": None, "ceilings": None}
    if options.computational_intensity or options.generate_roofline:
        content["intensity"] = counts.intensity(counts.step_counts(version, content["precision"], sizes))
    if options.generate_roofline:
        progress("measuring this device's ceilings ...")
        content["ceilings"] = measure_ceilings(device, content["precision"])
    profile.write_text(json.dumps(content, indent=1) + "\n")
    with open(mfu, "w", encoding="utf-8", newline="") as file:
        write_csv(mfu_rows(content["analytic"]["total"], measured), file)
    print(f"\n{as_text(content)}\n\nwrote {profile}, {table}, {mfu}")
    if options.generate_roofline:
        draw(folder / "roofline.png", content)
        print(f"drew {folder / 'roofline.png'}")
    return verdict(content)


def analyze(path, folder):
    """Print an earlier flops_profile.json."""
    path = folder / path.name if not path.exists() and (folder / path.name).exists() else path
    try:
        content = json.loads(path.read_text())
        print(f"{path}:\n{as_text(content)}")
    except OSError as error:
        raise Failure(2, f"--analyze-results {path} cannot be read: {error.strerror}") from None
    except (ValueError, TypeError, KeyError):
        raise Failure(2, f"--analyze-results {path} is not a flops_profile.json of this tool") from None
    return verdict(content)


def main(argv=None):
    parser = Parser("run_deepspeed_flops.py", __doc__, with_json=False)  # its flops_profile.json is always written
    add = parser.add_argument
    add("--profile-dir", default="flops_analysis", metavar="DIR", help="results (%(default)s)")
    add("--computational-intensity", action="store_true", help="FLOP per byte of every part of the step")
    add("--generate-roofline", action="store_true", help="measure ceilings and draw roofline.png")
    add("--analyze-results", metavar="FILE", help="print an earlier flops_profile.json, nothing else")
    add_version_option(parser)
    return parser.run(run, argv, passes_on=True)


if __name__ == "__main__":
    sys.exit(main())
