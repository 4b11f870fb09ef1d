"""Run any Python training script under PyTorch's profiler, and write a trace of a few of its steps.

python profile_script.py --profile-dir DIR [--warmup-steps 2] [--profile-steps 3] [--profile-memory] train.py ARGUMENTS

A step ends when the script's first optimizer steps. The first steps load libraries and compile kernels, so they're left
out; --warmup-steps 0 profiles from the start. With several processes only rank 0 is profiled. The script runs to its
end.
"""

import argparse
import contextlib
import os
import pathlib
import re
import runpy
import sys
import time

COPIES = {}  # of standard output and standard error, as they were before the script began


def export_trace(profiler, path):
    """Write the profiler's trace as tiny_llama_v1.py does: if it is cut, remove it and raise OSError with the cause."""
    unfinished = pathlib.Path(f"{path}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(path))
        with open(path if path.exists() else unfinished, "ab+") as file:
            file.seek(max(0, file.tell() - 2**15))
            ending = file.read()
            if b'"traceName"' in ending and ending.endswith(b"}"):
                return
            file.write(bytes(2**16))
            file.flush()
            os.fsync(file.fileno())
        raise OSError(None, "the profiler wrote only a part of it")
    except OSError as error:
        for cut in (path, unfinished):
            cut.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from None


def tell(text, descriptor=1):
    """Print a line to standard output or standard error, whatever the script did to print and its streams."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stdout.flush()
    with contextlib.suppress(OSError):
        os.write(COPIES[descriptor], f"profile_script.py: {text}\n".encode(errors="backslashreplace"))


class StepProfiler:
    """Start PyTorch's profiler after the warm-up steps, and write the trace after the profiled ones."""

    def __init__(self, options):
        self.options, self.steps, self.optimizer = options, 0, None
        self.profiler = self.trace = self.mark = None
        self.status = 0

    def start(self):
        import torch

        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        memory = self.options.profile_memory
        self.profiler = torch.profiler.profile(activities=activities, record_shapes=True, profile_memory=memory)
        self.profiler.start()

    def finish(self, is_early=False):
        """Stop the profiler and write the trace, unless no step was profiled.

        is_early: the script ended before all steps, and what it did after the last one is in the trace.
        """
        import torch

        if torch.cuda.is_available():
            torch.cuda.synchronize()
        profiler, self.profiler = self.profiler, None
        profiler.stop()
        if 0 < self.options.warmup_steps == self.steps:
            return
        stem = re.sub(r"[^\w.-]", "_", self.options.script.stem)  # PyTorch writes the name into the trace as it is
        name = f"trace_{stem}_{time.strftime('%Y%m%d_%H%M%S')}.json"
        self.trace = pathlib.Path(self.options.profile_dir, name)
        try:
            export_trace(profiler, self.trace)
        except OSError as error:
            tell(f"cannot write {self.trace}: {error.strerror}", 2)
            self.status = 1
            return
        tell(f"wrote {self.trace}")
        if is_early:
            made = f"{self.steps - self.options.warmup_steps} of {self.options.profile_steps} steps"
            after = "and of what the script did after them, an evaluation for one: times per step may be too long"
            tell(f"this is a profile of {made}, {after}", 2)

    def before_step(self, optimizer, *_):
        """Mark the optimizer in the trace, as our scripts do: readers count the steps by this mark."""
        import torch

        self.optimizer = self.optimizer or optimizer
        if optimizer is self.optimizer and self.profiler:
            self.mark = torch.profiler.record_function("optimizer")
            self.mark.__enter__()

    def after_step(self, optimizer, *_):
        if optimizer is not self.optimizer:
            return
        if self.mark:
            self.mark.__exit__(None, None, None)
            self.mark = None
        self.steps += 1
        if self.profiler and self.steps == self.options.warmup_steps + self.options.profile_steps:
            self.finish()
        elif not self.trace and not self.profiler and self.steps == self.options.warmup_steps:
            self.start()


def parse_arguments(argv):
    parser = argparse.ArgumentParser(prog="profile_script.py", description=__doc__.split("\n")[0])
    parser.add_argument("--profile-dir", required=True)
    parser.add_argument("--warmup-steps", type=int, default=2)
    parser.add_argument("--profile-steps", type=int, default=3)
    parser.add_argument("--profile-memory", action="store_true")
    parser.add_argument("script", type=pathlib.Path)
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    options = parser.parse_args(argv)
    if not options.script.is_file():
        parser.exit(2, f"profile_script.py: {options.script} is not a file\n")
    if re.search(r'[\x00-\x1f"\\\ud800-\udfff]', options.profile_dir):
        wanted = "must be UTF-8 without control characters, quotes and backslashes: PyTorch's traces do not escape them"
        parser.exit(2, f"profile_script.py: --profile-dir {wanted}, got {ascii(options.profile_dir)}\n")
    return options


def main(argv):
    """Run the script; return 1 if it left nothing to profile."""
    options = parse_arguments(argv)
    COPIES.update({descriptor: os.dup(descriptor) for descriptor in (1, 2)})
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    steps = StepProfiler(options)
    is_rank0 = os.environ.get("RANK", "0") == "0"
    if is_rank0:
        register_optimizer_step_pre_hook(steps.before_step)
        register_optimizer_step_post_hook(steps.after_step)
        if options.warmup_steps == 0:
            steps.start()
    sys.argv = [str(options.script), *options.arguments]
    sys.path[0] = str(options.script.resolve().parent)
    try:
        runpy.run_path(str(options.script), run_name="__main__")
    except SystemExit as end:
        if end.code not in (None, 0):
            raise
    finally:  # what was profiled of a script that ends early or with an error is kept
        if steps.profiler:
            steps.finish(is_early=True)
        if is_rank0 and not steps.trace:
            wanted = f"the profile begins after {options.warmup_steps} (--warmup-steps; 0 profiles from the start)"
            tell(f"the script made {steps.steps} optimizer steps: {wanted}", 2)
            steps.status = 1
    return steps.status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
