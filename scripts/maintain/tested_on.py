"""Write README's table of what was executed, only compiled, only run against stubs, or never run.

    python scripts/maintain/tested_on.py            compare the table in README.md with the records
    python scripts/maintain/tested_on.py --write    replace it

The rows come from scripts/recorded/*/suite.json, the targets of inspect_kernels.py, the stubs of tests/tools/stubs and
the sets of versions in scripts/common/constraints*.txt. Exit status: 0; 1 where the table differs; 2 for a bad option.
"""

import argparse
import json
import pathlib
import re
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from common.environment import ROCM_BUILDS, numbers

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
    "kernels.json": "each kernel alone",
    "report": "report",
    "stages": "debugging stages",
    "communication.json": "communication",
    "wrappers.txt": "wrappers",
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
    for path in sorted(recorded.glob("*/suite.json")):
        suite = json.loads(path.read_text())
        drivers = [re.search(r"\d+\.[\d.]+", session.get("driver") or "") for session in suite["sessions"]]
        driver = f"driver {drivers[-1][0]}" if drivers[-1] else "driver not recorded"
        for run in (run for run in suite["runs"] if run["status"] == "ok"):
            found = run["environment"]
            runtime = f"ROCm {found['hip']}" if found["hip"] else f"CUDA {found['cuda']}"
            versions = f"{driver}, PyTorch {found['torch']}, Triton {found['triton']}, {runtime}"
            group = groups.setdefault((found["device"], versions), {"dates": set(), "runs": [], "folders": set()})
            group["dates"].add(found["date"][:10])
            group["runs"].append(run["case"])
            group["folders"].add(path.parent)
    for (device, versions), group in sorted(groups.items(), key=lambda item: max(item[1]["dates"]), reverse=True):
        numbered = sorted({case["model"][1] for case in group["runs"] if re.match(r"v\d", case["model"])})
        counts = sorted({case["processes"] for case in group["runs"]})
        parts = [f"versions {together(numbered)} on {together(counts)} GPU{'s' if counts != [1] else ''}"]
        parts += [part for name, part in PARTS.items() if any((folder / name).exists() for folder in group["folders"])]
        yield device, versions, f"{', '.join(parts)}; last on {max(group['dates'])}"


def versions_of(name):
    """Return "PyTorch 2.7.1 with Triton 3.3.1" of a set of versions."""
    text = (REPOSITORY / "scripts" / "common" / name).read_text()
    least = {key: min(re.findall(rf"^{key}==([\d.]+)", text, re.MULTILINE), key=numbers) for key in ("torch", "triton")}
    return f"PyTorch {least['torch']} with Triton {least['triton']}"


def targets():
    """Return the names of the compiler targets of inspect_kernels.py, read as text: no import of PyTorch."""
    return re.findall(
        r'^    "(\w+)": Target\(', (REPOSITORY / "scripts" / "inspect_kernels.py").read_text(), re.MULTILINE
    )


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
