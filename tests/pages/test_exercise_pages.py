"""The pages of exercises: their form, and that every command on them names what exists."""

import re
import subprocess

import pytest
from page_faults import faults_of_command, faults_of_links

from common.pages import FOLDERS, Command, commands
from common.versions import REPOSITORY, SCRIPTS

PAGES = {
    f"{folder.name.split('_')[0]}/{page.name}": page
    for folder in FOLDERS
    for page in sorted((folder / "exercises").glob("*.md"))
}
STAGES = REPOSITORY / "version3_triton" / "exercises" / "performance_debugging"
OTHERS = [*sorted(REPOSITORY.glob("exercises/**/*.md")), *sorted(STAGES.glob("*.md"))]
LONGEST = 100  # lines
SECTIONS = ["Objective", "Steps", "What to look for", "Questions"]

every_page = pytest.mark.parametrize("page", PAGES.values(), ids=PAGES)


def version_folder(page):
    return page.parent.parent


def test_every_version_has_its_pages():
    counts = {folder.name: sum(version_folder(page) == folder for page in PAGES.values()) for folder in FOLDERS}
    assert list(counts.values()) == [3, 4, 3, 2], counts


@every_page
def test_form(page):
    text = page.read_text(encoding="utf-8")
    lines = text.splitlines()
    assert len(lines) <= LONGEST and max(map(len, lines)) <= 200
    assert [line[3:] for line in lines if line.startswith("## ")] == SECTIONS
    questions = text.split("## Questions")[1]
    shown, rest = questions.split("<details><summary>Answers</summary>")
    folded, after = rest.split("</details>")
    asked, answered = (re.findall(r"^(\d)\. ", part, re.MULTILINE) for part in (shown, folded))
    assert len(asked) >= 3 and asked == answered
    assert "*Next*" in after  # a link that stays in sight while the answers are folded
    assert f"`{version_folder(page).name}/`" in text  # where the commands run


@every_page
def test_commands_name_what_exists(page):
    found = commands(page)
    assert len(found) >= 4
    faults = [fault for command in found for fault in faults_of_command(command, version_folder(page), FOLDERS)]
    assert faults == []


@pytest.mark.parametrize("page", OTHERS, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_commands_of_hands_on_pages_name_what_exists(page):
    folder = STAGES if STAGES in page.parents else REPOSITORY
    found = commands(page)
    assert found or page.name == "hints.md"
    assert [fault for command in found for fault in faults_of_command(command, folder, FOLDERS)] == []


@pytest.mark.parametrize("page", [*PAGES.values(), *OTHERS], ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_links_lead_somewhere(page):
    assert faults_of_links(page) == []


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_wrappers_on_pages_accept_their_options(folder):
    """A dry run of every get_*.sh line as it is written, where no special profiler is needed."""
    lines = {
        command.text
        for page in PAGES.values()
        if version_folder(page) == folder
        for command in commands(page)
        if command.text.startswith("./get_") and not {"--pmc", "--roof"} & set(command.words())
    }
    assert lines
    for line in sorted(lines):
        done = subprocess.run(
            [*line.split(), "--dry-run", "--profiler", "pytorch"], cwd=folder, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{line}: {done.stderr}"


# ---------------------------------------------------------------- what finds the faults


def faults(text, folder=SCRIPTS[2].parent):
    return faults_of_command(Command(1, text), folder, FOLDERS)


def test_faults_of_commands_are_seen():
    assert faults("python tiny_llama_v2.py --preset small --disable-qkv-fusion --no-graph") == []
    assert faults("python compare_versions.py --preset small --rounds 3") == []  # --preset goes to the scripts
    assert "does not exist" in faults("python no_such_tool.py")[0]
    assert "knows no --fused" in faults("python tiny_llama_v2.py --fused")[0]
    assert "knows no --pre" in faults("python compare_versions.py --pre small")[0]
    assert "knows no --preset" in faults("python analyze_kernel_reduction.py --preset small")[0]
    assert "knows no --disable-everything" in faults("python tiny_llama_v2.py --disable-everything")[0]
    assert "cannot be executed" in faults("./README.md")[0]


def test_commands_of_a_page_are_found(tmp_path):
    page = tmp_path / "page.md"
    block = "# why\npython a.py \\\n  --b\n\n./c.sh  # what for\n"
    page.write_text(f"text\n\n```bash\n{block}```\n\n    python d.py\n    x = 1\n```python\nx\n```\n")
    assert [(c.line, c.words()) for c in commands(page)] == [
        (6, ["python", "a.py", "--b"]),
        (8, ["./c.sh"]),
        (11, ["python", "d.py"]),
    ]
    page.write_text("[a](missing.md#part) [b](https://example.com) [c](page.md) [d](#here)\n")
    assert faults_of_links(page) == ["missing.md does not exist"]


def test_help_that_fails_is_a_fault(tmp_path):
    (tmp_path / "broken.py").write_text("raise SystemExit(1)\n")
    assert "--help fails" in faults("python broken.py", tmp_path)[0]
