"""Execute all launches of somebody's script or tests, and keep a row per kernel for the table at the end."""

import contextlib
import dataclasses
from collections import Counter
from unittest import mock

import torch
from triton import CompilationError
from triton.runtime import driver
from triton.runtime.autotuner import Autotuner
from triton.runtime.errors import OutOfResources

from common.command_line import Pace, progress
from common.tables import text_table

from . import cuda_on_cpu
from .assembly import Fault, UnsupportedError
from .banks import add_counts
from .launch import (
    check_size,
    driver_of,
    execute_launch,
    flat_arguments,
    launched_with,
    storage_extent,
    tables_of_addresses,
    tensor_of,
)
from .second_run import SecondRun

MOST_LINES = 12  # of a table of accesses
# What the counts of Row.banks and Row.lines are called
ACCESSES = {
    "banks": ("LDS bank conflicts", "times", "cycles", "without conflicts"),
    "lines": ("uncoalesced accesses", "times", "cache lines", "fewest possible"),
}
DOES_NOT_FIT = (Fault, CompilationError, OutOfResources)


def bench_again(tuner, key, configurations, bench):
    """Stand for Autotuner.check_disk_cache: no earlier run, of a GPU perhaps, chooses what is executed here."""
    bench()
    return False


HEADER = ("kernel", "launches", "configurations", "instructions", "matrix cycles", "differs", "refused or wrong")


@dataclasses.dataclass
class Row:
    """All launches of one kernel."""

    kernel: str
    launches: int = 0
    configurations: set = dataclasses.field(default_factory=set)  # Triton's names for what it compiled
    instructions: Counter = dataclasses.field(default_factory=Counter)
    matrix_cycles: int = 0
    banks: dict = dataclasses.field(default_factory=dict)  # as in banks.BankCounts.cycles
    lines: dict = dataclasses.field(default_factory=dict)  # as in lines.LineCounts.lines
    comparison: object = None  # the worst second_run.Comparison
    unsupported: list = dataclasses.field(default_factory=list)
    faults: list = dataclasses.field(default_factory=list)

    def add(self, launch):
        self.launches += 1
        self.configurations.add(launch.hash)
        self.instructions.update(launch.totals.instructions)
        self.matrix_cycles += launch.totals.matrix_cycles
        for name in ACCESSES:
            for instruction, counts in getattr(launch.totals, name).items():
                add_counts(getattr(self, name), instruction, counts)

    def add_comparison(self, found):
        """Keep what is worst: a difference that rounding does not explain, no comparison, the largest difference."""

        def badness(comparison):
            return (not comparison.explained, bool(comparison.reason), comparison.difference)

        if self.comparison is None or badness(found) > badness(self.comparison):
            self.comparison = found

    def cells(self):
        """Return the row of the table; sentences() explains it."""
        differs = "-"
        if self.comparison:
            differs = f"{self.comparison.difference:.1e}".replace("0.0e+00", "no")
            if self.comparison.reason:
                differs = "unknown"
        problems = []
        if self.unsupported:
            problems.append("refused")
        if self.faults:
            problems.append("wrong")
        return (
            self.kernel,
            f"{self.launches:,}",
            str(len(self.configurations)),
            f"{sum(self.instructions.values()):,}",
            f"{self.matrix_cycles:,}" if self.matrix_cycles else "-",
            differs,
            ", ".join(problems) or "-",
        )

    def sentences(self):
        """Yield what the table has no room for."""
        if self.comparison and (self.comparison.reason or not self.comparison.explained):
            start = "" if self.comparison.reason else "differs "
            yield f"{self.kernel}: {start}{self.comparison}"
        for sentence in self.unsupported:
            yield f"refused: {sentence}"
        for sentence in self.faults:
            yield f"wrong: {sentence}"


def named_tensors(compiled, values):
    """Return {name: tensor} of a launch's arguments, and of what tables of addresses among them point to."""
    named = {}
    for (name, kind), value in zip(compiled.src.signature.items(), values, strict=True):
        tensors = [tensor_of(v) for one_kind, v in flat_arguments(kind, value) if one_kind.startswith("*")]
        named |= {name if len(tensors) == 1 else f"{name}[{i}]": tensor for i, tensor in enumerate(tensors)}
    tables = tables_of_addresses(named.values())
    named |= {f"address {i}": tensor for i, tensor in enumerate(tables.values())}
    return {name: tensor for name, tensor in named.items() if tensor.numel()}


class Session:
    """Execute launches on a target, as the options ask."""

    def __init__(self, target, configurations=1, compare=False, kernel="", limit=None, order=1):
        self.target = target
        self.configurations = configurations
        self.compare = compare
        self.kernel = kernel
        self.limit = limit
        self.order = order
        self.rows = {}
        self.compiles_only = False
        self.pace = Pace()

    def row(self, name):
        return self.rows.setdefault(name, Row(name))

    def progress(self, name, done, of, instructions):
        """Print how far a launch is, now and then."""
        if self.pace.is_due():
            progress(f"execute_on_amd: {name}: {done} of {of} workgroups, {instructions:,} instructions")

    def execute(self, compiled, grid, values):
        """Execute one launch; a Fault goes to the script and into the table."""
        name = compiled.src.fn.__name__
        if self.compiles_only:
            check_size(self.target, name, compiled.metadata)
            return
        self.pace.begin()
        second = None
        try:
            with torch._C.DisableTorchFunction():
                if self.compare and self.kernel in name:
                    second = SecondRun(self.target, compiled, grid, values, named_tensors(compiled, values))
                launch = execute_launch(
                    self.target, compiled, grid, values, self.order, 0, self.progress, self.limit, storage_extent
                )
                self.row(name).add(launch)
                if second:
                    self.row(name).add_comparison(second.compare())
        except UnsupportedError as error:
            self.note(self.row(name).unsupported, error)
            raise
        except Fault as fault:
            self.note(self.row(name).faults, fault)
            raise
        finally:
            if second:
                second.end()

    def note(self, sentences, error):
        sentence = str(error).removeprefix(f"{self.target} ")
        if sentence not in sentences:
            sentences.append(sentence)

    def time_of_configuration(self, tuner, *args, config, **given):
        """Stand for Autotuner._bench: return the times of a configuration, which are infinite if it is not to be used.

        Without a number each is executed. With a number N, the first N that the target can launch are only compiled,
        and the last of them has the least time.
        """
        none = [float("inf")] * 3
        of_this_launch = getattr(tuner, "fitting_for", None) is tuner.nargs
        fitting = tuner.fitting if of_this_launch else 0
        if fitting == self.configurations:
            return none
        self.compiles_only = self.configurations is not None
        try:
            # Triton itself returns infinite times where a static_assert fails.
            fits = self.bench(tuner, *args, config=config, **given) != none
        except DOES_NOT_FIT:
            fits = False
        finally:
            self.compiles_only = False
        if not fits:
            return none
        tuner.fitting_for, tuner.fitting = tuner.nargs, fitting + 1
        return [1.0 / tuner.fitting if self.configurations else 1.0] * 3

    @contextlib.contextmanager
    def running(self):
        """Execute what is launched inside."""
        stub = driver_of(self.target)
        stub.get_device_interface = lambda: torch.cuda
        stub.get_benchmarker = lambda: cuda_on_cpu.run_once
        stub.get_empty_cache_for_benchmark = lambda: torch.empty(1)
        stub.clear_cache = lambda cache: None
        self.bench = Autotuner._bench
        with (
            launched_with(self.target, self.execute),
            mock.patch.object(driver, "_active", stub),
            mock.patch.object(Autotuner, "_bench", lambda tuner, *a, **k: self.time_of_configuration(tuner, *a, **k)),
            mock.patch.object(Autotuner, "check_disk_cache", bench_again),
            cuda_on_cpu.cuda_on_cpu(self.target),
        ):
            yield

    def failed(self):
        """Tell whether a kernel was refused, did something wrong, or differs by more than rounding explains."""
        return any(
            row.unsupported or row.faults or (row.comparison and not row.comparison.explained)
            for row in self.rows.values()
        )

    def chosen_rows(self):
        """Return the rows of the kernels that were asked for, and of all that were refused or did something wrong."""
        return [row for name, row in self.rows.items() if self.kernel in name or row.unsupported or row.faults]

    def table(self):
        """Return the table of kernels, and sentences about some of them."""
        rows = self.chosen_rows()
        sentences = [sentence for row in rows for sentence in row.sentences()]
        return "\n".join([text_table(HEADER, [row.cells() for row in rows]), *sentences])

    def access_rows(self, name):
        """Return {(kernel, source line, instruction's name): [times executed, count, the least possible]}.

        name: of the counts, in ACCESSES.
        """
        found = {}
        for row in self.chosen_rows():
            for (place, text), counts in getattr(row, name).items():
                add_counts(found, (row.kernel, place, text.split()[0]), counts)
        return found

    def access_table(self, name):
        """Return a line per source line whose accesses take more than the least possible, the worst ones first."""
        rows = [(*key, *counts) for key, counts in self.access_rows(name).items() if counts[1] > counts[2]]
        rows.sort(key=lambda row: row[5] - row[4])
        if not rows:
            return ""
        lines = [(*row[:3], f"{row[3]:,}", f"{row[4]:,}", f"{row[5]:,}") for row in rows[:MOST_LINES]]
        left_out = f"\n{len(rows) - MOST_LINES} more source lines lose less" if len(rows) > MOST_LINES else ""
        return text_table(("kernel", "line", *ACCESSES[name]), lines, left=3) + left_out

    def report(self):
        """Return the content for --json."""
        return [
            {
                "kernel": row.kernel,
                "launches": row.launches,
                "configurations": len(row.configurations),
                "instructions": dict(row.instructions),
                "matrix_cycles": row.matrix_cycles,
                "differs": str(row.comparison) if row.comparison else None,
                "unsupported": row.unsupported,
                "faults": row.faults,
                "lds": [
                    {"line": place, "instruction": name, "times": times, "cycles": cycles, "without_conflicts": least}
                    for (kernel, place, name), (times, cycles, least) in self.access_rows("banks").items()
                    if kernel == row.kernel
                ],
                "memory": [
                    {"line": place, "instruction": name, "times": times, "cache_lines": lines, "fewest": fewest}
                    for (kernel, place, name), (times, lines, fewest) in self.access_rows("lines").items()
                    if kernel == row.kernel
                ],
            }
            for row in self.chosen_rows()
        ]
