#!/usr/bin/env python3
"""Stage 2: right results, slow kernels. Version 3 with query, key and value laid out as [B, T, D, heads] in memory.

    python v3_stage2_slow_performance.py                # options of tiny_llama_v3.py go through

The elements of a head lie as many elements apart as there are heads, so that a tile's row is spread over many cache
lines, of which it uses a few bytes each.
"""

import sys

from stage_tools import device_ms, load_v3, run_stage

TITLE = "stage 2: the loss is right; where does the time go?"
SECTION = ("def load_tile", "def attention_tiles")
# A head starts one element after the one before it, and its elements lie (stride of a token) / D apart.
STRIDED = {
    r"tl\.arange\(0, D\)\[None, :\]": "tl.arange(0, D)[None, :] * (stride // D)",
    r"\bh \* D\b": "h",
    r"\) \* D\b": ")",
    r"\bK \* D\b": "K",
}


def strided(qkv):
    """qkv [B, T, heads, D] in a tensor of that shape that holds [B, T, D, heads]."""
    return qkv.transpose(2, 3).contiguous().view(qkv.shape)


def load():
    v3 = load_v3(SECTION, STRIDED)
    kernel = v3.FlashAttentionFunction.apply

    def flash_attention(qkv, H, K):
        B, T, _, D = qkv.shape
        return kernel(strided(qkv), H, K).view(B, T, D, H).transpose(2, 3)

    def rotary_attention(qkv, cos, sin, H, K):
        return flash_attention(v3.rope(qkv, cos, sin, H + K), H, K)

    v3.flash_attention, v3.rotary_attention = flash_attention, rotary_attention
    return v3


def attention_ms(v3, trainer):
    """Median milliseconds of one layer's attention forward on random qkv: this kernel alone, and version 3's."""
    options, config, dtype = trainer.options, trainer.config, next(trainer.model.layers.parameters()).dtype
    H, K = config.num_heads, config.num_kv_heads
    shape = (options.batch_size, options.seq_len, H + 2 * K, config.head_dim)
    qkv = v3.torch.randn(shape, device=trainer.device, dtype=dtype)

    with v3.torch.no_grad():
        return [
            device_ms(
                trainer.device, lambda module=module, given=given: module.FlashAttentionFunction.apply(given, H, K)
            )
            for module, given in ((v3, strided(qkv)), (load_v3(), qkv))
        ]


def report(v3, trainer, steps, summary):
    config = trainer.config
    heads = config.num_heads + 2 * config.num_kv_heads
    size = next(trainer.model.parameters()).element_size()
    yield f"neighbours among the {config.head_dim} elements of a head lie {heads * size} bytes apart instead of {size}"
    yield f"loss {summary['final_loss']:.4f}: that of stage 5, for the results are right"
    if trainer.device.type == "cpu":
        yield "how much slower the attention kernels are needs a GPU: the interpreter does not know cache lines"
    else:
        slow, right = attention_ms(v3, trainer)
        yield f"attention forward of a layer: {slow:.4f} ms, and {right:.4f} ms where the elements are neighbours"
        yield "compare the attention kernels and the copies of stage2_profile.csv and stage5_profile.csv"


if __name__ == "__main__":
    sys.exit(run_stage(load(), TITLE, report))
