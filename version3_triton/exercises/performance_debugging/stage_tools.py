"""What the stages share: version 3 as a module, its run with a stage's fault, and a look at what came of it."""

import atexit
import importlib.util
import pathlib
import re
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence

sys.path.append(str(pathlib.Path(__file__).resolve().parents[3] / "exercises"))
from speed import DeviceTimer

SCRIPT = pathlib.Path(__file__).resolve().parents[2] / "tiny_llama_v3.py"
GPU_SIZES = "--batch-size 8 --seq-len 128".split()
CPU_SIZES = (
    "--batch-size 2 --seq-len 16 --hidden-dim 32 --num-heads 2 --num-layers 2 --intermediate-dim 32 --vocab-size 100"
).split()


def load_v3(section: tuple[str, str] = ("", ""), changes: dict[str, str] | None = None):
    """The module of tiny_llama_v3.py; with changes, regular expressions that are replaced in a section of its source.

    section: the texts with which it starts and before which it ends. Where one finds nothing, as when the
    script has changed, the program ends with a sentence on it.
    """
    path = SCRIPT
    if changes:
        source = SCRIPT.read_text(encoding="utf-8")
        start, end = source.find(section[0]), source.find(section[1])
        part = source[start:end]
        for pattern, replacement in changes.items():
            part, count = re.subn(pattern, replacement, part)
            if not count or start < 0 or end < 0:
                sys.exit(f"{SCRIPT} has no {pattern} from {section[0]} on: bring the stage up to date with it")
        folder = tempfile.mkdtemp()  # Triton reads a kernel's source from its file whenever it compiles it
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        path = pathlib.Path(folder) / SCRIPT.name
        path.write_text(source[:start] + part + source[end:], encoding="utf-8")
    spec = importlib.util.spec_from_file_location("tiny_llama_v3_stage", path)
    v3 = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = v3
    spec.loader.exec_module(v3)
    return v3


def device_ms(device, call: Callable) -> float:
    """Median milliseconds of a call by the GPU's own events."""
    return statistics.median(DeviceTimer(device).milliseconds(call))


def with_defaults(v3, argv: Sequence[str]) -> list[str]:
    """The options of the stages in front of the user's, which win; a preset or --help stands alone."""
    on_gpu = v3.torch.cuda.is_available() and "cpu" not in argv
    sizes = GPU_SIZES if on_gpu else CPU_SIZES
    chosen = any(option.startswith("--preset") for option in argv)
    steps = ["--num-steps", "20"] if on_gpu else ["--num-steps", "5", "--warmup-steps", "1"]
    return [*([] if chosen else sizes), *steps, *argv]


def run_stage(v3, title: str, report: Callable, argv: Sequence[str] | None = None) -> int:
    """Version 3's main() with the stage's defaults, then what report(v3, trainer, steps, summary) tells; its status."""
    argv = with_defaults(v3, sys.argv[1:] if argv is None else argv)
    runs, summarize = [], v3.summarize

    def remember(trainer, steps, *rest):
        summary = summarize(trainer, steps, *rest)
        runs.append((trainer, steps, summary))
        return summary

    v3.summarize = remember
    print(title, flush=True)
    try:
        status = v3.main(argv)
    finally:
        v3.summarize = summarize  # what stays in the module would keep the model in memory
    if runs:
        print("the symptom")
        for line in report(v3, *runs[-1]):
            print(f"  {line}")
    return status
