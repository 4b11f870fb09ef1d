"""A test of the tests: deliberately wrong kernels, each of which the cases of its operation must catch.

A mutant is version 3's source with one expression or statement of one function replaced. Both are compared as Python's
parser reads them: layout, line breaks and comments do not count. The code must stand in the function as often as the
mutant says, so that a mutant cannot quietly become the right kernel when the script changes.
"""

import ast
import copy
import functools
import importlib.util
import re
from typing import NamedTuple

import pytest
import torch

from common.versions import SCRIPTS
from kernel_cases import (
    ALL_DTYPES,
    CASES,
    DTYPES,
    FP8_CASES,
    Wrong,
    check,
    check_adamw,
    check_column_sums,
    check_fp8_training,
    fp8_rounding,
    multiplies_fp8,
)

pytestmark = [
    pytest.mark.skipif(
        torch.cuda.is_available(), reason="a wrong kernel can take a GPU down with it; the interpreter shows the same"
    ),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # NumPy's, of what a mutant computes
]


class Mutant(NamedTuple):
    """One mistake: in that function (or method, as "Class.method") `code` becomes `replacement`, `times` times."""

    function: str
    code: str
    replacement: str
    times: int = 1


LAST_ROWS = Mutant("launch_tiles", "cdiv(rows, tile['ROWS'])", "max(1, rows // tile['ROWS'])")
PAST_THE_END = Mutant("store_tile", "first + row < T", "first + row < T + 1")
# Mistakes that not every case shows: operation -> mistake -> mutant.
MUTANTS = {
    "add_rms_norm": {
        "epsilon forgotten": Mutant("rmsnorm_forward_kernel", "tl.cast(eps, tl.float32)", "0.0"),
        "mean over the tile": Mutant("rmsnorm_forward_kernel", "tl.sum(x * x, 1) / C", "tl.sum(x * x, 1) / BLOCK"),
        "rstd in 16 bits": Mutant(
            "rmsnorm_forward_kernel", "x * rstd[:, None]", "x * rstd[:, None].to(tl.float16).to(tl.float32)"
        ),
        "dw of the last rows alone": Mutant("rmsnorm_backward_kernel", "dw += dy * x * rstd", "dw = dy * x * rstd"),
        "programs walk the same rows": Mutant("rmsnorm_backward_kernel", "tl.num_programs(0) * ROWS", "ROWS"),
        "row stored past its end": Mutant(
            "rmsnorm_forward_kernel",
            "store(y_ptr + offsets, x * rstd[:, None] * w[None, :], mask)",
            "store(y_ptr + offsets, x * rstd[:, None] * w[None, :], row[:, None] < rows)",
        ),
        "partial sums of dw in 16 bits": Mutant(
            "AddRMSNormFunction.backward",
            "torch.empty(programs, C, dtype=torch.float32, device=x.device)",
            "torch.empty(programs, C, dtype=torch.float16, device=x.device)",
        ),
        "dw of products in 16 bits": Mutant(
            "rmsnorm_backward_kernel", "dw += dy * x * rstd", "dw += (dy * x * rstd).to(tl.float16).to(tl.float32)"
        ),
        "dw rounded to 16 bits": Mutant("AddRMSNormFunction.backward", "dw.to(w.dtype)", "dw.half().to(w.dtype)"),
        "first partial sums alone": Mutant("column_sum_kernel", "range(0, rows, ROWS)", "range(0, ROWS, ROWS)"),
        "gradient written over its input": Mutant("AddRMSNormFunction.backward", "torch.empty_like(x)", "dy"),
        "saved sum overwritten": Mutant("AddRMSNormFunction.backward", "torch.empty_like(x)", "x"),
    },
    "rope": {
        "positions run on over the batch": Mutant("rope_kernel", "row // heads % T", "row // heads"),
        "position off by one": Mutant("rope_kernel", "row // heads % T", "(row // heads + 1) % T"),
        "first value head rotated too": Mutant(
            "rope_kernel", "row % heads < rotated_heads", "row % heads <= rotated_heads"
        ),
        "last rows not launched": LAST_ROWS,
        "other heads not copied": Mutant(
            "rope_kernel",
            "(row < rows) & (pair < HALF)",
            "(row < rows) & (pair < HALF) & (row % heads < rotated_heads)",
        ),
        "in place": Mutant("RoPEFunction.forward", "torch.empty_like(x)", "x"),
    },
    "packed_swiglu": {
        "last rows not launched": LAST_ROWS,
        "last columns not launched": Mutant(
            "launch_tiles", "cdiv(columns, tile['BLOCK'])", "max(1, columns // tile['BLOCK'])"
        ),
        "row runs into the next": Mutant("swiglu_forward_kernel", "column < width", "column < 2 * width"),
        "row runs into the next, backward": Mutant("swiglu_backward_kernel", "column < width", "column < 2 * width"),
        "dx over x": Mutant("SwiGLUFunction.backward", "torch.empty_like(x)", "x"),
    },
    "flash_attention": {
        "token does not see itself": Mutant(
            "attention_forward_kernel",
            "query[:, None] >= start + key[None, :]",
            "query[:, None] > start + key[None, :]",
        ),
        "sees the next token": Mutant(
            "attention_forward_kernel",
            "query[:, None] >= start + key[None, :]",
            "query[:, None] + 1 >= start + key[None, :]",
        ),
        "sum of values not rescaled": Mutant("attention_forward_kernel", "o * alpha[:, None]", "o"),
        "sum of weights not rescaled": Mutant(
            "attention_forward_kernel", "l * alpha + tl.sum(P, 1)", "l + tl.sum(P, 1)"
        ),
        "sum of weights in 16 bits": Mutant(
            "attention_forward_kernel", "tl.sum(P, 1)", "tl.sum(P.to(tl.float16).to(tl.float32), 1)"
        ),
        "weights in 16 bits": Mutant("attention_forward_kernel", "P.to(v.dtype)", "P.to(tl.float16).to(v.dtype)"),
        "earlier keys skipped": Mutant(
            "attention_forward_kernel",
            "min(first + BLOCK_Q if DIAGONAL else first, T)",
            "min(first + BLOCK_Q if DIAGONAL else first - BLOCK_K, T)",
        ),
        "earlier keys skipped in dq": Mutant(
            "attention_backward_dq_kernel",
            "min(first + BLOCK_Q if DIAGONAL else first, T)",
            "min(first + BLOCK_Q if DIAGONAL else first - BLOCK_K, T)",
        ),
        "wrong key head": Mutant("attention_forward_kernel", "H + h // (H // K)", "H + h % K"),
        "wrong key head in dq": Mutant("attention_backward_dq_kernel", "H + h // (H // K)", "H + h % K"),
        "dk and dv from one query head": Mutant(
            "attention_backward_dkdv_kernel", "(kv + 1) * (H // K)", "kv * (H // K) + 1"
        ),
        "diagonal missed in dq": Mutant(
            "attention_backward_dq_kernel",
            "query[:, None] >= start + key[None, :]",
            "query[:, None] > start + key[None, :]",
        ),
        "diagonal missed in dk": Mutant(
            "attention_backward_dkdv_kernel", "key[:, None] <= query[None, :]", "key[:, None] < query[None, :]"
        ),
        "later queries skipped in dk": Mutant(
            "attention_backward_dkdv_kernel",
            "T if BELOW else min(first + SPAN, T)",
            "T - BLOCK_Q if BELOW else min(first + SPAN, T)",
        ),
        "first batch's gradient for all": Mutant("attention_backward_dkdv_kernel", "(b * T * H + h) * D", "h * D"),
        "another head's statistics": Mutant("attention_backward_dkdv_kernel", "(b * H + h) * T", "(b * K + h) * T"),
        "lse past the end read": Mutant(
            "attention_backward_dkdv_kernel",
            "load(lse_ptr + lse_offset + query, query < T)",
            "tl.load(lse_ptr + lse_offset + query)",
        ),
        "delta past the end read": Mutant(
            "attention_backward_dkdv_kernel",
            "load(delta_ptr + lse_offset + query, query < T)",
            "tl.load(delta_ptr + lse_offset + query)",
        ),
        "row past the end stored": PAST_THE_END,
        "rows past the end read": Mutant(
            "load_tile", "tl.load(pointers, mask=first + row < T, other=0.0)", "tl.load(pointers)"
        ),
    },
    "rotary_attention": {
        "every tile rotated as the first": Mutant(
            "unrotate", "load_tile(cos_ptr, first, T, HALF, ROWS, HALF)", "load_tile(cos_ptr, 0, T, HALF, ROWS, HALF)"
        ),
        "row past the end stored": PAST_THE_END,
        "dq not unrotated": Mutant("attention_backward_dq_kernel", "cos_ptr", "None"),
        "dk not unrotated": Mutant("attention_backward_dkdv_kernel", "cos_ptr", "None"),
        "values rotated too": Mutant(
            "AttentionFunction.forward", "rope(qkv, cos, sin, H + K)", "rope(qkv, cos, sin, H + 2 * K)"
        ),
    },
    "cross_entropy": {
        "past the vocabulary counts as zero": Mutant(
            "cross_entropy_forward_kernel", "tl.where(column < V, x, -float('inf'))", "x"
        ),
        "a first tile of -inf": Mutant("cross_entropy_forward_kernel", "LOWEST", "-float('inf')"),
        "running sum not rescaled": Mutant("cross_entropy_forward_kernel", "l * tl.exp(m - m_new)", "l"),
        "maximum of the last tile alone": Mutant(
            "cross_entropy_forward_kernel", "tl.maximum(m, tl.max(x, 1))", "tl.max(x, 1)"
        ),
        "rounded to the logits' size": Mutant(
            "cross_entropy_backward_kernel", "x - m[:, None] - log_l[:, None]", "x - (m + log_l)[:, None]"
        ),
        "gradient of the first tile alone": Mutant("launch_tiles", "cdiv(columns, tile['BLOCK'])", "1"),
        "last gradients not launched": LAST_ROWS,
        "last rows not launched": Mutant(
            "launch_cross_entropy_forward", "cdiv(rows, tile['ROWS'])", "max(1, rows // tile['ROWS'])"
        ),
        "ignored rows have a loss": Mutant(
            "cross_entropy_forward_kernel",
            "tl.where(label == IGNORED, 0.0, log_l - (x_label - m))",
            "log_l - (x_label - m)",
        ),
        "ignored rows have a gradient": Mutant(
            "cross_entropy_forward_kernel", "tl.where(label == IGNORED, float('inf'), log_l)", "log_l"
        ),
        "ignored rows count": Mutant(
            "cross_entropy_forward_kernel", "tl.where(label == IGNORED, 0.0, 1.0)", "tl.where(row < rows, 1.0, 0.0)"
        ),
    },
    "linear_cross_entropy": {
        "dw of the last chunk alone": Mutant("LinearCrossEntropyFunction.forward", "first == 0", "True"),
        "a chunk left out": Mutant(
            "LinearCrossEntropyFunction.forward", "range(0, rows, chunk)", "range(0, rows - chunk // 2, chunk)"
        ),
        "gradients not scaled": Mutant(
            "LinearCrossEntropyFunction.backward", "dloss / count.clamp(min=1)", "1 / count.clamp(min=1)"
        ),
        "mean of a chunk": Mutant("LinearCrossEntropyFunction.forward", "loss / count", "loss / chunk"),
    },
    "adamw": {
        "epsilon under the root": Mutant("adamw_kernel", "tl.sqrt(v_hat) + eps", "tl.sqrt(v_hat + eps)"),
        "overflow not seen": Mutant("adamw_kernel", "tl.load(found_inf_ptr) == 0.0", "count == count"),
        "overflowed step counted": Mutant("FusedAdamW.step", "1 - found_inf.reshape(())", "1"),
        "gradient not unscaled": Mutant("adamw_kernel", "g / tl.load(grad_scale_ptr)", "g"),
        "float16 copy of another": Mutant(
            "adamw_kernel",
            "store(pointers_from(row_ptr, COPY, offsets, dtype), w, mask)",
            "store(pointers_from(row_ptr, COPY, offsets, dtype), w * 0.999, mask)",
        ),
        "bfloat16 copy cut off": Mutant(
            "adamw_kernel", "tl.where(w == w, (bits + 0x8000) >> 16, 0x7FC0)", "bits >> 16"
        ),
        "low bits without their sign": Mutant(
            "adamw_kernel", "(copy << 16) + low_bits", "(copy << 16) + (low_bits & 0xFFFF)"
        ),
        "low bits lost": Mutant("adamw_kernel", "bits - (upper << 16)", "bits - bits"),
        "last elements not launched": Mutant(
            "FusedAdamW.__init__", "cdiv(p.numel(), self.BLOCK)", "max(1, p.numel() // self.BLOCK)"
        ),
        "an element past the end": Mutant("adamw_kernel", "offsets < count", "offsets < count + 1"),
    },
    "fp8_linear": {
        "last rows not launched": LAST_ROWS,
        "dy without the weights' scale": Mutant(
            "quantize_rows_kernel", "x *= load(factor_ptr + column, column < C)", "x *= 1.0"
        ),
        "packed parts as one matrix": Mutant("FP8Linear.__init__", "self.parts = parts", "self.parts = (sum(parts),)"),
        "another part's maximum": Mutant("quantize_weights_kernel", "tl.load(matrix_ptr + MATRIX_PROGRAM)", "0"),
        "last columns not quantized": Mutant(
            "store_quantized_weights", "range(0, columns, BLOCK)", "range(0, tl.minimum(columns, BLOCK), BLOCK)"
        ),
        "maximum of the last columns": Mutant("quantize_weights_kernel", "tl.maximum(largest, tl.abs(w))", "tl.abs(w)"),
    },
    "fp8_feed_forward": {
        "last rows not launched": LAST_ROWS,
        "no floor": Mutant("quantize_weights_kernel", "tl.maximum(scale, floor)", "scale"),
        "scale 1 for a row of zeros": Mutant(
            "quantize_weights_kernel", "tl.maximum(scale, floor)", "tl.where(scale < 1e-30, 1.0, scale)"
        ),
        "a matrix of zeros without a scale": Mutant(
            "quantize_weights_kernel", "tl.where(largest > SMALLEST, WEIGHT_FLOOR * largest, LIMIT)", "SMALLEST"
        ),
        "maximum of the first rows alone": Mutant("quantize_weights_kernel", "tl.cdiv(rows, ROWS)", "1"),
        "second launch forgotten": Mutant("FP8Weights.update", "(False, True)", "(False,)"),
        "gate's scales for up": Mutant(
            "swiglu_backward_quantize_kernel", "w_scale_ptr + width + column", "w_scale_ptr + column"
        ),
        "maximum of dgate alone": Mutant(
            "swiglu_backward_quantize_kernel",
            "tl.maximum(row_scale(dgate, LIMIT), row_scale(dup, LIMIT))",
            "row_scale(dgate, LIMIT)",
        ),
        "dup over dgate": Mutant("swiglu_backward_quantize_kernel", "g_q_ptr + offsets + width", "g_q_ptr + offsets"),
        "the first token's product of scales": Mutant(
            "FP8Linear.wgrad", "(x_scale * g_scale).max()", "(x_scale * g_scale)[0, 0]"
        ),
        "tokens not weighted by g_scale": Mutant("transpose_kernel", "x_scale * g_scale / c", "x_scale / c"),
        "zero divided by zero": Mutant("transpose_kernel", "tl.maximum(tl.load(c_ptr), 1e-37)", "tl.load(c_ptr)"),
        "weights' scale left in dw": Mutant(
            "FP8Linear.wgrad", "c / self.w_scale.view(-1, 1)", "c * self.w_scale.view(-1, 1)"
        ),
    },
    "fp8 training": {
        "weights quantized in the first step only": Mutant(
            "TinyLlama.forward",
            "self.fp8_weights.update()",
            "vars(self).setdefault('once', []) or self.once.append(self.fp8_weights.update())",
        ),
        "transposed weights stale": Mutant(
            "FP8Weights.update", "layer.transpose()", "hasattr(layer, 'w_q_t') or layer.transpose()"
        ),
        "o_proj left in bf16": Mutant(
            "Attention.__init__",
            "projection(config, config.hidden_dim, config.hidden_dim)",
            "nn.Linear(config.hidden_dim, config.hidden_dim, bias=False)",
        ),
    },
}
ALL = [
    pytest.param(operation, mistake, marks=[multiplies_fp8] if operation.startswith("fp8") else [])
    for operation, mutants in MUTANTS.items()
    for mistake in mutants
]


@functools.cache
def tree():
    return ast.parse(SCRIPTS[3].read_text())


def find_function(module, name):
    """Return the node of a function, or of a method as "Class.method"."""
    node = module
    for part in name.split("."):
        named = [child for child in node.body if getattr(child, "name", None) == part]
        assert len(named) == 1, f"version 3 has {len(named)} definitions of {name}"
        (node,) = named
    return node


def parse(code):
    """Return the node of one expression, or else of one statement."""
    (node,) = ast.parse(code).body
    return node.value if isinstance(node, ast.Expr) else node


class Replace(ast.NodeTransformer):
    """Replace every node that reads as `code` does; count them."""

    def __init__(self, code, replacement):
        self.kind = ast.expr if isinstance(parse(code), ast.expr) else ast.stmt
        self.code = ast.unparse(parse(code))
        self.replacement = replacement
        self.count = 0

    def visit(self, node):
        if isinstance(node, self.kind) and ast.unparse(node) == self.code:
            self.count += 1
            return parse(self.replacement)
        return self.generic_visit(node)


def mutate(module, mutant):
    """Return the source of the module with that mistake."""
    module = copy.deepcopy(module)
    replace = Replace(mutant.code, mutant.replacement)
    replace.visit(find_function(module, mutant.function))
    assert replace.count == mutant.times, f"{mutant.code} stands {replace.count} times in {mutant.function}"
    return ast.unparse(ast.fix_missing_locations(module))


def load_source(source, folder):
    """Load a source text as a module; Triton reads the text again from the file."""
    path = folder / "mutant.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(f"mutant_{abs(hash(source))}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def check_fp8_operation(script, operation, device):
    with fp8_rounding():
        if operation == "fp8 training":
            check_fp8_training(script, device)
        for make in FP8_CASES.get(operation, {}).values():
            check(script, make(), torch.bfloat16, device)


def check_operation(script, operation, device):
    if operation.startswith("fp8"):
        check_fp8_operation(script, operation, device)
        return
    for dtype in DTYPES:
        if operation == "add_rms_norm":
            check_column_sums(script, device)
        for make in CASES.get(operation, {}).values():
            check(script, make(), dtype, device)
    for dtype in ALL_DTYPES if operation == "adamw" else ():
        check_adamw(script, dtype, device)
        if dtype != torch.bfloat16:  # PyTorch's scaler does not take it
            check_adamw(script, dtype, device, scaled=True)


def test_the_unchanged_script_passes(tmp_path, device):
    """So that a mutant fails for its mistake, and not for the way in which it is written and loaded."""
    script = load_source(ast.unparse(tree()), tmp_path)
    for cases in CASES.values():
        check(script, next(iter(cases.values()))(), torch.float32, device)
    check_adamw(script, torch.float32, device)


@multiplies_fp8
@pytest.mark.slow
def test_the_unchanged_script_passes_in_fp8(tmp_path, device):
    script = load_source(ast.unparse(tree()), tmp_path)
    for operation in (*FP8_CASES, "fp8 training"):
        check_operation(script, operation, device)


@pytest.mark.parametrize(("operation", "mistake"), ALL)
@pytest.mark.quick(5)
def test_mutant_is_caught(operation, mistake, tmp_path, device):
    mutant = load_source(mutate(tree(), MUTANTS[operation][mistake]), tmp_path)
    with pytest.raises(Wrong):
        check_operation(mutant, operation, device)


SAMPLE = """
class Sum:
    def add(self, a, b):
        return f((a  # the first
            + b), "+", x=a+b)
def add(a, b): return a + b
"""


def test_a_mutant_is_found_by_its_code_in_its_function_alone():
    source = mutate(ast.parse(SAMPLE), Mutant("Sum.add", "( a+b )", "a - b", times=2))
    assert "f(a - b, '+', x=a - b)" in source and source.endswith("return a + b")
    statement = mutate(ast.parse(SAMPLE), Mutant("add", "return a+b", "return None"))
    assert statement.endswith("return None") and "f(a + b" in statement


@pytest.mark.parametrize(
    ("mutant", "words"),
    [
        (Mutant("Sum.add", "a + b", "a"), "a + b stands 2 times in Sum.add"),
        (Mutant("add", "a - b", "a"), "a - b stands 0 times in add"),
        (Mutant("Sum.sub", "a + b", "a"), "0 definitions of Sum.sub"),
    ],
)
def test_a_mutant_without_its_place_is_no_mutant(mutant, words):
    with pytest.raises(AssertionError, match=re.escape(words)):
        mutate(ast.parse(SAMPLE), mutant)
