"""Four scripts in two halves that can be read apart: one harness, and one text for a name that two lessons share."""

import ast
import builtins
import collections
import shlex
import shutil
import subprocess
import symtable
import sys

import pytest

import diff_versions
from common.versions import HEADING, REPOSITORY, SCRIPTS, halves
from maintain import harness

DASHES = "-" * 64
FP8 = f"# {DASHES} fp8: fewer bits (--fp8). Stop here unless you want it\n"
HOOKS = f"# {DASHES} what the harness asks for\n"
ASKED_FOR = {
    *("VERSION", "GRAPH_BY_DEFAULT", "DETERMINISTIC_BY_DEFAULT", "FSDP_GATHERS_AMP_DTYPE"),
    *("make_model", "make_optimizer", "get_weight", "set_weight", "add_version_options", "complete_version_options"),
}
# The versions that share each text of a name that has several: the contract between the halves, and the lessons.
LESSONS = {
    "1 2 3 4": "VERSION Attention FeedForward make_model make_optimizer add_version_options complete_version_options",
    "12 34": "GRAPH_BY_DEFAULT FSDP_GATHERS_AMP_DTYPE",
    "1 234": "DETERMINISTIC_BY_DEFAULT causal_attention",
    "12 4": "RMSNorm",
    "124 3": "Block TinyLlama",
    "14 2 3": "ModelConfig",
    "12 3 4": "compute_loss get_weight set_weight",
}


def test_the_four_harnesses_are_the_same_bytes():
    assert harness.main([]) == 0


def global_names(source):
    """Return the names that a source imports, those that it defines or imports, and those that it uses."""
    module = symtable.symtable(source, "half", "exec")
    imported, used, tables = set(), set(), [module]
    defined = {symbol.get_name() for symbol in module.get_symbols() if symbol.is_assigned() or symbol.is_imported()}
    while tables:
        table = tables.pop()
        tables += table.get_children()
        for symbol in table.get_symbols():
            if symbol.is_imported() and table is module:
                imported.add(symbol.get_name())
            if symbol.is_referenced() and (symbol.is_global() or table is module):
                used.add(symbol.get_name())
    return imported, defined, used - set(dir(builtins)) - {"__file__"}


@pytest.mark.parametrize("version", SCRIPTS)
def test_a_reader_can_stop_at_the_line(version):
    """Each half imports what it uses; the lesson uses two names of the harness, and the harness one block of it."""
    lesson, harness_half = (half.decode() for half in halves(SCRIPTS[version]))
    imported, defined, used = global_names(lesson)
    assert imported <= used and used - defined <= {"annotate", "UserError"}
    imported, defined, used = global_names(harness_half)
    assert imported <= used and used - defined == {"ModelConfig", "compute_loss", *ASKED_FOR}
    before, heading, hooks = lesson.partition(HOOKS)
    assert heading and not ASKED_FOR & global_names(before)[1] and global_names(hooks)[1] >= ASKED_FOR


def test_fp8_is_the_last_chapter_of_version_3():
    """Up to the loss a reader meets three names of fp8: the layer, the feed-forward part, the weights of a step."""
    lesson, heading, rest = halves(SCRIPTS[3])[0].decode().partition(FP8)
    chapter = rest.partition(HOOKS)[0]
    assert heading and "def compute_loss" in lesson
    assert global_names(chapter)[1] & global_names(lesson)[2] == {
        "FP8Linear",
        "FP8FeedForwardFunction",
        "FP8Weights",
    }
    assert not {name for name in global_names(lesson)[1] if "fp8" in name.lower()}


def test_shared_names_have_one_text():
    texts = collections.defaultdict(lambda: collections.defaultdict(str))
    for version, script in SCRIPTS.items():
        source = halves(script)[0].decode()
        for node in ast.parse(source).body:
            names = [t.id for t in node.targets] if isinstance(node, ast.Assign) else [getattr(node, "name", None)]
            for name in filter(None, names):
                texts[name][ast.get_source_segment(source, node)] += str(version)
    different = {name: " ".join(groups.values()) for name, groups in texts.items() if len(groups) > 1}
    assert different == {name: versions for versions, names in LESSONS.items() for name in names.split()}


@pytest.fixture
def copies(tmp_path, monkeypatch):
    """Let harness.py work on copies of the four scripts."""
    for version, script in list(SCRIPTS.items()):
        monkeypatch.setitem(SCRIPTS, version, shutil.copy(script, tmp_path / script.name))
    return dict(SCRIPTS)


def test_a_changed_byte_is_found_and_the_named_harness_copied(copies, capsys):
    def change(content):
        return content.replace(b"LOCAL_RANK", b"LOCAL_TANK", 1)

    before = {version: copy.read_bytes() for version, copy in copies.items()}
    copies[3].write_bytes(change(before[3]))
    assert harness.main([]) == 1
    assert capsys.readouterr().out == "tiny_llama_v3.py: harness differs\n"
    assert harness.main(["--write", "3"]) == 0
    assert all(copies[version].read_bytes() == change(content) != content for version, content in before.items())


def test_diff_prints_what_one_lesson_changes(capsys):
    assert diff_versions.main(["1", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {"-VERSION = 1", "+VERSION = 2"} < set(lines) and "def load_data(config):" not in "\n".join(lines)


def test_the_reader_of_a_diff_may_stop_early():
    """Such as head: that is no error, and there is no traceback."""
    command = f"{shlex.quote(sys.executable)} diff_versions.py 1 3 | head -n 1"
    done = subprocess.run(command, shell=True, cwd=REPOSITORY / "scripts", capture_output=True, text=True)
    assert done.stdout == "--- tiny_llama_v1.py\n" and done.stderr == ""


def test_a_script_without_the_heading_is_named(copies):
    copies[2].write_bytes(copies[2].read_bytes().replace(HEADING, b"#"))
    with pytest.raises(SystemExit, match="tiny_llama_v2.py must have one line"):
        harness.main([])


@pytest.mark.parametrize("version", SCRIPTS)
def test_a_script_imports_nothing_of_this_repository(version):
    nodes = list(ast.walk(ast.parse(SCRIPTS[version].read_text())))
    names = [name.name for node in nodes if isinstance(node, ast.Import) for name in node.names]
    names += [node.module for node in nodes if isinstance(node, ast.ImportFrom)]
    assert {name.split(".")[0] for name in names} <= sys.stdlib_module_names | {"torch", "numpy", "triton"}
