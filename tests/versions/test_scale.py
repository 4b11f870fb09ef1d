"""More than one process: the same losses, gradients and weights as one, and an end for all when one ends."""

import json
import math
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import pytest
import torch
from parallel_worker import trained

from common.versions import SCRIPTS, load_version, relative_error
from kernel_cases import normal
from processes import SIZES, environment, launch

WORKER = pathlib.Path(__file__).with_name("parallel_worker.py")
CASES = [
    (version, [*SIZES.split(), "--warmup-steps", "1", "--batch-size", "2", "--parallel", engine])
    for version in SCRIPTS
    for engine in ("ddp", "fsdp")
]
# Differences in float32: relative for losses, rms over rms for tensors. The mean over rows is taken in another order,
# which moves gradients by 1.6e-7; AdamW's division makes 3.5e-6 of it in the weights after three steps, which makes
# 2.4e-6 of it in the moments.
SAME = {"losses": 1e-6, "gradients": 1e-6, "weights": 2e-5, "exp_avg": 1e-5, "exp_avg_sq": 1e-5}


def two_processes(folder, cases, device):
    results = folder / "results.pt"
    cases = json.dumps([(version, [*argv, "--device", device]) for version, argv in cases])
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}  # version 3 then takes the interpreter
    worked = launch(2, WORKER, results, cases, variables=hidden)
    assert worked.returncode == 0, worked.stderr[-3000:]
    return torch.load(results)


def alone(version, argv, batch_size=4):
    """The same case in this one process, with the rows that the two processes had together."""
    argv = list(argv)
    argv[argv.index("--batch-size") + 1] = str(batch_size)
    for option in ("--parallel", "--amp-dtype"):
        if option in argv:
            del argv[argv.index(option) : argv.index(option) + 2]
    return trained(version, [option for option in argv if option != "--compress-gradients"])


def assert_same(got, wanted, scale=1):
    assert got["losses"] == pytest.approx(wanted["losses"], rel=scale * SAME["losses"])
    for kind in ("gradients", "weights", "exp_avg", "exp_avg_sq"):
        assert got[kind].keys() == wanted[kind].keys()
        errors = {name: relative_error(got[kind][name], wanted[kind][name]) for name in wanted[kind]}
        worst = max(errors, key=errors.get)
        assert errors[worst] <= scale * SAME[kind], f"{kind}: {worst} is {errors[worst]:.1e} off"


COMPRESSED = (1, [*CASES[0][1], "--compress-gradients", "--amp-dtype", "float16"])


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Results of all cases on the CPU, from one launch: a launch costs more than the cases."""
    found = two_processes(tmp_path_factory.mktemp("scale"), [*CASES, COMPRESSED], "cpu")
    return {(version, *argv): result for (version, argv), result in zip([*CASES, COMPRESSED], found, strict=True)}


@pytest.mark.parametrize("version, argv", CASES, ids=[f"v{v}-{argv[-1]}" for v, argv in CASES])
def test_two_processes_train_as_one(results, version, argv):
    if version == 3 and torch.cuda.is_available():
        pytest.skip("with a GPU, Triton's kernels do not run on the CPU")
    assert_same(results[(version, *argv)], alone(version, [*argv, "--device", "cpu"]))


def test_compressed_gradients_are_those_of_float32_rounded(results):
    version, argv = COMPRESSED
    got, wanted = results[(version, *argv)], alone(version, [*argv, "--device", "cpu"])
    errors = [relative_error(got["gradients"][name], wanted["gradients"][name]) for name in wanted["gradients"]]
    assert 1e-5 < max(errors) < 2e-3  # float16 rounds to 2^-11; exact ones would mean that nothing was compressed


# ---------------------------------------------------------------- from the command line


def test_a_run_of_two_reports_once_and_its_checkpoint_goes_on_in_one(tmp_path):
    """Sharded, stopped after four of six steps, and resumed by one process with the batch of both."""
    sizes, folder = SIZES.split(), tmp_path / "check points"
    common = ["--warmup-steps", "1", "--device", "cpu", "--checkpoint-dir", str(folder)]
    metrics = [tmp_path / "two.json", tmp_path / "one.json"]
    two = launch(
        2, SCRIPTS[1], *sizes, *common, "--batch-size", 3, "--num-steps", 4, "--save-every", 2, "--parallel", "fsdp",
        "--metrics-file", metrics[0], cwd=tmp_path,
    )  # fmt: skip
    assert two.returncode == 0, two.stderr
    assert len(re.findall("^summary of 4 steps", two.stdout, re.MULTILINE)) == 1
    assert "processes  2, FSDP2 over gloo, 6 sequences a step in all" in two.stdout
    content = json.loads(metrics[0].read_text())
    summary = content["summary"]
    assert (summary["world_size"], summary["parallel"], len(summary["rank_step_ms"])) == (2, "fsdp", 2)
    assert summary["parameters_trained"] == summary["parameters"]
    assert summary["samples_per_second"] == pytest.approx(2 * 3 * 1000 / summary["step_ms"]["median"])
    for step in content["steps"]:
        assert step["step_ms"] == max(step["rank_step_ms"])

    one = ["--batch-size", "6", "--num-steps", "6", *common, "--metrics-file", str(metrics[1])]
    assert load_version(1).main([*sizes, *one, "--resume"]) == 0
    resumed = [step["loss"] for step in json.loads(metrics[1].read_text())["steps"]]
    assert load_version(1).main([*sizes, *one]) == 0
    unbroken = [step["loss"] for step in json.loads(metrics[1].read_text())["steps"]]
    assert [step["loss"] for step in content["steps"]] + resumed == pytest.approx(unbroken, rel=SAME["weights"])


def test_the_rows_of_two_processes_are_those_of_one(tmp_path):
    script = load_version(1)
    text = tmp_path / "text"
    text.write_bytes(bytes(range(1, 51)) * 9)  # a NUL byte would make it a binary file
    for data in ([], ["--data", str(text)]):
        both = script.load_data(script.parse_options([*SIZES.split(), *data, "--batch-size", "4"])).batch(5)
        parts = []
        for rank in range(2):
            options = script.parse_options([*SIZES.split(), *data, "--batch-size", "2"])
            options.rank, options.world_size = rank, 2
            parts.append(script.load_data(options).batch(5))
        for wanted, got in zip(both, zip(*parts, strict=True), strict=True):
            assert torch.equal(torch.cat(got), wanted)


def process_of_rank(rank, launcher):
    """Process id of the training process with that rank below the launcher."""
    for folder in pathlib.Path("/proc").iterdir():
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1]) if folder.name.isdecimal() else 0
            if parent == launcher and f"\0LOCAL_RANK={rank}\0".encode() in (folder / "environ").read_bytes():
                return int(folder.name)
        except OSError:
            continue  # it ended meanwhile
    raise AssertionError(f"no process of rank {rank} below {launcher}")


@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
@pytest.mark.skipif(not pathlib.Path("/proc/self/environ").exists(), reason="finds the processes in /proc")
def test_when_one_process_dies_all_end_within_a_minute_and_say_so(tmp_path, engine):
    command = [SCRIPTS[1], *SIZES.split(), "--batch-size", "2", "--num-steps", "1000000", "--device", "cpu"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    job = subprocess.Popen(
        [*torchrun, *map(str, command), "--parallel", engine],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(), cwd=tmp_path,
    )  # fmt: skip
    try:
        while "step     1/" not in job.stdout.readline():
            assert job.poll() is None, job.stderr.read()
        start = time.monotonic()
        os.kill(process_of_rank(1, job.pid), signal.SIGKILL)
        _, errors = job.communicate(timeout=60)
    finally:
        job.terminate()  # the launcher ends its processes
        job.wait(60)
    assert time.monotonic() - start < 60
    assert job.returncode != 0
    assert re.search(
        r"^tiny_llama_v1.py, process 0 of 2: (ended by the launcher|another process)", errors, re.MULTILINE
    )
    assert "rank      : 1" in errors and "SIGKILL" in errors
    assert "summary of" not in errors


LAUNCH = {
    "RANK": "1",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "29500",
}


@pytest.mark.parametrize(
    "changed, said",
    [
        ({"RANK": None}, "RANK is not set"),
        ({"WORLD_SIZE": None}, "WORLD_SIZE is not set"),
        ({"MASTER_PORT": None}, "MASTER_PORT is not set"),
        ({"MASTER_ADDR": ""}, "MASTER_ADDR is not set"),
        ({"RANK": "two"}, "RANK is 'two' and no number"),
        ({"WORLD_SIZE": "-2"}, "WORLD_SIZE is '-2' and no number"),
        ({"RANK": "2"}, "RANK is 2, but must be below WORLD_SIZE, which is 2"),
        ({"LOCAL_RANK": "2"}, "LOCAL_RANK is 2, but must be below LOCAL_WORLD_SIZE, which is 2"),
    ],
)
def test_wrong_rank_variables_are_named(monkeypatch, capsys, changed, said):
    for name, value in (LAUNCH | changed).items():
        monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit, match="2"):
        load_version(1).parse_options([])
    errors = capsys.readouterr().err
    assert said in errors and "torchrun" in errors
    assert errors.count("\n") == 1


@pytest.mark.parametrize("local_rank, lines", [(0, 1), (1, 0)])
def test_one_process_of_a_machine_says_what_is_wrong_for_all(monkeypatch, capsys, local_rank, lines):
    for name, value in (LAUNCH | {"RANK": str(local_rank), "LOCAL_RANK": str(local_rank)}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit, match="2"):
        load_version(1).parse_options(["--seq-len", "0"])
    assert capsys.readouterr().err.count("\n") == lines


def test_more_processes_than_gpus_are_refused(monkeypatch, capsys):
    for name, value in (LAUNCH | {"RANK": "0", "LOCAL_RANK": "0"}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(SystemExit, match="2"):
        load_version(1).parse_options(["--device", "cuda"])
    assert "2 processes were started on a machine where PyTorch sees 1 GPUs" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        load_version(1).parse_options(["--device", "cuda:0"])
    assert "would give all processes one GPU" in capsys.readouterr().err


@pytest.mark.parametrize("option", [["--parallel", "ddp"], ["--compress-gradients"]])
def test_options_of_several_processes_are_refused_for_one(capsys, option):
    with pytest.raises(SystemExit, match="2"):
        load_version(1).parse_options(option)
    assert "start with torchrun" in capsys.readouterr().err


@pytest.mark.parametrize(
    "changed, options, said",
    [
        ({"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}, [], "needs all GPUs in one host"),
        ({}, ["--device", "cpu"], "needs GPUs"),
        ({}, ["--parallel", "fsdp"], "leave out the other option"),
        ({}, ["--compress-gradients"], "leave out the other option"),
        ({}, ["--disable-optimizer-kernel"], "leave out the other option"),
        ({}, ["--use-amp", "--amp-dtype", "float16"], "use --amp-dtype bfloat16"),
        (None, [], "start with torchrun"),
    ],
)
def test_peers_are_refused_where_they_cannot_be(monkeypatch, capsys, changed, options, said):
    if changed is not None:
        for name, value in (LAUNCH | {"RANK": "0", "LOCAL_RANK": "0"} | changed).items():
            monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(SystemExit, match="2"):
        load_version(3).parse_options(["--device", "cuda", "--peer-adamw", *options])
    assert said in capsys.readouterr().err


# ---------------------------------------------------------------- AdamW that reads and writes the memory of all GPUs

PEER_SHAPES = [(33, 64), (7,), (3, 1100), (1024,), (5, 3)]
PEER_DTYPES = {"float32": [torch.float32] * 5, "mixed": [torch.bfloat16, torch.float32] * 2 + [torch.bfloat16]}


class SymmetricMemory:
    """PyTorch's symmetric memory, of processes that take turns in this one; `rank` is whose turn it is."""

    def __init__(self, processes):
        self.rank, self.memories, self.waited = 0, [None] * processes, []

    def empty(self, size, dtype, device):
        for rank, memory in enumerate(self.memories):
            self.memories[rank] = torch.full((size,), 255, dtype=dtype) if memory is None else memory
        return self.memories[self.rank]

    def rendezvous(self, memory, group):
        assert memory is self.memories[self.rank]
        return self

    def get_buffer(self, rank, shape, dtype):
        return self.memories[rank].view(dtype)[: math.prod(shape)].view(shape)

    def barrier(self, channel, timeout_ms):
        self.waited.append([memory.clone() for memory in self.memories])


@pytest.fixture
def peers(monkeypatch):
    """peers(processes, dtypes) makes symmetric memory, and a list of (parameters, optimizer) that share it."""
    script = load_version(3)

    def make(processes, dtypes):
        shared = SymmetricMemory(processes)
        monkeypatch.setitem(sys.modules, "torch.distributed._symmetric_memory", shared)
        monkeypatch.setattr(torch.distributed, "_symmetric_memory", shared, raising=False)
        monkeypatch.setattr(script.dist, "get_world_size", lambda: processes)
        monkeypatch.setattr(script.dist, "get_rank", lambda: shared.rank)
        made = []
        for shared.rank in range(processes):
            weights = [normal(*shape, seed=i) for i, shape in enumerate(PEER_SHAPES)]
            model = torch.nn.ParameterList(w.to(dtype) for w, dtype in zip(weights, dtypes, strict=True))
            for p, weight in zip(model, weights, strict=True):
                if p.dtype != torch.float32:
                    p.master = weight
            memory = script.PeerMemory(model, torch.device("cpu"))
            made.append((list(model), script.FusedAdamW(model.parameters(), lr=0.05, peers=memory)))
        return shared, made

    return make


@pytest.mark.parametrize("processes", [1, 2, 3, 16])
@pytest.mark.parametrize("dtypes", PEER_DTYPES.values(), ids=PEER_DTYPES)
def test_peers_train_by_the_mean_gradient(peers, processes, dtypes, monkeypatch):
    """Against AdamW in float64, and bit for bit alike in all; 16 processes are more than there are blocks."""
    shared, made = peers(processes, dtypes)
    exact = [normal(*shape, seed=i).double().requires_grad_() for i, shape in enumerate(PEER_SHAPES)]
    reference = torch.optim.AdamW(exact, lr=0.05)
    kinds = list(zip(PEER_SHAPES, dtypes, strict=True))
    for step in range(3):
        given = [
            [normal(*shape, seed=100 * step + 10 * rank + i).to(dtype) for i, (shape, dtype) in enumerate(kinds)]
            for rank in range(processes)
        ]
        for i, weight in enumerate(exact):
            weight.grad = torch.stack([gradients[i].double() for gradients in given]).mean(0)
        reference.step()
        for (parameters, optimizer), gradients in zip(made, given, strict=True):
            for i, (p, gradient) in enumerate(zip(parameters, gradients, strict=True)):
                p.grad = p.gradient_place.copy_(gradient) if i % 2 else gradient  # some are there already
            optimizer.peers.put_gradients(parameters)
        for shared.rank, (_, optimizer) in enumerate(made):
            optimizer.step()
    gather_states(monkeypatch, shared, made)
    for parameters, optimizer in made:
        for p, weight, first in zip(parameters, exact, made[0][0], strict=True):
            assert relative_error(optimizer.exact_weight(p), weight) < 2e-6
            for moment in ("exp_avg", "exp_avg_sq"):
                assert relative_error(optimizer.state[p][moment], reference.state[weight][moment]) < 1e-6
            assert torch.equal(p, first)


def gather_states(monkeypatch, shared, made):
    """gather_state in all processes: each in its turn says what it adds, and then each hears the sums."""
    script, said = load_version(3), [[] for _ in made]
    monkeypatch.setattr(script.dist, "all_reduce", lambda tensor: said[shared.rank].append(tensor.clone()))
    for shared.rank, (_, optimizer) in enumerate(made):
        optimizer.gather_state()
    sums = [sum(pieces) for pieces in zip(*said, strict=True)]
    for _, optimizer in made:
        heard = iter(sums)
        monkeypatch.setattr(script.dist, "all_reduce", lambda tensor, heard=heard: tensor.copy_(next(heard)))
        optimizer.gather_state()


def test_peers_wait_for_all_gradients_and_for_all_weights(peers):
    shared, made = peers(2, PEER_DTYPES["mixed"])
    parameters, optimizer = made[0]
    for p in parameters:
        p.grad = torch.ones_like(p)
    before = [memory.clone() for memory in shared.memories]
    optimizer.step()
    first, second = shared.waited
    own = [p.gradient_place for p in parameters]
    assert all((place == 1).all() for place in own) and torch.equal(first[1], before[1])
    assert not torch.equal(first[0], before[0])  # the gradients
    assert not torch.equal(second[0], first[0]) and not torch.equal(second[1], first[1])  # the weights of both
    assert torch.equal(second[1], shared.memories[1])


def test_where_memory_cannot_be_shared_a_sentence_says_so(monkeypatch):
    script = load_version(3)
    monkeypatch.setattr(script.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(script.dist, "get_rank", lambda: 0)
    with pytest.raises(script.Refusal, match="do not share their memory: leave out --peer-adamw") as refused:
        script.PeerMemory(torch.nn.Linear(2, 2), torch.device("cpu"))  # there is no symmetric memory on a CPU
    assert script.explain(refused.value) == str(refused.value)


def test_a_linear_layer_writes_its_gradient_into_the_bucket():
    script = load_version(3)
    layer, x = script.Linear(6, 5), torch.randn(2, 3, 6, requires_grad=True)
    optimizer = script.FusedAdamW(layer.parameters(), lr=0.1, in_buckets=True)
    bucket = torch.zeros(40)
    layer.weight.grad = bucket[3:33].view(5, 6)
    optimizer.zero_grad()
    wanted = torch.autograd.grad((torch.nn.functional.linear(x, layer.weight) ** 2).sum(), [x, layer.weight])
    for scale, total in (1, 1), (3, 4):  # the second time without forgetting the first: gradients add up
        x.grad = None
        (scale * layer(x) ** 2).sum().backward()
        torch.testing.assert_close(x.grad, scale * wanted[0])
        torch.testing.assert_close(layer.weight.grad, total * wanted[1])
        assert layer.weight.grad.data_ptr() == bucket[3:].data_ptr()
    torch.testing.assert_close(bucket[3:33].view(5, 6), 4 * wanted[1])


# ---------------------------------------------------------------- on GPUs

# Each version in each precision: DDP in a graph, DDP operation by operation, and FSDP2; and version 3's peers.
GPU_SIZES = [*SIZES.replace("51", "64").split(), "--warmup-steps", "1", "--batch-size", "2"]
WAYS = {"graph": ["--graph"], "ddp": ["--no-graph"], "fsdp": ["--no-graph", "--parallel", "fsdp"]}
if torch.cuda.device_count() > 1:
    WAYS["peers"] = ["--graph", "--peer-adamw"]
GPU_CASES = {
    (version, precision, way): [*GPU_SIZES, *argv, *options]
    for version in SCRIPTS
    for precision, argv in {"float32": [], "bfloat16": ["--use-amp"]}.items()
    for way, options in WAYS.items()
    if way != "peers" or version == 3
}


@pytest.fixture(scope="module")
def gpu_results(tmp_path_factory):
    """Results of all cases, with a process on each of up to two GPUs, from one launch."""
    results = tmp_path_factory.mktemp("scale") / "results.pt"
    cases = [(version, argv) for (version, _, _), argv in GPU_CASES.items()]
    worked = launch(min(2, torch.cuda.device_count()), WORKER, results, json.dumps(cases), timeout=1200)
    assert worked.returncode == 0, worked.stderr[-3000:]
    return dict(zip(GPU_CASES, torch.load(results), strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("version", SCRIPTS)
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_gpus_train_as_one(gpu_results, version, precision):
    """Gradients are added up by tiles in another order, or in 16 bits; FSDP2 rounds the norms' weights too."""
    scale = 10 if precision == "float32" else 1e4
    processes, argv = min(2, torch.cuda.device_count()), GPU_CASES[version, precision, "ddp"]
    one = alone(version, argv, 2 * processes)
    for way in [way for way in WAYS if (version, precision, way) in gpu_results]:
        result = gpu_results[version, precision, way]
        assert_same(result, one, scale)
        assert result["graph"] == (way in ("graph", "peers")) or torch.version.hip
