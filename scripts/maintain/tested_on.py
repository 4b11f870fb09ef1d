"""Write README's table of what was executed, only compiled, only run against stubs, or never run.

    python scripts/maintain/tested_on.py            compare the table in README.md with the records
    python scripts/maintain/tested_on.py --write    replace it

The rows come from the runs in scripts/recorded/, the targets of inspect_kernels.py, the stubs of tests/tools/stubs and
the sets of versions in scripts/common/constraints*.txt. Exit status: 0; 1 where the table differs; 2 for a bad option.
"""

import argparse
import pathlib
import re
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from common.environment import ROCM_BUILDS, numbers
from common.occupancy import TARGETS
from common.records import Record

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
README = REPOSITORY / "README.md"
BEGIN, END = "<!-- tested_on:begin -->", "<!-- tested_on:end -->"
# A recorded device was executed, so its compiler target is not "compiled only".
TARGET_OF = {
    "sm_80": r"A100|A800",
    "sm_90": r"H100|H200|H20\b|GH200",
    "sm_100": r"B200|GB200",
    "gfx90a": r"MI2[15]0",
    "gfx942": r"MI3[02]\d",
    "gfx950": r"MI35\d",
    "gfx1100": r"RX 7900|W7[89]00",
}
PARTS = {
    "graph": "with and without a graph",
    "kernels": "each kernel alone",
    "kernels.json": "each kernel alone",
    "ablation3": "ablation",
    "stages": "debugging stages",
    "memory": "memory over length",
    "ddp": "DDP on several GPUs",
    "fsdp": "FSDP2 on several GPUs",
    "tests.txt": "test suite",
}
OTHER_PLATFORMS = ["aarch64", "macOS", "Windows (in WSL it is Linux)"]


def together(words):
    """Return "a, b and c"."""
    words = [str(word) for word in words]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def executed(recorded):
    """Yield (device, versions, parts) for each device and set of versions below the folder, newest first."""
    groups = {}
    for folder in sorted({path.parent for name in ("suite.json", "headline") for path in recorded.glob(f"*/{name}")}):
        results = Record(folder).suite()
        found, runtime = results["record"], results["record"]["runtime"].replace("HIP", "ROCm")
        driver = f"driver {found['driver']}" if found["driver"] else "driver not recorded"
        versions = f"{driver}, PyTorch {found['packages']['torch']}, Triton {found['packages']['triton']}, {runtime}"
        group = groups.setdefault((found["device"], versions), {"dates": set(), "models": set(), "parts": set()})
        group["dates"].add(found["date"][:10])
        group["models"] |= {row["model"] for row in results["rows"]}
        group["parts"] |= {part for name, part in PARTS.items() if (folder / name).exists()}
    for (device, versions), group in sorted(groups.items(), key=lambda item: max(item[1]["dates"]), reverse=True):
        numbered = sorted({model[1] for model in group["models"] if re.match(r"v\d", model)})
        parts = [part for part in dict.fromkeys(PARTS.values()) if part in group["parts"]]
        yield (
            device,
            versions,
            f"{', '.join([f'versions {together(numbered)}', *parts])}; last on {max(group['dates'])}",
        )


def versions_of(name):
    """Return "PyTorch 2.7.1 with Triton 3.3.1" of a set of versions."""
    text = (REPOSITORY / "scripts" / "common" / name).read_text()
    least = {key: min(re.findall(rf"^{key}==([\d.]+)", text, re.MULTILINE), key=numbers) for key in ("torch", "triton")}
    return f"PyTorch {least['torch']} with Triton {least['triton']}"


def targets():
    """Return the names of the compiler targets of inspect_kernels.py."""
    return list(TARGETS)


def table(recorded):
    """Return the lines of the table."""
    rows = [("executed", *row) for row in executed(recorded)]
    devices = [device for _, device, _, _ in rows]
    sets = f"{versions_of('constraints-oldest.txt')} to {versions_of('constraints.txt')}"
    rows.append(("executed", "CPU, Linux on x86-64", sets, "test suite; Triton's kernels in its interpreter"))
    ran = [target for target, pattern in TARGET_OF.items() if any(re.search(pattern, device) for device in devices)]
    compiled = [target for target in targets() if target not in ran]
    rows.append(("compiled only", together(compiled), "", "version 3's kernels: registers, LDS, spills"))
    stubs = sorted((path.name[5:] for path in (REPOSITORY / "tests" / "tools" / "stubs").glob("rocm-*")), key=numbers)
    rows.append(
        ("run against stubs", f"profilers of ROCm {together(stubs)}", "", "wrappers: command lines, result files")
    )
    releases = together(f"{major}.{minor}" for major, minor in ROCM_BUILDS)
    rows.append(("run against stubs", f"machines with ROCm {releases}", "", "quickstart's choice of a PyTorch build"))
    amd = [] if any("AMD" in device or "Radeon" in device for device in devices) else ["any AMD GPU"]
    rows.append(("never", together([*amd, *OTHER_PLATFORMS]), "", "anything"))
    lines = ["|  | platform | versions | what |", "| --- | --- | --- | --- |"]
    return lines + [f"| {' | '.join(row)} |" for row in rows]


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="replace the table in README.md")
    options = parser.parse_args(argv)
    text = README.read_text()
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        parser.error(f"README.md needs one line {BEGIN} and, further down, one line {END}")
    wanted = "\n".join([text.split(BEGIN)[0] + BEGIN, *table(REPOSITORY / "scripts" / "recorded"), END])
    wanted += text.split(END)[1]
    if options.write:
        README.write_text(wanted)
    elif wanted != text:
        print(
            "README.md's table differs from the records: python scripts/maintain/tested_on.py --write", file=sys.stderr
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
