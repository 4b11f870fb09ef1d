"""Train Hugging Face's Llama like the four versions: as a good engineer would run it, so that a lead over it counts.

    python scripts/common/peers.py --preset small --use-amp --enable-torch-compile
    python scripts/common/peers.py --preset small --use-amp --enable-torch-compile --fp8 --fp8-recipe rowwise
    python scripts/common/peers.py --library liger --preset small --use-amp

Attention is the fused causal kernel without a mask tensor, AdamW is PyTorch's fused one, and the step runs in a graph.
Liger's kernels are those for RMSNorm, RoPE and SwiGLU; the loss stays PyTorch's, because Liger's reads a value back
from the GPU and cannot be captured.

This is version 1's script with a library's model, loss and optimizer in place of its own. Weights, batches, options,
the timed step, the graph, the printed summary and the metrics file are version 1's, so the numbers can be compared.
Exit status: as version 1's; 2 also if the library is not installed.
"""

import importlib
import pathlib
import sys

import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from common.versions import SCRIPTS, load_file

PACKAGES = {"transformers": ["transformers"], "liger": ["transformers", "liger_kernel.transformers"]}
LIGER = {"rope": True, "rms_norm": True, "swiglu": True, "cross_entropy": False, "fused_linear_cross_entropy": False}
FP8_RECIPES = ["tensorwise", "rowwise", "rowwise_with_gw_hp"]
ATTENTION = "causal_without_mask"  # the library makes no mask for an attention function whose name it does not know

# The library's names of modules -> version 1's; what is not listed is called the same.
CANONICAL = {
    "self_attn": "attention",
    "mlp": "feed_forward",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "feed_forward_norm",
}


def causal_attention(module, query, key, value, attention_mask, dropout=0.0, scaling=None, **options):
    """Compute the library's attention in one causal kernel: query [B, H, T, D], key and value [B, K, T, D].

    Left alone, the library gives SDPA a mask tensor when it is compiled or captured, which forbids the fastest kernel.
    """
    grouped = torch.is_autocast_enabled(query.device.type) or query.dtype != torch.float32
    if not grouped:  # in float32 only the slow math backend supports enable_gqa
        groups = query.shape[1] // key.shape[1]
        key = key.repeat_interleave(groups, dim=1)  # [B, H, T, D]
        value = value.repeat_interleave(groups, dim=1)  # [B, H, T, D]
    options = {"is_causal": True, "scale": scaling, "dropout_p": dropout, "enable_gqa": grouped}
    context = F.scaled_dot_product_attention(query, key, value, attn_mask=attention_mask, **options)
    return context.transpose(1, 2).contiguous(), None  # [B, T, H, D]


class LibraryLlama(nn.Module):
    """Map tokens and labels [B, T] to the loss with LlamaForCausalLM; parameters carry version 1's names."""

    def __init__(self, options):
        super().__init__()
        from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM

        if options.library == "liger":
            from liger_kernel.transformers import apply_liger_kernel_to_llama

            apply_liger_kernel_to_llama(**LIGER)
        AttentionInterface.register(ATTENTION, causal_attention)
        sizes = {"vocab_size": options.vocab_size, "hidden_size": options.hidden_dim}
        sizes |= {"intermediate_size": options.intermediate_dim, "num_hidden_layers": options.num_layers}
        sizes |= {"num_attention_heads": options.num_heads, "num_key_value_heads": options.num_kv_heads}
        sizes |= {"max_position_embeddings": options.seq_len, "rms_norm_eps": options.norm_eps}
        settings = {"tie_word_embeddings": True, "attn_implementation": ATTENTION, "bos_token_id": None}
        self.llama = LlamaForCausalLM(LlamaConfig(**sizes, **settings, eos_token_id=None))
        if options.fp8:
            from torchao.float8 import Float8LinearConfig, convert_to_float8_training

            recipe = Float8LinearConfig.from_recipe_name(options.fp8_recipe)
            convert_to_float8_training(self.llama.model, config=recipe)  # not the head, as in version 3
        if options.enable_torch_compile:
            self.compile(mode=options.compile_mode)

    def named_parameters(self, *args, **kwargs):
        for name, parameter in super().named_parameters(*args, **kwargs):
            parts = name.removeprefix("llama.model.").split(".")
            yield ".".join(CANONICAL.get(part, part) for part in parts), parameter

    def forward(self, tokens, labels):
        # Labels are the next tokens already: shift_labels tells the library's loss not to shift them once more.
        return self.llama(input_ids=tokens, labels=labels, shift_labels=labels, use_cache=False).loss


def compute_loss(model, tokens, labels, options):
    """Return the mean cross-entropy of predicting labels [B, T] from tokens [B, T], computed by the library."""
    with torch.autocast(tokens.device.type, options.dtype, enabled=options.use_amp):
        return model(tokens, labels)


def make_optimizer(model, options):
    graph = options.graph and options.on_gpu
    return torch.optim.AdamW(model.parameters(), lr=options.learning_rate, capturable=graph, fused=True)


def add_version_options(add):
    add("--library", choices=PACKAGES, default="transformers", help="whose model (%(default)s)")
    add("--enable-torch-compile", action="store_true", help="compile model and loss")
    modes = ["default", "max-autotune-no-cudagraphs"]
    add("--compile-mode", choices=modes, default="default", help="used by --enable-torch-compile (%(default)s)")
    add("--fp8", action="store_true", help="torchao's float8 linear layers, with --use-amp")
    add("--fp8-recipe", choices=FP8_RECIPES, default="tensorwise", help="torchao's, used by --fp8 (%(default)s)")


def complete_version_options(options, user_error):
    """Check these options and import the packages; return parts: what the peer uses, in words."""
    if (options.library == "liger" or options.fp8) and not options.on_gpu:
        raise user_error(f"{'--fp8' if options.fp8 else '--library liger'} needs a GPU, got {options.device}")
    if options.fp8 and not options.use_amp:
        raise user_error("--fp8 needs --use-amp: the other operations run in 16 bits")
    names = []
    packages = [*PACKAGES[options.library]]
    if options.fp8:
        packages.append("torchao")
    for package in packages:
        name = package.split(".")[0]
        try:
            importlib.import_module(package)
        except ImportError as error:
            raise user_error(f"{name.replace('_', '-')} cannot be imported ({error}): install it") from None
        names.append(f"{name} {getattr(sys.modules[name], '__version__', '')}".strip())
    parts = [f"{' with '.join(names)}: causal SDPA", "fused AdamW"]
    if options.enable_torch_compile:
        parts.append(f"torch.compile ({options.compile_mode})")
    if options.fp8:
        parts.append(f"fp8 ({options.fp8_recipe})")
    return {"parts": ", ".join(parts)}


def peer_script():
    """Return a module of version 1's script of its own, with this file's model, loss, optimizer and options."""
    script = load_file(SCRIPTS[1], "tiny_llama_peer")
    build_parser = script.build_parser

    def described_parser():
        parser = build_parser()
        parser.prog, parser.description, parser.epilog = "peers.py", __doc__.split("\n")[0], None
        return parser

    script.__file__ = __file__  # the commit and the hash that the metrics name are this file's
    script.VERSION, script.GRAPH_BY_DEFAULT, script.DETERMINISTIC_BY_DEFAULT = "peer", True, False
    script.build_parser = described_parser
    script.make_model = LibraryLlama
    script.compute_loss, script.make_optimizer = compute_loss, make_optimizer
    script.add_version_options = add_version_options
    script.complete_version_options = lambda options: complete_version_options(options, script.UserError)
    return script


if __name__ == "__main__":
    sys.exit(peer_script().main())
