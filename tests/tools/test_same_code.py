"""The checker of "same name, same code" on small files, and what it says about the four scripts."""

import subprocess
import sys
import textwrap

import pytest

from common.versions import SCRIPTS
from maintain import same_code

HOME = """
    import math
    from os import path as folder

    # how far a step goes
    RATE = 0.5
    LOW, HIGH = 0, 1


    @staticmethod
    def area(radius):
        return math.pi * radius**2  # square units


    if RATE:
        FAST = True
    else:
        FAST = False


    class Model:
        size = 3
"""


@pytest.fixture
def files(tmp_path):
    """Writes the texts to v1.py, v2.py, ... and returns their paths."""

    def write(*texts):
        paths = [tmp_path / f"v{i}.py" for i in range(1, len(texts) + 1)]
        for path, text in zip(paths, texts, strict=True):
            path.write_text(textwrap.dedent(text))
        return paths

    return write


def test_equal_files_agree(files):
    assert same_code.check(files(HOME, HOME, HOME)) == []


@pytest.mark.parametrize(
    "name, old, new",
    [
        ("area", "radius**2", "radius**3"),
        ("area", "# square units", "# square metres"),
        ("area", "@staticmethod", "@classmethod"),
        ("RATE", "0.5", "0.25"),
        ("RATE", "# how far a step goes", "# size of a step"),
        ("HIGH", "0, 1", "0, 2"),
        ("FAST", "FAST = False", "FAST = None"),
        ("Model", "size = 3", "size = 4"),
        ("folder", "path as folder", "sep as folder"),
    ],
)
def test_drift_is_found_and_shown(files, name, old, new):
    paths = files(HOME, HOME.replace(old, new))
    problems = same_code.check(paths)
    assert any(problem.startswith(f"{name} of {paths[1]} differs from that of {paths[0]}") for problem in problems)
    assert all("+++" in problem for problem in problems)


def test_names_of_one_file_and_of_functions_are_its_own(files):
    own = HOME + "\n    def only_here():\n        RATE = 7\n        return RATE\n"
    own += "\n    SQUARES = [area**2 for area in range(3)]\n"
    assert same_code.check(files(HOME, own)) == []


def test_a_name_bound_twice_is_compared_whole(files):
    assert same_code.check(files("X = 1\nX += 2\n", "X = 1\nX += 3\n"))


def test_fork_may_differ_as_it_is_listed_and_not_otherwise(files):
    changed = HOME.replace("size = 3", "size = 4")
    forks = {"Model": ("1 23", "the lesson of version 2")}
    assert same_code.check(files(HOME, changed, changed), forks) == []
    paths = files(HOME, changed, HOME.replace("size = 3", "size = 5"))
    (problem,) = same_code.check(paths, forks)
    assert problem.startswith(f"Model of {paths[2]} differs from that of {paths[1]}")
    assert same_code.check(paths, {"Model": ("1 2 3", "three lessons")}) == []


def test_stale_forks_are_reported(files):
    paths = files(HOME, HOME)
    (equal,) = same_code.check(paths, {"Model": ("1 2", "no longer")})
    assert equal == "Model is a fork between versions 1 and 2, but their copies are equal"
    (gone,) = same_code.check(paths, {"Removed": ("1 2", "renamed since")})
    assert gone == "Removed is a fork of 1 2, but versions none define it"
    (partial,) = same_code.check(files(HOME, HOME.replace("size = 3", "size = 4"), ""), {"Model": ("1 23", "lost")})
    assert partial == "Model is a fork of 1 23, but versions 1 2 define it"


def test_order_of_shared_names(files):
    one, two = files("A = 1\nB = 2\nC = 3\n", "A = 1\nC = 3\nNEW = 0\nB = 2\n")
    assert same_code.check([one, two]) == [f"{two} defines C where {one} has B: put them in the same order"]


def test_required_names(files):
    paths = files(HOME, HOME.replace("def area", "def surface"))
    assert same_code.check(paths, shared={"area"}) == [f"{paths[1]} lacks area, which all versions share"]


def test_fix_copies_the_home_and_spares_forks(files):
    third = HOME.replace("0.5", "0.75").replace("radius**2", "radius**4").replace("size = 3", "size = 5")
    paths = files(HOME, HOME.replace("0.5", "0.25").replace("# how far a step goes", "# other"), third)
    forks = {"Model": ("12 3", "its lesson")}
    assert same_code.fix(paths, forks) == 3
    texts = [path.read_text() for path in paths]
    assert texts[1] == texts[0]
    assert texts[2] == texts[0].replace("size = 3", "size = 5")
    assert same_code.check(paths, forks) == []


def test_fix_writes_a_tuple_assignment_once(files):
    paths = files(HOME, HOME.replace("0, 1", "0, 2"))
    assert same_code.fix(paths) == 1
    assert paths[0].read_text() == paths[1].read_text()


def command(*arguments):
    script = [sys.executable, same_code.__file__]
    return subprocess.run([*script, *map(str, arguments)], capture_output=True, text=True, timeout=60)


def test_exit_status(files, tmp_path):
    paths = files(HOME, HOME.replace("0.5", "0.25"))
    assert command(*paths).returncode == 1
    assert command("--fix", *paths).returncode == 0
    assert command(*paths).returncode == 0
    missing = command(tmp_path / "none.py")
    assert missing.returncode == 2 and "none.py" in missing.stderr and "Traceback" not in missing.stderr
    paths[0].write_text("def broken(:\n")
    assert command(*paths).returncode == 2


def test_the_four_scripts():
    assert same_code.check(list(SCRIPTS.values()), same_code.FORKS, same_code.SHARED) == []


def test_diff_shows_what_a_version_changes():
    shown = command("--diff", 1, 2)
    assert shown.returncode == 0
    assert "+VERSION = 2" in shown.stdout.splitlines() and "-VERSION = 1" in shown.stdout.splitlines()
    assert not [line for line in shown.stdout.splitlines() if line.startswith(("+def load_data", "-def load_data"))]
