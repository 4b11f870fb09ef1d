"""The pages: their commands exist, take those options and run, their links lead somewhere, and they keep their form."""

import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from page_faults import faults_of_command, faults_of_links, program_of

from common.ratios import Gain
from common.versions import REPOSITORY, SCRIPTS, load_version
from maintain import pictures, road, rungs
from maintain.pages import EXERCISES, FOLDERS, HANDS_ON, MARKER, PAGES, TABLE, Command, all_pages, commands, start_of
from maintain.records import newest_record
from maintain.try_pages import passed_over

sys.path.insert(0, str(REPOSITORY / "exercises"))
import sessions
from sessions import SESSIONS, V1, header

SHORT = "--hidden-dim 32 --num-layers 1 --num-heads 2 --seq-len 16 --batch-size 2 --num-steps 2 --warmup-steps 1"


def each(pages):
    return pytest.mark.parametrize("page", pages, ids=lambda page: str(page.relative_to(REPOSITORY)))


# ---------------------------------------------------------------- commands and links


@each(all_pages())
def test_commands_exist_and_take_their_options(page):
    found = [command for command in commands(page) if program_of(command.words())[0] != "-c"]
    assert len(found) >= (4 if page in EXERCISES else page not in PAGES and page.name != "hints.md")
    assert [fault for command in found for fault in faults_of_command(command, start_of(page), FOLDERS)] == []


def test_every_page_with_commands_is_tried():
    """The page on any kernel was not: nobody typed its commands or followed its links."""
    listed = subprocess.run(["git", "ls-files", "*.md"], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    written = {REPOSITORY / name for name in listed.stdout.splitlines()}
    generated = {REPOSITORY / "scripts" / "amd" / name for name in ("RESULTS.md", "RESULTS_TABLES.md")}
    assert generated < written and written - generated == {*all_pages()}


def test_git_ignores_what_a_page_s_commands_write():
    """And the commands of the workshop's starting documents."""
    documents = (REPOSITORY / "tests" / "tools" / "contract_commands.txt").read_text()
    names = re.findall(r"--(?:profile|output)-dir \./(\w+)", re.sub(r"\$\{?\w+\}?", "1", documents))
    written = [f"version2_pytorch_fused/{name}" for name in names]
    for page in (*PAGES, *EXERCISES):
        text = re.sub(r"\$\{\w+\}", "1", page.read_text())
        names = re.findall(r"--(?:profile-dir|metrics-file) ([\w./]+)|> (\w+\.txt)", text)
        written += [str((start_of(page) / "".join(name)).resolve().relative_to(REPOSITORY)) for name in names]
    written = sorted({name if "." in name else f"{name}/" for name in written})
    call = ["git", "check-ignore", "--no-index", *written]
    done = subprocess.run(call, cwd=REPOSITORY, capture_output=True, text=True)
    assert len(written) > 5 and done.stdout.split() == written


@each(all_pages())
def test_links_lead_somewhere(page):
    """Also into pages, by GitHub's anchors: the heading in small letters, without punctuation, hyphens for spaces."""
    assert faults_of_links(page) == []
    for target in re.findall(r"\]\(([^)\s]*#[^)\s]+)\)", page.read_text()):
        if "://" not in target:
            file, anchor = target.split("#")
            path = page.parent / file if file else page
            headings = re.findall(r"^#+ (.*)", path.read_text(), re.MULTILINE)
            anchors = [re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings]
            assert anchor in anchors, f"{target}: {path.name} has no such heading"


@pytest.mark.parametrize("version", SCRIPTS)
def test_the_training_commands_of_a_version_s_page_run(version, tmp_path, monkeypatch, capsys):
    """Each command that trains the version, with smaller sizes behind its own options."""
    monkeypatch.chdir(tmp_path)
    found = commands(SCRIPTS[version].parent / "README.md")
    found = [command for command in found if command.words()[:2] == ["python", f"tiny_llama_v{version}.py"]]
    assert len(found) >= 2
    for command in found:
        if not passed_over(command, torch.cuda.device_count()):
            argv = command.words()[2:]
            assert load_version(version).main([*argv, *SHORT.split()]) == 0, command.text
            assert "trained    " in capsys.readouterr().out


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_wrappers_on_exercise_pages_accept_their_options(folder):
    """A dry run of every get_*.sh line as it is written, where no special profiler is needed."""
    found = [command for page in EXERCISES if start_of(page) == folder for command in commands(page)]
    lines = {c.text for c in found if c.text.startswith("./get_") and not {"--pmc", "--roof"} & set(c.words())}
    assert lines
    for line in sorted(lines):
        command = [*line.split(), "--dry-run", "--profiler", "pytorch"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0, f"{line}: {done.stderr}"


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("python tiny_llama_v2.py --preset small --disable-qkv-fusion --no-graph", None),
        ("python compare_versions.py --preset small --rounds 3", None),  # --preset goes to the scripts
        ("python no_such_tool.py", "does not exist"),
        ("python tiny_llama_v2.py --fused", "knows no --fused"),
        ("python compare_versions.py --pre small", "knows no --pre"),
        ("python analyze_kernel_reduction.py --preset small", "knows no --preset"),
        ("python tiny_llama_v2.py --disable-everything", "knows no --disable-everything"),
        ("./README.md", "cannot be executed"),
        ("python ../scripts/maintain/ladder.py --wirte", "knows no --wirte"),
        ("torchrun --nproc-per-node 2 tiny_llama_v2.py --paralel ddp", "--paralel"),
    ],
)
def test_faults_of_commands_are_seen(command, said):
    faults = faults_of_command(Command(1, command), SCRIPTS[2].parent, FOLDERS)
    assert len(faults) == bool(said) and (said or "") in "".join(faults)


def test_faults_of_other_programs_are_seen(tmp_path):
    (tmp_path / "broken.py").write_text("raise SystemExit(1)\n")
    assert "--help fails" in faults_of_command(Command(1, "python broken.py"), tmp_path, FOLDERS)[0]
    job = Command(1, "sbatch --nodes 2 scripts/train.sbatch 3 --presett medium")
    assert "--presett" in faults_of_command(job, REPOSITORY, FOLDERS)[0]


def test_commands_of_a_page_are_found(tmp_path):
    page = tmp_path / "page.md"
    block = "# why\npython a.py \\\n  --b\n\n./c.sh  # what for\n"
    page.write_text(f"text\n\n```bash\n{block}```\n\n    python d.py\n    x = 1\n```python\nx\n```\n")
    found = [(6, ["python", "a.py", "--b"]), (8, ["./c.sh"]), (11, ["python", "d.py"])]
    assert [(c.line, c.words()) for c in commands(page)] == found
    page.write_text("[a](missing.md#part) [b](https://example.com) [c](page.md) [d](#here)\n")
    assert faults_of_links(page) == ["missing.md does not exist"]


# ---------------------------------------------------------------- form


@each(EXERCISES)
def test_form_of_exercise_pages(page):
    """Questions and folded answers have the same numbers, and a link stays in sight while the answers are folded."""
    text = page.read_text(encoding="utf-8")
    written = road.END.sub("", road.HEADER.sub("", text))
    written = re.sub(r"</?picture>\n|<source .*>\n", "", written)  # generated too
    lines = MARKER.sub("", written).splitlines()
    assert len(lines) <= 100 and max(map(len, lines)) <= 200
    *_, shown, folded, after = re.split("<details>|</details>", text)
    asked, answered = (re.findall(r"^(\d)\. ", part, re.MULTILINE) for part in (shown[shown.rindex("\n## ") :], folded))
    assert len(asked) >= 3 and asked == answered
    assert "](" in after
    assert f"`{start_of(page).name}/`" in text  # where the commands run


MEASURED = re.compile(r"\b\d+\.\d+x? (ms|us|[GT]B/s|[GT]FLOP|TFLOP/s|[MG]i?B|samples/s)(?![\w/])(?!<!--)")


@each([page for page in [*PAGES, *EXERCISES, *HANDS_ON] if page.name != "NOTEBOOK.md"])
def test_a_measured_number_has_a_marker(page):
    """But the notebook's, which names its machine, and those in code: ladder.py compares the others with the record."""
    text = re.sub(r"^ *```.*?^ *```\n", "", TABLE.sub("", page.read_text()), flags=re.DOTALL | re.MULTILINE)
    typed = [line for line in text.splitlines() if MEASURED.search(line)]
    assert not typed, f"which fact of maintain/facts.py is it? {typed[0]}"


@each(all_pages())
def test_markers_are_of_one_kind_and_in_pairs(page):
    text = page.read_text()
    begun, ended = (re.findall(rf"<!-- (.+):{side} -->", text) for side in ("begin", "end"))
    assert begun == ended and len(set(begun)) == len(begun)
    assert len(TABLE.findall(text)) == len(begun)


# ---------------------------------------------------------------- timetable

WORK = [(REPOSITORY / page, minutes) for _, _, steps in SESSIONS.values() for _, page, minutes in steps]


def test_the_road_leads_through_the_whole_timetable():
    """Each page has its session and minutes below its title, its session's end, and the next page as its last link."""
    assert road.main([]) == 0


@pytest.mark.parametrize("page", ["README.md", "version3_triton/README_WORKSHOP.md"])
def test_an_entrance_leads_to_the_first_page(page):
    """By the first link after its Next."""
    assert road.targets(page, road.after_next((REPOSITORY / page).read_text()))[:1] == sessions.steps()[:1]


@pytest.mark.parametrize(
    ("page", "stated"),
    [
        ("exercises/GPU.md", "Session 1, measure; this page: 15 minutes"),
        (f"{V1}/exercises/exercise_1_baseline_analysis.md", "Session 1, measure; this page, steps 1 to 3: 35 minutes"),
    ],
)
def test_a_page_states_its_session_and_minutes(page, stated):
    assert header(page) == stated
    assert (REPOSITORY / page).read_text().splitlines()[2] == f"*{stated}*"


def test_a_page_of_two_sessions_names_both_and_both_next_pages(monkeypatch):
    first = ("measure", "", [("a", "a.md", 5), ("b", "b.md", 10)])
    monkeypatch.setattr(sessions, "SESSIONS", {1: first, 2: ("fuse", "", [("a, step 2", "a.md", 7), ("c", "c.md", 1)])})
    both = "Session 1, measure; this page: 5 minutes. Session 2, fuse; this page, step 2: 7 minutes"
    assert header("a.md") == both
    assert sessions.after("a.md") == ["b.md", "c.md"] and sessions.after("b.md") == ["a.md"]
    assert sessions.after("c.md") == []


TWO_SESSIONS = {
    1: ("measure", "", [("a", "a/page.md", 5), ("b", "b.md", 10)]),
    2: ("fuse", "", [("a", "a/page.md", 5), ("c", "a/c.md", 10), ("d, at home", "d.md", 10)]),
}


@pytest.mark.parametrize(
    ("page", "end", "fault"),
    [
        ("b.md", "**Next:** [x](x.md), then [a](a/page.md#part).\n", None),
        ("b.md", "*Trouble*: [no](no.md). *Next*: [a](a/page.md).\n", None),
        ("b.md", "**Next:** [a](a/page.md), or [x](x.md).\n", "its last link is x.md, the next page is a/page.md"),
        (
            "b.md",
            "**Next**: [a](a/page.md)\n\n## More\n\n[x](https://x.org)\n",
            "its last link is https://x.org, the next page is a/page.md",
        ),
        ("b.md", "[a](a/page.md)\n", "its last link is missing, the next page is a/page.md"),
        ("a/page.md", "**Next:** [b](../b.md), or in session 2 [c](c.md).\n", None),
        ("a/page.md", "**Next:** [c](c.md)\n", "its last link is a/c.md, the next page is b.md and a/c.md"),
        ("d.md", "**Next:** [add](.github/CONTRIBUTING.md#add-something)\n", None),
        ("d.md", "**Next:** [a](a/page.md)\n", "its last link is a/page.md, the next page is .github/CONTRIBUTING.md"),
    ],
)
def test_the_last_link_of_a_page_is_judged(page, end, fault, monkeypatch):
    monkeypatch.setattr(sessions, "SESSIONS", TWO_SESSIONS)
    assert road.fault_of_next(page, f"# A\n\n**Next:** [x](x.md)\n\n{end}" if "Next" in end else end) == fault


def test_the_last_page_of_a_session_says_so_before_its_next(monkeypatch):
    monkeypatch.setattr(sessions, "SESSIONS", TWO_SESSIONS)
    assert [sessions.ends(page) for page in ("a/page.md", "b.md", "a/c.md", "d.md")] == [None, 1, 2, None]
    told = "**Session 2 ends here.** Answer its [ten questions](../exercises/QUESTIONS.md#session-2-fuse).\n\n"
    page = "# A\n\n*Next*: [x](x.md)\n\ntext\n\n{}*Next*: [b](b.md)\n"
    assert road.with_end("a/c.md", page.format("")) == page.format(told)
    old = told.replace("2", "9").replace("ten", "nine")
    assert road.with_end("a/c.md", page.format(old)) == page.format(told)
    assert road.with_end("d.md", page.format(told)) == page.format("")


def test_a_part_of_a_page_takes_less_than_the_whole():
    for page in EXERCISES:
        text = page.read_text()
        whole = re.search(r"All of it takes (\d+) minutes", text)
        stated = header(str(page.relative_to(REPOSITORY)))
        assert (", steps" in stated) == bool(whole), page
        assert not whole or int(whole[1]) > int(re.search(r"(\d+) minutes", stated)[1]), page


def test_the_timetable_has_every_exercise_once():
    planned = [page for page, _ in WORK]
    exercises = {*EXERCISES, *REPOSITORY.glob("exercises/[0-9][0-9]_*/README.md")}
    assert len(planned) == len(set(planned)) and exercises <= set(planned)


# ---------------------------------------------------------------- pictures


def test_every_picture_of_the_recorded_run_is_on_a_page():
    places = {match["name"] for page in all_pages() for match in TABLE.finditer(page.read_text())}
    assert {f"picture-{name}" for name in pictures.PICTURES} <= places
    assert {f"picture-{name}" for name in pictures.PICTURES} <= pictures.texts_of(newest_record()).keys()


@each(all_pages())
def test_pictures_have_a_text_and_are_small(page):
    assert "![" not in page.read_text()  # which has no width
    for target, text in re.findall(r'<img src="(.+?)" .*alt="(.*?)">', page.read_text()):
        assert len(text) > 60, f"{target} has no text for readers who cannot see it"
    for target in re.findall(r' (?:src|srcset)="(.+?)"', page.read_text()):
        assert (page.parent / target).stat().st_size < 100_000


@each([page for page in all_pages() if page.parent.name != "slides"])  # slides are white
def test_every_picture_has_a_dark_twin(page):
    shown = re.findall(r'<img src="(.+?)\.png"', page.read_text())
    assert re.findall(r'<source media=.+ srcset="(.+?)_dark\.png">\n<img', page.read_text()) == shown


GAINS = {ratio: Gain(ratio, ratio - 0.1, ratio + 0.1, 5, 0.01, None, ratio != 1) for ratio in (0.8, 1, 1.5, 2)}
SWITCHES = [
    {"switch": "torch-compile", "alone": GAINS[2], "last": GAINS[1.5]},
    {"switch": "swiglu-fusion", "alone": GAINS[0.8], "last": GAINS[1]},
]
PEAKS = [{"version": 1, "peaks_mb": [4096, 16384, None]}, {"version": 2, "peaks_mb": [3072, 6144, 12288]}]
TIMELINE = [
    ("V1, eager", [(0, 3, "GEMM"), (10, 2, "other")]),
    ("V4, eager", [(0, 5, "GEMM")]),
    ("packed", [(0, 4, "copies")]),
]
ROOFS = {
    "copy": 4000,
    "top": 700,
    "points": [("RoPE", 0.6, 2.25, 0.13), ("attention, 512 tokens", 170, 234, 217)],
}


def column(preset, graph, *steps):
    """Return a Column of a ladder's first rungs, with steps of so many ms in one round."""
    rounds = [{"start": 0, "turn": 0, "steps_ms": dict(zip("abc", ([step] for step in steps), strict=False))}]
    told = [rung._asdict() for rung in rungs.LADDER[:3]]
    return rungs.Column({"preset": preset, "graph": graph, "options": "", "rungs": told, "rounds": rounds})


FIRST_PICTURE = [rung for rung in rungs.LADDER if rung.first_picture]
STEPS = {"device": "one", "ms": [(rung, 20.0 - place) for place, rung in enumerate(FIRST_PICTURE)]}
FALLS = [column("medium", True, 8.0, 5.0, 4.5)]
PAIRS = [column("small", False, 4.0, 3.0), column("small", True, 2.0)]
STAGE = "1 2.000 4000.0 80.0 % 0.750 1.250 0.500 100.0 7.0000 -> 6.5000 50.0 %"


@pytest.mark.parametrize(
    ("name", "found", "told", "drawn"),
    [
        (
            "memory",
            {"lengths": [512, 1024, 2048], "rows": PEAKS},
            "At 2,048 tokens: V1 out of memory, V2 12.0 GiB.",
            [4, 16, 3, 6, 12],
        ),
        ("ablation2", SWITCHES, "swiglu-fusion 0.80x (0.70 to 0.90) and no difference shown.", [1, -0.2, 0.5]),
        ("timeline", TIMELINE, "a bar. V1, eager; V4, eager; packed.", [3, 2, 5, 4]),
        (
            "scaling",
            [("V3, DDP, 2 GPUs", 91.34), ("V4, DDP, 2 GPUs", 92.0)],
            "GPUs 91.3 %; V4, DDP, 2 GPUs 92.0 %.",
            [91.34, 92],
        ),
        ("roofline", ROOFS, "attention, 512 tokens 234.00 and 217.00.", [2.25, 0.13, 234, 217]),
        ("stages", None, "stage 1: 2.5 and 2.00.", [0.75, 1.25, 0.5]),
        (
            "steps",
            STEPS,
            "compiled LLaMA, 14.0 ms with the strongest stack around it, 16.0 ms with PyTorch's fused parts and "
            "17.0 ms with our Triton kernels.",
            [18, 18, 18, 17, 16, 15, 14],  # the axis ends at 1.2 times the compiled LLaMA's 15 ms
        ),
        ("ladder", FALLS, "b bf16 matmuls 5.000, c not deterministic 4.500.", [0, 0, 0, 0, -3]),
        ("ladder_small", PAIRS, "b bf16 matmuls 3.000; small, with a graph: a float32 2.000.", [4, 3, 2]),
        ("levels", {"one": [2] * 6, "two": [3] * 6}, "scores of a layer 256 MiB.", [1] * 6 + [2] * 6),
    ],
)
@pytest.mark.slow
def test_pictures_show_the_numbers_that_they_are_given(name, found, told, drawn, tmp_path, monkeypatch):
    figure = pytest.importorskip("matplotlib.figure").Figure
    axes, save, picture = [], figure.savefig, pictures.PICTURES[name]
    monkeypatch.setattr(figure, "savefig", lambda self, *a, **o: axes.extend(self.axes) or save(self, *a, **o))
    if name == "stages":
        (tmp_path / "stages").mkdir()
        (tmp_path / "stages" / "comparison.txt").write_text(STAGE)
        found = picture.find(SimpleNamespace(folder=tmp_path))
    pictures.save(picture, found, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes()[1:4] == b"PNG"
    assert picture.tell(found).endswith(told)
    bars = [bar.get_width() for ax in axes for bar in ax.patches]
    bars += [
        path.get_extents().width
        for ax in axes
        for bars in ax.collections
        for path in bars.get_paths()
        if name == "timeline"
    ]
    points = [dot for ax in axes for dots in ax.collections for dot in dots.get_offsets().tolist()]
    points = [dot[name == "roofline"] for dot in points if dot != [0, 0]]  # lines have none of their own
    assert (bars or points or [y for line in axes[0].lines for y in line.get_ydata()]) == pytest.approx(drawn)


def test_a_kernel_lies_on_the_roofline_where_what_was_timed_has_its_bytes():
    """RMSNorm without a residual add: four operations per element and two per row, 2 bytes in, 2 out, 4 per row."""
    candidates = [{"name": name, "us": {"median": us}} for name, us in (("V3", 1.0), ("PyTorch", 2.0))]
    norm = {"operation": "RMSNorm forward", "size": "1000 x 1024", "candidates": candidates}
    ceilings = {"copy": 4200.0, "product": {"bfloat16": 700.0}}
    found = {"operations": [norm], "dtype": "bfloat16", "ceilings": ceilings}
    ((name, flop_per_byte, ours, theirs),) = pictures.rates(SimpleNamespace(json=lambda *_: found))["points"]
    flops = 4 * 1024 + 2  # of a row
    assert (name, flop_per_byte) == ("RMSNorm", pytest.approx(flops / (4 * 1024 + 4), rel=1e-3))
    assert (ours, theirs) == (pytest.approx(flops / 1e3), pytest.approx(flops / 2e3))


def test_a_kernel_s_place_on_the_roofline_tells_the_bandwidth_that_was_timed():
    """The record's rates leave out what a row or a position has once: scales, labels, sines."""
    record = newest_record()
    timed = {
        one["operation"].removesuffix(" forward"): one["candidates"][0]["rate"]
        for one in record.json("kernels", "kernels.json")["operations"]
        if one["unit"] == "GB/s"
    }
    found = {name: 1e3 * ours / x for name, x, ours, _ in pictures.rates(record)["points"] if name in timed}
    assert len(found) == 4 and all(1 <= rate / timed[name] < 1.02 for name, rate in found.items())


def test_the_timeline_says_what_was_profiled_and_what_was_only_laid_end_to_end():
    kernels = {"v1": ["0.0 3.0 GEMM", "1997.0 3.0 GEMM"], "v4": ["0.0 1000.0 GEMM", "3000.0 1000.0 copies"]}
    rows = pictures.timelines(SimpleNamespace(json=lambda *_: {"kernels": kernels}))
    assert [title for title, _ in rows] == [
        "V1, eager, under the profiler: 2 kernels, 0.0 of 2 ms busy",
        "V4, eager, under the profiler: 2 kernels, 2.0 of 4 ms busy",
        "The same kernels of V4 laid end to end, without the gaps: 2.0 ms",
    ]
    assert rows[2][1] == [(0, 1000, "GEMM"), (1000, 1000, "copies")]
