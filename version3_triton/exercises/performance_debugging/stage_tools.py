"""Run, check and explain a stage: version 3 with one part replaced by the code in the stage's file."""

import importlib.util
import os
import pathlib
import re
import sys
import textwrap

from stage_setup import CPU_SIZES, GPU_SIZES, HERE, SCRIPT

OWN_OPTIONS = {
    "--check": "say whether the fault is repaired; runs a small model in Triton's interpreter",
    "--reveal": "print what is wrong, how it shows and how to repair it",
    "--solution": "print a repair as a diff",
}
# No GPU is visible to a check: Triton's interpreter then runs the kernels, and every machine gets the same verdict.
CHECK_ENVIRONMENT = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}


def load_v3():
    """Return a fresh module of tiny_llama_v3.py, whose parts a stage may replace."""
    spec = importlib.util.spec_from_file_location("tiny_llama_v3_stage", SCRIPT)
    v3 = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = v3
    spec.loader.exec_module(v3)
    return v3


def add_defaults(v3, argv):
    """Return argv after the stages' sizes; a preset or the device of the user replaces those that it must."""
    on_gpu = v3.torch.cuda.is_available() and "cpu" not in argv
    if on_gpu and any(option.startswith("--preset") for option in argv):
        return ["--num-steps", "20", *argv]
    return [*(GPU_SIZES if on_gpu else CPU_SIZES), *argv]


def explanation(stage):
    """Return the folded part of the stage's section in WORKSHOP_GUIDE.md, without the markers behind its numbers."""
    guide = re.sub(r"<!-- .*? -->", "", (HERE / "WORKSHOP_GUIDE.md").read_text(encoding="utf-8"))
    section = re.search(rf"^## Stage {stage}\b.*?(?=^## |\Z)", guide, re.DOTALL | re.MULTILINE)[0]
    return re.search(r"</summary>\n+(.*?)</details>", section, re.DOTALL)[1].strip()


def check(v3, stage, argv):
    """Print the verdict of stage_checks.py in this process or, unless it uses the interpreter, in a new one."""
    if any(os.environ.get(name) != value for name, value in CHECK_ENVIRONMENT.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | CHECK_ENVIRONMENT)
    from stage_checks import CHECKS, check_model, check_parts

    fault = check_parts(v3, stage) or check_model(v3, stage) or CHECKS[stage](v3)
    if fault:
        print(f"stage {stage} still has a fault: {fault}")
        return 1
    if stage == 5:
        print("stage 5 has no fault: it is the reference")
        return 0
    script = pathlib.Path(sys.argv[0]).name
    print(f"stage {stage} has no fault: measure again with python {script}, and compare with stage 5")
    return 0


def main(v3, stage):
    """Train the stage, or follow one of its own options; return the exit status."""
    argv = sys.argv[1:]
    if {"-h", "--help"} & set(argv):
        print("options of the stage (all others are those of tiny_llama_v3.py, below)")
        print("\n".join(f"  {name:11s} {text}" for name, text in OWN_OPTIONS.items()))
    if "--check" in argv:
        return check(v3, stage, argv)
    if "--reveal" in argv:
        print(explanation(stage))
        return 0
    if "--solution" in argv:
        diff = HERE / "solutions" / f"stage{stage}.diff"
        print(diff.read_text(encoding="utf-8") if diff.is_file() else "stage 5 has no fault\n", end="")
        return 0
    print(f"stage {stage} of 6", flush=True)
    status = v3.main(add_defaults(v3, argv))
    if status == 0 and stage != 5:
        text = "Which number is wrong, and why? Repair this file, then run it with --check. --reveal explains."
        print(textwrap.fill(text, 100))
    return status
