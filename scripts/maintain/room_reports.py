"""Turn the reports that check_room.sh --report writes into rows of TESTED_ON.md.

    python scripts/maintain/room_reports.py room.json         # what it says, and its row
    python scripts/maintain/room_reports.py room.json --add   # keep it in scripts/recorded/rooms for ladder.py --write

Exit status: 0; 2 for a file that is no such report.
"""

import json
import pathlib
import re
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from common.command_line import Failure, Parser
from common.files import errors_of, read_object
from common.machine.room import FORMAT
from common.tables import known, text_table, write_whole
from common.versions import REPOSITORY

ROOMS = REPOSITORY / "scripts" / "recorded" / "rooms"


def read_report(path):
    """Return the content of a report; Failure for a file that is none."""
    with errors_of(path):
        content = read_object(path, "report of check_room.sh")
        if content.get("format") != FORMAT:
            raise Failure(2, "isn't a report: give the file that check_room.sh --report wrote")
        row_of(content)
        text_of(content)
    return content


def row_of(content):
    """Return the date and the row of TESTED_ON.md: where it ran, with which versions, and what."""
    machine = content["machine"]
    packages = machine["packages"]
    device = machine["device"] if machine["device_type"] == "cuda" else f"CPU, {machine['device']}"
    driver = f"driver {machine['driver']}, " if machine["driver"] else ""
    runtime = machine["runtime"].replace("HIP", "ROCm")
    versions = f"{driver}PyTorch {packages['torch']}, Triton {packages['triton']}, {runtime}"
    ran = [part for part in content["parts"] if part["outcome"] != "not run"]
    bad = [part["part"] for part in ran if part["outcome"] != "ok"]
    what = f"check_room.sh: {len(ran) - len(bad)} of {len(ran)} parts ok"
    if bad:
        what += f", not {', '.join(bad)}"
    date = machine["date"][:10]
    return date, ("checked by its owner", device, versions, f"{what}; on {date}")


def largest_errors(content):
    """Return [operation and dtype, tests, failed ones, largest error here, and in the interpreter], a row for each."""
    tests = {}
    for test in content["kernels"]:
        if name := re.search(r"\[(\w+)-.*-torch\.(\w+)\]$", test["test"]):
            tests.setdefault(f"{name[1]}, {name[2]}", []).append(test)
    rows = []
    for name, group in tests.items():
        here = [error for test in group for error in test["errors"].values()]
        interpreted = [error for test in group for error in test.get("interpreter", {}).get("errors", {}).values()]
        largest = [known(max(errors, default=None), ".1e") for errors in (here, interpreted)]
        rows.append([name, len(group), sum(not test["passed"] for test in group), *largest])
    return rows


def text_of(content):
    """Return the report as text: the machine, its parts, the kernels' errors, the versions' steps."""
    parts = [[part[key] for key in ("part", "outcome", "seconds", "last line")] for part in content["parts"]]
    steps = []
    for row in content["steps"]:
        trained = row["parameters_trained"] / row["parameters"]
        captured = "graph" if row["graph"]["captured"] else "eager"
        losses = f"{row['first_loss']:.4f} -> {row['final_loss']:.4f}"
        steps.append([f"V{row['version']}", captured, f"{row['step_ms']['median']:.3f}", losses, f"{trained:.0%}"])
    tables = [
        text_table(["part", "outcome", "seconds", "last line"], parts, left=4),
        text_table(
            ["kernel, dtype", "tests", "failed", "largest error here", "interpreter's"], largest_errors(content)
        ),
        text_table(["version", "step", "median ms", "loss", "trained"], steps, left=2),
    ]
    return "\n\n".join(["\n".join(content["machine"]["text"]), *tables])


def rows_of_rooms(folder=ROOMS):
    """Return the rows of all reports that are kept, the newest first."""
    found = sorted((row_of(read_report(path)) for path in folder.glob("*.json")), reverse=True)
    return [row for _, row in found]


def keep(content):
    """Write a report into the folder of rooms, and return its path; Failure if one of its name is there."""
    date, (_, device, *_) = row_of(content)
    name = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
    target = ROOMS / f"{name}_{date}.json"
    if target.exists():
        raise Failure(2, f"{target.relative_to(REPOSITORY)} exists already: remove it first to take this one")
    ROOMS.mkdir(exist_ok=True)
    write_whole(target, json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    return target


def work(options):
    content = read_report(pathlib.Path(options.report))
    _, row = row_of(content)
    print(text_of(content), " | ".join(row), sep="\n\n")
    if options.add:
        print(f"kept as {keep(content).relative_to(REPOSITORY)}: now run scripts/maintain/ladder.py --write")


def main(argv=None):
    parser = Parser("room_reports.py", __doc__, with_json=False)
    parser.add_argument("report", metavar="FILE", help="what check_room.sh --report wrote")
    parser.add_argument("--add", action="store_true", help="keep it in scripts/recorded/rooms")
    return parser.run(work, argv)


if __name__ == "__main__":
    sys.exit(main())
