"""Four scripts in two halves: one harness, lessons of bounded length, and one text for a name that two share."""

import ast
import collections
import shutil

import pytest

from common.versions import SCRIPTS
from maintain import harness

LENGTHS = {1: 200, 2: 260, 3: 950 + 300, 4: 330}  # lines of a lesson; version 3: kernels and an fp8 section
HARNESS_LENGTH = 800
# The versions that share each text of a name that has several: the contract between the halves, and the lessons.
LESSONS = {
    "1 2 3 4": "VERSION Attention FeedForward add_version_options complete_version_options",
    "12 34": "GRAPH_BY_DEFAULT FSDP_GATHERS_AMP_DTYPE",
    "1 234": "DETERMINISTIC_BY_DEFAULT causal_attention",
    "12 4": "RMSNorm",
    "124 3": "Block",
    "1 24 3": "TinyLlama",
    "12 3 4": "compute_loss make_optimizer get_weight set_weight",
}


def test_the_four_harnesses_are_the_same_bytes():
    assert harness.main([]) == 0


@pytest.mark.parametrize("version", SCRIPTS)
def test_lengths(version):
    lines = [half.count(b"\n") for half in harness.halves(SCRIPTS[version])]
    assert lines[0] <= LENGTHS[version] and lines[1] <= HARNESS_LENGTH


def test_shared_names_have_one_text():
    texts = collections.defaultdict(lambda: collections.defaultdict(str))
    for version, script in SCRIPTS.items():
        source = harness.halves(script)[0].decode()
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
    assert harness.main(["--diff", "1", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {"-VERSION = 1", "+VERSION = 2"} < set(lines) and "def load_data(config):" not in "\n".join(lines)


def test_a_script_without_the_heading_is_named(copies):
    copies[2].write_bytes(copies[2].read_bytes().replace(harness.HEADING, b"#"))
    with pytest.raises(SystemExit, match="tiny_llama_v2.py must have one line"):
        harness.main([])
