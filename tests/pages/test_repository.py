"""The repository as a visitor meets it: the licence, what was tested where, the workflow, and how to contribute."""

import ast
import importlib.metadata
import json
import re

import pytest
import yaml
from packaging.requirements import Requirement

import check_training
from common.machine import description, environment
from common.measuring.suite_results import PHASES, Case, write_results
from common.tables import emit
from common.versions import REPOSITORY, SCRIPTS, load_version
from maintain import ladder
from marks import mark_slow_cases

GITHUB = REPOSITORY / ".github"


def record(folder, device, driver, runtime, date="2027-01-02T03"):
    """Write a record of one run on a device, and of one that failed."""
    case = Case("v3", "small", 8, 128, "bfloat16", True)
    step = {"p25": 1.0, "median": 1.0, "p75": 1.0}
    numbers = dict.fromkeys(("peak_memory_mb", "flops_per_step", "parameters", "parameters_trained"), 1)
    numbers |= dict.fromkeys(PHASES) | {"step_ms": step, "graph": {"captured": True, "reason": None}}
    ran = {"case": case, "repeat": 0, "status": "ok", "reason": None, "summary": numbers, "steps_ms": [1.0]}
    failed = {"case": case._replace(model="v4"), "repeat": 0, "status": "failed", "reason": "no"}
    found = {"device": device, "device_type": "cuda", "driver": driver, "runtime": runtime, "date": date}
    found["packages"] = {"torch": "2.9.1", "triton": "3.5.1"}
    (folder / "headline").mkdir(parents=True)
    write_results({"record": found, "runs": [ran, failed], "accuracy": []}, folder / "headline" / "suite.json")


def test_a_contributed_record_of_an_amd_gpu_changes_the_table(tmp_path):
    before = ladder.tested_on(tmp_path)
    for line in before.splitlines():  # the suite's versions may be those of the manual run
        sets = re.findall(r"PyTorch [\d.]+ with Triton [\d.]+", line)
        assert len(sets) == len({*sets})
    assert "any AMD GPU" in before and "gfx942" in before and "| executed | CPU" in before
    folder = tmp_path / "contributed" / "mi325x"
    record(folder, "AMD Instinct MI325X", "6.12.12", "HIP 6.4.43484")
    record(tmp_path / "older", "a GPU", None, "CUDA 13.0", "2026-12-31")
    after = ladder.tested_on(tmp_path)
    assert "| a GPU | driver not recorded, " in after.split("MI325X")[1]  # the newest first
    versions = "driver 6.12.12, PyTorch 2.9.1, Triton 3.5.1, ROCm 6.4.43484"
    parts = "versions 3; last on 2027-01-02"
    assert f"| executed | AMD Instinct MI325X | {versions} | {parts} |" in after
    assert "any AMD GPU" not in after and "not tried | aarch64" in after


def test_a_record_of_a_ladder_alone_is_in_the_table_too(tmp_path):
    found = {"device": "a GPU", "driver": "1.2", "runtime": "CUDA 13.0", "date": "2027-01-02T03"}
    found["packages"] = {"torch": "2.9.1", "triton": "3.5.1"}
    told = {"options": [], "base": None, "reason": None, "parts": "", "peak_mib": 1.0, "loss": 1.0}
    ran = {"a": (1, "ok"), "h": (3, "ok"), "k": (4, "out of memory"), "peer": ("peer", "ok")}
    rows = [told | {"name": name, "idea": "", "version": of, "status": status} for name, (of, status) in ran.items()]
    rounds = [{"start": turn // 2, "turn": turn, "steps_ms": {"a": [2.0], "h": [1.0]}} for turn in range(6)]
    column = {"preset": "tiny", "graph": True, "options": "", "again": "a", "record": found, "rungs": rows}
    (tmp_path / "a_gpu" / "ladder").mkdir(parents=True)
    text = json.dumps({"columns": [column | {"rounds": rounds}]})
    (tmp_path / "a_gpu" / "ladder" / "ladder.json").write_text(text)
    assert "CUDA 13.0 | versions 1, 3; last on 2027-01-02 |" in ladder.tested_on(tmp_path)


def test_all_records_of_one_machine_are_one_row_with_the_newest_date(tmp_path):
    """Starts of 2026-11-30 were recorded, and the table said "last on 2026-11-23"."""
    record(tmp_path / "older", "a GPU", "1.2", "CUDA 13.0", "2027-01-02")
    start = {"empty": {}, "filled": {}}
    starts = {"small": {"b": [start], "h": [{"reason": "no"}], "k": [start, start], "peer": [start]}}
    folder = tmp_path / "newer" / "start-small"
    folder.mkdir(parents=True)
    (folder / "warm_up.json").write_text(json.dumps({"presets": starts}))
    found = {"device": "a GPU", "driver": "1.2", "runtime": "CUDA 13.0", "date": "2027-01-09T03"}
    found["packages"] = {"torch": "2.9.1", "triton": "3.5.1"}
    (folder / "record.json").write_text(json.dumps(found))
    rows = [line for line in ladder.tested_on(tmp_path).splitlines() if "a GPU" in line]
    assert len(rows) == 1 and rows[0].endswith("CUDA 13.0 | versions 1, 3, 4; last on 2027-01-09 |")


def imported(path):
    """Return the names of the modules that a file imports anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            found.add("." * node.level + (node.module or ""))
    return found


def test_what_a_participant_runs_imports_nothing_of_the_maintainers():
    folders = ["scripts/common", "scripts/amd", "exercises", *(script.parent.name for script in SCRIPTS.values())]
    files = [path for folder in folders for path in (REPOSITORY / folder).rglob("*.py")]
    files += (REPOSITORY / "scripts").glob("*.py")
    assert len(files) > 140
    for path in files:
        assert not [name for name in imported(path) if name.split(".")[0] == "maintain"], path


ROOMS = {  # room -> what it may import of ours; "common" is the loose modules in scripts/common
    "common": set(),
    "common.formulas": set(),
    "common.measuring": {"common", "common.formulas"},
    "common.profiles": {"common", "common.formulas", "common.measuring"},
    "common.own_script": {"common", "common.measuring", "check_training"},
    "common.machine": {"common", "common.formulas", "common.measuring"},
    "amd": {"common", "common.formulas"},
}


def room_of(module):
    """Return the room of a module of scripts/, or the module itself, if it is a command; None for another package's."""
    scripts = REPOSITORY / "scripts"
    top, *rest = module.split(".")
    if top == "common" and rest and (scripts / "common" / rest[0]).is_dir():
        return f"common.{rest[0]}"
    return top if top and (scripts / top).is_dir() or (scripts / f"{top}.py").is_file() else None


@pytest.mark.parametrize("room", ROOMS)
def test_no_arrow_between_rooms_runs_back_up(room):
    folder = REPOSITORY / "scripts" / room.replace(".", "/")
    for path in folder.glob("*.py"):
        asked = {room_of(module) for module in imported(path)} - {None, room}
        assert asked <= ROOMS[room], path


def test_every_room_says_what_it_holds_what_it_imports_and_where_to_begin():
    scripts = REPOSITORY / "scripts"
    rooms = {path.parent for path in scripts.rglob("__init__.py")}
    assert {scripts / room.replace(".", "/") for room in ROOMS} | {scripts / "maintain"} == rooms
    for room in rooms:
        text = " ".join(ast.get_docstring(ast.parse((room / "__init__.py").read_text())).split())
        assert re.search(r"[Ii]mports?\b.*Begin with \w", text), room
    assert len([path for path in (scripts / "common").glob("*.py") if path.name != "__init__.py"]) <= 8


class Collected:
    """Stand for a test that pytest has collected."""

    def __init__(self, quick, **params):
        self.nodeid, self.quick = f"test_it[{params}]", quick
        self.params, self.marks = params, []
        self.callspec, self.add_marker = self, self.marks.append

    def get_closest_marker(self, name):
        return self.quick.mark if name == "quick" else None


@pytest.mark.parametrize(
    ("quick", "kept"),
    [
        (pytest.mark.quick(2), ["a0", "b0"]),
        (pytest.mark.quick(1, each="x"), ["a0", "b1"]),
        (pytest.mark.quick(2, each="x"), ["a0", "a2", "b1", "b3"]),
        (pytest.mark.quick(1, each="y"), ["a0", "b1", "a2", "b3"]),
        (pytest.mark.quick(99), ["a0", "a1", "a2", "a3", "b0", "b1", "b2", "b3"]),
    ],
)
def test_quick_cases_are_spread(quick, kept):
    cases = [Collected(quick, x=x, y=y) for x in "ab" for y in range(4)]
    mark_slow_cases(cases)
    assert sorted(f"{case.params['x']}{case.params['y']}" for case in cases if not case.marks) == sorted(kept)


def test_a_tool_s_messages_name_its_file():
    """The one of AMD's results said results.py. quickstart.py is run by quickstart.sh."""
    named = {}
    for folder in ("scripts", "exercises"):
        for path in (REPOSITORY / folder).rglob("*.py"):
            found = re.findall(r'(?:Parser\(|^PROGRAM = )"([\w.]+)"', path.read_text(), re.MULTILINE)
            named |= dict.fromkeys((path.name, name) for name in found)
    assert len(named) > 40 and [pair for pair in named if pair[0] != pair[1]] == [("quickstart.py", "quickstart")]


def test_the_licence_is_stated_where_it_is_looked_for():
    """GitHub and packagers look at the top alone."""
    assert "MIT License" in (REPOSITORY / "LICENSE").read_text()
    assert "](LICENSE)" in (REPOSITORY / "README.md").read_text()
    assert 'license-files = ["LICENSE"]' in (REPOSITORY / "pyproject.toml").read_text()
    for script in SCRIPTS.values():  # may be copied alone
        assert "\n# SPDX-License-Identifier: MIT\n" in "\n" + script.read_text()[:2000]


def test_the_first_page_is_short():
    """At most 700 words, without code, pictures and markers."""
    text = (REPOSITORY / "README.md").read_text()
    text = re.sub(r"```.*?```|<picture>.*?</picture>|<!--.*?-->", "", text, flags=re.DOTALL)
    assert len(text.split()) <= 700


def test_the_version_is_the_same_wherever_it_is_told(tmp_path, capsys):
    """In pyproject.toml, the metrics, the results of tools, a record, and on the page of what changed."""
    declared = re.search(r'^version = "(.+)"$', (REPOSITORY / "pyproject.toml").read_text(), re.MULTILINE)[1]
    assert {load_version(version).WORKSHOP for version in SCRIPTS} | {check_training.WORKSHOP} == {declared}
    emit({"rows": []}, "a table", tmp_path / "result.json")
    assert json.loads((tmp_path / "result.json").read_text()) == {"workshop": declared, "rows": []}
    emit({"rows": []}, "a table", "-")
    assert json.loads(capsys.readouterr().out.partition("\n")[2])["workshop"] == declared
    assert description.describe([])["workshop"] == declared
    changes = (REPOSITORY / ".github" / "CHANGELOG.md").read_text()
    assert re.findall(r"^## (.+)$", changes, re.MULTILINE)[0] == declared


def test_the_workflow_covers_both_sets_and_processors():
    workflow = yaml.safe_load((GITHUB / "workflows" / "tests.yml").read_text())
    matrix = workflow["jobs"]["suite"]["strategy"]["matrix"]
    assert matrix["python"][0] == "3.10" and matrix["set"] == ["oldest", "pinned"]
    assert len(matrix["runner"]) == 2 and matrix["runner"][1].endswith("-arm")
    commands = [step.get("run", "") for job in workflow["jobs"].values() for step in job["steps"]]
    for script in re.findall(r"\./(\S+\.sh)", "\n".join(commands)):
        assert (REPOSITORY / script).is_file(), script


def pinned():
    """Return {name: version} of what the workflow's constraints fix for this Python."""
    found = {}
    for file in ("constraints", "constraints-tests", "constraints-indirect"):
        for line in (REPOSITORY / "scripts" / "common" / "machine" / f"{file}.txt").read_text().splitlines():
            if line.partition("#")[0].strip() and not line.startswith("-c"):
                pin = Requirement(line)
                if pin.marker is None or pin.marker.evaluate():
                    found[pin.name] = str(pin.specifier).removeprefix("==")
    return found


def needed(names, pins):
    """Return the names of the installed packages among these, and of all that they need.

    An environment of the user's own may have another version of a pinned package, which may need others: it is not
    asked.
    """
    found = set()
    waiting = list(names)
    while waiting:
        name = re.sub("[-_.]+", "-", waiting.pop()).lower()
        if name in found:
            continue
        try:
            package = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        found.add(name)
        if package.version.partition("+")[0] == pins.get(name, package.version):
            wanted = map(Requirement, package.requires or [])
            waiting += [one.name for one in wanted if one.marker is None or one.marker.evaluate({"extra": ""})]
    return found


def test_the_workflow_installs_pinned_versions_only():
    """A new version of a package that another one needs must not change what the workflow runs."""
    asked = [name for group in ("run", "test") for name, _, _ in environment.requirements(group)]
    pins = pinned()
    of_a_gpu = re.compile("nvidia|cuda|amd|rocm")  # the workflow's PyTorch is built for CPUs
    found = needed(asked, pins)
    assert found - set(asked) and not {name for name in found - set(pins) if not of_a_gpu.match(name)}
    suite = yaml.safe_load((GITHUB / "workflows" / "tests.yml").read_text())["jobs"]["suite"]
    assert suite["env"]["PIP_CONSTRAINT"].endswith("/scripts/common/machine/constraints-indirect.txt")


def test_the_workflow_trusts_commits_and_leaves_no_token():
    """A tag can be moved, a second index can offer any name, and a pull request's code can read a stored token."""
    text = (GITHUB / "workflows" / "tests.yml").read_text()
    workflow = yaml.safe_load(text)
    assert workflow["permissions"] == {"contents": "read"} and "EXTRA_INDEX" not in text and "extra-index" not in text
    for job in workflow["jobs"].values():
        assert "permissions" not in job
        for step in job["steps"]:
            assert re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", step.get("uses", f"x@{40 * '0'}")), step
            assert "checkout" not in step.get("uses", "") or step["with"]["persist-credentials"] is False


@pytest.mark.parametrize(
    "form",
    sorted({*(GITHUB / "ISSUE_TEMPLATE").glob("*.yml")} - {GITHUB / "ISSUE_TEMPLATE" / "config.yml"}),
    ids=lambda path: path.stem,
)
def test_an_issue_form_is_one(form):
    """Check the keys that GitHub demands: without one it shows no form at all."""
    text = yaml.safe_load(form.read_text())
    assert text["name"] and text["description"]
    asked = [part for part in text["body"] if part["type"] != "markdown"]
    ids = [part["id"] for part in asked]
    assert len(ids) == len(set(ids))
    for part in asked:
        assert part["type"] in ("input", "textarea", "dropdown") and part["attributes"]["label"]
        assert part["type"] != "dropdown" or part["attributes"]["options"]
