"""The counts of model_counts.py against PyTorch's own counters, and the architecture page against both."""

import collections
import contextlib
import json
import math
import re
from unittest import mock

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import model_counts
from analyze_gemm_operations import gemms
from common.versions import REPOSITORY, SCRIPTS, load_version
from maintain import benchmark_kernels, ladder
from model_counts import PAGE, PARTS, PHASES, Formula, factored, of_step, step_formulas, step_numbers
from run_deepspeed_flops import attention_formulas

# Sizes that share no prime with those that the formulas are read off, as far as the kernels allow.
TOY = (
    "--hidden-dim 64 --num-layers 3 --num-heads 4 --num-kv-heads 1 --intermediate-dim 40 --vocab-size 50 --seq-len 20 "
    "--batch-size 2"
).split()
PRESETS = ("tiny", "small", "medium")
PAGE_TEXT = PAGE.read_text(encoding="utf-8")


def toy_options(version, precision, device="cpu"):
    argv = [*TOY, *model_counts.PRECISION_OPTIONS[precision], "--device", str(device), "--no-graph"]
    return load_version(version).parse_options(argv)


def toy_sizes():
    return model_counts.sizes_of(toy_options(1, "float32"))


def preset_options(version, preset):
    """The options of a preset for a model without data."""
    script = load_version(version)
    with mock.patch.object(script, "check_version_options", lambda options: None):
        options = script.parse_options(["--preset", preset, "--device", "cpu"])
    options.device = "meta"
    return options


def meta_model(version, preset):
    script, options = load_version(version), preset_options(version, preset)
    with torch.device("meta"):
        if version == 4:
            options.enable_torch_compile, options.attention_backend = False, "flash"
        return script.TinyLlama(script.model_config(options), options), options


def phase_total(numbers, phase, quantity):
    return sum(phases[phase][quantity] for phases in numbers.values())


# ---- parameters


@pytest.mark.parametrize("version", SCRIPTS)
@pytest.mark.parametrize("preset", PRESETS)
def test_parameters_are_those_of_the_model(version, preset):
    model, options = meta_model(version, preset)
    script = load_version(version)
    found = collections.Counter()
    for name, tensor in script.canonical_views(dict(model.named_parameters()), script.model_config(options)).items():
        found[model_counts.WEIGHTS[name.split(".")[-2]]] += tensor.numel()
    assert model_counts.parameters(model_counts.preset_sizes(preset)) == found


# ---- FLOPs


@pytest.mark.parametrize("preset", PRESETS)
def test_version_1_does_the_flops_that_pytorch_counts(preset):
    model, options = meta_model(1, preset)
    tokens = torch.zeros(options.batch_size, options.seq_len, dtype=torch.int64, device="meta")
    # Tensors without data know no autocast, which is off in float32.
    no_autocast = mock.patch.object(torch, "autocast", lambda *args, **kwargs: contextlib.nullcontext())
    with no_autocast, FlopCounterMode(display=False) as counter:
        loss = load_version(1).compute_loss(model, tokens, tokens, options)
        forward = counter.get_total_flops()
        loss.backward()
    numbers = step_numbers(1, "float32", model_counts.preset_sizes(preset))
    assert phase_total(numbers, "forward", "flops") == forward
    assert phase_total(numbers, "backward", "flops") == counter.get_total_flops() - forward


@pytest.mark.parametrize("version", [2, 4])
def test_fused_attention_does_the_flops_that_pytorch_counts(version):
    options = toy_options(version, "float32")
    script = load_version(version)
    trainer = script.Trainer(options)
    script.compute_loss(trainer.model, trainer.tokens, trainer.labels, options)  # tries out attention backends
    with FlopCounterMode(display=False, custom_mapping=attention_formulas()) as counter:
        loss = script.compute_loss(trainer.model, trainer.tokens, trainer.labels, options)
        forward = counter.get_total_flops()
        loss.backward()
    numbers = step_numbers(version, "float32", toy_sizes())
    # PyTorch counts the whole square of scores, of which a fused kernel computes the causal half.
    for phase, counted in (("forward", forward), ("backward", counter.get_total_flops() - forward)):
        assert phase_total(numbers, phase, "flops") + numbers["attention"][phase]["flops"] == counted


@pytest.mark.parametrize("preset", PRESETS)
def test_required_flops_are_those_of_flops_per_step(preset):
    script, options = load_version(1), preset_options(1, preset)
    expected = script.flops_per_step(script.model_config(options), options.batch_size, options.seq_len)
    assert sum(model_counts.required_flops(model_counts.preset_sizes(preset)).values()) == expected


@pytest.mark.parametrize("version", SCRIPTS)
def test_every_version_does_the_same_products_with_weights(version):
    numbers = step_numbers(version, "float32", model_counts.preset_sizes("small"))
    required = model_counts.required_flops(model_counts.preset_sizes("small"))
    done = model_counts.both_phases(numbers, "flops")
    if version == 3:  # its embedding's gradient is a product of the size of one of the head's three
        required |= {"embedding": required["output head"] // 3}
    assert {part: n for part, n in done.items() if part != "attention"} == {
        part: n for part, n in required.items() if part != "attention"
    }
    # The causal half of a product: forward 2, backward 4 needed, 5 with the scores again, 7 in two kernels.
    products = {1: 12, 2: 7, 3: 9, 4: 7}[version]
    assert done["attention"] * 6 == required["attention"] * products


# ---- bytes


def test_bytes_of_operators_by_hand():
    aten, (x, y) = torch.ops.aten, (torch.zeros(13, 17) for _ in range(2))

    def moved(function, *args):
        return model_counts.operator_bytes(function, args, None, [function(*args)]).written()

    assert moved(aten.mul.Tensor, x, y) == "12BT"
    assert moved(aten.add_.Tensor, x, y) == "12BT"
    assert moved(aten.copy_.default, x, y) == "8BT"
    assert moved(aten.zero_.default, x) == "4BT"
    assert moved(aten.mul.Tensor, x, y[:, :1].expand(13, 17)) == "8BT + 4B"
    assert moved(aten.embedding.default, torch.zeros(23, 19), torch.zeros(13, 17, dtype=torch.int64)) == "8BTF + 8BT"
    assert moved(aten.cat.default, [x, y]) == "16BT"


def test_bytes_of_version_1_s_norm_by_hand():
    """pow and both products read and write x, the second reads w, mean reads x, and three touch a number a row."""
    assert step_formulas(1, "float32")["norms and residual", "forward"][1].bytes.written() == "28BTC + 24BT + 4C"


PRODUCTS = {"down projection": ["down"], "output head": ["output head"]}


@pytest.mark.parametrize("part", PRODUCTS)
@pytest.mark.parametrize("version", SCRIPTS)
def test_bytes_of_products_are_those_of_the_gemm_tool(version, part):
    script, options = load_version(1), preset_options(1, "small")
    products = gemms(script.model_config(options), options.batch_size, options.seq_len)
    numbers = step_numbers(version, "float32", model_counts.preset_sizes("small"))
    for phase in PHASES:
        chosen = [g for g in products if g.names in PRODUCTS[part] and (g.part == "forward") == (phase == "forward")]
        assert numbers[part][phase]["bytes"] == sum(g.calls * g.bytes(4) for g in chosen)
        assert numbers[part][phase]["launches"] == sum(g.calls for g in chosen)


def kernel_work(generator):
    return [operation.work["V3"] for operation in generator]


def test_bytes_of_version_3_s_kernels_are_those_of_their_benchmark():
    bench = benchmark_kernels.Bench(torch.device("cpu"), torch.float32)
    sizes = bench.sizes
    elements = sizes["rows"] * sizes["width"]
    formulas = step_formulas(3, "float32")

    def coefficients(part, letters, times):
        return [formulas[part, phase][0].bytes.terms[letters] / times for phase in PHASES]

    # A layer has two norms; what is smaller than a tensor of activations is left out by the benchmark.
    assert [n * elements for n in coefficients("norms and residual", "BTC", 2)] == kernel_work(
        benchmark_kernels.norm_operations(bench, residual=True)
    )
    elements = sizes["swiglu_rows"] * sizes["feed_forward"]
    assert [n * elements for n in coefficients("SwiGLU", "BTF", 1)] == kernel_work(
        benchmark_kernels.swiglu_operations(bench)
    )
    (H, K, D), tokens = sizes["heads"], sizes["tokens"]
    values = {"B": 1, "T": tokens, "C": H * D, "K": K, "D": D}
    tables = Formula.of(4, "TD").at(values)  # read from a cache
    moved = formulas["RoPE", "forward"][0].bytes.at(values) - tables
    assert [moved] * 2 == kernel_work(benchmark_kernels.rope_operations(bench))


@pytest.mark.parametrize(("precision", "wide"), [("float32", ladder.ADAMW_BYTES), ("bfloat16", 26)])
def test_bytes_that_version_3_s_optimizer_moves_for_each_parameter(precision, wide):
    sizes = model_counts.preset_sizes("medium")
    moved = step_numbers(3, precision, sizes)["AdamW"]["backward"]["bytes"]
    count = sum(model_counts.parameters(sizes).values())
    assert 0 <= moved - wide * count < 0.001 * count
    assert step_numbers(1, precision, sizes)["AdamW"]["backward"]["bytes"] > 2 * moved


# ---- kept activations


def kept_bytes(version, precision, device):
    """What saved_tensors_hooks sees in a forward on toy sizes, each storage once, without the model's own tensors."""
    script, options = load_version(version), toy_options(version, precision, device)
    trainer = script.Trainer(options)
    script.compute_loss(trainer.model, trainer.tokens, trainer.labels, options)  # tries out attention backends
    storages = {}

    def pack(tensor):
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = script.compute_loss(trainer.model, trainer.tokens, trainer.labels, options)
    own = [t.untyped_storage().data_ptr() for t in (*trainer.model.parameters(), *trainer.model.buffers())]
    assert loss.requires_grad
    return sum(storage.nbytes() for pointer, storage in storages.items() if pointer not in own)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("version", [1, 2, 4])
def test_kept_activations_are_those_that_autograd_saves(version, precision, device):
    if version == 4:  # PyTorch's norm is one operator on a GPU, which keeps what version 3's keeps
        third = load_version(3)
        if device.type == "cuda":
            pytest.skip("version 3's kernels, which stand for PyTorch's here, do not run beside tensors of the CPU")
        if precision == "bfloat16":
            precision = "float16"  # Triton's interpreter does not know bfloat16
    with mock.patch.object(
        torch.nn.functional,
        "rms_norm",
        lambda x, shape, weight, eps: third.add_rms_norm(x, None, weight, eps)[1],
    ):
        found = kept_bytes(version, precision, "cpu")
    assert found == phase_total(step_numbers(version, precision, toy_sizes()), "forward", "kept")


@pytest.mark.parametrize("precision", ["float32", "float16"])
def test_kept_activations_of_version_3(precision, device):
    found = kept_bytes(3, precision, device)
    assert found == phase_total(step_numbers(3, precision, toy_sizes()), "forward", "kept")


def test_kept_activations_by_hand():
    """The formulas of a layer as one derives them from the scripts."""

    def of(quantity, version, part):
        return getattr(step_formulas(version, "float32")[part, "forward"][0], quantity).written()

    # x and x / rms of two norms, and a float for each row; the copies of q, k and v, the weights and the mask
    assert of("kept", 1, "norms and residual") == "16BTC + 8BT"
    assert of("kept", 1, "attention") == "4BT^2H + 12BTC + T^2"
    assert of("kept", 1, "SwiGLU") == "12BTF"
    assert of("kept", 3, "norms and residual") == "8BTC + 8BT"
    assert of("kept", 3, "attention") == "8BTKD + 8BTC + 4BTH"
    assert of("kept", 3, "SwiGLU") == "8BTF"
    assert of("launches", 1, "norms and residual") == "14"  # pow, mean, +, rsqrt, *, * and the addition, twice
    assert of("launches", 3, "RoPE") == "1"


# ---- launches


def is_view(overload):
    return any(r.alias_info is not None and not r.alias_info.is_write for r in overload._schema.returns)


def computes(name):
    """Whether an operator of the profile computes, rather than calling others or returning a view."""
    packet = getattr(torch.ops.aten, name.removeprefix("aten::"), None)
    if packet is None or name.split("::")[1] in (*model_counts.NO_LAUNCH, "result_type", "is_nonzero"):
        return False
    overloads = [getattr(packet, overload) for overload in packet.overloads()]
    overloads = [o for o in overloads if torch._C._dispatch_has_kernel(o.name())]  # not those of TorchScript alone

    def any_has(key):
        return any(torch._C._dispatch_has_kernel_for_dispatch_key(o.name(), key) for o in overloads)

    calls_others = any_has("CompositeImplicitAutograd") and not any_has("CPU")
    return not calls_others and not any(is_view(overload) for overload in overloads)


def outermost(event):
    """The event, or what it calls, that computes: not what that calls in turn."""
    if event.name.startswith("aten::") and computes(event.name):
        return 1
    return sum(outermost(child) for child in event.cpu_children)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("version", [1, 2])
def test_launches_are_the_operators_that_the_profiler_sees(version, precision):
    script, options = load_version(version), toy_options(version, precision)
    trainer = script.Trainer(options)
    script.compute_loss(trainer.model, trainer.tokens, trainer.labels, options).backward()
    trainer.optimizer.zero_grad(set_to_none=True)
    with torch.profiler.profile() as profiler:
        script.compute_loss(trainer.model, trainer.tokens, trainer.labels, options).backward()
    found = sum(outermost(event) for event in profiler.events() if event.cpu_parent is None)
    numbers = step_numbers(version, precision, toy_sizes())
    expected = model_counts.total(numbers, "launches") - numbers["AdamW"]["backward"]["launches"]
    assert found == expected


class CountedKernel:
    """Passes launches on to a kernel and counts them."""

    def __init__(self, kernel, counts, name):
        self.kernel, self.counts, self.name = kernel, counts, name
        self.fn = kernel.fn

    def __getitem__(self, grid):
        self.counts[self.name] += 1
        return self.kernel[grid]


def test_launches_of_version_3_are_those_of_its_kernels(device, monkeypatch):
    script, counts = load_version(3), collections.Counter()
    options = toy_options(3, "float32", device)
    for name, kernel in list(vars(script).items()):
        if name.endswith("_kernel") and hasattr(kernel, "fn"):
            monkeypatch.setattr(script, name, CountedKernel(kernel, counts, name))
    script.Trainer(options).step()
    numbers, layers = step_numbers(3, "float32", toy_sizes()), options.num_layers
    kernels = {
        "norms and residual": ("rmsnorm_forward", "rmsnorm_backward", "column_sum"),
        "RoPE": ("rope",),
        "attention": ("attention_forward", "attention_backward_dq", "attention_backward_dkdv"),
        "SwiGLU": ("swiglu_forward", "swiglu_backward"),
    }
    launches = model_counts.both_phases(numbers, "launches")
    for part, names in kernels.items():
        assert launches[part] == sum(counts[f"{name}_kernel"] for name in names), part
    assert launches["RoPE"] == layers  # attention's backward turns its gradients back itself
    assert counts["cross_entropy_forward_kernel"] == counts["adamw_kernel"] == 1


# ---- formulas


def test_a_number_of_elements_tells_its_sizes():
    sizes = model_counts.PRIME_SIZES
    B, T, H, K, D = (sizes[letter] for letter in "BTHKD")
    assert factored(B * T * H * D).written() == "BTC"
    assert factored(B * T * (H + 2 * K) * D).written() == "2BTKD + BTC"
    assert factored(T * D // 2).written() == "1/2TD"
    assert factored(B * H * T * T).written() == "BT^2H"
    for number in (29, 3, H + K + 1, 0):
        with pytest.raises(ValueError, match="no product of the model's sizes"):
            factored(number)


def test_an_empty_tensor_that_is_kept_counts_nothing():
    collector = model_counts.Collector()
    with model_counts.keep_hooks(torch.nn.Linear(2, 2), collector):
        torch.empty(0, requires_grad=True).exp()
        assert not any(counts.kept.terms for counts in collector.counts.values())
        torch.ones(model_counts.PRIME_SIZES["B"], requires_grad=True).exp()
    assert any(counts.kept.terms for counts in collector.counts.values())


@pytest.mark.parametrize("version", SCRIPTS)
def test_formulas_hold_for_other_sizes_than_those_they_were_read_off(version):
    """Three layers are one layer and twice the difference of two layers and one."""
    three = model_counts.counted_step(version, "float32", (), 3)
    sizes = model_counts.PRIME_SIZES | {"C": 462, "L": 3}
    numbers = step_numbers(version, "float32", sizes)
    for part in PARTS:
        for phase in PHASES:
            for quantity in ("flops", "bytes", "launches", "kept"):
                assert numbers[part][phase][quantity] == getattr(three[part, phase], quantity).at(sizes)


def test_every_part_of_a_step_is_counted():
    for version in SCRIPTS:
        for (part, phase), pair in step_formulas(version, "float32").items():
            runs = of_step([c.launches for c in pair]).at({"L": 1})
            assert runs > 0 or (part, phase) == ("AdamW", "forward") or version == 3 and part == "RoPE"


# ---- roofline


def test_roofline_is_the_longer_of_both_times():
    work = {"flops": 10**12, "operations": 0, "bytes": 10**6}
    assert model_counts.roofline(work, "H200", "bfloat16") == (pytest.approx(1e6 / 989.4), "compute")
    work = {"flops": 10**6, "operations": 10**6, "bytes": 48 * 10**8}
    assert model_counts.roofline(work, "H200", "bfloat16") == (pytest.approx(1000), "memory")
    assert model_counts.peak("MI250X", "tf32") == model_counts.peak("MI250X", "float32") == 47.9


def test_every_gpu_of_the_page_has_a_peak():
    assert all(model_counts.peak(gpu, "bfloat16") for gpu in model_counts.BANDWIDTH_TB_S)


# ---- command line


def run(capsys, *argv):
    status = model_counts.main([str(word) for word in argv])
    return status, *capsys.readouterr()


def test_json_holds_formulas_numbers_and_rooflines(capsys):
    status, out, _ = run(capsys, "--version", 3, "--preset", "tiny", "--precision", "float16", "--json", "-")
    content = json.loads(out)
    assert status == 0 and list(content["parts"]) == list(PARTS)
    assert content["step"]["parameters"] == 2_617_600
    swiglu = content["parts"]["SwiGLU"]
    assert swiglu["formulas"]["forward"]["layer"] == {"bytes": "6BTF", "launches": "1", "kept": "4BTF"}
    assert swiglu["forward"]["bytes"] == 6 * 8 * 128 * 512 * 4
    assert swiglu["roofline"]["MI300X"]["bound"] == "memory"


def test_sizes_and_switches_go_to_the_training_script(capsys):
    _, out, _ = run(capsys, "--version", 3, "--num-layers", 2, "--disable-rope-kernel", "--json", "-")
    content = json.loads(out)
    assert content["sizes"]["L"] == 2
    assert content["parts"]["RoPE"]["forward"]["launches"] > 2


def test_text_names_every_part(capsys):
    status, out, _ = run(capsys, "--version", 1, "--preset", "small")
    assert status == 0 and all(part in out for part in PARTS)
    assert "31,977,984 parameters, 199.64 GFLOP needed" in out


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["--version", "2", "--enable-torch-compile"], "leave it disabled"),
        (["--version", "2", "--enable-all-fusion"], "leave it disabled"),
        (["--version", "1", "--use-amp"], "--precision"),
        (["--markdown", "--recorded", "/nowhere"], "cannot be read"),
        (["--check", "--page", "/nowhere"], "cannot be read"),
    ],
)
def test_bad_input_is_one_sentence_and_status_2(capsys, argv, sentence):
    status, _, error = run(capsys, *argv)
    assert status == 2 and sentence in error and error.count("\n") == 1


def test_help_has_an_example(capsys):
    with pytest.raises(SystemExit) as ending:
        model_counts.main(["--help"])
    assert ending.value.code == 0 and "example:" in capsys.readouterr().out


# ---- the page


def test_the_page_says_what_the_scripts_do(capsys):
    assert run(capsys, "--check")[0] == 0


def test_check_finds_what_was_changed_and_write_repairs_it(capsys, tmp_path):
    page = tmp_path / "page.md"
    page.write_text(PAGE_TEXT.replace("31,977,984", "31,977,985"), encoding="utf-8")
    status, out, _ = run(capsys, "--check", "--page", page)
    assert status == 1 and "31,977,985" in out
    assert run(capsys, "--write", "--check", "--page", page)[0] == 0
    assert page.read_text(encoding="utf-8") == PAGE_TEXT


def test_a_page_without_its_markers_is_refused(capsys, tmp_path):
    page = tmp_path / "page.md"
    page.write_text(PAGE_TEXT.replace("<!-- counts: kept -->", ""), encoding="utf-8")
    status, _, error = run(capsys, "--check", "--page", page)
    assert status == 2 and "counts: kept" in error


def defined_names(version):
    return set(re.findall(r"^\s*(?:def|class) (\w+)|^(\w+) = ", SCRIPTS[version].read_text(), re.MULTILINE))


def names_of(version):
    return {name for pair in defined_names(version) for name in pair if name}


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
    known = set().union(*(names_of(version) for version in SCRIPTS)) | set(PRESETS) | {"foreach", "dq", "dk", "dv"}
    text = re.sub(r"```.*?```", "", PAGE_TEXT, flags=re.DOTALL)
    for code in re.findall(r"`([^`]+)`", text):
        if code.startswith(("python ", "scripts/")):
            assert (REPOSITORY / re.search(r"scripts/[\w./-]+", code)[0]).exists(), code
        else:
            assert set(code.split(".")) <= known | {"forward"}, code


def test_every_link_leads_somewhere():
    links = re.findall(r"\]\(([^)#]+)\)", PAGE_TEXT)
    assert links and all((REPOSITORY / link).exists() for link in links)


# What GitHub's MathJax renders, as far as the page uses it; \operatorname, \bm and own macros are refused there.
COMMANDS = set(
    "beta bigl bigr Bigl Bigr begin cdot cos Delta delta ell end epsilon eta exp frac hat in infty lambda le leftarrow "
    "lfloor log Longrightarrow mathbb mathbf mathcal mathrm max odot partial qquad quad rfloor sigma sin sqrt sum text "
    "tfrac theta times top varepsilon".split()
)


def without_code(text):
    return re.sub(r"`[^`\n]*`", "", re.sub(r"```.*?```", "", text, flags=re.DOTALL))


def formulas_of_the_page():
    """(the formulas in blocks, those in lines)."""
    blocks = re.findall(r"```math\n(.*?)```", PAGE_TEXT, re.DOTALL)
    return blocks, re.findall(r"\$([^$\n]+)\$", without_code(PAGE_TEXT))


def test_formulas_are_what_github_renders():
    blocks, inline = formulas_of_the_page()
    assert len(blocks) > 10 and len(inline) > 50
    assert without_code(PAGE_TEXT).count("$") == 2 * len(inline)
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


def test_the_derivatives_of_the_page_are_those_of_autograd():
    """The formulas of section 5, typed once more, in float64."""
    g = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64).requires_grad_()

    x, w, dy = draw(5, 8), draw(8), draw(5, 8).detach()
    r = (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt()
    dx, dw = torch.autograd.grad(x * r * w, (x, w), dy)
    torch.testing.assert_close(dx, r * (dy * w - x * r**2 * (dy * w * x).mean(-1, keepdim=True)))
    torch.testing.assert_close(dw, (dy * x * r).sum(0))

    q, k, v, do = draw(6, 4), draw(6, 4), draw(6, 4), draw(6, 4).detach()
    S = (q @ k.T / math.sqrt(4)).masked_fill(torch.ones(6, 6, dtype=torch.bool).triu(1), -math.inf)
    P = S.softmax(-1)
    o = P @ v
    dS = P * (do @ v.T - (do * o).sum(-1, keepdim=True))
    expected = torch.autograd.grad(o, (q, k, v), do, retain_graph=True)
    for found, wanted in zip((dS @ k / 2, dS.T @ q / 2, P.T @ do), expected, strict=True):
        torch.testing.assert_close(found, wanted)

    z, labels = draw(5, 7), torch.arange(5)
    (dz,) = torch.autograd.grad(torch.nn.functional.cross_entropy(z, labels), z)
    torch.testing.assert_close(dz, (z.softmax(-1) - torch.nn.functional.one_hot(labels, 7)) / 5)

    a, b, dy = draw(5, 3), draw(5, 3), draw(5, 3).detach()
    da, db = torch.autograd.grad(torch.nn.functional.silu(a) * b, (a, b), dy)
    torch.testing.assert_close(da, dy * b * a.sigmoid() * (1 + a * (1 - a.sigmoid())))
    torch.testing.assert_close(db, dy * a * a.sigmoid())
