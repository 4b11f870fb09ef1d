"""Parts of check_room.sh: what machine this is, the table, a graph's losses, and a text without names.

python room.py facts              GPU, driver, versions
python room.py table              the table of the lines "a|b|c" on standard input
python room.py graph A.json B.json    compare the losses of a captured run and an eager one
python room.py scrub FOLDER       copy standard input without user name, host name and the paths of FOLDER and home
"""

import getpass
import os
import pathlib
import platform
import re
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from common.command_line import Failure, run_tool
from common.files import errors_of
from common.machine.description import describe
from common.machine.environment import rocm_release
from common.measuring.accuracy import loss_bound
from common.measuring.runs import read_metrics
from common.ratios import check_times
from common.tables import text_table
from common.versions import load_version


def facts():
    """Print what machine this is, without its name."""
    import torch

    record = describe([])
    packages = [f"{name} {version}" for name, version in record["packages"].items() if version]
    rows = {
        "date": record["date"][:10],
        "commit": record["commit"],
        "GPU": record["device"] if record["device_type"] == "cuda" else "none",
        "driver": record["driver"],
    }
    if torch.cuda.is_available():
        rows["GPUs"] = torch.cuda.device_count()
        rows["arch"] = load_version(3).gpu_architecture(torch.device("cuda"))
    if torch.version.hip or rocm_release():
        rows["ROCm"] = rocm_release() or "unknown"
    rows |= {"runtime": record["runtime"], "packages": ", ".join(packages), "Python": record["python"]}
    rows |= {"system": platform.platform(), "CPU": f"{record['cpu']}, {record['cores']} cores"}
    for name, value in rows.items():
        print(f"{name:11} {'unknown' if value is None else value}")


def table():
    """Print the lines of standard input, split at |, as a table."""
    header, *rows = [line.rstrip("\n").split("|") for line in sys.stdin]
    print(text_table(header, rows, left=4))


def read_losses(path):
    """Return a run's losses, the bound for their error, and whether its step was captured in a graph."""
    content = read_metrics(path)
    with errors_of(path):
        losses = [step["loss"] for step in content["steps"]]
        check_times(losses)
        return losses, loss_bound(content["options"]), content["summary"]["graph"]["captured"]


def graph(captured, eager):
    """Compare the losses of two runs; raise Failure if the first captured no graph or the losses differ."""
    losses, _, is_captured = read_losses(captured)
    if not is_captured:
        raise Failure(1, "the step was not captured: it ran eagerly")
    eager_losses, bound, _ = read_losses(eager)
    pairs = list(zip(losses, eager_losses, strict=True))
    error = max(abs(one - other) / abs(other) for one, other in pairs)
    if not error <= bound:  # NaN too
        raise Failure(1, f"the graph's losses differ from the eager ones by {error:.1e}: {pairs}")
    print(f"losses of the graph and of eager steps agree to {error:.1e}")


def scrub(folder):
    """Copy standard input without the names of the user and the host, and without paths that show them."""
    text = sys.stdin.read().replace(folder, "REPOSITORY").replace(str(pathlib.Path.home()), "HOME")
    names = {"HOST": platform.node(), "USER": os.environ.get("USER") or getpass.getuser()}
    names["HOST "] = platform.node().split(".")[0]
    for word, name in names.items():
        if name and name != "root":
            text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", word.strip(), text)
    print(text, end="")


def main(argv):
    """Run one part; return the exit status."""
    parts = {"facts": facts, "table": table, "graph": graph, "scrub": scrub}
    return run_tool("check_room.sh", lambda: parts[argv[0]](*argv[1:]) or 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
