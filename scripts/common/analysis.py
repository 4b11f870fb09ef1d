"""What the analysis tools share: their command lines, tables, metrics files and runs of the training scripts."""

import argparse
import contextlib
import importlib.util
import json
import os
import pathlib
import sys
from collections.abc import Iterable

from common.command_line import Failure
from common.runs import OutOfMemory, TimeLimit, differences, read_metrics, train  # noqa: F401
from common.versions import SCRIPTS, load_version

# Sizes for a machine without a GPU, where version 3's kernels run in Triton's interpreter.
CPU_SIZES = "--hidden-dim 64 --num-layers 2 --num-heads 4 --seq-len 32 --batch-size 2 --vocab-size 256".split()
WIDTH = 5.5  # inches of every picture


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one sentence, with an example and the option --json that all studies have."""

    def __init__(self, program: str, description: str, example: str, with_json: bool = True):
        super().__init__(
            prog=program,
            description=description,
            epilog=f"example: python {program} {example}",
            allow_abbrev=False,
        )
        if with_json:
            self.add_argument("--json", metavar="FILE", help="write the figures as JSON (- prints it, not the text)")

    def error(self, message: str):
        self.exit(2, f"{self.prog}: error: {message}\n")


def progress(sentence: str) -> None:
    print(sentence, file=sys.stderr, flush=True)


def emit(content: dict, text: str, target: str | None) -> None:
    """Print the text, and write the content as JSON where --json asked for it."""
    if target == "-":
        print(json.dumps(content, indent=1))
        return
    if target:
        pathlib.Path(target).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    print(text)


def text_table(header: list[str], rows: Iterable[Iterable], left: int = 1) -> str:
    """Aligned lines; the first columns, as many as left says, start at the left and the others end at the right."""
    lines = [header, *([str(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(c.ljust(w) if i < left else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True)))
        for line in lines
    )


def markdown_table(header: list[str], rows: Iterable[Iterable], left: int = 1) -> str:
    marks = ["---"] * left + ["---:"] * (len(header) - left)
    cells = [header, marks, *([str(cell).replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in cells)


def known(value, pattern: str) -> str:
    """The value in that format, or a dash where it is not known."""
    return "-" if value is None else format(value, pattern)


def positive(text: str) -> int:
    """A type for argparse: a whole number of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {value}")
    return value


def numbers(text: str) -> list[int]:
    """A type for argparse: positive whole numbers separated by commas."""
    return [positive(part) for part in text.split(",")]


# ---------------------------------------------------------------- training scripts


def script_path(name: str | pathlib.Path, option: str) -> pathlib.Path:
    """The training script that a file or a version's folder means; Failure where there is none."""
    path = pathlib.Path(name)
    if path.is_dir():
        found = sorted(path.glob("tiny_llama_v*.py"))
        if len(found) != 1:
            raise Failure(2, f"{option} {path} holds {len(found)} files tiny_llama_v*.py: name the script itself")
        path = found[0]
    if not path.is_file():
        raise Failure(2, f"{option} {path} does not exist: name a tiny_llama_v*.py")
    return path


def load_script(path: pathlib.Path, option: str):
    """The module of a training script anywhere, one of the four or a copy with changes."""
    path = path.resolve()
    for version, script in SCRIPTS.items():
        if path == script:
            return load_version(version)
    name = f"{path.stem}_{abs(hash(str(path)))}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None:
        raise Failure(2, f"{option} {path} is no Python script")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        raise Failure(2, f"{option} {path} is no valid Python: {error.msg} in line {error.lineno}") from None
    if not hasattr(module, "Trainer") or not hasattr(module, "canonical_views"):
        raise Failure(2, f"{option} {path} is not a training script of this workshop: it has no Trainer")
    return module


def on_cpu(argv: list[str]) -> bool:
    """Whether these options train on the CPU; if so, version 3's kernels are to be interpreted."""
    import torch

    chosen = [word for flag, word in zip(argv, argv[1:], strict=False) if flag == "--device"]
    cpu = chosen[-1:] == ["cpu"] or "--device=cpu" in argv or not torch.cuda.is_available()
    if cpu:
        os.environ["TRITON_INTERPRET"] = "1"  # before version 3 imports Triton
    return cpu


def with_sizes(argv: list[str]) -> list[str]:
    """The options, with a very small model before them on a CPU unless they choose sizes themselves."""
    if on_cpu(argv) and not any(word.startswith(("--preset", "--hidden-dim", "--num-layers")) for word in argv):
        return [*CPU_SIZES, *argv]
    return argv


def add_steps(parser: argparse.ArgumentParser, option: str = "--steps") -> None:
    parser.add_argument(option, type=positive, metavar="N", help="steps in it, where it does not say so itself")


def add_time_limit(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--time-limit", type=float, metavar="S", help="start nothing that would not end in so many seconds"
    )


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
