"""Read the trace that a tool names, and find the ceilings of the device that it is from."""

import time

from common.command_line import Failure, add_gpu, add_steps
from common.files import errors_of
from common.formulas.gpus import GPUS, emulates_tf32, gpu_named, name_here, peak_tflops
from common.measuring.ceilings import measure_ceilings, peak, precision_here
from common.profiles.files import read_profile
from common.profiles.gemms import FACTORS
from common.profiles.gemms import precision_of as precision_of_gemm
from common.profiles.groups import precision_of_kernel, steps_needed
from common.profiles.model import check_one_gpu
from common.profiles.operators import operator_table

OLD_HOURS = 1  # from which on a trace is not of now


def add_trace_options(parser):
    parser.add_argument("--profile-data", required=True, metavar="DIR", help="PyTorch trace, or a folder with one")
    words = "ceilings of the GPU you profiled, as 989,4.8 (default: measured here, or else from its data sheet)"
    parser.add_argument("--peak", type=peak, metavar="TFLOPS,TB/S", help=words)
    add_steps(parser)
    add_gpu(parser)


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
        found = f"{len(above)} operators are above a ceiling ({above[0]}, ...): their"
        if len(above) == 1:
            found = f"One operator is above a ceiling ({above[0]}): its"
        remarks.append(f"{found} data were in a cache, or the ceilings aren't those of this run.")
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


def doubts(profile):
    """Return why ceilings that are measured now need not be those of the profiled run, in sentences."""
    found = []
    hours = (time.time() - profile.path.stat().st_mtime) / 3600
    if hours > OLD_HOURS:
        found.append(f"The trace is {hours:,.0f} hours old: back then the device may have had other clocks or loads.")
    if profile.on_cpu:
        found.append("A CPU's trace names neither machine nor threads: the fractions hold only if neither has changed.")
    return found
