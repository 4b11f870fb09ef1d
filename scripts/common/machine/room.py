"""Parts of check_room.sh: what machine this is, the table, a graph's losses, a text without names, and the report.

python room.py facts              GPU, driver, versions
python room.py table              the table of the lines "a|b|c" on standard input
python room.py graph A.json B.json    compare the losses of a captured run and an eager one
python room.py tests A.xml        the kernel tests that ran and that Triton's interpreter can run, as pytest's arguments
python room.py report LOGS SECONDS    all that a record of this machine needs, as JSON: of the lines "a|b|c" on standard
                                  input and the folder of the logs
python room.py scrub FOLDER       copy standard input without user name, host name and the paths of FOLDER and home
"""

import getpass
import json
import os
import pathlib
import platform
import re
import sys
import xml.etree.ElementTree

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from common.command_line import Failure, printable, run_tool
from common.files import errors_of, read_object
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


def lines_of(stream):
    return [line.rstrip("\n").split("|") for line in stream]


def table():
    """Print the lines of standard input, split at |, as a table."""
    header, *rows = lines_of(sys.stdin)
    print(text_table(header, rows, left=4))


# ---------------------------------------------------------------- the report

FORMAT = 1  # of the report
OF_A_RUN = """step_ms warmup_s tokens_per_second peak_memory_mb precision graph first_loss final_loss parameters
    parameters_trained""".split()
PATHS = ("data", "metrics_file", "checkpoint_dir", "profile_dir")  # options of a run that may show a name
TAIL = 40  # lines of the log of a part that is not ok


def kernel_tests(path):
    """Return {test: (whether it passed, {result: relative error})} of pytest's junit file; empty without the file."""
    if not path.exists():
        return {}
    found = {}
    with errors_of(path):
        try:
            tests = xml.etree.ElementTree.fromstring(path.read_text())
        except xml.etree.ElementTree.ParseError as error:
            raise ValueError(error) from None
        for test in tests.iter("testcase"):
            passed = test.find("failure") is None and test.find("error") is None
            errors = {each.get("name"): float(each.get("value")) for each in test.iter("property")}
            if test.find("skipped") is None:
                found[test.get("name")] = passed, errors
    return found


def tests(path):
    """Print the tests of a junit file as pytest's arguments, a line each, but those in bfloat16.

    Triton's interpreter multiplies no bfloat16.
    """
    for name in kernel_tests(pathlib.Path(path)):
        if "bfloat16" not in name:
            print(f"tests/kernels/test_kernels.py::{name}")


def compared_kernels(logs):
    """Return for each kernel test whether it passed here, and its errors here and in Triton's interpreter."""
    here = kernel_tests(logs / "kernels.xml")
    interpreted = kernel_tests(logs / "interpreted.xml")
    rows = []
    for name, (passed, errors) in here.items():
        rows.append({"test": name, "passed": passed, "errors": errors})
        if name in interpreted:
            rows[-1]["interpreter"] = {"passed": interpreted[name][0], "errors": interpreted[name][1]}
    return rows


def steps_of(path):
    """Return what a training run took and computed, from its metrics file."""
    content = read_metrics(path)
    with errors_of(path):
        summary = content["summary"]
        options = {key: value for key, value in content["options"].items() if key not in PATHS}
        row = {"version": content["version"], "config": content["config"], "options": options}
        return row | {key: summary[key] for key in OF_A_RUN}


def report(logs, seconds):
    """Print the report of a machine as JSON, its letters as they are: scrub() looks for names in it."""
    logs = pathlib.Path(logs)
    header, *rows = lines_of(sys.stdin)
    parts = [dict(zip(header, row, strict=True)) for row in rows]
    for part in parts:
        log = logs / f"{re.sub('[^0-9A-Za-z]', '_', part['part'])}.txt"
        if part["outcome"] not in ("ok", "not run") and log.exists():
            part["last lines"] = [printable(line) for line in log.read_text(errors="replace").splitlines()[-TAIL:]]
    machine = {key: value for key, value in describe([]).items() if key not in ("command", "host")}
    machine |= {"text": (logs / "facts.txt").read_text().splitlines()}
    content = {"format": FORMAT, "machine": machine, "seconds": int(seconds), "parts": parts}
    content |= {
        "kernels": compared_kernels(logs),
        "steps": [steps_of(path) for path in sorted(logs.glob("steps_*.json"))],
    }
    benchmark = logs / "benchmark.json"
    if benchmark.exists():
        content["operations"] = read_object(benchmark, "result of benchmark_kernels.py")["operations"]
    print(json.dumps(content, indent=1, ensure_ascii=False))


# ---------------------------------------------------------------- the graph


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


def quoted_or_not(path):
    """Return a pattern of a path, as it is or as a shell quotes it with backslashes, which JSON doubles."""
    return "".join(letter if letter.isalnum() else rf"\\*{re.escape(letter)}" for letter in path)


def scrub(repository, logs):
    """Copy standard input without the names of the user and the host, and without paths that show them."""
    text = sys.stdin.read()
    for path, name in ((logs, "LOGS"), (repository, "REPOSITORY"), (str(pathlib.Path.home()), "HOME")):
        text = re.sub(quoted_or_not(path), name, text)
    names = {"HOST": platform.node(), "USER": os.environ.get("USER") or getpass.getuser()}
    names["HOST "] = platform.node().split(".")[0]
    for word, name in names.items():
        if name and name != "root":
            text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", word.strip(), text)
    print(text, end="")


def main(argv):
    """Run one part; return the exit status."""
    parts = {function.__name__: function for function in (facts, table, graph, tests, report, scrub)}
    return run_tool("check_room.sh", lambda: parts[argv[0]](*argv[1:]) or 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
