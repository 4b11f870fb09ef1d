"""A test of the tests: deliberately wrong kernels, each of which the cases of its operation must catch.

A mutant is version 3's source with one text replaced. The replaced text must stand there as often as the mutant says,
so that a mutant cannot quietly become the right kernel when the script changes: then it wants a new text here.
"""

import importlib.util

import pytest
import torch

from common.versions import SCRIPTS
from kernel_cases import ALL_DTYPES, CASES, DTYPES, Wrong, check, check_adamw, check_column_sums

pytestmark = [
    pytest.mark.skipif(
        torch.cuda.is_available(), reason="a wrong kernel can take a GPU down with it; the interpreter shows the same"
    ),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # NumPy's, of what a mutant computes
]

# Mistakes that not every case shows: operation -> mistake -> text, its replacement, and how often it stands in the
# script where that is not once.
MUTANTS = {
    "add_rms_norm": {
        "epsilon forgotten": ("tl.rsqrt(tl.sum(x * x, 1) / C + eps)", "tl.rsqrt(tl.sum(x * x, 1) / C)"),
        "mean over the tile": ("tl.rsqrt(tl.sum(x * x, 1) / C + eps)", "tl.rsqrt(tl.sum(x * x, 1) / BLOCK + eps)"),
        "rstd in 16 bits": ("x * rstd[:, None] * w", "x * rstd[:, None].to(tl.float16).to(tl.float32) * w"),
        "dw of the last rows alone": ("dw += dy * x * rstd", "dw = dy * x * rstd"),
        "programs walk the same rows": ("rows, tl.num_programs(0) * ROWS):", "rows, ROWS):"),
        "row stored past its end": (
            "mask)\n\n\n@triton.jit\ndef rmsnorm_backward",
            "row[:, None] < rows)\n\n\n@triton.jit\ndef rmsnorm_backward",
        ),
        "partial sums of dw in 16 bits": ("(programs, C, dtype=torch.float32", "(programs, C, dtype=torch.float16"),
        "first partial sums alone": ("for first in range(0, rows, ROWS):", "for first in range(0, ROWS, ROWS):"),
        "gradient written over its input": ("dresidual, sums = torch.empty_like(x),", "dresidual, sums = dy,"),
        "saved sum overwritten": ("dresidual, sums = torch.empty_like(x),", "dresidual, sums = x,"),
    },
    "rope": {
        "positions run on over the batch": ("angle = (row // heads % T) * HALF", "angle = (row // heads) * HALF"),
        "position off by one": ("angle = (row // heads % T) * HALF", "angle = ((row // heads + 1) % T) * HALF"),
        "first value head rotated too": ("(row % heads < rotated_heads)", "(row % heads <= rotated_heads)"),
        "last rows not launched": ('[(triton.cdiv(rows, tile["ROWS"]), ', '[(max(1, rows // tile["ROWS"]), '),
        "other heads not copied": (" rows) & (pair < HALF)", " rows) & (pair < HALF) & (row % heads < rotated_heads)"),
        "in place": ("y, sizes = torch.empty_like(x), (T,", "y, sizes = x, (T,"),
    },
    "packed_swiglu": {
        "last rows not launched": ('[(triton.cdiv(rows, tile["ROWS"]), ', '[(max(1, rows // tile["ROWS"]), '),
        "last columns not launched": ('triton.cdiv(columns, tile["BLOCK"]))](', 'max(1, columns // tile["BLOCK"]))]('),
        "row runs into the next": (
            "))[None, :]\n    mask = (row < rows) & (column <",
            "))[None, :]\n    mask = (row < rows) & (column < 2 *",
            2,
        ),
        "dx over x": ("torch.empty_like(x)\n        launch_tiles(", "x\n        launch_tiles("),
    },
    "flash_attention": {
        "token does not see itself": ("S = tl.where(query[:, None] >= start", "S = tl.where(query[:, None] > start"),
        "sees the next token": ("S = tl.where(query[:, None] >= start", "S = tl.where(query[:, None] + 1 >= start"),
        "sum of values not rescaled": ("v, o * alpha[:, None],", "v, o,"),
        "sum of weights not rescaled": ("l * alpha + tl.sum(P, 1)", "l + tl.sum(P, 1)"),
        "sum of weights in 16 bits": ("* alpha + tl.sum(P, 1)", "* alpha + tl.sum(P.to(tl.float16).to(tl.float32), 1)"),
        "weights in 16 bits": ("tl.dot(P.to(v.dtype), v,", "tl.dot(P.to(tl.float16).to(v.dtype), v,"),
        "earlier keys skipped": ("* BLOCK_Q, T), BLOCK_K):", "* BLOCK_Q, T) - (1 - DIAGONAL) * BLOCK_K, BLOCK_K):", 2),
        "wrong key head": ("(H + h // (H // K)) * D", "(H + h % K) * D", 2),
        "dk and dv from one query head": ("kv * (H // K), (kv + 1) * (H // K)):", "kv * (H // K), kv * (H // K) + 1):"),
        "diagonal missed in dq": ("P = tl.where(query[:, None] >= start", "P = tl.where(query[:, None] > start"),
        "diagonal missed in dk": ("key[:, None] <= query[None, :], P", "key[:, None] < query[None, :], P"),
        "later queries skipped in dk": ("T if BELOW else min(first", "T - BLOCK_Q if BELOW else min(first"),
        "first batch's gradient for all": (", lse_offset = (b * T * H + h) * D,", ", lse_offset = h * D,"),
        "another head's statistics": ("(b * T * H + h) * D, (b * H + h) * T", "(b * T * H + h) * D, (b * K + h) * T"),
        "row past the end stored": (".element_ty), mask=first + row < T)", ".element_ty), mask=first + row < T + 1)"),
        "rows past the end read": (" tl.load(pointers, mask=first + row < T, other=0.0)", " tl.load(pointers)"),
    },
    "rotary_attention": {
        "every tile rotated as the first": ("load_tile(cos_ptr, first, T,", "load_tile(cos_ptr, 0, T,"),
        "row past the end stored": (".element_ty), mask=first + row < T)", ".element_ty), mask=first + row < T + 1)"),
        "dq not unrotated": ("dq * (scale * 0.6931471805599453), cos_ptr", "dq * (scale * 0.6931471805599453), None"),
        "dk not unrotated": ("dk * (scale * 0.6931471805599453), cos_ptr", "dk * (scale * 0.6931471805599453), None"),
        "values rotated too": ("(qkv, cos, sin, H + K)\n        B, T,", "(qkv, cos, sin, H + 2 * K)\n        B, T,"),
    },
    "cross_entropy": {
        "past the vocabulary counts as zero": ('x = tl.where(column < V, x, -float("inf"))', "x = x"),
        "running sum not rescaled": ("l = l * tl.exp(m - m_new) +", "l = l +"),
        "maximum of the last tile alone": ("m_new = tl.maximum(m, tl.max(x, 1))", "m_new = tl.max(x, 1)"),
        "rounded to the logits' size": (".exp((x - m[:, None]) - log_l[:, None])", ".exp(x - (m + log_l)[:, None])"),
        "gradient of the first tile alone": ('triton.cdiv(columns, tile["BLOCK"]))](', "1)]("),
        "last gradients not launched": ('[(triton.cdiv(rows, tile["ROWS"]), ', '[(max(1, rows // tile["ROWS"]), '),
        "last rows not launched": (' = (triton.cdiv(rows, tile["ROWS"]),)', ' = (max(1, rows // tile["ROWS"]),)'),
    },
    "adamw": {
        "epsilon under the root": ("(tl.sqrt(v_hat) + eps)", "tl.sqrt(v_hat + eps)"),
        "overflow not seen": ("tl.where(tl.load(found_inf_ptr) == 0.0, count, 0)", "count + 0 * tl.load(row + 5)"),
        "overflowed step counted": ("1 - found_inf.reshape(())", "1"),
        "gradient not unscaled": ("g = g / tl.load(grad_scale_ptr)", "g = g"),
        "float16 copy of another": ("w.to(dtype), mask=mask)", "(w * 0.999).to(dtype), mask=mask)"),
        "bfloat16 copy cut off": ("tl.where(w == w, (bits + 0x8000) >> 16, 0x7FC0)", "bits >> 16"),
        "low bits without their sign": ("((copy << 16) + low_bits)", "((copy << 16) + (low_bits & 0xFFFF))"),
        "low bits lost": ("(bits - (upper << 16)).to(tl.int16)", "(bits - bits).to(tl.int16)"),
        "last elements not launched": ("triton.cdiv(p.numel(), self.BLOCK)", "max(1, p.numel() // self.BLOCK)"),
        "an element past the end": ("mask = offsets < count\n", "mask = offsets < count + 1\n"),
    },
}
ALL = [(operation, mistake) for operation, mutants in MUTANTS.items() for mistake in mutants]


def load_source(source, folder):
    """Load a source text as a module; Triton reads the text again from the file."""
    path = folder / "mutant.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(f"mutant_{abs(hash(source))}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def check_operation(script, operation, device):
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
    """So that a mutant fails for its mistake, and not for the way in which it is loaded."""
    script = load_source(SCRIPTS[3].read_text(), tmp_path)
    for cases in CASES.values():
        check(script, next(iter(cases.values()))(), torch.float32, device)
    check_adamw(script, torch.float32, device)


@pytest.mark.parametrize(("operation", "mistake"), ALL)
def test_mutant_is_caught(operation, mistake, tmp_path, device):
    text, replacement, *times = MUTANTS[operation][mistake]
    source = SCRIPTS[3].read_text()
    assert source.count(text) == (times or [1])[0], f"{text!r} stands {source.count(text)} times in the script"
    mutant = load_source(source.replace(text, replacement), tmp_path)
    with pytest.raises(Wrong):
        check_operation(mutant, operation, device)
