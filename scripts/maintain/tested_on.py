"""Write README's table of what was executed, compiled, run against stubs, or never run.

    python scripts/maintain/tested_on.py            compare the table in README.md with the records
    python scripts/maintain/tested_on.py --write    replace it

The rows come from the runs in scripts/recorded/, the targets of inspect_kernels.py, the stubs of tests/tools/stubs and
the sets of versions in scripts/common/constraints*.txt. Exit status: 0; 1 where the table differs; 2 for a bad option.
"""

import pathlib
import re
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from common.command_line import Parser
from common.environment import ROCM_BUILDS, numbers
from common.occupancy import TARGETS
from common.pages import TABLE, fill, write_or_check
from common.records import RECORDED, Record
from common.tables import markdown_table
from common.versions import REPOSITORY

README = REPOSITORY / "README.md"
PARTS = {
    "graph": "with and without a graph",
    "kernels": "each kernel alone",
    "ablation3": "ablation",
    "stages": "debugging stages",
    "memory": "memory over length",
    "ddp": "several GPUs with DDP and FSDP2",
    "tests.txt": "test suite",
}


def executed(recorded):
    """Return a row per record below the folder, newest first."""
    rows = []
    for path in [*recorded.glob("*/headline/suite.json"), *recorded.glob("contributed/*/headline/suite.json")]:
        folder, results = path.parents[1], Record(path.parents[1]).suite()
        found, runtime = results["record"], results["record"]["runtime"].replace("HIP", "ROCm")
        driver = f"driver {found['driver']}" if found["driver"] else "driver not recorded"
        packages = f"{driver}, PyTorch {found['packages']['torch']}, Triton {found['packages']['triton']}, {runtime}"
        versions = sorted({row["model"][1] for row in results["rows"] if re.match(r"v\d", row["model"])})
        parts = [f"versions {', '.join(versions)}", *(PARTS[name] for name in PARTS if (folder / name).exists())]
        rows.append((found["date"][:10], found["device"], packages, ", ".join(parts)))
    return [("executed", *row, f"{what}; last on {date}") for date, *row, what in sorted(rows, reverse=True)]


def versions_of(name):
    """Return "PyTorch 2.7.1 with Triton 3.3.1" of a set of versions."""
    text = (REPOSITORY / "scripts" / "common" / name).read_text()
    least = {key: min(re.findall(rf"^{key}==([\d.]+)", text, re.MULTILINE), key=numbers) for key in ("torch", "triton")}
    return f"PyTorch {least['torch']} with Triton {least['triton']}"


def table(recorded):
    """Return the table in Markdown."""
    rows = executed(recorded)
    devices = " ".join(device for _, device, _, _ in rows)
    sets = f"{versions_of('constraints-oldest.txt')} to {versions_of('constraints.txt')}"
    stubs = sorted((path.name[5:] for path in (REPOSITORY / "tests" / "tools" / "stubs").glob("rocm-*")), key=numbers)
    releases = ", ".join(f"{major}.{minor}" for major, minor in ROCM_BUILDS)
    amd = "" if re.search("AMD|Radeon", devices) else "any AMD GPU, "
    rows += [
        ("executed", "CPU, Linux on x86-64", sets, "test suite; Triton's kernels in its interpreter"),
        ("compiled", ", ".join(TARGETS), "", "version 3's kernels: registers, LDS, spills"),
        ("run against stubs", f"profilers of ROCm {', '.join(stubs)}", "", "wrappers: command lines, result files"),
        ("run against stubs", f"machines with ROCm {releases}", "", "quickstart's choice of a PyTorch build"),
        ("never", f"{amd}aarch64, macOS, Windows (in WSL it is Linux)", "", "anything"),
    ]
    return markdown_table(["", "platform", "versions", "what"], rows, left=4)


def main(argv=None):
    parser = Parser("tested_on.py", __doc__, with_json=False)
    parser.add_argument("--write", action="store_true", help="replace the table in README.md")
    options = parser.parse_args(argv)
    text = README.read_text()
    if "tested_on" not in [match["name"] for match in TABLE.finditer(text)]:
        parser.error("README.md needs one line <!-- tested_on:begin --> and, further down, one line tested_on:end")
    filled = fill(text, {"tested_on": table(RECORDED)})
    return write_or_check({README: filled}, not options.write, "python scripts/maintain/tested_on.py --write")


if __name__ == "__main__":
    sys.exit(main())
