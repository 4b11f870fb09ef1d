"""common/formulas/counts.py against the operators and kernels that the scripts run, and the tools that print it."""

import pathlib
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

import check_training
import model_counts
from collector import collect, toy_config
from common.command_line import PRESETS
from common.formulas import counts, gpus
from common.formulas.counts import PARTS, PHASES, step_counts
from common.versions import SCRIPTS, load_version
from in_process import refused
from maintain import counted_tables
from maintain.counted_tables import COUNTED, PAGE, preset_sizes
from maintain.pages import TABLE
from training import need_fused_attention_in_16_bits


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("version", COUNTED)
def test_every_part_is_what_the_script_runs(version, precision, monkeypatch):
    if version == 2 and precision != "float32":
        need_fused_attention_in_16_bits()
    compare(version, precision, collect(version, precision, monkeypatch))


def test_the_fused_loss_is_what_the_script_runs(monkeypatch):
    """Three chunks of 16, 16 and 8 rows. In 16 bits the CPU's PyTorch takes more launches than a GPU's."""
    script = load_version(3)
    assert (counts.FUSED_LOSS_FROM, counts.LOSS_CHUNK) == (script.FUSED_LOSS_FROM, script.LOSS_CHUNK)
    assert script.linear_cross_entropy.__defaults__ == (script.LOSS_CHUNK,)
    monkeypatch.setattr(script.linear_cross_entropy, "__defaults__", (16,))
    monkeypatch.setattr(counts, "LOSS_CHUNK", 16)
    compare(3, "float32", collect(3, "float32", monkeypatch, "--enable-fused-loss"), fused=True)
    sizes = preset_sizes("small")
    large = sizes._replace(V=counts.FUSED_LOSS_FROM)
    assert step_counts(3, "bfloat16", large) == step_counts(3, "bfloat16", large, fused=True)
    assert step_counts(3, "bfloat16", sizes) == step_counts(3, "bfloat16", sizes, fused=False)


def compare(version, precision, counted, fused=None):
    """Assert that what was counted is what the formulas count."""
    expected = step_counts(version, precision, counts.sizes_of(toy_config(version, precision)), fused)
    quantities = ["flops", "bytes", "launches", "saved"] + ["operations"] * (version == 1 and precision == "float32")
    keys = [(part, phase, quantity) for part in PARTS for phase in PHASES for quantity in quantities]
    found = {key: counted[key] for key in keys}
    assert found == {(part, phase, quantity): expected[part][phase][quantity] for part, phase, quantity in keys}
    assert {key[0] for key in counted} == set(PARTS)


@pytest.mark.parametrize("version", SCRIPTS)
@pytest.mark.parametrize("preset", PRESETS)
def test_parameters_and_required_flops_are_those_of_the_script(version, preset, monkeypatch):
    """test_training.py compares the script's FLOPs with PyTorch's FlopCounterMode."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    script = load_version(version)
    config = script.parse_options(["--preset", preset, "--device", "cpu"])
    config.device, sizes = "meta", counts.sizes_of(config)
    with torch.device("meta"):
        model = script.make_model(config)
    assert counts.parameter_count(sizes) == sum(p.numel() for p in model.parameters())
    assert sum(counts.required_flops(sizes).values()) == script.flops_per_step(model, config)


def test_a_large_vocabulary_makes_version_3_add_embedding_rows_one_by_one():
    script = load_version(3)
    for V in (script.MAX_ONE_HOT, script.MAX_ONE_HOT + 1):
        sizes = preset_sizes("small")._replace(V=V)
        model = SimpleNamespace(embed_tokens=SimpleNamespace(weight=torch.zeros(V, 1, requires_grad=True)))
        x = script.TinyLlama.embed(model, torch.zeros(1, 1, dtype=torch.int64))
        assert sizes.one_hot == (V == counts.MAX_ONE_HOT) == (x.grad_fn.name() == "EmbeddingFunctionBackward")
    assert step_counts(3, "float32", sizes)["embedding"] == step_counts(1, "float32", sizes)["embedding"]


def test_the_roofline_is_the_longer_of_both_times():
    work = {"flops": 10**12, "operations": 0, "bytes": 10**6}
    assert counts.roofline_us(work, "H200", "bfloat16") == (pytest.approx(1e6 / 989.4), "compute")
    work = {"flops": 10**6, "operations": 10**6, "bytes": 48 * 10**8}
    assert counts.roofline_us(work, "H200", "bfloat16") == (pytest.approx(1000), "memory")


BOARDS = {  # as drivers name them
    "NVIDIA H100 80GB HBM3": "H100", "NVIDIA H100 NVL": "H100 NVL", "NVIDIA H200": "H200",
    "NVIDIA H200 NVL": "H200 NVL", "NVIDIA GH200 480GB": "GH200", "NVIDIA GH200 144G HBM3e": "GH200 144GB",
    "NVIDIA B200": "B200",
    "NVIDIA A100-SXM4-80GB": "A100", "NVIDIA A100-SXM4-40GB": "A100 40GB", "NVIDIA A100-PCIE-40GB": "A100 40GB",
    "NVIDIA A100 80GB PCIe": "A100 80GB PCIe", "NVIDIA L40S": "L40S", "NVIDIA GeForce RTX 4090": "RTX 4090",
    "NVIDIA GeForce RTX 5090": "RTX 5090", "AMD Instinct MI210": "MI210", "AMD Instinct MI250": "MI250",
    "AMD Instinct MI250X/MI250": "MI250X", "AMD Instinct MI250X / MI250": "MI250X", "AMD Instinct MI300A": "MI300A",
    "AMD Instinct MI300X": "MI300X", "AMD Instinct MI300X VF": "MI300X", "AMD Instinct MI325X": "MI325X",
    "AMD Instinct MI350X": "MI350X", "AMD Instinct MI355X": "MI355X", "AMD Radeon RX 7900 XTX": "RX 7900 XTX",
    "Radeon RX 7900 XT": "RX 7900 XT", "AMD Radeon PRO W7900": "PRO W7900", "AMD Radeon RX 9070 XT": "RX 9070 XT",
    # other boards, and parts of one, with the name of a GPU of the table in theirs
    "NVIDIA H100 PCIe": None, "NVIDIA H100 80GB HBM3 MIG 1g.10gb": None, "NVIDIA GB200": None, "NVIDIA L40": None,
    "NVIDIA GeForce RTX 4090 Laptop GPU": None, "NVIDIA GeForce RTX 4090 D": None, "AMD Radeon RX 9070": None,
    "AMD Radeon Graphics": None, "x86_64": None, "": None,
}  # fmt: skip


@pytest.mark.parametrize("name", BOARDS)
def test_a_board_is_found_by_its_whole_name(name):
    assert gpus.gpu_named(name) == BOARDS[name]


def test_check_training_has_the_same_table_and_look_up():
    """It is one file, which is copied alone."""
    first, last = "# ---- GPUs: ", "# ---- end of the lines about GPUs"
    texts = [pathlib.Path(module.__file__).read_text() for module in (gpus, check_training)]
    blocks = [text[text.index(first) : text.index(last)] for text in texts]
    assert blocks[0] == blocks[1] and blocks[0].count("Gpu(") > 20


@pytest.mark.parametrize("key", gpus.GPUS)
def test_a_peak_has_a_source_and_grows_with_fewer_bits(key, monkeypatch):
    gpu = gpus.GPUS[key]
    assert gpu.source.startswith(("NVIDIA ", "AMD ")) and {"float32", "bfloat16"} <= gpu.tflops.keys()
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: key)
    peak = check_training.peak_of(torch.device("cuda"))
    assert gpu.tflops["float32"] <= peak.tflops[32] <= peak.tflops[16] <= peak.tflops[8]
    assert (peak.terabytes_per_second, peak.source) == (gpu.tb_s, gpu.source)


def test_peaks_of_devices():
    """test_architecture_page.py compares some with those that the page has."""
    assert gpus.peak_tflops("NVIDIA H200", "float16") == gpus.peak_tflops("NVIDIA H200", "bfloat16") == 989.4
    assert gpus.peak_tflops("AMD Instinct MI250X/MI250", "tf32") is None is gpus.peak_tflops("x86_64", "float32")


@pytest.mark.parametrize(("units", "board"), [(304, "MI300X"), (38, None)])
def test_a_partition_is_not_its_board(units, board, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "AMD Instinct MI300X")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: mock.Mock(multi_processor_count=units))
    assert gpus.gpu_named(gpus.name_here()) == board


# ---- command line and page


def run(capsys, *argv, tool=model_counts):
    return tool.main([str(word) for word in argv]), capsys.readouterr().out


def test_the_numbers_of_a_step(capsys):
    status, out = run(capsys, "--version", 1, "--preset", "small")
    assert status == 0 and "31,977,984 parameters, 199.64 GFLOP needed" in out and "1,047 launches" in out
    assert "--precision bfloat16 counts the casts of --use-amp too" in out
    assert "1,357 launches\n" in run(capsys, "--version", 1, "--preset", "small", "--precision", "bfloat16")[1]
    assert "down projection      8,388,608          17.18     34.36" in out  # GFLOP: 2 x 1024 tokens x 8,388,608, twice
    status, out = run(capsys, "--version", 3, "--preset", "tiny", "--precision", "float16")
    numbers, roofs = [line.split()[1:] for line in out.splitlines() if line.startswith("SwiGLU")]
    assert "chunks" not in out
    assert "in chunks\n" in run(capsys, "--version", 3, "--vocab-size", counts.FUSED_LOSS_FROM)[1]
    one = 4 * 8 * 128 * 512 * 2  # bytes of an operand, in all layers: three of them forward, five backward, two saved
    assert numbers[3:] == [f"{3 * one / 1e6:.2f}", f"{5 * one / 1e6:.2f}", f"{2 * one / 2**20:.2f}", "4", "+", "4"]
    assert roofs[1:3] == [f"{8 * one / 5.3e6:.1f}", "memory"]


def test_bad_input_is_one_line_and_status_2(capsys):
    refused(model_counts.main, ["--version", "2", "--enable-torch-compile"], capsys, "--enable-torch-compile")
    refused(model_counts.main, ["--preset", "huge"], capsys, "--preset: invalid choice: 'huge'")
    refused(model_counts.main, ["--presett", "small"], capsys, "unrecognized arguments: --presett small")
    for precision in ("--use-amp", "--tf32", "--amp-dtype=float16"):
        refused(model_counts.main, ["--version", "1", precision], capsys, "choose the precision with --precision")
    refused(model_counts.main, ["--version", "4"], capsys, "version 4 launches what the compiler makes of it")


def test_check_finds_a_changed_number_and_write_repairs_it(capsys, tmp_path, monkeypatch):
    page, text = tmp_path / "page.md", PAGE.read_text(encoding="utf-8")
    monkeypatch.setattr(counted_tables, "PAGE", page)
    page.write_text(text.replace("31,977,984", "31,977,985"), encoding="utf-8")
    status, out = run(capsys, tool=counted_tables)
    assert status == 1 and "31,977,985" in out
    assert run(capsys, "--write", tool=counted_tables)[0] == 0
    assert page.read_text(encoding="utf-8") == text
    assert {match["name"] for match in TABLE.finditer(text)} >= counted_tables.page_tables().keys()
