"""Hold the checker's refusals at their limits: the element beside a tensor, one byte more than a rank's share."""

import pathlib
import shutil
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from common.measuring.guarded_memory import BAND, between_bands, bits, mark, stray_store
from common.versions import REPOSITORY, relative_error

sys.path.insert(0, str(REPOSITORY / "exercises"))

import answers
import grading
import judge
import on_gpus
import one_rank
import own_kernel
import ranks
import strict_interpreter as strict
import verify

EXERCISES = {path.name[:2]: path for path in (REPOSITORY / "exercises").glob("[0-9][0-9]_*")}


def raises(check, kind, said):
    with pytest.raises(judge.Wrong, match=said) as caught:
        check()
    assert caught.value.kind == kind


# ---------------------------------------------------------------- loads, stores and bands

PROGRAMS = (2, 3, 1)


def builder(x=0, y=0, z=0, grid=PROGRAMS):
    return SimpleNamespace(grid_idx=(x, y, z), grid_dim=grid)


def watched(is_output=False, dtype=torch.float32):
    """Return a watch over a tensor of five elements between guard bands, and the tensor."""
    tensor = between_bands(torch.zeros(5, dtype=dtype))
    if is_output:
        bits(tensor).fill_(mark(tensor, strict.UNWRITTEN))
    watch = strict.Watch(*(({}, {"y": tensor}) if is_output else ({"x": tensor}, {})))
    watch.start_launch("kernel")
    return watch, tensor


def addresses(tensor, *places):
    return np.array([tensor.data_ptr() + place * tensor.element_size() for place in places], np.int64)


@pytest.mark.parametrize(
    ("places", "said"),
    [
        ((0, 4), None),
        ((4, 5), "the nearest 1 past the end"),
        ((6, 9), "the nearest 2 past the end"),
        ((-1, 0), "the nearest 1 before the start"),
        ((-3, -2), "the nearest 2 before the start"),
        ((BAND + 4,), f"the nearest {BAND} past the end"),
        ((-BAND,), f"the nearest {BAND} before the start"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_load_of_one_element_beside_a_tensor_is_stray_as_far_as_its_band_reaches(places, said, dtype):
    watch, tensor = watched(dtype=dtype)
    watch.check_load(builder(1, 2), addresses(tensor, *places))
    if said:
        kind, of, _, sentence = watch.fault
        assert (kind, of.name) == ("stray load", "x") and said in sentence and "program 1, 2 loads" in sentence
        assert watch.not_loaded() == ["x"]
    else:
        assert watch.fault is None and watch.not_loaded() == []


@pytest.mark.parametrize(("size", "undefined"), [(1, False), (2, True)])
@pytest.mark.parametrize("kind", [strict.tl.float16, strict.tl.float32, strict.tl.float64])
def test_what_a_masked_load_without_other_reads_is_undefined_from_two_elements_on(size, undefined, kind):
    """Of one element Triton drops an other of zero on the way to the interpreter."""
    load = strict.without_other(lambda builder, pointers, mask, other: other)
    pointers = SimpleNamespace(data=np.zeros(size, np.uint64), get_element_ty=lambda: kind)
    found = load(None, pointers, None, None)
    assert (found is not None and bool(np.isnan(found.data).all())) is undefined
    assert load(None, pointers, None, "zero") == "zero"


@pytest.mark.parametrize("place", [BAND + 5, -BAND - 1])
def test_what_lies_beyond_the_band_is_of_another_tensor(place):
    watch, tensor = watched()
    watch.check_load(builder(), addresses(tensor, place))
    assert watch.fault is None and watch.not_loaded() == ["x"]


def test_an_update_of_one_element_past_the_end_is_stray():
    watch, tensor = watched(is_output=True)
    watch.check_update(builder(), addresses(tensor, 5))
    assert watch.fault[0] == "stray load" and "updates elements outside the tensor, the nearest 1" in watch.fault[3]


@pytest.mark.parametrize("place", [0, 4])
@pytest.mark.parametrize(
    ("check", "said"), [("check_load", "reads elements of y"), ("check_update", "adds to elements")]
)
def test_one_element_that_nobody_has_written_is_named(place, check, said):
    watch, tensor = watched(is_output=True)
    tensor.zero_()
    getattr(watch, check)(builder(), addresses(tensor, *range(5)))
    assert watch.unwritten is None
    bits(tensor)[place] = mark(tensor, strict.UNWRITTEN)
    getattr(watch, check)(builder(), addresses(tensor, *range(5)))
    assert said in watch.unwritten


def stored(watch, tensor, program, places, values, masks=None):
    """Store to places of a tensor as a program of the interpreter does."""

    def store(builder, pointers, value, mask, *rest):
        flat = bits(tensor.as_strided((6,), (1,))).numpy()
        for place, one, on in zip(places, value.data.view(flat.dtype), mask.data, strict=True):
            if on:
                flat[place] = one

    handle = SimpleNamespace
    masks = np.array(masks or [True] * len(places))
    pointers = handle(data=addresses(tensor, *places).astype(np.uint64))
    value = handle(data=np.array(values, np.float32))
    watch.checked_store(store)(builder(*program), pointers, value, handle(data=masks))


@pytest.mark.parametrize(
    ("first", "second", "values", "races"),
    [
        ((0, 0), (0, 0), (1.0, 2.0), False),  # a program may store again, from the same place of its tile
        ((0, 0), (0, 1), (1.0, 1.0), False),  # of two programs that store the same either may win
        ((0, 0), (0, 1), (1.0, 2.0), True),
        ((0, 2), (1, 0), (1.0, 2.0), True),
    ],
)
def test_two_programs_race_for_one_element_if_their_values_differ(first, second, values, races):
    watch, tensor = watched(is_output=True)
    stored(watch, tensor, first, [4, 3], [values[0], 7.0])
    stored(watch, tensor, second, [4], values[1:])
    assert (watch.fault is not None) is races
    if races:
        kind, _, element, sentence = watch.fault
        assert (kind, element) == ("race", 4) and "stored it twice, with different values" in sentence
        assert all(f"program {x}, {y}" in sentence for x, y in (first, second))


def test_two_places_of_a_tile_race_in_two_stores_too():
    watch, tensor = watched(is_output=True)
    stored(watch, tensor, (0, 0), [3, 4], [7.0, 1.0])
    stored(watch, tensor, (0, 0), [4], [2.0])
    assert watch.fault[0] == "race" and "program 0, 0 stored it twice" in watch.fault[3]


@pytest.mark.parametrize(("values", "races"), [((1.0, 1.0), False), ((1.0, 2.0), True)])
def test_two_lanes_of_one_store_race_if_their_values_differ(values, races):
    watch, tensor = watched(is_output=True)
    stored(watch, tensor, (0, 0), [0, 0], values)
    assert (watch.fault is not None) is races


def test_a_masked_lane_stores_nothing():
    watch, tensor = watched(is_output=True)
    stored(watch, tensor, (0, 0), [4, 5], [1.0, 2.0], [True, False])
    assert watch.fault is None and not watch.stores and stray_store(tensor) is None
    stored(watch, tensor, (0, 0), [4, 5], [1.0, 2.0])
    assert list(watch.stores) == [tensor.data_ptr()]


@pytest.mark.parametrize(
    ("writer", "reader", "races"),
    [((0, 1), (0, 1), False), ((0, 1), (0, 2), True), ((0, 1), (1, 1), True), ((0, 0), (0, 1), True)],
)
def test_one_element_that_another_program_stored_in_this_launch_is_not_there_yet(writer, reader, races):
    watch, tensor = watched(is_output=True)
    tensor.zero_()
    stored(watch, tensor, writer, [4], [1.0])
    watch.check_load(builder(*reader), addresses(tensor, 3, 4))
    assert (watch.fault is not None) is races
    if races:
        kind, _, element, sentence = watch.fault
        assert (kind, element) == ("race", 4)
        assert f"program {reader[0]}, {reader[1]} loads what program {writer[0]}, {writer[1]} stored" in sentence
    watch.fault = None
    watch.start_launch("the next kernel")
    watch.check_load(builder(*reader), addresses(tensor, 3, 4))
    assert watch.fault is None


@pytest.mark.parametrize("grid", [(2, 3, 4), (5, 1, 1), (1, 1, 3)])
def test_every_program_has_a_number_of_its_own(grid):
    watch, _ = watched()
    numbers = [
        watch.program(builder(x, y, z, grid)) for x in range(grid[0]) for y in range(grid[1]) for z in range(grid[2])
    ]
    assert numbers == list(range(len(numbers)))


# ---------------------------------------------------------------- one element, the first or the last


def judge_of(**task):
    return judge.Judge(grading.Task({}, None, None, {"y": "row column"}, {}, **task), None, {}, None)


@pytest.mark.parametrize("place", [(0, 0), (1, 4)])
@pytest.mark.parametrize("value", [-0.0, 1.0])
def test_one_element_of_an_input_that_changed_is_seen(place, value):
    """By its bits: 0 and -0 differ, and NaN is the same NaN."""
    original = torch.zeros(2, 5)
    original[0, 1] = torch.nan
    tensor = original.clone()
    judge.check_inputs({"x": tensor}, {"x": original})
    tensor[place] = value
    raises(lambda: judge.check_inputs({"x": tensor}, {"x": original}), "changed", "x: the kernel changed its input")


@pytest.mark.parametrize("place", [(0, 0), (1, 4)])
def test_one_element_that_is_not_written_or_not_finite_is_named_with_its_place(place):
    said = f"row {place[0]}, column {place[1]}"
    exact = {"y": torch.ones(2, 5)}
    got = {"y": torch.ones(2, 5)}
    judge_of().check_written("y", got["y"])
    judge_of().check_finite("y", got, exact)
    for value in (torch.inf, -torch.inf, torch.nan):
        got["y"][place] = value
        judged = judge_of()
        raises(
            lambda judged=judged: judged.check_finite("y", got, exact), "value", f"1 of 10 elements are NaN .* {said}"
        )
        judged.check_finite("y", got, {"y": got["y"].clone()})  # as it should be
    bits(got["y"])[place] = mark(got["y"], strict.UNWRITTEN)
    raises(
        lambda: judge_of().check_written("y", got["y"]), "unwritten", f"1 of 10 elements are never written, .* {said}"
    )


@pytest.mark.parametrize("place", [0, 2])
def test_one_wrong_label_is_told(place):
    judged = judge_of(labels={"y": ("a", "b", "c")})
    exact = {"y": torch.tensor([1.0, 0.0, 1.0])}
    judged.check_values(exact, exact, exact)
    got = {"y": exact["y"].clone()}
    got["y"][place] = 0.0
    said = f"y: {'abc'[place]} gives False, but should give True"
    raises(lambda: judged.check_values(got, exact, exact), "value", said)


@pytest.mark.parametrize(
    ("touched", "missing"), [("no element", ["y", "z"]), ("one element", ["z"]), ("and once more", ["y", "z"])]
)
def test_an_output_counts_as_a_kernels_if_it_wrote_one_element_and_nothing_else_did_later(touched, missing):
    outputs = {"y": torch.zeros(2, 5), "z": torch.zeros(2)}
    written = grading.Written(outputs)
    written.note()
    if touched != "no element":
        outputs["y"][1, 4] = 1.0
    written.after_launch()
    if touched == "and once more":
        outputs["y"][1, 4] = 2.0
    assert written.not_by_kernels() == missing


SOUND = {"y": torch.ones(2, 3), "dx": torch.ones(2, 3)}


@pytest.mark.parametrize(
    ("results", "kind", "said"),
    [
        ({"y": SOUND["y"]}, None, ""),
        ({}, "results", "it returns 0 results, the reference 1"),
        ({"y": SOUND["y"], "y1": SOUND["y"]}, "results", "it returns 2 results, the reference 1"),
        ({"y": None}, "results", "y is NoneType, not a tensor"),
        ({"y": torch.ones(2, 4)}, "results", r"y is float32 \[2, 4\], but should be float32 \[2, 3\]"),
        ({"y": torch.ones(2, 3).double()}, "results", "y is float64 .* but should be float32"),
    ],
)
def test_one_result_that_is_unlike_the_references_is_told(results, kind, said):
    def check():
        own_kernel.check_results(results, SOUND, ["x"], {})

    if kind:
        raises(check, kind, said)
    else:
        check()
        raises(lambda: own_kernel.check_results(results, SOUND, ["x"], {"y": None}), "no gradient", "y has no grad_fn")


# ---------------------------------------------------------------- sentences


@pytest.mark.parametrize(
    ("error", "said"), [(2.99e-5, "all digits that 16 bits have are right"), (3.01e-5, "to about 3 digits")]
)
def test_a_rounding_to_16_bits_makes_a_larger_error_than_3_in_100_000(error, said):
    exact = torch.ones(4, 8, dtype=torch.float64)
    noise = error * (1 - 2 * (torch.arange(32) % 2)).double().view(4, 8)
    judged = judge.Judge(grading.Task({}, None, None, {"y": "row column"}, {}), None, {}, None)
    assert said in judged.describe_pattern("y", exact + noise, exact, 1e-6, error)


ALTERNATING = (1 - 2 * (torch.arange(32) % 2)).double().view(4, 8)  # at a right angle to ones
ONES = torch.ones(4, 8, dtype=torch.float64)


@pytest.mark.parametrize(("error", "same"), [(0.99e-2, True), (1.01e-2, False)])
def test_a_typical_error_gives_what_the_answer_gives_within_a_percent(error, same):
    """A typical error explains a result that it changes by more than a percent, if that is finite."""
    lost = ONES.clone()
    lost[0, 0] = torch.nan
    assert judge.alike_where_finite(lost * (1 + error), lost) is same
    assert not judge.alike_where_finite(lost, ONES) and judge.alike_where_finite(lost * torch.nan, lost * torch.nan)
    assert judge.differs(lost * (1 + error), ONES) is not same


@pytest.mark.parametrize(
    ("factor", "said"),
    [
        (2 * (1 + 0.95e-3), "every element is 2 times"),
        (2 * (1 + 1.05e-3), "every element is 2.002 times"),
        (1.099, "every element is 9.9 % too large"),
        (0.901, "every element is 9.9 % too small"),
        (1.101, "every element is 1.101 times"),
        (0.899, "every element is 0.899 times"),
    ],
)
def test_a_factor_has_its_name_within_a_thousandth_and_is_a_percentage_within_a_tenth(factor, said):
    assert judge.describe_factor(factor).startswith(said)


@pytest.mark.parametrize(("off", "told"), [(0.95e-3, True), (1.05e-3, False)])
@pytest.mark.parametrize(("factor", "said"), [(3, "summed"), (1 / 3, "divided")])
def test_a_factor_is_that_of_the_ranks_within_a_thousandth(factor, said, off, told):
    judged = judge_of()
    judged.ranks = 3
    found = judged.describe_ranks(factor * (1 + off))
    assert (f"there are 3 ranks: is it {said} once too often?" in found) is told


@pytest.mark.parametrize(("error", "named"), [(9.9e-3, True), (10.1e-3, False)])
def test_a_typical_error_may_be_ten_times_as_far_off_as_a_right_result(error, named):
    judged = judge_of(suspects={"it is doubled": lambda: {"y": 2 * ONES}})
    judged.compute = lambda suspect: suspect()
    got = {"y": 2 * ONES * (1 + error)}
    found = judged.find_suspect(got, {"y": ONES}, {"y": 1e-3}, ["y"])
    assert (found == "it is doubled") is named


@pytest.mark.parametrize(
    ("factor", "rest", "bound", "said"),
    [
        (2.0, 9.9e-3, 1e-3, "every element is 2 times"),  # up to ten times what a right result may have
        (2.0, 10.1e-3, 1e-3, "every element is wrong"),
        (1.4, 0.099, 1.0, "every element is 1.4 times"),  # and a quarter of the whole error
        (1.4, 0.11, 1.0, "all elements are right to about 3 digits"),
    ],
)
def test_a_factor_explains_nearly_all_of_an_error(factor, rest, bound, said):
    got = factor * (ONES + rest * ALTERNATING)
    assert judge_of().describe_pattern("y", got, ONES, bound, relative_error(got, ONES)).startswith(said)


@pytest.mark.parametrize(("error", "said"), [(1.99e-3, "all elements are right to about 3 digits"), (2.01e-3, "every")])
def test_three_digits_are_right_within_two_thousandths(error, said):
    got = ONES + error * ALTERNATING
    assert judge_of().describe_pattern("y", got, ONES, 1e-9, error).startswith(said)


@pytest.mark.parametrize(
    ("got", "said"),
    [
        (2.0, "it is 2 times its correct value"),
        (1.05, "it is 5 % too large"),
        (0.0, "it is wrong"),
        (1 + 1.5e-3, "it is 0.15 % too large"),
    ],
)
def test_a_single_number_is_not_called_every_element(got, said):
    one = torch.ones((), dtype=torch.float64)
    assert judge_of().describe_pattern("y", got * one, one, 1e-9, abs(got - 1)) == said


@pytest.mark.parametrize(("error", "said"), [(9.9e-3, "wrong only in row 3 of 4, column 7 of 8"), (10.1e-3, "2 of 32")])
def test_an_element_is_wrong_if_it_is_ten_times_as_far_off_as_a_right_result(error, said):
    got = ONES.clone()
    got[0, 0] += error
    got[3, 7] = -100
    assert judge_of().describe_pattern("y", got, ONES, 1e-3, 17.0).startswith(said)


@pytest.mark.parametrize(("number", "order"), [(2, False), (3, True), (4, False)])
def test_an_exercise_has_three_hints(number, order, tmp_path):
    folder = pathlib.Path(shutil.copytree(EXERCISES["03"], tmp_path / EXERCISES["03"].name))
    (folder / "hints.md").write_text("".join(f"## {i}\n\nLook.\n\n" for i in range(number)))
    assert ("hints.md needs three sections that start with ##" in verify.find_faults(folder, {})) is not order


@pytest.mark.parametrize(("lines", "order"), [(60, True), (61, False)])
def test_the_page_of_an_exercise_has_sixty_lines_at_most(lines, order, tmp_path):
    folder = pathlib.Path(shutil.copytree(EXERCISES["03"], tmp_path / EXERCISES["03"].name))
    page = (folder / "README.md").read_text()
    (folder / "README.md").write_text("\n" * (lines - len(page.splitlines())) + page)
    assert ("README.md is longer than 60 lines" in verify.find_faults(folder, {})) is not order


@pytest.mark.parametrize(("error", "right"), [(0.99e-4, True), (1.01e-4, False)])
@pytest.mark.parametrize("wrong", ["y", "z"])
def test_ranks_of_gpus_may_be_off_by_a_ten_thousandth(error, right, wrong, monkeypatch):
    """In any result. The smallest verdict of all ranks counts."""
    reduced = []
    monkeypatch.setattr(on_gpus.dist, "get_rank", lambda: 1)
    monkeypatch.setattr(on_gpus.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(on_gpus.dist, "all_reduce", lambda verdict, op: reduced.append(op))
    rows = {name: torch.ones(2, 4) for name in "yz"}
    launch = SimpleNamespace(split=())
    task = SimpleNamespace(inputs=lambda size: {}, define=dict, storage=lambda *_: rows, launch=launch)
    found = {name: rows[name][1] * (1 + error * (name == wrong)) for name in "yz"}
    module = SimpleNamespace(run=lambda: found)
    assert on_gpus.is_right(task, module, {}, torch.device("cpu")) is right
    assert reduced == [on_gpus.dist.ReduceOp.MIN]


# ---------------------------------------------------------------- what passed is compiled


@pytest.mark.parametrize(("compiles", "said"), [(True, "4 cases; compiled"), (False, "the compiler refuses it")])
def test_what_the_compiler_refuses_has_not_passed(compiles, said, monkeypatch):
    compiled = {"passed": compiles, "kind": "compile", "sentence": "compiled" if compiles else said}
    monkeypatch.setattr(answers, "grade_apart", lambda jobs, *_: [compiled] * len(jobs))
    verdicts = [{"passed": True, "interpreted": True, "kind": None, "sentence": "4 cases"}, {"passed": False}]
    answers.compile_passed([("folder", "a.py"), ("folder", "b.py")], verdicts, 1)
    assert (verdicts[0]["passed"], verdicts[0]["sentence"], verdicts[1]) == (compiles, said, {"passed": False})


# ---------------------------------------------------------------- a kernel of one's own


@pytest.mark.parametrize(("error", "found"), [(0.99e-2, True), (1.01e-2, False)])
def test_a_result_is_another_one_within_a_percent(error, found):
    exact = {"y0": torch.arange(4.0), "y1": torch.ones(4)}
    said = own_kernel.exchanged_with(exact, None)("y0", torch.ones(4) * (1 + error), {})
    assert bool(said) is found and (not found or "this is y1" in said)


@pytest.mark.parametrize(
    ("size", "power"), [(1, True), (2, True), (0, False), (-2, False), (3, False), (64, True), (65, False)]
)
def test_a_power_of_two(size, power):
    assert own_kernel.is_power_of_two(size) is power


@pytest.mark.parametrize(
    ("sizes", "passed", "told"),
    [
        ({"C": 5}, [{"C": 4}], True),
        ({"C": 8}, [{"C": 4}], False),  # a power of two is wrong too
        ({"C": 5}, [{"C": 4}, {"C": 6}], False),  # or another size is right
        ({"C": 5}, [], False),
    ],
)
def test_a_neutral_element_is_suspected_where_sizes_below_a_power_of_two_alone_are_wrong(sizes, passed, told):
    found = own_kernel.add_neutral_element(judge.Wrong("value", "y", "y is wrong"), sizes, passed)
    assert ("do masked elements enter" in str(found)) is told


LAYOUTS = ("padded", "reversed", "every second")


@pytest.mark.parametrize("target", [None, "gfx942"])
@pytest.mark.parametrize("contiguous", [True, False])
@pytest.mark.parametrize("leaves", [(), ("w",), ("x", "w")])
def test_every_gradient_and_every_input_is_called_in_every_layout(leaves, contiguous, target, monkeypatch):
    """In the first two cases; on a target, where a call can take a minute, in the first one. Numbers in the first."""
    monkeypatch.setattr(grading, "TARGET", target)
    inputs = {"x": torch.ones(2, 3), "labels": torch.ones(2, dtype=torch.int64), "w": torch.ones(3), "eps": 1e-6}
    inputs["scale"] = torch.tensor(1.0)  # has one layout
    task = SimpleNamespace(gradients=leaves, contiguous=contiguous)
    said = [[way.words() for way in own_kernel.ways_of(task, inputs, number)] for number in range(3)]
    wanted = ["", ", a tenth of each number"]
    if leaves:
        wanted += [", two calls", *(f", gradients {layout}" for layout in ("expanded", "reversed", "every second"))]
    if len(leaves) > 1:
        wanted += [f", {name} alone" for name in leaves]
    if not contiguous:
        wanted += [f", {name} {layout}" for name in ("x", "labels", "w") for layout in LAYOUTS]
    second = [words for words in wanted if "tenth" not in words]
    assert said == [wanted, [""] if target else second, [""]]


@pytest.mark.parametrize(
    ("target", "number", "most", "times", "wanted"),
    [
        (None, 0, 1, False, []),
        (None, 0, 1, True, ["tuned"]),  # of configurations that differ in warps alone
        (None, 0, 3, True, ["tuned", 1, 2]),
        (None, 1, 3, True, [1, 2]),
        ("gfx942", 0, 3, True, ["tuned", 1, 2]),
        ("gfx942", 1, 3, True, []),
    ],
)
def test_every_configuration_is_called_once(target, number, most, times, wanted, monkeypatch):
    monkeypatch.setattr(grading, "TARGET", target)
    ways = own_kernel.tuned_ways(SimpleNamespace(most=most, times=times), number)
    assert ["tuned" if way.tuned else way.configuration for way in ways] == wanted


@pytest.mark.parametrize("name", ["x", "labels"])
@pytest.mark.parametrize("place", [0, -1])
def test_one_bit_that_changed_in_the_first_or_the_last_tensor_is_seen(name, place):
    """0 became -0, or a label another one."""
    tensors = {"x": torch.zeros(2, 5), "labels": torch.tensor([3, 4])}
    copies = own_kernel.contiguous(tensors)
    own_kernel.check_unchanged(tensors, copies, "it changed")
    tensors[name].view(-1)[place] = -0.0 if name == "x" else 5
    raises(lambda: own_kernel.check_unchanged(tensors, copies, "it changed"), "changed", f"{name}: it changed")


@pytest.mark.parametrize(
    ("changed", "kind", "said"),
    [
        ({}, None, ""),
        ({"y1": torch.ones(3)}, "results", r"y1 is float32 \[3\], but should be float32 \[2\]"),
        ({"y1": torch.ones(2)}, "no gradient", "y1 has no grad_fn"),
        ({"y1": [torch.ones(2)]}, "results", "y1 is list, not a tensor"),
    ],
)
def test_the_last_of_two_results_is_checked_too(changed, kind, said):
    results = {name: torch.ones(2, requires_grad=True) * 1 for name in ("y0", "y1")}
    wanted = results | {"dx": torch.ones(2)}

    def check():
        own_kernel.check_results(results | changed, wanted, ["x"], results)

    raises(check, kind, said) if kind else check()


@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        (
            strict.Unsupported("has no libdevice.fast_sinf"),
            "unsupported",
            "interpreter has no libdevice.fast_sinf",
        ),
        (ValueError("inline_asm not supported in interpreter mode"), "unsupported", "check it on a GPU, or with --tar"),
        (ValueError("an argument is not supported"), "crash", "ValueError: an argument is not supported"),
    ],
)
@pytest.mark.parametrize("cause", [False, True])
def test_what_the_interpreter_lacks_is_no_crash(error, kind, said, cause, monkeypatch, tmp_path):
    """As the error itself, or as the cause of one of Triton's."""
    monkeypatch.setattr(grading, "INTERPRETED", True)
    if cause:
        wrapped = RuntimeError(str(error))
        wrapped.__cause__ = error
        error = wrapped
        said = said.removeprefix("ValueError: ")
    found = own_kernel.describe_error(error, tmp_path / "kernel.py")
    assert found["kind"] == kind and said in found["sentence"]


def test_a_task_without_sizes_for_the_clock_says_so():
    raises(lambda: own_kernel.time_task(SimpleNamespace(timed=None), "mine"), "task", "task.py has no TIMED")


# ---------------------------------------------------------------- ranks


@pytest.mark.parametrize(
    ("first", "second", "meet"), [((0, 4), (4, 8), False), ((0, 5), (4, 8), True), ((7, 8), (4, 8), True)]
)
def test_parts_that_touch_do_not_overlap(first, second, meet):
    x = torch.zeros(8)
    assert one_rank.overlap(x[slice(*first)], x[slice(*second)]) is meet
    assert one_rank.overlap(x[slice(*second)], x[slice(*first)]) is meet


def finished(number, monkeypatch, records, **replaced):
    """Call what an exercise checks after its last case, on these records."""
    task = grading.load_task(EXERCISES[number])
    monkeypatch.setattr(ranks, "recorded", [records])
    for name, value in replaced.items():
        monkeypatch.setitem(task.then.__globals__, name, value)
    return task, lambda: task.then(None, "")


def record(sent=0, calls=0, whole=0, **results):
    made = [SimpleNamespace(collective=False, sends=True, name="isend", whole=whole)] * calls
    return SimpleNamespace(calls=made, sent_bytes=lambda size: sent, results=results)


def test_a_rank_of_the_ring_sends_its_share_and_no_byte_more(monkeypatch):
    """Of 1200 floats on four ranks; the last rank decides."""
    simulated = {"simulate": lambda records: SimpleNamespace(total=1.0)}
    assert "1.5 times the tensor" in finished("25", monkeypatch, [record(7200, 6)] * 4, **simulated)[1]()
    for calls, said in ((6, "rank 3 .* send parts, not the whole"), (7, "each half takes one step fewer")):
        records = [record(7200, 6)] * 3 + [record(7201, calls)]
        raises(finished("25", monkeypatch, records, **simulated)[1], "bytes", said)


@pytest.mark.parametrize(("share", "told"), [(1.009, False), (1.011, True)])
def test_a_ring_that_takes_a_hundredth_longer_is_told_of_a_faster_one(share, told, monkeypatch):
    """Six steps of 1200 bytes at 100 bytes per us, each with a latency of 5 us."""
    least = 6 * (5 + 1200 / 100)
    stub = {"simulate": lambda records: SimpleNamespace(total=share * least)}
    words = finished("25", monkeypatch, [record(7200, 6)] * 4, **stub)[1]()
    assert ("a ring whose batches send and receive at once takes 102" in words) is told


@pytest.mark.parametrize(("exposed", "wrong"), [(1.0, False), (1.001, True)])
def test_one_and_a_half_buckets_a_step_may_be_exposed(exposed, wrong, monkeypatch):
    """Of buckets that take 10 us each."""
    sizes = grading.load_task(EXERCISES["26"]).cases["many buckets"]
    buckets = sizes["steps"] * ((sizes["L"] + 1) // 2)
    spans = [(0.0, 5.0), (5.0, 15.0)]
    found = SimpleNamespace(network=spans, exposed=exposed * 1.5 * sizes["steps"] * 10, communication=1e3, total=1.0)
    found.picture = lambda: ""
    stubs = {"simulate": lambda records: found, "describe_exposed": lambda records: ""}
    _, check = finished("26", monkeypatch, [record(calls=buckets)] * 2, **stubs)
    if wrong:
        raises(check, "exposed", "only a step's last bucket has nothing to hide behind, 10 us")
    else:
        assert "of the communication is hidden" in check()
    for calls in (buckets - 1, buckets + 1):
        _, check = finished("26", monkeypatch, [record(calls=buckets), record(calls=calls)], **stubs)
        raises(check, "count", f"rank 1 makes {calls} calls")


def test_a_rank_keeps_and_sends_its_share_of_the_optimizer_and_no_byte_more(monkeypatch):
    """Of 4000 weights on four ranks in three steps."""
    share, sent = 2 * 4000 * 4 // 4, 3 * 4 * 4000 * 3 // 2
    sound = record(sent, 6, state_bytes=share)
    assert f"keeps {share:,} bytes" in finished("28", monkeypatch, [sound] * 4)[1]()
    larger = record(sent, 6, state_bytes=share + 1)
    raises(finished("28", monkeypatch, [sound] * 3 + [larger])[1], "state", f"rank 3 keeps {share + 1:,}|rank 3 keeps")
    raises(finished("28", monkeypatch, [sound] * 3 + [record(sent + 1, 6, state_bytes=share)])[1], "bytes", "each step")


def test_two_all_reduces_are_enough(monkeypatch):
    task = grading.load_task(EXERCISES["29"])
    sizes = task.cases["four ranks, many rows"]
    whole = 4 * sizes["rows"] * sizes["C"]
    stub = {"simulate": lambda records: SimpleNamespace(picture=lambda: "")}
    sound = record(0, 2, whole)
    assert "bytes of weights" in finished("29", monkeypatch, [sound] * 4, **stub)[1]()
    for wrong in (record(0, 3, 1), record(0, 2, whole + 1)):
        raises(finished("29", monkeypatch, [sound] * 3 + [wrong], **stub)[1], "count", "rank 3 makes")


# ---------------------------------------------------------------- tiles and memory


@pytest.mark.parametrize(
    ("tile", "registers", "spills", "shared", "said"),
    [
        ((128, 64, 16, 1), 128, 0, 65536, None),
        ((128, 64, 16, 1), 128, 0, 65537, "it needs 65,537 bytes of LDS, but a program can have only 65,536"),
        ((128, 64, 16, 1), 128, 1, 0, "it spills 1 registers"),
    ],
)
def test_a_tile_may_take_all_of_the_target_and_no_byte_more(tile, registers, spills, shared, said):
    find = grading.load_task(EXERCISES["12"]).then.__globals__["find_tile_fault"]
    found = find(tile, registers, spills, shared)
    assert found == said if said is None else said in found


def test_a_tile_owns_enough_queries_and_leaves_enough_waves():
    inside = grading.load_task(EXERCISES["12"]).then.__globals__
    find, queries, waves = (inside[name] for name in ("find_tile_fault", "LEAST_QUERIES", "LEAST_WAVES"))
    registers = 512 // waves
    assert find((queries, 64, 4, 1), registers, 0, 0) is None
    assert "it must own at least" in find((queries // 2, 64, 4, 1), registers, 0, 0)
    assert f"it takes {waves}" in find((queries, 64, 4, 1), registers + 1, 0, 0)


@pytest.mark.parametrize(
    ("tile", "taken"),
    [
        ((16, 16, 1, 1), True),
        ((8, 16, 1, 1), False),
        ((16, 8, 1, 1), False),
        ((16, 16, 0, 1), False),
        ((16, 16, 3, 1), False),
    ],
)
def test_the_sides_of_a_tile_are_powers_of_two_of_16_or_more(tile, taken, monkeypatch):
    task = grading.load_task(EXERCISES["12"])
    monkeypatch.setitem(task.then.__globals__, "compiled", lambda *tile: "is compiled")
    raises(lambda: task.then(SimpleNamespace(TILE=tile), ""), "tile", "it is compiled" if taken else "TILE must be")


@pytest.mark.parametrize(("more", "said"), [(-1, None), (0, "the whole logits exist")])
def test_no_tensor_is_as_large_as_the_logits(more, said, monkeypatch):
    """Of 8 chunks of four rows and three rows more, with a vocabulary of 256."""
    whole, most = 4 * 35 * 256, 4 * 4 * 4 * 256 + 4 * 4 * 256 * 2
    check_memory(monkeypatch, whole + more, most, said)


@pytest.mark.parametrize(("more", "said"), [(0, None), (1, "the logits of earlier chunks are kept")])
def test_four_chunks_and_four_times_the_gradient_may_be_alive(more, said, monkeypatch):
    check_memory(monkeypatch, 0, 4 * 4 * 4 * 256 + 4 * 4 * 256 * 2 + more, said)


def check_memory(monkeypatch, largest, peak, said):
    task = grading.load_task(EXERCISES["23"])

    class Meter:
        def __init__(self, *known):
            self.largest, self.peak = largest, peak

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

    loss = SimpleNamespace(apply=lambda x, w, labels: x.sum())
    module = SimpleNamespace(CHUNK=4, BLOCK=16, LinearCrossEntropy=loss)
    monkeypatch.setitem(task.then.__globals__, "MemoryMeter", Meter)
    if said:
        raises(lambda: task.then(module, ""), "memory", said)
    else:
        assert f"it allocates at most {peak:,}" in task.then(module, "")


@pytest.mark.parametrize(("noise", "named"), [(0.99e-3, True), (1.01e-3, False)])
def test_one_row_that_counts_twice_is_named_if_it_explains_all_but_a_thousandth(noise, named):
    """The last row of four. What is left over lies in no row's direction."""
    explain = grading.load_task(EXERCISES["24"]).explain
    generator = torch.Generator().manual_seed(0)
    dy = torch.randn(8, 4, generator=generator, dtype=torch.float64)
    got = dy.sum(1) + dy[:, 3]
    rest = torch.randn(8, generator=generator, dtype=torch.float64)
    rest -= dy @ torch.linalg.lstsq(dy, rest[:, None]).solution.flatten()
    wrong = got + noise * got.norm() * rest / rest.norm()
    said = explain("db", wrong, {"x": torch.randn(4, 8, generator=generator), "dy": dy, "eps": 1e-6})
    assert bool(said) is named and (not named or "row 3 (2 times)" in said)


@pytest.mark.parametrize(("rows", "named"), [(8, True), (9, False)])
def test_rows_can_be_told_apart_if_there_are_no_more_than_columns(rows, named):
    explain = grading.load_task(EXERCISES["24"]).explain
    dy = torch.randn(8, rows, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    said = explain("db", dy.sum(1) + dy[:, -1], {"x": torch.ones(rows, 8), "dy": dy, "eps": 1e-6})
    assert bool(said) is named and (not named or "row 7 (2 times)" in said)


@pytest.mark.parametrize(("offset", "told"), [(10.1, True), (9.9, False)])
def test_a_mean_ten_times_the_deviation_loses_digits(offset, told):
    """In every row."""
    explain = grading.load_task(EXERCISES["24"]).explain
    x = torch.tensor([[-1.0, 0.0, 1.0], [-1.0, 0.0, 1.0]]) + torch.tensor([[11.0], [offset]])
    said = explain("y", x, {"x": x, "dy": torch.ones(3, 2)})
    assert bool(said) is told
