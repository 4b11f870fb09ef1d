"""Metrics files and runs of the training scripts, until they move to runs.py; re-exports command_line and tables."""

import contextlib
import json
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

from common.command_line import (  # noqa: F401
    CPU_SIZES,
    Failure,
    Parser,
    add_steps,
    add_time_limit,
    load_script,
    numbers,
    on_cpu,
    positive,
    progress,
    script_path,
    with_sizes,
)
from common.tables import emit, known, markdown_table, text_table  # noqa: F401

# Options and environment that two runs must share before their times may be compared.
SAME_OPTIONS = ("batch_size", "seq_len", "data", "use_amp", "tf32")
SAME_MACHINE = ("device", "device_type", "torch", "cuda", "hip")
WIDTH = 5.5  # inches of every picture


class TimeLimit:
    """So many seconds (None: any number) for runs whose length only the earlier ones tell."""

    def __init__(self, seconds: float | None):
        self.seconds, self.began, self.took = seconds, time.monotonic(), []

    def timed(self, work: Callable):
        """What work() returns; how long it took counts for room()."""
        start = time.monotonic()
        try:
            return work()
        finally:
            self.took.append(time.monotonic() - start)

    def room(self, runs: int) -> bool:
        """Whether so many further runs would end in time. The first is always let through."""
        if self.seconds is None or not self.took:
            return True
        needed = max(max(self.took), 1.25 * runs * sum(self.took) / len(self.took))
        return time.monotonic() - self.began + needed <= self.seconds


class OutOfMemory(Failure):
    """A training script that did not fit into the device's memory."""


def train(script: pathlib.Path, argv: list[str]) -> dict:
    """The metrics of one run of a training script in a process of its own.

    Raises OutOfMemory, or Failure with the script's own last words and status.
    """
    with tempfile.TemporaryDirectory() as folder:
        metrics = pathlib.Path(folder) / "metrics.json"
        command = [sys.executable, str(script), *argv, "--metrics-file", str(metrics)]
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode == 0:
            return json.loads(metrics.read_text())
    words = (result.stderr or result.stdout).strip().splitlines()[-1:] or ["it printed nothing"]
    if "out of memory" in words[0] or result.returncode == -9:
        raise OutOfMemory(1, f"{script.name}: out of memory")
    raise Failure(2 if result.returncode == 2 else 1, f"{script.name} failed: {words[0]}")


# ---------------------------------------------------------------- metrics files


def read_metrics(path: str | pathlib.Path) -> dict:
    """The content of a file that --metrics-file wrote; Failure with one sentence where it is none."""
    try:
        content = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise Failure(2, f"{path} cannot be read ({error.strerror}): write it with --metrics-file") from None
    except ValueError:
        raise Failure(2, f"{path} is cut off or damaged: it is no valid JSON") from None
    if not isinstance(content, dict) or not {"config", "options", "environment", "steps", "summary"} <= content.keys():
        raise Failure(2, f"{path} is no metrics file: write one with tiny_llama_v*.py --metrics-file")
    if not content["summary"]:
        raise Failure(2, f"{path} holds no measured step: its run failed before the first")
    return content


def differences(first: dict, second: dict) -> list[str]:
    """What two metrics do not share though their times could not be compared then: "name: one, other"."""
    pairs = [(key, first["environment"].get(key), second["environment"].get(key)) for key in SAME_MACHINE]
    pairs += [(key, first["options"].get(key), second["options"].get(key)) for key in SAME_OPTIONS]
    if first["options"].get("use_amp"):
        pairs.append(("amp_dtype", first["options"].get("amp_dtype"), second["options"].get("amp_dtype")))
    pairs += [(key, value, second["config"].get(key)) for key, value in first["config"].items()]
    return [f"{key}: {one}, {other}" for key, one, other in pairs if one != other]


@contextlib.contextmanager
def matplotlib_figure(path: pathlib.Path, height: float):
    """(figure, axes) on white paper, saved to path; Failure without matplotlib.

    The picture is as wide as a phone's screen in inches of its type, so that the type is readable there.
    """
    try:
        import matplotlib
    except ImportError:
        raise Failure(1, f"{path.name} needs matplotlib: pip install '.[plots]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(WIDTH, height), facecolor="white", layout="constrained")
    yield figure, axes
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, bbox_inches="tight", dpi=200, facecolor="white")
    pyplot.close(figure)


def legend_below(figure, handles: list, labels: list[str], columns: int, title: str | None = None) -> None:
    """A legend under everything else, where it hides nothing."""
    figure.legend(
        handles, labels, loc="upper center", bbox_to_anchor=(0.5, -0.01), ncols=columns, frameon=False, title=title
    )
