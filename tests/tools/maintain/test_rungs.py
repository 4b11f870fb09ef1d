"""The ladder: its rungs, rounds of warm processes, and what is read from them."""

import collections
import contextlib
import io
import json
import math
import os
import pathlib
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from common.command_line import Failure
from common.measuring import peers
from common.measuring.runs import TimeLimit
from common.ratios import NO_PAIR, rotated
from common.versions import REPOSITORY, load_version
from in_process import refused
from maintain import measure_ladder, pictures, rounds, rungs
from maintain.rungs import Rung
from training import need_fused_attention_in_16_bits

TOY = "--hidden-dim 32 --num-layers 1 --num-heads 2 --vocab-size 64 --seq-len 16 --batch-size 2 --device cpu".split()
RUNGS = rungs.by_name(rungs.LADDER)
FIRST_OF_VERSION_2 = next(rung for rung in rungs.LADDER if rung.version == 2)
NOISIEST = next(rung for rung in rungs.LADDER if rung.noisiest == "graph")
TWO = ["--graph", "on", "--rungs", f"{NOISIEST.base},{NOISIEST.name}"]

# ---------------------------------------------------------------- the rungs

PACKINGS = {"enable_qkv_fusion", "enable_swiglu_fusion"}  # two options, and one idea


def options_of(rung):
    script = peers.peer_script() if rung.version == "peer" else load_version(rung.version)
    parsed = script.build_parser().parse_args([*TOY, *rung.options])
    return {name: value for name, value in vars(parsed).items() if name != "parts"}


MEASURED = [*rungs.LADDER, *rungs.PEERS, rungs.SLOW_PEER, *rungs.VOCABULARY]


@pytest.mark.parametrize("rung", MEASURED, ids=lambda rung: rung.name)
def test_a_rung_differs_from_its_base_in_one_idea(rung):
    found = options_of(rung)
    if rung.base is None:
        return
    base = rungs.by_name(rungs.VOCABULARY if rung in rungs.VOCABULARY else rungs.LADDER)[rung.base]
    changed = {name for name, value in options_of(base).items() if found.get(name) != value}
    if base.version == rung.version:
        assert len(changed) == 1 or changed == PACKINGS
    else:
        assert rung.road or rung == FIRST_OF_VERSION_2
        assert "use_amp" not in changed


def test_a_row_is_whole():
    """A rung stands below the one that it builds on, and its peer computes in its precision."""
    names = list(RUNGS)
    assert len(names) == len(rungs.LADDER)
    for rung in rungs.LADDER:
        assert rung.shown
        assert rung.base is None or names.index(rung.base) < names.index(rung.name)
        assert rung.saves is None or (rung.base and rung.saves in pictures.SAVES)
        assert all(RUNGS[peer].precision == rung.precision for peer in rung.peers)
    assert {"eager", "graph"} == {rung.noisiest for rung in rungs.LADDER if rung.noisiest}


class Counted(TorchDispatchMode):
    """Count PyTorch's operations."""

    def __init__(self):
        super().__init__()
        self.calls = collections.Counter()

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        self.calls[str(function)] += 1
        return function(*arguments, **(options or {}))


def operations(version, options):
    """Return the operations of a training step, by name."""
    script = load_version(version)
    config = script.parse_options([*TOY, *options, "--no-graph"])
    script.set_up_backend(config)
    trainer = script.Trainer(config)
    trainer.step()  # AdamW makes its state
    with Counted() as counted:
        trainer.step()
    return counted.calls


def test_attention_is_all_that_changes_from_version_1_to_the_first_rung_of_version_2():
    """With attention switched off too, version 2 runs version 1's operations."""
    need_fused_attention_in_16_bits()
    options = FIRST_OF_VERSION_2.options
    plain = operations(1, RUNGS[FIRST_OF_VERSION_2.base].options)
    assert operations(2, [*options, "--disable-flash-attention"]) == plain
    found = operations(2, options)
    assert any("attention" in name for name in (found - plain)) and found.total() < plain.total()


# ---------------------------------------------------------------- what is read from a column


SOME = rungs.by_name(
    [Rung("base", "an idea", 1, []), Rung("fast", "another", 1, [], "base"), Rung("near", "one more", 2, [], "base")]
)


def column(steps_ms, again="fast", known=SOME, **more):
    """Return a column of these rounds, [{name: steps}], two of each start."""
    found = [{"start": i // 2, "turn": i, "steps_ms": steps} for i, steps in enumerate(steps_ms)]
    chosen = [rung for name, rung in known.items() if any(name in steps for steps in steps_ms)]
    told = [rung.recorded() | {"status": "ok", "reason": None, "peak_mib": 1234.0, "loss": 6.5} for rung in chosen]
    content = {"preset": "medium", "graph": True, "options": "", "again": again, "rungs": told, "rounds": found}
    return rungs.Column(content | {"record": {}} | more)


def six_rounds():
    """fast is 1.25, 1.5 or 1.6 times as fast as base, its second name up to 1.1 times."""
    ratios = [1.25, 1.5, 1.5, 1.6, 1.5, 1.25]
    noise = [1.0, 1.02, 1.1, 0.99, 1.0, 1.01]
    made = []
    for ratio, other in zip(ratios, noise, strict=True):
        steps = {"base": [10.0 * ratio] * 3, "fast": [10.0, 11.0, 10.0], "near": [9.0, 9.5, 30.0]}
        made.append(steps | {"fast again": [10.0 * other] * 3})
    return made


def test_gains_of_a_column_by_hand():
    found = column(six_rounds())
    assert found.step_ms("fast") == 10.0 and found.step_ms("near") == 9.5 and found.step_ms("absent") is None
    gain = found.gain("fast", "base")
    assert str(gain) == "1.50x (1.25 to 1.60)" and gain.rounds == 6 and gain.noise == pytest.approx(math.log(1.1))
    assert str(found.gain("near", "fast")) == "no difference shown"  # 10 / 9.5, which is less than the pair's 1.1
    assert found.gain("absent", "base") is None
    name, percent = found.noisiest()
    assert (name, percent) == ("base", pytest.approx(20.0))  # 12.5 where the median is 15
    lines = rungs.lines_of(found)
    assert lines[0] == "medium, with a graph: 6 rounds over 3 starts"
    assert any("fast differs by up to 10.0 % " in line for line in lines)
    row = next(line for line in lines[1].splitlines() if line.startswith("fast "))
    assert row.split()[-6:] == ["1.50x", "(1.25", "to", "1.60)", "1,234", "6.5000"] and " 10.000 " in row


def test_one_round_differs_from_no_other():
    found = column([{"base": [12.0], "fast": [10.0], "fast again": [9.9]}])
    assert not [line for line in rungs.lines_of(found) if "noisiest" in line]


def test_a_second_group_of_a_round_is_no_round_of_its_own():
    found = column(six_rounds())
    found.rounds.append({"start": 2, "turn": 5, "steps_ms": {"near": [9.5]}})
    assert rungs.lines_of(found)[0] == "medium, with a graph: 6 rounds over 3 starts"


def test_rounds_that_lack_a_rung_are_left_out_of_its_ratios():
    made = six_rounds()
    del made[0]["fast"], made[1]["base"]
    found = column(made)
    gain = found.gain("fast", "base")
    assert gain.rounds == 4 and str(gain) == "not judged: 4 rounds of the 5 needed"
    for steps in made:
        del steps["fast again"]
    assert column(made).gain("near", "base").missing == NO_PAIR
    two_starts = column(six_rounds())
    for round_ in two_starts.rounds:
        round_["start"] = min(1, round_["start"])
    assert str(two_starts.gain("fast", "base")) == "not judged: 2 starts of the 3 needed"


def test_starts_that_lack_a_rung_do_not_count_for_its_ratios():
    """Of three starts the last one has no round of both: what is drawn at a start was drawn twice for this ratio."""
    found = column(six_rounds())
    for round_, start in zip(found.rounds, (0, 0, 0, 1, 1, 2), strict=True):
        round_["start"] = start
    del found.rounds[5]["steps_ms"]["base"]
    assert found.starts() == found.starts("fast") == 3 and found.starts("fast", "base") == 2
    assert str(found.gain("fast", "base")) == "not judged: 2 starts of the 3 needed"
    assert str(found.gain("near", "fast")) == "no difference shown"  # of six rounds and three starts


def test_leads_over_the_peers_are_of_the_same_rounds():
    led = next(rung for rung in rungs.LADDER if rung.peers)
    users, strongest = led.peers
    steps = []
    for i in range(6):
        ours = {led.name: [4.0 + i], led.name + rounds.AGAIN: [4.0 + i]}
        steps.append(ours | {users: [6.0 + i], strongest: [2 * (4.0 + i)]})
    lines = [line for line in rungs.lines_of(column(steps, led.name, RUNGS)) if " compared with " in line]
    assert lines == [
        f"{led.name} compared with {users}: 1.31x (1.22 to 1.50)",
        f"{led.name} compared with {strongest}: 2.00x (2.00 to 2.00)",
    ]


def test_a_file_of_columns_is_read_as_it_was_written(tmp_path):
    file = tmp_path / "ladder.json"
    rungs.write_columns([column(six_rounds()), column(six_rounds()[:2], again="base")], file)
    first, second = rungs.read_columns(file)
    assert first.content == column(six_rounds()).content and second.content["again"] == "base"
    assert list(tmp_path.iterdir()) == [file] and len(file.read_text().splitlines()) < 40
    for text in ("{", "{}", '{"columns": [{}]}'):
        file.write_text(text)
        with pytest.raises(Failure, match="cut off or damaged"):
            rungs.read_columns(file)


# ---------------------------------------------------------------- rounds of warm processes


def test_the_pair_stands_far_apart_in_every_order():
    names = list("abcdefg")
    for again in names:
        order = rounds.with_pair(names, again)
        twin = again + rounds.AGAIN
        assert [name for name in order if name != twin] == names
        distance = abs(order.index(again) - order.index(twin))
        assert min(distance, len(order) - distance) >= 4
    assert rotated(names, 9) == list("cdefgab")
    assert rounds.with_pair(["a"], "a") == ["a", "a again"]


class Stub:
    """Stand for a warm process; what it answers stands in its options, and the log says who was asked."""

    log = []
    gpu_mib = None

    def __init__(self, version, options, steps):
        self.name, *self.answers = options
        self.log.append(f"start {self.name}")
        size = next((int(word.split()[0]) for word in self.answers if word.endswith(" MiB")), 0)
        memory = {"reserved_mib": size, "gpu_mib": self.gpu_mib}
        self.warm = {"captured": True, "graph_reason": None, "parameters": 10} | memory

    def ask(self):
        self.log.append(self.name)

    def answer(self, seconds):
        if self.warm:
            found, self.warm = self.warm, None
            if "no room" in self.answers and sum(line.startswith("start") for line in self.log) > 3:
                raise rounds.OutOfMemory(1, "out of memory")
            if "no room to capture" in self.answers and sum(line.startswith("start") for line in self.log) > 3:
                return found | {"captured": False, "graph_reason": "GPU out of memory. Tried to allocate 2 GiB."}
            if "not captured" in self.answers:
                return found | {"captured": False, "graph_reason": "a CPU has no graphs"}
            if "refused" in self.answers:
                raise Failure(2, "no such GPU")
            return found
        asked = self.log.count(self.name)
        if "dies" in self.answers or f"dies when asked {asked} times" in self.answers:
            raise Failure(1, "lost")
        trained = 9 if "frozen" in self.answers else 10
        return {"steps_ms": [1.0, 2.0], "loss": 6.0, "parameters_trained": trained, "peak_mib": 7.0}

    def let_go(self):
        self.log.append(f"end {self.name}")

    end = let_go


@pytest.fixture
def stubbed(monkeypatch):
    """Return measure(programs, pairs), which measures one start of two turns with stubs; it returns rounds and told."""
    monkeypatch.setattr(rounds, "WarmProcess", Stub)
    monkeypatch.setattr(Stub, "log", [])

    def measure(programs, pairs=None, graph=True):
        told = {name: {} for name in programs}
        work = rounds.Rounds({name: (1, [name, *how]) for name, how in programs.items()}, told, [], graph, 2)
        work.measure(pairs or [(name,) for name in programs], 0, range(2))
        return work.rounds, told

    return measure


def test_processes_take_turns_in_rotated_order(stubbed):
    found, told = stubbed({"a": [], "b": [], "c": []})
    assert [line for line in Stub.log if " " not in line] == list("abc") + list("bca")
    assert found[1] == {"start": 0, "turn": 1, "steps_ms": {name: [1.0, 2.0] for name in "bca"}}
    assert told["b"] | {"status": "ok", "loss": 6.0, "peak_mib": 7.0} == told["b"]
    assert {f"end {name}" for name in "abc"} <= set(Stub.log)


def test_an_eager_round_asks_several_times_in_turns(stubbed):
    """The host's speed drifts within seconds, and the drift meets everybody."""
    found, told = stubbed({"a": [], "b": ["dies when asked 3 times"], "c": []}, graph=False)
    assert [line for line in Stub.log if " " not in line][:8] == list("abcabcab") and Stub.log.count("c") == 10
    assert found[0]["steps_ms"] == {name: [1.0, 2.0] * 5 for name in "ac"}
    assert (told["b"]["status"], told["b"]["reason"]) == ("failed", "lost")


def test_a_rung_that_fails_stops_no_other(stubbed):
    found, told = stubbed({"a": ["refused"], "b": ["dies"], "c": [], "d": ["frozen"], "e": ["not captured"]})
    assert [list(some["steps_ms"]) for some in found] == [["c"], ["c"]]
    assert (told["a"]["status"], told["a"]["reason"]) == ("not available", "no such GPU")
    assert (told["b"]["status"], told["b"]["reason"]) == ("failed", "lost")
    assert (told["d"]["status"], told["d"]["reason"]) == ("failed", "trained 9 parameters only")
    assert (told["e"]["status"], told["e"]["reason"]) == ("not available", "not captured: a CPU has no graphs")


@pytest.mark.parametrize(
    ("cores", "own", "threads"), [(32, None, "8"), (7, None, "1"), (None, None, "1"), (32, "3", "3")]
)
def test_a_rungs_compiler_takes_a_quarter_of_the_cores(cores, own, threads, monkeypatch):
    """Thirteen processes compile at the same time. A setting of the user's own comes first."""
    given = []
    monkeypatch.setattr(rounds, "start", lambda command, log, pipes, env: given.append(env))
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    monkeypatch.delenv("TORCHINDUCTOR_COMPILE_THREADS", raising=False)
    if own:
        monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", own)
    rounds.start_rung("{}", None, ())
    assert given[0]["TORCHINDUCTOR_COMPILE_THREADS"] == threads and "PATH" in given[0]


@pytest.mark.parametrize(("names", "crowded"), [("ab", "b"), ("b", "")])
def test_a_rung_that_runs_alone_and_has_no_room_has_failed(names, crowded, monkeypatch):
    """Beside one more it only waits for its turn."""
    monkeypatch.setattr(rounds, "WarmProcess", Stub)
    monkeypatch.setattr(Stub, "log", ["start"] * 3)
    programs = {"a": (1, ["a"]), "b": (1, ["b", "no room"])}
    told = {name: {} for name in programs}
    work = rounds.Rounds(programs, told, [], True, 2)
    with rounds.Processes() as running:
        assert work.warm(list(names), running, 10) == list(crowded)
    assert (told["b"].get("reason") == "out of memory") == (not crowded)


@pytest.mark.parametrize("why", ["no room", "no room to capture"])
def test_what_has_no_room_runs_afterwards_beside_what_it_is_compared_with(stubbed, why):
    programs = {"a": [], "b": [], "c": [], "d": [why]}
    found, told = stubbed(programs, [("a", "b"), ("b", "c"), ("c", "d")])
    wanted = [list("abc"), list("abc"), ["c"], ["c"]]  # there is never room for d
    assert [sorted(some["steps_ms"]) for some in found] == wanted
    assert told["d"]["reason"] == "out of memory"
    assert [line for line in Stub.log if line.startswith("start")] == [f"start {name}" for name in "abcdcd"]


def test_no_more_processes_run_than_memory_has_room_for(stubbed, monkeypatch):
    monkeypatch.setattr(Stub, "gpu_mib", 60_000)
    programs = {"a": ["20000 MiB"], "b": ["20000 MiB"], "c": ["9000 MiB"], "d": ["9000 MiB"]}
    found, told = stubbed(programs, [("a", "b"), ("b", "c"), ("b", "d")])
    # a alone, then b beside it; c and d, not yet seen, may be as large as they are
    assert [list(some["steps_ms"]) for some in found[::2]] == [["a", "b"], ["b", "c"], ["b", "d"]]
    assert {one["status"] for one in told.values()} == {"ok"}
    work = rounds.Rounds({name: (1, [name, *how]) for name, how in programs.items()}, told, [], True, 2)
    assert work.group([("a", "b"), ("b", "c"), ("d",)]) == list("abc")  # all sizes are known in the next start
    assert work.group([("a", "b"), ("b", "c"), ("b", "b again")]) == list("abc")
    assert work.group([("b", "c"), ("b", "b again")]) == ["b", "b again", "c"]
    monkeypatch.setattr(Stub, "gpu_mib", 30_000)
    found, told = stubbed(programs, [("a", "c"), ("c", "d")])  # a pair is tried, whatever is known
    assert [list(some["steps_ms"]) for some in found[::2]] == [["a"], ["a", "c"], ["c", "d"]]


def test_every_rung_is_measured_beside_what_it_is_compared_with():
    content = {"again": NOISIEST.name, "rounds": []}
    chosen = [rung.recorded() for rung in rungs.LADDER]
    pairs = measure_ladder.pairs_of(rungs.Column(content | {"rungs": chosen}), with_again=True)
    wanted = [(rung.base, rung.name) for rung in rungs.LADDER if rung.base]
    wanted += [(rung.name, peer) for rung in rungs.LADDER for peer in rung.peers]
    assert pairs == [*wanted, (NOISIEST.name, NOISIEST.name + rounds.AGAIN)]
    peers = [rung.recorded() for rung in rungs.PEERS]
    pairs = measure_ladder.pairs_of(rungs.Column(content | {"rungs": peers}), with_again=False)
    assert pairs == [(rung.name,) for rung in rungs.PEERS]


def ladder(folder, *words):
    try:
        return measure_ladder.main(["--presets", "tiny", "--results", str(folder), *words, *TOY])
    except SystemExit as end:
        return end.code


def test_starts_that_are_left_follow_the_last_one(monkeypatch):
    """Of the first start, in which every rung failed, there are no rounds: its number is not used again."""
    measured = []
    monkeypatch.setattr(rounds.Rounds, "measure", lambda work, pairs, start, turns: measured.append((start, [*turns])))
    found = column(six_rounds()[2:4])
    for round_ in found.rounds:
        round_["start"] = 1
    arguments = SimpleNamespace(starts=3, rounds=2, num_steps=10, peer_variants=False)
    assert measure_ladder.measure_column(found, arguments, TimeLimit(None), lambda: None) == 0
    assert measured == [(2, [4, 5])]


class Any(Stub):
    def __init__(self, version, options, steps):
        super().__init__(version, [f"{version} {' '.join(options)}"], steps)


def test_a_ladder_that_the_time_limit_cuts_off_is_taken_up(tmp_path, monkeypatch, capsys):
    """The status says that starts are left, and --append measures those alone."""
    monkeypatch.setattr(rounds, "WarmProcess", Any)
    monkeypatch.setattr(Stub, "log", [])
    with monkeypatch.context() as limited:
        limited.setattr(TimeLimit, "room", lambda limit: not limit.took)
        assert ladder(tmp_path, *TWO, "--time-limit", "600") == 1
    assert "not measured: 2 starts; repeat the command with --append" in capsys.readouterr().out
    (found,) = rungs.read_columns(tmp_path / "ladder.json")
    assert [round_["start"] for round_ in found.rounds] == [0, 0]
    assert ladder(tmp_path, *TWO, "--append") == 0 and "are left" not in capsys.readouterr().out
    (found,) = rungs.read_columns(tmp_path / "ladder.json")
    assert [(round_["start"], round_["turn"]) for round_ in found.rounds] == [(i // 2, i) for i in range(6)]
    assert sum(line.startswith("start") for line in Stub.log) == 3 * 3  # two rungs and the pair's second name


class Dying(Any):
    def answer(self, seconds):
        raise Failure(1, "lost")


def test_a_ladder_of_which_nothing_was_measured_has_failed(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(rounds, "WarmProcess", Dying)
    assert ladder(tmp_path, *TWO, "--starts", "1") == 1
    told = capsys.readouterr()
    assert f"{NOISIEST.base}: failed: lost" in told.err and "are left" not in told.out


class Interrupted(Any):
    def answer(self, seconds):
        asked = [line for line in self.log if not line.startswith(("start", "end"))]
        if len(asked) == 5:  # in the second round of three processes
            raise KeyboardInterrupt
        return super().answer(seconds)


def test_an_interrupted_ladder_keeps_the_rounds_that_it_has(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(rounds, "WarmProcess", Interrupted)
    monkeypatch.setattr(Stub, "log", [])
    assert ladder(tmp_path, *TWO) == 130
    assert "interrupted: the rounds that were measured are kept" in capsys.readouterr().err
    (found,) = rungs.read_columns(tmp_path / "ladder.json")
    assert len(found.rounds) == 1 and sum(line.startswith("end") for line in Stub.log) == 2 * 3


def test_all_columns_share_the_time_limit(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(rounds, "WarmProcess", Any)
    monkeypatch.setattr(TimeLimit, "room", lambda limit: not limit.took)
    assert ladder(tmp_path, *TWO, "--graph", "on,off", "--time-limit", "600") == 1
    (found,) = rungs.read_columns(tmp_path / "ladder.json")
    assert len(found.rounds) == 2 and found.content["graph"]  # nothing was begun of the eager one
    assert "not measured: 5 starts;" in capsys.readouterr().out


def test_processes_become_warm_within_one_time_limit(stubbed, monkeypatch):
    """Each takes 400 s of the 900 s for all of them."""
    now = [0.0]
    seconds = []
    answer = Stub.answer

    def slow_answer(process, limit):
        if process.warm:
            seconds.append(limit)
            now[0] += 400
        return answer(process, limit)

    monkeypatch.setattr(Stub, "answer", slow_answer)
    monkeypatch.setattr(rounds.time, "monotonic", lambda: now[0])
    stubbed({"a": [], "b": [], "c": [], "d": []})
    assert seconds == [900, 500, 100, 0]


@pytest.mark.parametrize(
    ("status", "printed", "kind", "wanted", "said"),
    [
        (-signal.SIGKILL, "", rounds.OutOfMemory, 1, "out of memory"),  # of the kernel, which says nothing
        (1, "x.py: out of memory: lower it", rounds.OutOfMemory, 1, "out of memory"),
        (2, "x.py: error: no such GPU", Failure, 2, "no such GPU"),
        (1, "ValueError: lost", Failure, 1, "ValueError: lost"),
    ],
)
def test_how_a_warm_process_ended_is_said(status, printed, kind, wanted, said):
    process = object.__new__(rounds.WarmProcess)
    process.process = SimpleNamespace(wait=lambda: status)
    process.log = io.BytesIO(printed.encode())
    error = process.failure()
    assert (type(error), error.status, str(error)) == (kind, wanted, said)


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ({}, True),
        *(({"record": {key: "another"}}, False) for key in ("host", "commit", "device", "driver", "packages")),
        ({"hash": "another"}, False),
        ({"options": "--seed 1"}, False),
        ({"again": "base"}, False),
        ({"names": ["base", "fast", "near"]}, False),
    ],
    ids=str,
)
def test_a_column_goes_on_only_with_what_it_began_with(change, same, monkeypatch):
    """On the same machine, with the same texts: a ratio of two machines or scripts is none."""
    columns = []
    record = dict.fromkeys(("host", "commit", "device", "driver", "packages"), "one")

    def begin(record, names=("base", "fast"), options="", again="fast", **_):
        arguments = SimpleNamespace(rungs=[SOME[name] for name in names], again=again)
        return measure_ladder.begin_column(arguments, "tiny", True, options, record, columns)

    first = begin(record)
    assert first.told["base"]["status"] == "not run"
    if "hash" in change:
        monkeypatch.setattr(measure_ladder, "hash_of", lambda path: change["hash"])
    second = begin(record | change.get("record", {}), **{k: v for k, v in change.items() if k != "record"})
    assert (second.content is first.content) == same and len(columns) == 2 - same


PEERS = ["--peer-variants", "--graph", "on"]


def test_the_peer_s_variants_run_once_and_the_slowest_compiler_where_it_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(rounds, "WarmProcess", Any)
    monkeypatch.setattr(Stub, "log", [])
    slow = rungs.SLOW_PEER.name
    assert ladder(tmp_path, *PEERS) == ladder(tmp_path, *PEERS, "--rungs", slow, "--append") == 0
    starts = [line for line in Stub.log if line.startswith("start")]
    assert len(starts) == len(set(starts)) == len(rungs.PEERS) + 1
    assert all(("max-autotune" in line) == (line == starts[-1]) for line in starts)
    first, second = rungs.read_columns(tmp_path / "peers.json")
    assert [*first.rungs] == [rung.name for rung in rungs.PEERS] and first.step_ms(rungs.PEERS[-1].name) == 1.5
    assert [*second.rungs] == [slow] and second.step_ms(slow) == 1.5


VARIANTS = [
    Rung("slow", "", "peer", ["--use-amp"]),
    Rung("quick", "", "peer", ["--use-amp", "--packed"]),
    Rung("autotuned", "", "peer", ["--use-amp", "--packed", "--compile-mode", "max"]),
    Rung("fp8 one", "", "peer", ["--use-amp", "--fp8"]),
]
STACK = Rung("stack", "", "peer", ["--use-amp", "--liger-loss"], tuned=True)


def variants(**ms):
    found = column([ms], known=rungs.by_name(VARIANTS), seconds=12.5)
    found.content |= {"preset": "tiny"}
    return found


def test_a_tuned_rung_takes_the_fastest_of_its_precision():
    found = variants(slow=[4.0], quick=[3.0], autotuned=[2.0])
    found.told["fp8 one"] = VARIANTS[-1].recorded()
    found.rungs["fp8 one"] = VARIANTS[-1]  # of which no round was measured
    older = variants(slow=[1.0])
    tuned, told = rungs.tuned(STACK, [older, found], "tiny", "")
    assert tuned == STACK._replace(options=["--use-amp", "--packed", "--liger-loss"])
    assert told == {"chosen": "quick", "steps_ms": {"slow": 4.0, "quick": 3.0}, "seconds": 12.5}
    in_fp8 = STACK._replace(options=["--use-amp", "--fp8"])
    assert rungs.tuned(in_fp8, [found], "tiny", "") == (in_fp8, {"chosen": None, "steps_ms": {}, "seconds": 12.5})
    for rung, columns, preset, options in (
        (STACK, [], "tiny", ""),
        (STACK, [found], "small", ""),
        (STACK, [found], "tiny", "--seq-len 9"),
        (in_fp8, [older], "tiny", ""),
    ):
        with pytest.raises(LookupError):
            rungs.tuned(rung, columns, preset, options)


def test_a_ladder_keeps_what_was_tuned(tmp_path, monkeypatch, capsys):
    """Its column holds the options that ran, what was tried, and the seconds that its starts took."""
    monkeypatch.setattr(rounds, "WarmProcess", Any)
    monkeypatch.setattr(Stub, "log", [])
    assert ladder(tmp_path, *PEERS) == 0
    words = ["--graph", "on", "--rungs", "peer,library", "--tuned", str(tmp_path / "peers.json")]
    assert ladder(tmp_path, *words) == 0
    (found,) = rungs.read_columns(tmp_path / "ladder.json")
    first = rungs.PEERS[0]  # all take as long
    assert found.rungs["library"].options == first.options and "tuning" not in found.told["peer"]
    tuning = found.told["library"]["tuning"]
    assert tuning["chosen"] == first.name and len(tuning["steps_ms"]) > 5 and tuning["seconds"] >= 0
    assert found.content["seconds"] >= 0
    assert ladder(tmp_path, *words, "--append", "--seed", "1") == 2
    said = f"has no bfloat16 variant for library: measure with --peer-variants --presets tiny --seed 1 {' '.join(TOY)}"
    assert said in capsys.readouterr().err


def test_a_column_for_each_vocabulary_and_a_second_call_completes_them(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(rounds, "WarmProcess", Any)
    monkeypatch.setattr(Stub, "log", [])
    assert ladder(tmp_path, *PEERS) == 0
    tuned = ["--tuned", str(tmp_path / "peers.json")]
    Stub.log.clear()
    assert ladder(tmp_path, "--graph", "on", *tuned, "--vocabularies", "64,32") == 0
    assert ladder(tmp_path, "--graph", "on", *tuned, "--vocabularies", "32,96", "--append") == 0
    options = " ".join(TOY)
    columns = rungs.read_columns(tmp_path / "vocabulary.json")
    assert [column.content["options"] for column in columns] == [f"{options} --vocab-size {V}" for V in (64, 32, 96)]
    for column in columns:
        assert [*column.rungs] == [rung.name for rung in rungs.VOCABULARY] and len(column.rounds) == 6
        assert column.gain("v3", "hf liger").rounds == column.gain("hf liger", "hf").rounds == 6
        assert column.rungs["stack liger"].options == [*rungs.PEERS[0].options, *rungs.LARGE_CHUNKS]
    assert "v3 compared with hf liger" in capsys.readouterr().out
    assert sum(line.startswith("start") for line in Stub.log) == 3 * 3 * 9  # eight rows and the pair's second name


@pytest.mark.slow
def test_the_ladder_on_real_scripts(tmp_path, capsys):
    """Version 2's first rung computes what its base computes, and a peer that this machine lacks stops no other."""
    first, second = FIRST_OF_VERSION_2.base, FIRST_OF_VERSION_2.name
    fp8 = next(rung.name for rung in rungs.LADDER if rung.version == "peer" and rung.precision == "fp8")
    options = ["--graph", "off", "--rungs", f"{first},{second},{fp8}", "--again", first]
    assert ladder(tmp_path, *options, "--starts", "1", "--rounds", "1", "--num-steps", "3") == 0
    (found,) = rungs.read_columns(tmp_path / "ladder.json")
    (only,) = found.rounds
    assert sorted(only["steps_ms"]) == sorted([first, first + rounds.AGAIN, second])
    assert all(len(ms) == 15 for ms in only["steps_ms"].values())
    assert found.told[first]["loss"] == pytest.approx(found.told[second]["loss"], rel=1e-3)
    assert found.told[fp8]["reason"] == "--fp8 needs a GPU, got cpu"
    assert "not judged: 1 round of the 5 needed" in capsys.readouterr().out


@pytest.mark.slow
def test_an_interrupted_ladder_ends_every_process(tmp_path):
    command = [sys.executable, str(REPOSITORY / "scripts" / "maintain" / "measure_ladder.py"), "--presets", "tiny"]
    command += ["--graph", "off", "--rungs", NOISIEST.base, "--results", str(tmp_path), *TOY]
    command += ["--seed", str(os.getpid())]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        until = time.monotonic() + 120
        while len(workers(os.getpid())) < 2 and time.monotonic() < until:  # the rung and its second name
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        said = process.communicate(timeout=120)
    assert process.returncode == 130 and "interrupted: the rounds that were measured are kept" in said[1], said
    assert not workers(os.getpid())


def workers(seed):
    """Return the warm processes of a test, which carry its process id as their seed."""
    words = []
    for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it ended while this looked
            words.append(path.read_bytes())
    return [line for line in words if b"rounds.py" in line and f'"--seed", "{seed}"'.encode() in line]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (f"--rungs {NOISIEST.name},none", f"--rungs, --again: none isn't one of {', '.join(RUNGS)}"),
        ("--again none", f"--rungs, --again: none isn't one of {', '.join(RUNGS)}"),
        (f"--rungs {NOISIEST.base} --again {NOISIEST.name}", f"--again: {NOISIEST.name} is not among the --rungs"),
        ("--graph maybe", "choose from on, off"),
        ("--starts 0", "--starts"),
        ("--vocabularies 64,many", "separate whole numbers with commas"),
        ("--vocabularies 64 --rungs h", "h isn't one of v2, v3 whole, v3, v4, hf, hf liger, stack, stack liger"),
        ("--vocabularies 64 --peer-variants", "measure different rows: give one of them"),
        ("--rungs library", "library: add --tuned with the peers.json that --peer-variants wrote"),
        ("--hiden-dim 3", "unrecognized arguments: --hiden-dim 3"),
        ("--data /home/me/text", "/home/me/text: a record names no folder of this machine"),
    ],
)
def test_bad_options_of_the_ladder(options, words, tmp_path, capsys):
    refused(lambda more: ladder(tmp_path, *options.split()), [], capsys, words)


def test_a_ladder_that_exists_is_kept(tmp_path, capsys):
    (tmp_path / "ladder.json").write_text(json.dumps({"columns": []}))
    refused(lambda more: ladder(tmp_path), [], capsys, "exists already: add --append")
    assert torch.get_float32_matmul_precision() == "highest"
