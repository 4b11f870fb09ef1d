"""TINY_LLAMA_ARCHITECTURE.md: its names, links and formulas."""

import re

import model_counts
from common.gpus import GPUS, peak_tflops
from common.versions import REPOSITORY, SCRIPTS, load_version

PAGE_TEXT = (REPOSITORY / "TINY_LLAMA_ARCHITECTURE.md").read_text(encoding="utf-8")


def names_of(version):
    """Return the functions, classes and constants that a script defines."""
    found = re.findall(r"^\s*(?:def|class) (\w+)|^(\w+) = ", SCRIPTS[version].read_text(), re.MULTILINE)
    return {name for pair in found for name in pair if name}


def test_every_formula_stands_where_the_page_says():
    table = PAGE_TEXT.split("### Where each formula stands")[1].split("##")[0]
    lines = [line.strip("|").split("|") for line in table.strip().splitlines()][2:]
    assert len(lines) > 5
    for line in lines:
        for versions, cell in zip(((1, 2), (3,), (4,)), line[1:], strict=True):
            names = re.findall(r"`(\w+)`", cell)
            assert names, line
            for version in versions:
                assert set(names) <= names_of(version), (version, names)


def test_every_name_of_code_in_the_page_exists():
    known = {"foreach", "dq", "dk", "dv", *load_version(1).PRESETS}.union(*map(names_of, SCRIPTS))
    text = re.sub(r"```.*?```", "", PAGE_TEXT, flags=re.DOTALL)
    for code in re.findall(r"`([^`]+)`", text):
        if code.startswith(("python ", "scripts/")):
            assert (REPOSITORY / re.search(r"scripts/[\w./-]+", code)[0]).exists(), code
        else:
            assert set(code.split(".")) <= known | {"forward"}, code


# What GitHub's MathJax renders, as far as the page uses it; \operatorname, \bm and own macros are refused there.
COMMANDS = set(
    "beta bigl bigr Bigl Bigr begin cdot cos Delta delta ell end epsilon eta exp frac hat in infty lambda le leftarrow "
    "lfloor log Longrightarrow mathbb mathbf mathcal mathrm max odot partial qquad quad rfloor sigma sin sqrt sum text "
    "tfrac theta times top varepsilon".split()
)


def test_formulas_are_what_github_renders():
    blocks = re.findall(r"```math\n(.*?)```", PAGE_TEXT, re.DOTALL)
    text = re.sub(r"```.*?```|`[^`\n]*`", "", PAGE_TEXT, flags=re.DOTALL)
    inline = re.findall(r"\$([^$\n]+)\$", text)
    assert len(blocks) > 10 and len(inline) > 50 and text.count("$") == 2 * len(inline)
    for formula in (*blocks, *inline):
        assert set(re.findall(r"\\([A-Za-z]+)", formula)) <= COMMANDS, formula
        depth = [0]
        for sign in re.sub(r"\\[{}]", "", formula):
            depth.append(depth[-1] + {"{": 1, "}": -1}.get(sign, 0))
        assert min(depth) == 0 == depth[-1], formula
        assert re.findall(r"\\begin{(\w+)}", formula) == re.findall(r"\\end{(\w+)}", formula)
        assert len(re.findall(r"\\[bB]igl", formula)) == len(re.findall(r"\\[bB]igr", formula))
    for formula in inline:  # there Markdown reads a backslash before punctuation, and emphasis, before the formula
        assert not re.search(r"\\[^A-Za-z]|[^\w]_|\*", formula), formula
        assert formula == formula.strip(), formula


def test_tables_have_the_columns_of_their_headers():
    for table in re.findall(r"(?:^\|.*\n)+", PAGE_TEXT, re.MULTILINE):
        columns = [line.count("|") for line in table.strip().splitlines()]
        assert len(set(columns)) == 1, table[:80]


def test_peaks_of_gpus_are_those_that_the_counts_use():
    rows = re.findall(r"^\| ([A-Z]+\d+\w*) \| (\S+) \| (\S*) *\| (\S+) \| (\S+) \| ", PAGE_TEXT, re.MULTILINE)
    assert [gpu for gpu, *_ in rows] == list(model_counts.GPUS)
    for gpu, *peaks, bandwidth in rows:
        found = [peak_tflops(gpu, precision) for precision in ("float32", "tf32", "bfloat16")]
        assert peaks == ["" if peak is None else f"{peak:,.1f}" for peak in found], gpu
        assert float(bandwidth) == GPUS[gpu].tb_s


def test_published_numbers_are_corrected_by_the_tables():
    rows = re.findall(r"^\| .*, in each layer \| (\d+) \+ (\d+) \| (\d+) \+ (\d+) ", PAGE_TEXT, re.MULTILINE)
    forward, backward, *version_2 = (sum(map(int, column)) for column in zip(*rows, strict=True))
    assert f"| {forward} forward, {backward} backward |" in PAGE_TEXT
    assert f"| {1 - sum(version_2) / (forward + backward):.0%} of a layer |" in PAGE_TEXT
