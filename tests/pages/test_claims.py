"""Numbers that the pages' sentences take from the record or from the counts are those of the record and the counts."""

import itertools
import math
import re
import statistics

import pytest

from common import counts
from common.ratios import furthest, ratios
from common.versions import REPOSITORY, load_version
from maintain import pictures, rungs
from maintain.losses import QUANTITIES, judged, recorded_losses
from maintain.records import RECORDED, Record, newest_record

RECORD = newest_record()
SMALL = counts.sizes_of(load_version(1).parse_options(["--preset", "small", "--device", "cpu"]))
MEDIUM = counts.sizes_of(load_version(1).parse_options(["--preset", "medium", "--device", "cpu"]))


def text_of(page):
    return " ".join((REPOSITORY / page).read_text(encoding="utf-8").split())


def longer_backwards():
    """Return by how much version 3's backward is longer on two GPUs than on one, for each round."""
    found = {}
    for run in RECORD.holding("ddp").suite("ddp")["runs"]:
        if run["case"].model == "v3":
            found[run["repeat"], run["case"].processes] = run["summary"]["backward_ms"]
    return [found[turn, 2] - found[turn, 1] for turn in (0, 1)]


def four_gpus():
    """Return the times of version 3 alone on each of four GPUs, and the efficiency on two and on four."""
    results = RECORD.holding("ddp_four_gpus").json("ddp_four_gpus", "suite.json")
    runs = [run for run in results["runs"] if run["case"]["model"] == "v3"]
    times = [(run["case"]["processes"], run["summary"]["step_ms"]["median"]) for run in runs]
    alone = sorted(time for processes, time in times if processes == 1)
    return alone, [statistics.median(alone) / dict(times)[processes] for processes in (2, 4)]


def kernels():
    """Return {(operation, size): its candidates}, the first of them version 3's."""
    found = RECORD.json("kernels", "kernels.json")["operations"]
    return {(operation["operation"], operation["size"]): operation["candidates"] for operation in found}


def terabytes(operation):
    (rate,) = (candidates[0]["rate"] for (name, _), candidates in kernels().items() if name == operation)
    return f"{rate / 1000:.2f}"


def attention(size):
    candidates = kernels()["attention forward + backward", f"{size}, 16 / 8 heads of 64"]
    ours, *others = (found["us"]["median"] for found in candidates if "us" in found)
    return ours, min(others)


def kernels_of_the_timeline():
    """Return {"v1" or "v4": a line with start, duration in us and group for each kernel of a step}."""
    return RECORD.json("timeline", "timeline.json")["kernels"]


def groups():
    """Return {group: (ms, percentage)} of version 1's kernels in the timeline's step."""
    words = [kernel.split(maxsplit=2) for kernel in kernels_of_the_timeline()["v1"]]
    words = sorted((group, float(duration) / 1000) for _, duration, group in words)
    found = {group: sum(ms for _, ms in same) for group, same in itertools.groupby(words, key=lambda word: word[0])}
    return {group: (ms, 100 * ms / sum(found.values())) for group, ms in found.items()}


def stages():
    """Return {stage: {"step", "forward", "backward", "optimizer" in ms, "peak" in MiB}} of the recorded comparison."""
    lines = (RECORD.folder / "stages" / "comparison.txt").read_text().splitlines()[2:]
    places = {"step": 1, "forward": 5, "backward": 6, "optimizer": 7, "peak": 8}
    cells = [line.split() for line in lines]
    return {int(row[0]): {name: float(row[place]) for name, place in places.items()} for row in cells}


def slower_without(switch):
    """Return how much longer a step is without a kernel of version 3, in ms, and how many more kernels it has."""
    combinations = {found["name"]: found for found in RECORD.json("ablation3", "ablation.json")["combinations"]}
    without, complete = combinations[f"all but {switch}"], combinations["all"]
    return without["step_ms"] - complete["step_ms"], without["kernels"] - complete["kernels"]


def megabytes(version, part, *phases):
    """Return the MB of a part of a step of small in float32, in these phases or in both."""
    found = counts.step_counts(version, "float32", SMALL)[part]
    return sum(found[phase]["bytes"] for phase in phases or ("forward", "backward")) / 1e6


def claims_of_the_ladder():
    medium = rungs.columns_of(RECORD, "ladder")["medium", True]
    losses = [medium.told[name]["loss"] for name in "bcdefghk"]
    told = (
        f"ends at {medium.told['i']['loss']:.3f}, that of the bfloat16 rows at {min(losses):.3f} to {max(losses):.3f}"
    )
    yield "version3_triton/README.md", told
    gains = {name: medium.gain(name, rung.base).ratio for name, rung in medium.rungs.items() if rung.base}
    assert set(sorted(gains, key=gains.get)[-5:]) == {*"bdghk"} and max(gains, key=gains.get) == "b"
    told = "from bfloat16 (b), from the three roads (g, h, k), and from attention without a score matrix (d)"
    yield "README.md", f"The gains are those in a graph. At medium, the table here, the largest come {told}."
    host = rungs.columns_of(RECORD, "ladder")["medium", False]
    waits = {name: host.step_ms(name) / medium.step_ms(name) for name in "abcdefghik"}
    assert sum(wait > 1.15 for wait in waits.values()) > 5 and set(sorted(waits, key=waits.get)[-2:]) == {"h", "i"}
    yield "README.md", "At medium most eager rows wait for this record's host too, h and i most"
    records = RECORD, Record(RECORDED / "nvidia-h200_2026-11-23")
    columns = [found for record in records for found in rungs.columns_of(record, "ladder").items()]
    for column in (column for (_, graph), column in columns if graph):
        furthest_row = math.log1p(column.noisiest()[1] / 100)
        pairs = [*column.over_peers(), *column.over_bases()]
        shown = [found for name, base in pairs if (found := column.gain(name, base)).shown]
        assert len(shown) > 7 and all(abs(math.log(found.ratio)) > furthest_row for found in shown)
    yield "README.md", "if a gain had to be larger than its furthest, no verdict in a graph would change"
    for ours, theirs in medium.over_peers():
        assert medium.step_ms(ours) < medium.step_ms(theirs) and host.step_ms(ours) > host.step_ms(theirs)
    yield "README.md", "compare version 3 with them: in a graph it is faster, eagerly slower"

    eager, graph = (rungs.columns_of(RECORD, "ladder")["small", way].step_ms("b") for way in (False, True))
    launches = counts.total(counts.step_counts(1, "bfloat16", SMALL), "launches")
    yield "exercises/GPU.md", f"takes {eager:.2f} ms in eager PyTorch and {graph:.2f} ms in a graph"
    told = f"{launches:,} launches become one: the host needs {1000 * eager / launches:.0f} us for each"
    yield "exercises/GPU.md", told


def claims_of_fp8():
    errors = {preset: RECORD.row("v3", preset, "fp8")["gradient_error"] for preset in ("medium", "small")}
    bf16 = {preset: RECORD.row("v3", preset, "bfloat16")["gradient_error"] for preset in errors}
    assert all(9.5 < errors[preset] / bf16[preset] < 11.5 for preset in errors)
    yield "README.md", "float32's about ten times as much as bfloat16's do"
    yield "version3_triton/README.md", f"by {errors['medium']:.2f} (relative), bfloat16's by {bf16['medium']:.2f}"
    told = f"by {errors['medium']:.2f} (small: {errors['small']:.2f}), about ten times as much"
    yield "version3_triton/NOTEBOOK.md", told
    runs = recorded_losses(RECORD)
    assert not any(judged(runs, "fp8", quantity).shown for quantity in QUANTITIES)
    for page in ("README.md", "version3_triton/README.md", "version3_triton/NOTEBOOK.md"):
        yield page, "no difference to bfloat16's loss was shown"


def claims_of_kernels():
    ceilings = RECORD.json("kernels", "kernels.json")["ceilings"]
    copy, rates = ceilings["copy"] / 1000, ceilings["product"]
    flops = sum(counts.required_flops(MEDIUM).values())
    told = f"{flops / 1e12:.2f} TFLOP need about {flops / rates['float32'] / 1e9:.0f} ms of"
    yield "version3_triton/README.md", told
    yield "exercises/GPU.md", f"{rates['bfloat16']:.0f} / {copy:.2f} = {rates['bfloat16'] / copy:.0f} FLOP per byte"
    page = "exercises/14_tf32_bf16/README.md"
    yield page, f"[{rates['tf32']:.0f} TFLOP/s in TF32 and {rates['float32']:.0f} in float32]"
    percent = 300 * rates["float32"] / rates["tf32"]
    yield page, f"3 · {rates['float32']:.0f} / {rates['tf32']:.0f} = {percent:.0f} %"

    rate = {name: terabytes(name) for name, _ in kernels() if not name.startswith("attention")}
    page = "version3_triton/exercises/exercise1_triton_basics.md"
    yield page, f"(copy {copy:.2f} TB/s): RMSNorm {rate['RMSNorm forward']} TB/s forward and {rate['RMSNorm backward']}"
    yield page, f"add {rate['RMSNorm + residual forward']} and {rate['RMSNorm + residual backward']}, RoPE"
    yield page, f"RoPE {rate['RoPE forward']} and {rate['RoPE backward']}, SwiGLU {rate['SwiGLU forward']} and"
    yield page, f"and {rate['SwiGLU backward']}, AdamW {rate['AdamW, float32']}."
    page = "version3_triton/exercises/exercise2_swiglu_optimization.md"
    told = (
        f"{rate['SwiGLU forward']} TB/s forward and {rate['SwiGLU backward']} backward, where a copy reaches {copy:.2f}"
    )
    yield page, told
    times = [attention(f"batch {batch}, {8192 // batch} tokens") for batch in (16, 4, 1)]
    told = [f"{ours:.0f} us against {theirs:.0f}" for ours, theirs in times[:1]]
    told += [f"{ours:.0f} against {theirs:.0f}" for ours, theirs in times[1:]]
    page = "version3_triton/exercises/exercise3_flash_attention.md"
    yield page, f"512 tokens {told[0]}, 2048 tokens {told[1]}, 8192 tokens {told[2]}."

    ms, more = slower_without("rmsnorm-kernel")
    told = f"has {more:.0f} more kernels and takes {ms:.2f} ms longer. That is {1000 * ms / more:.1f} us per kernel"
    yield "version3_triton/README_WORKSHOP.md", told


def claims_of_version_2():
    """Yield what its switches gain, eagerly: the packings save kernels, and hardly time."""
    found = {row["switch"]: row for row in pictures.ablation(RECORD)}
    study = RECORD.json("ablation2", "ablation.json")
    assert study["options"] == ["--num-steps", "20", "--preset", "medium", "--use-amp", "--no-graph"]
    kernels = {row["name"]: row["kernels"] for row in study["combinations"]}
    qkv, swiglu = (kernels["none"] - kernels[switch] for switch in ("qkv-fusion", "swiglu-fusion"))
    percent = 100 - 100 / found["qkv-fusion"]["alone"].ratio
    page = "version2_pytorch_fused/README.md"
    yield page, f"Added to none, packing q, k and v saves {qkv:.0f} kernels and {percent:.0f} % of the time."
    gain = found["swiglu-fusion"]["alone"]
    assert gain.shown
    told = f"saves {swiglu:.0f} kernels, and the step takes {100 / gain.ratio - 100:.0f} % longer"
    yield page, f"Packing gate and up {told}"
    first, second = (counts.step_counts(version, "bfloat16", MEDIUM)["SwiGLU"] for version in (1, 2))
    more = sum(second[phase]["bytes"] - first[phase]["bytes"] for phase in ("forward", "backward"))
    ceilings = RECORD.json("kernels", "kernels.json")["ceilings"]
    copy = ceilings["copy"]
    for phase in ("forward", "backward"):
        gemms = counts.step_counts(1, "bfloat16", MEDIUM)["gate and up"][phase]
        assert gemms["flops"] / ceilings["product"]["bfloat16"] / 1e12 > gemms["bytes"] / copy / 1e9
    yield page, "these GEMMs are limited by arithmetic"
    yield page, f"the activation moves {more / 1e9:.1f} GB more, {more / copy / 1e6:.1f} ms at a copy's rate"
    steps = {row["name"]: row["step_ms"] for row in study["combinations"]}
    yield page, f"The step takes {steps['swiglu-fusion'] - steps['none']:.1f} ms longer"
    gains = {(switch, key): row[key] for switch, row in found.items() for key in ("alone", "last")}
    far = {name for name, gain in gains.items() if gain.high / gain.low > 1.1}
    assert far == {("flash-attention", "alone"), ("torch-compile", "last")}
    yield page, "two gains lie far apart: flash attention added to none, and torch.compile added to all others"
    columns = [rungs.columns_of(RECORD, "ladder")[preset, True] for preset in ("medium", "small")]
    assert [column.gain("e", "d").shown for column in columns] == [False, True]
    yield page, "it shows no difference at medium, and a gain at small"
    product = math.prod(row["alone"].ratio for row in found.values())
    told = f"the gains added to none multiply to {product:.1f}x, and all switches together gain"
    page = "version2_pytorch_fused/exercises/exercise_4_ablation.md"
    yield page, f"{told} {steps['none'] / steps['all']:.1f}x"


def claims_of_launches():
    page = "version1_pytorch_baseline/README.md"
    found = groups()
    for name, (ms, percent) in found.items():
        if name not in ("other", "normalisation"):
            yield page, f"| {name} | {ms:.2f} | {percent:.0f} |"
    ms, percent = (a + b for a, b in zip(found["other"], found["normalisation"], strict=True))
    yield page, f"| other, norms | {ms:.2f} | {percent:.0f} |"
    lines = {name: [line.split() for line in found] for name, found in kernels_of_the_timeline().items()}
    busy = {name: sum(float(us) for _, us, _ in found) / 1000 for name, found in lines.items()}
    yield page, f"in bfloat16, on an H100, has {len(lines['v1']):,} kernels, which took {busy['v1']:.1f} ms together"
    yield page, f"where those {busy['v1']:.1f} ms go"
    yield "version4_pytorch_sdpa/README.md", f"version 4's kernels laid end to end, {busy['v4']:.2f} ms"
    launches = counts.total(counts.step_counts(1, "float32", SMALL), "launches")
    yield page, f"without autocast's casts, there are about {launches:,}"
    row = RECORD.row("v1", "small", "float32")
    exercises = "version1_pytorch_baseline/exercises/exercise_1_baseline_analysis.md"
    others = [
        run["summary"]["backward_ms"] / run["summary"]["forward_ms"]
        for run in Record(RECORDED / "nvidia-h200_2026-11-23").suite()["runs"]
        if run["case"][:2] == ("v1", "small") and run["case"].precision == "float32"
    ]
    first, second = sorted(others)
    told = f"it is {row['backward_ms'] / row['forward_ms']:.2f} on the recorded H100"
    yield exercises, f"{told}, and {first:.2f} and {second:.2f} in two starts on H200s"


def claims_of_several_gpus():
    first, second = longer_backwards()
    yield "scripts/SCALING.md", f"version 3's backward took {first:.1f} and {second:.1f} ms longer"
    backward = [
        run["summary"]["backward_ms"]
        for run in RECORD.suite("ddp")["runs"]
        if run["case"].model == "v3" and run["case"].processes == 1
    ]
    yield "scripts/SCALING.md", f"compared with a backward of {statistics.mean(backward):.0f} ms"
    alone, (two, four) = four_gpus()
    told = f"the same step, run once on each, took {alone[0]:.2f} to {alone[-1]:.2f} ms"
    yield "scripts/SCALING.md", f"On a host with four H200 GPUs (an older record) {told}"
    yield "scripts/SCALING.md", f"an efficiency of {two:.3f} on two and {four:.3f} on four"


def claims_of_kernels_and_libraries():
    """Rows h and k of both ladders in a graph: their steps, and how much faster h is in the rounds of both."""
    columns = [rungs.columns_of(RECORD, "ladder")[preset, True] for preset in ("small", "medium")]
    (h, k), (h_medium, k_medium) = ([f"{column.step_ms(name):.4g}" for name in "hk"] for column in columns)
    gains = " and ".join(str(column.gain("h", "k")) for column in columns)
    told = f"row h takes {h} ms at small and {h_medium} ms at medium, row k {k} and {k_medium}: h is faster by {gains}"
    yield "version4_pytorch_sdpa/README.md", told


def claims_of_two_gpus():
    """Row i of both GPUs, and how far the A/A pair of the H200 is from itself."""
    other = Record(RECORDED / "nvidia-h200_2026-11-23")
    ours, theirs = (rungs.columns_of(record, "ladder")["medium", True] for record in (RECORD, other))
    gains = [column.gain("i", "h").ratio for column in (ours, theirs)]
    page = "version3_triton/NOTEBOOK.md"
    yield page, f"{gains[0]:.2f} times as fast as bfloat16 on the recorded H100 and {gains[1]:.2f} times on the H200"
    noise = 100 * (math.exp(furthest(ratios(*theirs.pair()))) - 1)
    yield page, f"under two names, differs by up to {noise:.1f} %"
    for record in (RECORD, other):
        columns = [column for column in rungs.all_columns(record, "peers") if column.content["preset"] == "medium"]
        steps = {name: step for column in columns for name in column.rungs if (step := column.step_ms(name))}
        for is_fp8, fastest in ((False, "compiled"), (True, "fp8 tensorwise")):
            assert min((name for name in steps if name.startswith("fp8") == is_fp8), key=steps.get) == fastest
    yield "README.md", "were timed at medium on both GPUs, and the same ones were the fastest"


def claims_of_graphs():
    """Versions 3 and 4 at small, on the hosts of the graph part and of the ladder."""
    gains = []
    for model in ("v3", "v4"):
        rows = [row for row in RECORD.suite("graph")["rows"] if (row["model"], row["preset"]) == (model, "small")]
        steps = {row["captured"]: row["step_ms"] for row in rows}
        gains.append(steps[False] / steps[True])
    part = rungs.read_columns(RECORD.folder / "ladder-small" / "ladder.json")
    graph, eager = (next(column for column in part if column.content["graph"] is way) for way in (True, False))
    assert graph.content["record"]["host"] != RECORD.suite("graph")["record"]["host"]
    gains += [eager.step_ms(name) / graph.step_ms(name) for name in "hk"]
    assert 7 < min(gains) < 8
    told = "ran more than seven times as fast with one as without, on each of two hosts"
    yield "exercises/15_graph_capture/README.md", told


def claims_of_peers():
    column = rungs.columns_of(RECORD.holding("peers"), "peers")["medium", True]
    slow = column.told[rungs.SLOW_PEER.name]
    seconds = f"it was ready after {slow['warm_s']:.0f} seconds"
    assert all(not {"compiled", rungs.SLOW_PEER.name} <= found["steps_ms"].keys() for found in column.rounds)
    yield "README.md", f"{seconds} and, in rounds of its own, no faster than the default"
    assert column.step_ms(rungs.SLOW_PEER.name) > column.step_ms("compiled")


def claims_of_stages():
    page = "version3_triton/exercises/performance_debugging/WORKSHOP_GUIDE.md"
    found = stages()
    clock, slow, right, phantom = (found[stage] for stage in (3, 4, 5, 6))
    phases = clock["forward"] + clock["backward"] + clock["optimizer"]
    yield page, f"the step takes {clock['step']:.2f} ms, and its three phases take {phases:.1f} ms together"
    told = f"On one H100 the forward takes {found[2]['forward']:.1f} ms instead of {right['forward']:.1f}."
    yield page, told
    told = f"the forward takes {slow['forward']:.1f} ms and the backward {slow['backward']:.1f} ms; in stage 5 they"
    yield page, f"{told} take {right['forward']:.1f} and {right['backward']:.1f} ms"
    told = f"takes {phantom['step']:.1f} ms instead of {right['step']:.1f} ms and peaks at {phantom['peak']:.0f} MiB"
    yield page, f"{told} instead of {right['peak']:.0f} MiB"
    yield page, f"takes {phantom['backward']:.2f} ms, less than the forward's {phantom['forward']:.1f} ms"


def claims_of_counts():
    page = "version2_pytorch_fused/README.md"
    long = counts.sizes_of(load_version(1).parse_options(["--preset", "small", "--seq-len", "1024", "--device", "cpu"]))
    first, second = (counts.step_counts(version, "float32", long)["attention"] for version in (1, 2))
    scores, flash = (sum(found[phase]["bytes"] for phase in ("forward", "backward")) for found in (first, second))
    yield page, f"moves {scores / flash:.0f} times as many bytes per layer in float32, forward and backward"
    before, after = (megabytes(version, "QKV projection", "forward") for version in (1, 2))
    yield page, f"from {before:.0f} to {after:.0f} MB in the forward of small"
    gemms, swiglu = ([megabytes(version, part) for version in (1, 2)] for part in ("gate and up", "SwiGLU"))
    yield page, f"the GEMMs move {gemms[1]:.0f} instead of {gemms[0]:.0f} MB"
    yield page, f"the activation moves {swiglu[1]:,.0f} instead of {swiglu[0]:.0f} MB"
    yield page, f"The sum **rises** by {100 * ((gemms[1] + swiglu[1]) / (gemms[0] + swiglu[0]) - 1):.0f} %"
    norms, swiglu, rope = (
        [megabytes(version, part) for version in (2, 3)] for part in ("norms and residual", "SwiGLU", "RoPE")
    )
    page = "version3_triton/README_WORKSHOP.md"
    yield page, f"The norms, twice: {norms[0]:,.0f} MB become {norms[1]:.0f}"
    yield page, f"{swiglu[0]:,.0f} MB become {swiglu[1]:.0f}."
    yield page, f"RoPE saves the largest fraction, {100 * (1 - rope[1] / rope[0]):.0f} %"


# Every function of that name, so that none is left out of a list.
CLAIMS = [claim for name, claims in list(globals().items()) if name.startswith("claims_of_") for claim in claims()]


@pytest.mark.parametrize(("page", "told"), CLAIMS, ids=str)
def test_a_sentence_says_what_was_recorded_or_counted(page, told):
    assert told in text_of(page)


def test_the_scaling_page_says_how_long_a_rank_waits():
    script = (REPOSITORY / "version1_pytorch_baseline" / "tiny_llama_v1.py").read_text(encoding="utf-8")
    (minutes,) = re.findall(r"timeout = datetime\.timedelta\(minutes=(\d+)\)", script)
    assert f"No rank waits longer than {minutes} minutes" in text_of("scripts/SCALING.md")


def test_the_scores_in_the_picture_of_levels_are_those_of_medium():
    assert pictures.SIZES["scores of a layer"] == 4 * MEDIUM.B * MEDIUM.H * MEDIUM.T**2  # float32
