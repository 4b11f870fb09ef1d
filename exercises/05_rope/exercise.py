"""Exercise 05: rotary embedding and its inverse."""

import triton
import triton.language as tl

TOKENS, HEADS = 4, 2


@triton.jit
def rope_kernel(
    x_ptr, y_ptr, cos_ptr, sin_ptr, tokens, T, heads, turned, HALF,
    INVERSE: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """One program turns TOKENS x HEADS heads of x [tokens, heads, 2 · HALF]; heads from `turned` on are copied."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)[:, None, None]
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[None, :, None]
    pair = tl.arange(0, PAIRS)[None, None, :]
    angle = (token % T) * HALF + pair
    known = (token < tokens) & (pair < HALF)
    cos = tl.load(cos_ptr + angle, mask=known, other=0.0)
    sin = tl.load(sin_ptr + angle, mask=known, other=0.0)
    # TODO: turn pair (x1, x2) of every head, by the opposite angle where INVERSE; copy heads from
    # `turned` on; `known` and `head` are tiles that broadcast to [TOKENS, HEADS, PAIRS]
    # end of TODO


def run(x, dy, cos, sin, turned, y, dx):
    """y: the first `turned` heads of x [B, T, heads, D] turned by cos, sin [T, D/2]; dx: its gradient for dy."""
    B, T, heads, D = x.shape
    grid = (triton.cdiv(B * T, TOKENS), triton.cdiv(heads, HEADS))
    sizes = (B * T, T, heads, turned, D // 2)
    pairs = triton.next_power_of_2(D // 2)
    rope_kernel[grid](x, y, cos, sin, *sizes, False, TOKENS, HEADS, pairs)
    rope_kernel[grid](dy, dx, cos, sin, *sizes, True, TOKENS, HEADS, pairs)
