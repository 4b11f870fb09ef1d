"""The table of formats is complete: a row, a function and a sample belong together, and the page lists them."""

import dataclasses
import importlib
import inspect
import pkgutil

import pytest
from test_profiles import SAMPLES, sample

import compare_versions
import generate_fusion_report
from common import profiles
from common.profiles import formats, read_profile
from common.profiles.comparison import compared
from common.profiles.containers import opened
from common.profiles.formats import FORMATS, table_of_formats
from common.versions import REPOSITORY
from maintain.pages import fill

# What the kernels and copies of each row's sample take in all, in ns, by hand: a unit that is forgotten is seen.
TOTAL_NS = {
    "pytorch/trace_gpu.json": 32000,
    "rocm-7.0/kernel_trace.csv": 30000,
    "rocm-7.0/results.sql": 30000,
    "rpd/trace.sql": 30000,
    "rocprof/results.sql": 32000,
    "nsys/report.sql": 32000,
    "rocprof-sys/kernels.proto": 13000,
    "rocm-7.0/results.json": 30000,
    "rocm-7.0/kernel_stats.csv": 30000,
    "pytorch/profile_v1.json": 32000,
}
NO_PROFILES = ("counter_collection", "domain_stats", "ncu/", "rocprof-compute", "wrappers/", "no_kernels")


def rows_like(name, folder):
    """Return the rows of the table that a sample looks like."""
    with opened(sample(name, folder)) as (container, content):
        return [one for one in FORMATS if one.container == container and one.looks_like(content)]


@pytest.mark.parametrize("row", FORMATS, ids=lambda row: row.sample)
def test_a_sample_looks_like_its_own_row_alone_and_is_read(row, tmp_path):
    assert rows_like(row.sample, tmp_path) == [row]
    assert sum(call.total_ns for call in read_profile(sample(row.sample, tmp_path)).calls) == TOTAL_NS[row.sample]


def test_every_sample_has_a_row(tmp_path):
    """One without a row is a format that somebody began to add."""
    for file in sorted(SAMPLES.rglob("*.*")):
        name = str(file.relative_to(SAMPLES))
        if file.is_file() and not any(word in name for word in NO_PROFILES):
            assert len(rows_like(name, tmp_path)) == 1, name


def test_every_reader_has_a_row():
    """A reader is a function read_*(path, content, gpu)."""
    found = set()
    for module in pkgutil.iter_modules(profiles.__path__):
        for name, function in inspect.getmembers(importlib.import_module(f"common.profiles.{module.name}")):
            is_reader = name.startswith("read_") and callable(function)
            if is_reader and [*inspect.signature(function).parameters] == ["path", "content", "gpu"]:
                found.add(function)
    assert found == {row.read for row in FORMATS}


def test_no_two_rows_share_a_sample_or_a_name_of_files():
    for values in ([row.sample for row in FORMATS], [name for row in FORMATS for name in row.files]):
        assert len(set(values)) == len(values)
    assert all(row.writer and row.files for row in FORMATS)
    assert set(formats.UNKNOWN) >= {row.container for row in FORMATS} - {"Perfetto trace"}


def test_the_page_lists_the_formats():
    """python scripts/maintain/ladder.py --write puts the table there."""
    text = (REPOSITORY / "scripts" / "ANY_PROFILE.md").read_text()
    assert "<!-- formats:begin -->" in text and fill(text, {"formats": table_of_formats()}) == text


def test_a_comparison_hands_on_what_its_profiles_lack():
    """The fusion report and compare_versions.py said nothing of lost kernels."""
    profile = read_profile(SAMPLES / "pytorch/trace_gpu.json", steps=1)
    lost = dataclasses.replace(profile, warnings=("2 of 9 launches have no kernel.",))
    found = compared({"baseline": profile, "fused": lost})
    row = {"name": "fused", "step_ms": {"median": 1.0}, "parameters": 1, "parameters_trained": 1}
    assert found.remarks == ["2 of 9 launches have no kernel."]
    assert found.remarks[0] in generate_fusion_report.findings([row, row], found)
    assert found.remarks[0] in str(compare_versions.kernel_section(found))
