"""The exercises on several ranks: what the referee carries out and refuses, the timeline, the run under torchrun."""

import json
import math
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import types

import pytest
import torch

import analyze_communication
from common.command_line import Failure
from common.versions import REPOSITORY
from marks import slow
from processes import launch, run_file, running, wait_for

sys.path.insert(0, str(REPOSITORY / "exercises"))

import answers
import grading
import judge
import on_gpus
import one_rank
import ranks
import timeline

EXERCISES = {number: folder for number, folder in answers.exercises().items() if answers.runs_on_ranks(folder)}
FORKS = pytest.mark.skipif(torch.cuda.is_available(), reason="ranks are forks of a process that sees no GPU")
HEAD = "import os, signal, time\nimport torch\nimport torch.distributed as dist\n"


@pytest.fixture
def run(tmp_path):
    """run(body, size) runs the body of run(x), with the names rank and size, and returns the Records.

    x [4] is rank + 0, 1, 2, 3, the body returns a tensor, and its first line is line 7 of the file.
    more: text at the end of the file.
    """

    def run_body(body, size=2, more=""):
        path = tmp_path / "exercise.py"
        lines = ["rank, size = dist.get_rank(), dist.get_world_size()", *body.splitlines()]
        text = f"{HEAD}\ndef work(x):\n    " + "\n    ".join(lines)
        path.write_text(f"{text}\n\ndef run(x):\n    return {{'y': work(x)}}\n{more}")
        return ranks.on_ranks(path, [{"x": torch.arange(4.0) + rank} for rank in range(size)])

    return run_body


def returned(records):
    return [ranks.from_bytes(*record.results["y"]) for record in records]


@pytest.fixture
def clean(tmp_path, monkeypatch):
    """Fail a test that leaves a process or a temporary file."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    monkeypatch.setenv("TMPDIR", str(scratch))
    yield
    assert multiprocessing.active_children() == [] and list(scratch.iterdir()) == []


# ---------------------------------------------------------------- what the calls compute

PARTS = torch.arange(4.0)
ALL = torch.cat([PARTS + rank for rank in range(3)])


@FORKS
@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("y = x.clone(); dist.all_reduce(y); return y", [3 * PARTS + 3] * 3),
        ("y = x.clone(); dist.all_reduce(y, op=dist.ReduceOp.AVG); return y", [PARTS + 1] * 3),
        ("y = x.clone(); dist.all_reduce(y, dist.ReduceOp.MAX); return y", [PARTS + 2] * 3),
        ("y = x.clone(); dist.all_reduce(y, dist.ReduceOp.MIN); return y", [PARTS] * 3),
        (
            "y = x.clone() + 1; dist.all_reduce(y, dist.ReduceOp.PRODUCT); return y",
            [torch.tensor([6.0, 24, 60, 120])] * 3,
        ),
        ("y = x.long(); dist.all_reduce(y); return y", [(3 * PARTS + 3).long()] * 3),
        ("y = x.bfloat16(); dist.all_reduce(y); return y", [(3 * PARTS + 3).bfloat16()] * 3),
        ("y = x.clone(); dist.broadcast(y, 1); return y", [PARTS + 1] * 3),
        ("y = x.clone(); dist.broadcast(y, group_src=2); return y", [PARTS + 2] * 3),
        ("y = x.new_empty(12); dist.all_gather_into_tensor(y, x); return y", [ALL] * 3),
        ("y = x.new_empty(12); dist.all_gather_into_tensor(y, x, async_op=True).wait(); return y", [ALL] * 3),
        (
            "y = x.new_empty(2); dist.reduce_scatter_tensor(y, torch.arange(6.0) + rank); return y",
            [torch.tensor([3.0, 6]), torch.tensor([9.0, 12]), torch.tensor([15.0, 18])],
        ),
        (
            "y = torch.arange(6.0); y = y[2 * rank : 2 * rank + 2]; w = y.new_empty(6)\n"
            "w[2 * rank : 2 * rank + 2] = y; dist.all_gather_into_tensor(w, w[2 * rank : 2 * rank + 2]); return w",
            [torch.arange(6.0)] * 3,
        ),
        ("dist.barrier(); return x", [PARTS, PARTS + 1, PARTS + 2]),
        (
            "y = torch.empty_like(x)\n"
            "ops = [dist.P2POp(dist.isend, x, (rank + 1) % size), dist.P2POp(dist.irecv, y, (rank - 1) % size)]\n"
            "[work.wait() for work in dist.batch_isend_irecv(ops)]; return y",
            [PARTS + 2, PARTS, PARTS + 1],
        ),
        (
            "y = torch.empty_like(x)\n"
            "if rank % 2: dist.recv(y, rank - 1); dist.send(x, (rank + 1) % size)\n"
            "else: dist.send(x, (rank + 1) % size); dist.recv(y, (rank - 1) % size)\nreturn y",
            [PARTS + 2, PARTS, PARTS + 1],
        ),
        (
            "a, b = x.clone(), x + 1; works = [dist.all_reduce(t, async_op=True) for t in (a, b)]\n"
            "[work.wait() for work in reversed(works)]; return a + b",
            [6 * PARTS + 9] * 3,
        ),
    ],
)
def test_calls_compute_what_pytorch_says(run, body, expected):
    found = returned(run(body, size=3))
    for mine, right in zip(found, expected, strict=True):
        assert mine.dtype == right.dtype and torch.equal(mine, right)


@FORKS
@pytest.mark.skipif(not hasattr(torch.distributed, "all_gather_single"), reason="PyTorch has the old names only")
def test_the_new_names_of_pytorch_are_known(run):
    body = "y = x.new_empty(8); dist.all_gather_single(y, x)\n"
    body += "z = x.new_empty(4); dist.reduce_scatter_single(z, y); return z"
    records = run(body)
    assert [call.name for call in records[0].calls] == list(one_rank.RENAMED.values())
    assert torch.equal(returned(records)[1], 2 * (PARTS + 1))


@FORKS
@pytest.mark.parametrize(
    ("body", "said"),
    [
        (
            "given((x if rank else x[:3]).clone())",
            "(SUM), line 8 on rank 0, but all_reduce of [4] float32 (SUM), line 8 ",
        ),
        ("if rank: given(x.clone())\nelse: given(x.clone()); given(x.clone())", "line 9; rank 1 has ended"),
        (
            "if rank: given(x.clone())\nelse: given(x.clone()[:3])",
            "line 9 on rank 0, but all_reduce of [4] float32 (SUM), line 8",
        ),
        ("given(None)", "rank 0, line 8: "),
    ],
)
def test_a_line_named_is_one_that_the_reader_wrote(run, body, said):
    """A call that a given function makes is named by the line between the TODOs that called the function."""
    given = "\ndef given(x):\n    dist.all_reduce(x + 0)\n"
    with pytest.raises(judge.Wrong, match=re.escape(said)):
        run(f"# TODO: write\n{body}\n# end of TODO\nreturn x", more=given)


@FORKS
def test_nothing_has_arrived_before_wait(run):
    body = (
        "y = x.clone(); work = dist.all_reduce(y, async_op=True); z = y.clone(); work.wait(); return torch.cat([z, y])"
    )
    records = run(body)
    for y in returned(records):
        assert y[:4].isnan().all() and torch.equal(y[4:], 2 * PARTS + 1)
    assert [record.early for record in records] == [7, 7]


# ---------------------------------------------------------------- what the referee refuses

EXCHANGE = "y = torch.empty_like(x); works = dist.batch_isend_irecv([dist.P2POp(dist.isend, x, 1 - rank), "
EXCHANGE += "dist.P2POp(dist.irecv, y, 1 - rank)])\n"


@FORKS
@pytest.mark.parametrize(
    ("body", "kind", "said"),
    [
        (
            "y = x if rank else x.double(); dist.all_reduce(y.clone())",
            "mismatch",
            "float64 (SUM), line 7 on rank 0, but all_",
        ),
        (
            "dist.all_reduce((x if rank else x[:3]).clone())",
            "mismatch",
            "collective 1 is all_reduce of [3] float32 (SUM)",
        ),
        ("dist.all_reduce((x if rank else x.view(2, 2)).clone())", "mismatch", "of [2, 2] float32"),
        (
            "dist.all_reduce(x.clone(), dist.ReduceOp.MAX if rank else dist.ReduceOp.SUM)",
            "mismatch",
            "(MAX), line 7 on rank 1",
        ),
        ("dist.broadcast(x.clone(), rank)", "mismatch", "broadcast from rank 0 of [4] float32, line 7 on rank 0, but"),
        ("dist.barrier() if rank else dist.all_reduce(x.clone())", "mismatch", "but barrier, line 7 on rank 1"),
        (
            "if rank: dist.all_reduce(x.clone())",
            "deadlock",
            "rank 0 has ended after 0 calls; rank 1 waits in all_reduce",
        ),
        (
            "dist.send(x, 1) if rank == 0 else dist.recv(x.clone().long(), 0)",
            "mismatch",
            "both ends must name the same size, dtype and tag",
        ),
        ("dist.send(x, 1, tag=3) if rank == 0 else dist.recv(x.clone(), 0)", "mismatch", "with tag 3"),
        (
            "work = dist.isend(x, 1 - rank); dist.recv(x.clone(), 1 - rank); work.wait()",
            "deadlock",
            "every rank first sends",
        ),
        ("dist.recv(x.clone(), 1 - rank)", "deadlock", "every rank first receives, and none sends"),
        (
            "dist.all_reduce(x.clone()) if rank else dist.recv(x.clone(), 1)",
            "deadlock",
            "no rank can go on: rank 0 waits in recv from rank 1 of [4] float32, line 7; rank 1 waits in all_reduce",
        ),
        ("dist.all_reduce(x.clone(), group=3)", "group", "all_reduce has a group=, but there is one group"),
        ("dist.all_reduce(x.view(2, 2).T)", "tensor", "not one of [2, 2] with strides [1, 2]: send its contiguous()"),
        ("dist.send(x[::2], 1 - rank)", "tensor", "line 7: send needs a contiguous tensor"),
        ("dist.all_gather_into_tensor(x.new_empty(8), x.half())", "tensor", "got tensors of float32 and float16"),
        ("dist.all_gather_into_tensor(x.new_empty(9), x)", "tensor", "a whole of [9] and a part of [4]"),
        (
            "dist.all_gather_into_tensor(x.new_empty(2, 4), x)",
            "tensor",
            "2 parts one after another must make the whole",
        ),
        ("dist.reduce_scatter_tensor(x.new_empty(3), x.clone())", "tensor", "a whole of [4] and a part of [3]"),
        ("dist.all_reduce(x.clone(), dist.ReduceOp.BAND)", "tensor", "can't use ReduceOp.BAND"),
        ("dist.all_reduce(x.long(), dist.ReduceOp.AVG)", "tensor", "can't use ReduceOp.AVG of torch.int64"),
        ("dist.all_reduce(None)", "tensor", "line 7: all_reduce got None on rank 0, and needs a tensor"),
        (
            "dist.P2POp(dist.isend, 1 - rank, x)",
            "tensor",
            "P2POp takes dist.isend or dist.irecv, a tensor and a rank, in this order, and got 1 for the tensor",
        ),
        ("dist.send(x, 2)", "peer", "send names rank 2, but there are ranks 0 to 1"),
        ("dist.send(x, rank)", "peer", "which is the one that calls it"),
        (
            "dist.batch_isend_irecv([dist.P2POp(dist.send, x, 1 - rank)])",
            "tensor",
            "P2POps of dist.isend or dist.irecv only",
        ),
        ("dist.all_gather_object([x, x], x)", "bypass", "line 7: here torch.distributed has these functions only"),
        ("dist.all_gather([x, x], x)", "bypass", "line 7: here torch.distributed has these functions only: all_reduce"),
        (
            "dist.init_process_group('gloo')",
            "bypass",
            "line 7: init_process_group would make groups, but the checker has set the ranks up",
        ),
        ("dist.new_group([0])", "bypass", "line 7: new_group would make groups"),
        ("dist.init_device_mesh('cpu', (2,))", "bypass", "line 7: init_device_mesh would make groups"),
        (
            "dist.all_reduce(x.clone(), async_op=True)",
            "unfinished",
            "never waits for its all_reduce of [4] float32 (SUM), line 7",
        ),
        (EXCHANGE + "works[1].wait()", "unfinished", "rank 0 never waits for its isend to rank 1"),
        (
            EXCHANGE + "x.add_(1)",
            "race",
            "line 8 writes to a tensor on rank 0 that is being sent: first wait() for the isend",
        ),
        (EXCHANGE + "torch.add(x, 1, out=x)", "race", "line 8 writes to a tensor on rank 0 that is being sent"),
        (EXCHANGE + "torch._foreach_add_([x], 1)", "race", "line 8 writes to a tensor on rank 0 that is being sent"),
        (EXCHANGE + "x[1:2].zero_()", "race", "that is being sent"),
        (EXCHANGE + "y[:1].mul_(2)", "race", "that has not arrived yet: first wait() for the irecv"),
        (
            EXCHANGE + "dist.isend(y, 1 - rank)",
            "race",
            "line 8: isend sends a tensor on rank 0 that has",
        ),
        (
            EXCHANGE + "dist.irecv(x, 1 - rank)",
            "race",
            "line 8: irecv writes to a tensor on rank 0",
        ),
        (
            "y = x.new_empty(8); x = x.clone(); work = dist.all_gather_into_tensor(y, x, async_op=True); x.zero_()",
            "race",
            "that is being sent: first wait() for the all_gather",
        ),
        ("x.mul_(2)", "changed", "x: line 7 changes it on rank 0, but it's an input: work on a clone"),
        ("dist.all_reduce(x)", "changed", "x: line 7 lets all_reduce write its result there on rank 0"),
        ("missing", "crash", "rank 0, line 7: NameError: name 'missing' is not defined"),
        ("if rank: raise ValueError('no')\ndist.barrier()", "crash", "rank 1, line 7: ValueError: no"),
        ("if rank: os._exit(3)\ndist.barrier()", "crash", "the process of rank 1 ended Python with status 3"),
        (
            "if rank: os.kill(os.getpid(), signal.SIGKILL)\ndist.barrier()",
            "crash",
            "the process of rank 1 was ended by SIGKILL",
        ),
        (
            "if rank: os.kill(os.getpid(), signal.SIGSEGV)\ndist.barrier()",
            "crash",
            "the process of rank 1 was ended by SIGSEGV",
        ),
    ],
)
def test_what_the_referee_refuses(run, clean, body, kind, said):
    with pytest.raises(judge.Wrong) as caught:
        run(f"{body}\nreturn x.clone()")
    assert caught.value.kind == kind and said in str(caught.value), (caught.value.kind, str(caught.value))


@FORKS
def test_an_endless_loop_is_found_in_its_line(run, clean, monkeypatch):
    monkeypatch.setattr(one_rank, "CPU_SECONDS", 1)
    with pytest.raises(judge.Wrong, match="rank 1 has computed for 1 s, and is in line 7: does every loop end?"):
        run("while rank: pass\ndist.barrier(); return x")


@FORKS
def test_a_loop_that_catches_everything_is_ended_all_the_same(run, clean, monkeypatch):
    monkeypatch.setattr(one_rank, "CPU_SECONDS", 1)
    body = "while rank:\n    try:\n        while True: pass\n    except BaseException: pass\ndist.barrier(); return x"
    with pytest.raises(judge.Wrong, match="rank 1 (has computed for 1 s|was ended by SIGKILL)"):
        run(body)


def test_neighbours_in_memory_do_not_overlap():
    x = torch.zeros(4)
    for a, b, shares in ((x[:2], x[2:], False), (x[:3], x[2:], True), (x[1:2], x, True), (x[:1], x[3:], False)):
        assert one_rank.overlap(a, b) is one_rank.overlap(b, a) is shares


@FORKS
def test_a_loop_of_too_many_calls_is_ended(run, clean, monkeypatch):
    monkeypatch.setattr(one_rank, "MOST_CALLS", 5)
    with pytest.raises(judge.Wrong, match="rank 0 has made 5 calls, the last in line 7"):
        run("for _ in range(9): dist.barrier()\nreturn x.clone()")
    run("for _ in range(5): dist.barrier()\nreturn x.clone()")


DOUBLE = """
class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y):
        {}

    @staticmethod
    def backward(ctx, dy):
        {}
"""
FORWARD = "return 2 * y"
BACKWARD = "return 2 * dy"
TWICE = "y = Double.apply(1 * x.clone().requires_grad_()); y.backward(x.clone()); return y.detach()"


@FORKS
@pytest.mark.parametrize(
    ("forward", "backward", "method"),
    [
        ("return y.mul_(2)", BACKWARD, "forward"),
        ("dist.all_reduce(y); return y", BACKWARD, "forward"),
        (FORWARD, "dist.all_reduce(dy); return dy", "backward"),
    ],
)
def test_a_method_of_an_autograd_function_may_not_change_its_argument(run, forward, backward, method):
    with pytest.raises(judge.Wrong, match=f"Double.{method} changes its argument on rank 0") as caught:
        run(TWICE, more=DOUBLE.format(forward, backward))
    assert caught.value.kind == "changed"


@FORKS
@pytest.mark.parametrize(
    ("forward", "backward"),
    [
        ("ctx.mark_dirty(y); dist.all_reduce(y); return y", BACKWARD),
        ("y = y.clone(); dist.all_reduce(y); return y", "dy = 2 * dy; dist.all_reduce(dy); return dy"),
    ],
)
def test_a_method_of_an_autograd_function_may_change_what_it_made_or_marked(run, forward, backward):
    assert torch.equal(returned(run(TWICE, more=DOUBLE.format(forward, backward)))[0], 2 * PARTS + 1)


@FORKS
@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("return None if rank else x.clone()", "y is None on rank 1"),
        ("return [x.clone()]", "y is of the type list: make it one tensor"),
        ("return x.clone().bfloat16() if rank else x.clone()", "y: it has the dtype bfloat16 on rank 1, and must have"),
        (
            "y = x.clone(); work = dist.all_reduce(y, async_op=True)\n    z = 2 * y; work.wait(); return z",
            "NaN on rank 0: line 6 reads a tensor before its wait(), and until then the checker fills it with NaN",
        ),
    ],
)
def test_what_is_said_of_results(tmp_path, body, said):
    path = tmp_path / "exercise.py"
    last = "def run(x):\n    return {'y': work(x, dist.get_rank())}"
    path.write_text(f"{HEAD}def work(x, rank):\n    {body}\n\n{last}\n")
    x = torch.ones(2, 4)
    with pytest.raises(judge.Wrong) as caught:
        ranks.on_each_rank("x")(types.SimpleNamespace(__file__=str(path)), {"x": x}, {"y": torch.empty(2, 4)})
    assert said in str(caught.value)


@FORKS
@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("dist.all_reduce(y)", None),
        ("dist.all_reduce(y, dist.ReduceOp.AVG)", None),
        ("dist.all_reduce(y.long()); dist.all_reduce(y.double())", None),
        ("dist.all_reduce(y, dist.ReduceOp.MIN)", "line 8: all_reduce takes the MIN over the ranks: leave op= out"),
        ("dist.all_reduce(y.half())", "line 8: all_reduce gets float16, which has about 3 digits: send float32"),
        ("dist.broadcast(y, 1)", "line 8: broadcast gives every rank what rank 1 has, and nothing of the others"),
        (
            "if rank: dist.all_reduce(y)\nelse: dist.all_reduce(2 * y)",
            "call 1 is in line 9 on rank 0, in line 8 on rank 1: different calls of the ranks met",
        ),
        ("if rank: dist.send(y, 0)\nelse: dist.recv(y, 1)", None),
    ],
)
def test_what_is_said_of_the_calls_behind_a_wrong_sum(run, monkeypatch, body, said):
    monkeypatch.setattr(ranks, "recorded", [run(f"y = x.clone()\n{body}\nreturn x.clone()")])
    found = ranks.describe_calls()
    assert found is None if said is None else said in found


@FORKS
@pytest.mark.parametrize("late", [0, 1, 2])
@pytest.mark.parametrize(
    ("body", "said"),
    [
        (
            "dist.all_reduce(x.clone() if rank else x.long())",
            "[4] int64 (SUM), line 7 on rank 0, but all_reduce of [4]",
        ),
        ("assert rank == 0; dist.barrier()", "rank 1, line 7: AssertionError"),
    ],
)
def test_the_sentence_depends_on_no_clock(run, body, said, late):
    with pytest.raises(judge.Wrong) as caught:
        run(f"time.sleep(0.3 * (rank == {late})); {body}", size=3)
    assert said in str(caught.value)


@FORKS
def test_what_a_rank_prints_is_shown_once(run, tmp_path, monkeypatch):
    """A fork has a copy of what its parent has printed into a buffer."""
    with open(tmp_path / "printed", "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        print("before")
        run("print('rank', rank); return x.clone()")
        monkeypatch.undo()
    assert sorted((tmp_path / "printed").read_text().splitlines()) == ["before", "rank 0", "rank 1"]


# ---------------------------------------------------------------- the process around the ranks


def test_a_gpu_is_hidden_from_ranks_alone(monkeypatch):
    asked = []

    def grade_apart(jobs, timeout, environment, program):
        asked.append((jobs, [environment.get(name) for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")]))
        return [{"passed": False, "of": path} for _, path in jobs]

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "1")
    monkeypatch.setattr(answers, "grade_apart", grade_apart)
    folders = answers.exercises()
    jobs = [(folders[number], number) for number in ("25", "01", "29", "02")]
    assert [verdict["of"] for verdict in answers.grade(jobs)] == ["25", "01", "29", "02"]
    assert asked == [([jobs[1], jobs[3]], ["1", "1"]), ([jobs[0], jobs[2]], ["", ""])]


def test_forks_in_a_process_that_sees_a_gpu_are_refused(run, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(RuntimeError, match="no GPU may be visible here"):
        run("return x")


def test_where_a_fork_is_not_safe_one_sentence_says_so(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(Failure, match="ranks are forked, which is not safe on darwin: use Linux") as caught:
        answers.grade([(EXERCISES["25"], "exercise.py")])
    assert caught.value.status == 1


@pytest.fixture
def workshop(tmp_path):
    """Return a copy of the exercises beside the real scripts, in whose exercise 25 rank 1 never ends."""
    root = tmp_path / "workshop"
    ignored = shutil.ignore_patterns("__pycache__", ".progress.json")
    shutil.copytree(REPOSITORY / "exercises", root / "exercises", ignore=ignored)
    (root / "scripts").symlink_to(REPOSITORY / "scripts")
    folder = root / "exercises" / EXERCISES["25"].name
    loop = (
        "    import os\n    open(PIDS, 'a').write(f'{os.getpid()}\\n')\n    while dist.get_rank() == 1:\n        pass\n"
    )
    text = (folder / "answer.py").read_text().replace("    total = x.clone()\n", f"{loop}    total = x.clone()\n")
    (folder / "exercise.py").write_text(f"{text}\nPIDS = {str(tmp_path / 'pids')!r}\n")
    return root / "exercises"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("number", [signal.SIGINT, slow(signal.SIGTERM), slow(signal.SIGKILL)], ids=lambda n: n.name)
def test_a_checker_that_is_ended_leaves_no_rank_and_no_file(workshop, number):
    pids = workshop.parent.parent / "pids"
    scratch = workshop / "scratch"
    scratch.mkdir()
    command = [sys.executable, workshop / "check.py", "25"]
    environment = os.environ | {"TMPDIR": str(scratch)}
    with subprocess.Popen(command, stderr=subprocess.DEVNULL, env=environment) as checker:
        try:
            wait_for(lambda: pids.exists() and len(pids.read_text().split()) == 3)
        finally:
            checker.send_signal(number)
    wait_for(lambda: not any(running(pid) for pid in pids.read_text().split()))
    if number == signal.SIGINT:  # the others leave a process no time
        assert list(scratch.iterdir()) == []


def test_no_instructions_are_right_where_no_kernel_is_launched(workshop):
    folder = workshop / EXERCISES["29"].name
    shutil.copy(folder / "answer.py", folder / "exercise.py")
    done = run_file(workshop / "check.py", "29", "--target", "gfx942")
    assert done.returncode == 2 and "exercise 29 launches no kernel, so gfx942 has nothing to execute" in done.stderr


# ---------------------------------------------------------------- the timeline

HIDDEN = """works = [dist.all_reduce(x.clone(), async_op=True)]
a = torch.ones(100, 100)
for _ in range(2 - rank):
    a = a @ a
dist.all_reduce(x.clone())
works[0].wait()
return a"""
MATMUL_US = 2 * 100**3 / timeline.FLOP_PER_US
CALL_US = timeline.LATENCY_US + 16 / timeline.BYTES_PER_US  # two ranks send the whole tensor once


@FORKS
def test_a_timeline_hides_what_runs_beside_a_computation(run):
    """Rank 0 multiplies twice, rank 1 once; the first call is hidden, and the second waits for rank 0."""
    found = timeline.simulate(run(HIDDEN))
    assert [len(spans) for spans in found.compute] == [2, 1]
    assert found.network == [(0, CALL_US), (2 * MATMUL_US, 2 * MATMUL_US + CALL_US)]
    assert found.total == pytest.approx(2 * MATMUL_US + CALL_US) and found.communication == pytest.approx(2 * CALL_US)
    assert found.waits == [[(2 * MATMUL_US, found.total)], [(MATMUL_US, found.total)]]
    assert found.exposed == pytest.approx(MATMUL_US + CALL_US)


@FORKS
def test_calls_of_a_rank_run_one_after_another(run):
    body = "works = [dist.all_reduce(x.clone(), async_op=True) for _ in range(3)]\n[work.wait() for work in works]"
    found = timeline.simulate(run(f"{body}\nreturn x.clone()"))
    assert found.network == [(i * CALL_US, pytest.approx((i + 1) * CALL_US)) for i in range(3)]


@FORKS
def test_messages_take_a_latency_and_their_bytes_and_wait_for_those_before(run):
    body = "y = torch.empty_like(x); dist.send(x, 1) if rank == 0 else dist.recv(y, 0)\n"
    body += "dist.send(x[:2], 0) if rank else dist.recv(y[:2], 1); return y"
    found = timeline.simulate(run(body))
    first, second = timeline.LATENCY_US + 16 / timeline.BYTES_PER_US, timeline.LATENCY_US + 8 / timeline.BYTES_PER_US
    assert found.network == [(0, first), (first, pytest.approx(first + second))]
    assert found.exposed == pytest.approx(first + second)


def test_a_picture_shows_who_is_busy_when():
    found = timeline.Timeline([[(0, 32), (48, 64)], [(0, 16)]], [[(32, 48)], [(16, 64)]], [(16, 40), (40, 64)], 64)
    assert found.picture().splitlines() == [
        f"   rank 0   |{'#' * 32}{' ' * 16}{'#' * 16}|",
        f"   rank 1   |{'#' * 16}{' ' * 48}|",
        f"   network  |{' ' * 16}{'a' * 24}{'b' * 24}|",
        "   # computes, each letter is an exchange: 64 us, exposed 48 us",
    ]
    assert max(len(line) for line in found.picture().splitlines()) < 80  # of a narrow terminal


@FORKS
@pytest.mark.parametrize("wrong", [None, "one bucket after another", slow("everything at the end")])
def test_exposed_time_is_that_of_the_tool_for_traces(wrong, tmp_path):
    """Write exercise 26's timeline as a trace: a rank's NCCL kernel runs from its call to the end of the exchange."""
    folder = EXERCISES["26"]
    task = grading.load_task(folder)
    text = answers.solution_of(folder).read_text()
    if wrong:
        text = text.replace(task.mistakes[wrong].text, task.mistakes[wrong].replacement)
    (tmp_path / "answer.py").write_text(text)
    grading.grade(folder, tmp_path / "answer.py")
    simulation = timeline.Simulation(ranks.recorded[-1])
    found = simulation.run()
    for rank, record in enumerate(ranks.recorded[-1]):
        spans = [("gemm", begin, end, 1) for begin, end in found.compute[rank]]
        free = 0.0
        for index, call in enumerate(record.calls):
            begin = max(free, simulation.called[rank, index])
            free = simulation.done[call.meeting]
            spans.append(("ncclDevKernel_AllReduce_Sum_f32_RING_LL", begin, free, 2))
        events = [
            {"ph": "X", "cat": "kernel", "name": name, "ts": begin, "dur": end - begin, "pid": 0, "tid": stream,
             "args": {"device": 0, "stream": stream}}
            for name, begin, end, stream in spans
        ]  # fmt: skip
        trace = {"traceEvents": events, "deviceProperties": [{"id": 0, "name": "Toy GPU"}]}
        (tmp_path / f"trace_rank{rank}_1.json").write_text(json.dumps(trace | {"distributedInfo": {"rank": rank}}))
    target = tmp_path / "found.json"
    assert analyze_communication.main([str(tmp_path), "--steps", "1", "--json", str(target)]) == 0
    rows = json.loads(target.read_text())["processes"]
    exposed = [1000 * row["exposed_ms"] for row in rows]
    waited = [sum(end - begin for begin, end in waits) for waits in found.waits]
    assert exposed == pytest.approx(waited, rel=1e-3) and max(exposed) == pytest.approx(found.exposed, rel=1e-3)


# ---------------------------------------------------------------- under torchrun

PROGRAM = REPOSITORY / "exercises" / "on_gpus.py"


@pytest.fixture
def small(monkeypatch):
    """Have the processes of launch() find no GPU."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "")


@pytest.mark.parametrize("number", ["28", slow("25"), slow("26"), slow("27"), slow("29")])
def test_a_solution_runs_on_gloo(number, small):
    done = launch(2, PROGRAM, number, "--solution")
    first, *lines = done.stdout.splitlines()
    assert done.returncode == 0 and first == f"{number} on 2 x cpu with gloo: right", done.stderr
    rows = [line.split() for line in lines[1:]]
    sizes = on_gpus.SIZES[number][2]
    if number == "28":  # of four bytes: half of the gradients and half of the weights, in each step
        assert [row[2:4] for row in rows] == [["6", f"{sizes['n'] * 4 * sizes['steps'] / 1e6:.3f}"]] * 2
    assert all(len(row) == 7 and float(row[4]) > 0 for row in rows) and len(rows) == (0 if number == "27" else 2)


def test_one_rank_says_that_nothing_was_sent(small):
    done = launch(1, PROGRAM, "25", "--solution")
    assert done.returncode == 0 and "nothing was sent, because there is one rank" in done.stdout, done.stderr
    assert done.stdout.splitlines()[-1].split()[2:4] == ["0", "0.000"]


def test_a_wrong_answer_is_told_by_the_status(small, workshop):
    folder = workshop / EXERCISES["28"].name
    text = (folder / "answer.py").read_text().replace("mine / dist.get_world_size()", "mine")
    (folder / "exercise.py").write_text(text)
    done = launch(2, workshop / "on_gpus.py", "28")
    assert (
        done.returncode == 1
        and done.stdout == "28 on 2 x cpu with gloo: WRONG; python exercises/check.py 28 says why\n"
    )


@pytest.mark.parametrize(
    ("arguments", "variables", "said"),
    [
        ("26 --solution", {}, "start it with torchrun"),
        ("26", {"RANK": "0"}, "exercise.py is not started"),
        ("01", {"RANK": "0"}, "exercise 01 runs on one GPU: choose one of 25, 26, 27, 28, 29"),
        ("99", {"RANK": "0"}, "there is no exercise 99"),
    ],
)
def test_what_cannot_run_is_one_line(arguments, variables, said, small):
    done = run_file(PROGRAM, *arguments.split(), **variables)
    assert done.returncode == 2 and said in done.stderr and done.stderr.count("\n") == 1, done.stderr


def test_sizes_can_be_cut_for_all_ranks_of_a_host():
    assert on_gpus.SIZES.keys() == EXERCISES.keys()
    for number, sizes in on_gpus.SIZES.items():
        known = {*next(iter(grading.load_task(EXERCISES[number]).cases.values())), "B", "C"} - {"size"}
        assert all({*some} <= known for some in sizes if some)
    assert on_gpus.PARTS % math.lcm(*range(1, 9)) == 0
