"""A test of the tests: deliberately wrong kernels, each of which the cases of its operation must catch.

A mutant is version 3's source with one text replaced. The replaced text must stand there as often as the mutant says,
so that a mutant cannot quietly become the right kernel when the script changes: then it wants a new text here.
"""

import importlib.util

import pytest
import torch

from common.versions import SCRIPTS
from kernel_cases import (
    ALL_DTYPES,
    CASES,
    DTYPES,
    Wrong,
    case_of,
    check,
    check_adamw,
    check_adamw_with_scaler,
    check_column_sums,
)

pytestmark = [
    pytest.mark.skipif(
        torch.cuda.is_available(), reason="a wrong kernel can take a GPU down with it; the interpreter shows the same"
    ),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # NumPy's, of what a mutant computes
]

# operation -> mistake -> text, its replacement, and how often it stands in the script where that is not once
MUTANTS = {
    "add_rms_norm": {
        "dx without the part along x": (
            "dx = rstd * (g - x * (rstd * rstd * tl.sum(g * x, 1)[:, None] / C))",
            "dx = rstd * g",
        ),
        "epsilon forgotten": ("tl.rsqrt(tl.sum(x * x, 1) / C + eps)", "tl.rsqrt(tl.sum(x * x, 1) / C)"),
        "mean over the tile": ("tl.rsqrt(tl.sum(x * x, 1) / C + eps)", "tl.rsqrt(tl.sum(x * x, 1) / BLOCK + eps)"),
        "rstd in 16 bits": ("x * rstd[:, None] * w", "x * rstd[:, None].to(tl.float16).to(tl.float32) * w"),
        "weight not applied": ("(x * rstd[:, None] * w[None, :])", "(x * rstd[:, None])"),
        "sum not stored": ("tl.store(x_ptr + offsets, x, mask=inside)", "x = x"),
        "dw of the last rows alone": ("dw += dy * x * rstd", "dw = dy * x * rstd"),
        "programs walk the same rows": ("rows, tl.num_programs(0) * ROWS):", "rows, ROWS):"),
        "gradient of the sum forgotten": ("dx += tl.load(dresidual_ptr", "dx += 0 * tl.load(dresidual_ptr"),
        "gradient of the branch forgotten": (
            "return dx, dx if ctx.added else None,",
            "return dx, torch.zeros_like(dx) if ctx.added else None,",
        ),
        "row stored past its end": (
            "y_ptr.dtype.element_ty), mask=inside)\n\n\n@triton.jit\ndef rmsnorm_backward",
            "y_ptr.dtype.element_ty), mask=row[:, None] < rows)\n\n\n@triton.jit\ndef rmsnorm_backward",
        ),
        "shares of dw in 16 bits": (
            "shares = torch.empty(programs, C, dtype=torch.float32",
            "shares = torch.empty(programs, C, dtype=torch.float16",
        ),
        "first shares alone": ("for first in range(0, rows, ROWS):", "for first in range(0, ROWS, ROWS):"),
        "gradient written over its input": ("dx = torch.empty_like(x)\n        shares", "dx = dy\n        shares"),
        "saved sum overwritten": ("dx = torch.empty_like(x)\n        shares", "dx = x\n        shares"),
    },
    "rope": {
        "backward turns forwards": ("ctx.turned, inverse=True)", "ctx.turned, inverse=False)"),
        "positions run on over the batch": ("angle = (token % T) * HALF + pair", "angle = token * HALF + pair"),
        "position off by one": ("angle = (token % T) * HALF + pair", "angle = ((token + 1) % T) * HALF + pair"),
        "first value head turned too": ("tl.where(head < turned, sin, 0.0)", "tl.where(head <= turned, sin, 0.0)"),
        "wrong sign": ("(x1 * cos - x2 * sin)", "(x1 * cos + x2 * sin)"),
        "neighbours as pairs": ("tl.load(x_ptr + offsets + HALF, mask", "tl.load(x_ptr + offsets + 1, mask"),
        "last tokens not launched": ('(triton.cdiv(B * T, tile["ROWS"]),', '(max(1, B * T // tile["ROWS"]),'),
        "other heads not copied": ("inside = known & (head < heads)", "inside = known & (head < turned)"),
        "in place": ("y = torch.empty_like(x)\n    pairs", "y = x\n    pairs"),
    },
    "packed_swiglu": {
        "da without the sigmoid's slope": ("dy * b * sigmoid * (1 + a * (1 - sigmoid))", "dy * b * sigmoid"),
        "db with the sigmoid alone": ("(dy * a * sigmoid).to(", "(dy * sigmoid).to("),
        "gate and up exchanged": ("(a * tl.sigmoid(a) * b).to", "(b * tl.sigmoid(b) * a).to"),
        "da stored in both halves": ("(dy * a * sigmoid).to(dx_ptr", "da.to(dx_ptr"),
        "last rows not launched": (
            'return (triton.cdiv(rows, tile["ROWS"]), triton.cdiv(width',
            'return (max(1, rows // tile["ROWS"]), triton.cdiv(width',
        ),
        "last columns not launched": (
            'tile["ROWS"]), triton.cdiv(width, tile["BLOCK"])), tile',
            'tile["ROWS"]), max(1, width // tile["BLOCK"])), tile',
        ),
        "row runs into the next": (
            "inside = (row < rows) & (column < F)",
            "inside = (row < rows) & (column < 2 * F)",
            2,
        ),
        "dx over x": ("    dx = torch.empty_like(x)\n    grid, tile = swiglu", "    dx = x\n    grid, tile = swiglu"),
    },
    "flash_attention": {
        "token does not see itself": (
            "tl.arange(0, QUERIES)[:, None] >= first_key",
            "tl.arange(0, QUERIES)[:, None] > first_key",
        ),
        "sees the next token": (
            "tl.arange(0, QUERIES)[:, None] >= first_key",
            "tl.arange(0, QUERIES)[:, None] + 1 >= first_key",
        ),
        "running sums not rescaled": ("v, o * shrink[:, None],", "v, o,"),
        "sum of weights not rescaled": ("total * shrink + tl.sum(P, 1)", "total + tl.sum(P, 1)"),
        "sum of weights in 16 bits": (
            "total * shrink + tl.sum(P, 1)",
            "total * shrink + tl.sum(P.to(tl.float16).to(tl.float32), 1)",
        ),
        "weights in 16 bits": ("tl.dot(P.to(v.dtype), v,", "tl.dot(P.to(tl.float16).to(v.dtype), v,"),
        "scale to the wrong base": ("shape, math.log2(math.e) / math.sqrt(D)", "shape, 1 / math.sqrt(D)"),
        "logarithms of two bases": ("highest * scale + tl.log2(total)", "highest * scale + tl.log(total)"),
        "earlier keys skipped": (
            "for start in range(0, first, BLOCK_K):",
            "for start in range(0, first - BLOCK_K, BLOCK_K):",
            2,
        ),
        "wrong key head": ("(H + h // (H // K)) * D", "(H + h % K) * D", 2),
        "dq not scaled": ("dq *= scale * 0.6931471805599453", "dq *= 1.0"),
        "dk not scaled": ("dk *= scale * 0.6931471805599453", "dk *= 1.0"),
        "delta forgotten in dq": ("input_precision=PRECISION) - delta[:, None])", "input_precision=PRECISION))"),
        "delta forgotten in dk": ("input_precision=PRECISION) - delta[None, :])", "input_precision=PRECISION))"),
        "delta without do": ("delta = tl.sum(do.to(tl.float32) * o.to", "delta = tl.sum(o.to(tl.float32) * o.to"),
        "dk and dv from one query head": (
            "for h in range(kv * (H // K), (kv + 1) * (H // K)):",
            "for h in range(kv * (H // K), kv * (H // K) + 1):",
        ),
        "diagonal missed in dk": ("[:, None] <= row[None, :], P, 0.0)", "[:, None] < row[None, :], P, 0.0)"),
        "later queries skipped in dk": (
            "for start in range(first + BLOCK_K, T, BLOCK_Q):",
            "for start in range(first + BLOCK_K, T - BLOCK_Q, BLOCK_Q):",
        ),
        "first batch's gradient for all": ("o_offset = b * T * stride_o + h * D", "o_offset = h * D"),
        "another head's statistics": ("statistics = (b * H + h) * T", "statistics = (b * K + h) * T"),
        "row past the end stored": (
            "tile.to(ptr.dtype.element_ty), mask=first + row < T)",
            "tile.to(ptr.dtype.element_ty), mask=first + row < T + 1)",
        ),
        "rows past the end read": ("return tl.load(tile, mask=first + row < T, other=0.0)", "return tl.load(tile)"),
    },
    "rotary_attention": {
        "turned forwards once more": (
            "tl.store(pointers, (x1 * cos + x2 * sin)",
            "tl.store(pointers, (x1 * cos - x2 * sin)",
        ),
        "second half turned forwards": ("(x2 * cos - x1 * sin).to(ptr", "(x2 * cos + x1 * sin).to(ptr"),
        "halves exchanged": ("x1, x2 = tl.split(", "x2, x1 = tl.split("),
        "every tile turned as the first": ("tl.load(cos_ptr + row * HALF", "tl.load(cos_ptr + (row - first) * HALF"),
        "row past the end stored": (
            "(x1 * cos + x2 * sin).to(ptr.dtype.element_ty), mask=row < T)",
            "(x1 * cos + x2 * sin).to(ptr.dtype.element_ty), mask=row < T + 1)",
        ),
        "dq not turned back": (
            "store_turned_back(dq_ptr, dq, cos_ptr, sin_ptr, first, T, stride_dt, BLOCK_Q, D)",
            "store_tile(dq_ptr, dq, first, T, stride_dt, BLOCK_Q, D)",
        ),
        "dk not turned back": (
            "store_turned_back(dk_ptr, dk, cos_ptr, sin_ptr, first, T, stride_dt, BLOCK_K, D)",
            "store_tile(dk_ptr, dk, first, T, stride_dt, BLOCK_K, D)",
        ),
        "turned back twice": ("ctx.K, cos, sin), None, None, None, None", "ctx.K, cos, -sin), None, None, None, None"),
        "values turned too": ("turn(qkv, cos, sin, H + K, inverse", "turn(qkv, cos, sin, H + 2 * K, inverse"),
        "nothing turned before": ("attention_forward(turned, H, K)", "attention_forward(qkv, H, K)"),
    },
    "cross_entropy": {
        "label's own term forgotten": ("tl.where(column == label[:, None], 1.0, 0.0)", "0.0"),
        "mean not taken": ("(tl.load(dloss_ptr) / rows)", "tl.load(dloss_ptr)"),
        "incoming gradient ignored": ("(tl.load(dloss_ptr) / rows)", "(1.0 / rows)"),
        "past the vocabulary counts as zero": ('x = tl.where(column < V, x, -float("inf"))', "x = x"),
        "running sum not rescaled": ("total = total * tl.exp(highest - raised) +", "total = total +"),
        "maximum of the last tile alone": ("raised = tl.maximum(highest, tl.max(x, 1))", "raised = tl.max(x, 1)"),
        "rounded to the logits' size": (
            "tl.exp((x - highest[:, None]) - log_total[:, None])",
            "tl.exp(x - (highest + log_total)[:, None])",
        ),
        "gradient of the first tile alone": (
            'grid = (triton.cdiv(rows, tile["ROWS"]), triton.cdiv(V, tile["BLOCK"]))',
            'grid = (triton.cdiv(rows, tile["ROWS"]), 1)',
        ),
        "last rows not launched": (
            'grid = (triton.cdiv(rows, tile["ROWS"]),)',
            'grid = (max(1, rows // tile["ROWS"]),)',
        ),
    },
    "adamw": {
        "first moment not corrected": ("m_hat = m / (1 - tl.load(power_ptr)).to(tl.float32)", "m_hat = m"),
        "second moment not corrected": ("v_hat = v / (1 - tl.load(power_ptr + 1)).to(tl.float32)", "v_hat = v"),
        "weight not decayed": ("w = keep * load_weight(", "w = load_weight("),
        "epsilon under the root": ("(tl.sqrt(v_hat) + eps)", "tl.sqrt(v_hat + eps)"),
        "overflow not seen": ("tl.where(tl.load(found_inf_ptr) == 0.0, count, 0)", "count + 0 * tl.load(row + 5)"),
        "overflowed step counted": ("1 - found_inf.reshape(())", "1"),
        "gradient not unscaled": ("g = g / tl.load(grad_scale_ptr)", "g = g"),
        "float16 copy of another": ("w.to(tl.float16), shift_ptr", "(w * 0.999).to(tl.float16), shift_ptr"),
        "bfloat16 copy cut off": ("tl.where(w == w, (bits + 0x8000) >> 16, NAN)", "bits >> 16"),
        "rest without its sign": ("(copy << 16) + rest)", "(copy << 16) + (rest & 0xFFFF))"),
        "old rest": ("(bits - (upper << 16)).to(tl.int16)", "(bits - bits).to(tl.int16)"),
        "last elements not launched": ("triton.cdiv(p.numel(), self.BLOCK)", "max(1, p.numel() // self.BLOCK)"),
        "an element past the end": ("inside = offsets < count\n", "inside = offsets < count + 1\n"),
        "moment not stored": ("tl.store(v_ptr, v, mask=inside)", "v = v"),
    },
}
ALL = [(operation, mistake) for operation, mutants in MUTANTS.items() for mistake in mutants]


def load_source(source, folder):
    """The module of a source text; Triton reads the text again from the file."""
    path = folder / "mutant.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(f"mutant_{abs(hash(source))}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def check_operation(script, operation, device, dtypes=ALL_DTYPES):
    for dtype in dtypes:
        if operation == "adamw":
            check_adamw(script.FusedAdamW, dtype, device)
            if dtype != torch.bfloat16:  # PyTorch's scaler does not take it
                check_adamw_with_scaler(script.FusedAdamW, dtype, device)
        elif dtype in DTYPES:
            if operation == "add_rms_norm":
                check_column_sums(script, device)
            for name in CASES[operation][1]:
                check(script, case_of(operation, name), dtype, device)


@pytest.mark.parametrize("operation", MUTANTS)
def test_the_unchanged_script_passes(operation, tmp_path, device):
    """So that a mutant fails for its mistake, and not for the way in which it is loaded."""
    check_operation(load_source(SCRIPTS[3].read_text(), tmp_path), operation, device, DTYPES[:1])


@pytest.mark.parametrize(("operation", "mistake"), ALL)
def test_mutant_is_caught(operation, mistake, tmp_path, device):
    text, replacement, *times = MUTANTS[operation][mistake]
    source = SCRIPTS[3].read_text()
    assert source.count(text) == (times or [1])[0], f"{text!r} stands {source.count(text)} times in the script"
    mutant = load_source(source.replace(text, replacement), tmp_path)
    with pytest.raises(Wrong):
        check_operation(mutant, operation, device)
