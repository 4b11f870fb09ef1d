"""The facts behind sentences of the pages hold in the record; markers write the numbers of these sentences.

A failing test says that a claim is no longer true: look for it on the pages, and write what is.
"""

import math
import re
from types import SimpleNamespace

import pytest

from common.ratios import furthest, gain, ratios
from maintain import facts, ladder, pictures, rungs, warm_up
from maintain.pages import fill_facts
from maintain.records import RECORDED, newest_record

RECORD = newest_record()
OTHER = facts.newest_of("H200")
LADDERS = rungs.columns_of(RECORD, "ladder")
GRAPH, EAGER = (LADDERS["medium", way] for way in (True, False))
VERSION_3 = next(rung for rung in rungs.LADDER if rung.version == 3)
FP8 = next(rung for rung in rungs.LADDER if rung.base == VERSION_3.name)
PACKED = next(rung for rung in rungs.LADDER if rung.shown == "packed GEMMs")


def test_version_3_is_faster_than_its_peers_in_a_graph_and_not_eagerly():
    assert len(GRAPH.over_peers()) == len(EAGER.over_peers()) == 4
    assert all(GRAPH.gain(*pair).low > 1 for pair in GRAPH.over_peers())
    for column in (EAGER, LADDERS["small", False]):
        gains = [column.gain(*pair) for pair in column.over_peers()]
        assert [gain.high < 1 for gain in gains if gain.shown] == [True] * 3


def test_the_largest_gains_are_bfloat16_the_roads_and_attention_without_scores():
    gains = {name: GRAPH.gain(name, base).ratio for name, base in GRAPH.over_bases()}
    named = [rung for rung in rungs.LADDER if rung.road or rung.shown in ("bf16 matmuls", "no score matrix")]
    assert {*sorted(gains, key=gains.get)[-len(named) :]} == {rung.name for rung in named}


def test_eager_rows_of_medium_wait_for_the_host_version_3_most():
    rows = [row for row in RECORD.suite("graph")["rows"] if row["preset"] == "medium"]
    steps = {(row["model"], row["captured"]): row["step_ms"] for row in rows}
    waits = {model: steps[model, False] / steps[model, True] for model, _ in steps}
    assert max(waits, key=waits.get) == "v3" and sorted(waits.values())[-2] > 1.05


def test_version_3_starts_before_what_is_compiled_and_its_peers_import_longest():
    for starts in warm_up.presets_of(warm_up.parts_of(RECORD)).values():
        total = {name: warm_up.total_s(found, "empty") for name, found in starts.items()}
        assert all(max(total["h"]) < min(total[name]) for name in ("g", "j", "k", "peer", "updated"))
        imports = {name: warm_up.phases_s(found, "filled")["imports, model"] for name, found in starts.items()}
        assert {*sorted(imports, key=imports.get)[-2:]} == {"peer", "updated"}
        first = {name: warm_up.phases_s(found, "empty")["first step"] for name, found in starts.items()}
        assert 0.5 < first["k"] / first["updated"] < 1  # "wait as long"


@pytest.mark.parametrize("record", [RECORD, OTHER], ids=["newest", "H200"])
def test_no_verdict_in_a_graph_depends_on_the_noisiest_row(record):
    for column in (column for (_, graph), column in rungs.columns_of(record, "ladder").items() if graph):
        noisiest = math.log1p(column.noisiest()[1] / 100)
        found = [column.gain(*pair) for pair in (*column.over_peers(), *column.over_bases())]
        shown = [gain for gain in found if gain.shown]
        assert len(shown) > 7 and all(abs(math.log(gain.ratio)) > noisiest for gain in shown)


def test_packing_gains_at_small_alone_and_fp8_loses_there():
    columns = [LADDERS[preset, True] for preset in ("medium", "small")]
    assert [column.gain(PACKED.name, PACKED.base).shown for column in columns] == [False, True]
    assert [column.gain(FP8.name, FP8.base).high < 1 for column in columns] == [False, True]


@pytest.mark.parametrize("column", LADDERS.values(), ids=lambda column: column.title)
def test_only_with_a_graph_do_times_repeat_within_two_percent(column):
    assert (math.expm1(furthest(ratios(*column.pair()))) < 0.02) == column.content["graph"]


def test_fp8_differs_ten_times_as_much_as_bfloat16():
    errors = [
        [RECORD.row("v3", preset, p)["gradient_error"] for p in ("fp8", "bfloat16")] for preset in ("medium", "small")
    ]
    assert all(9.5 < fp8 / bf16 < 11.5 for fp8, bf16 in errors)


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_arithmetic_limits_the_gemms_of_gate_and_up_at_medium(phase):
    gemms = facts.step_counts("1", "bfloat16", "medium")["gate and up"][phase]
    assert gemms["flops"] / gemms["bytes"] > facts.values_of(RECORD, ["balance"])[0][0]


def test_two_gains_of_version_2_lie_far_apart_eagerly_at_medium():
    study = RECORD.json("ablation2", "ablation.json")
    assert study["options"] == ["--num-steps", "20", "--preset", "medium", "--use-amp", "--no-graph"]
    gains = {(row["switch"], key): row[key] for row in pictures.ablation(RECORD) for key in ("alone", "last")}
    far = {name for name, gain in gains.items() if gain.high / gain.low > 1.1}
    assert far == {("flash-attention", "alone"), ("torch-compile", "last")}


def variants_of_the_peer(record):
    """Return the columns of medium in a graph, and {way to run the peer: its step in ms}."""
    columns = [column for column in rungs.all_columns(record.holding("peers"), "peers") if column.content["graph"]]
    columns = [column for column in columns if column.content["preset"] == "medium"]
    return columns, {name: ms for column in columns for name in column.rungs if (ms := column.step_ms(name))}


def test_the_same_variants_of_the_peer_are_the_fastest_on_both_gpus():
    ours, theirs = (variants_of_the_peer(record)[1] for record in (RECORD, OTHER))
    for is_fp8 in (False, True):
        both = [name for name in ours.keys() & theirs.keys() if name.startswith("fp8") == is_fp8]
        assert min(both, key=ours.get) == min(both, key=theirs.get)


def test_the_slowest_compiler_is_no_faster_than_the_default_of_the_same_measurement():
    columns, _ = variants_of_the_peer(OTHER)
    steps = [[column.step_ms(name) for name in (rungs.SLOW_PEER.name, "compiled")] for column in columns]
    (slow, default) = next(both for both in steps if all(both))
    assert slow > default


def test_versions_3_and_4_run_more_than_seven_times_as_fast_in_a_graph():
    rows = RECORD.suite("graph")["rows"]
    steps = {(row["model"], row["captured"]): row["step_ms"] for row in rows if row["preset"] == "small"}
    assert 7 < min(steps[model, False] / steps[model, True] for model in ("v3", "v4")) < 8


def test_kernels_cost_more_than_four_times_as_many_lines_as_libraries():
    assert 4 < facts.lesson_lines(3) / facts.lesson_lines(4) < 5


def test_the_scores_in_the_picture_of_levels_are_those_of_medium():
    assert pictures.SIZES["scores of a layer"] == facts.values_of(RECORD, ["scores", "medium"])[0][0]


def test_a_graph_of_the_whole_step_takes_no_memory():
    rows = RECORD.suite("graph")["rows"]
    peaks = {(row["model"], row["preset"], row["captured"]): row["peak_memory_mb"] for row in rows}
    found = [(peaks[model, preset, True], eager) for (model, preset, captured), eager in peaks.items() if not captured]
    assert len(found) >= 10 and all(abs(graph - eager) < 1 for graph, eager in found)


NEAR_A_COPY = {"RMSNorm forward", "RMSNorm + residual forward", "SwiGLU forward"}


def test_only_in_the_forward_of_norm_and_swiglu_do_all_three_run_at_about_a_copy_s_speed():
    _, _, runs = ladder.kernels_of_rivals(RECORDED)
    for run in runs:
        near = set()
        for operation in run["operations"]:
            three = [c["share"] for c in operation["candidates"] if c["name"] in ("V3", *ladder.RIVALS)]
            if operation["unit"] == "GB/s" and len(three) == 3 and all(0.9 < share < 1.05 for share in three):
                near.add(operation["operation"])
        assert near == NEAR_A_COPY


def test_only_attention_and_adamw_have_no_other_rival_than_pytorch():
    _, _, runs = ladder.kernels_of_rivals(RECORDED)
    alone = {name for name, _, ratios in ladder.against_v3(runs) if not ratios.keys() & {*ladder.RIVALS}}
    assert {re.split("[, ]", name)[0] for name in alone} == {"attention", "AdamW"}


# ---------------------------------------------------------------- markers

KNOWN = {"two": (1.5, 2500), "none": (None,), "bytes": (3 * 2**20,)}


def known(words):
    if words[0] not in KNOWN:
        raise ValueError("unknown")
    return KNOWN[words[0]], facts.UNITS["bytes" if words[0] == "bytes" else "time"]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("3 of 1.44 to 2,400.1 ms<!-- two -->", "3 of 1.50 to 2,500.0 ms<!-- two -->"),
        ("| 1 | 2400<!-- two in ms --> |", "| 2 | 2500<!-- two in ms --> |"),
        ("*it took (0.2 or\n99) s<!-- two -->, v3*", "*it took (0.0 or\n2) s<!-- two -->, v3*"),
        ("... and ... ms<!-- two -->", "1.50 and 2,500 ms<!-- two -->"),
        ("of 12.5 ms<!-- none -->, 9 MiB<!-- bytes -->", "of ... ms<!-- none -->, 3 MiB<!-- bytes -->"),
        ("<!-- x:begin -->\n1\n<!-- x:end -->", "<!-- x:begin -->\n1\n<!-- x:end -->"),
    ],
)
def test_a_marker_s_numbers_keep_their_form(text, wanted):
    assert fill_facts(text, known) == (wanted, [])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("1 ms<!-- three -->", "unknown"),
        ("v3, 1 ms<!-- two -->", "there must be 2 numbers before it"),
        ("1 to 2 MiB<!-- two -->", "'MiB' is none of its units: us, ms, s"),
        ("1 to 2<!-- two -->", "'' is none of its units"),
        ("1 to 2 of all<!-- two in ms -->", "its number must stand before it, not 'of all'"),
    ],
)
def test_a_marker_without_a_fact_number_or_unit_is_named(text, said):
    found, faults = fill_facts(text, known)
    assert found == text and len(faults) == 1 and said in faults[0]


def test_terms_of_constants_are_calculated_in_the_unit_of_the_sentence():
    text = "1 and 0 MiB<!-- calc 2**20 ceil(5/4)*2**20 -->, 1 %<!-- calc 1-4/7 -->, 1.00<!-- calc 1/0.6 -->"
    wanted = "1 and 2 MiB<!-- calc 2**20 ceil(5/4)*2**20 -->, 43 %<!-- calc 1-4/7 -->, 1.67<!-- calc 1/0.6 -->"
    assert fill_facts(text, lambda words: facts.values_of(RECORD, words)) == (wanted, [])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("no_fact medium", "maintain/facts.py has no no_fact"),
        ("step v3 huge float32", "huge is none of tiny, small, medium"),
        ("rung medium graph zz", "zz is none of a, b"),
        ("launches 1 float32", "launches does not take these words"),
        ("calc 1/0", "1/0 cannot be calculated: division by zero"),
        ("calc open('file')", "cannot be calculated: name 'open' is not defined"),
        ("calc 4*", "4* cannot be calculated: invalid syntax"),
        ("copy on Z80", "there is no record of Z80"),
        (f"gain medium graph {PACKED.name} {PACKED.base}", "no difference shown, so it has no number"),
    ],
)
def test_wrong_words_of_a_marker_are_named(words, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        facts.values_of(RECORD, words.split())


@pytest.mark.parametrize(("name", "times", "value"), [("time_saved", 0.5, 0.5), ("time_added", 2.0, 1.0)])
def test_a_switch_has_a_number_where_a_difference_is_shown(monkeypatch, name, times, value):
    noise = [[1.0] * 5, [1.1] * 5]
    found = {"large": gain([1.0] * 5, [times] * 5, pair=noise), "small": gain([1.0] * 5, [1.05] * 5, pair=noise)}
    monkeypatch.setattr(facts, "switches", lambda record: found)
    assert facts.values_of(RECORD, [name, "large"])[0] == [value]
    with pytest.raises(ValueError, match="small: no difference shown"):
        facts.values_of(RECORD, [name, "small"])


@pytest.mark.parametrize(("rounds", "value"), [(4, None), (5, 2.0)])
def test_a_gain_of_too_few_rounds_has_no_value(monkeypatch, rounds, value):
    """Like one that nobody measured; it is no fault of the page."""
    found = gain([2.0] * rounds, [1.0] * rounds, pair=([1.0] * rounds, [1.0] * rounds))
    monkeypatch.setattr(facts, "column_of", lambda *words: SimpleNamespace(gain=lambda name, base: found))
    assert facts.values_of(RECORD, "gain medium graph h f".split())[0] == [value]
    assert facts.values_of(RECORD, "gain_with_range medium graph h f".split())[0] == [value] * 3


def test_a_fact_whose_part_the_record_lacks_has_no_value(tmp_path):
    empty = type(RECORD)(tmp_path / "empty")
    for words in "copy; attention 16 512; rung small graph a; stage 1 step; longer_backwards".split("; "):
        found, _ = facts.values_of(empty, words.split())
        assert {*found} == {None}, words
